//! A worker started again at the same address is another worker: what it had is over, what it said is
//! believed no more, what was mapped of it is let go, and nobody else at its port is taken for it.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;

use kvlane_coordinator::HandoffOutcome;
use kvlane_proto::{Blame, ErrorKind, Outcome, Role, RoomId};

use super::cluster::{Cluster, POOL_TOKENS, Scratch, Trust, Worker};
use super::engines::Engine;
use super::legs::{Leg, Request, leg};
use super::process::{CAP, until};
use super::site::{MOST_TOKENS, Site, beside};

async fn old_rooms(engine: Engine) {
    let mut site = Site::start(engine).await;
    for role in [Role::Prefill, Role::Decode] {
        let Site { router, prefill, decode, beside: pair, .. } = &mut site;
        let work = async {
            let few = MOST_TOKENS / 8;
            // One room is half over, one has the survivor's leg, one is reserved.
            let victim = if role == Role::Prefill { &*prefill } else { &*decode };
            victim.stop_at("half", true).await;
            let runs = router.reserve(prefill, decode, MOST_TOKENS).await;
            let waits = router.reserve(prefill, decode, few).await;
            let reserved = router.reserve(prefill, decode, few).await;
            let survivor = if role == Role::Prefill { &*decode } else { &*prefill };
            let its_leg = |r: &Request| match role {
                Role::Prefill => r.decode_leg(),
                _ => r.prefill_leg(),
            };
            let mut waiting = Leg::send(&survivor.serving, its_leg(&waits)).await.ok();
            let p = Leg::send(&prefill.serving, runs.prefill_leg()).await.unwrap();
            let d = Leg::send(&decode.serving, runs.decode_leg()).await.unwrap();
            let blame = if role == Role::Prefill { Blame::Prefill } else { Blame::Decode };
            let victim = if role == Role::Prefill { &mut *prefill } else { &mut *decode };
            victim.process.held_at("half").await;
            let before = victim.incarnation.clone();
            victim.process.kill().await;
            victim.restart(&[]).await;
            assert_ne!(victim.incarnation, before);
            let running = if role == Role::Prefill { d } else { p };
            // A prefill that never heard of the room from its decode waits for it.
            let all = match role {
                Role::Prefill => vec![Some(running), waiting.take()],
                _ => vec![Some(running)],
            };
            for leg in all.into_iter().flatten() {
                let told = leg.reply().await.unwrap();
                told.assert_failed(&[ErrorKind::PeerLost]);
                assert_eq!(told.why().blame, blame, "{told:?}");
                let names = told.why().text.contains(&victim.identity.to_string());
                assert!(names, "the dead one is named: {told:?}");
            }
            for room in [&runs, &waits, &reserved] {
                let outcome = router.coordinator.await_outcome(RoomId(room.room), CAP).await;
                let HandoffOutcome::Failed { leg, retryable, refusal, .. } = outcome else {
                    panic!("{outcome:?}")
                };
                assert_eq!((leg, retryable), (blame, true), "{refusal}");
            }
            // What the old one had said is not believed: a leg that names it is refused, and says why.
            if role == Role::Prefill {
                let old = Request { room: 4_000 + few as u64, deadline_ms: 5_000, ..waits.clone() };
                assert_eq!(old.prefill.key.incarnation.to_string(), before);
                // The decode knows the new one first.
                router.sees(prefill).await;
                router.hand_off(prefill, decode, few).await;
                let told = leg(&decode.serving, old.decode_leg()).await.unwrap();
                told.assert_failed(&[ErrorKind::StaleIncarnation]);
                assert_eq!(told.why().blame, Blame::Prefill, "{told:?}");
                assert!(told.why().text.contains(&before), "{told:?}");
                assert!(told.why().text.contains(&prefill.incarnation), "{told:?}");
            } else {
                // Nor has the new one rooms of the old one.
                router.sees(decode).await;
                for room in [&runs, &reserved] {
                    let told = leg(
                        &prefill.serving,
                        Request { deadline_ms: 500, ..room.clone() }.prefill_leg(),
                    );
                    let told = told.await.unwrap();
                    assert!(!told.is_done(), "{told:?}");
                    assert!(!matches!(told.outcome, Some(Outcome::Done { .. })), "{told:?}");
                }
                // A leg that waits for the old one hangs up, or waits until its deadline.
                drop(waiting.take());
                prefill.holds(0).await;
            }
        };
        beside(router, pair, work).await;
        site.assert_clean().await;
    }
}

#[tokio::test]
async fn a_restarted_worker_is_a_new_one_over_tcp() {
    old_rooms(Engine::Tcp).await;
}

#[tokio::test]
async fn a_restarted_worker_is_a_new_one_over_shm() {
    old_rooms(Engine::Shm).await;
}

#[tokio::test]
async fn a_restarted_worker_is_a_new_one_over_gpunetio() {
    old_rooms(Engine::Gpunetio).await;
}

/// The memory files that a process maps or has open: inode numbers.
fn memory_files(worker: &Worker) -> BTreeSet<u64> {
    let dir = format!("/proc/{}", worker.process.pid());
    let maps = std::fs::read_to_string(format!("{dir}/maps")).unwrap();
    let mapped = maps.lines().filter(|l| l.contains("/memfd:"));
    let mapped = mapped.map(|l| l.split_whitespace().nth(4).unwrap().parse().unwrap());
    let open = std::fs::read_dir(format!("{dir}/fd")).unwrap().filter_map(|fd| {
        let path = fd.unwrap().path();
        let is = std::fs::read_link(&path).ok()?.to_string_lossy().starts_with("/memfd:");
        is.then(|| std::fs::metadata(&path).ok().map(|m| m.ino()))?
    });
    mapped.chain(open).collect()
}

#[tokio::test]
async fn nobody_keeps_the_memory_of_a_dead_worker() {
    let mut site = Site::start(Engine::Shm).await;
    for role in [Role::Prefill, Role::Decode] {
        let Site { router, prefill, decode, .. } = &mut site;
        let alive = if role == Role::Prefill { &mut *decode } else { &mut *prefill };
        alive.process.kill().await;
        alive.restart(&[]).await;
        router.sees(alive).await;
        // Nobody has a link to it yet.
        let own = memory_files(alive);
        router.hand_off(prefill, decode, POOL_TOKENS).await;
        let (dead, alive) = match role {
            Role::Prefill => (&mut *prefill, &*decode),
            _ => (&mut *decode, &*prefill),
        };
        let its: BTreeSet<u64> = memory_files(dead).difference(&own).copied().collect();
        assert!(!its.is_disjoint(&memory_files(alive)), "what they share can be seen");
        dead.process.kill().await;
        dead.restart(&[]).await;
        until("nothing of the dead worker's memory is left", || {
            memory_files(alive).is_disjoint(&its).then_some(())
        })
        .await;
        router.sees(dead).await;
        // And after as many restarts as there may be, there is no more of it than at first.
        site.assert_clean().await;
        let count =
            |site: &Site| memory_files(&site.decode).len() + memory_files(&site.prefill).len();
        let before = count(&site);
        let Site { router, prefill, decode, .. } = &mut site;
        let dead = if role == Role::Prefill { &mut *prefill } else { &mut *decode };
        dead.process.kill().await;
        dead.restart(&[]).await;
        router.sees(dead).await;
        site.assert_clean().await;
        until("as many memory files as before", || (count(&site) <= before).then_some(())).await;
    }
}

#[tokio::test]
async fn whoever_took_over_the_port_of_a_worker_is_refused_by_name() {
    let dir = Scratch::new();
    let authority = dir.path().join("ca");
    kvlane_transport::quic::ca::create_ca(&authority, "default").unwrap();
    let cluster = Cluster::start_in(dir, Trust::Ca(authority)).await;
    let router = cluster.router("r").await;
    let (mut prefill, decode) = tokio::join!(
        cluster.worker(Role::Prefill, "p", &[]),
        cluster.worker(Role::Decode, "d", &[]),
    );
    router.sees(&prefill).await;
    router.sees(&decode).await;
    router.hand_off(&prefill, &decode, POOL_TOKENS).await;
    let request = router.reserve(&prefill, &decode, 800).await;
    router.coordinator.abort_room(RoomId(request.room), "for its address only");
    prefill.process.kill().await;
    let ports = ["--listen", &prefill.quic, "--serving", &prefill.serving];
    let mut other = cluster.worker(Role::Prefill, "other", &ports).await;
    assert_eq!(other.quic, prefill.quic);
    let mut old = Request { room: 4_000, deadline_ms: 10_000, ..request };
    let told = loop {
        let told = leg(&decode.serving, old.decode_leg()).await.unwrap();
        // The decode may not have given the dead one's link up yet.
        if !told.why().text.contains("process has ended") || old.room == 4_100 {
            break told;
        }
        old.room += 1;
    };
    assert_eq!(told.why().blame, Blame::Prefill, "{told:?}");
    let text = &told.why().text;
    assert!(text.contains("default/prefill/p/0") && text.contains("identity_mismatch"), "{text}");
    assert!(text.contains("default/prefill/other/0"), "who is there is named: {text}");
    // It is somebody all the same, and the right one is taken again.
    router.sees(&other).await;
    router.hand_off(&other, &decode, POOL_TOKENS).await;
    other.process.kill().await;
    prefill.restart(&[]).await;
    router.sees(&prefill).await;
    router.assert_clean(&prefill, &decode).await;
}
