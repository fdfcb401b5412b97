//! A hand-off as the router holds it, and how it ends.
//!
//! A room is held by every rank of a decode instance, and ends as a whole: done only if it is done
//! at each of them. [`Room`] is what the coordinator remembers; it knows which ranks have to hear of
//! an abort, and orders it once.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use kvlane_proto::msg::peer::Outcome;
use kvlane_proto::msg::service::WorkerAddress;
use kvlane_proto::{Blame, Refusal, Retry, RoomId, WorkerKey};
use tokio::sync::mpsc;

use crate::instance::{Rank, Routes};
use crate::view::Pair;

/// What to put in the request of one rank's leg.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leg {
    /// The worker and its QUIC endpoint.
    pub worker: WorkerAddress,
    /// Where its model server takes requests; may be empty.
    pub serving: String,
    /// The ranks at the other end: for a decode leg those that send to it, for a prefill leg those
    /// that take from it. A prefill rank may have none: another one with the same pages sends them.
    pub peers: Vec<WorkerAddress>,
}

/// A reserved room. Dropped without [`Handoff::detach`], it is aborted.
#[must_use = "dropping a hand-off aborts its room; detach it once all legs are sent"]
#[derive(Debug)]
pub struct Handoff {
    /// The room, for every leg's request.
    pub room: RoomId,
    /// The prefill leg, rank by rank.
    pub prefill: Vec<Leg>,
    /// The decode leg, rank by rank.
    pub decode: Vec<Leg>,
    /// The charges wait at least this long for their decode legs.
    pub unclaimed_ms: u64,
    guard: Guard,
}

impl Handoff {
    /// Of a room that is charged at every decode rank.
    pub(crate) fn new(guard: Guard, unclaimed_ms: u64) -> Self {
        let room = &guard.room;
        room.handed_out.store(true, Ordering::Release);
        let leg = |rank: &Rank, peers| Leg {
            worker: rank.worker.clone(),
            serving: rank.serving.clone(),
            peers,
        };
        let takers = |p| room.routes.takers(p).map(|d| room.decode[d].worker.clone()).collect();
        let prefill = room.prefill.iter().enumerate().map(|(n, p)| leg(p, takers(n))).collect();
        let decode = room.decode.iter().enumerate().map(|(n, d)| leg(d, room.sources(n))).collect();
        Self { room: room.id, prefill, decode, unclaimed_ms, guard }
    }

    /// Lets the room run to its end without this handle: it is no longer aborted when dropped.
    pub fn detach(self) -> RoomId {
        self.guard.room.detached.store(true, Ordering::Relaxed);
        self.room
    }

    pub(crate) fn abort(&self, reason: &str) {
        self.guard.room.abort(reason);
    }
}

/// How a hand-off ended, or why that cannot be said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HandoffOutcome {
    /// Every page is in place, at every decode rank.
    Done {
        /// Bytes moved, over all ranks.
        bytes: u64,
    },
    /// It failed at one decode rank, and so as a whole.
    Failed {
        /// The decode worker that says so, or that is gone.
        worker: WorkerKey,
        /// Which leg (or whom else) to charge it to.
        leg: Blame,
        /// Whether the request can be tried again, with a new room.
        retryable: bool,
        /// Why.
        refusal: Refusal,
    },
    /// It still ran when the wait was over.
    Running,
    /// Nobody who could know answers, or the room is not known here.
    Unknown {
        /// Why.
        refusal: Refusal,
    },
}

impl HandoffOutcome {
    /// What one decode worker says.
    pub(crate) fn said(worker: &WorkerKey, outcome: Outcome) -> Self {
        match outcome {
            Outcome::Done { bytes } => Self::Done { bytes },
            Outcome::Failed { why, .. } => Self::failed(worker, why),
            Outcome::Unknown { why } => Self::Unknown { refusal: why },
        }
    }
    pub(crate) fn failed(worker: &WorkerKey, refusal: Refusal) -> Self {
        let retryable = refusal.kind.retry() != Retry::Never;
        Self::Failed { worker: worker.clone(), leg: refusal.blame, retryable, refusal }
    }
}

/// What is remembered of a room, until [`crate::ROOMS_REMEMBERED_MAX`] newer ones are.
#[derive(Debug)]
pub(crate) struct Room {
    pub(crate) id: RoomId,
    pub(crate) tokens: u32,
    pub(crate) prefill: Arc<[Rank]>,
    pub(crate) decode: Arc<[Rank]>,
    routes: Arc<Routes>,
    /// Decode ranks that may hold the room: they were asked for it, and have neither refused nor
    /// said how it ended.
    held: Box<[AtomicBool]>,
    /// How it ended; the same for whoever asks.
    outcome: OnceLock<Box<HandoffOutcome>>,
    /// It ended, was refused, or is being aborted: there is nothing left to abort.
    over: AtomicBool,
    handed_out: AtomicBool,
    detached: AtomicBool,
    guards: AtomicUsize,
    aborts: mpsc::Sender<AbortOrder>,
}

/// The ranks that have to hear of an abort.
#[derive(Debug)]
pub(crate) struct AbortOrder {
    pub(crate) room: RoomId,
    pub(crate) workers: Vec<WorkerAddress>,
    pub(crate) reason: String,
}

impl Room {
    pub(crate) fn new(
        id: RoomId,
        tokens: u32,
        pair: &Pair,
        aborts: mpsc::Sender<AbortOrder>,
    ) -> Arc<Self> {
        let decode = Arc::clone(pair.decode.who());
        Arc::new(Self {
            id,
            tokens,
            prefill: Arc::clone(pair.prefill.who()),
            held: decode.iter().map(|_| AtomicBool::new(false)).collect(),
            decode,
            routes: Arc::clone(&pair.routes),
            outcome: OnceLock::new(),
            over: AtomicBool::new(false),
            handed_out: AtomicBool::new(false),
            detached: AtomicBool::new(false),
            guards: AtomicUsize::new(0),
            aborts,
        })
    }

    /// The prefill ranks that send to a decode rank.
    pub(crate) fn sources(&self, decode: usize) -> Vec<WorkerAddress> {
        self.routes.sources(decode).iter().map(|&p| self.prefill[p].worker.clone()).collect()
    }

    /// A decode rank is about to be asked for it. Returns whether it is for the first time.
    pub(crate) fn hold(&self, decode: usize) -> bool {
        !self.held[decode].swap(true, Ordering::AcqRel)
    }
    /// A decode rank does not hold it (any more).
    pub(crate) fn let_go(&self, decode: usize) {
        self.held[decode].store(false, Ordering::Release);
    }
    fn is_held(&self, decode: usize) -> bool {
        self.held[decode].load(Ordering::Acquire)
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }
    /// Somebody has a hand-off of it.
    pub(crate) fn was_handed_out(&self) -> bool {
        self.handed_out.load(Ordering::Acquire)
    }

    pub(crate) fn outcome(&self) -> Option<HandoffOutcome> {
        self.outcome.get().map(|o| (**o).clone())
    }
    /// It has ended as a whole. The first word counts.
    pub(crate) fn finish(&self, outcome: HandoffOutcome) -> HandoffOutcome {
        self.over.store(true, Ordering::Release);
        (**self.outcome.get_or_init(|| Box::new(outcome))).clone()
    }
    /// It has failed at one decode rank: nobody else shall go on with it. That rank tells the
    /// prefill ranks that send to it, so there is nobody left to tell if no other may hold it.
    pub(crate) fn fail(&self, decode: usize, outcome: HandoffOutcome) -> HandoffOutcome {
        self.let_go(decode);
        let outcome = self.outcome.get_or_init(|| Box::new(outcome));
        match &**outcome {
            HandoffOutcome::Failed { worker, refusal, .. }
                if (0..self.decode.len()).any(|d| self.is_held(d)) =>
            {
                self.abort(&format!("{worker}: {refusal}"));
            }
            _ => self.over.store(true, Ordering::Release),
        }
        (**outcome).clone()
    }

    /// Tells every rank that may know of it, once. Returns whether this call did.
    pub(crate) fn abort(&self, reason: &str) -> bool {
        if self.over.swap(true, Ordering::AcqRel) {
            return false;
        }
        let decodes = (0..self.decode.len()).filter(|d| self.is_held(*d)).map(|d| &self.decode[d]);
        // No prefill worker has heard of a room that nobody got.
        let prefills = self.prefill.iter().filter(|_| self.was_handed_out());
        let workers: Vec<_> = decodes.chain(prefills).map(|r| r.worker.clone()).collect();
        let reason = reason.chars().take(256).collect();
        // Full: the room ends by its deadline, at the latest.
        if !workers.is_empty()
            && self.aborts.try_send(AbortOrder { room: self.id, workers, reason }).is_err()
        {
            metrics::counter!("kvlane_coordinator_aborts_lost_total").increment(1);
        }
        true
    }
}

/// Aborts a room when the last guard of it is dropped and nobody let it run on.
#[derive(Debug)]
pub(crate) struct Guard {
    pub(crate) room: Arc<Room>,
}

impl Guard {
    pub(crate) fn new(room: Arc<Room>) -> Self {
        room.guards.fetch_add(1, Ordering::AcqRel);
        Self { room }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let last = self.room.guards.fetch_sub(1, Ordering::AcqRel) == 1;
        if last && !self.room.detached.load(Ordering::Relaxed) {
            self.room.abort("the router gave the hand-off up");
        }
    }
}
