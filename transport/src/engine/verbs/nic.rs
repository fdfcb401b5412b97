//! A NIC port: opened by its name, with the domains and the memory of this process.
//!
//! In: the engine's calls. Out: keys and queue pairs, and whether the device is still there.
//! Invariants: where its address stands in the port's table is looked up for every queue pair; a region
//! is registered whole or not at all; of a device that is gone nothing is asked, and nothing that it
//! may still use is let go.

use std::collections::HashMap;
use std::mem;
use std::net::IpAddr;
use std::os::fd::RawFd;
use std::sync::Arc;

use kvlane_proto::{Error, ErrorKind, Result, limits};

use super::pair::Connected;
use crate::devices::{Gid, GidType, LinkLayer, Rail, Sysfs, gid_address, gid_text, unroutable};
use crate::engine::one_sided::nic::{About, Domain, End, Key, Nic, Registered, Rights};
use crate::memory::Region;
use crate::mlx5::SENDS_MAX;
use crate::random::random;
use crate::sys::share::Words;
use crate::sys::verbs::{
    self, Access, AsyncEvent, CompletionChannel, CompletionQueue, Context, DeviceAttributes,
    GlobalRoute, MemoryRegion, Mtu, PairDepths, PortState, ProtectionDomain, QueuePair, Range,
    ToInit, ToReceive, ToSend, Verbs,
};

/// Data that an entry carries itself: a count.
const INLINE_BYTES: u32 = 8;
/// An answer is waited for 4.096 µs · 2^14 = 67 ms, and asked for so many times more. Some NICs wait up
/// to four times as long: so the NIC gives up within 1.4 s, long before a part's deadline. 7 would be
/// for ever on soft-RoCE.
const TIMEOUT: u8 = 14;
const RETRIES: u8 = 4;
/// A receive that is not there is asked for so many times, 0.64 ms apart: credit should prevent it, and
/// 7 would be for ever.
const RNR_RETRIES: u8 = 6;
const RNR_TIMER: u8 = 12;
const _: () = assert!(
    4 * (4_096u64 << TIMEOUT) * (RETRIES as u64 + 1) < limits::COMPLETION_MS * 1_000_000
        && limits::COMPLETION_MS < limits::PART_TIMEOUT_MS
);
/// Routers that a packet may cross.
const HOPS: u8 = 64;
/// Keys begin at whole pages, so that no page is pinned for two.
const PAGE_BYTES: u64 = 4096;
/// Completions and events taken in one look.
const EVENTS_PER_LOOK: usize = 64;

/// An open NIC port.
#[derive(Debug)]
pub struct Port {
    about: About,
    rail: Rail,
    sysfs: Sysfs,
    number: u8,
    pkey_index: u16,
    context: Arc<Context>,
    limits: DeviceAttributes,
    channel: Arc<CompletionChannel>,
    relaxed: bool,
    domains: HashMap<Domain, Arc<ProtectionDomain>>,
    serial: u32,
    regions: HashMap<Key, (Domain, MemoryRegion)>,
    is_lost: bool,
}

impl Port {
    /// Opens it.
    ///
    /// # Errors
    /// What [`Verbs::open`] or the device said.
    pub fn open(verbs: &Verbs, sysfs: &Sysfs, rail: &Rail, relaxed: bool) -> Result<Self> {
        let refused = |e: Error| e.with("rail", rail);
        let context = Arc::new(verbs.open(&rail.nic).map_err(refused)?);
        let limits = context.device_attributes().map_err(refused)?;
        let channel = CompletionChannel::new(&context).map_err(refused)?;
        let number = u8::try_from(rail.port).map_err(|_| {
            refused(Error::new(ErrorKind::Config, "no such port").with("found", rail.port))
        })?;
        let name = format!("{}:{number}", rail.nic);
        // Some virtual devices have no GUID.
        let guid = name.bytes().fold(limits.node_guid, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        });
        let pkey_index = rail.pkey_index_now(sysfs).map_err(refused)?;
        Ok(Self {
            about: About { name, guid },
            rail: rail.clone(),
            sysfs: sysfs.clone(),
            number,
            pkey_index,
            context,
            limits,
            channel,
            relaxed,
            domains: HashMap::new(),
            serial: 0,
            regions: HashMap::new(),
            is_lost: false,
        })
    }
    /// Longest ring of sends, as a power of two.
    pub fn depth(&self) -> u32 {
        let most = self.limits.max_depth.clamp(1, SENDS_MAX);
        1 << most.ilog2()
    }
    fn domain_of(&self, domain: Domain) -> Result<&Arc<ProtectionDomain>> {
        self.domains.get(&domain).ok_or_else(|| {
            Error::new(ErrorKind::Internal, "a protection domain that is not there")
                .with("domain", domain.0)
        })
    }
    fn alive(&self) -> Result<()> {
        if self.is_lost { Err(self.lost()) } else { Ok(()) }
    }
    fn keep(&mut self, domain: Domain, region: MemoryRegion) -> Registered {
        let registered = Registered {
            address: region.address(),
            bytes: region.bytes(),
            local: Key(region.local_key()),
            remote: Key(region.remote_key()),
        };
        self.regions.insert(registered.local, (domain, region));
        registered
    }
    /// Registers it piece by piece; what an error comes with has to be taken back.
    fn pieces(
        &mut self,
        domain: Domain,
        region: &Arc<Region>,
        access: Access,
        done: &mut Vec<Registered>,
    ) -> Result<()> {
        let most = (self.limits.max_region_bytes & !(PAGE_BYTES - 1)).max(PAGE_BYTES);
        let mut offset = 0;
        while offset < region.bytes() {
            // The first piece ends at a whole page, so that all others begin at one.
            let address = region.address() + offset;
            let bytes = (most - address % PAGE_BYTES).min(region.bytes() - offset);
            let range = Range::of(region.memory(), address, bytes).ok_or_else(|| {
                Error::new(ErrorKind::Internal, "a piece that lies outside its region")
            })?;
            let piece = self.domain_of(domain)?.register(range, access).map_err(|e| {
                e.with("pieces_done", done.len())
                    .with("largest_piece_bytes", most)
                    .with("regions_max", self.limits.max_regions)
            })?;
            done.push(self.keep(domain, piece));
            offset += bytes;
        }
        Ok(())
    }
    /// Where its GID stands now. The device is asked: sysfs has a file for each of a thousand places.
    fn gid_index(&self, asked: &Gid) -> Result<u32> {
        let table = self.context.gids(self.number)?;
        let netdev = asked.netdev.as_ref().map(|name| self.sysfs.interface_index(name));
        let same = |gid: &&verbs::Gid| {
            let kind = match gid.kind {
                verbs::GidType::InfiniBand => Some(GidType::Ib),
                verbs::GidType::RoceV1 => Some(GidType::RoceV1),
                verbs::GidType::RoceV2 => Some(GidType::RoceV2),
                verbs::GidType::Other(_) => None,
            };
            gid.gid == asked.raw
                && kind == asked.gid_type
                && netdev.is_none_or(|index| index == gid.interface_index)
        };
        table.iter().find(same).map(|gid| gid.index).ok_or_else(|| {
            // Sysfs says it better.
            let e = self.rail.gid_now(&self.sysfs).map(|_| ()).err();
            e.unwrap_or_else(|| {
                Error::new(ErrorKind::NoPath, "the NIC port's address is about to change")
                    .with("asked", asked)
            })
        })
    }
    /// Where packets to a peer go.
    fn route(&self, peer: &End) -> Result<Option<GlobalRoute>> {
        let wanted = self.rail.link_layer != LinkLayer::InfiniBand;
        if !wanted && peer.lid == 0 {
            return Err(Error::new(ErrorKind::NoPath, "the peer's NIC is on no InfiniBand fabric")
                .with("rail", &self.rail)
                .hint("name NICs of one kind on both hosts, in one order (--nic)"));
        }
        let (Some(gid), true) = (&self.rail.gid, wanted || peer.gid != [0; 16]) else {
            return Ok(None);
        };
        if wanted {
            let theirs = gid_address(peer.gid);
            let why = match theirs {
                IpAddr::V4(v4) if v4.is_unspecified() => Some("it has no address".to_owned()),
                IpAddr::V6(v6) if v6.is_unspecified() => Some("it has no address".to_owned()),
                _ => unroutable(gid.address, theirs),
            };
            if let Some(why) = why {
                return Err(Error::new(ErrorKind::NoPath, "the peer's NIC cannot be reached")
                    .with("why", why)
                    .with("asked", gid_text(&peer.gid))
                    .with("from", gid)
                    .hint("give both NICs addresses of one network; see `kvlane explain --peer`"));
            }
        }
        Ok(Some(GlobalRoute {
            gid_index: self.gid_index(gid)?,
            destination: peer.gid,
            flow_label: 0,
            hop_limit: HOPS,
            traffic_class: self.rail.traffic_class.unwrap_or(0),
        }))
    }
}

impl Nic for Port {
    const ENGINE: &'static str = "verbs";
    const IS_EMULATED: bool = false;
    type Pair = Connected;

    fn about(&self) -> &About {
        &self.about
    }
    fn named(&self, e: Error) -> Error {
        let e = e.with("nic", &self.rail.nic).with("port", self.number);
        match &self.rail.gid {
            Some(gid) => e.with("gid", gid_text(&gid.raw)),
            None => e,
        }
    }
    fn see(&self) -> String {
        format!("`kvlane explain --nic {}`", self.rail.nic)
    }
    fn is_lost(&self) -> bool {
        self.is_lost
    }
    fn lost(&self) -> Error {
        self.named(Error::new(ErrorKind::NoPath, "the NIC is lost"))
            .hint("its driver gave it up: see the kernel's log; then start the worker again")
    }
    /// The one in the same place: hosts of a cluster have their rails in one order.
    fn partner(&self, nth: usize, theirs: &[About]) -> Option<usize> {
        nth.checked_rem(theirs.len())
    }

    fn domain(&mut self) -> Result<Domain> {
        self.alive()?;
        let made = ProtectionDomain::new(&self.context)?;
        self.serial += 1;
        let domain = Domain(self.serial);
        self.domains.insert(domain, made);
        Ok(domain)
    }
    fn drop_domain(&mut self, domain: Domain) -> Result<()> {
        self.alive()?;
        self.regions.retain(|_, (of, _)| *of != domain);
        self.domains.remove(&domain);
        Ok(())
    }
    fn register(
        &mut self,
        domain: Domain,
        region: &Arc<Region>,
        rights: Rights,
    ) -> Result<Vec<Registered>> {
        self.alive()?;
        let access = match rights {
            Rights::LocalRead => Access::READ,
            Rights::RemoteWrite => Access::REMOTE_WRITE,
        };
        let access = if self.relaxed { access.relaxed() } else { access };
        let mut done = Vec::new();
        let began = std::time::Instant::now();
        if let Err(e) = self.pieces(domain, region, access, &mut done) {
            for piece in &done {
                self.regions.remove(&piece.local);
            }
            return Err(e.with("region", region));
        }
        let (nic, bytes, pieces) = (&self.about.name, region.bytes(), done.len());
        let took_ms = began.elapsed().as_millis() as u64;
        tracing::debug!(nic, bytes, pieces, took_ms, "memory is registered");
        metrics::histogram!("kvlane_verbs_registration_ms").record(took_ms as f64);
        Ok(done)
    }
    fn register_words(&mut self, domain: Domain, words: &Arc<Words>) -> Result<Registered> {
        self.alive()?;
        let range = Range::of_words(words);
        let region = self.domain_of(domain)?.register(range, Access::REMOTE_WRITE)?;
        Ok(self.keep(domain, region))
    }
    fn deregister(&mut self, local: Key) -> Result<()> {
        self.alive()?;
        self.regions.remove(&local);
        Ok(())
    }
    fn queue_pair(&mut self, domain: Domain, sends: u32, receives: u32) -> Result<Connected> {
        self.alive()?;
        let port = self.context.port_attributes(self.number)?;
        if port.state != PortState::Active {
            return Err(Error::new(ErrorKind::NoPath, "the NIC's port is down")
                .with("found", format!("{:?}", port.state))
                .hint(format!("plug it in, or set its link up; see {}", self.see())));
        }
        let gid = match &self.rail.gid {
            Some(gid) => self.gid_index(gid).map(|_| gid.raw)?,
            None => [0; 16],
        };
        let domain = self.domain_of(domain)?;
        let queue = CompletionQueue::new(&self.context, sends + receives, Some(&self.channel))?;
        let depths = PairDepths { sends, receives, inline_bytes: INLINE_BYTES };
        let pair = QueuePair::new(domain, &queue, &queue, depths)?;
        let (port_number, pkey_index) = (self.number, self.pkey_index);
        let access = Access::REMOTE_WRITE;
        pair.to_init(&ToInit { port: port_number, pkey_index, access })?;
        let end = End {
            number: pair.number(),
            sequence: (random() & 0xff_ffff) as u32,
            gid,
            lid: port.lid,
            mtu: port.active_mtu.map_or(1024, |mtu| mtu.bytes()) as u16,
        };
        Ok(Connected::new(pair, queue, end, sends, port.max_message_bytes))
    }
    fn connect(&mut self, pair: &mut Connected, peer: End) -> Result<()> {
        self.alive()?;
        let mtu = pair.mtu().min(peer.mtu.into());
        let path_mtu = Mtu::of_bytes(mtu).ok_or_else(|| {
            Error::new(ErrorKind::Malformed, "the peer's packet size is none").with("found", mtu)
        })?;
        let to = ToReceive {
            port: self.number,
            path_mtu,
            destination: peer.number,
            receive_psn: peer.sequence,
            destination_lid: peer.lid,
            service_level: self.rail.service_level.unwrap_or(0),
            global: self.route(&peer)?,
            min_rnr_timer: RNR_TIMER,
            max_destination_reads: 0,
        };
        pair.raw().to_receive(&to)?;
        pair.raw().to_send(&ToSend {
            send_psn: pair.sequence(),
            timeout: TIMEOUT,
            retries: RETRIES,
            rnr_retries: RNR_RETRIES,
            max_reads: 0,
        })
    }
    fn error(&mut self, pair: &mut Connected) -> Result<()> {
        self.alive()?;
        pair.raw().to_error()
    }
    fn try_destroy(&mut self, pair: Connected) -> Result<Option<Connected>> {
        if self.is_lost {
            mem::forget(pair);
            return Err(self.lost());
        }
        // The kernel waits until the NIC is done with it.
        drop(pair);
        Ok(None)
    }
    fn destroy(&mut self, pair: Connected) {
        // What a device that is gone still does, nobody knows.
        let _ = self.try_destroy(pair);
    }
    fn kick(&self) {}
    fn events(&self) -> [Option<RawFd>; 2] {
        [Some(self.channel.fd()), Some(self.context.async_fd())]
    }
    fn drain(&mut self) {
        for _ in 0..EVENTS_PER_LOOK {
            match self.channel.take_event() {
                Ok(true) => {}
                Ok(false) => break,
                Err(e) => return self.lose(&e.to_string()),
            }
        }
        for _ in 0..EVENTS_PER_LOOK {
            let event = match self.context.async_event() {
                Ok(Some(event)) => event,
                Ok(None) => break,
                Err(e) => return self.lose(&e.to_string()),
            };
            let nic = &self.about.name;
            match event {
                AsyncEvent::DeviceFatal => return self.lose("device fatal"),
                // Queue pairs find out by themselves, and new ones look.
                AsyncEvent::PortError { port } => {
                    tracing::warn!(nic, port, "a NIC's port is down");
                }
                AsyncEvent::PortActive { port } => tracing::info!(nic, port, "a NIC's port is up"),
                AsyncEvent::GidChange { port } => {
                    tracing::info!(nic, port, "a NIC's addresses have changed");
                }
                event => tracing::debug!(nic, ?event, "a NIC says"),
            }
        }
    }
}

impl Port {
    fn lose(&mut self, why: &str) {
        if !mem::replace(&mut self.is_lost, true) {
            tracing::error!(nic = self.about.name, why, "a NIC is lost");
        }
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        // What a device that is gone may still write is never unmapped.
        if self.is_lost {
            mem::take(&mut self.regions).into_values().for_each(mem::forget);
        }
    }
}
