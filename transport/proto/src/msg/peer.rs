//! Worker to worker: what a link carries. Prefill is the side that holds the pages, decode the
//! side that wants them; decode dials.
//!
//! Every message may be lost, repeated or overtaken: each is idempotent, names room and grant, and
//! is sent again until its answer has come.

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
    /// Prefill → decode, pull engines: these parts may be read now.
    Serve(Box<Serve>),
    /// Decode → prefill: the serve arrived.
    ServeAck {
        /// The room.
        room: RoomId,
        /// Its grant.
        grant: GrantId,
        /// Number of the serve.
        serve: u32,
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
    /// The receiver's own code puts them in place: closing the grant is the fence.
    ReceiverCopies,
    /// The sender's NIC writes: the fence is the sender's quiesce or the receiver's revoke.
    OneSided,
    /// The receiver reads the sender's memory: its own copies stop; the sender has the serve word.
    Puller,
}

/// What a side brings to a link.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkInfo {
    /// Geometry of its pool.
    pub layout: Layout,
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
    /// Where the pages are, on pull engines.
    pub map: Option<PoolMap>,
}

/// Decode → prefill, one a room.
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
    /// The blocks to fill, one for each block of the span.
    pub blocks: BlockList,
    /// The lanes lent to the room, each with its pair epoch.
    pub lanes: Vec<(LaneId, u32)>,
    /// Parts that may be in flight at first (cumulative; raised by the engine's acks).
    pub credit_parts: u32,
    /// Length of the grant's lease.
    pub lease_ms: u64,
}

/// Prefill → decode on pull engines: permission to read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Serve {
    /// The room.
    pub room: RoomId,
    /// Its grant.
    pub grant: GrantId,
    /// Counts the room's serves, from 0.
    pub serve: u32,
    /// Parts that may be read, as (first, count).
    pub parts: Vec<(u32, u32)>,
    /// First block (index into the room's list) of `blocks`.
    pub first_block: u32,
    /// The sender's blocks for the parts' block ranges.
    pub blocks: BlockList,
    /// Index of the serve word in the sender's table.
    pub word: u32,
    /// Its value while the serve is valid.
    pub word_value: u64,
}

impl LinkInfo {
    /// Checks what a peer says of itself.
    ///
    /// # Errors
    /// Naming the field.
    pub fn check(&self) -> Result<()> {
        self.layout.check()?;
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
        for map in self.engines.iter().filter_map(|e| e.map.as_ref()) {
            map.check(&self.layout)?;
        }
        Ok(())
    }
}
