//! A welcomed session: one half that sends, one that receives, one that watches for the end.
//!
//! One bidirectional stream carries all frames in order. Sending never blocks an actor: frames go
//! into a queue bounded by count and bytes, and a task writes them. The task lives as long as a
//! sender or a frame in the queue does, and ends early when the connection is gone, which the
//! senders notice.

use std::marker::PhantomData;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kvlane_proto::limits::FRAME_BYTES_MAX;
use kvlane_proto::msg::Purpose;
use kvlane_proto::{Error, ErrorKind, Refusal, Result, WorkerKey};
use quinn::{Connection, ConnectionError, RecvStream, SendStream};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::timeout;

use super::code;
use super::notice::Notice;
use crate::wire::{FrameReader, HEADER_BYTES, Message, count_refusal, message};

/// Frames that may wait to be written.
pub const SEND_QUEUE_FRAMES_MAX: usize = 1024;
/// Bytes that may wait to be written; two of the largest frames.
pub const SEND_QUEUE_BYTES_MAX: usize = 2 * (FRAME_BYTES_MAX + HEADER_BYTES);
/// How long the peer may take nothing off its stream while a frame is being written.
pub const WRITE_MS: u64 = 10_000;
/// How long the last frames may take to be acknowledged once every sender is gone.
pub const FLUSH_MS: u64 = 1_000;

/// A session that both sides have agreed on.
#[derive(Debug)]
pub struct Session {
    /// Who is at the other end, as its certificate says; with [`super::Security::Insecure`], as it
    /// says itself.
    pub peer: WorkerKey,
    /// Version of its build.
    pub build: String,
    /// What the session is for.
    pub purpose: Purpose,
    /// The protocol version both speak.
    pub version: u16,
    /// Where it is.
    pub remote: SocketAddr,
    /// This side dialled.
    pub dialled: bool,
    pub(super) connection: Connection,
    pub(super) send: SendStream,
    pub(super) reader: FrameReader<RecvStream>,
    pub(super) notice: Notice,
}

impl Session {
    /// Takes the session apart. `Out` and `In` are the families that this side sends and receives;
    /// a frame of another family ends the session. Needs a running tokio runtime.
    pub fn into_parts<Out: Message, In: Message>(
        self,
    ) -> (FrameSender<Out>, FrameReceiver<In>, Watch) {
        let (queue, frames) = mpsc::channel(SEND_QUEUE_FRAMES_MAX);
        tokio::spawn(write(self.connection.clone(), self.send, frames));
        let sender = FrameSender {
            queue,
            room: Arc::new(Semaphore::new(SEND_QUEUE_BYTES_MAX)),
            family: PhantomData,
        };
        let receiver = FrameReceiver {
            reader: self.reader,
            connection: self.connection.clone(),
            family: PhantomData,
        };
        (sender, receiver, Watch { connection: self.connection, notice: self.notice })
    }
}

struct Queued {
    bytes: Vec<u8>,
    _room: OwnedSemaphorePermit,
}

async fn write(connection: Connection, mut send: SendStream, mut frames: mpsc::Receiver<Queued>) {
    let closed = connection.closed();
    tokio::pin!(closed);
    loop {
        let frame = tokio::select! {
            frame = frames.recv() => frame,
            _ = &mut closed => return,
        };
        let Some(frame) = frame else { break };
        match timeout(Duration::from_millis(WRITE_MS), send.write_all(&frame.bytes)).await {
            Ok(Ok(())) => {}
            Ok(Err(e)) => return tracing::debug!("session no longer writable: {e}"),
            Err(_) => {
                count_refusal("stalled");
                connection.close(code::STALLED.into(), b"peer takes nothing off its stream");
                return;
            }
        }
    }
    // Every sender is gone: what was queued still has to arrive.
    if send.finish().is_ok() {
        let _ = timeout(Duration::from_millis(FLUSH_MS), send.stopped()).await;
    }
}

/// Sends frames of one family. Clones share the queue. When the last one is dropped, what is queued
/// is still delivered and the peer then reads the end.
#[derive(Debug)]
pub struct FrameSender<Out> {
    queue: mpsc::Sender<Queued>,
    room: Arc<Semaphore>,
    family: PhantomData<fn(Out)>,
}

impl<Out> Clone for FrameSender<Out> {
    fn clone(&self) -> Self {
        Self { queue: self.queue.clone(), room: Arc::clone(&self.room), family: PhantomData }
    }
}

impl<Out: Message> FrameSender<Out> {
    /// Queues a frame; never waits.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] when the queue is full, by [`SEND_QUEUE_FRAMES_MAX`] or
    /// [`SEND_QUEUE_BYTES_MAX`]; [`ErrorKind::PeerLost`] when the session is over;
    /// [`ErrorKind::LimitExceeded`] when the message is too long.
    pub fn try_send(&self, message: &Out) -> Result<()> {
        let bytes = message::seal(message)?;
        let room = Arc::clone(&self.room)
            .try_acquire_many_owned(bytes.len() as u32)
            .map_err(|_| full("bytes", SEND_QUEUE_BYTES_MAX))?;
        self.queue.try_send(Queued { bytes, _room: room }).map_err(|e| match e {
            TrySendError::Full(_) => full("frames", SEND_QUEUE_FRAMES_MAX),
            TrySendError::Closed(_) => over(),
        })
    }

    /// Queues a frame, and waits for room in the queue: at most as long as the peer may stall.
    ///
    /// # Errors
    /// As [`FrameSender::try_send`], without [`ErrorKind::Busy`].
    pub async fn send(&self, message: &Out) -> Result<()> {
        let bytes = message::seal(message)?;
        let room = Arc::clone(&self.room).acquire_many_owned(bytes.len() as u32);
        // The writer's deadline bounds this wait too: when it gives up, the queue closes.
        let room = tokio::select! {
            room = room => room.map_err(|_| over())?,
            () = self.queue.closed() => return Err(over()),
        };
        self.queue.send(Queued { bytes, _room: room }).await.map_err(|_| over())
    }
}

fn full(what: &'static str, limit: usize) -> Error {
    Error::new(ErrorKind::Busy, "send queue is full").with("of", what).with("limit", limit)
}

fn over() -> Error {
    Error::new(ErrorKind::PeerLost, "session is over")
}

/// Receives frames of one family.
#[derive(Debug)]
pub struct FrameReceiver<In> {
    reader: FrameReader<RecvStream>,
    connection: Connection,
    family: PhantomData<fn() -> In>,
}

impl<In: Message> FrameReceiver<In> {
    /// The next message; `None` when either side ended the session on purpose. May be dropped in a
    /// `select!` without losing anything.
    ///
    /// # Errors
    /// [`ErrorKind::PeerLost`] when the connection broke; otherwise the peer sent what it must not,
    /// which is counted and has closed the connection.
    pub async fn recv(&mut self) -> Result<Option<In>> {
        match self.reader.next(FRAME_BYTES_MAX).await {
            Ok(message) => Ok(message),
            Err(e) if e.kind() == ErrorKind::Io => match self.connection.close_reason() {
                Some(reason) if is_clean(&reason) => Ok(None),
                Some(reason) => Err(lost(&reason)),
                None => {
                    Err(Error::new(ErrorKind::PeerLost, "peer gave the stream up").caused_by(e))
                }
            },
            Err(e) => {
                self.connection.close(code::PROTOCOL.into(), reason_bytes(&e).as_slice());
                Err(e)
            }
        }
    }
}

/// Why a session may be over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Death {
    /// The idle connection ended and nobody had said goodbye: the process is probably dead. Probe
    /// it. The session itself may live on; [`Watch::died`] may be asked again.
    Notice,
    /// The session is over.
    Closed {
        /// It was ended on purpose, by either side.
        clean: bool,
        /// What is known of it.
        why: Refusal,
    },
}

/// Watches a session for its end.
#[derive(Debug)]
pub struct Watch {
    connection: Connection,
    notice: Notice,
}

impl Watch {
    /// Waits until the death notice fires (once) or the session is closed. May be dropped in a
    /// `select!` and asked again.
    pub async fn died(&mut self) -> Death {
        tokio::select! {
            biased;
            reason = self.connection.closed() => {
                Death::Closed { clean: is_clean(&reason), why: lost(&reason).to_refusal() }
            }
            () = self.notice.ended() => {
                metrics::counter!("kvlane_death_notices_total").increment(1);
                Death::Notice
            }
        }
    }

    /// Ends the session at once; frames still queued are lost. The peer sees a clean end.
    pub fn close(&self, why: &str) {
        self.connection.close(code::CLEAN.into(), cut(why));
    }

    /// Smoothed round-trip time of the session.
    pub fn rtt(&self) -> Duration {
        self.connection.rtt()
    }
}

/// Reasons travel in one packet.
fn cut(why: &str) -> &[u8] {
    let bytes = why.as_bytes();
    &bytes[..bytes.len().min(200)]
}

pub(super) fn reason_bytes(e: &Error) -> Vec<u8> {
    cut(&e.to_string()).to_vec()
}

fn is_clean(reason: &ConnectionError) -> bool {
    match reason {
        ConnectionError::LocallyClosed => true,
        ConnectionError::ApplicationClosed(close) => close.error_code == code::CLEAN.into(),
        _ => false,
    }
}

/// What a connection's end means.
pub(super) fn lost(reason: &ConnectionError) -> Error {
    let tls = |code: quinn::TransportErrorCode| (0x100..0x200).contains(&u64::from(code));
    let (kind, what) = match reason {
        ConnectionError::ConnectionClosed(close) if tls(close.error_code) => {
            (ErrorKind::Unauthorized, "peer refused our certificate or handshake")
        }
        ConnectionError::TransportError(e) if tls(e.code) => {
            (ErrorKind::Unauthorized, "peer's certificate or handshake was refused")
        }
        ConnectionError::TimedOut => (ErrorKind::PeerLost, "peer fell silent"),
        ConnectionError::Reset => (ErrorKind::PeerLost, "peer restarted"),
        ConnectionError::LocallyClosed => (ErrorKind::PeerLost, "this side closed the session"),
        ConnectionError::VersionMismatch => {
            (ErrorKind::VersionMismatch, "peer speaks another version of QUIC")
        }
        _ => (ErrorKind::PeerLost, "peer closed the session"),
    };
    Error::new(kind, what).with("found", reason)
}
