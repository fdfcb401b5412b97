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

use std::sync::Arc;

use kvlane_actors::{DecodeHandle, Pool, PrefillHandle, WorkerEnd};
use kvlane_proto::Result;
use kvlane_proto::msg::service::{Load, WorkerAddress};

pub(crate) use server::Server;

/// A worker of either side.
#[derive(Clone)]
pub(crate) enum Worker {
    Prefill(PrefillHandle),
    Decode(DecodeHandle),
}

macro_rules! either {
    ($self:ident, $w:ident => $e:expr) => {
        match $self {
            Worker::Prefill($w) => $e,
            Worker::Decode($w) => $e,
        }
    };
}

impl Worker {
    pub(crate) fn address(&self) -> &WorkerAddress {
        either!(self, w => w.address())
    }
    pub(crate) fn load(&self) -> Load {
        either!(self, w => w.load())
    }
    pub(crate) async fn registered(&self, wait: std::time::Duration) -> Result<()> {
        either!(self, w => w.registered(wait).await)
    }
    pub(crate) async fn drain(&self) -> Result<()> {
        either!(self, w => w.drain().await)
    }
    pub(crate) async fn idle(&self) {
        let mut loads = either!(self, w => w.loads());
        let _ = loads.wait_for(|l| l.rooms == 0).await;
    }
    pub(crate) async fn stop(&self) -> WorkerEnd {
        either!(self, w => w.stop().await)
    }
    pub(crate) async fn ended(&self) -> WorkerEnd {
        either!(self, w => w.ended().await)
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
