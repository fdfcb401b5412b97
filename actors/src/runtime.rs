//! A worker's thread: what is started, in which order, and what ends it.
//!
//! Owns: the actix system, the QUIC endpoint, the accept task, the registration task, and the end
//! of all of them. In: [`WorkerConfig`], stop. Out: the actor's address, [`WorkerEnd`].
//! Invariants: start either succeeds as a whole or leaves nothing behind; each task's end is
//! noticed here; after the end nothing lands any more.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use actix::prelude::*;
use kvlane_proto::lease::LeaseConfig;
use kvlane_proto::msg::service::{Load, Registration, WorkerAddress};
use kvlane_proto::{
    Error, ErrorKind, Identity, Incarnation, Refusal, Result, Role, WorkerKey, limits,
};
use kvlane_transport::engine::driver::EngineHandle;
use kvlane_transport::quic::{Endpoint, EndpointConfig, Security, Session};
use kvlane_transport::random::{fill_random, random};
use kvlane_transport::service_client::{RegistrationState, ServiceClient, keep_registered};
use tokio::sync::{oneshot, watch};

use crate::engine::{self, Commands, EngineChoice, Inbox};
use crate::pool::Pools;
use crate::tasks;

/// How a worker is set up.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// Who it is; with certificates, the same as theirs.
    pub identity: Identity,
    /// Certificates, or none.
    pub security: Security,
    /// Where its QUIC endpoint listens; port 0 takes a free one.
    pub listen: SocketAddr,
    /// `host:port` that others dial; `None` for the address it listens on, which then must not be
    /// unspecified.
    pub advertise: Option<String>,
    /// `host:port` of the bootstrap service; `None` to stay unregistered.
    pub service: Option<String>,
    /// Where its model server takes requests; told to routers.
    pub serving: String,
    /// Its KV pools.
    pub pools: Pools,
    /// Its data plane.
    pub engine: EngineChoice,
    /// Lanes of each link; the smaller of two workers' counts.
    pub lanes_per_link: u16,
    /// Lanes that a room borrows at this decode worker; with more than one, parts of a lost lane go
    /// to another at once.
    pub lanes_per_room: u16,
    /// Aim for the size of a part; the decode's word counts.
    pub part_bytes: u64,
    /// Longest life of a room.
    pub room_deadline_ms: u64,
    /// Makes a restarted worker at the same port end its old connections at once.
    pub reset_key: Option<[u8; 32]>,
}

impl WorkerConfig {
    /// A worker on loopback with the defaults, not registered anywhere.
    pub fn new(identity: Identity, security: Security, pools: Pools, engine: EngineChoice) -> Self {
        Self {
            identity,
            security,
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            advertise: None,
            service: None,
            serving: String::new(),
            pools,
            engine,
            lanes_per_link: limits::LANES_PER_LINK,
            lanes_per_room: limits::LANES_PER_ROOM,
            part_bytes: limits::PART_BYTES,
            room_deadline_ms: limits::ROOM_DEADLINE_MS,
            reset_key: None,
        }
    }
}

impl WorkerConfig {
    /// Refuses here what every peer would refuse.
    fn check(&self) -> Result<()> {
        let bad = |field, found: u64, expected: String| {
            Err(Error::new(ErrorKind::Config, format!("{field} is out of range"))
                .with("found", found)
                .with("expected", expected))
        };
        let (lanes, most) = (self.lanes_per_link, limits::LANES_PER_LINK_MAX);
        if lanes == 0 || lanes > most {
            return bad("lanes_per_link", lanes.into(), format!("1 to {most}"));
        }
        if self.lanes_per_room == 0 || self.lanes_per_room > lanes {
            return bad("lanes_per_room", self.lanes_per_room.into(), format!("1 to {lanes}"));
        }
        let (least, most) = (limits::PART_BYTES_MIN, limits::PART_BYTES_MAX);
        if self.part_bytes < least || self.part_bytes > most {
            return bad("part_bytes", self.part_bytes, format!("{least} to {most}"));
        }
        Ok(())
    }
}

/// Why a worker has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerEnd {
    /// It was told to.
    Stopped,
    /// Another start of the same worker has registered, or a defect; lent blocks are withheld.
    Failed(Refusal),
}

/// A session was accepted.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) struct SessionIn(pub(crate) Session);

/// The engine has events, or (`false`) has ended.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) struct EngineWake(pub(crate) bool);

/// End the worker.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) struct Stop(pub(crate) Refusal);

/// What an actor is made of.
pub(crate) struct Parts {
    pub(crate) config: WorkerConfig,
    pub(crate) endpoint: Endpoint,
    pub(crate) engine: Commands,
    pub(crate) caps: kvlane_transport::engine::Caps,
    pub(crate) inbox: Inbox,
    pub(crate) load: watch::Sender<Load>,
    pub(crate) fate: Fate,
    /// Dropped with the actor.
    pub(crate) alive: oneshot::Sender<()>,
    pub(crate) seed: u64,
}

/// Where an actor leaves the reason of its end.
#[derive(Clone, Default)]
pub(crate) struct Fate(Arc<Mutex<Option<WorkerEnd>>>);

impl Fate {
    pub(crate) fn set(&self, end: WorkerEnd) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(end);
    }
    fn take(&self) -> WorkerEnd {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone().unwrap_or_else(|| {
            WorkerEnd::Failed(Refusal::new(ErrorKind::Internal, "the worker's actor has ended"))
        })
    }
}

/// A running worker.
pub(crate) struct Running<A: Actor> {
    pub(crate) actor: Addr<A>,
    pub(crate) about: About,
}

/// What every handle knows.
#[derive(Clone)]
pub(crate) struct About {
    pub(crate) address: WorkerAddress,
    pub(crate) pools: Vec<kvlane_proto::Layout>,
    pub(crate) load: watch::Receiver<Load>,
    pub(crate) registration: watch::Receiver<RegistrationState>,
    pub(crate) end: watch::Receiver<Option<WorkerEnd>>,
    pub(crate) runtime: tokio::runtime::Handle,
}

impl About {
    /// Waits until the worker holds a lease at the service.
    pub(crate) async fn registered(&self, wait: Duration) -> Result<()> {
        let mut state = self.registration.clone();
        let held = state.wait_for(|s| matches!(s, RegistrationState::Registered(_)));
        match tokio::time::timeout(wait, held).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) => Err(Error::new(ErrorKind::Config, "the worker does not register")
                .hint("set the address of the bootstrap service")),
            Err(_) => Err(Error::new(ErrorKind::DeadlineExceeded, "not registered in time")
                .with("waited_ms", wait.as_millis())
                .with("worker", &self.address.key)
                .hint("check the address of the bootstrap service and the certificates")),
        }
    }
    /// Waits for the worker's end.
    pub(crate) async fn ended(&self) -> WorkerEnd {
        let mut end = self.end.clone();
        let ended = end.wait_for(Option::is_some).await.ok().and_then(|e| e.clone());
        ended.unwrap_or_else(|| {
            WorkerEnd::Failed(Refusal::new(ErrorKind::Internal, "the worker's thread has ended"))
        })
    }
}

/// Starts a worker on a thread of its own; returns when it listens.
pub(crate) fn start<A>(
    config: WorkerConfig,
    role: Role,
    make: impl FnOnce(Parts) -> A + Send + 'static,
) -> Result<Running<A>>
where
    A: Actor<Context = Context<A>> + Handler<SessionIn> + Handler<EngineWake> + Handler<Stop>,
{
    config.identity.check()?;
    if config.identity.role != role {
        return Err(Error::new(ErrorKind::Config, "a worker of another role")
            .with("found", &config.identity)
            .with("expected", role));
    }
    let (started, wait) = std::sync::mpsc::sync_channel(1);
    std::thread::Builder::new()
        .name(format!("kvlane-{role}"))
        .spawn(move || {
            let system = System::new();
            system.block_on(run(config, make, started));
        })
        .map_err(|e| Error::new(ErrorKind::Io, "cannot start the worker's thread").caused_by(e))?;
    wait.recv().unwrap_or_else(|_| {
        Err(Error::new(ErrorKind::Internal, "the worker's thread ended while it started"))
    })
}

async fn run<A>(
    config: WorkerConfig,
    make: impl FnOnce(Parts) -> A,
    started: std::sync::mpsc::SyncSender<Result<Running<A>>>,
) where
    A: Actor<Context = Context<A>> + Handler<SessionIn> + Handler<EngineWake> + Handler<Stop>,
{
    let fate = Fate::default();
    let (load, loads) = watch::channel(Load::default());
    let (alive, gone) = oneshot::channel();
    let (end, ended) = watch::channel(None);
    let (state, registration) = watch::channel(RegistrationState::default());
    let begun = begin(config, make, load, alive, fate.clone());
    let Begun { actor, endpoint, engine, record, service } = match begun {
        Ok(begun) => begun,
        Err(e) => {
            let _ = started.send(Err(e));
            return;
        }
    };
    let about = About {
        address: record.worker.clone(),
        pools: record.pools.clone(),
        load: loads.clone(),
        registration,
        end: ended,
        runtime: tokio::runtime::Handle::current(),
    };
    if started.send(Ok(Running { actor: actor.clone(), about })).is_err() {
        return;
    }
    tracing::info!(worker = %record.worker.key, address = %record.worker.address, "worker listens");
    let accepting = tasks::spawn(accept(endpoint.clone(), actor.clone()));
    let registering = service.map(|service| {
        let client = ServiceClient::new(endpoint.clone(), service);
        tasks::spawn(register(client, record, loads, state, actor.clone()))
    });
    tokio::select! {
        // The actor holds the other end: it has stopped, or has been unwound.
        _ = gone => {}
        _ = accepting => {
            let why = Refusal::new(ErrorKind::Internal, "the worker accepts no sessions any more");
            fate.set(WorkerEnd::Failed(why.clone()));
            let _ = actor.send(Stop(why)).await;
        }
    }
    // Whatever became of the actor: nothing lands once this has returned.
    engine.stop();
    let why = fate.take();
    match &why {
        WorkerEnd::Stopped => tracing::info!("worker has stopped"),
        WorkerEnd::Failed(why) => tracing::error!(%why, "worker has failed"),
    }
    if let Some(task) = registering {
        // The load's sender went with the actor, so the task says goodbye and ends.
        let _ = tokio::time::timeout(Duration::from_secs(1), task).await;
    }
    let _ = tokio::time::timeout(Duration::from_secs(2), endpoint.close("worker has ended")).await;
    end.send_replace(Some(why));
    System::current().stop();
}

struct Begun<A: Actor> {
    actor: Addr<A>,
    endpoint: Endpoint,
    engine: EngineHandle,
    record: Registration,
    service: Option<String>,
}

fn begin<A>(
    config: WorkerConfig,
    make: impl FnOnce(Parts) -> A,
    load: watch::Sender<Load>,
    alive: oneshot::Sender<()>,
    fate: Fate,
) -> Result<Begun<A>>
where
    A: Actor<Context = Context<A>> + Handler<SessionIn> + Handler<EngineWake>,
{
    config.check()?;
    let mut incarnation = [0; 16];
    fill_random(&mut incarnation)?;
    let key =
        WorkerKey { identity: config.identity.clone(), incarnation: Incarnation(incarnation) };
    let mut endpoint = EndpointConfig::new(config.listen, config.security.clone(), key.clone());
    endpoint.reset_key = config.reset_key;
    let endpoint = Endpoint::bind(endpoint)?;
    let address = match &config.advertise {
        Some(address) => address.clone(),
        None if endpoint.local_addr().ip().is_unspecified() => {
            return Err(Error::new(ErrorKind::Config, "no address that others could dial")
                .with("listen", endpoint.local_addr())
                .hint("give an address to advertise, or listen on one interface"));
        }
        None => endpoint.local_addr().to_string(),
    };
    let record = Registration {
        worker: WorkerAddress { key: key.clone(), address },
        pools: config.pools.layouts.to_vec(),
        pool_blocks: config.pools.maps.first().map_or(0, |m| m.blocks),
        engines: config.engine.names(),
        serving: config.serving.clone(),
        build: env!("CARGO_PKG_VERSION").to_string(),
    };
    record.check()?;
    // The engine starts before its actor can be addressed; what it says until then waits.
    let actor: Arc<OnceLock<Addr<A>>> = Arc::default();
    let to = actor.clone();
    let (engine, caps, inbox) = engine::start(&config.engine, &config.pools, move |more| {
        if let Some(actor) = to.get() {
            actor.do_send(EngineWake(more));
        }
    })?;
    let service = config.service.clone();
    let handle = engine.handle();
    let parts = Parts {
        config,

        endpoint: endpoint.clone(),
        engine,
        caps,
        inbox,
        load,
        fate,
        alive,
        seed: random(),
    };
    let addr = make(parts).start();
    let _ = actor.set(addr.clone());
    addr.do_send(EngineWake(true));
    Ok(Begun { actor: addr, endpoint, engine: handle, record, service })
}

async fn accept<A: Actor<Context = Context<A>> + Handler<SessionIn>>(
    endpoint: Endpoint,
    actor: Addr<A>,
) {
    while let Some(session) = endpoint.accept().await {
        if actor.send(SessionIn(session)).await.is_err() {
            return;
        }
    }
}

/// Keeps the worker registered. A task that panics is started again; another start of the same
/// worker ends this one.
async fn register<A: Actor<Context = Context<A>> + Handler<Stop>>(
    client: ServiceClient,
    record: Registration,
    loads: watch::Receiver<Load>,
    state: watch::Sender<RegistrationState>,
    actor: Addr<A>,
) {
    let state = Arc::new(state);
    loop {
        let end = tasks::spawn(keep_registered(
            client.clone(),
            record.clone(),
            LeaseConfig::default(),
            loads.clone(),
            state.clone(),
        ))
        .await;
        match end {
            Ok(Ok(())) => return,
            Ok(Err(e)) => {
                actor.do_send(Stop(e.to_refusal()));
                return;
            }
            Err(panicked) => {
                metrics::counter!("kvlane_task_restarts_total", "task" => "registration")
                    .increment(1);
                tracing::error!(error = %panicked, "registration has failed and starts again");
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    }
}
