//! Stop hooks, for tests with real processes: a worker stops at a phase of a room, as if its machine
//! had frozen there, and says so on standard output; the test then kills it.
//!
//! Built only with the feature `fault-injection`; [`PHASES`] names the phases.

use std::sync::Mutex;

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

static STOP_AT: Mutex<Option<String>> = Mutex::new(None);

/// Stops the process's worker at `phase`.
pub fn stop_at(phase: &str) {
    if let Ok(mut at) = STOP_AT.lock() {
        *at = Some(phase.to_string());
    }
}

/// Says that a phase is reached; whether the caller must stop here.
pub fn reached(phase: &str) -> bool {
    let hit = STOP_AT.lock().is_ok_and(|at| at.as_deref() == Some(phase));
    if hit {
        println!("stopped-at {phase}");
    }
    hit
}

/// From here on every fence of this process claims to be complete and does nothing.
pub fn fence_off() {
    kvlane_transport::engine::fence::set_fences_off(true);
}
