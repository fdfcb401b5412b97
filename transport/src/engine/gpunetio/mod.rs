//! Engine `gpunetio`: the sender's NIC writes pages into the receiver's memory; nobody there runs
//! code for it.
//!
//! Owns: the NICs (one is one rail); for each link a protection domain a NIC and a queue pair a lane;
//! at a receiver the open grants. In: [`Command`]s, the peer's messages, completions. Out:
//! [`EngineEvent`]s. The posting of this build is done by the CPU, over emulated NICs.
//!
//! A lane's queue pair comes up in three messages over the link, the first time and every time after:
//! the sender's `Pair`, the receiver's `Paired` (with the keys of its memory, which nobody else is
//! told), the sender's `Up` ([`wire`]). Each carries the sender's count of the lane's queue pairs, the
//! epoch, so that a late message configures or breaks nothing newer. Either side says `Broken` and
//! takes its end down; a queue pair that saw an error is destroyed and never used again.
//!
//! Invariants:
//! 1. A grant is bound to the queue pairs that its lanes have when it is opened ([`Command::Open`]) or
//!    given ([`Command::Grant`]), and to no later ones: those may be lent to another grant. A post
//!    on any other is refused.
//! 2. A [`Quiesced`] comes when every entry posted for its grant has completed, or its queue pair is
//!    flushed and destroyed (after [`EngineEvent::LaneDown`]); never while a NIC that was lost may still
//!    read the source.
//! 3. A proof by [`FenceHow::Revoke`] comes when every queue pair of the grant is flushed and
//!    destroyed ([`pair`]); by [`FenceHow::Close`], when what the sender's NIC completed has been
//!    taken from the rings. If a NIC is lost before, there is none.
//! 4. What a NIC may still read or write (pages, rings, doorbells, the words of credit) is kept until
//!    the NIC has said that it does not: for ever, if it is lost.
//! 5. Whatever a peer says or writes is checked: a lie costs its lane.

mod grants;
pub mod keys;
mod pair;
pub mod post;
mod rail;
mod receiver;
mod sender;
pub mod wire;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use kvlane_proto::{
    DataPath, Device, Error, ErrorKind, GrantId, LaneId, LinkId, Plan, Refusal, Result, Time,
    WorkerKey, limits,
};

use self::grants::{Fence, Grants};
use self::keys::Keys;
use self::pair::Leaving;
use self::rail::{Access, Rail};
use self::receiver::{Ended, Inbound, Invitation};
use self::sender::{Outbound, Task};
use self::wire::{Blob, Message, RAILS_MAX};
use super::redial::Jitter;
use super::refusals::{nacked, no_lane, no_link, was_reset};
use super::{
    Caps, Command, Engine, EngineEvent, FenceHow, FenceProof, Interest, OpenGrant, Post, Quiesced,
    SendGrant,
};
use crate::clock::now;
use crate::emulated::client::{Hca, Rights};
use crate::memory::{Region, Registry};
use crate::mlx5::SENDS_MAX;
use crate::random::random;
use crate::sys::unix::Name;

/// Entries of a sender's ring unless the configuration says otherwise: what the parts that a lane may
/// have in flight need with pages of 4 KiB.
pub const ENTRIES: u32 = 2048;
/// Fewest entries of a sender's ring.
pub const ENTRIES_MIN: u32 = 16;
/// Immediates that a sender may have under way.
const CREDIT: u32 = 32;
/// Receives that there is room for: those of the credit, and the one that marks the end.
const RECEIVES: u32 = 2 * CREDIT;
/// How often lanes that nothing is expected of are looked at, and NICs asked whether they live.
const LOOK_ROUND_NS: u64 = 100_000;
/// How long an engine that ends waits for its NICs.
const LAST_FLUSH_MS: u64 = 1_000;

/// Settings of the engine.
#[derive(Clone, Debug)]
pub struct GpunetioConfig {
    /// The sockets of the emulated NICs, by rail. Both workers of a link need the same NICs.
    pub nics: Vec<Name>,
    /// Entries of a sender's ring; a power of two. Larger parts are posted piece by piece.
    pub entries: u32,
}

impl GpunetioConfig {
    /// Over these NICs.
    pub fn new(nics: Vec<Name>) -> Self {
        Self { nics, entries: ENTRIES }
    }
}

/// What lanes know of the configuration.
#[derive(Clone, Copy)]
struct Settings {
    entries: u32,
}

fn tell(events: &mut Vec<EngineEvent>, link: LinkId, message: &Message) {
    events.push(EngineEvent::Tell { link, message: message.encode() });
}

/// A grant that parts are posted under.
struct Lent {
    plan: Arc<Plan>,
    /// Its lanes, and the queue pair that each had.
    lanes: Vec<(LaneId, Option<u64>)>,
    stopped: bool,
}

enum Side {
    Receiver {
        lanes: Vec<Inbound>,
    },
    /// Empty until connected.
    Sender {
        lanes: Vec<Outbound>,
        /// The receiver's memory, by rail.
        remote: Vec<Keys>,
        grants: HashMap<GrantId, Lent>,
    },
}

struct Link {
    peer: WorkerKey,
    lanes: u16,
    /// By rail; none where the NIC is lost.
    access: Vec<Option<Access>>,
    side: Side,
    over: bool,
}

struct Quiescing {
    link: LinkId,
    grant: GrantId,
    deadline: Time,
}

/// The engine; see the module.
pub struct GpunetioEngine {
    settings: Settings,
    rails: Vec<Rail>,
    registry: Registry,
    regions: Vec<Arc<Region>>,
    links: BTreeMap<LinkId, Link>,
    grants: Grants,
    quiescing: Vec<Quiescing>,
    jitter: Jitter,
    /// Numbers the receiver's queue pairs.
    serial: u64,
    /// Queue pairs that went out in this turn.
    ended: Vec<Ended>,
    look_round_at: Time,
    /// It slept, so anything may have happened.
    slept: bool,
    /// Events of commands, until the next poll.
    outbox: Vec<EngineEvent>,
}

impl GpunetioEngine {
    /// Opens the NICs; links come with [`Command::Listen`].
    ///
    /// # Errors
    /// [`ErrorKind::Config`] naming the setting, or what opening a NIC said.
    pub fn new(config: GpunetioConfig) -> Result<Self> {
        let GpunetioConfig { nics, entries } = config;
        let refused = |why: &str| Error::new(ErrorKind::Config, format!("gpunetio engine: {why}"));
        if nics.is_empty() || nics.len() > RAILS_MAX {
            return Err(refused("number of NICs is out of range")
                .with("found", nics.len())
                .with("limit", RAILS_MAX)
                .hint("name one NIC for each rail"));
        }
        if !entries.is_power_of_two() || !(ENTRIES_MIN..=SENDS_MAX).contains(&entries) {
            return Err(refused("entries of a ring must be a power of two within limits")
                .with("found", entries)
                .with("limits", format!("{ENTRIES_MIN}..={SENDS_MAX}")));
        }
        let mut rails: Vec<Rail> = Vec::new();
        for nic in &nics {
            let hca = Hca::open(nic).map_err(|e| e.with("nic", nic))?;
            let about = hca.about();
            if let Some(same) = rails.iter().find(|r| r.hca.about().guid == about.guid) {
                return Err(refused("a NIC is named twice")
                    .with("nic", nic)
                    .with("name", &about.name)
                    .with("other", &same.hca.about().name)
                    .with("guid", format!("{:#x}", about.guid))
                    .hint("name each NIC once"));
            }
            rails.push(Rail::new(hca));
        }
        Ok(Self {
            settings: Settings { entries },
            rails,
            registry: Registry::new(&[Device::Host]),
            regions: Vec::new(),
            links: BTreeMap::new(),
            grants: Grants::default(),
            quiescing: Vec::new(),
            jitter: Jitter::new(random()),
            serial: 0,
            ended: Vec::new(),
            look_round_at: Time(0),
            slept: true,
            outbox: Vec::new(),
        })
    }

    fn listen(
        &mut self,
        id: LinkId,
        peer: WorkerKey,
        lanes: u16,
        receiver: bool,
    ) -> Result<Vec<u8>> {
        if lanes == 0 || lanes > limits::LANES_PER_LINK_MAX {
            return Err(Error::new(ErrorKind::LimitExceeded, "number of lanes out of range")
                .with("found", lanes)
                .with("limit", limits::LANES_PER_LINK_MAX));
        }
        if self.links.contains_key(&id) {
            return Err(
                Error::new(ErrorKind::Internal, "link number used twice").with("link", id.0)
            );
        }
        let rights = if receiver { Rights::RemoteWrite } else { Rights::LocalRead };
        let mut access: Vec<Option<Access>> = Vec::new();
        for n in 0..self.rails.len() {
            let hca = &mut self.rails[n].hca;
            match Access::new(hca, rights, &self.regions) {
                Ok(one) => access.push(Some(one)),
                Err(_) if hca.is_lost() => access.push(None),
                Err(e) => {
                    end_access(&mut self.rails, access);
                    return Err(e);
                }
            }
        }
        if access.iter().all(Option::is_none) {
            return Err(self.rails.first().map_or_else(
                || Error::new(ErrorKind::Internal, "the engine has no NIC"),
                |rail| rail.lost().into(),
            ));
        }
        let side = if receiver {
            Side::Receiver { lanes: (0..lanes).map(|n| Inbound::new(id, LaneId(n))).collect() }
        } else {
            let remote = vec![Keys::default(); self.rails.len()];
            Side::Sender { lanes: Vec::new(), remote, grants: HashMap::new() }
        };
        self.links.insert(id, Link { peer, lanes, access, side, over: false });
        let nics = self.rails.iter().map(|rail| rail.hca.about().clone()).collect();
        Ok(Blob { lanes, nics }.encode())
    }

    fn connect(&mut self, now: Time, id: LinkId, remote: &[u8]) -> Result<()> {
        let link = self.links.get_mut(&id).filter(|l| !l.over).ok_or_else(|| no_link(id))?;
        let blob = Blob::decode(remote).map_err(|e| e.with("peer", &link.peer))?;
        let named = |nics: &mut dyn Iterator<Item = &crate::emulated::client::About>| {
            let each: Vec<_> = nics.map(|nic| format!("{} {:#x}", nic.name, nic.guid)).collect();
            each.join(", ")
        };
        let theirs = named(&mut blob.nics.iter());
        if blob.nics.len() != self.rails.len() {
            let ours = named(&mut self.rails.iter().map(|rail| rail.hca.about()));
            return Err(Error::new(
                ErrorKind::Config,
                "gpunetio engine: the two workers have different numbers of NICs",
            )
            .with("found", theirs)
            .with("expected", ours)
            .with("peer", &link.peer)
            .hint("give both workers the same NICs"));
        }
        let Side::Sender { lanes, .. } = &mut link.side else { return Ok(()) };
        if !lanes.is_empty() {
            return Err(Error::new(ErrorKind::Internal, "link connected twice").with("link", id.0));
        }
        let count = link.lanes.min(blob.lanes);
        lanes.extend((0..count).map(|n| Outbound::new(id, LaneId(n))));
        let Self { settings, rails, jitter, outbox, .. } = self;
        let mut each = Each { now, settings: *settings, rails, jitter, events: outbox };
        for n in 0..usize::from(count) {
            let about = each.rails[n % each.rails.len()].hca.about();
            if blob.nics.iter().any(|nic| nic.guid == about.guid) {
                continue;
            }
            let why = Error::new(ErrorKind::NoPath, "the peer does not have the lane's NIC")
                .with("asked", format!("{} {:#x}", about.name, about.guid))
                .with("known", &theirs)
                .with("peer", &link.peer)
                .hint("give both workers the same NICs")
                .to_refusal();
            each.outbound(link, n, |lane, turn| lane.die(turn, &why));
        }
        Ok(())
    }

    /// What the peer's engine said.
    fn told(&mut self, now: Time, id: LinkId, message: &[u8]) -> Result<()> {
        let Some(link) = self.links.get_mut(&id).filter(|link| !link.over) else {
            return Err(no_link(id));
        };
        let message = Message::decode(message).map_err(|e| e.with("peer", &link.peer))?;
        let Self { settings, rails, jitter, serial, ended, outbox, .. } = self;
        let wrong = |what: &str| {
            let e = Error::new(ErrorKind::Malformed, format!("gpunetio engine: {what}"));
            Err(e.with("peer", &link.peer).with("link", id.0))
        };
        let lane = match &message {
            Message::Pair { lane, .. }
            | Message::Paired { lane, .. }
            | Message::Up { lane, .. }
            | Message::Broken { lane, .. } => usize::from(*lane),
            Message::Regions { .. } => 0,
        };
        let rail = |guid: u64| rails.iter().position(|rail| rail.hca.about().guid == guid);
        match (&mut link.side, message) {
            (Side::Sender { remote, .. }, Message::Regions { guid, regions }) => {
                match rail(guid).and_then(|rail| remote.get_mut(rail)) {
                    Some(keys) => *keys = Keys::new(regions),
                    None => return wrong("the receiver spoke of a NIC that is not known"),
                }
            }
            (Side::Sender { lanes, remote, .. }, message) if lane < lanes.len() => {
                let nth = lane % rails.len();
                if let Message::Paired { regions, .. } = &message {
                    remote[nth] = Keys::new(regions.clone());
                }
                let mut each = Each { now, settings: *settings, rails, jitter, events: outbox };
                match message {
                    Message::Paired { epoch, end, receives, .. } => {
                        each.outbound(link, lane, |l, turn| l.paired(turn, epoch, end, receives));
                    }
                    Message::Broken { epoch, why, .. } => {
                        each.outbound(link, lane, |l, turn| l.broken(turn, epoch, &why));
                    }
                    _ => return wrong("the receiver said what only a sender says"),
                }
            }
            (Side::Receiver { lanes }, message) if lane < lanes.len() => {
                let mut all = All { now, rails, serial, ended, events: outbox };
                match message {
                    Message::Pair { epoch, guid, end, credit, .. } => {
                        let invitation = Invitation { epoch, guid, end, credit };
                        all.inbound(link, lane, |l, turn| l.invite(turn, invitation));
                    }
                    Message::Up { epoch, .. } => {
                        all.inbound(link, lane, |l, turn| l.connected(turn, epoch));
                    }
                    Message::Broken { epoch, why, .. } => {
                        all.inbound(link, lane, |l, turn| l.broken(turn, epoch, &why));
                    }
                    _ => return wrong("the sender said what only a receiver says"),
                }
            }
            _ => return wrong("the peer spoke of a lane that the link does not have"),
        }
        Ok(())
    }

    fn open(&mut self, grant: OpenGrant) -> Result<()> {
        let number = grant.grant;
        let Self { grants, links, outbox, .. } = self;
        grants.open(grant, |link, lane, parts| {
            let Some(Link { side: Side::Receiver { lanes }, over: false, .. }) =
                links.get_mut(&link)
            else {
                return None;
            };
            let lane = lanes.get_mut(usize::from(lane.0))?;
            lane.bind(number, parts).unwrap_or_else(|e| {
                outbox.push(EngineEvent::Trouble(e));
                None
            })
        })
    }

    fn fence(&mut self, grant: GrantId, how: FenceHow) {
        #[cfg(feature = "fault-injection")]
        if super::fence::fences_off() {
            self.outbox.push(EngineEvent::Fenced(FenceProof::new(grant, how)));
            return;
        }
        if self.grants.fence(grant, how) {
            self.outbox.push(EngineEvent::Fenced(FenceProof::new(grant, how)));
        }
    }

    fn grant(&mut self, grant: SendGrant) -> Result<()> {
        let id = grant.link;
        let Some(Link { side: Side::Sender { lanes, grants, .. }, over: false, .. }) =
            self.links.get_mut(&id)
        else {
            return Err(no_link(id));
        };
        if grants.contains_key(&grant.grant) {
            return Err(Error::new(ErrorKind::Internal, "grant number used twice")
                .with("grant", grant.grant));
        }
        if grants.len() >= limits::ROOMS_MAX {
            return Err(Error::new(ErrorKind::Busy, "too many grants on the link")
                .with("grant", grant.grant)
                .with("limit", limits::ROOMS_MAX));
        }
        let connection =
            |lane: LaneId| lanes.get(usize::from(lane.0)).and_then(Outbound::connection);
        let lanes = grant.lanes.into_iter().map(|lane| (lane, connection(lane))).collect();
        grants.insert(grant.grant, Lent { plan: grant.plan, lanes, stopped: false });
        Ok(())
    }

    fn post(&mut self, post: &Post) -> Result<()> {
        let Some(Link { side: Side::Sender { lanes, grants, .. }, over: false, .. }) =
            self.links.get_mut(&post.link)
        else {
            return Err(no_link(post.link));
        };
        let count = lanes.len();
        let lane =
            lanes.get_mut(usize::from(post.lane.0)).ok_or_else(|| no_lane(post.lane, count))?;
        let grant = grants.get(&post.grant).ok_or_else(|| {
            Error::new(ErrorKind::NotFound, "the engine was given no such grant on this link")
                .with("grant", post.grant)
        })?;
        if grant.stopped {
            return Err(Error::new(ErrorKind::RoomEnded, "the grant is being stopped")
                .with("grant", post.grant));
        }
        let bound = grant.lanes.iter().find(|(lane, _)| *lane == post.lane);
        let (_, bound) = bound.ok_or_else(|| {
            Error::new(ErrorKind::NotFound, "the grant does not have this lane")
                .with("grant", post.grant)
                .with("lane", post.lane.0)
        })?;
        let (source, destination) = (post.pages.clone(), grant.plan.pages(post.part)?);
        for pages in [&source, &destination] {
            if pages.device() != Device::Host {
                return Err(Error::new(ErrorKind::Memory, "the engine does not reach this device")
                    .with("asked", pages.device())
                    .with("known", Device::Host)
                    .hint("use pools on the host"));
            }
        }
        lane.post(*bound, Task { grant: post.grant, part: post.part, source, destination })
    }

    /// Stops a grant; [`GpunetioEngine::quiesces`] answers.
    fn quiesce(&mut self, now: Time, id: LinkId, grant: GrantId) {
        if let Some(Link { side: Side::Sender { lanes, grants, .. }, .. }) = self.links.get_mut(&id)
        {
            if let Some(lent) = grants.get_mut(&grant) {
                lent.stopped = true;
            }
            lanes.iter_mut().for_each(|lane| lane.stop(grant));
        }
        let deadline = now.plus_ms(limits::QUIESCE_MS);
        self.quiescing.push(Quiescing { link: id, grant, deadline });
    }

    fn close(&mut self, now: Time, id: LinkId) {
        let Self { settings, rails, jitter, serial, ended, outbox, links, .. } = self;
        let Some(link) = links.get_mut(&id) else { return };
        link.over = true;
        let why = Refusal::new(ErrorKind::PeerLost, "the link is over");
        match &mut link.side {
            Side::Sender { lanes, .. } => {
                let count = lanes.len();
                let mut each = Each { now, settings: *settings, rails, jitter, events: outbox };
                for n in 0..count {
                    each.outbound(link, n, |lane, turn| lane.down(turn, &why, false));
                }
            }
            Side::Receiver { lanes } => {
                let count = lanes.len();
                let mut all = All { now, rails, serial, ended, events: outbox };
                for n in 0..count {
                    all.inbound(link, n, |lane, turn| lane.down(turn, &why, false));
                }
            }
        }
    }

    /// Polls lanes: those that something is expected of, or all.
    fn lanes(&mut self, now: Time, all: bool, events: &mut Vec<EngineEvent>) -> bool {
        let Self { settings, rails, jitter, serial, ended, links, .. } = self;
        let settings = *settings;
        let mut moved = false;
        for link in links.values_mut() {
            match &link.side {
                Side::Sender { lanes, .. } => {
                    let count = lanes.len();
                    let mut each = Each { now, settings, rails, jitter, events };
                    for n in 0..count {
                        moved |= each.outbound(link, n, |lane, turn| {
                            (all || lane.is_busy()) && lane.poll(turn)
                        });
                    }
                }
                Side::Receiver { lanes } => {
                    let count = lanes.len();
                    let mut every = All { now, rails, serial, ended, events };
                    for n in 0..count {
                        moved |= every.inbound(link, n, |lane, turn| {
                            (all || lane.is_busy()) && lane.poll(turn)
                        });
                    }
                }
            }
        }
        moved
    }

    /// Takes NICs that were lost out of every link.
    fn mourn(&mut self, now: Time, events: &mut Vec<EngineEvent>) -> bool {
        let Self { settings, rails, jitter, serial, ended, links, .. } = self;
        let settings = *settings;
        let mut moved = false;
        for nth in 0..rails.len() {
            let rail = &mut rails[nth];
            if rail.mourned || !rail.hca.is_lost() {
                continue;
            }
            (rail.mourned, moved) = (true, true);
            metrics::counter!("kvlane_gpunetio_nics_lost_total").increment(1);
            let why = rail.lost();
            for link in links.values_mut() {
                match &link.side {
                    Side::Sender { lanes, .. } => {
                        let count = lanes.len();
                        let mut each = Each { now, settings, rails, jitter, events };
                        for n in (nth..count).step_by(each.rails.len()) {
                            each.outbound(link, n, |lane, turn| lane.die(turn, &why));
                        }
                    }
                    Side::Receiver { lanes } => {
                        let count = lanes.len();
                        let mut all = All { now, rails, serial, ended, events };
                        for n in 0..count {
                            all.inbound(link, n, |lane, turn| {
                                if lane.rail() == Some(nth) {
                                    lane.die(turn, &why);
                                }
                            });
                        }
                    }
                }
                // The NIC keeps what it has.
                link.access[nth] = None;
            }
        }
        moved
    }

    /// Ends fences that can end.
    fn fences(&mut self, now: Time, events: &mut Vec<EngineEvent>) -> bool {
        for ended in self.ended.drain(..) {
            self.grants.ended(ended);
        }
        let mut moved = false;
        for grant in self.grants.fencing().to_vec() {
            let drained = self.see_out(now, grant, events);
            // A lane may have gone at once.
            for ended in self.ended.drain(..) {
                self.grants.ended(ended);
            }
            match self.grants.settle(grant, drained) {
                Fence::Waits => {}
                Fence::Done(hows, ties) => {
                    moved = true;
                    for tie in ties {
                        if let Some(Link { side: Side::Receiver { lanes }, .. }) =
                            self.links.get_mut(&tie.link)
                            && let Some(lane) = lanes.get_mut(usize::from(tie.lane.0))
                        {
                            lane.unbind(tie.serial, grant);
                        }
                    }
                    visibility();
                    let proof = |how| EngineEvent::Fenced(FenceProof::new(grant, how));
                    events.extend(hows.into_iter().map(proof));
                }
                Fence::Fails(hows, why) => {
                    moved = true;
                    let fails = |_| EngineEvent::FenceFailed { grant, why: why.clone() };
                    events.extend(hows.into_iter().map(fails));
                }
            }
        }
        moved
    }
    /// Does to the queue pairs of a grant what its fence needs; whether those that are not out are
    /// drained.
    fn see_out(&mut self, now: Time, grant: GrantId, events: &mut Vec<EngineEvent>) -> bool {
        let Self { rails, serial, ended, links, grants, .. } = self;
        let mut all = All { now, rails, serial, ended, events };
        let revoked = grants.is_revoked(grant);
        let mut drained = true;
        for tie in grants.ties(grant).iter().filter(|tie| tie.is_live()) {
            let Some(link) = links.get_mut(&tie.link) else { continue };
            let peer = link.peer.clone();
            drained &= all.inbound(link, usize::from(tie.lane.0), |lane, turn| {
                if !lane.is_up(tie.serial) {
                    // On its way out.
                    return false;
                }
                if !revoked {
                    return lane.dry(turn);
                }
                let why = Error::new(ErrorKind::NoPath, "the receiver revoked the lane's grant")
                    .with("grant", grant)
                    .with("peer", peer)
                    .to_refusal();
                lane.down(turn, &why, true);
                false
            });
        }
        drained
    }

    /// Ends quiesces: nothing of the grant is in a ring any more.
    fn quiesces(&mut self, now: Time, events: &mut Vec<EngineEvent>) -> bool {
        let before = self.quiescing.len();
        let Self { settings, rails, jitter, links, quiescing, .. } = self;
        let settings = *settings;
        quiescing.retain(|q| {
            let done = || EngineEvent::Quiesced(Quiesced::new(q.link, q.grant));
            let Some(link) = links.get_mut(&q.link) else {
                events.push(done());
                return false;
            };
            let Side::Sender { lanes, .. } = &link.side else {
                events.push(done());
                return false;
            };
            let late = now >= q.deadline;
            let holding: Vec<usize> =
                (0..lanes.len()).filter(|&n| lanes[n].holds(q.grant)).collect();
            let never = holding.iter().any(|&n| lanes[n].holds_for_ever());
            if never {
                let why = "a grant cannot be quiesced: a NIC was lost that may still read its pages";
                events.push(EngineEvent::Trouble(
                    Error::new(ErrorKind::Quarantined, why)
                        .with("grant", q.grant)
                        .with("peer", &link.peer)
                        .hint("its source blocks stay withheld until the worker is started again"),
                ));
                return false;
            }
            if holding.is_empty() {
                if let Side::Sender { grants, .. } = &mut link.side {
                    grants.remove(&q.grant);
                }
                events.push(done());
                return false;
            }
            if late {
                let why = Error::new(
                    ErrorKind::DeadlineExceeded,
                    "what was posted for a grant did not complete in time; its queue pair was destroyed",
                )
                .with("grant", q.grant)
                .with("peer", &link.peer)
                .with("limit_ms", limits::QUIESCE_MS)
                .to_refusal();
                let mut each = Each { now, settings, rails, jitter, events };
                for n in holding {
                    each.outbound(link, n, |lane, turn| lane.down(turn, &why, true));
                }
            }
            true
        });
        self.quiescing.len() != before
    }

    /// Forgets links that are over, when their queue pairs are.
    fn bury(&mut self) {
        let over = |link: &Link| {
            link.over
                && match &link.side {
                    Side::Sender { lanes, .. } => {
                        lanes.iter().all(|lane| lane.is_over() && !lane.holds_for_ever())
                    }
                    Side::Receiver { lanes } => lanes.iter().all(Inbound::is_over),
                }
        };
        if !self.links.values().any(over) {
            return;
        }
        let dead: Vec<LinkId> =
            self.links.iter().filter(|(_, link)| over(link)).map(|(id, _)| *id).collect();
        for id in dead {
            if let Some(link) = self.links.remove(&id) {
                end_access(&mut self.rails, link.access);
            }
        }
    }

    fn user_of(&self, region: &Region) -> Option<String> {
        let posts = self.links.values().find_map(|link| match &link.side {
            Side::Sender { lanes, .. } => lanes.iter().find_map(|lane| lane.uses(region)),
            Side::Receiver { .. } => None,
        });
        posts
            .map(|grant| format!("a post of grant {grant}"))
            .or_else(|| self.grants.user_of(region).map(|grant| format!("open grant {grant}")))
    }

    /// Tells senders which memory they may write now.
    fn tell_regions(&mut self) {
        for (&id, link) in &self.links {
            let Side::Receiver { lanes } = &link.side else { continue };
            // Others hear it when they are answered.
            if link.over || !lanes.iter().any(Inbound::was_invited) {
                continue;
            }
            for (access, rail) in link.access.iter().zip(&self.rails) {
                let Some(access) = access else { continue };
                let regions = access.keys().opened().to_vec();
                let guid = rail.hca.about().guid;
                tell(&mut self.outbox, id, &Message::Regions { guid, regions });
            }
        }
    }
}

/// Makes what landed visible to whoever reads it next. Host memory is coherent with the NIC's writes,
/// and a completion comes after them.
fn visibility() {}

fn end_access(rails: &mut [Rail], access: Vec<Option<Access>>) {
    for (rail, access) in rails.iter_mut().zip(access) {
        if let Some(access) = access {
            access.end(&mut rail.hca);
        }
    }
}

/// Gives sending lanes their turns.
struct Each<'a> {
    now: Time,
    settings: Settings,
    rails: &'a mut Vec<Rail>,
    jitter: &'a mut Jitter,
    events: &'a mut Vec<EngineEvent>,
}

impl Each<'_> {
    fn outbound<T: Default>(
        &mut self,
        link: &mut Link,
        nth: usize,
        act: impl FnOnce(&mut Outbound, &mut sender::Turn<'_>) -> T,
    ) -> T {
        let rail = nth % self.rails.len();
        let Side::Sender { lanes, remote, .. } = &mut link.side else { return T::default() };
        let (Some(lane), Some(remote)) = (lanes.get_mut(nth), remote.get(rail)) else {
            return T::default();
        };
        let mut turn = sender::Turn {
            now: self.now,
            settings: self.settings,
            peer: &link.peer,
            rail: &mut self.rails[rail],
            access: link.access.get(rail).and_then(Option::as_ref),
            remote,
            over: link.over,
            jitter: self.jitter,
            events: self.events,
        };
        act(lane, &mut turn)
    }
}

/// Gives receiving lanes their turns.
struct All<'a> {
    now: Time,
    rails: &'a mut Vec<Rail>,
    serial: &'a mut u64,
    ended: &'a mut Vec<Ended>,
    events: &'a mut Vec<EngineEvent>,
}

impl All<'_> {
    fn inbound<T: Default>(
        &mut self,
        link: &mut Link,
        nth: usize,
        act: impl FnOnce(&mut Inbound, &mut receiver::Turn<'_>) -> T,
    ) -> T {
        let Side::Receiver { lanes } = &mut link.side else { return T::default() };
        let Some(lane) = lanes.get_mut(nth) else { return T::default() };
        let mut turn = receiver::Turn {
            now: self.now,
            peer: &link.peer,
            rails: self.rails,
            access: &link.access,
            over: link.over,
            serial: self.serial,
            ended: self.ended,
            events: self.events,
        };
        act(lane, &mut turn)
    }
}

impl Engine for GpunetioEngine {
    fn caps(&self) -> Caps {
        let rails = self.rails.len() as u16;
        Caps { name: "gpunetio", path: DataPath::OneSided, emulated: true, rails }
    }

    fn register(&mut self, region: &Arc<Region>) -> Result<()> {
        self.registry.register(region)?;
        let Self { links, rails, .. } = self;
        let mut refused = None;
        for link in links.values_mut() {
            for (access, rail) in link.access.iter_mut().zip(rails.iter_mut()) {
                let Some(access) = access else { continue };
                if let Err(e) = access.add(&mut rail.hca, region)
                    && !rail.hca.is_lost()
                {
                    refused = Some(e);
                }
            }
        }
        if let Some(e) = refused {
            self.forget(region)?;
            self.registry.unregister(region, None)?;
            return Err(e);
        }
        self.regions.push(region.clone());
        self.tell_regions();
        Ok(())
    }

    fn unregister(&mut self, region: &Arc<Region>) -> Result<()> {
        let user = self.user_of(region);
        self.registry.unregister(region, user)?;
        self.regions.retain(|known| !Arc::ptr_eq(known, region));
        let forgotten = self.forget(region);
        self.tell_regions();
        forgotten
    }

    fn command(&mut self, now: Time, command: Command) {
        let trouble = match command {
            Command::Listen { link, peer, lanes, receiver } => {
                let blob = self.listen(link, peer, lanes, receiver);
                self.outbox.push(EngineEvent::Local { link, blob });
                Ok(())
            }
            Command::Connect { link, remote } => {
                if let Err(e) = self.connect(now, link, &remote) {
                    self.outbox.push(EngineEvent::Local { link, blob: Err(e) });
                }
                Ok(())
            }
            Command::Told { link, message } => self.told(now, link, &message).inspect_err(|_| {
                metrics::counter!("kvlane_gpunetio_refused_messages_total").increment(1);
            }),
            Command::Close { link } => {
                self.close(now, link);
                Ok(())
            }
            Command::Open(grant) => self.open(grant),
            Command::Fence { grant, how } => {
                self.fence(grant, how);
                Ok(())
            }
            Command::Grant(grant) => self.grant(grant),
            Command::Post(post) => {
                if let Err(e) = self.post(&post) {
                    self.outbox.push(nacked(&post, &e));
                }
                Ok(())
            }
            Command::ResetLane { link, lane } => self.reset(now, link, lane),
            Command::Quiesce { link, grant } => {
                self.quiesce(now, link, grant);
                Ok(())
            }
        };
        if let Err(e) = trouble {
            self.outbox.push(EngineEvent::Trouble(e));
        }
    }

    fn poll(&mut self, now: Time, events: &mut Vec<EngineEvent>) -> bool {
        let mut moved = !self.outbox.is_empty();
        events.append(&mut self.outbox);
        let all = std::mem::take(&mut self.slept) || now >= self.look_round_at;
        if all {
            self.look_round_at = Time(now.0.saturating_add(LOOK_ROUND_NS));
            self.rails.iter_mut().filter(|r| !r.mourned).for_each(|rail| rail.hca.drain());
        }
        moved |= self.mourn(now, events);
        moved |= self.lanes(now, all, events);
        moved |= self.fences(now, events);
        moved |= self.quiesces(now, events);
        self.bury();
        moved
    }

    fn park(&mut self, interests: &mut Vec<Interest>) -> Option<Time> {
        self.slept = true;
        let mut until = None;
        let mut by = |t: Option<Time>| until = [until, t].into_iter().flatten().min();
        if !self.outbox.is_empty() {
            by(Some(Time(0)));
        }
        for rail in self.rails.iter().filter(|rail| !rail.mourned) {
            interests.push(Interest { fd: rail.hca.events(), read: true, write: false });
            if rail.hca.is_lost() {
                by(Some(Time(0)));
            }
        }
        let now = now();
        for link in self.links.values_mut() {
            match &mut link.side {
                Side::Sender { lanes, .. } => {
                    lanes.iter_mut().for_each(|lane| by(lane.park(now, link.over)));
                }
                Side::Receiver { lanes } => lanes.iter_mut().for_each(|lane| by(lane.park())),
            }
        }
        by(self.quiescing.iter().map(|q| q.deadline).filter(|&deadline| deadline > now).min());
        until
    }
}

impl GpunetioEngine {
    fn forget(&mut self, region: &Arc<Region>) -> Result<()> {
        let Self { links, rails, .. } = self;
        let mut result = Ok(());
        for link in links.values_mut() {
            for (access, rail) in link.access.iter_mut().zip(rails.iter_mut()) {
                if let Some(access) = access
                    && let Err(e) = access.remove(&mut rail.hca, region)
                {
                    result = Err(e);
                }
            }
        }
        result
    }
    fn reset(&mut self, now: Time, id: LinkId, lane: LaneId) -> Result<()> {
        let Self { settings, rails, jitter, links, outbox, .. } = self;
        let Some(link) = links.get_mut(&id).filter(|link| !link.over) else {
            return Err(no_link(id));
        };
        let mut each = Each { now, settings: *settings, rails, jitter, events: outbox };
        let why = was_reset().with("lane", lane.0).to_refusal();
        each.outbound(link, usize::from(lane.0), |lane, turn| lane.down(turn, &why, true));
        Ok(())
    }
}

impl Drop for GpunetioEngine {
    /// Takes every queue pair down, so that nothing lands any more when it is over. Of a NIC that hangs
    /// that cannot be known.
    fn drop(&mut self) {
        let mut leaving = Vec::new();
        for (_, link) in std::mem::take(&mut self.links) {
            match link.side {
                Side::Sender { lanes, .. } => {
                    for (n, lane) in lanes.into_iter().enumerate() {
                        let rail = n % self.rails.len();
                        leaving.extend(lane.end(&mut self.rails[rail]).map(|left| (rail, left)));
                    }
                }
                Side::Receiver { lanes } => {
                    leaving.extend(lanes.into_iter().filter_map(|l| l.end(&mut self.rails)));
                }
            }
        }
        let deadline = now().plus_ms(LAST_FLUSH_MS);
        while !leaving.is_empty() && now() < deadline {
            let each = leaving.drain(..).filter_map(|(rail, mut left): (usize, Leaving)| {
                if !left.is_flushed(|_| {}) {
                    return Some((rail, left));
                }
                let hca = &mut self.rails[rail].hca;
                left.end(hca).ok().flatten().map(|left| (rail, left))
            });
            leaving = each.collect();
            std::thread::yield_now();
        }
    }
}
