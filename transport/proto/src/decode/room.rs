//! A room of this worker, and each prefill rank that sends to it.
//!
//! Data and what follows from it, without effects: [`super::machine`] decides. A room has one phase,
//! one grant and one end; what is said, lent and counted link by link stands in its [`Source`]s.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::lanes::{LinkLanes, names};
use super::{CallId, DecodeConfig};
use crate::blocks::BlockList;
use crate::error::{Blame, Error, ErrorKind};
use crate::ids::{GrantId, IdempotencyKey, Identity, LaneId, LinkId, PartId};
use crate::msg::peer::{DataPath, Outcome};
use crate::msg::service::WorkerAddress;
use crate::plan::{Blocks, Plan, Span};
use crate::time::{Backoff, Time, grantor_ms};

#[derive(Debug)]
pub(super) enum Phase {
    /// Waits for links and lanes; leaves the queues at `until`.
    Queued { until: Time },
    /// Lanes are charged; the decode leg must come before `until`.
    Reserved { until: Time },
    /// The grant is open and offered to every source.
    Granted,
    /// Everything arrived; senders may still say that they are quiet, until `until`.
    Quieting { until: Time },
    /// Decided, and the senders' word is awaited until `until`; then this side revokes.
    Stopping { outcome: Outcome, until: Time },
    /// Decided. The engine fences; blocks are withheld from `until` on.
    Fencing { outcome: Outcome, until: Time },
    /// Over; told again and again to the sources that are left, which have not heard it.
    Over { outcome: Outcome, resend: Backoff, forget: Time },
}

#[derive(Debug)]
pub(super) struct Room {
    pub(super) issuer: Option<Identity>,
    pub(super) key: Option<IdempotencyKey>,
    /// Never empty until it is over.
    pub(super) sources: Vec<Source>,
    pub(super) reserve_calls: Vec<CallId>,
    pub(super) watchers: Vec<(CallId, Time)>,
    pub(super) lent: Option<Lent>,
    /// The grant of what was lent, kept when that has gone back.
    pub(super) grant: GrantId,
    pub(super) deadline: Time,
    pub(super) phase: Phase,
    pub(super) armed: Option<Time>,
}

/// Blocks in a room's hands.
#[derive(Debug)]
pub(super) struct Lent {
    pub(super) span: Span,
    /// One list for each pool, as the prefills are told.
    pub(super) lists: Vec<BlockList>,
    /// The same, checked.
    pub(super) blocks: Arc<[Blocks]>,
}

/// One prefill rank that sends to a room.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) address: WorkerAddress,
    /// Where its lanes were lent, or where it is told the end.
    pub(super) link: Option<LinkId>,
    /// Who moves the bytes; none once the link is lost.
    pub(super) path: Option<DataPath>,
    pub(super) lanes: Vec<LaneId>,
    /// From the offer until the room is over.
    pub(super) flow: Option<Flow>,
    /// It said that nothing more is posted, and whether nothing can land.
    pub(super) quiesced: Option<bool>,
    /// A lane of the room was lost: the sender's word alone is not enough.
    pub(super) dirty: bool,
    /// Lanes whose connection was lost since the grant.
    pub(super) lost: BTreeSet<LaneId>,
}

/// What has come from a source, and how long it may send.
#[derive(Debug)]
pub(super) struct Flow {
    plan: Arc<Plan>,
    arrived: Parts,
    pub(super) acked: bool,
    pub(super) resend: Backoff,
    renewed: Time,
    progress_since_renewal: bool,
    lease_until: Time,
    /// Parts that are missing by then will not come.
    pub(super) incomplete_at: Option<Time>,
}

/// Which parts are here: a set, never a count.
#[derive(Debug)]
struct Parts {
    bits: Vec<u64>,
    missing: u32,
    bytes: u64,
}

impl Room {
    pub(super) fn new(prefills: Vec<WorkerAddress>, deadline: Time, phase: Phase) -> Self {
        Self {
            issuer: None,
            key: None,
            sources: prefills.into_iter().map(Source::new).collect(),
            reserve_calls: Vec::new(),
            watchers: Vec::new(),
            lent: None,
            grant: GrantId::NONE,
            deadline,
            phase,
            armed: None,
        }
    }
    /// The source at the other end of a link.
    pub(super) fn source_on(&mut self, link: LinkId) -> Option<&mut Source> {
        self.sources.iter_mut().find(|s| s.link == Some(link))
    }
    /// Bytes that are here, from all sources.
    pub(super) fn bytes(&self) -> u64 {
        self.flows().map(Flow::bytes).sum()
    }
    /// Takes the lanes of all sources.
    pub(super) fn take_lanes(&mut self) -> Vec<LinkLanes> {
        let each = self.sources.iter_mut();
        each.filter_map(|s| Some((s.link?, std::mem::take(&mut s.lanes)))).collect()
    }
    /// Why the room has to be given up, if one of its sources makes it so.
    pub(super) fn given_up(&self, now: Time, lease_ms: u64) -> Option<Error> {
        let find = |is: fn(&Flow, Time) -> bool| {
            let each = self.sources.iter().filter_map(|s| Some((s.identity(), s.flow.as_ref()?)));
            each.into_iter().find(|(_, flow)| is(flow, now))
        };
        if let Some((prefill, flow)) = find(Flow::is_cut_short) {
            let why = Error::new(ErrorKind::Incomplete, "the prefill ended early")
                .with("prefill", prefill)
                .with("parts_missing", flow.arrived.missing)
                .with("parts", flow.parts());
            return Some(why);
        }
        let (prefill, _) = find(Flow::is_expired)?;
        let why = Error::new(ErrorKind::LeaseExpired, "the grant's lease ran out")
            .with("prefill", prefill)
            .with("lease_ms", lease_ms)
            .blamed(Blame::Prefill);
        Some(why)
    }
    /// What was missing when the deadline came.
    pub(super) fn overdue(&self) -> Error {
        let late = self.sources.iter().filter(|s| !s.is_complete());
        let absent =
            |s: &Source| !s.is_complete() && s.flow.as_ref().is_some_and(|f| f.bytes() == 0);
        let absent = self.sources.iter().any(absent);
        let missing: u64 = self.flows().map(|f| u64::from(f.arrived.missing)).sum();
        let parts: u64 = self.flows().map(|f| u64::from(f.parts())).sum();
        Error::new(ErrorKind::DeadlineExceeded, "the room's deadline has passed")
            .with("missing", if absent { "prefill leg" } else { "pages of the prefill" })
            .with("prefills", names(late.map(Source::identity)))
            .with("parts_missing", missing)
            .with("parts", parts)
            .blamed(Blame::Prefill)
    }
    /// No source has a word to say that would make a difference to the fence: one whose lane was
    /// lost is revoked whatever it says.
    pub(super) fn is_quiet(&self) -> bool {
        self.sources.iter().all(|s| !s.is_awaited() || s.dirty)
    }
    fn flows(&self) -> impl Iterator<Item = &Flow> {
        self.sources.iter().filter_map(|s| s.flow.as_ref())
    }
    /// When something is to be done, if nothing happens before.
    pub(super) fn due(&self, lease_ms: u64) -> Option<Time> {
        let (due, ends_by) = match &self.phase {
            Phase::Queued { until } | Phase::Reserved { until } | Phase::Quieting { until } => {
                (Some(*until), Some(self.deadline))
            }
            Phase::Granted => (self.flows().map(|f| f.due(lease_ms)).min(), Some(self.deadline)),
            Phase::Stopping { until, .. } | Phase::Fencing { until, .. } => (Some(*until), None),
            Phase::Over { resend, forget, .. } => (Some(resend.at), Some(*forget)),
        };
        let watchers = self.watchers.iter().map(|w| w.1);
        watchers.chain(due).chain(ends_by).min()
    }
}

impl Source {
    fn new(address: WorkerAddress) -> Self {
        Self {
            address,
            link: None,
            path: None,
            lanes: Vec::new(),
            flow: None,
            quiesced: None,
            dirty: false,
            lost: BTreeSet::new(),
        }
    }
    pub(super) fn identity(&self) -> &Identity {
        &self.address.key.identity
    }
    /// Everything of it is here.
    pub(super) fn is_complete(&self) -> bool {
        self.flow.as_ref().is_some_and(Flow::is_complete)
    }
    /// Its word that nothing more is posted is still to come.
    pub(super) fn is_awaited(&self) -> bool {
        self.path == Some(DataPath::OneSided) && self.quiesced.is_none()
    }
    /// Nothing more can come of it: a grant to write is for the connections of its time, and none of
    /// them is left.
    pub(super) fn is_cut_off(&self) -> bool {
        self.path == Some(DataPath::OneSided)
            && !self.is_complete()
            && self.lanes.iter().all(|lane| self.lost.contains(lane))
    }
    /// The lanes that the sender may use. A grant to write is for the connections of its time: the
    /// next one of a lane is not in it, and a sender that hears of the lane only now would take it.
    pub(super) fn offered_lanes(&self) -> Vec<LaneId> {
        let writes = self.path == Some(DataPath::OneSided);
        let lanes = self.lanes.iter().filter(|lane| !writes || !self.lost.contains(lane));
        lanes.copied().collect()
    }
    /// Takes the lanes whose connections were lost since the grant.
    pub(super) fn take_lost(&mut self) -> Option<LinkLanes> {
        let lost = &self.lost;
        let lanes = self.lanes.extract_if(.., |lane| lost.contains(lane)).collect();
        Some((self.link?, lanes))
    }
    /// Closing the grant is enough: this side holds the pen, or nothing can land.
    pub(super) fn is_closed_by_closing(&self) -> bool {
        self.path == Some(DataPath::ReceiverCopies) || (self.quiesced == Some(true) && !self.dirty)
    }
}

impl Flow {
    /// Everything is to come; the lease begins.
    pub(super) fn new(now: Time, plan: Arc<Plan>, config: &DecodeConfig) -> Self {
        Self {
            arrived: Parts::new(plan.grid().parts()),
            plan,
            acked: false,
            resend: Backoff::new(now, config.resend_ms),
            renewed: now,
            progress_since_renewal: false,
            lease_until: now.plus_ms(grantor_ms(config.grant_lease_ms)),
            incomplete_at: None,
        }
    }
    fn parts(&self) -> u32 {
        self.plan.grid().parts()
    }
    fn bytes(&self) -> u64 {
        self.arrived.bytes
    }
    /// A source without parts is done when it knows of the room.
    fn is_complete(&self) -> bool {
        self.arrived.missing == 0 && (self.parts() > 0 || self.acked)
    }
    pub(super) fn arrive(&mut self, part: PartId, counted: bool) {
        self.arrived.insert(part, self.plan.grid().part_bytes(part), counted);
        self.progress_since_renewal = true;
    }
    /// The lease runs from now on.
    pub(super) fn lease(&mut self, now: Time, lease_ms: u64) {
        self.renewed = now;
        self.progress_since_renewal = false;
        self.lease_until = now.plus_ms(grantor_ms(lease_ms));
    }
    /// Renewed are those who make progress, have not begun, or are done before the others.
    fn renewal_at(&self, lease_ms: u64) -> Option<Time> {
        let may = self.progress_since_renewal || self.bytes() == 0 || self.is_complete();
        may.then(|| self.renewed.plus_ms(lease_ms / 3))
    }
    /// Renews the lease if that is due and deserved; whether it did.
    pub(super) fn renew(&mut self, now: Time, lease_ms: u64) -> bool {
        let due = self.renewal_at(lease_ms).is_some_and(|at| now >= at);
        if due {
            self.lease(now, lease_ms);
        }
        due
    }
    /// The offer is to be repeated.
    pub(super) fn is_unheard(&self, now: Time) -> bool {
        !self.acked && now >= self.resend.at
    }
    /// It ended early.
    fn is_cut_short(&self, now: Time) -> bool {
        !self.is_complete() && self.incomplete_at.is_some_and(|at| now >= at)
    }
    fn is_expired(&self, now: Time) -> bool {
        !self.is_complete() && now >= self.lease_until
    }
    fn due(&self, lease_ms: u64) -> Time {
        let resend = (!self.acked).then_some(self.resend.at);
        let ends = (!self.is_complete()).then_some(self.lease_until);
        let cut = self.incomplete_at.filter(|_| !self.is_complete());
        let all = [resend, self.renewal_at(lease_ms), ends, cut];
        all.into_iter().flatten().min().unwrap_or(self.lease_until)
    }
}

impl Parts {
    fn new(parts: u32) -> Self {
        Self { bits: vec![0; parts.div_ceil(64) as usize], missing: parts, bytes: 0 }
    }
    fn insert(&mut self, part: PartId, bytes: u64, counted: bool) {
        let Some(word) = self.bits.get_mut(part.0 as usize / 64) else { return };
        let new = *word >> (part.0 % 64) & 1 == 0;
        *word |= 1 << (part.0 % 64);
        if new || counted {
            self.missing = self.missing.saturating_sub(1);
            self.bytes += bytes;
        }
    }
}
