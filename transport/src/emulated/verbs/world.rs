//! What there is behind the functions: devices, what was made on them, and the wire between them.
//!
//! In: requests, changes of state, looks at completion queues, by which the time goes on. Out: bytes,
//! completions, events. Invariants: those of the module above; besides, rings and completion queues hold
//! no more than they were made for: who posts more is refused, who polls too little loses the queue.
#![allow(unsafe_code)] // Memory of whoever posted.

use std::collections::{HashMap, VecDeque};
use std::ffi::{CString, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Knobs, VENDOR};
use crate::sys::verbs::abi::{
    self, Zero, ibv_async_event, ibv_comp_channel, ibv_context, ibv_qp_attr, ibv_send_wr, ibv_sge,
    ibv_wc,
};

/// How much later than the end of its queue pair a write lands that nobody waited for.
const LATER: Duration = Duration::from_micros(500);

/// Attributes that a change of state has to come with, and no others.
const TO_INIT: c_int = abi::IBV_QP_PKEY_INDEX | abi::IBV_QP_PORT | abi::IBV_QP_ACCESS_FLAGS;
const TO_RECEIVE: c_int = abi::IBV_QP_AV
    | abi::IBV_QP_PATH_MTU
    | abi::IBV_QP_DEST_QPN
    | abi::IBV_QP_RQ_PSN
    | abi::IBV_QP_MAX_DEST_RD_ATOMIC
    | abi::IBV_QP_MIN_RNR_TIMER;
const TO_SEND: c_int = abi::IBV_QP_SQ_PSN
    | abi::IBV_QP_TIMEOUT
    | abi::IBV_QP_RETRY_CNT
    | abi::IBV_QP_RNR_RETRY
    | abi::IBV_QP_MAX_QP_RD_ATOMIC;

pub(super) struct DeviceState {
    pub(super) name: CString,
    pub(super) raw: usize,
    pub(super) knobs: Knobs,
    /// What it says, and a descriptor that is readable meanwhile.
    pub(super) events: VecDeque<ibv_async_event>,
    pub(super) fd: c_int,
    pub(super) regions: u32,
    pub(super) queue_pairs: u32,
    pub(super) landed_late: u64,
}

impl DeviceState {
    fn has_gid(&self, gid: [u8; 16]) -> bool {
        self.knobs.gids.iter().any(|(_, known, ..)| *known == gid)
    }
}

pub(super) struct Region {
    pub(super) device: usize,
    pub(super) domain: usize,
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) can_write: bool,
}

impl Region {
    fn has(&self, address: u64, bytes: u64) -> bool {
        address
            .checked_sub(self.address)
            .and_then(|offset| self.bytes.checked_sub(offset))
            .is_some_and(|left| bytes <= left)
    }
}

/// A completion in its queue.
struct Found {
    from: Instant,
    wc: ibv_wc,
    /// The ring that has room again once it was looked at, up to where.
    frees: Option<u64>,
    /// It says that nothing comes through its queue pair any more.
    is_marker: bool,
}

pub(super) struct Queue {
    pub(super) device: usize,
    pub(super) room: usize,
    found: VecDeque<Found>,
    pub(super) is_armed: bool,
    pub(super) channel: usize,
    is_broken: bool,
}

impl Queue {
    pub(super) fn new(device: usize, room: usize, channel: usize) -> Self {
        let (found, is_armed, is_broken) = (VecDeque::new(), false, false);
        Self { device, room, found, is_armed, channel, is_broken }
    }
}

pub(super) struct Pair {
    pub(super) device: usize,
    pub(super) domain: usize,
    pub(super) raw: usize,
    pub(super) sends: usize,
    pub(super) receives_to: usize,
    pub(super) state: c_uint,
    /// Room for requests and receives.
    pub(super) room: [u64; 2],
    /// Requests posted, and how many of them are over.
    posted: u64,
    freed: u64,
    can_be_written: bool,
    peer: u32,
    peer_gid: [u8; 16],
    mtu: c_uint,
    /// Numbers of the first packets, each way.
    sends_from: u32,
    receives_from: u32,
    pub(super) receives: VecDeque<u64>,
}

impl Pair {
    pub(super) fn new(device: usize, domain: usize, raw: usize, [sends, to]: [usize; 2]) -> Self {
        Self {
            device,
            domain,
            raw,
            sends,
            receives_to: to,
            state: abi::IBV_QPS_RESET,
            room: [0, 0],
            posted: 0,
            freed: 0,
            can_be_written: false,
            peer: 0,
            peer_gid: [0; 16],
            mtu: 0,
            sends_from: 0,
            receives_from: 0,
            receives: VecDeque::new(),
        }
    }
    fn listens(&self) -> bool {
        [abi::IBV_QPS_RTR, abi::IBV_QPS_RTS].contains(&self.state)
    }
}

/// A write as it goes over the wire.
#[derive(Clone)]
pub(super) struct Write {
    pub(super) device: usize,
    from: u32,
    to: u32,
    to_gid: [u8; 16],
    first_packet: u32,
    mtu: c_uint,
    wr_id: u64,
    number: u64,
    is_signalled: bool,
    bytes: Vec<u8>,
    address: u64,
    key: u32,
    immediate: Option<u32>,
    /// When it arrives; none while it is held.
    at: Option<Instant>,
}

/// Bytes that a receiver let through before its queue pair went to error.
struct Landing {
    pair: u32,
    address: u64,
    key: u32,
    bytes: Vec<u8>,
    /// The queue pair is gone, and nobody waited.
    at: Option<Instant>,
}

#[derive(Default)]
pub(super) struct World {
    pub(super) devices: Vec<DeviceState>,
    pub(super) regions: HashMap<u32, Region>,
    pub(super) queues: HashMap<usize, Queue>,
    /// Queues with an event, by channel.
    pub(super) channels: HashMap<usize, VecDeque<usize>>,
    pub(super) pairs: HashMap<u32, Pair>,
    pub(super) wire: VecDeque<Write>,
    landings: Vec<Landing>,
}

// SAFETY: the addresses in events are numbers here.
unsafe impl Send for World {}

static WORLD: Mutex<Option<World>> = Mutex::new(None);
static NUMBERS: AtomicU32 = AtomicU32::new(1);

pub(super) fn world<T>(with: impl FnOnce(&mut World) -> T) -> T {
    let mut world: MutexGuard<'_, Option<World>> =
        WORLD.lock().unwrap_or_else(PoisonError::into_inner);
    with(world.get_or_insert_with(World::default))
}
pub(super) fn number() -> u32 {
    NUMBERS.fetch_add(1, Ordering::Relaxed) & 0xff_ffff
}
pub(super) fn new_fd() -> c_int {
    // SAFETY: no pointer is involved.
    unsafe { libc::eventfd(0, libc::EFD_SEMAPHORE | libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }
}
pub(super) fn raise(fd: c_int) {
    let one = 1u64;
    // SAFETY: eight bytes that live beyond the call.
    unsafe { libc::write(fd, std::ptr::from_ref(&one).cast(), 8) };
}
/// Takes one from a descriptor; no if there is none.
pub(super) fn lower(fd: c_int) -> bool {
    let mut one = 0u64;
    // SAFETY: as above.
    unsafe { libc::read(fd, std::ptr::from_mut(&mut one).cast(), 8) == 8 }
}

/// # Safety
/// The range is mapped, and nobody has a reference into it.
unsafe fn copy_to(address: u64, bytes: &[u8]) {
    for (nth, byte) in bytes.iter().enumerate() {
        // SAFETY: by the caller's promise; volatile, as others may look at it meanwhile.
        unsafe { ((address + nth as u64) as *mut u8).write_volatile(*byte) };
    }
}

impl World {
    pub(super) fn device_of(&self, context: *mut ibv_context) -> usize {
        // SAFETY: contexts are made here, with the device that they are of.
        let raw = unsafe { (*context).device } as usize;
        self.devices.iter().position(|device| device.raw == raw).unwrap_or(0)
    }
    fn says(&mut self, device: usize, event_type: c_uint, element: usize) {
        let device = &mut self.devices[device];
        device.events.push_back(ibv_async_event { element: element as *mut c_void, event_type });
        raise(device.fd);
    }

    fn complete(&mut self, at: usize, wc: ibv_wc, frees: Option<u64>, is_marker: bool) {
        let Some(queue) = self.queues.get_mut(&at) else { return };
        let device = queue.device;
        if queue.found.len() >= queue.room {
            queue.is_broken = true;
            return self.says(device, abi::IBV_EVENT_CQ_ERR, at);
        }
        let from = Instant::now() + self.devices[device].knobs.delay;
        queue.found.push_back(Found { from, wc, frees, is_marker });
        if std::mem::take(&mut queue.is_armed) && queue.channel != 0 {
            // SAFETY: a channel outlives its queues.
            let fd = unsafe { (*(queue.channel as *mut ibv_comp_channel)).fd };
            self.channels.entry(queue.channel).or_default().push_back(at);
            raise(fd);
        }
    }
    /// A request has ended, or failed.
    fn sent(&mut self, write: &Write, status: c_uint) {
        let Some(pair) = self.pairs.get(&write.from) else { return };
        let mut wc = ibv_wc::zero();
        (wc.wr_id, wc.status, wc.qp_num) = (write.wr_id, status, write.from);
        if status == abi::IBV_WC_SUCCESS {
            wc.opcode = abi::IBV_WC_RDMA_WRITE;
        } else {
            wc.vendor_err = VENDOR;
        }
        self.complete(pair.sends, wc, Some(write.number + 1), false);
    }
    /// Takes a queue pair to error: what is posted is flushed.
    pub(super) fn break_pair(&mut self, number: u32) {
        let Some(pair) = self.pairs.get_mut(&number) else { return };
        let was_broken = std::mem::replace(&mut pair.state, abi::IBV_QPS_ERR) == abi::IBV_QPS_ERR;
        let (receives, to) = (std::mem::take(&mut pair.receives), pair.receives_to);
        if !was_broken && self.devices[pair.device].knobs.lands_late {
            self.let_through(number);
        }
        for wr_id in receives {
            let mut wc = ibv_wc::zero();
            (wc.wr_id, wc.qp_num) = (wr_id, number);
            (wc.status, wc.vendor_err) = (abi::IBV_WC_WR_FLUSH_ERR, VENDOR);
            self.complete(to, wc, None, was_broken);
        }
        if !was_broken {
            let of: Vec<_> = self.wire.iter().filter(|w| w.from == number).cloned().collect();
            of.iter().for_each(|write| self.sent(write, abi::IBV_WC_WR_FLUSH_ERR));
        }
    }
    /// What is on the wire to a queue pair passes its checks, up to what takes a receive.
    fn let_through(&mut self, number: u32) {
        let (mut landings, mut takes_receive) = (Vec::new(), false);
        for write in self.wire.iter().filter(|write| write.to == number) {
            let reaches = !takes_receive && self.reaches(write, true) && self.opens(write);
            if reaches {
                let (address, key, bytes) = (write.address, write.key, write.bytes.clone());
                landings.push(Landing { pair: number, address, key, bytes, at: None });
            }
            takes_receive |= write.immediate.is_some();
        }
        self.landings.extend(landings);
    }
    /// Whether a write arrives where it was sent to.
    fn reaches(&self, write: &Write, is_over: bool) -> bool {
        self.pairs.get(&write.to).is_some_and(|peer| {
            let device = &self.devices[peer.device];
            (is_over || peer.listens())
                && peer.peer == write.from
                && peer.receives_from == write.first_packet
                && peer.mtu == write.mtu
                && device.has_gid(write.to_gid)
                && device.knobs.is_active
                && self.devices[write.device].knobs.is_active
        })
    }
    /// Whether its key opens what it writes.
    fn opens(&self, write: &Write) -> bool {
        let Some(peer) = self.pairs.get(&write.to) else { return false };
        let opens = |region: &Region| {
            region.domain == peer.domain
                && region.can_write
                && region.has(write.address, write.bytes.len() as u64)
        };
        write.bytes.is_empty()
            || peer.can_be_written && self.regions.get(&write.key).is_some_and(opens)
    }
    /// Lands what was let through, as far as `is` says.
    fn land_late(&mut self, is: impl Fn(&Landing) -> bool) {
        let all = std::mem::take(&mut self.landings);
        let (now, later): (Vec<_>, Vec<_>) = all.into_iter().partition(is);
        self.landings = later;
        for Landing { address, key, bytes, .. } in now {
            let has = |region: &&Region| region.has(address, bytes.len() as u64);
            if let Some(region) = self.regions.get(&key).filter(has) {
                // SAFETY: it is registered, so that its owner keeps it mapped without references.
                unsafe { copy_to(address, &bytes) };
                self.devices[region.device].landed_late += 1;
            }
        }
    }
    /// Carries a write out, or says why not.
    fn land(&mut self, write: &Write) -> Result<(), c_uint> {
        if !self.reaches(write, false) {
            return Err(abi::IBV_WC_RETRY_EXC_ERR);
        }
        if !self.opens(write) {
            if let Some(peer) = self.pairs.get(&write.to) {
                self.says(peer.device, abi::IBV_EVENT_QP_ACCESS_ERR, peer.raw);
            }
            self.break_pair(write.to);
            return Err(abi::IBV_WC_REM_ACCESS_ERR);
        }
        let Some(peer) = self.pairs.get_mut(&write.to) else {
            return Err(abi::IBV_WC_RETRY_EXC_ERR);
        };
        let taken = match write.immediate {
            Some(immediate) => {
                let wr_id = peer.receives.pop_front().ok_or(abi::IBV_WC_RNR_RETRY_EXC_ERR)?;
                Some((immediate, wr_id, peer.receives_to))
            }
            None => None,
        };
        // SAFETY: it is registered, so that its owner keeps it mapped without references.
        unsafe { copy_to(write.address, &write.bytes) };
        if let Some((immediate, wr_id, to)) = taken {
            let mut wc = ibv_wc::zero();
            (wc.wr_id, wc.opcode, wc.qp_num) = (wr_id, abi::IBV_WC_RECV_RDMA_WITH_IMM, write.to);
            (wc.wc_flags, wc.byte_len) = (abi::IBV_WC_WITH_IMM, write.bytes.len() as u32);
            wc.imm_data = immediate;
            self.complete(to, wc, None, false);
        }
        Ok(())
    }
    fn carry_out(&mut self, write: &Write) {
        let landed = self.land(write);
        // If its queue pair is not there any more, or has flushed it, nobody is told.
        let listens = self.pairs.get(&write.from).is_some_and(|p| p.state == abi::IBV_QPS_RTS);
        match landed {
            _ if !listens => {}
            Ok(()) if write.is_signalled => {
                let loses = &mut self.devices[write.device].knobs.loses;
                if *loses > 0 {
                    *loses -= 1;
                } else {
                    self.sent(write, abi::IBV_WC_SUCCESS);
                }
            }
            Ok(()) => {}
            Err(status) => {
                self.sent(write, status);
                self.break_pair(write.from);
            }
        }
    }
    /// What arrives until now does so.
    pub(super) fn go_on(&mut self, now: Instant) {
        let is_due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        while let Some(nth) = self.wire.iter().position(|write| is_due(write.at)) {
            let Some(write) = self.wire.remove(nth) else { break };
            self.carry_out(&write);
        }
        if self.landings.iter().any(|landing| is_due(landing.at)) {
            self.land_late(|landing| is_due(landing.at));
        }
    }
    /// A device does not hold its writes any more.
    pub(super) fn release(&mut self, device: usize, now: Instant) {
        let held = |write: &&mut Write| write.device == device && write.at.is_none();
        self.wire.iter_mut().filter(held).for_each(|write| write.at = Some(now));
        self.go_on(now);
    }

    /// Takes a request of a queue pair, or says why not.
    pub(super) fn post(&mut self, number: u32, request: &ibv_send_wr) -> Result<(), c_int> {
        let pair = self.pairs.get_mut(&number).ok_or(libc::EINVAL)?;
        let knobs = &mut self.devices[pair.device].knobs;
        if ![abi::IBV_QPS_RTS, abi::IBV_QPS_ERR].contains(&pair.state) {
            return Err(libc::EINVAL);
        }
        let left = knobs.posts_left.map(|left| left.checked_sub(1).ok_or(libc::ENOMEM));
        if let Some(left) = left {
            knobs.posts_left = Some(left?);
        }
        if pair.posted - pair.freed >= pair.room[0] {
            return Err(libc::ENOMEM);
        }
        // SAFETY: the segment is the request's.
        let segment = (request.num_sge > 0).then(|| unsafe { *request.sg_list });
        let segment = segment.unwrap_or(ibv_sge { addr: 0, length: 0, lkey: 0 });
        let (at, bytes) = (segment.addr, u64::from(segment.length));
        let mut write = Write {
            device: pair.device,
            from: number,
            to: pair.peer,
            to_gid: pair.peer_gid,
            first_packet: pair.sends_from,
            mtu: pair.mtu,
            wr_id: request.wr_id,
            number: pair.posted,
            is_signalled: request.send_flags & abi::IBV_SEND_SIGNALED != 0,
            bytes: Vec::new(),
            address: request.rdma.remote_addr,
            key: request.rdma.rkey,
            immediate: (request.opcode == abi::IBV_WR_RDMA_WRITE_WITH_IMM)
                .then_some(request.imm_data),
            at: None,
        };
        pair.posted += 1;
        let domain = pair.domain;
        let has = |region: &Region| region.domain == domain && region.has(at, bytes);
        let may_read = bytes == 0
            || request.send_flags & abi::IBV_SEND_INLINE != 0
            || self.regions.get(&segment.lkey).is_some_and(has);
        let fails = match pair.state {
            abi::IBV_QPS_ERR => Some(abi::IBV_WC_WR_FLUSH_ERR),
            _ if bytes > knobs.max_message_bytes.into() => Some(abi::IBV_WC_LOC_LEN_ERR),
            _ if !may_read => Some(abi::IBV_WC_LOC_PROT_ERR),
            _ => None,
        };
        if let Some(status) = fails {
            self.sent(&write, status);
            self.break_pair(number);
            return Ok(());
        }
        // SAFETY: the range is inline, so the caller's, or registered; volatile, as others may write
        // it meanwhile.
        let byte = |nth: u64| unsafe { ((at + nth) as *const u8).read_volatile() };
        write.bytes = (0..bytes).map(byte).collect();
        let (holds, transit) = (knobs.holds, knobs.transit);
        // Never before what was posted earlier.
        let before = self.wire.iter().rev().find(|earlier| earlier.from == number);
        let now = Instant::now();
        write.at = match before {
            _ if holds => None,
            Some(before) => before.at.map(|at| at.max(now + transit)),
            None => Some(now + transit),
        };
        if before.is_none() && !holds && transit.is_zero() {
            self.carry_out(&write);
        } else {
            self.wire.push_back(write);
        }
        Ok(())
    }
    /// Looks at a completion queue.
    pub(super) fn poll(
        &mut self,
        at: usize,
        room: c_int,
        mut give: impl FnMut(usize, ibv_wc),
    ) -> c_int {
        let now = Instant::now();
        self.go_on(now);
        let mut n = 0;
        while n < room {
            let Some(queue) = self.queues.get_mut(&at).filter(|queue| !queue.is_broken) else {
                return -1;
            };
            if queue.found.front().is_none_or(|found| found.from > now) {
                break;
            }
            let Some(found) = queue.found.pop_front() else { break };
            let number = found.wc.qp_num;
            if found.is_marker {
                self.land_late(|landing| landing.pair == number);
            }
            if let (Some(freed), Some(pair)) = (found.frees, self.pairs.get_mut(&number)) {
                pair.freed = pair.freed.max(freed);
            }
            give(n as usize, found.wc);
            n += 1;
        }
        n
    }

    /// Changes the state of a queue pair, or says why not.
    pub(super) fn modify(&mut self, number: u32, attr: &ibv_qp_attr, mask: c_int) -> c_int {
        if attr.qp_state == abi::IBV_QPS_ERR && mask == abi::IBV_QP_STATE {
            self.break_pair(number);
            return 0;
        }
        let Some(pair) = self.pairs.get_mut(&number) else { return libc::EINVAL };
        let (before, with) = match attr.qp_state {
            abi::IBV_QPS_INIT => (abi::IBV_QPS_RESET, TO_INIT),
            abi::IBV_QPS_RTR => (abi::IBV_QPS_INIT, TO_RECEIVE),
            abi::IBV_QPS_RTS => (abi::IBV_QPS_RTR, TO_SEND),
            _ => return libc::EINVAL,
        };
        if pair.state != before || mask != with | abi::IBV_QP_STATE {
            return libc::EINVAL;
        }
        match attr.qp_state {
            abi::IBV_QPS_INIT if attr.port_num != super::PORT => return libc::EINVAL,
            abi::IBV_QPS_INIT => {
                pair.can_be_written = attr.qp_access_flags & abi::IBV_ACCESS_REMOTE_WRITE != 0;
            }
            abi::IBV_QPS_RTR => {
                let index = u32::from(attr.ah_attr.grh.sgid_index);
                let gids = &self.devices[pair.device].knobs.gids;
                if attr.ah_attr.is_global == 0 || !gids.iter().any(|(at, ..)| *at == index) {
                    return libc::ENODATA;
                }
                (pair.peer, pair.peer_gid) = (attr.dest_qp_num, attr.ah_attr.grh.dgid.raw);
                (pair.receives_from, pair.mtu) = (attr.rq_psn, attr.path_mtu);
            }
            _ => pair.sends_from = attr.sq_psn,
        }
        pair.state = attr.qp_state;
        0
    }
    /// A queue pair is gone. What it sent is on the wire all the same, and what nobody waited for
    /// lands.
    pub(super) fn destroy_pair(&mut self, number: u32) {
        let late = |pair: &Pair| pair.listens() && self.devices[pair.device].knobs.lands_late;
        if self.pairs.get(&number).is_some_and(late) {
            self.let_through(number);
        }
        let Some(pair) = self.pairs.remove(&number) else { return };
        let at = Some(Instant::now() + LATER);
        let of = |landing: &&mut Landing| landing.pair == number;
        self.landings.iter_mut().filter(of).for_each(|landing| landing.at = at);
        let device = &mut self.devices[pair.device];
        device.queue_pairs -= 1;
        // Events of it are not given any more: they would point to what is gone.
        let before = device.events.len();
        device.events.retain(|event| event.element as usize != pair.raw);
        for _ in device.events.len()..before {
            lower(device.fd);
        }
    }
}
