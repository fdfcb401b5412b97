//! A receiver that is made slow, for tests that hit rooms while their pages are on their way.
//!
//! In: a rate, and what one copy has brought. Out: how much the next may take, and the wait that keeps
//! to the rate, spent inside the copy, while its pen is held and before its serve word is read
//! again: where a stop does the most harm. Without the feature `fault-injection` nothing is slow.

#[cfg(feature = "fault-injection")]
use std::sync::atomic::{AtomicU64, Ordering};

/// Most bytes of one copy of a slow receiver.
#[cfg(feature = "fault-injection")]
const PIECE_BYTES: u64 = 16 << 10;

#[cfg(feature = "fault-injection")]
static BYTES_PER_S: AtomicU64 = AtomicU64::new(0);

/// Makes every engine of this process whose own code moves the bytes land no more than so many a
/// second; 0 is as fast as it can.
#[cfg(feature = "fault-injection")]
pub fn set_throttle(bytes_per_s: u64) {
    BYTES_PER_S.store(bytes_per_s, Ordering::Relaxed);
}

/// How much one copy may take that could take `most`.
pub(super) fn piece(most: u64) -> u64 {
    #[cfg(feature = "fault-injection")]
    if BYTES_PER_S.load(Ordering::Relaxed) > 0 {
        return most.min(PIECE_BYTES);
    }
    most
}

/// A copy has brought so many bytes; comes back when the next may begin.
pub(super) fn pace(bytes: u64) {
    #[cfg(feature = "fault-injection")]
    if let Some(ns) = (bytes * 1_000_000_000).checked_div(BYTES_PER_S.load(Ordering::Relaxed)) {
        std::thread::sleep(std::time::Duration::from_nanos(ns));
    }
    #[cfg(not(feature = "fault-injection"))]
    let _ = bytes;
}
