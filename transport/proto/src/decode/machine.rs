//! The machine itself; see [`super`] for what it promises and for what goes in and out.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use super::{CallId, DecodeConfig, Event, Lend, Output};
use crate::blocks::BlockList;
use crate::ended::{Ended, Memory};
use crate::error::{Blame, Error, ErrorKind, Refusal, Result};
use crate::grants::FenceHow;
use crate::ids::{
    GrantId, IdempotencyKey, Identity, LaneId, LinkId, PartId, Role, RoomId, WorkerKey,
};
use crate::limits;
use crate::msg::call::{Call, Reply, Reserve};
use crate::msg::peer::{DataPath, Offer, Outcome, PeerMsg, Serve};
use crate::msg::service::{Load, WorkerAddress};
use crate::mutant::Mutant;
use crate::plan::{Grid, Plan, Span};
use crate::time::{Backoff, Time, grantor_ms};

#[cfg(test)]
#[path = "tests.rs"]
mod tests;

/// Blocks in a room's hands.
#[derive(Debug)]
struct Blocks {
    span: Span,
    list: BlockList,
    plan: Arc<Plan>,
    arrived: Parts,
}

/// Which parts are here: a set, never a count.
#[derive(Debug)]
struct Parts {
    bits: Vec<u64>,
    missing: u32,
    bytes: u64,
}

impl Parts {
    fn new(parts: u32) -> Self {
        Self { bits: vec![0; parts.div_ceil(64) as usize], missing: parts, bytes: 0 }
    }
    fn has(&self, part: PartId) -> bool {
        self.bits.get(part.0 as usize / 64).is_some_and(|w| w >> (part.0 % 64) & 1 == 1)
    }
    /// Whether the part is new.
    fn insert(&mut self, part: PartId, bytes: u64, counted: bool) -> bool {
        let Some(word) = self.bits.get_mut(part.0 as usize / 64) else { return false };
        let new = *word >> (part.0 % 64) & 1 == 0;
        *word |= 1 << (part.0 % 64);
        if new || counted {
            self.missing = self.missing.saturating_sub(1);
            self.bytes += bytes;
        }
        new
    }
}

#[derive(Debug)]
enum Phase {
    /// Waits for a link and lanes; leaves the queue at `until`.
    Queued { until: Time },
    /// Lanes are charged; the decode leg must come before `until`.
    Reserved { until: Time },
    /// The grant is open and offered.
    Granted(Granted),
    /// Everything arrived; the sender may still say that it is quiet, until `until`.
    Quieting { until: Time },
    /// Decided. The engine fences; blocks are withheld from `until` on.
    Fencing { outcome: Outcome, until: Time },
    /// Decided, and the sender's word is awaited until `until`; then this side revokes.
    Stopping { outcome: Outcome, until: Time },
    /// Over; told again and again until the prefill has heard it.
    Over { outcome: Outcome, resend: Backoff, forget: Time },
}

#[derive(Debug)]
struct Granted {
    acked: bool,
    resend: Backoff,
    renewed: Time,
    progress_since_renewal: bool,
    lease_until: Time,
}

#[derive(Debug)]
struct Room {
    issuer: Option<Identity>,
    key: Option<IdempotencyKey>,
    prefill: WorkerAddress,
    link: Option<LinkId>,
    lanes: Vec<LaneId>,
    reserve_calls: Vec<CallId>,
    watchers: Vec<(CallId, Time)>,
    blocks: Option<Blocks>,
    /// The grant of `blocks`, kept when they have gone back.
    grant: GrantId,
    deadline: Time,
    /// Parts that are missing by then will not come.
    incomplete_at: Option<Time>,
    /// The sender said that nothing more is posted, and whether nothing can land.
    quiesced: Option<bool>,
    /// A lane of the room was lost: the sender's word alone is not enough.
    dirty: bool,
    /// Numbers of the serves that were pulled: each is, once.
    serves: BTreeSet<u32>,
    phase: Phase,
    armed: Option<Time>,
}

#[derive(Debug)]
struct Peer {
    queue: VecDeque<RoomId>,
    connecting: bool,
    link: Option<LinkId>,
}

#[derive(Debug)]
struct Link {
    peer: WorkerKey,
    path: DataPath,
    lanes: Vec<Lane>,
    free: VecDeque<LaneId>,
}

#[derive(Debug)]
struct Lane {
    up: bool,
    borrower: Option<RoomId>,
    pair_epoch: u32,
}

/// What a fence that did not complete keeps from use.
#[derive(Debug)]
struct Withheld {
    blocks: u64,
    link: Option<LinkId>,
    lanes: Vec<LaneId>,
}

/// The machine.
#[derive(Debug)]
pub struct Decode<F> {
    config: DecodeConfig,
    next_grant: u64,
    rooms: HashMap<RoomId, Room>,
    by_grant: HashMap<GrantId, RoomId>,
    peers: BTreeMap<Identity, Peer>,
    links: HashMap<LinkId, Link>,
    timers: BTreeSet<(Time, RoomId)>,
    keys: Memory<IdempotencyKey, RoomId>,
    ended: Ended,
    /// Grants whose fence did not complete in time.
    quarantine: HashMap<GrantId, Withheld>,
    draining: bool,
    queued: usize,
    /// By issuer, so that none can fill the queue alone.
    queued_by: HashMap<Identity, usize>,
    /// Rooms in [`Phase::Over`].
    over: usize,
    /// Which room each waiting call is about.
    calls: HashMap<CallId, RoomId>,
    out: VecDeque<Output<F>>,
    /// Makes a false proof, for the machine without a fence.
    #[cfg(feature = "mutants")]
    pub forge: Option<fn(GrantId) -> F>,
}

impl<F> Decode<F> {
    /// A worker without rooms.
    pub fn new(config: DecodeConfig) -> Self {
        Self {
            next_grant: config.grant_base,
            config,
            rooms: HashMap::new(),
            by_grant: HashMap::new(),
            peers: BTreeMap::new(),
            links: HashMap::new(),
            timers: BTreeSet::new(),
            keys: Memory::new(limits::KEYS_MAX),
            ended: Ended::new(limits::TOMBSTONES_MAX),
            quarantine: HashMap::new(),
            draining: false,
            queued: 0,
            queued_by: HashMap::new(),
            over: 0,
            calls: HashMap::new(),
            out: VecDeque::new(),
            #[cfg(feature = "mutants")]
            forge: None,
        }
    }

    fn broken(&self, mutant: Mutant) -> bool {
        #[cfg(feature = "mutants")]
        return self.config.mutant == mutant;
        #[cfg(not(feature = "mutants"))]
        {
            let _ = mutant;
            false
        }
    }

    /// The next thing to do; call until it is `None` after every event and timeout.
    pub fn poll_output(&mut self) -> Option<Output<F>> {
        self.out.pop_front()
    }
    /// When to call [`Decode::handle_timeout`] next; ask again after every event.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.timers.first().map(|t| t.0)
    }
    /// How busy the worker is.
    pub fn load(&self) -> Load {
        Load {
            rooms: self.active() as u32,
            queued: self.queued as u32,
            free_lanes: self.links.values().map(|l| l.free.len() as u32).sum(),
            quarantined_blocks: self
                .quarantine
                .values()
                .map(|w| w.blocks)
                .sum::<u64>()
                .min(u64::from(u32::MAX)) as u32,
            draining: self.draining,
        }
    }
    /// Rooms that have not ended.
    pub fn active(&self) -> usize {
        self.rooms.len() - self.over
    }
    /// Lanes lent to rooms, as (link, lane, room); each lane stands here at most once.
    pub fn lent_lanes(&self) -> impl Iterator<Item = (LinkId, LaneId, RoomId)> + '_ {
        self.rooms.iter().flat_map(|(&id, r)| {
            r.link.into_iter().flat_map(move |l| r.lanes.iter().map(move |&lane| (l, lane, id)))
        })
    }

    /// This process stood still: what its engine was to do in the meantime has not had its time.
    pub fn stood_still(&mut self, now: Time) {
        let mut rooms: Vec<RoomId> = self.rooms.keys().copied().collect();
        rooms.sort_unstable();
        for room in rooms {
            if let Some(Phase::Fencing { until, .. }) =
                self.rooms.get_mut(&room).map(|r| &mut r.phase)
            {
                *until = now.plus_ms(self.config.fence_ms);
                self.rearm(room);
            }
        }
    }

    /// Takes one event.
    pub fn handle_event(&mut self, now: Time, event: Event<F>) {
        match event {
            Event::Call { call, from, body } => self.call(now, call, from, body),
            Event::CallGone(call) => self.call_gone(call),
            Event::Lend(lend) => self.lend(now, lend),
            Event::AbortLocal { room, why } => {
                let why = Error::new(ErrorKind::Aborted, "the decode's serving engine gave it up")
                    .with("reason", why)
                    .blamed(Blame::Decode);
                self.stop(now, room, why.to_refusal());
            }
            Event::LinkUp { link, peer, path, lanes } => self.link_up(now, link, peer, path, lanes),
            Event::LinkFailed { peer, why } => self.link_failed(now, &peer, &why),
            Event::LinkDown { link, why } => self.link_down(now, link, &why),
            Event::Peer { link, msg } => self.peer(now, link, msg),
            Event::Arrived { grant, part } => self.arrived(now, grant, part),
            Event::PullStale { grant } => {
                if let Some(&room) = self.by_grant.get(&grant) {
                    let why = Error::new(ErrorKind::Incomplete, "the prefill reused its pages")
                        .with("grant", grant);
                    self.stop(now, room, why.to_refusal());
                }
            }
            Event::LaneUp { link, lane } => self.lane_up(now, link, lane),
            Event::LaneDown { link, lane } => self.lane_down(link, lane),
            Event::Fenced { grant, proof } => self.fenced(now, grant, proof),
            Event::FenceFailed { grant, why } => self.withhold(now, grant, &why),
            Event::Drain => {
                self.draining = true;
                let queued: Vec<RoomId> =
                    self.peers.values().flat_map(|p| p.queue.iter().copied()).collect();
                for room in queued {
                    self.stop(now, room, self.draining_refusal());
                }
            }
        }
    }

    /// Does what is due. Harmless at any time.
    pub fn handle_timeout(&mut self, now: Time) {
        while let Some(&(at, room)) = self.timers.first() {
            if at > now {
                break;
            }
            self.timers.pop_first();
            if let Some(r) = self.rooms.get_mut(&room) {
                r.armed = None;
            }
            self.tick(now, room);
            self.rearm(room);
        }
    }

    // ---- requests -------------------------------------------------------------------------

    fn call(&mut self, now: Time, call: CallId, from: Identity, body: Call) {
        let reply = match body {
            Call::Ping => Ok(Reply::Pong),
            Call::Reserve(reserve) => match self.reserve(now, call, &from, reserve) {
                Ok(None) => return,
                Ok(Some(reply)) => Ok(reply),
                Err(e) => Err(e.to_refusal()),
            },
            Call::Abort { room, reason } => {
                self.abort(now, &from, room, &reason).map_err(|e| e.to_refusal())
            }
            Call::Await { room, wait_ms } => match self.watch(now, call, room, wait_ms) {
                Ok(None) => return,
                Ok(Some(reply)) => Ok(reply),
                Err(e) => Err(e.to_refusal()),
            },
        };
        self.reply(call, reply);
    }

    fn reply(&mut self, call: CallId, reply: Result<Reply, Refusal>) {
        self.calls.remove(&call);
        self.out.push_back(Output::Reply { call, reply });
    }

    fn reserve(
        &mut self,
        now: Time,
        call: CallId,
        from: &Identity,
        reserve: Reserve,
    ) -> Result<Option<Reply>> {
        if !matches!(from.role, Role::Router | Role::Admin) {
            return Err(
                Error::new(ErrorKind::Unauthorized, "only routers reserve").with("caller", from)
            );
        }
        // The key first: a lost answer must not be charged twice.
        if let Some(&room) = self.keys.get(&reserve.key) {
            if let Some(r) = self.rooms.get_mut(&room) {
                let same = r.issuer.as_ref() == Some(from) && r.key == Some(reserve.key);
                if !same {
                    return Err(Error::new(
                        ErrorKind::DuplicateRoom,
                        "the idempotency key is another caller's",
                    )
                    .with("room", room)
                    .with("caller", from)
                    .with("holder", r.issuer.as_ref().map_or("none".into(), ToString::to_string))
                    .hint("make keys at random, 16 bytes"));
                }
                return match &r.phase {
                    Phase::Queued { .. } => {
                        if r.reserve_calls.len() >= limits::WATCHERS_PER_ROOM_MAX {
                            return Err(Error::new(ErrorKind::Busy, "asked too often for one key"));
                        }
                        r.reserve_calls.push(call);
                        self.calls.insert(call, room);
                        Ok(None)
                    }
                    Phase::Over { .. } => Err(self.ended_error(room)),
                    _ => Ok(Some(Reply::Reserved { room, unclaimed_ms: self.config.unclaimed_ms })),
                };
            }
            if self.ended.is_over(room, Some(from)) {
                return Err(self.ended_error(room));
            }
            // It was refused, which left nothing behind: this is a new request.
        }
        reserve.prefill.check()?;
        let blocks = self.config.layout.blocks_for(reserve.tokens);
        if blocks > self.config.map.blocks || blocks > limits::BLOCKS_PER_ROOM_MAX {
            return Err(Error::new(ErrorKind::NeverFits, "the room has more blocks than the pool")
                .with("tokens", reserve.tokens)
                .with("blocks", blocks)
                .with("pool_blocks", self.config.map.blocks.min(limits::BLOCKS_PER_ROOM_MAX))
                .hint("send shorter prompts to this worker or give it a larger pool"));
        }
        self.admit(reserve.room, Some(from), &reserve.prefill)?;
        let deadline = now.plus_ms(reserve.deadline_ms.min(self.config.room_deadline_ms));
        let until = now.plus_ms(reserve.wait_ms).min(deadline);
        let room = reserve.room;
        self.calls.insert(call, room);
        self.keys.insert(reserve.key, room);
        self.rooms.insert(
            room,
            Room {
                issuer: Some(from.clone()),
                key: Some(reserve.key),
                reserve_calls: vec![call],
                ..Room::new(reserve.prefill, deadline, Phase::Queued { until })
            },
        );
        self.enqueue(now, room);
        Ok(None)
    }

    /// Whether a new room may start; changes nothing.
    fn admit(&self, room: RoomId, from: Option<&Identity>, prefill: &WorkerAddress) -> Result<()> {
        if room > RoomId::MAX {
            return Err(
                Error::new(ErrorKind::Malformed, "room number exceeds 2^63-1").with("room", room)
            );
        }
        if self.rooms.contains_key(&room) {
            return Err(Error::new(ErrorKind::DuplicateRoom, "the room exists already")
                .with("room", room)
                .hint("room numbers are used once; issue them from a leased slot"));
        }
        if self.ended.is_over(room, from) {
            return Err(self.ended_error(room));
        }
        if self.draining {
            return Err(self.draining_refusal().into());
        }
        if prefill.key.identity.role != Role::Prefill {
            return Err(Error::new(ErrorKind::Malformed, "the sender is not a prefill worker")
                .with("found", &prefill.key.identity));
        }
        if self.rooms.len() >= self.config.rooms_max || self.queued >= self.config.queue_max {
            return Err(Error::new(ErrorKind::Busy, "the decode worker is full")
                .with("rooms", self.rooms.len())
                .with("rooms_max", self.config.rooms_max)
                .with("queued", self.queued)
                .with("queue_max", self.config.queue_max)
                .hint("try again after a pause, or use another decode worker"));
        }
        let own = from.and_then(|from| self.queued_by.get(from)).copied().unwrap_or(0);
        let share = (self.config.queue_max / limits::QUEUE_SHARES).max(1);
        if own >= share {
            return Err(Error::new(
                ErrorKind::Busy,
                "too many rooms of this router wait for lanes",
            )
            .with("queued", own)
            .with("share", share)
            .hint("try again after a pause, or use another decode worker"));
        }
        if let Some(link) = self.link_of(&prefill.key.identity) {
            let lanes = link.lanes.len();
            if usize::from(self.config.lanes_per_room) > lanes {
                return Err(self.never_fits(lanes));
            }
            if link.peer.incarnation != prefill.key.incarnation {
                return Err(self.stale(&prefill.key, &link.peer));
            }
        }
        Ok(())
    }

    fn never_fits(&self, lanes: usize) -> Error {
        Error::new(ErrorKind::NeverFits, "a room borrows more lanes than the link has")
            .with("lanes_per_room", self.config.lanes_per_room)
            .with("lanes", lanes)
            .hint("lower lanes_per_room or raise lanes_per_link")
    }
    fn stale(&self, asked: &WorkerKey, found: &WorkerKey) -> Error {
        Error::new(
            ErrorKind::StaleIncarnation,
            "the link is to another start of the prefill worker",
        )
        .with("asked", asked)
        .with("linked", found)
        .blamed(Blame::Prefill)
        .hint(
            "if the one asked for is the older, refresh the view of the cluster; if it is the \
                 newer, this worker notices within two heartbeats: place the request again",
        )
    }
    fn draining_refusal(&self) -> Refusal {
        Error::new(ErrorKind::Draining, "the decode worker takes no new rooms")
            .hint("use another decode worker")
            .to_refusal()
    }
    fn ended_error(&self, room: RoomId) -> Error {
        let outcome = match self.rooms.get(&room).map(|r| &r.phase) {
            Some(Phase::Over { outcome, .. }) => Some(outcome),
            _ => self.ended.outcome(room),
        };
        Error::new(ErrorKind::RoomEnded, "the room has ended")
            .with("room", room)
            .with("outcome", outcome.map_or("forgotten".into(), ToString::to_string))
    }

    fn abort(&mut self, now: Time, from: &Identity, room: RoomId, reason: &str) -> Result<Reply> {
        if !matches!(from.role, Role::Router | Role::Admin) {
            return Err(Error::new(ErrorKind::Unauthorized, "only routers and admins abort")
                .with("caller", from));
        }
        let why = Error::new(ErrorKind::Aborted, "aborted by its router")
            .with("by", from)
            .with("reason", reason.chars().take(200).collect::<String>())
            .to_refusal();
        let Some(r) = self.rooms.get(&room) else {
            if let Some(outcome) = self.ended.outcome(room) {
                return Ok(Reply::Ended(outcome.clone()));
            }
            // It may have overtaken the reservation.
            self.ended.aborted_before(room, from.clone(), Outcome::Failed { why, bytes: 0 });
            return Ok(Reply::Aborting);
        };
        if from.role != Role::Admin && r.issuer.as_ref() != Some(from) {
            return Err(Error::new(ErrorKind::Unauthorized, "the room is another router's")
                .with("caller", from)
                .with("issuer", r.issuer.as_ref().map_or("none".into(), ToString::to_string)));
        }
        if let Phase::Over { outcome, .. } = &r.phase {
            return Ok(Reply::Ended(outcome.clone()));
        }
        self.stop(now, room, why);
        Ok(Reply::Aborting)
    }

    fn watch(
        &mut self,
        now: Time,
        call: CallId,
        room: RoomId,
        wait_ms: u64,
    ) -> Result<Option<Reply>> {
        if let Some(outcome) = self.ended.outcome(room) {
            return Ok(Some(Reply::Ended(outcome.clone())));
        }
        let Some(r) = self.rooms.get_mut(&room) else {
            return Err(Error::new(ErrorKind::NotFound, "no such room")
                .with("room", room)
                .with("rooms", self.rooms.len())
                .hint("reserve it first; rooms that ended long ago are forgotten"));
        };
        if let Phase::Over { outcome, .. } = &r.phase {
            return Ok(Some(Reply::Ended(outcome.clone())));
        }
        if r.watchers.len() >= limits::WATCHERS_PER_ROOM_MAX {
            return Err(Error::new(ErrorKind::Busy, "too many wait for this room")
                .with("limit", limits::WATCHERS_PER_ROOM_MAX));
        }
        r.watchers.push((call, now.plus_ms(wait_ms)));
        self.calls.insert(call, room);
        self.rearm(room);
        Ok(None)
    }

    fn call_gone(&mut self, call: CallId) {
        let room = self.calls.remove(&call);
        if let Some(r) = room.and_then(|room| self.rooms.get_mut(&room)) {
            r.watchers.retain(|w| w.0 != call);
            r.reserve_calls.retain(|c| *c != call);
        }
    }

    fn lend(&mut self, now: Time, lend: Lend) {
        let room = lend.room;
        match self.try_lend(now, lend) {
            Ok(grant) => {
                self.out.push_back(Output::Lent { room, grant });
                // A new room joins the queue; a charged one starts.
                match self.rooms.get(&room).map(|r| &r.phase) {
                    Some(Phase::Reserved { .. }) => self.grant(now, room),
                    Some(Phase::Queued { .. }) if !self.is_queued(room) => {
                        self.enqueue(now, room);
                    }
                    _ => {}
                }
                self.rearm(room);
            }
            Err(why) => self.out.push_back(Output::LendRefused { room, why }),
        }
    }

    fn is_queued(&self, room: RoomId) -> bool {
        self.rooms.get(&room).is_some_and(|r| {
            self.peers.get(&r.prefill.key.identity).is_some_and(|p| p.queue.contains(&room))
        })
    }

    fn try_lend(&mut self, now: Time, lend: Lend) -> Result<GrantId> {
        let range = lend.span.blocks(&self.config.layout)?;
        let grid = Grid::new(&self.config.layout, range.end - range.start, self.config.part_bytes)?;
        let map = self.config.map.clone();
        let plan = Arc::new(Plan::new(grid, &self.config.layout, map, &lend.blocks)?);
        match self.rooms.get(&lend.room) {
            Some(r) if r.blocks.is_some() => {
                return Err(Error::new(ErrorKind::DuplicateRoom, "blocks are lent to it already")
                    .with("room", lend.room));
            }
            Some(r) if matches!(r.phase, Phase::Over { .. }) => {
                return Err(self.ended_error(lend.room));
            }
            Some(r) if !matches!(r.phase, Phase::Queued { .. } | Phase::Reserved { .. }) => {
                return Err(
                    Error::new(ErrorKind::RoomEnded, "the room is ending").with("room", lend.room)
                );
            }
            Some(r) => {
                if let Some(p) = &lend.prefill
                    && p.key != r.prefill.key
                {
                    return Err(Error::new(ErrorKind::Malformed, "reserved for another prefill")
                        .with("reserved", &r.prefill.key)
                        .with("found", &p.key));
                }
            }
            None => {
                let Some(prefill) = lend.prefill else {
                    return Err(Error::new(ErrorKind::NotFound, "no such reservation")
                        .with("room", lend.room)
                        .hint("name the prefill worker, or reserve the room first"));
                };
                prefill.check()?;
                self.admit(lend.room, None, &prefill)?;
                let deadline = now.plus_ms(lend.deadline_ms.min(self.config.room_deadline_ms));
                let phase = Phase::Queued { until: deadline };
                self.rooms.insert(lend.room, Room::new(prefill, deadline, phase));
            }
        }
        self.next_grant += 1;
        let grant = GrantId(self.next_grant);
        let arrived = Parts::new(grid.parts());
        if let Some(r) = self.rooms.get_mut(&lend.room) {
            r.grant = grant;
            r.blocks = Some(Blocks { span: lend.span, list: lend.blocks, plan, arrived });
            r.deadline = r.deadline.min(now.plus_ms(lend.deadline_ms));
            if let Phase::Queued { until } = &mut r.phase {
                *until = r.deadline;
            }
        }
        self.by_grant.insert(grant, lend.room);
        Ok(grant)
    }

    // ---- lanes ----------------------------------------------------------------------------

    fn link_of(&self, peer: &Identity) -> Option<&Link> {
        self.links.get(&self.peers.get(peer)?.link?)
    }

    fn enqueue(&mut self, now: Time, room: RoomId) {
        let Some(r) = self.rooms.get(&room) else { return };
        let address = r.prefill.clone();
        let peer = self.peers.entry(address.key.identity.clone()).or_insert(Peer {
            queue: VecDeque::new(),
            connecting: false,
            link: None,
        });
        peer.queue.push_back(room);
        self.queued += 1;
        if let Some(issuer) = &r.issuer {
            *self.queued_by.entry(issuer.clone()).or_insert(0) += 1;
        }
        if peer.link.is_none() && !peer.connecting {
            peer.connecting = true;
            self.out.push_back(Output::Connect(address.clone()));
        }
        self.rearm(room);
        self.serve_queue(now, &address.key.identity);
    }

    /// Lends lanes to the rooms at the head of the queue, strictly in order.
    fn serve_queue(&mut self, now: Time, peer: &Identity) {
        let want = usize::from(self.config.lanes_per_room);
        loop {
            let Some(p) = self.peers.get_mut(peer) else { return };
            let Some(link_id) = p.link else { return };
            let Some(link) = self.links.get_mut(&link_id) else { return };
            let Some(&room) = p.queue.front() else { return };
            if link.free.len() < want {
                return;
            }
            p.queue.pop_front();
            self.left_queue(room);
            let Some(p) = self.peers.get_mut(peer) else { return };
            let Some(link_id) = p.link else { return };
            let Some(link) = self.links.get_mut(&link_id) else { return };
            let Some(r) = self.rooms.get_mut(&room) else { continue };
            r.lanes = link.free.drain(..want).collect();
            r.link = Some(link_id);
            for lane in &r.lanes {
                let lane = &mut link.lanes[usize::from(lane.0)];
                lane.borrower = Some(room);
                lane.pair_epoch += 1;
            }
            let unclaimed_ms = self.config.unclaimed_ms;
            r.phase = Phase::Reserved { until: now.plus_ms(unclaimed_ms) };
            let lent = r.blocks.is_some();
            for call in std::mem::take(&mut r.reserve_calls) {
                self.reply(call, Ok(Reply::Reserved { room, unclaimed_ms }));
            }
            if lent {
                self.grant(now, room);
            }
            self.rearm(room);
        }
    }

    /// Opens and offers: lanes are charged and blocks are lent.
    fn grant(&mut self, now: Time, room: RoomId) {
        let Some(r) = self.rooms.get_mut(&room) else { return };
        let (Some(link), Some(b)) = (r.link, &r.blocks) else { return };
        let lease_ms = self.config.grant_lease_ms;
        r.phase = Phase::Granted(Granted {
            acked: false,
            resend: Backoff::new(now, self.config.resend_ms),
            renewed: now,
            progress_since_renewal: false,
            lease_until: now.plus_ms(grantor_ms(lease_ms)),
        });
        self.out.push_back(Output::Open {
            link,
            grant: r.grant,
            lanes: r.lanes.clone(),
            plan: b.plan.clone(),
        });
        self.send_offer(room);
    }

    fn send_offer(&mut self, room: RoomId) {
        let Some(r) = self.rooms.get(&room) else { return };
        let (Some(id), Some(b)) = (r.link, &r.blocks) else { return };
        let Some(link) = self.links.get(&id) else { return };
        let epoch = |l: &LaneId| link.lanes[usize::from(l.0)].pair_epoch;
        let offer = Offer {
            room,
            grant: r.grant,
            issuer: r.issuer.clone(),
            span: b.span,
            blocks: b.list.clone(),
            lanes: r.lanes.iter().map(|l| (*l, epoch(l))).collect(),
            credit_parts: limits::PARTS_IN_FLIGHT_PER_LANE * r.lanes.len() as u32,
            lease_ms: self.config.grant_lease_ms,
        };
        self.out.push_back(Output::Send { link: id, msg: PeerMsg::Offer(Box::new(offer)) });
    }

    fn return_lanes(&mut self, now: Time, room: RoomId) {
        let twice = self.broken(Mutant::CreditTwice);
        let Some(r) = self.rooms.get_mut(&room) else { return };
        let lanes = std::mem::take(&mut r.lanes);
        let link = r.link;
        self.free_lanes(now, link, lanes, twice);
    }

    fn free_lanes(&mut self, now: Time, link: Option<LinkId>, lanes: Vec<LaneId>, twice: bool) {
        let Some(link) = link.and_then(|id| self.links.get_mut(&id)) else { return };
        for id in lanes {
            let lane = &mut link.lanes[usize::from(id.0)];
            lane.borrower = None;
            if lane.up {
                link.free.push_back(id);
                if twice {
                    link.free.push_back(id);
                }
            }
        }
        let peer = link.peer.identity.clone();
        self.serve_queue(now, &peer);
    }

    fn lane_up(&mut self, now: Time, link: LinkId, lane: LaneId) {
        let Some(l) = self.links.get_mut(&link) else { return };
        let Some(state) = l.lanes.get_mut(usize::from(lane.0)) else { return };
        if !std::mem::replace(&mut state.up, true) && state.borrower.is_none() {
            l.free.push_back(lane);
            let peer = l.peer.identity.clone();
            self.serve_queue(now, &peer);
        }
    }

    fn lane_down(&mut self, link: LinkId, lane: LaneId) {
        let Some(l) = self.links.get_mut(&link) else { return };
        let Some(state) = l.lanes.get_mut(usize::from(lane.0)) else { return };
        state.up = false;
        l.free.retain(|f| *f != lane);
        if let Some(r) = state.borrower.and_then(|room| self.rooms.get_mut(&room)) {
            r.dirty = true;
        }
    }

    fn link_up(&mut self, now: Time, id: LinkId, peer: WorkerKey, path: DataPath, lanes: u16) {
        let lane = || Lane { up: true, borrower: None, pair_epoch: 0 };
        let identity = peer.identity.clone();
        let p = self.peers.entry(identity.clone()).or_insert(Peer {
            queue: VecDeque::new(),
            connecting: false,
            link: None,
        });
        p.connecting = false;
        p.link = Some(id);
        let queue: Vec<RoomId> = p.queue.iter().copied().collect();
        self.links.insert(
            id,
            Link {
                peer: peer.clone(),
                path,
                lanes: (0..lanes).map(|_| lane()).collect(),
                free: (0..lanes).map(LaneId).collect(),
            },
        );
        for room in queue {
            let Some(asked) = self.rooms.get(&room).map(|r| r.prefill.key.clone()) else {
                continue;
            };
            if asked != peer {
                self.stop(now, room, self.stale(&asked, &peer).to_refusal());
            } else if self.config.lanes_per_room > lanes {
                self.stop(now, room, self.never_fits(usize::from(lanes)).to_refusal());
            }
        }
        self.serve_queue(now, &identity);
    }

    fn link_failed(&mut self, now: Time, peer: &Identity, why: &Refusal) {
        let Some(p) = self.peers.get_mut(peer) else { return };
        p.connecting = false;
        let queue: Vec<RoomId> = p.queue.iter().copied().collect();
        for room in queue {
            self.stop(now, room, why.clone());
        }
        self.forget_peer(peer);
    }

    fn forget_peer(&mut self, peer: &Identity) {
        let idle = |p: &Peer| p.link.is_none() && !p.connecting && p.queue.is_empty();
        if self.peers.get(peer).is_some_and(idle) {
            self.peers.remove(peer);
        }
    }

    fn link_down(&mut self, now: Time, id: LinkId, why: &Refusal) {
        let Some(link) = self.links.remove(&id) else { return };
        let identity = link.peer.identity.clone();
        if let Some(p) = self.peers.get_mut(&identity)
            && p.link == Some(id)
        {
            p.link = None;
        }
        let mut hit: Vec<RoomId> = self
            .rooms
            .iter()
            .filter(|(_, r)| r.link == Some(id) || (r.link.is_none() && r.prefill.key == link.peer))
            .map(|(&room, _)| room)
            .collect();
        // A run must not depend on the order of a hash map.
        hit.sort_unstable();
        for room in hit {
            match self.rooms.get_mut(&room).map(|r| (&mut r.phase, &mut r.dirty)) {
                Some((Phase::Over { forget, .. }, _)) => {
                    *forget = now;
                    self.tick(now, room);
                }
                // The sender's word will not come; the decision stands.
                Some((Phase::Stopping { until, .. } | Phase::Quieting { until }, dirty)) => {
                    *until = now;
                    *dirty = true;
                    self.tick(now, room);
                }
                Some((Phase::Fencing { .. }, _)) | None => {}
                Some(_) => {
                    if let Some(r) = self.rooms.get_mut(&room) {
                        r.dirty = true;
                    }
                    self.stop(now, room, why.clone());
                }
            }
            self.rearm(room);
        }
        self.forget_peer(&identity);
    }

    // ---- the room's way -------------------------------------------------------------------

    fn peer(&mut self, now: Time, link: LinkId, msg: PeerMsg) {
        match msg {
            PeerMsg::OfferAck { room, grant } => {
                if let Some(Phase::Granted(g)) =
                    self.room_of(link, room, grant).map(|r| &mut r.phase)
                {
                    g.acked = true;
                    self.complete(now, room);
                    self.rearm(room);
                }
            }
            PeerMsg::Serve(serve) => self.serve(link, *serve),
            PeerMsg::Quiesced { room, grant, clean, heard } => {
                self.quiesced(now, link, room, grant, clean);
                if !heard {
                    self.tell_again(link, room, grant);
                } else if self.rooms.get(&room).is_some_and(|r| {
                    let over = matches!(r.phase, Phase::Over { .. });
                    over && r.link == Some(link) && r.grant == grant
                }) {
                    self.bury(room);
                }
            }
            PeerMsg::Abort { room, grant, why } => {
                let known = match self.rooms.get(&room) {
                    // Before the offer the prefill has no grant to name.
                    Some(r) if r.link.is_none() || grant == GrantId::NONE => {
                        self.links.get(&link).is_some_and(|l| l.peer == r.prefill.key)
                    }
                    _ => self.room_of(link, room, grant).is_some(),
                };
                if known {
                    self.stop(now, room, why.said_by(Blame::Prefill));
                } else {
                    self.tell_again(link, room, grant);
                }
            }
            // The link's own business, or not ours to hear.
            PeerMsg::Heartbeat
            | PeerMsg::Probe
            | PeerMsg::Describe(_)
            | PeerMsg::Ready
            | PeerMsg::Bye(_)
            | PeerMsg::Offer(_)
            | PeerMsg::Renew { .. }
            | PeerMsg::ServeAck { .. }
            | PeerMsg::Ended { .. } => {}
        }
    }

    /// The room that a message means: same link and same grant, or nothing.
    fn room_of(&mut self, link: LinkId, room: RoomId, grant: GrantId) -> Option<&mut Room> {
        let unchecked = self.broken(Mutant::NoGrantCheck);
        self.rooms.get_mut(&room).filter(|r| {
            r.link == Some(link) && (unchecked || r.blocks.is_some() && r.grant == grant)
        })
    }

    /// A prefill that asks about a room which is over gets the answer again.
    fn tell_again(&mut self, link: LinkId, room: RoomId, grant: GrantId) {
        let outcome = match self.rooms.get(&room).map(|r| &r.phase) {
            Some(Phase::Over { outcome, .. }) => Some(outcome),
            Some(_) => None,
            None => self.ended.outcome(room),
        };
        if let Some(outcome) = outcome.cloned() {
            let msg = PeerMsg::Ended { room, grant, outcome };
            self.out.push_back(Output::Send { link, msg });
        }
    }

    fn serve(&mut self, link: LinkId, serve: Serve) {
        if self.links.get(&link).is_none_or(|l| l.path != DataPath::Puller) {
            return;
        }
        let (room, grant, number) = (serve.room, serve.grant, serve.serve);
        let Some(r) = self.room_of(link, room, grant) else { return };
        let msg = PeerMsg::ServeAck { room, grant, serve: number };
        let granted = matches!(r.phase, Phase::Granted(_));
        let Some(b) = r.blocks.as_ref().filter(|_| granted) else { return };
        let total = b.plan.grid().parts();
        let mut parts = Vec::new();
        for &(first, count) in &serve.parts {
            let Some(end) = first.checked_add(count).filter(|&end| end <= total) else { return };
            parts.extend((first..end).map(PartId).filter(|&p| !b.arrived.has(p)));
        }
        if r.serves.len() < total as usize && r.serves.insert(number) {
            self.out.push_back(Output::Pull { link, serve: Arc::new(serve), parts });
        }
        self.out.push_back(Output::Send { link, msg });
    }

    fn arrived(&mut self, now: Time, grant: GrantId, part: PartId) {
        let counted = self.broken(Mutant::PartsCounted);
        let Some(&room) = self.by_grant.get(&grant) else { return };
        let Some(r) = self.rooms.get_mut(&room) else { return };
        let Some(b) = r.blocks.as_mut() else { return };
        let bytes = b.plan.grid().part_bytes(part);
        b.arrived.insert(part, bytes, counted);
        if let Phase::Granted(g) = &mut r.phase {
            g.progress_since_renewal = true;
            self.renew(now, room);
            self.complete(now, room);
            self.rearm(room);
        }
    }

    /// Renews the grant's lease: by progress, or while the prefill has not begun.
    fn renew(&mut self, now: Time, room: RoomId) {
        let lease_ms = self.config.grant_lease_ms;
        let Some(r) = self.rooms.get_mut(&room) else { return };
        let (Some(link), Some(b), Phase::Granted(g)) = (r.link, &r.blocks, &mut r.phase) else {
            return;
        };
        let due = now >= g.renewed.plus_ms(lease_ms / 3);
        if due && (g.progress_since_renewal || b.arrived.bytes == 0) {
            g.renewed = now;
            g.progress_since_renewal = false;
            g.lease_until = now.plus_ms(grantor_ms(lease_ms));
            let msg = PeerMsg::Renew { room, grant: r.grant, lease_ms };
            self.out.push_back(Output::Send { link, msg });
        }
    }

    /// Ends the room as done if nothing is missing and nothing older can land.
    fn complete(&mut self, now: Time, room: RoomId) {
        let Some(r) = self.rooms.get_mut(&room) else { return };
        let (Phase::Granted(g), Some(b)) = (&r.phase, &r.blocks) else { return };
        // A room without parts is done when the prefill knows of it.
        if b.arrived.missing > 0 || (b.plan.grid().parts() == 0 && !g.acked) {
            return;
        }
        let path = r.link.and_then(|l| self.links.get(&l)).map(|l| l.path);
        if path == Some(DataPath::OneSided) && r.quiesced.is_none() && !r.dirty {
            r.phase = Phase::Quieting { until: now.plus_ms(self.config.quiesce_ms) };
        } else {
            self.fence_done(now, room);
        }
    }

    fn fence_done(&mut self, now: Time, room: RoomId) {
        let Some(bytes) =
            self.rooms.get(&room).and_then(|r| r.blocks.as_ref()).map(|b| b.arrived.bytes)
        else {
            return;
        };
        self.fence(now, room, Outcome::Done { bytes });
    }

    fn fence(&mut self, now: Time, room: RoomId, outcome: Outcome) {
        let Some(r) = self.rooms.get_mut(&room) else { return };
        if r.blocks.is_none() {
            return;
        }
        let grant = r.grant;
        let path = r.link.and_then(|l| self.links.get(&l)).map(|l| l.path);
        let holds_the_pen = matches!(path, Some(DataPath::ReceiverCopies | DataPath::Puller));
        let quiet = r.quiesced == Some(true) && !r.dirty;
        let how = if holds_the_pen || quiet { FenceHow::Close } else { FenceHow::Revoke };
        let until = now.plus_ms(self.config.fence_ms);
        r.phase = Phase::Fencing { outcome, until };
        #[cfg(feature = "mutants")]
        if self.broken(Mutant::NoFence)
            && let Some(forge) = self.forge
        {
            return self.fenced(now, grant, forge(grant));
        }
        self.out.push_back(Output::Fence { grant, how });
        self.rearm(room);
    }

    fn quiesced(&mut self, now: Time, link: LinkId, room: RoomId, grant: GrantId, clean: bool) {
        let quiesce_ms = self.config.quiesce_ms;
        if let Some(r) = self.room_of(link, room, grant) {
            r.quiesced = Some(clean);
            r.dirty |= !clean;
            match &r.phase {
                Phase::Quieting { .. } => self.fence_done(now, room),
                Phase::Stopping { outcome, .. } => {
                    let outcome = outcome.clone();
                    self.fence(now, room, outcome);
                }
                // Nothing more is sent. What is missing may still be in this side's own engine.
                Phase::Granted(_) => {
                    r.incomplete_at.get_or_insert(now.plus_ms(4 * quiesce_ms));
                    // Who says this knows of the offer, whatever became of its answer.
                    if let Phase::Granted(g) = &mut r.phase {
                        g.acked = true;
                    }
                    self.complete(now, room);
                }
                _ => {}
            }
            self.rearm(room);
        }
    }

    /// Decides that the room fails, once, and starts to end it.
    fn stop(&mut self, now: Time, room: RoomId, why: Refusal) {
        let Some(r) = self.rooms.get_mut(&room) else { return };
        let bytes = r.blocks.as_ref().map_or(0, |b| b.arrived.bytes);
        let outcome = Outcome::Failed { why, bytes };
        match &r.phase {
            Phase::Queued { .. } => {
                self.leave_queue(room);
                self.end_without_link(now, room, outcome);
            }
            Phase::Reserved { .. } => self.end_without_link(now, room, outcome),
            Phase::Granted(_) | Phase::Quieting { .. } => {
                let path = r.link.and_then(|l| self.links.get(&l)).map(|l| l.path);
                let asks = path == Some(DataPath::OneSided) && r.quiesced.is_none();
                if let Some(link) = r.link {
                    let msg = PeerMsg::Ended { room, grant: r.grant, outcome: outcome.clone() };
                    self.out.push_back(Output::Send { link, msg });
                }
                if asks {
                    let until = now.plus_ms(self.config.quiesce_ms);
                    r.phase = Phase::Stopping { outcome, until };
                    self.rearm(room);
                } else {
                    self.fence(now, room, outcome);
                }
            }
            Phase::Stopping { .. } | Phase::Fencing { .. } | Phase::Over { .. } => {}
        }
    }

    /// Refuses a reservation that was never charged; nothing of it stays. Lent blocks make it a
    /// room that ends.
    fn refuse_queued(&mut self, now: Time, room: RoomId, why: Refusal) {
        let Some(r) = self.rooms.get_mut(&room) else { return };
        if r.blocks.is_some() || !r.watchers.is_empty() {
            return self.stop(now, room, why);
        }
        for call in std::mem::take(&mut r.reserve_calls) {
            self.reply(call, Err(why.clone()));
        }
        self.leave_queue(room);
        self.bury(room);
    }

    fn leave_queue(&mut self, room: RoomId) {
        let Some(r) = self.rooms.get(&room) else { return };
        if let Some(p) = self.peers.get_mut(&r.prefill.key.identity) {
            let before = p.queue.len();
            p.queue.retain(|q| *q != room);
            if p.queue.len() < before {
                self.left_queue(room);
            }
        }
    }

    fn left_queue(&mut self, room: RoomId) {
        self.queued -= 1;
        let Some(issuer) = self.rooms.get(&room).and_then(|r| r.issuer.as_ref()) else { return };
        if let Some(count) = self.queued_by.get_mut(issuer) {
            *count -= 1;
            if *count == 0 {
                self.queued_by.remove(issuer);
            }
        }
    }

    /// Ends a room whose grant was never opened. Its blocks still come back by a proof.
    fn end_without_link(&mut self, now: Time, room: RoomId, outcome: Outcome) {
        let Some(r) = self.rooms.get_mut(&room) else { return };
        if r.blocks.is_some() {
            self.fence(now, room, outcome);
        } else {
            self.over(now, room, outcome, None, false);
        }
    }

    fn fenced(&mut self, now: Time, grant: GrantId, proof: F) {
        if let Some(withheld) = self.quarantine.remove(&grant) {
            self.out.push_back(Output::LateProof { grant, proof });
            return self.free_lanes(now, withheld.link, withheld.lanes, false);
        }
        let Some(&room) = self.by_grant.get(&grant) else { return };
        let Some(Phase::Fencing { outcome, .. }) = self.rooms.get(&room).map(|r| &r.phase) else {
            return;
        };
        let outcome = outcome.clone();
        self.over(now, room, outcome, Some(proof), false);
    }

    /// The fence cannot complete: the room ends, its blocks do not come back.
    fn withhold(&mut self, now: Time, grant: GrantId, why: &Refusal) {
        let Some(&room) = self.by_grant.get(&grant) else { return };
        let Some(r) = self.rooms.get_mut(&room) else { return };
        if !matches!(r.phase, Phase::Fencing { .. }) {
            return;
        }
        let (count, bytes) = r.blocks.as_ref().map_or((0, 0), |b| (b.list.len(), b.arrived.bytes));
        let refusal = Error::new(ErrorKind::Quarantined, "the fence cannot complete")
            .with("room", room)
            .with("grant", grant)
            .with("blocks", count)
            .with("cause", why)
            .hint("restart the decode worker to get the blocks back")
            .to_refusal();
        // Lanes of a withheld grant may still bring writes; they stay out of the pool.
        let (link, lanes) = (r.link, std::mem::take(&mut r.lanes));
        self.quarantine.insert(grant, Withheld { blocks: count, link, lanes });
        self.over(now, room, Outcome::Failed { why: refusal, bytes }, None, true);
    }

    fn over(
        &mut self,
        now: Time,
        room: RoomId,
        outcome: Outcome,
        proof: Option<F>,
        withheld: bool,
    ) {
        let Some(r) = self.rooms.get_mut(&room) else { return };
        let grant = r.grant;
        self.over += 1;
        r.phase = Phase::Over {
            outcome: outcome.clone(),
            resend: Backoff::new(now, self.config.resend_ms),
            forget: now.plus_ms(self.config.room_deadline_ms),
        };
        let (link, issuer) = (r.link, r.issuer.clone());
        let peer = r.prefill.key.clone();
        r.blocks = None;
        let (reserving, watching) =
            (std::mem::take(&mut r.reserve_calls), std::mem::take(&mut r.watchers));
        for call in reserving {
            let why = outcome.why().cloned();
            let why = why.unwrap_or_else(|| Refusal::new(ErrorKind::RoomEnded, "done"));
            self.reply(call, Err(why));
        }
        for (call, _) in watching {
            self.reply(call, Ok(Reply::Ended(outcome.clone())));
        }
        self.by_grant.remove(&grant);
        self.ended.insert(room, issuer, outcome.clone());
        self.out.push_back(Output::Ended {
            room,
            grant,
            outcome: outcome.clone(),
            proof,
            withheld,
        });
        self.return_lanes(now, room);
        let link = link.or_else(|| {
            self.peers
                .get(&peer.identity)
                .and_then(|p| p.link)
                .filter(|l| self.links.get(l).is_some_and(|l| l.peer == peer))
        });
        match link.filter(|l| self.links.contains_key(l)) {
            Some(link) => {
                if let Some(r) = self.rooms.get_mut(&room) {
                    r.link = Some(link);
                }
                let msg = PeerMsg::Ended { room, grant, outcome };
                self.out.push_back(Output::Send { link, msg });
                self.rearm(room);
            }
            None => self.bury(room),
        }
    }

    fn bury(&mut self, room: RoomId) {
        let Some(r) = self.rooms.remove(&room) else { return };
        self.over -= usize::from(matches!(r.phase, Phase::Over { .. }));
        if let Some(at) = r.armed {
            self.timers.remove(&(at, room));
        }
    }

    // ---- time -----------------------------------------------------------------------------

    fn rearm(&mut self, room: RoomId) {
        let Some(r) = self.rooms.get_mut(&room) else { return };
        let mut next = r.watchers.iter().map(|w| w.1).min().unwrap_or(Time(u64::MAX));
        match &r.phase {
            Phase::Queued { until } | Phase::Reserved { until } => next = next.min(*until),
            Phase::Granted(g) => {
                if !g.acked {
                    next = next.min(g.resend.at);
                }
                let may_renew = g.progress_since_renewal
                    || r.blocks.as_ref().is_some_and(|b| b.arrived.bytes == 0);
                if may_renew {
                    next = next.min(g.renewed.plus_ms(self.config.grant_lease_ms / 3));
                }
                next = next.min(g.lease_until).min(r.incomplete_at.unwrap_or(g.lease_until));
            }
            Phase::Quieting { until } | Phase::Stopping { until, .. } => next = next.min(*until),
            Phase::Fencing { until, .. } => next = next.min(*until),
            Phase::Over { resend, forget, .. } => next = next.min(resend.at).min(*forget),
        }
        if matches!(
            r.phase,
            Phase::Queued { .. }
                | Phase::Reserved { .. }
                | Phase::Granted(_)
                | Phase::Quieting { .. }
        ) {
            next = next.min(r.deadline);
        }
        if r.armed != Some(next) {
            if let Some(at) = r.armed {
                self.timers.remove(&(at, room));
            }
            r.armed = (next != Time(u64::MAX)).then_some(next);
            if r.armed.is_some() {
                self.timers.insert((next, room));
            }
        }
    }

    fn tick(&mut self, now: Time, room: RoomId) {
        let Some(r) = self.rooms.get_mut(&room) else { return };
        let late: Vec<CallId> =
            r.watchers.extract_if(.., |w| w.1 <= now).map(|(call, _)| call).collect();
        for call in late {
            self.reply(call, Ok(Reply::Running));
        }
        let Some(r) = self.rooms.get_mut(&room) else { return };
        let in_time = now < r.deadline;
        match &mut r.phase {
            Phase::Queued { until } if !in_time || now >= *until => {
                let linked = r.link_known(&self.peers);
                let why = Error::new(ErrorKind::Busy, "no lane became free in time")
                    .with("prefill", &r.prefill.key.identity)
                    .with("link", if linked { "up" } else { "not up yet" })
                    .with("ahead", self.queued.saturating_sub(1))
                    .hint("wait longer, or use another pair of workers")
                    .blamed(if linked { Blame::Decode } else { Blame::Link });
                self.refuse_queued(now, room, why.to_refusal());
            }
            Phase::Reserved { until } if !in_time || now >= *until => {
                let why = Error::new(ErrorKind::DeadlineExceeded, "the decode leg did not come")
                    .with("missing", "decode leg")
                    .with("unclaimed_ms", self.config.unclaimed_ms)
                    .blamed(Blame::Decode)
                    .hint("send both legs of a request at once");
                self.stop(now, room, why.to_refusal());
            }
            Phase::Granted(_) | Phase::Quieting { .. } if !in_time => {
                let (missing, parts, begun) = r.blocks.as_ref().map_or((0, 0, false), |b| {
                    (b.arrived.missing, b.plan.grid().parts(), b.arrived.bytes > 0)
                });
                let what = if begun { "pages of the prefill" } else { "prefill leg" };
                let why = Error::new(ErrorKind::DeadlineExceeded, "the room's deadline has passed")
                    .with("missing", what)
                    .with("parts_missing", missing)
                    .with("parts", parts)
                    .blamed(Blame::Prefill);
                self.stop(now, room, why.to_refusal());
            }
            Phase::Granted(_) if r.incomplete_at.is_some_and(|at| now >= at) => {
                let (missing, parts) = r
                    .blocks
                    .as_ref()
                    .map_or((0, 0), |b| (b.arrived.missing, b.plan.grid().parts()));
                let why = Error::new(ErrorKind::Incomplete, "the prefill ended early")
                    .with("parts_missing", missing)
                    .with("parts", parts);
                self.stop(now, room, why.to_refusal());
            }
            Phase::Granted(g) => {
                if now >= g.lease_until {
                    let why = Error::new(ErrorKind::LeaseExpired, "the grant's lease ran out")
                        .with("lease_ms", self.config.grant_lease_ms)
                        .blamed(Blame::Prefill);
                    self.stop(now, room, why.to_refusal());
                } else {
                    if !g.acked && now >= g.resend.at {
                        g.resend.again(now);
                        // The holder counts from the repeated offer, so this side does too.
                        g.renewed = now;
                        g.progress_since_renewal = false;
                        g.lease_until = now.plus_ms(grantor_ms(self.config.grant_lease_ms));
                        self.send_offer(room);
                    }
                    self.renew(now, room);
                }
            }
            Phase::Quieting { until } if now >= *until => self.fence_done(now, room),
            Phase::Stopping { outcome, until } if now >= *until => {
                let outcome = outcome.clone();
                self.fence(now, room, outcome);
            }
            Phase::Fencing { until, .. } if now >= *until => {
                let why = Error::new(ErrorKind::DeadlineExceeded, "the engine did not answer")
                    .with("fence_ms", self.config.fence_ms)
                    .to_refusal();
                if let Some(grant) = self.rooms.get(&room).map(|r| r.grant) {
                    self.withhold(now, grant, &why);
                }
            }
            Phase::Over { forget, .. } if now >= *forget => self.bury(room),
            Phase::Over { resend, outcome, .. } if now >= resend.at => {
                resend.again(now);
                let outcome = outcome.clone();
                if let Some(link) = r.link {
                    let grant = r.grant;
                    let msg = PeerMsg::Ended { room, grant, outcome };
                    self.out.push_back(Output::Send { link, msg });
                }
            }
            _ => {}
        }
    }
}

impl Room {
    fn new(prefill: WorkerAddress, deadline: Time, phase: Phase) -> Self {
        Self {
            issuer: None,
            key: None,
            prefill,
            link: None,
            lanes: Vec::new(),
            reserve_calls: Vec::new(),
            watchers: Vec::new(),
            blocks: None,
            grant: GrantId::NONE,
            deadline,
            incomplete_at: None,
            quiesced: None,
            dirty: false,
            serves: BTreeSet::new(),
            phase,
            armed: None,
        }
    }
    fn link_known(&self, peers: &BTreeMap<Identity, Peer>) -> bool {
        peers.get(&self.prefill.key.identity).is_some_and(|p| p.link.is_some())
    }
}
