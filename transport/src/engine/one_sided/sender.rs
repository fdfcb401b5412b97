//! The sending end of a lane: makes queue pairs, posts writes, reads completions.
//!
//! In: parts, at most [`limits::PARTS_IN_FLIGHT_PER_LANE`] at a time; the receiver's words. Out:
//! [`EngineEvent::Acked`] for each part whose last entry completed, or one
//! [`EngineEvent::LaneDown`] that puts all of them in doubt. Invariants: a part is posted only on the
//! queue pair that was the lane's when its grant was bound; source pages, and the word that the
//! receiver writes, are kept until their queue pair has been destroyed; there are never more
//! immediates under way than the receiver posted receives.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvlane_proto::plan::writes;
use kvlane_proto::{
    Device, Error, ErrorKind, GrantId, LaneId, LinkId, PartId, PartPages, Refusal, Result, Time,
    WorkerKey, limits,
};

use super::keys::Keys;
use super::nic::{Completion, End, Nic, Pair, Registered, Sends, What};
use super::pair::{COMPLETIONS_PER_TURN, Leaving, Scene};
use super::post::{Poster, Rest, Unknown, immediate};
use super::rail::{Access, Rail};
use super::wire::Message;
use super::{RECEIVES, tell};
use crate::engine::EngineEvent;
use crate::engine::redial::Jitter;
use crate::engine::refusals::takes;
use crate::memory::Region;
use crate::sys::share::Words;

/// How often the receiver's count is looked at, if nothing else wakes the engine: nothing announces it.
const CREDIT_LOOK_MS: u64 = 1;

/// What a lane works with while it has its turn.
pub(super) struct Turn<'a, N> {
    pub(super) now: Time,
    /// Of a ring.
    pub(super) entries: u32,
    pub(super) peer: &'a WorkerKey,
    pub(super) rail: &'a mut Rail<N>,
    /// The receiver's NIC that it is connected with; none if there is none.
    pub(super) partner: Option<u64>,
    pub(super) access: Option<&'a Access>,
    /// The receiver's memory behind this rail.
    pub(super) remote: &'a Keys,
    /// The link is over: nothing is said, and no queue pair is made.
    pub(super) over: bool,
    pub(super) jitter: &'a mut Jitter,
    pub(super) events: &'a mut Vec<EngineEvent>,
}

/// A part to be posted.
pub(super) struct Task {
    pub(super) grant: GrantId,
    pub(super) part: PartId,
    pub(super) source: PartPages,
    pub(super) destination: PartPages,
}

/// A part that entries in the ring belong to.
struct Flight {
    task: Task,
    /// Index of its last entry, without wrap.
    last: u64,
    /// It was not posted in full: nobody is told of its end.
    dropped: bool,
}

/// A part that is being posted.
struct Current {
    task: Task,
    /// Index of its first entry, without wrap.
    first: u64,
    /// Nothing more of it is posted.
    stopped: bool,
}

/// Immediates that may be under way.
struct Credit {
    /// Where the receiver writes how many it has taken.
    word: Arc<Words>,
    at: Registered,
    sent: u64,
    /// As read last.
    taken: u64,
}

impl Credit {
    /// Whether one more immediate finds a receive; an error if the count cannot be.
    fn has_one(&mut self, receives: u32) -> Result<bool> {
        if self.sent - self.taken < u64::from(receives) {
            return Ok(true);
        }
        let word = self.word.words().first();
        let taken = word.map_or(0, |word| word.load(Ordering::Acquire));
        if taken < self.taken || taken > self.sent {
            return Err(Error::new(
                ErrorKind::Malformed,
                "the receiver's count of parts cannot be",
            )
            .with("found", taken)
            .with("sent", self.sent)
            .with("before", self.taken));
        }
        self.taken = taken;
        Ok(self.sent - self.taken < u64::from(receives))
    }
}

enum State<P> {
    /// There is no queue pair until it is time to make one.
    Waiting { until: Time },
    /// The receiver was asked for its end.
    Pairing { pair: P, credit: Credit, deadline: Time },
    /// Carries parts.
    Up { pair: P, credit: Credit, end: End, receives: u32 },
    /// What was posted may still be read and land.
    Leaving { leaving: Leaving<P>, credit: Credit, held: Vec<Flight> },
    /// For good. What is held may be read by a NIC that was lost; nobody will ever know.
    Dead { held: Vec<Flight>, number: u32, _credit: Option<Credit> },
}

/// One lane of a link.
pub(super) struct Outbound<P> {
    link: LinkId,
    lane: LaneId,
    state: State<P>,
    /// Counts the queue pairs of the lane.
    epoch: u64,
    /// Queue pairs since it was last up.
    attempt: u32,
    /// This outage has been reported.
    reported: bool,
    queue: VecDeque<Task>,
    /// Partly in the ring.
    current: Option<Current>,
    /// What is left of `current`.
    rest: Rest,
    /// In the ring, in order.
    flights: VecDeque<Flight>,
    /// When the ring was empty last, or something of it completed.
    progress_at: Time,
}

impl<P: Pair> Outbound<P> {
    pub(super) fn new(link: LinkId, lane: LaneId) -> Self {
        Self {
            link,
            lane,
            state: State::Waiting { until: Time(0) },
            epoch: 0,
            attempt: 0,
            reported: false,
            queue: VecDeque::new(),
            current: None,
            rest: Rest::default(),
            flights: VecDeque::new(),
            progress_at: Time(0),
        }
    }
    /// Which queue pair the lane has, if it is up.
    pub(super) fn connection(&self) -> Option<u64> {
        matches!(self.state, State::Up { .. }).then_some(self.epoch)
    }
    /// Queues a part on a queue pair, or says why not.
    pub(super) fn post(&mut self, bound: Option<u64>, task: Task) -> Result<()> {
        let in_flight = self.queue.len() + usize::from(self.current.is_some()) + self.flights.len();
        takes(self.lane, self.connection().is_some(), in_flight)?;
        if bound != self.connection() {
            return Err(Error::new(
                ErrorKind::NoPath,
                "the lane has another queue pair than the grant was given with",
            )
            .with("lane", self.lane.0)
            .with("found", self.epoch)
            .with("expected", bound.map_or("none".to_owned(), |epoch| epoch.to_string()))
            .hint("post on another lane of the grant; the receiver gives lanes anew"));
        }
        self.queue.push_back(task);
        Ok(())
    }
    /// Posts nothing more for a grant.
    pub(super) fn stop(&mut self, grant: GrantId) {
        self.queue.retain(|task| task.grant != grant);
        if let Some(current) = self.current.as_mut().filter(|c| c.task.grant == grant) {
            current.stopped = true;
            self.rest.clear();
        }
    }
    fn held(&self) -> impl Iterator<Item = &Task> {
        let held: &[Flight] = match &self.state {
            State::Leaving { held, .. } | State::Dead { held, .. } => held,
            _ => &[],
        };
        let current = self.current.iter().map(|current| &current.task);
        held.iter().chain(&self.flights).map(|f| &f.task).chain(current)
    }
    /// Whether entries of a grant may still be read or land.
    pub(super) fn holds(&self, grant: GrantId) -> bool {
        self.held().any(|task| task.grant == grant)
    }
    /// The queue pair with which that can never end.
    pub(super) fn holds_for_ever(&self) -> Option<u32> {
        match &self.state {
            State::Dead { held, number, .. } if !held.is_empty() => Some(*number),
            _ => None,
        }
    }
    /// A grant with pages in `region` that may still be read.
    pub(super) fn uses(&self, region: &Region) -> Option<GrantId> {
        let lies = |pages: &PartPages| {
            let device = pages.device();
            pages.iter().any(|page| region.contains(device, page.address, page.bytes.into()))
        };
        self.queue.iter().chain(self.held()).find(|task| lies(&task.source)).map(|t| t.grant)
    }
    /// Whether it has no queue pair, and will have none if its link is over.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.state, State::Waiting { .. } | State::Dead { .. })
    }
    /// Whether it is worth a look in every turn.
    pub(super) fn is_busy(&self) -> bool {
        match &self.state {
            State::Up { .. } => {
                !self.flights.is_empty() || self.current.is_some() || !self.queue.is_empty()
            }
            State::Waiting { .. } | State::Pairing { .. } | State::Leaving { .. } => true,
            State::Dead { .. } => false,
        }
    }

    /// Gives the queue pair up; posts are in doubt. Another is made after a wait.
    pub(super) fn down(
        &mut self,
        turn: &mut Turn<'_, impl Nic<Pair = P>>,
        why: &Refusal,
        say: bool,
    ) {
        let state = std::mem::replace(&mut self.state, State::Waiting { until: turn.now });
        let (pair, credit) = match state {
            State::Pairing { pair, credit, .. } | State::Up { pair, credit, .. } => (pair, credit),
            other => return self.state = other,
        };
        if say && !turn.over {
            let (lane, epoch, why) = (self.lane.0, self.epoch, why.to_string());
            tell(turn.events, self.link, &Message::Broken { lane, epoch, why });
        }
        self.report(turn, why);
        let (held, number) = (self.let_go(), pair.end().number);
        self.state = match Leaving::begin(turn.now, &mut turn.rail.hca, pair) {
            Ok(leaving) => State::Leaving { leaving, credit, held },
            Err(lost) => self.dead(turn, lost, (held, number), credit),
        };
    }
    /// The NIC is lost, or the peer does not have it.
    pub(super) fn die(&mut self, turn: &mut Turn<'_, impl Nic<Pair = P>>, why: &Refusal) {
        // What completed before is not in doubt.
        while matches!(self.complete(turn), Ok(true)) {}
        self.report(turn, why);
        let mut held = self.let_go();
        let state = std::mem::replace(&mut self.state, State::Waiting { until: turn.now });
        let hca = &mut turn.rail.hca;
        let (number, credit) = match state {
            State::Pairing { pair, credit, .. } | State::Up { pair, credit, .. } => {
                let number = pair.end().number;
                // Its memory is kept where the NIC may still use it.
                hca.destroy(pair);
                (number, Some(credit))
            }
            State::Leaving { leaving, credit, held: more } => {
                let number = leaving.number();
                leaving.lose(hca);
                held.extend(more);
                (number, Some(credit))
            }
            State::Waiting { .. } => (0, None),
            dead @ State::Dead { .. } => return self.state = dead,
        };
        self.state = State::Dead { held, number, _credit: credit };
    }
    fn dead(
        &mut self,
        turn: &mut Turn<'_, impl Nic<Pair = P>>,
        why: Refusal,
        (held, number): (Vec<Flight>, u32),
        credit: Credit,
    ) -> State<P> {
        turn.events.push(EngineEvent::Trouble(Error::from(why).with("lane", self.lane.0)));
        State::Dead { held, number, _credit: Some(credit) }
    }
    /// Once an outage is enough.
    fn report(&mut self, turn: &mut Turn<'_, impl Nic<Pair = P>>, why: &Refusal) {
        self.attempt += 1;
        if !std::mem::replace(&mut self.reported, true) && !turn.over {
            metrics::counter!("kvlane_one_sided_lanes_down_total").increment(1);
            let (link, lane, why) = (self.link, self.lane, why.clone());
            turn.events.push(EngineEvent::LaneDown { link, lane, why });
        }
    }
    /// Forgets posts; gives those that entries in the ring belong to.
    fn let_go(&mut self) -> Vec<Flight> {
        self.queue.clear();
        self.rest.clear();
        let current = self.current.take();
        let current = current.map(|c| Flight { task: c.task, last: 0, dropped: true });
        self.flights.drain(..).chain(current).collect()
    }

    /// The receiver has made its end.
    pub(super) fn paired(
        &mut self,
        turn: &mut Turn<'_, impl Nic<Pair = P>>,
        epoch: u64,
        end: End,
        receives: u32,
    ) {
        if epoch != self.epoch || !matches!(self.state, State::Pairing { .. }) {
            return stale("paired");
        }
        if let State::Pairing { pair, .. } = &mut self.state
            && let Err(e) = turn.rail.hca.connect(pair, end)
        {
            return self.down(turn, &e.to_refusal(), true);
        }
        let state = std::mem::replace(&mut self.state, State::Waiting { until: turn.now });
        if let State::Pairing { pair, credit, .. } = state {
            self.state = State::Up { pair, credit, end, receives };
        }
        (self.attempt, self.reported) = (0, false);
        metrics::counter!("kvlane_one_sided_lanes_up_total").increment(1);
        tell(turn.events, self.link, &Message::Up { lane: self.lane.0, epoch });
        turn.events.push(EngineEvent::LaneUp { link: self.link, lane: self.lane });
    }
    /// The receiver's end is gone.
    pub(super) fn broken(
        &mut self,
        turn: &mut Turn<'_, impl Nic<Pair = P>>,
        epoch: u64,
        why: &str,
    ) {
        if epoch != self.epoch {
            return stale("broken");
        }
        // What completed before is not in doubt.
        let first = self.complete(turn).err();
        let why = first.unwrap_or_else(|| {
            Error::new(ErrorKind::NoPath, "the receiver gave its end of the lane up")
                .with("peer", turn.peer)
                .with("nic", &turn.rail.hca.about().name)
                .with("why", why)
                .to_refusal()
        });
        self.down(turn, &why, false);
    }

    /// One turn; says whether anything moved.
    pub(super) fn poll(&mut self, turn: &mut Turn<'_, impl Nic<Pair = P>>) -> bool {
        let moved = match &mut self.state {
            State::Waiting { until } if turn.over || turn.now < *until => return false,
            State::Waiting { .. } if turn.access.is_none() => {
                let why = turn.rail.hca.lost().to_refusal();
                self.die(turn, &why);
                return true;
            }
            State::Waiting { .. } => self.pair(turn),
            State::Pairing { deadline, .. } if turn.now < *deadline => return false,
            State::Pairing { .. } => Err(Error::new(
                ErrorKind::DeadlineExceeded,
                "the receiver did not make its end of the lane in time",
            )
            .with("peer", turn.peer)
            .with("limit_ms", limits::HANDSHAKE_MS)
            .to_refusal()),
            State::Up { .. } => self.carry(turn),
            State::Leaving { .. } => return self.leave(turn),
            State::Dead { .. } => return false,
        };
        moved.unwrap_or_else(|why| {
            self.down(turn, &why, true);
            true
        })
    }
    /// Ready to sleep: when to look again, unless an event comes.
    pub(super) fn park(&mut self, now: Time, over: bool) -> Option<Time> {
        let waits = self.current.is_some() || !self.queue.is_empty();
        match &mut self.state {
            State::Waiting { until } => (!over).then_some(*until),
            State::Pairing { deadline, .. } => Some(*deadline),
            State::Up { pair, .. } => {
                pair.arm();
                let full = pair.sends().free() == 0;
                if pair.is_ready() {
                    Some(Time(0))
                } else if waits && !full {
                    Some(now.plus_ms(CREDIT_LOOK_MS))
                } else {
                    let posted = waits || !self.flights.is_empty();
                    posted.then(|| self.progress_at.plus_ms(limits::COMPLETION_MS))
                }
            }
            State::Leaving { leaving, .. } => leaving.park(),
            State::Dead { .. } => None,
        }
    }

    /// Makes a queue pair and asks for the other end.
    fn pair(&mut self, turn: &mut Turn<'_, impl Nic<Pair = P>>) -> Result<bool, Refusal> {
        match self.make(turn) {
            Ok((pair, credit)) => {
                self.epoch += 1;
                let message = Message::Pair {
                    lane: self.lane.0,
                    epoch: self.epoch,
                    guid: turn.partner.unwrap_or_default(),
                    end: pair.end(),
                    credit: (credit.at.address, credit.at.remote),
                };
                tracing::debug!(lane = self.lane.0, epoch = self.epoch, end = ?pair.end(), "offers a queue pair");
                tell(turn.events, self.link, &message);
                let deadline = turn.now.plus_ms(limits::HANDSHAKE_MS);
                self.state = State::Pairing { pair, credit, deadline };
            }
            Err(e) => {
                let e = turn.rail.hca.named(e).with("lane", self.lane.0);
                let why = e.to_refusal();
                // Once an outage, also if its first reason was told.
                if self.reported && self.attempt == 1 {
                    turn.events.push(EngineEvent::Trouble(e));
                }
                self.report(turn, &why);
                self.wait(turn);
            }
        }
        Ok(true)
    }
    fn make(&self, turn: &mut Turn<'_, impl Nic<Pair = P>>) -> Result<(P, Credit)> {
        let Some(access) = turn.access else { return Err(turn.rail.hca.lost()) };
        let hca = &mut turn.rail.hca;
        let word = Arc::new(Words::new(1, false).map_err(|e| {
            Error::new(ErrorKind::Memory, "no shared memory for a lane's credit").caused_by(e)
        })?);
        let at = hca.register_words(access.domain, &word)?;
        match hca.queue_pair(access.domain, turn.entries, RECEIVES) {
            Ok(pair) => Ok((pair, Credit { word, at, sent: 0, taken: 0 })),
            Err(e) => {
                let _ = hca.deregister(at.local);
                Err(e)
            }
        }
    }
    fn wait(&mut self, turn: &mut Turn<'_, impl Nic<Pair = P>>) {
        let until = turn.now + turn.jitter.wait(self.attempt.max(1));
        self.state = State::Waiting { until };
    }
    /// Waits until nothing can land; then the lane may have a new queue pair.
    fn leave(&mut self, turn: &mut Turn<'_, impl Nic<Pair = P>>) -> bool {
        let State::Leaving { leaving, .. } = &mut self.state else { return false };
        turn.events.extend(leaving.late(turn.now, &turn.rail.hca).map(EngineEvent::Trouble));
        if !leaving.is_flushed(|_| {}) {
            return false;
        }
        let state = std::mem::replace(&mut self.state, State::Waiting { until: turn.now });
        let State::Leaving { leaving, credit, held } = state else { return false };
        let (hca, number) = (&mut turn.rail.hca, leaving.number());
        match leaving.end(hca) {
            Ok(Some(leaving)) => {
                self.state = State::Leaving { leaving, credit, held };
                return false;
            }
            Ok(None) => {
                if let Err(e) = hca.deregister(credit.at.local) {
                    turn.events.push(EngineEvent::Trouble(e));
                }
                self.wait(turn);
            }
            Err(lost) => self.state = self.dead(turn, lost, (held, number), credit),
        }
        true
    }

    /// Takes completions and posts; an error if there should have been some.
    fn carry(&mut self, turn: &mut Turn<'_, impl Nic<Pair = P>>) -> Result<bool, Refusal> {
        let completed = self.complete(turn)?;
        if completed || self.flights.is_empty() && self.current.is_none() {
            self.progress_at = turn.now;
        } else if turn.now >= self.progress_at.plus_ms(limits::COMPLETION_MS) {
            let State::Up { pair, end, .. } = &self.state else { return Ok(false) };
            let (hca, number) = (&turn.rail.hca, pair.end().number);
            let scene = Scene { hca, number, end: *end, peer: turn.peer };
            let e = scene.overdue("a NIC does not complete what was posted");
            return Err(of_part(e, self.held().next()).to_refusal());
        }
        Ok(completed | self.fill(turn)?)
    }
    /// Takes what completions there are.
    fn complete(&mut self, turn: &mut Turn<'_, impl Nic<Pair = P>>) -> Result<bool, Refusal> {
        let State::Up { pair, end, .. } = &mut self.state else { return Ok(false) };
        let mut bad = None;
        let mut moved = false;
        for _ in 0..COMPLETIONS_PER_TURN {
            let Some(found) = pair.poll() else { break };
            moved = true;
            let done = match found {
                Completion { what: What::Sent, index } => pair.sends_mut().completed(index),
                _ => None,
            };
            let Some(done) = done else {
                bad = Some(found);
                break;
            };
            while self.flights.front().is_some_and(|flight| flight.last <= done) {
                let Some(Flight { task, dropped, .. }) = self.flights.pop_front() else { break };
                if !dropped {
                    let (link, lane) = (self.link, self.lane);
                    let (grant, part) = (task.grant, task.part);
                    turn.events.push(EngineEvent::Acked { link, grant, part, lane });
                }
            }
        }
        if moved {
            pair.consumed();
        }
        let Some(bad) = bad else { return Ok(moved) };
        // The first one: those behind it only say that the queue pair is in error.
        let hca = &turn.rail.hca;
        let scene = Scene { hca, number: pair.end().number, end: *end, peer: turn.peer };
        let index = match bad {
            Completion { what: What::SendFailed(_), index } => pair.sends_mut().completed(index),
            _ => None,
        };
        let flight = self.flights.iter().find(|f| Some(f.last) >= index).map(|f| &f.task);
        let task = index.and(flight.or(self.current.as_ref().map(|current| &current.task)));
        Err(fault(&scene, bad, task).to_refusal())
    }

    /// Posts what there is room and credit for.
    fn fill(&mut self, turn: &mut Turn<'_, impl Nic<Pair = P>>) -> Result<bool, Refusal> {
        let next = |lane: &Self| match &lane.state {
            State::Up { pair, .. } if pair.sends().free() > 0 => Some(pair.sends().next()),
            _ => None,
        };
        let Some(before) = next(self) else { return Ok(false) };
        while next(self).is_some() && self.advance(turn)? {}
        let State::Up { pair, .. } = &mut self.state else { return Ok(false) };
        let moved = pair.sends().next() != before;
        if moved {
            pair.sends_mut().ring();
            turn.rail.hca.kick();
        }
        Ok(moved)
    }
    /// Posts of one part what there is room for; says whether there may be room for more.
    fn advance(&mut self, turn: &mut Turn<'_, impl Nic<Pair = P>>) -> Result<bool, Refusal> {
        let State::Up { pair, credit, receives, .. } = &mut self.state else { return Ok(false) };
        let Some(access) = turn.access else { return Ok(false) };
        let mut poster = Poster {
            sends: pair.sends_mut(),
            local: access.keys().look(),
            remote: turn.remote.look(),
            signal_mask: u64::from(turn.entries / 4 - 1),
        };
        let number = |task: &Task| immediate(task.grant, task.part);
        let (mut current, posted) = match self.current.take() {
            Some(current) if current.stopped => (current, Ok(())),
            Some(current) => {
                let posted = poster.rest(number(&current.task), &mut self.rest);
                (current, posted.map_err(|unknown| no_key(&unknown, access.keys(), turn.remote)))
            }
            None if self.queue.is_empty() => return Ok(false),
            None => {
                let has_credit = credit.has_one(*receives);
                if !has_credit.map_err(|e| e.with("peer", turn.peer).to_refusal())? {
                    return Ok(false);
                }
                let Some(task) = self.queue.pop_front() else { return Ok(false) };
                let first = poster.sends.next();
                let pages = writes(&task.source, &task.destination);
                let posted = match poster.part(pages, number(&task), &mut self.rest) {
                    Ok(0) => Err(other_pages()),
                    Ok(_) => Ok(()),
                    Err(unknown) => Err(no_key(&unknown, access.keys(), turn.remote)),
                };
                (Current { task, first, stopped: false }, posted)
            }
        };
        if let Err(why) = posted {
            let Task { grant, part, .. } = current.task;
            let why = why.with("grant", grant).with("part", part.0).to_refusal();
            let (link, lane) = (self.link, self.lane);
            turn.events.push(EngineEvent::Nacked { link, grant, part, lane, why });
            self.rest.clear();
            current.stopped = true;
        }
        let next = pair.sends().next();
        let dropped = current.stopped;
        if dropped && next == current.first {
            return Ok(true);
        }
        if dropped {
            // So that its entries are known to have completed.
            if !pair.sends_mut().nop() {
                self.current = Some(current);
                return Ok(false);
            }
        } else if !self.rest.is_empty() {
            self.current = Some(current);
            return Ok(false);
        } else {
            credit.sent += 1;
            let bytes = current.task.source.bytes();
            metrics::counter!("kvlane_one_sided_sent_bytes_total").increment(bytes);
        }
        let last = pair.sends().next() - 1;
        self.flights.push_back(Flight { task: current.task, last, dropped });
        Ok(true)
    }
    /// The engine ends.
    pub(super) fn end(self, now: Time, rail: &mut Rail<impl Nic<Pair = P>>) -> Option<Leaving<P>> {
        match self.state {
            State::Pairing { pair, .. } | State::Up { pair, .. } => {
                Leaving::last(now, &mut rail.hca, pair)
            }
            State::Leaving { leaving, .. } => Some(leaving),
            State::Waiting { .. } | State::Dead { .. } => None,
        }
    }
}

/// What a completion that is no success says, and of which part.
fn fault(scene: &Scene<'_, impl Nic>, found: Completion, task: Option<&Task>) -> Error {
    let error = match found.what {
        What::SendFailed(fault) | What::ReceiveFailed(fault) => scene.fault(fault),
        What::Unknown(opcode) => {
            let what = "the NIC wrote a completion that is not known";
            scene.error(ErrorKind::Malformed, what).with("opcode", format!("{opcode:#x}"))
        }
        What::Sent | What::Arrived(_) => {
            let what = "the NIC completed something that was not posted";
            scene.error(ErrorKind::Malformed, what).with("found", format!("{found:?}"))
        }
    };
    of_part(error, task)
}

fn of_part(error: Error, task: Option<&Task>) -> Error {
    match task {
        Some(task) => error.with("grant", task.grant).with("part", task.part.0),
        None => error,
    }
}

fn other_pages() -> Error {
    Error::new(ErrorKind::InvalidPlan, "the part's pages are not those of the grant's plan")
        .hint("both sides must have the same layouts and cut the same parts")
}

fn no_key(unknown: &Unknown, local: &Keys, remote: &Keys) -> Error {
    let Unknown { remote: theirs, address, bytes } = *unknown;
    let (why, keys, hint) = if theirs {
        let why = "the receiver has not opened this range to the link";
        (why, remote, "the decode worker must register the pool before it is used")
    } else {
        ("no registered region has this range", local, "register the pool before it is used")
    };
    let range = |address: u64, bytes: u64| {
        format!("{} {address:#x}..{:#x}", Device::Host, u128::from(address) + u128::from(bytes))
    };
    let known: Vec<_> = keys.opened().iter().map(|o| range(o.address, o.bytes)).collect();
    Error::new(ErrorKind::Memory, why)
        .with("asked", range(address, bytes.into()))
        .with("regions", if known.is_empty() { "none".to_owned() } else { known.join(", ") })
        .hint(hint)
}

fn stale(what: &'static str) {
    metrics::counter!("kvlane_one_sided_stale_messages_total", "what" => what).increment(1);
}
