//! Workers whose pages are written by NICs, which are processes of their own: what a dead one costs.

use std::time::Duration;

use kvlane_proto::{ErrorKind, Outcome, Role};

use super::cluster::{Cluster, Ended, PAGE_TOKENS, PAGES_PER_BLOCK, Router, Worker};
use super::process::{Process, within};

const TOKENS: u32 = 900;
const PAGES: u64 = (TOKENS.div_ceil(PAGE_TOKENS) as u64) * PAGES_PER_BLOCK;

/// The NICs of a host, one for each rail.
pub(crate) struct Nics {
    pub(crate) processes: Vec<Process>,
    pub(crate) sockets: Vec<String>,
}

impl Nics {
    pub(crate) async fn start(cluster: &Cluster, rails: usize) -> Self {
        let (mut processes, mut sockets) = (Vec::new(), Vec::new());
        for n in 0..rails {
            let name = format!("nic-{n}");
            let socket = cluster.dir().join(&name).display().to_string();
            let flags = ["emulated-nic", "--socket", &socket, "--name", &name];
            let flags: Vec<String> = flags.iter().map(ToString::to_string).collect();
            let mut process = Process::spawn(cluster.dir(), &name, &flags);
            process.ready().await;
            processes.push(process);
            sockets.push(socket);
        }
        Self { processes, sockets }
    }
    /// A worker that uses all of them.
    async fn worker(&self, cluster: &Cluster, role: Role, name: &str) -> Worker {
        let mut flags = vec!["--engine", "gpunetio", "--emulated"];
        flags.extend(self.sockets.iter().flat_map(|socket| ["--nic", socket]));
        cluster.worker(role, name, &flags).await
    }
}

/// One room; whether it was done. However it ended, no page of it is wrong, and if it was not done
/// it says why.
async fn room(router: &Router, prefill: &Worker, decode: &Worker) -> bool {
    let request = router.reserve(prefill, decode, TOKENS).await;

    let ended = router.run(prefill, decode, &request).await;
    let Ended { prefill: Some(sent), decode: Some(received), .. } = &ended else {
        panic!("a worker died: {ended:?}")
    };
    assert_eq!(received.pages_corrupt, 0, "{ended:?}");
    // What a report counts: the blocks that the prefill withholds too.
    assert_eq!(sent.quarantined_blocks, u64::from(sent.load.quarantined_blocks), "{ended:?}");
    if received.is_done() {
        assert_eq!(received.pages_verified, PAGES, "{ended:?}");
        return true;
    }
    let named = [ErrorKind::NoPath, ErrorKind::Quarantined, ErrorKind::Incomplete];
    assert!(named.contains(&received.why().kind), "{received:?}");
    assert!(!matches!(received.outcome, Some(Outcome::Unknown { .. })), "{received:?}");
    assert!(!sent.is_done(), "the prefill never contradicts: {ended:?}");
    false
}

/// The line that tells of the lanes of a NIC that died.
fn is_told(line: &&str) -> bool {
    [" WARN ", "lanes are lost", "nic-0"].iter().all(|word| line.contains(word))
}

/// Rooms one after the other; which were done.
async fn rooms(router: &Router, prefill: &Worker, decode: &Worker, count: usize) -> Vec<bool> {
    let mut ends = Vec::new();
    for _ in 0..count {
        ends.push(room(router, prefill, decode).await);
    }
    ends
}

#[tokio::test]
async fn rooms_over_two_rails_are_done_and_go_on_over_the_one_that_is_left() {
    let cluster = Cluster::start().await;
    let mut nics = Nics::start(&cluster, 2).await;
    let prefill = nics.worker(&cluster, Role::Prefill, "p").await;
    let decode = nics.worker(&cluster, Role::Decode, "d").await;
    let router = cluster.router("r").await;
    router.sees(&prefill).await;
    router.sees(&decode).await;
    for _ in 0..3 {
        router.hand_off(&prefill, &decode, TOKENS).await;
    }
    decode.load("lanes of both rails", |l| (l.rooms, l.free_lanes) == (0, 8)).await;

    // More at a time than a rail has lanes, so that every lane is lent when the NIC dies.
    let run = async || rooms(&router, &prefill, &decode, 6).await;
    let kill = async {
        decode.load("rooms on all lanes", |l| l.rooms > 4 || l.free_lanes == 0).await;
        nics.processes[0].kill().await;
    };
    let (a, b, c, d, e, f, ()) = tokio::join!(run(), run(), run(), run(), run(), run(), kill);
    eprintln!("rooms beside the death of a NIC: {a:?} {b:?} {c:?} {d:?} {e:?} {f:?}");
    for ends in [a, b, c, d, e, f] {
        assert!(ends[3..].iter().all(|done| *done), "it did not heal: {ends:?}");
    }
    decode.load("lanes of one rail", |l| l.rooms == 0 && l.free_lanes == 4).await;
    // Every one of them carries rooms.
    let run = async || rooms(&router, &prefill, &decode, 2).await;
    let (a, b, c, d, e) = tokio::join!(run(), run(), run(), run(), run());
    assert_eq!([a, b, c, d, e], [[true; 2]; 5]);
    decode.load("lanes of one rail", |l| l.rooms == 0 && l.free_lanes == 4).await;
    for worker in [&prefill, &decode] {
        let told = || worker.process.log().lines().filter(is_told).count();
        let heard = async {
            while told() == 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        within("the loss of the NIC is told", heard).await;
        assert!(told() <= 4, "each lane once at most:\n{}", worker.process.log());
    }
}

#[tokio::test]
async fn a_nic_that_died_before_its_link_costs_its_lanes_only() {
    let cluster = Cluster::start().await;
    let mut nics = Nics::start(&cluster, 2).await;
    let prefill = nics.worker(&cluster, Role::Prefill, "p").await;
    let decode = nics.worker(&cluster, Role::Decode, "d").await;
    let router = cluster.router("r").await;
    router.sees(&prefill).await;
    router.sees(&decode).await;
    nics.processes[1].kill().await;
    for _ in 0..5 {
        router.hand_off(&prefill, &decode, TOKENS).await;
    }
    decode.load("lanes of one rail", |l| l.rooms == 0 && l.free_lanes == 4).await;
}

#[tokio::test]
async fn without_a_nic_left_rooms_end_and_say_so() {
    let cluster = Cluster::start().await;
    let mut nics = Nics::start(&cluster, 1).await;
    let prefill = nics.worker(&cluster, Role::Prefill, "p").await;
    let decode = nics.worker(&cluster, Role::Decode, "d").await;
    let router = cluster.router("r").await;
    router.sees(&prefill).await;
    router.sees(&decode).await;
    router.hand_off(&prefill, &decode, TOKENS).await;
    nics.processes[0].kill().await;
    decode.load("no lane", |l| l.free_lanes == 0).await;
    let mut request = Router::request(&prefill, &decode, TOKENS);
    request.wait = Duration::from_secs(30);
    let e = router.coordinator.reserve(request).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NoPath, "{e}");
    for said in ["no lane to the prefill is up", "lanes_up=0", "lanes=4", "nic-0"] {
        assert!(e.to_string().contains(said), "{said}: {e}");
    }
}
