//! The control frame:
//!
//! | bytes | what |
//! |---|---|
//! | 0 | [`MAGIC`]: high nibble 0xB, low nibble the format's version, 1 |
//! | 1 | family of the message ([`super::Message::FAMILY`]) |
//! | 2..6 | length of the body in bytes, u32 little endian |
//! | 6.. | body: one message as [`super::codec`] writes it |
//!
//! A reader waits for the first byte of a frame as long as the connection lives. From then on the
//! whole frame has a deadline, so that a peer that sends a byte a minute holds nothing. The body's
//! buffer grows as bytes arrive: a claimed length allocates nothing.

use std::time::Duration;

use kvlane_proto::{Error, ErrorKind, Result};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, timeout_at};

use super::{HEADER_BYTES, MAGIC, Message, message, refuse};

/// How long one frame may take from its first byte to its last.
pub const FRAME_MS: u64 = 5_000;

/// Bytes that one read may add to a body.
const GROW_BYTES: usize = 16 << 10;

/// Reads frames. One per stream; it keeps what has come of a frame, so [`FrameReader::next`] may be
/// dropped at any time (in a `select!`) without losing a byte.
#[derive(Debug)]
pub struct FrameReader<R> {
    stream: R,
    deadline: Duration,
    header: [u8; HEADER_BYTES],
    header_have: usize,
    body: Vec<u8>,
    /// When the frame that has begun must be complete.
    due: Option<Instant>,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    /// A reader with the usual deadline.
    pub fn new(stream: R) -> Self {
        Self {
            stream,
            deadline: Duration::from_millis(FRAME_MS),
            header: [0; HEADER_BYTES],
            header_have: 0,
            body: Vec::new(),
            due: None,
        }
    }
    /// The same with another deadline for a whole frame.
    #[must_use]
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }
    /// The stream.
    pub fn stream(&self) -> &R {
        &self.stream
    }

    /// The next message; `None` when the stream ends between two frames. After an error the stream
    /// is of no use: close it.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`], [`ErrorKind::LimitExceeded`], [`ErrorKind::DeadlineExceeded`], each
    /// counted; [`ErrorKind::Io`] when the stream fails.
    pub async fn next<M: Message>(&mut self, body_bytes_max: usize) -> Result<Option<M>> {
        while self.header_have < HEADER_BYTES {
            let have = self.header_have;
            let read = self.stream.read(&mut self.header[have..]);
            let n = match self.due {
                None => read.await,
                Some(due) => timeout_at(due, read).await.map_err(|_| self.too_slow())?,
            }
            .map_err(stream_failed)?;
            match n {
                0 if have == 0 => return Ok(None),
                0 => return Err(cut(have, HEADER_BYTES)),
                _ => self.header_have += n,
            }
            if self.due.is_none() {
                self.due = Some(Instant::now() + self.deadline);
            }
            // Judged as soon as they are there: a stranger to this protocol is told at once.
            if self.header[0] != MAGIC {
                return Err(refuse("magic", ErrorKind::Malformed, "not a kvlane frame")
                    .with("found", format!("{:#04x}", self.header[0]))
                    .with("expected", format!("{MAGIC:#04x}")));
            }
            if self.header_have > 1 && self.header[1] != M::FAMILY {
                return Err(refuse("family", ErrorKind::Malformed, "message of another family")
                    .with("found", self.header[1])
                    .with("expected", M::FAMILY));
            }
        }
        let [_, _, length @ ..] = self.header;
        let length = u32::from_le_bytes(length) as usize;
        if length > body_bytes_max {
            return Err(refuse("oversized", ErrorKind::LimitExceeded, "frame is too long")
                .with("claimed_bytes", length)
                .with("limit_bytes", body_bytes_max));
        }
        while self.body.len() < length {
            let missing = length - self.body.len();
            self.body.reserve(missing.min(GROW_BYTES));
            let mut rest = (&mut self.stream).take(missing as u64);
            let read = rest.read_buf(&mut self.body);
            let due = self.due.unwrap_or_else(Instant::now);
            let n = match timeout_at(due, read).await {
                Ok(n) => n.map_err(stream_failed)?,
                Err(_) => return Err(self.too_slow()),
            };
            if n == 0 {
                return Err(cut(HEADER_BYTES + self.body.len(), HEADER_BYTES + length));
            }
        }
        // Taken, not cleared: an idle connection keeps no buffer.
        let body = std::mem::take(&mut self.body);
        self.header_have = 0;
        self.due = None;
        message::open(&body).map(Some)
    }

    fn too_slow(&self) -> Error {
        refuse("slow", ErrorKind::DeadlineExceeded, "frame did not arrive in time")
            .with("have_bytes", self.header_have + self.body.len())
            .with("limit_ms", self.deadline.as_millis())
    }
}

fn cut(have: usize, expected: usize) -> Error {
    refuse("truncated", ErrorKind::Malformed, "stream ended inside a frame")
        .with("have_bytes", have)
        .with("expected_bytes", expected)
}

fn stream_failed(e: std::io::Error) -> Error {
    Error::new(ErrorKind::Io, "stream failed inside or before a frame").caused_by(e)
}

/// Reads one frame; as [`FrameReader::next`], for streams that carry one.
///
/// # Errors
/// As [`FrameReader::next`].
pub async fn read_frame<M: Message, R: AsyncRead + Unpin>(
    stream: &mut R,
    body_bytes_max: usize,
    deadline: Duration,
) -> Result<Option<M>> {
    FrameReader::new(stream).with_deadline(deadline).next(body_bytes_max).await
}

/// Writes one frame.
///
/// # Errors
/// [`ErrorKind::LimitExceeded`] if the message is too long; [`ErrorKind::Io`].
pub async fn write_frame<M: Message, W: AsyncWrite + Unpin>(
    stream: &mut W,
    message: &M,
) -> Result<()> {
    let frame = message::seal(message)?;
    stream
        .write_all(&frame)
        .await
        .map_err(|e| Error::new(ErrorKind::Io, "frame cannot be written").caused_by(e))
}

#[cfg(test)]
mod tests {
    use kvlane_proto::limits::FRAME_BYTES_MAX;
    use kvlane_proto::msg::peer::{PeerFrame, PeerMsg};

    use super::*;

    fn beat(seq: u64) -> PeerFrame {
        PeerFrame { seq, echo: 0, msg: PeerMsg::Heartbeat }
    }

    #[tokio::test]
    async fn a_claimed_length_allocates_only_what_arrives() {
        let mut frame = vec![MAGIC, PeerFrame::FAMILY];
        frame.extend((FRAME_BYTES_MAX as u32).to_le_bytes());
        frame.extend([0; 100]);
        let mut reader = FrameReader::new(frame.as_slice());
        let e = reader.next::<PeerFrame>(FRAME_BYTES_MAX).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Malformed);
        assert_eq!(reader.body.len(), 100);
        assert!(reader.body.capacity() <= 4 * GROW_BYTES, "{}", reader.body.capacity());
    }

    #[tokio::test]
    async fn a_reader_that_is_dropped_mid_frame_loses_nothing() {
        let (mut ours, theirs) = tokio::io::duplex(1024);
        let mut reader = FrameReader::new(theirs);
        for (i, byte) in message::seal(&beat(3)).unwrap().into_iter().enumerate() {
            let none = timeout_at(Instant::now(), reader.next::<PeerFrame>(1024)).await;
            assert!(none.is_err(), "complete before byte {i}");
            ours.write_all(&[byte]).await.unwrap();
        }
        assert_eq!(reader.next(1024).await.unwrap(), Some(beat(3)));
        drop(ours);
        assert_eq!(reader.next::<PeerFrame>(1024).await.unwrap(), None);
    }
}
