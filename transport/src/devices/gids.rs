//! GIDs: what a port is called on the wire, and who could reach it there.
//!
//! Owns: [`Gid`], its type, its address and how far that reaches. In: a port's directory in sysfs.
//! Out: the entries that are set. Invariant: an entry is what it says now; its index is never kept,
//! because a failover or a netdev that goes down and up moves entries.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::str::FromStr;

use kvlane_proto::limits;
use serde::{Serialize, Serializer};

use super::Sysfs;
use super::sysfs::is_name;

/// What a GID travels in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GidType {
    /// InfiniBand's global route header; local traffic goes by LID.
    Ib,
    /// Ethernet frames of their own type, which no router forwards.
    RoceV1,
    /// UDP port 4791.
    RoceV2,
}

impl GidType {
    /// As people write it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ib => "IB",
            Self::RoceV1 => "RoCE v1",
            Self::RoceV2 => "RoCE v2",
        }
    }
}

impl fmt::Display for GidType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for GidType {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().replace(['-', '_', ' '], "").as_str() {
            "ib" | "infiniband" => Ok(Self::Ib),
            "rocev1" | "v1" => Ok(Self::RoceV1),
            "rocev2" | "v2" => Ok(Self::RoceV2),
            _ => Err("expected roce-v2, roce-v1 or ib".into()),
        }
    }
}

/// What kind of address a GID is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AddressClass {
    /// An IPv4 address, as `::ffff:a.b.c.d`.
    V4Mapped,
    /// IPv6, for everybody.
    Global,
    /// IPv6, `fc00::/7`: within one site.
    UniqueLocal,
    /// IPv6, `fe80::/10`: on one link only.
    LinkLocal,
    /// No address.
    Zero,
}

impl AddressClass {
    /// As people write it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V4Mapped => "v4-mapped",
            Self::Global => "global",
            Self::UniqueLocal => "unique-local",
            Self::LinkLocal => "link-local",
            Self::Zero => "zero",
        }
    }
}

impl fmt::Display for AddressClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// How far an address reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Across hosts; the lower, the rather.
    Routed(u8),
    /// On its own link only, and so not named to another host.
    Link(&'static str),
    /// Nowhere.
    None(&'static str),
}

/// One entry of a port's GID table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gid {
    /// Where it stands now.
    pub index: u32,
    /// The GID itself.
    #[serde(serialize_with = "as_gid")]
    pub raw: [u8; 16],
    /// As an address; for people.
    pub address: IpAddr,
    /// What kind of address.
    pub class: AddressClass,
    /// What it travels in, if sysfs says it.
    pub gid_type: Option<GidType>,
    /// Whose address it is.
    pub netdev: Option<String>,
}

fn as_gid<S: Serializer>(raw: &[u8; 16], s: S) -> Result<S::Ok, S::Error> {
    s.collect_str(&gid_text(raw))
}

/// A GID in eight groups, as sysfs writes it.
pub fn gid_text(raw: &[u8; 16]) -> String {
    let group = |pair: &[u8]| pair.iter().map(|b| format!("{b:02x}")).collect::<String>();
    raw.chunks(2).map(group).collect::<Vec<_>>().join(":")
}

impl Gid {
    /// An entry.
    pub fn new(
        index: u32,
        raw: [u8; 16],
        gid_type: Option<GidType>,
        netdev: Option<String>,
    ) -> Self {
        let address = gid_address(raw);
        Self { index, raw, address, class: class(raw), gid_type, netdev }
    }
    /// How far its address reaches, apart from what it travels in.
    pub fn reach(&self) -> Reach {
        match self.address {
            IpAddr::V4(v4) if v4.is_unspecified() => {
                Reach::None("0.0.0.0 is no address: its netdev has no IPv4")
            }
            IpAddr::V4(v4) if v4.octets()[0] == 0 => Reach::None("0.0.0.0/8 is no host's address"),
            IpAddr::V4(v4) if v4.is_loopback() => Reach::None("a loopback address"),
            IpAddr::V4(v4) if v4.is_multicast() || v4.is_broadcast() => {
                Reach::None("no single host's address")
            }
            IpAddr::V4(v4) if v4.is_link_local() => {
                Reach::Link("169.254/16 is link-local: peers on other links cannot reach it")
            }
            IpAddr::V4(_) => Reach::Routed(0),
            IpAddr::V6(v6) => match self.class {
                _ if v6.is_loopback() => Reach::None("a loopback address"),
                _ if v6.is_multicast() => Reach::None("no single host's address"),
                AddressClass::Zero => Reach::None("not set"),
                AddressClass::LinkLocal => {
                    Reach::Link("link-local (fe80::/10): peers on other links cannot reach it")
                }
                AddressClass::UniqueLocal => Reach::Routed(2),
                AddressClass::Global | AddressClass::V4Mapped => Reach::Routed(1),
            },
        }
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gid_type = self.gid_type.map_or("type not told", GidType::as_str);
        let netdev = self.netdev.as_deref().unwrap_or("no netdev");
        write!(f, "gid {} {} ({gid_type}, {}, {netdev})", self.index, self.address, self.class)
    }
}

/// The address that a GID is of.
pub fn gid_address(raw: [u8; 16]) -> IpAddr {
    let v6 = Ipv6Addr::from(raw);
    v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)
}

fn class(raw: [u8; 16]) -> AddressClass {
    let v6 = Ipv6Addr::from(raw);
    match raw {
        _ if v6.is_unspecified() => AddressClass::Zero,
        _ if v6.to_ipv4_mapped().is_some() => AddressClass::V4Mapped,
        [0xfe, second, ..] if second & 0xc0 == 0x80 => AddressClass::LinkLocal,
        [first, ..] if first & 0xfe == 0xfc => AddressClass::UniqueLocal,
        _ => AddressClass::Global,
    }
}

/// Why a peer's address cannot be reached from ours, as far as the two addresses say it.
pub fn unroutable(ours: IpAddr, peer: IpAddr) -> Option<String> {
    let peer = match peer {
        IpAddr::V6(v6) => v6.to_ipv4_mapped().map_or(peer, IpAddr::V4),
        IpAddr::V4(_) => peer,
    };
    let raw = match peer {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    let why = match (ours, Gid::new(0, raw, None, None).reach()) {
        (_, Reach::None(why)) => why,
        (IpAddr::V4(_), _) if peer.is_ipv6() => "it is IPv6, the GID is IPv4",
        (IpAddr::V6(_), _) if peer.is_ipv4() => "it is IPv4, the GID is IPv6",
        (_, Reach::Link(why)) if !is_link_local(ours) => why,
        _ => return None,
    };
    Some(format!("the peer {peer} cannot be reached from here: {why}"))
}

fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => Ipv4Addr::is_link_local(&v4),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

/// The entries of a port's table that are set, by index, and whether there are more than are looked
/// at. `ib`: the link layer is InfiniBand, where the type file says "IB/RoCE v1" as well.
pub(super) fn read(sysfs: &Sysfs, port: &Path, ib: bool) -> (Vec<Gid>, bool) {
    let (names, more) = sysfs.names(port.join("gids"));
    let mut indices: Vec<u32> = names.iter().filter_map(|name| name.parse().ok()).collect();
    indices.sort_unstable();
    indices.dedup();
    let entry = |&index: &u32| {
        let raw =
            sysfs.text(port.join(format!("gids/{index}")))?.parse::<Ipv6Addr>().ok()?.octets();
        if raw == [0; 16] {
            return None;
        }
        let told = sysfs.text(port.join(format!("gid_attrs/types/{index}")));
        let gid_type = match told.as_deref() {
            _ if ib => Some(GidType::Ib),
            Some("IB/RoCE v1" | "RoCE v1") => Some(GidType::RoceV1),
            Some("RoCE v2") => Some(GidType::RoceV2),
            _ => None,
        };
        let netdev = sysfs.text(port.join(format!("gid_attrs/ndevs/{index}")));
        Some(Gid::new(index, raw, gid_type, netdev.filter(|name| is_name(name))))
    };
    let more = more || indices.len() > limits::GIDS_PER_PORT_MAX;
    (indices.iter().take(limits::GIDS_PER_PORT_MAX).filter_map(entry).collect(), more)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(text: &str) -> Gid {
        Gid::new(0, text.parse::<Ipv6Addr>().unwrap().octets(), None, None)
    }

    #[test]
    fn addresses_have_a_class_and_a_reach() {
        use AddressClass::*;
        for (text, class, routed) in [
            ("::ffff:10.0.0.1", V4Mapped, Some(0)),
            ("2001:db8::1", Global, Some(1)),
            ("fd00::1", UniqueLocal, Some(2)),
            ("fc00::1", UniqueLocal, Some(2)),
            ("fe80::1", LinkLocal, None),
            ("febf::1", LinkLocal, None),
            ("fec0::1", Global, Some(1)),
            ("::", Zero, None),
            ("::1", Global, None),
            ("ff02::1", Global, None),
            ("::ffff:0.0.0.0", V4Mapped, None),
            ("::ffff:0.1.2.3", V4Mapped, None),
            ("::ffff:127.0.0.1", V4Mapped, None),
            ("::ffff:169.254.3.4", V4Mapped, None),
            ("::ffff:224.0.0.1", V4Mapped, None),
        ] {
            let gid = gid(text);
            assert_eq!(gid.class, class, "{text}");
            let rank = match gid.reach() {
                Reach::Routed(rank) => Some(rank),
                Reach::Link(_) | Reach::None(_) => None,
            };
            assert_eq!(rank, routed, "{text}");
        }
        assert!(matches!(gid("fe80::1").reach(), Reach::Link(_)));
        assert!(matches!(gid("::ffff:169.254.3.4").reach(), Reach::Link(_)));
    }

    #[test]
    fn a_peer_is_reached_by_its_own_kind_of_address() {
        let cannot =
            |ours: &str, peer: &str| unroutable(ours.parse().unwrap(), peer.parse().unwrap());
        assert_eq!(cannot("10.0.0.1", "10.9.0.2"), None);
        assert_eq!(cannot("10.0.0.1", "::ffff:10.9.0.2"), None);
        assert_eq!(cannot("fd00::1", "2001:db8::2"), None);
        assert_eq!(cannot("fe80::1", "fe80::2"), None);
        for (ours, peer, word) in [
            ("10.0.0.1", "fd00::2", "it is IPv6"),
            ("fd00::1", "10.0.0.2", "it is IPv4"),
            ("10.0.0.1", "0.0.0.0", "no address"),
            ("10.0.0.1", "127.0.0.1", "loopback"),
            ("10.0.0.1", "169.254.0.1", "link-local"),
            ("fd00::1", "fe80::2", "link-local"),
        ] {
            let why = cannot(ours, peer).unwrap();
            assert!(why.contains(word) && why.contains(peer), "{why}");
        }
    }
}
