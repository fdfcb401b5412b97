//! The functions of libibverbs, and those that its header calls through a context.
//!
//! In: what [`crate::sys::verbs`] asks. Out: what the manual pages say, as far as tests need it.
#![allow(unsafe_code)] // C functions.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::atomic::Ordering;

use super::world::{Pair, Queue, Region, lower, new_fd, number, world};
use super::{COUNTED, PORT};
use crate::sys::verbs::Symbols;
use crate::sys::verbs::abi::{
    self, Zero, ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device,
    ibv_device_attr, ibv_gid, ibv_gid_entry, ibv_mr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr,
    ibv_qp_init_attr, ibv_recv_wr, ibv_send_wr, ibv_wc,
};

fn fail(errno: c_int) {
    // SAFETY: the thread's own.
    unsafe { *libc::__errno_location() = errno };
}
fn failed<T>(errno: c_int) -> *mut T {
    fail(errno);
    std::ptr::null_mut()
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
        a.max_mr = device.knobs.max_regions as c_int;
        (a.max_qp, a.max_cq, a.max_cqe) = (1 << 16, 1 << 16, 1 << 20);
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
        (a.gid_tbl_len, a.pkey_tbl_len, a.max_msg_sz) = (16, 1, knobs.max_message_bytes);
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
        if device.regions >= device.knobs.max_regions {
            return failed(libc::ENOMEM);
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
        w.queues.insert(queue as usize, Queue::new(device, cqe.max(0) as usize, channel));
    });
    queue
}
extern "C" fn destroy_cq(queue: *mut ibv_cq) -> c_int {
    let used = world(|w| {
        let at = queue as usize;
        w.pairs.values().any(|pair| pair.sends == at || pair.receives_to == at)
    });
    if used {
        return libc::EBUSY;
    }
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
    // SAFETY: there is room for as many.
    let give = |nth: usize, wc| unsafe { *to.add(nth) = wc };
    world(|w| w.poll(queue as usize, room, give))
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
        let number = qp.qp_num;
        let raw = Box::into_raw(Box::new(qp));
        let queues = [attr.send_cq as usize, attr.recv_cq as usize];
        let mut pair = Pair::new(device, domain as usize, raw as usize, queues);
        pair.room = [attr.cap.max_send_wr.into(), attr.cap.max_recv_wr.into()];
        w.pairs.insert(number, pair);
        raw
    })
}
extern "C" fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: a pair that lives, attributes that the caller lends.
    let (number, attr) = unsafe { ((*qp).qp_num, &*attr) };
    world(|w| w.modify(number, attr, mask))
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
    world(|w| w.destroy_pair(qp.qp_num));
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
            if let Err(errno) = w.post(number, request) {
                // SAFETY: the caller gives a place for it.
                unsafe { *bad = wr };
                return errno;
            }
            wr = request.next;
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
        let refused = |wr, errno| {
            // SAFETY: the caller gives a place for it.
            unsafe { *bad = wr };
            errno
        };
        let Some(pair) = w.pairs.get_mut(&number).filter(|p| p.state != abi::IBV_QPS_RESET) else {
            return refused(wr, libc::EINVAL);
        };
        while !wr.is_null() {
            if pair.receives.len() as u64 >= pair.room[1] {
                return refused(wr, libc::ENOMEM);
            }
            // SAFETY: a chain of requests that the caller lends.
            let request = unsafe { &*wr };
            pair.receives.push_back(request.wr_id);
            wr = request.next;
        }
        0
    })
}

pub(super) fn symbols() -> Symbols {
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
