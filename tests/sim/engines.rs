//! Simulated engines of all three kinds.
//!
//! - Receiver copies: frames in order on a lane, put in place word by word, each step admitted by
//!   [`Grants::admit`]; what is not admitted is scrapped and refused.
//! - One-sided: posted writes land word by word at random later times, may land twice, and go on
//!   landing after the sender was told that the lane is lost, and after the sender died, until the
//!   receiver destroys its end. Nobody at the receiver looks at them.
//! - Puller: the receiver copies from the sender's memory, then reads the serve word again.
//!
//! A source page is read when it lands, so a page that is reused too early is seen. Where the
//! sender has destroyed its end, what is still under way carries the bytes of that moment.
//! A fence takes time, can be late or fail; what may land goes on landing until it completes.

use std::collections::VecDeque;
use std::sync::Arc;

use kvlane_proto::grants::FenceHow;
use kvlane_proto::msg::peer::{DataPath, Serve};
use kvlane_proto::{ErrorKind, GrantId, LaneId, LinkId, PartId, PartPages, Plan, Refusal, RoomId};

use crate::coverage::C;
use crate::invariants::Inv;
use crate::pools::{Block, WORDS, content};
use crate::world::{DEvent, Ev, Fence, PEvent, Quiet, World};

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
    /// The sender's pages.
    source: Vec<usize>,
    /// Where a one-sided write goes.
    to: Vec<usize>,
    /// The bytes, where the source is not read any more.
    taken: Option<Vec<u64>>,
    step: usize,
    scrap: bool,
}

/// A grant at the receiver's engine.
pub(crate) struct OpenGrant {
    pub(crate) sid: usize,
    pub(crate) lanes: Vec<LaneId>,
    pub(crate) plan: Arc<Plan>,
    pub(crate) fencing: bool,
}

/// One pull.
pub(crate) struct PullJob {
    serve: Arc<Serve>,
    parts: VecDeque<PartId>,
    step: usize,
}

impl World {
    // ---- landing --------------------------------------------------------------------------

    /// Puts one word in place. `strict`: nothing may discard it any more.
    fn land(&mut self, d: usize, grant: GrantId, page: usize, w: usize, value: u64, strict: bool) {
        let pool = &self.pools[self.d[d].pool];
        let block = pool.blocks[pool.block_of(page) as usize];
        let slab = pool.slab_of(page);
        let open = self.d[d].open.contains_key(&grant);
        match block {
            Block::Lent { grant: g, seq, prompt_block, fill, .. } if g == grant && open => {
                let want = content(seq, prompt_block, slab, fill, w);
                if strict && value != want {
                    let of_the_page = value >> 12 == want >> 12;
                    let inv = match value >> 32 == u64::from(seq) {
                        _ if value >> 48 == 0xCAFE => Inv::SourceKept,
                        true if of_the_page => Inv::SentWhenFinal,
                        _ => Inv::LandsInGrant,
                    };
                    self.fails(inv, || {
                        format!("page {page} of {block:?} gets {value:#x}, not {want:#x}")
                    });
                }
            }
            Block::Withheld if open => {}
            _ => self.fails(Inv::LandsInGrant, || {
                format!("decode {d}: a write of grant {grant} lands on page {page}, {block:?}")
            }),
        }
        let pool = self.d[d].pool;
        self.pools[pool].words[page * WORDS + w] = value;
    }

    fn pages(&self, pool: usize, pages: &PartPages) -> Vec<usize> {
        pages.iter().map(|p| self.pools[pool].page_of(p.address)).collect()
    }

    // ---- sender ---------------------------------------------------------------------------

    pub(crate) fn post(
        &mut self,
        p: usize,
        sid: usize,
        grant: GrantId,
        part: PartId,
        lane: LaneId,
        layers: std::ops::Range<u32>,
        ids: Arc<[u32]>,
    ) {
        self.check_post(p, sid, grant, part, lane);
        let s = &self.sessions[sid];
        let (sp, path) = (s.pools[1], s.path);
        let Some(&c) = s.lanes.get(usize::from(lane.0)).filter(|&&c| c != usize::MAX) else {
            return;
        };
        if !self.conns[c].alive[1] || !self.conns[c].known {
            // The notice of its loss is on the way, and gives the part back.
            return;
        }
        let pool = &self.pools[sp];
        let source = match PartPages::of_source(&self.prof.layout, pool.map.clone(), layers, ids) {
            Ok(pages) => self.pages(sp, &pages),
            Err(e) => return self.fails(Inv::LandsInGrant, || format!("bad source: {e}")),
        };
        let to = match self.p[p].plans.get(&(sid, grant)).map(|plan| plan.pages(part)) {
            Some(Ok(pages)) if path == DataPath::OneSided => self.pages(s_pool(self, sid), &pages),
            _ => Vec::new(),
        };
        let xfer = Xfer { grant, part, source, to, taken: None, step: 0, scrap: false };
        self.conns[c].queue.push_back(xfer);
        self.wake(c);
        let loss = self.prof.lane_loss;
        if !self.quiet_period() && self.rng.per_mille(loss) {
            let at = self.after(0, 6);
            self.push(at, None, Ev::End { conn: c, side: 1 });
        }
    }

    fn wake(&mut self, c: usize) {
        if !self.conns[c].stepping && !self.conns[c].queue.is_empty() {
            self.conns[c].stepping = true;
            let at = self.now + self.rng.range(5_000, 600_000);
            self.push(at, None, Ev::Step { conn: c });
        }
    }

    /// The sender's engine is asked to stop a grant.
    pub(crate) fn quiesce(&mut self, p: usize, sid: usize, grant: GrantId) {
        self.p[p].quiet.insert((sid, grant));
        let path = self.sessions[sid].path;
        if path == DataPath::Puller {
            // Bumped before the source is reused: whoever copies meanwhile throws it away.
            self.bumped.insert((sid, grant));
        }
        if path == DataPath::ReceiverCopies {
            // What has not left is taken back; what is in the socket's buffer is not.
            for c in 0..self.conns.len() {
                if self.conns[c].sid != sid || !self.conns[c].alive[1] {
                    continue;
                }
                let buffered = self.rng.per_mille(500);
                let mut queue = std::mem::take(&mut self.conns[c].queue);
                queue.retain_mut(|x| {
                    let keep = x.grant != grant || x.step > 0 || x.scrap || buffered;
                    if x.grant == grant && keep {
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
            let words = &self.pools[self.sessions[sid].pools[1]].words;
            let of = |&p: &usize| words[p * WORDS..(p + 1) * WORDS].iter().copied();
            x.taken = Some(x.source.iter().flat_map(of).collect());
        }
    }

    pub(crate) fn quiet_check(&mut self, p: usize) {
        let mut i = 0;
        while i < self.p[p].quieting.len() {
            let (sid, grant, since) = self.p[p].quieting[i];
            let posted = self.conns.iter().any(|c| {
                c.sid == sid
                    && c.alive[1]
                    && c.queue.iter().any(|x| x.grant == grant && x.taken.is_none())
            });
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
            let ev = PEvent::Quiesced { link: LinkId(sid as u64), grant, proof: Quiet };
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
        let path = self.sessions[sid].path;
        if side == 1 {
            // What has left the sender lands or not; it does not read the source any more.
            let mut queue = std::mem::take(&mut self.conns[c].queue);
            let buffered = path == DataPath::OneSided || self.rng.per_mille(600);
            queue.retain_mut(|x| {
                self.take_bytes(sid, x);
                buffered
            });
            self.conns[c].queue = queue;
            if path == DataPath::ReceiverCopies {
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
            if side == 1 || self.sessions[sid].path != DataPath::OneSided {
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
        let sid = self.conns[c].sid;
        let s = &self.sessions[sid];
        let (d, pn, path, sp) = (s.d, s.pn, s.path, s.pools[1]);
        let kind = s.kind();
        if !self.conns[c].alive[0] || self.conns[c].queue.is_empty() {
            self.conns[c].queue.clear();
            return;
        }
        // A NIC goes on where a process stands still.
        let stands = path == DataPath::ReceiverCopies
            && (self.hosts[d].stopped_until > self.now || self.hosts[pn].stopped_until > self.now);
        if stands || self.cut_until(pn, d).is_some() {
            self.conns[c].stepping = true;
            let at = self.after(1, 30);
            return self.push(at, None, Ev::Step { conn: c });
        }
        let at = match path {
            DataPath::OneSided => self.rng.range(0, self.conns[c].queue.len() as u64 - 1) as usize,
            _ => 0,
        };
        let mut x = self.conns[c].queue.remove(at).unwrap();
        let total = x.source.len() * WORDS;
        let burst = self.rng.range(1, 6) as usize;
        let end = (x.step + burst).min(total);
        if path == DataPath::ReceiverCopies && !x.scrap {
            let lane = LaneId(self.conns[c].lane);
            match self.d[d].grants.admit(LinkId(sid as u64), lane, x.grant, x.part) {
                Ok((grant, plan)) => {
                    let pages = plan.pages(x.part).unwrap();
                    x.to = self.pages(s_pool(self, sid), &pages);
                    x.grant = if x.grant == grant { x.grant } else { grant };
                }
                Err(_) => {
                    self.cov.hit(C::Scrapped, kind);
                    if x.step > 0 {
                        self.cov.hit(C::StoppedMidCopy, kind);
                    }
                    x.scrap = true;
                }
            }
        }
        if !x.scrap {
            let fencing = self.d[d].open.get(&x.grant).is_some_and(|o| o.fencing);
            if path == DataPath::OneSided && (fencing || !self.conns[c].alive[1]) {
                self.cov.hit(C::LateWrite, kind);
            }
            for step in x.step..end.min(x.to.len() * WORDS) {
                let (page, w) = (step / WORDS, step % WORDS);
                let value = match &x.taken {
                    Some(words) => words[step],
                    None => self.pools[sp].words[x.source[page] * WORDS + w],
                };
                self.land(d, x.grant, x.to[page], w, value, true);
            }
        }
        x.step = end;
        if end < total {
            let queue = &mut self.conns[c].queue;
            queue.insert(at.min(queue.len()), x);
        } else if path == DataPath::OneSided && !x.to.is_empty() && self.rng.per_mille(60) {
            // The NIC repeats it.
            self.cov.hit(C::LandedTwice, kind);
            x.step = 0;
            self.conns[c].queue.push_back(x);
        } else {
            self.landed(c, d, x);
        }
        self.wake(c);
    }

    /// The last word of a part is through.
    fn landed(&mut self, c: usize, d: usize, x: Xfer) {
        let sid = self.conns[c].sid;
        if !x.scrap {
            self.part_arrived(d, sid, x.grant, x.part);
        }
        let at = self.now + self.rng.range(10_000, 3_000_000);
        let guard = self.sessions[sid].guard(1);
        let ok = !x.scrap;
        self.push_for(at, guard, Ev::Ack { conn: c, grant: x.grant, part: x.part, ok });
    }

    fn part_arrived(&mut self, d: usize, sid: usize, grant: GrantId, part: PartId) {
        let guard = self.sessions[sid].guard(0);
        let at = self.now + self.rng.range(0, 100_000);
        let ev = Box::new(DEvent::Arrived { grant, part });
        self.push_for(at, guard, Ev::Decode { d, ev });
    }

    // ---- pulls ----------------------------------------------------------------------------

    pub(crate) fn pull(&mut self, d: usize, serve: Arc<Serve>, parts: Vec<PartId>) {
        let grant = serve.grant;
        if !self.d[d].open.contains_key(&grant) {
            return self.fails(Inv::LandsInGrant, || format!("pull without grant {grant}"));
        }
        let jobs = self.d[d].pulls.entry(grant).or_default();
        let idle = jobs.is_empty();
        jobs.push(PullJob { serve, parts: parts.into(), step: 0 });
        if idle {
            let at = self.now + self.rng.range(5_000, 500_000);
            self.push(at, Some(d), Ev::Pull { d, grant });
        }
    }

    pub(crate) fn pull_step(&mut self, d: usize, grant: GrantId) {
        let Some(open) = self.d[d].open.get(&grant) else { return };
        let (sid, plan) = (open.sid, open.plan.clone());
        let Some(job) = self.d[d].pulls.get_mut(&grant).and_then(|j| j.first_mut()) else { return };
        let Some(&part) = job.parts.front() else {
            self.d[d].pulls.get_mut(&grant).unwrap().remove(0);
            return self.push(self.now, Some(d), Ev::Pull { d, grant });
        };
        let serve = job.serve.clone();
        let mut step = job.step;
        let rect = plan.grid().rect(part).unwrap();
        let to = self.pages(s_pool(self, sid), &plan.pages(part).unwrap());
        let ids = serve.blocks.expand(self.prof.blocks).unwrap();
        let from = (rect.blocks.start - serve.first_block) as usize;
        let until = (rect.blocks.end - serve.first_block) as usize;
        let sp = self.sessions[sid].pools[1];
        let map = self.pools[sp].map.clone();
        let pages =
            PartPages::of_source(&self.prof.layout, map, rect.layers, ids[from..until].into());
        let source = self.pages(sp, &pages.unwrap());
        let total = to.len() * WORDS;
        if step < total {
            let end = (step + self.rng.range(1, 6) as usize).min(total);
            while step < end {
                let (page, w) = (step / WORDS, step % WORDS);
                let value = self.pools[sp].words[source[page] * WORDS + w];
                self.land(d, grant, to[page], w, value, false);
                step += 1;
            }
            self.d[d].pulls.get_mut(&grant).unwrap()[0].step = step;
        } else {
            // The copy is there; was the source what it said all the time?
            if self.bumped.contains(&(sid, grant)) {
                self.cov.hit(C::PullStale, 2);
                self.d[d].pulls.remove(&grant);
                return self.decode(d, DEvent::PullStale { grant });
            }
            for &page in &to {
                self.check_page(d, page, Inv::SourceKept);
            }
            let job = &mut self.d[d].pulls.get_mut(&grant).unwrap()[0];
            job.parts.pop_front();
            job.step = 0;
            self.part_arrived(d, sid, grant, part);
        }
        let at = self.now + self.rng.range(5_000, 1_500_000);
        self.push(at, Some(d), Ev::Pull { d, grant });
    }

    // ---- fences ---------------------------------------------------------------------------

    pub(crate) fn fence(&mut self, d: usize, grant: GrantId, how: FenceHow) {
        // A grant that was never opened is fenced at once.
        let opened = self.d[d].open.contains_key(&grant);
        let mut kind = 0;
        if let Some(open) = self.d[d].open.get_mut(&grant) {
            open.fencing = true;
            kind = self.sessions[open.sid].kind();
            let c = if how == FenceHow::Revoke { C::Revoke } else { C::QuiesceClose };
            self.cov.hit(c, kind);
        }
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
        } else if how == FenceHow::Revoke && kind == 1 {
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
        if let Some(open) = self.d[d].open.remove(&grant) {
            self.d[d].grants.close(grant);
            if self.d[d]
                .pulls
                .remove(&grant)
                .is_some_and(|jobs| jobs.first().is_some_and(|j| j.step > 0))
            {
                self.cov.hit(C::StoppedMidCopy, 2);
            }
            let one_sided = self.sessions[open.sid].path == DataPath::OneSided;
            if how == FenceHow::Revoke && one_sided {
                for c in 0..self.conns.len() {
                    let conn = &self.conns[c];
                    if conn.sid == open.sid && open.lanes.contains(&LaneId(conn.lane)) {
                        self.end_of_conn(c, 0);
                    }
                }
            }
        }
        // Behind the notices of the lanes that it destroyed.
        let ev = Box::new(DEvent::Fenced { grant, proof: Fence(grant) });
        self.push(self.now, Some(d), Ev::Decode { d, ev });
    }

    /// Opens a grant at the receiver's engine.
    pub(crate) fn open_grant(
        &mut self,
        d: usize,
        room: RoomId,
        sid: usize,
        grant: GrantId,
        lanes: Vec<LaneId>,
        plan: Arc<Plan>,
    ) {
        let parts = plan.grid().parts();
        let node = &mut self.d[d];
        if node.grants.open(grant, LinkId(sid as u64), &lanes, parts, plan.clone()).is_err() {
            self.fails(Inv::LandsInGrant, || format!("grant {grant} opened twice"));
            return;
        }
        node.open.insert(grant, OpenGrant { sid, lanes, plan, fencing: false });
        if let Some(r) = node.rooms.get_mut(&room) {
            r.sid = Some(sid);
            r.parts = parts;
        }
    }
}

/// The receiver's pool of a session.
fn s_pool(w: &World, sid: usize) -> usize {
    w.sessions[sid].pools[0]
}
