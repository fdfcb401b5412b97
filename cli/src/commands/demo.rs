//! `kvlane demo`: a bootstrap service, prefill workers and decode workers (and their NICs, where those
//! are emulated) as processes of their own, with certificates of a throw-away authority, and requests
//! replayed through them.

use std::cell::Cell;
use std::process::ExitCode;
use std::time::Duration;

use kvlane_proto::{Error, ErrorKind, Result, Role, limits};
use kvlane_transport::quic::Security;

use super::replay::{self, LoadArgs};
use super::worker::{Asked, EngineName, check_engine};
use super::{INTERRUPTED, Interrupt};
use crate::chaos::{self, Fleet, Seat};
use crate::cluster::Cluster;
use crate::load::models;
use crate::load::trace::Requests;
use crate::memory;

/// Parts of rooms of a few dozen kB.
const SMALL_PART_BYTES: &str = "8192";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Prefill instances
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    prefill: u16,
    /// Decode instances
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    decode: u16,
    /// Tensor parallel ranks of each prefill instance, each a worker of its own
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
    prefill_tp: u32,
    /// Tensor parallel ranks of each decode instance, each a worker of its own
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
    decode_tp: u32,
    /// Model whose geometry the pools have
    #[arg(long, default_value = "llama-3.1-8b", help = format!("Model whose geometry the pools have: {}", replay::model_names()))]
    model: String,
    /// Data plane
    #[arg(long, default_value = "tcp")]
    engine: EngineName,
    /// Size of each worker's pool; 384, or 64 with `tiny`, if not given
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=super::worker::POOL_MIB_MAX))]
    pool_mib: Option<u64>,
    /// Check each part with a CRC32C
    #[arg(long)]
    checksum: bool,
    /// With `--engine gpunetio`: NICs are processes of this program; rates mean nothing
    #[arg(long)]
    emulated: bool,
    /// With `--engine gpunetio`: how many NICs there are; 2 if not given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(limits::RAILS_MAX)))]
    rails: Option<u16>,
    /// With `--engine verbs`: an RDMA device of the prefill workers, one for each rail; those that
    /// `kvlane explain` says, if none is given
    #[arg(long, value_name = "NIC")]
    prefill_nic: Vec<String>,
    /// With `--engine verbs`: an RDMA device of the decode workers; the first is connected with the first
    /// of the prefill workers, and so on
    #[arg(long, value_name = "NIC")]
    decode_nic: Vec<String>,
    /// Break things for so long: kill and stop workers, restart the service, hang up, spoil NICs;
    /// 20 requests in flight, 5 % aborted and rooms of 10 s, if not given
    #[arg(long, value_name = "SECONDS", conflicts_with_all = ["trace", "rooms", "speed"], value_parser = clap::value_parser!(u64).range(1..=7 * 24 * 3600))]
    chaos: Option<u64>,
    /// Workers give blocks back without a fence, for tests
    #[cfg(feature = "fault-injection")]
    #[arg(long, hide = true)]
    fence_off: bool,
    #[command(flatten)]
    load: LoadArgs,
}

pub(crate) async fn run(args: Args) -> Result<ExitCode> {
    // With a wrong flag, nothing is started.
    if args.rails.is_some() && args.engine == EngineName::Verbs {
        let e = Error::new(ErrorKind::Config, "--rails is for emulated NICs");
        return Err(e.hint("name NICs by --prefill-nic and --decode-nic"));
    }
    let own = [("--prefill-nic", &args.prefill_nic), ("--decode-nic", &args.decode_nic)];
    let own = own.iter().find_map(|(flag, nics)| (!nics.is_empty()).then_some(*flag));
    if let Some(flag) = own.filter(|_| args.engine != EngineName::Verbs) {
        return Err(Error::new(ErrorKind::Config, format!("{flag} is for --engine verbs"))
            .with("engine", args.engine.as_str())
            .hint("drop it"));
    }
    let nics = args.rails.is_some().then_some("--rails");
    let Args { engine, emulated, checksum, .. } = args;
    check_engine(&Asked { engine, emulated, checksum, nics, listens: None, advertises: false })?;
    for tp in [args.prefill_tp, args.decode_tp] {
        models::pools(&args.model, models::PAGE_TOKENS, (0, tp))?;
    }
    let requests = args.load.requests()?;
    let pool_mib = args.pool_mib.unwrap_or(if args.model == "tiny" { 64 } else { 384 });
    memory::check_mib(pool_mib.saturating_mul(args.workers() as u64), "--pool-mib")?;

    let mut interrupt = Interrupt::listen()?;
    let mut cluster = Cluster::new("demo")?;
    let mut end = serve(&args, pool_mib, &mut cluster, requests, &mut interrupt).await;
    // Also after a failure: nobody is left behind.
    let ended = tokio::select! {
        ended = cluster.end() => ended,
        // A second signal: those that are left are killed when `cluster` is dropped.
        () = interrupt.came() => return Ok(ExitCode::from(INTERRUPTED)),
    };
    if let (Ok(Some(done)), Err(e)) = (&mut end, &ended)
        && let Some(chaos) = &mut done.totals.chaos
    {
        chaos.wrong.push(e.to_string());
    }
    let good = end.as_ref().is_ok_and(|done| done.as_ref().is_none_or(replay::Done::is_good));
    if !good || ended.is_err() {
        cluster.show_logs();
    }
    for (engine, links) in cluster.links(Role::Decode) {
        eprintln!("links over {engine}: {links}");
    }
    let code = match end? {
        Some(done) => done.print()?,
        None => ExitCode::from(INTERRUPTED),
    };
    ended?;
    Ok(code)
}

/// Starts the processes and replays; gives nothing if it was interrupted before that began.
async fn serve(
    args: &Args,
    pool_mib: u64,
    cluster: &mut Cluster,
    requests: Requests,
    interrupt: &mut Interrupt,
) -> Result<Option<replay::Done>> {
    let fleet = tokio::select! {
        fleet = start(args, pool_mib, cluster) => fleet?,
        () = interrupt.came() => return Ok(None),
    };
    let load = args.load.clone();
    if let Some(seconds) = args.chaos {
        let seconds = Duration::from_secs(seconds);
        return chaos::run(cluster, &fleet, seconds, load, requests, interrupt).await;
    }
    let identity = cluster.identity(Role::Router, "router", 0)?;
    let security = Security::Mutual { dir: cluster.certs(&identity)? };
    let (service, workers) = (&fleet.service, fleet.workers());
    replay::replay(service, security, identity, workers, load, requests, interrupt).await
}

impl Args {
    /// How many workers, of either role.
    fn workers(&self) -> usize {
        let all = |instances: u16, tp: u32| usize::from(instances) * tp as usize;
        all(self.prefill, self.prefill_tp) + all(self.decode, self.decode_tp)
    }
}

/// Starts the processes.
async fn start(args: &Args, pool_mib: u64, cluster: &mut Cluster) -> Result<Fleet> {
    let mut nics = Vec::new();
    if args.emulated {
        for n in 0..args.rails.unwrap_or(2) {
            nics.push(cluster.start_nic(n).await?);
        }
    }
    let started = cluster.start_service("127.0.0.1:0").await?;
    let (service, service_pid) = (started.quic().to_string(), Cell::new(started.pid));
    let pool_mib = pool_mib.to_string();
    let instances = (0..args.prefill)
        .map(|n| (format!("prefill-{n}"), Role::Prefill, args.prefill_tp))
        .chain((0..args.decode).map(|n| (format!("decode-{n}"), Role::Decode, args.decode_tp)));
    let ranks = instances
        .flat_map(|(name, role, tp)| (0..tp).map(move |rank| (name.clone(), role, rank, tp)));
    let mut seats = Vec::new();
    for (name, role, rank, tp) in ranks {
        let tp = tp.to_string();
        let mut flags = vec!["worker", "--role", role.as_str(), "--service", &service];
        flags.extend(["--model", &args.model, "--pool-mib", &pool_mib]);
        flags.extend(["--engine", args.engine.as_str(), "--tp", &tp]);
        if args.checksum {
            flags.push("--checksum");
        }
        if args.emulated {
            flags.push("--emulated");
            flags.extend(nics.iter().flat_map(|(nic, _)| ["--nic", nic]));
        }
        let own = if role == Role::Prefill { &args.prefill_nic } else { &args.decode_nic };
        flags.extend(own.iter().flat_map(|nic| ["--nic", nic]));
        if args.chaos.is_some() {
            flags.push("--canaries");
        }
        if args.chaos.is_some() && args.model == "tiny" {
            // Small rooms, too, are hit in the middle, and on every rail.
            flags.extend(["--part-bytes", SMALL_PART_BYTES]);
        }
        #[cfg(feature = "fault-injection")]
        if args.fence_off {
            flags.push("--fence-off");
        }
        // One that is killed and started again ends what the one before it had open.
        let reset_key = cluster.file(&format!("{name}-{rank}.reset"));
        flags.extend(["--reset-key", &reset_key, "--until-stdin-closes"]);
        let identity = cluster.identity(role, &name, rank)?;
        let worker = cluster.start(&identity, &flags).await?;
        let flags = flags.iter().map(ToString::to_string).collect();
        seats.push(Seat::new(identity, flags, &worker));
    }
    Ok(Fleet { service, service_pid, seats, nics })
}
