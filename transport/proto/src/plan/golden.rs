//! Plans as text: who sends to whom, and what. A difference here changes what two builds of kvlane
//! do with each other's pages: raise `limits::PROTOCOL_MAX`, then write the files anew with
//!
//! ```text
//! KVLANE_GOLDEN=write cargo test -p kvlane-proto golden
//! ```

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;

use super::*;
use crate::ids::PartId;
use crate::layout::{Coordinates, Device, KvKind, Layout, PoolMap, small_layout};

const POOL_BLOCKS: u32 = 64;
/// Writes that are shown of each sender.
const SHOWN: usize = 2;

/// All ranks of an instance: `layout` is what one rank alone would have.
fn instance(layout: &Layout, tp: u32, pp: u32) -> Vec<[Layout; 1]> {
    let layers = layout.layers / pp;
    let place = |p, t| Coordinates { tp: (t, tp), pp: (p, pp), ..Coordinates::SINGLE };
    let rank = |p, t| Layout {
        layers,
        first_layer: p * layers,
        kv_heads: (layout.kv_heads_total / tp).max(1),
        at: place(p, t),
        ..layout.clone()
    };
    (0..pp).flat_map(|p| (0..tp).map(move |t| [rank(p, t)])).collect()
}

/// An address by what lies there: layer, K or V, block, and bytes into its page.
fn at(address: u64, l: &Layout) -> String {
    let page = u64::from(l.page_bytes());
    let (slab, inside) = (address / page / u64::from(POOL_BLOCKS), address % page);
    let block = address / page % u64::from(POOL_BLOCKS);
    let slabs = u64::from(l.kind.slabs());
    let what = if slabs == 1 { "" } else { ["K", "V"][(slab % slabs) as usize] };
    format!("layer {}{what} block {block} +{inside}", u64::from(l.first_layer) + slab / slabs)
}

fn place(l: &Layout) -> String {
    let (at, heads) = (&l.at, l.heads());
    let (layers, heads) = (l.first_layer..l.first_layer + l.layers, heads.first..heads.end);
    format!(
        "tp {} of {}, pp {} of {}: layers {layers:?}, heads {heads:?}",
        at.tp.0, at.tp.1, at.pp.0, at.pp.1
    )
}

fn text(title: &str, from: &[[Layout; 1]], to: &[[Layout; 1]], span: &Span, skip: u32) -> String {
    let mut out = format!(
        "# {title}\n# {} tokens, {} of them there already; pages of {} to pages of {} tokens\n",
        span.tokens, span.prefix_tokens, from[0][0].page_tokens, to[0][0].page_tokens
    );
    // Blocks in a row, but for a hole behind the third.
    let ids = |first: u32, n: u32| -> Arc<[u32]> {
        (0..n).map(|i| if i < 3 { first + i } else { first + i + skip }).collect()
    };
    let map = |l: &Layout| Arc::new(PoolMap::contiguous(Device::Host, 0, l, POOL_BLOCKS));
    for receiver in to {
        let d = &receiver[0];
        writeln!(out, "\nto {}", place(d)).unwrap();
        for index in sources(receiver, from).unwrap() {
            let s = &from[index][0];
            let share = Arc::new(Share::between(&from[index], receiver).unwrap());
            let plan = |side, l: &Layout, first| {
                let blocks = share.pools()[0].blocks(side, &share.pools()[0].cells(span));
                let ids = ids(first, blocks.end - blocks.start);
                let held = Blocks::new(map(l), blocks.start, ids).unwrap();
                Plan::new(share.clone(), side, span, 1 << 20, [held].into()).unwrap()
            };
            let (source, destination) = (plan(Side::Source, s, 10), plan(Side::Destination, d, 30));
            let parts = source.grid().parts();
            let all: Vec<Write> = (0..parts)
                .flat_map(|p| {
                    let (from, to) =
                        (source.pages(PartId(p)).unwrap(), destination.pages(PartId(p)).unwrap());
                    writes(&from, &to).collect::<Vec<Write>>()
                })
                .collect();
            writeln!(out, "  from {}", place(s)).unwrap();
            writeln!(
                out,
                "    parts {parts}, bytes {}, writes {} merged from {}",
                source.grid().bytes(),
                all.len(),
                share.writes_unmerged(span)
            )
            .unwrap();
            for w in all.iter().take(SHOWN) {
                let (from, to) = (at(w.source, s), at(w.destination, d));
                writeln!(out, "    {from} -> {to}: {} bytes", w.bytes).unwrap();
            }
            if all.len() > SHOWN {
                writeln!(out, "    and {} more", all.len() - SHOWN).unwrap();
            }
        }
    }
    out
}

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/plan/golden").join(name)
}

#[test]
fn plans_are_what_they_were() {
    let heads = |n| Layout { kv_heads: n, kv_heads_total: n, layers: 4, ..small_layout() };
    let latent = Layout { kind: KvKind::Mla, head_dim: 24, layers: 2, ..heads(1) };
    let room = |tokens, prefix_tokens| Span { tokens, prefix_tokens };
    let plan = |title: &str, l: &Layout, from: (u32, u32), to: (u32, u32), span: Span| {
        text(title, &instance(l, from.0, from.1), &instance(l, to.0, to.1), &span, 2)
    };
    let four = heads(4);
    let plans = [
        ("tp1_to_tp4", plan("TP 1 to TP 4, 4 KV heads", &four, (1, 1), (4, 1), room(18, 0))),
        ("tp4_to_tp1", plan("TP 4 to TP 1, 4 KV heads", &four, (4, 1), (1, 1), room(18, 0))),
        ("tp2_to_tp8", plan("TP 2 to TP 8, 4 KV heads", &four, (2, 1), (8, 1), room(18, 0))),
        ("tp8_to_tp2", plan("TP 8 to TP 2, 4 KV heads", &four, (8, 1), (2, 1), room(18, 0))),
        ("pp4_to_pp1", plan("PP 4 to PP 1, 2 KV heads", &heads(2), (1, 4), (1, 1), room(18, 0))),
        ("mla_tp8_to_tp4", plan("MLA, TP 8 to TP 4", &latent, (8, 1), (4, 1), room(18, 0))),
        ("prefix", plan("31 of 32 pages there", &heads(2), (1, 1), (1, 1), room(128, 124))),
    ];
    let write = std::env::var("KVLANE_GOLDEN").as_deref() == Ok("write");
    for (name, now) in plans {
        let file = file(&format!("{name}.txt"));
        if write {
            std::fs::write(&file, &now).unwrap();
        }
        let golden = std::fs::read_to_string(&file).unwrap();
        assert_eq!(now, golden, "plan {name} has changed; see the head of this file");
    }
}
