//! The machine itself; see [`super`] for what it promises and for what goes in and out.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use super::room::{Declared, Leg, PartState, Past, Phase, Room, Taker, TakerLane};
use super::{Chunk, Event, Output, PrefillConfig, Takers};
use crate::ended::Memory;
use crate::error::{Blame, Error, ErrorKind, Refusal, Result};
use crate::ids::{GrantId, Identity, LaneId, LinkId, PartId, Role, RoomId, WorkerKey};
use crate::layout::{KvKind, Layout, PoolMap};
use crate::limits;
use crate::msg::peer::{DataPath, Offer, Outcome, PeerMsg};
use crate::msg::service::Load;
use crate::mutant::Mutant;
use crate::plan::{Blocks, Grid, PartPages, Plan, Rect, Share, Side, Span};
use crate::time::{Backoff, Time, holder_ms};

#[cfg(test)]
#[path = "tests.rs"]
mod tests;

#[derive(Debug)]
struct Link {
    peer: WorkerKey,
    path: DataPath,
    part_bytes: u64,
    share: Arc<Share>,
    /// The decode's pools and, on one-sided paths, where their pages are.
    pools: Arc<[Layout]>,
    maps: Arc<[Arc<PoolMap>]>,
    down: HashSet<LaneId>,
    /// When the lanes came up, and when one came back: an offer that may be older is not about this
    /// connection of it.
    since: Time,
    renewed: HashMap<LaneId, Time>,
    /// Offers whose leg has not come, and words of their block lists.
    orphans: usize,
    orphan_words: usize,
}

impl Link {
    /// Where the parts of an offer go, by the decode's addresses.
    fn plan(&self, offer: &Offer) -> Result<Arc<Plan>> {
        let Offer { span, blocks, .. } = offer;
        let blocks = Blocks::lent(&self.pools, &self.maps, span, blocks)?.into();
        let (share, side) = (self.share.clone(), Side::Destination);
        Plan::new(share, side, span, self.part_bytes, blocks).map(Arc::new)
    }
}

/// One taker of one room.
type Slot = (RoomId, LinkId);

/// Source blocks of a room that has ended while an engine was not quiet: the proofs may still come.
#[derive(Debug)]
struct Withheld<Q> {
    waiting: BTreeSet<(LinkId, GrantId)>,
    proofs: Vec<Q>,
    blocks: u32,
}

/// The machine.
#[derive(Debug)]
pub struct Prefill<Q> {
    config: PrefillConfig,
    rooms: BTreeMap<RoomId, Room<Q>>,
    by_grant: HashMap<(LinkId, GrantId), RoomId>,
    /// Rooms with a taker.
    offered: usize,
    /// Rooms whose serving engine has declared every page.
    owing: usize,
    links: HashMap<LinkId, Link>,
    timers: BTreeSet<(Time, RoomId)>,
    /// Rooms that ended before their leg came, which hears of it once; by decode, so that none can
    /// make another's be forgotten.
    early: Memory<Identity, Memory<RoomId, Past>>,
    /// How rooms with a leg ended.
    ended: Memory<RoomId, Past>,
    draining: bool,
    withheld: HashMap<RoomId, Withheld<Q>>,
    /// Which room a withheld grant is of.
    not_quiet: HashMap<(LinkId, GrantId), RoomId>,
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
            offered: 0,
            owing: 0,
            links: HashMap::new(),
            timers: BTreeSet::new(),
            early: Memory::new(limits::WORKERS_MAX),
            ended: Memory::new(limits::TOMBSTONES_MAX),
            draining: false,
            withheld: HashMap::new(),
            not_quiet: HashMap::new(),
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
            queued: self.rooms.len().saturating_sub(self.offered) as u32,
            free_lanes: 0,
            quarantined_blocks: self
                .withheld
                .values()
                .fold(0, |sum, w| sum.saturating_add(w.blocks)),
            draining: self.draining,
            owing: self.owing as u32,
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
        let Some((r, leg)) = self.rooms.get(&room).and_then(|r| Some((r, r.leg.as_ref()?))) else {
            return Err(Error::new(ErrorKind::NotFound, "no such room").with("room", room));
        };
        let offered = r.claimed().find_map(|(_, t)| t.offer.issuer.as_ref());
        let issuer = offered.or(leg.issuer.as_ref());
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
        let rooms: Vec<RoomId> = self.rooms.keys().copied().collect();
        for room in rooms {
            let Some(r) = self.rooms.get_mut(&room) else { continue };
            for taker in r.takers.values_mut() {
                if let Phase::Quieting { until } = &mut taker.phase {
                    *until = now.plus_ms(self.config.quiet_ms);
                }
            }
            self.rearm(room);
        }
    }

    /// Takes one event.
    pub fn handle_event(&mut self, now: Time, event: Event<Q>) {
        match event {
            Event::Attach { room, tokens, takers, issuer, deadline_ms } => {
                match self.attach(now, room, tokens, takers, issuer, deadline_ms) {
                    Ok(()) => self.start(now, room),
                    Err(why) => self.out.push_back(Output::Refused { room, why }),
                }
            }
            Event::Chunk(chunk) => {
                let room = chunk.room;
                match self.chunk(&chunk) {
                    Ok(()) => {
                        self.out.push_back(Output::ChunkTaken { room });
                        for slot in self.claimed(room) {
                            self.make_ready(slot, &chunk);
                            self.pump(now, slot);
                        }
                        self.rearm(room);
                    }
                    Err(why) => self.out.push_back(Output::Refused { room, why }),
                }
            }
            Event::Finish { room } => self.finish(now, room),
            Event::AbortLocal { room, why } => self.abort(now, room, why),
            Event::AbortBy { from, room, reason } => {
                let why = Error::new(ErrorKind::Aborted, "aborted at the prefill leg")
                    .with("by", from)
                    .with("reason", reason.chars().take(200).collect::<String>());
                self.abort(now, room, why.to_refusal());
            }
            Event::LinkUp { link, peer, path, part_bytes, share, pools, maps, since, down } => {
                let fresh = Link {
                    peer,
                    path,
                    part_bytes,
                    share,
                    pools,
                    maps,
                    down: down.into_iter().collect(),
                    since,
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
                if let Some(slot) = self.slot(link, grant) {
                    self.try_again(now, slot, &[(part, lane)], &why);
                    self.pump(now, slot);
                    self.rearm(slot.0);
                }
            }
            Event::LaneUp { link, lane } => {
                if let Some(l) = self.links.get_mut(&link)
                    && l.down.remove(&lane)
                {
                    l.renewed.insert(lane, now);
                }
                for slot in self.takers_on(link) {
                    self.pump(now, slot);
                    self.rearm(slot.0);
                }
            }
            Event::LaneDown { link, lane } => self.lane_down(now, link, lane),
            Event::Quiesced { link, grant, proof } => self.quiesced(now, link, grant, proof),
            Event::Drain => self.draining = true,
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

    // ---- finding things --------------------------------------------------------------------

    fn slot(&self, link: LinkId, grant: GrantId) -> Option<Slot> {
        self.by_grant.get(&(link, grant)).map(|&room| (room, link))
    }
    fn taker(&mut self, slot: Slot) -> Option<&mut Taker> {
        self.rooms.get_mut(&slot.0)?.takers.get_mut(&slot.1)
    }
    fn held(&mut self, link: LinkId, room: RoomId, grant: GrantId) -> Option<&mut Taker> {
        let slot = self.slot(link, grant).filter(|slot| slot.0 == room)?;
        self.taker(slot)
    }
    fn takers_on(&self, link: LinkId) -> Vec<Slot> {
        let on = self.by_grant.iter().filter(|(key, _)| key.0 == link);
        let mut slots: Vec<Slot> = on.map(|(_, &room)| (room, link)).collect();
        slots.sort_unstable();
        slots
    }
    fn claimed(&self, room: RoomId) -> Vec<Slot> {
        let r = self.rooms.get(&room).into_iter();
        r.flat_map(|r| r.claimed().map(|(&link, _)| (room, link))).collect()
    }

    // ---- the serving engine's side --------------------------------------------------------

    fn attach(
        &mut self,
        now: Time,
        room: RoomId,
        tokens: u32,
        expected: Takers,
        issuer: Option<Identity>,
        deadline_ms: u64,
    ) -> Result<()> {
        if room > RoomId::MAX {
            return Err(
                Error::new(ErrorKind::Malformed, "room number exceeds 2^63-1").with("room", room)
            );
        }
        expected.check()?;
        self.check_fits(tokens)?;
        let known = self.rooms.get(&room);
        if known.is_some_and(|r| r.leg.is_some()) {
            return Err(Error::new(ErrorKind::DuplicateRoom, "the room has a prefill leg already")
                .with("room", room)
                .hint("room numbers are used once; let the coordinator issue them"));
        }
        if let Some(past) = self.ended.get(&room) {
            return Err(past.refusal(room));
        }
        // What came before the leg counts if it came from a decode that the leg names.
        let mut offered: Vec<LinkId> = Vec::new();
        for (&link, t) in known.into_iter().flat_map(|r| &r.takers) {
            if expected.may_take(&t.peer, offered.len()) {
                if t.offer.span.tokens != tokens {
                    return Err(lengths_differ(tokens, t.offer.span.tokens));
                }
                offered.push(link);
            }
        }
        let over = self.ended_early(room, &expected, offered.len());
        if offered.is_empty() && over.is_empty() {
            if self.draining {
                return Err(self.is_draining());
            }
            if self.rooms.len() >= self.config.rooms_max {
                return Err(Error::new(ErrorKind::Busy, "the prefill worker is full")
                    .with("rooms", self.rooms.len())
                    .with("rooms_max", self.config.rooms_max)
                    .blamed(Blame::Prefill));
            }
        }
        let deadline = now.plus_ms(deadline_ms.min(self.config.room_deadline_ms));
        let pools = self.config.pools.iter().map(|layout| Declared::new(layout, tokens)).collect();
        let leg = Leg {
            tokens,
            pools,
            expected,
            issuer,
            deadline,
            ending: None,
            over,
            proofs: Vec::new(),
            released: false,
            finished: false,
        };
        let r = self.rooms.entry(room).or_insert_with(Room::new);
        let mut strangers = Vec::new();
        for (&link, t) in &mut r.takers {
            if offered.contains(&link) {
                no_orphan(&mut self.links, link, t);
                t.claim(deadline);
            } else {
                strangers.push(((room, link), leg.not_for(room, &t.peer)));
            }
        }
        r.leg = Some(leg);
        for (slot, why) in strangers {
            self.give_up(now, slot, why.to_refusal());
        }
        Ok(())
    }

    /// Endings that were heard before the leg came, of the decodes that it expects.
    fn ended_early(
        &self,
        room: RoomId,
        expected: &Takers,
        offered: usize,
    ) -> Vec<(Identity, Past)> {
        let heard = |d: &Identity| Some((d.clone(), self.early.get(d)?.get(&room)?.clone()));
        match expected {
            Takers::Named(names) => names.iter().filter_map(heard).collect(),
            Takers::Any(count) => {
                let mut who: Vec<_> = self.early.iter().filter_map(|(d, _)| heard(d)).collect();
                who.sort_unstable_by(|a, b| a.0.cmp(&b.0));
                who.truncate(usize::from(*count) - offered);
                who
            }
        }
    }

    fn is_draining(&self) -> Error {
        Error::new(ErrorKind::Draining, "the prefill takes no new rooms")
            .blamed(Blame::Prefill)
            .hint("use another prefill worker")
    }

    fn check_fits(&self, tokens: u32) -> Result<()> {
        let each = self.config.pools.iter().zip(self.config.maps.iter());
        for (pool, (layout, map)) in each.enumerate() {
            let blocks = layout.blocks_for(tokens.min(match layout.window_tokens {
                0 => tokens,
                window => window.saturating_add(layout.page_tokens),
            }));
            let most = map.blocks.min(limits::BLOCKS_PER_ROOM_MAX);
            if blocks > most {
                return Err(Error::new(
                    ErrorKind::NeverFits,
                    "the room has more blocks than the prefill's pool",
                )
                .with("tokens", tokens)
                .with("pool", pool)
                .with("blocks", blocks)
                .with("pool_blocks", most)
                .hint("send shorter prompts to this worker or give it a larger pool"));
            }
        }
        // A list of the prompt's blocks is kept, also where layers look at a window only.
        if tokens > limits::BLOCKS_PER_ROOM_MAX.saturating_mul(self.smallest_page()) {
            return Err(Error::new(ErrorKind::NeverFits, "the prompt has too many blocks")
                .with("tokens", tokens)
                .with("page_tokens", self.smallest_page())
                .with("blocks_max", limits::BLOCKS_PER_ROOM_MAX));
        }
        Ok(())
    }
    fn smallest_page(&self) -> u32 {
        let paged = self.config.pools.iter().filter(|l| !matches!(l.kind, KvKind::Rows { .. }));
        paged.map(|l| l.page_tokens).min().unwrap_or(1)
    }

    fn start(&mut self, now: Time, room: RoomId) {
        self.out.push_back(Output::Attached { room });
        for slot in self.claimed(room) {
            self.say_granted(slot);
            // A room without pages has nothing to wait for.
            self.pump(now, slot);
        }
        self.settle(room);
        self.rearm(room);
    }

    fn say_granted(&mut self, slot: Slot) {
        let (room, link) = slot;
        let Some(r) = self.rooms.get(&room) else { return };
        let Some(t) = r.takers.get(&link).filter(|t| t.claimed) else { return };
        let from = r.claimed().map(|(_, t)| t.offer.span.prefix_tokens).min().unwrap_or(0);
        let wanted = r.all_came().then_some(Span { prefix_tokens: from, ..t.offer.span });
        let (grant, parts) = (t.offer.grant, t.grid.parts());
        self.out.push_back(Output::Granted { room, link, grant, parts, wanted });
    }

    /// Takes a chunk.
    fn chunk(&mut self, chunk: &Chunk) -> Result<()> {
        let bad = |why: &str| {
            Error::new(ErrorKind::InvalidPlan, why.to_string())
                .with("room", chunk.room)
                .with("pool", chunk.pool)
                .with("tokens", format!("{:?}", chunk.tokens))
                .with("layers", format!("{:?}", chunk.layers))
                .hint("declare each layer's tokens in order, each block by its one id, up to the prompt's end")
        };
        let pool = chunk.pool as usize;
        let (Some(layout), Some(map)) = (self.config.pools.get(pool), self.config.maps.get(pool))
        else {
            return Err(bad("no such pool").with("pools", self.config.pools.len()));
        };
        let Some(r) = self.rooms.get_mut(&chunk.room).filter(|r| r.leg.is_some()) else {
            return Err(match self.ended.get(&chunk.room) {
                Some(past) => past.refusal(chunk.room),
                None => Error::new(ErrorKind::NotFound, "no such room with a prefill leg")
                    .with("room", chunk.room),
            });
        };
        let wanted_from = r.wanted_from(pool, layout);
        let running = !r.all_came() || r.claimed().any(|(_, t)| t.phase == Phase::Running);
        let Some(leg) = r.leg.as_mut().filter(|leg| leg.ending.is_none() && running) else {
            return Err(
                Error::new(ErrorKind::RoomEnded, "the room is ending").with("room", chunk.room)
            );
        };
        let Some(source) = leg.pools.get_mut(pool) else { return Err(bad("no such pool")) };
        // Rows are there though the prompt has no tokens.
        let rows = matches!(layout.kind, KvKind::Rows { .. });
        let empty = chunk.tokens.is_empty() && !(rows && leg.tokens == 0);
        if empty || chunk.tokens.end > leg.tokens {
            return Err(
                bad("chunk is empty or longer than the prompt").with("prompt_tokens", leg.tokens)
            );
        }
        let layers = chunk.layers.start as usize..chunk.layers.end as usize;
        let Some(done) = source.done.get(layers.clone()).filter(|d| !d.is_empty()) else {
            return Err(bad("chunk names layers that this rank does not have")
                .with("rank_layers", layout.layers));
        };
        let (first, end) = if let KvKind::Rows { rows } = layout.kind {
            if chunk.tokens != (0..leg.tokens) {
                return Err(bad("rows are declared once, with the whole prompt")
                    .with("prompt_tokens", leg.tokens));
            }
            (0, rows)
        } else {
            // What nobody wants may be left out.
            let start = chunk.tokens.start;
            let follows = |at: u32| at == start || at == 0 && start <= wanted_from;
            if let Some(at) = done.iter().find(|&&at| !follows(at)) {
                return Err(
                    bad("chunk does not begin where the last one ended").with("expected", at)
                );
            }
            (start / layout.page_tokens, chunk.tokens.end.div_ceil(layout.page_tokens))
        };
        if chunk.blocks.len() != u64::from(end - first) {
            return Err(bad("wrong number of blocks")
                .with("found", chunk.blocks.len())
                .with("expected", end - first));
        }
        let ids = chunk.blocks.expand(map.blocks)?;
        source.declare(first, &ids)?;
        for at in &mut source.done[layers] {
            *at = chunk.tokens.end.max(u32::from(rows));
        }
        Ok(())
    }

    fn finish(&mut self, now: Time, room: RoomId) {
        let Some(r) = self.rooms.get(&room) else { return };
        let Some(leg) = r.leg.as_ref().filter(|leg| leg.ending.is_none()) else { return };
        let each = self.config.pools.iter().zip(&leg.pools).enumerate();
        let short = each.into_iter().find_map(|(pool, (layout, source))| {
            let from = r.wanted_from(pool, layout);
            let whole = leg.tokens.max(u32::from(matches!(layout.kind, KvKind::Rows { .. })));
            let layer = source.done.iter().position(|&d| d.max(from) < whole)?;
            Some((pool, layer, source.done[layer]))
        });
        if let Some((pool, layer, done)) = short {
            let why = Error::new(ErrorKind::Incomplete, "the prefill finished before every page")
                .with("pool", pool)
                .with("layer", layer)
                .with("tokens_declared", done)
                .with("tokens", leg.tokens);
            self.abort(now, room, why.to_refusal());
            return;
        }
        if let Some(leg) = self.rooms.get_mut(&room).and_then(|r| r.leg.as_mut())
            && !std::mem::replace(&mut leg.finished, true)
        {
            self.owing += 1;
        }
    }

    /// The serving engine's side ends the room: nobody new may take it, and who has is told.
    fn abort(&mut self, now: Time, room: RoomId, why: Refusal) {
        let Some(r) = self.rooms.get_mut(&room) else { return };
        let named = match r.leg.as_ref().map(|leg| &leg.expected) {
            Some(Takers::Named(names)) => names.as_slice(),
            _ => &[],
        };
        for decode in named.iter().filter(|d| r.waits_for(d)) {
            if let Some(link) = newest_link(&self.links, decode) {
                let msg = PeerMsg::Abort { room, grant: GrantId::NONE, why: why.clone() };
                self.out.push_back(Output::Send { link, msg });
            }
        }
        let Some(leg) = r.leg.as_mut().filter(|leg| leg.ending.is_none()) else { return };
        leg.ending = Some(why.clone());
        for slot in self.claimed(room) {
            // Who is not running any more has sent all, or has been told.
            if self.taker(slot).is_some_and(|t| t.phase == Phase::Running) {
                self.give_up(now, slot, why.clone());
            }
        }
        self.settle(room);
        self.rearm(room);
    }

    // ---- the decode's side ----------------------------------------------------------------

    fn peer(&mut self, now: Time, link: LinkId, msg: PeerMsg, echo_sent: Time) {
        match msg {
            PeerMsg::Offer(offer) => {
                let (room, grant) = (offer.room, offer.grant);
                match self.offer(now, link, *offer, echo_sent) {
                    // It is repeated, and then counts.
                    Ok(None) => {}
                    Ok(Some(fresh)) => {
                        let msg = PeerMsg::OfferAck { room, grant };
                        self.out.push_back(Output::Send { link, msg });
                        if fresh {
                            self.say_granted((room, link));
                            self.make_all_ready((room, link));
                            self.pump(now, (room, link));
                        }
                        self.rearm(room);
                    }
                    Err(e) => {
                        let msg = PeerMsg::Abort { room, grant, why: e.to_refusal() };
                        self.out.push_back(Output::Send { link, msg });
                    }
                }
            }
            PeerMsg::Renew { room, grant, lease_ms } => {
                if let Some(t) = self.held(link, room, grant) {
                    t.lease_until = t.lease_until.max(echo_sent.plus_ms(holder_ms(lease_ms)));
                    self.rearm(room);
                }
            }
            PeerMsg::Ended { room, grant, outcome } => {
                self.decided(now, link, room, grant, outcome);
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
            | PeerMsg::Quiesced { .. }
            | PeerMsg::Engine(_) => {}
        }
    }

    /// Takes an offer; says whether it is new, or nothing if it may be older than its lanes.
    fn offer(
        &mut self,
        now: Time,
        link_id: LinkId,
        offer: Offer,
        echo_sent: Time,
    ) -> Result<Option<bool>> {
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
        let grid = Grid::new(&link.share, &offer.span, link.part_bytes)?;
        check_lists(&link.share, &offer)?;
        if offer.lanes.is_empty() || offer.lanes.len() > usize::from(limits::LANES_PER_LINK_MAX) {
            return Err(Error::new(ErrorKind::Malformed, "an offer needs lanes")
                .with("found", offer.lanes.len()));
        }
        let usable = |id: &LaneId| {
            link.path != DataPath::OneSided
                || !link.down.contains(id)
                    && *link.renewed.get(id).unwrap_or(&link.since) <= echo_sent
        };
        let lanes: Vec<TakerLane> = offer
            .lanes
            .iter()
            .filter(|(id, _)| usable(id))
            .map(|&(id, _)| TakerLane { id, in_flight: 0, progress: now })
            .collect();
        // What is kept of it: on one-sided paths also its lists at full length, in the engine's plan.
        let words = offer.words()
            + match link.path {
                DataPath::OneSided => offer.blocks.iter().map(|l| l.len() as usize).sum(),
                DataPath::ReceiverCopies => 0,
            };
        // A number names one room of its link, also while its engine is not quiet yet: what the
        // engine says of it must not be taken for another room's.
        let number = (link_id, offer.grant);
        let used = self.by_grant.get(&number).is_some_and(|&other| other != room);
        if used || self.not_quiet.contains_key(&number) {
            return Err(Error::new(ErrorKind::Malformed, "the grant's number is another room's")
                .with("grant", offer.grant)
                .with("room", room)
                .blamed(Blame::Decode)
                .hint("grant numbers are used once in a worker's life"));
        }
        let known = self.rooms.get(&room);
        if let Some(t) = known.and_then(|r| r.takers.get(&link_id)) {
            if t.offer.grant == offer.grant {
                return Ok(Some(false));
            }
            return Err(Error::new(ErrorKind::DuplicateRoom, "the room has a grant already")
                .with("room", room)
                .with("of", &t.peer)
                .blamed(Blame::Caller));
        }
        let plan = match link.path {
            DataPath::OneSided if !lanes.is_empty() => Some(link.plan(&offer)?),
            _ => None,
        };
        let (mut leg_deadline, mut orphan) = (None, None);
        match known.and_then(|r| Some((r, r.leg.as_ref()?))) {
            Some((_, leg)) if leg.ending.is_some() => {
                return Err(
                    Error::new(ErrorKind::RoomEnded, "the room is ending").with("room", room)
                );
            }
            Some((r, leg)) if !r.waits_for(&peer) => {
                return Err(leg.not_for(room, &peer));
            }
            Some((_, leg)) => {
                if lanes.is_empty() {
                    return Ok(None);
                }
                if leg.tokens != offer.span.tokens {
                    return Err(lengths_differ(leg.tokens, offer.span.tokens));
                }
                leg_deadline = Some(leg.deadline);
            }
            None if lanes.is_empty() => return Ok(None),
            None => {
                if self.draining {
                    return Err(self.is_draining());
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
                orphan = Some(words);
            }
        }
        let mut taker = Taker {
            peer,
            path: link.path,
            share: link.share.clone(),
            orphan,
            claimed: false,
            parts: Vec::new(),
            unacked: grid.parts(),
            grid,
            ready: VecDeque::new(),
            later: BTreeSet::new(),
            tries: HashMap::new(),
            lanes,
            lease_until: echo_sent.plus_ms(holder_ms(offer.lease_ms)),
            tainted: false,
            phase: Phase::Running,
            resend: None,
            outcome: None,
            deadline: now.plus_ms(self.config.room_deadline_ms),
            offer: Arc::new(offer),
        };
        if let Some(deadline) = leg_deadline {
            taker.claim(deadline);
        }
        if let Some(plan) = plan {
            let (link, grant) = number;
            let lanes = taker.lanes.iter().map(|l| l.id).collect();
            self.out.push_back(Output::Grant { link, grant, lanes, plan });
        }
        self.by_grant.insert(number, room);
        let r = self.rooms.entry(room).or_insert_with(Room::new);
        self.offered += usize::from(r.takers.is_empty());
        r.takers.insert(link_id, taker);
        Ok(Some(true))
    }

    /// The decode has decided.
    fn decided(&mut self, now: Time, link: LinkId, room: RoomId, grant: GrantId, outcome: Outcome) {
        let Some(l) = self.links.get(&link) else { return };
        let peer = l.peer.identity.clone();
        if let Some(t) = self.held(link, room, grant) {
            t.outcome.get_or_insert(outcome);
            t.resend = None;
            match t.phase {
                Phase::Running => self.quiesce(now, (room, link)),
                Phase::Quieting { .. } => {}
                Phase::Quiet => {
                    self.say_quiet((room, link));
                    self.end((room, link));
                }
            }
            return self.rearm(room);
        }
        // Without a grant of this link: the offer was overtaken or never made, so the room cannot
        // be done, nothing of it is here, and nothing of it can land. Of a room that is over, what
        // was said stands: an answer may be lost, not improved.
        let r = self.rooms.get_mut(&room);
        let waits = r.as_ref().is_some_and(|r| r.waits_for(&peer)) && !outcome.is_done();
        let leg = r.and_then(|r| r.leg.as_mut());
        let in_leg = leg.as_ref().and_then(|l| l.over.iter().find(|(who, _)| *who == peer));
        let early = self.early.get(&peer).and_then(|m| m.get(&room));
        let past = in_leg.map(|(_, past)| past).or(self.ended.get(&room)).or(early);
        let clean = past.is_none_or(|past| past.clean);
        let unheard = past.is_none() && leg.is_none() && !outcome.is_done();
        let msg = PeerMsg::Quiesced { room, grant, clean, heard: true };
        self.out.push_back(Output::Send { link, msg });
        let past = Past { outcome, clean: true };
        match leg {
            // Only a decode that the leg waits for has a say.
            Some(leg) if waits => {
                leg.over.push((peer, past));
                self.settle(room);
                self.rearm(room);
            }
            // A leg that comes later learns it.
            None if unheard => self.remember_early(peer, room, past),
            _ => {}
        }
    }

    // ---- parts ----------------------------------------------------------------------------

    fn make_all_ready(&mut self, slot: Slot) {
        for pool in 0..self.config.pools.len() as u32 {
            self.make_parts_ready(slot, &Rect { pool, layers: 0..u32::MAX, cells: 0..u32::MAX });
        }
    }

    /// Marks the parts that a chunk has made final.
    fn make_ready(&mut self, slot: Slot, chunk: &Chunk) {
        let Some(t) = self.taker(slot) else { return };
        let Some(pool) = t.pool(chunk.pool) else { return };
        let ours = pool.layers_at(Side::Source);
        let here = |layer: u32| layer.clamp(ours.start, ours.end) - ours.start;
        let rect = Rect {
            pool: chunk.pool,
            layers: here(chunk.layers.start)..here(chunk.layers.end),
            // A part that ends in a cell which has just become final may begin before it.
            cells: pool.cells_of(&chunk.tokens),
        };
        self.make_parts_ready(slot, &rect);
    }

    /// Marks the parts that touch `fresh` and are final throughout.
    fn make_parts_ready(&mut self, slot: Slot, fresh: &Rect) {
        let early = self.broken(Mutant::NotFinal);
        let Some(r) = self.rooms.get_mut(&slot.0) else { return };
        let (Some(t), Some(leg)) = (r.takers.get_mut(&slot.1), &r.leg) else { return };
        let (Some(pool), Some(source)) =
            (t.share.pool(fresh.pool), leg.pools.get(fresh.pool as usize))
        else {
            return;
        };
        let first_layer = pool.layers_at(Side::Source).start;
        let is_final = |layer: u32, end: u32| {
            let done = source.done.get((first_layer + layer) as usize).copied().unwrap_or(0);
            let done = if early && done > 0 { leg.tokens } else { done };
            // Rows are declared, and so final, also for a prompt without tokens.
            pool.final_cells(done, leg.tokens.max(1)) >= end
        };
        for part in t.grid.touching(fresh) {
            let Some(state) = t.parts.get_mut(part.0 as usize) else { continue };
            let Ok(rect) = t.grid.rect(part) else { continue };
            let ready = rect.layers.clone().all(|layer| is_final(layer, rect.cells.end));
            if ready && *state == PartState::Waiting {
                *state = PartState::Ready;
                t.ready.push_back(part);
            }
        }
    }

    /// Posts what may be posted, and ends the posting when all is acknowledged.
    fn pump(&mut self, now: Time, slot: Slot) {
        let Some(r) = self.rooms.get_mut(&slot.0) else { return };
        let (Some(t), Some(leg)) = (r.takers.get_mut(&slot.1), &r.leg) else { return };
        // Once the lease is over its timer is due and ends the room; an event that came before it
        // posts nothing.
        if t.phase != Phase::Running || !t.claimed || now >= t.lease_until {
            return;
        }
        let Some(link) = self.links.get(&slot.1) else { return };
        while let Some(&(at, part)) = t.later.first() {
            if at > now {
                break;
            }
            t.later.pop_first();
            t.ready.push_back(part);
        }
        let credit = t.offer.credit_parts;
        let mut missing = None;
        while !t.ready.is_empty() {
            let total: u32 = t.lanes.iter().map(|l| l.in_flight).sum();
            let free = t
                .lanes
                .iter_mut()
                .filter(|l| l.in_flight < self.config.in_flight_per_lane)
                .filter(|l| !link.down.contains(&l.id))
                .min_by_key(|l| l.in_flight);
            let Some(lane) = free.filter(|_| total < credit) else { break };
            let Some(part) = t.ready.pop_front() else { break };
            if t.parts[part.0 as usize] != PartState::Ready {
                continue;
            }
            let Ok(rect) = t.grid.rect(part) else { continue };
            let pages = match pages(&t.share, leg, &self.config, rect) {
                Ok(pages) => pages,
                Err(e) => {
                    missing = Some(e.with("part", part.0).to_refusal());
                    break;
                }
            };
            if lane.in_flight == 0 {
                lane.progress = now;
            }
            lane.in_flight += 1;
            t.parts[part.0 as usize] = PartState::InFlight(lane.id);
            self.out.push_back(Output::Post {
                link: slot.1,
                grant: t.offer.grant,
                part,
                lane: lane.id,
                pages,
            });
        }
        if t.unacked == 0 {
            self.quiesce(now, slot);
        }
        if let Some(why) = missing {
            self.give_up(now, slot, why);
        }
    }

    fn acked(&mut self, now: Time, link: LinkId, grant: GrantId, part: PartId, lane: LaneId) {
        let Some(slot) = self.slot(link, grant) else { return };
        let Some(t) = self.taker(slot) else { return };
        let Some(state) = t.parts.get_mut(part.0 as usize) else { return };
        if *state == PartState::InFlight(lane)
            && let Some(l) = t.lanes.iter_mut().find(|l| l.id == lane)
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
            t.unacked -= 1;
        }
        self.pump(now, slot);
        self.rearm(slot.0);
    }

    /// Parts that came back unsent or in doubt go out again, later, or the room fails.
    fn try_again(&mut self, now: Time, slot: Slot, parts: &[(PartId, LaneId)], why: &Refusal) {
        let (retry_ms, tries_max) = (self.config.retry_ms, self.config.part_tries_max);
        let mut rng = self.rng;
        let mut retries = 0;
        let mut hopeless = None;
        let Some(t) = self.taker(slot) else { return };
        for &(part, lane) in parts {
            let Some(state) = t.parts.get_mut(part.0 as usize) else { continue };
            if *state != PartState::InFlight(lane) {
                continue;
            }
            *state = PartState::Ready;
            if let Some(l) = t.lanes.iter_mut().find(|l| l.id == lane) {
                l.in_flight = l.in_flight.saturating_sub(1);
                l.progress = now;
            }
            let tries = t.tries.entry(part).or_insert(0);
            *tries += 1;
            if *tries >= tries_max {
                hopeless = Some((part, *tries));
            }
            rng ^= rng << 13;
            rng ^= rng >> 7;
            rng ^= rng << 17;
            let wait = (retry_ms << (*tries - 1).min(10)).clamp(1, limits::RETRY_MAX_MS);
            t.later.insert((now.plus_ms(wait / 2 + rng % (wait / 2 + 1)), part));
            retries += 1;
        }
        self.rng = rng;
        self.retries += retries;
        if let Some((part, tries)) = hopeless {
            let why = Error::new(ErrorKind::NoPath, "a part could not be sent")
                .with("part", part.0)
                .with("tries", tries)
                .with("last", why);
            self.give_up(now, slot, why.to_refusal());
        }
    }

    fn lane_down(&mut self, now: Time, link: LinkId, lane: LaneId) {
        let Some(l) = self.links.get_mut(&link) else { return };
        l.down.insert(lane);
        let why = Refusal::new(ErrorKind::NoPath, "the lane was lost");
        for slot in self.takers_on(link) {
            let Some(t) = self.taker(slot) else { continue };
            let lost: Vec<(PartId, LaneId)> = t
                .parts
                .iter()
                .enumerate()
                .filter(|(_, s)| **s == PartState::InFlight(lane))
                .map(|(n, _)| (PartId(n as u32), lane))
                .collect();
            // Where nobody at the receiver looks at writes, a lane is lent with its connection: the
            // next one may already be another grant's, so this grant must not post on it.
            if t.path == DataPath::OneSided && t.lanes.iter().any(|l| l.id == lane) {
                t.tainted = true;
                t.lanes.retain(|l| l.id != lane);
            }
            let stranded = t.lanes.is_empty();
            if !lost.is_empty() {
                self.try_again(now, slot, &lost, &why);
            }
            if stranded {
                self.give_up(now, slot, why.clone());
            }
            self.pump(now, slot);
            self.rearm(slot.0);
        }
    }

    // ---- ends -----------------------------------------------------------------------------

    /// Stops posting for one taker.
    fn quiesce(&mut self, now: Time, slot: Slot) {
        let until = now.plus_ms(self.config.quiet_ms);
        let Some(t) = self.taker(slot).filter(|t| t.phase == Phase::Running) else { return };
        t.phase = Phase::Quieting { until };
        let (link, grant) = (slot.1, t.offer.grant);
        self.out.push_back(Output::Quiesce { link, grant });
    }

    fn quiesced(&mut self, now: Time, link: LinkId, grant: GrantId, proof: Q) {
        if let Some(room) = self.not_quiet.remove(&(link, grant)) {
            if let Some(w) = self.withheld.get_mut(&room) {
                w.waiting.remove(&(link, grant));
                w.proofs.push(proof);
            }
            return self.late_release(room);
        }
        let Some(slot) = self.slot(link, grant) else { return };
        let resend_ms = self.config.resend_ms;
        let Some(r) = self.rooms.get_mut(&slot.0) else { return };
        let Some(t) = r.takers.get_mut(&link) else { return };
        if t.phase == Phase::Quiet {
            return;
        }
        t.phase = Phase::Quiet;
        // An offer without a leg has no source.
        if let Some(leg) = r.leg.as_mut().filter(|_| t.claimed) {
            leg.proofs.push(proof);
        }
        let over = t.outcome.is_some();
        if !over && t.resend.is_none() {
            let (room, clean) = (slot.0, !t.tainted);
            let msg = PeerMsg::Quiesced { room, grant, clean, heard: false };
            t.resend = Some((msg, Backoff::new(now, resend_ms)));
        }
        self.say_quiet(slot);
        if over {
            self.end(slot);
        } else {
            self.settle(slot.0);
        }
        self.rearm(slot.0);
    }

    fn say_quiet(&mut self, slot: Slot) {
        let (room, link) = slot;
        if let Some(t) = self.taker(slot) {
            let (grant, clean, heard) = (t.offer.grant, !t.tainted, t.outcome.is_some());
            let msg = PeerMsg::Quiesced { room, grant, clean, heard };
            self.out.push_back(Output::Send { link, msg });
        }
    }

    /// This side wants the room to end for one taker; its decode decides.
    fn give_up(&mut self, now: Time, slot: Slot, why: Refusal) {
        let resend_ms = self.config.resend_ms;
        let (room, link) = slot;
        let Some(t) = self.taker(slot) else { return };
        if t.outcome.is_some() || matches!(t.resend, Some((PeerMsg::Abort { .. }, _))) {
            return;
        }
        let msg = PeerMsg::Abort { room, grant: t.offer.grant, why };
        t.resend = Some((msg.clone(), Backoff::new(now, resend_ms)));
        self.out.push_back(Output::Send { link, msg });
        self.quiesce(now, slot);
        self.rearm(room);
    }

    /// Ends a taker whose decode has spoken and whose engine is quiet, or will not be.
    fn end(&mut self, slot: Slot) {
        let (room, link) = slot;
        let Some(r) = self.rooms.get_mut(&room) else { return };
        let ready = |t: &Taker| t.outcome.is_some() && t.phase == Phase::Quiet;
        if !r.takers.get(&link).is_some_and(ready) {
            return;
        }
        let Some(mut t) = r.takers.remove(&link) else { return };
        self.offered -= usize::from(r.takers.is_empty());
        no_orphan(&mut self.links, link, &mut t);
        let Some(outcome) = t.outcome else { return };
        self.by_grant.remove(&(link, t.offer.grant));
        let past = Past { outcome, clean: !t.tainted };
        match r.leg.as_mut().filter(|_| t.claimed) {
            Some(leg) => leg.over.push((t.peer, past)),
            None => self.remember_early(t.peer, room, past),
        }
        self.settle(room);
    }

    /// Releases the source of a room when nobody reads it or will, and ends it when every taker is
    /// over.
    fn settle(&mut self, room: RoomId) {
        let one = self.broken(Mutant::TakerForgotten);
        let Some(r) = self.rooms.get_mut(&room) else { return };
        let all_came = r.all_came();
        let is_quiet = |t: &Taker| t.phase == Phase::Quiet;
        let quiet =
            r.claimed().all(|(_, t)| is_quiet(t)) || one && r.claimed().any(|(_, t)| is_quiet(t));
        let takers = r.claimed().count();
        if let Some(leg) = &mut r.leg
            && (all_came || leg.ending.is_some())
        {
            if quiet && !std::mem::replace(&mut leg.released, true) {
                let proofs = std::mem::take(&mut leg.proofs);
                match self.withheld.get_mut(&room) {
                    Some(w) => w.proofs.extend(proofs),
                    None => self.out.push_back(Output::Released { room, proofs }),
                }
            }
            if takers == 0 {
                let outcome = leg.outcome();
                let clean = leg.over.iter().all(|(_, past)| past.clean);
                self.ended.insert(room, Past { outcome: outcome.clone(), clean });
                self.out.push_back(Output::Ended { room, outcome });
                if r.leg.take().is_some_and(|leg| leg.finished) {
                    self.owing -= 1;
                }
                self.late_release(room);
            }
        }
        let Some(r) = self.rooms.get_mut(&room) else { return };
        if r.leg.is_none() && r.takers.is_empty() {
            if let Some(at) = r.armed.take() {
                self.timers.remove(&(at, room));
            }
            self.rooms.remove(&room);
        }
    }

    /// Withheld blocks may change after all, once every engine is quiet and the room is over.
    fn late_release(&mut self, room: RoomId) {
        let runs = self.rooms.get(&room).is_some_and(|r| r.leg.is_some());
        if !runs && self.withheld.get(&room).is_some_and(|w| w.waiting.is_empty()) {
            let proofs = self.withheld.remove(&room).map(|w| w.proofs).unwrap_or_default();
            self.out.push_back(Output::Released { room, proofs });
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
        let peer = link.peer.identity;
        for slot in self.takers_on(id) {
            let Some(t) = self.taker(slot) else { continue };
            t.resend = None;
            t.outcome.get_or_insert_with(|| Outcome::Unknown { why: why.clone() });
            match t.phase {
                Phase::Running => self.quiesce(now, slot),
                Phase::Quieting { .. } => {}
                Phase::Quiet => self.end(slot),
            }
            self.rearm(slot.0);
        }
        // Rooms that name this decode and have not heard of it will not.
        let named = |r: &Room<Q>| {
            let leg = r.leg.as_ref();
            leg.is_some_and(|leg| matches!(leg.expected, Takers::Named(_))) && r.waits_for(&peer)
        };
        let waiting: Vec<RoomId> =
            self.rooms.iter().filter(|(_, r)| named(r)).map(|(&room, _)| room).collect();
        for room in waiting {
            if let Some(leg) = self.rooms.get_mut(&room).and_then(|r| r.leg.as_mut()) {
                let outcome = Outcome::Failed { why: why.clone(), bytes: 0 };
                leg.over.push((peer.clone(), Past { outcome, clean: true }));
            }
            self.settle(room);
            self.rearm(room);
        }
    }

    // ---- time -----------------------------------------------------------------------------

    fn rearm(&mut self, room: RoomId) {
        let Some(r) = self.rooms.get_mut(&room) else { return };
        let leg = r.leg.as_ref().filter(|leg| leg.ending.is_none());
        let mut next = leg.map_or(Time(u64::MAX), |leg| leg.deadline);
        for t in r.takers.values() {
            next = next.min(match t.phase {
                Phase::Quieting { until } => until,
                _ => t.deadline,
            });
            if let Some((_, resend)) = &t.resend {
                next = next.min(resend.at);
            }
            if t.phase == Phase::Running {
                next = next.min(t.lease_until);
                if let Some((at, _)) = t.later.first() {
                    next = next.min(*at);
                }
                for lane in t.lanes.iter().filter(|l| l.in_flight > 0) {
                    next = next.min(lane.progress.plus_ms(self.config.part_timeout_ms));
                }
            }
        }
        if r.armed != Some(next) {
            if let Some(at) = r.armed {
                self.timers.remove(&(at, room));
            }
            r.armed = Some(next);
            self.timers.insert((next, room));
        }
    }

    fn tick(&mut self, now: Time, room: RoomId) {
        let Some(r) = self.rooms.get(&room) else { return };
        let links: Vec<LinkId> = r.takers.keys().copied().collect();
        let due = r.leg.as_ref().filter(|leg| leg.ending.is_none() && now >= leg.deadline);
        if let Some(leg) = due {
            let came = r.claimed().count() + leg.over.len();
            let (missing, blame) = if r.all_came() {
                ("pages or acknowledgements", Blame::Prefill)
            } else {
                ("decode's offer", Blame::Decode)
            };
            let why = Error::new(ErrorKind::DeadlineExceeded, "the room's deadline has passed")
                .with("missing", missing)
                .with("takers", format!("{came} of {}", leg.expected.count()))
                .blamed(blame);
            // The decodes' words may still come; not for long.
            let until = now.plus_ms(self.config.quiet_ms);
            for slot in self.claimed(room) {
                if let Some(t) = self.taker(slot).filter(|t| t.phase == Phase::Running) {
                    t.deadline = until;
                }
            }
            self.abort(now, room, why.to_refusal());
        }
        for link in links {
            self.tick_taker(now, (room, link));
        }
    }

    fn tick_taker(&mut self, now: Time, slot: Slot) {
        let (room, link) = slot;
        let (quiet_ms, part_timeout_ms) = (self.config.quiet_ms, self.config.part_timeout_ms);
        let Some(r) = self.rooms.get_mut(&room) else { return };
        let Some(t) = r.takers.get_mut(&link) else { return };
        let grant = t.offer.grant;
        if let Some((msg, resend)) = &mut t.resend
            && now >= resend.at
        {
            resend.again(now);
            let msg = msg.clone();
            self.out.push_back(Output::Send { link, msg });
        }
        match t.phase {
            Phase::Quieting { until } if now >= until => {
                let why = Error::new(ErrorKind::Quarantined, "the engine does not become quiet")
                    .with("room", room)
                    .with("quiet_ms", quiet_ms)
                    .blamed(Blame::Prefill)
                    .to_refusal();
                t.phase = Phase::Quiet;
                t.outcome.get_or_insert(Outcome::Unknown { why: why.clone() });
                t.tainted = true;
                // An offer without a leg has no source.
                if let Some(leg) = r.leg.as_ref().filter(|_| t.claimed) {
                    let first = !self.withheld.contains_key(&room);
                    let w = self.withheld.entry(room).or_insert_with(|| Withheld {
                        waiting: BTreeSet::new(),
                        proofs: Vec::new(),
                        blocks: leg.declared(),
                    });
                    w.waiting.insert((link, grant));
                    self.not_quiet.insert((link, grant), room);
                    if first {
                        self.out.push_back(Output::Withheld { room, why });
                    }
                }
                self.say_quiet(slot);
                self.end(slot);
            }
            Phase::Running if now >= t.deadline => {
                let why = Error::new(ErrorKind::DeadlineExceeded, "the room's deadline has passed")
                    .with("missing", "prefill leg")
                    .blamed(Blame::Prefill);
                t.deadline = now.plus_ms(quiet_ms);
                self.give_up(now, slot, why.to_refusal());
            }
            Phase::Running if now >= t.lease_until => {
                let why = Error::new(ErrorKind::LeaseExpired, "the grant was not renewed")
                    .with("lease_ms", t.offer.lease_ms)
                    .blamed(Blame::Decode);
                self.give_up(now, slot, why.to_refusal());
            }
            Phase::Running => {
                for lane in t.lanes.iter_mut().filter(|l| l.in_flight > 0) {
                    if now >= lane.progress.plus_ms(part_timeout_ms) {
                        lane.progress = now;
                        self.out.push_back(Output::ResetLane { link, lane: lane.id });
                    }
                }
                self.pump(now, slot);
            }
            // The decode never spoke.
            Phase::Quiet if now >= t.deadline => {
                let why = Error::new(ErrorKind::DeadlineExceeded, "the decode did not decide")
                    .with("missing", "decode's decision")
                    .blamed(Blame::Decode);
                t.outcome.get_or_insert(Outcome::Unknown { why: why.to_refusal() });
                self.end(slot);
            }
            _ => {}
        }
    }
}

/// This side's pages of a part.
fn pages<Q>(share: &Share, leg: &Leg<Q>, config: &PrefillConfig, rect: Rect) -> Result<PartPages> {
    let n = rect.pool as usize;
    let (Some(pool), Some(map), Some(source)) =
        (share.pools().get(n), config.maps.get(n), leg.pools.get(n))
    else {
        return Err(Error::new(ErrorKind::Internal, "a part of no pool").with("pool", n));
    };
    let blocks = pool.blocks(Side::Source, &rect.cells);
    let blocks = Blocks::new(map.clone(), blocks.start, source.get(blocks))?;
    PartPages::new(pool.clone(), Side::Source, rect.layers, rect.cells, blocks)
}

/// An offer that its link counts as unclaimed is so no longer.
fn no_orphan(links: &mut HashMap<LinkId, Link>, link: LinkId, taker: &mut Taker) {
    if let (Some(words), Some(l)) = (taker.orphan.take(), links.get_mut(&link)) {
        l.orphans -= 1;
        l.orphan_words -= words;
    }
}

/// An offer has, for each pool, as many blocks as the decode's layout makes of its span.
fn check_lists(share: &Share, offer: &Offer) -> Result<()> {
    let bad = |what: &str, found: u64, expected: u64| {
        Err(Error::new(ErrorKind::InvalidPlan, what)
            .with("found", found)
            .with("expected", expected)
            .hint("offer one list a pool, as long as the decode's layout makes of the span"))
    };
    let pools = share.pools();
    if offer.blocks.len() != pools.len() {
        return bad(
            "one list of blocks for each pool",
            offer.blocks.len() as u64,
            pools.len() as u64,
        );
    }
    for (pool, list) in pools.iter().zip(&offer.blocks) {
        let wanted: Range<u32> = pool.blocks(Side::Destination, &pool.cells(&offer.span));
        let expected = u64::from(wanted.end - wanted.start);
        if !pool.is_empty() && list.len() != expected {
            return bad("wrong number of blocks in the offer", list.len(), expected);
        }
    }
    Ok(())
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
