//! Sockets, accept queues and the greeting on both sides.
//!
//! An [`Endpoint`] is one UDP socket that dials and is dialled, one TCP listener for death notices,
//! and two tasks that end with it: one greets whoever comes, one hands death-notice connections to
//! their sessions. Greetings run side by side, in a bounded table; past half of it a source must
//! prove its address first (a QUIC retry, which costs this side no memory), past all of it it is
//! refused. One address may hold a quarter of the table.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvlane_proto::limits::{self, HELLO_FRAME_BYTES_MAX};
use kvlane_proto::msg::{Greeting, Hello, Purpose, Welcome};
use kvlane_proto::{Error, ErrorKind, Identity, Result, WorkerKey};
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{Connection, ConnectionError, Incoming, VarInt};
use rustls::pki_types::CertificateDer;
use tokio::net::TcpListener;
use tokio::sync::{Mutex, mpsc};
use tokio::task::{AbortHandle, Id, JoinSet};
use tokio::time::{Instant, timeout, timeout_at};

use super::notice::{self, Desk, Notice};
use super::session::{lost, reason_bytes};
use super::{Security, Session, ca, code, greeting, tls, x509};
use crate::random::fill_random;
use crate::wire::{FrameReader, count_refusal, refuse, write_frame};

/// Dialled sessions that wait for [`Endpoint::accept`].
pub const ACCEPT_QUEUE_MAX: usize = 64;
/// Greetings at a time.
pub const GREETINGS_MAX: usize = 256;
/// Greetings at a time from one address.
pub const GREETINGS_PER_ADDRESS_MAX: usize = GREETINGS_MAX / 4;
/// A connection without a packet for this long is gone. Heartbeats find a lost peer long before.
pub const IDLE_MS: u64 = 10_000;
/// A packet is sent after this long without one, for sessions that have no heartbeat.
pub const KEEP_ALIVE_MS: u64 = 3_000;
/// What a peer may send ahead of being read. With the frame that is being read (its body grows as
/// it comes), one session can make this side hold `WINDOW_BYTES + FRAME_BYTES_MAX`, and
/// `WINDOW_BYTES + HELLO_FRAME_BYTES_MAX` before it is welcomed. An idle one holds neither.
pub const WINDOW_BYTES: u32 = 256 << 10;
/// What may be sent ahead of being acknowledged.
const SEND_WINDOW_BYTES: u64 = 256 << 10;
/// TLS messages that may arrive out of order; a certificate chain fits.
const CRYPTO_BYTES: usize = 32 << 10;
/// Packets of connections that are not accepted yet, all together.
const INCOMING_BYTES: u64 = 4 << 20;
/// Between two stateless resets. Each is smaller than the packet it answers.
const RESET_INTERVAL: Duration = Duration::from_millis(1);
/// How long the death notice may take to be set up once the session stands.
const NOTICE_CONNECT_MS: u64 = 1_000;
/// How long a refusal may take to be read by whoever it is for.
const REFUSAL_MS: u64 = 1_000;

/// What an endpoint is made from.
#[derive(Clone, Debug)]
pub struct EndpointConfig {
    /// UDP address; port 0 for any. The death notice listens on the same host address.
    pub listen: SocketAddr,
    /// How peers are recognised.
    pub security: Security,
    /// Who this is. With certificates, the identity must be the certificate's.
    pub me: WorkerKey,
    /// Version of the build, for the peer's logs.
    pub build: String,
    /// Whether sessions have a death notice.
    pub death_notice: bool,
    /// Persisted over restarts ([`load_reset_key`]), it makes a restarted process at the same
    /// address end the connections of the one before it at once.
    pub reset_key: Option<[u8; 32]>,
    /// How long a greeting may take, from the first packet to the welcome.
    pub handshake_ms: u64,
}

impl EndpointConfig {
    /// The usual configuration.
    pub fn new(listen: SocketAddr, security: Security, me: WorkerKey) -> Self {
        Self {
            listen,
            security,
            me,
            build: env!("CARGO_PKG_VERSION").into(),
            death_notice: true,
            reset_key: None,
            handshake_ms: limits::HANDSHAKE_MS,
        }
    }
}

/// Reads the stateless-reset key from a file, which is made at the first start.
///
/// # Errors
/// [`ErrorKind::Config`] if the file is not 32 bytes; [`ErrorKind::Io`].
pub fn load_reset_key(path: &Path) -> Result<[u8; 32]> {
    if !path.exists() {
        let mut key = [0; 32];
        fill_random(&mut key)?;
        ca::write_file(path, &key, 0o600)?;
        return Ok(key);
    }
    let bytes = tls::read_small(path)?;
    <[u8; 32]>::try_from(bytes.as_slice()).map_err(|_| {
        Error::new(ErrorKind::Config, "not a stateless-reset key")
            .with("file", path.display())
            .with("found_bytes", bytes.len())
            .with("expected_bytes", 32)
            .hint("remove the file; the next start makes another")
    })
}

/// One address at which a process can be reached, and from which it reaches others.
#[derive(Clone)]
pub struct Endpoint {
    inner: Arc<Inner>,
}

struct Inner {
    shared: Arc<Shared>,
    address: SocketAddr,
    sessions: Mutex<mpsc::Receiver<Session>>,
    tasks: Vec<AbortHandle>,
}

struct Shared {
    quic: quinn::Endpoint,
    me: WorkerKey,
    build: String,
    mutual: bool,
    death_notice: bool,
    desk: Option<Arc<Desk>>,
    handshake: Duration,
}

impl Drop for Inner {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
        if !self.shared.mutual {
            metrics::gauge!("kvlane_insecure_endpoints").decrement(1.0);
        }
    }
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Endpoint({} at {})", self.inner.shared.me, self.inner.address)
    }
}

impl Endpoint {
    /// Opens the sockets and begins to greet. Needs a running tokio runtime.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for certificates that cannot be used, or an insecure endpoint on an
    /// unspecified address; [`ErrorKind::IdentityMismatch`] if the certificate is somebody else's;
    /// [`ErrorKind::Io`] if the address cannot be had.
    pub fn bind(config: EndpointConfig) -> Result<Self> {
        let EndpointConfig { listen, security, me, build, .. } = config;
        me.identity.check()?;
        let mutual = match &security {
            Security::Mutual { dir } => {
                let proved = tls::identity_of(dir)?;
                if proved != me.identity {
                    return Err(Error::new(
                        ErrorKind::IdentityMismatch,
                        "certificate is somebody else's",
                    )
                    .with("configured", &me.identity)
                    .with("certificate", proved)
                    .with("dir", dir.display())
                    .hint("configure the certificate's identity, or issue another one"));
                }
                true
            }
            Security::Insecure => {
                if listen.ip().is_unspecified() {
                    return Err(Error::new(
                        ErrorKind::Config,
                        "insecure endpoint on every address",
                    )
                    .with("listen", listen)
                    .hint("name one address, such as 127.0.0.1, or use certificates"));
                }
                tracing::warn!(identity = %me.identity, %listen, "insecure: peers are who they say they are");
                false
            }
        };
        let (client, server) = tls::configs(&security)?;
        let quic = open_socket(listen, client, server, config.reset_key)?;
        let address = quic.local_addr().map_err(|e| cannot_listen(listen, e))?;
        let (desk, notices) = if config.death_notice {
            let (desk, listener) = Desk::open(address, config.handshake_ms)?;
            (Some(desk), Some(listener))
        } else {
            (None, None)
        };
        let shared = Arc::new(Shared {
            quic,
            me,
            build,
            mutual,
            death_notice: config.death_notice,
            desk,
            handshake: Duration::from_millis(config.handshake_ms),
        });
        if !mutual {
            metrics::gauge!("kvlane_insecure_endpoints").increment(1.0);
        }
        let (queue, sessions) = mpsc::channel(ACCEPT_QUEUE_MAX);
        let mut tasks = vec![tokio::spawn(greet_all(Arc::clone(&shared), queue)).abort_handle()];
        if let (Some(desk), Some(listener)) = (&shared.desk, notices) {
            tasks.push(spawn_desk(Arc::clone(desk), listener));
        }
        Ok(Self {
            inner: Arc::new(Inner { shared, address, sessions: Mutex::new(sessions), tasks }),
        })
    }

    /// The UDP address, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.inner.address
    }

    /// Who this endpoint is.
    pub fn me(&self) -> &WorkerKey {
        &self.inner.shared.me
    }

    /// Dials `host:port` and greets, within the handshake's deadline. Each address of a name gets an
    /// equal share of what is left of it.
    ///
    /// # Errors
    /// What the peer refused, as it said it; [`ErrorKind::NotFound`] for a name without addresses;
    /// [`ErrorKind::Unauthorized`] for certificates; [`ErrorKind::IdentityMismatch`] if somebody else
    /// answers; [`ErrorKind::DeadlineExceeded`]; [`ErrorKind::PeerLost`]. The address is in the
    /// context.
    pub async fn dial(
        &self,
        address: &str,
        expects: Option<&Identity>,
        purpose: Purpose,
    ) -> Result<Session> {
        let shared = &self.inner.shared;
        let due = Instant::now() + shared.handshake;
        let too_late = || {
            Error::new(ErrorKind::DeadlineExceeded, "peer did not complete the greeting in time")
                .with("limit_ms", shared.handshake.as_millis())
        };
        let greeted = async {
            let connection = shared.connect(address, due).await?;
            shared.greet_acceptor(&connection, expects, purpose).await.inspect_err(|e| {
                connection.close(code::REFUSED.into(), &reason_bytes(e));
            })
        };
        timeout_at(due, greeted).await.unwrap_or_else(|_| Err(too_late())).map_err(|e| {
            let e = e.with(
                "address",
                address.chars().take(limits::ADDRESS_BYTES_MAX).collect::<String>(),
            );
            tracing::debug!("dial failed: {e}");
            e
        })
    }

    /// The next session that somebody dialled and that was welcomed; `None` once the endpoint is
    /// closed. Refused ones are counted and never come here.
    pub async fn accept(&self) -> Option<Session> {
        self.inner.sessions.lock().await.recv().await
    }

    /// Ends every session and stops listening; waits a moment for peers to hear of it.
    pub async fn close(&self, why: &str) {
        for task in &self.inner.tasks {
            task.abort();
        }
        let bytes = why.as_bytes();
        let quic = &self.inner.shared.quic;
        quic.close(code::CLEAN.into(), &bytes[..bytes.len().min(200)]);
        let _ = timeout(Duration::from_millis(REFUSAL_MS), quic.wait_idle()).await;
    }
}

fn spawn_desk(desk: Arc<Desk>, listener: TcpListener) -> AbortHandle {
    tokio::spawn(desk.serve(listener)).abort_handle()
}

fn cannot_listen(listen: SocketAddr, e: std::io::Error) -> Error {
    let fix = match e.kind() {
        std::io::ErrorKind::AddrNotAvailable => "choose an address of this host",
        std::io::ErrorKind::PermissionDenied => "choose a port above 1023",
        _ => "choose another port, or end the process that holds it",
    };
    Error::new(ErrorKind::Io, "address cannot be listened on")
        .with("listen", listen)
        .hint(fix)
        .caused_by(e)
}

/// What a connection's end means, and what to do if certificates are why.
fn lost_with_hint(reason: &ConnectionError) -> Error {
    match tls::fix_of(reason) {
        Some(fix) => lost(reason).hint(fix),
        None => lost(reason),
    }
}

fn open_socket(
    listen: SocketAddr,
    client: rustls::ClientConfig,
    server: rustls::ServerConfig,
    reset_key: Option<[u8; 32]>,
) -> Result<quinn::Endpoint> {
    let no_suite = |e| Error::new(ErrorKind::Internal, "TLS cannot be used for QUIC").caused_by(e);
    let client_tls = QuicClientConfig::try_from(client).map_err(no_suite)?;
    let server_tls = QuicServerConfig::try_from(server).map_err(no_suite)?;
    let mut server = quinn::ServerConfig::with_crypto(Arc::new(server_tls));
    server
        .transport_config(Arc::new(transport(1)))
        .max_incoming(2 * GREETINGS_MAX)
        .incoming_buffer_size(u64::from(WINDOW_BYTES) / 16)
        .incoming_buffer_size_total(INCOMING_BYTES);
    let mut client = quinn::ClientConfig::new(Arc::new(client_tls));
    client.transport_config(Arc::new(transport(0)));

    let mut config = quinn::EndpointConfig::default();
    if let Some(key) = reset_key {
        let mac = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &key);
        config
            .reset_key(Arc::new(mac))
            .min_reset_interval(RESET_INTERVAL)
            .cid_generator(|| Box::new(RandomIds));
    }
    let socket = std::net::UdpSocket::bind(listen).map_err(|e| cannot_listen(listen, e))?;
    let runtime = Arc::new(quinn::TokioRuntime);
    let mut quic = quinn::Endpoint::new(config, Some(server), socket, runtime)
        .map_err(|e| cannot_listen(listen, e))?;
    quic.set_default_client_config(client);
    Ok(quic)
}

/// Connection ids that do not show which start of the process made them. (quinn's own ones do, and
/// packets for others' ids are dropped instead of answered with a reset.)
#[derive(Debug)]
struct RandomIds;

impl quinn::ConnectionIdGenerator for RandomIds {
    fn generate_cid(&mut self) -> quinn::ConnectionId {
        // An id has to be unique, not secret: std's own random state does if the kernel has none.
        let id = getrandom::u64().unwrap_or_else(|_| RandomState::new().hash_one(0));
        quinn::ConnectionId::new(&id.to_le_bytes())
    }
    fn cid_len(&self) -> usize {
        8
    }
    fn cid_lifetime(&self) -> Option<Duration> {
        None
    }
}

/// One stream per session; no datagrams.
fn transport(streams_from_peer: u32) -> quinn::TransportConfig {
    let mut t = quinn::TransportConfig::default();
    t.max_concurrent_bidi_streams(streams_from_peer.into())
        .max_concurrent_uni_streams(0u32.into())
        .datagram_receive_buffer_size(None)
        .stream_receive_window(WINDOW_BYTES.into())
        .receive_window(WINDOW_BYTES.into())
        .send_window(SEND_WINDOW_BYTES)
        .crypto_buffer_size(CRYPTO_BYTES)
        .keep_alive_interval(Some(Duration::from_millis(KEEP_ALIVE_MS)))
        .max_idle_timeout(Some(VarInt::from_u32(IDLE_MS as u32).into()));
    t
}

impl Shared {
    async fn connect(&self, address: &str, due: Instant) -> Result<Connection> {
        let found = tokio::net::lookup_host(address).await.map_err(|e| {
            Error::new(ErrorKind::NotFound, "name cannot be resolved")
                .hint("addresses are host:port")
                .caused_by(e)
        })?;
        let v4 = self.quic.local_addr().is_ok_and(|a| a.is_ipv4());
        let (fit, others): (Vec<SocketAddr>, Vec<SocketAddr>) =
            found.take(limits::LIST_MAX).partition(|a| a.is_ipv4() || !v4);
        let mut last = Error::new(ErrorKind::NotFound, "name has no address that can be dialled")
            .with("found", format!("{others:?}"))
            .with("expected", if v4 { "IPv4" } else { "IPv4 or IPv6" });
        for (i, to) in fit.iter().enumerate() {
            let left = due.saturating_duration_since(Instant::now());
            let share = left / (fit.len() - i) as u32;
            let connecting = match self.quic.connect(*to, tls::DNS_NAME) {
                Ok(connecting) => connecting,
                Err(e) => {
                    last = Error::new(ErrorKind::Io, "cannot dial").with("to", to).caused_by(e);
                    continue;
                }
            };
            last = match timeout(share, connecting).await {
                Ok(Ok(connection)) => return Ok(connection),
                Ok(Err(e)) => lost_with_hint(&e),
                Err(_) => Error::new(ErrorKind::DeadlineExceeded, "no answer")
                    .with("limit_ms", share.as_millis())
                    .hint("is the process up, and UDP let through to this port?"),
            }
            .with("to", to);
        }
        Err(last)
    }

    async fn greet_acceptor(
        &self,
        connection: &Connection,
        expects: Option<&Identity>,
        purpose: Purpose,
    ) -> Result<Session> {
        let certificate = self.certificate_of(connection)?;
        let hello = Hello {
            protocol: (limits::PROTOCOL_MIN, limits::PROTOCOL_MAX),
            build: self.build.clone(),
            identity: self.me.identity.clone(),
            incarnation: self.me.incarnation,
            expects: expects.cloned(),
            purpose,
            capabilities: Vec::new(),
        };
        let (mut send, recv) = connection.open_bi().await.map_err(|e| lost(&e))?;
        let mut reader = FrameReader::new(recv);
        let answer = async {
            write_frame(&mut send, &Greeting::Hello(hello.clone())).await?;
            reader.next::<Greeting>(HELLO_FRAME_BYTES_MAX).await
        };
        // A peer that refuses our certificate says so by closing, after the handshake here.
        let answer = answer.await.map_err(|e| match connection.close_reason() {
            Some(reason) if e.kind() == ErrorKind::Io => lost_with_hint(&reason),
            _ => e,
        })?;
        let welcome = match answer {
            Some(Greeting::Welcome(welcome)) => welcome,
            Some(Greeting::Refused(why)) => return Err(why.into()),
            Some(Greeting::Hello(_)) => {
                return Err(refuse("greeting", ErrorKind::Malformed, "hello answered by hello"));
            }
            None => return Err(Error::new(ErrorKind::PeerLost, "peer ended inside the greeting")),
        };
        greeting::judge_welcome(&welcome, &hello, certificate.as_ref())?;
        let remote = connection.remote_address();
        let notice = self.connect_notice(remote, &welcome).await;
        Ok(Session {
            peer: WorkerKey { identity: welcome.identity, incarnation: welcome.incarnation },
            build: welcome.build,
            purpose,
            version: welcome.version,
            remote,
            dialled: true,
            connection: connection.clone(),
            send,
            reader,
            notice,
        })
    }

    /// Without a notice a session still works; a death is then found by heartbeats.
    async fn connect_notice(&self, remote: SocketAddr, welcome: &Welcome) -> Notice {
        if !self.death_notice || welcome.notice_port == 0 {
            return Notice::Gone;
        }
        let to = SocketAddr::new(remote.ip(), welcome.notice_port);
        let connecting = notice::connect(to, &welcome.notice_token);
        let why = match timeout(Duration::from_millis(NOTICE_CONNECT_MS), connecting).await {
            Ok(Ok(notice)) => return notice,
            Ok(Err(e)) => e.to_string(),
            Err(_) => format!("no answer in {NOTICE_CONNECT_MS} ms"),
        };
        metrics::counter!("kvlane_notice_failures_total").increment(1);
        tracing::warn!(peer = %welcome.identity, %to, why, "no death notice: a dead peer is found by heartbeats only; let TCP through");
        Notice::Gone
    }

    /// The identity that the peer's certificate proves; `None` where certificates prove nothing.
    fn certificate_of(&self, connection: &Connection) -> Result<Option<Identity>> {
        if !self.mutual {
            return Ok(None);
        }
        let chain = connection
            .peer_identity()
            .and_then(|any| any.downcast::<Vec<CertificateDer<'static>>>().ok());
        let leaf = chain.as_ref().and_then(|c| c.first()).ok_or_else(|| {
            refuse("certificate", ErrorKind::Unauthorized, "peer showed no certificate")
        })?;
        x509::identity(leaf).map(Some).inspect_err(|_| count_refusal("certificate"))
    }

    async fn greet_dialler(&self, incoming: Incoming, queue: &mpsc::Sender<Session>) -> Result<()> {
        let connecting = incoming.accept().map_err(|e| lost(&e))?;
        let connection = connecting.await.map_err(|e| {
            count_refusal("tls");
            lost_with_hint(&e)
        })?;
        let open = CloseOnDrop(Some(connection.clone()));
        let certificate = self.certificate_of(&connection).inspect_err(|e| {
            connection.close(code::REFUSED.into(), &reason_bytes(e));
        })?;
        let (mut send, recv) = connection.accept_bi().await.map_err(|e| lost(&e))?;
        let mut reader = FrameReader::new(recv).with_deadline(self.handshake);
        let hello = match reader.next::<Greeting>(HELLO_FRAME_BYTES_MAX).await {
            Ok(Some(Greeting::Hello(hello))) => Ok(hello),
            Ok(Some(_)) => {
                Err(refuse("greeting", ErrorKind::Malformed, "first frame is not a hello"))
            }
            Ok(None) => Err(refuse("truncated", ErrorKind::Malformed, "no hello came")),
            Err(e) => Err(e),
        }
        .inspect_err(|e| connection.close(code::PROTOCOL.into(), &reason_bytes(e)))?;

        let judged = greeting::judge_hello(&hello, &self.me, certificate.as_ref());
        let version = match judged {
            Ok(version) => version,
            Err(e) => {
                let refused = write_frame(&mut send, &Greeting::Refused(e.to_refusal())).await;
                if refused.is_ok() && send.finish().is_ok() {
                    let _ = timeout(Duration::from_millis(REFUSAL_MS), send.stopped()).await;
                }
                connection.close(code::REFUSED.into(), &reason_bytes(&e));
                return Err(e);
            }
        };
        // The place in the queue comes first: who is welcomed is also accepted.
        let place = queue
            .reserve()
            .await
            .map_err(|_| Error::new(ErrorKind::Draining, "endpoint is closed"))?;
        let (notice_port, notice_token, notice) = match &self.desk {
            Some(desk) => match desk.expect()? {
                Some((token, notice)) => (desk.port(), token, notice),
                None => (0, [0; 16], Notice::Gone),
            },
            None => (0, [0; 16], Notice::Gone),
        };
        let welcome = Greeting::Welcome(Welcome {
            version,
            build: self.build.clone(),
            identity: self.me.identity.clone(),
            incarnation: self.me.incarnation,
            notice_port,
            notice_token,
        });
        write_frame(&mut send, &welcome).await?;
        place.send(Session {
            peer: WorkerKey { identity: hello.identity, incarnation: hello.incarnation },
            build: hello.build,
            purpose: hello.purpose,
            version,
            remote: connection.remote_address(),
            dialled: false,
            connection,
            send,
            reader: reader.with_deadline(Duration::from_millis(crate::wire::frame::FRAME_MS)),
            notice,
        });
        open.disarm();
        Ok(())
    }
}

/// Tells a dialler whose greeting was given up that it was.
struct CloseOnDrop(Option<Connection>);

impl CloseOnDrop {
    fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        if let Some(connection) = &self.0 {
            connection.close(code::PROTOCOL.into(), b"greeting not completed");
        }
    }
}

/// Greets whoever comes until the endpoint is closed.
async fn greet_all(shared: Arc<Shared>, queue: mpsc::Sender<Session>) {
    let mut greetings = JoinSet::new();
    let mut who: HashMap<Id, IpAddr> = HashMap::new();
    let mut held: HashMap<IpAddr, usize> = HashMap::new();
    loop {
        tokio::select! {
            incoming = shared.quic.accept() => {
                let Some(incoming) = incoming else { return };
                let ip = incoming.remote_address().ip();
                let mine = held.get(&ip).copied().unwrap_or(0);
                if greetings.len() >= GREETINGS_MAX || mine >= GREETINGS_PER_ADDRESS_MAX {
                    count_refusal("greeting_flood");
                    incoming.refuse();
                    continue;
                }
                let crowded =
                    greetings.len() >= GREETINGS_MAX / 2 || mine >= GREETINGS_PER_ADDRESS_MAX / 2;
                if crowded && incoming.may_retry() && !incoming.remote_address_validated() {
                    // Cannot fail: it may retry.
                    let _ = incoming.retry();
                    continue;
                }
                let (shared, queue) = (Arc::clone(&shared), queue.clone());
                let task = greetings.spawn(async move {
                    let remote = incoming.remote_address();
                    let greeted = timeout(shared.handshake, shared.greet_dialler(incoming, &queue));
                    match greeted.await {
                        Ok(Ok(())) => {}
                        Ok(Err(e)) if e.kind() == ErrorKind::PeerLost => {
                            tracing::debug!(%remote, "dialler has gone: {e}");
                        }
                        Ok(Err(e)) => tracing::warn!(%remote, "greeting refused: {e}"),
                        Err(_) => {
                            count_refusal("greeting_timeout");
                            tracing::warn!(%remote, "greeting not completed in time");
                        }
                    }
                });
                who.insert(task.id(), ip);
                *held.entry(ip).or_default() += 1;
            }
            Some(done) = greetings.join_next_with_id(), if !greetings.is_empty() => {
                let id = match done {
                    Ok((id, ())) => id,
                    Err(e) => e.id(),
                };
                if let Some(ip) = who.remove(&id)
                    && let Some(n) = held.get_mut(&ip)
                {
                    *n -= 1;
                    if *n == 0 {
                        held.remove(&ip);
                    }
                }
            }
        }
    }
}
