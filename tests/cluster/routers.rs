//! Two routers, and what one of them may do with the other's rooms.

use kvlane_coordinator::HandoffOutcome;
use kvlane_proto::msg::call::{Call, Reply, Reserve};
use kvlane_proto::{Blame, ErrorKind, IdempotencyKey, Role, RoomId};

use super::cluster::{Caller, Cluster, POOL_TOKENS, Router, Worker};
use super::legs::{Leg, Request, leg};

const TOKENS: u32 = 800;

async fn pair(cluster: &Cluster, router: &Router) -> (Worker, Worker) {
    let pair = tokio::join!(
        cluster.worker(Role::Prefill, "p", &[]),
        cluster.worker(Role::Decode, "d", &[]),
    );
    router.sees(&pair.0).await;
    router.sees(&pair.1).await;
    pair
}

#[tokio::test]
async fn a_router_may_neither_end_nor_take_another_routers_room() {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let (prefill, decode) = pair(&cluster, &router).await;
    let foreign = Caller::new(Role::Router, "foreign");
    let r = router.reserve(&prefill, &decode, TOKENS).await;
    let waits = Leg::send(&prefill.serving, r.prefill_leg()).await.unwrap();
    prefill.holds(1).await;
    let abort = || Call::Abort { room: RoomId(r.room), reason: "mine now".into() };
    for worker in [&prefill, &decode] {
        let e = foreign.ask(worker, abort()).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unauthorized, "{e}");
        let text = e.to_string();
        assert!(text.contains("default/router/foreign/0"), "{text}");
        assert!(text.contains("default/router/r/0"), "{text}");
    }
    let reserve = |key| {
        Call::Reserve(Reserve {
            key: IdempotencyKey([key; 16]),
            room: RoomId(r.room),
            tokens: TOKENS,
            prefills: vec![r.prefill.clone()],
            wait_ms: 0,
            deadline_ms: 10_000,
        })
    };
    let e = foreign.ask(&decode, reserve(1)).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::DuplicateRoom, "{e}");
    // Nor by its own router with another key.
    let issuer = Caller::new(Role::Router, "r");
    let e = issuer.ask(&decode, reserve(2)).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::DuplicateRoom, "{e}");
    // It went on untouched.
    assert!(leg(&decode.serving, r.decode_leg()).await.unwrap().is_done());
    assert!(waits.reply().await.unwrap().is_done());
    // Nor can it be had again, by anybody, with any key.
    for (caller, key) in [(&foreign, 3), (&issuer, 4)] {
        let e = caller.ask(&decode, reserve(key)).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::RoomEnded, "{e}");
        assert!(e.to_string().contains("outcome=done"), "{e}");
    }
    // An abort after done says done.
    let said = issuer.ask(&decode, abort()).await.unwrap();
    assert!(matches!(&said, Reply::Ended(outcome) if outcome.is_done()), "{said:?}");
    router.assert_clean(&prefill, &decode).await;
}

#[tokio::test]
async fn an_abort_by_the_issuer_reaches_both_legs_whenever_it_comes() {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let other = cluster.router("s").await;
    let (prefill, decode) = pair(&cluster, &router).await;
    other.sees(&prefill).await;
    other.sees(&decode).await;
    let aborted = |reply: super::legs::Reply| {
        reply.assert_failed(&[ErrorKind::Aborted]);
        assert!(reply.why().text.contains("changed its mind"), "{reply:?}");
        assert_eq!(reply.why().blame, Blame::Caller, "{reply:?}");
    };
    for side in [Role::Prefill, Role::Decode] {
        let r = router.reserve(&prefill, &decode, TOKENS).await;
        let (first, second) = match side {
            Role::Prefill => ((&prefill, r.prefill_leg()), (&decode, r.decode_leg())),
            _ => ((&decode, r.decode_leg()), (&prefill, r.prefill_leg())),
        };
        let waits = Leg::send(&first.0.serving, first.1).await.unwrap();
        // A decode leg that has come shows here, too: as an offer.
        prefill.holds(1).await;
        assert!(!other.coordinator.abort_room(RoomId(r.room), "not its own"));
        assert!(router.coordinator.abort_room(RoomId(r.room), "changed its mind"));
        aborted(waits.reply().await.unwrap());
        let late = leg(&second.0.serving, second.1).await.unwrap();
        late.assert_failed(&[ErrorKind::Aborted, ErrorKind::RoomEnded]);
        assert!(late.why().text.contains("changed its mind"), "{late:?}");
    }
    // Both run, and the other router's rooms with them.
    let mut hits = 0;
    for ms in [0, 1, 2, 4, 8, 16, 24, 32] {
        let few: Request = other.reserve(&prefill, &decode, TOKENS).await;
        let r = router.reserve(&prefill, &decode, POOL_TOKENS / 2).await;
        let abort = async {
            // Varies where it is hit; nothing waits for it.
            tokio::time::sleep(std::time::Duration::from_millis(ms)).await;
            router.coordinator.abort_room(RoomId(r.room), "changed its mind");
        };
        let (mine, theirs, ()) = tokio::join!(
            router.run(&prefill, &decode, &r),
            other.run(&prefill, &decode, &few),
            abort
        );
        assert!(theirs.prefill.as_ref().unwrap().is_done(), "{theirs:?}");
        assert!(theirs.decode.as_ref().unwrap().is_done(), "{theirs:?}");
        let (p, d) = (mine.prefill.clone().unwrap(), mine.decode.clone().unwrap());
        let done = matches!(mine.outcome, HandoffOutcome::Done { .. });
        assert_eq!((p.is_done(), d.is_done()), (done, done), "{mine:?}");
        if !done {
            hits += 1;
            for reply in [p, d] {
                reply.assert_failed(&[ErrorKind::Aborted, ErrorKind::RoomEnded]);
                assert!(reply.why().text.contains("changed its mind"), "{reply:?}");
            }
        }
    }
    assert!(hits > 0, "no room was hit");
    router.assert_clean(&prefill, &decode).await;
}
