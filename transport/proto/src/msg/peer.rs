//! Worker to worker: what a link carries. Prefill is the side that holds the pages, decode the
//! side that wants them; decode dials.
//!
//! Every message of a room may be lost, repeated or overtaken: each is idempotent, names room and
//! grant, and is sent again until its answer has come.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::blocks::BlockList;
use crate::error::{Error, ErrorKind, Refusal, Result};
use crate::ids::{GrantId, Identity, LaneId, RoomId};
use crate::layout::{Layout, PoolMap};
use crate::limits;
use crate::plan::Span;

/// A message with the numbers that leases are counted by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerFrame {
    /// Counts the frames of this sender on this link, from 1.
    pub seq: u64,
    /// The highest `seq` seen from the other side. A lease in this frame runs, for its holder,
    /// from the moment it sent that frame.
    pub echo: u64,
    /// The message.
    pub msg: PeerMsg,
}

/// What one worker tells another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PeerMsg {
    /// Nothing but being alive; sent when half of [`limits::HEARTBEAT_MS`] has passed in silence.
    Heartbeat,
    /// Asks for a frame at once, because the death notice came.
    Probe,
    /// Both directions, once a link: what this side has and how to reach its engine.
    Describe(Box<LinkInfo>),
    /// This side's engine has its lanes; rooms may start.
    Ready,
    /// The link ends on purpose.
    Bye(Refusal),
    /// Decode → prefill: the blocks to fill and the permission to fill them.
    Offer(Box<Offer>),
    /// Prefill → decode: the offer arrived.
    OfferAck {
        /// The room.
        room: RoomId,
        /// Its grant.
        grant: GrantId,
    },
    /// Decode → prefill: the grant lives this long from `echo` on.
    Renew {
        /// The room.
        room: RoomId,
        /// Its grant.
        grant: GrantId,
        /// Length of the lease.
        lease_ms: u64,
    },
    /// Either way: end this room. Decode decides what it ends as.
    Abort {
        /// The room.
        room: RoomId,
        /// Its grant, or [`GrantId::NONE`].
        grant: GrantId,
        /// Why.
        why: Refusal,
    },
    /// Prefill → decode: nothing more will be posted for the grant. Also the answer to
    /// [`PeerMsg::Ended`].
    Quiesced {
        /// The room.
        room: RoomId,
        /// Its grant, or [`GrantId::NONE`].
        grant: GrantId,
        /// On one-sided paths, nothing posted can land any more; false if a lane was lost with
        /// writes in flight: only the decode can make sure of those. Where the receiver copies, it
        /// says less (whole parts may still stand in a socket), and the decode does not rely on it:
        /// its closed grant stops those.
        clean: bool,
        /// The sender knows how the room ended. False asks for it; true is the last word, which
        /// is never answered, so that two sides cannot go on answering each other.
        heard: bool,
    },
    /// Decode → prefill: how the room ended. Repeated until `Quiesced`.
    Ended {
        /// The room.
        room: RoomId,
        /// Its grant, or [`GrantId::NONE`].
        grant: GrantId,
        /// How.
        outcome: Outcome,
    },
    /// One engine to the other over the link, both directions: opaque here, at most
    /// [`limits::ENGINE_MESSAGE_BYTES_MAX`] bytes. The one message that is neither repeated nor
    /// idempotent: the session keeps order and loses nothing.
    Engine(Vec<u8>),
}

/// How a room ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// Every page is in place and visible.
    Done {
        /// Bytes moved.
        bytes: u64,
    },
    /// Not done; the blocks hold nothing of use.
    Failed {
        /// Why, and which side is to blame.
        why: Refusal,
        /// Bytes that had arrived.
        bytes: u64,
    },
    /// The prefill side lost the decode before it heard the decision.
    Unknown {
        /// Why it cannot be known.
        why: Refusal,
    },
}

impl Outcome {
    /// Whether every page is in place.
    pub fn is_done(&self) -> bool {
        matches!(self, Self::Done { .. })
    }
    /// Why it is not done.
    pub fn why(&self) -> Option<&Refusal> {
        match self {
            Self::Done { .. } => None,
            Self::Failed { why, .. } | Self::Unknown { why } => Some(why),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done { bytes } => write!(f, "done, {bytes} bytes"),
            Self::Failed { why, .. } => write!(f, "failed, {why}"),
            Self::Unknown { why } => write!(f, "unknown, {why}"),
        }
    }
}

/// Who moves the bytes, and so what a fence needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DataPath {
    /// The receiver's own code puts them in place, from a socket or out of the sender's memory:
    /// closing the grant is the fence.
    ReceiverCopies,
    /// The sender's NIC writes: the fence is the sender's quiesce or the receiver's revoke.
    OneSided,
}

/// What a side brings to a link.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkInfo {
    /// Geometry of its pools.
    pub pools: Vec<Layout>,
    /// Engines that it can use towards this peer, best first, with what the peer needs to connect.
    pub engines: Vec<EngineOffer>,
    /// Lanes it is ready to pool.
    pub lanes: u16,
    /// Size of a part; the decode's word counts.
    pub part_bytes: u64,
}

/// One engine of a side.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineOffer {
    /// `tcp`, `shm`, `verbs`, `gpunetio`, `cuda`.
    pub name: String,
    /// What the other side's engine needs to connect; opaque here.
    pub blob: Vec<u8>,
    /// Where the pages of each pool are, from a receiver whose pages the sender's engine writes
    /// itself; empty where the receiver copies.
    pub maps: Vec<PoolMap>,
}

/// Decode → prefill, one a room and prefill rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// The room.
    pub room: RoomId,
    /// The grant.
    pub grant: GrantId,
    /// The router that reserved it, and so may abort it at both ends.
    pub issuer: Option<Identity>,
    /// What of the prompt is wanted.
    pub span: Span,
    /// The blocks to fill: for each pool, one for each of its blocks in the span.
    pub blocks: Vec<BlockList>,
    /// The lanes lent to the room, each with its pair epoch.
    pub lanes: Vec<(LaneId, u32)>,
    /// Parts that may be in flight at first (cumulative; raised by the engine's acks).
    pub credit_parts: u32,
    /// Length of the grant's lease.
    pub lease_ms: u64,
}

impl Offer {
    /// Size of the block lists in words of 4 bytes.
    pub fn words(&self) -> usize {
        self.blocks.iter().map(BlockList::words).sum()
    }
}

impl LinkInfo {
    /// Checks what a peer says of itself.
    ///
    /// # Errors
    /// Naming the field.
    pub fn check(&self) -> Result<()> {
        Layout::check_pools(&self.pools)?;
        let too_long = |field: &str, found: usize, limit: usize| {
            Error::new(ErrorKind::LimitExceeded, format!("{field} is too long"))
                .with("found", found)
                .with("limit", limit)
        };
        if self.engines.len() > limits::LIST_MAX {
            return Err(too_long("list of engines", self.engines.len(), limits::LIST_MAX));
        }
        for (index, engine) in self.engines.iter().enumerate() {
            for (field, found, limit) in [
                ("engine's name", engine.name.len(), limits::NAME_BYTES_MAX),
                ("engine's blob", engine.blob.len(), limits::BLOB_BYTES_MAX),
            ] {
                if found > limit {
                    return Err(too_long(field, found, limit).with("index", index));
                }
            }
        }
        if self.lanes == 0 || self.lanes > limits::LANES_PER_LINK_MAX {
            return Err(Error::new(ErrorKind::LimitExceeded, "number of lanes out of range")
                .with("found", self.lanes)
                .with("limit", limits::LANES_PER_LINK_MAX));
        }
        if self.part_bytes == 0 || self.part_bytes > limits::PART_BYTES_MAX {
            return Err(Error::new(ErrorKind::LimitExceeded, "part_bytes is out of range")
                .with("found", self.part_bytes)
                .with("limit", limits::PART_BYTES_MAX));
        }
        for engine in self.engines.iter().filter(|e| !e.maps.is_empty()) {
            if engine.maps.len() != self.pools.len() {
                return Err(Error::new(ErrorKind::Malformed, "one map for each pool")
                    .with("found", engine.maps.len())
                    .with("pools", self.pools.len()));
            }
            for (map, layout) in engine.maps.iter().zip(&self.pools) {
                map.check(layout)?;
            }
        }
        Ok(())
    }
}
