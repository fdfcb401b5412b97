//! Waits that end: at their deadline, or when the user wants no more.

use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvlane_proto::{Error, ErrorKind, Result};

/// How long a wait goes on before it looks round.
pub(crate) const SLICE: Duration = Duration::from_millis(50);

/// Whether the user wants no more.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stop(Arc<AtomicBool>);

impl Stop {
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
    /// # Errors
    /// [`ErrorKind::Aborted`] once it was set.
    pub(crate) fn check(&self) -> Result<()> {
        match self.0.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(Error::new(ErrorKind::Aborted, "interrupted")),
        }
    }
}

/// One wait.
#[derive(Debug)]
pub(crate) struct Wait {
    what: String,
    begun: Instant,
    limit: Duration,
    stop: Stop,
}

impl Wait {
    pub(crate) fn new(what: impl Display, limit: Duration, stop: &Stop) -> Self {
        Self { what: what.to_string(), begun: Instant::now(), limit, stop: stop.clone() }
    }
    /// # Errors
    /// [`ErrorKind::DeadlineExceeded`] naming what never came; [`ErrorKind::Aborted`].
    pub(crate) fn check(&self) -> Result<()> {
        self.stop.check()?;
        if self.begun.elapsed() < self.limit {
            return Ok(());
        }
        Err(Error::new(ErrorKind::DeadlineExceeded, "waited too long")
            .with("for", &self.what)
            .with("limit_s", self.limit.as_secs())
            .hint("move fewer pages (--pages), or look what else the machine does"))
    }
}

/// How long moving so many bytes may take: 10 s, and what a path of 16 MiB a second needs.
pub(crate) fn moving(bytes: u64) -> Duration {
    Duration::from_secs(10 + (bytes >> 24))
}
