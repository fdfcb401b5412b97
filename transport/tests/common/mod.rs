//! One sample of every variant of every family, and what tests share.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::panic)]

use kvlane_proto::layout::{Coordinates, Dtype, KvKind, Order};
use kvlane_proto::msg::call::{Call, CallFrame, Reply, ReplyFrame, Reserve};
use kvlane_proto::msg::peer::{EngineOffer, LinkInfo, Offer, Outcome, PeerFrame, PeerMsg};
use kvlane_proto::msg::service::{
    Answer, Ask, Cursor, Load, Registration, ServiceRequest, ServiceResponse, WorkerAddress,
    WorkerView,
};
use kvlane_proto::msg::{Greeting, Hello, Purpose, Welcome};
use kvlane_proto::{
    Blame, BlockList, Device, ErrorKind, GrantId, IdempotencyKey, Identity, Incarnation, LaneId,
    Layout, PoolMap, Refusal, Role, RoomId, Run, Span, WorkerKey,
};
use kvlane_transport::wire::{Message, message};

/// One message, encoded as a whole frame.
pub struct Sample {
    pub family: &'static str,
    pub variant: &'static str,
    pub frame: Vec<u8>,
}

/// Names of all variants of an enum. The match is exhaustive, so that a new variant does not compile
/// until it is listed, and a listed one fails the test until it has a sample.
macro_rules! variants {
    ($($name:ident, $all:ident: $type:ident { $($variant:ident),* $(,)? })*) => { $(
        pub const $all: &[&str] = &[$(stringify!($variant)),*];
        pub fn $name(message: &$type) -> &'static str {
            match message { $($type::$variant { .. } => stringify!($variant),)* }
        }
    )* };
}

variants! {
    greeting_name, GREETINGS: Greeting { Hello, Welcome, Refused }
    peer_name, PEERS: PeerMsg {
        Heartbeat, Probe, Describe, Ready, Bye, Offer, OfferAck, Renew, Abort,
        Quiesced, Ended, Engine,
    }
    outcome_name, OUTCOMES: Outcome { Done, Failed, Unknown }
    call_name, CALLS: Call { Reserve, Abort, Await, Ping }
    reply_name, REPLIES: Reply { Reserved, Aborting, Ended, Running, Pong }
    ask_name, ASKS: Ask { Register, Renew, Deregister, List, IssuerSlot }
    answer_name, ANSWERS: Answer { Registered, Renewed, Deregistered, Workers, Slot }
}

pub fn identity(role: Role) -> Identity {
    Identity::new("c1", role, &format!("{role}-0"), 3).unwrap()
}

pub fn key(role: Role) -> WorkerKey {
    WorkerKey { identity: identity(role), incarnation: Incarnation(*b"0123456789abcdef") }
}

pub fn refusal() -> Refusal {
    Refusal::new(ErrorKind::Incomplete, "pages are missing").blamed(Blame::Prefill)
}

pub fn layout() -> Layout {
    Layout {
        model: "tiny".into(),
        layers: 2,
        first_layer: 0,
        kv_heads: 1,
        kv_heads_total: 2,
        head_dim: 8,
        dtype: Dtype::Bf16,
        page_tokens: 4,
        window_tokens: 0,
        order: Order::Nhd,
        kind: KvKind::Split,
        at: Coordinates { tp: (1, 2), ..Coordinates::SINGLE },
    }
}

fn address(role: Role) -> WorkerAddress {
    WorkerAddress { key: key(role), address: "10.0.0.1:7400".into() }
}

fn registration() -> Registration {
    Registration {
        worker: address(Role::Prefill),
        pools: vec![layout()],
        pool_blocks: 100,
        engines: vec!["tcp".into()],
        serving: "http://10.0.0.1:30000".into(),
        build: "0.1.0".into(),
    }
}

fn load() -> Load {
    Load { rooms: 1, queued: 2, free_lanes: 3, quarantined_blocks: 4, draining: true, owing: 5 }
}

pub fn hello(role: Role, purpose: Purpose) -> Hello {
    Hello {
        protocol: (1, 1),
        build: "0.1.0".into(),
        identity: identity(role),
        incarnation: key(role).incarnation,
        expects: None,
        purpose,
        capabilities: vec![],
    }
}

fn greetings() -> Vec<Greeting> {
    vec![
        Greeting::Hello(Hello {
            expects: Some(identity(Role::Prefill)),
            capabilities: vec!["a".into()],
            ..hello(Role::Decode, Purpose::Peer)
        }),
        Greeting::Welcome(Welcome {
            version: 1,
            build: "0.1.0".into(),
            identity: identity(Role::Prefill),
            incarnation: key(Role::Prefill).incarnation,
            notice_port: 7401,
            notice_token: [9; 16],
        }),
        Greeting::Refused(refusal()),
    ]
}

fn outcomes() -> Vec<Outcome> {
    vec![
        Outcome::Done { bytes: 4096 },
        Outcome::Failed { why: refusal(), bytes: 17 },
        Outcome::Unknown { why: refusal() },
    ]
}

fn peers() -> Vec<PeerMsg> {
    let (room, grant, lane) = (RoomId(0x0102_0304_0506_0708), GrantId(77), LaneId(2));
    let mut all = vec![
        PeerMsg::Heartbeat,
        PeerMsg::Probe,
        PeerMsg::Describe(Box::new(LinkInfo {
            pools: vec![layout()],
            engines: vec![EngineOffer {
                name: "gpunetio".into(),
                blob: vec![1, 2, 3],
                maps: vec![PoolMap::contiguous(Device::Gpu(1), 0x1000, &layout(), 100)],
            }],
            lanes: 4,
            part_bytes: 1 << 20,
        })),
        PeerMsg::Ready,
        PeerMsg::Bye(refusal()),
        PeerMsg::Offer(Box::new(Offer {
            room,
            grant,
            issuer: Some(identity(Role::Router)),
            span: Span { tokens: 40, prefix_tokens: 4 },
            blocks: vec![
                BlockList::Runs(vec![Run { first: 5, count: 9, stride: 1 }]),
                BlockList::Ids(vec![9, 4, 7]),
            ],
            lanes: vec![(lane, 6)],
            credit_parts: 8,
            lease_ms: 30_000,
        })),
        PeerMsg::OfferAck { room, grant },
        PeerMsg::Renew { room, grant, lease_ms: 30_000 },
        PeerMsg::Abort { room, grant: GrantId::NONE, why: refusal() },
        PeerMsg::Quiesced { room, grant, clean: true, heard: false },
    ];
    all.extend(outcomes().into_iter().map(|outcome| PeerMsg::Ended { room, grant, outcome }));
    all.push(PeerMsg::Engine(vec![0xb5, 0, 1, 2, 250, 251]));
    all
}

fn calls() -> Vec<Call> {
    let room = RoomId(7);
    vec![
        Call::Reserve(Reserve {
            key: IdempotencyKey([3; 16]),
            room,
            tokens: 40,
            prefills: vec![address(Role::Prefill)],
            wait_ms: 1000,
            deadline_ms: 60_000,
        }),
        Call::Abort { room, reason: "client went away".into() },
        Call::Await { room, wait_ms: 5 },
        Call::Ping,
    ]
}

fn replies() -> Vec<Reply> {
    let mut all = vec![
        Reply::Reserved { room: RoomId(7), unclaimed_ms: 5000 },
        Reply::Aborting,
        Reply::Running,
        Reply::Pong,
    ];
    all.extend(outcomes().into_iter().map(Reply::Ended));
    all
}

fn asks() -> Vec<Ask> {
    vec![
        Ask::Register(Box::new(registration())),
        Ask::Renew(load()),
        Ask::Deregister,
        Ask::List { after: Cursor { log: 6, revision: 5, began: 4 } },
        Ask::IssuerSlot { renew: Some(8), more_counters: true },
    ]
}

fn answers() -> Vec<Answer> {
    let other = Layout { page_tokens: 16, ..layout() };
    vec![
        Answer::Registered {
            lease_ms: 5000,
            epoch: 2,
            fits: vec![identity(Role::Decode)],
            differs: vec![(identity(Role::Decode), layout().differences(&other))],
            left_off: 1,
        },
        Answer::Renewed { lease_ms: 5000 },
        Answer::Deregistered,
        Answer::Workers {
            next: Cursor { log: 6, revision: 9, began: 4 },
            reset: true,
            workers: vec![WorkerView {
                registration: registration(),
                load: load(),
                alive: true,
                suspected: false,
                epoch: 2,
            }],
            more: false,
        },
        Answer::Slot { slot: 3, first_counter: 4, counters: 5, lease_ms: 60_000 },
    ]
}

fn sample<M: Message>(family: &'static str, variant: &'static str, message: &M) -> Sample {
    message.check().unwrap();
    Sample { family, variant, frame: message::seal(message).unwrap() }
}

/// One frame of every variant; a variant with several forms comes several times.
pub fn samples() -> Vec<Sample> {
    let mut all = Vec::new();
    for m in greetings() {
        all.push(sample("greeting", greeting_name(&m), &m));
    }
    for msg in peers() {
        let name = peer_name(&msg);
        all.push(sample("peer", name, &PeerFrame { seq: 2, echo: 1, msg }));
    }
    for call in calls() {
        let name = call_name(&call);
        all.push(sample("call", name, &CallFrame { id: 6, call }));
    }
    for reply in replies() {
        let name = reply_name(&reply);
        all.push(sample("reply", name, &ReplyFrame { id: 6, reply: Ok(reply) }));
    }
    all.push(sample("reply", "Err", &ReplyFrame { id: 6, reply: Err(refusal()) }));
    for ask in asks() {
        let name = ask_name(&ask);
        all.push(sample("request", name, &ServiceRequest { id: 6, ask }));
    }
    for answer in answers() {
        let name = answer_name(&answer);
        all.push(sample("response", name, &ServiceResponse { id: 6, answer: Ok(answer) }));
    }
    all.push(sample("response", "Err", &ServiceResponse { id: 6, answer: Err(refusal()) }));
    // Every variant that is listed has a sample.
    for (family, names) in [
        ("greeting", GREETINGS),
        ("peer", PEERS),
        ("call", CALLS),
        ("reply", REPLIES),
        ("request", ASKS),
        ("response", ANSWERS),
    ] {
        for name in names {
            assert!(
                all.iter().any(|s| s.family == family && s.variant == *name),
                "no sample of {family} {name}"
            );
        }
    }
    for name in OUTCOMES {
        assert!(outcomes().iter().any(|o| outcome_name(o) == *name), "no sample of outcome {name}");
    }
    all
}

/// Decodes a body as a family; what it decodes to is checked and encoded again.
pub fn reencode(family: &str, body: &[u8]) -> kvlane_proto::Result<Vec<u8>> {
    fn one<M: Message>(body: &[u8]) -> kvlane_proto::Result<Vec<u8>> {
        message::seal(&message::open::<M>(body)?)
    }
    match family {
        "greeting" => one::<Greeting>(body),
        "peer" => one::<PeerFrame>(body),
        "call" => one::<CallFrame>(body),
        "reply" => one::<ReplyFrame>(body),
        "request" => one::<ServiceRequest>(body),
        "response" => one::<ServiceResponse>(body),
        _ => panic!("no family {family}"),
    }
}

/// The families that [`reencode`] knows.
pub const FAMILIES: [&str; 6] = ["greeting", "peer", "call", "reply", "request", "response"];
