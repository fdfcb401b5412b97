//! The engine of a device: its thread, and the way of its events into the worker's actor.
//!
//! The thread itself is [`kvlane_transport::engine::driver`]. Events are kept in a shared list and
//! the actor is told once until it has taken them, so that a flood of refused frames costs a
//! counter and not the actor's memory.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use kvlane_proto::{Error, ErrorKind, LinkId, Result, limits};
use kvlane_transport::engine::auto::{self, AutoEngine};
use kvlane_transport::engine::driver::{EngineHandle, spawn};
use kvlane_transport::engine::gpunetio::{GpunetioConfig, GpunetioEngine};
use kvlane_transport::engine::shm::{ShmConfig, ShmEngine};
use kvlane_transport::engine::tcp::{TcpConfig, TcpEngine};
use kvlane_transport::engine::verbs::{VerbsConfig, VerbsEngine};
use kvlane_transport::engine::{Caps, Command, Engine, EngineEvent};

use crate::pool::Pools;

/// Ends the name of a registered engine whose NICs are emulated.
pub const EMULATED: &str = " (emulated)";

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
    /// Pages written by the sender's NICs, by way of libibverbs.
    Verbs(VerbsConfig),
    /// Pages written by the sender's NICs. This build posts to emulated ones only: the pools must be
    /// [`Pools::own_for_nics`], and rates mean nothing.
    Gpunetio(GpunetioConfig),
}

impl EngineChoice {
    /// The engine's name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Tcp(_) => "tcp",
            Self::Shm(_) => "shm",
            Self::Auto { .. } => auto::NAME,
            Self::Verbs(_) => "verbs",
            Self::Gpunetio(_) => "gpunetio",
        }
    }
    /// Every name under which a peer can be linked, best first, as others are told: emulated NICs are
    /// never told without that word.
    pub(crate) fn names(&self) -> Vec<String> {
        if let Self::Gpunetio(_) = self {
            return vec![format!("{}{EMULATED}", self.name())];
        }
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
            Self::Verbs(config) => Box::new(VerbsEngine::new(config)?),
            Self::Gpunetio(config) => Box::new(GpunetioEngine::new(config.clone())?),
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
/// here, and there is never more of it than the rooms and links of the worker can cause. Of what
/// peers' engines say, which nothing else bounds, [`limits::ENGINE_MESSAGES_WAITING_MAX`] of each
/// link may wait.
pub(crate) struct Commands {
    handle: EngineHandle,
    waiting: RefCell<Waiting>,
}

#[derive(Default)]
struct Waiting {
    commands: VecDeque<Command>,
    /// How many of them are words of a peer's engine, by link; never 0.
    told: HashMap<LinkId, usize>,
}

impl Waiting {
    fn pop(&mut self) -> Option<Command> {
        let command = self.commands.pop_front()?;
        if let Command::Told { link, .. } = &command
            && let Some(count) = self.told.get_mut(link)
        {
            *count -= 1;
            if *count == 0 {
                self.told.remove(link);
            }
        }
        Some(command)
    }
    fn unpop(&mut self, command: Command) {
        self.count(&command);
        self.commands.push_front(command);
    }
    fn push(&mut self, command: Command) {
        self.count(&command);
        self.commands.push_back(command);
    }
    fn count(&mut self, command: &Command) {
        if let Command::Told { link, .. } = command {
            *self.told.entry(*link).or_default() += 1;
        }
    }
}

impl Commands {
    pub(crate) fn new(handle: EngineHandle) -> Self {
        Self { handle, waiting: RefCell::default() }
    }
    pub(crate) fn send(&self, command: Command) {
        self.waiting.borrow_mut().push(command);
        self.flush();
    }
    /// Brings words of a link's peer engine, in their order among all commands.
    ///
    /// # Errors
    /// [`ErrorKind::LimitExceeded`] if the peer's engine says more than this side's hears.
    pub(crate) fn tell(&self, link: LinkId, message: Vec<u8>) -> Result<()> {
        let waiting = self.waiting.borrow().told.get(&link).copied().unwrap_or(0);
        if waiting >= limits::ENGINE_MESSAGES_WAITING_MAX {
            return Err(Error::new(
                ErrorKind::LimitExceeded,
                "the peer's engine says more than this side's hears",
            )
            .with("waiting", waiting)
            .with("limit", limits::ENGINE_MESSAGES_WAITING_MAX));
        }
        self.send(Command::Told { link, message });
        Ok(())
    }
    /// Hands over what waits; says whether some still does.
    pub(crate) fn flush(&self) -> bool {
        let mut waiting = self.waiting.borrow_mut();
        while let Some(command) = waiting.pop() {
            match self.handle.try_send(command) {
                Ok(()) => {}
                Err((Some(command), _)) => {
                    waiting.unpop(command);
                    break;
                }
                Err((None, e)) => {
                    // The thread has ended, which ends the worker.
                    tracing::error!(error = %e, "the engine takes no commands");
                    *waiting = Waiting::default();
                }
            }
        }
        !waiting.commands.is_empty()
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc::{Receiver, sync_channel};

    use kvlane_proto::{DataPath, Time};
    use kvlane_transport::engine::Interest;
    use kvlane_transport::engine::driver::QUEUE_COMMANDS;
    use kvlane_transport::memory::Region;

    use super::*;

    /// Takes its first command when it is told to.
    struct Slow(Option<Receiver<()>>, Arc<Mutex<Vec<u8>>>);

    impl Engine for Slow {
        fn caps(&self) -> Caps {
            Caps { name: "slow", path: DataPath::OneSided, emulated: true, rails: 1 }
        }
        fn register(&mut self, _: &Arc<Region>) -> Result<()> {
            Ok(())
        }
        fn unregister(&mut self, _: &Arc<Region>) -> Result<()> {
            Ok(())
        }
        fn command(&mut self, _: Time, command: Command) {
            if let Some(go) = self.0.take() {
                let _ = go.recv();
            }
            if let Command::Told { link: LinkId(1), message } = command {
                self.1.lock().unwrap_or_else(PoisonError::into_inner).extend(message);
            }
        }
        fn poll(&mut self, _: Time, _: &mut Vec<EngineEvent>) -> bool {
            false
        }
        fn park(&mut self, _: &mut Vec<Interest>) -> Option<Time> {
            None
        }
    }

    #[test]
    fn a_flood_of_one_links_words_is_bounded_and_costs_no_other_link() {
        let (go, wait) = sync_channel(1);
        let heard: Arc<Mutex<Vec<u8>>> = Arc::default();
        let engine = Box::new(Slow(Some(wait), heard.clone()));
        let commands = Commands::new(spawn(engine, Box::new(|_| {})).unwrap());
        let mut said = 0u64;
        let refused = loop {
            match commands.tell(LinkId(1), vec![said as u8]) {
                Ok(()) => said += 1,
                Err(e) => break e,
            }
        };
        assert_eq!(refused.kind(), ErrorKind::LimitExceeded, "{refused}");
        let most = (QUEUE_COMMANDS + limits::ENGINE_MESSAGES_WAITING_MAX + 300) as u64;
        assert!(said > QUEUE_COMMANDS as u64 && said < most, "{said}");
        for _ in 0..limits::ENGINE_MESSAGES_WAITING_MAX {
            commands.tell(LinkId(2), Vec::new()).unwrap();
        }
        commands.send(Command::Close { link: LinkId(1) });
        go.send(()).unwrap();
        while commands.flush() {
            std::thread::yield_now();
        }
        assert!(commands.waiting.borrow().told.is_empty());
        // All of them, in order.
        let all: Vec<u8> = (0..said).map(|n| n as u8).collect();
        while heard.lock().unwrap().len() < all.len() {
            std::thread::yield_now();
        }
        assert_eq!(*heard.lock().unwrap(), all);
        commands.tell(LinkId(1), vec![7]).unwrap();
        commands.stop();
    }
}
