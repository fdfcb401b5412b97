//! The one clock of a process: CLOCK_BOOTTIME, read by whoever drives a machine.

use kvlane_proto::Time;

/// The moment now. Only differences mean anything; see [`Time`].
pub fn now() -> Time {
    crate::sys::clock::boottime()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_clock_never_goes_back_and_is_not_stuck_at_zero() {
        let mut last = super::now();
        assert!(last.0 > 0);
        for _ in 0..1000 {
            let t = super::now();
            assert!(t >= last);
            last = t;
        }
    }
}
