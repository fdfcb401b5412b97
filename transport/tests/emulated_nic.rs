//! The emulated NIC, driven as an engine drives it: bytes, completions and errors, and above all
//! what lands after everybody has given up.

#![allow(clippy::unwrap_used, clippy::panic)] // Tests fail by panicking.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane_transport::emulated::Config;
use kvlane_transport::emulated::client::{Domain, Hca, Key, Peer, QueuePair, Rights};
use kvlane_transport::emulated::faults::{Fault, Target, What};
use kvlane_transport::emulated::serve::{ThreadNic, spawn_thread};
use kvlane_transport::memory::Region;
use kvlane_transport::mlx5::completion::{Completion, What as Said};
use kvlane_transport::mlx5::{Data, Decoded, Operation, Remote, Segment, Syndrome, entry};

/// Ten times what anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// One worker: a NIC opened, a domain, a pool.
struct Side {
    hca: Hca,
    domain: Domain,
    pool: Arc<Region>,
    key: Key,
}

impl Side {
    fn open(nic: &ThreadNic, bytes: u64) -> Self {
        let mut hca = Hca::open(nic.socket()).unwrap();
        let domain = hca.domain().unwrap();
        let pool = Region::for_nic(bytes).unwrap();
        let key = hca.register(domain, &pool, Rights::RemoteWrite).unwrap();
        Self { hca, domain, pool, key }
    }
    fn pair(&mut self, sends: u32, receives: u32) -> QueuePair {
        self.hca.queue_pair(self.domain, sends, receives).unwrap()
    }
    fn connect(&mut self, pair: &QueuePair, peer: &QueuePair) {
        let peer = Peer { number: peer.number, sequence: peer.sequence };
        self.hca.connect(pair, peer).unwrap();
    }
    fn remote(&self, offset: u64) -> Remote {
        Remote { address: self.pool.address() + offset, key: self.key.0 }
    }
    fn segment(&self, offset: u64, bytes: u32) -> Segment {
        Segment { address: self.pool.address() + offset, key: self.key.0, bytes }
    }
    fn read(&self, offset: u64, bytes: usize) -> Vec<u8> {
        let mut into = vec![0; bytes];
        self.pool.memory().read_at(offset, &mut into).unwrap();
        into
    }
    fn write(&self, offset: u64, bytes: &[u8]) {
        self.pool.memory().write_at(offset, bytes).unwrap();
    }
}

/// Two workers on one NIC with a pair of connected queue pairs.
struct Couple {
    nic: ThreadNic,
    a: Side,
    b: Side,
    qa: QueuePair,
    qb: QueuePair,
}

fn config() -> Config {
    Config::new("emulated0")
}

fn couple_on(nic: ThreadNic, sends: u32, receives: u32) -> Couple {
    let (mut a, mut b) = (Side::open(&nic, 1 << 20), Side::open(&nic, 1 << 20));
    let (qa, qb) = (a.pair(sends, receives), b.pair(sends, receives));
    a.connect(&qa, &qb);
    b.connect(&qb, &qa);
    Couple { nic, a, b, qa, qb }
}

fn couple() -> Couple {
    couple_on(spawn_thread(config()).unwrap(), 64, 64)
}

fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::yield_now();
    }
}

/// The next completion.
fn next(pair: &mut QueuePair) -> Completion {
    let completion = wait_for("a completion", || pair.completions.poll()).unwrap();
    pair.completions.consumed();
    if matches!(completion.what, Said::Sent | Said::SendFailed(_)) {
        pair.sends.completed(completion.index).unwrap();
    }
    assert_eq!(completion.queue_pair, pair.number);
    completion
}

/// No completion comes for a while.
fn silence(pair: &mut QueuePair) {
    let until = Instant::now() + Duration::from_millis(100);
    while Instant::now() < until {
        if let Some(completion) = pair.completions.poll() {
            panic!("{completion:?}");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn write(pair: &mut QueuePair, to: Remote, from: Segment, signalled: bool) {
    let entry = entry::write(pair.sends.next() as u16, pair.number, to, from, signalled);
    assert!(pair.sends.push(&entry));
}

fn write_immediate(pair: &mut QueuePair, to: Remote, from: Segment, immediate: u32) {
    let index = pair.sends.next() as u16;
    let entry = entry::write_immediate(index, pair.number, to, from, immediate, true);
    assert!(pair.sends.push(&entry));
}

/// The syndrome and vendor code of the next completion, which is of a send that failed.
fn failed(pair: &mut QueuePair) -> (u8, u8) {
    match next(pair).what {
        Said::SendFailed(fault) => (fault.syndrome.0, fault.vendor),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_write_and_an_immediate_arrive() {
    let Couple { nic: _nic, mut a, b, mut qa, mut qb } = couple();
    a.write(100, b"hello there");
    qb.receives.post(2);
    write(&mut qa, b.remote(5000), a.segment(100, 11), true);
    write_immediate(&mut qa, b.remote(7), a.segment(102, 3), 0xcafe_babe);
    qa.sends.ring();
    a.hca.kick();
    assert_eq!((next(&mut qa).what, next(&mut qa).what), (Said::Sent, Said::Sent));
    let arrived = next(&mut qb);
    assert_eq!(arrived.index, 0);
    assert_eq!(arrived.what, Said::Arrived { immediate: 0xcafe_babe, bytes: 3 });
    assert_eq!(b.read(5000, 12), *b"hello there\0");
    assert_eq!(b.read(6, 5), *b"\0llo\0");
    let stats = a.hca.stats().unwrap();
    assert_eq!((stats.entries, stats.writes, stats.immediates, stats.bytes), (2, 2, 1, 14));
    assert_eq!((stats.doorbells, stats.completions, stats.doorbell_mismatch), (1, 3, 0));
    let (trace, _) = a.hca.trace(0).unwrap();
    assert!(
        trace.contains("emulated0") && trace.contains("immediate 0xcafebabe arrived"),
        "{trace}"
    );
}

#[test]
fn every_kind_of_entry_is_executed() {
    let Couple { nic: _nic, mut a, b, mut qa, mut qb } = couple();
    a.write(0, b"0123456789");
    qb.receives.post(8);
    let inline = |text: &[u8]| {
        let mut bytes = [0; 28];
        bytes[..text.len()].copy_from_slice(text);
        Data::Inline { len: text.len() as u8, bytes }
    };
    let all = [
        Operation::Nop,
        Operation::Write { to: b.remote(0), data: Data::Two(a.segment(0, 3), a.segment(7, 2)) },
        Operation::Write { to: b.remote(100), data: inline(b"inline") },
        Operation::Write { to: b.remote(200), data: inline(b"twenty-eight bytes in entry!") },
        // Nothing to write, so nowhere to write it.
        Operation::WriteImmediate {
            to: Remote { address: 0, key: 0 },
            data: inline(b""),
            immediate: 7,
        },
    ];
    for operation in all {
        let what = Decoded { operation, signalled: true, fence: false };
        let entry = entry::encode(qa.sends.next() as u16, qa.number, &what);
        assert!(qa.sends.push(&entry));
    }
    qa.sends.ring();
    for index in 0..all.len() {
        let completion = next(&mut qa);
        assert_eq!((completion.index, completion.what), (index as u16, Said::Sent));
    }
    assert_eq!(next(&mut qb).what, Said::Arrived { immediate: 7, bytes: 0 });
    assert_eq!(b.read(0, 6), *b"01278\0");
    assert_eq!(b.read(100, 7), *b"inline\0");
    assert_eq!(b.read(200, 29), *b"twenty-eight bytes in entry!\0");
    assert_eq!(a.hca.stats().unwrap().writes, 4);
}

#[test]
fn a_million_writes_wrap_every_index_and_none_is_torn() {
    const ALL: u64 = 1_000_000;
    const PAGES: u64 = 256;
    let Couple { nic: _nic, mut a, b, mut qa, .. } =
        couple_on(spawn_thread(config()).unwrap(), 64, 1);
    let (mut posted, mut done, mut batches) = (0, 0, 0);
    while done < ALL {
        let n = u64::from(qa.sends.free()).min(ALL - posted).min(29);
        for i in 0..n {
            let number = posted + i;
            // A slot of the source is free when its entry has completed: 64 in flight, 256 slots.
            let at = number % PAGES * 8;
            a.write(at, &number.to_le_bytes());
            write(&mut qa, b.remote((number % PAGES) * 16), a.segment(at, 8), i + 1 == n);
        }
        if n > 0 {
            posted += n;
            batches += 1;
            qa.sends.ring();
        }
        while let Some(completion) = qa.completions.poll() {
            let completion = completion.unwrap();
            assert_eq!(completion.what, Said::Sent);
            done = qa.sends.completed(completion.index).unwrap() + 1;
            // The last write that is known to be done is in place.
            let number = done - 1;
            let found = b.read((number % PAGES) * 16, 8);
            let found = u64::from_le_bytes(found.try_into().unwrap());
            assert!(found >= number && found % PAGES == number % PAGES, "{found} {number}");
        }
        qa.completions.consumed();
    }
    for page in 0..PAGES {
        let number = (ALL - 1) - (ALL - 1 - page) % PAGES;
        assert_eq!(b.read(page * 16, 8), number.to_le_bytes());
    }
    let stats = a.hca.stats().unwrap();
    assert_eq!((stats.entries, stats.writes, stats.bytes), (ALL, ALL, ALL * 8));
    assert_eq!(stats.completions, batches);
    assert_eq!((stats.torn_entries, stats.doorbell_mismatch, stats.record_mismatch), (0, 0, 0));
}

/// Error, a receive as marker, error again: the fence of the receiver.
fn fence(side: &mut Side, pair: &mut QueuePair) {
    side.hca.error(pair).unwrap();
    pair.receives.post(1);
    side.hca.error(pair).unwrap();
}

#[test]
fn the_flush_of_the_marker_comes_behind_what_was_taken() {
    let Couple { nic: _nic, mut a, mut b, mut qa, mut qb } = couple();
    let hold = Fault::new(What::HoldLanding, Target::Pair(qb.number));
    let hold = b.hca.fault(&hold).unwrap();
    a.write(0, b"late");
    write(&mut qa, b.remote(0), a.segment(0, 4), true);
    qa.sends.ring();
    wait_for("taken", || (b.hca.stats().unwrap().hits(hold) == 1).then_some(()));
    qb.receives.post(1);
    b.hca.error(&qb).unwrap();
    // Posted before the error: it says nothing.
    assert!(matches!(next(&mut qb).what, Said::ReceiveFailed(_)));
    assert_eq!(b.read(0, 4), [0; 4]);
    fence(&mut b, &mut qb);
    silence(&mut qb);
    assert_eq!(b.hca.dying(), 0);
    let mut qb = b.hca.try_destroy(qb).unwrap().expect("something is to land");
    assert_eq!(b.read(0, 4), [0; 4]);
    assert_eq!(b.hca.clear(hold).unwrap(), 1);
    let marker = next(&mut qb);
    assert_eq!(marker.index, 1);
    assert!(matches!(marker.what, Said::ReceiveFailed(f) if f.syndrome == Syndrome::FLUSHED));
    assert_eq!(b.read(0, 4), *b"late");
    assert!(b.hca.try_destroy(qb).unwrap().is_none());
    assert_eq!(b.hca.stats().unwrap().landed_after_error, 1);
}
