//! Workers on two "hosts": network namespaces with a path between them that is cut, in one direction
//! or in both, while service and router reach either all the time.
//!
//! Needs root and `ip netns`; skipped by name otherwise, unless `KVLANE_NETNS=must`.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr};
use std::process::Command;
use std::time::{Duration, Instant};

use kvlane_proto::{ErrorKind, Role, limits};

use super::cluster::{Cluster, PAGE_TOKENS, Router, Scratch, Trust, Worker};
use super::legs::Leg;
use super::process::within;

/// A room of 4 MiB takes almost three seconds.
const TOKENS: u32 = 256 * PAGE_TOKENS;
const BYTES_PER_S: &str = "1500000";
/// Ten times two heartbeats.
const ENDED: Duration =
    Duration::from_millis(10 * limits::HEARTBEAT_MS * limits::HEARTBEAT_MISSES as u64);

fn ip(line: &str) -> Result<(), String> {
    let out = Command::new("ip").args(line.split_whitespace()).output();
    let out = out.map_err(|e| format!("ip: {e}"))?;
    let said = String::from_utf8_lossy(&out.stderr);
    out.status.success().then_some(()).ok_or_else(|| format!("ip {line}: {said}"))
}

/// Two namespaces: each has a path to this one, and there is one between them.
struct Net {
    id: u32,
    prefill: String,
    decode: String,
}

impl Net {
    fn try_new() -> Result<Self, String> {
        let id = std::process::id() % 10_000;
        let net = Self { id, prefill: format!("kvlane-{id}-p"), decode: format!("kvlane-{id}-d") };
        for (space, (here, there), side) in
            [(&net.prefill, (1, 2), 'p'), (&net.decode, (5, 6), 'd')]
        {
            let (here, there) = (net.address(here), net.address(there));
            ip(&format!("netns add {space}"))?;
            ip(&format!("link add kv{id}{side} type veth peer name ctl netns {space}"))?;
            ip(&format!("addr add {here}/30 dev kv{id}{side}"))?;
            ip(&format!("link set kv{id}{side} up"))?;
            ip(&format!("-n {space} addr add {there}/30 dev ctl"))?;
            ip(&format!("-n {space} link set ctl up"))?;
            ip(&format!("-n {space} link set lo up"))?;
            ip(&format!("-n {space} route add default via {here}"))?;
        }
        ip(&format!(
            "link add dir netns {} type veth peer name dir netns {}",
            net.prefill, net.decode
        ))?;
        for (space, me, peer) in net.ends() {
            ip(&format!("-n {space} link set dir up"))?;
            // Never by way of this namespace.
            ip(&format!("-n {space} route add blackhole {peer}/32 metric 100"))?;
            ip(&format!("-n {space} route add {peer}/32 dev dir src {me} metric 10"))?;
        }
        Ok(net)
    }
    fn address(&self, host: u8) -> Ipv4Addr {
        Ipv4Addr::new(10, 201, (self.id % 250) as u8, host)
    }
    /// Each namespace, its address, and the other's.
    fn ends(&self) -> [(&str, Ipv4Addr, Ipv4Addr); 2] {
        let (p, d) = (self.address(2), self.address(6));
        [(&self.prefill, p, d), (&self.decode, d, p)]
    }
    fn cut(&self, cut: Cut) {
        let [(p, _, to_d), (d, _, to_p)] = self.ends();
        match cut {
            Cut::LinkDown | Cut::Partition => ip(&format!("-n {p} link set dir down")),
            Cut::FromPrefill => ip(&format!("-n {p} route add blackhole {to_d}/32 metric 5")),
            Cut::FromDecode => ip(&format!("-n {d} route add blackhole {to_p}/32 metric 5")),
        }
        .unwrap();
    }
    fn heal(&self, cut: Cut) {
        let [(p, p_at, to_d), (d, _, to_p)] = self.ends();
        match cut {
            Cut::LinkDown | Cut::Partition => {
                ip(&format!("-n {p} link set dir up")).and_then(|()| {
                    ip(&format!("-n {p} route add {to_d}/32 dev dir src {p_at} metric 10"))
                })
            }
            Cut::FromPrefill => ip(&format!("-n {p} route del blackhole {to_d}/32 metric 5")),
            Cut::FromDecode => ip(&format!("-n {d} route del blackhole {to_p}/32 metric 5")),
        }
        .unwrap();
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        // The links end with them.
        for space in [&self.prefill, &self.decode] {
            let _ = ip(&format!("netns del {space}"));
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cut {
    LinkDown,
    FromPrefill,
    FromDecode,
    /// For ten seconds.
    Partition,
}

async fn worker(cluster: &Cluster, net: &Net, role: Role, extra: &[&str]) -> Worker {
    let [(p, p_at, _), (d, d_at, _)] = net.ends();
    let (space, at, name) = if role == Role::Prefill { (p, p_at, "p") } else { (d, d_at, "d") };
    let at = format!("{at}:0");
    let pool = ["--model", "tiny", "--pool-mib", "8", "--part-bytes", "65536", "--audit-rooms"];
    let flags = [&["--listen", &at, "--serving", &at][..], &pool, extra].concat();
    let mut worker = cluster.spawn_worker_in(Some(space), role, name, &flags);
    worker.ready().await;
    worker
}

/// Rooms go on between the same starts of both workers, once they have found each other.
async fn goes_on(router: &Router, prefill: &Worker, decode: &Worker) {
    router.sees(prefill).await;
    router.sees(decode).await;
    within("rooms after the cut", async {
        loop {
            let asked = router.coordinator.reserve(Router::request(prefill, decode, 256)).await;
            let Ok(handoff) = asked else {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let r = super::legs::Request::of(&handoff, &router.identity, 256);
            handoff.detach();
            let ended = router.run(prefill, decode, &r).await;
            if ended.decode.as_ref().is_some_and(super::legs::Reply::is_done) {
                return;
            }
        }
    })
    .await;
    router.hand_off(prefill, decode, 256).await;
}

#[tokio::test]
async fn a_cut_path_ends_rooms_and_the_same_workers_go_on_when_it_is_back() {
    let net = match Net::try_new() {
        Ok(net) => net,
        Err(why) if std::env::var("KVLANE_NETNS").is_ok_and(|v| v == "must") => panic!("{why}"),
        Err(why) => {
            // Past the capture of a test that passes.
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED a_cut_path_ends_rooms_and_the_same_workers_go_on_when_it_is_back: {why}"
            );
            return;
        }
    };
    let here = IpAddr::V4(net.address(1));
    let cluster = Cluster::start_at(Scratch::new(), Trust::Nobody, here).await;
    let router = cluster.router("r").await;
    let slow = ["--throttle-bytes-per-s", BYTES_PER_S, "--say-at", "half"];
    let prefill = worker(&cluster, &net, Role::Prefill, &[]).await;
    let mut decode = worker(&cluster, &net, Role::Decode, &slow).await;
    goes_on(&router, &prefill, &decode).await;
    for cut in [Cut::LinkDown, Cut::FromPrefill, Cut::FromDecode, Cut::Partition] {
        decode.process.drain();
        let r = router.reserve(&prefill, &decode, TOKENS).await;
        let received = Leg::send(&decode.serving, r.decode_leg()).await.unwrap();
        let sent = Leg::send(&prefill.serving, r.prefill_leg()).await.unwrap();
        assert_eq!(decode.process.line().await.as_deref(), Some("at half"));
        net.cut(cut);
        let began = Instant::now();
        let (received, sent) = tokio::join!(received.reply(), sent.reply());
        let took = began.elapsed();
        let (received, sent) = (received.unwrap(), sent.unwrap());
        eprintln!("{cut:?}: ended after {took:?}: {:?} / {:?}", received.outcome, sent.outcome);
        assert!(took < ENDED, "{cut:?}: {took:?}");
        // What stood in sockets may have been all; then the prefill cannot know.
        assert!(received.is_done() || !sent.is_done(), "{cut:?}: {received:?} {sent:?}");
        if !received.is_done() {
            received.assert_failed(&[ErrorKind::PeerLost]);
        }
        // The blocks came back with their proof, and nothing was written to them since.
        decode.load("nothing", |l| (l.rooms, l.quarantined_blocks) == (0, 0)).await;
        prefill.load("nothing", |l| (l.rooms, l.quarantined_blocks) == (0, 0)).await;
        if cut == Cut::Partition {
            tokio::time::sleep(Duration::from_secs(10).saturating_sub(took)).await;
        }
        net.heal(cut);
        goes_on(&router, &prefill, &decode).await;
    }
    // With every block of the pool, its stamp looked at.
    router.hand_off(&prefill, &decode, decode.pool_tokens()).await;
}
