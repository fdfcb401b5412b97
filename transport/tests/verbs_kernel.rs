//! The `verbs` engine over the kernel's own verbs: two soft-RoCE devices that a wire joins. Only in the
//! virtual machine of `tests/rdma`, which says so by `KVLANE_RDMA=pair`; elsewhere these tests say that
//! they are skipped.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)] // Tests fail by panicking.

mod engine_conformance;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use engine_conformance::nics::{arrived, fenced, revoke, whys};
use engine_conformance::one_sided::{many_revokes, pools};
use engine_conformance::{CANARY, Pair, Pool, layout, run_with_small_pools};

use kvlane_proto::layout::KvKind;
use kvlane_transport::devices::{Sysfs, Wishes};
use kvlane_transport::engine::one_sided::nic::{
    Cause, Completion, Domain, Nic, Pair as QueuePair, Registered, Remote, Rights, Segment, Sends,
    What,
};
use kvlane_transport::engine::one_sided::wire::Message;
use kvlane_transport::engine::verbs::{Port, VerbsConfig, VerbsEngine};
use kvlane_transport::engine::{Command, Engine};
use kvlane_transport::sys::verbs::Verbs;

/// Whether this is the machine for it.
fn here() -> bool {
    let found = std::env::var("KVLANE_RDMA");
    let is = found.as_deref() == Ok("pair");
    if !is {
        eprintln!("skipped: needs the machine `tests/rdma/vm.sh --topo pair`, found {found:?}");
    }
    is
}

/// The two devices; `KVLANE_RDMA_NICS` names others, such as two ports of a real NIC.
fn nics() -> [String; 2] {
    let named = std::env::var("KVLANE_RDMA_NICS").unwrap_or("rxe0,rxe1".into());
    let (one, other) = named.split_once(',').unwrap();
    [one.into(), other.into()]
}

fn config(nic: &str) -> VerbsConfig {
    let wishes = Wishes { nics: vec![nic.into()], ..Wishes::default() };
    VerbsConfig { wishes, entries: 64, ..VerbsConfig::default() }
}

fn couple() -> (Box<dyn Engine>, Box<dyn Engine>) {
    let [from, to] = nics().map(|nic| Box::new(VerbsEngine::new(&config(&nic)).unwrap()));
    (from, to)
}

#[test]
fn it_conforms() {
    if here() {
        run_with_small_pools(&couple);
    }
}

/// How many; `KVLANE_FENCES` for more.
fn fences(usual: u64) -> u64 {
    std::env::var("KVLANE_FENCES").ok().and_then(|n| n.parse().ok()).unwrap_or(usual)
}

/// Here a sender and a receiver have turns, so that little is under way when a grant is revoked; see
/// below for more.
#[test]
fn nothing_lands_after_a_revoke() {
    if !here() {
        return;
    }
    let _load = Load::start();
    many_revokes(&mut Pair::new(couple()), 8, fences(40), 4096, 4);
}

/// Keeps a core busy, so that whoever copies late is late.
struct Load(Arc<AtomicBool>);

impl Load {
    fn start() -> Self {
        let over = Arc::new(AtomicBool::new(false));
        for _ in 0..2 {
            let over = over.clone();
            std::thread::spawn(move || while !over.load(Ordering::Relaxed) {});
        }
        Self(over)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What the sender is told is not what the receiver said.
fn forge(p: &mut Pair, change: impl Fn(&mut Message)) {
    for command in &mut p.to_tx {
        if let Command::Told { message, .. } = command {
            let mut said = Message::decode(message).unwrap();
            change(&mut said);
            *message = said.encode();
        }
    }
}

/// A pair that is linked, and between which `change` was made to what the receiver said.
fn forged(change: impl Fn(&mut Message)) -> (Pair, [Pool; 2]) {
    let mut p = Pair::new(couple());
    let (src, dst) = pools(&mut p, 4096, 64);
    engine_conformance::listen(&mut p, 1);
    let up = |p: &Pair| {
        let is = |e: &_| matches!(e, kvlane_transport::engine::EngineEvent::LaneUp { .. });
        p.from_tx.iter().any(is)
    };
    let began = Instant::now();
    while !up(&p) {
        assert!(began.elapsed() < Duration::from_secs(60), "{:?} {:?}", p.from_tx, p.from_rx);
        p.poll_rx();
        forge(&mut p, &change);
        p.poll_tx();
    }
    (p, [src, dst])
}

/// Posts parts and waits until the lane goes down; why.
fn fails(p: &mut Pair, pools: &[Pool; 2], parts: u32, poll_rx: bool) -> String {
    let ids: Vec<u32> = (0..parts).collect();
    let (from, to) = (pools[0].source(&ids, 4096), pools[1].plan(&ids, 4096));
    p.open(7, 1, &to);
    let began = Instant::now();
    let mut next = 0;
    while whys(&p.from_tx).is_empty() {
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", p.from_tx);
        while next < parts && next < p.acked() as u32 + 8 {
            p.post(7, next, 0, &from);
            next += 1;
        }
        p.poll_tx();
        if poll_rx {
            p.poll_rx();
        }
    }
    whys(&p.from_tx).remove(0)
}

fn says(text: &str, words: &[&str]) {
    let nic = format!("nic={}", nics()[0]);
    let always = [&nic, "port=1", "gid=", "queue_pair=0x", "peer=c/decode/i/0", "fix: "];
    for word in always.iter().chain(words) {
        assert!(text.contains(word), "{word}: {text}");
    }
}

#[test]
fn a_wrong_key_costs_the_lane_and_is_named() {
    if !here() {
        return;
    }
    let (mut p, pools) = forged(|said| {
        if let Message::Paired { regions, .. } = said {
            regions.iter_mut().for_each(|region| region.key.0 ^= 0x100);
        }
    });
    let why = fails(&mut p, &pools, 4, true);
    says(&why, &["remote access error", "code=0x0a", "vendor_code="]);
    assert_eq!(pools[1].touched(), 0);
    revoke(&mut p, 7);
}

#[test]
fn a_region_that_the_receiver_has_given_up_is_named() {
    if !here() {
        return;
    }
    let (mut p, pools) = forged(|_| {});
    p.rx.unregister(&pools[1].region).unwrap();
    // What the sender would hear of it is lost.
    p.poll_rx();
    p.to_tx.clear();
    let ids = [0, 1, 2, 3];
    let (from, to) = (pools[0].source(&ids, 4096), pools[1].plan(&ids, 4096));
    p.tell_tx(Command::Grant(kvlane_transport::engine::SendGrant {
        link: engine_conformance::LINK,
        grant: kvlane_proto::GrantId(9),
        lanes: vec![kvlane_proto::LaneId(0)],
        plan: to,
    }));
    p.post(9, 0, 0, &from);
    p.until("the lane's loss", |p| !whys(&p.from_tx).is_empty());
    says(&whys(&p.from_tx)[0], &["remote access error"]);
    assert_eq!(pools[1].touched(), 0);
}

#[test]
fn a_receiver_without_receives_is_named() {
    if !here() {
        return;
    }
    let (mut p, pools) = forged(|said| {
        if let Message::Paired { receives, .. } = said {
            *receives = 1000;
        }
    });
    let why = fails(&mut p, &pools, 64, false);
    says(&why, &["RNR retry counter exceeded", "code=0x0d", "credit"]);
    // What came before is in place, and accounted for once.
    p.until("parts", |p| arrived(p, 7).len() >= 32);
    revoke(&mut p, 7);
    assert!(fenced(&p, 7));
}

/// Two ports, a connected pair of queue pairs, and a region at each end.
struct Ends {
    ports: [Port; 2],
    domains: [Domain; 2],
    pairs: [<Port as Nic>::Pair; 2],
    pools: [Pool; 2],
    keys: [Registered; 2],
}

impl Ends {
    fn new(receives: u32) -> Self {
        let port = |nic: String| {
            let sysfs = Sysfs::default();
            let choice = config(&nic).choose(&sysfs).unwrap();
            let rail = choice.require().unwrap()[0].clone();
            Port::open(&Verbs::load().unwrap(), &sysfs, &rail, false).unwrap()
        };
        let mut ports = nics().map(port);
        let l = layout(4096, 1, KvKind::Mla);
        let pools = [Pool::new(&l, 1), Pool::new(&l, 1)];
        let domains = ports.each_mut().map(|port| port.domain().unwrap());
        let rights = Rights::RemoteWrite;
        let keys = [0, 1]
            .map(|n| ports[n].register(domains[n], &pools[n].region, rights).unwrap().remove(0));
        let mut ends = Self { pairs: pairs(&mut ports, domains), ports, domains, pools, keys };
        ends.pairs[1].post_receives(receives);
        ends
    }
    fn renew(&mut self) {
        self.pairs = pairs(&mut self.ports, self.domains);
    }
    /// Posts writes of the page; the last has an immediate, if there is one.
    fn write(&mut self, times: u32, immediate: Option<u32>) {
        let [from, to] = self.keys;
        let segment = Segment { address: from.address, key: from.local.0, bytes: 4096 };
        let to = Remote { address: to.address, key: to.remote.0 };
        let sends = self.pairs[0].sends_mut();
        for n in 1..=times {
            let posted = match immediate.filter(|_| n == times) {
                Some(immediate) => sends.write_immediate(to, segment, immediate),
                None => sends.write(to, segment, n == times),
            };
            assert!(posted);
        }
        sends.ring();
    }
    fn next(&mut self, end: usize) -> Completion {
        let began = Instant::now();
        loop {
            if let Some(found) = self.pairs[end].poll() {
                return found;
            }
            assert!(began.elapsed() < Duration::from_secs(60), "nothing completes");
        }
    }
    fn send_fault(&mut self) -> (Cause, u32) {
        match self.next(0).what {
            What::SendFailed(fault) => (fault.cause, fault.code),
            other => panic!("{other:?}"),
        }
    }
}

fn pairs(ports: &mut [Port; 2], domains: [Domain; 2]) -> [<Port as Nic>::Pair; 2] {
    let mut pairs = [0, 1].map(|n| ports[n].queue_pair(domains[n], 64, 64).unwrap());
    let ends = pairs.each_ref().map(QueuePair::end);
    for n in [0, 1] {
        ports[n].connect(&mut pairs[n], ends[1 - n]).unwrap();
    }
    pairs
}

/// As the facts about soft-RoCE say, by the engine's own hands.
#[test]
fn every_fault_of_a_queue_pair_is_told_as_the_nic_tells_it() {
    if !here() {
        return;
    }
    // No receive.
    let mut ends = Ends::new(0);
    ends.write(1, Some(1));
    assert_eq!(ends.send_fault(), (Cause::RnrRetries, 13));
    // Anything after that.
    ends.write(1, None);
    assert_eq!(ends.send_fault(), (Cause::Flushed, 5));

    // This side's region is gone.
    let mut ends = Ends::new(4);
    let Ends { ports, keys, .. } = &mut ends;
    ports[0].deregister(keys[0].local).unwrap();
    ends.write(1, None);
    assert_eq!(ends.send_fault(), (Cause::LocalAccess, 2));

    // The other side's, or it was never there; its receives are flushed.
    let mut ends = Ends::new(4);
    let Ends { ports, keys, .. } = &mut ends;
    ports[1].deregister(keys[1].local).unwrap();
    ends.write(1, None);
    assert_eq!(ends.send_fault(), (Cause::RemoteAccess, 10));
    let flushed = ends.next(1).what;
    assert!(matches!(flushed, What::ReceiveFailed(fault) if fault.cause == Cause::Flushed));

    // The other end is gone without a word.
    let mut ends = Ends::new(4);
    ends.ports[1].error(&mut ends.pairs[1]).unwrap();
    ends.write(1, None);
    assert_eq!(ends.send_fault(), (Cause::TransportRetries, 12));

    // Nothing wrong: bytes, then the immediate.
    let mut ends = Ends::new(4);
    ends.pools[0].fill(7);
    ends.write(3, Some(0x0102_0304));
    assert_eq!(ends.next(0).what, What::Sent);
    assert_eq!(ends.next(1).what, What::Arrived(0x0102_0304));
    assert!(ends.pools[1].read(ends.pools[1].region.address(), 4096).iter().all(|b| *b == 7));
}

/// The fence as it is, and without its wait for the flush: the latter has to be seen to fail, or the
/// former proves nothing here.
#[test]
fn the_wait_for_the_flush_is_the_fence() {
    if !here() {
        return;
    }
    let rounds = fences(120);
    let _load = Load::start();
    let mut violations = [0, 0];
    let mut ends = Ends::new(0);
    for round in 0..rounds {
        for (way, waits) in [true, false].into_iter().enumerate() {
            ends.renew();
            let [from, to] = ends.keys;
            ends.pools[0].write(from.address, &[1; 4096]);
            let Ends { ports, pairs: [sender, receiver], pools, .. } = &mut ends;
            let over = AtomicBool::new(false);
            std::thread::scope(|scope| {
                // Writes of one page without end, so that one is always on its way.
                scope.spawn(|| hot(sender, from, to, &over));
                std::thread::sleep(Duration::from_micros(300 + round * 97 % 3000));
                ports[1].error(receiver).unwrap();
                if waits {
                    let marker = receiver.post_receives(1) as u16 - 1;
                    ports[1].error(receiver).unwrap();
                    let began = Instant::now();
                    while receiver.poll().is_none_or(|found| found.index != marker) {
                        assert!(began.elapsed() < Duration::from_secs(60), "never flushed");
                    }
                }
                pools[1].write(to.address, &[CANARY; 4096]);
                std::thread::sleep(Duration::from_millis(3));
                let seen = pools[1].read(to.address, 4096);
                violations[way] += u32::from(seen.iter().any(|&b| b != CANARY));
                over.store(true, Ordering::Relaxed);
            });
        }
    }
    eprintln!("{violations:?} of {rounds}: with the wait for the flush, and without");
    assert_eq!(violations[0], 0, "a byte landed after the fence");
    if violations[1] == 0 {
        eprintln!("inconclusive: without the wait nothing landed late either");
    }
}

fn hot(pair: &mut <Port as Nic>::Pair, from: Registered, to: Registered, over: &AtomicBool) {
    let segment = Segment { address: from.address, key: from.local.0, bytes: 4096 };
    let to = Remote { address: to.address, key: to.remote.0 };
    while !over.load(Ordering::Relaxed) {
        while pair.sends().free() > 1 && pair.sends_mut().write(to, segment, false) {}
        if pair.sends().free() > 0 {
            let _ = pair.sends_mut().write(to, segment, true);
        }
        pair.sends_mut().ring();
        while let Some(found) = pair.poll() {
            match found.what {
                What::Sent => drop(pair.sends_mut().completed(found.index)),
                _ => return,
            }
        }
    }
}
