//! `kvlane bench`: what an engine reaches on this machine, beside what the machine itself does.

use std::process::ExitCode;
use std::time::Duration;

use kvlane_proto::{Error, ErrorKind, Result, limits};

use super::{INTERRUPTED, Interrupt};
use crate::bench::control::{self, What};
use crate::bench::{self, Config, Setup, Size, Stop};

/// Most page sizes in one go.
const SIZES_MAX: usize = 64;
/// How long a measurement may take to end after an interruption.
const END: Duration = Duration::from_secs(10);

const EXAMPLES: &str = "\
Two processes on this host: one sends random pages from its pool, the other puts them into random
pages of its own, fresh ones in each repetition. Bytes are compared in the first, which does not
count, and in the last.

Columns (GB = 10^9 bytes; the first ten are named as nixlbench names them):
  Block Size, Batch Size  bytes of a page, pages of a repetition
  B/W                     bytes of a repetition by the median Tx
  Avg Lat.                average Tx by Batch Size
  Prep                    from the list of blocks to parts that can be posted
  Post                    handing those parts to the engine, all calls of a repetition together
  Tx                      first post to last acknowledgement
  P99                     over repetitions; with few of them, the largest
  Ours/Row                the engine's B/W by this row's
  Page P50, P99           --latency: one page and its acknowledgement, one after the other
  Idle P50, P99           the same after 300 us of nothing
Rows of --ceiling: raw-tcp is a blocking writev/readv loop over one connection between random pages,
the best of three call sizes; raw-rtt is its single pages with one byte of ack; memcpy copies between
two mappings of this process. Rows of --peers: see docs/performance.md.";

#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Args {
    /// Data plane
    #[arg(long, default_value = "tcp", help = format!("Data plane: {}", bench::engine_names()))]
    engine: String,
    /// Sizes of a page, from 1 byte to 64 MiB
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "4096,16384,65536,262144,1048576",
        value_parser = bench::page_bytes,
        value_name = "BYTES,…"
    )]
    page_bytes: Vec<u32>,
    /// Pages in one repetition; if not given, 4096, 1024 from 256 KiB on, 256 from 1 MiB on, and at
    /// most 256 MiB
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=i64::from(limits::BLOCKS_PER_ROOM_MAX)))]
    pages: Option<u32>,
    /// Lanes: connections that share the pages
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=i64::from(limits::LANES_PER_LINK_MAX)))]
    rails: u16,
    /// Check each part with a CRC32C
    #[arg(long)]
    checksum: bool,
    /// Also the round trip of one page and its acknowledgement
    #[arg(long)]
    latency: bool,
    /// Also what the machine does without an engine: a raw TCP loop and memcpy
    #[arg(long)]
    ceiling: bool,
    /// Also NIXL and Mooncake, where their Python packages are installed
    #[arg(long)]
    peers: bool,
    /// The interpreter that has those packages
    #[arg(long, default_value = "python3", value_name = "PROGRAM")]
    python: String,
    /// Repetitions that count, after one that warms up
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    runs: u32,
    /// Instead: rooms that move no page, between processes over QUIC
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "2000", group = CONTROL,
          conflicts_with_all = ENGINE, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rooms: Option<u32>,
    /// With --rooms: rooms in flight together
    #[arg(long, value_name = "K", default_value_t = 32, requires = "rooms",
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    in_flight: u32,
    /// Instead: resident memory of idle sessions at the bootstrap service
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "1000", group = CONTROL,
          conflicts_with_all = ENGINE, value_parser = clap::value_parser!(u32).range(1..=4096))]
    connections: Option<u32>,
    /// Instead: what processes cost that have nothing to do, over so many seconds
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "10", group = CONTROL,
          conflicts_with_all = ENGINE, value_parser = clap::value_parser!(u32).range(1..=3600))]
    rest: Option<u32>,
    /// One JSON object as the last line, and no table
    #[arg(long)]
    json: bool,
}

/// Measurements of the control plane: one at a time.
const CONTROL: &str = "control";
/// Flags of an engine's measurement.
const ENGINE: [&str; 9] = [
    "engine", "page_bytes", "pages", "rails", "checksum", "latency", "ceiling", "peers", "runs",
];

impl Args {
    fn control(&self) -> Option<What> {
        let rooms = self.rooms.map(|rooms| What::Rooms { rooms, in_flight: self.in_flight });
        let connections = self.connections.map(|count| What::Connections { count });
        rooms.or(connections).or(self.rest.map(|seconds| What::Rest { seconds }))
    }
    fn config(self) -> Result<Config> {
        if self.page_bytes.len() > SIZES_MAX {
            return Err(Error::new(ErrorKind::LimitExceeded, "too many page sizes in one go")
                .with("asked", self.page_bytes.len())
                .with("limit", SIZES_MAX)
                .hint("measure some of them, then the others"));
        }
        let sizes = self.page_bytes.iter().map(|&bytes| Size::new(bytes, self.pages)).collect();
        Ok(Config {
            setup: Setup { engine: self.engine, rails: self.rails, checksum: self.checksum },
            sizes,
            runs: self.runs,
            latency: self.latency,
            ceiling: self.ceiling,
            peers: self.peers.then_some(self.python),
            json: self.json,
        })
    }
}

pub(crate) async fn run(args: Args) -> Result<ExitCode> {
    if let Some(what) = args.control() {
        let mut interrupt = Interrupt::listen()?;
        if control::run(what, args.json, &mut interrupt).await? {
            return Ok(ExitCode::SUCCESS);
        }
        eprintln!("interrupted");
        return Ok(ExitCode::from(INTERRUPTED));
    }
    let config = args.config()?;
    config.check()?;
    let mut interrupt = Interrupt::listen()?;
    let stop = Stop::default();
    // Measuring blocks; this task only waits for signals.
    let mut work = tokio::task::spawn_blocking({
        let stop = stop.clone();
        move || bench::run(&config, &stop)
    });
    tokio::select! {
        done = &mut work => {
            let lost = |e| Error::new(ErrorKind::Internal, "the measurement broke off").caused_by(e);
            done.map_err(lost)?.map(|()| ExitCode::SUCCESS)
        }
        () = interrupt.came() => {
            stop.set();
            tokio::select! {
                _ = tokio::time::timeout(END, &mut work) => {}
                () = interrupt.came() => {}
            }
            eprintln!("interrupted");
            Ok(ExitCode::from(INTERRUPTED))
        }
    }
}
