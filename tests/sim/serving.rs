//! Routers and toy serving engines, and what the room machines ask of them.
//!
//! A job is one hand-off between two instances, as a router scripts it: reserve at every decode
//! rank, undo the rest if one refuses, send every rank's leg, perhaps abort, wait for the outcomes,
//! perhaps a replay. The serving engines allocate blocks, prefill in chunks of tokens or layers of a
//! pool, verify what is done, and reuse at once what came back.

use std::collections::BTreeMap;
use std::ops::Range;

use kvlane_proto::decode::{CallId, Lend, Output as DOut};
use kvlane_proto::msg::call::{Call, Reply, Reserve};
use kvlane_proto::msg::peer::{Outcome, PeerFrame, PeerMsg};
use kvlane_proto::msg::service::WorkerAddress;
use kvlane_proto::prefill::{Chunk, Output as POut, Takers};
use kvlane_proto::time::grantor_ms;
use kvlane_proto::{
    BlockList, ErrorKind, GrantId, IdempotencyKey, LaneId, Layout, LinkId, PartId, Refusal, RoomId,
    Span,
};

use crate::coverage::C;
use crate::engines::Kind;
use crate::invariants::Inv;
use crate::pools::{Block, Ids, Pool, draft, is_rows};
use crate::shapes::TOKENS_MAX;
use crate::world::{DEvent, EVENTS_MIN, Ev, Fence, PEvent, Quiet, World};

/// A step of a job's script; ranks are counted in the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    Reserve {
        rank: usize,
        tries: u32,
    },
    Abort {
        rank: usize,
        tries: u32,
    },
    Await {
        rank: usize,
        tries: u32,
    },
    AbortDecode(usize),
    AbortPrefill(usize),
    AbortBy(usize),
    /// Sends all legs again.
    Replay,
    Over,
}

#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) room: RoomId,
    pub(crate) router: usize,
    /// The prefill instance.
    instance: usize,
    /// The decode ranks, and who sends to each.
    pub(crate) ds: Vec<usize>,
    sources: Vec<Vec<WorkerAddress>>,
    /// The prefill ranks that send, and who takes from each.
    pub(crate) ps: Vec<usize>,
    takers: Vec<Vec<usize>>,
    /// Tells the contents of rooms apart.
    pub(crate) seq: u32,
    tokens: u32,
    prefix: u32,
    /// Tokens that the prefill legs say.
    prefill_tokens: u32,
    reserves: bool,
    names_decode: bool,
    key: IdempotencyKey,
    /// What each decode rank said to the reservation.
    reserved: Vec<Option<bool>>,
    /// One rank has failed, and the router gives the others up.
    undone: bool,
    outcomes: Vec<Option<Outcome>>,
    pub(crate) over: bool,
}

/// A room at a decode worker, as seen from outside the machine.
#[derive(Debug)]
pub(crate) struct DRoom {
    pub(crate) phase: usize,
    pub(crate) grant: GrantId,
    /// By session: parts, and which of them arrived.
    sources: BTreeMap<usize, (u32, u128)>,
    blocks: Ids,
    span: Span,
    since: u64,
    stood_ns: u64,
    deadline_ms: u64,
    /// When a link to one of its sources was lost, and how long the process had stood by then.
    lost: Option<(u64, u64)>,
}

impl DRoom {
    /// A reservation that was only queued leaves nothing when it is refused.
    pub(crate) fn began(&self) -> bool {
        self.phase > 0 || self.grant != GrantId::NONE
    }
    pub(crate) fn opened(&mut self, sources: &[(usize, u32)]) {
        self.sources = sources.iter().map(|&(sid, parts)| (sid, (parts, 0))).collect();
    }
    pub(crate) fn loses(&mut self, sid: usize, now: u64, stood_ns: u64) {
        if self.sources.contains_key(&sid) && self.phase != 7 {
            self.lost.get_or_insert((now, stood_ns));
        }
    }
    pub(crate) fn sids(&self) -> impl Iterator<Item = usize> + '_ {
        self.sources.keys().copied()
    }
    /// Parts that arrived, and parts.
    fn progress(&self) -> (u32, u32) {
        let each = self.sources.values();
        each.fold((0, 0), |(n, all), (parts, arrived)| (n + arrived.count_ones(), all + parts))
    }
    pub(crate) fn all_arrived(&self) -> bool {
        let (arrived, parts) = self.progress();
        parts > 0 && arrived == parts
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
    blocks: Ids,
    /// The prompt's block that those of each pool begin with.
    first: Vec<u32>,
    granted: BTreeMap<usize, GrantId>,
    /// What of the prompt its takers want, once all have come.
    wanted: Option<Span>,
    chunks: Vec<Part>,
    planned: bool,
    next: usize,
    early: bool,
    since: u64,
    stood_ns: u64,
}

/// Tokens and layers of a pool that become ready at once.
#[derive(Clone, Debug)]
struct Part {
    pool: usize,
    tokens: Range<u32>,
    layers: Range<u32>,
}

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
        let n = self.jobs.len();
        let decode = self.rng.range(0, self.decodes.len() as u64 - 1) as usize;
        let instance = self.rng.range(0, self.prefills.len() as u64 - 1) as usize;
        let (ranks, prefills) = (self.decodes[decode].clone(), self.prefills[instance].clone());
        let route = self.routes[decode][instance].clone();
        let ds: Vec<usize> = ranks.clone().collect();
        let used: Vec<usize> =
            (0..prefills.len()).filter(|&p| !route.takers[p].is_empty()).collect();
        let ps: Vec<usize> = used.iter().map(|p| prefills.start + p).collect();
        let takers: Vec<Vec<usize>> = used
            .iter()
            .map(|&p| route.takers[p].iter().map(|d| ranks.start + d).collect())
            .collect();
        let tokens = self.rng.range(1, u64::from(TOKENS_MAX)) as u32;
        let unit = self.hosts[ds[0]].pools.iter().map(|l| l.page_tokens).max().unwrap_or(1);
        let prefix = match self.rng.range(0, 9) {
            0 => tokens,
            1..=3 => self.rng.range(0, u64::from((tokens - 1) / unit)) as u32 * unit,
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
            if other.instance == instance {
                room = other.room;
                duplicate = true;
            }
        }
        let address = |w: &Self, p: usize| w.hosts[w.pnode(prefills.start + p)].address();
        let mut sources: Vec<Vec<WorkerAddress>> = route
            .sources
            .iter()
            .map(|ranks| ranks.iter().map(|&p| address(self, p)).collect())
            .collect();
        if self.rng.per_mille(mischief / 20) {
            let stale = self.rng.pick(&sources[0]).key.identity.clone();
            let all = sources.iter_mut().flatten();
            all.filter(|a| a.key.identity == stale).for_each(|a| a.key.incarnation.0[0] ^= 1);
            self.cov.hit(C::Stale, 0);
        }
        let mut takers = takers;
        if self.rng.per_mille(mischief / 10) {
            self.misname(&mut sources, &mut takers);
        }
        let reserves = self.rng.per_mille(800);
        let calm = self.prof.calm;
        let seq = self.by_room.get(&room).map_or(n as u32, |&j| self.jobs[j].seq);
        self.jobs.push(Job {
            room,
            router,
            instance,
            reserved: vec![None; ds.len()],
            outcomes: vec![None; ds.len()],
            ds: ds.clone(),
            sources,
            ps: ps.clone(),
            takers,
            seq,
            tokens,
            prefix,
            prefill_tokens: if self.rng.per_mille(mischief / 20) { tokens + 1 } else { tokens },
            reserves,
            names_decode: self.rng.per_mille(700),
            key: IdempotencyKey(key),
            undone: false,
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
            let first = if self.prof.reserves_at_once { ds.len() } else { 1 };
            (0..first).for_each(|rank| act(self, 0, Act::Reserve { rank, tries: 0 }));
            if self.rng.per_mille(150) {
                for &p in &ps {
                    let (at, node) = (self.after(0, 5), self.pnode(p));
                    self.push(at, Some(node), Ev::Attach { p, job: n, tries: 0 });
                }
            }
        } else {
            self.legs(n, 60);
        }
        let often = if calm { 0 } else { 1 };
        let aborted = if self.rng.per_mille(120 * often) {
            Some(300)
        } else {
            self.rng.per_mille(mischief / 8).then_some(0)
        };
        if let Some(ms) = aborted {
            (0..ds.len()).for_each(|rank| act(self, ms, Act::Abort { rank, tries: 0 }));
        }
        let any = |w: &mut Self, of: &[usize]| w.rng.range(0, of.len() as u64 - 1) as usize;
        if self.rng.per_mille(60 * often) {
            let rank = any(self, &ds);
            act(self, 400, Act::AbortDecode(rank));
        }
        if self.rng.per_mille(60 * often) {
            let rank = any(self, &ps);
            act(self, 400, Act::AbortPrefill(rank));
        }
        if self.rng.per_mille(20 * often) {
            let rank = any(self, &ps);
            act(self, 100, Act::AbortBy(rank));
        }
        if self.rng.per_mille(mischief / 3) || duplicate {
            act(self, 900, Act::Replay);
        }
        // Also a router that dies is over in the end.
        let at = self.after(2_500, 2_600);
        self.push(at, None, Ev::Job { job: n, act: Act::Over });
        if self.rng.per_mille(500) {
            (0..ds.len()).for_each(|rank| act(self, 200, Act::Await { rank, tries: 0 }));
        }
    }

    /// A router that has a wrong idea of who sends to whom.
    fn misname(&mut self, sources: &mut [Vec<WorkerAddress>], takers: &mut [Vec<usize>]) {
        let d = self.rng.range(0, self.d.len() as u64 - 1) as usize;
        let p = self.rng.range(0, self.p.len() as u64 - 1) as usize;
        let other = self.hosts[self.pnode(p)].address();
        let list = self.rng.range(0, sources.len() as u64 - 1) as usize;
        let list = &mut sources[list];
        match self.rng.range(0, 3) {
            0 if list.len() > 1 => drop(list.pop()),
            0 | 1 => list.push(other),
            n => {
                let list = self.rng.range(0, takers.len() as u64 - 1) as usize;
                let list = &mut takers[list];
                if n == 2 && list.len() > 1 {
                    list.pop();
                } else if !list.contains(&d) {
                    list.push(d);
                }
                self.cov.hit(C::WrongTakers, 0);
            }
        }
    }

    /// The legs of all ranks; each may be late, and now and then one is lost.
    fn legs(&mut self, job: usize, ms: u64) {
        let (ds, ps) = (self.jobs[job].ds.clone(), self.jobs[job].ps.clone());
        let lossy = u64::from(self.prof.mischief > 0) * 30;
        let late = |w: &mut Self| if !w.prof.calm && w.rng.per_mille(80) { 700 } else { ms };
        for d in ds {
            if !self.rng.per_mille(lossy) {
                let most = late(self);
                let at = self.after(0, most);
                let bad = self.rng.per_mille(self.prof.mischief / 8);
                self.push(at, Some(d), Ev::Lend { d, job, bad, tries: 0 });
            }
        }
        for p in ps {
            if !self.rng.per_mille(lossy) {
                let most = late(self);
                let (at, node) = (self.after(0, most), self.pnode(p));
                self.push(at, Some(node), Ev::Attach { p, job, tries: 0 });
            }
        }
    }

    /// One rank has failed: the router gives up the others.
    fn undo(&mut self, job: usize, failed: Option<usize>) {
        let j = &mut self.jobs[job];
        if std::mem::replace(&mut j.undone, true) {
            return;
        }
        for rank in (0..j.ds.len()).filter(|&rank| Some(rank) != failed).collect::<Vec<_>>() {
            if self.jobs[job].reserved[rank] == Some(true) {
                self.cov.hit(C::Undone, 0);
            }
            self.act(job, Act::Abort { rank, tries: 0 });
        }
    }

    pub(crate) fn act(&mut self, job: usize, act: Act) {
        let j = &self.jobs[job];
        let (room, router) = (j.room, j.router);
        let why = || Refusal::new(ErrorKind::Aborted, "not wanted any more");
        let again = |w: &mut Self, ms: u64, act: Act| {
            let at = w.after(ms, 2 * ms);
            let guard = Some(w.rnode(router));
            w.push(at, guard, Ev::Job { job, act });
        };
        match act {
            Act::Reserve { rank, tries } => {
                if j.reserved[rank].is_some() || j.undone {
                    return;
                }
                if tries > 6 {
                    return self.undo(job, None);
                }
                let body = Call::Reserve(Reserve {
                    key: j.key,
                    room,
                    tokens: j.tokens,
                    prefills: j.sources[rank].clone(),
                    wait_ms: if self.prof.calm {
                        self.prof.deadline_ms
                    } else {
                        *self.rng.pick(&[0, 50, 400, 2_000])
                    },
                    deadline_ms: self.prof.deadline_ms,
                });
                self.ask(job, act, rank, body);
                again(self, 120, Act::Reserve { rank, tries: tries + 1 });
            }
            Act::Abort { rank, tries } => {
                if j.outcomes[rank].is_some() {
                    self.cov.hit(C::AbortAfterDone, 0);
                }
                if !self.d[j.ds[rank]].rooms.contains_key(&room) {
                    self.cov.hit(C::AbortOvertakes, 0);
                }
                self.ask(job, act, rank, Call::Abort { room, reason: "the client left".into() });
                if tries < 2 {
                    again(self, 150, Act::Abort { rank, tries: tries + 1 });
                }
            }
            Act::Await { rank, tries } => {
                if tries < 6 && j.outcomes[rank].is_none() {
                    self.ask(job, act, rank, Call::Await { room, wait_ms: 300 });
                    again(self, 350, Act::Await { rank, tries: tries + 1 });
                }
            }
            Act::AbortDecode(rank) => {
                let d = j.ds[rank];
                if self.hosts[d].alive {
                    self.decode(d, DEvent::AbortLocal { room, why: "cancelled".into() });
                    self.rearm(d);
                }
            }
            Act::AbortPrefill(rank) | Act::AbortBy(rank) => {
                let p = j.ps[rank];
                let node = self.pnode(p);
                if self.hosts[node].alive {
                    let mine = self.p[p].rooms.get(&room);
                    if mine.is_some_and(|r| r.granted.is_empty() && r.ended.is_none()) {
                        self.cov.hit(C::AbortBeforeOffer, 0);
                    }
                    let from = self.hosts[self.rnode(router)].identity.clone();
                    let ev = if matches!(act, Act::AbortBy(_)) {
                        PEvent::AbortBy { from, room, reason: "the client left".into() }
                    } else {
                        PEvent::AbortLocal { room, why: why() }
                    };
                    self.prefill(p, ev);
                    self.rearm(node);
                }
            }
            Act::Replay => {
                let ranks = j.ds.len();
                self.legs(job, 30);
                if self.jobs[job].reserves {
                    self.jobs[job].reserved = vec![None; ranks];
                    (0..ranks).for_each(|rank| again(self, 20, Act::Reserve { rank, tries: 3 }));
                }
            }
            Act::Over => self.jobs[job].over = true,
        }
    }

    /// Sends a call. A call or its answer may be lost; then the router asks again.
    fn ask(&mut self, job: usize, act: Act, rank: usize, body: Call) {
        let (d, router) = (self.jobs[job].ds[rank], self.jobs[job].router);
        let copies = 1 + u32::from(self.rng.per_mille(self.prof.duplicate / 2));
        for _ in 0..copies {
            self.next_call += 1;
            let call = self.next_call;
            self.calls.insert(call, (d, job, act));
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
        if let (Some(_), Some(&(_, job, Act::Reserve { tries, .. }))) =
            (reserve, self.calls.get(&call))
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
            sources: BTreeMap::new(),
            blocks: Vec::new(),
            span: Span { tokens: 0, prefix_tokens: 0 },
            since: self.now,
            stood_ns: self.hosts[d].stood_ns,
            deadline_ms: deadline_ms.min(self.prof.deadline_ms),
            lost: None,
        };
        if self.d[d].rooms.insert(room, fresh).is_some_and(|r| r.began() && r.phase != 7) {
            self.fails(Inv::EndsOnce, || format!("room {room} starts twice"));
        }
    }

    pub(crate) fn reply_arrives(&mut self, call: u64, reply: Result<Reply, Refusal>) {
        let Some((d, job, act)) = self.calls.remove(&call) else { return };
        let j = &mut self.jobs[job];
        let (room, router) = (j.room, j.router);
        if !self.hosts[self.rnode(router)].alive {
            return;
        }
        let j = &mut self.jobs[job];
        match (act, reply) {
            (Act::Reserve { rank, .. }, Ok(Reply::Reserved { .. }))
                if j.reserved[rank].replace(true).is_none() =>
            {
                if j.undone {
                    self.act(job, Act::Abort { rank, tries: 0 });
                } else if j.reserved.iter().all(|r| *r == Some(true)) {
                    self.legs(job, 40);
                    if self.rng.per_mille(600) {
                        for rank in 0..self.jobs[job].ds.len() {
                            let (at, node) = (self.after(0, 100), self.rnode(router));
                            let act = Act::Await { rank, tries: 0 };
                            self.push(at, Some(node), Ev::Job { job, act });
                        }
                    }
                } else if j.reserved.get(rank + 1) == Some(&None) {
                    self.act(job, Act::Reserve { rank: rank + 1, tries: 0 });
                }
            }
            (Act::Reserve { rank, .. }, Err(why)) => {
                j.reserved[rank] = Some(false);
                if why.kind == ErrorKind::Internal {
                    self.fails(Inv::EndsOnce, || why.to_string());
                }
                self.undo(job, Some(rank));
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
                let j = &mut self.jobs[job];
                let Some(rank) = j.ds.iter().position(|&at| at == d) else { return };
                let failed = !outcome.is_done();
                j.outcomes[rank] = Some(outcome);
                if failed && self.rng.per_mille(700) {
                    self.undo(job, Some(rank));
                }
            }
            _ => {}
        }
    }

    // ---- decode's serving engine ----------------------------------------------------------

    pub(crate) fn decode_leg(&mut self, d: usize, job: usize, bad: bool, tries: u32) {
        let j = &self.jobs[job];
        let (room, seq, named) = (j.room, j.seq, !j.reserves || tries % 2 == 1);
        let Some(rank) = j.ds.iter().position(|&at| at == d) else { return };
        let span = Span { tokens: j.tokens, prefix_tokens: j.prefix };
        let prefills = if named { j.sources[rank].clone() } else { Vec::new() };
        let pools = self.hosts[d].pools.clone();
        let ranges: Vec<Range<u32>> =
            pools.iter().map(|layout| span.blocks(layout).unwrap()).collect();
        let counts: Vec<usize> = ranges.iter().map(ExactSizeIterator::len).collect();
        let mem = self.d[d].mem;
        let Some(ids) = self.mems[mem].take(&counts, room) else {
            if tries < 20 {
                let at = self.after(10, 60);
                self.push(at, Some(d), Ev::Lend { d, job, bad, tries: tries + 1 });
            }
            return;
        };
        let mut lists = ids.clone();
        if bad {
            let n = self.rng.range(0, lists.len() as u64 - 1) as usize;
            let count = counts[n];
            match self.rng.range(0, 3) {
                0 if count > 0 => {
                    lists[n][count - 1] = self.mems[mem].0[n].blocks.len() as u32 + 3;
                }
                1 if count > 1 => lists[n][0] = lists[n][1],
                2 => lists.push(Vec::new()),
                _ => lists[n].push(0),
            }
        }
        let deadline_ms = self.prof.deadline_ms - self.rng.range(0, 300);
        let lend = Lend {
            room,
            span,
            blocks: lists.iter().map(|ids| BlockList::from_ids(ids)).collect(),
            prefills,
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
                for ((pool, ids), range) in self.mems[mem].0.iter_mut().zip(&ids).zip(&ranges) {
                    for (&id, prompt_block) in ids.iter().zip(range.clone()) {
                        pool.blocks[id as usize] = Block::Lent { room, grant, seq, prompt_block };
                    }
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
                self.mems[mem].give_back(&ids);
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
                        if why.kind == ErrorKind::Incompatible {
                            self.cov.hit(C::WrongSources, 0);
                        }
                    }
                    if let Ok(Reply::Reserved { room, .. }) = &reply {
                        let r = self.d[d].rooms.get(room);
                        if r.is_some_and(|r| self.now > r.since) {
                            for kind in self.kinds(self.sessions_of(d, *room)) {
                                self.cov.hit(C::QueueWait, kind);
                            }
                        }
                        self.phase(d, *room, 1);
                    }
                    let known = self.calls.get(&call.0).copied();
                    let lost = !self.quiet_period() && self.rng.per_mille(self.prof.drop);
                    if let (Some((_, job, _)), false) = (known, lost) {
                        let (at, node) = (self.delay(), self.rnode(self.jobs[job].router));
                        if self.cut_until(d, node).is_none() {
                            let reply = Box::new(reply);
                            self.push(at, Some(node), Ev::Reply { call: call.0, reply });
                        }
                    }
                }
                DOut::Lent { .. } | DOut::LendRefused { .. } => {
                    self.fails(Inv::EndsOnce, || format!("{out:?} without a lend"));
                }
                DOut::Open { grant, sources } => {
                    let room = self.d[d].rooms.iter().find(|(_, r)| r.grant == grant);
                    let Some((&room, _)) = room else {
                        self.fails(Inv::LandsInGrant, || format!("grant {grant} of no room"));
                        continue;
                    };
                    self.open_grant(d, room, grant, sources);
                    self.phase(d, room, 2);
                }
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

    fn sessions_of(&self, d: usize, room: RoomId) -> Vec<usize> {
        let lent = self.d[d].m.lent_lanes().filter(|l| l.2 == room);
        lent.map(|l| l.0.0 as usize).collect()
    }

    /// Before an arrival reaches the machine, for the phases of the coverage.
    fn count_arrival(&mut self, d: usize, link: LinkId, grant: GrantId, part: PartId) {
        let Some(room) = self.room_of_grant(d, grant) else { return };
        // What comes behind the decision does not count.
        let Some(r) = self.d[d].rooms.get_mut(&room).filter(|r| r.phase < 6) else { return };
        if let Some((_, arrived)) = r.sources.get_mut(&(link.0 as usize)) {
            *arrived |= 1 << part.0;
        }
        let (n, parts) = r.progress();
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

    /// Every word of a done room is what it should be, and no other word of its blocks has changed.
    fn check_done(&mut self, d: usize, room: RoomId, blocks: &Ids, span: Span, from: usize) {
        for (n, ids) in blocks.iter().enumerate() {
            let theirs = self.hosts[self.sessions[from].pn].pools[n].page_tokens;
            let pool = &self.mems[self.d[d].mem].0[n];
            let geometry = pool.geometry.clone();
            let layout = &geometry.layout;
            let moved = moved(layout, &span, layout.page_tokens.min(theirs));
            for &id in ids {
                let block = pool.blocks[id as usize];
                let Block::Lent { room: of, seq, prompt_block, .. } = block else {
                    return self.fails(Inv::DoneIsComplete, || format!("{room}: {block:?}"));
                };
                for (word, place) in geometry.words_of(id) {
                    let token = prompt_block * layout.page_tokens + place.token;
                    let want = match moved.contains(&token) {
                        true => geometry.content(seq, prompt_block, place),
                        false => Pool::canary_of(word),
                    };
                    let found = pool.words[word];
                    if found != want || of != room {
                        return self.fails(Inv::DoneIsComplete, || {
                            format!(
                                "decode {d}: word {word} of {block:?}, pool {n}, {place:?} has \
                                 {found:#x}, not {want:#x}"
                            )
                        });
                    }
                }
            }
        }
    }

    fn blocks_return(&mut self, d: usize, grant: GrantId, blocks: &Ids, proof: &Fence) {
        if proof.0 != grant {
            self.fails(Inv::BlocksBalance, || format!("proof of {proof:?} for {grant}"));
        }
        self.mems[self.d[d].mem].give_back(blocks);
    }

    /// What a room that is done shows.
    fn count_done(&mut self, d: usize, sids: &[usize], parts: u32, span: Span) {
        let kinds = self.kinds(sids.iter().copied());
        let ours = self.hosts[d].pools.clone();
        let main = &ours[0];
        let mut seen = vec![C::Done];
        if parts == 0 {
            seen.push(C::ZeroPage);
        } else if span.prefix_tokens > 0 {
            seen.push(C::Prefix);
        }
        if parts > 0 && !span.tokens.is_multiple_of(main.page_tokens) {
            seen.push(C::PartialPage);
        }
        if parts > 0 && sids.len() > 1 {
            seen.push(C::Sources);
        }
        if sids.len() > 1 && kinds.len() > 1 {
            self.cov.hit(C::Mixed, 0);
        }
        let Some(&first) = sids.first().filter(|_| parts > 0) else {
            return self.hit_all(&seen, &kinds);
        };
        let theirs = self.hosts[self.sessions[first].pn].pools.clone();
        let (h, t) = (main.heads(), theirs[0].heads());
        let differs = [
            (C::Heads, (h.first, h.end) != (t.first, t.end)),
            (C::Stages, main.layers != theirs[0].layers),
            (C::Copies, t.copies > 1),
            (C::PageSizes, ours.iter().zip(&*theirs).any(|(a, b)| a.page_tokens != b.page_tokens)),
            (C::Orders, main.order != theirs[0].order && main.kv_heads * t.end > 1),
            (C::Packing, main.kind != theirs[0].kind),
            (C::Window, ours.iter().any(|l| l.window_tokens > 0 && l.window_tokens < span.tokens)),
            (C::Rows, ours.last().is_some_and(is_rows)),
            (C::Pools, ours.len() == 3),
        ];
        seen.extend(differs.iter().filter(|(_, is)| *is).map(|(c, _)| *c));
        self.hit_all(&seen, &kinds);
    }
    fn hit_all(&mut self, seen: &[C], kinds: &[usize]) {
        for &c in seen {
            kinds.iter().for_each(|&kind| self.cov.hit(c, kind));
        }
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
        let slack_ms = 300 + 3 * self.prof.fence_ms;
        let ms_since =
            |at: u64, stood_then: u64| (now - at).saturating_sub(stood - stood_then) / 1_000_000;
        let took_ms = (now - r.since) / 1_000_000;
        let deadline_ms = r.deadline_ms;
        let late = ms_since(r.since, r.stood_ns) > deadline_ms + deadline_ms / 50 + slack_ms
            || r.lost.is_some_and(|(at, stood)| ms_since(at, stood) > slack_ms);
        let (blocks, span) = (std::mem::take(&mut r.blocks), r.span);
        let sids: Vec<usize> = r.sids().collect();
        let (arrived, parts) = r.progress();
        if late || outcome.why().is_some_and(|w| w.text.is_empty()) {
            self.fails(Inv::EndsOnce, || format!("room {room} took {took_ms} ms: {outcome:?}"));
        }
        let kinds = self.kinds(sids.iter().copied());
        match &outcome {
            Outcome::Done { bytes } => {
                let Some(&from) = sids.first() else {
                    return self.fails(Inv::DoneIsComplete, || format!("{room} was never granted"));
                };
                self.check_done(d, room, &blocks, span, from);
                if self.may_land(&sids, grant) {
                    self.fails(Inv::LandsInGrant, || {
                        format!("{room} is done, and a write of {grant} can still land")
                    });
                }
                if self.rail_lost.contains(&(d, grant)) {
                    self.cov.hit(C::RailLost, Kind::OneSided as usize);
                }
                self.count_done(d, &sids, parts, span);
                let pools = &self.hosts[d].pools;
                let theirs = &self.hosts[self.sessions[from].pn].pools;
                let each = pools.iter().zip(&**theirs).map(|(layout, theirs)| {
                    let moved = moved(layout, &span, layout.page_tokens.min(theirs.page_tokens));
                    let rows = u64::from(layout.row_bytes() * layout.kv_heads) * moved.len() as u64;
                    rows * u64::from(layout.pages_per_block())
                });
                let want: u64 = each.sum();
                if *bytes != want {
                    self.fails(Inv::DoneIsComplete, || {
                        format!("{room}: {bytes} bytes, not {want}")
                    });
                }
                for &sid in &sids {
                    self.done_with(room, sid, d);
                }
            }
            Outcome::Failed { why, .. } => {
                self.hit_all(&[C::Failed], &kinds);
                if why.kind == ErrorKind::LeaseExpired {
                    self.hit_all(&[C::LeaseExpiry], &kinds);
                }
                if why.kind == ErrorKind::PeerLost && sids.len() > 1 {
                    self.hit_all(&[C::SourceLost], &kinds);
                }
                // What a prefill says may be of the other use of the number.
                let complete = !sids.is_empty() && arrived == parts && !self.is_used_twice(room);
                if why.kind == ErrorKind::Incomplete && complete && why.text.contains("ended early")
                {
                    self.fails(Inv::TrueReason, || format!("{room} has all its parts: {why}"));
                }
                // What remains: a pool or a pair of lanes with too many takers.
                let crowded = matches!(why.kind, ErrorKind::Busy | ErrorKind::DeadlineExceeded)
                    || why.text.contains("deadline")
                    || took_ms + 500 > deadline_ms;
                // Where one rank fails, its router gives up the others.
                let undone = self.by_room.get(&room).is_some_and(|&j| self.jobs[j].undone);
                if self.prof.calm && !crowded && !undone {
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
                self.hit_all(&[C::Quarantine], &kinds);
                self.mems[self.d[d].mem].withhold(&blocks);
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
        let Some(rank) = j.ps.iter().position(|&at| at == p) else { return };
        let decodes = j.takers[rank].iter();
        let takers = match j.names_decode {
            true => Takers::Named(decodes.map(|&d| self.hosts[d].identity.clone()).collect()),
            false => Takers::Any(decodes.len() as u16),
        };
        let issuer = Some(self.hosts[self.rnode(j.router)].identity.clone());
        let node = self.pnode(p);
        let again = self.p[p].rooms.contains_key(&room);
        let mem = self.p[p].mem;
        let mut blocks = Vec::new();
        if !again {
            // What lies before a window is not kept.
            let pools = self.hosts[node].pools.clone();
            let first = |l: &Layout| match l.window_tokens {
                0 => 0,
                window => tokens.saturating_sub(window) / l.page_tokens,
            };
            let first: Vec<u32> = pools.iter().map(first).collect();
            let counts = pools.iter().zip(&first).map(|(l, first)| l.blocks_for(tokens) - first);
            let counts: Vec<usize> = counts.map(|n| n as usize).collect();
            let Some(ids) = self.mems[mem].take(&counts, room) else {
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
                first,
                granted: BTreeMap::new(),
                wanted: None,
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
        self.prefill(p, PEvent::Attach { room, tokens, takers, issuer, deadline_ms });
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
                self.mems[mem].give_back(&blocks);
            }
            None if again => self.fails(Inv::EndsOnce, || format!("leg of {room} taken twice")),
            None => {
                let at = self.after(0, 10);
                self.push(at, Some(node), Ev::Chunk { p, room });
            }
        }
    }

    /// In what order this room's pages become ready.
    fn plan_chunks(&mut self, p: usize, job: usize, wanted: Option<Span>) -> Vec<Part> {
        let pools = self.hosts[self.pnode(p)].pools.clone();
        let each = pools.iter().enumerate();
        let mut queues: Vec<Vec<Part>> =
            each.map(|(n, layout)| self.plan_pool(job, n, layout, wanted)).collect();
        queues.iter_mut().for_each(|q| q.reverse());
        let mut chunks = Vec::new();
        while !queues.iter().all(Vec::is_empty) {
            let at = self.rng.range(0, queues.len() as u64 - 1) as usize;
            chunks.extend(queues[at].pop());
        }
        chunks
    }

    fn plan_pool(
        &mut self,
        job: usize,
        pool: usize,
        layout: &Layout,
        wanted: Option<Span>,
    ) -> Vec<Part> {
        let tokens = self.jobs[job].prefill_tokens;
        let layers = layout.layers;
        let seen = match layout.window_tokens {
            0 => 0,
            window => tokens.saturating_sub(window),
        };
        let mut start = seen - seen % layout.page_tokens;
        if self.rng.per_mille(500) {
            // What nobody wants may be left out.
            start = wanted.map_or(seen, |w| seen.max(w.prefix_tokens)).min(tokens);
        }
        let mut cuts = vec![start];
        if is_rows(layout) {
            cuts = vec![0, tokens];
        } else if self.rng.per_mille(700) {
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
        chunks.into_iter().map(|(tokens, layers)| Part { pool, tokens, layers }).collect()
    }

    pub(crate) fn next_chunk(&mut self, p: usize, room: RoomId) {
        let node = self.pnode(p);
        let Some(r) = self.p[p].rooms.get(&room) else { return };
        if r.ended.is_some() || r.released || r.withheld || !r.attached {
            return;
        }
        let (job, wanted) = (r.job, r.wanted);
        if !r.planned {
            let mut chunks = self.plan_chunks(p, job, wanted);
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
        let Some(Part { pool, tokens, layers }) = r.chunks.get(r.next).cloned() else { return };
        r.next += 1;
        let geometry = self.hosts[node].geometry[pool].clone();
        let layout = &geometry.layout;
        let (first, end) = match is_rows(layout) {
            true => (0, r.blocks[pool].len() as u32),
            false => (tokens.start / layout.page_tokens, layout.blocks_for(tokens.end)),
        };
        let held = (first - r.first[pool]) as usize..(end - r.first[pool]) as usize;
        let ids = r.blocks[pool][held].to_vec();
        let (seq, prompt) = (self.jobs[job].seq, self.jobs[job].prefill_tokens);
        let words = &mut self.mems[self.p[p].mem].0[pool].words;
        for (&id, block) in ids.iter().zip(first..) {
            for (word, place) in geometry.words_of(id) {
                if layers.contains(&place.layer) {
                    let last = tokens.end == prompt || is_rows(layout);
                    let is_final = last || block * layout.page_tokens + place.token < tokens.end;
                    let content = geometry.content(seq, block, place);
                    words[word] = if is_final { content } else { draft(content, tokens.end) };
                }
            }
        }
        let blocks = BlockList::from_ids(&ids);
        self.p[p].refused = None;
        self.prefill(p, PEvent::Chunk(Chunk { room, pool: pool as u32, tokens, layers, blocks }));
        if self.p[p].refused.take().is_none() {
            let at = self.after(0, 25);
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
                POut::Grant { link, grant, lanes, plan } => {
                    self.grant_at_sender(p, link.0 as usize, grant, &lanes, plan);
                }
                POut::Granted { room, link, grant, parts, wanted } => {
                    let sid = link.0 as usize;
                    self.granted(p, sid, room, grant, parts);
                    let kind = self.sessions[sid].kind();
                    if let Some(r) = self.p[p].rooms.get_mut(&room) {
                        let c = if r.since < self.now { C::EarlyPrefill } else { C::LatePrefill };
                        r.granted.insert(sid, grant);
                        r.wanted = wanted;
                        self.cov.hit(c, kind);
                    }
                }
                POut::Post { link, grant, part, lane, pages } => {
                    self.post(p, link.0 as usize, grant, part, lane, &pages);
                }
                POut::ResetLane { link, lane } => {
                    let c = self.sessions[link.0 as usize].lanes.get(usize::from(lane.0));
                    if let Some(&c) = c.filter(|&&c| c != usize::MAX) {
                        self.end_of_conn(c, 1);
                    }
                }
                POut::Quiesce { link, grant } => self.quiesce(p, link.0 as usize, grant),
                POut::Released { room, proofs } => self.source_returns(p, room, &proofs),
                POut::Withheld { room, .. } => {
                    self.cov.hit(C::SourceWithheld, 0);
                    let mem = self.p[p].mem;
                    if let Some(r) = self.p[p].rooms.get_mut(&room) {
                        r.withheld = true;
                        self.mems[mem].withhold(&r.blocks);
                    }
                }
                POut::Ended { room, outcome } => self.prefill_ended(p, room, outcome),
            }
        }
    }

    /// Both sides have cut the room into the same parts, and an engine that writes itself knows
    /// where they go.
    fn granted(&mut self, p: usize, sid: usize, room: RoomId, grant: GrantId, parts: u32) {
        let s = &self.sessions[sid];
        let planned = self.p[p].plans.get(&(sid, grant)).map(|g| g.plan.grid().parts());
        let found = if s.kind == Kind::OneSided { planned } else { Some(parts) };
        let opened = self.d[s.d].rooms.get(&room).and_then(|r| r.sources.get(&sid));
        let expected = opened.map_or(parts, |s| s.0);
        if (found, expected) != (Some(parts), parts) {
            self.fails(Inv::DoneIsComplete, || {
                format!("{room}: {parts} parts at the sender, {found:?} planned, {expected}")
            });
        }
    }

    fn source_returns(&mut self, p: usize, room: RoomId, proofs: &[Quiet]) {
        let mem = self.p[p].mem;
        // An offer whose leg never came has no source.
        let Some(r) = self.p[p].rooms.get_mut(&room) else { return };
        if std::mem::replace(&mut r.released, true) {
            return self.fails(Inv::BlocksBalance, || format!("source of {room} released twice"));
        }
        r.withheld = false;
        let blocks = std::mem::take(&mut r.blocks);
        let granted: Vec<(usize, GrantId)> = r.granted.iter().map(|(&s, &g)| (s, g)).collect();
        for (sid, grant) in granted {
            let all = (sid, grant, PartId(0))..=(sid, grant, PartId(u32::MAX));
            let posted = self.p[p].posted.range(all).next().is_some();
            let proved = proofs.iter().any(|q| (q.0, q.1) == (sid, grant));
            if posted && !proved || self.reads_source(sid, grant) {
                self.fails(Inv::SourceKept, || {
                    format!("prefill {p}: {room} is released, and {grant} may still read it")
                });
            }
        }
        self.mems[mem].give_back(&blocks);
    }

    /// A decode rank has all that one of its sources had for it.
    fn done_with(&mut self, room: RoomId, sid: usize, d: usize) {
        let s = &self.sessions[sid];
        let (p, inc) = (s.p, s.inc[1]);
        self.done_at.insert((room, p, inc, d));
        let done = |d: &usize| self.done_at.contains(&(room, p, inc, *d));
        if self.failed_at.get(&(room, p, inc)).is_some_and(|takers| takers.iter().all(done)) {
            self.fails(Inv::OneOutcome, || {
                format!("room {room} is done, and the prefill said that it failed")
            });
        }
    }

    fn prefill_ended(&mut self, p: usize, room: RoomId, outcome: Outcome) {
        let node = self.pnode(p);
        let (now, stood, inc) = (self.now, self.hosts[node].stood_ns, self.hosts[node].inc);
        let deadline_ms = self.prof.deadline_ms;
        let slack_ms = 300 + 3 * self.prof.fence_ms;
        let Some(r) = self.p[p].rooms.get_mut(&room).filter(|r| r.attached) else { return };
        let sids: Vec<usize> = r.granted.keys().copied().collect();
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
        let takers = job.takers[job.ps.iter().position(|&at| at == p).unwrap()].clone();
        let named = job.names_decode;
        let done: Vec<usize> = self
            .done_at
            .range((room, p, inc, 0)..=(room, p, inc, usize::MAX))
            .map(|k| k.3)
            .collect();
        let all = takers.iter().all(|d| done.contains(d));
        // A leg that takes whoever comes may hear of the other use of its number.
        let other = !named && self.is_used_twice(room);
        let kinds = self.kinds(sids);
        match outcome {
            Outcome::Done { .. } => {
                if if named { !all } else { done.len() < takers.len() } {
                    self.fails(Inv::OneOutcome, || format!("prefill says that {room} is done"));
                }
                if takers.len() > 1 {
                    self.hit_all(&[C::Takers], &kinds);
                }
                return;
            }
            Outcome::Failed { .. } if other => {}
            Outcome::Failed { .. } => {
                if all {
                    self.fails(Inv::OneOutcome, || format!("prefill says that {room} failed"));
                }
                self.failed_at.insert((room, p, inc), takers);
            }
            Outcome::Unknown { .. } => self.hit_all(&[C::Unknown], &kinds),
        }
        if !done.is_empty() && !all {
            self.cov.hit(C::TakerFailed, 0);
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

    fn is_used_twice(&self, room: RoomId) -> bool {
        self.jobs.iter().filter(|j| j.room == room).count() > 1
    }
    fn named(&self, prefill: usize) -> String {
        format!("prefill={}", self.hosts[prefill].identity)
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
            // Of several sources only one may have lost its lease: the one that is named.
            let s = &self.sessions[sid];
            let alone = self.d[s.d].rooms.get(room).is_some_and(|r| r.sources.len() == 1);
            let means = |why: &Refusal| alone || why.text.contains(&self.named(s.pn));
            if outcome.why().is_some_and(|w| w.kind == ErrorKind::LeaseExpired && means(w)) {
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
            .filter(|r| r.granted.get(&sid) == Some(&grant))
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
        if let DEvent::Arrived { link, grant, part } = &ev {
            self.count_arrival(d, *link, *grant, *part);
        }
        self.decode(d, ev);
    }
}

/// The tokens that a room moves in one pool, or the rows, by cells of so many.
fn moved(layout: &Layout, span: &Span, cell: u32) -> Range<u32> {
    if is_rows(layout) {
        return 0..layout.blocks_for(0);
    }
    let seen = match layout.window_tokens {
        0 => 0,
        window => span.tokens.saturating_sub(window),
    };
    match seen.max(span.prefix_tokens) {
        from if from >= span.tokens => 0..0,
        from => from / cell * cell..span.tokens.div_ceil(cell) * cell,
    }
}
