//! The decode side of every room of one worker.
//!
//! Owns: rooms, their blocks while lent, their grants, the lanes of each link (the scarce thing),
//! the queues for them, and what has ended. A room has one grant and one or several sources: the
//! prefill ranks that together have what this rank lacks, each on its own link. In: calls of
//! routers, blocks lent by the serving engine, messages of prefill workers, events of the transfer
//! engine, time. Out: [`Output`].
//!
//! Invariants:
//! 1. A grant is opened at the engine before it is offered, and never offered after its end.
//! 2. `Ended` carries the engine's proof `F`, or says that the blocks are withheld. There is no way
//!    to write it without one: the proof is made by engines only.
//! 3. A room ends once. After `Over` its outcome never changes; whatever comes later is answered
//!    with it.
//! 4. Done means: every part of every source's set arrived, then the one fence completed. Parts are
//!    a set, counted link by link.
//! 5. Lanes are lent whole-room: from every source or from none, first come first served in the
//!    queue of each, and come back after the fence. Those of a room are on different rails as far
//!    as there are free ones.
//! 6. A refused request leaves nothing behind.
//! 7. A grant is offered only to sources that are proved to send each layer and head exactly once.
//!    One that is lost or gives up ends the room for all; each is told until it has heard.
//!
//! In the files: `machine` decides, `requests` checks what is asked, `room` and `lanes` keep.

mod lanes;
mod machine;
mod requests;
mod room;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::blocks::BlockList;
use crate::error::{Error, Refusal, Result};
use crate::grants::FenceHow;
use crate::ids::{GrantId, Identity, LaneId, LinkId, PartId, RoomId, WorkerKey};
use crate::layout::{Layout, PoolMap};
use crate::limits;
use crate::msg::call::{Call, Reply};
use crate::msg::peer::{DataPath, Outcome, PeerMsg};
use crate::msg::service::WorkerAddress;
#[cfg(feature = "mutants")]
use crate::mutant::Mutant;
use crate::plan::{Plan, Share, Span};

pub use machine::Decode;

/// What may be configured. [`DecodeConfig::new`] takes the table in [`limits`].
#[derive(Clone, Debug)]
pub struct DecodeConfig {
    /// Geometry of the pools.
    pub pools: Arc<[Layout]>,
    /// Where the pages of each pool are.
    pub maps: Arc<[Arc<PoolMap>]>,
    /// Grant numbers start behind this; take it at random at each start of the worker.
    pub grant_base: u64,
    /// Lanes that a room borrows.
    pub lanes_per_room: u16,
    /// Aim for the size of a part.
    pub part_bytes: u64,
    /// Lease of a grant.
    pub grant_lease_ms: u64,
    /// Longest life of a room.
    pub room_deadline_ms: u64,
    /// How long a charged reservation waits for its leg.
    pub unclaimed_ms: u64,
    /// How long a quiesce may take before this side revokes.
    pub quiesce_ms: u64,
    /// How long a fence may take before its blocks are quarantined.
    pub fence_ms: u64,
    /// First wait before a message is repeated.
    pub resend_ms: u64,
    /// Most rooms at a time.
    pub rooms_max: usize,
    /// Most rooms that wait for lanes.
    pub queue_max: usize,
    /// Which defect to show to the simulator.
    #[cfg(feature = "mutants")]
    pub mutant: Mutant,
}

impl DecodeConfig {
    /// The defaults.
    pub fn new(pools: Arc<[Layout]>, maps: Arc<[Arc<PoolMap>]>, grant_base: u64) -> Self {
        Self {
            pools,
            maps,
            grant_base: grant_base >> 1,
            lanes_per_room: limits::LANES_PER_ROOM,
            part_bytes: limits::PART_BYTES,
            grant_lease_ms: limits::GRANT_LEASE_MS,
            room_deadline_ms: limits::ROOM_DEADLINE_MS,
            unclaimed_ms: limits::UNCLAIMED_MS,
            quiesce_ms: limits::QUIESCE_MS,
            fence_ms: limits::FENCE_MS,
            resend_ms: limits::RESEND_MS,
            rooms_max: limits::ROOMS_MAX,
            queue_max: limits::QUEUE_MAX,
            #[cfg(feature = "mutants")]
            mutant: Mutant::None,
        }
    }
}

/// Names one call that waits for its answer; chosen by the driver, unique while it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallId(pub u64);

/// Blocks that the serving engine lends to a room.
#[derive(Clone, Debug)]
pub struct Lend {
    /// The room; reserved before, or not.
    pub room: RoomId,
    /// What of the prompt is wanted.
    pub span: Span,
    /// For each pool, one block for each of its blocks in the span.
    pub blocks: Vec<BlockList>,
    /// The prefill workers: every rank that has something for this one. Needed where nothing was
    /// reserved; otherwise none, or the same.
    pub prefills: Vec<WorkerAddress>,
    /// The room ends by then, counted from now; the room's own deadline counts if it is sooner.
    pub deadline_ms: u64,
}

/// What happens to a decode worker. `F` is the engine's fence proof.
#[derive(Debug)]
pub enum Event<F> {
    /// A router or admin asks something.
    Call {
        /// Names the call.
        call: CallId,
        /// Who, as proved by its certificate.
        from: Identity,
        /// What.
        body: Call,
    },
    /// Nobody waits for the answer any more.
    CallGone(CallId),
    /// The serving engine lends blocks.
    Lend(Lend),
    /// The serving engine does not want the room any more.
    AbortLocal {
        /// The room.
        room: RoomId,
        /// Why.
        why: String,
    },
    /// A link is ready for rooms.
    LinkUp {
        /// The link.
        link: LinkId,
        /// Who is at its other end.
        peer: WorkerKey,
        /// Who moves the bytes.
        path: DataPath,
        /// Lanes in its pool, numbered from 0.
        lanes: u16,
        /// Those that are not up, each with the reason.
        down: Vec<(LaneId, Refusal)>,
        /// Separate paths that they are spread over: lane `n` is on rail `n % rails`.
        rails: u16,
        /// What the prefill's rank has for this one.
        share: Arc<Share>,
        /// The prefill's pools.
        pools: Arc<[Layout]>,
    },
    /// This start of a worker cannot be reached. Rooms that asked for another start of it, which is
    /// being dialled elsewhere, go on.
    DialFailed {
        /// To whom.
        peer: WorkerKey,
        /// Why.
        why: Refusal,
    },
    /// A link that was begun did not come up.
    LinkFailed {
        /// To whom.
        peer: Identity,
        /// Why.
        why: Refusal,
    },
    /// A link is lost for good.
    LinkDown {
        /// The link.
        link: LinkId,
        /// Why.
        why: Refusal,
    },
    /// A prefill worker says something.
    Peer {
        /// The link.
        link: LinkId,
        /// What.
        msg: PeerMsg,
    },
    /// The engine: every byte of a part is in place.
    Arrived {
        /// The link: each counts its own parts.
        link: LinkId,
        /// The grant.
        grant: GrantId,
        /// The part.
        part: PartId,
    },
    /// The engine: a lane works again.
    LaneUp {
        /// The link.
        link: LinkId,
        /// The lane.
        lane: LaneId,
    },
    /// The engine: a lane does not work.
    LaneDown {
        /// The link.
        link: LinkId,
        /// The lane.
        lane: LaneId,
        /// Why.
        why: Refusal,
    },
    /// The engine: nothing can land under the grant any more.
    Fenced {
        /// The grant.
        grant: GrantId,
        /// The proof.
        proof: F,
    },
    /// The engine: the fence cannot complete.
    FenceFailed {
        /// The grant.
        grant: GrantId,
        /// Why.
        why: Refusal,
    },
    /// No new rooms from here on.
    Drain,
}

/// What is to be done, in this order.
#[derive(Debug)]
pub enum Output<F> {
    /// Make a link to this worker and answer `LinkUp`, `DialFailed` or `LinkFailed`.
    Connect(WorkerAddress),
    /// Send on a link.
    Send {
        /// The link.
        link: LinkId,
        /// What.
        msg: PeerMsg,
    },
    /// Answer a call.
    Reply {
        /// The call.
        call: CallId,
        /// The answer.
        reply: Result<Reply, Refusal>,
    },
    /// The lent blocks are accepted under this grant; from now on only a proof brings them back.
    Lent {
        /// The room.
        room: RoomId,
        /// Its grant.
        grant: GrantId,
    },
    /// The lent blocks are not accepted; nothing was done with them.
    LendRefused {
        /// The room.
        room: RoomId,
        /// Why.
        why: Error,
    },
    /// The engine may let parts land.
    Open {
        /// The grant.
        grant: GrantId,
        /// The links that may fill it, each with the lanes lent to the room and where its parts go.
        sources: Vec<(LinkId, Vec<LaneId>, Arc<Plan>)>,
    },
    /// The engine makes sure that nothing lands any more, on any link of the grant.
    Fence {
        /// The grant.
        grant: GrantId,
        /// How.
        how: FenceHow,
    },
    /// The room has ended. Blocks go back with the proof; without one they were never lent, or
    /// (`withheld`) stay in quarantine.
    Ended {
        /// The room.
        room: RoomId,
        /// Its grant, or none.
        grant: GrantId,
        /// How it ended.
        outcome: Outcome,
        /// The proof.
        proof: Option<F>,
        /// The fence did not complete.
        withheld: bool,
    },
    /// The fence of a quarantined grant completed after all: its blocks may go back.
    LateProof {
        /// The grant.
        grant: GrantId,
        /// The proof.
        proof: F,
    },
}
