//! A toy one-sided engine, and two real workers round it.
//!
//! What it has of a real one: its lanes are made by what the two engines tell each other, a grant is
//! bound to the lanes' connections of the moment in which it comes, the sender writes the receiver's
//! memory itself, and what a lost connection left behind lands late unless the receiver has destroyed
//! its end. The two workers are in one process, so a "connection" is a number that the receiver has
//! in [`ALIVE`], and proofs are made by an engine inside that has no links.

#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)]

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use kvlane_proto::plan::writes;
use kvlane_proto::{DataPath, ErrorKind, GrantId, LaneId, LinkId, PartId, Refusal, Result, Time};
use kvlane_transport::engine::tcp::{TcpConfig, TcpEngine};
use kvlane_transport::engine::{
    Caps, Command, Engine, EngineEvent, FenceHow, Interest, OpenGrant, Post, SendGrant,
};
use kvlane_transport::memory::Region;

/// Connections that the receiver's end has not destroyed.
static ALIVE: Mutex<Option<HashSet<u64>>> = Mutex::new(None);
/// Everything that can be written.
static MEMORY: Mutex<Vec<Arc<Region>>> = Mutex::new(Vec::new());
static NEXT: AtomicU64 = AtomicU64::new(1);

const LATE: Duration = Duration::from_millis(3);

fn alive() -> MutexGuard<'static, Option<HashSet<u64>>> {
    ALIVE.lock().unwrap()
}

/// What a test learns of an engine.
#[derive(Debug, Default)]
pub struct Seen {
    /// Parts that came on another connection than the receiver's grant had.
    foreign: AtomicU64,
    revoked: AtomicU64,
    lost: AtomicU64,
    /// Writes of lost connections that landed late, and that did not because the end was destroyed.
    late: AtomicU64,
    stopped: AtomicU64,
}

/// How it behaves.
#[derive(Clone, Debug)]
pub struct ToyConfig {
    pub(crate) rails: u16,
    /// Every so many posts a connection is lost; 0 for never.
    pub(crate) lose_every: u64,
    pub(crate) seen: Arc<Seen>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Dial,
    Accepted,
    Gone,
    Part,
    Ack,
}

/// What the engines tell each other.
#[derive(Clone, Copy, Debug)]
struct Word {
    kind: Kind,
    lane: LaneId,
    conn: u64,
    grant: GrantId,
    part: PartId,
}

impl Word {
    fn lane(kind: Kind, lane: LaneId, conn: u64) -> Self {
        Self { kind, lane, conn, grant: GrantId::NONE, part: PartId(0) }
    }
    fn encode(self) -> Vec<u8> {
        let mut out = vec![self.kind as u8];
        out.extend(self.lane.0.to_le_bytes());
        out.extend(self.conn.to_le_bytes());
        out.extend(self.grant.0.to_le_bytes());
        out.extend(self.part.0.to_le_bytes());
        out
    }
    fn decode(from: &[u8]) -> Self {
        let kinds = [Kind::Dial, Kind::Accepted, Kind::Gone, Kind::Part, Kind::Ack];
        Self {
            kind: kinds[usize::from(from[0])],
            lane: LaneId(u16::from_le_bytes(from[1..3].try_into().unwrap())),
            conn: u64::from_le_bytes(from[3..11].try_into().unwrap()),
            grant: GrantId(u64::from_le_bytes(from[11..19].try_into().unwrap())),
            part: PartId(u32::from_le_bytes(from[19..23].try_into().unwrap())),
        }
    }
}

struct Link {
    receiver: bool,
    /// The present connection of each lane; 0 for none.
    conns: Vec<u64>,
    grants: HashMap<GrantId, (SendGrant, BTreeMap<LaneId, u64>)>,
}

/// The connection that each lane had.
type Bound = HashMap<(LinkId, LaneId), u64>;
type Bytes = Vec<(u64, Vec<u8>)>;

pub(crate) struct Toy {
    config: ToyConfig,
    proofs: TcpEngine,
    links: BTreeMap<LinkId, Link>,
    /// With the connection of each lane when it was opened.
    open: HashMap<GrantId, (OpenGrant, Bound)>,
    late: Vec<(Time, u64, Bytes)>,
    posts: u64,
    out: Vec<EngineEvent>,
}

impl Toy {
    pub(crate) fn new(config: ToyConfig) -> Result<Self> {
        Ok(Self {
            config,
            proofs: TcpEngine::new(TcpConfig::default())?,
            links: BTreeMap::new(),
            open: HashMap::new(),
            late: Vec::new(),
            posts: 0,
            out: Vec::new(),
        })
    }
    fn tell(&mut self, link: LinkId, word: Word) {
        self.out.push(EngineEvent::Tell { link, message: word.encode() });
    }
    fn dial(&mut self, link: LinkId, lane: LaneId) {
        let conn = NEXT.fetch_add(1, Ordering::Relaxed);
        self.tell(link, Word::lane(Kind::Dial, lane, conn));
    }
    fn down(&mut self, link: LinkId, lane: LaneId) {
        let Some(l) = self.links.get_mut(&link) else { return };
        let conn = std::mem::take(&mut l.conns[usize::from(lane.0)]);
        if conn == 0 {
            return;
        }
        if l.receiver {
            alive().get_or_insert_default().remove(&conn);
        }
        let why = Refusal::new(ErrorKind::NoPath, "the connection was lost");
        self.out.push(EngineEvent::LaneDown { link, lane, why });
    }
    fn up(&mut self, link: LinkId, lane: LaneId, conn: u64) {
        self.links.get_mut(&link).unwrap().conns[usize::from(lane.0)] = conn;
        self.out.push(EngineEvent::LaneUp { link, lane });
    }
    fn told(&mut self, link: LinkId, word: Word) {
        let Word { kind, lane, conn, grant, part } = word;
        let Some(l) = self.links.get(&link) else { return };
        let present = l.conns[usize::from(lane.0)] == conn;
        match kind {
            Kind::Dial => {
                self.down(link, lane);
                alive().get_or_insert_default().insert(conn);
                self.up(link, lane, conn);
                self.tell(link, Word::lane(Kind::Accepted, lane, conn));
            }
            Kind::Accepted => self.up(link, lane, conn),
            Kind::Gone if present => {
                let dials = !l.receiver;
                self.down(link, lane);
                if dials {
                    self.dial(link, lane);
                }
            }
            Kind::Gone => {}
            Kind::Part => {
                let Some((_, bound)) = self.open.get(&grant) else { return };
                if bound.get(&(link, lane)) != Some(&conn) {
                    self.config.seen.foreign.fetch_add(1, Ordering::Relaxed);
                }
                self.out.push(EngineEvent::Arrived { link, grant, part, lane });
                self.tell(link, Word { kind: Kind::Ack, ..word });
            }
            Kind::Ack => self.out.push(EngineEvent::Acked { link, grant, part, lane }),
        }
    }
    fn post(&mut self, now: Time, post: &Post) {
        let &Post { link, grant, part, lane, .. } = post;
        let l = &self.links[&link];
        let conn = l.conns[usize::from(lane.0)];
        let known = l.grants.get(&grant).filter(|g| conn != 0 && g.1.get(&lane) == Some(&conn));
        let Some((given, _)) = known else {
            let why = Refusal::new(ErrorKind::NotFound, "not a grant of this connection");
            return self.out.push(EngineEvent::Nacked { link, grant, part, lane, why });
        };
        let there = given.plan.pages(part).unwrap();
        let bytes: Bytes = writes(&post.pages, &there)
            .map(|w| {
                let mut bytes = vec![0; w.bytes as usize];
                let memory = find(w.source);
                memory.memory().read_at(w.source - memory.address(), &mut bytes).unwrap();
                (w.destination, bytes)
            })
            .collect();
        self.posts += 1;
        if self.config.lose_every > 0 && self.posts.is_multiple_of(self.config.lose_every) {
            // What it wrote is still under way when the connection is lost.
            self.config.seen.lost.fetch_add(1, Ordering::Relaxed);
            self.late.push((now + LATE, conn, bytes));
            self.down(link, lane);
            // The receiver does not hear of it before the next connection.
            return self.dial(link, lane);
        }
        land(conn, &bytes);
        self.tell(link, Word { kind: Kind::Part, lane, conn, grant, part });
    }
}

fn find(address: u64) -> Arc<Region> {
    let all = MEMORY.lock().unwrap();
    all.iter().find(|r| r.contains(r.device(), address, 1)).unwrap().clone()
}
/// Writes, if the receiver's end is still there.
fn land(conn: u64, bytes: &Bytes) -> bool {
    // Held, so that no fence completes in the middle.
    let alive = alive();
    let lands = alive.as_ref().is_some_and(|alive| alive.contains(&conn));
    for (address, bytes) in bytes.iter().filter(|_| lands) {
        let memory = find(*address);
        memory.memory().write_at(address - memory.address(), bytes).unwrap();
    }
    lands
}

impl Engine for Toy {
    fn caps(&self) -> Caps {
        let rails = self.config.rails;
        Caps { name: "toy", path: DataPath::OneSided, emulated: true, rails }
    }
    fn register(&mut self, region: &Arc<Region>) -> Result<()> {
        MEMORY.lock().unwrap().push(region.clone());
        Ok(())
    }
    fn unregister(&mut self, _: &Arc<Region>) -> Result<()> {
        Ok(())
    }
    fn command(&mut self, now: Time, command: Command) {
        match command {
            Command::Listen { link, lanes, receiver, .. } => {
                let conns = vec![0; usize::from(lanes)];
                self.links.insert(link, Link { receiver, conns, grants: HashMap::new() });
                self.out.push(EngineEvent::Local { link, blob: Ok(vec![1]) });
            }
            Command::Connect { link, .. } => {
                let l = &self.links[&link];
                let lanes = if l.receiver { 0 } else { l.conns.len() as u16 };
                (0..lanes).for_each(|lane| self.dial(link, LaneId(lane)));
            }
            Command::Told { link, message } => self.told(link, Word::decode(&message)),
            Command::Close { link } => {
                let lanes = self.links.get(&link).map_or(0, |l| l.conns.len() as u16);
                (0..lanes).for_each(|lane| self.down(link, LaneId(lane)));
                self.links.remove(&link);
            }
            Command::Open(open) => {
                let each = open.sources.iter();
                let bound = each.flat_map(|s| s.lanes.iter().map(move |&lane| (s.link, lane)));
                let conn = |&(link, lane): &(LinkId, LaneId)| {
                    self.links.get(&link).map_or(0, |l| l.conns[usize::from(lane.0)])
                };
                let bound = bound.map(|at| (at, conn(&at))).collect();
                self.open.insert(open.grant, (open, bound));
            }
            Command::Fence { grant, how } => {
                if let Some((open, _)) = self.open.remove(&grant)
                    && how == FenceHow::Revoke
                {
                    self.config.seen.revoked.fetch_add(1, Ordering::Relaxed);
                    for (link, lane) in
                        open.sources.iter().flat_map(|s| s.lanes.iter().map(|&l| (s.link, l)))
                    {
                        let conns = self.links.get(&link).map(|l| &l.conns);
                        let conn = conns.map_or(0, |c| c[usize::from(lane.0)]);
                        self.down(link, lane);
                        self.tell(link, Word::lane(Kind::Gone, lane, conn));
                    }
                }
                self.proofs.command(now, Command::Fence { grant, how });
            }
            Command::Grant(given) => {
                let l = self.links.get_mut(&given.link).unwrap();
                let conns = given.lanes.iter().map(|&lane| (lane, l.conns[usize::from(lane.0)]));
                let bound = conns.collect();
                let before = l.grants.insert(given.grant, (given, bound));
                assert!(before.is_none(), "a grant is told once");
            }
            Command::Post(post) => self.post(now, &post),
            Command::ResetLane { link, lane } => {
                self.down(link, lane);
                self.dial(link, lane);
            }
            Command::Quiesce { link, grant } => {
                let known = self.links.get_mut(&link).map(|l| l.grants.remove(&grant).is_some());
                assert!(known != Some(false), "each grant is told, and quiesced once");
                self.proofs.command(now, Command::Quiesce { link, grant });
            }
        }
    }
    fn poll(&mut self, now: Time, events: &mut Vec<EngineEvent>) -> bool {
        let due = self.late.extract_if(.., |(at, ..)| *at <= now).collect::<Vec<_>>();
        for (_, conn, bytes) in due {
            let seen = &self.config.seen;
            let which = if land(conn, &bytes) { &seen.late } else { &seen.stopped };
            which.fetch_add(1, Ordering::Relaxed);
        }
        let moved = !self.out.is_empty();
        events.append(&mut self.out);
        self.proofs.poll(now, events) || moved
    }
    fn park(&mut self, interests: &mut Vec<Interest>) -> Option<Time> {
        let late = self.late.iter().map(|late| late.0);
        late.chain(self.proofs.park(interests)).min()
    }
}

// ---- two workers ----------------------------------------------------------------------------

use kvlane_proto::layout::{Coordinates, Dtype, KvKind, Order};
use kvlane_proto::{BlockList, Identity, Layout, Outcome, Role, RoomId, Span};
use kvlane_transport::quic::Security;

use crate::{
    AttachRequest, ChunkRequest, DecodeHandle, DecodeWorker, EngineChoice, LendRequest, Pools,
    PrefillHandle, PrefillWorker, Ready, Takers, WorkerConfig,
};

const BLOCKS: u32 = 64;
const PER_ROOM: u32 = 4;
const DEADLINE: Duration = Duration::from_secs(30);
const CANARY: u8 = 0xc5;

fn layout() -> Layout {
    Layout {
        model: "test".into(),
        layers: 8,
        first_layer: 0,
        kv_heads: 2,
        kv_heads_total: 2,
        head_dim: 8,
        dtype: Dtype::Bf16,
        page_tokens: 16,
        window_tokens: 0,
        order: Order::Hnd,
        kind: KvKind::Split,
        at: Coordinates::SINGLE,
    }
}

fn config(role: Role, toy: &ToyConfig) -> (WorkerConfig, Pools) {
    let identity = Identity::new("test", role, "w", 0).unwrap();
    let pools = Pools::own(layout(), BLOCKS).unwrap();
    let engine = EngineChoice::Toy(toy.clone());
    let mut config = WorkerConfig::new(identity, Security::Insecure, pools.clone(), engine);
    config.part_bytes = 4096;
    config.lanes_per_link = 4 * toy.rails;
    config.lanes_per_room = toy.rails;
    (config, pools)
}

/// Fills, or reads, some blocks of a pool.
fn pages(pools: &Pools, ids: &[u32], mut each: impl FnMut(&Region, u64, u64)) {
    let (map, page) = (&pools.maps[0], u64::from(layout().page_bytes()));
    for slab in &map.slab_address {
        for id in ids {
            let address = slab + u64::from(*id) * map.block_stride_bytes;
            each(&pools.regions[0], address - pools.regions[0].address(), page);
        }
    }
}

/// One room of random blocks; whether it was done.
async fn hand_over(
    n: u64,
    (prefill, decode): (&PrefillHandle, &DecodeHandle),
    (from, to): (&Pools, &Pools),
) -> bool {
    let (source, destination): (Vec<u32>, Vec<u32>) = (0..PER_ROOM)
        .map(|i| {
            let at = (n as u32 % (BLOCKS / PER_ROOM)) * PER_ROOM + i;
            (at, (at * 7 + 3) % BLOCKS)
        })
        .unzip();
    let fill = (n % 100) as u8 + 1;
    pages(from, &source, |r, at, bytes| r.memory().fill(at, bytes, fill).unwrap());
    let tokens = PER_ROOM * 16;
    let (room, span) = (RoomId(n), Span { tokens, prefix_tokens: 0 });
    let blocks = vec![BlockList::from_ids(&destination)];
    let prefills = vec![prefill.address().clone()];
    let request = LendRequest { room, span, blocks, prefills, deadline: DEADLINE };
    let filling = decode.lend(request).await.unwrap();
    let takers = Takers::Named(vec![decode.address().key.identity.clone()]);
    let attach = AttachRequest { room, tokens, takers, issuer: None, deadline: DEADLINE };
    if let Ok(sending) = prefill.attach(attach).await {
        let blocks = BlockList::from_ids(&source);
        let chunk =
            ChunkRequest { pool: 0, tokens: 0..tokens, layers: 0..8, blocks, ready: Ready::Now };
        // It may have ended already.
        let _ = sending.send(chunk).await;
        sending.released().await.unwrap();
    }
    let ending = filling.ended().await.unwrap();
    let done = match &ending.outcome {
        Outcome::Done { .. } => true,
        outcome => {
            let why = outcome.why().unwrap();
            assert_eq!(why.kind, ErrorKind::NoPath, "room {n}: {why}");
            false
        }
    };
    ending.into_blocks().await.unwrap();
    // From here on nothing lands: every byte is the sender's, and then the canary's for ever.
    pages(to, &destination, |r, at, bytes| {
        let mut found = vec![0; bytes as usize];
        r.memory().read_at(at, &mut found).unwrap();
        assert!(!done || found.iter().all(|&b| b == fill), "room {n} at {at}: {found:?}");
        r.memory().fill(at, bytes, CANARY).unwrap();
    });
    done
}

/// How many of the rooms were done.
async fn run(toy: &ToyConfig, rooms: u64) -> u64 {
    let ((p_config, from), (d_config, to)) =
        (config(Role::Prefill, toy), config(Role::Decode, toy));
    to.regions[0].memory().fill(0, to.regions[0].bytes(), CANARY).unwrap();
    let prefill = PrefillWorker::start(p_config).unwrap();
    let decode = DecodeWorker::start(d_config).unwrap();
    let mut done = 0;
    let at_once = 3;
    for first in (0..rooms).step_by(at_once) {
        let each = (first..first + at_once as u64).map(|n| {
            let (prefill, decode) = (prefill.clone(), decode.clone());
            let (from, to) = (from.clone(), to.clone());
            tokio::spawn(async move { hand_over(n, (&prefill, &decode), (&from, &to)).await })
        });
        for room in each.collect::<Vec<_>>() {
            done += u64::from(room.await.unwrap());
        }
    }
    tokio::time::sleep(2 * LATE).await;
    let mut all = vec![0; to.regions[0].bytes() as usize];
    to.regions[0].memory().read_at(0, &mut all).unwrap();
    assert!(all.iter().all(|&b| b == CANARY), "something landed in blocks that were back");
    decode.stop().await;
    prefill.stop().await;
    done
}

#[tokio::test(flavor = "multi_thread")]
async fn rooms_come_over_an_engine_whose_sender_writes() {
    let toy = ToyConfig { rails: 2, lose_every: 0, seen: Arc::default() };
    assert_eq!(run(&toy, 30).await, 30);
    // A sender that had no time to say that it is quiet was revoked; nothing was lost by that.
    let seen = &toy.seen;
    let count = |n: &AtomicU64| n.load(Ordering::Relaxed);
    assert_eq!((count(&seen.lost), count(&seen.foreign)), (0, 0), "{seen:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_connections_cost_no_bytes_and_what_they_left_never_lands_in_reused_blocks() {
    let toy = ToyConfig { rails: 2, lose_every: 11, seen: Arc::default() };
    let done = run(&toy, 150).await;
    let seen = &toy.seen;
    let count = |n: &AtomicU64| n.load(Ordering::Relaxed);
    assert!(done > 50, "{done}: {seen:?}");
    assert_eq!(count(&seen.foreign), 0, "{seen:?}");
    assert!(count(&seen.lost) > 20 && count(&seen.revoked) > 20, "{seen:?}");
    assert!(count(&seen.stopped) > 0, "a fence has stopped a late write: {seen:?}");
}
