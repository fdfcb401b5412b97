//! A provider of RDMA verbs inside this process, for tests: what soft-RoCE cannot do, or not on demand.
//!
//! Owns: devices that a test makes ([`Device`]), and everything that is made on them. In: calls of the
//! functions behind [`Verbs`], and knobs. Out: bytes in memory of this process, completions, events, and
//! the errors that were asked for. Invariants: a write is carried out only between queue pairs that are
//! connected with each other, inside regions of their domains, in the order of its queue pair; after a
//! queue pair went to error nothing lands through it, and what is posted to it is flushed, a receive that
//! came after the error only when it is taken to error again, as soft-RoCE does it.
//!
//! All of it is behind one lock: it is right, not fast.
#![allow(unsafe_code)] // C functions.

use std::collections::{HashMap, VecDeque};
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::sys::verbs::abi::{
    self, Zero, ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device,
    ibv_device_attr, ibv_gid, ibv_gid_entry, ibv_mr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr,
    ibv_qp_init_attr, ibv_recv_wr, ibv_send_wr, ibv_wc,
};
use crate::sys::verbs::{Symbols, Verbs};

/// The vendor's own code of every fault here.
pub const VENDOR: u32 = 0x5a;
/// Most bytes of one write.
const MESSAGE_BYTES_MAX: u32 = 1 << 23;
const PORT: u8 = 1;

/// What a test asks of a device, now or later.
#[derive(Clone, Debug)]
pub struct Knobs {
    /// Longest region.
    pub max_region_bytes: u64,
    /// Longest ring.
    pub max_depth: i32,
    /// After so many more, registrations fail for want of memory.
    pub registrations_left: Option<u32>,
    /// The port.
    pub is_active: bool,
    /// The port's table: where each GID stands, whether RoCE v2, and its interface's number.
    pub gids: Vec<(u32, [u8; 16], bool, u32)>,
    /// Writes wait until this is taken back; then those land whose queue pairs are still connected.
    pub holds: bool,
    /// So many completions of sends are lost.
    pub loses: u32,
    /// Completions take so long.
    pub delay: Duration,
    /// After so many more, posts are refused for want of memory.
    pub posts_left: Option<u32>,
    /// dma-bufs can be registered.
    pub has_dmabuf: bool,
    /// Posts are counted, and nothing else.
    pub counts_only: bool,
}

impl Default for Knobs {
    fn default() -> Self {
        Self {
            max_region_bytes: 1 << 40,
            max_depth: 1 << 14,
            registrations_left: None,
            is_active: true,
            gids: Vec::new(),
            holds: false,
            loses: 0,
            delay: Duration::ZERO,
            posts_left: None,
            has_dmabuf: false,
            counts_only: false,
        }
    }
}

struct DeviceState {
    name: CString,
    raw: usize,
    knobs: Knobs,
    /// What it says, and a descriptor that is readable meanwhile.
    events: VecDeque<ibv_async_event>,
    fd: c_int,
    regions: u32,
    queue_pairs: u32,
}

struct Region {
    device: usize,
    domain: usize,
    address: u64,
    bytes: u64,
    can_write: bool,
}

struct Queue {
    device: usize,
    found: VecDeque<(Instant, ibv_wc)>,
    is_armed: bool,
    channel: usize,
}

struct Pair {
    device: usize,
    domain: usize,
    sends: usize,
    receives_to: usize,
    state: c_uint,
    peer: u32,
    receives: VecDeque<u64>,
}

/// A write that was posted, as it is carried out.
struct Write {
    from: u32,
    wr_id: u64,
    signalled: bool,
    bytes: Vec<u8>,
    address: u64,
    key: u32,
    immediate: Option<u32>,
}

#[derive(Default)]
struct World {
    devices: Vec<DeviceState>,
    regions: HashMap<u32, Region>,
    queues: HashMap<usize, Queue>,
    /// Queues with an event, by channel.
    channels: HashMap<usize, VecDeque<usize>>,
    pairs: HashMap<u32, Pair>,
    held: VecDeque<Write>,
}

// SAFETY: the addresses in events are numbers here.
unsafe impl Send for World {}

static WORLD: Mutex<Option<World>> = Mutex::new(None);
static NUMBERS: AtomicU32 = AtomicU32::new(1);
/// Writes that were posted to devices that only count.
static COUNTED: AtomicU64 = AtomicU64::new(0);

fn world<T>(with: impl FnOnce(&mut World) -> T) -> T {
    let mut world: MutexGuard<'_, Option<World>> =
        WORLD.lock().unwrap_or_else(PoisonError::into_inner);
    with(world.get_or_insert_with(World::default))
}
fn number() -> u32 {
    NUMBERS.fetch_add(1, Ordering::Relaxed) & 0xff_ffff
}
fn fail(errno: c_int) {
    // SAFETY: the thread's own.
    unsafe { *libc::__errno_location() = errno };
}
fn failed<T>(errno: c_int) -> *mut T {
    fail(errno);
    std::ptr::null_mut()
}
fn new_fd() -> c_int {
    // SAFETY: no pointer is involved.
    unsafe { libc::eventfd(0, libc::EFD_SEMAPHORE | libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }
}
fn raise(fd: c_int) {
    let one = 1u64;
    // SAFETY: eight bytes that live beyond the call.
    unsafe { libc::write(fd, std::ptr::from_ref(&one).cast(), 8) };
}
/// Takes one from a descriptor; no if there is none.
fn lower(fd: c_int) -> bool {
    let mut one = 0u64;
    // SAFETY: as above.
    unsafe { libc::read(fd, std::ptr::from_mut(&mut one).cast(), 8) == 8 }
}

/// A device, to whoever made it. It stays until the process ends.
#[derive(Clone, Copy, Debug)]
pub struct Device(usize);

impl Device {
    /// Makes one, of a name that no other has.
    pub fn new(name: &str, knobs: Knobs) -> Self {
        let mut raw = ibv_device::zero();
        (raw.node_type, raw.transport_type) = (abi::IBV_NODE_CA, abi::IBV_TRANSPORT_IB);
        let raw = Box::into_raw(Box::new(raw)) as usize;
        let name = CString::new(name).unwrap_or_default();
        world(|world| {
            let (events, fd) = (VecDeque::new(), new_fd());
            let (regions, queue_pairs) = (0, 0);
            let device = DeviceState { name, raw, knobs, events, fd, regions, queue_pairs };
            world.devices.push(device);
            Self(world.devices.len() - 1)
        })
    }
    /// The functions.
    pub fn verbs() -> Verbs {
        // SAFETY: each is below, and does what its manual page says, as far as is said above.
        unsafe { Verbs::with_symbols(symbols()) }
    }
    /// Turns knobs.
    pub fn set<T>(self, change: impl FnOnce(&mut Knobs) -> T) -> T {
        world(|world| {
            let was = world.devices[self.0].knobs.holds;
            let result = change(&mut world.devices[self.0].knobs);
            if was && !world.devices[self.0].knobs.holds {
                world.release();
            }
            result
        })
    }
    /// It says that it is gone.
    pub fn fatal(self) {
        self.says(abi::IBV_EVENT_DEVICE_FATAL);
    }
    /// Unplugs the port, or plugs it in.
    pub fn plug(self, is_active: bool) {
        self.set(|knobs| knobs.is_active = is_active);
        self.says(if is_active { abi::IBV_EVENT_PORT_ACTIVE } else { abi::IBV_EVENT_PORT_ERR });
    }
    fn says(self, event_type: c_uint) {
        world(|world| {
            let device = &mut world.devices[self.0];
            let element = usize::from(PORT) as *mut c_void;
            device.events.push_back(ibv_async_event { element, event_type });
            raise(device.fd);
        });
    }
    /// Regions and queue pairs that there are on it.
    pub fn holds(self) -> (u32, u32) {
        world(|world| (world.devices[self.0].regions, world.devices[self.0].queue_pairs))
    }
    /// Writes that wait.
    pub fn held() -> usize {
        world(|world| world.held.len())
    }
    /// Writes that were posted to devices that only count.
    pub fn counted() -> u64 {
        COUNTED.load(Ordering::Relaxed)
    }
}

impl World {
    fn device_of(&self, context: *mut ibv_context) -> usize {
        // SAFETY: contexts are made here, with the device that they are of.
        let raw = unsafe { (*context).device } as usize;
        self.devices.iter().position(|device| device.raw == raw).unwrap_or(0)
    }
    fn complete(&mut self, queue: usize, wc: ibv_wc) {
        let Some(found) = self.queues.get_mut(&queue) else { return };
        let delay = self.devices[found.device].knobs.delay;
        found.found.push_back((Instant::now() + delay, wc));
        if std::mem::take(&mut found.is_armed) && found.channel != 0 {
            // SAFETY: a channel outlives its queues.
            let fd = unsafe { (*(found.channel as *mut ibv_comp_channel)).fd };
            self.channels.entry(found.channel).or_default().push_back(queue);
            raise(fd);
        }
    }
    fn fault(&mut self, queue: usize, number: u32, wr_id: u64, status: c_uint) {
        let mut wc = ibv_wc::zero();
        (wc.wr_id, wc.status, wc.vendor_err, wc.qp_num) = (wr_id, status, VENDOR, number);
        self.complete(queue, wc);
    }
    /// To error; what is posted is flushed.
    fn break_pair(&mut self, number: u32) {
        let Some(pair) = self.pairs.get_mut(&number) else { return };
        pair.state = abi::IBV_QPS_ERR;
        let (receives, to) = (std::mem::take(&mut pair.receives), pair.receives_to);
        let sends = pair.sends;
        for wr_id in receives {
            self.fault(to, number, wr_id, abi::IBV_WC_WR_FLUSH_ERR);
        }
        let (flushed, rest) =
            std::mem::take(&mut self.held).into_iter().partition(|w| w.from == number);
        self.held = rest;
        let flushed: VecDeque<Write> = flushed;
        for write in flushed {
            self.fault(sends, number, write.wr_id, abi::IBV_WC_WR_FLUSH_ERR);
        }
    }
    /// Carries a write out, or says why not.
    fn land(&mut self, write: &Write) -> Result<(), c_uint> {
        let from = &self.pairs[&write.from];
        let peer = self.pairs.get(&from.peer).filter(|peer| {
            let listens = [abi::IBV_QPS_RTR, abi::IBV_QPS_RTS].contains(&peer.state);
            let wire = [from.device, peer.device];
            listens
                && peer.peer == write.from
                && wire.iter().all(|&device| self.devices[device].knobs.is_active)
        });
        let Some(peer) = peer else { return Err(abi::IBV_WC_RETRY_EXC_ERR) };
        let bytes = write.bytes.len() as u64;
        let opens = |region: &Region| {
            region.domain == peer.domain
                && region.can_write
                && write.address >= region.address
                && write.address - region.address <= region.bytes
                && bytes <= region.bytes - (write.address - region.address)
        };
        let number = from.peer;
        if bytes > 0 && !self.regions.get(&write.key).is_some_and(opens) {
            self.break_pair(number);
            return Err(abi::IBV_WC_REM_ACCESS_ERR);
        }
        if write.immediate.is_some() && peer.receives.is_empty() {
            return Err(abi::IBV_WC_RNR_RETRY_EXC_ERR);
        }
        for (nth, byte) in write.bytes.iter().enumerate() {
            // SAFETY: the range is registered, so that its owner keeps it mapped, and nobody has a
            // reference into it; volatile, as others may look at it meanwhile.
            unsafe { ((write.address + nth as u64) as *mut u8).write_volatile(*byte) };
        }
        if let Some(immediate) = write.immediate
            && let Some(peer) = self.pairs.get_mut(&number)
            && let Some(wr_id) = peer.receives.pop_front()
        {
            let to = peer.receives_to;
            let mut wc = ibv_wc::zero();
            (wc.wr_id, wc.opcode, wc.qp_num) = (wr_id, abi::IBV_WC_RECV_RDMA_WITH_IMM, number);
            (wc.wc_flags, wc.byte_len) = (abi::IBV_WC_WITH_IMM, write.bytes.len() as u32);
            wc.imm_data = immediate;
            self.complete(to, wc);
        }
        Ok(())
    }
    fn carry_out(&mut self, write: &Write) {
        let Some(pair) = self.pairs.get(&write.from) else { return };
        let (sends, device, state) = (pair.sends, pair.device, pair.state);
        if state == abi::IBV_QPS_ERR {
            return self.fault(sends, write.from, write.wr_id, abi::IBV_WC_WR_FLUSH_ERR);
        }
        match self.land(write) {
            Ok(()) if write.signalled => {
                let loses = &mut self.devices[device].knobs.loses;
                if *loses > 0 {
                    *loses -= 1;
                    return;
                }
                let mut wc = ibv_wc::zero();
                (wc.wr_id, wc.qp_num, wc.opcode) =
                    (write.wr_id, write.from, abi::IBV_WC_RDMA_WRITE);
                self.complete(sends, wc);
            }
            Ok(()) => {}
            Err(status) => {
                self.fault(sends, write.from, write.wr_id, status);
                self.break_pair(write.from);
            }
        }
    }
    fn release(&mut self) {
        let held = std::mem::take(&mut self.held);
        for write in held {
            let device = self.pairs.get(&write.from).map(|pair| pair.device);
            if device.is_some_and(|device| self.devices[device].knobs.holds) {
                self.held.push_back(write);
            } else {
                self.carry_out(&write);
            }
        }
    }
}

extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let devices: Vec<_> = world(|w| w.devices.iter().map(|d| d.raw as *mut ibv_device).collect());
    // SAFETY: the caller gives a place for the count.
    unsafe { *count = devices.len() as c_int };
    Box::into_raw(devices.into_boxed_slice()).cast()
}
extern "C" fn free_device_list(_: *mut *mut ibv_device) {
    // A few bytes of a test.
}
extern "C" fn get_device_name(device: *mut ibv_device) -> *const c_char {
    world(|w| {
        let named = w.devices.iter().find(|d| d.raw == device as usize);
        // Devices are never taken away, nor their names.
        named.map_or(std::ptr::null(), |d| d.name.as_ptr())
    })
}
extern "C" fn get_device_guid(device: *mut ibv_device) -> u64 {
    (device as u64).to_be()
}
extern "C" fn open_device(device: *mut ibv_device) -> *mut ibv_context {
    let mut context = ibv_context::zero();
    context.device = device;
    context.ops.post_send = Some(post_send);
    context.ops.post_recv = Some(post_recv);
    context.ops.poll_cq = Some(poll_cq);
    context.ops.req_notify_cq = Some(req_notify_cq);
    world(|w| {
        let Some(known) = w.devices.iter().find(|d| d.raw == device as usize) else {
            return failed(libc::ENODEV);
        };
        context.async_fd = known.fd;
        if known.knobs.counts_only {
            context.ops.post_send = Some(count_send);
        }
        Box::into_raw(Box::new(context))
    })
}
extern "C" fn close_device(context: *mut ibv_context) -> c_int {
    // SAFETY: made by `open_device`, closed once.
    drop(unsafe { Box::from_raw(context) });
    0
}
extern "C" fn get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    world(|w| {
        let device = w.device_of(context);
        let device = &mut w.devices[device];
        match device.events.pop_front().filter(|_| lower(device.fd)) {
            Some(said) => {
                // SAFETY: the caller gives a place for it.
                unsafe { *event = said };
                0
            }
            None => {
                fail(libc::EAGAIN);
                -1
            }
        }
    })
}
extern "C" fn ack_async_event(_: *mut ibv_async_event) {}
extern "C" fn query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    world(|w| {
        let device = &w.devices[w.device_of(context)];
        let mut a = ibv_device_attr::zero();
        (a.max_mr_size, a.max_qp_wr) = (device.knobs.max_region_bytes, device.knobs.max_depth);
        (a.max_mr, a.max_qp, a.max_cq, a.max_cqe) = (1 << 16, 1 << 16, 1 << 16, 1 << 20);
        a.phys_port_cnt = PORT;
        a.node_guid = (device.raw as u64).to_be();
        // SAFETY: the caller gives a place for it.
        unsafe { *attr = a };
        0
    })
}
extern "C" fn query_port(context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> c_int {
    if port != PORT {
        return libc::EINVAL;
    }
    world(|w| {
        let knobs = &w.devices[w.device_of(context)].knobs;
        let mut a = ibv_port_attr::zero();
        a.state = if knobs.is_active { abi::IBV_PORT_ACTIVE } else { abi::IBV_PORT_DOWN };
        (a.max_mtu, a.active_mtu) = (abi::IBV_MTU_4096, abi::IBV_MTU_4096);
        (a.gid_tbl_len, a.pkey_tbl_len, a.max_msg_sz) = (16, 1, MESSAGE_BYTES_MAX);
        a.link_layer = abi::IBV_LINK_LAYER_ETHERNET;
        // SAFETY: the caller gives a place for it.
        unsafe { *attr = a };
        0
    })
}
extern "C" fn query_gid_table(
    context: *mut ibv_context,
    to: *mut ibv_gid_entry,
    len: usize,
    _: u32,
    _: usize,
) -> isize {
    world(|w| {
        let gids = &w.devices[w.device_of(context)].knobs.gids;
        for (nth, (gid_index, raw, is_v2, ndev_ifindex)) in gids.iter().take(len).enumerate() {
            let gid_type =
                if *is_v2 { abi::IBV_GID_TYPE_ROCE_V2 } else { abi::IBV_GID_TYPE_ROCE_V1 };
            let (gid, port_num) = (ibv_gid { raw: *raw }, PORT.into());
            let (gid_index, ndev_ifindex) = (*gid_index, *ndev_ifindex);
            // SAFETY: the table has room for `len`.
            unsafe {
                *to.add(nth) = ibv_gid_entry { gid, gid_index, port_num, gid_type, ndev_ifindex };
            }
        }
        gids.len().min(len) as isize
    })
}
extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    Box::into_raw(Box::new(ibv_pd { context, handle: number() }))
}
extern "C" fn dealloc_pd(domain: *mut ibv_pd) -> c_int {
    let used = world(|w| {
        w.regions.values().any(|r| r.domain == domain as usize)
            || w.pairs.values().any(|p| p.domain == domain as usize)
    });
    if used {
        return libc::EBUSY;
    }
    // SAFETY: made by `alloc_pd`, freed once.
    drop(unsafe { Box::from_raw(domain) });
    0
}
fn register(domain: *mut ibv_pd, address: u64, length: usize, access: c_uint) -> *mut ibv_mr {
    // SAFETY: a domain that lives.
    let context = unsafe { (*domain).context };
    world(|w| {
        let at = w.device_of(context);
        let device = &mut w.devices[at];
        if length as u64 > device.knobs.max_region_bytes {
            return failed(libc::EINVAL);
        }
        match &mut device.knobs.registrations_left {
            Some(0) => return failed(libc::ENOMEM),
            Some(left) => *left -= 1,
            None => {}
        }
        device.regions += 1;
        let key = number() << 8 | 0x11;
        let can_write = access & abi::IBV_ACCESS_REMOTE_WRITE != 0;
        let (domain_at, bytes) = (domain as usize, length as u64);
        let region = Region { device: at, domain: domain_at, address, bytes, can_write };
        w.regions.insert(key, region);
        let mut mr = ibv_mr::zero();
        (mr.context, mr.pd, mr.length) = (context, domain, length);
        (mr.lkey, mr.rkey, mr.handle) = (key, key, key);
        Box::into_raw(Box::new(mr))
    })
}
extern "C" fn reg_mr(
    domain: *mut ibv_pd,
    at: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    register(domain, at as u64, length, access as c_uint)
}
extern "C" fn reg_mr_iova2(
    domain: *mut ibv_pd,
    _: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    register(domain, iova, length, access)
}
extern "C" fn reg_dmabuf_mr(
    domain: *mut ibv_pd,
    _: u64,
    length: usize,
    iova: u64,
    _: c_int,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: a domain that lives.
    let context = unsafe { (*domain).context };
    if !world(|w| w.devices[w.device_of(context)].knobs.has_dmabuf) {
        return failed(libc::EOPNOTSUPP);
    }
    register(domain, iova, length, access as c_uint)
}
extern "C" fn dereg_mr(region: *mut ibv_mr) -> c_int {
    // SAFETY: made by `register`, given back once.
    let region = unsafe { Box::from_raw(region) };
    world(|w| {
        if let Some(gone) = w.regions.remove(&region.lkey) {
            w.devices[gone.device].regions -= 1;
        }
    });
    0
}
extern "C" fn create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    Box::into_raw(Box::new(ibv_comp_channel { context, fd: new_fd(), refcnt: 0 }))
}
extern "C" fn destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    world(|w| w.channels.remove(&(channel as usize)));
    // SAFETY: made above, destroyed once; its descriptor is its own.
    unsafe {
        libc::close((*channel).fd);
        drop(Box::from_raw(channel));
    }
    0
}
extern "C" fn create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    _: *mut c_void,
    channel: *mut ibv_comp_channel,
    _: c_int,
) -> *mut ibv_cq {
    let mut queue = ibv_cq::zero();
    (queue.context, queue.channel, queue.cqe) = (context, channel, cqe);
    let queue = Box::into_raw(Box::new(queue));
    world(|w| {
        let (device, channel) = (w.device_of(context), channel as usize);
        let found = VecDeque::new();
        w.queues.insert(queue as usize, Queue { device, found, is_armed: false, channel });
    });
    queue
}
extern "C" fn destroy_cq(queue: *mut ibv_cq) -> c_int {
    world(|w| {
        w.queues.remove(&(queue as usize));
        w.channels.values_mut().for_each(|waits| waits.retain(|q| *q != queue as usize));
    });
    // SAFETY: made above, destroyed once.
    drop(unsafe { Box::from_raw(queue) });
    0
}
extern "C" fn get_cq_event(
    channel: *mut ibv_comp_channel,
    queue: *mut *mut ibv_cq,
    context: *mut *mut c_void,
) -> c_int {
    // SAFETY: a channel that lives.
    let fd = unsafe { (*channel).fd };
    if !lower(fd) {
        fail(libc::EAGAIN);
        return -1;
    }
    let next = world(|w| w.channels.entry(channel as usize).or_default().pop_front());
    let Some(next) = next else {
        // Its queue is gone.
        fail(libc::EAGAIN);
        return -1;
    };
    // SAFETY: the caller gives places for both.
    unsafe { (*queue, *context) = (next as *mut ibv_cq, std::ptr::null_mut()) };
    0
}
extern "C" fn ack_cq_events(_: *mut ibv_cq, _: c_uint) {}
unsafe extern "C" fn poll_cq(queue: *mut ibv_cq, room: c_int, to: *mut ibv_wc) -> c_int {
    world(|w| {
        let Some(queue) = w.queues.get_mut(&(queue as usize)) else { return -1 };
        let (now, mut n) = (Instant::now(), 0);
        while n < room && queue.found.front().is_some_and(|(from, _)| *from <= now) {
            let Some((_, wc)) = queue.found.pop_front() else { break };
            // SAFETY: there is room for as many.
            unsafe { *to.add(n as usize) = wc };
            n += 1;
        }
        n
    })
}
unsafe extern "C" fn req_notify_cq(queue: *mut ibv_cq, _: c_int) -> c_int {
    world(|w| {
        if let Some(queue) = w.queues.get_mut(&(queue as usize)) {
            queue.is_armed = true;
        }
    });
    0
}
extern "C" fn create_qp(domain: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: a domain that lives, attributes that the caller lends.
    let (context, attr) = unsafe { ((*domain).context, &*attr) };
    world(|w| {
        let device = w.device_of(context);
        let most = w.devices[device].knobs.max_depth as u32;
        if attr.cap.max_send_wr > most || attr.cap.max_recv_wr > most {
            return failed(libc::EINVAL);
        }
        let mut qp = ibv_qp::zero();
        (qp.context, qp.pd, qp.qp_num) = (context, domain, number());
        w.devices[device].queue_pairs += 1;
        let pair = Pair {
            device,
            domain: domain as usize,
            sends: attr.send_cq as usize,
            receives_to: attr.recv_cq as usize,
            state: abi::IBV_QPS_RESET,
            peer: 0,
            receives: VecDeque::new(),
        };
        w.pairs.insert(qp.qp_num, pair);
        Box::into_raw(Box::new(qp))
    })
}
extern "C" fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, _: c_int) -> c_int {
    // SAFETY: a pair that lives, attributes that the caller lends.
    let (number, attr) = unsafe { ((*qp).qp_num, &*attr) };
    world(|w| {
        let Some(pair) = w.pairs.get_mut(&number) else { return libc::EINVAL };
        let next = match attr.qp_state {
            abi::IBV_QPS_ERR => {
                w.break_pair(number);
                return 0;
            }
            abi::IBV_QPS_INIT => abi::IBV_QPS_RESET,
            abi::IBV_QPS_RTR => abi::IBV_QPS_INIT,
            abi::IBV_QPS_RTS => abi::IBV_QPS_RTR,
            _ => return libc::EINVAL,
        };
        if pair.state != next {
            return libc::EINVAL;
        }
        if attr.qp_state == abi::IBV_QPS_RTR {
            let index = u32::from(attr.ah_attr.grh.sgid_index);
            let gids = &w.devices[pair.device].knobs.gids;
            if !gids.iter().any(|(at, ..)| *at == index) {
                return libc::ENODATA;
            }
            pair.peer = attr.dest_qp_num;
        }
        pair.state = attr.qp_state;
        0
    })
}
extern "C" fn query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _: c_int,
    _: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: a pair that lives, a place that the caller gives.
    unsafe {
        let number = (*qp).qp_num;
        (*attr).qp_state = world(|w| w.pairs.get(&number).map_or(0, |pair| pair.state));
    }
    0
}
extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: made above, destroyed once.
    let qp = unsafe { Box::from_raw(qp) };
    world(|w| {
        w.held.retain(|write| write.from != qp.qp_num);
        if let Some(pair) = w.pairs.remove(&qp.qp_num) {
            w.devices[pair.device].queue_pairs -= 1;
        }
    });
    0
}
unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    mut wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: a pair that lives.
    let number = unsafe { (*qp).qp_num };
    world(|w| {
        while !wr.is_null() {
            // SAFETY: a chain of requests that the caller lends.
            let request = unsafe { &*wr };
            let Some(pair) = w.pairs.get(&number) else { return libc::EINVAL };
            let (device, domain, sends) = (pair.device, pair.domain, pair.sends);
            let refused = match &mut w.devices[device].knobs.posts_left {
                Some(0) => true,
                Some(left) => {
                    *left -= 1;
                    false
                }
                None => false,
            };
            if refused || pair.state == abi::IBV_QPS_RESET {
                // SAFETY: the caller gives a place for it.
                unsafe { *bad = wr };
                return libc::ENOMEM;
            }
            wr = request.next;
            // SAFETY: the segment is the request's.
            let segment = (request.num_sge > 0).then(|| unsafe { *request.sg_list });
            let segment = segment.unwrap_or(abi::ibv_sge { addr: 0, length: 0, lkey: 0 });
            let (at, bytes) = (segment.addr, u64::from(segment.length));
            let is_inline = request.send_flags & abi::IBV_SEND_INLINE != 0;
            let has = |region: &Region| {
                region.domain == domain
                    && at >= region.address
                    && at - region.address <= region.bytes
                    && bytes <= region.bytes - (at - region.address)
            };
            if pair.state != abi::IBV_QPS_ERR
                && bytes > 0
                && !is_inline
                && !w.regions.get(&segment.lkey).is_some_and(has)
            {
                w.fault(sends, number, request.wr_id, abi::IBV_WC_LOC_PROT_ERR);
                w.break_pair(number);
                continue;
            }
            // SAFETY: the range is inline, so the caller's, or registered; volatile, as others may
            // write it meanwhile.
            let byte = |nth: u64| unsafe { ((at + nth) as *const u8).read_volatile() };
            let is_over = pair.state == abi::IBV_QPS_ERR;
            let write = Write {
                from: number,
                wr_id: request.wr_id,
                signalled: request.send_flags & abi::IBV_SEND_SIGNALED != 0,
                bytes: if is_over { Vec::new() } else { (0..bytes).map(byte).collect() },
                address: request.rdma.remote_addr,
                key: request.rdma.rkey,
                immediate: (request.opcode == abi::IBV_WR_RDMA_WRITE_WITH_IMM)
                    .then_some(request.imm_data),
            };
            if w.devices[device].knobs.holds && !is_over {
                w.held.push_back(write);
            } else {
                w.carry_out(&write);
            }
        }
        0
    })
}
unsafe extern "C" fn count_send(
    _: *mut ibv_qp,
    mut wr: *mut ibv_send_wr,
    _: *mut *mut ibv_send_wr,
) -> c_int {
    let mut posted = 0;
    while !wr.is_null() {
        posted += 1;
        // SAFETY: a chain of requests that the caller lends.
        wr = unsafe { (*wr).next };
    }
    COUNTED.fetch_add(posted, Ordering::Relaxed);
    0
}
unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    mut wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: a pair that lives.
    let number = unsafe { (*qp).qp_num };
    world(|w| {
        let Some(pair) = w.pairs.get_mut(&number).filter(|p| p.state != abi::IBV_QPS_RESET) else {
            // SAFETY: the caller gives a place for it.
            unsafe { *bad = wr };
            return libc::EINVAL;
        };
        while !wr.is_null() {
            // SAFETY: a chain of requests that the caller lends.
            let request = unsafe { &*wr };
            pair.receives.push_back(request.wr_id);
            wr = request.next;
        }
        0
    })
}

fn symbols() -> Symbols {
    Symbols {
        get_device_list,
        free_device_list,
        get_device_name,
        get_device_guid,
        open_device,
        close_device,
        get_async_event,
        ack_async_event,
        query_device,
        query_port,
        query_gid_table,
        alloc_pd,
        dealloc_pd,
        reg_mr,
        dereg_mr,
        create_comp_channel,
        destroy_comp_channel,
        create_cq,
        destroy_cq,
        get_cq_event,
        ack_cq_events,
        create_qp,
        modify_qp,
        query_qp,
        destroy_qp,
        reg_mr_iova2: Some(reg_mr_iova2),
        reg_dmabuf_mr: Some(reg_dmabuf_mr),
    }
}
