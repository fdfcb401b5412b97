//! What two one-sided engines say to each other: the blob of a link, and how queue pairs are made.
//!
//! In: structs, or what a peer sent. Out: bytes, or a refusal that names the field. Everything is
//! bounded and exact: what decodes encodes to the same bytes again.
//!
//! ```text
//! blob      version u8 = 2 | lanes u16 | lost u16 | n u8 | n × (guid u64 | length u8 | name)
//! pair      1 | lane u16 | epoch u64 | guid u64 | end | credit address u64 | credit key u32
//! paired    2 | lane u16 | epoch u64 | end | receives u32 | regions
//! up        3 | lane u16 | epoch u64
//! broken    4 | lane u16 | epoch u64 | length u16 | text
//! regions   5 | guid u64 | regions
//! end       number u32 | sequence u32, both of 24 bits | gid 16 bytes | lid u16 | mtu u16
//! regions   n u16 | n × (address u64 | bytes u64 | key u32)
//! ```
//!
//! All integers are little endian. A NIC's bit in `lost` is set if the side has lost it.

use kvlane_proto::{Error, ErrorKind, Result, limits};

use super::nic::{About, End, Key};
use crate::emulated::control::cut;
use crate::mlx5::RECEIVES_MAX;

/// Version of blob and messages.
pub const VERSION: u8 = 2;
/// Most NICs of one engine.
pub const RAILS_MAX: usize = limits::RAILS_MAX as usize;
/// Most regions of a receiver.
pub const REGIONS_MAX: usize = 512;
/// Longest text of [`Message::Broken`].
pub const WHY_BYTES_MAX: usize = limits::REFUSAL_TEXT_BYTES_MAX;
/// Numbers of queue pairs and of packets have 24 bits.
const NUMBER_MAX: u32 = (1 << 24) - 1;

const _: () = assert!(RAILS_MAX <= u16::BITS as usize);
const _: () = assert!(5 + 1 + RAILS_MAX * (9 + limits::NAME_BYTES_MAX) <= limits::BLOB_BYTES_MAX);
const _: () = assert!(64 + REGIONS_MAX * 20 <= limits::ENGINE_MESSAGE_BYTES_MAX);

/// What the peer's engine needs before queue pairs are made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blob {
    /// Lanes that the side has.
    pub lanes: u16,
    /// Its NICs, by rail.
    pub nics: Vec<About>,
    /// Those that it has lost, a bit for each rail.
    pub lost: u16,
}

/// Where the receiver's memory is, and the key that opens it to one link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opened {
    /// Its first address at the receiver.
    pub address: u64,
    /// Its length.
    pub bytes: u64,
    /// The key.
    pub key: Key,
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Sender: here is a new queue pair; whatever was on the lane before is over.
    Pair {
        /// The lane.
        lane: u16,
        /// Counts the sender's queue pairs of the lane.
        epoch: u64,
        /// The receiver's NIC.
        guid: u64,
        /// The sender's end.
        end: End,
        /// A word that the receiver writes its count of immediates to.
        credit: (u64, Key),
    },
    /// Receiver: this is the other end, and it is ready.
    Paired {
        /// The lane.
        lane: u16,
        /// The sender's.
        epoch: u64,
        /// The receiver's end.
        end: End,
        /// Immediates that may be outstanding.
        receives: u32,
        /// Memory that may be written through this lane's NIC.
        regions: Vec<Opened>,
    },
    /// Sender: both ends are connected.
    Up {
        /// The lane.
        lane: u16,
        /// Its own.
        epoch: u64,
    },
    /// Either: this end is gone, or about to be.
    Broken {
        /// The lane.
        lane: u16,
        /// Of which queue pair.
        epoch: u64,
        /// Why, for people.
        why: String,
    },
    /// Receiver: memory that may be written through a NIC is now this.
    Regions {
        /// The NIC.
        guid: u64,
        /// All of it.
        regions: Vec<Opened>,
    },
}

fn malformed(what: &str) -> Error {
    Error::new(ErrorKind::Malformed, format!("one-sided engine: {what}"))
}

/// Takes numbers off the front of a peer's bytes.
struct Reader<'a> {
    rest: &'a [u8],
    bytes: usize,
}

impl<'a> Reader<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes, bytes: bytes.len() }
    }
    fn short(&self) -> Error {
        malformed("message ends too early").with("bytes", self.bytes)
    }
    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (head, rest) = self.rest.split_first_chunk().ok_or_else(|| self.short())?;
        self.rest = rest;
        Ok(*head)
    }
    fn u8(&mut self) -> Result<u8> {
        self.take::<1>().map(|[b]| b)
    }
    fn u16(&mut self) -> Result<u16> {
        self.take().map(u16::from_le_bytes)
    }
    fn u32(&mut self) -> Result<u32> {
        self.take().map(u32::from_le_bytes)
    }
    fn u64(&mut self) -> Result<u64> {
        self.take().map(u64::from_le_bytes)
    }
    fn text(&mut self, length: usize, most: usize, what: &'static str) -> Result<String> {
        if length > most {
            return Err(malformed("text is too long")
                .with("field", what)
                .with("found", length)
                .with("limit", most));
        }
        let (head, rest) = self.rest.split_at_checked(length).ok_or_else(|| self.short())?;
        self.rest = rest;
        let text = std::str::from_utf8(head);
        text.map(str::to_owned).map_err(|_| malformed("text is no UTF-8").with("field", what))
    }
    fn end(&mut self) -> Result<End> {
        let (number, sequence) = (self.u32()?, self.u32()?);
        if number > NUMBER_MAX || sequence > NUMBER_MAX {
            return Err(malformed("queue pair's number or sequence has more than 24 bits")
                .with("number", number)
                .with("sequence", sequence));
        }
        let (gid, lid, mtu) = (self.take()?, self.u16()?, self.u16()?);
        Ok(End { number, sequence, gid, lid, mtu })
    }
    fn lane(&mut self) -> Result<(u16, u64)> {
        let (lane, epoch) = (self.u16()?, self.u64()?);
        if lane >= limits::LANES_PER_LINK_MAX {
            return Err(malformed("lane is out of range")
                .with("found", lane)
                .with("limit", limits::LANES_PER_LINK_MAX));
        }
        Ok((lane, epoch))
    }
    fn regions(&mut self) -> Result<Vec<Opened>> {
        let count = usize::from(self.u16()?);
        if count > REGIONS_MAX {
            return Err(malformed("too many regions")
                .with("found", count)
                .with("limit", REGIONS_MAX));
        }
        let one = |_| {
            let (address, bytes) = (self.u64()?, self.u64()?);
            if bytes == 0 || address.checked_add(bytes).is_none() {
                return Err(malformed("region cannot be memory")
                    .with("address", format!("{address:#x}"))
                    .with("bytes", bytes));
            }
            Ok(Opened { address, bytes, key: Key(self.u32()?) })
        };
        (0..count).map(one).collect()
    }
    fn done<T>(self, whole: T) -> Result<T> {
        match self.rest.len() {
            0 => Ok(whole),
            more => Err(malformed("message goes on behind its end").with("bytes", more)),
        }
    }
}

fn put_end(out: &mut Vec<u8>, end: End) {
    out.extend(end.number.to_le_bytes());
    out.extend(end.sequence.to_le_bytes());
    out.extend(end.gid);
    out.extend(end.lid.to_le_bytes());
    out.extend(end.mtu.to_le_bytes());
}

fn put_regions(out: &mut Vec<u8>, regions: &[Opened]) {
    // More are not registered.
    let regions = &regions[..regions.len().min(REGIONS_MAX)];
    out.extend((regions.len() as u16).to_le_bytes());
    for region in regions {
        out.extend(region.address.to_le_bytes());
        out.extend(region.bytes.to_le_bytes());
        out.extend(region.key.0.to_le_bytes());
    }
}

impl Blob {
    /// The bytes.
    pub fn encode(&self) -> Vec<u8> {
        // More NICs are not opened.
        let nics = &self.nics[..self.nics.len().min(RAILS_MAX)];
        let mut out = vec![VERSION];
        out.extend(self.lanes.to_le_bytes());
        out.extend(self.lost.to_le_bytes());
        out.push(nics.len() as u8);
        for nic in nics {
            let name = cut(&nic.name, limits::NAME_BYTES_MAX);
            out.extend(nic.guid.to_le_bytes());
            out.push(name.len() as u8);
            out.extend(name.as_bytes());
        }
        out
    }
    /// Reads a peer's blob.
    ///
    /// # Errors
    /// [`ErrorKind::VersionMismatch`] or [`ErrorKind::Malformed`] naming the field.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut from = Reader::new(bytes);
        let version = from.u8()?;
        if version != VERSION {
            return Err(Error::new(
                ErrorKind::VersionMismatch,
                "one-sided engine: unknown blob version",
            )
            .with("found", version)
            .with("expected", VERSION)
            .hint("run the same release on both workers"));
        }
        let lanes = from.u16()?;
        if lanes == 0 || lanes > limits::LANES_PER_LINK_MAX {
            return Err(malformed("number of lanes is out of range")
                .with("found", lanes)
                .with("limit", limits::LANES_PER_LINK_MAX));
        }
        let lost = from.u16()?;
        let count = usize::from(from.u8()?);
        if count == 0 || count > RAILS_MAX {
            return Err(malformed("number of NICs is out of range")
                .with("found", count)
                .with("limit", RAILS_MAX));
        }
        if lost.checked_shr(count as u32).unwrap_or(0) != 0 {
            return Err(malformed("a NIC that is not there is lost")
                .with("lost", format!("{lost:#b}"))
                .with("nics", count));
        }
        let one = |_| {
            let (guid, length) = (from.u64()?, from.u8()?);
            let name = from.text(length.into(), limits::NAME_BYTES_MAX, "name of a NIC")?;
            Ok(About { name, guid })
        };
        let nics = (0..count).map(one).collect::<Result<_>>()?;
        from.done(Self { lanes, nics, lost })
    }
}

impl Message {
    /// The bytes; at most [`limits::ENGINE_MESSAGE_BYTES_MAX`].
    pub fn encode(&self) -> Vec<u8> {
        let head = |kind: u8, lane: u16, epoch: u64| {
            let mut out = vec![kind];
            out.extend(lane.to_le_bytes());
            out.extend(epoch.to_le_bytes());
            out
        };
        match self {
            Self::Pair { lane, epoch, guid, end, credit: (address, key) } => {
                let mut out = head(1, *lane, *epoch);
                out.extend(guid.to_le_bytes());
                put_end(&mut out, *end);
                out.extend(address.to_le_bytes());
                out.extend(key.0.to_le_bytes());
                out
            }
            Self::Paired { lane, epoch, end, receives, regions } => {
                let mut out = head(2, *lane, *epoch);
                put_end(&mut out, *end);
                out.extend(receives.to_le_bytes());
                put_regions(&mut out, regions);
                out
            }
            Self::Up { lane, epoch } => head(3, *lane, *epoch),
            Self::Broken { lane, epoch, why } => {
                let mut out = head(4, *lane, *epoch);
                let why = cut(why, WHY_BYTES_MAX);
                out.extend((why.len() as u16).to_le_bytes());
                out.extend(why.as_bytes());
                out
            }
            Self::Regions { guid, regions } => {
                let mut out = vec![5];
                out.extend(guid.to_le_bytes());
                put_regions(&mut out, regions);
                out
            }
        }
    }
    /// Reads a peer's message.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`] naming the field.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut from = Reader::new(bytes);
        let message = match from.u8()? {
            1 => {
                let (lane, epoch) = from.lane()?;
                let (guid, end) = (from.u64()?, from.end()?);
                Self::Pair { lane, epoch, guid, end, credit: (from.u64()?, Key(from.u32()?)) }
            }
            2 => {
                let (lane, epoch) = from.lane()?;
                let (end, receives) = (from.end()?, from.u32()?);
                if receives == 0 || receives > RECEIVES_MAX {
                    return Err(malformed("number of receives is out of range")
                        .with("found", receives)
                        .with("limit", RECEIVES_MAX));
                }
                Self::Paired { lane, epoch, end, receives, regions: from.regions()? }
            }
            3 => {
                let (lane, epoch) = from.lane()?;
                Self::Up { lane, epoch }
            }
            4 => {
                let (lane, epoch) = from.lane()?;
                let length = from.u16()?;
                let why = from.text(length.into(), WHY_BYTES_MAX, "why a lane is broken")?;
                Self::Broken { lane, epoch, why }
            }
            5 => Self::Regions { guid: from.u64()?, regions: from.regions()? },
            kind => return Err(malformed("unknown message").with("found", kind)),
        };
        from.done(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_much_is_refused_and_the_longest_fits() {
        let region = Opened { address: u64::MAX - 9, bytes: 9, key: Key(u32::MAX) };
        let end = End { number: NUMBER_MAX, sequence: 0, gid: [7; 16], lid: 3, mtu: 4096 };
        let regions = vec![region; REGIONS_MAX];
        let paired = Message::Paired { lane: 63, epoch: u64::MAX, end, receives: 1, regions };
        let bytes = paired.encode();
        assert!(bytes.len() <= limits::ENGINE_MESSAGE_BYTES_MAX);
        assert_eq!(Message::decode(&bytes).unwrap(), paired);
        let why = "é".repeat(WHY_BYTES_MAX);
        let bytes = Message::Broken { lane: 0, epoch: 1, why }.encode();
        let Message::Broken { why, .. } = Message::decode(&bytes).unwrap() else { panic!() };
        assert_eq!(why.len(), WHY_BYTES_MAX);

        let text = |bytes: &[u8]| Message::decode(bytes).unwrap_err().to_string();
        for (at, value, want) in [
            (1, 64, "lane is out of range"),
            (14, 1, "more than 24 bits"),
            (18, 1, "more than 24 bits"),
            (39, 0, "number of receives"),
            (44, 3, "too many regions"),
        ] {
            let mut bytes = paired.encode();
            bytes[at] = value;
            assert!(text(&bytes).contains(want), "{want}: {}", text(&bytes));
        }
        let mut bytes = Message::Up { lane: 1, epoch: 2 }.encode();
        bytes.push(0);
        assert!(text(&bytes).contains("behind its end"));
        assert!(text(&bytes[..5]).contains("too early") && text(&[9]).contains("unknown message"));
    }
}
