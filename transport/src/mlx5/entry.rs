//! Send entries (one basic block of 64 bytes each), the doorbell record and the doorbell.
//!
//! In: what an entry asks for, its index and its queue pair. Out: its bytes, and back. Invariants:
//! what is not set is zero; a decoder looks at the index before anything else, because a wrong one
//! means that the rest is of another time. It ignores the bytes 0x08 to 0x0a and 0x1c to 0x1f, the
//! immediate of what has none, and unused segments: real writers leave them as they were.

use super::{ENTRY_BYTES, WRITE_BYTES_MAX};

/// RDMA_WRITE, also as a completion names it.
pub(super) const WRITE: u8 = 0x08;
const NOP: u8 = 0x00;
const WRITE_IMMEDIATE: u8 = 0x09;
/// Completion: always. Its other values are 0 (errors only), 1 (the first error) and 3 (and an event).
const COMPLETE: u32 = 2 << 2;
/// As IBV_SEND_FENCE comes out. The field has other, weaker and stronger modes.
const FENCE: u32 = 4 << 5;
const FENCES: u32 = 7 << 5;
/// Of a byte count: the bytes follow in the entry.
const INLINE: u32 = 1 << 31;
/// The bytes of an entry that may be data.
const INLINE_AT: usize = 0x24;
const INLINE_MAX: usize = 28;
/// Of these, what fits into the first segment of 16 bytes, behind its byte count.
const INLINE_FIRST: usize = 12;

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
    /// How many: at least 1 (a NIC takes 0 for 2^31, so drivers leave an empty range out) and at
    /// most [`WRITE_BYTES_MAX`].
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
        /// How many count. With 0, nothing is carried at all.
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
    /// Whether earlier reads have to end first (no effect on writes). Every mode of it counts.
    pub fence: bool,
}

impl Decoded {
    /// As an entry of this side, which never waits for reads.
    pub fn new(operation: Operation, signalled: bool) -> Self {
        Self { operation, signalled, fence: false }
    }
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

/// Two halves in the order of the host, as eight bytes of the wire.
#[inline]
pub(super) const fn pair(first: u32, second: u32) -> u64 {
    ((first as u64) << 32 | second as u64).to_be()
}
/// The first four of eight bytes of the wire.
#[inline]
pub(super) const fn first(word: u64) -> u32 {
    (u64::from_be(word) >> 32) as u32
}
/// The last four.
#[inline]
pub(super) const fn second(word: u64) -> u32 {
    u64::from_be(word) as u32
}

/// What every entry starts with. The number of a queue pair has 24 bits; shifting drops the others.
#[inline]
const fn head(index: u16, opcode: u8, queue_pair: u32, segments: u8) -> u64 {
    pair((index as u32) << 8 | opcode as u32, queue_pair << 8 | segments as u32)
}
/// A byte count of memory, which can never be taken for one of inline bytes: what is too long stays
/// too long, so that the NIC refuses it.
#[inline]
fn count(bytes: u32) -> u32 {
    bytes.min(INLINE - 1)
}
#[inline]
fn one(head: u64, flags: u32, immediate: u32, to: Remote, from: Segment) -> Entry {
    [
        head,
        pair(flags, immediate),
        to.address.to_be(),
        pair(to.key, 0),
        pair(count(from.bytes), from.key),
        from.address.to_be(),
        0,
        0,
    ]
}
#[inline]
const fn complete(signalled: bool) -> u32 {
    signalled as u32 * COMPLETE
}

/// The entry of a write of one range: the only one on the hot path.
#[inline]
pub fn write(index: u16, queue_pair: u32, to: Remote, from: Segment, signalled: bool) -> Entry {
    one(head(index, WRITE, queue_pair, 3), complete(signalled), 0, to, from)
}
/// As [`write()`], with an immediate.
#[inline]
pub fn write_immediate(
    index: u16,
    queue_pair: u32,
    to: Remote,
    from: Segment,
    immediate: u32,
    signalled: bool,
) -> Entry {
    one(head(index, WRITE_IMMEDIATE, queue_pair, 3), complete(signalled), immediate, to, from)
}
/// Any entry.
pub fn encode(index: u16, queue_pair: u32, what: &Decoded) -> Entry {
    let flags = complete(what.signalled) | if what.fence { FENCE } else { 0 };
    let (opcode, to, data, immediate) = match what.operation {
        Operation::Nop => {
            return [head(index, NOP, queue_pair, 1), pair(flags, 0), 0, 0, 0, 0, 0, 0];
        }
        Operation::Write { to, data } => (WRITE, to, data, 0),
        Operation::WriteImmediate { to, data, immediate } => (WRITE_IMMEDIATE, to, data, immediate),
    };
    let head = |segments| head(index, opcode, queue_pair, segments);
    match data {
        Data::One(from) => one(head(3), flags, immediate, to, from),
        Data::Two(from, then) => {
            let mut entry = one(head(4), flags, immediate, to, from);
            entry[6] = pair(count(then.bytes), then.key);
            entry[7] = then.address.to_be();
            entry
        }
        Data::Inline { len, bytes } => {
            let len = usize::from(len).min(INLINE_MAX);
            let segments = match len {
                0 => 2,
                1..=INLINE_FIRST => 3,
                _ => 4,
            };
            let nothing = Segment { address: 0, key: 0, bytes: 0 };
            let mut entry = to_bytes(&one(head(segments), flags, immediate, to, nothing));
            if len > 0 {
                entry[INLINE_AT - 4..INLINE_AT]
                    .copy_from_slice(&(INLINE | len as u32).to_be_bytes());
                entry[INLINE_AT..INLINE_AT + len].copy_from_slice(&bytes[..len]);
            }
            from_bytes(&entry)
        }
    }
}
/// Reads an entry at the place of `index` in the ring of `queue_pair`.
///
/// # Errors
/// [`Malformed`] with what is wrong; the index is looked at first.
pub fn decode(entry: &Entry, index: u16, queue_pair: u32) -> Result<Decoded, Malformed> {
    let (what, whose) = (first(entry[0]), second(entry[0]));
    let (modifier, opcode) = ((what >> 24) as u8, what as u8);
    let found = (what >> 8) as u16;
    if found != index {
        return Err(Malformed::Torn { found, expected: index });
    }
    if whose >> 8 != queue_pair {
        return Err(Malformed::QueuePair { found: whose >> 8, expected: queue_pair });
    }
    if modifier != 0 || !matches!(opcode, NOP | WRITE | WRITE_IMMEDIATE) {
        return Err(Malformed::Opcode { found: opcode, modifier });
    }
    let segments = whose as u8;
    let operation = if opcode == NOP {
        if segments != 1 {
            return Err(Malformed::Segments { found: segments });
        }
        Operation::Nop
    } else {
        let to = Remote { address: u64::from_be(entry[2]), key: first(entry[3]) };
        let data = data(entry, segments)?;
        if opcode == WRITE {
            Operation::Write { to, data }
        } else {
            Operation::WriteImmediate { to, data, immediate: second(entry[1]) }
        }
    };
    let flags = first(entry[1]);
    Ok(Decoded { operation, signalled: flags & COMPLETE != 0, fence: flags & FENCES != 0 })
}

/// What a write of so many segments carries.
fn data(entry: &Entry, segments: u8) -> Result<Data, Malformed> {
    if !(2..=4).contains(&segments) {
        return Err(Malformed::Segments { found: segments });
    }
    let mut bytes = [0; INLINE_MAX];
    if segments == 2 {
        return Ok(Data::Inline { len: 0, bytes });
    }
    let found = first(entry[4]);
    if found & INLINE != 0 {
        let len = (found & !INLINE) as usize;
        // A short one with both segments would have the NIC read the second as one of memory.
        let fits = match segments {
            3 => len <= INLINE_FIRST,
            _ => len > INLINE_FIRST && len <= INLINE_MAX,
        };
        if !fits {
            return Err(Malformed::Length { found });
        }
        bytes[..len].copy_from_slice(&to_bytes(entry)[INLINE_AT..INLINE_AT + len]);
        return Ok(Data::Inline { len: len as u8, bytes });
    }
    let from = segment(entry[4], entry[5])?;
    if segments == 3 {
        return Ok(Data::One(from));
    }
    let then = segment(entry[6], entry[7])?;
    let all = from.bytes + then.bytes;
    if all > WRITE_BYTES_MAX {
        return Err(Malformed::Length { found: all });
    }
    Ok(Data::Two(from, then))
}

fn segment(what: u64, address: u64) -> Result<Segment, Malformed> {
    let bytes = first(what);
    if bytes == 0 || bytes > WRITE_BYTES_MAX {
        return Err(Malformed::Length { found: bytes });
    }
    Ok(Segment { address: u64::from_be(address), key: second(what), bytes })
}

/// An entry byte by byte.
fn to_bytes(entry: &Entry) -> [u8; ENTRY_BYTES] {
    let mut bytes = [0; ENTRY_BYTES];
    for (to, word) in bytes.chunks_exact_mut(8).zip(entry) {
        to.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}
/// The entry of such bytes.
fn from_bytes(bytes: &[u8; ENTRY_BYTES]) -> Entry {
    std::array::from_fn(|i| u64::from_ne_bytes(std::array::from_fn(|j| bytes[i * 8 + j])))
}

/// One half of the doorbell record: the index of the next entry, as four bytes of memory.
#[inline]
pub fn record(next: u16) -> u32 {
    u32::from(next).to_be()
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
    head(next, NOP, queue_pair, 0)
}
/// What a doorbell says, in either convention.
///
/// It is only a kick: how far to go is in the record, which is authoritative. A doorbell may be
/// older than the record (rung again before the NIC looked), and some GPU writers ring once before
/// they store the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doorbell {
    /// Whose it is.
    pub queue_pair: u32,
    /// The index of the next entry, whichever convention it came in. To be compared with, not to be
    /// trusted: opcode 0 is both that of GPU writers and that of a NOP which is the last entry of a
    /// libmlx5 writer. The NOP is told by its size of one segment, where GPU writers leave a zero;
    /// nothing promises that all of them do.
    pub next: u16,
}
/// Reads a doorbell. Bits of an index above its 16, which some GPU writers let run into the opcode's
/// modifier, are ignored.
pub fn doorbell(value: u64) -> Doorbell {
    let (what, whose) = (first(value), second(value));
    let index = (what >> 8) as u16;
    let of_last = what as u8 != NOP || whose as u8 == 1;
    Doorbell { queue_pair: whose >> 8, next: index.wrapping_add(u16::from(of_last)) }
}
