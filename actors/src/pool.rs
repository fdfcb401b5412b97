//! A registered KV pool: what its pages mean, and where they are.

use std::sync::Arc;

use kvlane_proto::{Device, Error, ErrorKind, Layout, PoolMap, Result};
use kvlane_transport::memory::Region;

/// The KV pool of one rank.
#[derive(Clone, Debug)]
pub struct Pool {
    /// Geometry.
    pub layout: Layout,
    /// Where its pages are.
    pub map: Arc<PoolMap>,
    /// The memory that holds them.
    pub regions: Vec<Arc<Region>>,
}

impl Pool {
    /// A pool in host memory of kvlane's own, slabs one behind the other.
    ///
    /// # Errors
    /// [`ErrorKind::Memory`] if the kernel has no such memory.
    pub fn own(layout: Layout, blocks: u32) -> Result<Self> {
        layout.check()?;
        let region = Region::memfd(PoolMap::contiguous_bytes(&layout, blocks))?;
        let map = PoolMap::contiguous(Device::Host, region.address(), &layout, blocks);
        Self::new(layout, map, vec![region])
    }

    /// A pool that the serving engine has allocated.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`] if two pages share a byte, [`ErrorKind::Memory`] if a slab is not
    /// inside one of the regions; both name the slab and the ranges.
    pub fn new(layout: Layout, map: PoolMap, regions: Vec<Arc<Region>>) -> Result<Self> {
        layout.check()?;
        map.check(&layout)?;
        let page = u64::from(layout.page_bytes());
        let extent = map.block_stride_bytes * u64::from(map.blocks - 1) + page;
        for (slab, &address) in map.slab_address.iter().enumerate() {
            if !regions.iter().any(|r| r.contains(map.device, address, extent)) {
                let known: Vec<String> = regions
                    .iter()
                    .map(|r| format!("{} {:#x}+{:#x}", r.device(), r.address(), r.bytes()))
                    .collect();
                return Err(Error::new(ErrorKind::Memory, "a slab is not in registered memory")
                    .with("slab", slab)
                    .with("device", map.device)
                    .with("address", format!("{address:#x}"))
                    .with("bytes", extent)
                    .with("regions", known.join(", "))
                    .hint("register the whole tensor that holds the slab"));
            }
        }
        Ok(Self { layout, map: Arc::new(map), regions })
    }
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
            order: Order::Nhd,
            kind: KvKind::Split,
            at: Coordinates::SINGLE,
        };
        let pool = Pool::own(layout.clone(), 4).unwrap();
        let mut map = (*pool.map).clone();
        map.slab_address[3] += 64;
        let e = Pool::new(layout, map, pool.regions).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Memory);
        assert!(e.to_string().contains("slab=3") && e.to_string().contains("host 0x"), "{e}");
    }
}
