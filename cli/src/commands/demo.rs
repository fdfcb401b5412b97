//! `kvlane demo`: a bootstrap service, prefill workers and decode workers as processes of their own,
//! with certificates of a throw-away authority, and requests replayed through them.

use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use kvlane_proto::{Error, ErrorKind, Identity, Result, Role};
use kvlane_transport::quic::{Security, ca};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use super::replay::{self, LoadArgs};
use super::worker::EngineName;
use super::{INTERRUPTED, Interrupt};
use crate::load::models;
use crate::load::trace::Requests;
use crate::memory;
use crate::scratch::Scratch;

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
    #[command(flatten)]
    load: LoadArgs,
}

const CLUSTER: &str = "demo";
/// How long a process may take to say that it is ready.
const READY: Duration = Duration::from_secs(30);
/// How long one may take to end.
const END: Duration = Duration::from_secs(20);
/// Lines of each log that are shown when something failed.
const LOG_LINES: usize = 5;

pub(crate) async fn run(args: Args) -> Result<ExitCode> {
    // With a wrong flag, nothing is started.
    for tp in [args.prefill_tp, args.decode_tp] {
        models::pools(&args.model, models::PAGE_TOKENS, (0, tp))?;
    }
    let requests = args.load.requests()?;
    let pool_mib = args.pool_mib.unwrap_or(if args.model == "tiny" { 64 } else { 384 });
    let (prefills, decodes) = args.workers();
    memory::check_mib(pool_mib.saturating_mul((prefills + decodes) as u64), "--pool-mib")?;

    let mut interrupt = Interrupt::listen()?;
    let dir = Scratch::new("demo")?;
    let ca_dir = dir.path().join("ca");
    ca::create_ca(&ca_dir, CLUSTER)?;
    let mut cluster = Processes { dir: dir.path(), ca: &ca_dir, children: Vec::new() };
    let end = serve(&args, pool_mib, &mut cluster, requests, &mut interrupt).await;
    // Also after a failure: nobody is left behind.
    let ended = tokio::select! {
        ended = cluster.end() => ended,
        // A second signal: those that are left are killed when `cluster` is dropped.
        () = interrupt.came() => return Ok(ExitCode::from(INTERRUPTED)),
    };
    let good = end.as_ref().is_ok_and(|done| done.as_ref().is_none_or(replay::Done::is_good));
    if !good || ended.is_err() {
        cluster.show_logs();
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
    cluster: &mut Processes<'_>,
    requests: Requests,
    interrupt: &mut Interrupt,
) -> Result<Option<replay::Done>> {
    let service = tokio::select! {
        service = start(args, pool_mib, cluster) => service?,
        () = interrupt.came() => return Ok(None),
    };
    let identity = Identity::new(CLUSTER, Role::Router, "router", 0)?;
    let security = Security::Mutual { dir: cluster.certs(&identity)? };
    let (load, workers) = (args.load.clone(), args.workers());
    replay::replay(&service, security, identity, workers, load, requests, interrupt).await
}

impl Args {
    /// How many workers, of either role.
    fn workers(&self) -> (usize, usize) {
        let all = |instances: u16, tp: u32| usize::from(instances) * tp as usize;
        (all(self.prefill, self.prefill_tp), all(self.decode, self.decode_tp))
    }
}

/// Starts the processes; gives the address of the bootstrap service.
async fn start(args: &Args, pool_mib: u64, cluster: &mut Processes<'_>) -> Result<String> {
    let ready = cluster
        .start("bootstrap", Role::Service, 0, &["bootstrap", "--quic", "127.0.0.1:0"])
        .await?;
    let service = ready["quic"].as_str().unwrap_or_default().to_string();
    let pool_mib = pool_mib.to_string();
    let instances = (0..args.prefill)
        .map(|n| (format!("prefill-{n}"), Role::Prefill, args.prefill_tp))
        .chain((0..args.decode).map(|n| (format!("decode-{n}"), Role::Decode, args.decode_tp)));
    let ranks = instances
        .flat_map(|(name, role, tp)| (0..tp).map(move |rank| (name.clone(), role, rank, tp)));
    for (name, role, rank, tp) in ranks {
        let tp = tp.to_string();
        let mut flags = vec!["worker", "--role", role.as_str(), "--service", &service];
        flags.extend(["--model", &args.model, "--pool-mib", &pool_mib]);
        flags.extend(["--engine", args.engine.as_str(), "--tp", &tp]);
        if args.checksum {
            flags.push("--checksum");
        }
        cluster.start(&name, role, rank, &flags).await?;
    }
    Ok(service)
}

/// The processes of a demo.
struct Processes<'a> {
    dir: &'a Path,
    ca: &'a Path,
    children: Vec<(String, Child)>,
}

impl Processes<'_> {
    fn certs(&self, identity: &Identity) -> Result<PathBuf> {
        let dir = self
            .dir
            .join(format!("certs-{}-{}-{}", identity.role, identity.instance, identity.rank));
        ca::issue(self.ca, &dir, identity, 1)?;
        Ok(dir)
    }

    /// Starts one, and waits until it is ready.
    async fn start(
        &mut self,
        instance: &str,
        role: Role,
        rank: u32,
        flags: &[&str],
    ) -> Result<serde_json::Value> {
        let name = &format!("{instance}-{rank}");
        let failed = |why: &str| Error::new(ErrorKind::Io, why.to_string()).with("process", name);
        let certs = self.certs(&Identity::new(CLUSTER, role, instance, rank)?)?;
        let program = std::env::current_exe()
            .map_err(|e| failed("this program cannot be found").caused_by(e))?;
        let log = std::fs::File::create(self.log(name))
            .map_err(|e| failed("cannot write a log").caused_by(e))?;
        let mut child = Command::new(program)
            .args(flags)
            .arg("--certs")
            .arg(certs)
            .arg("--until-stdin-closes")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            // A signal of the terminal is for this process, which ends them in order.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| failed("cannot be started").caused_by(e))?;
        let stdout = child.stdout.take();
        self.children.push((name.to_string(), child));
        let Some(stdout) = stdout else { return Err(failed("has no output")) };
        let mut lines = BufReader::new(stdout).lines();
        let line = tokio::time::timeout(READY, lines.next_line())
            .await
            .map_err(|_| failed("was not ready in time").with("limit_s", READY.as_secs()))?
            .map_err(|e| failed("cannot be read").caused_by(e))?
            .ok_or_else(|| failed("ended before it was ready"))?;
        serde_json::from_str(&line).map_err(|e| failed("said something else").caused_by(e))
    }

    fn log(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.log"))
    }

    /// Ends all of them, the newest first; each must end well.
    async fn end(&mut self) -> Result<()> {
        let mut wrong = None;
        for (name, child) in self.children.iter_mut().rev() {
            drop(child.stdin.take());
            let ended = match tokio::time::timeout(END, child.wait()).await {
                Ok(Ok(status)) if status.success() => continue,
                Ok(Ok(status)) => status.to_string(),
                Ok(Err(e)) => e.to_string(),
                Err(_) => {
                    let _ = child.kill().await;
                    format!("did not end within {} s", END.as_secs())
                }
            };
            wrong.get_or_insert_with(|| {
                Error::new(ErrorKind::Internal, "a process did not end well")
                    .with("process", &*name)
                    .with("found", ended)
            });
        }
        wrong.map_or(Ok(()), Err)
    }

    /// The last lines of each log, when something went wrong.
    fn show_logs(&self) {
        for (name, _) in &self.children {
            let text = std::fs::read_to_string(self.log(name)).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            for line in &lines[lines.len().saturating_sub(LOG_LINES)..] {
                eprintln!("[{name}] {line}");
            }
        }
    }
}
