//! What the prefill machine keeps of a room: the leg that its serving engine brought, and the decode
//! ranks that take it.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use super::Takers;
use crate::error::{Blame, Error, ErrorKind, Refusal, Result};
use crate::ids::{Identity, LaneId, LinkId, PartId, RoomId};
use crate::layout::{KvKind, Layout};
use crate::limits;
use crate::msg::peer::{DataPath, Offer, Outcome, PeerMsg};
use crate::plan::{Grid, PoolShare, Share, Span};
use crate::time::{Backoff, Time};

const NOT_DECLARED: u32 = u32::MAX;

/// A room: a leg, offers, or both.
#[derive(Debug)]
pub(super) struct Room<Q> {
    pub(super) leg: Option<Leg<Q>>,
    /// By link. What one decode says of a room is kept apart from what others say of it.
    pub(super) takers: BTreeMap<LinkId, Taker>,
    pub(super) armed: Option<Time>,
}

/// One request's leg.
#[derive(Debug)]
pub(super) struct Leg<Q> {
    pub(super) tokens: u32,
    pub(super) pools: Vec<Declared>,
    pub(super) expected: Takers,
    pub(super) issuer: Option<Identity>,
    pub(super) deadline: Time,
    /// Nobody may take it any more, and why.
    pub(super) ending: Option<Refusal>,
    /// How it ended for the takers that are over.
    pub(super) over: Vec<(Identity, Past)>,
    /// What the engine proved so far.
    pub(super) proofs: Vec<Q>,
    pub(super) released: bool,
    /// Every page is declared.
    pub(super) finished: bool,
}

/// The prompt's pages in one pool, as far as they are declared.
#[derive(Debug)]
pub(super) struct Declared {
    /// By block of the prompt, or by row.
    pub(super) ids: Vec<u32>,
    /// By layer of this rank: tokens declared.
    pub(super) done: Vec<u32>,
}

/// A decode rank that has offered its blocks.
#[derive(Debug)]
pub(super) struct Taker {
    pub(super) peer: Identity,
    pub(super) path: DataPath,
    pub(super) offer: Arc<Offer>,
    pub(super) share: Arc<Share>,
    pub(super) grid: Grid,
    /// Its link counts it among the offers that no leg has claimed, with so many words.
    pub(super) orphan: Option<usize>,
    /// It takes the leg. Until then the offer costs its block list and no more.
    pub(super) claimed: bool,
    pub(super) parts: Vec<PartState>,
    pub(super) unacked: u32,
    pub(super) ready: VecDeque<PartId>,
    pub(super) later: BTreeSet<(Time, PartId)>,
    pub(super) tries: HashMap<PartId, u32>,
    pub(super) lanes: Vec<TakerLane>,
    pub(super) lease_until: Time,
    /// A lane was lost with writes in flight: this side's word is not enough.
    pub(super) tainted: bool,
    pub(super) phase: Phase,
    /// Repeats `Quiesced` or `Abort` until the decode has spoken.
    pub(super) resend: Option<(PeerMsg, Backoff)>,
    /// The decode has decided, or this side cannot hear it any more.
    pub(super) outcome: Option<Outcome>,
    /// Without a leg, or without the decode's word, it ends by then.
    pub(super) deadline: Time,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PartState {
    Waiting,
    Ready,
    InFlight(LaneId),
    Acked,
}

#[derive(Debug)]
pub(super) struct TakerLane {
    pub(super) id: LaneId,
    pub(super) in_flight: u32,
    pub(super) progress: Time,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Running,
    /// The engine becomes quiet; blocks are withheld if it is not by `until`.
    Quieting {
        until: Time,
    },
    /// The engine is quiet; the decode's word is awaited.
    Quiet,
}

/// What is remembered of a room that has ended.
#[derive(Clone, Debug)]
pub(super) struct Past {
    pub(super) outcome: Outcome,
    /// What this side said of its grant: nothing that was posted can land.
    pub(super) clean: bool,
}

impl<Q> Room<Q> {
    pub(super) fn new() -> Self {
        Self { leg: None, takers: BTreeMap::new(), armed: None }
    }
    /// Takers of the leg that are not over.
    pub(super) fn claimed(&self) -> impl Iterator<Item = (&LinkId, &Taker)> {
        self.takers.iter().filter(|(_, t)| t.claimed)
    }
    /// Whether every taker that the leg expects has come.
    pub(super) fn all_came(&self) -> bool {
        let Some(leg) = &self.leg else { return false };
        self.claimed().count() + leg.over.len() >= leg.expected.count()
    }
    /// Whether the leg waits for an offer of this decode.
    pub(super) fn waits_for(&self, decode: &Identity) -> bool {
        let Some(leg) = &self.leg else { return false };
        leg.ending.is_none()
            && !leg.over.iter().any(|(who, _)| who == decode)
            && !self.claimed().any(|(_, t)| t.peer == *decode)
            && match &leg.expected {
                Takers::Named(names) => names.contains(decode),
                Takers::Any(_) => !self.all_came(),
            }
    }
    /// The first token of a pool that anybody wants: all of it as long as somebody may come.
    pub(super) fn wanted_from(&self, pool: usize, layout: &Layout) -> u32 {
        let Some(leg) = &self.leg else { return 0 };
        let whole = Span { tokens: leg.tokens, prefix_tokens: 0 };
        let first = |span: &Span| match layout.kind {
            KvKind::Rows { .. } => 0,
            _ => span.first_token(layout.window_tokens),
        };
        if !self.all_came() {
            return first(&whole);
        }
        let wanted = self.claimed().filter_map(|(_, t)| {
            let share = t.share.pools().get(pool)?;
            (!share.cells(&t.offer.span).is_empty()).then(|| first(&t.offer.span))
        });
        wanted.min().unwrap_or(leg.tokens)
    }
}

impl<Q> Leg<Q> {
    /// Why a decode cannot have it.
    pub(super) fn not_for(&self, room: RoomId, decode: &Identity) -> Error {
        let names = match &self.expected {
            Takers::Named(names) if !names.contains(decode) => names,
            _ => {
                return Error::new(ErrorKind::DuplicateRoom, "the room has all its takers already")
                    .with("room", room)
                    .with("takers", self.expected.count())
                    .blamed(Blame::Caller);
            }
        };
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        Error::new(ErrorKind::Unauthorized, "the room is another decode's")
            .with("room", room)
            .with("expected", names.join(" "))
            .with("found", decode)
    }
    pub(super) fn declared(&self) -> u32 {
        let count = |s: &Declared| s.ids.iter().filter(|&&id| id != NOT_DECLARED).count();
        self.pools.iter().map(count).sum::<usize>() as u32
    }
    /// How the room ended, from what every taker was told: done if all are.
    pub(super) fn outcome(&self) -> Outcome {
        let bytes = self.over.iter().map(|(_, past)| match past.outcome {
            Outcome::Done { bytes } | Outcome::Failed { bytes, .. } => bytes,
            Outcome::Unknown { .. } => 0,
        });
        // What decodes say is not to be trusted with arithmetic.
        let bytes = bytes.fold(0, u64::saturating_add);
        let rank = |o: &Outcome| match o {
            Outcome::Failed { .. } => 0,
            Outcome::Unknown { .. } => 1,
            Outcome::Done { .. } => 2,
        };
        let worst = self.over.iter().map(|(_, past)| &past.outcome).min_by_key(|o| rank(o));
        match (worst, &self.ending) {
            (Some(Outcome::Failed { why, .. }), _) => Outcome::Failed { why: why.clone(), bytes },
            (Some(Outcome::Unknown { why }), _) => Outcome::Unknown { why: why.clone() },
            (_, Some(why)) if self.over.len() < self.expected.count() => {
                Outcome::Failed { why: why.clone(), bytes }
            }
            _ => Outcome::Done { bytes },
        }
    }
}

impl Takers {
    /// # Errors
    /// [`ErrorKind::Malformed`] for nobody, too many, or one twice.
    pub(super) fn check(&self) -> Result<()> {
        let count = self.count();
        let twice = match self {
            Self::Named(names) => names.iter().enumerate().any(|(n, d)| names[..n].contains(d)),
            Self::Any(_) => false,
        };
        if count == 0 || count > limits::RANKS_MAX || twice {
            return Err(Error::new(
                ErrorKind::Malformed,
                "a leg names its decode ranks, each once",
            )
            .with("found", count)
            .with("limit", limits::RANKS_MAX));
        }
        Ok(())
    }
    /// Whether a decode may take the leg that `others` took already.
    pub(super) fn may_take(&self, decode: &Identity, others: usize) -> bool {
        match self {
            Self::Named(names) => names.contains(decode),
            Self::Any(count) => others < usize::from(*count),
        }
    }
    /// How many.
    pub(super) fn count(&self) -> usize {
        match self {
            Self::Named(names) => names.len(),
            Self::Any(count) => usize::from(*count),
        }
    }
}

impl Declared {
    pub(super) fn new(layout: &Layout, tokens: u32) -> Self {
        Self {
            ids: vec![NOT_DECLARED; layout.blocks_for(tokens) as usize],
            done: vec![0; layout.layers as usize],
        }
    }
    /// Sets blocks of the prompt.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidPlan`] if one was declared with another id before.
    pub(super) fn declare(&mut self, first: u32, ids: &[u32]) -> Result<()> {
        let bad = |why: &str| Error::new(ErrorKind::InvalidPlan, why).with("first", first);
        let Some(slots) = self.ids.get_mut(first as usize..first as usize + ids.len()) else {
            return Err(bad("blocks are outside the prompt").with("blocks", ids.len()));
        };
        let other = |(slot, id): &(&mut u32, &u32)| **slot != NOT_DECLARED && **slot != **id;
        if let Some((before, now)) = slots.iter_mut().zip(ids).find(other) {
            return Err(bad("a block of the prompt was declared with another id")
                .with("before", before)
                .with("now", now)
                .hint("a prompt keeps its blocks until they are released"));
        }
        slots.copy_from_slice(ids);
        Ok(())
    }
    /// Blocks of the prompt; one that is not declared is in no pool.
    pub(super) fn get(&self, blocks: Range<u32>) -> Arc<[u32]> {
        self.ids.get(blocks.start as usize..blocks.end as usize).unwrap_or_default().into()
    }
}

impl Taker {
    /// The leg has come.
    pub(super) fn claim(&mut self, deadline: Time) {
        self.claimed = true;
        self.deadline = deadline;
        self.parts = vec![PartState::Waiting; self.grid.parts() as usize];
    }
    /// One pool of what this rank has for it.
    pub(super) fn pool(&self, pool: u32) -> Option<&Arc<PoolShare>> {
        self.share.pool(pool)
    }
}

impl Past {
    /// What a decode that comes too late is told: why the room failed, if it did.
    pub(super) fn reason(&self, room: RoomId) -> Error {
        match &self.outcome {
            Outcome::Failed { why, .. } => why.clone().into(),
            _ => self.refusal(room),
        }
    }
    pub(super) fn refusal(&self, room: RoomId) -> Error {
        let e = Error::new(ErrorKind::RoomEnded, "the room has ended at the prefill")
            .with("room", room)
            .with("outcome", &self.outcome);
        match self.outcome.why() {
            Some(why) => e.blamed(why.blame),
            None => e,
        }
    }
}
