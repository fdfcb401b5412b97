//! `kvlane replay`: a router that replays requests through a running cluster.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use kvlane_actors::EMULATED;
use kvlane_coordinator::{Coordinator, CoordinatorConfig, Handoff, PairRequest};
use kvlane_proto::{Error, ErrorKind, Identity, Layout, Outcome, Refusal, Result, Role, limits};
use kvlane_transport::quic::Security;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;

use super::values::{above_zero, host_port};
use super::{INTERRUPTED, Interrupt, SecurityArgs, say};
use crate::load::models;
use crate::load::trace::{self, Generator, Request, Requests};
use crate::report::{Progress, Totals, json_line};
use crate::standin::legs::{self, LegReply, LegRequest};

/// What is replayed, and how.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct LoadArgs {
    /// Requests to replay: Mooncake JSONL or Azure CSV; a built-in generator with the same
    /// distribution if not given
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// How many requests
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..))]
    rooms: u64,
    /// Multiplies token counts; 1 = as in the trace, values above 1 enlarge them. If not given,
    /// rooms have about 24 MB (192 kB with `tiny`)
    #[arg(long, value_name = "F", allow_negative_numbers = true, value_parser = above_zero)]
    scale: Option<f64>,
    /// Follow the trace's own times, this much faster; as fast as it goes if not given
    #[arg(long, value_name = "F", allow_negative_numbers = true, value_parser = above_zero)]
    speed: Option<f64>,
    /// Requests in flight
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    concurrency: u32,
    /// Abort so many of a hundred rooms, at a random moment
    #[arg(long, default_value_t = 0, value_name = "P", value_parser = clap::value_parser!(u32).range(0..=100))]
    abort_percent: u32,
    /// A room ends by then
    #[arg(long, default_value_t = limits::ROOM_DEADLINE_MS, value_parser = clap::value_parser!(u64).range(1..=DEADLINE_MS_MAX))]
    deadline_ms: u64,
    /// Seed of the generator and the aborts
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// One JSON object as the last line, and no progress
    #[arg(long)]
    json: bool,
}

/// A week.
const DEADLINE_MS_MAX: u64 = 7 * 24 * 3600 * 1000;

impl LoadArgs {
    /// The requests, not yet scaled; a trace that cannot be read is refused here.
    ///
    /// # Errors
    /// As [`trace::from_file`].
    pub(crate) fn requests(&self) -> Result<Requests> {
        match &self.trace {
            Some(file) => trace::from_file(file),
            None => Ok(Box::new(Generator::new(self.seed, Generator::PER_S)?.map(Ok))),
        }
    }
}

#[derive(clap::Args)]
pub(crate) struct Args {
    /// host:port of the bootstrap service
    #[arg(long, default_value = "127.0.0.1:7400", value_name = "HOST:PORT", value_parser = host_port)]
    service: String,
    /// Name of this router, with --insecure
    #[arg(long, default_value = "replay", conflicts_with = "certs")]
    name: String,
    #[command(flatten)]
    load: LoadArgs,
    #[command(flatten)]
    security: SecurityArgs,
}

pub(crate) async fn run(args: Args) -> Result<ExitCode> {
    let (security, identity) = args.security.identity(Role::Router, &args.name, 0)?;
    let requests = args.load.requests()?;
    let mut interrupt = Interrupt::listen()?;
    let done =
        replay(&args.service, security, identity, (1, 1), args.load, requests, &mut interrupt);
    match done.await? {
        Some(done) => done.print(),
        None => Ok(ExitCode::from(INTERRUPTED)),
    }
}

/// What a replay did.
pub(crate) struct Done {
    totals: Totals,
    /// Requests that were sent and waited for.
    sent: u64,
    asked: u64,
    /// The trace could not be read to its end.
    broken: Option<Error>,
    json: bool,
}

impl Done {
    /// Whether the workers did all that they were asked; after an interruption, all that ended.
    pub(crate) fn is_good(&self) -> bool {
        self.totals.is_good(self.sent)
    }
    /// Shows the report; gives the process's exit code.
    pub(crate) fn print(self) -> Result<ExitCode> {
        let good = self.is_good();
        if self.totals.interrupted {
            eprintln!("interrupted after {} of {} requests", self.totals.rooms(), self.asked);
        } else if self.broken.is_none() && self.sent < self.asked {
            eprintln!("the trace has only {} requests", self.sent);
        }
        if self.json {
            say(&json_line(&self.totals)?);
        } else {
            say(&self.totals.table());
        }
        match self.broken {
            Some(e) => Err(e),
            None if self.totals.interrupted => Ok(ExitCode::from(INTERRUPTED)),
            None if good => Ok(ExitCode::SUCCESS),
            None => Ok(ExitCode::FAILURE),
        }
    }
}

/// Replays through the cluster of a service, once it has so many (prefill, decode) workers alive.
/// Gives nothing if it was interrupted before it began.
pub(crate) async fn replay(
    service: &str,
    security: Security,
    identity: Identity,
    workers: (usize, usize),
    load: LoadArgs,
    requests: Requests,
    interrupt: &mut Interrupt,
) -> Result<Option<Done>> {
    let config = CoordinatorConfig::new(service, security, identity.clone());
    let ready = async {
        let coordinator = Coordinator::connect(config).await?;
        let cluster = Cluster::wait(&coordinator, workers).await?;
        let before = stats(&cluster.serving).await;
        Ok::<_, Error>((coordinator, cluster, before))
    };
    let (coordinator, cluster, before) = tokio::select! {
        ready = ready => ready?,
        () = interrupt.came() => return Ok(None),
    };
    let fit = Fit::new(&load, &cluster);
    let mut totals = Totals {
        model: cluster.model.clone(),
        engine: cluster.engine.clone(),
        emulated: cluster.emulated,
        scale: fit.scale,
        ..Totals::default()
    };
    let mut progress = Progress::new(load.rooms, load.json);
    let begun = Instant::now();
    let (ends, mut end) = mpsc::channel(load.concurrency as usize);
    let asked = load.rooms;
    let json = load.json;
    let mut dispatch =
        Box::pin(dispatch(coordinator, identity, load, cluster.clone(), requests, fit, ends));
    let mut dispatched = None;
    let mut tick = tokio::time::interval(Duration::from_millis(200));
    loop {
        tokio::select! {
            ended = end.recv() => match ended {
                Some(ended) => count(&mut totals, ended),
                None => break,
            },
            done = &mut dispatch, if dispatched.is_none() => dispatched = Some(done),
            _ = tick.tick() => {}
            () = interrupt.came() => {
                totals.interrupted = true;
                break;
            }
        }
        progress.update(&totals);
    }
    // What still runs is given up: its rooms are aborted, its model servers see it hang up.
    drop(dispatch);
    while let Ok(ended) = end.try_recv() {
        count(&mut totals, ended);
    }
    totals.finish(begun.elapsed());
    let after = tokio::select! {
        after = stats(&cluster.serving) => after,
        () = interrupt.came() => BTreeMap::new(),
    };
    for (serving, stats) in after {
        totals.quarantined_blocks += stats.quarantined_blocks;
        // Of a worker that did not say how it was before, this is not known.
        if let Some(before) = before.get(&serving) {
            totals.retries += stats.retries.saturating_sub(before.retries);
        }
    }
    progress.end();
    // Interrupted, those that ended are all there is.
    let (sent, broken) =
        dispatched.filter(|_| !totals.interrupted).unwrap_or((totals.rooms(), None));
    Ok(Some(Done { totals, sent, asked, broken, json }))
}

/// How the workers are, as far as they say so.
async fn stats(serving: &[String]) -> BTreeMap<String, LegReply> {
    let mut asked = JoinSet::new();
    for serving in serving.iter().cloned() {
        asked.spawn(async move {
            let stats = legs::send(&serving, &LegRequest::Stats, Duration::from_secs(5)).await;
            (serving, stats)
        });
    }
    let mut said = BTreeMap::new();
    while let Some(stats) = asked.join_next().await {
        match stats {
            Ok((serving, Ok(stats))) => {
                said.insert(serving, stats);
            }
            Ok((_, Err(e))) => tracing::warn!(error = %e, "a worker does not say how it is"),
            Err(e) => tracing::warn!(error = %e, "a worker could not be asked how it is"),
        }
    }
    said
}

/// What the requests must fit.
#[derive(Clone, Debug)]
struct Cluster {
    model: String,
    engine: String,
    /// Some worker's NICs are test devices.
    emulated: bool,
    /// The model's first pool, as if it were on one rank.
    whole: Layout,
    /// Largest and smallest page of any worker.
    page_tokens: (u32, u32),
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
        let Some(layout) = registration.pools.first() else {
            return Err(Error::new(ErrorKind::NotFound, "a worker has no pools"));
        };
        let pages = view.workers().flat_map(|m| &m.view.registration.pools);
        let pages: Vec<u32> = pages.map(|l| l.page_tokens).collect();
        Ok(Self {
            model: models::name(layout),
            engine: registration.engines.join(", ").replace(EMULATED, ""),
            emulated: view
                .workers()
                .flat_map(|m| &m.view.registration.engines)
                .any(|engine| engine.ends_with(EMULATED)),
            whole: Layout { kv_heads: layout.kv_heads_total, ..layout.clone() },
            page_tokens: (
                pages.iter().copied().max().unwrap_or(1),
                pages.iter().copied().min().unwrap_or(1),
            ),
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

/// Scales requests and cuts them to what fits.
struct Fit {
    scale: f64,
    page_tokens: u32,
    tokens_max: u32,
}

impl Fit {
    fn new(load: &LoadArgs, cluster: &Cluster) -> Self {
        let tiny = cluster.model.starts_with("tiny");
        // The decode has whole pages already, so a prefix is a multiple of the largest.
        let (page_tokens, smallest) = cluster.page_tokens;
        let per_token = cluster.whole.block_bytes() as f64 / f64::from(cluster.whole.page_tokens);
        let (mean_bytes, max_bytes) = if tiny { (192e3, 1e6) } else { (24e6, f64::MAX) };
        // The mean prompt of the traces.
        let scale = load.scale.unwrap_or(mean_bytes / per_token / 12_035.0);
        let tokens_max = (u64::from(cluster.pool_blocks / 2).max(1) * u64::from(smallest))
            .min((max_bytes / per_token) as u64)
            .max(1) as u32;
        Self { scale, page_tokens, tokens_max }
    }
    fn fit(&self, request: Request) -> Prompt {
        let scaled = request.scale(self.scale);
        let tokens = scaled.prompt_tokens.min(self.tokens_max);
        let prefix_tokens = scaled.prefix_tokens.min(tokens) / self.page_tokens * self.page_tokens;
        Prompt { at_ms: scaled.at_ms, tokens, prefix_tokens, cut: tokens < scaled.prompt_tokens }
    }
}

struct Ended {
    took: Duration,
    wanted_abort: bool,
    prompt: Prompt,
    legs: Result<Replies>,
}

/// Sends the requests and waits for all that were sent; gives their number, and what is wrong with
/// the first one that could not be read. Dropped, it gives up those that run.
async fn dispatch(
    coordinator: Coordinator,
    router: Identity,
    load: LoadArgs,
    cluster: Cluster,
    mut requests: Requests,
    fit: Fit,
    ends: mpsc::Sender<Ended>,
) -> (u64, Option<Error>) {
    let slots = Arc::new(Semaphore::new(load.concurrency as usize));
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
    let mut running = JoinSet::new();
    let (mut sent, mut broken) = (0, None);
    while sent < load.rooms {
        let prompt = match requests.next() {
            Some(Ok(request)) => fit.fit(request),
            Some(Err(e)) => {
                broken = Some(e);
                break;
            }
            None => break,
        };
        if let Some(speed) = load.speed {
            let at = Duration::try_from_secs_f64(prompt.at_ms as f64 / 1e3 / speed);
            let at = at.unwrap_or(Duration::MAX);
            tokio::time::sleep(at.saturating_sub(begun.elapsed())).await;
        }
        let count = prompt.tokens.div_ceil(cluster.page_tokens.1);
        let (Ok(slot), Ok(space)) =
            (slots.clone().acquire_owned().await, blocks.clone().acquire_many_owned(count).await)
        else {
            break;
        };
        let abort_after = (roll() % 100 < u64::from(load.abort_percent))
            .then(|| Duration::from_micros(roll() % 50_000));
        let (coordinator, router, ends) = (coordinator.clone(), router.clone(), ends.clone());
        let deadline = Duration::from_millis(load.deadline_ms);
        let request = load.seed.wrapping_mul(1_000_003).wrapping_add(sent);
        sent += 1;
        while running.try_join_next().is_some() {}
        running.spawn(async move {
            let begun = Instant::now();
            let legs =
                hand_off(&coordinator, &router, &prompt, request, deadline, abort_after).await;
            let wanted_abort = abort_after.is_some();
            let _ = ends.send(Ended { took: begun.elapsed(), wanted_abort, prompt, legs }).await;
            drop((slot, space));
        });
    }
    while running.join_next().await.is_some() {}
    (sent, broken)
}

async fn hand_off(
    coordinator: &Coordinator,
    router: &Identity,
    prompt: &Prompt,
    request: u64,
    deadline: Duration,
    abort_after: Option<Duration>,
) -> Result<Replies> {
    let mut asked = PairRequest::new(prompt.tokens);
    asked.wait = deadline / 2;
    asked.deadline = deadline;
    let handoff: Handoff = coordinator.reserve(asked).await?;
    let deadline_ms = deadline.as_millis() as u64;
    let room = handoff.room.0;
    // Ranks that have nothing to send, or nothing to fetch, have no part in it.
    let mut asks = Vec::new();
    for leg in handoff.prefill.iter().filter(|leg| !leg.peers.is_empty()) {
        let ask = LegRequest::Prefill {
            room,
            request,
            tokens: prompt.tokens,
            decodes: leg.peers.iter().map(|d| d.key.identity.to_string()).collect(),
            issuer: router.to_string(),
            deadline_ms,
        };
        asks.push((&leg.serving, ask));
    }
    let prefills = asks.len();
    for leg in &handoff.decode {
        let ask = LegRequest::Decode {
            room,
            request,
            tokens: prompt.tokens,
            prefix_tokens: prompt.prefix_tokens,
            prefills: leg.peers.clone(),
            deadline_ms,
        };
        asks.push((&leg.serving, ask));
    }
    // Rooms end by their deadline; this is for model servers that do not answer.
    let wait = deadline + Duration::from_secs(10);
    let abort = async {
        if let Some(after) = abort_after {
            tokio::time::sleep(after).await;
            coordinator.abort(&handoff, "the replay aborts some");
        }
    };
    let legs = asks.iter().map(|(serving, ask)| leg(coordinator, &handoff, serving, ask, wait));
    let (replies, ()) = tokio::join!(join_all(legs), abort);
    let mut prefill = replies.into_iter().collect::<Result<Vec<LegReply>>>()?;
    let decode = prefill.split_off(prefills);
    handoff.detach();
    Ok(Replies { prefill, decode })
}

/// What the ranks of both legs said.
struct Replies {
    prefill: Vec<LegReply>,
    decode: Vec<LegReply>,
}

/// Runs futures to their end, side by side.
async fn join_all<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut running: Vec<_> = futures.map(|f| (Box::pin(f), None)).collect();
    std::future::poll_fn(|cx| {
        let mut waits = false;
        for (future, done) in running.iter_mut().filter(|(_, done)| done.is_none()) {
            match future.as_mut().poll(cx) {
                Poll::Ready(output) => *done = Some(output),
                Poll::Pending => waits = true,
            }
        }
        if waits { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    running.into_iter().filter_map(|(_, done)| done).collect()
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
    totals.prompts_cut += u64::from(ended.prompt.cut);
    let Replies { prefill, decode } = match ended.legs {
        Ok(legs) => legs,
        Err(e) if ended.wanted_abort && e.kind() == ErrorKind::Aborted => {
            totals.rooms_aborted += 1;
            return;
        }
        Err(e) => {
            tracing::error!(error = %e, "room has failed");
            return totals.failed(&e.to_refusal());
        }
    };
    for reply in &decode {
        totals.pages_verified += reply.pages_verified;
        totals.pages_corrupt += reply.pages_corrupt;
    }
    // The decode's ranks are the authority on the outcome.
    let mut bytes = 0;
    let failed = decode.iter().find_map(|reply| match (&reply.outcome, &reply.error) {
        (_, Some(why)) => Some(why.clone()),
        (Some(Outcome::Done { bytes: moved }), None) => {
            bytes += moved;
            None
        }
        (Some(outcome), None) => outcome.why().cloned(),
        (None, None) => Some(Refusal::new(ErrorKind::Internal, "no outcome")),
    });
    let Some(why) = failed else {
        totals.rooms_completed += 1;
        totals.bytes += bytes;
        totals.prefix_tokens += u64::from(ended.prompt.prefix_tokens);
        totals.handoffs.push(ended.took);
        return;
    };
    // An abort that was asked for, told to either leg in whatever state it found it.
    let by_abort =
        matches!(why.kind, ErrorKind::Aborted | ErrorKind::RoomEnded | ErrorKind::NotFound);
    if ended.wanted_abort && by_abort {
        totals.rooms_aborted += 1;
    } else {
        // Left out of the line if there is none.
        let prefill =
            prefill.iter().find_map(|leg| leg.error.as_ref()).map(tracing::field::display);
        tracing::error!(%why, prefill, "room has failed");
        totals.failed(&why);
    }
}

/// Names of the models, for help texts.
pub(crate) fn model_names() -> String {
    models::names().collect::<Vec<_>>().join(", ")
}
