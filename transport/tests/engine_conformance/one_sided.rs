//! What engines must do whose sender writes the receiver's pages.

use kvlane_proto::layout::KvKind;
use kvlane_proto::{ErrorKind, GrantId, LaneId, LinkId};
use kvlane_transport::engine::{Command, EngineEvent, FenceHow, SendGrant};

use super::{CANARY, LINK, Make, Pair, Pool, Rng, layout};

/// Rules that need nothing but two engines.
pub fn run(make: Make<'_>) {
    foreign_numbers_are_refused_by_the_sender(make);
    a_revoke_needs_nobody_and_costs_its_lanes_only(make);
    a_grant_is_of_the_connections_that_it_was_given_with(make);
    a_closed_link_leaves_its_grants_to_be_fenced(make);
    fences_join_and_what_was_fenced_stays_closed(make);
    a_lane_that_is_reset_comes_up_again(make);
}

pub fn downs(events: &[EngineEvent]) -> Vec<u16> {
    let lane = |e: &EngineEvent| match e {
        EngineEvent::LaneDown { lane, .. } => Some(lane.0),
        _ => None,
    };
    let mut downs: Vec<u16> = events.iter().filter_map(lane).collect();
    downs.sort_unstable();
    downs
}

/// Until both sides say that the lane is up again.
pub fn until_up(p: &mut Pair, lane: u16) {
    let up = |events: &[EngineEvent]| {
        let of = |e: &EngineEvent| match e {
            EngineEvent::LaneUp { lane: l, .. } if l.0 == lane => Some(true),
            EngineEvent::LaneDown { lane: l, .. } if l.0 == lane => Some(false),
            _ => None,
        };
        events.iter().rev().find_map(of) == Some(true)
    };
    p.until("lane", |p| up(&p.from_tx) && up(&p.from_rx));
}

pub fn quiesced(events: &[EngineEvent], grant: u64) -> bool {
    events.iter().any(|e| matches!(e, EngineEvent::Quiesced(q) if q.grant().0 == grant))
}

pub fn pools(p: &mut Pair, page_bytes: u32, blocks: u32) -> (Pool, Pool) {
    let l = layout(page_bytes, 1, KvKind::Mla);
    let (src, dst) = (Pool::new(&l, blocks), Pool::new(&l, blocks));
    src.fill(1);
    dst.fill(CANARY);
    p.tx.register(&src.region).unwrap();
    p.rx.register(&dst.region).unwrap();
    (src, dst)
}

/// Wrong grant, wrong lane, part or length: nobody at the receiver would notice in time.
fn foreign_numbers_are_refused_by_the_sender(make: Make<'_>) {
    let mut p = Pair::new(make());
    let (src, dst) = pools(&mut p, 4096, 16);
    p.connect(2);
    let four = dst.plan(&[3, 1, 2, 9], 2 * 4096);
    p.open(7, 2, &four);
    p.open_on(8, &[0], &four);
    // One of another link.
    let (link, lanes) = (LinkId(99), vec![LaneId(0)]);
    let other = SendGrant { link, grant: GrantId(9), lanes, plan: four.clone() };
    p.tell_tx(Command::Grant(other));
    let source = src.source(&[0, 1, 2, 3, 4, 5, 6, 7], 2 * 4096);
    let long = src.source(&[0, 1, 2, 3, 4, 5], 3 * 4096);
    p.post(1234, 0, 0, &source);
    p.post(9, 0, 0, &source);
    p.post(7, 2, 0, &source);
    p.post(7, 0, 0, &long);
    p.post(8, 0, 1, &source);
    p.until("refusals", |p| p.nacked().len() == 5);
    let mut kinds = p.nacked();
    kinds.sort_by_key(|k| k.code());
    let (a, b) = (ErrorKind::InvalidPlan, ErrorKind::NotFound);
    assert_eq!(kinds, [a, a, b, b, b]);
    p.settle();
    assert_eq!((dst.touched(), p.acked()), (0, 0));
    p.clear();
    p.send_all(7, 2, &src.source(&[4, 5, 6, 7], 2 * 4096));
    assert_eq!(dst.touched(), 4 * 4096);
    assert_eq!(downs(&p.from_rx), []);
}

/// The sender does not move until the proof; the grant's lanes are down before it, others carry on.
fn a_revoke_needs_nobody_and_costs_its_lanes_only(make: Make<'_>) {
    let mut p = Pair::new(make());
    let (src, dst) = pools(&mut p, 4096, 64);
    p.connect(3);
    let ids: Vec<u32> = (0..32).collect();
    let (from, to) = (src.source(&ids, 4 * 4096), dst.plan(&ids, 4 * 4096));
    let rest: Vec<u32> = (32..64).collect();
    let (others_from, others) = (src.source(&rest, 4 * 4096), dst.plan(&rest, 4 * 4096));
    p.open_on(7, &[0, 2], &to);
    p.open_on(8, &[1], &others);
    for part in 0..8 {
        p.post(7, part, [0, 2][part as usize % 2], &from);
    }
    p.poll_tx();
    p.tell_rx(Command::Fence { grant: GrantId(7), how: FenceHow::Revoke });
    alone(&mut p, 7);
    let proof = p.from_rx.iter().position(|e| matches!(e, EngineEvent::Fenced(_))).unwrap();
    assert_eq!(downs(&p.from_rx[..proof]), [0, 2], "down before the proof");
    for id in 0..32 {
        dst.write(dst.region.address() + id * 4096, &[CANARY; 4096]);
    }
    let before = dst.touched();
    p.send_on(8, &[1], &others_from);
    p.settle();
    assert_eq!(dst.touched() - before, 32 * 4096, "a byte landed after the proof");
    assert_eq!(downs(&p.from_rx), [0, 2]);
    // The sender hears of it; that the lanes come back, as others, is a rule of `one_sided_rules`.
    p.until("end", |p| downs(&p.from_tx) == [0, 2]);
}

/// Only the receiver moves until the proof of a grant.
pub fn alone(p: &mut Pair, grant: u64) {
    let started = std::time::Instant::now();
    let proved = |e: &EngineEvent| matches!(e, EngineEvent::Fenced(f) if f.grant().0 == grant);
    while !p.from_rx.iter().any(proved) {
        p.poll_rx();
        std::thread::yield_now();
        assert!(started.elapsed() < super::PATIENCE, "no proof: {:?}", p.from_rx);
    }
}

/// A grant that a lane was lent to is not posted on the lane's next connection.
fn a_grant_is_of_the_connections_that_it_was_given_with(make: Make<'_>) {
    let mut p = Pair::new(make());
    let (src, dst) = pools(&mut p, 4096, 16);
    p.connect(1);
    let (from, to) = (src.source(&[1, 2], 4096), dst.plan(&[3, 4], 4096));
    p.open(7, 1, &to);
    p.tell_tx(Command::ResetLane { link: LINK, lane: LaneId(0) });
    p.until("end", |p| downs(&p.from_tx) == [0] && downs(&p.from_rx) == [0]);
    // Given while there is none.
    p.open(8, 1, &to);
    until_up(&mut p, 0);
    p.open(9, 1, &to);
    p.post(7, 0, 0, &from);
    p.post(8, 0, 0, &from);
    p.until("refusals", |p| p.nacked() == [ErrorKind::NoPath; 2]);
    p.settle();
    assert_eq!(dst.touched(), 0);
    // The fences of the others do not touch the connection that they are not of.
    p.fence(7, FenceHow::Revoke);
    p.fence(8, FenceHow::Revoke);
    p.clear();
    p.send_all(9, 1, &from);
    assert_eq!((dst.touched(), downs(&p.from_rx)), (2 * 4096, vec![]));
}

/// The link goes first, at either side, with parts under way.
fn a_closed_link_leaves_its_grants_to_be_fenced(make: Make<'_>) {
    for sender_first in [true, false] {
        let mut p = Pair::new(make());
        let (src, dst) = pools(&mut p, 4096, 64);
        p.connect(2);
        let ids: Vec<u32> = (0..64).collect();
        let (from, to) = (src.source(&ids, 8 * 4096), dst.plan(&ids, 8 * 4096));
        p.open(7, 2, &to);
        for part in 0..8 {
            p.post(7, part, (part % 2) as u16, &from);
        }
        p.poll_tx();
        let close = || Command::Close { link: LINK };
        if sender_first {
            p.tell_tx(close());
            p.tell_tx(Command::Quiesce { link: LINK, grant: GrantId(7) });
            p.until("quiesced", |p| quiesced(&p.from_tx, 7));
        } else {
            p.tell_rx(close());
        }
        p.tell_rx(Command::Fence { grant: GrantId(7), how: FenceHow::Revoke });
        alone(&mut p, 7);
        dst.fill(CANARY);
        p.settle();
        assert_eq!(dst.touched(), 0, "a byte landed after the proof");
        // Nothing of it is left: its memory can go.
        p.tell_rx(close());
        p.tell_tx(close());
        p.settle();
        p.tell_tx(Command::Quiesce { link: LINK, grant: GrantId(7) });
        p.until("quiesced", |p| quiesced(&p.from_tx, 7));
        p.rx.unregister(&dst.region).unwrap();
        p.tx.unregister(&src.region).unwrap();
    }
}

fn fences_join_and_what_was_fenced_stays_closed(make: Make<'_>) {
    let mut p = Pair::new(make());
    let (src, dst) = pools(&mut p, 4096, 16);
    p.connect(1);
    let (from, to) = (src.source(&[1, 2], 4096), dst.plan(&[3, 4], 4096));
    p.open(7, 1, &to);
    for how in [FenceHow::Close, FenceHow::Revoke, FenceHow::Close] {
        p.tell_rx(Command::Fence { grant: GrantId(7), how });
    }
    let proofs = |p: &Pair| {
        p.from_rx.iter().filter(|e| matches!(e, EngineEvent::Fenced(f) if f.grant().0 == 7)).count()
    };
    p.until("proofs", |p| proofs(p) == 3);
    p.until("end", |p| downs(&p.from_tx) == [0]);
    assert_eq!(downs(&p.from_rx), [0], "the strongest counts");
    until_up(&mut p, 0);
    p.clear();
    // Fenced before it is opened.
    p.fence(8, FenceHow::Close);
    p.open(8, 1, &to);
    p.post(8, 0, 0, &from);
    let trouble = |e: &EngineEvent| matches!(e, EngineEvent::Trouble(e) if e.to_string().contains("after its fence"));
    p.until("trouble", |p| p.from_rx.iter().any(trouble));
    p.settle();
    // The sender is at fault: the part is not the next grant's, and the lane is given up.
    p.open(9, 1, &to);
    p.until("end", |p| downs(&p.from_rx) == [0]);
    assert!(!p.from_rx.iter().any(|e| matches!(e, EngineEvent::Arrived { .. })));
    until_up(&mut p, 0);
    p.clear();
    p.open(10, 1, &to);
    p.send_all(10, 1, &from);
}

fn a_lane_that_is_reset_comes_up_again(make: Make<'_>) {
    let mut p = Pair::new(make());
    let (src, dst) = pools(&mut p, 4096, 64);
    p.connect(2);
    let ids: Vec<u32> = (0..64).collect();
    let (from, to) = (src.source(&ids, 8 * 4096), dst.plan(&ids, 8 * 4096));
    for round in 1..=20 {
        p.clear();
        p.open(round, 2, &to);
        for part in 0..8 {
            p.post(round, part, (part % 2) as u16, &from);
        }
        if round % 2 == 0 {
            p.poll_tx();
        }
        p.tell_tx(Command::ResetLane { link: LINK, lane: LaneId(1) });
        p.until("end", |p| downs(&p.from_tx) == [1] && downs(&p.from_rx) == [1]);
        until_up(&mut p, 1);
        p.tell_tx(Command::Quiesce { link: LINK, grant: GrantId(round) });
        p.until("quiesced", |p| quiesced(&p.from_tx, round));
        p.fence(round, FenceHow::Revoke);
        dst.fill(CANARY);
        until_up(&mut p, 0);
        p.settle();
        assert_eq!(dst.touched(), 0, "a byte landed after the proof");
    }
    p.clear();
    p.open(100, 2, &to);
    p.send_all(100, 2, &from);
    assert_eq!(dst.touched(), 64 * 4096);
}

/// Revokes at any moment of many parts, on one lane after the other: what was given back stays as it
/// is, until the lane's next turn. The sender has fewer than `turns` before it. Says at how many of them
/// nothing, some and all of a grant had landed.
pub fn many_revokes(
    p: &mut Pair,
    lanes: u16,
    revokes: u64,
    page_bytes: u32,
    turns: u64,
) -> [u64; 3] {
    const BLOCKS: u32 = 64;
    let (src, dst) = pools(p, page_bytes, BLOCKS * u32::from(lanes));
    p.connect(lanes);
    let area = |lane: u16| u32::from(lane) * BLOCKS..(u32::from(lane) + 1) * BLOCKS;
    let of = |lane: u16| {
        let ids: Vec<u32> = area(lane).collect();
        let part_bytes = u64::from(20 * page_bytes);
        // No block lies behind its neighbour, so that each page is a write.
        let backwards: Vec<u32> = area(lane).rev().collect();
        (src.source(&ids, part_bytes), dst.plan(&backwards, part_bytes))
    };
    let plans: Vec<_> = (0..lanes).map(of).collect();
    let canaries = |lane: u16| {
        let bytes = (page_bytes * BLOCKS) as usize;
        let address = dst.region.address() + u64::from(lane) * bytes as u64;
        let read = dst.read(address, bytes);
        dst.write(address, &vec![CANARY; bytes]);
        read.iter().filter(|&&b| b != CANARY).count()
    };
    let mut rng = Rng(0x5eed_f00d);
    let mut seen = [0u64; 3];
    for n in 0..revokes {
        let lane = (n % u64::from(lanes)) as u16;
        let grant = 1 + n;
        if n >= u64::from(lanes) {
            until_up(p, lane);
            // Since the proof of the grant before: a whole round of the other lanes.
            assert_eq!(
                canaries(lane),
                0,
                "a byte landed after the proof of a grant on lane {lane}"
            );
            p.tell_tx(Command::Quiesce { link: LINK, grant: GrantId(grant - u64::from(lanes)) });
        }
        forget(p, lane, grant);
        let (from, to) = &plans[usize::from(lane)];
        p.open_on(grant, &[lane], to);
        for part in 0..from.grid().parts() {
            p.post(grant, part, lane, from);
        }
        for _ in 0..rng.next() % turns {
            p.poll_tx();
            std::thread::yield_now();
        }
        p.tell_rx(Command::Fence { grant: GrantId(grant), how: FenceHow::Revoke });
        for _ in 0..rng.next() % 3 {
            p.poll_tx();
        }
        alone(p, grant);
        let landed = canaries(lane);
        seen[match landed {
            0 => 0,
            all if all == (page_bytes * BLOCKS) as usize => 2,
            _ => 1,
        }] += 1;
    }
    println!("none, some and all of a grant had landed at {seen:?} revokes");
    seen
}

/// Forgets what was said, but for the last word on each lane but `lane`.
fn forget(p: &mut Pair, lane: u16, grant: u64) {
    let old = |e: &EngineEvent| match e {
        EngineEvent::LaneUp { lane: l, .. } | EngineEvent::LaneDown { lane: l, .. } => l.0 == lane,
        EngineEvent::Fenced(f) => f.grant().0 < grant,
        _ => true,
    };
    for events in [&mut p.from_tx, &mut p.from_rx] {
        events.retain(|e| !old(e));
    }
}
