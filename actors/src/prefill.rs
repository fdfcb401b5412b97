//! The prefill worker: sends the pages of rooms as they become ready.

use std::collections::HashMap;
use std::ops::{Deref, Range};
use std::time::Duration;

use actix::prelude::*;
use kvlane_proto::decode::CallId;
use kvlane_proto::link::LinkConfig;
use kvlane_proto::msg::call::{Call, Reply};
use kvlane_proto::msg::service::Load;
use kvlane_proto::prefill::{Chunk, Event, Output, Prefill, PrefillConfig, Takers};
use kvlane_proto::{
    Blame, BlockList, Error, ErrorKind, Identity, Outcome, Refusal, Result, Role, RoomId, Span,
    Time,
};
use kvlane_transport::clock::now;
use kvlane_transport::engine::{Command, EngineEvent, Post, Quiesced, SendGrant};
use tokio::sync::watch;

use crate::calls::not_here;
use crate::handle::{WorkerHandle, gone};
use crate::links::News;
use crate::runtime::{self, Parts, WorkerConfig};
use crate::shell::{Shell, Side, Worker};

/// The actor of a prefill worker.
type PrefillActor = Worker<Rooms>;

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
        let running = runtime::start(config, Role::Prefill, move |parts| actor(parts, retries))?;
        let actor = running.actor.clone();
        Ok(PrefillHandle { actor, worker: WorkerHandle::new(running), retries: seen })
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
    /// Who fetches it: every decode rank that has something to fetch from this rank.
    pub takers: Takers,
    /// The router that placed it, if the request names it: it may abort before the offer.
    pub issuer: Option<Identity>,
    /// The room ends by then.
    pub deadline: Duration,
}

/// Pages that have become ready.
#[derive(Clone, Debug)]
pub struct ChunkRequest {
    /// The pool; 0 for those with one.
    pub pool: u32,
    /// Tokens of the prompt, in order for each layer. The last block of a chunk that ends inside a
    /// block goes out with the chunk that completes it. The whole prompt where blocks are rows;
    /// where layers look at a window only, what is before it may be left out.
    pub tokens: Range<u32>,
    /// Layers of this rank's pool.
    pub layers: Range<u32>,
    /// The blocks that hold `tokens`, or the rows; not changed until [`Sending::released`].
    pub blocks: BlockList,
    /// When they may be read.
    pub ready: Ready,
}

/// A prefill worker as its serving engine sees it, and what every [`WorkerHandle`] can do.
#[derive(Clone, Debug)]
pub struct PrefillHandle {
    actor: Addr<PrefillActor>,
    worker: WorkerHandle,
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
        let ears = self.worker.asked(self.actor.send(AttachIn(request))).await??;
        Ok(Sending { room, handle: self.clone(), ears })
    }
    /// Parts that were sent again; O(1).
    pub fn retries(&self) -> u64 {
        *self.retries.borrow()
    }
}

impl Deref for PrefillHandle {
    type Target = WorkerHandle;
    fn deref(&self) -> &WorkerHandle {
        &self.worker
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

impl Sending {
    /// The room.
    pub fn room(&self) -> RoomId {
        self.room
    }
    /// Waits for the offers of all takers: what of the prompt any of them wants. Chunks may be sent
    /// before.
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
    /// it was. [`ErrorKind::RoomEnded`] if the room is over, perhaps done because nobody wants these
    /// pages: [`Sending::ended`] says. [`ErrorKind::Config`] for readiness that no engine here can wait
    /// for.
    pub async fn send(&self, chunk: ChunkRequest) -> Result<()> {
        if let Ready::Event(_) | Ready::Stream(_) = chunk.ready {
            return Err(Error::new(ErrorKind::Config, "the engine cannot wait for a GPU")
                .with("ready", format!("{:?}", chunk.ready))
                .with("pool", "host memory")
                .hint("send with Ready::Now once the pages are written"));
        }
        let ChunkRequest { pool, tokens, layers, blocks, .. } = chunk;
        let chunk = Chunk { room: self.room, pool, tokens, layers, blocks };
        self.handle.worker.asked(self.handle.actor.send(ChunkIn(chunk))).await?
    }
    /// Says that every page was declared. If some was not, the room fails as incomplete.
    ///
    /// # Errors
    /// If the worker has ended.
    pub async fn finish(&self) -> Result<()> {
        self.handle.worker.asked(self.handle.actor.send(FinishIn(self.room))).await
    }
    /// Ends the room from this side.
    ///
    /// # Errors
    /// If the worker has ended.
    pub async fn abort(&self, why: &str) -> Result<()> {
        let why = why.to_string();
        self.handle.worker.asked(self.handle.actor.send(AbortIn { room: self.room, why })).await
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

struct Mouth {
    granted: watch::Sender<Option<Span>>,
    released: watch::Sender<Option<Result<(), Refusal>>>,
    ended: watch::Sender<Option<Outcome>>,
}

/// The rooms of a prefill worker.
pub(crate) struct Rooms {
    machine: Prefill<Quiesced>,
    mouths: HashMap<RoomId, Mouth>,
    /// The answer to the event of the serving engine that is being handled.
    answer: Option<Result<()>>,
    retries: watch::Sender<u64>,
}

fn actor(parts: Parts, retries: watch::Sender<u64>) -> PrefillActor {
    let config = &parts.config;
    let pools = config.pools.clone();
    let mut link = LinkConfig::new(pools.layouts.clone(), false);
    link.lanes = config.lanes_per_link;
    let mut machine = PrefillConfig::new(pools.layouts, pools.maps, parts.seed);
    machine.room_deadline_ms = config.room_deadline_ms;
    let machine = Prefill::new(machine);
    let rooms = Rooms { machine, mouths: HashMap::new(), answer: None, retries };
    Worker::new(parts, link, rooms)
}

impl Rooms {
    fn carry_out(&mut self, output: Output<Quiesced>, shell: &mut Shell) {
        shell.hooks.prefill(&output);
        match output {
            Output::Send { link, msg } => {
                let news = shell.links.send(now(), link, msg);
                shell.news.extend(news);
            }
            Output::Attached { .. } | Output::ChunkTaken { .. } => self.answer = Some(Ok(())),
            Output::Refused { why, .. } => {
                metrics::counter!("kvlane_legs_refused_total", "why" => why.kind().code())
                    .increment(1);
                self.answer = Some(Err(why));
            }
            Output::Grant { link, grant, lanes, plan } => {
                shell.engine.send(Command::Grant(SendGrant { link, grant, lanes, plan }));
            }
            Output::Granted { room, wanted, .. } => {
                if let (Some(mouth), Some(_)) = (self.mouths.get(&room), wanted) {
                    mouth.granted.send_replace(wanted);
                }
            }
            Output::Post { link, grant, part, lane, pages } => {
                shell.engine.send(Command::Post(Post { link, grant, part, lane, pages }));
            }
            Output::ResetLane { link, lane } => {
                shell.engine.send(Command::ResetLane { link, lane });
            }
            Output::Quiesce { link, grant } => shell.engine.send(Command::Quiesce { link, grant }),
            // The proofs have done their work: the room's source may change.
            Output::Released { room, proofs: _ } => {
                if let Some(mouth) = self.mouths.get(&room) {
                    mouth.released.send_replace(Some(Ok(())));
                }
            }
            Output::Withheld { room, why } => {
                metrics::counter!("kvlane_sources_withheld_total").increment(1);
                tracing::error!(room = room.0, %why, "source blocks are withheld");
                if let Some(mouth) = self.mouths.get(&room) {
                    mouth.released.send_replace(Some(Err(why)));
                }
            }
            Output::Ended { room, outcome } => self.ended(room, outcome),
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
        if let Some(mouth) = self.mouths.remove(&room) {
            mouth.ended.send_replace(Some(outcome));
        }
    }
}

impl PrefillActor {
    /// An event whose answer is its first output.
    fn asked(&mut self, event: Event<Quiesced>, ctx: &mut Context<Self>) -> Result<()> {
        self.side.answer = None;
        self.side.machine.handle_event(now(), event);
        self.drive(ctx);
        self.side
            .answer
            .take()
            .unwrap_or_else(|| Err(Error::new(ErrorKind::Internal, "the machine did not answer")))
    }
}

impl Side for Rooms {
    fn step(&mut self, shell: &mut Shell, _: &mut Context<PrefillActor>) -> bool {
        let Some(output) = self.machine.poll_output() else { return false };
        self.carry_out(output, shell);
        true
    }
    fn news(&mut self, now: Time, _: &mut Shell, news: News) {
        let event = match news {
            News::Up { link, peer, path, part_bytes, share, pools, maps, since, down, .. } => {
                let down = down.into_iter().map(|(lane, _)| lane).collect();
                Event::LinkUp { link, peer, path, part_bytes, share, pools, maps, since, down }
            }
            News::Deliver { link, msg, echo_sent } => Event::Peer { link, msg, echo_sent },
            News::Lost { link, why, .. } => Event::LinkDown { link, why },
        };
        self.machine.handle_event(now, event);
    }
    fn engine(&mut self, now: Time, shell: &mut Shell, event: EngineEvent) {
        let event = match event {
            EngineEvent::LaneUp { link, lane } => Event::LaneUp { link, lane },
            EngineEvent::LaneDown { link, lane, .. } => Event::LaneDown { link, lane },
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
            // The shell's, or of the receiver's side.
            _ => return,
        };
        shell.hooks.acked(&event);
        self.machine.handle_event(now, event);
    }
    fn call(&mut self, now: Time, shell: &mut Shell, call: CallId, from: Identity, body: Call) {
        let reply = match body {
            Call::Ping => Ok(Reply::Pong),
            Call::Abort { room, reason } => match self.machine.may_abort(room, &from) {
                Ok(()) => {
                    self.machine.handle_event(now, Event::AbortBy { from, room, reason });
                    Ok(Reply::Aborting)
                }
                // It has ended, or its leg has not come: the decode, which was told too, decides.
                Err(e) if e.kind() == ErrorKind::NotFound => Ok(Reply::Aborting),
                Err(e) => Err(e.to_refusal()),
            },
            call @ (Call::Reserve(_) | Call::Await { .. }) => Err(not_here(&call)),
        };
        shell.calls.reply(call, reply);
    }
    // Nothing waits here: each call is answered at once.
    fn call_gone(&mut self, _: Time, _: CallId) {}
    fn drain(&mut self, now: Time) {
        self.machine.handle_event(now, Event::Drain);
    }
    fn handle_timeout(&mut self, now: Time) {
        self.machine.handle_timeout(now);
    }
    fn stood_still(&mut self, now: Time) {
        self.machine.stood_still(now);
    }
    fn poll_timeout(&self) -> Option<Time> {
        self.machine.poll_timeout()
    }
    fn load(&self) -> Load {
        let retries = self.machine.retries();
        self.retries.send_if_modified(|old| std::mem::replace(old, retries) != retries);
        self.machine.load()
    }
}

impl Handler<AttachIn> for PrefillActor {
    type Result = Result<Ears>;
    fn handle(&mut self, AttachIn(request): AttachIn, ctx: &mut Context<Self>) -> Result<Ears> {
        let AttachRequest { room, tokens, takers, issuer, deadline } = request;
        let deadline_ms = deadline.as_millis().min(u128::from(u64::MAX)) as u64;
        let (granted, g) = watch::channel(None);
        let (released, r) = watch::channel(None);
        let (ended, e) = watch::channel(None);
        // Whoever has the room already keeps it if this leg is refused.
        let before = self.side.mouths.insert(room, Mouth { granted, released, ended });
        let event = Event::Attach { room, tokens, takers, issuer, deadline_ms };
        match self.asked(event, ctx) {
            Ok(()) => Ok(Ears { granted: g, released: r, ended: e }),
            Err(why) => {
                match before {
                    Some(mouth) => self.side.mouths.insert(room, mouth),
                    None => self.side.mouths.remove(&room),
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
        self.side.machine.handle_event(now(), Event::Finish { room });
        self.drive(ctx);
    }
}

impl Handler<AbortIn> for PrefillActor {
    type Result = ();
    fn handle(&mut self, AbortIn { room, why }: AbortIn, ctx: &mut Context<Self>) {
        let why = Error::new(ErrorKind::Aborted, "the prefill's serving engine gave it up")
            .with("reason", why)
            .blamed(Blame::Prefill)
            .to_refusal();
        self.side.machine.handle_event(now(), Event::AbortLocal { room, why });
        self.drive(ctx);
    }
}
