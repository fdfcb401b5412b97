//! Send entries (one basic block of 64 bytes each), the doorbell record and the doorbell.

/// An entry as eight words of memory: the words' bytes, in memory order, are the entry.
pub type Entry = [u64; 8];

/// Where bytes land.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Address at the other side.
    pub address: u64,
    /// The other side's key for it.
    pub key: u32,
}

/// Where bytes are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Address on this side.
    pub address: u64,
    /// This side's key for it.
    pub key: u32,
    /// How many; less than 2^31.
    pub bytes: u32,
}

/// What a write carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// One range of memory.
    One(Segment),
    /// Two, one behind the other at the destination.
    Two(Segment, Segment),
    /// Up to 28 bytes in the entry itself.
    Inline {
        /// How many count.
        len: u8,
        /// They, and zeros.
        bytes: [u8; 28],
    },
}

/// What an entry asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Nothing; completes in its turn.
    Nop,
    /// RDMA_WRITE.
    Write {
        /// Where to.
        to: Remote,
        /// What.
        data: Data,
    },
    /// RDMA_WRITE_IMM: also takes a receive of the other side and shows it `immediate`.
    WriteImmediate {
        /// Where to.
        to: Remote,
        /// What.
        data: Data,
        /// In the order of the host; big-endian in the entry.
        immediate: u32,
    },
}

/// An entry read back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decoded {
    /// What it asks for.
    pub operation: Operation,
    /// A completion is wanted also if all goes well.
    pub signalled: bool,
    /// Whether earlier reads have to end first (no effect on writes).
    pub fence: bool,
}

/// Why an entry is not executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// Its index is another: the writer's stores are not all here yet.
    Torn {
        /// In the entry.
        found: u16,
        /// By its place.
        expected: u16,
    },
    /// Of another queue pair.
    QueuePair {
        /// In the entry.
        found: u32,
        /// Whose ring it is.
        expected: u32,
    },
    /// An operation, or a modifier of it, that is not known here.
    Opcode {
        /// In the entry.
        found: u8,
        /// Its modifier.
        modifier: u8,
    },
    /// A size that the operation does not have.
    Segments {
        /// In the entry, in units of 16 bytes.
        found: u8,
    },
    /// A length that cannot be.
    Length {
        /// In the entry.
        found: u32,
    },
}

/// The entry of a write of one range: the only one on the hot path.
#[inline]
pub fn write(index: u16, queue_pair: u32, to: Remote, from: Segment, signalled: bool) -> Entry {
    let _ = (index, queue_pair, to, from, signalled);
    todo!()
}
/// As [`write`], with an immediate.
#[inline]
pub fn write_immediate(
    index: u16,
    queue_pair: u32,
    to: Remote,
    from: Segment,
    immediate: u32,
    signalled: bool,
) -> Entry {
    let _ = (index, queue_pair, to, from, immediate, signalled);
    todo!()
}
/// Any entry.
pub fn encode(index: u16, queue_pair: u32, what: &Decoded) -> Entry {
    let _ = (index, queue_pair, what);
    todo!()
}
/// Reads an entry at the place of `index` in the ring of `queue_pair`.
///
/// # Errors
/// [`Malformed`] with what is wrong; the index is looked at first.
pub fn decode(entry: &Entry, index: u16, queue_pair: u32) -> Result<Decoded, Malformed> {
    let _ = (entry, index, queue_pair);
    todo!()
}

/// One half of the doorbell record: the index of the next entry, as four bytes of memory.
#[inline]
pub fn record(next: u16) -> u32 {
    (u32::from(next)).to_be()
}
/// The index in one half of a doorbell record.
#[inline]
pub fn record_index(half: u32) -> u16 {
    u32::from_be(half) as u16
}
/// The doorbell's value in the convention of libmlx5: the first 8 bytes of the last entry.
#[inline]
pub fn doorbell_of_last(last: &Entry) -> u64 {
    last[0]
}
/// The doorbell's value in the convention of GPU writers: the index of the next entry, opcode 0.
#[inline]
pub fn doorbell_of_next(next: u16, queue_pair: u32) -> u64 {
    let _ = (next, queue_pair);
    todo!()
}
/// What a doorbell says, in either convention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doorbell {
    /// Whose it is.
    pub queue_pair: u32,
    /// The index of the next entry, whichever convention it came in.
    pub next: u16,
}
/// Reads a doorbell.
pub fn doorbell(value: u64) -> Doorbell {
    let _ = value;
    todo!()
}
