//! What a plan costs: `cargo bench -p kvlane-proto --bench plan`.
//!
//! One rank's share of a long room, Llama-3.1-70B in bf16 over eight ranks: 80 layers, one KV head of
//! 128, 85,401 tokens in 5,338 blocks of 16, random on both sides, so that nothing can be merged.
//! *Built* is the share, the receiver's list checked and expanded, and both sides' plans. *Walked* is
//! every address of the room. Medians. Prints the tables of `docs/performance.md`. First argument:
//! repetitions (default 31).

#![allow(clippy::unwrap_used)]

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane_proto::layout::{Coordinates, Dtype, KvKind, Order};
use kvlane_proto::plan::{Blocks, writes};
use kvlane_proto::{BlockList, Device, Layout, PartId, Plan, PoolMap, Share, Side, Span, limits};

const TOKENS: u32 = 85_401;

fn layout(kv_heads: u32, tp: (u32, u32), order: Order, page_tokens: u32) -> Layout {
    Layout {
        model: "llama-3.1-70b".into(),
        layers: 80,
        first_layer: 0,
        kv_heads,
        kv_heads_total: 8,
        head_dim: 128,
        dtype: Dtype::Bf16,
        page_tokens,
        window_tokens: 0,
        order,
        kind: KvKind::Split,
        at: Coordinates { tp, ..Coordinates::SINGLE },
    }
}

/// As many block ids as the room takes, in random order, or in a row.
fn ids(seed: u64, layout: &Layout, pool_blocks: u32, random: bool) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..pool_blocks).collect();
    let mut seed = seed;
    for i in (1..ids.len()).rev().filter(|_| random) {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        ids.swap(i, (seed % (i as u64 + 1)) as usize);
    }
    ids.truncate(layout.blocks_for(TOKENS) as usize);
    ids
}

/// A room between two ranks.
struct Room {
    source: [Layout; 1],
    destination: [Layout; 1],
    maps: [Arc<PoolMap>; 2],
    held: Arc<[u32]>,
    lent: [BlockList; 1],
}

impl Room {
    fn new(source: Layout, destination: Layout, random: bool) -> Self {
        let blocks = |l: &Layout| l.blocks_for(TOKENS) * 2;
        let map = |l: &Layout| Arc::new(PoolMap::contiguous(Device::Host, 1 << 40, l, blocks(l)));
        Self {
            maps: [map(&source), map(&destination)],
            held: ids(1, &source, blocks(&source), random).into(),
            lent: [BlockList::from_ids(&ids(2, &destination, blocks(&destination), random))],
            source: [source],
            destination: [destination],
        }
    }
    fn build(&self) -> [Plan; 2] {
        let span = Span { tokens: TOKENS, prefix_tokens: 0 };
        let share = Arc::new(Share::between(&self.source, &self.destination).unwrap());
        let [from, to] = &self.maps;
        let held = Blocks::new(from.clone(), 0, self.held.clone()).unwrap();
        let lent = Blocks::lent(&self.destination, &[to.clone()], &span, &self.lent).unwrap();
        let plan = |side, blocks: Vec<Blocks>| {
            Plan::new(share.clone(), side, &span, limits::PART_BYTES, blocks.into()).unwrap()
        };
        [plan(Side::Source, vec![held]), plan(Side::Destination, lent)]
    }
}

fn median(repetitions: usize, mut run: impl FnMut()) -> Duration {
    let mut times: Vec<Duration> = (0..repetitions)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    times[times.len() / 2]
}

fn main() {
    // Cargo passes `--bench`.
    let repetitions = std::env::args().find_map(|a| a.parse().ok()).unwrap_or(31);
    let rank = |order, page| layout(1, (3, 8), order, page);
    let (nhd, hnd) = (Order::Nhd, Order::Hnd);
    let rooms = [
        ("same layout, random blocks", Room::new(rank(nhd, 16), rank(nhd, 16), true)),
        ("same layout, blocks in a row", Room::new(rank(nhd, 16), rank(nhd, 16), false)),
        ("pages of 16 to pages of 64", Room::new(rank(nhd, 16), rank(nhd, 64), true)),
        ("TP 4 to TP 8, HND", Room::new(layout(2, (1, 4), hnd, 16), rank(hnd, 16), true)),
        ("TP 4 to TP 8, NHD", Room::new(layout(2, (1, 4), nhd, 16), rank(nhd, 16), true)),
    ];
    println!(
        "| room | unmerged writes | writes | built µs | `next` ns | `for_each` ns | one side ns |"
    );
    println!("|---|---|---|---|---|---|---|");
    for (name, room) in rooms {
        let built = median(repetitions, || {
            black_box(room.build());
        });
        let [from, to] = room.build();
        let parts = || (0..from.grid().parts()).map(PartId);
        let span = Span { tokens: TOKENS, prefix_tokens: 0 };
        let unmerged =
            Share::between(&room.source, &room.destination).unwrap().writes_unmerged(&span);
        let mut count = 0;
        let next = median(repetitions, || {
            (count, _) = parts().fold((0, 0), |mut sum, part| {
                let (out, into) = (from.pages(part).unwrap(), to.pages(part).unwrap());
                for w in writes(&out, &into) {
                    sum.0 += 1u64;
                    sum.1 ^= black_box(w.source ^ w.destination);
                }
                sum
            });
        });
        let each = median(repetitions, || {
            let mut sum = 0;
            for part in parts() {
                let (out, into) = (from.pages(part).unwrap(), to.pages(part).unwrap());
                writes(&out, &into).for_each(|w| sum ^= black_box(w.source ^ w.destination));
            }
            black_box(sum);
        });
        let side = median(repetitions, || {
            let mut sum = 0;
            for part in parts() {
                for page in to.pages(part).unwrap().iter() {
                    sum ^= black_box(page.address);
                }
            }
            black_box(sum);
        });
        let ns = |d: Duration| d.as_nanos() as f64 / unmerged as f64;
        println!(
            "| {name} | {unmerged} | {count} | {:.0} | {:.1} | {:.1} | {:.1} |",
            built.as_nanos() as f64 / 1e3,
            ns(next),
            ns(each),
            ns(side)
        );
    }
}
