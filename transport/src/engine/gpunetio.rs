//! Engine `gpunetio`: the sender's NIC writes pages by mlx5 entries that this side stores into its
//! ring. The storing of this build is done by the CPU, over emulated NICs.
//!
//! Owns: nothing; it makes an emulated NIC ([`Hca`]) what [`OneSided`] asks of one.

use std::os::fd::RawFd;
use std::sync::Arc;

use kvlane_proto::{Error, ErrorKind, Result};

use super::one_sided::nic::{
    About, Cause, Completion, Domain, End, Fault, Key, Nic, Pair, Registered, Remote, Rights,
    Segment, Sends, What,
};
use super::one_sided::{ENTRIES, OneSided};
use crate::emulated::client::{Hca, LOST, QueuePair};
use crate::memory::Region;
use crate::mlx5::entry::{self, encode};
use crate::mlx5::{self, Data, Decoded, Operation, SendQueue, Syndrome, completion};
use crate::sys::share::Words;
use crate::sys::unix::Name;

/// Settings of the engine.
#[derive(Clone, Debug)]
pub struct GpunetioConfig {
    /// The sockets of the emulated NICs, by rail. Both workers of a link need the same NICs.
    pub nics: Vec<Name>,
    /// Entries of a sender's ring; a power of two. Larger parts are posted piece by piece.
    pub entries: u32,
}

impl GpunetioConfig {
    /// Over these NICs.
    pub fn new(nics: Vec<Name>) -> Self {
        Self { nics, entries: ENTRIES }
    }
}

/// The engine.
pub type GpunetioEngine = OneSided<Hca>;

impl GpunetioEngine {
    /// Opens the NICs.
    ///
    /// # Errors
    /// As [`OneSided::over`], or what opening a NIC said.
    pub fn new(config: GpunetioConfig) -> Result<Self> {
        let nics = config.nics.iter().map(Hca::open).collect::<Result<_>>()?;
        Self::over(nics, config.entries)
    }
}

impl Sends for SendQueue {
    #[inline]
    fn next(&self) -> u64 {
        self.next()
    }
    #[inline]
    fn free(&self) -> u32 {
        self.free()
    }
    #[inline]
    fn write_bytes_max(&self) -> u32 {
        mlx5::WRITE_BYTES_MAX
    }
    #[inline]
    fn write(&mut self, to: Remote, from: Segment, signalled: bool) -> bool {
        let entry = entry::write(self.next() as u16, self.number(), to, from, signalled);
        self.push(&entry)
    }
    #[inline]
    fn write_immediate(&mut self, to: Remote, from: Segment, immediate: u32) -> bool {
        let index = self.next() as u16;
        self.push(&entry::write_immediate(index, self.number(), to, from, immediate, true))
    }
    fn write_word(&mut self, to: Remote, word: u64) -> bool {
        let mut bytes = [0; 28];
        bytes[..8].copy_from_slice(&word.to_ne_bytes());
        let operation = Operation::Write { to, data: Data::Inline { len: 8, bytes } };
        self.push(&encode(self.next() as u16, self.number(), &Decoded::new(operation, true)))
    }
    fn nop(&mut self) -> bool {
        let nop = Decoded::new(Operation::Nop, true);
        self.push(&encode(self.next() as u16, self.number(), &nop))
    }
    fn ring(&mut self) {
        self.ring();
    }
    fn completed(&mut self, index: u16) -> Option<u64> {
        self.completed(index)
    }
}

impl Pair for QueuePair {
    type Sends = SendQueue;

    fn end(&self) -> End {
        End { number: self.number, sequence: self.sequence, ..End::default() }
    }
    fn sends(&self) -> &SendQueue {
        &self.sends
    }
    fn sends_mut(&mut self) -> &mut SendQueue {
        &mut self.sends
    }
    fn post_receives(&mut self, count: u32) -> u64 {
        self.receives.post(count)
    }
    fn poll(&mut self) -> Option<Completion> {
        Some(match self.completions.poll()? {
            Ok(mlx5::Completion { index, what, .. }) => Completion { index, what: said(what) },
            Err(opcode) => Completion { index: 0, what: What::Unknown(opcode) },
        })
    }
    fn consumed(&mut self) {
        self.completions.consumed();
    }
    fn arm(&mut self) {
        self.completions.arm();
    }
    fn is_ready(&mut self) -> bool {
        self.completions.is_ready()
    }
}

fn said(what: completion::What) -> What {
    let fault = |fault: mlx5::Fault| Fault {
        cause: match fault.syndrome {
            Syndrome::TRANSPORT_RETRIES => Cause::TransportRetries,
            Syndrome::RNR_RETRIES => Cause::RnrRetries,
            Syndrome::REMOTE_ACCESS => Cause::RemoteAccess,
            Syndrome::LOCAL_PROTECTION | Syndrome::LOCAL_ACCESS => Cause::LocalAccess,
            Syndrome::FLUSHED => Cause::Flushed,
            _ => Cause::Other,
        },
        name: fault.syndrome.name(),
        code: fault.syndrome.0.into(),
        vendor: fault.vendor.into(),
    };
    match what {
        completion::What::Sent => What::Sent,
        completion::What::Arrived { immediate, .. } => What::Arrived(immediate),
        completion::What::SendFailed(f) => What::SendFailed(fault(f)),
        completion::What::ReceiveFailed(f) => What::ReceiveFailed(fault(f)),
    }
}

/// Both ends of a link are on the same NIC, which is a process of this host.
impl Nic for Hca {
    const ENGINE: &'static str = "gpunetio";
    const IS_EMULATED: bool = true;
    type Pair = QueuePair;

    fn about(&self) -> &About {
        self.about()
    }
    fn named(&self, e: Error) -> Error {
        e.with("nic", &self.about().name).with("socket", self.socket())
    }
    fn see(&self) -> String {
        format!("`{}`", self.trace_command())
    }
    fn is_lost(&self) -> bool {
        self.is_lost()
    }
    fn lost(&self) -> Error {
        let guid = format!("{:#x}", self.about().guid);
        Nic::named(self, Error::new(ErrorKind::NoPath, "the NIC is lost"))
            .with("guid", guid)
            .hint(LOST)
    }
    fn partner(&self, _: usize, theirs: &[About]) -> Option<usize> {
        theirs.iter().position(|nic| nic.guid == self.about().guid)
    }
    fn domain(&mut self) -> Result<Domain> {
        self.domain()
    }
    fn drop_domain(&mut self, domain: Domain) -> Result<()> {
        self.drop_domain(domain)
    }
    fn register(
        &mut self,
        domain: Domain,
        region: &Arc<Region>,
        rights: Rights,
    ) -> Result<Vec<Registered>> {
        let key = self.register(domain, region, rights)?;
        Ok(vec![one(key, region.address(), region.bytes())])
    }
    fn register_words(&mut self, domain: Domain, words: &Arc<Words>) -> Result<Registered> {
        let (key, address) = self.register_words(domain, words)?;
        Ok(one(key, address, words.words().len() as u64 * 8))
    }
    fn deregister(&mut self, local: Key) -> Result<()> {
        self.deregister(local)
    }
    fn queue_pair(&mut self, domain: Domain, sends: u32, receives: u32) -> Result<QueuePair> {
        self.queue_pair(domain, sends, receives)
    }
    fn connect(&mut self, pair: &mut QueuePair, peer: End) -> Result<()> {
        self.connect(pair, peer)
    }
    fn error(&mut self, pair: &mut QueuePair) -> Result<()> {
        self.error(pair)
    }
    fn try_destroy(&mut self, pair: QueuePair) -> Result<Option<QueuePair>> {
        self.try_destroy(pair)
    }
    fn destroy(&mut self, pair: QueuePair) {
        // Busy pairs are asked for again, and memory of a lost NIC is kept: nothing else is to be done.
        let _ = self.destroy(pair);
    }
    fn kick(&self) {
        self.kick();
    }
    fn events(&self) -> [Option<RawFd>; 2] {
        [Some(self.events()), None]
    }
    fn drain(&mut self) {
        self.drain();
    }
}

/// One key opens a range to both sides.
fn one(key: Key, address: u64, bytes: u64) -> Registered {
    Registered { address, bytes, local: key, remote: key }
}
