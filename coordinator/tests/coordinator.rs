//! The coordinator against the real service and workers that answer calls from a script.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvlane_bootstrap::{Bootstrap, BootstrapConfig, BootstrapHandle};
use kvlane_coordinator::{Coordinator, CoordinatorConfig, HandoffOutcome, PairRequest};
use kvlane_proto::layout::{Coordinates, Dtype, KvKind, Order};
use kvlane_proto::lease::LeaseConfig;
use kvlane_proto::msg::call::{Call, CallFrame, Reply, ReplyFrame, Reserve};
use kvlane_proto::msg::peer::Outcome;
use kvlane_proto::msg::service::{Load, Registration, WorkerAddress};
use kvlane_proto::{
    Blame, Error, ErrorKind, IdempotencyKey, Identity, Incarnation, Layout, Role, RoomId, WorkerKey,
};
use kvlane_transport::quic::{Endpoint, EndpointConfig, Security};
use kvlane_transport::service_client::{RegistrationState, ServiceClient, keep_registered};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

const CAP: Duration = Duration::from_secs(30);

fn any() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}
fn start_service(listen: SocketAddr) -> BootstrapHandle {
    Bootstrap::start(BootstrapConfig::new(listen, Security::Insecure, "c")).unwrap()
}
fn layout() -> Layout {
    Layout {
        model: "tiny".into(),
        layers: 4,
        first_layer: 0,
        kv_heads: 2,
        kv_heads_total: 2,
        head_dim: 8,
        dtype: Dtype::Bf16,
        page_tokens: 4,
        order: Order::Nhd,
        kind: KvKind::Split,
        at: Coordinates::SINGLE,
    }
}

/// What a fake worker was asked, and what it answers.
#[derive(Default)]
struct Script {
    reserves: Vec<Reserve>,
    aborts: Vec<(RoomId, String)>,
    awaits: usize,
    /// Replies to reservations that get lost.
    lose: usize,
    /// Waits shorter than this are refused as busy.
    busy_below_ms: u64,
    outcome: Option<Outcome>,
}

/// A worker that is registered and answers calls.
struct Worker {
    key: WorkerKey,
    address: String,
    script: Arc<Mutex<Script>>,
    changed: watch::Receiver<u64>,
    loads: watch::Sender<Load>,
    state: watch::Receiver<RegistrationState>,
    endpoint: Endpoint,
    tasks: Vec<JoinHandle<()>>,
}

impl Worker {
    async fn start(service: SocketAddr, role: Role, name: &str, start: u8, layout: Layout) -> Self {
        Self::start_at(service, any(), role, name, start, layout).await
    }

    async fn start_at(
        service: SocketAddr,
        listen: SocketAddr,
        role: Role,
        name: &str,
        start: u8,
        layout: Layout,
    ) -> Self {
        let identity = Identity::new("c", role, name, 0).unwrap();
        let key = WorkerKey { identity, incarnation: Incarnation([start; 16]) };
        let cfg = EndpointConfig::new(listen, Security::Insecure, key.clone());
        // The start before this one may still hold the address for a moment.
        let bind = async {
            loop {
                match Endpoint::bind(cfg.clone()) {
                    Ok(endpoint) => return endpoint,
                    Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
                }
            }
        };
        let endpoint = timeout(CAP, bind).await.unwrap();
        let address = endpoint.local_addr().to_string();
        let registration = Registration {
            worker: WorkerAddress { key: key.clone(), address: address.clone() },
            layout,
            pool_blocks: 8,
            engines: vec!["tcp".into()],
            serving: format!("http://{name}"),
            build: "t".into(),
        };
        let (loads, load) = watch::channel(Load { free_lanes: 4, ..Load::default() });
        let (tell, state) = watch::channel(RegistrationState::Pending);
        let client = ServiceClient::new(endpoint.clone(), service.to_string());
        let fast = LeaseConfig { answer_ms: 500, retry_ms: 20, retry_max_ms: 100 };
        let kept = tokio::spawn(async move {
            let _ = keep_registered(client, registration, fast, load, tell).await;
        });
        let script = Arc::new(Mutex::new(Script::default()));
        let (bump, changed) = watch::channel(0);
        let served = tokio::spawn(serve(endpoint.clone(), Arc::clone(&script), bump));
        let mut this = Self {
            key,
            address,
            script,
            changed,
            loads,
            state,
            endpoint,
            tasks: vec![kept, served],
        };
        let registered = |s: &RegistrationState| matches!(s, RegistrationState::Registered(_));
        timeout(CAP, this.state.wait_for(registered)).await.unwrap().unwrap();
        this
    }

    fn script<T>(&self, f: impl FnOnce(&mut Script) -> T) -> T {
        f(&mut self.script.lock().unwrap())
    }

    /// Waits until the script has seen something.
    async fn until(&self, what: &str, seen: impl Fn(&Script) -> bool) {
        let mut changed = self.changed.clone();
        let wait = async {
            loop {
                changed.borrow_and_update();
                if self.script(|s| seen(s)) {
                    return;
                }
                changed.changed().await.unwrap();
            }
        };
        timeout(CAP, wait).await.unwrap_or_else(|_| panic!("never: {what}"));
    }

    /// Gone at once, without deregistering.
    async fn crash(self) -> SocketAddr {
        for task in &self.tasks {
            task.abort();
        }
        self.endpoint.close("crash").await;
        for task in self.tasks {
            let _ = task.await;
        }
        self.address.parse().unwrap()
    }
}

async fn serve(endpoint: Endpoint, script: Arc<Mutex<Script>>, bump: watch::Sender<u64>) {
    let bump = Arc::new(bump);
    let mut sessions = tokio::task::JoinSet::new();
    while let Some(session) = endpoint.accept().await {
        let (script, bump) = (Arc::clone(&script), Arc::clone(&bump));
        sessions.spawn(async move {
            let (tx, mut rx, _watch) = session.into_parts::<ReplyFrame, CallFrame>();
            while let Ok(Some(CallFrame { id, call })) = rx.recv().await {
                let reply = answer(&mut script.lock().unwrap(), call);
                bump.send_modify(|n| *n += 1);
                if let Some(reply) = reply {
                    let reply = reply.map_err(|e| e.to_refusal());
                    tx.try_send(&ReplyFrame { id, reply }).unwrap();
                }
            }
        });
    }
}

fn answer(script: &mut Script, call: Call) -> Option<Result<Reply, Error>> {
    Some(Ok(match call {
        Call::Reserve(r) => {
            let (room, wait_ms) = (r.room, r.wait_ms);
            script.reserves.push(r);
            if script.lose > 0 {
                script.lose -= 1;
                return None;
            }
            if wait_ms < script.busy_below_ms {
                return Some(Err(Error::new(ErrorKind::Busy, "no lane is free").with("lanes", 4)));
            }
            Reply::Reserved { room, unclaimed_ms: 5_000 }
        }
        Call::Abort { room, reason } => {
            script.aborts.push((room, reason));
            Reply::Aborting
        }
        Call::Await { .. } => {
            script.awaits += 1;
            script.outcome.clone().map_or(Reply::Running, Reply::Ended)
        }
        Call::Ping => Reply::Pong,
    }))
}

async fn connect(service: SocketAddr) -> Coordinator {
    let me = Identity::new("c", Role::Router, "r", 0).unwrap();
    let mut cfg = CoordinatorConfig::new(service.to_string(), Security::Insecure, me);
    cfg.refresh_ms = 20;
    cfg.call_ms = 300;
    Coordinator::connect(cfg).await.unwrap()
}

/// Waits until the snapshot is as wanted.
async fn until(
    c: &Coordinator,
    what: &str,
    fits: impl Fn(&kvlane_coordinator::ClusterView) -> bool,
) {
    let mut views = c.watch();
    let found = timeout(CAP, views.wait_for(|v| fits(v))).await;
    assert!(found.is_ok(), "never: {what}");
}

#[tokio::test]
async fn a_handoff_names_both_legs_and_its_end_says_which_failed() {
    let service = start_service(any());
    let at = service.local_addr();
    let p = Worker::start(at, Role::Prefill, "p", 1, layout()).await;
    let d = Worker::start(at, Role::Decode, "d", 1, layout()).await;
    let c = connect(at).await;
    let score = c.pair_score(&p.key.identity, &d.key.identity);
    assert!(score.is_usable(), "{score:?}");

    let request = PairRequest { dp: Some((2, 4)), ..PairRequest::new(10) };
    let h = c.reserve(request.clone()).await.unwrap();
    assert_eq!((&h.prefill.worker.key, &*h.prefill.serving), (&p.key, "http://p"));
    assert_eq!((&h.decode.worker.key, &h.decode.worker.address), (&d.key, &d.address));
    assert_eq!(h.room.0 % 4, 2);
    let seen = d.script(|s| s.reserves[0].clone());
    assert_eq!((seen.room, seen.tokens, seen.wait_ms), (h.room, 10, 0));
    assert_eq!(seen.prefill, h.prefill.worker);

    let room = h.detach();
    assert_eq!(c.await_outcome(room, Duration::from_millis(1)).await, HandoffOutcome::Running);
    d.script(|s| s.outcome = Some(Outcome::Done { bytes: 7 }));
    assert_eq!(c.await_outcome(room, CAP).await, HandoffOutcome::Done { bytes: 7 });
    // Over: nothing is left to abort.
    assert!(!c.abort_room(room, "late"));

    let other = c.reserve(request).await.unwrap().detach();
    assert_ne!(other, room);
    let why = Error::new(ErrorKind::Incomplete, "half of it came").to_refusal();
    d.script(|s| s.outcome = Some(Outcome::Failed { why: why.clone(), bytes: 3 }));
    let failed = HandoffOutcome::Failed { leg: Blame::Prefill, retryable: true, refusal: why };
    assert_eq!(c.await_outcome(other, CAP).await, failed);
    let unknown = c.await_outcome(RoomId(5), CAP).await;
    assert!(matches!(unknown, HandoffOutcome::Unknown { .. }));
    assert!(d.script(|s| s.aborts.is_empty()) && p.script(|s| s.aborts.is_empty()));
}

#[tokio::test]
async fn a_lost_reply_is_asked_for_again_with_its_key() {
    let service = start_service(any());
    let at = service.local_addr();
    let _p = Worker::start(at, Role::Prefill, "p", 1, layout()).await;
    let d = Worker::start(at, Role::Decode, "d", 1, layout()).await;
    let c = connect(at).await;
    d.script(|s| s.lose = 2);
    let key = IdempotencyKey([9; 16]);
    let request = PairRequest { key: Some(key), ..PairRequest::new(10) };
    let h = c.reserve(request.clone()).await.unwrap();
    let again = c.reserve(request.clone()).await.unwrap();
    assert_eq!(h.room, again.room);
    d.script(|s| {
        let seen: HashSet<_> = s.reserves.iter().map(|r| (r.key, r.room)).collect();
        assert_eq!((s.reserves.len(), seen.len()), (4, 1));
        assert_eq!(s.reserves[0].room, h.room);
    });
    // Only the last of them ends the room.
    drop(h);
    let room = again.room;
    c.abort(&again, "enough");
    d.until("the abort", |s| s.aborts == [(room, "enough".to_string())]).await;
    // One key, one room: neither for another request, nor for another room.
    let e = c.reserve(request.clone()).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::RoomEnded, "{e}");
    let other = PairRequest { key: Some(IdempotencyKey([8; 16])), ..request };
    let third = c.reserve(other.clone()).await.unwrap();
    let e = c.reserve(PairRequest { tokens: 11, ..other }).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Malformed, "{e}");
    third.detach();

    // Never an answer: named as such, and whatever became of the room is aborted.
    let before = d.script(|s| {
        s.lose = 3;
        s.reserves.len()
    });
    let key = Some(IdempotencyKey([7; 16]));
    let request = PairRequest { key, ..PairRequest::new(10) };
    let e = c.reserve(request.clone()).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::DeadlineExceeded, "{e}");
    assert!(e.to_string().contains("c/decode/d/0"), "{e}");
    let lost = d.script(|s| s.reserves[before].clone());
    d.until("the abort", |s| s.aborts.iter().any(|a| a.0 == lost.room)).await;
    // Nobody got that room, so the key is still good, for a room that is not the lost one.
    assert_ne!(c.reserve(request).await.unwrap().detach(), lost.room);
    assert_ne!(d.script(|s| s.reserves.last().unwrap().key), lost.key);
}

#[tokio::test]
async fn requests_with_one_key_at_the_same_time_get_one_room() {
    let service = start_service(any());
    let at = service.local_addr();
    let _p = Worker::start(at, Role::Prefill, "p", 1, layout()).await;
    let d0 = Worker::start(at, Role::Decode, "d0", 1, layout()).await;
    let d1 = Worker::start(at, Role::Decode, "d1", 1, layout()).await;
    // d0 is the first choice and refuses, so the key's room is made again at d1.
    d0.script(|s| s.busy_below_ms = 1_000);
    d1.loads.send_modify(|l| (l.rooms, l.draining) = (100, true));
    let c = connect(at).await;
    let id = d1.key.identity.clone();
    until(&c, "d1 drains", |v| v.worker(&id).unwrap().view.load.draining).await;
    d1.loads.send_modify(|l| l.draining = false);
    until(&c, "d1 is busier", |v| {
        let load = v.worker(&id).unwrap().view.load;
        load.rooms == 100 && !load.draining
    })
    .await;

    let key = Some(IdempotencyKey([9; 16]));
    let request = PairRequest { key, ..PairRequest::new(10) };
    let asked = (0..8).map(|_| {
        let (c, request) = (c.clone(), request.clone());
        tokio::spawn(async move { c.reserve(request).await })
    });
    let asked: Vec<_> = asked.collect();
    let mut got = Vec::new();
    for a in asked {
        got.push(timeout(CAP, a).await.unwrap().unwrap().unwrap());
    }
    let rooms: HashSet<_> = got.iter().map(|h| h.room).collect();
    assert_eq!(rooms.len(), 1);
    assert_eq!(d0.script(|s| s.reserves.len()), 1, "one of them places it, the others wait");
    d1.script(|s| assert!(s.reserves.iter().all(|r| rooms.contains(&r.room))));
    for h in got {
        h.detach();
    }

    // Who waits for another's room does so until its own deadline.
    d0.script(|s| s.lose = usize::MAX);
    d1.script(|s| s.lose = usize::MAX);
    let key = Some(IdempotencyKey([8; 16]));
    let first = PairRequest { key, ..PairRequest::new(10) };
    let second = PairRequest { deadline: Duration::from_millis(20), ..first.clone() };
    let e = tokio::select! {
        biased;
        _ = c.reserve(first) => panic!("nobody answers"),
        e = c.reserve(second) => e.unwrap_err(),
    };
    assert_eq!(e.kind(), ErrorKind::DeadlineExceeded, "{e}");
    assert!(e.to_string().contains("with the same key"), "{e}");
}

#[tokio::test]
async fn busy_workers_are_passed_over_and_waited_for_only_if_asked() {
    let service = start_service(any());
    let at = service.local_addr();
    let _p = Worker::start(at, Role::Prefill, "p", 1, layout()).await;
    let d0 = Worker::start(at, Role::Decode, "d0", 1, layout()).await;
    let d1 = Worker::start(at, Role::Decode, "d1", 1, layout()).await;
    let c = connect(at).await;
    d0.script(|s| s.busy_below_ms = 100);
    for _ in 0..4 {
        let h = c.reserve(PairRequest::new(10)).await.unwrap();
        assert_eq!(h.decode.worker.key, d1.key);
        h.detach();
    }
    d1.script(|s| s.busy_below_ms = 1_000);
    let e = c.reserve(PairRequest::new(10)).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Busy);
    let text = e.to_string();
    assert!(text.contains("c/decode/d0/0") && text.contains("c/decode/d1/0"), "{text}");
    let only = Some(d0.key.identity.clone());
    let wait = Duration::from_millis(100);
    let h = c.reserve(PairRequest { decode: only, wait, ..PairRequest::new(10) }).await.unwrap();
    assert_eq!(h.decode.worker.key, d0.key);
    // A refusal is no reservation: there is nothing to abort.
    assert!(d0.script(|s| s.aborts.is_empty()) && d1.script(|s| s.aborts.is_empty()));
    h.detach();
    // Who drains is not asked at all.
    let asked = d0.script(|s| s.reserves.len());
    d0.loads.send_replace(Load { draining: true, ..Load::default() });
    let id = d0.key.identity.clone();
    until(&c, "d0 drains", |v| v.worker(&id).unwrap().view.load.draining).await;
    let e = c.reserve(PairRequest { decode: Some(id), wait, ..PairRequest::new(10) }).await;
    assert_eq!(e.unwrap_err().kind(), ErrorKind::Draining);
    assert_eq!(d0.script(|s| s.reserves.len()), asked);
}

#[tokio::test]
async fn a_pair_that_does_not_fit_is_refused_by_field_before_anybody_is_asked() {
    let service = start_service(any());
    let at = service.local_addr();
    let p = Worker::start(at, Role::Prefill, "p", 1, layout()).await;
    let other = Layout { dtype: Dtype::Fp8E4m3, ..layout() };
    let d = Worker::start(at, Role::Decode, "d", 1, other).await;
    let c = connect(at).await;
    let e = c.reserve(PairRequest::new(10)).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Incompatible);
    assert!(e.to_string().contains("dtype: decode fp8_e4m3 / prefill bf16"), "{e}");
    let score = c.pair_score(&p.key.identity, &d.key.identity);
    assert!(!score.is_usable() && score.differences[0].field == "dtype");
    let nobody = Identity::new("c", Role::Decode, "x", 0).unwrap();
    let e = c.reserve(PairRequest { decode: Some(nobody), ..PairRequest::new(10) }).await;
    let e = e.unwrap_err();
    assert!(e.kind() == ErrorKind::NotFound && e.to_string().contains("c/decode/x/0"), "{e}");
    assert!(d.script(|s| s.reserves.is_empty()) && p.script(|s| s.reserves.is_empty()));
}

#[tokio::test]
async fn an_abort_reaches_both_legs_once_and_so_does_a_dropped_handoff() {
    let service = start_service(any());
    let at = service.local_addr();
    let p = Worker::start(at, Role::Prefill, "p", 1, layout()).await;
    let d = Worker::start(at, Role::Decode, "d", 1, layout()).await;
    let c = connect(at).await;
    let h = c.reserve(PairRequest::new(10)).await.unwrap();
    let first = h.room;
    c.abort(&h, "client left");
    c.abort(&h, "again");
    assert!(!c.abort_room(first, "and again"));
    assert!(!c.abort_room(RoomId(77), "unknown"));
    drop(h);
    for w in [&p, &d] {
        w.until("the abort", |s| s.aborts == [(first, "client left".to_string())]).await;
    }
    let second = c.reserve(PairRequest::new(10)).await.unwrap().room; // dropped here
    for w in [&p, &d] {
        w.until("the abort", |s| s.aborts.iter().any(|a| a.0 == second)).await;
    }
    // Detached: runs on, though it can still be aborted by its number.
    let third = c.reserve(PairRequest::new(10)).await.unwrap().detach();
    assert!(c.abort_room(third, "by number"));
    // The last order is carried out even though the coordinator is gone.
    drop(c);
    for w in [&p, &d] {
        w.until("the abort", |s| s.aborts.iter().any(|a| a.0 == third)).await;
        assert_eq!(w.script(|s| s.aborts.len()), 3);
    }
}

#[tokio::test]
async fn a_restarted_worker_is_noticed_and_takes_over() {
    let service = start_service(any());
    let at = service.local_addr();
    let _p = Worker::start(at, Role::Prefill, "p", 1, layout()).await;
    let old = Worker::start(at, Role::Decode, "d", 1, layout()).await;
    let me = Identity::new("c", Role::Router, "r", 0).unwrap();
    let mut cfg = CoordinatorConfig::new(at.to_string(), Security::Insecure, me);
    // The snapshot stays as it is unless somebody asks for another.
    cfg.refresh_ms = 3_600_000;
    let c = Coordinator::connect(cfg).await.unwrap();
    let room = c.reserve(PairRequest::new(10)).await.unwrap().detach();

    let old_key = old.key.clone();
    let listen = old.crash().await;
    let new = Worker::start_at(at, listen, Role::Decode, "d", 2, layout()).await;
    assert!(c.snapshot().is_alive(&old_key));
    let h = c.reserve(PairRequest::new(10)).await.unwrap();
    assert_eq!(h.decode.worker.key, new.key);
    assert!(new.script(|s| s.reserves.iter().all(|r| r.room != room)));
    assert!(c.snapshot().is_alive(&new.key) && !c.snapshot().is_alive(&old_key));
    // Its rooms went with it.
    match c.await_outcome(room, CAP).await {
        HandoffOutcome::Failed { leg: Blame::Decode, retryable: true, .. } => {}
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_restart_of_the_service_is_survived() {
    let service = start_service(any());
    let at = service.local_addr();
    let p = Worker::start(at, Role::Prefill, "p", 1, layout()).await;
    let d = Worker::start(at, Role::Decode, "d", 1, layout()).await;
    let c = connect(at).await;
    let mut rooms = HashSet::from([c.reserve(PairRequest::new(10)).await.unwrap().detach()]);
    let first = c.snapshot().read;
    service.shutdown();
    // Nobody needs the service for one hand-off.
    assert!(rooms.insert(c.reserve(PairRequest::new(10)).await.unwrap().detach()));
    let service = start_service(at);
    until(&c, "another log is read", |v| v.read.log != first.log).await;
    // Workers that have not registered again yet are not forgotten in between.
    assert!(rooms.insert(c.reserve(PairRequest::new(10)).await.unwrap().detach()));
    let epochs = |v: &kvlane_coordinator::ClusterView| {
        [&p, &d].map(|w| v.worker(&w.key.identity).map(|m| m.view.epoch))
    };
    let before = epochs(&c.snapshot());
    drop(service);
    let _service = start_service(at);
    until(&c, "both register again", |v| {
        epochs(v).iter().zip(&before).all(|(now, then)| now > then)
    })
    .await;
    for _ in 0..10 {
        assert!(rooms.insert(c.reserve(PairRequest::new(10)).await.unwrap().detach()));
    }
}

#[tokio::test]
async fn a_service_that_is_not_there_is_named() {
    let me = Identity::new("c", Role::Router, "r", 0).unwrap();
    let mut cfg = CoordinatorConfig::new("127.0.0.1:9", Security::Insecure, me);
    cfg.connect_ms = 200;
    let e = Coordinator::connect(cfg.clone()).await.unwrap_err();
    assert!(e.kind() == ErrorKind::DeadlineExceeded && e.blame() == Blame::Service, "{e}");
    assert!(e.to_string().contains("127.0.0.1:9"), "{e}");
    cfg.identity.role = Role::Decode;
    assert_eq!(Coordinator::connect(cfg).await.unwrap_err().kind(), ErrorKind::Config);
}

#[tokio::test]
async fn many_requests_at_once_are_spread_and_never_share_a_room() {
    let service = start_service(any());
    let at = service.local_addr();
    let _p = Worker::start(at, Role::Prefill, "p", 1, layout()).await;
    let mut decodes = Vec::new();
    for name in ["d0", "d1", "d2"] {
        decodes.push(Worker::start(at, Role::Decode, name, 1, layout()).await);
    }
    let c = connect(at).await;
    let mut asked = tokio::task::JoinSet::new();
    for _ in 0..300 {
        let c = c.clone();
        let request = PairRequest { wait: CAP, ..PairRequest::new(10) };
        asked.spawn(async move { c.reserve(request).await.unwrap().detach() });
    }
    let rooms: HashSet<RoomId> =
        timeout(CAP, asked.join_all()).await.unwrap().into_iter().collect();
    assert_eq!(rooms.len(), 300);
    for d in &decodes {
        let share = d.script(|s| s.reserves.len());
        assert!((50..=150).contains(&share), "{share} of 300");
    }
}
