//! The world of one seed: nodes with clocks of their own, one heap of events, and the loop.
//!
//! A node is one rank of an instance, or a router. Workers run the real machines. What they put out
//! becomes events of the network (`network.rs`), of the engines (`engines.rs`) or of the serving
//! engines and routers (`serving.rs`). Nothing reads a real clock, and nothing iterates over a hash
//! map where the order would show, so the same seed is the same run.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::ops::Range;
use std::sync::Arc;

use kvlane_proto::decode::{self, CallId, Decode, DecodeConfig};
use kvlane_proto::grants::{FenceHow, Grants};
use kvlane_proto::layout::KvKind;
use kvlane_proto::msg::call::{Call, Reply};
use kvlane_proto::msg::peer::PeerFrame;
use kvlane_proto::msg::service::WorkerAddress;
use kvlane_proto::mutant::Mutant;
use kvlane_proto::prefill::{self, Prefill, PrefillConfig};
use kvlane_proto::{
    GrantId, Identity, Incarnation, LaneId, Layout, LinkId, PartId, Plan, PoolMap, Refusal, Role,
    RoomId, Time, WorkerKey,
};

use crate::coverage::{C, Coverage, PHASES};
use crate::engines::{Conn, Kind, OpenGrant, SendGrant};
use crate::invariants::{Inv, Violation};
use crate::network::Session;
use crate::pools::{Geometry, Ids, Memory};
use crate::rng::Rng;
use crate::serving::{Act, DRoom, Job, PRoom};
use crate::shapes::{Ranks, Route, Shapes, TOKENS_MAX};

/// The engine's proof that a grant is fenced. The forged one belongs to the machine without fence.
#[derive(Debug)]
pub(crate) struct Fence(pub(crate) GrantId);
/// The engine's proof that a grant is quiet at its sender: session and grant.
#[derive(Debug)]
pub(crate) struct Quiet(pub(crate) usize, pub(crate) GrantId);

pub(crate) type DEvent = decode::Event<Fence>;
pub(crate) type PEvent = prefill::Event<Quiet>;

/// Something that happens at a moment.
#[derive(Debug)]
pub(crate) enum Ev {
    Timer { node: usize, id: u64 },
    Boot { node: usize },
    Thaw { node: usize },
    Fault(Fault),
    Spawn,
    // Network.
    Open { sid: usize },
    Local { sid: usize, side: usize },
    Frame { sid: usize, side: usize, frame: Box<PeerFrame> },
    Closed { sid: usize, side: usize },
    Suspect { sid: usize, side: usize },
    LinkFailed { d: usize, peer: usize, why: Box<Refusal> },
    Call { d: usize, call: u64, router: usize, body: Box<Call> },
    CallGone { d: usize, call: u64 },
    Reply { call: u64, reply: Box<Result<Reply, Refusal>> },
    // Engines.
    Lane { sid: usize, side: usize, lane: u16, up: bool },
    Ack { conn: usize, grant: GrantId, part: PartId, ok: bool },
    Decode { d: usize, ev: Box<DEvent> },
    Prefill { p: usize, ev: Box<PEvent> },
    Step { conn: usize },
    End { conn: usize, side: usize },
    Redial { sid: usize, lane: u16 },
    FenceDone { d: usize, grant: GrantId, how: FenceHow },
    FenceFails { d: usize, grant: GrantId },
    QuietCheck { p: usize },
    // Serving engines and routers.
    Job { job: usize, act: Act },
    Lend { d: usize, job: usize, bad: bool, tries: u32 },
    Attach { p: usize, job: usize, tries: u32 },
    Chunk { p: usize, room: RoomId },
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    Crash { node: usize },
    Stop { node: usize, ns: u64 },
    Cut { a: usize, b: usize, both: bool, ns: u64 },
    LaneLoss { n: usize },
    RailLoss { n: usize, ns: u64 },
    Drain { node: usize },
}

struct Item {
    at: u64,
    seq: u64,
    /// The start of the process that must still run.
    guard: Option<(usize, u32)>,
    ev: Ev,
}
impl PartialEq for Item {
    fn eq(&self, o: &Self) -> bool {
        (self.at, self.seq) == (o.at, o.seq)
    }
}
impl Eq for Item {}
impl PartialOrd for Item {
    fn partial_cmp(&self, o: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(o))
    }
}
impl Ord for Item {
    fn cmp(&self, o: &Self) -> std::cmp::Ordering {
        (self.at, self.seq).cmp(&(o.at, o.seq))
    }
}

/// A process on a host with a clock of its own.
pub(crate) struct Host {
    pub(crate) identity: Identity,
    /// The pools of a worker, and where they are.
    pub(crate) pools: Arc<[Layout]>,
    pub(crate) maps: Arc<[Arc<PoolMap>]>,
    pub(crate) geometry: Vec<Arc<Geometry>>,
    pub(crate) inc: u32,
    pub(crate) alive: bool,
    pub(crate) stopped_until: u64,
    /// How long it has stood still in all.
    pub(crate) stood_ns: u64,
    offset: u64,
    ppm: i64,
    armed: u64,
    timer: u64,
}

impl Host {
    pub(crate) fn local(&self, at: u64) -> Time {
        let rate = (1_000_000 + self.ppm) as u128;
        Time(self.offset + (u128::from(at) * rate / 1_000_000) as u64)
    }
    /// The first true moment at which the local clock shows `t`.
    pub(crate) fn when(&self, t: Time) -> u64 {
        let rate = (1_000_000 + self.ppm) as u128;
        let local = u128::from(t.0.saturating_sub(self.offset));
        (local * 1_000_000).div_ceil(rate) as u64
    }
    pub(crate) fn key(&self) -> WorkerKey {
        let mut inc = [0; 16];
        inc[..4].copy_from_slice(&self.inc.to_be_bytes());
        WorkerKey { identity: self.identity.clone(), incarnation: Incarnation(inc) }
    }
    pub(crate) fn address(&self) -> WorkerAddress {
        WorkerAddress { key: self.key(), address: "sim:1".into() }
    }
}

/// A decode worker.
pub(crate) struct DNode {
    pub(crate) m: Decode<Fence>,
    pub(crate) mem: usize,
    pub(crate) grants: Grants<Arc<Plan>>,
    pub(crate) open: BTreeMap<GrantId, OpenGrant>,
    pub(crate) rooms: BTreeMap<RoomId, DRoom>,
    /// Lent blocks whose proof did not come.
    pub(crate) quarantine: BTreeMap<GrantId, Ids>,
    pub(crate) lanes: BTreeMap<LinkId, usize>,
    pub(crate) fences: usize,
    /// Calls that wait for their answer, and until when at most.
    pub(crate) waiting: BTreeMap<u64, u64>,
}

/// A prefill worker.
pub(crate) struct PNode {
    pub(crate) m: Prefill<Quiet>,
    pub(crate) mem: usize,
    pub(crate) rooms: BTreeMap<RoomId, PRoom>,
    /// What its engine knows of the grants that it writes under itself.
    pub(crate) plans: BTreeMap<(usize, GrantId), SendGrant>,
    /// When the holder's lease ends, by this side's own clock.
    pub(crate) leases: BTreeMap<(usize, GrantId), Time>,
    pub(crate) posted: BTreeMap<(usize, GrantId, PartId), (LaneId, u32)>,
    pub(crate) quieting: Vec<(usize, GrantId, u64)>,
    pub(crate) quiet: BTreeSet<(usize, GrantId)>,
    pub(crate) refused: Option<kvlane_proto::Error>,
}

/// What one seed is like.
pub(crate) struct Profile {
    /// No faults, no aborts, no mischief: every room must be done.
    pub(crate) calm: bool,
    pub(crate) mutant: Mutant,
    pub(crate) part_bytes: u64,
    pub(crate) lanes: u16,
    pub(crate) lanes_per_room: u16,
    /// Of one-sided sessions.
    pub(crate) rails: u16,
    pub(crate) drop: u64,
    pub(crate) duplicate: u64,
    pub(crate) delay_ms: u64,
    pub(crate) lane_loss: u64,
    pub(crate) fence_trouble: u64,
    pub(crate) lease_ms: u64,
    pub(crate) deadline_ms: u64,
    pub(crate) unclaimed_ms: u64,
    pub(crate) fence_ms: u64,
    pub(crate) rooms_max: usize,
    pub(crate) queue_max: usize,
    pub(crate) orphans_max: usize,
    /// For so many tokens every pool has blocks.
    pub(crate) kept_tokens: u32,
    /// Routers reserve at all ranks at once, not one after the other.
    pub(crate) reserves_at_once: bool,
    pub(crate) job_gap_ms: u64,
    pub(crate) mischief: u64,
    pub(crate) active_ns: u64,
}

pub(crate) const SECOND: u64 = 1_000_000_000;
const SETTLE: u64 = 700_000_000;
pub(crate) const EVENTS_MIN: u64 = 500;
const EVENTS_MAX: u64 = 60_000;

pub(crate) struct World {
    pub(crate) now: u64,
    pub(crate) rng: Rng,
    pub(crate) prof: Profile,
    pub(crate) cov: Coverage,
    pub(crate) trace: bool,
    pub(crate) violation: Option<Violation>,
    pub(crate) hash: u64,
    heap: BinaryHeap<Reverse<Item>>,
    seq: u64,
    pub(crate) hosts: Vec<Host>,
    pub(crate) d: Vec<DNode>,
    pub(crate) p: Vec<PNode>,
    pub(crate) routers: usize,
    /// The ranks of each instance, and who sends to whom, by decode and prefill instance.
    pub(crate) decodes: Vec<Range<usize>>,
    pub(crate) prefills: Vec<Range<usize>>,
    pub(crate) routes: Vec<Vec<Route>>,
    pub(crate) mems: Vec<Memory>,
    pub(crate) sessions: Vec<Session>,
    pub(crate) conns: Vec<Conn>,
    pub(crate) jobs: Vec<Job>,
    pub(crate) by_room: BTreeMap<RoomId, usize>,
    /// Calls that wait: decode rank, job, what.
    pub(crate) calls: BTreeMap<u64, (usize, usize, Act)>,
    pub(crate) next_call: u64,
    /// Cut directions: (from, to, until).
    pub(crate) cuts: Vec<(usize, usize, u64)>,
    /// Grants that had lanes on a rail when it died, and lanes on others.
    pub(crate) rail_lost: BTreeSet<(usize, GrantId)>,
    /// Grants whose serve word the sender has raised.
    pub(crate) bumped: BTreeSet<(usize, GrantId)>,
    /// Outcomes as decided: (decode, its start, room) → done.
    pub(crate) decided: BTreeMap<(usize, u32, RoomId), kvlane_proto::Outcome>,
    /// (room, prefill, its start, decode).
    pub(crate) done_at: BTreeSet<(RoomId, usize, u32, usize)>,
    /// Rooms that a prefill says have failed, and the decodes that were to take them.
    pub(crate) failed_at: BTreeMap<(RoomId, usize, u32), Vec<usize>>,
    pub(crate) said: BTreeMap<(usize, RoomId, GrantId), bool>,
    /// Until when a grant lives by its grantor, in true time.
    pub(crate) promised: BTreeMap<(usize, GrantId), u64>,
    pub(crate) lease_over: BTreeSet<(usize, GrantId)>,
    /// What the answer of this call has to be.
    pub(crate) expected: Option<(u64, kvlane_proto::Outcome)>,
    /// Kill this role when a room comes into this phase.
    trigger: Option<(usize, usize)>,
    idle_since: Option<u64>,
}

impl World {
    pub(crate) fn new(seed: u64, mutant: Mutant, trace: bool) -> Self {
        let mut rng = Rng::new(seed);
        let shapes = Shapes::draw(&mut rng);
        let main = &shapes.decodes[0][0][0];
        // Of four tokens in one layer.
        let unit = u64::from(main.row_bytes() * main.kv_heads * main.kind.slabs() * 4);
        let calm = rng.per_mille(80);
        let lanes = rng.range(1, 4) as u16;
        let lossy = !calm && rng.per_mille(700);
        let room_lanes = rng.range(1, 2) as u16;
        let rails = rng.range(1, 2) as u16;
        let prof = Profile {
            mutant,
            calm,
            part_bytes: unit * *rng.pick(&[1, 1, 2, 3, 4, 100]),
            lanes,
            // Now and then more than a link has, which never fits.
            lanes_per_room: if !calm && rng.per_mille(20) { 5 } else { lanes.min(room_lanes) },
            rails,
            drop: if lossy { *rng.pick(&[10, 50, 150, 300]) } else { 0 },
            duplicate: if calm { 0 } else { *rng.pick(&[0, 50, 200]) },
            delay_ms: *rng.pick(&[0, 2, 10, 80]),
            lane_loss: if calm { 0 } else { *rng.pick(&[0, 0, 5, 20, 60]) },
            fence_trouble: if calm { 0 } else { *rng.pick(&[0, 0, 30, 150]) },
            // A lease has to outlive a few heartbeats.
            lease_ms: *rng.pick(if calm { &[1_150, 3_333] } else { &[450, 1_150, 3_333] }),
            deadline_ms: *rng.pick(&[1_500, 3_000, 5_000]),
            unclaimed_ms: if calm { 1_000 } else { *rng.pick(&[100, 500]) },
            fence_ms: *rng.pick(&[60, 200]),
            rooms_max: if calm { 1_000 } else { *rng.pick(&[4, 30, 100, 100]) },
            queue_max: if calm { 1_000 } else { *rng.pick(&[1, 3, 100]) },
            orphans_max: *rng.pick(&[1, 3, 100, 100]),
            kept_tokens: rng.range(40, 120) as u32,
            reserves_at_once: !calm && rng.per_mille(500),
            job_gap_ms: if calm { 120 } else { *rng.pick(&[12, 30, 60, 120]) },
            mischief: if calm { 0 } else { *rng.pick(&[0, 150, 400]) },
            active_ns: rng.ms(1_000, 3_500),
        };
        let nr = rng.range(1, 2) as usize;
        let count = |of: &[Ranks]| of.iter().map(Vec::len).sum::<usize>();
        let (nd, np) = (count(&shapes.decodes), count(&shapes.prefills));
        let trigger = (!calm && rng.per_mille(350))
            .then(|| (rng.range(0, 2) as usize, rng.range(0, 7) as usize));
        let mut w = Self {
            now: 0,
            rng,
            prof,
            cov: Coverage::new(),
            trace,
            violation: None,
            hash: 0xcbf2_9ce4_8422_2325,
            heap: BinaryHeap::new(),
            seq: 0,
            hosts: Vec::new(),
            d: Vec::new(),
            p: Vec::new(),
            routers: nr,
            decodes: ranges(&shapes.decodes),
            prefills: ranges(&shapes.prefills),
            routes: shapes.routes,
            mems: Vec::new(),
            sessions: Vec::new(),
            conns: Vec::new(),
            jobs: Vec::new(),
            by_room: BTreeMap::new(),
            calls: BTreeMap::new(),
            next_call: 0,
            cuts: Vec::new(),
            rail_lost: BTreeSet::new(),
            bumped: BTreeSet::new(),
            decided: BTreeMap::new(),
            done_at: BTreeSet::new(),
            failed_at: BTreeMap::new(),
            said: BTreeMap::new(),
            promised: BTreeMap::new(),
            lease_over: BTreeSet::new(),
            expected: None,
            trigger,
            idle_since: None,
        };
        for (role, instances) in [(Role::Decode, shapes.decodes), (Role::Prefill, shapes.prefills)]
        {
            for (n, ranks) in instances.into_iter().enumerate() {
                for (rank, pools) in ranks.into_iter().enumerate() {
                    w.add_host(role, n, rank as u32, pools);
                }
            }
        }
        (0..nr).for_each(|n| w.add_host(Role::Router, n, 0, [].into()));
        for d in 0..nd {
            let node = w.new_decode(d);
            w.d.push(node);
        }
        for p in nd..nd + np {
            let node = w.new_prefill(p);
            w.p.push(node);
        }
        w.push(0, None, Ev::Spawn);
        if !calm {
            w.plan_faults();
        }
        w
    }

    fn add_host(&mut self, role: Role, instance: usize, rank: u32, pools: Arc<[Layout]>) {
        let name = format!("{}{instance}", role.as_str());
        let identity = Identity::new("c", role, &name, rank).unwrap();
        // Hours of skew, up to a hundredth of drift.
        let offset = self.rng.range(0, 40 * 3600) * SECOND;
        let ppm = self.rng.range(0, 20_000) as i64;
        let prompts = self.prof.kept_tokens / (TOKENS_MAX / 2);
        let geometry: Vec<_> = pools
            .iter()
            .enumerate()
            .map(|(n, layout)| {
                let blocks = match layout.kind {
                    KvKind::Rows { rows } => rows * prompts,
                    _ => layout.blocks_for(self.prof.kept_tokens),
                };
                Arc::new(Geometry::new(n, layout, blocks))
            })
            .collect();
        self.hosts.push(Host {
            identity,
            pools,
            maps: geometry.iter().map(|g| g.map.clone()).collect(),
            geometry,
            inc: 0,
            alive: true,
            stopped_until: 0,
            stood_ns: 0,
            offset,
            ppm: ppm - 10_000,
            armed: u64::MAX,
            timer: 0,
        });
    }

    fn new_decode(&mut self, d: usize) -> DNode {
        let base = self.rng.next();
        let host = &self.hosts[d];
        self.mems.push(Memory::new(&host.geometry));
        let mut config = DecodeConfig::new(host.pools.clone(), host.maps.clone(), base);
        config.lanes_per_room = self.prof.lanes_per_room;
        config.part_bytes = self.prof.part_bytes;
        config.grant_lease_ms = self.prof.lease_ms;
        config.room_deadline_ms = self.prof.deadline_ms;
        config.unclaimed_ms = self.prof.unclaimed_ms;
        config.fence_ms = self.prof.fence_ms;
        config.rooms_max = self.prof.rooms_max;
        config.queue_max = self.prof.queue_max;
        config.mutant = self.prof.mutant;
        let mut m = Decode::new(config);
        m.forge = Some(Fence);
        let mut grants = Grants::default();
        grants.trust_the_lane = self.prof.mutant == Mutant::NoGrantCheck;
        DNode {
            m,
            mem: self.mems.len() - 1,
            grants,
            open: BTreeMap::new(),
            rooms: BTreeMap::new(),
            quarantine: BTreeMap::new(),
            lanes: BTreeMap::new(),
            fences: 0,
            waiting: BTreeMap::new(),
        }
    }

    fn new_prefill(&mut self, node: usize) -> PNode {
        let seed = self.rng.next();
        let host = &self.hosts[node];
        self.mems.push(Memory::new(&host.geometry));
        let mut config = PrefillConfig::new(host.pools.clone(), host.maps.clone(), seed);
        config.room_deadline_ms = self.prof.deadline_ms;
        config.quiet_ms = self.prof.fence_ms;
        config.part_timeout_ms = 400;
        config.rooms_max = self.prof.rooms_max;
        if !self.prof.calm {
            config.orphans_max = self.prof.orphans_max;
        }
        config.mutant = self.prof.mutant;
        PNode {
            m: Prefill::new(config),
            mem: self.mems.len() - 1,
            rooms: BTreeMap::new(),
            plans: BTreeMap::new(),
            leases: BTreeMap::new(),
            posted: BTreeMap::new(),
            quieting: Vec::new(),
            quiet: BTreeSet::new(),
            refused: None,
        }
    }

    fn plan_faults(&mut self) {
        let workers = self.d.len() + self.p.len();
        for _ in 0..self.rng.range(0, 12) {
            let at = self.rng.range(0, self.prof.active_ns);
            let a = self.rng.range(0, workers as u64 - 1) as usize;
            let b = self.rng.range(0, workers as u64 - 1) as usize;
            let fault = match self.rng.range(0, 14) {
                0 | 1 => Fault::Crash { node: a },
                9 if self.rng.per_mille(200) => Fault::Drain { node: a },
                10 | 11 => Fault::Stop { node: a, ns: self.rng.ms(1, 600) },
                2 if self.routers > 1 => Fault::Crash { node: workers },
                3 | 4 => Fault::Stop { node: a, ns: self.rng.ms(1, 2_500) },
                5 if self.rng.per_mille(300) => {
                    // A router loses sight of a worker.
                    let r = self.rnode(0);
                    Fault::Cut { a, b: r, both: true, ns: self.rng.ms(5, 2_000) }
                }
                5 | 6 if a != b => {
                    let both = self.rng.per_mille(500);
                    Fault::Cut { a, b, both, ns: self.rng.ms(5, 2_000) }
                }
                7 | 8 => {
                    let n = self.rng.range(0, 1000) as usize;
                    Fault::RailLoss { n, ns: self.rng.ms(1, 3_000) }
                }
                _ => Fault::LaneLoss { n: self.rng.range(0, 1000) as usize },
            };
            self.push(at, None, Ev::Fault(fault));
        }
    }

    // ---- nodes ----------------------------------------------------------------------------

    pub(crate) fn pnode(&self, p: usize) -> usize {
        self.d.len() + p
    }
    pub(crate) fn rnode(&self, r: usize) -> usize {
        self.d.len() + self.p.len() + r
    }
    pub(crate) fn local(&self, node: usize) -> Time {
        self.hosts[node].local(self.now)
    }
    pub(crate) fn fails(&mut self, inv: Inv, what: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(Violation { inv, what: what(), at_ns: self.now });
        }
    }
    pub(crate) fn note(&mut self, what: impl FnOnce() -> String) {
        if self.trace {
            println!("{:>13.6}   {}", self.now as f64 / 1e6, what());
        }
    }
    pub(crate) fn quiet_period(&self) -> bool {
        self.now >= self.prof.active_ns
    }

    // ---- events ---------------------------------------------------------------------------

    pub(crate) fn push(&mut self, at: u64, node: Option<usize>, ev: Ev) {
        let guard = node.map(|n| (n, self.hosts[n].inc));
        self.push_for(at, guard, ev);
    }
    /// Something for one start of a process, which may be over already.
    pub(crate) fn push_for(&mut self, at: u64, guard: Option<(usize, u32)>, ev: Ev) {
        self.seq += 1;
        self.heap.push(Reverse(Item { at: at.max(self.now), seq: self.seq, guard, ev }));
    }
    pub(crate) fn after(&mut self, lo_ms: u64, hi_ms: u64) -> u64 {
        self.now + self.rng.ms(lo_ms, hi_ms)
    }

    /// Runs to the end; says what was broken, if anything.
    pub(crate) fn run(&mut self) -> Option<Violation> {
        let limit = self.prof.active_ns + 40 * SECOND;
        let mut checked = false;
        while let Some(Reverse(item)) = self.heap.pop() {
            if let Some((node, inc)) = item.guard {
                let host = &self.hosts[node];
                if !host.alive || host.inc != inc {
                    continue;
                }
                if host.stopped_until > item.at {
                    // A process that stands still finds everything when it goes on, in order.
                    let at = host.stopped_until;
                    self.push_for(at, item.guard, item.ev);
                    continue;
                }
            }
            self.now = item.at;
            self.cov.events += 1;
            self.mix(item.at ^ item.seq << 40);
            if self.trace && !matches!(item.ev, Ev::Step { .. }) {
                println!("{:>13.6} {:?}", self.now as f64 / 1e6, item.ev);
            }
            self.dispatch(item.ev);
            if let Some((node, _)) = item.guard {
                self.rearm(node);
            }
            if self.violation.is_none() && self.quiet_period() && self.cov.events >= EVENTS_MIN {
                // Lanes that were lost come back first.
                match (self.idle(), self.idle_since) {
                    (true, None) => self.idle_since = Some(self.now),
                    (true, Some(since)) if self.now > since + SETTLE => {
                        self.check_end();
                        checked = true;
                        break;
                    }
                    (true, _) => {}
                    (false, _) => self.idle_since = None,
                }
                if self.idle_since.is_none() && (self.now > limit || self.cov.events > EVENTS_MAX) {
                    let why = self.what_is_busy();
                    self.fails(Inv::Quiescent, || why);
                }
            }
            if self.violation.is_some() {
                break;
            }
        }
        // Where no link is left, nothing happens any more at some point.
        if !checked && self.violation.is_none() {
            let goes_on = self.hosts.iter().map(|h| h.stopped_until).max().unwrap_or(0);
            self.now = self.now.max(goes_on) + 1;
            if self.idle() {
                self.check_end();
            } else {
                let why = self.what_is_busy();
                self.fails(Inv::Quiescent, || why);
            }
        }
        self.violation.take()
    }

    /// Forgets what was planned.
    pub(crate) fn clear(&mut self) {
        self.heap.clear();
    }
    /// The next thing that happens before `until`, for whoever plays without machines.
    pub(crate) fn next_before(&mut self, until: u64) -> Option<Ev> {
        if self.heap.peek().is_none_or(|Reverse(item)| item.at >= until) {
            self.now = until;
            return None;
        }
        let Reverse(item) = self.heap.pop()?;
        self.now = item.at;
        Some(item.ev)
    }

    pub(crate) fn mix(&mut self, value: u64) {
        self.hash = (self.hash ^ value).wrapping_mul(0x0100_0000_01b3).rotate_left(17);
    }

    pub(crate) fn dispatch(&mut self, ev: Ev) {
        match ev {
            Ev::Timer { node, id } if id == self.hosts[node].timer => self.timer(node),
            // Another was set since.
            Ev::Timer { .. } => {}
            Ev::Boot { node } => self.boot(node),
            Ev::Thaw { node } => self.thaw(node),
            Ev::Fault(f) => self.fault(f),
            Ev::Spawn => self.spawn(),
            Ev::Open { sid } => self.session_opens(sid),
            Ev::Local { sid, side } => self.engine_is_ready(sid, side),
            Ev::Frame { sid, side, frame } => self.frame_arrives(sid, side, *frame),
            Ev::Closed { sid, side } => self.session_closed(sid, side),
            Ev::Suspect { sid, side } => self.suspect(sid, side),
            Ev::LinkFailed { d, peer, why } => {
                let peer = self.hosts[peer].identity.clone();
                self.decode(d, DEvent::LinkFailed { peer, why: *why });
            }
            Ev::Call { d, call, router, body } => self.call_arrives(d, call, router, *body),
            Ev::CallGone { d, call } => {
                self.d[d].waiting.remove(&call);
                self.decode(d, DEvent::CallGone(CallId(call)));
            }
            Ev::Reply { call, reply } => self.reply_arrives(call, *reply),
            Ev::Lane { sid, side, lane, up } => self.lane_changes(sid, side, LaneId(lane), up),
            Ev::Ack { conn, grant, part, ok } => self.ack_arrives(conn, grant, part, ok),
            Ev::Decode { d, ev } => self.decode_event(d, *ev),
            Ev::Prefill { p, ev } => self.prefill(p, *ev),
            Ev::Step { conn } => self.step(conn),
            Ev::End { conn, side } => self.end_of_conn(conn, side),
            Ev::Redial { sid, lane } => self.redial(sid, lane),
            Ev::FenceDone { d, grant, how } => self.fence_done(d, grant, how),
            Ev::FenceFails { d, grant } => self.fence_fails(d, grant),
            Ev::QuietCheck { p } => self.quiet_check(p),
            Ev::Job { job, act } => self.act(job, act),
            Ev::Lend { d, job, bad, tries } => self.decode_leg(d, job, bad, tries),
            Ev::Attach { p, job, tries } => self.prefill_leg(p, job, tries),
            Ev::Chunk { p, room } => self.next_chunk(p, room),
        }
    }

    fn timer(&mut self, node: usize) {
        self.hosts[node].armed = u64::MAX;
        let now = self.local(node);
        let side = usize::from(node >= self.d.len());
        for sid in 0..self.sessions.len() {
            let s = &mut self.sessions[sid];
            if s.node(side) == node && s.open[side] {
                s.link[side].as_mut().unwrap().handle_timeout(now);
                self.drain_link(sid, side);
            }
        }
        if node < self.d.len() {
            self.d[node].m.handle_timeout(now);
            self.drain_decode(node);
        } else if node < self.d.len() + self.p.len() {
            let p = node - self.d.len();
            self.p[p].m.handle_timeout(now);
            self.drain_prefill(p);
        }
    }

    /// A process notices that it stood still, before it does anything else.
    fn thaw(&mut self, node: usize) {
        self.cov.hit(C::Thaw, 0);
        let now = self.local(node);
        let side = usize::from(node >= self.d.len());
        for s in self.sessions.iter_mut().filter(|s| s.node(side) == node && s.open[side]) {
            s.link[side].iter_mut().for_each(|l| l.stood_still(now));
        }
        if side == 0 {
            self.d[node].m.stood_still(now);
        } else {
            let p = node - self.d.len();
            self.p[p].m.stood_still(now);
        }
    }

    /// Asks the machines of a node when they want to be called, and sees to it.
    pub(crate) fn rearm(&mut self, node: usize) {
        if node >= self.d.len() + self.p.len() || !self.hosts[node].alive {
            return;
        }
        let side = usize::from(node >= self.d.len());
        let mut next = if side == 0 {
            self.d[node].m.poll_timeout()
        } else {
            self.p[node - self.d.len()].m.poll_timeout()
        };
        for s in self.sessions.iter().filter(|s| s.node(side) == node && s.open[side]) {
            let t = s.link[side].as_ref().and_then(|l| l.poll_timeout());
            next = next.into_iter().chain(t).min();
        }
        let Some(next) = next else { return };
        let host = &self.hosts[node];
        let mut at = host.when(next).max(self.now);
        if at < host.armed {
            // A timer may be late, never early.
            if self.rng.per_mille(100) {
                at += self.rng.ms(0, 4);
            }
            self.hosts[node].armed = at;
            self.hosts[node].timer += 1;
            let id = self.hosts[node].timer;
            self.push(at, Some(node), Ev::Timer { node, id });
        }
    }

    /// Gives a decode worker an event, and does what it wants.
    pub(crate) fn decode(&mut self, d: usize, ev: DEvent) {
        let now = self.local(d);
        self.d[d].m.handle_event(now, ev);
        self.drain_decode(d);
    }
    /// Gives a prefill worker an event, and does what it wants.
    pub(crate) fn prefill(&mut self, p: usize, ev: PEvent) {
        let now = self.local(self.pnode(p));
        self.p[p].m.handle_event(now, ev);
        self.drain_prefill(p);
    }

    // ---- faults ---------------------------------------------------------------------------

    /// A room of a decode worker came into a phase (an index of [`PHASES`]).
    pub(crate) fn phase(&mut self, d: usize, room: RoomId, phase: usize) {
        let Some(r) = self.d[d].rooms.get_mut(&room) else { return };
        r.phase = r.phase.max(phase);
        if let Some((role, want)) = self.trigger
            && want == phase
            && self.now < self.prof.active_ns
            && self.rng.per_mille(400)
        {
            self.trigger = None;
            let Some(&job) = self.by_room.get(&room) else { return };
            let node = match role {
                0 => d,
                1 => {
                    let at = self.rng.range(0, self.jobs[job].ps.len() as u64 - 1) as usize;
                    self.pnode(self.jobs[job].ps[at])
                }
                _ => self.rnode(self.jobs[job].router),
            };
            let at = self.now + self.rng.range(0, 400_000);
            self.push(at, None, Ev::Fault(Fault::Crash { node }));
        }
    }

    fn fault(&mut self, fault: Fault) {
        match fault {
            Fault::Crash { node } if self.hosts[node].alive => self.crash(node),
            Fault::Crash { .. } => {}
            Fault::Stop { node, ns } => {
                self.cov.hit(C::Stop, 0);
                let host = &mut self.hosts[node];
                host.stopped_until = host.stopped_until.max(self.now + ns);
                host.stood_ns += ns;
                if self.rng.per_mille(500) {
                    self.push(self.now + ns, Some(node), Ev::Thaw { node });
                }
            }
            Fault::Cut { a, b, both, ns } => {
                self.cov.hit(if both { C::Partition } else { C::OneWay }, 0);
                self.cuts.push((a, b, self.now + ns));
                if both {
                    self.cuts.push((b, a, self.now + ns));
                }
            }
            Fault::Drain { node } if self.hosts[node].alive => {
                self.cov.hit(C::Drain, 0);
                if node < self.d.len() {
                    self.decode(node, DEvent::Drain);
                } else {
                    self.prefill(node - self.d.len(), PEvent::Drain);
                }
                self.rearm(node);
            }
            Fault::Drain { .. } => {}
            Fault::LaneLoss { n } => {
                let alive: Vec<usize> =
                    (0..self.conns.len()).filter(|&c| self.conns[c].alive[1]).collect();
                if !alive.is_empty() {
                    self.lose_lane(alive[n % alive.len()]);
                }
            }
            Fault::RailLoss { n, ns } => {
                let one_sided = |c: &Conn| self.sessions[c.sid].kind == Kind::OneSided;
                let alive: Vec<&Conn> =
                    self.conns.iter().filter(|c| c.alive[1] && one_sided(c)).collect();
                if let Some(c) = alive.get(n % alive.len().max(1)) {
                    let (sid, lane) = (c.sid, LaneId(c.lane));
                    // In the end all of them work.
                    let until = (self.now + ns).min(self.prof.active_ns);
                    self.lose_rail(sid, lane, until);
                }
            }
        }
    }

    fn crash(&mut self, node: usize) {
        let (nd, np) = (self.d.len(), self.p.len());
        let role = if node < nd { 0 } else { usize::from(node >= nd + np) + 1 };
        // In which phases are the rooms that this node has to do with?
        let mut any = false;
        for d in 0..nd {
            for (room, r) in &self.d[d].rooms {
                let Some(&job) = self.by_room.get(room) else { continue };
                let job = &self.jobs[job];
                let concerns = match role {
                    0 => d == node,
                    1 => job.ps.contains(&(node - nd)),
                    _ => job.router == node - nd - np,
                };
                if concerns {
                    for kind in self.kinds(r.sids()) {
                        self.cov.crash(role, r.phase, kind);
                    }
                    any |= r.phase != 7;
                }
            }
        }
        if !any {
            self.cov.crash(role, 0, 0);
        }
        self.note(|| format!("node {node} crashes; phases {PHASES:?}"));
        self.hosts[node].alive = false;
        self.hosts[node].stopped_until = 0;
        if role == 2 {
            // Its calls are gone; nobody asks for its rooms any more.
            let gone: Vec<u64> = self
                .calls
                .iter()
                .filter(|(_, c)| self.rnode(self.jobs[c.1].router) == node)
                .map(|(&id, _)| id)
                .collect();
            for call in gone {
                if let Some((d, ..)) = self.calls.remove(&call) {
                    let at = self.after(0, 50);
                    self.push(at, Some(d), Ev::CallGone { d, call });
                }
            }
            return;
        }
        self.node_vanishes(node, role);
        let at = self.after(1, 1_500);
        self.push(at, None, Ev::Boot { node });
    }

    fn boot(&mut self, node: usize) {
        self.cov.hit(C::Restart, 0);
        let host = &mut self.hosts[node];
        host.inc += 1;
        host.alive = true;
        host.armed = u64::MAX;
        host.stood_ns = 0;
        if node < self.d.len() {
            self.d[node] = self.new_decode(node);
        } else {
            let p = node - self.d.len();
            self.p[p] = self.new_prefill(node);
        }
    }

    // ---- the end --------------------------------------------------------------------------

    fn idle(&self) -> bool {
        let (nd, np) = (self.d.len(), self.p.len());
        self.jobs.iter().all(|j| j.over)
            && self.hosts[..nd + np].iter().all(|h| h.alive && h.stopped_until < self.now)
            && self.d.iter().all(|d| d.m.active() == 0 && d.fences == 0)
            && self.p.iter().all(|p| p.m.active() == 0 && p.quieting.is_empty())
            && self.sessions.iter().all(|s| !s.opening)
    }

    fn what_is_busy(&self) -> String {
        let d: Vec<_> = self
            .d
            .iter()
            .map(|d| {
                let open: Vec<_> = d.rooms.iter().filter(|(_, r)| r.phase != 7).collect();
                (d.m.active(), d.fences, open)
            })
            .collect();
        let p: Vec<_> = self
            .p
            .iter()
            .map(|p| {
                let open: Vec<_> =
                    p.rooms.iter().filter(|(_, r)| r.attached && r.ended.is_none()).collect();
                (p.m.active(), &p.quieting, open)
            })
            .collect();
        let jobs = self.jobs.iter().filter(|j| !j.over).count();
        format!("not idle in the end: decode {d:?}, prefill {p:?}, {jobs} jobs")
    }

    /// Everything balances.
    fn check_end(&mut self) {
        for d in 0..self.d.len() {
            let node = &self.d[d];
            let load = node.m.load();
            let mut bad = Vec::new();
            let mut withheld = 0;
            for (n, pool) in self.mems[node.mem].0.iter().enumerate() {
                let here: usize = node.quarantine.values().map(|ids| ids[n].len()).sum();
                withheld += here;
                if pool.free() + here != pool.blocks.len() || pool.withheld() != here {
                    bad.push(format!("pool {n}: blocks {:?}, withheld {here}", pool.blocks));
                }
                if let Some(word) = pool.broken_canary() {
                    bad.push(format!("pool {n}: canary of word {word} is gone"));
                }
            }
            if load.quarantined_blocks as usize != withheld {
                bad.push(format!("load {load:?}, withheld {withheld}"));
            }
            if node.open.len() != node.quarantine.len() || node.grants.len() > node.open.len() {
                bad.push(format!(
                    "open grants {:?}, quarantine {:?}",
                    node.open.keys(),
                    node.quarantine
                ));
            }
            if !node.waiting.is_empty() {
                bad.push(format!("calls without an answer: {:?}", node.waiting));
            }
            if node.m.lent_lanes().next().is_some() {
                bad.push("lanes are still lent".into());
            }
            if node.quarantine.is_empty() {
                let up: usize = node.lanes.keys().map(|l| self.lanes_up(l.0 as usize, 0)).sum();
                if load.free_lanes as usize != up {
                    bad.push(format!("{} lanes are free, {up} are up", load.free_lanes));
                }
            }
            for (room, r) in &node.rooms {
                if r.began() && r.phase != 7 {
                    bad.push(format!("room {room} never ended: {r:?}"));
                }
            }
            if !bad.is_empty() {
                self.fails(Inv::BlocksBalance, || format!("decode {d}: {}", bad.join("; ")));
            }
        }
        for p in 0..self.p.len() {
            let node = &self.p[p];
            let mut bad = Vec::new();
            // The toy engine always becomes quiet in the end, so nothing stays withheld.
            let withheld = node.m.load().quarantined_blocks;
            for (n, pool) in self.mems[node.mem].0.iter().enumerate() {
                if pool.free() != pool.blocks.len() || withheld > 0 {
                    bad.push(format!("pool {n}: blocks {:?}, withheld {withheld}", pool.blocks));
                }
                if let Some(word) = pool.broken_canary() {
                    bad.push(format!("pool {n}: canary of word {word} is gone"));
                }
            }
            for (room, r) in &node.rooms {
                if r.attached && r.ended.is_none() {
                    bad.push(format!("room {room} never ended: {r:?}"));
                }
            }
            if !bad.is_empty() {
                self.fails(Inv::BlocksBalance, || format!("prefill {p}: {}", bad.join("; ")));
            }
        }
    }
}

/// The ranks of each instance, where all stand in a row.
fn ranges(instances: &[Ranks]) -> Vec<Range<usize>> {
    let mut next = 0;
    let each = instances.iter().map(|ranks| {
        next += ranks.len();
        next - ranks.len()..next
    });
    each.collect()
}
