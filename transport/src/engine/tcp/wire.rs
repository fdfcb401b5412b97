//! Bytes of the `tcp` engine: blob, hello, frame header, ack. All integers are little endian.
//!
//! In: structs, or bytes from a stranger. Out: bytes, or a refusal that names the field. No address
//! of memory is ever on the wire: a frame names grant and part, and the receiver knows where its
//! own pages are.
//!
//! ```text
//! blob    version u8 = 1 | lanes u16 | token [16] | n u8 | n × (4 or 6 u8 | ip 4 or 16 | port u16)
//! hello   "KVLH" | version u16 = 1 | lane u16 | token [16] | 0 [8]                 = 32 bytes
//! frame   "KVLF" | kind u8 = 1 | flags u8 | 0 u16 | grant u64 | part u32 | bytes u32
//!         | crc32c u32 | 0 u32                                = 32 bytes, then the part's pages
//! ack     "KVL" | status u8 | part u32 | grant u64                                 = 16 bytes
//! ```
//!
//! The dialling side sends one hello, is answered with an ack of status [`Status::Welcome`] or
//! closed, and sends frames; each frame is answered with one ack, in order.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use kvlane_proto::{Error, ErrorKind, GrantId, PartId, Result, limits};

/// Version of blob and hello.
pub const VERSION: u8 = 1;
/// Bytes of a hello.
pub const HELLO_BYTES: usize = 32;
/// Bytes of a frame's header.
pub const HEADER_BYTES: usize = 32;
/// Bytes of an ack.
pub const ACK_BYTES: usize = 16;
/// Most addresses in a blob.
pub const ADDRESSES_MAX: usize = 16;
/// Header flag: `crc32c` is that of the part's pages in wire order.
pub const FLAG_CRC: u8 = 1;

/// Binds a connection to a link; a secret of the two workers, carried by the control plane.
pub type Token = [u8; 16];

fn malformed(what: &str) -> Error {
    Error::new(ErrorKind::Malformed, format!("tcp engine: {what}"))
}

/// Reads fields off the front; `None` at the end.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }
    fn u8(&mut self) -> Option<u8> {
        self.take::<1>().map(|[b]| b)
    }
    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }
    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }
    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }
}

/// What the peer's engine needs: from a receiver its addresses and the token; a sender's is empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blob {
    /// Lanes that the side has.
    pub lanes: u16,
    /// The link's token; zeros from a sender.
    pub token: Token,
    /// Where the receiver listens, best first.
    pub addresses: Vec<SocketAddr>,
}

impl Blob {
    /// The bytes; at most [`ADDRESSES_MAX`] addresses go in.
    pub fn encode(&self) -> Vec<u8> {
        let n = self.addresses.len().min(ADDRESSES_MAX);
        let mut out = vec![VERSION];
        out.extend(self.lanes.to_le_bytes());
        out.extend(self.token);
        out.push(n as u8);
        for address in &self.addresses[..n] {
            match address.ip() {
                IpAddr::V4(ip) => {
                    out.push(4);
                    out.extend(ip.octets());
                }
                IpAddr::V6(ip) => {
                    out.push(6);
                    out.extend(ip.octets());
                }
            }
            out.extend(address.port().to_le_bytes());
        }
        out
    }
    /// Reads a peer's blob.
    ///
    /// # Errors
    /// [`ErrorKind::VersionMismatch`] or [`ErrorKind::Malformed`] naming the field.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        if bytes.len() > limits::BLOB_BYTES_MAX {
            return Err(malformed("blob is too long").with("found", bytes.len()));
        }
        let short = || malformed("blob ends too early").with("bytes", bytes.len());
        let mut r = Reader(bytes);
        let version = r.u8().ok_or_else(short)?;
        if version != VERSION {
            return Err(Error::new(ErrorKind::VersionMismatch, "tcp engine: unknown blob version")
                .with("found", version)
                .with("expected", VERSION)
                .hint("run the same release on both workers"));
        }
        let lanes = r.u16().ok_or_else(short)?;
        if lanes == 0 || lanes > limits::LANES_PER_LINK_MAX {
            return Err(malformed("number of lanes is out of range")
                .with("found", lanes)
                .with("limit", limits::LANES_PER_LINK_MAX));
        }
        let token = r.take().ok_or_else(short)?;
        let n = r.u8().ok_or_else(short)?;
        if usize::from(n) > ADDRESSES_MAX {
            return Err(malformed("too many addresses")
                .with("found", n)
                .with("limit", ADDRESSES_MAX));
        }
        let mut addresses = Vec::new();
        for index in 0..n {
            let ip = match r.u8().ok_or_else(short)? {
                4 => IpAddr::V4(Ipv4Addr::from(r.take::<4>().ok_or_else(short)?)),
                6 => IpAddr::V6(Ipv6Addr::from(r.take::<16>().ok_or_else(short)?)),
                family => {
                    return Err(malformed("unknown address family")
                        .with("index", index)
                        .with("found", family)
                        .with("expected", "4 or 6"));
                }
            };
            let port = r.u16().ok_or_else(short)?;
            if port == 0 || ip.is_unspecified() || ip.is_multicast() {
                return Err(malformed("address cannot be dialled")
                    .with("index", index)
                    .with("found", SocketAddr::new(ip, port))
                    .hint("the receiver must listen on, or advertise, a real address"));
            }
            addresses.push(SocketAddr::new(ip, port));
        }
        if !r.0.is_empty() {
            return Err(malformed("bytes behind the blob").with("bytes", r.0.len()));
        }
        Ok(Self { lanes, token, addresses })
    }
}

/// First bytes of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Which lane of the link it is.
    pub lane: u16,
    /// Which link.
    pub token: Token,
}

impl Hello {
    /// The bytes.
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut out = [0; HELLO_BYTES];
        out[..4].copy_from_slice(b"KVLH");
        out[4..6].copy_from_slice(&u16::from(VERSION).to_le_bytes());
        out[6..8].copy_from_slice(&self.lane.to_le_bytes());
        out[8..24].copy_from_slice(&self.token);
        out
    }
    /// Reads a stranger's hello; `None` for whatever is not one.
    pub fn decode(bytes: &[u8; HELLO_BYTES]) -> Option<Self> {
        let mut r = Reader(bytes);
        let fine = r.take()? == *b"KVLH" && r.u16()? == u16::from(VERSION);
        let (lane, token) = (r.u16()?, r.take()?);
        (fine && r.take()? == [0; 8]).then_some(Self { lane, token })
    }
}

/// What stands before a part's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The grant that the part is sent under.
    pub grant: GrantId,
    /// The part.
    pub part: PartId,
    /// Bytes that follow.
    pub bytes: u32,
    /// CRC32C of them, if the sender computed it.
    pub crc32c: Option<u32>,
}

impl Header {
    /// The bytes.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[..4].copy_from_slice(b"KVLF");
        out[4] = 1;
        out[5] = if self.crc32c.is_some() { FLAG_CRC } else { 0 };
        out[8..16].copy_from_slice(&self.grant.0.to_le_bytes());
        out[16..20].copy_from_slice(&self.part.0.to_le_bytes());
        out[20..24].copy_from_slice(&self.bytes.to_le_bytes());
        out[24..28].copy_from_slice(&self.crc32c.unwrap_or(0).to_le_bytes());
        out
    }
    /// Reads a header; `None` for whatever is not one, after which the stream cannot be trusted.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let mut r = Reader(bytes);
        let fine = r.take()? == *b"KVLF" && r.u8()? == 1;
        let flags = r.u8()?;
        let fine = fine && flags & !FLAG_CRC == 0 && r.u16()? == 0;
        let (grant, part, bytes, crc) = (r.u64()?, r.u32()?, r.u32()?, r.u32()?);
        let fine = fine && (flags & FLAG_CRC != 0 || crc == 0);
        (fine && r.u32()? == 0).then_some(Self {
            grant: GrantId(grant),
            part: PartId(part),
            bytes,
            crc32c: (flags & FLAG_CRC != 0).then_some(crc),
        })
    }
}

/// What became of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Every byte is in place.
    Landed,
    /// Answer to a hello.
    Welcome,
    /// The grant is not open on this link and lane (any more).
    NoGrant,
    /// The grant has no such part, or the part has another length.
    WrongPart,
    /// The checksum differs.
    Corrupt,
    /// The receiver's pages are not in registered memory.
    NoMemory,
}

impl Status {
    const ALL: [(u8, Self); 6] = [
        (0, Self::Landed),
        (1, Self::Welcome),
        (2, Self::NoGrant),
        (3, Self::WrongPart),
        (4, Self::Corrupt),
        (5, Self::NoMemory),
    ];
    /// What a sender is told.
    pub fn refusal(self) -> Option<(ErrorKind, &'static str)> {
        match self {
            Self::Landed | Self::Welcome => None,
            Self::NoGrant => Some((ErrorKind::NotFound, "the receiver has no such grant open")),
            Self::WrongPart => {
                Some((ErrorKind::InvalidPlan, "the receiver has no such part of this length"))
            }
            Self::Corrupt => Some((ErrorKind::Corrupt, "the receiver found another checksum")),
            Self::NoMemory => {
                Some((ErrorKind::Memory, "the receiver's pages are not in registered memory"))
            }
        }
    }
}

/// Answer to a frame or hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ack {
    /// What became of it.
    pub status: Status,
    /// The grant; 0 for a hello.
    pub grant: GrantId,
    /// The part; 0 for a hello.
    pub part: PartId,
}

impl Ack {
    /// Answer to a hello.
    pub const WELCOME: Self = Self { status: Status::Welcome, grant: GrantId(0), part: PartId(0) };
    /// The bytes.
    pub fn encode(&self) -> [u8; ACK_BYTES] {
        let mut out = [0; ACK_BYTES];
        out[..3].copy_from_slice(b"KVL");
        out[3] =
            Status::ALL.iter().find(|(_, s)| *s == self.status).map_or(0xff, |(code, _)| *code);
        out[4..8].copy_from_slice(&self.part.0.to_le_bytes());
        out[8..].copy_from_slice(&self.grant.0.to_le_bytes());
        out
    }
    /// Reads an ack; `None` for whatever is not one.
    pub fn decode(bytes: &[u8; ACK_BYTES]) -> Option<Self> {
        let mut r = Reader(bytes);
        let fine = r.take()? == *b"KVL";
        let code = r.u8()?;
        let (_, status) = Status::ALL.into_iter().find(|(c, _)| *c == code)?;
        let (part, grant) = (PartId(r.u32()?), GrantId(r.u64()?));
        fine.then_some(Self { status, grant, part })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn golden_bytes() {
        let header = Header {
            grant: GrantId(0x0102_0304_0506_0708),
            part: PartId(9),
            bytes: 0x1_0000,
            crc32c: Some(0xaabb_ccdd),
        };
        let bytes = *b"KVLF\x01\x01\0\0\x08\x07\x06\x05\x04\x03\x02\x01\x09\0\0\0\0\0\x01\0\xdd\xcc\xbb\xaa\0\0\0\0";
        assert_eq!(header.encode(), bytes);
        assert_eq!(Header::decode(&bytes), Some(header));
        let ack = Ack { status: Status::Corrupt, grant: GrantId(7), part: PartId(1) };
        assert_eq!(ack.encode(), *b"KVL\x04\x01\0\0\0\x07\0\0\0\0\0\0\0");
        let hello = Hello { lane: 2, token: [5; 16] };
        assert_eq!(hello.encode()[..8], *b"KVLH\x01\0\x02\0");
        let blob =
            Blob { lanes: 4, token: [1; 16], addresses: vec!["127.0.0.1:80".parse().unwrap()] };
        assert_eq!(blob.encode().len(), 20 + 7);
    }

    #[test]
    fn addresses_that_cannot_be_dialled_are_refused() {
        for bad in ["0.0.0.0:80", "127.0.0.1:0", "224.0.0.1:80", "[::]:80"] {
            let blob = Blob { lanes: 4, token: [1; 16], addresses: vec![bad.parse().unwrap()] };
            let e = Blob::decode(&blob.encode()).unwrap_err().to_string();
            assert!(e.contains("cannot be dialled"), "{e}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            lanes in 1..=limits::LANES_PER_LINK_MAX, token: [u8; 16], v4: Vec<(u32, u16)>,
            grant: u64, part: u32, bytes: u32, crc: Option<u32>, status in 0usize..6,
        ) {
            let addresses: Vec<SocketAddr> = v4.into_iter().take(ADDRESSES_MAX)
                .map(|(ip, port)| SocketAddr::new(Ipv4Addr::from((ip % (224 << 24)) | 1).into(), port | 1))
                .collect();
            let blob = Blob { lanes, token, addresses };
            prop_assert_eq!(Blob::decode(&blob.encode()).unwrap(), blob);
            let header = Header { grant: GrantId(grant), part: PartId(part), bytes, crc32c: crc };
            prop_assert_eq!(Header::decode(&header.encode()), Some(header));
            let ack = Ack { status: Status::ALL[status].1, grant: GrantId(grant), part: PartId(part) };
            prop_assert_eq!(Ack::decode(&ack.encode()), Some(ack));
            let hello = Hello { lane: lanes, token };
            prop_assert_eq!(Hello::decode(&hello.encode()), Some(hello));
        }

        #[test]
        fn no_bytes_panic_and_what_is_read_is_what_was_written(mut bytes: Vec<u8>, fix: bool) {
            if fix && bytes.len() > 3 {
                (bytes[0], bytes[1], bytes[2]) = (VERSION, 4, 0);
            }
            if let Ok(blob) = Blob::decode(&bytes) {
                prop_assert_eq!(blob.encode(), bytes);
            }
        }
    }
}
