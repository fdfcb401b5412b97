//! The prefill machine, event by event.

use std::ops::Range;

use super::*;
use crate::blocks::BlockList;
use crate::ids::Incarnation;
use crate::layout::{Coordinates, Device, Layout, PoolMap, small_layout};
use crate::msg::service::LoadState;
use crate::plan::Span;

const LINK: LinkId = LinkId(1);
const ROOM: RoomId = RoomId(7);
const GRANT: GrantId = GrantId(9);
const LANE: LaneId = LaneId(0);

fn at(ms: u64) -> Time {
    Time(0).plus_ms(ms)
}
/// A worker whose proofs are nothing, with one link.
fn worker(path: DataPath) -> Prefill<()> {
    let mut m = Prefill::new(config(16));
    link_up(&mut m, LINK, "d", path, &small_layout());
    m
}
fn config(blocks: u32) -> PrefillConfig {
    let layout = small_layout();
    let map = Arc::new(PoolMap::contiguous(Device::Host, 0, &layout, blocks));
    PrefillConfig::new([layout].into(), [map].into(), 1)
}
fn link_up(m: &mut Prefill<()>, link: LinkId, name: &str, path: DataPath, layout: &Layout) {
    let identity = Identity::new("c", Role::Decode, name, 0).unwrap();
    let peer = WorkerKey { identity, incarnation: Incarnation([1; 16]) };
    let pools: Arc<[Layout]> = [layout.clone()].into();
    let share = Arc::new(Share::between(&[small_layout()], &pools).unwrap());
    let there = PoolMap::contiguous(Device::Host, 1 << 20, layout, 16);
    let maps = match path {
        DataPath::OneSided => [Arc::new(there)].into(),
        DataPath::ReceiverCopies => [].into(),
    };
    let (part_bytes, since) = (1, at(0));
    let up =
        Event::LinkUp { link, peer, path, part_bytes, share, pools, maps, since, down: Vec::new() };
    m.handle_event(at(0), up);
}
fn outputs(m: &mut Prefill<()>) -> Vec<Output<()>> {
    std::iter::from_fn(|| m.poll_output()).collect()
}
fn offer(m: &mut Prefill<()>, now: Time, echo_sent: Time) {
    offer_on(m, LINK, GRANT, now, echo_sent);
}
fn offer_on(m: &mut Prefill<()>, link: LinkId, grant: GrantId, now: Time, echo_sent: Time) {
    let offer = Offer {
        room: ROOM,
        grant,
        issuer: None,
        span: Span { tokens: 8, prefix_tokens: 0 },
        blocks: vec![BlockList::from_ids(&[1, 2])],
        lanes: vec![(LANE, 1)],
        credit_parts: 8,
        lease_ms: 1_000,
    };
    let msg = PeerMsg::Offer(Box::new(offer));
    m.handle_event(now, Event::Peer { link, msg, echo_sent });
}
fn offer_of(
    m: &mut Prefill<()>,
    ids: &[u32],
    lanes: Vec<(LaneId, u32)>,
    now: Time,
) -> Vec<Output<()>> {
    let offer = Offer {
        room: ROOM,
        grant: GRANT,
        issuer: None,
        span: Span { tokens: 8, prefix_tokens: 0 },
        blocks: vec![BlockList::from_ids(ids)],
        credit_parts: 8 * lanes.len() as u32,
        lanes,
        lease_ms: 1_000,
    };
    let msg = PeerMsg::Offer(Box::new(offer));
    m.handle_event(now, Event::Peer { link: LINK, msg, echo_sent: now });
    outputs(m)
}
/// Offers a room with a lane on each of two rails.
fn two_lanes(m: &mut Prefill<()>, now: Time) -> Vec<Output<()>> {
    offer_of(m, &[1, 2], vec![(LANE, 1), (LaneId(1), 1)], now)
}
fn posted(out: &[Output<()>]) -> Vec<(PartId, LaneId)> {
    let each = out.iter().filter_map(|o| match o {
        Output::Post { part, lane, .. } => Some((*part, *lane)),
        _ => None,
    });
    each.collect()
}
fn attach(m: &mut Prefill<()>, now: Time) {
    attach_with(m, now, Takers::Any(1), 60_000);
}
fn attach_with(m: &mut Prefill<()>, now: Time, takers: Takers, deadline_ms: u64) {
    let ev = Event::Attach { room: ROOM, tokens: 8, takers, issuer: None, deadline_ms };
    m.handle_event(now, ev);
}
fn named(names: &[&str]) -> Takers {
    let who = |n: &&str| Identity::new("c", Role::Decode, n, 0).unwrap();
    Takers::Named(names.iter().map(who).collect())
}
fn chunk(m: &mut Prefill<()>, now: Time, tokens: Range<u32>, ids: &[u32]) {
    let blocks = BlockList::from_ids(ids);
    m.handle_event(now, Event::Chunk(Chunk { room: ROOM, pool: 0, tokens, layers: 0..4, blocks }));
}
fn posts(out: &[Output<()>]) -> usize {
    out.iter().filter(|o| matches!(o, Output::Post { .. })).count()
}
fn ended(m: &mut Prefill<()>, now: Time) {
    let outcome = Outcome::Failed { why: Refusal::new(ErrorKind::Aborted, "x"), bytes: 0 };
    let msg = PeerMsg::Ended { room: ROOM, grant: GRANT, outcome };
    m.handle_event(now, Event::Peer { link: LINK, msg, echo_sent: now });
}

#[test]
fn nothing_is_posted_after_the_lease_though_its_timer_is_late() {
    let mut m = worker(DataPath::ReceiverCopies);
    attach(&mut m, at(0));
    offer(&mut m, at(0), at(0));
    chunk(&mut m, at(1), 0..4, &[1]);
    assert_eq!(posts(&outputs(&mut m)), 4);
    chunk(&mut m, at(2_000), 4..8, &[2]);
    assert_eq!(posts(&outputs(&mut m)), 0);
    assert_eq!(m.poll_timeout(), Some(at(990)), "due at once");
}

#[test]
fn a_leg_that_comes_after_its_offer_was_given_up_gets_its_blocks_back() {
    let mut m = worker(DataPath::ReceiverCopies);
    offer(&mut m, at(0), at(0));
    m.handle_timeout(at(1_000));
    m.handle_event(at(1_001), Event::Quiesced { link: LINK, grant: GRANT, proof: () });
    outputs(&mut m);
    attach(&mut m, at(1_002));
    ended(&mut m, at(1_003));
    let out = outputs(&mut m);
    let released = |o: &&Output<()>| matches!(o, Output::Released { .. });
    assert_eq!(out.iter().filter(released).count(), 1, "{out:?}");
    assert!(matches!(out.last(), Some(Output::Ended { .. })), "{out:?}");
}

#[test]
fn a_one_sided_grant_does_not_use_the_next_connection_of_its_lane() {
    let mut m = worker(DataPath::OneSided);
    attach(&mut m, at(0));
    offer(&mut m, at(0), at(0));
    chunk(&mut m, at(1), 0..8, &[1, 2]);
    assert!(posts(&outputs(&mut m)) > 0);
    m.handle_event(at(2), Event::LaneDown { link: LINK, lane: LANE });
    m.handle_event(at(3), Event::LaneUp { link: LINK, lane: LANE });
    m.handle_timeout(at(900));
    let out = outputs(&mut m);
    assert_eq!(posts(&out), 0, "{out:?}");
    let abort = |o: &Output<()>| matches!(o, Output::Send { msg: PeerMsg::Abort { .. }, .. });
    assert!(out.iter().any(abort), "no lane is left: {out:?}");
}

#[test]
fn an_offer_that_may_be_older_than_its_lane_waits_for_its_repetition() {
    let mut m = worker(DataPath::OneSided);
    attach(&mut m, at(0));
    m.handle_event(at(1), Event::LaneDown { link: LINK, lane: LANE });
    m.handle_event(at(2), Event::LaneUp { link: LINK, lane: LANE });
    outputs(&mut m);
    offer(&mut m, at(3), at(1));
    assert!(outputs(&mut m).is_empty(), "neither taken nor refused");
    offer(&mut m, at(200), at(100));
    assert!(outputs(&mut m).iter().any(|o| matches!(o, Output::Granted { .. })));
}

#[test]
fn what_was_said_of_a_grant_is_not_improved_when_it_is_repeated() {
    let mut m = worker(DataPath::OneSided);
    attach(&mut m, at(0));
    offer(&mut m, at(0), at(0));
    chunk(&mut m, at(1), 0..8, &[1, 2]);
    m.handle_event(at(2), Event::LaneDown { link: LINK, lane: LANE });
    m.handle_event(at(3), Event::Quiesced { link: LINK, grant: GRANT, proof: () });
    for ms in [4, 5, 6] {
        ended(&mut m, at(ms));
        let out = outputs(&mut m);
        let said = out.iter().filter_map(|o| match o {
            Output::Send { msg: PeerMsg::Quiesced { clean, .. }, .. } => Some(*clean),
            _ => None,
        });
        let said: Vec<bool> = said.collect();
        assert!(!said.is_empty() && said.iter().all(|clean| !clean), "{out:?}");
    }
}

/// A second decode, linked to the same worker.
fn stranger(m: &mut Prefill<()>) -> LinkId {
    let link = LinkId(2);
    link_up(m, link, "e", DataPath::ReceiverCopies, &small_layout());
    link
}
fn attach_for(m: &mut Prefill<()>, decode: &str) -> Vec<Output<()>> {
    attach_with(m, at(1), named(&[decode]), 60_000);
    outputs(m)
}

#[test]
fn one_decode_cannot_spoil_the_room_of_another() {
    for forged in ["ended", "done", "offer"] {
        let mut m = worker(DataPath::ReceiverCopies);
        let link = stranger(&mut m);
        let why = Refusal::new(ErrorKind::Aborted, "x");
        let (room, grant) = (ROOM, GrantId(77));
        let msg = match forged {
            "ended" => PeerMsg::Ended { room, grant, outcome: Outcome::Failed { why, bytes: 0 } },
            "done" => PeerMsg::Ended { room, grant, outcome: Outcome::Done { bytes: 0 } },
            _ => PeerMsg::Offer(Box::new(Offer {
                room,
                grant,
                issuer: None,
                span: Span { tokens: 4, prefix_tokens: 0 },
                blocks: vec![BlockList::from_ids(&[1])],
                lanes: vec![(LANE, 1)],
                credit_parts: 8,
                lease_ms: 1_000,
            })),
        };
        m.handle_event(at(0), Event::Peer { link, msg, echo_sent: at(0) });
        outputs(&mut m);
        let out = attach_for(&mut m, "d");
        // A stranger's offer is told that the room is not its.
        let told = |o: &Output<()>| matches!(o, Output::Send { .. } | Output::Quiesce { .. });
        let left: Vec<_> = out.iter().filter(|o| !told(o)).collect();
        assert!(matches!(left[..], [Output::Attached { .. }]), "{forged}: {out:?}");
        assert_eq!(left.len() < out.len(), forged == "offer", "{forged}: {out:?}");
        offer(&mut m, at(2), at(2));
        chunk(&mut m, at(3), 0..8, &[1, 2]);
        assert_eq!(posts(&outputs(&mut m)), 8, "{forged}");
    }
}

#[test]
fn a_leg_hears_what_its_own_decode_said_before() {
    let mut m = worker(DataPath::ReceiverCopies);
    ended(&mut m, at(0));
    outputs(&mut m);
    let out = attach_for(&mut m, "d");
    assert!(
        matches!(out[..], [Output::Attached { .. }, Output::Released { .. }, Output::Ended { .. }]),
        "{out:?}"
    );
    let out = attach_for(&mut m, "d");
    assert!(matches!(&out[..], [Output::Refused { .. }]), "heard once: {out:?}");
}

#[test]
fn offers_nobody_claims_are_bounded_by_count_and_by_their_lists() {
    let mut m = Prefill::<()>::new(PrefillConfig { orphans_max: 3, ..config(1 << 20) });
    let link = stranger(&mut m);
    let send = |m: &mut Prefill<()>, n: u64, blocks: u32| {
        let ids: Vec<u32> = (0..blocks).map(|i| i * 2 % 7 + i * 8).collect();
        let msg = PeerMsg::Offer(Box::new(Offer {
            room: RoomId(n),
            grant: GrantId(n),
            issuer: None,
            span: Span { tokens: blocks * 4, prefix_tokens: 0 },
            blocks: vec![BlockList::Ids(ids)],
            lanes: vec![(LANE, 1)],
            credit_parts: 8,
            lease_ms: 1_000,
        }));
        m.handle_event(at(0), Event::Peer { link, msg, echo_sent: at(0) });
        outputs(m)
            .into_iter()
            .any(|o| matches!(o, Output::Send { msg: PeerMsg::OfferAck { .. }, .. }))
    };
    let half = limits::ORPHAN_WORDS_PER_LINK_MAX as u32 / 2;
    assert!(send(&mut m, 1, half));
    assert!(!send(&mut m, 2, half + 1), "too many words");
    assert!(send(&mut m, 3, 1) && send(&mut m, 4, 1));
    assert!(!send(&mut m, 5, 1), "too many offers");
    assert!(m.rooms.values().all(|r| r.takers.values().all(|t| t.parts.is_empty())));
    m.handle_event(at(1), Event::LinkDown { link, why: Refusal::new(ErrorKind::PeerLost, "x") });
    for n in [1, 3, 4] {
        m.handle_event(at(1), Event::Quiesced { link, grant: GrantId(n), proof: () });
    }
    assert_eq!(m.active(), 0);
}

#[test]
fn a_late_proof_releases_withheld_blocks() {
    let mut m = worker(DataPath::OneSided);
    attach(&mut m, at(0));
    offer(&mut m, at(0), at(0));
    chunk(&mut m, at(1), 0..8, &[1, 2]);
    ended(&mut m, at(2));
    m.handle_timeout(at(3 + limits::FENCE_MS));
    assert!(outputs(&mut m).iter().any(|o| matches!(o, Output::Withheld { .. })));
    assert_eq!(m.load().quarantined_blocks, 2);
    m.handle_event(at(9_000), Event::Quiesced { link: LINK, grant: GRANT, proof: () });
    let out = outputs(&mut m);
    assert!(
        matches!(out[..], [Output::Released { ref proofs, .. }] if proofs.len() == 1),
        "{out:?}"
    );
    assert_eq!(m.load().quarantined_blocks, 0);
}

#[test]
fn one_grant_number_is_one_room() {
    let mut m = worker(DataPath::ReceiverCopies);
    attach(&mut m, at(0));
    offer(&mut m, at(0), at(0));
    outputs(&mut m);
    let second = Offer {
        room: RoomId(8),
        grant: GRANT,
        issuer: None,
        span: Span { tokens: 8, prefix_tokens: 0 },
        blocks: vec![BlockList::from_ids(&[3, 4])],
        lanes: vec![(LANE, 1)],
        credit_parts: 8,
        lease_ms: 1_000,
    };
    let msg = PeerMsg::Offer(Box::new(second));
    m.handle_event(at(1), Event::Peer { link: LINK, msg, echo_sent: at(1) });
    let out = outputs(&mut m);
    let refused = |o: &Output<()>| {
        matches!(o, Output::Send { msg: PeerMsg::Abort { room: RoomId(8), .. }, .. })
    };
    assert!(out.iter().any(refused), "{out:?}");
    assert_eq!(m.active(), 1);
    // What the engine says of the number is the first room's.
    chunk(&mut m, at(2), 0..8, &[1, 2]);
    assert_eq!(posts(&outputs(&mut m)), 8);
}

#[test]
fn a_decode_that_never_decides_holds_a_room_little_longer_than_its_deadline() {
    let mut m = worker(DataPath::ReceiverCopies);
    attach_with(&mut m, at(0), Takers::Any(1), 900);
    offer(&mut m, at(0), at(0));
    m.handle_timeout(at(900));
    m.handle_event(at(901), Event::Quiesced { link: LINK, grant: GRANT, proof: () });
    m.handle_timeout(at(900 + limits::FENCE_MS));
    let out = outputs(&mut m);
    let unknown =
        |o: &Output<()>| matches!(o, Output::Ended { outcome: Outcome::Unknown { .. }, .. });
    assert!(out.iter().any(unknown), "{out:?}");
    assert_eq!(m.active(), 0);
}

#[test]
fn an_offer_that_comes_after_the_prefill_gave_up_is_told_why() {
    let mut m = worker(DataPath::ReceiverCopies);
    attach(&mut m, at(0));
    m.handle_event(at(1), Event::Finish { room: ROOM });
    outputs(&mut m);
    offer(&mut m, at(2), at(0));
    let out = outputs(&mut m);
    let told = out.iter().find_map(|o| match o {
        Output::Send { msg: PeerMsg::Abort { why, .. }, .. } => Some(why.kind),
        _ => None,
    });
    assert_eq!(told, Some(ErrorKind::Incomplete), "{out:?}");
}

const SECOND: LinkId = LinkId(2);
const OTHER: GrantId = GrantId(5);

/// A worker with links to both ranks of a decode instance, each of which takes one of two heads.
fn two_takers(path: DataPath) -> Prefill<()> {
    let half = |rank| Layout {
        kv_heads: 1,
        at: Coordinates { tp: (rank, 2), ..Coordinates::SINGLE },
        ..small_layout()
    };
    let mut m = Prefill::new(config(16));
    link_up(&mut m, LINK, "d", path, &half(0));
    link_up(&mut m, SECOND, "e", path, &half(1));
    m
}
fn done(m: &mut Prefill<()>, link: LinkId, grant: GrantId, now: Time) {
    let msg = PeerMsg::Ended { room: ROOM, grant, outcome: Outcome::Done { bytes: 100 } };
    m.handle_event(now, Event::Peer { link, msg, echo_sent: now });
}
fn ack_all(m: &mut Prefill<()>, now: Time, out: &[Output<()>]) {
    for o in out {
        if let Output::Post { link, grant, part, lane, .. } = o {
            let ev = Event::Acked { link: *link, grant: *grant, part: *part, lane: *lane };
            m.handle_event(now, ev);
        }
    }
}
fn count(out: &[Output<()>], what: fn(&Output<()>) -> bool) -> usize {
    out.iter().filter(|o| what(o)).count()
}
const RELEASED: fn(&Output<()>) -> bool = |o| matches!(o, Output::Released { .. });
const ENDED: fn(&Output<()>) -> bool = |o| matches!(o, Output::Ended { .. });

#[test]
fn a_source_is_released_when_every_taker_is_quiet_and_ends_when_every_taker_has_spoken() {
    let mut m = two_takers(DataPath::ReceiverCopies);
    attach_with(&mut m, at(0), named(&["d", "e"]), 60_000);
    offer(&mut m, at(1), at(1));
    chunk(&mut m, at(2), 0..8, &[1, 2]);
    let out = outputs(&mut m);
    assert_eq!(posts(&out), 8, "the second taker has not come");
    ack_all(&mut m, at(3), &out);
    m.handle_event(at(4), Event::Quiesced { link: LINK, grant: GRANT, proof: () });
    done(&mut m, LINK, GRANT, at(5));
    let out = outputs(&mut m);
    assert_eq!(count(&out, RELEASED) + count(&out, ENDED), 0, "{out:?}");
    // What was declared before it came is sent to it as well.
    offer_on(&mut m, SECOND, OTHER, at(6), at(6));
    let out = outputs(&mut m);
    assert_eq!(posts(&out), 8);
    let wanted = |o: &Output<()>| matches!(o, Output::Granted { wanted: Some(_), .. });
    assert!(out.iter().any(wanted), "{out:?}");
    ack_all(&mut m, at(7), &out);
    m.handle_event(at(8), Event::Quiesced { link: SECOND, grant: OTHER, proof: () });
    let out = outputs(&mut m);
    assert!(out.iter().any(|o| matches!(o, Output::Released { proofs, .. } if proofs.len() == 2)));
    assert_eq!(count(&out, ENDED), 0);
    done(&mut m, SECOND, OTHER, at(9));
    let out = outputs(&mut m);
    assert!(
        out.iter()
            .any(|o| matches!(o, Output::Ended { outcome: Outcome::Done { bytes: 200 }, .. })),
        "{out:?}"
    );
    assert_eq!((count(&out, RELEASED), m.active()), (0, 0));
}

#[test]
fn takers_get_different_bytes_of_the_same_blocks() {
    let mut m = two_takers(DataPath::ReceiverCopies);
    attach_with(&mut m, at(0), Takers::Any(2), 60_000);
    offer(&mut m, at(1), at(1));
    offer_on(&mut m, SECOND, OTHER, at(1), at(1));
    chunk(&mut m, at(2), 0..8, &[1, 2]);
    let mut bytes: Vec<u64> = Vec::new();
    for o in outputs(&mut m) {
        if let Output::Post { pages, .. } = o {
            bytes.extend(pages.iter().flat_map(|p| p.address..p.address + u64::from(p.bytes)));
        }
    }
    let len = bytes.len() as u64;
    bytes.sort_unstable();
    bytes.dedup();
    assert_eq!((bytes.len() as u64, len), (2 * small_layout().block_bytes(), len), "none twice");
}

#[test]
fn a_taker_that_fails_fails_the_room_but_not_the_other_takers() {
    let mut m = two_takers(DataPath::ReceiverCopies);
    attach_with(&mut m, at(0), named(&["d", "e"]), 60_000);
    offer(&mut m, at(1), at(1));
    offer_on(&mut m, SECOND, OTHER, at(1), at(1));
    m.handle_event(
        at(2),
        Event::LinkDown { link: LINK, why: Refusal::new(ErrorKind::PeerLost, "x") },
    );
    m.handle_event(at(3), Event::Quiesced { link: LINK, grant: GRANT, proof: () });
    outputs(&mut m);
    chunk(&mut m, at(4), 0..8, &[1, 2]);
    let out = outputs(&mut m);
    assert_eq!(posts(&out), 8);
    ack_all(&mut m, at(5), &out);
    m.handle_event(at(6), Event::Quiesced { link: SECOND, grant: OTHER, proof: () });
    done(&mut m, SECOND, OTHER, at(7));
    let out = outputs(&mut m);
    assert_eq!(count(&out, RELEASED), 1);
    assert!(
        out.iter().any(|o| matches!(o, Output::Ended { outcome: Outcome::Unknown { .. }, .. })),
        "{out:?}"
    );
}

#[test]
fn a_leg_whose_takers_do_not_all_come_ends_at_its_deadline() {
    let mut m = two_takers(DataPath::ReceiverCopies);
    attach_with(&mut m, at(0), named(&["d", "e"]), 900);
    offer(&mut m, at(1), at(1));
    outputs(&mut m);
    m.handle_timeout(at(900));
    let out = outputs(&mut m);
    assert_eq!(count(&out, |o| matches!(o, Output::Send { msg: PeerMsg::Abort { .. }, .. })), 2);
    offer_on(&mut m, SECOND, OTHER, at(901), at(901));
    let out = outputs(&mut m);
    assert!(matches!(out[..], [Output::Send { msg: PeerMsg::Abort { .. }, .. }]), "{out:?}");
    m.handle_event(at(902), Event::Quiesced { link: LINK, grant: GRANT, proof: () });
    ended(&mut m, at(903));
    let out = outputs(&mut m);
    assert_eq!((count(&out, RELEASED), count(&out, ENDED), m.active()), (1, 1, 0), "{out:?}");
    assert_eq!(m.poll_timeout(), None);
}

#[test]
fn nobody_fetches_a_room_twice_or_uninvited() {
    for takers in [Takers::Any(0), Takers::Named(vec![]), named(&["d", "d"]), Takers::Any(65)] {
        let mut m = two_takers(DataPath::ReceiverCopies);
        attach_with(&mut m, at(0), takers, 900);
        assert!(matches!(outputs(&mut m)[..], [Output::Refused { .. }]));
    }
    let mut m = two_takers(DataPath::ReceiverCopies);
    attach_with(&mut m, at(0), named(&["e"]), 900);
    outputs(&mut m);
    offer(&mut m, at(1), at(1));
    let told = outputs(&mut m).into_iter().find_map(|o| match o {
        Output::Send { msg: PeerMsg::Abort { why, .. }, .. } => Some(why.to_string()),
        _ => None,
    });
    let told = told.unwrap();
    assert!(
        told.contains("expected=c/decode/e/0") && told.contains("found=c/decode/d/0"),
        "{told}"
    );
}

/// Two rows beside the pages, one head of one layer each.
fn rows_layout() -> Layout {
    let kind = crate::layout::KvKind::Rows { rows: 2 };
    Layout { layers: 2, page_tokens: 1, kind, ..small_layout() }
}

#[test]
fn rows_of_a_prompt_without_tokens_are_sent_when_they_are_declared() {
    let pools: Arc<[Layout]> = [small_layout(), rows_layout()].into();
    let map = |l: &Layout| Arc::new(PoolMap::contiguous(Device::Host, 0, l, 8));
    let maps = pools.iter().map(map).collect();
    let mut m = Prefill::<()>::new(PrefillConfig::new(pools.clone(), maps, 1));
    let identity = Identity::new("c", Role::Decode, "d", 0).unwrap();
    let peer = WorkerKey { identity, incarnation: Incarnation([1; 16]) };
    let share = Arc::new(Share::between(&pools, &pools).unwrap());
    let (link, path, part_bytes, maps) = (LINK, DataPath::ReceiverCopies, 1, [].into());
    let since = at(0);
    let up =
        Event::LinkUp { link, peer, path, part_bytes, share, pools, maps, since, down: Vec::new() };
    m.handle_event(at(0), up);
    let (room, takers, deadline_ms) = (ROOM, Takers::Any(1), 60_000);
    let leg = Event::Attach { room, tokens: 0, takers, issuer: None, deadline_ms };
    m.handle_event(at(0), leg);
    let offer = Offer {
        room: ROOM,
        grant: GRANT,
        issuer: None,
        span: Span { tokens: 0, prefix_tokens: 0 },
        blocks: vec![BlockList::EMPTY, BlockList::from_ids(&[1, 2])],
        lanes: vec![(LANE, 1)],
        credit_parts: 8,
        lease_ms: 1_000,
    };
    let msg = PeerMsg::Offer(Box::new(offer));
    m.handle_event(at(1), Event::Peer { link: LINK, msg, echo_sent: at(1) });
    let out = outputs(&mut m);
    assert!(out.iter().any(|o| matches!(o, Output::Granted { parts: 4, .. })), "{out:?}");
    let abort = |o: &Output<()>| matches!(o, Output::Send { msg: PeerMsg::Abort { .. }, .. });
    assert!(posts(&out) == 0 && !out.iter().any(abort), "nothing is declared: {out:?}");
    for layer in 0..2 {
        let (tokens, layers) = (0..0, layer..layer + 1);
        let blocks = BlockList::from_ids(&[3, 4]);
        m.handle_event(at(2), Event::Chunk(Chunk { room: ROOM, pool: 1, tokens, layers, blocks }));
        let out = outputs(&mut m);
        assert_eq!(posts(&out), 2, "the rows of layer {layer}: {out:?}");
    }
    m.handle_event(at(3), Event::Finish { room: ROOM });
    assert!(!outputs(&mut m).iter().any(abort));
}

#[test]
fn a_prompt_without_tokens_is_not_finished_before_its_rows() {
    let pools: Arc<[Layout]> = [small_layout(), rows_layout()].into();
    let map = |l: &Layout| Arc::new(PoolMap::contiguous(Device::Host, 0, l, 8));
    let maps = pools.iter().map(map).collect();
    let mut m = Prefill::<()>::new(PrefillConfig::new(pools, maps, 1));
    let (room, takers, deadline_ms) = (ROOM, Takers::Any(1), 60_000);
    let leg = Event::Attach { room, tokens: 0, takers, issuer: None, deadline_ms };
    m.handle_event(at(0), leg);
    m.handle_event(at(1), Event::Finish { room: ROOM });
    let out = outputs(&mut m);
    let failed = out.iter().find_map(|o| match o {
        Output::Ended { outcome: Outcome::Failed { why, .. }, .. } => Some(why.kind),
        _ => None,
    });
    assert_eq!(failed, Some(ErrorKind::Incomplete), "{out:?}");
}

#[test]
fn numbers_of_a_lying_decode_do_not_overflow() {
    let mut m = two_takers(DataPath::ReceiverCopies);
    attach_with(&mut m, at(0), named(&["d", "e"]), 60_000);
    offer(&mut m, at(1), at(1));
    offer_on(&mut m, SECOND, OTHER, at(1), at(1));
    for (link, grant) in [(LINK, GRANT), (SECOND, OTHER)] {
        let msg = PeerMsg::Renew { room: ROOM, grant, lease_ms: u64::MAX };
        m.handle_event(at(2), Event::Peer { link, msg, echo_sent: at(2) });
        let outcome = Outcome::Done { bytes: u64::MAX };
        let msg = PeerMsg::Ended { room: ROOM, grant, outcome };
        m.handle_event(at(3), Event::Peer { link, msg, echo_sent: at(3) });
        m.handle_event(at(4), Event::Quiesced { link, grant, proof: () });
    }
    let out = outputs(&mut m);
    let done = |o: &Output<()>| {
        matches!(o, Output::Ended { outcome: Outcome::Done { bytes: u64::MAX }, .. })
    };
    assert!(out.iter().any(done), "{out:?}");
}

fn grants(out: &[Output<()>]) -> Vec<(LinkId, GrantId, Vec<LaneId>, Arc<Plan>)> {
    let each = out.iter().filter_map(|o| match o {
        Output::Grant { link, grant, lanes, plan } => {
            Some((*link, *grant, lanes.clone(), plan.clone()))
        }
        _ => None,
    });
    each.collect()
}

#[test]
fn an_engine_that_writes_itself_learns_where_to_before_anything_else() {
    // The offer comes before its leg, and after it.
    for early in [true, false] {
        let mut m = worker(DataPath::OneSided);
        if !early {
            attach(&mut m, at(0));
            chunk(&mut m, at(0), 0..8, &[1, 2]);
            outputs(&mut m);
        }
        offer(&mut m, at(1), at(1));
        let out = outputs(&mut m);
        assert!(matches!(out[0], Output::Grant { .. }), "{out:?}");
        let [(LINK, GRANT, lanes, plan)] = &grants(&out)[..] else { panic!("{out:?}") };
        assert_eq!(lanes, &[LANE]);
        // Slab 0, block 1 of the decode's pool.
        let first = plan.pages(PartId(0)).unwrap().iter().next().unwrap();
        assert_eq!(first.address, (1 << 20) + u64::from(small_layout().page_bytes()));
        assert_eq!(posts(&out) > 0, !early);
        // Neither a repetition nor the leg makes another one of it.
        offer(&mut m, at(2), at(2));
        if early {
            attach(&mut m, at(3));
        }
        assert!(grants(&outputs(&mut m)).is_empty());
    }
    let mut m = worker(DataPath::ReceiverCopies);
    offer(&mut m, at(1), at(1));
    assert!(grants(&outputs(&mut m)).is_empty());
}

#[test]
fn a_grant_is_for_the_lanes_that_can_be_used() {
    let mut m = worker(DataPath::OneSided);
    m.handle_event(at(1), Event::LaneDown { link: LINK, lane: LANE });
    let out = two_lanes(&mut m, at(2));
    assert_eq!(grants(&out)[0].2, [LaneId(1)]);
    attach(&mut m, at(3));
    m.handle_event(at(3), Event::LaneUp { link: LINK, lane: LANE });
    chunk(&mut m, at(3), 0..8, &[1, 2]);
    let lanes = posted(&outputs(&mut m));
    assert!(!lanes.is_empty() && lanes.iter().all(|(_, lane)| *lane == LaneId(1)), "{lanes:?}");
}

#[test]
fn blocks_outside_the_decodes_own_pool_are_refused_like_any_bad_offer() {
    let mut m = worker(DataPath::OneSided);
    for ids in [&[1, 99][..], &[3, 3]] {
        let out = offer_of(&mut m, ids, vec![(LANE, 1)], at(0));
        let [Output::Send { msg: PeerMsg::Abort { why, .. }, .. }] = &out[..] else {
            panic!("{out:?}")
        };
        assert!(why.kind == ErrorKind::InvalidPlan && why.text.contains("pool=0"), "{why}");
        assert_eq!(m.active(), 0);
    }
    // A receiver that copies looks at its lists itself.
    let mut m = worker(DataPath::ReceiverCopies);
    assert!(!offer_of(&mut m, &[1, 99], vec![(LANE, 1)], at(0)).is_empty());
    assert_eq!(m.active(), 1);
}

#[test]
fn lists_that_weigh_little_and_make_long_plans_are_bounded_too() {
    let mut m = Prefill::<()>::new(config(1 << 20));
    let layout = small_layout();
    link_up(&mut m, LINK, "d", DataPath::OneSided, &layout);
    let link = m.links.get_mut(&LINK).unwrap();
    link.maps = [Arc::new(PoolMap::contiguous(Device::Host, 0, &layout, 1 << 20))].into();
    let send = |m: &mut Prefill<()>, n: u64, blocks: u32| {
        let offer = Offer {
            room: RoomId(n),
            grant: GrantId(n),
            issuer: None,
            span: Span { tokens: blocks * 4, prefix_tokens: 0 },
            blocks: vec![BlockList::from_ids(&(0..blocks).collect::<Vec<_>>())],
            lanes: vec![(LANE, 1)],
            credit_parts: 8,
            lease_ms: 1_000,
        };
        assert!(offer.words() < 10);
        let msg = PeerMsg::Offer(Box::new(offer));
        m.handle_event(at(0), Event::Peer { link: LINK, msg, echo_sent: at(0) });
        !grants(&outputs(m)).is_empty()
    };
    let half = limits::ORPHAN_WORDS_PER_LINK_MAX as u32 / 2;
    assert!(send(&mut m, 1, half - 10));
    assert!(!send(&mut m, 2, half + 10), "too many words");
    assert!(send(&mut m, 3, half - 10));
    m.handle_event(
        at(1),
        Event::LinkDown { link: LINK, why: Refusal::new(ErrorKind::PeerLost, "x") },
    );
    let out = outputs(&mut m);
    assert_eq!(count(&out, |o| matches!(o, Output::Quiesce { .. })), 2, "the engine forgets both");
}

fn ack(m: &mut Prefill<()>, ms: u64, part: PartId, lane: LaneId) {
    m.handle_event(at(ms), Event::Acked { link: LINK, grant: GRANT, part, lane });
}
fn quiesces(out: &[Output<()>]) -> usize {
    count(out, |o| matches!(o, Output::Quiesce { .. }))
}
fn said_clean(out: &[Output<()>]) -> Vec<bool> {
    let each = out.iter().filter_map(|o| match o {
        Output::Send { msg: PeerMsg::Quiesced { clean, .. }, .. } => Some(*clean),
        _ => None,
    });
    each.collect()
}
fn aborts(out: &[Output<()>]) -> Vec<ErrorKind> {
    let each = out.iter().filter_map(|o| match o {
        Output::Send { msg: PeerMsg::Abort { why, .. }, .. } => Some(why.kind),
        _ => None,
    });
    each.collect()
}

/// Two lanes on two rails, one rail dies between the last write and its completion: every part in
/// doubt goes over the other one, none is taken for sent, and the decode is told not to rely on it.
#[test]
fn parts_in_doubt_go_over_the_other_rail_and_the_end_is_not_called_clean() {
    let mut m = worker(DataPath::OneSided);
    attach(&mut m, at(0));
    two_lanes(&mut m, at(0));
    chunk(&mut m, at(1), 0..8, &[1, 2]);
    let first = posted(&outputs(&mut m));
    let on = |lane: LaneId| first.iter().filter(move |p| p.1 == lane).map(|p| p.0);
    assert_eq!((on(LANE).count(), on(LaneId(1)).count()), (4, 4), "{first:?}");
    // One is known to be there, the rest of the dead lane's is not.
    let known = on(LANE).next().unwrap();
    ack(&mut m, 2, known, LANE);
    m.handle_event(at(3), Event::LaneDown { link: LINK, lane: LANE });
    m.handle_event(at(3), Event::LaneUp { link: LINK, lane: LANE });
    on(LaneId(1)).for_each(|part| ack(&mut m, 4, part, LaneId(1)));
    assert_eq!(quiesces(&outputs(&mut m)), 0, "three are in doubt");
    m.handle_timeout(at(50));
    let again = posted(&outputs(&mut m));
    let mut wanted: Vec<_> = on(LANE).skip(1).map(|part| (part, LaneId(1))).collect();
    let mut found = again.clone();
    wanted.sort_unstable();
    found.sort_unstable();
    assert_eq!(found, wanted, "over the other rail, and not the next connection of the lane");
    // An acknowledgement of the dead connection that was late: the part is there, but what was
    // posted again is waited for.
    ack(&mut m, 51, again[0].0, LANE);
    again.iter().skip(1).for_each(|(part, lane)| ack(&mut m, 52, *part, *lane));
    assert_eq!(quiesces(&outputs(&mut m)), 0);
    ack(&mut m, 53, again[0].0, again[0].1);
    ack(&mut m, 53, again[0].0, again[0].1);
    assert_eq!(quiesces(&outputs(&mut m)), 1);
    m.handle_event(at(54), Event::Quiesced { link: LINK, grant: GRANT, proof: () });
    assert_eq!(said_clean(&outputs(&mut m)), [false]);
}

#[test]
fn a_lane_lost_while_the_engine_becomes_quiet_is_told_too() {
    let mut m = worker(DataPath::OneSided);
    attach(&mut m, at(0));
    two_lanes(&mut m, at(0));
    chunk(&mut m, at(1), 0..8, &[1, 2]);
    posted(&outputs(&mut m)).into_iter().for_each(|(part, lane)| ack(&mut m, 2, part, lane));
    assert_eq!(quiesces(&outputs(&mut m)), 1);
    m.handle_event(at(3), Event::LaneDown { link: LINK, lane: LANE });
    m.handle_event(at(4), Event::Quiesced { link: LINK, grant: GRANT, proof: () });
    assert_eq!(said_clean(&outputs(&mut m)), [false]);

    // And on the other hand: with nothing lost it is clean.
    let mut m = worker(DataPath::OneSided);
    attach(&mut m, at(0));
    two_lanes(&mut m, at(0));
    chunk(&mut m, at(1), 0..8, &[1, 2]);
    posted(&outputs(&mut m)).into_iter().for_each(|(part, lane)| ack(&mut m, 2, part, lane));
    m.handle_event(at(4), Event::Quiesced { link: LINK, grant: GRANT, proof: () });
    assert_eq!(said_clean(&outputs(&mut m)), [true]);
}

#[test]
fn without_a_lane_left_the_room_is_given_up_and_the_decode_decides() {
    let mut m = worker(DataPath::OneSided);
    attach(&mut m, at(0));
    two_lanes(&mut m, at(0));
    chunk(&mut m, at(1), 0..8, &[1, 2]);
    m.handle_event(at(2), Event::LaneDown { link: LINK, lane: LANE });
    assert!(aborts(&outputs(&mut m)).is_empty(), "one is left");
    m.handle_event(at(3), Event::LaneDown { link: LINK, lane: LaneId(1) });
    let out = outputs(&mut m);
    assert_eq!((aborts(&out), quiesces(&out)), (vec![ErrorKind::NoPath], 1));
    m.handle_event(at(4), Event::Quiesced { link: LINK, grant: GRANT, proof: () });
    let out = outputs(&mut m);
    assert_eq!(said_clean(&out), [false]);
    assert_eq!(count(&out, |o| matches!(o, Output::Ended { .. })), 0, "it is not this side's word");
    // All had arrived before the lanes went: the decode says so, and that stands.
    done(&mut m, LINK, GRANT, at(5));
    let out = outputs(&mut m);
    assert!(
        out.iter().any(|o| matches!(o, Output::Ended { outcome, .. } if outcome.is_done())),
        "{out:?}"
    );
}

/// Lanes that came again before the link was up: what was offered for the connections before these is
/// not about them.
#[test]
fn an_offer_that_may_be_older_than_the_link_waits_for_its_repetition_too() {
    let mut m = worker(DataPath::OneSided);
    m.links.get_mut(&LINK).unwrap().since = at(100);
    attach(&mut m, at(100));
    outputs(&mut m);
    offer(&mut m, at(101), at(99));
    assert!(outputs(&mut m).is_empty(), "neither taken nor refused");
    offer(&mut m, at(102), at(100));
    assert_eq!(grants(&outputs(&mut m)).len(), 1);
}

#[test]
fn a_prefill_that_drains_says_whether_it_still_owes_pages() {
    let mut m = worker(DataPath::ReceiverCopies);
    attach_with(&mut m, at(0), Takers::Any(1), 900);
    offer(&mut m, at(0), at(0));
    assert_eq!((m.load().state(), m.load().owing), (LoadState::Serving, 0));
    m.handle_event(at(1), Event::Drain);
    assert_eq!(m.load().state(), LoadState::Draining);
    chunk(&mut m, at(2), 0..8, &[1, 2]);
    m.handle_event(at(3), Event::Finish { room: ROOM });
    m.handle_event(at(3), Event::Finish { room: ROOM });
    let _ = outputs(&mut m);
    assert_eq!((m.load().state(), m.load().owing, m.load().rooms), (LoadState::Owing, 1, 1));
    // The taker is never heard of again.
    m.handle_timeout(at(900));
    m.handle_event(at(901), Event::Quiesced { link: LINK, grant: GRANT, proof: () });
    m.handle_timeout(at(900 + limits::FENCE_MS));
    let _ = outputs(&mut m);
    assert_eq!((m.load().state(), m.load().owing), (LoadState::Drained, 0));
}
