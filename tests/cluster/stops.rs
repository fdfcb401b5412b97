//! Workers that stand still while their pages are on their way, and what they do when they go on:
//! whoever sends must not write into the next room, and whoever copies must not take the next
//! room's bytes for its own.

use std::time::Duration;

use kvlane_proto::msg::call::Call;
use kvlane_proto::{ErrorKind, Outcome, Role, RoomId};
use kvlane_transport::emulated::faults::{Fault, Target, What};

use super::cluster::{Caller, Cluster, PAGE_TOKENS, PAGES_PER_BLOCK, Router, Worker};
use super::engines::{Engine, Rig, SMALL_BLOCKS};
use super::legs::{Leg, Reply, leg};
use super::process::until;

const TOKENS: u32 = SMALL_BLOCKS * PAGE_TOKENS;
const PAGES: u64 = SMALL_BLOCKS as u64 * PAGES_PER_BLOCK;

fn is_late_write(reply: &Reply) -> bool {
    let corrupt = reply.error.as_ref().is_some_and(|e| e.kind == ErrorKind::Corrupt);
    corrupt || reply.pages_corrupt > 0
}

/// What is between a stopped sender and its receiver.
struct Scene<'a> {
    rig: &'a Rig,
    router: &'a Router,
    /// Stops.
    prefill: &'a Worker,
    /// Fills the same blocks meanwhile.
    other: &'a Worker,
}

impl Scene<'_> {
    /// Stops the prefill while a room as large as the pool is half-way, ends the room, gives its
    /// blocks to a room of the other prefill, lets go what is on its way, and the prefill go on;
    /// then uses every block again. Says whether a late write was found.
    async fn late_writes(&self, decode: &mut Worker, pause_ms: u64) -> bool {
        let Self { rig, router, prefill, other } = *self;
        let tokens = decode.pool_tokens();
        let held = rig.nics.is_some().then(|| {
            let target = Target::Process(prefill.process.pid());
            // Some parts are in place.
            rig.fault(0, Fault::new(What::HoldWire, target).skip(9))
        });
        // Earlier rooms were half-way, too.
        decode.process.drain();
        let r = router.reserve(prefill, decode, tokens).await;
        let received = Leg::send(&decode.serving, r.decode_leg()).await.unwrap();
        let sent = Leg::send(&prefill.serving, r.prefill_leg()).await.unwrap();
        match held {
            Some(fault) => {
                let struck = || (rig.stats(0).hits(fault) > 0).then_some(());
                until("writes are held on the wire", struck).await;
            }
            None => assert_eq!(decode.process.line().await.as_deref(), Some("at half")),
        }
        prefill.process.signal("STOP");
        router.coordinator.abort_room(RoomId(r.room), "its sender stands still");
        let received = received.reply().await.unwrap();
        assert!(matches!(received.outcome, Some(Outcome::Failed { .. })), "{received:?}");
        let mut late = is_late_write(&received);
        // What comes late meets free blocks, or the next room; nothing waits for it.
        tokio::time::sleep(Duration::from_millis(pause_ms)).await;

        let r = router.reserve(other, decode, tokens).await;
        let next = router.run(other, decode, &r).await.decode.unwrap();
        late |= is_late_write(&next);
        assert!(late || next.is_done(), "{next:?}");
        if let Some(fault) = held {
            let before = rig.stats(0);
            rig.clear(0, fault);
            let came = || {
                let now = rig.stats(0);
                let dropped = |s: &kvlane_transport::emulated::stats::Stats| {
                    s.dropped_no_pair + s.dropped_not_ready
                };
                (dropped(&now) > dropped(&before) || now.writes > before.writes).then_some(())
            };
            until("what was held arrives", came).await;
        }
        prefill.process.signal("CONT");
        let sent = sent.reply().await.unwrap();
        assert!(!sent.is_done(), "{sent:?}");
        // Blocks that were found written to are not used again.
        for _ in 0..if late { 0 } else { 2 } {
            let r = router.reserve(other, decode, tokens).await;
            let last = router.run(other, decode, &r).await.decode.unwrap();
            late |= is_late_write(&last);
            assert!(late || last.is_done(), "{last:?}");
        }
        late
    }
}

async fn stopped_sender(engine: Engine) {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let rig = Rig::start(&cluster, engine).await;
    // With sockets, large enough that the sender still has some of the room to write.
    let large = ["--model", "tiny", "--pool-mib", "8", "--audit-rooms"];
    let extra = if engine == Engine::Tcp { &large[..] } else { &[] };
    let bytes_per_s = if engine == Engine::Tcp { 32 << 20 } else { 1 << 20 };
    let prefill = rig.worker(&cluster, Role::Prefill, "p", extra).await;
    let other = rig.worker(&cluster, Role::Prefill, "p-other", extra).await;
    router.sees(&prefill).await;
    router.sees(&other).await;
    let rate = bytes_per_s.to_string();
    let mut flags = extra.to_vec();
    if rig.nics.is_none() {
        flags.extend(["--throttle-bytes-per-s", &rate, "--say-at", "half"]);
    }
    let scene = Scene { rig: &rig, router: &router, prefill: &prefill, other: &other };
    for (name, fences) in [("d", true), ("d-open", false)] {
        let mut flags = flags.clone();
        if !fences {
            flags.push("--fence-off");
        }
        let mut decode = rig.worker(&cluster, Role::Decode, name, &flags).await;
        router.sees(&decode).await;
        // Its links and lanes are there.
        router.hand_off(&prefill, &decode, decode.pool_tokens()).await;
        router.hand_off(&other, &decode, decode.pool_tokens()).await;
        // One is found at once, or soon, if there is one.
        let mut late = false;
        for turn in 0..if fences { 2 } else { 20 } {
            if late {
                break;
            }
            late = scene.late_writes(&mut decode, turn * 50 % 200).await;
            eprintln!("{engine:?}, fences {fences}, turn {turn}: late write {late}");
        }
        assert_eq!(late, !fences, "{engine:?} with fences {fences}");
    }
}

#[tokio::test]
async fn a_stopped_sender_writes_nothing_when_it_goes_on_over_tcp() {
    stopped_sender(Engine::Tcp).await;
}

#[tokio::test]
async fn a_stopped_sender_writes_nothing_when_it_goes_on_over_shm() {
    stopped_sender(Engine::Shm).await;
}

#[tokio::test]
async fn writes_that_a_nic_held_for_a_stopped_sender_do_not_land_in_the_next_room() {
    stopped_sender(Engine::Gpunetio).await;
}

/// The decode stands still in the middle of a copy; meanwhile the prefill ends the room and fills the
/// same blocks for another one.
#[tokio::test]
async fn a_decode_that_stood_still_in_a_copy_does_not_take_the_next_rooms_bytes() {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let rig = Rig::start(&cluster, Engine::Shm).await;
    let prefill = rig.worker(&cluster, Role::Prefill, "p", &[]).await;
    let slow = ["--say-at", "half"];
    let mut decode = rig.slow_decode(&cluster, "d", 1 << 20, &slow).await;
    let other = rig.worker(&cluster, Role::Decode, "d-other", &[]).await;
    for worker in [&prefill, &decode, &other] {
        router.sees(worker).await;
    }
    router.hand_off(&prefill, &other, TOKENS).await;
    let issuer = Caller::new(Role::Router, "r");
    for turn in 0..6 {
        let r = router.reserve(&prefill, &decode, TOKENS).await;
        let received = Leg::send(&decode.serving, r.decode_leg()).await.unwrap();
        let sent = Leg::send(&prefill.serving, r.prefill_leg()).await.unwrap();
        assert_eq!(decode.process.line().await.as_deref(), Some("at half"));
        // In one piece or another; nothing waits for it.
        tokio::time::sleep(Duration::from_millis(turn * 7)).await;
        decode.process.signal("STOP");
        let abort = Call::Abort { room: RoomId(r.room), reason: "its blocks are wanted".into() };
        issuer.ask(&prefill, abort).await.unwrap();
        // Needs every block of the prefill's pool, so it begins when they have come back.
        let next = router.reserve(&prefill, &other, TOKENS).await;
        let (p, d) = tokio::join!(
            leg(&prefill.serving, next.prefill_leg()),
            leg(&other.serving, next.decode_leg()),
        );
        p.unwrap().assert_done(0);
        d.unwrap().assert_done(PAGES);
        decode.process.signal("CONT");
        let received = received.reply().await.unwrap();
        received.assert_failed(&[ErrorKind::Aborted, ErrorKind::PeerLost, ErrorKind::RoomEnded]);
        assert!(!sent.reply().await.unwrap().is_done());
        router.sees(&decode).await;
        router.hand_off(&prefill, &decode, TOKENS).await;
        assert_eq!(decode.process.line().await.as_deref(), Some("at half"));
    }
    // Not only because it was told: a copy was thrown away, because the sender's word had changed.
    let log = decode.process.log();
    assert!(log.contains("the sender stopped the grant during a copy"), "no copy was hit");
    router.assert_clean(&prefill, &decode).await;
}
