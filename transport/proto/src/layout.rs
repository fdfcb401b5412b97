//! The geometry of a KV pool, and whether two of them fit.
//!
//! A [`Layout`] says what a page means (model, heads, dtype, order); a [`PoolMap`] says where pages
//! are (addresses, strides). Layouts are compared field by field, so that a refusal names the field
//! that differs and both values.

use serde::{Deserialize, Serialize};
use std::fmt;

use crate::error::{Error, ErrorKind, Result, cut};
use crate::limits;

/// Element type of the cache. Never converted silently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Dtype {
    /// bfloat16, 2 bytes.
    Bf16,
    /// IEEE half, 2 bytes.
    Fp16,
    /// fp8 e4m3, 1 byte.
    Fp8E4m3,
    /// fp8 e5m2, 1 byte.
    Fp8E5m2,
    /// IEEE single, 4 bytes; states are often kept in it.
    Fp32,
    /// Bytes that nobody interprets.
    U8,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> u32 {
        match self {
            Self::Bf16 | Self::Fp16 => 2,
            Self::Fp8E4m3 | Self::Fp8E5m2 | Self::U8 => 1,
            Self::Fp32 => 4,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
            Self::Fp8E4m3 => "fp8_e4m3",
            Self::Fp8E5m2 => "fp8_e5m2",
            Self::Fp32 => "fp32",
            Self::U8 => "u8",
        })
    }
}

/// Order of the elements inside one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Order {
    /// token, head, dim.
    Nhd,
    /// head, token, dim.
    Hnd,
}

/// What one layer keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum KvKind {
    /// K and V in slabs of their own: two pages a block and layer.
    Split,
    /// K and V of a block side by side: two pages a block and layer as well.
    Packed,
    /// One MLA latent, the same on every rank: one page a block and layer.
    Mla,
    /// Not tokens but a fixed number of rows a request: state of recurrent layers, auxiliary
    /// outputs. A block is one row, a page its bytes in one layer; heads may be spread over ranks.
    Rows {
        /// Rows of one request.
        rows: u32,
    },
}

impl KvKind {
    /// Pages of one block in one layer.
    pub const fn slabs(self) -> u32 {
        match self {
            Self::Split | Self::Packed => 2,
            Self::Mla | Self::Rows { .. } => 1,
        }
    }
    /// How it is called where two sides are compared: split and packed differ in addresses only.
    const fn family(self) -> &'static str {
        match self {
            Self::Split | Self::Packed => "k and v",
            Self::Mla => "mla",
            Self::Rows { .. } => "rows",
        }
    }
    const fn rows(self) -> u32 {
        match self {
            Self::Rows { rows } => rows,
            _ => 0,
        }
    }
}

/// A rank's place: index and size along each axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Coordinates {
    /// Tensor parallel rank and size.
    pub tp: (u32, u32),
    /// Pipeline parallel rank and size.
    pub pp: (u32, u32),
    /// Context parallel rank and size.
    pub cp: (u32, u32),
    /// Data parallel rank and size; replicas are not compared.
    pub dp: (u32, u32),
}

impl Coordinates {
    /// A model that lives on one rank.
    pub const SINGLE: Self = Self { tp: (0, 1), pp: (0, 1), cp: (0, 1), dp: (0, 1) };
}

/// The geometry of one pool of one rank. Most models have one pool; those that keep some layers for
/// a window of tokens only, or a state besides, have one for each such group of layers.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Layout {
    /// Fingerprint of the model: weights whose caches may not be mixed differ here.
    pub model: String,
    /// Layers of this pool on this rank.
    pub layers: u32,
    /// First of them, counted among the model's layers that have such a pool.
    pub first_layer: u32,
    /// KV heads on this rank; 1 for MLA. Ranks that have the same ones stand side by side.
    pub kv_heads: u32,
    /// KV heads of the model; 1 for MLA.
    pub kv_heads_total: u32,
    /// Elements of one head's row, or of the MLA latent.
    pub head_dim: u32,
    /// Element type.
    pub dtype: Dtype,
    /// Tokens in one block; 1 where a block is a row.
    pub page_tokens: u32,
    /// Tokens at the end of the prompt that its layers look at; 0 for all.
    pub window_tokens: u32,
    /// Order inside a page.
    pub order: Order,
    /// What a layer keeps.
    pub kind: KvKind,
    /// The rank's place.
    pub at: Coordinates,
}

impl Layout {
    /// Bytes of one page: one block's K or V (or latent) in one layer.
    pub const fn page_bytes(&self) -> u32 {
        self.page_tokens * self.kv_heads * self.head_dim * self.dtype.bytes()
    }
    /// Pages of one block in all layers of this rank.
    pub const fn pages_per_block(&self) -> u32 {
        self.layers * self.kind.slabs()
    }
    /// Bytes of one block in all layers of this rank.
    pub const fn block_bytes(&self) -> u64 {
        self.page_bytes() as u64 * self.pages_per_block() as u64
    }
    /// Blocks that a prompt of `tokens` tokens takes, the last one perhaps in part.
    pub const fn blocks_for(&self, tokens: u32) -> u32 {
        match self.kind {
            KvKind::Rows { rows } => rows,
            _ => tokens.div_ceil(self.page_tokens),
        }
    }
    /// The heads of this rank, and which of how many ranks with the same heads it is.
    pub const fn heads(&self) -> Heads {
        let copies = self.kv_heads * self.at.tp.1 / self.kv_heads_total;
        let copies = if copies == 0 { 1 } else { copies };
        let first = self.at.tp.0 / copies * self.kv_heads;
        Heads { first, end: first + self.kv_heads, copy: self.at.tp.0 % copies, copies }
    }
    /// The rank's place and the shape of its pages, in words.
    pub fn place(&self) -> String {
        let (heads, at) = (self.heads(), &self.at);
        let layers = self.first_layer..self.first_layer + self.layers;
        format!(
            "tp {} of {}, pp {} of {}: layers {layers:?}, heads {:?}, {} tokens a page, {:?} {:?} {}",
            at.tp.0,
            at.tp.1,
            at.pp.0,
            at.pp.1,
            heads.first..heads.end,
            self.page_tokens,
            self.kind,
            self.order,
            self.dtype,
        )
    }
    /// Bytes of one head's row.
    pub const fn row_bytes(&self) -> u32 {
        self.head_dim * self.dtype.bytes()
    }

    /// Checks a layout that came from outside: nothing is zero, nothing overflows.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`] or [`ErrorKind::LimitExceeded`] naming the field.
    pub fn check(&self) -> Result<()> {
        let bad = |field, value: &dyn fmt::Display, why: &str| {
            Err(Error::new(ErrorKind::Malformed, format!("layout field {field} {why}"))
                .with("field", field)
                .with("found", value)
                .hint("correct this field of the pool's layout where the worker is configured"))
        };
        if self.model.is_empty() || self.model.len() > limits::NAME_BYTES_MAX {
            let max = limits::NAME_BYTES_MAX;
            return bad("model", &self.model.len(), &format!("must have 1 to {max} bytes"));
        }
        for (field, value, max) in [
            ("layers", self.layers, limits::LAYERS_MAX),
            ("kv_heads", self.kv_heads, 1 << 12),
            ("kv_heads_total", self.kv_heads_total, 1 << 12),
            ("head_dim", self.head_dim, 1 << 16),
            ("page_tokens", self.page_tokens, 1 << 16),
        ] {
            if value == 0 || value > max {
                return bad(field, &value, &format!("must be 1 to {max}"));
            }
        }
        if self.first_layer > limits::LAYERS_MAX {
            return bad("first_layer", &self.first_layer, "is out of range");
        }
        let rows = self.kind.rows();
        if let KvKind::Rows { .. } = self.kind
            && (rows == 0 || rows > limits::BLOCKS_PER_ROOM_MAX || self.page_tokens != 1)
        {
            return bad("rows", &rows, "must be at least 1, and page_tokens 1");
        }
        if rows > 0 && self.window_tokens > 0 {
            return bad("window_tokens", &self.window_tokens, "means nothing for rows");
        }
        let page = u64::from(self.page_tokens)
            * u64::from(self.kv_heads)
            * u64::from(self.head_dim)
            * u64::from(self.dtype.bytes());
        if page > u64::from(limits::PAGE_BYTES_MAX) {
            return bad("page_bytes", &page, "exceeds the largest page");
        }
        if self.page_tokens * self.kv_heads > limits::ROWS_PER_PAGE_MAX {
            return bad("page_tokens", &self.page_tokens, "times kv_heads makes too many rows");
        }
        for (axis, (index, size)) in
            [("tp", self.at.tp), ("pp", self.at.pp), ("cp", self.at.cp), ("dp", self.at.dp)]
        {
            if index >= size || size > 1 << 16 {
                return bad(axis, &format!("{index} of {size}"), "is out of range");
            }
        }
        // Every rank has the same number of heads, and every head the same number of ranks.
        if !self.kv_heads_total.is_multiple_of(self.kv_heads)
            || !(self.kv_heads * self.at.tp.1).is_multiple_of(self.kv_heads_total)
        {
            let found =
                format!("{} of {} at tp {}", self.kv_heads, self.kv_heads_total, self.at.tp.1);
            let spread = "use a number of tensor parallel ranks that divides kv_heads_total, or a multiple of it";
            return bad("kv_heads", &found, "cannot be spread evenly over the ranks")
                .map_err(|e| e.hint(spread));
        }
        Ok(())
    }

    /// Every field that keeps pages of one layout out of the other, with both values. Parallelism,
    /// the order inside a page, and K and V apart or side by side may differ; so may page sizes if
    /// one is a multiple of the other.
    pub fn differences(&self, other: &Layout) -> Vec<Difference> {
        let mut out = Vec::new();
        let mut cmp = |field: &str, fits: bool, here: String, there: String| {
            if !fits {
                out.push(Difference::new(field, here, there));
            }
        };
        let mut same = |field: &str, here: String, there: String| {
            cmp(field, here == there, here, there);
        };
        same("model", self.model.clone(), other.model.clone());
        same("kind", self.kind.family().into(), other.kind.family().into());
        same("rows", self.kind.rows().to_string(), other.kind.rows().to_string());
        same("kv_heads_total", self.kv_heads_total.to_string(), other.kv_heads_total.to_string());
        same("head_dim", self.head_dim.to_string(), other.head_dim.to_string());
        same("dtype", self.dtype.to_string(), other.dtype.to_string());
        same("window_tokens", self.window_tokens.to_string(), other.window_tokens.to_string());
        same("cp", self.at.cp.1.to_string(), other.at.cp.1.to_string());
        let (a, b) = (self.page_tokens, other.page_tokens);
        let fits = a.max(b).is_multiple_of(a.min(b).max(1));
        cmp("page_tokens", fits, a.to_string(), b.to_string());
        out
    }

    /// [`Layout::differences`] of two ranks' pools, one by one.
    pub fn pools_differ(ours: &[Layout], theirs: &[Layout]) -> Vec<Difference> {
        if ours.len() != theirs.len() {
            let (here, there) = (ours.len().to_string(), theirs.len().to_string());
            return vec![Difference::new("pools", here, there)];
        }
        let each = ours.iter().zip(theirs).enumerate();
        each.flat_map(|(n, (a, b))| {
            let name =
                move |field: String| if n == 0 { field } else { format!("pool {n} {field}") };
            a.differences(b).into_iter().map(move |d| Difference { field: name(d.field), ..d })
        })
        .collect()
    }

    /// Checks the pools of one rank: each for itself, and that they are of one model and place, the
    /// first with pages for the whole prompt.
    ///
    /// # Errors
    /// As [`Layout::check`], naming the pool.
    pub fn check_pools(pools: &[Layout]) -> Result<()> {
        let bad = |why: &str, n: usize| {
            Err(Error::new(ErrorKind::Malformed, why.to_string())
                .with("pool", n)
                .with("pools", pools.len())
                .hint("give one layout for each group of layers, all of this rank, the one with pages for the whole prompt first"))
        };
        let Some(main) = pools.first().filter(|_| pools.len() <= limits::POOLS_MAX) else {
            return bad(&format!("a rank has 1 to {} pools", limits::POOLS_MAX), 0);
        };
        for (n, pool) in pools.iter().enumerate() {
            pool.check().map_err(|e| e.with("pool", n))?;
            if pool.model != main.model || pool.at != main.at {
                return bad("all pools of a rank are of one model and place", n);
            }
        }
        if main.window_tokens > 0 || matches!(main.kind, KvKind::Rows { .. }) {
            return bad("the first pool has pages for the whole prompt", 0);
        }
        Ok(())
    }
}

/// The KV heads of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// The first, counted in the model.
    pub first: u32,
    /// Behind the last.
    pub end: u32,
    /// Of the ranks with these heads, which.
    pub copy: u32,
    /// How many ranks have them.
    pub copies: u32,
}

/// One field in which two layouts differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// The field's name.
    pub field: String,
    /// Its value on this side.
    pub here: String,
    /// Its value on the other side.
    pub there: String,
}

impl Difference {
    /// Values are cut to [`limits::REFUSAL_TEXT_BYTES_MAX`]: what one side says of itself must not
    /// make an answer that the other side refuses to read.
    pub fn new(field: &str, here: String, there: String) -> Self {
        Self { field: field.to_string(), here: cut(here), there: cut(there) }
    }
}

/// Which memory an address is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Device {
    /// Host memory. It needs no GPU id.
    Host,
    /// The GPU with this ordinal in the process that registered it.
    Gpu(u32),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Gpu(n) => write!(f, "gpu{n}"),
        }
    }
}

/// Where the pages of a pool are. The page of block `b` in slab `s` (slabs in the order
/// layer 0 K, layer 0 V, layer 1 K, …) starts at `slab_address[s] + b * block_stride_bytes`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolMap {
    /// The memory that all addresses are in.
    pub device: Device,
    /// Start of each slab.
    pub slab_address: Vec<u64>,
    /// Distance between two blocks of a slab.
    pub block_stride_bytes: u64,
    /// Blocks in the pool.
    pub blocks: u32,
}

impl PoolMap {
    /// A pool that is one piece: slabs one behind the other, blocks dense in each; packed ones with
    /// K and V of a block side by side.
    pub fn contiguous(device: Device, address: u64, layout: &Layout, blocks: u32) -> Self {
        let page = u64::from(layout.page_bytes());
        let together = if layout.kind == KvKind::Packed { 2 } else { 1 };
        let slab_bytes = page * u64::from(blocks) * together;
        let slabs = u64::from(layout.pages_per_block());
        let start = |s: u64| address + s / together * slab_bytes + s % together * page;
        Self {
            device,
            slab_address: (0..slabs).map(start).collect(),
            block_stride_bytes: page * together,
            blocks,
        }
    }
    /// Bytes of a pool made by [`PoolMap::contiguous`].
    pub const fn contiguous_bytes(layout: &Layout, blocks: u32) -> u64 {
        layout.block_bytes() * blocks as u64
    }

    /// Checks that the map fits its layout and that no two pages share a byte.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`] naming the slab and the addresses.
    pub fn check(&self, layout: &Layout) -> Result<()> {
        let page = u64::from(layout.page_bytes());
        let bad = |what: &str| Error::new(ErrorKind::Malformed, format!("pool map: {what}"));
        if self.slab_address.len() != layout.pages_per_block() as usize {
            return Err(bad("wrong number of slabs")
                .with("found", self.slab_address.len())
                .with("expected", layout.pages_per_block()));
        }
        if self.blocks == 0 || self.blocks > limits::POOL_BLOCKS_MAX {
            return Err(bad("number of blocks out of range").with("found", self.blocks));
        }
        if self.block_stride_bytes < page || self.block_stride_bytes > 1 << 40 {
            return Err(bad("block stride is not between a page and 1 TiB")
                .with("stride", self.block_stride_bytes)
                .with("page_bytes", page));
        }
        let between = self.block_stride_bytes.checked_mul(u64::from(self.blocks - 1));
        let Some(extent) = between.and_then(|bytes| bytes.checked_add(page)) else {
            return Err(bad("slab is longer than the address space")
                .with("stride", self.block_stride_bytes)
                .with("blocks", self.blocks));
        };
        let mut sorted: Vec<(u64, usize)> =
            self.slab_address.iter().copied().zip(0usize..).collect();
        sorted.sort_unstable();
        if let Some(&(start, slab)) = sorted.iter().find(|(a, _)| a.checked_add(extent).is_none()) {
            return Err(bad("slab ends beyond the address space")
                .with("slab", slab)
                .with("start", format!("{start:#x}")));
        }
        // Slabs either lie apart or are interleaved block by block. Interleaved ones share a
        // stride, so they are disjoint exactly when their offsets modulo the stride are.
        let mut from = 0;
        while from < sorted.len() {
            let mut to = from + 1;
            let mut end = sorted[from].0 + extent;
            while to < sorted.len() && sorted[to].0 < end {
                end = sorted[to].0 + extent;
                to += 1;
            }
            let mut residues: Vec<(u64, usize)> =
                sorted[from..to].iter().map(|&(a, s)| (a % self.block_stride_bytes, s)).collect();
            residues.sort_unstable();
            let wrap = residues[0].0 + self.block_stride_bytes;
            for i in 0..residues.len() {
                let next = residues.get(i + 1).map_or((wrap, residues[0].1), |&r| r);
                if residues[i].0 + page > next.0 {
                    return Err(bad("two slabs share bytes")
                        .with("slab", residues[i].1)
                        .with("and", next.1)
                        .with("page_bytes", page)
                        .with("stride", self.block_stride_bytes));
                }
            }
            from = to;
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) fn small_layout() -> Layout {
    Layout {
        model: "tiny".into(),
        layers: 4,
        first_layer: 0,
        kv_heads: 2,
        kv_heads_total: 2,
        head_dim: 8,
        dtype: Dtype::Bf16,
        page_tokens: 4,
        window_tokens: 0,
        order: Order::Nhd,
        kind: KvKind::Split,
        at: Coordinates::SINGLE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_converted_is_named_with_both_values() {
        let a = small_layout();
        let b = Layout { dtype: Dtype::Fp8E4m3, page_tokens: 6, ..a.clone() };
        let found = a.differences(&b);
        let text: Vec<String> =
            found.iter().map(|d| format!("{} {} {}", d.field, d.here, d.there)).collect();
        assert_eq!(text, ["dtype bf16 fp8_e4m3", "page_tokens 4 6"]);
        let other = Layout {
            page_tokens: 16,
            order: Order::Hnd,
            kind: KvKind::Packed,
            kv_heads: 1,
            at: Coordinates { tp: (1, 2), ..Coordinates::SINGLE },
            layers: 2,
            first_layer: 2,
            ..a.clone()
        };
        assert_eq!(a.differences(&other), []);
    }

    #[test]
    fn heads_of_a_rank_follow_from_its_place() {
        let at = |heads, total, tp| {
            let at = Coordinates { tp, ..Coordinates::SINGLE };
            let l = Layout { kv_heads: heads, kv_heads_total: total, at, ..small_layout() };
            l.check().unwrap();
            let h = l.heads();
            (h.first, h.end, h.copy, h.copies)
        };
        assert_eq!(at(8, 8, (0, 1)), (0, 8, 0, 1));
        assert_eq!(at(2, 8, (3, 4)), (6, 8, 0, 1));
        assert_eq!(at(1, 4, (5, 8)), (2, 3, 1, 2));
        assert_eq!(at(1, 1, (3, 8)), (0, 1, 3, 8));
        assert_eq!(at(4, 4, (1, 2)), (0, 4, 1, 2));
    }

    #[test]
    fn hostile_layouts_are_refused() {
        let good = small_layout();
        good.check().unwrap();
        for bad in [
            Layout { layers: 0, ..good.clone() },
            Layout { kv_heads: 3, ..good.clone() },
            Layout { head_dim: u32::MAX, ..good.clone() },
            Layout {
                page_tokens: 1 << 16,
                kv_heads: 1 << 12,
                kv_heads_total: 1 << 12,
                ..good.clone()
            },
            Layout { model: String::new(), ..good.clone() },
            Layout { at: Coordinates { tp: (1, 1), ..Coordinates::SINGLE }, ..good.clone() },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn pool_maps_may_be_apart_or_interleaved_but_never_overlap() {
        let layout = small_layout();
        let page = u64::from(layout.page_bytes());
        let slabs = u64::from(layout.pages_per_block());
        PoolMap::contiguous(Device::Host, 4096, &layout, 10).check(&layout).unwrap();
        let interleaved = PoolMap {
            device: Device::Host,
            slab_address: (0..slabs).map(|s| 4096 + s * page).collect(),
            block_stride_bytes: page * slabs,
            blocks: 10,
        };
        interleaved.check(&layout).unwrap();
        let mut bad = interleaved.clone();
        bad.slab_address[3] -= 1;
        assert!(bad.check(&layout).is_err());
        let mut bad = interleaved.clone();
        bad.block_stride_bytes -= 1;
        assert!(bad.check(&layout).is_err());
        let mut bad = interleaved;
        bad.slab_address[0] = u64::MAX - 5;
        assert!(bad.check(&layout).is_err());
    }
}
