//! The rings of one queue pair in memory that a NIC uses at the same time.
//!
//! Owns: the indices of this side. In: entries. Out: entries in the ring, the doorbell, completions.
//! Invariants: an entry is stored before the record, the record before the doorbell; a slot is
//! written again only when its entry, or a later one, has completed; nothing here waits.
//!
//! Who creates the queue pair says where in the memory each ring is ([`Places`]).

use std::sync::Arc;

use super::completion::Completion;
use super::entry::Entry;
use crate::sys::share::Words;

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
    /// The doorbell record: receive half, send half.
    pub record_at: usize,
    /// The doorbell.
    pub doorbell_at: usize,
    /// Completions consumed, in the first half; the second half asks for an event (1) or not (0).
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
        todo!()
    }
    /// The index of the next entry, without wrap.
    #[inline]
    pub fn next(&self) -> u64 {
        self.next
    }
    /// Entries that have not completed.
    pub fn outstanding(&self) -> u64 {
        self.next - self.done
    }
    /// Stores an entry made for its index (`next() as u16`). The NIC may see it at once, but looks
    /// only when [`SendQueue::ring`] is called. The caller keeps to [`SendQueue::free`]: a full ring
    /// refuses.
    #[inline]
    #[must_use]
    pub fn push(&mut self, entry: &Entry) -> bool {
        let _ = entry;
        todo!()
    }
    /// Shows the NIC what was pushed: record, then doorbell.
    #[inline]
    pub fn ring(&mut self) {
        todo!()
    }
    /// A completion came for the entry with this index (of 16 bits): it and all before it are free.
    /// Their index without wrap; `None` if it is not outstanding, which only a broken NIC says.
    pub fn completed(&mut self, index: u16) -> Option<u64> {
        let _ = index;
        todo!()
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
        let _ = count;
        todo!()
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
        todo!()
    }
    /// Tells the NIC how far this side has read.
    pub fn consumed(&mut self) {
        todo!()
    }
    /// Asks for one event when the next completion comes. One that came before may bring none:
    /// poll once more after this.
    pub fn arm(&mut self) {
        todo!()
    }
}
