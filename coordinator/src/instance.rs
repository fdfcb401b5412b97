//! Model servers as rooms are placed on them, and which of them fit.
//!
//! An [`Instance`] is every rank of one model server. Each rank says in its layout which it is, and
//! how many there are (tensor, pipeline and context parallel), so an instance knows who is missing.
//! Data-parallel replicas, and model servers of one rank, are instances of their own. In: the
//! workers of a snapshot. Out: instances, each with the reason why it takes no rooms, if it does
//! not; and for each couple of a prefill and a decode instance which rank sends to which.
//!
//! Invariant: what fits is found out once for a couple of geometries, however many instances share
//! them and however many requests ask.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use kvlane_proto::layout::{Coordinates, Difference};
use kvlane_proto::msg::service::{Load, Registration, WorkerAddress};
use kvlane_proto::plan::sources;
use kvlane_proto::{ErrorKind, Identity, Layout, Role, WorkerKey, limits};

use crate::view::{Cost, Member, Recent};

/// Geometries that the instances of one role may have at a time: every couple is compared.
pub const SHAPES_MAX: usize = 256;
/// Ranks that a refusal names one by one.
const MISSING_NAMED: usize = 4;

/// Who one rank is, without how it is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rank {
    pub(crate) worker: WorkerAddress,
    pub(crate) serving: String,
}

impl Rank {
    fn is(&self, r: &Registration) -> bool {
        self.worker == r.worker && self.serving == r.serving
    }
}

/// Every rank of one model server.
#[derive(Clone, Debug)]
pub struct Instance {
    ranks: Vec<Arc<Member>>,
    /// The same in snapshot after snapshot while nobody restarts, so that rooms can share it.
    who: Arc<[Rank]>,
    /// Instances of one shape fit the same ones; meaningless where there is a reason against it.
    shape: u32,
    why_not: Option<(ErrorKind, String)>,
}

impl Instance {
    /// Its ranks in their order; of an incomplete one, those that are known.
    pub fn ranks(&self) -> &[Arc<Member>] {
        &self.ranks
    }
    /// Whether a worker is one of its ranks.
    pub fn has(&self, worker: &Identity) -> bool {
        self.who.iter().any(|r| r.worker.key.identity == *worker)
    }
    /// Why it takes no rooms (a rank is missing or drains), if so.
    pub fn why_not(&self) -> Option<&str> {
        self.why_not.as_ref().map(|w| w.1.as_str())
    }
    /// How its most loaded rank is doing.
    pub fn load(&self) -> Load {
        let loads = self.ranks.iter().map(|m| m.view.load);
        loads.max_by_key(|l| (l.queued, l.rooms, u32::MAX - l.free_lanes)).unwrap_or_default()
    }

    pub(crate) fn who(&self) -> &Arc<[Rank]> {
        &self.who
    }
    pub(crate) fn shape(&self) -> u32 {
        self.shape
    }
    pub(crate) fn refusal(&self) -> Option<&(ErrorKind, String)> {
        self.why_not.as_ref()
    }
    /// Its first rank, which no other instance has.
    pub(crate) fn lead(&self) -> &Identity {
        &self.who[0].worker.key.identity
    }
    pub(crate) fn role(&self) -> Role {
        self.lead().role
    }
    /// How it is called in refusals.
    pub(crate) fn label(&self) -> String {
        label(&self.ranks[0])
    }
    /// The data-parallel rank and size.
    pub(crate) fn dp(&self) -> (u32, u32) {
        place(&self.ranks[0]).dp
    }
    /// Smaller is better; an instance is as good as its worst rank.
    pub(crate) fn cost(&self, recent: &Recent) -> Cost {
        self.ranks.iter().map(|m| m.cost(recent)).max().unwrap_or_default()
    }

    /// Of workers that say they are of one instance, in the order of their ranks; there is at least
    /// one.
    fn of(group: Vec<Arc<Member>>, before: Option<&Arc<Instance>>) -> Self {
        let why_not = why_not(&group);
        let complete = why_not.as_ref().is_none_or(|w| w.0 == ErrorKind::Draining);
        let ranks: Vec<_> = group.into_iter().filter(|m| m.view.alive || !complete).collect();
        let who = match before {
            Some(b) if same(&b.who, &ranks) => Arc::clone(&b.who),
            _ => ranks.iter().map(|m| rank(m)).collect(),
        };
        Self { ranks, who, shape: 0, why_not }
    }
}

fn rank(m: &Member) -> Rank {
    let r = &m.view.registration;
    Rank { worker: r.worker.clone(), serving: r.serving.clone() }
}

fn same(who: &[Rank], ranks: &[Arc<Member>]) -> bool {
    who.len() == ranks.len() && who.iter().zip(ranks).all(|(w, m)| w.is(&m.view.registration))
}

fn place(m: &Member) -> Coordinates {
    m.view.registration.pools.first().map_or(Coordinates::SINGLE, |l| l.at)
}

/// Ranks of an instance with a rank at this place.
fn size(at: &Coordinates) -> u64 {
    [at.tp.1, at.pp.1, at.cp.1].into_iter().map(u64::from).product()
}

fn label(m: &Member) -> String {
    let (at, Identity { cluster, role, instance, .. }) = (place(m), &m.key().identity);
    match (size(&at), at.dp) {
        (1, _) => m.key().to_string(),
        (_, (_, 1)) => format!("{cluster}/{role}/{instance}"),
        (_, (dp, of)) => format!("{cluster}/{role}/{instance} (dp {dp} of {of})"),
    }
}

/// A place in words: along the axes that have more than one rank.
fn at_words(at: &Coordinates) -> String {
    let axes = [("tp", at.tp), ("pp", at.pp), ("cp", at.cp)];
    let said = axes.iter().filter(|(_, (_, of))| *of > 1);
    said.map(|(axis, (n, of))| format!("{axis} {n} of {of}")).collect::<Vec<_>>().join(", ")
}

/// Why the workers of one instance take no rooms.
fn why_not(group: &[Arc<Member>]) -> Option<(ErrorKind, String)> {
    let without_dp = |m: &Member| Coordinates { dp: (0, 1), ..place(m) };
    let sizes = |at: &Coordinates| [("tp", at.tp.1), ("pp", at.pp.1), ("cp", at.cp.1)];
    // Only who lives says how large it is: the dead may be of a time when it was of another size.
    let live = || group.iter().filter(|m| m.view.alive);
    let first = live().next().or(group.first())?;
    let model = without_dp(first);
    let mut taken: HashMap<Coordinates, &Member> = HashMap::new();
    for m in live() {
        let at = without_dp(m);
        if let Some(((axis, a), (_, b))) =
            sizes(&model).into_iter().zip(sizes(&at)).find(|(a, b)| a != b)
        {
            let why = format!("{} and {} differ in size: {axis} {a} / {b}", first.key(), m.key());
            return Some((ErrorKind::Incompatible, why));
        }
        if let Some(other) = taken.insert(at, m) {
            let (a, b) = (other.key(), m.key());
            let why = format!("{a} and {b} are both {}", at_words(&at));
            return Some((ErrorKind::Incompatible, why));
        }
    }
    let dead: HashMap<Coordinates, &Member> =
        group.iter().filter(|m| !m.view.alive).map(|m| (without_dp(m), &**m)).collect();
    let (mut kind, mut missing) = (ErrorKind::NotFound, Vec::new());
    // As many as are there, and a few more: sizes are what somebody says.
    let places = (0..size(&model)).map(|n| {
        let (tp, pp) = (u64::from(model.tp.1), u64::from(model.pp.1));
        let index = |n: u64| n as u32;
        Coordinates {
            tp: (index(n % tp), model.tp.1),
            pp: (index(n / tp % pp), model.pp.1),
            cp: (index(n / tp / pp), model.cp.1),
            dp: model.dp,
        }
    });
    for at in places.filter(|at| !taken.contains_key(at)).take(MISSING_NAMED) {
        missing.push(match dead.get(&at) {
            Some(m) => {
                kind = ErrorKind::LeaseExpired;
                format!("{}: its lease has ended", m.key())
            }
            None => format!("nobody is {}", at_words(&at)),
        });
    }
    let count = size(&model) - taken.len() as u64;
    if count > 0 {
        let named = missing.join("; ");
        let why = match size(&model) {
            1 => named,
            all => format!("{}: {count} of {all} ranks are missing: {named}", label(first)),
        };
        return Some((kind, why));
    }
    let drains = live().find(|m| m.view.load.draining)?;
    Some((ErrorKind::Draining, format!("{}: it drains", drains.key())))
}

/// Which prefill rank sends to which decode rank, numbered in the instances' order.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Routes {
    /// For each decode rank, who sends to it.
    sources: Vec<Vec<usize>>,
}

impl Routes {
    /// The prefill ranks that send to a decode rank.
    pub(crate) fn sources(&self, decode: usize) -> &[usize] {
        self.sources.get(decode).map_or(&[], Vec::as_slice)
    }
    /// The decode ranks that take from a prefill rank.
    pub(crate) fn takers(&self, prefill: usize) -> impl Iterator<Item = usize> {
        let takes = move |d: &usize| self.sources(*d).contains(&prefill);
        (0..self.sources.len()).filter(takes)
    }
}

/// Why two instances do not fit.
#[derive(Clone, Debug)]
pub(crate) struct Misfit {
    decode: usize,
    /// None: it is about all of them together.
    prefill: Option<usize>,
    /// The decode rank's value first.
    pub(crate) differences: Vec<Difference>,
    /// What is wrong where no field differs.
    why: String,
}

impl Misfit {
    /// In words, with the names of two instances that do not fit for this reason.
    pub(crate) fn say(&self, prefill: &Instance, decode: &Instance) -> String {
        let key = |i: &Instance, n: usize| {
            i.ranks.get(n).map_or_else(|| i.label(), |m| m.key().to_string())
        };
        let d = key(decode, self.decode);
        let p = self.prefill.map_or_else(|| prefill.label(), |n| key(prefill, n));
        let fields = self.differences.iter();
        let fields =
            fields.map(|f| format!("{}: decode {} / prefill {}", f.field, f.here, f.there));
        let said: Vec<String> =
            fields.chain((!self.why.is_empty()).then(|| self.why.clone())).collect();
        format!("{d} with {p}: {}", said.join(", "))
    }
}

/// Whether two instances fit: every decode rank gets all it needs from the prefill's ranks, over an
/// engine that both ends have.
fn fit(prefill: &Instance, decode: &Instance) -> Result<Routes, Misfit> {
    let pools: Vec<&[Layout]> =
        prefill.ranks.iter().map(|m| m.view.registration.pools.as_slice()).collect();
    let mut routes = Routes { sources: Vec::new() };
    for (n, d) in decode.ranks.iter().enumerate() {
        let d = &d.view.registration;
        let misfit = |prefill, differences, why| Misfit { decode: n, prefill, differences, why };
        let differ = |p: usize| d.differences(&prefill.ranks[p].view.registration);
        if let Some(p) = pools.iter().position(|p| !Layout::pools_differ(&d.pools, p).is_empty()) {
            return Err(misfit(Some(p), differ(p), String::new()));
        }
        let senders =
            sources(&d.pools, &pools).map_err(|e| misfit(None, Vec::new(), e.to_string()))?;
        // Who sends nothing needs no engine.
        if let Some(&p) = senders.iter().find(|p| !differ(**p).is_empty()) {
            return Err(misfit(Some(p), differ(p), String::new()));
        }
        routes.sources.push(senders);
    }
    let crowd = (0..pools.len()).map(|p| (p, routes.takers(p).count()));
    match crowd.into_iter().find(|(_, takers)| *takers > limits::RANKS_MAX) {
        Some((p, takers)) => Err(Misfit {
            decode: 0,
            prefill: Some(p),
            differences: Vec::new(),
            why: format!("{takers} ranks take from one, at most {} may", limits::RANKS_MAX),
        }),
        None => Ok(routes),
    }
}

pub(crate) type Fit = Result<Arc<Routes>, Misfit>;
/// What fits, by the shapes of prefill and decode.
pub(crate) type Fits = HashMap<(u32, u32), Fit>;

/// Numbers geometries, and remembers which fit.
#[derive(Debug, Default)]
pub(crate) struct Shapes {
    last: u32,
    /// Of a rank: its pools and engines.
    classes: HashMap<(Vec<Layout>, Vec<String>), u32>,
    /// Of an instance: its ranks' classes.
    shapes: HashMap<Vec<u32>, u32>,
    fits: Arc<Fits>,
}

impl Shapes {
    pub(crate) fn class_of(&mut self, r: &Registration) -> u32 {
        // Replicas of one model differ in their place only, which is not compared.
        let at = |l: &Layout| Coordinates { dp: (0, 1), ..l.at };
        let pools = r.pools.iter().map(|l| Layout { at: at(l), ..l.clone() }).collect();
        number(&mut self.classes, &mut self.last, (pools, r.engines.clone()))
    }

    /// Parts a snapshot's workers into instances, by name and rank, and finds out which fit.
    pub(crate) fn form(
        &mut self,
        members: &BTreeMap<Identity, Arc<Member>>,
        before: &[Arc<Instance>],
    ) -> (Vec<Arc<Instance>>, Arc<Fits>) {
        let before: HashMap<&WorkerKey, &Arc<Instance>> =
            before.iter().map(|i| (&i.who[0].worker.key, i)).collect();
        let mut groups: BTreeMap<_, Vec<Arc<Member>>> = BTreeMap::new();
        for (Identity { cluster, role, instance, rank }, m) in members {
            let at = place(m);
            let alone = (size(&at) == 1).then_some(rank);
            let name = (cluster, role, instance, alone, at.dp.0);
            groups.entry(name).or_default().push(Arc::clone(m));
        }
        let known = |group: &[Arc<Member>]| {
            let first = group.iter().find(|m| m.view.alive).or(group.first())?;
            before.get(first.key()).copied()
        };
        let mut formed: Vec<Instance> = groups
            .into_values()
            .map(|group| {
                let before = known(&group);
                Instance::of(group, before)
            })
            .collect();

        let mut prefills: BTreeMap<u32, usize> = BTreeMap::new();
        let mut decodes = prefills.clone();
        for (n, instance) in formed.iter_mut().enumerate().filter(|(_, i)| i.why_not.is_none()) {
            let classes = instance.ranks.iter().map(|m| m.class()).collect();
            let shape = number(&mut self.shapes, &mut self.last, classes);
            let seen = match instance.role() {
                Role::Prefill => &mut prefills,
                _ => &mut decodes,
            };
            if seen.len() < SHAPES_MAX || seen.contains_key(&shape) {
                seen.entry(shape).or_insert(n);
                instance.shape = shape;
            } else {
                let why = format!("{}: more than {SHAPES_MAX} geometries", instance.label());
                instance.why_not = Some((ErrorKind::LimitExceeded, why));
            }
        }
        let mut fits = Fits::new();
        for (&p, &pn) in &prefills {
            for (&d, &dn) in &decodes {
                let known = self.fits.get(&(p, d)).cloned();
                let found = || fit(&formed[pn], &formed[dn]).map(Arc::new);
                fits.insert((p, d), known.unwrap_or_else(found));
            }
        }
        self.fits = Arc::new(fits);
        self.shapes.retain(|_, s| prefills.contains_key(s) || decodes.contains_key(s));
        let classes: HashSet<u32> = members.values().map(|m| m.class()).collect();
        self.classes.retain(|_, c| classes.contains(c));
        (formed.into_iter().map(Arc::new).collect(), Arc::clone(&self.fits))
    }
}

fn number<K: std::hash::Hash + Eq>(map: &mut HashMap<K, u32>, last: &mut u32, key: K) -> u32 {
    *map.entry(key).or_insert_with(|| {
        *last = last.wrapping_add(1);
        *last
    })
}
