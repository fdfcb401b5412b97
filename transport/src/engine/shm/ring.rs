//! The two rings of a lane, in memory that both workers write.
//!
//! Owns: the words of one connection; a new dial has new ones. In: slots to publish. Out: copies of
//! slots that the peer has published. Invariants: a word of the peer's is read once and checked; the
//! sequence number of a slot is the only thing that makes it valid, and must be the expected one or
//! that of a lap ago; a ring that says anything else is broken, which costs its lane. Whoever sleeps
//! says so, then looks once more; whoever publishes looks afterwards, so one of them sees the other.
//!
//! ```text
//! line 0  reserved     line 1  receiver sleeps     line 2  sender sleeps     line 3  slots taken
//! line 4  64 acks of 4 words, then 2048 slots of 8 words
//! ```

use std::sync::atomic::{AtomicU64, Ordering, fence};

use kvlane_proto::{Error, ErrorKind, Refusal};

use super::wire::{ACK_BODY, Ack, SLOT_BODY};
use crate::sys::share::Words;

/// Slots of a lane; those of 8 parts of 1 MiB in pages of 4 KiB, twice.
pub const SLOTS: u64 = 2048;
/// Acks that are not taken; never more than parts in flight.
pub const ACKS: u64 = 64;
/// How far ahead slots are asked for.
const AHEAD: u64 = 6;
/// Words of a lane.
pub const WORDS: usize = SLOTS_AT + (SLOTS as usize) * (SLOT_BODY + 1);
const RECEIVER_SLEEPS: usize = 8;
const SENDER_SLEEPS: usize = 16;
const TAKEN: usize = 24;
const ACKS_AT: usize = 32;
const SLOTS_AT: usize = ACKS_AT + (ACKS as usize) * (ACK_BODY + 1);

fn slot_at(n: u64) -> usize {
    SLOTS_AT + (n % SLOTS) as usize * (SLOT_BODY + 1)
}
fn slot(words: &[AtomicU64], n: u64) -> &[AtomicU64] {
    let at = slot_at(n);
    &words[at..=at + SLOT_BODY]
}
fn ack_slot(words: &[AtomicU64], n: u64) -> &[AtomicU64] {
    let at = ACKS_AT + (n % ACKS) as usize * (ACK_BODY + 1);
    &words[at..=at + ACK_BODY]
}

fn broken(what: &'static str, found: u64, expected: u64) -> Refusal {
    Error::new(ErrorKind::Malformed, what)
        .with("found", found)
        .with("expected", expected)
        .to_refusal()
}

fn publish<const N: usize>(slot: &[AtomicU64], n: u64, body: [u64; N]) {
    for (to, word) in slot[1..].iter().zip(body) {
        to.store(word, Ordering::Relaxed);
    }
    slot[0].store(n + 1, Ordering::Release);
}

/// Whether the `n`th has been published, in a ring of `lap`.
fn is_there(slot: &[AtomicU64], n: u64, lap: u64) -> Result<bool, Refusal> {
    match slot[0].load(Ordering::Acquire) {
        found if found == n + 1 => Ok(true),
        found if found == (n + 1).saturating_sub(lap) => Ok(false),
        found => Err(broken("the ring has another sequence number", found, n + 1)),
    }
}

fn copied<const N: usize>(slot: &[AtomicU64]) -> [u64; N] {
    let mut body = [0; N];
    for (to, from) in body.iter_mut().zip(&slot[1..]) {
        *to = from.load(Ordering::Relaxed);
    }
    body
}

/// Says that a side sleeps, before it looks for the last time.
fn sleep(flag: &AtomicU64) {
    flag.store(1, Ordering::SeqCst);
    fence(Ordering::SeqCst);
}
/// Whether a side sleeps and has to be woken, after something was published for it.
fn to_wake(flag: &AtomicU64) -> bool {
    fence(Ordering::SeqCst);
    flag.load(Ordering::Relaxed) != 0 && flag.swap(0, Ordering::SeqCst) != 0
}

/// The sender's end.
pub struct SenderRing {
    words: Words,
    next: u64,
    /// Slots that the receiver had taken when it was last asked.
    taken: u64,
    acked: u64,
}

impl SenderRing {
    /// Of fresh words.
    pub fn new(words: Words) -> Self {
        Self { words, next: 0, taken: 0, acked: 0 }
    }
    /// The memory, to be shared.
    pub fn shared(&self) -> &Words {
        &self.words
    }
    /// Whether there is room for one more slot.
    ///
    /// # Errors
    /// The receiver says that it has taken what was never published.
    pub fn has_room(&mut self) -> Result<bool, Refusal> {
        if self.next - self.taken < SLOTS {
            return Ok(true);
        }
        let taken = self.words.words()[TAKEN].load(Ordering::Acquire);
        if taken < self.taken || taken > self.next {
            return Err(broken("the ring has another count of slots taken", taken, self.next));
        }
        self.taken = taken;
        Ok(self.next - taken < SLOTS)
    }
    /// Publishes a slot, for which there is room.
    pub fn push(&mut self, body: [u64; SLOT_BODY]) {
        publish(slot(self.words.words(), self.next), self.next, body);
        self.next += 1;
    }
    /// Whether there is an ack to take.
    ///
    /// # Errors
    /// The ring is broken.
    pub fn has_ack(&self) -> Result<bool, Refusal> {
        is_there(ack_slot(self.words.words(), self.acked), self.acked, ACKS)
    }
    /// The next ack, or what stands in its place.
    ///
    /// # Errors
    /// The ring is broken.
    pub fn ack(&mut self) -> Result<Option<Ack>, Refusal> {
        if !self.has_ack()? {
            return Ok(None);
        }
        let body: [u64; ACK_BODY] = copied(ack_slot(self.words.words(), self.acked));
        self.acked += 1;
        match Ack::decode(&body) {
            Some(ack) => Ok(Some(ack)),
            None => Err(broken("the ring has something else than an ack", body[1], 0)),
        }
    }
    /// Says that this side is about to sleep; look for acks and room afterwards.
    pub fn sleep(&self) {
        sleep(&self.words.words()[SENDER_SLEEPS]);
    }
    /// This side is awake.
    pub fn awake(&self) {
        self.words.words()[SENDER_SLEEPS].store(0, Ordering::Relaxed);
    }
    /// Whether the receiver has to be woken.
    pub fn to_wake(&self) -> bool {
        to_wake(&self.words.words()[RECEIVER_SLEEPS])
    }
}

/// The receiver's end.
pub struct ReceiverRing {
    words: Words,
    next: u64,
    acked: u64,
}

impl ReceiverRing {
    /// Of a peer's words, [`WORDS`] of them.
    pub fn new(words: Words) -> Self {
        Self { words, next: 0, acked: 0 }
    }
    /// Whether there is a slot to take.
    ///
    /// # Errors
    /// The ring is broken.
    pub fn has_slot(&self) -> Result<bool, Refusal> {
        is_there(slot(self.words.words(), self.next), self.next, SLOTS)
    }
    /// A copy of the next slot.
    ///
    /// # Errors
    /// The ring is broken.
    pub fn take(&mut self) -> Result<Option<[u64; SLOT_BODY]>, Refusal> {
        if !self.has_slot()? {
            return Ok(None);
        }
        let body = copied(slot(self.words.words(), self.next));
        self.next += 1;
        // From the other core's cache one by one, a part's slots take as long as a tenth of it.
        self.words.prefetch(slot_at(self.next + AHEAD));
        Ok(Some(body))
    }
    /// Gives room for what was taken.
    pub fn give_back(&self) {
        self.words.words()[TAKEN].store(self.next, Ordering::Release);
    }
    /// Publishes an ack. There is room, as long as the sender keeps to its parts in flight; if not,
    /// it loses its own acks.
    pub fn push_ack(&mut self, ack: &Ack) {
        publish(ack_slot(self.words.words(), self.acked), self.acked, ack.encode());
        self.acked += 1;
    }
    /// Says that this side is about to sleep; look for slots afterwards.
    pub fn sleep(&self) {
        sleep(&self.words.words()[RECEIVER_SLEEPS]);
    }
    /// This side is awake.
    pub fn awake(&self) {
        self.words.words()[RECEIVER_SLEEPS].store(0, Ordering::Relaxed);
    }
    /// Whether the sender has to be woken.
    pub fn to_wake(&self) -> bool {
        to_wake(&self.words.words()[SENDER_SLEEPS])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::shm::wire::Status;
    use kvlane_proto::{GrantId, PartId};

    fn rings() -> (SenderRing, ReceiverRing) {
        let tx = SenderRing::new(Words::new(WORDS, false).unwrap());
        let fd = tx.shared().fd().try_clone_to_owned().unwrap();
        (tx, ReceiverRing::new(Words::import(fd, WORDS).unwrap()))
    }
    fn ack(part: u32) -> Ack {
        Ack { status: Status::Landed, grant: GrantId(7), part: PartId(part) }
    }

    #[test]
    fn slots_and_acks_come_in_order_over_many_laps() {
        let (mut tx, mut rx) = rings();
        let (mut sent, mut got) = (0, 0);
        while got < 3 * SLOTS {
            while sent < 3 * SLOTS && tx.has_room().unwrap() {
                tx.push([sent; SLOT_BODY]);
                sent += 1;
            }
            assert!(sent - got <= SLOTS);
            // A part of it, so that laps do not begin together.
            for _ in 0..SLOTS / 3 {
                let Some(body) = rx.take().unwrap() else { break };
                assert_eq!(body, [got; SLOT_BODY]);
                got += 1;
                rx.push_ack(&ack(got as u32));
                assert_eq!(tx.ack().unwrap(), Some(ack(got as u32)));
            }
            rx.give_back();
        }
        assert_eq!((rx.take().unwrap(), tx.ack().unwrap()), (None, None));
    }

    #[test]
    fn a_full_ring_takes_no_more() {
        let (mut tx, mut rx) = rings();
        for n in 0..SLOTS {
            assert!(tx.has_room().unwrap());
            tx.push([n; SLOT_BODY]);
        }
        assert!(!tx.has_room().unwrap());
        rx.take().unwrap().unwrap();
        assert!(!tx.has_room().unwrap());
        rx.give_back();
        assert!(tx.has_room().unwrap());
    }

    #[test]
    fn numbers_that_cannot_be_break_the_ring() {
        for bad in [2, 5, SLOTS, SLOTS + 1, u64::MAX] {
            let (tx, mut rx) = rings();
            tx.words.words()[SLOTS_AT].store(bad, Ordering::Relaxed);
            assert!(rx.take().unwrap_err().text.contains(&format!("found={bad}")));
            assert!(rx.has_slot().is_err());
            let (mut tx, rx) = rings();
            rx.words.words()[ACKS_AT].store(bad, Ordering::Relaxed);
            assert!(tx.ack().is_err() && tx.has_ack().is_err());
        }
        for bad in [SLOTS + 1, u64::MAX] {
            let (mut tx, rx) = rings();
            (0..SLOTS).for_each(|n| tx.push([n; SLOT_BODY]));
            rx.words.words()[TAKEN].store(bad, Ordering::Relaxed);
            assert!(tx.has_room().is_err());
        }
        let (mut tx, mut rx) = rings();
        (0..SLOTS).for_each(|n| tx.push([n; SLOT_BODY]));
        for _ in 0..9 {
            rx.take().unwrap();
        }
        rx.give_back();
        assert!(tx.has_room().unwrap());
        (0..9).for_each(|n| tx.push([n; SLOT_BODY]));
        rx.words.words()[TAKEN].store(8, Ordering::Relaxed);
        assert!(tx.has_room().is_err(), "what was given back is taken again");
        let (mut tx, mut rx) = rings();
        rx.push_ack(&ack(1));
        rx.words.words()[ACKS_AT + 2].store(99 << 32, Ordering::Relaxed);
        assert!(tx.ack().is_err());
    }

    #[test]
    fn a_sleeper_is_woken_once() {
        let (tx, rx) = rings();
        assert!(!tx.to_wake() && !rx.to_wake());
        rx.sleep();
        assert!(tx.to_wake() && !tx.to_wake() && !rx.to_wake());
        tx.sleep();
        tx.awake();
        assert!(!rx.to_wake());
    }
}
