//! The `gpunetio` engine over emulated NICs that are threads of the test.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)] // Tests fail by panicking.

mod engine_conformance;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use engine_conformance::nics::{Nics, all, arrived, fenced, finish, revoke, said, whys};
use engine_conformance::one_sided::{downs, many_revokes, pools, quiesced, until_up};
use engine_conformance::{CANARY, LINK, PATIENCE, Pair, Pool, Rng, layout, listen, peer, run};

use kvlane_proto::layout::KvKind;
use kvlane_proto::{Device, Error, ErrorKind, GrantId, LaneId, PartId, PoolMap, Role, limits};
use kvlane_transport::emulated::client::{End, Hca, Key, QueuePair, Rights};
use kvlane_transport::emulated::faults::{Fault, Target, What};
use kvlane_transport::engine::gpunetio::{GpunetioConfig, GpunetioEngine};
use kvlane_transport::engine::one_sided::post::{check, immediate};
use kvlane_transport::engine::one_sided::wire::{Blob, Message, Opened};
use kvlane_transport::engine::{
    Command, Engine, EngineEvent, FenceHow, OpenGrant, OpenSource, Post, SendGrant,
};
use kvlane_transport::memory::Region;
use kvlane_transport::mlx5::completion::What as Done;
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
    let nics = Nics::patient(1);
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
    let nics = Nics::patient(1);
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
        // That it takes long is said once, and changes nothing.
        p.skip_ms += limits::FENCE_MS;
        p.settle();
        let late = |e: &EngineEvent| matches!(e, EngineEvent::Trouble(e) if e.to_string().contains("does not flush"));
        assert_eq!((said(&p.from_rx, late), fenced(&p, grant)), (1, false));
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
            &format!("socket={}", nics.0[0].socket()),
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
    p.frozen = Some(p.now());
    p.tell_tx(Command::Quiesce { link: LINK, grant: GrantId(7) });
    p.settle();
    assert!(!quiesced(&p.from_tx, 7), "an entry is not known to have completed");
    p.frozen = None;
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

/// Nor is it waited for for ever: it costs its lane, and the part may go over another.
#[test]
fn a_lost_completion_is_an_error_by_itself() {
    let nics = Nics::new(1);
    let mut control = nics.control(0);
    let mut p = nics.pair(64);
    let (src, dst) = pools(&mut p, 4096, 16);
    p.connect(2);
    let (from, to) = (src.source(&[0, 1, 2, 3], 4 * 4096), dst.plan(&[0, 1, 2, 3], 4 * 4096));
    p.open(7, 2, &to);
    let sender = Target::Pair(sender_pair(&mut control, &mut p, 0));
    let fault = control.fault(&Fault::new(What::LoseCompletion, sender)).unwrap();
    p.frozen = Some(p.now());
    p.post(7, 0, 0, &from);
    p.until("arrival", |p| arrived(p, 7) == [0]);
    p.until("loss", |_| control.stats().unwrap().hits(fault) == 1);
    p.skip_ms = limits::COMPLETION_MS - 1;
    p.settle();
    assert_eq!((p.acked(), downs(&p.from_tx)), (0, vec![]), "it may still come");
    p.skip_ms = limits::COMPLETION_MS;
    p.until("the lane's loss", |p| downs(&p.from_tx) == [0]);
    let why = whys(&p.from_tx).remove(0);
    for word in ["does not complete", "nic=emulated0", "queue_pair=", "part=0", "fix: "] {
        assert!(why.contains(word), "{word}: {why}");
    }
    p.frozen = None;
    p.post(7, 0, 1, &from);
    p.until("part", |p| p.acked() == 1);
    p.fence(7, FenceHow::Revoke);
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
        // Whoever looks at the engine's log alone is told as well, once.
        let socket = format!("socket={}", nics.0[1].socket());
        for events in [&p.from_tx, &p.from_rx] {
            let is = |e: &Error| {
                ["the NIC is lost", "emulated1", "guid=", "rail=1", "lanes_lost=2", &socket]
                    .iter()
                    .all(|word| e.to_string().contains(word))
            };
            assert_eq!(said(events, |e| matches!(e, EngineEvent::Trouble(e) if is(e))), 1);
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
        let text = p.from_tx.iter().find(|e| trouble(e)).map(|e| format!("{e:?}")).unwrap();
        assert!(text.contains("emulated1") && text.contains("queue_pair"), "{text}");
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
        // Of 9 the sender has said that nothing is under way: no NIC is needed.
        p.until("answers", |p| fails(p, 7) == 2 && fenced(p, 9));
        assert!(!fenced(&p, 7) && fails(&p, 9) == 0);
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
    let nics = Nics::new(2);
    // On one of them, writes are on their way for some time.
    nics.control(1).fault(&all(What::Delay { us: 50 })).unwrap();
    // Parts are longer than the ring.
    let revokes = times("KVLANE_REVOKES", 10_000);
    let seen = many_revokes(&mut nics.pair(16), 32, revokes, 128, 40);
    let early_or_late = seen.iter().all(|&n| n > revokes / 100);
    assert!(early_or_late, "the revokes are all too early or late: {seen:?}");
    assert_eq!(control_stats(&nics, |s| s.rnr), 0);
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
            if grant % 8 != 0 || rng.next().is_multiple_of(64) {
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

/// A grant is stopped while one of its parts is partly in the ring: nothing more of it is posted, what
/// is posted is waited for, and the lane lives on.
#[test]
fn a_part_that_is_stopped_half_way_ends_clean() {
    let nics = Nics::patient(1);
    let mut control = nics.control(0);
    let mut p = nics.pair(16);
    let (src, dst) = pools(&mut p, 4096, 64);
    p.connect(1);
    let ids: Vec<u32> = (0..64).collect();
    let (from, to) = (src.source(&ids, 64 * 4096), dst.plan(&backwards(0..64), 64 * 4096));
    for grant in 1..20 {
        p.clear();
        dst.fill(CANARY);
        let held = control.fault(&all(What::HoldWire)).unwrap();
        p.frozen = Some(p.now());
        p.open(grant, 1, &to);
        p.post(grant, 0, 0, &from);
        p.settle();
        p.tell_tx(Command::Quiesce { link: LINK, grant: GrantId(grant) });
        p.settle();
        assert!(!quiesced(&p.from_tx, grant), "its entries may land");
        control.clear(held).unwrap();
        p.until("quiesced", |p| quiesced(&p.from_tx, grant));
        assert_eq!(dst.touched(), 16 * 4096, "what was in the ring, and nothing more");
        p.settle();
        assert_eq!(dst.touched(), 16 * 4096);
        assert_eq!((p.acked(), arrived(&p, grant)), (0, vec![]));
        p.frozen = None;
        p.fence(grant, FenceHow::Close);
        assert_eq!((downs(&p.from_tx), downs(&p.from_rx)), (vec![], vec![]));
    }
    p.open(100, 1, &to);
    p.send_all(100, 1, &from);
}

/// Everything that was said about an older queue pair, said again.
#[test]
fn late_words_change_nothing() {
    let nics = Nics::new(1);
    let mut p = nics.pair(64);
    let (src, dst) = pools(&mut p, 4096, 16);
    p.connect(2);
    let (from, to) = (src.source(&[0, 1], 4096), dst.plan(&[1, 0], 4096));
    let (mut to_tx, mut to_rx) = (Vec::new(), Vec::new());
    let copy = |from: &VecDeque<Command>, into: &mut Vec<Vec<u8>>| {
        into.extend(from.iter().filter_map(|command| match command {
            Command::Told { message, .. } => Some(message.clone()),
            _ => None,
        }));
    };
    for _ in 0..3 {
        p.clear();
        p.tell_tx(Command::ResetLane { link: LINK, lane: LaneId(0) });
        let up = |e: &EngineEvent| matches!(e, EngineEvent::LaneUp { .. });
        let started = Instant::now();
        while said(&p.from_tx, up) + said(&p.from_rx, up) < 2 {
            p.poll_tx();
            copy(&p.to_rx, &mut to_rx);
            p.poll_rx();
            copy(&p.to_tx, &mut to_tx);
            assert!(started.elapsed() < PATIENCE);
        }
    }
    // Broken, Pair and Up, three times; and their answers.
    assert_eq!((to_rx.len(), to_tx.len()), (9, 3));
    p.clear();
    p.open(7, 2, &to);
    for message in to_tx {
        p.tell_tx(Command::Told { link: LINK, message });
    }
    for message in to_rx {
        p.tell_rx(Command::Told { link: LINK, message });
    }
    p.settle();
    assert_eq!((downs(&p.from_tx), downs(&p.from_rx)), (vec![], vec![]));
    p.send_all(7, 2, &from);
    assert_eq!(dst.touched(), 2 * 4096);
}

/// NICs that only one side has: the link is refused at once, at both ends.
#[test]
fn nics_that_the_peer_lacks_are_refused_by_name() {
    let nics = Nics::new(4);
    let refused = |events: &[EngineEvent]| {
        events.iter().find_map(|e| match e {
            EngineEvent::Local { blob: Err(e), .. } => Some(e.to_string()),
            _ => None,
        })
    };
    let lacks = "the peer does not have the lane's NIC";
    // One is shared, none is, they are not as many: then who has less has nothing to say.
    for (theirs, names) in [
        (vec![2, 0], ["emulated1", "emulated2"]),
        (vec![2, 3], ["emulated0", "emulated3"]),
        (vec![0], ["emulated1", "emulated0"]),
    ] {
        let mut p = Pair::new((nics.engine_on(&[0, 1], 64), nics.engine_on(&theirs, 64)));
        listen(&mut p, 4);
        let each = theirs.len() > 1;
        p.until("refusals", |p| {
            refused(&p.from_tx).is_some() && refused(&p.from_rx).is_some() == each
        });
        for text in [refused(&p.from_tx), refused(&p.from_rx)].into_iter().flatten() {
            for word in [lacks, names[0], names[1], "give both workers the same NICs"] {
                assert!(text.contains(word), "{word}: {text}");
            }
        }
        p.settle();
        let lane = |e: &EngineEvent| {
            matches!(e, EngineEvent::LaneUp { .. } | EngineEvent::LaneDown { .. })
        };
        assert_eq!(said(&p.from_tx, lane) + said(&p.from_rx, lane), 0, "no lane was tried");
    }
    // In another order they are the same.
    let mut p = Pair::new((nics.engine_on(&[0, 1], 64), nics.engine_on(&[1, 0], 64)));
    p.connect(4);
}

/// One side was started again with a new NIC, the other still has the one that died.
#[test]
fn a_nic_in_place_of_one_that_the_peer_has_lost_costs_its_lanes_only() {
    for sender_is_old in [true, false] {
        let mut nics = Nics::new(3);
        let mut old = nics.engine_on(&[0, 1], 64);
        nics.0.remove(0).stop();
        old.poll(kvlane_transport::clock::now(), &mut Vec::new());
        let new = nics.engine_on(&[1, 0], 64);
        let mut p = Pair::new(if sender_is_old { (old, new) } else { (new, old) });
        let (src, dst) = pools(&mut p, 4096, 16);
        listen(&mut p, 4);
        p.until("lanes", |p| {
            let up = |e: &EngineEvent| matches!(e, EngineEvent::LaneUp { .. });
            said(&p.from_tx, up) == 2 && said(&p.from_rx, up) == 2
        });
        assert_eq!(downs(&p.from_tx), [0, 2]);
        let why = if sender_is_old { "the NIC is lost" } else { "does not have the lane's NIC" };
        assert!(whys(&p.from_tx).iter().all(|w| w.contains(why)), "{:?}", whys(&p.from_tx));
        p.clear();
        let (from, to) = (src.source(&[0, 1], 4096), dst.plan(&[1, 0], 4096));
        p.open_on(7, &[1, 3], &to);
        p.send_on(7, &[1, 3], &from);
        p.skip_ms = 60_000;
        p.settle();
        assert_eq!(downs(&p.from_tx), [], "it is not tried again and again");
    }
}

#[test]
fn what_cannot_be_an_engine_is_refused_by_name() {
    let nics = Nics::new(1);
    let name = nics.0[0].socket().clone();
    let text = |nics, entries| {
        let config = GpunetioConfig { entries, ..GpunetioConfig::new(nics) };
        GpunetioEngine::new(config).err().unwrap().to_string()
    };
    for (nics, entries, want) in [
        (vec![], 64, "number of NICs"),
        (vec![name.clone(); 2], 64, "named twice"),
        (vec![name.clone()], 48, "power of two"),
        (vec![name.clone()], 8, "power of two"),
        (vec![name.clone()], 1 << 16, "power of two"),
    ] {
        let text = text(nics, entries);
        assert!(text.starts_with("config: ") && text.contains(want), "{want}: {text}");
    }
    let gone = kvlane_transport::sys::unix::Name::Abstract(b"kvlane-nobody".to_vec());
    let text_of_gone = text(vec![gone], 64);
    assert_eq!(text_of_gone.matches("=@kvlane-nobody").count(), 1, "{text_of_gone}");
    let file = "kvlane-nobody".parse().unwrap();
    assert!(text(vec![file], 64).contains("did you mean @kvlane-nobody"));
    // Memory that a NIC of another process cannot write.
    let mut p = nics.pair(64);
    let sealed = Region::memfd(4096).unwrap();
    p.connect(1);
    let e = p.rx.register(&sealed).unwrap_err();
    assert!(e.kind() == ErrorKind::Memory && e.to_string().contains(&sealed.to_string()), "{e}");
    assert_eq!(p.rx.unregister(&sealed).unwrap_err().kind(), ErrorKind::Memory, "no trace");
}

/// A worker of its own make: a NIC, a domain, a pool, and words for the engine under test.
struct Stranger {
    engine: Box<dyn Engine>,
    said: Vec<EngineEvent>,
    heard: VecDeque<Message>,
    hca: Hca,
    domain: kvlane_transport::emulated::client::Domain,
    pool: std::sync::Arc<Region>,
    key: Key,
}

impl Stranger {
    /// Against an engine that receives, or sends.
    fn new(nics: &Nics, receiver: bool, lanes: u16) -> Self {
        let mut hca = nics.control(0);
        let domain = hca.domain().unwrap();
        let pool = Region::for_nic(1 << 16).unwrap();
        let key = hca.register(domain, &pool, Rights::RemoteWrite).unwrap();
        let mut engine = nics.engine(64);
        let peer = peer(if receiver { Role::Prefill } else { Role::Decode });
        let t = kvlane_transport::clock::now();
        engine.command(t, Command::Listen { link: LINK, peer, lanes, receiver });
        let remote = Blob { lanes, nics: vec![hca.about().clone()], lost: 0 }.encode();
        engine.command(t, Command::Connect { link: LINK, remote });
        let (said, heard) = (Vec::new(), VecDeque::new());
        Self { engine, said, heard, hca, domain, pool, key }
    }
    fn poll(&mut self) {
        let mut events = Vec::new();
        self.engine.poll(kvlane_transport::clock::now(), &mut events);
        for event in events {
            match event {
                EngineEvent::Tell { message, .. } => {
                    self.heard.push_back(Message::decode(&message).unwrap());
                }
                event => self.said.push(event),
            }
        }
    }
    fn until<T>(&mut self, what: &str, mut look: impl FnMut(&mut Self) -> Option<T>) -> T {
        let started = Instant::now();
        loop {
            self.poll();
            if let Some(found) = look(self) {
                return found;
            }
            assert!(started.elapsed() < PATIENCE, "no {what}: {:?} {:?}", self.said, self.heard);
            std::thread::yield_now();
        }
    }
    fn tell(&mut self, message: &Message) {
        self.tell_bytes(message.encode());
    }
    fn tell_bytes(&mut self, message: Vec<u8>) {
        let told = Command::Told { link: LINK, message };
        self.engine.command(kvlane_transport::clock::now(), told);
    }
    fn pair(&mut self) -> QueuePair {
        self.hca.queue_pair(self.domain, 64, 64).unwrap()
    }
    /// As an honest sender: a lane, and the receiver's memory.
    fn dial(&mut self, lane: u16, epoch: u64) -> (QueuePair, Vec<Opened>) {
        let pair = self.pair();
        let end = End { number: pair.number, sequence: pair.sequence, ..End::default() };
        let (guid, credit) = (self.hca.about().guid, (self.pool.address(), self.key));
        self.tell(&Message::Pair { lane, epoch, guid, end, credit });
        let (end, regions) = self.until("pair", |s| match s.heard.pop_front() {
            Some(Message::Paired { lane: l, epoch: e, end, regions, .. }) => {
                assert_eq!((l, e), (lane, epoch));
                Some((end, regions))
            }
            _ => None,
        });
        self.hca.connect(&pair, end).unwrap();
        self.tell(&Message::Up { lane, epoch });
        self.until("lane", |s| (said(&s.said, |e| is_up(e, lane)) > 0).then_some(()));
        (pair, regions)
    }
    fn write(&mut self, pair: &mut QueuePair, to: Remote, immediate: Option<u32>) {
        let from = Segment { address: self.pool.address() + 4096, key: self.key.0, bytes: 64 };
        let (index, number) = (pair.sends.next() as u16, pair.number);
        let entry = match immediate {
            Some(n) => entry::write_immediate(index, number, to, from, n, true),
            None => entry::write(index, number, to, from, true),
        };
        assert!(pair.sends.push(&entry));
        pair.sends.ring();
        self.hca.kick();
    }
    fn completion(&mut self, pair: &mut QueuePair) -> Done {
        self.until("completion", |_| pair.completions.poll()).unwrap().what
    }
}

fn is_up(e: &EngineEvent, lane: u16) -> bool {
    matches!(e, EngineEvent::LaneUp { lane: l, .. } if l.0 == lane)
}

/// A sender that writes what it should not: it loses its lane, and nothing else happens.
#[test]
fn a_lying_sender_costs_itself_its_lane() {
    let nics = Nics::new(1);
    let mut s = Stranger::new(&nics, true, 2);
    let l = layout(64, 1, KvKind::Mla);
    let dst = Pool::new(&l, 16);
    s.engine.register(&dst.region).unwrap();
    let (mut honest, regions) = s.dial(1, 1);
    let to = Remote { address: dst.region.address(), key: regions[0].key.0 };
    let plan = dst.plan(&[3, 1, 2], 64);
    let open = |s: &mut Stranger, grant: u64, lane: u16| {
        let source = OpenSource { link: LINK, lanes: vec![LaneId(lane)], plan: plan.clone() };
        let open = OpenGrant { grant: GrantId(grant), sources: vec![source] };
        s.engine.command(kvlane_transport::clock::now(), Command::Open(open));
    };
    open(&mut s, 1, 1);
    for (n, opened) in [true, true, true, false].into_iter().enumerate() {
        let (epoch, grant) = (10 * (n as u64 + 1), GrantId(9 + n as u64));
        s.said.clear();
        let (mut pair, _) = s.dial(0, epoch);
        if opened {
            open(&mut s, grant.0, 0);
        }
        // A part that it does not have, a check that is not its, and no grant at all.
        let number = match n {
            0 => immediate(grant, PartId(3)),
            1 => immediate(grant, PartId((1 << 24) - 1)),
            2 => immediate(grant, PartId(0)) ^ 1 << 24,
            _ => immediate(grant, PartId(0)),
        };
        s.write(&mut pair, to, Some(number));
        if !opened {
            // It waits for its grant; another one comes.
            assert_eq!(s.completion(&mut pair), Done::Sent);
            let other = (100..).find(|&other| check(GrantId(other)) != check(grant)).unwrap();
            open(&mut s, other, 0);
        }
        s.until("end", |s| (downs(&s.said) == [0]).then_some(()));
        let why = whys(&s.said).remove(0);
        assert!(
            why.contains("no grant on this lane has") && why.contains("peer=c/prefill"),
            "{why}"
        );
        s.until("word", |s| {
            let broken =
                |m: &Message| matches!(m, Message::Broken { lane: 0, epoch: e, .. } if *e == epoch);
            s.heard.iter().any(broken).then_some(())
        });
        assert_eq!(said(&s.said, |e| matches!(e, EngineEvent::Arrived { .. })), 0);
        s.heard.clear();
    }
    // The other lane did not notice.
    s.write(&mut honest, to, Some(immediate(GrantId(1), PartId(2))));
    assert_eq!(s.completion(&mut honest), Done::Sent);
    s.until("arrival", |s| {
        let want = |e: &EngineEvent| {
            matches!(e, EngineEvent::Arrived { grant: GrantId(1), part: PartId(2), .. })
        };
        (said(&s.said, want) == 1).then_some(())
    });
}

/// Words that make no sense are refused, told once and counted; what is asked for again and again leaves one
/// queue pair a lane.
#[test]
fn hostile_words_change_nothing() {
    let nics = Nics::new(1);
    let mut s = Stranger::new(&nics, true, 2);
    let (honest, _) = s.dial(1, 5);
    let end = End { number: 77, sequence: 1, ..End::default() };
    let credit = (1 << 40, Key(1));
    let guid = s.hca.about().guid;
    let pair = |lane, epoch, guid| Message::Pair { lane, epoch, guid, end, credit };
    for (n, message) in [
        vec![],
        vec![9; 100],
        vec![1; 1 << 14],
        pair(2, 1, guid).encode(),
        Message::Paired { lane: 0, epoch: 1, end, receives: 1, regions: vec![] }.encode(),
        Message::Regions { guid, regions: vec![] }.encode(),
        Message::Broken { lane: 63, epoch: 5, why: String::new() }.encode(),
    ]
    .into_iter()
    .enumerate()
    {
        s.said.retain(|e| matches!(e, EngineEvent::Trouble(_)));
        s.tell_bytes(message);
        s.poll();
        let trouble = said(&s.said, |e| matches!(e, EngineEvent::Trouble(_)));
        assert_eq!(trouble, 1, "told once, {n}: {:?}", s.said);
    }
    // Late ones, and one for a NIC that nobody has.
    s.heard.clear();
    for message in [
        pair(1, 5, guid),
        pair(1, 4, guid),
        Message::Up { lane: 1, epoch: 4 },
        Message::Up { lane: 0, epoch: 0 },
        Message::Broken { lane: 1, epoch: 4, why: "x".repeat(1000) },
        Message::Broken { lane: 1, epoch: u64::MAX, why: String::new() },
        pair(0, 1, guid ^ 1),
    ] {
        s.tell(&message);
    }
    s.poll();
    let Some(Message::Broken { lane: 0, epoch: 1, why }) = s.heard.pop_front() else {
        panic!("{:?}", s.heard)
    };
    assert!(why.contains("does not have this NIC") && why.contains("emulated0"), "{why}");
    assert!(s.heard.is_empty() && downs(&s.said).is_empty());
    for epoch in 10..500 {
        s.tell(&pair(0, epoch, guid));
        if epoch % 7 == 0 {
            s.poll();
        }
    }
    let last = |m: &Message| matches!(m, Message::Paired { lane: 0, epoch: 499, .. });
    s.until("last pair", |s| s.heard.iter().any(last).then_some(()));
    let numbers: Vec<u32> = s.hca.stats().unwrap().pairs.iter().map(|p| p.number).collect();
    assert_eq!(numbers.len(), 3, "two of lane 1, one of lane 0: {numbers:?}");
    assert!(numbers.contains(&honest.number));
}

/// The memory of one link is opened to that link alone.
#[test]
fn keys_of_one_link_do_not_work_on_another() {
    let nics = Nics::new(1);
    let l = layout(64, 1, KvKind::Mla);
    let dst = Pool::new(&l, 16);
    dst.fill(CANARY);
    let mut s = Stranger::new(&nics, true, 1);
    s.engine.register(&dst.region).unwrap();
    let (_, regions) = s.dial(0, 1);
    // A second link of the same engine.
    let mut other = Stranger::new(&nics, true, 1);
    other.engine.register(&dst.region).unwrap();
    let (mut pair, own) = other.dial(0, 1);
    assert_ne!(own[0].key, regions[0].key);
    let to = Remote { address: dst.region.address(), key: regions[0].key.0 };
    other.write(&mut pair, to, None);
    let Done::SendFailed(fault) = other.completion(&mut pair) else { panic!("it was let through") };
    assert_eq!(fault.syndrome, Syndrome::REMOTE_ACCESS);
    assert_eq!(dst.touched(), 0);
}

/// A receiver that counts parts which were never sent loses the lane.
#[test]
fn a_lying_receiver_costs_itself_its_lane() {
    let nics = Nics::new(1);
    let mut s = Stranger::new(&nics, false, 1);
    let l = layout(64, 1, KvKind::Mla);
    let src = Pool::new(&l, 16);
    s.engine.register(&src.region).unwrap();
    let (lane, epoch, end, credit) = s.until("pair", |s| match s.heard.pop_front() {
        Some(Message::Pair { lane, epoch, end, credit, .. }) => Some((lane, epoch, end, credit)),
        _ => None,
    });
    let mut pair = s.pair();
    pair.receives.post(16);
    s.hca.connect(&pair, end).unwrap();
    let mine = End { number: pair.number, sequence: pair.sequence, ..End::default() };
    let region = Opened { address: s.pool.address(), bytes: s.pool.bytes(), key: s.key };
    // An answer to another queue pair first.
    s.tell(&Message::Paired { lane, epoch: epoch + 1, end: mine, receives: 9, regions: vec![] });
    s.tell(&Message::Paired { lane, epoch, end: mine, receives: 2, regions: vec![region] });
    s.until("lane", |s| (said(&s.said, |e| is_up(e, 0)) == 1).then_some(()));
    let there = PoolMap::contiguous(Device::Host, s.pool.address() + 8192, &l, 16);
    let there = Pool { region: s.pool.clone(), layout: l.clone(), map: there.into() };
    let (from, to) = (src.source(&[0, 1, 2, 3], 64), there.plan(&[3, 2, 1, 0], 64));
    let t = kvlane_transport::clock::now();
    let lanes = vec![LaneId(0)];
    let (link, grant) = (LINK, GrantId(7));
    s.engine.command(t, Command::Grant(SendGrant { link, grant, lanes, plan: to }));
    for part in 0..3 {
        let pages = from.pages(PartId(part)).unwrap();
        let (part, lane) = (PartId(part), LaneId(0));
        s.engine.command(t, Command::Post(Post { link, grant, part, lane, pages }));
    }
    // Two receives, so two parts, whatever is asked.
    let acked = |e: &EngineEvent| matches!(e, EngineEvent::Acked { .. });
    s.until("acks", |s| (said(&s.said, acked) == 2).then_some(()));
    for _ in 0..1000 {
        s.poll();
    }
    assert_eq!(said(&s.said, acked), 2, "a part was sent without credit");
    s.pool.memory().write_at(4096, &1000u64.to_ne_bytes()).unwrap();
    let credit = Remote { address: credit.0, key: credit.1.0 };
    let from = Segment { address: s.pool.address() + 4096, key: s.key.0, bytes: 8 };
    let entry = entry::write(pair.sends.next() as u16, pair.number, credit, from, true);
    assert!(pair.sends.push(&entry));
    pair.sends.ring();
    s.hca.kick();
    s.until("end", |s| (downs(&s.said) == [0]).then_some(()));
    let why = whys(&s.said).remove(0);
    assert!(why.contains("count of parts cannot be") && why.contains("found=1000"), "{why}");
}

/// As many lanes as a link may have, spread over rails.
#[test]
fn the_most_lanes_over_three_rails() {
    let nics = Nics::new(3);
    let mut p = nics.pair(32);
    assert_eq!(p.tx.caps().rails, 3);
    let (src, dst) = pools(&mut p, 1000, 2048);
    p.connect(limits::LANES_PER_LINK_MAX);
    let ids: Vec<u32> = (0..2048).collect();
    // So many parts that a lane could have all of its own in flight.
    let (from, to) = (src.source(&ids, 4000), dst.plan(&backwards(0..2048), 4000));
    p.open(7, limits::LANES_PER_LINK_MAX, &to);
    p.send_all(7, limits::LANES_PER_LINK_MAX, &from);
    assert_eq!(dst.touched(), 2048 * 1000);
    finish(&mut p, 7);
    let immediates = |n: usize| nics.control(n).stats().unwrap().immediates;
    assert!((0..3).all(|n| immediates(n) > 150), "each rail carries its share");
    // All at once, and up again.
    p.open(8, limits::LANES_PER_LINK_MAX, &to);
    revoke(&mut p, 8);
    assert_eq!(downs(&p.from_rx).len(), usize::from(limits::LANES_PER_LINK_MAX));
    (0..limits::LANES_PER_LINK_MAX).for_each(|lane| until_up(&mut p, lane));
}
