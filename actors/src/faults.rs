//! Hooks for tests with real processes: a worker stops at a phase of a room, as if its machine had
//! frozen there, so that the test kills it; or it is held there, so that the test kills somebody else,
//! and then goes on; or it only says so, of every room. It says so on standard output, and if a hold
//! ends by itself, that too.
//!
//! Built only with the feature `fault-injection`; [`PHASES`] names the phases.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvlane_proto::{Error, ErrorKind, Result};

pub use kvlane_transport::engine::fence::set_fences_off;
pub use kvlane_transport::engine::throttle::set_throttle;

/// Where a worker can stop. A role that does not pass a phase never stops there.
pub const PHASES: [&str; 9] = [
    "registered",
    "reserved",
    "offer-sent",
    "offer-accepted",
    "first-byte",
    "half",
    "last-byte",
    "done",
    "given-back",
];

/// The longest that a worker is held.
const HELD: Duration = Duration::from_secs(10);
static SAY_AT: Mutex<Option<String>> = Mutex::new(None);

/// What happens at a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// The worker does nothing any more.
    Stop,
    /// The worker's thread waits for [`go_on`].
    Hold,
}

/// What is to happen, and whether the worker is held by it: one lock, so that a word to go on that
/// comes in between is not lost.
struct State {
    armed: Option<(&'static str, Hook)>,
    held: bool,
}

static STATE: Mutex<State> = Mutex::new(State { armed: None, held: false });
static GOES_ON: Condvar = Condvar::new();

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn known(phase: &str) -> Result<&'static str> {
    PHASES.into_iter().find(|known| *known == phase).ok_or_else(|| {
        Error::new(ErrorKind::NotFound, "no such phase")
            .with("asked", phase)
            .with("known", PHASES.join(", "))
    })
}

/// The process's worker stops, or is held, when it comes to `phase`.
///
/// # Errors
/// [`ErrorKind::NotFound`] with the phases that there are.
pub fn arm(phase: &str, hook: Hook) -> Result<()> {
    let known = known(phase)?;
    state().armed = Some((known, hook));
    Ok(())
}

/// Lets a worker that is held go on; no hook is armed any more.
pub fn go_on() {
    *state() = State { armed: None, held: false };
    GOES_ON.notify_all();
}

/// Makes the process's worker say whenever a room is at `phase`, without stopping.
///
/// # Errors
/// As [`arm`].
pub fn say_at(phase: &str) -> Result<()> {
    let known = known(phase)?;
    *SAY_AT.lock().unwrap_or_else(PoisonError::into_inner) = Some(known.to_string());
    Ok(())
}

/// Says that a phase is reached; whether the caller must stop here. Blocks while it is held.
pub fn reached(phase: &str) -> bool {
    let say = SAY_AT.lock().unwrap_or_else(PoisonError::into_inner);
    if say.as_deref() == Some(phase) {
        println!("at {phase}");
    }
    drop(say);
    let mut state = state();
    match state.armed.take_if(|(at, _)| *at == phase) {
        None => false,
        Some((_, Hook::Stop)) => {
            println!("stopped-at {phase}");
            true
        }
        Some((_, Hook::Hold)) => {
            state.held = true;
            println!("held-at {phase}");
            let waited = GOES_ON.wait_timeout_while(state, HELD, |state| state.held);
            let (mut state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
            if waited.timed_out() {
                state.held = false;
                // A test that waits for another line fails here, by name.
                println!("hold-expired {phase}");
            }
            false
        }
    }
}
