//! The engine of a device: its thread, and the way of its events into the worker's actor.
//!
//! The thread itself is [`kvlane_transport::engine::driver`]. Events are kept in a shared list and
//! the actor is told once until it has taken them, so that a flood of refused frames costs a
//! counter and not the actor's memory.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use kvlane_proto::Result;
use kvlane_transport::engine::auto::{self, AutoEngine};
use kvlane_transport::engine::driver::{EngineHandle, spawn};
use kvlane_transport::engine::shm::{ShmConfig, ShmEngine};
use kvlane_transport::engine::tcp::{TcpConfig, TcpEngine};
use kvlane_transport::engine::{Caps, Command, Engine, EngineEvent};

use crate::pool::Pools;

/// Which data plane a worker uses.
#[derive(Clone, Debug)]
pub enum EngineChoice {
    /// Pages over TCP connections, written in place by the receiver.
    Tcp(TcpConfig),
    /// Pages copied by the receiver out of the sender's memory, on one host.
    Shm(ShmConfig),
    /// Each link over shared memory if the peer's socket can be reached, and else over TCP.
    Auto {
        /// To peers on this host.
        shm: ShmConfig,
        /// To all others.
        tcp: TcpConfig,
    },
}

impl EngineChoice {
    /// The engine's name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Tcp(_) => "tcp",
            Self::Shm(_) => "shm",
            Self::Auto { .. } => auto::NAME,
        }
    }
    /// Every name under which a peer can be linked, best first.
    pub(crate) fn names(&self) -> Vec<String> {
        let parts = match self {
            Self::Auto { .. } => &["shm", "tcp"][..],
            _ => &[],
        };
        [&[self.name()], parts].concat().into_iter().map(String::from).collect()
    }
    fn make(&self) -> Result<Box<dyn Engine>> {
        Ok(match self {
            Self::Tcp(config) => Box::new(TcpEngine::new(config.clone())?),
            Self::Shm(config) => Box::new(ShmEngine::new(config.clone())?),
            Self::Auto { shm, tcp } => Box::new(AutoEngine::new(vec![
                Self::Shm(shm.clone()).make()?,
                Self::Tcp(tcp.clone()).make()?,
            ])?),
        })
    }
}

/// Refused frames that are kept one by one; what is beyond is only counted, by the engine.
const SCRAPS_MAX: usize = 256;

/// Events that the actor has not taken.
#[derive(Clone, Default)]
pub(crate) struct Inbox(Arc<Mutex<Pending>>);

#[derive(Default)]
struct Pending {
    events: Vec<EngineEvent>,
    scraps: usize,
    told: bool,
}

impl Inbox {
    fn pending(&self) -> std::sync::MutexGuard<'_, Pending> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// Adds events; says whether the actor has to be told.
    fn put(&self, events: Vec<EngineEvent>) -> bool {
        let mut pending = self.pending();
        for event in events {
            if matches!(event, EngineEvent::Scrapped { .. }) {
                if pending.scraps >= SCRAPS_MAX {
                    continue;
                }
                pending.scraps += 1;
            }
            pending.events.push(event);
        }
        !std::mem::replace(&mut pending.told, true)
    }
    /// Takes everything.
    pub(crate) fn take(&self) -> Vec<EngineEvent> {
        let mut pending = self.pending();
        pending.told = false;
        pending.scraps = 0;
        std::mem::take(&mut pending.events)
    }
}

/// Commands to the engine, in order and without loss: what its bounded queue does not take waits
/// here, and there is never more of it than the rooms and links of the worker can cause.
pub(crate) struct Commands {
    handle: EngineHandle,
    waiting: RefCell<VecDeque<Command>>,
}

impl Commands {
    pub(crate) fn new(handle: EngineHandle) -> Self {
        Self { handle, waiting: RefCell::new(VecDeque::new()) }
    }
    pub(crate) fn send(&self, command: Command) {
        self.waiting.borrow_mut().push_back(command);
        self.flush();
    }
    /// Hands over what waits; says whether some still does.
    pub(crate) fn flush(&self) -> bool {
        let mut waiting = self.waiting.borrow_mut();
        while let Some(command) = waiting.pop_front() {
            match self.handle.try_send(command) {
                Ok(()) => {}
                Err((Some(command), _)) => {
                    waiting.push_front(command);
                    break;
                }
                Err((None, e)) => {
                    // The thread has ended, which ends the worker.
                    tracing::error!(error = %e, "the engine takes no commands");
                    waiting.clear();
                }
            }
        }
        !waiting.is_empty()
    }
    /// Ends the engine; nothing lands any more once this returns.
    pub(crate) fn stop(&self) {
        self.handle.stop();
    }
    /// For whoever ends the engine after a defect of the actor.
    pub(crate) fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }
}

/// Starts the engine, with the pool registered. `wake` tells the actor to look into the inbox; it
/// is called with `false` when the thread has ended.
pub(crate) fn start(
    choice: &EngineChoice,
    pools: &Pools,
    wake: impl Fn(bool) + Send + 'static,
) -> Result<(Commands, Caps, Inbox)> {
    let engine = choice.make()?;
    let caps = engine.caps();
    let inbox = Inbox::default();
    let to = inbox.clone();
    let alive = Alive(wake);
    let handle = spawn(
        engine,
        Box::new(move |events| {
            if to.put(events) {
                (alive.0)(true);
            }
        }),
    )?;
    for region in &pools.regions {
        handle.register(region)?;
    }
    Ok((Commands::new(handle), caps, inbox))
}

/// Dropped with the thread's callback, and so tells of its end.
struct Alive<F: Fn(bool)>(F);

impl<F: Fn(bool)> Drop for Alive<F> {
    fn drop(&mut self) {
        (self.0)(false);
    }
}
