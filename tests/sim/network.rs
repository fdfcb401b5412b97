//! The control network, and sessions between workers.
//!
//! Frames of rooms are dropped, delayed, reordered and duplicated. Frames that set a link up or
//! keep it (Describe, Ready, Heartbeat, Probe, Bye) are only delayed, because QUIC retransmits
//! what is lost and the machines do not repeat them. A partition holds those back until it ends
//! and drops everything else.

use kvlane_proto::link::{self, EngineChoice, Link, LinkConfig};
use kvlane_proto::msg::peer::{PeerFrame, PeerMsg};
use kvlane_proto::time::holder_ms;
use kvlane_proto::{Error, ErrorKind, LaneId, LinkId, PoolMap, Refusal};

use crate::coverage::C;
use crate::engines::Kind;
use crate::world::{DEvent, Ev, PEvent, World};

/// A session of a decode (side 0) and a prefill (side 1). Both number it alike here.
pub(crate) struct Session {
    pub(crate) d: usize,
    pub(crate) p: usize,
    /// The prefill's node.
    pub(crate) pn: usize,
    pub(crate) inc: [u32; 2],
    pub(crate) kind: Kind,
    pub(crate) link: [Option<Link>; 2],
    pub(crate) opening: bool,
    pub(crate) open: [bool; 2],
    pub(crate) up: [bool; 2],
    pub(crate) connected: [bool; 2],
    pub(crate) engine_open: [bool; 2],
    /// The present connection of each lane.
    pub(crate) lanes: Vec<usize>,
    /// The memory of either side.
    pub(crate) mems: [usize; 2],
    /// Until when each rail is dead.
    pub(crate) rails_dead: Vec<u64>,
    pub(crate) seen: [u64; 2],
}

impl Session {
    /// Of this decode and this prefill, which is this node; not open yet.
    pub(crate) fn new(
        d: usize,
        p: usize,
        pn: usize,
        inc: [u32; 2],
        kind: Kind,
        mems: [usize; 2],
        rails: u16,
    ) -> Self {
        Self {
            d,
            p,
            pn,
            inc,
            kind,
            link: [None, None],
            opening: true,
            open: [false; 2],
            up: [false; 2],
            connected: [false; 2],
            engine_open: [false; 2],
            lanes: Vec::new(),
            mems,
            rails_dead: vec![0; usize::from(rails)],
            seen: [0; 2],
        }
    }
    pub(crate) fn node(&self, side: usize) -> usize {
        if side == 0 { self.d } else { self.pn }
    }
    pub(crate) fn kind(&self) -> usize {
        self.kind as usize
    }
    pub(crate) fn guard(&self, side: usize) -> Option<(usize, u32)> {
        Some((self.node(side), self.inc[side]))
    }
}

impl World {
    /// Until when nothing goes from `from` to `to`.
    pub(crate) fn cut_until(&self, from: usize, to: usize) -> Option<u64> {
        let hit = |c: &&(usize, usize, u64)| c.0 == from && c.1 == to && c.2 > self.now;
        self.cuts.iter().filter(hit).map(|c| c.2).max()
    }

    pub(crate) fn delay(&mut self) -> u64 {
        let most = if self.rng.per_mille(30) { 4 * self.prof.delay_ms } else { self.prof.delay_ms };
        self.now + 20_000 + self.rng.ms(0, most)
    }

    fn side_alive(&self, sid: usize, side: usize) -> bool {
        let s = &self.sessions[sid];
        let host = &self.hosts[s.node(side)];
        host.alive && host.inc == s.inc[side]
    }

    /// The decode dials.
    pub(crate) fn dial(&mut self, d: usize, peer: usize) {
        let pn = self.pnode(peer);
        let unreachable = self.cut_until(d, pn).or(self.cut_until(pn, d)).is_some();
        if !self.hosts[pn].alive || unreachable || self.rng.per_mille(self.prof.drop / 10) {
            let why = Refusal::new(ErrorKind::PeerLost, "the prefill cannot be reached");
            let at = self.after(1, 100);
            self.cov.hit(C::LinkFailed, 0);
            self.push(at, Some(d), Ev::LinkFailed { d, peer: pn, why: Box::new(why) });
            return;
        }
        let kind = *self.rng.pick(&[
            Kind::Socket,
            Kind::Memory,
            Kind::Memory,
            Kind::OneSided,
            Kind::OneSided,
            Kind::OneSided,
        ]);
        // Only who writes to queue pairs has several.
        let rails = if kind == Kind::OneSided { self.prof.rails } else { 1 };
        let sid = self.sessions.len();
        let inc = [self.hosts[d].inc, self.hosts[pn].inc];
        let mems = [self.d[d].mem, self.p[peer].mem];
        self.sessions.push(Session::new(d, peer, pn, inc, kind, mems, rails));
        let at = self.delay();
        self.push(at, None, Ev::Open { sid });
    }

    pub(crate) fn session_opens(&mut self, sid: usize) {
        self.sessions[sid].opening = false;
        if !self.side_alive(sid, 0) {
            return;
        }
        if !self.side_alive(sid, 1) {
            let why = Refusal::new(ErrorKind::PeerLost, "the prefill cannot be reached");
            let (d, peer) = (self.sessions[sid].d, self.sessions[sid].pn);
            self.push(self.now, Some(d), Ev::LinkFailed { d, peer, why: Box::new(why) });
            return;
        }
        for side in 0..2 {
            let node = self.sessions[sid].node(side);
            let peer = self.hosts[self.sessions[sid].node(1 - side)].key();
            let mut config = LinkConfig::new(self.hosts[node].pools.clone(), side == 0);
            config.lanes = self.prof.lanes;
            config.part_bytes = self.prof.part_bytes;
            let now = self.local(node);
            let s = &mut self.sessions[sid];
            s.link[side] = Some(Link::new(now, peer, config));
            s.open[side] = true;
            s.engine_open[side] = true;
            let at = self.after(0, 3);
            let guard = self.sessions[sid].guard(side);
            self.push_for(at, guard, Ev::Local { sid, side });
        }
    }

    pub(crate) fn engine_is_ready(&mut self, sid: usize, side: usize) {
        let s = &self.sessions[sid];
        let maps = match (s.kind, side) {
            (Kind::OneSided, 0) => self.hosts[s.d].maps.iter().map(|m| PoolMap::clone(m)).collect(),
            _ => Vec::new(),
        };
        let name = s.kind.engine().to_string();
        let choice = EngineChoice { name, path: s.kind.path(), blob: vec![side as u8], maps };
        self.link_event(sid, side, link::Event::Local(vec![choice]));
    }

    pub(crate) fn link_event(&mut self, sid: usize, side: usize, ev: link::Event) {
        let s = &mut self.sessions[sid];
        if !s.open[side] {
            return;
        }
        let now = self.hosts[s.node(side)].local(self.now);
        if let Some(l) = s.link[side].as_mut() {
            l.handle_event(now, ev);
        }
        self.drain_link(sid, side);
        self.drain_side(sid, side);
    }

    fn drain_side(&mut self, sid: usize, side: usize) {
        if side == 0 {
            self.drain_decode(self.sessions[sid].d);
        } else {
            self.drain_prefill(self.sessions[sid].p);
        }
    }

    /// Does what a link wants. What it delivers is put into the room machine; the caller drains it.
    pub(crate) fn drain_link(&mut self, sid: usize, side: usize) {
        while let Some(out) = self.sessions[sid].link[side].as_mut().and_then(Link::poll_output) {
            let (d, p) = (self.sessions[sid].d, self.sessions[sid].p);
            let link = LinkId(sid as u64);
            let now = self.local(self.sessions[sid].node(side));
            match out {
                link::Output::Send(frame) => self.send_frame(sid, side, frame),
                link::Output::Connect { .. } => {
                    self.sessions[sid].connected[side] = true;
                    if self.sessions[sid].connected == [true, true] {
                        self.sessions[sid].lanes = vec![usize::MAX; usize::from(self.prof.lanes)];
                        for lane in 0..self.prof.lanes {
                            let at = self.after(0, 2);
                            self.push(at, None, Ev::Redial { sid, lane });
                        }
                    }
                }
                // The engines of this world need no words for each other.
                link::Output::Told(_) => {}
                link::Output::Up { path, lanes, down, part_bytes, share, pools, maps, since } => {
                    self.sessions[sid].up[side] = true;
                    let peer = self.hosts[self.sessions[sid].node(1 - side)].identity.clone();
                    let peer = self.sessions[sid].link[side]
                        .as_ref()
                        .map(|l| l.peer().clone())
                        .filter(|k| k.identity == peer)
                        .unwrap();
                    if side == 0 {
                        self.d[d].lanes.insert(link, usize::from(lanes));
                        let rails = self.sessions[sid].rails_dead.len() as u16;
                        let ev =
                            DEvent::LinkUp { link, peer, path, lanes, down, rails, share, pools };
                        self.d[d].m.handle_event(now, ev);
                    } else {
                        let ev = PEvent::LinkUp {
                            link,
                            peer,
                            path,
                            part_bytes,
                            share,
                            pools,
                            maps,
                            since,
                            down: down.into_iter().map(|(lane, _)| lane).collect(),
                        };
                        self.p[p].m.handle_event(now, ev);
                    }
                }
                link::Output::Deliver { msg, echo_sent } => {
                    if side == 0 {
                        self.d[d].m.handle_event(now, DEvent::Peer { link, msg });
                    } else {
                        // The lease as this side's own clock counts it, apart from the machine.
                        let lease = match &msg {
                            PeerMsg::Offer(o) => Some((o.grant, o.lease_ms)),
                            PeerMsg::Renew { grant, lease_ms, .. } => Some((*grant, *lease_ms)),
                            _ => None,
                        };
                        if let Some((grant, ms)) = lease {
                            let until = echo_sent.plus_ms(holder_ms(ms));
                            let at = self.p[p].leases.entry((sid, grant)).or_insert(until);
                            *at = (*at).max(until);
                        }
                        let ev = PEvent::Peer { link, msg, echo_sent };
                        self.p[p].m.handle_event(now, ev);
                    }
                }
                link::Output::Lost(why) => self.side_lost(sid, side, why),
            }
        }
    }

    fn side_lost(&mut self, sid: usize, side: usize, why: Refusal) {
        let link = LinkId(sid as u64);
        let s = &mut self.sessions[sid];
        let (d, p, up) = (s.d, s.p, s.up[side]);
        let kind = s.kind();
        s.open[side] = false;
        let now = self.local(self.sessions[sid].node(side));
        if side == 0 {
            self.d[d].lanes.remove(&link);
            if up {
                self.cov.hit(C::LinkLost, kind);
                let (at, stood) = (self.now, self.hosts[d].stood_ns);
                self.d[d].rooms.values_mut().for_each(|r| r.loses(sid, at, stood));
                self.d[d].m.handle_event(now, DEvent::LinkDown { link, why });
            } else {
                self.cov.hit(C::LinkFailed, 0);
                let peer = self.hosts[self.sessions[sid].pn].identity.clone();
                self.d[d].m.handle_event(now, DEvent::LinkFailed { peer, why });
            }
        } else if up {
            self.p[p].m.handle_event(now, PEvent::LinkDown { link, why });
        }
        self.engine_closes(sid, side);
        // The session's end is told to the other side, if it can be.
        let (from, to) = (self.sessions[sid].node(side), self.sessions[sid].node(1 - side));
        if self.cut_until(from, to).is_none() && self.rng.per_mille(800) {
            let at = self.delay();
            let guard = self.sessions[sid].guard(1 - side);
            self.push_for(at, guard, Ev::Closed { sid, side: 1 - side });
        }
        self.drain_side(sid, side);
    }

    pub(crate) fn session_closed(&mut self, sid: usize, side: usize) {
        let why = Error::new(ErrorKind::PeerLost, "the session has ended").to_refusal();
        self.link_event(sid, side, link::Event::Closed(why));
    }
    pub(crate) fn suspect(&mut self, sid: usize, side: usize) {
        self.link_event(sid, side, link::Event::Suspect("end of the idle connection".into()));
    }

    /// A process is gone: some of its peers are told, others find silence.
    pub(crate) fn node_vanishes(&mut self, node: usize, side: usize) {
        for sid in 0..self.sessions.len() {
            let s = &mut self.sessions[sid];
            if s.node(side) != node || !(s.open[side] || s.engine_open[side]) {
                continue;
            }
            s.open[side] = false;
            s.engine_open[side] = false;
            let guard = s.guard(1 - side);
            if self.rng.per_mille(800) {
                let at = self.after(0, 20);
                let ev = if self.rng.per_mille(800) {
                    Ev::Suspect { sid, side: 1 - side }
                } else {
                    Ev::Closed { sid, side: 1 - side }
                };
                self.push_for(at, guard, ev);
            }
            self.conns_lose_side(sid, side);
        }
    }

    pub(crate) fn send_frame(&mut self, sid: usize, side: usize, frame: PeerFrame) {
        let s = &self.sessions[sid];
        let (from, to, guard) = (s.node(side), s.node(1 - side), s.guard(1 - side));
        let of_the_link = matches!(
            frame.msg,
            PeerMsg::Describe(_)
                | PeerMsg::Ready
                | PeerMsg::Heartbeat
                | PeerMsg::Probe
                | PeerMsg::Bye(_)
        );
        self.heard(sid, side, &frame);
        let mut at = self.delay();
        let cut = self.cut_until(from, to);
        let side = 1 - side;
        if of_the_link {
            at += cut.map_or(0, |until| until - self.now);
        } else {
            if cut.is_some() || (!self.quiet_period() && self.rng.per_mille(self.prof.drop)) {
                self.cov.hit(C::Drop, 0);
                return;
            }
            if self.rng.per_mille(self.prof.duplicate) {
                self.cov.hit(C::Duplicate, 0);
                let mut again = self.delay();
                if self.rng.per_mille(300) {
                    again += self.rng.ms(0, 400);
                }
                let frame = Box::new(frame.clone());
                self.push_for(again, guard, Ev::Frame { sid, side, frame });
            }
        }
        self.push_for(at, guard, Ev::Frame { sid, side, frame: Box::new(frame) });
    }

    pub(crate) fn frame_arrives(&mut self, sid: usize, side: usize, frame: PeerFrame) {
        self.mix(frame.seq << 8 | side as u64);
        let seen = &mut self.sessions[sid].seen[side];
        if frame.seq < *seen {
            self.cov.hit(C::Reorder, 0);
        } else {
            *seen = frame.seq;
        }
        self.link_event(sid, side, link::Event::Frame(frame));
    }

    pub(crate) fn lane_changes(&mut self, sid: usize, side: usize, lane: LaneId, up: bool) {
        let link = LinkId(sid as u64);
        let (d, p) = (self.sessions[sid].d, self.sessions[sid].p);
        if up && side == 1 {
            let c = self.sessions[sid].lanes[usize::from(lane.0)];
            self.conns[c].known = true;
        }
        let why = Refusal::new(ErrorKind::NoPath, "the lane was lost");
        let ev = match up {
            true => link::Event::LaneUp(lane),
            false => link::Event::LaneDown(lane, why.clone()),
        };
        self.link_event(sid, side, ev);
        match (side, up) {
            (0, true) => self.decode(d, DEvent::LaneUp { link, lane }),
            (0, false) => self.decode(d, DEvent::LaneDown { link, lane, why }),
            (_, true) => self.prefill(p, PEvent::LaneUp { link, lane }),
            (_, false) => self.prefill(p, PEvent::LaneDown { link, lane }),
        }
    }
}
