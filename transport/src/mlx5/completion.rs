//! Completions (64 bytes each), good and bad.

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
    /// A flush: the queue pair was in error already. Never the first reason.
    pub const FLUSHED: Self = Self(0x05);
    /// Its name in the field, such as `remote access error`; `unknown` for others.
    pub fn name(self) -> &'static str {
        todo!()
    }
}

/// A completion as the NIC writes it, for the pass with this owner bit.
pub fn encode(completion: &Completion, owner: bool) -> Words {
    let _ = (completion, owner);
    todo!()
}
/// A slot that nobody has written yet.
pub const fn unwritten() -> Words {
    todo!()
}
/// Whether the last word of a slot was written in the pass with this owner bit.
#[inline]
pub fn is_written(last_word: u64, owner: bool) -> bool {
    let _ = (last_word, owner);
    todo!()
}
/// Reads a completion that was written.
///
/// # Errors
/// The opcode, if it is not known.
pub fn decode(words: &Words) -> Result<Completion, u8> {
    let _ = words;
    todo!()
}
