//! The decode machine, event by event.

use super::*;
use crate::ids::Incarnation;
use crate::layout::PoolMap;
use crate::layout::{Device, small_layout};

const LINK: LinkId = LinkId(1);
const ROOM: RoomId = RoomId(7);

fn at(ms: u64) -> Time {
    Time(0).plus_ms(ms)
}
fn prefill() -> WorkerAddress {
    let identity = Identity::new("c", Role::Prefill, "p", 0).unwrap();
    let key = WorkerKey { identity, incarnation: Incarnation([1; 16]) };
    WorkerAddress { key, address: "p:1".into() }
}
/// A worker whose proofs are grant numbers, with one link of one lane.
fn worker(path: DataPath) -> Decode<GrantId> {
    let layout = small_layout();
    let map = Arc::new(PoolMap::contiguous(Device::Host, 0, &layout, 16));
    let mut m = Decode::new(DecodeConfig::new(layout, map, 100));
    let peer = prefill().key;
    m.handle_event(at(0), Event::LinkUp { link: LINK, peer, path, lanes: 1 });
    m
}
fn lend(m: &mut Decode<GrantId>, room: RoomId, span: Span, ids: &[u32]) {
    let blocks = BlockList::from_ids(ids);
    let prefill = Some(prefill());
    m.handle_event(at(0), Event::Lend(Lend { room, span, blocks, prefill, deadline_ms: 60_000 }));
}
fn outputs(m: &mut Decode<GrantId>) -> Vec<Output<GrantId>> {
    std::iter::from_fn(|| m.poll_output()).collect()
}
fn grant_of(out: &[Output<GrantId>]) -> GrantId {
    out.iter()
        .find_map(|o| match o {
            Output::Lent { grant, .. } => Some(*grant),
            _ => None,
        })
        .unwrap()
}
fn quiesced(grant: GrantId, heard: bool) -> Event<GrantId> {
    let msg = PeerMsg::Quiesced { room: ROOM, grant, clean: true, heard };
    Event::Peer { link: LINK, msg }
}
const FOUR: Span = Span { tokens: 4, prefix_tokens: 0 };

#[test]
fn a_question_is_answered_and_the_last_word_is_not() {
    let mut m = worker(DataPath::ReceiverCopies);
    lend(&mut m, ROOM, FOUR, &[3]);
    let grant = grant_of(&outputs(&mut m));
    m.handle_event(at(1), Event::AbortLocal { room: ROOM, why: "test".into() });
    m.handle_event(at(2), Event::Fenced { grant, proof: grant });
    outputs(&mut m);
    m.handle_event(at(3), quiesced(grant, false));
    let out = outputs(&mut m);
    assert!(matches!(out[..], [Output::Send { msg: PeerMsg::Ended { .. }, .. }]), "{out:?}");
    for _ in 0..3 {
        m.handle_event(at(4), quiesced(grant, true));
        assert!(outputs(&mut m).is_empty());
    }
    assert_eq!(m.poll_timeout(), None, "nothing is repeated any more");
}

#[test]
fn a_late_proof_brings_the_lanes_back_too() {
    let mut m = worker(DataPath::OneSided);
    lend(&mut m, ROOM, FOUR, &[3]);
    let grant = grant_of(&outputs(&mut m));
    m.handle_event(at(1), Event::AbortLocal { room: ROOM, why: "test".into() });
    m.handle_event(at(1), quiesced(grant, true));
    let why = Refusal::new(ErrorKind::Io, "no flush");
    m.handle_event(at(2), Event::FenceFailed { grant, why });
    let load = m.load();
    assert_eq!((load.free_lanes, load.quarantined_blocks), (0, 1));
    m.handle_event(at(3), Event::Fenced { grant, proof: grant });
    let load = m.load();
    assert_eq!((load.free_lanes, load.quarantined_blocks), (1, 0));
    assert!(outputs(&mut m).iter().any(|o| matches!(o, Output::LateProof { .. })));
}

#[test]
fn a_room_without_pages_is_done_though_its_ack_was_lost() {
    let mut m = worker(DataPath::ReceiverCopies);
    lend(&mut m, ROOM, Span { tokens: 4, prefix_tokens: 4 }, &[]);
    let grant = grant_of(&outputs(&mut m));
    m.handle_event(at(1), quiesced(grant, false));
    m.handle_event(at(2), Event::Fenced { grant, proof: grant });
    let out = outputs(&mut m);
    assert!(out.iter().any(|o| matches!(o, Output::Ended { outcome, .. } if outcome.is_done())));
}

#[test]
fn a_repeated_offer_makes_the_lease_longer_here_too() {
    let mut m = worker(DataPath::ReceiverCopies);
    lend(&mut m, ROOM, FOUR, &[3]);
    outputs(&mut m);
    let mut last_offer = at(0);
    for ms in (200..9_000).step_by(200) {
        m.handle_timeout(at(ms));
        if outputs(&mut m).iter().any(|o| matches!(o, Output::Send { msg: PeerMsg::Offer(_), .. }))
        {
            last_offer = at(ms);
        }
    }
    assert!(last_offer > at(5_000));
    // The process stands still until just before the holder's lease of that offer is over.
    m.handle_timeout(last_offer.plus_ms(crate::time::holder_ms(limits::GRANT_LEASE_MS)));
    let ended = |o: &Output<GrantId>| matches!(o, Output::Send { msg: PeerMsg::Ended { .. }, .. });
    assert!(!outputs(&mut m).iter().any(ended));
}

#[test]
fn one_router_cannot_fill_the_queue() {
    let layout = small_layout();
    let map = Arc::new(PoolMap::contiguous(Device::Host, 0, &layout, 16));
    let config = DecodeConfig { queue_max: 16, ..DecodeConfig::new(layout, map, 100) };
    let mut m: Decode<GrantId> = Decode::new(config);
    let mut calls = 0;
    let mut reserve = |m: &mut Decode<GrantId>, router: &str, room: u64| {
        calls += 1;
        let from = Identity::new("c", Role::Router, router, 0).unwrap();
        let reserve = Reserve {
            key: IdempotencyKey([room as u8; 16]),
            room: RoomId(room),
            tokens: 4,
            prefill: prefill(),
            wait_ms: 1_000,
            deadline_ms: 60_000,
        };
        let body = Call::Reserve(reserve);
        m.handle_event(at(0), Event::Call { call: CallId(calls), from, body });
        outputs(m).into_iter().find_map(|o| match o {
            Output::Reply { reply, .. } => reply.err().map(|e| e.kind),
            _ => None,
        })
    };
    let share = 16 / limits::QUEUE_SHARES as u64;
    for room in 0..share {
        assert_eq!(reserve(&mut m, "r", room), None, "waits");
    }
    assert_eq!(reserve(&mut m, "r", 100), Some(ErrorKind::Busy));
    assert_eq!(reserve(&mut m, "s", 101), None, "another router waits as well");
    // What has left the queue does not count.
    m.handle_timeout(at(1_000));
    outputs(&mut m);
    assert_eq!((m.load().queued, m.load().rooms), (0, 0));
    assert_eq!(reserve(&mut m, "r", 102), None);
}

#[test]
fn a_fence_has_its_time_although_the_process_stood_still() {
    let mut m = worker(DataPath::ReceiverCopies);
    lend(&mut m, ROOM, FOUR, &[3]);
    let grant = grant_of(&outputs(&mut m));
    m.handle_event(at(1), Event::AbortLocal { room: ROOM, why: "test".into() });
    m.stood_still(at(20_000));
    m.handle_timeout(at(20_000));
    assert_eq!(m.load().quarantined_blocks, 0);
    m.handle_event(at(20_001), Event::Fenced { grant, proof: grant });
    let ended = |o: &Output<GrantId>| matches!(o, Output::Ended { proof: Some(_), .. });
    assert!(outputs(&mut m).iter().any(ended));
}
