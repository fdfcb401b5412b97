//! What the coordinator knows of the cluster, and which pairs it would try.
//!
//! A [`ClusterView`] is a snapshot: it never changes, and it is a hint. The decode worker alone
//! decides. In: pages of the registry. Out: snapshots, scores, and an order of candidates with a
//! reason for each one that is left out. A candidate is a pair of instances, each with all its
//! ranks; what fits is known with the snapshot ([`crate::instance`]).

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use kvlane_proto::layout::Difference;
use kvlane_proto::msg::service::{Cursor, Load, WorkerAddress, WorkerView};
use kvlane_proto::{Error, ErrorKind, Identity, Role, Time, WorkerKey, limits};
use kvlane_transport::service_client::Page;

use crate::instance::{Fit, Fits, Instance, Routes, Shapes};

/// Prefill instances that turned out to be gone (the view may learn it later), by their first rank.
pub(crate) type Avoid = BTreeMap<Identity, String>;

/// Pairs that one request tries.
const CANDIDATES_MAX: usize = 8;

/// Rooms that this router reserved at workers since they last said how they are doing.
///
/// A worker whose load is the same as before says nothing new, so what was counted is dropped once
/// the worker must have had its say.
#[derive(Debug)]
pub(crate) struct Recent {
    /// How long a worker may take to say how it is doing, and the snapshot to know.
    keep_ms: u64,
    rooms: HashMap<Identity, (u32, Time)>,
}

impl Recent {
    /// For snapshots that are brought up to date every `refresh_ms`.
    pub(crate) fn new(refresh_ms: u64) -> Self {
        // Workers renew at a third of their lease.
        let keep_ms = (limits::WORKER_LEASE_MS / 3).saturating_add(refresh_ms);
        Self { keep_ms, rooms: HashMap::new() }
    }
    /// A room was reserved.
    pub(crate) fn add(&mut self, now: Time, worker: &Identity) {
        let (rooms, since) = self.rooms.entry(worker.clone()).or_insert((0, now));
        if since.plus_ms(self.keep_ms) <= now {
            (*rooms, *since) = (0, now);
        }
        *rooms = rooms.saturating_add(1);
    }
    /// The worker has said how it is doing.
    pub(crate) fn said(&mut self, worker: &Identity) {
        self.rooms.remove(worker);
    }
    /// Drops what is too old to tell.
    pub(crate) fn expire(&mut self, now: Time) {
        self.rooms.retain(|_, (_, since)| now < since.plus_ms(self.keep_ms));
    }
    fn rooms(&self, worker: &Identity) -> u32 {
        self.rooms.get(worker).map_or(0, |r| r.0)
    }
}

/// How good a choice is: whether it is suspected, then what waits, runs and is taken.
pub(crate) type Cost = (bool, u32, u32, u32);

/// A worker of a snapshot.
#[derive(Clone, Debug)]
pub struct Member {
    /// What the registry says.
    pub view: WorkerView,
    /// Members of one class have the same pools and engines.
    class: u32,
}

impl Member {
    /// Who it is, and which start.
    pub fn key(&self) -> &WorkerKey {
        &self.view.registration.worker.key
    }
    /// Where it answers.
    pub fn address(&self) -> &WorkerAddress {
        &self.view.registration.worker
    }
    pub(crate) fn class(&self) -> u32 {
        self.class
    }
    /// Smaller is better.
    pub(crate) fn cost(&self, recent: &Recent) -> Cost {
        let Load { rooms, queued, free_lanes, .. } = self.view.load;
        let own = recent.rooms(&self.key().identity);
        (self.view.suspected, queued, rooms.saturating_add(own), u32::MAX - free_lanes)
    }
}

/// A snapshot of the cluster.
#[derive(Clone, Debug, Default)]
pub struct ClusterView {
    members: BTreeMap<Identity, Arc<Member>>,
    instances: Vec<Arc<Instance>>,
    fits: Arc<Fits>,
    /// How far in the registry's log it reaches.
    pub read: Cursor,
}

/// What a pair of instances is worth, as far as the snapshot knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PairScore {
    /// Fields that differ (decode's value first); a pair fits only if there are none.
    pub differences: Vec<Difference>,
    /// Other reasons against the pair: unknown, a rank missing or draining (then no field is
    /// compared), pages that no rank has.
    pub against: Vec<String>,
    /// The load of the prefill's most loaded rank.
    pub prefill: Load,
    /// The load of the decode's most loaded rank; its free lanes are what a room needs.
    pub decode: Load,
}

impl PairScore {
    /// Whether the pair can be tried.
    pub fn is_usable(&self) -> bool {
        self.differences.is_empty() && self.against.is_empty()
    }
}

impl ClusterView {
    /// One worker.
    pub fn worker(&self, identity: &Identity) -> Option<&Arc<Member>> {
        self.members.get(identity)
    }
    /// Every worker known, dead ones included, by identity.
    pub fn workers(&self) -> impl Iterator<Item = &Arc<Member>> {
        self.members.values()
    }
    /// Workers of a role whose lease runs.
    pub fn alive(&self, role: Role) -> impl Iterator<Item = &Arc<Member>> {
        self.workers().filter(move |m| m.view.alive && m.key().identity.role == role)
    }
    /// Whether this very start of a worker is alive, as far as is known.
    pub fn is_alive(&self, key: &WorkerKey) -> bool {
        self.worker(&key.identity).is_some_and(|m| m.view.alive && m.key() == key)
    }

    /// The instances of a role, incomplete ones included.
    pub fn instances(&self, role: Role) -> impl Iterator<Item = &Arc<Instance>> {
        self.instances.iter().filter(move |i| i.role() == role)
    }
    /// The instance of a worker.
    pub fn instance_of(&self, worker: &Identity) -> Option<&Arc<Instance>> {
        self.instances(worker.role).find(|i| i.has(worker))
    }

    /// Whether two instances fit; nobody knows of one that takes no rooms.
    fn fit(&self, prefill: &Instance, decode: &Instance) -> Option<&Fit> {
        let takes_rooms = prefill.refusal().is_none() && decode.refusal().is_none();
        self.fits.get(&(prefill.shape(), decode.shape())).filter(|_| takes_rooms)
    }

    /// Scores the pair of instances that two workers are of. Fields are compared only if both take
    /// rooms.
    pub fn pair_score(&self, prefill: &Identity, decode: &Identity) -> PairScore {
        let mut score = PairScore::default();
        let mut find = |identity: &Identity, role| {
            let found = self.instance_of(identity).filter(|i| i.role() == role);
            match found {
                None => score.against.push(format!("{identity}: no such {role} worker is known")),
                Some(i) => score.against.extend(i.why_not().map(str::to_string)),
            }
            found
        };
        let (p, d) = (find(prefill, Role::Prefill), find(decode, Role::Decode));
        if let (Some(p), Some(d)) = (p, d)
            && let Some(Err(misfit)) = self.fit(p, d)
        {
            if misfit.differences.is_empty() {
                score.against.push(misfit.say(p, d));
            }
            score.differences.clone_from(&misfit.differences);
        }
        score.prefill = p.map(|i| i.load()).unwrap_or_default();
        score.decode = d.map(|i| i.load()).unwrap_or_default();
        score
    }

    /// The pairs to try, best first, and why every other instance is left out.
    pub(crate) fn candidates(
        &self,
        prefill: Option<&Identity>,
        decode: Option<&Identity>,
        avoid: &Avoid,
        recent: &Recent,
        turn: usize,
    ) -> Candidates {
        let mut out = Candidates::default();
        let asked = |role, only: Option<&Identity>| -> Vec<&Arc<Instance>> {
            self.instances(role).filter(|i| only.is_none_or(|o| i.has(o))).collect()
        };
        let mut usable: Vec<(Cost, &Arc<Instance>)> = Vec::new();
        for p in asked(Role::Prefill, prefill) {
            match p.refusal() {
                _ if avoid.contains_key(p.lead()) => {}
                Some((kind, why)) => out.refuse(*kind, why.clone()),
                None => usable.push((p.cost(recent), p)),
            }
        }
        let mut decodes = asked(Role::Decode, decode);
        // Ties go round: each request begins at another instance.
        let turned = decodes.len().max(1);
        decodes.rotate_left(turn % turned);
        decodes.sort_by_cached_key(|d| d.cost(recent));
        // Instances of one shape have the same choice.
        let mut best_for: HashMap<u32, Option<_>> = HashMap::new();
        for d in decodes {
            if let Some((kind, why)) = d.refusal() {
                out.refuse(*kind, why.clone());
                continue;
            }
            let best = best_for.entry(d.shape()).or_insert_with(|| {
                let fitting: Vec<_> = usable
                    .iter()
                    .filter_map(|(cost, p)| Some((cost, (*p, self.fit(p, d)?.as_ref().ok()?))))
                    .collect();
                let turn = turn % fitting.len().max(1);
                let turned = fitting[turn..].iter().chain(&fitting[..turn]);
                turned.min_by_key(|(cost, _)| *cost).map(|(_, best)| *best)
            });
            match (*best, usable.first()) {
                (Some((p, routes)), _) if out.pairs.len() < CANDIDATES_MAX => {
                    out.pairs.push(Pair {
                        prefill: Arc::clone(p),
                        decode: Arc::clone(d),
                        routes: Arc::clone(routes),
                    })
                }
                (Some(_), _) => {}
                (None, Some((_, p))) => {
                    if let Some(Err(misfit)) = self.fit(p, d) {
                        out.refuse(ErrorKind::Incompatible, misfit.say(p, d));
                    }
                }
                (None, None) => {
                    let why = format!("{}: no prefill worker that could send to it", d.label());
                    out.refuse(ErrorKind::NotFound, why);
                }
            }
        }
        for p in avoid.values() {
            out.refuse(ErrorKind::PeerLost, format!("{p}: it cannot be reached"));
        }
        for (role, only) in [(Role::Prefill, prefill), (Role::Decode, decode)] {
            let lacks = |o: &&Identity| !self.instances(role).any(|i| i.has(o));
            if let Some(only) = only.filter(lacks) {
                match self.worker(only).filter(|m| m.key().identity.role == role) {
                    Some(m) => out.refuse(
                        ErrorKind::LeaseExpired,
                        format!("{}: its lease has ended", m.key()),
                    ),
                    None => out.refuse(
                        ErrorKind::NotFound,
                        format!("{only}: no such {role} worker is known"),
                    ),
                }
            } else if self.instances(role).next().is_none() {
                out.refuse(ErrorKind::NotFound, format!("no {role} worker is registered"));
            }
        }
        out
    }
}

/// Two instances that fit.
#[derive(Clone, Debug)]
pub(crate) struct Pair {
    pub(crate) prefill: Arc<Instance>,
    pub(crate) decode: Arc<Instance>,
    pub(crate) routes: Arc<Routes>,
}

/// What a request may try, and what was considered and left out.
#[derive(Debug, Default)]
pub(crate) struct Candidates {
    pub(crate) pairs: Vec<Pair>,
    refused: Vec<(ErrorKind, String)>,
}

impl Candidates {
    /// Notes why a candidate is out.
    pub(crate) fn refuse(&mut self, kind: ErrorKind, why: String) {
        self.refused.push((kind, why));
    }
    /// Notes why a decode instance that was asked again is out, instead of what it said before.
    pub(crate) fn refuse_again(&mut self, decode: &Instance, e: &Error) {
        let before = format!("{}: ", decode.label());
        self.refused.retain(|(_, why)| !why.starts_with(&before));
        self.refuse(e.kind(), format!("{before}{e}"));
    }
    /// The error of a request that nobody took: names each one considered.
    pub(crate) fn into_error(self, what: &'static str) -> Error {
        const SHOWN: usize = 16;
        // Whoever was asked comes last and says most; then what a change of workers would fix.
        let by_worth = [
            ErrorKind::Busy,
            ErrorKind::DeadlineExceeded,
            ErrorKind::NoPath,
            ErrorKind::PeerLost,
            ErrorKind::StaleIncarnation,
            ErrorKind::Incompatible,
            ErrorKind::Draining,
            ErrorKind::LeaseExpired,
        ];
        let has = |k: &ErrorKind| self.refused.iter().any(|(r, _)| r == k);
        let other = self.refused.iter().map(|r| r.0).find(|k| *k != ErrorKind::NotFound);
        let kind = by_worth.into_iter().find(has).or(other).unwrap_or(ErrorKind::NotFound);
        let left_off = self.refused.len().saturating_sub(SHOWN);
        let mut e = Error::new(kind, what);
        for (kind, why) in self.refused.iter().rev().take(SHOWN) {
            e = e.with("considered", format!("{}: {why}", kind.code()));
        }
        if left_off > 0 {
            e = e.with("and_more", left_off);
        }
        e.hint(match kind {
            ErrorKind::Busy => "wait longer, or add decode workers",
            ErrorKind::Incompatible => {
                "pair model servers of one model and dtype, with page sizes that are multiples of each other"
            }
            _ => "see each worker's reason",
        })
    }
}

/// Follows the registry's log.
#[derive(Debug, Default)]
pub(crate) struct Follower {
    view: ClusterView,
    /// Workers that go by then: dead ones, and those that the service knew before it forgot
    /// everything unless they register again.
    leaving: HashMap<Identity, Time>,
    shapes: Shapes,
    changed: bool,
}

impl Follower {
    pub(crate) fn cursor(&self) -> Cursor {
        self.view.read
    }

    /// Takes a page; `grace_ms` is how long workers have to register again after a reset.
    pub(crate) fn take(&mut self, now: Time, page: Page, grace_ms: u64) {
        if page.reset {
            let until = now.plus_ms(grace_ms);
            self.leaving =
                self.view.members.keys().map(|identity| (identity.clone(), until)).collect();
        }
        self.changed |= page.reset || !page.workers.is_empty();
        for view in page.workers {
            let identity = view.registration.worker.key.identity.clone();
            // The service checks them too; geometry that makes no sense is not reckoned with.
            if let Err(e) = view.registration.check() {
                metrics::counter!("kvlane_coordinator_bad_workers_total").increment(1);
                tracing::warn!(worker = %view.registration.worker.key, error = %e, "ignored");
                continue;
            }
            let class = self.shapes.class_of(&view.registration);
            // Dead ones stay a while, so that a refusal can name them.
            if view.alive {
                self.leaving.remove(&identity);
            } else {
                self.leaving.insert(identity.clone(), now.plus_ms(limits::WORKER_KEEP_MS));
            }
            self.view.members.insert(identity, Arc::new(Member { view, class }));
        }
        self.view.read = page.next;
    }

    /// Drops those whose time is over.
    pub(crate) fn expire(&mut self, now: Time) {
        let gone: Vec<Identity> =
            self.leaving.iter().filter(|c| *c.1 <= now).map(|c| c.0.clone()).collect();
        for identity in gone {
            self.leaving.remove(&identity);
            self.view.members.remove(&identity);
            self.changed = true;
        }
    }

    /// A snapshot, if anything has changed since the last.
    pub(crate) fn snapshot(&mut self) -> Option<Arc<ClusterView>> {
        if !std::mem::take(&mut self.changed) {
            return None;
        }
        let view = &mut self.view;
        (view.instances, view.fits) = self.shapes.form(&view.members, &view.instances);
        Some(Arc::new(view.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvlane_proto::Incarnation;
    use kvlane_proto::Layout;
    use kvlane_proto::layout::{Coordinates, Dtype, KvKind, Order};
    use kvlane_proto::msg::service::Registration;

    fn none() -> Avoid {
        Avoid::new()
    }

    fn worker(role: Role, name: &str, change: impl FnOnce(&mut WorkerView)) -> WorkerView {
        let identity = Identity::new("c", role, name, 0).unwrap();
        let key = WorkerKey { identity, incarnation: Incarnation([1; 16]) };
        let mut view = WorkerView {
            registration: Registration {
                worker: WorkerAddress { key, address: "h:1".into() },
                pools: vec![Layout {
                    model: "tiny".into(),
                    layers: 4,
                    first_layer: 0,
                    kv_heads: 2,
                    kv_heads_total: 2,
                    head_dim: 8,
                    dtype: Dtype::Bf16,
                    page_tokens: 4,
                    window_tokens: 0,
                    order: Order::Nhd,
                    kind: KvKind::Split,
                    at: Coordinates::SINGLE,
                }],
                pool_blocks: 8,
                engines: vec!["tcp".into()],
                serving: String::new(),
                build: String::new(),
            },
            load: Load::default(),
            alive: true,
            suspected: false,
            epoch: 1,
        };
        change(&mut view);
        view
    }
    fn page(log: u64, reset: bool, workers: Vec<WorkerView>) -> Page {
        Page { next: Cursor { log, revision: 1, began: 1 }, reset, workers, more: false }
    }
    fn view(workers: Vec<WorkerView>) -> Arc<ClusterView> {
        let mut f = Follower::default();
        f.take(Time(0), page(1, true, workers), 0);
        f.snapshot().unwrap()
    }
    fn names(c: &Candidates) -> Vec<(String, String)> {
        let name = |i: &Instance| i.lead().instance.clone();
        c.pairs.iter().map(|c| (name(&c.prefill), name(&c.decode))).collect()
    }

    #[test]
    fn the_least_loaded_come_first_and_own_reservations_count_at_once() {
        let v = view(vec![
            worker(Role::Prefill, "p0", |w| w.load.rooms = 5),
            worker(Role::Prefill, "p1", |w| w.load.rooms = 4),
            worker(Role::Decode, "d0", |w| w.load.rooms = 2),
            worker(Role::Decode, "d1", |w| w.load.rooms = 1),
            worker(Role::Decode, "d2", |w| w.load.queued = 1),
            worker(Role::Decode, "d3", |w| w.suspected = true),
        ]);
        let mut recent = Recent::new(100);
        let order = |c: Candidates| -> Vec<String> {
            names(&c).into_iter().map(|(p, d)| format!("{p}{d}")).collect()
        };
        let c = v.candidates(None, None, &none(), &recent, 0);
        assert_eq!(order(c), ["p1d1", "p1d0", "p1d2", "p1d3"]);
        for (role, name) in [(Role::Decode, "d1"), (Role::Prefill, "p1")] {
            let identity = Identity::new("c", role, name, 0).unwrap();
            recent.add(Time(0), &identity);
            recent.add(Time(0).plus_ms(700), &identity);
        }
        let first = |r: &Recent| order(v.candidates(None, None, &none(), r, 0))[0].clone();
        assert_eq!(first(&recent), "p0d0");
        // Only until the worker must have said so itself, though it said nothing new.
        let late = Time(0).plus_ms(limits::WORKER_LEASE_MS / 3 + 100);
        recent.expire(Time(late.0 - 1));
        assert_eq!(first(&recent), "p0d0");
        recent.expire(late);
        assert_eq!(first(&recent), "p1d1");
        assert!(recent.rooms.is_empty());
    }

    #[test]
    fn a_steady_trickle_does_not_add_up() {
        let mut recent = Recent::new(100);
        let d = Identity::new("c", Role::Decode, "d", 0).unwrap();
        for second in 0..1_000 {
            recent.add(Time(0).plus_ms(1_000 * second), &d);
        }
        assert!(recent.rooms(&d) <= 2, "{}", recent.rooms(&d));
        recent.said(&d);
        assert_eq!(recent.rooms(&d), 0);
    }

    #[test]
    fn ties_go_round_at_both_legs() {
        let mut workers = Vec::new();
        for i in 0..3 {
            workers.push(worker(Role::Prefill, &format!("p{i}"), |_| {}));
            workers.push(worker(Role::Decode, &format!("d{i}"), |_| {}));
        }
        let v = view(workers);
        let first =
            |turn| names(&v.candidates(None, None, &none(), &Recent::new(0), turn))[0].clone();
        let seen: std::collections::HashSet<_> = (0..3).map(first).collect();
        assert_eq!(seen.len(), 3);
    }

    #[test]
    fn every_worker_that_is_left_out_has_its_reason() {
        let v = view(vec![
            worker(Role::Prefill, "p", |_| {}),
            worker(Role::Decode, "dead", |w| w.alive = false),
            worker(Role::Decode, "drains", |w| w.load.draining = true),
            worker(Role::Decode, "dtype", |w| w.registration.pools[0].dtype = Dtype::Fp16),
            worker(Role::Decode, "engine", |w| w.registration.engines = vec!["shm".into()]),
            worker(Role::Decode, "replica", |w| w.registration.pools[0].at.dp = (1, 2)),
        ]);
        let c = v.candidates(None, None, &none(), &Recent::new(0), 0);
        assert_eq!(names(&c), [("p".to_string(), "replica".to_string())]);
        let e = c.into_error("x");
        let text = e.to_string();
        for why in [
            "dead/0@010101010101: its lease has ended",
            "drains/0@010101010101: it drains",
            "dtype: decode fp16 / prefill bf16",
            "engines: decode shm / prefill tcp",
        ] {
            assert!(text.contains(why), "{text}");
        }
        assert_eq!(e.kind(), ErrorKind::Incompatible);
        let empty =
            view(vec![]).candidates(None, None, &none(), &Recent::new(0), 0).into_error("x");
        assert_eq!(empty.kind(), ErrorKind::NotFound);
        assert!(empty.to_string().contains("no decode worker is registered"), "{empty}");
    }

    #[test]
    fn a_service_that_forgot_everything_does_not_empty_the_view_at_once() {
        let t = |ms| Time(0).plus_ms(ms);
        let mut f = Follower::default();
        let (a, b) = (worker(Role::Decode, "a", |_| {}), worker(Role::Decode, "b", |_| {}));
        f.take(t(0), page(1, true, vec![a.clone(), b]), 5_000);
        f.take(t(10), page(2, true, vec![]), 5_000);
        f.expire(t(5_009));
        assert_eq!(f.snapshot().unwrap().alive(Role::Decode).count(), 2);
        f.take(t(5_009), page(2, false, vec![a]), 5_000);
        f.expire(t(5_010));
        let v = f.snapshot().unwrap();
        let left: Vec<_> = v.workers().map(|m| m.key().identity.instance.as_str()).collect();
        assert_eq!(left, ["a"]);
        assert!(f.snapshot().is_none());
        // A dead one stays for its reason, but not for ever.
        f.take(t(6_000), page(2, false, vec![worker(Role::Decode, "a", |w| w.alive = false)]), 0);
        f.expire(t(6_000 + limits::WORKER_KEEP_MS - 1));
        assert_eq!(f.snapshot().unwrap().workers().count(), 1);
        f.expire(t(6_000 + limits::WORKER_KEEP_MS));
        assert_eq!(f.snapshot().unwrap().workers().count(), 0);
    }

    /// One of `of` ranks of a model with eight heads.
    fn rank(
        role: Role,
        (name, rank, of): (&str, u32, u32),
        change: impl FnOnce(&mut WorkerView),
    ) -> WorkerView {
        worker(role, name, |w| {
            w.registration.worker.key.identity.rank = rank;
            let l = &mut w.registration.pools[0];
            (l.kv_heads, l.kv_heads_total, l.at.tp) = (8 / of, 8, (rank, of));
            change(w);
        })
    }
    fn instance(role: Role, name: &str, of: u32) -> Vec<WorkerView> {
        (0..of).map(|n| rank(role, (name, n, of), |_| {})).collect()
    }
    fn refusals(v: &ClusterView) -> String {
        v.candidates(None, None, &none(), &Recent::new(0), 0).into_error("x").to_string()
    }

    #[test]
    fn instances_are_told_apart_by_name_and_replica_and_single_ranks_stand_alone() {
        let mut workers = instance(Role::Prefill, "p", 4);
        // Two data-parallel replicas of two ranks each, under one name.
        for n in 0..4 {
            workers.push(rank(Role::Decode, ("d", n, 4), |w| {
                let l = &mut w.registration.pools[0];
                (l.kv_heads, l.at.tp, l.at.dp) = (4, (n % 2, 2), (n / 2, 2));
            }));
        }
        for n in 0..2 {
            workers.push(worker(Role::Decode, "s", |w| {
                w.registration.worker.key.identity.rank = n;
                let l = &mut w.registration.pools[0];
                (l.kv_heads, l.kv_heads_total) = (8, 8);
            }));
        }
        let v = view(workers);
        let c = v.candidates(None, None, &none(), &Recent::new(0), 0);
        let mut found: Vec<_> = c
            .pairs
            .iter()
            .map(|pair| {
                let ranks = pair.decode.ranks().iter();
                let ranks: Vec<String> = ranks.map(|m| m.key().identity.to_string()).collect();
                let sources: Vec<_> = (0..ranks.len()).map(|d| pair.routes.sources(d)).collect();
                format!("{} {sources:?}", ranks.join(" "))
            })
            .collect();
        found.sort();
        assert_eq!(
            found,
            [
                "c/decode/d/0 c/decode/d/1 [[0, 1], [2, 3]]",
                "c/decode/d/2 c/decode/d/3 [[0, 1], [2, 3]]",
                "c/decode/s/0 [[0, 1, 2, 3]]",
                "c/decode/s/1 [[0, 1, 2, 3]]",
            ]
        );
        let third = Identity::new("c", Role::Decode, "d", 3).unwrap();
        let c = v.candidates(None, Some(&third), &none(), &Recent::new(0), 0);
        assert!(c.pairs.len() == 1 && c.pairs[0].decode.has(&third));
    }

    #[test]
    fn an_instance_is_as_loaded_as_its_most_loaded_rank() {
        let mut workers = instance(Role::Prefill, "p", 1);
        let loads = |name: &'static str, rooms: [u32; 2], suspected: bool| {
            (0..).zip(rooms).map(move |(n, rooms)| {
                rank(Role::Decode, (name, n, 2), |w| {
                    (w.load.rooms, w.suspected) = (rooms, suspected && n == 1);
                })
            })
        };
        workers.extend(loads("even", [3, 3], false));
        workers.extend(loads("skewed", [0, 4], false));
        workers.extend(loads("shaky", [0, 0], true));
        let v = view(workers);
        let mut recent = Recent::new(100);
        let order = |recent: &Recent| -> Vec<String> {
            names(&v.candidates(None, None, &none(), recent, 0)).into_iter().map(|n| n.1).collect()
        };
        assert_eq!(order(&recent), ["even", "skewed", "shaky"]);
        let even = Identity::new("c", Role::Decode, "even", 1).unwrap();
        recent.add(Time(0), &even);
        recent.add(Time(0), &even);
        assert_eq!(order(&recent), ["skewed", "even", "shaky"]);
        let p = Identity::new("c", Role::Prefill, "p", 0).unwrap();
        let skewed = Identity::new("c", Role::Decode, "skewed", 0).unwrap();
        assert_eq!(v.pair_score(&p, &skewed).decode.rooms, 4);
    }

    #[test]
    fn ranks_that_are_missing_or_contradict_each_other_are_named() {
        let p = || instance(Role::Prefill, "p", 1);
        let with = |decodes: Vec<WorkerView>| view(p().into_iter().chain(decodes).collect());
        let d = |n, of, change: fn(&mut WorkerView)| rank(Role::Decode, ("d", n, of), change);
        let text = refusals(&with(vec![d(1, 4, |_| {}), d(2, 4, |w| w.alive = false)]));
        let why = "c/decode/d: 3 of 4 ranks are missing: nobody is tp 0 of 4; \
                   c/decode/d/2@010101010101: its lease has ended; nobody is tp 3 of 4";
        assert!(text.contains(why), "{text}");
        let text = refusals(&with(vec![d(0, 2, |_| {}), d(1, 4, |_| {})]));
        assert!(text.contains("differ in size: tp 2 / 4"), "{text}");
        let twice = d(1, 2, |w| w.registration.pools[0].at.tp.0 = 0);
        let text = refusals(&with(vec![d(0, 2, |_| {}), twice]));
        assert!(text.contains("are both tp 0 of 2"), "{text}");
        // A size that nobody can have is no reason to count that far.
        let huge = d(0, 8, |w| {
            let at = &mut w.registration.pools[0].at;
            (at.pp, at.cp) = ((0, 1 << 16), (0, 1 << 16));
        });
        let text = refusals(&with(vec![huge]));
        assert!(text.contains(": 34359738367 of 34359738368 ranks are missing"), "{text}");
        // The dead of a time when it was larger do not count.
        let smaller = with(vec![d(0, 2, |_| {}), d(1, 2, |_| {}), d(3, 4, |w| w.alive = false)]);
        let c = smaller.candidates(None, None, &none(), &Recent::new(0), 0);
        assert_eq!(names(&c), [("p".to_string(), "d".to_string())]);
        let dead = Identity::new("c", Role::Decode, "d", 3).unwrap();
        let c = smaller.candidates(None, Some(&dead), &none(), &Recent::new(0), 0);
        let text = c.into_error("x").to_string();
        assert!(text.contains("c/decode/d/3@010101010101: its lease has ended"), "{text}");
    }

    #[test]
    fn the_two_ranks_that_do_not_fit_are_named_with_the_field() {
        let mut workers = instance(Role::Prefill, "p", 2);
        workers.push(rank(Role::Decode, ("d", 0, 2), |_| {}));
        workers.push(rank(Role::Decode, ("d", 1, 2), |w| {
            w.registration.pools[0].dtype = Dtype::Fp16;
        }));
        let text = refusals(&view(workers));
        let why = "c/decode/d/1@010101010101 with c/prefill/p/0@010101010101: \
                   dtype: decode fp16 / prefill bf16";
        assert!(text.contains(why), "{text}");
        // Engines count between those that have something for each other only.
        let engines = |n: u32| vec![format!("shm{n}")];
        let both = |role, name: &'static str, of: u32| {
            (0..of).map(move |n| {
                rank(role, (name, n, of), |w| w.registration.engines = engines(n * 2 / of))
            })
        };
        let v = view(both(Role::Prefill, "p", 2).chain(both(Role::Decode, "d", 4)).collect());
        assert_eq!(v.candidates(None, None, &none(), &Recent::new(0), 0).pairs.len(), 1);
        let v = view(both(Role::Prefill, "p", 2).chain(both(Role::Decode, "d", 1)).collect());
        let why = "c/decode/d/0@010101010101 with c/prefill/p/1@010101010101: \
                   engines: decode shm0 / prefill shm1";
        let text = refusals(&v);
        assert!(text.contains(why), "{text}");
        // Layers that no rank has.
        let mut short = instance(Role::Prefill, "p", 1);
        short[0].registration.pools[0].layers = 3;
        short.extend(instance(Role::Decode, "d", 2));
        let text = refusals(&view(short));
        assert!(text.contains("no rank sends") && text.contains("layer=3"), "{text}");
    }

    #[test]
    fn what_fits_is_found_out_once_for_all_instances_of_a_shape() {
        let mut f = Follower::default();
        let mut workers = Vec::new();
        for n in 0..8 {
            workers.extend(instance(Role::Prefill, &format!("p{n}"), 2));
            workers.extend(instance(Role::Decode, &format!("d{n}"), 4));
        }
        let busy = WorkerView { load: Load { rooms: 9, ..Load::default() }, ..workers[0].clone() };
        f.take(Time(0), page(1, true, workers), 0);
        let first = f.snapshot().unwrap();
        f.take(Time(0), page(1, false, vec![busy]), 0);
        let second = f.snapshot().unwrap();
        let pairs = |v: &ClusterView| v.candidates(None, None, &none(), &Recent::new(0), 1).pairs;
        let routes = &pairs(&first)[0].routes;
        for v in [&first, &second] {
            assert_eq!(v.fits.len(), 1);
            assert!(pairs(v).iter().all(|pair| Arc::ptr_eq(&pair.routes, routes)));
        }
        // Names are shared from snapshot to snapshot until somebody restarts.
        let who = |v: &ClusterView, n| Arc::clone(v.instances(Role::Prefill).nth(n).unwrap().who());
        assert!(Arc::ptr_eq(&who(&first, 0), &who(&second, 0)));
        let restarted = rank(Role::Prefill, ("p0", 1, 2), |w| {
            w.registration.worker.key.incarnation = Incarnation([2; 16]);
        });
        f.take(Time(0), page(1, false, vec![restarted]), 0);
        let third = f.snapshot().unwrap();
        assert!(!Arc::ptr_eq(&who(&second, 0), &who(&third, 0)));
        assert!(Arc::ptr_eq(&who(&second, 1), &who(&third, 1)));
        assert!(pairs(&third).iter().all(|pair| Arc::ptr_eq(&pair.routes, routes)));
    }

    #[test]
    fn a_score_is_what_the_snapshot_knows() {
        let mut workers = instance(Role::Prefill, "p", 2);
        workers.extend(instance(Role::Decode, "d", 4));
        workers.push(worker(Role::Decode, "other", |w| {
            w.registration.pools[0].dtype = Dtype::Fp16;
        }));
        workers.push(worker(Role::Decode, "drains", |w| {
            w.registration.pools[0].dtype = Dtype::Fp16;
            w.load.draining = true;
        }));
        let v = view(workers);
        let p = Identity::new("c", Role::Prefill, "p", 1).unwrap();
        let score =
            |name, rank| v.pair_score(&p, &Identity::new("c", Role::Decode, name, rank).unwrap());
        assert!(score("d", 3).is_usable());
        let other = score("other", 0);
        let fields: Vec<_> = other.differences.iter().map(|d| d.field.as_str()).collect();
        assert!(fields.contains(&"dtype") && other.against.is_empty(), "{other:?}");
        let drains = score("drains", 0);
        assert!(drains.differences.is_empty(), "{drains:?}");
        assert_eq!(drains.against, ["c/decode/drains/0@010101010101: it drains"]);
    }

    #[test]
    fn geometries_are_bounded_and_nonsense_is_ignored() {
        let mut workers = instance(Role::Prefill, "p", 1);
        for n in 0..=crate::SHAPES_MAX {
            workers.push(rank(Role::Decode, (&format!("d{n:03}"), 0, 1), |w| {
                w.registration.engines.push(n.to_string());
            }));
        }
        workers.push(rank(Role::Decode, ("hostile", 0, 1), |w| {
            w.registration.pools[0].kv_heads_total = 0;
        }));
        let v = view(workers);
        assert_eq!(v.fits.len(), crate::SHAPES_MAX);
        let over: Vec<_> = v.instances(Role::Decode).filter_map(|i| i.why_not()).collect();
        assert_eq!(over, ["c/decode/d256/0@010101010101: more than 256 geometries"]);
        assert_eq!(v.workers().count(), crate::SHAPES_MAX + 2);
    }
}
