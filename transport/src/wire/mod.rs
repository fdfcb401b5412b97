//! From messages to bounded frames and back.
//!
//! Owns the codec ([`codec`], the only place that names bincode), the frame format ([`frame`]) and
//! what every message must satisfy once it is decoded ([`message`]). In: bytes of a peer, all of
//! them hostile. Out: messages that decoded completely and passed their check, or a counted refusal.
//!
//! Invariants: nothing is allocated because a peer claims it, only because its bytes have come; a
//! message that reaches a caller has been checked; the first byte of a frame starts a deadline.

pub mod codec;
pub mod frame;
pub mod message;

use kvlane_proto::{Error, ErrorKind};

pub use codec::{decode, encode};
pub use frame::{FrameReader, read_frame, write_frame};
pub use message::{Message, open, seal};

/// First byte of every frame.
pub const MAGIC: u8 = 0xB1;
/// Bytes before a frame's body.
pub const HEADER_BYTES: usize = 6;
/// Counts a refusal and makes the error that says so. `reason` is the metric's label: one of a
/// fixed set of words, never text from a peer.
pub(crate) fn refuse(reason: &'static str, kind: ErrorKind, message: &str) -> Error {
    count_refusal(reason);
    Error::new(kind, message).with("reason", reason)
}

/// Counts a refusal in `kvlane_wire_refusals_total`.
pub(crate) fn count_refusal(reason: &'static str) {
    metrics::counter!("kvlane_wire_refusals_total", "reason" => reason).increment(1);
}
