//! The library that Rust routers embed to place and follow hand-offs.
//!
//! A [`Coordinator`] owns one QUIC endpoint, a leased issuer slot for room numbers, a snapshot of
//! the cluster, and one session to each worker that it asks. In: requests of the router. Out:
//! [`Handoff`]s, and how they ended. It needs a tokio runtime and installs nothing global.
//!
//! ```no_run
//! # async fn run() -> kvlane_proto::Result<()> {
//! use kvlane_coordinator::{Coordinator, CoordinatorConfig, HandoffOutcome, PairRequest};
//! use kvlane_proto::{Identity, Role};
//! use kvlane_transport::quic::Security;
//! use std::time::Duration;
//!
//! let me = Identity::new("prod", Role::Router, "router-0", 0)?;
//! let tls = Security::Mutual { dir: "/etc/kvlane/tls".into() };
//! let cfg = CoordinatorConfig::new("bootstrap.example:7400", tls, me);
//! let coordinator = Coordinator::connect(cfg).await?;
//!
//! let handoff = coordinator.reserve(PairRequest::new(4096)).await?;
//! // Send both legs: `handoff.prefill.serving`, `handoff.decode.serving`, `handoff.room`. If that
//! // fails, drop the hand-off, or abort it with a reason.
//! let room = handoff.detach();
//! match coordinator.await_outcome(room, Duration::from_secs(60)).await {
//!     HandoffOutcome::Done { bytes } => println!("{bytes} bytes"),
//!     other => println!("{other:?}"),
//! }
//! # Ok(()) }
//! ```
//!
//! Invariants: a room number is made only under a live lease, and never twice; only pairs whose
//! layouts fit are dispatched; one idempotency key has one room while that room may live; a room
//! that was asked for and not handed out, or handed out and dropped, is aborted at both legs.

mod handoff;
mod issuer;
mod keeper;
mod view;

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvlane_proto::ended::Memory;
use kvlane_proto::msg::call::{Call, Reply, Reserve};
use kvlane_proto::msg::service::WorkerAddress;
use kvlane_proto::{
    Blame, Error, ErrorKind, IdempotencyKey, Identity, Incarnation, Refusal, Result, Retry, Role,
    RoomId, WorkerKey, limits,
};
use kvlane_transport::clock;
use kvlane_transport::quic::{Endpoint, EndpointConfig, Security};
use kvlane_transport::random::fill_random;
use kvlane_transport::rpc::{CallExchange, Client, Failure, Target};
use kvlane_transport::service_client::ServiceClient;
use kvlane_transport::wire::message::DURATION_MS_MAX;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use handoff::{AbortOrder, Guard, Room};
pub use handoff::{Handoff, HandoffOutcome, Leg};
use issuer::Issuer;
use view::{Candidates, Recent};
pub use view::{ClusterView, Member, PairScore};

/// Rooms that one coordinator remembers.
pub const ROOMS_REMEMBERED_MAX: usize = 1 << 16;
/// Aborts that may wait to be told.
pub const ABORTS_QUEUED_MAX: usize = 8192;

/// What a coordinator needs.
#[derive(Clone, Debug)]
pub struct CoordinatorConfig {
    /// `host:port` of the bootstrap service.
    pub service: String,
    /// How peers are recognised.
    pub security: Security,
    /// Who this router is; role [`Role::Router`].
    pub identity: Identity,
    /// Local address of its QUIC endpoint.
    pub listen: SocketAddr,
    /// How long [`Coordinator::connect`] may take.
    pub connect_ms: u64,
    /// How often the snapshot is brought up to date.
    pub refresh_ms: u64,
    /// How long a worker may take to answer one call, its own wait excluded.
    pub call_ms: u64,
    /// How often one call is made before the worker counts as unreachable.
    pub call_tries: u32,
}

impl CoordinatorConfig {
    /// The defaults.
    pub fn new(service: impl Into<String>, security: Security, identity: Identity) -> Self {
        let ip = match security {
            Security::Mutual { .. } => [0, 0, 0, 0],
            Security::Insecure => [127, 0, 0, 1],
        };
        Self {
            service: service.into(),
            security,
            identity,
            listen: (ip, 0).into(),
            connect_ms: 10_000,
            refresh_ms: 250,
            call_ms: 1_000,
            call_tries: 3,
        }
    }
}

/// A hand-off that a router wants.
#[derive(Clone, Debug)]
pub struct PairRequest {
    /// Tokens of the prompt.
    pub tokens: u32,
    /// Makes a repeated request the same request: it gets the same room while that may live, and
    /// `room_ended` after. Two hand-offs of one room abort it only when both are dropped.
    pub key: Option<IdempotencyKey>,
    /// Only this prefill worker.
    pub prefill: Option<Identity>,
    /// Only this decode worker.
    pub decode: Option<Identity>,
    /// The room is congruent to the first modulo the second, for servers that pick their
    /// data-parallel rank by it; the prefill worker's own place if not given.
    pub dp: Option<(u32, u32)>,
    /// Wait at most this long in the best decode worker's queue, if none takes it at once.
    pub wait: Duration,
    /// The room ends by then.
    pub deadline: Duration,
}

impl PairRequest {
    /// Any pair, at once or not at all.
    pub fn new(tokens: u32) -> Self {
        Self {
            tokens,
            key: None,
            prefill: None,
            decode: None,
            dp: None,
            wait: Duration::ZERO,
            deadline: Duration::from_millis(limits::ROOM_DEADLINE_MS),
        }
    }
}

/// Places hand-offs and follows them. Cheap to clone.
#[derive(Clone)]
pub struct Coordinator {
    shared: Arc<Shared>,
    tasks: Arc<Tasks>,
}

/// Ends the keeper with the last coordinator. The aborter ends by itself, once nobody can order an
/// abort any more and every order is done.
struct Tasks {
    keeper: JoinHandle<()>,
}

impl Drop for Tasks {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

pub(crate) struct Shared {
    cfg: CoordinatorConfig,
    issuer: Issuer,
    view: watch::Sender<Arc<ClusterView>>,
    recent: Mutex<Recent>,
    /// Asks the keeper for a fresh snapshot at once.
    hurry: Notify,
    workers: Arc<Workers>,
    rooms: Mutex<Memory<RoomId, Arc<Room>>>,
    keys: Mutex<Memory<IdempotencyKey, Pin>>,
    aborts: mpsc::Sender<AbortOrder>,
    turn: AtomicUsize,
}

/// The room of one idempotency key, once there is one. Held while a request with the key is being
/// placed, so that others with the same key wait for what it gets.
type Pin = Arc<tokio::sync::Mutex<Option<Arc<Room>>>>;

/// Sessions to workers, one for each start of each.
pub(crate) struct Workers {
    endpoint: Endpoint,
    clients: Mutex<HashMap<WorkerKey, Client<CallExchange>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn ms(d: Duration) -> u64 {
    d.as_millis().min(u128::from(u64::MAX)) as u64
}

impl Workers {
    pub(crate) fn client(&self, worker: &WorkerAddress) -> Client<CallExchange> {
        let mut clients = lock(&self.clients);
        if let Some(c) = clients.get(&worker.key).filter(|c| c.target().address == worker.address) {
            return c.clone();
        }
        let target = Target {
            address: worker.address.clone(),
            expects: Some(worker.key.identity.clone()),
            incarnation: Some(worker.key.incarnation),
            role: worker.key.identity.role,
        };
        let client = Client::new(self.endpoint.clone(), target);
        clients.insert(worker.key.clone(), client.clone());
        client
    }
    /// Closes the sessions to workers that are gone.
    pub(crate) fn keep_only(&self, view: &ClusterView) {
        lock(&self.clients).retain(|key, _| view.is_alive(key));
    }
}

impl Coordinator {
    /// Connects to the bootstrap service: leases an issuer slot and takes a first snapshot.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for an identity that is no router's; as [`Endpoint::bind`]; the
    /// service's refusal; [`ErrorKind::DeadlineExceeded`] after `connect_ms`, with the last failure.
    pub async fn connect(cfg: CoordinatorConfig) -> Result<Self> {
        if cfg.identity.role != Role::Router {
            return Err(Error::new(ErrorKind::Config, "a coordinator must be a router")
                .with("found", &cfg.identity)
                .with("expected", Role::Router)
                .hint("issue a certificate of role router"));
        }
        let mut start = [0; 16];
        fill_random(&mut start)?;
        let me = WorkerKey { identity: cfg.identity.clone(), incarnation: Incarnation(start) };
        let endpoint = Endpoint::bind(EndpointConfig::new(cfg.listen, cfg.security.clone(), me))?;
        let service = ServiceClient::new(endpoint.clone(), &cfg.service);
        let workers = Arc::new(Workers { endpoint, clients: Mutex::default() });
        let (aborts, orders) = mpsc::channel(ABORTS_QUEUED_MAX);
        let shared = Arc::new(Shared {
            issuer: Issuer::default(),
            view: watch::Sender::new(Arc::default()),
            recent: Mutex::new(Recent::new(cfg.refresh_ms)),
            hurry: Notify::new(),
            workers: Arc::clone(&workers),
            rooms: Mutex::new(Memory::new(ROOMS_REMEMBERED_MAX)),
            keys: Mutex::new(Memory::new(limits::KEYS_MAX)),
            aborts,
            turn: AtomicUsize::new(0),
            cfg,
        });
        let (ready, started) = watch::channel(keeper::Start::default());
        let keeper = tokio::spawn(keeper::keep(Arc::clone(&shared), service, ready));
        let call = Duration::from_millis(shared.cfg.call_ms);
        tokio::spawn(keeper::tell_aborts(workers, orders, call, shared.cfg.call_tries));
        let this = Self { shared, tasks: Arc::new(Tasks { keeper }) };
        keeper::wait_for_start(started, &this.shared.cfg).await?;
        Ok(this)
    }

    /// The cluster as last seen; never waits for the network.
    pub fn snapshot(&self) -> Arc<ClusterView> {
        Arc::clone(&self.shared.view.borrow())
    }

    /// Snapshots as they come.
    pub fn watch(&self) -> watch::Receiver<Arc<ClusterView>> {
        self.shared.view.subscribe()
    }

    /// What a pair is worth, as far as the snapshot knows.
    pub fn pair_score(&self, prefill: &Identity, decode: &Identity) -> PairScore {
        self.snapshot().pair_score(prefill, decode)
    }

    /// Reserves a room at the least loaded decode worker that has a prefill worker that fits.
    ///
    /// A lost reply is asked for again with the same key. Refused by one worker, the request goes
    /// to the next; refused by all, it may wait in the best one's queue.
    ///
    /// # Errors
    /// With every candidate considered and its reason. The kind says what would help:
    /// [`ErrorKind::Busy`], [`ErrorKind::Incompatible`], [`ErrorKind::Draining`],
    /// [`ErrorKind::NotFound`], …; [`ErrorKind::LeaseExpired`] without a live issuer slot.
    pub async fn reserve(&self, request: PairRequest) -> Result<Handoff> {
        if self.tasks.keeper.is_finished() {
            return Err(Error::new(ErrorKind::Internal, "the coordinator's keeper has ended")
                .hint("connect again, and report this defect"));
        }
        if request.tokens == 0 {
            return Err(Error::new(ErrorKind::Malformed, "a room needs at least one token"));
        }
        for (what, asked) in [("wait", request.wait), ("deadline", request.deadline)] {
            if ms(asked) > DURATION_MS_MAX {
                return Err(Error::new(ErrorKind::LimitExceeded, format!("{what} is too long"))
                    .with("asked_ms", ms(asked))
                    .with("limit_ms", DURATION_MS_MAX));
            }
        }
        let due = Instant::now() + request.deadline;
        let result = match request.key {
            Some(key) => self.place_once(&request, key, due).await,
            None => {
                let mut key = [0; 16];
                fill_random(&mut key)?;
                self.place(&request, (IdempotencyKey(key), due), &mut None).await
            }
        };
        let label = result.as_ref().map_or_else(|e| e.kind().code(), |_| "reserved");
        metrics::counter!("kvlane_coordinator_reservations_total", "result" => label).increment(1);
        result
    }

    /// Places a request unless its key has a room already; one request of a key at a time.
    async fn place_once(
        &self,
        request: &PairRequest,
        key: IdempotencyKey,
        due: Instant,
    ) -> Result<Handoff> {
        let shared = &*self.shared;
        let pin = shared.pin(key);
        let result = match timeout_at(due, pin.lock()).await {
            Ok(mut pinned) => match shared.judge_pinned(request, pinned.as_ref()) {
                Ok(Some(room)) => self.repeat(request, key, due, room).await,
                Ok(None) => self.place(request, (key, due), &mut pinned).await,
                Err(e) => Err(e),
            },
            Err(_) => Err(Error::new(
                ErrorKind::DeadlineExceeded,
                "another request with the same key is still being placed",
            )
            .blamed(Blame::Caller)
            .with("deadline_ms", ms(request.deadline))
            .hint("give the hand-off more time, or use a key of its own for every new one")),
        };
        shared.unpin(key, &pin);
        result
    }

    /// Asks again for a room that this key has already.
    async fn repeat(
        &self,
        request: &PairRequest,
        key: IdempotencyKey,
        due: Instant,
        room: Arc<Room>,
    ) -> Result<Handoff> {
        let guard = Guard::new(room);
        let view = self.snapshot();
        let leg = |worker: &WorkerAddress| {
            let member = view.worker(&worker.key.identity).filter(|m| *m.key() == worker.key);
            let serving = member.map(|m| m.view.registration.serving.clone()).unwrap_or_default();
            Leg { worker: worker.clone(), serving }
        };
        let (prefill, decode) = (leg(&guard.room.prefill), leg(&guard.room.decode));
        let unclaimed_ms = self.shared.ask_reserve(&guard.room, key, due, request.wait).await?;
        guard.room.hand_out();
        Ok(Handoff { room: guard.room.id, prefill, decode, unclaimed_ms, guard })
    }

    async fn place(
        &self,
        request: &PairRequest,
        (key, due): (IdempotencyKey, Instant),
        pinned: &mut Option<Arc<Room>>,
    ) -> Result<Handoff> {
        let shared = &*self.shared;
        let turn = shared.turn.fetch_add(1, Ordering::Relaxed);
        // Prefill workers that turned out to be gone; the view may learn it later.
        let mut gone = BTreeSet::new();
        let mut candidates = self.candidates(request, &gone, turn);
        let mut refreshed = false;
        loop {
            let pairs = std::mem::take(&mut candidates.pairs);
            // At once with anybody first; then in the queue of the best that is merely busy.
            let mut busiest = None;
            let mut stale = false;
            let known_gone = gone.len();
            for (prefill, decode) in &pairs {
                if gone.contains(&prefill.key().identity) {
                    continue;
                }
                let room = shared.new_room(request, (prefill, decode))?;
                *pinned = Some(Arc::clone(&room));
                match shared.try_pair(room, (key, due), (prefill, decode), Duration::ZERO).await {
                    Ok(handoff) => return Ok(handoff),
                    Err(e) => {
                        stale |= matches!(
                            e.kind(),
                            ErrorKind::StaleIncarnation | ErrorKind::IdentityMismatch
                        );
                        if e.kind() == ErrorKind::Busy {
                            busiest.get_or_insert((prefill, decode));
                        }
                        if is_gone(&e) {
                            gone.insert(prefill.key().identity.clone());
                        }
                        // The request itself is wrong: nobody else will take it.
                        if e.retry() == Retry::Never {
                            return Err(e.with("asked", decode.key()));
                        }
                        candidates.refuse(e.kind(), format!("{}: {e}", decode.key()));
                    }
                }
            }
            let waits = busiest.filter(|(p, _)| !gone.contains(&p.key().identity));
            if let Some((prefill, decode)) = waits
                && !request.wait.is_zero()
            {
                let room = shared.new_room(request, (prefill, decode))?;
                *pinned = Some(Arc::clone(&room));
                let queue = shared.try_pair(room, (key, due), (prefill, decode), request.wait);
                // Its place in the queue is given up when the prefill turns out to be dead.
                let result = tokio::select! {
                    biased;
                    result = queue => result,
                    () = shared.suspects(prefill.key()) => Err(suspected(prefill.key())),
                };
                match result {
                    Ok(handoff) => return Ok(handoff),
                    Err(e) => {
                        if is_gone(&e) {
                            gone.insert(prefill.key().identity.clone());
                        }
                        candidates.refuse_again(decode.key(), &e);
                    }
                }
            }
            // With another prefill, the same decode workers may take it.
            if gone.len() > known_gone && Instant::now() < due {
                let again = self.candidates(request, &gone, turn);
                if !again.pairs.is_empty() {
                    candidates.pairs = again.pairs;
                    continue;
                }
            }
            if stale && !refreshed {
                // The snapshot was behind: read the registry and try once more.
                refreshed = true;
                metrics::counter!("kvlane_coordinator_stale_views_total").increment(1);
                if shared.refresh().await {
                    let again = self.candidates(request, &gone, turn);
                    if !again.pairs.is_empty() {
                        candidates.pairs = again.pairs;
                        continue;
                    }
                }
            }
            return Err(candidates.into_error("no pair of workers takes the hand-off"));
        }
    }

    fn candidates(
        &self,
        request: &PairRequest,
        avoid: &BTreeSet<Identity>,
        turn: usize,
    ) -> Candidates {
        let mut recent = lock(&self.shared.recent);
        recent.expire(clock::now());
        let (prefill, decode) = (request.prefill.as_ref(), request.decode.as_ref());
        self.snapshot().candidates(prefill, decode, avoid, &recent, turn)
    }

    /// Waits for a room's end, at most so long.
    ///
    /// The decode worker decides how a room ended, so it is asked. A decode worker that has
    /// restarted or whose lease is over has taken its rooms with it: that is a failure of its leg.
    pub async fn await_outcome(&self, room: RoomId, wait: Duration) -> HandoffOutcome {
        let shared = &*self.shared;
        let known = lock(&shared.rooms).get(&room).cloned();
        let Some(known) = known else {
            let e = Error::new(ErrorKind::NotFound, "no such room is known to this router")
                .with("room", room);
            return HandoffOutcome::Unknown { refusal: e.to_refusal() };
        };
        let due = Instant::now() + wait.min(Duration::from_secs(24 * 3600));
        let mut last: Option<Error> = None;
        loop {
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return match last {
                    None => HandoffOutcome::Running,
                    Some(e) => HandoffOutcome::Unknown { refusal: e.to_refusal() },
                };
            }
            // Short rounds, so that a worker that hangs is noticed while its lease runs out.
            let round = left.min(Duration::from_millis(limits::WORKER_LEASE_MS));
            let call = Call::Await { room, wait_ms: ms(round) };
            let patience = round + Duration::from_millis(shared.cfg.call_ms);
            match shared.workers.client(&known.decode).ask(call, patience).await {
                Ok(Reply::Ended(outcome)) => {
                    known.end();
                    return outcome.into();
                }
                Ok(Reply::Running) => last = None,
                Ok(_) => last = Some(odd_reply(&known.decode, "await")),
                Err(Failure::Refused(e)) => {
                    return HandoffOutcome::Unknown { refusal: e.to_refusal() };
                }
                Err(Failure::Unsent(e) | Failure::Lost(e)) => {
                    let restarted = e.kind() == ErrorKind::StaleIncarnation;
                    if restarted || !shared.view.borrow().is_alive(&known.decode.key) {
                        known.end();
                        return gone(&known.decode, &e);
                    }
                    last = Some(e);
                    let pause = Duration::from_millis(limits::RESEND_MS);
                    tokio::time::sleep_until(due.min(Instant::now() + pause)).await;
                }
            }
        }
    }

    /// Aborts a hand-off at both legs. Never waits; repeating it does nothing.
    pub fn abort(&self, handoff: &Handoff, reason: &str) {
        handoff.guard.room.abort(reason);
    }

    /// Aborts a room of this router, detached or not. Returns whether there was anything to abort:
    /// rooms that are unknown, over or aborted already are left alone.
    pub fn abort_room(&self, room: RoomId, reason: &str) -> bool {
        let known = lock(&self.shared.rooms).get(&room).cloned();
        known.is_some_and(|r| r.abort(reason))
    }
}

/// Whether a decode says that its prefill cannot be had.
fn is_gone(e: &Error) -> bool {
    e.kind() == ErrorKind::PeerLost && e.blame() == Blame::Prefill
}

fn suspected(prefill: &WorkerKey) -> Error {
    Error::new(ErrorKind::PeerLost, "the prefill worker has died, or its lease has ended")
        .with("prefill", prefill)
        .blamed(Blame::Prefill)
        .hint("place the request with another prefill worker")
}

impl Shared {
    /// Waits until the view holds a worker for dead.
    async fn suspects(&self, key: &WorkerKey) {
        let mut views = self.view.subscribe();
        let dead = |view: &Arc<ClusterView>| {
            view.worker(&key.identity)
                .is_none_or(|m| m.key() != key || !m.view.alive || m.view.suspected)
        };
        if views.wait_for(dead).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Where the room of a key is kept.
    fn pin(&self, key: IdempotencyKey) -> Pin {
        let mut keys = lock(&self.keys);
        if let Some(pin) = keys.get(&key) {
            return Arc::clone(pin);
        }
        let pin = Pin::default();
        keys.insert(key, Arc::clone(&pin));
        pin
    }

    /// Forgets a key for which nobody got a room and that nobody else waits for: requests that nobody takes
    /// must not push out the keys of rooms that live.
    fn unpin(&self, key: IdempotencyKey, pin: &Pin) {
        let mut keys = lock(&self.keys);
        let kept = keys.get(&key).is_some_and(|k| Arc::ptr_eq(k, pin));
        let nobody_got_it = |r: &Arc<Room>| r.is_over() && !r.was_handed_out();
        let unused = Arc::strong_count(pin) == 2
            && pin.try_lock().is_ok_and(|room| room.as_ref().is_none_or(nobody_got_it));
        if kept && unused {
            keys.remove(&key);
        }
    }

    /// The room that a key has, if a request with that key is to get it; none if it never got one.
    fn judge_pinned(
        &self,
        request: &PairRequest,
        pinned: Option<&Arc<Room>>,
    ) -> Result<Option<Arc<Room>>> {
        let Some(room) = pinned else { return Ok(None) };
        let is = |asked: &Option<Identity>, worker: &WorkerAddress| {
            asked.as_ref().is_none_or(|a| *a == worker.key.identity)
        };
        let over = room.is_over() || !self.view.borrow().is_alive(&room.decode.key);
        if over && !room.was_handed_out() {
            return Ok(None);
        }
        let refused = |kind, what: &str| {
            Error::new(kind, what)
                .with("room", room.id)
                .with("decode", &room.decode.key)
                .hint("use a key of its own for every new hand-off")
        };
        if over {
            return Err(refused(ErrorKind::RoomEnded, "the room that this key got has ended"));
        }
        let same = room.tokens == request.tokens
            && is(&request.prefill, &room.prefill)
            && is(&request.decode, &room.decode);
        if !same {
            return Err(refused(ErrorKind::Malformed, "the key was used for another request"));
        }
        Ok(Some(Arc::clone(room)))
    }

    fn new_room(
        &self,
        request: &PairRequest,
        (prefill, decode): (&Member, &Member),
    ) -> Result<Arc<Room>> {
        let dp = request.dp.unwrap_or(prefill.view.registration.layout.at.dp);
        let id = self.issuer.issue(clock::now(), dp)?;
        let (p, d) = (prefill.address().clone(), decode.address().clone());
        let room = Room::new(id, request.tokens, p, d, self.aborts.clone());
        lock(&self.rooms).insert(id, Arc::clone(&room));
        Ok(room)
    }

    async fn try_pair(
        &self,
        room: Arc<Room>,
        (key, due): (IdempotencyKey, Instant),
        (prefill, decode): (&Member, &Member),
        wait: Duration,
    ) -> Result<Handoff> {
        // From here on the room may exist: if nobody takes it, it is aborted.
        let guard = Guard::new(room);
        let unclaimed_ms = self.ask_reserve(&guard.room, key, due, wait).await?;
        guard.room.hand_out();
        let now = clock::now();
        let mut recent = lock(&self.recent);
        for worker in [prefill, decode] {
            recent.add(now, &worker.key().identity);
        }
        Ok(Handoff {
            room: guard.room.id,
            prefill: Leg::from(&prefill.view.registration),
            decode: Leg::from(&decode.view.registration),
            unclaimed_ms,
            guard,
        })
    }

    /// Asks the decode worker, again with the same key while replies are lost.
    async fn ask_reserve(
        &self,
        room: &Room,
        key: IdempotencyKey,
        due: Instant,
        wait: Duration,
    ) -> Result<u64> {
        let left = due.saturating_duration_since(Instant::now());
        if left.is_zero() {
            room.end();
            return Err(Error::new(ErrorKind::DeadlineExceeded, "no time is left for the room"));
        }
        let wait = wait.min(left);
        let reserve = Reserve {
            key: wire_key(key, room.id),
            room: room.id,
            tokens: room.tokens,
            prefill: room.prefill.clone(),
            wait_ms: ms(wait),
            deadline_ms: ms(left),
        };
        let client = self.workers.client(&room.decode);
        let patience = left.min(wait + Duration::from_millis(self.cfg.call_ms));
        let mut lost = false;
        for tries in 1.. {
            let failure = match client.ask(Call::Reserve(reserve.clone()), patience).await {
                Ok(Reply::Reserved { room: named, unclaimed_ms }) if named == room.id => {
                    return Ok(unclaimed_ms);
                }
                Ok(_) => return Err(odd_reply(&room.decode, "reserve")),
                Err(failure) => failure,
            };
            lost |= matches!(failure, Failure::Lost(_));
            let refused = matches!(failure, Failure::Refused(_));
            if lost && !refused && tries < self.cfg.call_tries && Instant::now() < due {
                metrics::counter!("kvlane_coordinator_repeats_total").increment(1);
                tracing::debug!(room = %room.id, error = %failure, "reply lost, asking again");
                continue;
            }
            if refused || !lost {
                // It left no trace, so there is nothing to abort.
                room.end();
            }
            return Err(Error::from(failure).with("room", room.id).with("tries", tries));
        }
        Err(odd_reply(&room.decode, "reserve"))
    }

    /// Asks for a newer snapshot and waits for it a moment.
    async fn refresh(&self) -> bool {
        let mut views = self.view.subscribe();
        self.hurry.notify_one();
        let wait = Duration::from_millis(self.cfg.call_ms);
        tokio::time::timeout(wait, views.changed()).await.is_ok_and(|r| r.is_ok())
    }
}

/// The key as a worker sees it. A worker that still remembers an earlier room of the caller's key
/// (one that was given up) must not answer with that room.
fn wire_key(IdempotencyKey(mut key): IdempotencyKey, room: RoomId) -> IdempotencyKey {
    for (k, r) in key.iter_mut().zip(room.0.to_le_bytes()) {
        *k ^= r;
    }
    IdempotencyKey(key)
}

fn odd_reply(worker: &WorkerAddress, asked: &'static str) -> Error {
    Error::new(ErrorKind::Malformed, "the worker answered another question")
        .blamed(Blame::Decode)
        .with("worker", &worker.key)
        .with("asked", asked)
}

fn gone(worker: &WorkerAddress, e: &Error) -> HandoffOutcome {
    let why: Refusal = Error::new(ErrorKind::PeerLost, "the decode worker is gone, and its rooms")
        .blamed(Blame::Decode)
        .with("worker", &worker.key)
        .with("found", e)
        .hint("try the request again with another pair")
        .to_refusal();
    HandoffOutcome::failed(why)
}

impl std::fmt::Debug for Coordinator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Coordinator({} of {})", self.shared.cfg.identity, self.shared.cfg.service)
    }
}
