//! Rooms that are aborted half-way, and the next room that gets their blocks at once.

use kvlane_coordinator::HandoffOutcome;
use kvlane_proto::{ErrorKind, Outcome, Role, RoomId};

use super::cluster::{Cluster, PAGE_TOKENS, PAGES_PER_BLOCK, Router, Worker};
use super::engines::{Engine, Rig, SMALL_BLOCKS};
use super::legs::Leg;

/// Two thirds of the pool: two rooms never have all of their blocks at a time.
const BLOCKS: u32 = SMALL_BLOCKS / 3 * 2;
const TOKENS: u32 = BLOCKS * PAGE_TOKENS;
const PAGES: u64 = BLOCKS as u64 * PAGES_PER_BLOCK;
/// A room takes an eighth of a second at this rate, so that an abort at half comes in time.
const BYTES_PER_S: u64 = 1 << 20;
/// Rooms to hit, over each engine, unless `KVLANE_REUSE_ROOMS` says otherwise.
const ROOMS: u32 = 200;

fn rooms() -> u32 {
    let asked = std::env::var("KVLANE_REUSE_ROOMS").ok();
    asked.map_or(ROOMS, |n| n.parse().expect("KVLANE_REUSE_ROOMS is a number"))
}

/// Aborts rooms when half of their parts have arrived, until so many were hit; the blocks of each go
/// to a room that waits for them already, at both ends, and is checked byte by byte.
async fn abort_and_reuse(router: &Router, prefill: &Worker, decode: &mut Worker, rooms: u32) {
    let (mut hit, mut turns) = (0, 0);
    while hit < rooms {
        turns += 1;
        assert!(turns <= 2 * rooms + 50, "{hit} of {turns} rooms were hit half-way");
        let doomed = router.reserve(prefill, decode, TOKENS).await;
        let next = router.reserve(prefill, decode, TOKENS).await;
        let received = Leg::send(&decode.serving, doomed.decode_leg()).await.unwrap();
        let sent = Leg::send(&prefill.serving, doomed.prefill_leg()).await.unwrap();
        assert_eq!(decode.process.line().await.as_deref(), Some("at half"));
        // Both wait for blocks.
        let next_received = Leg::send(&decode.serving, next.decode_leg()).await.unwrap();
        let next_sent = Leg::send(&prefill.serving, next.prefill_leg()).await.unwrap();
        router.coordinator.abort_room(RoomId(doomed.room), "half is enough");

        let received = received.reply().await.unwrap();
        let sent = sent.reply().await.unwrap();
        match &received.outcome {
            Some(Outcome::Failed { bytes: 1.., .. }) => {
                received.assert_failed(&[ErrorKind::Aborted]);
                sent.assert_failed(&[ErrorKind::Aborted]);
                hit += 1;
            }
            // The abort came too late.
            Some(Outcome::Done { .. }) => received.assert_done(PAGES),
            other => panic!("{other:?}: {received:?}"),
        }
        next_received.reply().await.unwrap().assert_done(PAGES);
        next_sent.reply().await.unwrap().assert_done(0);
        assert_eq!(decode.process.line().await.as_deref(), Some("at half"));
        let told = router.coordinator.await_outcome(RoomId(next.room), super::process::CAP).await;
        assert!(matches!(told, HandoffOutcome::Done { .. }), "{told:?}");
    }
    eprintln!("{hit} of {turns} rooms were hit half-way");
    router.assert_clean(prefill, decode).await;
}

async fn over(engine: Engine) {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let rig = Rig::start(&cluster, engine).await;
    let prefill = rig.worker(&cluster, Role::Prefill, "p", &[]).await;
    let mut decode = rig.slow_decode(&cluster, "d", BYTES_PER_S, &["--say-at", "half"]).await;
    router.sees(&prefill).await;
    router.sees(&decode).await;
    abort_and_reuse(&router, &prefill, &mut decode, rooms()).await;
}

#[tokio::test]
async fn blocks_of_aborted_rooms_are_used_again_at_once_over_tcp() {
    over(Engine::Tcp).await;
}

#[tokio::test]
async fn blocks_of_aborted_rooms_are_used_again_at_once_over_shm() {
    over(Engine::Shm).await;
}

#[tokio::test]
async fn blocks_of_aborted_rooms_are_used_again_at_once_over_nics() {
    over(Engine::Gpunetio).await;
}
