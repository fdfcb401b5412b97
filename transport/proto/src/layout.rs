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
}

impl Dtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> u32 {
        match self {
            Self::Bf16 | Self::Fp16 => 2,
            Self::Fp8E4m3 | Self::Fp8E5m2 => 1,
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

/// What one layer keeps per token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum KvKind {
    /// K and V in slabs of their own: two pages a block and layer.
    Split,
    /// One MLA latent, the same on every rank: one page a block and layer.
    Mla,
}

impl KvKind {
    /// Pages of one block in one layer.
    pub const fn slabs(self) -> u32 {
        match self {
            Self::Split => 2,
            Self::Mla => 1,
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

/// The geometry of one rank's KV pool.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Layout {
    /// Fingerprint of the model: weights whose caches may not be mixed differ here.
    pub model: String,
    /// Layers on this rank.
    pub layers: u32,
    /// First of them in the model.
    pub first_layer: u32,
    /// KV heads on this rank; 1 for MLA.
    pub kv_heads: u32,
    /// KV heads of the model; 1 for MLA.
    pub kv_heads_total: u32,
    /// Elements of one head's row, or of the MLA latent.
    pub head_dim: u32,
    /// Element type.
    pub dtype: Dtype,
    /// Tokens in one block.
    pub page_tokens: u32,
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
    /// Blocks that `tokens` tokens fill, the last one perhaps in part.
    pub const fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.page_tokens)
    }

    /// Checks a layout that came from outside: nothing is zero, nothing overflows.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`] or [`ErrorKind::LimitExceeded`] naming the field.
    pub fn check(&self) -> Result<()> {
        let bad = |field, value: &dyn fmt::Display, why: &str| {
            Err(Error::new(ErrorKind::Malformed, format!("layout field {field} {why}"))
                .with("field", field)
                .with("found", value))
        };
        if self.model.is_empty() || self.model.len() > limits::NAME_BYTES_MAX {
            return bad("model", &self.model.len(), "must have 1 to 63 bytes");
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
        if self.kv_heads > self.kv_heads_total {
            return bad("kv_heads", &self.kv_heads, "exceeds kv_heads_total");
        }
        let page = u64::from(self.page_tokens)
            * u64::from(self.kv_heads)
            * u64::from(self.head_dim)
            * u64::from(self.dtype.bytes());
        if page > u64::from(limits::PAGE_BYTES_MAX) {
            return bad("page_bytes", &page, "exceeds the largest page");
        }
        for (axis, (index, size)) in
            [("tp", self.at.tp), ("pp", self.at.pp), ("cp", self.at.cp), ("dp", self.at.dp)]
        {
            if index >= size || size > 1 << 16 {
                return bad(axis, &format!("{index} of {size}"), "is out of range");
            }
        }
        Ok(())
    }

    /// Every field in which two layouts differ, with both values.
    pub fn differences(&self, other: &Layout) -> Vec<Difference> {
        let mut out = Vec::new();
        let mut cmp = |field: &str, here: String, there: String| {
            if here != there {
                out.push(Difference::new(field, here, there));
            }
        };
        cmp("model", self.model.clone(), other.model.clone());
        cmp("layers", self.layers.to_string(), other.layers.to_string());
        cmp("first_layer", self.first_layer.to_string(), other.first_layer.to_string());
        cmp("kv_heads", self.kv_heads.to_string(), other.kv_heads.to_string());
        cmp("kv_heads_total", self.kv_heads_total.to_string(), other.kv_heads_total.to_string());
        cmp("head_dim", self.head_dim.to_string(), other.head_dim.to_string());
        cmp("dtype", self.dtype.to_string(), other.dtype.to_string());
        cmp("page_tokens", self.page_tokens.to_string(), other.page_tokens.to_string());
        cmp("order", format!("{:?}", self.order), format!("{:?}", other.order));
        cmp("kind", format!("{:?}", self.kind), format!("{:?}", other.kind));
        let axis = |a: (u32, u32)| format!("{} of {}", a.0, a.1);
        cmp("tp", axis(self.at.tp), axis(other.at.tp));
        cmp("pp", axis(self.at.pp), axis(other.at.pp));
        cmp("cp", axis(self.at.cp), axis(other.at.cp));
        out
    }

    /// Whether pages of `source` may be written into pages of `self` byte for byte.
    ///
    /// # Errors
    /// [`ErrorKind::Incompatible`] with every field that differs and both values.
    pub fn accepts(&self, source: &Layout) -> Result<()> {
        let differences = self.differences(source);
        if differences.is_empty() {
            return Ok(());
        }
        let mut e = Error::new(
            ErrorKind::Incompatible,
            format!("layouts differ in {}", differences[0].field),
        );
        for d in &differences {
            e = e.with("differs", format!("{}: decode {} / prefill {}", d.field, d.here, d.there));
        }
        Err(e.hint("pair workers of one model with the same parallelism, dtype and page size"))
    }
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
    /// A pool that is one piece: slabs one behind the other, blocks dense in each.
    pub fn contiguous(device: Device, address: u64, layout: &Layout, blocks: u32) -> Self {
        let stride = u64::from(layout.page_bytes());
        let slab_bytes = stride * u64::from(blocks);
        let slabs = u64::from(layout.pages_per_block());
        Self {
            device,
            slab_address: (0..slabs).map(|s| address + s * slab_bytes).collect(),
            block_stride_bytes: stride,
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
        order: Order::Nhd,
        kind: KvKind::Split,
        at: Coordinates::SINGLE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_the_field_and_both_values() {
        let a = small_layout();
        let b = Layout { dtype: Dtype::Fp8E4m3, page_tokens: 16, ..a.clone() };
        let e = a.accepts(&b).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Incompatible);
        let text = e.to_string();
        assert!(text.contains("differs=dtype: decode bf16 / prefill fp8_e4m3"), "{text}");
        assert!(text.contains("differs=page_tokens: decode 4 / prefill 16"), "{text}");
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
