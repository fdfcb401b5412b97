//! Router or admin to worker. The decode worker alone decides about its rooms and credit, so
//! reservations are asked of it.

use serde::{Deserialize, Serialize};

use crate::error::Refusal;
use crate::ids::{IdempotencyKey, RoomId};
use crate::msg::peer::Outcome;
use crate::msg::service::WorkerAddress;

/// A numbered call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallFrame {
    /// Chosen by the caller; comes back in the answer.
    pub id: u64,
    /// What is asked.
    pub call: Call,
}

/// A numbered answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplyFrame {
    /// The call's number.
    pub id: u64,
    /// The answer.
    pub reply: Result<Reply, Refusal>,
}

/// What a router may ask.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Call {
    /// Charge a room's credit at this decode worker.
    Reserve(Reserve),
    /// End a room. Unknown rooms are fine: the abort may overtake everything else.
    Abort {
        /// The room.
        room: RoomId,
        /// Why, for the record.
        reason: String,
    },
    /// Answer when the room has ended.
    Await {
        /// The room.
        room: RoomId,
        /// Answer at the latest after this long.
        wait_ms: u64,
    },
    /// Answer at once, to see whether the worker lives.
    Ping,
}

/// A reservation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reserve {
    /// The same key charges once and gets the same answer.
    pub key: IdempotencyKey,
    /// The room that the caller made.
    pub room: RoomId,
    /// Tokens of the prompt.
    pub tokens: u32,
    /// The prefill workers that will send: every rank that has something for this decode rank.
    pub prefills: Vec<WorkerAddress>,
    /// Wait in the queue at most this long.
    pub wait_ms: u64,
    /// The room ends by then, counted from now.
    pub deadline_ms: u64,
}

/// What a worker answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// The room is charged; claim it within `unclaimed_ms`.
    Reserved {
        /// The room.
        room: RoomId,
        /// How long the charge waits for the decode leg.
        unclaimed_ms: u64,
    },
    /// The abort is taken; the room's end follows.
    Aborting,
    /// How the room ended.
    Ended(Outcome),
    /// Still running when `wait_ms` was over.
    Running,
    /// Alive.
    Pong,
}
