//! The worker's side of an emulated NIC: what a driver is to a real one.
//!
//! Owns: the control socket, and the memory of queue pairs. Every call is answered within
//! [`ANSWER`] or the NIC counts as lost for good, as a driver's call blocks on a NIC that hangs. In:
//! calls of the engine's thread. Out: keys, queue pairs, one descriptor that becomes readable when
//! an armed completion queue has something. Invariant: memory that the NIC may still write is kept
//! until the NIC has said that it does not: what is lost with a NIC is never unmapped.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use kvlane_proto::Result;

use crate::memory::Region;
use crate::mlx5::{CompletionQueue, ReceiveQueue, SendQueue};
use crate::sys::unix::Name;

/// How long an answer may take.
pub const ANSWER: Duration = Duration::from_secs(2);

/// What a NIC is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct About {
    /// `emulated0`, …
    pub name: String,
    /// Unique: two workers that opened NICs of the same number can connect over them.
    pub guid: u64,
}

/// A protection domain: keys of one do not work on queue pairs of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Domain(pub u32);

/// What registered memory may be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// This side's queue pairs read it.
    LocalRead,
    /// Also: the other side's writes land in it.
    RemoteWrite,
}

/// A key of registered memory, for this side (in segments) and, with the rights, for the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key(pub u32);

/// The other end of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its number.
    pub number: u32,
    /// First packet sequence number that it sends; 24 bits.
    pub sequence: u32,
}

/// A queue pair of this side. It is given back to [`Hca::destroy`]; dropping it without keeps its
/// memory for ever.
#[derive(Debug)]
pub struct QueuePair {
    /// Its number, never used twice by one NIC.
    pub number: u32,
    /// First packet sequence number that it sends.
    pub sequence: u32,
    /// Entries.
    pub sends: SendQueue,
    /// Receives.
    pub receives: ReceiveQueue,
    /// Completions of both.
    pub completions: CompletionQueue,
}

/// An open NIC.
#[derive(Debug)]
pub struct Hca {
    about: About,
}

impl Hca {
    /// Opens the NIC that listens there.
    ///
    /// # Errors
    /// [`kvlane_proto::ErrorKind::Io`] if it cannot be reached.
    pub fn open(at: &Name) -> Result<Self> {
        let _ = at;
        todo!()
    }
    /// What it is.
    pub fn about(&self) -> &About {
        &self.about
    }
    /// Whether it has been lost.
    pub fn is_lost(&self) -> bool {
        todo!()
    }
    /// Makes a protection domain.
    ///
    /// # Errors
    /// As every call: [`kvlane_proto::ErrorKind::NoPath`] if the NIC is lost, else what it refused.
    pub fn domain(&mut self) -> Result<Domain> {
        todo!()
    }
    /// Gives a domain up, with the keys in it. Queue pairs in it must be destroyed.
    ///
    /// # Errors
    /// As [`Hca::domain`].
    pub fn drop_domain(&mut self, domain: Domain) -> Result<()> {
        let _ = domain;
        todo!()
    }
    /// Registers memory. Only memory with a descriptor that others may write to
    /// ([`Region::for_nic`]) can be.
    ///
    /// # Errors
    /// As [`Hca::domain`]; [`kvlane_proto::ErrorKind::Memory`] with the region.
    pub fn register(&mut self, domain: Domain, region: &Region, rights: Rights) -> Result<Key> {
        let _ = (domain, region, rights);
        todo!()
    }
    /// Takes a key back: no entry that names it is executed any more.
    ///
    /// # Errors
    /// As [`Hca::domain`].
    pub fn deregister(&mut self, key: Key) -> Result<()> {
        let _ = key;
        todo!()
    }
    /// Makes a queue pair with room for so many entries and receives (powers of two).
    ///
    /// # Errors
    /// As [`Hca::domain`].
    pub fn queue_pair(&mut self, domain: Domain, sends: u32, receives: u32) -> Result<QueuePair> {
        let _ = (domain, sends, receives);
        todo!()
    }
    /// Connects it: it receives and sends from here on. Only packets of `peer` are taken.
    ///
    /// # Errors
    /// As [`Hca::domain`].
    pub fn connect(&mut self, pair: &QueuePair, peer: Peer) -> Result<()> {
        let _ = (pair, peer);
        todo!()
    }
    /// Takes it to error: what is posted is flushed, packets are refused. What the NIC took before
    /// may land until a receive posted *after* this call has been flushed by a second one.
    ///
    /// # Errors
    /// As [`Hca::domain`].
    pub fn error(&mut self, pair: &QueuePair) -> Result<()> {
        let _ = pair;
        todo!()
    }
    /// Destroys it: its memory is not used any more. On an error the memory is kept for ever.
    ///
    /// # Errors
    /// As [`Hca::domain`].
    pub fn destroy(&mut self, pair: QueuePair) -> Result<()> {
        let _ = pair;
        todo!()
    }
    /// Becomes readable when an armed completion queue has something, or when the NIC is lost.
    pub fn events(&self) -> RawFd {
        todo!()
    }
    /// Takes the events that wait, and notices whether the NIC is still there.
    pub fn drain(&mut self) {
        todo!()
    }
}

/// Words that the other side's writes land in: credit. Freed only after the queue pair that may
/// write them is destroyed.
#[derive(Clone, Debug)]
pub struct SharedWords(pub Arc<crate::sys::share::Words>);
