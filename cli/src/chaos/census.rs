//! What every process holds: before, meanwhile, after.
//!
//! In: the answers of the workers' stand-ins, the NICs' counters, `/proc`. Out: what is left behind,
//! sums of counters over every start of a worker. Invariants: nothing is compared before the cluster
//! is at rest with the same links; what a killed worker had counted is kept as of its last answer.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kvlane_coordinator::{Coordinator, PairRequest};
use kvlane_proto::{Error, ErrorKind, Identity, Result, Role};
use kvlane_transport::emulated::stats::ProcessStats;

use super::{Fences, Fleet, Report, Seat, open_nic};
use crate::commands::replay;
use crate::proc;
use crate::report::Totals;
use crate::standin::holds::Holds;
use crate::standin::legs::{self, LegReply, LegRequest};

/// How long a cluster may take to come to rest.
const REST: Duration = Duration::from_secs(30);
/// At rest is what has not changed for so long.
const STILL: Duration = Duration::from_millis(1_500);
const LOOK: Duration = Duration::from_millis(250);
/// How long a worker may take to answer.
const ANSWER: Duration = Duration::from_secs(5);
/// The same, where it looks at every page first.
const AUDIT: Duration = Duration::from_secs(60);
/// Prompts that bring links up.
const TOKENS: u32 = 100;

const QUARANTINED: &str = "blocks in quarantine";

/// What is compared, by process and name.
type Held = BTreeMap<String, u64>;

pub(super) struct Census<'a> {
    fleet: &'a Fleet,
    coordinator: Coordinator,
    router: Identity,
    before: Held,
    /// The last word of every start of a worker, and how many parts it had sent again.
    heard: RefCell<BTreeMap<String, (Holds, u64)>>,
    resident: RefCell<BTreeMap<&'static str, [u64; 2]>>,
    /// Blocks in quarantine at the last look, once there was one.
    quarantined: Cell<Option<u64>>,
}

impl<'a> Census<'a> {
    pub(super) fn new(fleet: &'a Fleet, coordinator: Coordinator, router: Identity) -> Self {
        Self {
            fleet,
            coordinator,
            router,
            before: Held::new(),
            heard: RefCell::default(),
            resident: RefCell::default(),
            quarantined: Cell::default(),
        }
    }

    /// Brings the cluster to rest with every link up, which is what it has to come back to.
    pub(super) async fn rest(&mut self) -> Result<()> {
        self.visit_all().await?;
        let due = Instant::now() + REST;
        let (mut last, mut since) = (self.held().await?, Instant::now());
        loop {
            tokio::time::sleep(LOOK).await;
            let now = self.held().await?;
            if now != last {
                (last, since) = (now, Instant::now());
            } else if since.elapsed() >= STILL && in_use(&last).is_empty() {
                self.before = last;
                return Ok(());
            }
            if Instant::now() >= due {
                return Err(Error::new(ErrorKind::DeadlineExceeded, "the cluster does not rest")
                    .with("in_use", in_use(&last).join(", "))
                    .with("limit_s", REST.as_secs()));
            }
        }
    }
    /// What is there that was not there before, and the other way round, once nothing changes any
    /// more; and whether a free block was written to.
    pub(super) async fn left_behind(&self) -> Vec<String> {
        let wrong = |e: Error| vec![format!("{e}")];
        if let Err(e) = self.visit_all().await {
            return wrong(e);
        }
        let due = Instant::now() + REST;
        let mut left = loop {
            let left = match self.held().await {
                Ok(now) => {
                    let withheld = now.iter().filter(|(name, _)| name.ends_with(QUARANTINED));
                    self.quarantined.set(Some(withheld.map(|(_, n)| n).sum()));
                    differences(&self.before, &now)
                }
                Err(e) => wrong(e),
            };
            if left.is_empty() || Instant::now() >= due {
                break left;
            }
            tokio::time::sleep(LOOK).await;
        };
        for seat in &self.fleet.seats {
            match legs::send(&seat.serving, &LegRequest::Audit, AUDIT).await {
                Ok(LegReply { pages_corrupt: 0, .. }) => {}
                Ok(LegReply { pages_corrupt, .. }) => {
                    left.push(format!("{}: {pages_corrupt} free pages were written", seat.name()));
                }
                Err(e) => left.push(format!("{}: {e}", seat.name())),
            }
        }
        left
    }

    /// A room for each pair of instances.
    async fn visit_all(&self) -> Result<()> {
        let firsts = |role| self.fleet.of(role).into_iter().filter(|seat| seat.identity.rank == 0);
        let due = Instant::now() + REST;
        let mut request = 0;
        for prefill in firsts(Role::Prefill) {
            for decode in firsts(Role::Decode) {
                loop {
                    request += 1;
                    let asked = PairRequest {
                        prefill: Some(prefill.identity.clone()),
                        decode: Some(decode.identity.clone()),
                        wait: ANSWER,
                        deadline: 2 * ANSWER,
                        ..PairRequest::new(TOKENS)
                    };
                    match replay::visit(&self.coordinator, &self.router, asked, request).await {
                        Ok(()) => break,
                        Err(e) if e.kind() == ErrorKind::Corrupt || Instant::now() >= due => {
                            return Err(e
                                .with("visited", prefill.name())
                                .with("by", decode.name()));
                        }
                        // Somebody has just been started, and is not known yet.
                        Err(_) => tokio::time::sleep(LOOK).await,
                    }
                }
            }
        }
        Ok(())
    }

    async fn held(&self) -> Result<Held> {
        let mut held = Held::new();
        for seat in &self.fleet.seats {
            let (reply, holds) = self.ask(seat).await?;
            let mut add = |what, n: u64| held.insert(format!("{} {what}", seat.name()), n);
            let (load, blocks) = (&reply.load, &holds.blocks);
            add("rooms", load.rooms.into());
            add("queued rooms", load.queued.into());
            add("legs", holds.legs as u64);
            add(QUARANTINED, load.quarantined_blocks.into());
            add("blocks in use", blocks.iter().map(|(free, all)| u64::from(all - free)).sum());
            add("free lanes", load.free_lanes.into());
            add("links", holds.sum("kvlane_links", |_| true));
            add("descriptors", holds.fds);
            add("tasks", holds.tasks);
        }
        for (socket, _) in &self.fleet.nics {
            let stats = open_nic(socket)?.stats()?;
            let name = socket.rsplit('/').next().unwrap_or(socket);
            held.insert(format!("{name} queue pairs"), stats.pairs.len() as u64);
            let sum = |what: fn(&ProcessStats) -> u64| stats.processes.iter().map(what).sum();
            held.insert(format!("{name} domains"), sum(|p| p.domains));
            held.insert(format!("{name} keys"), sum(|p| p.keys));
        }
        Ok(held)
    }

    async fn ask(&self, seat: &Seat) -> Result<(LegReply, Holds)> {
        let (reply, holds) = ask(seat).await?;
        let heard = (holds.clone(), reply.retries);
        self.heard.borrow_mut().insert(holds.incarnation.clone(), heard);
        Ok((reply, holds))
    }
    /// Hears a worker, if it answers.
    pub(super) async fn hear(&self, seat: &Seat) {
        // One that is stopped may be killed without a last word.
        let _ = tokio::time::timeout(LOOK, self.ask(seat)).await;
    }
    /// Looks again and again, for ever.
    pub(super) async fn watch(&self, half: Instant) -> ! {
        loop {
            for seat in &self.fleet.seats {
                self.hear(seat).await;
            }
            let second = usize::from(Instant::now() >= half);
            let workers = self
                .fleet
                .seats
                .iter()
                .filter_map(|seat| Some((seat.identity.role.as_str(), seat.pid.get()?)));
            let nics = self.fleet.nics.iter().map(|&(_, pid)| ("nic", pid));
            let others =
                [("service", self.fleet.service_pid.get()), ("router", std::process::id())];
            for (kind, pid) in workers.chain(nics).chain(others) {
                let kib = proc::own_bytes(pid).unwrap_or(0) >> 10;
                let mut resident = self.resident.borrow_mut();
                let most = &mut resident.entry(kind).or_default()[second];
                *most = kib.max(*most);
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Adds what was heard.
    pub(super) fn report(&self, report: &mut Report, totals: &mut Totals) {
        let heard = self.heard.borrow();
        let sum = |counter: &str, of: &dyn Fn(&str) -> bool| -> u64 {
            heard.values().map(|(holds, _)| holds.sum(counter, of)).sum()
        };
        let fences = |how: &'static str| sum("kvlane_fences_total", &|of| of.contains(how));
        report.fences = Fences { quiesce: fences("close"), revoke: fences("revoke") };
        // No such grant any more.
        let late = |of: &str| of.contains("not_found");
        report.late_writes_scrapped =
            (totals.engine != "gpunetio").then(|| sum("kvlane_scrapped_frames_total", &late));
        // What the replay saw was before anything had come to rest.
        totals.quarantined_blocks = self.quarantined.get().unwrap_or(totals.quarantined_blocks);
        totals.retries = heard.values().map(|(_, retries)| retries).sum();
        report.resident_kib = self.resident.borrow().clone();
    }
}

async fn ask(seat: &Seat) -> Result<(LegReply, Holds)> {
    let reply = legs::send(&seat.serving, &LegRequest::Holds, ANSWER).await?;
    match (reply.holds.clone(), &reply.error) {
        (Some(holds), _) => Ok((reply, holds)),
        (None, Some(why)) => Err(Error::new(why.kind, why.text.clone()).blamed(why.blame)),
        (None, None) => Err(Error::new(ErrorKind::Malformed, "a worker does not say how it is")),
    }
}

/// What must be 0 at rest.
fn in_use(held: &Held) -> Vec<String> {
    let idle = ["rooms", "legs", "in quarantine", "in use"];
    held.iter()
        .filter(|(name, n)| **n > 0 && idle.iter().any(|what| name.ends_with(what)))
        .map(|(name, n)| format!("{name}: {n}"))
        .collect()
}

fn differences(before: &Held, now: &Held) -> Vec<String> {
    now.iter()
        .map(|(name, n)| (name, n, before.get(name).copied().unwrap_or(0)))
        .filter(|(_, n, before)| *n != before)
        .map(|(name, n, before)| format!("{name}: {n}, and {before} before the faults"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_as_before_is_named_with_both_numbers() {
        let held = |n| Held::from([("p/0 tasks".into(), 7), ("p/0 blocks in use".into(), n)]);
        assert!(differences(&held(0), &held(0)).is_empty());
        assert_eq!(
            differences(&held(0), &held(3)),
            ["p/0 blocks in use: 3, and 0 before the faults"]
        );
        assert_eq!(in_use(&held(3)), ["p/0 blocks in use: 3"]);
        assert!(in_use(&held(0)).is_empty());
    }
}
