//! The prefill side of every room of one worker.
//!
//! Owns: rooms, what of them is final, which parts are in flight on which lane, and what has ended.
//! In: legs and chunks of the serving engine, offers of decode workers, events of the transfer
//! engine, time. Out: [`Output`].
//!
//! Invariants:
//! 1. A part is posted only under a live grant, when all of its pages are final; a block is final
//!    when it is full or the prompt has ended (a page is sent once, when final).
//! 2. After `Quiesce` nothing more is posted for the grant.
//! 3. Source blocks are released with the engine's proof `Q` that nothing posted can land.
//! 4. The decode decides how a room ends. Without its word the room ends `Unknown`, never `Done`.
//! 5. A lease counts from when this side sent the frame that the grant echoes.
//! 6. Rooms nobody claims, on either side, end at a deadline that names the missing side.
//! 7. An engine that writes the receiver's pages itself learns of a grant in the place of its offer
//!    in the order of what the peer said, and before any part of it. That order decides which
//!    connections of the lanes the grant is for. Each `Grant` is followed by a `Quiesce`.

mod machine;
mod room;

use std::ops::Range;
use std::sync::Arc;

use crate::blocks::BlockList;
use crate::error::{Error, Refusal};
use crate::ids::{GrantId, Identity, LaneId, LinkId, PartId, RoomId, WorkerKey};
use crate::layout::{Layout, PoolMap};
use crate::limits;
use crate::msg::peer::{DataPath, Outcome, PeerMsg};
#[cfg(feature = "mutants")]
use crate::mutant::Mutant;
use crate::plan::{PartPages, Plan, Share, Span};
use crate::time::Time;

pub use machine::Prefill;

/// What may be configured. [`PrefillConfig::new`] takes the table in [`limits`].
#[derive(Clone, Debug)]
pub struct PrefillConfig {
    /// Geometry of the pools.
    pub pools: Arc<[Layout]>,
    /// Where the pages of each pool are.
    pub maps: Arc<[Arc<PoolMap>]>,
    /// Parts in flight on one lane.
    pub in_flight_per_lane: u32,
    /// Tries of one part.
    pub part_tries_max: u32,
    /// A lane with parts in flight on which nothing moves for so long is given up.
    pub part_timeout_ms: u64,
    /// First wait before a part is tried again.
    pub retry_ms: u64,
    /// First wait before a message is repeated.
    pub resend_ms: u64,
    /// Longest life of a room.
    pub room_deadline_ms: u64,
    /// How long the engine may take to become quiet before source blocks are quarantined.
    pub quiet_ms: u64,
    /// Most rooms at a time.
    pub rooms_max: usize,
    /// Most offers of one link that no leg has claimed.
    pub orphans_max: usize,
    /// Seed of the jitter.
    pub seed: u64,
    /// Which defect to show to the simulator.
    #[cfg(feature = "mutants")]
    pub mutant: Mutant,
}

impl PrefillConfig {
    /// The defaults.
    pub fn new(pools: Arc<[Layout]>, maps: Arc<[Arc<PoolMap>]>, seed: u64) -> Self {
        Self {
            pools,
            maps,
            in_flight_per_lane: limits::PARTS_IN_FLIGHT_PER_LANE,
            part_tries_max: limits::PART_TRIES_MAX,
            part_timeout_ms: limits::PART_TIMEOUT_MS,
            retry_ms: limits::RETRY_MS,
            resend_ms: limits::RESEND_MS,
            room_deadline_ms: limits::ROOM_DEADLINE_MS,
            quiet_ms: limits::FENCE_MS,
            rooms_max: limits::ROOMS_MAX,
            orphans_max: limits::ORPHANS_PER_LINK_MAX,
            seed: seed | 1,
            #[cfg(feature = "mutants")]
            mutant: Mutant::None,
        }
    }
}

/// Who may fetch a room. Each decode rank that has something to fetch from this rank is a taker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Takers {
    /// These decode workers, each once.
    Named(Vec<Identity>),
    /// So many of the cluster's decode workers, whoever comes.
    Any(u16),
}

/// What the serving engine declares ready at once.
#[derive(Clone, Debug)]
pub struct Chunk {
    /// The room.
    pub room: RoomId,
    /// The pool; 0 for those with one.
    pub pool: u32,
    /// Tokens of the prompt; begins where the last chunk of these layers ended. All of them where a
    /// block is a row; where layers look at a window only, what is before it may be left out.
    pub tokens: Range<u32>,
    /// Layers of this rank's pool.
    pub layers: Range<u32>,
    /// The blocks that hold `tokens`, from the block of the first to the block of the last; the
    /// rows, where a block is a row.
    pub blocks: BlockList,
}

/// What happens to a prefill worker. `Q` is the engine's proof that a grant is quiet.
#[derive(Debug)]
pub enum Event<Q> {
    /// The prefill leg of a request arrived.
    Attach {
        /// The room.
        room: RoomId,
        /// Tokens of the prompt.
        tokens: u32,
        /// Who fetches it.
        takers: Takers,
        /// The router that placed it, if the request names it: it may abort before the offer.
        issuer: Option<Identity>,
        /// The room ends by then, counted from now.
        deadline_ms: u64,
    },
    /// Pages are ready.
    Chunk(Chunk),
    /// The serving engine has declared everything.
    Finish {
        /// The room.
        room: RoomId,
    },
    /// The serving engine gives the room up.
    AbortLocal {
        /// The room.
        room: RoomId,
        /// Why.
        why: Refusal,
    },
    /// A router or admin aborts; ask [`Prefill::may_abort`] first.
    AbortBy {
        /// Who.
        from: Identity,
        /// The room.
        room: RoomId,
        /// Why.
        reason: String,
    },
    /// A link is ready for rooms.
    LinkUp {
        /// The link.
        link: LinkId,
        /// Who is at its other end.
        peer: WorkerKey,
        /// Who moves the bytes.
        path: DataPath,
        /// Size of a part.
        part_bytes: u64,
        /// What this rank has for the decode's.
        share: Arc<Share>,
        /// The decode's pools.
        pools: Arc<[Layout]>,
        /// Where the pages of each are, on one-sided paths.
        maps: Arc<[Arc<PoolMap>]>,
        /// When the last of its lanes came up.
        since: Time,
        /// Lanes that are not up.
        down: Vec<LaneId>,
    },
    /// A link is lost for good.
    LinkDown {
        /// The link.
        link: LinkId,
        /// Why.
        why: Refusal,
    },
    /// A decode worker says something.
    Peer {
        /// The link.
        link: LinkId,
        /// What.
        msg: PeerMsg,
        /// When this side sent the frame that the message echoes: leases count from here.
        echo_sent: Time,
    },
    /// The engine: the receiver has a part.
    Acked {
        /// The link.
        link: LinkId,
        /// The grant.
        grant: GrantId,
        /// The part.
        part: PartId,
        /// The lane.
        lane: LaneId,
    },
    /// The engine: a part was not taken.
    Nacked {
        /// The link.
        link: LinkId,
        /// The grant.
        grant: GrantId,
        /// The part.
        part: PartId,
        /// The lane.
        lane: LaneId,
        /// Why.
        why: Refusal,
    },
    /// The engine: a lane works again.
    LaneUp {
        /// The link.
        link: LinkId,
        /// The lane.
        lane: LaneId,
    },
    /// The engine: a lane does not work; what was in flight on it is in doubt.
    LaneDown {
        /// The link.
        link: LinkId,
        /// The lane.
        lane: LaneId,
    },
    /// The engine: nothing that was posted for the grant can land, and its source may change.
    Quiesced {
        /// The link.
        link: LinkId,
        /// The grant.
        grant: GrantId,
        /// The proof.
        proof: Q,
    },
    /// No new rooms from here on.
    Drain,
}

/// What is to be done, in this order.
#[derive(Debug)]
pub enum Output<Q> {
    /// Send on a link.
    Send {
        /// The link.
        link: LinkId,
        /// What.
        msg: PeerMsg,
    },
    /// The leg is taken.
    Attached {
        /// The room.
        room: RoomId,
    },
    /// The leg, or a chunk of it, is not taken; the room is as it was.
    Refused {
        /// The room.
        room: RoomId,
        /// Why.
        why: Error,
    },
    /// The chunk is taken; its blocks must not change until the room is released.
    ChunkTaken {
        /// The room.
        room: RoomId,
    },
    /// An offer was taken: the engine, which writes the decode's pages itself, may be asked to post
    /// under this grant. One-sided paths only.
    Grant {
        /// The link.
        link: LinkId,
        /// The grant.
        grant: GrantId,
        /// The lanes lent to it that can be used.
        lanes: Vec<LaneId>,
        /// Where each part goes, by the decode's addresses.
        plan: Arc<Plan>,
    },
    /// The decode has offered its blocks.
    Granted {
        /// The room.
        room: RoomId,
        /// The link.
        link: LinkId,
        /// The grant.
        grant: GrantId,
        /// Parts that this side sends under it.
        parts: u32,
        /// Once every taker has come: what of the prompt any of them wants.
        wanted: Option<Span>,
    },
    /// The engine sends a part.
    Post {
        /// The link.
        link: LinkId,
        /// The grant.
        grant: GrantId,
        /// The part.
        part: PartId,
        /// The lane.
        lane: LaneId,
        /// This side's pages of it.
        pages: PartPages,
    },
    /// The engine gives a lane up and dials it again.
    ResetLane {
        /// The link.
        link: LinkId,
        /// The lane.
        lane: LaneId,
    },
    /// The engine stops a grant.
    Quiesce {
        /// The link.
        link: LinkId,
        /// The grant.
        grant: GrantId,
    },
    /// The source blocks of the room may change: with the proofs, or because nothing was ever posted.
    /// After [`Output::Withheld`] it may still follow, also when the room has ended.
    Released {
        /// The room.
        room: RoomId,
        /// The proofs of the grants that were used.
        proofs: Vec<Q>,
    },
    /// The engine did not become quiet in time: the source blocks stay withheld.
    Withheld {
        /// The room.
        room: RoomId,
        /// Why.
        why: Refusal,
    },
    /// The room has ended.
    Ended {
        /// The room.
        room: RoomId,
        /// How, as far as this side knows.
        outcome: Outcome,
    },
}
