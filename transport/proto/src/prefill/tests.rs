//! The prefill machine, event by event.

use std::ops::Range;

use super::*;
use crate::ids::Incarnation;
use crate::layout::small_layout;
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
    let mut m = Prefill::new(PrefillConfig::new(small_layout(), 16, 1));
    let identity = Identity::new("c", Role::Decode, "d", 0).unwrap();
    let peer = WorkerKey { identity, incarnation: Incarnation([1; 16]) };
    m.handle_event(at(0), Event::LinkUp { link: LINK, peer, path, part_bytes: 1 });
    m
}
fn outputs(m: &mut Prefill<()>) -> Vec<Output<()>> {
    std::iter::from_fn(|| m.poll_output()).collect()
}
fn offer(m: &mut Prefill<()>, now: Time, echo_sent: Time) {
    let offer = Offer {
        room: ROOM,
        grant: GRANT,
        issuer: None,
        span: Span { tokens: 8, prefix_tokens: 0 },
        blocks: BlockList::from_ids(&[1, 2]),
        lanes: vec![(LANE, 1)],
        credit_parts: 8,
        lease_ms: 1_000,
    };
    let msg = PeerMsg::Offer(Box::new(offer));
    m.handle_event(now, Event::Peer { link: LINK, msg, echo_sent });
}
fn attach(m: &mut Prefill<()>, now: Time) {
    let (decode, issuer) = (None, None);
    let ev = Event::Attach { room: ROOM, tokens: 8, decode, issuer, deadline_ms: 60_000 };
    m.handle_event(now, ev);
}
fn chunk(m: &mut Prefill<()>, now: Time, tokens: Range<u32>, ids: &[u32]) {
    let blocks = BlockList::from_ids(ids);
    m.handle_event(now, Event::Chunk(Chunk { room: ROOM, tokens, layers: 0..4, blocks }));
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
    let identity = Identity::new("c", Role::Decode, "e", 0).unwrap();
    let peer = WorkerKey { identity, incarnation: Incarnation([2; 16]) };
    let (link, path) = (LinkId(2), DataPath::ReceiverCopies);
    m.handle_event(at(0), Event::LinkUp { link, peer, path, part_bytes: 1 });
    link
}
fn attach_for(m: &mut Prefill<()>, decode: &str) -> Vec<Output<()>> {
    let decode = Some(Identity::new("c", Role::Decode, decode, 0).unwrap());
    let (issuer, deadline_ms) = (None, 60_000);
    m.handle_event(at(1), Event::Attach { room: ROOM, tokens: 8, decode, issuer, deadline_ms });
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
                blocks: BlockList::from_ids(&[1]),
                lanes: vec![(LANE, 1)],
                credit_parts: 8,
                lease_ms: 1_000,
            })),
        };
        m.handle_event(at(0), Event::Peer { link, msg, echo_sent: at(0) });
        outputs(&mut m);
        let out = attach_for(&mut m, "d");
        assert!(matches!(out[..], [Output::Attached { .. }]), "{forged}: {out:?}");
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
    let mut m = Prefill::<()>::new(PrefillConfig {
        orphans_max: 3,
        ..PrefillConfig::new(small_layout(), 1 << 20, 1)
    });
    let link = stranger(&mut m);
    let send = |m: &mut Prefill<()>, n: u64, blocks: u32| {
        let ids: Vec<u32> = (0..blocks).map(|i| i * 2 % 7 + i * 8).collect();
        let msg = PeerMsg::Offer(Box::new(Offer {
            room: RoomId(n),
            grant: GrantId(n),
            issuer: None,
            span: Span { tokens: blocks * 4, prefix_tokens: 0 },
            blocks: BlockList::Ids(ids),
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
    assert!(m.rooms.values().all(|r| r.held.as_ref().unwrap().parts.is_empty()));
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
    assert!(matches!(out[..], [Output::Released { proof: Some(()), .. }]), "{out:?}");
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
        blocks: BlockList::from_ids(&[3, 4]),
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
    let (decode, issuer) = (None, None);
    let ev = Event::Attach { room: ROOM, tokens: 8, decode, issuer, deadline_ms: 900 };
    m.handle_event(at(0), ev);
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
