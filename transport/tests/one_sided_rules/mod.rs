//! What every one-sided engine must do, real or simulated: a sender writes into pages of a receiver
//! whose code does not look.
//!
//! A [`Bed`] is one sender and one receiver, linked over [`Bed::LANES`] lanes. The simulator's engine
//! and the ones that users get are held to the same rules, so that what the simulator proves about
//! the machines is about engines like these.
#![allow(dead_code, unreachable_pub)]

use kvlane_proto::grants::FenceHow;

/// What the engines of a bed have said, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    /// Receiver: a part is in place.
    Arrived { grant: u64, part: u32 },
    /// Sender: the receiver has a part.
    Acked { grant: u64, part: u32 },
    /// A lane carries pages, as that side sees it.
    Up { sender: bool, lane: u16 },
    /// It does not any more.
    Down { sender: bool, lane: u16 },
    /// Sender: nothing that was posted can land.
    Quiesced { grant: u64 },
    /// Receiver: the proof.
    Fenced { grant: u64 },
}

/// A sender and a receiver, all lanes up.
pub trait Bed {
    /// Lanes of the link; each grant may use all of them.
    const LANES: u16 = 2;
    /// Parts of each grant.
    const PARTS: u32 = 4;

    /// Lends fresh pages, opens a grant for them, and makes it known to the sender, whose own pages
    /// hold what is to be sent.
    fn grant(&mut self) -> u64;
    /// The sender posts a part.
    fn post(&mut self, grant: u64, part: u32, lane: u16);
    /// From here on nothing arrives; what is posted stays on the wire.
    fn hold(&mut self);
    /// What is on the wire arrives.
    fn release(&mut self);
    /// The sender's end of a lane is gone, and the receiver is not told.
    fn lose(&mut self, lane: u16);
    /// The sender stops a grant.
    fn quiesce(&mut self, grant: u64);
    /// The receiver asks for its proof.
    fn fence(&mut self, grant: u64, how: FenceHow);
    /// Goes on until nothing happens any more by itself.
    fn settle(&mut self);
    /// What was said since this was last asked.
    fn said(&mut self) -> Vec<Said>;
    /// Whether every byte of a part is as it was sent.
    fn is_filled(&self, grant: u64, part: u32) -> bool;
    /// The pages of a grant are somebody else's from here on: they are filled with canaries.
    fn reuse(&mut self, grant: u64);
    /// Whether a byte landed in a page that is somebody else's.
    fn is_spoilt(&self) -> bool;
}

/// Every rule.
pub fn run<B: Bed>(make: impl Fn() -> B) {
    bytes_land_and_both_sides_hear_of_it(make());
    nothing_lands_after_a_revoke(make());
    without_a_fence_it_would(make());
    late_writes_land_when_the_sender_is_gone(make());
    a_quiesce_is_true(make(), false);
    a_quiesce_is_true(make(), true);
    a_grant_never_opened_is_fenced_at_once(make());
    nothing_is_posted_on_a_lane_that_is_lost(make());
    a_closed_grant_leaves_its_lanes(make());
}

fn post_all<B: Bed>(bed: &mut B, grant: u64) {
    for part in 0..B::PARTS {
        bed.post(grant, part, part as u16 % B::LANES);
    }
}

fn all_filled<B: Bed>(bed: &B, grant: u64) -> bool {
    (0..B::PARTS).all(|part| bed.is_filled(grant, part))
}

fn bytes_land_and_both_sides_hear_of_it<B: Bed>(mut bed: B) {
    let grant = bed.grant();
    assert!((0..B::PARTS).all(|part| !bed.is_filled(grant, part)));
    post_all(&mut bed, grant);
    bed.settle();
    assert!(all_filled(&bed, grant));
    let said = bed.said();
    for part in 0..B::PARTS {
        let count = |what| said.iter().filter(|s| **s == what).count();
        assert!(count(Said::Arrived { grant, part }) >= 1, "{said:?}");
        assert_eq!(count(Said::Acked { grant, part }), 1, "{said:?}");
    }
}

fn nothing_lands_after_a_revoke<B: Bed>(mut bed: B) {
    let grant = bed.grant();
    bed.hold();
    post_all(&mut bed, grant);
    bed.settle();
    bed.said();
    bed.fence(grant, FenceHow::Revoke);
    bed.settle();
    let said = bed.said();
    let at = |what| said.iter().position(|s| *s == what);
    let proof = at(Said::Fenced { grant });
    assert!(proof.is_some(), "{said:?}");
    for lane in 0..B::LANES {
        let down = at(Said::Down { sender: false, lane });
        assert!(down.is_some() && down < proof, "its lanes go before the proof comes: {said:?}");
    }
    bed.reuse(grant);
    bed.release();
    bed.settle();
    assert!(!bed.is_spoilt(), "a byte landed after the proof");
    let late = bed.said();
    assert!(!late.iter().any(|s| matches!(s, Said::Arrived { grant: g, .. } if *g == grant)));
    // The lanes come back, as others.
    let next = bed.grant();
    post_all(&mut bed, next);
    bed.settle();
    assert!(all_filled(&bed, next), "{:?}", bed.said());
    assert!(!bed.is_spoilt());
}

/// The same, and nobody fences: the bed lets stale writes land, or it would prove nothing.
fn without_a_fence_it_would<B: Bed>(mut bed: B) {
    let grant = bed.grant();
    bed.hold();
    post_all(&mut bed, grant);
    bed.settle();
    bed.reuse(grant);
    bed.release();
    bed.settle();
    assert!(bed.is_spoilt());
}

fn late_writes_land_when_the_sender_is_gone<B: Bed>(mut bed: B) {
    let grant = bed.grant();
    bed.hold();
    post_all(&mut bed, grant);
    bed.settle();
    bed.lose(0);
    bed.settle();
    assert!(!bed.is_filled(grant, 0));
    bed.release();
    bed.settle();
    assert!(bed.is_filled(grant, 0), "what is on the wire outlives the sender's end");
}

/// When it is said, everything posted is through, or a lane that had some of it is lost.
fn a_quiesce_is_true<B: Bed>(mut bed: B, held: bool) {
    let grant = bed.grant();
    if held {
        bed.hold();
    }
    post_all(&mut bed, grant);
    if held {
        // It is on the wire, and not only about to be.
        bed.settle();
    }
    bed.quiesce(grant);
    bed.settle();
    let said = bed.said();
    let quiet = said.iter().position(|s| *s == Said::Quiesced { grant });
    let before = &said[..quiet.unwrap_or_else(|| panic!("not quiet: {said:?}"))];
    let lost = |lane| before.contains(&Said::Down { sender: true, lane });
    for part in 0..B::PARTS {
        // Its answer may still be on its way; or it was not begun, and never will be.
        let through = said.contains(&Said::Arrived { grant, part });
        let none = !held && !bed.is_filled(grant, part);
        assert!(through || none || lost(part as u16 % B::LANES), "{part}: {said:?}");
    }
    if held {
        assert!(lost(0) && lost(1), "nothing else can have made it quiet: {said:?}");
    }
}

fn a_grant_never_opened_is_fenced_at_once<B: Bed>(mut bed: B) {
    bed.fence(u64::MAX, FenceHow::Revoke);
    bed.settle();
    let said = bed.said();
    assert!(said.contains(&Said::Fenced { grant: u64::MAX }), "{said:?}");
    assert!(!said.iter().any(|s| matches!(s, Said::Down { .. })), "{said:?}");
}

fn nothing_is_posted_on_a_lane_that_is_lost<B: Bed>(mut bed: B) {
    let grant = bed.grant();
    bed.lose(0);
    bed.post(grant, 0, 0);
    bed.post(grant, 1, 1);
    bed.settle();
    assert!(!bed.is_filled(grant, 0) && bed.is_filled(grant, 1));
    let said = bed.said();
    assert!(said.contains(&Said::Down { sender: true, lane: 0 }), "{said:?}");
    assert!(!said.contains(&Said::Acked { grant, part: 0 }), "{said:?}");
}

/// After the sender's word, closing is enough: the lanes stay.
fn a_closed_grant_leaves_its_lanes<B: Bed>(mut bed: B) {
    let grant = bed.grant();
    post_all(&mut bed, grant);
    bed.settle();
    bed.quiesce(grant);
    bed.settle();
    bed.fence(grant, FenceHow::Close);
    bed.settle();
    let said = bed.said();
    assert!(said.contains(&Said::Quiesced { grant }), "{said:?}");
    assert!(said.contains(&Said::Fenced { grant }), "{said:?}");
    assert!(!said.iter().any(|s| matches!(s, Said::Down { .. })), "{said:?}");
    assert!(all_filled(&bed, grant));
}
