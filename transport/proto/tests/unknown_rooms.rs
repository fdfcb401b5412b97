//! A million rooms that nobody knows, from one peer of each machine: no memory for them.

#![allow(clippy::unwrap_used, missing_docs)]

use std::sync::Arc;

use kvlane_proto::decode::{self, Decode, DecodeConfig};
use kvlane_proto::layout::{Coordinates, Dtype, KvKind, Order};
use kvlane_proto::msg::peer::{Offer, PeerMsg};
use kvlane_proto::prefill::{self, Prefill, PrefillConfig};
use kvlane_proto::{
    BlockList, DataPath, Device, ErrorKind, GrantId, Identity, Incarnation, LaneId, Layout, LinkId,
    Outcome, PoolMap, Refusal, Role, RoomId, Share, Span, Time, WorkerKey,
};

const ROOMS: u64 = 1_000_000;
/// After so many every bounded table is full.
const WARM_UP: u64 = 100_000;
/// Ten bytes for each would be more.
const GROWTH_BYTES_MAX: u64 = 8 << 20;
const LINK: LinkId = LinkId(1);

fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

fn layout() -> Layout {
    Layout {
        model: "m".into(),
        layers: 2,
        first_layer: 0,
        kv_heads: 1,
        kv_heads_total: 1,
        head_dim: 64,
        dtype: Dtype::Bf16,
        page_tokens: 16,
        window_tokens: 0,
        order: Order::Nhd,
        kind: KvKind::Split,
        at: Coordinates::SINGLE,
    }
}

fn peer(role: Role) -> WorkerKey {
    let identity = Identity::new("c", role, "liar", 0).unwrap();
    WorkerKey { identity, incarnation: Incarnation([1; 16]) }
}

fn message(n: u64) -> PeerMsg {
    let (room, grant) = (RoomId(n), GrantId(n + 1));
    let why = Refusal::new(ErrorKind::Aborted, "a lie");
    match n % 8 {
        0 => PeerMsg::Abort { room, grant: GrantId::NONE, why },
        1 => PeerMsg::Abort { room, grant, why },
        2 => PeerMsg::Ended { room, grant, outcome: Outcome::Failed { why, bytes: 0 } },
        3 => PeerMsg::Ended { room, grant, outcome: Outcome::Done { bytes: 1 } },
        4 => PeerMsg::Quiesced { room, grant, clean: true, heard: false },
        5 => PeerMsg::Renew { room, grant, lease_ms: 1_000 },
        6 => PeerMsg::OfferAck { room, grant },
        _ => PeerMsg::Offer(Box::new(Offer {
            room,
            grant,
            issuer: None,
            span: Span { tokens: 16, prefix_tokens: 0 },
            blocks: vec![BlockList::from_ids(&[1])],
            lanes: vec![(LaneId(0), 1)],
            credit_parts: 8,
            lease_ms: 1_000,
        })),
    }
}

/// Feeds all of them; how much more memory there is since the tables were full.
fn grown(mut take: impl FnMut(Time, PeerMsg)) -> u64 {
    let mut warm = 0;
    for n in 0..ROOMS {
        // Milliseconds, so that whatever has a deadline meets it.
        take(Time(0).plus_ms(n), message(n));
        if n == WARM_UP {
            warm = resident();
        }
    }
    resident().saturating_sub(warm)
}

// One test, because both look at the memory of the process.
#[test]
fn a_million_rooms_that_nobody_knows_are_answered_and_forgotten() {
    let pools: Arc<[Layout]> = [layout()].into();
    let map = Arc::new(PoolMap::contiguous(Device::Host, 0, &layout(), 64));
    let share = Arc::new(Share::between(&pools, &pools).unwrap());

    let mut machine =
        Prefill::<()>::new(PrefillConfig::new(pools.clone(), [map.clone()].into(), 1));
    machine.handle_event(
        Time(0),
        prefill::Event::LinkUp {
            link: LINK,
            peer: peer(Role::Decode),
            path: DataPath::ReceiverCopies,
            part_bytes: 1 << 20,
            share: share.clone(),
            pools: pools.clone(),
            maps: [].into(),
            since: Time(0),
            down: Vec::new(),
        },
    );
    let (mut answers, mut refused) = (0, 0);
    let more = grown(|now, msg| {
        machine.handle_event(now, prefill::Event::Peer { link: LINK, msg, echo_sent: now });
        machine.handle_timeout(now);
        while let Some(output) = machine.poll_output() {
            match output {
                prefill::Output::Send { msg: PeerMsg::Quiesced { .. }, .. } => answers += 1,
                prefill::Output::Send { msg: PeerMsg::Abort { .. }, .. } => refused += 1,
                prefill::Output::Quiesce { link, grant } => {
                    let quiet = prefill::Event::Quiesced { link, grant, proof: () };
                    machine.handle_event(now, quiet);
                }
                _ => {}
            }
        }
    });
    println!("prefill: {answers} answers, {refused} refusals, {more} bytes more");
    assert!(answers >= ROOMS / 2, "each end of a room is answered: {answers}");
    assert!(refused > 0, "offers beyond the limit are refused");
    assert!(more < GROWTH_BYTES_MAX, "{more} bytes");

    let mut machine = Decode::<()>::new(DecodeConfig::new(pools.clone(), [map].into(), 1));
    machine.handle_event(
        Time(0),
        decode::Event::LinkUp {
            link: LINK,
            peer: peer(Role::Prefill),
            path: DataPath::ReceiverCopies,
            lanes: 4,
            rails: 1,
            share,
            pools,
            down: Vec::new(),
        },
    );
    let mut said = 0;
    let more = grown(|now, msg| {
        machine.handle_event(now, decode::Event::Peer { link: LINK, msg });
        machine.handle_timeout(now);
        while let Some(output) = machine.poll_output() {
            said += u64::from(matches!(output, decode::Output::Send { .. }));
        }
    });
    println!("decode: {said} answers, {more} bytes more");
    assert_eq!(said, 0, "nothing is known of any of them");
    assert_eq!(machine.load().rooms, 0);
    assert!(more < GROWTH_BYTES_MAX, "{more} bytes");
}
