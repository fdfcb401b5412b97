//! The death notice: an idle TCP connection that the kernel ends when a process dies.
//!
//! A killed process says nothing on QUIC. So the side that was dialled listens on a TCP port of its
//! own; its [`kvlane_proto::msg::Welcome`] names the port and a token; the dialler connects, sends the token, and
//! from then on nothing is said there. Who ends on purpose writes [`BYE`] first. An end without it
//! is the notice. It only makes the peer suspect: the connection is not encrypted, so anybody on
//! the path can end it, and a probe over QUIC has the last word.
//!
//! Owned by the endpoint: the listener, the table of tokens. Owned by a session: its connection.
//! Bounded: tokens, strangers that have not sent their token yet, the time that either may take.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvlane_proto::{Error, ErrorKind, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::random::fill_random;
use crate::wire::count_refusal;

/// Written before an end on purpose.
pub const BYE: u8 = b'B';
/// Connections that may be without their token at a time.
pub const STRANGERS_MAX: usize = 64;
/// Tokens that may be unclaimed at a time.
pub const TOKENS_MAX: usize = 4096;

/// After a failed accept (no descriptors left), the next one waits this long.
const BACK_OFF: Duration = Duration::from_millis(50);

type Token = [u8; 16];

struct Pending {
    due: Instant,
    claim: oneshot::Sender<TcpStream>,
}

/// The listening side.
pub(crate) struct Desk {
    port: u16,
    tokens: Mutex<HashMap<Token, Pending>>,
    token_ms: u64,
}

impl Desk {
    /// Listens on a port of its own beside the endpoint. `token_ms`: how long a token may stay
    /// unclaimed, and how long a connection may stay without one.
    pub(crate) fn open(beside: SocketAddr, token_ms: u64) -> Result<(Arc<Self>, TcpListener)> {
        let listen = || {
            let socket = new_socket(&beside)?;
            socket.bind(SocketAddr::new(beside.ip(), 0))?;
            // Accepted connections inherit keepalive.
            let listener = socket.listen(128)?;
            let port = listener.local_addr()?.port();
            Ok((port, listener))
        };
        let (port, listener) = listen().map_err(|e: std::io::Error| {
            Error::new(ErrorKind::Io, "death notices cannot be listened for")
                .with("address", beside.ip())
                .caused_by(e)
        })?;
        Ok((Arc::new(Self { port, tokens: Mutex::default(), token_ms }), listener))
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// A fresh token, and the notice of whoever claims it; `None` when too many are unclaimed.
    pub(crate) fn expect(&self) -> Result<Option<(Token, Notice)>> {
        let mut token = [0; 16];
        fill_random(&mut token)?;
        let now = Instant::now();
        let mut tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        tokens.retain(|_, pending| pending.due > now && !pending.claim.is_closed());
        if tokens.len() >= TOKENS_MAX {
            count_refusal("notice_tokens");
            return Ok(None);
        }
        let (claim, claimed) = oneshot::channel();
        tokens.insert(token, Pending { due: now + Duration::from_millis(self.token_ms), claim });
        Ok(Some((token, Notice::Awaited(claimed))))
    }

    /// Takes connections until it is dropped.
    pub(crate) async fn serve(self: Arc<Self>, listener: TcpListener) {
        let seats = Arc::new(Semaphore::new(STRANGERS_MAX));
        let mut strangers = JoinSet::new();
        loop {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => match Arc::clone(&seats).try_acquire_owned() {
                        Ok(seat) => {
                            let desk = Arc::clone(&self);
                            strangers.spawn(async move {
                                desk.claim(stream).await;
                                drop(seat);
                            });
                        }
                        Err(_) => count_refusal("notice_flood"),
                    },
                    Err(e) => {
                        tracing::warn!("death notice cannot be accepted: {e}");
                        tokio::time::sleep(BACK_OFF).await;
                    }
                },
                Some(_) = strangers.join_next(), if !strangers.is_empty() => {}
            }
        }
    }

    async fn claim(&self, mut stream: TcpStream) {
        let mut token: Token = [0; 16];
        let read = stream.read_exact(&mut token);
        match timeout(Duration::from_millis(self.token_ms), read).await {
            Ok(Ok(_)) => {}
            Ok(Err(_)) => return count_refusal("notice_truncated"),
            Err(_) => return count_refusal("notice_slow"),
        }
        let pending = self.tokens.lock().unwrap_or_else(PoisonError::into_inner).remove(&token);
        match pending {
            None => count_refusal("notice_token"),
            Some(pending) if pending.due <= Instant::now() => count_refusal("notice_expired"),
            // If the session is over already, the stream goes with it.
            Some(pending) => drop(pending.claim.send(stream)),
        }
    }
}

fn new_socket(for_address: &SocketAddr) -> std::io::Result<TcpSocket> {
    let socket = match for_address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    socket.set_keepalive(true)?;
    Ok(socket)
}

/// The dialling side.
pub(crate) async fn connect(to: SocketAddr, token: &Token) -> std::io::Result<Notice> {
    let mut stream = new_socket(&to)?.connect(to).await?;
    stream.write_all(token).await?;
    Ok(Notice::Live(stream))
}

/// One session's side of the idle connection.
#[derive(Debug)]
pub(crate) enum Notice {
    /// The dialler has not come with its token yet.
    Awaited(oneshot::Receiver<TcpStream>),
    /// Idle.
    Live(TcpStream),
    /// None, or over.
    Gone,
}

impl Notice {
    /// Waits for an end without [`BYE`]; for ever if there is none. May be dropped and called again.
    pub(crate) async fn ended(&mut self) {
        loop {
            match self {
                Self::Awaited(claimed) => {
                    *self = claimed.await.map_or(Self::Gone, Self::Live);
                }
                Self::Live(stream) => {
                    let mut byte = [0];
                    let read = stream.read(&mut byte).await;
                    *self = Self::Gone;
                    match read {
                        Ok(1) if byte[0] == BYE => {}
                        _ => return,
                    }
                }
                Self::Gone => std::future::pending().await,
            }
        }
    }
}

impl Drop for Notice {
    fn drop(&mut self) {
        // The buffer of an idle connection is empty, so that one byte always fits.
        match self {
            Self::Awaited(claimed) => {
                if let Ok(stream) = claimed.try_recv() {
                    let _ = stream.try_write(&[BYE]);
                }
            }
            Self::Live(stream) => drop(stream.try_write(&[BYE])),
            Self::Gone => {}
        }
    }
}
