//! The links of an engine, and the turns of their lanes.
//!
//! In: links that come and go, what peers' engines say, NICs that are lost. Out: queue pairs that come
//! up and go, through the lanes. Invariant: a link that is over stays until its last queue pair is out,
//! says nothing, and makes no new ones.

use std::collections::HashMap;
use std::sync::Arc;

use kvlane_proto::{
    Error, ErrorKind, GrantId, LaneId, LinkId, Plan, Refusal, Result, Time, WorkerKey, limits,
};

use super::keys::Keys;
use super::nic::{Nic, Rights};
use super::rail::{Access, Rail, named};
use super::receiver::{self, Ended, Inbound, Invitation};
use super::sender::{self, Outbound};
use super::wire::{Blob, Message};
use super::{OneSided, tell};
use crate::engine::EngineEvent;
use crate::engine::redial::Jitter;
use crate::engine::refusals::{no_link, was_reset};
use crate::memory::Region;

/// A grant that parts are posted under.
pub(super) struct Lent {
    pub(super) plan: Arc<Plan>,
    /// Its lanes, and the queue pair that each had.
    pub(super) lanes: Vec<(LaneId, Option<u64>)>,
    pub(super) stopped: bool,
}

pub(super) enum Side<P> {
    Receiver {
        lanes: Vec<Inbound<P>>,
    },
    /// Empty until connected.
    Sender {
        lanes: Vec<Outbound<P>>,
        /// The receiver's NIC that each rail is connected with.
        partners: Vec<Option<u64>>,
        /// The receiver's memory, by rail.
        remote: Vec<Keys>,
        grants: HashMap<GrantId, Lent>,
    },
}

pub(super) struct Link<P> {
    pub(super) peer: WorkerKey,
    pub(super) lanes: u16,
    /// By rail; none where the NIC is lost.
    pub(super) access: Vec<Option<Access>>,
    pub(super) side: Side<P>,
    pub(super) over: bool,
    /// A message that was refused has been told, a queue pair that could not be made logged: more of
    /// either are only counted, as the peer could send them without end.
    pub(super) complained: bool,
    pub(super) warned: bool,
}

/// What lanes work with.
pub(super) struct Hands<N> {
    /// Of a sender's ring.
    pub(super) entries: u32,
    pub(super) rails: Vec<Rail<N>>,
    pub(super) jitter: Jitter,
    /// Numbers the receiver's queue pairs.
    pub(super) serial: u64,
    /// Queue pairs that went out in this turn.
    pub(super) ended: Vec<Ended>,
}

impl<N: Nic> Hands<N> {
    /// The rail of a sender's lane.
    pub(super) fn rail_of(&self, lane: usize) -> usize {
        lane % self.rails.len()
    }
    /// The turn of a sending lane, if it is one.
    pub(super) fn outbound<T: Default>(
        &mut self,
        now: Time,
        link: &mut Link<N::Pair>,
        nth: usize,
        events: &mut Vec<EngineEvent>,
        act: impl FnOnce(&mut Outbound<N::Pair>, &mut sender::Turn<'_, N>) -> T,
    ) -> T {
        let rail = self.rail_of(nth);
        let Side::Sender { lanes, partners, remote, .. } = &mut link.side else {
            return T::default();
        };
        let (Some(lane), Some(remote)) = (lanes.get_mut(nth), remote.get(rail)) else {
            return T::default();
        };
        let mut turn = sender::Turn {
            now,
            entries: self.entries,
            peer: &link.peer,
            rail: &mut self.rails[rail],
            partner: partners.get(rail).copied().flatten(),
            access: link.access.get(rail).and_then(Option::as_ref),
            remote,
            over: link.over,
            jitter: &mut self.jitter,
            events,
        };
        act(lane, &mut turn)
    }
    /// The turn of a receiving lane, if it is one.
    pub(super) fn inbound<T: Default>(
        &mut self,
        now: Time,
        link: &mut Link<N::Pair>,
        nth: usize,
        events: &mut Vec<EngineEvent>,
        act: impl FnOnce(&mut Inbound<N::Pair>, &mut receiver::Turn<'_, N>) -> T,
    ) -> T {
        let Side::Receiver { lanes } = &mut link.side else { return T::default() };
        let Some(lane) = lanes.get_mut(nth) else { return T::default() };
        let mut turn = receiver::Turn {
            now,
            peer: &link.peer,
            rails: &mut self.rails,
            access: &link.access,
            over: link.over,
            warned: &mut link.warned,
            serial: &mut self.serial,
            ended: &mut self.ended,
            events,
        };
        act(lane, &mut turn)
    }
}

fn end_access(rails: &mut [Rail<impl Nic>], access: Vec<Option<Access>>) {
    for (rail, access) in rails.iter_mut().zip(access) {
        if let Some(access) = access {
            access.end(&mut rail.hca);
        }
    }
}

impl<N: Nic> OneSided<N> {
    pub(super) fn listen(
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
        for n in 0..self.hands.rails.len() {
            let hca = &mut self.hands.rails[n].hca;
            match Access::new(hca, rights, &self.regions) {
                Ok(one) => access.push(Some(one)),
                Err(_) if hca.is_lost() => access.push(None),
                Err(e) => {
                    end_access(&mut self.hands.rails, access);
                    return Err(e);
                }
            }
        }
        if access.iter().all(Option::is_none) {
            return Err(self.hands.rails.first().map_or_else(
                || Error::new(ErrorKind::Internal, "the engine has no NIC"),
                |rail| rail.hca.lost(),
            ));
        }
        let side = if receiver {
            Side::Receiver { lanes: (0..lanes).map(|n| Inbound::new(id, LaneId(n))).collect() }
        } else {
            let (partners, remote) = (Vec::new(), vec![Keys::default(); self.hands.rails.len()]);
            Side::Sender { lanes: Vec::new(), partners, remote, grants: HashMap::new() }
        };
        let (over, complained, warned) = (false, false, false);
        self.links.insert(id, Link { peer, lanes, access, side, over, complained, warned });
        let rails = &self.hands.rails;
        let nics = rails.iter().map(|rail| rail.hca.about().clone()).collect();
        let bit = |(nth, rail): (usize, &Rail<N>)| u16::from(rail.hca.is_lost()) << nth;
        let lost = rails.iter().enumerate().map(bit).sum();
        Ok(Blob { lanes, nics, lost }.encode())
    }

    pub(super) fn connect(&mut self, now: Time, id: LinkId, remote: &[u8]) -> Result<()> {
        let link = self.links.get_mut(&id).filter(|l| !l.over).ok_or_else(|| no_link(id))?;
        let blob = Blob::decode(remote).map_err(|e| e.with("peer", &link.peer))?;
        let theirs = named(&blob.nics);
        let partner = |(nth, rail): (usize, &Rail<N>)| {
            let partner = rail.hca.partner(nth, &blob.nics)?;
            blob.nics.get(partner).map(|nic| nic.guid)
        };
        let found: Vec<Option<u64>> = self.hands.rails.iter().enumerate().map(partner).collect();
        let lacks = |nth: usize, rail: &Rail<N>| !rail.hca.is_lost() && found[nth].is_none();
        let lacking = || {
            let rails = self.hands.rails.iter().enumerate();
            rails.filter(|(nth, rail)| lacks(*nth, rail)).map(|(_, rail)| rail.hca.about())
        };
        let why = Error::new(ErrorKind::NoPath, "the peer does not have the lane's NIC")
            .with("asked", named(lacking()))
            .with("known", &theirs)
            .with("peer", &link.peer)
            .hint("give both workers the same NICs");
        // One side may have been started again with a new NIC in place of one that the other has lost:
        // the link goes on over the others. Anything else will never come up.
        if lacking().count() > blob.lost.count_ones() as usize {
            return Err(why);
        }
        let why = why.to_refusal();
        let Side::Sender { lanes, partners, .. } = &mut link.side else { return Ok(()) };
        if !lanes.is_empty() {
            return Err(Error::new(ErrorKind::Internal, "link connected twice").with("link", id.0));
        }
        let count = link.lanes.min(blob.lanes);
        let lost: Vec<bool> =
            self.hands.rails.iter().enumerate().map(|(nth, rail)| lacks(nth, rail)).collect();
        *partners = found;
        lanes.extend((0..count).map(|n| Outbound::new(id, LaneId(n))));
        let Self { hands, outbox, .. } = self;
        for n in 0..usize::from(count) {
            if lost[hands.rail_of(n)] {
                hands.outbound(now, link, n, outbox, |lane, turn| lane.die(turn, &why));
            }
        }
        Ok(())
    }

    /// What the peer's engine said. What is refused is told once a link.
    pub(super) fn told(&mut self, now: Time, id: LinkId, message: &[u8]) -> Result<()> {
        if self.links.get(&id).is_none_or(|link| link.over) {
            // The peer may not know yet.
            metrics::counter!("kvlane_one_sided_stale_messages_total", "what" => "link")
                .increment(1);
            return Ok(());
        }
        let heard = self.heard(now, id, message);
        let Some(e) = heard.err() else { return Ok(()) };
        metrics::counter!("kvlane_one_sided_refused_messages_total").increment(1);
        let told =
            self.links.get_mut(&id).is_some_and(|l| std::mem::replace(&mut l.complained, true));
        if told {
            Ok(())
        } else {
            Err(e.hint("run the same release on both workers; more of this link is only counted"))
        }
    }
    fn heard(&mut self, now: Time, id: LinkId, message: &[u8]) -> Result<()> {
        let link = self.links.get_mut(&id).ok_or_else(|| no_link(id))?;
        let message = Message::decode(message).map_err(|e| e.with("peer", &link.peer))?;
        let Self { hands, outbox, .. } = self;
        let wrong = |what: &str| {
            let e = Error::new(ErrorKind::Malformed, format!("one-sided engine: {what}"));
            Err(e.with("peer", &link.peer).with("link", id.0))
        };
        let lane = match &message {
            Message::Pair { lane, .. }
            | Message::Paired { lane, .. }
            | Message::Up { lane, .. }
            | Message::Broken { lane, .. } => usize::from(*lane),
            Message::Regions { .. } => 0,
        };
        match (&mut link.side, message) {
            (Side::Sender { partners, remote, .. }, Message::Regions { guid, regions }) => {
                if !partners.contains(&Some(guid)) {
                    return wrong("the receiver spoke of a NIC that is not known");
                }
                let each = remote.iter_mut().zip(partners);
                for (keys, _) in each.filter(|(_, partner)| **partner == Some(guid)) {
                    *keys = Keys::new(regions.clone());
                }
            }
            (Side::Sender { lanes, remote, .. }, message) if lane < lanes.len() => {
                let nth = hands.rail_of(lane);
                if let Message::Paired { regions, .. } = &message {
                    remote[nth] = Keys::new(regions.clone());
                }
                match message {
                    Message::Paired { epoch, end, receives, .. } => {
                        hands.outbound(now, link, lane, outbox, |l, turn| {
                            l.paired(turn, epoch, end, receives)
                        });
                    }
                    Message::Broken { epoch, why, .. } => {
                        hands.outbound(now, link, lane, outbox, |l, turn| {
                            l.broken(turn, epoch, &why)
                        });
                    }
                    _ => return wrong("the receiver said what only a sender says"),
                }
            }
            (Side::Receiver { lanes }, message) if lane < lanes.len() => match message {
                Message::Pair { epoch, guid, end, credit, .. } => {
                    let invitation = Invitation { epoch, guid, end, credit };
                    hands.inbound(now, link, lane, outbox, |l, turn| l.invite(turn, invitation));
                }
                Message::Up { epoch, .. } => {
                    hands.inbound(now, link, lane, outbox, |l, turn| l.connected(turn, epoch));
                }
                Message::Broken { epoch, why, .. } => {
                    hands.inbound(now, link, lane, outbox, |l, turn| l.broken(turn, epoch, &why));
                }
                _ => return wrong("the sender said what only a receiver says"),
            },
            _ => return wrong("the peer spoke of a lane that the link does not have"),
        }
        Ok(())
    }

    pub(super) fn reset(&mut self, now: Time, id: LinkId, lane: LaneId) -> Result<()> {
        let Self { hands, links, outbox, .. } = self;
        let Some(link) = links.get_mut(&id).filter(|link| !link.over) else {
            return Err(no_link(id));
        };
        let (n, why) = (usize::from(lane.0), was_reset().with("lane", lane.0).to_refusal());
        hands.outbound(now, link, n, outbox, |lane, turn| lane.down(turn, &why, true));
        Ok(())
    }

    pub(super) fn close(&mut self, now: Time, id: LinkId) {
        let Self { hands, links, outbox, .. } = self;
        let Some(link) = links.get_mut(&id) else { return };
        link.over = true;
        let why = Refusal::new(ErrorKind::PeerLost, "the link is over");
        match &link.side {
            Side::Sender { lanes, .. } => {
                for n in 0..lanes.len() {
                    hands.outbound(now, link, n, outbox, |lane, turn| lane.down(turn, &why, false));
                }
            }
            Side::Receiver { lanes } => {
                for n in 0..lanes.len() {
                    hands.inbound(now, link, n, outbox, |lane, turn| lane.down(turn, &why, false));
                }
            }
        }
    }

    /// Polls lanes: those that something is expected of, or all.
    pub(super) fn lanes(&mut self, now: Time, all: bool, events: &mut Vec<EngineEvent>) -> bool {
        let Self { hands, links, .. } = self;
        let mut moved = false;
        for link in links.values_mut() {
            match &link.side {
                Side::Sender { lanes, .. } => {
                    for n in 0..lanes.len() {
                        moved |= hands.outbound(now, link, n, events, |lane, turn| {
                            (all || lane.is_busy()) && lane.poll(turn)
                        });
                    }
                }
                Side::Receiver { lanes } => {
                    for n in 0..lanes.len() {
                        moved |= hands.inbound(now, link, n, events, |lane, turn| {
                            (all || lane.is_busy()) && lane.poll(turn)
                        });
                    }
                }
            }
        }
        moved
    }

    /// Takes NICs that were lost out of every link.
    pub(super) fn mourn(&mut self, now: Time, events: &mut Vec<EngineEvent>) -> bool {
        let Self { hands, links, .. } = self;
        let mut moved = false;
        for nth in 0..hands.rails.len() {
            let rail = &mut hands.rails[nth];
            if rail.mourned || !rail.hca.is_lost() {
                continue;
            }
            (rail.mourned, moved) = (true, true);
            let mut lanes_lost = 0;
            metrics::counter!("kvlane_one_sided_nics_lost_total").increment(1);
            let trouble = rail.hca.lost().with("rail", nth);
            let why = rail.hca.lost().to_refusal();
            for link in links.values_mut() {
                match &link.side {
                    Side::Sender { lanes, .. } => {
                        for n in (0..lanes.len())
                            .filter(|n| hands.rail_of(*n) == nth)
                            .collect::<Vec<_>>()
                        {
                            lanes_lost += 1;
                            hands.outbound(now, link, n, events, |lane, turn| lane.die(turn, &why));
                        }
                    }
                    Side::Receiver { lanes } => {
                        let on_it = |n: &usize| lanes[*n].rail() == Some(nth);
                        for n in (0..lanes.len()).filter(on_it).collect::<Vec<_>>() {
                            lanes_lost += 1;
                            hands.inbound(now, link, n, events, |lane, turn| lane.die(turn, &why));
                        }
                    }
                }
                // The NIC keeps what it has.
                link.access[nth] = None;
            }
            events.push(EngineEvent::Trouble(trouble.with("lanes_lost", lanes_lost)));
        }
        moved
    }

    /// Forgets links that are over, when their queue pairs are.
    pub(super) fn bury(&mut self) {
        let over = |link: &Link<N::Pair>| {
            link.over
                && match &link.side {
                    Side::Sender { lanes, .. } => {
                        lanes.iter().all(|lane| lane.is_over() && lane.holds_for_ever().is_none())
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
                end_access(&mut self.hands.rails, link.access);
            }
        }
    }

    pub(super) fn forget(&mut self, region: &Arc<Region>) -> Result<()> {
        let Self { links, hands, .. } = self;
        let mut result = Ok(());
        for link in links.values_mut() {
            for (access, rail) in link.access.iter_mut().zip(hands.rails.iter_mut()) {
                if let Some(access) = access
                    && let Err(e) = access.remove(&mut rail.hca, region)
                {
                    result = Err(e);
                }
            }
        }
        result
    }

    /// Tells senders which memory they may write now.
    pub(super) fn tell_regions(&mut self) {
        for (&id, link) in &self.links {
            let Side::Receiver { lanes } = &link.side else { continue };
            // Others hear it when they are answered.
            if link.over || !lanes.iter().any(Inbound::was_invited) {
                continue;
            }
            for (access, rail) in link.access.iter().zip(&self.hands.rails) {
                let Some(access) = access else { continue };
                let regions = access.opened().to_vec();
                let guid = rail.hca.about().guid;
                tell(&mut self.outbox, id, &Message::Regions { guid, regions });
            }
        }
    }
}
