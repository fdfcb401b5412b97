//! When a sender dials a lane again.

use std::time::Duration;

use kvlane_proto::limits;

/// Waits between dials: doubling, with jitter, so that many lanes do not dial in step.
#[derive(Debug)]
pub(super) struct Jitter(u64);

impl Jitter {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed | 1)
    }
    /// Half to all of the `attempt`th wait; attempts count from 1.
    pub(super) fn wait(&mut self, attempt: u32) -> Duration {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let full_ms =
            limits::RETRY_MAX_MS.min(limits::RETRY_MS << attempt.saturating_sub(1).min(20));
        Duration::from_millis(full_ms / 2 + self.0 % (full_ms / 2 + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_within_bounds_and_differ() {
        let mut j = Jitter::new(42);
        for attempt in 1..40 {
            let full = limits::RETRY_MAX_MS.min(limits::RETRY_MS << (attempt - 1).min(20));
            let ms = j.wait(attempt).as_millis() as u64;
            assert!(ms >= full / 2 && ms <= full, "{attempt}: {ms}");
        }
        let many: std::collections::HashSet<_> = (0..50).map(|_| j.wait(20)).collect();
        assert!(many.len() > 10);
    }
}
