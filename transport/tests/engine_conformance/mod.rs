//! What every engine must do, whoever moves its bytes.
//!
//! Two engines in one process, polled by hand, so that a test can stop one of them anywhere. An
//! engine's own test calls [`run`] with a way to make a couple of them.
#![allow(dead_code)]

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane_proto::layout::{Coordinates, Dtype, KvKind, Order};
use kvlane_proto::plan::{Blocks, Share, Side, Span};
use kvlane_proto::{
    BlockList, DataPath, Device, ErrorKind, GrantId, Identity, Incarnation, LaneId, Layout, LinkId,
    PartId, Plan, PoolMap, Role, Time, WorkerKey,
};
use kvlane_transport::clock::now;
use kvlane_transport::engine::{
    Command, Engine, EngineEvent, FenceHow, OpenGrant, OpenSource, Post, SendGrant,
};
use kvlane_transport::memory::Region;

pub mod nics;
pub mod one_sided;

pub const CANARY: u8 = 0xc5;
pub const LINK: LinkId = LinkId(1);
/// Real time after which a test that waits for something has failed.
pub const PATIENCE: Duration = Duration::from_secs(30);

pub fn layout(page_bytes: u32, layers: u32, kind: KvKind) -> Layout {
    let mut page_tokens = page_bytes.div_ceil(1 << 16);
    while !page_bytes.is_multiple_of(page_tokens) {
        page_tokens += 1;
    }
    let layout = Layout {
        model: "test".into(),
        layers,
        first_layer: 0,
        kv_heads: 1,
        kv_heads_total: 1,
        head_dim: page_bytes / page_tokens,
        dtype: Dtype::Fp8E4m3,
        page_tokens,
        window_tokens: 0,
        order: Order::Nhd,
        kind,
        at: Coordinates::SINGLE,
    };
    layout.check().unwrap();
    assert_eq!(layout.page_bytes(), page_bytes);
    layout
}

pub fn peer(role: Role) -> WorkerKey {
    WorkerKey {
        identity: Identity::new("c", role, "i", 0).unwrap(),
        incarnation: Incarnation([role as u8; 16]),
    }
}

/// Small and good enough to make tests differ.
pub struct Rng(pub u64);
impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    /// `n` different numbers below `below`.
    pub fn distinct(&mut self, n: usize, below: u32) -> Vec<u32> {
        let mut seen = HashSet::new();
        let mut out = Vec::new();
        while out.len() < n {
            let id = (self.next() % u64::from(below)) as u32;
            if seen.insert(id) {
                out.push(id);
            }
        }
        out
    }
}

/// A registered pool.
pub struct Pool {
    pub region: Arc<Region>,
    pub layout: Layout,
    pub map: Arc<PoolMap>,
}

impl Pool {
    pub fn new(layout: &Layout, blocks: u32) -> Self {
        let bytes = PoolMap::contiguous_bytes(layout, blocks);
        // Memory that a NIC of another process may write; the others can use it as well.
        let region = Region::for_nic_sparse(bytes).unwrap();
        let map = PoolMap::contiguous(Device::Host, region.address(), layout, blocks);
        map.check(layout).unwrap();
        Self { region, layout: layout.clone(), map: Arc::new(map) }
    }
    /// The same, in memory that has no descriptor.
    pub fn foreign(self) -> Self {
        let region = Region::private(self.region.bytes()).unwrap();
        let blocks = self.map.blocks;
        let map = PoolMap::contiguous(Device::Host, region.address(), &self.layout, blocks);
        Self { region, map: Arc::new(map), layout: self.layout }
    }
    pub fn plan(&self, ids: &[u32], part_bytes: u64) -> Arc<Plan> {
        let tokens = ids.len() as u32 * self.layout.page_tokens;
        let list = BlockList::from_ids(ids);
        Arc::new(Plan::alike(&self.layout, self.map.clone(), tokens, &list, part_bytes).unwrap())
    }
    /// The same as the sender has it.
    pub fn source(&self, ids: &[u32], part_bytes: u64) -> Arc<Plan> {
        let tokens = ids.len() as u32 * self.layout.page_tokens;
        let pools = std::slice::from_ref(&self.layout);
        let span = Span { tokens, prefix_tokens: 0 };
        let blocks = Blocks::new(self.map.clone(), 0, ids.into()).unwrap();
        let share = Arc::new(Share::between(pools, pools).unwrap());
        let blocks = vec![blocks].into();
        Arc::new(Plan::new(share, Side::Source, &span, part_bytes, blocks).unwrap())
    }
    pub fn fill(&self, value: u8) {
        self.region.memory().fill(0, self.region.bytes(), value).unwrap();
    }
    pub fn write(&self, address: u64, bytes: &[u8]) {
        self.region.memory().write_at(address - self.region.address(), bytes).unwrap();
    }
    pub fn read(&self, address: u64, bytes: usize) -> Vec<u8> {
        let mut out = vec![0; bytes];
        self.region.memory().read_at(address - self.region.address(), &mut out).unwrap();
        out
    }
    /// Every byte that is not the canary.
    pub fn touched(&self) -> usize {
        let all = self.read(self.region.address(), self.region.bytes() as usize);
        all.iter().filter(|&&b| b != CANARY).count()
    }
}

/// All pages of a plan in wire order: addresses.
pub fn addresses(plan: &Plan) -> Vec<u64> {
    let mut out = Vec::new();
    for part in 0..plan.grid().parts() {
        let pages = plan.pages(PartId(part)).unwrap();
        let step = pages.cell_bytes() as usize;
        for page in pages.iter() {
            out.extend((page.address..page.address + u64::from(page.bytes)).step_by(step));
        }
    }
    out
}

/// One turn of an engine: it hears what its peer said, and what it says is on its way.
fn turn(
    now: Time,
    engine: &mut dyn Engine,
    told: &mut VecDeque<Command>,
    said: &mut Vec<EngineEvent>,
    tells: &mut VecDeque<Command>,
) -> bool {
    let heard = !told.is_empty();
    told.drain(..).for_each(|command| engine.command(now, command));
    let mut events = Vec::new();
    let moved = engine.poll(now, &mut events);
    for event in events {
        match event {
            EngineEvent::Tell { link, message } => {
                tells.push_back(Command::Told { link, message });
            }
            other => said.push(other),
        }
    }
    moved || heard
}

/// Two engines and what they said.
pub struct Pair {
    pub tx: Box<dyn Engine>,
    pub rx: Box<dyn Engine>,
    pub from_tx: Vec<EngineEvent>,
    pub from_rx: Vec<EngineEvent>,
    /// What the engines say to each other and the link has not brought yet.
    pub to_tx: VecDeque<Command>,
    pub to_rx: VecDeque<Command>,
    /// Added to the clock.
    pub skip_ms: u64,
    /// The clock stands still, so that no deadline passes.
    pub frozen: Option<Time>,
}

impl Pair {
    pub fn new((tx, rx): (Box<dyn Engine>, Box<dyn Engine>)) -> Self {
        let (to_tx, to_rx) = (VecDeque::new(), VecDeque::new());
        Self { tx, rx, from_tx: vec![], from_rx: vec![], to_tx, to_rx, skip_ms: 0, frozen: None }
    }
    pub fn is_one_sided(&self) -> bool {
        self.tx.caps().path == DataPath::OneSided
    }
    pub fn now(&self) -> Time {
        self.frozen.unwrap_or_else(now).plus_ms(self.skip_ms)
    }
    pub fn tell_tx(&mut self, command: Command) {
        self.tx.command(self.now(), command);
    }
    pub fn tell_rx(&mut self, command: Command) {
        self.rx.command(self.now(), command);
    }
    pub fn poll_tx(&mut self) -> bool {
        let now = self.now();
        turn(now, &mut *self.tx, &mut self.to_tx, &mut self.from_tx, &mut self.to_rx)
    }
    pub fn poll_rx(&mut self) -> bool {
        let now = self.now();
        turn(now, &mut *self.rx, &mut self.to_rx, &mut self.from_rx, &mut self.to_tx)
    }
    pub fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let started = Instant::now();
        while !done(self) {
            let moved = self.poll_tx() | self.poll_rx();
            if !moved {
                std::thread::yield_now();
            }
            assert!(
                started.elapsed() < PATIENCE,
                "no {what}; sender said {:?}, receiver said {:?}",
                self.from_tx,
                self.from_rx
            );
        }
    }
    /// Until neither moves for a while, so that what could still land has landed.
    pub fn settle(&mut self) {
        let mut quiet = 0;
        while quiet < 200 {
            quiet = if self.poll_tx() | self.poll_rx() { 0 } else { quiet + 1 };
            std::thread::yield_now();
        }
    }
    pub fn connect(&mut self, lanes: u16) {
        let listen = |receiver| Command::Listen {
            link: LINK,
            peer: peer(if receiver { Role::Prefill } else { Role::Decode }),
            lanes,
            receiver,
        };
        self.tell_tx(listen(false));
        self.tell_rx(listen(true));
        self.until("blobs", |p| !p.from_tx.is_empty() && !p.from_rx.is_empty());
        self.exchange();
        self.until("lanes", |p| {
            let up = |events: &[EngineEvent]| {
                events.iter().filter(|e| matches!(e, EngineEvent::LaneUp { .. })).count()
            };
            up(&p.from_tx) == usize::from(lanes) && up(&p.from_rx) == usize::from(lanes)
        });
        self.clear();
    }
    /// Hands each engine the other's blob.
    pub fn exchange(&mut self) {
        let blob = |events: &mut Vec<EngineEvent>| match events.remove(0) {
            EngineEvent::Local { blob, .. } => blob.unwrap(),
            other => panic!("{other:?}"),
        };
        let (of_tx, of_rx) = (blob(&mut self.from_tx), blob(&mut self.from_rx));
        self.tell_tx(Command::Connect { link: LINK, remote: of_rx });
        self.tell_rx(Command::Connect { link: LINK, remote: of_tx });
    }
    pub fn clear(&mut self) {
        self.from_tx.clear();
        self.from_rx.clear();
    }
    /// Opens a grant on the first `lanes` lanes.
    pub fn open(&mut self, grant: u64, lanes: u16, plan: &Arc<Plan>) {
        self.open_on(grant, &(0..lanes).collect::<Vec<_>>(), plan);
    }
    /// Opens a grant on some lanes, and gives it to a sender that writes the pages itself.
    pub fn open_on(&mut self, grant: u64, lanes: &[u16], plan: &Arc<Plan>) {
        let (grant, plan) = (GrantId(grant), plan.clone());
        let lanes: Vec<_> = lanes.iter().copied().map(LaneId).collect();
        let source = OpenSource { link: LINK, lanes: lanes.clone(), plan: plan.clone() };
        self.tell_rx(Command::Open(OpenGrant { grant, sources: vec![source] }));
        if self.is_one_sided() {
            self.tell_tx(Command::Grant(SendGrant { link: LINK, grant, lanes, plan }));
        }
    }
    pub fn post(&mut self, grant: u64, part: u32, lane: u16, plan: &Plan) {
        let pages = plan.pages(PartId(part)).unwrap();
        self.tell_tx(Command::Post(Post {
            link: LINK,
            grant: GrantId(grant),
            part: PartId(part),
            lane: LaneId(lane),
            pages,
        }));
    }
    pub fn acked(&self) -> usize {
        self.from_tx.iter().filter(|e| matches!(e, EngineEvent::Acked { .. })).count()
    }
    /// Why parts were refused, in order.
    pub fn nacked(&self) -> Vec<ErrorKind> {
        self.from_tx
            .iter()
            .filter_map(|e| match e {
                EngineEvent::Nacked { why, .. } => Some(why.kind),
                _ => None,
            })
            .collect()
    }
    /// Posts every part, a few at a time, over all lanes, until all are acknowledged.
    pub fn send_all(&mut self, grant: u64, lanes: u16, plan: &Plan) {
        self.send_on(grant, &(0..lanes).collect::<Vec<_>>(), plan);
    }
    /// The same, over some lanes.
    pub fn send_on(&mut self, grant: u64, lanes: &[u16], plan: &Plan) {
        let parts = plan.grid().parts();
        let mut next = 0;
        let base = self.acked();
        self.until("acks", |p| {
            let acked = p.acked() - base;
            while next < parts && (next as usize) < acked + 4 * lanes.len() {
                p.post(grant, next, lanes[next as usize % lanes.len()], plan);
                next += 1;
            }
            assert_eq!(p.nacked(), [], "nothing is refused");
            acked == parts as usize
        });
        let arrived = |p: &Self| {
            let of = |e: &&EngineEvent| matches!(e, EngineEvent::Arrived { grant: g, .. } if g.0 == grant);
            p.from_rx.iter().filter(of).count()
        };
        // Who writes into the receiver's memory may know before the receiver does.
        self.until("arrivals", |p| arrived(p) >= parts as usize);
        let mut arrived: Vec<u32> = self
            .from_rx
            .iter()
            .filter_map(|e| match e {
                EngineEvent::Arrived { grant: g, part, .. } if g.0 == grant => Some(part.0),
                _ => None,
            })
            .collect();
        arrived.sort_unstable();
        assert_eq!(arrived, (0..parts).collect::<Vec<_>>(), "each part arrives once");
    }
    pub fn fence(&mut self, grant: u64, how: FenceHow) {
        self.tell_rx(Command::Fence { grant: GrantId(grant), how });
        self.until("proof", |p| {
            p.from_rx.iter().any(
                |e| matches!(e, EngineEvent::Fenced(f) if f.grant().0 == grant && f.how() == how),
            )
        });
    }
}

/// Links the two, as far as what they say to each other first.
pub fn listen(p: &mut Pair, lanes: u16) {
    for receiver in [true, false] {
        let peer = peer(if receiver { Role::Prefill } else { Role::Decode });
        let listen = Command::Listen { link: LINK, peer, lanes, receiver };
        if receiver { p.tell_rx(listen) } else { p.tell_tx(listen) }
    }
    p.until("blobs", |p| !p.from_tx.is_empty() && !p.from_rx.is_empty());
    p.exchange();
}

pub type Make<'a> = &'a dyn Fn() -> (Box<dyn Engine>, Box<dyn Engine>);

/// The rules for engines that push: those for all, and those of who moves the bytes.
pub fn run(make: Make<'_>) {
    offsets_beyond_4_gib(make);
    run_with_small_pools(make);
}

/// The same, where every page of a pool is pinned.
pub fn run_with_small_pools(make: Make<'_>) {
    pages_land_exactly(make);
    a_grant_without_parts_fences(make);
    a_quiet_grant_quiesces(make);
    a_lane_takes_no_more_than_it_may(make);
    memory_is_known_or_refused(make);
    match make().0.caps().path {
        DataPath::OneSided => one_sided::run(make),
        _ => {
            foreign_numbers_change_nothing(make);
            nothing_lands_after_the_proof(make);
        }
    }
}

/// Random block lists of odd page sizes: every page is the sender's, every other byte untouched.
fn pages_land_exactly(make: Make<'_>) {
    let mut rng = Rng(0x9e37_79b9_7f4a_7c15);
    for (page_bytes, layers, kind, lanes, part_bytes) in [
        (1, 3, KvKind::Split, 1, 7),
        (63, 3, KvKind::Mla, 2, 1000),
        (511, 2, KvKind::Split, 1, 1 << 14),
        (512, 2, KvKind::Split, 2, 1 << 14),
        (4095, 3, KvKind::Split, 3, 1 << 16),
        (4097, 3, KvKind::Split, 1, 4097),
        (70_000, 3, KvKind::Mla, 2, 1 << 20),
        ((1 << 20) - 1, 1, KvKind::Mla, 1, 1 << 20),
        ((1 << 20) + 1, 1, KvKind::Mla, 2, 3 << 20),
    ] {
        let l = layout(page_bytes, layers, kind);
        let (src, dst) = (Pool::new(&l, 64), Pool::new(&l, 50));
        dst.fill(CANARY);
        let mut p = Pair::new(make());
        p.tx.register(&src.region).unwrap();
        p.rx.register(&dst.region).unwrap();
        p.connect(lanes);
        let n = 20 + (rng.next() % 20) as usize;
        let from = src.source(&rng.distinct(n, 64), part_bytes);
        let to = dst.plan(&rng.distinct(n, 50), part_bytes);
        for address in addresses(&from) {
            let bytes: Vec<u8> = (0..page_bytes).map(|_| (rng.next() >> 32) as u8).collect();
            src.write(address, &bytes);
        }
        p.open(7, lanes, &to);
        p.send_all(7, lanes, &from);
        let size = page_bytes as usize;
        let (from, to) = (addresses(&from), addresses(&to));
        assert_eq!(from.len(), n * l.pages_per_block() as usize);
        for (i, (&s, &d)) in from.iter().zip(&to).enumerate() {
            assert!(src.read(s, size) == dst.read(d, size), "page {i} of {page_bytes} bytes");
        }
        for address in &to {
            dst.write(*address, &vec![CANARY; size]);
        }
        assert_eq!(dst.touched(), 0, "bytes between the pages were written");
        p.fence(7, FenceHow::Close);
    }
}

/// Addresses are 64 bits all the way: a sparse pool of 6 GiB.
fn offsets_beyond_4_gib(make: Make<'_>) {
    let l = layout(4096, 1, KvKind::Mla);
    let blocks = (6u64 << 30) / 4096;
    let (src, dst) = (Pool::new(&l, blocks as u32), Pool::new(&l, blocks as u32));
    let mut p = Pair::new(make());
    p.tx.register(&src.region).unwrap();
    p.rx.register(&dst.region).unwrap();
    p.connect(1);
    let ids = [0, (1 << 20) - 1, 1 << 20, (1 << 20) + 77, blocks as u32 - 1, 12_345];
    let shifted: Vec<u32> = ids.iter().map(|&i| (i + (1 << 20)) % blocks as u32).collect();
    let (from, to) = (src.source(&ids, 3 * 4096), dst.plan(&shifted, 3 * 4096));
    let targets = addresses(&to);
    for (i, (s, &d)) in addresses(&from).into_iter().zip(&targets).enumerate() {
        src.write(s, &[i as u8 + 1; 4096]);
        for around in [d - 4096, d, d + 4096] {
            if dst.region.contains(Device::Host, around, 4096) {
                dst.write(around, &[CANARY; 4096]);
            }
        }
    }
    p.open(1, 1, &to);
    p.send_all(1, 1, &from);
    for (i, &d) in targets.iter().enumerate() {
        assert_eq!(dst.read(d, 4096), [i as u8 + 1; 4096]);
        for around in [d - 4096, d + 4096] {
            let inside = dst.region.contains(Device::Host, around, 4096);
            if inside && !targets.contains(&around) {
                assert_eq!(dst.read(around, 4096), [CANARY; 4096]);
            }
        }
    }
}

fn a_grant_without_parts_fences(make: Make<'_>) {
    let l = layout(64, 2, KvKind::Split);
    let dst = Pool::new(&l, 4);
    let mut p = Pair::new(make());
    p.rx.register(&dst.region).unwrap();
    p.connect(1);
    let plan = dst.plan(&[], 64);
    assert_eq!(plan.grid().parts(), 0);
    p.open(3, 1, &plan);
    p.fence(3, FenceHow::Close);
    // Never opened, and twice: fenced at once.
    p.fence(4, FenceHow::Revoke);
    p.fence(3, FenceHow::Revoke);
}

/// Where the receiver copies: wrong grant, wrong lane, part or length: refused by it, not a byte
/// written, and the lane lives on.
fn foreign_numbers_change_nothing(make: Make<'_>) {
    let l = layout(4096, 1, KvKind::Mla);
    let (src, dst) = (Pool::new(&l, 16), Pool::new(&l, 16));
    src.fill(1);
    dst.fill(CANARY);
    let mut p = Pair::new(make());
    p.tx.register(&src.region).unwrap();
    p.rx.register(&dst.region).unwrap();
    p.connect(2);
    let four = dst.plan(&[3, 1, 2, 9], 2 * 4096);
    p.open(7, 2, &four);
    // A grant of lane 0 only.
    p.open(8, 1, &four);
    // One of another link.
    p.tell_rx(Command::Open(OpenGrant {
        grant: GrantId(9),
        sources: vec![OpenSource {
            link: LinkId(99),
            lanes: vec![LaneId(0), LaneId(1)],
            plan: four.clone(),
        }],
    }));
    // One that has ended.
    p.open(5, 2, &four);
    p.fence(5, FenceHow::Close);
    let source = src.source(&[0, 1, 2, 3, 4, 5, 6, 7], 2 * 4096);
    let long = src.source(&[0, 1, 2, 3, 4, 5], 3 * 4096);
    p.post(1234, 0, 0, &source);
    p.post(5, 0, 0, &source);
    p.post(9, 0, 0, &source);
    p.post(7, 2, 0, &source);
    p.post(7, 0, 0, &long);
    p.post(8, 0, 1, &source);
    p.until("refusals", |p| p.nacked().len() == 6);
    let mut kinds = p.nacked();
    kinds.sort_by_key(|k| k.code());
    let (a, b) = (ErrorKind::InvalidPlan, ErrorKind::NotFound);
    assert_eq!(kinds, [a, a, b, b, b, b]);
    let scrapped: Vec<u64> = p
        .from_rx
        .iter()
        .filter_map(|e| match e {
            EngineEvent::Scrapped { bytes, .. } => Some(*bytes),
            _ => None,
        })
        .collect();
    assert_eq!(scrapped.iter().sum::<u64>(), 5 * 8192 + 3 * 4096);
    assert_eq!((dst.touched(), p.acked()), (0, 0));
    p.clear();
    p.send_all(7, 2, &src.source(&[4, 5, 6, 7], 2 * 4096));
    assert_eq!(dst.touched(), 4 * 4096);
    assert!(!p.from_rx.iter().any(|e| matches!(e, EngineEvent::LaneDown { .. })));
}

/// Where the receiver copies: the sender is in the middle of a part when the receiver fences, in either
/// way.
fn nothing_lands_after_the_proof(make: Make<'_>) {
    let l = layout(1 << 20, 1, KvKind::Mla);
    for how in [FenceHow::Revoke, FenceHow::Close] {
        let (src, dst) = (Pool::new(&l, 16), Pool::new(&l, 16));
        src.fill(1);
        dst.fill(CANARY);
        let mut p = Pair::new(make());
        p.tx.register(&src.region).unwrap();
        p.rx.register(&dst.region).unwrap();
        p.connect(1);
        let ids: Vec<u32> = (0..16).rev().collect();
        let (from, to) = (src.source(&ids, 16 << 20), dst.plan(&ids, 16 << 20));
        assert_eq!(to.grid().parts(), 1);
        p.open(7, 1, &to);
        p.post(7, 0, 0, &from);
        // The first page is in: the frame is under way and cannot be whole.
        let first = addresses(&to)[0];
        p.until("first bytes", |p| {
            let n = dst.read(first, 1)[0];
            assert!(p.acked() == 0);
            n == 1
        });
        assert_eq!(dst.read(addresses(&to)[15] + (1 << 20) - 1, 1), [CANARY], "half-way");
        p.tell_rx(Command::Fence { grant: GrantId(7), how });
        // Only the receiver moves until the proof: it needs nobody else.
        let started = Instant::now();
        while !p.from_rx.iter().any(|e| matches!(e, EngineEvent::Fenced(_))) {
            p.poll_rx();
            assert!(started.elapsed() < PATIENCE);
        }
        dst.fill(CANARY);
        p.until("refusal", |p| !p.nacked().is_empty());
        p.settle();
        assert_eq!(p.nacked(), [ErrorKind::NotFound]);
        assert_eq!(dst.touched(), 0, "a byte landed after the proof");
        assert!(!p.from_rx.iter().any(|e| matches!(e, EngineEvent::Arrived { .. })));
        // The lane lives on.
        p.clear();
        p.open(8, 1, &to);
        p.send_all(8, 1, &from);
        assert_eq!(dst.touched(), 16 << 20);
    }
}

fn a_quiet_grant_quiesces(make: Make<'_>) {
    let l = layout(4096, 1, KvKind::Mla);
    let (src, dst) = (Pool::new(&l, 16), Pool::new(&l, 16));
    let mut p = Pair::new(make());
    p.tx.register(&src.region).unwrap();
    p.rx.register(&dst.region).unwrap();
    p.connect(1);
    let ids: Vec<u32> = (0..8).collect();
    let (from, to) = (src.source(&ids, 4096), dst.plan(&ids, 4096));
    p.open(7, 1, &to);
    for part in 0..4 {
        p.post(7, part, 0, &from);
    }
    for (link, grant) in [(LINK, 7), (LINK, 12345), (LinkId(55), 7)] {
        p.tell_tx(Command::Quiesce { link, grant: GrantId(grant) });
    }
    p.until("quiesced", |p| {
        p.from_tx.iter().filter(|e| matches!(e, EngineEvent::Quiesced(_))).count() == 3
    });
    p.post(7, 7, 0, &from);
    if p.is_one_sided() {
        // The receiver closes the grant on this word: it is over for good.
        p.until("refusal", |p| p.nacked() == [ErrorKind::NotFound]);
        return;
    }
    // What is posted from here on is new.
    p.until("ack", |p| {
        p.from_tx.iter().any(|e| matches!(e, EngineEvent::Acked { part, .. } if *part == PartId(7)))
    });
}

fn a_lane_takes_no_more_than_it_may(make: Make<'_>) {
    let l = layout(4096, 1, KvKind::Mla);
    let (src, dst) = (Pool::new(&l, 16), Pool::new(&l, 16));
    let mut p = Pair::new(make());
    p.tx.register(&src.region).unwrap();
    p.rx.register(&dst.region).unwrap();
    p.connect(1);
    let ids: Vec<u32> = (0..16).collect();
    let (from, to) = (src.source(&ids, 4096), dst.plan(&ids, 4096));
    p.open(7, 1, &to);
    let limit = kvlane_proto::limits::PARTS_IN_FLIGHT_PER_LANE;
    for part in 0..limit + 2 {
        p.post(7, part, 0, &from);
    }
    p.post(7, 0, 1, &from);
    p.until("acks", |p| p.acked() == limit as usize);
    assert_eq!(p.nacked(), [ErrorKind::Busy, ErrorKind::Busy, ErrorKind::NotFound]);
}

fn memory_is_known_or_refused(make: Make<'_>) {
    let l = layout(4096, 1, KvKind::Mla);
    let (src, dst) = (Pool::new(&l, 4), Pool::new(&l, 4));
    dst.fill(CANARY);
    let mut p = Pair::new(make());
    p.connect(1);
    let (from, to) = (src.source(&[0, 2], 8192), dst.plan(&[3, 1], 8192));
    p.open(7, 1, &to);
    // The sender's pages are not registered: refused before a byte is sent.
    p.post(7, 0, 0, &from);
    p.until("refusal", |p| p.nacked() == [ErrorKind::Memory]);
    p.tx.register(&src.region).unwrap();
    // The receiver's are not: read to scrap, or not written.
    p.post(7, 0, 0, &from);
    p.until("refusal", |p| p.nacked() == [ErrorKind::Memory; 2]);
    assert_eq!(dst.touched(), 0);
    p.clear();
    p.rx.register(&dst.region).unwrap();
    p.settle();
    p.send_all(7, 1, &from);
    assert_eq!(p.rx.unregister(&dst.region).unwrap_err().kind(), ErrorKind::Busy);
    p.fence(7, FenceHow::Close);
    p.rx.unregister(&dst.region).unwrap();
    p.tx.unregister(&src.region).unwrap();
    assert_eq!(p.rx.unregister(&dst.region).unwrap_err().kind(), ErrorKind::Memory);
}
