//! The rings of one queue pair in memory that a NIC uses at the same time.
//!
//! Owns: the indices of this side. In: entries. Out: entries in the ring, the doorbell, completions.
//! Invariants: an entry is stored before the record, the record before the doorbell; a slot is
//! written again only when its entry, or a later one, has completed; nothing here waits.
//!
//! Who creates the queue pair says where in the memory each ring is ([`Places`]). What the NIC
//! stores is checked: it cannot make a queue of this side free more than was posted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::ENTRY_WORDS;
use super::completion::{self, Completion};
use super::entry::{self, Entry};
use crate::sys::share::Words;

/// The eight words of a slot, if the ring lies in the memory. `length` is a power of two.
#[inline]
fn slot(memory: &Words, at: usize, length: u32, index: u64) -> Option<&[AtomicU64; ENTRY_WORDS]> {
    let nth = index as u32 & length.wrapping_sub(1);
    memory.words().get(at + nth as usize * ENTRY_WORDS..)?.first_chunk()
}

/// Where the parts of one queue pair are in its memory, in words of 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places {
    /// The send ring.
    pub sends_at: usize,
    /// Its entries; a power of two.
    pub sends: u32,
    /// Receives that may be posted; a power of two. Their ring has no data, so it is only counted.
    pub receives: u32,
    /// The completion ring.
    pub completions_at: usize,
    /// Its entries; a power of two, at least `sends + receives`.
    pub completions: u32,
    /// The doorbell record: receive half, send half ([`entry::record`]). Used by its halves.
    pub record_at: usize,
    /// The doorbell. Used whole.
    pub doorbell_at: usize,
    /// Completions consumed ([`completion::consumed`]), in the first half; the second half asks for an
    /// event ([`completion::ARMED`]) or not (0). Used by its halves.
    pub consumed_at: usize,
}

/// The send ring of one queue pair.
#[derive(Debug)]
pub struct SendQueue {
    memory: Arc<Words>,
    places: Places,
    number: u32,
    /// Index of the next entry, without wrap.
    next: u64,
    /// Entries known to have completed.
    done: u64,
}

impl SendQueue {
    /// An empty ring.
    pub fn new(memory: Arc<Words>, places: Places, number: u32) -> Self {
        Self { memory, places, number, next: 0, done: 0 }
    }
    /// The queue pair.
    pub fn number(&self) -> u32 {
        self.number
    }
    /// Entries that may be pushed now.
    #[inline]
    pub fn free(&self) -> u32 {
        self.places.sends.saturating_sub(self.outstanding() as u32)
    }
    /// The index of the next entry, without wrap.
    #[inline]
    pub fn next(&self) -> u64 {
        self.next
    }
    /// Entries that have not completed.
    #[inline]
    pub fn outstanding(&self) -> u64 {
        self.next - self.done
    }
    /// Stores an entry made for its index (`next() as u16`). The NIC may see it at once, but looks
    /// only when [`SendQueue::ring`] is called. The caller keeps to [`SendQueue::free`]: a full ring
    /// refuses.
    #[inline]
    #[must_use]
    pub fn push(&mut self, entry: &Entry) -> bool {
        if self.free() == 0 {
            return false;
        }
        let Places { sends_at, sends, .. } = self.places;
        let Some(slot) = slot(&self.memory, sends_at, sends, self.next) else { return false };
        // The record's store orders them.
        for (to, word) in slot.iter().zip(entry) {
            to.store(*word, Ordering::Relaxed);
        }
        self.next += 1;
        true
    }
    /// Shows the NIC what was pushed: record, then doorbell.
    #[inline]
    pub fn ring(&mut self) {
        let next = self.next as u16;
        if let Some(half) = self.memory.half(self.places.record_at, true) {
            half.store(entry::record(next), Ordering::Release);
        }
        if let Some(doorbell) = self.memory.words().get(self.places.doorbell_at) {
            doorbell.store(entry::doorbell_of_next(next, self.number), Ordering::Release);
        }
    }
    /// A completion came for the entry with this index (of 16 bits): it and all before it are free.
    /// Their index without wrap; `None` if it is not outstanding, which only a broken NIC says.
    pub fn completed(&mut self, index: u16) -> Option<u64> {
        let ahead = u64::from(index.wrapping_sub(self.done as u16));
        if ahead >= self.outstanding() {
            return None;
        }
        let index = self.done + ahead;
        self.done = index + 1;
        Some(index)
    }
}

/// Receives without data: each takes one immediate.
#[derive(Debug)]
pub struct ReceiveQueue {
    memory: Arc<Words>,
    places: Places,
    next: u64,
}

impl ReceiveQueue {
    /// None posted.
    pub fn new(memory: Arc<Words>, places: Places) -> Self {
        Self { memory, places, next: 0 }
    }
    /// Posts `count` more; gives how many were posted in all. The caller keeps count of those that
    /// completed: never more than [`Places::receives`] are outstanding.
    pub fn post(&mut self, count: u32) -> u64 {
        self.next += u64::from(count);
        if let Some(half) = self.memory.half(self.places.record_at, false) {
            half.store(entry::record(self.next as u16), Ordering::Release);
        }
        self.next
    }
    /// How many were posted in all: the index of the next one, without wrap.
    pub fn posted(&self) -> u64 {
        self.next
    }
}

/// The completion ring.
#[derive(Debug)]
pub struct CompletionQueue {
    memory: Arc<Words>,
    places: Places,
    next: u64,
}

impl CompletionQueue {
    /// Nothing consumed. The ring was filled with [`super::completion::unwritten`] by whoever made it.
    pub fn new(memory: Arc<Words>, places: Places) -> Self {
        Self { memory, places, next: 0 }
    }
    /// The next completion, if there is one; an opcode that is not known is an error and consumed.
    #[inline]
    pub fn poll(&mut self) -> Option<Result<Completion, u8>> {
        let Places { completions_at, completions, .. } = self.places;
        let slot = slot(&self.memory, completions_at, completions, self.next)?;
        // The bit turns with every pass, so that what an earlier one left is not taken for new.
        let owner = self.next & u64::from(completions) != 0;
        let last = slot[ENTRY_WORDS - 1].load(Ordering::Acquire);
        if !completion::is_written(last, owner) {
            return None;
        }
        let mut words: completion::Words = std::array::from_fn(|i| slot[i].load(Ordering::Relaxed));
        // Not loaded twice: who checks one value and uses another can be lied to.
        words[ENTRY_WORDS - 1] = last;
        self.next += 1;
        Some(completion::decode(&words))
    }
    /// Whether there is a next completion; it stays.
    pub fn is_ready(&self) -> bool {
        let Places { completions_at, completions, .. } = self.places;
        let owner = self.next & u64::from(completions) != 0;
        slot(&self.memory, completions_at, completions, self.next).is_some_and(|slot| {
            completion::is_written(slot[ENTRY_WORDS - 1].load(Ordering::Acquire), owner)
        })
    }
    /// Tells the NIC how far this side has read.
    pub fn consumed(&mut self) {
        if let Some(half) = self.memory.half(self.places.consumed_at, false) {
            half.store(completion::consumed(self.next), Ordering::Release);
        }
    }
    /// Asks for one event when the next completion comes. One that came before may bring none:
    /// poll once more after this.
    pub fn arm(&mut self) {
        if let Some(half) = self.memory.half(self.places.consumed_at, true) {
            half.store(completion::ARMED, Ordering::Release);
            // Before the poll that follows: either that one sees the completion, or the NIC, which
            // stores its completion and then looks here, sees this.
            fence(Ordering::SeqCst);
        }
    }
}
