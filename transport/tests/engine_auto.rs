//! The `auto` engine: what every engine must do, whichever of its engines a link gets, and how a
//! link gets it.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)] // Tests fail by panicking.

mod engine_conformance;

use std::sync::Arc;
use std::time::Instant;

use engine_conformance::{CANARY, LINK, PATIENCE, Pair, Pool, addresses, layout, peer, run};
use proptest::prelude::*;

use kvlane_proto::layout::KvKind;
use kvlane_proto::{
    DataPath, ErrorKind, GrantId, LaneId, LinkId, PartId, Plan, Refusal, Result, Role, Time, limits,
};
use kvlane_transport::clock::now;
use kvlane_transport::engine::auto::{AutoEngine, ENGINES_MAX, Part, TRY_MS, decode, encode};
use kvlane_transport::engine::shm::{self, ShmConfig, ShmEngine};
use kvlane_transport::engine::tcp::{TcpConfig, TcpEngine};
use kvlane_transport::engine::{
    Caps, Command, Engine, EngineEvent, FenceHow, Interest, OpenGrant, OpenSource, Post,
};
use kvlane_transport::memory::Region;
use kvlane_transport::sys::unix::{Listener, Name};

fn shm() -> Box<dyn Engine> {
    Box::new(ShmEngine::new(ShmConfig::default()).unwrap())
}
fn tcp() -> Box<dyn Engine> {
    Box::new(TcpEngine::new(TcpConfig::default()).unwrap())
}
fn auto(engines: Vec<Box<dyn Engine>>) -> Box<dyn Engine> {
    Box::new(AutoEngine::new(engines).unwrap())
}
fn both() -> Box<dyn Engine> {
    auto(vec![shm(), tcp()])
}

/// Tells peers to dial a socket that is not its own, as in a container that does not share it.
struct Elsewhere(Box<dyn Engine>, Name);

fn elsewhere() -> Box<dyn Engine> {
    Box::new(Elsewhere(shm(), Name::Abstract(b"kvlane-nobody-listens-here".to_vec())))
}

impl Engine for Elsewhere {
    fn caps(&self) -> Caps {
        self.0.caps()
    }
    fn register(&mut self, region: &Arc<Region>) -> Result<()> {
        self.0.register(region)
    }
    fn unregister(&mut self, region: &Arc<Region>) -> Result<()> {
        self.0.unregister(region)
    }
    fn command(&mut self, now: Time, command: Command) {
        self.0.command(now, command);
    }
    fn poll(&mut self, now: Time, events: &mut Vec<EngineEvent>) -> bool {
        let (from, moved) = (events.len(), self.0.poll(now, events));
        for event in &mut events[from..] {
            if let EngineEvent::Local { blob: Ok(blob), .. } = event {
                let mut found = shm::wire::Blob::decode(blob).unwrap();
                found.door.iter_mut().for_each(|door| door.name = self.1.clone());
                *blob = found.encode();
            }
        }
        moved
    }
    fn park(&mut self, interests: &mut Vec<Interest>) -> Option<Time> {
        self.0.park(interests)
    }
}

fn chosen(events: &[EngineEvent]) -> Vec<&'static str> {
    let name = |e: &EngineEvent| match e {
        EngineEvent::Chosen { engine, .. } => Some(*engine),
        _ => None,
    };
    events.iter().filter_map(name).collect()
}
fn up(events: &[EngineEvent]) -> usize {
    let ups = events.iter().filter(|e| matches!(e, EngineEvent::LaneUp { .. })).count();
    ups - events.iter().filter(|e| matches!(e, EngineEvent::LaneDown { .. })).count()
}
fn blob(engine: &mut dyn Engine, link: LinkId, lanes: u16, receiver: bool) -> Vec<u8> {
    let peer = peer(if receiver { Role::Prefill } else { Role::Decode });
    engine.command(now(), Command::Listen { link, peer, lanes, receiver });
    let mut events = Vec::new();
    let started = Instant::now();
    loop {
        engine.poll(now(), &mut events);
        match events.pop() {
            Some(EngineEvent::Local { blob, .. }) => return blob.unwrap(),
            other => assert!(other.is_none() && started.elapsed() < PATIENCE, "{other:?}"),
        }
    }
}
fn offer(name: &str, blob: Vec<u8>) -> Vec<u8> {
    encode(&[Part { name: name.into(), blob }])
}
fn connect(remote: Vec<u8>) -> Command {
    Command::Connect { link: LINK, remote }
}
/// Both told of each other; what they say is kept.
fn linked(tx: Box<dyn Engine>, rx: Box<dyn Engine>, lanes: u16) -> Pair {
    let mut p = Pair::new((tx, rx));
    let of_tx = blob(&mut *p.tx, LINK, lanes, false);
    let of_rx = blob(&mut *p.rx, LINK, lanes, true);
    p.tell_rx(connect(of_tx));
    p.tell_tx(connect(of_rx));
    p
}
fn until_up(p: &mut Pair, lanes: usize) {
    p.until("lanes", |p| up(&p.from_tx) == lanes && up(&p.from_rx) == lanes);
}
/// Pages go from one to the other.
fn moves(p: &mut Pair, lanes: u16) {
    let l = layout(4096, 1, KvKind::Mla);
    let (src, dst) = (Pool::new(&l, 8), Pool::new(&l, 8));
    src.fill(3);
    dst.fill(CANARY);
    p.tx.register(&src.region).unwrap();
    p.rx.register(&dst.region).unwrap();
    p.open(7, lanes, &dst.plan(&[5, 1, 2], 4096));
    p.send_all(7, lanes, &src.plan(&[0, 1, 2], 4096));
    assert_eq!(dst.touched(), 3 * 4096);
    p.fence(7, FenceHow::Close);
}

#[test]
fn conforms_over_shm() {
    run(&|| (both(), both()));
}

#[test]
fn conforms_over_tcp_where_shm_cannot_be_reached() {
    run(&|| (both(), auto(vec![elsewhere(), tcp()])));
}

#[test]
fn a_link_takes_the_receivers_first_engine_that_works() {
    let gone = || auto(vec![elsewhere(), tcp()]);
    let (one, other) = (|| auto(vec![shm(), tcp()]), || auto(vec![tcp(), shm()]));
    for (tx, rx, name) in [
        (one(), one(), "shm"),
        (other(), one(), "shm"),
        (one(), other(), "tcp"),
        (one(), gone(), "tcp"),
    ] {
        let mut p = linked(tx, rx, 3);
        until_up(&mut p, 3);
        p.settle();
        assert_eq!((chosen(&p.from_tx), chosen(&p.from_rx)), (vec![name], vec![name]));
        let said = |events: &[EngineEvent]| {
            let more = |e: &&EngineEvent| {
                !matches!(e, EngineEvent::LaneUp { .. } | EngineEvent::Chosen { .. })
            };
            events.iter().filter(more).count()
        };
        assert_eq!((said(&p.from_tx), said(&p.from_rx)), (0, 0), "nothing of what was given up");
        p.clear();
        moves(&mut p, 3);
    }
}

/// Whoever has one engine is one offer to `auto`, and is offered that engine's own blob.
#[test]
fn a_peer_with_one_engine_is_linked_through_it() {
    for name in ["tcp", "shm"] {
        let plain = || if name == "tcp" { tcp() } else { shm() };
        let own = |blob: &[u8]| {
            decode(blob).unwrap().into_iter().find(|part| part.name == name).unwrap().blob
        };
        let mut p = Pair::new((both(), plain()));
        let (of_tx, of_rx) = (blob(&mut *p.tx, LINK, 2, false), blob(&mut *p.rx, LINK, 2, true));
        p.tell_rx(connect(own(&of_tx)));
        p.tell_tx(connect(offer(name, of_rx)));
        until_up(&mut p, 2);
        assert_eq!(chosen(&p.from_tx), [name]);
        p.clear();
        moves(&mut p, 2);

        let mut p = Pair::new((plain(), both()));
        let (of_tx, of_rx) = (blob(&mut *p.tx, LINK, 2, false), blob(&mut *p.rx, LINK, 2, true));
        p.tell_rx(connect(offer(name, of_tx)));
        p.tell_tx(connect(own(&of_rx)));
        until_up(&mut p, 2);
        assert_eq!(chosen(&p.from_rx), [name]);
        p.clear();
        moves(&mut p, 2);
    }
}

/// A socket that takes callers and never answers.
#[test]
fn an_engine_without_a_lane_in_time_is_given_up() {
    let name = Name::Abstract(format!("kvlane-mute-{}", std::process::id()).into_bytes());
    let _mute = Listener::bind(name.clone()).unwrap();
    let rx = auto(vec![Box::new(Elsewhere(shm(), name)), tcp()]);
    let mut p = linked(both(), rx, 2);
    p.settle();
    assert!(p.from_tx.is_empty() && p.from_rx.is_empty(), "{:?} {:?}", p.from_tx, p.from_rx);
    assert!(p.tx.park(&mut Vec::new()).is_some_and(|at| at <= p.now().plus_ms(TRY_MS)));
    p.skip_ms = TRY_MS;
    until_up(&mut p, 2);
    assert_eq!((chosen(&p.from_tx), chosen(&p.from_rx)), (vec!["tcp"], vec!["tcp"]));
    p.clear();
    moves(&mut p, 2);
}

/// The sender finds the first engine too slow after its lanes came up at the receiver.
#[test]
fn the_receiver_follows_to_a_later_engine_and_never_back() {
    let mut p = Pair::new((shm(), both()));
    let mut second = tcp();
    let offers = decode(&blob(&mut *p.rx, LINK, 2, true)).unwrap();
    let parts = |of_shm, of_tcp| {
        encode(&[
            Part { name: "shm".into(), blob: of_shm },
            Part { name: "tcp".into(), blob: of_tcp },
        ])
    };
    let of_shm = blob(&mut *p.tx, LINK, 2, false);
    let of_tcp = blob(&mut *second, LINK, 2, false);
    p.tell_rx(connect(parts(of_shm, of_tcp)));
    p.tell_tx(connect(offers[0].blob.clone()));
    p.until("lanes", |p| up(&p.from_rx) == 2);
    std::mem::swap(&mut p.tx, &mut second);
    p.from_tx.clear();
    p.tell_tx(connect(offers[1].blob.clone()));
    p.until("engine", |p| chosen(&p.from_rx) == ["shm", "tcp"]);
    p.until("lanes", |p| up(&p.from_tx) == 2 && up(&p.from_rx) == 2);
    // The first one's connections are closed, and its token is worth nothing.
    let mut from_first = Vec::new();
    let started = Instant::now();
    while !from_first.iter().any(|e| matches!(e, EngineEvent::LaneDown { .. })) {
        second.poll(now(), &mut from_first);
        p.poll_rx();
        assert!(started.elapsed() < PATIENCE);
    }
    p.clear();
    moves(&mut p, 2);
    assert!(chosen(&p.from_rx).is_empty() && up(&p.from_rx) == 0);
}

#[test]
fn a_link_that_no_engine_can_make_names_each_reason() {
    let name = Name::Abstract(b"kvlane-nobody-here-either".to_vec());
    let gone = shm::wire::Door { token: [1; 16], proof: [2; 16], name };
    let gone = shm::wire::Blob { lanes: 2, door: Some(gone) }.encode();
    let told = |remote: Vec<u8>| {
        let mut p = Pair::new((both(), both()));
        blob(&mut *p.tx, LINK, 2, false);
        p.tell_tx(connect(remote));
        let mut found = None;
        p.until("end", |p| {
            found = p.from_tx.pop();
            found.is_some()
        });
        let Some(EngineEvent::Local { blob: Err(e), .. }) = found else { panic!("{found:?}") };
        e
    };
    let part = |name: &str, blob: &[u8]| Part { name: name.into(), blob: blob.into() };
    let e = told(encode(&[part("shm", &gone), part("tcp", b"?")]));
    let text = e.to_string();
    assert_eq!(e.kind(), ErrorKind::VersionMismatch);
    assert!(text.contains("tcp engine") && text.contains("shm=peer_lost"), "{text}");
    // Alone, it is refused as without `auto`.
    let e = told(encode(&[part("shm", &gone)]));
    assert_eq!(e.kind(), ErrorKind::PeerLost);
    assert!(e.to_string().contains("network namespace"), "{e}");
    let e = told(encode(&[part("verbs", b"?")]));
    assert_eq!(e.kind(), ErrorKind::Incompatible);
    assert!(e.to_string().contains("ours=shm, tcp, theirs=verbs"), "{e}");
    assert_eq!(told(vec![9, 1]).kind(), ErrorKind::VersionMismatch);
}

/// One receiver; a sender over each engine.
struct Three {
    rx: Box<dyn Engine>,
    senders: [Box<dyn Engine>; 2],
    from_rx: Vec<EngineEvent>,
    from: [Vec<EngineEvent>; 2],
}

const LINKS: [LinkId; 2] = [LinkId(1), LinkId(2)];

impl Three {
    fn new() -> Self {
        let mut t =
            Self { rx: both(), senders: [both(), tcp()], from_rx: vec![], from: [vec![], vec![]] };
        for (n, link) in LINKS.into_iter().enumerate() {
            let of_rx = blob(&mut *t.rx, link, 1, true);
            let of_tx = blob(&mut *t.senders[n], link, 1, false);
            let (of_rx, of_tx) = match n {
                0 => (of_rx, of_tx),
                _ => (decode(&of_rx).unwrap().remove(1).blob, offer("tcp", of_tx)),
            };
            let connect = |remote| Command::Connect { link, remote };
            t.rx.command(now(), connect(of_tx));
            t.senders[n].command(now(), connect(of_rx));
        }
        t.until("lanes", |t| up(&t.from_rx) == 2 && t.from.iter().all(|f| up(f) == 1));
        let mut names = chosen(&t.from_rx);
        names.sort_unstable();
        assert_eq!(names, ["shm", "tcp"]);
        t
    }
    fn turn(&mut self) -> bool {
        let mut moved = self.rx.poll(now(), &mut self.from_rx);
        for (sender, from) in self.senders.iter_mut().zip(&mut self.from) {
            moved |= sender.poll(now(), from);
        }
        moved
    }
    fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let started = Instant::now();
        while !done(self) {
            if !self.turn() {
                std::thread::yield_now();
            }
            assert!(started.elapsed() < PATIENCE, "no {what}: {:?} {:?}", self.from_rx, self.from);
        }
    }
    fn open(&mut self, plans: &[Arc<Plan>; 2]) {
        let source = |n: usize| OpenSource {
            link: LINKS[n],
            lanes: vec![LaneId(0)],
            plan: plans[n].clone(),
        };
        let sources = vec![source(0), source(1)];
        self.rx.command(now(), Command::Open(OpenGrant { grant: GrantId(7), sources }));
    }
    fn post(&mut self, n: usize, plan: &Plan) {
        let (link, grant, part, lane) = (LINKS[n], GrantId(7), PartId(0), LaneId(0));
        let pages = plan.pages(part).unwrap();
        let post = Post { link, grant, part, lane, pages };
        self.senders[n].command(now(), Command::Post(post));
    }
    fn proofs(&self) -> usize {
        self.from_rx.iter().filter(|e| matches!(e, EngineEvent::Fenced(_))).count()
    }
}

/// Both senders are in the middle of a part when the receiver fences.
#[test]
fn a_grant_over_two_engines_is_fenced_once_and_nothing_lands_after() {
    let l = layout(1 << 20, 1, KvKind::Mla);
    for how in [FenceHow::Close, FenceHow::Revoke] {
        let (src, dst) = (Pool::new(&l, 16), Pool::new(&l, 32));
        src.fill(1);
        dst.fill(CANARY);
        let mut t = Three::new();
        t.rx.register(&dst.region).unwrap();
        t.senders.iter_mut().for_each(|s| s.register(&src.region).unwrap());
        let ids = |from: u32| (from..from + 16).collect::<Vec<_>>();
        let to = [dst.plan(&ids(0), 16 << 20), dst.plan(&ids(16), 16 << 20)];
        let from = src.plan(&ids(0), 16 << 20);
        t.open(&to);
        (0..2).for_each(|n| t.post(n, &from));
        let firsts = [addresses(&to[0])[0], addresses(&to[1])[0]];
        t.until("first bytes", |_| firsts.iter().all(|&first| dst.read(first, 1) == [1]));
        assert_eq!(t.rx.unregister(&dst.region).unwrap_err().kind(), ErrorKind::Busy);
        t.rx.command(now(), Command::Fence { grant: GrantId(7), how });
        // The receiver alone.
        let started = Instant::now();
        while t.proofs() == 0 {
            t.rx.poll(now(), &mut t.from_rx);
            assert!(started.elapsed() < PATIENCE);
        }
        dst.fill(CANARY);
        let nacked =
            |from: &Vec<EngineEvent>| from.iter().any(|e| matches!(e, EngineEvent::Nacked { .. }));
        t.until("refusals", |t| t.from.iter().all(nacked));
        for _ in 0..200 {
            t.turn();
        }
        assert_eq!((dst.touched(), t.proofs()), (0, 1));
        // Fenced is fenced, at both.
        t.open(&to);
        t.from = [vec![], vec![]];
        (0..2).for_each(|n| t.post(n, &from));
        t.until("refusals", |t| t.from.iter().all(nacked));
        assert_eq!((dst.touched(), t.proofs()), (0, 1));
        t.rx.unregister(&dst.region).unwrap();
    }
}

#[test]
fn a_grant_over_two_engines_arrives_from_both() {
    let l = layout(4096, 1, KvKind::Mla);
    let (src, dst) = (Pool::new(&l, 4), Pool::new(&l, 8));
    src.fill(1);
    dst.fill(CANARY);
    let mut t = Three::new();
    t.rx.register(&dst.region).unwrap();
    t.senders.iter_mut().for_each(|s| s.register(&src.region).unwrap());
    t.open(&[dst.plan(&[3, 1], 8192), dst.plan(&[6, 2], 8192)]);
    (0..2).for_each(|n| t.post(n, &src.plan(&[0, 1], 8192)));
    t.until("parts", |t| {
        let arrived = |link| {
            t.from_rx
                .iter()
                .any(|e| matches!(e, EngineEvent::Arrived { link: l, .. } if *l == link))
        };
        LINKS.into_iter().all(arrived)
    });
    assert_eq!(dst.touched(), 4 * 4096);
}

/// Says what it is told to, when it is told to.
struct Said(&'static str, DataPath, std::sync::mpsc::Receiver<EngineEvent>);

impl Engine for Said {
    fn caps(&self) -> Caps {
        Caps { name: self.0, path: self.1, emulated: true, rails: 1 }
    }
    fn register(&mut self, _: &Arc<Region>) -> Result<()> {
        Ok(())
    }
    fn unregister(&mut self, _: &Arc<Region>) -> Result<()> {
        Ok(())
    }
    fn command(&mut self, _: Time, _: Command) {}
    fn poll(&mut self, _: Time, events: &mut Vec<EngineEvent>) -> bool {
        events.extend(self.2.try_iter());
        false
    }
    fn park(&mut self, _: &mut Vec<Interest>) -> Option<Time> {
        None
    }
}

#[test]
fn a_proof_waits_for_every_engine_and_a_failure_is_one() {
    let (slow, said) = std::sync::mpsc::channel();
    let mut e = auto(vec![tcp(), Box::new(Said("slow", DataPath::ReceiverCopies, said))]);
    let mut events = Vec::new();
    let fence = Command::Fence { grant: GrantId(7), how: FenceHow::Close };
    e.command(now(), fence);
    (0..100).for_each(|_| assert!(!e.poll(now(), &mut events) || events.is_empty()));
    assert!(events.is_empty(), "{events:?}");
    let why = Refusal::new(ErrorKind::DeadlineExceeded, "the device does not answer");
    slow.send(EngineEvent::FenceFailed { grant: GrantId(7), why: why.clone() }).unwrap();
    e.poll(now(), &mut events);
    let [EngineEvent::FenceFailed { grant: GrantId(7), why: found }] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(*found, why);
    // Nobody asked for these.
    slow.send(EngineEvent::FenceFailed { grant: GrantId(8), why: why.clone() }).unwrap();
    slow.send(EngineEvent::LaneUp { link: LINK, lane: LaneId(0) }).unwrap();
    slow.send(EngineEvent::LaneDown { link: LINK, lane: LaneId(0), why }).unwrap();
    events.clear();
    e.poll(now(), &mut events);
    assert!(events.is_empty(), "{events:?}");
}

#[test]
fn engines_that_do_not_make_one_are_refused() {
    let other = || -> Box<dyn Engine> {
        Box::new(Said("other", DataPath::OneSided, std::sync::mpsc::channel().1))
    };
    for engines in [vec![], vec![tcp(), tcp()], vec![tcp(), other()]] {
        let e = AutoEngine::new(engines).err().unwrap();
        assert_eq!(e.kind(), ErrorKind::Config);
    }
    assert_eq!(both().caps().name, "auto");
}

#[test]
fn memory_that_one_engine_refuses_is_known_to_none() {
    let mut e = auto(vec![tcp(), shm()]);
    let regions: Vec<_> = (0..=shm::REGIONS_MAX).map(|_| Region::memfd(4096).unwrap()).collect();
    regions[..shm::REGIONS_MAX].iter().for_each(|r| e.register(r).unwrap());
    let refused = e.register(&regions[shm::REGIONS_MAX]).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::LimitExceeded);
    e.unregister(&regions[0]).unwrap();
    // Would be refused as known, had the first engine kept it.
    e.register(&regions[shm::REGIONS_MAX]).unwrap();
}

#[test]
fn blobs_that_are_not_exact_are_refused() {
    let part = |name: &str, n: usize| Part { name: name.into(), blob: vec![7; n] };
    let good = encode(&[part("shm", 3), part("tcp", 0)]);
    assert_eq!(decode(&good).unwrap(), [part("shm", 3), part("tcp", 0)]);
    for end in 0..good.len() {
        assert_eq!(decode(&good[..end]).unwrap_err().kind(), ErrorKind::Malformed, "{end}");
    }
    let many: Vec<Part> = (0..=ENGINES_MAX).map(|n| part(&format!("e{n}"), 0)).collect();
    for (what, bytes) in [
        ("behind", [&good[..], &[0]].concat()),
        ("none", encode(&[])),
        ("many", encode(&many)),
        ("twice", encode(&[part("shm", 1), part("shm", 2)])),
        ("no name", encode(&[part("", 1)])),
        ("no text", vec![1, 1, 1, 0xff, 0, 0]),
        ("long", encode(&[part("shm", limits::BLOB_BYTES_MAX)])),
    ] {
        assert_eq!(decode(&bytes).unwrap_err().kind(), ErrorKind::Malformed, "{what}");
    }
    assert_eq!(decode(&[2, 1]).unwrap_err().kind(), ErrorKind::VersionMismatch);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    /// Whatever a peer says: what decodes encodes to the same bytes again.
    #[test]
    fn a_blob_is_canonical_or_refused(
        noise in proptest::collection::vec(any::<u8>(), 0..40),
        names in proptest::collection::vec("[a-z]{1,3}", 0..6),
        flip in any::<(u8, u8)>(),
    ) {
        let parts = names.into_iter().map(|name| Part { name, blob: noise.clone() });
        let mut bytes = encode(&parts.collect::<Vec<_>>());
        let at = usize::from(flip.0) % bytes.len();
        bytes[at] ^= flip.1;
        for bytes in [&bytes[..], &noise, &[&[1, 1, 2], &noise[..]].concat()] {
            if let Ok(parts) = decode(bytes) {
                prop_assert_eq!(encode(&parts), bytes);
            }
        }
    }
}
