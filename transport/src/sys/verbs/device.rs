//! Devices, ports and the addresses of ports.

use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::os::fd::RawFd;
use std::path::Path;
use std::ptr::NonNull;

use kvlane_proto::{Error, ErrorKind, Result};

use super::abi::{
    self, Zero, ibv_context, ibv_device, ibv_device_attr, ibv_gid_entry, ibv_port_attr,
};
use super::{Symbols, Verbs, check, errno, failed, set_nonblocking};

/// Most devices that are looked at, and most entries of all GID tables of a device.
const DEVICES_MAX: usize = 1024;
const GIDS_MAX: usize = 1 << 16;

const SYSFS: &str = "/sys/class/infiniband";

/// What a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Node {
    /// An InfiniBand or RoCE NIC.
    ChannelAdapter,
    /// An iWARP NIC.
    Rnic,
    /// By its number in the header.
    Other(i32),
}

/// What a device speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// InfiniBand, over whatever link: RoCE counts as well.
    InfiniBand,
    /// iWARP.
    Iwarp,
    /// By its number in the header.
    Other(i32),
}

/// A device that is there, opened or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Such as `mlx5_0`.
    pub name: String,
    /// Of its node.
    pub guid: u64,
    /// What it is.
    pub node: Node,
    /// What it speaks.
    pub transport: Transport,
    /// Its file below `/dev/infiniband`, such as `uverbs0`.
    pub file: String,
}

/// The devices that were there when it was made.
#[derive(Debug)]
pub struct DeviceList {
    verbs: Verbs,
    list: NonNull<*mut ibv_device>,
    devices: Vec<DeviceInfo>,
}

// SAFETY: the list is read only, and calls on its devices may come from any thread.
unsafe impl Send for DeviceList {}
// SAFETY: as above.
unsafe impl Sync for DeviceList {}

/// The text of an array of characters, or of its valid part.
fn text(chars: &[c_char]) -> String {
    let bytes: Vec<u8> = chars.iter().map(|&c| c as u8).take_while(|&b| b != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Verbs {
    /// The devices.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if the kernel has no RDMA; none at all is an empty list.
    pub fn devices(&self) -> Result<DeviceList> {
        let mut count: c_int = 0;
        // SAFETY: the count is borrowed for the call.
        let list = unsafe { (self.0.get_device_list)(&mut count) };
        let Some(list) = NonNull::new(list) else { return Err(no_kernel(errno())) };
        let mut all = DeviceList { verbs: self.clone(), list, devices: Vec::new() };
        let count = usize::try_from(count).unwrap_or(0).min(DEVICES_MAX);
        for i in 0..count {
            // SAFETY: the list has `count` devices, and lives.
            all.devices.push(unsafe { info(&self.0, *list.as_ptr().add(i)) });
        }
        Ok(all)
    }
    /// Opens a device by its exact name.
    ///
    /// # Errors
    /// As [`Verbs::devices`] and [`DeviceList::open`].
    pub fn open(&self, name: &str) -> Result<Context> {
        self.devices()?.open(name)
    }
}

/// # Safety
/// The device is of a list that lives.
unsafe fn info(symbols: &Symbols, device: *mut ibv_device) -> DeviceInfo {
    // SAFETY: the caller's promise; a name is a C string that lives as long as its device.
    unsafe {
        let name = (symbols.get_device_name)(device);
        let name = if name.is_null() {
            String::new()
        } else {
            CStr::from_ptr(name).to_string_lossy().into_owned()
        };
        DeviceInfo {
            name,
            guid: u64::from_be((symbols.get_device_guid)(device)),
            node: match (*device).node_type {
                abi::IBV_NODE_CA => Node::ChannelAdapter,
                abi::IBV_NODE_RNIC => Node::Rnic,
                other => Node::Other(other),
            },
            transport: match (*device).transport_type {
                abi::IBV_TRANSPORT_IB => Transport::InfiniBand,
                abi::IBV_TRANSPORT_IWARP => Transport::Iwarp,
                other => Transport::Other(other),
            },
            file: text(&(*device).dev_name),
        }
    }
}

fn no_kernel(errno: c_int) -> Error {
    let e = failed("ibv_get_device_list", "any", errno);
    Error::new(ErrorKind::Config, "the kernel has no RDMA verbs")
        .with("looked at", "/sys/class/infiniband_verbs")
        .caused_by(e)
        .hint("modprobe ib_uverbs and the NIC's driver (mlx5_ib), on the host of a container")
}

/// `in_kernel`: what the kernel knows, whoever may use it.
fn no_device(asked: &str, listed: &[DeviceInfo], in_kernel: &[String]) -> Error {
    let names: Vec<_> = listed.iter().map(|device| device.name.as_str()).collect();
    let e = Error::new(ErrorKind::NotFound, format!("there is no RDMA device {asked}"))
        .with("usable", if names.is_empty() { "none".into() } else { names.join(" ") });
    if in_kernel.iter().any(|name| name == asked) {
        return e.with("known to the kernel", in_kernel.join(" ")).hint(
            "its driver's user part is missing: apt-get install ibverbs-providers; in a container, \
             also pass --device=/dev/infiniband",
        );
    }
    match names.first() {
        Some(first) => e.hint(format!("give one of the usable devices, such as {first}")),
        None => e.hint("modprobe the NIC's driver (mlx5_ib), or use an engine without RDMA"),
    }
}

fn in_kernel(sysfs: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(sysfs).into_iter().flatten().flatten();
    let mut names: Vec<_> =
        entries.map(|e| e.file_name().to_string_lossy().into_owned()).take(DEVICES_MAX).collect();
    names.sort();
    names
}

fn not_opened(device: &DeviceInfo, errno: c_int) -> Error {
    let path = format!("/dev/infiniband/{}", device.file);
    let e = failed("ibv_open_device", &device.name, errno).with("file", &path);
    let refused = |message: String| {
        Error::new(ErrorKind::Config, message).with("device", &device.name).caused_by(e)
    };
    match errno {
        libc::EACCES | libc::EPERM => refused(format!("{path} may not be opened")).hint(format!(
            "let this user open it: chmod 666 {path}; in a container also --device={path}"
        )),
        libc::ENOENT | libc::ENODEV | libc::ENXIO => refused(format!("{path} is not there"))
            .hint("modprobe ib_uverbs; in a container pass --device=/dev/infiniband"),
        _ => refused(format!("{} cannot be opened", device.name)),
    }
}

impl DeviceList {
    /// What is there.
    pub fn devices(&self) -> &[DeviceInfo] {
        &self.devices
    }
    /// Opens a device by its exact name.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is none; [`ErrorKind::Config`] if it may not be opened.
    pub fn open(&self, name: &str) -> Result<Context> {
        let Some(at) = self.devices.iter().position(|device| device.name == name) else {
            return Err(no_device(name, &self.devices, &in_kernel(Path::new(SYSFS))));
        };
        let info = self.devices[at].clone();
        // SAFETY: `at` is a place in the list, which lives.
        let opened = unsafe { (self.verbs.0.open_device)(*self.list.as_ptr().add(at)) };
        let Some(raw) = NonNull::new(opened) else { return Err(not_opened(&info, errno())) };
        let context = Context { verbs: self.verbs.clone(), raw, info };
        set_nonblocking(context.async_fd()).map_err(|e| context.failed("fcntl", e))?;
        Ok(context)
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the list came from the library and is freed once; opened devices are kept by it.
        unsafe { (self.verbs.0.free_device_list)(self.list.as_ptr()) };
    }
}

/// How large packets may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)] // In bytes.
pub enum Mtu {
    B256 = abi::IBV_MTU_256 as isize,
    B512 = abi::IBV_MTU_512 as isize,
    B1024 = abi::IBV_MTU_1024 as isize,
    B2048 = abi::IBV_MTU_2048 as isize,
    B4096 = abi::IBV_MTU_4096 as isize,
}

impl Mtu {
    /// All, smallest first.
    pub const ALL: [Self; 5] = [Self::B256, Self::B512, Self::B1024, Self::B2048, Self::B4096];

    /// In bytes.
    pub fn bytes(self) -> u32 {
        128 << self as u32
    }
    /// By its length; there are only five.
    pub fn of_bytes(bytes: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|mtu| mtu.bytes() == bytes)
    }
    fn of(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|&mtu| mtu as u32 == number)
    }
}

/// What a port is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortState {
    /// No link.
    Down,
    /// A link that is not set up.
    Init,
    /// Set up, and not yet used.
    Armed,
    /// Usable.
    Active,
    /// By its number in the header.
    Other(u32),
}

/// What a port's packets travel in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkLayer {
    /// InfiniBand: addressed by LID.
    InfiniBand,
    /// Ethernet, so RoCE: addressed by GID.
    Ethernet,
    /// By its number in the header.
    Other(u8),
}

/// A port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAttributes {
    /// What it is doing.
    pub state: PortState,
    /// What its packets travel in.
    pub link_layer: LinkLayer,
    /// The largest it can, `None` if that is not one of the five.
    pub max_mtu: Option<Mtu>,
    /// The largest it may now.
    pub active_mtu: Option<Mtu>,
    /// Its address on InfiniBand; 0 on Ethernet.
    pub lid: u16,
    /// Places for GIDs, used or not.
    pub gid_table_len: u32,
    /// Places for partition keys.
    pub pkey_table_len: u16,
    /// The largest message.
    pub max_message_bytes: u32,
    /// Lanes, coded as in the header.
    pub active_width: u8,
    /// Speed of a lane, coded as in the header.
    pub active_speed: u8,
}

/// A device's limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceAttributes {
    /// Version of its firmware.
    pub firmware: String,
    /// Of its node.
    pub node_guid: u64,
    /// Whose it is, by PCI.
    pub vendor_id: u32,
    /// Which model.
    pub vendor_part_id: u32,
    /// Longest memory region.
    pub max_region_bytes: u64,
    /// Most memory regions.
    pub max_regions: u32,
    /// Most queue pairs.
    pub max_queue_pairs: u32,
    /// Most requests of a queue.
    pub max_depth: u32,
    /// Most completion queues.
    pub max_completion_queues: u32,
    /// Most entries of one.
    pub max_completions: u32,
    /// Ports; they are numbered from 1.
    pub ports: u8,
}

/// What a GID is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidType {
    /// InfiniBand.
    InfiniBand,
    /// RoCE in Ethernet frames: one broadcast domain.
    RoceV1,
    /// RoCE in UDP: routable.
    RoceV2,
    /// By its number in the header.
    Other(u32),
}

/// A used place of a port's GID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gid {
    /// Which place. It changes when addresses come and go: never keep it.
    pub index: u32,
    /// The GID; of RoCE, an IPv6 address or an IPv4 one mapped into it.
    pub gid: [u8; 16],
    /// What it is good for.
    pub kind: GidType,
    /// Of the network interface; `None` on InfiniBand.
    pub interface_index: Option<u32>,
}

/// An opened device.
pub struct Context {
    verbs: Verbs,
    raw: NonNull<ibv_context>,
    info: DeviceInfo,
}

// SAFETY: every call of libibverbs may come from any thread, says its manual.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Context").field(&self.info).finish()
    }
}

fn count(number: c_int) -> u32 {
    u32::try_from(number).unwrap_or(0)
}

impl Context {
    /// What was opened.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }
    /// The descriptor to poll for [`Context::async_event`].
    pub fn async_fd(&self) -> RawFd {
        // SAFETY: the context lives; the field never changes.
        unsafe { (*self.raw.as_ptr()).async_fd }
    }
    /// The device's limits.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn device_attributes(&self) -> Result<DeviceAttributes> {
        let mut a = ibv_device_attr::zero();
        // SAFETY: the context lives; the attributes are borrowed for the call.
        check(unsafe { (self.symbols().query_device)(self.raw(), &mut a) })
            .map_err(|e| self.failed("ibv_query_device", e))?;
        Ok(DeviceAttributes {
            firmware: text(&a.fw_ver),
            node_guid: u64::from_be(a.node_guid),
            vendor_id: a.vendor_id,
            vendor_part_id: a.vendor_part_id,
            max_region_bytes: a.max_mr_size,
            max_regions: count(a.max_mr),
            max_queue_pairs: count(a.max_qp),
            max_depth: count(a.max_qp_wr),
            max_completion_queues: count(a.max_cq),
            max_completions: count(a.max_cqe),
            ports: a.phys_port_cnt,
        })
    }
    /// A port, as it is now.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn port_attributes(&self, port: u8) -> Result<PortAttributes> {
        // Zeros first: the exported function leaves the last fields as they are.
        let mut a = ibv_port_attr::zero();
        // SAFETY: the context lives; the function writes a prefix of the attributes, which are
        // borrowed for the call.
        check(unsafe { (self.symbols().query_port)(self.raw(), port, &mut a) })
            .map_err(|e| self.failed("ibv_query_port", e).with("port", port))?;
        Ok(PortAttributes {
            state: match a.state {
                abi::IBV_PORT_DOWN => PortState::Down,
                abi::IBV_PORT_INIT => PortState::Init,
                abi::IBV_PORT_ARMED => PortState::Armed,
                abi::IBV_PORT_ACTIVE => PortState::Active,
                other => PortState::Other(other),
            },
            link_layer: match a.link_layer {
                abi::IBV_LINK_LAYER_INFINIBAND => LinkLayer::InfiniBand,
                abi::IBV_LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
                other => LinkLayer::Other(other),
            },
            max_mtu: Mtu::of(a.max_mtu),
            active_mtu: Mtu::of(a.active_mtu),
            lid: a.lid,
            gid_table_len: count(a.gid_tbl_len),
            pkey_table_len: a.pkey_tbl_len,
            max_message_bytes: a.max_msg_sz,
            active_width: a.active_width,
            active_speed: a.active_speed,
        })
    }
    /// The GIDs of a port, read anew.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn gids(&self, port: u8) -> Result<Vec<Gid>> {
        // One call gives those of all ports.
        let mut places = 0_usize;
        for port in 1..=self.device_attributes()?.ports {
            places += self.port_attributes(port)?.gid_table_len as usize;
        }
        let mut table = vec![ibv_gid_entry::zero(); places.min(GIDS_MAX)];
        // SAFETY: the context lives; the table has room for as many entries as is said, each as long
        // as is said.
        let rc = unsafe {
            let (to, len) = (table.as_mut_ptr(), table.len());
            (self.symbols().query_gid_table)(self.raw(), to, len, 0, size_of::<ibv_gid_entry>())
        };
        let found = usize::try_from(rc).map_err(|_| {
            let errno = c_int::try_from(rc).unwrap_or(0).saturating_abs();
            self.failed("ibv_query_gid_table", errno).with("port", port)
        })?;
        table.truncate(found);
        let ours = table.into_iter().filter(|entry| entry.port_num == u32::from(port));
        Ok(ours
            .map(|entry| Gid {
                index: entry.gid_index,
                gid: entry.gid.raw,
                kind: match entry.gid_type {
                    abi::IBV_GID_TYPE_IB => GidType::InfiniBand,
                    abi::IBV_GID_TYPE_ROCE_V1 => GidType::RoceV1,
                    abi::IBV_GID_TYPE_ROCE_V2 => GidType::RoceV2,
                    other => GidType::Other(other),
                },
                interface_index: (entry.ndev_ifindex != 0).then_some(entry.ndev_ifindex),
            })
            .collect())
    }
    pub(super) fn raw(&self) -> *mut ibv_context {
        self.raw.as_ptr()
    }
    pub(super) fn symbols(&self) -> &Symbols {
        &self.verbs.0
    }
    /// A call on this device that failed.
    pub(super) fn failed(&self, call: &'static str, errno: c_int) -> Error {
        failed(call, &self.info.name, errno)
    }
    /// What a call gave, or why it gave nothing.
    pub(super) fn made<T>(&self, call: &'static str, what: *mut T) -> Result<NonNull<T>> {
        NonNull::new(what).ok_or_else(|| self.failed(call, errno()))
    }
    /// The end of an object. What cannot be ended stays, and is said.
    pub(super) fn ended(&self, call: &'static str, rc: c_int) -> bool {
        let result = check(rc);
        if let Err(errno) = result {
            tracing::warn!(error = %self.failed(call, errno), "an RDMA object cannot be freed");
        }
        result.is_ok()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: everything that hangs on it keeps it alive, so nothing is left; closed once.
        let rc = unsafe { (self.symbols().close_device)(self.raw()) };
        self.ended("ibv_close_device", rc);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(name: &str) -> DeviceInfo {
        DeviceInfo {
            name: name.into(),
            guid: 1,
            node: Node::ChannelAdapter,
            transport: Transport::InfiniBand,
            file: "uverbs3".into(),
        }
    }

    #[test]
    fn a_device_that_is_not_there_is_refused_with_those_that_are() {
        let e = no_device("mlx5_7", &[info("mlx5_0"), info("mlx5_1")], &[]);
        assert_eq!(e.kind(), ErrorKind::NotFound);
        assert_eq!(
            e.to_string(),
            "not_found: there is no RDMA device mlx5_7 (usable=mlx5_0 mlx5_1); \
             fix: give one of the usable devices, such as mlx5_0"
        );
        let e = no_device("mlx5_7", &[], &[]).to_string();
        assert!(e.contains("usable=none") && e.contains("modprobe"), "{e}");
        let e = no_device("mlx5_7", &[], &["mlx5_7".into()]).to_string();
        assert!(e.contains("kernel=mlx5_7") && e.contains("ibverbs-providers"), "{e}");
    }

    #[test]
    fn a_device_that_cannot_be_opened_names_its_file_and_the_fix() {
        let e = not_opened(&info("mlx5_0"), libc::EACCES);
        assert_eq!(e.kind(), ErrorKind::Config);
        let e = e.to_string();
        assert!(e.contains("/dev/infiniband/uverbs3 may not be opened"), "{e}");
        assert!(e.contains("device=mlx5_0") && e.contains("chmod 666"), "{e}");
        assert!(e.contains("Permission denied"), "{e}");
        let e = not_opened(&info("mlx5_0"), libc::ENOENT).to_string();
        assert!(e.contains("is not there") && e.contains("--device=/dev/infiniband"), "{e}");
        let e = not_opened(&info("mlx5_0"), libc::ENOMEM).to_string();
        assert!(e.contains("mlx5_0 cannot be opened") && e.contains("Cannot allocate"), "{e}");
    }

    #[test]
    fn a_kernel_without_verbs_is_refused_with_the_fix() {
        let e = no_kernel(libc::ENOSYS);
        assert_eq!(e.kind(), ErrorKind::Config);
        let e = e.to_string();
        assert!(e.contains("Function not implemented") && e.contains("modprobe ib_uverbs"), "{e}");
    }

    #[test]
    fn there_are_five_mtus() {
        assert_eq!(Mtu::ALL.map(Mtu::bytes), [256, 512, 1024, 2048, 4096]);
        assert_eq!(Mtu::ALL.map(|mtu| Mtu::of_bytes(mtu.bytes())), Mtu::ALL.map(Some));
        assert_eq!((Mtu::of_bytes(1500), Mtu::of(0), Mtu::of(6)), (None, None, None));
        assert_eq!(Mtu::of(5), Some(Mtu::B4096));
    }
}
