//! Stands in for model servers: takes requests' legs, owns the blocks of a pool, writes pages that
//! can be recognised, and checks every byte of those that arrive.
//!
//! In: legs as JSON lines over TCP ([`legs`]), one connection each; whoever closes it early gives
//! the request up. Out: how the leg ended. Blocks that came back are stamped, and a stamp that has
//! changed when they are used again is a late write.

mod blocks;
mod decode;
pub(crate) mod legs;
mod prefill;
mod server;

use std::ops::Deref;
use std::sync::Arc;

use kvlane_actors::{DecodeHandle, Pool, PrefillHandle, WorkerHandle};

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
    pool: Arc<Pool>,
    blocks: Arc<blocks::Blocks>,
}

impl Model {
    pub(crate) fn new(pool: Pool) -> Self {
        let blocks = Arc::new(blocks::Blocks::new(pool.map.blocks));
        Self { pool: Arc::new(pool), blocks }
    }
}
