//! The emulated NIC, driven as an engine drives it: bytes, completions and errors, and above all
//! what lands after everybody has given up.

#![allow(clippy::unwrap_used, clippy::panic)] // Tests fail by panicking.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvlane_proto::ErrorKind;
use kvlane_transport::emulated::client::{
    ANSWER, Domain, End as PairEnd, Hca, Key, QueuePair, Rights,
};
use kvlane_transport::emulated::control::{Answer, Request, Status, VERSION};
use kvlane_transport::emulated::faults::{Fault, Target, What};
use kvlane_transport::emulated::serve::{End, ThreadNic, spawn_thread};
use kvlane_transport::emulated::stats::Stats;
use kvlane_transport::emulated::{Config, layout};
use kvlane_transport::memory::Region;
use kvlane_transport::mlx5::completion::{Completion, What as Said};
use kvlane_transport::mlx5::{
    CompletionQueue, Data, Decoded, Operation, Places, Remote, SENDS_MAX, Segment, Syndrome, entry,
};
use kvlane_transport::random::random;
use kvlane_transport::sys::share::Words;
use kvlane_transport::sys::unix::{Listener, Name, Socket};
use kvlane_transport::sys::wait::readable;

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
        let peer = PairEnd { number: peer.number, sequence: peer.sequence, ..PairEnd::default() };
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

#[test]
fn the_longest_ring_is_executed_with_one_doorbell_however_often() {
    let nic = spawn_thread(config()).unwrap();
    let Couple { nic: _nic, mut a, b, mut qa, .. } = couple_on(nic, SENDS_MAX, 1);
    for round in 1..=3 {
        a.write(0, &[round as u8; 4]);
        for n in 1..=SENDS_MAX {
            write(&mut qa, b.remote(0), a.segment(0, 4), n == SENDS_MAX);
        }
        assert_eq!(qa.sends.free(), 0);
        qa.sends.ring();
        let done = next(&mut qa);
        assert_eq!((done.what, qa.sends.outstanding()), (Said::Sent, 0));
        assert_eq!(b.read(0, 4), [round as u8; 4]);
        assert_eq!(a.hca.stats().unwrap().entries, u64::from(SENDS_MAX) * round);
    }
}

/// Error, a receive as marker, error again: the fence of the receiver.
fn fence(side: &mut Side, pair: &mut QueuePair) {
    side.hca.error(pair).unwrap();
    pair.receives.post(1);
    side.hca.error(pair).unwrap();
}

#[test]
fn the_flush_of_the_marker_comes_behind_what_was_taken() {
    let Couple { nic: _nic, a, mut b, mut qa, mut qb } = couple();
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
    // Nobody told the sender.
    assert_eq!(failed(&mut qa), (0x15, 0x81));
}

#[test]
fn every_local_mistake_has_its_syndrome_and_flushes_the_rest() {
    type Make = fn(&Side, &Side, u32) -> entry::Entry;
    let cases: [(&str, (u8, u8), Make); 8] = [
        ("too long", (0x01, 0), |a, b, q| {
            entry::write(0, q, b.remote(0), a.segment(0, 8193), true)
        }),
        ("a length of zero", (0x01, 0), |a, b, q| {
            entry::write(0, q, b.remote(0), a.segment(0, 0), true)
        }),
        ("another queue pair's", (0x02, 0), |a, b, q| {
            entry::write(0, q + 1, b.remote(0), a.segment(0, 4), true)
        }),
        ("an operation that is not known", (0x02, 0), |a, b, q| {
            let mut entry = entry::write(0, q, b.remote(0), a.segment(0, 4), true);
            entry[0] = (entry[0].swap_bytes() | 0x77 << 32).swap_bytes();
            entry
        }),
        ("never all there", (0x02, 0), |a, b, q| {
            entry::write(1, q, b.remote(0), a.segment(0, 4), true)
        }),
        ("an unknown key", (0x04, 0x51), |a, b, q| {
            let from = Segment { key: 5, ..a.segment(0, 4) };
            entry::write(0, q, b.remote(0), from, true)
        }),
        ("another domain's key", (0x04, 0x51), |_, b, q| {
            entry::write(0, q, b.remote(0), b.segment(0, 4), true)
        }),
        ("outside of the memory", (0x04, 0x52), |a, b, q| {
            entry::write(0, q, b.remote(0), a.segment((1 << 20) - 3, 4), true)
        }),
    ];
    let nic = spawn_thread(Config { write_bytes_max: 8192, ..config() }).unwrap();
    let (mut a, mut b) = (Side::open(&nic, 1 << 20), Side::open(&nic, 1 << 20));
    for (name, expected, make) in cases {
        let (mut qa, qb) = (a.pair(8, 8), b.pair(8, 8));
        a.connect(&qa, &qb);
        b.connect(&qb, &qa);
        qa.receives.post(2);
        assert!(qa.sends.push(&make(&a, &b, qa.number)));
        write(&mut qa, b.remote(64), a.segment(0, 4), false);
        qa.sends.ring();
        assert_eq!(failed(&mut qa), expected, "{name}");
        // The first reason is given once; every other entry, signalled or not, and every receive is
        // flushed, also those that come later.
        assert_eq!(failed(&mut qa), (0x05, 0xf9), "{name}");
        for index in 0..2 {
            let flushed = next(&mut qa);
            assert!(matches!(flushed.what, Said::ReceiveFailed(f) if f.vendor == 0xf9), "{name}");
            assert_eq!(flushed.index, index);
        }
        write(&mut qa, b.remote(0), a.segment(0, 4), true);
        qa.sends.ring();
        assert_eq!(failed(&mut qa), (0x05, 0xf9), "{name}");
        a.hca.destroy(qa).unwrap();
        b.hca.destroy(qb).unwrap();
    }
    assert_eq!(b.read(0, 100), [0; 100]);
    let stats = a.hca.stats().unwrap();
    assert_eq!((stats.entries, stats.writes, stats.torn_entries), (0, 0, 1));
    assert_eq!([1, 2, 4, 5].map(|s| stats.syndrome(s)), [2, 3, 3, 8 * 4]);
    assert!(stats.pairs.is_empty());
}

#[test]
fn writes_where_none_may_be_are_refused_and_end_both_queue_pairs() {
    let nic = spawn_thread(config()).unwrap();
    let (mut a, mut b) = (Side::open(&nic, 1 << 20), Side::open(&nic, 1 << 20));
    let other = b.hca.domain().unwrap();
    let read_only = b.hca.register(b.domain, &b.pool, Rights::LocalRead).unwrap();
    let elsewhere = b.hca.register(other, &b.pool, Rights::RemoteWrite).unwrap();
    let gone = b.hca.register(b.domain, &b.pool, Rights::RemoteWrite).unwrap();
    b.hca.deregister(gone).unwrap();
    let cases = [
        ("an unknown key", b.pool.address(), 0xdead),
        ("no right", b.pool.address(), read_only.0),
        ("another domain's", b.pool.address(), elsewhere.0),
        ("taken back", b.pool.address(), gone.0),
        ("below", b.pool.address() - 1, b.key.0),
        ("above", b.pool.address() + (1 << 20) - 3, b.key.0),
        ("wraps", u64::MAX - 1, b.key.0),
    ];
    for (name, address, key) in cases {
        let (mut qa, mut qb) = (a.pair(8, 8), b.pair(8, 8));
        a.connect(&qa, &qb);
        b.connect(&qb, &qa);
        qb.receives.post(1);
        write(&mut qa, b.remote(0), a.segment(0, 4), true);
        write(&mut qa, Remote { address, key }, a.segment(0, 4), false);
        write(&mut qa, b.remote(0), a.segment(0, 4), false);
        qa.sends.ring();
        assert_eq!(next(&mut qa).what, Said::Sent, "{name}");
        assert_eq!(failed(&mut qa), (0x13, 0x88), "{name}");
        assert_eq!(failed(&mut qa), (0x05, 0xf9), "{name}");
        assert!(matches!(next(&mut qb).what, Said::ReceiveFailed(_)), "{name}");
        a.hca.destroy(qa).unwrap();
        b.hca.destroy(qb).unwrap();
    }
    assert_eq!(a.hca.stats().unwrap().syndrome(0x13), 7);
    let (trace, _) = a.hca.trace(0).unwrap();
    for why in ["no such key in its domain", "does not allow writes", "outside of the memory"] {
        assert!(trace.contains(why), "{trace}");
    }
}

#[test]
fn who_does_not_answer_is_asked_again_and_then_given_up() {
    let nic = spawn_thread(config()).unwrap();
    let (mut a, mut b) = (Side::open(&nic, 1 << 20), Side::open(&nic, 1 << 20));
    let try_to =
        |a: &mut Side, b: &mut Side, prepare: fn(&mut Side, &mut Side, QueuePair, &QueuePair)| {
            let (mut qa, qb) = (a.pair(8, 8), b.pair(8, 8));
            a.connect(&qa, &qb);
            prepare(a, b, qb, &qa);
            write(&mut qa, b.remote(0), a.segment(0, 4), false);
            write(&mut qa, b.remote(0), a.segment(0, 4), false);
            qa.sends.ring();
            assert_eq!(failed(&mut qa), (0x15, 0x81));
            assert_eq!(failed(&mut qa), (0x05, 0xf9));
            a.hca.destroy(qa).unwrap();
        };
    // Not connected.
    try_to(&mut a, &mut b, |_, _, qb, _| std::mem::forget(qb));
    // In error.
    try_to(&mut a, &mut b, |_, b, qb, qa| {
        b.connect(&qb, qa);
        b.hca.error(&qb).unwrap();
    });
    assert_eq!(a.hca.stats().unwrap().dropped_not_ready, 2 * 2 * 4);
    // Destroyed.
    try_to(&mut a, &mut b, |_, b, qb, qa| {
        b.connect(&qb, qa);
        b.hca.destroy(qb).unwrap();
    });
    // Somebody else's.
    try_to(&mut a, &mut b, |_, b, qb, _| {
        b.hca.connect(&qb, PairEnd { number: 5, sequence: 0, ..PairEnd::default() }).unwrap();
    });
    assert_eq!(a.hca.stats().unwrap().dropped_no_pair, 2 * 2 * 4);
    // It expects other numbers.
    try_to(&mut a, &mut b, |_, b, qb, qa| {
        let sequence = qa.sequence.wrapping_sub(3) & 0xff_ffff;
        b.hca.connect(&qb, PairEnd { number: qa.number, sequence, ..PairEnd::default() }).unwrap();
    });
    let stats = a.hca.stats().unwrap();
    assert_eq!(stats.dropped_sequence, 2 * 4);
    assert_eq!((stats.syndrome(0x15), stats.entries, stats.writes), (5, 10, 0));
    assert_eq!(stats.resent, 5 * 2 * 3);
}

#[test]
fn who_comes_late_is_reached_by_the_next_attempt() {
    let nic = spawn_thread(Config { retries: 100, ..config() }).unwrap();
    let (mut a, mut b) = (Side::open(&nic, 1 << 20), Side::open(&nic, 1 << 20));
    let (mut qa, mut qb) = (a.pair(8, 8), b.pair(8, 8));
    a.connect(&qa, &qb);
    a.write(0, b"data");
    write(&mut qa, b.remote(0), a.segment(0, 4), true);
    write_immediate(&mut qa, b.remote(8), a.segment(0, 4), 1);
    qa.sends.ring();
    silence(&mut qa);
    qb.receives.post(1);
    b.connect(&qb, &qa);
    assert_eq!((next(&mut qa).what, next(&mut qa).what), (Said::Sent, Said::Sent));
    assert_eq!(next(&mut qb).what, Said::Arrived { immediate: 1, bytes: 4 });
    assert_eq!(b.read(0, 12), *b"data\0\0\0\0data");
    assert_eq!(a.hca.stats().unwrap().entries, 2);
}

#[test]
fn an_immediate_without_a_receive_waits_and_fails() {
    let Couple { nic: _nic, mut a, b, mut qa, mut qb } = couple();
    // In time for the second attempt.
    write_immediate(&mut qa, b.remote(0), a.segment(0, 4), 1);
    qa.sends.ring();
    wait_for("no receive", || (a.hca.stats().unwrap().rnr == 1).then_some(()));
    qb.receives.post(1);
    assert_eq!(next(&mut qa).what, Said::Sent);
    assert_eq!(next(&mut qb).what, Said::Arrived { immediate: 1, bytes: 4 });
    // Never.
    write(&mut qa, b.remote(0), a.segment(0, 4), false);
    write_immediate(&mut qa, b.remote(0), a.segment(0, 4), 2);
    write(&mut qa, b.remote(0), a.segment(0, 4), false);
    qa.sends.ring();
    assert_eq!(failed(&mut qa).0, 0x16);
    assert_eq!(failed(&mut qa), (0x05, 0xf9));
    let stats = a.hca.stats().unwrap();
    assert_eq!((stats.rnr, stats.syndrome(0x16)), (1 + 3, 1));
    // The receiver goes on: it refused nothing.
    assert!(stats.pairs.iter().any(|p| p.number == qb.number && p.state == "ready"));
}

#[test]
fn what_is_on_the_wire_survives_the_death_of_its_sender() {
    let Couple { nic: _nic, a, mut b, mut qa, qb } = couple();
    let hold = b.hca.fault(&Fault::new(What::HoldWire, Target::Pair(qa.number))).unwrap();
    a.write(0, b"old bytes");
    write(&mut qa, b.remote(0), a.segment(0, 9), true);
    qa.sends.ring();
    wait_for("held", || (b.hca.stats().unwrap().hits(hold) == 1).then_some(()));
    // The packet has its own bytes.
    a.write(0, b"new bytes");
    let number = qa.number;
    drop((a, qa));
    wait_for("gone", || {
        let stats = b.hca.stats().unwrap();
        stats.pairs.iter().all(|p| p.number != number).then_some(())
    });
    assert_eq!(b.read(0, 9), [0; 9]);
    b.hca.clear(hold).unwrap();
    wait_for("landed", || (b.read(0, 9) == *b"old bytes").then_some(()));
    assert_eq!(b.hca.stats().unwrap().landed_after_sender, 1);
    drop(qb);
}

#[test]
fn what_is_on_the_wire_lands_after_its_senders_destruction_and_not_after_its_receivers() {
    for receiver_goes in [false, true] {
        let Couple { nic: _nic, mut a, mut b, mut qa, qb } = couple();
        let hold = b.hca.fault(&Fault::new(What::HoldWire, Target::Pair(qa.number))).unwrap();
        a.write(0, b"late");
        write(&mut qa, b.remote(0), a.segment(0, 4), true);
        qa.sends.ring();
        wait_for("held", || (b.hca.stats().unwrap().hits(hold) == 1).then_some(()));
        a.hca.destroy(qa).unwrap();
        if receiver_goes {
            b.hca.destroy(qb).unwrap();
        }
        b.hca.clear(hold).unwrap();
        let stats = wait_for("an end", || {
            let stats = b.hca.stats().unwrap();
            (stats.dropped_no_pair + stats.writes == 1).then_some(stats)
        });
        assert_eq!(stats.writes, u64::from(!receiver_goes));
        let expected = if receiver_goes { [0; 4] } else { *b"late" };
        assert_eq!(b.read(0, 4), expected);
    }
}

#[test]
fn what_is_on_the_wire_outlives_the_senders_attempts() {
    let Couple { nic: _nic, a, mut b, mut qa, .. } = couple();
    let hold = b.hca.fault(&Fault::new(What::HoldWire, Target::Pair(qa.number))).unwrap();
    a.write(0, b"late");
    write(&mut qa, b.remote(0), a.segment(0, 4), true);
    qa.sends.ring();
    assert_eq!(failed(&mut qa), (0x15, 0x81));
    assert_eq!(b.read(0, 4), [0; 4]);
    b.hca.clear(hold).unwrap();
    wait_for("landed", || (b.read(0, 4) == *b"late").then_some(()));
    let stats = b.hca.stats().unwrap();
    assert_eq!((stats.writes, stats.duplicates), (1, 3));
}

#[test]
fn what_was_taken_lands_after_the_key_and_completes_only_then() {
    let Couple { nic: _nic, a, mut b, mut qa, mut qb } =
        couple_on(spawn_thread(Config { retries: 1000, ..config() }).unwrap(), 64, 64);
    let hold = b.hca.fault(&Fault::new(What::HoldLanding, Target::Pair(qb.number))).unwrap();
    a.write(0, b"late");
    qb.receives.post(1);
    write(&mut qa, b.remote(0), a.segment(0, 4), true);
    write_immediate(&mut qa, b.remote(8), a.segment(0, 4), 9);
    qa.sends.ring();
    wait_for("taken", || (b.hca.stats().unwrap().hits(hold) == 2).then_some(()));
    b.hca.deregister(b.key).unwrap();
    silence(&mut qa);
    silence(&mut qb);
    b.hca.clear(hold).unwrap();
    assert_eq!((next(&mut qa).what, next(&mut qa).what), (Said::Sent, Said::Sent));
    assert_eq!(next(&mut qb).what, Said::Arrived { immediate: 9, bytes: 4 });
    assert_eq!(b.read(0, 12), *b"late\0\0\0\0late");
    let stats = b.hca.stats().unwrap();
    assert_eq!((stats.landed_after_key, stats.writes), (2, 2));
}

#[test]
fn a_refusal_is_heard_behind_what_was_taken_before() {
    let Couple { nic: _nic, a, mut b, mut qa, qb } =
        couple_on(spawn_thread(Config { retries: 1000, ..config() }).unwrap(), 64, 64);
    let hold = Fault::new(What::HoldLanding, Target::Pair(qb.number)).times(1);
    let hold = b.hca.fault(&hold).unwrap();
    a.write(0, b"late");
    write(&mut qa, b.remote(0), a.segment(0, 4), true);
    write(&mut qa, Remote { address: 0, key: 0 }, a.segment(0, 4), true);
    qa.sends.ring();
    silence(&mut qa);
    b.hca.clear(hold).unwrap();
    assert_eq!(next(&mut qa).what, Said::Sent);
    assert_eq!(failed(&mut qa), (0x13, 0x88));
    assert_eq!(b.read(0, 4), *b"late");
}

#[test]
fn a_dying_pair_is_kept_until_nothing_can_land() {
    let Couple { nic: _nic, mut a, mut b, mut qa, qb } = couple();
    let hold = b.hca.fault(&Fault::new(What::HoldLanding, Target::All)).unwrap();
    write(&mut qa, b.remote(0), a.segment(0, 4), true);
    qa.sends.ring();
    wait_for("taken", || (a.hca.stats().unwrap().hits(hold) == 1).then_some(()));
    assert_eq!(b.hca.destroy(qb).unwrap_err().kind(), ErrorKind::Busy);
    b.hca.drain();
    assert_eq!(b.hca.dying(), 1);
    b.hca.clear(hold).unwrap();
    wait_for("destroyed", || {
        b.hca.drain();
        (b.hca.dying() == 0).then_some(())
    });
    assert!(b.hca.drop_domain(b.domain).is_ok());
}

/// Posts one write of 4 bytes at `slot`, from there to there.
fn post(couple: &mut Couple, slot: u64) {
    let (to, from) = (couple.b.remote(slot * 4), couple.a.segment(slot * 4, 4));
    write(&mut couple.qa, to, from, true);
    couple.qa.sends.ring();
}

fn hits(couple: &mut Couple, fault: u64) -> u64 {
    couple.a.hca.stats().unwrap().hits(fault)
}

fn install(couple: &mut Couple, what: What) -> u64 {
    let fault = Fault::new(what, Target::Pair(couple.qa.number));
    couple.a.hca.fault(&fault).unwrap()
}

#[test]
fn delayed_packets_keep_their_order_and_what_follows_waits() {
    let mut c = couple();
    let us = 50_000;
    let fault = Fault::new(What::Delay { us }, Target::Pair(c.qa.number)).skip(1).times(1);
    let fault = c.a.hca.fault(&fault).unwrap();
    c.a.write(0, &[1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]);
    let start = Instant::now();
    (0..3).for_each(|slot| post(&mut c, slot));
    assert_eq!(next(&mut c.qa).index, 0);
    assert_eq!(c.b.read(4, 8), [0; 8]);
    for index in 1..3 {
        assert_eq!(next(&mut c.qa).index, index);
        assert!(start.elapsed() >= Duration::from_micros(us));
    }
    assert_eq!(c.b.read(0, 12), c.a.read(0, 12));
    assert_eq!(hits(&mut c, fault), 1);
}

#[test]
fn a_doorbell_that_is_not_heard_is_made_up_for_by_the_next() {
    for what in [What::DropKick, What::StaleRecord] {
        let mut c = couple();
        post(&mut c, 0);
        next(&mut c.qa);
        let fault = install(&mut c, what);
        post(&mut c, 1);
        silence(&mut c.qa);
        assert_eq!(hits(&mut c, fault), 1);
        post(&mut c, 2);
        assert_eq!((next(&mut c.qa).index, next(&mut c.qa).index), (1, 2), "{what:?}");
    }
}

#[test]
fn an_entry_that_comes_late_is_read_again() {
    let mut c = couple();
    let fault = install(&mut c, What::TornEntry { reads: 5 });
    post(&mut c, 0);
    assert_eq!(next(&mut c.qa).what, Said::Sent);
    assert_eq!((hits(&mut c, fault), c.a.hca.stats().unwrap().torn_entries), (1, 1));
    install(&mut c, What::TornEntry { reads: 1_000_000 });
    post(&mut c, 1);
    assert_eq!(failed(&mut c.qa), (0x02, 0));
}

#[test]
fn an_entry_fails_as_it_is_told_to() {
    let mut c = couple();
    let nak = What::Nak { syndrome: 0x14, vendor: 0x77 };
    let fault = Fault::new(nak, Target::Pair(c.qa.number)).skip(2);
    let fault = c.a.hca.fault(&fault).unwrap();
    (0..4).for_each(|slot| post(&mut c, slot));
    assert_eq!((next(&mut c.qa).what, next(&mut c.qa).what), (Said::Sent, Said::Sent));
    assert_eq!(failed(&mut c.qa), (0x14, 0x77));
    assert_eq!(failed(&mut c.qa), (0x05, 0xf9));
    assert_eq!(hits(&mut c, fault), 1);
    // The other side knows nothing of it.
    let number = c.qb.number;
    let stats = c.a.hca.stats().unwrap();
    assert!(stats.pairs.iter().any(|p| p.number == number && p.state == "ready"));
}

#[test]
fn one_byte_is_corrupted_and_no_other() {
    let mut c = couple();
    let fault = install(&mut c, What::Corrupt { byte: 4 + 2 });
    c.a.write(0, b"12345678");
    (0..2).for_each(|slot| post(&mut c, slot));
    (0..2).for_each(|_| assert_eq!(next(&mut c.qa).what, Said::Sent));
    assert_eq!(c.b.read(0, 8), [b'1', b'2', !b'3', b'4', b'5', b'6', b'7', b'8']);
    assert_eq!(hits(&mut c, fault), 1);
}

#[test]
fn an_immediate_may_come_twice() {
    let mut c = couple();
    let fault = Fault::new(What::DuplicateImmediate, Target::Pair(c.qb.number));
    let fault = c.a.hca.fault(&fault).unwrap();
    c.qb.receives.post(3);
    for immediate in [7, 8] {
        write_immediate(&mut c.qa, c.b.remote(0), c.a.segment(0, 4), immediate);
    }
    c.qa.sends.ring();
    for (index, immediate) in [7, 7, 8].into_iter().enumerate() {
        let completion = next(&mut c.qb);
        assert_eq!(completion.what, Said::Arrived { immediate, bytes: 4 });
        assert_eq!(completion.index, index as u16);
    }
    assert_eq!(hits(&mut c, fault), 1);
}

#[test]
fn a_link_that_comes_up_in_time_is_not_noticed_and_otherwise_it_is() {
    let mut c = couple_on(spawn_thread(Config { retries: 100, ..config() }).unwrap(), 64, 64);
    let fault = install(&mut c, What::LinkDown);
    c.a.write(0, b"data");
    post(&mut c, 0);
    wait_for("dropped", || (hits(&mut c, fault) >= 2).then_some(()));
    assert_eq!(c.b.read(0, 4), [0; 4]);
    c.a.hca.clear(fault).unwrap();
    assert_eq!(next(&mut c.qa).what, Said::Sent);
    assert_eq!(c.b.read(0, 4), *b"data");
    assert!(c.a.hca.stats().unwrap().dropped_link_down >= 2);
    // Flaps: every attempt is 67 ms after the one before, so one of them meets it up.
    let fault = install(&mut c, What::LinkFlap { ms: 40 });
    for slot in 1..5 {
        post(&mut c, slot);
        assert_eq!(next(&mut c.qa).what, Said::Sent);
    }
    assert!(hits(&mut c, fault) >= 1);

    let mut c = couple();
    // By the receiver's side.
    let fault = Fault::new(What::LinkDown, Target::Pair(c.qb.number));
    let fault = c.b.hca.fault(&fault).unwrap();
    post(&mut c, 0);
    assert_eq!(failed(&mut c.qa), (0x15, 0x81));
    assert_eq!(hits(&mut c, fault), 4);
}

#[test]
fn a_throttled_sender_is_as_slow_as_it_is_told() {
    let mut c = couple();
    let fault = install(&mut c, What::Throttle { bytes_per_s: 1 << 20 });
    let start = Instant::now();
    for offset in 0..10 {
        let (to, from) = (c.b.remote(offset), c.a.segment(offset, 16 << 10));
        write(&mut c.qa, to, from, true);
    }
    c.qa.sends.ring();
    (0..10).for_each(|_| assert_eq!(next(&mut c.qa).what, Said::Sent));
    // The first goes at once, each other 1/64 s after the one before.
    assert!(start.elapsed() >= Duration::from_millis(9 * 15));
    assert_eq!(hits(&mut c, fault), 10);
}

#[test]
fn completions_are_lost_and_late() {
    let mut c = couple();
    let fault = install(&mut c, What::LoseCompletion);
    (0..2).for_each(|slot| post(&mut c, slot));
    assert_eq!(next(&mut c.qa).index, 1);
    assert_eq!(hits(&mut c, fault), 1);
    let us = 50_000;
    let fault = Fault::new(What::DelayCompletions { us }, Target::Pair(c.qa.number)).times(1);
    let fault = c.a.hca.fault(&fault).unwrap();
    let start = Instant::now();
    (2..4).for_each(|slot| post(&mut c, slot));
    wait_for("written", || (c.a.hca.stats().unwrap().writes == 4).then_some(()));
    for index in 2..4 {
        assert_eq!(next(&mut c.qa).index, index);
        assert!(start.elapsed() >= Duration::from_micros(us));
    }
    assert_eq!(hits(&mut c, fault), 1);
}

#[test]
fn a_killed_nic_is_lost_for_good_and_its_events_say_so() {
    let mut c = couple();
    let fault = Fault::new(What::Kill, Target::All).skip(1);
    c.a.hca.fault(&fault).unwrap();
    (0..2).for_each(|slot| post(&mut c, slot));
    assert_eq!(next(&mut c.qa).index, 0);
    assert_eq!(c.nic.join(), Some(End::Killed));
    assert!(readable(c.a.hca.events()));
    c.a.hca.drain();
    assert!(c.a.hca.is_lost());
    silence(&mut c.qa);
    let e = c.a.hca.destroy(c.qa).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NoPath);
    assert!(e.to_string().contains("nic=emulated0"), "{e}");
    // The other notices it by a call.
    assert!(!c.b.hca.is_lost());
    assert_eq!(c.b.hca.error(&c.qb).unwrap_err().kind(), ErrorKind::NoPath);
    assert!(c.b.hca.is_lost());
}

#[test]
fn faults_are_for_a_process_or_for_all_and_can_be_there_from_the_start() {
    let start = Fault::new(What::Nak { syndrome: 0x14, vendor: 0 }, Target::All).skip(1);
    let mine =
        Fault::new(What::DelayCompletions { us: 1 }, Target::Process(std::process::id() as i32));
    let others = Fault::new(What::Kill, Target::Process(1));
    let config = Config { faults: vec![start, mine, others], ..config() };
    let mut c = couple_on(spawn_thread(config).unwrap(), 64, 64);
    (0..2).for_each(|slot| post(&mut c, slot));
    assert_eq!(next(&mut c.qa).what, Said::Sent);
    assert_eq!(failed(&mut c.qa).0, 0x14);
    let stats = c.a.hca.stats().unwrap();
    assert_eq!([1, 2, 3].map(|id| stats.hits(id)), [1, 2, 0]);
    let e = c.a.hca.clear(77).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotFound);
    assert_eq!(c.a.hca.clear(0).unwrap(), 3);
    // What is gone is still told.
    assert_eq!(c.a.hca.stats().unwrap().hits(1), 1);
}

#[test]
fn a_full_wire_makes_senders_wait() {
    let mut c = couple_on(
        spawn_thread(Config { wire_bytes_max: 8192, retries: 1000, ..config() }).unwrap(),
        64,
        64,
    );
    let hold = install(&mut c, What::HoldWire);
    for slot in 0..8 {
        let (to, from) = (c.b.remote(slot * 4096), c.a.segment(slot * 4096, 4096));
        write(&mut c.qa, to, from, true);
    }
    c.a.write(0, &[7; 8 * 4096]);
    c.qa.sends.ring();
    wait_for("a full wire", || (c.a.hca.stats().unwrap().wire_full > 0).then_some(()));
    assert_eq!(c.a.hca.stats().unwrap().entries, 2);
    c.a.hca.clear(hold).unwrap();
    (0..8).for_each(|_| assert_eq!(next(&mut c.qa).what, Said::Sent));
    assert_eq!(c.b.read(0, 8 * 4096), [7; 8 * 4096]);
}

#[test]
fn armed_completions_make_one_event_each_and_calls_do_not_swallow_it() {
    let mut c = couple();
    post(&mut c, 0);
    next(&mut c.qa);
    assert!(!readable(c.a.hca.events()));
    c.qa.completions.arm();
    (1..4).for_each(|slot| post(&mut c, slot));
    wait_for("an event", || readable(c.a.hca.events()).then_some(()));
    let stats = c.a.hca.stats().unwrap();
    assert!(readable(c.a.hca.events()));
    assert_eq!(stats.events, 1);
    c.a.hca.drain();
    assert!(!readable(c.a.hca.events()) && !c.a.hca.is_lost());
    (1..4).for_each(|_| assert_eq!(next(&mut c.qa).what, Said::Sent));
    // Not armed any more.
    post(&mut c, 4);
    next(&mut c.qa);
    assert!(!readable(c.a.hca.events()));
}

#[test]
fn a_completion_ring_that_nobody_reads_takes_its_queue_pair_down() {
    let mut c = couple_on(spawn_thread(config()).unwrap(), 2, 2);
    // Four completions fit. Their entries are taken as done without a word to the NIC.
    for slot in 0..5 {
        post(&mut c, slot);
        let written = |c: &mut Couple| c.a.hca.stats().unwrap().writes == slot + 1;
        wait_for("written", || written(&mut c).then_some(()));
        c.qa.sends.completed(slot as u16).unwrap();
    }
    let stats = wait_for("an overrun", || {
        let stats = c.a.hca.stats().unwrap();
        (stats.overruns > 0).then_some(stats)
    });
    assert!(stats.pairs.iter().any(|p| p.number == c.qa.number && p.state == "error"));
    assert_eq!(stats.completions, 4);
}

#[test]
fn credit_words_are_written_by_the_other_side() {
    let mut c = couple();
    let words = Arc::new(Words::new(16, false).unwrap());
    let (key, address) = c.b.hca.register_words(c.b.domain, &words).unwrap();
    c.a.write(0, &77u64.to_ne_bytes());
    let to = Remote { address: address + 8 * 5, key: key.0 };
    write(&mut c.qa, to, c.a.segment(0, 8), true);
    c.qa.sends.ring();
    assert_eq!(next(&mut c.qa).what, Said::Sent);
    let found: Vec<_> = words.words().iter().map(|w| w.load(Ordering::Acquire)).collect();
    assert_eq!(found.iter().sum::<u64>(), 77);
    assert_eq!(found[5], 77);
    let sealed = Arc::new(Words::new(16, true).unwrap());
    let e = c.b.hca.register_words(c.b.domain, &sealed).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Memory);
    c.b.hca.deregister(key).unwrap();
    assert_eq!(Arc::strong_count(&words), 1);
}

#[test]
fn memory_that_a_nic_cannot_reach_is_refused_by_name() {
    let nic = spawn_thread(config()).unwrap();
    let mut side = Side::open(&nic, 4096);
    let sealed = Region::memfd(4096).unwrap();
    let private = Region::private(4096).unwrap();
    for (region, word) in [(&sealed, "sealed"), (&private, "without a descriptor")] {
        let e = side.hca.register(side.domain, region, Rights::RemoteWrite).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Memory);
        let text = e.to_string();
        assert!(text.contains(word) && text.contains("Region::for_nic"), "{text}");
        assert!(text.contains(&region.to_string()), "{text}");
    }
    // To be read from, a sealed one will do.
    side.hca.register(side.domain, &sealed, Rights::LocalRead).unwrap();
    let e = side.hca.register(Domain(9999), &side.pool, Rights::LocalRead).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotFound);
    let qp = side.pair(4, 4);
    let e = side.hca.drop_domain(side.domain).unwrap_err();
    assert!(e.to_string().contains("has 1 queue pairs"), "{e}");
    side.hca.destroy(qp).unwrap();
    side.hca.drop_domain(side.domain).unwrap();
    let e = side.hca.queue_pair(side.domain, 3, 4).unwrap_err();
    assert!(e.to_string().contains("sends=3"), "{e}");
}

#[test]
fn a_doorbell_in_the_other_convention_and_a_wrong_one() {
    let nic = spawn_thread(config()).unwrap();
    let mut raw = Raw::open(&nic);
    let entry = entry::write(0, raw.number, raw.remote, raw.segment, true);
    raw.push(0, &entry);
    // As libmlx5 does: the entry's own first word.
    raw.ring(1, entry::doorbell_of_last(&entry));
    raw.wait_for_completions(1);
    assert_eq!(raw.stats().doorbell_mismatch, 0);
    // Rung before the record, as some do, and after it with the same value.
    let entry = entry::write(1, raw.number, raw.remote, raw.segment, true);
    raw.push(1, &entry);
    let value = entry::doorbell_of_next(2, raw.number);
    raw.memory.words()[layout::DOORBELL_AT].store(value, Ordering::Release);
    std::thread::sleep(Duration::from_millis(2));
    raw.ring(2, value);
    raw.wait_for_completions(2);
    // An earlier index than the record's: the record counts.
    let entry = entry::write(2, raw.number, raw.remote, raw.segment, true);
    raw.push(2, &entry);
    raw.ring(3, entry::doorbell_of_next(0, raw.number));
    raw.wait_for_completions(3);
    wait_for("counted", || (raw.stats().doorbell_mismatch == 1).then_some(()));
    // Another queue pair's: not heard.
    let entry = entry::write(3, raw.number, raw.remote, raw.segment, true);
    raw.push(3, &entry);
    raw.ring(4, entry::doorbell_of_next(4, raw.number + 1));
    wait_for("counted", || (raw.stats().doorbell_mismatch == 2).then_some(()));
    assert_eq!(raw.completions(), 3);
    // A record that cannot be meant.
    raw.ring(3 + 65, entry::doorbell_of_next(3 + 65, raw.number));
    wait_for("counted", || (raw.stats().record_mismatch == 1).then_some(()));
}

/// A queue pair, connected to itself, without the queues of this crate.
struct Raw {
    admin: Hca,
    side: Side,
    memory: Arc<Words>,
    places: Places,
    number: u32,
    remote: Remote,
    segment: Segment,
    _socket: Socket,
}

impl Raw {
    fn open(nic: &ThreadNic) -> Self {
        let socket = Socket::dial(nic.socket()).unwrap();
        let say = |request: Request, fd: Option<BorrowedFd<'_>>| {
            let fds: Vec<_> = fd.into_iter().collect();
            socket.send(&request.encode(7), &fds).unwrap();
            let (mut bytes, mut fds) = (vec![0; 1 << 16], Vec::new());
            let n = wait_for("an answer", || socket.receive(&mut bytes, &mut fds).ok());
            let (serial, answer) = Answer::decode(&bytes[..n]).unwrap();
            assert_eq!((serial, answer.status), (7, Status::Done), "{}", answer.text);
            answer.values
        };
        say(Request::Hello { version: VERSION }, None);
        let [domain, ..] = say(Request::Domain, None);
        let side = Side::open(nic, 4096);
        let (address, bytes) = (side.pool.address(), side.pool.bytes());
        let register = Request::Register { domain, address, bytes, remote_write: true };
        let [key, ..] = say(register, side.pool.memory().fd());
        let (places, words) = layout::queue_pair(64, 8);
        let memory = Arc::new(Words::new(words, false).unwrap());
        for slot in memory.words()[places.completions_at..].chunks(8) {
            slot[7].store(kvlane_transport::mlx5::completion::unwritten()[7], Ordering::Relaxed);
        }
        let words = words as u64;
        let create = Request::QueuePair { domain, words, places, ignore_overruns: false };
        let [number, sequence, ..] = say(create, Some(memory.fd()));
        say(Request::Connect { number, peer: number, sequence }, None);
        let key = key as u32;
        let remote = Remote { address: address + 1024, key };
        let segment = Segment { address, key, bytes: 4 };
        let admin = Hca::open(nic.socket()).unwrap();
        let number = number as u32;
        Self { admin, side, memory, places, number, remote, segment, _socket: socket }
    }
    fn push(&self, index: usize, entry: &entry::Entry) {
        let at = self.places.sends_at + index * 8;
        for (word, value) in self.memory.words()[at..].iter().zip(entry) {
            word.store(*value, Ordering::Relaxed);
        }
    }
    fn ring(&self, next: u16, doorbell: u64) {
        let half = self.memory.half(layout::RECORD_AT, true).unwrap();
        half.store(entry::record(next), Ordering::Release);
        self.memory.words()[layout::DOORBELL_AT].store(doorbell, Ordering::Release);
    }
    fn stats(&mut self) -> Stats {
        self.admin.stats().unwrap()
    }
    fn completions(&self) -> usize {
        let mut queue = CompletionQueue::new(self.memory.clone(), self.places);
        std::iter::from_fn(|| queue.poll()).count()
    }
    fn wait_for_completions(&self, n: usize) {
        wait_for("completions", || (self.completions() == n).then_some(()));
        let _ = &self.side;
    }
}

#[test]
fn bad_clients_lose_their_own_connection_only() {
    let nic = spawn_thread(config()).unwrap();
    let mut good = Side::open(&nic, 4096);
    let dial = || Socket::dial(nic.socket()).unwrap();
    let answer = |socket: &Socket| {
        let (mut bytes, mut fds) = (vec![0; 1 << 16], Vec::new());
        let n = wait_for("an answer or the end", || match socket.receive(&mut bytes, &mut fds) {
            Ok(n) => Some(n),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => None,
            Err(_) => Some(0),
        });
        (n > 0).then(|| Answer::decode(&bytes[..n]).unwrap().1)
    };
    let hello = Request::Hello { version: VERSION }.encode(1);
    let longer: Vec<u8> = hello.iter().copied().chain([0]).collect();
    let cases: [(&str, Vec<u8>); 6] = [
        ("nothing known", vec![0xff; 8]),
        ("too short", vec![1, 0, 0]),
        ("too long", longer),
        ("much too long", vec![1; 5000]),
        ("another version", Request::Hello { version: 99 }.encode(1)),
        ("no hello", Request::Domain.encode(1)),
    ];
    for (name, message) in cases {
        let socket = dial();
        socket.send(&message, &[]).unwrap();
        if let Some(answer) = answer(&socket) {
            assert_eq!(answer.status, Status::Malformed, "{name}");
            assert!(answer.text.contains('\n'), "{name}: no hint in {}", answer.text);
            assert!(closed(&socket), "{name}");
        }
    }
    // Requests that are understood and refused keep the connection.
    let socket = dial();
    socket.send(&hello, &[]).unwrap();
    assert_eq!(answer(&socket).unwrap().status, Status::Done);
    let null = std::fs::File::open("/dev/null").unwrap();
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    let domain = good.domain.0.into();
    let (places, words) = layout::queue_pair(4, 4);
    let words = words as u64;
    let mut own = 0;
    let create = |domain| Request::QueuePair { domain, words, places, ignore_overruns: false };
    let register =
        |domain, address, bytes| Request::Register { domain, address, bytes, remote_write: true };
    let qp = good.pair(4, 4);
    let number = qp.number.into();
    for (request, fd, expected) in [
        (Request::Hello { version: VERSION }, None, Status::Malformed),
        (Request::Domain, None, Status::Done),
        (Request::DropDomain { domain }, None, Status::NotFound),
        (Request::Deregister { key: good.key.0.into() }, None, Status::NotFound),
        (Request::Deregister { key: u64::MAX }, None, Status::NotFound),
        (register(domain, 0, 4096), Some(null.as_fd()), Status::NotFound),
        (register(u64::MAX, 0, 4096), Some(null.as_fd()), Status::NotFound),
        (register(0, 0, 4096), Some(null.as_fd()), Status::Memory),
        (register(0, 0, 4096), Some(file.as_fd()), Status::Memory),
        (register(0, 0, 4096), None, Status::Memory),
        (register(0, u64::MAX, 4096), Some(null.as_fd()), Status::Memory),
        (register(0, 0, 8192), good.pool.memory().fd(), Status::Memory),
        (create(domain), Some(null.as_fd()), Status::NotFound),
        (create(0), Some(null.as_fd()), Status::Memory),
        (create(0), good.pool.memory().fd(), Status::Memory),
        (create(0), None, Status::Memory),
        (Request::Connect { number, peer: 1, sequence: 1 }, None, Status::NotFound),
        (Request::Error { number }, None, Status::NotFound),
        (Request::Destroy { number }, None, Status::NotFound),
        (Request::Fault { text: "explode".into() }, None, Status::Malformed),
        (Request::Trace { from: u64::MAX }, None, Status::Done),
    ] {
        // 0 stands for the client's own.
        let mine = |domain: u64| if domain == 0 { own } else { domain };
        let request = match request {
            Request::Register { domain, address, bytes, remote_write } => {
                Request::Register { domain: mine(domain), address, bytes, remote_write }
            }
            Request::QueuePair { domain, words, places, ignore_overruns } => {
                Request::QueuePair { domain: mine(domain), words, places, ignore_overruns }
            }
            other => other,
        };
        let fds: Vec<_> = fd.into_iter().collect();
        socket.send(&request.encode(2), &fds).unwrap();
        let answer = answer(&socket).unwrap();
        assert_eq!(answer.status, expected, "{request:?}: {}", answer.text);
        if request == Request::Domain {
            own = answer.values[0];
        }
    }
    // Whoever asks and does not listen is thrown out.
    let deaf = dial();
    deaf.send(&hello, &[]).unwrap();
    wait_for("thrown out", || {
        deaf.send(&Request::Stats.encode(3), &[])
            .is_err_and(|e| e.kind() != std::io::ErrorKind::WouldBlock)
            .then_some(())
    });
    // The good one has noticed nothing.
    assert_eq!(good.hca.stats().unwrap().pairs.len(), 1);
    good.hca.destroy(qp).unwrap();
    assert!(!good.hca.is_lost());
}

fn closed(socket: &Socket) -> bool {
    let (mut bytes, mut fds) = ([0; 64], Vec::new());
    wait_for("the end", || match socket.receive(&mut bytes, &mut fds) {
        Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => None,
        end => Some(!end.is_ok_and(|n| n > 0)),
    })
}

#[test]
fn limits_hold_for_clients_and_what_they_make() {
    let nic = spawn_thread(config()).unwrap();
    let mut side = Side::open(&nic, 4096);
    for _ in 1..4096 {
        side.hca.domain().unwrap();
    }
    assert_eq!(side.hca.domain().unwrap_err().kind(), ErrorKind::LimitExceeded);
    for _ in 1..4096 {
        side.hca.register(side.domain, &side.pool, Rights::LocalRead).unwrap();
    }
    let e = side.hca.register(side.domain, &side.pool, Rights::LocalRead).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::LimitExceeded);
    assert!(e.to_string().contains("4096 keys"), "{e}");
    side.hca.deregister(side.key).unwrap();
    side.hca.register(side.domain, &side.pool, Rights::LocalRead).unwrap();
    let mut others: Vec<_> = (1..128).map(|_| Hca::open(nic.socket()).unwrap()).collect();
    let e = Hca::open(nic.socket()).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::LimitExceeded);
    others.pop();
    wait_for("room", || Hca::open(nic.socket()).ok());
    assert_eq!(nic.stop(), Some(End::Stopped));
}

/// Connections that say nothing keep nobody out.
#[test]
fn who_says_nothing_makes_way() {
    let nic = spawn_thread(config()).unwrap();
    let mut client = Hca::open(nic.socket()).unwrap();
    let dial = |_| wait_for("a place in the backlog", || Socket::dial(nic.socket()).ok());
    let mute: Vec<_> = (0..200).map(dial).collect();
    wait_for("all", || (client.stats().unwrap().refusals >= 72).then_some(()));
    Hca::open(nic.socket()).unwrap();
    assert!(!client.is_lost());
    assert_eq!(mute.len(), 200);
}

#[test]
fn what_a_client_had_is_gone_with_it() {
    let nic = spawn_thread(config()).unwrap();
    let mut stays = Side::open(&nic, 4096);
    let mut goes = Side::open(&nic, 4096);
    let qp = goes.pair(4, 4);
    let key = goes.key;
    drop((goes, qp));
    wait_for("gone", || stays.hca.stats().unwrap().pairs.is_empty().then_some(()));
    // Its place may be used again, its key may not.
    let keys: Vec<_> = (0..300)
        .map(|_| stays.hca.register(stays.domain, &stays.pool, Rights::LocalRead).unwrap())
        .collect();
    assert!(!keys.contains(&key));
}

/// A NIC that says hello and then what it likes, or nothing.
fn impostor(says: Option<Vec<u8>>) -> (Hca, std::thread::JoinHandle<Socket>) {
    let name = Name::Abstract(format!("kvlane-impostor-{:x}", random()).into_bytes());
    let listener = Listener::bind(name.clone()).unwrap();
    let nic = std::thread::spawn(move || {
        let socket = wait_for("a client", || listener.accept().ok());
        let (mut bytes, mut fds) = ([0; 1024], Vec::new());
        wait_for("hello", || socket.receive(&mut bytes, &mut fds).ok());
        let page = Words::new(layout::NIC_WORDS, true).unwrap();
        let hello = Answer::done([5, layout::NIC_WORDS as u64, 1, 0]);
        socket.send(&hello.encode(0), &[page.fd()]).unwrap();
        if let Some(says) = says {
            wait_for("a request", || socket.receive(&mut bytes, &mut fds).ok());
            socket.send(&says, &[]).unwrap();
        }
        socket
    });
    (Hca::open(&name).unwrap(), nic)
}

#[test]
fn a_nic_that_does_not_answer_or_talks_nonsense_is_lost_for_good() {
    let nonsense = [
        None,
        Some(vec![1, 2, 3]),
        // Another request's answer, a status that is none.
        Some(Answer::done([7; 4]).encode(77)),
        Some([1u32.to_le_bytes(), 99u32.to_le_bytes()].concat().repeat(5)),
    ];
    for says in nonsense {
        let (mut hca, nic) = impostor(says);
        let start = Instant::now();
        for _ in 0..3 {
            let e = hca.domain().unwrap_err();
            assert_eq!(e.kind(), ErrorKind::NoPath);
        }
        assert!(hca.is_lost());
        // Only the first call waits.
        assert!(start.elapsed() < ANSWER * 2);
        drop(nic.join());
    }
}
