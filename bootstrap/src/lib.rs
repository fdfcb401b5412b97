//! The bootstrap service: registry, leases, compatibility.
//!
//! A thin shell round [`kvlane_proto::registry`]. Owns one QUIC endpoint, one actor that holds the
//! machine, and one task a session. In: questions of workers and routers. Out: answers. Everything
//! runs on one thread of its own, so that [`Bootstrap::start`] can be called from any runtime, or
//! from none.
//!
//! Invariants: a session asks one question at a time of the actor and is read no further until it
//! is answered, so a peer that floods fills its own session only; one identity has a few sessions,
//! and one more ends its oldest; a peer that does not read its answers loses its session; who asks is who the session proved; the registry's death (a defect)
//! starts an empty one, under a new log, and every reader and worker notices.

mod registry;
mod server;

use std::net::SocketAddr;
use std::sync::mpsc as std_mpsc;
use std::thread;
use std::time::Duration;

use kvlane_proto::registry::RegistryConfig;
use kvlane_proto::{Error, ErrorKind, Result, limits};
use kvlane_transport::quic::Security;
use kvlane_transport::seats::SEATS_PER_IDENTITY;
use tokio::sync::oneshot;

/// What a bootstrap service needs.
#[derive(Clone, Debug)]
pub struct BootstrapConfig {
    /// Where to listen; port 0 for any.
    pub listen: SocketAddr,
    /// How peers are recognised.
    pub security: Security,
    /// The cluster that it serves.
    pub cluster: String,
    /// Its instance name, where there is no certificate to say so.
    pub instance: String,
    /// A worker's lease.
    pub worker_lease_ms: u64,
    /// How long a dead worker is remembered.
    pub worker_keep_ms: u64,
    /// A router's lease of an issuer slot.
    pub issuer_lease_ms: u64,
    /// How long a slot rests after its lease.
    pub issuer_quarantine_ms: u64,
    /// Most sessions at a time.
    pub sessions_max: usize,
    /// Most sessions of one identity at a time; one more ends its oldest.
    pub sessions_per_identity: usize,
}

impl BootstrapConfig {
    /// The defaults of [`limits`].
    pub fn new(listen: SocketAddr, security: Security, cluster: impl Into<String>) -> Self {
        Self {
            listen,
            security,
            cluster: cluster.into(),
            instance: "bootstrap".into(),
            worker_lease_ms: limits::WORKER_LEASE_MS,
            worker_keep_ms: limits::WORKER_KEEP_MS,
            issuer_lease_ms: limits::ISSUER_LEASE_MS,
            issuer_quarantine_ms: limits::ISSUER_QUARANTINE_MS,
            sessions_max: limits::WORKERS_MAX + 1024,
            sessions_per_identity: SEATS_PER_IDENTITY,
        }
    }

    /// The registry's part, for one start of it.
    fn registry(&self, random: u64, started_us: u64) -> RegistryConfig {
        RegistryConfig {
            worker_lease_ms: self.worker_lease_ms,
            worker_keep_ms: self.worker_keep_ms,
            issuer_lease_ms: self.issuer_lease_ms,
            issuer_quarantine_ms: self.issuer_quarantine_ms,
            ..RegistryConfig::new(&self.cluster, random, started_us)
        }
    }
}

/// The bootstrap service.
#[derive(Debug)]
pub enum Bootstrap {}

impl Bootstrap {
    /// Starts a service and waits until it listens.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] (certificates), [`ErrorKind::Malformed`] (names), [`ErrorKind::Io`]
    /// (address in use).
    pub fn start(cfg: BootstrapConfig) -> Result<BootstrapHandle> {
        let (ready_tx, ready) = std_mpsc::channel();
        let (stop, stopped) = oneshot::channel();
        let thread = thread::Builder::new()
            .name("kvlane-bootstrap".into())
            .spawn(move || {
                actix::System::new().block_on(server::run(cfg, ready_tx, stopped));
            })
            .map_err(|e| Error::new(ErrorKind::Io, "cannot start a thread").caused_by(e))?;
        match ready.recv_timeout(Duration::from_millis(2 * limits::HANDSHAKE_MS)) {
            Ok(Ok(local_addr)) => {
                Ok(BootstrapHandle { local_addr, stop: Some(stop), thread: Some(thread) })
            }
            Ok(Err(e)) => Err(e),
            Err(_) => Err(Error::new(ErrorKind::Internal, "the service ended while it started")),
        }
    }
}

/// A running service; dropping it stops the service.
#[derive(Debug)]
pub struct BootstrapHandle {
    local_addr: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl BootstrapHandle {
    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }
    /// Whether it still runs; it ends by itself only through a defect.
    pub fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|t| !t.is_finished())
    }
    /// Stops it and waits (briefly) until its address is free again.
    pub fn shutdown(mut self) {
        self.end();
    }
    fn end(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the bootstrap service's thread panicked");
        }
    }
}

impl Drop for BootstrapHandle {
    fn drop(&mut self) {
        self.end();
    }
}
