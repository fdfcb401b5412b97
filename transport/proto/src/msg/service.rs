//! Anybody to the bootstrap service: registration, renewal, views, issuer slots.

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Refusal, Result};
use crate::ids::{Identity, WorkerKey};
use crate::layout::{Difference, Layout};
use crate::limits;

/// A numbered request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceRequest {
    /// Chosen by the caller; comes back in the answer.
    pub id: u64,
    /// What is asked.
    pub ask: Ask,
}

/// A numbered answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceResponse {
    /// The request's number.
    pub id: u64,
    /// The answer.
    pub answer: Result<Answer, Refusal>,
}

/// Where a worker can be reached, and which start of it is meant.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WorkerAddress {
    /// Who, and which start.
    pub key: WorkerKey,
    /// `host:port` of its QUIC endpoint.
    pub address: String,
}

/// What a worker registers. Never keys of memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registration {
    /// The worker and its QUIC endpoint.
    pub worker: WorkerAddress,
    /// Geometry of its pool.
    pub layout: Layout,
    /// Blocks of its pool.
    pub pool_blocks: u32,
    /// Engines it can use, best first.
    pub engines: Vec<String>,
    /// Where its model server takes requests; may be empty.
    pub serving: String,
    /// Version of its build.
    pub build: String,
}

/// How a worker is doing; sent with each renewal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// Rooms that it holds.
    pub rooms: u32,
    /// Rooms that wait for credit.
    pub queued: u32,
    /// Free lanes over all links; a hint.
    pub free_lanes: u32,
    /// Blocks withheld because a fence cannot complete.
    pub quarantined_blocks: u32,
    /// It takes no new rooms.
    pub draining: bool,
}

/// What may be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// Workers only, about themselves.
    Register(Box<Registration>),
    /// Workers only; refused with `stale_incarnation` or `not_found` when another start of the
    /// same worker has registered or the lease ran out: register again.
    Renew(Load),
    /// Workers only: gone on purpose.
    Deregister,
    /// Everybody: the workers of the caller's cluster, from `after` (exclusive) on.
    List {
        /// Only this revision or newer matters; 0 for everything. Nothing newer: an empty page.
        since_revision: u64,
        /// Where the page begins.
        after: Option<Identity>,
    },
    /// Routers only: a slot for room numbers; `renew` is the slot held so far.
    IssuerSlot {
        /// The slot to keep.
        renew: Option<u16>,
    },
}

/// What is answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// Registered; the workers of the other role, grouped by whether they fit.
    Registered {
        /// Length of the lease, counted by the worker from when it sent its request.
        lease_ms: u64,
        /// Workers of the other role that fit.
        fits: Vec<Identity>,
        /// Workers of the other role that do not, with the fields that differ (ours first).
        differs: Vec<(Identity, Vec<Difference>)>,
    },
    /// Renewed.
    Renewed {
        /// Length of the lease, counted by the worker from when it sent its request.
        lease_ms: u64,
    },
    /// Gone.
    Deregistered,
    /// A page of workers.
    Workers {
        /// Revision of the registry.
        revision: u64,
        /// The workers, by identity.
        workers: Vec<WorkerView>,
        /// Whether another page follows.
        more: bool,
    },
    /// A slot for room numbers.
    Slot {
        /// The slot.
        slot: u16,
        /// The first counter that is safe to use with it.
        first_counter: u64,
        /// Length of the slot's lease.
        lease_ms: u64,
    },
}

/// A worker as the service sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerView {
    /// What it registered.
    pub registration: Registration,
    /// How it is doing.
    pub load: Load,
    /// Its lease is alive.
    pub alive: bool,
    /// Orders the incarnations of one identity.
    pub epoch: u64,
}

impl Registration {
    /// Checks what a worker says of itself.
    ///
    /// # Errors
    /// Naming the field.
    pub fn check(&self) -> Result<()> {
        self.worker.check()?;
        self.layout.check()?;
        let long = self.engines.len() > limits::LIST_MAX
            || self.engines.iter().any(|e| e.len() > limits::NAME_BYTES_MAX)
            || self.serving.len() > limits::ADDRESS_BYTES_MAX
            || self.build.len() > limits::NAME_BYTES_MAX;
        if long {
            return Err(Error::new(ErrorKind::LimitExceeded, "registration is too long")
                .with("worker", &self.worker.key));
        }
        if self.pool_blocks == 0 || self.pool_blocks > limits::POOL_BLOCKS_MAX {
            return Err(Error::new(ErrorKind::Malformed, "pool_blocks out of range")
                .with("found", self.pool_blocks));
        }
        Ok(())
    }
}

impl WorkerAddress {
    /// Checks an address that came from outside.
    ///
    /// # Errors
    /// Naming the field.
    pub fn check(&self) -> Result<()> {
        self.key.identity.check()?;
        if self.address.len() > limits::ADDRESS_BYTES_MAX {
            return Err(Error::new(ErrorKind::LimitExceeded, "address is too long")
                .with("found", self.address.len())
                .with("limit", limits::ADDRESS_BYTES_MAX));
        }
        Ok(())
    }
}
