//! Paths that are slow, that stand still, that carry one direction only, and that come and go: what
//! makes progress lives, what makes none ends by its deadline and says so.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvlane_proto::{ErrorKind, Role, limits};
use kvlane_transport::emulated::faults::{Fault, Target, What};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};

use super::cluster::{Cluster, PAGE_TOKENS, Router, Worker};
use super::engines::{Engine, Rig, SMALL_BLOCKS};
use super::legs::{Leg, Reply, Request, leg};
use super::process::Process;

const TOKENS: u32 = SMALL_BLOCKS / 3 * 2 * PAGE_TOKENS;
/// Of a room that is to end by its deadline: longer than a lane without progress lives.
const DEADLINE_MS: u64 = limits::PART_TIMEOUT_MS + 3_000;

/// Both legs of a room with this deadline.
async fn run(prefill: &Worker, decode: &Worker, r: Request, deadline_ms: u64) -> (Reply, Reply) {
    let r = Request { deadline_ms, ..r };
    let (p, d) =
        tokio::join!(leg(&prefill.serving, r.prefill_leg()), leg(&decode.serving, r.decode_leg()),);
    (p.unwrap(), d.unwrap())
}

/// Neither says that it is done, and both say why.
fn ended(p: &Reply, d: &Reply) {
    let kinds = [
        ErrorKind::DeadlineExceeded,
        ErrorKind::NoPath,
        ErrorKind::PeerLost,
        ErrorKind::Incomplete,
    ];
    assert!(kinds.contains(&d.why().kind), "{d:?}");
    assert!(!p.is_done() && d.pages_corrupt == 0, "{p:?} {d:?}");
}

#[tokio::test]
async fn a_slow_nic_lives_while_it_moves_and_a_stalled_one_ends() {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let rig = Rig::start(&cluster, Engine::Gpunetio).await;
    let prefill = rig.worker(&cluster, Role::Prefill, "p", &[]).await;
    let decode = rig.worker(&cluster, Role::Decode, "d", &[]).await;
    router.sees(&prefill).await;
    router.sees(&decode).await;
    router.hand_off(&prefill, &decode, TOKENS).await;

    // Longer than a lane may stand still, but each part is in time.
    let bytes = u64::from(TOKENS) * 1024;
    let bytes_per_s = bytes * 1_000 / (limits::PART_TIMEOUT_MS + 1_500);
    let slow = rig.fault(0, Fault::new(What::Throttle { bytes_per_s }, Target::All));
    let began = std::time::Instant::now();
    router.hand_off(&prefill, &decode, TOKENS).await;
    assert!(began.elapsed() > Duration::from_millis(limits::PART_TIMEOUT_MS), "it was not slow");
    rig.clear(0, slow);

    let held = rig.fault(0, Fault::new(What::HoldWire, Target::All));
    let r = router.reserve(&prefill, &decode, TOKENS).await;
    let (p, d) = run(&prefill, &decode, r, DEADLINE_MS).await;
    ended(&p, &d);
    rig.clear(0, held);
    decode.load("its lanes again", |l| (l.rooms, l.free_lanes) == (0, 4)).await;
    router.assert_clean(&prefill, &decode).await;
}

#[tokio::test]
async fn a_rail_that_flaps_comes_back_into_use() {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let rig = Rig::with_rails(&cluster, Engine::Gpunetio, 2).await;
    let prefill = rig.worker(&cluster, Role::Prefill, "p", &[]).await;
    let decode = rig.worker(&cluster, Role::Decode, "d", &[]).await;
    router.sees(&prefill).await;
    router.sees(&decode).await;
    router.hand_off(&prefill, &decode, TOKENS).await;
    let flap = rig.fault(0, Fault::new(What::LinkFlap { ms: 400 }, Target::All));
    let began = std::time::Instant::now();
    let mut done = 0;
    while began.elapsed() < Duration::from_secs(5) {
        let r = router.reserve(&prefill, &decode, TOKENS).await;
        let (_, d) = run(&prefill, &decode, r, 30_000).await;
        assert_eq!(d.pages_corrupt, 0, "{d:?}");
        done += u32::from(d.is_done());
    }
    assert!(done > 0, "the other rail was there all the time");
    rig.clear(0, flap);
    decode.load("lanes of both rails", |l| (l.rooms, l.free_lanes) == (0, 8)).await;
    let before = [rig.stats(0).immediates, rig.stats(1).immediates];
    for _ in 0..4 {
        router.hand_off(&prefill, &decode, TOKENS).await;
    }
    for rail in [0, 1] {
        let parts = rig.stats(rail).immediates - before[rail];
        eprintln!("rail {rail}: {parts} parts, after {done} rooms beside the flaps");
        assert!(parts > 0, "rail {rail} is not used any more");
    }
}

/// What a proxy does with bytes: at most so many are let through in all, in each direction, each
/// piece so much later.
#[derive(Default)]
struct Valve {
    /// From the prefill to the decode.
    pages: AtomicU64,
    /// Back.
    acks: AtomicU64,
    delay_ms: AtomicU64,
}

impl Valve {
    fn open(&self) {
        self.pages.store(u64::MAX, Ordering::SeqCst);
        self.acks.store(u64::MAX, Ordering::SeqCst);
    }
}

async fn forward(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    valve: Arc<Valve>,
    left: fn(&Valve) -> &AtomicU64,
) {
    let mut piece = vec![0; 8 << 10];
    loop {
        let left = left(&valve);
        let most = left.load(Ordering::SeqCst).min(piece.len() as u64) as usize;
        if most == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
            continue;
        }
        match from.read(&mut piece[..most]).await {
            Ok(n @ 1..) => {
                tokio::time::sleep(Duration::from_millis(valve.delay_ms.load(Ordering::SeqCst)))
                    .await;
                if left.load(Ordering::SeqCst) != u64::MAX {
                    left.fetch_sub(n as u64, Ordering::SeqCst);
                }
                if to.write_all(&piece[..n]).await.is_err() {
                    return;
                }
            }
            _ => return,
        }
    }
}

/// Stands between a prefill and the data port of a decode.
async fn proxy(at: SocketAddr, to: SocketAddr, all: Arc<Valve>) {
    let listener = TcpListener::bind(at).await.unwrap();
    tokio::spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let Ok(far) = TcpStream::connect(to).await else { continue };
            let _ = (near.set_nodelay(true), far.set_nodelay(true));
            let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
            tokio::spawn(forward(near_in, far_out, all.clone(), |v| &v.pages));
            tokio::spawn(forward(far_in, near_out, all.clone(), |v| &v.acks));
        }
    });
}

/// The ports on which a process takes connections.
fn listening(process: &Process) -> Vec<u16> {
    let pid = process.pid();
    let sockets: Vec<String> = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok()?.to_str().map(str::to_string))
        .collect();
    let table = std::fs::read_to_string(format!("/proc/{pid}/net/tcp")).unwrap();
    let port = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let own = sockets.contains(&format!("socket:[{}]", fields.get(9)?));
        let port = fields.get(1)?.split_once(':')?.1;
        (own && fields[3] == "0A").then(|| u16::from_str_radix(port, 16).unwrap())
    };
    table.lines().skip(1).filter_map(port).collect()
}

async fn behind_a_proxy(cluster: &Cluster, router: &Router) -> (Worker, Worker, Arc<Valve>) {
    let rig = Rig::start(cluster, Engine::Tcp).await;
    let prefill = rig.worker(cluster, Role::Prefill, "p", &[]).await;
    let elsewhere = ["--data-advertise", "127.0.0.77"];
    let decode = rig.worker(cluster, Role::Decode, "d", &elsewhere).await;
    let known: Vec<u16> = [&decode.quic, &decode.serving]
        .iter()
        .map(|address| address.parse::<SocketAddr>().unwrap().port())
        .collect();
    let ports: Vec<u16> =
        listening(&decode.process).into_iter().filter(|p| !known.contains(p)).collect();
    // The data port is one of them.
    let valve = Arc::new(Valve::default());
    valve.open();
    assert!(!ports.is_empty(), "{known:?}");
    for port in ports {
        let (at, to) = (([127, 0, 0, 77], port).into(), ([127, 0, 0, 1], port).into());
        proxy(at, to, valve.clone()).await;
    }
    router.sees(&prefill).await;
    router.sees(&decode).await;
    router.hand_off(&prefill, &decode, TOKENS).await;
    (prefill, decode, valve)
}

#[tokio::test]
async fn a_slow_connection_lives_and_one_that_stalls_or_is_cut_one_way_ends() {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let (prefill, decode, valve) = behind_a_proxy(&cluster, &router).await;

    // Sixteen pieces, each after almost half a second: together longer than a lane may stand still.
    valve.delay_ms.store(450, Ordering::SeqCst);
    let began = std::time::Instant::now();
    router.hand_off(&prefill, &decode, TOKENS).await;
    assert!(began.elapsed() > Duration::from_millis(limits::PART_TIMEOUT_MS), "it was not slow");
    valve.delay_ms.store(0, Ordering::SeqCst);

    for (what, pages, acks) in
        [("both ways", 40_000, 0), ("acks", u64::MAX, 0), ("pages", 40_000, u64::MAX)]
    {
        valve.pages.store(pages, Ordering::SeqCst);
        valve.acks.store(acks, Ordering::SeqCst);
        let r = router.reserve(&prefill, &decode, TOKENS).await;
        let (p, d) = run(&prefill, &decode, r, DEADLINE_MS).await;
        eprintln!("{what} cut: decode {:?}, prefill {:?}", d.outcome, p.outcome);
        if what == "acks" {
            // Every page is there, and the end is told over QUIC.
            assert!(d.is_done() || !p.is_done(), "{p:?} {d:?}");
        } else {
            ended(&p, &d);
        }
        valve.open();
        decode.load("nothing", |l| (l.rooms, l.quarantined_blocks) == (0, 0)).await;
        router.hand_off(&prefill, &decode, TOKENS).await;
    }
    router.assert_clean(&prefill, &decode).await;
}

/// Each wants more than half of the lanes, over two prefills that they name in opposite order.
#[tokio::test]
async fn two_rooms_that_want_more_than_half_of_the_lanes_do_not_wait_for_each_other() {
    for engine in Engine::ALL {
        let cluster = Cluster::start().await;
        let router = cluster.router("r").await;
        let rig = Rig::start(&cluster, engine).await;
        let most = ["--lanes", "4", "--lanes-per-room", "3"];
        let first = rig.worker(&cluster, Role::Prefill, "p", &["--tp", "2"]).await;
        let second = rig.worker(&cluster, Role::Prefill, "p", &["--tp", "2", "--rank", "1"]).await;
        let decode = rig.worker(&cluster, Role::Decode, "d", &most).await;
        for worker in [&first, &second, &decode] {
            router.sees(worker).await;
        }
        let address = |worker: &Worker| {
            let view = router.coordinator.snapshot();
            serde_json::json!(view.worker(&worker.identity).unwrap().address())
        };
        let room = async |room: u64, order: [&Worker; 2]| {
            let r = Request {
                room,
                tokens: 2 * PAGE_TOKENS,
                prefill: serde_json::from_value(address(order[0])).unwrap(),
                decode: serde_json::from_value(address(&decode)).unwrap(),
                issuer: router.identity.clone(),
                deadline_ms: 20_000,
            };
            let mut to_decode = r.decode_leg();
            to_decode["prefills"] = serde_json::json!([address(order[0]), address(order[1])]);
            let d = Leg::send(&decode.serving, to_decode).await.unwrap();
            let (a, b) = tokio::join!(
                leg(&order[0].serving, r.prefill_leg()),
                leg(&order[1].serving, r.prefill_leg()),
            );
            for reply in [a, b, d.reply().await] {
                let reply = reply.unwrap();
                assert!(reply.is_done() && reply.pages_corrupt == 0, "{engine:?}: {reply:?}");
            }
        };
        for n in 0..10 {
            tokio::join!(
                room(100 + 2 * n, [&first, &second]),
                room(101 + 2 * n, [&second, &first]),
            );
        }
        decode.load("every lane", |l| (l.rooms, l.queued, l.quarantined_blocks) == (0, 0, 0)).await;
    }
}
