//! What the coordinator knows of the cluster, and which pairs it would try.
//!
//! A [`ClusterView`] is a snapshot: it never changes, and it is a hint. The decode worker alone
//! decides. In: pages of the registry. Out: snapshots, scores, and an order of candidates with a
//! reason for each one that is left out.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use kvlane_proto::layout::{Coordinates, Difference};
use kvlane_proto::msg::service::{Cursor, Load, WorkerAddress, WorkerView};
use kvlane_proto::{Error, ErrorKind, Identity, Layout, Role, Time, WorkerKey};
use kvlane_transport::service_client::Page;

/// Pairs that one request tries.
const CANDIDATES_MAX: usize = 8;

/// A worker of a snapshot.
#[derive(Clone, Debug)]
pub struct Member {
    /// What the registry says.
    pub view: WorkerView,
    /// Members of one class have layouts that fit.
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
    /// Why it takes no new rooms, if so.
    fn why_not(&self) -> Option<(ErrorKind, String)> {
        let who = self.key();
        if !self.view.alive {
            return Some((ErrorKind::LeaseExpired, format!("{who}: its lease has ended")));
        }
        self.view.load.draining.then(|| (ErrorKind::Draining, format!("{who}: it drains")))
    }
    fn shares_engine(&self, other: &Member) -> bool {
        let theirs = &other.view.registration.engines;
        self.view.registration.engines.iter().any(|e| theirs.contains(e))
    }
    /// Smaller is better.
    fn cost(&self, recent: &HashMap<Identity, u32>) -> (bool, u32, u32, u32) {
        let Load { rooms, queued, free_lanes, .. } = self.view.load;
        let own = recent.get(&self.key().identity).copied().unwrap_or(0);
        (self.view.suspected, queued, rooms.saturating_add(own), u32::MAX - free_lanes)
    }
}

/// A snapshot of the cluster.
#[derive(Clone, Debug, Default)]
pub struct ClusterView {
    members: BTreeMap<Identity, Arc<Member>>,
    /// How far in the registry's log it reaches.
    pub read: Cursor,
}

/// What a pair is worth, as far as the snapshot knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PairScore {
    /// Fields that differ (decode's value first); a pair fits only if there are none.
    pub differences: Vec<Difference>,
    /// Other reasons against the pair: unknown, lease ended, draining.
    pub against: Vec<String>,
    /// The prefill worker's load.
    pub prefill: Load,
    /// The decode worker's load; its free lanes are what a room needs.
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

    /// Scores a pair.
    pub fn pair_score(&self, prefill: &Identity, decode: &Identity) -> PairScore {
        let mut score = PairScore::default();
        let mut find = |identity: &Identity, role| {
            let found = self.worker(identity).filter(|m| m.key().identity.role == role);
            match found {
                None => score.against.push(format!("{identity}: no such {role} worker is known")),
                Some(m) => score.against.extend(m.why_not().map(|w| w.1)),
            }
            found
        };
        let (p, d) = (find(prefill, Role::Prefill), find(decode, Role::Decode));
        if let (Some(p), Some(d)) = (p, d) {
            score.differences = d.view.registration.differences(&p.view.registration);
        }
        score.prefill = p.map(|m| m.view.load).unwrap_or_default();
        score.decode = d.map(|m| m.view.load).unwrap_or_default();
        score
    }

    /// The pairs to try, best first, and why every other decode worker is left out.
    pub(crate) fn candidates(
        &self,
        prefill: Option<&Identity>,
        decode: Option<&Identity>,
        recent: &HashMap<Identity, u32>,
        turn: usize,
    ) -> Candidates {
        let mut out = Candidates::default();
        let asked = |role, only: Option<&Identity>| -> Vec<&Arc<Member>> {
            self.workers()
                .filter(|m| m.key().identity.role == role)
                .filter(|m| only.is_none_or(|o| m.key().identity == *o))
                .collect()
        };
        let mut groups: HashMap<u32, Vec<&Arc<Member>>> = HashMap::new();
        let mut some_prefill = None;
        for p in asked(Role::Prefill, prefill) {
            match p.why_not() {
                Some((kind, why)) => out.refuse(kind, why),
                None => {
                    some_prefill.get_or_insert(p);
                    groups.entry(p.class).or_default().push(p);
                }
            }
        }
        let mut decodes = asked(Role::Decode, decode);
        // Ties go round: each request begins at another worker.
        let turned = decodes.len().max(1);
        decodes.rotate_left(turn % turned);
        decodes.sort_by_cached_key(|d| d.cost(recent));
        for d in decodes {
            if let Some((kind, why)) = d.why_not() {
                out.refuse(kind, why);
                continue;
            }
            let group = groups.get(&d.class).map_or(&[][..], Vec::as_slice);
            let turn = turn % group.len().max(1);
            let turned = group[turn..].iter().chain(&group[..turn]);
            let best = turned.filter(|p| d.shares_engine(p)).min_by_key(|p| p.cost(recent));
            match (best, some_prefill) {
                (Some(p), _) if out.pairs.len() < CANDIDATES_MAX => {
                    out.pairs.push((Arc::clone(p), Arc::clone(d)));
                }
                (Some(_), _) => {}
                (None, Some(p)) => {
                    let fields: Vec<String> = d
                        .view
                        .registration
                        .differences(&p.view.registration)
                        .iter()
                        .map(|f| format!("{}: decode {} / prefill {}", f.field, f.here, f.there))
                        .collect();
                    let why = format!("{} with {}: {}", d.key(), p.key(), fields.join(", "));
                    out.refuse(ErrorKind::Incompatible, why);
                }
                (None, None) => {
                    let why = format!("{}: no prefill worker that could send to it", d.key());
                    out.refuse(ErrorKind::NotFound, why);
                }
            }
        }
        for (role, only) in [(Role::Prefill, prefill), (Role::Decode, decode)] {
            if let Some(only) = only.filter(|o| self.worker(o).is_none()) {
                out.refuse(ErrorKind::NotFound, format!("{only}: no such {role} worker is known"));
            } else if !self.workers().any(|m| m.key().identity.role == role) {
                out.refuse(ErrorKind::NotFound, format!("no {role} worker is registered"));
            }
        }
        out
    }
}

/// What a request may try, and what was considered and left out.
#[derive(Debug, Default)]
pub(crate) struct Candidates {
    pub(crate) pairs: Vec<(Arc<Member>, Arc<Member>)>,
    refused: Vec<(ErrorKind, String)>,
}

impl Candidates {
    /// Notes why a candidate is out.
    pub(crate) fn refuse(&mut self, kind: ErrorKind, why: String) {
        self.refused.push((kind, why));
    }
    /// The error of a request that nobody took: names each one considered.
    pub(crate) fn into_error(self, what: &'static str) -> Error {
        const SHOWN: usize = 16;
        // Whoever was asked comes last and says most; then what a change of workers would fix.
        let by_worth = [
            ErrorKind::Busy,
            ErrorKind::DeadlineExceeded,
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
                "pair workers of one model with the same parallelism, dtype and page size"
            }
            _ => "see each worker's reason",
        })
    }
}

/// Follows the registry's log.
#[derive(Debug, Default)]
pub(crate) struct Follower {
    view: ClusterView,
    /// Workers that the service knew before it forgot everything, and until when they have to
    /// register again.
    carried: HashMap<Identity, Time>,
    classes: HashMap<Layout, u32>,
    changed: bool,
}

impl Follower {
    pub(crate) fn cursor(&self) -> Cursor {
        self.view.read
    }

    /// Takes a page; `grace_ms` is how long workers have to register again after a reset.
    pub(crate) fn take(&mut self, now: Time, page: Page, grace_ms: u64) {
        if page.reset {
            self.classes.clear();
            let until = now.plus_ms(grace_ms);
            self.carried =
                self.view.members.keys().map(|identity| (identity.clone(), until)).collect();
            // Classes were renumbered.
            for member in self.view.members.values_mut() {
                let class = class_of(&mut self.classes, &member.view.registration.layout);
                *member = Arc::new(Member { view: member.view.clone(), class });
            }
        }
        self.changed |= page.reset || !page.workers.is_empty();
        for view in page.workers {
            let identity = view.registration.worker.key.identity.clone();
            let class = class_of(&mut self.classes, &view.registration.layout);
            self.carried.remove(&identity);
            // Dead ones are kept for their reason, until the registry's log starts over.
            self.view.members.insert(identity, Arc::new(Member { view, class }));
        }
        self.view.read = page.next;
    }

    /// Ends the grace of those who did not register again.
    pub(crate) fn expire(&mut self, now: Time) {
        let gone: Vec<Identity> =
            self.carried.iter().filter(|c| *c.1 <= now).map(|c| c.0.clone()).collect();
        for identity in gone {
            self.carried.remove(&identity);
            self.view.members.remove(&identity);
            self.changed = true;
        }
        // Bounded like the registry itself: names that come and go do not add up.
        while self.view.members.len() > kvlane_proto::limits::WORKERS_MAX {
            let dead = self.view.members.iter().find(|m| !m.1.view.alive).map(|m| m.0.clone());
            let Some(dead) = dead else { break };
            self.view.members.remove(&dead);
        }
    }

    /// A snapshot, if anything has changed since the last.
    pub(crate) fn snapshot(&mut self) -> Option<Arc<ClusterView>> {
        std::mem::take(&mut self.changed).then(|| Arc::new(self.view.clone()))
    }
}

fn class_of(classes: &mut HashMap<Layout, u32>, layout: &Layout) -> u32 {
    // Replicas of one model differ in their place only, which is not compared.
    let at = Coordinates { dp: (0, 1), ..layout.at };
    let next = classes.len() as u32;
    *classes.entry(Layout { at, ..layout.clone() }).or_insert(next)
}
