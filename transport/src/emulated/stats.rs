//! What an emulated NIC counts.
//!
//! In: counts of the device. Out: the same as text, for the control socket, and back. Invariant: a
//! counter only grows.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Serialize;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters since the NIC began.
        #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
            /// Error completions, by syndrome.
            pub syndromes: BTreeMap<u8, u64>,
            /// Faults that are or were installed.
            pub faults: Vec<FaultStats>,
            /// Queue pairs that are there.
            pub pairs: Vec<PairStats>,
            /// Clients that are there.
            pub processes: Vec<ProcessStats>,
        }

        impl Stats {
            fn counters(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }
            fn counter(&mut self, name: &str) -> Option<&mut u64> {
                match name {
                    $(stringify!($name) => Some(&mut self.$name),)*
                    _ => None,
                }
            }
        }
    };
}

counters! {
    /// Entries executed, the first time each.
    entries,
    /// Entries that were sent again after a timeout or for want of a receive.
    resent,
    /// Writes that landed.
    writes,
    /// Of these, those with an immediate.
    immediates,
    /// Bytes that landed.
    bytes,
    /// Doorbells heard.
    doorbells,
    /// Messages that woke the NIC from a nap.
    kicks,
    /// Doorbells that named another queue pair, or whose index never was the record's.
    doorbell_mismatch,
    /// Records that no poster can mean.
    record_mismatch,
    /// Completions stored.
    completions,
    /// Completions for which there was no room: the queue pair went to error.
    overruns,
    /// Events sent for armed completion rings.
    events,
    /// Entries whose index was wrong when they were read first.
    torn_entries,
    /// Packets that found no receive posted.
    rnr,
    /// Packets that did not arrive: the link was down.
    dropped_link_down,
    /// Packets for a queue pair that is not there any more, or has another peer.
    dropped_no_pair,
    /// Packets for a queue pair that does not receive: not connected yet, or in error.
    dropped_not_ready,
    /// Packets out of their sequence.
    dropped_sequence,
    /// Packets that arrived before, as far as the receiver knows.
    duplicates,
    /// Taken packets whose receiver's process died before they landed.
    lost_with_receiver,
    /// Writes that landed though their sender's queue pair was destroyed, or its process dead.
    landed_after_sender,
    /// Writes that landed though their receiver's queue pair was in error.
    landed_after_error,
    /// Writes that landed though their key had been taken back.
    landed_after_key,
    /// Entries that waited because too many bytes were on the wire.
    wire_full,
    /// Clients that came.
    clients,
    /// Messages that were refused.
    refusals,
    /// Clients that were thrown out.
    thrown_out,
}

/// One fault's strikes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FaultStats {
    /// Its number.
    pub id: u64,
    /// How often it struck.
    pub hits: u64,
    /// The fault as text.
    pub fault: String,
}

/// One queue pair.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PairStats {
    /// Its number.
    pub number: u32,
    /// The process that it belongs to.
    pub pid: i32,
    /// `unconnected`, `ready` or `error`.
    pub state: String,
    /// The other end; 0 if there is none.
    pub peer: u32,
    /// Entries executed.
    pub executed: u64,
    /// Entries that wait for the other side.
    pub in_flight: u64,
    /// Packets that it took and that have not landed.
    pub to_land: u64,
}

/// What one client has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ProcessStats {
    /// Its process.
    pub pid: i32,
    /// Protection domains.
    pub domains: u64,
    /// Keys in them.
    pub keys: u64,
    /// Queue pairs.
    pub pairs: u64,
}

impl Stats {
    /// How often the fault struck; 0 if it is not known.
    pub fn hits(&self, fault: u64) -> u64 {
        self.faults.iter().find(|one| one.id == fault).map_or(0, |one| one.hits)
    }
    /// Error completions with this syndrome.
    pub fn syndrome(&self, syndrome: u8) -> u64 {
        self.syndromes.get(&syndrome).copied().unwrap_or(0)
    }
    /// As lines.
    pub(crate) fn to_text(&self) -> String {
        let mut text = String::new();
        for (name, value) in self.counters() {
            let _ = writeln!(text, "{name} {value}");
        }
        for (syndrome, n) in &self.syndromes {
            let _ = writeln!(text, "syndrome {syndrome} {n}");
        }
        for fault in &self.faults {
            let _ = writeln!(text, "fault {} {} {}", fault.id, fault.hits, fault.fault);
        }
        for p in &self.processes {
            let _ = writeln!(text, "process {} {} {} {}", p.pid, p.domains, p.keys, p.pairs);
        }
        for p in &self.pairs {
            let _ = writeln!(
                text,
                "pair {} {} {} {} {} {} {}",
                p.number, p.pid, p.state, p.peer, p.executed, p.in_flight, p.to_land
            );
        }
        text
    }
    /// Reads lines; those that are not known, or were cut, are left out.
    pub(crate) fn from_text(text: &str) -> Self {
        let mut stats = Self::default();
        for line in text.lines() {
            let _ = stats.read(line);
        }
        stats
    }
    fn read(&mut self, line: &str) -> Option<()> {
        let (name, rest) = line.split_once(' ')?;
        match name {
            "syndrome" => {
                let (syndrome, n) = rest.split_once(' ')?;
                self.syndromes.insert(syndrome.parse().ok()?, n.parse().ok()?);
            }
            "fault" => {
                let mut words = rest.splitn(3, ' ');
                self.faults.push(FaultStats {
                    id: words.next()?.parse().ok()?,
                    hits: words.next()?.parse().ok()?,
                    fault: words.next()?.to_owned(),
                });
            }
            "pair" => {
                let mut words = rest.split(' ');
                self.pairs.push(PairStats {
                    number: words.next()?.parse().ok()?,
                    pid: words.next()?.parse().ok()?,
                    state: words.next()?.to_owned(),
                    peer: words.next()?.parse().ok()?,
                    executed: words.next()?.parse().ok()?,
                    in_flight: words.next()?.parse().ok()?,
                    to_land: words.next()?.parse().ok()?,
                });
            }
            "process" => {
                let mut words = rest.split(' ');
                self.processes.push(ProcessStats {
                    pid: words.next()?.parse().ok()?,
                    domains: words.next()?.parse().ok()?,
                    keys: words.next()?.parse().ok()?,
                    pairs: words.next()?.parse().ok()?,
                });
            }
            _ => *self.counter(name)? = rest.parse().ok()?,
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stats_come_back_from_their_text() {
        let mut stats = Stats { entries: 5, thrown_out: 1, ..Stats::default() };
        stats.syndromes.insert(0x13, 2);
        stats.faults.push(FaultStats { id: 1, hits: 7, fault: "delay us=5 skip=0 times=0".into() });
        stats.pairs.push(PairStats {
            number: 300,
            pid: 7,
            state: "ready".into(),
            peer: 301,
            executed: 9,
            in_flight: 1,
            to_land: 2,
        });
        stats.processes.push(ProcessStats { pid: 7, domains: 2, keys: 3, pairs: 1 });
        assert_eq!(Stats::from_text(&stats.to_text()), stats);
        assert_eq!((stats.hits(1), stats.hits(2), stats.syndrome(0x13)), (7, 0, 2));
        assert_eq!(Stats::from_text("entries x\npair 1\nfault\nnonsense 5"), Stats::default());
    }
}
