//! From two ranks' layouts and a room's blocks to parts and bytes.
//!
//! A page's way: [`Share`] is what one rank has for another (which layers, heads and tokens, and
//! how the bytes of a page lie on either side); [`Grid`] cuts a room's part of it into parts, the
//! same at both ends; [`Blocks`] and [`PartPages`] put one side's addresses to it. All of it is pure:
//! layouts, lists and numbers in, numbers out.
//!
//! Everything is counted in *cells*: the tokens of the smaller of the two page sizes (or one row,
//! where a block is a row), so that pages of different sizes meet without a special case.
//!
//! Invariants: the parts of a grid cover every cell of the room exactly once ([`Grid::prove`]); the
//! shares of the ranks that send to one cover each of its heads and layers exactly once
//! ([`sources`]); a list exists only if its blocks are inside the pool and distinct. So every
//! destination byte is written exactly once.

mod grid;
mod pages;
mod share;

#[cfg(test)]
mod golden;
#[cfg(test)]
mod tests;

pub use grid::{Grid, Rect, Span};
pub use pages::{Blocks, Page, PartPages, Plan, Write, writes};
pub use share::{PoolShare, Share, Side, prove_sources, sources};
