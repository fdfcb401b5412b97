//! The engine's thread: bounded queue, sleep and wake, panics, its end.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)] // Tests fail by panicking.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use kvlane_proto::{DataPath, ErrorKind, LinkId, Result, Time};
use kvlane_transport::engine::driver::{EngineHandle, QUEUE_COMMANDS, spawn};
use kvlane_transport::engine::{Caps, Command, Engine, EngineEvent, Interest};
use kvlane_transport::memory::Region;

const PATIENCE: Duration = Duration::from_secs(30);

/// Does what the link number of a `Close` says.
struct Toy {
    /// The thread waits here when told to.
    gate: Arc<Mutex<()>>,
    said: Sender<&'static str>,
    outbox: Vec<EngineEvent>,
    polls: Arc<std::sync::atomic::AtomicU64>,
    /// `pid/task/tid` of the thread.
    task: Arc<OnceLock<String>>,
}

const WAIT: LinkId = LinkId(1);
const PANIC: LinkId = LinkId(2);
/// A region that waits at the gate while it is registered.
const SLOW_BYTES: u64 = 8192;

impl Engine for Toy {
    fn caps(&self) -> Caps {
        Caps { name: "toy", path: DataPath::ReceiverCopies, emulated: true, rails: 1 }
    }
    fn register(&mut self, region: &Arc<Region>) -> Result<()> {
        self.said.send("register").unwrap();
        if region.bytes() == SLOW_BYTES {
            drop(self.gate.lock().unwrap());
        }
        Ok(())
    }
    fn unregister(&mut self, region: &Arc<Region>) -> Result<()> {
        if region.bytes() == SLOW_BYTES {
            self.said.send("unregister").unwrap();
            return Ok(());
        }
        Err(kvlane_proto::Error::new(ErrorKind::Busy, "in use"))
    }
    fn command(&mut self, _: Time, command: Command) {
        match command {
            Command::Close { link: WAIT } => {
                self.said.send("waiting").unwrap();
                drop(self.gate.lock().unwrap());
            }
            Command::Close { link: PANIC } => panic!("told to"),
            Command::Close { link } => {
                self.outbox.push(EngineEvent::LaneUp { link, lane: kvlane_proto::LaneId(0) })
            }
            _ => {}
        }
    }
    fn poll(&mut self, _: Time, events: &mut Vec<EngineEvent>) -> bool {
        self.polls.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        events.append(&mut self.outbox);
        !events.is_empty()
    }
    fn park(&mut self, _: &mut Vec<Interest>) -> Option<Time> {
        self.task
            .get_or_init(|| std::fs::read_link("/proc/thread-self").unwrap().display().to_string());
        let _ = self.said.send("park");
        None
    }
}

impl Drop for Toy {
    fn drop(&mut self) {
        let _ = self.said.send("dropped");
    }
}

struct Rig {
    handle: EngineHandle,
    events: Receiver<EngineEvent>,
    said: Receiver<&'static str>,
    gate: Arc<Mutex<()>>,
    polls: Arc<std::sync::atomic::AtomicU64>,
    /// `pid/task/tid` of the thread.
    task: Arc<OnceLock<String>>,
}

fn rig() -> Rig {
    let (tx, events) = channel();
    let (said_tx, said) = channel();
    let gate: Arc<Mutex<()>> = Arc::default();
    let polls: Arc<std::sync::atomic::AtomicU64> = Arc::default();
    let task: Arc<OnceLock<String>> = Arc::default();
    let toy = Toy {
        gate: gate.clone(),
        said: said_tx,
        outbox: vec![],
        polls: polls.clone(),
        task: task.clone(),
    };
    let on_events = move |batch: Vec<EngineEvent>| {
        assert!(!batch.is_empty());
        batch.into_iter().for_each(|e| drop(tx.send(e)));
    };
    let handle = spawn(Box::new(toy), Box::new(on_events)).unwrap();
    Rig { handle, events, said, gate, polls, task }
}

impl Rig {
    fn said(&self, what: &str) {
        while self.said.recv_timeout(PATIENCE).unwrap() != what {}
    }
    /// Until the kernel says that the engine's thread sleeps.
    fn until_asleep(&self) {
        let started = Instant::now();
        loop {
            let task = self.task.get().unwrap();
            let stat = std::fs::read_to_string(format!("/proc/{task}/stat")).unwrap();
            // pid (name) state …
            if stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S')) {
                return;
            }
            assert!(started.elapsed() < PATIENCE);
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_sleeping_engine_is_woken_by_every_command() {
    let r = rig();
    let started = Instant::now();
    for n in 10..60 {
        r.said("park");
        r.until_asleep();
        r.handle.send(Command::Close { link: LinkId(n) }).unwrap();
        let e = r.events.recv_timeout(PATIENCE).unwrap();
        assert!(matches!(e, EngineEvent::LaneUp { link, .. } if link == LinkId(n)), "{e:?}");
    }
    // Without being woken it sleeps for a second each time.
    assert!(started.elapsed() < Duration::from_secs(25), "{:?}", started.elapsed());
}

#[test]
fn an_engine_at_rest_is_polled_once_a_second() {
    let r = rig();
    r.said("park");
    r.until_asleep();
    let count = || r.polls.load(std::sync::atomic::Ordering::Relaxed);
    let before = count();
    std::thread::sleep(Duration::from_millis(2500));
    let turns = count() - before;
    assert!((1..=5).contains(&turns), "{turns} turns in two and a half seconds");
}

#[test]
fn a_full_queue_is_busy_and_loses_nothing_that_it_took() {
    let r = rig();
    let closed = r.gate.lock().unwrap();
    r.handle.send(Command::Close { link: WAIT }).unwrap();
    r.said("waiting");
    for n in 0..QUEUE_COMMANDS as u64 {
        r.handle.send(Command::Close { link: LinkId(100 + n) }).unwrap();
    }
    let e = r.handle.send(Command::Close { link: LinkId(9) }).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Busy);
    drop(closed);
    for n in 0..QUEUE_COMMANDS as u64 {
        let e = r.events.recv_timeout(PATIENCE).unwrap();
        assert!(matches!(e, EngineEvent::LaneUp { link: LinkId(l), .. } if l == 100 + n), "{e:?}");
    }
}

#[test]
fn registration_answers_and_ends_with_the_thread() {
    let r = rig();
    let region = Region::memfd(4096).unwrap();
    r.handle.register(&region).unwrap();
    r.said("register");
    assert_eq!(r.handle.unregister(&region).unwrap_err().kind(), ErrorKind::Busy);
    r.handle.stop();
    assert!(r.handle.ended());
    r.said("dropped");
    assert_eq!(r.handle.register(&region).unwrap_err().kind(), ErrorKind::Internal);
    assert_eq!(
        r.handle.send(Command::Close { link: WAIT }).unwrap_err().kind(),
        ErrorKind::Internal
    );
    // The callback is gone, which is how its other end notices.
    while r.events.recv_timeout(PATIENCE).is_ok() {}
    r.handle.stop();
}

#[test]
fn a_registration_that_was_given_up_leaves_no_trace() {
    let r = rig();
    let closed = r.gate.lock().unwrap();
    let ask = |bytes| {
        let (handle, region) = (r.handle.clone(), Region::memfd(bytes).unwrap());
        std::thread::spawn(move || handle.register(&region).unwrap_err().kind())
    };
    let begun = ask(SLOW_BYTES);
    r.said("register");
    let queued = ask(4096);
    assert_eq!(begun.join().unwrap(), ErrorKind::DeadlineExceeded);
    assert_eq!(queued.join().unwrap(), ErrorKind::DeadlineExceeded);
    drop(closed);
    r.handle.send(Command::Close { link: LinkId(10) }).unwrap();
    r.events.recv_timeout(PATIENCE).unwrap();
    let said: Vec<_> = r.said.try_iter().filter(|s| s.ends_with("register")).collect();
    assert_eq!(said, ["unregister"], "what had begun is undone, the other never begins");
}

#[test]
fn every_stop_waits_for_the_end() {
    let r = rig();
    let closed = r.gate.lock().unwrap();
    r.handle.send(Command::Close { link: WAIT }).unwrap();
    r.said("waiting");
    let (tx, rx) = channel();
    for _ in 0..3 {
        let (handle, tx) = (r.handle.clone(), tx.clone());
        std::thread::spawn(move || {
            handle.stop();
            tx.send(handle.ended()).unwrap();
        });
    }
    // None can return while the engine is inside a command, however long that takes.
    assert!(rx.recv_timeout(Duration::from_millis(50)).is_err());
    drop(closed);
    for _ in 0..3 {
        assert!(rx.recv_timeout(PATIENCE).unwrap());
    }
    r.said("dropped");
}

#[test]
fn a_stop_from_the_callback_does_not_wait_for_itself() {
    let (own, of_rig): (Arc<OnceLock<EngineHandle>>, _) = (Arc::default(), rig());
    let (tx, rx) = channel();
    let toy = Toy {
        gate: of_rig.gate.clone(),
        said: channel().0,
        outbox: vec![],
        polls: of_rig.polls.clone(),
        task: of_rig.task.clone(),
    };
    let from_callback = own.clone();
    let on_events = Box::new(move |_| {
        from_callback.get().unwrap().stop();
        let _ = tx.send(());
    });
    let handle = own.get_or_init(|| spawn(Box::new(toy), on_events).unwrap());
    handle.send(Command::Close { link: LinkId(10) }).unwrap();
    rx.recv_timeout(PATIENCE).unwrap();
    handle.stop();
    assert!(handle.ended());
}

#[test]
fn a_panic_is_reported_and_ends_the_thread_only() {
    let r = rig();
    r.handle.send(Command::Close { link: PANIC }).unwrap();
    let EngineEvent::Trouble(e) = r.events.recv_timeout(PATIENCE).unwrap() else { panic!() };
    assert!(e.to_string().contains("panic=told to"), "{e}");
    assert!(r.events.recv_timeout(PATIENCE).is_err(), "the callback is dropped");
    r.said("dropped");
    assert!(r.handle.ended());
    assert!(r.handle.send(Command::Close { link: WAIT }).is_err());
}

#[test]
fn the_last_handle_ends_the_thread() {
    let Rig { handle, events, said, .. } = rig();
    let other = handle.clone();
    drop(handle);
    other.send(Command::Close { link: LinkId(10) }).unwrap();
    events.recv_timeout(PATIENCE).unwrap();
    drop(other);
    while said.recv_timeout(PATIENCE).unwrap() != "dropped" {}
}
