//! KV geometry of models by name.
//!
//! In: a name and a page size in tokens. Out: the [`Layout`] of the whole model on one rank (TP1),
//! in NHD order. Layers, KV heads and head sizes are those of the published models; a `-fp8` name
//! is the same model with a cache of one byte per element.

use kvlane_proto::layout::{Coordinates, Dtype, KvKind, Order};
use kvlane_proto::{Error, ErrorKind, Layout, Result};

/// Tokens in a page unless the user says otherwise.
pub(crate) const PAGE_TOKENS: u32 = 16;

/// What a layer keeps per token: `heads` rows of `dim` elements.
struct Model {
    name: &'static str,
    layers: u32,
    heads: u32,
    dim: u32,
    kind: KvKind,
    /// Whether people run it with an fp8 cache.
    fp8: bool,
}

const fn gqa(name: &'static str, layers: u32, heads: u32, dim: u32, fp8: bool) -> Model {
    Model { name, layers, heads, dim, kind: KvKind::Split, fp8 }
}

/// `tiny` is for demonstrations: 1 KiB per token, so that a room of 1000 tokens stays under 1 MiB.
/// MLA keeps one latent (512) and its rotary part (64) per token instead of heads.
const MODELS: [Model; 6] = [
    gqa("tiny", 4, 2, 32, false),
    gqa("llama-3.1-8b", 32, 8, 128, false),
    gqa("llama-3.1-70b", 80, 8, 128, true),
    gqa("qwen3-235b", 94, 4, 128, false),
    gqa("gpt-oss-120b", 36, 8, 64, true),
    Model {
        name: "deepseek-v3",
        layers: 61,
        heads: 1,
        dim: 512 + 64,
        kind: KvKind::Mla,
        fp8: true,
    },
];

/// Every name that [`layout`] knows.
pub(crate) fn names() -> impl Iterator<Item = String> {
    MODELS.iter().flat_map(|m| {
        std::iter::once(m.name.to_string()).chain(m.fp8.then(|| format!("{}-fp8", m.name)))
    })
}

/// The layout of model `name` with `page_tokens` tokens in a page, on one rank.
///
/// # Errors
/// [`ErrorKind::NotFound`] listing all names; [`ErrorKind::Malformed`] if the page size is 0 or
/// absurd.
pub(crate) fn layout(name: &str, page_tokens: u32) -> Result<Layout> {
    let (base, fp8) = name.strip_suffix("-fp8").map_or((name, false), |base| (base, true));
    let model = MODELS.iter().find(|m| m.name == base && (m.fp8 || !fp8)).ok_or_else(|| {
        Error::new(ErrorKind::NotFound, "unknown model")
            .with("asked", format!("{:?}", name.chars().take(80).collect::<String>()))
            .with("known", names().collect::<Vec<_>>().join(" "))
            .hint("use one of the known names")
    })?;
    let layout = Layout {
        model: model.name.into(),
        layers: model.layers,
        first_layer: 0,
        kv_heads: model.heads,
        kv_heads_total: model.heads,
        head_dim: model.dim,
        dtype: if fp8 { Dtype::Fp8E4m3 } else { Dtype::Bf16 },
        page_tokens,
        order: Order::Nhd,
        kind: model.kind,
        at: Coordinates::SINGLE,
    };
    layout.check()?;
    Ok(layout)
}

/// The name under which [`layout`] gives a layout.
pub(crate) fn name(layout: &Layout) -> String {
    match layout.dtype {
        Dtype::Fp8E4m3 | Dtype::Fp8E5m2 => format!("{}-fp8", layout.model),
        Dtype::Bf16 | Dtype::Fp16 => layout.model.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn geometry_is_that_of_the_published_models() {
        // Name, bytes per token of all layers, bytes of one page of 16 tokens.
        let table = [
            ("tiny", 1_024, 2_048),
            ("llama-3.1-8b", 131_072, 32_768),
            ("llama-3.1-70b", 327_680, 32_768),
            ("llama-3.1-70b-fp8", 163_840, 16_384),
            ("qwen3-235b", 192_512, 16_384),
            ("gpt-oss-120b", 73_728, 16_384),
            ("gpt-oss-120b-fp8", 36_864, 8_192),
            ("deepseek-v3", 70_272, 18_432),
            ("deepseek-v3-fp8", 35_136, 9_216),
        ];
        for (name, token_bytes, page_bytes) in table {
            let l = layout(name, 16).unwrap();
            assert_eq!(l.block_bytes() / 16, token_bytes, "{name}");
            assert_eq!(l.page_bytes(), page_bytes, "{name}");
            assert_eq!(super::name(&l), name);
            assert_eq!(layout(name, 64).unwrap().page_bytes(), 4 * page_bytes, "{name}");
        }
        assert_eq!(names().collect::<Vec<_>>(), table.map(|(name, ..)| name.to_string()));
    }

    #[test]
    fn a_tiny_room_stays_under_a_mebibyte() {
        let l = layout("tiny", PAGE_TOKENS).unwrap();
        assert!(u64::from(l.blocks_for(1000)) * l.block_bytes() < 1 << 20);
    }

    #[test]
    fn an_unknown_model_is_refused_with_every_name() {
        for asked in ["llama", "llama-3.1-8b-fp8", "tiny-fp8-fp8", "", "TINY"] {
            let e = layout(asked, 16).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::NotFound);
            for name in names() {
                assert!(e.to_string().contains(&name), "{e}");
            }
        }
        assert_eq!(layout("tiny", 0).unwrap_err().kind(), ErrorKind::Malformed);
        assert_eq!(layout("tiny", u32::MAX).unwrap_err().kind(), ErrorKind::Malformed);
    }

    #[test]
    fn an_fp8_cache_differs_from_a_bf16_cache_in_dtype_only() {
        let (a, b) = (layout("gpt-oss-120b", 16).unwrap(), layout("gpt-oss-120b-fp8", 16).unwrap());
        let fields: Vec<_> = a.differences(&b).into_iter().map(|d| d.field).collect();
        assert_eq!(fields, ["dtype"]);
    }
}
