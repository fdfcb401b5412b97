//! What both ends of a lane share: limits of one turn, and why a lane ended.

use std::io;

use kvlane_proto::{Error, ErrorKind, Refusal};

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
