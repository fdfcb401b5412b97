//! The emulated NIC, driven as an engine drives it: bytes, completions and errors, and above all
//! what lands after everybody has given up.

#![allow(clippy::unwrap_used, clippy::panic)] // Tests fail by panicking.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane_proto::ErrorKind;
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

#[test]
fn every_local_mistake_has_its_syndrome_and_flushes_the_rest() {
    type Make = fn(&Side, &Side, u32) -> entry::Entry;
    let stranger_key = |a: &Side| Segment { key: a.key.0 ^ 0x10_0000, ..a.segment(0, 4) };
    let _ = stranger_key;
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
        b.hca.connect(&qb, Peer { number: 5, sequence: 0 }).unwrap();
    });
    assert_eq!(a.hca.stats().unwrap().dropped_no_pair, 2 * 2 * 4);
    // It expects other numbers.
    try_to(&mut a, &mut b, |_, b, qb, qa| {
        let sequence = qa.sequence.wrapping_sub(3) & 0xff_ffff;
        b.hca.connect(&qb, Peer { number: qa.number, sequence }).unwrap();
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
    let Couple { nic: _nic, mut a, mut b, mut qa, qb } = couple();
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
    let Couple { nic: _nic, mut a, mut b, mut qa, .. } = couple();
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
    let Couple { nic: _nic, mut a, mut b, mut qa, mut qb } =
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
    let Couple { nic: _nic, mut a, mut b, mut qa, qb } =
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
