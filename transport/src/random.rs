//! Random numbers, from the kernel.
//!
//! In: a buffer, or nothing. Out: unpredictable bytes, or a refusal ([`fill_random`]); a number for
//! jitter ([`random`]).

use kvlane_proto::{Error, ErrorKind, Result};

use crate::clock;

/// A random number for jitter; nothing depends on its quality.
pub fn random() -> u64 {
    getrandom::u64().unwrap_or_else(|_| clock::now().0)
}

/// Fills `bytes` with random numbers, for incarnations, keys and the like.
///
/// # Errors
/// [`ErrorKind::Io`] if the system has none.
pub fn fill_random(bytes: &mut [u8]) -> Result<()> {
    getrandom::fill(bytes)
        .map_err(|e| Error::new(ErrorKind::Io, "no random numbers").with("found", e))
}
