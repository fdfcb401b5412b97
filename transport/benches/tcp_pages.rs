//! The `tcp` engine against raw TCP, in one sitting: `cargo bench -p kvlane-transport --bench tcp_pages`.
//!
//! Raw is a blocking loop of `writev`/`readv` straight between random pages and one byte of ack, at
//! three sizes of a call, of which the best counts. The engine is two driver threads over one lane,
//! parts of 1 MiB, each acknowledged. Both use the same pools. Repetitions are interleaved, so that
//! what else the machine does hits all alike; medians are compared. Prints the tables of
//! `docs/performance.md`. Arguments: repetitions (default 15), and which of `pages`, `resolve` and
//! `trips` to do (default all).

#![allow(unreachable_pub)] // A module shared by benches.

mod engines;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};

use engines::{Engines, Outcome, POOL_BYTES, READY, layout, pages, plan, quantile, random_ids};

use kvlane_proto::limits::PART_BYTES;
use kvlane_proto::{Device, Layout, PartId, Plan};
use kvlane_transport::engine::Engine;
use kvlane_transport::engine::tcp::{TcpConfig, TcpEngine};
use kvlane_transport::memory::{Region, Registry};
use kvlane_transport::sys::mem::Pages;

/// Until the scheduler has forgotten who was busy: it would put the next runner's threads elsewhere.
const SETTLE: Duration = Duration::from_millis(150);
const RAW_CALL_BYTES: [u64; 3] = [64 << 10, 256 << 10, 1 << 20];

/// Pages to receive, bytes of one call, bytes after which to acknowledge.
type RawJob = (Pages, u64, u64);

/// The raw loop; its receiver is on a thread of its own.
struct Raw {
    stream: TcpStream,
    jobs: SyncSender<RawJob>,
}

impl Raw {
    fn new() -> Outcome<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let stream = TcpStream::connect(listener.local_addr()?)?;
        let (mut other, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        other.set_nodelay(true)?;
        let (jobs, queue) = sync_channel::<RawJob>(1);
        std::thread::spawn(move || -> Outcome<()> {
            while let Ok((mut pages, call_bytes, ack_bytes)) = queue.recv() {
                while pages.left() > 0 {
                    let mut left = ack_bytes.min(pages.left());
                    while left > 0 {
                        let n = pages.read_from(other.as_fd(), call_bytes.min(left), &mut [])?;
                        pages.advance(n);
                        left -= n;
                    }
                    other.write_all(&[1])?;
                }
            }
            Ok(())
        });
        Ok(Self { stream, jobs })
    }
    /// How long each stretch of `ack_bytes` took to its ack, with a pause before each.
    fn run(
        &mut self,
        mut from: Pages,
        to: Pages,
        (call_bytes, ack_bytes): (u64, u64),
        pause: Duration,
    ) -> Outcome<Vec<Duration>> {
        self.jobs.send((to, call_bytes, ack_bytes))?;
        // The receiver waits in its first call.
        std::thread::sleep(READY);
        let mut took = Vec::new();
        while from.left() > 0 {
            if !pause.is_zero() {
                std::thread::sleep(pause);
            }
            let start = Instant::now();
            let mut left = ack_bytes.min(from.left());
            while left > 0 {
                let n = from.write_to(self.stream.as_fd(), &[], call_bytes.min(left))?;
                from.advance(n);
                left -= n;
            }
            self.stream.read_exact(&mut [0])?;
            took.push(start.elapsed());
        }
        Ok(took)
    }
}

/// What a table is made with.
struct Bench {
    src: Arc<Region>,
    dst: Arc<Region>,
    raw: Raw,
    engines: Engines,
    /// The same with checksums.
    summed: Engines,
    seed: u64,
    reps: usize,
}

impl Bench {
    fn plans(&mut self, l: &Layout, n: usize, part_bytes: u64) -> Outcome<(Arc<Plan>, Arc<Plan>)> {
        let pool_blocks = (POOL_BYTES / u64::from(l.page_bytes())) as u32;
        let from = random_ids(&mut self.seed, pool_blocks, n);
        let to = random_ids(&mut self.seed, pool_blocks, n);
        Ok((plan(&self.src, l, &from, part_bytes)?, plan(&self.dst, l, &to, part_bytes)?))
    }
    fn raw_pages(&mut self, l: &Layout, n: usize) -> Outcome<(Pages, Pages)> {
        let (from, to) = self.plans(l, n, PART_BYTES)?;
        Ok((pages(&self.src, &from)?, pages(&self.dst, &to)?))
    }

    /// Raw rates of `n` pages, one for each size of a call, then the engine's without and with
    /// checksums. Each is preceded by an equal transfer that does not count: the scheduler spreads
    /// threads over processors only once it has seen them busy, and 16 MiB are over by then.
    fn round(&mut self, l: &Layout, n: usize) -> Outcome<Vec<f64>> {
        let mut took = Vec::new();
        for call_bytes in RAW_CALL_BYTES {
            let mut counts = Duration::ZERO;
            for _ in 0..2 {
                let (from, to) = self.raw_pages(l, n)?;
                counts = self.raw.run(from, to, (call_bytes, u64::MAX), Duration::ZERO)?[0];
            }
            took.push(counts);
        }
        for summed in [false, true] {
            let mut counts = Duration::ZERO;
            for _ in 0..2 {
                let (from, to) = self.plans(l, n, PART_BYTES)?;
                let engines = if summed { &mut self.summed } else { &mut self.engines };
                counts = engines.run(&from, to)?;
            }
            took.push(counts);
        }
        let gb = n as f64 * f64::from(l.page_bytes()) / 1e9;
        Ok(took.iter().map(|t| gb / t.as_secs_f64()).collect())
    }

    /// Rates of many pages.
    fn rates(&mut self) -> Outcome<()> {
        println!(
            "| page | pages | raw GB/s (best call size) | engine GB/s | engine / raw | with CRC32C GB/s | with / without |"
        );
        println!("|---|---|---|---|---|---|---|");
        for page_bytes in [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20] {
            let l = layout(page_bytes);
            let n = ((POOL_BYTES / u64::from(page_bytes)) as usize).min(4096);
            // Small pages make short runs, which other load disturbs more.
            let reps = if page_bytes < 64 << 10 { self.reps * 4 } else { self.reps };
            self.round(&l, n)?;
            let rounds: Vec<_> = (0..reps).map(|_| self.round(&l, n)).collect::<Outcome<_>>()?;
            let median = |column: usize| {
                quantile(&mut rounds.iter().map(|round| round[column]).collect::<Vec<_>>(), 0.5)
            };
            let raw = RAW_CALL_BYTES.len();
            let (best, call) = (0..raw)
                .map(|column| (median(column), RAW_CALL_BYTES[column]))
                .max_by(|a, b| a.0.total_cmp(&b.0))
                .ok_or("no rates")?;
            let (rate, summed) = (median(raw), median(raw + 1));
            println!(
                "| {} KiB | {n} | {best:.2} ({} KiB) | {rate:.2} | {:.2} | {summed:.2} | {:.2} |",
                page_bytes >> 10,
                call >> 10,
                rate / best,
                summed / rate
            );
        }
        println!();
        Ok(())
    }

    /// From a part's blocks, at random, to entries that the kernel takes.
    fn resolve(&mut self) -> Outcome<()> {
        let mut registry = Registry::new(&[Device::Host]);
        registry.register(&self.src)?;
        let (plan, _) = self.plans(&layout(4096), 1 << 15, PART_BYTES)?;
        let parts = plan.grid().parts();
        let mut into = Pages::default();
        let mut ns: Vec<f64> = Vec::new();
        for _ in 0..=self.reps {
            let start = Instant::now();
            for part in 0..parts {
                registry.resolve_part(&plan.pages(PartId(part))?, &mut into)?;
                std::hint::black_box(&into);
            }
            ns.push(start.elapsed().as_secs_f64() * 1e9 / f64::from(1u32 << 15));
        }
        println!(
            "From blocks to entries of a scatter call: {:.1} ns a page",
            quantile(&mut ns, 0.5)
        );
        println!();
        Ok(())
    }

    /// How long one page and its ack take.
    fn trips(&mut self) -> Outcome<()> {
        println!("| one 4 KiB page and its ack | raw p50 / p99 µs | engine p50 / p99 µs |");
        println!("|---|---|---|");
        let l = layout(4096);
        let rows = [
            ("one after the other", 0, 5000),
            ("after 300 µs of nothing", 300, 500),
            ("after 5 ms of nothing", 5000, 50),
        ];
        for (name, pause_us, n) in rows {
            let pause = Duration::from_micros(pause_us);
            let (mut raw_us, mut us) = (Vec::new(), Vec::new());
            for rep in 0..=self.reps {
                let (from, to) = self.plans(&l, n, 4096)?;
                let (raw_from, raw_to) = self.raw_pages(&l, n)?;
                std::thread::sleep(SETTLE);
                let a = self.raw.run(raw_from, raw_to, (1 << 20, 4096), pause)?;
                std::thread::sleep(SETTLE);
                let b = self.engines.trips(&from, to, pause)?;
                if rep > 0 {
                    raw_us.extend(a.iter().map(|d| d.as_secs_f64() * 1e6));
                    us.extend(b.iter().map(|d| d.as_secs_f64() * 1e6));
                }
            }
            let both =
                |v: &mut Vec<f64>| format!("{:.1} / {:.1}", quantile(v, 0.5), quantile(v, 0.99));
            println!("| {name} | {} | {} |", both(&mut raw_us), both(&mut us));
        }
        Ok(())
    }
}

fn main() -> Outcome<()> {
    // `cargo bench` adds flags of its own.
    let args: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let reps = args.iter().find_map(|a| a.parse().ok()).unwrap_or(15);
    let wanted = |table: &str| args.iter().all(|a| a.parse::<usize>().is_ok() || a == table);
    let (src, dst) = (Region::memfd(POOL_BYTES)?, Region::memfd(POOL_BYTES)?);
    src.memory().fill(0, POOL_BYTES, 1)?;
    let (raw, seed) = (Raw::new()?, 0x2545_f491_4f6c_dd1d);
    let engine = |checksum| -> Outcome<Box<dyn Engine>> {
        Ok(Box::new(TcpEngine::new(TcpConfig { checksum, ..TcpConfig::default() })?))
    };
    // The sender decides about checksums.
    let engines = Engines::new((engine(false)?, engine(false)?), &src, &dst)?;
    let summed = Engines::new((engine(true)?, engine(false)?), &src, &dst)?;
    let mut bench = Bench { src, dst, raw, engines, summed, seed, reps };
    if wanted("pages") {
        bench.rates()?;
    }
    if wanted("resolve") {
        bench.resolve()?;
    }
    if wanted("trips") {
        bench.trips()?;
    }
    for engines in [bench.engines, bench.summed] {
        engines.tx.stop();
        engines.rx.stop();
    }
    Ok(())
}
