//! Messages and state machines of kvlane, without I/O.
//!
//! Nothing here opens a socket, reads a clock or starts a thread: machines take events and the
//! time, and give back effects. That is why the same code runs under the seeded simulator and in a
//! worker. Machines share four verbs: `handle_event(now, event)`, `handle_timeout(now)`,
//! `poll_output()` until it is empty, `poll_timeout()` for when to call again.
//!
//! In the order a page takes: [`msg`] (what is said), [`layout`] and [`blocks`] (what a page is),
//! [`plan`] (from blocks to parts and addresses), [`grants`] (what may be written),
//! [`decode`] and [`prefill`] (a room's two sides), [`link`] (two workers).

pub mod blocks;
pub mod decode;
pub mod ended;
pub mod error;
pub mod grants;
pub mod ids;
pub mod layout;
pub mod lease;
pub mod limits;
pub mod link;
pub mod msg;
pub mod mutant;
pub mod plan;
pub mod prefill;
pub mod registry;
pub mod time;

pub use blocks::{BlockList, Run};
pub use error::{Blame, Error, ErrorKind, Refusal, Result, Retry};
pub use grants::FenceHow;
pub use ids::{
    GrantId, IdempotencyKey, Identity, Incarnation, LaneId, LinkId, PartId, Role, RoomId, WorkerKey,
};
pub use layout::{Device, Layout, PoolMap};
pub use msg::peer::{DataPath, Outcome};
pub use plan::{Grid, Page, PartPages, Plan, Rect, Share, Side, Span};
pub use time::Time;
