//! The sending end of a lane: dials, shares memory, describes parts and takes acks.
//!
//! In: posts, at most [`limits::PARTS_IN_FLIGHT_PER_LANE`] at a time. Out: [`EngineEvent::Acked`] or
//! [`EngineEvent::Nacked`] for each, or one [`EngineEvent::LaneDown`] that puts all of them in doubt.
//! Invariants: nothing is shared with whoever has not proved that they have the receiver's blob; a
//! part that has begun is described to its end, as that is words only; a pool is announced before a
//! part that lies in it is published.

use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use kvlane_proto::{
    Error, ErrorKind, GrantId, LaneId, LinkId, PartId, PartPages, Refusal, Result, Time, limits,
};

use super::ring::{SenderRing, WORDS};
use super::serve::Serves;
use super::wire::{self, Door, EXTENTS_PER_SLOT, Extent, MESSAGE_BYTES, Message, Part, ServeWord};
use super::{MESSAGES_PER_TURN, REGIONS_MAX, dial};
use crate::engine::redial::Jitter;
use crate::engine::refusals::{nacked, takes};
use crate::engine::{EngineEvent, Interest, Post};
use crate::memory::{Region, Registry};
use crate::sys::mem::Pages;
use crate::sys::share::Words;
use crate::sys::unix::Socket;

/// The registered regions, by the numbers that receivers know them by.
#[derive(Default)]
pub(super) struct Pools {
    next: u32,
    pools: Vec<(u32, Arc<Region>)>,
}

impl Pools {
    /// Gives a region a number that none had before.
    pub(super) fn add(&mut self, region: &Arc<Region>) -> Result<u32> {
        let full = self.pools.len() >= REGIONS_MAX;
        let id = self.next;
        let next = id.checked_add(1).filter(|_| !full).ok_or_else(|| {
            Error::new(ErrorKind::LimitExceeded, "shm engine: too many regions")
                .with("limit", REGIONS_MAX)
                .hint("register fewer and larger regions")
        })?;
        self.next = next;
        self.pools.push((id, region.clone()));
        Ok(id)
    }
    pub(super) fn remove(&mut self, region: &Arc<Region>) -> Option<u32> {
        let at = self.pools.iter().position(|(_, r)| Arc::ptr_eq(r, region))?;
        Some(self.pools.remove(at).0)
    }
    fn id(&self, region: &Arc<Region>) -> Option<u32> {
        self.pools.iter().find(|(_, r)| Arc::ptr_eq(r, region)).map(|(id, _)| *id)
    }
}

/// What a lane works with while it has its turn.
pub(super) struct Turn<'a> {
    pub(super) now: Time,
    pub(super) checksum: bool,
    pub(super) registry: &'a Registry,
    pub(super) pools: &'a Pools,
    pub(super) serves: &'a mut Serves,
    pub(super) jitter: &'a mut Jitter,
    pub(super) events: &'a mut Vec<EngineEvent>,
}

/// Something to say over the socket.
enum Say {
    Message(Message),
    /// [`Message::Share`] with its descriptors.
    Share,
    /// A pool with its descriptor.
    Pool(u32, Arc<Region>),
}

enum Phase {
    /// Until it is time to dial.
    Waiting { until: Time },
    /// Said hello.
    Greeting { socket: Socket, deadline: Time },
    /// Shares its memory.
    Sharing { socket: Socket, ring: SenderRing, deadline: Time },
    /// Carries parts.
    Up { socket: Socket, ring: SenderRing },
}

/// The part that is being described.
struct Current {
    head: Part,
    /// Extents that are published.
    published: usize,
    pages: PartPages,
    /// It was not stopped.
    live: bool,
}

/// A part that is described and not acknowledged.
struct Flight {
    grant: GrantId,
    part: PartId,
    pages: PartPages,
    live: bool,
}

/// One lane of a link.
pub(super) struct Outbound {
    link: LinkId,
    lane: LaneId,
    door: Door,
    phase: Phase,
    /// Dials since it was last up.
    attempt: u32,
    queue: VecDeque<Post>,
    current: Option<Current>,
    /// Where `current` lies.
    extents: Vec<Extent>,
    flights: VecDeque<Flight>,
    /// What the socket has not taken yet.
    says: VecDeque<Say>,
    /// For checksums.
    pages: Pages,
}

impl Outbound {
    /// A lane that dials at its first turn, or has dialled already.
    pub(super) fn new(
        now: Time,
        link: LinkId,
        lane: LaneId,
        door: Door,
        dialled: Option<Socket>,
    ) -> Self {
        let mut lane = Self {
            link,
            lane,
            door,
            phase: Phase::Waiting { until: Time(0) },
            attempt: 0,
            queue: VecDeque::new(),
            current: None,
            extents: Vec::new(),
            flights: VecDeque::new(),
            says: VecDeque::new(),
            pages: Pages::default(),
        };
        if let Some(socket) = dialled {
            lane.greet(now, socket);
        }
        lane
    }

    fn greet(&mut self, now: Time, socket: Socket) {
        self.says.clear();
        let (lane, token) = (self.lane.0, self.door.token);
        self.says.push_back(Say::Message(Message::Hello { lane, token }));
        let deadline = now.plus_ms(limits::HANDSHAKE_MS);
        self.phase = Phase::Greeting { socket, deadline };
    }

    /// Queues a part, or says why not.
    pub(super) fn post(&mut self, post: &Post) -> Result<()> {
        let in_flight = self.queue.len() + usize::from(self.current.is_some()) + self.flights.len();
        takes(self.lane, matches!(self.phase, Phase::Up { .. }), in_flight)?;
        self.queue.push_back(post.clone());
        Ok(())
    }
    /// Forgets parts of a grant that have not begun; the others are void, as its serve word has been
    /// raised.
    pub(super) fn stop(&mut self, grant: GrantId) {
        self.queue.retain(|post| post.grant != grant);
        if let Some(current) = self.current.as_mut().filter(|c| c.head.grant == grant) {
            current.live = false;
        }
        self.flights.iter_mut().filter(|f| f.grant == grant).for_each(|f| f.live = false);
    }
    /// The grant of a part whose pages in `region` the receiver may still read and count.
    pub(super) fn uses(&self, region: &Region) -> Option<GrantId> {
        let lies = |pages: &PartPages| {
            let device = pages.device();
            pages.iter().any(|p| region.contains(device, p.address, p.bytes.into()))
        };
        let queued = self.queue.iter().map(|post| (post.grant, &post.pages));
        let current = self.current.iter().filter(|c| c.live).map(|c| (c.head.grant, &c.pages));
        let flying = self.flights.iter().filter(|f| f.live).map(|f| (f.grant, &f.pages));
        queued.chain(current).chain(flying).find(|(_, pages)| lies(pages)).map(|(grant, _)| grant)
    }
    /// A pool came, or is gone.
    pub(super) fn pool(&mut self, id: u32, region: Option<&Arc<Region>>) {
        if matches!(self.phase, Phase::Sharing { .. } | Phase::Up { .. }) {
            self.says.push_back(match region {
                Some(region) => Say::Pool(id, region.clone()),
                None => Say::Message(Message::Forget { id }),
            });
        }
    }
    /// Destroys the connection; posts are in doubt. Dials again after a wait.
    pub(super) fn down(&mut self, turn: &mut Turn<'_>, why: Refusal) {
        if matches!(self.phase, Phase::Up { .. }) {
            self.attempt = 0;
        }
        self.attempt += 1;
        self.phase = Phase::Waiting { until: turn.now + turn.jitter.wait(self.attempt) };
        self.queue.clear();
        self.current = None;
        self.flights.clear();
        self.says.clear();
        // Once an outage is enough.
        if self.attempt == 1 {
            metrics::counter!("kvlane_shm_lanes_down_total").increment(1);
            turn.events.push(EngineEvent::LaneDown { link: self.link, lane: self.lane, why });
        }
    }
    /// Ready to sleep: says so to the receiver, and gives what to wait for.
    pub(super) fn park(&mut self, interests: &mut Vec<Interest>) -> Option<Time> {
        let write = !self.says.is_empty();
        let mut want =
            |socket: &Socket| interests.push(Interest { fd: socket.fd(), read: true, write });
        match &mut self.phase {
            Phase::Waiting { until } => Some(*until),
            Phase::Greeting { socket, deadline } | Phase::Sharing { socket, deadline, .. } => {
                want(socket);
                Some(*deadline)
            }
            Phase::Up { socket, ring } => {
                want(socket);
                ring.sleep();
                let acked = ring.has_ack().unwrap_or(true);
                let waits = self.current.is_some() || !self.queue.is_empty();
                let room = waits && self.says.is_empty() && ring.has_room().unwrap_or(true);
                (acked || room).then_some(Time(0))
            }
        }
    }
    /// It slept.
    pub(super) fn awake(&self) {
        if let Phase::Up { ring, .. } = &self.phase {
            ring.awake();
        }
    }
    /// One turn, with a look at the socket if `hear`; says whether anything moved.
    pub(super) fn poll(&mut self, turn: &mut Turn<'_>, hear: bool) -> bool {
        self.step(turn, hear).unwrap_or_else(|why| {
            self.down(turn, why);
            true
        })
    }

    fn step(&mut self, turn: &mut Turn<'_>, hear: bool) -> Result<bool, Refusal> {
        let mut moved = match &self.phase {
            Phase::Waiting { until } if turn.now < *until => return Ok(false),
            Phase::Waiting { .. } => {
                let socket = dial(&self.door.name).map_err(|e| e.to_refusal())?;
                self.greet(turn.now, socket);
                true
            }
            Phase::Greeting { deadline, .. } | Phase::Sharing { deadline, .. } => {
                if turn.now >= *deadline {
                    let why = "the receiver did not make the lane ready in time";
                    return Err(Error::new(ErrorKind::DeadlineExceeded, why)
                        .with("socket", &self.door.name)
                        .with("limit_ms", limits::HANDSHAKE_MS)
                        .to_refusal());
                }
                false
            }
            Phase::Up { .. } => self.take_acks(turn)? | self.describe(turn)?,
        };
        if !self.says.is_empty() {
            moved |= self.say(turn.serves.shared())?;
        }
        if hear {
            moved |= self.hear(turn)?;
        }
        Ok(moved)
    }

    fn socket(&self) -> Option<&Socket> {
        match &self.phase {
            Phase::Waiting { .. } => None,
            Phase::Greeting { socket, .. }
            | Phase::Sharing { socket, .. }
            | Phase::Up { socket, .. } => Some(socket),
        }
    }

    /// Sends what waits, as far as the socket takes it.
    fn say(&mut self, serves: &Words) -> Result<bool, Refusal> {
        let mut moved = false;
        while let (Some(say), Some(socket)) = (self.says.front(), self.socket()) {
            let own = match (say, &self.phase) {
                (Say::Share, Phase::Sharing { ring, .. }) => vec![ring.shared().fd(), serves.fd()],
                (Say::Pool(_, region), _) => region.memory().fd().into_iter().collect(),
                _ => Vec::<BorrowedFd<'_>>::new(),
            };
            let message = match say {
                Say::Message(message) => *message,
                Say::Share => Message::Share,
                Say::Pool(id, region) => Message::Pool {
                    id: *id,
                    address: if own.is_empty() { region.address() } else { 0 },
                    bytes: region.bytes(),
                },
            };
            match socket.send(&message.encode(), &own) {
                Ok(()) => drop(self.says.pop_front()),
                Err(e) if is_later(&e) => break,
                Err(e) => return Err(broke(e)),
            }
            moved = true;
        }
        Ok(moved)
    }

    /// Takes what the receiver says over the socket.
    fn hear(&mut self, turn: &mut Turn<'_>) -> Result<bool, Refusal> {
        let (mut bytes, mut fds) = ([0; MESSAGE_BYTES], Vec::<OwnedFd>::new());
        for n in 0..MESSAGES_PER_TURN {
            let Some(socket) = self.socket() else { return Ok(n > 0) };
            let len = match socket.receive(&mut bytes, &mut fds) {
                Err(e) if is_later(&e) => return Ok(n > 0),
                Err(e) => return Err(broke(e)),
                Ok(0) => {
                    let why = "the receiver closed the lane's connection";
                    return Err(Error::new(ErrorKind::PeerLost, why)
                        .with("socket", &self.door.name)
                        .to_refusal());
                }
                Ok(len) => len,
            };
            let message = Message::decode(&bytes[..len]).filter(|_| fds.is_empty());
            self.heard(turn, message, &bytes[..len])?;
        }
        Ok(true)
    }

    fn heard(
        &mut self,
        turn: &mut Turn<'_>,
        message: Option<Message>,
        bytes: &[u8],
    ) -> Result<(), Refusal> {
        let phase = std::mem::replace(&mut self.phase, Phase::Waiting { until: turn.now });
        match (phase, message) {
            (_, Some(Message::Refuse(why))) => {
                let (kind, text) = why.refusal();
                return Err(Error::new(kind, text)
                    .with("socket", &self.door.name)
                    .hint("its log says more; run the same release on both workers")
                    .to_refusal());
            }
            (Phase::Greeting { socket, deadline }, Some(Message::Welcome { proof }))
                if proof == self.door.proof =>
            {
                let words = Words::new(WORDS, false).map_err(|e| {
                    Error::new(ErrorKind::Memory, "no shared memory for a lane")
                        .with("bytes", WORDS * 8)
                        .caused_by(e)
                        .to_refusal()
                })?;
                let pools = turn.pools.pools.iter().map(|(id, r)| Say::Pool(*id, r.clone()));
                self.says.push_back(Say::Share);
                self.says.extend(pools);
                self.says.push_back(Say::Message(Message::Begin));
                self.phase = Phase::Sharing { socket, ring: SenderRing::new(words), deadline };
                self.say(turn.serves.shared())?;
            }
            (Phase::Sharing { socket, ring, .. }, Some(Message::Ready)) => {
                self.attempt = 0;
                self.phase = Phase::Up { socket, ring };
                metrics::counter!("kvlane_shm_lanes_up_total").increment(1);
                turn.events.push(EngineEvent::LaneUp { link: self.link, lane: self.lane });
            }
            (up @ Phase::Up { .. }, Some(Message::Bell)) => self.phase = up,
            (phase, _) => {
                // Down as whatever it was.
                self.phase = phase;
                let why = "the receiver said something that it may not say now";
                return Err(Error::new(ErrorKind::Malformed, why)
                    .with("found", format!("{bytes:02x?}"))
                    .with("socket", &self.door.name)
                    .to_refusal());
            }
        }
        Ok(())
    }

    /// Takes what acks there are.
    fn take_acks(&mut self, turn: &mut Turn<'_>) -> Result<bool, Refusal> {
        let Phase::Up { ring, .. } = &mut self.phase else { return Ok(false) };
        let mut moved = false;
        while let Some(ack) = ring.ack()? {
            // Parts are answered in order, so the answer is the oldest's or nonsense.
            let oldest = self.flights.pop_front().map(|f| (f.grant, f.part));
            if oldest != Some((ack.grant, ack.part)) {
                let why = "the receiver answered a part that is not the oldest";
                return Err(Error::new(ErrorKind::Malformed, why)
                    .with("grant", ack.grant)
                    .with("part", ack.part.0)
                    .with("expected", format!("{oldest:?}"))
                    .to_refusal());
            }
            moved = true;
            let (link, lane, grant, part) = (self.link, self.lane, ack.grant, ack.part);
            turn.events.push(match ack.status.refusal() {
                None => EngineEvent::Acked { link, grant, part, lane },
                Some(why) => {
                    let kind = why.kind().code();
                    metrics::counter!("kvlane_shm_nacks_total", "why" => kind).increment(1);
                    let why = why.with("grant", grant).with("part", part.0).with("lane", lane.0);
                    EngineEvent::Nacked { link, grant, part, lane, why: why.to_refusal() }
                }
            });
        }
        Ok(moved)
    }

    /// Publishes what there is room for.
    fn describe(&mut self, turn: &mut Turn<'_>) -> Result<bool, Refusal> {
        let mut moved = false;
        loop {
            if self.current.is_none() {
                let Some(post) = self.queue.pop_front() else { break };
                moved = true;
                self.current = self.begin(turn, post);
            }
            // A pool that its pages may lie in is announced first.
            if !self.says.is_empty() {
                self.say(turn.serves.shared())?;
                if !self.says.is_empty() {
                    break;
                }
            }
            let (Some(current), Phase::Up { ring, .. }) = (&mut self.current, &mut self.phase)
            else {
                continue;
            };
            if !ring.has_room()? {
                break;
            }
            moved = true;
            if current.published == 0 {
                ring.push(current.head.encode());
                current.published = 1;
            } else {
                let rest = &self.extents[current.published.min(self.extents.len())..];
                ring.push(wire::encode_more(rest));
                current.published += EXTENTS_PER_SLOT;
            }
            if current.published >= self.extents.len()
                && let Some(Current { head, pages, live, .. }) = self.current.take()
            {
                self.flights.push_back(Flight { grant: head.grant, part: head.part, pages, live });
            }
        }
        if moved
            && let Phase::Up { socket, ring } = &self.phase
            && ring.to_wake()
        {
            // A socket that is full wakes as well.
            let _ = socket.send(&Message::Bell.encode(), &[]);
        }
        Ok(moved)
    }

    /// Makes a post ready to be described; `None` if it was refused.
    fn begin(&mut self, turn: &mut Turn<'_>, post: Post) -> Option<Current> {
        match self.head(turn, &post) {
            Ok(head) => {
                metrics::counter!("kvlane_shm_sent_bytes_total").increment(head.bytes.into());
                Some(Current { head, published: 0, pages: post.pages, live: true })
            }
            Err(e) => {
                turn.events.push(nacked(&post, &e));
                None
            }
        }
    }
    fn head(&mut self, turn: &mut Turn<'_>, post: &Post) -> Result<Part> {
        let bytes = u32::try_from(post.pages.bytes()).map_err(|_| {
            Error::new(ErrorKind::LimitExceeded, "a part does not fit a descriptor")
                .with("found", post.pages.bytes())
                .with("limit", u32::MAX)
        })?;
        locate(&post.pages, turn.registry, turn.pools, &mut self.extents)?;
        let mut crc32c = None;
        if turn.checksum {
            turn.registry.resolve_part(&post.pages, &mut self.pages)?;
            crc32c = Some(self.pages.crc32c(0, self.pages.left()));
            self.pages.clear();
        }
        let serve: ServeWord = turn.serves.word(post.link, post.grant)?;
        let extents = self.extents.len() as u32;
        let first = self.extents.first().copied();
        Ok(Part { grant: post.grant, part: post.part, bytes, extents, crc32c, serve, first })
    }
}

/// Where pages lie in the pools, those that touch as one.
fn locate(
    pages: &PartPages,
    registry: &Registry,
    pools: &Pools,
    into: &mut Vec<Extent>,
) -> Result<()> {
    into.clear();
    let device = pages.device();
    let mut hint: Option<(u32, &Arc<Region>)> = None;
    for page in pages.iter().filter(|page| page.bytes > 0) {
        let inside = |r: &Arc<Region>| r.contains(device, page.address, page.bytes.into());
        let (pool, region) = match hint.filter(|(_, region)| inside(region)) {
            Some(found) => found,
            None => {
                let region = registry.resolve(device, page.address, page.bytes.into())?;
                let id = pools.id(region).ok_or_else(|| {
                    Error::new(ErrorKind::Internal, "a region has no number").with("asked", region)
                })?;
                *hint.insert((id, region))
            }
        };
        let offset = page.address - region.address();
        if let Some(last) = into.last_mut()
            && last.pool == pool
            && last.offset + u64::from(last.bytes) == offset
            && let Some(bytes) = last.bytes.checked_add(page.bytes)
        {
            last.bytes = bytes;
        } else {
            into.push(Extent { pool, offset, bytes: page.bytes });
        }
    }
    Ok(())
}

fn broke(e: std::io::Error) -> Refusal {
    Error::new(ErrorKind::PeerLost, "the lane's connection broke").caused_by(e).to_refusal()
}

pub(super) fn is_later(e: &std::io::Error) -> bool {
    matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted)
}
