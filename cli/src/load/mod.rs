//! Load: which models, which requests, which bytes.
//!
//! Pure code without sockets or threads. [`models`] gives the geometry of well-known models,
//! [`instance`] that of all ranks of an instance, as a file describes it, [`trace`] gives requests
//! (read from a file or generated), [`content`] gives the bytes of every page of every request and
//! says what a wrong page looks like.

pub(crate) mod content;
pub(crate) mod instance;
pub(crate) mod models;
pub(crate) mod trace;

/// The finaliser of SplitMix64: a bijection of 64-bit words in which every input bit reaches every
/// output bit.
#[inline]
pub(crate) const fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(MUL_1);
    x = (x ^ (x >> 27)).wrapping_mul(MUL_2);
    x ^ (x >> 31)
}

const MUL_1: u64 = 0xbf58_476d_1ce4_e5b9;
const MUL_2: u64 = 0x94d0_49bb_1331_11eb;
/// 2^64 divided by the golden ratio: steps of it are spread evenly.
pub(crate) const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
