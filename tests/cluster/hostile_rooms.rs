//! Rooms that are used twice, ended twice, or that nobody knows: refused by name, with no byte
//! written, at no cost to anybody else.

use kvlane_proto::link::{EngineChoice, Event, Link, LinkConfig, Output};
use kvlane_proto::msg::Purpose;
use kvlane_proto::msg::call::{Call, Reply as Answer};
use kvlane_proto::msg::peer::{Offer, PeerFrame, PeerMsg};
use kvlane_proto::{
    Blame, BlockList, DataPath, Device, ErrorKind, GrantId, Identity, Incarnation, LaneId, LinkId,
    Outcome, PoolMap, Refusal, Role, RoomId, Run, Span, WorkerKey, limits,
};
use kvlane_transport::clock::now;
use kvlane_transport::engine::driver::{self, EngineHandle};
use kvlane_transport::engine::gpunetio::{GpunetioConfig, GpunetioEngine};
use kvlane_transport::engine::tcp::{TcpConfig, TcpEngine};
use kvlane_transport::engine::{Caps, Command, Engine as DataPlane, EngineEvent};
use kvlane_transport::quic::{Endpoint, EndpointConfig, FrameSender, Security, Watch};
use tokio::sync::mpsc;

use super::cluster::{Caller, Cluster, PAGE_TOKENS, PAGES_PER_BLOCK, Router, Worker};
use super::engines::{Engine, Rig, SMALL_BLOCKS};
use super::legs::{Leg, Request, leg};
use super::process::{until, within};

const TOKENS: u32 = SMALL_BLOCKS / 2 * PAGE_TOKENS;
const PAGES: u64 = SMALL_BLOCKS as u64 / 2 * PAGES_PER_BLOCK;

/// Both legs are refused, as those of a room that is over, and nothing is written.
async fn is_over(prefill: &Worker, decode: &Worker, r: &Request, kinds: &[ErrorKind]) {
    for (worker, sent) in [(decode, r.decode_leg()), (prefill, r.prefill_leg())] {
        let reply = leg(&worker.serving, sent).await.unwrap();
        reply.assert_failed(kinds);
        assert_eq!(reply.pages_verified, 0, "{reply:?}");
        let named = reply.why().text.contains(&format!("room={}", r.room));
        assert!(named || reply.why().kind == ErrorKind::Aborted, "{reply:?}");
        if let Some(Outcome::Failed { bytes, .. }) = &reply.outcome {
            assert_eq!(*bytes, 0, "{reply:?}");
        }
    }
}

async fn run_done(prefill: &Worker, decode: &Worker, r: &Request, pages: u64) {
    let (p, d) =
        tokio::join!(leg(&prefill.serving, r.prefill_leg()), leg(&decode.serving, r.decode_leg()),);
    d.unwrap().assert_done(pages);
    p.unwrap().assert_done(0);
}

async fn used_or_ended_twice(engine: Engine) {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let rig = Rig::start(&cluster, engine).await;
    let prefill = rig.worker(&cluster, Role::Prefill, "p", &[]).await;
    let decode = rig.worker(&cluster, Role::Decode, "d", &[]).await;
    router.sees(&prefill).await;
    router.sees(&decode).await;
    let issuer = Caller::new(Role::Router, "r");
    let abort = |room| Call::Abort { room: RoomId(room), reason: "twice".into() };
    let over = [ErrorKind::RoomEnded];

    // Consumed, then sent again: by the same issuer, and by another.
    let r = router.reserve(&prefill, &decode, TOKENS).await;
    run_done(&prefill, &decode, &r, PAGES).await;
    let foreign = Request { issuer: "default/router/foreign/0".into(), ..r.clone() };
    for again in [&r, &foreign, &r] {
        is_over(&prefill, &decode, again, &over).await;
    }
    // An abort after done changes nothing, and says so, each time.
    for _ in 0..2 {
        let said = issuer.ask(&decode, abort(r.room)).await.unwrap();
        assert!(matches!(&said, Answer::Ended(outcome) if outcome.is_done()), "{said:?}");
        // The prefill ends with what the decode has said.
        let _ = issuer.ask(&prefill, abort(r.room)).await;
    }
    is_over(&prefill, &decode, &r, &over).await;

    // Twice at a time.
    let r = router.reserve(&prefill, &decode, TOKENS).await;
    let waits = Leg::send(&decode.serving, r.decode_leg()).await.unwrap();
    prefill.holds(1).await;
    let second = leg(&decode.serving, r.decode_leg()).await.unwrap();
    second.assert_failed(&[ErrorKind::DuplicateRoom]);
    leg(&prefill.serving, r.prefill_leg()).await.unwrap().assert_done(0);
    waits.reply().await.unwrap().assert_done(PAGES);
    let r = Request { room: 11, ..router.reserve(&prefill, &decode, TOKENS).await };
    let waits = Leg::send(&prefill.serving, r.prefill_leg()).await.unwrap();
    prefill.holds(1).await;
    for again in [&r, &Request { issuer: foreign.issuer.clone(), ..r.clone() }] {
        let second = leg(&prefill.serving, again.prefill_leg()).await.unwrap();
        second.assert_failed(&[ErrorKind::DuplicateRoom]);
    }
    leg(&decode.serving, r.decode_leg()).await.unwrap().assert_done(PAGES);
    waits.reply().await.unwrap().assert_done(0);

    // Ended before anything of it came, while one leg waits, and twice.
    let r = router.reserve(&prefill, &decode, TOKENS).await;
    for _ in 0..2 {
        issuer.ask(&decode, abort(r.room)).await.unwrap();
    }
    is_over(&prefill, &decode, &r, &[ErrorKind::RoomEnded, ErrorKind::Aborted]).await;
    let never = Request { room: 12, ..r.clone() };
    for _ in 0..2 {
        issuer.ask(&decode, abort(never.room)).await.unwrap();
    }
    let r = router.reserve(&prefill, &decode, TOKENS).await;
    let waits = Leg::send(&prefill.serving, r.prefill_leg()).await.unwrap();
    prefill.holds(1).await;
    for _ in 0..2 {
        issuer.ask(&decode, abort(r.room)).await.unwrap();
    }
    waits.reply().await.unwrap().assert_failed(&[ErrorKind::Aborted]);
    is_over(&prefill, &decode, &r, &[ErrorKind::RoomEnded, ErrorKind::Aborted]).await;

    // No page at all, and more than there are.
    let asked = router.coordinator.reserve(Router::request(&prefill, &decode, 0));
    let e = within("a reservation of nothing", asked).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Malformed, "{e}");
    let r = Request { room: 14, tokens: 0, ..r };
    run_done(&prefill, &decode, &r, 0).await;
    is_over(&prefill, &decode, &r, &over).await;
    let huge = Request { room: 13, tokens: (SMALL_BLOCKS + 1) * PAGE_TOKENS, ..r.clone() };
    for (worker, sent) in [(&decode, huge.decode_leg()), (&prefill, huge.prefill_leg())] {
        let reply = leg(&worker.serving, sent).await.unwrap();
        reply.assert_failed(&[ErrorKind::NeverFits, ErrorKind::Busy]);
        assert!(reply.why().text.contains("more blocks than the"), "{reply:?}");
    }
    // Everything is back, and no free page was written to.
    router.assert_clean(&prefill, &decode).await;
}

#[tokio::test]
async fn rooms_used_or_ended_twice_are_refused_by_name_over_tcp() {
    used_or_ended_twice(Engine::Tcp).await;
}

#[tokio::test]
async fn rooms_used_or_ended_twice_are_refused_by_name_over_shm() {
    used_or_ended_twice(Engine::Shm).await;
}

#[tokio::test]
async fn rooms_used_or_ended_twice_are_refused_by_name_over_nics() {
    used_or_ended_twice(Engine::Gpunetio).await;
}

const LINK: LinkId = LinkId(1);

/// A decode that says what it likes, on a link that is as good as any.
struct Liar {
    link: Link,
    sender: FrameSender<PeerFrame>,
    frames: mpsc::UnboundedReceiver<PeerFrame>,
    caps: Caps,
    maps: Vec<PoolMap>,
    engine: EngineHandle,
    events: mpsc::UnboundedReceiver<Vec<EngineEvent>>,
    up: bool,
    heard: Vec<PeerMsg>,
    _watch: Watch,
    _endpoint: Endpoint,
}

impl Drop for Liar {
    fn drop(&mut self) {
        self.engine.stop();
    }
}

impl Liar {
    /// Connects to a prefill over tcp, with the layout of a real decode.
    async fn connect(router: &Router, prefill: &Worker, like: &Worker) -> Self {
        let engine = Box::new(TcpEngine::new(TcpConfig::default()).unwrap());
        Self::connect_over(engine, router, prefill, like).await
    }
    async fn connect_over(
        engine: Box<dyn DataPlane>,
        router: &Router,
        prefill: &Worker,
        like: &Worker,
    ) -> Self {
        let identity = Identity::new("default", Role::Decode, "liar", 0).unwrap();
        let me = WorkerKey { identity, incarnation: Incarnation([9; 16]) };
        let listen = ([127, 0, 0, 1], 0).into();
        let endpoint =
            Endpoint::bind(EndpointConfig::new(listen, Security::Insecure, me.clone())).unwrap();
        let session =
            endpoint.dial(&prefill.quic, Some(&prefill.identity), Purpose::Peer).await.unwrap();
        let peer = session.peer.clone();
        let (sender, mut receiver, watch) = session.into_parts::<PeerFrame, PeerFrame>();
        let (to, frames) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Ok(Some(frame)) = receiver.recv().await {
                if to.send(frame).is_err() {
                    return;
                }
            }
        });
        let view = router.coordinator.snapshot();
        let pools = view.worker(&like.identity).unwrap().view.registration.pools.clone();
        let maps = match engine.caps().path {
            // Where its pages are said to be; nobody gets as far as writing there.
            DataPath::OneSided => {
                let of = |pool| PoolMap::contiguous(Device::Host, 1 << 40, pool, SMALL_BLOCKS);
                pools.iter().map(of).collect()
            }
            DataPath::ReceiverCopies => Vec::new(),
        };
        let link = Link::new(now(), peer.clone(), LinkConfig::new(pools.into(), true));
        let (to, events) = mpsc::unbounded_channel();
        let caps = engine.caps();
        let on_events = Box::new(move |events| drop(to.send(events)));
        let engine = driver::spawn(engine, on_events).unwrap();
        let lanes = limits::LANES_PER_LINK;
        engine.send(Command::Listen { link: LINK, peer, lanes, receiver: true }).unwrap();
        let mut liar = Self {
            link,
            sender,
            frames,
            caps,
            maps,
            engine,
            events,
            up: false,
            heard: Vec::new(),
            _watch: watch,
            _endpoint: endpoint,
        };
        within("a liar's link", async {
            while !liar.up {
                liar.turn().await;
            }
        })
        .await;
        liar
    }

    fn translate(&self, event: EngineEvent) -> Option<Event> {
        Some(match event {
            EngineEvent::Local { blob, .. } => Event::Local(vec![EngineChoice {
                name: self.caps.name.into(),
                path: self.caps.path,
                blob: blob.unwrap(),
                maps: self.maps.clone(),
            }]),
            EngineEvent::LaneUp { lane, .. } => Event::LaneUp(lane),
            EngineEvent::LaneDown { lane, why, .. } => Event::LaneDown(lane, why),
            EngineEvent::Tell { message, .. } => Event::Tell(message),
            _ => return None,
        })
    }

    async fn turn(&mut self) {
        let events = tokio::select! {
            frame = self.frames.recv() => vec![Event::Frame(frame.expect("the link lives"))],
            events = self.events.recv() => {
                events.unwrap().into_iter().filter_map(|e| self.translate(e)).collect()
            }
            () = tokio::time::sleep(std::time::Duration::from_millis(100)) => Vec::new(),
        };
        for event in events {
            self.link.handle_event(now(), event);
        }
        self.link.handle_timeout(now());
        self.carry_out().await;
    }

    async fn carry_out(&mut self) {
        while let Some(output) = self.link.poll_output() {
            match output {
                Output::Send(frame) => self.sender.send(&frame).await.unwrap(),
                Output::Connect { remote, .. } => {
                    self.engine.send(Command::Connect { link: LINK, remote }).unwrap();
                }
                Output::Told(message) => {
                    self.engine.send(Command::Told { link: LINK, message }).unwrap();
                }
                Output::Up { .. } => self.up = true,
                Output::Deliver { msg, .. } => self.heard.push(msg),
                Output::Lost(why) => panic!("the liar's link is lost: {why}"),
            }
        }
    }

    async fn say(&mut self, msg: PeerMsg) {
        self.link.send(now(), msg);
        self.carry_out().await;
    }

    /// Says it and waits for one answer.
    async fn ask(&mut self, msg: PeerMsg) -> PeerMsg {
        self.heard.clear();
        self.say(msg).await;
        within("an answer to the liar", async {
            while self.heard.is_empty() {
                self.turn().await;
            }
        })
        .await;
        self.heard.remove(0)
    }
}

/// A sound offer of one block.
fn offer(room: u64, grant: u64) -> Offer {
    Offer {
        room: RoomId(room),
        grant: GrantId(grant),
        issuer: None,
        span: Span { tokens: PAGE_TOKENS, prefix_tokens: 0 },
        blocks: vec![BlockList::from_ids(&[1])],
        lanes: vec![(LaneId(0), 1)],
        credit_parts: 8,
        lease_ms: 5_000,
    }
}

fn failed() -> Outcome {
    Outcome::Failed { why: Refusal::new(ErrorKind::Aborted, "a lie"), bytes: 0 }
}

#[tokio::test]
async fn a_peer_that_lies_about_rooms_is_refused_by_name_and_spoils_nobodys() {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let (prefill, decode) = tokio::join!(
        cluster.worker(Role::Prefill, "p", &["--audit-rooms"]),
        cluster.worker(Role::Decode, "d", &["--audit-rooms"]),
    );
    router.sees(&prefill).await;
    router.sees(&decode).await;
    let mut liar = Liar::connect(&router, &prefill, &decode).await;
    let refused: [(Offer, ErrorKind, &str); 4] = [
        (Offer { lanes: Vec::new(), ..offer(1, 1) }, ErrorKind::Malformed, "needs lanes"),
        (
            Offer { blocks: vec![BlockList::from_ids(&[1, 2])], ..offer(1, 1) },
            ErrorKind::InvalidPlan,
            "wrong number of blocks",
        ),
        (Offer { blocks: Vec::new(), ..offer(1, 1) }, ErrorKind::InvalidPlan, "one list of blocks"),
        (
            Offer { span: Span { tokens: u32::MAX, prefix_tokens: 0 }, ..offer(1, 1) },
            ErrorKind::NeverFits,
            "more blocks than the prefill's pool",
        ),
    ];
    for (bad, kind, text) in refused {
        match liar.ask(PeerMsg::Offer(Box::new(bad))).await {
            PeerMsg::Abort { why, .. } => {
                assert_eq!(why.kind, kind, "{why}");
                assert!(why.text.contains(text), "{why}");
            }
            other => panic!("{text}: {other:?}"),
        }
    }
    // None left a room behind.
    prefill.holds(0).await;

    // A room that another decode is named for: offered before its leg, and after.
    let r = router.reserve(&prefill, &decode, TOKENS).await;
    let waits = Leg::send(&prefill.serving, r.prefill_leg()).await.unwrap();
    prefill.holds(1).await;
    let theirs = Offer {
        span: Span { tokens: TOKENS, prefix_tokens: 0 },
        blocks: vec![BlockList::from_ids(&(0..TOKENS / PAGE_TOKENS).collect::<Vec<_>>())],
        ..offer(r.room, 7)
    };
    match liar.ask(PeerMsg::Offer(Box::new(theirs.clone()))).await {
        PeerMsg::Abort { why, .. } => assert!(why.text.contains("liar"), "{why}"),
        other => panic!("{other:?}"),
    }
    for msg in [
        PeerMsg::Abort {
            room: theirs.room,
            grant: GrantId::NONE,
            why: failed().why().unwrap().clone(),
        },
        PeerMsg::Ended { room: theirs.room, grant: theirs.grant, outcome: failed() },
        PeerMsg::Ended {
            room: theirs.room,
            grant: GrantId(1),
            outcome: Outcome::Done { bytes: 1 },
        },
    ] {
        let answer = liar.ask(msg).await;
        assert!(matches!(answer, PeerMsg::Quiesced { .. }), "{answer:?}");
    }
    leg(&decode.serving, r.decode_leg()).await.unwrap().assert_done(PAGES);
    waits.reply().await.unwrap().assert_done(0);
    // A consumed one.
    match liar.ask(PeerMsg::Offer(Box::new(theirs))).await {
        PeerMsg::Abort { why, .. } => assert_eq!(why.kind, ErrorKind::RoomEnded, "{why}"),
        other => panic!("{other:?}"),
    }
    // One grant number for two rooms.
    let answer = liar.ask(PeerMsg::Offer(Box::new(offer(21, 9)))).await;
    assert!(matches!(answer, PeerMsg::OfferAck { .. }), "{answer:?}");
    match liar.ask(PeerMsg::Offer(Box::new(offer(22, 9)))).await {
        PeerMsg::Abort { why, .. } => assert!(why.text.contains("another room's"), "{why}"),
        other => panic!("{other:?}"),
    }
    // A lease that is not renewed, while the peer lives.
    let brief = Offer { lease_ms: 300, ..offer(23, 11) };
    let answer = liar.ask(PeerMsg::Offer(Box::new(brief))).await;
    assert!(matches!(answer, PeerMsg::OfferAck { .. }), "{answer:?}");
    let ended = within("the end of a lease", async {
        loop {
            let found = liar.heard.iter().find_map(|msg| match msg {
                PeerMsg::Abort { room: RoomId(23), why, .. } => Some(why.clone()),
                _ => None,
            });
            match found {
                Some(why) => break why,
                None => liar.turn().await,
            }
        }
    })
    .await;
    assert_eq!((ended.kind, ended.blame), (ErrorKind::LeaseExpired, Blame::Decode), "{ended}");
    // A number that cannot be costs the link.
    let bad = Box::new(offer(1 << 63, 10));
    liar.say(PeerMsg::Offer(bad)).await;
    within("the end of the liar's link", async { while liar.frames.recv().await.is_some() {} })
        .await;
    until("the prefill says why", || {
        prefill.process.log().contains("room is out of range").then_some(())
    })
    .await;
    prefill.holds(0).await;
    router.assert_clean(&prefill, &decode).await;
}

/// Where the sender's NIC writes, the list says where: it is checked before anything is posted.
#[tokio::test]
async fn a_list_of_blocks_that_cannot_be_is_refused_by_index_and_nothing_is_written() {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let rig = Rig::start(&cluster, Engine::Gpunetio).await;
    let prefill = rig.worker(&cluster, Role::Prefill, "p", &[]).await;
    let decode = rig.worker(&cluster, Role::Decode, "d", &[]).await;
    router.sees(&prefill).await;
    router.sees(&decode).await;
    let nics = rig.nics.as_ref().unwrap().sockets.iter().map(|s| s.parse().unwrap()).collect();
    let engine = Box::new(GpunetioEngine::new(GpunetioConfig::new(nics)).unwrap());
    let mut liar = Liar::connect_over(engine, &router, &prefill, &decode).await;
    let written = || rig.stats(0).bytes;
    let before = written();
    let run = |first, count, stride| BlockList::Runs(vec![Run { first, count, stride }]);
    for (n, (list, text)) in [
        (BlockList::from_ids(&[3, 3]), "index=1, id=3"),
        (BlockList::from_ids(&[0, SMALL_BLOCKS]), "index=1, id=12"),
        (BlockList::from_ids(&[u32::MAX, 0]), "index=0, id=4294967295"),
        (run(SMALL_BLOCKS - 1, 2, 1), "index=1, id=12"),
        (run(0, 2, u32::MAX), "index=1, id=4294967295"),
        (run(5, 2, 0), "empty or standing run"),
    ]
    .into_iter()
    .enumerate()
    {
        let room = 100 + n as u64;
        let span = Span { tokens: 2 * PAGE_TOKENS, prefix_tokens: 0 };
        let bad = Offer { span, blocks: vec![list], ..offer(room, 1 + n as u64) };
        match liar.ask(PeerMsg::Offer(Box::new(bad))).await {
            PeerMsg::Abort { why, .. } => {
                assert_eq!(why.kind, ErrorKind::InvalidPlan, "{why}");
                assert!(why.text.contains(text), "{text}: {why}");
            }
            other => panic!("{text}: {other:?}"),
        }
    }
    prefill.holds(0).await;
    assert_eq!(written(), before);
    router.assert_clean(&prefill, &decode).await;
}

/// Messages about rooms that nobody knows.
const LIES: u64 = 50_000;
/// Of them, those after which tables that are bounded are full.
const WARM_UP: u64 = 15_000;
/// At a time.
const WINDOW: usize = 128;
/// A hundred bytes for each would be more.
const GROWTH_BYTES_MAX: u64 = 3 << 20;

fn resident(pid: i32) -> u64 {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap();
    let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

#[tokio::test]
async fn a_flood_of_unknown_rooms_costs_no_memory_and_nobody_else_a_room() {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let (prefill, decode) = tokio::join!(
        cluster.worker(Role::Prefill, "p", &[]),
        cluster.worker(Role::Decode, "d", &[]),
    );
    router.sees(&prefill).await;
    router.sees(&decode).await;
    router.assert_clean(&prefill, &decode).await;
    let mut liar = Liar::connect(&router, &prefill, &decode).await;
    let over = std::cell::Cell::new(false);
    let flood = async {
        let (mut warm, mut refused) = (0, 0);
        for n in 0..LIES {
            let (room, grant) = (RoomId(1_000_000 + n), GrantId(1_000_000 + n));
            let why = failed().why().unwrap().clone();
            liar.say(match n % 4 {
                0 => PeerMsg::Abort { room, grant: GrantId::NONE, why },
                1 => PeerMsg::Ended { room, grant, outcome: failed() },
                2 => PeerMsg::Ended { room, grant, outcome: Outcome::Done { bytes: 1 } },
                _ => PeerMsg::Offer(Box::new(offer(room.0, grant.0))),
            })
            .await;
            // These are not answered.
            liar.say(PeerMsg::Quiesced { room, grant, clean: true, heard: false }).await;
            liar.say(PeerMsg::Renew { room, grant, lease_ms: 1 }).await;
            if (n as usize + 1).is_multiple_of(WINDOW) {
                within("answers to the liar", async {
                    while liar.heard.len() < WINDOW {
                        liar.turn().await;
                    }
                })
                .await;
                refused += liar.heard.iter().filter(|m| matches!(m, PeerMsg::Abort { .. })).count();
                liar.heard.clear();
            }
            if n == WARM_UP {
                warm = resident(prefill.process.pid());
            }
        }
        over.set(true);
        (warm, refused)
    };
    let rooms = async {
        let mut rooms = 0;
        while !over.get() {
            router.hand_off(&prefill, &decode, 100).await;
            rooms += 1;
        }
        rooms
    };
    let ((warm, refused), rooms) = tokio::join!(flood, rooms);
    let grown = resident(prefill.process.pid()).saturating_sub(warm);
    eprintln!("{refused} offers refused, {rooms} rooms beside them, {grown} bytes more");
    assert!(rooms > 0, "nobody else was served");
    // Those that nobody claims are taken up to a limit.
    let offers = LIES as usize / 4;
    assert!(refused >= offers - limits::ORPHANS_PER_LINK_MAX - WINDOW, "{refused} of {offers}");
    assert!(grown < GROWTH_BYTES_MAX, "{grown} bytes for {} rooms", LIES - WARM_UP);
    drop(liar);
    prefill.holds(0).await;
    router.assert_clean(&prefill, &decode).await;
}
