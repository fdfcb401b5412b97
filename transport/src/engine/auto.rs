//! Engine `auto`: several engines as one, each link with the first of them that works for it.
//!
//! Owns: the engines, best first; at which of them each link may still come up; fences of which not
//! all engines have answered. In: [`Command`]s. Out: what the engines say, without the lanes of an
//! engine that a link has given up.
//!
//! The receiver makes ready at every engine and offers what each answers ([`encode`]). The sender
//! tries the offers in the receiver's order: one that is refused, or brings no lane up within
//! [`TRY_MS`], is given up before the next is tried. So what decides is that a lane works, never what
//! two workers say of where they are. The receiver follows: a lane of a later engine means that the
//! earlier ones were given up.
//!
//! Invariants: a link has lanes of one engine at a time, and only ever moves to a later one; it is
//! settled by the sender's first lane and, at the receiver, by the first grant that names it (rooms
//! start when the sender has its lanes); pages of a grant land at engines of settled links only; a
//! [`FenceProof`] is one that an engine made, and is given out when every engine has made one.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use kvlane_proto::{
    Error, ErrorKind, GrantId, LaneId, LinkId, Refusal, Result, Time, WorkerKey, limits,
};

use super::refusals::no_link;
use super::{
    Caps, Command, Engine, EngineEvent, FenceHow, FenceProof, Interest, OpenGrant, OpenSource,
};
use crate::memory::Region;

/// Its name.
pub const NAME: &str = "auto";
/// Version of the blob.
pub const VERSION: u8 = 1;
/// Most engines that one worker has, and a blob offers.
pub const ENGINES_MAX: usize = 4;
/// How long a sender waits for the first lane of an engine while there is another one.
pub const TRY_MS: u64 = 1_000;

/// One engine's name, and what the peer's engine of that name needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The name.
    pub name: String,
    /// The engine's own blob.
    pub blob: Vec<u8>,
}

/// The blob: `version u8 = 1 | n u8 | n × (name_len u8 | name | blob_len u16 | blob)`, best first.
pub fn encode(parts: &[Part]) -> Vec<u8> {
    let mut out = vec![VERSION, parts.len() as u8];
    for Part { name, blob } in parts {
        out.push(name.len() as u8);
        out.extend(name.as_bytes());
        out.extend((blob.len() as u16).to_le_bytes());
        out.extend(blob);
    }
    out
}

/// Reads a peer's blob: at least one engine, none twice, nothing behind them.
///
/// # Errors
/// [`ErrorKind::VersionMismatch`] or [`ErrorKind::Malformed`] naming the field.
pub fn decode(bytes: &[u8]) -> Result<Vec<Part>> {
    let malformed = |what: &str| Error::new(ErrorKind::Malformed, format!("auto engine: {what}"));
    if bytes.len() > limits::BLOB_BYTES_MAX {
        return Err(malformed("blob is too long").with("found", bytes.len()));
    }
    let short = || malformed("blob ends too early").with("bytes", bytes.len());
    let (&[version, n], mut rest) = bytes.split_first_chunk().ok_or_else(short)?;
    if version != VERSION {
        return Err(Error::new(ErrorKind::VersionMismatch, "auto engine: unknown blob version")
            .with("found", version)
            .with("expected", VERSION)
            .hint("run the same release on both workers"));
    }
    if n == 0 || usize::from(n) > ENGINES_MAX {
        return Err(malformed("number of engines is out of range")
            .with("found", n)
            .with("limit", ENGINES_MAX));
    }
    let mut take = |len: usize| {
        let (head, tail) = rest.split_at_checked(len).ok_or_else(short)?;
        rest = tail;
        Ok::<_, Error>(head)
    };
    let mut parts: Vec<Part> = Vec::new();
    for index in 0..n {
        let len = take(1)?[0].into();
        let name = std::str::from_utf8(take(len)?).ok().filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| malformed("engine without a name").with("index", index))?;
        if parts.iter().any(|part| part.name == name) {
            return Err(malformed("engine named twice").with("index", index));
        }
        let len = take(2)?.iter().rev().fold(0, |len, &byte| len << 8 | usize::from(byte));
        parts.push(Part { name: name.into(), blob: take(len)?.into() });
    }
    if !rest.is_empty() {
        return Err(malformed("bytes behind the last engine").with("found", rest.len()));
    }
    Ok(parts)
}

/// A place in the list of engines.
type Index = usize;

/// One engine at which a link may still come up.
struct Place {
    engine: Index,
    /// What its peer offers.
    remote: Vec<u8>,
}

struct Link {
    peer: WorkerKey,
    receiver: bool,
    /// Engines that have not answered `Listen`.
    unheard: usize,
    connected: bool,
    /// Where it may still come up, best first: it belongs to the first.
    places: VecDeque<Place>,
    /// Lanes that are up there.
    up: Vec<LaneId>,
    /// Said to be the link's engine.
    said: Option<Index>,
    /// The sender's first lane has until then.
    until: Option<Time>,
    /// Why there was none yet.
    last: Option<Refusal>,
    /// Engines that were given up, and why.
    refused: Vec<(&'static str, Refusal)>,
}

/// A fence that not every engine has answered.
struct Fencing {
    how: FenceHow,
    left: Vec<Index>,
    /// The first failure, or the latest proof.
    answer: Option<Result<FenceProof, Refusal>>,
}

/// The engine; see the module.
pub struct AutoEngine {
    engines: Vec<Box<dyn Engine>>,
    links: BTreeMap<LinkId, Link>,
    fences: HashMap<GrantId, Vec<Fencing>>,
    /// Senders' links that wait for their first lane.
    trying: Vec<LinkId>,
    /// Events until the next poll.
    outbox: Vec<EngineEvent>,
}

impl AutoEngine {
    /// Makes one of several, best first.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if there are none, too many, two of one name, or not all of one data
    /// path: rooms know one for each link, whichever engine it gets.
    pub fn new(engines: Vec<Box<dyn Engine>>) -> Result<Self> {
        let caps: Vec<Caps> = engines.iter().map(|e| e.caps()).collect();
        let alike = caps.iter().all(|c| c.path == caps[0].path);
        let twice = (1..caps.len()).any(|n| caps[..n].iter().any(|c| c.name == caps[n].name));
        if caps.is_empty() || caps.len() > ENGINES_MAX || !alike || twice {
            let names = caps.iter().map(|c| c.name).collect::<Vec<_>>().join(", ");
            return Err(Error::new(ErrorKind::Config, "auto engine: these do not make one engine")
                .with("engines", names)
                .with("limit", ENGINES_MAX)
                .hint("name different engines that move bytes the same way"));
        }
        let (links, fences) = (BTreeMap::new(), HashMap::new());
        Ok(Self { engines, links, fences, trying: Vec::new(), outbox: Vec::new() })
    }

    fn name(&self, engine: Index) -> &'static str {
        self.engines[engine].caps().name
    }
    /// Whose a link is. Of an unknown one, that of the first: it says what is to be said of it.
    fn of(&self, link: LinkId) -> Index {
        self.links.get(&link).and_then(|l| l.places.front()).map_or(0, |place| place.engine)
    }

    fn listen(&mut self, now: Time, link: LinkId, peer: WorkerKey, lanes: u16, receiver: bool) {
        if self.links.contains_key(&link) {
            let e = Error::new(ErrorKind::Internal, "link number used twice").with("link", link.0);
            return self.outbox.push(EngineEvent::Local { link, blob: Err(e) });
        }
        for engine in &mut self.engines {
            let peer = peer.clone();
            engine.command(now, Command::Listen { link, peer, lanes, receiver });
        }
        let unheard = self.engines.len();
        self.links.insert(
            link,
            Link {
                peer,
                receiver,
                unheard,
                connected: false,
                places: VecDeque::new(),
                up: Vec::new(),
                said: None,
                until: None,
                last: None,
                refused: Vec::new(),
            },
        );
    }

    /// What an engine answers to `Listen`; until all have, a place holds this side's own blob.
    fn listening(&mut self, id: LinkId, engine: Index, blob: Result<Vec<u8>>) {
        let name = self.name(engine);
        let Some(link) = self.links.get_mut(&id) else { return };
        link.unheard -= 1;
        match blob {
            Ok(remote) => link.places.push_back(Place { engine, remote }),
            Err(e) => link.refused.push((name, e.to_refusal())),
        }
        if link.unheard > 0 {
            return;
        }
        link.places.make_contiguous().sort_by_key(|place| place.engine);
        if link.places.is_empty() {
            return self.hopeless(id);
        }
        let part = |place: &mut Place| Part {
            name: self.engines[place.engine].caps().name.into(),
            blob: std::mem::take(&mut place.remote),
        };
        let parts: Vec<Part> = link.places.iter_mut().map(part).collect();
        self.outbox.push(EngineEvent::Local { link: id, blob: Ok(encode(&parts)) });
    }

    fn connect(&mut self, now: Time, id: LinkId, remote: &[u8]) -> Result<()> {
        let link = self.links.get_mut(&id).ok_or_else(|| no_link(id))?;
        if std::mem::replace(&mut link.connected, true) {
            return Err(Error::new(ErrorKind::Internal, "link connected twice").with("link", id.0));
        }
        let parts = decode(remote).map_err(|e| e.with("peer", &link.peer))?;
        let theirs = parts.iter().map(|p| p.name.as_str()).collect::<Vec<_>>().join(", ");
        let mine: Vec<Index> = link.places.drain(..).map(|place| place.engine).collect();
        for Part { name, blob } in parts {
            let its = |e: &&Index| self.engines[**e].caps().name == name;
            if let Some(&engine) = mine.iter().find(its) {
                link.places.push_back(Place { engine, remote: blob });
            }
        }
        // The order is the receiver's.
        if link.receiver {
            link.places.make_contiguous().sort_by_key(|place| place.engine);
        }
        for &engine in &mine {
            if !link.places.iter().any(|place| place.engine == engine) {
                self.engines[engine].command(now, Command::Close { link: id });
            }
        }
        if link.places.is_empty() {
            let ours = mine.iter().map(|&e| self.engines[e].caps().name);
            return Err(Error::new(ErrorKind::Incompatible, "no engine in common")
                .with("ours", ours.collect::<Vec<_>>().join(", "))
                .with("theirs", theirs)
                .with("peer", &link.peer)
                .hint("start both workers with one engine that both machines have"));
        }
        let at_once = if link.receiver { ENGINES_MAX } else { 1 };
        let places = link.places.iter().take(at_once);
        let dials: Vec<_> = places.map(|place| (place.engine, place.remote.clone())).collect();
        for (engine, remote) in dials {
            self.dial(now, id, engine, remote);
        }
        Ok(())
    }

    fn dial(&mut self, now: Time, id: LinkId, engine: Index, remote: Vec<u8>) {
        if let Some(link) = self.links.get_mut(&id).filter(|link| !link.receiver) {
            link.last = None;
            link.until = (link.places.len() > 1).then(|| now.plus_ms(TRY_MS));
            self.trying.retain(|trying| *trying != id);
            self.trying.extend(link.until.map(|_| id));
        }
        let connect = Command::Connect { link: id, remote };
        self.engines[engine].command(now, connect);
    }

    /// A link does not come up at an engine; a sender tries the next.
    fn give_up(&mut self, now: Time, id: LinkId, engine: Index, why: Refusal) {
        let name = self.name(engine);
        let Some(link) = self.links.get_mut(&id) else { return };
        let Some(at) = link.places.iter().position(|place| place.engine == engine) else { return };
        link.places.remove(at);
        self.engines[engine].command(now, Command::Close { link: id });
        if at == 0 {
            let why = Refusal::new(ErrorKind::NoPath, "the link goes to another engine");
            for lane in std::mem::take(&mut link.up) {
                let why = why.clone();
                self.outbox.push(EngineEvent::LaneDown { link: id, lane, why });
            }
        }
        let Some(next) = link.places.front() else {
            link.refused.push((name, why));
            return self.hopeless(id);
        };
        let (next, remote) = (next.engine, next.remote.clone());
        let (peer, using) = (&link.peer, self.engines[next].caps().name);
        // Without the hint: falling back is the fix.
        let (kind, text) = (why.kind.code(), &why.text);
        tracing::info!(%peer, "{name} not used: {kind}: {text}, using {using}");
        link.refused.push((name, why));
        if at == 0 && !link.receiver {
            self.dial(now, id, next, remote);
        }
    }

    /// No engine is left: every one is named with its reason.
    fn hopeless(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(&id) else { return };
        link.until = None;
        let mut refused = std::mem::take(&mut link.refused).into_iter().rev();
        let Some((_, why)) = refused.next() else { return };
        let e = refused.fold(Error::from(why), |e, (name, why)| e.with(name, why));
        self.outbox.push(EngineEvent::Local { link: id, blob: Err(e) });
    }

    /// A link stays where it is.
    fn settle(&mut self, now: Time, id: LinkId) {
        let Some(link) = self.links.get_mut(&id) else { return };
        link.until = None;
        for place in link.places.drain(1.min(link.places.len())..) {
            self.engines[place.engine].command(now, Command::Close { link: id });
        }
    }

    fn open(&mut self, now: Time, OpenGrant { grant, sources }: OpenGrant) {
        let mut split: BTreeMap<Index, Vec<OpenSource>> = BTreeMap::new();
        for source in sources {
            self.settle(now, source.link);
            split.entry(self.of(source.link)).or_default().push(source);
        }
        for (engine, sources) in split {
            self.engines[engine].command(now, Command::Open(OpenGrant { grant, sources }));
        }
    }

    /// Asks every engine, also those without a part of the grant: one that never had it answers at
    /// once, and takes no part of it later.
    fn fence(&mut self, now: Time, grant: GrantId, how: FenceHow) {
        let left = (0..self.engines.len()).collect();
        self.fences.entry(grant).or_default().push(Fencing { how, left, answer: None });
        for engine in &mut self.engines {
            engine.command(now, Command::Fence { grant, how });
        }
    }

    /// An engine has answered a fence; what to say once all have.
    fn answered(
        &mut self,
        engine: Index,
        grant: GrantId,
        answer: Result<FenceProof, Refusal>,
    ) -> Option<EngineEvent> {
        let fences = self.fences.get_mut(&grant)?;
        let how = answer.as_ref().ok().map(FenceProof::how);
        let its = |f: &Fencing| f.left.contains(&engine) && how.is_none_or(|how| how == f.how);
        let at = fences.iter().position(its)?;
        let fencing = &mut fences[at];
        fencing.left.retain(|&left| left != engine);
        if !matches!(fencing.answer, Some(Err(_))) {
            fencing.answer = Some(answer);
        }
        if !fencing.left.is_empty() {
            return None;
        }
        let answer = fences.remove(at).answer?;
        if fences.is_empty() {
            self.fences.remove(&grant);
        }
        Some(match answer {
            Ok(proof) => EngineEvent::Fenced(proof),
            Err(why) => EngineEvent::FenceFailed { grant, why },
        })
    }

    /// Takes what an engine says, and hands on what is the link's.
    fn heard(&mut self, now: Time, engine: Index, event: EngineEvent) {
        let event = match event {
            EngineEvent::Local { link, blob } => {
                let unheard = self.links.get(&link).is_some_and(|l| l.unheard > 0);
                match blob {
                    blob if unheard => self.listening(link, engine, blob),
                    Err(e) => self.give_up(now, link, engine, e.to_refusal()),
                    Ok(_) => {}
                }
                return;
            }
            EngineEvent::LaneUp { link, lane } => {
                let Some(found) = self.links.get_mut(&link) else { return };
                let place = |e: &Index| found.places.iter().any(|p| p.engine == *e);
                if !place(&engine) {
                    return;
                }
                let why = Refusal::new(ErrorKind::NoPath, "the sender has taken another engine");
                let before = found.places.iter().map(|p| p.engine).take_while(|&e| e != engine);
                for earlier in before.collect::<Vec<_>>() {
                    self.give_up(now, link, earlier, why.clone());
                }
                let name = self.name(engine);
                let Some(found) = self.links.get_mut(&link) else { return };
                found.up.push(lane);
                let sender = !found.receiver;
                if found.said.replace(engine) != Some(engine) {
                    self.outbox.push(EngineEvent::Chosen { link, engine: name });
                }
                if sender {
                    self.settle(now, link);
                }
                event
            }
            EngineEvent::LaneDown { link, lane, ref why } => {
                let Some(found) = self.links.get_mut(&link) else { return };
                if found.places.front().is_none_or(|place| place.engine != engine) {
                    return;
                }
                if found.until.is_some() {
                    found.last = Some(why.clone());
                    return;
                }
                found.up.retain(|up| *up != lane);
                event
            }
            EngineEvent::Fenced(proof) => {
                let grant = proof.grant();
                let Some(event) = self.answered(engine, grant, Ok(proof)) else { return };
                event
            }
            EngineEvent::FenceFailed { grant, why } => {
                let Some(event) = self.answered(engine, grant, Err(why)) else { return };
                event
            }
            event => event,
        };
        self.outbox.push(event);
    }

    /// Gives up engines whose first lane did not come in time.
    fn hurry(&mut self, now: Time) {
        let Self { links, trying, .. } = self;
        trying.retain(|id| links.get(id).is_some_and(|link| link.until.is_some()));
        let late = trying.iter().filter_map(|id| Some((*id, links.get(id)?)));
        let late = late.filter(|(_, link)| link.until.is_some_and(|until| until <= now));
        let late: Vec<_> = late.map(|(id, link)| (id, link.last.clone())).collect();
        for (id, last) in late {
            let e = Error::new(ErrorKind::DeadlineExceeded, "no lane came up in time")
                .with("limit_ms", TRY_MS);
            let e = last.into_iter().fold(e, |e, last| e.with("last", last));
            self.give_up(now, id, self.of(id), e.to_refusal());
        }
    }
}

impl Engine for AutoEngine {
    fn caps(&self) -> Caps {
        let emulated = self.engines.iter().any(|e| e.caps().emulated);
        Caps { name: NAME, path: self.engines[0].caps().path, emulated, rails: 1 }
    }

    fn register(&mut self, region: &Arc<Region>) -> Result<()> {
        for n in 0..self.engines.len() {
            if let Err(e) = self.engines[n].register(region) {
                for engine in &mut self.engines[..n] {
                    engine.unregister(region)?;
                }
                return Err(e.with("engine", self.name(n)));
            }
        }
        Ok(())
    }

    fn unregister(&mut self, region: &Arc<Region>) -> Result<()> {
        for n in 0..self.engines.len() {
            if let Err(e) = self.engines[n].unregister(region) {
                for engine in &mut self.engines[..n] {
                    engine.register(region)?;
                }
                return Err(e.with("engine", self.name(n)));
            }
        }
        Ok(())
    }

    fn command(&mut self, now: Time, command: Command) {
        match command {
            Command::Listen { link, peer, lanes, receiver } => {
                self.listen(now, link, peer, lanes, receiver);
            }
            Command::Connect { link, remote } => {
                if let Err(e) = self.connect(now, link, &remote) {
                    self.outbox.push(EngineEvent::Local { link, blob: Err(e) });
                }
            }
            Command::Close { link } => {
                self.links.remove(&link);
                for engine in &mut self.engines {
                    engine.command(now, Command::Close { link });
                }
            }
            Command::Open(grant) => self.open(now, grant),
            Command::Fence { grant, how } => self.fence(now, grant, how),
            // None of its engines writes into the receiver's pages.
            Command::Told { .. } | Command::Grant(_) => {}
            Command::Post(ref post) => {
                let engine = self.of(post.link);
                self.engines[engine].command(now, command);
            }
            Command::ResetLane { link, .. } | Command::Quiesce { link, .. } => {
                let engine = self.of(link);
                self.engines[engine].command(now, command);
            }
        }
    }

    fn poll(&mut self, now: Time, events: &mut Vec<EngineEvent>) -> bool {
        let mut moved = !self.outbox.is_empty();
        let mut said = Vec::new();
        for engine in 0..self.engines.len() {
            moved |= self.engines[engine].poll(now, &mut said);
            for event in said.drain(..) {
                self.heard(now, engine, event);
            }
        }
        if !self.trying.is_empty() {
            self.hurry(now);
        }
        events.append(&mut self.outbox);
        moved
    }

    fn park(&mut self, interests: &mut Vec<Interest>) -> Option<Time> {
        let own = (!self.outbox.is_empty()).then_some(Time(0));
        let tried = self.trying.iter().filter_map(|id| self.links.get(id)?.until);
        let tried = tried.min();
        let engines = self.engines.iter_mut().filter_map(|e| e.park(interests)).min();
        [own, tried, engines].into_iter().flatten().min()
    }
}
