//! `kvlane demo --chaos`: a cluster whose parts are broken while it serves, and what it keeps.
//!
//! Owns: the faults ([`faults`]) and the look at what every process holds ([`census`]). In: a cluster
//! that has just been started, requests. Out: the replay's counters with a [`Report`]. Invariants:
//! whatever was broken is whole again before the last census; a fault that never struck, a room
//! without an end, a wrong page and anything left behind are each named in [`Report::wrong`].

mod census;
mod faults;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvlane_coordinator::{Coordinator, CoordinatorConfig};
use kvlane_proto::{Identity, Result, Role};
use kvlane_transport::emulated::client::Hca;
use kvlane_transport::quic::Security;
use kvlane_transport::sys::unix::Name;
use serde::Serialize;

use self::census::Census;
use self::faults::Storm;
use crate::cluster::{Cluster, Started};
use crate::commands::Interrupt;
use crate::commands::replay::{self, LoadArgs};
use crate::load::trace::Requests;
use crate::report::Totals;

/// From so many seconds on, every kind of fault has its turn, and rooms are completed in each quarter.
const LONG_ENOUGH: Duration = Duration::from_secs(20);
/// How much longer that may take.
const LONGER: Duration = Duration::from_secs(10);
const QUARTERS: usize = 4;

/// A worker's place: who has it changes.
pub(crate) struct Seat {
    pub(crate) identity: Identity,
    flags: Vec<String>,
    quic: String,
    serving: String,
    /// None while nobody has it.
    pid: Cell<Option<u32>>,
}

impl Seat {
    /// Of a worker that is ready, and how it was started.
    pub(crate) fn new(identity: Identity, flags: Vec<String>, worker: &Started) -> Self {
        let (quic, serving) = (worker.quic().to_string(), worker.serving().to_string());
        Self { identity, flags, quic, serving, pid: Cell::new(Some(worker.pid)) }
    }
    fn name(&self) -> String {
        let Identity { instance, rank, .. } = &self.identity;
        format!("{instance}/{rank}")
    }
    /// What starts it again at the same ports.
    fn flags(&self) -> Vec<&str> {
        let ports = ["--listen", &self.quic, "--serving", &self.serving];
        self.flags.iter().map(String::as_str).chain(ports).collect()
    }
}

/// The processes of a demo.
pub(crate) struct Fleet {
    /// Where the bootstrap service is.
    pub(crate) service: String,
    /// Its process.
    pub(crate) service_pid: Cell<u32>,
    pub(crate) seats: Vec<Seat>,
    /// Sockets of the emulated NICs, and their processes.
    pub(crate) nics: Vec<(String, u32)>,
}

impl Fleet {
    fn of(&self, role: Role) -> Vec<&Seat> {
        self.seats.iter().filter(|seat| seat.identity.role == role).collect()
    }
    /// How many workers, of either role.
    pub(crate) fn workers(&self) -> (usize, usize) {
        (self.of(Role::Prefill).len(), self.of(Role::Decode).len())
    }
}

fn open_nic(socket: &str) -> Result<Hca> {
    let Ok(name) = socket.parse::<Name>();
    Hca::open(&name)
}

/// What became of a cluster under faults. The names are those of the JSON line.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Report {
    pub(crate) fences: Fences,
    /// Parts that came after their fence and were thrown away; none where the sender writes.
    pub(crate) late_writes_scrapped: Option<u64>,
    /// How often each kind struck.
    pub(crate) faults: BTreeMap<&'static str, u64>,
    /// The most resident memory of its own, without pools, that a process of each kind had, in the
    /// first half and the second.
    pub(crate) resident_kib: BTreeMap<&'static str, [u64; 2]>,
    /// What should not be, in words.
    pub(crate) wrong: Vec<String>,
}

/// Fences of the decodes' grants, as far as those that were killed had told.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Fences {
    /// With the sender's word, or by the receiver's pen.
    pub(crate) quiesce: u64,
    /// Without the sender.
    pub(crate) revoke: u64,
}

impl Report {
    /// For people.
    pub(crate) fn rows(&self, rows: &mut Vec<(&'static str, String)>) {
        let Fences { quiesce, revoke } = self.fences;
        rows.push(("fences", format!("{quiesce} by quiesce, {revoke} by revoke")));
        if let Some(late) = self.late_writes_scrapped {
            rows.push(("late writes thrown away", late.to_string()));
        }
        for (kind, struck) in &self.faults {
            rows.push((kind, struck.to_string()));
        }
    }
    /// Quarantine is left to the last census: before that, blocks may be withheld.
    fn judge(&mut self, totals: &Totals, sent: u64) {
        let wrong = &mut self.wrong;
        let never =
            [("pages are corrupt", totals.pages_corrupt), ("rooms are lost", totals.rooms_lost)];
        wrong.extend(never.iter().filter(|(_, n)| *n > 0).map(|(what, n)| format!("{n} {what}")));
        for code in ["corrupt", "internal"] {
            if let Some(failures) = totals.failures.get(code) {
                wrong.push(format!("{} rooms failed with {code}", failures.count));
            }
        }
        if totals.rooms() != sent {
            wrong.push(format!("{sent} rooms were sent, and {} ended", totals.rooms()));
        }
        if totals.rooms_completed == 0 {
            wrong.push("no room was completed".into());
        }
    }
    /// Whether every fault struck, and rooms went on being completed meanwhile.
    fn judge_all(&mut self, totals: &Totals, begun: Instant, for_so_long: Duration) {
        let idle = self.faults.iter().filter(|(_, struck)| **struck == 0);
        self.wrong.extend(idle.map(|(kind, _)| format!("fault {kind} never struck")));
        let mut completed = [0_u64; QUARTERS];
        for at in &totals.completed_at {
            let after = at.saturating_duration_since(begun).as_secs_f64();
            let quarter = after / for_so_long.as_secs_f64() * QUARTERS as f64;
            completed[(quarter as usize).min(QUARTERS - 1)] += 1;
        }
        let idle = completed.iter().enumerate().filter(|(_, rooms)| **rooms == 0);
        let name = |(n, _)| format!("no room was completed in quarter {} of {QUARTERS}", n + 1);
        self.wrong.extend(idle.map(name));
    }
}

/// Serves and breaks for so long. Gives nothing if it was interrupted before that began.
///
/// # Errors
/// If the cluster does not come to rest before, if a process ends by itself, or one that was killed
/// cannot be started again.
pub(crate) async fn run(
    cluster: &mut Cluster,
    fleet: &Fleet,
    for_so_long: Duration,
    load: LoadArgs,
    requests: Requests,
    interrupt: &mut Interrupt,
) -> Result<Option<replay::Done>> {
    let me = cluster.identity(Role::Router, "chaos", 0)?;
    let security = Security::Mutual { dir: cluster.certs(&me)? };
    let config = CoordinatorConfig::new(&fleet.service, security, me.clone());
    let rest = async {
        let mut census = Census::new(fleet, Coordinator::connect(config).await?, me);
        census.rest().await?;
        Ok::<_, kvlane_proto::Error>(census)
    };
    let census = tokio::select! {
        census = rest => census?,
        () = interrupt.came() => return Ok(None),
    };

    let begun = Instant::now();
    let (until, half) = (begun + for_so_long, begun + for_so_long / 2);
    let router = cluster.identity(Role::Router, "router", 0)?;
    let security = Security::Mutual { dir: cluster.certs(&router)? };
    let is_long = for_so_long >= LONG_ENOUGH;
    let at_last = until + if is_long { LONGER } else { Duration::ZERO };
    let storm = Storm::new(fleet, &census, load.seed(), until, at_last);
    let calm = Arc::new(AtomicBool::new(false));
    let load = load.hostile(calm.clone());
    let serves = async {
        let workers = fleet.workers();
        let service = &fleet.service;
        let done =
            replay::replay(service, security, router, workers, load, requests, interrupt).await;
        storm.is_over.set(true);
        done
    };
    let breaks = async {
        storm.rage(cluster).await?;
        calm.store(true, Ordering::Relaxed);
        Ok(())
    };
    let worked = async { tokio::try_join!(serves, breaks) };
    let (done, ()) = tokio::select! {
        ended = worked => ended?,
        never = census.watch(half) => never,
    };
    let Some(mut done) = done else { return Ok(None) };
    let mut report = Report { faults: storm.faults.take(), ..Report::default() };
    let totals = &mut done.totals;
    *report.faults.entry("leg_hung_up").or_default() += totals.legs_hung_up;
    *report.faults.entry("reservation_never_claimed").or_default() += totals.never_claimed;
    if !totals.interrupted {
        tokio::select! {
            left = census.left_behind() => report.wrong = left,
            () = interrupt.came() => totals.interrupted = true,
        }
    }
    census.report(&mut report, totals);
    report.judge(totals, done.sent);
    if is_long && !totals.interrupted {
        report.judge_all(totals, begun, for_so_long);
    }
    totals.chaos = Some(report);
    Ok(Some(done))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_whose_rooms_stop_or_have_no_end_is_wrong() {
        let (begun, for_so_long) = (Instant::now(), Duration::from_secs(20));
        let at = |s: &[u64]| s.iter().map(|s| begun + Duration::from_secs(*s)).collect();
        let judged = |completed_at, sent| {
            let totals = Totals { rooms_completed: 4, completed_at, ..Totals::default() };
            let mut report = Report::default();
            report.judge(&totals, sent);
            report.judge_all(&totals, begun, for_so_long);
            report.wrong
        };
        // The last ones end when the time is over.
        assert!(judged(at(&[1, 6, 11, 23]), 4).is_empty());
        assert_eq!(
            judged(at(&[1, 2, 11, 14]), 5),
            [
                "5 rooms were sent, and 4 ended",
                "no room was completed in quarter 2 of 4",
                "no room was completed in quarter 4 of 4",
            ]
        );
    }
}
