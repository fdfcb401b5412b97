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
    /// Geometry of its pools.
    pub pools: Vec<Layout>,
    /// Blocks of its first pool.
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
    /// Of a prefill's rooms, those whose pages are all ready: its model server has done its part, and
    /// takers still fetch them.
    pub owing: u32,
}

/// What a worker does, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoadState {
    /// It takes rooms.
    Serving,
    /// It takes no new rooms, and finishes those that it has.
    Draining,
    /// Its model server is done with every room; takers still fetch pages that it owes them.
    Owing,
    /// It takes no new rooms and has none.
    Drained,
}

impl Load {
    /// What the worker does, in one word.
    pub fn state(&self) -> LoadState {
        match self {
            Self { draining: false, .. } => LoadState::Serving,
            Self { rooms: 0, .. } => LoadState::Drained,
            Self { rooms, owing, .. } if owing >= rooms => LoadState::Owing,
            _ => LoadState::Draining,
        }
    }
}

impl LoadState {
    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Serving => "serving",
            Self::Draining => "draining",
            Self::Owing => "owing",
            Self::Drained => "drained",
        }
    }
}

/// How far somebody has read the registry's log. Callers hand back what they were given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// Names the log; a service that lost its memory begins another.
    pub log: u64,
    /// The last revision read.
    pub revision: u64,
    /// The log's revision when this reader began from the start.
    pub began: u64,
}

/// What may be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// Workers only, about themselves. The newest start of a worker wins; an older one is refused
    /// with `stale_incarnation` from then on.
    Register(Box<Registration>),
    /// Workers only; refused with `stale_incarnation` when another start of the same worker has
    /// registered, with `not_found` when the lease ran out or the service restarted: register
    /// again.
    Renew(Load),
    /// Workers only: gone on purpose.
    Deregister,
    /// Everybody: the workers of the caller's cluster that changed after a revision.
    List {
        /// The last page's; the default for everything.
        after: Cursor,
    },
    /// Routers only: a slot for room numbers.
    IssuerSlot {
        /// The slot held so far.
        renew: Option<u16>,
        /// The counters of the last answer run short: give fresh ones with the slot.
        more_counters: bool,
    },
}

/// What is answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// Registered; the live workers of the other role, by whether they fit. Both lists are cut at
    /// [`limits::LIST_MAX`]; [`Ask::List`] has them all.
    Registered {
        /// Length of the lease, counted by the worker from when it sent its request.
        lease_ms: u64,
        /// Orders the incarnations of one identity.
        epoch: u64,
        /// Workers of the other role that fit.
        fits: Vec<Identity>,
        /// Workers of the other role that do not, with the fields that differ (ours first).
        differs: Vec<(Identity, Vec<Difference>)>,
        /// Workers that the two lists leave off.
        left_off: u32,
    },
    /// Renewed.
    Renewed {
        /// Length of the lease, counted by the worker from when it sent its request.
        lease_ms: u64,
    },
    /// Gone.
    Deregistered,
    /// A page of workers, at most [`limits::LIST_MAX`], in the order they changed.
    Workers {
        /// What to ask for next.
        next: Cursor,
        /// The caller's cursor was of another log or too old: forget everything, this page is
        /// the first of all.
        reset: bool,
        /// The workers.
        workers: Vec<WorkerView>,
        /// Whether another page follows at once.
        more: bool,
    },
    /// A slot for room numbers, and the counters that only this holder may use with it.
    Slot {
        /// The slot.
        slot: u16,
        /// The first counter.
        first_counter: u64,
        /// How many counters from there on.
        counters: u64,
        /// Length of the slot's lease, counted by the router from when it sent its request.
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
    /// Its session died without a word and it has not renewed since; the lease decides.
    pub suspected: bool,
    /// Orders the incarnations of one identity.
    pub epoch: u64,
}

impl Registration {
    /// Every field that keeps this worker from handing off with `other`, this side's value first.
    /// Empty: they fit.
    pub fn differences(&self, other: &Registration) -> Vec<Difference> {
        let mut out = Layout::pools_differ(&self.pools, &other.pools);
        if !self.engines.iter().any(|e| other.engines.contains(e)) {
            let list = |e: &[String]| if e.is_empty() { "none".into() } else { e.join(" ") };
            out.push(Difference::new("engines", list(&self.engines), list(&other.engines)));
        }
        out
    }
    /// Checks what a worker says of itself.
    ///
    /// # Errors
    /// Naming the field.
    pub fn check(&self) -> Result<()> {
        self.worker.check()?;
        Layout::check_pools(&self.pools)?;
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
        if self.address.is_empty() || self.address.len() > limits::ADDRESS_BYTES_MAX {
            return Err(Error::new(ErrorKind::LimitExceeded, "address must have 1 to 256 bytes")
                .with("found", self.address.len())
                .with("limit", limits::ADDRESS_BYTES_MAX));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Incarnation, Role};
    use crate::layout::small_layout;

    #[test]
    fn differences_fit_an_answer_whatever_was_registered() {
        let worker = |role, engines: Vec<String>| {
            let identity = Identity::new("c", role, "w", 0).unwrap();
            let key = WorkerKey { identity, incarnation: Incarnation([1; 16]) };
            let mut layout = small_layout();
            layout.model = engines[0].repeat(limits::REFUSAL_TEXT_BYTES_MAX);
            Registration {
                worker: WorkerAddress { key, address: "h:1".into() },
                pools: vec![layout],
                pool_blocks: 1,
                engines,
                serving: String::new(),
                build: String::new(),
            }
        };
        // As many and as long as a registration may have, with characters that do not end at the
        // limit.
        let long = format!("{}x", "é".repeat(limits::NAME_BYTES_MAX / 2));
        let p = worker(Role::Prefill, vec![long; limits::LIST_MAX]);
        let d = worker(Role::Decode, vec!["tcp".into()]);
        let found = d.differences(&p);
        let fields: Vec<_> = found.iter().map(|f| f.field.as_str()).collect();
        assert_eq!(fields, ["model", "engines"]);
        assert_eq!(found[1].here, "tcp");
        for f in &found {
            assert!(f.there.len() <= limits::REFUSAL_TEXT_BYTES_MAX, "{}", f.there.len());
            assert!(f.here.len() <= limits::REFUSAL_TEXT_BYTES_MAX, "{}", f.here.len());
            assert!(f.there.starts_with('é') && f.there.ends_with('…'), "{}", f.there);
        }
    }
}
