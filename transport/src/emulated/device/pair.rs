//! One queue pair: its rings as the NIC sees them, and how far each has got.
//!
//! Owns: the mapping of the poster's memory, the indices of the NIC's side, what was taken and has not
//! landed, completions that a fault makes late. Invariant: whatever the memory says is checked
//! against these before it counts.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

use super::super::faults::{Fate, Whom};
use super::super::stats::PairStats;
use super::MASK_24;
use crate::mlx5::completion::{self, consumed_count};
use crate::mlx5::entry::record_index;
use crate::mlx5::{Completion, ENTRY_WORDS, Entry, Places};
use crate::sys::share::{Import, Words};

/// What a queue pair does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Nothing yet.
    Unconnected,
    /// Sends and takes.
    Ready,
    /// Flushes.
    Error,
}

impl State {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Unconnected => "unconnected",
            Self::Ready => "ready",
            Self::Error => "error",
        }
    }
}

/// What is said of a packet, without its bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header {
    pub(super) from: Whom,
    /// Where the sender was.
    pub(super) from_slot: usize,
    pub(super) to: u32,
    /// Where the receiver was.
    pub(super) to_slot: usize,
    pub(super) sequence: u32,
    pub(super) address: u64,
    pub(super) key: u32,
    pub(super) bytes: u32,
    pub(super) immediate: Option<u32>,
}

/// A packet that was taken, in its place.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) header: Header,
    /// Where it lands; `None` if it has no bytes.
    pub(super) place: Option<(Arc<Import>, u64)>,
    /// The receive that it has taken, and, by a fault, another.
    pub(super) receives: [Option<u64>; 2],
    pub(super) hold: Option<u64>,
}

/// What waits behind what was taken.
#[derive(Debug)]
pub(super) enum Landing {
    Write {
        taken: Taken,
        payload: Vec<u8>,
    },
    /// The refusal of a packet: heard by the sender when what was before it has landed.
    Refusal {
        header: Header,
    },
}

/// How storing a completion ended.
pub(super) enum Stored {
    Done { armed: bool },
    Overrun { first: bool },
}

#[derive(Debug)]
pub(super) struct Pair {
    pub(super) number: u32,
    pub(super) client: u32,
    pid: i32,
    pub(super) domain: u32,
    pub(super) sequence: u32,
    memory: Words,
    pub(super) places: Places,
    ignore_overruns: bool,
    pub(super) state: State,
    pub(super) peer: u32,
    pub(super) peer_slot: usize,

    /// The doorbell's value that was heard last.
    pub(super) heard: u64,
    /// It was heard and the record has not said the same yet.
    pub(super) kicked: Option<Instant>,
    /// That has been counted.
    pub(super) is_mismatch_counted: bool,
    /// The record at the latest kick.
    pub(super) last_record: u16,
    /// Entries that the poster has shown.
    pub(super) posted: u64,

    /// The next entry to execute.
    pub(super) executed: u64,
    /// As far as it ever got.
    pub(super) furthest: u64,
    /// Entries that the other side has answered for.
    pub(super) acked: u64,
    /// Of those between the two: whether a completion is wanted.
    pub(super) in_flight: VecDeque<bool>,
    pub(super) resend_at: Option<Instant>,
    pub(super) attempts: u32,
    pub(super) rnr_attempts: u32,
    /// Nothing is executed before.
    pub(super) not_before: Option<Instant>,
    pub(super) torn_reads: u32,
    /// What strikes the entry at `furthest`, once known.
    pub(super) fate: Option<Fate>,

    /// The sequence number that is taken next.
    pub(super) expected: u32,
    /// Receives that have been used up.
    pub(super) received: u64,
    /// Receives below were posted before it went to error.
    pub(super) before_error: u64,
    /// Receives below are to be flushed.
    pub(super) flush_to: u64,
    pub(super) landing: VecDeque<Landing>,

    produced: u64,
    is_ring_lost: bool,
    late: VecDeque<(Instant, Completion)>,
}

impl Pair {
    pub(super) fn new(
        whom: Whom,
        (client, domain): (u32, u32),
        sequence: u32,
        (memory, places, ignore_overruns): (Words, Places, bool),
    ) -> Self {
        Self {
            number: whom.number,
            client,
            pid: whom.pid,
            domain,
            sequence,
            memory,
            places,
            ignore_overruns,
            state: State::Unconnected,
            peer: 0,
            peer_slot: 0,
            heard: 0,
            kicked: None,
            is_mismatch_counted: false,
            last_record: 0,
            posted: 0,
            executed: 0,
            furthest: 0,
            acked: 0,
            in_flight: VecDeque::new(),
            resend_at: None,
            attempts: 0,
            rnr_attempts: 0,
            not_before: None,
            torn_reads: 0,
            fate: None,
            expected: 0,
            received: 0,
            before_error: 0,
            flush_to: 0,
            landing: VecDeque::new(),
            produced: 0,
            is_ring_lost: false,
            late: VecDeque::new(),
        }
    }
    pub(super) fn connect(&mut self, peer: u32, peer_slot: usize, sequence: u32) {
        self.peer = peer;
        self.peer_slot = peer_slot;
        self.expected = sequence;
        self.state = State::Ready;
    }
    #[inline]
    pub(super) fn whom(&self) -> Whom {
        Whom { number: self.number, pid: self.pid }
    }
    /// The sequence number of an entry.
    #[inline]
    pub(super) fn sequence_of(&self, index: u64) -> u32 {
        self.sequence.wrapping_add(index as u32) & MASK_24
    }
    /// The entry in flight that has this sequence number, counted from the oldest.
    #[inline]
    pub(super) fn position(&self, sequence: u32) -> Option<usize> {
        let at = (sequence.wrapping_sub(self.sequence_of(self.acked)) & MASK_24) as usize;
        (at < self.in_flight.len()).then_some(at)
    }

    #[inline]
    pub(super) fn doorbell(&self) -> u64 {
        // The place was checked.
        let word = self.memory.words().get(self.places.doorbell_at);
        word.map_or(0, |word| word.load(Ordering::Acquire))
    }
    /// One half of the doorbell record.
    #[inline]
    pub(super) fn record(&self, sends: bool) -> u16 {
        let half = self.memory.half(self.places.record_at, sends);
        record_index(half.map_or(0, |half| half.load(Ordering::Acquire)))
    }
    /// Receives posted and not used; `None` if the record cannot be meant.
    pub(super) fn receives_left(&self) -> Option<u64> {
        let left = self.record(false).wrapping_sub(self.received as u16).into();
        (left <= u64::from(self.places.receives)).then_some(left)
    }
    /// Reads an entry; it may be changed by its poster meanwhile.
    #[inline]
    pub(super) fn entry(&self, index: u64) -> Entry {
        let nth = index as usize & (self.places.sends as usize - 1);
        let at = self.places.sends_at + nth * ENTRY_WORDS;
        let words = self.memory.words().get(at..at + ENTRY_WORDS).unwrap_or_default();
        std::array::from_fn(|i| words.get(i).map_or(0, |word| word.load(Ordering::Relaxed)))
    }

    /// Stores a completion, its last word last.
    pub(super) fn store(&mut self, completion: &Completion) -> Stored {
        let ring = u64::from(self.places.completions);
        if !self.is_ring_lost && !self.ignore_overruns {
            let half = self.memory.half(self.places.consumed_at, false);
            let consumed = consumed_count(half.map_or(0, |half| half.load(Ordering::Acquire)));
            let unread = (self.produced as u32).wrapping_sub(consumed) & MASK_24;
            if u64::from(unread) >= ring {
                self.is_ring_lost = true;
                return Stored::Overrun { first: true };
            }
        }
        if self.is_ring_lost {
            return Stored::Overrun { first: false };
        }
        let nth = (self.produced & (ring - 1)) as usize;
        let at = self.places.completions_at + nth * ENTRY_WORDS;
        let words = completion::encode(completion, self.produced & ring != 0);
        let slot = self.memory.words().get(at..at + ENTRY_WORDS).unwrap_or_default();
        let last = ENTRY_WORDS - 1;
        for (to, word) in slot.iter().zip(words).take(last) {
            to.store(word, Ordering::Relaxed);
        }
        if let Some(to) = slot.get(last) {
            to.store(words[last], Ordering::Release);
        }
        self.produced += 1;
        // Between the completion and the look at the wish: see `CompletionQueue::arm`.
        fence(Ordering::SeqCst);
        let wish = self.memory.half(self.places.consumed_at, true);
        let armed = wish.is_some_and(|wish| {
            wish.load(Ordering::Relaxed) != 0 && wish.swap(0, Ordering::AcqRel) != 0
        });
        Stored::Done { armed }
    }
    pub(super) fn delay(&mut self, completion: Completion, until: Instant) {
        let until = self.late.back().map_or(until, |&(last, _)| until.max(last));
        self.late.push_back((until, completion));
    }
    pub(super) fn is_late(&self) -> bool {
        !self.late.is_empty()
    }
    pub(super) fn due(&mut self, now: Instant) -> Option<Completion> {
        let &(until, completion) = self.late.front()?;
        if until > now {
            return None;
        }
        self.late.pop_front();
        Some(completion)
    }

    /// What lands next, if it is not held.
    pub(super) fn next_landing(&mut self) -> Option<Landing> {
        match self.landing.front()? {
            Landing::Write { taken, .. } if taken.hold.is_some() => None,
            _ => self.landing.pop_front(),
        }
    }
    pub(super) fn to_land(&self) -> u64 {
        self.landing.iter().filter(|one| matches!(one, Landing::Write { .. })).count() as u64
    }
    pub(super) fn bytes_to_land(&self) -> u64 {
        self.landing
            .iter()
            .map(|one| match one {
                Landing::Write { payload, .. } => payload.len() as u64,
                Landing::Refusal { .. } => 0,
            })
            .sum()
    }
    /// A fault lets go.
    pub(super) fn release(&mut self, fault: u64) {
        for one in &mut self.landing {
            if let Landing::Write { taken, .. } = one {
                taken.hold = taken.hold.filter(|&by| by != fault);
            }
        }
    }
    pub(super) fn next_timer(&self) -> Option<Instant> {
        let late = self.late.front().map(|&(until, _)| until);
        let not_before = self.not_before.filter(|_| self.executed < self.posted);
        [self.resend_at, not_before, late].into_iter().flatten().min()
    }
    pub(super) fn stats(&self) -> PairStats {
        PairStats {
            number: self.number,
            pid: self.pid,
            state: self.state.name().into(),
            peer: self.peer,
            executed: self.furthest,
            in_flight: self.in_flight.len() as u64,
            to_land: self.to_land(),
        }
    }
}
