//! `kvlane worker`: a worker with a stand-in for its model server.

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use clap::ValueEnum;
use kvlane_actors::{DecodeWorker, EngineChoice, Pools, PrefillWorker, WorkerConfig};
use kvlane_proto::msg::service::LoadState;
use kvlane_proto::{Error, ErrorKind, Result, Role, limits};
use kvlane_transport::devices::Sysfs;
use kvlane_transport::engine::gpunetio::GpunetioConfig;
use kvlane_transport::engine::shm::ShmConfig;
use kvlane_transport::engine::tcp::TcpConfig;
use kvlane_transport::engine::verbs::VerbsConfig;
use kvlane_transport::quic::load_reset_key;

use super::rails::RailArgs;
use super::values::host_port;
use super::{EndArgs, SecurityArgs, say_ready};
use crate::load::models;
use crate::memory;
use crate::standin::{self, Server};

/// Which side of a hand-off.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Side {
    /// Holds prompts' pages and sends them
    Prefill,
    /// Receives them
    Decode,
}

impl From<Side> for Role {
    fn from(side: Side) -> Self {
        match side {
            Side::Prefill => Self::Prefill,
            Side::Decode => Self::Decode,
        }
    }
}

/// Which data plane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum EngineName {
    /// TCP connections, received in place
    #[default]
    Tcp,
    /// Shared memory, between workers of one host
    Shm,
    /// Shared memory where the peer's socket can be reached, else TCP
    Auto,
    /// Writes of the sender's NIC, by libibverbs: InfiniBand and RoCE
    Verbs,
    /// Writes of the sender's NIC; this build posts to emulated NICs only, with --emulated
    Gpunetio,
}

impl EngineName {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Shm => "shm",
            Self::Auto => "auto",
            Self::Verbs => "verbs",
            Self::Gpunetio => "gpunetio",
        }
    }
}

/// What was asked of an engine, for [`check_engine`].
pub(super) struct Asked {
    pub(super) engine: EngineName,
    pub(super) emulated: bool,
    pub(super) checksum: bool,
    /// The flag that says how many NICs there are, if it was given.
    pub(super) nics: Option<&'static str>,
    /// A flag that says where an engine without NICs listens, if one was given.
    pub(super) listens: Option<&'static str>,
    /// Peers are told where to dial the engine.
    pub(super) advertises: bool,
}

/// Refuses by name what an engine cannot do.
pub(super) fn check_engine(asked: &Asked) -> Result<()> {
    let Asked { engine, emulated, checksum, nics, listens, advertises } = asked;
    let name = engine.as_str();
    let refused = |what: String, fix: &'static str| {
        Err(Error::new(ErrorKind::Config, what).with("engine", name).hint(fix))
    };
    match engine {
        EngineName::Shm if *advertises => refused(
            "--data-advertise is not for this engine: nobody dials it by address".into(),
            "drop it, or use --engine tcp",
        ),
        EngineName::Gpunetio if !emulated => refused(
            "this build posts to emulated NICs only".into(),
            "add --emulated; rates then mean nothing",
        ),
        EngineName::Verbs if *emulated => refused(
            "--emulated is not for this engine: emulated NICs have no libibverbs".into(),
            "drop it, or use --engine gpunetio",
        ),
        EngineName::Verbs | EngineName::Gpunetio if *checksum => refused(
            "--checksum is not for this engine: no code of the receiver sees a part".into(),
            "drop --checksum; NICs check what they carry",
        ),
        EngineName::Verbs | EngineName::Gpunetio => match listens {
            Some(flag) => refused(
                format!("{flag} is not for this engine: it listens nowhere, its NICs do"),
                "drop it; --nic says which NICs",
            ),
            None => Ok(()),
        },
        _ => match emulated.then_some("--emulated").or(*nics) {
            Some(flag) => refused(
                format!("{flag} is not for this engine: it has no NICs of its own"),
                "drop it, or use --engine gpunetio --emulated",
            ),
            None => Ok(()),
        },
    }
}

/// How long a worker may take to register at its start.
const REGISTERED: Duration = Duration::from_secs(30);
/// Largest pool that a flag may name: a PiB. What there is of memory is looked at later.
pub(super) const POOL_MIB_MAX: u64 = 1 << 30;

/// Builds that refuse these flags do not show them.
const NO_HOOKS: bool = cfg!(not(feature = "fault-injection"));

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Which side
    #[arg(long)]
    role: Side,
    /// Name of the instance, with --insecure
    #[arg(long, default_value = "w0", conflicts_with = "certs")]
    name: String,
    /// Tensor parallel ranks of the instance; this one's is its identity's
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    tp: u32,
    /// Rank in the instance, with --insecure
    #[arg(long, default_value_t = 0, conflicts_with = "certs")]
    rank: u32,
    /// host:port of the bootstrap service
    #[arg(long, value_name = "HOST:PORT", value_parser = host_port)]
    service: Option<String>,
    /// Model whose geometry the pool has
    #[arg(long, default_value = "llama-3.1-8b")]
    model: String,
    /// Tokens in a block
    #[arg(long, default_value_t = models::PAGE_TOKENS)]
    page_tokens: u32,
    /// Size of the pool
    #[arg(long, default_value_t = 384, value_parser = clap::value_parser!(u64).range(1..=POOL_MIB_MAX))]
    pool_mib: u64,
    /// Blocks of the pool, instead of its size
    #[arg(long, conflicts_with = "pool_mib")]
    pool_blocks: Option<u32>,
    /// Where its QUIC endpoint listens
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// host:port that peers dial, if it is not where it listens
    #[arg(long, value_name = "HOST:PORT", value_parser = host_port)]
    advertise: Option<String>,
    /// Where the stand-in takes requests; plain JSON lines, so only where every host is trusted
    #[arg(long, default_value = "127.0.0.1:0")]
    serving: SocketAddr,
    /// Data plane
    #[arg(long, default_value = "tcp")]
    engine: EngineName,
    /// Where the engine listens for pages; the QUIC endpoint's address if not given
    #[arg(long, value_name = "IP")]
    data: Option<IpAddr>,
    /// IP address that peers reach the engine's port at, if it is not where it listens (tcp, auto); several times
    #[arg(long, value_name = "IP")]
    data_advertise: Vec<IpAddr>,
    /// Aim for the size of a part; the decode's counts
    #[arg(long, value_name = "BYTES", default_value_t = limits::PART_BYTES)]
    part_bytes: u64,
    /// Directory for the socket of `--engine shm` and `auto`, for containers that do not share a network
    /// namespace: both must see it under this name
    #[arg(long, value_name = "DIR")]
    shm_dir: Option<std::path::PathBuf>,
    /// Check each part with a CRC32C
    #[arg(long)]
    checksum: bool,
    /// Use NICs that are processes of `kvlane emulated-nic`: for tests, rates mean nothing
    #[arg(long)]
    emulated: bool,
    #[command(flatten)]
    rails: RailArgs,
    /// Connections to each peer; 4 for each rail, if not given
    #[arg(long)]
    lanes: Option<u16>,
    /// Connections that a room borrows; one of each rail, if not given
    #[arg(long)]
    lanes_per_room: Option<u16>,
    /// File with the key that lets a restarted worker end its old connections; made if missing
    #[arg(long, value_name = "FILE")]
    reset_key: Option<std::path::PathBuf>,
    /// At SIGTERM, wait at most this long for rooms that run
    #[arg(long, default_value_t = 30)]
    drain_s: u64,
    /// Stop at a phase of the first room, for tests (needs a build with `fault-injection`)
    #[arg(long, value_name = "PHASE", hide = NO_HOOKS)]
    stop_at: Option<String>,
    /// Give blocks back without a fence, for tests (needs a build with `fault-injection`)
    #[arg(long, hide = NO_HOOKS)]
    fence_off: bool,
    /// Stamp free blocks whole, so that a late write is found wherever it lands, for tests
    #[arg(long)]
    canaries: bool,
    /// Look at all free blocks after each room, for tests
    #[arg(long)]
    audit_rooms: bool,
    /// Say on standard output whenever a room is at a phase, for tests (needs a build with `fault-injection`)
    #[arg(long, value_name = "PHASE", hide = NO_HOOKS)]
    say_at: Option<String>,
    /// Receive no faster, for tests (needs a build with `fault-injection`)
    #[arg(long, value_name = "BYTES", hide = NO_HOOKS)]
    throttle_bytes_per_s: Option<u64>,
    #[command(flatten)]
    security: SecurityArgs,
    #[command(flatten)]
    end: EndArgs,
}

impl Args {
    fn check_engine(&self) -> Result<()> {
        let nics = (!self.rails.nic.is_empty()).then_some("--nic");
        let real = self.rails.of_real_nics().filter(|_| self.engine != EngineName::Verbs);
        let Self { engine, emulated, checksum, .. } = *self;
        let data = self.data.is_some().then_some("--data");
        let advertises = !self.data_advertise.is_empty();
        let told = advertises.then_some("--data-advertise");
        let listens = data.or(told).or(self.shm_dir.is_some().then_some("--shm-dir"));
        check_engine(&Asked { engine, emulated, checksum, nics, listens, advertises })?;
        if let Some(flag) = real {
            return Err(Error::new(ErrorKind::Config, format!("{flag} is for real NICs"))
                .with("engine", engine.as_str())
                .hint("drop it, or use --engine verbs"));
        }
        if let (EngineName::Gpunetio, None) = (engine, nics) {
            return Err(Error::new(ErrorKind::Config, "no NIC is named")
                .with("engine", engine.as_str())
                .hint("start one with `kvlane emulated-nic --socket @NAME`, and add --nic @NAME"));
        }
        Ok(())
    }
}

/// Takes note of what is to go wrong.
#[cfg(not(feature = "fault-injection"))]
fn faults(args: &Args) -> Result<()> {
    let asked = [
        args.stop_at.as_ref().map(|phase| format!("--stop-at {phase}")),
        args.say_at.as_ref().map(|phase| format!("--say-at {phase}")),
        args.fence_off.then(|| "--fence-off".into()),
        args.throttle_bytes_per_s.map(|rate| format!("--throttle-bytes-per-s {rate}")),
    ];
    match asked.into_iter().flatten().next() {
        None => Ok(()),
        Some(asked) => Err(Error::new(ErrorKind::Config, "this build has no stop hooks")
            .with("asked", asked)
            .hint("build with `--features fault-injection`, for tests only")),
    }
}

/// Takes note of what is to go wrong.
#[cfg(feature = "fault-injection")]
fn faults(args: &Args) -> Result<()> {
    use kvlane_actors::faults;
    if let Some(phase) = &args.stop_at {
        faults::arm(phase, faults::Hook::Stop)?;
    }
    if let Some(phase) = &args.say_at {
        faults::say_at(phase)?;
    }
    faults::set_throttle(args.throttle_bytes_per_s.unwrap_or(0));
    if args.fence_off {
        faults::set_fences_off(true);
    }
    Ok(())
}

/// Says each state that a worker which drains comes to; never ends.
async fn tell_state(worker: &standin::Worker) {
    let mut loads = worker.loads();
    let mut told = LoadState::Serving;
    loop {
        let load = *loads.borrow_and_update();
        if load.state() != told {
            told = load.state();
            tracing::info!(state = told.as_str(), rooms = load.rooms, owing = load.owing, "drains");
        }
        if loads.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

pub(crate) async fn run(args: Args) -> Result<ExitCode> {
    crate::counters::start();
    faults(&args)?;
    args.check_engine()?;
    let role = Role::from(args.role);
    let (security, identity) = args.security.identity(role, &args.name, args.rank)?;
    if identity.rank >= args.tp {
        return Err(Error::new(ErrorKind::Config, "the worker's rank is not below --tp")
            .with("worker", &identity)
            .with("rank", identity.rank)
            .with("tp", args.tp)
            .hint("give every rank of the instance the same --tp, and this one a smaller --rank (with --certs: a certificate of it)"));
    }
    let layouts = models::pools(&args.model, args.page_tokens, (identity.rank, args.tp))?;
    let block_bytes = layouts.iter().map(|l| l.block_bytes()).sum::<u64>();
    let blocks = args.pool_blocks.map_or((args.pool_mib << 20) / block_bytes, u64::from);
    if blocks == 0 || blocks > u64::from(limits::POOL_BLOCKS_MAX) {
        return Err(Error::new(
            ErrorKind::Config,
            "the pool does not hold a sensible number of blocks",
        )
        .with("pool_mib", (blocks * block_bytes) >> 20)
        .with("block_bytes", block_bytes)
        .with("blocks", blocks)
        .hint("change --pool-mib, or --pool-blocks"));
    }
    let (pool_mib, flag) = match args.pool_blocks {
        Some(_) => ((blocks * block_bytes) >> 20, "--pool-blocks"),
        None => (args.pool_mib, "--pool-mib"),
    };
    memory::check_mib(pool_mib, flag)?;
    if args.service.is_none() {
        tracing::warn!("no --service: nobody will find this worker");
    }
    if !args.listen.ip().is_loopback() && args.serving.ip().is_loopback() {
        tracing::warn!(
            listen = %args.listen,
            serving = %args.serving,
            "--serving is on loopback: routers on other hosts cannot reach the model server"
        );
    }
    let wanted = layouts.into_iter().map(|l| (l, blocks as u32)).collect();
    let pools = match args.engine {
        EngineName::Gpunetio => Pools::own_for_nics(wanted)?,
        _ => Pools::own_all(wanted)?,
    };
    let data = args.data.unwrap_or(args.listen.ip());
    let tcp = TcpConfig {
        bind: SocketAddr::new(data, 0),
        advertise: args.data_advertise.clone(),
        checksum: args.checksum,
        ..TcpConfig::default()
    };
    let shm = ShmConfig { directory: args.shm_dir.clone(), checksum: args.checksum };
    let engine = match args.engine {
        EngineName::Tcp => EngineChoice::Tcp(tcp),
        EngineName::Shm => EngineChoice::Shm(shm),
        EngineName::Auto => EngineChoice::Auto { shm, tcp },
        EngineName::Verbs => {
            let wishes = args.rails.wishes(None);
            EngineChoice::Verbs(VerbsConfig { wishes, ..VerbsConfig::default() })
        }
        EngineName::Gpunetio => {
            // Every text is a name.
            let nics = args.rails.nic.iter().flat_map(|nic| nic.parse()).collect();
            EngineChoice::Gpunetio(GpunetioConfig::new(nics))
        }
    };
    let rails = match &engine {
        EngineChoice::Verbs(config) => {
            let choice = config.choose(&Sysfs::default())?;
            for rail in choice.require()? {
                tracing::info!(%rail, "pages go over");
            }
            choice.rails.len()
        }
        _ => args.rails.nic.len(),
    };
    let rails = rails.clamp(1, usize::from(limits::RAILS_MAX)) as u16;
    let server = Server::bind(args.serving).await?;
    let mut config = WorkerConfig::new(identity.clone(), security, pools.clone(), engine);
    config.listen = args.listen;
    config.advertise.clone_from(&args.advertise);
    config.service.clone_from(&args.service);
    config.serving = server.address().to_string();
    config.lanes_per_link = args.lanes.unwrap_or(limits::LANES_PER_LINK * rails);
    config.lanes_per_room = args.lanes_per_room.unwrap_or(limits::LANES_PER_ROOM * rails);
    config.part_bytes = args.part_bytes;
    if let Some(file) = &args.reset_key {
        config.reset_key = Some(load_reset_key(file)?);
    }
    let model = standin::Model::new(pools, args.canaries, args.audit_rooms);
    let worker = match args.role {
        Side::Prefill => standin::Worker::Prefill(PrefillWorker::start(config)?),
        Side::Decode => standin::Worker::Decode(DecodeWorker::start(config)?),
    };
    if let Some(service) = &args.service {
        let registered = worker.registered(REGISTERED).await;
        registered.map_err(|e| e.with("service", service))?;
    }
    #[cfg(feature = "fault-injection")]
    if kvlane_actors::faults::reached("registered") {
        std::future::pending::<()>().await;
    }
    say_ready(serde_json::json!({
        "ready": role.as_str(),
        "identity": identity.to_string(),
        "incarnation": worker.address().key.incarnation.to_string(),
        "quic": worker.address().address,
        "serving": server.address(),
        "blocks": blocks,
    }));
    // Also while it drains: rooms that have begun still get their other leg.
    let serve = server.run(&worker, &model);
    tokio::pin!(serve);
    tokio::select! {
        () = &mut serve => {}
        end = worker.ended() => {
            tracing::error!(?end, "the worker has ended by itself");
            return Ok(ExitCode::FAILURE);
        }
        end = args.end.wait() => end?,
    }
    tracing::info!("told to end");
    worker.drain().await?;
    tracing::info!(rooms = worker.load().rooms, "draining");
    let telling = tell_state(&worker);
    let idle = async {
        worker.idle().await;
        server.idle().await;
    };
    tokio::select! {
        () = &mut serve => {}
        () = telling => {}
        idle = tokio::time::timeout(Duration::from_secs(args.drain_s), idle) => {
            if idle.is_err() {
                tracing::warn!(rooms = worker.load().rooms, "rooms still run; ending all the same");
            }
        }
    }
    tracing::info!(state = worker.load().state().as_str(), "ends");
    worker.stop().await;
    Ok(ExitCode::SUCCESS)
}
