//! What `gpunetio` does when the sender is ahead of the receiver's engine: the offer of a grant leaves
//! when its `Open` is queued, so writes may come before that is taken, and lanes may go.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)] // Tests fail by panicking.

mod engine_conformance;

use std::sync::Arc;
use std::time::{Duration, Instant};

use engine_conformance::nics::{Nics, all, arrived, fenced, said};
use engine_conformance::one_sided::{downs, pools, quiesced, until_up};
use engine_conformance::{CANARY, LINK, Pair, peer};
use kvlane_proto::{GrantId, LaneId, LinkId, Plan, Role, limits};
use kvlane_transport::clock::now;
use kvlane_transport::emulated::client::{End, Key};
use kvlane_transport::emulated::faults::What;
use kvlane_transport::engine::one_sided::wire::Message;
use kvlane_transport::engine::{Command, EngineEvent, FenceHow, OpenGrant, OpenSource, SendGrant};

fn open_at_receiver(p: &mut Pair, grant: u64, lanes: &[u16], plan: &Arc<Plan>) {
    let lanes: Vec<_> = lanes.iter().copied().map(LaneId).collect();
    let source = OpenSource { link: LINK, lanes, plan: plan.clone() };
    p.tell_rx(Command::Open(OpenGrant { grant: GrantId(grant), sources: vec![source] }));
}
fn give_to_sender(p: &mut Pair, grant: u64, lanes: &[u16], plan: &Arc<Plan>) {
    let (grant, plan) = (GrantId(grant), plan.clone());
    let lanes: Vec<_> = lanes.iter().copied().map(LaneId).collect();
    p.tell_tx(Command::Grant(SendGrant { link: LINK, grant, lanes, plan }));
}
fn failed(p: &Pair, grant: u64) -> bool {
    let of =
        |e: &EngineEvent| matches!(e, EngineEvent::FenceFailed { grant: g, .. } if g.0 == grant);
    said(&p.from_rx, of) > 0
}

/// Parts that came before their grant was opened count once it is, in whatever number the sender may
/// have under way; the lane lives on.
#[test]
fn parts_that_come_before_their_grant_wait_for_it() {
    let nics = Nics::new(1);
    let mut p = nics.pair(64);
    let (src, dst) = pools(&mut p, 4096, 64);
    p.connect(1);
    let ids: Vec<u32> = (0..64).collect();
    let (from, to) = (src.source(&ids, 4096), dst.plan(&ids, 4096));
    give_to_sender(&mut p, 7, &[0], &to);
    let mut next = 0;
    // Until the sender has used up its credit: nothing comes back before the grant is there.
    let until = Instant::now() + Duration::from_millis(50);
    while Instant::now() < until {
        while next < 64 && (next as usize) < p.acked() + limits::PARTS_IN_FLIGHT_PER_LANE as usize {
            p.post(7, next, 0, &from);
            next += 1;
        }
        p.poll_tx();
        p.poll_rx();
    }
    let early = p.acked();
    assert!((16..64).contains(&early), "{early} parts are in place");
    assert!(p.from_rx.is_empty(), "{:?}", p.from_rx);
    open_at_receiver(&mut p, 7, &[0], &to);
    p.until("the rest", |p| {
        while next < 64 && (next as usize) < p.acked() + limits::PARTS_IN_FLIGHT_PER_LANE as usize {
            p.post(7, next, 0, &from);
            next += 1;
        }
        arrived(p, 7).len() >= 64
    });
    let mut parts = arrived(&p, 7);
    parts.sort_unstable();
    assert_eq!(parts, (0..64).collect::<Vec<_>>());
    assert_eq!((downs(&p.from_rx), downs(&p.from_tx)), (vec![], vec![]));
    assert_eq!(nics.control(0).stats().unwrap().syndrome(0x16), 0, "no receive was missing");
}

/// A grant that is opened when its lane is on its way out is not proved before that is out.
#[test]
fn a_grant_opened_on_a_lane_that_is_leaving_waits_for_it() {
    let nics = Nics::patient(1);
    let mut control = nics.control(0);
    let mut p = nics.pair(64);
    let (src, dst) = pools(&mut p, 4096, 16);
    p.connect(1);
    let ids: Vec<u32> = (0..16).collect();
    let (from, to) = (src.source(&ids, 4 * 4096), dst.plan(&ids, 4 * 4096));
    let fault = control.fault(&all(What::HoldLanding)).unwrap();
    give_to_sender(&mut p, 7, &[0], &to);
    p.post(7, 0, 0, &from);
    p.post(7, 1, 0, &from);
    while control.stats().unwrap().hits(fault) == 0 {
        p.poll_tx();
    }
    // The sender gives its end up: the receiver's is taken down, and cannot be flushed.
    p.tell_tx(Command::ResetLane { link: LINK, lane: LaneId(0) });
    p.until("end", |p| downs(&p.from_rx) == [0]);
    open_at_receiver(&mut p, 7, &[0], &to);
    p.tell_rx(Command::Fence { grant: GrantId(7), how: FenceHow::Revoke });
    let until = Instant::now() + Duration::from_millis(20);
    while Instant::now() < until {
        p.poll_rx();
        assert!(!fenced(&p, 7), "a proof while writes may land");
    }
    control.clear(fault).unwrap();
    p.until("proof", |p| fenced(p, 7));
    dst.fill(CANARY);
    p.settle();
    assert_eq!(dst.touched(), 0, "a byte landed after the proof");
    until_up(&mut p, 0);
}

/// A grant that is opened when its lane was lost with its NIC is never proved by a revoke: the NIC may
/// only have stood still.
#[test]
fn a_grant_opened_behind_the_loss_of_its_nic_is_never_proved() {
    let mut nics = Nics::new(2);
    let mut p = nics.pair(64);
    let (src, dst) = pools(&mut p, 4096, 16);
    p.connect(2);
    let ids: Vec<u32> = (0..16).collect();
    let (from, to) = (src.source(&ids, 4 * 4096), dst.plan(&ids, 4 * 4096));
    nics.0.pop().unwrap().stop();
    p.until("loss", |p| downs(&p.from_rx) == [1]);
    open_at_receiver(&mut p, 7, &[0, 1], &to);
    open_at_receiver(&mut p, 8, &[1], &to);
    open_at_receiver(&mut p, 9, &[1], &to);
    for grant in [7, 8] {
        p.tell_rx(Command::Fence { grant: GrantId(grant), how: FenceHow::Revoke });
    }
    // The sender has said that nothing of it is under way: that needs no NIC.
    p.tell_rx(Command::Fence { grant: GrantId(9), how: FenceHow::Close });
    p.until("answers", |p| failed(p, 7) && failed(p, 8) && fenced(p, 9));
    assert!(!fenced(&p, 7) && !fenced(&p, 8));
    // The lane that has its NIC was taken down all the same, and comes back.
    p.until("end", |p| downs(&p.from_rx) == [0, 1]);
    until_up(&mut p, 0);
    p.clear();
    p.open_on(10, &[0], &to);
    p.send_on(10, &[0], &from);
    p.tell_tx(Command::Quiesce { link: LINK, grant: GrantId(10) });
    p.until("quiesced", |p| quiesced(&p.from_tx, 10));
    p.fence(10, FenceHow::Close);
}

/// A grant that the engine could not take was offered all the same: it is not proved.
#[test]
fn a_grant_that_could_not_be_opened_is_never_proved() {
    let nics = Nics::new(1);
    let mut p = nics.pair(64);
    let (src, dst) = pools(&mut p, 4096, 4);
    p.connect(1);
    let (from, to) = (src.source(&[0], 4096), dst.plan(&[0], 4096));
    for grant in 0..limits::ROOMS_MAX as u64 {
        p.tell_rx(Command::Open(OpenGrant { grant: GrantId(1000 + grant), sources: vec![] }));
    }
    p.open_on(7, &[0], &to);
    p.until("refusal", |p| said(&p.from_rx, |e| matches!(e, EngineEvent::Trouble(_))) == 1);
    p.post(7, 0, 0, &from);
    p.until("ack", |p| p.acked() == 1);
    p.tell_rx(Command::Fence { grant: GrantId(7), how: FenceHow::Revoke });
    p.until("answer", |p| failed(p, 7));
    assert!(!fenced(&p, 7));
}

/// A peer that wants queue pairs without end gets one now and then.
#[test]
fn who_asks_for_queue_pairs_without_end_gets_few() {
    let nics = Nics::new(1);
    let guid = nics.control(0).about().guid;
    let mut p = nics.pair(64);
    let link = LinkId(2);
    let peer = peer(Role::Prefill);
    p.tell_rx(Command::Listen { link, peer, lanes: 1, receiver: true });
    p.settle();
    let began = now();
    let mut answers = 0;
    for epoch in 1..=2000 {
        let end = End { number: 5, sequence: 5, ..End::default() };
        let ask = Message::Pair { lane: 0, epoch, guid, end, credit: (0, Key(1)) };
        p.tell_rx(Command::Told { link, message: ask.encode() });
        p.poll_rx();
        answers += p
            .to_tx
            .drain(..)
            .filter(|c| match c {
                Command::Told { message, .. } => {
                    matches!(Message::decode(message), Ok(Message::Paired { .. }))
                }
                _ => false,
            })
            .count();
    }
    let ms = began.until(now()).as_millis() as usize;
    assert!(answers >= 1 && answers <= 2 + ms / 5, "{answers} in {ms} ms");
    // The last one is not forgotten.
    p.until("the last", |p| {
        p.to_tx.iter().any(|c| match c {
            Command::Told { message, .. } => {
                matches!(Message::decode(message), Ok(Message::Paired { epoch: 2000, .. }))
            }
            _ => false,
        }) || {
            p.to_tx.clear();
            false
        }
    });
}
