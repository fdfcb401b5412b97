//! The decode worker: lends blocks to rooms and gives them back with the proof.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use actix::prelude::*;
use kvlane_proto::decode::{CallId, Decode, DecodeConfig, Event, Lend, Output};
use kvlane_proto::link::LinkConfig;
use kvlane_proto::msg::Purpose;
use kvlane_proto::msg::call::Call;
use kvlane_proto::msg::service::{Load, WorkerAddress};
use kvlane_proto::{
    Blame, BlockList, Error, ErrorKind, GrantId, Identity, Outcome, Result, Role, RoomId, Span,
    Time, WorkerKey,
};
use kvlane_transport::clock::now;
use kvlane_transport::engine::{Command, EngineEvent, FenceHow, FenceProof, OpenGrant, OpenSource};
use kvlane_transport::memory::{Lent, Quarantine};
use kvlane_transport::quic::Session;
use tokio::sync::oneshot;

use crate::handle::{WorkerHandle, gone};
use crate::links::News;
use crate::runtime::{self, Parts, WorkerConfig};
use crate::shell::{Shell, Side, Worker};
use crate::tasks;

/// The actor of a decode worker.
type DecodeActor = Worker<Rooms>;

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
        let running = runtime::start(config, Role::Decode, move |parts| actor(parts, ledger))?;
        let actor = running.actor.clone();
        Ok(DecodeHandle { actor, worker: WorkerHandle::new(running), ledger: mine })
    }
}

/// Blocks that the serving engine lends to a room.
#[derive(Clone, Debug)]
pub struct LendRequest {
    /// The room, reserved at this worker by a router, or any number with `prefills`.
    pub room: RoomId,
    /// Tokens of the prompt, and how many of them are here already.
    pub span: Span,
    /// For each pool, one block for each of its blocks in the span ([`Span::blocks`]); not touched
    /// until they come back.
    pub blocks: Vec<BlockList>,
    /// The prefill workers: every rank that has something for this one. Only needed where no router
    /// has reserved.
    pub prefills: Vec<WorkerAddress>,
    /// The room ends by then.
    pub deadline: Duration,
}

/// A decode worker as its serving engine sees it, and what every [`WorkerHandle`] can do.
#[derive(Clone)]
pub struct DecodeHandle {
    actor: Addr<DecodeActor>,
    worker: WorkerHandle,
    ledger: Arc<Quarantine>,
}

impl DecodeHandle {
    /// Lends blocks to a room.
    ///
    /// # Errors
    /// An error leaves the blocks with the caller: [`ErrorKind::InvalidPlan`] for a list that does
    /// not fit, [`ErrorKind::DuplicateRoom`], [`ErrorKind::RoomEnded`], [`ErrorKind::NotFound`] for
    /// a room that nobody reserved, [`ErrorKind::Busy`], [`ErrorKind::Draining`],
    /// [`ErrorKind::DeadlineExceeded`]. Except [`ErrorKind::Quarantined`]: the worker failed while
    /// it took them, and they must not be used again.
    ///
    /// # Cancellation
    /// Dropping the future is like an error if the worker has not taken the blocks, and like
    /// dropping the [`Filling`] if it has: then they end in [`DecodeHandle::quarantine`].
    pub async fn lend(&self, request: LendRequest) -> Result<Filling> {
        let claim = Claim::default();
        let room = request.room;
        // Whatever ends this early: if the worker has not begun, it never will.
        let _cancel = Cancel(claim.clone());
        match self.worker.asked(self.actor.send(LendIn(request, claim.clone()))).await {
            Ok(answer) => answer,
            Err(e) if claim.cancel() => Err(e),
            Err(e) => Err(Error::new(
                ErrorKind::Quarantined,
                "it is not known whether the blocks were lent",
            )
            .with("room", room)
            .caused_by(e)
            .hint("do not use them; restart the worker to get them back")),
        }
    }
    /// Ends a room from this side; the filling ends with the outcome. Unknown rooms are fine.
    ///
    /// # Errors
    /// If the worker has ended.
    pub async fn abort(&self, room: RoomId, why: &str) -> Result<()> {
        let why = why.to_string();
        self.worker.asked(self.actor.send(AbortIn { room, why })).await
    }
    /// Blocks that are withheld because their owner dropped them or nothing proves them quiet.
    pub fn quarantine(&self) -> &Quarantine {
        &self.ledger
    }
}

impl Deref for DecodeHandle {
    type Target = WorkerHandle;
    fn deref(&self) -> &WorkerHandle {
        &self.worker
    }
}

/// Whether blocks are the caller's or the worker's: decided once.
#[derive(Clone, Default)]
struct Claim(Arc<AtomicU8>);

impl Claim {
    const TAKEN: u8 = 1;
    const CANCELLED: u8 = 2;

    fn decide(&self, what: u8) -> bool {
        let now = self.0.compare_exchange(0, what, Ordering::AcqRel, Ordering::Acquire);
        now.is_ok() || now == Err(what)
    }
    /// The worker takes the blocks; false if the caller has gone.
    fn take(&self) -> bool {
        self.decide(Self::TAKEN)
    }
    /// The caller keeps the blocks; false if the worker has them.
    fn cancel(&self) -> bool {
        self.decide(Self::CANCELLED)
    }
}

struct Cancel(Claim);

impl Drop for Cancel {
    fn drop(&mut self) {
        self.0.cancel();
    }
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
    pub async fn into_blocks(self) -> Result<Vec<BlockList>> {
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
struct LendIn(LendRequest, Claim);

#[derive(Message)]
#[rtype(result = "()")]
struct AbortIn {
    room: RoomId,
    why: String,
}

#[derive(Message)]
#[rtype(result = "()")]
struct Dialled {
    peer: WorkerKey,
    session: Result<Session>,
}

/// The rooms of a decode worker, and the blocks that they hold.
pub(crate) struct Rooms {
    machine: Decode<FenceProof>,
    lent: HashMap<GrantId, (Lent, oneshot::Sender<Ending>)>,
    withheld: HashMap<GrantId, (Lent, oneshot::Sender<(Lent, FenceProof)>)>,
    /// The answer to the `Lend` event that is being handled.
    lending: Option<Result<GrantId>>,
    ledger: Arc<Quarantine>,
}

fn actor(parts: Parts, ledger: Arc<Quarantine>) -> DecodeActor {
    let config = &parts.config;
    let pools = config.pools.clone();
    let mut link = LinkConfig::new(pools.layouts.clone(), true);
    link.lanes = config.lanes_per_link;
    link.part_bytes = config.part_bytes;
    let mut machine = DecodeConfig::new(pools.layouts, pools.maps, parts.seed);
    machine.part_bytes = config.part_bytes;
    machine.lanes_per_room = config.lanes_per_room;
    machine.room_deadline_ms = config.room_deadline_ms;
    let rooms = Rooms {
        machine: Decode::new(machine),
        lent: HashMap::new(),
        withheld: HashMap::new(),
        lending: None,
        ledger,
    };
    Worker::new(parts, link, rooms)
}

impl Rooms {
    fn carry_out(
        &mut self,
        output: Output<FenceProof>,
        shell: &mut Shell,
        ctx: &mut Context<DecodeActor>,
    ) {
        shell.hooks.decode(&output);
        match output {
            Output::Connect(to) => dial(to, shell, ctx),
            Output::Send { link, msg } => {
                let news = shell.links.send(now(), link, msg);
                shell.news.extend(news);
            }
            Output::Reply { call, reply } => shell.calls.reply(call, reply),
            Output::Lent { grant, .. } => self.lending = Some(Ok(grant)),
            Output::LendRefused { why, .. } => {
                metrics::counter!("kvlane_lends_refused_total", "why" => why.kind().code())
                    .increment(1);
                self.lending = Some(Err(why));
            }
            Output::Open { grant, sources } => {
                let open = |(link, lanes, plan)| OpenSource { link, lanes, plan };
                let sources = sources.into_iter().map(open).collect();
                shell.engine.send(Command::Open(OpenGrant { grant, sources }));
            }
            Output::Fence { grant, how } => shell.engine.send(Command::Fence { grant, how }),
            Output::Ended { room, grant, outcome, proof, .. } => {
                self.ended(room, grant, outcome, proof);
            }
            Output::LateProof { grant, proof } => {
                if let Some((lent, to)) = self.withheld.remove(&grant) {
                    // Without anybody to take them the blocks stay in the ledger.
                    let _ = to.send((lent, proof));
                }
            }
        }
    }

    fn ended(&mut self, room: RoomId, grant: GrantId, outcome: Outcome, proof: Option<FenceProof>) {
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
                let (late, wait) = oneshot::channel();
                let mut lent = lent;
                lent.withhold();
                self.withheld.insert(grant, (lent, late));
                (None, Blocks::Withheld(wait))
            }
        };
        let _ = to.send(Ending { outcome, fenced, blocks });
    }
}

fn dial(to: WorkerAddress, shell: &Shell, ctx: &mut Context<DecodeActor>) {
    let endpoint = shell.endpoint.clone();
    let actor = ctx.address();
    let peer = to.key.clone();
    let dials = shell.dials.clone();
    let dialling = tasks::spawn(async move {
        // Routers name whom to dial: they get a few at a time. It is closed with the worker.
        let _dial = dials.acquire_owned().await;
        endpoint.dial(&to.address, Some(&to.key.identity), Purpose::Peer).await
    });
    tasks::spawn(async move {
        // A defect of the dial ends the dial, not the waiting for it.
        let session = dialling.await.unwrap_or_else(|e| {
            Err(Error::new(ErrorKind::Internal, "the dial has failed").caused_by(e))
        });
        let _ = actor.send(Dialled { peer, session }).await;
    });
}

impl Side for Rooms {
    fn step(&mut self, shell: &mut Shell, ctx: &mut Context<DecodeActor>) -> bool {
        let Some(output) = self.machine.poll_output() else { return false };
        self.carry_out(output, shell, ctx);
        true
    }
    fn news(&mut self, now: Time, shell: &mut Shell, news: News) {
        let event = match news {
            News::Up { link, peer, path, lanes, down, share, pools, .. } => {
                let rails = shell.links.rails();
                Event::LinkUp { link, peer, path, lanes, down, rails, share, pools }
            }
            News::Deliver { link, msg, .. } => {
                shell.hooks.heard(&msg);
                Event::Peer { link, msg }
            }
            News::Lost { link, was_up: true, why, .. } => Event::LinkDown { link, why },
            News::Lost { peer, why, .. } => Event::LinkFailed { peer: peer.identity, why },
        };
        self.machine.handle_event(now, event);
    }
    fn engine(&mut self, now: Time, shell: &mut Shell, event: EngineEvent) {
        let event = match event {
            EngineEvent::LaneUp { link, lane } => Event::LaneUp { link, lane },
            EngineEvent::LaneDown { link, lane, why } => Event::LaneDown { link, lane, why },
            EngineEvent::Arrived { link, grant, part, .. } => Event::Arrived { link, grant, part },
            EngineEvent::Fenced(proof) => Event::Fenced { grant: proof.grant(), proof },
            EngineEvent::FenceFailed { grant, why } => Event::FenceFailed { grant, why },
            // The shell's, or of the sender's side.
            _ => return,
        };
        shell.hooks.arrived(&event);
        self.machine.handle_event(now, event);
    }
    fn call(&mut self, now: Time, _: &mut Shell, call: CallId, from: Identity, body: Call) {
        self.machine.handle_event(now, Event::Call { call, from, body });
    }
    fn call_gone(&mut self, now: Time, call: CallId) {
        self.machine.handle_event(now, Event::CallGone(call));
    }
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
        let quarantined_blocks = self.ledger.blocks().min(u64::from(u32::MAX)) as u32;
        Load { quarantined_blocks, ..self.machine.load() }
    }
}

impl Handler<LendIn> for DecodeActor {
    type Result = Result<Filling>;
    fn handle(&mut self, msg: LendIn, ctx: &mut Context<Self>) -> Result<Filling> {
        let LendIn(request, claim) = msg;
        if !claim.take() {
            return Err(Error::new(ErrorKind::DeadlineExceeded, "the caller has gone")
                .with("room", request.room));
        }
        let LendRequest { room, span, blocks, prefills, deadline } = request;
        let deadline_ms = deadline.as_millis().min(u128::from(u64::MAX)) as u64;
        let list = blocks.clone();
        let lend = Lend { room, span, blocks, prefills, deadline_ms };
        let side = &mut self.side;
        side.machine.handle_event(now(), Event::Lend(lend));
        // The answer is the first output; the blocks are ours before anything else happens.
        side.lending = None;
        while side.lending.is_none() && side.step(&mut self.shell, ctx) {}
        let answer = match side.lending.take() {
            Some(Ok(grant)) => {
                let (to, end) = oneshot::channel();
                side.lent.insert(grant, (Lent::new(room, grant, list, &side.ledger), to));
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
        self.side.machine.handle_event(now(), Event::AbortLocal { room, why });
        self.drive(ctx);
    }
}

impl Handler<Dialled> for DecodeActor {
    type Result = ();
    fn handle(&mut self, Dialled { peer, session }: Dialled, ctx: &mut Context<Self>) {
        match session {
            Ok(session) => self.link(session, ctx),
            Err(e) => {
                let why = Error::new(ErrorKind::PeerLost, "the prefill worker cannot be reached")
                    .with("peer", &peer)
                    .caused_by(e)
                    .blamed(Blame::Prefill)
                    .hint("place the request with another prefill worker")
                    .to_refusal();
                self.side.machine.handle_event(now(), Event::DialFailed { peer, why });
                self.drive(ctx);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_the_callers_or_the_workers_never_both() {
        let claim = Claim::default();
        assert!(claim.take());
        assert!(!claim.cancel(), "the worker has them");
        let claim = Claim::default();
        drop(Cancel(claim.clone()));
        assert!(!claim.take(), "the caller has gone with them");
        assert!(claim.cancel(), "and stays the owner");
    }
}
