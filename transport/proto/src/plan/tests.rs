//! Plans against a reference that goes byte by byte and knows only what a layout's fields mean.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;

use super::*;
use crate::blocks::BlockList;
use crate::error::ErrorKind;
use crate::ids::PartId;
use crate::layout::{Coordinates, Device, Dtype, KvKind, Layout, Order, PoolMap, small_layout};
use crate::limits;

/// A stream of choices that shrinks towards the first of each.
struct Draw {
    choices: Vec<u32>,
    at: usize,
}

impl Draw {
    fn below(&mut self, n: u32) -> u32 {
        self.at += 1;
        // Later rounds through the list give other numbers, so that a short list serves a long case.
        let round = (self.at / self.choices.len()) as u32;
        (self.choices[self.at % self.choices.len()].rotate_left(round) ^ round) % n
    }
    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u32) as usize]
    }
    fn yes(&mut self) -> bool {
        self.below(2) == 1
    }
    /// Cuts `0..n` into `parts` ranges, none empty.
    fn cut(&mut self, n: u32, parts: u32) -> Vec<Range<u32>> {
        let mut edges: Vec<u32> = (1..n).collect();
        while edges.len() as u32 > parts - 1 {
            edges.remove(self.below(edges.len() as u32) as usize);
        }
        edges.insert(0, 0);
        edges.push(n);
        edges.windows(2).map(|w| w[0]..w[1]).collect()
    }
    fn ids(&mut self, n: usize, blocks: u32) -> Vec<u32> {
        let n32 = n as u32;
        let (first, stride) = match self.below(3) {
            0 => (self.below(blocks - n32 + 1), 1),
            1 if n > 0 => (0, (blocks - 1) / n32.max(1)),
            _ => {
                let mut all: Vec<u32> = (0..blocks).collect();
                return (0..n)
                    .map(|_| all.swap_remove(self.below(all.len() as u32) as usize))
                    .collect();
            }
        };
        (0..n32).map(|i| first + i * stride.max(1)).collect()
    }
}

/// What both sides have in common of a pool.
#[derive(Clone, Debug)]
struct Model {
    kind: KvKind,
    layers: u32,
    heads: u32,
    head_dim: u32,
    dtype: Dtype,
    window_tokens: u32,
    /// What both page sizes are a multiple of, and the larger one, which either side may have.
    page_tokens: (u32, u32),
    source_is_larger: bool,
}

/// A rank with the blocks of one room.
#[derive(Clone, Debug)]
struct Rank {
    layouts: Vec<Layout>,
    maps: Vec<Arc<PoolMap>>,
}

impl AsRef<[Layout]> for Rank {
    fn as_ref(&self) -> &[Layout] {
        &self.layouts
    }
}

fn model(draw: &mut Draw, first: bool) -> Model {
    let rows = KvKind::Rows { rows: 1 + draw.below(5) };
    let kind = match draw.below(4) {
        0 | 1 => KvKind::Split,
        3 if !first => rows,
        _ => KvKind::Mla,
    };
    let heads = if kind == KvKind::Mla { 1 } else { draw.of(&[1, 2, 4, 8, 3, 6]) };
    let unit = draw.of(&[1, 2, 4]);
    let is_rows = matches!(kind, KvKind::Rows { .. });
    Model {
        kind,
        layers: 1 + draw.below(4),
        heads,
        head_dim: 1 + draw.below(3),
        dtype: draw.of(&[Dtype::U8, Dtype::Bf16, Dtype::Fp32, Dtype::Fp8E4m3]),
        window_tokens: if first || is_rows { 0 } else { draw.below(3) * draw.below(12) },
        page_tokens: if is_rows { (1, 1) } else { (unit, unit * draw.of(&[1, 2, 3, 4])) },
        source_is_larger: draw.yes(),
    }
}

/// All ranks of an instance, by stage, and within it by tensor parallel rank, for each cp rank.
fn instance(draw: &mut Draw, models: &[Model], cp: u32, source: bool) -> Vec<Rank> {
    let tp = draw.of(&[1, 2, 4, 8, 3, 6]);
    let pp = 1 + draw.below(models.iter().map(|m| m.layers).min().unwrap());
    struct Side {
        stages: Vec<Range<u32>>,
        kv_heads: u32,
        page_tokens: u32,
        order: Order,
        kind: KvKind,
    }
    let sides: Vec<Side> = models
        .iter()
        .map(|m| {
            // Groups of heads, and as many ranks for each.
            let groups: Vec<u32> =
                (1..=m.heads).rev().filter(|g| m.heads % g == 0 && tp % g == 0).collect();
            Side {
                stages: draw.cut(m.layers, pp),
                kv_heads: m.heads / if draw.below(4) > 0 { groups[0] } else { draw.of(&groups) },
                page_tokens: match m.source_is_larger == source {
                    true => m.page_tokens.1,
                    false => m.page_tokens.0,
                },
                order: draw.of(&[Order::Nhd, Order::Hnd]),
                kind: match m.kind {
                    KvKind::Split => draw.of(&[KvKind::Split, KvKind::Packed]),
                    other => other,
                },
            }
        })
        .collect();
    let dp = (draw.below(3), 3);
    let mut ranks = Vec::new();
    for c in 0..cp {
        for p in 0..pp {
            for t in 0..tp {
                let at = Coordinates { tp: (t, tp), pp: (p, pp), cp: (c, cp), dp };
                let layouts: Vec<Layout> = models
                    .iter()
                    .zip(&sides)
                    .map(|(m, s)| Layout {
                        model: "any".into(),
                        layers: s.stages[p as usize].len() as u32,
                        first_layer: s.stages[p as usize].start,
                        kv_heads: s.kv_heads,
                        kv_heads_total: m.heads,
                        head_dim: m.head_dim,
                        dtype: m.dtype,
                        page_tokens: s.page_tokens,
                        window_tokens: m.window_tokens,
                        order: s.order,
                        kind: s.kind,
                        at,
                    })
                    .collect();
                Layout::check_pools(&layouts).unwrap();
                let maps =
                    layouts.iter().enumerate().map(|(n, l)| Arc::new(map(draw, l, n as u64)));
                ranks.push(Rank { maps: maps.collect(), layouts });
            }
        }
    }
    ranks
}

const POOL_BLOCKS: u32 = 48;

/// Pages of one pool: slabs apart, K and V of a block side by side, or all slabs of a block together.
fn map(draw: &mut Draw, layout: &Layout, pool: u64) -> PoolMap {
    let page = u64::from(layout.page_bytes());
    let slabs = u64::from(layout.pages_per_block());
    let start = (pool + 1) << 32 | u64::from(draw.below(100));
    let contiguous = PoolMap::contiguous(Device::Host, start, layout, POOL_BLOCKS);
    let pad = u64::from(draw.below(3));
    let map = match draw.below(3) {
        0 => contiguous,
        1 => PoolMap {
            slab_address: (0..slabs).map(|s| start + (slabs - 1 - s) * (page + pad)).collect(),
            block_stride_bytes: slabs * (page + pad) + pad,
            ..contiguous
        },
        _ => PoolMap {
            slab_address: (0..slabs)
                .map(|s| start + s * (page + pad) * u64::from(POOL_BLOCKS))
                .collect(),
            block_stride_bytes: page + pad,
            ..contiguous
        },
    };
    map.check(layout).unwrap();
    map
}

/// Which byte of the model's cache, on which context parallel rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Byte {
    cp: u32,
    pool: usize,
    layer: u32,
    slab: u32,
    head: u32,
    token: u32,
    byte: u32,
}

/// The heads of a rank: groups are dealt to ranks in order, each to as many in a row as there are to
/// go round.
fn heads(l: &Layout) -> Vec<u32> {
    let all: Vec<u32> = (0..l.kv_heads_total).collect();
    let groups: Vec<&[u32]> = all.chunks(l.kv_heads as usize).collect();
    let dealt: Vec<&[u32]> =
        groups.iter().flat_map(|g| vec![*g; l.at.tp.1 as usize / groups.len()]).collect();
    dealt[l.at.tp.0 as usize].to_vec()
}

/// What lies where in a rank's blocks of one pool; `ids` begin with the prompt's block `first`.
fn contents(pool: usize, l: &Layout, map: &PoolMap, first: u32, ids: &[u32]) -> HashMap<u64, Byte> {
    let mut out = HashMap::new();
    let slabs = if matches!(l.kind, KvKind::Split | KvKind::Packed) { 2 } else { 1 };
    let element_bytes = l.dtype.bytes();
    for (block, &id) in (first..).zip(ids) {
        for layer in 0..l.layers {
            for slab in 0..slabs {
                let page = map.slab_address[(layer * slabs + slab) as usize]
                    + u64::from(id) * map.block_stride_bytes;
                for token in 0..l.page_tokens {
                    for (n, head) in (0..).zip(heads(l)) {
                        for element in 0..l.head_dim {
                            let index = match l.order {
                                Order::Nhd => (token * l.kv_heads + n) * l.head_dim + element,
                                Order::Hnd => (n * l.page_tokens + token) * l.head_dim + element,
                            };
                            for b in 0..element_bytes {
                                let byte = Byte {
                                    cp: l.at.cp.0,
                                    pool,
                                    layer: l.first_layer + layer,
                                    slab,
                                    head,
                                    token: block * l.page_tokens + token,
                                    byte: element * element_bytes + b,
                                };
                                let at = page + u64::from(index * element_bytes + b);
                                assert_eq!(out.insert(at, byte), None, "two bytes at one address");
                            }
                        }
                    }
                }
            }
        }
    }
    out
}

/// The tokens (or rows) of a pool that a room moves, in whole pages of the smaller size.
fn moved(m: &Model, span: &Span) -> Range<u32> {
    if let KvKind::Rows { rows } = m.kind {
        return 0..rows;
    }
    let seen = if m.window_tokens == 0 { 0 } else { span.tokens.saturating_sub(m.window_tokens) };
    let from = seen.max(span.prefix_tokens);
    if from == span.tokens {
        return 0..0;
    }
    let unit = m.page_tokens.0;
    from / unit * unit..span.tokens.div_ceil(unit) * unit
}

struct Case {
    models: Vec<Model>,
    sources: Vec<Rank>,
    destinations: Vec<Rank>,
    span: Span,
    part_bytes: u64,
}

fn case(draw: &mut Draw) -> Case {
    let pools = 1 + draw.below(3);
    let models: Vec<Model> = (0..pools).map(|n| model(draw, n == 0)).collect();
    let cp = 1 + draw.below(3) / 2;
    let sources = instance(draw, &models, cp, true);
    let destinations = instance(draw, &models, cp, false);
    let tokens = draw.below(40);
    let page = destinations[0].layouts.iter().map(|l| l.page_tokens);
    let page = page.fold(1, |a, b| (1..).map(|n| n * a).find(|m| m % b == 0).unwrap());
    let prefix_tokens =
        if draw.below(5) == 4 { tokens } else { page * draw.below(tokens / page + 1) };
    let span = Span { tokens, prefix_tokens };
    Case { models, sources, destinations, span, part_bytes: 1 + u64::from(draw.below(2000)) }
}

fn blocks_of(tokens: &Range<u32>, page_tokens: u32) -> Range<u32> {
    if tokens.is_empty() {
        0..0
    } else {
        tokens.start / page_tokens..tokens.end.div_ceil(page_tokens)
    }
}

/// Takes one byte off what is expected: it must be there, once, with this content.
fn land(
    expected: &mut HashMap<u64, Byte>,
    at: u64,
    byte: Option<&Byte>,
) -> Result<(), TestCaseError> {
    let Some(wanted) = expected.remove(&at) else {
        return Err(TestCaseError::fail(format!("{byte:?} at {at:#x}: twice, or not asked for")));
    };
    prop_assert_eq!(byte, Some(&wanted), "at {:#x}", at);
    Ok(())
}

fn check(draw: &mut Draw, case: &Case, to: usize) -> TestCaseResult {
    let Case { models, sources: ranks, destinations, span, part_bytes } = case;
    let receiver = &destinations[to];
    let senders = sources(&receiver.layouts, ranks).unwrap();
    // Nobody may be missing, and nobody there twice.
    let chosen: Vec<&Rank> = senders.iter().map(|&i| &ranks[i]).collect();
    prove_sources(&receiver.layouts, &chosen).unwrap();
    for n in 0..chosen.len() {
        let (mut fewer, mut more) = (chosen.clone(), chosen.clone());
        fewer.remove(n);
        more.push(chosen[n]);
        for (others, why) in [(fewer, "no rank sends"), (more, "several ranks send")] {
            let e = prove_sources(&receiver.layouts, &others).unwrap_err();
            prop_assert_eq!(e.kind(), ErrorKind::Incompatible);
            prop_assert!(e.to_string().contains(why), "{}", e);
        }
    }
    // The receiver's blocks, and what must be in them afterwards.
    let mut lists = Vec::new();
    let mut expected = HashMap::new();
    for (n, (l, map)) in receiver.layouts.iter().zip(&receiver.maps).enumerate() {
        let tokens = moved(&models[n], span);
        let blocks = blocks_of(&tokens, l.page_tokens);
        let ids = draw.ids(blocks.len(), POOL_BLOCKS);
        let all = contents(n, l, map, blocks.start, &ids);
        expected.extend(all.into_iter().filter(|(_, byte)| tokens.contains(&byte.token)));
        lists.push(BlockList::from_ids(&ids));
    }
    let lent: Arc<[Blocks]> =
        Blocks::lent(&receiver.layouts, &receiver.maps, span, &lists).unwrap().into();
    let mut streamed = expected.clone();
    for &from in &senders {
        let sender = &ranks[from];
        // The sender's blocks may begin before the room's.
        let mut held = Vec::new();
        let mut memory = HashMap::new();
        for (n, (l, map)) in sender.layouts.iter().zip(&sender.maps).enumerate() {
            let blocks = blocks_of(&moved(&models[n], span), l.page_tokens);
            let first = blocks.start - draw.below(blocks.start + 1);
            let ids = draw.ids((blocks.end - first) as usize, POOL_BLOCKS);
            memory.extend(contents(n, l, map, first, &ids));
            held.push(Blocks::new(map.clone(), first, ids.into()).unwrap());
        }
        // Both ends compute the share.
        let theirs = Arc::new(Share::between(&sender.layouts, &receiver.layouts).unwrap());
        let ours = Arc::new(Share::between(&sender.layouts, &receiver.layouts).unwrap());
        let source =
            Plan::new(theirs.clone(), Side::Source, span, *part_bytes, held.into()).unwrap();
        let destination =
            Plan::new(ours, Side::Destination, span, *part_bytes, lent.clone()).unwrap();
        prop_assert_eq!(source.grid(), destination.grid());
        let (mut sum, mut unmerged) = (0, 0);
        for part in (0..source.grid().parts()).map(PartId) {
            let (out, into) = (source.pages(part).unwrap(), destination.pages(part).unwrap());
            let bytes = source.grid().part_bytes(part);
            sum += bytes;
            prop_assert!(bytes > 0);
            prop_assert_eq!((out.bytes(), into.bytes()), (bytes, bytes));
            let mut moved = 0;
            let mut before = None;
            for write in writes(&out, &into) {
                for i in 0..u64::from(write.bytes) {
                    land(&mut expected, write.destination + i, memory.get(&(write.source + i)))?;
                }
                moved += u64::from(write.bytes);
                unmerged += 1;
                let ends = (write.source, write.destination);
                prop_assert_ne!(Some(ends), before, "two writes that are one");
                let length = u64::from(write.bytes);
                before = Some((write.source + length, write.destination + length));
            }
            prop_assert_eq!(moved, bytes);
            // One by one and all at once are the same, from wherever one changes over.
            let mut rest = writes(&out, &into);
            let mut twice: Vec<Write> = rest.by_ref().take(draw.below(3) as usize).collect();
            rest.for_each(|w| twice.push(w));
            prop_assert!(writes(&out, &into).eq(twice));
            let walked = |p: &PartPages| -> Vec<u64> {
                let pages: Vec<Page> = p.iter().collect();
                let split = |w: &[Page]| w[0].address + u64::from(w[0].bytes) != w[1].address;
                assert!(pages.windows(2).all(split), "two pages that are one");
                pages.iter().flat_map(|p| (0..u64::from(p.bytes)).map(|i| p.address + i)).collect()
            };
            let (stream, scatter) = (walked(&out), walked(&into));
            prop_assert_eq!((stream.len() as u64, scatter.len() as u64), (bytes, bytes));
            for (from, to) in stream.iter().zip(scatter) {
                land(&mut streamed, to, memory.get(from))?;
            }
        }
        prop_assert_eq!(sum, source.grid().bytes());
        prop_assert!(unmerged <= theirs.writes_unmerged(span));
    }
    let first = expected.iter().next();
    prop_assert!(first.is_none(), "{} bytes never written: {:?}", expected.len(), first);
    prop_assert!(streamed.is_empty());
    Ok(())
}

fn draw() -> impl Strategy<Value = Draw> {
    proptest::collection::vec(any::<u32>(), 40..160).prop_map(|choices| Draw { choices, at: 0 })
}

impl std::fmt::Debug for Draw {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut again = Draw { choices: self.choices.clone(), at: 0 };
        let case = case(&mut again);
        let one = |ranks: &[Rank]| ranks[0].layouts.clone();
        f.debug_struct("Case")
            .field("span", &case.span)
            .field("first_source", &one(&case.sources))
            .field("first_destination", &one(&case.destinations))
            .field("models", &case.models)
            .finish()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Whatever two instances look like: each byte that a receiver asks for is written exactly once,
    /// with the byte that belongs there, and no other byte is touched; by writes as well as by a
    /// stream that one side gathers and the other scatters.
    #[test]
    fn each_byte_lands_once_where_it_belongs(mut draw in draw()) {
        let case = case(&mut draw);
        let to = draw.below(case.destinations.len() as u32) as usize;
        check(&mut draw, &case, to)?;
    }
}

fn share(source: &Layout, destination: &Layout) -> Share {
    Share::between(std::slice::from_ref(source), std::slice::from_ref(destination)).unwrap()
}

fn rank(tp: (u32, u32), kv_heads: u32, total: u32) -> Layout {
    let at = Coordinates { tp, ..Coordinates::SINGLE };
    Layout { kv_heads, kv_heads_total: total, at, ..small_layout() }
}

#[test]
fn of_ranks_with_the_same_heads_each_has_its_receivers() {
    let all = |tp, heads, total| -> Vec<[Layout; 1]> {
        (0..tp).map(|t| [rank((t, tp), heads, total)]).collect()
    };
    let senders = |from: &[[Layout; 1]], to: &[[Layout; 1]]| -> Vec<Vec<usize>> {
        to.iter().map(|rank| sources(rank, from).unwrap()).collect()
    };
    // Two heads on eight ranks, four for each, to four ranks that have one each as well.
    assert_eq!(senders(&all(8, 1, 2), &all(4, 1, 2)), [[0], [2], [4], [6]]);
    assert_eq!(senders(&all(4, 1, 2), &all(8, 1, 2)), [[0], [0], [1], [1], [2], [2], [3], [3]]);
    // Latents.
    assert_eq!(senders(&all(2, 1, 1), &all(4, 1, 1)), [[0], [0], [1], [1]]);
    assert_eq!(senders(&all(3, 1, 1), &all(2, 1, 1)), [[0], [1]]);
}

#[test]
fn what_all_ranks_have_comes_from_one_that_sends_anyway() {
    let rows = |l: &Layout| Layout {
        kind: KvKind::Rows { rows: 2 },
        page_tokens: 1,
        kv_heads: 1,
        kv_heads_total: 1,
        ..l.clone()
    };
    let all = |tp: u32| -> Vec<[Layout; 2]> {
        let heads = |t| rank((t, tp), (4 / tp).max(1), 4);
        (0..tp).map(|t| [heads(t), rows(&heads(t))]).collect()
    };
    for (from, to) in [(1, 4), (2, 4), (4, 8), (2, 8), (4, 4), (4, 2), (8, 4), (8, 2), (4, 1)] {
        for receiver in all(to) {
            let ranks = all(from);
            let heads: Vec<[Layout; 1]> = ranks.iter().map(|[heads, _]| [heads.clone()]).collect();
            assert_eq!(
                sources(&receiver, &ranks).unwrap(),
                sources(&receiver[..1], &heads).unwrap(),
                "{from} to {to}"
            );
        }
    }
}

#[test]
fn what_keeps_pools_apart_is_named_with_both_values() {
    let prefill = small_layout();
    let rows = |rows| Layout { kind: KvKind::Rows { rows }, page_tokens: 1, ..prefill.clone() };
    let cases = [
        ("model", Layout { model: "other".into(), ..prefill.clone() }, "other", "tiny"),
        ("kind", Layout { kind: KvKind::Mla, ..prefill.clone() }, "mla", "k and v"),
        ("kind", rows(3), "rows", "k and v"),
        ("rows", rows(3), "3", "0"),
        ("kv_heads_total", Layout { kv_heads_total: 4, ..prefill.clone() }, "4", "2"),
        ("head_dim", Layout { head_dim: 9, ..prefill.clone() }, "9", "8"),
        ("dtype", Layout { dtype: Dtype::Fp8E5m2, ..prefill.clone() }, "fp8_e5m2", "bf16"),
        ("window_tokens", Layout { window_tokens: 7, ..prefill.clone() }, "7", "0"),
        (
            "cp",
            Layout { at: Coordinates { cp: (1, 2), ..Coordinates::SINGLE }, ..prefill.clone() },
            "2",
            "1",
        ),
        ("page_tokens", Layout { page_tokens: 6, ..prefill.clone() }, "6", "4"),
    ];
    for (field, decode, here, there) in cases {
        for pool in [0, 1] {
            let one = |n, l: &Layout| if n == pool { l.clone() } else { small_layout() };
            let with = |l: &Layout| [one(0, l), one(1, l)];
            let e = Share::between(&with(&prefill), &with(&decode)).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Incompatible);
            let name = if pool == 0 { field.to_string() } else { format!("pool 1 {field}") };
            let said = format!("{name}: decode {here} / prefill {there}");
            assert!(e.context().iter().any(|c| *c == ("differs", said.clone())), "{said} in {e}");
        }
    }
    let e = Share::between(&[prefill.clone(), rows(1)], &[prefill.clone()]).unwrap_err();
    assert!(e.to_string().contains("pools: decode 1 / prefill 2"), "{e}");
    // All of them at once.
    let decode = Layout { head_dim: 9, page_tokens: 6, dtype: Dtype::U8, ..prefill.clone() };
    let e = Share::between(&[prefill], &[decode]).unwrap_err();
    let fields: Vec<&str> =
        e.context().iter().map(|(_, said)| said.split(':').next().unwrap()).collect();
    assert_eq!(fields, ["head_dim", "dtype", "page_tokens"]);
}

#[test]
fn too_many_senders_are_refused() {
    let many = vec![[small_layout()]; limits::RANKS_MAX + 1];
    let e = prove_sources(&[small_layout()], &many).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::LimitExceeded);
}

#[test]
fn prefix_zero_pages_and_a_partial_last_page() {
    let l = small_layout();
    let span = |tokens, prefix_tokens| Span { tokens, prefix_tokens }.blocks(&l);
    assert_eq!(span(9, 0).unwrap(), 0..3);
    assert_eq!(span(9, 4).unwrap(), 1..3);
    assert_eq!(span(128, 124).unwrap(), 31..32);
    assert_eq!(span(8, 8).unwrap(), 2..2);
    assert_eq!(span(9, 9).unwrap(), 3..3);
    assert_eq!(span(0, 0).unwrap(), 0..0);
    assert!(span(9, 3).is_err());
    assert!(span(4, 8).is_err());
    let window = Layout { window_tokens: 5, ..small_layout() };
    let span = |tokens, prefix_tokens| Span { tokens, prefix_tokens }.blocks(&window).unwrap();
    assert_eq!([span(20, 0), span(20, 12), span(20, 16), span(4, 0)], [3..5, 3..5, 4..5, 0..1]);
    let rows = Layout { kind: KvKind::Rows { rows: 3 }, page_tokens: 1, ..small_layout() };
    for (tokens, prefix_tokens) in [(9, 0), (9, 9), (9, 3), (0, 0)] {
        assert_eq!(Span { tokens, prefix_tokens }.blocks(&rows).unwrap(), 0..3);
    }
    let nothing = Span { tokens: 0, prefix_tokens: 0 };
    let grid = Grid::new(&share(&l, &l), &nothing, 1 << 20).unwrap();
    assert_eq!((grid.parts(), grid.bytes()), (0, 0));
    grid.prove().unwrap();
}

#[test]
fn a_huge_room_stays_within_24_bits() {
    let l = Layout { layers: limits::LAYERS_MAX, page_tokens: 1, ..small_layout() };
    let pools = vec![l; limits::POOLS_MAX];
    let share = Share::between(&pools, &pools).unwrap();
    let span = |tokens| Span { tokens, prefix_tokens: 0 };
    let grid = Grid::new(&share, &span(limits::BLOCKS_PER_ROOM_MAX), 1).unwrap();
    assert!(grid.parts() <= limits::PARTS_PER_ROOM_MAX);
    grid.prove().unwrap();
    let last = grid.rect(PartId(grid.parts() - 1)).unwrap();
    assert_eq!((last.pool, last.layers.end), (15, limits::LAYERS_MAX));
    assert!(grid.rect(PartId(grid.parts())).is_err());
    // A short room at the very end of what can be counted.
    let end = Span { tokens: u32::MAX, prefix_tokens: u32::MAX - 5 };
    let grid = Grid::new(&share, &end, 200).unwrap();
    grid.prove().unwrap();
    let last = grid.rect(PartId(grid.parts() - 1)).unwrap();
    assert_eq!(last.cells, u32::MAX - 2..u32::MAX);
    for tokens in [limits::BLOCKS_PER_ROOM_MAX + 1, u32::MAX] {
        let e = Grid::new(&share, &span(tokens), 1).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::LimitExceeded);
    }
}

#[test]
fn lists_must_be_the_spans() {
    let l = [small_layout()];
    let map = [Arc::new(PoolMap::contiguous(Device::Host, 0, &l[0], 8))];
    let span = Span { tokens: 12, prefix_tokens: 4 };
    let lent = |ids: &[u32]| Blocks::lent(&l, &map, &span, &[BlockList::from_ids(ids)]);
    for ids in [&[1][..], &[1, 2, 3], &[5, 5], &[1, 8]] {
        assert_eq!(lent(ids).unwrap_err().kind(), ErrorKind::InvalidPlan);
    }
    assert_eq!(Blocks::lent(&l, &map, &span, &[]).unwrap_err().kind(), ErrorKind::InvalidPlan);
    assert!(Blocks::new(map[0].clone(), 0, [0, 8].into()).is_err());
    // What is held must be what the room needs, on either side.
    let share = Arc::new(share(&l[0], &l[0]));
    let plan = |side, first, ids: &[u32]| {
        let held = Blocks::new(map[0].clone(), first, ids.into()).unwrap();
        Plan::new(share.clone(), side, &span, 1 << 20, [held].into())
    };
    for side in [Side::Source, Side::Destination] {
        plan(side, 1, &[6, 7]).unwrap();
        plan(side, 0, &[0, 6, 7, 5]).unwrap();
        for (first, ids) in [(2, &[7][..]), (1, &[6]), (0, &[0, 6]), (u32::MAX, &[6, 7])] {
            assert_eq!(plan(side, first, ids).unwrap_err().kind(), ErrorKind::InvalidPlan);
        }
        assert!(Plan::new(share.clone(), side, &span, 1 << 20, [].into()).is_err());
        // A map of fewer layers.
        let few = Layout { layers: 3, ..l[0].clone() };
        let map = Arc::new(PoolMap::contiguous(Device::Host, 0, &few, 8));
        let held = Blocks::new(map, 1, [6, 7].into()).unwrap();
        assert!(Plan::new(share.clone(), side, &span, 1 << 20, [held].into()).is_err());
    }
}

#[test]
fn sides_of_different_parts_have_no_writes() {
    let l = small_layout();
    let map = Arc::new(PoolMap::contiguous(Device::Host, 0, &l, 8));
    let share = share(&l, &l);
    let part = |side, layers, cells| {
        let held = Blocks::new(map.clone(), 0, [1, 2, 3].into()).unwrap();
        PartPages::new(share.pools()[0].clone(), side, layers, cells, held).unwrap()
    };
    let (from, to) = (part(Side::Source, 0..2, 0..2), part(Side::Destination, 0..2, 0..2));
    assert_eq!(writes(&from, &to).map(|w| u64::from(w.bytes)).sum::<u64>(), from.bytes());
    assert_eq!(writes(&to, &from).count(), 0);
    for other in [part(Side::Destination, 0..1, 0..2), part(Side::Destination, 0..2, 1..2)] {
        assert_eq!(writes(&from, &other).count(), 0);
    }
    let held = || Blocks::new(map.clone(), 0, [1, 2, 3].into()).unwrap();
    let refused = |layers, cells| {
        PartPages::new(share.pools()[0].clone(), Side::Source, layers, cells, held()).is_err()
    };
    assert!(refused(0..5, 0..1) && refused(0..1, 0..4) && refused(0..1, 3..u32::MAX));
    // Ranges that end before they begin are empty.
    #[allow(clippy::reversed_empty_ranges)]
    let backwards = [part(Side::Source, 2..1, 0..2), part(Side::Source, 0..2, 2..1)];
    for part in backwards {
        assert_eq!((part.bytes(), part.iter().count()), (0, 0));
    }
}

/// A number at or next to a limit.
fn edge() -> impl Strategy<Value = u32> {
    let near = |n: u32| vec![n.wrapping_sub(1), n, n.wrapping_add(1)];
    let edges =
        [0, 4, 1 << 9, 1 << 10, 1 << 12, 1 << 16, 1 << 18, 1 << 19, 1 << 20, 1 << 24, 1 << 30];
    let edges: Vec<u32> = edges.into_iter().flat_map(near).collect();
    prop_oneof![proptest::sample::select(edges), (0u32..32).prop_map(|bit| 1 << bit)]
}

fn hostile() -> impl Strategy<Value = Layout> {
    let numbers = proptest::collection::vec(edge(), 9);
    let place = proptest::collection::vec((edge(), edge()), 4);
    // Mostly values that are in range, so that what lies behind the checks is reached.
    let tame = (any::<u32>(), any::<u32>()).prop_map(|(a, b)| a | b);
    (numbers, place, tame).prop_map(|(n, p, tame)| {
        let of = |bit: u32, value: u32, max: u32| {
            if tame >> bit & 1 == 1 { value.clamp(1, max) } else { value }
        };
        let kind = match tame % 7 {
            0 | 1 => KvKind::Split,
            2 => KvKind::Packed,
            3 | 4 => KvKind::Mla,
            _ => KvKind::Rows { rows: n[8] },
        };
        let (tp, heads) = (of(8, p[0].1, 1 << 16), of(9, n[1], 1 << 12));
        let place = |n: usize, size: u32| (p[n].0 % size.max(1), size);
        Layout {
            model: "any".into(),
            layers: of(10, n[0], 1 << 10),
            first_layer: of(11, n[2], 1 << 10),
            kv_heads: heads,
            kv_heads_total: if tame >> 12 & 3 > 0 { heads } else { n[3] },
            head_dim: of(13, n[4], 1 << 16) >> (tame >> 20 & 15),
            dtype: [Dtype::U8, Dtype::Fp32][(n[7] & 1) as usize],
            page_tokens: if tame % 7 > 4 { 1 } else { of(15, n[5], 1 << 16) },
            window_tokens: if tame >> 16 & 1 == 1 { 0 } else { n[6] },
            order: [Order::Nhd, Order::Hnd][(n[7] >> 1 & 1) as usize],
            kind,
            at: Coordinates {
                tp: place(0, tp),
                pp: place(1, of(18, p[1].1, 1 << 16)),
                cp: (0, 1),
                dp: place(3, of(19, p[3].1, 1 << 16)),
            },
        }
    })
}

fn admitted() -> impl Strategy<Value = Layout> {
    hostile().prop_filter("admitted", |l| l.check().is_ok())
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 400, max_local_rejects: 1 << 20, ..ProptestConfig::default()
    })]

    /// No layout makes the checks panic.
    #[test]
    fn hostile_layouts_are_only_refused(a in hostile(), b in hostile()) {
        let _ = Layout::check_pools(&[a.clone(), b.clone()]);
        let _ = a.differences(&b);
    }

    /// No layout that the checks admit, and no room, makes a plan panic, overflow or take long.
    #[test]
    fn admitted_layouts_make_plans(
        l in admitted(), places in (edge(), edge(), edge(), edge()), tokens in edge(), prefix in edge(),
        part_bytes in prop_oneof![Just(0), Just(u64::MAX), (0u32..64).prop_map(|bit| 1 << bit)],
        address in any::<u64>(), stride in any::<u64>(), blocks in edge(),
    ) {
        // The other side: the same pool, as far as its place, order and page size may differ.
        let mut other = l.clone();
        let tp = l.kv_heads_total * (1 + places.0 % 16);
        other.at.tp = (places.1 % tp, tp);
        other.kv_heads = 1;
        other.order = if places.2 % 2 == 0 { Order::Nhd } else { Order::Hnd };
        other.first_layer = places.3 % (limits::LAYERS_MAX + 1);
        if !matches!(l.kind, KvKind::Rows { .. }) {
            other.page_tokens = 1 << (places.3 % 17);
        }
        prop_assume!(other.check().is_ok());
        let _ = (l.place(), l.block_bytes(), l.pages_per_block(), l.blocks_for(tokens));
        for (s, d) in [(&l, &other), (&other, &l)] {
            let Ok(share) = Share::between(std::slice::from_ref(s), std::slice::from_ref(d)) else {
                continue;
            };
            let pool = share.pools()[0].clone();
            let _ = (pool.final_cells(tokens, prefix), pool.cells_of(&(prefix..tokens)));
            let _ = prove_sources(std::slice::from_ref(d), &[[s.clone()]]);
            let span = Span { tokens, prefix_tokens: prefix };
            let _ = span.blocks(d);
            let Ok(grid) = Grid::new(&share, &span, part_bytes) else { continue };
            grid.prove().unwrap();
            let _ = share.writes_unmerged(&span);
            let map = |l: &Layout| PoolMap {
                device: Device::Host,
                slab_address: (0..u64::from(l.pages_per_block()))
                    .map(|n| address.wrapping_add(n.wrapping_mul(stride)))
                    .collect(),
                block_stride_bytes: stride >> 24,
                blocks,
            };
            for (side, l) in [(Side::Source, s), (Side::Destination, d)] {
                let map = map(l);
                if map.check(l).is_err() {
                    continue;
                }
                let range = pool.blocks(side, &pool.cells(&span));
                let ids: Arc<[u32]> = range.clone().map(|n| n % blocks).collect();
                let held = Blocks::new(Arc::new(map), range.start, ids).unwrap();
                let share = Arc::new(share.clone());
                let plan = Plan::new(share, side, &span, part_bytes, [held].into()).unwrap();
                for part in [0, 1, grid.parts() / 2, grid.parts().wrapping_sub(1), u32::MAX] {
                    let Ok(pages) = plan.pages(PartId(part)) else { continue };
                    prop_assert!(pages.bytes() > 0);
                    prop_assert!(pages.iter().take(100).all(|p| p.bytes > 0));
                }
            }
        }
    }

    /// A cell is final when all of its tokens are there, and holds the tokens that it is of.
    #[test]
    fn cells_are_final_when_their_tokens_are_there(
        pages in (0usize..4, 0usize..4), tokens in 0u32..60, done in 0u32..70, rows in 0u32..4,
        from in 0u32..70,
    ) {
        let page = |n: usize| [1, 2, 4, 8][n];
        let of = |n| match rows {
            0 => Layout { page_tokens: page(n), ..small_layout() },
            rows => Layout { kind: KvKind::Rows { rows }, page_tokens: 1, ..small_layout() },
        };
        let share = share(&of(pages.0), &of(pages.1));
        let pool = &share.pools()[0];
        let all = pool.cells(&Span { tokens, prefix_tokens: 0 });
        let unit = page(pages.0.min(pages.1));
        // Tokens of a cell; rows are of all tokens.
        let has = |cell: u32| match rows {
            0 => cell * unit..((cell + 1) * unit).min(tokens),
            _ => 0..tokens,
        };
        for cell in all {
            prop_assert_eq!(has(cell).end <= done, cell < pool.final_cells(done, tokens));
            let (some, has) = (from.min(done)..from.max(done), has(cell));
            if some.start < some.end && some.start.max(has.start) < some.end.min(has.end) {
                prop_assert!(pool.cells_of(&some).contains(&cell), "{} of {:?}", cell, some);
            } else if rows == 0 && some.start < some.end && some.start < tokens {
                prop_assert!(!pool.cells_of(&some).contains(&cell), "{} of {:?}", cell, some);
            }
        }
    }

    /// `touching` finds exactly the parts that share a layer and a cell with the rectangle.
    #[test]
    fn touching_is_exact(
        cells in 1u32..20, layers in 1u32..6, rows in 0u32..5, part_bytes in 1u64..2000, pool in 0u32..3,
        a in 0u32..6, b in 0u32..6, c in 0u32..20, d in 0u32..20,
    ) {
        let l = Layout { layers, page_tokens: 1, ..small_layout() };
        let state = Layout { kind: KvKind::Rows { rows: rows.max(1) }, ..l.clone() };
        let pools = [l, state];
        let share = Share::between(&pools, &pools).unwrap();
        let grid = Grid::new(&share, &Span { tokens: cells, prefix_tokens: 0 }, part_bytes).unwrap();
        let rect = Rect { pool, layers: a.min(b)..a.max(b), cells: c.min(d)..c.max(d) };
        let found: Vec<u32> = grid.touching(&rect).map(|p| p.0).collect();
        let meet = |a: &Range<u32>, b: &Range<u32>| a.start.max(b.start) < a.end.min(b.end);
        let expected: Vec<u32> = (0..grid.parts())
            .filter(|&p| {
                let r = grid.rect(PartId(p)).unwrap();
                r.pool == rect.pool && meet(&r.layers, &rect.layers) && meet(&r.cells, &rect.cells)
            })
            .collect();
        prop_assert_eq!(found, expected);
    }
}
