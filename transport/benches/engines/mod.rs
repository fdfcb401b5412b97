//! A sender's and a receiver's engine thread over one lane, for measurements: parts are posted as
//! others are acknowledged, from the callback, so that nothing but the engines is in the way.

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use kvlane_proto::layout::{Coordinates, Dtype, KvKind, Order};
use kvlane_proto::{
    BlockList, Device, GrantId, Identity, Incarnation, LaneId, Layout, LinkId, PartId, Plan,
    PoolMap, Role, WorkerKey, limits,
};
use kvlane_transport::engine::driver::{EngineHandle, spawn};
use kvlane_transport::engine::{
    Command, Engine, EngineEvent, FenceHow, OpenGrant, OpenSource, Post,
};
use kvlane_transport::memory::Region;
use kvlane_transport::sys::mem::Pages;

pub type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

pub const POOL_BYTES: u64 = 256 << 20;
const LINK: LinkId = LinkId(1);
/// Until a receiver has settled into its wait.
pub const READY: Duration = Duration::from_millis(4);

pub fn layout(page_bytes: u32) -> Layout {
    let page_tokens = page_bytes.div_ceil(1 << 16);
    Layout {
        model: "bench".into(),
        layers: 1,
        first_layer: 0,
        kv_heads: 1,
        kv_heads_total: 1,
        head_dim: page_bytes / page_tokens,
        dtype: Dtype::Fp8E4m3,
        page_tokens,
        window_tokens: 0,
        order: Order::Nhd,
        kind: KvKind::Mla,
        at: Coordinates::SINGLE,
    }
}

/// `n` different block ids in random order.
pub fn random_ids(seed: &mut u64, pool_blocks: u32, n: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..pool_blocks).collect();
    for i in (1..ids.len()).rev() {
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        ids.swap(i, (*seed % (i as u64 + 1)) as usize);
    }
    ids.truncate(n);
    ids
}

pub fn plan(region: &Region, layout: &Layout, ids: &[u32], part_bytes: u64) -> Outcome<Arc<Plan>> {
    let blocks = (POOL_BYTES / u64::from(layout.page_bytes())) as u32;
    let map = PoolMap::contiguous(Device::Host, region.address(), layout, blocks);
    let tokens = ids.len() as u32 * layout.page_tokens;
    Ok(Arc::new(Plan::alike(layout, map.into(), tokens, &BlockList::from_ids(ids), part_bytes)?))
}

pub fn pages(region: &Region, plan: &Plan) -> Outcome<Pages> {
    let mut out = Pages::default();
    for part in 0..plan.grid().parts() {
        for page in plan.pages(PartId(part))?.iter() {
            out.push(region.memory(), page.address, page.bytes.into())?;
        }
    }
    Ok(out)
}

/// What the sender's callback works on: posts the next part for each that is acknowledged.
struct Job {
    grant: GrantId,
    plan: Arc<Plan>,
    next: u32,
    left: u32,
    start: Instant,
    posted: Instant,
    /// From the latest post to each acknowledgement; a round trip if one part is in flight.
    took: Vec<Duration>,
}

impl Job {
    fn post(&mut self, handle: &EngineHandle) -> Outcome<()> {
        if self.next < self.plan.grid().parts() {
            let part = PartId(self.next);
            self.next += 1;
            self.posted = Instant::now();
            let (grant, lane) = (self.grant, LaneId(0));
            let pages = self.plan.pages(part)?;
            handle.send(Command::Post(Post { link: LINK, grant, part, lane, pages }))?;
        }
        Ok(())
    }
}

pub struct Engines {
    pub tx: EngineHandle,
    pub rx: EngineHandle,
    job: Arc<Mutex<Option<Job>>>,
    done: Receiver<(Duration, Vec<Duration>)>,
    grant: u64,
}

impl Engines {
    /// A couple of engines, connected.
    pub fn new(
        (tx, rx): (Box<dyn Engine>, Box<dyn Engine>),
        src: &Arc<Region>,
        dst: &Arc<Region>,
    ) -> Outcome<Self> {
        let job: Arc<Mutex<Option<Job>>> = Arc::default();
        let own: Arc<OnceLock<EngineHandle>> = Arc::default();
        let (said_tx, say) = (channel(), channel());
        let (finished, done) = channel();
        let on_tx = {
            let (job, own, said) = (job.clone(), own.clone(), said_tx.0);
            move |events: Vec<EngineEvent>| {
                for event in events {
                    let EngineEvent::Acked { .. } = event else {
                        said.send(event).ok();
                        continue;
                    };
                    let (Ok(mut slot), Some(handle)) = (job.lock(), own.get()) else { return };
                    let Some(job) = slot.as_mut() else { return };
                    job.left -= 1;
                    job.took.push(job.posted.elapsed());
                    if job.left == 0 {
                        let took = std::mem::take(&mut job.took);
                        finished.send((job.start.elapsed(), took)).ok();
                        *slot = None;
                    } else if job.post(handle).is_err() {
                        return;
                    }
                }
            }
        };
        let said_rx = say.0;
        let on_rx = move |events: Vec<EngineEvent>| {
            for event in events {
                if !matches!(event, EngineEvent::Arrived { .. } | EngineEvent::Fenced(_)) {
                    said_rx.send(event).ok();
                }
            }
        };
        let tx = spawn(tx, Box::new(on_tx))?;
        let rx = spawn(rx, Box::new(on_rx))?;
        own.set(tx.clone()).ok();
        tx.register(src)?;
        rx.register(dst)?;
        let peer = |role| -> Outcome<WorkerKey> {
            let identity = Identity::new("bench", role, "i", 0)?;
            Ok(WorkerKey { identity, incarnation: Incarnation([0; 16]) })
        };
        let (d, p) = (peer(Role::Decode)?, peer(Role::Prefill)?);
        tx.send(Command::Listen { link: LINK, peer: d, lanes: 1, receiver: false })?;
        rx.send(Command::Listen { link: LINK, peer: p, lanes: 1, receiver: true })?;
        let (said_tx, said_rx) = (said_tx.1, say.1);
        let blob = |said: &Receiver<EngineEvent>| -> Outcome<Vec<u8>> {
            match said.recv_timeout(Duration::from_secs(5))? {
                EngineEvent::Local { blob, .. } => Ok(blob?),
                other => Err(format!("{other:?}").into()),
            }
        };
        let remote = blob(&said_rx)?;
        blob(&said_tx)?;
        tx.send(Command::Connect { link: LINK, remote })?;
        match said_tx.recv_timeout(Duration::from_secs(5))? {
            EngineEvent::LaneUp { .. } => {}
            other => return Err(format!("{other:?}").into()),
        }
        Ok(Self { tx, rx, job, done, grant: 0 })
    }
    fn open(&mut self, to: Arc<Plan>) -> Outcome<GrantId> {
        self.grant += 1;
        let grant = GrantId(self.grant);
        let lanes = vec![LaneId(0)];
        let sources = vec![OpenSource { link: LINK, lanes, plan: to }];
        self.rx.send(Command::Open(OpenGrant { grant, sources }))?;
        std::thread::sleep(READY);
        Ok(grant)
    }
    /// Posts parts `from` to `to` of a plan with at most `window` in flight; returns when all are
    /// acknowledged.
    fn send(
        &self,
        grant: GrantId,
        plan: &Arc<Plan>,
        (from, to): (u32, u32),
        window: u32,
    ) -> Outcome<(Duration, Vec<Duration>)> {
        let (plan, now) = (plan.clone(), Instant::now());
        let left = to - from;
        let mut job =
            Job { grant, plan, next: from, left, start: now, posted: now, took: Vec::new() };
        {
            let mut slot = self.job.lock().map_err(|e| e.to_string())?;
            for _ in 0..window.min(left) {
                job.post(&self.tx)?;
            }
            *slot = Some(job);
        }
        Ok(self.done.recv_timeout(Duration::from_secs(60))?)
    }
    /// From the first post to the last acknowledgement.
    pub fn run(&mut self, from: &Arc<Plan>, to: Arc<Plan>) -> Outcome<Duration> {
        let grant = self.open(to)?;
        let parts = (0, from.grid().parts());
        let (took, _) = self.send(grant, from, parts, limits::PARTS_IN_FLIGHT_PER_LANE)?;
        self.rx.send(Command::Fence { grant, how: FenceHow::Close })?;
        Ok(took)
    }
    /// One part at a time, with a pause before each.
    pub fn trips(
        &mut self,
        from: &Arc<Plan>,
        to: Arc<Plan>,
        pause: Duration,
    ) -> Outcome<Vec<Duration>> {
        let grant = self.open(to)?;
        let parts = from.grid().parts();
        let took = if pause.is_zero() {
            self.send(grant, from, (0, parts), 1)?.1
        } else {
            let mut took = Vec::new();
            for part in 0..parts {
                std::thread::sleep(pause);
                took.push(self.send(grant, from, (part, part + 1), 1)?.0);
            }
            took
        };
        self.rx.send(Command::Fence { grant, how: FenceHow::Close })?;
        Ok(took)
    }
}

pub fn quantile(samples: &mut [f64], q: f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[((samples.len() - 1) as f64 * q) as usize]
}
