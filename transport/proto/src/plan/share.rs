//! What one rank has for another.

use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::layout::{KvKind, Layout, Order};
use crate::limits;
use crate::plan::Span;

/// Which end of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Prefill: bytes are read here.
    Source,
    /// Decode: bytes land here.
    Destination,
}

/// The bytes of a cell on `N` sides at once: `outer` × `inner` pieces, each of which lies together on
/// all of them. Offsets are from the cell's first byte on that side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pattern<const N: usize> {
    pub(super) offset: [u32; N],
    pub(super) bytes: u32,
    pub(super) inner: Steps<N>,
    pub(super) outer: Steps<N>,
}

/// Equal steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Steps<const N: usize> {
    pub(super) count: u32,
    /// Distance of two neighbours on each side.
    pub(super) stride_bytes: [u32; N],
}

impl<const N: usize> Pattern<N> {
    /// The same bytes in the same order in as few pieces as can be.
    fn merged(mut self) -> Self {
        let one = Steps { count: 1, stride_bytes: [0; N] };
        for _ in 0..2 {
            if self.inner.count == 1 {
                (self.inner, self.outer) = (self.outer, one);
            }
            if self.inner.stride_bytes == [self.bytes; N] {
                self.bytes *= self.inner.count;
                self.inner = one;
            }
        }
        self
    }
    pub(super) fn pieces(&self) -> u32 {
        self.outer.count * self.inner.count
    }
}

/// How a cell lies in one side's pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Face {
    /// Where the share's layers begin among this rank's.
    pub(super) first_layer: u32,
    /// Cells in a page.
    pub(super) cells_per_page: u32,
    /// Distance of two cells in a page.
    pub(super) cell_stride_bytes: u32,
    /// The cell's bytes in wire order, merged as far as this side allows.
    pub(super) pattern: Pattern<1>,
}

/// What one pool of the sender has for the receiver's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolShare {
    layers: Range<u32>,
    slabs: u32,
    cell_tokens: u32,
    cell_bytes: u32,
    window_tokens: u32,
    rows: u32,
    pub(super) source: Face,
    pub(super) destination: Face,
    /// The cell's bytes in wire order, merged as far as both sides allow.
    pub(super) both: Pattern<2>,
}

/// What one rank has for another, pool by pool. Both ends compute the same one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    pools: Vec<Arc<PoolShare>>,
}

impl Share {
    /// What the rank with `source` has for the one with `destination`: nothing, if it has none of
    /// its layers or heads, or if another rank with the same heads sends them.
    ///
    /// Of ranks that have the same heads (MLA latents, or fewer heads than ranks), the one sends that
    /// stands among its instance's where the receiver stands among its own. So receivers spread over
    /// senders, and what all ranks have comes from one that has heads for the receiver anyway.
    ///
    /// # Errors
    /// [`ErrorKind::Incompatible`] with every field that differs and both values.
    pub fn between(source: &[Layout], destination: &[Layout]) -> Result<Self> {
        let differences = Layout::pools_differ(destination, source);
        if let Some(first) = differences.first() {
            let mut e =
                Error::new(ErrorKind::Incompatible, format!("layouts differ in {}", first.field));
            for d in &differences {
                e = e.with(
                    "differs",
                    format!("{}: decode {} / prefill {}", d.field, d.here, d.there),
                );
            }
            return Err(e.hint(
                "pair workers of one model and dtype, with page sizes that are multiples of each other",
            ));
        }
        let pools = source.iter().zip(destination).map(|(s, d)| Arc::new(PoolShare::new(s, d)));
        Ok(Self { pools: pools.collect() })
    }
    /// Whether there is nothing to send, whatever the room.
    pub fn is_empty(&self) -> bool {
        self.pools.iter().all(|p| p.is_empty())
    }
    /// Writes of a room if no two cells lay side by side, so that none could be merged.
    pub fn writes_unmerged(&self, span: &Span) -> u64 {
        let of = |p: &Arc<PoolShare>| {
            let cells = p.cells(span);
            u64::from(p.layer_count() * p.slabs)
                * u64::from(cells.end - cells.start)
                * u64::from(p.both.pieces())
        };
        self.pools.iter().map(of).sum()
    }
    /// Pool by pool.
    pub fn pools(&self) -> &[Arc<PoolShare>] {
        &self.pools
    }
    /// One pool's share.
    pub fn pool(&self, pool: u32) -> Option<&Arc<PoolShare>> {
        self.pools.get(pool as usize)
    }
}

impl PoolShare {
    fn new(source: &Layout, destination: &Layout) -> Self {
        let layers = overlap(&layers_of(source), &layers_of(destination));
        let (s, d) = (source.heads(), destination.heads());
        let heads = overlap(&(s.first..s.end), &(d.first..d.end));
        // The sender's rank that stands where the receiver does among its own.
        let beside = u64::from(destination.at.tp.0) * u64::from(source.at.tp.1)
            / u64::from(destination.at.tp.1);
        let sends = beside % u64::from(s.copies) == u64::from(s.copy)
            && destination.at.cp.0 == source.at.cp.0
            && !layers.is_empty()
            && !heads.is_empty();
        let (layers, heads) = if sends { (layers, heads) } else { (0..0, 0..0) };
        let cell_tokens = source.page_tokens.min(destination.page_tokens);
        let row = destination.row_bytes();
        let lie = |l: &Layout| Lie::new(l, heads.start);
        let (from, to) = (lie(source), lie(destination));
        let count = heads.end - heads.start;
        // The receiver's order is the wire's.
        let steps =
            |count, of: fn(&Lie) -> u32| Steps { count, stride_bytes: [of(&from), of(&to)] };
        let tokens = steps(cell_tokens, |l| l.token_stride_bytes);
        let heads = steps(count, |l| l.head_stride_bytes);
        let (outer, inner) = match destination.order {
            Order::Nhd => (tokens, heads),
            Order::Hnd => (heads, tokens),
        };
        let rows = Pattern { offset: [from.offset, to.offset], bytes: row, inner, outer };
        let face = |l: &Layout, lie: &Lie, side: usize| {
            let of = |s: Steps<2>| Steps { count: s.count, stride_bytes: [s.stride_bytes[side]] };
            let (inner, outer) = (of(rows.inner), of(rows.outer));
            Face {
                first_layer: layers.start.saturating_sub(l.first_layer),
                cells_per_page: l.page_tokens / cell_tokens,
                cell_stride_bytes: cell_tokens * lie.token_stride_bytes,
                pattern: Pattern { offset: [lie.offset], bytes: row, inner, outer }.merged(),
            }
        };
        Self {
            slabs: destination.kind.slabs(),
            cell_tokens,
            cell_bytes: count * cell_tokens * row,
            window_tokens: destination.window_tokens,
            rows: match destination.kind {
                KvKind::Rows { rows } => rows,
                _ => 0,
            },
            source: face(source, &from, 0),
            destination: face(destination, &to, 1),
            both: rows.merged(),
            layers,
        }
    }
    /// Whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }
    /// The layers, counted in the model.
    pub fn layers(&self) -> Range<u32> {
        self.layers.clone()
    }
    /// How many layers.
    pub fn layer_count(&self) -> u32 {
        self.layers.end - self.layers.start
    }
    /// The layers among those of one side's rank.
    pub fn layers_at(&self, side: Side) -> Range<u32> {
        let first = self.face(side).first_layer;
        first..first + self.layer_count()
    }
    /// Slabs of a layer.
    pub fn slabs(&self) -> u32 {
        self.slabs
    }
    /// Bytes of a cell in one slab of one layer.
    pub fn cell_bytes(&self) -> u32 {
        self.cell_bytes
    }
    /// The cells that a room moves.
    pub fn cells(&self, span: &Span) -> Range<u32> {
        if self.is_empty() {
            return 0..0;
        }
        if self.rows > 0 {
            return 0..self.rows;
        }
        let from = span.first_token(self.window_tokens);
        if from >= span.tokens {
            return 0..0;
        }
        from / self.cell_tokens..span.tokens.div_ceil(self.cell_tokens)
    }
    /// The blocks of one side that hold some cells, counted from the prompt's first.
    pub fn blocks(&self, side: Side, cells: &Range<u32>) -> Range<u32> {
        let per = self.face(side).cells_per_page;
        if cells.is_empty() { 0..0 } else { cells.start / per..cells.end.div_ceil(per) }
    }
    /// The cells that hold some tokens; all rows, where a block is a row.
    pub fn cells_of(&self, tokens: &Range<u32>) -> Range<u32> {
        match self.rows {
            0 => tokens.start / self.cell_tokens..tokens.end.div_ceil(self.cell_tokens),
            rows => 0..rows,
        }
    }
    /// Cells that are final once `done` of `tokens` tokens are there.
    pub fn final_cells(&self, done: u32, tokens: u32) -> u32 {
        match (done >= tokens, self.rows) {
            (true, 0) => tokens.div_ceil(self.cell_tokens),
            (false, 0) => done / self.cell_tokens,
            (true, rows) => rows,
            (false, _) => 0,
        }
    }
    pub(super) fn face(&self, side: Side) -> &Face {
        match side {
            Side::Source => &self.source,
            Side::Destination => &self.destination,
        }
    }
}

/// How rows lie in a page.
struct Lie {
    /// Of the share's first head.
    offset: u32,
    token_stride_bytes: u32,
    head_stride_bytes: u32,
}

impl Lie {
    fn new(l: &Layout, first_head: u32) -> Self {
        let row = l.row_bytes();
        let (token_stride_bytes, head_stride_bytes) = match l.order {
            Order::Nhd => (l.kv_heads * row, row),
            Order::Hnd => (row, l.page_tokens * row),
        };
        let offset = first_head.saturating_sub(l.heads().first) * head_stride_bytes;
        Self { offset, token_stride_bytes, head_stride_bytes }
    }
}

fn layers_of(l: &Layout) -> Range<u32> {
    l.first_layer..l.first_layer + l.layers
}

fn overlap(a: &Range<u32>, b: &Range<u32>) -> Range<u32> {
    a.start.max(b.start)..a.end.min(b.end).max(a.start.max(b.start))
}

/// Which of an instance's ranks send to one rank of another: indices into `ranks`, in their order.
///
/// # Errors
/// [`ErrorKind::Incompatible`] as [`Share::between`] for the first rank that does not fit, and as
/// [`prove_sources`].
pub fn sources<L: AsRef<[Layout]>>(destination: &[Layout], ranks: &[L]) -> Result<Vec<usize>> {
    let mut senders = Vec::new();
    for (index, rank) in ranks.iter().enumerate() {
        let share =
            Share::between(rank.as_ref(), destination).map_err(|e| e.with("rank", index))?;
        if !share.is_empty() {
            senders.push(index);
        }
    }
    let chosen: Vec<&[Layout]> = senders.iter().map(|&i| ranks[i].as_ref()).collect();
    prove_sources(destination, &chosen)?;
    Ok(senders)
}

/// Layers × heads.
type Field = (Range<u32>, Range<u32>);

/// Proves that what these ranks send covers every layer and head of a destination exactly once.
///
/// # Errors
/// [`ErrorKind::Incompatible`] naming the pool, the layer and the head that nobody or more than one
/// sends, or [`ErrorKind::LimitExceeded`] for too many ranks.
pub fn prove_sources<L: AsRef<[Layout]>>(destination: &[Layout], sources: &[L]) -> Result<()> {
    if sources.len() > limits::RANKS_MAX {
        return Err(Error::new(ErrorKind::LimitExceeded, "too many ranks send to one")
            .with("found", sources.len())
            .with("limit", limits::RANKS_MAX));
    }
    let shares = sources
        .iter()
        .map(|s| Share::between(s.as_ref(), destination))
        .collect::<Result<Vec<Share>>>()?;
    for (n, pool) in destination.iter().enumerate() {
        let heads = pool.heads();
        // Layers × heads, by what each source has.
        let rects: Vec<Field> = sources
            .iter()
            .zip(&shares)
            .filter_map(|(s, share)| {
                let (has, gives) = (s.as_ref().get(n)?.heads(), share.pools.get(n)?);
                let heads = overlap(&(has.first..has.end), &(heads.first..heads.end));
                (!gives.is_empty()).then(|| (gives.layers(), heads))
            })
            .collect();
        // Between two neighbouring edges nothing changes, so one look at each field is enough.
        let edges = |all: Range<u32>, of: fn(&Field) -> &Range<u32>| {
            let mut edges: Vec<u32> = rects.iter().flat_map(|r| [of(r).start, of(r).end]).collect();
            edges.extend([all.start, all.end]);
            edges.sort_unstable();
            edges.dedup();
            edges.pop();
            edges
        };
        for &layer in &edges(layers_of(pool), |r| &r.0) {
            for &head in &edges(heads.first..heads.end, |r| &r.1) {
                let senders =
                    rects.iter().filter(|r| r.0.contains(&layer) && r.1.contains(&head)).count();
                if senders != 1 {
                    let what = if senders == 0 { "no rank sends" } else { "several ranks send" };
                    return Err(Error::new(
                        ErrorKind::Incompatible,
                        format!("{what} a part of the destination's pages"),
                    )
                    .with("pool", n)
                    .with("layer", layer)
                    .with("head", head)
                    .with("cp", format!("{} of {}", pool.at.cp.0, pool.at.cp.1))
                    .with("ranks", sources.len())
                    .hint("name every rank of the prefill instance that has these layers and heads, once"));
                }
            }
        }
    }
    Ok(())
}
