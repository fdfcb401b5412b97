//! The decode worker: lends blocks to rooms and gives them back with the proof.

use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use kvlane_proto::decode::{CallId, Decode, DecodeConfig, Event, Lend, Output};
use kvlane_proto::link::LinkConfig;
use kvlane_proto::msg::Purpose;
use kvlane_proto::msg::service::{Load, WorkerAddress};
use kvlane_proto::{
    BlockList, Error, ErrorKind, GrantId, Identity, Layout, Outcome, Refusal, Result, Role, RoomId,
    Span, Time,
};
use kvlane_transport::clock::now;
use kvlane_transport::engine::{Command, EngineEvent, FenceHow, FenceProof, OpenGrant, Pull};
use kvlane_transport::memory::{Lent, Quarantine};
use kvlane_transport::quic::{Endpoint, Session};
use tokio::sync::{Semaphore, oneshot, watch};

use crate::calls::{CallIn, Calls, CallsGone};
use crate::engine::{Commands, Inbox};
use crate::links::{LinkIn, Links, News};
use crate::runtime::{
    self, About, EngineWake, Fate, Parts, SessionIn, Stop, WorkerConfig, WorkerEnd,
};

/// Calls of one handle that may wait for the actor.
const CALLS_MAX: usize = 1024;
/// How long the actor may take to answer a call of its own process.
const CALL_MS: u64 = 5_000;

/// Starts decode workers.
#[derive(Debug)]
pub struct DecodeWorker;

impl DecodeWorker {
    /// Starts a worker on a thread of its own; returns when it listens.
    ///
    /// # Errors
    /// What of the configuration cannot be had, with the address, file or range.
    pub fn start(config: WorkerConfig) -> Result<DecodeHandle> {
        let ledger = Arc::new(Quarantine::default());
        let mine = ledger.clone();
        let running = runtime::start(config, Role::Decode, move |parts, ctx| {
            DecodeActor::new(parts, ledger, ctx)
        })?;
        Ok(DecodeHandle {
            actor: running.actor,
            about: running.about,
            room: Arc::new(Semaphore::new(CALLS_MAX)),
            ledger: mine,
        })
    }
}

/// Blocks that the serving engine lends to a room.
#[derive(Clone, Debug)]
pub struct LendRequest {
    /// The room, reserved at this worker by a router, or any number with `prefill`.
    pub room: RoomId,
    /// Tokens of the prompt, and how many of them are here already.
    pub span: Span,
    /// One block of the pool for each block of the span; not touched until they come back.
    pub blocks: BlockList,
    /// The prefill worker; only needed where no router has reserved.
    pub prefill: Option<WorkerAddress>,
    /// The room ends by then.
    pub deadline: Duration,
}

/// A decode worker as its serving engine sees it. Clones are cheap; async methods need a tokio
/// runtime, any.
#[derive(Clone)]
pub struct DecodeHandle {
    actor: Addr<DecodeActor>,
    about: About,
    room: Arc<Semaphore>,
    ledger: Arc<Quarantine>,
}

impl DecodeHandle {
    /// Lends blocks to a room.
    ///
    /// # Errors
    /// A refusal leaves the blocks with the caller: [`ErrorKind::InvalidPlan`] for a list that does
    /// not fit, [`ErrorKind::DuplicateRoom`], [`ErrorKind::RoomEnded`], [`ErrorKind::NotFound`] for
    /// a room that nobody reserved, [`ErrorKind::Busy`], [`ErrorKind::Draining`].
    pub async fn lend(&self, request: LendRequest) -> Result<Filling> {
        self.ask(LendIn(request)).await?
    }
    /// Ends a room from this side; the filling ends with the outcome. Unknown rooms are fine.
    ///
    /// # Errors
    /// If the worker has ended.
    pub async fn abort(&self, room: RoomId, why: &str) -> Result<()> {
        self.ask(AbortIn { room, why: why.to_string() }).await
    }
    /// Takes no new rooms from here on; rooms that have begun go on.
    ///
    /// # Errors
    /// If the worker has ended.
    pub async fn drain(&self) -> Result<()> {
        self.ask(Drain).await
    }
    /// Ends the worker. Rooms that still run are lost, and their blocks with them: drain first.
    pub async fn stop(&self) -> WorkerEnd {
        let why = Refusal::new(ErrorKind::Draining, "the decode worker stops");
        let _ = self.ask(Stop(why)).await;
        self.about.ended().await
    }
    /// Waits for the worker's end.
    pub async fn ended(&self) -> WorkerEnd {
        self.about.ended().await
    }
    /// Waits until the worker is registered at the service.
    ///
    /// # Errors
    /// [`ErrorKind::DeadlineExceeded`] after `wait`.
    pub async fn registered(&self, wait: Duration) -> Result<()> {
        self.about.registered(wait).await
    }
    /// Who this start of the worker is and where it listens.
    pub fn address(&self) -> &WorkerAddress {
        &self.about.address
    }
    /// Geometry of its pool.
    pub fn layout(&self) -> &Layout {
        &self.about.layout
    }
    /// How busy it is; O(1).
    pub fn load(&self) -> Load {
        *self.about.load.borrow()
    }
    /// Follows how busy it is.
    pub fn loads(&self) -> watch::Receiver<Load> {
        self.about.load.clone()
    }
    /// Blocks that are withheld because their owner dropped them or nothing proves them quiet.
    pub fn quarantine(&self) -> &Quarantine {
        &self.ledger
    }

    async fn ask<M>(&self, message: M) -> Result<M::Result>
    where
        M: Message + Send + 'static,
        M::Result: Send,
        DecodeActor: Handler<M>,
    {
        ask(&self.actor, &self.room, message).await
    }
}

/// Asks an actor, with a bound on how many ask at a time and a deadline.
pub(crate) async fn ask<A, M>(actor: &Addr<A>, room: &Semaphore, message: M) -> Result<M::Result>
where
    A: Actor<Context = Context<A>> + Handler<M>,
    M: Message + Send + 'static,
    M::Result: Send,
{
    let asked = async {
        let _permit = room.acquire().await.map_err(|_| gone())?;
        actor.send(message).await.map_err(|_| gone())
    };
    tokio::time::timeout(Duration::from_millis(CALL_MS), asked).await.unwrap_or_else(|_| {
        Err(Error::new(ErrorKind::DeadlineExceeded, "the worker did not answer in time")
            .with("limit_ms", CALL_MS))
    })
}

fn gone() -> Error {
    Error::new(ErrorKind::Internal, "the worker has ended")
        .hint("see why in `ended()`, and start it again")
}

/// A room that is being filled.
#[derive(Debug)]
pub struct Filling {
    room: RoomId,
    grant: GrantId,
    end: oneshot::Receiver<Ending>,
}

impl Filling {
    /// The room.
    pub fn room(&self) -> RoomId {
        self.room
    }
    /// Its grant.
    pub fn grant(&self) -> GrantId {
        self.grant
    }
    /// Waits for the end; the room's deadline bounds the wait. Dropping this instead leaves the
    /// blocks in quarantine once the room has ended.
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] if the worker ended by a defect; the blocks are withheld.
    pub async fn ended(self) -> Result<Ending> {
        self.end.await.map_err(|_| gone())
    }
    /// The end, if it has come; O(1).
    ///
    /// # Errors
    /// As [`Filling::ended`].
    pub fn poll(&mut self) -> Result<Option<Ending>> {
        match self.end.try_recv() {
            Ok(ending) => Ok(Some(ending)),
            Err(oneshot::error::TryRecvError::Empty) => Ok(None),
            Err(oneshot::error::TryRecvError::Closed) => Err(gone()),
        }
    }
}

/// How a room ended at the decode, with the way back for its blocks.
#[derive(Debug)]
#[must_use = "dropping this puts the blocks into quarantine"]
pub struct Ending {
    /// How.
    pub outcome: Outcome,
    /// How it was fenced; `None` if it could not be.
    pub fenced: Option<FenceHow>,
    blocks: Blocks,
}

#[derive(Debug)]
enum Blocks {
    Back(Lent, FenceProof),
    Withheld(oneshot::Receiver<(Lent, FenceProof)>),
}

impl Ending {
    /// The blocks, if a fence proves that nothing can land in them any more. Otherwise waits until
    /// it does: perhaps for ever, so do not hold up other rooms for it.
    ///
    /// # Errors
    /// [`ErrorKind::Quarantined`] if the proof will not come.
    pub async fn into_blocks(self) -> Result<BlockList> {
        let withheld =
            || Error::new(ErrorKind::Quarantined, "nothing proves that the blocks are quiet");
        let (lent, proof) = match self.blocks {
            Blocks::Back(lent, proof) => (lent, proof),
            Blocks::Withheld(late) => late.await.map_err(|_| withheld())?,
        };
        lent.give_back(proof).map_err(|(_, e)| e)
    }
    /// Whether the blocks can be had now.
    pub fn is_fenced(&self) -> bool {
        matches!(self.blocks, Blocks::Back(..))
    }
}

// ---- the actor ----------------------------------------------------------------------------

#[derive(Message)]
#[rtype(result = "Result<Filling>")]
struct LendIn(LendRequest);

#[derive(Message)]
#[rtype(result = "()")]
struct AbortIn {
    room: RoomId,
    why: String,
}

#[derive(Message)]
#[rtype(result = "()")]
struct Drain;

#[derive(Message)]
#[rtype(result = "()")]
struct Dialled {
    peer: Identity,
    session: Result<Session>,
}

/// The mailbox of a decode worker.
pub(crate) struct DecodeActor {
    machine: Decode<FenceProof>,
    links: Links,
    calls: Calls,
    engine: Rc<Commands>,
    inbox: Inbox,
    endpoint: Endpoint,
    lent: HashMap<GrantId, (Lent, oneshot::Sender<Ending>)>,
    withheld: HashMap<GrantId, (Lent, oneshot::Sender<(Lent, FenceProof)>)>,
    /// The answer to the `Lend` event that is being handled.
    lending: Option<Result<GrantId>>,
    ledger: Arc<Quarantine>,
    news: VecDeque<News>,
    load: watch::Sender<Load>,
    timer: Option<(Time, SpawnHandle)>,
    fate: Fate,
    _alive: oneshot::Sender<()>,
    #[cfg(feature = "fault-injection")]
    hooks: crate::faults::Hooks,
}

impl DecodeActor {
    fn new(parts: Parts, ledger: Arc<Quarantine>, _: &mut Context<Self>) -> Self {
        let Parts { config, endpoint, engine, caps, inbox, load, fate, alive, seed, .. } = parts;
        let engine = Rc::new(engine);
        let layout = config.pool.layout;
        let mut link = LinkConfig::new(layout.clone(), true);
        link.lanes = config.lanes_per_link;
        link.part_bytes = config.part_bytes;
        let mut machine = DecodeConfig::new(layout, config.pool.map, seed);
        machine.part_bytes = config.part_bytes;
        machine.room_deadline_ms = config.room_deadline_ms;
        Self {
            machine: Decode::new(machine),
            links: Links::new(link, engine.clone(), caps),
            calls: Calls::default(),
            engine,
            inbox,
            endpoint,
            lent: HashMap::new(),
            withheld: HashMap::new(),
            lending: None,
            ledger,
            news: VecDeque::new(),
            load,
            timer: None,
            fate,
            _alive: alive,
            #[cfg(feature = "fault-injection")]
            hooks: crate::faults::Hooks::default(),
        }
    }

    fn event(&mut self, event: Event<FenceProof>, ctx: &mut Context<Self>) {
        self.machine.handle_event(now(), event);
        self.drive(ctx);
    }

    /// Carries out what the machines want, until all of them are still.
    fn drive(&mut self, ctx: &mut Context<Self>) {
        loop {
            if let Some(output) = self.machine.poll_output() {
                self.carry_out(output, ctx);
                continue;
            }
            let Some(news) = self.news.pop_front() else { break };
            let now = now();
            match news {
                News::Up { link, peer, path, lanes, .. } => {
                    self.machine.handle_event(now, Event::LinkUp { link, peer, path, lanes });
                }
                News::Deliver { link, msg, .. } => {
                    #[cfg(feature = "fault-injection")]
                    self.hooks.heard(&msg);
                    self.machine.handle_event(now, Event::Peer { link, msg });
                }
                News::Lost { link, peer, was_up, why } => {
                    let event = if was_up {
                        Event::LinkDown { link, why }
                    } else {
                        Event::LinkFailed { peer: peer.identity, why }
                    };
                    self.machine.handle_event(now, event);
                    while let Some(output) = self.machine.poll_output() {
                        self.carry_out(output, ctx);
                    }
                    self.links.close_engine(link);
                }
            }
        }
        let load = self.machine.load();
        self.load.send_if_modified(|old| std::mem::replace(old, load) != load);
        self.arm(ctx);
    }

    fn carry_out(&mut self, output: Output<FenceProof>, ctx: &mut Context<Self>) {
        #[cfg(feature = "fault-injection")]
        self.hooks.decode(&output);
        match output {
            Output::Connect(to) => self.dial(to, ctx),
            Output::Send { link, msg } => {
                let news = self.links.send(now(), link, msg);
                self.news.extend(news);
            }
            Output::Reply { call, reply } => self.calls.reply(call, reply),
            Output::Lent { grant, .. } => self.lending = Some(Ok(grant)),
            Output::LendRefused { why, .. } => {
                metrics::counter!("kvlane_lends_refused_total", "why" => why.kind().code())
                    .increment(1);
                self.lending = Some(Err(why));
            }
            Output::Open { link, grant, lanes, plan } => {
                self.engine.send(Command::Open(OpenGrant { link, grant, lanes, plan }));
            }
            Output::Pull { link, serve, parts } => {
                self.engine.send(Command::Pull(Pull { link, serve, parts }));
            }
            Output::Fence { grant, how } => self.engine.send(Command::Fence { grant, how }),
            Output::Ended { room, grant, outcome, proof, withheld } => {
                self.ended(room, grant, outcome, proof, withheld);
            }
            Output::LateProof { grant, proof } => {
                if let Some((lent, to)) = self.withheld.remove(&grant) {
                    // Without anybody to take them the blocks stay in the ledger.
                    let _ = to.send((lent, proof));
                }
            }
        }
    }

    fn ended(
        &mut self,
        room: RoomId,
        grant: GrantId,
        outcome: Outcome,
        proof: Option<FenceProof>,
        withheld: bool,
    ) {
        let (result, bytes) = match &outcome {
            Outcome::Done { bytes } => ("done", *bytes),
            Outcome::Failed { why, bytes } => (why.kind.code(), *bytes),
            Outcome::Unknown { why } => (why.kind.code(), 0),
        };
        metrics::counter!("kvlane_rooms_ended_total", "role" => "decode", "result" => result)
            .increment(1);
        metrics::counter!("kvlane_received_bytes_total").increment(bytes);
        match outcome.why() {
            None => tracing::info!(room = room.0, bytes, "room is done"),
            Some(why) => tracing::info!(room = room.0, bytes, %why, "room has failed"),
        }
        let Some((lent, to)) = self.lent.remove(&grant) else { return };
        let (fenced, blocks) = match proof {
            Some(proof) => {
                let how = proof.how();
                let label = if how == FenceHow::Close { "close" } else { "revoke" };
                metrics::counter!("kvlane_fences_total", "how" => label).increment(1);
                (Some(how), Blocks::Back(lent, proof))
            }
            None => {
                debug_assert!(withheld, "lent blocks end with a proof or withheld");
                let (late, wait) = oneshot::channel();
                self.withheld.insert(grant, (lent, late));
                (None, Blocks::Withheld(wait))
            }
        };
        let _ = to.send(Ending { outcome, fenced, blocks });
    }

    fn dial(&self, to: WorkerAddress, ctx: &mut Context<Self>) {
        let endpoint = self.endpoint.clone();
        let actor = ctx.address();
        actix::spawn(async move {
            let peer = to.key.identity;
            let session = endpoint.dial(&to.address, Some(&peer), Purpose::Peer).await;
            let _ = actor.send(Dialled { peer, session }).await;
        });
    }

    fn engine_event(&mut self, event: EngineEvent) {
        let now = now();
        let event = match event {
            EngineEvent::Local { link, blob } => {
                let news = self.links.local(now, link, blob);
                return self.news.extend(news);
            }
            EngineEvent::LaneUp { link, lane } => {
                let news = self.links.lane(now, link, lane, true);
                self.news.extend(news);
                Event::LaneUp { link, lane }
            }
            EngineEvent::LaneDown { link, lane, why } => {
                tracing::warn!(link = link.0, lane = lane.0, %why, "lane is down");
                metrics::counter!("kvlane_lanes_lost_total", "role" => "decode").increment(1);
                let news = self.links.lane(now, link, lane, false);
                self.news.extend(news);
                Event::LaneDown { link, lane }
            }
            EngineEvent::Arrived { grant, part, .. } => Event::Arrived { grant, part },
            EngineEvent::PullStale { grant, .. } => Event::PullStale { grant },
            EngineEvent::Fenced(proof) => Event::Fenced { grant: proof.grant(), proof },
            EngineEvent::FenceFailed { grant, why } => Event::FenceFailed { grant, why },
            EngineEvent::Scrapped { bytes, why, .. } => {
                return tracing::debug!(bytes, %why, "frame read to scrap");
            }
            EngineEvent::Trouble(e) => return tracing::error!(error = %e, "engine"),
            // Of the sender's side.
            EngineEvent::Acked { .. } | EngineEvent::Nacked { .. } | EngineEvent::Quiesced(_) => {
                return;
            }
        };
        #[cfg(feature = "fault-injection")]
        self.hooks.arrived(&event);
        self.machine.handle_event(now, event);
    }

    fn arm(&mut self, ctx: &mut Context<Self>) {
        let mut next =
            [self.machine.poll_timeout(), self.links.next_timeout()].into_iter().flatten().min();
        if self.engine.flush() {
            let soon = now().plus_ms(1);
            next = Some(next.map_or(soon, |n| n.min(soon)));
        }
        if next == self.timer.map(|t| t.0) {
            return;
        }
        if let Some((_, old)) = self.timer.take() {
            ctx.cancel_future(old);
        }
        if let Some(at) = next {
            let wait = now().until(at);
            self.timer = Some((at, ctx.run_later(wait, Self::tick)));
        }
    }

    fn tick(&mut self, ctx: &mut Context<Self>) {
        self.timer = None;
        #[cfg(feature = "fault-injection")]
        if self.hooks.stopped() {
            return;
        }
        let now = now();
        self.machine.handle_timeout(now);
        let news = self.links.timeout(now);
        self.news.extend(news);
        self.drive(ctx);
    }

    #[cfg(feature = "fault-injection")]
    fn is_stopped(&self) -> bool {
        self.hooks.stopped()
    }
    #[cfg(not(feature = "fault-injection"))]
    #[allow(clippy::unused_self)]
    fn is_stopped(&self) -> bool {
        false
    }
}

impl Actor for DecodeActor {
    type Context = Context<Self>;
}

impl Handler<LendIn> for DecodeActor {
    type Result = Result<Filling>;
    fn handle(&mut self, LendIn(request): LendIn, ctx: &mut Context<Self>) -> Result<Filling> {
        let LendRequest { room, span, blocks, prefill, deadline } = request;
        let deadline_ms = deadline.as_millis().min(u128::from(u64::MAX)) as u64;
        let list = blocks.clone();
        let lend = Lend { room, span, blocks, prefill, deadline_ms };
        self.machine.handle_event(now(), Event::Lend(lend));
        // The answer is the first output; the blocks are ours before anything else happens.
        self.lending = None;
        while self.lending.is_none()
            && let Some(output) = self.machine.poll_output()
        {
            self.carry_out(output, ctx);
        }
        let answer = match self.lending.take() {
            Some(Ok(grant)) => {
                let (to, end) = oneshot::channel();
                self.lent.insert(grant, (Lent::new(room, grant, list, &self.ledger), to));
                Ok(Filling { room, grant, end })
            }
            Some(Err(e)) => Err(e),
            None => Err(Error::new(ErrorKind::Internal, "the machine did not answer")),
        };
        self.drive(ctx);
        answer
    }
}

impl Handler<AbortIn> for DecodeActor {
    type Result = ();
    fn handle(&mut self, AbortIn { room, why }: AbortIn, ctx: &mut Context<Self>) {
        self.event(Event::AbortLocal { room, why }, ctx);
    }
}

impl Handler<Drain> for DecodeActor {
    type Result = ();
    fn handle(&mut self, _: Drain, ctx: &mut Context<Self>) {
        self.event(Event::Drain, ctx);
    }
}

impl Handler<Stop> for DecodeActor {
    type Result = ();
    fn handle(&mut self, Stop(why): Stop, ctx: &mut Context<Self>) {
        let end = match why.kind {
            ErrorKind::Draining => WorkerEnd::Stopped,
            _ => WorkerEnd::Failed(why.clone()),
        };
        self.fate.set(end);
        self.links.bye(now(), &why);
        self.engine.stop();
        ctx.stop();
    }
}

impl Handler<SessionIn> for DecodeActor {
    type Result = ();
    fn handle(&mut self, SessionIn(session): SessionIn, ctx: &mut Context<Self>) {
        match session.purpose {
            Purpose::Call => self.calls.open(session, &ctx.address()),
            // The greeting lets nobody else in.
            Purpose::Peer | Purpose::Service => {}
        }
    }
}

impl Handler<Dialled> for DecodeActor {
    type Result = ();
    fn handle(&mut self, Dialled { peer, session }: Dialled, ctx: &mut Context<Self>) {
        match session {
            Ok(session) => {
                let news = self.links.open(now(), session, &ctx.address());
                self.news.extend(news);
                self.drive(ctx);
            }
            Err(e) => {
                let why = Error::new(ErrorKind::PeerLost, "the prefill worker cannot be reached")
                    .with("peer", &peer)
                    .caused_by(e)
                    .blamed(kvlane_proto::Blame::Prefill)
                    .hint("place the request with another prefill worker")
                    .to_refusal();
                self.event(Event::LinkFailed { peer, why }, ctx);
            }
        }
    }
}

impl Handler<LinkIn> for DecodeActor {
    type Result = ();
    fn handle(&mut self, LinkIn { link, event }: LinkIn, ctx: &mut Context<Self>) {
        if self.is_stopped() {
            return;
        }
        let news = self.links.handle(now(), link, event);
        self.news.extend(news);
        self.drive(ctx);
    }
}

impl Handler<CallIn> for DecodeActor {
    type Result = ();
    fn handle(&mut self, call: CallIn, ctx: &mut Context<Self>) {
        if self.is_stopped() {
            return;
        }
        let Some(id) = self.calls.enter(&call) else { return };
        let event = Event::Call { call: id, from: call.from, body: call.frame.call };
        self.event(event, ctx);
    }
}

impl Handler<CallsGone> for DecodeActor {
    type Result = ();
    fn handle(&mut self, gone: CallsGone, ctx: &mut Context<Self>) {
        let gone: Vec<CallId> = self.calls.gone(gone.session);
        for call in gone {
            self.event(Event::CallGone(call), ctx);
        }
    }
}

impl Handler<EngineWake> for DecodeActor {
    type Result = ();
    fn handle(&mut self, EngineWake(alive): EngineWake, ctx: &mut Context<Self>) {
        for event in self.inbox.take() {
            if self.is_stopped() {
                return;
            }
            self.engine_event(event);
        }
        self.drive(ctx);
        if !alive {
            let why = Refusal::new(ErrorKind::Internal, "the engine's thread has ended");
            self.fate.set(WorkerEnd::Failed(why));
            ctx.stop();
        }
    }
}
