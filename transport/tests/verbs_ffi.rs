//! Our own bindings of libibverbs over the kernel's verbs: two soft-RoCE devices, `rxe0` and `rxe1`,
//! that a wire joins. Work is done only with `KVLANE_RDMA=must` in the environment, or `pair`, the
//! name of such a machine; elsewhere these tests say that they are skipped.
#![allow(clippy::unwrap_used, clippy::panic)] // Tests fail by panicking.

use std::os::fd::RawFd;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvlane_proto::ErrorKind;
use kvlane_transport::mlx5::{Remote, Segment};
use kvlane_transport::sys::mem::Memory;
use kvlane_transport::sys::verbs::{
    Access, AsyncEvent, Completion, CompletionChannel, CompletionQueue, Completions, Context,
    Dmabuf, DmabufRange, Done, GidType, GlobalRoute, LinkLayer, MemoryRegion, Mtu, Node,
    PairDepths, PortState, ProtectionDomain, QueuePair, Range, SendBatch, State, Status, ToInit,
    ToReceive, ToSend, Transport, Verbs,
};
use kvlane_transport::sys::wait::PollSet;

const PORT: u8 = 1;
const DEPTH: u32 = 64;
const PATIENCE: Duration = Duration::from_secs(20);
/// Of the lengths that are written: 4 KiB, 64 KiB and 1 MiB.
const LENGTHS: [u32; 3] = [4 << 10, 64 << 10, 1 << 20];
const POOL_BYTES: u64 = 2 << 20;
const CANARY: u8 = 0xa5;

/// The wire, if this is the machine for it: tests that use it take turns.
fn wire() -> Option<MutexGuard<'static, ()>> {
    static WIRE: Mutex<()> = Mutex::new(());
    let found = std::env::var("KVLANE_RDMA");
    let is = matches!(found.as_deref(), Ok("must" | "pair"));
    if !is {
        eprintln!("skipped: needs rxe0, rxe1 and KVLANE_RDMA=must, found {found:?}");
    }
    is.then(|| WIRE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// One side: a device, its pool and a queue pair.
struct Side {
    // Ends last, though each of the others keeps what it needs.
    context: Arc<Context>,
    domain: Arc<ProtectionDomain>,
    channel: Arc<CompletionChannel>,
    queue: Arc<CompletionQueue>,
    pair: QueuePair,
    memory: Arc<Memory>,
    region: MemoryRegion,
    found: Completions,
}

impl Side {
    fn new(device: &str) -> Self {
        let context = Arc::new(Verbs::load().unwrap().open(device).unwrap());
        let domain = ProtectionDomain::new(&context).unwrap();
        let channel = CompletionChannel::new(&context).unwrap();
        let queue = CompletionQueue::new(&context, 2 * DEPTH, Some(&channel)).unwrap();
        let depths = PairDepths { sends: DEPTH, receives: DEPTH, inline_bytes: 64 };
        let pair = QueuePair::new(&domain, &queue, &queue, depths).unwrap();
        assert!(pair.depths().sends >= DEPTH && pair.depths().inline_bytes >= 64);
        let memory = Arc::new(Memory::memfd(POOL_BYTES, true).unwrap());
        let range = Range::of(&memory, memory.address(), POOL_BYTES).unwrap();
        let region = domain.register(range, Access::REMOTE_WRITE.relaxed()).unwrap();
        let found = Completions::new(16);
        Self { context, domain, channel, queue, pair, memory, region, found }
    }
    /// A GID that is routable and has an IPv4 address, by its place now.
    fn gid(&self) -> (u32, [u8; 16]) {
        let gids = self.context.gids(PORT).unwrap();
        let v4 = |gid: &[u8; 16]| gid.starts_with(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]);
        let found = gids.iter().find(|gid| gid.kind == GidType::RoceV2 && v4(&gid.gid));
        let found = found.unwrap_or_else(|| panic!("no IPv4 GID in {gids:?}"));
        assert!(found.interface_index.is_some());
        (found.index, found.gid)
    }
    fn connect(&self, to: &Side, retries: u8) {
        assert_eq!(self.pair.state().unwrap(), State::Reset);
        let access = Access::REMOTE_WRITE;
        self.pair.to_init(&ToInit { port: PORT, pkey_index: 0, access }).unwrap();
        assert_eq!(self.pair.state().unwrap(), State::Init);
        let (gid_index, destination) = (self.gid().0, to.gid().1);
        self.pair
            .to_receive(&ToReceive {
                port: PORT,
                path_mtu: Mtu::B1024,
                destination: to.pair.number(),
                receive_psn: 0x00ab_cdef,
                destination_lid: 0,
                service_level: 0,
                global: Some(GlobalRoute {
                    gid_index,
                    destination,
                    flow_label: 0,
                    hop_limit: 64,
                    traffic_class: 0,
                }),
                min_rnr_timer: 12,
                max_destination_reads: 0,
            })
            .unwrap();
        assert_eq!(self.pair.state().unwrap(), State::ReadyToReceive);
        let send =
            ToSend { send_psn: 0x00ab_cdef, timeout: 14, retries, rnr_retries: 2, max_reads: 0 };
        self.pair.to_send(&send).unwrap();
        assert_eq!(self.pair.state().unwrap(), State::ReadyToSend);
    }
    fn local(&self, offset: u64, bytes: u32) -> Segment {
        let address = self.region.address() + offset;
        Segment { address, key: self.region.local_key(), bytes }
    }
    fn remote(&self, offset: u64) -> Remote {
        Remote { address: self.region.address() + offset, key: self.region.remote_key() }
    }
    /// So many completions, or a failure to say which came.
    fn complete(&mut self, count: usize) -> Vec<Completion> {
        let (mut all, until) = (Vec::new(), Instant::now() + PATIENCE);
        while all.len() < count {
            assert!(Instant::now() < until, "{count} completions are expected, found {all:?}");
            if self.queue.poll(&mut self.found).unwrap() == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            all.extend(self.found.iter());
        }
        assert_eq!(all.len(), count, "{all:?}");
        all
    }
    fn status(&mut self) -> (u64, Status) {
        let completion = self.complete(1)[0];
        assert_eq!(completion.queue_pair, self.pair.number());
        (completion.wr_id, completion.result.unwrap_err().status)
    }
    fn read(&self, offset: u64, bytes: u64) -> Vec<u8> {
        let mut found = vec![0; bytes as usize];
        self.memory.read_at(offset, &mut found).unwrap();
        found
    }
}

fn couple() -> (Side, Side) {
    let (a, b) = (Side::new("rxe0"), Side::new("rxe1"));
    // Retries that end: 7 has no end on soft-RoCE.
    a.connect(&b, 3);
    b.connect(&a, 3);
    (a, b)
}

/// Waits until there is something to read.
fn readable(fd: RawFd) -> bool {
    let mut set = PollSet::default();
    set.add(fd, true, false);
    set.wait(PATIENCE);
    set.ready(0)
}

fn bytes_of(seed: u64, len: u32) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..len).map(|_| next()).collect()
}

#[test]
fn writes_of_one_batch_land_with_their_immediates() {
    let Some(_wire) = wire() else { return };
    let (mut a, mut b) = couple();
    b.memory.fill(0, POOL_BYTES, CANARY).unwrap();
    b.pair.post_receives(5, 100).unwrap();
    b.queue.arm().unwrap();
    assert!(!b.channel.take_event().unwrap());

    let mut batch = SendBatch::new(6);
    let (mut offset, mut expected) = (0, vec![CANARY; POOL_BYTES as usize]);
    for (i, bytes) in LENGTHS.into_iter().enumerate() {
        let (i, data) = (i as u64, bytes_of(i as u64 + 1, bytes));
        a.memory.write_at(offset, &data).unwrap();
        // A gap, so that a write that runs over is seen.
        let to = offset + 4096 * (i + 1);
        expected[to as usize..][..data.len()].copy_from_slice(&data);
        let immediate = Some(0x0102_0300 + i as u32);
        batch.push_write(i, a.local(offset, bytes), b.remote(to), immediate, i == 1).unwrap();
        offset += u64::from(bytes);
    }
    let last = POOL_BYTES - 64;
    let few = bytes_of(9, 64);
    expected[last as usize..].copy_from_slice(&few);
    batch.push_inline(3, &few, b.remote(last), Some(u32::MAX), false).unwrap();
    // Without an immediate, and so without a receive; then without bytes.
    batch.push_write(4, a.local(0, 8), b.remote(0), None, false).unwrap();
    expected[..8].copy_from_slice(&bytes_of(1, 4096)[..8]);
    batch.push_write(5, a.local(0, 0), b.remote(0), Some(7), true).unwrap();
    batch.post(&a.pair).unwrap();
    assert!(batch.is_empty());

    // Only those that asked for it, in order.
    let sent = a.complete(2);
    assert_eq!(
        sent.iter().map(|c| (c.wr_id, c.result)).collect::<Vec<_>>(),
        [(1, Ok(Done::Sent)), (5, Ok(Done::Sent))]
    );
    assert!(readable(b.channel.fd()));
    assert!(b.channel.take_event().unwrap());
    assert!(!b.channel.take_event().unwrap(), "one arming makes one event");
    let received = b.complete(5);
    let immediates = [0x0102_0300, 0x0102_0301, 0x0102_0302, u32::MAX, 7];
    let lengths = [LENGTHS[0], LENGTHS[1], LENGTHS[2], 64, 0];
    for (i, completion) in received.iter().enumerate() {
        let (immediate, bytes) = (Some(immediates[i]), lengths[i]);
        assert_eq!(completion.result, Ok(Done::Received { immediate, bytes }));
        assert_eq!((completion.wr_id, completion.queue_pair), (100 + i as u64, b.pair.number()));
    }
    assert!(b.read(0, POOL_BYTES) == expected, "not the bytes that were written");
}

#[test]
fn a_key_that_is_none_is_refused_by_the_other_side() {
    let Some(_wire) = wire() else { return };
    let (mut a, b) = couple();
    b.memory.fill(0, POOL_BYTES, CANARY).unwrap();
    let mut batch = SendBatch::new(1);
    let to = Remote { key: b.region.remote_key() ^ 0x5500, ..b.remote(0) };
    batch.push_write(1, a.local(0, 4096), to, None, true).unwrap();
    batch.post(&a.pair).unwrap();
    assert_eq!(a.status(), (1, Status::REMOTE_ACCESS));
    assert_eq!(a.pair.state().unwrap(), State::Error);
    assert!(b.read(0, POOL_BYTES).iter().all(|&byte| byte == CANARY));
    // What follows is flushed.
    batch.push_write(2, a.local(0, 4096), b.remote(0), None, true).unwrap();
    batch.post(&a.pair).unwrap();
    assert_eq!(a.status(), (2, Status::FLUSHED));
}

#[test]
fn an_immediate_without_a_receive_runs_out_of_retries() {
    let Some(_wire) = wire() else { return };
    let (mut a, b) = couple();
    let mut batch = SendBatch::new(1);
    batch.push_write(1, a.local(0, 4096), b.remote(0), Some(1), true).unwrap();
    batch.post(&a.pair).unwrap();
    assert_eq!(a.status(), (1, Status::RNR_RETRIES));
    assert_eq!(a.pair.state().unwrap(), State::Error);
}

#[test]
fn a_marker_posted_after_the_error_is_flushed() {
    let Some(_wire) = wire() else { return };
    let (_a, mut b) = couple();
    b.pair.post_receives(1, 1).unwrap();
    b.pair.to_error().unwrap();
    assert_eq!(b.status(), (1, Status::FLUSHED));
    b.pair.post_receives(1, 2).unwrap();
    b.pair.to_error().unwrap();
    assert_eq!(b.status(), (2, Status::FLUSHED));
    assert_eq!(b.pair.state().unwrap(), State::Error);
}

#[test]
fn a_batch_that_does_not_fit_says_how_much_was_taken() {
    let Some(_wire) = wire() else { return };
    let (mut a, b) = couple();
    // Not before the first answer, so that the queue fills up.
    let holds = a.pair.depths().sends;
    let mut batch = SendBatch::new(holds as u16 * 4);
    for i in 0..u64::from(holds) * 4 {
        batch.push_write(i, a.local(0, 4096), b.remote(0), None, true).unwrap();
    }
    let failed = batch.post(&a.pair).unwrap_err();
    assert!(failed.taken >= holds as usize && failed.taken < holds as usize * 4, "{failed:?}");
    let said = failed.error.to_string();
    assert!(said.contains("ibv_post_send failed (device=rxe0"), "{said}");
    assert!(said.contains(&format!("queue_pair={}", a.pair.number())), "{said}");
    let done = a.complete(failed.taken);
    assert!(done.iter().zip(0..).all(|(c, i)| c.wr_id == i && c.result == Ok(Done::Sent)));
}

#[test]
fn what_there_is_is_told() {
    let Some(_wire) = wire() else { return };
    let verbs = Verbs::load().unwrap();
    let list = verbs.devices().unwrap();
    let names: Vec<_> = list.devices().iter().map(|device| device.name.as_str()).collect();
    assert!(names.contains(&"rxe0") && names.contains(&"rxe1"), "{names:?}");
    let e = list.open("rxe").unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotFound);
    assert!(e.to_string().contains("usable=rxe0 rxe1"), "{e}");

    let side = Side::new("rxe1");
    let info = side.context.info();
    assert_eq!((info.node, info.transport), (Node::ChannelAdapter, Transport::InfiniBand));
    assert!(info.file.starts_with("uverbs") && info.guid != 0, "{info:?}");
    let device = side.context.device_attributes().unwrap();
    assert_eq!((device.ports, device.node_guid), (1, info.guid));
    assert!(device.max_queue_pairs > 0 && device.max_depth > DEPTH, "{device:?}");
    let port = side.context.port_attributes(PORT).unwrap();
    assert_eq!((port.state, port.link_layer), (PortState::Active, LinkLayer::Ethernet));
    assert!(port.active_mtu >= Some(Mtu::B1024), "{port:?}");
    let e = side.context.port_attributes(9).unwrap_err().to_string();
    assert!(e.contains("ibv_query_port failed (device=rxe1") && e.contains("port=9"), "{e}");
    assert_eq!(side.gid().1[12..], [10, 77, 0, 2]);
    // The state says what is possible: not from reset to sending.
    let send = ToSend { send_psn: 0, timeout: 14, retries: 3, rnr_retries: 3, max_reads: 0 };
    let e = side.pair.to_send(&send).unwrap_err().to_string();
    assert!(e.contains("ibv_modify_qp failed") && e.contains("to=ready to send"), "{e}");
}

#[test]
fn a_region_lets_its_memory_go_when_it_ends() {
    let Some(_wire) = wire() else { return };
    let side = Side::new("rxe0");
    assert_eq!(Arc::strong_count(&side.memory), 2);
    // soft-RoCE does not do dma-bufs: that is told apart from a failure.
    let (fd, bytes) = (side.memory.fd().unwrap(), 4096);
    let part = DmabufRange { fd, offset: 0, bytes, iova: 0 };
    match side.domain.register_dmabuf(part, Access::REMOTE_WRITE).unwrap() {
        Dmabuf::Unsupported(e) => assert!(e.to_string().contains("dma-bufs cannot be"), "{e}"),
        Dmabuf::Registered(region) => panic!("a memfd was taken for a dma-buf: {region:?}"),
    }
    let Side { region, memory, .. } = side;
    drop(region);
    assert_eq!(Arc::strong_count(&memory), 1);
}

#[test]
fn a_port_tells_when_it_goes_and_comes() {
    let Some(_wire) = wire() else { return };
    let side = Side::new("rxe1");
    let link = |state: &str| {
        let done = Command::new("ip").args(["link", "set", "nic1", state]).status().unwrap();
        assert!(done.success());
    };
    let wait_for = |wanted: AsyncEvent| {
        let until = Instant::now() + PATIENCE;
        let mut all = Vec::new();
        while !all.contains(&wanted) {
            assert!(Instant::now() < until, "{wanted:?} is expected, found {all:?}");
            assert!(readable(side.context.async_fd()), "{wanted:?} is expected, found {all:?}");
            all.extend(side.context.async_event().unwrap());
        }
    };
    link("down");
    wait_for(AsyncEvent::PortError { port: PORT });
    assert_ne!(side.context.port_attributes(PORT).unwrap().state, PortState::Active);
    link("up");
    wait_for(AsyncEvent::PortActive { port: PORT });
    assert_eq!(side.context.port_attributes(PORT).unwrap().state, PortState::Active);
}
