//! Real endpoints on loopback, a client that does not keep the rules, and a count of refusals.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::panic)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use kvlane_proto::msg::peer::{PeerFrame, PeerMsg};
use kvlane_proto::msg::{Greeting, Hello, Purpose};
use kvlane_proto::{Identity, Role};
use kvlane_transport::quic::{Endpoint, EndpointConfig, Security, Session, ca, tls};
use kvlane_transport::wire::{FrameReader, message};
use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, SharedString, Unit};
use quinn::crypto::rustls::QuicClientConfig;

use super::common::{hello, identity, key};

/// Far beyond what anything here takes: a test that hangs fails.
pub const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Counts(Mutex<HashMap<String, Arc<AtomicU64>>>);

impl metrics::Recorder for &'static Counts {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let name = key.labels().fold(key.name().to_string(), |n, l| format!("{n}/{}", l.value()));
        Counter::from_arc(Arc::clone(self.0.lock().unwrap().entry(name).or_default()))
    }
    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }
    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

fn counts() -> &'static Counts {
    static COUNTS: OnceLock<&'static Counts> = OnceLock::new();
    COUNTS.get_or_init(|| {
        let counts: &'static Counts = Box::leak(Box::default());
        metrics::set_global_recorder(counts).unwrap();
        counts
    })
}

/// Counters are the process's, so tests that read them take turns.
pub async fn turn() -> tokio::sync::MutexGuard<'static, ()> {
    static TURN: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
    counts();
    TURN.lock().await
}

pub fn count(name: &str) -> u64 {
    counts().0.lock().unwrap().get(name).map_or(0, |c| c.load(Ordering::SeqCst))
}

pub fn refusals(reason: &str) -> u64 {
    count(&format!("kvlane_wire_refusals_total/{reason}"))
}

/// Waits until a count has risen.
pub async fn refused(reason: &str, before: u64) {
    let risen = async {
        while refusals(reason) <= before {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, risen).await.is_ok(), "no refusal counted as {reason}");
}

/// A directory that goes when the test does.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("kvlane-quic-{}-{n}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A cluster's CA, and directories of certificates that it issued.
pub struct Cluster {
    pub scratch: Scratch,
}

impl Cluster {
    pub fn new() -> Self {
        Self::named("c1")
    }
    pub fn named(cluster: &str) -> Self {
        let scratch = Scratch::new();
        ca::create_ca(&scratch.path("ca"), cluster).unwrap();
        Self { scratch }
    }
    pub fn ca(&self) -> PathBuf {
        self.scratch.path("ca")
    }
    pub fn dir(&self, who: &Identity) -> PathBuf {
        let dir = self.scratch.path(&who.to_string().replace('/', "-"));
        if !dir.exists() {
            ca::issue(&self.ca(), &dir, who, 30).unwrap();
        }
        dir
    }
    pub fn config(&self, role: Role) -> EndpointConfig {
        let dir = self.dir(&identity(role));
        EndpointConfig::new(([127, 0, 0, 1], 0).into(), Security::Mutual { dir }, key(role))
    }
    pub fn endpoint(&self, role: Role) -> Endpoint {
        Endpoint::bind(self.config(role)).unwrap()
    }
    pub fn stranger(&self, role: Role) -> Stranger {
        Stranger::new(&self.dir(&identity(role)))
    }
}

/// Both ends of a fresh session.
pub async fn pair(from: &Endpoint, to: &Endpoint, purpose: Purpose) -> (Session, Session) {
    let both = async {
        let address = to.local_addr().to_string();
        let (dialled, accepted) = tokio::join!(from.dial(&address, None, purpose), to.accept());
        (dialled.unwrap(), accepted.unwrap())
    };
    tokio::time::timeout(PATIENCE, both).await.unwrap()
}

pub fn beat(seq: u64) -> PeerFrame {
    PeerFrame { seq, echo: 0, msg: PeerMsg::Heartbeat }
}

/// A good peer is served: greeted, and its frame arrives.
pub async fn serves(from: &Endpoint, to: &Endpoint) {
    let (a, b) = pair(from, to, Purpose::Peer).await;
    let (tx, _rx, _watch) = a.into_parts::<PeerFrame, PeerFrame>();
    let (_tx, mut rx, _watch_b) = b.into_parts::<PeerFrame, PeerFrame>();
    tx.try_send(&beat(5)).unwrap();
    let got = tokio::time::timeout(PATIENCE, rx.recv()).await.unwrap().unwrap();
    assert_eq!(got, Some(beat(5)));
}

/// A client with a certificate and no manners.
pub struct Stranger {
    quic: quinn::Endpoint,
}

impl Stranger {
    pub fn new(dir: &Path) -> Self {
        let (client, _) = tls::configs(&Security::Mutual { dir: dir.into() }).unwrap();
        let client = QuicClientConfig::try_from(client).unwrap();
        let mut quic = quinn::Endpoint::client(([127, 0, 0, 1], 0).into()).unwrap();
        quic.set_default_client_config(quinn::ClientConfig::new(Arc::new(client)));
        Self { quic }
    }
    pub async fn connect(
        &self,
        to: &Endpoint,
    ) -> Result<quinn::Connection, quinn::ConnectionError> {
        let connecting = self.quic.connect(to.local_addr(), tls::DNS_NAME).unwrap();
        tokio::time::timeout(PATIENCE, connecting).await.unwrap()
    }
    /// Sends bytes as its greeting and gives back the connection and what is answered.
    pub async fn says(
        &self,
        to: &Endpoint,
        bytes: &[u8],
        finish: bool,
    ) -> (quinn::Connection, quinn::SendStream, FrameReader<quinn::RecvStream>) {
        let connection = self.connect(to).await.unwrap();
        let (mut send, recv) = connection.open_bi().await.unwrap();
        send.write_all(bytes).await.unwrap();
        if finish {
            send.finish().unwrap();
        }
        (connection, send, FrameReader::new(recv).with_deadline(PATIENCE))
    }
}

pub fn hello_frame(hello: Hello) -> Vec<u8> {
    message::seal(&Greeting::Hello(hello)).unwrap()
}

pub fn good_hello() -> Hello {
    hello(Role::Decode, Purpose::Peer)
}
