//! What the instances of a seed look like: a model's pools, how the ranks of each instance share
//! them, and who therefore sends to whom.
//!
//! In: chance. Out: the pools of every rank, and for every couple of instances a [`Route`], by the
//! same `plan::sources` that coordinators use.

use std::sync::Arc;

use kvlane_proto::Layout;
use kvlane_proto::layout::{Coordinates, Dtype, KvKind, Order};
use kvlane_proto::plan::sources;

use crate::rng::Rng;

/// Longest prompt.
pub(crate) const TOKENS_MAX: u32 = 24;

/// A pool of the model, over all ranks.
#[derive(Clone, Copy, Debug)]
struct ModelPool {
    kind: KvKind,
    layers: u32,
    heads: u32,
    head_dim: u32,
    window: u32,
}

/// How an instance shares a model.
#[derive(Clone, Copy, Debug)]
struct Scheme {
    tp: u32,
    pp: u32,
    page: u32,
    /// Of pools with a window.
    window_page: u32,
    order: Order,
    packed: bool,
}

/// Who sends to whom between two instances; ranks are counted in their instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    /// For each decode rank: its prefill ranks.
    pub(crate) sources: Vec<Vec<usize>>,
    /// For each prefill rank: its decode ranks.
    pub(crate) takers: Vec<Vec<usize>>,
}

/// The pools of every rank of an instance.
pub(crate) type Ranks = Vec<Arc<[Layout]>>;

pub(crate) struct Shapes {
    pub(crate) decodes: Vec<Ranks>,
    pub(crate) prefills: Vec<Ranks>,
    /// By decode and prefill instance.
    pub(crate) routes: Vec<Vec<Route>>,
}

/// Tensor and pipeline parallel sizes of prefill and decode, where they are not one rank each.
const WIDE: [[(u32, u32); 2]; 14] = [
    [(2, 1), (1, 1)],
    [(2, 1), (1, 1)],
    [(2, 1), (1, 1)],
    [(1, 1), (2, 1)],
    [(1, 1), (2, 1)],
    [(1, 1), (2, 1)],
    [(1, 2), (1, 1)],
    [(1, 2), (1, 1)],
    [(1, 1), (1, 2)],
    [(1, 1), (1, 2)],
    [(2, 1), (2, 1)],
    [(1, 2), (2, 1)],
    [(2, 1), (4, 1)],
    [(4, 1), (2, 1)],
];

impl Shapes {
    pub(crate) fn draw(rng: &mut Rng) -> Self {
        let wide = rng.per_mille(220);
        let [prefill, decode] = if wide { *rng.pick(&WIDE) } else { [(1, 1), (1, 1)] };
        let pp = prefill.1.max(decode.1);
        let heads = if wide { *rng.pick(&[1, 2, 4]) } else { *rng.pick(&[1, 1, 2]) };
        let dim = |rng: &mut Rng| if rng.per_mille(850) { 4 } else { 8 };
        let layers = |rng: &mut Rng, most: u64| (rng.range(1, most) as u32).max(pp);
        let mla = rng.per_mille(300);
        let mut model = vec![ModelPool {
            kind: if mla { KvKind::Mla } else { KvKind::Split },
            layers: layers(rng, 3),
            heads: if mla { 1 } else { heads },
            head_dim: dim(rng),
            window: 0,
        }];
        let more = rng.range(0, 99);
        if more < 16 {
            let window = rng.range(2, 12) as u32;
            model.push(ModelPool {
                layers: layers(rng, 2),
                head_dim: dim(rng),
                window,
                ..model[0]
            });
        }
        if (10..26).contains(&more) {
            let kind = KvKind::Rows { rows: rng.range(1, 3) as u32 };
            let heads = *rng.pick(&[1, 2, 4]);
            let (layers, head_dim) = (layers(rng, 2), dim(rng));
            model.push(ModelPool { kind, layers, heads, head_dim, window: 0 });
        }
        let page = *rng.pick(&[4, 4, 4, 2]);
        let pages = |rng: &mut Rng| match rng.range(0, 99) {
            0..15 => page * 2,
            15..20 => 8,
            _ => page,
        };
        let scheme = |rng: &mut Rng, (tp, pp): (u32, u32)| Scheme {
            tp,
            pp,
            page: pages(rng),
            window_page: pages(rng),
            order: if rng.per_mille(500) { Order::Nhd } else { Order::Hnd },
            packed: rng.per_mille(150),
        };
        let instances = |rng: &mut Rng, ranks: (u32, u32)| {
            let first = scheme(rng, ranks);
            let mut all = vec![ranks_of(&model, &first)];
            if rng.per_mille(if wide { 150 } else { 500 }) {
                // An instance next to it, perhaps of another shape.
                let other = if wide && rng.per_mille(500) { (1, 1) } else { ranks };
                all.push(ranks_of(&model, &scheme(rng, other)));
            }
            all
        };
        let (decodes, prefills) = (instances(rng, decode), instances(rng, prefill));
        let route = |d: &Ranks, p: &Ranks| {
            let sources: Vec<Vec<usize>> = d.iter().map(|d| sources(d, p).unwrap()).collect();
            let of = |n| (0..d.len()).filter(|&d| sources[d].contains(&n)).collect();
            let takers = (0..p.len()).map(of).collect();
            Route { sources, takers }
        };
        let routes = decodes.iter().map(|d| prefills.iter().map(|p| route(d, p)).collect());
        Self { routes: routes.collect(), decodes, prefills }
    }
}

fn ranks_of(model: &[ModelPool], scheme: &Scheme) -> Ranks {
    let ranks = (0..scheme.pp).flat_map(|pp| (0..scheme.tp).map(move |tp| (tp, pp)));
    let pools = |(tp, pp)| model.iter().map(|pool| layout(pool, scheme, tp, pp)).collect();
    ranks.map(pools).collect()
}

fn layout(pool: &ModelPool, scheme: &Scheme, tp: u32, pp: u32) -> Layout {
    // The first stages have the layers that do not divide.
    let first_layer = (pool.layers * pp).div_ceil(scheme.pp);
    let end = (pool.layers * (pp + 1)).div_ceil(scheme.pp);
    let rows = matches!(pool.kind, KvKind::Rows { .. });
    let layout = Layout {
        model: "tiny".into(),
        layers: end - first_layer,
        first_layer,
        kv_heads: (pool.heads / scheme.tp).max(1),
        kv_heads_total: pool.heads,
        head_dim: pool.head_dim,
        dtype: Dtype::Bf16,
        page_tokens: match pool.window {
            _ if rows => 1,
            0 => scheme.page,
            _ => scheme.window_page,
        },
        window_tokens: pool.window,
        order: scheme.order,
        kind: match pool.kind {
            KvKind::Split if scheme.packed => KvKind::Packed,
            kind => kind,
        },
        at: Coordinates { tp: (tp, scheme.tp), pp: (pp, scheme.pp), ..Coordinates::SINGLE },
    };
    layout.check().unwrap();
    layout
}
