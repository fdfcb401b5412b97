//! Workers with different engines hand rooms over: each link uses what both ends have.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use kvlane_actors::{
    AttachRequest, ChunkRequest, DecodeHandle, DecodeWorker, EngineChoice, LendRequest, Pools,
    PrefillHandle, PrefillWorker, Ready, Takers, WorkerConfig,
};
use kvlane_proto::layout::{Coordinates, Dtype, KvKind, Order};
use kvlane_proto::{BlockList, Identity, Layout, Outcome, Role, RoomId, Span};
use kvlane_transport::engine::shm::ShmConfig;
use kvlane_transport::engine::tcp::TcpConfig;
use kvlane_transport::quic::Security;

const BLOCKS: u32 = 32;
const TOKENS: u32 = 64;
const DEADLINE: Duration = Duration::from_secs(30);
const CANARY: u8 = 0xc5;

fn layout(rank: u32, ranks: u32) -> Layout {
    Layout {
        model: "test".into(),
        layers: 2,
        first_layer: 0,
        kv_heads: 2 / ranks,
        kv_heads_total: 2,
        head_dim: 8,
        dtype: Dtype::Bf16,
        page_tokens: 16,
        window_tokens: 0,
        order: Order::Hnd,
        kind: KvKind::Split,
        at: Coordinates { tp: (rank, ranks), ..Coordinates::SINGLE },
    }
}
fn config(role: Role, rank: u32, ranks: u32, engine: EngineChoice) -> (WorkerConfig, Pools) {
    let identity = Identity::new("test", role, "w", rank).unwrap();
    let pools = Pools::own(layout(rank, ranks), BLOCKS).unwrap();
    let mut config = WorkerConfig::new(identity, Security::Insecure, pools.clone(), engine);
    config.part_bytes = 4096;
    (config, pools)
}
fn tcp() -> EngineChoice {
    EngineChoice::Tcp(TcpConfig::default())
}
fn shm() -> EngineChoice {
    EngineChoice::Shm(ShmConfig::default())
}
fn auto() -> EngineChoice {
    EngineChoice::Auto { shm: ShmConfig::default(), tcp: TcpConfig::default() }
}

/// Each prefill rank has one of two heads; its pages are full of its number.
async fn hand_over(decode: EngineChoice, prefills: [EngineChoice; 2]) {
    let senders: Vec<PrefillHandle> = (0..)
        .zip(prefills)
        .map(|(rank, engine)| {
            let (config, pools) = config(Role::Prefill, rank, 2, engine);
            let region = &pools.regions[0];
            region.memory().fill(0, region.bytes(), rank as u8 + 1).unwrap();
            PrefillWorker::start(config).unwrap()
        })
        .collect();
    let (config, pools) = config(Role::Decode, 0, 1, decode);
    let region = &pools.regions[0];
    region.memory().fill(0, region.bytes(), CANARY).unwrap();
    let decode: DecodeHandle = DecodeWorker::start(config).unwrap();
    let (room, span) = (RoomId(7), Span { tokens: TOKENS, prefix_tokens: 0 });
    let blocks = vec![BlockList::from_ids(&[9, 4, 20, 5])];
    let addresses = senders.iter().map(|s| s.address().clone()).collect();
    let request = LendRequest { room, span, blocks, prefills: addresses, deadline: DEADLINE };
    let filling = decode.lend(request).await.unwrap();
    let mut sendings = Vec::new();
    for sender in &senders {
        let takers = Takers::Named(vec![decode.address().key.identity.clone()]);
        let attach =
            AttachRequest { room, tokens: TOKENS, takers, issuer: None, deadline: DEADLINE };
        let sending = sender.attach(attach).await.unwrap();
        let chunk = ChunkRequest {
            pool: 0,
            tokens: 0..TOKENS,
            layers: 0..2,
            blocks: BlockList::from_ids(&[1, 2, 3, 8]),
            ready: Ready::Now,
        };
        sending.send(chunk).await.unwrap();
        sending.finish().await.unwrap();
        sendings.push(sending);
    }
    for sending in sendings {
        sending.released().await.unwrap();
        let end = sending.ended().await.unwrap();
        assert!(end.is_done(), "{end}");
    }
    let ending = filling.ended().await.unwrap();
    assert!(matches!(ending.outcome, Outcome::Done { .. }), "{ending:?}");
    ending.into_blocks().await.unwrap();
    let mut all = vec![0; region.bytes() as usize];
    region.memory().read_at(0, &mut all).unwrap();
    let count = |byte: u8| all.iter().filter(|&&b| b == byte).count() as u64;
    let each = layout(0, 2).block_bytes() * 4;
    assert_eq!((count(1), count(2)), (each, each));
    assert_eq!(count(CANARY), region.bytes() - 2 * each);
    decode.stop().await;
    for sender in &senders {
        sender.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_with_both_takes_a_room_from_a_prefill_with_both_and_one_with_tcp() {
    hand_over(auto(), [auto(), tcp()]).await;
}

/// Neither of the two could be linked by the other's engine.
#[tokio::test(flavor = "multi_thread")]
async fn a_room_comes_over_shm_and_over_tcp() {
    hand_over(auto(), [shm(), tcp()]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn prefills_with_both_serve_decodes_with_one() {
    hand_over(tcp(), [auto(), tcp()]).await;
    hand_over(shm(), [auto(), shm()]).await;
}
