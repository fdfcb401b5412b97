//! RDMA devices and their ports.
//!
//! Owns: [`Nic`], [`Port`]. In: `/sys/class/infiniband`. Out: everything that a choice of rails rests
//! on. A device without a `device` link (soft-RoCE, some bonds) has no PCI path; its netdevs are known
//! from its GID table, or from its `parent` file.

use std::fmt;
use std::path::{Path, PathBuf};

use kvlane_proto::limits;
use serde::Serialize;

use super::gids::{self, Gid};
use super::netdev::Netdev;
use super::pci::PciPath;
use super::sysfs::is_name;
use super::{Sysfs, cut_note};

/// What a port's wire is.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet, so RoCE.
    Ethernet,
    /// Anything else, as sysfs says it.
    Other(String),
}

impl fmt::Display for LinkLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::InfiniBand => "InfiniBand",
            Self::Ethernet => "Ethernet",
            Self::Other(text) => text,
        })
    }
}

/// An RDMA device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Nic {
    /// Its name, such as `mlx5_0`.
    pub name: String,
    /// Node GUID, as sysfs writes it.
    pub node_guid: Option<String>,
    /// Firmware.
    pub firmware: Option<String>,
    /// Model, such as `MT4129`.
    pub hca_type: Option<String>,
    /// The vendor's name of the board.
    pub board_id: Option<String>,
    /// Where it is; soft and some virtual NICs are nowhere.
    pub pci: Option<PciPath>,
    /// Its netdevs: those of its GIDs, or its parent; then members of bonds among them.
    pub netdevs: Vec<Netdev>,
    /// Its ports, by number.
    pub ports: Vec<Port>,
}

/// One port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Port {
    /// From 1.
    pub number: u32,
    /// `ACTIVE`, `DOWN`, `INIT`, `ARMED`, …
    pub state: Option<String>,
    /// `LinkUp`, `Disabled`, `Polling`, …
    pub phys_state: Option<String>,
    /// Line rate.
    pub bits_per_s: Option<u64>,
    /// What the wire is.
    pub link_layer: Option<LinkLayer>,
    /// Local identifier, given by a subnet manager; InfiniBand only.
    pub lid: Option<u16>,
    /// The subnet manager's.
    pub sm_lid: Option<u16>,
    /// RDMA MTU that the netdev's allows. InfiniBand's is not in sysfs.
    pub mtu_bytes: Option<u32>,
    /// Partition keys.
    pub pkeys: Vec<u16>,
    /// GIDs that are set.
    pub gids: Vec<Gid>,
}

impl Port {
    /// Whether traffic can go over it.
    pub fn is_active(&self) -> bool {
        self.state.as_deref() == Some("ACTIVE")
    }
}

/// Where a port is in sysfs.
pub(super) fn port_path(nic: &str, port: u32) -> PathBuf {
    Path::new("class/infiniband").join(nic).join(format!("ports/{port}"))
}

/// All RDMA devices, in natural order. What is left out is said in `notes`.
pub(super) fn nics(sysfs: &Sysfs, notes: &mut Vec<String>) -> Vec<Nic> {
    let (names, more) = sysfs.names("class/infiniband");
    cut_note(notes, more, "/sys/class/infiniband");
    names.into_iter().map(|name| nic(sysfs, name, notes)).collect()
}

/// A short text: what ends up in reasons must not fill them.
fn word(sysfs: &Sysfs, path: impl AsRef<Path>) -> Option<String> {
    Some(sysfs.text(path)?.chars().take(limits::NAME_BYTES_MAX).collect())
}

fn nic(sysfs: &Sysfs, name: String, notes: &mut Vec<String>) -> Nic {
    let at = Path::new("class/infiniband").join(&name);
    let (numbers, more) = sysfs.names(at.join("ports"));
    cut_note(notes, more, &format!("the ports of {name}"));
    let numbers = numbers.iter().filter_map(|number| number.parse().ok());
    let mut ports: Vec<Port> =
        numbers.take(limits::LIST_MAX).map(|number| port(sysfs, &name, number, notes)).collect();
    let mut wanted: Vec<String> =
        ports.iter().flat_map(|p| &p.gids).filter_map(|gid| gid.netdev.clone()).collect();
    wanted.extend(sysfs.text(at.join("parent")).filter(|parent| is_name(parent)));
    let netdevs = netdevs(sysfs, wanted);
    for port in ports.iter_mut().filter(|p| p.link_layer == Some(LinkLayer::Ethernet)) {
        let of_port = port.gids.iter().filter_map(|gid| gid.netdev.as_deref()).next();
        let netdev = netdevs.iter().find(|n| of_port.is_none_or(|name| n.name == name));
        port.mtu_bytes = netdev.and_then(|n| n.mtu_bytes).and_then(roce_mtu);
    }
    Nic {
        node_guid: word(sysfs, at.join("node_guid")),
        firmware: word(sysfs, at.join("fw_ver")),
        hca_type: word(sysfs, at.join("hca_type")),
        board_id: word(sysfs, at.join("board_id")),
        pci: PciPath::read(sysfs, at.join("device")),
        netdevs,
        ports,
        name,
    }
}

fn port(sysfs: &Sysfs, nic: &str, number: u32, notes: &mut Vec<String>) -> Port {
    let at = port_path(nic, number);
    let lid = |file| sysfs.number(at.join(file)).and_then(|n| u16::try_from(n).ok());
    let link_layer = word(sysfs, at.join("link_layer")).map(|text| match text.as_str() {
        "InfiniBand" => LinkLayer::InfiniBand,
        "Ethernet" => LinkLayer::Ethernet,
        _ => LinkLayer::Other(text),
    });
    let (gids, more) = gids::read(sysfs, &at, link_layer == Some(LinkLayer::InfiniBand));
    cut_note(notes, more, &format!("the GIDs of {nic} port {number}"));
    Port {
        number,
        state: word(sysfs, at.join("state")).map(after_number),
        phys_state: word(sysfs, at.join("phys_state")).map(after_number),
        bits_per_s: sysfs.text(at.join("rate")).and_then(|text| rate(&text)),
        link_layer,
        lid: lid("lid"),
        sm_lid: lid("sm_lid"),
        mtu_bytes: None,
        pkeys: pkeys(sysfs, &at.join("pkeys")),
        gids,
    }
}

/// The table without its empty places.
fn pkeys(sysfs: &Sysfs, at: &Path) -> Vec<u16> {
    pkey_table(sysfs, at).into_iter().map(|(_, key)| key).collect()
}

/// Partition keys with their places in the table.
pub(super) fn pkey_table(sysfs: &Sysfs, at: &Path) -> Vec<(u16, u16)> {
    let (names, _) = sysfs.names(at);
    let entry = |name: &String| {
        let key = u16::try_from(sysfs.number(at.join(name))?).ok().filter(|&key| key != 0)?;
        Some((name.parse().ok()?, key))
    };
    names.iter().filter_map(entry).take(limits::LIST_MAX).collect()
}

/// Each netdev once, then the members of those that are bonds.
fn netdevs(sysfs: &Sysfs, wanted: Vec<String>) -> Vec<Netdev> {
    let mut found: Vec<Netdev> = Vec::new();
    let mut queue = std::collections::VecDeque::from(wanted);
    while let Some(name) = queue.pop_front() {
        if found.len() >= limits::LIST_MAX || found.iter().any(|n| n.name == name) {
            continue;
        }
        let Some(netdev) = Netdev::read(sysfs, &name) else { continue };
        queue.extend(netdev.bond.iter().flat_map(|bond| bond.members.clone()));
        found.push(netdev);
    }
    found
}

/// "4: ACTIVE" without its number.
fn after_number(text: String) -> String {
    text.split_once(": ").map(|(_, word)| word.to_string()).unwrap_or(text)
}

/// "400 Gb/sec (4X NDR)" in bits a second.
fn rate(text: &str) -> Option<u64> {
    let (number, rest) = text.split_once(' ')?;
    if !rest.starts_with("Gb/sec") {
        return None;
    }
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    let whole: u64 = whole.parse().ok().filter(|&n| n <= 1_000_000)?;
    let tenth = u64::from(part.chars().next()?.to_digit(10)?);
    Some(whole * 1_000_000_000 + tenth * 100_000_000).filter(|&n| n > 0)
}

/// Headers that the kernel allows for when it derives the RDMA MTU of a RoCE port: GRH, UDP, BTH,
/// the longest extended headers, ICRC (`iboe_get_mtu` in `include/rdma/ib_addr.h`).
const ROCE_HEADER_BYTES: u32 = 40 + 8 + 12 + 4 + 28 + 4;

fn roce_mtu(netdev_bytes: u32) -> Option<u32> {
    let room = netdev_bytes.checked_sub(ROCE_HEADER_BYTES)?;
    [4096, 2048, 1024, 512, 256].into_iter().find(|&mtu| mtu <= room)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_mtus_are_as_the_kernel_has_them() {
        assert_eq!(rate("400 Gb/sec (4X NDR)"), Some(400_000_000_000));
        assert_eq!(rate("2.5 Gb/sec (1X SDR)"), Some(2_500_000_000));
        for bad in ["", "400", "x Gb/sec", "400 Mb/sec", "1e3 Gb/sec", "0 Gb/sec", "1. Gb/sec"] {
            assert_eq!(rate(bad), None, "{bad}");
        }
        assert_eq!(rate("99999999999999999999 Gb/sec"), None);
        for (netdev, mtu) in
            [(1500, Some(1024)), (4200, Some(4096)), (9000, Some(4096)), (351, None)]
        {
            assert_eq!(roce_mtu(netdev), mtu, "{netdev}");
        }
        assert_eq!(after_number("4: ACTIVE".into()), "ACTIVE");
        assert_eq!(after_number("odd".into()), "odd");
    }
}
