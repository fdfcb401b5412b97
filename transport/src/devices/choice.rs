//! Which NIC ports carry a GPU's pages, or host memory's, and why each other one does not.
//!
//! Owns: [`choose`], [`Choice`]. In: a [`Machine`], what is to be served, what the user wishes. Out:
//! rails, and a verdict for every candidate: device, port and GID. Invariants: a name that is not there
//! is an error, never a guess; a wish is met or the candidate refused, never dropped; an address that
//! reaches nobody is not chosen, and one that reaches its own link only for peers of one host only, and
//! only where there is nothing better.

use std::fmt;
use std::net::IpAddr;

use kvlane_proto::{Error, ErrorKind, Result, limits};
use serde::Serialize;

use super::gids::{Gid, GidType, Reach, unroutable};
use super::nics::{LinkLayer, Nic, Port};
use super::pci::{Gpu, PathClass, PciAddress};
use super::rail::Rail;
use super::{Machine, listed};

/// Whose pages are to be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// Memory of the host.
    Host,
    /// Memory of the GPU at that address.
    Gpu(PciAddress),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host memory"),
            Self::Gpu(address) => write!(f, "GPU {address}"),
        }
    }
}

/// What the user asks for. What is not said is chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Wishes {
    /// These devices, by their whole names, and no others; in this order.
    pub nics: Vec<String>,
    /// This port of each.
    pub port: Option<u32>,
    /// GIDs of this type; RoCE v2 unless said.
    pub gid_type: Option<GidType>,
    /// The GID of this address.
    pub address: Option<IpAddr>,
    /// The traffic class byte of the IP header, DSCP in its upper six bits.
    pub traffic_class: Option<u8>,
    /// 0 to 15.
    pub service_level: Option<u8>,
    /// A partition; the membership bit (0x8000) does not count.
    pub pkey: Option<u16>,
    /// An address of the peer, which must be reachable.
    pub peer: Option<IpAddr>,
    /// Both ends are on this host, so that link-local addresses may do.
    pub same_host: bool,
}

/// What became of a candidate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It is a rail.
    Chosen {
        /// Why.
        why: String,
    },
    /// It is not.
    Refused {
        /// Why not.
        why: String,
        /// What would make it one; empty where nothing need be done.
        fix: &'static str,
    },
}

/// A port, or one GID of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Candidate {
    /// The RDMA device.
    pub nic: String,
    /// Its port; none if it has no ports.
    pub port: Option<u32>,
    /// The GID; none where the verdict is about the whole port.
    pub gid: Option<Gid>,
    /// How far the NIC is from the GPU; none for host memory.
    pub path: Option<PathClass>,
    /// Whether it is used, and why.
    pub verdict: Verdict,
}

/// What is used, and what is not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Choice {
    /// For what.
    pub target: Target,
    /// Devices that were asked for.
    pub asked: Vec<String>,
    /// What carries pages; may be empty.
    pub rails: Vec<Rail>,
    /// Everything that was considered.
    pub candidates: Vec<Candidate>,
}

/// Why a candidate is not used, and what to do about it.
struct No(String, &'static str);

impl No {
    fn say(why: impl Into<String>) -> Self {
        Self(why.into(), "")
    }
}

/// A port that could be used, with its best GID.
struct Usable {
    /// Its place among the candidates.
    at: usize,
    rail: Rail,
    rank: u8,
}

/// The rank of an address that reaches its own link only.
const LINK_ONLY: u8 = u8::MAX;

const ADDRESS: &str = "give the port's netdev (for a bond: the bond itself) an IPv4 address";

/// Chooses rails, holding a peer's address against ours by [`unroutable`].
///
/// # Errors
/// [`ErrorKind::NotFound`]: a GPU or NIC that is not there, with those that are.
/// [`ErrorKind::Malformed`]: a wish that nothing could meet.
pub fn choose(machine: &Machine, target: Target, wishes: &Wishes) -> Result<Choice> {
    choose_by(machine, target, wishes, &unroutable)
}

/// Chooses rails. `unroutable` says why the second address cannot be reached from the first.
///
/// # Errors
/// As [`choose`].
pub fn choose_by(
    machine: &Machine,
    target: Target,
    wishes: &Wishes,
    unroutable: &dyn Fn(IpAddr, IpAddr) -> Option<String>,
) -> Result<Choice> {
    if let Some(level) = wishes.service_level.filter(|&level| level > 15) {
        return Err(Error::new(ErrorKind::Malformed, "a service level is 0 to 15")
            .with("asked", level)
            .hint("give one of 0 to 15"));
    }
    for asked in &wishes.nics {
        machine.nic(asked)?;
    }
    let gpu = match target {
        Target::Host => None,
        Target::Gpu(address) => Some(machine.gpu(&address.to_string())?),
    };
    let mut choosing = Choosing { wishes, unroutable, candidates: Vec::new(), usable: Vec::new() };
    for nic in &machine.nics {
        let path = gpu.map(|gpu| class(gpu, nic));
        if nic.ports.is_empty() {
            choosing.refuse(nic, None, None, path, No::say("the device has no ports"));
        }
        for port in &nic.ports {
            choosing.consider(nic, port, path);
        }
    }
    choosing.prefer_routed();
    choosing.prefer_near();
    let (rails, candidates) = choosing.end();
    Ok(Choice { target, asked: wishes.nics.clone(), rails, candidates })
}

fn class(gpu: &Gpu, nic: &Nic) -> PathClass {
    nic.pci.as_ref().map_or(PathClass::Unknown, |pci| gpu.pci.class(pci))
}

/// A choice that is being made.
struct Choosing<'a> {
    wishes: &'a Wishes,
    unroutable: &'a dyn Fn(IpAddr, IpAddr) -> Option<String>,
    candidates: Vec<Candidate>,
    usable: Vec<Usable>,
}

impl Choosing<'_> {
    fn refuse(
        &mut self,
        nic: &Nic,
        port: Option<u32>,
        gid: Option<Gid>,
        path: Option<PathClass>,
        No(why, fix): No,
    ) {
        let verdict = Verdict::Refused { why, fix };
        self.candidates.push(Candidate { nic: nic.name.clone(), port, gid, path, verdict });
    }
    /// One candidate for a port that is no use, else one for each of its GIDs.
    fn consider(&mut self, nic: &Nic, port: &Port, path: Option<PathClass>) {
        let link_layer = match self.port(nic, port) {
            Ok(link_layer) => link_layer.clone(),
            Err(no) => return self.refuse(nic, Some(port.number), None, path, no),
        };
        let ib = link_layer == LinkLayer::InfiniBand;
        let verdicts: Vec<_> = port.gids.iter().map(|gid| (gid, self.gid(gid, ib))).collect();
        let usable = verdicts.iter().filter_map(|(gid, v)| Some((*v.as_ref().ok()?, gid.index)));
        let best = usable.min();
        if best.is_none() && (!ib || self.wishes.address.is_some()) {
            if verdicts.is_empty() {
                let no = No("the port has no GID".into(), ADDRESS);
                self.refuse(nic, Some(port.number), None, path, no);
            }
            for (gid, verdict) in verdicts {
                let no = verdict.err().unwrap_or_else(|| No::say("not used"));
                self.refuse(nic, Some(port.number), Some(gid.clone()), path, no);
            }
            return;
        }
        let best_index = best.map(|(_, index)| index);
        let mut chosen = None;
        for (gid, verdict) in verdicts {
            if Some(gid.index) == best_index {
                chosen = Some(gid.clone());
                continue;
            }
            let instead = best_index.map(|n| format!("gid {n} of the port goes before"));
            let no = verdict.err().unwrap_or_else(|| No::say(instead.unwrap_or_default()));
            self.refuse(nic, Some(port.number), Some(gid.clone()), path, no);
        }
        let at = self.candidates.len();
        // The verdict comes with the last step.
        self.refuse(nic, Some(port.number), chosen.clone(), path, No::say(""));
        let netdev = chosen.as_ref().and_then(|gid| gid.netdev.as_deref());
        let netdev = nic.netdevs.iter().find(|n| netdev == Some(&n.name));
        let rail = Rail {
            nic: nic.name.clone(),
            port: port.number,
            link_layer,
            gid: chosen,
            lid: port.lid.filter(|_| ib),
            path,
            numa: nic.pci.as_ref().and_then(|pci| pci.numa),
            bits_per_s: port.bits_per_s,
            mtu_bytes: port.mtu_bytes,
            bond: netdev.and_then(|netdev| netdev.bond.clone()),
            traffic_class: self.wishes.traffic_class,
            service_level: self.wishes.service_level,
            pkey: self.wishes.pkey.and_then(|asked| find_pkey(port, asked)),
        };
        self.usable.push(Usable { at, rail, rank: best.map_or(0, |(rank, _)| rank) });
    }
    /// What the wire of a port is, if the port could carry anything that is wished.
    fn port<'a>(&self, nic: &Nic, port: &'a Port) -> std::result::Result<&'a LinkLayer, No> {
        let Wishes { nics, pkey, gid_type, .. } = self.wishes;
        if !nics.is_empty() && !nics.contains(&nic.name) {
            return Err(No::say("another NIC was asked for"));
        }
        if let Some(asked) = self.wishes.port.filter(|&asked| asked != port.number) {
            return Err(No::say(format!("port {asked} was asked for")));
        }
        if !port.is_active() {
            let told = |text: &Option<String>| text.clone().unwrap_or("not told".into());
            return Err(No(
                format!("the port is {} ({})", told(&port.state), told(&port.phys_state)),
                "bring the port up: its netdev (ip link), its cable, on InfiniBand its subnet manager",
            ));
        }
        if let Some(asked) = pkey.filter(|&asked| find_pkey(port, asked).is_none()) {
            let known = listed(port.pkeys.iter().map(|key| format!("{key:#06x}")));
            return Err(No(
                format!("the port has no partition key {asked:#06x}, only {known}"),
                "ask for a key that the port has, or have it added to the partition",
            ));
        }
        match &port.link_layer {
            Some(layer @ LinkLayer::InfiniBand) => {
                if let Some(asked) = gid_type.filter(|&asked| asked != GidType::Ib) {
                    return Err(No::say(format!("{asked} was asked for, the link is InfiniBand")));
                }
                if port.lid.is_none_or(|lid| lid == 0) {
                    return Err(No(
                        "the port has no LID".into(),
                        "start a subnet manager on the fabric",
                    ));
                }
                Ok(layer)
            }
            Some(layer @ LinkLayer::Ethernet) => Ok(layer),
            Some(LinkLayer::Other(text)) => {
                Err(No::say(format!("its link layer is {text}, not Ethernet or InfiniBand")))
            }
            None => Err(No::say("its link layer is not told")),
        }
    }
    /// How good a GID of a usable port is; the lower, the better.
    fn gid(&self, gid: &Gid, ib: bool) -> std::result::Result<u8, No> {
        if let Some(asked) =
            self.wishes.address.filter(|asked| mapped(*asked) != mapped(gid.address))
        {
            return Err(No::say(format!("address {asked} was asked for")));
        }
        if ib {
            return Ok(0);
        }
        let asked = self.wishes.gid_type.unwrap_or(GidType::RoceV2);
        match gid.gid_type {
            Some(found) if found == asked => {}
            Some(GidType::RoceV1) if self.wishes.gid_type.is_none() => {
                return Err(No::say("RoCE v1 is not routed; RoCE v2 is used"));
            }
            Some(found) => return Err(No::say(format!("it is {found}, {asked} is used"))),
            None => return Err(No::say("sysfs does not say its type (gid_attrs/types)")),
        }
        let rank = match gid.reach() {
            Reach::Routed(rank) => rank,
            Reach::Link(_) if self.wishes.same_host => LINK_ONLY,
            Reach::Link(why) | Reach::None(why) => return Err(No(why.into(), ADDRESS)),
        };
        if let Some(peer) = self.wishes.peer
            && let Some(why) = (self.unroutable)(gid.address, peer)
        {
            return Err(No(why, "use an address of the peer's kind on both sides"));
        }
        Ok(rank)
    }
    /// Takes from what is usable what `keep` has a reason against.
    fn drop_if(&mut self, mut against: impl FnMut(&Usable) -> Option<No>) {
        let candidates = &mut self.candidates;
        self.usable.retain(|usable| {
            let no = against(usable);
            if let Some(No(why, fix)) = &no {
                candidates[usable.at].verdict = Verdict::Refused { why: why.clone(), fix };
            }
            no.is_none()
        });
    }
    /// Link-local addresses are for when there is nothing else.
    fn prefer_routed(&mut self) {
        let Some(better) = self.usable.iter().find(|u| u.rank != LINK_ONLY) else { return };
        let why = format!("link-local, and {} port {} is not", better.rail.nic, better.rail.port);
        self.drop_if(|u| (u.rank == LINK_ONLY).then(|| No(why.clone(), ADDRESS)));
    }
    /// NICs of the nearest class; all that were asked for by name.
    fn prefer_near(&mut self) {
        if !self.wishes.nics.is_empty() {
            return;
        }
        let nearest =
            self.usable.iter().filter_map(|u| Some((u.rail.path?, u.rail.nic.clone()))).min();
        let Some((best, nic)) = nearest else { return };
        self.drop_if(|u| {
            let path = u.rail.path.filter(|&path| path != best)?;
            let told = match path {
                PathClass::Unknown => "its path is not known",
                path => path.as_str(),
            };
            Some(No::say(format!("{told}, and {nic} has {best}")))
        });
    }
    fn end(mut self) -> (Vec<Rail>, Vec<Candidate>) {
        let order = |rail: &Rail| self.wishes.nics.iter().position(|name| *name == rail.nic);
        self.usable.sort_by_key(|u| order(&u.rail));
        let mut left = usize::from(limits::RAILS_MAX);
        self.drop_if(|_| match left.checked_sub(1) {
            Some(less) => {
                left = less;
                None
            }
            None => Some(No::say(format!("{} rails are the most", limits::RAILS_MAX))),
        });
        for usable in &self.usable {
            let why = why(self.wishes, usable, &self.candidates);
            self.candidates[usable.at].verdict = Verdict::Chosen { why };
        }
        (self.usable.into_iter().map(|u| u.rail).collect(), self.candidates)
    }
}

/// The key as the port has it.
fn find_pkey(port: &Port, asked: u16) -> Option<u16> {
    port.pkeys.iter().copied().filter(|key| (key ^ asked) & 0x7fff == 0).max()
}

fn mapped(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(v6) => v6.to_ipv4_mapped().map_or(address, IpAddr::V4),
        IpAddr::V4(_) => address,
    }
}

fn why(wishes: &Wishes, usable: &Usable, candidates: &[Candidate]) -> String {
    let place = match (usable.rail.path, wishes.nics.is_empty()) {
        (_, false) => "asked for by name".to_string(),
        (None, true) => "host memory takes every usable port".to_string(),
        (Some(PathClass::Unknown), true) => {
            "no usable NIC has a known path to the GPU (soft and virtual ones have none)"
                .to_string()
        }
        (Some(path), true) => format!("{path} ({}), the nearest usable", path.meaning()),
    };
    let path = match usable.rail.path {
        Some(path) if !wishes.nics.is_empty() => format!(", path {path}"),
        _ => String::new(),
    };
    let link =
        if usable.rank == LINK_ONLY { "; link-local, both ends are on this host" } else { "" };
    // What should have been used is said where what is used is.
    let is_nearer = |c: &&Candidate| c.path.is_some() && c.path < usable.rail.path;
    let mut nearer: Vec<_> = candidates.iter().filter(is_nearer).map(|c| c.nic.as_str()).collect();
    nearer.dedup();
    let nearer = match (nearer.is_empty(), wishes.nics.is_empty()) {
        (false, true) => format!("; nearer, but not usable: {}", listed(nearer)),
        _ => String::new(),
    };
    format!("{place}{path}{link}{nearer}")
}

impl Choice {
    /// The rails, if there are any, and one for each device that was asked for.
    ///
    /// # Errors
    /// [`ErrorKind::NoPath`] with every candidate and what is wrong with it.
    pub fn require(&self) -> Result<&[Rail]> {
        let missing: Vec<_> = self
            .asked
            .iter()
            .filter(|name| !self.rails.iter().any(|rail| rail.nic == **name))
            .collect();
        if missing.is_empty() && !self.rails.is_empty() {
            return Ok(&self.rails);
        }
        let what = if missing.is_empty() {
            "no RDMA port can be used"
        } else {
            "an RDMA device that was asked for cannot be used"
        };
        let mut e = Error::new(ErrorKind::NoPath, what).with("target", self.target);
        if !missing.is_empty() {
            e = e.with("asked", listed(missing.iter()));
        }
        let about =
            |c: &&Candidate| missing.is_empty() || missing.iter().any(|name| **name == c.nic);
        let fix = |c: &Candidate| match &c.verdict {
            Verdict::Refused { fix, .. } if !fix.is_empty() => Some((c.path, *fix)),
            _ => None,
        };
        // Of the nearest, if there is a choice.
        let fixes = self.candidates.iter().filter(&about).filter_map(fix);
        let fix = match (self.candidates.is_empty(), fixes.min_by_key(|(path, _)| *path)) {
            (true, _) => "no RDMA device is on this machine: use --engine tcp or shm".to_string(),
            (_, Some((_, fix))) => format!("{fix}; `kvlane explain` shows every candidate"),
            (_, None) => "`kvlane explain` shows every candidate: ask for less".to_string(),
        };
        Err(e.with("candidates", summary(self.candidates.iter().filter(about))).hint(fix))
    }
    /// Every candidate on one line, those alike together; at most
    /// [`limits::CANDIDATES_BYTES_MAX`] bytes.
    pub fn summary(&self) -> String {
        summary(self.candidates.iter())
    }
}

/// Candidates of whom the same is said.
struct Alike<'a> {
    used: bool,
    why: &'a str,
    fix: &'a str,
    /// GIDs of one port are one name.
    names: Vec<String>,
    last: Option<(&'a str, Option<u32>)>,
}

/// Those in use first.
fn alike<'a>(candidates: impl Iterator<Item = &'a Candidate>) -> Vec<Alike<'a>> {
    let mut groups: Vec<Alike<'a>> = Vec::new();
    for candidate in candidates {
        let (used, why, fix) = match &candidate.verdict {
            Verdict::Chosen { why } => (true, why.as_str(), ""),
            Verdict::Refused { why, fix } => (false, why.as_str(), *fix),
        };
        let place = groups.iter().position(|group| (group.used, group.why) == (used, why));
        let at = place.unwrap_or_else(|| {
            groups.push(Alike { used, why, fix, names: Vec::new(), last: None });
            groups.len() - 1
        });
        let group = &mut groups[at];
        let port = Some((candidate.nic.as_str(), candidate.port));
        match (group.names.last_mut(), &candidate.gid) {
            (Some(name), Some(gid)) if group.last == port => {
                name.push_str(&format!("/{}", gid.index))
            }
            _ => group.names.push(candidate.to_string()),
        }
        group.last = port;
    }
    groups.sort_by_key(|group| !group.used);
    groups
}

/// On one line, of bounded length.
fn summary<'a>(candidates: impl Iterator<Item = &'a Candidate>) -> String {
    /// Names of one group; and bytes for what is left out.
    const NAMES: usize = 4;
    const REST_BYTES: usize = 32;
    let mut out = String::new();
    let mut left_out = 0;
    for Alike { used, why, names, .. } in alike(candidates) {
        let more = match names.len().saturating_sub(NAMES) {
            0 => String::new(),
            n => format!(" and {n} more"),
        };
        let names = names.iter().take(NAMES).cloned().collect::<Vec<_>>().join(", ");
        let used = if used { "used: " } else { "" };
        let item = format!("{names}{more}: {used}{why}");
        let full = out.len() + item.len() + REST_BYTES > limits::CANDIDATES_BYTES_MAX;
        if left_out > 0 || full {
            left_out += 1;
            continue;
        }
        if !out.is_empty() {
            out.push_str(" | ");
        }
        out.push_str(&item);
    }
    match (out.is_empty(), left_out) {
        (true, 0) => "none".into(),
        (_, 0) => out,
        (true, n) => format!("{n} reasons, too long for here"),
        (false, n) => format!("{out} | and {n} more reasons"),
    }
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.nic)?;
        if let Some(port) = self.port {
            write!(f, " port {port}")?;
        }
        if let Some(gid) = &self.gid {
            write!(f, " gid {}", gid.index)?;
        }
        Ok(())
    }
}

/// For people: what is used, then what is not, those alike together.
impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.target)?;
        if self.rails.is_empty() {
            writeln!(f, "  no rail")?;
        }
        for rail in &self.rails {
            writeln!(f, "  rail {rail}")?;
        }
        for Alike { used, why, fix, names, .. } in alike(self.candidates.iter()) {
            let used = if used { "used" } else { "not " };
            write!(f, "    {used} {}: {why}", names.join(", "))?;
            // Where there are rails, nothing need be done.
            if self.rails.is_empty() && !fix.is_empty() {
                write!(f, "; fix: {fix}")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
