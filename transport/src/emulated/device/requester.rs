//! What a queue pair does with what is posted to it.
//!
//! In: doorbells, records, entries. Out: packets, to the wire or, where nothing delays them, straight
//! to the receiver; completions. Reliable in the usual way: what is not answered for in time is sent
//! again from there on, and fails after so many times.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::faults::{Fate, What};
use super::super::trace::Event;
use super::pair::{Header, Landing, Pair, State};
use super::responder::Verdict;
use super::{Device, MASK_24};
use crate::mlx5::completion;
use crate::mlx5::entry::{self, Data, Malformed, Operation, Segment};
use crate::mlx5::{Fault, Syndrome};
use crate::sys::share::Import;

/// Entries of one queue pair in one turn.
const BATCH: usize = 64;
/// Bytes of one queue pair in one turn, beyond which no entry is begun.
const BATCH_BYTES: u64 = 4 << 20;
/// Reads of an entry whose index is wrong before it counts as never written.
const TORN_READS_MAX: u32 = 100;
/// Between two of them.
const TORN_PAUSE: Duration = Duration::from_micros(20);
/// Before the next look at a wire that was full.
const WIRE_PAUSE: Duration = Duration::from_micros(50);
/// How long a doorbell and the record may say different things.
const MISMATCH_AFTER: Duration = Duration::from_millis(10);

/// Codes of the vendor, as seen on hardware; 0 where none is known.
pub(super) mod vendor {
    pub(crate) const NONE: u8 = 0;
    pub(crate) const LOCAL_KEY: u8 = 0x51;
    pub(crate) const LOCAL_BOUNDS: u8 = 0x52;
    pub(crate) const RETRIES: u8 = 0x81;
    pub(crate) const REMOTE_ACCESS: u8 = 0x88;
    pub(crate) const FLUSHED: u8 = 0xf9;
}

pub(super) const FLUSHED: Fault = Fault { syndrome: Syndrome::FLUSHED, vendor: vendor::FLUSHED };

/// Packets of one queue pair on the wire.
#[derive(Debug, Default)]
pub(super) struct Flow {
    packets: VecDeque<Packet>,
}

#[derive(Debug)]
struct Packet {
    header: Header,
    payload: Vec<u8>,
    due: Instant,
    hold: Option<u64>,
}

impl Flow {
    /// The next packet, if it is due.
    fn next(&mut self, now: Instant) -> Option<Packet> {
        let packet = self.packets.front()?;
        if packet.hold.is_some() || packet.due > now {
            return None;
        }
        self.packets.pop_front()
    }
    /// A fault lets go.
    pub(super) fn release(&mut self, fault: u64) {
        for packet in &mut self.packets {
            packet.hold = packet.hold.filter(|&by| by != fault);
        }
    }
    pub(super) fn next_timer(&self) -> Option<Instant> {
        self.packets.front().filter(|packet| packet.hold.is_none()).map(|packet| packet.due)
    }
}

/// Where the bytes of an entry are.
enum Source {
    Memory(Arc<Import>, u64, u32),
    Entry([u8; 28], u8),
}

/// Where all bytes of an entry are, in their order.
type Sources = [Option<Source>; 2];

/// How one entry went on.
enum Step {
    /// It, and so many bytes, are under way.
    Done(u64),
    /// Not now.
    Wait,
}

impl Device {
    /// Listens to the doorbell, and reads the record as long as the two differ.
    pub(super) fn hear(&mut self, slot: usize, now: Instant) -> bool {
        let Some(pair) = self.pairs.get_mut(slot).and_then(Option::as_deref_mut) else {
            return false;
        };
        let value = pair.doorbell();
        let is_new = value != pair.heard;
        if is_new {
            pair.heard = value;
            self.stats.doorbells += 1;
            if entry::doorbell(value).queue_pair != pair.number {
                self.stats.doorbell_mismatch += 1;
                pair.kicked = None;
                return false;
            }
            let record = pair.record(true);
            let before = std::mem::replace(&mut pair.last_record, record);
            (pair.kicked, pair.is_mismatch_counted) = (Some(now), false);
            if !self.faults.is_empty() {
                let whom = pair.whom();
                let dropped = self.faults.hit(whom, |w| (w == What::DropKick).then_some(()));
                if let Some((fault, ())) = dropped {
                    pair.kicked = None;
                    let event = Event::Struck { fault, what: "a doorbell is not heard" };
                    self.trace.push(now, whom.number, event);
                    return false;
                }
                let stale = self.faults.hit(whom, |w| (w == What::StaleRecord).then_some(()));
                if let Some((fault, ())) = stale {
                    pair.kicked = None;
                    let event =
                        Event::Struck { fault, what: "the record is that of an earlier kick" };
                    self.trace.push(now, whom.number, event);
                    return self.show(slot, before, now);
                }
            }
        }
        let Some(kicked) = pair.kicked else { return false };
        // The record counts. One that is behind the doorbell is that of a poster who rings twice: it
        // is looked at until it has come. One that is ahead is a kick to come.
        let record = pair.record(true);
        let behind = entry::doorbell(pair.heard).next.wrapping_sub(record) as i16;
        if behind == 0 {
            pair.kicked = None;
        } else if now.saturating_duration_since(kicked) > MISMATCH_AFTER {
            self.stats.doorbell_mismatch += u64::from(!pair.is_mismatch_counted);
            pair.is_mismatch_counted = true;
            if behind < 0 {
                pair.kicked = None;
                return false;
            }
        }
        if behind < 0 && !is_new {
            return false;
        }
        self.show(slot, record, now)
    }

    /// Entries up to this record are posted.
    fn show(&mut self, slot: usize, record: u16, now: Instant) -> bool {
        let Some(pair) = self.pair(slot) else { return false };
        let ahead = record.wrapping_sub(pair.posted as u16) as i16;
        let Ok(ahead) = u64::try_from(ahead) else { return false };
        if ahead == 0 {
            return false;
        }
        if pair.posted + ahead - pair.acked > u64::from(pair.places.sends) {
            pair.kicked = None;
            self.stats.record_mismatch += 1;
            self.enter_error(slot, "its record is beyond its ring", now);
            return true;
        }
        pair.posted += ahead;
        true
    }

    /// Executes what is posted, as much as fits a turn.
    pub(super) fn send(&mut self, slot: usize, now: Instant) -> bool {
        let Some(pair) = self.pair(slot) else { return false };
        match pair.state {
            State::Unconnected => return false,
            State::Error => return self.flush_sends(slot, now),
            State::Ready => {}
        }
        if pair.resend_at.is_some_and(|at| at <= now) {
            self.resend(slot, now);
        }
        let (mut busy, mut bytes) = (false, 0);
        for _ in 0..BATCH {
            match self.step(slot, now) {
                Step::Wait => break,
                Step::Done(n) => {
                    busy = true;
                    bytes += n;
                    if bytes >= BATCH_BYTES {
                        break;
                    }
                }
            }
        }
        busy
    }

    /// Nobody answered in time: goes back to the oldest entry that waits.
    fn resend(&mut self, slot: usize, now: Instant) {
        let retries = self.config.retries;
        let Some(pair) = self.pair(slot) else { return };
        pair.resend_at = None;
        if pair.in_flight.is_empty() && pair.attempts == 0 {
            return;
        }
        if pair.attempts >= retries {
            let syndrome = Syndrome::TRANSPORT_RETRIES;
            let fault = Fault { syndrome, vendor: vendor::RETRIES };
            self.fail(slot, fault, "the other side does not answer", now);
            return;
        }
        pair.attempts += 1;
        let (number, from, attempt) = (pair.number, pair.acked as u16, pair.attempts);
        let again = pair.in_flight.len() as u64;
        pair.executed = pair.acked;
        pair.in_flight.clear();
        self.stats.resent += again;
        self.trace.push(now, number, Event::Resent { from, attempt });
    }

    /// The next entry.
    fn step(&mut self, slot: usize, now: Instant) -> Step {
        let Some(pair) = self.pairs.get_mut(slot).and_then(Option::as_deref_mut) else {
            return Step::Wait;
        };
        if pair.state != State::Ready
            || pair.executed >= pair.posted
            || pair.not_before.is_some_and(|at| at > now)
        {
            return Step::Wait;
        }
        pair.not_before = None;
        let (index, whom) = (pair.executed, pair.whom());
        let is_first = index >= pair.furthest;
        let fate = match pair.fate {
            _ if !is_first || self.faults.is_empty() => Fate::default(),
            Some(fate) => fate,
            None => *pair.fate.insert(self.faults.fate(whom)),
        };
        if fate.kill {
            self.killed = true;
            return Step::Wait;
        }
        let mut words = pair.entry(index);
        if pair.torn_reads < fate.torn_reads {
            words[0] = !words[0];
        }
        let decoded = match entry::decode(&words, index as u16, whom.number) {
            Ok(decoded) => decoded,
            Err(Malformed::Torn { found, .. }) if pair.torn_reads < TORN_READS_MAX => {
                pair.torn_reads += 1;
                pair.not_before = Some(now + TORN_PAUSE);
                if pair.torn_reads == 1 {
                    self.stats.torn_entries += 1;
                    let event = Event::Torn { index: index as u16, found };
                    self.trace.push(now, whom.number, event);
                }
                return Step::Wait;
            }
            Err(Malformed::Length { .. }) => {
                return self.fail_here(slot, Syndrome::LOCAL_LENGTH, vendor::NONE, now);
            }
            Err(_) => return self.fail_here(slot, Syndrome::LOCAL_QP_OPERATION, vendor::NONE, now),
        };
        if let Some((syndrome, vendor)) = fate.nak {
            return self.fail_here(slot, Syndrome(syndrome), vendor, now);
        }
        let (to, data, immediate) = match decoded.operation {
            Operation::Write { to, data } => (to, data, None),
            Operation::WriteImmediate { to, data, immediate } => (to, data, Some(immediate)),
            Operation::Nop if !pair.in_flight.is_empty() => return Step::Wait,
            Operation::Nop => {
                // It is no packet, so those after it are numbered as if it were not there.
                pair.sequence = pair.sequence.wrapping_sub(1);
                pair.sent(decoded.signalled);
                self.stats.entries += u64::from(is_first);
                self.acknowledge(slot, 0, now);
                return Step::Done(0);
            }
        };
        let (sources, bytes) = match self.sources(slot, data) {
            Ok(found) => found,
            Err((syndrome, vendor)) => return self.fail_here(slot, syndrome, vendor, now),
        };
        let Some(pair) = self.pair(slot) else { return Step::Wait };
        let header = Header {
            from: whom,
            from_slot: slot,
            to: pair.peer,
            to_slot: pair.peer_slot,
            sequence: pair.sequence_of(index),
            address: to.address,
            key: to.key,
            bytes,
            immediate,
        };
        self.transmit(header, fate, is_first, decoded.signalled, &sources, now)
    }

    /// Sends one packet: over the wire, if it is to be late, wrong or behind such a one.
    fn transmit(
        &mut self,
        header: Header,
        fate: Fate,
        is_first: bool,
        signalled: bool,
        sources: &Sources,
        now: Instant,
    ) -> Step {
        let (slot, whom, bytes) = (header.from_slot, header.from, u64::from(header.bytes));
        let late = fate.delay.is_some() || fate.hold.is_some() || fate.corrupt.is_some();
        let by_wire = late || self.flows.contains_key(&whom.number);
        let to = self.find(header.to, header.to_slot);
        let receiver = to.and_then(|to| self.pairs[to].as_deref());
        // Also what lands late is kept meanwhile.
        let is_kept = by_wire || receiver.is_some_and(|pair| !pair.landing.is_empty());
        if is_kept && self.wire_bytes > 0 && self.wire_bytes + bytes > self.config.wire_bytes_max {
            self.stats.wire_full += u64::from(is_first);
            let timeout = now + self.config.ack_timeout;
            if let Some(pair) = self.pair(slot) {
                pair.not_before = Some(now + WIRE_PAUSE);
                if pair.attempts > 0 {
                    // What fills the wire may be its own, held: it fails all the same.
                    pair.resend_at.get_or_insert(timeout);
                }
            }
            return Step::Wait;
        }
        let mut is_cut = false;
        if !self.faults.is_empty() {
            let receiver = receiver.map(Pair::whom);
            if let Some(until) = self.faults.wait_for(whom, bytes, now) {
                if let Some(pair) = self.pair(slot) {
                    pair.not_before = Some(until);
                }
                return Step::Wait;
            }
            is_cut = !by_wire && self.faults.is_cut(whom, receiver, now);
        }
        let timeout = now + self.config.ack_timeout;
        if let Some(pair) = self.pair(slot) {
            pair.peer_slot = to.unwrap_or(0);
            pair.sent(signalled);
            pair.resend_at.get_or_insert(timeout);
        }
        if is_first {
            self.stats.entries += 1;
            let index = header.sequence.wrapping_sub(self.sequence(slot)) as u16;
            let event = Event::Entry { index, bytes: header.bytes, immediate: header.immediate };
            self.trace.push(now, whom.number, event);
        }
        if is_cut {
            self.stats.dropped_link_down += 1;
            self.trace.push(now, header.to, Event::Dropped { from: whom.number, why: "link down" });
        } else if by_wire {
            let mut payload = snapshot(sources, header.bytes);
            let len = payload.len() as u64;
            let wrong = fate.corrupt.and_then(|byte| payload.get_mut((byte % len.max(1)) as usize));
            if let Some(byte) = wrong {
                *byte = !*byte;
            }
            if let Some(by) = fate.hold {
                self.trace.push(now, header.to, Event::Held { from: whom.number, by });
            }
            self.wire_bytes += len;
            let flow = self.flows.entry(whom.number).or_default();
            let due = now + fate.delay.unwrap_or_default();
            let due = flow.packets.back().map_or(due, |last| due.max(last.due));
            flow.packets.push_back(Packet { header, payload, due, hold: fate.hold });
        } else {
            match self.admit(&header, now) {
                Verdict::Taken { slot: to, taken, lands_now: true } => {
                    if let Some((memory, at)) = &taken.place {
                        copy(sources, memory, *at);
                    }
                    self.landed(to, &taken, now);
                }
                Verdict::Taken { slot: to, taken, lands_now: false } => {
                    let payload = snapshot(sources, header.bytes);
                    self.wire_bytes += payload.len() as u64;
                    if let Some(pair) = self.pair(to) {
                        pair.landing.push_back(Landing::Write { taken, payload });
                    }
                }
                other => self.answered(&header, &other, now),
            }
        }
        Step::Done(bytes)
    }
    fn sequence(&self, slot: usize) -> u32 {
        self.pairs.get(slot).and_then(Option::as_deref).map_or(0, |pair| pair.sequence)
    }

    /// Packets that are due arrive.
    pub(super) fn poll_wire(&mut self, now: Instant) -> bool {
        if self.flows.is_empty() {
            return false;
        }
        let mut busy = false;
        let senders: Vec<u32> = self.flows.keys().copied().collect();
        for sender in senders {
            while let Some(packet) = self.flows.get_mut(&sender).and_then(|flow| flow.next(now)) {
                busy = true;
                self.arrive(packet, now);
            }
            if self.flows.get(&sender).is_some_and(|flow| flow.packets.is_empty()) {
                self.flows.remove(&sender);
            }
        }
        busy
    }
    fn arrive(&mut self, packet: Packet, now: Instant) {
        let Packet { header, payload, .. } = packet;
        self.wire_bytes -= payload.len() as u64;
        let to = self.find(header.to, header.to_slot);
        let receiver = to.and_then(|to| self.pairs[to].as_deref()).map(Pair::whom);
        if !self.faults.is_empty() && self.faults.is_cut(header.from, receiver, now) {
            self.stats.dropped_link_down += 1;
            let from = header.from.number;
            self.trace.push(now, header.to, Event::Dropped { from, why: "link down" });
            return;
        }
        match self.admit(&header, now) {
            Verdict::Taken { slot, taken, .. } => {
                self.wire_bytes += payload.len() as u64;
                if let Some(pair) = self.pair(slot) {
                    pair.landing.push_back(Landing::Write { taken, payload });
                }
                self.land(slot, now);
            }
            other => self.answered(&header, &other, now),
        }
    }
    /// The receiver did not take a packet.
    fn answered(&mut self, header: &Header, verdict: &Verdict, now: Instant) {
        match verdict {
            Verdict::Taken { .. } | Verdict::Lost => {}
            Verdict::Duplicate { last } => self.acknowledged(header, *last, now),
            Verdict::NoReceive => self.no_receive(header, now),
            Verdict::Refused => self.refused(header, now),
        }
    }

    /// Everything up to a sequence number has landed.
    pub(super) fn acknowledged(&mut self, header: &Header, sequence: u32, now: Instant) {
        let Some(slot) = self.sender(header) else { return };
        let at = self.pair(slot).and_then(|pair| pair.position(sequence));
        if let Some(at) = at {
            self.acknowledge(slot, at, now);
        }
    }
    /// The receiver refused a packet; what was before it has landed.
    pub(super) fn refused(&mut self, header: &Header, now: Instant) {
        let Some(slot) = self.sender(header) else { return };
        let Some(at) = self.pair(slot).and_then(|pair| pair.position(header.sequence)) else {
            return;
        };
        if let Some(before) = at.checked_sub(1) {
            self.acknowledge(slot, before, now);
        }
        let syndrome = Syndrome::REMOTE_ACCESS;
        let fault = Fault { syndrome, vendor: vendor::REMOTE_ACCESS };
        self.fail(slot, fault, "the other side refused a write", now);
    }
    /// The receiver had no receive for a packet: sends again from there on, a little later.
    fn no_receive(&mut self, header: &Header, now: Instant) {
        let (delay, retries) = (self.config.rnr_delay, self.config.rnr_retries);
        let Some(slot) = self.sender(header) else { return };
        let Some(pair) = self.pair(slot) else { return };
        let Some(at) = pair.position(header.sequence) else { return };
        if at == 0 {
            if pair.rnr_attempts >= retries {
                let fault = Fault { syndrome: Syndrome::RNR_RETRIES, vendor: vendor::NONE };
                self.fail(slot, fault, "the other side has no receive", now);
                return;
            }
            pair.rnr_attempts += 1;
            pair.resend_at = None;
        }
        pair.executed = pair.acked + at as u64;
        let again = pair.in_flight.len() - at;
        pair.in_flight.truncate(at);
        pair.not_before = Some(now + delay);
        let (number, from, attempt) = (pair.number, pair.executed as u16, pair.rnr_attempts);
        self.stats.resent += again as u64;
        self.trace.push(now, number, Event::Resent { from, attempt });
    }
    /// The sender of a packet, if it is there and still waits for answers.
    fn sender(&mut self, header: &Header) -> Option<usize> {
        let slot = self.find(header.from.number, header.from_slot)?;
        self.pair(slot).filter(|pair| pair.state == State::Ready)?;
        Some(slot)
    }

    /// Entries up to the `at`th in flight are done.
    fn acknowledge(&mut self, slot: usize, at: usize, now: Instant) {
        let timeout = now + self.config.ack_timeout;
        for _ in 0..=at {
            let Some(pair) = self.pair(slot) else { return };
            let Some(signalled) = pair.in_flight.pop_front() else { return };
            let index = pair.acked;
            pair.acked += 1;
            (pair.attempts, pair.rnr_attempts) = (0, 0);
            pair.resend_at = (!pair.in_flight.is_empty()).then_some(timeout);
            if signalled {
                self.complete(slot, index, completion::What::Sent, now);
            }
        }
    }

    /// The entry that is next fails by itself; what was before it is waited for.
    fn fail_here(&mut self, slot: usize, syndrome: Syndrome, vendor: u8, now: Instant) -> Step {
        let Some(pair) = self.pair(slot) else { return Step::Wait };
        if !pair.in_flight.is_empty() {
            return Step::Wait;
        }
        self.fail(slot, Fault { syndrome, vendor }, syndrome.name(), now);
        Step::Done(0)
    }
    /// The oldest entry that waits fails, and with it the queue pair.
    fn fail(&mut self, slot: usize, fault: Fault, why: &'static str, now: Instant) {
        let Some(pair) = self.pair(slot) else { return };
        let (number, index) = (pair.number, pair.acked);
        pair.in_flight.clear();
        pair.acked += 1;
        pair.executed = pair.acked;
        let (syndrome, vendor) = (fault.syndrome.0, fault.vendor);
        self.trace.push(now, number, Event::Failed { index: index as u16, syndrome, vendor });
        self.complete(slot, index, completion::What::SendFailed(fault), now);
        self.enter_error(slot, why, now);
    }
    /// All that is posted and not done is flushed.
    pub(super) fn flush_sends(&mut self, slot: usize, now: Instant) -> bool {
        let mut busy = false;
        loop {
            let Some(pair) = self.pair(slot) else { return busy };
            pair.in_flight.clear();
            (pair.resend_at, pair.not_before) = (None, None);
            pair.executed = pair.acked;
            if pair.acked >= pair.posted {
                return busy;
            }
            let index = pair.acked;
            pair.acked += 1;
            busy = true;
            self.complete(slot, index, completion::What::SendFailed(FLUSHED), now);
        }
    }

    /// Where the bytes of an entry are, and how many; or why it may not read there.
    fn sources(&self, slot: usize, data: Data) -> Result<(Sources, u32), (Syndrome, u8)> {
        let domain = self.pairs.get(slot).and_then(Option::as_deref).map(|pair| pair.domain);
        let one = |segment: Segment| {
            let key = self.keys.get(segment.key).filter(|key| Some(key.domain) == domain);
            let key = key.ok_or((Syndrome::LOCAL_PROTECTION, vendor::LOCAL_KEY))?;
            let (memory, at) = key
                .at(segment.address, segment.bytes)
                .ok_or((Syndrome::LOCAL_PROTECTION, vendor::LOCAL_BOUNDS))?;
            Ok(Some(Source::Memory(memory.clone(), at, segment.bytes)))
        };
        let all = match data {
            Data::One(a) => a.bytes,
            Data::Two(a, b) => a.bytes.saturating_add(b.bytes),
            Data::Inline { len, .. } => len.into(),
        };
        if all > self.config.write_bytes_max {
            return Err((Syndrome::LOCAL_LENGTH, vendor::NONE));
        }
        let sources = match data {
            Data::One(a) => [one(a)?, None],
            Data::Two(a, b) => [one(a)?, one(b)?],
            Data::Inline { len, bytes } => [Some(Source::Entry(bytes, len)), None],
        };
        Ok((sources, all))
    }
}

impl Pair {
    /// The next entry is on its way.
    fn sent(&mut self, signalled: bool) {
        self.in_flight.push_back(signalled);
        self.executed += 1;
        if self.executed > self.furthest {
            self.furthest = self.executed;
            self.fate = None;
            self.torn_reads = 0;
        }
    }
}

/// Straight from where the bytes are to where they belong. Both places have been checked.
fn copy(sources: &Sources, to: &Import, mut at: u64) {
    for source in sources.iter().flatten() {
        match source {
            Source::Memory(from, offset, bytes) => {
                let _ = to.copy_from(at, from, *offset, u64::from(*bytes));
                at += u64::from(*bytes);
            }
            Source::Entry(bytes, len) => {
                let bytes = bytes.get(..usize::from(*len)).unwrap_or_default();
                let _ = to.write_at(at, bytes);
            }
        }
    }
}

/// The bytes as they are now.
fn snapshot(sources: &Sources, bytes: u32) -> Vec<u8> {
    let mut payload = vec![0; bytes as usize];
    let mut rest = payload.as_mut_slice();
    for source in sources.iter().flatten() {
        match source {
            Source::Memory(from, offset, bytes) => {
                let Some((into, tail)) = rest.split_at_mut_checked(*bytes as usize) else { break };
                let _ = from.read_at(*offset, into);
                rest = tail;
            }
            Source::Entry(bytes, len) => {
                for (to, from) in rest.iter_mut().zip(bytes).take(usize::from(*len)) {
                    *to = *from;
                }
            }
        }
    }
    payload
}

/// Whether a packet sequence number was before the one that is expected.
pub(super) fn is_before(sequence: u32, expected: u32) -> bool {
    sequence.wrapping_sub(expected) & MASK_24 > MASK_24 / 2
}
