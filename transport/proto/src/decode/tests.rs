//! The decode machine, event by event.

use super::*;
use crate::error::{Blame, ErrorKind};
use crate::ids::{IdempotencyKey, Incarnation, Role};
use crate::layout::{Coordinates, Device, small_layout};
use crate::msg::call::Reserve;
use crate::time::Time;

const LINK: LinkId = LinkId(1);
/// To the rank with the other half of the heads.
const LINK_B: LinkId = LinkId(2);
const BOTH: [LinkId; 2] = [LINK, LINK_B];
const ROOM: RoomId = RoomId(7);
const FOUR: Span = Span { tokens: 4, prefix_tokens: 0 };
const EIGHT: Span = Span { tokens: 8, prefix_tokens: 0 };

fn at(ms: u64) -> Time {
    Time(0).plus_ms(ms)
}
fn rank(rank: u32) -> WorkerAddress {
    let identity = Identity::new("c", Role::Prefill, "p", rank).unwrap();
    let key = WorkerKey { identity, incarnation: Incarnation([1; 16]) };
    WorkerAddress { key, address: "p:1".into() }
}
fn prefill() -> WorkerAddress {
    rank(0)
}
/// The ranks of a prefill with tensor parallel size 2: one head of the decode's two each.
fn halves() -> Vec<WorkerAddress> {
    vec![rank(0), rank(1)]
}
fn half(rank: u32) -> Layout {
    let at = Coordinates { tp: (rank, 2), ..Coordinates::SINGLE };
    Layout { kv_heads: 1, at, ..small_layout() }
}
fn config() -> DecodeConfig {
    let layout = small_layout();
    let map = Arc::new(PoolMap::contiguous(Device::Host, 0, &layout, 16));
    // One layer of one block of half the heads.
    let part_bytes = u64::from(half(0).page_bytes()) * 2;
    DecodeConfig { part_bytes, ..DecodeConfig::new([layout].into(), [map].into(), 100) }
}
fn lost() -> Refusal {
    Refusal::new(ErrorKind::NoPath, "its NIC is lost")
}
fn link_up(m: &mut Decode<GrantId>, link: LinkId, path: DataPath, lanes: u16, from: Layout) {
    let peer = if link == LINK { rank(0) } else { rank(1) }.key;
    let pools: Arc<[Layout]> = [from].into();
    let share = Arc::new(Share::between(&pools, &[small_layout()]).unwrap());
    m.handle_event(
        at(0),
        Event::LinkUp { link, peer, path, lanes, down: Vec::new(), rails: 1, share, pools },
    );
}
/// A worker whose proofs are grant numbers, with one link of one lane.
fn worker(path: DataPath) -> Decode<GrantId> {
    let mut m = Decode::new(config());
    link_up(&mut m, LINK, path, 1, small_layout());
    m
}
/// A worker with a link of one lane to each half.
fn worker_of_two(paths: [DataPath; 2]) -> Decode<GrantId> {
    let mut m = Decode::new(config());
    for (rank, link) in (0..).zip(BOTH) {
        link_up(&mut m, link, paths[rank as usize], 1, half(rank));
    }
    m
}
fn lend_from(
    m: &mut Decode<GrantId>,
    room: RoomId,
    span: Span,
    ids: &[u32],
    prefills: Vec<WorkerAddress>,
) {
    let blocks = vec![BlockList::from_ids(ids)];
    m.handle_event(at(0), Event::Lend(Lend { room, span, blocks, prefills, deadline_ms: 60_000 }));
}
fn lend(m: &mut Decode<GrantId>, room: RoomId, span: Span, ids: &[u32]) {
    lend_from(m, room, span, ids, vec![prefill()]);
}
fn reservation(room: u64, prefills: Vec<WorkerAddress>) -> Reserve {
    let key = IdempotencyKey([room as u8; 16]);
    let (wait_ms, deadline_ms) = (1_000, 60_000);
    Reserve { key, room: RoomId(room), tokens: 4, prefills, wait_ms, deadline_ms }
}
/// Reserves as a router; the refusal, if it comes at once.
fn reserve(m: &mut Decode<GrantId>, router: &str, reserve: Reserve) -> Option<Refusal> {
    let from = Identity::new("c", Role::Router, router, 0).unwrap();
    let (call, body) = (CallId(reserve.room.0), Call::Reserve(reserve));
    m.handle_event(at(0), Event::Call { call, from, body });
    outputs(m).into_iter().find_map(|o| match o {
        Output::Reply { reply, .. } => reply.err(),
        _ => None,
    })
}
/// Calls that were answered, and whether with what they asked for.
fn replies(out: &[Output<GrantId>]) -> Vec<(u64, bool)> {
    let reply = |o: &Output<GrantId>| match o {
        Output::Reply { call, reply } => Some((call.0, reply.is_ok())),
        _ => None,
    };
    out.iter().filter_map(reply).collect()
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
fn quiesced_on(link: LinkId, grant: GrantId, heard: bool) -> Event<GrantId> {
    let msg = PeerMsg::Quiesced { room: ROOM, grant, clean: true, heard };
    Event::Peer { link, msg }
}
fn quiesced(grant: GrantId, heard: bool) -> Event<GrantId> {
    quiesced_on(LINK, grant, heard)
}
/// The links that are told an end.
fn told(out: &[Output<GrantId>]) -> Vec<LinkId> {
    let each = out.iter().filter_map(|o| match o {
        Output::Send { link, msg: PeerMsg::Ended { .. } } => Some(*link),
        _ => None,
    });
    each.collect()
}
fn fences(out: &[Output<GrantId>]) -> Vec<FenceHow> {
    let each = out.iter().filter_map(|o| match o {
        Output::Fence { how, .. } => Some(*how),
        _ => None,
    });
    each.collect()
}
/// How rooms ended, and whether with a proof.
fn ends(out: &[Output<GrantId>]) -> Vec<(RoomId, Outcome, bool)> {
    let each = out.iter().filter_map(|o| match o {
        Output::Ended { room, outcome, proof, .. } => {
            Some((*room, outcome.clone(), proof.is_some()))
        }
        _ => None,
    });
    each.collect()
}
/// The rooms that were opened, in order.
fn opened(out: &[Output<GrantId>], m: &Decode<GrantId>) -> Vec<RoomId> {
    let each = out.iter().filter_map(|o| match o {
        Output::Open { grant, .. } => m.by_grant.get(grant).copied(),
        _ => None,
    });
    each.collect()
}
fn arrive(
    m: &mut Decode<GrantId>,
    link: LinkId,
    grant: GrantId,
    parts: impl IntoIterator<Item = u32>,
) {
    for part in parts {
        m.handle_event(at(1), Event::Arrived { link, grant, part: PartId(part) });
    }
}
fn down(m: &mut Decode<GrantId>, ms: u64, link: LinkId) {
    let why = Refusal::new(ErrorKind::PeerLost, "gone");
    m.handle_event(at(ms), Event::LinkDown { link, why });
}

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
    let mut m: Decode<GrantId> = Decode::new(DecodeConfig { queue_max: 16, ..config() });
    let reserve = |m: &mut Decode<GrantId>, router: &str, room: u64| {
        reserve(m, router, reservation(room, vec![prefill()])).map(|why| why.kind)
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

#[test]
fn done_comes_after_both_sources_in_any_order() {
    for (first, second) in [(LINK, LINK_B), (LINK_B, LINK)] {
        let mut m = worker_of_two([DataPath::ReceiverCopies; 2]);
        lend_from(&mut m, ROOM, EIGHT, &[3, 5], halves());
        let out = outputs(&mut m);
        let grant = grant_of(&out);
        let sources = out.iter().find_map(|o| match o {
            Output::Open { sources, .. } => Some(sources),
            _ => None,
        });
        let links: Vec<LinkId> = sources.unwrap().iter().map(|s| s.0).collect();
        assert_eq!(links, BOTH);
        let offers =
            out.iter().filter(|o| matches!(o, Output::Send { msg: PeerMsg::Offer(_), .. }));
        assert_eq!(offers.count(), 2);
        // Four layers of two blocks; the same numbers on either link are other parts.
        arrive(&mut m, first, grant, (0..8).chain(0..8));
        arrive(&mut m, second, grant, 0..7);
        assert_eq!(fences(&outputs(&mut m)), []);
        arrive(&mut m, second, grant, [7]);
        assert_eq!(fences(&outputs(&mut m)), [FenceHow::Close]);
        m.handle_event(at(2), Event::Fenced { grant, proof: grant });
        let out = outputs(&mut m);
        let bytes = small_layout().block_bytes() * 2;
        assert_eq!(ends(&out), [(ROOM, Outcome::Done { bytes }, true)]);
        assert_eq!(told(&out), BOTH);
        assert_eq!(m.load().free_lanes, 2);
        // Each is told until it has heard for itself.
        m.handle_event(at(3), quiesced_on(first, grant, true));
        m.handle_timeout(at(3 + limits::RESEND_MS));
        assert_eq!(told(&outputs(&mut m)), [second]);
        m.handle_event(at(4), quiesced_on(second, grant, true));
        assert_eq!(m.poll_timeout(), None);
    }
}

#[test]
fn what_comes_on_a_link_that_is_no_source_counts_for_nothing() {
    let mut m = worker_of_two([DataPath::ReceiverCopies; 2]);
    // This rank has everything, but it has no link in the room.
    let foreign = LinkId(3);
    let pools: Arc<[Layout]> = [small_layout()].into();
    let share = Arc::new(Share::between(&pools, &pools).unwrap());
    let (peer, path) = (rank(9).key, DataPath::ReceiverCopies);
    m.handle_event(
        at(0),
        Event::LinkUp {
            link: foreign,
            peer,
            path,
            lanes: 1,
            down: Vec::new(),
            rails: 1,
            share,
            pools,
        },
    );
    lend_from(&mut m, ROOM, FOUR, &[3], halves());
    let grant = grant_of(&outputs(&mut m));
    arrive(&mut m, LINK, grant, 0..4);
    arrive(&mut m, foreign, grant, 0..8);
    m.handle_event(at(1), quiesced_on(foreign, grant, true));
    let why = Refusal::new(ErrorKind::Aborted, "not mine");
    let msg = PeerMsg::Abort { room: ROOM, grant, why };
    m.handle_event(at(1), Event::Peer { link: foreign, msg });
    down(&mut m, 1, foreign);
    assert_eq!(outputs(&mut m).len(), 0);
    arrive(&mut m, LINK_B, grant, 0..4);
    assert_eq!(fences(&outputs(&mut m)), [FenceHow::Close]);
}

#[test]
fn a_lost_source_ends_the_room_once_and_the_other_is_told() {
    let mut m = worker_of_two([DataPath::ReceiverCopies; 2]);
    lend_from(&mut m, ROOM, FOUR, &[3], halves());
    let grant = grant_of(&outputs(&mut m));
    arrive(&mut m, LINK, grant, 0..4);
    down(&mut m, 2, LINK_B);
    let out = outputs(&mut m);
    assert_eq!((fences(&out), told(&out)), (vec![FenceHow::Revoke], vec![LINK]));
    m.handle_event(at(3), Event::Fenced { grant, proof: grant });
    let out = outputs(&mut m);
    let [(ROOM, Outcome::Failed { why, bytes }, true)] = &ends(&out)[..] else { panic!("{out:?}") };
    assert_eq!((why.kind, *bytes), (ErrorKind::PeerLost, small_layout().block_bytes() / 2));
    assert_eq!(told(&out), [LINK]);
    m.handle_event(at(4), Event::Fenced { grant, proof: grant });
    assert_eq!(outputs(&mut m).len(), 0);
    m.handle_event(at(5), quiesced(grant, true));
    assert_eq!((m.load().rooms, m.poll_timeout()), (0, None));
}

#[test]
fn an_abort_of_one_source_is_told_to_both() {
    let mut m = worker_of_two([DataPath::OneSided, DataPath::ReceiverCopies]);
    lend_from(&mut m, ROOM, FOUR, &[3], halves());
    let grant = grant_of(&outputs(&mut m));
    let why = Refusal::new(ErrorKind::Aborted, "no");
    m.handle_event(
        at(1),
        Event::Peer { link: LINK_B, msg: PeerMsg::Abort { room: ROOM, grant, why } },
    );
    let out = outputs(&mut m);
    // The one that writes for itself still has a word to say.
    assert_eq!((told(&out), fences(&out)), (BOTH.to_vec(), vec![]));
    m.handle_event(at(2), quiesced_on(LINK_B, grant, false));
    assert_eq!(fences(&outputs(&mut m)), []);
    m.handle_event(at(3), quiesced_on(LINK, grant, false));
    assert_eq!(fences(&outputs(&mut m)), [FenceHow::Close]);
    m.handle_event(at(4), Event::Fenced { grant, proof: grant });
    let out = outputs(&mut m);
    assert_eq!((ends(&out).len(), told(&out)), (1, BOTH.to_vec()));
}

#[test]
fn a_room_is_quiet_when_every_one_sided_source_is() {
    let paths = [DataPath::OneSided; 2];
    // Both say so; one does not; a lane of one is lost; one itself is lost.
    for (case, how) in
        (0..).zip([FenceHow::Close, FenceHow::Revoke, FenceHow::Revoke, FenceHow::Revoke])
    {
        let mut m = worker_of_two(paths);
        lend_from(&mut m, ROOM, FOUR, &[3], halves());
        let grant = grant_of(&outputs(&mut m));
        arrive(&mut m, LINK, grant, 0..4);
        arrive(&mut m, LINK_B, grant, 0..4);
        m.handle_event(at(2), quiesced_on(LINK, grant, false));
        assert_eq!(fences(&outputs(&mut m)), [], "{case}: the other is awaited");
        match case {
            0 => m.handle_event(at(3), quiesced_on(LINK_B, grant, false)),
            1 => m.handle_timeout(at(2 + limits::QUIESCE_MS)),
            2 => {
                m.handle_event(
                    at(3),
                    Event::LaneDown { link: LINK_B, lane: LaneId(0), why: lost() },
                );
                m.handle_event(at(3), quiesced_on(LINK_B, grant, false));
            }
            _ => down(&mut m, 3, LINK_B),
        }
        assert_eq!(fences(&outputs(&mut m)), [how], "{case}");
        m.handle_event(at(4), Event::Fenced { grant, proof: grant });
        assert!(ends(&outputs(&mut m))[0].1.is_done(), "{case}");
    }
}

#[test]
fn a_source_that_is_done_waits_for_the_others_without_losing_its_lease() {
    let mut m = worker_of_two([DataPath::OneSided; 2]);
    lend_from(&mut m, ROOM, FOUR, &[3], halves());
    let grant = grant_of(&outputs(&mut m));
    for link in BOTH {
        m.handle_event(at(1), Event::Peer { link, msg: PeerMsg::OfferAck { room: ROOM, grant } });
    }
    arrive(&mut m, LINK, grant, 0..4);
    m.handle_event(at(1), quiesced_on(LINK, grant, false));
    let mut renewed = Vec::new();
    // Longer than a lease, and than a source that has ended may lack parts.
    for ms in (0..limits::GRANT_LEASE_MS + 10_000).step_by(1_000) {
        m.handle_timeout(at(ms));
        for o in outputs(&mut m) {
            match o {
                Output::Send { link, msg: PeerMsg::Renew { .. } } => renewed.push(link),
                o => panic!("{o:?}"),
            }
        }
    }
    assert!(BOTH.iter().all(|link| renewed.iter().filter(|r| *r == link).count() >= 2));
    // One that has ended early is not waited for, and is named.
    m.handle_event(at(41_000), quiesced_on(LINK_B, grant, false));
    m.handle_timeout(at(41_000 + 4 * limits::QUIESCE_MS));
    assert_eq!(told(&outputs(&mut m)), BOTH);
    m.handle_event(at(41_300), Event::Fenced { grant, proof: grant });
    let out = ends(&outputs(&mut m));
    let why = out[0].1.why().unwrap();
    assert_eq!(why.kind, ErrorKind::Incomplete);
    assert!(why.text.contains(&rank(1).key.identity.to_string()), "{why}");
}

#[test]
fn sources_that_do_not_cover_are_refused_by_layer_and_head() {
    let names_the_gap = |why: &Refusal| {
        assert_eq!(why.kind, ErrorKind::Incompatible);
        assert!(why.text.contains("layer=0, head=1"), "{why}");
        assert!(why.text.contains(&rank(0).key.identity.to_string()), "{why}");
    };
    // Links are up: at once.
    let mut m = worker_of_two([DataPath::ReceiverCopies; 2]);
    names_the_gap(&reserve(&mut m, "r", reservation(1, vec![rank(0)])).unwrap());
    lend_from(&mut m, ROOM, FOUR, &[3], vec![rank(0)]);
    let out = outputs(&mut m);
    let [Output::LendRefused { why, .. }] = &out[..] else { panic!("{out:?}") };
    names_the_gap(&why.to_refusal());
    assert_eq!((m.load().rooms, m.load().queued), (0, 0));
    // As soon as the last link is up, whether or not there are lanes.
    let mut m: Decode<GrantId> = Decode::new(config());
    assert_eq!(reserve(&mut m, "r", reservation(1, halves())), None);
    link_up(&mut m, LINK, DataPath::ReceiverCopies, 1, half(0));
    assert_eq!(outputs(&mut m).len(), 0, "the other may have the rest");
    let lower = Layout { layers: 2, ..half(1) };
    link_up(&mut m, LINK_B, DataPath::ReceiverCopies, 1, lower);
    let out = outputs(&mut m);
    let reply = out.iter().find_map(|o| match o {
        Output::Reply { reply: Err(why), .. } => Some(why),
        _ => None,
    });
    assert!(reply.unwrap().text.contains("layer=2, head=1"), "{out:?}");
    assert_eq!((m.load().queued, m.load().free_lanes), (0, 2));
}

#[test]
fn a_list_of_prefills_is_checked() {
    let mut m: Decode<GrantId> = Decode::new(config());
    let router = Identity::new("c", Role::Router, "r", 0).unwrap();
    let stranger = WorkerAddress { key: WorkerKey { identity: router, ..rank(0).key }, ..rank(0) };
    for (prefills, kind, words) in [
        (vec![], ErrorKind::Malformed, "nobody sends"),
        (vec![rank(0), rank(0)], ErrorKind::Malformed, "named twice"),
        (vec![rank(0), stranger], ErrorKind::Malformed, "not a prefill worker"),
        ((0..=limits::RANKS_MAX as u32).map(rank).collect(), ErrorKind::LimitExceeded, "too many"),
    ] {
        let why = reserve(&mut m, "r", reservation(1, prefills)).unwrap();
        assert_eq!(why.kind, kind);
        assert!(why.text.contains(words), "{why}");
    }
    assert_eq!((m.load().rooms, m.lanes.queued()), (0, 0));
    // Lent with the set that was reserved, or none, but no other.
    assert_eq!(reserve(&mut m, "r", reservation(7, halves())), None);
    for prefills in [vec![rank(0)], vec![rank(1), rank(1)], vec![rank(0), rank(2)]] {
        lend_from(&mut m, ROOM, FOUR, &[3], prefills);
        let out = outputs(&mut m);
        assert!(matches!(out[..], [Output::LendRefused { .. }]), "{out:?}");
    }
    lend_from(&mut m, ROOM, FOUR, &[3], vec![rank(1), rank(0)]);
    assert!(matches!(outputs(&mut m)[..], [Output::Lent { .. }]));
}

#[test]
fn opposite_orders_do_not_block_each_other_and_lanes_come_back_to_both() {
    let mut m: Decode<GrantId> = Decode::new(config());
    let rooms = [RoomId(1), RoomId(2), RoomId(3)];
    for (n, room) in (0..).zip(rooms) {
        let mut prefills = halves();
        prefills.rotate_left(n % 2);
        lend_from(&mut m, room, FOUR, &[n as u32], prefills);
    }
    let connects = outputs(&mut m);
    let connects = connects.iter().filter(|o| matches!(o, Output::Connect(_)));
    assert_eq!(connects.count(), 2, "each once");
    link_up(&mut m, LINK_B, DataPath::ReceiverCopies, 1, half(1));
    assert_eq!(outputs(&mut m).len(), 0, "from every source or from none");
    assert_eq!((m.load().free_lanes, m.load().queued), (1, 3));
    link_up(&mut m, LINK, DataPath::ReceiverCopies, 1, half(0));
    for (n, room) in (0..).zip(rooms) {
        let out = outputs(&mut m);
        assert_eq!(opened(&out, &m), [room]);
        assert_eq!((m.load().free_lanes, m.load().queued), (0, 2 - n));
        let mut lent: Vec<_> = m.lent_lanes().collect();
        lent.sort_unstable();
        assert_eq!(lent, BOTH.map(|link| (link, LaneId(0), room)));
        m.handle_event(at(1), Event::AbortLocal { room, why: "test".into() });
        let grant = *m.by_grant.iter().find(|(_, r)| **r == room).unwrap().0;
        outputs(&mut m);
        m.handle_event(at(1), Event::Fenced { grant, proof: grant });
    }
    assert_eq!((m.load().free_lanes, m.lent_lanes().count()), (2, 0));
}

#[test]
fn a_prefill_that_cannot_be_reached_holds_up_its_own_rooms_only() {
    let mut m = worker_of_two([DataPath::ReceiverCopies; 2]);
    let elsewhere = rank(3);
    assert_eq!(reserve(&mut m, "r", reservation(1, vec![rank(0), elsewhere.clone()])), None);
    // The second goes first, since the first has a link to come.
    assert_eq!(reserve(&mut m, "s", reservation(2, halves())), None);
    assert_eq!((m.load().queued, m.load().free_lanes), (1, 0));
    assert_eq!(reserve(&mut m, "t", reservation(3, halves())), None);
    // Its refusal leaves nothing of it.
    let why = Refusal::new(ErrorKind::PeerLost, "no answer");
    m.handle_event(at(1), Event::LinkFailed { peer: elsewhere.key.identity, why });
    assert_eq!(replies(&outputs(&mut m)), [(1, false)]);
    assert_eq!((m.load().queued, m.load().free_lanes), (1, 0));
    assert!(m.lent_lanes().all(|lent| lent.2 == RoomId(2)));
}

#[test]
fn a_restarted_prefill_is_dialled_at_once_and_not_charged_with_its_predecessors_end() {
    let mut m: Decode<GrantId> = Decode::new(config());
    link_up(&mut m, LINK_B, DataPath::ReceiverCopies, 1, half(1));
    let (old, mut new) = (rank(0), rank(0));
    new.key.incarnation = Incarnation([9; 16]);
    new.address = "elsewhere:1".into();
    assert_eq!(reserve(&mut m, "r", reservation(1, vec![old.clone(), rank(1)])), None);
    let from = Identity::new("c", Role::Router, "s", 0).unwrap();
    let body = Call::Reserve(reservation(2, vec![new.clone(), rank(1)]));
    m.handle_event(at(0), Event::Call { call: CallId(2), from, body });
    let dialled = |o: &Output<GrantId>| matches!(o, Output::Connect(to) if *to == new);
    assert!(outputs(&mut m).iter().any(dialled));
    let why = Refusal::new(ErrorKind::PeerLost, "no answer");
    m.handle_event(at(1), Event::DialFailed { peer: old.key, why });
    assert_eq!(replies(&outputs(&mut m)), [(1, false)]);
    let pools: Arc<[Layout]> = [half(0)].into();
    let share = Arc::new(Share::between(&pools, &[small_layout()]).unwrap());
    let (link, path) = (LinkId(7), DataPath::ReceiverCopies);
    let up = Event::LinkUp {
        link,
        peer: new.key,
        path,
        lanes: 1,
        down: Vec::new(),
        rails: 1,
        share,
        pools,
    };
    m.handle_event(at(2), up);
    assert_eq!(replies(&outputs(&mut m)), [(2, true)]);
}

#[test]
fn one_address_is_dialled_once_whichever_start_is_asked_for() {
    let mut m: Decode<GrantId> = Decode::new(config());
    let (old, mut new) = (rank(0), rank(0));
    new.key.incarnation = Incarnation([9; 16]);
    for (call, prefill) in [(1, &old), (2, &new)] {
        let from = Identity::new("c", Role::Router, "r", 0).unwrap();
        let body = Call::Reserve(reservation(call, vec![prefill.clone()]));
        m.handle_event(at(0), Event::Call { call: CallId(call), from, body });
    }
    let out = outputs(&mut m);
    assert_eq!(out.iter().filter(|o| matches!(o, Output::Connect(_))).count(), 1, "{out:?}");
    // Nobody else is dialled, so both hear of it.
    let why = Refusal::new(ErrorKind::PeerLost, "no answer");
    m.handle_event(at(1), Event::DialFailed { peer: old.key, why });
    assert_eq!(replies(&outputs(&mut m)), [(1, false), (2, false)]);
}

#[test]
fn once_its_links_are_up_a_room_that_waits_for_one_source_is_not_overtaken_at_the_other() {
    let mut m = worker_of_two([DataPath::ReceiverCopies; 2]);
    let elsewhere = LinkId(3);
    reserve(&mut m, "r", reservation(1, vec![rank(0), rank(3)]));
    reserve(&mut m, "s", reservation(2, halves()));
    reserve(&mut m, "t", reservation(3, halves()));
    let path = DataPath::ReceiverCopies;
    let pools: Arc<[Layout]> = [half(1)].into();
    let share = Arc::new(Share::between(&pools, &[small_layout()]).unwrap());
    let peer = rank(3).key;
    m.handle_event(
        at(1),
        Event::LinkUp {
            link: elsewhere,
            peer,
            path,
            lanes: 1,
            down: Vec::new(),
            rails: 1,
            share,
            pools,
        },
    );
    m.handle_event(at(1), Event::LaneDown { link: elsewhere, lane: LaneId(0), why: lost() });
    m.handle_event(at(1), Event::AbortLocal { room: RoomId(2), why: "test".into() });
    outputs(&mut m);
    // The lanes of the second are free, and the first is before the third at one of them.
    assert_eq!((m.load().queued, m.load().free_lanes), (2, 2));
    m.handle_event(at(2), Event::LaneUp { link: elsewhere, lane: LaneId(0) });
    assert_eq!(replies(&outputs(&mut m)), [(1, true)]);
    assert_eq!((m.load().queued, m.load().free_lanes), (1, 1));
}

#[test]
fn the_time_in_the_queue_names_who_was_waited_for() {
    let mut m: Decode<GrantId> = Decode::new(config());
    link_up(&mut m, LINK, DataPath::ReceiverCopies, 1, half(0));
    assert_eq!(reserve(&mut m, "r", reservation(1, halves())), None);
    m.handle_timeout(at(1_000));
    let out = outputs(&mut m);
    let [Output::Reply { reply: Err(why), .. }] = &out[..] else { panic!("{out:?}") };
    assert_eq!((why.kind, why.blame), (ErrorKind::Busy, crate::error::Blame::Link));
    assert!(why.text.contains(&rank(1).key.identity.to_string()), "{why}");
    assert_eq!((m.load().rooms, m.load().queued, m.load().free_lanes), (0, 0, 1));
}

#[test]
fn a_late_proof_brings_back_the_lanes_of_all_links() {
    let mut m = worker_of_two([DataPath::OneSided, DataPath::ReceiverCopies]);
    lend_from(&mut m, ROOM, FOUR, &[3], halves());
    let grant = grant_of(&outputs(&mut m));
    m.handle_event(at(1), Event::AbortLocal { room: ROOM, why: "test".into() });
    m.handle_event(at(1), quiesced(grant, true));
    m.handle_event(
        at(2),
        Event::FenceFailed { grant, why: Refusal::new(ErrorKind::Io, "no flush") },
    );
    let load = m.load();
    assert_eq!((load.free_lanes, load.quarantined_blocks), (0, 1));
    m.handle_event(at(3), Event::Fenced { grant, proof: grant });
    let load = m.load();
    assert_eq!((load.free_lanes, load.quarantined_blocks), (2, 0));
}

#[test]
fn a_source_that_was_never_reached_is_not_told_until_it_asks() {
    let mut m: Decode<GrantId> = Decode::new(config());
    link_up(&mut m, LINK, DataPath::ReceiverCopies, 1, half(0));
    lend_from(&mut m, ROOM, FOUR, &[3], halves());
    let grant = grant_of(&outputs(&mut m));
    m.handle_event(at(1), Event::AbortLocal { room: ROOM, why: "test".into() });
    m.handle_event(at(1), Event::Fenced { grant, proof: grant });
    assert_eq!(told(&outputs(&mut m)), [LINK]);
    link_up(&mut m, LINK_B, DataPath::ReceiverCopies, 1, half(1));
    assert_eq!(told(&outputs(&mut m)), []);
    let why = Refusal::new(ErrorKind::DeadlineExceeded, "no offer came");
    let msg = PeerMsg::Abort { room: ROOM, grant: GrantId::NONE, why };
    m.handle_event(at(2), Event::Peer { link: LINK_B, msg });
    assert_eq!(told(&outputs(&mut m)), [LINK_B]);
    m.handle_event(at(3), quiesced(grant, true));
    assert_eq!((m.load().rooms, m.poll_timeout()), (0, None));
}

// ---- lanes and rails ------------------------------------------------------------------------

/// Of a room of one block.
const PARTS: u32 = 4;

/// A worker with one link of several lanes; a room borrows so many.
fn worker_with(path: DataPath, lanes: u16, rails: u16, per_room: u16) -> Decode<GrantId> {
    let mut m = Decode::new(DecodeConfig { lanes_per_room: per_room, ..config() });
    let pools: Arc<[Layout]> = [small_layout()].into();
    let share = Arc::new(Share::between(&pools, &pools).unwrap());
    let (link, peer) = (LINK, prefill().key);
    m.handle_event(
        at(0),
        Event::LinkUp { link, peer, path, lanes, down: Vec::new(), rails, share, pools },
    );
    m
}
fn lane_up(m: &mut Decode<GrantId>, lane: u16) {
    m.handle_event(at(1), Event::LaneUp { link: LINK, lane: LaneId(lane) });
}
fn lane_down(m: &mut Decode<GrantId>, lane: u16) {
    m.handle_event(at(1), Event::LaneDown { link: LINK, lane: LaneId(lane), why: lost() });
}
/// The lanes of the grants that were opened, in order.
fn lanes_of(out: &[Output<GrantId>]) -> Vec<Vec<u16>> {
    let each = out.iter().filter_map(|o| match o {
        Output::Open { sources, .. } => Some(sources[0].1.iter().map(|lane| lane.0).collect()),
        _ => None,
    });
    each.collect()
}
fn lend_block(m: &mut Decode<GrantId>, room: u64) -> Vec<Output<GrantId>> {
    lend(m, RoomId(room), FOUR, &[room as u32]);
    outputs(m)
}

#[test]
fn a_room_has_a_lane_of_each_rail_as_long_as_there_are_some() {
    let mut m = worker_with(DataPath::OneSided, 8, 2, 2);
    let all: Vec<_> = (1..=4).flat_map(|room| lanes_of(&lend_block(&mut m, room))).collect();
    assert_eq!(all, [[0, 1], [2, 3], [4, 5], [6, 7]], "first come, first served");
    assert_eq!(m.load().free_lanes, 0);

    // What is free is taken when a rail has nothing, and no room waits for a rail.
    let mut m = worker_with(DataPath::OneSided, 8, 2, 2);
    [0, 2, 4].into_iter().for_each(|lane| lane_down(&mut m, lane));
    let all: Vec<_> = (1..=3).flat_map(|room| lanes_of(&lend_block(&mut m, room))).collect();
    assert_eq!(all, [vec![1, 6], vec![3, 5]]);
    assert_eq!((m.load().free_lanes, m.load().queued), (1, 1), "one lane is not enough");
    lane_up(&mut m, 2);
    assert_eq!(lanes_of(&outputs(&mut m)), [[7, 2]]);

    // More lanes than rails, one rail, and rails of which one has all.
    for (rails, want) in [(2, vec![0, 1, 2]), (1, vec![0, 1, 2]), (3, vec![0, 1, 2])] {
        let mut m = worker_with(DataPath::OneSided, 6, rails, 3);
        assert_eq!(lanes_of(&lend_block(&mut m, 1)), [want], "{rails} rails");
    }
}

#[test]
fn lanes_that_have_rested_longest_go_first_within_their_rail() {
    let mut m = worker_with(DataPath::OneSided, 6, 2, 2);
    let first = lend_block(&mut m, 7);
    let grant = grant_of(&first);
    assert_eq!(lanes_of(&first), [[0, 1]]);
    arrive(&mut m, LINK, grant, 0..PARTS);
    m.handle_event(at(2), quiesced(grant, false));
    m.handle_event(at(3), Event::Fenced { grant, proof: grant });
    outputs(&mut m);
    let all: Vec<_> = (1..=3).flat_map(|room| lanes_of(&lend_block(&mut m, room))).collect();
    assert_eq!(all, [[2, 3], [4, 5], [0, 1]]);
}

/// With two lanes on two rails, one rail dies: the parts in doubt come over the other, and the room
/// is done only when what the dead one left behind can land no more.
#[test]
fn a_room_that_lost_a_rail_is_done_behind_a_revoke_and_its_lane_rests_until_it_is_up() {
    for told_by in ["the engine", "the sender"] {
        let mut m = worker_with(DataPath::OneSided, 2, 2, 2);
        let grant = grant_of(&lend_block(&mut m, ROOM.0));
        arrive(&mut m, LINK, grant, 0..2);
        if told_by == "the engine" {
            lane_down(&mut m, 0);
        }
        // One twice: it had landed before the rail died, and the sender could not know.
        arrive(&mut m, LINK, grant, [1, 1, 2, 2]);
        assert!(fences(&outputs(&mut m)).is_empty(), "one part is missing: {told_by}");
        arrive(&mut m, LINK, grant, [3]);
        if told_by == "the sender" {
            assert!(fences(&outputs(&mut m)).is_empty(), "its word is awaited");
            let msg = PeerMsg::Quiesced { room: ROOM, grant, clean: false, heard: false };
            m.handle_event(at(2), Event::Peer { link: LINK, msg });
        }
        let out = outputs(&mut m);
        assert_eq!(fences(&out), [FenceHow::Revoke], "{told_by}");
        assert!(ends(&out).is_empty() && told(&out).is_empty(), "not done yet: {out:?}");
        // The fence destroys both connections; the engine says so before it gives the proof.
        lane_down(&mut m, 0);
        lane_down(&mut m, 1);
        assert!(ends(&outputs(&mut m)).is_empty());
        m.handle_event(at(3), Event::Fenced { grant, proof: grant });
        let out = outputs(&mut m);
        let (_, outcome, proved) = &ends(&out)[0];
        assert!(outcome.is_done() && *proved, "{outcome}");
        assert_eq!(m.load().free_lanes, 0, "a destroyed lane is lent to nobody");
        let next = lend_block(&mut m, 8);
        assert!(lanes_of(&next).is_empty(), "{next:?}");
        lane_up(&mut m, 1);
        assert!(lanes_of(&outputs(&mut m)).is_empty(), "it borrows two");
        lane_up(&mut m, 0);
        assert_eq!(lanes_of(&outputs(&mut m)), [[1, 0]]);
    }
}

/// Without a word of either engine the sender's silence is enough reason to revoke.
#[test]
fn a_sender_that_does_not_become_quiet_is_revoked_before_done() {
    let mut m = worker_with(DataPath::OneSided, 2, 2, 2);
    let grant = grant_of(&lend_block(&mut m, ROOM.0));
    arrive(&mut m, LINK, grant, 0..PARTS);
    outputs(&mut m);
    m.handle_timeout(at(1 + limits::QUIESCE_MS));
    let out = outputs(&mut m);
    assert_eq!((fences(&out), ends(&out)), (vec![FenceHow::Revoke], vec![]));
    m.handle_event(at(99), quiesced(grant, false));
    assert!(ends(&outputs(&mut m)).is_empty(), "words do not replace a fence that has begun");
    m.handle_event(at(100), Event::Fenced { grant, proof: grant });
    assert!(ends(&outputs(&mut m))[0].1.is_done());
}

#[test]
fn a_word_that_does_not_matter_any_more_is_not_waited_for() {
    let mut m = worker_with(DataPath::OneSided, 2, 2, 2);
    let grant = grant_of(&lend_block(&mut m, ROOM.0));
    arrive(&mut m, LINK, grant, 0..PARTS);
    assert!(fences(&outputs(&mut m)).is_empty());
    lane_down(&mut m, 1);
    assert_eq!(fences(&outputs(&mut m)), [FenceHow::Revoke]);
}

#[test]
fn a_room_without_a_lane_left_fails_at_once_with_the_reason() {
    for path in [DataPath::OneSided, DataPath::ReceiverCopies] {
        let mut m = worker_with(path, 2, 2, 2);
        let grant = grant_of(&lend_block(&mut m, ROOM.0));
        arrive(&mut m, LINK, grant, 0..PARTS - 1);
        lane_down(&mut m, 0);
        lane_up(&mut m, 0);
        lane_down(&mut m, 0);
        assert!(told(&outputs(&mut m)).is_empty(), "one is left");
        lane_down(&mut m, 1);
        let out = outputs(&mut m);
        if path == DataPath::ReceiverCopies {
            assert!(told(&out).is_empty(), "the next connection goes on: {out:?}");
            continue;
        }
        let why = out.iter().find_map(|o| match o {
            Output::Send { msg: PeerMsg::Ended { outcome, .. }, .. } => outcome.why(),
            _ => None,
        });
        assert_eq!(why.map(|why| (why.kind, why.blame)), Some((ErrorKind::NoPath, Blame::Link)));
        m.handle_timeout(at(2 + limits::QUIESCE_MS));
        assert_eq!(fences(&outputs(&mut m)), [FenceHow::Revoke]);
        m.handle_event(at(99), Event::Fenced { grant, proof: grant });
        assert!(!ends(&outputs(&mut m))[0].1.is_done());
    }
}

#[test]
fn lanes_lost_between_reservation_and_grant_are_exchanged_and_make_nothing_dirty() {
    let mut m = worker_with(DataPath::OneSided, 4, 2, 2);
    assert_eq!(reserve(&mut m, "r", reservation(ROOM.0, vec![prefill()])), None);
    lane_down(&mut m, 0);
    let out = lend_block(&mut m, ROOM.0);
    assert_eq!(lanes_of(&out), [[2, 1]]);
    lane_up(&mut m, 0);
    assert_eq!(m.load().free_lanes, 2, "who has it no more keeps it from nobody");
    let grant = grant_of(&out);
    arrive(&mut m, LINK, grant, 0..PARTS);
    m.handle_event(at(2), quiesced(grant, false));
    assert_eq!(fences(&outputs(&mut m)), [FenceHow::Close]);

    // Where there are no others: with one that works, and with none.
    for (left, ok) in [(1, true), (0, false)] {
        let mut m = worker_with(DataPath::OneSided, 2, 2, 2);
        assert_eq!(reserve(&mut m, "r", reservation(ROOM.0, vec![prefill()])), None);
        (left..2).for_each(|lane| lane_down(&mut m, lane));
        let out = lend_block(&mut m, ROOM.0);
        assert_eq!(lanes_of(&out).len(), usize::from(ok));
        assert_eq!(fences(&out).len(), usize::from(!ok), "{out:?}");
    }
}

/// The lanes that are offered, offer by offer.
fn offered(out: &[Output<GrantId>]) -> Vec<Vec<u16>> {
    let each = out.iter().filter_map(|o| match o {
        Output::Send { msg: PeerMsg::Offer(offer), .. } => {
            Some(offer.lanes.iter().map(|(lane, _)| lane.0).collect())
        }
        _ => None,
    });
    each.collect()
}

/// The grant is open for the connection that was lost: the next one may only be offered with the
/// next grant.
#[test]
fn a_repeated_offer_does_not_name_the_next_connection_of_a_lane() {
    for (path, want) in [(DataPath::OneSided, vec![1]), (DataPath::ReceiverCopies, vec![0, 1])] {
        let mut m = worker_with(path, 2, 2, 2);
        let out = lend_block(&mut m, ROOM.0);
        let grant = grant_of(&out);
        assert_eq!(offered(&out), [[0, 1]]);
        lane_down(&mut m, 0);
        lane_up(&mut m, 0);
        m.handle_timeout(at(limits::RESEND_MS));
        assert_eq!(offered(&outputs(&mut m)), [want], "{path:?}");
        // All came, its answer did not, and the other lane goes too: there is nothing to offer.
        arrive(&mut m, LINK, grant, 0..PARTS);
        lane_down(&mut m, 1);
        m.handle_timeout(at(10 * limits::RESEND_MS));
        assert!(offered(&outputs(&mut m)).is_empty());
    }
}

/// A fence that never completes keeps blocks, and the connections that writes may still come over:
/// not the lanes.
#[test]
fn a_lane_comes_back_from_quarantine_with_its_next_connection() {
    for path in [DataPath::OneSided, DataPath::ReceiverCopies] {
        let mut m = worker_with(path, 2, 2, 2);
        let grant = grant_of(&lend_block(&mut m, ROOM.0));
        lane_down(&mut m, 0);
        m.handle_event(at(1), Event::AbortLocal { room: ROOM, why: "test".into() });
        m.handle_timeout(at(2 + limits::QUIESCE_MS));
        let why = Refusal::new(ErrorKind::Io, "the NIC is lost");
        m.handle_event(at(99), Event::FenceFailed { grant, why });
        outputs(&mut m);
        assert_eq!(m.load().free_lanes, 0);
        lane_up(&mut m, 0);
        let once = u32::from(path == DataPath::OneSided);
        assert_eq!(m.load().free_lanes, once, "{path:?}");
        // The other one is lost only now.
        lane_down(&mut m, 1);
        assert_eq!(m.load().free_lanes, once);
        lane_up(&mut m, 1);
        assert_eq!((m.load().free_lanes, m.load().quarantined_blocks), (2 * once, 1), "{path:?}");
        m.handle_event(at(100), Event::Fenced { grant, proof: grant });
        assert_eq!((m.load().free_lanes, m.load().quarantined_blocks), (2, 0), "each once");
        assert_eq!(m.lanes.free(), 2);
    }
}

/// When a lane that went down at the start of a test is not waited for any more.
const WAITED: u64 = 1 + limits::LANE_WAIT_MS;

#[test]
fn rooms_take_the_lanes_that_are_left_once_the_others_had_time_to_come_back() {
    for (rails, left) in [(2, 1), (5, 1), (5, 3)] {
        let mut m = worker_with(DataPath::OneSided, rails, rails, rails);
        (left..rails).for_each(|lane| lane_down(&mut m, lane));
        let out = lend_block(&mut m, ROOM.0);
        let grant = grant_of(&out);
        assert!(lanes_of(&out).is_empty(), "they may come back");
        assert!(lanes_of(&lend_block(&mut m, 8)).is_empty());
        assert_eq!(m.poll_timeout(), Some(at(WAITED)));
        m.handle_timeout(at(WAITED - 1));
        assert!(lanes_of(&outputs(&mut m)).is_empty());
        m.handle_timeout(at(WAITED));
        let all: Vec<u16> = (0..left).collect();
        assert_eq!(lanes_of(&outputs(&mut m)), std::slice::from_ref(&all), "{rails} rails");
        // The next waits for what is lent, not for what is lost, and not with less than that.
        arrive(&mut m, LINK, grant, 0..PARTS);
        m.handle_event(at(WAITED + 1), quiesced(grant, true));
        m.handle_event(at(WAITED + 2), Event::Fenced { grant, proof: grant });
        assert_eq!(lanes_of(&outputs(&mut m)), [all]);
        // All are back.
        (left..rails).for_each(|lane| lane_up(&mut m, lane));
        assert!(lanes_of(&lend_block(&mut m, 9)).is_empty(), "some are lent, and all may be had");
    }
}

#[test]
fn waits_for_lost_lanes_begin_anew_when_the_process_stood_still() {
    let mut m = worker_with(DataPath::OneSided, 2, 2, 2);
    lane_down(&mut m, 1);
    lend_block(&mut m, 1);
    m.stood_still(at(WAITED));
    m.handle_timeout(at(WAITED));
    assert!(lanes_of(&outputs(&mut m)).is_empty());
    m.handle_timeout(at(WAITED + limits::LANE_WAIT_MS));
    assert_eq!(lanes_of(&outputs(&mut m)), [[0]]);
}

#[test]
fn a_lane_that_was_lost_twice_is_waited_for_from_the_second_time_on() {
    let mut m = worker_with(DataPath::OneSided, 2, 2, 2);
    lane_down(&mut m, 1);
    lend_block(&mut m, 1);
    // Lost while it was down is the same outage.
    m.handle_event(at(500), Event::LaneDown { link: LINK, lane: LaneId(1), why: lost() });
    assert_eq!(m.poll_timeout(), Some(at(WAITED)));
    let mut m = worker_with(DataPath::OneSided, 2, 2, 2);
    lane_down(&mut m, 0);
    lane_down(&mut m, 1);
    lane_up(&mut m, 0);
    lane_up(&mut m, 1);
    m.handle_event(at(500), Event::LaneDown { link: LINK, lane: LaneId(1), why: lost() });
    lend_block(&mut m, 1);
    m.handle_timeout(at(WAITED));
    assert!(lanes_of(&outputs(&mut m)).is_empty());
    m.handle_timeout(at(500 + limits::LANE_WAIT_MS));
    assert_eq!(lanes_of(&outputs(&mut m)), [[0]]);
}

#[test]
fn without_a_lane_left_rooms_end_at_once_and_say_why() {
    let mut m = worker_with(DataPath::OneSided, 2, 2, 2);
    lane_down(&mut m, 0);
    lane_down(&mut m, 1);
    lend_block(&mut m, 1);
    let patient = Reserve { wait_ms: 10_000, ..reservation(2, vec![prefill()]) };
    assert_eq!(reserve(&mut m, "r", patient), None);
    assert!(ends(&outputs(&mut m)).is_empty(), "they may come back");
    let no_path = |why: &Refusal| {
        assert_eq!(why.kind, ErrorKind::NoPath, "{why}");
        for said in ["lanes_up=0", "lanes=2", "withheld=0", "its NIC is lost"] {
            assert!(why.text.contains(said), "{said}: {why}");
        }
    };
    m.handle_timeout(at(WAITED));
    let out = outputs(&mut m);
    let refused = out.iter().find_map(|o| match o {
        Output::Reply { reply: Err(why), .. } => Some(why),
        _ => None,
    });
    no_path(refused.unwrap());
    // Blocks that were lent come back by a proof.
    assert_eq!(fences(&out).len(), 1, "{out:?}");
    no_path(&reserve(&mut m, "r", reservation(3, vec![prefill()])).unwrap());
    assert_eq!(m.load().queued, 0);
    // And when a lane is back, so are rooms.
    lane_up(&mut m, 1);
    assert_eq!(lanes_of(&lend_block(&mut m, 4)), [[1]]);
}

#[test]
fn lanes_of_withheld_grants_are_not_waited_for() {
    let mut m = worker_with(DataPath::ReceiverCopies, 3, 1, 2);
    let grant = grant_of(&lend_block(&mut m, 1));
    m.handle_event(at(2), Event::AbortLocal { room: RoomId(1), why: "x".into() });
    m.handle_event(at(3), Event::FenceFailed { grant, why: lost() });
    outputs(&mut m);
    assert_eq!(lanes_of(&lend_block(&mut m, 2)), [[2]]);
    assert_eq!(reserve(&mut m, "r", reservation(3, vec![prefill()])), None);
    m.handle_timeout(at(1_000));
    let why = outputs(&mut m).into_iter().find_map(|o| match o {
        Output::Reply { reply, .. } => reply.err(),
        _ => None,
    });
    let why = why.unwrap();
    assert_eq!(why.kind, ErrorKind::Busy);
    for said in ["lanes_up=3", "lanes=3", "withheld=2"] {
        assert!(why.text.contains(said), "{said}: {why}");
    }
}

#[test]
fn lanes_that_are_down_when_a_link_comes_up_are_lent_when_they_are_up() {
    let mut m = Decode::new(DecodeConfig { lanes_per_room: 2, ..config() });
    let pools: Arc<[Layout]> = [small_layout()].into();
    let share = Arc::new(Share::between(&pools, &pools).unwrap());
    let (link, peer, path) = (LINK, prefill().key, DataPath::OneSided);
    let down = vec![(LaneId(1), lost())];
    let up = Event::LinkUp { link, peer, path, lanes: 2, down, rails: 2, share, pools };
    m.handle_event(at(1), up);
    assert_eq!(m.load().free_lanes, 1);
    assert!(lanes_of(&lend_block(&mut m, 1)).is_empty());
    m.handle_timeout(at(WAITED));
    assert_eq!(lanes_of(&outputs(&mut m)), [[0]]);
    lane_up(&mut m, 1);
    assert_eq!(lanes_of(&lend_block(&mut m, 2)).len(), 0, "the first has the other");
}
