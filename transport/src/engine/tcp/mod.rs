//! Engine `tcp`: the receiver's code puts pages straight into place, over plain TCP.
//!
//! Owns: one listener, the connections (lanes) of each link, the open grants and their pens. In:
//! [`Command`]s, and bytes from lanes. Out: [`EngineEvent`]s. Invariants: a byte lands only in a
//! page of the part that its frame names, under a grant that is open on that link and lane, while
//! the grant's pen is held ([`RevokeHandle`]); a fence is taking the pen, so it needs nobody's consent; one
//! bad connection costs itself only.
//!
//! The receiver listens and hands out a random token per link over the control plane; the sender
//! dials a connection a lane and shows the token. Pages are neither encrypted nor authenticated
//! beyond that: use it inside a trusted network.

mod lane;
mod receiver;
mod sender;
pub mod wire;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::Read;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use kvlane_proto::{
    DataPath, Device, Error, ErrorKind, GrantId, LaneId, LinkId, Refusal, Result, Time, WorkerKey,
    limits,
};

use self::lane::{Io, sort};
use self::receiver::Inbound;
use self::sender::{Outbound, Remote};
use self::wire::{Blob, HELLO_BYTES, Hello, Token};
use super::pen::Pens;
pub use super::pen::RevokeHandle;
use super::redial::Jitter;
use super::refusals::{nacked, no_lane, no_link, was_reset};
use super::{Caps, Command, Engine, EngineEvent, Interest, Post, Quiesced};
use crate::memory::{Region, Registry};
use crate::random::{fill_random, random};
use crate::sys::net;
use crate::sys::wait::readable;

/// Connections that have not said who they are; the oldest makes way for the next.
const STRANGERS_MAX: usize = 128;
/// Connections taken from the listener in one turn.
const ACCEPTS_PER_TURN: usize = 64;
/// Pause after accept failed for want of descriptors or memory.
const ACCEPT_PAUSE_MS: u64 = 100;
/// Where refused bytes go, a piece at a time.
const SCRAP_BYTES: usize = 64 << 10;

/// Turns without progress after which a lane is quiet. Quiet lanes take turns in being looked at,
/// one of them a turn or, where there are many, each at least every so many turns: each look is a
/// system call. After a sleep all are looked at.
const QUIET_TURNS: u32 = 32;

/// Settings of the engine.
#[derive(Clone, Debug)]
pub struct TcpConfig {
    /// Where the receiver listens; port 0 takes a free one.
    pub bind: SocketAddr,
    /// Addresses to tell peers, best first, with the listener's port; empty: that of `bind`, which
    /// must be a real one then.
    pub advertise: Vec<IpAddr>,
    /// Sender: adds a CRC32C to each part, which receivers verify after it has landed.
    pub checksum: bool,
    /// Send buffer of a lane; 0 leaves it to the kernel. 512 KiB measured best (`docs/performance.md`).
    pub send_buffer_bytes: u32,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            bind: SocketAddr::from(([127, 0, 0, 1], 0)),
            advertise: Vec::new(),
            checksum: false,
            send_buffer_bytes: 512 << 10,
        }
    }
}

/// A connection that has not said who it is.
struct Stranger {
    stream: TcpStream,
    hello: [u8; HELLO_BYTES],
    have: usize,
    deadline: Time,
}

enum Side {
    Receiver {
        token: Token,
        lanes: Vec<Option<Inbound>>,
    },
    /// Empty until connected.
    Sender {
        lanes: Vec<Outbound>,
    },
}

struct Link {
    peer: WorkerKey,
    lanes: u16,
    side: Side,
}

struct Quiescing {
    link: LinkId,
    grant: GrantId,
    deadline: Time,
}

/// The engine; see the module.
pub struct TcpEngine {
    config: TcpConfig,
    listener: TcpListener,
    addresses: Vec<SocketAddr>,
    accept_from: Time,
    registry: Registry,
    pens: Arc<Pens>,
    links: BTreeMap<LinkId, Link>,
    tokens: HashMap<Token, LinkId>,
    strangers: VecDeque<Stranger>,
    quiescing: Vec<Quiescing>,
    jitter: Jitter,
    scrap: Vec<u8>,
    turns: u32,
    /// Quiet lanes that it receives on, as of the turn before.
    quiet: u32,
    /// It slept, so anything may have become ready.
    slept: bool,
    /// Events of commands, until the next poll.
    outbox: Vec<EngineEvent>,
}

impl TcpEngine {
    /// Listens; links come with [`Command::Listen`].
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if peers could not dial the address, [`ErrorKind::Io`] if it cannot be
    /// bound.
    pub fn new(config: TcpConfig) -> Result<Self> {
        if config.advertise.is_empty() && config.bind.ip().is_unspecified() {
            return Err(Error::new(
                ErrorKind::Config,
                "tcp engine: no address that peers can dial",
            )
            .with("bind", config.bind)
            .hint("bind to the address of the NIC that peers reach, or say what to advertise"));
        }
        if let Some(bad) =
            config.advertise.iter().find(|ip| ip.is_unspecified() || ip.is_multicast())
        {
            return Err(Error::new(ErrorKind::Config, "tcp engine: address cannot be dialled")
                .with("advertise", bad)
                .hint("advertise the address of the NIC that peers reach"));
        }
        if config.advertise.len() > wire::ADDRESSES_MAX {
            return Err(Error::new(ErrorKind::Config, "tcp engine: too many addresses")
                .with("found", config.advertise.len())
                .with("limit", wire::ADDRESSES_MAX));
        }
        let failed = |e| {
            Error::new(ErrorKind::Io, "tcp engine: cannot listen")
                .with("bind", config.bind)
                .hint("choose an address of this host and a free port, or port 0")
                .caused_by(e)
        };
        let listener = net::listen(config.bind).map_err(failed)?;
        let own = listener.local_addr().map_err(failed)?;
        let addresses = if config.advertise.is_empty() {
            vec![own]
        } else {
            config.advertise.iter().map(|&ip| SocketAddr::new(ip, own.port())).collect()
        };
        Ok(Self {
            config,
            listener,
            addresses,
            accept_from: Time(0),
            registry: Registry::new(&[Device::Host]),
            pens: Arc::default(),
            links: BTreeMap::new(),
            tokens: HashMap::new(),
            strangers: VecDeque::new(),
            quiescing: Vec::new(),
            jitter: Jitter::new(random()),
            scrap: vec![0; SCRAP_BYTES],
            turns: 0,
            quiet: 0,
            slept: true,
            outbox: Vec::new(),
        })
    }
    /// Revokes without this engine's thread. kvlane's own workers do not use it: they fence by
    /// command. It is for an owner that has to get blocks back while the engine's thread is stuck.
    pub fn revoke_handle(&self) -> RevokeHandle {
        RevokeHandle(self.pens.clone())
    }
    /// Where it listens.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    fn listen(
        &mut self,
        link: LinkId,
        peer: WorkerKey,
        lanes: u16,
        receiver: bool,
    ) -> Result<Vec<u8>> {
        if lanes == 0 || lanes > limits::LANES_PER_LINK_MAX {
            return Err(Error::new(ErrorKind::LimitExceeded, "number of lanes out of range")
                .with("found", lanes)
                .with("limit", limits::LANES_PER_LINK_MAX));
        }
        if self.links.contains_key(&link) {
            return Err(
                Error::new(ErrorKind::Internal, "link number used twice").with("link", link.0)
            );
        }
        let (side, blob) = if receiver {
            let mut token = Token::default();
            fill_random(&mut token)?;
            self.tokens.insert(token, link);
            let side = Side::Receiver { token, lanes: (0..lanes).map(|_| None).collect() };
            (side, Blob { lanes, token, addresses: self.addresses.clone() })
        } else {
            let blob = Blob { lanes, token: [0; 16], addresses: Vec::new() };
            (Side::Sender { lanes: Vec::new() }, blob)
        };
        self.links.insert(link, Link { peer, lanes, side });
        Ok(blob.encode())
    }

    fn connect(&mut self, id: LinkId, remote: &[u8]) -> Result<()> {
        let link = self.links.get_mut(&id).ok_or_else(|| no_link(id))?;
        let blob = Blob::decode(remote).map_err(|e| e.with("peer", &link.peer))?;
        let Side::Sender { lanes } = &mut link.side else { return Ok(()) };
        if !lanes.is_empty() {
            return Err(Error::new(ErrorKind::Internal, "link connected twice").with("link", id.0));
        }
        if blob.addresses.is_empty() {
            return Err(Error::new(
                ErrorKind::Malformed,
                "tcp engine: the receiver has no address",
            )
            .with("peer", &link.peer)
            .hint("only one side of a link may be the sender"));
        }
        let remote = Remote { addresses: blob.addresses, token: blob.token };
        let count = link.lanes.min(blob.lanes);
        lanes.extend((0..count).map(|n| Outbound::new(id, LaneId(n), remote.clone())));
        Ok(())
    }

    fn post(&mut self, post: &Post) -> Result<()> {
        let Some(Link { side: Side::Sender { lanes }, .. }) = self.links.get_mut(&post.link) else {
            return Err(no_link(post.link));
        };
        if self.quiescing.iter().any(|q| q.link == post.link && q.grant == post.grant) {
            return Err(Error::new(ErrorKind::RoomEnded, "the grant is being stopped")
                .with("grant", post.grant));
        }
        let count = lanes.len();
        let lane =
            lanes.get_mut(usize::from(post.lane.0)).ok_or_else(|| no_lane(post.lane, count))?;
        lane.post(post)
    }

    fn close(&mut self, id: LinkId) {
        if let Some(Link { side: Side::Receiver { token, .. }, .. }) = self.links.remove(&id) {
            self.tokens.remove(&token);
        }
        // Its connections are gone, so nothing that was posted is left.
        let over = |q: &Quiescing| q.link == id;
        let events = self.quiescing.iter().filter(|q| over(q)).map(quiesced);
        self.outbox.extend(events);
        self.quiescing.retain(|q| !over(q));
    }

    /// Takes new connections; each has until its deadline to say whose it is.
    fn accept(&mut self, now: Time, events: &mut Vec<EngineEvent>) -> bool {
        let mut moved = false;
        if now < self.accept_from {
            return false;
        }
        self.accept_from = Time(0);
        // accept(2) makes a socket before it finds that nobody waits: ten times what this costs.
        if !readable(self.listener.as_raw_fd()) {
            return false;
        }
        for _ in 0..ACCEPTS_PER_TURN {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(e) => {
                    use std::io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
                    if e.kind() == WouldBlock {
                        break;
                    }
                    if !matches!(e.kind(), ConnectionAborted | Interrupted) {
                        self.accept_from = now.plus_ms(ACCEPT_PAUSE_MS);
                        let why = Error::new(ErrorKind::Io, "tcp engine: cannot accept");
                        let fix = "raise the limit of open files (ulimit -n)";
                        events.push(EngineEvent::Trouble(why.hint(fix).caused_by(e)));
                        break;
                    }
                    continue;
                }
            };
            moved = true;
            // The receiver sends acks only.
            if net::tune(&stream, 0).is_err() {
                continue;
            }
            if self.strangers.len() >= STRANGERS_MAX {
                self.strangers.pop_front();
                refused("crowded");
            }
            self.strangers.push_back(Stranger {
                stream,
                hello: [0; HELLO_BYTES],
                have: 0,
                deadline: now.plus_ms(limits::HANDSHAKE_MS),
            });
        }
        moved
    }

    /// Lets strangers say who they are.
    fn greet(&mut self, now: Time, events: &mut Vec<EngineEvent>) -> bool {
        let mut moved = false;
        for _ in 0..self.strangers.len() {
            let Some(mut stranger) = self.strangers.pop_front() else { break };
            match sort(stranger.stream.read(&mut stranger.hello[stranger.have..])) {
                Err(_) => refused("closed"),
                Ok(Io::Later) if now >= stranger.deadline => refused("silent"),
                Ok(Io::Later) => self.strangers.push_back(stranger),
                Ok(Io::Some(n)) => {
                    moved = true;
                    stranger.have += n;
                    if stranger.have < HELLO_BYTES {
                        self.strangers.push_back(stranger);
                    } else if let Err(why) = self.welcome(stranger, events) {
                        refused(why);
                    }
                }
            }
        }
        moved
    }

    /// Makes a stranger a lane, in place of one that it had before.
    fn welcome(
        &mut self,
        stranger: Stranger,
        events: &mut Vec<EngineEvent>,
    ) -> Result<(), &'static str> {
        let hello = Hello::decode(&stranger.hello).ok_or("garbage")?;
        let id = *self.tokens.get(&hello.token).ok_or("token")?;
        let Some(Link { side: Side::Receiver { lanes, .. }, .. }) = self.links.get_mut(&id) else {
            return Err("token");
        };
        let slot = lanes.get_mut(usize::from(hello.lane)).ok_or("lane")?;
        let lane = LaneId(hello.lane);
        if slot.is_some() {
            let why = Refusal::new(ErrorKind::PeerLost, "the sender dialled the lane again");
            events.push(EngineEvent::LaneDown { link: id, lane, why });
        }
        *slot = Some(Inbound::new(id, lane, stranger.stream));
        events.push(EngineEvent::LaneUp { link: id, lane });
        Ok(())
    }

    fn lanes(&mut self, now: Time, all: bool, events: &mut Vec<EngineEvent>) -> bool {
        let Self { config, registry, pens, links, jitter, scrap, turns, quiet, .. } = self;
        let (mut moved, shares) = (false, (*quiet).clamp(1, QUIET_TURNS));
        *quiet = 0;
        for (&id, link) in links {
            match &mut link.side {
                Side::Receiver { lanes, .. } => {
                    for slot in lanes {
                        let Some(lane) = slot else { continue };
                        if lane.quiet >= QUIET_TURNS {
                            *quiet += 1;
                            if !all && turns.wrapping_add(*quiet) % shares != 0 {
                                continue;
                            }
                        }
                        let mut turn = receiver::Turn {
                            pens,
                            registry,
                            scrap: &mut *scrap,
                            events: &mut *events,
                        };
                        match lane.poll(&mut turn) {
                            Ok(m) => moved |= m,
                            Err(why) => {
                                moved = true;
                                let lane = lane.id();
                                events.push(EngineEvent::LaneDown { link: id, lane, why });
                                *slot = None;
                            }
                        }
                    }
                }
                Side::Sender { lanes } => {
                    for lane in lanes {
                        let mut turn = sender::Turn::new(now, config, registry, jitter, events);
                        moved |= lane.poll(&mut turn, all);
                    }
                }
            }
        }
        moved
    }

    /// Ends quiesces: by no part half-written, or past the deadline by destroying what holds them
    /// up. Parts that are written in full may still stand in the socket: their source is not read
    /// any more, and what becomes of them is the receiver's to say.
    fn quiesce(&mut self, now: Time, events: &mut Vec<EngineEvent>) -> bool {
        let before = self.quiescing.len();
        let Self { config, registry, links, jitter, quiescing, .. } = self;
        quiescing.retain(|q| {
            let mut left = false;
            if let Some(Link { side: Side::Sender { lanes }, .. }) = links.get_mut(&q.link) {
                for lane in lanes {
                    if !lane.quiesce(q.grant) {
                        continue;
                    }
                    if now < q.deadline {
                        left = true;
                        continue;
                    }
                    let why = Error::new(
                        ErrorKind::DeadlineExceeded,
                        "the receiver did not take the rest of a part in time; its connection was destroyed",
                    )
                    .with("grant", q.grant)
                    .with("limit_ms", limits::QUIESCE_MS);
                    let mut turn = sender::Turn::new(now, config, registry, jitter, events);
                    lane.down(&mut turn, why.to_refusal());
                }
            }
            if !left {
                events.push(quiesced(q));
            }
            left
        });
        self.quiescing.len() != before
    }

    fn user_of(&self, region: &Region) -> Option<String> {
        let posts = self.links.values().find_map(|link| match &link.side {
            Side::Sender { lanes } => lanes.iter().find_map(|lane| lane.uses(region)),
            Side::Receiver { .. } => None,
        });
        posts
            .map(|grant| format!("a post of grant {grant}"))
            .or_else(|| self.pens.user_of(region).map(|grant| format!("open grant {grant}")))
    }
}

fn quiesced(q: &Quiescing) -> EngineEvent {
    EngineEvent::Quiesced(Quiesced::new(q.link, q.grant))
}
fn refused(why: &'static str) {
    metrics::counter!("kvlane_tcp_refused_connections_total", "why" => why).increment(1);
}

impl Engine for TcpEngine {
    fn caps(&self) -> Caps {
        Caps { name: "tcp", path: DataPath::ReceiverCopies, emulated: false, rails: 1 }
    }

    fn register(&mut self, region: &Arc<Region>) -> Result<()> {
        self.registry.register(region)
    }

    fn unregister(&mut self, region: &Arc<Region>) -> Result<()> {
        let user = self.user_of(region);
        self.registry.unregister(region, user)
    }

    fn command(&mut self, now: Time, command: Command) {
        match command {
            Command::Listen { link, peer, lanes, receiver } => {
                let blob = self.listen(link, peer, lanes, receiver);
                self.outbox.push(EngineEvent::Local { link, blob });
            }
            Command::Connect { link, remote } => {
                if let Err(e) = self.connect(link, &remote) {
                    self.outbox.push(EngineEvent::Local { link, blob: Err(e) });
                }
            }
            Command::Close { link } => self.close(link),
            Command::Open(grant) => {
                if let Err(e) = self.pens.open(grant) {
                    self.outbox.push(EngineEvent::Trouble(e));
                }
            }
            Command::Fence { grant, how } => {
                self.outbox.push(EngineEvent::Fenced(self.pens.fence(grant, how)));
            }
            // The receiver writes its own pages, and engines speak over their connections.
            Command::Told { .. } | Command::Grant(_) => {}
            Command::Post(post) => {
                if let Err(e) = self.post(&post) {
                    self.outbox.push(nacked(&post, &e));
                }
            }
            Command::ResetLane { link, lane } => {
                let Self { config, registry, links, jitter, outbox, .. } = self;
                let Some(Link { side: Side::Sender { lanes }, .. }) = links.get_mut(&link) else {
                    return outbox.push(EngineEvent::Trouble(no_link(link)));
                };
                if let Some(outbound) = lanes.get_mut(usize::from(lane.0)) {
                    let why = was_reset();
                    let mut turn = sender::Turn::new(now, config, registry, jitter, outbox);
                    outbound.down(&mut turn, why.to_refusal());
                }
            }
            Command::Quiesce { link, grant } => {
                let deadline = now.plus_ms(limits::QUIESCE_MS);
                self.quiescing.push(Quiescing { link, grant, deadline });
            }
        }
    }

    fn poll(&mut self, now: Time, events: &mut Vec<EngineEvent>) -> bool {
        let mut moved = !self.outbox.is_empty();
        events.append(&mut self.outbox);
        self.turns = self.turns.wrapping_add(1);
        let all = std::mem::take(&mut self.slept) || self.turns.is_multiple_of(QUIET_TURNS);
        // First what may be waited for.
        moved |= self.lanes(now, all, events);
        if all {
            moved |= self.accept(now, events);
            moved |= self.greet(now, events);
        }
        moved |= self.quiesce(now, events);
        moved
    }

    fn park(&mut self, interests: &mut Vec<Interest>) -> Option<Time> {
        self.slept = true;
        let mut until = None;
        let mut by = |t: Option<Time>| until = [until, t].into_iter().flatten().min();
        if !self.outbox.is_empty() {
            by(Some(Time(0)));
        }
        if self.accept_from == Time(0) {
            let fd = self.listener.as_raw_fd();
            interests.push(Interest { fd, read: true, write: false });
        } else {
            by(Some(self.accept_from));
        }
        for stranger in &self.strangers {
            let fd = stranger.stream.as_raw_fd();
            interests.push(Interest { fd, read: true, write: false });
            by(Some(stranger.deadline));
        }
        for link in self.links.values() {
            match &link.side {
                Side::Receiver { lanes, .. } => {
                    for lane in lanes.iter().flatten() {
                        let (read, write) = lane.wants();
                        interests.push(Interest { fd: lane.stream().as_raw_fd(), read, write });
                    }
                }
                Side::Sender { lanes } => lanes.iter().for_each(|lane| by(lane.park(interests))),
            }
        }
        by(self.quiescing.iter().map(|q| q.deadline).min());
        until
    }
}
