//! What is asked of the decode ranks of one room, and what their answers make together.
//!
//! In: a room, whose pair is chosen. Out: the room charged at every decode rank, or an error and the
//! ranks that may hold it noted in the room; and the end of the whole room from the ends at each.

use std::time::Duration;

use kvlane_proto::msg::call::{Call, Reply, Reserve};
use kvlane_proto::msg::service::WorkerAddress;
use kvlane_proto::{Blame, Error, ErrorKind, IdempotencyKey, Refusal, Result, RoomId, limits};
use kvlane_transport::rpc::Failure;
use tokio::time::Instant;

use crate::each::Each;
use crate::handoff::{HandoffOutcome, Room};
use crate::{Shared, ms};

/// A room's charge at one rank.
struct Charge {
    at: Instant,
    unclaimed_ms: u64,
}

impl Charge {
    /// How long it still waits for the decode leg.
    fn left_ms(&self) -> u64 {
        self.unclaimed_ms.saturating_sub(ms(self.at.elapsed()))
    }
}

fn least_ms(charges: &[Charge]) -> u64 {
    charges.iter().map(Charge::left_ms).min().unwrap_or(0)
}

impl Shared {
    /// Charges a room at every decode rank; returns how long the charges wait for their legs. With
    /// an error it may be charged at some: the room knows at which, and dropping its guard aborts
    /// it there.
    ///
    /// Two routers that reserve at the same ranks must not wait for each other. So whoever waits in
    /// queues does so in rank order, one at a time: what it holds while it waits is of lower rank
    /// than what it waits for, hence the one that has come furthest never waits for another that
    /// waits. Whoever does not want to wait asks the first rank (ranks fill alike, so that is
    /// where a busy instance says so, at the cost of one call and with nothing to take back), then
    /// all others at once; holding several at random while refusing to wait blocks nobody.
    pub(crate) async fn ask_reserve(
        &self,
        room: &Room,
        key: IdempotencyKey,
        due: Instant,
        wait: Duration,
    ) -> Result<u64> {
        let begun = Instant::now();
        let mut charges = vec![self.reserve_at(room, 0, key, due, wait).await?];
        let others = 1..room.decode.len();
        if wait.is_zero() {
            let mut others =
                Each::new(others, |rank| self.reserve_at(room, rank, key, due, Duration::ZERO));
            while let Some((_, charge)) = others.next().await {
                charges.push(charge?);
            }
        } else {
            for rank in others {
                // The charges that it has must outlive the wait for the next.
                let patience = Duration::from_millis(least_ms(&charges) / 2);
                let wait = wait.saturating_sub(begun.elapsed()).min(patience);
                charges.push(self.reserve_at(room, rank, key, due, wait).await?);
            }
        }
        Ok(least_ms(&charges))
    }

    /// Asks one decode rank, again with the same key while replies are lost.
    async fn reserve_at(
        &self,
        room: &Room,
        rank: usize,
        key: IdempotencyKey,
        due: Instant,
        wait: Duration,
    ) -> Result<Charge> {
        let worker = &room.decode[rank].worker;
        let named = |e: Error| match room.decode.len() {
            1 => e,
            _ => e.with("rank", &worker.key),
        };
        let left = due.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let e = Error::new(ErrorKind::DeadlineExceeded, "no time is left for the room");
            return Err(named(e));
        }
        let wait = wait.min(left);
        let reserve = Reserve {
            key: wire_key(key, room.id),
            room: room.id,
            tokens: room.tokens,
            prefills: room.sources(rank),
            wait_ms: ms(wait),
            deadline_ms: ms(left),
        };
        let client = self.workers.client(worker);
        let patience = left.min(wait + Duration::from_millis(self.cfg.call_ms));
        let first = room.hold(rank);
        let mut lost = false;
        for tries in 1.. {
            let failure = match client.ask(Call::Reserve(reserve.clone()), patience).await {
                Ok(Reply::Reserved { room: said, unclaimed_ms }) if said == room.id => {
                    return Ok(Charge { at: Instant::now(), unclaimed_ms });
                }
                Ok(_) => break,
                Err(failure) => failure,
            };
            lost |= matches!(failure, Failure::Lost(_));
            let refused = matches!(failure, Failure::Refused(_));
            if lost && !refused && tries < self.cfg.call_tries && Instant::now() < due {
                metrics::counter!("kvlane_coordinator_repeats_total").increment(1);
                tracing::debug!(room = %room.id, error = %failure, "reply lost, asking again");
                continue;
            }
            if first && (refused || !lost) {
                // It left no trace, so there is nothing to abort.
                room.let_go(rank);
            }
            return Err(named(Error::from(failure)).with("room", room.id).with("tries", tries));
        }
        Err(odd_reply(worker, "reserve"))
    }

    /// Waits for the end of a room at all its decode ranks, at most until `due`.
    pub(crate) async fn ask_outcome(&self, room: &Room, due: Instant) -> HandoffOutcome {
        let mut ranks = Each::new(0..room.decode.len(), |rank| self.outcome_at(room, rank, due));
        let (mut sum, mut runs) = (0u64, false);
        while let Some((rank, outcome)) = ranks.next().await {
            match outcome {
                HandoffOutcome::Done { bytes } => {
                    room.let_go(rank);
                    sum = sum.saturating_add(bytes);
                }
                HandoffOutcome::Running => runs = true,
                HandoffOutcome::Failed { .. } => return room.fail(rank, outcome),
                HandoffOutcome::Unknown { .. } => return outcome,
            }
        }
        match runs {
            true => HandoffOutcome::Running,
            false => room.finish(HandoffOutcome::Done { bytes: sum }),
        }
    }

    async fn outcome_at(&self, room: &Room, rank: usize, due: Instant) -> HandoffOutcome {
        let worker = &room.decode[rank].worker;
        let unknown = |e: Error| HandoffOutcome::Unknown {
            refusal: match room.decode.len() {
                1 => e.to_refusal(),
                _ => e.with("rank", &worker.key).to_refusal(),
            },
        };
        let mut last: Option<Error> = None;
        loop {
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return last.map_or(HandoffOutcome::Running, unknown);
            }
            // Short rounds, so that a worker that hangs is noticed while its lease runs out.
            let round = left.min(Duration::from_millis(limits::WORKER_LEASE_MS));
            let call = Call::Await { room: room.id, wait_ms: ms(round) };
            let patience = round + Duration::from_millis(self.cfg.call_ms);
            match self.workers.client(worker).ask(call, patience).await {
                Ok(Reply::Ended(outcome)) => return HandoffOutcome::said(&worker.key, outcome),
                Ok(Reply::Running) => last = None,
                Ok(_) => last = Some(odd_reply(worker, "await")),
                Err(Failure::Refused(e)) => return unknown(e),
                Err(Failure::Unsent(e) | Failure::Lost(e)) => {
                    let restarted = e.kind() == ErrorKind::StaleIncarnation;
                    if restarted || !self.view.borrow().is_alive(&worker.key) {
                        return gone(worker, &e);
                    }
                    last = Some(e);
                    let pause = Duration::from_millis(limits::RESEND_MS);
                    tokio::time::sleep_until(due.min(Instant::now() + pause)).await;
                }
            }
        }
    }
}

/// The key as a worker sees it. A worker that still remembers an earlier room of the caller's key
/// (one that was given up) must not answer with that room.
fn wire_key(IdempotencyKey(mut key): IdempotencyKey, room: RoomId) -> IdempotencyKey {
    for (k, r) in key.iter_mut().zip(room.0.to_le_bytes()) {
        *k ^= r;
    }
    IdempotencyKey(key)
}

fn odd_reply(worker: &WorkerAddress, asked: &'static str) -> Error {
    Error::new(ErrorKind::Malformed, "the worker answered another question")
        .blamed(Blame::Decode)
        .with("worker", &worker.key)
        .with("asked", asked)
}

fn gone(worker: &WorkerAddress, e: &Error) -> HandoffOutcome {
    let why: Refusal = Error::new(ErrorKind::PeerLost, "the decode worker is gone, and its rooms")
        .blamed(Blame::Decode)
        .with("worker", &worker.key)
        .with("found", e)
        .hint("try the request again with another pair")
        .to_refusal();
    HandoffOutcome::failed(&worker.key, why)
}
