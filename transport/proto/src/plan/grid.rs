//! How a room is cut into parts.

use serde::{Deserialize, Serialize};
use std::ops::Range;

use crate::error::{Error, ErrorKind, Result};
use crate::ids::PartId;
use crate::layout::{KvKind, Layout};
use crate::limits;
use crate::plan::Share;

/// What a room moves, in tokens: the prompt, less what the decode has already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Tokens of the prompt.
    pub tokens: u32,
    /// Tokens at its start that the decode has already; a multiple of its page sizes, or all.
    pub prefix_tokens: u32,
}

impl Span {
    /// The first token of a pool that is to be moved.
    pub(crate) fn first_token(&self, window_tokens: u32) -> u32 {
        let seen = if window_tokens == 0 { 0 } else { self.tokens.saturating_sub(window_tokens) };
        self.prefix_tokens.max(seen)
    }
    /// The blocks of the receiver's pool that are filled, counted from the prompt's first.
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
        if let KvKind::Rows { rows } = layout.kind {
            return Ok(0..rows);
        }
        let all = layout.blocks_for(self.tokens);
        if self.prefix_tokens == self.tokens {
            return Ok(all..all);
        }
        if !self.prefix_tokens.is_multiple_of(layout.page_tokens) {
            return Err(bad("prefix ends inside a block").hint("round it down to whole pages"));
        }
        Ok(self.first_token(layout.window_tokens) / layout.page_tokens..all)
    }
}

/// A rectangle of one pool of a room: layers × cells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rect {
    /// The pool.
    pub pool: u32,
    /// Layers of the share, counted from its first.
    pub layers: Range<u32>,
    /// Cells, counted from the prompt's first.
    pub cells: Range<u32>,
}

/// One pool of a grid.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PoolGrid {
    first_part: u32,
    cells: Range<u32>,
    layers: u32,
    cells_per_part: u32,
    layers_per_part: u32,
    /// Of one cell in all slabs of one layer.
    cell_bytes: u64,
}

/// How what one rank sends of a room is cut into parts. Parts are numbered pool by pool, layer group
/// by layer group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grid {
    pools: Vec<PoolGrid>,
    parts: u32,
}

impl Grid {
    /// The grid of a room, with parts of about `part_bytes`.
    ///
    /// A part holds as many cells of one layer as fit; short rooms group layers. Where that would
    /// need more than [`limits::PARTS_PER_ROOM_MAX`] parts, parts grow.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidPlan`] if the prefix is longer than the prompt,
    /// [`ErrorKind::LimitExceeded`] if the room is too long.
    pub fn new(share: &Share, span: &Span, part_bytes: u64) -> Result<Self> {
        if span.prefix_tokens > span.tokens {
            return Err(Error::new(ErrorKind::InvalidPlan, "prefix is longer than the prompt")
                .with("prefix_tokens", span.prefix_tokens)
                .with("tokens", span.tokens));
        }
        let mut part_bytes = part_bytes.max(1);
        loop {
            let mut grid = Self { pools: Vec::with_capacity(share.pools().len()), parts: 0 };
            let mut parts = 0;
            for (n, pool) in share.pools().iter().enumerate() {
                let cells = pool.cells(span);
                let count = cells.end - cells.start;
                if count > limits::BLOCKS_PER_ROOM_MAX {
                    return Err(Error::new(
                        ErrorKind::LimitExceeded,
                        "too many blocks in one room",
                    )
                    .with("pool", n)
                    .with("found", count)
                    .with("limit", limits::BLOCKS_PER_ROOM_MAX));
                }
                let cell_bytes = u64::from(pool.cell_bytes()) * u64::from(pool.slabs());
                let fit = (part_bytes / cell_bytes.max(1)).max(1);
                let cells_per_part = fit.min(u64::from(count.max(1))) as u32;
                let layers = pool.layer_count();
                let layers_per_part =
                    (fit / u64::from(cells_per_part)).clamp(1, u64::from(layers.max(1))) as u32;
                let first_part = parts as u32;
                let pool = PoolGrid {
                    first_part,
                    cells,
                    layers,
                    cells_per_part,
                    layers_per_part,
                    cell_bytes,
                };
                parts += u64::from(pool.columns()) * u64::from(pool.layer_groups());
                if parts > u64::from(limits::PARTS_PER_ROOM_MAX) {
                    break;
                }
                grid.pools.push(pool);
            }
            if parts <= u64::from(limits::PARTS_PER_ROOM_MAX) {
                grid.parts = parts as u32;
                return Ok(grid);
            }
            part_bytes *= 2;
        }
    }
    /// Number of parts; 0 for a room without pages.
    pub fn parts(&self) -> u32 {
        self.parts
    }
    /// The rectangle of a part.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidPlan`] if the grid has no such part.
    pub fn rect(&self, part: PartId) -> Result<Rect> {
        let pool = match self.pools.partition_point(|p| p.first_part <= part.0).checked_sub(1) {
            Some(pool) if part.0 < self.parts => pool,
            _ => {
                return Err(Error::new(ErrorKind::InvalidPlan, "the room has no such part")
                    .with("part", part.0)
                    .with("parts", self.parts));
            }
        };
        Ok(self.pools[pool].rect(pool as u32, part.0 - self.pools[pool].first_part))
    }
    /// Bytes of a part; 0 if there is no such part.
    pub fn part_bytes(&self, part: PartId) -> u64 {
        self.rect(part).map_or(0, |r| {
            let cell = self.pools.get(r.pool as usize).map_or(0, |p| p.cell_bytes);
            u64::from(r.layers.end - r.layers.start) * u64::from(r.cells.end - r.cells.start) * cell
        })
    }
    /// Bytes of the room, as far as this rank sends them.
    pub fn bytes(&self) -> u64 {
        let of = |p: &PoolGrid| u64::from(p.count()) * u64::from(p.layers) * p.cell_bytes;
        self.pools.iter().map(of).sum()
    }
    /// Parts whose rectangle lies in `rect` at least in part.
    pub fn touching(&self, rect: &Rect) -> impl Iterator<Item = PartId> + use<> {
        let pool = self.pools.get(rect.pool as usize).cloned();
        let rect = rect.clone();
        pool.into_iter().flat_map(move |p| {
            let cut = |want: &Range<u32>, all: Range<u32>, per: u32| {
                let (start, end) = (want.start.max(all.start), want.end.min(all.end));
                if start >= end {
                    0..0
                } else {
                    (start - all.start) / per..(end - 1 - all.start) / per + 1
                }
            };
            let columns = p.columns();
            let groups = cut(&rect.layers, 0..p.layers, p.layers_per_part);
            let cells = cut(&rect.cells, p.cells.clone(), p.cells_per_part);
            groups.flat_map(move |g| {
                cells.clone().map(move |c| PartId(p.first_part + g * columns + c))
            })
        })
    }
    /// Proves that the parts tile the room: each (pool, layer, cell) lies in exactly one part.
    ///
    /// Parts are full rectangles of regular grids, so it is enough that both axes are tiled without
    /// gap or overlap, which is checked here edge by edge.
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] naming the edge; that would be a defect of this module.
    pub fn prove(&self) -> Result<()> {
        let mut next = 0;
        for (n, p) in self.pools.iter().enumerate() {
            let defect = |axis: &str, at: u32| {
                Error::new(ErrorKind::Internal, "parts do not cover the room exactly once")
                    .with("pool", n)
                    .with("axis", axis)
                    .with("at", at)
            };
            if p.first_part != next {
                return Err(defect("parts", next));
            }
            let (columns, groups) = (p.columns(), p.layer_groups());
            let tiled = |edges: &mut dyn Iterator<Item = Range<u32>>, all: Range<u32>| {
                let mut at = all.start;
                for r in edges {
                    if r.start != at || r.is_empty() {
                        return Err(at);
                    }
                    at = r.end;
                }
                if at == all.end { Ok(()) } else { Err(at) }
            };
            if columns > 0 {
                tiled(&mut (0..columns).map(|c| p.rect(0, c).cells), p.cells.clone())
                    .map_err(|at| defect("cells", at))?;
                tiled(&mut (0..groups).map(|g| p.rect(0, g * columns).layers), 0..p.layers)
                    .map_err(|at| defect("layers", at))?;
            }
            next += columns * groups;
        }
        if next != self.parts {
            return Err(Error::new(ErrorKind::Internal, "parts are not counted right")
                .with("found", next)
                .with("expected", self.parts));
        }
        Ok(())
    }
}

impl PoolGrid {
    fn count(&self) -> u32 {
        self.cells.end - self.cells.start
    }
    fn columns(&self) -> u32 {
        self.count().div_ceil(self.cells_per_part)
    }
    fn layer_groups(&self) -> u32 {
        self.layers.div_ceil(self.layers_per_part)
    }
    fn rect(&self, pool: u32, part: u32) -> Rect {
        let (group, column) = (part / self.columns(), part % self.columns());
        let layer = group * self.layers_per_part;
        let cell = self.cells.start + column * self.cells_per_part;
        Rect {
            pool,
            layers: layer..layer + self.layers_per_part.min(self.layers - layer),
            cells: cell..cell + self.cells_per_part.min(self.cells.end - cell),
        }
    }
}
