//! Engine `shm`: two workers of one host; the receiver's code copies pages out of the sender's pools.
//!
//! Owns: one Unix socket to be dialled at, the connections (lanes) of each link with their rings, the
//! mappings of senders' pools, the serve words of its own grants, the open grants and their pens. In:
//! [`Command`]s, messages of the sockets, slots of the rings. Out: [`EngineEvent`]s. To the rooms it
//! is an engine whose receiver copies, like `tcp`, only that a post describes where a part is instead
//! of streaming it (`docs/decisions/0005-shm-is-an-engine-whose-receiver-copies.md`).
//!
//! Invariants:
//! 1. A byte lands only in a page of the part that its descriptor names, under a grant that is open
//!    on that link and lane, while the grant's pen is held; a fence is taking the pen.
//! 2. A part arrives only if the sender's serve word has not changed since it was posted, as read
//!    after the copy: [`Command::Quiesce`] raises the word and may answer at once, whatever the
//!    receiver is doing ([`serve`]; what orders the two sides, on x86 and elsewhere, stands there and
//!    in [`crate::sys::copy`]).
//! 3. Whatever a peer can write is copied out once and checked: a lie costs its own part or lane.
//!    Pools are mapped read-only by receivers, and sealed so that they cannot do otherwise.
//! 4. The end of a lane's connection is the end of the lane; the sender dials again.
//!
//! Both workers are on one host if the socket can be dialled, and for no other reason. The receiver
//! hands out a token and a proof over the control plane. The sender shows the token; it shares memory
//! only with whoever answers with the proof. An abstract socket is the default: it needs no
//! directory and leaves nothing behind, however its process ends. Workers that do not share a network
//! namespace use a directory that both see. Wake-ups are messages of the same socket: it is polled
//! anyhow, and a descriptor given by the peer could be made to block.
//!
//! Memory that kvlane did not allocate has no descriptor that could be shared; it is read from the
//! sender's process by its number, which is safe while that process is known to live. A sender can
//! make such a read wait (its pages may be somebody's who answers slowly): both ends of a link with
//! foreign memory trust each other with their time.
//!
//! A checksum is computed by the sender over its pages when it describes a part, and by the receiver
//! over what it stored, read once. It finds what went wrong in between, pages that changed without a
//! quiesce included; it does not find what was wrong before.

mod ready;
mod receiver;
pub mod ring;
mod sender;
mod serve;
pub mod wire;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvlane_proto::{
    DataPath, Device, Error, ErrorKind, GrantId, LaneId, LinkId, Refusal, Result, Time, WorkerKey,
    limits,
};

use self::ready::Readier;
use self::receiver::Inbound;
use self::sender::{Outbound, Pools, is_later};
use self::serve::Serves;
use self::wire::{Blob, Door, MESSAGE_BYTES, Message, Token};
use super::pen::Pens;
pub use super::pen::RevokeHandle;
use super::redial::Jitter;
use super::refusals::{nacked, no_lane, no_link, was_reset};
use super::{Caps, Command, Engine, EngineEvent, Interest, Post, Quiesced};
use crate::memory::{Region, Registry};
use crate::random::{fill_random, random};
use crate::sys::share::Import;
use crate::sys::unix::{Listener, Name, Socket};

/// Most pools of one sender.
pub const REGIONS_MAX: usize = 512;
/// Connections that have not said who they are; the oldest makes way for the next.
const STRANGERS_MAX: usize = 128;
/// Connections taken from the listener in one turn.
const ACCEPTS_PER_TURN: usize = 64;
/// Pause after accept failed for want of descriptors or memory.
const ACCEPT_PAUSE_MS: u64 = 100;
/// Messages taken from one socket in one turn.
const MESSAGES_PER_TURN: usize = 128;
/// How often sockets are looked at, if nothing woke the engine: rings need no system call, sockets
/// do, and a turn without one takes a tenth of a microsecond.
const HEAR_NS: u64 = 50_000;
/// Files of sockets that were never finished are removed after so long.
const UNFINISHED_S: u64 = 60;

/// Settings of the engine.
#[derive(Clone, Debug, Default)]
pub struct ShmConfig {
    /// Where to make the file of the socket, for workers that do not share a network namespace. It is
    /// made if it is missing, and must be closed to others. Without it the socket has no file.
    pub directory: Option<PathBuf>,
    /// Sender: adds a CRC32C to each part, which receivers verify as they copy.
    pub checksum: bool,
}

/// A connection that has not said who it is.
struct Stranger {
    socket: Socket,
    deadline: Time,
}

enum Side {
    Receiver {
        door: Door,
        lanes: Vec<Option<Inbound>>,
        imports: Vec<Arc<Import>>,
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

/// The engine; see the module.
pub struct ShmEngine {
    config: ShmConfig,
    listener: Listener,
    accept_from: Time,
    registry: Registry,
    pools: Pools,
    serves: Serves,
    readier: Readier,
    pens: Arc<Pens>,
    links: BTreeMap<LinkId, Link>,
    tokens: HashMap<Token, LinkId>,
    strangers: VecDeque<Stranger>,
    jitter: Jitter,
    /// When sockets are looked at next.
    hear_at: Time,
    /// It slept, so anything may have become ready.
    slept: bool,
    /// Events of commands, until the next poll.
    outbox: Vec<EngineEvent>,
}

impl ShmEngine {
    /// Listens; links come with [`Command::Listen`].
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if the directory is not fit, [`ErrorKind::Io`] or [`ErrorKind::Memory`]
    /// if the system refuses.
    pub fn new(config: ShmConfig) -> Result<Self> {
        let mut unique = [0; 16];
        fill_random(&mut unique)?;
        let unique = format!("kvlane-{:032x}", u128::from_ne_bytes(unique));
        let name = match &config.directory {
            None => Name::Abstract(unique.into_bytes()),
            Some(directory) => {
                let directory = fit(directory)?;
                sweep(&directory);
                Name::File(directory.join(unique).with_extension(SOCKET))
            }
        };
        let listener = Listener::bind(name.clone()).map_err(|e| {
            Error::new(ErrorKind::Io, "shm engine: cannot listen")
                .with("socket", &name)
                .hint("a directory with a short name, on a local file system, is needed")
                .caused_by(e)
        })?;
        Ok(Self {
            config,
            listener,
            accept_from: Time(0),
            registry: Registry::new(&[Device::Host]),
            pools: Pools::default(),
            serves: Serves::new()?,
            readier: Readier::new()?,
            pens: Arc::default(),
            links: BTreeMap::new(),
            tokens: HashMap::new(),
            strangers: VecDeque::new(),
            jitter: Jitter::new(random()),
            hear_at: Time(0),
            slept: true,
            outbox: Vec::new(),
        })
    }
    /// Where peers dial.
    pub fn socket(&self) -> &Name {
        self.listener.name()
    }
    /// For revokes from other threads.
    pub fn revoke_handle(&self) -> RevokeHandle {
        RevokeHandle(self.pens.clone())
    }

    fn listen(
        &mut self,
        link: LinkId,
        peer: WorkerKey,
        lanes: u16,
        receiver: bool,
    ) -> Result<Vec<u8>> {
        if self.links.contains_key(&link) {
            return Err(
                Error::new(ErrorKind::Internal, "link number used twice").with("link", link.0)
            );
        }
        if lanes == 0 || lanes > limits::LANES_PER_LINK_MAX {
            return Err(Error::new(ErrorKind::Config, "number of lanes is out of range")
                .with("found", lanes)
                .with("limit", limits::LANES_PER_LINK_MAX));
        }
        let (side, door) = if receiver {
            let (mut token, mut proof) = (Token::default(), Token::default());
            fill_random(&mut token)?;
            fill_random(&mut proof)?;
            self.tokens.insert(token, link);
            let door = Door { token, proof, name: self.listener.name().clone() };
            let lanes = (0..lanes).map(|_| None).collect();
            (Side::Receiver { door: door.clone(), lanes, imports: Vec::new() }, Some(door))
        } else {
            (Side::Sender { lanes: Vec::new() }, None)
        };
        self.links.insert(link, Link { peer, lanes, side });
        Ok(Blob { lanes, door }.encode())
    }

    fn connect(&mut self, now: Time, id: LinkId, remote: &[u8]) -> Result<()> {
        let link = self.links.get_mut(&id).ok_or_else(|| no_link(id))?;
        let blob = Blob::decode(remote).map_err(|e| e.with("peer", &link.peer))?;
        let Side::Sender { lanes } = &mut link.side else { return Ok(()) };
        if !lanes.is_empty() {
            return Err(Error::new(ErrorKind::Internal, "link connected twice").with("link", id.0));
        }
        let Some(door) = blob.door else {
            let why = "shm engine: the receiver has no socket";
            return Err(Error::new(ErrorKind::Malformed, why)
                .with("peer", &link.peer)
                .hint("only one side of a link may be the sender"));
        };
        // The receiver listens, or there would be no blob: if it cannot be dialled now, it cannot be
        // dialled from here.
        let first = match dial(&door.name) {
            Ok(socket) => Some(socket),
            Err(e) if e.kind() == ErrorKind::Busy => None,
            Err(e) => return Err(e.with("peer", &link.peer)),
        };
        let count = link.lanes.min(blob.lanes);
        let mut dialled = first;
        lanes.extend(
            (0..count).map(|n| Outbound::new(now, id, LaneId(n), door.clone(), dialled.take())),
        );
        Ok(())
    }

    fn post(&mut self, post: &Post) -> Result<()> {
        let Some(Link { side: Side::Sender { lanes }, .. }) = self.links.get_mut(&post.link) else {
            return Err(no_link(post.link));
        };
        let count = lanes.len();
        let lane =
            lanes.get_mut(usize::from(post.lane.0)).ok_or_else(|| no_lane(post.lane, count))?;
        lane.post(post)
    }

    /// The source may change at once: whatever is being copied is void.
    fn quiesce(&mut self, link: LinkId, grant: GrantId) {
        self.serves.stop(link, grant);
        if let Some(Link { side: Side::Sender { lanes }, .. }) = self.links.get_mut(&link) {
            lanes.iter_mut().for_each(|lane| lane.stop(grant));
        }
        self.outbox.push(EngineEvent::Quiesced(Quiesced::new(link, grant)));
    }

    fn close(&mut self, id: LinkId) {
        if let Some(Link { side: Side::Receiver { door, .. }, .. }) = self.links.remove(&id) {
            self.tokens.remove(&door.token);
        }
        self.serves.close(id);
    }

    /// Takes new connections; each has until its deadline to say whose it is.
    fn accept(&mut self, now: Time, events: &mut Vec<EngineEvent>) -> bool {
        let mut moved = false;
        if now < self.accept_from {
            return false;
        }
        self.accept_from = Time(0);
        for _ in 0..ACCEPTS_PER_TURN {
            let socket = match self.listener.accept() {
                Ok(socket) => socket,
                Err(e) if is_later(&e) => break,
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionAborted => continue,
                Err(e) => {
                    self.accept_from = now.plus_ms(ACCEPT_PAUSE_MS);
                    let why = Error::new(ErrorKind::Io, "shm engine: cannot accept");
                    let fix = "raise the limit of open files (ulimit -n)";
                    events.push(EngineEvent::Trouble(why.hint(fix).caused_by(e)));
                    break;
                }
            };
            moved = true;
            if self.strangers.len() >= STRANGERS_MAX {
                self.strangers.pop_front();
                refused("crowded");
            }
            let deadline = now.plus_ms(limits::HANDSHAKE_MS);
            self.strangers.push_back(Stranger { socket, deadline });
        }
        moved
    }

    /// Lets strangers say who they are.
    fn greet(&mut self, now: Time, events: &mut Vec<EngineEvent>) -> bool {
        let (mut bytes, mut fds) = ([0; MESSAGE_BYTES], Vec::new());
        let mut moved = false;
        for _ in 0..self.strangers.len() {
            let Some(stranger) = self.strangers.pop_front() else { break };
            match stranger.socket.receive(&mut bytes, &mut fds) {
                Err(e) if is_later(&e) && now < stranger.deadline => {
                    self.strangers.push_back(stranger);
                    continue;
                }
                Err(e) if is_later(&e) => refused("silent"),
                Err(e) if e.kind() == std::io::ErrorKind::InvalidData => refused("garbage"),
                Err(_) | Ok(0) => refused("closed"),
                Ok(len) => {
                    let message = Message::decode(&bytes[..len]).filter(|_| fds.is_empty());
                    if let Err(why) = self.welcome(now, stranger.socket, message, events) {
                        refused(why);
                    }
                }
            }
            moved = true;
        }
        moved
    }

    /// Makes a stranger a lane, in place of one that it had before.
    fn welcome(
        &mut self,
        now: Time,
        socket: Socket,
        message: Option<Message>,
        events: &mut Vec<EngineEvent>,
    ) -> Result<(), &'static str> {
        let Some(Message::Hello { lane, token }) = message else { return Err("garbage") };
        let id = *self.tokens.get(&token).ok_or("token")?;
        let Some(Link { side: Side::Receiver { lanes, door, .. }, .. }) = self.links.get_mut(&id)
        else {
            return Err("token");
        };
        let slot = lanes.get_mut(usize::from(lane)).ok_or("lane")?;
        let lane = LaneId(lane);
        let next = Inbound::new(now, id, lane, socket, door.proof).map_err(|_| "closed")?;
        if slot.replace(next).is_some_and(|before| before.is_up()) {
            let why = Refusal::new(ErrorKind::PeerLost, "the sender dialled the lane again");
            events.push(EngineEvent::LaneDown { link: id, lane, why });
        }
        Ok(())
    }

    fn lanes(&mut self, now: Time, hear: bool, events: &mut Vec<EngineEvent>) -> bool {
        let Self { config, registry, pools, serves, readier, pens, links, jitter, .. } = self;
        let mut moved = false;
        for (&id, link) in links {
            match &mut link.side {
                Side::Receiver { lanes, imports, .. } => {
                    let mut over = false;
                    for slot in lanes.iter_mut() {
                        let Some(lane) = slot else { continue };
                        let mut turn =
                            receiver::Turn { now, pens, registry, readier, imports, events };
                        match lane.poll(&mut turn, hear) {
                            Ok(m) => moved |= m,
                            Err(why) => {
                                (moved, over) = (true, true);
                                if lane.is_up() {
                                    let lane = lane.id();
                                    events.push(EngineEvent::LaneDown { link: id, lane, why });
                                } else {
                                    refused("handshake");
                                    tracing::warn!(link = id.0, %why, "a lane did not come up");
                                }
                                *slot = None;
                            }
                        }
                    }
                    if over || hear && !imports.is_empty() {
                        imports.retain(|i| lanes.iter().flatten().any(|lane| lane.has(i)));
                    }
                }
                Side::Sender { lanes } => {
                    for lane in lanes {
                        let checksum = config.checksum;
                        let mut turn =
                            sender::Turn { now, checksum, registry, pools, serves, jitter, events };
                        moved |= lane.poll(&mut turn, hear);
                    }
                }
            }
        }
        moved
    }

    fn outbound(&mut self) -> impl Iterator<Item = &mut Outbound> {
        self.links.values_mut().flat_map(|link| match &mut link.side {
            Side::Sender { lanes } => lanes.as_mut_slice(),
            Side::Receiver { .. } => &mut [],
        })
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

fn refused(why: &'static str) {
    metrics::counter!("kvlane_shm_refused_connections_total", "why" => why).increment(1);
}

/// Dials a receiver; [`ErrorKind::Busy`] if it has too many callers just now.
fn dial(name: &Name) -> Result<Socket> {
    Socket::dial(name).map_err(|e| {
        if is_later(&e) {
            return Error::new(ErrorKind::Busy, "the receiver's socket has too many callers")
                .with("socket", name);
        }
        let fix = match name {
            Name::Abstract(_) => {
                "both workers must run on one host and in one network namespace; give containers a \
                 directory that both see (--shm-dir), or use --engine auto, which then takes tcp"
            }
            Name::File(_) => {
                "both workers must run on one host and see this directory under this name; mount it \
                 into both containers, or use --engine auto, which then takes tcp"
            }
        };
        Error::new(ErrorKind::PeerLost, "the receiver's socket cannot be reached")
            .with("socket", name)
            .hint(fix)
            .caused_by(e)
    })
}

/// Ending of a socket's file.
const SOCKET: &str = "sock";

/// Makes the directory if it is missing, and checks that it is closed to others.
fn fit(directory: &Path) -> Result<PathBuf> {
    let refused = |why: &str| {
        Error::new(ErrorKind::Config, format!("shm engine: {why}"))
            .with("directory", directory.display())
    };
    let failed = |e| refused("the directory cannot be used").caused_by(e);
    match std::fs::DirBuilder::new().mode(0o700).create(directory) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(failed(e)),
        _ => {}
    }
    let found = std::fs::metadata(directory).map_err(failed)?;
    if !found.is_dir() {
        return Err(refused("this is no directory"));
    }
    if found.mode() & 0o007 != 0 {
        return Err(refused("the directory is open to others")
            .with("mode", format!("{:o}", found.mode() & 0o7777))
            .hint("chmod o= it, or name one that does not exist"));
    }
    // Peers dial it by this name.
    directory.canonicalize().map_err(failed)
}

/// Removes sockets of processes that were killed: a finished one that refuses is dead.
fn sweep(directory: &Path) {
    let Ok(entries) = std::fs::read_dir(directory) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        let ours = path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("kvlane-"));
        let ending = path.extension().and_then(|e| e.to_str());
        let old = || {
            let age = std::fs::metadata(&path).and_then(|m| m.modified()).map(|t| t.elapsed());
            matches!(age, Ok(Ok(age)) if age.as_secs() >= UNFINISHED_S)
        };
        let candidate = ours && (ending == Some(SOCKET) || ending == Some("new") && old());
        if candidate
            && Socket::dial(&Name::File(path.clone()))
                .is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionRefused)
        {
            let _ = std::fs::remove_file(&path);
        }
    }
}

impl Engine for ShmEngine {
    fn caps(&self) -> Caps {
        Caps { name: "shm", path: DataPath::ReceiverCopies, emulated: false, rails: 1 }
    }

    fn register(&mut self, region: &Arc<Region>) -> Result<()> {
        self.registry.register(region)?;
        let id = match self.pools.add(region) {
            Ok(id) => id,
            Err(e) => {
                self.registry.unregister(region, None)?;
                return Err(e);
            }
        };
        self.outbound().for_each(|lane| lane.pool(id, Some(region)));
        Ok(())
    }

    fn unregister(&mut self, region: &Arc<Region>) -> Result<()> {
        let user = self.user_of(region);
        self.registry.unregister(region, user)?;
        if let Some(id) = self.pools.remove(region) {
            self.outbound().for_each(|lane| lane.pool(id, None));
        }
        Ok(())
    }

    fn command(&mut self, now: Time, command: Command) {
        match command {
            Command::Listen { link, peer, lanes, receiver } => {
                let blob = self.listen(link, peer, lanes, receiver);
                self.outbox.push(EngineEvent::Local { link, blob });
            }
            Command::Connect { link, remote } => {
                if let Err(e) = self.connect(now, link, &remote) {
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
                let Self { config, registry, pools, serves, links, jitter, outbox, .. } = self;
                let Some(Link { side: Side::Sender { lanes }, .. }) = links.get_mut(&link) else {
                    return outbox.push(EngineEvent::Trouble(no_link(link)));
                };
                if let Some(outbound) = lanes.get_mut(usize::from(lane.0)) {
                    let why = was_reset();
                    let (checksum, events) = (config.checksum, outbox);
                    let mut turn =
                        sender::Turn { now, checksum, registry, pools, serves, jitter, events };
                    outbound.down(&mut turn, why.to_refusal());
                }
            }
            Command::Quiesce { link, grant } => self.quiesce(link, grant),
        }
    }

    fn poll(&mut self, now: Time, events: &mut Vec<EngineEvent>) -> bool {
        let mut moved = !self.outbox.is_empty();
        events.append(&mut self.outbox);
        let slept = std::mem::take(&mut self.slept);
        if slept {
            self.readier.drain();
            for link in self.links.values() {
                match &link.side {
                    Side::Receiver { lanes, .. } => lanes.iter().flatten().for_each(Inbound::awake),
                    Side::Sender { lanes } => lanes.iter().for_each(Outbound::awake),
                }
            }
        }
        let hear = slept || now >= self.hear_at;
        moved |= self.lanes(now, hear, events);
        if hear {
            self.hear_at = Time(now.0.saturating_add(HEAR_NS));
            moved |= self.accept(now, events);
            moved |= self.greet(now, events);
        }
        moved
    }

    fn park(&mut self, interests: &mut Vec<Interest>) -> Option<Time> {
        self.slept = true;
        let mut until = None;
        let mut by = |t: Option<Time>| until = [until, t].into_iter().flatten().min();
        let mut read = |fd| interests.push(Interest { fd, read: true, write: false });
        if !self.outbox.is_empty() {
            by(Some(Time(0)));
        }
        read(self.readier.fd());
        if self.accept_from == Time(0) {
            read(self.listener.fd());
        } else {
            by(Some(self.accept_from));
        }
        for stranger in &self.strangers {
            read(stranger.socket.fd());
            by(Some(stranger.deadline));
        }
        for link in self.links.values_mut() {
            match &mut link.side {
                Side::Receiver { lanes, .. } => {
                    for lane in lanes.iter().flatten() {
                        interests.push(Interest { fd: lane.fd(), read: true, write: false });
                        by(lane.park());
                    }
                }
                Side::Sender { lanes } => {
                    lanes.iter_mut().for_each(|lane| by(lane.park(interests)));
                }
            }
        }
        until
    }
}
