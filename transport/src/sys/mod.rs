//! All FFI and raw memory. Nothing outside this folder is `unsafe`.
//!
//! In: addresses and lengths that [`mem`] has checked against memory it keeps alive. Out: byte
//! counts and `io::Error`s. Invariants: memory that a peer, a NIC or another process may write is
//! never turned into a Rust reference, atomics aside; every pointer given to the kernel lies in a live
//! [`mem::Memory`] or in a Rust slice borrowed for the call.

pub mod clock;
pub mod copy;
mod crc;
pub mod mem;
pub mod memcpy;
pub mod net;
pub mod share;
pub mod unix;
pub mod verbs;
pub mod wait;

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!(
    "kvlane needs 64-bit Linux: addresses are u64, and memfd, eventfd and poll are used"
);
