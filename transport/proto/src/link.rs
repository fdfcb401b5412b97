//! Two workers: from a greeted session to lanes that carry pages, and whether the other still lives.
//!
//! One machine for each session, the same on both sides; decode dials and receives. Owns: what each
//! side described, the choice of engine, the numbers that leases count by, heartbeats. In: frames,
//! the engine's answers and words, the death notice, time. Out: [`Output`].
//!
//! Invariants: rooms start only when both sides have said `Ready`, which says that a lane is up and
//! the others were lost, or waited for [`LinkConfig::lanes_ms`]; layouts are compared before any
//! lane is made; a lease never counts from later than the send of the frame it echoes; silence of
//! [`LinkConfig::misses`] heartbeats, or a death notice that a probe confirms, ends the link; what
//! one engine tells the other comes out in the order of the frames, among the messages of the rooms.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::error::{Blame, Error, ErrorKind, Refusal, Result};
use crate::ids::{LaneId, WorkerKey};
use crate::layout::{Layout, PoolMap};
use crate::limits;
use crate::msg::peer::{DataPath, EngineOffer, LinkInfo, PeerFrame, PeerMsg};
use crate::plan::Share;
use crate::time::Time;

/// An engine that this side could use.
#[derive(Clone, Debug)]
pub struct EngineChoice {
    /// Its name.
    pub name: String,
    /// Who moves the bytes.
    pub path: DataPath,
    /// What the peer's engine needs to connect.
    pub blob: Vec<u8>,
    /// Where the pages of each pool are, on a receiver that the sender's engine writes to.
    pub maps: Vec<PoolMap>,
}

/// What may be configured.
#[derive(Clone, Debug)]
pub struct LinkConfig {
    /// This side's pools.
    pub pools: Arc<[Layout]>,
    /// Lanes to pool.
    pub lanes: u16,
    /// Aim for the size of a part; the decode's word counts.
    pub part_bytes: u64,
    /// This side receives pages (decode, which has dialled).
    pub receiver: bool,
    /// What counts as one missed heartbeat; beats go out twice as often.
    pub heartbeat_ms: u64,
    /// Heartbeats that may be missed.
    pub misses: u32,
    /// How long a suspected peer has to answer.
    pub probe_ms: u64,
    /// How long it may take until rooms can start.
    pub handshake_ms: u64,
    /// How long it waits for the last lanes when one is up.
    pub lanes_ms: u64,
}

impl LinkConfig {
    /// The defaults.
    pub fn new(pools: Arc<[Layout]>, receiver: bool) -> Self {
        Self {
            pools,
            receiver,
            lanes: limits::LANES_PER_LINK,
            part_bytes: limits::PART_BYTES,
            heartbeat_ms: limits::HEARTBEAT_MS,
            misses: limits::HEARTBEAT_MISSES,
            probe_ms: limits::PROBE_MS,
            handshake_ms: limits::HANDSHAKE_MS,
            lanes_ms: limits::LANE_WAIT_MS,
        }
    }
}

/// What happens to a link.
#[derive(Debug)]
pub enum Event {
    /// This side's engines are ready for the peer, best first.
    Local(Vec<EngineChoice>),
    /// A frame arrived.
    Frame(PeerFrame),
    /// The engine: a lane carries pages.
    LaneUp(LaneId),
    /// The engine: a lane does not.
    LaneDown(LaneId, Refusal),
    /// The engine has something to say to the peer's.
    Tell(Vec<u8>),
    /// The death notice came; it may be a mistake.
    Suspect(String),
    /// The session has ended.
    Closed(Refusal),
    /// This side ends the link.
    Bye(Refusal),
}

/// What is to be done, in this order.
#[derive(Debug)]
pub enum Output {
    /// Send a frame.
    Send(PeerFrame),
    /// Both sides agreed: connect this engine to the peer's.
    Connect {
        /// Its name.
        engine: String,
        /// The peer's blob.
        remote: Vec<u8>,
    },
    /// What the peer's engine said, for this side's.
    Told(Vec<u8>),
    /// Rooms may start.
    Up {
        /// Who moves the bytes.
        path: DataPath,
        /// Lanes of the pool.
        lanes: u16,
        /// Those that are not up, each with the reason.
        down: Vec<(LaneId, Refusal)>,
        /// Size of a part.
        part_bytes: u64,
        /// What the prefill's rank has for the decode's.
        share: Arc<Share>,
        /// The peer's pools.
        pools: Arc<[Layout]>,
        /// Where the pages of each are, if this side's engine writes them itself.
        maps: Arc<[Arc<PoolMap>]>,
        /// When the last of the lanes came up.
        since: Time,
    },
    /// A message for the rooms.
    Deliver {
        /// The message.
        msg: PeerMsg,
        /// When this side sent the frame that it echoes.
        echo_sent: Time,
    },
    /// The link is over. Always the last output, once.
    Lost(Refusal),
}

/// What the engine has said of a lane.
#[derive(Clone, Debug)]
enum Lane {
    Silent,
    Up,
    Down(Refusal),
}

impl Lane {
    fn is_up(&self) -> bool {
        matches!(self, Self::Up)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Waits for the local engine and the peer's description.
    Describing,
    /// Waits for lanes, until then for all, and the peer's `Ready`.
    Connecting {
        all_until: Time,
    },
    Up,
    Over,
}

/// The machine.
#[derive(Debug)]
pub struct Link {
    config: LinkConfig,
    peer: WorkerKey,
    phase: Phase,
    local: Option<Vec<EngineChoice>>,
    remote: Option<LinkInfo>,
    chosen: Option<Chosen>,
    share: Option<Arc<Share>>,
    lanes: Vec<Lane>,
    /// When the last one came up.
    since: Time,
    /// Why the last one that went down did.
    last_loss: Option<Refusal>,
    part_bytes: u64,
    said_ready: bool,
    peer_ready: bool,
    seq: u64,
    seen: u64,
    /// When frames were sent, thinned: (seq, time), oldest first.
    sent: VecDeque<(u64, Time)>,
    last_sent: Time,
    last_seen: Time,
    opened: Time,
    probing_until: Option<Time>,
    /// Words of the peer's engine that came when no engine here was to hear them.
    unheard: u64,
    out: VecDeque<Output>,
}

/// The engine that both sides agreed on.
#[derive(Debug)]
struct Chosen {
    path: DataPath,
    /// The receiver's, if this side's engine writes its pages.
    maps: Arc<[Arc<PoolMap>]>,
}

/// Distance of two remembered sends; a lease may be counted short by this much.
const SENT_EVERY_MS: u64 = 25;
/// Remembered sends: a minute's, less what engines say, each word of which is one. A frame that echoes
/// a forgotten one counts from the opening of the session: it renews no lease and its offer is older
/// than the lanes, until the peer repeats it when it has seen more.
const SENT_MAX: usize = 2400;

impl Link {
    /// A session whose greeting is done.
    pub fn new(now: Time, peer: WorkerKey, config: LinkConfig) -> Self {
        Self {
            lanes: vec![Lane::Silent; usize::from(config.lanes)],
            since: now,
            last_loss: None,
            part_bytes: config.part_bytes,
            config,
            peer,
            phase: Phase::Describing,
            local: None,
            remote: None,
            chosen: None,
            share: None,
            said_ready: false,
            peer_ready: false,
            seq: 0,
            seen: 0,
            sent: VecDeque::new(),
            last_sent: now,
            last_seen: now,
            opened: now,
            probing_until: None,
            unheard: 0,
            out: VecDeque::new(),
        }
    }

    /// Who is at the other end.
    pub fn peer(&self) -> &WorkerKey {
        &self.peer
    }
    /// Words of the peer's engine that were dropped: it spoke before both sides had agreed.
    pub fn unheard(&self) -> u64 {
        self.unheard
    }
    /// Whether rooms may run.
    pub fn is_up(&self) -> bool {
        self.phase == Phase::Up
    }
    /// The next thing to do; call until it is `None` after every event and timeout.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.out.pop_front()
    }
    /// When to call [`Link::handle_timeout`] next; ask again after every event.
    pub fn poll_timeout(&self) -> Option<Time> {
        if self.phase == Phase::Over {
            return None;
        }
        let mut next = self.silent_at().min(self.beat_at());
        if let Some(until) = self.probing_until {
            next = next.min(until);
        }
        if self.phase != Phase::Up {
            next = next.min(self.opened.plus_ms(self.config.handshake_ms));
        }
        if let Phase::Connecting { all_until } = self.phase
            && !self.said_ready
            && self.lanes.iter().any(Lane::is_up)
        {
            next = next.min(all_until);
        }
        Some(next)
    }
    // Twice as often as promised, so that one late beat is no miss.
    fn beat_at(&self) -> Time {
        self.last_sent.plus_ms(self.config.heartbeat_ms / 2)
    }
    fn silent_at(&self) -> Time {
        self.last_seen.plus_ms(self.config.heartbeat_ms * u64::from(self.config.misses))
    }

    /// Sends a message of the rooms.
    pub fn send(&mut self, now: Time, msg: PeerMsg) {
        if self.phase == Phase::Over {
            return;
        }
        self.seq += 1;
        self.last_sent = now;
        // What is said of lanes is remembered exactly: offers that echo it are newer than the lanes.
        let exact = matches!(msg, PeerMsg::Engine(_) | PeerMsg::Ready);
        if exact || self.sent.back().is_none_or(|(_, at)| now >= at.plus_ms(SENT_EVERY_MS)) {
            self.sent.push_back((self.seq, now));
            if self.sent.len() > SENT_MAX {
                self.sent.pop_front();
            }
        }
        self.out.push_back(Output::Send(PeerFrame { seq: self.seq, echo: self.seen, msg }));
    }

    /// When the frame with this number was sent, or earlier.
    fn sent_at(&self, echo: u64) -> Time {
        let after = self.sent.partition_point(|(seq, _)| *seq <= echo);
        match after.checked_sub(1).and_then(|i| self.sent.get(i)) {
            Some(&(_, at)) => at,
            // Older than anything remembered.
            None => self.opened,
        }
    }

    /// Takes one event.
    pub fn handle_event(&mut self, now: Time, event: Event) {
        if self.phase == Phase::Over {
            return;
        }
        match event {
            Event::Local(engines) => {
                self.local = Some(engines);
                // The receiver describes itself first, so that the sender chooses.
                if self.config.receiver {
                    self.describe(now, None);
                }
                self.agree(now);
            }
            Event::Frame(frame) => self.frame(now, frame),
            Event::LaneUp(lane) => {
                if let Some(lane) = self.lanes.get_mut(usize::from(lane.0)) {
                    *lane = Lane::Up;
                }
                self.since = now;
                self.ready(now);
            }
            Event::LaneDown(lane, why) => {
                if let Some(lane) = self.lanes.get_mut(usize::from(lane.0)) {
                    *lane = Lane::Down(why.clone());
                }
                self.last_loss = Some(why);
                self.ready(now);
            }
            Event::Tell(message) => self.send(now, PeerMsg::Engine(message)),
            Event::Suspect(_) if self.probing_until.is_some() => {}
            Event::Suspect(_) => {
                self.probing_until = Some(now.plus_ms(self.config.probe_ms));
                self.send(now, PeerMsg::Probe);
            }
            Event::Closed(why) => self.lost(self.charged(why)),
            Event::Bye(why) => {
                self.send(now, PeerMsg::Bye(why.clone()));
                self.lost(why);
            }
        }
    }

    /// Does what is due. Harmless at any time.
    pub fn handle_timeout(&mut self, now: Time) {
        if self.phase == Phase::Over {
            return;
        }
        let gone = |how: &str| {
            Error::new(ErrorKind::PeerLost, how)
                .with("peer", &self.peer)
                .with("silent_ms", now.ms_since(self.last_seen))
        };
        if self.probing_until.is_some_and(|until| now >= until) {
            return self.lost(self.blamed(gone("the peer's process has ended")));
        }
        if now >= self.silent_at() {
            return self.lost(self.blamed(gone("the peer is silent")));
        }
        if self.phase != Phase::Up && now >= self.opened.plus_ms(self.config.handshake_ms) {
            let missing = match (&self.local, &self.remote) {
                (None, _) => "this side's engine",
                (_, None) => "the peer's description",
                _ if !self.said_ready => "lanes",
                _ => "the peer's ready",
            };
            let why = Error::new(ErrorKind::DeadlineExceeded, "the link did not come up")
                .with("peer", &self.peer)
                .with("missing", missing)
                .with("lanes_up", self.lanes.iter().filter(|l| l.is_up()).count())
                .with("lanes", self.lanes.len());
            let why = self.last_loss.iter().fold(why, |e, lost| e.with("last_loss", lost));
            let why = why.blamed(Blame::Link).hint(match self.chosen.as_ref().map(|c| c.path) {
                Some(DataPath::OneSided) => {
                    "look at the NICs of both workers: each must be up and reach the other's"
                }
                _ => "check that the prefill worker reaches the address or socket where the decode's engine listens",
            });
            return self.handle_event(now, Event::Bye(why.to_refusal()));
        }
        self.ready(now);
        if now >= self.beat_at() {
            self.send(now, PeerMsg::Heartbeat);
        }
    }

    fn blamed(&self, e: Error) -> Refusal {
        let e = e.hint("place the request again; a restarted worker is a new one");
        self.charged(e.to_refusal())
    }

    fn peer_side(&self) -> Blame {
        if self.config.receiver { Blame::Prefill } else { Blame::Decode }
    }

    /// A session that ends without a goodbye is charged to the peer, however its end was noticed;
    /// so is one that ends because the peer broke the protocol, which is no fault of any request.
    fn charged(&self, why: Refusal) -> Refusal {
        if why.kind == ErrorKind::PeerLost {
            return why.blamed(self.peer_side());
        }
        let lost = Error::new(ErrorKind::PeerLost, "the session with the peer has ended")
            .with("peer", &self.peer)
            .with("cause", &why)
            .hint("place the request with another worker; look at this one's logs");
        lost.blamed(self.peer_side()).to_refusal()
    }

    /// This process stood still, so that the peer's frames could not be read: silence starts anew.
    pub fn stood_still(&mut self, now: Time) {
        self.last_seen = now;
        self.probing_until = None;
    }

    fn lost(&mut self, why: Refusal) {
        self.phase = Phase::Over;
        self.out.push_back(Output::Lost(why));
    }

    fn frame(&mut self, now: Time, frame: PeerFrame) {
        self.last_seen = self.last_seen.max(now);
        self.probing_until = None;
        self.seen = self.seen.max(frame.seq);
        let echo_sent = self.sent_at(frame.echo);
        match frame.msg {
            PeerMsg::Heartbeat => {}
            PeerMsg::Probe => self.send(now, PeerMsg::Heartbeat),
            PeerMsg::Bye(why) => self.lost(why.said_by(self.peer_side())),
            PeerMsg::Describe(info) => {
                if self.remote.is_some() {
                    return;
                }
                if let Err(e) = info.check() {
                    return self.handle_event(now, Event::Bye(e.to_refusal()));
                }
                self.remote = Some(*info);
                self.agree(now);
            }
            PeerMsg::Ready => {
                self.peer_ready = true;
                self.ready(now);
            }
            // Lanes are made by these, so they are heard before rooms are.
            PeerMsg::Engine(message) => match self.phase {
                Phase::Connecting { .. } | Phase::Up => self.out.push_back(Output::Told(message)),
                Phase::Describing | Phase::Over => self.unheard += 1,
            },
            msg if self.phase == Phase::Up => {
                self.out.push_back(Output::Deliver { msg, echo_sent })
            }
            // Rooms before `Ready` on this side: the peer is ahead by a frame or two; what it
            // repeats until answered will be heard then.
            _ => {}
        }
    }

    fn describe(&mut self, now: Time, only: Option<&EngineChoice>) {
        let engines = match only {
            Some(e) => std::slice::from_ref(e),
            None => self.local.as_deref().unwrap_or_default(),
        };
        let offer = |e: &EngineChoice| EngineOffer {
            name: e.name.clone(),
            blob: e.blob.clone(),
            maps: e.maps.clone(),
        };
        let info = LinkInfo {
            pools: self.config.pools.to_vec(),
            engines: engines.iter().map(offer).collect(),
            lanes: self.config.lanes,
            part_bytes: self.part_bytes,
        };
        self.send(now, PeerMsg::Describe(Box::new(info)));
    }

    /// Both descriptions are here: compare, choose, connect.
    fn agree(&mut self, now: Time) {
        if self.phase != Phase::Describing {
            return;
        }
        let (Some(local), Some(remote)) = (&self.local, &self.remote) else { return };
        match self.choose(local, remote) {
            Ok((mine, theirs, share)) => {
                self.share = Some(Arc::new(share));
                let lanes = self.config.lanes.min(remote.lanes);
                if self.config.receiver {
                    self.part_bytes = self.config.part_bytes;
                } else {
                    self.part_bytes = remote.part_bytes;
                    self.config.lanes = lanes;
                    self.describe(now, Some(&mine));
                }
                self.lanes.resize(usize::from(lanes), Lane::Silent);
                let all_until = now.plus_ms(self.config.lanes_ms);
                self.phase = Phase::Connecting { all_until };
                let maps = match writes_itself(&mine, self.config.receiver) {
                    true => theirs.maps.into_iter().map(Arc::new).collect(),
                    false => [].into(),
                };
                self.chosen = Some(Chosen { path: mine.path, maps });
                self.out.push_back(Output::Connect { engine: mine.name, remote: theirs.blob });
                self.ready(now);
            }
            Err(e) => self.handle_event(now, Event::Bye(e.to_refusal())),
        }
    }

    fn choose(
        &self,
        local: &[EngineChoice],
        remote: &LinkInfo,
    ) -> Result<(EngineChoice, EngineOffer, Share)> {
        let share = self.share(&remote.pools).map_err(|e| e.with("peer", &self.peer))?;
        if share.is_empty() {
            let place = |pools: &[Layout]| pools.first().map_or(String::new(), Layout::place);
            return Err(Error::new(ErrorKind::Incompatible, "the prefill's rank has nothing for the decode's")
                .with("ours", place(&self.config.pools))
                .with("theirs", place(&remote.pools))
                .with("peer", &self.peer)
                .hint("link only the ranks that share layers and heads; of ranks with the same heads, one sends"));
        }
        for theirs in &remote.engines {
            if let Some(mine) = local.iter().find(|m| m.name == theirs.name) {
                if writes_itself(mine, self.config.receiver) {
                    check_maps(theirs, &remote.pools).map_err(|e| e.with("peer", &self.peer))?;
                }
                return Ok((mine.clone(), theirs.clone(), share));
            }
        }
        let names = |list: Vec<&str>| list.join(", ");
        Err(Error::new(ErrorKind::Incompatible, "no engine in common")
            .with("ours", names(local.iter().map(|e| e.name.as_str()).collect()))
            .with("theirs", names(remote.engines.iter().map(|e| e.name.as_str()).collect()))
            .with("peer", &self.peer)
            .hint("start both workers with one engine that both machines have"))
    }

    fn ready(&mut self, now: Time) {
        let Phase::Connecting { all_until } = self.phase else { return };
        let waits = now < all_until && self.lanes.iter().any(|l| matches!(l, Lane::Silent));
        if waits || !self.lanes.iter().any(Lane::is_up) {
            return;
        }
        if !self.said_ready {
            self.said_ready = true;
            self.send(now, PeerMsg::Ready);
        }
        if let (true, Some(chosen), Some(share), Some(remote)) =
            (self.peer_ready, &self.chosen, &self.share, &self.remote)
        {
            self.phase = Phase::Up;
            self.out.push_back(Output::Up {
                path: chosen.path,
                lanes: self.lanes.len() as u16,
                down: self.lanes_down(),
                part_bytes: self.part_bytes,
                share: share.clone(),
                pools: remote.pools.as_slice().into(),
                maps: chosen.maps.clone(),
                since: self.since,
            });
        }
    }

    fn lanes_down(&self) -> Vec<(LaneId, Refusal)> {
        let each = (0..).map(LaneId).zip(&self.lanes);
        let down = each.filter_map(|(id, lane)| match lane {
            Lane::Up => None,
            Lane::Down(why) => Some((id, why.clone())),
            Lane::Silent => {
                Some((id, Refusal::new(ErrorKind::NoPath, "the lane has not come up yet")))
            }
        });
        down.collect()
    }

    /// What the prefill's rank has for the decode's.
    fn share(&self, remote: &[Layout]) -> Result<Share> {
        if self.config.receiver {
            Share::between(remote, &self.config.pools)
        } else {
            Share::between(&self.config.pools, remote)
        }
    }
}

/// This side's engine puts pages in place at the peer, by the peer's addresses.
fn writes_itself(mine: &EngineChoice, receiver: bool) -> bool {
    mine.path == DataPath::OneSided && !receiver
}

/// A receiver whose pages are written says where they are; what it says has been checked.
fn check_maps(theirs: &EngineOffer, pools: &[Layout]) -> Result<()> {
    if theirs.maps.len() != pools.len() {
        return Err(Error::new(ErrorKind::Incompatible, "the decode does not say where its pages are")
            .with("engine", &theirs.name)
            .with("maps", theirs.maps.len())
            .with("pools", pools.len())
            .hint("start both workers with builds of the same version: this engine writes the decode's pages itself"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Identity, Incarnation, Role};
    use crate::layout::{Device, Dtype, small_layout};

    fn key(role: Role) -> WorkerKey {
        let identity = Identity::new("c", role, "w", 0).unwrap();
        WorkerKey { identity, incarnation: Incarnation([1; 16]) }
    }
    fn engine(name: &str) -> EngineChoice {
        EngineChoice {
            name: name.into(),
            path: DataPath::ReceiverCopies,
            blob: vec![7],
            maps: Vec::new(),
        }
    }
    fn pair(prefill: Layout) -> (Link, Link) {
        let d =
            Link::new(Time(0), key(Role::Prefill), LinkConfig::new([small_layout()].into(), true));
        let p = Link::new(Time(0), key(Role::Decode), LinkConfig::new([prefill].into(), false));
        (d, p)
    }
    /// Moves frames until both are still; returns everything else that came out.
    fn settle(now: Time, d: &mut Link, p: &mut Link) -> (Vec<Output>, Vec<Output>) {
        let (mut from_d, mut from_p) = (Vec::new(), Vec::new());
        loop {
            let mut moved = false;
            while let Some(o) = d.poll_output() {
                moved = true;
                match o {
                    Output::Send(f) => p.handle_event(now, Event::Frame(f)),
                    o => from_d.push(o),
                }
            }
            while let Some(o) = p.poll_output() {
                moved = true;
                match o {
                    Output::Send(f) => d.handle_event(now, Event::Frame(f)),
                    o => from_p.push(o),
                }
            }
            if !moved {
                return (from_d, from_p);
            }
        }
    }
    fn up() -> (Link, Link) {
        let (mut d, mut p) = pair(small_layout());
        d.handle_event(Time(0), Event::Local(vec![engine("shm"), engine("tcp")]));
        p.handle_event(Time(0), Event::Local(vec![engine("tcp")]));
        let (a, b) = settle(Time(0), &mut d, &mut p);
        assert!(matches!(&a[..], [Output::Connect { engine, .. }] if engine == "tcp"));
        assert!(matches!(&b[..], [Output::Connect { engine, .. }] if engine == "tcp"));
        for lane in 0..limits::LANES_PER_LINK {
            d.handle_event(Time(0), Event::LaneUp(LaneId(lane)));
            p.handle_event(Time(0), Event::LaneUp(LaneId(lane)));
        }
        let (a, b) = settle(Time(0), &mut d, &mut p);
        assert!(matches!(a[..], [Output::Up { .. }]) && matches!(b[..], [Output::Up { .. }]));
        (d, p)
    }

    #[test]
    fn two_workers_agree_and_come_up() {
        up();
    }

    #[test]
    fn layouts_that_differ_end_the_link_on_both_sides_with_the_field() {
        let (mut d, mut p) = pair(Layout { dtype: Dtype::Fp8E4m3, ..small_layout() });
        d.handle_event(Time(0), Event::Local(vec![engine("tcp")]));
        p.handle_event(Time(0), Event::Local(vec![engine("tcp")]));
        let (a, b) = settle(Time(0), &mut d, &mut p);
        for out in [a, b] {
            let [Output::Lost(why)] = &out[..] else { panic!("{out:?}") };
            assert_eq!(why.kind, ErrorKind::Incompatible);
            assert!(why.text.contains("decode bf16 / prefill fp8_e4m3"), "{why}");
        }
    }

    #[test]
    fn silence_ends_a_link_after_two_heartbeats_and_not_before() {
        let (mut d, mut p) = up();
        let last = Time(0).plus_ms(999);
        d.handle_timeout(last);
        p.handle_timeout(last);
        let (a, _) = settle(last, &mut d, &mut p);
        assert!(a.is_empty(), "{a:?}");
        // Now nothing of the peer comes any more.
        d.handle_timeout(last.plus_ms(999));
        assert!(matches!(d.poll_output(), Some(Output::Send(_))));
        assert!(d.poll_output().is_none());
        d.handle_timeout(last.plus_ms(1000));
        let out: Vec<_> = std::iter::from_fn(|| d.poll_output()).collect();
        assert!(matches!(&out[..], [Output::Lost(w)] if w.kind == ErrorKind::PeerLost), "{out:?}");
        assert_eq!(d.poll_timeout(), None);
    }

    #[test]
    fn a_death_notice_is_confirmed_by_a_probe() {
        let (mut d, mut p) = up();
        d.handle_event(Time(0), Event::Suspect("eof".into()));
        settle(Time(0), &mut d, &mut p);
        d.handle_timeout(Time(0).plus_ms(51));
        assert!(d.poll_output().is_none(), "the peer answered");
        d.handle_event(Time(0), Event::Suspect("eof".into()));
        d.handle_timeout(Time(0).plus_ms(51));
        let out: Vec<_> = std::iter::from_fn(|| d.poll_output()).collect();
        assert!(matches!(&out[..], [Output::Send(_), Output::Lost(_)]), "{out:?}");
    }

    #[test]
    fn a_session_that_just_ends_is_charged_to_the_peer() {
        for (mut link, blame) in [(up().0, Blame::Prefill), (up().1, Blame::Decode)] {
            let why = Refusal::new(ErrorKind::PeerLost, "peer restarted");
            link.handle_event(Time(0), Event::Closed(why));
            let out: Vec<_> = std::iter::from_fn(|| link.poll_output()).collect();
            assert!(matches!(&out[..], [Output::Lost(w)] if w.blame == blame), "{out:?}");
        }
    }

    #[test]
    fn a_peer_that_breaks_the_protocol_is_charged_and_may_not_charge_others() {
        let (mut d, _) = up();
        let broken = Refusal::new(ErrorKind::Malformed, "bad frame");
        d.handle_event(Time(0), Event::Closed(broken));
        let Some(Output::Lost(why)) = d.poll_output() else { panic!() };
        assert_eq!((why.kind, why.blame), (ErrorKind::PeerLost, Blame::Prefill));
        assert!(why.text.contains("bad frame"), "{why}");

        let (mut d, _) = up();
        let msg = PeerMsg::Bye(Refusal::new(ErrorKind::Draining, "x").blamed(Blame::Decode));
        d.handle_event(Time(0), Event::Frame(PeerFrame { seq: 9, echo: 0, msg }));
        let Some(Output::Lost(why)) = d.poll_output() else { panic!() };
        assert_eq!((why.kind, why.blame), (ErrorKind::Draining, Blame::Prefill));
    }

    #[test]
    fn silence_starts_anew_after_this_process_stood_still() {
        let (mut d, _) = up();
        let thaw = Time(0).plus_ms(60_000);
        d.stood_still(thaw);
        d.handle_timeout(thaw);
        assert!(d.is_up());
        d.handle_timeout(thaw.plus_ms(1_000));
        assert!(!d.is_up());
    }

    #[test]
    fn a_lease_counts_from_the_send_of_the_frame_it_echoes() {
        let (mut d, mut p) = up();
        let mut sent = Vec::new();
        for ms in [1_000u64, 2_000, 3_000] {
            p.send(Time(0).plus_ms(ms), PeerMsg::Heartbeat);
            let Some(Output::Send(f)) = p.poll_output() else { panic!() };
            sent.push(f);
        }
        // The decode has seen the second one only, and answers much later.
        d.handle_event(Time(0).plus_ms(2_500), Event::Frame(sent[1].clone()));
        let room = crate::ids::RoomId(1);
        let grant = crate::ids::GrantId(1);
        d.send(Time(0).plus_ms(9_000), PeerMsg::Renew { room, grant, lease_ms: 1 });
        let Some(Output::Send(f)) = d.poll_output() else { panic!() };
        p.handle_event(Time(0).plus_ms(9_100), Event::Frame(f));
        match p.poll_output() {
            Some(Output::Deliver { echo_sent, .. }) => {
                assert_eq!(echo_sent, Time(0).plus_ms(2_000));
            }
            o => panic!("{o:?}"),
        }
    }

    fn one_sided(maps: Vec<PoolMap>) -> EngineChoice {
        EngineChoice { path: DataPath::OneSided, maps, ..engine("gpunetio") }
    }
    fn map() -> PoolMap {
        PoolMap::contiguous(Device::Host, 4096, &small_layout(), 16)
    }
    fn says(message: &[u8]) -> Event {
        let msg = PeerMsg::Engine(message.to_vec());
        Event::Frame(PeerFrame { seq: 1, echo: 0, msg })
    }

    #[test]
    fn engines_hear_each_other_from_their_choice_on_in_order_with_the_rooms() {
        let (mut d, mut p) = pair(small_layout());
        d.handle_event(Time(0), says(b"early"));
        assert_eq!(d.unheard(), 1, "no engine was to hear it");
        d.handle_event(Time(0), Event::Local(vec![one_sided(vec![map()])]));
        p.handle_event(Time(0), Event::Local(vec![one_sided(Vec::new())]));
        settle(Time(0), &mut d, &mut p);
        // Lanes are made by what the engines tell each other.
        p.handle_event(Time(0), Event::Tell(b"dial".to_vec()));
        d.handle_event(Time(0), Event::Tell(b"listen".to_vec()));
        let (a, b) = settle(Time(0), &mut d, &mut p);
        assert!(matches!(&a[..], [Output::Told(m)] if m == b"dial"), "{a:?}");
        assert!(matches!(&b[..], [Output::Told(m)] if m == b"listen"), "{b:?}");
        for lane in 0..limits::LANES_PER_LINK {
            d.handle_event(Time(0), Event::LaneUp(LaneId(lane)));
            p.handle_event(Time(0), Event::LaneUp(LaneId(lane)));
        }
        settle(Time(0), &mut d, &mut p);
        assert!(d.is_up() && p.is_up());
        let (room, grant) = (crate::ids::RoomId(1), crate::ids::GrantId(1));
        d.handle_event(Time(0), Event::Tell(vec![1]));
        d.send(Time(0), PeerMsg::Renew { room, grant, lease_ms: 1 });
        d.handle_event(Time(0), Event::Tell(vec![2]));
        let (_, b) = settle(Time(0), &mut d, &mut p);
        assert!(
            matches!(&b[..], [Output::Told(x), Output::Deliver { .. }, Output::Told(y)]
                if x == &[1] && y == &[2]),
            "{b:?}"
        );
        p.handle_event(Time(0), Event::Bye(Refusal::new(ErrorKind::Draining, "x")));
        settle(Time(0), &mut d, &mut p);
        d.handle_event(Time(0), says(b"late"));
        assert!(d.poll_output().is_none());
    }

    #[test]
    fn a_sender_that_writes_itself_is_told_where_and_nobody_else_is() {
        let (mut d, mut p) = pair(small_layout());
        d.handle_event(Time(0), Event::Local(vec![one_sided(vec![map()])]));
        p.handle_event(Time(0), Event::Local(vec![one_sided(Vec::new())]));
        settle(Time(0), &mut d, &mut p);
        for lane in 0..limits::LANES_PER_LINK {
            d.handle_event(Time(0), Event::LaneUp(LaneId(lane)));
            p.handle_event(Time(0), Event::LaneUp(LaneId(lane)));
        }
        let (a, b) = settle(Time(0), &mut d, &mut p);
        assert!(matches!(&a[..], [Output::Up { maps, .. }] if maps.is_empty()), "{a:?}");
        assert!(matches!(&b[..], [Output::Up { maps, .. }] if *maps[0] == map()), "{b:?}");
    }

    #[test]
    fn a_decode_that_does_not_say_where_its_pages_are_is_refused_on_both_sides() {
        let mut lying = map();
        lying.slab_address[1] = lying.slab_address[0];
        for (maps, want) in [
            (vec![], "maps=0"),
            (vec![map(), map()], "one map for each pool"),
            (vec![lying], "two slabs share bytes"),
        ] {
            let (mut d, mut p) = pair(small_layout());
            d.handle_event(Time(0), Event::Local(vec![one_sided(maps)]));
            p.handle_event(Time(0), Event::Local(vec![one_sided(Vec::new())]));
            let (a, b) = settle(Time(0), &mut d, &mut p);
            for out in [a, b] {
                let [Output::Lost(why)] = &out[..] else { panic!("{out:?}") };
                assert!(why.text.contains(want), "{want}: {why}");
            }
        }
    }

    #[test]
    fn a_link_says_since_when_its_lanes_are_the_ones_they_are() {
        let (mut d, mut p) = pair(small_layout());
        d.handle_event(Time(0), Event::Local(vec![engine("tcp")]));
        p.handle_event(Time(0), Event::Local(vec![engine("tcp")]));
        settle(Time(0), &mut d, &mut p);
        for lane in 0..limits::LANES_PER_LINK {
            p.handle_event(Time(1), Event::LaneUp(LaneId(lane)));
        }
        // It has said that it is ready, and loses its lanes before the other is.
        for lane in 0..limits::LANES_PER_LINK {
            p.handle_event(Time(2), Event::LaneDown(LaneId(lane), lost("a NIC")));
        }
        for lane in 0..limits::LANES_PER_LINK {
            d.handle_event(Time(3), Event::LaneUp(LaneId(lane)));
        }
        let (a, b) = settle(Time(3), &mut d, &mut p);
        assert!(matches!(a[..], [Output::Up { since: Time(3), .. }]), "{a:?}");
        assert!(b.is_empty(), "no lane is up: {b:?}");
        p.handle_event(Time(4), Event::LaneUp(LaneId(0)));
        let (_, b) = settle(Time(4), &mut d, &mut p);
        let [Output::Up { since: Time(4), down, .. }] = &b[..] else { panic!("{b:?}") };
        let others: Vec<_> =
            (1..limits::LANES_PER_LINK).map(|n| (LaneId(n), lost("a NIC"))).collect();
        assert_eq!(*down, others);
    }

    fn lost(what: &str) -> Refusal {
        Refusal::new(ErrorKind::NoPath, what)
    }
    /// Two sides that wait for lanes of this engine.
    fn connecting(engine: impl Fn(Vec<PoolMap>) -> EngineChoice) -> (Link, Link) {
        let (mut d, mut p) = pair(small_layout());
        d.handle_event(Time(0), Event::Local(vec![engine(vec![map()])]));
        p.handle_event(Time(0), Event::Local(vec![engine(Vec::new())]));
        settle(Time(0), &mut d, &mut p);
        (d, p)
    }

    #[test]
    fn a_link_comes_up_without_the_lanes_that_do_not() {
        let (mut d, mut p) = connecting(one_sided);
        for lane in [1, 3] {
            d.handle_event(Time(0), Event::LaneUp(LaneId(lane)));
            p.handle_event(Time(0), Event::LaneUp(LaneId(lane)));
        }
        // The sender has lost the others; nobody tells the receiver that they will not come.
        p.handle_event(Time(0), Event::LaneDown(LaneId(0), lost("nic-0")));
        p.handle_event(Time(0), Event::LaneDown(LaneId(2), lost("nic-0")));
        let (a, b) = settle(Time(0), &mut d, &mut p);
        assert!(a.is_empty() && b.is_empty(), "{a:?} {b:?}");
        // Heartbeats meanwhile keep it alive.
        let mut ups = (Vec::new(), Vec::new());
        for ms in (0..=limits::LANE_WAIT_MS).step_by(50) {
            let now = Time(0).plus_ms(ms);
            assert!(ms == 0 || !d.is_up(), "all have their time");
            d.handle_timeout(now);
            p.handle_timeout(now);
            let (a, b) = settle(now, &mut d, &mut p);
            ups.0.extend(a);
            ups.1.extend(b);
        }
        let downs = |out: &[Output]| match out {
            [Output::Up { lanes: 4, down, .. }] => down.clone(),
            _ => panic!("{out:?}"),
        };
        let silent = lost("the lane has not come up yet");
        assert_eq!(downs(&ups.0), [(LaneId(0), silent.clone()), (LaneId(2), silent)]);
        assert_eq!(downs(&ups.1), [(LaneId(0), lost("nic-0")), (LaneId(2), lost("nic-0"))]);
    }

    #[test]
    fn a_link_without_a_lane_ends_with_the_reason_and_a_hint_for_its_engine() {
        let tcp = |_| engine("tcp");
        for (nics, (mut d, mut p)) in [(true, connecting(one_sided)), (false, connecting(tcp))] {
            d.handle_event(Time(0), Event::LaneDown(LaneId(0), lost("nic-0 is lost")));
            d.handle_event(Time(0), Event::LaneUp(LaneId(1)));
            d.handle_event(Time(0), Event::LaneDown(LaneId(1), lost("nic-1 is lost")));
            let mut ends = Vec::new();
            for ms in (0..=limits::HANDSHAKE_MS).step_by(100) {
                let now = Time(0).plus_ms(ms);
                d.handle_timeout(now);
                p.handle_timeout(now);
                ends.extend(settle(now, &mut d, &mut p).0);
            }
            let [Output::Lost(why)] = &ends[..] else { panic!("{ends:?}") };
            assert!(why.text.contains("lanes_up=0") && why.text.contains("nic-1 is lost"), "{why}");
            assert_eq!((why.hint.contains("NIC"), why.hint.contains("listens")), (nics, !nics));
        }
    }

    #[test]
    fn what_an_engine_says_is_remembered_to_the_moment() {
        let (mut d, mut p) = up();
        let mut sent = Vec::new();
        for (ms, engine) in [(1_000, false), (1_003, false), (1_005, true), (1_007, false)] {
            let msg = if engine { PeerMsg::Engine(vec![1]) } else { PeerMsg::Heartbeat };
            p.send(Time(0).plus_ms(ms), msg);
            let Some(Output::Send(f)) = p.poll_output() else { panic!() };
            sent.push(f);
        }
        let (room, grant) = (crate::ids::RoomId(1), crate::ids::GrantId(1));
        for (seen, ms) in [(1, 1_000), (2, 1_005), (3, 1_005)] {
            d.handle_event(Time(0).plus_ms(1_010), Event::Frame(sent[seen].clone()));
            d.send(Time(0).plus_ms(1_010), PeerMsg::Renew { room, grant, lease_ms: 1 });
            let answer = std::iter::from_fn(|| d.poll_output()).find_map(|o| match o {
                Output::Send(f) => Some(f),
                _ => None,
            });
            p.handle_event(Time(0).plus_ms(1_020), Event::Frame(answer.unwrap()));
            let Some(Output::Deliver { echo_sent, .. }) = p.poll_output() else { panic!() };
            assert_eq!(echo_sent, Time(0).plus_ms(ms));
        }
    }
}
