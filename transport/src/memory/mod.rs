//! What may be read and written: regions, who registered them, and blocks that are lent.
//!
//! Owns: [`Region`] (one range of one device), [`Registry`] (the regions an engine knows),
//! [`Lent`] and [`Quarantine`] (blocks of the serving engine's allocator while kvlane has them). In:
//! memory from [`crate::sys::mem`]. Out: addresses, or refusals that name what was asked and every
//! candidate. Invariants: nothing outside a registered region is read or written; a lent block
//! comes back with a proof or not at all.

mod lent;
mod region;
mod registry;

pub use lent::{Lent, Quarantine, Quarantined};
pub use region::Region;
pub use registry::Registry;
