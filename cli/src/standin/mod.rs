//! Stands in for model servers: takes requests' legs, owns the blocks of a pool, writes pages that
//! can be recognised, and checks every byte of those that arrive.
//!
//! In: legs as JSON lines over TCP ([`legs`]), one connection each; whoever closes it early gives
//! the request up. Out: how the leg ended. Blocks that came back are stamped, and a stamp that has
//! changed when they are used again is a late write.

mod blocks;
mod decode;
mod faults;
pub(crate) mod holds;
pub(crate) mod legs;
mod prefill;
mod server;

use std::ops::Deref;
use std::sync::Arc;

use kvlane_actors::{DecodeHandle, Pools, PrefillHandle, WorkerHandle};
use kvlane_proto::{Error, ErrorKind, Layout, Result};

pub(crate) use server::Server;

/// A worker of either side.
#[derive(Clone)]
pub(crate) enum Worker {
    Prefill(PrefillHandle),
    Decode(DecodeHandle),
}

impl Deref for Worker {
    type Target = WorkerHandle;
    fn deref(&self) -> &WorkerHandle {
        match self {
            Self::Prefill(handle) => handle,
            Self::Decode(handle) => handle,
        }
    }
}

impl Worker {
    pub(crate) async fn idle(&self) {
        let _ = self.loads().wait_for(|l| l.rooms == 0).await;
    }
}

/// The memory of one stand-in.
#[derive(Clone)]
pub(crate) struct Model {
    pools: Arc<Pools>,
    /// The free blocks of each pool.
    blocks: Arc<[blocks::Blocks]>,
    /// Free blocks are stamped whole.
    canaries: bool,
    /// All free blocks are looked at after each room.
    audits_rooms: bool,
}

impl Model {
    pub(crate) fn new(pools: Pools, canaries: bool, audits_rooms: bool) -> Self {
        let blocks = pools.maps.iter().map(|map| blocks::Blocks::new(map.blocks)).collect();
        Self { pools: Arc::new(pools), blocks, canaries, audits_rooms }
    }
    fn layouts(&self) -> &[Layout] {
        &self.pools.layouts
    }
    /// Does something with each page of some blocks of a pool: layer, slab, the block's place in
    /// the list, and the page's memory.
    fn for_each_page(
        &self,
        pool: usize,
        layers: std::ops::Range<u32>,
        ids: &[u32],
        mut f: impl FnMut(u32, u32, usize, Memory<'_>) -> std::io::Result<()>,
    ) -> Result<()> {
        let (layout, map) = (&self.pools.layouts[pool], &self.pools.maps[pool]);
        let memory = self.pools.regions[pool].memory();
        let slabs = layout.kind.slabs();
        for layer in layers {
            for slab in 0..slabs {
                let base = map.slab_address[(layer * slabs + slab) as usize];
                for (index, &id) in ids.iter().enumerate() {
                    let address = base + u64::from(id) * map.block_stride_bytes;
                    let page = Memory { memory, at: address - self.pools.regions[pool].address() };
                    f(layer, slab, index, page).map_err(|e| {
                        Error::new(ErrorKind::Internal, "a page is outside its pool")
                            .with("pool", pool)
                            .with("layer", layer)
                            .with("block", id)
                            .caused_by(e)
                    })?;
                }
            }
        }
        Ok(())
    }
}

/// One page.
struct Memory<'a> {
    memory: &'a kvlane_transport::sys::mem::Memory,
    at: u64,
}

impl Memory<'_> {
    fn read(&self, into: &mut [u8]) -> std::io::Result<()> {
        self.memory.read_at(self.at, into)
    }
    fn write(&self, from: &[u8]) -> std::io::Result<()> {
        self.memory.write_at(self.at, from)
    }
}
