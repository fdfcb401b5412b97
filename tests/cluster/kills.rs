//! Each role killed once in each phase that it passes.

use std::cell::Cell;

use kvlane_coordinator::HandoffOutcome;
use kvlane_proto::msg::service::Load;
use kvlane_proto::{Blame, ErrorKind, Outcome, Role, RoomId, limits};

use super::cluster::{Cluster, Ended, POOL_PAGES, POOL_TOKENS, Router, Worker};
use super::legs::{Leg, Request, leg};
use super::process::{CAP, within};
use super::router_process;

const TOKENS: u32 = 900;

/// Small rooms between two workers that nothing happens to, one after the other, while `work` runs.
async fn beside<T>(router: &Router, pair: (&Worker, &Worker), work: impl Future<Output = T>) -> T {
    let over = Cell::new(false);
    let rooms = async {
        let mut rooms = 0;
        while !over.get() || rooms == 0 {
            router.hand_off(pair.0, pair.1, TOKENS).await;
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

/// A pair that nothing happens to.
async fn bystanders(cluster: &Cluster, router: &Router) -> (Worker, Worker) {
    let pair = tokio::join!(
        cluster.worker(Role::Prefill, "p-beside", &[]),
        cluster.worker(Role::Decode, "d-beside", &[]),
    );
    router.sees(&pair.0).await;
    router.sees(&pair.1).await;
    pair
}

/// Sends both legs of a room as large as the pool; kills `victim`, which stops at `phase`, when it
/// says so, and starts it again: before the survivor has noticed, or after.
async fn kill_at(
    router: &Router,
    phase: &str,
    prefill: &mut Worker,
    decode: &mut Worker,
    victim: Role,
    quickly: bool,
) -> Ended {
    let mut request = router.reserve(prefill, decode, POOL_TOKENS).await;
    // Where the survivor waits for a peer that cannot know of the room any more.
    request.deadline_ms = 5_000;
    let (to_prefill, to_decode) = (request.prefill_leg(), request.decode_leg());
    let (prefill_serving, decode_serving) = (prefill.serving.clone(), decode.serving.clone());
    let victim = if victim == Role::Prefill { prefill } else { decode };
    let kill = async {
        victim.process.stopped_at(phase).await;
        victim.process.kill().await;
        if quickly {
            victim.restart(&[]).await;
        }
    };
    let (p, d, ()) = tokio::join!(
        leg(&prefill_serving, to_prefill),
        // A decode that is to die before its leg comes, gets none.
        async {
            match phase {
                "reserved" => None,
                _ => leg(&decode_serving, to_decode).await,
            }
        },
        kill,
    );
    let outcome = router.coordinator.await_outcome(RoomId(request.room), CAP);
    let outcome = within("the router's wait", outcome).await;
    if !quickly {
        victim.restart(&[]).await;
    }
    Ended { prefill: p, decode: d, outcome }
}

#[tokio::test]
async fn a_killed_prefill_costs_its_own_rooms_only() {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let beside_them = bystanders(&cluster, &router).await;
    let mut decode = cluster.worker(Role::Decode, "d", &[]).await;
    let mut victim = cluster.worker(Role::Prefill, "p", &[]).await;
    let work = async {
        router.sees(&victim).await;
        router.assert_clean(&victim, &decode).await;
        victim.process.kill().await;
        victim.respawn(&["--stop-at", "registered"]);
        victim.process.stopped_at("registered").await;
        victim.process.kill().await;
        // The service remembers it for a while: whoever asks is told who is missing.
        let asked = router.coordinator.reserve(Router::request(&victim, &decode, 100));
        let e = within("a reservation", asked).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::PeerLost, "{e}");
        assert!(e.to_string().contains("default/prefill/p/0"), "{e}");

        let phases = ["offer-accepted", "first-byte", "half", "last-byte", "done", "given-back"];
        for (n, phase) in phases.into_iter().enumerate() {
            eprintln!("prefill killed at {phase}");
            victim.restart(&["--stop-at", phase]).await;
            router.sees(&victim).await;
            let ended =
                kill_at(&router, phase, &mut victim, &mut decode, Role::Prefill, n % 2 == 0).await;
            let received = ended.decode.clone().expect("the decode lives");
            // It may still have answered.
            let told = ended.prefill.as_ref().is_some_and(|p| p.is_done());
            assert!(ended.prefill.is_none() || told, "{phase}: {ended:?}");
            assert!(!told || received.is_done(), "{phase}: {ended:?}");
            // Once every part has arrived the decode may decide either way.
            match phase {
                "done" | "given-back" => received.assert_done(POOL_PAGES),
                "last-byte" if received.is_done() => received.assert_done(POOL_PAGES),
                _ => {
                    received.assert_failed(&[ErrorKind::PeerLost]);
                    assert_eq!(received.why().blame, Blame::Prefill, "{phase}: {received:?}");
                }
            }
            match ended.outcome {
                HandoffOutcome::Done { .. } => assert!(received.is_done()),
                HandoffOutcome::Failed { leg, retryable, refusal, .. } => {
                    assert!(!received.is_done());
                    assert_eq!((leg, retryable), (Blame::Prefill, true), "{refusal}");
                }
                other => panic!("{phase}: {other:?}"),
            }
            router.sees(&victim).await;
            router.assert_clean(&victim, &decode).await;
            victim.process.kill().await;
        }
    };
    beside(&router, (&beside_them.0, &beside_them.1), work).await;
}

#[tokio::test]
async fn a_killed_decode_costs_its_own_rooms_only() {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let beside_them = bystanders(&cluster, &router).await;
    let mut prefill = cluster.worker(Role::Prefill, "p", &[]).await;
    let mut victim = cluster.worker(Role::Decode, "d", &[]).await;
    let work = async {
        router.sees(&prefill).await;
        router.sees(&victim).await;
        router.assert_clean(&prefill, &victim).await;
        victim.process.kill().await;
        victim.respawn(&["--stop-at", "registered"]);
        victim.process.stopped_at("registered").await;
        victim.process.kill().await;
        let asked = router.coordinator.reserve(Router::request(&prefill, &victim, 100));
        let e = within("a reservation", asked).await.unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::PeerLost | ErrorKind::DeadlineExceeded), "{e}");
        assert!(e.to_string().contains("default/decode/d/0"), "{e}");

        let phases = [
            "reserved",
            "offer-sent",
            "offer-accepted",
            "first-byte",
            "half",
            "last-byte",
            "done",
            "given-back",
        ];
        for (n, phase) in phases.into_iter().enumerate() {
            eprintln!("decode killed at {phase}");
            victim.restart(&["--stop-at", phase]).await;
            router.sees(&victim).await;
            let ended =
                kill_at(&router, phase, &mut prefill, &mut victim, Role::Decode, n % 2 == 0).await;
            let sent = ended.prefill.clone().expect("the prefill lives");
            assert!(ended.decode.is_none(), "{phase}: {ended:?}");
            let told = sent.is_done() && matches!(phase, "done" | "given-back");
            if !told {
                let mut kinds = vec![ErrorKind::PeerLost];
                // The leg may come when the link is lost already.
                if matches!(phase, "reserved" | "offer-sent") {
                    kinds.push(ErrorKind::DeadlineExceeded);
                }
                sent.assert_failed(&kinds);
                assert_eq!(sent.why().blame, Blame::Decode, "{phase}: {sent:?}");
                // Only the decode could say more about a room that was granted.
                let unknown = matches!(sent.outcome, Some(Outcome::Unknown { .. }));
                let early = matches!(phase, "reserved" | "offer-sent");
                assert!(unknown || early, "{phase}: {sent:?}");
            }
            match &ended.outcome {
                HandoffOutcome::Failed { leg, retryable, refusal, .. } => {
                    assert_eq!((*leg, *retryable), (Blame::Decode, true), "{refusal}");
                }
                other => panic!("{phase}: {other:?}"),
            }
            router.sees(&victim).await;
            router.assert_clean(&prefill, &victim).await;
            victim.process.kill().await;
        }
    };
    beside(&router, (&beside_them.0, &beside_them.1), work).await;
}

#[tokio::test]
async fn a_killed_router_leaves_nothing_behind() {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let (prefill, decode) = bystanders(&cluster, &router).await;
    router.assert_clean(&prefill, &decode).await;
    let (p, d) = (Role::Prefill, Role::Decode);
    // Which legs it sends before it dies, and which of the others come all the same, from somebody
    // who lives.
    let cases: [(&[Role], &[Role]); 6] =
        [(&[], &[]), (&[p], &[]), (&[d], &[]), (&[p, d], &[]), (&[], &[p, d]), (&[p], &[d])];
    for (n, (its, others)) in cases.into_iter().enumerate() {
        eprintln!("router killed after {its:?}; then {others:?}");
        let name = format!("killed-{n}");
        let started = router_process::start(&cluster, &name, &prefill, &decode, TOKENS, its);
        let (mut process, request) = started.await;
        process.kill().await;
        let p_late = async {
            match others.contains(&p) {
                true => leg(&prefill.serving, request.prefill_leg()).await,
                false => None,
            }
        };
        let d_late = async {
            match others.contains(&d) {
                true => leg(&decode.serving, request.decode_leg()).await,
                false => None,
            }
        };
        let (p_late, d_late) = tokio::join!(p_late, d_late);
        if let (Some(p), Some(d)) = (&p_late, &d_late) {
            // It was reserved, and both legs live: nobody needs the router any more.
            assert!(p.is_done() && d.is_done(), "{p:?} {d:?}");
        } else if let Some(d) = d_late {
            // Its own leg hung up when it died.
            d.assert_failed(&[ErrorKind::Aborted, ErrorKind::RoomEnded]);
            assert!(d.why().text.contains("hung up"), "{d:?}");
        }
        // Also of the reservation that nobody claimed.
        prefill.holds(0).await;
        decode.holds(0).await;
        router.assert_clean(&prefill, &decode).await;
    }
}

#[tokio::test]
async fn every_room_of_a_killed_worker_ends_also_those_that_queue_for_lanes() {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let (mut prefill, mut decode) = bystanders(&cluster, &router).await;
    let lanes = u32::from(limits::LANES_PER_LINK);
    let rooms = lanes + 3;
    for (n, victim) in [Role::Prefill, Role::Decode].into_iter().enumerate() {
        router.assert_clean(&prefill, &decode).await;
        let address = |w: &Worker| {
            router.coordinator.snapshot().worker(&w.identity).unwrap().address().clone()
        };
        let request = |i: u32| Request {
            room: 1 + u64::from(i) + 100 * n as u64,
            tokens: TOKENS / 2,
            prefill: address(&prefill),
            decode: address(&decode),
            issuer: router.identity.clone(),
            deadline_ms: 30_000,
        };
        let mut legs = Vec::new();
        for i in 0..rooms {
            let sent = match victim {
                Role::Prefill => Leg::send(&decode.serving, request(i).decode_leg()).await,
                _ => Leg::send(&prefill.serving, request(i).prefill_leg()).await,
            };
            legs.push(sent.unwrap());
        }
        match victim {
            Role::Prefill => {
                let busy =
                    |l: &Load| (l.rooms, l.queued, l.free_lanes) == (rooms, rooms - lanes, 0);
                decode.load("all lanes lent", busy).await;
                prefill.process.kill().await;
            }
            _ => {
                prefill.holds(rooms).await;
                decode.process.kill().await;
            }
        }
        for leg in legs {
            let reply = leg.reply().await.unwrap();
            reply.assert_failed(&[ErrorKind::PeerLost]);
            let blamed = if victim == Role::Prefill { Blame::Prefill } else { Blame::Decode };
            assert_eq!(reply.why().blame, blamed, "{reply:?}");
        }
        let (dead, survivor) = match victim {
            Role::Prefill => (&mut prefill, &decode),
            _ => (&mut decode, &prefill),
        };
        survivor.load("nothing", |l| (l.rooms, l.queued, l.quarantined_blocks) == (0, 0, 0)).await;
        dead.restart(&[]).await;
        router.sees(dead).await;
        router.assert_clean(&prefill, &decode).await;
    }
}

#[tokio::test]
async fn requests_placed_after_a_prefill_died_go_to_the_one_beside_it() {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let (alive, decode) = bystanders(&cluster, &router).await;
    let mut dead = cluster.worker(Role::Prefill, "p-dead", &[]).await;
    router.sees(&dead).await;
    router.hand_off(&dead, &decode, TOKENS).await;
    dead.process.kill().await;
    // At once: the view still shows it alive, with nothing to do.
    let rooms = (0..8).map(|_| {
        let (coordinator, issuer) = (router.coordinator.clone(), router.identity.clone());
        let (to_alive, to_decode) = (alive.serving.clone(), decode.serving.clone());
        let dead = dead.identity.clone();
        async move {
            let handoff = coordinator.reserve(Router::any(TOKENS)).await.unwrap();
            let request = Request::of(&handoff, &issuer, TOKENS);
            let doomed = handoff.prefill[0].worker.key.identity == dead;
            handoff.detach();
            let decoded = leg(&to_decode, request.decode_leg());
            if doomed {
                // Reserved before the decode had noticed: it fails, with the reason.
                decoded.await.unwrap().assert_failed(&[ErrorKind::PeerLost]);
            } else {
                let (p, d) = tokio::join!(leg(&to_alive, request.prefill_leg()), decoded);
                assert!(p.unwrap().is_done() && d.unwrap().is_done());
            }
        }
    });
    futures(rooms).await;
    // And from then on none goes wrong.
    for _ in 0..4 {
        let handoff = within("a reservation", router.coordinator.reserve(Router::any(TOKENS)));
        let handoff = handoff.await.unwrap();
        assert_eq!(handoff.prefill[0].worker.key.identity, alive.identity);
    }
}

/// All of them at the same time.
async fn futures<F>(work: impl Iterator<Item = F>) -> Vec<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    let mut ends = Vec::new();
    for task in work.map(tokio::spawn).collect::<Vec<_>>() {
        ends.push(within("a reservation", task).await.unwrap());
    }
    ends
}
