//! The `shm` engine against libc's `memcpy`, in one sitting:
//! `cargo bench -p kvlane-transport --bench shm_pages`.
//!
//! `memcpy` copies the same random pages from pool to pool on one thread, and tells nobody. The
//! engine is two driver threads over one lane, parts of 1 MiB, each described, copied under its
//! grant's pen with its serve word checked, and acknowledged. *Own* pools are memfds, mapped by the
//! receiver; *foreign* ones are known by address only and read with `process_vm_readv`. Repetitions
//! are interleaved, so that what else the machine does hits all alike; medians are compared. Prints
//! the tables of `docs/performance.md`. First argument: repetitions (default 15).
#![allow(unreachable_pub)] // A module shared by benches.

mod engines;

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use engines::{Engines, Outcome, POOL_BYTES, layout, pages, plan, quantile, random_ids};

use kvlane_proto::layout::Layout;
use kvlane_proto::limits::PART_BYTES;
use kvlane_proto::{GrantId, Identity, Incarnation, LaneId, LinkId, PartId, Plan, Role, WorkerKey};
use kvlane_transport::clock::now;
use kvlane_transport::engine::driver::{EngineHandle, spawn};
use kvlane_transport::engine::shm::{ShmConfig, ShmEngine};
use kvlane_transport::engine::{
    Command, Engine, EngineEvent, FenceHow, OpenGrant, OpenSource, Post,
};
use kvlane_transport::memory::Region;

struct Bench {
    src: Arc<Region>,
    /// Without a descriptor, as if somebody else owned it.
    foreign: Arc<Region>,
    dst: Arc<Region>,
    seed: u64,
}

impl Bench {
    fn plans(
        &mut self,
        foreign: bool,
        l: &Layout,
        n: usize,
        part_bytes: u64,
    ) -> Outcome<(Arc<Plan>, Arc<Plan>)> {
        let blocks = (POOL_BYTES / u64::from(l.page_bytes())) as u32;
        let from = random_ids(&mut self.seed, blocks, n);
        let to = random_ids(&mut self.seed, blocks, n);
        let src = if foreign { &self.foreign } else { &self.src };
        Ok((plan(src, l, &from, part_bytes)?, plan(&self.dst, l, &to, part_bytes)?))
    }
    fn memcpy(&mut self, l: &Layout, n: usize) -> Outcome<Duration> {
        let (from, to) = self.plans(false, l, n, PART_BYTES)?;
        let (mut from, mut to) = (pages(&self.src, &from)?, pages(&self.dst, &to)?);
        let start = Instant::now();
        to.memcpy_from(&mut from)?;
        Ok(start.elapsed())
    }
    fn engines(&self, foreign: bool, checksum: bool) -> Outcome<Engines> {
        let engine = || -> Outcome<Box<dyn Engine>> {
            Ok(Box::new(ShmEngine::new(ShmConfig { checksum, directory: None })?))
        };
        let src = if foreign { &self.foreign } else { &self.src };
        Engines::new((engine()?, engine()?), src, &self.dst)
    }
}

fn both(us: &mut [f64]) -> String {
    format!("{:.1} / {:.1}", quantile(us, 0.5), quantile(us, 0.99))
}

/// A sender that this thread polls and polls, so that only the receiver sleeps.
struct Hand {
    tx: ShmEngine,
    rx: EngineHandle,
    grant: u64,
}

const LINK: LinkId = LinkId(1);

impl Hand {
    fn new(src: &Arc<Region>, dst: &Arc<Region>) -> Outcome<Self> {
        let (say, said) = channel();
        let on_rx = Box::new(move |events: Vec<EngineEvent>| {
            // Once connected, nobody listens any more.
            events.into_iter().for_each(|e| drop(say.send(e)));
        });
        let mut tx = ShmEngine::new(ShmConfig::default())?;
        let rx = spawn(Box::new(ShmEngine::new(ShmConfig::default())?), on_rx)?;
        tx.register(src)?;
        rx.register(dst)?;
        let peer = WorkerKey {
            identity: Identity::new("bench", Role::Decode, "i", 0)?,
            incarnation: Incarnation([0; 16]),
        };
        let listen =
            |receiver| Command::Listen { link: LINK, peer: peer.clone(), lanes: 1, receiver };
        rx.send(listen(true))?;
        let EngineEvent::Local { blob, .. } = said.recv_timeout(Duration::from_secs(5))? else {
            return Err("no blob".into());
        };
        tx.command(now(), listen(false));
        tx.command(now(), Command::Connect { link: LINK, remote: blob? });
        let mut hand = Self { tx, rx, grant: 0 };
        hand.until(|e| matches!(e, EngineEvent::LaneUp { .. }))?;
        Ok(hand)
    }
    fn until(&mut self, want: impl Fn(&EngineEvent) -> bool) -> Outcome<()> {
        let (start, mut events) = (Instant::now(), Vec::new());
        while !events.iter().any(&want) {
            events.clear();
            self.tx.poll(now(), &mut events);
            // Or a thread that is woken may have to wait for this one's turn to end.
            if start.elapsed() > Duration::from_micros(3) {
                std::thread::yield_now();
            }
            if start.elapsed() > Duration::from_secs(5) {
                return Err("nothing came".into());
            }
        }
        Ok(())
    }
    fn trips(&mut self, from: &Plan, to: Arc<Plan>, pause: Duration) -> Outcome<Vec<Duration>> {
        self.grant += 1;
        let (grant, lane) = (GrantId(self.grant), LaneId(0));
        let sources = vec![OpenSource { link: LINK, lanes: vec![lane], plan: to }];
        self.rx.send(Command::Open(OpenGrant { grant, sources }))?;
        std::thread::sleep(Duration::from_millis(1));
        let mut took = Vec::new();
        for part in (0..from.grid().parts()).map(PartId) {
            if !pause.is_zero() {
                std::thread::sleep(pause);
            }
            let pages = from.pages(part)?;
            let start = Instant::now();
            self.tx.command(now(), Command::Post(Post { link: LINK, grant, part, lane, pages }));
            self.until(|e| matches!(e, EngineEvent::Acked { .. }))?;
            took.push(start.elapsed());
        }
        self.rx.send(Command::Fence { grant, how: FenceHow::Close })?;
        Ok(took)
    }
}

fn main() -> Outcome<()> {
    // `cargo bench` adds flags of its own.
    let reps = std::env::args().skip(1).find_map(|a| a.parse().ok()).unwrap_or(15usize);
    let (src, dst) = (Region::memfd(POOL_BYTES)?, Region::memfd(POOL_BYTES)?);
    src.memory().fill(0, POOL_BYTES, 1)?;
    let foreign = Region::private(POOL_BYTES)?;
    foreign.memory().fill(0, POOL_BYTES, 1)?;
    let mut bench = Bench { src, foreign, dst, seed: 0x2545_f491_4f6c_dd1d };
    let mut kinds = [(false, false), (false, true), (true, false)]
        .map(|(foreign, checksum)| (foreign, bench.engines(foreign, checksum)));

    println!(
        "| page | pages | memcpy GB/s | own pools GB/s | own / memcpy | with checksum | foreign pools |"
    );
    println!("|---|---|---|---|---|---|---|");
    for page_bytes in [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20] {
        let l = layout(page_bytes);
        let n = ((POOL_BYTES / u64::from(page_bytes)) as usize).min(4096);
        let gb = n as f64 * f64::from(page_bytes) / 1e9;
        let mut rates = vec![Vec::new(); 4];
        // Small pages make short runs, which other load disturbs more.
        let reps = if page_bytes < 64 << 10 { reps * 4 } else { reps };
        for rep in 0..=reps {
            let took = bench.memcpy(&l, n)?;
            rates[0].push(gb / took.as_secs_f64());
            for ((foreign, engines), rates) in kinds.iter_mut().zip(&mut rates[1..]) {
                let engines = engines.as_mut().map_err(|e| e.to_string())?;
                let (from, to) = bench.plans(*foreign, &l, n, PART_BYTES)?;
                rates.push(gb / engines.run(&from, to)?.as_secs_f64());
            }
            if rep == 0 {
                // The first round warms up.
                rates.iter_mut().for_each(Vec::clear);
            }
        }
        let [memcpy, own, checked, foreign] = [0, 1, 2, 3].map(|i| quantile(&mut rates[i], 0.5));
        println!(
            "| {} KiB | {n} | {memcpy:.2} | {own:.2} | {:.2} | {checked:.2} | {foreign:.2} |",
            page_bytes >> 10,
            own / memcpy
        );
    }

    println!();
    println!("| one 4 KiB page and its ack | own pools p50 / p99 µs | foreign pools |");
    println!("|---|---|---|");
    let l = layout(4096);
    let rows = [
        ("one after the other", 0, 500),
        ("after 300 µs of nothing", 300, 500),
        ("after 5 ms of nothing", 5000, 50),
    ];
    for (name, pause_us, n) in rows {
        let pause = Duration::from_micros(pause_us);
        let mut columns = Vec::new();
        for kind in [0, 2] {
            let (foreign, engines) = &mut kinds[kind];
            let engines = engines.as_mut().map_err(|e| e.to_string())?;
            let mut us = Vec::new();
            for rep in 0..=reps {
                let (from, to) = bench.plans(*foreign, &l, n, 4096)?;
                let took = engines.trips(&from, to, pause)?;
                if rep > 0 {
                    us.extend(took.iter().map(|d| d.as_secs_f64() * 1e6));
                }
            }
            columns.push(both(&mut us));
        }
        println!("| {name} | {} |", columns.join(" | "));
    }
    for (name, pause_us) in
        [("sender polled by hand", 0), ("the same, receiver asleep since 250 µs", 300)]
    {
        let pause = Duration::from_micros(pause_us);
        let mut hand = Hand::new(&bench.src, &bench.dst)?;
        let mut us = Vec::new();
        for rep in 0..=reps {
            let n = if pause_us == 0 { 5000 } else { 500 };
            let (from, to) = bench.plans(false, &l, n, 4096)?;
            let took = hand.trips(&from, to, pause)?;
            if rep > 0 {
                us.extend(took.iter().map(|d| d.as_secs_f64() * 1e6));
            }
        }
        println!("| {name} | {} | |", both(&mut us));
        hand.rx.stop();
    }
    for engines in kinds.into_iter().flat_map(|(_, engines)| engines) {
        engines.tx.stop();
        engines.rx.stop();
    }
    Ok(())
}
