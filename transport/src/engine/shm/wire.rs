//! Bytes and words of the `shm` engine: blob, messages of the socket, slots of the rings.
//!
//! In: structs, or what a stranger sent or wrote. Out: bytes and words, or a refusal. Slots are
//! decoded from copies: a peer may change them at any time. No address of the receiver is ever said,
//! and the sender's places are offsets into pools that it has announced.
//!
//! ```text
//! blob     version u8 = 1 | lanes u16 | token [16] | proof [16] | kind u8 | n u8 | name [n]
//! message  "KVLS" | kind u8 | code u8 | lane u16 | 24 bytes by kind                = 32 bytes
//! part     sequence | 1, flags << 8, extents << 32 | grant | part, bytes << 32
//!          | serve index, crc32c << 32 | serve value | first extent                = 8 words
//! more     sequence | 2, n << 8 | n extents of 3                                   = 8 words
//! extent   offset | pool, bytes << 32
//! ack      sequence | grant | part, status << 32 | 0                               = 4 words
//! ```
//!
//! All integers of blob and messages are little endian; words are the machine's own, as both sides
//! are on it.

use std::os::unix::ffi::{OsStrExt, OsStringExt};

use kvlane_proto::{Error, ErrorKind, GrantId, PartId, Result, limits};

use crate::sys::unix::{NAME_BYTES_MAX, Name};

/// Version of blob and messages.
pub const VERSION: u8 = 1;
/// Bytes of a message.
pub const MESSAGE_BYTES: usize = 32;
/// Words of a slot behind its sequence number.
pub const SLOT_BODY: usize = 7;
/// Words of an ack behind its sequence number.
pub const ACK_BODY: usize = 3;
/// Extents of a slot that has nothing else.
pub const EXTENTS_PER_SLOT: usize = 3;
/// Part flag: `crc32c` is that of the part's pages in wire order.
const FLAG_CRC: u64 = 1;

/// Binds a connection to a link; a secret of the two workers, carried by the control plane.
pub type Token = [u8; 16];

fn malformed(what: &str) -> Error {
    Error::new(ErrorKind::Malformed, format!("shm engine: {what}"))
}

/// What the peer's engine needs; a sender's says nothing but its lanes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blob {
    /// Lanes that the side has.
    pub lanes: u16,
    /// From a receiver.
    pub door: Option<Door>,
}

/// Where a receiver listens, and how both sides of a connection prove that they have its blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Door {
    /// Shown by who dials.
    pub token: Token,
    /// Answered by who listens, before it is given anything: after its end, anybody could listen
    /// under its name.
    pub proof: Token,
    /// The socket.
    pub name: Name,
}

impl Blob {
    /// The bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![VERSION];
        out.extend(self.lanes.to_le_bytes());
        let Some(door) = &self.door else {
            out.extend([0; 34]);
            return out;
        };
        out.extend(door.token);
        out.extend(door.proof);
        let (kind, name) = match &door.name {
            Name::Abstract(name) => (1, name.as_slice()),
            Name::File(path) => (2, path.as_os_str().as_bytes()),
        };
        // Longer ones cannot be listened on.
        let name = &name[..name.len().min(NAME_BYTES_MAX)];
        out.extend([kind, name.len() as u8]);
        out.extend(name);
        out
    }
    /// Reads a peer's blob.
    ///
    /// # Errors
    /// [`ErrorKind::VersionMismatch`] or [`ErrorKind::Malformed`] naming the field.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let short = || malformed("blob ends too early").with("bytes", bytes.len());
        let (&version, _) = bytes.split_first().ok_or_else(short)?;
        if version != VERSION {
            return Err(Error::new(ErrorKind::VersionMismatch, "shm engine: unknown blob version")
                .with("found", version)
                .with("expected", VERSION)
                .hint("run the same release on both workers"));
        }
        let (head, name) = bytes.split_first_chunk::<37>().ok_or_else(short)?;
        let lanes = u16::from_le_bytes([head[1], head[2]]);
        if lanes == 0 || lanes > limits::LANES_PER_LINK_MAX {
            return Err(malformed("number of lanes is out of range")
                .with("found", lanes)
                .with("limit", limits::LANES_PER_LINK_MAX));
        }
        if name.len() != usize::from(head[36]) || name.len() > NAME_BYTES_MAX {
            return Err(malformed("name of the socket has another length")
                .with("found", name.len())
                .with("said", head[36])
                .with("limit", NAME_BYTES_MAX));
        }
        let (mut token, mut proof) = ([0; 16], [0; 16]);
        token.copy_from_slice(&head[3..19]);
        proof.copy_from_slice(&head[19..35]);
        let name = match head[35] {
            0 if head[3..] == [0; 34] => return Ok(Self { lanes, door: None }),
            1 if !name.is_empty() => Name::Abstract(name.to_vec()),
            2 if name.first() == Some(&b'/') && !name.contains(&0) => {
                Name::File(std::ffi::OsString::from_vec(name.to_vec()).into())
            }
            kind => {
                return Err(malformed("socket cannot be dialled")
                    .with("kind", kind)
                    .with("name", name.escape_ascii()));
            }
        };
        Ok(Self { lanes, door: Some(Door { token, proof, name }) })
    }
}

/// Why a receiver does not go on with a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turned {
    /// The messages are not this engine's, or not in this order.
    Order,
    /// A descriptor is not what it should be.
    Descriptor,
    /// More pools than a link may have.
    Pools,
}

impl Turned {
    const ALL: [Self; 3] = [Self::Order, Self::Descriptor, Self::Pools];
    /// What a sender is told.
    pub fn refusal(self) -> (ErrorKind, &'static str) {
        match self {
            Self::Order => (ErrorKind::Malformed, "the receiver did not understand"),
            Self::Descriptor => (ErrorKind::Memory, "the receiver cannot map what it was given"),
            Self::Pools => (ErrorKind::LimitExceeded, "more pools than the receiver takes"),
        }
    }
}

/// A message of the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// Sender, first: which lane of which link it is.
    Hello {
        /// The lane.
        lane: u16,
        /// The link's token.
        token: Token,
    },
    /// Receiver: who listens has the blob as well.
    Welcome {
        /// The link's proof.
        proof: Token,
    },
    /// Sender, with two descriptors: the lane's rings and the serve words.
    Share,
    /// Sender: a pool; with its descriptor, if it has one.
    Pool {
        /// Its number; never used again.
        id: u32,
        /// Its first address at the sender, if it has no descriptor.
        address: u64,
        /// Its length.
        bytes: u64,
    },
    /// Sender: all that was registered so far has been said.
    Begin,
    /// Receiver: the lane carries parts.
    Ready,
    /// Sender: a pool is gone.
    Forget {
        /// Its number.
        id: u32,
    },
    /// Receiver, last.
    Refuse(Turned),
    /// Either: look at the rings.
    Bell,
}

impl Message {
    /// The bytes.
    pub fn encode(&self) -> [u8; MESSAGE_BYTES] {
        let mut out = [0; MESSAGE_BYTES];
        out[..4].copy_from_slice(b"KVLS");
        let mut kind = |kind, code| (out[4], out[5]) = (kind, code);
        match *self {
            Self::Hello { lane, token } => {
                kind(1, VERSION);
                out[6..8].copy_from_slice(&lane.to_le_bytes());
                out[8..24].copy_from_slice(&token);
            }
            Self::Welcome { proof } => {
                kind(2, 0);
                out[8..24].copy_from_slice(&proof);
            }
            Self::Share => kind(3, 0),
            Self::Pool { id, address, bytes } => {
                kind(4, 0);
                out[8..12].copy_from_slice(&id.to_le_bytes());
                out[12..20].copy_from_slice(&address.to_le_bytes());
                out[20..28].copy_from_slice(&bytes.to_le_bytes());
            }
            Self::Begin => kind(5, 0),
            Self::Ready => kind(6, 0),
            Self::Forget { id } => {
                kind(7, 0);
                out[8..12].copy_from_slice(&id.to_le_bytes());
            }
            Self::Refuse(why) => kind(8, why as u8),
            Self::Bell => kind(9, 0),
        }
        out
    }
    /// Reads a message; `None` for whatever is not one.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; MESSAGE_BYTES] = bytes.try_into().ok()?;
        let (u16_at, u32_at, u64_at) = (
            |at: usize| Some(u16::from_le_bytes(*bytes[at..].first_chunk()?)),
            |at: usize| Some(u32::from_le_bytes(*bytes[at..].first_chunk()?)),
            |at: usize| Some(u64::from_le_bytes(*bytes[at..].first_chunk()?)),
        );
        let token = *bytes[8..].first_chunk()?;
        let message = match bytes[4] {
            1 => Self::Hello { lane: u16_at(6)?, token },
            2 => Self::Welcome { proof: token },
            3 => Self::Share,
            4 => Self::Pool { id: u32_at(8)?, address: u64_at(12)?, bytes: u64_at(20)? },
            5 => Self::Begin,
            6 => Self::Ready,
            7 => Self::Forget { id: u32_at(8)? },
            8 => Self::Refuse(*Turned::ALL.get(usize::from(bytes[5]))?),
            9 => Self::Bell,
            _ => return None,
        };
        // Magic, version and zeros as well.
        (message.encode() == *bytes).then_some(message)
    }
}

fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}
fn halves(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// Bytes in a row in one of the sender's pools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    /// The pool.
    pub pool: u32,
    /// Where they begin in it.
    pub offset: u64,
    /// How many; not 0.
    pub bytes: u32,
}

impl Extent {
    fn encode(&self) -> [u64; 2] {
        [self.offset, pair(self.pool, self.bytes)]
    }
    fn decode([offset, rest]: [u64; 2]) -> Option<Self> {
        let (pool, bytes) = halves(rest);
        (bytes > 0).then_some(Self { pool, offset, bytes })
    }
}

/// A grant's word at the sender, and what it said when the part was posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServeWord {
    /// Which word.
    pub index: u32,
    /// What it must still say after the copy.
    pub value: u64,
}

/// First slot of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The grant that it is sent under.
    pub grant: GrantId,
    /// The part.
    pub part: PartId,
    /// Bytes of all its pages.
    pub bytes: u32,
    /// Extents that they are in.
    pub extents: u32,
    /// CRC32C of the bytes, if the sender computed it.
    pub crc32c: Option<u32>,
    /// What makes the copy good.
    pub serve: ServeWord,
    /// The first extent; none if there are none.
    pub first: Option<Extent>,
}

impl Part {
    /// The words.
    pub fn encode(&self) -> [u64; SLOT_BODY] {
        let flags = if self.crc32c.is_some() { FLAG_CRC } else { 0 };
        let [offset, rest] = self.first.map_or([0; 2], |first| first.encode());
        [
            1 | flags << 8 | u64::from(self.extents) << 32,
            self.grant.0,
            pair(self.part.0, self.bytes),
            pair(self.serve.index, self.crc32c.unwrap_or(0)),
            self.serve.value,
            offset,
            rest,
        ]
    }
    /// Reads a slot; `None` for whatever is not a part's first.
    pub fn decode(words: &[u64; SLOT_BODY]) -> Option<Self> {
        let [kind, grant, part, serve, value, offset, rest] = *words;
        let (low, extents) = halves(kind);
        let flags = u64::from(low >> 8);
        let ((part, bytes), (index, crc)) = (halves(part), halves(serve));
        let first = Extent::decode([offset, rest]);
        let fine = low & 0xff == 1
            && flags & !FLAG_CRC == 0
            && (flags & FLAG_CRC != 0 || crc == 0)
            && (extents == 0) == (bytes == 0)
            && extents <= bytes
            && if extents == 0 { offset == 0 && rest == 0 } else { first.is_some() };
        fine.then_some(Self {
            grant: GrantId(grant),
            part: PartId(part),
            bytes,
            extents,
            crc32c: (flags & FLAG_CRC != 0).then_some(crc),
            serve: ServeWord { index, value },
            first,
        })
    }
}

/// The words of a slot with further extents of a part; at most [`EXTENTS_PER_SLOT`] go in.
pub fn encode_more(extents: &[Extent]) -> [u64; SLOT_BODY] {
    let n = extents.len().min(EXTENTS_PER_SLOT);
    let mut out = [0; SLOT_BODY];
    out[0] = 2 | (n as u64) << 8;
    for (to, extent) in out[1..].chunks_exact_mut(2).zip(extents) {
        to.copy_from_slice(&extent.encode());
    }
    out
}

/// Reads a slot with further extents and how many there are; `None` for whatever is not one.
pub fn decode_more(words: &[u64; SLOT_BODY]) -> Option<([Extent; EXTENTS_PER_SLOT], usize)> {
    let n = usize::try_from(words[0] >> 8).ok()?;
    if words[0] & 0xff != 2 || n == 0 || n > EXTENTS_PER_SLOT {
        return None;
    }
    let mut out = [Extent::default(); EXTENTS_PER_SLOT];
    for (i, to) in out.iter_mut().enumerate() {
        let from = [words[1 + 2 * i], words[2 + 2 * i]];
        if i < n {
            *to = Extent::decode(from)?;
        } else if from != [0; 2] {
            return None;
        }
    }
    Some((out, n))
}

/// What became of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Every byte is in place.
    Landed,
    /// The grant is not open on this link and lane (any more).
    NoGrant,
    /// The grant has no such part, or the part has another length.
    WrongPart,
    /// The checksum differs.
    Corrupt,
    /// The receiver's pages are not in registered memory.
    NoMemory,
    /// The serve word changed: the source may have changed under the copy.
    Changed,
    /// An extent is outside the pools that were announced.
    NoSource,
    /// The kernel does not let the receiver read the sender's memory.
    NoAccess,
}

/// How to let one process read another's memory.
pub(super) const ACCESS_HINT: &str = "give the decode worker CAP_SYS_PTRACE, or run both workers as \
     one user with kernel.yama.ptrace_scope=0 and in one PID namespace; or let kvlane own the pool";

impl Status {
    const ALL: [Self; 8] = [
        Self::Landed,
        Self::NoGrant,
        Self::WrongPart,
        Self::Corrupt,
        Self::NoMemory,
        Self::Changed,
        Self::NoSource,
        Self::NoAccess,
    ];
    /// What a sender is told.
    pub fn refusal(self) -> Option<Error> {
        let (kind, text) = match self {
            Self::Landed => return None,
            Self::NoGrant => (ErrorKind::NotFound, "the receiver has no such grant open"),
            Self::WrongPart => {
                (ErrorKind::InvalidPlan, "the receiver has no such part of this length")
            }
            Self::Corrupt => (ErrorKind::Corrupt, "the receiver found another checksum"),
            Self::NoMemory => {
                (ErrorKind::Memory, "the receiver's pages are not in registered memory")
            }
            Self::Changed => (ErrorKind::RoomEnded, "the grant was stopped before the copy ended"),
            Self::NoSource => (ErrorKind::Memory, "the receiver does not know this memory"),
            Self::NoAccess => {
                let text = "the kernel does not let the receiver read the sender's memory";
                return Some(Error::new(ErrorKind::Memory, text).hint(ACCESS_HINT));
            }
        };
        Some(Error::new(kind, text))
    }
}

/// Answer to a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ack {
    /// What became of it.
    pub status: Status,
    /// The grant.
    pub grant: GrantId,
    /// The part.
    pub part: PartId,
}

impl Ack {
    /// The words.
    pub fn encode(&self) -> [u64; ACK_BODY] {
        [self.grant.0, pair(self.part.0, self.status as u32), 0]
    }
    /// Reads an ack; `None` for whatever is not one.
    pub fn decode([grant, rest, zero]: &[u64; ACK_BODY]) -> Option<Self> {
        let (part, status) = halves(*rest);
        let status = *Status::ALL.get(usize::try_from(status).ok()?)?;
        (*zero == 0).then_some(Self { status, grant: GrantId(*grant), part: PartId(part) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn part() -> Part {
        Part {
            grant: GrantId(0x0102_0304_0506_0708),
            part: PartId(9),
            bytes: 0x1_0000,
            extents: 2,
            crc32c: Some(0xaabb_ccdd),
            serve: ServeWord { index: 7, value: 0x1_0000_0001 },
            first: Some(Extent { pool: 3, offset: 1 << 33, bytes: 4096 }),
        }
    }

    #[test]
    fn golden_bytes() {
        assert_eq!(
            part().encode(),
            [
                0x0000_0002_0000_0101,
                0x0102_0304_0506_0708,
                0x0001_0000_0000_0009,
                0xaabb_ccdd_0000_0007,
                0x1_0000_0001,
                1 << 33,
                0x0000_1000_0000_0003,
            ]
        );
        let extent = Extent { pool: 1, offset: 2, bytes: 3 };
        assert_eq!(encode_more(&[extent; 2]), [0x202, 2, 3 << 32 | 1, 2, 3 << 32 | 1, 0, 0]);
        let ack = Ack { status: Status::Changed, grant: GrantId(7), part: PartId(1) };
        assert_eq!(ack.encode(), [7, 5 << 32 | 1, 0]);
        let hello = Message::Hello { lane: 2, token: [5; 16] }.encode();
        assert_eq!(hello[..9], *b"KVLS\x01\x01\x02\0\x05");
        let door = Door { token: [1; 16], proof: [2; 16], name: Name::Abstract(b"x".into()) };
        assert_eq!(Blob { lanes: 4, door: Some(door) }.encode().len(), 38);
        assert_eq!(Blob { lanes: 4, door: None }.encode().len(), 37);
    }

    #[test]
    fn parts_that_contradict_themselves_are_refused() {
        let bad: [fn(&mut [u64; SLOT_BODY]); 8] = [
            |w| w[0] ^= 3,
            |w| w[0] |= 0x200,
            |w| w[0] |= 1 << 20,
            |w| w[0] &= !0x100,
            |w| w[0] &= 0xffff_ffff,
            |w| w[2] &= 0xffff_ffff,
            |w| w[2] = 1 << 32,
            |w| w[6] &= 0xffff_ffff,
        ];
        for (i, change) in bad.into_iter().enumerate() {
            let mut words = part().encode();
            change(&mut words);
            assert_eq!(Part::decode(&words), None, "{i}");
        }
    }

    #[test]
    fn sockets_that_cannot_be_dialled_are_refused() {
        for name in [Name::Abstract(vec![]), Name::File("relative".into()), Name::File("".into())] {
            let door = Door { token: [1; 16], proof: [2; 16], name };
            let e = Blob::decode(&Blob { lanes: 1, door: Some(door) }.encode()).unwrap_err();
            assert!(e.to_string().contains("cannot be dialled"), "{e}");
        }
        let e = Blob::decode(&Blob { lanes: 65, door: None }.encode()).unwrap_err();
        assert!(e.to_string().contains("found=65"), "{e}");
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            lanes in 1..=limits::LANES_PER_LINK_MAX, token: [u8; 16], proof: [u8; 16],
            name in proptest::collection::vec(any::<u8>(), 1..NAME_BYTES_MAX), file: bool,
            grant: u64, id: u32, bytes in 1u32.., value: u64, crc: Option<u32>,
            status in 0usize..8, n in 1usize..4,
        ) {
            let mut path = vec![b'/'];
            path.extend(name.iter().filter(|&&b| b != 0));
            let name = if file {
                Name::File(std::ffi::OsString::from_vec(path).into())
            } else {
                Name::Abstract(name)
            };
            let blob = Blob { lanes, door: Some(Door { token, proof, name }) };
            prop_assert_eq!(Blob::decode(&blob.encode()).unwrap(), blob);
            let extent = Extent { pool: id, offset: value, bytes };
            let part = Part {
                grant: GrantId(grant), part: PartId(id), bytes, extents: 1, crc32c: crc,
                serve: ServeWord { index: id, value }, first: Some(extent),
            };
            prop_assert_eq!(Part::decode(&part.encode()), Some(part));
            let more = vec![extent; n];
            let (read, count) = decode_more(&encode_more(&more)).unwrap();
            prop_assert_eq!(&read[..count], &more[..]);
            let ack = Ack { status: Status::ALL[status], grant: GrantId(grant), part: PartId(id) };
            prop_assert_eq!(Ack::decode(&ack.encode()), Some(ack));
            for message in [
                Message::Hello { lane: lanes, token }, Message::Welcome { proof }, Message::Share,
                Message::Pool { id, address: grant, bytes: value }, Message::Begin, Message::Ready,
                Message::Forget { id }, Message::Refuse(Turned::ALL[status % 3]), Message::Bell,
            ] {
                prop_assert_eq!(Message::decode(&message.encode()), Some(message));
            }
        }

        #[test]
        fn no_bytes_panic_and_what_is_read_is_what_was_written(
            mut bytes: Vec<u8>, mut words: [u64; SLOT_BODY], kind in 0u8..12, fix: bool,
        ) {
            if fix {
                bytes.resize(37, 0);
                (bytes[0], bytes[1], bytes[2]) = (VERSION, 4, 0);
                words[0] = words[0] & 0xffff_ffff_0000_0100 | u64::from(kind % 3);
            }
            if let Ok(blob) = Blob::decode(&bytes) {
                prop_assert_eq!(blob.encode(), &bytes[..]);
            }
            if let Some(part) = Part::decode(&words) {
                prop_assert_eq!(part.encode(), words);
            }
            if let Some((extents, n)) = decode_more(&words) {
                prop_assert_eq!(encode_more(&extents[..n]), words);
            }
            if let Some(ack) = Ack::decode(&[words[0], words[1], words[2]]) {
                prop_assert_eq!(ack.encode(), [words[0], words[1], words[2]]);
            }
            bytes.resize(MESSAGE_BYTES, 0);
            bytes[..5].copy_from_slice(&[b'K', b'V', b'L', b'S', kind]);
            if let Some(message) = Message::decode(&bytes) {
                prop_assert_eq!(message.encode(), &bytes[..]);
            }
        }
    }
}
