//! The state of an emulated NIC, and its execution; no sockets.
//!
//! Owns: clients, protection domains, keys, queue pairs, the packets on the wire, faults, counters.
//! In: requests ([`Device::request`]) and turns ([`Device::poll`]). Out: answers, bytes in registered
//! memory, completions. What a queue pair does with what is posted is in [`requester`], what it does
//! with packets in [`responder`].
//!
//! Invariants, on which every fence of the engines above rests:
//! 1. A packet is *taken* by the receiving queue pair, after all checks, and *lands* later. Between
//!    the two nothing but the death of the receiver's process keeps it from landing: not an error of
//!    the queue pair, not the end of the key, not the end of the sender.
//! 2. A queue pair in error takes nothing.
//! 3. The flush of a receive that was posted after a queue pair went to error comes behind everything
//!    that the queue pair has taken. So does the answer to its destruction.
//! 4. An entry completes well only when its bytes have landed; completions of a queue pair come in
//!    the order of its entries; after the first that failed, every other is a flush.
//! 5. Packets of one queue pair arrive in order, each once; those on the wire carry their bytes with
//!    them and survive their sender.

mod keys;
mod pair;
mod requester;
mod responder;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use self::keys::{Keys, Registered};
use self::pair::{Pair, State};
use self::requester::Flow;
use super::control::{Answer, Request, Status, TEXT_BYTES_MAX};
use super::faults::{self, Fault, Faults, What, Whom, delay};
use super::layout;
use super::stats::{FaultStats, ProcessStats, Stats};
use super::trace::{Event, Trace};
use crate::mlx5::{Completion, Places, WRITE_BYTES_MAX, completion};
use crate::random::random;
use crate::sys::share::{Import, Words};
use crate::sys::unix::Socket;

/// Most queue pairs of a NIC.
pub(super) const PAIRS_MAX: usize = 4096;
/// Most queue pairs of a client.
pub(super) const CLIENT_PAIRS_MAX: usize = 1024;
/// Most protection domains of a client.
pub(super) const CLIENT_DOMAINS_MAX: usize = 4096;
/// Most keys of a client.
pub(super) const CLIENT_KEYS_MAX: usize = 4096;
/// A packet sequence number, and a queue pair's number.
const MASK_24: u32 = 0xff_ffff;
/// Work of one turn, beyond which the sockets are looked at first.
const TURN: Duration = Duration::from_millis(5);
/// Faults that are gone and still reported.
const PAST_FAULTS_MAX: usize = 64;

/// Settings of a NIC.
#[derive(Clone, Debug)]
pub struct Config {
    /// `emulated0`, …
    pub name: String,
    /// How long an entry waits for the other side before it is sent again.
    pub ack_timeout: Duration,
    /// How often it is sent again before it fails.
    pub retries: u32,
    /// How long a write with an immediate waits after it found no receive.
    pub rnr_delay: Duration,
    /// How often it is sent again before it fails.
    pub rnr_retries: u32,
    /// Most bytes on the wire and to land; an entry waits while there are more.
    pub wire_bytes_max: u64,
    /// Most bytes of one write.
    pub write_bytes_max: u32,
    /// Events that are remembered.
    pub trace_events: usize,
    /// Faults from the start.
    pub faults: Vec<Fault>,
}

impl Config {
    /// The usual settings.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            ack_timeout: Duration::from_millis(67),
            retries: 3,
            rnr_delay: Duration::from_millis(10),
            rnr_retries: 2,
            wire_bytes_max: 64 << 20,
            write_bytes_max: WRITE_BYTES_MAX,
            trace_events: 1 << 14,
            faults: Vec::new(),
        }
    }
}

/// What a turn came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Nothing to do.
    Idle,
    /// Something was done.
    Busy,
    /// A fault says that the NIC ends here and now.
    Killed,
}

#[derive(Debug)]
struct Client {
    pid: i32,
    domains: Vec<u32>,
    events: Option<Socket>,
    /// It is in the trace: those who only look are not.
    is_traced: bool,
}

/// The NIC.
#[derive(Debug)]
pub(crate) struct Device {
    config: Config,
    stats: Stats,
    trace: Trace,
    faults: Faults,
    past_faults: Vec<FaultStats>,
    clients: BTreeMap<u32, Client>,
    last_client: u32,
    last_domain: u32,
    keys: Keys,
    pairs: Vec<Option<Box<Pair>>>,
    next_number: u32,
    /// Where the next turn begins.
    next_slot: usize,
    /// Packets on the wire, by their sender, which may be gone.
    flows: BTreeMap<u32, Flow>,
    /// Bytes of these and of those that are to land.
    wire_bytes: u64,
    killed: bool,
}

fn not_found(what: &str, found: u64) -> Answer {
    let hint = "use what this client made on this NIC and has not given back";
    Answer::refused(Status::NotFound, format!("no {what} {found} of this client"), hint)
}

fn limit(what: &str, most: usize) -> Answer {
    let hint = "give back what is not needed, or use another emulated NIC";
    Answer::refused(Status::Limit, format!("a client has at most {most} {what}"), hint)
}

impl Device {
    pub(crate) fn new(config: Config) -> Self {
        let now = Instant::now();
        let mut faults = Faults::default();
        for fault in &config.faults {
            faults.install(*fault, now);
        }
        Self {
            stats: Stats::default(),
            trace: Trace::new(&config.name, config.trace_events.max(1)),
            faults,
            past_faults: Vec::new(),
            clients: BTreeMap::new(),
            last_client: 0,
            last_domain: 0,
            keys: Keys::default(),
            pairs: Vec::new(),
            // Two NICs hardly ever give the same number, so that mixing them up is noticed.
            next_number: 0x100 + random() as u32 % 0x40_0000,
            next_slot: 0,
            flows: BTreeMap::new(),
            wire_bytes: 0,
            killed: false,
            config,
        }
    }
    pub(crate) fn name(&self) -> &str {
        &self.config.name
    }
    /// The latest fault that was installed to kill it.
    pub(crate) fn killer(&self) -> String {
        let kills = |one: &&faults::Installed| one.fault.what == What::Kill && one.hits > 0;
        self.faults.list().iter().rfind(kills).map(|one| one.fault.to_string()).unwrap_or_default()
    }
    pub(crate) fn stats_mut(&mut self) -> &mut Stats {
        &mut self.stats
    }
    pub(crate) fn has_pairs(&self) -> bool {
        self.pairs.iter().any(Option::is_some)
    }

    /// A client came; its number.
    pub(crate) fn client_came(&mut self, pid: i32, events: Option<Socket>) -> u32 {
        self.last_client += 1;
        let client = Client { pid, domains: Vec::new(), events, is_traced: false };
        self.clients.insert(self.last_client, client);
        self.stats.clients += 1;
        self.last_client
    }
    /// A client is gone, and with it all that it had. Packets that it sent are not.
    pub(crate) fn client_gone(&mut self, client: u32) {
        let Some(gone) = self.clients.remove(&client) else { return };
        for slot in 0..self.pairs.len() {
            let Some(pair) = self.pairs[slot].take_if(|pair| pair.client == client) else {
                continue;
            };
            self.stats.lost_with_receiver += pair.to_land();
            self.wire_bytes -= pair.bytes_to_land();
        }
        self.keys.remove(|key| gone.domains.contains(&key.domain));
        if gone.is_traced {
            self.trace.push(Instant::now(), 0, Event::ClientGone { pid: gone.pid });
        }
    }

    /// Does what a client asks.
    pub(crate) fn request(
        &mut self,
        client: u32,
        request: Request,
        fds: Vec<OwnedFd>,
        now: Instant,
    ) -> Answer {
        let looks = matches!(request, Request::Stats | Request::Trace { .. });
        if let Some(client) = self.clients.get_mut(&client).filter(|c| !looks && !c.is_traced) {
            client.is_traced = true;
            self.trace.push(now, 0, Event::ClientCame { pid: client.pid });
        }
        let answer = self.answer(client, request, fds, now);
        if !matches!(answer.status, Status::Done | Status::Busy) {
            self.stats.refusals += 1;
        }
        answer
    }

    fn answer(
        &mut self,
        client: u32,
        request: Request,
        mut fds: Vec<OwnedFd>,
        now: Instant,
    ) -> Answer {
        match request {
            Request::Hello { .. } => {
                Answer::refused(Status::Malformed, "a second hello", "say it once")
            }
            Request::Domain => {
                let next = self.last_domain + 1;
                let Some(client) = self.clients.get_mut(&client) else {
                    return not_found("client", client.into());
                };
                if client.domains.len() >= CLIENT_DOMAINS_MAX {
                    return limit("domains", CLIENT_DOMAINS_MAX);
                }
                self.last_domain = next;
                client.domains.push(next);
                Answer::done([next.into(), 0, 0, 0])
            }
            Request::DropDomain { domain } => self.drop_domain(client, domain),
            Request::Register { domain, address, bytes, remote_write } => {
                let Some(domain) = self.domain(client, domain) else {
                    return not_found("domain", domain);
                };
                self.register(domain, address, bytes, remote_write, fds.pop())
            }
            Request::Deregister { key } => {
                let mine = self.lookup(key).is_some_and(|one| self.has(client, one.domain));
                if !mine {
                    return not_found("key", key);
                }
                self.keys.remove(|one| u64::from(one.key) == key);
                Answer::done([0; 4])
            }
            Request::QueuePair { domain, words, places, ignore_overruns } => {
                let Some(domain) = self.domain(client, domain) else {
                    return not_found("domain", domain);
                };
                self.create(client, domain, words, places, ignore_overruns, fds.pop(), now)
            }
            Request::Connect { number, peer, sequence } => {
                let Some(slot) = self.pair_of(client, number) else {
                    return not_found("queue pair", number);
                };
                self.connect(slot, peer, sequence, now)
            }
            Request::Error { number } => {
                let Some(slot) = self.pair_of(client, number) else {
                    return not_found("queue pair", number);
                };
                self.error(slot, now);
                Answer::done([0; 4])
            }
            Request::Destroy { number } => {
                let Some(slot) = self.pair_of(client, number) else {
                    return not_found("queue pair", number);
                };
                self.destroy(slot, now)
            }
            Request::Kick => Answer::done([0; 4]),
            Request::Stats => Answer { text: self.stats().to_text(), ..Answer::done([0; 4]) },
            Request::Trace { from } => {
                let (text, next) = self.trace.lines(from, TEXT_BYTES_MAX);
                Answer { text, ..Answer::done([next, 0, 0, 0]) }
            }
            Request::Fault { text } => self.install(&text, now),
            Request::Clear { id } => self.clear(id, now),
        }
    }

    fn has(&self, client: u32, domain: u32) -> bool {
        self.clients.get(&client).is_some_and(|client| client.domains.contains(&domain))
    }
    fn domain(&self, client: u32, domain: u64) -> Option<u32> {
        u32::try_from(domain).ok().filter(|&domain| self.has(client, domain))
    }
    fn lookup(&self, key: u64) -> Option<&Registered> {
        self.keys.get(u32::try_from(key).ok()?)
    }
    fn pair_of(&self, client: u32, number: u64) -> Option<usize> {
        self.find(u32::try_from(number).ok()?, 0)
            .filter(|&slot| self.pairs[slot].as_ref().is_some_and(|pair| pair.client == client))
    }
    /// Where a queue pair is; most often where it was the last time.
    #[inline]
    fn find(&self, number: u32, hint: usize) -> Option<usize> {
        let is = |pair: &Option<Box<Pair>>| pair.as_ref().is_some_and(|p| p.number == number);
        if self.pairs.get(hint).is_some_and(is) {
            return Some(hint);
        }
        self.pairs.iter().position(is)
    }
    #[inline]
    fn pair(&mut self, slot: usize) -> Option<&mut Pair> {
        self.pairs.get_mut(slot)?.as_deref_mut()
    }

    fn drop_domain(&mut self, client: u32, domain: u64) -> Answer {
        let Some(domain) = self.domain(client, domain) else {
            return not_found("domain", domain);
        };
        let used = self.pairs.iter().flatten().filter(|pair| pair.domain == domain).count();
        if used > 0 {
            return Answer::refused(
                Status::Malformed,
                format!("domain {domain} has {used} queue pairs"),
                "destroy them first",
            );
        }
        self.keys.remove(|key| key.domain == domain);
        if let Some(client) = self.clients.get_mut(&client) {
            client.domains.retain(|&one| one != domain);
        }
        Answer::done([0; 4])
    }

    fn register(
        &mut self,
        domain: u32,
        address: u64,
        bytes: u64,
        remote_write: bool,
        fd: Option<OwnedFd>,
    ) -> Answer {
        let owner = self.clients.values().find(|client| client.domains.contains(&domain));
        let keys =
            owner.map_or(0, |owner| self.keys.count(|key| owner.domains.contains(&key.domain)));
        if keys >= CLIENT_KEYS_MAX {
            return limit("keys", CLIENT_KEYS_MAX);
        }
        let refused = |what: String, hint| Answer::refused(Status::Memory, what, hint);
        if address.checked_add(bytes).is_none() {
            return refused(format!("{bytes} bytes at {address:#x} wrap"), "give the real address");
        }
        let Some(fd) = fd else {
            return refused("memory without a descriptor".into(), "send the descriptor of a memfd");
        };
        let memory = match Import::map_for_nic(fd, bytes, remote_write) {
            Ok(memory) => memory,
            Err(e) => {
                return refused(
                    format!("the memory cannot be mapped: {e}"),
                    "register a memfd of ordinary pages, sealed with F_SEAL_SHRINK, and not against \
                     writing if others are to write it",
                );
            }
        };
        let key = self.keys.insert(domain, address, memory, remote_write);
        match key {
            Some(key) => Answer::done([key.into(), 0, 0, 0]),
            None => limit("keys of all clients", keys::KEYS_MAX),
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn create(
        &mut self,
        client: u32,
        domain: u32,
        words: u64,
        places: Places,
        ignore_overruns: bool,
        fd: Option<OwnedFd>,
        now: Instant,
    ) -> Answer {
        let of_client = self.pairs.iter().flatten().filter(|pair| pair.client == client).count();
        if of_client >= CLIENT_PAIRS_MAX {
            return limit("queue pairs", CLIENT_PAIRS_MAX);
        }
        let free = self.pairs.iter().position(Option::is_none);
        if free.is_none() && self.pairs.len() >= PAIRS_MAX {
            return limit("queue pairs of all clients", PAIRS_MAX);
        }
        if self.next_number >= MASK_24 {
            let hint = "start the emulated NIC again";
            return Answer::refused(Status::Limit, "every number has been used", hint);
        }
        if let Err(what) = layout::check(&places, words) {
            return Answer::refused(Status::Malformed, what, "see docs/emulated-nic.h");
        }
        let Some(fd) = fd else {
            let hint = "send the descriptor of a memfd";
            return Answer::refused(Status::Memory, "a queue pair without memory", hint);
        };
        let memory = match Words::import(fd, words as usize) {
            Ok(memory) => memory,
            Err(e) => {
                let hint = "use a memfd of ordinary pages, sealed with F_SEAL_SHRINK";
                let what = format!("the queue pair's memory cannot be mapped: {e}");
                return Answer::refused(Status::Memory, what, hint);
            }
        };
        let number = self.next_number;
        self.next_number += 1;
        let sequence = random() as u32 & MASK_24;
        let pid = self.clients.get(&client).map_or(0, |client| client.pid);
        let pair = Box::new(Pair::new(
            Whom { number, pid },
            (client, domain),
            sequence,
            (memory, places, ignore_overruns),
        ));
        match free {
            Some(slot) => self.pairs[slot] = Some(pair),
            None => self.pairs.push(Some(pair)),
        }
        self.trace.push(now, number, Event::Created { pid });
        Answer::done([number.into(), sequence.into(), 0, 0])
    }

    fn connect(&mut self, slot: usize, peer: u64, sequence: u64, now: Instant) -> Answer {
        let (Ok(peer), Ok(sequence)) = (u32::try_from(peer), u32::try_from(sequence)) else {
            let what = "a number or sequence of more than 24 bits";
            return Answer::refused(Status::Malformed, what, "give what the other side was told");
        };
        let hint = self.find(peer, 0).unwrap_or(0);
        let Some(pair) = self.pair(slot) else { return not_found("queue pair", 0) };
        if pair.state != State::Unconnected {
            return Answer::refused(
                Status::Malformed,
                format!("queue pair {} is {}", pair.number, pair.state.name()),
                "connect a new one: a queue pair is connected once",
            );
        }
        pair.connect(peer, hint, sequence & MASK_24);
        let number = pair.number;
        self.trace.push(now, number, Event::Connected { peer });
        Answer::done([0; 4])
    }

    fn destroy(&mut self, slot: usize, now: Instant) -> Answer {
        self.enter_error(slot, "it is to be destroyed", now);
        let Some(pair) = self.pair(slot) else { return not_found("queue pair", 0) };
        let (number, to_land) = (pair.number, pair.to_land());
        if to_land > 0 {
            self.trace.push(now, number, Event::DestroyBusy { to_land });
            let what =
                format!("queue pair {number} has taken {to_land} packets that may still land");
            return Answer::refused(Status::Busy, what, "ask again");
        }
        self.pairs[slot] = None;
        self.trace.push(now, number, Event::Destroyed);
        Answer::done([0; 4])
    }

    fn install(&mut self, text: &str, now: Instant) -> Answer {
        let fault = match text.parse::<Fault>() {
            Ok(fault) => fault,
            Err(e) => return Answer::refused(Status::Malformed, e.to_string(), ""),
        };
        let Some(id) = self.faults.install(fault, now) else {
            let most = faults::FAULTS_MAX;
            let what = format!("at most {most} faults are installed at a time");
            return Answer::refused(Status::Limit, what, "clear some");
        };
        self.trace.push(now, 0, Event::FaultInstalled { fault: id });
        Answer::done([id, 0, 0, 0])
    }

    /// Removes faults and lets go what they hold; the next turn moves it.
    fn clear(&mut self, id: u64, now: Instant) -> Answer {
        let gone = self.faults.clear(id);
        if gone.is_empty() && id != 0 {
            let known: Vec<_> = self.faults.list().iter().map(|one| one.id.to_string()).collect();
            let what = format!("fault {id} is not installed, only [{}]", known.join(", "));
            return Answer::refused(Status::NotFound, what, "0 clears all");
        }
        for one in &gone {
            for flow in self.flows.values_mut() {
                flow.release(one.id);
            }
            for pair in self.pairs.iter_mut().flatten() {
                pair.release(one.id);
            }
            let fault = one.fault.to_string();
            self.past_faults.push(FaultStats { id: one.id, hits: one.hits, fault });
            self.trace.push(now, 0, Event::FaultCleared { fault: one.id });
        }
        let surplus = self.past_faults.len().saturating_sub(PAST_FAULTS_MAX);
        self.past_faults.drain(..surplus);
        Answer::done([gone.len() as u64, 0, 0, 0])
    }

    fn stats(&self) -> Stats {
        let mut stats = self.stats.clone();
        stats.faults.clone_from(&self.past_faults);
        stats.faults.extend(self.faults.list().iter().map(|one| FaultStats {
            id: one.id,
            hits: one.hits,
            fault: one.fault.to_string(),
        }));
        stats.pairs = self.pairs.iter().flatten().map(|pair| pair.stats()).collect();
        let process = |(number, client): (&u32, &Client)| ProcessStats {
            pid: client.pid,
            domains: client.domains.len() as u64,
            keys: self.keys.count(|key| client.domains.contains(&key.domain)) as u64,
            pairs: self.pairs.iter().flatten().filter(|pair| pair.client == *number).count() as u64,
        };
        stats.processes = self.clients.iter().map(process).collect();
        stats
    }

    /// One turn: everything that is due, a bounded number of entries of each queue pair.
    pub(crate) fn poll(&mut self, now: Instant) -> Turn {
        let mut busy = self.poll_wire(now);
        let first = self.next_slot;
        for slot in (first..self.pairs.len()).chain(0..first.min(self.pairs.len())) {
            let was_busy = self.poll_pair(slot, now);
            busy |= was_busy;
            if self.killed {
                return Turn::Killed;
            }
            if was_busy && now.elapsed() > TURN {
                self.next_slot = slot + 1;
                break;
            }
        }
        if busy { Turn::Busy } else { Turn::Idle }
    }
    /// When something is due that nobody rings for.
    pub(crate) fn next_timer(&self) -> Option<Instant> {
        let pairs = self.pairs.iter().flatten().filter_map(|pair| pair.next_timer());
        let flows = self.flows.values().filter_map(Flow::next_timer);
        pairs.chain(flows).min()
    }

    fn poll_pair(&mut self, slot: usize, now: Instant) -> bool {
        if self.pair(slot).is_none() {
            return false;
        }
        let mut busy = self.hear(slot, now);
        busy |= self.land(slot, now);
        busy |= self.poll_late(slot, now);
        busy | self.send(slot, now)
    }

    /// Stores a completion, or what a fault makes of it.
    fn complete(&mut self, slot: usize, index: u64, what: completion::What, now: Instant) {
        let Some(pair) = self.pairs.get_mut(slot).and_then(Option::as_deref_mut) else { return };
        let whom = pair.whom();
        let completion = Completion { queue_pair: pair.number, index: index as u16, what };
        if !self.faults.is_empty() {
            let lost = self.faults.hit(whom, |w| (w == What::LoseCompletion).then_some(()));
            if let Some((fault, ())) = lost {
                let event = Event::Struck { fault, what: "a completion never comes" };
                self.trace.push(now, whom.number, event);
                return;
            }
            let late = self.faults.hit(whom, |w| match w {
                What::DelayCompletions { us } => Some(delay(us)),
                _ => None,
            });
            if let Some((_, by)) = late {
                pair.delay(completion, now + by);
                return;
            }
        }
        if pair.is_late() {
            pair.delay(completion, now);
            return;
        }
        self.store(slot, &completion, now);
    }
    fn poll_late(&mut self, slot: usize, now: Instant) -> bool {
        let mut busy = false;
        while let Some(completion) = self.pair(slot).and_then(|pair| pair.due(now)) {
            self.store(slot, &completion, now);
            busy = true;
        }
        busy
    }
    fn store(&mut self, slot: usize, completion: &Completion, now: Instant) {
        let Some(pair) = self.pairs.get_mut(slot).and_then(Option::as_deref_mut) else { return };
        use pair::Stored;
        match pair.store(completion) {
            Stored::Done { armed } => {
                self.stats.completions += 1;
                if let completion::What::SendFailed(fault)
                | completion::What::ReceiveFailed(fault) = completion.what
                {
                    *self.stats.syndromes.entry(fault.syndrome.0).or_default() += 1;
                }
                let client = self.clients.get(&pair.client).filter(|_| armed);
                if let Some(events) = client.and_then(|client| client.events.as_ref()) {
                    // A full socket is readable as well.
                    let _ = events.send(&[1], &[]);
                    self.stats.events += 1;
                }
            }
            Stored::Overrun { first: true } => {
                self.stats.overruns += 1;
                let number = pair.number;
                self.trace.push(now, number, Event::Overrun);
                self.enter_error(slot, "its completion ring is full", now);
            }
            Stored::Overrun { first: false } => self.stats.overruns += 1,
        }
    }
}
