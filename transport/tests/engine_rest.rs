//! What an engine's thread uses when nothing happens. Alone in its process, so that the threads
//! found are its own.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)] // Tests fail by panicking.

mod engine_conformance;

use std::fs::read_to_string;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use engine_conformance::nics::Nics;
use engine_conformance::{LINK, PATIENCE, Pool, layout, peer};

use kvlane_proto::layout::KvKind;
use kvlane_proto::{DataPath, GrantId, LaneId, PartId, Role, limits};
use kvlane_transport::engine::driver::{EngineHandle, spawn};
use kvlane_transport::engine::tcp::{TcpConfig, TcpEngine};
use kvlane_transport::engine::{
    Caps, Command, Engine, EngineEvent, OpenGrant, OpenSource, Post, SendGrant,
};

/// An engine's thread, and what it says to its owner and to its peer.
struct Side {
    handle: EngineHandle,
    events: Receiver<EngineEvent>,
    peer: Arc<OnceLock<EngineHandle>>,
}

fn side(engine: Box<dyn Engine>) -> Side {
    let (said, events) = channel();
    let peer = Arc::<OnceLock<EngineHandle>>::default();
    let other = peer.clone();
    let on_events = move |batch: Vec<EngineEvent>| {
        for event in batch {
            match event {
                // The link, which is somebody else's business.
                EngineEvent::Tell { link, message } => {
                    other.get().unwrap().send(Command::Told { link, message }).unwrap();
                }
                event => drop(said.send(event)),
            }
        }
    };
    Side { handle: spawn(engine, Box::new(on_events)).unwrap(), events, peer }
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
fn used(name: &str) -> Vec<(u64, u64)> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let name = format!("kvlane-{name}");
    // The kernel keeps so much of a name.
    let name = &name[..name.len().min(15)];
    let engines = tasks.filter(|task| read_to_string(task.join("comm")).unwrap().trim() == name);
    let used = engines.map(|task| {
        let ran = read_to_string(task.join("schedstat")).unwrap();
        let status = read_to_string(task.join("status")).unwrap();
        let sleeps = status.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"));
        let first = |text: &str| text.split_whitespace().next().unwrap().parse().unwrap();
        (first(&ran), first(sleeps.unwrap()))
    });
    used.collect()
}

/// Both ends of a link at rest, with a grant open: they sleep, and wake up for a part.
fn sleeps((tx, rx): (Box<dyn Engine>, Box<dyn Engine>)) {
    let Caps { name, path, .. } = tx.caps();
    let (tx, rx) = (side(tx), side(rx));
    assert!(tx.peer.set(rx.handle.clone()).is_ok() && rx.peer.set(tx.handle.clone()).is_ok());
    let l = layout(4096, 1, KvKind::Mla);
    let pools = [Pool::new(&l, 8), Pool::new(&l, 8)];
    tx.handle.register(&pools[0].region).unwrap();
    rx.handle.register(&pools[1].region).unwrap();
    let lanes = limits::LANES_PER_LINK;
    for (side, role, receiver) in [(&tx, Role::Decode, false), (&rx, Role::Prefill, true)] {
        let listen = Command::Listen { link: LINK, peer: peer(role), lanes, receiver };
        side.handle.send(listen).unwrap();
    }
    let blob = |side: &Side| {
        let local = until(&side.events, |e| matches!(e, EngineEvent::Local { .. }));
        let EngineEvent::Local { blob, .. } = local else { panic!("no blob") };
        blob.unwrap()
    };
    let (of_tx, of_rx) = (blob(&tx), blob(&rx));
    rx.handle.send(Command::Connect { link: LINK, remote: of_tx }).unwrap();
    tx.handle.send(Command::Connect { link: LINK, remote: of_rx }).unwrap();
    for events in [&tx.events, &rx.events] {
        (0..lanes).for_each(|_| drop(until(events, |e| matches!(e, EngineEvent::LaneUp { .. }))));
    }
    let (from, to) = (pools[0].source(&[3, 5], 4096), pools[1].plan(&[3, 5], 4096));
    let (link, grant, on) = (LINK, GrantId(1), vec![LaneId(0)]);
    let sources = vec![OpenSource { link, lanes: on.clone(), plan: to.clone() }];
    rx.handle.send(Command::Open(OpenGrant { grant, sources })).unwrap();
    if path == DataPath::OneSided {
        let given = SendGrant { link, grant, lanes: on, plan: to };
        tx.handle.send(Command::Grant(given)).unwrap();
    }
    let move_part = |part| {
        let (part, lane) = (PartId(part), LaneId(0));
        let pages = from.pages(part).unwrap();
        tx.handle.send(Command::Post(Post { link, grant, part, lane, pages })).unwrap();
        until(&tx.events, |e| matches!(e, EngineEvent::Acked { part: p, .. } if *p == part));
        until(&rx.events, |e| matches!(e, EngineEvent::Arrived { part: p, .. } if *p == part));
    };
    // A part has moved, and the grant stays open.
    move_part(0);
    std::thread::sleep(Duration::from_millis(100));
    let before = used(name);
    assert_eq!(before.len(), 2, "one thread an engine");
    std::thread::sleep(Duration::from_secs(2));
    for ((ran_before, sleeps_before), (ran, sleeps)) in before.into_iter().zip(used(name)) {
        let (ran, sleeps) = (ran - ran_before, sleeps - sleeps_before);
        // It looks round once a second; a thread that spins or wakes up for nothing has thousands.
        assert!(sleeps <= 10, "{name}: woken {sleeps} times in two seconds");
        // 1 % of two seconds.
        assert!(ran < 20_000_000, "{name}: {ran} ns on a processor in two seconds");
    }
    move_part(1);
    tx.handle.stop();
    rx.handle.stop();
}

/// One test, so that the threads found are of one engine.
#[test]
fn an_engine_at_rest_sleeps() {
    let tcp = || Box::new(TcpEngine::new(TcpConfig::default()).unwrap());
    sleeps((tcp(), tcp()));
    sleeps(Nics::new(2).couple(64));
}
