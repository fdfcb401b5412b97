//! One end of the bench's link: an engine on its thread, with the pool registered and listening.
//! What the sender and the receiver have in common.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use kvlane_proto::{Error, ErrorKind, Identity, Incarnation, LinkId, Result, Role, WorkerKey};
use kvlane_transport::engine::driver::{EngineHandle, OnEvents, spawn};
use kvlane_transport::engine::{Caps, Command, EngineEvent};
use kvlane_transport::memory::Region;

use super::engines::Setup;
use super::wait::{SLICE, Stop, Wait};

/// The only one.
pub(crate) const LINK: LinkId = LinkId(1);
/// How long an engine may take to answer.
pub(crate) const ANSWER: Duration = Duration::from_secs(10);
/// Events that nobody took yet.
pub(crate) const EVENTS: usize = 256;

/// Starts the engine and makes it listen.
pub(crate) fn start(
    setup: &Setup,
    pool: &Arc<Region>,
    on_events: OnEvents,
    receiver: bool,
) -> Result<(EngineHandle, Caps)> {
    let engine = setup.make()?;
    let caps = engine.caps();
    let handle = spawn(engine, on_events)?;
    handle.register(pool)?;
    let role = if receiver { Role::Prefill } else { Role::Decode };
    let identity = Identity::new("bench", role, "bench", 0)?;
    let peer = WorkerKey { identity, incarnation: Incarnation([0; 16]) };
    handle.send(Command::Listen { link: LINK, peer, lanes: setup.rails, receiver })?;
    Ok((handle, caps))
}

/// The blob for the other side.
pub(crate) fn blob(said: &Receiver<EngineEvent>, stop: &Stop) -> Result<Vec<u8>> {
    until(said, "the engine's address", stop, |event| match event {
        EngineEvent::Local { blob, .. } => Some(blob),
        _ => None,
    })
}

/// Waits for the event that `look` takes.
///
/// # Errors
/// What the engine says instead, and as [`Wait::check`].
pub(crate) fn until<T>(
    said: &Receiver<EngineEvent>,
    what: &str,
    stop: &Stop,
    mut look: impl FnMut(EngineEvent) -> Option<Result<T>>,
) -> Result<T> {
    let wait = Wait::new(what, ANSWER, stop);
    loop {
        match said.recv_timeout(SLICE) {
            Ok(EngineEvent::Trouble(e)) => return Err(e),
            Ok(event) => {
                if let Some(it) = look(event) {
                    return it;
                }
            }
            Err(RecvTimeoutError::Timeout) => wait.check()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Error::new(ErrorKind::Internal, "the engine's thread has ended"));
            }
        }
    }
}
