//! One side's addresses for a room.

use std::ops::Range;
use std::sync::Arc;

use crate::blocks::BlockList;
use crate::error::{Error, ErrorKind, Result};
use crate::ids::PartId;
use crate::layout::{Device, Layout, PoolMap};
use crate::plan::share::Face;
use crate::plan::{Grid, PoolShare, Share, Side, Span};

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
                .with("pools", layouts.len()));
        }
        let each = layouts.iter().zip(maps).zip(lists).enumerate();
        each.map(|(pool, ((layout, map), list))| {
            let range = span.blocks(layout)?;
            if list.len() != u64::from(range.end - range.start) {
                return Err(Error::new(ErrorKind::InvalidPlan, "wrong number of blocks")
                    .with("pool", pool)
                    .with("found", list.len())
                    .with("expected", range.end - range.start));
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
        Pages { face, walk: Walk::new(self, face), piece: 0, base: 0, next: None }
    }
}

/// Walks over the cells of a part on one side.
#[derive(Clone, Debug)]
struct Walk<'a> {
    map: &'a PoolMap,
    ids: &'a [u32],
    first_block: u32,
    per_page: u32,
    stride: u64,
    slab: u32,
    slab_end: u32,
    cells: Range<u32>,
    cell: u32,
    /// Place of `cell` among its page's cells, and its block's index in `ids`.
    inside: u32,
    index: u32,
}

impl<'a> Walk<'a> {
    fn new(part: &'a PartPages, face: &Face) -> Self {
        let slabs = part.share.slabs();
        let first = face.first_layer;
        let mut walk = Self {
            map: &part.blocks.map,
            ids: &part.blocks.ids,
            first_block: part.blocks.first,
            per_page: face.cells_per_page,
            stride: u64::from(face.cell_stride_bytes),
            slab: (first + part.layers.start) * slabs,
            slab_end: if part.cells.is_empty() { 0 } else { (first + part.layers.end) * slabs },
            cells: part.cells.clone(),
            cell: 0,
            inside: 0,
            index: 0,
        };
        walk.rewind();
        walk
    }
    fn rewind(&mut self) {
        self.cell = self.cells.start;
        self.inside = self.cells.start % self.per_page;
        self.index = (self.cells.start / self.per_page).wrapping_sub(self.first_block);
    }
    /// Address of the next cell.
    #[inline]
    fn next(&mut self) -> Option<u64> {
        if self.cell == self.cells.end {
            self.slab += 1;
            self.rewind();
        }
        if self.slab >= self.slab_end {
            return None;
        }
        let id = *self.ids.get(self.index as usize)?;
        let base = *self.map.slab_address.get(self.slab as usize)?;
        let address = base
            + u64::from(id) * self.map.block_stride_bytes
            + u64::from(self.inside) * self.stride;
        self.cell += 1;
        self.inside += 1;
        if self.inside == self.per_page {
            (self.inside, self.index) = (0, self.index + 1);
        }
        Some(address)
    }
}

/// Iterator of [`PartPages::iter`].
#[derive(Clone, Debug)]
pub struct Pages<'a> {
    face: &'a Face,
    walk: Walk<'a>,
    /// The piece of the cell at `base` that comes next; 0 when a new cell is due.
    piece: usize,
    base: u64,
    /// What may still grow.
    next: Option<Page>,
}

impl Pages<'_> {
    #[inline]
    fn raw(&mut self) -> Option<Page> {
        if self.piece == 0 {
            self.base = self.walk.next()?;
        }
        let piece = self.face.pieces.get(self.piece)?;
        self.piece += 1;
        if self.piece == self.face.pieces.len() {
            self.piece = 0;
        }
        Some(Page { address: self.base + u64::from(piece.offset), bytes: piece.bytes })
    }
}

impl Iterator for Pages<'_> {
    type Item = Page;

    #[inline]
    fn next(&mut self) -> Option<Page> {
        let mut page = match self.next.take() {
            Some(page) => page,
            None => self.raw()?,
        };
        while let Some(more) = self.raw() {
            match page.bytes.checked_add(more.bytes) {
                Some(bytes) if page.address + u64::from(page.bytes) == more.address => {
                    page.bytes = bytes;
                }
                _ => {
                    self.next = Some(more);
                    break;
                }
            }
        }
        Some(page)
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
    let mut from = Walk::new(source, &source.share.source);
    if !same {
        from.slab_end = 0;
    }
    Writes {
        share: &source.share,
        from,
        to: Walk::new(destination, &source.share.destination),
        piece: 0,
        base: (0, 0),
        next: None,
    }
}

/// Iterator of [`writes`].
#[derive(Clone, Debug)]
pub struct Writes<'a> {
    share: &'a PoolShare,
    from: Walk<'a>,
    to: Walk<'a>,
    piece: usize,
    base: (u64, u64),
    next: Option<Write>,
}

impl Writes<'_> {
    #[inline]
    fn raw(&mut self) -> Option<Write> {
        if self.piece == 0 {
            self.base = (self.from.next()?, self.to.next()?);
        }
        let joint = self.share.joints.get(self.piece)?;
        self.piece += 1;
        if self.piece == self.share.joints.len() {
            self.piece = 0;
        }
        Some(Write {
            source: self.base.0 + u64::from(joint.source),
            destination: self.base.1 + u64::from(joint.destination),
            bytes: joint.bytes,
        })
    }
}

impl Iterator for Writes<'_> {
    type Item = Write;

    #[inline]
    fn next(&mut self) -> Option<Write> {
        let mut write = match self.next.take() {
            Some(write) => write,
            None => self.raw()?,
        };
        while let Some(more) = self.raw() {
            let length = u64::from(write.bytes);
            let adjacent = write.source + length == more.source
                && write.destination + length == more.destination;
            match write.bytes.checked_add(more.bytes) {
                Some(bytes) if adjacent => write.bytes = bytes,
                _ => {
                    self.next = Some(more);
                    break;
                }
            }
        }
        Some(write)
    }
}
