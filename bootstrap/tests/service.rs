//! The service for real, on loopback: what its clients see.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::net::SocketAddr;
use std::time::Duration;

use kvlane_bootstrap::{Bootstrap, BootstrapConfig, BootstrapHandle};
use kvlane_proto::layout::{Coordinates, Dtype, KvKind, Order};
use kvlane_proto::lease::LeaseConfig;
use kvlane_proto::msg::Purpose;
use kvlane_proto::msg::call::{Call, CallFrame};
use kvlane_proto::msg::service::{
    Ask, Cursor, Load, Registration, ServiceRequest, ServiceResponse, WorkerAddress, WorkerView,
};
use kvlane_proto::{ErrorKind, Identity, Incarnation, Layout, Role, WorkerKey};
use kvlane_transport::quic::{Endpoint, EndpointConfig, Security, ca};
use kvlane_transport::service_client::{RegistrationState, ServiceClient, keep_registered};
use tokio::sync::watch;
use tokio::time::timeout;

const CAP: Duration = Duration::from_secs(30);

fn start(listen: SocketAddr) -> BootstrapHandle {
    let cfg = BootstrapConfig {
        worker_lease_ms: 1_000,
        ..BootstrapConfig::new(listen, Security::Insecure, "c")
    };
    Bootstrap::start(cfg).unwrap()
}
fn any() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}
fn key(role: Role, instance: &str, start: u8) -> WorkerKey {
    let identity = Identity::new("c", role, instance, 0).unwrap();
    WorkerKey { identity, incarnation: Incarnation([start; 16]) }
}
fn endpoint(key: &WorkerKey) -> Endpoint {
    Endpoint::bind(EndpointConfig::new(any(), Security::Insecure, key.clone())).unwrap()
}
fn client(key: &WorkerKey, service: SocketAddr) -> ServiceClient {
    ServiceClient::new(endpoint(key), service.to_string())
}
fn registration(key: &WorkerKey) -> Registration {
    Registration {
        worker: WorkerAddress { key: key.clone(), address: "127.0.0.1:9".into() },
        pools: vec![Layout {
            model: "tiny".into(),
            layers: 4,
            first_layer: 0,
            kv_heads: 2,
            kv_heads_total: 2,
            head_dim: 8,
            dtype: Dtype::Bf16,
            page_tokens: 4,
            window_tokens: 0,
            order: Order::Nhd,
            kind: KvKind::Split,
            at: Coordinates::SINGLE,
        }],
        pool_blocks: 8,
        engines: vec!["tcp".into()],
        serving: String::new(),
        build: "t".into(),
    }
}
async fn all(reader: &ServiceClient) -> Vec<WorkerView> {
    let page = reader.list(Cursor::default()).await.unwrap();
    assert!(page.reset && !page.more);
    page.workers
}
/// Reads until the list is as wanted; a question that meets a restart fails, and is asked again.
async fn until(reader: &ServiceClient, what: &str, fits: impl Fn(&[WorkerView]) -> bool) {
    let wait = async {
        while !reader.list(Cursor::default()).await.is_ok_and(|page| fits(&page.workers)) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(CAP, wait).await.unwrap_or_else(|_| panic!("never: {what}"));
}

#[tokio::test]
async fn a_worker_registers_is_seen_and_expires_when_it_falls_silent() {
    let service = start(any());
    let (p, d) = (key(Role::Prefill, "p", 1), key(Role::Decode, "d", 1));
    let (prefill, decode) = (client(&p, service.local_addr()), client(&d, service.local_addr()));
    let reader = client(&key(Role::Router, "r", 1), service.local_addr());

    prefill.register(registration(&p)).await.unwrap();
    let mut other = registration(&d);
    other.pools[0].dtype = Dtype::Fp8E5m2;
    let answer = decode.register(other).await.unwrap();
    assert!(answer.fits.is_empty());
    assert_eq!(answer.differs[0].0, p.identity);
    assert_eq!(answer.differs[0].1[0].field, "dtype");
    decode.deregister().await.unwrap();

    let load = Load { rooms: 2, ..Load::default() };
    prefill.renew(load).await.unwrap();
    let alive = |w: &[WorkerView], key: &WorkerKey| {
        w.iter().any(|w| w.registration.worker.key == *key && w.alive)
    };
    let seen = all(&reader).await;
    assert!(alive(&seen, &p) && !alive(&seen, &d));
    assert_eq!(seen.iter().find(|w| w.alive).unwrap().load, load);
    until(&reader, "the lease ends", |w| !alive(w, &p)).await;
    let e = prefill.renew(load).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotFound);
    service.shutdown();
}

#[tokio::test]
async fn refusals_arrive_as_they_were_made() {
    let service = start(any());
    let (p, r) = (key(Role::Prefill, "p", 1), key(Role::Router, "r", 1));
    let (prefill, router) = (client(&p, service.local_addr()), client(&r, service.local_addr()));
    for e in [
        prefill.issuer_slot(None, false).await.unwrap_err(),
        router.register(registration(&p)).await.unwrap_err(),
        prefill.register(registration(&key(Role::Prefill, "p", 2))).await.unwrap_err(),
    ] {
        assert_eq!(e.kind(), ErrorKind::Unauthorized, "{e}");
    }
    assert!(all(&router).await.is_empty());
    // The wrong cluster is refused before any question.
    let mut foreign = key(Role::Router, "r", 1);
    foreign.identity.cluster = "other".into();
    let e = client(&foreign, service.local_addr()).issuer_slot(None, false).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unauthorized, "{e}");
    // Two slots for two routers.
    let a = router.issuer_slot(None, false).await.unwrap();
    let other = client(&key(Role::Router, "r2", 1), service.local_addr());
    assert_ne!(a.slot, other.issuer_slot(None, false).await.unwrap().slot);
    assert_eq!(router.issuer_slot(Some(a.slot), false).await.unwrap(), a);
}

#[tokio::test]
async fn a_peer_that_breaks_the_protocol_loses_its_own_session_and_is_suspected() {
    let service = start(any());
    let (p, d) = (key(Role::Prefill, "p", 1), key(Role::Decode, "d", 1));
    let (prefill, decode) = (client(&p, service.local_addr()), client(&d, service.local_addr()));
    prefill.register(registration(&p)).await.unwrap();
    decode.register(registration(&d)).await.unwrap();

    let session =
        endpoint(&p).dial(&service.local_addr().to_string(), None, Purpose::Service).await.unwrap();
    let (tx, mut rx, _watch) = session.into_parts::<CallFrame, ServiceResponse>();
    tx.try_send(&CallFrame { id: 1, call: Call::Ping }).unwrap();
    let end = timeout(CAP, rx.recv()).await.unwrap();
    assert!(!matches!(end, Ok(Some(_))), "{end:?}");

    until(&decode, "p is suspected", |w| {
        w.iter().any(|w| w.registration.worker.key == p && w.suspected && w.alive)
    })
    .await;
    // The lease decides: a renewal clears it. The other worker never was.
    prefill.renew(Load::default()).await.unwrap();
    assert!(all(&decode).await.iter().all(|w| !w.suspected));
    assert_eq!(decode.sessions().borrow().count, 1);
}

#[tokio::test]
async fn a_flood_that_reads_no_answers_does_not_keep_others_from_theirs() {
    let service = start(any());
    let d = key(Role::Decode, "d", 1);
    let decode = client(&d, service.local_addr());
    decode.register(registration(&d)).await.unwrap();

    let flooder = endpoint(&key(Role::Router, "flood", 1));
    let address = service.local_addr().to_string();
    let session = flooder.dial(&address, None, Purpose::Service).await.unwrap();
    let (tx, _rx, _watch) = session.into_parts::<ServiceRequest, ServiceResponse>();
    let mut sent = 0;
    for id in 0..20_000 {
        let ask = Ask::List { after: Cursor::default() };
        sent += u32::from(tx.try_send(&ServiceRequest { id, ask }).is_ok());
        if id % 500 == 0 {
            decode.renew(Load::default()).await.unwrap();
        }
    }
    assert!(sent > 0);
    decode.renew(Load::default()).await.unwrap();
    assert_eq!(decode.sessions().borrow().count, 1);
}

#[tokio::test]
async fn one_identity_cannot_take_every_session() {
    let cfg = BootstrapConfig {
        sessions_max: 4,
        sessions_per_identity: 2,
        ..BootstrapConfig::new(any(), Security::Insecure, "c")
    };
    let service = Bootstrap::start(cfg).unwrap();
    let address = service.local_addr().to_string();
    let greedy = endpoint(&key(Role::Router, "greedy", 1));
    let mut sessions = Vec::new();
    for id in 0..10 {
        let session = greedy.dial(&address, None, Purpose::Service).await.unwrap();
        let (tx, mut rx, watch) = session.into_parts::<ServiceRequest, ServiceResponse>();
        // The newest is served, so the service has seen it.
        tx.try_send(&ServiceRequest { id, ask: Ask::List { after: Cursor::default() } }).unwrap();
        assert_eq!(timeout(CAP, rx.recv()).await.unwrap().unwrap().unwrap().id, id);
        sessions.push((tx, rx, watch));
        if id >= 2 {
            let (_, rx, _) = &mut sessions[id as usize - 2];
            let end = timeout(CAP, rx.recv()).await.unwrap();
            assert!(!matches!(end, Ok(Some(_))), "the oldest goes: {end:?}");
        }
    }
    let d = key(Role::Decode, "d", 1);
    client(&d, service.local_addr()).register(registration(&d)).await.unwrap();
}

#[tokio::test]
async fn a_kept_registration_survives_a_restart_and_gives_way_to_a_newer_start() {
    let service = start(any());
    let address = service.local_addr();
    let d = key(Role::Decode, "d", 1);
    let (loads, load) = watch::channel(Load::default());
    let (state, mut states) = watch::channel(RegistrationState::Pending);
    let kept = tokio::spawn(keep_registered(
        client(&d, address),
        registration(&d),
        LeaseConfig { answer_ms: 500, retry_ms: 20, retry_max_ms: 100 },
        load,
        state.into(),
    ));
    let registered = |s: &RegistrationState| matches!(s, RegistrationState::Registered(_));
    timeout(CAP, states.wait_for(registered)).await.unwrap().unwrap();
    let reader = client(&key(Role::Router, "r", 1), address);
    let first_epoch = all(&reader).await[0].epoch;

    // What it says of itself arrives at once.
    loads.send_replace(Load { draining: true, ..Load::default() });
    until(&reader, "draining is said", |w| w.iter().any(|w| w.load.draining)).await;

    service.shutdown();
    let service = start(address);
    until(&reader, "it registers again", |w| w.iter().any(|w| w.alive && w.load.draining)).await;
    assert!(all(&reader).await[0].epoch > first_epoch, "epochs grow over a restart");

    let newer = key(Role::Decode, "d", 2);
    let second = client(&newer, address);
    second.register(registration(&newer)).await.unwrap();
    let e = timeout(CAP, kept).await.unwrap().unwrap().unwrap_err();
    assert_eq!(e.kind(), ErrorKind::StaleIncarnation);
    assert_eq!(*states.borrow(), RegistrationState::Superseded);
    assert_eq!(all(&reader).await[0].registration.worker.key, newer);
    drop(loads);
    service.shutdown();
}

#[tokio::test]
async fn an_address_in_use_is_an_error_that_names_it() {
    let service = start(any());
    let cfg = BootstrapConfig::new(service.local_addr(), Security::Insecure, "c");
    let e = Bootstrap::start(cfg).unwrap_err();
    assert!(e.to_string().contains(&service.local_addr().to_string()), "{e}");
    assert!(service.is_running());
}

/// A directory that is removed with it.
struct Dir(std::path::PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("kvlane-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }
    /// A certificate for somebody.
    fn issue(&self, identity: &Identity) -> Security {
        let dir = self.0.join(format!("{}-{}", identity.role, identity.instance));
        ca::issue(&self.0.join("ca"), &dir, identity, 1).unwrap();
        Security::Mutual { dir }
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[tokio::test]
async fn with_certificates_a_worker_is_who_its_certificate_says() {
    let dir = Dir::new("service-tls");
    ca::create_ca(&dir.0.join("ca"), "c").unwrap();
    let (p, d) = (key(Role::Prefill, "p", 1), key(Role::Decode, "d", 1));
    // A worker's certificate does not make a service.
    let worker = dir.issue(&p.identity);
    let cfg = BootstrapConfig::new(any(), worker.clone(), "c");
    let e = Bootstrap::start(cfg).unwrap_err();
    assert!(e.kind() == ErrorKind::Config && e.to_string().contains("c/prefill/p/0"), "{e}");

    let own = Identity::new("c", Role::Service, "any-name", 0).unwrap();
    let service = Bootstrap::start(BootstrapConfig::new(any(), dir.issue(&own), "c")).unwrap();
    let dial = |key: &WorkerKey, security| {
        let endpoint = Endpoint::bind(EndpointConfig::new(any(), security, key.clone())).unwrap();
        ServiceClient::new(endpoint, service.local_addr().to_string())
    };
    let prefill = dial(&p, worker);
    prefill.register(registration(&p)).await.unwrap();
    let e = prefill.register(registration(&d)).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unauthorized, "{e}");
    let e = dial(&d, Security::Insecure).register(registration(&d)).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unauthorized, "{e}");
    assert_eq!(all(&prefill).await.len(), 1);
}

const CHILD: &str = "KVLANE_TEST_CHILD_REGISTERS_AT";

#[tokio::test]
#[ignore = "not a test by itself: the process that the next one kills"]
async fn child_that_registers() {
    let Ok(service) = std::env::var(CHILD) else { return };
    let d = key(Role::Decode, "child", 1);
    let decode = client(&d, service.parse().unwrap());
    decode.register(registration(&d)).await.unwrap();
    std::future::pending::<()>().await;
}

#[tokio::test]
async fn a_killed_process_is_suspected_long_before_its_lease_ends() {
    let cfg = BootstrapConfig {
        worker_lease_ms: 3_600_000,
        ..BootstrapConfig::new(any(), Security::Insecure, "c")
    };
    let service = Bootstrap::start(cfg).unwrap();
    let reader = client(&key(Role::Router, "r", 1), service.local_addr());
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_that_registers", "--ignored"])
        .env(CHILD, service.local_addr().to_string())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    until(&reader, "the child registers", |w| w.iter().any(|w| w.alive && !w.suspected)).await;
    child.kill().unwrap();
    child.wait().unwrap();
    until(&reader, "the child is suspected", |w| w.iter().any(|w| w.alive && w.suspected)).await;
}
