//! What both ends of a lane share: limits of one turn, and why a lane ended.

use std::io;
use std::time::Duration;

use kvlane_proto::{Error, ErrorKind, Refusal, limits};

/// Most bytes of one receive or send. A revoke waits for one such call at most.
pub(super) const CALL_BYTES: u64 = 1 << 20;
/// Calls that one lane may make before the next has its turn.
pub(super) const CALLS_PER_TURN: u32 = 4;
/// Acks that may wait to be sent before a lane is read no further: a sender that takes no acks gets
/// no more room.
pub(super) const ACK_BACKLOG_BYTES: usize = 4 << 10;

/// What a call on a non-blocking descriptor came to.
pub(super) enum Io {
    /// So many bytes; never 0.
    Some(usize),
    /// Nothing to be had now.
    Later,
}

/// Sorts the result of a call; the end of the stream is a refusal.
pub(super) fn sort(result: io::Result<usize>) -> Result<Io, Refusal> {
    match result {
        Ok(0) => Err(Refusal::new(ErrorKind::PeerLost, "the peer closed the lane's connection")),
        Ok(n) => Ok(Io::Some(n)),
        Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
            Ok(Io::Later)
        }
        Err(e) => Err(Error::new(ErrorKind::PeerLost, "the lane's connection broke")
            .caused_by(e)
            .to_refusal()),
    }
}

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
