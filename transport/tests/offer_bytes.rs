//! An offer stays small however long its room is.

#![allow(clippy::unwrap_used)]

mod common;

use common::{identity, layout};
use kvlane_proto::msg::peer::{Offer, PeerFrame, PeerMsg};
use kvlane_proto::{BlockList, GrantId, LaneId, Layout, Role, RoomId, Span};
use kvlane_transport::wire::{HEADER_BYTES, open, seal};

/// Pools like those of a model with a window: each has a list of its own.
fn offer_bytes(ids: &[&[u32]]) -> usize {
    let offer = Offer {
        room: RoomId(i64::MAX as u64),
        grant: GrantId(u64::MAX),
        issuer: Some(identity(Role::Router)),
        span: Span { tokens: 85_401, prefix_tokens: 0 },
        blocks: ids.iter().map(|ids| BlockList::from_ids(ids)).collect(),
        lanes: (0..4).map(|n| (LaneId(n), u32::MAX)).collect(),
        credit_parts: u32::MAX,
        lease_ms: 30_000,
    };
    let frame =
        PeerFrame { seq: u64::MAX, echo: u64::MAX, msg: PeerMsg::Offer(Box::new(offer.clone())) };
    let bytes = seal(&frame).unwrap();
    let back: PeerFrame = open(&bytes[HEADER_BYTES..]).unwrap();
    assert_eq!(back, frame);
    let PeerMsg::Offer(back) = back.msg else { unreachable!() };
    for (list, ids) in back.blocks.iter().zip(ids) {
        assert_eq!(list.expand(1 << 20).unwrap(), *ids);
    }
    bytes.len()
}

#[test]
fn a_long_rooms_offer_is_a_few_words_or_four_bytes_a_block() {
    // 85,401 tokens in pages of 16; lists serve all layers, and both K and V.
    let layout = Layout { page_tokens: 16, ..layout() };
    let blocks = layout.blocks_for(85_401);
    assert_eq!(blocks, 5_338);
    let in_a_row: Vec<u32> = (70_000..70_000 + blocks).collect();
    let strided: Vec<u32> = (0..blocks).map(|n| 3 + 7 * n).collect();
    let mut random: Vec<u32> = (0..1 << 14).collect();
    random.sort_by_key(|n| n.wrapping_mul(*n).wrapping_mul(2_654_435_761));
    random.truncate(blocks as usize);
    assert!(offer_bytes(&[&in_a_row]) <= 256);
    assert!(offer_bytes(&[&strided]) <= 256);
    assert!(offer_bytes(&[&in_a_row, &in_a_row[..8]]) <= 256);
    assert!(offer_bytes(&[&random]) <= 4 * random.len() + 256);
    // Some of it in a row.
    let mixed: Vec<u32> = random[..2000].iter().copied().chain(1 << 19..(1 << 19) + 500).collect();
    assert!(offer_bytes(&[&mixed]) <= 4 * mixed.len() + 256);
    // The smaller form, however short the list.
    for n in 0..40 {
        assert!(offer_bytes(&[&random[..n]]) <= 4 * n + 256);
        assert!(BlockList::from_ids(&random[..n]).words() <= n, "{n}");
    }
}
