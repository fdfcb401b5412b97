//! The coordinator against the real service and workers that answer calls from a script.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::collections::{HashSet, VecDeque};
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
        window_tokens: 0,
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
    /// Reservations of this router arrive late.
    late: Option<&'static str>,
    /// Rooms that may be charged at a time; any number if none.
    lanes: Option<usize>,
    /// Rooms that are charged, and that wait for it.
    charged: Vec<RoomId>,
    queue: VecDeque<RoomId>,
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
        Self::start_at(service, any(), role, (name, 0), start, layout).await
    }

    /// All ranks of an instance.
    async fn start_all(
        service: SocketAddr,
        role: Role,
        name: &str,
        ranks: Vec<Layout>,
    ) -> Vec<Self> {
        let mut workers = Vec::new();
        for (rank, layout) in (0..).zip(ranks) {
            workers.push(Self::start_at(service, any(), role, (name, rank), 1, layout).await);
        }
        workers
    }

    async fn start_at(
        service: SocketAddr,
        listen: SocketAddr,
        role: Role,
        (name, rank): (&str, u32),
        start: u8,
        layout: Layout,
    ) -> Self {
        let identity = Identity::new("c", role, name, rank).unwrap();
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
            pools: vec![layout],
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
            let _ = keep_registered(client, registration, fast, load, tell.into()).await;
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

    /// Gone on purpose.
    async fn leave(self) {
        drop(self.loads);
        let mut tasks = self.tasks.into_iter();
        let _ = tasks.next().unwrap().await;
        tasks.for_each(|t| t.abort());
        self.endpoint.close("left").await;
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
            let router = session.peer.identity.instance.clone();
            let (tx, mut rx, _watch) = session.into_parts::<ReplyFrame, CallFrame>();
            let tx = Arc::new(tx);
            let mut queued = tokio::task::JoinSet::new();
            while let Ok(Some(CallFrame { id, call })) = rx.recv().await {
                let late = script.lock().unwrap().late.is_some_and(|late| late == router);
                if late && matches!(call, Call::Reserve(_)) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                let said = answer(&mut script.lock().unwrap(), call);
                bump.send_modify(|n| *n += 1);
                let (script, tx, bump) = (Arc::clone(&script), Arc::clone(&tx), Arc::clone(&bump));
                let send = move |reply: Result<Reply, Error>| {
                    let reply = reply.map_err(|e| e.to_refusal());
                    let _ = tx.try_send(&ReplyFrame { id, reply });
                };
                match said {
                    Said::Nothing => {}
                    Said::Now(reply) => send(reply),
                    Said::Later(room, wait) => drop(queued.spawn(async move {
                        let mut changed = bump.subscribe();
                        let turn = async {
                            while !script.lock().unwrap().charge(room) {
                                changed.changed().await.unwrap();
                            }
                        };
                        let got = timeout(wait, turn).await.is_ok();
                        script.lock().unwrap().queue.retain(|q| *q != room);
                        bump.send_modify(|n| *n += 1);
                        send(if got { Ok(reserved(room)) } else { Err(busy()) });
                    })),
                }
            }
        });
    }
}

enum Said {
    Nothing,
    Now(Result<Reply, Error>),
    /// It waits in the queue, at most so long.
    Later(RoomId, Duration),
}

fn reserved(room: RoomId) -> Reply {
    Reply::Reserved { room, unclaimed_ms: 5_000 }
}
fn busy() -> Error {
    Error::new(ErrorKind::Busy, "no lane is free").with("lanes", 4)
}

impl Script {
    /// Charges a room if it is its turn.
    fn charge(&mut self, room: RoomId) -> bool {
        if self.charged.contains(&room) {
            return true;
        }
        let first = self.queue.front().is_none_or(|q| *q == room);
        let free = first && self.lanes.is_none_or(|lanes| self.charged.len() < lanes);
        if free {
            self.charged.push(room);
        }
        free
    }
}

fn answer(script: &mut Script, call: Call) -> Said {
    Said::Now(Ok(match call {
        Call::Reserve(r) => {
            let (room, wait_ms) = (r.room, r.wait_ms);
            script.reserves.push(r);
            if script.lose > 0 {
                script.lose -= 1;
                script.charge(room);
                return Said::Nothing;
            }
            if wait_ms < script.busy_below_ms {
                return Said::Now(Err(busy()));
            }
            if !script.charge(room) {
                if wait_ms == 0 {
                    return Said::Now(Err(busy()));
                }
                script.queue.push_back(room);
                return Said::Later(room, Duration::from_millis(wait_ms));
            }
            reserved(room)
        }
        Call::Abort { room, reason } => {
            script.aborts.push((room, reason));
            script.charged.retain(|c| *c != room);
            script.queue.retain(|q| *q != room);
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
    connect_as(service, "r", 300).await
}

async fn connect_as(service: SocketAddr, name: &str, call_ms: u64) -> Coordinator {
    let me = Identity::new("c", Role::Router, name, 0).unwrap();
    let mut cfg = CoordinatorConfig::new(service.to_string(), Security::Insecure, me);
    cfg.refresh_ms = 20;
    cfg.call_ms = call_ms;
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
    let ([from], [to]) = (&h.prefill[..], &h.decode[..]) else { panic!("{h:?}") };
    assert_eq!((&from.worker.key, &*from.serving), (&p.key, "http://p"));
    assert_eq!((&to.worker.key, &to.worker.address), (&d.key, &d.address));
    assert_eq!(
        (&from.peers[..], &to.peers[..]),
        (&[to.worker.clone()][..], &[from.worker.clone()][..])
    );
    assert_eq!(h.unclaimed_ms, 5_000);
    assert_eq!(h.room.0 % 4, 2);
    let seen = d.script(|s| s.reserves[0].clone());
    assert_eq!((seen.room, seen.tokens, seen.wait_ms), (h.room, 10, 0));
    assert_eq!(seen.prefills, to.peers);

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
    let (worker, leg) = (d.key.clone(), Blame::Prefill);
    let failed = HandoffOutcome::Failed { worker, leg, retryable: true, refusal: why };
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
        assert_eq!(h.decode[0].worker.key, d1.key);
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
    assert_eq!(h.decode[0].worker.key, d0.key);
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
async fn the_wait_is_not_begun_anew_when_the_prefill_dies() {
    let service = start_service(any());
    let at = service.local_addr();
    let p0 = Worker::start(at, Role::Prefill, "p0", 1, layout()).await;
    let p1 = Worker::start(at, Role::Prefill, "p1", 1, layout()).await;
    let d = Worker::start(at, Role::Decode, "d", 1, layout()).await;
    let c = connect_as(at, "r", 10_000).await;
    until_complete(&c, 2, 1).await;
    d.script(|s| s.lanes = Some(1));
    let taken = c.reserve(PairRequest::new(10)).await.unwrap();
    let waits = |s: &Script| -> Vec<Reserve> {
        s.reserves.iter().filter(|r| r.wait_ms > 0).cloned().collect()
    };
    let asked = tokio::spawn({
        let c = c.clone();
        async move { c.reserve(PairRequest { wait: CAP, ..PairRequest::new(10) }).await }
    });
    d.until("it waits", |s| waits(s).len() == 1).await;
    let first = d.script(|s| waits(s))[0].prefills[0].key.clone();
    let (dies, lives) = if first == p0.key { (p0, p1) } else { (p1, p0) };
    dies.crash().await;
    d.until("it waits with the other", |s| waits(s).len() == 2).await;
    let waited: Vec<u64> = d.script(|s| waits(s)).iter().map(|r| r.wait_ms).collect();
    assert!(waited[1] < waited[0], "{waited:?}");
    drop(taken);
    let h = timeout(CAP, asked).await.unwrap().unwrap().unwrap();
    assert_eq!(h.prefill[0].worker.key, lives.key);
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
    let new = Worker::start_at(at, listen, Role::Decode, ("d", 0), 2, layout()).await;
    assert!(c.snapshot().is_alive(&old_key));
    let h = c.reserve(PairRequest::new(10)).await.unwrap();
    assert_eq!(h.decode[0].worker.key, new.key);
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
        // A reply that was late is asked for again, which is no other room.
        let share = d.script(|s| s.reserves.iter().map(|r| r.room).collect::<HashSet<_>>().len());
        assert!((50..=150).contains(&share), "{share} of 300");
    }
}

/// One rank of a model with four heads.
fn tp(rank: u32, of: u32) -> Layout {
    let at = Coordinates { tp: (rank, of), ..Coordinates::SINGLE };
    Layout { kv_heads: 4 / of, kv_heads_total: 4, at, ..layout() }
}
fn all(of: u32) -> Vec<Layout> {
    (0..of).map(|rank| tp(rank, of)).collect()
}
fn keys<'a>(workers: impl IntoIterator<Item = &'a WorkerAddress>) -> Vec<WorkerKey> {
    workers.into_iter().map(|w| w.key.clone()).collect()
}
fn keys_of(workers: &[&Worker]) -> Vec<WorkerKey> {
    workers.iter().map(|w| w.key.clone()).collect()
}
/// Waits until the snapshot has so many complete instances.
async fn until_complete(c: &Coordinator, prefills: usize, decodes: usize) {
    until(c, "the instances are complete", |v| {
        let count = |role| v.instances(role).filter(|i| i.why_not().is_none()).count();
        (count(Role::Prefill), count(Role::Decode)) == (prefills, decodes)
    })
    .await;
}

#[tokio::test]
async fn every_decode_rank_is_charged_with_the_prefill_ranks_that_send_to_it() {
    let service = start_service(any());
    let at = service.local_addr();
    let p = Worker::start_all(at, Role::Prefill, "p", all(2)).await;
    let d = Worker::start_all(at, Role::Decode, "d", all(4)).await;
    let c = connect(at).await;
    assert!(c.pair_score(&p[1].key.identity, &d[3].key.identity).is_usable());
    let key = Some(IdempotencyKey([9; 16]));
    let h = c.reserve(PairRequest { key, ..PairRequest::new(10) }).await.unwrap();
    assert_eq!(keys(h.prefill.iter().map(|l| &l.worker)), keys_of(&[&p[0], &p[1]]));
    assert_eq!(keys(h.decode.iter().map(|l| &l.worker)), keys_of(&[&d[0], &d[1], &d[2], &d[3]]));
    assert_eq!(keys(&h.prefill[0].peers), keys_of(&[&d[0], &d[1]]));
    assert_eq!(keys(&h.prefill[1].peers), keys_of(&[&d[2], &d[3]]));
    let asked: Vec<Reserve> = d
        .iter()
        .map(|w| w.script(|s| (s.reserves.len() == 1).then(|| s.reserves[0].clone())).unwrap())
        .collect();
    for (n, (r, leg)) in asked.iter().zip(&h.decode).enumerate() {
        assert_eq!((r.room, r.key, r.tokens), (h.room, asked[0].key, 10));
        assert_eq!(keys(&r.prefills), keys_of(&[&p[n / 2]]));
        assert_eq!(leg.peers, r.prefills);
    }

    // Done only once all are, and with what all of them moved.
    let room = h.detach();
    for (n, w) in d.iter().enumerate() {
        assert_eq!(c.await_outcome(room, Duration::from_millis(50)).await, HandoffOutcome::Running);
        w.script(|s| s.outcome = Some(Outcome::Done { bytes: 1 << n }));
    }
    assert_eq!(c.await_outcome(room, CAP).await, HandoffOutcome::Done { bytes: 15 });
    assert!(!c.abort_room(room, "late"));

    // An abort reaches every rank of both legs, once.
    let other = c.reserve(PairRequest::new(10)).await.unwrap();
    let gone = other.room;
    c.abort(&other, "client left");
    drop(other);
    for w in p.iter().chain(&d) {
        w.until("the abort", |s| s.aborts == [(gone, "client left".to_string())]).await;
    }
}

#[tokio::test]
async fn one_rank_that_refuses_leaves_nothing_at_the_others() {
    let service = start_service(any());
    let at = service.local_addr();
    let p = Worker::start_all(at, Role::Prefill, "p", all(2)).await;
    let d = Worker::start_all(at, Role::Decode, "d", all(4)).await;
    let c = connect(at).await;
    d[2].script(|s| s.busy_below_ms = u64::MAX);
    let e = c.reserve(PairRequest::new(10)).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Busy, "{e}");
    assert!(e.to_string().contains(&format!("rank={}", d[2].key)), "{e}");
    d[0].until("the abort", |s| s.aborts.len() == 1 && s.charged.is_empty()).await;
    // Whether the others were charged when it refused is chance. Either way they are not now.
    for w in [&d[1], &d[3]] {
        w.until("the abort", |s| s.aborts.len() == s.reserves.len() && s.charged.is_empty()).await;
    }
    // In the queue ranks are asked one by one: who comes after it is not asked.
    let before = d[3].script(|s| s.reserves.len());
    let wait = Duration::from_millis(500);
    let e = c.reserve(PairRequest { wait, ..PairRequest::new(10) }).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Busy, "{e}");
    let queued = |s: &Script| s.reserves.iter().filter(|r| r.wait_ms > 0).count();
    assert_eq!(d.iter().map(|w| w.script(|s| queued(s))).collect::<Vec<_>>(), [1, 1, 1, 0]);
    assert!(d[3].script(|s| s.reserves.len()) <= before + 1);
    for w in &d {
        w.until("nothing is charged", |s| s.charged.is_empty()).await;
    }
    // Another instance takes it.
    let other = Worker::start_all(at, Role::Decode, "e", all(1)).await;
    until_complete(&c, 1, 2).await;
    let h = c.reserve(PairRequest::new(10)).await.unwrap();
    assert_eq!(keys(h.decode.iter().map(|l| &l.worker)), keys_of(&[&other[0]]));
    assert_eq!(keys(&h.decode[0].peers), keys_of(&[&p[0], &p[1]]));
    h.detach();
    // Who refused has nothing to abort, and nobody told the prefill of rooms that never were.
    assert!(d[2].script(|s| s.aborts.is_empty()));
    assert!(p.iter().all(|w| w.script(|s| s.aborts.is_empty())));
}

#[tokio::test]
async fn one_rank_that_fails_ends_the_room_everywhere_and_is_named() {
    let service = start_service(any());
    let at = service.local_addr();
    let p = Worker::start_all(at, Role::Prefill, "p", all(2)).await;
    let d = Worker::start_all(at, Role::Decode, "d", all(4)).await;
    let c = connect(at).await;
    let room = c.reserve(PairRequest::new(10)).await.unwrap().detach();
    d[0].script(|s| s.outcome = Some(Outcome::Done { bytes: 5 }));
    let why = Error::new(ErrorKind::Incomplete, "half of it came").to_refusal();
    d[1].script(|s| s.outcome = Some(Outcome::Failed { why: why.clone(), bytes: 3 }));
    let failed = HandoffOutcome::Failed {
        worker: d[1].key.clone(),
        leg: Blame::Prefill,
        retryable: true,
        refusal: why,
    };
    assert_eq!(c.await_outcome(room, CAP).await, failed);
    for w in [&p[0], &p[1], &d[2], &d[3]] {
        w.until("the abort", |s| s.aborts.len() == 1).await;
        let (aborted, reason) = w.script(|s| s.aborts[0].clone());
        assert_eq!(aborted, room);
        assert!(reason.contains("c/decode/d/1") && reason.contains("half of it came"), "{reason}");
    }
    assert!(d[1].script(|s| s.aborts.is_empty()));
    // It stays so, whatever the others say of their end.
    let aborted = Error::new(ErrorKind::Aborted, "by a router").to_refusal();
    d[0].script(|s| s.outcome = Some(Outcome::Failed { why: aborted, bytes: 0 }));
    assert_eq!(c.await_outcome(room, CAP).await, failed);
    assert!(!c.abort_room(room, "late"));
}

#[tokio::test]
async fn an_incomplete_instance_is_refused_by_name_and_used_once_its_rank_is_there() {
    let service = start_service(any());
    let at = service.local_addr();
    let _p = Worker::start_all(at, Role::Prefill, "p", all(1)).await;
    let d0 = Worker::start_at(at, any(), Role::Decode, ("d", 0), 1, tp(0, 2)).await;
    let c = connect(at).await;
    let e = c.reserve(PairRequest::new(10)).await.unwrap_err();
    assert!(
        e.to_string().contains("c/decode/d: 1 of 2 ranks are missing: nobody is tp 1 of 2"),
        "{e}"
    );
    let d1 = Worker::start_at(at, any(), Role::Decode, ("d", 1), 1, tp(1, 2)).await;
    until_complete(&c, 1, 1).await;
    c.reserve(PairRequest::new(10)).await.unwrap().detach();

    let key = d1.key.clone();
    d1.leave().await;
    until(&c, "a rank is gone", |v| !v.is_alive(&key)).await;
    for decode in [None, Some(key.identity.clone())] {
        let e = c.reserve(PairRequest { decode, ..PairRequest::new(10) }).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::LeaseExpired, "{e}");
        let why = format!("c/decode/d: 1 of 2 ranks are missing: {key}: its lease has ended");
        assert!(e.to_string().contains(&why), "{e}");
    }
    assert_eq!(d0.script(|s| s.reserves.len()), 1, "who is incomplete is not asked");
    let again = Worker::start_at(at, any(), Role::Decode, ("d", 1), 2, tp(1, 2)).await;
    until_complete(&c, 1, 1).await;
    // Asked for by any of its ranks.
    let decode = Some(again.key.identity.clone());
    let h = c.reserve(PairRequest { decode, ..PairRequest::new(10) }).await.unwrap();
    assert_eq!(keys(h.decode.iter().map(|l| &l.worker)), keys_of(&[&d0, &again]));
    h.detach();
    // One rank that drains is the whole instance's.
    d0.loads.send_modify(|l| l.draining = true);
    until_complete(&c, 1, 0).await;
    let e = c.reserve(PairRequest::new(10)).await.unwrap_err();
    assert!(e.kind() == ErrorKind::Draining && e.to_string().contains(&d0.key.to_string()), "{e}");
}

#[tokio::test]
async fn of_ranks_that_have_the_same_pages_only_the_matching_one_sends() {
    let mla = |of: u32| -> Vec<Layout> {
        let one = |l: Layout| Layout { kind: KvKind::Mla, kv_heads: 1, kv_heads_total: 1, ..l };
        all(of).into_iter().map(one).collect()
    };
    let service = start_service(any());
    let at = service.local_addr();
    let p = Worker::start_all(at, Role::Prefill, "p", mla(2)).await;
    let d = Worker::start_all(at, Role::Decode, "d", mla(2)).await;
    let single = Worker::start_all(at, Role::Decode, "s", mla(1)).await;
    let c = connect(at).await;
    let to =
        |w: &Worker| PairRequest { decode: Some(w.key.identity.clone()), ..PairRequest::new(10) };
    let h = c.reserve(to(&d[1])).await.unwrap();
    for n in 0..2 {
        assert_eq!(keys(&h.prefill[n].peers), keys_of(&[&d[n]]));
        assert_eq!(keys(&h.decode[n].peers), keys_of(&[&p[n]]));
        assert_eq!(keys(&d[n].script(|s| s.reserves[0].clone()).prefills), keys_of(&[&p[n]]));
    }
    h.detach();
    let h = c.reserve(to(&single[0])).await.unwrap();
    assert_eq!(keys(&h.decode[0].peers), keys_of(&[&p[0]]));
    assert_eq!((h.prefill.len(), h.prefill[1].peers.len()), (2, 0));
    h.detach();
}

#[tokio::test]
async fn a_rank_that_restarts_takes_its_rooms_with_it_and_the_instance_goes_on() {
    let service = start_service(any());
    let at = service.local_addr();
    let p = Worker::start_all(at, Role::Prefill, "p", all(1)).await;
    let mut d = Worker::start_all(at, Role::Decode, "d", all(2)).await;
    let me = Identity::new("c", Role::Router, "r", 0).unwrap();
    let mut cfg = CoordinatorConfig::new(at.to_string(), Security::Insecure, me);
    cfg.refresh_ms = 3_600_000;
    let c = Coordinator::connect(cfg).await.unwrap();
    let room = c.reserve(PairRequest::new(10)).await.unwrap().detach();
    let old = d.pop().unwrap();
    let old_key = old.key.clone();
    let listen = old.crash().await;
    let new = Worker::start_at(at, listen, Role::Decode, ("d", 1), 2, tp(1, 2)).await;
    assert!(c.snapshot().is_alive(&old_key));
    let h = c.reserve(PairRequest::new(10)).await.unwrap();
    assert_eq!(keys(h.decode.iter().map(|l| &l.worker)), keys_of(&[&d[0], &new]));
    // The first rank was charged for the pair that was no more.
    d[0].until("what was charged in vain is aborted", |s| {
        s.aborts.len() == 1 && s.charged == [room, h.room]
    })
    .await;
    let outcome = c.await_outcome(room, CAP).await;
    let HandoffOutcome::Failed { worker, leg: Blame::Decode, retryable: true, .. } = outcome else {
        panic!("{outcome:?}")
    };
    assert_eq!(worker, old_key);
    for w in [&d[0], &p[0]] {
        w.until("the abort", |s| s.aborts.iter().any(|a| a.0 == room)).await;
    }
    assert!(new.script(|s| s.reserves.iter().all(|r| r.room == h.room) && s.aborts.is_empty()));
    h.detach();
}

#[tokio::test]
async fn a_request_given_up_while_it_is_placed_leaves_nothing() {
    let service = start_service(any());
    let at = service.local_addr();
    let p = Worker::start_all(at, Role::Prefill, "p", all(1)).await;
    let d = Worker::start_all(at, Role::Decode, "d", all(4)).await;
    // Patient: on a slow machine it must not give the rank up before the request is.
    let c = connect_as(at, "r", 10_000).await;
    // The third rank charges the room, but its reply never comes.
    for wait in [Duration::ZERO, CAP] {
        d[2].script(|s| s.lose = usize::MAX);
        d[0].script(|s| s.busy_below_ms = u64::from(!wait.is_zero()));
        let before = d[2].script(|s| s.reserves.len());
        tokio::select! {
            biased;
            r = c.reserve(PairRequest { wait, ..PairRequest::new(10) }) => panic!("{r:?}"),
            () = d[2].until("it is asked", |s| s.reserves.len() > before) => {}
        }
        let room = d[2].script(|s| s.reserves[before].room);
        for w in [&d[0], &d[2]] {
            let aborted = |s: &Script| s.aborts.iter().filter(|a| a.0 == room).count() == 1;
            w.until("the abort", |s| aborted(s) && s.charged.is_empty()).await;
        }
    }
    for w in &d {
        w.until("nothing is charged", |s| s.charged.is_empty()).await;
    }
    assert!(d[3].script(|s| s.reserves.iter().all(|r| r.wait_ms == 0)), "its turn never came");
    assert!(p[0].script(|s| s.aborts.is_empty()));
}

#[tokio::test]
async fn routers_that_reserve_at_the_same_ranks_do_not_wait_for_each_other() {
    let service = start_service(any());
    let at = service.local_addr();
    let _p = Worker::start_all(at, Role::Prefill, "p", all(1)).await;
    let d = Worker::start_all(at, Role::Decode, "d", all(4)).await;
    // Both pass the first rank at a time; at the others each comes first at some.
    let late = [None, Some("r0"), Some("r1"), Some("r0")];
    for (w, (late, lanes)) in d.iter().zip(late.into_iter().zip([2, 1, 1, 1])) {
        w.script(|s| (s.late, s.lanes) = (late, Some(lanes)));
    }
    let routers = [connect_as(at, "r0", 10_000).await, connect_as(at, "r1", 10_000).await];
    let mut asked = tokio::task::JoinSet::new();
    for n in 0..40 {
        let c = routers[n % 2].clone();
        asked.spawn(async move {
            let h = c.reserve(PairRequest { wait: CAP, ..PairRequest::new(10) }).await.unwrap();
            tokio::task::yield_now().await;
            h.room // dropped here, which makes way for the next
        });
    }
    let rooms = timeout(CAP, asked.join_all()).await.unwrap();
    assert_eq!(rooms.into_iter().collect::<HashSet<_>>().len(), 40);
    for w in &d {
        w.until("nothing is charged", |s| s.charged.is_empty() && s.queue.is_empty()).await;
    }
}
