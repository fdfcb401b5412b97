//! What a fence is for: rooms ended while their pages are on their way, with fences and without.

use std::time::Duration;

use kvlane_proto::{ErrorKind, Outcome, Role, RoomId};

use super::cluster::{Cluster, Router, Worker};
use super::legs::{Leg, Reply, leg};

/// Ends rooms as large as the pool at one moment after the other, and uses every block again, until
/// so many were hit while their pages were on their way or a late write was found; says whether.
async fn late_writes(router: &Router, prefill: &Worker, decode: &Worker, hits: usize) -> bool {
    let tokens = decode.pool_tokens();
    let mut hit = 0;
    for turn in 0..1_000 {
        let r = router.reserve(prefill, decode, tokens).await;
        let received = Leg::send(&decode.serving, r.decode_leg()).await.unwrap();
        let sent = Leg::send(&prefill.serving, r.prefill_leg()).await.unwrap();
        // Varies where it is hit, over about as long as a room takes; nothing waits for it.
        tokio::time::sleep(Duration::from_millis(turn * 7 % 100)).await;
        router.coordinator.abort_room(RoomId(r.room), "in the middle");
        let received = received.reply().await.unwrap();
        sent.reply().await.unwrap();
        if let Some(Outcome::Failed { bytes: 1.., .. }) = received.outcome {
            hit += 1;
        }
        // Takes every block, and looks at its stamp first.
        let r = router.reserve(prefill, decode, tokens).await;
        let (sent, again) = tokio::join!(
            leg(&prefill.serving, r.prefill_leg()),
            leg(&decode.serving, r.decode_leg()),
        );
        let (sent, again) = (sent.unwrap(), again.unwrap());
        if is_late_write(&received) || is_late_write(&again) {
            return true;
        }
        assert!(sent.is_done() && again.is_done(), "{sent:?} {again:?}");
        if hit >= hits {
            return false;
        }
    }
    panic!("{hit} of {hits} rooms were hit while pages were on their way");
}

fn is_late_write(reply: &Reply) -> bool {
    reply.error.as_ref().is_some_and(|e| e.kind == ErrorKind::Corrupt)
}

#[tokio::test]
async fn nothing_lands_after_a_fence_and_without_one_it_would() {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let (prefill, decode) = tokio::join!(
        cluster.worker(Role::Prefill, "p", &[]),
        cluster.worker(Role::Decode, "d", &[]),
    );
    router.sees(&prefill).await;
    router.sees(&decode).await;
    assert!(!late_writes(&router, &prefill, &decode, 12).await);
    router.assert_clean(&prefill, &decode).await;
    drop(decode);
    // The same test finds what a fence prevents.
    let open = cluster.worker(Role::Decode, "d-open", &["--fence-off"]).await;
    router.sees(&open).await;
    assert!(late_writes(&router, &prefill, &open, 1_000).await, "no fence, and nobody noticed");
}
