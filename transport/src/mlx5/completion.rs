//! Completions (64 bytes each), good and bad.
//!
//! In: what the NIC says, and back. Invariants: a slot counts as written by its last byte alone
//! (owner bit of this pass, opcode not that of an unwritten slot), so the last word is stored last
//! and loaded first; everything that a reader here ignores is zero when written here.

use super::entry::{WRITE, first, pair, second};

const REQUEST: u8 = 0;
const ARRIVED: u8 = 1;
const REQUEST_ERROR: u8 = 13;
const RESPONSE_ERROR: u8 = 14;
const INVALID: u8 = 15;
/// Last byte of a slot that nobody has written yet: invalid, and the owner bit of the second pass.
const UNWRITTEN: u32 = (INVALID as u32) << 4 | 1;
/// Width of a queue pair's number, and of the count of completions consumed.
const MASK_24: u32 = 0xff_ffff;

/// What asks for an event. The NIC takes it away (stores 0) with the event that it sends.
pub const ARMED: u32 = 1_u32.to_be();

/// A completion as eight words of memory. The last word holds the owner bit: it is stored last.
pub type Words = [u64; 8];

/// Why something did not work, as the NIC says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Syndrome(pub u8);

/// What went wrong with an entry or a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Which of the known reasons.
    pub syndrome: Syndrome,
    /// The vendor's own code, next to it.
    pub vendor: u8,
}

/// A completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Whose.
    pub queue_pair: u32,
    /// Index of the entry or of the receive that it is about.
    pub index: u16,
    /// What it says.
    pub what: What,
}

/// What a completion says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The entry, and every one before it, is done.
    Sent,
    /// Somebody's write with an immediate is in place, and every one of his before it.
    Arrived {
        /// In the order of the host.
        immediate: u32,
        /// Bytes of that write.
        bytes: u32,
    },
    /// An entry failed, or was flushed.
    SendFailed(Fault),
    /// A receive failed, or was flushed.
    ReceiveFailed(Fault),
}

impl Syndrome {
    /// The local segments do not make up the message.
    pub const LOCAL_LENGTH: Self = Self(0x01);
    /// The entry makes no sense to the NIC.
    pub const LOCAL_QP_OPERATION: Self = Self(0x02);
    /// This side's key does not cover what the entry names.
    pub const LOCAL_PROTECTION: Self = Self(0x04);
    /// A flush: the queue pair was in error already. Never the first reason.
    pub const FLUSHED: Self = Self(0x05);
    /// A memory window could not be bound.
    pub const MEMORY_WINDOW_BIND: Self = Self(0x06);
    /// The other side answered something else.
    pub const BAD_RESPONSE: Self = Self(0x10);
    /// A write with an immediate met memory that this side may not be written to.
    pub const LOCAL_ACCESS: Self = Self(0x11);
    /// The other side does not take such a request.
    pub const REMOTE_INVALID_REQUEST: Self = Self(0x12);
    /// The other side's key does not cover what the entry names.
    pub const REMOTE_ACCESS: Self = Self(0x13);
    /// The other side could not carry it out.
    pub const REMOTE_OPERATION: Self = Self(0x14);
    /// The other side did not answer.
    pub const TRANSPORT_RETRIES: Self = Self(0x15);
    /// The other side had no receive posted.
    pub const RNR_RETRIES: Self = Self(0x16);
    /// The other side gave up.
    pub const REMOTE_ABORTED: Self = Self(0x22);
    /// Its name in the field, such as `remote access error`; `unknown` for others.
    pub fn name(self) -> &'static str {
        match self {
            Self::LOCAL_LENGTH => "local length error",
            Self::LOCAL_QP_OPERATION => "local QP operation error",
            Self::LOCAL_PROTECTION => "local protection error",
            Self::FLUSHED => "flushed",
            Self::MEMORY_WINDOW_BIND => "memory window bind error",
            Self::BAD_RESPONSE => "bad response",
            Self::LOCAL_ACCESS => "local access error",
            Self::REMOTE_INVALID_REQUEST => "remote invalid request",
            Self::REMOTE_ACCESS => "remote access error",
            Self::REMOTE_OPERATION => "remote operation error",
            Self::TRANSPORT_RETRIES => "transport retry counter exceeded",
            Self::RNR_RETRIES => "RNR retry counter exceeded",
            Self::REMOTE_ABORTED => "remote aborted",
            Self(_) => "unknown",
        }
    }
}

/// A completion as the NIC writes it, for the pass with this owner bit.
pub fn encode(completion: &Completion, owner: bool) -> Words {
    let said = |fault: Fault| u32::from(fault.vendor) << 8 | u32::from(fault.syndrome.0);
    let (opcode, immediate, bytes, fault) = match completion.what {
        What::Sent => (REQUEST, 0, 0, 0),
        What::Arrived { immediate, bytes } => (ARRIVED, immediate, bytes, 0),
        What::SendFailed(fault) => (REQUEST_ERROR, 0, 0, said(fault)),
        What::ReceiveFailed(fault) => (RESPONSE_ERROR, 0, 0, said(fault)),
    };
    // The NIC also tells which operation it was. Nobody here asks, and nearly all are writes.
    let operation = if matches!(opcode, REQUEST | REQUEST_ERROR) { WRITE } else { 0 };
    let whose = u32::from(operation) << 24 | completion.queue_pair & MASK_24;
    let last = u32::from(opcode) << 4 | u32::from(owner);
    [
        0,
        0,
        0,
        0,
        pair(0, immediate),
        pair(0, bytes),
        pair(0, fault),
        pair(whose, u32::from(completion.index) << 16 | last),
    ]
}
/// A slot that nobody has written yet.
pub const fn unwritten() -> Words {
    [0, 0, 0, 0, 0, 0, 0, pair(0, UNWRITTEN)]
}
/// Whether the last word of a slot was written in the pass with this owner bit.
#[inline]
pub fn is_written(last_word: u64, owner: bool) -> bool {
    let last = second(last_word) as u8;
    last & 1 == u8::from(owner) && last >> 4 != INVALID
}
/// Reads a completion that was written.
///
/// # Errors
/// The opcode, if it is not known.
pub fn decode(words: &Words) -> Result<Completion, u8> {
    let (whose, last) = (first(words[7]), second(words[7]));
    let said = second(words[6]);
    let fault = Fault { syndrome: Syndrome(said as u8), vendor: (said >> 8) as u8 };
    let what = match last as u8 >> 4 {
        REQUEST => What::Sent,
        ARRIVED => What::Arrived { immediate: second(words[4]), bytes: second(words[5]) },
        REQUEST_ERROR => What::SendFailed(fault),
        RESPONSE_ERROR => What::ReceiveFailed(fault),
        other => return Err(other),
    };
    Ok(Completion { queue_pair: whose & MASK_24, index: (last >> 16) as u16, what })
}

/// How many completions were consumed, modulo 2^24, as four bytes of memory.
#[inline]
pub fn consumed(next: u64) -> u32 {
    (next as u32 & MASK_24).to_be()
}
/// The count in such a half, modulo 2^24.
#[inline]
pub fn consumed_count(half: u32) -> u32 {
    u32::from_be(half) & MASK_24
}
