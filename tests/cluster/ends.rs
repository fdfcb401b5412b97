//! Processes that end in order, freeze, or lose their service.

use kvlane_proto::msg::service::WorkerAddress;
use kvlane_proto::{Blame, ErrorKind, Outcome, Role, RoomId};

use super::cluster::{Cluster, Router, Worker};
use super::legs::{Leg, Reply, Request, leg};
use super::process::{until, within};

const TOKENS: u32 = 800;

async fn pair(cluster: &Cluster, router: &Router, extra: &[&str]) -> (Worker, Worker) {
    let pair = tokio::join!(
        cluster.worker(Role::Prefill, "p", extra),
        cluster.worker(Role::Decode, "d", extra),
    );
    router.sees(&pair.0).await;
    router.sees(&pair.1).await;
    pair
}

/// Waits until a worker has taken note of its signal.
async fn drains(worker: &Worker) {
    let log = || worker.process.log();
    until("the worker drains", || log().contains("draining rooms=").then_some(())).await;
}

#[tokio::test]
async fn a_worker_told_to_end_finishes_its_rooms_and_takes_no_new_ones() {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let (mut prefill, mut decode) = pair(&cluster, &router, &[]).await;
    let address = |w: &Worker| -> WorkerAddress {
        router.coordinator.snapshot().worker(&w.identity).unwrap().address().clone()
    };
    for role in [Role::Decode, Role::Prefill] {
        // One room has one leg at the worker that ends, another is only reserved.
        let begun = router.reserve(&prefill, &decode, TOKENS).await;
        let new = Request {
            room: 1,
            prefill: address(&prefill),
            decode: address(&decode),
            ..begun.clone()
        };
        let (to_prefill, to_decode) = (begun.prefill_leg(), begun.decode_leg());
        let (prefill_serving, decode_serving) = (prefill.serving.clone(), decode.serving.clone());
        let (first, second, new_leg) = match role {
            Role::Decode => {
                ((&decode_serving, to_decode), (&prefill_serving, to_prefill), new.decode_leg())
            }
            _ => ((&prefill_serving, to_prefill), (&decode_serving, to_decode), new.prefill_leg()),
        };
        let waits = Leg::send(first.0, first.1).await.unwrap();
        // A decode leg that has come shows here, too: as an offer.
        prefill.holds(1).await;
        let ending = if role == Role::Decode { &mut decode } else { &mut prefill };
        let asked = kvlane_coordinator::PairRequest::new(TOKENS);
        let reserved = within("a reservation", router.coordinator.reserve(asked)).await.unwrap();
        ending.process.signal("TERM");
        drains(ending).await;
        // Rooms that have begun are finished, also one that was only reserved.
        if role == Role::Decode {
            let r = Request::of(&reserved, &router.identity, TOKENS);
            let both = tokio::join!(
                leg(&decode_serving, r.decode_leg()),
                leg(&prefill_serving, r.prefill_leg()),
            );
            assert!(both.0.unwrap().is_done() && both.1.unwrap().is_done());
        }
        drop(reserved);
        // New rooms are refused by whoever is asked.
        let refused = leg(first.0, new_leg).await.unwrap();
        refused.assert_failed(&[ErrorKind::Draining]);
        let blamed = if role == Role::Decode { Blame::Decode } else { Blame::Prefill };
        assert_eq!(refused.why().blame, blamed, "{refused:?}");
        router.sees_draining(ending).await;
        let asked = kvlane_coordinator::PairRequest::new(TOKENS);
        let e = within("a reservation", router.coordinator.reserve(asked)).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Draining, "{e}");
        let done = leg(second.0, second.1).await.unwrap();
        assert!(done.is_done(), "{done:?}");
        let done = waits.reply().await.expect("an answer before the end");
        assert!(done.is_done(), "{done:?}");
        let status = ending.process.ended().await;
        assert_eq!(status.code(), Some(0), "{}", ending.process.log());
        ending.restart(&[]).await;
        router.sees(ending).await;
        router.assert_clean(&prefill, &decode).await;
    }
}

#[tokio::test]
async fn a_second_signal_ends_a_worker_at_once_and_its_peer_is_told() {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let (prefill, mut decode) = pair(&cluster, &router, &[]).await;
    let request = router.reserve(&prefill, &decode, TOKENS).await;
    let waits = Leg::send(&decode.serving, request.decode_leg()).await.unwrap();
    prefill.holds(1).await;
    decode.process.signal("TERM");
    drains(&decode).await;
    decode.process.signal("TERM");
    let status = decode.process.ended().await;
    assert_eq!(status.code(), Some(130), "{}", decode.process.log());
    assert!(waits.reply().await.is_none());
    let late = leg(&prefill.serving, request.prefill_leg()).await.unwrap();
    late.assert_failed(&[ErrorKind::PeerLost]);
    assert_eq!(late.why().blame, Blame::Decode, "{late:?}");
    decode.restart(&[]).await;
    router.sees(&decode).await;
    router.assert_clean(&prefill, &decode).await;
}

/// Freezes one side of a room as large as the pool until the other side's leg has ended: later from
/// try to try, or sooner, until the room is hit while its pages are on their way. Returns what the
/// leg of the side that did not freeze said.
async fn freeze(router: &Router, prefill: &Worker, decode: &Worker, frozen: Role) -> Reply {
    let tokens = decode.pool_tokens();
    let (mut soonest_ms, mut latest_ms) = (0, 2_000);
    for _ in 0..16 {
        let ms = (soonest_ms + latest_ms) / 2;
        let r = router.reserve(prefill, decode, tokens).await;
        let received = Leg::send(&decode.serving, r.decode_leg()).await.unwrap();
        let sent = Leg::send(&prefill.serving, r.prefill_leg()).await.unwrap();
        let (stops, its, others) = match frozen {
            Role::Prefill => (prefill, sent, received),
            _ => (decode, received, sent),
        };
        tokio::time::sleep(std::time::Duration::from_millis(ms)).await;
        stops.process.signal("STOP");
        let others = others.reply().await.unwrap();
        stops.process.signal("CONT");
        let its = its.reply().await.unwrap();
        if others.is_done() {
            // The prefill may never hear of a room that is done, but not the other way round.
            assert!(its.is_done() || frozen == Role::Prefill, "{others:?} {its:?}");
            latest_ms = ms;
            continue;
        }
        let received = if frozen == Role::Prefill { &others } else { &its };
        match received.outcome.as_ref() {
            Some(Outcome::Failed { bytes, .. }) if *bytes > 0 => {
                assert!(!its.is_done(), "{others:?} {its:?}");
                return others;
            }
            // Hit after the last page.
            Some(Outcome::Done { .. }) => latest_ms = ms,
            _ => soonest_ms = ms,
        }
    }
    panic!("never hit while pages were on their way: {soonest_ms} to {latest_ms} ms");
}

#[tokio::test]
async fn a_frozen_worker_is_silent_and_nothing_is_written_when_it_thaws() {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    // Large enough that a room takes a while.
    let big = ["--model", "llama-3.1-8b", "--pool-mib", "128"];
    let (prefill, decode) = pair(&cluster, &router, &big).await;
    for (frozen, blame) in [(Role::Prefill, Blame::Prefill), (Role::Decode, Blame::Decode)] {
        let told = freeze(&router, &prefill, &decode, frozen).await;
        told.assert_failed(&[ErrorKind::PeerLost]);
        assert!(told.why().text.contains("silent"), "{told:?}");
        assert_eq!(told.why().blame, blame, "{told:?}");
        // Every block is used again, twice, with its stamp looked at.
        router.assert_clean(&prefill, &decode).await;
    }
}

#[tokio::test]
async fn a_service_that_is_away_costs_nobody_a_room() {
    let mut cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let (prefill, decode) = pair(&cluster, &router, &[]).await;
    let mut issued = std::collections::HashSet::new();
    for phase in ["reserved", "prefill leg", "decode leg"] {
        let request = router.reserve(&prefill, &decode, TOKENS).await;
        assert!(issued.insert(request.room));
        let early = match phase {
            "prefill leg" => Some((Role::Prefill, &prefill, request.prefill_leg())),
            "decode leg" => Some((Role::Decode, &decode, request.decode_leg())),
            _ => None,
        };
        let mut first = None;
        if let Some((role, worker, sent)) = early {
            first = Some((role, Leg::send(&worker.serving, sent).await.unwrap()));
            prefill.holds(1).await;
        }
        cluster.bootstrap.kill().await;
        let (p, d) = match first {
            Some((Role::Prefill, p)) => {
                let d = leg(&decode.serving, request.decode_leg()).await;
                (p.reply().await, d)
            }
            Some((_, d)) => {
                let p = leg(&prefill.serving, request.prefill_leg()).await;
                (p, d.reply().await)
            }
            None => tokio::join!(
                leg(&prefill.serving, request.prefill_leg()),
                leg(&decode.serving, request.decode_leg()),
            ),
        };
        assert!(p.as_ref().unwrap().is_done() && d.as_ref().unwrap().is_done(), "{p:?} {d:?}");
        // Rooms go on being made, too: the router has its view and its slot. In the last round for
        // longer than the workers' leases, or as long as `KVLANE_AWAY_S` says.
        let lease = std::time::Duration::from_millis(kvlane_proto::limits::WORKER_LEASE_MS);
        let asked = std::env::var("KVLANE_AWAY_S").ok().map(|s| s.parse().expect("seconds"));
        let longest = asked.map_or(lease, std::time::Duration::from_secs);
        let away = std::time::Instant::now();
        loop {
            router.hand_off(&prefill, &decode, TOKENS).await;
            if phase != "decode leg" || away.elapsed() > longest {
                break;
            }
        }
        cluster.restart_bootstrap().await;
        // Both register again, which somebody who has never seen them sees.
        let other = cluster.router(&format!("r-{}", issued.len())).await;
        other.sees(&prefill).await;
        other.sees(&decode).await;
        other.hand_off(&prefill, &decode, TOKENS).await;
        // A service that has forgotten whom it gave which slot gives none twice.
        for r in [&router, &other] {
            let request = r.reserve(&prefill, &decode, TOKENS).await;
            assert!(issued.insert(request.room), "room {} was issued twice", request.room);
            assert!(r.coordinator.abort_room(RoomId(request.room), "only its number matters"));
        }
    }
    router.assert_clean(&prefill, &decode).await;
}

/// Freezes that are longer than a fence may take: nothing is withheld for it, and nobody else is
/// blamed.
#[tokio::test]
async fn a_decode_that_stands_still_keeps_its_blocks() {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let prefill = cluster.worker(Role::Prefill, "p", &[]).await;
    let decode = cluster.worker(Role::Decode, "d", &[]).await;
    router.sees(&prefill).await;
    router.sees(&decode).await;
    for _ in 0..2 {
        let r = router.reserve(&prefill, &decode, TOKENS).await;
        let to_prefill = Leg::send(&prefill.serving, r.prefill_leg()).await.unwrap();
        let to_decode = Leg::send(&decode.serving, r.decode_leg()).await.unwrap();
        router.coordinator.abort_room(kvlane_proto::RoomId(r.room), "test");
        decode.process.signal("STOP");
        tokio::time::sleep(std::time::Duration::from_millis(kvlane_proto::limits::FENCE_MS + 500))
            .await;
        decode.process.signal("CONT");
        let reply = to_decode.reply().await;
        assert!(reply.is_some() && to_prefill.reply().await.is_some());
        decode.load("nothing", |l| (l.rooms, l.quarantined_blocks) == (0, 0)).await;
        // Its lease has ended meanwhile; it takes a new one by itself.
        router.sees(&decode).await;
    }
    router.assert_clean(&prefill, &decode).await;
}
