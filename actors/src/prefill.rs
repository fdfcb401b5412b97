//! The prefill worker: sends the pages of rooms as they become ready.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use kvlane_proto::decode::CallId;
use kvlane_proto::link::LinkConfig;
use kvlane_proto::msg::Purpose;
use kvlane_proto::msg::call::{Call, Reply};
use kvlane_proto::msg::peer::Offer;
use kvlane_proto::msg::service::{Load, WorkerAddress};
use kvlane_proto::prefill::{Chunk, Event, Output, Prefill, PrefillConfig};
use kvlane_proto::{
    Blame, BlockList, Error, ErrorKind, Identity, Layout, Outcome, PartPages, Refusal, Result,
    Role, RoomId, Span, Time,
};
use kvlane_transport::clock::now;
use kvlane_transport::engine::{Command, EngineEvent, Post, Quiesced};
use tokio::sync::{Semaphore, oneshot, watch};

use crate::calls::{CallIn, Calls, CallsGone, not_here};
use crate::decode::ask;
use crate::engine::{Commands, Inbox};
use crate::links::{LinkIn, Links, News};
use crate::pool::Pool;
use crate::runtime::{
    self, About, EngineWake, Fate, Parts, SessionIn, Stop, WorkerConfig, WorkerEnd,
};

/// Calls of one handle that may wait for the actor.
const CALLS_MAX: usize = 1024;

/// Starts prefill workers.
#[derive(Debug)]
pub struct PrefillWorker;

impl PrefillWorker {
    /// Starts a worker on a thread of its own; returns when it listens.
    ///
    /// # Errors
    /// What of the configuration cannot be had, with the address, file or range.
    pub fn start(config: WorkerConfig) -> Result<PrefillHandle> {
        let retries = watch::Sender::new(0);
        let seen = retries.subscribe();
        let running = runtime::start(config, Role::Prefill, move |parts, _| {
            PrefillActor::new(parts, retries)
        })?;
        Ok(PrefillHandle {
            actor: running.actor,
            about: running.about,
            room: Arc::new(Semaphore::new(CALLS_MAX)),
            retries: seen,
        })
    }
}

/// When the pages of a chunk may be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
    /// Now: nobody writes them any more.
    Now,
    /// When this CUDA event has completed.
    Event(u64),
    /// When what is on this CUDA stream has completed.
    Stream(u64),
}

/// A request's prefill leg.
#[derive(Clone, Debug)]
pub struct AttachRequest {
    /// The room.
    pub room: RoomId,
    /// Tokens of the prompt.
    pub tokens: u32,
    /// The decode worker that may fetch it; any of the cluster if `None`.
    pub decode: Option<Identity>,
    /// The router that placed it, if the request names it: it may abort before the offer.
    pub issuer: Option<Identity>,
    /// The room ends by then.
    pub deadline: Duration,
}

/// Pages that have become ready.
#[derive(Clone, Debug)]
pub struct ChunkRequest {
    /// Tokens of the prompt, in order for each layer. The last block of a chunk that ends inside a
    /// block goes out with the chunk that completes it.
    pub tokens: Range<u32>,
    /// Layers of this rank.
    pub layers: Range<u32>,
    /// The blocks that hold `tokens`; not changed until [`Sending::released`].
    pub blocks: BlockList,
    /// When they may be read.
    pub ready: Ready,
}

/// A prefill worker as its serving engine sees it. Clones are cheap; async methods need a tokio
/// runtime, any.
#[derive(Clone)]
pub struct PrefillHandle {
    actor: Addr<PrefillActor>,
    about: About,
    room: Arc<Semaphore>,
    retries: watch::Receiver<u64>,
}

impl PrefillHandle {
    /// Takes the prefill leg of a room. The decode's offer may have come before or come later.
    ///
    /// # Errors
    /// [`ErrorKind::DuplicateRoom`], [`ErrorKind::RoomEnded`], [`ErrorKind::InvalidPlan`] where the
    /// legs disagree, [`ErrorKind::NeverFits`], [`ErrorKind::Busy`], [`ErrorKind::Draining`].
    pub async fn attach(&self, request: AttachRequest) -> Result<Sending> {
        let room = request.room;
        let ears = ask(&self.actor, &self.room, AttachIn(request)).await??;
        Ok(Sending { room, handle: self.clone(), ears })
    }
    /// Takes no new rooms from here on; rooms that have begun go on.
    ///
    /// # Errors
    /// If the worker has ended.
    pub async fn drain(&self) -> Result<()> {
        ask(&self.actor, &self.room, Drain).await
    }
    /// Ends the worker. Rooms that still run are lost: drain first.
    pub async fn stop(&self) -> WorkerEnd {
        let why =
            Refusal::new(ErrorKind::Draining, "the prefill worker stops").blamed(Blame::Prefill);
        let _ = ask(&self.actor, &self.room, Stop(why)).await;
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
    /// Parts that were sent again; O(1).
    pub fn retries(&self) -> u64 {
        *self.retries.borrow()
    }
}

/// What the actor tells one room's serving engine.
#[derive(Debug)]
struct Ears {
    granted: watch::Receiver<Option<Span>>,
    released: watch::Receiver<Option<Result<(), Refusal>>>,
    ended: watch::Receiver<Option<Outcome>>,
}

/// A room that is being sent.
#[derive(Debug)]
pub struct Sending {
    room: RoomId,
    handle: PrefillHandle,
    ears: Ears,
}

impl std::fmt::Debug for PrefillHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("PrefillHandle").field(&self.about.address.key).finish()
    }
}

impl Sending {
    /// The room.
    pub fn room(&self) -> RoomId {
        self.room
    }
    /// Waits for the decode's offer: what of the prompt it wants. Chunks may be sent before.
    ///
    /// # Errors
    /// Why the room ended without one; the room's deadline bounds the wait.
    pub async fn granted(&self) -> Result<Span> {
        let mut granted = self.ears.granted.clone();
        let mut ended = self.ears.ended.clone();
        tokio::select! {
            biased;
            span = granted.wait_for(Option::is_some) => span.ok().and_then(|s| *s).ok_or_else(gone),
            outcome = ended.wait_for(Option::is_some) => Err(match outcome {
                Ok(outcome) => match outcome.as_ref().and_then(Outcome::why) {
                    Some(why) => why.clone().into(),
                    None => Error::new(ErrorKind::RoomEnded, "the room ended without a grant"),
                },
                Err(_) => gone(),
            }),
        }
    }
    /// Declares pages ready.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidPlan`] for chunks out of order or blocks that do not fit; the room is as
    /// it was. [`ErrorKind::Config`] for readiness that no engine here can wait for.
    pub async fn send(&self, chunk: ChunkRequest) -> Result<()> {
        if let Ready::Event(_) | Ready::Stream(_) = chunk.ready {
            return Err(Error::new(ErrorKind::Config, "the engine cannot wait for a GPU")
                .with("ready", format!("{:?}", chunk.ready))
                .with("pool", "host memory")
                .hint("send with Ready::Now once the pages are written"));
        }
        let ChunkRequest { tokens, layers, blocks, .. } = chunk;
        let chunk = Chunk { room: self.room, tokens, layers, blocks };
        ask(&self.handle.actor, &self.handle.room, ChunkIn(chunk)).await?
    }
    /// Says that every page was declared. If some was not, the room fails as incomplete.
    ///
    /// # Errors
    /// If the worker has ended.
    pub async fn finish(&self) -> Result<()> {
        ask(&self.handle.actor, &self.handle.room, FinishIn(self.room)).await
    }
    /// Ends the room from this side.
    ///
    /// # Errors
    /// If the worker has ended.
    pub async fn abort(&self, why: &str) -> Result<()> {
        let why = why.to_string();
        ask(&self.handle.actor, &self.handle.room, AbortIn { room: self.room, why }).await
    }
    /// Waits until the source blocks may change: nothing that reads them is posted any more.
    ///
    /// # Errors
    /// [`ErrorKind::Quarantined`] if the engine does not become quiet: they may not be used again.
    pub async fn released(&self) -> Result<()> {
        let mut released = self.ears.released.clone();
        let end = released.wait_for(Option::is_some).await.map_err(|_| gone())?;
        match end.as_ref() {
            Some(Err(why)) => Err(why.clone().into()),
            _ => Ok(()),
        }
    }
    /// Waits for the end, as far as this side knows it.
    ///
    /// # Errors
    /// If the worker has ended.
    pub async fn ended(&self) -> Result<Outcome> {
        let mut ended = self.ears.ended.clone();
        let end = ended.wait_for(Option::is_some).await.map_err(|_| gone())?;
        end.clone().ok_or_else(gone)
    }
    /// The end, if it has come; O(1).
    pub fn poll(&self) -> Option<Outcome> {
        self.ears.ended.borrow().clone()
    }
}

fn gone() -> Error {
    Error::new(ErrorKind::Internal, "the worker has ended")
        .hint("see why in `ended()`, and start it again")
}

// ---- the actor ----------------------------------------------------------------------------

#[derive(Message)]
#[rtype(result = "Result<Ears>")]
struct AttachIn(AttachRequest);

#[derive(Message)]
#[rtype(result = "Result<()>")]
struct ChunkIn(Chunk);

#[derive(Message)]
#[rtype(result = "()")]
struct FinishIn(RoomId);

#[derive(Message)]
#[rtype(result = "()")]
struct AbortIn {
    room: RoomId,
    why: String,
}

#[derive(Message)]
#[rtype(result = "()")]
struct Drain;

struct Mouth {
    granted: watch::Sender<Option<Span>>,
    released: watch::Sender<Option<Result<(), Refusal>>>,
    ended: watch::Sender<Option<Outcome>>,
}

/// The mailbox of a prefill worker.
pub(crate) struct PrefillActor {
    machine: Prefill<Quiesced>,
    links: Links,
    calls: Calls,
    engine: Rc<Commands>,
    inbox: Inbox,
    pool: Pool,
    rooms: HashMap<RoomId, Mouth>,
    /// The answer to the event of the serving engine that is being handled.
    answer: Option<Result<()>>,
    news: VecDeque<News>,
    load: watch::Sender<Load>,
    retries: watch::Sender<u64>,
    timer: Option<(Time, SpawnHandle)>,
    fate: Fate,
    _alive: oneshot::Sender<()>,
    #[cfg(feature = "fault-injection")]
    hooks: crate::faults::Hooks,
}

impl PrefillActor {
    fn new(parts: Parts, retries: watch::Sender<u64>) -> Self {
        let Parts { config, engine, caps, inbox, load, fate, alive, seed, .. } = parts;
        let engine = Rc::new(engine);
        let pool = config.pool;
        let mut link = LinkConfig::new(pool.layout.clone(), false);
        link.lanes = config.lanes_per_link;
        let mut machine = PrefillConfig::new(pool.layout.clone(), pool.map.blocks, seed);
        machine.room_deadline_ms = config.room_deadline_ms;
        Self {
            machine: Prefill::new(machine),
            links: Links::new(link, engine.clone(), caps),
            calls: Calls::default(),
            engine,
            inbox,
            pool,
            rooms: HashMap::new(),
            answer: None,
            news: VecDeque::new(),
            load,
            retries,
            timer: None,
            fate,
            _alive: alive,
            #[cfg(feature = "fault-injection")]
            hooks: crate::faults::Hooks::default(),
        }
    }

    fn event(&mut self, event: Event<Quiesced>, ctx: &mut Context<Self>) {
        self.machine.handle_event(now(), event);
        self.drive(ctx);
    }

    /// Carries out what the machines want, until all of them are still.
    fn drive(&mut self, ctx: &mut Context<Self>) {
        loop {
            if let Some(output) = self.machine.poll_output() {
                self.carry_out(output);
                continue;
            }
            let Some(news) = self.news.pop_front() else { break };
            let now = now();
            match news {
                News::Up { link, peer, path, part_bytes, .. } => {
                    self.machine.handle_event(now, Event::LinkUp { link, peer, path, part_bytes });
                }
                News::Deliver { link, msg, echo_sent } => {
                    self.machine.handle_event(now, Event::Peer { link, msg, echo_sent });
                }
                News::Lost { link, why, .. } => {
                    self.machine.handle_event(now, Event::LinkDown { link, why });
                    while let Some(output) = self.machine.poll_output() {
                        self.carry_out(output);
                    }
                    self.links.close_engine(link);
                }
            }
        }
        let load = self.machine.load();
        self.load.send_if_modified(|old| std::mem::replace(old, load) != load);
        let retries = self.machine.retries();
        self.retries.send_if_modified(|old| std::mem::replace(old, retries) != retries);
        self.arm(ctx);
    }

    fn carry_out(&mut self, output: Output<Quiesced>) {
        #[cfg(feature = "fault-injection")]
        self.hooks.prefill(&output);
        match output {
            Output::Send { link, msg } => {
                let news = self.links.send(now(), link, msg);
                self.news.extend(news);
            }
            Output::Attached { .. } | Output::ChunkTaken { .. } => self.answer = Some(Ok(())),
            Output::Refused { why, .. } => {
                metrics::counter!("kvlane_legs_refused_total", "why" => why.kind().code())
                    .increment(1);
                self.answer = Some(Err(why));
            }
            Output::Granted { room, offer, .. } => self.granted(room, &offer),
            Output::Post { link, grant, part, lane, layers, ids } => {
                let map = self.pool.map.clone();
                match PartPages::of_source(&self.pool.layout, map, layers, ids) {
                    Ok(pages) => {
                        self.engine.send(Command::Post(Post { link, grant, part, lane, pages }));
                    }
                    // Chunks are checked when they are declared.
                    Err(e) => tracing::error!(error = %e, "a part names pages that are not there"),
                }
            }
            Output::ResetLane { link, lane } => {
                self.engine.send(Command::ResetLane { link, lane });
            }
            Output::Quiesce { link, grant } => self.engine.send(Command::Quiesce { link, grant }),
            // The proof has done its work: the room's source may change.
            Output::Released { room, proof: _ } => {
                if let Some(mouth) = self.rooms.get(&room) {
                    mouth.released.send_replace(Some(Ok(())));
                }
            }
            Output::Withheld { room, why } => {
                metrics::counter!("kvlane_sources_withheld_total").increment(1);
                tracing::error!(room = room.0, %why, "source blocks are withheld");
                if let Some(mouth) = self.rooms.get(&room) {
                    mouth.released.send_replace(Some(Err(why)));
                }
            }
            Output::Ended { room, outcome } => self.ended(room, outcome),
        }
    }

    fn granted(&mut self, room: RoomId, offer: &Offer) {
        if let Some(mouth) = self.rooms.get(&room) {
            mouth.granted.send_replace(Some(offer.span));
        }
    }

    fn ended(&mut self, room: RoomId, outcome: Outcome) {
        let result = outcome.why().map_or("done", |why| why.kind.code());
        metrics::counter!("kvlane_rooms_ended_total", "role" => "prefill", "result" => result)
            .increment(1);
        match outcome.why() {
            None => tracing::info!(room = room.0, "room is done"),
            Some(why) => tracing::info!(room = room.0, %why, "room has not been done"),
        }
        if let Some(mouth) = self.rooms.remove(&room) {
            mouth.ended.send_replace(Some(outcome));
        }
    }

    /// An event whose answer is its first output.
    fn asked(&mut self, event: Event<Quiesced>, ctx: &mut Context<Self>) -> Result<()> {
        self.answer = None;
        self.machine.handle_event(now(), event);
        self.drive(ctx);
        self.answer
            .take()
            .unwrap_or_else(|| Err(Error::new(ErrorKind::Internal, "the machine did not answer")))
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
                metrics::counter!("kvlane_lanes_lost_total", "role" => "prefill").increment(1);
                let news = self.links.lane(now, link, lane, false);
                self.news.extend(news);
                Event::LaneDown { link, lane }
            }
            EngineEvent::Acked { link, grant, part, lane } => {
                Event::Acked { link, grant, part, lane }
            }
            EngineEvent::Nacked { link, grant, part, lane, why } => {
                metrics::counter!("kvlane_parts_refused_total", "why" => why.kind.code())
                    .increment(1);
                Event::Nacked { link, grant, part, lane, why }
            }
            EngineEvent::Quiesced(proof) => {
                Event::Quiesced { link: proof.link(), grant: proof.grant(), proof }
            }
            EngineEvent::Trouble(e) => return tracing::error!(error = %e, "engine"),
            // Of the receiver's side.
            EngineEvent::Arrived { .. }
            | EngineEvent::PullStale { .. }
            | EngineEvent::Fenced(_)
            | EngineEvent::FenceFailed { .. }
            | EngineEvent::Scrapped { .. } => return,
        };
        #[cfg(feature = "fault-injection")]
        self.hooks.acked(&event);
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
        if self.is_stopped() {
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

    fn call(&mut self, call: CallId, from: &Identity, body: Call, ctx: &mut Context<Self>) {
        let reply = match body {
            Call::Ping => Ok(Reply::Pong),
            Call::Abort { room, reason } => match self.machine.may_abort(room, from) {
                Ok(()) => {
                    self.event(Event::AbortBy { from: from.clone(), room, reason }, ctx);
                    Ok(Reply::Aborting)
                }
                // It has ended, or its leg has not come: the decode, which was told too, decides.
                Err(e) if e.kind() == ErrorKind::NotFound => Ok(Reply::Aborting),
                Err(e) => Err(e.to_refusal()),
            },
            call @ (Call::Reserve(_) | Call::Await { .. }) => Err(not_here(&call)),
        };
        self.calls.reply(call, reply);
    }
}

impl Actor for PrefillActor {
    type Context = Context<Self>;
}

impl Handler<AttachIn> for PrefillActor {
    type Result = Result<Ears>;
    fn handle(&mut self, AttachIn(request): AttachIn, ctx: &mut Context<Self>) -> Result<Ears> {
        let AttachRequest { room, tokens, decode, issuer, deadline } = request;
        let deadline_ms = deadline.as_millis().min(u128::from(u64::MAX)) as u64;
        let (granted, g) = watch::channel(None);
        let (released, r) = watch::channel(None);
        let (ended, e) = watch::channel(None);
        // Whoever has the room already keeps it if this leg is refused.
        let before = self.rooms.insert(room, Mouth { granted, released, ended });
        let event = Event::Attach { room, tokens, decode, issuer, deadline_ms };
        match self.asked(event, ctx) {
            Ok(()) => Ok(Ears { granted: g, released: r, ended: e }),
            Err(why) => {
                match before {
                    Some(mouth) => self.rooms.insert(room, mouth),
                    None => self.rooms.remove(&room),
                };
                Err(why)
            }
        }
    }
}

impl Handler<ChunkIn> for PrefillActor {
    type Result = Result<()>;
    fn handle(&mut self, ChunkIn(chunk): ChunkIn, ctx: &mut Context<Self>) -> Result<()> {
        self.asked(Event::Chunk(chunk), ctx)
    }
}

impl Handler<FinishIn> for PrefillActor {
    type Result = ();
    fn handle(&mut self, FinishIn(room): FinishIn, ctx: &mut Context<Self>) {
        self.event(Event::Finish { room }, ctx);
    }
}

impl Handler<AbortIn> for PrefillActor {
    type Result = ();
    fn handle(&mut self, AbortIn { room, why }: AbortIn, ctx: &mut Context<Self>) {
        let why = Error::new(ErrorKind::Aborted, "the prefill's serving engine gave it up")
            .with("reason", why)
            .blamed(Blame::Prefill)
            .to_refusal();
        self.event(Event::AbortLocal { room, why }, ctx);
    }
}

impl Handler<Drain> for PrefillActor {
    type Result = ();
    fn handle(&mut self, _: Drain, ctx: &mut Context<Self>) {
        self.event(Event::Drain, ctx);
    }
}

impl Handler<Stop> for PrefillActor {
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

impl Handler<SessionIn> for PrefillActor {
    type Result = ();
    fn handle(&mut self, SessionIn(session): SessionIn, ctx: &mut Context<Self>) {
        match session.purpose {
            Purpose::Call => self.calls.open(session, &ctx.address()),
            Purpose::Peer => {
                let news = self.links.open(now(), session, &ctx.address());
                self.news.extend(news);
                self.drive(ctx);
            }
            // The greeting lets nobody else in.
            Purpose::Service => {}
        }
    }
}

impl Handler<LinkIn> for PrefillActor {
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

impl Handler<CallIn> for PrefillActor {
    type Result = ();
    fn handle(&mut self, call: CallIn, ctx: &mut Context<Self>) {
        if self.is_stopped() {
            return;
        }
        let Some(id) = self.calls.enter(&call) else { return };
        self.call(id, &call.from, call.frame.call, ctx);
    }
}

impl Handler<CallsGone> for PrefillActor {
    type Result = ();
    fn handle(&mut self, gone: CallsGone, _: &mut Context<Self>) {
        self.calls.gone(gone.session);
    }
}

impl Handler<EngineWake> for PrefillActor {
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
