//! A hand-off as the router holds it, and how it ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use kvlane_proto::msg::peer::Outcome;
use kvlane_proto::msg::service::{Registration, WorkerAddress};
use kvlane_proto::{Blame, Refusal, Retry, RoomId};
use tokio::sync::mpsc;

/// What to put in one leg's request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leg {
    /// The worker and its QUIC endpoint.
    pub worker: WorkerAddress,
    /// Where its model server takes requests; may be empty.
    pub serving: String,
}

impl From<&Registration> for Leg {
    fn from(r: &Registration) -> Self {
        Self { worker: r.worker.clone(), serving: r.serving.clone() }
    }
}

/// A reserved room. Dropped without [`Handoff::detach`], it is aborted.
#[must_use = "dropping a hand-off aborts its room; detach it once both legs are sent"]
#[derive(Debug)]
pub struct Handoff {
    /// The room, for both legs' requests.
    pub room: RoomId,
    /// The prefill leg.
    pub prefill: Leg,
    /// The decode leg.
    pub decode: Leg,
    /// The charge waits this long for the decode leg.
    pub unclaimed_ms: u64,
    pub(crate) guard: Guard,
}

impl Handoff {
    /// Lets the room run to its end without this handle: it is no longer aborted when dropped.
    pub fn detach(self) -> RoomId {
        self.guard.room.detached.store(true, Ordering::Relaxed);
        self.room
    }
}

/// How a hand-off ended, or why that cannot be said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HandoffOutcome {
    /// Every page is in place.
    Done {
        /// Bytes moved.
        bytes: u64,
    },
    /// It failed.
    Failed {
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

impl From<Outcome> for HandoffOutcome {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Done { bytes } => Self::Done { bytes },
            Outcome::Failed { why, .. } => Self::failed(why),
            Outcome::Unknown { why } => Self::Unknown { refusal: why },
        }
    }
}

impl HandoffOutcome {
    pub(crate) fn failed(refusal: Refusal) -> Self {
        let retryable = refusal.kind.retry() != Retry::Never;
        Self::Failed { leg: refusal.blame, retryable, refusal }
    }
}

/// What is remembered of a room, until [`crate::ROOMS_REMEMBERED_MAX`] newer ones are.
#[derive(Debug)]
pub(crate) struct Room {
    pub(crate) id: RoomId,
    pub(crate) tokens: u32,
    pub(crate) prefill: WorkerAddress,
    pub(crate) decode: WorkerAddress,
    /// It ended, was refused, or is being aborted: there is nothing left to abort.
    over: AtomicBool,
    handed_out: AtomicBool,
    detached: AtomicBool,
    guards: AtomicUsize,
    aborts: mpsc::Sender<AbortOrder>,
}

/// One leg that has to hear of an abort.
#[derive(Debug)]
pub(crate) struct AbortOrder {
    pub(crate) room: RoomId,
    pub(crate) worker: WorkerAddress,
    pub(crate) reason: String,
}

impl Room {
    pub(crate) fn new(
        id: RoomId,
        tokens: u32,
        prefill: WorkerAddress,
        decode: WorkerAddress,
        aborts: mpsc::Sender<AbortOrder>,
    ) -> Arc<Self> {
        Arc::new(Self {
            id,
            tokens,
            prefill,
            decode,
            over: AtomicBool::new(false),
            handed_out: AtomicBool::new(false),
            detached: AtomicBool::new(false),
            guards: AtomicUsize::new(0),
            aborts,
        })
    }

    /// There is nothing left to abort.
    pub(crate) fn end(&self) -> bool {
        !self.over.swap(true, Ordering::AcqRel)
    }
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Somebody has a hand-off of it.
    pub(crate) fn hand_out(&self) {
        self.handed_out.store(true, Ordering::Release);
    }
    pub(crate) fn was_handed_out(&self) -> bool {
        self.handed_out.load(Ordering::Acquire)
    }

    /// Tells both legs, once. Returns whether this call did.
    pub(crate) fn abort(&self, reason: &str) -> bool {
        if !self.end() {
            return false;
        }
        for worker in [&self.decode, &self.prefill] {
            let (worker, reason) = (worker.clone(), reason.chars().take(256).collect());
            // Full: the room ends by its deadline, at the latest.
            if self.aborts.try_send(AbortOrder { room: self.id, worker, reason }).is_err() {
                metrics::counter!("kvlane_coordinator_aborts_lost_total").increment(1);
            }
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
