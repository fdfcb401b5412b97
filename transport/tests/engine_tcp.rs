//! The `tcp` engine against its like, against strangers, and against peers that break its rules.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)] // Tests fail by panicking.

mod engine_conformance;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};

use engine_conformance::{CANARY, LINK, PATIENCE, Pair, Pool, layout, peer, run};
use proptest::prelude::*;

use kvlane_proto::layout::KvKind;
use kvlane_proto::{ErrorKind, GrantId, LaneId, PartId, Role, limits};
use kvlane_transport::engine::driver::{EngineHandle, spawn};
use kvlane_transport::engine::tcp::wire::{
    ACK_BYTES, Ack, Blob, HEADER_BYTES, HELLO_BYTES, Header, Hello, Status,
};
use kvlane_transport::engine::tcp::{TcpConfig, TcpEngine};
use kvlane_transport::engine::{Command, Engine, EngineEvent, FenceHow, OpenGrant, OpenSource};

fn engine(checksum: bool) -> TcpEngine {
    TcpEngine::new(TcpConfig { checksum, ..TcpConfig::default() }).unwrap()
}
fn couple(checksum: bool) -> (Box<dyn Engine>, Box<dyn Engine>) {
    (Box::new(engine(checksum)), Box::new(engine(false)))
}

#[test]
fn conforms() {
    run(&|| couple(false));
}

#[test]
fn conforms_with_checksums() {
    run(&|| couple(true));
}

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
    fn stranger(&self) -> TcpStream {
        let s = TcpStream::connect(self.blob.addresses[0]).unwrap();
        s.set_read_timeout(Some(PATIENCE)).unwrap();
        s
    }
    fn lane(&self, lane: u16) -> TcpStream {
        let mut s = self.stranger();
        s.write_all(&Hello { lane, token: self.blob.token }.encode()).unwrap();
        assert_eq!(ack(&mut s), Ack::WELCOME);
        self.wait("lane", |e| matches!(e, EngineEvent::LaneUp { lane: l, .. } if l.0 == lane));
        s
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
    fn open(&self, grant: u64, plan: &std::sync::Arc<kvlane_proto::Plan>) {
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

fn ack(s: &mut TcpStream) -> Ack {
    let mut bytes = [0; ACK_BYTES];
    s.read_exact(&mut bytes).unwrap();
    Ack::decode(&bytes).unwrap()
}
fn header(grant: u64, part: u32, bytes: u32, crc32c: Option<u32>) -> [u8; HEADER_BYTES] {
    Header { grant: GrantId(grant), part: PartId(part), bytes, crc32c }.encode()
}
fn closed(s: &mut TcpStream) -> bool {
    // A reset is an end as well: the engine closed with bytes of ours unread.
    matches!(s.read(&mut [0; 1]), Ok(0) | Err(_))
}

#[test]
fn a_wrong_checksum_is_not_an_arrival_and_the_lane_lives_on() {
    let l = layout(4096, 1, KvKind::Mla);
    let dst = Pool::new(&l, 4);
    dst.fill(CANARY);
    let r = Alone::new(1);
    r.handle.register(&dst.region).unwrap();
    let mut lane = r.lane(0);
    let plan = dst.plan(&[2, 0], 8192);
    r.open(7, &plan);
    let body: Vec<u8> = (0..8192u32).map(|i| (i % 251) as u8).collect();
    lane.write_all(&header(7, 0, 8192, Some(crc32c::crc32c(&body) ^ 1))).unwrap();
    lane.write_all(&body).unwrap();
    assert_eq!(ack(&mut lane).status, Status::Corrupt);
    let first = r.wait("verdict", |e| {
        matches!(e, EngineEvent::Arrived { .. } | EngineEvent::Scrapped { .. })
    });
    let EngineEvent::Scrapped { why, bytes: 8192, .. } = first else { panic!("{first:?}") };
    assert_eq!(why.kind, ErrorKind::Corrupt);
    // Byte by byte, so that header and pages come in every split.
    let mut frame = header(7, 0, 8192, Some(crc32c::crc32c(&body))).to_vec();
    frame.extend(&body);
    frame.extend(header(7, 1, 0, None));
    lane.set_nodelay(true).unwrap();
    for piece in frame.chunks(13) {
        lane.write_all(piece).unwrap();
    }
    assert_eq!(ack(&mut lane).status, Status::Landed);
    assert_eq!(ack(&mut lane).status, Status::WrongPart);
    let map = &dst.map;
    assert_eq!(dst.read(map.slab_address[0] + 2 * 4096, 4096), body[..4096]);
    assert_eq!(dst.read(map.slab_address[0], 4096), body[4096..]);
    assert_eq!(dst.read(map.slab_address[0] + 4096, 4096), [CANARY; 4096]);
}

#[test]
fn strangers_cost_themselves_only() {
    let l = layout(4096, 1, KvKind::Mla);
    let dst = Pool::new(&l, 4);
    dst.fill(CANARY);
    let r = Alone::new(2);
    r.handle.register(&dst.region).unwrap();
    let mut lane = r.lane(0);
    r.open(7, &dst.plan(&[1], 4096));
    // Silent ones stay open while others come.
    let mut silent: Vec<TcpStream> = (0..20).map(|_| r.stranger()).collect();
    let token = r.blob.token;
    for hello in [
        Hello { lane: 0, token: [9; 16] }.encode(),
        Hello { lane: 2, token }.encode(),
        Hello { lane: u16::MAX, token }.encode(),
        [0xff; HELLO_BYTES],
        *b"GET / HTTP/1.1\r\nHost: localhost\r\n".first_chunk().unwrap(),
    ] {
        let mut s = r.stranger();
        s.write_all(&hello).unwrap();
        assert!(closed(&mut s), "{hello:?}");
    }
    for i in 0..1000u32 {
        let mut s = r.stranger();
        // The engine may have closed already.
        let _ = s.write_all(&[i as u8; 40][..1 + i as usize % 40]);
    }
    // The lane carried nothing meanwhile and still does; so does a new one.
    lane.write_all(&header(7, 0, 4096, None)).unwrap();
    lane.write_all(&[1; 4096]).unwrap();
    assert_eq!(ack(&mut lane).status, Status::Landed);
    let mut other = r.lane(1);
    other.write_all(&header(7, 0, 4096, None)).unwrap();
    other.write_all(&[2; 4096]).unwrap();
    assert_eq!(ack(&mut other).status, Status::Landed);
    assert_eq!(dst.touched(), 4096);
    // The oldest strangers made way for so many others.
    assert!(closed(&mut silent[0]));
}

#[test]
fn a_silent_stranger_is_closed_at_its_deadline() {
    let mut p = Pair::new(couple(false));
    p.connect(1);
    let rx = engine(false);
    let address = rx.addresses()[0];
    p.rx = Box::new(rx);
    let mut s = TcpStream::connect(address).unwrap();
    s.write_all(b"KVLH").unwrap();
    s.set_nonblocking(true).unwrap();
    p.settle();
    assert_eq!(s.read(&mut [0; 1]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    p.skip_ms = limits::HANDSHAKE_MS + 1;
    p.until("end", |_| matches!(s.read(&mut [0; 1]), Ok(0)));
}

#[test]
fn lost_framing_ends_that_lane_only() {
    let l = layout(4096, 1, KvKind::Mla);
    let dst = Pool::new(&l, 4);
    dst.fill(CANARY);
    let r = Alone::new(2);
    r.handle.register(&dst.region).unwrap();
    let (mut bad, mut good) = (r.lane(0), r.lane(1));
    r.open(7, &dst.plan(&[1], 4096));
    bad.write_all(&[0x55; 64]).unwrap();
    assert!(closed(&mut bad));
    let down = r.wait("end", |e| matches!(e, EngineEvent::LaneDown { .. }));
    let EngineEvent::LaneDown { lane: LaneId(0), why, .. } = down else { panic!("{down:?}") };
    assert_eq!(why.kind, ErrorKind::Malformed);
    good.write_all(&header(7, 0, 4096, None)).unwrap();
    good.write_all(&[1; 4096]).unwrap();
    assert_eq!(ack(&mut good).status, Status::Landed);
    // The lane can be dialled again, and again over a connection that is still there.
    let mut first = r.lane(0);
    let _second = r.lane(0);
    assert!(closed(&mut first));
}

#[test]
fn half_a_part_is_no_arrival() {
    let l = layout(1 << 16, 1, KvKind::Mla);
    let dst = Pool::new(&l, 4);
    dst.fill(CANARY);
    let r = Alone::new(1);
    r.handle.register(&dst.region).unwrap();
    let mut lane = r.lane(0);
    r.open(7, &dst.plan(&[1, 2], 1 << 17));
    lane.write_all(&header(7, 0, 1 << 17, None)).unwrap();
    lane.write_all(&[1; 100_000]).unwrap();
    drop(lane);
    let e = r.wait("verdict", |e| {
        matches!(e, EngineEvent::LaneDown { .. } | EngineEvent::Arrived { .. })
    });
    assert!(matches!(e, EngineEvent::LaneDown { lane: LaneId(0), .. }), "{e:?}");
    assert_eq!(dst.touched(), 100_000);
    let mut lane = r.lane(0);
    lane.write_all(&header(7, 0, 1 << 17, None)).unwrap();
    lane.write_all(&vec![1; 1 << 17]).unwrap();
    assert_eq!(ack(&mut lane).status, Status::Landed);
    r.wait("arrival", |e| matches!(e, EngineEvent::Arrived { .. }));
}

#[test]
fn a_part_that_has_landed_is_final_and_is_reported_once() {
    let l = layout(4096, 1, KvKind::Mla);
    let dst = Pool::new(&l, 4);
    dst.fill(CANARY);
    let r = Alone::new(2);
    r.handle.register(&dst.region).unwrap();
    let (mut lane, mut other) = (r.lane(0), r.lane(1));
    r.open(7, &dst.plan(&[1, 2], 4096));
    // A second copy of part 0 is half-way on the other lane when the first is whole.
    other.write_all(&header(7, 0, 4096, None)).unwrap();
    other.write_all(&[1; 1000]).unwrap();
    let at = dst.map.slab_address[0] + 4096;
    let started = std::time::Instant::now();
    while dst.read(at + 999, 1) != [1] {
        assert!(started.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
    lane.write_all(&header(7, 0, 4096, None)).unwrap();
    lane.write_all(&[1; 4096]).unwrap();
    assert_eq!(ack(&mut lane).status, Status::Landed);
    // From here on nothing changes it, and it is not news.
    other.write_all(&[2; 3096]).unwrap();
    assert_eq!(ack(&mut other).status, Status::Landed);
    for value in 3..100u8 {
        for lane in [&mut lane, &mut other] {
            lane.write_all(&header(7, 0, 4096, Some(9))).unwrap();
            lane.write_all(&[value; 4096]).unwrap();
            let answer = ack(lane);
            assert_eq!((answer.status, answer.part.0), (Status::Landed, 0));
        }
    }
    assert_eq!(dst.read(at, 4096), [1; 4096]);
    // The lanes live on; another length is still refused.
    lane.write_all(&header(7, 0, 10, None)).unwrap();
    lane.write_all(&[1; 10]).unwrap();
    assert_eq!(ack(&mut lane).status, Status::WrongPart);
    other.write_all(&header(7, 1, 4096, None)).unwrap();
    other.write_all(&[1; 4096]).unwrap();
    assert_eq!(ack(&mut other).status, Status::Landed);
    r.handle.send(Command::Fence { grant: GrantId(7), how: FenceHow::Close }).unwrap();
    let mut arrived = Vec::new();
    loop {
        match r.events.recv_timeout(PATIENCE).unwrap() {
            EngineEvent::Arrived { part, .. } => arrived.push(part.0),
            EngineEvent::Fenced(_) => break,
            EngineEvent::Scrapped { bytes, .. } => assert_eq!(bytes, 10),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(arrived, [0, 1]);
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
    p.until("first bytes", |_| {
        dst.read(to.pages(PartId(0)).unwrap().iter().next().unwrap().address, 1) == [1]
    });
    // Neither engine is polled here.
    let proof = std::thread::spawn(move || revoke.revoke(GrantId(7))).join().unwrap();
    assert_eq!((proof.grant(), proof.how()), (GrantId(7), FenceHow::Revoke));
    dst.fill(CANARY);
    p.until("refusal", |p| p.nacked() == [ErrorKind::NotFound]);
    p.settle();
    assert_eq!(dst.touched(), 0);
}

/// A sender whose receiver is the test: `accept` plays it.
fn sender_with(listener: &TcpListener, lanes: u16) -> Pair {
    let mut p = Pair::new(couple(false));
    p.tell_tx(Command::Listen { link: LINK, peer: peer(Role::Decode), lanes, receiver: false });
    let blob =
        Blob { lanes, token: [3; 16], addresses: vec![listener.local_addr().unwrap()] }.encode();
    p.tell_tx(Command::Connect { link: LINK, remote: blob });
    p
}
fn accept(listener: &TcpListener, p: &mut Pair) -> TcpStream {
    listener.set_nonblocking(true).unwrap();
    let mut stream = None;
    p.until("dial", |_| {
        stream = listener.accept().ok();
        stream.is_some()
    });
    let (mut s, _) = stream.unwrap();
    s.set_nonblocking(true).unwrap();
    let mut hello = [0; HELLO_BYTES];
    p.until("hello", |_| s.peek(&mut hello).is_ok_and(|n| n == HELLO_BYTES));
    s.read_exact(&mut hello).unwrap();
    assert_eq!(Hello::decode(&hello).unwrap().token, [3; 16]);
    s.write_all(&Ack::WELCOME.encode()).unwrap();
    p.until("lane", |p| p.from_tx.iter().any(|e| matches!(e, EngineEvent::LaneUp { .. })));
    p.from_tx.clear();
    s
}
fn downs(p: &Pair) -> Vec<ErrorKind> {
    p.from_tx
        .iter()
        .filter_map(|e| match e {
            EngineEvent::LaneDown { why, .. } => Some(why.kind),
            _ => None,
        })
        .collect()
}
fn is_quiesced(p: &Pair) -> bool {
    p.from_tx.iter().any(|e| matches!(e, EngineEvent::Quiesced(q) if q.grant() == GrantId(7)))
}

#[test]
fn a_lane_killed_in_a_part_goes_down_once_and_is_dialled_again() {
    let l = layout(1 << 20, 1, KvKind::Mla);
    let src = Pool::new(&l, 16);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut p = sender_with(&listener, 1);
    p.tx.register(&src.region).unwrap();
    let mut s = accept(&listener, &mut p);
    let plan = src.plan(&(0..16).collect::<Vec<_>>(), 16 << 20);
    p.post(7, 0, 0, &plan);
    let mut some = [0; 1000];
    p.until("part", |_| s.read(&mut some).is_ok_and(|n| n > 0));
    assert_eq!(some[..4], *b"KVLF");
    drop(s);
    p.until("end", |p| !downs(p).is_empty());
    // In doubt, so neither acknowledged nor refused; nothing is left to quiesce.
    assert_eq!((p.acked(), p.nacked()), (0, vec![]));
    p.tell_tx(Command::Quiesce { link: LINK, grant: GrantId(7) });
    p.until("quiesced", |p| is_quiesced(p));
    p.post(7, 0, 0, &plan);
    p.until("refusal", |p| p.nacked() == [ErrorKind::NoPath]);
    // The first dials again are turned away; that is one outage, not several.
    for _ in 0..3 {
        p.until("dial", |_| listener.accept().is_ok());
    }
    assert_eq!(downs(&p), [ErrorKind::PeerLost]);
    let mut s = accept(&listener, &mut p);
    p.post(7, 0, 0, &plan);
    p.until("part", |_| s.read(&mut some).is_ok_and(|n| n > 0));
    // An answer that nobody asked for ends the lane.
    s.write_all(&Ack { status: Status::Landed, grant: GrantId(8), part: PartId(0) }.encode())
        .unwrap();
    p.until("end", |p| downs(p) == [ErrorKind::Malformed]);
    let _s = accept(&listener, &mut p);
    p.tell_tx(Command::ResetLane { link: LINK, lane: LaneId(0) });
    p.until("reset", |p| downs(p) == [ErrorKind::NoPath]);
    let mut s = accept(&listener, &mut p);
    p.tell_tx(Command::Close { link: LINK });
    p.until("close", |_| matches!(s.read(&mut some), Ok(0)));
    p.settle();
    assert!(listener.accept().is_err(), "a closed link dials no more");
}

#[test]
fn a_quiesce_ends_although_the_receiver_does_not_read() {
    let l = layout(1 << 20, 1, KvKind::Mla);
    let src = Pool::new(&l, 64);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut p = sender_with(&listener, 1);
    p.tx.register(&src.region).unwrap();
    let s = accept(&listener, &mut p);
    let plan = src.plan(&(0..64).collect::<Vec<_>>(), 16 << 20);
    for part in 0..4 {
        p.post(7, part, 0, &plan);
    }
    p.settle();
    p.tell_tx(Command::Quiesce { link: LINK, grant: GrantId(7) });
    p.poll_tx();
    assert!(!is_quiesced(&p), "half a part is written and the rest is not");
    assert_eq!(p.tx.unregister(&src.region).unwrap_err().kind(), ErrorKind::Busy);
    p.skip_ms += limits::QUIESCE_MS + 1;
    p.until("quiesced", |p| is_quiesced(p));
    assert_eq!(downs(&p), [ErrorKind::DeadlineExceeded]);
    // The source may change, and may go.
    p.tx.unregister(&src.region).unwrap();
    drop(s);
}

#[test]
fn a_half_written_part_is_finished_and_the_rest_is_not_begun() {
    let l = layout(1 << 20, 1, KvKind::Mla);
    let (src, dst) = (Pool::new(&l, 48), Pool::new(&l, 48));
    src.fill(1);
    dst.fill(CANARY);
    let mut p = Pair::new(couple(false));
    p.tx.register(&src.region).unwrap();
    p.rx.register(&dst.region).unwrap();
    p.connect(1);
    let ids: Vec<u32> = (0..48).collect();
    let (from, to) = (src.plan(&ids, 16 << 20), dst.plan(&ids, 16 << 20));
    p.open(7, 1, &to);
    (0..3).for_each(|part| p.post(7, part, 0, &from));
    // Only the sender moves, until the socket takes no more.
    while p.poll_tx() {}
    p.tell_tx(Command::Quiesce { link: LINK, grant: GrantId(7) });
    p.poll_tx();
    assert!(!is_quiesced(&p));
    p.until("quiesced", |p| is_quiesced(p));
    p.settle();
    assert_eq!((downs(&p), p.acked(), p.nacked()), (vec![], 1, vec![]));
    assert_eq!(dst.touched(), 16 << 20);
}

#[test]
fn addresses_that_nobody_can_dial_are_refused() {
    let at = |bind: &str, advertise: &[&str]| {
        TcpEngine::new(TcpConfig {
            bind: bind.parse().unwrap(),
            advertise: advertise.iter().map(|a| a.parse().unwrap()).collect(),
            ..TcpConfig::default()
        })
    };
    let e = at("0.0.0.0:0", &[]).err().unwrap();
    assert!(e.to_string().contains("bind=0.0.0.0:0"), "{e}");
    assert!(at("127.0.0.1:0", &["0.0.0.0"]).is_err());
    assert_eq!(at("203.0.113.1:1", &[]).err().unwrap().kind(), ErrorKind::Io);
    let ok = at("0.0.0.0:0", &["127.0.0.1"]).unwrap();
    assert_eq!(ok.addresses()[0].ip().to_string(), "127.0.0.1");
    assert_ne!(ok.addresses()[0].port(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..Default::default() })]

    /// Whatever frames a peer with the right token sends: only pages of the open grant's parts are
    /// written, and every whole frame is answered.
    #[test]
    fn a_lying_sender_writes_only_what_its_grant_names(
        frames in proptest::collection::vec(
            (6u64..9, 0u32..4, prop_oneof![Just(128u32), 0u32..400], any::<Option<u32>>()),
            1..20,
        ),
        cut in 1usize..200,
    ) {
        let l = layout(64, 1, KvKind::Mla);
        let dst = Pool::new(&l, 32);
        dst.fill(CANARY);
        let r = Alone::new(1);
        r.handle.register(&dst.region).unwrap();
        let (named, other) = (dst.plan(&[9, 3, 20, 4], 128), dst.plan(&[1, 2, 5, 6], 128));
        r.open(7, &named);
        r.open(8, &other);
        r.handle.send(Command::Fence { grant: GrantId(8), how: FenceHow::Close }).unwrap();
        r.wait("proof", |e| matches!(e, EngineEvent::Fenced(_)));
        let mut lane = r.lane(0);
        let mut sent = Vec::new();
        for &(grant, part, bytes, crc) in &frames {
            sent.extend(header(grant, part, bytes, crc));
            sent.extend(vec![1; bytes as usize]);
        }
        // The last frame may be cut off.
        sent.truncate(sent.len() - (cut % (32 + frames[frames.len() - 1].2 as usize)));
        for piece in sent.chunks(cut) {
            lane.write_all(piece).unwrap();
        }
        lane.shutdown(std::net::Shutdown::Write).unwrap();
        let mut landed = std::collections::HashSet::new();
        for &(grant, part, bytes, crc) in &frames[..frames.len() - 1] {
            let answer = ack(&mut lane);
            prop_assert_eq!((answer.grant.0, answer.part.0), (grant, part));
            let status = match (grant, part, bytes) {
                (7, 0 | 1, 128)
                    if landed.contains(&part)
                        || crc.is_none_or(|c| c == crc32c::crc32c(&[1; 128])) =>
                {
                    landed.insert(part);
                    Status::Landed
                }
                (7, 0 | 1, 128) => Status::Corrupt,
                (7, ..) => Status::WrongPart,
                _ => Status::NoGrant,
            };
            prop_assert_eq!(answer.status, status);
        }
        r.wait("end", |e| matches!(e, EngineEvent::LaneDown { .. }));
        for address in engine_conformance::addresses(&named) {
            dst.write(address, &[CANARY; 64]);
        }
        prop_assert_eq!(dst.touched(), 0);
    }
}
