//! Workers over the kernel's own RDMA verbs: in the virtual machine of `tests/rdma` only, which says by
//! `KVLANE_RDMA` which NICs and wires it has. Elsewhere these tests say that they are skipped.
//!
//! Everything is slow there, so that nothing depends on how fast something is.

use std::process::Command;

use kvlane_proto::{Blame, ErrorKind, Outcome, Role, RoomId};

use super::binary;
use super::cluster::{Cluster, PAGE_TOKENS, PAGES_PER_BLOCK, POOL_TOKENS, Router, Worker};
use super::legs::{Leg, Reply, Request};
use super::process::{until, within};

/// A room that leaves a quarter of the pool to canaries.
const TOKENS: u32 = POOL_TOKENS / 4 * 3;
/// More than are ever on their way.
const PART_BYTES: &str = "262144";

/// Whether the test's machine is this one.
fn here(topology: &str) -> bool {
    let found = std::env::var("KVLANE_RDMA");
    let is = found.as_deref() == Ok(topology);
    if !is {
        eprintln!(
            "skipped: needs the machine `tests/rdma/vm.sh --topo {topology}`, found {found:?}"
        );
    }
    is
}

fn ip(args: &str) {
    let out = Command::new("ip").args(args.split(' ')).output().unwrap();
    assert!(out.status.success(), "ip {args}: {}", String::from_utf8_lossy(&out.stderr));
}

/// Packets that a device has sent.
fn sent(device: &str) -> u64 {
    let at = format!("/sys/class/infiniband/{device}/ports/1/hw_counters/sent_pkts");
    std::fs::read_to_string(&at).unwrap_or_else(|e| panic!("{at}: {e}")).trim().parse().unwrap()
}

struct Bed {
    router: Router,
    prefill: Worker,
    decode: Worker,
    _cluster: Cluster,
}

impl Bed {
    /// A pair; the NICs of one end of each wire are the prefill's, those of the other the decode's.
    async fn start(wires: &[(&str, &str)]) -> Self {
        let cluster = Cluster::start().await;
        let router = cluster.router("r").await;
        let flags = |nics: Vec<&str>| -> Vec<String> {
            let nics = nics.into_iter().flat_map(|nic| ["--nic", nic]);
            let flags = ["--engine", "verbs", "--part-bytes", PART_BYTES].into_iter().chain(nics);
            flags.map(str::to_owned).collect()
        };
        let (of_prefill, of_decode) = wires.iter().copied().unzip();
        let (of_prefill, of_decode) = (flags(of_prefill), flags(of_decode));
        let [of_prefill, of_decode] =
            [&of_prefill, &of_decode].map(|f| f.iter().map(String::as_str).collect::<Vec<_>>());
        let mut prefill = cluster.worker(Role::Prefill, "p", &of_prefill).await;
        let mut decode = cluster.worker(Role::Decode, "d", &of_decode).await;
        prefill.keep(&of_prefill);
        decode.keep(&of_decode);
        router.sees(&prefill).await;
        router.sees(&decode).await;
        let bed = Self { router, prefill, decode, _cluster: cluster };
        // Until there are lanes, nothing can be said of them.
        bed.until_done(TOKENS).await;
        bed
    }
    /// A room of which half has been posted by a prefill that is held there.
    async fn half(&mut self) -> (RoomId, Leg, Leg) {
        self.prefill.stop_at("half", true).await;
        let r = self.router.reserve(&self.prefill, &self.decode, TOKENS).await;
        let received = Leg::send(&self.decode.serving, r.decode_leg()).await.unwrap();
        let sent = Leg::send(&self.prefill.serving, r.prefill_leg()).await.unwrap();
        self.prefill.process.held_at("half").await;
        (RoomId(r.room), sent, received)
    }
    /// Every block is free and as it was left; then every block is used.
    async fn assert_clean(&self) {
        self.decode.assert_all_free().await;
        self.until_done(POOL_TOKENS).await;
        self.until_done(POOL_TOKENS).await;
        self.decode.assert_all_free().await;
    }
    /// Runs rooms until one is done; how many were not. Where two heartbeats may be late, as many as it
    /// takes.
    async fn until_done(&self, tokens: u32) -> u32 {
        let mut failed = 0;
        let done = async {
            loop {
                let asked = Router::request(&self.prefill, &self.decode, tokens);
                if let Ok(handoff) = self.router.coordinator.reserve(asked).await {
                    let r = Request::of(&handoff, &self.router.identity, tokens);
                    handoff.detach();
                    let ended = self.router.run(&self.prefill, &self.decode, &r).await;
                    let (sent, received) = (ended.prefill.unwrap(), ended.decode.unwrap());
                    assert_eq!((received.pages_corrupt, sent.pages_corrupt), (0, 0));
                    if sent.is_done() && received.is_done() {
                        let blocks = u64::from(tokens.div_ceil(PAGE_TOKENS));
                        assert_eq!(received.pages_verified, blocks * PAGES_PER_BLOCK);
                        return;
                    }
                }
                failed += 1;
            }
        };
        within("a room that is done", done).await;
        failed
    }
}

async fn ended(leg: Leg) -> Reply {
    leg.reply().await.expect("the stand-in lives")
}

#[tokio::test]
async fn pair_pages_arrive_and_nothing_is_left() {
    if !here("pair") {
        return;
    }
    let bed = Bed::start(&[("rxe0", "rxe1")]).await;
    let before = sent("rxe0");
    bed.assert_clean().await;
    // A pool of 8 MiB in packets of at most 4 KiB, twice and more.
    assert!(sent("rxe0") - before >= 2 * 2048, "the pages went over the wire");
}

#[tokio::test]
async fn pair_blocks_of_aborted_rooms_are_used_again_at_once() {
    if !here("pair") {
        return;
    }
    let mut bed = Bed::start(&[("rxe0", "rxe1")]).await;
    for turn in 0..10 {
        let (room, from, to) = bed.half().await;
        bed.router.coordinator.abort_room(room, "half is enough");
        // The decode needs nobody for it: the sender's machine is held, its NIC is not.
        let received = ended(to).await;
        received.assert_failed(&[ErrorKind::Aborted]);
        assert!(matches!(received.outcome, Some(Outcome::Failed { bytes: 1.., .. })), "{turn}");
        bed.decode.assert_all_free().await;
        bed.prefill.go_on().await;
        // Who is held for more than two heartbeats is given up.
        ended(from).await.assert_failed(&[ErrorKind::Aborted, ErrorKind::PeerLost]);
        bed.until_done(POOL_TOKENS).await;
    }
    bed.assert_clean().await;
}

#[tokio::test]
async fn pair_a_stopped_sender_writes_nothing_when_it_goes_on() {
    if !here("pair") {
        return;
    }
    let mut bed = Bed::start(&[("rxe0", "rxe1")]).await;
    let (room, from, to) = bed.half().await;
    bed.prefill.process.signal("STOP");
    bed.router.coordinator.abort_room(room, "its sender stands still");
    ended(to).await.assert_failed(&[ErrorKind::Aborted, ErrorKind::PeerLost]);
    bed.decode.assert_all_free().await;
    bed.prefill.process.signal("CONT");
    bed.prefill.go_on().await;
    drop(from);
    bed.until_done(TOKENS).await;
    bed.assert_clean().await;
}

#[tokio::test]
async fn pair_a_killed_worker_costs_its_own_rooms_only() {
    if !here("pair") {
        return;
    }
    let mut bed = Bed::start(&[("rxe0", "rxe1")]).await;
    for role in [Role::Prefill, Role::Decode] {
        let (_, from, to) = bed.half().await;
        let told = if role == Role::Prefill {
            bed.prefill.process.kill().await;
            bed.prefill.restart(&[]).await;
            ended(to).await
        } else {
            bed.decode.process.kill().await;
            bed.decode.restart(&[]).await;
            bed.prefill.go_on().await;
            ended(from).await
        };
        told.assert_failed(&[ErrorKind::PeerLost]);
        let blame = if role == Role::Prefill { Blame::Prefill } else { Blame::Decode };
        assert_eq!(told.why().blame, blame, "{told:?}");
        bed.router.sees(&bed.prefill).await;
        bed.router.sees(&bed.decode).await;
        bed.until_done(TOKENS).await;
        bed.assert_clean().await;
    }
}

#[tokio::test]
async fn pair_a_wire_that_is_down_is_named_with_all_that_the_nic_says() {
    if !here("pair") {
        return;
    }
    let mut bed = Bed::start(&[("rxe0", "rxe1")]).await;
    let (_, from, to) = bed.half().await;
    ip("link set nic1 down");
    bed.prefill.go_on().await;
    let (from, to) = tokio::join!(ended(from), ended(to));
    let path = [ErrorKind::NoPath, ErrorKind::PeerLost, ErrorKind::Incomplete];
    from.assert_failed(&path);
    to.assert_failed(&path);
    // The first completion that failed: which NIC, which port, to whom, why, and what to do.
    until("the lane's loss is told", || {
        let log = bed.prefill.process.log();
        let line = log.lines().find(|l| l.contains("transport retry counter exceeded"))?;
        for word in [
            "nic=rxe0",
            "port=1",
            "gid=",
            "queue_pair=0x",
            "peer=default/decode/d/0",
            "code=0x0c",
            "vendor_code=",
            "fix: ",
        ] {
            assert!(line.contains(word), "{word}: {line}");
        }
        Some(())
    })
    .await;
    ip("link set nic1 up");
    bed.until_done(TOKENS).await;
    bed.assert_clean().await;
}

#[tokio::test]
async fn bond_is_chosen_explained_and_fails_over() {
    if !here("bond") {
        return;
    }
    let out = Command::new(binary::path()).arg("explain").output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    for word in ["mlx5_bond_0", "bond0", "active-backup", "s0", "s1", "10.77.0.1"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    let mut bed = Bed::start(&[("mlx5_bond_0", "mlx5_bond_1")]).await;
    for slave in ["s0", "s1"] {
        let (_, from, to) = bed.half().await;
        ip(&format!("link set {slave} down"));
        bed.prefill.go_on().await;
        let (from, to) = tokio::join!(ended(from), ended(to));
        assert_eq!((from.pages_corrupt, to.pages_corrupt), (0, 0));
        let again = bed.until_done(TOKENS).await;
        eprintln!("{slave} down: {:?}, then {again} more", to.outcome);
        bed.assert_clean().await;
        ip(&format!("link set {slave} up"));
        // The bond takes it back when it has looked at it.
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    }
}

#[tokio::test]
async fn quad_a_wire_that_is_down_costs_its_rail_and_is_used_again() {
    if !here("quad") {
        return;
    }
    let mut bed = Bed::start(&[("rxe0", "rxe1"), ("rxe2", "rxe3")]).await;
    let used = |before: [u64; 2]| [sent("rxe0") > before[0] + 100, sent("rxe2") > before[1] + 100];
    let now = || [sent("rxe0"), sent("rxe2")];
    let before = now();
    bed.until_done(TOKENS).await;
    assert_eq!(used(before), [true, true], "both rails carry pages");

    // A room that is half-way, and rooms after it, complete over the other wire.
    let (_, from, to) = bed.half().await;
    ip("link set nic0 down");
    let down = std::time::Instant::now();
    bed.prefill.go_on().await;
    let (from, to) = tokio::join!(ended(from), ended(to));
    assert!(from.is_done() && to.is_done(), "{from:?} {to:?}");
    assert_eq!(to.pages_corrupt, 0);
    let before = now();
    while down.elapsed().as_secs() < 5 {
        bed.until_done(TOKENS).await;
    }
    assert!(used(before)[1]);

    // It comes back, and gets its share.
    ip("link set nic0 up");
    let back = async {
        loop {
            let before = now();
            bed.until_done(TOKENS).await;
            if used(before) == [true, true] {
                return;
            }
        }
    };
    within("the wire is used again", back).await;
    bed.assert_clean().await;
}

#[tokio::test]
async fn pair_a_demo_over_verbs_checks_every_page() {
    if !here("pair") {
        return;
    }
    let demo = Command::new(binary::path())
        .args(["demo", "--engine", "verbs", "--model", "tiny", "--pool-mib", "8", "--rooms", "12"])
        .args(["--prefill", "1", "--decode", "1", "--prefill-nic", "rxe0", "--decode-nic", "rxe1"])
        .args(["--json"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&demo.stdout);
    let report: serde_json::Value = serde_json::from_str(said.lines().last().unwrap()).unwrap();
    assert!(demo.status.success(), "{report}");
    assert_eq!((&report["rooms_completed"], &report["pages_corrupt"]), (&12.into(), &0.into()));
    assert!(report["pages_verified"].as_u64().unwrap() > 0, "{report}");
}
