//! The receiving end of a lane: answers queue pairs, takes immediates, fences.
//!
//! In: the sender's invitations; grants that are bound to the queue pair of the moment. Out:
//! [`EngineEvent::Arrived`] for each immediate of a bound grant; the end of a queue pair, for the
//! grants that were bound to it. Invariants: bytes that came through a queue pair cannot land once its
//! end was told, other than as lost; an immediate that no bound grant accounts for costs the queue
//! pair, nothing else; the sender is given credit only for receives that are posted.
//!
//! An offer leaves when [`crate::engine::Command::Open`] is queued, so the sender may write before this
//! side has taken it. So a grant is bound to whatever queue pair the lane has, also one that is on its
//! way out or was lost with its NIC: the sender's connection cannot be a newer one, because what
//! makes a newer one leaves here after the offer; and if it is an older one, that is flushed. And
//! immediates wait for the grant that they are of, as long as the lane has none.

use kvlane_proto::{
    Error, ErrorKind, GrantId, LaneId, LinkId, PartId, Refusal, Result, Time, WorkerKey, limits,
};

use super::nic::{End, Key, Nic, Pair, Remote, Sends, What};
use super::pair::{COMPLETIONS_PER_TURN, Leaving, Scene};
use super::post::{check, decode};
use super::rail::{Access, Rail, named};
use super::wire::Message;
use super::{CREDIT, RECEIVES, tell};
use crate::engine::EngineEvent;

/// Entries of the receiver's own ring: its counts, of which one is under way at a time.
const ENTRIES: u32 = 16;
/// How often a sender may have a queue pair made for a lane: honest ones wait longer before they ask.
const ANSWER_MS: u64 = 5;
/// Immediates after which the sender is told how many were taken.
const COUNT_EVERY: u64 = CREDIT as u64 / 2;

const _: () = assert!((ENTRIES + RECEIVES) as usize <= COMPLETIONS_PER_TURN);

/// What a lane works with while it has its turn.
pub(super) struct Turn<'a, N> {
    pub(super) now: Time,
    pub(super) peer: &'a WorkerKey,
    pub(super) rails: &'a mut [Rail<N>],
    /// By rail.
    pub(super) access: &'a [Option<Access>],
    /// The link is over: nothing is said, and no queue pair is made.
    pub(super) over: bool,
    /// A queue pair that could not be made has been logged: others of the link are counted only.
    pub(super) warned: &'a mut bool,
    /// Numbers the queue pairs of the engine.
    pub(super) serial: &'a mut u64,
    pub(super) ended: &'a mut Vec<Ended>,
    pub(super) events: &'a mut Vec<EngineEvent>,
}

/// A queue pair that is out, as one of its grants is told.
pub(super) struct Ended {
    pub(super) grant: GrantId,
    pub(super) serial: u64,
    /// Or why it will never be known whether something can still land.
    pub(super) how: Result<(), Refusal>,
}

/// A queue pair that the sender offers.
pub(super) struct Invitation {
    pub(super) epoch: u64,
    pub(super) guid: u64,
    pub(super) end: End,
    pub(super) credit: (u64, Key),
}

/// A grant that may come through a queue pair.
struct Bound {
    grant: GrantId,
    parts: u32,
}

/// What is known of a queue pair besides itself.
struct About {
    serial: u64,
    rail: usize,
    number: u32,
    end: End,
    credit: Remote,
    bound: Vec<Bound>,
    /// Immediates that came before their grant: not taken yet, so no more than the credit.
    early: Vec<u32>,
    /// Immediates taken, how many receives were posted for them, how many the sender was told of.
    taken: u64,
    posted: u64,
    told: u64,
    /// A count is under way since then.
    telling: Option<Time>,
}

impl About {
    fn scene<'a, N: Nic>(&self, hca: &'a N, peer: &'a WorkerKey) -> Scene<'a, N> {
        Scene { hca, number: self.number, end: self.end, peer }
    }
    /// The grant that an immediate is of.
    fn account(&self, number: u32) -> Option<(GrantId, PartId)> {
        let (bits, part) = decode(number);
        let fits = |b: &&Bound| check(b.grant) == bits && part.0 < b.parts;
        self.bound.iter().find(fits).map(|b| (b.grant, part))
    }
    /// Takes an immediate, or keeps it for a grant to come; an error if no grant can have it.
    fn take(&mut self, number: u32) -> Result<Option<(GrantId, PartId)>, u32> {
        if let Some(part) = self.account(number) {
            self.taken += 1;
            return Ok(Some(part));
        }
        if !self.bound.is_empty() || self.early.len() >= CREDIT as usize {
            return Err(number);
        }
        self.early.push(number);
        Ok(None)
    }
    /// Takes the immediates that came before their grant.
    fn take_early(&mut self) -> Vec<(GrantId, PartId)> {
        let early = std::mem::take(&mut self.early);
        let mut parts = Vec::with_capacity(early.len());
        for number in early {
            match self.account(number) {
                Some(part) => parts.push(part),
                None => self.early.push(number),
            }
        }
        self.taken += parts.len() as u64;
        parts
    }
}

enum State<P> {
    /// No queue pair.
    Empty,
    /// Made, and the sender told so.
    Paired { pair: P, about: About, deadline: Time },
    /// The sender has said that it is connected as well.
    Up { pair: P, about: About },
    /// What was under way may still land.
    Leaving { leaving: Leaving<P>, about: About },
}

/// One lane of a link.
pub(super) struct Inbound<P> {
    link: LinkId,
    lane: LaneId,
    state: State<P>,
    /// The newest that the sender spoke of.
    epoch: u64,
    /// To be answered when the one before is out.
    invited: Option<Invitation>,
    /// Not before this.
    answer_from: Time,
    /// A queue pair was lost with its NIC: nothing that comes through it is ever proved over.
    lost: Option<Refusal>,
}

/// What a grant has to do with a lane.
#[derive(Default)]
pub(super) struct Binding {
    /// The queue pair that it may come through.
    pub(super) serial: Option<u64>,
    /// It may also come through one that was lost.
    pub(super) lost: Option<Refusal>,
    /// Parts that came before it.
    pub(super) arrived: Vec<PartId>,
    /// What is wrong with it.
    pub(super) trouble: Option<Error>,
}

impl<P: Pair> Inbound<P> {
    pub(super) fn new(link: LinkId, lane: LaneId) -> Self {
        let (epoch, invited, answer_from, lost) = (0, None, Time(0), None);
        Self { link, lane, state: State::Empty, epoch, invited, answer_from, lost }
    }
    fn about(&self) -> Option<&About> {
        match &self.state {
            State::Empty => None,
            State::Paired { about, .. }
            | State::Up { about, .. }
            | State::Leaving { about, .. } => Some(about),
        }
    }
    /// Whether the sender has spoken of it.
    pub(super) fn was_invited(&self) -> bool {
        self.epoch > 0
    }
    /// Whether it has no queue pair.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.state, State::Empty)
    }
    /// Whether the queue pair of this number is up.
    pub(super) fn is_up(&self, serial: u64) -> bool {
        matches!(&self.state, State::Up { about, .. } if about.serial == serial)
    }
    /// Whether it is worth a look in every turn.
    pub(super) fn is_busy(&self) -> bool {
        match &self.state {
            State::Empty => self.invited.is_some(),
            State::Paired { .. } | State::Leaving { .. } => true,
            State::Up { about, .. } => !about.bound.is_empty() || about.telling.is_some(),
        }
    }
    /// The NIC of its queue pair.
    pub(super) fn rail(&self) -> Option<usize> {
        self.about().map(|about| about.rail)
    }
    /// Lets a grant come through the queue pair of this moment, whatever state that is in.
    pub(super) fn bind(&mut self, grant: GrantId, parts: u32) -> Binding {
        let mut binding = Binding { lost: self.lost.clone(), ..Binding::default() };
        let about = match &mut self.state {
            State::Empty => return binding,
            State::Paired { about, .. }
            | State::Up { about, .. }
            | State::Leaving { about, .. } => about,
        };
        binding.serial = Some(about.serial);
        let other = about.bound.iter().find(|b| check(b.grant) == check(grant)).map(|b| b.grant);
        about.bound.push(Bound { grant, parts });
        if let Some(other) = other {
            // Its parts count as the other's: it can be fenced, and never be complete.
            let why = "two grants on one lane cannot be told apart";
            let e = Error::new(ErrorKind::Internal, why)
                .with("lane", self.lane.0)
                .with("grant", grant)
                .with("other", other);
            binding.trouble = Some(e);
        }
        let early = about.take_early().into_iter();
        binding.arrived.extend(early.filter(|(of, _)| *of == grant).map(|(_, part)| part));
        binding
    }
    /// The grant has ended.
    pub(super) fn unbind(&mut self, serial: u64, grant: GrantId) {
        match &mut self.state {
            State::Paired { about, .. }
            | State::Up { about, .. }
            | State::Leaving { about, .. }
                if about.serial == serial =>
            {
                about.bound.retain(|b| b.grant != grant);
            }
            _ => {}
        }
    }

    /// The sender has a new queue pair.
    pub(super) fn invite(
        &mut self,
        turn: &mut Turn<'_, impl Nic<Pair = P>>,
        invitation: Invitation,
    ) {
        if invitation.epoch <= self.epoch {
            return stale("pair");
        }
        // The older one is dead at the sender already, so that is not told about it.
        if self.about().is_some() {
            let why =
                Error::new(ErrorKind::NoPath, "the sender made a new queue pair for the lane")
                    .with("peer", turn.peer);
            self.down(turn, &why.to_refusal(), false);
        }
        self.epoch = invitation.epoch;
        self.invited = Some(invitation);
        self.answer(turn);
    }
    /// The sender is connected as well.
    pub(super) fn connected(&mut self, turn: &mut Turn<'_, impl Nic<Pair = P>>, epoch: u64) {
        match std::mem::replace(&mut self.state, State::Empty) {
            State::Paired { pair, about, .. } if epoch == self.epoch => {
                self.state = State::Up { pair, about };
                metrics::counter!("kvlane_one_sided_lanes_up_total").increment(1);
                turn.events.push(EngineEvent::LaneUp { link: self.link, lane: self.lane });
            }
            other => {
                self.state = other;
                stale("up");
            }
        }
    }
    /// The sender's end is gone.
    pub(super) fn broken(
        &mut self,
        turn: &mut Turn<'_, impl Nic<Pair = P>>,
        epoch: u64,
        why: &str,
    ) {
        if epoch != self.epoch {
            return stale("broken");
        }
        self.invited = None;
        // What arrived before is in place.
        let first = self.take(turn).err();
        let why = first.unwrap_or_else(|| {
            Error::new(ErrorKind::NoPath, "the sender gave its end of the lane up")
                .with("peer", turn.peer)
                .with("why", why)
                .to_refusal()
        });
        self.down(turn, &why, false);
    }

    /// Gives the queue pair up, because of `why`; the sender makes the next.
    pub(super) fn down(
        &mut self,
        turn: &mut Turn<'_, impl Nic<Pair = P>>,
        why: &Refusal,
        say: bool,
    ) {
        let (pair, about, was_up) = match std::mem::replace(&mut self.state, State::Empty) {
            State::Paired { pair, about, .. } => (pair, about, false),
            State::Up { pair, about } => (pair, about, true),
            other => return self.state = other,
        };
        if say {
            self.say_broken(turn, why);
        }
        if was_up {
            self.report(turn, why);
        }
        match Leaving::begin(turn.now, &mut turn.rails[about.rail].hca, pair) {
            Ok(leaving) => self.state = State::Leaving { leaving, about },
            Err(lost) => self.lose(turn, about, &lost),
        }
    }
    /// The NIC of its queue pair is lost.
    pub(super) fn die(&mut self, turn: &mut Turn<'_, impl Nic<Pair = P>>, why: &Refusal) {
        // What arrived before is in place: no more than one turn takes, unless the NIC goes on.
        let _ = self.take(turn);
        let (was_up, about) = match std::mem::replace(&mut self.state, State::Empty) {
            State::Empty => return,
            State::Paired { pair, about, .. } => {
                // Its memory is kept where the NIC may still use it.
                turn.rails[about.rail].hca.destroy(pair);
                (false, about)
            }
            State::Up { pair, about } => {
                turn.rails[about.rail].hca.destroy(pair);
                (true, about)
            }
            State::Leaving { leaving, about } => {
                leaving.lose(&mut turn.rails[about.rail].hca);
                (false, about)
            }
        };
        if was_up {
            self.report(turn, why);
            self.say_broken(turn, why);
        }
        self.lose(turn, about, why);
        self.answer(turn);
    }
    /// What comes through its queue pair will never be known to be over.
    fn lose(&mut self, turn: &mut Turn<'_, impl Nic<Pair = P>>, about: About, why: &Refusal) {
        self.lost.get_or_insert_with(|| why.clone());
        end(turn, about, &Err(why.clone()));
    }
    fn report(&self, turn: &mut Turn<'_, impl Nic<Pair = P>>, why: &Refusal) {
        if !turn.over {
            metrics::counter!("kvlane_one_sided_lanes_down_total").increment(1);
            let (link, lane, why) = (self.link, self.lane, why.clone());
            turn.events.push(EngineEvent::LaneDown { link, lane, why });
        }
    }
    fn say_broken(&self, turn: &mut Turn<'_, impl Nic<Pair = P>>, why: &Refusal) {
        if !turn.over {
            let (lane, epoch, why) = (self.lane.0, self.epoch, why.to_string());
            tell(turn.events, self.link, &Message::Broken { lane, epoch, why });
        }
    }

    /// One turn; says whether anything moved.
    pub(super) fn poll(&mut self, turn: &mut Turn<'_, impl Nic<Pair = P>>) -> bool {
        let moved = match &self.state {
            State::Empty => return self.answer(turn),
            State::Paired { deadline, .. } if turn.now < *deadline => return false,
            State::Paired { .. } => {
                let why = "the sender did not connect its end of the lane in time";
                Err(Error::new(ErrorKind::DeadlineExceeded, why)
                    .with("peer", turn.peer)
                    .with("limit_ms", limits::HANDSHAKE_MS)
                    .to_refusal())
            }
            State::Up { .. } => self.take(turn),
            State::Leaving { .. } => return self.leave(turn),
        };
        moved.unwrap_or_else(|why| {
            self.down(turn, &why, true);
            true
        })
    }
    /// Takes all that has arrived so far, which one turn does; no if that costs the queue pair.
    pub(super) fn dry(&mut self, turn: &mut Turn<'_, impl Nic<Pair = P>>) -> bool {
        match self.take(turn) {
            Ok(_) => true,
            Err(why) => {
                self.down(turn, &why, true);
                false
            }
        }
    }
    /// Ready to sleep: when to look again, unless an event comes.
    pub(super) fn park(&mut self) -> Option<Time> {
        match &mut self.state {
            State::Empty => self.invited.is_some().then_some(self.answer_from),
            State::Paired { deadline, .. } => Some(*deadline),
            State::Up { pair, about } => {
                pair.arm();
                let late = || about.telling.map(|from| from.plus_ms(limits::COMPLETION_MS));
                if pair.is_ready() { Some(Time(0)) } else { late() }
            }
            State::Leaving { leaving, .. } => leaving.park(),
        }
    }

    /// Makes the other end of what the sender offered, if it is time and there is room for one.
    fn answer(&mut self, turn: &mut Turn<'_, impl Nic<Pair = P>>) -> bool {
        if !matches!(self.state, State::Empty) || turn.over || turn.now < self.answer_from {
            return false;
        }
        let Some(invitation) = self.invited.take() else { return false };
        self.answer_from = turn.now.plus_ms(ANSWER_MS);
        if let Err(e) = self.make(turn, &invitation) {
            let why = e.with("lane", self.lane.0).to_refusal();
            metrics::counter!("kvlane_one_sided_refused_pairs_total", "why" => why.kind.code())
                .increment(1);
            if !std::mem::replace(turn.warned, true) {
                let (link, peer) = (self.link.0, turn.peer);
                tracing::warn!(link, %peer, %why, "a lane did not come up; others of the link are only counted");
            }
            self.say_broken(turn, &why);
        }
        true
    }
    fn make(
        &mut self,
        turn: &mut Turn<'_, impl Nic<Pair = P>>,
        invitation: &Invitation,
    ) -> Result<()> {
        let Invitation { epoch, guid, end, credit } = *invitation;
        let Some(rail) = turn.rails.iter().position(|r| r.hca.about().guid == guid) else {
            return Err(Error::new(ErrorKind::NoPath, "the receiver does not have this NIC")
                .with("asked", format!("{guid:#x}"))
                .with("known", named(turn.rails.iter().map(|rail| rail.hca.about())))
                .hint("give both workers the same NICs"));
        };
        let Some(access) = turn.access.get(rail).and_then(Option::as_ref) else {
            return Err(turn.rails[rail].hca.lost());
        };
        let hca = &mut turn.rails[rail].hca;
        let mut pair = hca.queue_pair(access.domain, ENTRIES, RECEIVES)?;
        // Before the sender can know of it.
        pair.post_receives(CREDIT);
        if let Err(e) = hca.connect(&mut pair, end) {
            hca.destroy(pair);
            return Err(e);
        }
        *turn.serial += 1;
        let message = Message::Paired {
            lane: self.lane.0,
            epoch,
            end: pair.end(),
            receives: CREDIT,
            regions: access.opened().to_vec(),
        };
        tell(turn.events, self.link, &message);
        let about = About {
            serial: *turn.serial,
            rail,
            number: pair.end().number,
            end,
            credit: Remote { address: credit.0, key: credit.1.0 },
            bound: Vec::new(),
            early: Vec::new(),
            taken: 0,
            posted: 0,
            told: 0,
            telling: None,
        };
        tracing::debug!(lane = self.lane.0, epoch, end = ?pair.end(), "answers with a queue pair");
        let deadline = turn.now.plus_ms(limits::HANDSHAKE_MS);
        self.state = State::Paired { pair, about, deadline };
        Ok(())
    }

    /// Waits until nothing can land; then the next queue pair may be made.
    fn leave(&mut self, turn: &mut Turn<'_, impl Nic<Pair = P>>) -> bool {
        let State::Leaving { leaving, about } = &mut self.state else { return false };
        let hca = &turn.rails[about.rail].hca;
        turn.events.extend(leaving.late(turn.now, hca).map(EngineEvent::Trouble));
        let (link, lane) = (self.link, self.lane);
        let mut moved = false;
        // The sender may know of these as done.
        let flushed = leaving.is_flushed(|what| {
            if let What::Arrived(immediate) = what
                && let Ok(Some((grant, part))) = about.take(*immediate)
            {
                turn.events.push(EngineEvent::Arrived { link, grant, part, lane });
                moved = true;
            }
        });
        if !flushed {
            return moved;
        }
        if let State::Leaving { leaving, about } = std::mem::replace(&mut self.state, State::Empty)
        {
            match leaving.end(&mut turn.rails[about.rail].hca) {
                Ok(Some(leaving)) => {
                    self.state = State::Leaving { leaving, about };
                    return moved;
                }
                Ok(None) => end(turn, about, &Ok(())),
                Err(lost) => self.lose(turn, about, &lost),
            }
        }
        self.answer(turn);
        true
    }

    /// Takes what has arrived.
    fn take(&mut self, turn: &mut Turn<'_, impl Nic<Pair = P>>) -> Result<bool, Refusal> {
        let State::Up { pair, about } = &mut self.state else { return Ok(false) };
        let scene = about.scene(&turn.rails[about.rail].hca, turn.peer);
        let foreign = |number, about: &About| foreign(&scene, number, &about.bound).to_refusal();
        if let Some(&number) = about.early.first()
            && !about.bound.is_empty()
        {
            // The grant that it waited for is not the one that came.
            return Err(foreign(number, about));
        }
        let mut moved = false;
        for _ in 0..COMPLETIONS_PER_TURN {
            let Some(found) = pair.poll() else { break };
            moved = true;
            match found.what {
                What::Arrived(immediate) => {
                    let (link, lane) = (self.link, self.lane);
                    match about.take(immediate) {
                        Ok(Some((grant, part))) => {
                            turn.events.push(EngineEvent::Arrived { link, grant, part, lane });
                        }
                        Ok(None) => {}
                        Err(number) => return Err(foreign(number, about)),
                    }
                }
                What::Sent if pair.sends_mut().completed(found.index).is_some() => {
                    about.telling = None;
                }
                // The first one: those behind it only say that the queue pair is in error.
                What::SendFailed(fault) | What::ReceiveFailed(fault) => {
                    return Err(scene.fault(fault).to_refusal());
                }
                What::Sent | What::Unknown(_) => {
                    let what = "the NIC completed something that was not posted";
                    let e = scene.error(ErrorKind::Malformed, what);
                    return Err(e.with("found", format!("{found:?}")).to_refusal());
                }
            }
        }
        let is_late = |from: Time| turn.now >= from.plus_ms(limits::COMPLETION_MS);
        if about.telling.is_some_and(is_late) {
            let what = "a NIC does not complete the count of parts for the sender";
            return Err(scene.overdue(what).to_refusal());
        }
        if !moved && about.posted == about.taken {
            return Ok(false);
        }
        pair.consumed();
        // Posted before the sender may count on them.
        pair.post_receives((about.taken - about.posted) as u32);
        about.posted = about.taken;
        if about.taken - about.told >= COUNT_EVERY
            && about.telling.is_none()
            && pair.sends_mut().write_word(about.credit, about.taken)
        {
            pair.sends_mut().ring();
            turn.rails[about.rail].hca.kick();
            (about.told, about.telling) = (about.taken, Some(turn.now));
        }
        Ok(true)
    }
    /// The engine ends.
    pub(super) fn end(
        self,
        now: Time,
        rails: &mut [Rail<impl Nic<Pair = P>>],
    ) -> Option<(usize, Leaving<P>)> {
        match self.state {
            State::Paired { pair, about, .. } | State::Up { pair, about } => {
                let leaving = Leaving::last(now, &mut rails[about.rail].hca, pair)?;
                Some((about.rail, leaving))
            }
            State::Leaving { leaving, about } => Some((about.rail, leaving)),
            State::Empty => None,
        }
    }
}

/// Tells the grants of a queue pair that it is out.
fn end<N>(turn: &mut Turn<'_, N>, about: About, how: &Result<(), Refusal>) {
    let serial = about.serial;
    let each = about.bound.into_iter();
    turn.ended.extend(each.map(|b| Ended { grant: b.grant, serial, how: how.clone() }));
}

fn foreign(scene: &Scene<'_, impl Nic>, number: u32, bound: &[Bound]) -> Error {
    let (bits, part) = decode(number);
    let known: Vec<_> = bound.iter().map(|b| format!("{} of {} parts", b.grant, b.parts)).collect();
    metrics::counter!("kvlane_one_sided_foreign_parts_total").increment(1);
    scene
        .error(ErrorKind::Malformed, "the sender wrote a part that no grant on this lane has")
        .with("part", part.0)
        .with("check", format!("{bits:#04x}"))
        .with("grants", if known.is_empty() { "none".to_owned() } else { known.join(", ") })
        .hint("the sender is at fault: see its log, and run the same release on both workers")
}

fn stale(what: &'static str) {
    metrics::counter!("kvlane_one_sided_stale_messages_total", "what" => what).increment(1);
}
