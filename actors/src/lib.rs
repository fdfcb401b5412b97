//! Worker-side actors of kvlane: the API of an engine author.
//!
//! A serving engine starts one worker for each rank and talks to it through a handle:
//!
//! - decode ([`DecodeWorker`]): [`DecodeHandle::lend`] blocks to a room, await [`Filling::ended`],
//!   take the blocks back with the proof;
//! - prefill ([`PrefillWorker`]): [`PrefillHandle::attach`] to a room, [`Sending::granted`],
//!   [`Sending::send`] chunks as they become ready, [`Sending::finish`], [`Sending::released`].
//!
//! Actors are thin shells: mailbox in, machine (`kvlane_proto::{decode, prefill, link}`), effects
//! out. Who owns whom:
//!
//! ```text
//! supervisor (runtime.rs, a thread with an actix system)
//! ├── Worker<decode::Rooms | prefill::Rooms>   machine, links, lent blocks
//! │   ├── engine thread               owned by transport::engine::driver, one per device
//! │   ├── accept task, dial tasks     sessions in
//! │   └── one reader task a session   frames in, in order, one at a time
//! └── registration task               lease at the bootstrap service; restarted when it fails
//! ```
//!
//! If a worker's actor or its engine thread ends by a defect, the worker ends as a whole: its
//! connections close, so nothing can land, and what was lent stays in quarantine until the process
//! is started again. A machine whose state is lost cannot prove anything.

mod calls;
mod decode;
mod engine;
#[cfg(feature = "fault-injection")]
pub mod faults;
mod handle;
mod hooks;
mod links;
mod outages;
mod pool;
mod prefill;
mod runtime;
mod shell;
mod tasks;

pub use decode::{DecodeHandle, DecodeWorker, Ending, Filling, LendRequest};
pub use engine::{EMULATED, EngineChoice};
pub use handle::WorkerHandle;
pub use kvlane_proto::prefill::Takers;
pub use pool::Pools;
pub use prefill::{AttachRequest, ChunkRequest, PrefillHandle, PrefillWorker, Ready, Sending};
pub use runtime::{WorkerConfig, WorkerEnd};
