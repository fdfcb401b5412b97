//! What happened at an emulated NIC, the latest events, to be read by people.
//!
//! Owns: a ring of events. In: an event and its queue pair. Out: one line an event: its number, time
//! since the NIC began, NIC, queue pair, what. Invariant: an event costs a few words until somebody
//! asks for its line.

use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

use crate::mlx5::completion::Syndrome;

/// What happened.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    Created { pid: i32 },
    Connected { peer: u32 },
    Entry { index: u16, bytes: u32, immediate: Option<u32> },
    Resent { from: u16, attempt: u32 },
    Failed { index: u16, syndrome: u8, vendor: u8 },
    ToError { why: &'static str },
    Refused { from: u32, why: &'static str },
    Dropped { from: u32, why: &'static str },
    Held { from: u32, by: u64 },
    LandedLate { from: u32, bytes: u32, why: &'static str },
    Arrived { immediate: u32 },
    Flushed { receives: u64 },
    Struck { fault: u64, what: &'static str },
    Overrun,
    Torn { index: u16, found: u16 },
    DestroyBusy { to_land: u64 },
    Destroyed,
    ClientCame { pid: i32 },
    ClientGone { pid: i32 },
    FaultInstalled { fault: u64 },
    FaultCleared { fault: u64 },
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Created { pid } => write!(f, "created for process {pid}"),
            Self::Connected { peer } => write!(f, "connected to {peer}"),
            Self::Entry { index, bytes, immediate: None } => {
                write!(f, "entry {index}: write of {bytes} bytes")
            }
            Self::Entry { index, bytes, immediate: Some(immediate) } => {
                write!(f, "entry {index}: write of {bytes} bytes with immediate {immediate:#x}")
            }
            Self::Resent { from, attempt } => {
                write!(f, "sends again from entry {from} on, attempt {attempt}")
            }
            Self::Failed { index, syndrome, vendor } => {
                let name = Syndrome(syndrome).name();
                write!(f, "entry {index} failed: {name} ({syndrome:#04x}, vendor {vendor:#04x})")
            }
            Self::ToError { why } => write!(f, "to error: {why}"),
            Self::Refused { from, why } => write!(f, "refused a packet of {from}: {why}"),
            Self::Dropped { from, why } => write!(f, "dropped a packet of {from}: {why}"),
            Self::Held { from, by } => write!(f, "a packet of {from} is held by fault {by}"),
            Self::LandedLate { from, bytes, why } => {
                write!(f, "{bytes} bytes of {from} landed late: {why}")
            }
            Self::Arrived { immediate } => write!(f, "immediate {immediate:#x} arrived"),
            Self::Flushed { receives } => write!(f, "{receives} receives flushed"),
            Self::Struck { fault, what } => write!(f, "fault {fault} struck: {what}"),
            Self::Overrun => write!(f, "completion ring overrun"),
            Self::Torn { index, found } => {
                write!(f, "entry {index} has index {found}: not all of it is here yet")
            }
            Self::DestroyBusy { to_land } => {
                write!(f, "cannot be destroyed yet: {to_land} packets are to land")
            }
            Self::Destroyed => write!(f, "destroyed"),
            Self::ClientCame { pid } => write!(f, "process {pid} came"),
            Self::ClientGone { pid } => write!(f, "process {pid} is gone"),
            Self::FaultInstalled { fault } => write!(f, "fault {fault} installed"),
            Self::FaultCleared { fault } => write!(f, "fault {fault} cleared"),
        }
    }
}

/// The latest events.
#[derive(Debug)]
pub(crate) struct Trace {
    nic: String,
    start: Instant,
    most: usize,
    /// Events that were forgotten.
    before: u64,
    events: VecDeque<(Duration, u32, Event)>,
}

impl Trace {
    pub(crate) fn new(nic: &str, most: usize) -> Self {
        Self { nic: nic.into(), start: Instant::now(), most, before: 0, events: VecDeque::new() }
    }
    /// Something happened; queue pair 0 is none.
    #[inline]
    pub(crate) fn push(&mut self, now: Instant, pair: u32, event: Event) {
        if self.events.len() >= self.most {
            self.events.pop_front();
            self.before += 1;
        }
        self.events.push_back((now.saturating_duration_since(self.start), pair, event));
    }
    /// Lines from event number `from` on, as many as fit, and the number of the next one. The first
    /// says how many of them are forgotten, if some are.
    pub(crate) fn lines(&self, from: u64, bytes_max: usize) -> (String, u64) {
        let (mut text, mut next) = (String::new(), from.max(self.before));
        if next > from {
            text = format!("{} events before this are forgotten\n", next - from);
        }
        let skip = usize::try_from(next - self.before).unwrap_or(usize::MAX);
        for (at, pair, event) in self.events.iter().skip(skip) {
            let at = at.as_secs_f64();
            let line = match pair {
                0 => format!("{next} {at:.6} {} - {event}\n", self.nic),
                pair => format!("{next} {at:.6} {} {pair} {event}\n", self.nic),
            };
            if text.len() + line.len() > bytes_max {
                break;
            }
            text.push_str(&line);
            next += 1;
        }
        (text, next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_events_come_as_lines_in_pieces() {
        let mut trace = Trace::new("emulated0", 3);
        for pid in 1..=5 {
            trace.push(Instant::now(), pid as u32 - 1, Event::ClientCame { pid });
        }
        let (text, next) = trace.lines(0, 1000);
        assert_eq!((text.lines().next(), next), (Some("2 events before this are forgotten"), 5));
        let (text, next) = trace.lines(2, 1000);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!((lines.len(), next), (3, 5));
        assert!(lines[0].starts_with("2 ") && lines[0].ends_with("emulated0 2 process 3 came"));
        let (text, next) = trace.lines(2, lines[0].len() + 1);
        assert_eq!((text.lines().count(), next), (1, 3));
        assert_eq!(trace.lines(5, 1000), (String::new(), 5));
        assert_eq!(trace.lines(u64::MAX, 1000).0, "");
    }
}
