//! The `gpunetio` engine over emulated NICs that are threads of the test.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)] // Tests fail by panicking.

mod engine_conformance;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use engine_conformance::nics::{Nics, all, arrived, fenced, finish, revoke, said, whys};
use engine_conformance::one_sided::{downs, pools, quiesced, until_up};
use engine_conformance::{CANARY, LINK, PATIENCE, Pair, Pool, Rng, layout, peer, run};

use kvlane_proto::layout::KvKind;
use kvlane_proto::{ErrorKind, GrantId, LaneId, Role, limits};
use kvlane_transport::emulated::client::{Hca, Key, Peer, QueuePair, Rights};
use kvlane_transport::emulated::faults::{Fault, Target, What};
use kvlane_transport::engine::gpunetio::post::{check, immediate};
use kvlane_transport::engine::gpunetio::wire::{Blob, Message};
use kvlane_transport::engine::gpunetio::{GpunetioConfig, GpunetioEngine};
use kvlane_transport::engine::{Command, Engine, EngineEvent, FenceHow};
use kvlane_transport::memory::Region;
use kvlane_transport::mlx5::{Remote, Segment, Syndrome, entry};

#[test]
fn conforms() {
    let nics = Nics::new(1);
    run(&|| nics.couple(2048));
}

#[test]
fn conforms_with_rings_smaller_than_parts_and_two_rails() {
    let nics = Nics::new(2);
    run(&|| nics.couple(16));
}

/// Blocks in an order in which none lies behind its neighbour, so that each page is a write.
fn backwards(blocks: std::ops::Range<u32>) -> Vec<u32> {
    blocks.rev().collect()
}

/// Writes that are on their way when the grant is revoked never land: not those that the NIC has on the
/// wire, however late they come, wherever the abort strikes.
#[test]
fn writes_on_the_wire_do_not_land_after_the_proof() {
    let nics = Nics::new(1);
    let mut control = nics.control(0);
    let mut p = nics.pair(64);
    let (src, dst) = pools(&mut p, 4096, 16);
    p.connect(2);
    let ids: Vec<u32> = (0..16).collect();
    let (from, to) = (src.source(&ids, 4 * 4096), dst.plan(&backwards(0..16), 4 * 4096));
    for held_from in 0..16 {
        let grant = 1 + held_from;
        p.clear();
        dst.fill(CANARY);
        let fault = control.fault(&all(What::HoldWire).skip(held_from)).unwrap();
        p.open(grant, 2, &to);
        for part in 0..4 {
            p.post(grant, part, (part % 2) as u16, &from);
        }
        p.until("held", |_| control.stats().unwrap().hits(fault) > 0);
        revoke(&mut p, grant);
        dst.fill(CANARY);
        control.clear(fault).unwrap();
        p.settle();
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(dst.touched(), 0, "a byte landed after the proof, held from {held_from}");
        assert!(arrived(&p, grant).len() < 4);
        until_up(&mut p, 0);
        until_up(&mut p, 1);
        // The source is quiet as well.
        p.tell_tx(Command::Quiesce { link: LINK, grant: GrantId(grant) });
        p.until("quiesced", |p| quiesced(&p.from_tx, grant));
    }
    p.clear();
    p.open(100, 2, &to);
    p.send_all(100, 2, &from);
    assert_eq!(dst.touched(), 16 * 4096);
}

/// What the receiver's NIC has taken lands: the proof waits for it, and for nothing else.
#[test]
fn landings_that_are_held_hold_the_proof() {
    let nics = Nics::new(1);
    let mut control = nics.control(0);
    let mut p = nics.pair(64);
    let (src, dst) = pools(&mut p, 4096, 16);
    p.connect(2);
    let ids: Vec<u32> = (0..16).collect();
    let (from, to) = (src.source(&ids, 16 * 4096), dst.plan(&backwards(0..16), 16 * 4096));
    for held_from in 0..16 {
        let grant = 1 + held_from;
        p.clear();
        dst.fill(CANARY);
        let fault = control.fault(&all(What::HoldLanding).skip(held_from)).unwrap();
        p.open_on(grant, &[0], &to);
        p.post(grant, 0, 0, &from);
        p.until("held", |_| control.stats().unwrap().hits(fault) > 0);
        // Another grant's fence does not wait for it.
        p.open_on(1000 + grant, &[1], &to);
        revoke(&mut p, 1000 + grant);
        p.tell_rx(Command::Fence { grant: GrantId(grant), how: FenceHow::Revoke });
        let until = Instant::now() + Duration::from_millis(5);
        while Instant::now() < until {
            p.poll_rx();
            assert!(!fenced(&p, grant), "a proof while writes may land");
        }
        assert!(downs(&p.from_rx).contains(&0), "down before the proof");
        let before = dst.touched();
        control.clear(fault).unwrap();
        p.until("proof", |p| fenced(p, grant));
        assert!(dst.touched() > before, "what was held has landed before the proof");
        dst.fill(CANARY);
        p.settle();
        assert_eq!(dst.touched(), 0, "a byte landed after the proof");
        until_up(&mut p, 0);
        until_up(&mut p, 1);
    }
}

/// Every way in which a NIC says that an entry failed: told by name, with the first reason, the lane
/// made anew with another queue pair, and nobody else's lane touched.
#[test]
fn every_syndrome_is_told_by_name_and_costs_its_lane_only() {
    let nics = Nics::new(1);
    let mut control = nics.control(0);
    let mut p = nics.pair(64);
    let (src, dst) = pools(&mut p, 4096, 64);
    p.connect(2);
    let ids: Vec<u32> = (0..32).collect();
    let (from, to) = (src.source(&ids, 8 * 4096), dst.plan(&backwards(0..32), 8 * 4096));
    let rest: Vec<u32> = (32..64).collect();
    let (others_from, others) = (src.source(&rest, 8 * 4096), dst.plan(&rest, 8 * 4096));
    p.open_on(7, &[1], &others);
    let mut numbers = Vec::new();
    let syndromes =
        [0x01, 0x02, 0x04, 0x05, 0x06, 0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x22, 0x7e];
    for (n, code) in syndromes.into_iter().enumerate() {
        p.clear();
        let grant = 100 + n as u64;
        p.open_on(grant, &[0], &to);
        let what = What::Nak { syndrome: code, vendor: 0x88 };
        let fault = control.fault(&all(what).skip(11)).unwrap();
        for part in 0..4 {
            p.post(grant, part, 0, &from);
        }
        p.until("end", |p| downs(&p.from_tx) == [0] && downs(&p.from_rx) == [0]);
        assert_eq!(control.stats().unwrap().hits(fault), 1);
        control.clear(fault).unwrap();
        let why = whys(&p.from_tx).remove(0);
        let name = Syndrome(code).name();
        for word in [
            "nic=emulated0",
            &format!("syndrome={name}"),
            &format!("code={code:#04x}"),
            "vendor_code=0x88",
            &format!("grant={grant}"),
            "part=1",
            "peer=c/decode/i/0",
            "; fix: ",
        ] {
            assert!(why.contains(word), "{word}: {why}");
        }
        let number = why.split_once("queue_pair=").unwrap().1.split_once(',').unwrap().0;
        assert!(!numbers.contains(&number.to_owned()), "{number} again");
        numbers.push(number.to_owned());
        assert_eq!(p.acked(), 1, "parts before the fault are done, others in doubt");
        assert_eq!(arrived(&p, grant), [0]);
        // What the peer hears is the same.
        assert!(whys(&p.from_rx)[0].contains(name), "{:?}", whys(&p.from_rx));
        until_up(&mut p, 0);
        p.post(grant, 1, 0, &from);
        p.until("refusal", |p| p.nacked() == [ErrorKind::NoPath]);
        p.tell_tx(Command::Quiesce { link: LINK, grant: GrantId(grant) });
        p.until("quiesced", |p| quiesced(&p.from_tx, grant));
        p.fence(grant, FenceHow::Revoke);
        // The next room.
        p.clear();
        p.open_on(1000 + grant, &[0], &to);
        p.send_on(1000 + grant, &[0], &from);
        finish(&mut p, 1000 + grant);
        assert_eq!(downs(&p.from_rx), []);
    }
    p.clear();
    p.send_on(7, &[1], &others_from);
    assert_eq!((downs(&p.from_tx), downs(&p.from_rx)), (vec![], vec![]));
    assert_eq!(dst.touched(), 64 * 4096);
}

/// A completion that never comes is never taken for one: the part stays unacknowledged, and the source
/// is quiet only when the queue pair is gone.
#[test]
fn a_lost_completion_is_no_acknowledgement() {
    let nics = Nics::new(1);
    let mut control = nics.control(0);
    let mut p = nics.pair(64);
    let (src, dst) = pools(&mut p, 4096, 16);
    p.connect(2);
    let (from, to) = (src.source(&[0, 1, 2, 3], 4 * 4096), dst.plan(&[0, 1, 2, 3], 4 * 4096));
    p.open(7, 2, &to);
    let sender = Target::Pair(sender_pair(&mut control, &mut p, 0));
    let fault = control.fault(&Fault::new(What::LoseCompletion, sender)).unwrap();
    p.post(7, 0, 0, &from);
    p.until("arrival", |p| arrived(p, 7) == [0]);
    p.until("loss", |_| control.stats().unwrap().hits(fault) == 1);
    p.settle();
    assert_eq!(p.acked(), 0);
    p.tell_tx(Command::Quiesce { link: LINK, grant: GrantId(7) });
    p.settle();
    assert!(!quiesced(&p.from_tx, 7), "an entry is not known to have completed");
    p.skip_ms = limits::QUIESCE_MS + 1;
    p.until("quiesced", |p| quiesced(&p.from_tx, 7));
    let down = p.from_tx.iter().position(|e| matches!(e, EngineEvent::LaneDown { .. })).unwrap();
    let quiet = p.from_tx.iter().position(|e| matches!(e, EngineEvent::Quiesced(_))).unwrap();
    assert!(down < quiet, "the receiver is told that it is not clean");
    assert_eq!((p.acked(), downs(&p.from_tx)), (0, vec![0]));
    assert!(whys(&p.from_tx)[0].contains("did not complete in time"), "{:?}", whys(&p.from_tx));
    p.fence(7, FenceHow::Revoke);
    until_up(&mut p, 0);
}

/// An immediate that comes twice is a part that comes twice, and stands for no other.
#[test]
fn a_duplicate_immediate_is_the_same_part() {
    let nics = Nics::new(1);
    let mut control = nics.control(0);
    let mut p = nics.pair(64);
    let (src, dst) = pools(&mut p, 4096, 16);
    p.connect(1);
    let ids: Vec<u32> = (0..4).collect();
    let (from, to) = (src.source(&ids, 4096), dst.plan(&ids, 4096));
    p.open(7, 1, &to);
    control.fault(&all(What::DuplicateImmediate).skip(1)).unwrap();
    for part in 0..3 {
        p.post(7, part, 0, &from);
    }
    p.until("acks", |p| p.acked() == 3 && arrived(p, 7).len() == 4);
    p.settle();
    assert_eq!(arrived(&p, 7), [0, 1, 1, 2]);
    assert_eq!(dst.touched(), 3 * 4096);
    assert_eq!(downs(&p.from_rx), []);
}

/// The sender's queue pair of a lane, as its NIC numbers it: the one that executes.
fn sender_pair(control: &mut Hca, p: &mut Pair, lane: u16) -> u32 {
    // Numbers are given in order: the sender's of a lane comes before the receiver's, lane by lane.
    p.settle();
    let mut numbers: Vec<u32> = control.stats().unwrap().pairs.iter().map(|p| p.number).collect();
    numbers.sort_unstable();
    numbers[usize::from(lane)]
}

/// One NIC of two dies in the middle: its lanes go down with words, the others carry on, nothing of
/// the dead one is proved, and the engines live.
#[test]
fn a_nic_that_dies_costs_its_rail_and_is_never_proved() {
    for how in 0..4 {
        let nics = Nics::new(2);
        let mut control = nics.control(1);
        let mut p = nics.pair(64);
        assert_eq!(p.tx.caps().rails, 2);
        let (src, dst) = pools(&mut p, 4096, 64);
        p.connect(4);
        let ids: Vec<u32> = (0..64).collect();
        let (from, to) = (src.source(&ids, 4 * 4096), dst.plan(&backwards(0..64), 4 * 4096));
        p.open(7, 4, &to);
        p.open_on(8, &[0], &to);
        p.open_on(9, &[1], &to);
        // Between the last write and its completion, between two writes, or before any.
        match how {
            0 => {
                let sender = Target::Pair(sender_pair(&mut control, &mut p, 0));
                control.fault(&Fault::new(What::LoseCompletion, sender)).unwrap();
            }
            1 => drop(control.fault(&all(What::Kill).skip(5)).unwrap()),
            2 => drop(control.fault(&all(What::Kill)).unwrap()),
            _ => drop(control.fault(&all(What::HoldWire).skip(2)).unwrap()),
        }
        p.post(7, 0, 0, &from);
        p.post(7, 1, 1, &from);
        p.post(7, 2, 3, &from);
        if matches!(how, 0 | 3) {
            p.settle();
            control.fault(&all(What::Kill)).unwrap();
            p.post(7, 3, 1, &from);
        }
        p.until("ends", |p| downs(&p.from_tx) == [1, 3] && downs(&p.from_rx) == [1, 3]);
        for why in whys(&p.from_tx).iter().chain(&whys(&p.from_rx)) {
            assert!(why.contains("emulated1") && why.contains("; fix: "), "{why}");
        }
        assert!(p.acked() <= arrived(&p, 7).len(), "nothing is acknowledged that has not arrived");
        // The other rail carries on with the same grant.
        p.post(7, 1, 0, &from);
        p.post(7, 4, 2, &from);
        p.until("arrivals", |p| {
            let all = arrived(p, 7);
            [0, 1, 4].iter().all(|part| all.contains(part))
        });
        // A source that a lost NIC may read is not given back.
        for grant in [7, 8] {
            p.tell_tx(Command::Quiesce { link: LINK, grant: GrantId(grant) });
        }
        p.until("quiesced", |p| quiesced(&p.from_tx, 8));
        let trouble = |e: &EngineEvent| matches!(e, EngineEvent::Trouble(e) if e.kind() == ErrorKind::Quarantined);
        p.until("trouble", |p| said(&p.from_tx, trouble) == 1);
        p.skip_ms += 10 * limits::QUIESCE_MS;
        p.settle();
        assert!(!quiesced(&p.from_tx, 7));
        assert_eq!(p.tx.unregister(&src.region).unwrap_err().kind(), ErrorKind::Busy);
        // Nor a destination that it may write.
        let fails = |p: &Pair, grant: u64| {
            said(&p.from_rx, |e| {
                matches!(e, EngineEvent::FenceFailed { grant: g, why } if g.0 == grant
                    && why.to_string().contains("emulated1"))
            })
        };
        for (grant, how) in [(7, FenceHow::Revoke), (9, FenceHow::Close), (7, FenceHow::Close)] {
            p.tell_rx(Command::Fence { grant: GrantId(grant), how });
        }
        p.until("failures", |p| fails(p, 7) == 2 && fails(p, 9) == 1);
        assert!(!fenced(&p, 7) && !fenced(&p, 9));
        // The engines live, and do not ask the dead one again and again.
        p.fence(8, FenceHow::Revoke);
        for lane in [0, 2] {
            until_up(&mut p, lane);
        }
        p.clear();
        p.open_on(10, &[0, 2], &to);
        p.send_on(10, &[0, 2], &from);
        p.settle();
        assert_eq!((downs(&p.from_tx), downs(&p.from_rx)), (vec![], vec![]));
        assert_eq!(said(&p.from_tx, |e| matches!(e, EngineEvent::Trouble(_))), 0);
    }
}

/// How often: the environment may ask for more than a quick run does.
fn times(variable: &str, usual: u64) -> u64 {
    std::env::var(variable).ok().and_then(|n| n.parse().ok()).unwrap_or(usual)
}

/// Revokes at any moment of many parts: what was given back stays as it is. Set `KVLANE_REVOKES` for
/// more than the usual ten thousand.
#[test]
fn nothing_lands_after_any_of_many_revokes() {
    const LANES: u16 = 32;
    const BLOCKS: u32 = 64;
    const PAGE: u32 = 128;
    let nics = Nics::new(2);
    // On one of them, writes are on their way for some time.
    nics.control(1).fault(&all(What::Delay { us: 50 })).unwrap();
    let mut p = nics.pair(16);
    let (src, dst) = pools(&mut p, PAGE, BLOCKS * u32::from(LANES));
    p.connect(LANES);
    let area = |lane: u16| u32::from(lane) * BLOCKS..(u32::from(lane) + 1) * BLOCKS;
    let of = |lane: u16| {
        let ids: Vec<u32> = area(lane).collect();
        // Parts longer than the ring.
        let part_bytes = u64::from(20 * PAGE);
        (src.source(&ids, part_bytes), dst.plan(&backwards(area(lane)), part_bytes))
    };
    let plans: Vec<_> = (0..LANES).map(of).collect();
    let canaries = |lane: u16| {
        let bytes = (PAGE * BLOCKS) as usize;
        let address = dst.region.address() + u64::from(lane) * bytes as u64;
        let read = dst.read(address, bytes);
        dst.write(address, &vec![CANARY; bytes]);
        read.iter().filter(|&&b| b != CANARY).count()
    };
    let mut rng = Rng(0x5eed_f00d);
    let mut seen = [0u64; 3];
    let revokes = times("KVLANE_REVOKES", 10_000);
    for n in 0..revokes {
        let lane = (n % u64::from(LANES)) as u16;
        let grant = 1 + n;
        if n >= u64::from(LANES) {
            until_up(&mut p, lane);
            // Since the proof of the grant before: a whole round of the other lanes.
            assert_eq!(
                canaries(lane),
                0,
                "a byte landed after the proof of a grant on lane {lane}"
            );
            p.tell_tx(Command::Quiesce { link: LINK, grant: GrantId(grant - u64::from(LANES)) });
        }
        forget(&mut p, lane, grant);
        let (from, to) = &plans[usize::from(lane)];
        p.open_on(grant, &[lane], to);
        for part in 0..from.grid().parts() {
            p.post(grant, part, lane, from);
        }
        for _ in 0..rng.next() % 40 {
            p.poll_tx();
            std::thread::yield_now();
        }
        p.tell_rx(Command::Fence { grant: GrantId(grant), how: FenceHow::Revoke });
        for _ in 0..rng.next() % 3 {
            p.poll_tx();
        }
        engine_conformance::one_sided::alone(&mut p, grant);
        let landed = canaries(lane);
        seen[match landed {
            0 => 0,
            all if all == (PAGE * BLOCKS) as usize => 2,
            _ => 1,
        }] += 1;
    }
    println!("none, some and all of a grant had landed at {seen:?} revokes");
    assert!(
        seen.iter().all(|&n| n > revokes / 100),
        "the revokes are all too early or late: {seen:?}"
    );
    assert_eq!(control_stats(&nics, |s| s.rnr), 0);
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

fn control_stats(
    nics: &Nics,
    pick: impl Fn(&kvlane_transport::emulated::stats::Stats) -> u64,
) -> u64 {
    (0..nics.0.len()).map(|n| pick(&nics.control(n).stats().unwrap())).sum()
}

/// The credit of immediates: a sender never finds a receiver without a receive, however slowly that
/// one looks, and goes on as soon as it may. Set `KVLANE_PARTS` for more than the usual.
#[test]
fn a_receiver_never_lacks_a_receive() {
    let nics = Nics::new(1);
    let mut p = nics.pair(256);
    let (src, dst) = pools(&mut p, 64, 1 << 12);
    p.connect(4);
    let ids: Vec<u32> = (0..1 << 12).collect();
    let (from, to) = (src.source(&ids, 64), dst.plan(&backwards(0..1 << 12), 64));
    let parts = times("KVLANE_PARTS", 200_000);
    let mut rng = Rng(7);
    let (mut sent, mut acked, mut landed) = (0, 0, 0);
    for grant in 1..=parts.div_ceil(4096) {
        p.open(grant, 4, &to);
        let (mut next, mut done) = (0, [0u32; 2]);
        while done != [4096; 2] {
            p.from_tx.retain(|e| match e {
                EngineEvent::Acked { .. } => {
                    done[0] += 1;
                    false
                }
                EngineEvent::Nacked { why, .. } => panic!("{why}"),
                EngineEvent::LaneDown { why, .. } => panic!("{why}"),
                _ => true,
            });
            p.from_rx.retain(|e| match e {
                EngineEvent::Arrived { .. } => {
                    done[1] += 1;
                    false
                }
                _ => true,
            });
            while next < 4096 && next < done[0] + 8 {
                p.post(grant, next, (next % 4) as u16, &from);
                next += 1;
            }
            p.poll_tx();
            // Sometimes it looks seldom, so that the credit runs out.
            if grant % 8 != 0 || rng.next() % 64 == 0 {
                p.poll_rx();
            }
        }
        (sent, acked, landed) = (sent + next, acked + done[0], landed + done[1]);
        finish(&mut p, grant);
        p.clear();
    }
    assert_eq!((acked, landed), (sent, sent));
    let stats = nics.control(0).stats().unwrap();
    assert_eq!((stats.rnr, stats.resent), (0, 0));
    assert_eq!(dst.touched(), 64 << 12);
}
