//! Network interfaces behind NICs, and bonds.
//!
//! Owns: [`Netdev`], [`Bond`]. In: `/sys/class/net`. Out: state, MTU, speed, members.

use std::path::Path;

use kvlane_proto::limits;
use serde::Serialize;

use super::Sysfs;
use super::pci::PciPath;
use super::sysfs::is_name;

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Netdev {
    /// Its name.
    pub name: String,
    /// `up`, `down`, `lowerlayerdown`, …
    pub operstate: Option<String>,
    /// In bytes.
    pub mtu_bytes: Option<u32>,
    /// Of the link, if told.
    pub bits_per_s: Option<u64>,
    /// Where it is; virtual ones are nowhere.
    pub pci: Option<PciPath>,
    /// The bond that it is a member of.
    pub master: Option<String>,
    /// If it is a bond: of what.
    pub bond: Option<Bond>,
}

/// What a bond is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Bond {
    /// `active-backup`, `802.3ad`, …
    pub mode: Option<String>,
    /// The member that carries the traffic, where only one does.
    pub active: Option<String>,
    /// Its interfaces.
    pub members: Vec<String>,
}

impl Netdev {
    /// The interface of that name, if it is there.
    pub fn read(sysfs: &Sysfs, name: &str) -> Option<Self> {
        if !is_name(name) {
            return None;
        }
        let at = Path::new("class/net").join(name);
        sysfs.resolve(&at)?;
        let unsigned = |file| sysfs.number(at.join(file)).and_then(|n| u64::try_from(n).ok());
        let master = sysfs.resolve(at.join("master"));
        Some(Self {
            name: name.into(),
            operstate: sysfs.text(at.join("operstate")),
            mtu_bytes: unsigned("mtu").and_then(|n| u32::try_from(n).ok()),
            bits_per_s: unsigned("speed").and_then(|n| n.checked_mul(1_000_000)).filter(|&n| n > 0),
            pci: PciPath::read(sysfs, at.join("device")),
            master: master.and_then(|p| p.file_name()?.to_str().map(String::from)),
            bond: Bond::read(sysfs, &at.join("bonding")),
        })
    }
}

impl Bond {
    fn read(sysfs: &Sysfs, at: &Path) -> Option<Self> {
        sysfs.resolve(at)?;
        let first = |text: String| text.split_whitespace().next().map(String::from);
        let members = sysfs.text(at.join("slaves")).unwrap_or_default();
        let members = members.split_whitespace().filter(|name| is_name(name)).map(String::from);
        Some(Self {
            mode: sysfs.text(at.join("mode")).and_then(first),
            active: sysfs.text(at.join("active_slave")).filter(|name| is_name(name)),
            members: members.take(limits::LIST_MAX).collect(),
        })
    }
}
