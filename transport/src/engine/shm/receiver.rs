//! The receiving end of a lane: parts are copied into their pages, or refused.
//!
//! In: messages and slots of one authenticated connection, hostile all the same. Out:
//! [`EngineEvent::Arrived`] and [`EngineEvent::Scrapped`], one ack a part, in order. Invariants:
//! bytes land only while the grant's pen is held, for one copy of at most [`COPY_BYTES`]; a part has
//! arrived only if its serve word still says what it said when the part was posted, read after the
//! last byte was copied; a part of a grant that is not open, or was changed, or lies elsewhere, is
//! refused without ending the lane; a ring or message that breaks the rules ends the lane.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvlane_proto::{Error, ErrorKind, LaneId, LinkId, Refusal, Time, limits};

use super::ready::{Done, Readier};
use super::ring::{ReceiverRing, WORDS};
use super::sender::is_later;
use super::serve::SERVES;
use super::wire::{
    self, ACCESS_HINT, Ack, Extent, MESSAGE_BYTES, Message, Part, ServeWord, Status, Token, Turned,
};
use super::{MESSAGES_PER_TURN, REGIONS_MAX};
use crate::engine::EngineEvent;
use crate::engine::pen::{Pens, Target};
use crate::engine::throttle;
use crate::memory::Registry;
use crate::sys::copy::{Sources, settle};
use crate::sys::mem::Pages;
use crate::sys::share::{Import, ReadWords, Words};
use crate::sys::unix::{Peer, Socket};

/// Most bytes of one copy. A revoke waits for one copy at most.
const COPY_BYTES: u64 = 1 << 20;
/// Copies that one lane may make before the next has its turn.
const COPIES_PER_TURN: u32 = 4;
/// Most ranges of another process in one call.
const RANGES_MAX: usize = 512;

/// What a lane works with while it has its turn.
pub(super) struct Turn<'a> {
    pub(super) now: Time,
    pub(super) pens: &'a Pens,
    pub(super) registry: &'a Registry,
    pub(super) readier: &'a Readier,
    /// The link's imports: lanes that are given the same memory map it once.
    pub(super) imports: &'a mut Vec<Arc<Import>>,
    pub(super) events: &'a mut Vec<EngineEvent>,
}

/// A pool of the sender's.
enum Pool {
    /// Mapped here.
    Mapped(Arc<Import>),
    /// At an address of the sender's process.
    Foreign { address: u64, bytes: u64 },
}

/// The pools of a lane, by number.
#[derive(Default)]
struct Pools(Vec<(u32, Pool)>);

impl Pools {
    /// Where it stands, or where it would.
    fn place(&self, id: u32) -> Result<usize, usize> {
        self.0.binary_search_by_key(&id, |(pool, _)| *pool)
    }
    fn at(&self, id: u32) -> Option<&Pool> {
        self.place(id).ok().map(|at| &self.0[at].1)
    }
    fn remove(&mut self, id: u32) -> bool {
        let before = self.0.len();
        self.0.retain(|(pool, _)| *pool != id);
        self.0.len() < before
    }
}

/// Slots that are taken in a row before others have their turn.
const SLOTS_PER_COPY: u32 = 1024;

/// What a part's bytes are for.
enum Fate {
    /// They land in `Inbound::pages`.
    Land { target: Arc<Target>, crc: u32 },
    /// They are not copied; why, unless the part has landed already.
    Scrap { status: Status, why: Option<Refusal> },
}

/// A part whose first slot has come.
struct Frame {
    head: Part,
    /// Extents that are still in the ring.
    extents: u32,
    /// Bytes of extents that have not been gathered.
    bytes: u64,
    fate: Fate,
}

/// What is copied next.
#[derive(Default)]
struct Batch {
    sources: Sources,
    ranges: Vec<(u64, u64)>,
    bytes: u64,
}

enum Stage {
    /// Memory is being shared.
    Sharing,
    /// Until imports are ready, or it is time.
    Preparing { until: Time },
    /// Carries parts.
    Up,
}

/// One lane, connected and authenticated.
pub(super) struct Inbound {
    link: LinkId,
    lane: LaneId,
    socket: Socket,
    peer: Option<Peer>,
    stage: Stage,
    /// By when it must be up.
    deadline: Time,
    /// Imports that are not ready.
    waiting: Vec<Done>,
    shared: Option<(ReceiverRing, ReadWords)>,
    pools: Pools,
    /// A part whose grant was not open: it is looked for once more in the next turn. Its grant was
    /// opened before it was offered, but the order may have come after this turn began.
    again: Option<Part>,
    /// The part that is being copied.
    frame: Option<Frame>,
    /// Extents of the latest slot that have not been gathered, last first.
    rest: Vec<Extent>,
    pages: Pages,
    batch: Batch,
}

impl Inbound {
    /// A lane whose hello has come; the answer is the proof.
    pub(super) fn new(
        now: Time,
        link: LinkId,
        lane: LaneId,
        socket: Socket,
        proof: Token,
    ) -> Result<Self, std::io::Error> {
        socket.send(&Message::Welcome { proof }.encode(), &[])?;
        Ok(Self {
            link,
            lane,
            peer: socket.peer().ok(),
            socket,
            stage: Stage::Sharing,
            deadline: now.plus_ms(limits::HANDSHAKE_MS),
            waiting: Vec::new(),
            shared: None,
            pools: Pools::default(),
            again: None,
            frame: None,
            rest: Vec::new(),
            pages: Pages::default(),
            batch: Batch::default(),
        })
    }
    pub(super) fn id(&self) -> LaneId {
        self.lane
    }
    pub(super) fn fd(&self) -> std::os::fd::RawFd {
        self.socket.fd()
    }
    pub(super) fn is_up(&self) -> bool {
        matches!(self.stage, Stage::Up)
    }
    /// Whether a pool of this lane is this import.
    pub(super) fn has(&self, import: &Arc<Import>) -> bool {
        self.pools.0.iter().any(|(_, p)| matches!(p, Pool::Mapped(i) if Arc::ptr_eq(i, import)))
    }
    /// Ready to sleep: says so to the sender, and gives when to look again.
    pub(super) fn park(&self) -> Option<Time> {
        match (&self.stage, &self.shared) {
            (Stage::Sharing, _) => Some(self.deadline),
            (Stage::Preparing { until }, _) => Some(*until),
            (Stage::Up, Some((ring, _))) => {
                ring.sleep();
                // A part that is half gathered goes on with the next slot only.
                let left = self.again.is_some() || !self.rest.is_empty();
                let some = left || ring.has_slot().unwrap_or(true);
                some.then_some(Time(0))
            }
            (Stage::Up, None) => None,
        }
    }
    /// It slept.
    pub(super) fn awake(&self) {
        if let Some((ring, _)) = self.shared.as_ref().filter(|_| self.is_up()) {
            ring.awake();
        }
    }
    /// One turn, with a look at the socket if `hear`; says whether anything moved, or why the lane is
    /// over.
    pub(super) fn poll(&mut self, turn: &mut Turn<'_>, hear: bool) -> Result<bool, Refusal> {
        let mut moved = false;
        if self.is_up() {
            for _ in 0..COPIES_PER_TURN {
                match self.step(turn) {
                    Ok(true) => moved = true,
                    Ok(false) => break,
                    Err(why) => {
                        // What has landed need not be sent again.
                        self.publish();
                        return Err(why);
                    }
                }
            }
            if moved {
                self.publish();
            }
        }
        if hear {
            moved |= self.hear(turn)?;
            moved |= self.prepare(turn)?;
        }
        Ok(moved)
    }

    /// Gives room back, and wakes the sender if it sleeps.
    fn publish(&mut self) {
        let Some((ring, _)) = &self.shared else { return };
        ring.give_back();
        if ring.to_wake() {
            // A socket that is full wakes as well.
            let _ = self.socket.send(&Message::Bell.encode(), &[]);
        }
    }

    /// Makes the lane ready, when its imports are.
    fn prepare(&mut self, turn: &mut Turn<'_>) -> Result<bool, Refusal> {
        match self.stage {
            Stage::Up => return Ok(false),
            Stage::Sharing if turn.now < self.deadline => return Ok(false),
            Stage::Sharing => {
                return Err(Refusal::new(
                    ErrorKind::DeadlineExceeded,
                    "no memory was shared in time",
                ));
            }
            Stage::Preparing { until } => {
                self.waiting.retain(|done| !done.load(Ordering::Acquire));
                if !self.waiting.is_empty() && turn.now < until {
                    return Ok(false);
                }
            }
        }
        self.waiting.clear();
        self.socket.send(&Message::Ready.encode(), &[]).map_err(broke)?;
        self.stage = Stage::Up;
        turn.events.push(EngineEvent::LaneUp { link: self.link, lane: self.lane });
        Ok(true)
    }

    /// Takes what the sender says over the socket.
    fn hear(&mut self, turn: &mut Turn<'_>) -> Result<bool, Refusal> {
        let (mut bytes, mut fds) = ([0; MESSAGE_BYTES], Vec::new());
        for n in 0..MESSAGES_PER_TURN {
            match self.socket.receive(&mut bytes, &mut fds) {
                Err(e) if is_later(&e) => return Ok(n > 0),
                Err(e) if e.kind() == std::io::ErrorKind::InvalidData => {
                    return Err(self.turn_away(Turned::Order, "a message that does not fit"));
                }
                Err(e) => return Err(broke(e)),
                Ok(0) => {
                    let why = "the sender closed the lane's connection";
                    return Err(Refusal::new(ErrorKind::PeerLost, why));
                }
                Ok(len) => {
                    if let Err((turned, why)) = self.heard(turn, &bytes[..len], &mut fds) {
                        return Err(self.turn_away(turned, &why));
                    }
                }
            }
        }
        Ok(true)
    }

    fn turn_away(&self, turned: Turned, why: &str) -> Refusal {
        // It is the last thing said, so it may get lost.
        let _ = self.socket.send(&Message::Refuse(turned).encode(), &[]);
        let kind = turned.refusal().0;
        Error::new(kind, "the sender broke the rules of the lane").with("found", why).to_refusal()
    }

    fn heard(
        &mut self,
        turn: &mut Turn<'_>,
        bytes: &[u8],
        fds: &mut Vec<OwnedFd>,
    ) -> Result<(), (Turned, String)> {
        let order = |why: &str| Err((Turned::Order, why.to_string()));
        let bad = |e: std::io::Error| (Turned::Descriptor, e.to_string());
        let Some(message) = Message::decode(bytes) else {
            return order("something else than a message");
        };
        let most = match message {
            Message::Share => 2,
            Message::Pool { .. } => 1,
            _ => 0,
        };
        if fds.len() > most {
            return order("descriptors that nobody asked for");
        }
        match message {
            Message::Share if self.shared.is_none() => {
                let (Some(serves), Some(ring)) = (fds.pop(), fds.pop()) else {
                    return order("rings without descriptors");
                };
                let ring = ReceiverRing::new(Words::import(ring, WORDS).map_err(bad)?);
                self.shared = Some((ring, ReadWords::import(serves, SERVES).map_err(bad)?));
            }
            Message::Pool { id, address, bytes } if self.shared.is_some() => {
                if self.pools.0.len() >= REGIONS_MAX {
                    return Err((Turned::Pools, format!("more than {REGIONS_MAX} regions")));
                }
                let Err(place) = self.pools.place(id) else {
                    return order("a pool's number twice");
                };
                let pool = match fds.pop() {
                    Some(fd) if address == 0 => {
                        Pool::Mapped(self.import(turn, fd, bytes).map_err(bad)?)
                    }
                    None if bytes > 0 && address > 0 && address.checked_add(bytes).is_some() => {
                        Pool::Foreign { address, bytes }
                    }
                    _ => return order("a pool that cannot be"),
                };
                self.pools.0.insert(place, (id, pool));
            }
            Message::Forget { id } if self.pools.remove(id) => {}
            Message::Begin if self.shared.is_some() && matches!(self.stage, Stage::Sharing) => {
                // Half of the time; what is not ready then is slower, not wrong.
                let until = turn.now.plus_ms(limits::HANDSHAKE_MS / 2);
                self.stage = Stage::Preparing { until };
            }
            Message::Bell if self.is_up() => {}
            _ => return order("a message that may not come now"),
        }
        Ok(())
    }

    fn import(
        &mut self,
        turn: &mut Turn<'_>,
        fd: OwnedFd,
        bytes: u64,
    ) -> std::io::Result<Arc<Import>> {
        if let Some(import) = turn.imports.iter().find(|i| i.is_of(fd.as_fd(), bytes)) {
            return Ok(import.clone());
        }
        let import = Arc::new(Import::map(fd, bytes)?);
        turn.imports.push(import.clone());
        let done = turn.readier.ask(&import);
        if !self.is_up() {
            self.waiting.push(done);
        }
        Ok(import)
    }

    /// One copy, or one part refused; says whether there may be more.
    fn step(&mut self, turn: &mut Turn<'_>) -> Result<bool, Refusal> {
        if self.frame.is_none() && !self.begin(turn)? {
            return Ok(false);
        }
        let Some(mut frame) = self.frame.take() else { return Ok(true) };
        let moved = self.gather(turn, &mut frame)?;
        if self.batch.bytes > 0 {
            self.copy(&mut frame);
        }
        if frame.extents > 0 || !self.rest.is_empty() {
            self.frame = Some(frame);
            return Ok(moved);
        }
        self.end(turn, frame);
        Ok(true)
    }

    fn slot(&mut self) -> Result<Option<[u64; wire::SLOT_BODY]>, Refusal> {
        match &mut self.shared {
            Some((ring, _)) => ring.take(),
            None => Ok(None),
        }
    }

    /// Takes the first slot of the next part, and decides what becomes of it.
    fn begin(&mut self, turn: &mut Turn<'_>) -> Result<bool, Refusal> {
        let again = self.again.take();
        let head = match again {
            Some(head) => head,
            None => {
                let Some(slot) = self.slot()? else { return Ok(false) };
                Part::decode(&slot).ok_or_else(|| nonsense("the lane lost its framing", &slot))?
            }
        };
        self.rest.clear();
        self.rest.extend(head.first);
        let fate = match self.admit(turn, &head) {
            Ok(target) if target.has(head.part) => {
                Fate::Scrap { status: Status::Landed, why: None }
            }
            Ok(target) => Fate::Land { target, crc: 0 },
            Err((Status::NoGrant, _)) if again.is_none() => {
                self.again = Some(head);
                return Ok(false);
            }
            Err((status, why)) => Fate::Scrap { status, why: Some(why.to_refusal()) },
        };
        let extents = head.extents.saturating_sub(1);
        self.frame = Some(Frame { head, extents, bytes: head.bytes.into(), fate });
        Ok(true)
    }

    /// Checks a part against its grant and fills `pages` with where it goes.
    fn admit(&mut self, turn: &Turn<'_>, head: &Part) -> Result<Arc<Target>, (Status, Error)> {
        let target = turn.pens.admit(self.link, self.lane, head.grant, head.part).map_err(|e| {
            let part = e.kind() == ErrorKind::InvalidPlan;
            (if part { Status::WrongPart } else { Status::NoGrant }, e)
        })?;
        let part = target.plan.pages(head.part).map_err(|e| (Status::WrongPart, e))?;
        if part.bytes() != u64::from(head.bytes) {
            let why = Error::new(ErrorKind::InvalidPlan, "the part has another length")
                .with("grant", head.grant)
                .with("part", head.part.0)
                .with("found", head.bytes)
                .with("expected", part.bytes());
            return Err((Status::WrongPart, why));
        }
        turn.registry.resolve_part(&part, &mut self.pages).map_err(|e| (Status::NoMemory, e))?;
        Ok(target)
    }

    /// Fills the batch with what can be copied at once; says whether it took anything.
    fn gather(&mut self, turn: &mut Turn<'_>, frame: &mut Frame) -> Result<bool, Refusal> {
        self.batch.sources.clear();
        self.batch.ranges.clear();
        self.batch.bytes = 0;
        let mut moved = false;
        let mut slots = 0;
        let copy_bytes = throttle::piece(COPY_BYTES);
        while self.batch.bytes < copy_bytes && self.batch.ranges.len() < RANGES_MAX {
            let Some(mut extent) = self.rest.pop() else {
                // A sender that keeps pace must not hold the thread, also with a part that is scrap.
                if frame.extents == 0 || slots == SLOTS_PER_COPY {
                    break;
                }
                slots += 1;
                let Some(slot) = self.slot()? else { break };
                moved = true;
                let Some((extents, n)) =
                    wire::decode_more(&slot).filter(|(_, n)| *n as u32 <= frame.extents)
                else {
                    return Err(nonsense("the lane lost its framing within a part", &slot));
                };
                frame.extents -= n as u32;
                self.rest.extend(extents[..n].iter().rev());
                continue;
            };
            moved = true;
            if matches!(frame.fate, Fate::Scrap { .. }) {
                continue;
            }
            let Some(left) = frame.bytes.checked_sub(extent.bytes.into()) else {
                let why = Error::new(ErrorKind::InvalidPlan, "extents are longer than their part")
                    .with("expected", frame.head.bytes);
                self.refuse(frame, Status::WrongPart, why);
                continue;
            };
            // A pool that is not known may have been announced just now.
            if self.pools.at(extent.pool).is_none() {
                self.hear(turn)?;
            }
            let most = (copy_bytes - self.batch.bytes).min(extent.bytes.into());
            let taken = match self.pools.at(extent.pool) {
                Some(Pool::Mapped(import)) => {
                    if !self.batch.ranges.is_empty() {
                        self.rest.push(extent);
                        break;
                    }
                    self.batch.sources.push(import, extent.offset, most).is_ok()
                }
                Some(Pool::Foreign { address, bytes }) => {
                    if self.batch.sources.bytes() > 0 {
                        self.rest.push(extent);
                        break;
                    }
                    let end = extent.offset.checked_add(most).filter(|end| end <= bytes);
                    if end.is_some() {
                        self.batch.ranges.push((address + extent.offset, most));
                    }
                    end.is_some()
                }
                None => false,
            };
            if !taken {
                let why = Error::new(ErrorKind::Memory, "an extent is outside the sender's pools")
                    .with("pool", extent.pool)
                    .with("offset", extent.offset)
                    .with("bytes", extent.bytes)
                    .with("pools", self.pools.0.len());
                self.refuse(frame, Status::NoSource, why);
                continue;
            }
            self.batch.bytes += most;
            frame.bytes = left + (u64::from(extent.bytes) - most);
            extent.offset += most;
            extent.bytes -= most as u32;
            if extent.bytes > 0 {
                self.rest.push(extent);
            }
        }
        Ok(moved)
    }

    /// Copies the batch while the pen is held.
    fn copy(&mut self, frame: &mut Frame) {
        let Fate::Land { target, crc } = &mut frame.fate else { return };
        let Some(held) = target.hold() else {
            let why = Error::new(ErrorKind::NotFound, "the grant was fenced while a part came in");
            return self.refuse(frame, Status::NoGrant, why);
        };
        if target.has(frame.head.part) {
            // Over another lane, while this copy came in.
            drop(held);
            self.pages.clear();
            frame.fate = Fate::Scrap { status: Status::Landed, why: None };
            return;
        }
        let serves = self.shared.as_ref().map(|(_, serves)| serves);
        let wanted = frame.head.serve;
        let says = |serve: ServeWord| serves.and_then(|serves| serves.load(serve.index));
        // Before, so as not to copy in vain; after, because that alone proves anything.
        let mut result = Ok(());
        if says(wanted) == Some(wanted.value) {
            let crc = frame.head.crc32c.map(|_| crc);
            result = if self.batch.ranges.is_empty() {
                self.pages
                    .copy_from(&self.batch.sources, crc)
                    .map_err(|e| (Status::NoSource, memory(e)))
            } else {
                read(self.peer.as_ref(), &mut self.pages, &mut self.batch.ranges, crc)
            };
            settle();
            throttle::pace(self.batch.bytes);
        }
        let found = says(wanted);
        drop(held);
        if found != Some(wanted.value) {
            let why =
                Error::new(ErrorKind::RoomEnded, "the sender stopped the grant during a copy")
                    .with("word", wanted.index)
                    .with("posted", wanted.value)
                    .with("found", found.map_or("none".into(), |found| found.to_string()));
            self.refuse(frame, Status::Changed, why);
        } else if let Err((status, why)) = result {
            self.refuse(frame, status, why);
        }
    }

    /// The part is over.
    fn end(&mut self, turn: &mut Turn<'_>, mut frame: Frame) {
        let head = frame.head;
        if let Fate::Land { crc, .. } = frame.fate {
            if frame.bytes > 0 {
                let why = Error::new(ErrorKind::InvalidPlan, "extents are shorter than their part")
                    .with("missing", frame.bytes)
                    .with("expected", head.bytes);
                self.refuse(&mut frame, Status::WrongPart, why);
            } else if let Some(sent) = head.crc32c.filter(|sent| *sent != crc) {
                let why = Error::new(ErrorKind::Corrupt, "the part's checksum differs")
                    .with("sent", format!("{sent:#010x}"))
                    .with("found", format!("{crc:#010x}"));
                self.refuse(&mut frame, Status::Corrupt, why);
            }
        }
        self.pages.clear();
        let (grant, part, bytes) = (head.grant, head.part, u64::from(head.bytes));
        let status = match frame.fate {
            Fate::Land { target, .. } => {
                target.landed(part);
                metrics::counter!("kvlane_shm_received_bytes_total").increment(bytes);
                turn.events.push(EngineEvent::Arrived {
                    link: self.link,
                    grant,
                    part,
                    lane: self.lane,
                });
                Status::Landed
            }
            Fate::Scrap { status, why } => {
                let label = why.as_ref().map_or("repeat", |why| why.kind.code());
                metrics::counter!("kvlane_scrapped_frames_total", "why" => label).increment(1);
                metrics::counter!("kvlane_scrapped_bytes_total").increment(bytes);
                if let Some(why) = why {
                    turn.events.push(EngineEvent::Scrapped { link: self.link, bytes, why });
                }
                status
            }
        };
        if let Some((ring, _)) = &mut self.shared {
            ring.push_ack(&Ack { status, grant, part });
        }
    }

    /// From here on the part is scrap.
    fn refuse(&mut self, frame: &mut Frame, status: Status, why: Error) {
        self.pages.clear();
        self.batch.bytes = 0;
        let why = why.with("grant", frame.head.grant).with("part", frame.head.part.0);
        frame.fate = Fate::Scrap { status, why: Some(why.to_refusal()) };
    }
}

/// Copies ranges of the sender's process into `pages`.
fn read(
    peer: Option<&Peer>,
    pages: &mut Pages,
    ranges: &mut Vec<(u64, u64)>,
    mut crc: Option<&mut u32>,
) -> Result<(), (Status, Error)> {
    let Some(peer) = peer.filter(|peer| peer.pid > 0) else {
        let why = "the sender's process cannot be seen from here, so its memory cannot be read";
        return Err((Status::NoAccess, Error::new(ErrorKind::Memory, why).hint(ACCESS_HINT)));
    };
    while !ranges.is_empty() {
        let n = pages.copy_from_process(peer.pid, ranges, crc.as_deref_mut()).map_err(|e| {
            if e.raw_os_error() == Some(libc::EPERM) {
                let why = "the kernel does not let this process read the sender's memory";
                let why = Error::new(ErrorKind::Memory, why).with("pid", peer.pid);
                (Status::NoAccess, why.hint(ACCESS_HINT).caused_by(e))
            } else {
                (Status::NoSource, memory(e).with("pid", peer.pid))
            }
        })?;
        let mut n = n;
        ranges.retain_mut(|(address, bytes)| {
            let done = n.min(*bytes);
            n -= done;
            (*address, *bytes) = (*address + done, *bytes - done);
            *bytes > 0
        });
    }
    // Still there, so the number was its own all the time.
    if !peer.is_alive() {
        let why = Error::new(ErrorKind::PeerLost, "the sender's process has ended");
        return Err((Status::NoSource, why.with("pid", peer.pid)));
    }
    Ok(())
}

fn memory(e: std::io::Error) -> Error {
    Error::new(ErrorKind::Memory, "the sender's memory cannot be read").caused_by(e)
}

fn broke(e: std::io::Error) -> Refusal {
    Error::new(ErrorKind::PeerLost, "the lane's connection broke").caused_by(e).to_refusal()
}

fn nonsense(what: &'static str, slot: &[u64]) -> Refusal {
    Error::new(ErrorKind::Malformed, what).with("found", format!("{slot:x?}")).to_refusal()
}
