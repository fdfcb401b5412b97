//! What a queue pair does with packets that come to it.
//!
//! In: packets. Out: a verdict ([`Device::admit`]), bytes in registered memory, completions of
//! receives, answers to the sender. Errors and flushes of receives are here, because fences rest on
//! them: see the invariants in [`super`].

use std::time::Instant;

use super::super::faults::What;
use super::super::trace::Event;
use super::pair::{Header, Landing, State, Taken};
use super::requester::{FLUSHED, is_before};
use super::{Device, MASK_24};
use crate::mlx5::completion;
use crate::sys::copy::settle;

/// What the receiver says to a packet.
pub(super) enum Verdict {
    /// It will land; at once, if nothing is before it or holds it.
    Taken { slot: usize, taken: Taken, lands_now: bool },
    /// It came before; everything up to here has landed.
    Duplicate { last: u32 },
    /// Nobody says anything.
    Lost,
    /// There is no receive for its immediate.
    NoReceive,
    /// It may not write there.
    Refused,
}

impl Device {
    /// Checks a packet and takes it, or not.
    pub(super) fn admit(&mut self, header: &Header, now: Instant) -> Verdict {
        let from = header.from.number;
        let slot = self.find(header.to, header.to_slot);
        let found = slot.and_then(|slot| self.pairs[slot].as_deref_mut().map(|pair| (slot, pair)));
        let Some((slot, pair)) =
            found.filter(|(_, pair)| pair.peer == from || pair.state == State::Unconnected)
        else {
            self.stats.dropped_no_pair += 1;
            self.trace.push(now, header.to, Event::Dropped { from, why: "no such queue pair" });
            return Verdict::Lost;
        };
        if pair.state != State::Ready {
            let why = pair.state.name();
            self.stats.dropped_not_ready += 1;
            self.trace.push(now, header.to, Event::Dropped { from, why });
            return Verdict::Lost;
        }
        if header.sequence != pair.expected {
            if is_before(header.sequence, pair.expected) {
                self.stats.duplicates += 1;
                let last = pair.expected.wrapping_sub(1) & MASK_24;
                let has_landed = pair.landing.is_empty();
                return if has_landed { Verdict::Duplicate { last } } else { Verdict::Lost };
            }
            self.stats.dropped_sequence += 1;
            self.trace.push(now, header.to, Event::Dropped { from, why: "out of sequence" });
            return Verdict::Lost;
        }
        let mut place = None;
        if header.bytes > 0 {
            let domain = pair.domain;
            let key = self.keys.get(header.key).filter(|key| key.domain == domain);
            let found = match key {
                None => Err("no such key in its domain"),
                Some(key) if !key.may_be_written() => Err("the key does not allow writes"),
                Some(key) => key.at(header.address, header.bytes).ok_or("outside of the memory"),
            };
            match found {
                Ok((memory, at)) => place = Some((memory.clone(), at)),
                Err(why) => {
                    self.trace.push(now, header.to, Event::Refused { from, why });
                    return self.refuse(slot, header, now);
                }
            }
        }
        let mut receives = [None; 2];
        let whom = pair.whom();
        if header.immediate.is_some() {
            let Some(left) = pair.receives_left() else {
                self.stats.record_mismatch += 1;
                self.stats.rnr += 1;
                return Verdict::NoReceive;
            };
            if left == 0 {
                self.stats.rnr += 1;
                return Verdict::NoReceive;
            }
            let twice = !self.faults.is_empty()
                && left > 1
                && self
                    .faults
                    .hit(whom, |w| (w == What::DuplicateImmediate).then_some(()))
                    .is_some();
            for receive in receives.iter_mut().take(1 + usize::from(twice)) {
                *receive = Some(pair.received);
                pair.received += 1;
            }
        }
        let mut hold = None;
        if !self.faults.is_empty() {
            let held = self.faults.hit(whom, |w| (w == What::HoldLanding).then_some(()));
            hold = held.map(|(fault, ())| fault);
            if let Some(by) = hold {
                self.trace.push(now, header.to, Event::Held { from, by });
            }
        }
        pair.expected = pair.expected.wrapping_add(1) & MASK_24;
        let lands_now = hold.is_none() && pair.landing.is_empty();
        let taken = Taken { header: *header, place, receives, hold };
        Verdict::Taken { slot, taken, lands_now }
    }

    /// A refused packet takes the queue pair to error; the sender hears of it behind what has been
    /// taken before.
    fn refuse(&mut self, slot: usize, header: &Header, now: Instant) -> Verdict {
        self.enter_error(slot, "it refused a write", now);
        let Some(pair) = self.pair(slot) else { return Verdict::Lost };
        if pair.landing.is_empty() {
            return Verdict::Refused;
        }
        pair.landing.push_back(Landing::Refusal { header: *header });
        Verdict::Lost
    }

    /// What has been taken lands, up to the first that is held.
    pub(super) fn land(&mut self, slot: usize, now: Instant) -> bool {
        let mut busy = false;
        loop {
            let next = self.pair(slot).and_then(|pair| pair.next_landing());
            busy |= next.is_some();
            match next {
                None => return busy,
                Some(Landing::Refusal { header }) => self.refused(&header, now),
                Some(Landing::Write { taken, payload }) => {
                    self.wire_bytes -= payload.len() as u64;
                    if let Some((memory, at)) = &taken.place {
                        let _ = memory.write_at(*at, &payload);
                    }
                    self.landed(slot, &taken, now);
                }
            }
        }
    }

    /// The bytes are in place: tells both sides.
    pub(super) fn landed(&mut self, slot: usize, taken: &Taken, now: Instant) {
        settle();
        let header = &taken.header;
        let (from, bytes) = (header.from.number, header.bytes);
        self.stats.writes += 1;
        self.stats.bytes += u64::from(bytes);
        let Some(pair) = self.pair(slot) else { return };
        let (number, in_error) = (pair.number, pair.state == State::Error);
        let late = |device: &mut Self, why| {
            device.trace.push(now, number, Event::LandedLate { from, bytes, why });
        };
        if in_error {
            self.stats.landed_after_error += 1;
            late(self, "this queue pair is in error");
        }
        if self.find(from, header.from_slot).is_none() {
            self.stats.landed_after_sender += 1;
            late(self, "its sender is gone");
        }
        if bytes > 0 && self.keys.get(header.key).is_none() {
            self.stats.landed_after_key += 1;
            late(self, "its key was taken back");
        }
        if let Some(immediate) = header.immediate {
            self.stats.immediates += 1;
            self.trace.push(now, number, Event::Arrived { immediate });
            for receive in taken.receives.iter().flatten() {
                let what = completion::What::Arrived { immediate, bytes };
                self.complete(slot, *receive, what, now);
            }
        }
        if in_error {
            // It says nothing any more: its sender asks in vain.
            self.flush_receives(slot, now);
        } else {
            self.acknowledged(header, header.sequence, now);
        }
    }

    /// Its client takes a queue pair to error, once more perhaps.
    pub(super) fn error(&mut self, slot: usize, now: Instant) {
        let Some(pair) = self.pair(slot) else { return };
        if pair.state != State::Error {
            self.enter_error(slot, "its client says so", now);
            return;
        }
        pair.flush_to = pair.received + pair.receives_left().unwrap_or(0);
        self.flush_receives(slot, now);
    }
    /// From here on a queue pair takes nothing, and what is posted is flushed.
    pub(super) fn enter_error(&mut self, slot: usize, why: &'static str, now: Instant) {
        let Some(pair) = self.pair(slot) else { return };
        if pair.state == State::Error {
            return;
        }
        pair.state = State::Error;
        pair.before_error = pair.received + pair.receives_left().unwrap_or(0);
        pair.flush_to = pair.before_error;
        let number = pair.number;
        self.trace.push(now, number, Event::ToError { why });
        // What was rung just before is flushed as well, at the latest in the next turn.
        self.flush_sends(slot, now);
        self.flush_receives(slot, now);
    }
    /// Flushes receives, in order. One that was posted before the error says nothing about what was
    /// taken, and comes at once unless it would overtake an immediate; one that was posted after it
    /// comes behind everything that was taken.
    fn flush_receives(&mut self, slot: usize, now: Instant) {
        let mut receives = 0;
        while let Some(pair) = self.pair(slot) {
            let is_immediate = |one: &Landing| {
                matches!(
                one, Landing::Write { taken, .. } if taken.header.immediate.is_some())
            };
            let waits = match pair.received < pair.before_error {
                true => pair.landing.iter().any(is_immediate),
                false => !pair.landing.is_empty(),
            };
            if pair.received >= pair.flush_to || waits {
                let number = pair.number;
                if receives > 0 {
                    self.trace.push(now, number, Event::Flushed { receives });
                }
                return;
            }
            let index = pair.received;
            pair.received += 1;
            receives += 1;
            self.complete(slot, index, completion::What::ReceiveFailed(FLUSHED), now);
        }
    }
}
