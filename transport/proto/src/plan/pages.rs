//! One side's addresses for a room.

use std::ops::Range;
use std::sync::Arc;

use crate::blocks::BlockList;
use crate::error::{Error, ErrorKind, Result};
use crate::ids::PartId;
use crate::layout::{Device, Layout, PoolMap};
use crate::plan::share::{Face, Pattern, Steps};
use crate::plan::{Grid, PoolShare, Share, Side, Span};

const LISTS_HINT: &str = "give one list a pool, as long as Span::blocks says";

/// One side's blocks of one pool, by their place in the prompt.
#[derive(Clone, Debug)]
pub struct Blocks {
    map: Arc<PoolMap>,
    /// The prompt's block that `ids` begins with.
    first: u32,
    ids: Arc<[u32]>,
}

impl Blocks {
    /// Blocks `first`, … of the prompt.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidPlan`] if an id is outside the pool.
    pub fn new(map: Arc<PoolMap>, first: u32, ids: Arc<[u32]>) -> Result<Self> {
        if let Some(index) = ids.iter().position(|&id| id >= map.blocks) {
            return Err(Error::new(ErrorKind::InvalidPlan, "block id is outside the pool")
                .with("index", index)
                .with("id", ids[index])
                .with("pool_blocks", map.blocks));
        }
        Ok(Self { map, first, ids })
    }
    /// The receiver's blocks of a room, one list for each pool; checked here, and only here.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidPlan`] if a list does not have exactly the span's blocks, leaves its
    /// pool, or names a block twice.
    pub fn lent(
        layouts: &[Layout],
        maps: &[Arc<PoolMap>],
        span: &Span,
        lists: &[BlockList],
    ) -> Result<Vec<Self>> {
        if lists.len() != layouts.len() || maps.len() != layouts.len() {
            return Err(Error::new(ErrorKind::InvalidPlan, "one list of blocks for each pool")
                .with("found", lists.len())
                .with("pools", layouts.len())
                .hint(LISTS_HINT));
        }
        let each = layouts.iter().zip(maps).zip(lists).enumerate();
        each.map(|(pool, ((layout, map), list))| {
            let range = span.blocks(layout)?;
            if list.len() != u64::from(range.end - range.start) {
                return Err(Error::new(ErrorKind::InvalidPlan, "wrong number of blocks")
                    .with("pool", pool)
                    .with("found", list.len())
                    .with("expected", range.end - range.start)
                    .hint(LISTS_HINT));
            }
            let ids = list.expand(map.blocks).map_err(|e| e.with("pool", pool))?.into();
            Ok(Self { map: map.clone(), first: range.start, ids })
        })
        .collect()
    }
    fn holds(&self, blocks: &Range<u32>) -> bool {
        blocks.is_empty()
            || self.first <= blocks.start && (blocks.end - self.first) as usize <= self.ids.len()
    }
}

/// What one rank sends of a room, with one side's addresses.
#[derive(Clone, Debug)]
pub struct Plan {
    share: Arc<Share>,
    side: Side,
    grid: Grid,
    blocks: Arc<[Blocks]>,
}

impl Plan {
    /// A plan over the blocks of one side.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidPlan`] if the blocks do not hold what the grid cuts, or a layer is
    /// outside the pool.
    pub fn new(
        share: Arc<Share>,
        side: Side,
        span: &Span,
        part_bytes: u64,
        blocks: Arc<[Blocks]>,
    ) -> Result<Self> {
        let grid = Grid::new(&share, span, part_bytes)?;
        grid.prove()?;
        for (n, pool) in share.pools().iter().enumerate() {
            let wanted = pool.blocks(side, &pool.cells(span));
            let bad = |why: &str| Error::new(ErrorKind::InvalidPlan, why).with("pool", n);
            let Some(blocks) = blocks.get(n) else { return Err(bad("a pool has no blocks")) };
            if !blocks.holds(&wanted) {
                return Err(bad("blocks do not hold the room")
                    .with("found", format!("{} from {}", blocks.ids.len(), blocks.first))
                    .with("expected", format!("{wanted:?}")));
            }
            check_layers(pool, side, &blocks.map)?;
        }
        Ok(Self { share, side, grid, blocks })
    }
    /// A plan of a whole prompt between two ranks of the same layout with one pool, where both sides
    /// have the same parts; as the receiver has it.
    ///
    /// # Errors
    /// As [`Blocks::lent`] and [`Plan::new`].
    pub fn alike(
        layout: &Layout,
        map: Arc<PoolMap>,
        tokens: u32,
        blocks: &BlockList,
        part_bytes: u64,
    ) -> Result<Self> {
        let pools = std::slice::from_ref(layout);
        let span = Span { tokens, prefix_tokens: 0 };
        let lent = Blocks::lent(pools, &[map], &span, std::slice::from_ref(blocks))?;
        let share = Arc::new(Share::between(pools, pools)?);
        Self::new(share, Side::Destination, &span, part_bytes, lent.into())
    }
    /// The grid.
    pub fn grid(&self) -> &Grid {
        &self.grid
    }
    /// The pages of a part.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidPlan`] if the grid has no such part.
    pub fn pages(&self, part: PartId) -> Result<PartPages> {
        let rect = self.grid.rect(part)?;
        let (Some(share), Some(blocks)) =
            (self.share.pool(rect.pool), self.blocks.get(rect.pool as usize))
        else {
            return Err(Error::new(ErrorKind::Internal, "a part of no pool").with("part", part.0));
        };
        Ok(PartPages {
            share: share.clone(),
            side: self.side,
            blocks: blocks.clone(),
            layers: rect.layers,
            cells: rect.cells,
        })
    }
}

fn check_layers(share: &PoolShare, side: Side, map: &PoolMap) -> Result<()> {
    let end = share.layers_at(side).end;
    if end as usize * share.slabs() as usize > map.slab_address.len() {
        return Err(Error::new(ErrorKind::InvalidPlan, "layer is outside the pool")
            .with("layers_end", end)
            .with("slabs", map.slab_address.len()));
    }
    Ok(())
}

/// Bytes of one side that lie together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// Where they start.
    pub address: u64,
    /// How many.
    pub bytes: u32,
}

/// Bytes that lie together on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write {
    /// Where they are read.
    pub source: u64,
    /// Where they land.
    pub destination: u64,
    /// How many.
    pub bytes: u32,
}

/// One side's bytes of one part, in wire order: layer, slab (K before V), cell, and inside a cell
/// the receiver's order.
///
/// Cheap to clone and to send to an engine: it holds block ids and slab bases, not addresses.
#[derive(Clone, Debug)]
pub struct PartPages {
    share: Arc<PoolShare>,
    side: Side,
    blocks: Blocks,
    layers: Range<u32>,
    cells: Range<u32>,
}

impl PartPages {
    /// Some layers (of the share) and cells of a pool, from the blocks that hold them.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidPlan`] if the blocks do not hold the cells, or a layer is outside the
    /// share or the pool.
    pub fn new(
        share: Arc<PoolShare>,
        side: Side,
        layers: Range<u32>,
        cells: Range<u32>,
        blocks: Blocks,
    ) -> Result<Self> {
        let bad = |why: &str| -> Result<Self> {
            Err(Error::new(ErrorKind::InvalidPlan, why)
                .with("layers", format!("{layers:?}"))
                .with("cells", format!("{cells:?}")))
        };
        if !blocks.holds(&share.blocks(side, &cells)) {
            return bad("blocks do not hold the part");
        }
        if layers.end > share.layer_count() {
            return bad("layer is outside the share");
        }
        check_layers(&share, side, &blocks.map)?;
        Ok(Self { share, side, blocks, layers, cells })
    }
    /// The memory they are in.
    pub fn device(&self) -> Device {
        self.blocks.map.device
    }
    /// Bytes of all pages.
    pub fn bytes(&self) -> u64 {
        let count = |r: &Range<u32>| u64::from(r.end.saturating_sub(r.start));
        count(&self.layers)
            * count(&self.cells)
            * u64::from(self.share.slabs())
            * u64::from(self.share.cell_bytes())
    }
    /// Bytes of one cell in one slab: a page, if both sides have the same layout.
    pub fn cell_bytes(&self) -> u32 {
        self.share.cell_bytes()
    }
    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.bytes() == 0
    }
    /// Where they are, neighbours merged.
    pub fn iter(&self) -> Pages<'_> {
        let face = self.share.face(self.side);
        Pages(Stretches::new(&face.pattern, [Walk::new(self, face)], self))
    }
}

/// What is read where and lands where, neighbours on both sides merged. Both must be of the same
/// part; otherwise there is nothing.
pub fn writes<'a>(source: &'a PartPages, destination: &'a PartPages) -> Writes<'a> {
    let same = source.side == Side::Source
        && destination.side == Side::Destination
        && source.share == destination.share
        && source.layers == destination.layers
        && source.cells == destination.cells;
    let share = &source.share;
    let walks = [Walk::new(source, &share.source), Walk::new(destination, &share.destination)];
    let mut stretches = Stretches::new(&share.both, walks, source);
    if !same {
        stretches.grown = Stretch::NONE;
    }
    Writes(stretches)
}

/// Iterator of [`PartPages::iter`].
#[derive(Clone, Debug)]
pub struct Pages<'a>(Stretches<'a, 1>);

impl Iterator for Pages<'_> {
    type Item = Page;

    #[inline]
    fn next(&mut self) -> Option<Page> {
        self.0.next().map(Page::from)
    }
    #[inline]
    fn fold<A, F: FnMut(A, Page) -> A>(self, init: A, mut f: F) -> A {
        self.0.fold(init, |all, stretch| f(all, stretch.into()))
    }
}

/// Iterator of [`writes`].
#[derive(Clone, Debug)]
pub struct Writes<'a>(Stretches<'a, 2>);

impl Iterator for Writes<'_> {
    type Item = Write;

    #[inline]
    fn next(&mut self) -> Option<Write> {
        self.0.next().map(Write::from)
    }
    #[inline]
    fn fold<A, F: FnMut(A, Write) -> A>(self, init: A, mut f: F) -> A {
        self.0.fold(init, |all, stretch| f(all, stretch.into()))
    }
}

/// Bytes that lie together on each of `N` sides; none marks the end.
#[derive(Clone, Copy, Debug)]
struct Stretch<const N: usize> {
    address: [u64; N],
    bytes: u32,
}

impl<const N: usize> Stretch<N> {
    const NONE: Self = Self { address: [0; N], bytes: 0 };

    /// Takes `more` in if it begins where this ends, on every side.
    #[inline]
    fn grow(&mut self, more: &Self) -> bool {
        let length = u64::from(self.bytes);
        let adjacent = (0..N).all(|n| self.address[n] + length == more.address[n]);
        match self.bytes.checked_add(more.bytes) {
            Some(bytes) if adjacent && more.bytes > 0 => {
                self.bytes = bytes;
                true
            }
            _ => false,
        }
    }
}

impl From<Stretch<1>> for Page {
    #[inline]
    fn from(Stretch { address: [address], bytes }: Stretch<1>) -> Self {
        Self { address, bytes }
    }
}

impl From<Stretch<2>> for Write {
    #[inline]
    fn from(Stretch { address: [source, destination], bytes }: Stretch<2>) -> Self {
        Self { source, destination, bytes }
    }
}

/// Where the cells of a part are on one side.
#[derive(Clone, Debug)]
struct Walk<'a> {
    /// Slabs of the part's layers.
    slabs: std::slice::Iter<'a, u64>,
    /// Blocks of the part's cells.
    ids: &'a [u32],
    block_stride_bytes: u64,
    cell_stride_bytes: u64,
    per_page: u32,
    /// Place of the part's first cell in its page, and of the next one in its.
    first: u32,
    inside: u32,
    /// The next cell's block, and its slab's start.
    index: usize,
    slab: u64,
}

impl<'a> Walk<'a> {
    fn new(part: &'a PartPages, face: &Face) -> Self {
        let slabs = part.share.slabs();
        let slab = |layer: u32| ((face.first_layer + layer) * slabs) as usize;
        let Blocks { map, first, ids } = &part.blocks;
        let range = slab(part.layers.start)..slab(part.layers.end);
        let skip = (part.cells.start / face.cells_per_page).saturating_sub(*first) as usize;
        Self {
            slabs: map.slab_address.get(range).unwrap_or_default().iter(),
            ids: ids.get(skip..).unwrap_or_default(),
            block_stride_bytes: map.block_stride_bytes,
            cell_stride_bytes: u64::from(face.cell_stride_bytes),
            per_page: face.cells_per_page,
            first: part.cells.start % face.cells_per_page,
            inside: 0,
            index: 0,
            slab: 0,
        }
    }
    /// Goes to the first cell of the next slab.
    #[inline]
    fn next_slab(&mut self) -> Option<()> {
        self.slab = *self.slabs.next()?;
        (self.inside, self.index) = (self.first, 0);
        Some(())
    }
    #[inline]
    fn next_cell(&mut self) -> Option<u64> {
        let id = *self.ids.get(self.index)?;
        let address = self.slab
            + u64::from(id) * self.block_stride_bytes
            + u64::from(self.inside) * self.cell_stride_bytes;
        self.inside += 1;
        if self.inside == self.per_page {
            (self.inside, self.index) = (0, self.index + 1);
        }
        Some(address)
    }
}

/// The bytes of a part on `N` sides in step, in wire order, neighbours merged.
#[derive(Clone, Debug)]
struct Stretches<'a, const N: usize> {
    pattern: &'a Pattern<N>,
    walks: [Walk<'a>; N],
    cells: u32,
    /// Cells of the slab, and steps of the cell, that are still to come.
    cells_left: u32,
    outer_left: u32,
    inner_left: u32,
    /// Where the last outer step began, and the next piece begins.
    row: [u64; N],
    piece: [u64; N],
    /// What comes next, unless it can still grow.
    grown: Stretch<N>,
}

impl<'a, const N: usize> Stretches<'a, N> {
    fn new(pattern: &'a Pattern<N>, walks: [Walk<'a>; N], part: &PartPages) -> Self {
        let mut new = Self {
            pattern,
            walks,
            cells: part.cells.end.saturating_sub(part.cells.start),
            cells_left: 0,
            outer_left: 0,
            inner_left: 0,
            row: [0; N],
            piece: [0; N],
            grown: Stretch::NONE,
        };
        new.grown = new.piece().unwrap_or(Stretch::NONE);
        new
    }
    #[inline]
    fn cell(&mut self) -> Option<[u64; N]> {
        if self.cells_left == 0 {
            for walk in &mut self.walks {
                walk.next_slab()?;
            }
            self.cells_left = self.cells;
        }
        self.cells_left = self.cells_left.checked_sub(1)?;
        let mut cell = [0; N];
        let sides = self.walks.iter_mut().zip(&self.pattern.offset);
        for (at, (walk, &offset)) in cell.iter_mut().zip(sides) {
            *at = walk.next_cell()? + u64::from(offset);
        }
        Some(cell)
    }
    /// The next piece, unmerged.
    #[inline]
    fn piece(&mut self) -> Option<Stretch<N>> {
        let Pattern { bytes, inner, outer, .. } = self.pattern;
        if self.inner_left > 0 {
            self.inner_left -= 1;
            step(&mut self.piece, inner);
        } else if self.outer_left > 0 {
            self.outer_left -= 1;
            step(&mut self.row, outer);
            (self.piece, self.inner_left) = (self.row, inner.count - 1);
        } else {
            self.row = self.cell()?;
            self.piece = self.row;
            (self.outer_left, self.inner_left) =
                (outer.count.checked_sub(1)?, inner.count.checked_sub(1)?);
        }
        Some(Stretch { address: self.piece, bytes: *bytes })
    }
    #[inline]
    fn next(&mut self) -> Option<Stretch<N>> {
        let mut stretch = self.grown;
        if stretch.bytes == 0 {
            return None;
        }
        loop {
            let more = self.piece().unwrap_or(Stretch::NONE);
            if !stretch.grow(&more) {
                self.grown = more;
                return Some(stretch);
            }
        }
    }
    /// As repeated [`Stretches::next`], with what grows kept out of memory.
    #[inline]
    fn fold<A>(mut self, init: A, mut f: impl FnMut(A, Stretch<N>) -> A) -> A {
        let (mut all, mut stretch) = (init, self.grown);
        if stretch.bytes == 0 {
            return all;
        }
        while let Some(more) = self.piece() {
            if !stretch.grow(&more) {
                all = f(all, stretch);
                stretch = more;
            }
        }
        f(all, stretch)
    }
}

#[inline]
fn step<const N: usize>(at: &mut [u64; N], steps: &Steps<N>) {
    for (at, &stride_bytes) in at.iter_mut().zip(&steps.stride_bytes) {
        *at += u64::from(stride_bytes);
    }
}
