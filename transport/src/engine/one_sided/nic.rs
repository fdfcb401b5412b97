//! What a one-sided engine asks of a NIC.
//!
//! In: the engine's calls, on its thread; none waits for a peer. Out: keys, queue pairs, completions.
//! Invariants of whoever implements it: entries of a queue pair are carried out in their order, and an
//! immediate is shown behind all bytes that were written before it; after [`Nic::error`], a receive
//! posted, and [`Nic::error`] again, the flush of that receive says that nothing more lands through
//! the queue pair; memory that the NIC may still use is kept until it has said that it does not: for
//! ever, if the NIC is lost.

use std::os::fd::RawFd;
use std::sync::Arc;

use kvlane_proto::{Error, Result};

use crate::memory::Region;
pub use crate::mlx5::{Remote, Segment};
use crate::sys::share::Words;

/// What a NIC is, as its peers are told: one path, so a port of a NIC with several counts by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct About {
    /// `emulated0`, `mlx5_0:1`, …
    pub name: String,
    /// Unique.
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

/// A key of registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key(pub u32);

/// A range of registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registered {
    /// Where it begins.
    pub address: u64,
    /// Its length.
    pub bytes: u64,
    /// For this side's entries; also what it is taken back by.
    pub local: Key,
    /// For the other side's, if it has the right.
    pub remote: Key,
}

/// One end of a queue pair, as the other end is told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct End {
    /// Its number; 24 bits.
    pub number: u32,
    /// First packet sequence number that it sends; 24 bits.
    pub sequence: u32,
    /// Its port's address on RoCE, and across InfiniBand subnets; zero on emulated NICs.
    pub gid: [u8; 16],
    /// Its port's address on InfiniBand; else zero.
    pub lid: u16,
    /// Most bytes of a packet; 0 if that is not a question.
    pub mtu: u16,
}

/// Which fault of a completion it is, as far as something depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The other side did not answer.
    TransportRetries,
    /// The other side had no receive posted.
    RnrRetries,
    /// The other side's key does not cover what the entry names.
    RemoteAccess,
    /// This side's key does not cover what the entry names, or is gone.
    LocalAccess,
    /// The queue pair was in error already; never the first reason.
    Flushed,
    /// Any other.
    Other,
}

/// What went wrong with an entry or a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Which.
    pub cause: Cause,
    /// As the field calls it.
    pub name: &'static str,
    /// As the NIC or its driver numbers it.
    pub code: u32,
    /// The vendor's own code, next to it.
    pub vendor: u32,
}

/// What a completion says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The entry, and every one before it, is done.
    Sent,
    /// Somebody's write with this immediate is in place, and every one of his before it.
    Arrived(u32),
    /// An entry failed, or was flushed.
    SendFailed(Fault),
    /// A receive failed, or was flushed.
    ReceiveFailed(Fault),
    /// Something that is not known: its number.
    Unknown(u8),
}

/// A completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Index of the entry or of the receive that it is about: its last 16 bits.
    pub index: u16,
    /// What it says.
    pub what: What,
}

/// The send ring of a queue pair. What is pushed is carried out once it is rung, or before.
pub trait Sends {
    /// The index of the next entry, without wrap.
    fn next(&self) -> u64;
    /// Entries that may be pushed now.
    fn free(&self) -> u32;
    /// Most bytes of one write.
    fn write_bytes_max(&self) -> u32;
    /// Pushes a write; no if there is no room.
    #[must_use]
    fn write(&mut self, to: Remote, from: Segment, signalled: bool) -> bool;
    /// Pushes a write that takes a receive of the other side and shows it `immediate`. It completes.
    #[must_use]
    fn write_immediate(&mut self, to: Remote, from: Segment, immediate: u32) -> bool;
    /// Pushes a write of a word that the entry carries. It completes.
    #[must_use]
    fn write_word(&mut self, to: Remote, word: u64) -> bool;
    /// Pushes what does nothing but complete.
    #[must_use]
    fn nop(&mut self) -> bool;
    /// Shows the NIC what was pushed.
    fn ring(&mut self);
    /// A completion came for the entry with this index: it and all before it are free. Their index
    /// without wrap; `None` if it is not outstanding, which only a broken NIC says.
    fn completed(&mut self, index: u16) -> Option<u64>;
}

/// A queue pair of this side. It is given back by [`Nic::try_destroy`] or [`Nic::destroy`].
pub trait Pair: Send {
    /// Its ring.
    type Sends: Sends;
    /// This end.
    fn end(&self) -> End;
    /// The ring.
    fn sends(&self) -> &Self::Sends;
    /// The ring.
    fn sends_mut(&mut self) -> &mut Self::Sends;
    /// Posts so many receives; gives how many were posted in all. What cannot be posted shows as a
    /// completion that is an error.
    fn post_receives(&mut self, count: u32) -> u64;
    /// The next completion of either ring, if there is one.
    fn poll(&mut self) -> Option<Completion>;
    /// What was polled may be written again.
    fn consumed(&mut self);
    /// Asks for one event when the next completion comes; one that came before may bring none.
    fn arm(&mut self);
    /// Whether there is a next completion; it stays.
    fn is_ready(&mut self) -> bool;
}

/// A NIC, or a port of one: a rail.
pub trait Nic: Send + 'static {
    /// The name of the engine that uses it.
    const ENGINE: &'static str;
    /// A test device: its figures mean nothing.
    const IS_EMULATED: bool;
    /// Its queue pairs.
    type Pair: Pair;

    /// What it is.
    fn about(&self) -> &About;
    /// Names the NIC in a refusal.
    fn named(&self, e: Error) -> Error;
    /// What shows people what it has done.
    fn see(&self) -> String;
    /// Whether it has been lost, for good.
    fn is_lost(&self) -> bool;
    /// Why nothing goes over it.
    fn lost(&self) -> Error;
    /// Which NIC of a peer it is connected with, if there is one; `nth` is its own rail.
    fn partner(&self, nth: usize, theirs: &[About]) -> Option<usize>;

    /// Makes a protection domain.
    ///
    /// # Errors
    /// As every call: [`kvlane_proto::ErrorKind::NoPath`] if the NIC is lost, else what it refused.
    fn domain(&mut self) -> Result<Domain>;
    /// Gives a domain up, with the keys in it. Queue pairs in it must be destroyed.
    ///
    /// # Errors
    /// As [`Nic::domain`].
    fn drop_domain(&mut self, domain: Domain) -> Result<()>;
    /// Registers memory, in as many pieces as the NIC needs; all of it or nothing.
    ///
    /// # Errors
    /// As [`Nic::domain`]; [`kvlane_proto::ErrorKind::Memory`] with the region.
    fn register(
        &mut self,
        domain: Domain,
        region: &Arc<Region>,
        rights: Rights,
    ) -> Result<Vec<Registered>>;
    /// Registers words that the other side's writes land in. They are kept until the key is taken
    /// back, and for ever if the NIC is lost.
    ///
    /// # Errors
    /// As [`Nic::register`].
    fn register_words(&mut self, domain: Domain, words: &Arc<Words>) -> Result<Registered>;
    /// Takes a key back: no entry that names it is executed any more. What a queue pair has taken
    /// lands all the same: only the end of the queue pair is a fence.
    ///
    /// # Errors
    /// As [`Nic::domain`].
    fn deregister(&mut self, local: Key) -> Result<()>;
    /// Makes a queue pair with room for so many entries and receives (powers of two).
    ///
    /// # Errors
    /// As [`Nic::domain`].
    fn queue_pair(&mut self, domain: Domain, sends: u32, receives: u32) -> Result<Self::Pair>;
    /// Connects it: it receives and sends from here on. Only packets of `peer` are taken.
    ///
    /// # Errors
    /// As [`Nic::domain`].
    fn connect(&mut self, pair: &mut Self::Pair, peer: End) -> Result<()>;
    /// Takes it to error: what is posted is flushed, packets are refused.
    ///
    /// # Errors
    /// As [`Nic::domain`].
    fn error(&mut self, pair: &mut Self::Pair) -> Result<()>;
    /// Destroys it: its memory is not used any more, and nothing lands by it. Comes back as long as the
    /// NIC says that something may.
    ///
    /// # Errors
    /// As [`Nic::domain`]; its memory is then kept for ever.
    fn try_destroy(&mut self, pair: Self::Pair) -> Result<Option<Self::Pair>>;
    /// Destroys it when the NIC lets it, or keeps its memory for ever.
    fn destroy(&mut self, pair: Self::Pair);
    /// Wakes the NIC if it has to be; to be called after rings were rung.
    fn kick(&self);
    /// Become readable when an armed queue pair has a completion, or something is wrong with the NIC.
    fn events(&self) -> [Option<RawFd>; 2];
    /// Takes the events that wait, and notices whether the NIC is still there.
    fn drain(&mut self);
}
