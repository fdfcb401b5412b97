//! The links of one worker: sessions, their machines, their reader tasks.
//!
//! In: sessions (dialled or accepted), frames, the engine's answers and words. Out: [`News`] for the
//! room machine, commands for the engine, frames for the peers. A link that is lost takes its session
//! and its engine's lanes with it; nothing else. What the peer's engine says reaches this side's
//! between the commands that come of the frames before it and of those behind it: a grant is for the
//! lanes' connections of its place in that order.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::Arc;

use actix::prelude::*;
use kvlane_proto::link::{EngineChoice, Event, Link, LinkConfig, Output};
use kvlane_proto::msg::peer::{PeerFrame, PeerMsg};
use kvlane_proto::{
    DataPath, Error, ErrorKind, Identity, LaneId, Layout, LinkId, PoolMap, Refusal, Share, Time,
    WorkerKey, limits,
};
use kvlane_transport::engine::auto::{self, Part};
use kvlane_transport::engine::{Caps, Command};
use kvlane_transport::quic::{Death, FrameReceiver, FrameSender, Session, Watch};

use crate::engine::Commands;
use crate::outages::Told;
use crate::tasks;

/// Something arrived on a link.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) struct LinkIn {
    pub(crate) link: LinkId,
    pub(crate) event: Event,
}

/// What a link means for the rooms.
pub(crate) enum News {
    Up {
        link: LinkId,
        peer: WorkerKey,
        path: DataPath,
        lanes: u16,
        down: Vec<(LaneId, Refusal)>,
        part_bytes: u64,
        share: Arc<Share>,
        pools: Arc<[Layout]>,
        maps: Arc<[Arc<PoolMap>]>,
        since: Time,
    },
    Deliver {
        link: LinkId,
        msg: PeerMsg,
        echo_sent: Time,
    },
    Lost {
        link: LinkId,
        peer: WorkerKey,
        was_up: bool,
        why: Refusal,
    },
}

struct Entry {
    machine: Link,
    sender: FrameSender<PeerFrame>,
    /// Closes the session when it is dropped.
    _stop: tokio::sync::oneshot::Sender<()>,
    /// Which engine its lanes are of.
    engine: &'static str,
    /// That engine, once rooms may start: what the link is counted under.
    up: Option<&'static str>,
}

pub(crate) struct Links {
    config: LinkConfig,
    /// Where this side's pages are, pool by pool.
    maps: Arc<[Arc<PoolMap>]>,
    engine: Rc<Commands>,
    caps: Caps,
    links: BTreeMap<LinkId, Entry>,
    by_peer: HashMap<Identity, LinkId>,
    next: u64,
    /// Of lost links.
    told: Told,
}

impl Links {
    pub(crate) fn new(
        config: LinkConfig,
        maps: Arc<[Arc<PoolMap>]>,
        engine: Rc<Commands>,
        caps: Caps,
    ) -> Self {
        let (links, by_peer) = (BTreeMap::new(), HashMap::new());
        Self { config, maps, engine, caps, links, by_peer, next: 0, told: Told::default() }
    }
    /// Who is at the other end of a link.
    pub(crate) fn peer(&self, link: LinkId) -> Option<&WorkerKey> {
        self.links.get(&link).map(|l| l.machine.peer())
    }
    /// Rails that the lanes of a link are spread over.
    pub(crate) fn rails(&self) -> u16 {
        self.caps.rails
    }

    /// Takes a session. An older link with the same worker is over: either it restarted, or it
    /// dialled again because the old one is dead.
    pub(crate) fn open<A>(&mut self, now: Time, session: Session, actor: &Addr<A>) -> Vec<News>
    where
        A: Actor<Context = Context<A>> + Handler<LinkIn>,
    {
        let mut news = Vec::new();
        let peer = session.peer.clone();
        if let Some(&old) = self.by_peer.get(&peer.identity) {
            let restarted = self
                .links
                .get(&old)
                .is_some_and(|l| l.machine.peer().incarnation != peer.incarnation);
            let how =
                if restarted { "the peer has restarted" } else { "the peer has dialled again" };
            let why = Error::new(ErrorKind::PeerLost, how)
                .with("peer", &peer)
                .hint("place the request again");
            news.extend(self.handle(now, old, Event::Closed(why.to_refusal())));
        }
        self.next += 1;
        let link = LinkId(self.next);
        let (sender, receiver, watch) = session.into_parts::<PeerFrame, PeerFrame>();
        let (stop, stopped) = tokio::sync::oneshot::channel();
        tasks::spawn(read((link, peer.clone()), receiver, watch, actor.clone(), stopped));
        let machine = Link::new(now, peer.clone(), self.config.clone());
        self.links
            .insert(link, Entry { machine, sender, _stop: stop, engine: self.caps.name, up: None });
        self.by_peer.insert(peer.identity.clone(), link);
        let (lanes, receiver) = (self.config.lanes, self.config.receiver);
        self.engine.send(Command::Listen { link, peer, lanes, receiver });
        news
    }

    /// The engine's answer to `Listen`.
    pub(crate) fn local(
        &mut self,
        now: Time,
        link: LinkId,
        blob: Result<Vec<u8>, Error>,
    ) -> Vec<News> {
        let event = match blob.and_then(|blob| self.offers(blob)) {
            Ok(offers) => Event::Local(offers),
            Err(e) => Event::Bye(e.to_refusal()),
        };
        self.handle(now, link, event)
    }

    /// What a peer may choose from: engine `auto` can be had as a whole, and by its parts, for a peer
    /// that has only one of them.
    fn offers(&self, blob: Vec<u8>) -> Result<Vec<EngineChoice>, Error> {
        let parts = if self.caps.name == auto::NAME { auto::decode(&blob)? } else { Vec::new() };
        let whole = Part { name: self.caps.name.to_string(), blob };
        let all = std::iter::once(whole).chain(parts);
        let path = self.caps.path;
        // The peer's engine writes the pages of a receiver itself, so it has to know where.
        let maps: &[Arc<PoolMap>] = match path {
            DataPath::OneSided if self.config.receiver => &self.maps,
            _ => &[],
        };
        let maps: Vec<PoolMap> = maps.iter().map(|map| PoolMap::clone(map)).collect();
        Ok(all
            .map(|Part { name, blob }| EngineChoice { name, path, blob, maps: maps.clone() })
            .collect())
    }

    /// The engine has words for the peer's. They leave at once, so before whatever the rooms say
    /// because of later events.
    pub(crate) fn tell(&mut self, now: Time, link: LinkId, message: Vec<u8>) -> Vec<News> {
        if message.len() > limits::ENGINE_MESSAGE_BYTES_MAX {
            // Lost words would leave the two engines with different ideas of their lanes.
            let why = Error::new(ErrorKind::Internal, "the engine says too much at once")
                .with("bytes", message.len())
                .with("limit", limits::ENGINE_MESSAGE_BYTES_MAX);
            return self.handle(now, link, Event::Bye(why.to_refusal()));
        }
        self.handle(now, link, Event::Tell(message))
    }

    /// The link's lanes are of this engine.
    pub(crate) fn chosen(&mut self, link: LinkId, engine: &'static str) {
        if let Some(entry) = self.links.get_mut(&link) {
            entry.engine = engine;
        }
    }

    /// Sends a message of the rooms.
    pub(crate) fn send(&mut self, now: Time, link: LinkId, msg: PeerMsg) -> Vec<News> {
        let Some(entry) = self.links.get_mut(&link) else { return Vec::new() };
        entry.machine.send(now, msg);
        self.drive(now, link)
    }

    pub(crate) fn handle(&mut self, now: Time, link: LinkId, event: Event) -> Vec<News> {
        let Some(entry) = self.links.get_mut(&link) else { return Vec::new() };
        entry.machine.handle_event(now, event);
        self.drive(now, link)
    }

    pub(crate) fn timeout(&mut self, now: Time) -> Vec<News> {
        let due: Vec<LinkId> = self
            .links
            .iter()
            .filter(|(_, l)| l.machine.poll_timeout().is_some_and(|t| t <= now))
            .map(|(&id, _)| id)
            .collect();
        let mut news = Vec::new();
        for link in due {
            if let Some(entry) = self.links.get_mut(&link) {
                entry.machine.handle_timeout(now);
            }
            news.extend(self.drive(now, link));
        }
        news
    }

    pub(crate) fn stood_still(&mut self, now: Time) {
        for link in self.links.values_mut() {
            link.machine.stood_still(now);
        }
    }

    pub(crate) fn next_timeout(&self) -> Option<Time> {
        self.links.values().filter_map(|l| l.machine.poll_timeout()).min()
    }

    /// Says goodbye to everybody.
    pub(crate) fn bye(&mut self, now: Time, why: &Refusal) {
        for link in self.links.keys().copied().collect::<Vec<_>>() {
            self.handle(now, link, Event::Bye(why.clone()));
        }
    }

    fn drive(&mut self, now: Time, link: LinkId) -> Vec<News> {
        let mut news = Vec::new();
        while let Some(entry) = self.links.get_mut(&link) {
            let Some(output) = entry.machine.poll_output() else { break };
            match output {
                Output::Send(frame) => {
                    if let Err(e) = entry.sender.try_send(&frame) {
                        metrics::counter!("kvlane_link_send_failures_total").increment(1);
                        entry.machine.handle_event(now, Event::Closed(e.to_refusal()));
                    }
                }
                Output::Told(message) => {
                    if let Err(e) = self.engine.tell(link, message) {
                        entry.machine.handle_event(now, Event::Bye(e.to_refusal()));
                    }
                }
                Output::Connect { engine, remote } => {
                    let part = self.caps.name == auto::NAME && engine != auto::NAME;
                    let remote = match part {
                        true => auto::encode(&[Part { name: engine, blob: remote }]),
                        false => remote,
                    };
                    self.engine.send(Command::Connect { link, remote });
                }
                Output::Up { path, lanes, down, part_bytes, share, pools, maps, since } => {
                    let engine = entry.engine;
                    entry.up = Some(engine);
                    let peer = entry.machine.peer().clone();
                    let up = usize::from(lanes) - down.len();
                    tracing::info!(%peer, %engine, lanes, up, part_bytes, "link is up");
                    if let Some((_, why)) = down.last() {
                        tracing::warn!(%peer, lanes, up, %why, "a link is up without all its lanes");
                    }
                    metrics::gauge!("kvlane_links", "engine" => engine).increment(1);
                    news.push(News::Up {
                        link,
                        peer,
                        path,
                        lanes,
                        down,
                        part_bytes,
                        share,
                        pools,
                        maps,
                        since,
                    });
                }
                Output::Deliver { msg, echo_sent } => {
                    news.push(News::Deliver { link, msg, echo_sent });
                }
                Output::Lost(why) => {
                    let peer = entry.machine.peer().clone();
                    let was_up = entry.up.is_some();
                    if let Some(left_out) = self.told.turn(now) {
                        tracing::warn!(%peer, %why, left_out, "link is lost");
                    }
                    if let Some(engine) = entry.up {
                        metrics::gauge!("kvlane_links", "engine" => engine).decrement(1);
                    }
                    metrics::counter!("kvlane_links_lost_total", "why" => why.kind.code())
                        .increment(1);
                    metrics::counter!("kvlane_engine_messages_unheard_total")
                        .increment(entry.machine.unheard());
                    self.links.remove(&link);
                    if self.by_peer.get(&peer.identity) == Some(&link) {
                        self.by_peer.remove(&peer.identity);
                    }
                    news.push(News::Lost { link, peer, was_up, why });
                    break;
                }
            }
        }
        news
    }

    /// Closes a lost link at the engine; after the rooms have asked for their fences.
    pub(crate) fn close_engine(&self, link: LinkId) {
        self.engine.send(Command::Close { link });
    }
}

/// Brings frames to the actor one at a time: a peer that sends faster than the actor works is
/// stopped by its own connection's window.
async fn read<A>(
    (link, peer): (LinkId, WorkerKey),
    mut frames: FrameReceiver<PeerFrame>,
    mut watch: Watch,
    actor: Addr<A>,
    mut stopped: tokio::sync::oneshot::Receiver<()>,
) where
    A: Actor<Context = Context<A>> + Handler<LinkIn>,
{
    let mut noticed = false;
    loop {
        let event = tokio::select! {
            biased;
            // What was queued is flushed by the session's own writer.
            _ = &mut stopped => return,
            frame = frames.recv() => match frame {
                Ok(Some(frame)) => Event::Frame(frame),
                Ok(None) => Event::Closed(Refusal::new(ErrorKind::PeerLost, "the peer closed the session")),
                Err(e) if e.kind() == ErrorKind::PeerLost => {
                    let again = "place the request again; a restarted worker is a new one";
                    Event::Closed(e.with("peer", &peer).hint(again).to_refusal())
                }
                Err(e) => Event::Closed(e.with("peer", &peer).to_refusal()),
            },
            death = watch.died(), if !noticed => match death {
                Death::Notice => {
                    noticed = true;
                    Event::Suspect("the idle connection has ended".into())
                }
                Death::Closed { why, .. } => Event::Closed(why),
            },
        };
        let over = matches!(event, Event::Closed(_));
        if actor.send(LinkIn { link, event }).await.is_err() || over {
            return;
        }
    }
}
