//! `kvlane replay`: a router that replays requests through a running cluster.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane_coordinator::{Coordinator, CoordinatorConfig, Handoff, PairRequest};
use kvlane_proto::{Error, ErrorKind, Identity, Outcome, Result, Role, limits};
use kvlane_transport::quic::Security;
use tokio::sync::{Semaphore, mpsc};

use super::SecurityArgs;
use crate::load::models;
use crate::load::trace::{Generator, Request, Trace};
use crate::report::{Progress, Totals};
use crate::standin::legs::{self, LegReply, LegRequest};

/// What is replayed, and how.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct LoadArgs {
    /// Requests to replay: Mooncake JSONL or Azure CSV; a built-in generator with the same
    /// distribution if not given
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// How many requests
    #[arg(long, default_value_t = 64)]
    rooms: u64,
    /// Shrinks token counts; if not given, rooms have about 24 MiB (192 KiB with `tiny`)
    #[arg(long, value_name = "F")]
    scale: Option<f64>,
    /// Follow the trace's own times, this much faster; as fast as it goes if not given
    #[arg(long, value_name = "F")]
    speed: Option<f64>,
    /// Requests in flight
    #[arg(long, default_value_t = 16)]
    concurrency: usize,
    /// Abort so many of a hundred rooms, at a random moment
    #[arg(long, default_value_t = 0, value_name = "P", value_parser = clap::value_parser!(u32).range(0..=100))]
    abort_percent: u32,
    /// A room ends by then
    #[arg(long, default_value_t = limits::ROOM_DEADLINE_MS)]
    deadline_ms: u64,
    /// Seed of the generator and the aborts
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// One JSON object as the last line, and no progress
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
pub(crate) struct Args {
    /// host:port of the bootstrap service
    #[arg(long, default_value = "127.0.0.1:7400", value_name = "HOST:PORT")]
    service: String,
    /// Name of this router, with --insecure
    #[arg(long, default_value = "replay")]
    name: String,
    #[command(flatten)]
    load: LoadArgs,
    #[command(flatten)]
    security: SecurityArgs,
}

pub(crate) async fn run(args: Args) -> Result<ExitCode> {
    let (security, identity) = args.security.identity(Role::Router, &args.name, 0)?;
    replay(&args.service, security, identity, (1, 1), args.load).await
}

/// Replays through the cluster of a service, once it has so many (prefill, decode) workers alive.
pub(crate) async fn replay(
    service: &str,
    security: Security,
    identity: Identity,
    workers: (usize, usize),
    load: LoadArgs,
) -> Result<ExitCode> {
    let config = CoordinatorConfig::new(service, security, identity.clone());
    let coordinator = Coordinator::connect(config).await?;
    let cluster = Cluster::wait(&coordinator, workers).await?;
    let requests = requests(&load, &cluster)?;
    let rooms = requests.len() as u64;
    let mut totals = Totals {
        model: cluster.model.clone(),
        engine: cluster.engine.clone(),
        emulated: cluster.engine.contains("emulated"),
        prompts_cut: requests.iter().filter(|r| r.cut).count() as u64,
        ..Totals::default()
    };
    let mut progress = Progress::new(rooms, load.json);
    let begun = Instant::now();
    let (ends, mut end) = mpsc::channel(load.concurrency.max(1));
    let dispatch =
        dispatch(coordinator.clone(), identity, load.clone(), cluster.clone(), requests, ends);
    let dispatch = tokio::spawn(dispatch);
    let mut tick = tokio::time::interval(Duration::from_millis(200));
    loop {
        tokio::select! {
            ended = end.recv() => match ended {
                Some(ended) => count(&mut totals, ended),
                None => break,
            },
            _ = tick.tick() => {}
        }
        progress.update(&totals);
    }
    dispatch
        .await
        .map_err(|e| Error::new(ErrorKind::Internal, "the replay has failed").caused_by(e))?;
    totals.finish(begun.elapsed());
    for serving in &cluster.serving {
        let stats = legs::send(serving, &LegRequest::Stats, Duration::from_secs(5)).await;
        match stats {
            Ok(stats) => {
                totals.retries += stats.retries;
                totals.quarantined_blocks += stats.quarantined_blocks;
            }
            Err(e) => tracing::warn!(error = %e, "a worker does not say how it is"),
        }
    }
    progress.end();
    if load.json {
        let line = serde_json::to_string(&totals)
            .map_err(|e| Error::new(ErrorKind::Internal, "cannot write JSON").caused_by(e))?;
        println!("{line}");
    } else {
        print!("{}", totals.table());
    }
    Ok(if totals.is_good(rooms) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What the requests must fit.
#[derive(Clone, Debug)]
struct Cluster {
    model: String,
    engine: String,
    layout: kvlane_proto::Layout,
    /// Blocks of the smallest pool.
    pool_blocks: u32,
    serving: Vec<String>,
}

impl Cluster {
    async fn wait(coordinator: &Coordinator, (prefill, decode): (usize, usize)) -> Result<Self> {
        let mut views = coordinator.watch();
        let enough = views.wait_for(|v| {
            v.alive(Role::Prefill).count() >= prefill && v.alive(Role::Decode).count() >= decode
        });
        let view = match tokio::time::timeout(Duration::from_secs(20), enough).await {
            Ok(Ok(view)) => view.clone(),
            _ => {
                let view = coordinator.snapshot();
                return Err(Error::new(
                    ErrorKind::DeadlineExceeded,
                    "not enough workers are alive",
                )
                .with("prefill", format!("{} of {prefill}", view.alive(Role::Prefill).count()))
                .with("decode", format!("{} of {decode}", view.alive(Role::Decode).count()))
                .hint("start workers with `kvlane worker --service …`"));
            }
        };
        let mut members = view.workers().filter(|m| m.view.alive);
        let Some(first) = members.next() else {
            return Err(Error::new(ErrorKind::NotFound, "the cluster has no workers"));
        };
        let registration = &first.view.registration;
        Ok(Self {
            model: models::name(&registration.layout),
            engine: registration.engines.join(", "),
            layout: registration.layout.clone(),
            pool_blocks: view
                .workers()
                .filter(|m| m.view.alive)
                .map(|m| m.view.registration.pool_blocks)
                .min()
                .unwrap_or(1),
            serving: view
                .workers()
                .filter(|m| m.view.alive)
                .map(|m| m.view.registration.serving.clone())
                .collect(),
        })
    }
}

#[derive(Clone, Debug)]
struct Prompt {
    at_ms: u64,
    tokens: u32,
    prefix_tokens: u32,
    cut: bool,
}

/// The requests, scaled and cut to what fits.
fn requests(load: &LoadArgs, cluster: &Cluster) -> Result<Vec<Prompt>> {
    let tiny = cluster.model.starts_with("tiny");
    let page = cluster.layout.page_tokens;
    let per_token = cluster.layout.block_bytes() as f64 / f64::from(page);
    let (mean_bytes, max_bytes) = if tiny { (192e3, 1e6) } else { (24e6, f64::MAX) };
    // The mean prompt of the traces.
    let scale = load.scale.unwrap_or(mean_bytes / per_token / 12_035.0);
    if !(scale > 0.0 && scale.is_finite()) {
        return Err(Error::new(ErrorKind::Config, "the scale must be above 0").with("found", scale));
    }
    let most = (u64::from(cluster.pool_blocks / 2).max(1) * u64::from(page))
        .min((max_bytes / per_token) as u64)
        .max(1) as u32;
    let fit = |request: Request| {
        let scaled = request.scale(scale);
        let tokens = scaled.prompt_tokens.min(most);
        let prefix_tokens = scaled.prefix_tokens.min(tokens) / page * page;
        Prompt { at_ms: scaled.at_ms, tokens, prefix_tokens, cut: tokens < scaled.prompt_tokens }
    };
    let count = load.rooms as usize;
    let source: Box<dyn Iterator<Item = Result<Request>>> = match &load.trace {
        Some(file) => Box::new(Trace::open(file)?),
        None => Box::new(Generator::new(load.seed, Generator::PER_S)?.map(Ok)),
    };
    source.take(count).map(|r| r.map(fit)).collect()
}

struct Ended {
    took: Duration,
    wanted_abort: bool,
    legs: Result<(LegReply, LegReply)>,
}

async fn dispatch(
    coordinator: Coordinator,
    router: Identity,
    load: LoadArgs,
    cluster: Cluster,
    requests: Vec<Prompt>,
    ends: mpsc::Sender<Ended>,
) {
    let slots = Arc::new(Semaphore::new(load.concurrency.max(1)));
    // Blocks in flight, so that rooms never wait for each other's blocks in a circle.
    let blocks = Arc::new(Semaphore::new(cluster.pool_blocks as usize));
    let begun = Instant::now();
    let mut dice = load.seed | 1;
    let mut roll = move || {
        dice ^= dice << 13;
        dice ^= dice >> 7;
        dice ^= dice << 17;
        dice >> 11
    };
    for (number, prompt) in requests.into_iter().enumerate() {
        if let Some(speed) = load.speed {
            let at = Duration::from_secs_f64(prompt.at_ms as f64 / 1e3 / speed.max(1e-6));
            tokio::time::sleep(at.saturating_sub(begun.elapsed())).await;
        }
        let count = cluster.layout.blocks_for(prompt.tokens);
        let (Ok(slot), Ok(space)) =
            (slots.clone().acquire_owned().await, blocks.clone().acquire_many_owned(count).await)
        else {
            return;
        };
        let abort_after = (roll() % 100 < u64::from(load.abort_percent))
            .then(|| Duration::from_micros(roll() % 50_000));
        let (coordinator, router, ends) = (coordinator.clone(), router.clone(), ends.clone());
        let deadline = Duration::from_millis(load.deadline_ms);
        let request = load.seed.wrapping_mul(1_000_003).wrapping_add(number as u64);
        tokio::spawn(async move {
            let begun = Instant::now();
            let legs =
                hand_off(&coordinator, &router, &prompt, request, deadline, abort_after).await;
            let wanted_abort = abort_after.is_some();
            let _ = ends.send(Ended { took: begun.elapsed(), wanted_abort, legs }).await;
            drop((slot, space));
        });
    }
}

async fn hand_off(
    coordinator: &Coordinator,
    router: &Identity,
    prompt: &Prompt,
    request: u64,
    deadline: Duration,
    abort_after: Option<Duration>,
) -> Result<(LegReply, LegReply)> {
    let mut asked = PairRequest::new(prompt.tokens);
    asked.wait = deadline / 2;
    asked.deadline = deadline;
    let handoff: Handoff = coordinator.reserve(asked).await?;
    let deadline_ms = deadline.as_millis() as u64;
    let room = handoff.room.0;
    let prefill = LegRequest::Prefill {
        room,
        request,
        tokens: prompt.tokens,
        decode: handoff.decode.worker.key.identity.to_string(),
        issuer: router.to_string(),
        deadline_ms,
    };
    let decode = LegRequest::Decode {
        room,
        request,
        tokens: prompt.tokens,
        prefix_tokens: prompt.prefix_tokens,
        prefill: handoff.prefill.worker.clone(),
        deadline_ms,
    };
    // Rooms end by their deadline; this is for model servers that do not answer.
    let wait = deadline + Duration::from_secs(10);
    let abort = async {
        if let Some(after) = abort_after {
            tokio::time::sleep(after).await;
            coordinator.abort(&handoff, "the replay aborts some");
        }
    };
    let (p, d, ()) = tokio::join!(
        leg(coordinator, &handoff, &handoff.prefill.serving, &prefill, wait),
        leg(coordinator, &handoff, &handoff.decode.serving, &decode, wait),
        abort,
    );
    let legs = (p?, d?);
    handoff.detach();
    Ok(legs)
}

/// Sends one leg; if it is not taken, the other one must not wait for it.
async fn leg(
    coordinator: &Coordinator,
    handoff: &Handoff,
    serving: &str,
    leg: &LegRequest,
    wait: Duration,
) -> Result<LegReply> {
    let reply = legs::send(serving, leg, wait).await;
    match &reply {
        Err(e) => coordinator.abort(handoff, &e.to_string()),
        Ok(LegReply { outcome: None, error: Some(why), .. }) => {
            coordinator.abort(handoff, &why.to_string());
        }
        Ok(_) => {}
    }
    reply
}

fn count(totals: &mut Totals, ended: Ended) {
    let (prefill, decode) = match ended.legs {
        Ok(legs) => legs,
        Err(e) if ended.wanted_abort && e.kind() == ErrorKind::Aborted => {
            totals.rooms_aborted += 1;
            return;
        }
        Err(e) => {
            tracing::error!(error = %e, "room has failed");
            return totals.failed(e.kind(), e.message());
        }
    };
    totals.pages_verified += decode.pages_verified;
    totals.pages_corrupt += decode.pages_corrupt;
    // The decode is the authority on the outcome.
    let why = match (&decode.outcome, &decode.error) {
        (Some(Outcome::Done { bytes }), None) => {
            totals.rooms_completed += 1;
            totals.bytes += bytes;
            totals.handoffs.push(ended.took);
            return;
        }
        (_, Some(why)) => why.clone(),
        (Some(outcome), None) => match outcome.why() {
            Some(why) => why.clone(),
            None => return totals.failed(ErrorKind::Internal, "no reason"),
        },
        (None, None) => return totals.failed(ErrorKind::Internal, "no outcome"),
    };
    // An abort that was asked for, told to either leg in whatever state it found it.
    let by_abort =
        matches!(why.kind, ErrorKind::Aborted | ErrorKind::RoomEnded | ErrorKind::NotFound);
    if ended.wanted_abort && by_abort {
        totals.rooms_aborted += 1;
    } else {
        let other = prefill.error.as_ref().map_or(String::new(), |e| format!(" / prefill: {e}"));
        tracing::error!(%why, %other, "room has failed");
        totals.failed(why.kind, &why.text);
    }
}

/// Names of the models, for help texts.
pub(crate) fn model_names() -> String {
    models::names().collect::<Vec<_>>().join(", ")
}
