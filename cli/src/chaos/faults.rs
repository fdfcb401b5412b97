//! What is broken, when, and how often.
//!
//! In: the places of the processes. Out: counts. Three hands work side by side, each one fault after
//! the other: one kills processes and starts them again, one stops them, one spoils NICs. The seed
//! decides the order of each hand's kinds; moments, and who is hit, differ from run to run.
//! Invariants: whatever a hand has done it undoes before it takes the next; if there is time for it,
//! each hand has had each of its kinds once before it ends.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kvlane_proto::{Error, ErrorKind, Result, Role};
use kvlane_transport::emulated::faults::{Fault, Target, What};

use super::census::Census;
use super::{Fleet, Seat, open_nic};
use crate::cluster::Cluster;

/// Kinds of the first hand.
const KILLS: [&str; 3] = ["prefill_killed", "decode_killed", "service_restarted"];
const STOPPED: &str = "worker_stopped";
/// Kinds of the third, with the most that one of them strikes (0: until it is over).
const NIC_FAULTS: [(&str, What, u64); 7] = [
    ("nic_delay", What::Delay { us: 5_000 }, 0),
    ("nic_hold_wire", What::HoldWire, 0),
    ("nic_hold_landing", What::HoldLanding, 0),
    ("nic_nak", What::Nak { syndrome: 0x15, vendor: 0 }, 2),
    ("nic_duplicate", What::DuplicateImmediate, 4),
    ("nic_link_flap", What::LinkFlap { ms: 100 }, 0),
    ("nic_throttle", What::Throttle { bytes_per_s: 20_000_000 }, 0),
];

/// xorshift64.
struct Dice(u64);

impl Dice {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % sides.max(1)
    }
    fn shuffled<T: Copy>(&mut self, all: &[T]) -> Vec<T> {
        let mut all = all.to_vec();
        for n in (1..all.len()).rev() {
            all.swap(n, self.roll(n as u64 + 1) as usize);
        }
        all
    }
}

pub(super) struct Storm<'a> {
    fleet: &'a Fleet,
    census: &'a Census<'a>,
    seed: u64,
    /// Of moments and targets.
    dice: RefCell<Dice>,
    until: Instant,
    /// The same for a hand that has not had all of its kinds.
    at_last: Instant,
    /// Nothing is left to be disturbed.
    pub(super) is_over: Cell<bool>,
    pub(super) faults: RefCell<BTreeMap<&'static str, u64>>,
}

impl<'a> Storm<'a> {
    pub(super) fn new(
        fleet: &'a Fleet,
        census: &'a Census<'a>,
        seed: u64,
        until: Instant,
        at_last: Instant,
    ) -> Self {
        let nics = NIC_FAULTS.iter().map(|(kind, ..)| *kind).filter(|_| !fleet.nics.is_empty());
        let kinds = KILLS.into_iter().chain([STOPPED]).chain(nics);
        Self {
            fleet,
            census,
            seed,
            dice: RefCell::new(Dice::new(seed)),
            until,
            at_last,
            is_over: Cell::new(false),
            faults: RefCell::new(kinds.map(|kind| (kind, 0)).collect()),
        }
    }
    /// Breaks things until it is time.
    pub(super) async fn rage(&self, cluster: &mut Cluster) -> Result<()> {
        tokio::try_join!(self.kill(cluster), self.stop(), self.spoil_nics())?;
        Ok(())
    }

    fn roll(&self, sides: u64) -> u64 {
        self.dice.borrow_mut().roll(sides)
    }
    async fn wait(&self, ms: std::ops::Range<u64>) {
        let ms = ms.start + self.roll(ms.end - ms.start);
        tokio::time::sleep(Duration::from_millis(ms)).await;
    }
    fn is_over(&self, round: u64) -> bool {
        let until = if round == 0 { self.at_last } else { self.until };
        self.is_over.get() || Instant::now() >= until
    }
    /// Waits for its turn; whether there is one.
    async fn next(&self, round: u64, pause_ms: std::ops::Range<u64>) -> bool {
        self.wait(pause_ms).await;
        !self.is_over(round)
    }
    fn struck(&self, kind: &'static str, times: u64) {
        tracing::info!(kind, times, "fault");
        *self.faults.borrow_mut().entry(kind).or_default() += times;
    }
    fn pick(&self, role: Role) -> Result<&'a Seat> {
        let seats = self.fleet.of(role);
        let at = self.roll(seats.len() as u64) as usize;
        seats.get(at).copied().ok_or_else(|| Error::new(ErrorKind::NotFound, "no worker to break"))
    }

    async fn kill(&self, cluster: &mut Cluster) -> Result<()> {
        let mut order = Dice::new(self.seed);
        for round in 0.. {
            for kind in order.shuffled(&KILLS) {
                if !self.next(round, 1_000..3_000).await {
                    return Ok(());
                }
                match kind {
                    "prefill_killed" => self.kill_worker(kind, cluster, Role::Prefill).await?,
                    "decode_killed" => self.kill_worker(kind, cluster, Role::Decode).await?,
                    _ => self.restart_service(kind, cluster).await?,
                }
            }
        }
        Ok(())
    }
    async fn kill_worker(
        &self,
        kind: &'static str,
        cluster: &mut Cluster,
        role: Role,
    ) -> Result<()> {
        let seat = self.pick(role)?;
        self.census.hear(seat).await;
        let Some(pid) = seat.pid.take() else { return Ok(()) };
        cluster.kill(pid).await?;
        self.struck(kind, 1);
        // Before its peers have noticed, or after.
        if self.roll(2) == 0 {
            self.wait(100..1_500).await;
        }
        let again = cluster.start(&seat.identity, &seat.flags()).await?;
        seat.pid.set(Some(again.pid));
        Ok(())
    }
    async fn restart_service(&self, kind: &'static str, cluster: &mut Cluster) -> Result<()> {
        cluster.kill(self.fleet.service_pid.get()).await?;
        self.struck(kind, 1);
        self.wait(200..3_000).await;
        let again = cluster.start_service(&self.fleet.service).await?;
        self.fleet.service_pid.set(again.pid);
        Ok(())
    }

    async fn stop(&self) -> Result<()> {
        let mut round = 0;
        while self.next(round, 500..2_000).await {
            let seat = self.pick(if self.roll(2) == 0 { Role::Prefill } else { Role::Decode })?;
            // One that has just been killed is not there.
            let Some(pid) = seat.pid.get() else { continue };
            signal("STOP", pid)?;
            self.struck(STOPPED, 1);
            round += 1;
            self.wait(100..3_000).await;
            if seat.pid.get() == Some(pid) {
                signal("CONT", pid)?;
            }
        }
        Ok(())
    }

    async fn spoil_nics(&self) -> Result<()> {
        let mut nics = Vec::new();
        for (socket, _) in &self.fleet.nics {
            nics.push(open_nic(socket)?);
        }
        if nics.is_empty() {
            return Ok(());
        }
        let mut order = Dice::new(self.seed);
        for round in 0.. {
            for (kind, what, times) in order.shuffled(&NIC_FAULTS) {
                if !self.next(round, 100..600).await {
                    return Ok(());
                }
                let fault = Fault::new(what, Target::All).times(times);
                // Until it has met somebody.
                loop {
                    let at = self.roll(nics.len() as u64) as usize;
                    let nic = &mut nics[at];
                    let id = nic.fault(&fault)?;
                    self.wait(200..1_000).await;
                    let hits = nic.stats()?.hits(id);
                    nic.clear(id)?;
                    self.struck(kind, hits);
                    if hits > 0 || self.is_over(round) {
                        break;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Through a shell's own `kill`, which needs no other program.
fn signal(signal: &str, pid: u32) -> Result<()> {
    let failed = |what: &str| Error::new(ErrorKind::Io, what.to_string()).with("pid", pid);
    let sent = std::process::Command::new("sh")
        .args(["-c", "kill -\"$0\" \"$1\"", signal, &pid.to_string()])
        .status()
        .map_err(|e| failed("no shell to send a signal with").caused_by(e))?;
    match sent.success() {
        true => Ok(()),
        false => Err(failed("a signal cannot be sent").with("signal", signal)),
    }
}
