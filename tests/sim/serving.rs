//! Routers and toy serving engines, and what the room machines ask of them.
//!
//! A job is one hand-off as a router scripts it: reserve, two legs, perhaps an abort, a wait for
//! the outcome, perhaps a replay. The serving engines allocate blocks, prefill in chunks of tokens
//! or layers, verify what is done, and reuse at once what came back.

use std::ops::Range;

use kvlane_proto::decode::{CallId, Lend, Output as DOut};
use kvlane_proto::msg::call::{Call, Reply, Reserve};
use kvlane_proto::msg::peer::{Outcome, PeerFrame, PeerMsg};
use kvlane_proto::prefill::{Chunk, Output as POut};
use kvlane_proto::time::grantor_ms;
use kvlane_proto::{
    BlockList, ErrorKind, GrantId, IdempotencyKey, LaneId, LinkId, PartId, Plan, Refusal, RoomId,
    Span,
};
use std::sync::Arc;

use crate::coverage::C;
use crate::invariants::Inv;
use crate::pools::{Block, WORDS, content};
use crate::world::{DEvent, EVENTS_MIN, Ev, Fence, PEvent, Quiet, World};

/// A step of a job's script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    Reserve(u32),
    Abort(u32),
    Await(u32),
    AbortDecode,
    AbortPrefill,
    AbortBy,
    /// Sends both legs again.
    Replay,
    Over,
}

#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) room: RoomId,
    pub(crate) router: usize,
    pub(crate) d: usize,
    pub(crate) p: usize,
    /// Tells the contents of rooms apart.
    pub(crate) seq: u32,
    tokens: u32,
    prefix: u32,
    /// Tokens that the prefill leg says.
    prefill_tokens: u32,
    address: kvlane_proto::msg::service::WorkerAddress,
    reserves: bool,
    names_decode: bool,
    key: IdempotencyKey,
    answered: bool,
    outcome: Option<Outcome>,
    pub(crate) over: bool,
}

/// A room at a decode worker, as seen from outside the machine.
#[derive(Debug)]
pub(crate) struct DRoom {
    pub(crate) phase: usize,
    pub(crate) grant: GrantId,
    pub(crate) sid: Option<usize>,
    pub(crate) parts: u32,
    arrived: u64,
    blocks: Vec<u32>,
    span: Span,
    since: u64,
    stood_ns: u64,
    deadline_ms: u64,
}

impl DRoom {
    /// A reservation that was only queued leaves nothing when it is refused.
    pub(crate) fn began(&self) -> bool {
        self.phase > 0 || self.grant != GrantId::NONE
    }
    pub(crate) fn all_arrived(&self) -> bool {
        self.parts > 0 && self.arrived.count_ones() == self.parts
    }
}

/// A room at a prefill worker.
#[derive(Debug)]
pub(crate) struct PRoom {
    job: usize,
    pub(crate) attached: bool,
    pub(crate) ended: Option<Outcome>,
    released: bool,
    withheld: bool,
    blocks: Vec<u32>,
    granted: Option<usize>,
    chunks: Vec<(Range<u32>, Range<u32>)>,
    planned: bool,
    next: usize,
    early: bool,
    since: u64,
    stood_ns: u64,
}

const PAGE: u32 = 4;

impl World {
    // ---- routers --------------------------------------------------------------------------

    pub(crate) fn spawn(&mut self) {
        if self.quiet_period() && self.cov.events >= EVENTS_MIN {
            return;
        }
        let gap = self.prof.job_gap_ms;
        let at = self.after(0, 2 * gap);
        self.push(at, None, Ev::Spawn);
        if self.jobs.len() >= 300 {
            return;
        }
        let alive: Vec<usize> =
            (0..self.routers).filter(|&r| self.hosts[self.rnode(r)].alive).collect();
        if alive.is_empty() {
            return;
        }
        let router = *self.rng.pick(&alive);
        let d = self.rng.range(0, self.d.len() as u64 - 1) as usize;
        let p = self.rng.range(0, self.p.len() as u64 - 1) as usize;
        let n = self.jobs.len();
        let tokens = self.rng.range(1, 24) as u32;
        let prefix = match self.rng.range(0, 9) {
            0 => tokens,
            1..=3 => self.rng.range(0, u64::from((tokens - 1) / PAGE)) as u32 * PAGE,
            _ => 0,
        };
        let tokens = if self.rng.per_mille(10) { 0 } else { tokens };
        let prefix = prefix.min(tokens);
        let mischief = self.prof.mischief;
        let mut key = [0; 16];
        key[..8].copy_from_slice(&self.rng.next().to_be_bytes());
        let mut room = RoomId::issue(router as u16 + 1, n as u64, 0, 1).unwrap();
        let mut duplicate = false;
        if n > 0 && self.rng.per_mille(mischief / 8) {
            // A room number that somebody uses already, at the same workers.
            let other = &self.jobs[self.rng.range(0, n as u64 - 1) as usize];
            if other.p == p {
                room = other.room;
                duplicate = true;
            }
        }
        let pn = self.pnode(p);
        let mut address = self.hosts[pn].address();
        if self.rng.per_mille(mischief / 20) {
            address.key.incarnation.0[0] ^= 1;
            self.cov.hit(C::Stale, 0);
        }
        let reserves = self.rng.per_mille(800);
        let calm = self.prof.calm;
        let seq = self.by_room.get(&room).map_or(n as u32, |&j| self.jobs[j].seq);
        self.jobs.push(Job {
            room,
            router,
            d,
            p,
            seq,
            tokens,
            prefix,
            prefill_tokens: if self.rng.per_mille(mischief / 20) { tokens + 1 } else { tokens },
            address,
            reserves,
            names_decode: self.rng.per_mille(700),
            key: IdempotencyKey(key),
            answered: false,
            outcome: None,
            over: false,
        });
        self.by_room.entry(room).or_insert(n);
        self.cov.rooms += 1;
        let act = |w: &mut Self, ms: u64, act: Act| {
            let at = w.after(0, ms);
            let guard = Some(w.rnode(router));
            w.push(at, guard, Ev::Job { job: n, act });
        };
        if reserves {
            act(self, 0, Act::Reserve(0));
            if self.rng.per_mille(150) {
                let at = self.after(0, 5);
                self.push(at, Some(pn), Ev::Attach { p, job: n, tries: 0 });
            }
        } else {
            self.legs(n, 60);
        }
        let often = if calm { 0 } else { 1 };
        if self.rng.per_mille(120 * often) {
            act(self, 300, Act::Abort(0));
        } else if self.rng.per_mille(mischief / 8) {
            act(self, 0, Act::Abort(0));
        }
        if self.rng.per_mille(60 * often) {
            act(self, 400, Act::AbortDecode);
        }
        if self.rng.per_mille(60 * often) {
            act(self, 400, Act::AbortPrefill);
        }
        if self.rng.per_mille(20 * often) {
            act(self, 100, Act::AbortBy);
        }
        if self.rng.per_mille(mischief / 3) || duplicate {
            act(self, 900, Act::Replay);
        }
        // Also a router that dies is over in the end.
        let at = self.after(2_500, 2_600);
        self.push(at, None, Ev::Job { job: n, act: Act::Over });
        if self.rng.per_mille(500) {
            act(self, 200, Act::Await(0));
        }
    }

    /// Both legs of the request; each may be late, and now and then one is lost.
    fn legs(&mut self, job: usize, ms: u64) {
        let (d, p) = (self.jobs[job].d, self.jobs[job].p);
        let lossy = u64::from(self.prof.mischief > 0) * 30;
        let late = |w: &mut Self| if !w.prof.calm && w.rng.per_mille(80) { 700 } else { ms };
        if !self.rng.per_mille(lossy) {
            let most = late(self);
            let at = self.after(0, most);
            let bad = self.rng.per_mille(self.prof.mischief / 8);
            self.push(at, Some(d), Ev::Lend { d, job, bad, tries: 0 });
        }
        if !self.rng.per_mille(lossy) {
            let most = late(self);
            let (at, node) = (self.after(0, most), self.pnode(p));
            self.push(at, Some(node), Ev::Attach { p, job, tries: 0 });
        }
    }

    pub(crate) fn act(&mut self, job: usize, act: Act) {
        let j = &self.jobs[job];
        let (d, p, room, router) = (j.d, j.p, j.room, j.router);
        let why = || Refusal::new(ErrorKind::Aborted, "not wanted any more");
        let again = |w: &mut Self, ms: u64, act: Act| {
            let at = w.after(ms, 2 * ms);
            let guard = Some(w.rnode(router));
            w.push(at, guard, Ev::Job { job, act });
        };
        match act {
            Act::Reserve(tries) => {
                if j.answered || tries > 6 {
                    return;
                }
                let body = Call::Reserve(Reserve {
                    key: j.key,
                    room,
                    tokens: j.tokens,
                    prefill: j.address.clone(),
                    wait_ms: if self.prof.calm {
                        self.prof.deadline_ms
                    } else {
                        *self.rng.pick(&[0, 50, 400, 2_000])
                    },
                    deadline_ms: self.prof.deadline_ms,
                });
                self.ask(job, act, body);
                again(self, 120, Act::Reserve(tries + 1));
            }
            Act::Abort(tries) => {
                if j.outcome.is_some() {
                    self.cov.hit(C::AbortAfterDone, 0);
                }
                if !self.d[d].rooms.contains_key(&room) {
                    self.cov.hit(C::AbortOvertakes, 0);
                }
                self.ask(job, act, Call::Abort { room, reason: "the client left".into() });
                if tries < 2 {
                    again(self, 150, Act::Abort(tries + 1));
                }
            }
            Act::Await(tries) => {
                if tries < 6 && j.outcome.is_none() {
                    self.ask(job, act, Call::Await { room, wait_ms: 300 });
                    again(self, 350, Act::Await(tries + 1));
                }
            }
            Act::AbortDecode if self.hosts[d].alive => {
                self.decode(d, DEvent::AbortLocal { room, why: "cancelled".into() });
                self.rearm(d);
            }
            Act::AbortPrefill | Act::AbortBy => {
                let node = self.pnode(p);
                if self.hosts[node].alive {
                    let mine = self.p[p].rooms.get(&room);
                    if mine.is_some_and(|r| r.granted.is_none() && r.ended.is_none()) {
                        self.cov.hit(C::AbortBeforeOffer, 0);
                    }
                    let from = self.hosts[self.rnode(router)].identity.clone();
                    let ev = if act == Act::AbortBy {
                        PEvent::AbortBy { from, room, reason: "the client left".into() }
                    } else {
                        PEvent::AbortLocal { room, why: why() }
                    };
                    self.prefill(p, ev);
                    self.rearm(node);
                }
            }
            Act::AbortDecode => {}
            Act::Replay => {
                self.legs(job, 30);
                self.jobs[job].answered = false;
                if self.jobs[job].reserves {
                    again(self, 20, Act::Reserve(3));
                }
            }
            Act::Over => self.jobs[job].over = true,
        }
    }

    /// Sends a call. A call or its answer may be lost; then the router asks again.
    fn ask(&mut self, job: usize, act: Act, body: Call) {
        let (d, router) = (self.jobs[job].d, self.jobs[job].router);
        let copies = 1 + u32::from(self.rng.per_mille(self.prof.duplicate / 2));
        for _ in 0..copies {
            self.next_call += 1;
            let call = self.next_call;
            self.calls.insert(call, (router, job, act));
            let lost = !self.quiet_period() && self.rng.per_mille(self.prof.drop);
            if lost || self.cut_until(self.rnode(router), d).is_some() {
                self.cov.hit(C::Drop, 0);
                continue;
            }
            let at = self.delay();
            let ev = Ev::Call { d, call, router, body: Box::new(body.clone()) };
            self.push(at, Some(d), ev);
        }
    }

    pub(crate) fn call_arrives(&mut self, d: usize, call: u64, router: usize, body: Call) {
        if !self.calls.contains_key(&call) {
            return;
        }
        let reserve = match &body {
            Call::Reserve(r) => Some((r.room, r.deadline_ms)),
            _ => None,
        };
        if let (Some(_), Some(&(_, job, Act::Reserve(tries)))) = (reserve, self.calls.get(&call))
            && tries > 0
            && self.d[d].rooms.contains_key(&self.jobs[job].room)
        {
            self.cov.hit(C::KeyRepeated, 0);
        }
        let wait_ms = match &body {
            Call::Reserve(r) => r.wait_ms.max(self.prof.deadline_ms),
            Call::Await { wait_ms, .. } => *wait_ms,
            _ => 0,
        };
        // An abort after the end returns the end.
        let aborted = match &body {
            Call::Abort { room, .. } => Some(*room),
            _ => None,
        };
        let over = aborted.and_then(|room| self.decided.get(&(d, self.hosts[d].inc, room)));
        self.expected = over.map(|outcome| (call, outcome.clone()));
        self.d[d].waiting.insert(call, self.now + (wait_ms + wait_ms / 50 + 100) * 1_000_000);
        let before = (self.d[d].m.load(), self.d[d].m.active());
        let from = self.hosts[self.rnode(router)].identity.clone();
        let now = self.local(d);
        self.d[d].m.handle_event(now, DEvent::Call { call: CallId(call), from, body });
        if let Some((room, deadline_ms)) = reserve
            && self.d[d].m.active() > before.1
        {
            self.new_room(d, room, deadline_ms);
        }
        let refused = self.drain_decode(d);
        if let (Some(_), Some(kind)) = (reserve, refused) {
            self.left_nothing(d, before.0, before.1);
            match kind {
                ErrorKind::RoomEnded => self.cov.hit(C::Replay, 0),
                ErrorKind::DuplicateRoom => self.cov.hit(C::DuplicateRoom, 0),
                ErrorKind::Busy => self.cov.hit(C::Full, 0),
                _ => {}
            }
        }
    }

    fn left_nothing(&mut self, d: usize, load: kvlane_proto::msg::service::Load, active: usize) {
        let after = (self.d[d].m.load(), self.d[d].m.active());
        if after != (load, active) {
            self.fails(Inv::RefusedLeavesNothing, || {
                format!("decode {d}: {load:?} before, {after:?} after a refusal")
            });
        }
    }

    fn new_room(&mut self, d: usize, room: RoomId, deadline_ms: u64) {
        let fresh = DRoom {
            phase: 0,
            grant: GrantId::NONE,
            sid: None,
            parts: 0,
            arrived: 0,
            blocks: Vec::new(),
            span: Span { tokens: 0, prefix_tokens: 0 },
            since: self.now,
            stood_ns: self.hosts[d].stood_ns,
            deadline_ms: deadline_ms.min(self.prof.deadline_ms),
        };
        if self.d[d].rooms.insert(room, fresh).is_some_and(|r| r.began() && r.phase != 7) {
            self.fails(Inv::EndsOnce, || format!("room {room} starts twice"));
        }
    }

    pub(crate) fn reply_arrives(&mut self, call: u64, reply: Result<Reply, Refusal>) {
        let Some((router, job, act)) = self.calls.remove(&call) else { return };
        if !self.hosts[self.rnode(router)].alive {
            return;
        }
        let (d, room) = (self.jobs[job].d, self.jobs[job].room);
        match (act, reply) {
            (Act::Reserve(_), Ok(Reply::Reserved { .. }))
                if !std::mem::replace(&mut self.jobs[job].answered, true) =>
            {
                self.legs(job, 40);
                if self.rng.per_mille(600) {
                    let (at, node) = (self.after(0, 100), self.rnode(router));
                    self.push(at, Some(node), Ev::Job { job, act: Act::Await(0) });
                }
            }
            (Act::Reserve(_), Err(why)) => {
                self.jobs[job].answered = true;
                if why.kind == ErrorKind::Internal {
                    self.fails(Inv::EndsOnce, || why.to_string());
                }
            }
            (_, Ok(Reply::Ended(outcome))) => {
                // Whatever is told must be what was decided, in some start of the worker.
                let known = (0..=self.hosts[d].inc)
                    .filter_map(|inc| self.decided.get(&(d, inc, room)))
                    .any(|o| *o == outcome);
                if !known {
                    self.fails(Inv::OneOutcome, || {
                        format!("a router hears that room {room} ended as {outcome:?}")
                    });
                }
                self.jobs[job].outcome = Some(outcome);
            }
            _ => {}
        }
    }

    // ---- decode's serving engine ----------------------------------------------------------

    pub(crate) fn decode_leg(&mut self, d: usize, job: usize, bad: bool, tries: u32) {
        let j = &self.jobs[job];
        let (room, seq, named) = (j.room, j.seq, !j.reserves || tries % 2 == 1);
        let span = Span { tokens: j.tokens, prefix_tokens: j.prefix };
        let address = j.address.clone();
        let Ok(range) = span.blocks(&self.prof.layout) else { return };
        let pool = self.d[d].pool;
        let count = range.len();
        let Some(ids) = self.pools[pool].take(count, room) else {
            if tries < 20 {
                let at = self.after(10, 60);
                self.push(at, Some(d), Ev::Lend { d, job, bad, tries: tries + 1 });
            }
            return;
        };
        let mut list = ids.clone();
        if bad {
            match self.rng.range(0, 2) {
                0 if count > 0 => list[count - 1] = self.prof.blocks + 3,
                1 if count > 1 => list[0] = list[1],
                _ => list.push(0),
            }
        }
        let deadline_ms = self.prof.deadline_ms - self.rng.range(0, 300);
        let lend = Lend {
            room,
            span,
            blocks: BlockList::from_ids(&list),
            prefill: named.then_some(address),
            deadline_ms,
        };
        let before = (self.d[d].m.load(), self.d[d].m.active());
        let now = self.local(d);
        self.d[d].m.handle_event(now, DEvent::Lend(lend));
        if self.d[d].m.active() > before.1 {
            self.new_room(d, room, deadline_ms);
        }
        // The answer is the first output; nothing lands before it is read.
        let first = self.d[d].m.poll_output();
        match first {
            Some(DOut::Lent { room: r, grant }) => {
                if bad || r != room {
                    return self.fails(Inv::RefusedLeavesNothing, || "bad blocks taken".into());
                }
                for (i, &id) in ids.iter().enumerate() {
                    let prompt_block = range.start + i as u32;
                    let fill = PAGE.min(span.tokens - prompt_block * PAGE);
                    self.pools[pool].blocks[id as usize] =
                        Block::Lent { room, grant, seq, prompt_block, fill };
                }
                if let Some(r) = self.d[d].rooms.get_mut(&room) {
                    r.grant = grant;
                    r.blocks = ids;
                    r.span = span;
                    r.deadline_ms = r.deadline_ms.max(deadline_ms);
                }
                self.phase(d, room, 1);
                self.drain_decode(d);
            }
            Some(DOut::LendRefused { why, .. }) => {
                ids.iter().for_each(|&id| self.pools[pool].give_back(id));
                self.left_nothing(d, before.0, before.1);
                match why.kind() {
                    ErrorKind::InvalidPlan => self.cov.hit(C::WrongBlocks, 0),
                    ErrorKind::RoomEnded => self.cov.hit(C::Replay, 0),
                    ErrorKind::DuplicateRoom => self.cov.hit(C::DuplicateRoom, 0),
                    ErrorKind::Busy => self.cov.hit(C::Full, 0),
                    _ => {}
                }
                self.drain_decode(d);
                if bad {
                    let at = self.after(0, 20);
                    self.push(at, Some(d), Ev::Lend { d, job, bad: false, tries });
                }
            }
            other => self.fails(Inv::EndsOnce, || format!("a lend is answered by {other:?}")),
        }
    }

    /// Does what the decode wants. Says with what kind a call was refused, if one was.
    pub(crate) fn drain_decode(&mut self, d: usize) -> Option<ErrorKind> {
        let mut refused = None;
        while let Some(out) = self.d[d].m.poll_output() {
            self.note(|| format!("decode {d}: {out:?}"));
            match out {
                DOut::Connect(address) => {
                    let found = (0..self.p.len())
                        .find(|&p| self.hosts[self.pnode(p)].identity == address.key.identity);
                    if let Some(p) = found {
                        self.dial(d, p);
                    }
                }
                DOut::Send { link, msg } => self.link_sends(link.0 as usize, 0, msg),
                DOut::Reply { call, reply } => {
                    let stood = self.hosts[d].stood_ns;
                    match self.d[d].waiting.remove(&call.0) {
                        Some(due) if self.now <= due + stood => {}
                        due => self.fails(Inv::Answered, || {
                            format!("call {call:?} is answered with {reply:?}, due {due:?}")
                        }),
                    }
                    if let Some((_, outcome)) = self.expected.take_if(|e| e.0 == call.0)
                        && reply != Ok(Reply::Ended(outcome.clone()))
                        && !matches!(&reply, Err(why) if why.kind == ErrorKind::Unauthorized)
                    {
                        self.fails(Inv::OneOutcome, || {
                            format!("an abort after {outcome:?} is answered with {reply:?}")
                        });
                    }
                    if let Err(why) = &reply {
                        refused = Some(why.kind);
                    }
                    if let Ok(Reply::Reserved { room, .. }) = &reply {
                        let r = self.d[d].rooms.get(room);
                        let (waited, sid) = r.map_or((0, None), |r| (self.now - r.since, r.sid));
                        if waited > 0 {
                            let kind = sid.or(self.session_of(d, *room));
                            let kind = kind.map_or(0, |s| self.sessions[s].kind());
                            self.cov.hit(C::QueueWait, kind);
                        }
                        self.phase(d, *room, 1);
                    }
                    let known = self.calls.get(&call.0).copied();
                    let lost = !self.quiet_period() && self.rng.per_mille(self.prof.drop);
                    if let (Some((router, ..)), false) = (known, lost) {
                        let (at, node) = (self.delay(), self.rnode(router));
                        if self.cut_until(d, node).is_none() {
                            let reply = Box::new(reply);
                            self.push(at, Some(node), Ev::Reply { call: call.0, reply });
                        }
                    }
                }
                DOut::Lent { .. } | DOut::LendRefused { .. } => {
                    self.fails(Inv::EndsOnce, || format!("{out:?} without a lend"));
                }
                DOut::Open { link, grant, lanes, plan } => {
                    let room = self.d[d].rooms.iter().find(|(_, r)| r.grant == grant);
                    let Some((&room, _)) = room else {
                        self.fails(Inv::LandsInGrant, || format!("grant {grant} of no room"));
                        continue;
                    };
                    self.open_grant(d, room, link.0 as usize, grant, lanes, plan);
                    self.phase(d, room, 2);
                }
                DOut::Pull { serve, parts, .. } => self.pull(d, serve, parts),
                DOut::Fence { grant, how } => {
                    if let Some(room) = self.room_of_grant(d, grant) {
                        self.phase(d, room, 6);
                    }
                    self.fence(d, grant, how);
                }
                DOut::Ended { room, grant, outcome, proof, withheld } => {
                    self.room_ended(d, room, grant, outcome, proof, withheld);
                }
                DOut::LateProof { grant, proof } => {
                    self.cov.hit(C::LateProof, 0);
                    let Some(blocks) = self.d[d].quarantine.remove(&grant) else {
                        self.fails(Inv::BlocksBalance, || format!("late proof of {grant}"));
                        continue;
                    };
                    self.blocks_return(d, grant, &blocks, &proof);
                }
            }
        }
        self.check_lanes(d);
        refused
    }

    fn room_of_grant(&self, d: usize, grant: GrantId) -> Option<RoomId> {
        self.d[d].rooms.iter().find(|(_, r)| r.grant == grant).map(|(&room, _)| room)
    }

    fn session_of(&self, d: usize, room: RoomId) -> Option<usize> {
        self.d[d].m.lent_lanes().find(|l| l.2 == room).map(|l| l.0.0 as usize)
    }

    /// Before an arrival reaches the machine, for the phases of the coverage.
    fn count_arrival(&mut self, d: usize, grant: GrantId, part: PartId) {
        let Some(room) = self.room_of_grant(d, grant) else { return };
        let Some(r) = self.d[d].rooms.get_mut(&room) else { return };
        r.arrived |= 1 << part.0;
        let (n, parts) = (r.arrived.count_ones(), r.parts);
        let phase = if n == parts {
            5
        } else if n * 2 >= parts && n > 1 {
            4
        } else {
            3
        };
        if self.d[d].rooms[&room].phase < 5 {
            self.phase(d, room, phase);
        }
    }

    /// Lanes are lent once; queues are bounded. After every event of a decode.
    fn check_lanes(&mut self, d: usize) {
        let m = &self.d[d].m;
        let mut lent: [u64; 4] = [0; 4];
        let mut twice = None;
        let mut many: Vec<(LinkId, LaneId)> = Vec::new();
        for (link, lane, room) in m.lent_lanes() {
            if link.0 < 64 && lane.0 < 4 {
                let bit = 1 << link.0;
                if lent[usize::from(lane.0)] & bit != 0 {
                    twice = Some((link, lane, room));
                }
                lent[usize::from(lane.0)] |= bit;
            } else if many.contains(&(link, lane)) {
                twice = Some((link, lane, room));
            } else {
                many.push((link, lane));
            }
        }
        let load = m.load();
        let total: usize = self.d[d].lanes.values().sum();
        let over =
            load.queued as usize > self.prof.queue_max || load.rooms as usize > self.prof.rooms_max;
        if let Some(t) = twice {
            self.fails(Inv::LaneLentOnce, || format!("decode {d}: {t:?} is lent twice"));
        } else if load.free_lanes as usize > total {
            self.fails(Inv::LaneLentOnce, || format!("decode {d}: {load:?} of {total} lanes"));
        }
        if over {
            self.fails(Inv::Bounded, || format!("decode {d}: {load:?}"));
        }
    }

    pub(crate) fn check_page(&mut self, d: usize, page: usize, inv: Inv) -> bool {
        let pool = &self.pools[self.d[d].pool];
        let block = pool.blocks[pool.block_of(page) as usize];
        let Block::Lent { seq, prompt_block, fill, .. } = block else {
            // A copy may still run where the fence has failed; nobody uses what it brings.
            if block == Block::Withheld && inv == Inv::SourceKept {
                return true;
            }
            self.fails(inv, || format!("page {page} of {block:?}"));
            return false;
        };
        let slab = pool.slab_of(page);
        for w in 0..WORDS {
            let found = pool.words[page * WORDS + w];
            let want = content(seq, prompt_block, slab, fill, w);
            if found != want {
                self.fails(inv, || {
                    format!("decode {d}: page {page} of {block:?} has {found:#x}, not {want:#x}")
                });
                return false;
            }
        }
        true
    }

    fn blocks_return(&mut self, d: usize, grant: GrantId, blocks: &[u32], proof: &Fence) {
        if proof.0 != grant {
            self.fails(Inv::BlocksBalance, || format!("proof of {proof:?} for {grant}"));
        }
        let pool = self.d[d].pool;
        blocks.iter().for_each(|&id| self.pools[pool].give_back(id));
    }

    fn room_ended(
        &mut self,
        d: usize,
        room: RoomId,
        grant: GrantId,
        outcome: Outcome,
        proof: Option<Fence>,
        withheld: bool,
    ) {
        let inc = self.hosts[d].inc;
        let now = self.now;
        let stood = self.hosts[d].stood_ns;
        if self.decided.insert((d, inc, room), outcome.clone()).is_some() {
            return self.fails(Inv::EndsOnce, || format!("room {room} ended twice"));
        }
        let Some(r) = self.d[d].rooms.get_mut(&room) else {
            return self.fails(Inv::EndsOnce, || format!("room {room} ended, never began"));
        };
        let slack_ms = 300 + 3 * self.prof.fence_ms + (stood - r.stood_ns) / 1_000_000;
        let took_ms = (now - r.since) / 1_000_000;
        let deadline_ms = r.deadline_ms;
        let late = took_ms > deadline_ms + r.deadline_ms / 50 + slack_ms;
        let (blocks, parts, sid, span, arrived) =
            (std::mem::take(&mut r.blocks), r.parts, r.sid, r.span, r.arrived);
        if late || outcome.why().is_some_and(|w| w.text.is_empty()) {
            self.fails(Inv::EndsOnce, || format!("room {room} took {took_ms} ms: {outcome:?}"));
        }
        let kind = sid.map_or(0, |s| self.sessions[s].kind());
        let pool = self.d[d].pool;
        match &outcome {
            Outcome::Done { .. } => {
                for &id in &blocks {
                    for slab in 0..self.prof.layout.pages_per_block() {
                        let page = self.pools[pool].page(slab, id);
                        if !self.check_page(d, page, Inv::DoneIsComplete) {
                            return;
                        }
                    }
                }
                self.cov.hit(C::Done, kind);
                if parts == 0 {
                    self.cov.hit(C::ZeroPage, kind);
                } else if span.prefix_tokens > 0 {
                    self.cov.hit(C::Prefix, kind);
                }
                if parts > 0 && span.tokens % PAGE != 0 {
                    self.cov.hit(C::PartialPage, kind);
                }
                if let Some(s) = sid {
                    let key = (room, self.sessions[s].p, self.sessions[s].inc[1], d);
                    self.done_at.insert(key);
                    if self.failed_at.contains(&key) {
                        self.fails(Inv::OneOutcome, || {
                            format!("room {room} is done, and the prefill said that it failed")
                        });
                    }
                }
            }
            Outcome::Failed { why, .. } => {
                self.cov.hit(C::Failed, kind);
                if why.kind == ErrorKind::LeaseExpired {
                    self.cov.hit(C::LeaseExpiry, kind);
                }
                let complete = sid.is_some() && arrived.count_ones() == parts;
                if why.kind == ErrorKind::Incomplete && complete && why.text.contains("ended early")
                {
                    self.fails(Inv::TrueReason, || format!("{room} has all its parts: {why}"));
                }
                // What remains: a pool or a pair of lanes with too many takers.
                let crowded = matches!(why.kind, ErrorKind::Busy | ErrorKind::DeadlineExceeded)
                    || why.text.contains("deadline")
                    || took_ms + 500 > deadline_ms;
                if self.prof.calm && !crowded {
                    self.fails(Inv::CalmIsDone, || format!("{room} failed: {why}"));
                }
                if why.text.contains("decode leg did not come") {
                    self.cov.hit(C::Unclaimed, 0);
                }
            }
            Outcome::Unknown { .. } => {
                self.fails(Inv::EndsOnce, || format!("the decode does not know of {room}"));
            }
        }
        match (proof, withheld) {
            (Some(proof), false) => self.blocks_return(d, grant, &blocks, &proof),
            (None, true) => {
                self.cov.hit(C::Quarantine, kind);
                for &id in &blocks {
                    self.pools[pool].blocks[id as usize] = Block::Withheld;
                }
                self.d[d].quarantine.insert(grant, blocks);
            }
            (None, false) if grant == GrantId::NONE && blocks.is_empty() => {}
            (proof, withheld) => self.fails(Inv::BlocksBalance, || {
                format!("room {room} ended with {proof:?}, withheld {withheld}")
            }),
        }
        self.phase(d, room, 7);
    }

    // ---- prefill's serving engine ---------------------------------------------------------

    pub(crate) fn prefill_leg(&mut self, p: usize, job: usize, tries: u32) {
        let j = &self.jobs[job];
        let (room, tokens) = (j.room, j.prefill_tokens);
        let decode = j.names_decode.then(|| self.hosts[j.d].identity.clone());
        let issuer = Some(self.hosts[self.rnode(j.router)].identity.clone());
        let node = self.pnode(p);
        let again = self.p[p].rooms.contains_key(&room);
        let pool = self.p[p].pool;
        let mut blocks = Vec::new();
        if !again {
            let count = tokens.div_ceil(PAGE) as usize;
            let Some(ids) = self.pools[pool].take(count, room) else {
                if tries < 20 {
                    let at = self.after(10, 60);
                    self.push(at, Some(node), Ev::Attach { p, job, tries: tries + 1 });
                }
                return;
            };
            blocks = ids;
            let r = PRoom {
                job,
                attached: false,
                ended: None,
                released: false,
                withheld: false,
                blocks: blocks.clone(),
                granted: None,
                chunks: Vec::new(),
                planned: false,
                next: 0,
                early: !self.prof.calm && self.rng.per_mille(40),
                since: self.now,
                stood_ns: self.hosts[node].stood_ns,
            };
            self.p[p].rooms.insert(room, r);
        }
        self.p[p].refused = None;
        let before = self.p[p].m.active();
        let deadline_ms = self.prof.deadline_ms;
        self.prefill(p, PEvent::Attach { room, tokens, decode, issuer, deadline_ms });
        let refused = self.p[p].refused.take();
        if refused.is_some() && self.p[p].m.active() != before {
            self.fails(Inv::RefusedLeavesNothing, || format!("prefill {p}: leg of {room}"));
        }
        match refused {
            Some(_) if again => {}
            Some(e) => {
                if e.kind() == ErrorKind::RoomEnded {
                    self.cov.hit(C::Replay, 0);
                }
                self.p[p].rooms.remove(&room);
                blocks.iter().for_each(|&id| self.pools[pool].give_back(id));
            }
            None if again => self.fails(Inv::EndsOnce, || format!("leg of {room} taken twice")),
            None => {
                let at = self.after(0, 10);
                self.push(at, Some(node), Ev::Chunk { p, room });
            }
        }
    }

    /// In what order this room's pages become ready.
    fn plan_chunks(&mut self, job: usize, granted: bool) -> Vec<(Range<u32>, Range<u32>)> {
        let (tokens, prefix) = (self.jobs[job].prefill_tokens, self.jobs[job].prefix);
        let layers = self.prof.layout.layers;
        let start = if granted && self.rng.per_mille(500) { prefix.min(tokens) } else { 0 };
        let mut cuts = vec![start];
        if self.rng.per_mille(700) {
            let mut at = start;
            while at < tokens {
                at = (at + self.rng.range(1, 9) as u32).min(tokens);
                cuts.push(at);
            }
        } else if start < tokens {
            cuts.push(tokens);
        }
        let mut chunks = Vec::new();
        let by_layer = self.rng.per_mille(400);
        for c in cuts.windows(2) {
            if by_layer {
                let cut = self.rng.range(1, u64::from(layers)) as u32;
                chunks.push((c[0]..c[1], 0..cut));
                if cut < layers {
                    chunks.push((c[0]..c[1], cut..layers));
                }
            } else {
                chunks.push((c[0]..c[1], 0..layers));
            }
        }
        if by_layer && self.rng.per_mille(500) {
            // All tokens of the first layers before the others.
            chunks.sort_by_key(|(t, l)| (l.start, t.start));
            let tidy = chunks.windows(2).all(|c| c[0].1 == c[1].1 || c[0].1.end == c[1].1.start);
            if !tidy {
                chunks.clear();
                for l in 0..layers {
                    chunks.extend(cuts.windows(2).map(|c| (c[0]..c[1], l..l + 1)));
                }
            }
        }
        chunks
    }

    pub(crate) fn next_chunk(&mut self, p: usize, room: RoomId) {
        let Some(r) = self.p[p].rooms.get(&room) else { return };
        if r.ended.is_some() || r.released || r.withheld || !r.attached {
            return;
        }
        let (job, granted) = (r.job, r.granted.is_some());
        if !r.planned {
            let mut chunks = self.plan_chunks(job, granted);
            let r = self.p[p].rooms.get_mut(&room).unwrap();
            if r.early && chunks.len() > 1 {
                self.cov.hit(C::FinishEarly, 0);
                chunks.pop();
            } else {
                r.early = false;
            }
            (r.chunks, r.planned) = (chunks, true);
        }
        let r = self.p[p].rooms.get_mut(&room).unwrap();
        if r.next == r.chunks.len() {
            r.next += 1;
            return self.prefill(p, PEvent::Finish { room });
        }
        let Some((tokens, layers)) = r.chunks.get(r.next).cloned() else { return };
        r.next += 1;
        let (first, end) = (tokens.start / PAGE, tokens.end.div_ceil(PAGE));
        let ids = r.blocks[first as usize..end as usize].to_vec();
        let (seq, slabs) = (self.jobs[job].seq, self.prof.layout.kind.slabs());
        let pool = &mut self.pools[self.p[p].pool];
        for (i, &id) in ids.iter().enumerate() {
            let block = first + i as u32;
            let fill = PAGE.min(tokens.end - block * PAGE);
            for slab in layers.start * slabs..layers.end * slabs {
                let page = pool.page(slab, id);
                for w in 0..WORDS {
                    pool.words[page * WORDS + w] = content(seq, block, slab, fill, w);
                }
            }
        }
        let blocks = BlockList::from_ids(&ids);
        self.p[p].refused = None;
        self.prefill(p, PEvent::Chunk(Chunk { room, tokens, layers, blocks }));
        if self.p[p].refused.take().is_none() {
            let (at, node) = (self.after(0, 25), self.pnode(p));
            self.push(at, Some(node), Ev::Chunk { p, room });
        }
    }

    /// Does what the prefill wants.
    pub(crate) fn drain_prefill(&mut self, p: usize) {
        while let Some(out) = self.p[p].m.poll_output() {
            self.note(|| format!("prefill {p}: {out:?}"));
            match out {
                POut::Send { link, msg } => self.link_sends(link.0 as usize, 1, msg),
                POut::Attached { room } => {
                    if let Some(r) = self.p[p].rooms.get_mut(&room) {
                        r.attached = true;
                    }
                }
                POut::Refused { why, .. } => self.p[p].refused = Some(why),
                POut::ChunkTaken { .. } => {}
                POut::Granted { room, link, offer, .. } => {
                    let sid = link.0 as usize;
                    let map = self.pools[self.sessions[sid].pools[0]].map.clone();
                    let layout = &self.prof.layout;
                    let range = offer.span.blocks(layout).unwrap();
                    let count = range.end - range.start;
                    let grid =
                        kvlane_proto::Grid::new(layout, count, self.prof.part_bytes).unwrap();
                    let plan = Arc::new(Plan::new(grid, layout, map, &offer.blocks).unwrap());
                    self.p[p].plans.insert((sid, offer.grant), plan);
                    let kind = self.sessions[sid].kind();
                    if let Some(r) = self.p[p].rooms.get_mut(&room) {
                        let c = if r.since < self.now { C::EarlyPrefill } else { C::LatePrefill };
                        r.granted = Some(sid);
                        self.cov.hit(c, kind);
                    }
                }
                POut::Post { link, grant, part, lane, layers, ids } => {
                    self.post(p, link.0 as usize, grant, part, lane, layers, ids);
                }
                POut::ResetLane { link, lane } => {
                    let c = self.sessions[link.0 as usize].lanes.get(usize::from(lane.0));
                    if let Some(&c) = c.filter(|&&c| c != usize::MAX) {
                        self.end_of_conn(c, 1);
                    }
                }
                POut::Quiesce { link, grant } => self.quiesce(p, link.0 as usize, grant),
                POut::Released { room, proof } => self.source_returns(p, room, proof),
                POut::Withheld { room, .. } => {
                    self.cov.hit(C::SourceWithheld, 0);
                    let pool = self.p[p].pool;
                    if let Some(r) = self.p[p].rooms.get_mut(&room) {
                        r.withheld = true;
                        for &id in &r.blocks {
                            self.pools[pool].blocks[id as usize] = Block::Withheld;
                        }
                    }
                }
                POut::Ended { room, outcome } => self.prefill_ended(p, room, outcome),
            }
        }
    }

    fn source_returns(&mut self, p: usize, room: RoomId, _proof: Option<Quiet>) {
        let pool = self.p[p].pool;
        // An offer whose leg never came has no source.
        let Some(r) = self.p[p].rooms.get_mut(&room) else { return };
        if std::mem::replace(&mut r.released, true) {
            return self.fails(Inv::BlocksBalance, || format!("source of {room} released twice"));
        }
        r.withheld = false;
        let blocks = std::mem::take(&mut r.blocks);
        blocks.iter().for_each(|&id| self.pools[pool].give_back(id));
    }

    fn prefill_ended(&mut self, p: usize, room: RoomId, outcome: Outcome) {
        let node = self.pnode(p);
        let (now, stood, inc) = (self.now, self.hosts[node].stood_ns, self.hosts[node].inc);
        let deadline_ms = self.prof.deadline_ms;
        let slack_ms = 300 + 3 * self.prof.fence_ms;
        let Some(r) = self.p[p].rooms.get_mut(&room).filter(|r| r.attached) else { return };
        let kind = r.granted.map_or(0, |s| self.sessions[s].kind());
        if r.ended.replace(outcome.clone()).is_some() {
            return self.fails(Inv::EndsOnce, || format!("prefill ended {room} twice"));
        }
        let (released, withheld) = (r.released, r.withheld);
        let took_ms = (now - r.since) / 1_000_000;
        // Its own deadline, and as long again for the decode's word.
        let most =
            2 * (deadline_ms + deadline_ms / 50) + slack_ms + (stood - r.stood_ns) / 1_000_000;
        if took_ms > most {
            self.fails(Inv::EndsOnce, || format!("prefill: {room} took {took_ms} ms"));
        }
        if !released && !withheld {
            self.fails(Inv::BlocksBalance, || format!("{room} ended, its source did not return"));
        }
        // A number that was used at another decode, without a leg, is not this leg's room.
        let job = &self.jobs[self.p[p].rooms[&room].job];
        let (named, job_d) = (job.names_decode, job.d);
        let key = (room, p, inc, job_d);
        let done = self
            .done_at
            .range((room, p, inc, 0)..=(room, p, inc, usize::MAX))
            .any(|k| !named || k.3 == job_d);
        match outcome {
            Outcome::Done { .. } if !done => {
                self.fails(Inv::OneOutcome, || format!("prefill says that {room} is done"));
            }
            Outcome::Done { .. } => {}
            Outcome::Failed { .. } => {
                self.failed_at.insert(key);
                if self.done_at.contains(&key) {
                    self.fails(Inv::OneOutcome, || format!("prefill says that {room} failed"));
                }
            }
            Outcome::Unknown { .. } => self.cov.hit(C::Unknown, kind),
        }
    }

    // ---- both -----------------------------------------------------------------------------

    fn link_sends(&mut self, sid: usize, side: usize, msg: PeerMsg) {
        if !self.sessions[sid].open[side] {
            return;
        }
        let now = self.local(self.sessions[sid].node(side));
        if let Some(l) = self.sessions[sid].link[side].as_mut() {
            l.send(now, msg);
        }
        self.drain_link(sid, side);
    }

    /// Looks at what the workers tell each other.
    pub(crate) fn heard(&mut self, sid: usize, side: usize, frame: &PeerFrame) {
        if side == 1 {
            return;
        }
        // What the decode promises, in true time: its own clock may run fast.
        let promise = match &frame.msg {
            PeerMsg::Offer(o) => Some((o.grant, o.lease_ms)),
            PeerMsg::Renew { grant, lease_ms, .. } => Some((*grant, *lease_ms)),
            _ => None,
        };
        if let Some((grant, lease_ms)) = promise {
            let host = &self.hosts[self.sessions[sid].d];
            let until = host.when(host.local(self.now).plus_ms(grantor_ms(lease_ms)));
            self.promised.insert((sid, grant), until);
        }
        if let PeerMsg::Ended { room, grant, outcome } = &frame.msg {
            let done = outcome.is_done();
            let before = *self.said.entry((sid, *room, *grant)).or_insert(done);
            if before != done {
                self.fails(Inv::OneOutcome, || format!("{room}: done {before}, then {done}"));
            }
            if outcome.why().is_some_and(|w| w.kind == ErrorKind::LeaseExpired) {
                self.lease_over.insert((sid, *grant));
            }
        }
    }

    /// The promises of a sender, each time it posts.
    pub(crate) fn check_post(
        &mut self,
        p: usize,
        sid: usize,
        grant: GrantId,
        part: PartId,
        lane: LaneId,
    ) {
        let now = self.local(self.pnode(p));
        let until = self.p[p].leases.get(&(sid, grant)).copied();
        if until.is_none_or(|until| now >= until) {
            self.fails(Inv::LeaseHeld, || {
                format!("prefill {p} posts at {now:?} under a lease until {until:?}")
            });
        }
        if self.promised.get(&(sid, grant)).is_none_or(|&until| self.now >= until) {
            self.fails(Inv::LeaseHeld, || {
                format!("prefill {p} posts for {grant} after what the decode promised")
            });
        }
        if self.lease_over.contains(&(sid, grant)) {
            self.fails(Inv::LeaseHeld, || {
                format!("prefill {p} posts for {grant}, whose lease the decode has ended")
            });
        }
        if self.p[p].quiet.contains(&(sid, grant)) {
            self.fails(Inv::LeaseHeld, || format!("prefill {p} posts for {grant} after quiesce"));
        }
        let kind = self.sessions[sid].kind();
        let chunks: u32 = self.p[p]
            .rooms
            .values()
            .filter(|r| r.granted == Some(sid))
            .map(|r| r.next as u32)
            .sum();
        if let Some((before, then)) = self.p[p].posted.insert((sid, grant, part), (lane, chunks)) {
            if before != lane {
                self.cov.hit(C::Failover, kind);
            }
            if chunks > then {
                self.cov.hit(C::RetryOverChunk, kind);
            }
        }
    }

    pub(crate) fn decode_event(&mut self, d: usize, ev: DEvent) {
        if let DEvent::Arrived { grant, part } = &ev {
            self.count_arrival(d, *grant, *part);
        }
        self.decode(d, ev);
    }
}
