//! The registered KV pools of a rank: what their pages mean, and where they are.

use std::sync::Arc;

use kvlane_proto::{Device, Error, ErrorKind, Layout, PoolMap, Result};
use kvlane_transport::memory::Region;

/// The KV pools of one rank; most have one.
#[derive(Clone, Debug)]
pub struct Pools {
    /// Geometry, pool by pool. The first has pages for the whole prompt.
    pub layouts: Arc<[Layout]>,
    /// Where the pages of each are.
    pub maps: Arc<[Arc<PoolMap>]>,
    /// The memory that holds them.
    pub regions: Vec<Arc<Region>>,
}

impl Pools {
    /// One pool in host memory of kvlane's own, slabs one behind the other.
    ///
    /// # Errors
    /// [`ErrorKind::Memory`] if the kernel has no such memory.
    pub fn own(layout: Layout, blocks: u32) -> Result<Self> {
        Self::own_all(vec![(layout, blocks)])
    }

    /// Pools in host memory of kvlane's own, each in a region of its own.
    ///
    /// # Errors
    /// As [`Pools::own`] and [`Pools::new`].
    pub fn own_all(pools: Vec<(Layout, u32)>) -> Result<Self> {
        Self::make(pools, Region::memfd)
    }

    /// As [`Pools::own_all`], in memory that emulated NICs may be given to write.
    ///
    /// # Errors
    /// As [`Pools::own_all`].
    pub fn own_for_nics(pools: Vec<(Layout, u32)>) -> Result<Self> {
        Self::make(pools, Region::for_nic)
    }

    fn make(
        pools: Vec<(Layout, u32)>,
        memory: impl Fn(u64) -> Result<Arc<Region>>,
    ) -> Result<Self> {
        let mut regions = Vec::new();
        let mut mapped = Vec::new();
        for (layout, blocks) in pools {
            layout.check()?;
            let region = memory(PoolMap::contiguous_bytes(&layout, blocks))?;
            let map = PoolMap::contiguous(Device::Host, region.address(), &layout, blocks);
            mapped.push((layout, map));
            regions.push(region);
        }
        Self::new(mapped, regions)
    }

    /// Pools that the serving engine has allocated.
    ///
    /// # Errors
    /// As [`Layout::check_pools`]; [`ErrorKind::Malformed`] if two pages of a pool share a byte,
    /// [`ErrorKind::Memory`] if a slab is not inside one of the regions. They name the pool, the
    /// slab and the ranges.
    pub fn new(pools: Vec<(Layout, PoolMap)>, regions: Vec<Arc<Region>>) -> Result<Self> {
        let (layouts, maps): (Vec<Layout>, Vec<PoolMap>) = pools.into_iter().unzip();
        Layout::check_pools(&layouts)?;
        for (pool, (layout, map)) in layouts.iter().zip(&maps).enumerate() {
            map.check(layout).map_err(|e| e.with("pool", pool))?;
            inside(layout, map, &regions).map_err(|e| e.with("pool", pool))?;
        }
        Ok(Self {
            layouts: layouts.into(),
            maps: maps.into_iter().map(Arc::new).collect(),
            regions,
        })
    }
}

/// Every slab lies in one of the regions.
fn inside(layout: &Layout, map: &PoolMap, regions: &[Arc<Region>]) -> Result<()> {
    let page = u64::from(layout.page_bytes());
    let extent = map.block_stride_bytes * u64::from(map.blocks - 1) + page;
    for (slab, &address) in map.slab_address.iter().enumerate() {
        if !regions.iter().any(|r| r.contains(map.device, address, extent)) {
            let known: Vec<String> = regions.iter().map(ToString::to_string).collect();
            return Err(Error::new(ErrorKind::Memory, "a slab is not in registered memory")
                .with("slab", slab)
                .with("device", map.device)
                .with("address", format!("{address:#x}"))
                .with("bytes", extent)
                .with("regions", known.join(", "))
                .hint("register the whole tensor that holds the slab"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvlane_proto::layout::{Coordinates, Dtype, KvKind, Order};

    #[test]
    fn a_slab_outside_every_region_is_named_with_the_regions() {
        let layout = Layout {
            model: "t".into(),
            layers: 2,
            first_layer: 0,
            kv_heads: 1,
            kv_heads_total: 1,
            head_dim: 8,
            dtype: Dtype::Bf16,
            page_tokens: 4,
            window_tokens: 0,
            order: Order::Nhd,
            kind: KvKind::Split,
            at: Coordinates::SINGLE,
        };
        let pools = Pools::own(layout.clone(), 4).unwrap();
        let mut map = (*pools.maps[0]).clone();
        map.slab_address[3] += 64;
        let e = Pools::new(vec![(layout, map)], pools.regions).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Memory);
        assert!(e.to_string().contains("slab=3") && e.to_string().contains("host 0x"), "{e}");
    }
}
