//! Links, their lanes, and the rooms that wait for some.
//!
//! Owns: which links are up, which of their lanes are free or lent, and one queue for each prefill
//! worker. In: rooms with the prefills they need, links and lanes that come and go. Out of
//! [`Lanes::take`]: a room with lanes from every one of its prefills, or one that can have none.
//!
//! Invariants:
//! 1. A room joins the queues of all its prefills at one moment, so two rooms have the same order
//!    in every queue that both are in. Of the rooms whose links are all up, the one that came first
//!    is first in each of its queues: rooms never wait for each other in a circle, and a prefill
//!    that cannot be reached holds up its own rooms only.
//! 2. Lanes go only to a room that is first in all its queues, from all of its links at once.
//! 3. A lane is free, lent or down; `pair_epoch` counts how often it was lent.
//! 4. A room's lanes are spread over the rails as evenly as those that are free allow: it never
//!    waits for a rail.
//! 5. A room waits for as many lanes as it may borrow, or as there are if those are fewer, but for
//!    one at least. One that is down counts for [`limits::LANE_WAIT_MS`], since most are dialled
//!    again at once; one that a withheld grant keeps does not count. Where none is up or counts, no
//!    room waits.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use crate::error::{Blame, Error, ErrorKind, Refusal, Result};
use crate::ids::{Identity, LaneId, LinkId, RoomId, WorkerKey};
use crate::layout::Layout;
use crate::limits;
use crate::msg::peer::DataPath;
use crate::msg::service::WorkerAddress;
use crate::plan::{Share, prove_sources};
use crate::time::Time;

/// Starts of one worker that are dialled at a time; who asks for more waits for a link or the end
/// of its time in the queue.
const DIALS_MAX: usize = 4;

/// Lanes of one link.
pub(super) type LinkLanes = (LinkId, Vec<LaneId>);

/// What becomes of a queued room.
pub(super) enum Turn {
    /// It has these, link by link in the order of its prefills.
    Lent(RoomId, Vec<LinkLanes>),
    /// It can have none.
    Hopeless(RoomId, Error),
}

#[derive(Debug)]
pub(super) struct Lanes {
    /// This worker's own pools.
    own: Arc<[Layout]>,
    per_room: u16,
    peers: BTreeMap<Identity, Peer>,
    links: HashMap<LinkId, Link>,
    waiting: HashMap<RoomId, Waiting>,
    /// How many wait by issuer, so that none can fill the queues alone.
    waiting_by: HashMap<Identity, usize>,
    /// Whose queue may have another head, or its head more lanes.
    moved: BTreeSet<Identity>,
    /// Until when lanes that went down are waited for, soonest first; those that came back since are
    /// still here.
    awaited: VecDeque<(Time, LinkId, LaneId)>,
}

#[derive(Debug, Default)]
struct Peer {
    queue: VecDeque<RoomId>,
    /// Starts of the worker that are being dialled, each at another address: a new one must not wait
    /// for an old one's end, and whoever is at one address must not be dialled twice.
    dialled: Vec<WorkerAddress>,
    link: Option<LinkId>,
}

/// A link that is up.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) peer: WorkerKey,
    pub(super) path: DataPath,
    /// What the peer's rank has for this one.
    pub(super) share: Arc<Share>,
    /// The peer's pools.
    pools: Arc<[Layout]>,
    lanes: Vec<Lane>,
    /// In the order in which they came back.
    free: VecDeque<LaneId>,
    rails: u16,
    /// Why a lane went down last.
    last_loss: Option<Refusal>,
}

#[derive(Clone, Debug)]
struct Lane {
    up: bool,
    /// It is down, and may come back by then.
    awaited: Option<Time>,
    borrower: Option<RoomId>,
    /// A grant whose fence did not complete keeps it.
    withheld: bool,
    pair_epoch: u32,
}

impl Lane {
    /// Whether it is worth waiting for, ever.
    fn has_hope(&self) -> bool {
        self.up || self.awaited.is_some()
    }
}

/// A room in the queues.
#[derive(Debug)]
struct Waiting {
    issuer: Option<Identity>,
    prefills: Vec<WorkerKey>,
    /// All its prefills are linked; before that others go first.
    linked: bool,
}

impl Link {
    pub(super) fn new(
        peer: WorkerKey,
        path: DataPath,
        lanes: u16,
        rails: u16,
        share: Arc<Share>,
        pools: Arc<[Layout]>,
    ) -> Self {
        let lane = Lane { up: true, awaited: None, borrower: None, withheld: false, pair_epoch: 0 };
        let (lanes, free) = (vec![lane; usize::from(lanes)], (0..lanes).map(LaneId).collect());
        Self { peer, path, share, pools, lanes, free, rails: rails.max(1), last_loss: None }
    }
    /// How many lanes a room has to wait for.
    fn wanted(&self, per_room: u16) -> u16 {
        let counted = self.lanes.iter().filter(|l| l.has_hope() && !l.withheld).count();
        per_room.min(counted as u16).max(1)
    }
    fn is_dead(&self) -> bool {
        !self.lanes.iter().any(Lane::has_hope)
    }
    /// Why a lane went down last.
    pub(super) fn last_loss(&self) -> Option<&Refusal> {
        self.last_loss.as_ref()
    }
    /// Says how its lanes are.
    pub(super) fn describe(&self, e: Error) -> Error {
        let count = |which: fn(&Lane) -> bool| self.lanes.iter().filter(|l| which(l)).count();
        let e = e
            .with("lanes_up", count(|l| l.up))
            .with("lanes", self.lanes.len())
            .with("withheld", count(|l| l.withheld));
        match &self.last_loss {
            Some(why) => e.with("last_loss", why),
            None => e,
        }
    }
    /// Takes free lanes, so many if there are: of the rails that it has fewest of already, the one
    /// that has been free the longest. A rail without free lanes holds up nobody.
    fn spread(&mut self, count: u16) -> Vec<LaneId> {
        let mut taken: Vec<LaneId> = Vec::new();
        for _ in 0..count {
            let rail = |id: &LaneId| id.0 % self.rails;
            let had = |id: &LaneId| taken.iter().filter(|t| rail(t) == rail(id)).count();
            let next = self.free.iter().enumerate().min_by_key(|(_, id)| had(id));
            let Some(at) = next.map(|(at, _)| at) else { break };
            taken.extend(self.free.remove(at));
        }
        taken
    }
    fn borrow(&mut self, id: LaneId, room: RoomId) {
        let lane = &mut self.lanes[usize::from(id.0)];
        lane.borrower = Some(room);
        lane.pair_epoch += 1;
    }
}

impl Lanes {
    pub(super) fn new(own: Arc<[Layout]>, per_room: u16) -> Self {
        Self {
            own,
            per_room,
            peers: BTreeMap::new(),
            links: HashMap::new(),
            waiting: HashMap::new(),
            waiting_by: HashMap::new(),
            moved: BTreeSet::new(),
            awaited: VecDeque::new(),
        }
    }
    pub(super) fn link(&self, link: LinkId) -> Option<&Link> {
        self.links.get(&link)
    }
    /// The link to a worker, whichever start of it is there.
    fn link_of(&self, peer: &Identity) -> Option<(LinkId, &Link)> {
        let id = self.peers.get(peer)?.link?;
        Some((id, self.links.get(&id)?))
    }
    /// The link to this start of a worker.
    pub(super) fn link_to(&self, peer: &WorkerKey) -> Option<LinkId> {
        self.link_of(&peer.identity).filter(|(_, l)| l.peer == *peer).map(|(id, _)| id)
    }
    /// Free lanes of all links.
    pub(super) fn free(&self) -> usize {
        self.links.values().map(|l| l.free.len()).sum()
    }
    /// Rooms in the queues.
    pub(super) fn queued(&self) -> usize {
        self.waiting.len()
    }
    /// Rooms of one issuer in the queues.
    pub(super) fn queued_by(&self, issuer: &Identity) -> usize {
        self.waiting_by.get(issuer).copied().unwrap_or(0)
    }
    pub(super) fn is_queued(&self, room: RoomId) -> bool {
        self.waiting.contains_key(&room)
    }
    /// Every room in the queues, in a fixed order; one with several prefills several times.
    pub(super) fn all_queued(&self) -> Vec<RoomId> {
        self.peers.values().flat_map(|p| p.queue.iter().copied()).collect()
    }

    /// Whether a room with these prefills can be granted, as far as their links are known: each is
    /// to the right start and has lanes enough, and together they have what this rank lacks.
    pub(super) fn check<'a>(
        &self,
        prefills: impl IntoIterator<Item = &'a WorkerKey>,
    ) -> Result<()> {
        let asked: Vec<&WorkerKey> = prefills.into_iter().collect();
        let mut pools = Vec::with_capacity(asked.len());
        for &key in &asked {
            let Some((_, link)) = self.link_of(&key.identity) else { continue };
            if link.peer != *key {
                return Err(stale(key, &link.peer));
            }
            if usize::from(self.per_room) > link.lanes.len() {
                return Err(Error::new(
                    ErrorKind::NeverFits,
                    "a room borrows more lanes than the link has",
                )
                .with("prefill", &key.identity)
                .with("lanes_per_room", self.per_room)
                .with("lanes", link.lanes.len())
                .hint("lower lanes_per_room or raise lanes_per_link"));
            }
            pools.push(&link.pools);
        }
        if pools.len() < asked.len() {
            return Ok(());
        }
        prove_sources(&self.own, &pools)
            .map_err(|e| e.with("prefills", names(asked.iter().map(|key| &key.identity))))
    }

    /// Puts a room at the end of the queue of each of its prefills; which of them are to be linked.
    pub(super) fn join(
        &mut self,
        room: RoomId,
        issuer: Option<Identity>,
        prefills: &[&WorkerAddress],
    ) -> Vec<WorkerAddress> {
        let mut unlinked = Vec::new();
        for &address in prefills {
            let identity = &address.key.identity;
            let peer = self.peers.entry(identity.clone()).or_default();
            peer.queue.push_back(room);
            let known = peer.link.is_some()
                || peer
                    .dialled
                    .iter()
                    .any(|d| d.key == address.key || d.address == address.address);
            if !known && peer.dialled.len() < DIALS_MAX {
                peer.dialled.push(address.clone());
                unlinked.push(address.clone());
            }
            self.moved.insert(identity.clone());
        }
        if let Some(issuer) = &issuer {
            *self.waiting_by.entry(issuer.clone()).or_default() += 1;
        }
        let prefills: Vec<WorkerKey> = prefills.iter().map(|a| a.key.clone()).collect();
        let linked = self.all_linked(&prefills);
        self.waiting.insert(room, Waiting { issuer, prefills, linked });
        unlinked
    }
    /// Takes a room out of all its queues, if it is in them.
    pub(super) fn leave(&mut self, room: RoomId) {
        let Some(waiting) = self.waiting.remove(&room) else { return };
        if let Some(issuer) = waiting.issuer
            && let Some(count) = self.waiting_by.get_mut(&issuer)
        {
            *count -= 1;
            if *count == 0 {
                self.waiting_by.remove(&issuer);
            }
        }
        for WorkerKey { identity, .. } in waiting.prefills {
            if let Some(peer) = self.peers.get_mut(&identity) {
                if peer.queue.front() == Some(&room) {
                    peer.queue.pop_front();
                } else {
                    peer.queue.retain(|r| *r != room);
                }
            }
            self.forget_idle(&identity);
            self.moved.insert(identity);
        }
    }
    /// Lends lanes to a room that is first in all its queues, or says which one can have none: it has
    /// left the queues. None when nothing changes for any room.
    pub(super) fn take(&mut self) -> Option<Turn> {
        while let Some(peer) = self.moved.pop_first() {
            if let Some((room, why)) = self.hopeless(&peer) {
                self.leave(room);
                return Some(Turn::Hopeless(room, why));
            }
            let head = self.head(&peer);
            let Some((room, links)) = head.and_then(|room| Some((room, self.ready(room)?))) else {
                continue;
            };
            self.leave(room);
            let lent = links.into_iter().map(|id| (id, self.lend(id, room))).collect();
            return Some(Turn::Lent(room, lent));
        }
        None
    }
    /// A room that waits for a prefill of whose link no lane is left.
    fn hopeless(&self, peer: &Identity) -> Option<(RoomId, Error)> {
        let (_, link) = self.link_of(peer).filter(|(_, l)| l.is_dead())?;
        let wants =
            |room: &RoomId| self.waiting.get(room).is_some_and(|w| w.prefills.contains(&link.peer));
        let room = self.peers.get(peer)?.queue.iter().copied().find(wants)?;
        let why = Error::new(ErrorKind::NoPath, "no lane to the prefill is up")
            .with("prefill", peer)
            .blamed(Blame::Link)
            .hint(
                "see why the last lane went down; until that is mended use another pair of workers",
            );
        Some((room, link.describe(why)))
    }
    /// Whose turn it is at a prefill.
    fn head(&self, peer: &Identity) -> Option<RoomId> {
        let linked = |room: &RoomId| self.waiting.get(room).is_some_and(|w| w.linked);
        self.peers.get(peer)?.queue.iter().copied().find(linked)
    }
    fn all_linked(&self, prefills: &[WorkerKey]) -> bool {
        prefills.iter().all(|key| self.link_of(&key.identity).is_some())
    }
    /// The links of a room that can have its lanes now.
    fn ready(&self, room: RoomId) -> Option<Vec<LinkId>> {
        let each = self.waiting.get(&room)?.prefills.iter().map(|key| {
            let first = self.head(&key.identity) == Some(room);
            let (id, link) = self.link_of(&key.identity)?;
            let wanted = usize::from(link.wanted(self.per_room));
            let fits = link.peer == *key && link.free.len() >= wanted;
            (first && fits).then_some(id)
        });
        each.collect()
    }
    fn lend(&mut self, link: LinkId, room: RoomId) -> Vec<LaneId> {
        let Some(link) = self.links.get_mut(&link) else { return Vec::new() };
        let lent = link.spread(link.wanted(self.per_room));
        lent.iter().for_each(|id| link.borrow(*id, room));
        lent
    }
    /// Gives a room other lanes for those of it that are down, as far as there are free ones; the
    /// ones that are still down.
    pub(super) fn exchange(
        &mut self,
        link: LinkId,
        room: RoomId,
        lanes: &mut [LaneId],
    ) -> BTreeSet<LaneId> {
        let Some(l) = self.links.get_mut(&link) else { return BTreeSet::new() };
        for id in lanes.iter_mut() {
            if l.lanes[usize::from(id.0)].up {
                continue;
            }
            let Some(other) = l.free.pop_front() else { break };
            l.lanes[usize::from(id.0)].borrower = None;
            l.borrow(other, room);
            *id = other;
        }
        lanes.iter().copied().filter(|id| !l.lanes[usize::from(id.0)].up).collect()
    }
    /// Which of a queued room's prefills keeps it waiting, and its link if there is one.
    pub(super) fn obstacle(&self, room: RoomId) -> Option<(&Identity, Option<&Link>)> {
        let keys = &self.waiting.get(&room)?.prefills;
        let link = |key: &&WorkerKey| self.link_of(&key.identity).map(|(_, l)| l);
        let unlinked = keys.iter().find(|key| link(key).is_none());
        let few = |l: &Link| l.free.len() < usize::from(l.wanted(self.per_room));
        let scarce = |key: &&WorkerKey| link(key).is_some_and(few);
        let key = unlinked.or_else(|| keys.iter().find(scarce)).or(keys.first())?;
        Some((&key.identity, link(&key)))
    }

    /// Takes lanes back. `twice` is a defect that the simulator must catch.
    pub(super) fn give_back(&mut self, link: LinkId, lanes: Vec<LaneId>, twice: bool) {
        let Some(link) = self.links.get_mut(&link) else { return };
        for id in lanes {
            let lane = &mut link.lanes[usize::from(id.0)];
            (lane.borrower, lane.withheld) = (None, false);
            if lane.up {
                link.free.extend(std::iter::repeat_n(id, 1 + usize::from(twice)));
            }
        }
        self.moved.insert(link.peer.identity.clone());
    }
    /// Lanes stay with a grant whose fence did not complete.
    pub(super) fn withhold(&mut self, link: LinkId, lanes: &[LaneId]) {
        let Some(link) = self.links.get_mut(&link) else { return };
        lanes.iter().for_each(|id| link.lanes[usize::from(id.0)].withheld = true);
        self.moved.insert(link.peer.identity.clone());
    }
    /// Lanes with their pair epochs.
    pub(super) fn with_epochs(&self, link: LinkId, lanes: &[LaneId]) -> Vec<(LaneId, u32)> {
        let Some(link) = self.links.get(&link) else { return Vec::new() };
        lanes.iter().map(|id| (*id, link.lanes[usize::from(id.0)].pair_epoch)).collect()
    }
    /// A lane works again.
    pub(super) fn lane_up(&mut self, link: LinkId, id: LaneId) {
        let Some(link) = self.links.get_mut(&link) else { return };
        let Some(lane) = link.lanes.get_mut(usize::from(id.0)) else { return };
        lane.awaited = None;
        if !std::mem::replace(&mut lane.up, true) {
            if lane.borrower.is_none() {
                link.free.push_back(id);
            }
            self.moved.insert(link.peer.identity.clone());
        }
    }
    /// A lane does not work; the room that has it.
    pub(super) fn lane_down(
        &mut self,
        now: Time,
        at: LinkId,
        id: LaneId,
        why: Refusal,
    ) -> Option<RoomId> {
        let link = self.links.get_mut(&at)?;
        let lane = link.lanes.get_mut(usize::from(id.0))?;
        // Of an outage the first word counts.
        if std::mem::replace(&mut lane.up, false) {
            let until = now.plus_ms(limits::LANE_WAIT_MS);
            lane.awaited = Some(until);
            self.awaited.push_back((until, at, id));
        }
        link.last_loss = Some(why);
        link.free.retain(|free| *free != id);
        lane.borrower
    }
    /// When [`Lanes::expire`] is due.
    pub(super) fn next_expiry(&self) -> Option<Time> {
        self.awaited.front().map(|(until, ..)| *until)
    }
    /// Waits no more for lanes that did not come back in time.
    pub(super) fn expire(&mut self, now: Time) {
        while let Some(&(until, at, id)) = self.awaited.front().filter(|a| a.0 <= now) {
            self.awaited.pop_front();
            let Some(link) = self.links.get_mut(&at) else { continue };
            let Some(lane) = link.lanes.get_mut(usize::from(id.0)) else { continue };
            if lane.awaited == Some(until) {
                lane.awaited = None;
                self.moved.insert(link.peer.identity.clone());
            }
        }
    }
    /// The engine had no time to bring lanes back: their waits begin anew.
    pub(super) fn stood_still(&mut self, now: Time) {
        let until = now.plus_ms(limits::LANE_WAIT_MS);
        for (old, at, id) in &mut self.awaited {
            let link = self.links.get_mut(at);
            let lane = link.and_then(|l| l.lanes.get_mut(usize::from(id.0)));
            if let Some(lane) = lane.filter(|lane| lane.awaited == Some(*old)) {
                lane.awaited = Some(until);
            }
            *old = until;
        }
    }

    /// A link is up, of which some lanes may be down; which queued rooms cannot be granted, now that
    /// this is known.
    pub(super) fn link_up(
        &mut self,
        now: Time,
        id: LinkId,
        link: Link,
        down: Vec<(LaneId, Refusal)>,
    ) -> Vec<(RoomId, Error)> {
        let identity = link.peer.identity.clone();
        self.links.insert(id, link);
        for (lane, why) in down {
            self.lane_down(now, id, lane, why);
        }
        let peer = self.peers.entry(identity.clone()).or_default();
        peer.dialled.clear();
        peer.link = Some(id);
        let queue: Vec<RoomId> = peer.queue.iter().copied().collect();
        self.moved.insert(identity);
        let mut refused = Vec::new();
        for room in queue {
            let Some(waiting) = self.waiting.get(&room) else { continue };
            if let Err(why) = self.check(&waiting.prefills) {
                refused.push((room, why));
            }
            let linked = self.all_linked(&waiting.prefills);
            if let Some(waiting) = self.waiting.get_mut(&room).filter(|_| linked) {
                waiting.linked = true;
                self.moved.extend(waiting.prefills.iter().map(|key| key.identity.clone()));
            }
        }
        refused
    }
    /// A start of a worker cannot be reached; which rooms wait for it.
    pub(super) fn dial_failed(&mut self, key: &WorkerKey) -> Vec<RoomId> {
        let Some(p) = self.peers.get_mut(&key.identity) else { return Vec::new() };
        p.dialled.retain(|d| d.key != *key);
        // Those for whom another start is still being dialled go on.
        let hopeless = |room: &RoomId| {
            let wanted = self.waiting.get(room).into_iter().flat_map(|w| &w.prefills);
            let mut wanted = wanted.filter(|w| w.identity == key.identity);
            wanted.any(|w| !p.dialled.iter().any(|d| d.key == *w))
        };
        let queue = p.queue.iter().copied().filter(hopeless).collect();
        self.forget_idle(&key.identity);
        queue
    }
    /// A link cannot be had; which rooms wait for it.
    pub(super) fn link_failed(&mut self, peer: &Identity) -> Vec<RoomId> {
        let Some(p) = self.peers.get_mut(peer) else { return Vec::new() };
        p.dialled.clear();
        let queue = p.queue.iter().copied().collect();
        self.forget_idle(peer);
        queue
    }
    /// A link is lost; who was at its other end.
    pub(super) fn link_down(&mut self, id: LinkId) -> Option<WorkerKey> {
        let peer = self.links.remove(&id)?.peer;
        if let Some(p) = self.peers.get_mut(&peer.identity)
            && p.link == Some(id)
        {
            p.link = None;
        }
        self.forget_idle(&peer.identity);
        Some(peer)
    }
    fn forget_idle(&mut self, peer: &Identity) {
        let idle = |p: &Peer| p.link.is_none() && p.dialled.is_empty() && p.queue.is_empty();
        if self.peers.get(peer).is_some_and(idle) {
            self.peers.remove(peer);
        }
    }
}

fn stale(asked: &WorkerKey, found: &WorkerKey) -> Error {
    Error::new(ErrorKind::StaleIncarnation, "the link is to another start of the prefill worker")
        .with("asked", asked)
        .with("linked", found)
        .blamed(Blame::Prefill)
        .hint(
            "if the one asked for is the older, refresh the view of the cluster; if it is the \
             newer, this worker notices within two heartbeats: place the request again",
        )
}

/// Workers by name, for a message.
pub(super) fn names<N: fmt::Display>(workers: impl IntoIterator<Item = N>) -> String {
    workers.into_iter().map(|w| w.to_string()).collect::<Vec<_>>().join(" ")
}
