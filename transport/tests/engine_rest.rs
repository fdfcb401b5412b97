//! What an engine's thread uses when nothing happens. Alone in its process, so that the threads
//! found are its own.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)] // Tests fail by panicking.

mod engine_conformance;

use std::fs::read_to_string;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use engine_conformance::{LINK, PATIENCE, Pool, layout, peer};

use kvlane_proto::layout::KvKind;
use kvlane_proto::{GrantId, LaneId, PartId, Role, limits};
use kvlane_transport::engine::driver::{EngineHandle, spawn};
use kvlane_transport::engine::tcp::{TcpConfig, TcpEngine};
use kvlane_transport::engine::{Command, EngineEvent, OpenGrant, OpenSource, Post};

fn engine() -> (EngineHandle, Receiver<EngineEvent>) {
    let (said, events) = channel();
    let on_events = move |batch: Vec<EngineEvent>| {
        batch.into_iter().for_each(|e| drop(said.send(e)));
    };
    let engine = TcpEngine::new(TcpConfig::default()).unwrap();
    (spawn(Box::new(engine), Box::new(on_events)).unwrap(), events)
}

fn until(events: &Receiver<EngineEvent>, want: impl Fn(&EngineEvent) -> bool) -> EngineEvent {
    loop {
        let event = events.recv_timeout(PATIENCE).unwrap();
        if want(&event) {
            return event;
        }
    }
}

/// Of each engine thread: nanoseconds on a processor, and how often it went to sleep.
fn used() -> Vec<(u64, u64)> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let engines =
        tasks.filter(|task| read_to_string(task.join("comm")).unwrap().trim() == "kvlane-tcp");
    let used = engines.map(|task| {
        let ran = read_to_string(task.join("schedstat")).unwrap();
        let status = read_to_string(task.join("status")).unwrap();
        let sleeps = status.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"));
        let first = |text: &str| text.split_whitespace().next().unwrap().parse().unwrap();
        (first(&ran), first(sleeps.unwrap()))
    });
    used.collect()
}

#[test]
fn an_engine_at_rest_sleeps() {
    let ((tx, from_tx), (rx, from_rx)) = (engine(), engine());
    let l = layout(4096, 1, KvKind::Mla);
    let pools = [Pool::new(&l, 8), Pool::new(&l, 8)];
    tx.register(&pools[0].region).unwrap();
    rx.register(&pools[1].region).unwrap();
    for (handle, role, receiver) in [(&tx, Role::Decode, false), (&rx, Role::Prefill, true)] {
        let lanes = limits::LANES_PER_LINK;
        let listen = Command::Listen { link: LINK, peer: peer(role), lanes, receiver };
        handle.send(listen).unwrap();
    }
    let EngineEvent::Local { blob, .. } =
        until(&from_rx, |e| matches!(e, EngineEvent::Local { .. }))
    else {
        panic!("no blob")
    };
    tx.send(Command::Connect { link: LINK, remote: blob.unwrap() }).unwrap();
    for _ in 0..limits::LANES_PER_LINK {
        until(&from_tx, |e| matches!(e, EngineEvent::LaneUp { .. }));
    }
    // A part has moved, and the grant stays open.
    let (plans, grant) = (pools.each_ref().map(|p| p.plan(&[3, 5], 4096)), GrantId(1));
    let sources = vec![OpenSource { link: LINK, lanes: vec![LaneId(0)], plan: plans[1].clone() }];
    let open = OpenGrant { grant, sources };
    rx.send(Command::Open(open)).unwrap();
    let pages = plans[0].pages(PartId(0)).unwrap();
    tx.send(Command::Post(Post { link: LINK, grant, part: PartId(0), lane: LaneId(0), pages }))
        .unwrap();
    until(&from_tx, |e| matches!(e, EngineEvent::Acked { .. }));
    std::thread::sleep(Duration::from_millis(100));
    let before = used();
    assert_eq!(before.len(), 2, "one thread an engine");
    std::thread::sleep(Duration::from_secs(2));
    for ((ran_before, sleeps_before), (ran, sleeps)) in before.into_iter().zip(used()) {
        let (ran, sleeps) = (ran - ran_before, sleeps - sleeps_before);
        // It looks round once a second; a thread that spins or wakes up for nothing has thousands.
        assert!(sleeps <= 10, "woken {sleeps} times in two seconds");
        // 1 % of two seconds.
        assert!(ran < 20_000_000, "{ran} ns on a processor in two seconds");
    }
    tx.stop();
    rx.stop();
}
