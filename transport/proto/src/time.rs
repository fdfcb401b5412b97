//! The clock of the machines: nanoseconds of CLOCK_BOOTTIME, read by whoever drives them.
//!
//! Only differences mean anything, and none crosses the wire: durations travel, times do not.

use std::ops::Add;
use std::time::Duration;

/// A moment on this host's own clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    /// Milliseconds since `earlier`; 0 if that is later.
    pub const fn ms_since(self, earlier: Time) -> u64 {
        self.0.saturating_sub(earlier.0) / 1_000_000
    }
    /// This moment and so many milliseconds.
    #[must_use]
    pub const fn plus_ms(self, ms: u64) -> Time {
        Time(self.0.saturating_add(ms.saturating_mul(1_000_000)))
    }
    /// How long until `later`; zero if that has passed.
    pub const fn until(self, later: Time) -> Duration {
        Duration::from_nanos(later.0.saturating_sub(self.0))
    }
}

impl Add<Duration> for Time {
    type Output = Time;
    fn add(self, d: Duration) -> Time {
        Time(self.0.saturating_add(d.as_nanos().min(u128::from(u64::MAX)) as u64))
    }
}

/// A lease as its holder counts it: from when it sent its request, less drift.
pub const fn holder_ms(lease_ms: u64) -> u64 {
    // Rounded towards the shorter lease: half a millisecond is time enough for a write.
    lease_ms.saturating_sub(drift_ms(lease_ms))
}

/// A lease as its grantor counts it: from when it sent the grant, plus drift.
pub const fn grantor_ms(lease_ms: u64) -> u64 {
    lease_ms.saturating_add(drift_ms(lease_ms))
}

const fn drift_ms(lease_ms: u64) -> u64 {
    (lease_ms as u128 * crate::limits::DRIFT_PER_MILLE as u128).div_ceil(1000) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_stops_before_the_grantor_at_any_drift() {
        assert!(holder_ms(u64::MAX) < u64::MAX && grantor_ms(u64::MAX) == u64::MAX);
        for lease_ms in [1u64, 55, 99, 450, 1_150, 30_000] {
            // In thousandths of a true millisecond: the holder's clock is slow, the grantor's fast.
            let holder = holder_ms(lease_ms) * 1_000_000 / 990;
            let grantor = grantor_ms(lease_ms) * 1_000_000 / 1_010;
            assert!(holder <= grantor, "{lease_ms}: {holder} {grantor}");
        }
    }
}

/// When to repeat a message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backoff {
    pub(crate) at: Time,
    wait_ms: u64,
}

impl Backoff {
    pub(crate) fn new(now: Time, first_ms: u64) -> Self {
        Self { at: now.plus_ms(first_ms), wait_ms: first_ms }
    }
    pub(crate) fn again(&mut self, now: Time) {
        self.wait_ms = (self.wait_ms * 2).min(crate::limits::RESEND_MAX_MS);
        self.at = now.plus_ms(self.wait_ms);
    }
}
