//! Simulated engines of all three kinds.
//!
//! - Socket: frames in order on a lane, put in place word by word by the receiver, each step
//!   admitted by [`Grants::admit`]; what is not admitted is scrapped and refused.
//! - One-sided: posted writes land word by word at random later times, may land twice, and go on
//!   landing after the sender was told that the lane is lost, and after the sender died, until the
//!   receiver destroys its end. Nobody at the receiver looks at them.
//! - Memory: a post is a description. The receiver copies later, out of the sender's memory as it
//!   is then, admitted like a frame; then it reads the sender's serve word again, which the sender
//!   raises before it gives its blocks back. What was copied under another word is refused. A part
//!   that has landed is not written again.
//!
//! A source word is read when it lands, so a page that is reused too early is seen. Where the
//! sender of a socket or queue pair has destroyed its end, what is still under way carries the
//! bytes of that moment. A fence takes time, can be late or fail; what may land goes on landing
//! until it completes.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use kvlane_proto::grants::FenceHow;
use kvlane_proto::msg::peer::DataPath;
use kvlane_proto::mutant::Mutant;
use kvlane_proto::{ErrorKind, GrantId, LaneId, LinkId, PartId, PartPages, Plan, Refusal, RoomId};

use crate::coverage::C;
use crate::invariants::Inv;
use crate::pools::{Block, Memory, WORD_BYTES, addresses, is_canary, is_draft_of, writes};
use crate::world::{DEvent, Ev, Fence, PEvent, Quiet, World};

/// How the bytes of a session travel; also the columns of the coverage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Socket,
    OneSided,
    Memory,
}

impl Kind {
    /// As the machines see it.
    pub(crate) const fn path(self) -> DataPath {
        match self {
            Self::Socket | Self::Memory => DataPath::ReceiverCopies,
            Self::OneSided => DataPath::OneSided,
        }
    }
    /// The engine that is like it.
    pub(crate) const fn engine(self) -> &'static str {
        match self {
            Self::Socket => "tcp",
            Self::OneSided => "verbs",
            Self::Memory => "shm",
        }
    }
}

/// One connection or queue pair. A new one is made after each loss; numbers are never reused.
pub(crate) struct Conn {
    pub(crate) sid: usize,
    pub(crate) lane: u16,
    /// Receiver's end, sender's end.
    pub(crate) alive: [bool; 2],
    pub(crate) queue: VecDeque<Xfer>,
    /// The sender's machine knows of this connection. An engine refuses posts that were meant for
    /// the one before.
    pub(crate) known: bool,
    stepping: bool,
}

/// A part under way.
pub(crate) struct Xfer {
    pub(crate) grant: GrantId,
    part: PartId,
    /// The sender's words.
    source: Vec<u64>,
    /// Where they go, once that is known.
    to: Vec<u64>,
    /// The bytes, where the source is not read any more.
    taken: Option<Vec<u64>>,
    step: usize,
    fate: Fate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Land,
    /// Not admitted.
    Scrap,
    /// It has landed over another lane.
    Repeat,
}

/// A grant at the engine of a sender that writes itself.
pub(crate) struct SendGrant {
    /// Where each part goes.
    pub(crate) plan: Arc<Plan>,
    /// The connections that its lanes had when it came.
    lanes: BTreeMap<LaneId, usize>,
}

/// A grant at the receiver's engine.
pub(crate) struct OpenGrant {
    pub(crate) sources: BTreeMap<usize, OpenSource>,
    pub(crate) fencing: bool,
}

/// What one session may fill of a grant.
pub(crate) struct OpenSource {
    pub(crate) lanes: Vec<LaneId>,
    /// The connections that they had: what a revoke destroys.
    conns: Vec<usize>,
    landed: u128,
}

impl World {
    // ---- landing --------------------------------------------------------------------------

    /// Puts one word in place. `strict`: nothing may discard it any more.
    fn land(&mut self, d: usize, grant: GrantId, to: u64, value: u64, strict: bool) {
        let (n, word) = Memory::at(to);
        let mem = self.d[d].mem;
        let pool = &self.mems[mem].0[n];
        let place = pool.geometry.place(word);
        let block = pool.blocks[place.block as usize];
        let open = self.d[d].open.contains_key(&grant);
        match block {
            Block::Lent { grant: g, seq, prompt_block, .. } if g == grant && open => {
                let want = pool.geometry.content(seq, prompt_block, place);
                if strict && value != want {
                    let inv = match value {
                        v if is_canary(v) => Inv::SourceKept,
                        v if is_draft_of(v, want) => Inv::SentWhenFinal,
                        _ => Inv::LandsInGrant,
                    };
                    self.fails(inv, || {
                        format!("{to:#x} of {block:?} gets {value:#x}, not {want:#x}")
                    });
                }
            }
            Block::Withheld if open => {}
            _ => self.fails(Inv::LandsInGrant, || {
                format!("decode {d}: a write of grant {grant} lands at {to:#x}, {block:?}")
            }),
        }
        self.mems[mem].0[n].words[word] = value;
    }

    /// The engine says that these words are in place.
    fn check_landed(&mut self, d: usize, to: &[u64]) {
        for &at in to {
            let (n, word) = Memory::at(at);
            let pool = &self.mems[self.d[d].mem].0[n];
            let place = pool.geometry.place(word);
            let (found, block) = (pool.words[word], pool.blocks[place.block as usize]);
            let want = match block {
                Block::Lent { seq, prompt_block, .. } => {
                    pool.geometry.content(seq, prompt_block, place)
                }
                // A copy may still run where the fence has failed; nobody uses what it brings.
                Block::Withheld => continue,
                _ => 0,
            };
            if found != want {
                return self.fails(Inv::SourceKept, || {
                    format!("decode {d}: {at:#x} of {block:?} has {found:#x}, not {want:#x}")
                });
            }
        }
    }

    // ---- sender ---------------------------------------------------------------------------

    pub(crate) fn post(
        &mut self,
        p: usize,
        sid: usize,
        grant: GrantId,
        part: PartId,
        lane: LaneId,
        pages: &PartPages,
    ) {
        self.check_post(p, sid, grant, part, lane);
        self.put_on_wire(p, sid, grant, part, lane, pages);
    }

    pub(crate) fn put_on_wire(
        &mut self,
        p: usize,
        sid: usize,
        grant: GrantId,
        part: PartId,
        lane: LaneId,
        pages: &PartPages,
    ) {
        let s = &self.sessions[sid];
        let kind = s.kind;
        let Some(&c) = s.lanes.get(usize::from(lane.0)).filter(|&&c| c != usize::MAX) else {
            return;
        };
        if !self.conns[c].alive[1] || !self.conns[c].known {
            // The notice of its loss is on the way, and gives the part back.
            return;
        }
        let (source, to) = if kind == Kind::OneSided {
            let known = self.p[p].plans.get(&(sid, grant));
            if known.and_then(|g| g.lanes.get(&lane)) != Some(&c) {
                return self.fails(Inv::LandsInGrant, || {
                    format!("{part:?} of {grant} is posted on a connection that it was not lent")
                });
            }
            match known.map(|known| known.plan.pages(part)) {
                Some(Ok(destination)) => writes(pages, &destination),
                _ => Default::default(),
            }
        } else {
            (addresses(pages), Vec::new())
        };
        if source.len() as u64 * u64::from(WORD_BYTES) != pages.bytes() {
            return self.fails(Inv::DoneIsComplete, || {
                format!("part {part:?} of {grant} has {} words: {pages:?}", source.len())
            });
        }
        let xfer = Xfer { grant, part, source, to, taken: None, step: 0, fate: Fate::Land };
        self.conns[c].queue.push_back(xfer);
        self.wake(c);
        let loss = self.prof.lane_loss;
        if !self.quiet_period() && self.rng.per_mille(loss) {
            let at = self.after(0, 6);
            self.push(at, None, Ev::End { conn: c, side: 1 });
        }
    }

    /// A sender's engine that writes itself learns of a grant: it is for the connections of now.
    pub(crate) fn grant_at_sender(
        &mut self,
        p: usize,
        sid: usize,
        grant: GrantId,
        lanes: &[LaneId],
        plan: Arc<Plan>,
    ) {
        let s = &self.sessions[sid];
        let bound = lanes.iter().map(|&lane| (lane, s.lanes[usize::from(lane.0)])).collect();
        let kind = s.kind;
        let known = self.p[p].plans.insert((sid, grant), SendGrant { plan, lanes: bound });
        if known.is_some() || kind != Kind::OneSided {
            self.fails(Inv::LandsInGrant, || {
                format!("prefill {p}: {grant} on {sid} is told twice")
            });
        }
    }

    fn wake(&mut self, c: usize) {
        if !self.conns[c].stepping && !self.conns[c].queue.is_empty() {
            self.conns[c].stepping = true;
            // Who copies for himself may come to it late, and what a dead sender's end has left
            // behind may take long.
            let often = match self.sessions[self.conns[c].sid].kind {
                Kind::Memory => 60,
                Kind::OneSided if !self.conns[c].alive[1] => 300,
                _ => 0,
            };
            let late = !self.prof.calm && self.rng.per_mille(often);
            let most = if late { 60_000_000 } else { 600_000 };
            let at = self.now + self.rng.range(5_000, most);
            self.push(at, None, Ev::Step { conn: c });
        }
    }

    /// The sender's engine is asked to stop a grant.
    pub(crate) fn quiesce(&mut self, p: usize, sid: usize, grant: GrantId) {
        self.p[p].quiet.insert((sid, grant));
        let kind = self.sessions[sid].kind;
        if kind == Kind::Memory {
            // Raised before the source is reused: whoever copies meanwhile throws it away.
            self.bumped.insert((sid, grant));
        }
        if kind != Kind::OneSided {
            // What has not left is taken back; what is in the socket's buffer, or described, is not.
            for c in 0..self.conns.len() {
                if self.conns[c].sid != sid || !self.conns[c].alive[1] {
                    continue;
                }
                let left = self.rng.per_mille(500);
                let mut queue = std::mem::take(&mut self.conns[c].queue);
                queue.retain_mut(|x| {
                    let keep = x.grant != grant || x.step > 0 || x.fate != Fate::Land || left;
                    if x.grant == grant && keep && kind == Kind::Socket {
                        self.take_bytes(sid, x);
                    }
                    keep
                });
                self.conns[c].queue = queue;
            }
        }
        self.p[p].quieting.push((sid, grant, self.now));
        let at = self.after(0, 2);
        let guard = self.sessions[sid].guard(1);
        self.push_for(at, guard, Ev::QuietCheck { p });
    }

    /// From here on the part does not read its source.
    fn take_bytes(&self, sid: usize, x: &mut Xfer) {
        if x.taken.is_none() {
            let memory = &self.mems[self.sessions[sid].mems[1]];
            x.taken = Some(x.source.iter().map(|&at| memory.read(at)).collect());
        }
    }

    /// Whether anything that was posted for a grant may still read the source, and would count.
    pub(crate) fn reads_source(&self, sid: usize, grant: GrantId) -> bool {
        let memory = self.sessions[sid].kind == Kind::Memory;
        let reads = |c: &Conn| if memory { c.alive[0] } else { c.alive[1] };
        let stale = memory && self.bumped.contains(&(sid, grant));
        !stale
            && self.conns.iter().any(|c| {
                c.sid == sid
                    && reads(c)
                    && c.queue.iter().any(|x| {
                        x.grant == grant && x.taken.is_none() && (!memory || x.fate == Fate::Land)
                    })
            })
    }

    pub(crate) fn quiet_check(&mut self, p: usize) {
        let mut i = 0;
        while i < self.p[p].quieting.len() {
            let (sid, grant, since) = self.p[p].quieting[i];
            let posted = self.reads_source(sid, grant);
            // An engine that cannot become quiet gives its lanes up, some time.
            let stuck = posted && self.now > since + 1_000_000 * 2 * self.prof.fence_ms;
            if stuck {
                for c in 0..self.conns.len() {
                    if self.conns[c].sid == sid {
                        self.end_of_conn(c, 1);
                    }
                }
            }
            if posted {
                i += 1;
                continue;
            }
            self.p[p].quieting.swap_remove(i);
            let ev = PEvent::Quiesced { link: LinkId(sid as u64), grant, proof: Quiet(sid, grant) };
            let guard = self.sessions[sid].guard(1);
            self.push_for(self.now, guard, Ev::Prefill { p, ev: Box::new(ev) });
        }
        if !self.p[p].quieting.is_empty() {
            let (at, node) = (self.after(1, 20), self.pnode(p));
            self.push(at, Some(node), Ev::QuietCheck { p });
        }
    }

    pub(crate) fn ack_arrives(&mut self, c: usize, grant: GrantId, part: PartId, ok: bool) {
        let (sid, lane) = (self.conns[c].sid, LaneId(self.conns[c].lane));
        let (d, p, kind) = (self.sessions[sid].d, self.sessions[sid].p, self.sessions[sid].kind());
        if !self.conns[c].alive[1] {
            let all = self.d[d].rooms.values().any(|r| r.grant == grant && r.all_arrived());
            if ok && all {
                self.cov.hit(C::LostAck, kind);
            }
            return;
        }
        let link = LinkId(sid as u64);
        let ev = if ok {
            PEvent::Acked { link, grant, part, lane }
        } else {
            let why = Refusal::new(ErrorKind::NotFound, "no such grant");
            PEvent::Nacked { link, grant, part, lane, why }
        };
        self.prefill(p, ev);
    }

    // ---- lanes ----------------------------------------------------------------------------

    pub(crate) fn lanes_up(&self, sid: usize, side: usize) -> usize {
        self.sessions[sid]
            .lanes
            .iter()
            .filter(|&&c| c != usize::MAX && self.conns[c].alive[side])
            .count()
    }

    pub(crate) fn redial(&mut self, sid: usize, lane: u16) {
        let s = &self.sessions[sid];
        if s.engine_open != [true, true] {
            return;
        }
        let rail = usize::from(lane) % s.rails_dead.len();
        if s.rails_dead[rail] > self.now {
            let at = s.rails_dead[rail] + self.rng.range(1, 40_000_000);
            return self.push(at, None, Ev::Redial { sid, lane });
        }
        let stands = (0..2).any(|side| self.hosts[s.node(side)].stopped_until > self.now);
        let cut = self.cut_until(s.d, s.pn).or(self.cut_until(s.pn, s.d)).is_some();
        if stands || cut {
            let at = self.after(5, 40);
            return self.push(at, None, Ev::Redial { sid, lane });
        }
        let old = s.lanes[usize::from(lane)];
        if old != usize::MAX {
            if self.conns[old].alive == [true, true] {
                return;
            }
            // A new queue pair takes the place of the old one only when that is destroyed.
            self.end_of_conn(old, 1);
            self.end_of_conn(old, 0);
        }
        let c = self.conns.len();
        self.conns.push(Conn {
            sid,
            lane,
            alive: [true, true],
            queue: VecDeque::new(),
            known: false,
            stepping: false,
        });
        self.sessions[sid].lanes[usize::from(lane)] = c;
        for side in 0..2 {
            let guard = self.sessions[sid].guard(side);
            self.push_for(self.now, guard, Ev::Lane { sid, side, lane, up: true });
        }
    }

    /// One end of a connection is gone.
    pub(crate) fn end_of_conn(&mut self, c: usize, side: usize) {
        if !self.conns[c].alive[side] {
            return;
        }
        self.conns[c].alive[side] = false;
        let (sid, lane) = (self.conns[c].sid, self.conns[c].lane);
        let guard = self.sessions[sid].guard(side);
        self.push_for(self.now, guard, Ev::Lane { sid, side, lane, up: false });
        let kind = self.sessions[sid].kind;
        if side == 1 {
            // What has left the sender lands or not; unless it was only described, it does not read
            // the source any more.
            let mut queue = std::mem::take(&mut self.conns[c].queue);
            let left = kind == Kind::OneSided || self.rng.per_mille(600);
            queue.retain_mut(|x| {
                if kind != Kind::Memory {
                    self.take_bytes(sid, x);
                }
                left
            });
            self.conns[c].queue = queue;
            if kind != Kind::OneSided {
                let at = self.after(0, 30);
                self.push(at, None, Ev::End { conn: c, side: 0 });
            }
        } else {
            self.conns[c].queue.clear();
            let at = self.after(0, 30);
            self.push(at, None, Ev::End { conn: c, side: 1 });
        }
        let at = self.after(1, 120);
        self.push(at, None, Ev::Redial { sid, lane });
    }

    pub(crate) fn lose_lane(&mut self, c: usize) {
        let side = usize::from(self.rng.per_mille(700));
        self.end_of_conn(c, side);
    }

    /// The NIC of one side's end of a rail is gone, and with it every lane of the session on it.
    pub(crate) fn lose_rail(&mut self, sid: usize, lane: LaneId, until: u64) {
        let rails = self.sessions[sid].rails_dead.len();
        let on = |lane: LaneId| usize::from(lane.0) % rails;
        self.sessions[sid].rails_dead[on(lane)] = until;
        let (d, dead) = (self.sessions[sid].d, on(lane));
        let open = self.d[d].open.iter().filter(|(_, open)| {
            let lanes = open.sources.get(&sid).map_or(&[][..], |s| &s.lanes);
            lanes.iter().any(|&l| on(l) == dead) && lanes.iter().any(|&l| on(l) != dead)
        });
        let hit: Vec<_> = open.map(|(&grant, _)| (d, grant)).collect();
        self.rail_lost.extend(hit);
        let side = usize::from(self.rng.per_mille(700));
        for c in 0..self.conns.len() {
            if self.conns[c].sid == sid && on(LaneId(self.conns[c].lane)) == dead {
                self.end_of_conn(c, side);
            }
        }
    }

    /// A process died: its ends are gone, without a word.
    pub(crate) fn conns_lose_side(&mut self, sid: usize, side: usize) {
        for c in 0..self.conns.len() {
            if self.conns[c].sid != sid || !self.conns[c].alive[side] {
                continue;
            }
            self.conns[c].alive[side] = false;
            if side == 0 {
                self.conns[c].queue.clear();
                let at = self.after(0, 300);
                self.push(at, None, Ev::End { conn: c, side: 1 });
            }
            // A dead sender's memory stays as it was, and so does what its NIC has sent.
        }
    }

    pub(crate) fn engine_closes(&mut self, sid: usize, side: usize) {
        self.sessions[sid].engine_open[side] = false;
        for c in 0..self.conns.len() {
            if self.conns[c].sid != sid || !self.conns[c].alive[side] {
                continue;
            }
            // A receiver's queue pairs are destroyed by the fences of their grants, or later.
            if side == 1 || self.sessions[sid].kind != Kind::OneSided {
                self.end_of_conn(c, side);
            } else {
                let at = self.after(0, 400);
                self.push(at, None, Ev::End { conn: c, side });
            }
        }
    }

    // ---- bytes ----------------------------------------------------------------------------

    pub(crate) fn step(&mut self, c: usize) {
        self.conns[c].stepping = false;
        let (sid, lane) = (self.conns[c].sid, LaneId(self.conns[c].lane));
        let s = &self.sessions[sid];
        let (d, pn, kind, from) = (s.d, s.pn, s.kind, s.mems[1]);
        if !self.conns[c].alive[0] || self.conns[c].queue.is_empty() {
            self.conns[c].queue.clear();
            return;
        }
        // A NIC goes on where a process stands still, and memory is there.
        let stops = |node: usize| self.hosts[node].stopped_until > self.now;
        let cut = self.cut_until(pn, d).is_some();
        let waits = match kind {
            Kind::Socket => stops(d) || stops(pn) || cut,
            Kind::OneSided => cut,
            Kind::Memory => stops(d),
        };
        if waits {
            self.conns[c].stepping = true;
            let at = self.after(1, 30);
            return self.push(at, None, Ev::Step { conn: c });
        }
        let at = match kind {
            Kind::OneSided => self.rng.range(0, self.conns[c].queue.len() as u64 - 1) as usize,
            _ => 0,
        };
        let mut x = self.conns[c].queue.remove(at).unwrap();
        let total = x.source.len();
        let burst = self.rng.range(1, 8) as usize * if total > 48 { 8 } else { 2 };
        let end = (x.step + burst).min(total);
        if kind != Kind::OneSided && x.fate == Fate::Land {
            self.admit(d, sid, lane, &mut x);
        }
        if x.fate == Fate::Land {
            let fencing = self.d[d].open.get(&x.grant).is_some_and(|o| o.fencing);
            if kind == Kind::OneSided && (fencing || !self.conns[c].alive[1]) {
                self.cov.hit(C::LateWrite, kind as usize);
            }
            for step in x.step..end.min(x.to.len()) {
                let value = match &x.taken {
                    Some(words) => words[step],
                    None => self.mems[from].read(x.source[step]),
                };
                self.land(d, x.grant, x.to[step], value, kind != Kind::Memory);
            }
        }
        x.step = end;
        if end < total {
            let queue = &mut self.conns[c].queue;
            queue.insert(at.min(queue.len()), x);
        } else if kind == Kind::OneSided && self.rng.per_mille(60) {
            // The NIC repeats it.
            self.cov.hit(C::LandedTwice, kind as usize);
            x.step = 0;
            self.conns[c].queue.push_back(x);
        } else {
            self.landed(c, d, x);
        }
        self.wake(c);
    }

    /// What the receiver's code asks before each copy.
    fn admit(&mut self, d: usize, sid: usize, lane: LaneId, x: &mut Xfer) {
        let node = &self.d[d];
        let kind = self.sessions[sid].kind;
        match node.grants.admit(LinkId(sid as u64), lane, x.grant, x.part) {
            Ok((grant, plan)) => {
                if x.to.is_empty() || grant != x.grant {
                    x.to = plan.pages(x.part).map(|pages| addresses(&pages)).unwrap_or_default();
                    x.grant = grant;
                }
                let source = node.open.get(&grant).and_then(|o| o.sources.get(&sid));
                let landed = source.is_some_and(|s| s.landed >> x.part.0 & 1 == 1);
                if kind == Kind::Memory && landed {
                    x.fate = Fate::Repeat;
                } else if x.to.len() != x.source.len() && !node.grants.trust_the_lane {
                    let (from, to, part) = (x.source.len(), x.to.len(), x.part);
                    self.fails(Inv::DoneIsComplete, || {
                        format!("{part:?} of {grant}: {from} words are sent, {to} expected")
                    });
                }
            }
            Err(_) => {
                self.cov.hit(C::Scrapped, kind as usize);
                if x.step > 0 {
                    self.cov.hit(C::StoppedMidCopy, kind as usize);
                }
                x.fate = Fate::Scrap;
            }
        }
    }

    /// The last word of a part is through.
    fn landed(&mut self, c: usize, d: usize, mut x: Xfer) {
        let sid = self.conns[c].sid;
        if self.sessions[sid].kind == Kind::Memory && x.fate == Fate::Land {
            // The copy is there; was the source what it said all the time?
            let trusts = self.prof.mutant == Mutant::ServeWordNotRead;
            if self.bumped.contains(&(sid, x.grant)) && !trusts {
                self.cov.hit(C::StaleCopy, Kind::Memory as usize);
                x.fate = Fate::Scrap;
            } else {
                self.check_landed(d, &x.to);
                let open = self.d[d].open.get_mut(&x.grant);
                if let Some(s) = open.and_then(|o| o.sources.get_mut(&sid)) {
                    s.landed |= 1 << x.part.0;
                }
            }
        }
        if x.fate == Fate::Land {
            let guard = self.sessions[sid].guard(0);
            let at = self.now + self.rng.range(0, 100_000);
            let (link, grant, part) = (LinkId(sid as u64), x.grant, x.part);
            let ev = Box::new(DEvent::Arrived { link, grant, part });
            self.push_for(at, guard, Ev::Decode { d, ev });
        }
        let at = self.now + self.rng.range(10_000, 3_000_000);
        let guard = self.sessions[sid].guard(1);
        let ok = x.fate != Fate::Scrap;
        self.push_for(at, guard, Ev::Ack { conn: c, grant: x.grant, part: x.part, ok });
    }

    // ---- fences ---------------------------------------------------------------------------

    pub(crate) fn fence(&mut self, d: usize, grant: GrantId, how: FenceHow) {
        // A grant that was never opened is fenced at once.
        let mut sids = Vec::new();
        if let Some(open) = self.d[d].open.get_mut(&grant) {
            open.fencing = true;
            sids.extend(open.sources.keys().copied());
        }
        let opened = !sids.is_empty();
        let c = if how == FenceHow::Revoke { C::Revoke } else { C::QuiesceClose };
        let kinds = if opened { self.kinds(sids) } else { Vec::new() };
        kinds.iter().for_each(|&kind| self.cov.hit(c, kind));
        let one_sided = kinds.contains(&(Kind::OneSided as usize));
        self.d[d].fences += 1;
        let trouble = self.prof.fence_trouble;
        let ms = self.prof.fence_ms;
        let at = if opened && self.rng.per_mille(trouble) {
            if self.rng.per_mille(300) {
                let at = self.after(0, ms / 2);
                self.push(at, Some(d), Ev::FenceFails { d, grant });
                if self.rng.per_mille(300) {
                    // For good.
                    self.d[d].fences -= 1;
                    return;
                }
            }
            self.after(ms, 3 * ms)
        } else if how == FenceHow::Revoke && one_sided {
            self.after(0, 20)
        } else {
            self.now + self.rng.range(1_000, 2_000_000)
        };
        self.push(at, Some(d), Ev::FenceDone { d, grant, how });
    }

    pub(crate) fn fence_fails(&mut self, d: usize, grant: GrantId) {
        let why = Refusal::new(ErrorKind::Io, "the queue pair does not flush");
        self.decode(d, DEvent::FenceFailed { grant, why });
    }

    pub(crate) fn fence_done(&mut self, d: usize, grant: GrantId, how: FenceHow) {
        self.d[d].fences -= 1;
        if let Some(mut open) = self.d[d].open.remove(&grant) {
            let mut plans: Vec<_> = self.d[d].grants.close(grant).collect();
            if self.prof.mutant == Mutant::FenceFirstLink {
                // The other links are left as they are.
                let rest = open.sources.split_off(&(open.sources.keys().min().unwrap() + 1));
                plans.retain(|(link, _)| rest.contains_key(&(link.0 as usize)));
                let links = plans.into_iter().map(|(link, plan)| {
                    let lanes = rest[&(link.0 as usize)].lanes.clone();
                    (link, lanes, plan.grid().parts(), plan)
                });
                if !rest.is_empty() {
                    let _ = self.d[d].grants.open(grant, links.collect::<Vec<_>>());
                    let left = OpenGrant { sources: rest, fencing: true };
                    self.d[d].open.insert(grant, left);
                }
            }
            let pairs = open.sources.iter().filter(|(sid, _)| {
                how == FenceHow::Revoke && self.sessions[**sid].kind == Kind::OneSided
            });
            let pairs: Vec<usize> = pairs.flat_map(|(_, s)| s.conns.iter().copied()).collect();
            let done = self.d[d].rooms.values().any(|r| r.grant == grant && r.all_arrived());
            for c in pairs.into_iter().filter(|&c| c != usize::MAX) {
                let conn = &self.conns[c];
                if done && conn.alive[0] && conn.queue.iter().any(|x| x.grant == grant) {
                    self.cov.hit(C::Abandoned, Kind::OneSided as usize);
                }
                self.end_of_conn(c, 0);
            }
        }
        // Behind the notices of the lanes that it destroyed.
        let ev = Box::new(DEvent::Fenced { grant, proof: Fence(grant) });
        self.push(self.now, Some(d), Ev::Decode { d, ev });
    }

    /// Whether something that was posted under a grant can still land, with nobody to stop it.
    pub(crate) fn may_land(&self, sids: &[usize], grant: GrantId) -> bool {
        let one_sided = |c: &Conn| self.sessions[c.sid].kind == Kind::OneSided;
        let mut ends = self.conns.iter().filter(|c| sids.contains(&c.sid) && c.alive[0]);
        ends.any(|c| one_sided(c) && c.queue.iter().any(|x| x.grant == grant))
    }

    /// Opens a grant at the receiver's engine.
    pub(crate) fn open_grant(
        &mut self,
        d: usize,
        room: RoomId,
        grant: GrantId,
        sources: Vec<(LinkId, Vec<LaneId>, Arc<Plan>)>,
    ) {
        let parts: Vec<_> =
            sources.iter().map(|(l, _, plan)| (l.0 as usize, plan.grid().parts())).collect();
        let open = sources.iter().map(|(link, lanes, _)| {
            let sid = link.0 as usize;
            let conns = lanes.iter().map(|l| self.sessions[sid].lanes[usize::from(l.0)]).collect();
            (sid, OpenSource { lanes: lanes.clone(), conns, landed: 0 })
        });
        let open = OpenGrant { sources: open.collect(), fencing: false };
        let links = sources.into_iter().map(|(link, lanes, plan)| {
            let parts = plan.grid().parts();
            (link, lanes, parts, plan)
        });
        let node = &mut self.d[d];
        if node.grants.open(grant, links).is_err() || open.sources.len() != parts.len() {
            self.fails(Inv::LandsInGrant, || format!("grant {grant} opened twice"));
            return;
        }
        node.open.insert(grant, open);
        if let Some(r) = node.rooms.get_mut(&room) {
            r.opened(&parts);
        }
    }

    /// The kinds of some sessions; of none, the first.
    pub(crate) fn kinds(&self, sids: impl IntoIterator<Item = usize>) -> Vec<usize> {
        let mut kinds: Vec<usize> = sids.into_iter().map(|sid| self.sessions[sid].kind()).collect();
        kinds.sort_unstable();
        kinds.dedup();
        if kinds.is_empty() { vec![Kind::Socket as usize] } else { kinds }
    }
}
