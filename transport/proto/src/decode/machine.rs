//! The machine itself; see [`super`] for what it promises and for what goes in and out.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use super::lanes::{Lanes, Link, LinkLanes, Turn};
use super::room::{Flow, Phase, Room, Source};
use super::{CallId, DecodeConfig, Event, Output};
use crate::blocks::BlockList;
use crate::ended::{Ended, Memory};
use crate::error::{Blame, Error, ErrorKind, Refusal};
use crate::grants::FenceHow;
use crate::ids::{GrantId, IdempotencyKey, LaneId, LinkId, PartId, RoomId};
use crate::limits;
use crate::msg::call::Reply;
use crate::msg::peer::{DataPath, Offer, Outcome, PeerMsg};
use crate::msg::service::Load;
use crate::mutant::Mutant;
use crate::plan::{Plan, Side};
use crate::time::{Backoff, Time};

/// What a fence that did not complete keeps from use.
#[derive(Debug)]
struct Withheld {
    blocks: u64,
    lanes: Vec<LinkLanes>,
}

/// The machine.
#[derive(Debug)]
pub struct Decode<F> {
    pub(super) config: DecodeConfig,
    pub(super) next_grant: u64,
    pub(super) rooms: HashMap<RoomId, Room>,
    pub(super) by_grant: HashMap<GrantId, RoomId>,
    pub(super) lanes: Lanes,
    timers: BTreeSet<(Time, RoomId)>,
    pub(super) keys: Memory<IdempotencyKey, RoomId>,
    pub(super) ended: Ended,
    /// Grants whose fence did not complete in time.
    quarantine: HashMap<GrantId, Withheld>,
    pub(super) draining: bool,
    /// Rooms in [`Phase::Over`].
    over: usize,
    /// Which room each waiting call is about.
    pub(super) calls: HashMap<CallId, RoomId>,
    pub(super) out: VecDeque<Output<F>>,
    /// Makes a false proof, for the machine without a fence.
    #[cfg(feature = "mutants")]
    pub forge: Option<fn(GrantId) -> F>,
}

impl<F> Decode<F> {
    /// A worker without rooms.
    pub fn new(config: DecodeConfig) -> Self {
        Self {
            next_grant: config.grant_base,
            lanes: Lanes::new(config.pools.clone(), config.lanes_per_room),
            config,
            rooms: HashMap::new(),
            by_grant: HashMap::new(),
            timers: BTreeSet::new(),
            keys: Memory::new(limits::KEYS_MAX),
            ended: Ended::new(limits::TOMBSTONES_MAX),
            quarantine: HashMap::new(),
            draining: false,
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
        let room = self.timers.first().map(|t| t.0);
        room.into_iter().chain(self.lanes.next_expiry()).min()
    }
    /// How busy the worker is.
    pub fn load(&self) -> Load {
        let withheld: u64 = self.quarantine.values().map(|w| w.blocks).sum();
        Load {
            rooms: self.active() as u32,
            queued: self.lanes.queued() as u32,
            free_lanes: self.lanes.free() as u32,
            quarantined_blocks: withheld.min(u64::from(u32::MAX)) as u32,
            draining: self.draining,
            owing: 0,
        }
    }
    /// Rooms that have not ended.
    pub fn active(&self) -> usize {
        self.rooms.len() - self.over
    }
    /// Lanes lent to rooms, as (link, lane, room); each lane stands here at most once.
    pub fn lent_lanes(&self) -> impl Iterator<Item = (LinkId, LaneId, RoomId)> + '_ {
        let sources = self.rooms.iter().flat_map(|(&id, r)| r.sources.iter().map(move |s| (id, s)));
        sources.flat_map(|(id, s)| {
            s.link.into_iter().flat_map(move |l| s.lanes.iter().map(move |&lane| (l, lane, id)))
        })
    }

    /// This process stood still: what its engine was to do in the meantime has not had its time.
    pub fn stood_still(&mut self, now: Time) {
        self.lanes.stood_still(now);
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
            Event::LinkUp { link, peer, path, lanes, down, rails, share, pools } => {
                let up = Link::new(peer, path, lanes, rails, share, pools);
                for (room, why) in self.lanes.link_up(now, link, up, down) {
                    self.stop(now, room, why.to_refusal());
                }
            }
            Event::DialFailed { peer, why } => {
                for room in self.lanes.dial_failed(&peer) {
                    self.stop(now, room, why.clone());
                }
            }
            Event::LinkFailed { peer, why } => {
                for room in self.lanes.link_failed(&peer) {
                    self.stop(now, room, why.clone());
                }
            }
            Event::LinkDown { link, why } => self.link_down(now, link, &why),
            Event::Peer { link, msg } => self.peer(now, link, msg),
            Event::Arrived { link, grant, part } => self.arrived(now, link, grant, part),
            Event::LaneUp { link, lane } => self.lanes.lane_up(link, lane),
            Event::LaneDown { link, lane, why } => {
                if let Some(room) = self.lanes.lane_down(now, link, lane, why.clone()) {
                    self.lost_lane(now, room, link, lane, &why);
                }
                self.lost_withheld(link, lane);
            }
            Event::Fenced { grant, proof } => self.fenced(now, grant, proof),
            Event::FenceFailed { grant, why } => self.withhold(now, grant, &why),
            Event::Drain => {
                self.draining = true;
                for room in self.lanes.all_queued() {
                    self.stop(now, room, self.draining_refusal());
                }
            }
        }
        self.lend_lanes(now);
    }

    /// Does what is due. Harmless at any time.
    pub fn handle_timeout(&mut self, now: Time) {
        self.lanes.expire(now);
        self.lend_lanes(now);
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
            self.lend_lanes(now);
        }
    }

    // ---- from the queues to the grant -----------------------------------------------------

    pub(super) fn enqueue(&mut self, room: RoomId) {
        let Some(r) = self.rooms.get(&room) else { return };
        let prefills: Vec<_> = r.sources.iter().map(|s| &s.address).collect();
        let unlinked = self.lanes.join(room, r.issuer.clone(), &prefills);
        self.out.extend(unlinked.into_iter().map(Output::Connect));
        self.rearm(room);
    }

    /// Lends lanes as far as they reach; the last thing of every event, when all else is settled.
    fn lend_lanes(&mut self, now: Time) {
        while let Some(turn) = self.lanes.take() {
            let (room, lent) = match turn {
                Turn::Lent(room, lent) => (room, lent),
                Turn::Hopeless(room, why) => {
                    self.refuse_queued(now, room, why.to_refusal());
                    continue;
                }
            };
            let Some(r) = self.rooms.get_mut(&room) else { continue };
            for (s, (link, lanes)) in r.sources.iter_mut().zip(lent) {
                s.path = self.lanes.link(link).map(|l| l.path);
                (s.link, s.lanes) = (Some(link), lanes);
            }
            let unclaimed_ms = self.config.unclaimed_ms;
            r.phase = Phase::Reserved { until: now.plus_ms(unclaimed_ms) };
            let is_lent = r.lent.is_some();
            for call in std::mem::take(&mut r.reserve_calls) {
                self.reply(call, Ok(Reply::Reserved { room, unclaimed_ms }));
            }
            if is_lent {
                self.grant(now, room);
            }
            self.rearm(room);
        }
    }

    /// Opens and offers: lanes are charged and blocks are lent.
    pub(super) fn grant(&mut self, now: Time, room: RoomId) {
        let Some(r) = self.rooms.get_mut(&room) else { return };
        let Some(lent) = &r.lent else { return };
        let mut sources = Vec::with_capacity(r.sources.len());
        for s in &mut r.sources {
            let Some(id) = s.link else { return };
            // Whatever was lost before the grant could not have carried anything of it.
            let lost = self.lanes.exchange(id, room, &mut s.lanes);
            (s.dirty, s.lost) = (false, lost);
            if s.is_cut_off() {
                let why = no_path(s, self.lanes.link(id).and_then(Link::last_loss));
                return self.stop(now, room, why);
            }
            let Some(link) = self.lanes.link(id) else { return };
            let (share, part_bytes) = (link.share.clone(), self.config.part_bytes);
            let plan =
                Plan::new(share, Side::Destination, &lent.span, part_bytes, lent.blocks.clone());
            match plan.map(Arc::new) {
                Ok(plan) => {
                    s.flow = Some(Flow::new(now, plan.clone(), &self.config));
                    sources.push((id, s.lanes.clone(), plan));
                }
                Err(e) => {
                    let why = e.with("prefill", s.identity()).to_refusal();
                    return self.stop(now, room, why);
                }
            }
        }
        r.phase = Phase::Granted;
        let count = sources.len();
        self.out.push_back(Output::Open { grant: r.grant, sources });
        for index in 0..count {
            self.send_offer(room, index);
        }
    }

    fn send_offer(&mut self, room: RoomId, source: usize) {
        let Some(r) = self.rooms.get(&room) else { return };
        let (Some(s), Some(lent)) = (r.sources.get(source), &r.lent) else { return };
        let Some(link) = s.link else { return };
        let lanes = s.offered_lanes();
        // Nothing more can come of it.
        if lanes.is_empty() {
            return;
        }
        let offer = Offer {
            room,
            grant: r.grant,
            issuer: r.issuer.clone(),
            span: lent.span,
            blocks: lent.lists.clone(),
            lanes: self.lanes.with_epochs(link, &lanes),
            credit_parts: limits::PARTS_IN_FLIGHT_PER_LANE * lanes.len() as u32,
            lease_ms: self.config.grant_lease_ms,
        };
        self.out.push_back(Output::Send { link, msg: PeerMsg::Offer(Box::new(offer)) });
    }

    /// A lane that a room has does not work any more.
    fn lost_lane(&mut self, now: Time, room: RoomId, link: LinkId, lane: LaneId, why: &Refusal) {
        let Some(r) = self.rooms.get_mut(&room) else { return };
        let granted = matches!(r.phase, Phase::Granted);
        let Some(s) = r.source_on(link) else { return };
        s.dirty = true;
        s.lost.insert(lane);
        if granted && s.is_cut_off() {
            let why = no_path(s, Some(why));
            return self.stop(now, room, why);
        }
        // A word that was waited for does not matter any more.
        self.settle(now, room);
        self.rearm(room);
    }

    /// A lane that a withheld grant has does not work any more: its next connection is free.
    fn lost_withheld(&mut self, link: LinkId, lane: LaneId) {
        if self.lanes.link(link).is_none_or(|l| l.path != DataPath::OneSided) {
            return;
        }
        let withheld = self.quarantine.values_mut().flat_map(|w| &mut w.lanes);
        let mut of_link = withheld.filter(|(id, _)| *id == link);
        let had = of_link.any(|(_, lanes)| {
            let before = lanes.len();
            lanes.retain(|l| *l != lane);
            lanes.len() < before
        });
        if had {
            self.lanes.give_back(link, vec![lane], false);
        }
    }

    fn return_lanes(&mut self, room: RoomId) {
        let twice = self.broken(Mutant::CreditTwice);
        let Some(r) = self.rooms.get_mut(&room) else { return };
        for (link, lanes) in r.take_lanes() {
            self.lanes.give_back(link, lanes, twice);
        }
    }

    fn link_down(&mut self, now: Time, id: LinkId, why: &Refusal) {
        let Some(peer) = self.lanes.link_down(id) else { return };
        let uses = |s: &Source| s.link == Some(id) || (s.link.is_none() && s.address.key == peer);
        let hit = self.rooms.iter().filter(|(_, r)| r.sources.iter().any(uses));
        let mut hit: Vec<RoomId> = hit.map(|(&room, _)| room).collect();
        // A run must not depend on the order of a hash map.
        hit.sort_unstable();
        for room in hit {
            let Some(r) = self.rooms.get_mut(&room) else { continue };
            // The sender's word will not come.
            if let Some(s) = r.source_on(id) {
                (s.path, s.dirty) = (None, true);
            }
            match &r.phase {
                Phase::Over { .. } => self.told(room, id),
                // The decision stands.
                Phase::Stopping { .. } | Phase::Quieting { .. } => self.settle(now, room),
                Phase::Fencing { .. } => {}
                _ => self.stop(now, room, why.clone()),
            }
            self.rearm(room);
        }
    }

    // ---- the room's way -------------------------------------------------------------------

    fn peer(&mut self, now: Time, link: LinkId, msg: PeerMsg) {
        match msg {
            PeerMsg::OfferAck { room, grant } => {
                let source = self.source_of(link, room, grant);
                if let Some(flow) = source.and_then(|s| s.flow.as_mut()) {
                    flow.acked = true;
                    self.complete(now, room);
                    self.rearm(room);
                }
            }
            PeerMsg::Quiesced { room, grant, clean, heard } => {
                self.quiesced(now, link, room, grant, clean);
                if !heard {
                    self.tell_again(link, room, grant);
                } else if self
                    .rooms
                    .get(&room)
                    .is_some_and(|r| matches!(r.phase, Phase::Over { .. }) && r.grant == grant)
                {
                    self.told(room, link);
                }
            }
            PeerMsg::Abort { room, grant, why } => {
                if self.may_abort(link, room, grant) {
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
            | PeerMsg::Ended { .. }
            | PeerMsg::Engine(_) => {}
        }
    }

    /// The source that a message is from, if it means this room: its link and its grant, or nothing.
    fn source_of(&mut self, link: LinkId, room: RoomId, grant: GrantId) -> Option<&mut Source> {
        let unchecked = self.broken(Mutant::NoGrantCheck);
        let r = self.rooms.get_mut(&room)?;
        let means_it = unchecked || r.lent.is_some() && r.grant == grant;
        r.source_on(link).filter(|_| means_it)
    }

    /// Whether the worker at the link is one of the room's. Before the offer it has no grant to name.
    fn may_abort(&mut self, link: LinkId, room: RoomId, grant: GrantId) -> bool {
        let peer = self.lanes.link(link).map(|l| &l.peer);
        let early = |s: &Source| {
            (s.link.is_none() || grant == GrantId::NONE) && peer == Some(&s.address.key)
        };
        self.rooms.get(&room).is_some_and(|r| r.sources.iter().any(early))
            || self.source_of(link, room, grant).is_some()
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

    fn arrived(&mut self, now: Time, link: LinkId, grant: GrantId, part: PartId) {
        let counted = self.broken(Mutant::PartsCounted);
        let mixed = self.broken(Mutant::LinksMixed);
        let lease_ms = self.config.grant_lease_ms;
        let Some(&room) = self.by_grant.get(&grant) else { return };
        let Some(r) = self.rooms.get_mut(&room) else { return };
        let granted = matches!(r.phase, Phase::Granted);
        if mixed {
            r.sources
                .iter_mut()
                .filter_map(|s| s.flow.as_mut())
                .for_each(|f| f.arrive(part, false));
        }
        let Some(flow) = r.source_on(link).and_then(|s| s.flow.as_mut()) else { return };
        flow.arrive(part, counted);
        if granted {
            if flow.renew(now, lease_ms) {
                let msg = PeerMsg::Renew { room, grant, lease_ms };
                self.out.push_back(Output::Send { link, msg });
            }
            self.complete(now, room);
            self.rearm(room);
        }
    }

    fn quiesced(&mut self, now: Time, link: LinkId, room: RoomId, grant: GrantId, clean: bool) {
        let incomplete_at = now.plus_ms(4 * self.config.quiesce_ms);
        let Some(s) = self.source_of(link, room, grant) else { return };
        s.quiesced = Some(clean);
        s.dirty |= !clean;
        if let Some(flow) = &mut s.flow {
            // Nothing more is sent. What is missing may still be in this side's own engine.
            flow.incomplete_at.get_or_insert(incomplete_at);
            // Who says this knows of the offer, whatever became of its answer.
            flow.acked = true;
        }
        self.settle(now, room);
        self.rearm(room);
    }

    /// Ends the room as done if nothing is missing and nothing older can land.
    fn complete(&mut self, now: Time, room: RoomId) {
        let quiesce_ms = self.config.quiesce_ms;
        let one = self.broken(Mutant::SourceMissing);
        let Some(r) = self.rooms.get_mut(&room) else { return };
        let complete = |s: &Source| s.is_complete();
        let all = r.sources.iter().all(complete) || one && r.sources.iter().any(complete);
        if !matches!(r.phase, Phase::Granted) || !all {
            return;
        }
        if r.is_quiet() {
            self.fence_done(now, room);
        } else {
            r.phase = Phase::Quieting { until: now.plus_ms(quiesce_ms) };
        }
    }

    /// Goes on if there is no word left that the room waits for.
    fn settle(&mut self, now: Time, room: RoomId) {
        let Some(r) = self.rooms.get(&room) else { return };
        match &r.phase {
            Phase::Granted => self.complete(now, room),
            Phase::Quieting { .. } if r.is_quiet() => self.fence_done(now, room),
            Phase::Stopping { outcome, .. } if !r.sources.iter().any(Source::is_awaited) => {
                let outcome = outcome.clone();
                self.fence(now, room, outcome);
            }
            _ => {}
        }
    }

    /// Ends the room as done: nothing is missing.
    fn fence_done(&mut self, now: Time, room: RoomId) {
        let Some(bytes) = self.rooms.get(&room).map(Room::bytes) else { return };
        self.fence(now, room, Outcome::Done { bytes });
    }

    fn fence(&mut self, now: Time, room: RoomId, outcome: Outcome) {
        let trusts = self.broken(Mutant::LossForgotten);
        let Some(r) = self.rooms.get_mut(&room) else { return };
        if r.lent.is_none() {
            return;
        }
        let grant = r.grant;
        let closes = trusts || r.sources.iter().all(Source::is_closed_by_closing);
        let how = if closes { FenceHow::Close } else { FenceHow::Revoke };
        r.phase = Phase::Fencing { outcome, until: now.plus_ms(self.config.fence_ms) };
        #[cfg(feature = "mutants")]
        if self.broken(Mutant::NoFence)
            && let Some(forge) = self.forge
        {
            return self.fenced(now, grant, forge(grant));
        }
        self.out.push_back(Output::Fence { grant, how });
        self.rearm(room);
    }

    /// Decides that the room fails, once, and starts to end it.
    pub(super) fn stop(&mut self, now: Time, room: RoomId, why: Refusal) {
        let Some(r) = self.rooms.get_mut(&room) else { return };
        let outcome = Outcome::Failed { why, bytes: r.bytes() };
        match &r.phase {
            Phase::Queued { .. } | Phase::Reserved { .. } => {
                self.lanes.leave(room);
                // Its grant was never opened; its blocks still come back by a proof.
                if r.lent.is_some() {
                    self.fence(now, room, outcome);
                } else {
                    self.over(now, room, outcome, None, false);
                }
            }
            Phase::Granted | Phase::Quieting { .. } => {
                for link in r.sources.iter().filter(|s| s.path.is_some()).filter_map(|s| s.link) {
                    let msg = PeerMsg::Ended { room, grant: r.grant, outcome: outcome.clone() };
                    self.out.push_back(Output::Send { link, msg });
                }
                if r.sources.iter().any(Source::is_awaited) {
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
        if r.lent.is_some() || !r.watchers.is_empty() {
            return self.stop(now, room, why);
        }
        for call in std::mem::take(&mut r.reserve_calls) {
            self.reply(call, Err(why.clone()));
        }
        self.bury(room);
    }

    fn fenced(&mut self, now: Time, grant: GrantId, proof: F) {
        if let Some(withheld) = self.quarantine.remove(&grant) {
            self.out.push_back(Output::LateProof { grant, proof });
            for (link, lanes) in withheld.lanes {
                self.lanes.give_back(link, lanes, false);
            }
            return;
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
        let lists = r.lent.iter().flat_map(|l| &l.lists);
        let (blocks, bytes) = (lists.map(BlockList::len).sum(), r.bytes());
        let refusal = Error::new(ErrorKind::Quarantined, "the fence cannot complete")
            .with("room", room)
            .with("grant", grant)
            .with("blocks", blocks)
            .with("cause", why)
            .hint("restart the decode worker to get the blocks back")
            .to_refusal();
        // Lanes of a withheld grant may still bring writes; they stay out of the pool. A write comes
        // over the connection that it was posted on, so the next one of a lane brings none.
        let lost = r.sources.iter_mut().filter(|s| s.path == Some(DataPath::OneSided));
        let lost: Vec<LinkLanes> = lost.filter_map(Source::take_lost).collect();
        let lanes = r.take_lanes();
        lanes.iter().for_each(|(link, lanes)| self.lanes.withhold(*link, lanes));
        self.quarantine.insert(grant, Withheld { blocks, lanes });
        for (link, lanes) in lost {
            self.lanes.give_back(link, lanes, false);
        }
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
        self.return_lanes(room);
        let Some(r) = self.rooms.get_mut(&room) else { return };
        let (grant, issuer) = (r.grant, r.issuer.clone());
        self.over += 1;
        r.phase = Phase::Over {
            outcome: outcome.clone(),
            resend: Backoff::new(now, self.config.resend_ms),
            forget: now.plus_ms(self.config.room_deadline_ms),
        };
        r.lent = None;
        // Whoever can be reached is told.
        r.sources.retain_mut(|s| {
            s.flow = None;
            s.link = s.link.or_else(|| self.lanes.link_to(&s.address.key));
            s.link.is_some_and(|link| self.lanes.link(link).is_some())
        });
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
        self.out.push_back(Output::Ended { room, grant, outcome, proof, withheld });
        self.tell(room);
        self.rearm(room);
    }

    /// Tells the sources that have not heard it how the room ended; without any it is buried.
    fn tell(&mut self, room: RoomId) {
        let Some(r) = self.rooms.get(&room) else { return };
        let Phase::Over { outcome, .. } = &r.phase else { return };
        if r.sources.is_empty() {
            return self.bury(room);
        }
        for link in r.sources.iter().filter_map(|s| s.link) {
            let msg = PeerMsg::Ended { room, grant: r.grant, outcome: outcome.clone() };
            self.out.push_back(Output::Send { link, msg });
        }
    }

    /// Who is at the link need not be told any more.
    fn told(&mut self, room: RoomId, link: LinkId) {
        let Some(r) = self.rooms.get_mut(&room) else { return };
        r.sources.retain(|s| s.link != Some(link));
        if r.sources.is_empty() {
            self.bury(room);
        }
    }

    fn bury(&mut self, room: RoomId) {
        self.lanes.leave(room);
        let Some(r) = self.rooms.remove(&room) else { return };
        self.over -= usize::from(matches!(r.phase, Phase::Over { .. }));
        if let Some(at) = r.armed {
            self.timers.remove(&(at, room));
        }
    }

    // ---- time -----------------------------------------------------------------------------

    pub(super) fn rearm(&mut self, room: RoomId) {
        let Some(r) = self.rooms.get_mut(&room) else { return };
        let due = r.due(self.config.grant_lease_ms);
        if r.armed != due {
            if let Some(at) = std::mem::replace(&mut r.armed, due) {
                self.timers.remove(&(at, room));
            }
            self.timers.extend(due.map(|at| (at, room)));
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
                let why = self.no_lane(room).to_refusal();
                self.refuse_queued(now, room, why);
            }
            Phase::Reserved { until } if !in_time || now >= *until => {
                let why = Error::new(ErrorKind::DeadlineExceeded, "the decode leg did not come")
                    .with("missing", "decode leg")
                    .with("unclaimed_ms", self.config.unclaimed_ms)
                    .blamed(Blame::Decode)
                    .hint("send both legs of a request at once");
                self.stop(now, room, why.to_refusal());
            }
            Phase::Granted | Phase::Quieting { .. } if !in_time => {
                let why = r.overdue().to_refusal();
                self.stop(now, room, why);
            }
            Phase::Granted => self.tend(now, room),
            Phase::Quieting { until } if now >= *until => self.fence_done(now, room),
            Phase::Stopping { outcome, until } if now >= *until => {
                let outcome = outcome.clone();
                self.fence(now, room, outcome);
            }
            Phase::Fencing { until, .. } if now >= *until => {
                let why = Error::new(ErrorKind::DeadlineExceeded, "the engine did not answer")
                    .with("fence_ms", self.config.fence_ms)
                    .to_refusal();
                let grant = r.grant;
                self.withhold(now, grant, &why);
            }
            Phase::Over { forget, .. } if now >= *forget => self.bury(room),
            Phase::Over { resend, .. } if now >= resend.at => {
                resend.again(now);
                self.tell(room);
            }
            _ => {}
        }
    }

    fn no_lane(&self, room: RoomId) -> Error {
        let (prefill, link) = match self.lanes.obstacle(room) {
            Some((prefill, link)) => (prefill.to_string(), link),
            None => ("none".into(), None),
        };
        let e = Error::new(ErrorKind::Busy, "no lane became free in time")
            .with("prefill", prefill)
            .with("link", if link.is_some() { "up" } else { "not up yet" })
            .with("ahead", self.lanes.queued().saturating_sub(1))
            .hint("wait longer, or use another pair of workers");
        match link {
            Some(link) => link.describe(e).blamed(Blame::Decode),
            None => e.blamed(Blame::Link),
        }
    }

    /// Keeps a granted room's sources going, or gives the room up for one of them.
    fn tend(&mut self, now: Time, room: RoomId) {
        let lease_ms = self.config.grant_lease_ms;
        let Some(r) = self.rooms.get_mut(&room) else { return };
        if let Some(why) = r.given_up(now, lease_ms) {
            return self.stop(now, room, why.to_refusal());
        }
        let grant = r.grant;
        for index in 0..r.sources.len() {
            let source = self.rooms.get_mut(&room).and_then(|r| r.sources.get_mut(index));
            let Some((link, flow)) = source.and_then(|s| Some((s.link?, s.flow.as_mut()?))) else {
                continue;
            };
            if flow.is_unheard(now) {
                flow.resend.again(now);
                // The holder counts from the repeated offer, so this side does too.
                flow.lease(now, lease_ms);
                self.send_offer(room, index);
            } else if flow.renew(now, lease_ms) {
                let msg = PeerMsg::Renew { room, grant, lease_ms };
                self.out.push_back(Output::Send { link, msg });
            }
        }
    }
}

fn no_path(source: &Source, last: Option<&Refusal>) -> Refusal {
    let e = Error::new(ErrorKind::NoPath, "every lane of the room was lost")
        .with("prefill", source.identity())
        .with("lanes", source.lanes.len());
    last.into_iter()
        .fold(e, |e, why| e.with("last_loss", why))
        .blamed(Blame::Link)
        .hint("place the request again; look at the NICs of both workers if it happens often")
        .to_refusal()
}
