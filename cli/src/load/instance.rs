//! An instance as a file describes it.
//!
//! In: TOML, with a model by name or its pools one by one. Out: the pools of every rank, checked.
//! Keys that nobody knows are refused, so that a misspelt one is not taken for a default.

use std::io::Read;
use std::path::Path;

use kvlane_proto::layout::{Coordinates, Dtype, KvKind, Order};
use kvlane_proto::{Error, ErrorKind, Layout, Result};
use serde::Deserialize;

use super::models;

/// Longest file that is read.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Most ranks of one instance.
const RANKS_MAX: u64 = 4096;

/// What a file says; what stands beside `model` goes for all pools.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Instance {
    /// A known model; with `pools`, the name of one that is not.
    model: String,
    #[serde(default = "one")]
    tp: u32,
    #[serde(default = "one")]
    pp: u32,
    #[serde(default = "one")]
    cp: u32,
    page_tokens: Option<u32>,
    dtype: Option<DtypeName>,
    order: Option<OrderName>,
    kv: Option<Kv>,
    #[serde(default)]
    pub(crate) blocks: Lists,
    #[serde(default)]
    pools: Vec<Pool>,
}

/// One pool of the whole model, as all ranks of one stage have it together.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Pool {
    layers: u32,
    kv_heads: u32,
    head_dim: u32,
    /// Makes it a pool whose blocks are rows: so many for each request.
    rows: Option<u32>,
    window_tokens: Option<u32>,
    page_tokens: Option<u32>,
    dtype: Option<DtypeName>,
    order: Option<OrderName>,
    kv: Option<Kv>,
}

/// What lists of blocks look like.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Lists {
    #[default]
    Contiguous,
    Random,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum DtypeName {
    Bf16,
    Fp16,
    #[serde(rename = "fp8_e4m3")]
    Fp8E4m3,
    #[serde(rename = "fp8_e5m2")]
    Fp8E5m2,
    Fp32,
    U8,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum OrderName {
    Nhd,
    Hnd,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kv {
    Split,
    Packed,
    Mla,
}

const fn one() -> u32 {
    1
}

impl From<DtypeName> for Dtype {
    fn from(name: DtypeName) -> Self {
        match name {
            DtypeName::Bf16 => Self::Bf16,
            DtypeName::Fp16 => Self::Fp16,
            DtypeName::Fp8E4m3 => Self::Fp8E4m3,
            DtypeName::Fp8E5m2 => Self::Fp8E5m2,
            DtypeName::Fp32 => Self::Fp32,
            DtypeName::U8 => Self::U8,
        }
    }
}

impl From<OrderName> for Order {
    fn from(name: OrderName) -> Self {
        match name {
            OrderName::Nhd => Self::Nhd,
            OrderName::Hnd => Self::Hnd,
        }
    }
}

impl From<Kv> for KvKind {
    fn from(name: Kv) -> Self {
        match name {
            Kv::Split => Self::Split,
            Kv::Packed => Self::Packed,
            Kv::Mla => Self::Mla,
        }
    }
}

impl Instance {
    /// Reads a file.
    ///
    /// # Errors
    /// [`ErrorKind::Io`]; [`ErrorKind::Config`] naming file, line and, for a key or value that is
    /// not known, those that are.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let mut text = String::new();
        std::fs::File::open(path)
            .and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text))
            .map_err(|e| {
                Error::new(ErrorKind::Io, "cannot read the description of an instance")
                    .with("file", path.display())
                    .caused_by(e)
            })?;
        if text.len() as u64 > FILE_BYTES_MAX {
            return Err(Error::new(ErrorKind::LimitExceeded, "the file is too long")
                .with("file", path.display())
                .with("limit_bytes", FILE_BYTES_MAX));
        }
        Self::parse(&text).map_err(|e| e.with("file", path.display()))
    }
    fn parse(text: &str) -> Result<Self> {
        toml::from_str(text).map_err(|e| {
            let at = e.span().map_or(0, |span| span.start);
            let line = text.get(..at).map_or(0, |before| before.matches('\n').count() + 1);
            Error::new(ErrorKind::Config, format!("not an instance: {}", e.message()))
                .with("line", line)
        })
    }
    /// The pools of each rank: all tensor parallel ranks of the first stage, then of the next, and
    /// so on for each context parallel rank.
    ///
    /// # Errors
    /// As [`Layout::check_pools`] and [`models::pools`], naming the rank;
    /// [`ErrorKind::LimitExceeded`] for too many ranks.
    pub(crate) fn ranks(&self) -> Result<Vec<Vec<Layout>>> {
        let (tp, pp, cp) = (self.tp, self.pp, self.cp);
        let count = u64::from(tp).saturating_mul(pp.into()).saturating_mul(cp.into());
        if count == 0 || count > RANKS_MAX {
            return Err(Error::new(ErrorKind::LimitExceeded, "number of ranks is out of range")
                .with("tp", tp)
                .with("pp", pp)
                .with("cp", cp)
                .with("limit", RANKS_MAX));
        }
        let whole = self.whole()?;
        let stage = |layers: u32, p: u32| (u64::from(layers) * u64::from(p) / u64::from(pp)) as u32;
        let mut ranks = Vec::with_capacity(count as usize);
        for c in 0..cp {
            for p in 0..pp {
                for t in 0..tp {
                    let at = Coordinates { tp: (t, tp), pp: (p, pp), cp: (c, cp), dp: (0, 1) };
                    let of_rank = |pool: &Layout| Layout {
                        first_layer: stage(pool.layers, p),
                        layers: stage(pool.layers, p + 1) - stage(pool.layers, p),
                        kv_heads: (pool.kv_heads_total / tp).max(1),
                        at,
                        ..pool.clone()
                    };
                    let pools: Vec<Layout> = whole.iter().map(of_rank).collect();
                    Layout::check_pools(&pools).map_err(|e| e.with("rank", ranks.len()))?;
                    ranks.push(pools);
                }
            }
        }
        Ok(ranks)
    }
    /// The pools of the whole model on one rank.
    fn whole(&self) -> Result<Vec<Layout>> {
        let page_tokens = self.page_tokens.unwrap_or(models::PAGE_TOKENS);
        if !self.pools.is_empty() {
            return Ok(self.pools.iter().map(|p| p.layout(self, page_tokens)).collect());
        }
        let mut pools =
            models::pools(&self.model, page_tokens, (0, 1)).map_err(|e| match e.kind() {
                ErrorKind::NotFound => {
                    e.hint("use one of the known names, or describe it with [[pools]]")
                }
                _ => e,
            })?;
        for pool in &mut pools {
            let latent = pool.kind == KvKind::Mla;
            match self.kv.map(KvKind::from) {
                Some(kind) if latent == (kind == KvKind::Mla) => pool.kind = kind,
                Some(_) => {
                    return Err(Error::new(ErrorKind::Config, "the model keeps something else")
                        .with("model", &self.model)
                        .with("key", "kv")
                        .with("known", if latent { "mla" } else { "split, packed" }));
                }
                None => {}
            }
            pool.dtype = self.dtype.map_or(pool.dtype, Dtype::from);
            pool.order = self.order.map_or(pool.order, Order::from);
        }
        Ok(pools)
    }
}

impl Pool {
    fn layout(&self, all: &Instance, page_tokens: u32) -> Layout {
        let kind = self.kv.or(all.kv).map_or(KvKind::Split, KvKind::from);
        let (kind, page_tokens) = match self.rows {
            // A block is a row, whatever a page of the others is.
            Some(rows) => (KvKind::Rows { rows }, self.page_tokens.unwrap_or(1)),
            None => (kind, self.page_tokens.unwrap_or(page_tokens)),
        };
        Layout {
            model: all.model.clone(),
            layers: self.layers,
            first_layer: 0,
            kv_heads: self.kv_heads,
            kv_heads_total: self.kv_heads,
            head_dim: self.head_dim,
            dtype: self.dtype.or(all.dtype).map_or(Dtype::Bf16, Dtype::from),
            page_tokens,
            window_tokens: self.window_tokens.unwrap_or(0),
            order: self.order.or(all.order).map_or(Order::Nhd, Order::from),
            kind,
            at: Coordinates::SINGLE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        Instance::parse(text).and_then(|i| i.ranks()).unwrap_err().to_string()
    }

    #[test]
    fn ranks_are_counted_by_stage_and_share_heads_and_layers() {
        let text = "model = 'deepseek-v3'\ntp = 2\npp = 4\ndtype = 'fp8_e4m3'";
        let ranks = Instance::parse(text).unwrap().ranks().unwrap();
        let places: Vec<_> =
            ranks.iter().map(|r| (r[0].at.pp.0, r[0].at.tp.0, r[0].first_layer)).collect();
        assert_eq!(places[..4], [(0, 0, 0), (0, 1, 0), (1, 0, 15), (1, 1, 15)]);
        assert_eq!(ranks.iter().map(|r| r[0].layers).sum::<u32>(), 2 * 61);
        assert!(ranks.iter().all(|r| r[0].kind == KvKind::Mla && r[0].dtype == Dtype::Fp8E4m3));
        let text = "model = 'mine'\ntp = 2\norder = 'hnd'\npage_tokens = 8\n\
                    [[pools]]\nlayers = 3\nkv_heads = 4\nhead_dim = 16\n\
                    [[pools]]\nlayers = 3\nkv_heads = 4\nhead_dim = 16\nwindow_tokens = 9\nkv = 'packed'\n\
                    [[pools]]\nlayers = 1\nkv_heads = 1\nhead_dim = 64\nrows = 2\ndtype = 'u8'";
        let ranks = Instance::parse(text).unwrap().ranks().unwrap();
        let found: Vec<_> = ranks[1]
            .iter()
            .map(|l| (l.kind, l.kv_heads, l.page_tokens, l.window_tokens, l.order, l.dtype))
            .collect();
        assert_eq!(
            found,
            [
                (KvKind::Split, 2, 8, 0, Order::Hnd, Dtype::Bf16),
                (KvKind::Packed, 2, 8, 9, Order::Hnd, Dtype::Bf16),
                (KvKind::Rows { rows: 2 }, 1, 1, 0, Order::Hnd, Dtype::U8),
            ]
        );
    }

    #[test]
    fn what_is_not_known_is_refused_with_what_is() {
        let e = refused("model = 'tiny'\npage_size = 16");
        for word in ["page_size", "page_tokens", "order", "line=2"] {
            assert!(e.contains(word), "{e}");
        }
        let pool = "model = 'mine'\n[[pools]]\nlayers = 1\nkv_heads = 1\nhead_dim = 1\n";
        let e = refused(&format!("{pool}heads = 2"));
        assert!(e.contains("heads") && e.contains("window_tokens"), "{e}");
        for (key, known) in [
            ("order = 'dhn'", "hnd"),
            ("dtype = 'int4'", "fp8_e4m3"),
            ("kv = 'k'", "packed"),
            ("blocks = 'any'", "random"),
            ("kv = 'mla'", "split, packed"),
        ] {
            let e = refused(&format!("model = 'tiny'\n{key}"));
            assert!(e.contains(known), "{e}");
        }
        assert!(refused("model = 'tini'").contains("llama-3.1-8b"));
        assert!(refused("tp = 2").contains("model"));
        assert!(refused("model = 'tiny'\ntp = 0").contains("tp=0"));
        assert!(refused("model = 'tiny'\ntp = 4000000000\npp = 4000000000").contains("limit=4096"));
        // More stages than layers; heads that cannot be shared.
        assert!(refused("model = 'tiny'\npp = 5").contains("layers"));
        assert!(refused("model = 'llama-3.1-8b'\ntp = 3").contains("spread"));
        assert!(refused(&format!("{pool}rows = 2\nwindow_tokens = 4")).contains("window_tokens"));
    }
}
