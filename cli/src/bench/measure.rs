//! Page size by page size, repetition by repetition.
//!
//! Owns: the receiver's process and whatever this side has of the paths that are measured. In: a
//! size. Out: its rows, the engine's first. Invariant: the first repetition warms up and does not
//! count; its bytes and those of the last one are compared, outside of what is timed.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane_proto::limits::PART_BYTES;
use kvlane_proto::{Error, ErrorKind, GrantId, PoolMap, Result};
use kvlane_transport::memory::Region;
use kvlane_transport::random::random;
use kvlane_transport::sys::memcpy::CopyPair;

use super::Config;
use super::figures::{MEMCPY, RAW_RTT, RAW_TCP, Row, Samples, gbytes_per_s};
use super::link::ANSWER;
use super::pages::{Draw, Pattern, Size, parts};
use super::peers::Peers;
use super::raw::{self, RawEnd};
use super::sender::Sender;
use super::talk::{Answer, Ask, Process};
use super::wait::{Stop, moving};

/// Until a receiver has settled into its wait.
const SETTLE: Duration = Duration::from_millis(4);
/// How long nothing moves before a round trip after idling.
const IDLE: Duration = Duration::from_micros(300);
/// Bytes of one call of the raw loop; the best counts.
const RAW_CALL_BYTES: [u64; 3] = [64 << 10, 256 << 10, 1 << 20];

/// Which repetition. The first is not timed, so its destination is zeroed before it; the last is, so
/// nothing is done before it that the others do not have.
#[derive(Clone, Copy)]
pub(super) struct Rep {
    pub(super) first: bool,
    pub(super) last: bool,
}

impl Rep {
    /// Whether its bytes are compared afterwards.
    pub(super) fn verifies(self) -> bool {
        self.first || self.last
    }
}

/// Everything that is measured.
pub(crate) struct Bench<'a> {
    config: &'a Config,
    pool: Arc<Region>,
    pattern: Pattern,
    raw: Option<RawEnd>,
    copy: Option<CopyPair>,
    peers: Peers,
    receiver: Process,
    grant: u64,
    stop: Stop,
}

/// The engine at one page size.
struct Ours {
    sender: Sender,
    map: Arc<PoolMap>,
    emulated: bool,
}

/// The samples of one page size.
#[derive(Default)]
struct All {
    ours: Samples,
    raw: [Samples; 3],
    rtt: Samples,
    memcpy: Samples,
}

impl All {
    fn clear(&mut self) {
        let Self { ours, raw, rtt, memcpy } = self;
        raw.iter_mut().chain([ours, rtt, memcpy]).for_each(Samples::clear);
    }
}

impl<'a> Bench<'a> {
    /// Starts the receiver, and makes and fills the pools.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] or [`ErrorKind::Memory`], and what the receiver says.
    pub(crate) fn start(config: &'a Config, stop: &Stop) -> Result<Self> {
        let program = std::env::current_exe()
            .map_err(|e| Error::new(ErrorKind::Io, "this program cannot be found").caused_by(e))?;
        let mut command = Command::new(program);
        command.arg("bench-receiver");
        let bytes = config.pool_bytes();
        let mut bench = Self {
            config,
            pool: Region::memfd(bytes)?,
            pattern: Pattern { salt: random() },
            raw: None,
            copy: None,
            peers: Peers::default(),
            receiver: Process::start("receiver", command, stop)?,
            grant: 0,
            stop: stop.clone(),
        };
        let pattern = bench.pattern;
        pattern.fill(bytes, |at, from| bench.pool.memory().write_at(at, from))?;
        bench.done(&Ask::Start { pool_bytes: bytes, pattern }, moving(bytes))?;
        if config.ceiling {
            let Answer::Listening { port } = bench.ask(&Ask::RawListen, ANSWER)? else {
                return Err(misunderstood());
            };
            let (raw, own) = raw::connect(port, stop)?;
            bench.done(&Ask::RawAccept { port: own }, ANSWER)?;
            bench.raw = Some(raw);
            let mut copy = CopyPair::new(bytes).map_err(|e| {
                Error::new(ErrorKind::Memory, "no memory to copy in")
                    .with("bytes", bytes)
                    .hint("measure without --ceiling, or with fewer --pages")
                    .caused_by(e)
            })?;
            pattern.fill(bytes, |at, from| copy.write_at(at, from))?;
            bench.copy = Some(copy);
        }
        if let Some(python) = &config.peers {
            bench.peers = Peers::start(python, bytes, stop)?;
        }
        Ok(bench)
    }
    /// Measures one size; `tick` is called after each repetition.
    ///
    /// # Errors
    /// Whatever ended it; if that was the receiver's death, it says so.
    pub(crate) fn rows(&mut self, size: Size, tick: impl Fn()) -> Result<Vec<Row>> {
        self.measure(size, tick).map_err(|e| self.receiver.explain(e))
    }

    fn measure(&mut self, size: Size, tick: impl Fn()) -> Result<Vec<Row>> {
        let ours = self.engine(size)?;
        self.peers.begin(size)?;
        let mut all = All::default();
        for rep in 0..=self.config.runs {
            let rep = Rep { first: rep == 0, last: rep == self.config.runs };
            self.stop.check()?;
            self.raw(size, &mut all, rep)?;
            self.memcpy(size, &mut all.memcpy, rep)?;
            self.ours(size, &ours, &mut all.ours, rep)?;
            self.peers.run(size, rep)?;
            if self.config.latency {
                for pause in [Duration::ZERO, IDLE] {
                    self.our_trips(size, &ours, pause, &mut all.ours, rep)?;
                    self.peers.trips(size, pause)?;
                }
            }
            if rep.first {
                all.clear();
                self.peers.clear();
            }
            tick();
        }
        // The sender's first: it would dial again.
        let emulated = ours.emulated;
        drop(ours);
        self.done(&Ask::EndEngine, ANSWER)?;
        Ok(self.to_rows(size, &all, emulated))
    }
    fn to_rows(&self, size: Size, all: &All, emulated: bool) -> Vec<Row> {
        let Size { page_bytes, pages, .. } = size;
        let bytes = size.bytes();
        let setup = &self.config.setup;
        let mut rows = vec![Row {
            emulated,
            rails: Some(setup.rails),
            checksum: Some(setup.checksum),
            ..all.ours.row(&setup.engine, page_bytes, pages, bytes)
        }];
        if self.config.ceiling {
            let best = all
                .raw
                .iter()
                .zip(RAW_CALL_BYTES)
                .max_by(|(a, _), (b, _)| {
                    gbytes_per_s(bytes, &a.tx).total_cmp(&gbytes_per_s(bytes, &b.tx))
                })
                .map(|(samples, call_bytes)| Row {
                    call_bytes: Some(call_bytes),
                    ..samples.row(RAW_TCP, page_bytes, pages, bytes)
                });
            rows.extend(best);
            rows.push(all.rtt.row(RAW_RTT, page_bytes, 1, page_bytes.into()));
            rows.push(all.memcpy.row(MEMCPY, page_bytes, pages, bytes));
        }
        rows.extend(self.peers.rows(size));
        rows
    }

    /// Starts both engines and connects them.
    fn engine(&mut self, size: Size) -> Result<Ours> {
        let setup = &self.config.setup;
        let (sender, own) = Sender::start(setup, &self.pool, &self.stop)?;
        let ask = Ask::Engine { setup: setup.clone(), size };
        let Answer::Engine { blob, emulated } = self.ask(&ask, ANSWER)? else {
            return Err(misunderstood());
        };
        let map = size.map(&self.pool);
        self.done(&Ask::Connect { blob: own }, ANSWER)?;
        sender.connect(blob)?;
        let emulated = emulated || sender.emulated();
        Ok(Ours { sender, map: Arc::new(map), emulated })
    }
    /// One repetition of the engine.
    fn ours(&mut self, size: Size, ours: &Ours, into: &mut Samples, rep: Rep) -> Result<()> {
        let draw = Draw { seed: random(), pages: size.pages };
        let ids = draw.from(size);
        let grant = self.open(size, draw, PART_BYTES, rep)?;
        let begun = Instant::now();
        let parts = parts(&size.plan(&ours.map, &ids, PART_BYTES)?)?;
        into.prep.push(begun.elapsed());
        let took = ours.sender.send(grant, parts, size.bytes())?;
        into.tx.push(took.tx);
        into.post.push(took.post);
        into.verified_bytes += self.close(size, grant, draw, rep)?;
        Ok(())
    }
    /// Round trips of single pages.
    fn our_trips(
        &mut self,
        size: Size,
        ours: &Ours,
        pause: Duration,
        into: &mut Samples,
        rep: Rep,
    ) -> Result<()> {
        let draw = Draw { seed: random(), pages: size.trips() };
        let page_bytes = u64::from(size.page_bytes);
        let parts = parts(&size.plan(&ours.map, &draw.from(size), page_bytes)?)?;
        let grant = self.open(size, draw, page_bytes, rep)?;
        let bytes = page_bytes * u64::from(draw.pages);
        let trips = ours.sender.trips(grant, parts, bytes, pause)?;
        if pause.is_zero() { &mut into.trips } else { &mut into.idle }.extend(trips);
        into.verified_bytes += self.close(size, grant, draw, rep)?;
        Ok(())
    }
    fn open(&mut self, size: Size, draw: Draw, part_bytes: u64, rep: Rep) -> Result<GrantId> {
        self.clear(size, draw, rep)?;
        self.grant += 1;
        self.done(&Ask::Open { grant: self.grant, draw, part_bytes }, ANSWER)?;
        std::thread::sleep(SETTLE);
        Ok(GrantId(self.grant))
    }
    fn close(&mut self, size: Size, grant: GrantId, draw: Draw, rep: Rep) -> Result<u64> {
        self.done(&Ask::Close { grant: grant.0 }, ANSWER)?;
        self.verify(size, draw, rep)
    }

    /// One repetition of the raw loop at each size of a call, and its round trips.
    fn raw(&mut self, size: Size, all: &mut All, rep: Rep) -> Result<()> {
        if self.raw.is_none() {
            return Ok(());
        }
        let page_bytes = u64::from(size.page_bytes);
        for (call_bytes, into) in RAW_CALL_BYTES.into_iter().zip(&mut all.raw) {
            let draw = Draw { seed: random(), pages: size.pages };
            let calls = (call_bytes, size.bytes());
            self.raw_run(size, draw, calls, Duration::ZERO, rep, into, |s| &mut s.tx)?;
        }
        let draw = || Draw { seed: random(), pages: size.trips() };
        let (calls, rtt) = ((RAW_CALL_BYTES[2], page_bytes), &mut all.rtt);
        self.raw_run(size, draw(), calls, Duration::ZERO, rep, rtt, |s| &mut s.trips)?;
        if self.config.latency {
            self.raw_run(size, draw(), calls, IDLE, rep, rtt, |s| &mut s.idle)?;
        }
        // A round trip moves one page.
        rtt.tx.clone_from(&rtt.trips);
        Ok(())
    }
    #[allow(clippy::too_many_arguments)] // What is sent, how, and where its times go.
    fn raw_run(
        &mut self,
        size: Size,
        draw: Draw,
        (call_bytes, ack_bytes): (u64, u64),
        pause: Duration,
        rep: Rep,
        into: &mut Samples,
        times: fn(&mut Samples) -> &mut Vec<Duration>,
    ) -> Result<()> {
        let pages = size.pages(&self.pool, &draw.from(size))?;
        self.clear(size, draw, rep)?;
        self.done(&Ask::Raw { size, draw, call_bytes, ack_bytes }, ANSWER)?;
        std::thread::sleep(SETTLE);
        let Some(raw) = &mut self.raw else { return Ok(()) };
        let sent = raw.send(pages, call_bytes, ack_bytes, pause);
        // If the receiver knows better what went wrong, its word counts.
        match self.receiver.hear(ANSWER)? {
            Answer::Failed(why) => return Err(why.into()),
            Answer::Done => times(into).extend(sent?),
            _ => return Err(misunderstood()),
        }
        into.verified_bytes += self.verify(size, draw, rep)?;
        Ok(())
    }

    /// One repetition of copies in this process.
    fn memcpy(&mut self, size: Size, into: &mut Samples, rep: Rep) -> Result<()> {
        let Some(copy) = &mut self.copy else { return Ok(()) };
        let outside = |e: std::io::Error| {
            Error::new(ErrorKind::Internal, "a page is outside the pool").caused_by(e)
        };
        let draw = Draw { seed: random(), pages: size.pages };
        let (from, to) = (draw.from(size), draw.to(size));
        let begun = Instant::now();
        copy.copy(&from, &to, size.page_bytes).map_err(outside)?;
        into.tx.push(begun.elapsed());
        if rep.verifies() {
            into.verified_bytes +=
                self.pattern.check(size, draw, |at, bytes| copy.read_at(at, bytes))?;
        }
        Ok(())
    }

    fn clear(&mut self, size: Size, draw: Draw, rep: Rep) -> Result<()> {
        if rep.first { self.done(&Ask::Clear { size, draw }, moving(size.bytes())) } else { Ok(()) }
    }
    fn verify(&mut self, size: Size, draw: Draw, rep: Rep) -> Result<u64> {
        if !rep.verifies() {
            return Ok(0);
        }
        match self.ask(&Ask::Check { size, draw }, moving(size.bytes()))? {
            Answer::Checked { bytes } => Ok(bytes),
            _ => Err(misunderstood()),
        }
    }
    fn ask(&mut self, ask: &Ask, limit: Duration) -> Result<Answer> {
        match self.receiver.ask(ask, limit)? {
            Answer::Failed(why) => Err(why.into()),
            answer => Ok(answer),
        }
    }
    fn done(&mut self, ask: &Ask, limit: Duration) -> Result<()> {
        match self.ask(ask, limit)? {
            Answer::Done => Ok(()),
            _ => Err(misunderstood()),
        }
    }
}

fn misunderstood() -> Error {
    Error::new(ErrorKind::Internal, "the receiver answered something else")
}
