//! The sending end of a lane: dials, says hello, sends parts and reads acks.
//!
//! In: posts, at most [`limits::PARTS_IN_FLIGHT_PER_LANE`] at a time. Out:
//! [`EngineEvent::Acked`] or [`EngineEvent::Nacked`] for each, or one [`EngineEvent::LaneDown`]
//! that puts all of them in doubt. Invariants: a part that has begun is finished or its connection
//! destroyed; source pages are read only between a post and its end.

use std::collections::VecDeque;
use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};

use kvlane_proto::{
    Error, ErrorKind, GrantId, LaneId, LinkId, PartId, Refusal, Result, Time, limits,
};

use super::TcpConfig;
use super::lane::{CALL_BYTES, CALLS_PER_TURN, Io, sort};
use super::wire::{ACK_BYTES, Ack, HEADER_BYTES, Header, Hello, Status, Token};
use crate::engine::redial::Jitter;
use crate::engine::refusals::{nacked, takes};
use crate::engine::{EngineEvent, Interest, Post};
use crate::memory::{Region, Registry};
use crate::sys::mem::Pages;
use crate::sys::net;

/// What a lane works with while it has its turn.
pub(super) struct Turn<'a> {
    pub(super) now: Time,
    pub(super) registry: &'a Registry,
    pub(super) jitter: &'a mut Jitter,
    pub(super) config: &'a TcpConfig,
    pub(super) events: &'a mut Vec<EngineEvent>,
}

impl<'a> Turn<'a> {
    pub(super) fn new(
        now: Time,
        config: &'a TcpConfig,
        registry: &'a Registry,
        jitter: &'a mut Jitter,
        events: &'a mut Vec<EngineEvent>,
    ) -> Self {
        Self { now, registry, jitter, config, events }
    }
}

/// Where to connect to.
#[derive(Clone, Debug)]
pub(super) struct Remote {
    pub(super) addresses: Vec<SocketAddr>,
    pub(super) token: Token,
}

enum Phase {
    /// Until it is time to dial.
    Waiting { until: Time },
    /// Dialled.
    Connecting { stream: TcpStream, deadline: Time },
    /// Said hello.
    Greeting { stream: TcpStream, deadline: Time },
    /// Carries parts.
    Up { stream: TcpStream },
}

/// The part that is being written.
struct Current {
    grant: GrantId,
    part: PartId,
    header: [u8; HEADER_BYTES],
    /// Bytes of `header` that are written.
    head: usize,
    begun: bool,
}

/// One lane of a link.
pub(super) struct Outbound {
    link: LinkId,
    lane: LaneId,
    remote: Remote,
    phase: Phase,
    /// Dials since it was last up.
    attempt: u32,
    queue: VecDeque<Post>,
    current: Option<Current>,
    /// What `current` has still to write.
    pages: Pages,
    /// Written, not acknowledged; in order.
    unacked: VecDeque<(GrantId, PartId)>,
    acks: [u8; ACK_BYTES * 16],
    /// Bytes of `acks` that have come.
    have: usize,
}

impl Outbound {
    pub(super) fn new(link: LinkId, lane: LaneId, remote: Remote) -> Self {
        Self {
            link,
            lane,
            remote,
            phase: Phase::Waiting { until: Time(0) },
            attempt: 0,
            queue: VecDeque::new(),
            current: None,
            pages: Pages::default(),
            unacked: VecDeque::new(),
            acks: [0; ACK_BYTES * 16],
            have: 0,
        }
    }

    /// Queues a part, or says why not.
    pub(super) fn post(&mut self, post: &Post) -> Result<()> {
        let in_flight = self.queue.len() + usize::from(self.current.is_some()) + self.unacked.len();
        takes(self.lane, matches!(self.phase, Phase::Up { .. }), in_flight)?;
        self.queue.push_back(post.clone());
        Ok(())
    }
    /// Forgets parts of a grant that have not begun; says whether one is half written.
    pub(super) fn quiesce(&mut self, grant: GrantId) -> bool {
        self.queue.retain(|post| post.grant != grant);
        match &self.current {
            Some(current) if current.grant == grant && current.begun => true,
            Some(current) if current.grant == grant => {
                self.current = None;
                self.pages.clear();
                false
            }
            _ => false,
        }
    }
    /// Whether a post that has not been written in full has pages in `region`.
    pub(super) fn uses(&self, region: &Region) -> Option<GrantId> {
        let queued = self.queue.iter().find(|post| {
            let device = post.pages.device();
            post.pages.iter().any(|p| region.contains(device, p.address, p.bytes.into()))
        });
        queued.map(|post| post.grant).or_else(|| {
            let memory = region.memory();
            self.current.as_ref().filter(|_| self.pages.uses(memory)).map(|c| c.grant)
        })
    }
    /// Destroys the connection; posts are in doubt. Dials again after a wait.
    pub(super) fn down(&mut self, turn: &mut Turn<'_>, why: Refusal) {
        let was_up = matches!(self.phase, Phase::Up { .. });
        if was_up {
            self.attempt = 0;
        }
        self.attempt += 1;
        self.phase = Phase::Waiting { until: turn.now + turn.jitter.wait(self.attempt) };
        self.queue.clear();
        self.current = None;
        self.pages.clear();
        self.unacked.clear();
        self.have = 0;
        // Once an outage is enough.
        if self.attempt == 1 {
            metrics::counter!("kvlane_tcp_lanes_down_total").increment(1);
            turn.events.push(EngineEvent::LaneDown { link: self.link, lane: self.lane, why });
        }
    }
    /// What to wait for.
    pub(super) fn park(&self, interests: &mut Vec<Interest>) -> Option<Time> {
        let mut want = |stream: &TcpStream, read, write| {
            interests.push(Interest { fd: stream.as_raw_fd(), read, write });
        };
        match &self.phase {
            Phase::Waiting { until } => Some(*until),
            Phase::Connecting { stream, deadline } => {
                want(stream, false, true);
                Some(*deadline)
            }
            Phase::Greeting { stream, deadline } => {
                want(stream, true, false);
                Some(*deadline)
            }
            Phase::Up { stream } => {
                want(stream, true, self.current.is_some() || !self.queue.is_empty());
                None
            }
        }
    }
    /// One turn; says whether anything moved. Unless told to `look`, a lane that waits for nothing
    /// makes no system call.
    pub(super) fn poll(&mut self, turn: &mut Turn<'_>, look: bool) -> bool {
        self.step(turn, look).unwrap_or_else(|why| {
            self.down(turn, why);
            true
        })
    }

    fn step(&mut self, turn: &mut Turn<'_>, look: bool) -> Result<bool, Refusal> {
        let address = self.address();
        let late = |what: &str| {
            Err(Error::new(ErrorKind::DeadlineExceeded, what)
                .with("address", address)
                .with("limit_ms", limits::HANDSHAKE_MS)
                .to_refusal())
        };
        match &mut self.phase {
            Phase::Waiting { until } if turn.now < *until => Ok(false),
            Phase::Waiting { .. } => {
                let failed = |e| dial_failed(address, e);
                let stream = net::dial(address).map_err(failed)?;
                net::tune(&stream, turn.config.send_buffer_bytes).map_err(failed)?;
                let deadline = turn.now.plus_ms(limits::HANDSHAKE_MS);
                self.phase = Phase::Connecting { stream, deadline };
                Ok(true)
            }
            Phase::Connecting { stream, deadline } => {
                let deadline = *deadline;
                match stream.take_error() {
                    Ok(None) => {}
                    Ok(Some(e)) | Err(e) => return Err(dial_failed(address, e)),
                }
                // Not connected yet is what `send` says below.
                let hello = Hello { lane: self.lane.0, token: self.remote.token }.encode();
                match net::send(stream, &hello) {
                    Ok(n) if n == hello.len() => {}
                    Ok(n) => {
                        return Err(Error::new(ErrorKind::Io, "the hello did not fit the socket")
                            .with("sent", n)
                            .to_refusal());
                    }
                    Err(e) if not_yet(&e) && turn.now >= deadline => {
                        return late("no connection in time");
                    }
                    Err(e) if not_yet(&e) => return Ok(false),
                    Err(e) => return Err(dial_failed(address, e)),
                }
                let phase = std::mem::replace(&mut self.phase, Phase::Waiting { until: turn.now });
                if let Phase::Connecting { stream, deadline } = phase {
                    self.phase = Phase::Greeting { stream, deadline };
                }
                Ok(true)
            }
            Phase::Greeting { stream, deadline } => {
                let n = match sort(stream.read(&mut self.acks[self.have..ACK_BYTES]))? {
                    Io::Some(n) => n,
                    Io::Later if turn.now >= *deadline => return late("no welcome in time"),
                    Io::Later => return Ok(false),
                };
                self.have += n;
                let Some((ack, _)) = self.acks[..self.have].split_first_chunk::<ACK_BYTES>() else {
                    return Ok(true);
                };
                if Ack::decode(ack) != Some(Ack::WELCOME) {
                    return Err(self.nonsense(ack));
                }
                self.have = 0;
                self.attempt = 0;
                let phase = std::mem::replace(&mut self.phase, Phase::Waiting { until: turn.now });
                if let Phase::Greeting { stream, .. } = phase {
                    self.phase = Phase::Up { stream };
                }
                metrics::counter!("kvlane_tcp_lanes_up_total").increment(1);
                turn.events.push(EngineEvent::LaneUp { link: self.link, lane: self.lane });
                Ok(true)
            }
            Phase::Up { .. } => {
                let mut moved = (look || !self.unacked.is_empty()) && self.read_acks(turn)?;
                for _ in 0..CALLS_PER_TURN {
                    if !self.write(turn)? {
                        break;
                    }
                    moved = true;
                }
                Ok(moved)
            }
        }
    }

    /// The address of this attempt: the best one twice, then one after the other. The list is never
    /// empty.
    fn address(&self) -> SocketAddr {
        let attempt = self.attempt.saturating_sub(1) as usize;
        self.remote.addresses[attempt % self.remote.addresses.len()]
    }
    fn nonsense(&self, found: &[u8]) -> Refusal {
        Error::new(ErrorKind::Malformed, "the receiver answered something else than an ack")
            .with("found", format!("{found:02x?}"))
            .with("unacknowledged", self.unacked.len())
            .to_refusal()
    }

    /// Reads what acks there are.
    fn read_acks(&mut self, turn: &mut Turn<'_>) -> Result<bool, Refusal> {
        let Phase::Up { stream } = &mut self.phase else { return Ok(false) };
        let n = match sort(stream.read(&mut self.acks[self.have..]))? {
            Io::Later => return Ok(false),
            Io::Some(n) => n,
        };
        self.have += n;
        let whole = self.have / ACK_BYTES * ACK_BYTES;
        for at in (0..whole).step_by(ACK_BYTES) {
            let bytes = &self.acks[at..at + ACK_BYTES];
            // Frames are answered in order, so the answer is the oldest's or nonsense.
            let ack = bytes.first_chunk().and_then(Ack::decode);
            let oldest = self.unacked.front().copied();
            let Some(ack) =
                ack.filter(|a| a.status != Status::Welcome && Some((a.grant, a.part)) == oldest)
            else {
                return Err(self.nonsense(bytes));
            };
            self.unacked.pop_front();
            let (link, lane, grant, part) = (self.link, self.lane, ack.grant, ack.part);
            turn.events.push(match ack.status.refusal() {
                None => EngineEvent::Acked { link, grant, part, lane },
                Some((kind, text)) => {
                    metrics::counter!("kvlane_tcp_nacks_total", "why" => kind.code()).increment(1);
                    let why = Error::new(kind, text)
                        .with("grant", grant)
                        .with("part", part.0)
                        .with("lane", lane.0)
                        .to_refusal();
                    EngineEvent::Nacked { link, grant, part, lane, why }
                }
            });
        }
        self.acks.copy_within(whole..self.have, 0);
        self.have -= whole;
        Ok(true)
    }

    /// One send; says whether there may be room for more.
    fn write(&mut self, turn: &mut Turn<'_>) -> Result<bool, Refusal> {
        if self.current.is_none() {
            let Some(post) = self.queue.pop_front() else { return Ok(false) };
            self.current = self.begin(turn, &post);
        }
        let (Some(current), Phase::Up { stream }) = (&mut self.current, &self.phase) else {
            return Ok(true);
        };
        let head = &current.header[current.head..];
        let sent = self.pages.write_to(stream.as_fd(), head, CALL_BYTES);
        let n = match sort(sent.map(|n| n as usize))? {
            Io::Later => return Ok(false),
            Io::Some(n) => n,
        };
        current.begun = true;
        let of_head = n.min(head.len());
        current.head += of_head;
        self.pages.advance((n - of_head) as u64);
        if current.head == HEADER_BYTES && self.pages.left() == 0 {
            self.unacked.push_back((current.grant, current.part));
            self.current = None;
            self.pages.clear();
        }
        Ok(true)
    }

    /// Makes a post ready to be written; `None` if it was refused.
    fn begin(&mut self, turn: &mut Turn<'_>, post: &Post) -> Option<Current> {
        let bytes = post.pages.bytes();
        let fits = u32::try_from(bytes).map_err(|_| {
            Error::new(ErrorKind::LimitExceeded, "a part does not fit a frame")
                .with("found", bytes)
                .with("limit", u32::MAX)
        });
        let ready = fits.and_then(|bytes| {
            turn.registry.resolve_part(&post.pages, &mut self.pages).map(|()| bytes)
        });
        match ready {
            Ok(bytes) => {
                let crc32c = turn.config.checksum.then(|| self.pages.crc32c(0, self.pages.left()));
                metrics::counter!("kvlane_tcp_sent_bytes_total").increment(bytes.into());
                let header = Header { grant: post.grant, part: post.part, bytes, crc32c }.encode();
                Some(Current { grant: post.grant, part: post.part, header, head: 0, begun: false })
            }
            Err(e) => {
                turn.events.push(nacked(post, &e));
                None
            }
        }
    }
}

fn dial_failed(address: SocketAddr, e: std::io::Error) -> Refusal {
    Error::new(ErrorKind::PeerLost, "the receiver's engine cannot be reached")
        .with("address", address)
        .hint("check that the address is routed and the port open between the two workers")
        .caused_by(e)
        .to_refusal()
}

fn not_yet(e: &std::io::Error) -> bool {
    use std::io::ErrorKind::{Interrupted, NotConnected, WouldBlock};
    matches!(e.kind(), WouldBlock | NotConnected | Interrupted)
}
