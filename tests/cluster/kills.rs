//! Each role killed once in each phase that it passes.

use std::cell::Cell;

use kvlane_coordinator::HandoffOutcome;
use kvlane_proto::{Blame, ErrorKind, Role};

use super::cluster::{Cluster, POOL_PAGES, POOL_TOKENS, Router, Worker};
use super::legs::leg;

/// Small rooms between two workers that nothing happens to, one after the other, while `work` runs.
async fn beside<T>(router: &Router, pair: (&Worker, &Worker), work: impl Future<Output = T>) -> T {
    let over = Cell::new(false);
    let rooms = async {
        let mut rooms = 0;
        while !over.get() || rooms == 0 {
            router.hand_off(pair.0, pair.1, 900).await;
            rooms += 1;
        }
    };
    let work = async {
        let end = work.await;
        over.set(true);
        end
    };
    tokio::join!(work, rooms).0
}

#[tokio::test]
async fn a_killed_prefill_costs_its_own_rooms_only() {
    let cluster = Cluster::start().await;
    let decode = cluster.worker(Role::Decode, "d", &[]).await;
    let bystanders =
        (cluster.worker(Role::Prefill, "p-b", &[]).await, cluster.worker(Role::Decode, "d-b", &[]).await);
    let router = cluster.router("r").await;
    router.sees(&bystanders.0).await;
    router.sees(&bystanders.1).await;
    let mut victim = cluster.worker(Role::Prefill, "p", &[]).await;
    let work = async {
        for phase in
            ["registered", "offer-accepted", "first-byte", "half", "last-byte", "done", "given-back"]
        {
            eprintln!("prefill killed at {phase}");
            victim.process.kill().await;
            victim.respawn(&["--stop-at", phase]);
            let request = if phase == "registered" {
                victim.process.stopped_at(phase).await;
                let again = router.coordinator.snapshot();
                drop(again);
                None
            } else {
                victim.ready().await;
                router.sees(&victim).await;
                Some(router.reserve(&victim, &decode, POOL_TOKENS).await)
            };
            if let Some(request) = request {
                let (to_prefill, to_decode) = (request.prefill_leg(), request.decode_leg());
                let sent = leg(&victim.serving, &to_prefill);
                let received = leg(&decode.serving, &to_decode);
                let kill = async {
                    victim.process.stopped_at(phase).await;
                    victim.process.kill().await;
                };
                let (sent, received, ()) = tokio::join!(sent, received, kill);
                let received = received.expect("the decode lives");
                assert!(sent.is_none() || phase == "given-back", "{phase}: {sent:?}");
                // Once every part has arrived the decode may decide either way.
                match phase {
                    "done" | "given-back" => received.assert_done(POOL_PAGES),
                    "last-byte" if received.is_done() => received.assert_done(POOL_PAGES),
                    _ => {
                        received.assert_failed(&[ErrorKind::PeerLost]);
                        assert_eq!(received.why().blame, Blame::Prefill, "{phase}: {received:?}");
                    }
                }
                let outcome = router
                    .coordinator
                    .await_outcome(kvlane_proto::RoomId(request.room), super::process::CAP)
                    .await;
                match outcome {
                    HandoffOutcome::Done { .. } => assert!(received.is_done()),
                    HandoffOutcome::Failed { leg, retryable, refusal } => {
                        assert!(!received.is_done());
                        assert_eq!((leg, retryable), (Blame::Prefill, true), "{refusal}");
                    }
                    other => panic!("{phase}: {other:?}"),
                }
            } else {
                victim.process.kill().await;
            }
            victim.restart(&[]).await;
            router.sees(&victim).await;
            router.assert_clean(&victim, &decode).await;
        }
    };
    beside(&router, (&bystanders.0, &bystanders.1), work).await;
}
