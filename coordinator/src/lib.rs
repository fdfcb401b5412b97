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
//! // Send the legs of every rank, with the room. If that fails, drop the hand-off, or abort it with
//! // a reason.
//! for leg in handoff.prefill.iter().chain(&handoff.decode) {
//!     println!("to {}: room {} with {:?}", leg.serving, handoff.room, leg.peers);
//! }
//! let room = handoff.detach();
//! match coordinator.await_outcome(room, Duration::from_secs(60)).await {
//!     HandoffOutcome::Done { bytes } => println!("{bytes} bytes"),
//!     other => println!("{other:?}"),
//! }
//! # Ok(()) }
//! ```
//!
//! Hand-offs are between *instances*: model servers with all their ranks. A room is charged at
//! every decode rank, or at none; it is done when it is done at each, and failed when it has failed
//! at one.
//!
//! Invariants: a room number is made only under a live lease, and never twice; only pairs of
//! complete instances are dispatched of which the prefill's ranks have all that each decode rank
//! needs; one idempotency key has one room while that room may live; a room that was asked for and
//! not handed out, or handed out and dropped, is aborted at every rank that may know of it.

mod ask;
mod each;
mod handoff;
mod instance;
mod issuer;
mod keeper;
mod view;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvlane_proto::ended::Memory;
use kvlane_proto::msg::service::WorkerAddress;
use kvlane_proto::{
    Blame, Error, ErrorKind, IdempotencyKey, Identity, Incarnation, Result, Retry, Role, RoomId,
    WorkerKey, limits,
};
use kvlane_transport::clock;
use kvlane_transport::quic::{Endpoint, EndpointConfig, Security};
use kvlane_transport::random::fill_random;
use kvlane_transport::rpc::{CallExchange, Client, Target};
use kvlane_transport::service_client::ServiceClient;
use kvlane_transport::wire::message::DURATION_MS_MAX;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use handoff::{AbortOrder, Guard, Room};
pub use handoff::{Handoff, HandoffOutcome, Leg};
use instance::Rank;
pub use instance::{Instance, SHAPES_MAX};
use issuer::Issuer;
use view::{Avoid, Candidates, Pair, Recent};
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
    /// Only the prefill instance that this worker is of.
    pub prefill: Option<Identity>,
    /// Only the decode instance that this worker is of.
    pub decode: Option<Identity>,
    /// The room is congruent to the first modulo the second, for servers that pick their
    /// data-parallel rank by it; the prefill instance's own place if not given.
    pub dp: Option<(u32, u32)>,
    /// Wait at most this long in the best decode instance's queues, if none takes it at once; with
    /// another prefill instance, for what is left of it.
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

    /// What the pair of instances of two workers is worth, as far as the snapshot knows.
    pub fn pair_score(&self, prefill: &Identity, decode: &Identity) -> PairScore {
        self.snapshot().pair_score(prefill, decode)
    }

    /// Reserves a room at every rank of the least loaded decode instance that has a prefill
    /// instance that fits.
    ///
    /// A lost reply is asked for again with the same key. Refused by one rank, the room is aborted
    /// at those that took it, and the request goes to the next instance; refused by all, it may
    /// wait in the best one's queues.
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
        let unclaimed_ms = self.shared.ask_reserve(&guard.room, key, due, request.wait).await?;
        Ok(Handoff::new(guard, unclaimed_ms))
    }

    async fn place(
        &self,
        request: &PairRequest,
        (key, due): (IdempotencyKey, Instant),
        pinned: &mut Option<Arc<Room>>,
    ) -> Result<Handoff> {
        let shared = &*self.shared;
        let turn = shared.turn.fetch_add(1, Ordering::Relaxed);
        let mut gone = Avoid::new();
        let mut candidates = self.candidates(request, &gone, turn);
        let mut refreshed = false;
        let mut wait_until = None;
        loop {
            let pairs = std::mem::take(&mut candidates.pairs);
            // At once with anybody first; then in the queue of the best that is merely busy.
            let mut busiest = None;
            let mut stale = false;
            let known_gone = gone.len();
            for pair in &pairs {
                if gone.contains_key(pair.prefill.lead()) {
                    continue;
                }
                let room = shared.new_room(request, pair)?;
                *pinned = Some(Arc::clone(&room));
                match shared.try_pair(room, (key, due), Duration::ZERO).await {
                    Ok(handoff) => return Ok(handoff),
                    Err(e) => {
                        stale |= matches!(
                            e.kind(),
                            ErrorKind::StaleIncarnation | ErrorKind::IdentityMismatch
                        );
                        if e.kind() == ErrorKind::Busy {
                            busiest.get_or_insert(pair);
                        }
                        if is_gone(&e) {
                            gone.insert(pair.prefill.lead().clone(), pair.prefill.label());
                        }
                        // The request itself is wrong: nobody else will take it.
                        if e.retry() == Retry::Never {
                            return Err(e.with("asked", pair.decode.label()));
                        }
                        candidates.refuse(e.kind(), format!("{}: {e}", pair.decode.label()));
                    }
                }
            }
            let waits = busiest.filter(|pair| !gone.contains_key(pair.prefill.lead()));
            // All queues together: a dead prefill does not begin the wait anew.
            let now = Instant::now();
            let wait = wait_until.get_or_insert(now + request.wait).saturating_duration_since(now);
            if let Some(pair) = waits
                && !wait.is_zero()
            {
                let room = shared.new_room(request, pair)?;
                *pinned = Some(Arc::clone(&room));
                let queue = shared.try_pair(room, (key, due), wait);
                // Its place in the queue is given up when the prefill turns out to be dead.
                let result = tokio::select! {
                    biased;
                    result = queue => result,
                    dead = shared.suspects(pair.prefill.who()) => Err(suspected(&dead)),
                };
                match result {
                    Ok(handoff) => return Ok(handoff),
                    Err(e) => {
                        if is_gone(&e) {
                            gone.insert(pair.prefill.lead().clone(), pair.prefill.label());
                        }
                        candidates.refuse_again(&pair.decode, &e);
                    }
                }
            }
            // With another prefill, the same decode instances may take it.
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

    fn candidates(&self, request: &PairRequest, avoid: &Avoid, turn: usize) -> Candidates {
        let mut recent = lock(&self.shared.recent);
        recent.expire(clock::now());
        let (prefill, decode) = (request.prefill.as_ref(), request.decode.as_ref());
        self.snapshot().candidates(prefill, decode, avoid, &recent, turn)
    }

    /// Waits for a room's end, at most so long.
    ///
    /// The decode ranks decide how a room ended, so all of them are asked. It is done when it is
    /// done at each; when it has failed at one, it is aborted everywhere else. A decode worker that
    /// has restarted or whose lease is over has taken its rooms with it: that is a failure of its
    /// leg. Once it has ended, the answer stays the same.
    pub async fn await_outcome(&self, room: RoomId, wait: Duration) -> HandoffOutcome {
        let shared = &*self.shared;
        let known = lock(&shared.rooms).get(&room).cloned();
        let Some(known) = known else {
            let e = Error::new(ErrorKind::NotFound, "no such room is known to this router")
                .with("room", room);
            return HandoffOutcome::Unknown { refusal: e.to_refusal() };
        };
        match known.outcome() {
            Some(outcome) => outcome,
            None => {
                let due = Instant::now() + wait.min(Duration::from_secs(24 * 3600));
                shared.ask_outcome(&known, due).await
            }
        }
    }

    /// Aborts a hand-off at every rank of both legs. Never waits; repeating it does nothing.
    pub fn abort(&self, handoff: &Handoff, reason: &str) {
        handoff.abort(reason);
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
    /// Waits until the view holds one of these for dead.
    async fn suspects(&self, ranks: &[Rank]) -> WorkerKey {
        let mut views = self.view.subscribe();
        let mut dead = None;
        let looked = views.wait_for(|view| {
            let gone = |key: &WorkerKey| {
                view.worker(&key.identity)
                    .is_none_or(|m| m.key() != key || !m.view.alive || m.view.suspected)
            };
            dead = ranks.iter().map(|r| &r.worker.key).find(|key| gone(key)).cloned();
            dead.is_some()
        });
        let ended = looked.await.is_err();
        match dead.filter(|_| !ended) {
            Some(key) => key,
            None => std::future::pending().await,
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
        let is = |asked: &Option<Identity>, ranks: &[Rank]| {
            asked.as_ref().is_none_or(|a| ranks.iter().any(|r| *a == r.worker.key.identity))
        };
        let lives = |view: &ClusterView| room.decode.iter().all(|r| view.is_alive(&r.worker.key));
        let over = room.is_over() || !lives(&self.view.borrow());
        if over && !room.was_handed_out() {
            return Ok(None);
        }
        let refused = |kind, what: &str| {
            Error::new(kind, what)
                .with("room", room.id)
                .with("decode", &room.decode[0].worker.key)
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

    fn new_room(&self, request: &PairRequest, pair: &Pair) -> Result<Arc<Room>> {
        let dp = request.dp.unwrap_or(pair.prefill.dp());
        let id = self.issuer.issue(clock::now(), dp)?;
        let room = Room::new(id, request.tokens, pair, self.aborts.clone());
        lock(&self.rooms).insert(id, Arc::clone(&room));
        Ok(room)
    }

    async fn try_pair(
        &self,
        room: Arc<Room>,
        (key, due): (IdempotencyKey, Instant),
        wait: Duration,
    ) -> Result<Handoff> {
        // From here on the room may exist: if nobody takes it, it is aborted.
        let guard = Guard::new(room);
        let room = &guard.room;
        let unclaimed_ms = self.ask_reserve(room, key, due, wait).await?;
        let now = clock::now();
        let mut recent = lock(&self.recent);
        for rank in room.prefill.iter().chain(&*room.decode) {
            recent.add(now, &rank.worker.key.identity);
        }
        drop(recent);
        Ok(Handoff::new(guard, unclaimed_ms))
    }

    /// Asks for a newer snapshot and waits for it a moment.
    async fn refresh(&self) -> bool {
        let mut views = self.view.subscribe();
        self.hurry.notify_one();
        let wait = Duration::from_millis(self.cfg.call_ms);
        tokio::time::timeout(wait, views.changed()).await.is_ok_and(|r| r.is_ok())
    }
}

impl std::fmt::Debug for Coordinator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Coordinator({} of {})", self.shared.cfg.identity, self.shared.cfg.service)
    }
}
