//! What a fence is for: rooms ended while their pages are on their way, with fences and without.

use kvlane_proto::{ErrorKind, Outcome, Role, RoomId};

use super::cluster::{Cluster, Router, Worker};
use super::legs::{Leg, leg};

/// Ends rooms as large as the pool at one moment after the other, and uses every block again, until
/// so many were hit while their pages were on their way or a late write was found; says whether.
async fn late_writes(router: &Router, prefill: &Worker, decode: &Worker, hits: u32) -> bool {
    let tokens = decode.pool_tokens();
    let (mut soonest_ms, mut latest_ms) = (0, 1_000);
    let mut hit = 0;
    for _ in 0..40 {
        let ms = (soonest_ms + latest_ms) / 2;
        let r = router.reserve(prefill, decode, tokens).await;
        let received = Leg::send(&decode.serving, r.decode_leg()).await.unwrap();
        let sent = Leg::send(&prefill.serving, r.prefill_leg()).await.unwrap();
        tokio::time::sleep(std::time::Duration::from_millis(ms)).await;
        router.coordinator.abort_room(RoomId(r.room), "in the middle");
        let received = received.reply().await.unwrap();
        let _ = sent.reply().await.unwrap();
        match received.outcome {
            Some(Outcome::Done { .. }) => latest_ms = ms,
            Some(Outcome::Failed { bytes, .. }) if bytes > 0 => hit += 1,
            // Too soon; nothing was lent yet, even.
            _ => soonest_ms = ms,
        }
        if soonest_ms >= latest_ms {
            (soonest_ms, latest_ms) = (soonest_ms / 2, latest_ms + 200);
        }
        // Takes every block, and looks at its stamp first.
        let r = router.reserve(prefill, decode, tokens).await;
        let (p, d) = tokio::join!(
            leg(&prefill.serving, r.prefill_leg()),
            leg(&decode.serving, r.decode_leg()),
        );
        let (p, d) = (p.unwrap(), d.unwrap());
        if d.error.as_ref().is_some_and(|e| e.kind == ErrorKind::Corrupt) {
            return true;
        }
        assert!(d.is_done() && p.is_done(), "{d:?} {p:?}");
        if hit >= hits {
            return false;
        }
    }
    panic!(
        "{hit} of {hits} rooms were hit while pages were on their way: {soonest_ms} to {latest_ms} ms"
    );
}

#[tokio::test]
async fn nothing_lands_after_a_fence_and_without_one_it_would() {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let big = ["--model", "llama-3.1-8b", "--pool-mib", "96"];
    let without = ["--model", "llama-3.1-8b", "--pool-mib", "96", "--fence-off"];
    let (prefill, decode) = tokio::join!(
        cluster.worker(Role::Prefill, "p", &big),
        cluster.worker(Role::Decode, "d", &big),
    );
    router.sees(&prefill).await;
    router.sees(&decode).await;
    assert!(!late_writes(&router, &prefill, &decode, 3).await);
    router.assert_clean(&prefill, &decode).await;
    drop(decode);
    // The same test finds what a fence prevents.
    let open = cluster.worker(Role::Decode, "d-open", &without).await;
    router.sees(&open).await;
    assert!(late_writes(&router, &prefill, &open, 20).await, "no fence, and nobody noticed");
}
