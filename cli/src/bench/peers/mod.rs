//! Other transfer engines beside ours, where their Python packages are installed.
//!
//! Owns: one driver process for each ([`Peer`]), and the folder with their scripts. In: page sizes
//! and seeds. Out: the same samples as of our own engine. Invariants: a peer that is missing, or
//! fails, costs its own rows and says why; nothing of a peer is part of this program, only its
//! public Python API is called.

use std::process::{Command, Stdio};
use std::time::Duration;

use kvlane_proto::{Error, ErrorKind, Result};
use kvlane_transport::random::random;
use serde::{Deserialize, Serialize};

use super::figures::{Row, Samples};
use super::measure::Rep;
use super::pages::Size;
use super::talk::Process;
use super::wait::{Stop, moving};
use crate::scratch::Scratch;

/// How long a driver may take to import its package and register its pools.
const START: Duration = Duration::from_secs(120);
/// Lines of a driver's log that are shown when it failed.
const LOG_LINES: usize = 5;

const HARNESS: (&str, &str) = ("harness.py", include_str!("harness.py"));
const NIXL: (&str, &str) = ("peer_nixl.py", include_str!("peer_nixl.py"));
const MOONCAKE: (&str, &str) = ("peer_mooncake.py", include_str!("peer_mooncake.py"));

/// One way to run one peer.
struct Kind {
    name: &'static str,
    script: &'static str,
    environment: &'static [(&'static str, &'static str)],
    /// Variables that would make it another kind.
    without: &'static [&'static str],
    package: &'static str,
    install: &'static str,
}

const NIXL_INSTALL: &str = "in a virtual environment: `pip install numpy`, `pip install --no-deps nixl-cu12`; then name its interpreter with --python";
const KINDS: &[Kind] = &[
    Kind {
        name: "nixl-ucx-tcp",
        script: NIXL.0,
        environment: &[("UCX_TLS", "tcp,self"), ("UCX_NET_DEVICES", "lo")],
        without: &[],
        package: "nixl-cu12 (or nixl, or nixl-cu13) and numpy",
        install: NIXL_INSTALL,
    },
    Kind {
        name: "nixl-same-host",
        script: NIXL.0,
        environment: &[],
        without: &["UCX_TLS", "UCX_NET_DEVICES"],
        package: "nixl-cu12 (or nixl, or nixl-cu13) and numpy",
        install: NIXL_INSTALL,
    },
    Kind {
        name: "mooncake-tcp",
        script: MOONCAKE.0,
        environment: &[],
        without: &[],
        package: "mooncake-transfer-engine-non-cuda (or mooncake-transfer-engine)",
        install: "in a virtual environment: `pip install mooncake-transfer-engine-non-cuda`, and Debian's libibverbs1 librdmacm1 libnuma1 libcurl4; then name its interpreter with --python",
    },
];

/// How many peers there are, for what they need of memory.
pub(crate) const COUNT: u64 = KINDS.len() as u64;

#[derive(Serialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
enum Ask {
    Row { page_bytes: u32, pool_blocks: u32 },
    Clear { seed: u32, pages: u32 },
    Run { seed: u32, pages: u32 },
    Check { seed: u32, pages: u32 },
    Trips { seed: u32, pages: u32, idle_us: u64 },
}

/// Whatever a driver answers.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Answer {
    error: Option<String>,
    missing: Option<String>,
    version: Option<String>,
    bytes: u64,
    prep_us: Option<f64>,
    post_us: Option<f64>,
    tx_us: Option<f64>,
    trips_us: Vec<f64>,
    notified_us: Vec<f64>,
}

fn duration(us: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(us / 1e6).map_err(|e| {
        Error::new(ErrorKind::Malformed, "a peer's driver gave no time").with("us", us).caused_by(e)
    })
}

/// The peers that could be started.
#[derive(Default)]
pub(crate) struct Peers {
    peers: Vec<Peer>,
    dir: Option<Scratch>,
}

struct Peer {
    name: &'static str,
    process: Process,
    version: String,
    samples: Samples,
}

impl Peers {
    /// Starts each peer; says of those that are missing what was tried and how to install them.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] if the scripts cannot be written; [`ErrorKind::Aborted`].
    pub(crate) fn start(python: &str, pool_bytes: u64, stop: &Stop) -> Result<Self> {
        let dir = Scratch::new("bench")?;
        for (name, text) in [HARNESS, NIXL, MOONCAKE] {
            std::fs::write(dir.path().join(name), text).map_err(|e| {
                Error::new(ErrorKind::Io, "cannot write a peer's driver").caused_by(e)
            })?;
        }
        let mut peers = Vec::new();
        for kind in KINDS {
            stop.check()?;
            match Peer::start(kind, python, &dir, pool_bytes, stop) {
                Ok(Ok(peer)) => peers.push(peer),
                Ok(Err(tried)) => eprintln!(
                    "{}: not measured: needs the Python packages {} for {python} (tried: {tried}); to install, {}",
                    kind.name, kind.package, kind.install
                ),
                Err(e) => fail(kind.name, &dir, &e),
            }
        }
        Ok(Self { peers, dir: Some(dir) })
    }
    /// Begins a page size.
    pub(crate) fn begin(&mut self, size: Size) -> Result<()> {
        self.each(|peer| {
            peer.samples = Samples::default();
            let Size { page_bytes, pool_blocks, .. } = size;
            peer.ask(&Ask::Row { page_bytes, pool_blocks }, size.pool_bytes()).map(drop)
        })
    }
    /// One repetition of each.
    pub(crate) fn run(&mut self, size: Size, rep: Rep) -> Result<()> {
        self.each(|peer| {
            let (seed, pages) = (random() as u32, size.pages);
            if rep.first {
                peer.ask(&Ask::Clear { seed, pages }, size.bytes())?;
            }
            let took = peer.ask(&Ask::Run { seed, pages }, size.bytes())?;
            if rep.verifies() {
                let checked = peer.ask(&Ask::Check { seed, pages }, size.bytes())?;
                peer.samples.verified_bytes += checked.bytes;
            }
            for (us, samples) in [
                (took.prep_us, &mut peer.samples.prep),
                (took.post_us, &mut peer.samples.post),
                (took.tx_us, &mut peer.samples.tx),
            ] {
                samples.extend(us.map(duration).transpose()?);
            }
            Ok(())
        })
    }
    /// Round trips of each.
    pub(crate) fn trips(&mut self, size: Size, pause: Duration) -> Result<()> {
        self.each(|peer| {
            let (seed, pages) = (random() as u32, size.trips());
            let idle_us = pause.as_micros() as u64;
            let ask = Ask::Trips { seed, pages, idle_us };
            let took = peer.ask(&ask, u64::from(pages) * u64::from(size.page_bytes))?;
            let Samples { trips, idle, notified, .. } = &mut peer.samples;
            for (from, to) in [
                (took.trips_us, if pause.is_zero() { trips } else { idle }),
                (if pause.is_zero() { took.notified_us } else { Vec::new() }, notified),
            ] {
                for us in from {
                    to.push(duration(us)?);
                }
            }
            Ok(())
        })
    }
    /// Forgets what was measured so far.
    pub(crate) fn clear(&mut self) {
        self.peers.iter_mut().for_each(|peer| peer.samples.clear());
    }
    /// The rows of this page size.
    pub(crate) fn rows(&self, size: Size) -> Vec<Row> {
        let row = |peer: &Peer| Row {
            version: Some(peer.version.clone()),
            ..peer.samples.row(peer.name, size.page_bytes, size.pages, size.bytes())
        };
        self.peers.iter().map(row).collect()
    }
    /// Does something with each; a peer that fails is given up.
    fn each(&mut self, mut work: impl FnMut(&mut Peer) -> Result<()>) -> Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        let mut aborted = None;
        self.peers.retain_mut(|peer| match work(peer) {
            Ok(()) => true,
            Err(e) if e.kind() == ErrorKind::Aborted => {
                aborted = Some(e);
                true
            }
            Err(e) => {
                fail(peer.name, dir, &e);
                false
            }
        });
        aborted.map_or(Ok(()), Err)
    }
}

impl Peer {
    /// Starts a driver; the inner error says which modules were tried in vain.
    fn start(
        kind: &'static Kind,
        python: &str,
        dir: &Scratch,
        pool_bytes: u64,
        stop: &Stop,
    ) -> Result<Result<Self, String>> {
        let log = std::fs::File::create(dir.path().join(kind.name))
            .map_err(|e| Error::new(ErrorKind::Io, "cannot write a peer's log").caused_by(e))?;
        let mut command = Command::new(python);
        for name in kind.without {
            command.env_remove(name);
        }
        command
            .arg(dir.path().join(kind.script))
            .args(["initiator", &pool_bytes.to_string()])
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .envs(kind.environment.iter().copied())
            .stderr(Stdio::from(log));
        let mut process = match Process::start(kind.name, command, stop) {
            Ok(process) => process,
            Err(e) => return Ok(Err(format!("starting it: {e}"))),
        };
        let hello: Answer = process.hear(START)?;
        if let Some(tried) = hello.missing {
            return Ok(Err(tried));
        }
        if let Some(error) = hello.error {
            return Err(said(&error));
        }
        let version = hello.version.unwrap_or_default();
        Ok(Ok(Self { name: kind.name, process, version, samples: Samples::default() }))
    }
    fn ask(&mut self, ask: &Ask, bytes: u64) -> Result<Answer> {
        let answer: Answer = self.process.ask(ask, START + moving(bytes))?;
        match &answer.error {
            Some(error) => Err(said(error)),
            None => Ok(answer),
        }
    }
}

fn said(error: &str) -> Error {
    Error::new(ErrorKind::Io, "a peer's driver failed").with("said", error)
}

fn fail(name: &str, dir: &Scratch, e: &Error) {
    eprintln!("{name}: not measured: {e}");
    let text = std::fs::read(dir.path().join(name)).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    for line in &lines[lines.len().saturating_sub(LOG_LINES)..] {
        eprintln!("[{name}] {line}");
    }
}
