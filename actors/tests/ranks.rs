//! Instances of several ranks hand pages over for real: heads and layers are cut, pages of
//! different sizes and orders meet, windows and rows go with them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use kvlane_actors::{
    AttachRequest, ChunkRequest, DecodeHandle, DecodeWorker, EngineChoice, LendRequest, Pools,
    PrefillHandle, PrefillWorker, Ready, Takers, WorkerConfig,
};
use kvlane_proto::layout::{Coordinates, Dtype, KvKind, Order};
use kvlane_proto::plan::sources;
use kvlane_proto::{BlockList, ErrorKind, Identity, Layout, Outcome, Role, RoomId, Span};
use kvlane_transport::engine::tcp::TcpConfig;
use kvlane_transport::quic::Security;

const BLOCKS: u32 = 64;
const DEADLINE: Duration = Duration::from_secs(30);
const CANARY: u8 = 0xc5;

/// How one side keeps the model: main layers, layers with a window, and a state of one row.
#[derive(Clone, Copy)]
struct Shape {
    tp: u32,
    pp: u32,
    page_tokens: u32,
    order: Order,
    kind: KvKind,
}

impl Shape {
    fn ranks(self) -> Vec<Vec<Layout>> {
        let each = (0..self.pp).flat_map(|pp| (0..self.tp).map(move |tp| (tp, pp)));
        each.map(|(tp, pp)| {
            let at = Coordinates { tp: (tp, self.tp), pp: (pp, self.pp), ..Coordinates::SINGLE };
            let layout = |kind, page_tokens, window_tokens, heads: u32, dim| Layout {
                model: "test".into(),
                layers: 4 / self.pp,
                first_layer: pp * 4 / self.pp,
                kv_heads: (heads / self.tp).max(1),
                kv_heads_total: heads,
                head_dim: dim,
                dtype: Dtype::Bf16,
                page_tokens,
                window_tokens,
                order: self.order,
                kind,
                at,
            };
            vec![
                layout(self.kind, self.page_tokens, 0, 4, 8),
                layout(self.kind, self.page_tokens, 24, 4, 8),
                layout(KvKind::Rows { rows: 2 }, 1, 0, 2, 16),
            ]
        })
        .collect()
    }
}

/// The byte of an element, by its place in the model and the prompt.
fn byte(pool: usize, layer: u32, slab: u32, head: u32, token: u32, at: u32) -> u8 {
    let parts = [pool as u32 + 1, layer, slab, head, token, at];
    let hash = parts.iter().fold(17u32, |h, &p| (h ^ p).wrapping_mul(0x0100_0193).rotate_left(7));
    // Never the canary.
    (hash % 197) as u8
}

/// Visits every byte of a block of every layer: its model place and its address.
fn each_byte(pools: &Pools, pool: usize, place: u32, id: u32, mut f: impl FnMut(u32, u8, u64)) {
    let (l, map) = (&pools.layouts[pool], &pools.maps[pool]);
    let row = l.row_bytes();
    for layer in 0..l.layers {
        for slab in 0..l.kind.slabs() {
            let page = map.slab_address[(layer * l.kind.slabs() + slab) as usize]
                + u64::from(id) * map.block_stride_bytes;
            for head in 0..l.kv_heads {
                for t in 0..l.page_tokens {
                    let at = match l.order {
                        Order::Nhd => (t * l.kv_heads + head) * row,
                        Order::Hnd => (head * l.page_tokens + t) * row,
                    };
                    let token = place * l.page_tokens + t;
                    for i in 0..row {
                        let (layer, head) = (l.first_layer + layer, l.heads().first + head);
                        let value = byte(pool, layer, slab, head, token, i);
                        f(token, value, page + u64::from(at + i));
                    }
                }
            }
        }
    }
}

fn memory(pools: &Pools, pool: usize) -> Vec<u8> {
    let mut all = vec![0; pools.regions[pool].bytes() as usize];
    pools.regions[pool].memory().read_at(0, &mut all).unwrap();
    all
}

/// Blocks that are spread over the pool.
fn ids(count: u32, salt: u32) -> Vec<u32> {
    (0..count).map(|i| (i * 23 + salt) % BLOCKS).collect()
}

fn config(role: Role, rank: usize, layouts: &[Layout]) -> (WorkerConfig, Pools) {
    let identity = Identity::new("test", role, "w", rank as u32).unwrap();
    let pools = Pools::own_all(layouts.iter().map(|l| (l.clone(), BLOCKS)).collect()).unwrap();
    let engine = EngineChoice::Tcp(TcpConfig::default());
    let mut config = WorkerConfig::new(identity, Security::Insecure, pools.clone(), engine);
    config.part_bytes = 4096;
    (config, pools)
}

async fn hand_over(from: Shape, to: Shape, tokens: u32, prefix: u32) {
    let (source_ranks, target_ranks) = (from.ranks(), to.ranks());
    let prefills: Vec<(PrefillHandle, Pools)> = source_ranks
        .iter()
        .enumerate()
        .map(|(rank, layouts)| {
            let (config, pools) = config(Role::Prefill, rank, layouts);
            (PrefillWorker::start(config).unwrap(), pools)
        })
        .collect();
    let decodes: Vec<(DecodeHandle, Pools)> = target_ranks
        .iter()
        .enumerate()
        .map(|(rank, layouts)| {
            let (config, pools) = config(Role::Decode, rank, layouts);
            (DecodeWorker::start(config).unwrap(), pools)
        })
        .collect();
    let room = RoomId(7);
    let span = Span { tokens, prefix_tokens: prefix };
    let mut takers: Vec<Vec<Identity>> = vec![Vec::new(); prefills.len()];
    let mut fillings = Vec::new();
    for (decode, pools) in &decodes {
        let senders = sources(&pools.layouts, &source_ranks).unwrap();
        let mut blocks = Vec::new();
        for (pool, layout) in pools.layouts.iter().enumerate() {
            pools.regions[pool].memory().fill(0, pools.regions[pool].bytes(), CANARY).unwrap();
            let wanted = span.blocks(layout).unwrap();
            blocks.push(BlockList::from_ids(&ids(wanted.end - wanted.start, 11)));
        }
        for &s in &senders {
            takers[s].push(decode.address().key.identity.clone());
        }
        let prefills = senders.iter().map(|&s| prefills[s].0.address().clone()).collect();
        let request = LendRequest { room, span, blocks, prefills, deadline: DEADLINE };
        fillings.push(decode.lend(request).await.unwrap());
    }
    let mut sendings = Vec::new();
    for ((prefill, pools), takers) in prefills.iter().zip(takers) {
        if takers.is_empty() {
            continue;
        }
        let takers = Takers::Named(takers);
        let attach = AttachRequest { room, tokens, takers, issuer: None, deadline: DEADLINE };
        let sending = prefill.attach(attach).await.unwrap();
        for (pool, layout) in pools.layouts.iter().enumerate() {
            let blocks = ids(layout.blocks_for(tokens), 5);
            for (place, &id) in blocks.iter().enumerate() {
                each_byte(pools, pool, place as u32, id, |_, value, address| {
                    let at = address - pools.regions[pool].address();
                    pools.regions[pool].memory().write_at(at, &[value]).unwrap();
                });
            }
            let layers = 0..layout.layers;
            let (pool, blocks) = (pool as u32, BlockList::from_ids(&blocks));
            let ready = Ready::Now;
            let chunk = ChunkRequest { pool, tokens: 0..tokens, layers, blocks, ready };
            match sending.send(chunk).await {
                Ok(()) => {}
                // Nobody wants this rank's copy of the rows, and all else is done.
                Err(e) if e.kind() == ErrorKind::RoomEnded && pool == 2 => {}
                Err(e) => panic!("{e}"),
            }
        }
        sending.finish().await.unwrap();
        sendings.push(sending);
    }
    for sending in sendings {
        sending.released().await.unwrap();
        let end = sending.ended().await.unwrap();
        assert!(end.is_done(), "{end}");
    }
    for (filling, (_, pools)) in fillings.into_iter().zip(&decodes) {
        let ending = filling.ended().await.unwrap();
        let Outcome::Done { bytes } = ending.outcome else { panic!("{ending:?}") };
        let mut moved = 0;
        for (pool, layout) in pools.layouts.iter().enumerate() {
            let mut found = memory(pools, pool);
            let wanted = span.blocks(layout).unwrap();
            let first = match layout.kind {
                KvKind::Rows { .. } => 0,
                _ => {
                    prefix.max(if layout.window_tokens > 0 { tokens.saturating_sub(24) } else { 0 })
                }
            };
            let last = if let KvKind::Rows { rows } = layout.kind { rows } else { tokens };
            for (&id, place) in ids(wanted.end - wanted.start, 11).iter().zip(wanted) {
                each_byte(pools, pool, place, id, |token, value, address| {
                    let at = (address - pools.regions[pool].address()) as usize;
                    if (first..last).contains(&token) {
                        assert_eq!(found[at], value, "pool {pool} block {place} token {token}");
                    }
                    // Around them the rest of a cell may have come along.
                    moved += u64::from(found[at] != CANARY);
                    found[at] = CANARY;
                });
            }
            assert!(found.iter().all(|&b| b == CANARY), "something else was written");
        }
        assert!(bytes >= moved, "{bytes} {moved}");
        ending.into_blocks().await.unwrap();
    }
    for (decode, _) in &decodes {
        decode.stop().await;
    }
    for (prefill, _) in &prefills {
        prefill.stop().await;
    }
}

const PLAIN: Shape = Shape { tp: 1, pp: 1, page_tokens: 8, order: Order::Nhd, kind: KvKind::Split };

#[tokio::test(flavor = "multi_thread")]
async fn heads_are_cut_and_joined() {
    for (from, to) in [(1, 4), (4, 1), (2, 4), (4, 2), (2, 8), (8, 2)] {
        hand_over(Shape { tp: from, ..PLAIN }, Shape { tp: to, ..PLAIN }, 61, 0).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_are_cut_and_joined() {
    for (from, to) in [(1, 2), (4, 1), (2, 4)] {
        let to = Shape { pp: to, tp: 2, ..PLAIN };
        hand_over(Shape { pp: from, ..PLAIN }, to, 61, 16).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_other_sizes_and_orders_are_converted() {
    let small = Shape { page_tokens: 4, order: Order::Hnd, kind: KvKind::Packed, ..PLAIN };
    let large = Shape { page_tokens: 16, tp: 2, ..PLAIN };
    hand_over(small, large, 61, 32).await;
    hand_over(large, small, 61, 4).await;
    hand_over(large, small, 3, 0).await;
}
