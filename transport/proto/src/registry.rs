//! The registry: which workers exist, which start of each counts, who fits whom, and which router
//! may use which issuer slot.
//!
//! Owned by the bootstrap service, one per cluster. In: questions, each with who asks as the
//! session proved it, and sessions that were lost. Out: one answer for every question, at once.
//! Invariants:
//! - at most one incarnation of an identity is alive; epochs of one identity only grow, and an
//!   incarnation that was superseded does not come back (the last 16 are remembered, as long as
//!   the identity is);
//! - a worker is listed alive only while its lease runs (counted from the grant, plus drift);
//! - two live leases never share an issuer slot, a slot rests before another router gets it, and
//!   counters of a slot only grow: workers take lower ones of a router for over. A slot whose
//!   counters are used up is not given out again;
//! - a refused request changes nothing.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::Bound;

use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Identity, Incarnation, Role, RoomId, WorkerKey};
use crate::layout::{Difference, Layout};
use crate::limits;
use crate::msg::service::{Answer, Ask, Cursor, Load, Registration, WorkerView};
use crate::time::{Time, grantor_ms};

/// Superseded incarnations remembered for each identity.
const SUPERSEDED_MAX: usize = 16;
/// Ranges of [`limits::ISSUER_COUNTERS`] that one slot has.
const RANGES_PER_SLOT: u64 = (1 << RoomId::COUNTER_BITS) / limits::ISSUER_COUNTERS;
/// A service that starts so much later begins every slot one range further up. A router that makes
/// fewer rooms than [`limits::ISSUER_COUNTERS`] in that time never falls behind its own numbers.
const RANGE_US: u64 = 8_000_000;

/// What a registry is told at its start.
#[derive(Clone, Debug)]
pub struct RegistryConfig {
    /// The cluster that it serves; nobody else is answered.
    pub cluster: String,
    /// A worker's lease.
    pub worker_lease_ms: u64,
    /// How long a dead worker is remembered.
    pub worker_keep_ms: u64,
    /// A router's lease of an issuer slot.
    pub issuer_lease_ms: u64,
    /// How long a slot rests after its lease.
    pub issuer_quarantine_ms: u64,
    /// Most workers, dead ones that are still remembered included.
    pub workers_max: usize,
    /// Issuer slots there are.
    pub slots: u16,
    /// Random: names the log, and says which slot is the first, so that a service that restarted
    /// without its memory seldom gives a slot to another router while its old holder lives.
    pub random: u64,
    /// The first epoch given out; larger than any that an earlier service gave.
    pub first_epoch: u64,
    /// The range of [`limits::ISSUER_COUNTERS`] that every slot begins with; higher than any that
    /// an earlier service came to.
    pub first_range: u64,
}

impl RegistryConfig {
    /// The defaults of [`limits`]. `started_us` is the wall clock's time since 1970. It is the
    /// first epoch, and says how high in their lower half slots begin: a registry without memory
    /// goes on above what an earlier one gave. After two years that begins again at the bottom.
    pub fn new(cluster: impl Into<String>, random: u64, started_us: u64) -> Self {
        Self {
            cluster: cluster.into(),
            worker_lease_ms: limits::WORKER_LEASE_MS,
            worker_keep_ms: limits::WORKER_KEEP_MS,
            issuer_lease_ms: limits::ISSUER_LEASE_MS,
            issuer_quarantine_ms: limits::ISSUER_QUARANTINE_MS,
            workers_max: limits::WORKERS_MAX,
            slots: 1 << RoomId::SLOT_BITS,
            random,
            first_epoch: started_us,
            first_range: (started_us / RANGE_US) % (RANGES_PER_SLOT / 2),
        }
    }
}

/// How many there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Workers whose lease runs.
    pub alive: usize,
    /// Workers remembered.
    pub known: usize,
    /// Issuer slots under lease.
    pub slots: usize,
}

/// One identity.
#[derive(Debug)]
struct Entry {
    registration: Registration,
    load: Load,
    epoch: u64,
    alive: bool,
    suspected: bool,
    /// End of the lease while alive, else when it is forgotten.
    until: Time,
    revision: u64,
    superseded: VecDeque<Incarnation>,
}

/// One issuer slot that was leased at least once.
#[derive(Debug)]
struct Slot {
    holder: WorkerKey,
    leased: bool,
    /// End of the lease, or of the rest after it.
    until: Time,
    /// The range that is given out next; [`RANGES_PER_SLOT`] once there is none left.
    next_range: u64,
}

/// The registry of one cluster.
#[derive(Debug)]
pub struct Registry {
    cfg: RegistryConfig,
    log: u64,
    revision: u64,
    /// The newest revision of any worker that is forgotten by now, and when the last was.
    forgotten_revision: u64,
    forgotten_at: u64,
    next_epoch: u64,
    workers: BTreeMap<Identity, Entry>,
    by_revision: BTreeMap<u64, Identity>,
    timers: BTreeSet<(Time, Identity)>,
    alive: usize,
    slots: HashMap<u16, Slot>,
    /// Leased and resting slots by whoever has, or last had, them.
    holders: BTreeMap<WorkerKey, u16>,
    slot_leases: BTreeSet<(Time, u16)>,
    resting: BTreeSet<(Time, u16)>,
}

impl Registry {
    /// An empty registry.
    pub fn new(mut cfg: RegistryConfig) -> Self {
        cfg.first_range = cfg.first_range.min(RANGES_PER_SLOT - 1);
        Self {
            log: cfg.random.max(1),
            revision: 0,
            forgotten_revision: 0,
            forgotten_at: 0,
            next_epoch: cfg.first_epoch,
            workers: BTreeMap::new(),
            by_revision: BTreeMap::new(),
            timers: BTreeSet::new(),
            alive: 0,
            slots: HashMap::new(),
            holders: BTreeMap::new(),
            slot_leases: BTreeSet::new(),
            resting: BTreeSet::new(),
            cfg,
        }
    }

    /// A worker's session ended without a word: it is suspected until it renews.
    pub fn lost(&mut self, now: Time, key: &WorkerKey) {
        self.handle_timeout(now);
        let suspects = self
            .workers
            .get_mut(&key.identity)
            .filter(|e| e.alive && !e.suspected && e.incarnation() == key.incarnation);
        if let Some(entry) = suspects {
            entry.suspected = true;
            self.touch(&key.identity);
        }
    }

    /// Ends what has run out by `now`.
    pub fn handle_timeout(&mut self, now: Time) {
        while let Some((at, _)) = self.timers.first()
            && *at <= now
            && let Some((_, identity)) = self.timers.pop_first()
        {
            if self.workers.get(&identity).is_some_and(|e| e.alive) {
                self.end(now, &identity);
            } else {
                self.forget(&identity);
            }
        }
        while let Some(&(at, slot)) = self.slot_leases.first()
            && at <= now
        {
            self.slot_leases.pop_first();
            if let Some(s) = self.slots.get_mut(&slot) {
                s.leased = false;
                s.until = at.plus_ms(self.cfg.issuer_quarantine_ms);
                self.resting.insert((s.until, slot));
            }
        }
    }

    /// When to call [`Registry::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Time> {
        let worker = self.timers.first().map(|t| t.0);
        let slot = self.slot_leases.first().map(|t| t.0);
        worker.into_iter().chain(slot).min()
    }

    /// How many there are, for metrics.
    pub fn counts(&self) -> Counts {
        Counts { alive: self.alive, known: self.workers.len(), slots: self.slot_leases.len() }
    }

    /// Answers a question of `from`, which is who its session proved to be.
    ///
    /// # Errors
    /// A refusal, which changes nothing: [`ErrorKind::Unauthorized`] for what the caller's role or
    /// cluster may not ask, [`ErrorKind::StaleIncarnation`], [`ErrorKind::NotFound`],
    /// [`ErrorKind::Busy`] (slots), [`ErrorKind::LimitExceeded`], [`ErrorKind::Malformed`].
    pub fn ask(&mut self, now: Time, from: &WorkerKey, ask: Ask) -> Result<Answer> {
        self.handle_timeout(now);
        if from.identity.cluster != self.cfg.cluster {
            return Err(Error::new(ErrorKind::Unauthorized, "this service serves another cluster")
                .with("caller", from)
                .with("found", &from.identity.cluster)
                .with("expected", &self.cfg.cluster)
                .hint("point the process at its own cluster's service"));
        }
        match ask {
            Ask::Register(registration) => self.register(now, from, *registration),
            Ask::Renew(load) => {
                let until = now.plus_ms(grantor_ms(self.cfg.worker_lease_ms));
                let entry = self.own_entry(from, "renew")?;
                let changed = entry.load != load || entry.suspected;
                let old = std::mem::replace(&mut entry.until, until);
                entry.load = load;
                entry.suspected = false;
                self.reset_timer(&from.identity, old, until);
                if changed {
                    self.touch(&from.identity);
                }
                Ok(Answer::Renewed { lease_ms: self.cfg.worker_lease_ms })
            }
            Ask::Deregister => {
                let until = self.own_entry(from, "deregister")?.until;
                self.timers.remove(&(until, from.identity.clone()));
                self.end(now, &from.identity);
                Ok(Answer::Deregistered)
            }
            Ask::List { after } => Ok(self.list(after)),
            Ask::IssuerSlot { renew, more_counters } => {
                self.issuer_slot(now, from, renew, more_counters)
            }
        }
    }

    fn register(&mut self, now: Time, from: &WorkerKey, r: Registration) -> Result<Answer> {
        only(from, "register", from.identity.role.counterpart().is_some(), "prefill or decode")?;
        if r.worker.key != *from {
            return Err(Error::new(ErrorKind::Unauthorized, "a worker may only register itself")
                .with("session", from)
                .with("asked", &r.worker.key)
                .hint(
                    "register with the identity of the certificate and this start's incarnation",
                ));
        }
        r.check()?;
        let identity = &from.identity;
        let mut superseded = VecDeque::new();
        let mut epoch = self.next_epoch;
        match self.workers.get(identity) {
            Some(known) if known.incarnation() == from.incarnation => {
                if known.registration.pools != r.pools {
                    return Err(Error::new(
                        ErrorKind::Malformed,
                        "one start of a worker cannot change its layout",
                    )
                    .with("worker", from)
                    .with("before", places(&known.registration.pools))
                    .with("now", places(&r.pools))
                    .hint("restart the worker, so that it has a new incarnation"));
                }
                epoch = known.epoch;
                superseded.clone_from(&known.superseded);
            }
            Some(known) if known.superseded.contains(&from.incarnation) => {
                return Err(stale(from, known));
            }
            Some(known) => {
                superseded.clone_from(&known.superseded);
                superseded.push_back(known.incarnation());
                if superseded.len() > SUPERSEDED_MAX {
                    superseded.pop_front();
                }
            }
            None => self.make_room()?,
        }

        let mut fits = Vec::new();
        let mut differs = Vec::new();
        let mut left_off = 0;
        // Most workers share a few layouts: each couple of layout and engines is compared once.
        let mut compared: HashMap<(&[Layout], &[String]), Vec<Difference>> = HashMap::new();
        for (other, entry) in &self.workers {
            if !entry.alive || Some(other.role) != identity.role.counterpart() {
                continue;
            }
            let theirs = &entry.registration;
            let found = compared
                .entry((&theirs.pools, theirs.engines.as_slice()))
                .or_insert_with(|| r.differences(theirs));
            if found.is_empty() && fits.len() < limits::LIST_MAX {
                fits.push(other.clone());
            } else if !found.is_empty() && differs.len() < limits::LIST_MAX {
                differs.push((other.clone(), found.clone()));
            } else {
                left_off += 1;
            }
        }

        self.next_epoch = self.next_epoch.max(epoch + 1);
        let until = now.plus_ms(grantor_ms(self.cfg.worker_lease_ms));
        let entry = Entry {
            registration: r,
            load: Load::default(),
            epoch,
            alive: true,
            suspected: false,
            until,
            revision: 0,
            superseded,
        };
        self.alive += 1;
        if let Some(old) = self.workers.insert(identity.clone(), entry) {
            self.alive -= usize::from(old.alive);
            self.timers.remove(&(old.until, identity.clone()));
            self.by_revision.remove(&old.revision);
        }
        self.timers.insert((until, identity.clone()));
        self.touch(identity);
        let lease_ms = self.cfg.worker_lease_ms;
        Ok(Answer::Registered { lease_ms, epoch, fits, differs, left_off })
    }

    /// The caller's own entry, if this start of it is the one that is alive.
    fn own_entry(&mut self, from: &WorkerKey, what: &'static str) -> Result<&mut Entry> {
        only(from, what, from.identity.role.counterpart().is_some(), "prefill or decode")?;
        let missing = |why: &str| {
            Error::new(ErrorKind::NotFound, why).with("worker", from).hint("register again")
        };
        match self.workers.get_mut(&from.identity) {
            None => Err(missing("the worker is not registered")),
            Some(e)
                if e.incarnation() != from.incarnation
                    && !e.alive
                    && !e.superseded.contains(&from.incarnation) =>
            {
                Err(missing("this start of the worker is not registered"))
            }
            Some(e) if e.incarnation() != from.incarnation => Err(stale(from, e)),
            Some(e) if !e.alive => Err(missing("the worker's lease has ended")),
            Some(e) => Ok(e),
        }
    }

    /// Takes the life of a worker whose timer is gone already.
    fn end(&mut self, now: Time, identity: &Identity) {
        let Some(entry) = self.workers.get_mut(identity) else { return };
        entry.alive = false;
        entry.suspected = false;
        entry.until = now.plus_ms(self.cfg.worker_keep_ms);
        self.alive -= 1;
        self.timers.insert((entry.until, identity.clone()));
        self.touch(identity);
    }

    fn forget(&mut self, identity: &Identity) {
        if let Some(old) = self.workers.remove(identity) {
            self.timers.remove(&(old.until, identity.clone()));
            self.by_revision.remove(&old.revision);
            self.forgotten_revision = self.forgotten_revision.max(old.revision);
            self.revision += 1;
            self.forgotten_at = self.revision;
        }
    }

    /// Makes room for one more worker: the one that has been dead longest goes first.
    fn make_room(&mut self) -> Result<()> {
        if self.workers.len() < self.cfg.workers_max {
            return Ok(());
        }
        let dead =
            self.by_revision.values().find(|i| self.workers.get(i).is_some_and(|e| !e.alive));
        let Some(dead) = dead.cloned() else {
            return Err(Error::new(ErrorKind::LimitExceeded, "the registry is full")
                .with("found", self.workers.len())
                .with("limit", self.cfg.workers_max)
                .hint("stop workers that are not needed, or run another cluster"));
        };
        self.forget(&dead);
        Ok(())
    }

    fn reset_timer(&mut self, identity: &Identity, old: Time, new: Time) {
        self.timers.remove(&(old, identity.clone()));
        self.timers.insert((new, identity.clone()));
    }

    /// Gives a worker the newest revision.
    fn touch(&mut self, identity: &Identity) {
        let Some(entry) = self.workers.get_mut(identity) else { return };
        self.revision += 1;
        self.by_revision.remove(&entry.revision);
        entry.revision = self.revision;
        self.by_revision.insert(self.revision, identity.clone());
    }

    fn list(&self, mut after: Cursor) -> Answer {
        // A reader that has not seen the death of a worker forgotten since would keep it for ever.
        // One that began after that never had it.
        let missed = after.revision < self.forgotten_revision && after.began < self.forgotten_at;
        let reset = after.log != self.log || after.revision > self.revision || missed;
        if reset {
            after = Cursor { log: self.log, revision: 0, began: self.revision };
        }
        let mut rest = self.by_revision.range((Bound::Excluded(after.revision), Bound::Unbounded));
        let page: Vec<(u64, WorkerView)> = rest
            .by_ref()
            .take(limits::LIST_MAX)
            .filter_map(|(&at, i)| self.workers.get(i).map(|e| (at, e.view())))
            .collect();
        let more = rest.next().is_some();
        let read = if more { page.last().map(|p| p.0) } else { None }.unwrap_or(self.revision);
        Answer::Workers {
            next: Cursor { revision: read, ..after },
            reset,
            workers: page.into_iter().map(|p| p.1).collect(),
            more,
        }
    }

    fn issuer_slot(
        &mut self,
        now: Time,
        from: &WorkerKey,
        renew: Option<u16>,
        more_counters: bool,
    ) -> Result<Answer> {
        only(from, "lease an issuer slot", from.identity.role == Role::Router, "router")?;
        let held = self.holders.get(from).copied();
        if let Some(asked) = renew
            && held != Some(asked)
        {
            return Err(Error::new(ErrorKind::NotFound, "the issuer slot is not this router's")
                .with("router", from)
                .with("asked", asked)
                .with("held", held.map_or("none".into(), |s| s.to_string()))
                .hint("ask for a fresh slot"));
        }
        let fresh_range = more_counters || renew.is_none();
        let slot = match held {
            // Whoever had the slot last may have it back, with counters that nobody has seen.
            Some(slot) if self.ranges_left(slot) || (!fresh_range && self.is_leased(slot)) => slot,
            _ => self.free_slot(now, from)?,
        };
        let until = now.plus_ms(grantor_ms(self.cfg.issuer_lease_ms));
        let entry = self.slots.entry(slot).or_insert_with(|| Slot {
            holder: from.clone(),
            leased: false,
            until,
            next_range: self.cfg.first_range,
        });
        let again = entry.holder == *from && entry.leased;
        if !again || fresh_range {
            entry.next_range += 1;
        }
        self.slot_leases.remove(&(entry.until, slot));
        self.resting.remove(&(entry.until, slot));
        if entry.holder != *from {
            self.holders.remove(&entry.holder);
            entry.holder = from.clone();
        }
        // A router that moved on from a slot without counters leaves that one for good.
        entry.leased = true;
        entry.until = until;
        let range = entry.next_range - 1;
        self.holders.insert(from.clone(), slot);
        self.slot_leases.insert((until, slot));
        Ok(Answer::Slot {
            slot,
            first_counter: range * limits::ISSUER_COUNTERS,
            counters: limits::ISSUER_COUNTERS,
            lease_ms: self.cfg.issuer_lease_ms,
        })
    }

    fn is_leased(&self, slot: u16) -> bool {
        self.slots.get(&slot).is_some_and(|s| s.leased)
    }
    fn ranges_left(&self, slot: u16) -> bool {
        self.slots.get(&slot).is_none_or(|s| s.next_range < RANGES_PER_SLOT)
    }

    /// A slot that nobody holds: one never used, else the one that has rested longest.
    fn free_slot(&self, now: Time, from: &WorkerKey) -> Result<u16> {
        let any = |i: u8| WorkerKey {
            identity: from.identity.clone(),
            incarnation: Incarnation([i; 16]),
        };
        let mine =
            self.holders.range(any(0)..=any(255)).filter(|(_, s)| self.is_leased(**s)).count();
        if mine >= limits::ISSUER_SLOTS_PER_ROUTER_MAX {
            return Err(Error::new(
                ErrorKind::LimitExceeded,
                "too many starts of one router hold issuer slots",
            )
            .with("router", &from.identity)
            .with("limit", limits::ISSUER_SLOTS_PER_ROUTER_MAX)
            .hint(
                "give every router an instance name of its own, and wait for old leases to end",
            ));
        }
        let total = u64::from(self.cfg.slots);
        if (self.slots.len() as u64) < total {
            let first = self.cfg.random >> 32;
            return Ok(((first + self.slots.len() as u64) % total) as u16);
        }
        let rested = self.resting.iter().take_while(|(at, _)| *at <= now);
        let found = rested.map(|r| r.1).find(|&s| self.ranges_left(s));
        found.ok_or_else(|| {
            let next =
                self.resting.iter().map(|r| r.0).chain(self.slot_leases.first().map(|l| l.0)).min();
            Error::new(ErrorKind::Busy, "every issuer slot is held or rests")
                .blamed(crate::error::Blame::Service)
                .with("slots", self.cfg.slots)
                .with("next_change_ms", next.map_or(0, |t| t.ms_since(now)))
                .hint("wait for a slot's lease and rest to end")
        })
    }
}

impl Entry {
    fn incarnation(&self) -> Incarnation {
        self.registration.worker.key.incarnation
    }
    fn view(&self) -> WorkerView {
        WorkerView {
            registration: self.registration.clone(),
            load: self.load,
            alive: self.alive,
            suspected: self.suspected,
            epoch: self.epoch,
        }
    }
}

fn only(from: &WorkerKey, what: &'static str, allowed: bool, expected: &'static str) -> Result<()> {
    if allowed {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Unauthorized, format!("this role may not {what}"))
        .with("caller", from)
        .with("found", from.identity.role)
        .with("expected", expected)
        .hint("use a certificate of the expected role"))
}

fn stale(from: &WorkerKey, known: &Entry) -> Error {
    Error::new(ErrorKind::StaleIncarnation, "another start of this worker has registered since")
        .with("worker", &from.identity)
        .with("asked", from.incarnation)
        .with("registered", known.incarnation())
        .with("registered_epoch", known.epoch)
        .with("registered_address", &known.registration.worker.address)
        .hint("stop the older process, or give the two workers different instance names or ranks")
}

fn places(pools: &[Layout]) -> String {
    pools.iter().map(Layout::place).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Refusal;
    use crate::layout::{Dtype, small_layout};
    use crate::msg::service::WorkerAddress;
    use crate::time::Time;
    use proptest::prelude::*;

    fn key(role: Role, instance: &str, start: u8) -> WorkerKey {
        WorkerKey {
            identity: Identity::new("c", role, instance, 0).unwrap(),
            incarnation: Incarnation([start; 16]),
        }
    }
    fn registration(key: &WorkerKey) -> Registration {
        Registration {
            worker: WorkerAddress { key: key.clone(), address: "127.0.0.1:1".into() },
            pools: vec![small_layout()],
            pool_blocks: 8,
            engines: vec!["tcp".into()],
            serving: String::new(),
            build: "t".into(),
        }
    }
    fn config() -> RegistryConfig {
        RegistryConfig::new("c", 9 << 32, 7)
    }
    fn ms(ms: u64) -> Time {
        Time(0).plus_ms(ms)
    }
    fn ask(r: &mut Registry, at_ms: u64, from: &WorkerKey, ask: Ask) -> Result<Answer, Refusal> {
        r.ask(ms(at_ms), from, ask).map_err(|e| e.to_refusal())
    }
    fn register(r: &mut Registry, at_ms: u64, from: &WorkerKey) -> Result<Answer, Refusal> {
        ask(r, at_ms, from, Ask::Register(Box::new(registration(from))))
    }
    /// Everything there is, page by page.
    fn all(r: &mut Registry, at_ms: u64) -> Vec<WorkerView> {
        follow(r, at_ms, Cursor::default(), &mut BTreeMap::new()).1
    }
    fn follow(
        r: &mut Registry,
        at_ms: u64,
        mut after: Cursor,
        seen: &mut BTreeMap<Identity, WorkerView>,
    ) -> (Cursor, Vec<WorkerView>) {
        let reader = key(Role::Router, "reader", 1);
        for _ in 0..100 {
            let answer = ask(r, at_ms, &reader, Ask::List { after }).unwrap();
            let Answer::Workers { next, reset, workers, more } = answer else { panic!() };
            assert!(workers.len() <= limits::LIST_MAX);
            if reset {
                seen.clear();
            }
            for w in workers {
                seen.insert(w.registration.worker.key.identity.clone(), w);
            }
            after = next;
            if !more {
                return (after, seen.values().cloned().collect());
            }
        }
        panic!("the listing never ends");
    }

    #[test]
    fn registering_tells_who_fits_and_which_field_keeps_the_others_apart() {
        let mut r = Registry::new(config());
        register(&mut r, 0, &key(Role::Prefill, "p0", 1)).unwrap();
        let p1 = key(Role::Prefill, "p1", 1);
        let mut other = registration(&p1);
        other.pools[0].dtype = Dtype::Fp8E4m3;
        ask(&mut r, 0, &p1, Ask::Register(Box::new(other))).unwrap();
        let p2 = key(Role::Prefill, "p2", 1);
        let other = Registration { engines: vec!["verbs".into()], ..registration(&p2) };
        ask(&mut r, 0, &p2, Ask::Register(Box::new(other))).unwrap();
        register(&mut r, 0, &key(Role::Decode, "d9", 1)).unwrap();

        let answer = register(&mut r, 0, &key(Role::Decode, "d0", 1)).unwrap();
        let Answer::Registered { epoch: 11, fits, differs, left_off: 0, .. } = answer else {
            panic!("{answer:?}")
        };
        assert_eq!(fits, [key(Role::Prefill, "p0", 1).identity]);
        let named: Vec<_> = differs
            .iter()
            .map(|(i, d)| (i.instance.as_str(), d[0].field.as_str(), &*d[0].here, &*d[0].there))
            .collect();
        assert_eq!(named, [("p1", "dtype", "bf16", "fp8_e4m3"), ("p2", "engines", "tcp", "verbs")]);
    }

    #[test]
    fn the_newest_start_wins_and_the_older_never_comes_back() {
        let mut r = Registry::new(config());
        let (old, new) = (key(Role::Decode, "d", 1), key(Role::Decode, "d", 2));
        register(&mut r, 0, &old).unwrap();
        register(&mut r, 1, &new).unwrap();
        for a in [
            Ask::Renew(Load::default()),
            Ask::Deregister,
            Ask::Register(Box::new(registration(&old))),
        ] {
            let e = ask(&mut r, 2, &old, a).unwrap_err();
            assert_eq!(e.kind, ErrorKind::StaleIncarnation);
            let both = format!("asked={}, registered={}", old.incarnation, new.incarnation);
            assert!(e.text.contains(&both), "{e}");
        }
        // Not even once the new one is gone.
        ask(&mut r, 3, &new, Ask::Deregister).unwrap();
        let e = register(&mut r, 4, &old).unwrap_err();
        assert_eq!(e.kind, ErrorKind::StaleIncarnation);
        let w = &all(&mut r, 5)[0];
        assert_eq!((w.alive, w.epoch, &w.registration.worker.key), (false, 8, &new));
    }

    #[test]
    fn a_lease_that_is_not_renewed_ends_and_the_worker_is_forgotten_later() {
        let mut r = Registry::new(config());
        let d = key(Role::Decode, "d", 1);
        register(&mut r, 0, &d).unwrap();
        let load = Load { rooms: 3, ..Load::default() };
        ask(&mut r, 4_000, &d, Ask::Renew(load)).unwrap();
        let mut seen = BTreeMap::new();
        let (cursor, _) = follow(&mut r, 9_049, Cursor::default(), &mut seen);
        assert!(seen[&d.identity].alive && seen[&d.identity].load == load);
        assert_eq!(r.poll_timeout(), Some(ms(9_050)));
        let (cursor, _) = follow(&mut r, 9_050, cursor, &mut seen);
        assert!(!seen[&d.identity].alive);
        let e = ask(&mut r, 9_051, &d, Ask::Renew(load)).unwrap_err();
        assert_eq!(e.kind, ErrorKind::NotFound);
        // Registering again is the same start, so the same epoch.
        let answer = register(&mut r, 9_052, &d).unwrap();
        assert!(matches!(answer, Answer::Registered { epoch: 7, .. }));
        ask(&mut r, 9_053, &d, Ask::Deregister).unwrap();
        r.handle_timeout(ms(9_053 + limits::WORKER_KEEP_MS));
        assert_eq!(r.counts(), Counts::default());
        assert_eq!(r.poll_timeout(), None);
        // A reader that slept through it all does not keep a worker that is gone.
        follow(&mut r, 700_000, cursor, &mut seen);
        assert!(seen.is_empty());
    }

    #[test]
    fn a_lost_session_is_a_suspicion_that_a_renewal_clears() {
        let mut r = Registry::new(config());
        let d = key(Role::Decode, "d", 1);
        register(&mut r, 0, &d).unwrap();
        r.lost(ms(1), &key(Role::Decode, "d", 2));
        assert!(!all(&mut r, 1)[0].suspected);
        r.lost(ms(1), &d.clone());
        assert!(all(&mut r, 1)[0].suspected && all(&mut r, 1)[0].alive);
        ask(&mut r, 2, &d, Ask::Renew(Load::default())).unwrap();
        assert!(!all(&mut r, 2)[0].suspected);
    }

    #[test]
    fn what_a_role_may_not_do_is_refused_and_changes_nothing() {
        let mut r = Registry::new(config());
        let (p, d) = (key(Role::Prefill, "p", 1), key(Role::Decode, "d", 1));
        let (router, admin) = (key(Role::Router, "r", 1), key(Role::Admin, "a", 1));
        let slot = Ask::IssuerSlot { renew: None, more_counters: false };
        let mut foreign = router.clone();
        foreign.identity.cluster = "other".into();
        for (from, a) in [
            (&p, Ask::Register(Box::new(registration(&d)))),
            (&d, Ask::Register(Box::new(registration(&key(Role::Decode, "d", 2))))),
            (&router, Ask::Register(Box::new(registration(&router)))),
            (&router, Ask::Renew(Load::default())),
            (&admin, Ask::Deregister),
            (&d, slot.clone()),
            (&admin, slot.clone()),
            (&foreign, slot),
            (&foreign, Ask::List { after: Cursor::default() }),
        ] {
            let e = ask(&mut r, 0, from, a).unwrap_err();
            assert_eq!(e.kind, ErrorKind::Unauthorized, "{e}");
            assert!(!e.hint.is_empty());
        }
        let hostile = Registration { pool_blocks: 0, ..registration(&d) };
        ask(&mut r, 0, &d, Ask::Register(Box::new(hostile))).unwrap_err();
        assert_eq!((r.counts(), r.revision), (Counts::default(), 0));
        // One start has one layout.
        register(&mut r, 0, &d).unwrap();
        let mut other = registration(&d);
        other.pools[0].page_tokens = 8;
        assert_eq!(Layout::pools_differ(&other.pools, &registration(&d).pools), []);
        let e = ask(&mut r, 0, &d, Ask::Register(Box::new(other))).unwrap_err();
        assert!(e.text.contains(" 4 tokens a page") && e.text.contains(" 8 tokens a page"), "{e}");
    }

    #[test]
    fn a_full_registry_forgets_the_dead_and_refuses_past_that() {
        let mut r = Registry::new(RegistryConfig { workers_max: 2, ..config() });
        let [a, b, c] = ["a", "b", "c"].map(|i| key(Role::Decode, i, 1));
        register(&mut r, 0, &a).unwrap();
        register(&mut r, 0, &b).unwrap();
        let mut seen = BTreeMap::new();
        let (cursor, _) = follow(&mut r, 0, Cursor::default(), &mut seen);
        let e = register(&mut r, 0, &c).unwrap_err();
        assert_eq!(e.kind, ErrorKind::LimitExceeded);
        assert_eq!(all(&mut r, 0).len(), 2);
        ask(&mut r, 1, &a, Ask::Deregister).unwrap();
        register(&mut r, 1, &c).unwrap();
        follow(&mut r, 1, cursor, &mut seen);
        let names: Vec<_> = seen.keys().map(|i| i.instance.as_str()).collect();
        assert_eq!(names, ["b", "c"]);
    }

    #[test]
    fn pages_are_bounded_and_a_cursor_of_another_log_starts_over() {
        let mut r = Registry::new(config());
        for i in 0..150 {
            register(&mut r, 0, &key(Role::Decode, &format!("d{i}"), 1)).unwrap();
        }
        let mut seen = BTreeMap::new();
        let (cursor, _) = follow(&mut r, 1, Cursor::default(), &mut seen);
        assert_eq!(seen.len(), 150);
        let again = ask(&mut r, 1, &key(Role::Admin, "a", 1), Ask::List { after: cursor }).unwrap();
        assert_eq!(
            again,
            Answer::Workers { next: cursor, reset: false, workers: vec![], more: false }
        );
        let mut restarted = Registry::new(RegistryConfig { random: 5, ..config() });
        register(&mut restarted, 1, &key(Role::Decode, "d3", 1)).unwrap();
        follow(&mut restarted, 1, cursor, &mut seen);
        assert_eq!(seen.len(), 1);
    }

    #[test]
    fn a_listing_that_began_after_a_worker_was_forgotten_comes_to_its_end() {
        let mut r = Registry::new(RegistryConfig { worker_lease_ms: 1 << 40, ..config() });
        for i in 0..150 {
            register(&mut r, 0, &key(Role::Decode, &format!("d{i}"), 1)).unwrap();
        }
        ask(&mut r, 1, &key(Role::Decode, "d7", 1), Ask::Deregister).unwrap();
        let at = 1 + limits::WORKER_KEEP_MS;
        r.handle_timeout(ms(at));
        assert_eq!(all(&mut r, at).len(), 149);
    }

    #[test]
    fn a_slot_without_counters_is_left_for_another() {
        let mut r = Registry::new(RegistryConfig { slots: 2, ..config() });
        let a = key(Role::Router, "a", 1);
        let lease = |r: &mut Registry, renew, more_counters| match ask(
            r,
            0,
            &a,
            Ask::IssuerSlot { renew, more_counters },
        ) {
            Ok(Answer::Slot { slot, .. }) => Ok(slot),
            Ok(other) => panic!("{other:?}"),
            Err(e) => Err(e.kind),
        };
        let first = lease(&mut r, None, false).unwrap();
        r.slots.get_mut(&first).unwrap().next_range = RANGES_PER_SLOT;
        assert_eq!(lease(&mut r, Some(first), false), Ok(first));
        let second = lease(&mut r, Some(first), true).unwrap();
        assert_ne!(second, first);
        assert_eq!(lease(&mut r, Some(first), false), Err(ErrorKind::NotFound));
        r.slots.get_mut(&second).unwrap().next_range = RANGES_PER_SLOT;
        assert_eq!(lease(&mut r, Some(second), true), Err(ErrorKind::Busy));
        // Not even when both have rested.
        let later = 10 * (limits::ISSUER_LEASE_MS + limits::ISSUER_QUARANTINE_MS);
        let b = key(Role::Router, "b", 1);
        let fresh = Ask::IssuerSlot { renew: None, more_counters: false };
        assert_eq!(ask(&mut r, later, &b, fresh).unwrap_err().kind, ErrorKind::Busy);
    }

    #[test]
    fn slots_are_renewed_and_rest_and_their_counters_only_grow_to_the_top() {
        let top = RANGES_PER_SLOT - 5;
        let mut r = Registry::new(RegistryConfig { slots: 1, first_range: top, ..config() });
        let (a, b) = (key(Role::Router, "a", 1), key(Role::Router, "b", 1));
        let fresh = || Ask::IssuerSlot { renew: None, more_counters: false };
        let keep = |more_counters| Ask::IssuerSlot { renew: Some(0), more_counters };
        let first = |a: Result<Answer, Refusal>| match a.unwrap() {
            Answer::Slot { slot: 0, first_counter, counters, .. } => {
                assert!((first_counter + counters) >> RoomId::COUNTER_BITS <= 1);
                first_counter / limits::ISSUER_COUNTERS
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(first(ask(&mut r, 0, &a, fresh())), top);
        assert_eq!(first(ask(&mut r, 1, &a, keep(false))), top);
        assert_eq!(first(ask(&mut r, 2, &a, keep(true))), top + 1);
        // A lost answer costs a range, not a slot.
        assert_eq!(first(ask(&mut r, 3, &a, fresh())), top + 2);
        let e = ask(&mut r, 4, &b, fresh()).unwrap_err();
        assert_eq!(e.kind, ErrorKind::Busy);
        let e = ask(&mut r, 4, &b, keep(false)).unwrap_err();
        assert_eq!(e.kind, ErrorKind::NotFound);
        let ended = 3 + grantor_ms(limits::ISSUER_LEASE_MS);
        ask(&mut r, ended, &b, fresh()).unwrap_err();
        // Back to whoever had it last, with fresh counters; to others only after its rest.
        assert_eq!(first(ask(&mut r, ended + 1, &a, keep(false))), top + 3);
        let rested = ended + 1 + grantor_ms(limits::ISSUER_LEASE_MS) + limits::ISSUER_QUARANTINE_MS;
        ask(&mut r, rested - 1, &b, fresh()).unwrap_err();
        assert_eq!(first(ask(&mut r, rested, &b, fresh())), top + 4);
        let e = ask(&mut r, rested, &a, keep(false)).unwrap_err();
        assert_eq!(e.kind, ErrorKind::NotFound);
        // At the top the slot ends; it does not begin again below what workers saw.
        assert_eq!(first(ask(&mut r, rested, &b, keep(false))), top + 4);
        let e = ask(&mut r, rested, &b, keep(true)).unwrap_err();
        assert_eq!(e.kind, ErrorKind::Busy);
    }

    #[test]
    fn a_registry_without_memory_goes_on_above_the_counters_of_an_earlier_one() {
        let a = key(Role::Router, "a", 1);
        let more = |r: &mut Registry, renew: Option<u16>| {
            let asked = Ask::IssuerSlot { renew, more_counters: true };
            match ask(r, 0, &a, asked).unwrap() {
                Answer::Slot { slot, first_counter, counters, .. } => {
                    (slot, first_counter, first_counter + counters)
                }
                other => panic!("{other:?}"),
            }
        };
        let mut started_us = 1_767_225_600_000_000;
        let mut above = 0;
        for random in [u64::MAX, 0, 7, RANGES_PER_SLOT - 1] {
            let cfg = RegistryConfig { slots: 1, ..RegistryConfig::new("c", random, started_us) };
            let mut r = Registry::new(cfg);
            let (slot, first, mut end) = more(&mut r, None);
            assert!(first >= above, "{first} after {above}");
            assert!(end >> (RoomId::COUNTER_BITS - 1) == 0, "begins in the lower half");
            for _ in 1..10 {
                end = more(&mut r, Some(slot)).2;
            }
            above = end;
            started_us += 10 * RANGE_US;
        }
    }

    #[test]
    fn one_router_cannot_take_every_slot() {
        let mut r = Registry::new(config());
        for start in 0..=limits::ISSUER_SLOTS_PER_ROUTER_MAX as u8 {
            let answer = ask(
                &mut r,
                0,
                &key(Role::Router, "r", start),
                Ask::IssuerSlot { renew: None, more_counters: false },
            );
            assert_eq!(answer.is_ok(), usize::from(start) < limits::ISSUER_SLOTS_PER_ROUTER_MAX);
        }
        assert_eq!(r.counts().slots, limits::ISSUER_SLOTS_PER_ROUTER_MAX);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Wait(u64),
        Register(u8, u8),
        Renew(u8, u8),
        Deregister(u8, u8),
        Lost(u8, u8),
        Slot(u8, u8, bool, bool),
        Read,
    }
    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (0u64..4_000).prop_map(Step::Wait),
            1 => (0u64..300_000).prop_map(Step::Wait),
            4 => (0u8..4, 0u8..4).prop_map(|(i, s)| Step::Register(i, s)),
            4 => (0u8..4, 0u8..4).prop_map(|(i, s)| Step::Renew(i, s)),
            1 => (0u8..4, 0u8..4).prop_map(|(i, s)| Step::Deregister(i, s)),
            1 => (0u8..4, 0u8..4).prop_map(|(i, s)| Step::Lost(i, s)),
            4 => (0u8..3, 0u8..3, any::<bool>(), any::<bool>())
                .prop_map(|(i, s, k, m)| Step::Slot(i, s, k, m)),
            2 => Just(Step::Read),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
        #[test]
        fn invariants_hold_for_every_sequence(
            steps in prop::collection::vec(step(), 1..120),
            random in any::<u64>(),
        ) {
            let cfg = RegistryConfig {
                workers_max: 3, slots: 3, random, worker_keep_ms: 60_000,
                first_range: RANGES_PER_SLOT - 1 - random % 20,
                ..RegistryConfig::new("c", random, 1)
            };
            let mut r = Registry::new(cfg);
            let mut now = 0;
            // What a holder may believe, in the holder's favour: until when, by the grantor's count.
            let mut lease: HashMap<Identity, (Incarnation, u64)> = HashMap::new();
            let mut epochs: HashMap<Identity, (u64, Incarnation)> = HashMap::new();
            let mut issuers: HashMap<WorkerKey, (u16, u64)> = HashMap::new();
            let mut given: HashMap<u16, (u64, WorkerKey)> = HashMap::new();
            let (mut cursor, mut seen) = (Cursor::default(), BTreeMap::new());
            for s in steps {
                let worker = |i: u8, s: u8| {
                    key(if i < 2 { Role::Prefill } else { Role::Decode }, &format!("w{i}"), s)
                };
                match s {
                    Step::Wait(d) => now += d,
                    Step::Register(i, s) => {
                        let w = worker(i, s);
                        if let Ok(Answer::Registered { epoch, lease_ms, .. }) = register(&mut r, now, &w) {
                            if let Some(&(last, start)) = epochs.get(&w.identity) {
                                prop_assert!(epoch > last || (epoch == last && start == w.incarnation));
                            }
                            epochs.insert(w.identity.clone(), (epoch, w.incarnation));
                            lease.insert(w.identity, (w.incarnation, now + grantor_ms(lease_ms)));
                        }
                    }
                    Step::Renew(i, s) => {
                        let w = worker(i, s);
                        let held = lease.get(&w.identity).copied();
                        let lives = held.is_some_and(|(s, until)| s == w.incarnation && now < until);
                        let answer = ask(&mut r, now, &w, Ask::Renew(Load::default()));
                        prop_assert_eq!(answer.is_ok(), lives);
                        if let Ok(Answer::Renewed { lease_ms }) = answer {
                            lease.insert(w.identity, (w.incarnation, now + grantor_ms(lease_ms)));
                        }
                    }
                    Step::Deregister(i, s) => {
                        let w = worker(i, s);
                        if ask(&mut r, now, &w, Ask::Deregister).is_ok() {
                            prop_assert_eq!(lease.remove(&w.identity).map(|l| l.0), Some(w.incarnation));
                        }
                    }
                    Step::Lost(i, s) => r.lost(ms(now), &worker(i, s)),
                    Step::Slot(i, s, keep, more_counters) => {
                        let w = key(Role::Router, &format!("r{i}"), s);
                        let renew = issuers.get(&w).map(|s| s.0).filter(|_| keep);
                        if let Ok(Answer::Slot { slot, first_counter, counters, lease_ms }) =
                            ask(&mut r, now, &w, Ask::IssuerSlot { renew, more_counters })
                        {
                            let others = issuers.iter().any(|(k, &(s, until))| *k != w && s == slot && now < until);
                            prop_assert!(!others, "slot {} has two live issuers", slot);
                            if let Some((last, owner)) = given.get(&slot) {
                                let same = *last == first_counter && *owner == w;
                                prop_assert!(first_counter > *last || same, "counters given twice");
                            }
                            given.insert(slot, (first_counter, w.clone()));
                            prop_assert!((first_counter + counters - 1) >> RoomId::COUNTER_BITS == 0);
                            prop_assert!(first_counter.is_multiple_of(counters));
                            issuers.insert(w, (slot, now + grantor_ms(lease_ms)));
                        }
                    }
                    Step::Read => cursor = follow(&mut r, now, cursor, &mut seen).0,
                }
                r.handle_timeout(ms(now));
                prop_assert!(r.poll_timeout().is_none_or(|t| t > ms(now)));
                let listed = all(&mut r, now);
                for w in &listed {
                    let key = &w.registration.worker.key;
                    let lives = lease.get(&key.identity).is_some_and(|&(s, until)| {
                        s == key.incarnation && now < until
                    });
                    prop_assert_eq!(w.alive, lives);
                }
                // Only one entry an identity, and no live worker is left out.
                let live = lease.values().filter(|l| now < l.1).count();
                prop_assert_eq!(listed.iter().filter(|w| w.alive).count(), live);
                prop_assert_eq!(r.counts().alive, live);
                prop_assert!(listed.len() <= 3);
                prop_assert_eq!(r.timers.len(), r.workers.len());
                prop_assert_eq!(r.by_revision.len(), r.workers.len());
            }
            // A reader that follows the log ends with what a new reader sees.
            follow(&mut r, now, cursor, &mut seen);
            let live = |v: &[WorkerView]| v.iter().filter(|w| w.alive).cloned().collect::<Vec<_>>();
            let followed: Vec<_> = seen.values().cloned().collect();
            prop_assert_eq!(live(&followed), live(&all(&mut r, now)));
        }
    }
}
