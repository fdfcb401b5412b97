//! Grants of both sides, from their beginning to the proof of their end.
//!
//! In: grants, posts, the wish to end. Out: [`Quiesced`] and [`FenceProof`]s, made here and nowhere
//! else in the engine. Invariants: as numbered in the module above.

use kvlane_proto::{
    Device, Error, ErrorKind, GrantId, LaneId, LinkId, Refusal, Result, Time, WorkerKey, limits,
};

use super::OneSided;
use super::grants::{Begin, Fence};
use super::link::{Lent, Link, Side};
use super::nic::Nic;
use super::receiver::Binding;
use super::sender::{Outbound, Task};
use crate::engine::refusals::{no_lane, no_link};
use crate::engine::{EngineEvent, FenceHow, FenceProof, OpenGrant, Post, Quiesced, SendGrant};
use crate::memory::Region;

/// A grant that is being stopped.
pub(super) struct Quiescing {
    link: LinkId,
    grant: GrantId,
    deadline: Time,
}

impl Quiescing {
    /// When it is over in any case.
    pub(super) fn deadline(&self) -> Time {
        self.deadline
    }
}

fn late(grant: GrantId, peer: &WorkerKey) -> Refusal {
    let why = "what was posted for a grant did not complete in time; its queue pair is taken down";
    Error::new(ErrorKind::DeadlineExceeded, why)
        .with("grant", grant)
        .with("peer", peer)
        .with("limit_ms", limits::QUIESCE_MS)
        .to_refusal()
}

impl<N: Nic> OneSided<N> {
    pub(super) fn open(&mut self, grant: OpenGrant) -> Result<()> {
        let number = grant.grant;
        let Self { grants, links, outbox, .. } = self;
        grants.open(grant, |link, lane, parts| {
            // Also where the link is over: what came through it may be on its way out.
            let Some(Link { side: Side::Receiver { lanes }, .. }) = links.get_mut(&link) else {
                return Binding::default();
            };
            let Some(inbound) = lanes.get_mut(usize::from(lane.0)) else {
                return Binding::default();
            };
            let mut binding = inbound.bind(number, parts);
            let arrived = std::mem::take(&mut binding.arrived).into_iter();
            outbox.extend(arrived.map(|part| EngineEvent::Arrived {
                link,
                grant: number,
                part,
                lane,
            }));
            outbox.extend(binding.trouble.take().map(EngineEvent::Trouble));
            binding
        })
    }

    pub(super) fn fence(&mut self, grant: GrantId, how: FenceHow) {
        #[cfg(feature = "fault-injection")]
        if crate::engine::fence::fences_off() {
            self.outbox.push(EngineEvent::Fenced(FenceProof::new(grant, how)));
            return;
        }
        match self.grants.fence(grant, how) {
            Begin::Done => self.outbox.push(EngineEvent::Fenced(FenceProof::new(grant, how))),
            Begin::Waits => {}
            Begin::Never(why) => self.outbox.push(EngineEvent::FenceFailed { grant, why }),
        }
    }

    /// Ends fences that can end.
    pub(super) fn fences(&mut self, now: Time, events: &mut Vec<EngineEvent>) -> bool {
        for ended in self.hands.ended.drain(..) {
            self.grants.ended(ended);
        }
        let mut moved = false;
        for grant in self.grants.fencing().to_vec() {
            let drained = self.see_out(now, grant, events);
            // A lane may have gone at once.
            for ended in self.hands.ended.drain(..) {
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
                    // What landed is visible: host memory is coherent with the NIC's writes, and a
                    // completion comes after them. Pools on a GPU, and hosts where the NIC's writes
                    // bypass the caches or may be overtaken (no DDIO, relaxed ordering), need a step
                    // here: a read through the NIC that wrote.
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
        let Self { hands, links, grants, .. } = self;
        let revoked = grants.is_revoked(grant);
        let mut drained = true;
        for tie in grants.ties(grant).iter().filter(|tie| tie.is_live()) {
            let Some(link) = links.get_mut(&tie.link) else { continue };
            let peer = link.peer.clone();
            drained &= hands.inbound(now, link, usize::from(tie.lane.0), events, |lane, turn| {
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

    pub(super) fn grant(&mut self, grant: SendGrant) -> Result<()> {
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

    pub(super) fn post(&mut self, post: &Post) -> Result<()> {
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

    /// Stops a grant; [`OneSided::quiesces`] answers.
    pub(super) fn quiesce(&mut self, now: Time, id: LinkId, grant: GrantId) {
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

    /// Ends quiesces: nothing of the grant is in a ring any more.
    pub(super) fn quiesces(&mut self, now: Time, events: &mut Vec<EngineEvent>) -> bool {
        let before = self.quiescing.len();
        let Self { hands, links, quiescing, .. } = self;
        quiescing.retain(|q| {
            let done = EngineEvent::Quiesced(Quiesced::new(q.link, q.grant));
            let Some(link) = links.get_mut(&q.link) else {
                events.push(done);
                return false;
            };
            let (mut holding, mut never) = (Vec::new(), None);
            if let Side::Sender { lanes, grants, .. } = &mut link.side {
                holding.extend((0..lanes.len()).filter(|&n| lanes[n].holds(q.grant)));
                never = holding.iter().find_map(|&n| Some((n, lanes[n].holds_for_ever()?)));
                if holding.is_empty() {
                    grants.remove(&q.grant);
                }
            }
            if holding.is_empty() {
                events.push(done);
                return false;
            }
            if let Some((lane, queue_pair)) = never {
                let hca = &hands.rails[hands.rail_of(lane)].hca;
                let why =
                    "a grant cannot be quiesced: a NIC was lost that may still read its pages";
                let why = hca
                    .named(Error::new(ErrorKind::Quarantined, why))
                    .with("grant", q.grant)
                    .with("queue_pair", format!("{queue_pair:#x}"))
                    .with("peer", &link.peer)
                    .hint("its source blocks stay withheld until the worker is started again");
                events.push(EngineEvent::Trouble(why));
                return false;
            }
            if now >= q.deadline {
                for n in holding {
                    hands.outbound(now, link, n, events, |lane, turn| {
                        // Others are on their way out.
                        if lane.connection().is_some() {
                            let why = late(q.grant, turn.peer);
                            lane.down(turn, &why, true);
                        }
                    });
                }
            }
            true
        });
        self.quiescing.len() != before
    }

    pub(super) fn user_of(&self, region: &Region) -> Option<String> {
        let posts = self.links.values().find_map(|link| match &link.side {
            Side::Sender { lanes, .. } => lanes.iter().find_map(|lane| lane.uses(region)),
            Side::Receiver { .. } => None,
        });
        posts
            .map(|grant| format!("a post of grant {grant}"))
            .or_else(|| self.grants.user_of(region).map(|grant| format!("open grant {grant}")))
    }
}
