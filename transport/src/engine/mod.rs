//! Engines: the data planes that move pages.
//!
//! An engine is polled, not awaited, on a thread of its own ([`driver`]). It owns connections (or
//! queue pairs), open grants and everything that could still write; it decides nothing. One small
//! trait serves both data paths: a receiver that copies from a socket (`tcp`) or out of the
//! sender's memory (`shm`, `cuda`), and a one-sided writer (`verbs`, `gpunetio`).
//!
//! In: [`Command`]s from the worker's actor. Out: [`EngineEvent`]s. Invariants: no byte lands
//! outside an open grant; a [`FenceProof`] exists only once nothing can land under its grant any
//! more; a [`Quiesced`] only once the source may change and, on one-sided paths, nothing that this
//! side posted on lanes that it has not reported lost can land. (Where the receiver copies, whole parts may still stand in a socket; the
//! receiver's closed grant stops those.)

pub mod auto;
pub mod driver;
pub mod fence;
pub mod gpunetio;
pub mod one_sided;
mod pen;
mod redial;
mod refusals;
pub mod shm;
pub mod tcp;
pub mod throttle;
pub mod verbs;

use std::os::fd::RawFd;
use std::sync::Arc;

use kvlane_proto::{
    DataPath, Error, GrantId, LaneId, LinkId, PartId, PartPages, Plan, Refusal, Result, Time,
    WorkerKey,
};

pub use fence::{FenceHow, FenceProof, Quiesced};

/// What an engine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// `tcp`, `shm`, …
    pub name: &'static str,
    /// Who moves the bytes.
    pub path: DataPath,
    /// A test device: its figures mean nothing.
    pub emulated: bool,
    /// Separate paths that its lanes are spread over: lane `n` is on rail `n % rails`.
    pub rails: u16,
}

/// A grant as the receiver's engine needs it.
#[derive(Clone, Debug)]
pub struct OpenGrant {
    /// Its number.
    pub grant: GrantId,
    /// The links that may fill it, each its own parts.
    pub sources: Vec<OpenSource>,
}

/// One link of a grant.
#[derive(Clone, Debug)]
pub struct OpenSource {
    /// The link.
    pub link: LinkId,
    /// The lanes lent to the grant.
    pub lanes: Vec<LaneId>,
    /// Where each of the link's parts goes.
    pub plan: Arc<Plan>,
}

/// One part to send.
#[derive(Clone, Debug)]
pub struct Post {
    /// The link.
    pub link: LinkId,
    /// The grant it is sent under.
    pub grant: GrantId,
    /// The part.
    pub part: PartId,
    /// The lane to use.
    pub lane: LaneId,
    /// The sender's pages.
    pub pages: PartPages,
}

/// A grant as the sender's engine needs it, where that writes the receiver's pages itself.
#[derive(Clone, Debug)]
pub struct SendGrant {
    /// The link.
    pub link: LinkId,
    /// Its number.
    pub grant: GrantId,
    /// The lanes lent to it. It is posted on their connections of this moment only: the next
    /// connection of a lane may be another grant's.
    pub lanes: Vec<LaneId>,
    /// Where each part goes, by the receiver's addresses.
    pub plan: Arc<Plan>,
}

/// What an engine is told.
#[derive(Debug)]
pub enum Command {
    /// Makes ready for a peer and answers [`EngineEvent::Local`] with what the peer's engine needs.
    /// The receiver listens, the sender dials; `receiver` says which this side is.
    Listen {
        /// The link.
        link: LinkId,
        /// Who will connect.
        peer: WorkerKey,
        /// How many lanes.
        lanes: u16,
        /// This side receives pages.
        receiver: bool,
    },
    /// Second step: what the peer's engine answered. Lanes come up as [`EngineEvent::LaneUp`].
    Connect {
        /// The link.
        link: LinkId,
        /// The peer's blob.
        remote: Vec<u8>,
    },
    /// What the peer's engine said ([`EngineEvent::Tell`]), in its order. May come before
    /// [`Command::Connect`], never before [`Command::Listen`].
    Told {
        /// The link.
        link: LinkId,
        /// Its words.
        message: Vec<u8>,
    },
    /// The link is over: lanes close, imports are given up, posts end, grants stay closed to it.
    Close {
        /// The link.
        link: LinkId,
    },
    /// Receiver: pages may land under this grant from here on.
    Open(OpenGrant),
    /// Receiver: make sure that nothing lands any more; [`EngineEvent::Fenced`] is the proof. A
    /// grant that was never opened is fenced at once.
    Fence {
        /// The grant.
        grant: GrantId,
        /// How.
        how: FenceHow,
    },
    /// Sender, one-sided only: a grant that parts will be posted under. To be given when the
    /// receiver's offer comes, before what its engine said later ([`Command::Told`]): what connection
    /// a lane has is a matter of that order.
    Grant(SendGrant),
    /// Sender: one part.
    Post(Post),
    /// Sender: give up a lane's connection, because nothing moves on it; [`EngineEvent::LaneDown`]
    /// follows, and the usual re-dial.
    ResetLane {
        /// The link.
        link: LinkId,
        /// The lane.
        lane: LaneId,
    },
    /// Sender: stop a grant; [`EngineEvent::Quiesced`] when its source may change (see there).
    Quiesce {
        /// The link.
        link: LinkId,
        /// The grant.
        grant: GrantId,
    },
}

/// What an engine says.
#[derive(Debug)]
pub enum EngineEvent {
    /// Answer to [`Command::Listen`]; with an error also where [`Command::Connect`] cannot be done:
    /// the link will not come up.
    Local {
        /// The link.
        link: LinkId,
        /// For the peer's [`Command::Connect`], or why there is none.
        blob: Result<Vec<u8>>,
    },
    /// For the peer's engine, over the link: at most [`kvlane_proto::limits::ENGINE_MESSAGE_BYTES_MAX`]
    /// bytes. Order is kept; nothing is lost as long as the link lives.
    Tell {
        /// The link.
        link: LinkId,
        /// Its words.
        message: Vec<u8>,
    },
    /// Engine `auto`: the link's lanes, from the next that comes up on, are of this engine.
    Chosen {
        /// The link.
        link: LinkId,
        /// Its name.
        engine: &'static str,
    },
    /// A lane carries pages.
    LaneUp {
        /// The link.
        link: LinkId,
        /// The lane.
        lane: LaneId,
    },
    /// A lane does not any more; its posts are in doubt. The sender's side dials again with
    /// back-off as long as the link lives.
    LaneDown {
        /// The link.
        link: LinkId,
        /// The lane.
        lane: LaneId,
        /// Why.
        why: Refusal,
    },
    /// Receiver: every byte of a part is in place.
    Arrived {
        /// The link that brought it: each counts its own parts.
        link: LinkId,
        /// The grant.
        grant: GrantId,
        /// The part.
        part: PartId,
        /// The lane that brought it.
        lane: LaneId,
    },
    /// Receiver: nothing can land under the grant any more, and what landed is visible.
    Fenced(FenceProof),
    /// Receiver: the fence cannot complete.
    FenceFailed {
        /// The grant.
        grant: GrantId,
        /// Why.
        why: Refusal,
    },
    /// Receiver: a frame was refused and read to scrap.
    Scrapped {
        /// The link.
        link: LinkId,
        /// Bytes thrown away.
        bytes: u64,
        /// Why.
        why: Refusal,
    },
    /// Sender: the receiver has the part.
    Acked {
        /// The link (grant numbers are unique per decode worker only).
        link: LinkId,
        /// The grant.
        grant: GrantId,
        /// The part.
        part: PartId,
        /// The lane.
        lane: LaneId,
    },
    /// Sender: the receiver refused the part, or it was corrupt.
    Nacked {
        /// The link (grant numbers are unique per decode worker only).
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
    /// Sender: the grant's source may change; on one-sided paths, nothing that was posted for it
    /// can land either, but on lanes that were reported lost before.
    Quiesced(Quiesced),
    /// Something that concerns no room: logged and counted.
    Trouble(Error),
}

/// A data plane.
pub trait Engine: Send {
    /// What it is.
    fn caps(&self) -> Caps;
    /// Makes memory known. Nothing outside registered memory is ever read or written.
    ///
    /// # Errors
    /// Naming the range and device; a refused registration changes nothing.
    fn register(&mut self, region: &Arc<crate::memory::Region>) -> Result<()>;
    /// Forgets memory.
    ///
    /// # Errors
    /// [`kvlane_proto::ErrorKind::Busy`] while a grant or post uses it.
    fn unregister(&mut self, region: &Arc<crate::memory::Region>) -> Result<()>;
    /// Takes one command. What goes wrong comes back as an event of the link or grant.
    fn command(&mut self, now: Time, command: Command);
    /// Makes progress without blocking and appends what happened; says whether there was any.
    fn poll(&mut self, now: Time, events: &mut Vec<EngineEvent>) -> bool;
    /// What to park on until there may be something to do: descriptors with the wanted direction,
    /// and the latest time to be called again.
    fn park(&mut self, interests: &mut Vec<Interest>) -> Option<Time>;
}

/// A descriptor to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interest {
    /// The descriptor.
    pub fd: RawFd,
    /// Wake when readable.
    pub read: bool,
    /// Wake when writable.
    pub write: bool,
}
