//! What is asked of the decode side: calls of routers, and blocks lent by the serving engine.
//!
//! Everything is checked before anything changes, so that a refused request leaves nothing behind.

use std::collections::BTreeSet;

use super::lanes::names;
use super::machine::Decode;
use super::room::{Lent, Phase, Room};
use super::{CallId, Lend, Output};
use crate::error::{Error, ErrorKind, Refusal, Result};
use crate::ids::{GrantId, Identity, Role, RoomId, WorkerKey};
use crate::limits;
use crate::msg::call::{Call, Reply, Reserve};
use crate::msg::peer::Outcome;
use crate::msg::service::WorkerAddress;
use crate::plan::{Blocks, Span};
use crate::time::Time;

impl<F> Decode<F> {
    pub(super) fn call(&mut self, now: Time, call: CallId, from: Identity, body: Call) {
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

    pub(super) fn reply(&mut self, call: CallId, reply: Result<Reply, Refusal>) {
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
        self.fits(reserve.tokens)?;
        self.admit(reserve.room, Some(from), &reserve.prefills)?;
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
                ..Room::new(reserve.prefills, deadline, Phase::Queued { until })
            },
        );
        self.enqueue(room);
        Ok(None)
    }

    /// Whether a prompt fits into the pools at all.
    fn fits(&self, tokens: u32) -> Result<()> {
        let span = Span { tokens, prefix_tokens: 0 };
        for (pool, (layout, map)) in self.config.pools.iter().zip(&*self.config.maps).enumerate() {
            let blocks = span.blocks(layout)?.len() as u64;
            let most = map.blocks.min(limits::BLOCKS_PER_ROOM_MAX);
            if blocks > u64::from(most) {
                return Err(Error::new(
                    ErrorKind::NeverFits,
                    "the room has more blocks than the pool",
                )
                .with("tokens", tokens)
                .with("pool", pool)
                .with("blocks", blocks)
                .with("pool_blocks", most)
                .hint("send shorter prompts to this worker or give it a larger pool"));
            }
        }
        Ok(())
    }

    /// Whether a new room may start; changes nothing.
    fn admit(
        &self,
        room: RoomId,
        from: Option<&Identity>,
        prefills: &[WorkerAddress],
    ) -> Result<()> {
        check_prefills(prefills)?;
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
        let queued = self.lanes.queued();
        if self.rooms.len() >= self.config.rooms_max || queued >= self.config.queue_max {
            return Err(Error::new(ErrorKind::Busy, "the decode worker is full")
                .with("rooms", self.rooms.len())
                .with("rooms_max", self.config.rooms_max)
                .with("queued", queued)
                .with("queue_max", self.config.queue_max)
                .hint("try again after a pause, or use another decode worker"));
        }
        let own = from.map_or(0, |from| self.lanes.queued_by(from));
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
        self.lanes.check(prefills.iter().map(|p| &p.key))
    }

    pub(super) fn draining_refusal(&self) -> Refusal {
        Error::new(ErrorKind::Draining, "the decode worker takes no new rooms")
            .hint("use another decode worker")
            .to_refusal()
    }
    pub(super) fn ended_error(&self, room: RoomId) -> Error {
        let outcome = match self.rooms.get(&room).map(|r| &r.phase) {
            Some(Phase::Over { outcome, .. }) => Some(outcome),
            _ => self.ended.outcome(room),
        };
        let e = Error::new(ErrorKind::RoomEnded, "the room has ended")
            .with("room", room)
            .with("outcome", outcome.map_or("forgotten".into(), ToString::to_string));
        // A leg that is late is told the same side as one that was in time.
        match outcome.and_then(Outcome::why) {
            Some(why) => e.blamed(why.blame),
            None => e,
        }
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

    pub(super) fn call_gone(&mut self, call: CallId) {
        let room = self.calls.remove(&call);
        if let Some(r) = room.and_then(|room| self.rooms.get_mut(&room)) {
            r.watchers.retain(|w| w.0 != call);
            r.reserve_calls.retain(|c| *c != call);
        }
    }

    pub(super) fn lend(&mut self, now: Time, lend: Lend) {
        let room = lend.room;
        match self.try_lend(now, lend) {
            Ok(grant) => {
                self.out.push_back(Output::Lent { room, grant });
                // A new room joins the queues; a charged one starts.
                match self.rooms.get(&room).map(|r| &r.phase) {
                    Some(Phase::Reserved { .. }) => self.grant(now, room),
                    Some(Phase::Queued { .. }) if !self.lanes.is_queued(room) => {
                        self.enqueue(room);
                    }
                    _ => {}
                }
                self.rearm(room);
            }
            Err(why) => self.out.push_back(Output::LendRefused { room, why }),
        }
    }

    fn try_lend(&mut self, now: Time, lend: Lend) -> Result<GrantId> {
        let (pools, maps) = (&self.config.pools, &self.config.maps);
        let blocks = Blocks::lent(pools, maps, &lend.span, &lend.blocks)?.into();
        match self.rooms.get(&lend.room) {
            Some(r) if r.lent.is_some() => {
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
                if !lend.prefills.is_empty() {
                    same_prefills(r, &lend.prefills)?;
                }
            }
            None if lend.prefills.is_empty() => {
                return Err(Error::new(ErrorKind::NotFound, "no such reservation")
                    .with("room", lend.room)
                    .hint("name the prefill workers, or reserve the room first"));
            }
            None => {
                self.admit(lend.room, None, &lend.prefills)?;
                let deadline = now.plus_ms(lend.deadline_ms.min(self.config.room_deadline_ms));
                let phase = Phase::Queued { until: deadline };
                self.rooms.insert(lend.room, Room::new(lend.prefills, deadline, phase));
            }
        }
        self.next_grant += 1;
        let grant = GrantId(self.next_grant);
        if let Some(r) = self.rooms.get_mut(&lend.room) {
            r.grant = grant;
            r.lent = Some(Lent { span: lend.span, lists: lend.blocks, blocks });
            r.deadline = r.deadline.min(now.plus_ms(lend.deadline_ms));
            if let Phase::Queued { until } = &mut r.phase {
                *until = r.deadline;
            }
        }
        self.by_grant.insert(grant, lend.room);
        Ok(grant)
    }
}

/// Checks who is to send a room: somebody, prefill workers all, none twice.
fn check_prefills(prefills: &[WorkerAddress]) -> Result<()> {
    if prefills.is_empty() {
        return Err(Error::new(ErrorKind::Malformed, "nobody sends the room")
            .with("prefills", 0)
            .hint("name every prefill rank that has something for this decode rank"));
    }
    if prefills.len() > limits::RANKS_MAX {
        return Err(Error::new(ErrorKind::LimitExceeded, "too many ranks send to one")
            .with("found", prefills.len())
            .with("limit", limits::RANKS_MAX));
    }
    let mut seen = BTreeSet::new();
    for (index, prefill) in prefills.iter().enumerate() {
        prefill.check().map_err(|e| e.with("index", index))?;
        let identity = &prefill.key.identity;
        let bad = |why: &str| {
            Err(Error::new(ErrorKind::Malformed, why).with("found", identity).with("index", index))
        };
        if identity.role != Role::Prefill {
            return bad("the sender is not a prefill worker");
        }
        if !seen.insert(identity) {
            return bad("a sender is named twice");
        }
    }
    Ok(())
}

/// Checks that blocks are lent for the prefills that a room was reserved with, in any order.
fn same_prefills(room: &Room, prefills: &[WorkerAddress]) -> Result<()> {
    check_prefills(prefills)?;
    let reserved: BTreeSet<&WorkerKey> = room.sources.iter().map(|s| &s.address.key).collect();
    let found: BTreeSet<&WorkerKey> = prefills.iter().map(|p| &p.key).collect();
    if reserved != found {
        return Err(Error::new(ErrorKind::Malformed, "reserved for other prefills")
            .with("reserved", names(reserved))
            .with("found", names(found)));
    }
    Ok(())
}
