//! The worker's side of an emulated NIC: what a driver is to a real one.
//!
//! Owns: the control socket, and the memory of queue pairs. Every call is answered within
//! [`ANSWER`] or the NIC counts as lost for good, as a driver's call blocks on a NIC that hangs. In:
//! calls of the engine's thread. Out: keys, queue pairs, one descriptor that becomes readable when
//! an armed completion queue has something. Invariant: memory that the NIC may still write is kept
//! until the NIC has said that it does not: what is lost with a NIC is never unmapped.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use kvlane_proto::{Error, ErrorKind, Result};

use super::control::{ANSWER_BYTES_MAX, Answer, Request, Status, VERSION};
use super::faults::Fault;
use super::layout;
use super::stats::Stats;
pub use crate::engine::one_sided::nic::{About, Domain, End, Key, Rights};
use crate::memory::Region;
use crate::mlx5::{CompletionQueue, RECEIVES_MAX, ReceiveQueue, SENDS_MAX, SendQueue, completion};
use crate::sys::share::{ReadWords, Words, is_open_to_writers};
use crate::sys::unix::{Name, Socket};
use crate::sys::wait::{PollSet, readable};

/// How long an answer may take.
pub const ANSWER: Duration = Duration::from_secs(2);
/// What to do about a NIC that is lost.
pub(crate) const LOST: &str = "a NIC that dies, or does not answer for 2 s, is lost to every worker that opened it until that \
     worker is restarted: start the NIC again if it has ended, then the workers";

/// A queue pair of this side. It is given back to [`Hca::destroy`]; one that is dropped goes on at the
/// NIC, which has its own mapping of the memory, until the [`Hca`] is closed.
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
    at: Name,
    about: About,
    socket: Socket,
    events: Socket,
    page: ReadWords,
    serial: u32,
    is_lost: bool,
    polls: PollSet,
    /// Destroyed pairs in which something may still land: the NIC is asked again and again.
    dying: Vec<QueuePair>,
    /// Words that a queue pair of the other side may write: kept as long as the key.
    words: Vec<(Domain, Key, Arc<Words>)>,
}

impl Hca {
    /// Opens the NIC that listens there.
    ///
    /// # Errors
    /// [`kvlane_proto::ErrorKind::Io`] if it cannot be reached.
    pub fn open(at: &Name) -> Result<Self> {
        let failed = |what: &str, e: io::Error| {
            let hint = match at {
                Name::File(path) if path.components().count() == 1 => {
                    format!("a name without @ is a file; did you mean @{at}?")
                }
                _ => format!("start one there: kvlane emulated-nic --socket {at}"),
            };
            Error::new(ErrorKind::Io, what).with("socket", at).hint(hint).caused_by(e)
        };
        let socket =
            Socket::dial(at).map_err(|e| failed("an emulated NIC cannot be reached", e))?;
        let (events, theirs) =
            Socket::pair().map_err(|e| failed("no sockets for an emulated NIC's events", e))?;
        let hello = Request::Hello { version: VERSION };
        let mut wire = Wire { socket: &socket, serial: 0, polls: &mut PollSet::default() };
        let (answer, mut fds) = wire
            .call(&hello, &[theirs.as_fd()])
            .map_err(|e| failed("an emulated NIC does not answer", e))?;
        drop(theirs);
        let answer = done(answer).map_err(|e| e.with("socket", at))?;
        let [guid, words, ..] = answer.values;
        let page = match fds.pop() {
            Some(fd) => ReadWords::import(fd, usize::try_from(words).unwrap_or(0)),
            None => Err(io::Error::new(io::ErrorKind::InvalidData, "no page came with the hello")),
        };
        let page = page.map_err(|e| failed("an emulated NIC's page cannot be used", e))?;
        Ok(Self {
            at: at.clone(),
            about: About { name: answer.text, guid },
            socket,
            events,
            page,
            serial: 1,
            is_lost: false,
            polls: PollSet::default(),
            dying: Vec::new(),
            words: Vec::new(),
        })
    }
    /// What it is.
    pub fn about(&self) -> &About {
        &self.about
    }
    /// Where it listens.
    pub fn socket(&self) -> &Name {
        &self.at
    }
    /// Where people see what it has done.
    pub(crate) fn trace_command(&self) -> String {
        format!("kvlane emulated-nic trace --socket {}", self.at)
    }
    /// Whether it has been lost.
    pub fn is_lost(&self) -> bool {
        self.is_lost
    }
    /// Makes a protection domain.
    ///
    /// # Errors
    /// As every call: [`kvlane_proto::ErrorKind::NoPath`] if the NIC is lost, else what it refused.
    pub fn domain(&mut self) -> Result<Domain> {
        let [domain, ..] = self.call(&Request::Domain, &[])?.values;
        Ok(Domain(domain as u32))
    }
    /// Gives a domain up, with the keys in it. Queue pairs in it must be destroyed.
    ///
    /// # Errors
    /// As [`Hca::domain`].
    pub fn drop_domain(&mut self, domain: Domain) -> Result<()> {
        self.call(&Request::DropDomain { domain: domain.0.into() }, &[])?;
        self.words.retain(|(of, ..)| *of != domain);
        Ok(())
    }
    /// Registers memory. Only memory with a descriptor can be, and for [`Rights::RemoteWrite`] only
    /// such as others may write to ([`Region::for_nic`]).
    ///
    /// # Errors
    /// As [`Hca::domain`]; [`kvlane_proto::ErrorKind::Memory`] with the region.
    pub fn register(&mut self, domain: Domain, region: &Region, rights: Rights) -> Result<Key> {
        let refused = |what: &str| {
            Error::new(ErrorKind::Memory, what)
                .with("nic", &self.about.name)
                .with("region", region)
                .hint("emulated NICs reach pools made by Region::for_nic only; borrow none")
        };
        let Some(fd) = region.memory().fd() else {
            return Err(refused("memory without a descriptor cannot be given to an emulated NIC"));
        };
        let remote_write = rights == Rights::RemoteWrite;
        if remote_write && !is_open_to_writers(fd) {
            return Err(refused("the region is sealed: nobody but this process can write it"));
        }
        let (address, bytes) = (region.address(), region.bytes());
        let request = Request::Register { domain: domain.0.into(), address, bytes, remote_write };
        let answer = self.call(&request, &[fd]).map_err(|e| e.with("region", region))?;
        Ok(Key(answer.values[0] as u32))
    }
    /// Registers words that the other side's writes land in: credit. Their address comes with the key.
    /// They are kept until the key is taken back, and for ever if the NIC is lost.
    ///
    /// # Errors
    /// As [`Hca::register`].
    pub fn register_words(&mut self, domain: Domain, words: &Arc<Words>) -> Result<(Key, u64)> {
        let (address, bytes) = (words.address(), words.words().len() as u64 * 8);
        let request =
            Request::Register { domain: domain.0.into(), address, bytes, remote_write: true };
        if !is_open_to_writers(words.fd()) {
            return Err(Error::new(ErrorKind::Memory, "words that nobody else can write")
                .with("nic", &self.about.name)
                .hint("make them by Words::new(len, false)"));
        }
        let answer = self.call(&request, &[words.fd()])?;
        let key = Key(answer.values[0] as u32);
        self.words.push((domain, key, words.clone()));
        Ok((key, address))
    }
    /// Takes a key back: no entry that names it is executed any more. What has been taken by a queue
    /// pair lands all the same: only the end of the queue pair is a fence.
    ///
    /// # Errors
    /// As [`Hca::domain`].
    pub fn deregister(&mut self, key: Key) -> Result<()> {
        self.call(&Request::Deregister { key: key.0.into() }, &[])?;
        self.words.retain(|(_, of, _)| *of != key);
        Ok(())
    }
    /// Makes a queue pair with room for so many entries and receives (powers of two).
    ///
    /// # Errors
    /// As [`Hca::domain`].
    pub fn queue_pair(&mut self, domain: Domain, sends: u32, receives: u32) -> Result<QueuePair> {
        for (name, found, most) in
            [("sends", sends, SENDS_MAX), ("receives", receives, RECEIVES_MAX)]
        {
            if !found.is_power_of_two() || found > most {
                return Err(Error::new(ErrorKind::Malformed, "a queue pair of a wrong size")
                    .with("nic", &self.about.name)
                    .with(name, found)
                    .hint(format!("a power of two from 1 to {most}")));
            }
        }
        let (places, len) = layout::queue_pair(sends, receives);
        let memory = Words::new(len, false).map_err(|e| {
            Error::new(ErrorKind::Memory, "no memory for a queue pair")
                .with("words", len)
                .hint("free memory, or use smaller queue pairs")
                .caused_by(e)
        })?;
        let ring = memory.words().get(places.completions_at..).unwrap_or_default();
        for (word, value) in ring.iter().zip(completion::unwritten().iter().cycle()) {
            word.store(*value, Ordering::Relaxed);
        }
        let memory = Arc::new(memory);
        let request = Request::QueuePair {
            domain: domain.0.into(),
            words: len as u64,
            places,
            ignore_overruns: false,
        };
        let [number, sequence, ..] = self.call(&request, &[memory.fd()])?.values;
        let (number, sequence) = (number as u32, sequence as u32);
        Ok(QueuePair {
            number,
            sequence,
            sends: SendQueue::new(memory.clone(), places, number),
            receives: ReceiveQueue::new(memory.clone(), places),
            completions: CompletionQueue::new(memory, places),
        })
    }
    /// Connects it: it receives and sends from here on. Only packets of `peer` are taken; its number and
    /// sequence are all that counts here.
    ///
    /// # Errors
    /// As [`Hca::domain`].
    pub fn connect(&mut self, pair: &QueuePair, peer: End) -> Result<()> {
        let (number, sequence) = (pair.number.into(), peer.sequence.into());
        self.call(&Request::Connect { number, peer: peer.number.into(), sequence }, &[])?;
        Ok(())
    }
    /// Takes it to error: what is posted is flushed, packets are refused. What the NIC took before
    /// may land until a receive posted *after* this call has been flushed by a second one.
    ///
    /// # Errors
    /// As [`Hca::domain`].
    pub fn error(&mut self, pair: &QueuePair) -> Result<()> {
        self.call(&Request::Error { number: pair.number.into() }, &[])?;
        Ok(())
    }
    /// Destroys it: its memory is not used any more, and nothing lands by it.
    ///
    /// # Errors
    /// As [`Hca::domain`]; the memory is then kept for ever. [`kvlane_proto::ErrorKind::Busy`] if
    /// something that it has taken may still land: it is not a fence yet. The pair is kept and
    /// destroyed later, by [`Hca::drain`]; see [`Hca::try_destroy`] to wait for it.
    pub fn destroy(&mut self, pair: QueuePair) -> Result<()> {
        let number = pair.number;
        match self.try_destroy(pair)? {
            None => Ok(()),
            Some(pair) => {
                self.dying.push(pair);
                Err(Error::new(ErrorKind::Busy, "packets that the queue pair took may still land")
                    .with("nic", &self.about.name)
                    .with("queue_pair", number)
                    .hint("flush it first: error, post a receive, error, wait for its completion"))
            }
        }
    }
    /// As [`Hca::destroy`], but gives the pair back as long as something may land.
    ///
    /// # Errors
    /// As [`Hca::destroy`], never busy.
    pub fn try_destroy(&mut self, pair: QueuePair) -> Result<Option<QueuePair>> {
        let request = Request::Destroy { number: pair.number.into() };
        match self.exchange(&request, &[]) {
            Ok(answer) if answer.status == Status::Busy => Ok(Some(pair)),
            Ok(answer) if answer.status == Status::Done => Ok(None),
            Ok(answer) => {
                std::mem::forget(pair);
                done(answer).map(|_| None)
            }
            Err(e) => {
                // A NIC that does not answer may write it for ever.
                std::mem::forget(pair);
                Err(e)
            }
        }
    }
    /// Pairs that were given to [`Hca::destroy`] and in which something may still land.
    #[doc(hidden)]
    pub fn dying(&self) -> usize {
        self.dying.len()
    }
    /// Wakes the NIC if it naps: to be called after doorbells were rung. Costs a fence and a load
    /// otherwise. Who does not call it waits for a millisecond at most.
    #[inline]
    pub fn kick(&self) {
        // Either this side sees that it naps, or it sees the doorbell before it does.
        fence(Ordering::SeqCst);
        if self.page.load(layout::ASLEEP_AT as u32) == Some(1) {
            // A socket that is full wakes it as well.
            let _ = self.socket.send(&Request::Kick.encode(0), &[]);
        }
    }
    /// Becomes readable when an armed completion queue has something, or when the NIC is lost.
    pub fn events(&self) -> RawFd {
        self.events.fd()
    }
    /// Takes the events that wait, and notices whether the NIC is still there.
    pub fn drain(&mut self) {
        let (mut byte, mut fds) = ([0; 8], Vec::new());
        while readable(self.events.fd()) && !self.is_lost {
            match self.events.receive(&mut byte, &mut fds) {
                Ok(n) if n > 0 => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                _ => self.is_lost = true,
            }
        }
        for _ in 0..self.dying.len() {
            // Those that fail are kept for ever, by that call.
            let Some(pair) = self.dying.pop() else { break };
            if let Ok(Some(pair)) = self.try_destroy(pair) {
                self.dying.insert(0, pair);
            }
        }
    }

    /// What it has counted.
    ///
    /// # Errors
    /// As [`Hca::domain`].
    pub fn stats(&mut self) -> Result<Stats> {
        Ok(Stats::from_text(&self.call(&Request::Stats, &[])?.text))
    }
    /// What happened from event `from` on, one line an event, and the number of the next one.
    ///
    /// # Errors
    /// As [`Hca::domain`].
    pub fn trace(&mut self, from: u64) -> Result<(String, u64)> {
        let answer = self.call(&Request::Trace { from }, &[])?;
        Ok((answer.text, answer.values[0]))
    }
    /// Installs a fault; its number.
    ///
    /// # Errors
    /// As [`Hca::domain`].
    pub fn fault(&mut self, fault: &Fault) -> Result<u64> {
        Ok(self.call(&Request::Fault { text: fault.to_string() }, &[])?.values[0])
    }
    /// Removes a fault, 0 for all, and lets go what it holds; how many there were.
    ///
    /// # Errors
    /// As [`Hca::domain`].
    pub fn clear(&mut self, fault: u64) -> Result<u64> {
        Ok(self.call(&Request::Clear { id: fault }, &[])?.values[0])
    }

    fn call(&mut self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<Answer> {
        done(self.exchange(request, fds)?).map_err(|e| e.with("nic", &self.about.name))
    }
    fn exchange(&mut self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<Answer> {
        let lost = |at: &Name, about: &About| {
            Error::new(ErrorKind::NoPath, "the emulated NIC is lost")
                .with("nic", &about.name)
                .with("socket", at)
                .hint(LOST)
        };
        if self.is_lost {
            return Err(lost(&self.at, &self.about));
        }
        let mut wire = Wire { socket: &self.socket, serial: self.serial, polls: &mut self.polls };
        self.serial = self.serial.wrapping_add(1);
        match wire.call(request, fds) {
            Ok((answer, _)) => Ok(answer),
            Err(e) => {
                self.is_lost = true;
                Err(lost(&self.at, &self.about).caused_by(e))
            }
        }
    }
}

impl Drop for Hca {
    fn drop(&mut self) {
        // What a NIC that hangs may still write is never unmapped.
        if self.is_lost {
            std::mem::take(&mut self.words).into_iter().for_each(std::mem::forget);
            std::mem::take(&mut self.dying).into_iter().for_each(std::mem::forget);
        }
    }
}

/// What was refused, as an error.
fn done(answer: Answer) -> Result<Answer> {
    let kind = match answer.status {
        Status::Done => return Ok(answer),
        Status::Malformed => ErrorKind::Malformed,
        Status::Busy => ErrorKind::Busy,
        Status::NotFound => ErrorKind::NotFound,
        Status::Limit => ErrorKind::LimitExceeded,
        Status::Memory => ErrorKind::Memory,
    };
    let (what, hint) = answer.text.split_once('\n').unwrap_or((&answer.text, ""));
    let e = Error::new(kind, format!("the emulated NIC refuses: {what}"));
    Err(if hint.is_empty() { e } else { e.hint(hint) })
}

/// One request and its answer.
struct Wire<'a> {
    socket: &'a Socket,
    serial: u32,
    polls: &'a mut PollSet,
}

impl Wire<'_> {
    fn call(
        &mut self,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<(Answer, Vec<OwnedFd>)> {
        let deadline = Instant::now() + ANSWER;
        let request = request.encode(self.serial);
        let sent = self.until(deadline, false, |socket| socket.send(&request, fds));
        let (mut bytes, mut fds) = (vec![0; ANSWER_BYTES_MAX], Vec::new());
        let mut receive =
            |wire: &mut Self| wire.until(deadline, true, |s| s.receive(&mut bytes, &mut fds));
        let n = match (sent, receive(self)) {
            (Ok(()), Ok(n)) => n,
            // A NIC that hangs up has mostly said why; the words are behind the error.
            (Ok(()), Err(e)) if e.kind() == io::ErrorKind::ConnectionReset => receive(self)?,
            (Err(_), Ok(n)) if n > 0 => n,
            (Err(e), _) | (_, Err(e)) => return Err(e),
        };
        let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let (serial, answer) =
            Answer::decode(bytes.get(..n).unwrap_or_default()).map_err(invalid)?;
        if serial != self.serial {
            // No request is ever given up, so another's answer is a broken NIC; a refusal at the
            // door has no number.
            if serial != 0 || answer.status == Status::Done {
                return Err(invalid(format!("answer {serial} to request {}", self.serial)));
            }
        }
        Ok((answer, fds))
    }
    /// Does it as soon as the socket lets it.
    fn until<T>(
        &mut self,
        deadline: Instant,
        read: bool,
        mut call: impl FnMut(&Socket) -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            match call(self.socket) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                other => return other,
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.polls.clear();
            self.polls.add(self.socket.fd(), read, !read);
            self.polls.wait(left);
        }
    }
}
