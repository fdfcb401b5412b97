//! The rings of a queue pair against a NIC of a few lines, over every wrap, and against one that
//! lies.

#![allow(clippy::unwrap_used, clippy::panic)] // Tests fail by panicking.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use kvlane_transport::mlx5::completion::{self, What};
use kvlane_transport::mlx5::entry::{self, Doorbell};
use kvlane_transport::mlx5::{
    Completion, CompletionQueue, Data, Decoded, ENTRY_WORDS, Entry, Fault, Malformed, Operation,
    Places, ReceiveQueue, Remote, SENDS_MAX, Segment, SendQueue, Syndrome,
};
use kvlane_transport::sys::share::Words;

const PAIR: u32 = 0x1234;
/// Only a test that hangs takes so long.
const HANGS: Duration = Duration::from_secs(60);

/// Three words for the record, the doorbell and what was consumed, then the rings.
fn places(sends: u32, receives: u32, completions: u32) -> Places {
    let sends_at = 8;
    let completions_at = sends_at + sends as usize * ENTRY_WORDS;
    Places {
        sends_at,
        sends,
        receives,
        completions_at,
        completions,
        record_at: 0,
        doorbell_at: 1,
        consumed_at: 2,
    }
}
fn memory(places: &Places) -> Arc<Words> {
    let len = places.completions_at + places.completions as usize * ENTRY_WORDS;
    let memory = Arc::new(Words::new(len, false).unwrap());
    for nth in 0..places.completions as usize {
        let at = places.completions_at + nth * ENTRY_WORDS;
        for (to, word) in memory.words()[at..].iter().zip(completion::unwritten()) {
            to.store(word, Ordering::Relaxed);
        }
    }
    memory
}

/// What an entry with this index, without wrap, asks for: no two near each other are alike.
fn asked(index: u64) -> (Remote, Segment, bool) {
    let to = Remote { address: index << 12, key: index as u32 ^ 0xaaaa_aaaa };
    let bytes = 1 + (index % 4096) as u32;
    (to, Segment { address: index << 13 | 1, key: index as u32, bytes }, index.is_multiple_of(3))
}
fn made(index: u64) -> Entry {
    let (to, from, signalled) = asked(index);
    entry::write(index as u16, PAIR, to, from, signalled)
}
fn expected(index: u64) -> Decoded {
    let (to, from, signalled) = asked(index);
    let operation = Operation::Write { to, data: Data::One(from) };
    Decoded { operation, signalled, fence: false }
}

/// The NIC's end: executes nothing, checks everything.
struct Nic {
    memory: Arc<Words>,
    places: Places,
    /// Entries read, completions written.
    read: u64,
    written: u64,
}

impl Nic {
    fn new(memory: &Arc<Words>, places: Places) -> Self {
        Self { memory: memory.clone(), places, read: 0, written: 0 }
    }
    fn half(&self, at: usize, second: bool) -> u32 {
        self.memory.half(at, second).unwrap().load(Ordering::Acquire)
    }
    fn doorbell(&self) -> Doorbell {
        let value = self.memory.words()[self.places.doorbell_at].load(Ordering::Acquire);
        entry::doorbell(value)
    }
    /// Entries posted and not read.
    fn waiting(&self) -> u16 {
        let next = entry::record_index(self.half(self.places.record_at, true));
        next.wrapping_sub(self.read as u16)
    }
    fn receives(&self) -> u16 {
        entry::record_index(self.half(self.places.record_at, false))
    }
    /// Reads the next entry at its place.
    fn next(&mut self) -> Result<Decoded, Malformed> {
        let nth = (self.read % u64::from(self.places.sends)) as usize;
        let slot = &self.memory.words()[self.places.sends_at + nth * ENTRY_WORDS..];
        let entry = std::array::from_fn(|i| slot[i].load(Ordering::Relaxed));
        let read = entry::decode(&entry, self.read as u16, PAIR)?;
        self.read += 1;
        Ok(read)
    }
    /// Writes a completion if the ring has room.
    fn complete(&mut self, completion: &Completion) -> bool {
        let consumed = completion::consumed_count(self.half(self.places.consumed_at, false));
        let unread = (self.written as u32).wrapping_sub(consumed) & 0xff_ffff;
        if unread >= self.places.completions {
            return false;
        }
        let owner = self.written / u64::from(self.places.completions) % 2 == 1;
        self.store(&completion::encode(completion, owner));
        true
    }
    fn store(&mut self, words: &completion::Words) {
        let nth = (self.written % u64::from(self.places.completions)) as usize;
        let slot = &self.memory.words()[self.places.completions_at + nth * ENTRY_WORDS..];
        for i in 0..ENTRY_WORDS - 1 {
            slot[i].store(words[i], Ordering::Relaxed);
        }
        slot[ENTRY_WORDS - 1].store(words[ENTRY_WORDS - 1], Ordering::Release);
        self.written += 1;
    }
    fn sent(&self, index: u64) -> Completion {
        Completion { queue_pair: PAIR, index: index as u16, what: What::Sent }
    }
}

/// splitmix64: a seed gives the same cases on every machine.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Every ring length there can be, past the index's 16 bits and at least two passes of the ring.
#[test]
fn the_index_wraps_whatever_the_ring() {
    for length in (0..=15).map(|n| 1_u32 << n) {
        let places = places(length, 0, length);
        let memory = memory(&places);
        let mut sends = SendQueue::new(memory.clone(), places, PAIR);
        let mut completions = CompletionQueue::new(memory.clone(), places);
        let mut nic = Nic::new(&memory, places);
        let mut seed = u64::from(length);
        while sends.next() < 0x1_8000 {
            // Now and then the ring is filled to the last slot.
            let most = u64::from(sends.free());
            let count = if random(&mut seed).is_multiple_of(8) {
                most
            } else {
                random(&mut seed) % (most + 1)
            };
            for _ in 0..count {
                assert!(sends.push(&made(sends.next())));
            }
            if sends.free() == 0 {
                assert!(!sends.push(&made(sends.next())), "a slot was written twice");
            }
            sends.ring();
            assert_eq!(nic.doorbell(), Doorbell { queue_pair: PAIR, next: sends.next() as u16 });
            let take = random(&mut seed) % (u64::from(nic.waiting()) + 1);
            for _ in 0..take {
                let index = nic.read;
                assert_eq!(nic.next(), Ok(expected(index)), "ring of {length}");
            }
            let outstanding = sends.outstanding();
            assert_eq!(
                outstanding,
                u64::from(nic.waiting()) + nic.read - (sends.next() - outstanding)
            );
            // One completion stands for all that were taken.
            if take > 0 {
                assert!(nic.complete(&nic.sent(nic.read - 1)));
                let Some(Ok(told)) = completions.poll() else { panic!("ring of {length}") };
                assert_eq!(sends.completed(told.index), Some(nic.read - 1));
                assert_eq!(u64::from(sends.free()), u64::from(length) - (sends.next() - nic.read));
            }
            assert_eq!(completions.poll(), None);
            completions.consumed();
        }
    }
}

#[test]
fn a_million_entries_pass_between_two_threads() {
    const ENTRIES: u64 = 1_000_000;
    let began = Instant::now();
    let places = places(256, 0, 64);
    let memory = memory(&places);
    let mut nic = Nic::new(&memory, places);
    let consumer = thread::spawn(move || {
        while nic.read < ENTRIES {
            // Waits for the doorbell; goes by the record.
            let _ = nic.doorbell();
            if nic.waiting() == 0 {
                assert!(began.elapsed() < HANGS);
                thread::yield_now();
                continue;
            }
            let index = nic.read;
            let what = nic.next().unwrap();
            assert_eq!(what, expected(index));
            // The last one always says so, as it must, or nobody learns of those before it.
            if what.signalled || index + 1 == ENTRIES {
                while !nic.complete(&nic.sent(index)) {
                    assert!(began.elapsed() < HANGS);
                    thread::yield_now();
                }
            }
        }
        assert_eq!(nic.waiting(), 0);
    });
    let mut sends = SendQueue::new(memory.clone(), places, PAIR);
    let mut completions = CompletionQueue::new(memory, places);
    let (mut seed, mut polled) = (7, 0);
    while sends.next() < ENTRIES || sends.outstanding() > 0 {
        let left = ENTRIES - sends.next();
        let count = (random(&mut seed) % 64).min(u64::from(sends.free())).min(left);
        for _ in 0..count {
            assert!(sends.push(&made(sends.next())));
        }
        if count > 0 {
            sends.ring();
        }
        let mut some = false;
        while let Some(told) = completions.poll() {
            let told = told.unwrap();
            assert_eq!((told.queue_pair, told.what), (PAIR, What::Sent));
            let index = sends.completed(told.index).unwrap();
            assert!(expected(index).signalled || index + 1 == ENTRIES);
            (some, polled) = (true, polled + 1);
        }
        if some {
            completions.consumed();
        } else if count == 0 {
            assert!(began.elapsed() < HANGS);
            thread::yield_now();
        }
    }
    consumer.join().unwrap();
    // Every third, and the last, which is one of those.
    assert_eq!(polled, ENTRIES.div_ceil(3));
}

/// Completions of an earlier pass are never taken for new ones.
#[test]
fn the_owner_bit_turns_with_every_pass() {
    for length in (0..=6).map(|n| 1_u32 << n) {
        let places = places(1, 0, length);
        let memory = memory(&places);
        let mut completions = CompletionQueue::new(memory.clone(), places);
        let mut nic = Nic::new(&memory, places);
        let mut seed = u64::from(length);
        while nic.written < 5 * u64::from(length) + 3 {
            let from = nic.written;
            for _ in 0..=random(&mut seed) % u64::from(length) {
                assert!(nic.complete(&nic.sent(nic.written)));
            }
            for index in from..nic.written {
                assert_eq!(completions.poll(), Some(Ok(nic.sent(index))));
            }
            assert_eq!(completions.poll(), None);
            completions.consumed();
        }
        for _ in 0..length {
            assert!(nic.complete(&nic.sent(0)));
        }
        assert!(!nic.complete(&nic.sent(0)), "more than were consumed");
    }
}

#[test]
fn completions_say_what_the_nic_said() {
    let places = places(1, 4, 8);
    let memory = memory(&places);
    let mut completions = CompletionQueue::new(memory.clone(), places);
    let mut nic = Nic::new(&memory, places);
    let fault = Fault { syndrome: Syndrome::REMOTE_ACCESS, vendor: 0x88 };
    let flushed = Fault { syndrome: Syndrome::FLUSHED, vendor: 0xf9 };
    for what in [
        What::Arrived { immediate: 0xcafe_babe, bytes: 4096 },
        What::SendFailed(fault),
        What::ReceiveFailed(flushed),
    ] {
        let completion = Completion { queue_pair: PAIR, index: 3, what };
        assert!(nic.complete(&completion));
        assert_eq!(completions.poll(), Some(Ok(completion)));
    }
    // A message of SEND, which nobody here asked for: told once, and passed.
    let mut unknown = completion::encode(&nic.sent(0), false);
    unknown[7] = u64::from_ne_bytes([0, 0, 0, 0, 0, 0, 0, 0x20]);
    nic.store(&unknown);
    assert!(nic.complete(&nic.sent(9)));
    assert_eq!(completions.poll(), Some(Err(2)));
    assert_eq!(completions.poll(), Some(Ok(nic.sent(9))));
    assert_eq!(completions.poll(), None);
}

/// A NIC that lies frees nothing that was not posted, and nothing twice.
#[test]
fn a_completion_of_nothing_outstanding_is_refused() {
    let places = places(8, 0, 8);
    let mut sends = SendQueue::new(memory(&places), places, PAIR);
    for index in 0..=u16::MAX {
        assert_eq!(sends.completed(index), None);
    }
    // Up to just before the index wraps.
    for _ in 0..0x2_0000 / 8 - 1 {
        (0..8).for_each(|_| assert!(sends.push(&made(sends.next()))));
        assert!(sends.completed((sends.next() - 1) as u16).is_some());
    }
    (0..5).for_each(|_| assert!(sends.push(&made(sends.next()))));
    assert_eq!(sends.completed(0xfffa), Some(0x1_fffa));
    (0..5).for_each(|_| assert!(sends.push(&made(sends.next()))));
    assert_eq!((sends.free(), sends.outstanding(), sends.next()), (1, 7, 0x2_0002));
    let outstanding = [0xfffb, 0xfffc, 0xfffd, 0xfffe, 0xffff, 0, 1];
    for index in (0..=u16::MAX).filter(|index| !outstanding.contains(index)) {
        assert_eq!(sends.completed(index), None, "{index:#x}");
    }
    assert_eq!((sends.free(), sends.outstanding()), (1, 7));
    assert_eq!(sends.completed(0), Some(0x2_0000));
    // Again, and one that it stood for.
    assert_eq!(sends.completed(0), None);
    assert_eq!(sends.completed(0xfffd), None);
    assert_eq!((sends.free(), sends.outstanding()), (7, 1));
}

/// The most that may be outstanding: its ends are told apart.
#[test]
fn the_longest_ring_may_be_full() {
    let places = places(SENDS_MAX, 0, 1);
    let mut sends = SendQueue::new(memory(&places), places, PAIR);
    for index in 0..u64::from(SENDS_MAX) {
        assert!(sends.push(&made(index)));
    }
    assert!(!sends.push(&made(sends.next())));
    assert_eq!((sends.free(), sends.outstanding()), (0, u64::from(SENDS_MAX)));
    assert_eq!(sends.completed(0x4000), None);
    assert_eq!(sends.completed(0xffff), None);
    assert_eq!(sends.completed(0x3fff), Some(0x3fff));
    assert_eq!(sends.free(), SENDS_MAX);
}

#[test]
fn nothing_shows_before_the_ring() {
    let places = places(4, 4, 8);
    let memory = memory(&places);
    let nic = Nic::new(&memory, places);
    let mut sends = SendQueue::new(memory.clone(), places, PAIR);
    let mut receives = ReceiveQueue::new(memory.clone(), places);
    assert!(sends.push(&made(0)));
    assert_eq!((nic.waiting(), nic.doorbell()), (0, Doorbell { queue_pair: 0, next: 0 }));
    sends.ring();
    // Bytes in memory: the record's send half is its second, and both are big-endian.
    let half = |second| memory.half(places.record_at, second).unwrap().load(Ordering::Relaxed);
    assert_eq!([half(false), half(true)].map(u32::to_ne_bytes), [[0, 0, 0, 0], [0, 0, 0, 1]]);
    let doorbell = memory.words()[places.doorbell_at].load(Ordering::Relaxed);
    assert_eq!(doorbell.to_ne_bytes(), [0, 0, 1, 0, 0, 0x12, 0x34, 0]);
    // Neither queue touches the half of the other.
    assert_eq!(receives.post(3), 3);
    assert_eq!([half(false), half(true)].map(u32::to_ne_bytes), [[0, 0, 0, 3], [0, 0, 0, 1]]);
    assert!(sends.push(&made(1)));
    sends.ring();
    assert_eq!([half(false), half(true)].map(u32::to_ne_bytes), [[0, 0, 0, 3], [0, 0, 0, 2]]);
}

#[test]
fn receives_are_counted_over_the_wrap() {
    let places = places(1, 1 << 15, 1);
    let memory = memory(&places);
    let nic = Nic::new(&memory, places);
    let mut receives = ReceiveQueue::new(memory, places);
    for nth in 1..=5 {
        assert_eq!(receives.post(0x7fff), nth * 0x7fff);
        assert_eq!(receives.posted(), nth * 0x7fff);
        assert_eq!(nic.receives(), (nth * 0x7fff) as u16);
    }
}

#[test]
fn arming_and_consuming_use_a_half_each() {
    let places = places(1, 0, 2);
    let memory = memory(&places);
    let mut completions = CompletionQueue::new(memory.clone(), places);
    let mut nic = Nic::new(&memory, places);
    let halves = || [false, true].map(|second| nic_half(&memory, places, second));
    completions.arm();
    assert_eq!(halves(), [[0, 0, 0, 0], [0, 0, 0, 1]]);
    nic.complete(&nic.sent(0));
    assert!(completions.poll().is_some());
    assert_eq!(halves(), [[0, 0, 0, 0], [0, 0, 0, 1]]);
    completions.consumed();
    assert_eq!(halves(), [[0, 0, 0, 1], [0, 0, 0, 1]]);
}
fn nic_half(memory: &Words, places: Places, second: bool) -> [u8; 4] {
    memory.half(places.consumed_at, second).unwrap().load(Ordering::Relaxed).to_ne_bytes()
}

/// Who armed and then sees nothing is told of what comes: at least one of the two looks sees it.
#[test]
fn an_armed_queue_misses_nothing() {
    const ROUNDS: u64 = 100_000;
    let began = Instant::now();
    let places = places(1, 0, 2);
    let memory = memory(&places);
    let mut completions = CompletionQueue::new(memory.clone(), places);
    let mut nic = Nic::new(&memory, places);
    let (event, events) = std::sync::mpsc::channel();
    let device = thread::spawn(move || {
        for index in 0..ROUNDS {
            while !nic.complete(&nic.sent(index)) {
                assert!(began.elapsed() < HANGS);
                thread::yield_now();
            }
            std::sync::atomic::fence(Ordering::SeqCst);
            let armed = nic.memory.half(nic.places.consumed_at, true).unwrap();
            if armed.swap(0, Ordering::AcqRel) == completion::ARMED {
                event.send(()).unwrap();
            }
        }
        // Sleeps for ever if an event was missed: its end is not one.
        (nic, event)
    });
    let mut next = 0;
    while next < ROUNDS {
        completions.arm();
        let mut some = false;
        while let Some(told) = completions.poll() {
            assert_eq!(told.unwrap().index, next as u16);
            (some, next) = (true, next + 1);
            completions.consumed();
        }
        if !some {
            events.recv_timeout(HANGS).unwrap();
        }
    }
    drop(device.join().unwrap());
}

/// Places that are not in the memory: refused, never a panic.
#[test]
fn a_ring_outside_the_memory_takes_nothing() {
    let inside = places(4, 0, 4);
    let memory = memory(&inside);
    let far = memory.words().len();
    for sends_at in [far, far - ENTRY_WORDS + 1] {
        let places = Places { sends_at, completions_at: sends_at, ..inside };
        let mut sends = SendQueue::new(memory.clone(), places, PAIR);
        assert!(!sends.push(&made(0)));
        assert_eq!(sends.outstanding(), 0);
        assert_eq!(CompletionQueue::new(memory.clone(), places).poll(), None);
    }
    let places = Places { record_at: far, doorbell_at: far, consumed_at: far, ..inside };
    SendQueue::new(memory.clone(), places, PAIR).ring();
    ReceiveQueue::new(memory.clone(), places).post(1);
    let mut completions = CompletionQueue::new(memory.clone(), places);
    completions.consumed();
    completions.arm();
    let none = Places { sends: 0, completions: 0, ..inside };
    assert!(!SendQueue::new(memory, none, PAIR).push(&made(0)));
}
