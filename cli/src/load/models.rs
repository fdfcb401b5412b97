//! KV geometry of models by name.
//!
//! In: a name, a page size in tokens and a rank's place. Out: the [`Layout`]s of its pools, in NHD
//! order. Layers, KV heads and head sizes are those of the published models; a `-fp8` name is the
//! same model with a cache of one byte per element, a `-swa` name one whose layers with a sliding
//! window have a pool of their own.

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
    /// Every other layer looks at so many tokens only; 0 for none.
    window: u32,
    /// Whether people run it with an fp8 cache.
    fp8: bool,
}

const fn gqa(name: &'static str, layers: u32, heads: u32, dim: u32, fp8: bool) -> Model {
    Model { name, layers, heads, dim, kind: KvKind::Split, window: 0, fp8 }
}

/// `tiny` is for demonstrations: 1 KiB per token, so that a room of 1000 tokens stays under 1 MiB.
/// MLA keeps one latent (512) and its rotary part (64) per token instead of heads.
const MODELS: [Model; 7] = [
    gqa("tiny", 4, 2, 32, false),
    gqa("llama-3.1-8b", 32, 8, 128, false),
    gqa("llama-3.1-70b", 80, 8, 128, true),
    gqa("qwen3-235b", 94, 4, 128, false),
    gqa("gpt-oss-120b", 36, 8, 64, true),
    Model { window: 128, ..gqa("gpt-oss-120b-swa", 36, 8, 64, false) },
    Model {
        name: "deepseek-v3",
        layers: 61,
        heads: 1,
        dim: 512 + 64,
        kind: KvKind::Mla,
        window: 0,
        fp8: true,
    },
];

/// Every name that [`pools`] knows.
pub(crate) fn names() -> impl Iterator<Item = String> {
    MODELS.iter().flat_map(|m| {
        std::iter::once(m.name.to_string()).chain(m.fp8.then(|| format!("{}-fp8", m.name)))
    })
}

/// The pools of one rank of model `name`, with `page_tokens` tokens in a page. Ranks have an equal
/// share of the heads; where there are more ranks than heads, or one latent, several have the same.
///
/// # Errors
/// [`ErrorKind::NotFound`] listing all names; [`ErrorKind::Malformed`] if the page size is 0 or
/// absurd, or the heads cannot be spread evenly over `tp` ranks.
pub(crate) fn pools(name: &str, page_tokens: u32, tp: (u32, u32)) -> Result<Vec<Layout>> {
    let (base, fp8) = name.strip_suffix("-fp8").map_or((name, false), |base| (base, true));
    let model = MODELS.iter().find(|m| m.name == base && (m.fp8 || !fp8)).ok_or_else(|| {
        Error::new(ErrorKind::NotFound, "unknown model")
            .with("asked", format!("{:?}", name.chars().take(80).collect::<String>()))
            .with("known", names().collect::<Vec<_>>().join(" "))
            .hint("use one of the known names")
    })?;
    let layout = |layers, window_tokens| Layout {
        model: model.name.into(),
        layers,
        first_layer: 0,
        kv_heads: (model.heads / tp.1.max(1)).max(1),
        kv_heads_total: model.heads,
        head_dim: model.dim,
        dtype: if fp8 { Dtype::Fp8E4m3 } else { Dtype::Bf16 },
        page_tokens,
        window_tokens,
        order: Order::Nhd,
        kind: model.kind,
        at: Coordinates { tp, ..Coordinates::SINGLE },
    };
    let pools = match model.window {
        0 => vec![layout(model.layers, 0)],
        window => vec![layout(model.layers / 2, 0), layout(model.layers / 2, window)],
    };
    Layout::check_pools(&pools)?;
    Ok(pools)
}

/// The name under which [`pools`] gives a layout.
pub(crate) fn name(layout: &Layout) -> String {
    match layout.dtype {
        Dtype::Fp8E4m3 | Dtype::Fp8E5m2 => format!("{}-fp8", layout.model),
        _ => layout.model.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(name: &str, page_tokens: u32) -> Result<Layout> {
        Ok(pools(name, page_tokens, (0, 1))?.remove(0))
    }

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
            // Of the half of its layers that look at the whole prompt.
            ("gpt-oss-120b-swa", 36_864, 16_384),
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

    #[test]
    fn ranks_share_the_heads_or_have_the_same() {
        let heads = |name, rank, size| {
            let h = pools(name, 16, (rank, size)).unwrap()[0].heads();
            (h.first, h.end, h.copies)
        };
        assert_eq!(heads("llama-3.1-8b", 3, 4), (6, 8, 1));
        assert_eq!(heads("qwen3-235b", 5, 8), (2, 3, 2));
        assert_eq!(heads("deepseek-v3", 7, 8), (0, 1, 8));
        assert!(pools("llama-3.1-8b", 16, (0, 3)).is_err());
        assert!(pools("llama-3.1-8b", 16, (4, 4)).is_err());
        let swa = pools("gpt-oss-120b-swa", 16, (0, 2)).unwrap();
        assert_eq!((swa[0].window_tokens, swa[1].window_tokens, swa[1].layers), (0, 128, 18));
    }
}
