//! Two workers in one process hand pages over for real: QUIC, TCP, fences.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use kvlane_actors::{
    AttachRequest, ChunkRequest, DecodeHandle, DecodeWorker, EngineChoice, LendRequest, Pools,
    PrefillHandle, PrefillWorker, Ready, WorkerConfig, WorkerEnd,
};
use kvlane_proto::layout::{Coordinates, Dtype, KvKind, Order};
use kvlane_proto::msg::Purpose;
use kvlane_proto::msg::call::{Call, CallFrame, Reply, ReplyFrame};
use kvlane_proto::prefill::Takers;
use kvlane_proto::{
    BlockList, ErrorKind, Identity, Incarnation, Layout, Outcome, Role, RoomId, Span, WorkerKey,
};
use kvlane_transport::engine::tcp::TcpConfig;
use kvlane_transport::quic::{Endpoint, EndpointConfig, Security};
use kvlane_transport::seats::SEATS_PER_IDENTITY;
use tokio::time::timeout;

const BLOCKS: u32 = 64;
const DEADLINE: Duration = Duration::from_secs(30);

fn layout() -> Layout {
    Layout {
        model: "test".into(),
        layers: 3,
        first_layer: 0,
        kv_heads: 2,
        kv_heads_total: 2,
        head_dim: 32,
        dtype: Dtype::Bf16,
        page_tokens: 16,
        window_tokens: 0,
        order: Order::Nhd,
        kind: KvKind::Split,
        at: Coordinates::SINGLE,
    }
}

fn config(role: Role, name: &str, layout: Layout) -> (WorkerConfig, Pools) {
    let identity = Identity::new("test", role, name, 0).unwrap();
    let security = Security::Insecure;
    let pool = Pools::own(layout, BLOCKS).unwrap();
    let engine = EngineChoice::Tcp(TcpConfig::default());
    (WorkerConfig::new(identity, security, pool.clone(), engine), pool)
}

struct Pair {
    prefill: PrefillHandle,
    source: Pools,
    decode: DecodeHandle,
    target: Pools,
}

fn pair_of(source_layout: Layout, part_bytes: u64) -> Pair {
    let (prefill, source) = config(Role::Prefill, "p", source_layout);
    let (mut decode, target) = config(Role::Decode, "d", layout());
    decode.part_bytes = part_bytes;
    Pair {
        prefill: PrefillWorker::start(prefill).unwrap(),
        decode: DecodeWorker::start(decode).unwrap(),
        source,
        target,
    }
}

fn byte(slab: usize, block: u32, at: u64, salt: u8) -> u8 {
    (slab as u64 * 7 + u64::from(block) * 31 + at) as u8 ^ salt
}

/// Offset of a page in the pool's one region.
fn at(pool: &Pools, slab: usize, block: u32) -> u64 {
    pool.maps[0].slab_address[slab] - pool.regions[0].address()
        + u64::from(block) * pool.maps[0].block_stride_bytes
}

fn fill(pool: &Pools, block: u32, salt: u8) {
    let page = u64::from(pool.layouts[0].page_bytes());
    for slab in 0..pool.maps[0].slab_address.len() {
        let bytes: Vec<u8> = (0..page).map(|i| byte(slab, block, i, salt)).collect();
        pool.regions[0].memory().write_at(at(pool, slab, block), &bytes).unwrap();
    }
}

fn page(pool: &Pools, slab: usize, block: u32) -> Vec<u8> {
    let mut bytes = vec![0; pool.layouts[0].page_bytes() as usize];
    pool.regions[0].memory().read_at(at(pool, slab, block), &mut bytes).unwrap();
    bytes
}

impl Pair {
    fn lend(&self, room: u64, tokens: u32, prefix: u32, blocks: &[u32]) -> LendRequest {
        LendRequest {
            room: RoomId(room),
            span: Span { tokens, prefix_tokens: prefix },
            blocks: vec![BlockList::from_ids(blocks)],
            prefills: vec![self.prefill.address().clone()],
            deadline: DEADLINE,
        }
    }
    fn attach(room: u64, tokens: u32) -> AttachRequest {
        let (takers, deadline) = (Takers::Any(1), DEADLINE);
        AttachRequest { room: RoomId(room), tokens, takers, issuer: None, deadline }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_arrive_in_place_whichever_side_comes_first_and_nothing_else_changes() {
    for decode_first in [true, false] {
        let pair = pair_of(layout(), 1 << 12);
        let tokens = 16 * 5 + 3;
        let (from, to) = ([9, 3, 40, 41, 7, 20], [63, 0, 17, 18, 19, 2]);
        let canary = page(&pair.target, 0, 1);
        for &block in &from {
            fill(&pair.source, block, 0x5a);
        }
        let mut filling = None;
        if decode_first {
            filling = Some(pair.decode.lend(pair.lend(1, tokens, 16, &to[1..])).await.unwrap());
        }
        let sending = pair.prefill.attach(Pair::attach(1, tokens)).await.unwrap();
        let chunk = |tokens: std::ops::Range<u32>, layers, blocks: &[u32]| ChunkRequest {
            pool: 0,
            tokens,
            layers,
            blocks: BlockList::from_ids(blocks),
            ready: Ready::Now,
        };
        // Layer by layer first, then the rest in two steps; one ends inside a block.
        sending.send(chunk(0..40, 0..1, &from[..3])).await.unwrap();
        sending.send(chunk(0..40, 1..3, &from[..3])).await.unwrap();
        if filling.is_none() {
            filling = Some(pair.decode.lend(pair.lend(1, tokens, 16, &to[1..])).await.unwrap());
        }
        assert_eq!(sending.granted().await.unwrap(), Span { tokens, prefix_tokens: 16 });
        sending.send(chunk(40..tokens, 0..3, &from[2..])).await.unwrap();
        sending.finish().await.unwrap();
        let ending = filling.unwrap().ended().await.unwrap();
        let moved = 5 * pair.target.layouts[0].block_bytes();
        assert_eq!(ending.outcome, Outcome::Done { bytes: moved });
        for slab in 0..6 {
            for i in 1..6 {
                let expected: Vec<u8> = (0..2048).map(|b| byte(slab, from[i], b, 0x5a)).collect();
                assert_eq!(page(&pair.target, slab, to[i]), expected, "slab {slab} block {i}");
            }
            // What the decode had already, and what is nobody's, stays.
            assert_eq!(page(&pair.target, slab, to[0]), canary);
            assert_eq!(page(&pair.target, slab, 1), canary);
        }
        assert_eq!(ending.into_blocks().await.unwrap(), [BlockList::from_ids(&to[1..])]);
        sending.released().await.unwrap();
        assert_eq!(sending.ended().await.unwrap(), Outcome::Done { bytes: moved });
        assert_eq!(pair.decode.quarantine().blocks(), 0);
        // The same number again is refused on both sides, and changes nothing.
        let again = pair.decode.lend(pair.lend(1, tokens, 16, &to[1..])).await.unwrap_err();
        assert_eq!(again.kind(), ErrorKind::RoomEnded);
        let again = pair.prefill.attach(Pair::attach(1, tokens)).await.unwrap_err();
        assert_eq!(again.kind(), ErrorKind::RoomEnded);
        assert_eq!(pair.decode.stop().await, WorkerEnd::Stopped);
        assert_eq!(pair.prefill.stop().await, WorkerEnd::Stopped);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_room_without_pages_is_done_and_an_early_finish_is_not() {
    let pair = pair_of(layout(), 1 << 20);
    let filling = pair.decode.lend(pair.lend(5, 48, 48, &[])).await.unwrap();
    let sending = pair.prefill.attach(Pair::attach(5, 48)).await.unwrap();
    assert_eq!(filling.ended().await.unwrap().outcome, Outcome::Done { bytes: 0 });
    assert_eq!(sending.ended().await.unwrap(), Outcome::Done { bytes: 0 });

    let filling = pair.decode.lend(pair.lend(6, 48, 0, &[1, 2, 3])).await.unwrap();
    let sending = pair.prefill.attach(Pair::attach(6, 48)).await.unwrap();
    sending.finish().await.unwrap();
    let ending = filling.ended().await.unwrap();
    let Outcome::Failed { why, bytes: 0 } = &ending.outcome else { panic!("{ending:?}") };
    assert_eq!(why.kind, ErrorKind::Incomplete);
    assert_eq!(ending.into_blocks().await.unwrap()[0].len(), 3);
    assert!(!sending.ended().await.unwrap().is_done());
}

#[tokio::test(flavor = "multi_thread")]
async fn layouts_that_differ_are_refused_with_the_field_and_blocks_come_back() {
    let pair = pair_of(Layout { dtype: Dtype::Fp8E4m3, ..layout() }, 1 << 20);
    let filling = pair.decode.lend(pair.lend(1, 16, 0, &[4])).await.unwrap();
    let ending = filling.ended().await.unwrap();
    let Outcome::Failed { why, .. } = &ending.outcome else { panic!("{ending:?}") };
    assert_eq!(why.kind, ErrorKind::Incompatible);
    assert!(why.text.contains("dtype: decode bf16 / prefill fp8_e4m3"), "{why}");
    assert_eq!(ending.into_blocks().await.unwrap(), [BlockList::from_ids(&[4])]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_filling_quarantines_and_a_bad_list_leaves_no_trace() {
    let pair = pair_of(layout(), 1 << 20);
    for bad in [&[5, 5][..], &[1], &[1, BLOCKS]] {
        let e = pair.decode.lend(pair.lend(2, 32, 0, bad)).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidPlan, "{e}");
    }
    assert_eq!(pair.decode.load().rooms, 0);
    let filling = pair.decode.lend(pair.lend(3, 32, 0, &[8, 9])).await.unwrap();
    drop(filling);
    pair.decode.abort(RoomId(3), "not wanted").await.unwrap();
    let mut loads = pair.decode.loads();
    loads.wait_for(|l| l.rooms == 0).await.unwrap();
    assert_eq!(pair.decode.quarantine().blocks(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_caller_cannot_open_sessions_without_end() {
    let pair = pair_of(layout(), 1 << 20);
    let at = pair.decode.address().address.clone();
    let identity = Identity::new("test", Role::Router, "greedy", 0).unwrap();
    let me = WorkerKey { identity, incarnation: Incarnation([1; 16]) };
    let cfg = EndpointConfig::new(([127, 0, 0, 1], 0).into(), Security::Insecure, me);
    let caller = Endpoint::bind(cfg).unwrap();
    let mut sessions = Vec::new();
    for id in 0..SEATS_PER_IDENTITY as u64 + 2 {
        let session = caller.dial(&at, None, Purpose::Call).await.unwrap();
        let (tx, mut rx, watch) = session.into_parts::<CallFrame, ReplyFrame>();
        // The newest is answered, so the worker has seen it.
        tx.try_send(&CallFrame { id, call: Call::Ping }).unwrap();
        let answer = timeout(DEADLINE, rx.recv()).await.unwrap().unwrap().unwrap();
        assert_eq!((answer.id, answer.reply), (id, Ok(Reply::Pong)));
        sessions.push((tx, rx, watch));
    }
    for (_, rx, _) in &mut sessions[..2] {
        let end = timeout(DEADLINE, rx.recv()).await.unwrap();
        assert!(!matches!(end, Ok(Some(_))), "the oldest goes: {end:?}");
    }
    let (tx, rx, _) = &mut sessions[2];
    tx.try_send(&CallFrame { id: 7, call: Call::Ping }).unwrap();
    assert_eq!(timeout(DEADLINE, rx.recv()).await.unwrap().unwrap().unwrap().id, 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn aborts_from_either_side_end_both_and_give_back_all_blocks() {
    let pair = pair_of(layout(), 1 << 20);
    for (room, by_decode) in [(1, true), (2, false), (3, true), (4, false)] {
        let filling = pair.decode.lend(pair.lend(room, 64, 0, &[1, 2, 3, 4])).await.unwrap();
        let sending = pair.prefill.attach(Pair::attach(room, 64)).await.unwrap();
        sending.granted().await.unwrap();
        if by_decode {
            pair.decode.abort(RoomId(room), "test").await.unwrap();
        } else {
            sending.abort("test").await.unwrap();
        }
        let ending = filling.ended().await.unwrap();
        assert_eq!(ending.outcome.why().unwrap().kind, ErrorKind::Aborted);
        assert_eq!(ending.into_blocks().await.unwrap()[0].len(), 4);
        sending.released().await.unwrap();
        assert_eq!(sending.ended().await.unwrap().why().unwrap().kind, ErrorKind::Aborted);
    }
    let mut loads = pair.decode.loads();
    let lanes = u32::from(kvlane_proto::limits::LANES_PER_LINK);
    loads.wait_for(|l| l.rooms == 0 && l.free_lanes == lanes).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_that_every_peer_would_refuse_are_refused_at_start() {
    let with = |change: fn(&mut WorkerConfig)| {
        let (mut decode, _) = config(Role::Decode, "d", layout());
        change(&mut decode);
        DecodeWorker::start(decode).err().unwrap()
    };
    for (e, field) in [
        (with(|c| c.lanes_per_link = 0), "lanes_per_link"),
        (with(|c| c.lanes_per_room = 0), "lanes_per_room"),
        (with(|c| c.lanes_per_room = 5), "lanes_per_room"),
        (with(|c| c.part_bytes = 1), "part_bytes"),
    ] {
        assert_eq!(e.kind(), ErrorKind::Config);
        assert!(e.to_string().contains(field), "{e}");
    }
}
