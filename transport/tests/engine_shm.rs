//! The `shm` engine against its like, against strangers, and against peers that break its rules.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)] // Tests fail by panicking.

mod engine_conformance;

use std::io::{BufRead, BufReader, ErrorKind::WouldBlock, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use engine_conformance::{CANARY, LINK, PATIENCE, Pair, Pool, Rng, addresses, layout, peer, run};
use proptest::prelude::*;

use kvlane_proto::layout::KvKind;
use kvlane_proto::{Device, ErrorKind, GrantId, LaneId, LinkId, PartId, Plan, Role, limits};
use kvlane_transport::engine::driver::{EngineHandle, spawn};
use kvlane_transport::engine::shm::ring::{self, SenderRing};
use kvlane_transport::engine::shm::wire::{
    Ack, Blob, Door, Extent, MESSAGE_BYTES, Message, Part, SLOT_BODY, ServeWord, Status, Turned,
    encode_more,
};
use kvlane_transport::engine::shm::{REGIONS_MAX, ShmConfig, ShmEngine};
use kvlane_transport::engine::{
    Command, Engine, EngineEvent, FenceHow, OpenGrant, OpenSource, Post,
};
use kvlane_transport::memory::Region;
use kvlane_transport::sys::mem::Memory;
use kvlane_transport::sys::share::Words;
use kvlane_transport::sys::unix::{Listener, Name, Socket};

fn engine(checksum: bool) -> ShmEngine {
    ShmEngine::new(ShmConfig { checksum, directory: None }).unwrap()
}
fn couple(checksum: bool) -> (Box<dyn Engine>, Box<dyn Engine>) {
    (Box::new(engine(checksum)), Box::new(engine(false)))
}
fn pair(lanes: u16, src: &Arc<Region>, dst: &Arc<Region>) -> Pair {
    let mut p = Pair::new(couple(false));
    p.tx.register(src).unwrap();
    p.rx.register(dst).unwrap();
    p.connect(lanes);
    p
}
fn downs(events: &[EngineEvent]) -> Vec<ErrorKind> {
    events
        .iter()
        .filter_map(|e| match e {
            EngineEvent::LaneDown { why, .. } => Some(why.kind),
            _ => None,
        })
        .collect()
}
fn arrivals(events: &[EngineEvent]) -> usize {
    events.iter().filter(|e| matches!(e, EngineEvent::Arrived { .. })).count()
}
fn is_quiesced(p: &Pair) -> bool {
    p.from_tx.iter().any(|e| matches!(e, EngineEvent::Quiesced(q) if q.grant() == GrantId(7)))
}

#[test]
fn conforms() {
    run(&|| couple(false));
}

#[test]
fn conforms_with_checksums() {
    run(&|| couple(true));
}

// Its like.

/// Everything is described before the fence, nothing copied.
#[test]
fn what_was_posted_before_a_fence_never_lands_after_it() {
    let l = layout(4096, 1, KvKind::Mla);
    let (src, dst) = (Pool::new(&l, 64), Pool::new(&l, 64));
    src.fill(1);
    dst.fill(CANARY);
    let mut p = pair(1, &src.region, &dst.region);
    let ids: Vec<u32> = (0..32).map(|i| i * 2).collect();
    let (from, to) = (src.plan(&ids, 8 * 4096), dst.plan(&ids, 8 * 4096));
    p.open(7, 1, &to);
    (0..4).for_each(|part| p.post(7, part, 0, &from));
    // Only the sender moves, until all is in the ring.
    while p.poll_tx() {}
    p.tell_rx(Command::Fence { grant: GrantId(7), how: FenceHow::Close });
    p.until("refusals", |p| p.nacked().len() == 4);
    assert_eq!(p.nacked(), [ErrorKind::NotFound; 4]);
    assert_eq!((dst.touched(), arrivals(&p.from_rx)), (0, 0));
}

/// The order to open a grant waits while a turn that began before it goes on.
#[test]
fn a_part_that_comes_a_turn_before_its_grant_is_not_refused() {
    let l = layout(4096, 1, KvKind::Mla);
    let (src, dst) = (Pool::new(&l, 4), Pool::new(&l, 4));
    src.fill(1);
    let mut p = pair(1, &src.region, &dst.region);
    p.post(7, 0, 0, &src.plan(&[1], 4096));
    while p.poll_tx() {}
    p.poll_rx();
    assert_eq!(p.rx.park(&mut Vec::new()).map(|t| t.0), Some(0), "it may not sleep now");
    p.open(7, 1, &dst.plan(&[2], 4096));
    p.until("ack", |p| p.acked() + p.nacked().len() > 0);
    assert_eq!((p.acked(), arrivals(&p.from_rx)), (1, 1));
    assert_eq!(dst.read(dst.region.address() + 2 * 4096, 1), [1]);
}

#[test]
fn a_revoke_needs_neither_the_engines_thread_nor_the_sender() {
    let l = layout(1 << 20, 1, KvKind::Mla);
    let (src, dst) = (Pool::new(&l, 8), Pool::new(&l, 8));
    src.fill(1);
    dst.fill(CANARY);
    let rx = engine(false);
    let revoke = rx.revoke_handle();
    let mut p = Pair::new((Box::new(engine(false)), Box::new(rx)));
    p.tx.register(&src.region).unwrap();
    p.rx.register(&dst.region).unwrap();
    p.connect(1);
    let ids: Vec<u32> = (0..8).collect();
    let (from, to) = (src.plan(&ids, 8 << 20), dst.plan(&ids, 8 << 20));
    p.open(7, 1, &to);
    p.post(7, 0, 0, &from);
    let first = addresses(&to)[0];
    p.until("first bytes", |_| dst.read(first, 1) == [1]);
    let proof = std::thread::spawn(move || revoke.revoke(GrantId(7))).join().unwrap();
    assert_eq!((proof.grant(), proof.how()), (GrantId(7), FenceHow::Revoke));
    dst.fill(CANARY);
    p.until("refusal", |p| p.nacked() == [ErrorKind::NotFound]);
    p.settle();
    assert_eq!(dst.touched(), 0);
}

/// The sender takes its pages back in the middle of a copy: at once, and what was copied is void.
#[test]
fn a_grant_that_is_stopped_in_a_copy_does_not_arrive() {
    let l = layout(1 << 20, 1, KvKind::Mla);
    let (src, dst) = (Pool::new(&l, 16), Pool::new(&l, 16));
    src.fill(1);
    dst.fill(CANARY);
    let mut p = pair(1, &src.region, &dst.region);
    let ids: Vec<u32> = (0..16).collect();
    let (from, to) = (src.plan(&ids, 16 << 20), dst.plan(&ids, 16 << 20));
    p.open(7, 1, &to);
    p.post(7, 0, 0, &from);
    let first = addresses(&to)[0];
    p.until("first bytes", |_| dst.read(first, 1) == [1]);
    assert_eq!(p.tx.unregister(&src.region).unwrap_err().kind(), ErrorKind::Busy);
    p.tell_tx(Command::Quiesce { link: LINK, grant: GrantId(7) });
    // The receiver does not move.
    p.poll_tx();
    assert!(is_quiesced(&p));
    src.fill(2);
    p.until("refusal", |p| !p.nacked().is_empty());
    assert_eq!(p.nacked(), [ErrorKind::RoomEnded]);
    assert_eq!(arrivals(&p.from_rx), 0);
    // A part that is posted anew has a new word, and the lane lives on.
    p.clear();
    p.send_all(7, 1, &from);
    assert_eq!(dst.read(first, 1 << 20), vec![2; 1 << 20]);
    assert!(downs(&p.from_tx).is_empty());
}

#[test]
fn a_quiesce_ends_although_the_receiver_does_nothing() {
    let l = layout(1 << 20, 1, KvKind::Mla);
    let (src, dst) = (Pool::new(&l, 16), Pool::new(&l, 16));
    src.fill(1);
    let mut p = pair(1, &src.region, &dst.region);
    let ids: Vec<u32> = (0..16).collect();
    let (from, to) = (src.plan(&ids, 2 << 20), dst.plan(&ids, 2 << 20));
    p.open(7, 1, &to);
    (0..8).for_each(|part| p.post(7, part, 0, &from));
    while p.poll_tx() {}
    p.tell_tx(Command::Quiesce { link: LINK, grant: GrantId(7) });
    p.poll_tx();
    assert!(is_quiesced(&p));
    // The source may change, and may go.
    p.tx.unregister(&src.region).unwrap();
    src.fill(2);
    p.until("refusals", |p| p.nacked().len() == 8);
    assert_eq!((p.acked(), arrivals(&p.from_rx)), (0, 0));
}

#[test]
fn a_lane_that_is_reset_comes_up_again() {
    let l = layout(4096, 1, KvKind::Mla);
    let (src, dst) = (Pool::new(&l, 16), Pool::new(&l, 16));
    src.fill(3);
    let mut p = pair(2, &src.region, &dst.region);
    let ids: Vec<u32> = (0..8).collect();
    let (from, to) = (src.plan(&ids, 4096), dst.plan(&ids, 4096));
    p.open(7, 2, &to);
    p.tell_tx(Command::ResetLane { link: LINK, lane: LaneId(1) });
    p.until("lane", |p| {
        let up = |e: &EngineEvent| matches!(e, EngineEvent::LaneUp { lane: LaneId(1), .. });
        p.from_tx.iter().any(up) && p.from_rx.iter().any(up)
    });
    assert_eq!(downs(&p.from_tx), [ErrorKind::NoPath]);
    assert_eq!(downs(&p.from_rx), [ErrorKind::PeerLost]);
    p.clear();
    p.send_all(7, 2, &from);
    for address in addresses(&to) {
        assert_eq!(dst.read(address, 4096), [3; 4096]);
    }
    // The receiver's end goes: the sender's lanes go down, once each, and are dialled in vain.
    p.tell_rx(Command::Close { link: LINK });
    p.until("ends", |p| downs(&p.from_tx).len() == 2);
    assert_eq!(downs(&p.from_tx), [ErrorKind::PeerLost; 2]);
    p.post(7, 0, 0, &from);
    p.until("refusal", |p| p.nacked() == [ErrorKind::NoPath]);
}

/// A part of more extents than the ring has slots.
#[test]
fn a_part_longer_than_the_ring_flows_through_it() {
    let l = layout(8, 1, KvKind::Mla);
    let (src, dst) = (Pool::new(&l, 60_000), Pool::new(&l, 60_000));
    let mut rng = Rng(5);
    let bytes: Vec<u8> = (0..480_000).map(|_| rng.next() as u8).collect();
    src.write(src.region.address(), &bytes);
    let mut p = pair(1, &src.region, &dst.region);
    // Every other block, so that nothing touches.
    let ids: Vec<u32> = (0..30_000).map(|i| i * 2).collect();
    let (from, to) = (src.plan(&ids, 1 << 20), dst.plan(&ids, 1 << 20));
    assert!(to.grid().parts() == 1 && 30_000 / 3 > ring::SLOTS);
    p.open(7, 1, &to);
    p.send_all(7, 1, &from);
    for (s, d) in addresses(&from).into_iter().zip(addresses(&to)) {
        assert_eq!(src.read(s, 8), dst.read(d, 8));
    }
}

/// Two threads that sleep between parts: whoever publishes wakes whoever sleeps.
#[test]
fn sleepers_are_woken() {
    let l = layout(4096, 1, KvKind::Mla);
    let (src, dst) = (Pool::new(&l, 512), Pool::new(&l, 512));
    let r = Alone::new(1);
    r.handle.register(&dst.region).unwrap();
    let (said, events) = channel();
    let on_events = Box::new(move |batch: Vec<EngineEvent>| {
        batch.into_iter().for_each(|e| drop(said.send(e)));
    });
    let tx = spawn(Box::new(engine(false)), on_events).unwrap();
    tx.register(&src.region).unwrap();
    let listen =
        Command::Listen { link: LINK, peer: peer(Role::Decode), lanes: 1, receiver: false };
    tx.send(listen).unwrap();
    tx.send(Command::Connect { link: LINK, remote: r.blob.encode() }).unwrap();
    while !matches!(events.recv_timeout(PATIENCE).unwrap(), EngineEvent::LaneUp { .. }) {}
    let ids: Vec<u32> = (0..512).collect();
    let (from, to) = (src.plan(&ids, 4096), dst.plan(&ids, 4096));
    r.open(7, &to);
    let started = Instant::now();
    let mut rng = Rng(9);
    for part in 0..512 {
        // Sometimes asleep, sometimes about to be.
        std::thread::sleep(Duration::from_micros(rng.next() % 200));
        let (grant, part, lane) = (GrantId(7), PartId(part), LaneId(0));
        let pages = from.pages(part).unwrap();
        tx.send(Command::Post(Post { link: LINK, grant, part, lane, pages })).unwrap();
        let answer = events.recv_timeout(PATIENCE).unwrap();
        assert!(matches!(answer, EngineEvent::Acked { .. }), "{answer:?}");
    }
    // A sleeper that nobody wakes looks again after a second.
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    tx.stop();
}

// Pools of others.

#[test]
fn memory_of_others_is_read_by_its_owners_number() {
    let mut rng = Rng(0x1234_5678);
    for (page_bytes, part_bytes) in [(1, 7), (511, 1 << 14), (4096, 1 << 20), (1 << 20, 4 << 20)] {
        for checksum in [false, true] {
            let l = layout(page_bytes, 2, KvKind::Split);
            let (mut src, dst) = (Pool::new(&l, 20), Pool::new(&l, 20));
            src = src.foreign();
            dst.fill(CANARY);
            let mut p = Pair::new(couple(checksum));
            p.tx.register(&src.region).unwrap();
            p.rx.register(&dst.region).unwrap();
            p.connect(1);
            let (from, to) = (rng.distinct(12, 20), rng.distinct(12, 20));
            let (from, to) = (src.plan(&from, part_bytes), dst.plan(&to, part_bytes));
            for address in addresses(&from) {
                let bytes: Vec<u8> = (0..page_bytes).map(|_| (rng.next() >> 32) as u8).collect();
                src.write(address, &bytes);
            }
            p.open(7, 1, &to);
            p.send_all(7, 1, &from);
            let size = page_bytes as usize;
            for (s, d) in addresses(&from).into_iter().zip(addresses(&to)) {
                assert!(src.read(s, size) == dst.read(d, size), "{page_bytes} bytes");
                dst.write(d, &vec![CANARY; size]);
            }
            assert_eq!(dst.touched(), 0);
        }
    }
}

/// Own and foreign memory in one part.
#[test]
fn a_part_may_lie_in_pools_of_both_kinds() {
    let l = layout(4096, 2, KvKind::Mla);
    let (own, other) = (Pool::new(&l, 8), Pool::new(&l, 8).foreign());
    let dst = Pool::new(&l, 8);
    own.fill(1);
    other.fill(2);
    let mut map = (*own.map).clone();
    map.slab_address[1] = other.map.slab_address[1];
    let src = Pool { region: own.region.clone(), layout: l, map: Arc::new(map) };
    let mut p = pair(1, &own.region, &dst.region);
    p.tx.register(&other.region).unwrap();
    let ids = [5, 1, 2, 7];
    let (from, to) = (src.plan(&ids, 1 << 20), dst.plan(&ids, 1 << 20));
    assert_eq!(to.grid().parts(), 1);
    p.open(7, 1, &to);
    p.send_all(7, 1, &from);
    let values: Vec<u8> = addresses(&to).iter().map(|a| dst.read(*a, 1)[0]).collect();
    assert_eq!(values, [1, 1, 1, 1, 2, 2, 2, 2]);
}

/// Runs one of the functions below in a process of its own, as somebody without rights if so asked.
struct Process(Child);

impl Process {
    fn start(what: &str, argument: &str, without_rights: bool) -> Self {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "other_process", "--nocapture"])
            .env("KVLANE_TEST_PROCESS", what)
            .env("KVLANE_TEST_ARGUMENT", argument)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if without_rights {
            command.uid(65534).gid(65534);
        }
        Self(command.spawn().unwrap())
    }
    /// The rest of the line that begins with a word.
    fn says(&mut self, word: &str) -> String {
        let mut lines = BufReader::new(self.0.stdout.as_mut().unwrap());
        loop {
            let mut line = String::new();
            assert!(lines.read_line(&mut line).unwrap() > 0, "the process ended without {word}");
            if let Some((_, rest)) = line.trim_end().split_once(word) {
                return rest.trim().to_string();
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap()).collect()
}

/// What [`Process`] runs; nothing in a test of its own.
#[test]
fn other_process() {
    let argument = std::env::var("KVLANE_TEST_ARGUMENT").unwrap_or_default();
    match std::env::var("KVLANE_TEST_PROCESS").as_deref() {
        Ok("receiver") => receive_one(),
        Ok("sender") => send_one(&unhex(&argument)),
        _ => {}
    }
}

/// Receives one part into block 3, and says what became of it.
fn receive_one() {
    let dst = Pool::new(&layout(4096, 1, KvKind::Mla), 4);
    let r = Alone::new(1);
    r.handle.register(&dst.region).unwrap();
    r.open(7, &dst.plan(&[3], 4096));
    println!("blob {}", hex(&r.blob.encode()));
    let end =
        r.wait("part", |e| matches!(e, EngineEvent::Arrived { .. } | EngineEvent::Scrapped { .. }));
    match end {
        EngineEvent::Scrapped { why, .. } => println!("refused {why}"),
        _ => println!("arrived {}", dst.read(dst.region.address() + 3 * 4096, 1)[0]),
    }
    // Until the other side has read it.
    let _ = std::io::stdin().read(&mut [0]);
}

/// Sends one part of 64 MiB to a receiver, and stays.
fn send_one(blob: &[u8]) {
    let src = Pool::new(&layout(1 << 20, 1, KvKind::Mla), 64);
    src.fill(1);
    let plan = src.plan(&(0..64).collect::<Vec<_>>(), 64 << 20);
    let mut p = Pair::new(couple(false));
    p.tx.register(&src.region).unwrap();
    p.tell_tx(Command::Listen { link: LINK, peer: peer(Role::Decode), lanes: 1, receiver: false });
    p.tell_tx(Command::Connect { link: LINK, remote: blob.to_vec() });
    p.until("lane", |p| p.from_tx.iter().any(|e| matches!(e, EngineEvent::LaneUp { .. })));
    p.post(7, 0, 0, &plan);
    println!("posted");
    p.until("end", |_| false);
}

/// Needs root, to start a receiver that has no rights: CI has it.
#[test]
fn memory_that_the_kernel_withholds_is_refused_with_the_fix() {
    let l = layout(4096, 1, KvKind::Mla);
    let src = Pool::new(&l, 4).foreign();
    src.fill(9);
    for without_rights in [false, true] {
        let mut other = Process::start("receiver", "", without_rights);
        let blob = unhex(&other.says("blob "));
        let mut p = Pair::new(couple(false));
        p.tx.register(&src.region).unwrap();
        let listen =
            Command::Listen { link: LINK, peer: peer(Role::Decode), lanes: 1, receiver: false };
        p.tell_tx(listen);
        p.tell_tx(Command::Connect { link: LINK, remote: blob });
        p.until("lane", |p| p.from_tx.iter().any(|e| matches!(e, EngineEvent::LaneUp { .. })));
        p.post(7, 0, 0, &src.plan(&[1], 4096));
        p.until("answer", |p| p.acked() + p.nacked().len() > 0);
        if !without_rights {
            assert_eq!((p.acked(), other.says("arrived ")), (1, "9".into()));
            continue;
        }
        let text = other.says("refused ");
        assert!(text.contains("CAP_SYS_PTRACE") && text.contains("ptrace_scope"), "{text}");
        let Some(EngineEvent::Nacked { why, .. }) = p.from_tx.last() else { panic!() };
        assert_eq!(why.kind, ErrorKind::Memory);
        assert!(why.hint.contains("ptrace_scope"), "{why}");
    }
}

/// Read-only mappings of a pool in this process.
fn imports(pool: &Pool) -> usize {
    let fd = pool.region.memory().fd().unwrap().as_raw_fd();
    let inode = std::fs::metadata(format!("/proc/self/fd/{fd}")).unwrap().ino().to_string();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let of_pool = |line: &&str| {
        let mut words = line.split_whitespace();
        words.nth(1) == Some("r--s") && words.nth(2) == Some(&inode)
    };
    maps.lines().filter(of_pool).count()
}

#[test]
fn a_sender_killed_in_a_copy_costs_its_lane_only() {
    let l = layout(1 << 20, 1, KvKind::Mla);
    let dst = Pool::new(&l, 64);
    dst.fill(CANARY);
    let mut p = Pair::new(couple(false));
    p.rx.register(&dst.region).unwrap();
    p.tell_rx(Command::Listen { link: LINK, peer: peer(Role::Prefill), lanes: 1, receiver: true });
    p.poll_rx();
    let EngineEvent::Local { blob, .. } = p.from_rx.remove(0) else { panic!() };
    let blob = blob.unwrap();
    let ids: Vec<u32> = (0..64).collect();
    let to = dst.plan(&ids, 64 << 20);
    p.open(7, 1, &to);
    for _ in 0..2 {
        let mut sender = Process::start("sender", &hex(&blob), false);
        let first = addresses(&to)[0];
        p.until("first bytes", |_| dst.read(first, 1) == [1]);
        assert_eq!(dst.read(addresses(&to)[63], 1), [CANARY], "half-way");
        sender.0.kill().unwrap();
        sender.0.wait().unwrap();
        // As after a sleep, so that sockets are looked at.
        p.rx.park(&mut Vec::new());
        p.until("end", |p| !downs(&p.from_rx).is_empty());
        assert_eq!(downs(&p.from_rx), [ErrorKind::PeerLost]);
        assert_eq!(arrivals(&p.from_rx), 0);
        p.clear();
        dst.fill(CANARY);
        p.settle();
        assert_eq!(dst.touched(), 0);
    }
    // The next one is served.
    let src = Pool::new(&l, 64);
    src.fill(5);
    p.tx.register(&src.region).unwrap();
    p.tell_tx(Command::Listen { link: LINK, peer: peer(Role::Decode), lanes: 1, receiver: false });
    p.tell_tx(Command::Connect { link: LINK, remote: blob });
    p.until("lane", |p| p.from_tx.iter().any(|e| matches!(e, EngineEvent::LaneUp { .. })));
    p.clear();
    p.send_all(7, 1, &src.plan(&ids, 64 << 20));
    assert_eq!(dst.read(addresses(&to)[63], 1), [5]);
}

#[test]
fn imports_are_one_for_all_lanes_and_go_with_their_link_or_pool() {
    let l = layout(4096, 1, KvKind::Mla);
    let (src, more, dst) = (Pool::new(&l, 16), Pool::new(&l, 16), Pool::new(&l, 16));
    let mut p = pair(4, &src.region, &dst.region);
    assert_eq!(imports(&src), 1);
    p.tx.register(&more.region).unwrap();
    p.until("second pool", |_| imports(&more) == 1);
    p.tx.unregister(&src.region).unwrap();
    p.until("one pool", |_| imports(&src) == 0);
    p.tell_rx(Command::Close { link: LINK });
    // The thread that makes imports ready may still hold one.
    p.until("no pool", |_| imports(&more) == 0);
}

// Strangers and liars.

/// A receiver on its own thread, with the test as its sender.
struct Alone {
    handle: EngineHandle,
    events: Receiver<EngineEvent>,
    blob: Blob,
}

impl Alone {
    fn new(lanes: u16) -> Self {
        let (tx, events) = channel();
        let on_events = Box::new(move |batch: Vec<EngineEvent>| {
            batch.into_iter().for_each(|e| drop(tx.send(e)));
        });
        let handle = spawn(Box::new(engine(false)), on_events).unwrap();
        let listen =
            Command::Listen { link: LINK, peer: peer(Role::Prefill), lanes, receiver: true };
        handle.send(listen).unwrap();
        let EngineEvent::Local { blob, .. } = events.recv_timeout(PATIENCE).unwrap() else {
            panic!("no blob")
        };
        let blob = Blob::decode(&blob.unwrap()).unwrap();
        Self { handle, events, blob }
    }
    fn door(&self) -> &Door {
        self.blob.door.as_ref().unwrap()
    }
    fn stranger(&self) -> Socket {
        let started = Instant::now();
        loop {
            match Socket::dial(&self.door().name) {
                Ok(socket) => return socket,
                Err(e) if e.kind() == WouldBlock && started.elapsed() < PATIENCE => {
                    std::thread::yield_now();
                }
                Err(e) => panic!("{e}"),
            }
        }
    }
    fn welcomed(&self, lane: u16) -> Socket {
        let socket = self.stranger();
        socket.send(&Message::Hello { lane, token: self.door().token }.encode(), &[]).unwrap();
        assert_eq!(hear(&socket), Some(Message::Welcome { proof: self.door().proof }));
        socket
    }
    fn liar(&self, lane: u16, pool: &Memory) -> Liar {
        let serves = Words::new(limits::ROOMS_MAX, true).unwrap();
        serves.words()[0].store(1, Ordering::SeqCst);
        self.liar_with(lane, pool, &serves)
    }
    fn liar_with(&self, lane: u16, pool: &Memory, serves: &Words) -> Liar {
        let socket = self.welcomed(lane);
        let ring = SenderRing::new(Words::new(ring::WORDS, false).unwrap());
        let fds = [ring.shared().fd(), serves.fd()];
        socket.send(&Message::Share.encode(), &fds).unwrap();
        let announced = Message::Pool { id: 0, address: 0, bytes: pool.bytes() };
        socket.send(&announced.encode(), &[pool.fd().unwrap()]).unwrap();
        socket.send(&Message::Begin.encode(), &[]).unwrap();
        assert_eq!(hear(&socket), Some(Message::Ready));
        self.wait("lane", |e| matches!(e, EngineEvent::LaneUp { lane: l, .. } if l.0 == lane));
        Liar { socket, ring }
    }
    fn wait(&self, what: &str, want: impl Fn(&EngineEvent) -> bool) -> EngineEvent {
        loop {
            match self.events.recv_timeout(PATIENCE) {
                Ok(e) if want(&e) => return e,
                Ok(_) => {}
                Err(e) => panic!("no {what}: {e}"),
            }
        }
    }
    fn open(&self, grant: u64, plan: &Arc<Plan>) {
        let lanes = (0..self.blob.lanes).map(LaneId).collect();
        let sources = vec![OpenSource { link: LINK, lanes, plan: plan.clone() }];
        let open = OpenGrant { grant: GrantId(grant), sources };
        self.handle.send(Command::Open(open)).unwrap();
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        self.handle.stop();
    }
}

/// What comes next over a socket; `None` at its end.
fn hear(socket: &Socket) -> Option<Message> {
    let started = Instant::now();
    let (mut bytes, mut fds) = ([0; MESSAGE_BYTES], Vec::<OwnedFd>::new());
    loop {
        match socket.receive(&mut bytes, &mut fds) {
            Ok(0) => return None,
            Ok(n) => match Message::decode(&bytes[..n]).unwrap() {
                Message::Bell => {}
                message => return Some(message),
            },
            Err(e) if e.kind() == WouldBlock => {
                assert!(started.elapsed() < PATIENCE, "nothing was said");
                std::thread::yield_now();
            }
            Err(_) => return None,
        }
    }
}

/// A sender with the right token, which then does as it likes.
struct Liar {
    socket: Socket,
    ring: SenderRing,
}

impl Liar {
    fn push(&mut self, body: [u64; SLOT_BODY]) {
        assert!(self.ring.has_room().unwrap());
        self.ring.push(body);
        if self.ring.to_wake() {
            let _ = self.socket.send(&Message::Bell.encode(), &[]);
        }
    }
    fn ack(&mut self) -> Ack {
        let started = Instant::now();
        loop {
            if let Some(ack) = self.ring.ack().unwrap() {
                return ack;
            }
            assert!(started.elapsed() < PATIENCE, "no ack");
            std::thread::yield_now();
        }
    }
    /// Describes a part and takes its answer.
    fn says(&mut self, head: Part, more: &[Extent]) -> Status {
        self.push(head.encode());
        for extents in more.chunks(3) {
            self.push(encode_more(extents));
        }
        let ack = self.ack();
        assert_eq!((ack.grant, ack.part), (head.grant, head.part));
        ack.status
    }
}

fn extent(pool: u32, offset: u64, bytes: u32) -> Extent {
    Extent { pool, offset, bytes }
}
fn part(grant: u64, part: u32, bytes: u32, extents: u32, first: Extent) -> Part {
    Part {
        grant: GrantId(grant),
        part: PartId(part),
        bytes,
        extents,
        crc32c: None,
        serve: ServeWord { index: 0, value: 1 },
        first: Some(first),
    }
}

#[test]
fn extents_that_lie_are_refused_and_the_lane_lives_on() {
    let l = layout(4096, 1, KvKind::Mla);
    let dst = Pool::new(&l, 8);
    dst.fill(CANARY);
    let pool = Memory::memfd(8 * 4096, false).unwrap();
    pool.fill(0, 8 * 4096, 1).unwrap();
    let r = Alone::new(1);
    r.handle.register(&dst.region).unwrap();
    let mut liar = r.liar(0, &pool);
    let plan = dst.plan(&[3, 1, 6, 0], 2 * 4096);
    r.open(7, &plan);
    let half = |pool, offset| extent(pool, offset, 4096);
    let end = 8 * 4096;
    for (first, second, status) in [
        // Behind the pool, over its end, over the end of all numbers, in no pool.
        (half(0, end), half(0, 0), Status::NoSource),
        (half(0, end - 4095), half(0, 0), Status::NoSource),
        (half(0, u64::MAX - 10), half(0, 0), Status::NoSource),
        (half(9, 0), half(0, 0), Status::NoSource),
        (half(0, 0), half(0, u64::MAX), Status::NoSource),
        // More and less than the part.
        (half(0, 0), extent(0, 0, 4097), Status::WrongPart),
        (half(0, 0), extent(0, 0, u32::MAX), Status::WrongPart),
        (half(0, 0), extent(0, 0, 4095), Status::WrongPart),
    ] {
        let said = liar.says(part(7, 0, 8192, 2, first), &[second]);
        assert_eq!(said, status, "{first:?} {second:?}");
    }
    // Serve words that are not there, or say something else.
    for (index, value) in [(0, 2), (0, 0), (1, 1), (limits::ROOMS_MAX as u32, 0), (u32::MAX, 1)] {
        let mut head = part(7, 0, 8192, 1, extent(0, 0, 8192));
        head.serve = ServeWord { index, value };
        assert_eq!(liar.says(head, &[]), Status::Changed, "{index} {value}");
    }
    // Other grants, parts, lengths, checksums.
    let whole = extent(0, 0, 8192);
    assert_eq!(liar.says(part(8, 0, 8192, 1, whole), &[]), Status::NoGrant);
    assert_eq!(liar.says(part(7, 2, 8192, 1, whole), &[]), Status::WrongPart);
    assert_eq!(liar.says(part(7, 0, 8191, 1, extent(0, 0, 8191)), &[]), Status::WrongPart);
    let mut head = part(7, 0, 8192, 1, whole);
    head.crc32c = Some(crc32c::crc32c(&[1; 8192]) ^ 1);
    assert_eq!(liar.says(head, &[]), Status::Corrupt);
    let answers = || r.events.try_iter().collect::<Vec<_>>();
    assert_eq!(arrivals(&answers()), 0);
    // What is refused half-way may have been copied, into pages of the part only.
    addresses(&plan)[..2].iter().for_each(|a| dst.write(*a, &[CANARY; 4096]));
    assert_eq!(dst.touched(), 0);
    // The truth.
    head.crc32c = Some(crc32c::crc32c(&[1; 8192]));
    assert_eq!(liar.says(head, &[]), Status::Landed);
    assert_eq!(dst.touched(), 8192);
    // Once landed, a part is final and not news.
    pool.fill(0, 8192, 2).unwrap();
    assert_eq!(liar.says(part(7, 0, 8192, 1, whole), &[]), Status::Landed);
    assert_eq!(dst.read(addresses(&plan)[0], 4096), [1; 4096]);
    r.wait("arrival", |e| matches!(e, EngineEvent::Arrived { .. }));
    assert_eq!(arrivals(&answers()), 0);
}

#[test]
fn a_broken_ring_ends_that_lane_only() {
    let l = layout(4096, 1, KvKind::Mla);
    let dst = Pool::new(&l, 8);
    dst.fill(CANARY);
    let pool = Memory::memfd(8 * 4096, false).unwrap();
    pool.fill(0, 8 * 4096, 1).unwrap();
    let r = Alone::new(2);
    r.handle.register(&dst.region).unwrap();
    r.open(7, &dst.plan(&[3, 1], 4096));
    let mut good = r.liar(1, &pool);
    let fine = part(7, 0, 4096, 1, extent(0, 0, 4096));
    type Break = fn(&mut Liar);
    let breaks: [Break; 6] = [
        |liar| liar.push([u64::MAX; SLOT_BODY]),
        |liar| liar.push(encode_more(&[extent(0, 0, 1)])),
        |liar| {
            // A part within a part, and more extents than were said.
            liar.push(part(7, 0, 4096, 2, extent(0, 0, 2048)).encode());
            liar.push(part(7, 1, 4096, 1, extent(0, 0, 4096)).encode());
        },
        |liar| {
            liar.push(part(7, 0, 4096, 2, extent(0, 0, 2048)).encode());
            liar.push(encode_more(&[extent(0, 0, 1024), extent(0, 0, 1024)]));
        },
        |liar| {
            // Sequence numbers, all of them.
            for word in &liar.ring.shared().words()[ring::WORDS - 2048 * 8..] {
                word.store(77, Ordering::SeqCst);
            }
            let _ = liar.socket.send(&Message::Bell.encode(), &[]);
        },
        |liar| {
            let _ = liar.socket.send(b"something else than a message", &[]);
        },
    ];
    for (i, broken) in breaks.into_iter().enumerate() {
        let mut bad = r.liar(0, &pool);
        broken(&mut bad);
        let end = r.wait("end", |e| matches!(e, EngineEvent::LaneDown { .. }));
        let EngineEvent::LaneDown { lane: LaneId(0), why, .. } = end else { panic!("{end:?}") };
        assert_eq!(why.kind, ErrorKind::Malformed, "{i}: {why}");
    }
    assert_eq!(good.says(fine, &[]), Status::Landed);
}

#[test]
fn descriptors_that_are_not_what_they_should_be_are_turned_away() {
    let r = Alone::new(1);
    let pool = Memory::memfd(8192, false).unwrap();
    let ring = Words::new(ring::WORDS, false).unwrap();
    let serves = Words::new(limits::ROOMS_MAX, true).unwrap();
    let short = Words::new(ring::WORDS / 2, false).unwrap();
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    let (pipe, _other) = std::io::pipe().unwrap();
    let (ring, serves, short) = (ring.fd(), serves.fd(), short.fd());
    let good: &[BorrowedFd<'_>] = &[ring, serves];
    let pool_of = |bytes| Message::Pool { id: 0, address: 0, bytes };
    let of_pool = pool.fd().unwrap();
    type Said<'a> = Vec<(Message, Vec<BorrowedFd<'a>>)>;
    let cases: Vec<(&str, Said<'_>, Turned)> = vec![
        ("no descriptors", vec![(Message::Share, vec![])], Turned::Order),
        ("one", vec![(Message::Share, vec![ring])], Turned::Order),
        ("three", vec![(Message::Share, vec![ring, serves, serves])], Turned::Order),
        ("short ring", vec![(Message::Share, vec![short, serves])], Turned::Descriptor),
        ("read-only ring", vec![(Message::Share, vec![serves, ring])], Turned::Descriptor),
        ("a file", vec![(Message::Share, vec![file.as_fd(), serves])], Turned::Descriptor),
        ("a pipe", vec![(Message::Share, vec![ring, pipe.as_fd()])], Turned::Descriptor),
        ("twice", vec![(Message::Share, good.to_vec()); 2], Turned::Order),
        ("pool first", vec![(pool_of(8192), vec![of_pool])], Turned::Order),
        ("begin first", vec![(Message::Begin, vec![])], Turned::Order),
        (
            "longer than it is",
            vec![(Message::Share, good.to_vec()), (pool_of(8193), vec![of_pool])],
            Turned::Descriptor,
        ),
        (
            "longer than anything",
            vec![(Message::Share, good.to_vec()), (pool_of(u64::MAX), vec![of_pool])],
            Turned::Descriptor,
        ),
        (
            "nothing",
            vec![(Message::Share, good.to_vec()), (pool_of(0), vec![of_pool])],
            Turned::Descriptor,
        ),
        (
            "neither own nor foreign",
            vec![(Message::Share, good.to_vec()), (pool_of(8192), vec![])],
            Turned::Order,
        ),
        (
            "foreign beyond the end",
            vec![
                (Message::Share, good.to_vec()),
                (Message::Pool { id: 0, address: u64::MAX - 5, bytes: 100 }, vec![]),
            ],
            Turned::Order,
        ),
        (
            "a number twice",
            vec![
                (Message::Share, good.to_vec()),
                (pool_of(8192), vec![of_pool]),
                (pool_of(8192), vec![of_pool]),
            ],
            Turned::Order,
        ),
        (
            "a bell too early",
            vec![(Message::Share, good.to_vec()), (Message::Bell, vec![])],
            Turned::Order,
        ),
        (
            "a pool that nobody knows",
            vec![(Message::Share, good.to_vec()), (Message::Forget { id: 3 }, vec![])],
            Turned::Order,
        ),
    ];
    for (what, said, turned) in cases {
        let socket = r.welcomed(0);
        for (message, fds) in said {
            socket.send(&message.encode(), &fds).unwrap();
        }
        assert_eq!(hear(&socket), Some(Message::Refuse(turned)), "{what}");
        assert_eq!(hear(&socket), None, "{what}");
    }
    let socket = r.welcomed(0);
    socket.send(&Message::Share.encode(), good).unwrap();
    for id in 0..=REGIONS_MAX as u32 {
        let message = Message::Pool { id, address: 0, bytes: 8192 }.encode();
        // The engine takes a few in a turn.
        while let Err(e) = socket.send(&message, &[of_pool]) {
            assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    assert_eq!(hear(&socket), Some(Message::Refuse(Turned::Pools)));
    // It is not the end of anything else.
    r.liar(0, &pool);
}

#[test]
fn strangers_cost_themselves_only() {
    let l = layout(4096, 1, KvKind::Mla);
    let dst = Pool::new(&l, 4);
    let pool = Memory::memfd(8192, false).unwrap();
    let r = Alone::new(2);
    r.handle.register(&dst.region).unwrap();
    let mut lane = r.liar(0, &pool);
    r.open(7, &dst.plan(&[1], 4096));
    let silent: Vec<Socket> = (0..20).map(|_| r.stranger()).collect();
    let token = r.door().token;
    for hello in [
        Message::Hello { lane: 0, token: [9; 16] }.encode().to_vec(),
        Message::Hello { lane: 2, token }.encode().to_vec(),
        Message::Hello { lane: u16::MAX, token }.encode().to_vec(),
        Message::Begin.encode().to_vec(),
        vec![0xff; MESSAGE_BYTES],
        vec![0xff; MESSAGE_BYTES - 1],
        vec![0xff; 10_000],
        b"GET / HTTP/1.1\r\n".to_vec(),
    ] {
        let s = r.stranger();
        s.send(&hello, &[]).unwrap();
        assert_eq!(hear(&s), None, "{hello:?}");
    }
    // Nobody asked for descriptors yet.
    let s = r.stranger();
    s.send(&Message::Hello { lane: 1, token }.encode(), &[pool.fd().unwrap()]).unwrap();
    assert_eq!(hear(&s), None);
    for i in 0..1000u32 {
        // The engine may have closed already.
        let _ = r.stranger().send(&[i as u8; 40][..1 + i as usize % 40], &[]);
    }
    assert_eq!(lane.says(part(7, 0, 4096, 1, extent(0, 0, 4096)), &[]), Status::Landed);
    r.liar(1, &pool);
    // The oldest strangers made way for so many others.
    assert_eq!(hear(&silent[0]), None);
}

#[test]
fn a_silent_stranger_is_closed_at_its_deadline() {
    let mut p = Pair::new(couple(false));
    let rx = engine(false);
    let s = Socket::dial(rx.socket()).unwrap();
    p.rx = Box::new(rx);
    p.settle();
    let (mut bytes, mut fds) = ([0; MESSAGE_BYTES], Vec::new());
    assert_eq!(s.receive(&mut bytes, &mut fds).unwrap_err().kind(), WouldBlock);
    p.skip_ms = limits::HANDSHAKE_MS + 1;
    p.until("end", |_| matches!(s.receive(&mut bytes, &mut fds), Ok(0)));
}

/// Whoever listens under the receiver's name without its blob learns the token, and gets nothing.
#[test]
fn memory_is_shared_only_with_who_proves_to_have_the_blob() {
    let src = Pool::new(&layout(4096, 1, KvKind::Mla), 4);
    let name = Name::Abstract(format!("kvlane-impostor-{}", std::process::id()).into_bytes());
    let listener = Listener::bind(name.clone()).unwrap();
    let mut p = Pair::new(couple(false));
    p.tx.register(&src.region).unwrap();
    p.tell_tx(Command::Listen { link: LINK, peer: peer(Role::Decode), lanes: 1, receiver: false });
    let door = Door { token: [1; 16], proof: [2; 16], name };
    let remote = Blob { lanes: 1, door: Some(door) }.encode();
    p.tell_tx(Command::Connect { link: LINK, remote });
    let (mut bytes, mut fds) = ([0; MESSAGE_BYTES], Vec::new());
    let socket = listener.accept().unwrap();
    p.until("hello", |_| socket.receive(&mut bytes, &mut fds).is_ok());
    assert_eq!(Message::decode(&bytes), Some(Message::Hello { lane: 0, token: [1; 16] }));
    socket.send(&Message::Welcome { proof: [3; 16] }.encode(), &[]).unwrap();
    p.until("end", |p| !downs(&p.from_tx).is_empty());
    assert_eq!(downs(&p.from_tx), [ErrorKind::Malformed]);
    assert_eq!((socket.receive(&mut bytes, &mut fds).unwrap(), fds.len()), (0, 0));
    // With the proof, it is given what a receiver is given.
    let mut second = None;
    p.until("dial", |_| {
        second = listener.accept().ok();
        second.is_some()
    });
    let socket = second.unwrap();
    p.until("hello", |_| socket.receive(&mut bytes, &mut fds).is_ok());
    socket.send(&Message::Welcome { proof: [2; 16] }.encode(), &[]).unwrap();
    p.until("memory", |_| socket.receive(&mut bytes, &mut fds).is_ok());
    assert_eq!((Message::decode(&bytes), fds.len()), (Some(Message::Share), 2));
}

#[test]
fn a_socket_that_cannot_be_reached_is_named_with_the_fix() {
    let directory = scratch("gone");
    let file = Name::File(directory.join("kvlane-x.sock"));
    let other = Name::Abstract(b"kvlane-nobody-listens-here".to_vec());
    for (name, words) in [(other, "network namespace"), (file, "mount it")] {
        let mut p = Pair::new(couple(false));
        let listen =
            Command::Listen { link: LINK, peer: peer(Role::Decode), lanes: 2, receiver: false };
        p.tell_tx(listen);
        let said = name.to_string();
        let door = Door { token: [1; 16], proof: [2; 16], name };
        let remote = Blob { lanes: 2, door: Some(door) }.encode();
        p.poll_tx();
        p.clear();
        p.tell_tx(Command::Connect { link: LINK, remote });
        p.poll_tx();
        let Some(EngineEvent::Local { blob: Err(e), link: LinkId(1) }) = p.from_tx.pop() else {
            panic!("{:?}", p.from_tx)
        };
        let text = e.to_string();
        assert_eq!(e.kind(), ErrorKind::PeerLost);
        assert!(text.contains(&said) && text.contains(words) && text.contains("tcp"), "{text}");
    }
    std::fs::remove_dir_all(directory).unwrap();
}

fn scratch(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("kvlane-shm-{name}-{}", std::process::id()));
    std::fs::DirBuilder::new().mode(0o700).create(&path).unwrap();
    path
}

#[test]
fn a_directory_serves_as_well_and_is_kept_clean() {
    let directory = scratch("directory");
    let config = || ShmConfig { directory: Some(directory.clone()), checksum: false };
    let files = || std::fs::read_dir(&directory).unwrap().count();
    // As if its process had been killed: the file stays, nobody listens.
    let dead = ShmEngine::new(config()).unwrap();
    let Name::File(path) = dead.socket().clone() else { panic!() };
    let kept = directory.join("kept");
    std::fs::hard_link(&path, &kept).unwrap();
    drop(dead);
    assert_eq!(files(), 1);
    std::fs::rename(&kept, &path).unwrap();
    let live = ShmEngine::new(config()).unwrap();
    assert!(!path.exists(), "a dead socket was left");
    let other = ShmEngine::new(config()).unwrap();
    assert_eq!(files(), 2);
    let l = layout(4096, 1, KvKind::Mla);
    let (src, dst) = (Pool::new(&l, 4), Pool::new(&l, 4));
    src.fill(4);
    let mut p = Pair::new((Box::new(live), Box::new(other)));
    p.tx.register(&src.region).unwrap();
    p.rx.register(&dst.region).unwrap();
    p.connect(1);
    p.open(7, 1, &dst.plan(&[2], 4096));
    p.send_all(7, 1, &src.plan(&[1], 4096));
    assert_eq!(dst.read(dst.region.address() + 2 * 4096, 1), [4]);
    drop(p);
    assert_eq!(files(), 0);
    std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o755)).unwrap();
    let e = ShmEngine::new(config()).err().unwrap();
    assert!(e.kind() == ErrorKind::Config && e.to_string().contains("mode=755"), "{e}");
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn more_pools_than_receivers_take_are_refused() {
    let mut e = engine(false);
    let regions: Vec<_> = (0..=REGIONS_MAX).map(|_| Region::memfd(4096).unwrap()).collect();
    regions[..REGIONS_MAX].iter().for_each(|r| e.register(r).unwrap());
    let refused = e.register(&regions[REGIONS_MAX]).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::LimitExceeded);
    // A refusal changes nothing.
    assert_eq!(e.unregister(&regions[REGIONS_MAX]).unwrap_err().kind(), ErrorKind::Memory);
    e.unregister(&regions[0]).unwrap();
    e.register(&regions[REGIONS_MAX]).unwrap();
    assert_eq!(regions[0].device(), Device::Host);
}

/// A sender that overwrites its pages all the time, and raises the word before as it must: parts that
/// arrive are of one writing.
#[test]
fn no_part_that_arrives_is_torn() {
    const PART: u64 = 1 << 16;
    let l = layout(PART as u32, 1, KvKind::Mla);
    let dst = Pool::new(&l, 4);
    let pool = Arc::new(Memory::memfd(PART, false).unwrap());
    let r = Alone::new(1);
    r.handle.register(&dst.region).unwrap();
    let serves = Arc::new(Words::new(limits::ROOMS_MAX, true).unwrap());
    let mut liar = r.liar_with(0, &pool, &serves);
    let stop = Arc::new(AtomicBool::new(false));
    let writer = {
        let (pool, serves, stop) = (pool.clone(), serves.clone(), stop.clone());
        std::thread::spawn(move || {
            let mut writing = 0u8;
            while !stop.load(Ordering::Relaxed) {
                // Odd while it writes, so that such a value is never given out.
                serves.words()[0].fetch_add(1, Ordering::SeqCst);
                writing = writing.wrapping_add(1);
                pool.fill(0, PART, writing).unwrap();
                serves.words()[0].fetch_add(1, Ordering::SeqCst);
                std::thread::sleep(Duration::from_micros(100));
            }
        })
    };
    let (mut whole, mut void) = (0, 0);
    let plan = dst.plan(&[2], PART);
    let at = addresses(&plan)[0];
    let started = Instant::now();
    for n in 0.. {
        if (whole >= 100 && void >= 5) || started.elapsed() > PATIENCE {
            break;
        }
        let value = serves.words()[0].load(Ordering::SeqCst);
        if value % 2 == 1 {
            continue;
        }
        let grant = 100 + n;
        r.open(grant, &plan);
        let mut head = part(grant, 0, PART as u32, 1, extent(0, 0, PART as u32));
        head.serve = ServeWord { index: 0, value };
        match liar.says(head, &[]) {
            Status::Landed => {
                let got = dst.read(at, PART as usize);
                assert!(got.iter().all(|b| *b == got[0]), "a torn part arrived");
                whole += 1;
            }
            Status::Changed => void += 1,
            // The order to open it is still on its way.
            Status::NoGrant => {}
            other => panic!("{other:?}"),
        }
        let how = FenceHow::Close;
        r.handle.send(Command::Fence { grant: GrantId(grant), how }).unwrap();
    }
    stop.store(true, Ordering::Relaxed);
    writer.join().unwrap();
    assert!(whole >= 100 && void >= 5, "{whole} arrived, {void} void");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..Default::default() })]

    /// Whatever slots a peer with the right token writes: only pages of the open grant's parts are
    /// written, and only with bytes of its own pool.
    #[test]
    fn a_lying_sender_writes_only_what_its_grant_names(
        slots in proptest::collection::vec(
            (0u64..3, 6u64..9, 0u32..3, prop_oneof![Just(128u32), 0u32..400], 0u32..4, any::<[u64; 7]>(),
             proptest::collection::vec((0u32..2, prop_oneof![0u64..600, any::<u64>()], 1u32..200), 1..4)),
            1..20,
        ),
    ) {
        let l = layout(64, 1, KvKind::Mla);
        let dst = Pool::new(&l, 32);
        dst.fill(CANARY);
        let pool = Memory::memfd(512, false).unwrap();
        pool.fill(0, 512, 1).unwrap();
        let r = Alone::new(1);
        r.handle.register(&dst.region).unwrap();
        let (named, other) = (dst.plan(&[9, 3, 20, 4], 128), dst.plan(&[1, 2, 5, 6], 128));
        r.open(7, &named);
        r.open(8, &other);
        r.handle.send(Command::Fence { grant: GrantId(8), how: FenceHow::Close }).unwrap();
        r.wait("proof", |e| matches!(e, EngineEvent::Fenced(_)));
        let mut liar = r.liar(0, &pool);
        for (kind, grant, number, bytes, extents, noise, places) in slots {
            let places: Vec<Extent> =
                places.into_iter().map(|(pool, offset, n)| extent(pool, offset, n)).collect();
            match kind {
                0 => liar.push(noise),
                1 => liar.push(encode_more(&places)),
                _ => liar.push(part(grant, number, bytes, extents, places[0]).encode()),
            }
        }
        drop(liar);
        r.wait("end", |e| matches!(e, EngineEvent::LaneDown { .. }));
        for address in addresses(&named) {
            let found = dst.read(address, 64);
            prop_assert!(found.iter().all(|b| *b == 1 || *b == CANARY));
            dst.write(address, &[CANARY; 64]);
        }
        prop_assert_eq!(dst.touched(), 0);
    }
}
