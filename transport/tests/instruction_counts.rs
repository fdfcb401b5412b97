//! What the way of a page costs outside the kernel, in instructions.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)] // Tests fail by panicking.

mod counted;
mod engine_conformance;

use std::hint::black_box;

use engine_conformance::{Pool, Rng, layout};

use kvlane_proto::layout::KvKind;
use kvlane_proto::{Device, PartId};
use kvlane_transport::memory::Registry;
use kvlane_transport::sys::mem::Pages;

/// Pages of one part: 1 MiB in pages of 4 KiB.
const PAGES: u64 = 256;

/// From a part's blocks to entries that the kernel takes, each checked against registered memory.
fn resolve(pages: u64) {
    let l = layout(4096, 1, KvKind::Mla);
    let pool = Pool::new(&l, 1 << 14);
    let mut registry = Registry::new(&[Device::Host]);
    registry.register(&pool.region).unwrap();
    let plan = pool.plan(&Rng(7).distinct(PAGES as usize, 1 << 14), 1 << 20);
    let part = plan.pages(PartId(0)).unwrap();
    assert_eq!(part.iter().count() as u64, PAGES);
    let mut into = Pages::default();
    for _ in 0..pages / PAGES {
        registry.resolve_part(black_box(&part), &mut into).unwrap();
        black_box(&into);
    }
    assert_eq!(into.left(), 1 << 20);
}

#[test]
fn a_page_is_found_and_checked_in_few_instructions() {
    let name = "a_page_is_found_and_checked_in_few_instructions";
    if let Some(each) = counted::each(name, resolve, (PAGES * 100, PAGES * 1100)) {
        println!("{each:.1} instructions a page");
        // 57 when it was set; 3 to 6 ns (`docs/performance.md`).
        assert!(each <= 160.0, "{each:.1} instructions a page");
        assert!(each >= 1.0, "{each:.1}: the work was optimised away");
    }
}
