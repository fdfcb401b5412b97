//! Workers told to end while pages are on their way, over every engine.

use kvlane_proto::msg::service::LoadState;
use kvlane_proto::{Blame, ErrorKind, Role};

use super::engines::Engine;
use super::legs::{Leg, leg};
use super::process::within;
use super::site::{MOST_PAGES, MOST_TOKENS, Site, beside, refused};

/// A room of this rate takes six seconds.
const BYTES_PER_S: u64 = 1 << 20;

/// The room is under way when one side is told to end: it is finished, nothing new begins, and each
/// state is shown by name.
async fn finishes(engine: Engine) {
    let mut site = Site::start(engine).await;
    for role in [Role::Decode, Role::Prefill] {
        let Site { router, prefill, decode, beside: pair, rig, .. } = &mut site;
        let work = async {
            Site::slow(rig, prefill, decode, BYTES_PER_S).await;
            // Only to see that it has come so far: who is held for long is given up as silent.
            decode.stop_at("first-byte", true).await;
            let request = router.reserve(prefill, decode, MOST_TOKENS).await;
            let p = Leg::send(&prefill.serving, request.prefill_leg()).await.unwrap();
            let d = Leg::send(&decode.serving, request.decode_leg()).await.unwrap();
            decode.process.held_at("first-byte").await;
            decode.go_on().await;
            let ends = if role == Role::Prefill { &mut *prefill } else { &mut *decode };
            assert_eq!(ends.state().await, LoadState::Serving);
            ends.process.signal("TERM");
            // The prefill's model server is done with the room; its taker is not.
            let shows = if role == Role::Prefill { LoadState::Owing } else { LoadState::Draining };
            ends.comes_to(shows).await;
            router.sees_draining(ends).await;
            let (kind, text) = refused(router, prefill, decode).await;
            assert_eq!(kind, ErrorKind::Draining, "{text}");
            Site::slow(rig, prefill, decode, 0).await;
            d.reply().await.unwrap().assert_done(MOST_PAGES);
            p.reply().await.unwrap().assert_done(0);
            let ends = if role == Role::Prefill { &mut *prefill } else { &mut *decode };
            let status = ends.process.ended().await;
            assert_eq!(status.code(), Some(0), "{}", ends.process.log());
            let log = ends.process.log();
            assert!(log.contains(&format!("state=\"{}\"", shows.as_str())), "{log}");
            assert!(log.contains("state=\"drained\""), "{log}");
            ends.restart(&[]).await;
            router.sees(ends).await;
        };
        beside(router, pair, work).await;
        site.assert_clean().await;
    }
}

/// Who does not want to wait says so again.
async fn ends_at_once(engine: Engine) {
    let mut site = Site::start(engine).await;
    let Site { router, prefill, decode, beside: pair, .. } = &mut site;
    let work = async {
        prefill.stop_at("half", true).await;
        let request = router.reserve(prefill, decode, MOST_TOKENS).await;
        let p = Leg::send(&prefill.serving, request.prefill_leg()).await.unwrap();
        let d = Leg::send(&decode.serving, request.decode_leg()).await.unwrap();
        prefill.process.held_at("half").await;
        prefill.process.signal("TERM");
        // Its actor is held, so nothing shows that it has heard the first.
        while !prefill.process.log().contains("told to end") {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        prefill.process.signal("TERM");
        assert_eq!(prefill.process.ended().await.code(), Some(130));
        assert!(p.reply().await.is_none());
        let told = d.reply().await.unwrap();
        told.assert_failed(&[ErrorKind::PeerLost]);
        assert_eq!(told.why().blame, Blame::Prefill, "{told:?}");
        prefill.restart(&[]).await;
        router.sees(prefill).await;
    };
    beside(router, pair, within("the end", work)).await;
    site.assert_clean().await;
}

#[tokio::test]
async fn a_worker_told_to_end_finishes_what_runs_over_tcp() {
    finishes(Engine::Tcp).await;
}

#[tokio::test]
async fn a_worker_told_to_end_finishes_what_runs_over_shm() {
    finishes(Engine::Shm).await;
}

#[tokio::test]
async fn a_worker_told_to_end_finishes_what_runs_over_gpunetio() {
    finishes(Engine::Gpunetio).await;
}

#[tokio::test]
async fn a_second_signal_ends_a_worker_in_the_middle_of_a_room_over_every_engine() {
    for engine in Engine::ALL {
        ends_at_once(engine).await;
    }
}

#[tokio::test]
async fn a_drain_ends_when_its_time_is_over_and_the_other_side_is_told() {
    let mut site = Site::start(Engine::Tcp).await;
    let Site { router, prefill, decode, .. } = &mut site;
    for role in [Role::Prefill, Role::Decode] {
        let ends = if role == Role::Prefill { &mut *prefill } else { &mut *decode };
        ends.process.kill().await;
        ends.restart(&["--drain-s", "1"]).await;
        router.sees(ends).await;
        // Its other leg never comes.
        let request = router.reserve(prefill, decode, MOST_TOKENS).await;
        let d = Leg::send(&decode.serving, request.decode_leg()).await.unwrap();
        prefill.holds(1).await;
        let ends = if role == Role::Prefill { &mut *prefill } else { &mut *decode };
        ends.process.signal("TERM");
        let status = ends.process.ended().await;
        assert_eq!(status.code(), Some(0), "{}", ends.process.log());
        if role == Role::Prefill {
            let told = d.reply().await.unwrap();
            told.assert_failed(&[ErrorKind::Draining, ErrorKind::PeerLost]);
            assert_eq!(told.why().blame, Blame::Prefill, "{told:?}");
        } else {
            let told = leg(&prefill.serving, request.prefill_leg()).await.unwrap();
            told.assert_failed(&[ErrorKind::Draining, ErrorKind::PeerLost]);
            assert_eq!(told.why().blame, Blame::Decode, "{told:?}");
        }
        let ends = if role == Role::Prefill { &mut *prefill } else { &mut *decode };
        ends.restart(&[]).await;
        router.sees(ends).await;
    }
    site.assert_clean().await;
}
