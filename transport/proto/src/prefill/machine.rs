//! The machine itself; see [`super`] for what it promises and for what goes in and out.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;

use super::{Chunk, Event, Output, PrefillConfig};
use crate::blocks::BlockList;
use crate::ended::Memory;
use crate::error::{Blame, Error, ErrorKind, Refusal, Result};
use crate::ids::{GrantId, Identity, LaneId, LinkId, PartId, Role, RoomId, WorkerKey};
use crate::limits;
use crate::msg::peer::{DataPath, Offer, Outcome, PeerMsg, Serve};
use crate::msg::service::Load;
use crate::mutant::Mutant;
use crate::plan::{Grid, Rect};
use crate::time::{Backoff, Time, holder_ms};

#[cfg(test)]
#[path = "tests.rs"]
mod tests;

const NOT_DECLARED: u32 = u32::MAX;

/// The prompt's pages on this side, as far as they are declared.
#[derive(Debug)]
struct Source {
    tokens: u32,
    /// By block of the prompt.
    ids: Vec<u32>,
    /// By layer: tokens declared.
    done: Vec<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PartState {
    Waiting,
    Ready,
    InFlight(LaneId),
    Acked,
}

/// A grant that this side holds.
#[derive(Debug)]
struct Held {
    link: LinkId,
    peer: Identity,
    path: DataPath,
    offer: Arc<Offer>,
    grid: Grid,
    /// First block of the prompt that is wanted.
    first_block: u32,
    parts: Vec<PartState>,
    unacked: u32,
    ready: VecDeque<PartId>,
    later: BTreeSet<(Time, PartId)>,
    tries: HashMap<PartId, u32>,
    lanes: Vec<HeldLane>,
    lease_until: Time,
    /// A lane was lost with writes in flight: this side's word is not enough.
    tainted: bool,
    serve: Option<(Serve, Backoff)>,
    serves: u32,
}

#[derive(Debug)]
struct HeldLane {
    id: LaneId,
    in_flight: u32,
    progress: Time,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    /// No grant yet, or posting.
    Running,
    /// The engine becomes quiet; blocks are withheld if it is not by `until`.
    Quieting { until: Time },
    /// The engine is quiet; the decode's word is awaited.
    Quiet,
}

#[derive(Debug)]
struct Room {
    source: Option<Source>,
    decode: Option<Identity>,
    issuer: Option<Identity>,
    held: Option<Held>,
    phase: Phase,
    /// Repeats `Quiesced` or `Abort` until the decode has spoken.
    resend: Option<(PeerMsg, Backoff)>,
    /// The decode has decided, or this side cannot hear it any more.
    outcome: Option<Outcome>,
    released: bool,
    deadline: Time,
    armed: Option<Time>,
}

#[derive(Debug)]
struct Link {
    peer: WorkerKey,
    path: DataPath,
    part_bytes: u64,
    down: HashSet<LaneId>,
    /// When a lane came back: an offer that may be older is not about this connection of it.
    renewed: HashMap<LaneId, Time>,
    /// Offers whose leg has not come, and words of their block lists.
    orphans: usize,
    orphan_words: usize,
}

/// What is remembered of a room that has ended.
#[derive(Clone, Debug)]
struct Past {
    outcome: Outcome,
    /// What this side said of its grant: nothing that was posted can land.
    clean: bool,
}

/// A room: claimed by a leg, or only offered on a link. What one decode says of a room that no leg
/// has claimed is kept apart from what others say of it.
type Slot = (RoomId, Option<LinkId>);

const fn claimed(room: RoomId) -> Slot {
    (room, None)
}

/// Whether [`Prefill::attach`] started a room, or found that its decode had ended it already.
enum Attached {
    Runs,
    Over(Outcome),
}

/// The machine.
#[derive(Debug)]
pub struct Prefill<Q> {
    config: PrefillConfig,
    rooms: BTreeMap<Slot, Room>,
    by_grant: HashMap<(LinkId, GrantId), Slot>,
    links: HashMap<LinkId, Link>,
    timers: BTreeSet<(Time, Slot)>,
    /// Rooms that ended before their leg came, which hears of it once; by decode, so that none can
    /// make another's be forgotten.
    early: Memory<Identity, Memory<RoomId, Past>>,
    /// How rooms with a leg ended.
    ended: Memory<RoomId, Past>,
    draining: bool,
    /// Source blocks of grants that did not become quiet in time; the proof may still come.
    withheld: HashMap<(LinkId, GrantId), (RoomId, u32)>,
    retries: u64,
    rng: u64,
    out: VecDeque<Output<Q>>,
}

impl<Q> Prefill<Q> {
    /// A worker without rooms.
    pub fn new(config: PrefillConfig) -> Self {
        Self {
            rng: config.seed,
            config,
            rooms: BTreeMap::new(),
            by_grant: HashMap::new(),
            links: HashMap::new(),
            timers: BTreeSet::new(),
            early: Memory::new(limits::WORKERS_MAX),
            ended: Memory::new(limits::TOMBSTONES_MAX),
            draining: false,
            withheld: HashMap::new(),
            retries: 0,
            out: VecDeque::new(),
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
    pub fn poll_output(&mut self) -> Option<Output<Q>> {
        self.out.pop_front()
    }
    /// When to call [`Prefill::handle_timeout`] next; ask again after every event.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.timers.first().map(|t| t.0)
    }
    /// How busy the worker is.
    pub fn load(&self) -> Load {
        Load {
            rooms: self.rooms.len() as u32,
            queued: (self.rooms.len() - self.by_grant.len()) as u32,
            free_lanes: 0,
            quarantined_blocks: self.withheld.values().map(|w| w.1).sum(),
            draining: self.draining,
        }
    }
    /// Rooms that have not ended.
    pub fn active(&self) -> usize {
        self.rooms.len()
    }
    /// Parts that were sent more than once.
    pub fn retries(&self) -> u64 {
        self.retries
    }

    /// Whether somebody may abort a room: an admin, or the router that placed it.
    ///
    /// # Errors
    /// [`ErrorKind::Unauthorized`] naming both, [`ErrorKind::NotFound`].
    pub fn may_abort(&self, room: RoomId, from: &Identity) -> Result<()> {
        let Some(r) = self.rooms.get(&claimed(room)) else {
            return Err(Error::new(ErrorKind::NotFound, "no such room").with("room", room));
        };
        let offered = r.held.as_ref().and_then(|h| h.offer.issuer.as_ref());
        let issuer = offered.or(r.issuer.as_ref());
        if from.role == Role::Admin || (from.role == Role::Router && issuer == Some(from)) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Unauthorized, "the room is another router's")
            .with("room", room)
            .with("caller", from)
            .with("issuer", issuer.map_or("not known".into(), ToString::to_string)))
    }

    /// This process stood still: what its engine was to do in the meantime has not had its time.
    pub fn stood_still(&mut self, now: Time) {
        let slots: Vec<Slot> = self.rooms.keys().copied().collect();
        for slot in slots {
            if let Some(Phase::Quieting { until }) = self.rooms.get_mut(&slot).map(|r| &mut r.phase)
            {
                *until = now.plus_ms(self.config.quiet_ms);
                self.rearm(slot);
            }
        }
    }

    /// Takes one event.
    pub fn handle_event(&mut self, now: Time, event: Event<Q>) {
        match event {
            Event::Attach { room, tokens, decode, issuer, deadline_ms } => {
                match self.attach(now, room, tokens, decode, issuer, deadline_ms) {
                    Ok(Attached::Runs) => self.start(now, room),
                    Ok(Attached::Over(outcome)) => {
                        self.out.push_back(Output::Attached { room });
                        self.out.push_back(Output::Released { room, proof: None });
                        self.out.push_back(Output::Ended { room, outcome });
                    }
                    Err(why) => self.out.push_back(Output::Refused { room, why }),
                }
            }
            Event::Chunk(chunk) => {
                let room = chunk.room;
                match self.chunk(chunk) {
                    Ok(fresh) => {
                        self.out.push_back(Output::ChunkTaken { room });
                        self.make_ready(claimed(room), &fresh);
                        self.pump(now, claimed(room));
                    }
                    Err(why) => self.out.push_back(Output::Refused { room, why }),
                }
            }
            Event::Finish { room } => self.finish(now, room),
            Event::AbortLocal { room, why } => self.give_up(now, claimed(room), why),
            Event::AbortBy { from, room, reason } => {
                let why = Error::new(ErrorKind::Aborted, "aborted at the prefill leg")
                    .with("by", from)
                    .with("reason", reason.chars().take(200).collect::<String>());
                self.give_up(now, claimed(room), why.to_refusal());
            }
            Event::LinkUp { link, peer, path, part_bytes } => {
                let fresh = Link {
                    peer,
                    path,
                    part_bytes,
                    down: HashSet::new(),
                    renewed: HashMap::new(),
                    orphans: 0,
                    orphan_words: 0,
                };
                self.links.insert(link, fresh);
            }
            Event::LinkDown { link, why } => self.link_down(now, link, &why),
            Event::Peer { link, msg, echo_sent } => self.peer(now, link, msg, echo_sent),
            Event::Acked { link, grant, part, lane } => self.acked(now, link, grant, part, lane),
            Event::Nacked { link, grant, part, lane, why } => {
                if let Some(&slot) = self.by_grant.get(&(link, grant)) {
                    self.try_again(now, slot, &[(part, lane)], &why);
                    self.pump(now, slot);
                }
            }
            Event::LaneUp { link, lane } => {
                if let Some(l) = self.links.get_mut(&link)
                    && l.down.remove(&lane)
                {
                    l.renewed.insert(lane, now);
                }
                for slot in self.rooms_of(link) {
                    self.pump(now, slot);
                }
            }
            Event::LaneDown { link, lane } => self.lane_down(now, link, lane),
            Event::Quiesced { link, grant, proof } => self.quiesced(now, link, grant, proof),
            Event::Drain => self.draining = true,
        }
    }

    /// Does what is due. Harmless at any time.
    pub fn handle_timeout(&mut self, now: Time) {
        while let Some(&(at, slot)) = self.timers.first() {
            if at > now {
                break;
            }
            self.timers.pop_first();
            if let Some(r) = self.rooms.get_mut(&slot) {
                r.armed = None;
            }
            self.tick(now, slot);
            self.rearm(slot);
        }
    }

    // ---- the serving engine's side --------------------------------------------------------

    fn attach(
        &mut self,
        now: Time,
        room: RoomId,
        tokens: u32,
        decode: Option<Identity>,
        issuer: Option<Identity>,
        deadline_ms: u64,
    ) -> Result<Attached> {
        if room > RoomId::MAX {
            return Err(
                Error::new(ErrorKind::Malformed, "room number exceeds 2^63-1").with("room", room)
            );
        }
        self.check_fits(tokens)?;
        if self.rooms.contains_key(&claimed(room)) {
            return Err(Error::new(ErrorKind::DuplicateRoom, "the room has a prefill leg already")
                .with("room", room)
                .hint("room numbers are used once; let the coordinator issue them"));
        }
        if let Some(past) = self.ended.get(&room) {
            return Err(past.refusal(room));
        }
        // What came before the leg counts if it came from the decode that the leg names.
        let offers = (room, Some(LinkId(0)))..=(room, Some(LinkId(u64::MAX)));
        let offered = self.rooms.range(offers).find_map(|(slot, r)| {
            let h = r.held.as_ref()?;
            decode.as_ref().is_none_or(|d| *d == h.peer).then_some((*slot, h.link))
        });
        let over = match &decode {
            Some(d) => self.early.get(d).and_then(|m| m.get(&room)).cloned(),
            None => {
                let mut heard: Vec<_> =
                    self.early.iter().filter_map(|(d, m)| Some((d, m.get(&room)?))).collect();
                heard.sort_unstable_by_key(|(d, _)| *d);
                heard.first().map(|(_, past)| (*past).clone())
            }
        };
        let source = Source {
            tokens,
            ids: vec![NOT_DECLARED; self.config.layout.blocks_for(tokens) as usize],
            done: vec![0; self.config.layout.layers as usize],
        };
        let deadline = now.plus_ms(deadline_ms.min(self.config.room_deadline_ms));
        if let Some((slot, link)) = offered {
            let held = self.rooms.get(&slot).and_then(|r| r.held.as_ref());
            if let Some(h) = held.filter(|h| h.offer.span.tokens != tokens) {
                return Err(lengths_differ(tokens, h.offer.span.tokens));
            }
            let Some(mut r) = self.take(&slot) else { return Ok(Attached::Runs) };
            if let Some(h) = &mut r.held {
                h.number_parts();
                self.by_grant.insert((link, h.offer.grant), claimed(room));
            }
            (r.source, r.decode, r.issuer, r.deadline) = (Some(source), decode, issuer, deadline);
            self.rooms.insert(claimed(room), r);
            return Ok(Attached::Runs);
        }
        if let Some(past) = over {
            let outcome = past.outcome.clone();
            self.ended.insert(room, past);
            return Ok(Attached::Over(outcome));
        }
        if self.draining {
            return Err(Error::new(ErrorKind::Draining, "the prefill takes no new rooms")
                .blamed(Blame::Prefill)
                .hint("use another prefill worker"));
        }
        if self.rooms.len() >= self.config.rooms_max {
            return Err(Error::new(ErrorKind::Busy, "the prefill worker is full")
                .with("rooms", self.rooms.len())
                .with("rooms_max", self.config.rooms_max)
                .blamed(Blame::Prefill));
        }
        let fresh = Room { issuer, ..Room::new(Some(source), decode, deadline) };
        self.rooms.insert(claimed(room), fresh);
        Ok(Attached::Runs)
    }

    fn check_fits(&self, tokens: u32) -> Result<()> {
        let blocks = self.config.layout.blocks_for(tokens);
        let most = self.config.pool_blocks.min(limits::BLOCKS_PER_ROOM_MAX);
        if blocks <= most {
            return Ok(());
        }
        Err(Error::new(ErrorKind::NeverFits, "the room has more blocks than the prefill's pool")
            .with("tokens", tokens)
            .with("blocks", blocks)
            .with("pool_blocks", most)
            .hint("send shorter prompts to this worker or give it a larger pool"))
    }

    fn start(&mut self, now: Time, room: RoomId) {
        let slot = claimed(room);
        self.out.push_back(Output::Attached { room });
        if self.rooms.get(&slot).is_some_and(|r| r.released) {
            // The offer has been given up; of this leg nothing was ever posted.
            self.out.push_back(Output::Released { room, proof: None });
        } else {
            self.say_granted(slot);
        }
        // A room without pages has nothing to wait for.
        self.pump(now, slot);
        self.rearm(slot);
    }

    fn say_granted(&mut self, slot: Slot) {
        let held = self.rooms.get(&slot).and_then(|r| r.held.as_ref());
        if let (Some(h), (room, None)) = (held, slot) {
            let (link, offer, parts) = (h.link, h.offer.clone(), h.grid.parts());
            self.out.push_back(Output::Granted { room, link, offer, parts });
        }
    }

    /// Removes a room with its timer, and from its link's count if it was only offered.
    fn take(&mut self, slot: &Slot) -> Option<Room> {
        let mut r = self.rooms.remove(slot)?;
        if let Some(at) = r.armed.take() {
            self.timers.remove(&(at, *slot));
        }
        if let Some(h) = &r.held {
            self.by_grant.remove(&(h.link, h.offer.grant));
            if let Some(l) = slot.1.and_then(|link| self.links.get_mut(&link)) {
                l.orphans -= 1;
                l.orphan_words -= h.offer.blocks.words();
            }
        }
        Some(r)
    }

    /// Takes a chunk; returns what became final, as layers × blocks of the prompt.
    fn chunk(&mut self, chunk: Chunk) -> Result<Rect> {
        let early = self.broken(Mutant::NotFinal);
        let (page_tokens, layers, pool) =
            (self.config.layout.page_tokens, self.config.layout.layers, self.config.pool_blocks);
        let bad = |why: &str| {
            Error::new(ErrorKind::InvalidPlan, why.to_string())
                .with("room", chunk.room)
                .with("tokens", format!("{:?}", chunk.tokens))
                .with("layers", format!("{:?}", chunk.layers))
        };
        let Some(r) = self.rooms.get_mut(&claimed(chunk.room)) else {
            return Err(match self.ended.get(&chunk.room) {
                Some(past) => past.refusal(chunk.room),
                None => Error::new(ErrorKind::NotFound, "no such room").with("room", chunk.room),
            });
        };
        if r.phase != Phase::Running {
            return Err(
                Error::new(ErrorKind::RoomEnded, "the room is ending").with("room", chunk.room)
            );
        }
        let prefix = r.held.as_ref().map_or(0, |h| h.offer.span.prefix_tokens);
        let Some(source) = &mut r.source else {
            return Err(Error::new(ErrorKind::NotFound, "the room has no prefill leg yet")
                .with("room", chunk.room));
        };
        if chunk.tokens.is_empty() || chunk.tokens.end > source.tokens {
            return Err(bad("chunk is empty or longer than the prompt")
                .with("prompt_tokens", source.tokens));
        }
        if chunk.layers.is_empty() || chunk.layers.end > layers {
            return Err(
                bad("chunk names layers that this rank does not have").with("rank_layers", layers)
            );
        }
        let done = &source.done[chunk.layers.start as usize..chunk.layers.end as usize];
        // What the decode has already may be left out.
        if let Some(&at) = done
            .iter()
            .find(|&&at| at != chunk.tokens.start && !(at == 0 && chunk.tokens.start == prefix))
        {
            return Err(bad("chunk does not begin where the last one ended").with("expected", at));
        }
        let first = chunk.tokens.start / page_tokens;
        let end = chunk.tokens.end.div_ceil(page_tokens);
        if chunk.blocks.len() != u64::from(end - first) {
            return Err(bad("wrong number of blocks")
                .with("found", chunk.blocks.len())
                .with("expected", end - first));
        }
        let ids = chunk.blocks.expand(pool)?;
        let slots = &mut source.ids[first as usize..end as usize];
        if let Some((slot, id)) =
            slots.iter().zip(&ids).find(|(slot, id)| **slot != NOT_DECLARED && slot != id)
        {
            return Err(bad("a block of the prompt was declared with another id")
                .with("before", slot)
                .with("now", id));
        }
        slots.copy_from_slice(&ids);
        for at in &mut source.done[chunk.layers.start as usize..chunk.layers.end as usize] {
            *at = chunk.tokens.end;
        }
        let last = source.final_blocks(chunk.tokens.end, page_tokens, early);
        Ok(Rect { layers: chunk.layers, blocks: first..last.max(first) })
    }

    fn finish(&mut self, now: Time, room: RoomId) {
        let Some(r) = self.rooms.get(&claimed(room)) else { return };
        let Some(source) = &r.source else { return };
        let prefix = r.held.as_ref().map_or(0, |h| h.offer.span.prefix_tokens);
        let short = source.done.iter().position(|&d| d.max(prefix) < source.tokens);
        if let (Phase::Running, Some(layer)) = (&r.phase, short) {
            let why = Error::new(ErrorKind::Incomplete, "the prefill finished before every page")
                .with("layer", layer)
                .with("tokens_declared", source.done[layer])
                .with("tokens", source.tokens);
            self.give_up(now, claimed(room), why.to_refusal());
        }
    }

    // ---- the decode's side ----------------------------------------------------------------

    fn peer(&mut self, now: Time, link: LinkId, msg: PeerMsg, echo_sent: Time) {
        match msg {
            PeerMsg::Offer(offer) => {
                let (room, grant) = (offer.room, offer.grant);
                match self.offer(now, link, *offer, echo_sent) {
                    // It is repeated, and then counts.
                    Ok(None) => {}
                    Ok(Some((slot, fresh))) => {
                        let msg = PeerMsg::OfferAck { room, grant };
                        self.out.push_back(Output::Send { link, msg });
                        if fresh {
                            self.say_granted(slot);
                            self.make_all_ready(slot);
                            self.pump(now, slot);
                        }
                        self.rearm(slot);
                    }
                    Err(e) => {
                        let msg = PeerMsg::Abort { room, grant, why: e.to_refusal() };
                        self.out.push_back(Output::Send { link, msg });
                    }
                }
            }
            PeerMsg::Renew { room, grant, lease_ms } => {
                if let Some((slot, h)) = self.held(link, room, grant) {
                    h.lease_until = h.lease_until.max(echo_sent.plus_ms(holder_ms(lease_ms)));
                    self.rearm(slot);
                }
            }
            PeerMsg::ServeAck { room, grant, serve } => {
                if let Some((slot, h)) = self.held(link, room, grant)
                    && h.serve.as_ref().is_some_and(|s| s.0.serve == serve)
                {
                    h.serve = None;
                    self.serve_next(now, slot);
                    self.rearm(slot);
                }
            }
            PeerMsg::Ended { room, grant, outcome } => {
                self.decided(now, link, room, grant, outcome)
            }
            PeerMsg::Abort { room, grant, why } => {
                self.decided(now, link, room, grant, Outcome::Failed { why, bytes: 0 });
            }
            PeerMsg::Heartbeat
            | PeerMsg::Probe
            | PeerMsg::Describe(_)
            | PeerMsg::Ready
            | PeerMsg::Bye(_)
            | PeerMsg::OfferAck { .. }
            | PeerMsg::Serve(_)
            | PeerMsg::Quiesced { .. } => {}
        }
    }

    fn held(&mut self, link: LinkId, room: RoomId, grant: GrantId) -> Option<(Slot, &mut Held)> {
        let slot = *self.by_grant.get(&(link, grant)).filter(|slot| slot.0 == room)?;
        Some((slot, self.rooms.get_mut(&slot)?.held.as_mut()?))
    }

    /// Takes an offer; says where it is and whether it is new, or nothing if it may be older than
    /// its lanes.
    fn offer(
        &mut self,
        now: Time,
        link_id: LinkId,
        offer: Offer,
        echo_sent: Time,
    ) -> Result<Option<(Slot, bool)>> {
        let room = offer.room;
        if let Some(past) = self.ended.get(&room) {
            return Err(past.reason(room));
        }
        if room > RoomId::MAX || offer.grant == GrantId::NONE {
            return Err(Error::new(ErrorKind::Malformed, "bad room or grant number")
                .with("room", room)
                .with("grant", offer.grant));
        }
        self.check_fits(offer.span.tokens)?;
        let Some(link) = self.links.get_mut(&link_id) else {
            return Err(Error::new(ErrorKind::PeerLost, "the link is not up"));
        };
        let peer = link.peer.identity.clone();
        if let Some(past) = self.early.get(&peer).and_then(|m| m.get(&room)) {
            return Err(past.reason(room));
        }
        let range = offer.span.blocks(&self.config.layout)?;
        let grid = Grid::new(&self.config.layout, range.end - range.start, link.part_bytes)?;
        if offer.blocks.len() != u64::from(grid.blocks()) {
            return Err(Error::new(ErrorKind::InvalidPlan, "wrong number of blocks in the offer")
                .with("found", offer.blocks.len())
                .with("expected", grid.blocks()));
        }
        if offer.lanes.is_empty() || offer.lanes.len() > usize::from(limits::LANES_PER_LINK_MAX) {
            return Err(Error::new(ErrorKind::Malformed, "an offer needs lanes")
                .with("found", offer.lanes.len()));
        }
        let usable = |id: &LaneId| {
            link.path != DataPath::OneSided
                || !link.down.contains(id) && link.renewed.get(id).is_none_or(|&at| at < echo_sent)
        };
        let lanes: Vec<HeldLane> = offer
            .lanes
            .iter()
            .filter(|(id, _)| usable(id))
            .map(|&(id, _)| HeldLane { id, in_flight: 0, progress: now })
            .collect();
        let slot = match self.rooms.contains_key(&claimed(room)) {
            true => claimed(room),
            false => (room, Some(link_id)),
        };
        let words = offer.blocks.words();
        // A number names one room of its link, also while its engine is not quiet yet: what the
        // engine says of it must not be taken for another room's.
        let number = (link_id, offer.grant);
        let used = self.by_grant.get(&number).is_some_and(|other| *other != slot);
        if used || self.withheld.contains_key(&number) {
            return Err(Error::new(ErrorKind::Malformed, "the grant's number is another room's")
                .with("grant", offer.grant)
                .with("room", room)
                .blamed(Blame::Decode)
                .hint("grant numbers are used once in a worker's life"));
        }
        match self.rooms.get(&slot) {
            Some(r) => {
                if let Some(h) = &r.held {
                    if h.link == link_id && h.offer.grant == offer.grant {
                        return Ok(Some((slot, false)));
                    }
                    return Err(Error::new(
                        ErrorKind::DuplicateRoom,
                        "the room has a grant already",
                    )
                    .with("room", room)
                    .with("of", &h.peer)
                    .blamed(Blame::Caller));
                }
                if let Some(want) = r.decode.as_ref().filter(|want| **want != peer) {
                    return Err(Error::new(
                        ErrorKind::Unauthorized,
                        "the room is another decode's",
                    )
                    .with("room", room)
                    .with("expected", want)
                    .with("found", &peer));
                }
                if r.phase != Phase::Running {
                    return Err(
                        Error::new(ErrorKind::RoomEnded, "the room is ending").with("room", room)
                    );
                }
                if lanes.is_empty() {
                    return Ok(None);
                }
                let tokens = r.source.as_ref().map_or(offer.span.tokens, |s| s.tokens);
                if tokens != offer.span.tokens {
                    return Err(lengths_differ(tokens, offer.span.tokens));
                }
            }
            None if lanes.is_empty() => return Ok(None),
            None => {
                if self.draining {
                    return Err(Error::new(ErrorKind::Draining, "the prefill takes no new rooms")
                        .blamed(Blame::Prefill)
                        .hint("use another prefill worker"));
                }
                let full = self.rooms.len() >= self.config.rooms_max
                    || link.orphans >= self.config.orphans_max
                    || link.orphan_words + words > limits::ORPHAN_WORDS_PER_LINK_MAX;
                if full {
                    return Err(Error::new(ErrorKind::Busy, "too many offers wait for their legs")
                        .with("waiting", link.orphans)
                        .with("limit", self.config.orphans_max)
                        .with("words", link.orphan_words + words)
                        .with("words_max", limits::ORPHAN_WORDS_PER_LINK_MAX)
                        .blamed(Blame::Prefill)
                        .hint("send the prefill leg when the decode leg is sent"));
                }
                link.orphans += 1;
                link.orphan_words += words;
                let deadline = now.plus_ms(self.config.room_deadline_ms);
                self.rooms.insert(slot, Room::new(None, None, deadline));
            }
        }
        let path = link.path;
        let lease_until = echo_sent.plus_ms(holder_ms(offer.lease_ms));
        self.by_grant.insert((link_id, offer.grant), slot);
        if let Some(r) = self.rooms.get_mut(&slot) {
            let mut held = Held {
                link: link_id,
                peer,
                path,
                grid,
                first_block: range.start,
                parts: Vec::new(),
                unacked: grid.parts(),
                ready: VecDeque::new(),
                later: BTreeSet::new(),
                tries: HashMap::new(),
                lanes,
                lease_until,
                tainted: false,
                serve: None,
                serves: 0,
                offer: Arc::new(offer),
            };
            // An offer that nobody has claimed costs its block list and no more.
            if r.source.is_some() {
                held.number_parts();
            }
            r.held = Some(held);
        }
        Ok(Some((slot, true)))
    }

    /// The decode has decided.
    fn decided(&mut self, now: Time, link: LinkId, room: RoomId, grant: GrantId, outcome: Outcome) {
        let Some(l) = self.links.get_mut(&link) else { return };
        let quiet = |clean| {
            let msg = PeerMsg::Quiesced { room, grant, clean, heard: true };
            Output::Send { link, msg }
        };
        let granted = self.by_grant.get(&(link, grant)).copied().filter(|slot| slot.0 == room);
        // Without a grant of this link: the offer was overtaken or never made, so the room cannot
        // be done, and only the decode that the leg waits for may end it.
        let waiting = self.rooms.get(&claimed(room)).is_some_and(|r| {
            r.held.is_none()
                && !outcome.is_done()
                && r.decode.as_ref().is_none_or(|d| *d == l.peer.identity)
        });
        let slot = match granted {
            Some(slot) => slot,
            None if waiting => {
                self.out.push_back(quiet(true));
                claimed(room)
            }
            None => {
                // Nothing of it is here, so nothing of it can land. A leg that comes later learns
                // it. Of a room that is over, what was said stands: an answer may be lost, not
                // improved.
                let peer = l.peer.identity.clone();
                let early = self.early.get(&peer).and_then(|m| m.get(&room));
                let past = self.ended.get(&room).or(early);
                self.out.push_back(quiet(past.is_none_or(|past| past.clean)));
                let unheard = past.is_none() && !self.rooms.contains_key(&claimed(room));
                if unheard && !outcome.is_done() {
                    self.remember_early(peer, room, Past { outcome, clean: true });
                }
                return;
            }
        };
        let Some(r) = self.rooms.get_mut(&slot) else { return };
        r.outcome.get_or_insert(outcome);
        r.resend = None;
        match r.phase {
            Phase::Running => self.quiesce(now, slot),
            Phase::Quieting { .. } => {}
            Phase::Quiet => {
                self.say_quiet(slot);
                self.end(slot);
            }
        }
    }

    // ---- parts ----------------------------------------------------------------------------

    fn rooms_of(&self, link: LinkId) -> Vec<Slot> {
        let mut rooms: Vec<Slot> =
            self.by_grant.iter().filter(|(k, _)| k.0 == link).map(|(_, &r)| r).collect();
        rooms.sort_unstable();
        rooms
    }

    fn make_all_ready(&mut self, slot: Slot) {
        let all = Rect { layers: 0..u32::MAX, blocks: 0..u32::MAX };
        self.make_ready(slot, &all);
    }

    /// Marks the parts that touch `fresh` (blocks of the prompt) and are final throughout.
    fn make_ready(&mut self, slot: Slot, fresh: &Rect) {
        let early = self.broken(Mutant::NotFinal);
        let page_tokens = self.config.layout.page_tokens;
        let Some(r) = self.rooms.get_mut(&slot) else { return };
        let (Some(h), Some(source)) = (&mut r.held, &r.source) else { return };
        let shift = |b: u32| b.saturating_sub(h.first_block);
        let here = Rect {
            layers: fresh.layers.clone(),
            blocks: shift(fresh.blocks.start)..shift(fresh.blocks.end),
        };
        // A part that ends in a block which has just become final may begin before it.
        for part in h.grid.touching(&here) {
            let Some(state) = h.parts.get_mut(part.0 as usize) else { continue };
            let Ok(rect) = h.grid.rect(part) else { continue };
            let end = rect.blocks.end + h.first_block;
            let ready = rect.layers.clone().all(|l| {
                source
                    .done
                    .get(l as usize)
                    .is_some_and(|&t| source.final_blocks(t, page_tokens, early) >= end)
            });
            if ready && *state == PartState::Waiting {
                *state = PartState::Ready;
                h.ready.push_back(part);
            }
        }
    }

    /// Posts what may be posted, and ends the posting when all is acknowledged.
    fn pump(&mut self, now: Time, slot: Slot) {
        let Some(r) = self.rooms.get_mut(&slot) else { return };
        if r.phase != Phase::Running {
            return;
        }
        let (Some(h), Some(source)) = (&mut r.held, &r.source) else { return };
        if now >= h.lease_until {
            // The timer is due and ends the room; an event that came before it posts nothing.
            self.rearm(slot);
            return;
        }
        if h.path == DataPath::Puller {
            self.serve_next(now, slot);
            self.rearm(slot);
            return;
        }
        let Some(link) = self.links.get(&h.link) else { return };
        while let Some(&(at, part)) = h.later.first() {
            if at > now {
                break;
            }
            h.later.pop_first();
            h.ready.push_back(part);
        }
        let credit = h.offer.credit_parts;
        while !h.ready.is_empty() {
            let total: u32 = h.lanes.iter().map(|l| l.in_flight).sum();
            let free = h
                .lanes
                .iter_mut()
                .filter(|l| l.in_flight < self.config.in_flight_per_lane)
                .filter(|l| !link.down.contains(&l.id))
                .min_by_key(|l| l.in_flight);
            let Some(lane) = free.filter(|_| total < credit) else { break };
            let Some(part) = h.ready.pop_front() else { break };
            if h.parts[part.0 as usize] != PartState::Ready {
                continue;
            }
            let Ok(rect) = h.grid.rect(part) else { continue };
            if lane.in_flight == 0 {
                lane.progress = now;
            }
            lane.in_flight += 1;
            h.parts[part.0 as usize] = PartState::InFlight(lane.id);
            let from = (h.first_block + rect.blocks.start) as usize;
            let to = (h.first_block + rect.blocks.end) as usize;
            self.out.push_back(Output::Post {
                link: h.link,
                grant: h.offer.grant,
                part,
                lane: lane.id,
                layers: rect.layers,
                ids: source.ids[from..to].into(),
            });
        }
        if h.unacked == 0 {
            self.quiesce(now, slot);
        } else {
            self.rearm(slot);
        }
    }

    /// On pull engines: offers to serve what is ready, one serve at a time.
    fn serve_next(&mut self, now: Time, slot: Slot) {
        let resend_ms = self.config.resend_ms;
        let Some(r) = self.rooms.get_mut(&slot) else { return };
        let (Some(h), Some(source)) = (&mut r.held, &r.source) else { return };
        if r.phase != Phase::Running || h.serve.is_some() || h.ready.is_empty() {
            return;
        }
        let mut numbers: Vec<u32> = h.ready.drain(..).map(|p| p.0).collect();
        numbers.sort_unstable();
        let mut parts: Vec<(u32, u32)> = Vec::new();
        let (mut start, mut end) = (u32::MAX, 0);
        for n in numbers {
            if let Ok(rect) = h.grid.rect(PartId(n)) {
                (start, end) = (start.min(rect.blocks.start), end.max(rect.blocks.end));
            }
            match parts.last_mut() {
                Some((first, count)) if *first + *count == n => *count += 1,
                _ => parts.push((n, 1)),
            }
        }
        let from = (h.first_block + start) as usize;
        let to = (h.first_block + end) as usize;
        let serve = Serve {
            room: slot.0,
            grant: h.offer.grant,
            serve: h.serves,
            parts,
            first_block: start,
            blocks: BlockList::from_ids(&source.ids[from..to]),
            word: 0,
            word_value: h.offer.grant.0,
        };
        h.serves += 1;
        let msg = PeerMsg::Serve(Box::new(serve.clone()));
        self.out.push_back(Output::Send { link: h.link, msg });
        h.serve = Some((serve, Backoff::new(now, resend_ms)));
    }

    fn acked(&mut self, now: Time, link: LinkId, grant: GrantId, part: PartId, lane: LaneId) {
        let Some(&slot) = self.by_grant.get(&(link, grant)) else { return };
        let Some(h) = self.rooms.get_mut(&slot).and_then(|r| r.held.as_mut()) else { return };
        let Some(state) = h.parts.get_mut(part.0 as usize) else { return };
        if *state == PartState::InFlight(lane)
            && let Some(l) = h.lanes.iter_mut().find(|l| l.id == lane)
        {
            l.in_flight = l.in_flight.saturating_sub(1);
            l.progress = now;
        }
        if *state != PartState::Acked {
            // An ack of an earlier try counts: the bytes are in place.
            let waits = matches!(*state, PartState::InFlight(other) if other != lane);
            if waits {
                return;
            }
            // It may still stand in `ready` or `later`; it is skipped there.
            *state = PartState::Acked;
            h.unacked -= 1;
        }
        self.pump(now, slot);
    }

    /// Parts that came back unsent or in doubt go out again, later, or the room fails.
    fn try_again(&mut self, now: Time, slot: Slot, parts: &[(PartId, LaneId)], why: &Refusal) {
        let (retry_ms, tries_max) = (self.config.retry_ms, self.config.part_tries_max);
        let mut rng = self.rng;
        let mut hopeless = None;
        let Some(h) = self.rooms.get_mut(&slot).and_then(|r| r.held.as_mut()) else { return };
        for &(part, lane) in parts {
            let Some(state) = h.parts.get_mut(part.0 as usize) else { continue };
            if *state != PartState::InFlight(lane) {
                continue;
            }
            *state = PartState::Ready;
            if let Some(l) = h.lanes.iter_mut().find(|l| l.id == lane) {
                l.in_flight = l.in_flight.saturating_sub(1);
                l.progress = now;
            }
            let tries = h.tries.entry(part).or_insert(0);
            *tries += 1;
            if *tries >= tries_max {
                hopeless = Some((part, *tries));
            }
            rng ^= rng << 13;
            rng ^= rng >> 7;
            rng ^= rng << 17;
            let wait = (retry_ms << (*tries - 1).min(10)).clamp(1, limits::RETRY_MAX_MS);
            h.later.insert((now.plus_ms(wait / 2 + rng % (wait / 2 + 1)), part));
            self.retries += 1;
        }
        self.rng = rng;
        if let Some((part, tries)) = hopeless {
            let why = Error::new(ErrorKind::NoPath, "a part could not be sent")
                .with("part", part.0)
                .with("tries", tries)
                .with("last", why);
            self.give_up(now, slot, why.to_refusal());
        }
        self.rearm(slot);
    }

    fn lane_down(&mut self, now: Time, link: LinkId, lane: LaneId) {
        let Some(l) = self.links.get_mut(&link) else { return };
        l.down.insert(lane);
        let why = Refusal::new(ErrorKind::NoPath, "the lane was lost");
        for slot in self.rooms_of(link) {
            let Some(h) = self.rooms.get_mut(&slot).and_then(|r| r.held.as_mut()) else { continue };
            let lost: Vec<(PartId, LaneId)> = h
                .parts
                .iter()
                .enumerate()
                .filter(|(_, s)| **s == PartState::InFlight(lane))
                .map(|(n, _)| (PartId(n as u32), lane))
                .collect();
            // Where nobody at the receiver looks at writes, a lane is lent with its connection: the
            // next one may already be another grant's, so this grant must not post on it.
            if h.path == DataPath::OneSided && h.lanes.iter().any(|l| l.id == lane) {
                h.tainted = true;
                h.lanes.retain(|l| l.id != lane);
            }
            let stranded = h.lanes.is_empty();
            if !lost.is_empty() {
                self.try_again(now, slot, &lost, &why);
            }
            if stranded {
                self.give_up(now, slot, why.clone());
            }
            self.pump(now, slot);
        }
    }

    // ---- ends -----------------------------------------------------------------------------

    /// Stops posting. Without a grant there is nothing to stop.
    fn quiesce(&mut self, now: Time, slot: Slot) {
        let Some(r) = self.rooms.get_mut(&slot) else { return };
        if r.phase != Phase::Running {
            return;
        }
        match &r.held {
            Some(h) => {
                r.phase = Phase::Quieting { until: now.plus_ms(self.config.quiet_ms) };
                let (link, grant) = (h.link, h.offer.grant);
                self.out.push_back(Output::Quiesce { link, grant });
                self.rearm(slot);
            }
            None => {
                r.phase = Phase::Quiet;
                r.released = true;
                self.out.push_back(Output::Released { room: slot.0, proof: None });
                self.end(slot);
            }
        }
    }

    fn quiesced(&mut self, now: Time, link: LinkId, grant: GrantId, proof: Q) {
        if let Some((room, _)) = self.withheld.remove(&(link, grant)) {
            self.out.push_back(Output::Released { room, proof: Some(proof) });
            return;
        }
        let Some(&slot) = self.by_grant.get(&(link, grant)) else { return };
        let resend_ms = self.config.resend_ms;
        let Some(r) = self.rooms.get_mut(&slot) else { return };
        let room = slot.0;
        // An offer without a leg has no source.
        if !std::mem::replace(&mut r.released, true) && slot.1.is_none() {
            self.out.push_back(Output::Released { room, proof: Some(proof) });
        }
        r.phase = Phase::Quiet;
        self.say_quiet(slot);
        let Some(r) = self.rooms.get_mut(&slot) else { return };
        if r.outcome.is_some() {
            self.end(slot);
        } else {
            if r.resend.is_none()
                && let Some(h) = &r.held
            {
                let msg = PeerMsg::Quiesced { room, grant, clean: !h.tainted, heard: false };
                r.resend = Some((msg, Backoff::new(now, resend_ms)));
            }
            self.rearm(slot);
        }
    }

    fn say_quiet(&mut self, slot: Slot) {
        let Some(r) = self.rooms.get(&slot) else { return };
        if let Some(h) = &r.held {
            let (room, grant, heard) = (slot.0, h.offer.grant, r.outcome.is_some());
            let msg = PeerMsg::Quiesced { room, grant, clean: !h.tainted, heard };
            self.out.push_back(Output::Send { link: h.link, msg });
        }
    }

    /// This side wants the room to end; the decode decides, where it knows of it.
    fn give_up(&mut self, now: Time, slot: Slot, why: Refusal) {
        let resend_ms = self.config.resend_ms;
        let Some(r) = self.rooms.get_mut(&slot) else { return };
        if r.outcome.is_some() || matches!(r.resend, Some((PeerMsg::Abort { .. }, _))) {
            return;
        }
        let to = match &r.held {
            Some(h) => Some((h.link, h.offer.grant)),
            None => r
                .decode
                .as_ref()
                .and_then(|d| newest_link(&self.links, d).map(|id| (id, GrantId::NONE))),
        };
        if let Some((link, grant)) = to {
            let msg = PeerMsg::Abort { room: slot.0, grant, why: why.clone() };
            self.out.push_back(Output::Send { link, msg: msg.clone() });
            r.resend = Some((msg, Backoff::new(now, resend_ms)));
        }
        if r.held.is_none() {
            r.outcome = Some(Outcome::Failed { why, bytes: 0 });
        }
        self.quiesce(now, slot);
        self.rearm(slot);
    }

    fn end(&mut self, slot: Slot) {
        let Some(r) = self.rooms.get(&slot) else { return };
        if r.outcome.is_none() || !r.released && matches!(r.phase, Phase::Quieting { .. }) {
            return;
        }
        let Some(r) = self.take(&slot) else { return };
        let Some(outcome) = r.outcome else { return };
        let clean = r.held.as_ref().is_none_or(|h| !h.tainted);
        let past = Past { outcome: outcome.clone(), clean };
        match slot {
            (room, None) => {
                self.ended.insert(room, past);
                self.out.push_back(Output::Ended { room, outcome });
            }
            (room, Some(_)) => {
                if let Some(h) = r.held {
                    self.remember_early(h.peer, room, past);
                }
            }
        }
    }

    fn remember_early(&mut self, decode: Identity, room: RoomId, past: Past) {
        if let Some(rooms) = self.early.get_mut(&decode) {
            rooms.insert(room, past);
        } else {
            let mut rooms = Memory::new(limits::ORPHANS_PER_LINK_MAX);
            rooms.insert(room, past);
            self.early.insert(decode, rooms);
        }
    }

    fn link_down(&mut self, now: Time, id: LinkId, why: &Refusal) {
        let Some(link) = self.links.remove(&id) else { return };
        let waits: Vec<Slot> = self
            .rooms
            .iter()
            .filter(|(_, r)| r.held.is_none() && r.decode.as_ref() == Some(&link.peer.identity))
            .map(|(&slot, _)| slot)
            .collect();
        for slot in self.rooms_of(id).into_iter().chain(waits) {
            let Some(r) = self.rooms.get_mut(&slot) else { continue };
            r.resend = None;
            if r.outcome.is_none() {
                r.outcome = Some(match &r.held {
                    Some(_) => Outcome::Unknown { why: why.clone() },
                    None => Outcome::Failed { why: why.clone(), bytes: 0 },
                });
            }
            match r.phase {
                Phase::Running => self.quiesce(now, slot),
                Phase::Quieting { .. } => {}
                Phase::Quiet => self.end(slot),
            }
        }
    }

    // ---- time -----------------------------------------------------------------------------

    fn rearm(&mut self, slot: Slot) {
        let Some(r) = self.rooms.get_mut(&slot) else { return };
        let mut next = match r.phase {
            Phase::Quieting { until } => until,
            _ => r.deadline,
        };
        if let Some((_, resend)) = &r.resend {
            next = next.min(resend.at);
        }
        if let (Phase::Running, Some(h)) = (&r.phase, &r.held) {
            next = next.min(h.lease_until);
            if let Some((at, _)) = h.later.first() {
                next = next.min(*at);
            }
            if let Some((_, resend)) = &h.serve {
                next = next.min(resend.at);
            }
            for lane in h.lanes.iter().filter(|l| l.in_flight > 0) {
                next = next.min(lane.progress.plus_ms(self.config.part_timeout_ms));
            }
        }
        if r.armed != Some(next) {
            if let Some(at) = r.armed {
                self.timers.remove(&(at, slot));
            }
            r.armed = Some(next);
            self.timers.insert((next, slot));
        }
    }

    fn tick(&mut self, now: Time, slot: Slot) {
        let room = slot.0;
        let part_timeout_ms = self.config.part_timeout_ms;
        let Some(r) = self.rooms.get_mut(&slot) else { return };
        if let Some((msg, resend)) = &mut r.resend
            && now >= resend.at
        {
            resend.again(now);
            let msg = msg.clone();
            let link = r.held.as_ref().map(|h| h.link).or_else(|| {
                let decode = r.decode.as_ref()?;
                newest_link(&self.links, decode)
            });
            if let Some(link) = link {
                self.out.push_back(Output::Send { link, msg });
            }
        }
        match &mut r.phase {
            Phase::Quieting { until } if now >= *until => {
                let why = Error::new(ErrorKind::Quarantined, "the engine does not become quiet")
                    .with("room", room)
                    .with("quiet_ms", self.config.quiet_ms)
                    .blamed(Blame::Prefill)
                    .to_refusal();
                r.phase = Phase::Quiet;
                r.released = true;
                r.outcome.get_or_insert(Outcome::Unknown { why: why.clone() });
                if let Some(h) = &mut r.held {
                    h.tainted = true;
                    // An offer without a leg has no source.
                    if let Some(source) = &r.source {
                        let withheld = (room, source.declared());
                        self.withheld.insert((h.link, h.offer.grant), withheld);
                        self.out.push_back(Output::Withheld { room, why });
                    }
                }
                self.say_quiet(slot);
                self.end(slot);
            }
            Phase::Running if now >= r.deadline => {
                let missing = match (&r.source, &r.held) {
                    (None, _) => "prefill leg",
                    (_, None) => "decode's offer",
                    (_, Some(_)) => "pages or acknowledgements",
                };
                let blame = match missing {
                    "decode's offer" => Blame::Decode,
                    _ => Blame::Prefill,
                };
                let why = Error::new(ErrorKind::DeadlineExceeded, "the room's deadline has passed")
                    .with("missing", missing)
                    .blamed(blame);
                // The decode's word may still come; not for long.
                r.deadline = now.plus_ms(self.config.quiet_ms);
                self.give_up(now, slot, why.to_refusal());
            }
            Phase::Running => {
                let Some(h) = &mut r.held else { return };
                if now >= h.lease_until {
                    let why = Error::new(ErrorKind::LeaseExpired, "the grant was not renewed")
                        .with("lease_ms", h.offer.lease_ms)
                        .blamed(Blame::Decode);
                    self.give_up(now, slot, why.to_refusal());
                    return;
                }
                if let Some((serve, resend)) = &mut h.serve
                    && now >= resend.at
                {
                    resend.again(now);
                    let msg = PeerMsg::Serve(Box::new(serve.clone()));
                    self.out.push_back(Output::Send { link: h.link, msg });
                }
                for lane in h.lanes.iter_mut().filter(|l| l.in_flight > 0) {
                    if now >= lane.progress.plus_ms(part_timeout_ms) {
                        lane.progress = now;
                        self.out.push_back(Output::ResetLane { link: h.link, lane: lane.id });
                    }
                }
                self.pump(now, slot);
            }
            // The decode never spoke.
            Phase::Quiet if now >= r.deadline => {
                let why = Error::new(ErrorKind::DeadlineExceeded, "the decode did not decide")
                    .with("missing", "decode's decision")
                    .blamed(Blame::Decode);
                r.outcome.get_or_insert(Outcome::Unknown { why: why.to_refusal() });
                self.end(slot);
            }
            _ => {}
        }
    }
}

fn newest_link(links: &HashMap<LinkId, Link>, decode: &Identity) -> Option<LinkId> {
    links.iter().filter(|(_, l)| l.peer.identity == *decode).map(|(&id, _)| id).max()
}

fn lengths_differ(prefill_tokens: u32, decode_tokens: u32) -> Error {
    Error::new(ErrorKind::InvalidPlan, "prompt lengths differ")
        .with("prefill_tokens", prefill_tokens)
        .with("decode_tokens", decode_tokens)
        .hint("both legs must carry the same prompt")
}

impl Past {
    /// What a decode that comes too late is told: why the room failed, if it did.
    fn reason(&self, room: RoomId) -> Error {
        match &self.outcome {
            Outcome::Failed { why, .. } => why.clone().into(),
            _ => self.refusal(room),
        }
    }
    fn refusal(&self, room: RoomId) -> Error {
        Error::new(ErrorKind::RoomEnded, "the room has ended at the prefill")
            .with("room", room)
            .with("outcome", &self.outcome)
    }
}

impl Held {
    fn number_parts(&mut self) {
        self.parts = vec![PartState::Waiting; self.grid.parts() as usize];
    }
}

impl Source {
    fn declared(&self) -> u32 {
        self.ids.iter().filter(|&&id| id != NOT_DECLARED).count() as u32
    }
    /// Blocks at the start of the prompt that are final once `tokens` are declared.
    fn final_blocks(&self, tokens: u32, page_tokens: u32, early: bool) -> u32 {
        if tokens == self.tokens || early {
            tokens.div_ceil(page_tokens)
        } else {
            tokens / page_tokens
        }
    }
}

impl Room {
    fn new(source: Option<Source>, decode: Option<Identity>, deadline: Time) -> Self {
        Self {
            source,
            decode,
            issuer: None,
            held: None,
            phase: Phase::Running,
            resend: None,
            outcome: None,
            released: false,
            deadline,
            armed: None,
        }
    }
}
