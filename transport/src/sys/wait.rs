//! Waiting: an eventfd to be woken by, and poll(2).
#![allow(unsafe_code)] // eventfd(2), poll(2).

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// A counter that makes its descriptor readable.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A fresh one, not signalled.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn new() -> io::Result<Self> {
        // SAFETY: plain call; the result is checked before it becomes an OwnedFd.
        unsafe {
            match libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) {
                fd if fd < 0 => Err(io::Error::last_os_error()),
                fd => Ok(Self(OwnedFd::from_raw_fd(fd))),
            }
        }
    }
    /// Wakes whoever waits. The only failure is a counter that is full, which wakes as well.
    pub fn signal(&self) {
        let one = 1u64;
        // SAFETY: 8 bytes of a live u64.
        unsafe { libc::write(self.0.as_raw_fd(), std::ptr::from_ref(&one).cast(), 8) };
    }
    /// Forgets signals that have come.
    pub fn drain(&self) {
        let mut n = 0u64;
        // SAFETY: 8 bytes of a live u64.
        unsafe { libc::read(self.0.as_raw_fd(), std::ptr::from_mut(&mut n).cast(), 8) };
    }
    /// The descriptor to poll.
    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Whether a read would find something, or an end. Some calls cost much more than this one when
/// they find nothing.
pub fn readable(fd: RawFd) -> bool {
    let mut one = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one live pollfd, exclusively borrowed for the call.
    unsafe { libc::poll(&mut one, 1, 0) > 0 }
}

/// Descriptors to wait for; keeps its buffer.
#[derive(Debug, Default)]
pub struct PollSet(Vec<libc::pollfd>);

impl PollSet {
    /// Empties the set.
    pub fn clear(&mut self) {
        self.0.clear();
    }
    /// Adds a descriptor; one that is closed meanwhile only wakes the poll.
    pub fn add(&mut self, fd: RawFd, read: bool, write: bool) {
        let events = if read { libc::POLLIN } else { 0 } | if write { libc::POLLOUT } else { 0 };
        self.0.push(libc::pollfd { fd, events, revents: 0 });
    }
    /// Waits until a descriptor is ready, a signal comes or `timeout` (rounded up to a
    /// millisecond) has passed.
    pub fn wait(&mut self, timeout: Duration) {
        let ms = timeout.as_nanos().div_ceil(1_000_000).min(60_000) as libc::c_int;
        // SAFETY: the vector's own buffer and length.
        unsafe { libc::poll(self.0.as_mut_ptr(), self.0.len() as libc::nfds_t, ms) };
    }
    /// Waits as [`PollSet::wait`], to the microsecond.
    pub fn nap(&mut self, timeout: Duration) {
        let timeout = timeout.min(Duration::from_secs(60));
        let timeout = libc::timespec {
            tv_sec: timeout.as_secs() as libc::time_t,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        // SAFETY: the vector's own buffer and length, a live timespec, no signal mask.
        unsafe {
            let n = self.0.len() as libc::nfds_t;
            libc::ppoll(self.0.as_mut_ptr(), n, &timeout, std::ptr::null())
        };
    }
    /// Whether the latest wait found the `index`th descriptor ready.
    pub fn ready(&self, index: usize) -> bool {
        self.0.get(index).is_some_and(|p| p.revents != 0)
    }
}
