//! What is to go wrong with the worker, on demand. Without the feature `fault-injection` every wish is
//! refused.

use kvlane_proto::Result;

/// Arms a hook.
#[cfg(feature = "fault-injection")]
pub(super) fn stop_at(phase: &str, hold: bool) -> Result<()> {
    use kvlane_actors::faults::{Hook, arm};
    arm(phase, if hold { Hook::Hold } else { Hook::Stop })
}

/// Lets a worker that is held go on.
#[cfg(feature = "fault-injection")]
pub(super) fn go_on() -> Result<()> {
    kvlane_actors::faults::go_on();
    Ok(())
}

/// Makes the worker receive no faster.
#[cfg(feature = "fault-injection")]
pub(super) fn throttle(bytes_per_s: u64) -> Result<()> {
    kvlane_actors::faults::set_throttle(bytes_per_s);
    Ok(())
}

/// Says that the stand-in has come to a phase; whether it must stop here.
#[cfg(feature = "fault-injection")]
pub(super) async fn reached(phase: &'static str) -> bool {
    // The thread that waits is not that which takes the word to go on.
    let reached = tokio::task::spawn_blocking(move || kvlane_actors::faults::reached(phase));
    reached.await.unwrap_or(false)
}

#[cfg(not(feature = "fault-injection"))]
pub(super) fn stop_at(phase: &str, _: bool) -> Result<()> {
    Err(no_hooks().with("asked", format!("stop_at {phase}")))
}

#[cfg(not(feature = "fault-injection"))]
pub(super) fn go_on() -> Result<()> {
    Err(no_hooks().with("asked", "go_on"))
}

#[cfg(not(feature = "fault-injection"))]
pub(super) fn throttle(_: u64) -> Result<()> {
    Err(no_hooks().with("asked", "throttle"))
}

#[cfg(not(feature = "fault-injection"))]
fn no_hooks() -> kvlane_proto::Error {
    kvlane_proto::Error::new(kvlane_proto::ErrorKind::Config, "this build has no stop hooks")
        .hint("build with `--features fault-injection`, for tests only")
}
