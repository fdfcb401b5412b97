//! Reads CLOCK_BOOTTIME, which goes on while the machine is suspended: a lease that ran out in a
//! suspend has run out.
#![allow(unsafe_code)]

use kvlane_proto::Time;

/// Nanoseconds of CLOCK_BOOTTIME.
pub(crate) fn boottime() -> Time {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a valid, exclusively borrowed timespec; the call writes nothing else. It
    // cannot fail on Linux 2.6.39 or later, and leaves `t` at zero if it did.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &mut t) };
    Time((t.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(t.tv_nsec as u64))
}
