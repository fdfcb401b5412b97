//! The thread that polls an engine.
//!
//! Owns: the engine, on a thread of its own. In: commands through a bounded queue
//! ([`EngineHandle::send`]). Out: batches of events through a callback. Invariants: after the last
//! progress it spins for at most [`SPIN`] or [`SPIN_LONG`], giving way to other threads, and then
//! sleeps until a descriptor, a deadline or a command wakes it; a wake-up that brings nothing is
//! followed by the next sleep; a panic of the engine ends the thread, not the
//! process, is reported through the callback, and shows in [`EngineHandle::ended`].

use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::mpsc::{
    Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError, sync_channel,
};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use kvlane_proto::{Error, ErrorKind, Result};

use super::{Command, Engine, EngineEvent, Interest};
use crate::clock::now;
use crate::memory::Region;
use crate::sys::wait::{EventFd, PollSet};

/// How long an idle engine spins before it sleeps. Without giving way in between, a waiter on two
/// cores costs its peer milliseconds (`docs/performance.md`).
pub const SPIN: Duration = Duration::from_micros(50);
/// How long it spins if it slept for less than this before: where work comes so often, each sleep
/// costs somebody more than the spinning does.
pub const SPIN_LONG: Duration = Duration::from_micros(500);
/// Commands that may wait.
pub const QUEUE_COMMANDS: usize = 4096;
/// Commands taken before the engine is polled again.
const COMMANDS_PER_TURN: usize = 256;
/// Longest sleep; a missed wake-up could cost no more than this.
const SLEEP_MAX: Duration = Duration::from_secs(1);
/// How long a registration may take.
const ASK_MAX: Duration = Duration::from_secs(5);

/// Takes events, on the engine's thread: it must not block. It is dropped when the thread ends.
pub type OnEvents = Box<dyn FnMut(Vec<EngineEvent>) + Send>;

enum Order {
    Command(Command),
    Register {
        region: Arc<Region>,
        add: bool,
        answer: SyncSender<Result<()>>,
        /// Set by whoever is first: the engine with its answer, or the asker that gives up.
        settled: Arc<AtomicBool>,
    },
}

struct Shared {
    wake: EventFd,
    /// The thread sleeps, or is about to: whoever queues an order signals `wake`.
    sleeping: AtomicBool,
    stop: AtomicBool,
    ended: AtomicBool,
}

/// Speaks to an engine's thread. Cloned freely; the thread ends with [`EngineHandle::stop`] or with
/// the last clone (so a callback that keeps one must be ended by `stop`).
#[derive(Clone)]
pub struct EngineHandle {
    orders: SyncSender<Order>,
    shared: Arc<Shared>,
    thread: Arc<Mutex<Option<JoinHandle<()>>>>,
    thread_id: ThreadId,
    _last: Arc<LastOne>,
}

/// Wakes the thread when the last handle has gone, so that it notices.
struct LastOne(Arc<Shared>);

impl Drop for LastOne {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Release);
        self.0.wake.signal();
    }
}

impl EngineHandle {
    /// Queues a command. What comes of it is an event.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if [`QUEUE_COMMANDS`] wait already, [`ErrorKind::Internal`] once the
    /// thread has ended.
    pub fn send(&self, command: Command) -> Result<()> {
        self.order(Order::Command(command)).map_err(|(_, e)| e)
    }
    /// As [`EngineHandle::send`]; a command that finds no room comes back.
    ///
    /// # Errors
    /// As [`EngineHandle::send`], with the command, unless the thread has ended.
    #[allow(clippy::result_large_err)] // Only a full queue pays for it.
    pub fn try_send(&self, command: Command) -> Result<(), (Option<Command>, Error)> {
        self.order(Order::Command(command)).map_err(|(order, e)| match order {
            Some(Order::Command(command)) => (Some(command), e),
            _ => (None, e),
        })
    }
    /// Makes memory known to the engine; waits for its answer.
    ///
    /// # Errors
    /// As [`Engine::register`], and as [`EngineHandle::send`]; [`ErrorKind::DeadlineExceeded`] if no
    /// answer came in time, after which the memory is not known: what the engine still does of it,
    /// it undoes.
    pub fn register(&self, region: &Arc<Region>) -> Result<()> {
        self.ask(region, true)
    }
    /// Makes the engine forget memory; waits for its answer.
    ///
    /// # Errors
    /// As [`Engine::unregister`], and as [`EngineHandle::register`].
    pub fn unregister(&self, region: &Arc<Region>) -> Result<()> {
        self.ask(region, false)
    }
    /// Whether the thread has ended; nothing is taken any more.
    pub fn ended(&self) -> bool {
        self.shared.ended.load(Ordering::Acquire)
    }
    /// Ends the thread and waits for it, however many do so at a time. Connections close; what was open is not fenced by this,
    /// but nothing lands any more once it returns. From the callback it does not wait: the thread
    /// ends right after.
    pub fn stop(&self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake.signal();
        // Before the lock, which somebody who waits for this thread may hold.
        if std::thread::current().id() == self.thread_id {
            return;
        }
        // Held over the join, so that a second stop waits as well.
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.take() {
            // Its panics are caught inside.
            let _ = thread.join();
        }
    }

    fn ask(&self, region: &Arc<Region>, add: bool) -> Result<()> {
        let (answer, answered) = sync_channel(1);
        let settled = Arc::new(AtomicBool::new(false));
        let order =
            Order::Register { region: region.clone(), add, answer, settled: settled.clone() };
        self.order(order).map_err(|(_, e)| e)?;
        let mut result = answered.recv_timeout(ASK_MAX);
        if matches!(result, Err(RecvTimeoutError::Timeout)) && settled.swap(true, Ordering::AcqRel)
        {
            // The engine was first, so its answer is there or about to be.
            result = answered.recv().map_err(|_| RecvTimeoutError::Disconnected);
        }
        result.unwrap_or_else(|e| {
            Err(match e {
                RecvTimeoutError::Disconnected => gone(),
                RecvTimeoutError::Timeout => {
                    Error::new(ErrorKind::DeadlineExceeded, "the engine did not answer in time")
                        .with("limit_ms", ASK_MAX.as_millis())
                        .hint("ask again; nothing was changed")
                }
            })
        })
    }
    #[allow(clippy::result_large_err)]
    fn order(&self, order: Order) -> Result<(), (Option<Order>, Error)> {
        if self.ended() {
            return Err((None, gone()));
        }
        self.orders.try_send(order).map_err(|e| match e {
            TrySendError::Full(order) => {
                metrics::counter!("kvlane_engine_busy_total").increment(1);
                let e = Error::new(ErrorKind::Busy, "the engine's queue is full")
                    .with("limit", QUEUE_COMMANDS)
                    .hint("send again later");
                (Some(order), e)
            }
            TrySendError::Disconnected(_) => (None, gone()),
        })?;
        // Pairs with the fence before the thread's last look at the queue: either it sees the
        // order, or this sees that it sleeps.
        fence(Ordering::SeqCst);
        if self.shared.sleeping.load(Ordering::Relaxed) {
            self.shared.wake.signal();
        }
        Ok(())
    }
}

fn gone() -> Error {
    Error::new(ErrorKind::Internal, "the engine's thread has ended")
        .hint("start the engine again; its links and grants are gone")
}

/// Starts the thread of an engine.
///
/// # Errors
/// [`ErrorKind::Io`] if there is no descriptor or thread to be had.
pub fn spawn(engine: Box<dyn Engine>, on_events: OnEvents) -> Result<EngineHandle> {
    let failed = |e| Error::new(ErrorKind::Io, "cannot start an engine's thread").caused_by(e);
    let (orders, queue) = sync_channel(QUEUE_COMMANDS);
    let shared = Arc::new(Shared {
        wake: EventFd::new().map_err(failed)?,
        sleeping: AtomicBool::new(false),
        stop: AtomicBool::new(false),
        ended: AtomicBool::new(false),
    });
    let name = format!("kvlane-{}", engine.caps().name);
    let driver = Driver { engine, queue, on_events, shared: shared.clone() };
    let thread =
        std::thread::Builder::new().name(name).spawn(move || driver.run()).map_err(failed)?;
    let last = Arc::new(LastOne(shared.clone()));
    let thread_id = thread.thread().id();
    let thread = Arc::new(Mutex::new(Some(thread)));
    Ok(EngineHandle { orders, shared, thread, thread_id, _last: last })
}

struct Driver {
    engine: Box<dyn Engine>,
    queue: Receiver<Order>,
    on_events: OnEvents,
    shared: Arc<Shared>,
}

impl Driver {
    fn run(mut self) {
        let name = self.engine.caps().name;
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.turn_until_stopped())) {
            let text = panic
                .downcast_ref::<&str>()
                .map(ToString::to_string)
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_default();
            metrics::counter!("kvlane_engine_panics_total", "engine" => name).increment(1);
            tracing::error!(engine = name, panic = text, "an engine's thread panicked");
            self.shared.ended.store(true, Ordering::Release);
            let e = Error::new(ErrorKind::Internal, "an engine's thread panicked")
                .with("engine", name)
                .with("panic", text)
                .hint("this is a defect of kvlane; links of this engine are lost");
            // It may have been the callback itself.
            let _ = catch_unwind(AssertUnwindSafe(|| {
                (self.on_events)(vec![EngineEvent::Trouble(e)]);
            }));
        }
        self.shared.ended.store(true, Ordering::Release);
        // Before the callback goes, so that its end means that nothing lands any more.
        drop(self.engine);
        drop(self.on_events);
    }

    fn turn_until_stopped(&mut self) {
        let (mut polls, mut interests) = (PollSet::default(), Vec::new());
        let mut events = Vec::new();
        let (mut last, mut spin) = (Instant::now(), SPIN);
        let mut ordered = false;
        while !self.shared.stop.load(Ordering::Acquire) {
            let Some(taken) = self.take_orders() else { return };
            ordered |= taken;
            let moved = self.engine.poll(now(), &mut events);
            if !events.is_empty() {
                (self.on_events)(std::mem::take(&mut events));
            }
            if moved || ordered {
                (last, ordered) = (Instant::now(), false);
            } else if last.elapsed() < spin {
                std::thread::yield_now();
            } else {
                let began = Instant::now();
                let Some(taken) = self.sleep(&mut polls, &mut interests) else { return };
                spin = if began.elapsed() < SPIN_LONG { SPIN_LONG } else { SPIN };
                ordered = taken;
            }
        }
    }

    /// Carries out what is queued; `None` once nobody can queue any more.
    fn take_orders(&mut self) -> Option<bool> {
        for n in 0..COMMANDS_PER_TURN {
            match self.queue.try_recv() {
                Ok(order) => self.carry_out(order),
                Err(TryRecvError::Empty) => return Some(n > 0),
                Err(TryRecvError::Disconnected) => return None,
            }
        }
        Some(true)
    }

    fn carry_out(&mut self, order: Order) {
        match order {
            Order::Command(command) => self.engine.command(now(), command),
            Order::Register { region, add, answer, settled } => {
                // Whoever asked may have given up: before this began, or meanwhile. Then it counts
                // as refused, and a refusal changes nothing.
                if settled.load(Ordering::Acquire) {
                    return;
                }
                let result = self.register(&region, add);
                if !settled.swap(true, Ordering::AcqRel) {
                    let _ = answer.try_send(result);
                } else if result.is_ok()
                    && let Err(e) = self.register(&region, !add)
                {
                    let e = e.with("region", &region);
                    (self.on_events)(vec![EngineEvent::Trouble(e)]);
                }
            }
        }
    }
    fn register(&mut self, region: &Arc<Region>, add: bool) -> Result<()> {
        if add { self.engine.register(region) } else { self.engine.unregister(region) }
    }

    /// Sleeps; says whether it carried out an order, `None` as [`Driver::take_orders`].
    fn sleep(&mut self, polls: &mut PollSet, interests: &mut Vec<Interest>) -> Option<bool> {
        interests.clear();
        let until = self.engine.park(interests);
        let wake: RawFd = self.shared.wake.fd();
        polls.clear();
        polls.add(wake, true, false);
        for interest in &*interests {
            polls.add(interest.fd, interest.read, interest.write);
        }
        self.shared.sleeping.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let look = self.queue.try_recv();
        if matches!(look, Err(TryRecvError::Empty)) && !self.shared.stop.load(Ordering::Acquire) {
            let timeout = until.map_or(SLEEP_MAX, |t| now().until(t).min(SLEEP_MAX));
            polls.wait(timeout);
        }
        self.shared.sleeping.store(false, Ordering::Relaxed);
        // A signal that comes after the look at `wake` makes the next sleep short.
        if polls.ready(0) {
            self.shared.wake.drain();
        }
        match look {
            Ok(order) => self.carry_out(order),
            Err(TryRecvError::Empty) => return Some(false),
            Err(TryRecvError::Disconnected) => return None,
        }
        Some(true)
    }
}
