//! PCI addresses, GPUs, and how far two devices are apart.
//!
//! Owns: [`PciAddress`], [`PciPath`] (the bridges above a device), [`PathClass`], [`Gpu`]. In: a
//! [`Sysfs`]. Out: GPUs in the order of their addresses, and classes of pairs. The classes are those
//! of `nvidia-smi topo`.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use super::Sysfs;

/// Domain, bus, device and function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl FromStr for PciAddress {
    type Err = String;
    /// `0000:18:00.0`, `18:00.0`, or as nvidia-smi has it, `00000000:18:00.0`.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "expected a PCI address, such as 0000:18:00.0".to_string();
        let hex = |part: &str, digits: usize| {
            let good =
                (1..=digits).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_hexdigit());
            good.then(|| u32::from_str_radix(part, 16).ok()).flatten().ok_or_else(wrong)
        };
        let (rest, function) = text.rsplit_once('.').ok_or_else(wrong)?;
        let (rest, device) = rest.rsplit_once(':').ok_or_else(wrong)?;
        let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0", rest));
        let (device, function) = (hex(device, 2)?, hex(function, 1)?);
        if device > 0x1f || function > 7 {
            return Err(wrong());
        }
        Ok(Self {
            domain: hex(domain, 8)?,
            bus: hex(bus, 2)? as u8,
            device: device as u8,
            function: function as u8,
        })
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

impl Serialize for PciAddress {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

/// How far a GPU and a NIC are apart; what is nearer is less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum PathClass {
    /// One PCIe switch between them.
    Pix,
    /// Several PCIe bridges, but no host bridge.
    Pxb,
    /// The same PCIe host bridge.
    Phb,
    /// Different host bridges of one NUMA node.
    Node,
    /// Different NUMA nodes.
    Sys,
    /// Cannot be said: no PCI path, or no NUMA node told.
    Unknown,
}

impl PathClass {
    /// As `nvidia-smi topo` writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pix => "PIX",
            Self::Pxb => "PXB",
            Self::Phb => "PHB",
            Self::Node => "NODE",
            Self::Sys => "SYS",
            Self::Unknown => "unknown",
        }
    }
    /// What it means.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Pix => "one PCIe switch between them",
            Self::Pxb => "several PCIe bridges between them, no host bridge",
            Self::Phb => "through one PCIe host bridge",
            Self::Node => "through several host bridges of one NUMA node",
            Self::Sys => "from one NUMA node to another",
            Self::Unknown => "no PCI path, or no NUMA node told",
        }
    }
}

impl fmt::Display for PathClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Where a PCI device is: its host bridge, the bridges below it, itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PciPath {
    /// The device itself.
    pub address: PciAddress,
    /// Host bridge (`pci0000:15`), then bridges down to the device's bus. Empty if not known.
    pub bridges: Vec<String>,
    /// Nearest NUMA node, if the kernel says it.
    pub numa: Option<u32>,
}

impl PciPath {
    /// The device that `link`, a path below the root, leads to.
    pub fn read(sysfs: &Sysfs, link: impl AsRef<Path>) -> Option<Self> {
        let link = link.as_ref();
        let named = |path: &Path| path.file_name()?.to_str()?.parse::<PciAddress>().ok();
        let by_path = sysfs.resolve(link).and_then(|path| named(&path));
        // Trees that were copied without their symlinks.
        let by_event = || {
            let event = sysfs.text(link.join("uevent"))?;
            let mut words = event.split_whitespace();
            words.find_map(|word| word.strip_prefix("PCI_SLOT_NAME="))?.parse().ok()
        };
        let address = by_path.or_else(by_event)?;
        let known = Path::new("bus/pci/devices").join(address.to_string());
        let place = [known.as_path(), link]
            .into_iter()
            .filter_map(|path| sysfs.resolve(path))
            .find(|path| {
                named(path) == Some(address) && path.starts_with(sysfs.root().join("devices"))
            });
        let numa = [link, known.as_path()]
            .into_iter()
            .find_map(|path| sysfs.number(path.join("numa_node")))
            .and_then(|node| u32::try_from(node).ok());
        Some(Self { address, bridges: place.map(|p| bridges(&p)).unwrap_or_default(), numa })
    }
    /// How far two devices are apart.
    pub fn class(&self, other: &Self) -> PathClass {
        let common = self.bridges.iter().zip(&other.bridges).take_while(|(a, b)| a == b).count();
        let below = |path: &Self| path.bridges.len() - common;
        match common {
            // A bridge is shared, and beyond it each is behind at most one port of that switch.
            2.. if below(self) <= 1 && below(other) <= 1 => PathClass::Pix,
            2.. => PathClass::Pxb,
            1 => PathClass::Phb,
            _ => match (self.numa, other.numa) {
                (Some(a), Some(b)) if a == b => PathClass::Node,
                (Some(_), Some(_)) => PathClass::Sys,
                _ => PathClass::Unknown,
            },
        }
    }
}

/// The parts of a resolved path from its first host bridge on, without the device.
fn bridges(path: &Path) -> Vec<String> {
    let is_host = |part: &str| {
        let bus = part.strip_prefix("pci").and_then(|rest| rest.split_once(':'));
        bus.is_some_and(|(domain, bus)| {
            let hex = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_hexdigit());
            hex(domain) && hex(bus)
        })
    };
    let mut parts: Vec<String> = path
        .iter()
        .filter_map(|part| part.to_str())
        .skip_while(|part| !is_host(part))
        .map(String::from)
        .collect();
    parts.pop();
    parts
}

/// NVIDIA's PCI vendor number.
const NVIDIA: i64 = 0x10de;
/// Display controllers: VGA, and 3D, which is what data centre GPUs are.
const CLASSES: [i64; 2] = [0x0300, 0x0302];

/// A GPU. Its ordinal is its place among the machine's GPUs by PCI address; CUDA may count otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gpu {
    /// Its place by PCI address.
    pub ordinal: u32,
    /// Where it is.
    #[serde(flatten)]
    pub pci: PciPath,
    /// PCI device number, if told.
    pub device_id: Option<u16>,
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gpu{} {}", self.ordinal, self.pci.address)
    }
}

/// All GPUs, by PCI address, and whether the machine has more PCI devices than are looked at.
pub(super) fn gpus(sysfs: &Sysfs) -> (Vec<Gpu>, bool) {
    let devices = Path::new("bus/pci/devices");
    let (names, more) = sysfs.names(devices);
    let is_gpu = |name: &String| {
        let at = devices.join(name);
        sysfs.number(at.join("vendor")) == Some(NVIDIA)
            && sysfs.number(at.join("class")).is_some_and(|class| CLASSES.contains(&(class >> 8)))
    };
    let mut found: Vec<(PciPath, Option<u16>)> = names
        .iter()
        .filter(|name| is_gpu(name))
        .filter_map(|name| {
            let at = devices.join(name);
            let id = sysfs.number(at.join("device")).and_then(|id| u16::try_from(id).ok());
            Some((PciPath::read(sysfs, &at)?, id))
        })
        .collect();
    found.sort_by_key(|(pci, _)| pci.address);
    let gpu = |(ordinal, (pci, device_id))| Gpu { ordinal, pci, device_id };
    ((0..).zip(found).map(gpu).collect(), more)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(numa: Option<u32>, parts: &[&str]) -> PciPath {
        let bridges = parts.iter().map(ToString::to_string).collect();
        PciPath { address: "0000:00:00.0".parse().unwrap(), bridges, numa }
    }

    #[test]
    fn addresses_are_read_in_each_spelling() {
        for text in ["0000:18:00.1", "18:00.1", "00000000:18:00.1", "0:18:0.1"] {
            assert_eq!(text.parse::<PciAddress>().unwrap().to_string(), "0000:18:00.1");
        }
        assert_eq!("10000:e1:1f.7".parse::<PciAddress>().unwrap().to_string(), "10000:e1:1f.7");
        let bad =
            ["", "3", "18:00", ":00.0", "18:20.0", "18:00.8", "+1:00.0", "g:0.0", "1:2:3:4.0"];
        for text in bad {
            assert!(text.parse::<PciAddress>().is_err(), "{text}");
        }
    }

    #[test]
    fn classes_follow_the_bridges_and_then_the_nodes() {
        let gpu = path(Some(0), &["pci0000:15", "root", "up", "down1"]);
        for (class, numa, other) in [
            (PathClass::Pix, Some(0), &["pci0000:15", "root", "up", "down2"][..]),
            (PathClass::Pxb, Some(0), &["pci0000:15", "root", "up", "down2", "up2", "down3"]),
            (PathClass::Phb, Some(0), &["pci0000:15", "root2"]),
            (PathClass::Node, Some(0), &["pci0000:20", "root"]),
            (PathClass::Sys, Some(1), &["pci0000:20", "root"]),
            (PathClass::Unknown, None, &["pci0000:20", "root"]),
            (PathClass::Unknown, None, &[]),
        ] {
            assert_eq!(gpu.class(&path(numa, other)), class, "{other:?}");
            assert_eq!(path(numa, other).class(&gpu), class, "{other:?}");
        }
        // Both on the bus behind one bridge.
        let flat = path(None, &["pci0000:00", "bridge"]);
        assert_eq!(flat.class(&flat), PathClass::Pix);
    }

    #[test]
    fn bridges_start_at_the_first_host_bridge() {
        let of = |text: &str| bridges(Path::new(text));
        assert_eq!(
            of("/x/devices/platform/a.pcie/pci0009:00/0009:00:00.0/0009:01:00.0"),
            ["pci0009:00", "0009:00:00.0"]
        );
        assert!(of("/x/devices/virtual/net/eth0").is_empty());
        assert!(of("/x/devices/pci-host/0000:01:00.0").is_empty());
    }
}
