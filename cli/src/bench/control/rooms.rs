//! Rooms that move no page, between a router, a prefill and a decode worker.
//!
//! Owns: the router (this process, with the coordinator in it) and the two workers' pipes. In: how
//! many rooms, how many in flight. Out: a row of rooms one after the other, a row of rooms together.
//! Timed, for each room: the call to reserve; and from its beginning until the coordinator knows of
//! the end, the legs' way through the pipes included.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use kvlane_coordinator::{Coordinator, CoordinatorConfig, HandoffOutcome, PairRequest};
use kvlane_proto::{Error, ErrorKind, Result, Role, limits};
use kvlane_transport::quic::Security;
use tokio::io::{AsyncWriteExt, BufReader, Lines};
use tokio::process::{ChildStdin, ChildStdout};
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::row::{Row, Times};
use super::worker::{Legs, TOKENS};
use crate::cluster::{Cluster, Started};

/// Rooms that do not count, before the first row.
const WARM_UP: u32 = 100;
/// How long workers may take to be seen, and to say how their legs went.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long one room may take.
const ROOM: Duration = Duration::from_secs(20);

type Output = Lines<BufReader<ChildStdout>>;

/// The processes of a hand-off; the router is this one.
pub(super) struct Pair {
    pub(super) service: Started,
    pub(super) prefill: Started,
    pub(super) decode: Started,
    pub(super) router: Arc<Router>,
    /// What the prefill and the decode worker say.
    says: [Output; 2],
}

impl Pair {
    /// Starts them, with so many lanes on the link.
    pub(super) async fn start(cluster: &mut Cluster, lanes: u16) -> Result<Self> {
        let service = cluster.start_service("127.0.0.1:0").await?;
        let decode = cluster.identity(Role::Decode, "decode", 0)?;
        let prefill = cluster.identity(Role::Prefill, "prefill", 0)?;
        let (taker, lanes) = (decode.to_string(), lanes.to_string());
        let flags = ["--service", service.quic(), "--lanes", &lanes];
        let flags = |role: &[&'static str]| [&["bench-worker", "--role"], role, &flags].concat();
        let decode = cluster.start(&decode, &flags(&["decode"])).await?;
        let mut flags = flags(&["prefill"]);
        flags.extend(["--taker", &taker]);
        let prefill = cluster.start(&prefill, &flags).await?;
        let coordinator = connect(cluster, service.quic()).await?;
        let (to_prefill, prefill_says) = pipes(cluster, &prefill)?;
        let (to_decode, decode_says) = pipes(cluster, &decode)?;
        let router = Router { coordinator, prefill: to_prefill, decode: to_decode };
        let (router, says) = (Arc::new(router), [prefill_says, decode_says]);
        Ok(Self { service, prefill, decode, router, says })
    }
}

async fn connect(cluster: &Cluster, service: &str) -> Result<Coordinator> {
    let router = cluster.identity(Role::Router, "router", 0)?;
    let security = Security::Mutual { dir: cluster.certs(&router)? };
    let mut config = CoordinatorConfig::new(service, security, router);
    config.listen = ([127, 0, 0, 1], 0).into();
    let coordinator = Coordinator::connect(config).await?;
    let mut views = coordinator.watch();
    let both = views.wait_for(|v| {
        [Role::Prefill, Role::Decode].iter().all(|&role| v.alive(role).next().is_some())
    });
    match timeout(PATIENCE, both).await {
        Ok(Ok(_)) => {}
        _ => return Err(Error::new(ErrorKind::DeadlineExceeded, "the workers are not seen")),
    }
    Ok(coordinator)
}

fn pipes(cluster: &mut Cluster, of: &Started) -> Result<(Mutex<ChildStdin>, Output)> {
    let (stdin, lines) = cluster
        .pipes(of)
        .ok_or_else(|| Error::new(ErrorKind::Internal, "a process has no pipes"))?;
    Ok((Mutex::new(stdin), lines))
}

/// The router, and the pipes that take both workers' legs.
pub(super) struct Router {
    coordinator: Coordinator,
    prefill: Mutex<ChildStdin>,
    decode: Mutex<ChildStdin>,
}

async fn say(worker: &Mutex<ChildStdin>, leg: &str) -> Result<()> {
    let said = worker.lock().await.write_all(leg.as_bytes()).await;
    said.map_err(|e| Error::new(ErrorKind::Io, "a worker takes no legs").caused_by(e))
}

impl Router {
    /// One room from its reservation to its end.
    async fn room(&self) -> Result<(Duration, Duration)> {
        let begun = Instant::now();
        let request = PairRequest { wait: ROOM, ..PairRequest::new(TOKENS) };
        let handoff = self.coordinator.reserve(request).await?;
        let reserved = begun.elapsed();
        let room = handoff.detach();
        let leg = format!("{}\n", room.0);
        say(&self.prefill, &leg).await?;
        say(&self.decode, &leg).await?;
        match self.coordinator.await_outcome(room, ROOM).await {
            HandoffOutcome::Done { bytes: 0 } => Ok((reserved, begun.elapsed())),
            HandoffOutcome::Failed { refusal, .. } | HandoffOutcome::Unknown { refusal } => {
                Err(Error::from(refusal).with("room", room))
            }
            other => Err(Error::new(ErrorKind::Internal, "a room has not ended as it should")
                .with("room", room)
                .with("found", format!("{other:?}"))),
        }
    }

    /// So many rooms, so many of them in flight.
    pub(super) async fn rooms(self: &Arc<Self>, rooms: u32, in_flight: u32) -> Result<Times> {
        let left = Arc::new(AtomicU32::new(rooms));
        let mut flying = JoinSet::new();
        let begun = Instant::now();
        for _ in 0..in_flight.min(rooms) {
            let (router, left) = (Arc::clone(self), Arc::clone(&left));
            flying.spawn(async move {
                let mut took = Vec::new();
                let one_less = |n: u32| n.checked_sub(1);
                while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok() {
                    took.push(router.room().await?);
                }
                Ok::<_, Error>(took)
            });
        }
        let mut times = Times::default();
        while let Some(took) = flying.join_next().await {
            let lost = |e| Error::new(ErrorKind::Internal, "a room broke off").caused_by(e);
            for (reserve, done) in took.map_err(lost)?? {
                times.reserve.push(reserve);
                times.done.push(done);
            }
        }
        times.all = begun.elapsed();
        Ok(times)
    }
}

/// The rows.
pub(super) async fn measure(cluster: &mut Cluster, rooms: u32, in_flight: u32) -> Result<Vec<Row>> {
    // A room borrows a lane from its grant to its end.
    let lanes = in_flight.clamp(limits::LANES_PER_LINK.into(), limits::LANES_PER_LINK_MAX.into());
    let Pair { router, says: [prefill, decode], .. } = Pair::start(cluster, lanes as u16).await?;
    let warm_up = WARM_UP.max(in_flight);
    let work = async {
        router.rooms(warm_up, 1).await?;
        let one_by_one = router.rooms(rooms, 1).await?;
        router.rooms(warm_up, in_flight).await?;
        Ok::<_, Error>((one_by_one, router.rooms(rooms, in_flight).await?))
    };
    let (one_by_one, together) = tokio::select! {
        times = work => times?,
        e = cluster.died() => return Err(e),
    };
    // The end of their input asks the workers how it went.
    drop(router);
    let asked = 2 * (rooms + warm_up);
    legs(prefill, "prefill", asked).await?;
    legs(decode, "decode", asked).await?;
    Ok(vec![one_by_one.row(1, lanes), together.row(in_flight, lanes)])
}

/// Checks what a worker says of its legs: as many as there were rooms, and none has failed.
async fn legs(mut lines: Output, worker: &'static str, asked: u32) -> Result<()> {
    let failed = |why: &'static str| Error::new(ErrorKind::Io, why).with("worker", worker);
    let line = timeout(PATIENCE, lines.next_line())
        .await
        .map_err(|_| failed("a worker did not say how its legs went"))?
        .map_err(|e| failed("a worker cannot be heard").caused_by(e))?
        .ok_or_else(|| failed("a worker has ended without a word"))?;
    let legs: Legs = serde_json::from_str(&line)
        .map_err(|e| failed("a worker said something else").caused_by(e))?;
    tracing::info!(worker, ?legs, "legs have ended");
    if legs.failed > 0 || legs.done + legs.late != asked {
        return Err(Error::new(ErrorKind::Internal, "legs have failed")
            .with("worker", worker)
            .with("asked", asked)
            .with("found", format!("{legs:?}")));
    }
    Ok(())
}
