//! `kvlane replay`: a router that replays requests through a running cluster.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use kvlane_actors::EMULATED;
use kvlane_coordinator::{Coordinator, CoordinatorConfig, Handoff, HandoffOutcome, PairRequest};
use kvlane_proto::{
    Blame, Error, ErrorKind, Identity, Layout, Outcome, Refusal, Result, Role, RoomId, limits,
};
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
    /// Requests in flight; 16 if not given
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    concurrency: Option<u32>,
    /// Abort so many of a hundred rooms, at a random moment; none if not given
    #[arg(long, value_name = "P", value_parser = clap::value_parser!(u32).range(0..=100))]
    abort_percent: Option<u32>,
    /// A room ends by then; 60,000 if not given
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=DEADLINE_MS_MAX))]
    deadline_ms: Option<u64>,
    /// Seed of the generator and the aborts
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// One JSON object as the last line, and no progress
    #[arg(long)]
    json: bool,
    /// Go on until that is set, however many requests that are, and be a bad client for some
    #[arg(skip)]
    until: Option<Arc<AtomicBool>>,
}

/// Rooms in flight.
const CONCURRENCY: u32 = 16;
/// A week.
const DEADLINE_MS_MAX: u64 = 7 * 24 * 3600 * 1000;

impl LoadArgs {
    /// Until that is set, with clients that abort, hang up, or never send what they have reserved. A
    /// minute is too long to wait for what somebody broke.
    pub(crate) fn hostile(mut self, until: Arc<AtomicBool>) -> Self {
        self.until = Some(until);
        self.rooms = u64::MAX;
        self.concurrency.get_or_insert(20);
        self.abort_percent.get_or_insert(5);
        self.deadline_ms.get_or_insert(10_000);
        self
    }
    /// Seeds everything that is left to chance.
    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }
    fn is_over(&self) -> bool {
        self.until.as_ref().is_some_and(|until| until.load(Ordering::Relaxed))
    }
    fn concurrency(&self) -> usize {
        self.concurrency.unwrap_or(CONCURRENCY) as usize
    }
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
    pub(crate) totals: Totals,
    /// Requests that were sent and waited for.
    pub(crate) sent: u64,
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
    let endless = load.until.is_some();
    let mut progress = Progress::new((!endless).then_some(load.rooms), load.json);
    let begun = Instant::now();
    let (ends, mut end) = mpsc::channel(load.concurrency());
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
    let asked = if endless { totals.rooms() } else { asked };
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
    whim: Whim,
    prompt: Prompt,
    legs: Legs,
}

/// What a client does besides sending its legs and waiting for them.
#[derive(Clone, Copy, Debug)]
enum Whim {
    None,
    /// Aborts the room after a while.
    Abort(Duration),
    /// Hangs up on the legs of one side after a while.
    HangUp(Role, Duration),
    /// Sends neither leg.
    NeverClaim,
}

impl Whim {
    /// Of a hundred clients that behave badly, how many hang up, and how many never claim.
    const HANG_UP_PERCENT: u64 = 4;
    const NEVER_CLAIM_PERCENT: u64 = 2;

    fn roll(load: &LoadArgs, mut roll: impl FnMut() -> u64) -> Self {
        let (of_a_hundred, after) = (roll() % 100, Duration::from_micros(roll() % 50_000));
        let aborts = u64::from(load.abort_percent.unwrap_or(0));
        let hang_up = aborts + Self::HANG_UP_PERCENT;
        match of_a_hundred {
            n if n < aborts => Self::Abort(after),
            _ if load.until.is_none() => Self::None,
            n if n < hang_up && n % 2 == 0 => Self::HangUp(Role::Prefill, after),
            n if n < hang_up => Self::HangUp(Role::Decode, after),
            n if n < hang_up + Self::NEVER_CLAIM_PERCENT => Self::NeverClaim,
            _ => Self::None,
        }
    }
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
    let slots = Arc::new(Semaphore::new(load.concurrency()));
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
    while sent < load.rooms && !load.is_over() {
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
        let whim = Whim::roll(&load, &mut roll);
        let (coordinator, router, ends) = (coordinator.clone(), router.clone(), ends.clone());
        let deadline = Duration::from_millis(load.deadline_ms.unwrap_or(limits::ROOM_DEADLINE_MS));
        let request = load.seed.wrapping_mul(1_000_003).wrapping_add(sent);
        sent += 1;
        while running.try_join_next().is_some() {}
        running.spawn(async move {
            let begun = Instant::now();
            let asked =
                PairRequest { wait: deadline / 2, deadline, ..PairRequest::new(prompt.tokens) };
            let prefix = prompt.prefix_tokens;
            let legs = hand_off(&coordinator, &router, asked, prefix, request, whim).await;
            let _ = ends.send(Ended { took: begun.elapsed(), whim, prompt, legs }).await;
            drop((slot, space));
        });
    }
    while running.join_next().await.is_some() {}
    (sent, broken)
}

/// A whole room, from its reservation to the end of its legs.
async fn hand_off(
    coordinator: &Coordinator,
    router: &Identity,
    asked: PairRequest,
    prefix_tokens: u32,
    request: u64,
    whim: Whim,
) -> Legs {
    let (tokens, deadline) = (asked.tokens, asked.deadline);
    let handoff = match coordinator.reserve(asked).await {
        Ok(handoff) => handoff,
        Err(e) => return Legs { errors: vec![e.to_refusal()], ..Legs::default() },
    };
    // Rooms end by their deadline; this is for model servers that do not answer.
    let wait = deadline + Duration::from_secs(10);
    let deadline_ms = deadline.as_millis() as u64;
    let room = handoff.room;
    if let Whim::NeverClaim = whim {
        handoff.detach();
        let mut legs = Legs { never_claimed: true, ..Legs::default() };
        legs.ask(coordinator, room, wait).await;
        return legs;
    }
    // Ranks that have nothing to send, or nothing to fetch, have no part in it.
    let mut asks = Vec::new();
    for leg in handoff.prefill.iter().filter(|leg| !leg.peers.is_empty()) {
        let ask = LegRequest::Prefill {
            room: room.0,
            request,
            tokens,
            decodes: leg.peers.iter().map(|d| d.key.identity.to_string()).collect(),
            issuer: router.to_string(),
            deadline_ms,
        };
        asks.push((Role::Prefill, &leg.serving, ask));
    }
    for leg in &handoff.decode {
        let ask = LegRequest::Decode {
            room: room.0,
            request,
            tokens,
            prefix_tokens,
            prefills: leg.peers.clone(),
            deadline_ms,
        };
        asks.push((Role::Decode, &leg.serving, ask));
    }
    let abort = async {
        if let Whim::Abort(after) = whim {
            tokio::time::sleep(after).await;
            coordinator.abort(&handoff, "the replay aborts some");
        }
    };
    let roles: Vec<Role> = asks.iter().map(|(role, ..)| *role).collect();
    let legs = asks.iter().map(|(role, serving, ask)| {
        let hang_up = match whim {
            Whim::HangUp(side, after) if side == *role => Some(after),
            _ => None,
        };
        let side = if *role == Role::Prefill { Blame::Prefill } else { Blame::Decode };
        leg(coordinator, &handoff, serving, ask, side, wait, hang_up)
    });
    let (ends, ()) = tokio::join!(join_all(legs), abort);
    handoff.detach();
    let mut legs = Legs::default();
    let mut nobody_decodes = false;
    for (role, end) in roles.into_iter().zip(ends) {
        nobody_decodes |= role == Role::Decode && matches!(end, LegEnd::HungUp);
        legs.add(role, end);
    }
    if nobody_decodes && legs.silent.is_none() {
        legs.ask(coordinator, room, wait).await;
    }
    legs
}

/// A room of one pair of instances, with every page right.
pub(crate) async fn visit(
    coordinator: &Coordinator,
    router: &Identity,
    asked: PairRequest,
    request: u64,
) -> Result<()> {
    let legs = hand_off(coordinator, router, asked, 0, request, Whim::None).await;
    match legs.failure(&mut Totals::default()).or(legs.silent) {
        None => Ok(()),
        Some(why) => Err(Error::new(why.kind, why.text).blamed(why.blame)),
    }
}

/// What became of a room's legs.
#[derive(Default)]
struct Legs {
    /// Every answer that came.
    prefill: Vec<LegReply>,
    decode: Vec<LegReply>,
    /// Why others did not come, or how the room ended where nobody was there to answer.
    errors: Vec<Refusal>,
    /// Somebody neither answered nor went away: nobody knows what became of the room.
    silent: Option<Refusal>,
    /// The decodes were asked, and who could know does not answer.
    unknown: bool,
    hung_up: bool,
    never_claimed: bool,
}

impl Legs {
    fn add(&mut self, role: Role, end: LegEnd) {
        match end {
            LegEnd::Replied(reply) if role == Role::Prefill => self.prefill.push(reply),
            LegEnd::Replied(reply) => self.decode.push(reply),
            LegEnd::Failed(e) => self.errors.push(e.to_refusal()),
            LegEnd::HungUp => self.hung_up = true,
            LegEnd::Silent(e) => self.silent = self.silent.take().or(Some(e.to_refusal())),
        }
    }
    /// Where no leg is there to answer, the decodes are asked; such a room cannot be verified, and
    /// so does not count as completed.
    async fn ask(&mut self, coordinator: &Coordinator, room: RoomId, wait: Duration) {
        match coordinator.await_outcome(room, wait).await {
            HandoffOutcome::Done { .. } => {
                self.errors.push(Refusal::new(ErrorKind::Aborted, "nobody waited for it"));
            }
            HandoffOutcome::Failed { refusal, .. } => self.errors.push(refusal),
            HandoffOutcome::Unknown { refusal } => {
                self.unknown = true;
                self.errors.push(refusal);
            }
            HandoffOutcome::Running => {
                let e = Error::new(ErrorKind::DeadlineExceeded, "the room has not ended");
                self.silent = Some(e.with("room", room).to_refusal());
            }
        }
    }
    /// Why the room is not done; adds its pages, and its bytes if it is. The decode's ranks are the
    /// authority, but whoever says that something is grave is believed.
    fn failure(&self, totals: &mut Totals) -> Option<Refusal> {
        let mut bytes = 0;
        for reply in &self.decode {
            totals.pages_verified += reply.pages_verified;
            totals.pages_corrupt += reply.pages_corrupt;
            if let Some(Outcome::Done { bytes: moved }) = reply.outcome {
                bytes += moved;
            }
        }
        let decided = self.errors.iter().cloned().chain(self.decode.iter().filter_map(why));
        let prefill = self.prefill.iter().filter_map(why);
        let prefill = prefill.filter(|why| gravity(why.kind) > 0);
        // Of several that are as grave, the first.
        let worst = decided.chain(prefill).min_by_key(|why| Reverse(gravity(why.kind)));
        if worst.is_none() && self.silent.is_none() {
            totals.bytes += bytes;
        }
        worst
    }
}

/// Why a leg is not done.
fn why(reply: &LegReply) -> Option<Refusal> {
    match (&reply.outcome, &reply.error) {
        (_, Some(why)) => Some(why.clone()),
        (Some(outcome), None) => outcome.why().cloned(),
        (None, None) => Some(Refusal::new(ErrorKind::Internal, "no outcome")),
    }
}

/// What must not happen, whatever a client does, is above 0.
fn gravity(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::Corrupt => 2,
        ErrorKind::Internal => 1,
        _ => 0,
    }
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

/// How one leg ended.
enum LegEnd {
    Replied(LegReply),
    Failed(Error),
    /// This client did.
    HungUp,
    Silent(Error),
}

/// Sends one leg; if it is not taken, the other one must not wait for it.
async fn leg(
    coordinator: &Coordinator,
    handoff: &Handoff,
    serving: &str,
    leg: &LegRequest,
    side: Blame,
    wait: Duration,
    hang_up: Option<Duration>,
) -> LegEnd {
    let patience = hang_up.unwrap_or(wait);
    let sent = legs::send(serving, leg, wait + Duration::from_secs(1));
    match tokio::time::timeout(patience, sent).await {
        Err(_) if hang_up.is_some() => LegEnd::HungUp,
        Err(_) => {
            let e = Error::new(ErrorKind::DeadlineExceeded, "the model server did not answer")
                .with("serving", serving);
            coordinator.abort(handoff, &e.to_string());
            LegEnd::Silent(e)
        }
        Ok(Err(e)) => {
            coordinator.abort(handoff, &e.to_string());
            LegEnd::Failed(e.blamed(side))
        }
        Ok(Ok(reply)) => {
            if let LegReply { outcome: None, error: Some(why), .. } = &reply {
                coordinator.abort(handoff, &why.to_string());
            }
            LegEnd::Replied(reply)
        }
    }
}

fn count(totals: &mut Totals, ended: Ended) {
    use ErrorKind::{
        Aborted, DeadlineExceeded, Draining, Incomplete, NotFound, PeerLost, RoomEnded,
    };
    let Ended { took, whim, prompt, legs } = ended;
    totals.prompts_cut += u64::from(prompt.cut);
    totals.legs_hung_up += u64::from(legs.hung_up);
    totals.never_claimed += u64::from(legs.never_claimed);
    let why = legs.failure(totals);
    let is_grave = why.as_ref().is_some_and(|why| gravity(why.kind) > 0);
    if let Some(why) = legs.silent.as_ref().filter(|_| !is_grave) {
        tracing::error!(%why, "room is lost");
        totals.lost(why);
        return;
    }
    let Some(why) = why else {
        totals.rooms_completed += 1;
        totals.prefix_tokens += u64::from(prompt.prefix_tokens);
        totals.handoffs.push(took);
        totals.completed_at.push(Instant::now());
        return;
    };
    // An abort that was asked for, told to either leg in whatever state it found it.
    let by_abort =
        matches!(whim, Whim::Abort(_)) && matches!(why.kind, Aborted | RoomEnded | NotFound);
    // Nobody waits for a room that was given up, so these are how it ends.
    let by_neglect = (legs.hung_up || legs.never_claimed)
        && !legs.unknown
        && matches!(
            why.kind,
            Aborted | RoomEnded | NotFound | PeerLost | DeadlineExceeded | Draining | Incomplete
        );
    if by_abort || by_neglect {
        totals.rooms_aborted += 1;
        return;
    }
    // Left out of the line if there is none.
    let prefill = legs.prefill.into_iter().find_map(|leg| leg.error);
    let prefill = prefill.map(tracing::field::display);
    tracing::error!(%why, prefill, "room has failed");
    totals.failed(&why);
}

/// Names of the models, for help texts.
pub(crate) fn model_names() -> String {
    models::names().collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(outcome: Result<u64, ErrorKind>) -> LegReply {
        let outcome = match outcome {
            Ok(bytes) => Outcome::Done { bytes },
            Err(kind) => Outcome::Failed { why: Refusal::new(kind, "it failed"), bytes: 0 },
        };
        LegReply { outcome: Some(outcome), pages_verified: 3, ..LegReply::default() }
    }
    fn counted(whim: Whim, legs: Legs) -> Totals {
        let prompt = Prompt { at_ms: 0, tokens: 1, prefix_tokens: 0, cut: false };
        let mut totals = Totals::default();
        count(&mut totals, Ended { took: Duration::ZERO, whim, prompt, legs });
        assert_eq!(totals.rooms(), 1, "{totals:?}");
        totals
    }
    fn corrupt() -> LegReply {
        let error = Some(Refusal::new(ErrorKind::Corrupt, "a page is wrong"));
        LegReply { error, pages_corrupt: 1, ..reply(Ok(5)) }
    }
    fn lost() -> LegEnd {
        LegEnd::Failed(Error::new(ErrorKind::PeerLost, "the model server has gone"))
    }
    fn silent() -> LegEnd {
        LegEnd::Silent(Error::new(ErrorKind::DeadlineExceeded, "the model server did not answer"))
    }

    /// Whatever happened to another leg.
    #[test]
    fn a_corrupt_page_is_counted_whoever_else_is_dead_silent_or_hung_up_on() {
        let others: [fn() -> LegEnd; 3] = [lost, silent, || LegEnd::HungUp];
        for other in others {
            for role in [Role::Prefill, Role::Decode] {
                let mut legs = Legs::default();
                legs.add(role, other());
                legs.add(Role::Decode, LegEnd::Replied(reply(Err(ErrorKind::Aborted))));
                legs.add(Role::Decode, LegEnd::Replied(corrupt()));
                let totals = counted(Whim::None, legs);
                assert_eq!((totals.pages_verified, totals.pages_corrupt), (6, 1), "{role}");
                assert_eq!((totals.failures["corrupt"].count, totals.bytes), (1, 0), "{role}");
            }
        }
    }

    #[test]
    fn the_gravest_word_of_any_leg_is_the_rooms() {
        let mut legs = Legs::default();
        for (role, kind) in [
            (Role::Prefill, ErrorKind::Internal),
            (Role::Decode, ErrorKind::Aborted),
            (Role::Decode, ErrorKind::PeerLost),
        ] {
            legs.add(role, LegEnd::Replied(reply(Err(kind))));
        }
        let by_kind = |legs: &Legs| legs.failure(&mut Totals::default()).map(|why| why.kind);
        assert_eq!(by_kind(&legs), Some(ErrorKind::Internal));
        legs.add(Role::Decode, LegEnd::Replied(corrupt()));
        assert_eq!(by_kind(&legs), Some(ErrorKind::Corrupt));
        // What a prefill does not know, its decode does.
        let mut legs = Legs::default();
        legs.add(Role::Prefill, LegEnd::Replied(reply(Err(ErrorKind::PeerLost))));
        legs.add(Role::Decode, LegEnd::Replied(reply(Ok(5))));
        assert_eq!(by_kind(&legs), None);
        assert_eq!(counted(Whim::None, legs).bytes, 5);
    }

    #[test]
    fn a_room_that_was_given_up_is_aborted_only_if_somebody_knows_that_it_ended_so() {
        let given_up = |kind, unknown| {
            let errors = vec![Refusal::new(kind, "it ended")];
            counted(Whim::None, Legs { errors, unknown, hung_up: true, ..Legs::default() })
        };
        assert_eq!(given_up(ErrorKind::PeerLost, false).rooms_aborted, 1);
        assert_eq!(given_up(ErrorKind::PeerLost, true).failures["peer_lost"].count, 1);
        assert_eq!(given_up(ErrorKind::Internal, false).failures["internal"].count, 1);
        assert_eq!(given_up(ErrorKind::Memory, false).failures["memory"].count, 1);
    }

    #[test]
    fn a_silent_leg_loses_its_room_and_gives_a_reason() {
        let mut legs = Legs::default();
        legs.add(Role::Prefill, silent());
        legs.add(Role::Decode, LegEnd::Replied(reply(Err(ErrorKind::Aborted))));
        let totals = counted(Whim::None, legs);
        assert_eq!((totals.rooms_lost, totals.pages_verified), (1, 3));
        assert!(totals.table().contains("lost 1 x  the model server did not answer"));
        let json = serde_json::to_value(&totals).unwrap();
        assert_eq!(json["rooms_lost"], 1);
        assert_eq!(json["lost_message"], "the model server did not answer");
    }
}
