//! From a room's blocks to parts and pages.
//!
//! Owns the [`Grid`] (how a room is cut into parts; both sides compute the same one) and the
//! [`Plan`] (one side's addresses for it). In: layouts, token counts, block lists. Out: for each
//! part, the pages of this side in wire order. Invariants: the parts of a grid cover every page of
//! the room exactly once ([`Grid::prove`]); a plan exists only if its blocks are inside the pool
//! and distinct, so no destination byte is written twice.

use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;

use crate::blocks::BlockList;
use crate::error::{Error, ErrorKind, Result};
use crate::ids::PartId;
use crate::layout::{Layout, PoolMap};
use crate::limits;

/// A rectangle of a room: layers × blocks (indices into the room's block list).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rect {
    /// Layers of this rank.
    pub layers: Range<u32>,
    /// Indices into the room's list of blocks.
    pub blocks: Range<u32>,
}

/// How a room is cut into parts. Parts are numbered layer group by layer group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grid {
    blocks: u32,
    layers: u32,
    blocks_per_part: u32,
    layers_per_part: u32,
    bytes_per_block_layer: u64,
}

impl Grid {
    /// The grid of a room that moves `blocks` blocks, with parts of about `part_bytes`.
    ///
    /// A part holds as many blocks of one layer as fit; short rooms group layers. Where that would
    /// need more than [`limits::PARTS_PER_ROOM_MAX`] parts, parts grow.
    ///
    /// # Errors
    /// [`ErrorKind::LimitExceeded`] if there are too many blocks.
    pub fn new(layout: &Layout, blocks: u32, part_bytes: u64) -> Result<Self> {
        if blocks > limits::BLOCKS_PER_ROOM_MAX {
            return Err(Error::new(ErrorKind::LimitExceeded, "too many blocks in one room")
                .with("found", blocks)
                .with("limit", limits::BLOCKS_PER_ROOM_MAX));
        }
        let unit = u64::from(layout.page_bytes()) * u64::from(layout.kind.slabs());
        let mut part_bytes = part_bytes.max(unit);
        loop {
            let fit = (part_bytes / unit).max(1);
            let blocks_per_part = fit.min(u64::from(blocks.max(1))) as u32;
            let layers_per_part =
                (fit / u64::from(blocks_per_part)).clamp(1, u64::from(layout.layers)) as u32;
            let grid = Self {
                blocks,
                layers: layout.layers,
                blocks_per_part,
                layers_per_part,
                bytes_per_block_layer: unit,
            };
            if grid.columns() * u64::from(grid.layer_groups())
                <= u64::from(limits::PARTS_PER_ROOM_MAX)
            {
                return Ok(grid);
            }
            part_bytes *= 2;
        }
    }
    fn columns(&self) -> u64 {
        u64::from(self.blocks.div_ceil(self.blocks_per_part))
    }
    fn layer_groups(&self) -> u32 {
        self.layers.div_ceil(self.layers_per_part)
    }
    /// Number of parts; 0 for a room without pages.
    pub fn parts(&self) -> u32 {
        (self.columns() * u64::from(self.layer_groups())) as u32
    }
    /// Blocks that the room moves.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }
    /// Layers that the room moves.
    pub fn layers(&self) -> u32 {
        self.layers
    }
    /// The rectangle of a part.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidPlan`] if the grid has no such part.
    pub fn rect(&self, part: PartId) -> Result<Rect> {
        if part.0 >= self.parts() {
            return Err(Error::new(ErrorKind::InvalidPlan, "the room has no such part")
                .with("part", part.0)
                .with("parts", self.parts()));
        }
        let columns = self.columns() as u32;
        let (group, column) = (part.0 / columns, part.0 % columns);
        let layer = group * self.layers_per_part;
        let block = column * self.blocks_per_part;
        Ok(Rect {
            layers: layer..(layer + self.layers_per_part).min(self.layers),
            blocks: block..(block + self.blocks_per_part).min(self.blocks),
        })
    }
    /// Bytes of a part; 0 if there is no such part.
    pub fn part_bytes(&self, part: PartId) -> u64 {
        self.rect(part).map_or(0, |r| {
            u64::from(r.layers.end - r.layers.start)
                * u64::from(r.blocks.end - r.blocks.start)
                * self.bytes_per_block_layer
        })
    }
    /// Bytes of the room.
    pub fn bytes(&self) -> u64 {
        u64::from(self.blocks) * u64::from(self.layers) * self.bytes_per_block_layer
    }
    /// Parts whose rectangle lies in `layers` × `blocks` at least in part.
    pub fn touching(&self, rect: &Rect) -> impl Iterator<Item = PartId> + use<> {
        let columns = self.columns() as u32;
        let layers = rect.layers.start.min(self.layers)..rect.layers.end.min(self.layers);
        let blocks = rect.blocks.start.min(self.blocks)..rect.blocks.end.min(self.blocks);
        let cut = |r: Range<u32>, per: u32| {
            if r.is_empty() { 0..0 } else { r.start / per..(r.end - 1) / per + 1 }
        };
        let (rows, cols) = (cut(layers, self.layers_per_part), cut(blocks, self.blocks_per_part));
        rows.flat_map(move |g| cols.clone().map(move |c| PartId(g * columns + c)))
    }
    /// Proves that the parts tile the room: each (layer, block) lies in exactly one part.
    ///
    /// Parts are full rectangles of a regular grid, so it is enough that both axes are tiled
    /// without gap or overlap, which is checked here edge by edge.
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] naming the edge; that would be a defect of this module.
    pub fn prove(&self) -> Result<()> {
        let defect = |axis: &str, at: u32| {
            Error::new(ErrorKind::Internal, "parts do not cover the room exactly once")
                .with("axis", axis)
                .with("at", at)
        };
        let columns = self.columns() as u32;
        let mut edge = 0;
        for c in 0..columns.min(self.parts()) {
            let r = self.rect(PartId(c))?;
            if r.blocks.start != edge || r.blocks.is_empty() {
                return Err(defect("blocks", edge));
            }
            edge = r.blocks.end;
        }
        if edge != self.blocks {
            return Err(defect("blocks", edge));
        }
        let mut edge = 0;
        for g in 0..if columns == 0 { 0 } else { self.layer_groups() } {
            let r = self.rect(PartId(g * columns))?;
            if r.layers.start != edge || r.layers.is_empty() {
                return Err(defect("layers", edge));
            }
            edge = r.layers.end;
        }
        if columns > 0 && edge != self.layers {
            return Err(defect("layers", edge));
        }
        Ok(())
    }
}

/// What a room moves, in tokens: the prompt, less what the decode has already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Tokens of the prompt.
    pub tokens: u32,
    /// Tokens at its start that the decode has already; a multiple of the page size, or all.
    pub prefix_tokens: u32,
}

impl Span {
    /// The blocks to move, as indices of the prompt's blocks.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidPlan`] if the prefix is longer than the prompt or ends inside a block.
    pub fn blocks(&self, layout: &Layout) -> Result<Range<u32>> {
        let bad = |why: &str| {
            Error::new(ErrorKind::InvalidPlan, why)
                .with("prefix_tokens", self.prefix_tokens)
                .with("tokens", self.tokens)
                .with("page_tokens", layout.page_tokens)
        };
        if self.prefix_tokens > self.tokens {
            return Err(bad("prefix is longer than the prompt"));
        }
        let all = layout.blocks_for(self.tokens);
        if self.prefix_tokens == self.tokens {
            return Ok(all..all);
        }
        if !self.prefix_tokens.is_multiple_of(layout.page_tokens) {
            return Err(bad("prefix ends inside a block").hint("round it down to whole pages"));
        }
        Ok(self.prefix_tokens / layout.page_tokens..all)
    }
}

/// One page of one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// Where it starts.
    pub address: u64,
    /// How long it is.
    pub bytes: u32,
}

/// One side's addresses for a room.
#[derive(Clone, Debug)]
pub struct Plan {
    grid: Grid,
    map: Arc<PoolMap>,
    ids: Arc<[u32]>,
    slabs: u32,
    page_bytes: u32,
}

impl Plan {
    /// A plan for `blocks` of the pool `map`; the list is checked here, and only here.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidPlan`] if the list does not have exactly the grid's blocks, leaves the
    /// pool, or names a block twice.
    pub fn new(grid: Grid, layout: &Layout, map: Arc<PoolMap>, blocks: &BlockList) -> Result<Self> {
        if blocks.len() != u64::from(grid.blocks) {
            return Err(Error::new(ErrorKind::InvalidPlan, "wrong number of blocks")
                .with("found", blocks.len())
                .with("expected", grid.blocks));
        }
        grid.prove()?;
        let ids = blocks.expand(map.blocks)?.into();
        Ok(Self { grid, map, ids, slabs: layout.kind.slabs(), page_bytes: layout.page_bytes() })
    }
    /// The grid.
    pub fn grid(&self) -> &Grid {
        &self.grid
    }
    /// The memory the pages are in.
    pub fn device(&self) -> crate::layout::Device {
        self.map.device
    }
    /// The pages of a part.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidPlan`] if the grid has no such part.
    pub fn pages(&self, part: PartId) -> Result<PartPages> {
        let rect = self.grid.rect(part)?;
        Ok(PartPages {
            map: self.map.clone(),
            slabs: rect.layers.start * self.slabs..rect.layers.end * self.slabs,
            ids: self.ids.clone(),
            from: rect.blocks.start as usize,
            to: rect.blocks.end as usize,
            page_bytes: self.page_bytes,
        })
    }
}

/// One side's pages of one part, in wire order: layer, slab (K before V), block.
///
/// Cheap to clone and to send to an engine: it holds block ids and slab bases, not addresses.
#[derive(Clone, Debug)]
pub struct PartPages {
    map: Arc<PoolMap>,
    slabs: Range<u32>,
    ids: Arc<[u32]>,
    from: usize,
    to: usize,
    page_bytes: u32,
}

impl PartPages {
    /// The sender's pages of a part, from the ids of just that part's blocks.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidPlan`] if an id or a layer is outside the pool.
    pub fn of_source(
        layout: &Layout,
        map: Arc<PoolMap>,
        layers: Range<u32>,
        ids: Arc<[u32]>,
    ) -> Result<Self> {
        if let Some(&id) = ids.iter().find(|&&id| id >= map.blocks) {
            return Err(Error::new(ErrorKind::InvalidPlan, "block id is outside the pool")
                .with("id", id)
                .with("pool_blocks", map.blocks));
        }
        let slabs = layers.start * layout.kind.slabs()..layers.end * layout.kind.slabs();
        if slabs.end as usize > map.slab_address.len() {
            return Err(Error::new(ErrorKind::InvalidPlan, "layer is outside the pool")
                .with("layers_end", layers.end)
                .with("layers", layout.layers));
        }
        let to = ids.len();
        Ok(Self { map, slabs, ids, from: 0, to, page_bytes: layout.page_bytes() })
    }
    /// The memory the pages are in.
    pub fn device(&self) -> crate::layout::Device {
        self.map.device
    }
    /// Number of pages.
    pub fn len(&self) -> usize {
        (self.slabs.end - self.slabs.start) as usize * (self.to - self.from)
    }
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Bytes of all pages.
    pub fn bytes(&self) -> u64 {
        self.len() as u64 * u64::from(self.page_bytes)
    }
    /// The pages.
    pub fn iter(&self) -> impl Iterator<Item = Page> + '_ {
        let ids = &self.ids[self.from..self.to];
        self.slabs.clone().flat_map(move |slab| {
            let base = self.map.slab_address[slab as usize];
            ids.iter().map(move |&id| Page {
                address: base + u64::from(id) * self.map.block_stride_bytes,
                bytes: self.page_bytes,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Device, small_layout};
    use proptest::prelude::*;
    use std::collections::HashMap;

    #[test]
    fn prefix_zero_pages_and_partial_last_page() {
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
        let grid = Grid::new(&l, 0, 1 << 20).unwrap();
        assert_eq!((grid.parts(), grid.bytes()), (0, 0));
        grid.prove().unwrap();
    }

    #[test]
    fn a_huge_room_stays_within_24_bits() {
        let l = Layout { layers: 1024, ..small_layout() };
        let grid = Grid::new(&l, limits::BLOCKS_PER_ROOM_MAX, 1).unwrap();
        assert!(grid.parts() <= limits::PARTS_PER_ROOM_MAX);
        grid.prove().unwrap();
        assert!(Grid::new(&l, limits::BLOCKS_PER_ROOM_MAX + 1, 1).is_err());
    }

    #[test]
    fn the_list_must_match_the_grid() {
        let l = small_layout();
        let map = Arc::new(PoolMap::contiguous(Device::Host, 0, &l, 8));
        let grid = Grid::new(&l, 2, 1 << 20).unwrap();
        for ids in [&[1][..], &[1, 2, 3], &[5, 5], &[1, 8]] {
            let e = Plan::new(grid, &l, map.clone(), &BlockList::from_ids(ids)).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidPlan);
        }
    }

    proptest! {
        /// Every byte of every block is in exactly one part, once; no other byte is.
        #[test]
        fn parts_cover_each_page_once(
            blocks in 0u32..40, layers in 1u32..9, part_bytes in 1u64..4000, seed in any::<u64>(),
            mla in any::<bool>(),
        ) {
            let kind = if mla { crate::layout::KvKind::Mla } else { crate::layout::KvKind::Split };
            let l = Layout { layers, kind, ..small_layout() };
            let map = Arc::new(PoolMap::contiguous(Device::Host, 1 << 20, &l, 64));
            let mut ids: Vec<u32> = (0..64).collect();
            let mut s = seed | 1;
            for i in (1..64usize).rev() {
                s ^= s << 13; s ^= s >> 7; s ^= s << 17;
                ids.swap(i, (s % (i as u64 + 1)) as usize);
            }
            ids.truncate(blocks as usize);
            let grid = Grid::new(&l, blocks, part_bytes).unwrap();
            grid.prove().unwrap();
            let plan = Plan::new(grid, &l, map.clone(), &BlockList::from_ids(&ids)).unwrap();
            let mut hits: HashMap<u64, u32> = HashMap::new();
            let mut total = 0;
            for p in 0..grid.parts() {
                let mut bytes = 0;
                for page in plan.pages(PartId(p)).unwrap().iter() {
                    *hits.entry(page.address).or_default() += 1;
                    bytes += u64::from(page.bytes);
                }
                prop_assert_eq!(bytes, grid.part_bytes(PartId(p)));
                total += bytes;
            }
            prop_assert_eq!(total, grid.bytes());
            prop_assert!(hits.values().all(|&n| n == 1));
            for slab in &map.slab_address {
                for id in &ids {
                    prop_assert!(hits.remove(&(slab + u64::from(*id) * u64::from(l.page_bytes()))).is_some());
                }
            }
            prop_assert!(hits.is_empty());
        }

        /// `touching` finds exactly the parts that share a (layer, block) with the rectangle.
        #[test]
        fn touching_is_exact(
            blocks in 1u32..20, layers in 1u32..6, part_bytes in 1u64..2000,
            a in 0u32..6, b in 0u32..6, c in 0u32..20, d in 0u32..20,
        ) {
            let l = Layout { layers, ..small_layout() };
            let grid = Grid::new(&l, blocks, part_bytes).unwrap();
            let rect = Rect { layers: a.min(b)..a.max(b), blocks: c.min(d)..c.max(d) };
            let found: Vec<u32> = grid.touching(&rect).map(|p| p.0).collect();
            let expected: Vec<u32> = (0..grid.parts()).filter(|&p| {
                let r = grid.rect(PartId(p)).unwrap();
                r.layers.start < rect.layers.end && rect.layers.start < r.layers.end
                    && r.blocks.start < rect.blocks.end && rect.blocks.start < r.blocks.end
                    && !rect.layers.is_empty() && !rect.blocks.is_empty()
            }).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
