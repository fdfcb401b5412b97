//! Legs of requests, as a router sends them to the stand-ins, and what comes back.

use kvlane_coordinator::Handoff;
use kvlane_proto::msg::service::{Load, LoadState, WorkerAddress};
use kvlane_proto::{ErrorKind, Outcome, Refusal};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use super::process::within;

/// How a leg ended. A leg whose stand-in died has no reply at all.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Reply {
    pub(crate) outcome: Option<Outcome>,
    pub(crate) error: Option<Refusal>,
    pub(crate) pages_verified: u64,
    pub(crate) pages_corrupt: u64,
    #[allow(dead_code)]
    pub(crate) retries: u64,
    pub(crate) quarantined_blocks: u64,
    pub(crate) state: Option<LoadState>,
    pub(crate) load: Load,
}

impl Reply {
    /// Why it did not end well.
    pub(crate) fn why(&self) -> &Refusal {
        let why = self.error.as_ref().or(self.outcome.as_ref().and_then(Outcome::why));
        why.unwrap_or_else(|| panic!("it ended well: {self:?}"))
    }
    pub(crate) fn is_done(&self) -> bool {
        self.error.is_none() && self.outcome.as_ref().is_some_and(Outcome::is_done)
    }
    /// Asserts that it is done; as the decode's, with every page checked.
    pub(crate) fn assert_done(&self, pages: u64) {
        assert!(self.is_done(), "{self:?}");
        assert_eq!((self.pages_verified, self.pages_corrupt), (pages, 0), "{self:?}");
        assert_eq!(self.quarantined_blocks, 0, "{self:?}");
    }
    pub(crate) fn assert_failed(&self, kinds: &[ErrorKind]) {
        assert!(kinds.contains(&self.why().kind), "expected one of {kinds:?}: {self:?}");
        assert_eq!((self.pages_corrupt, self.quarantined_blocks), (0, 0), "{self:?}");
    }
}

/// One request, before it is split into legs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Request {
    pub(crate) room: u64,
    pub(crate) tokens: u32,
    pub(crate) prefill: WorkerAddress,
    pub(crate) decode: WorkerAddress,
    pub(crate) issuer: String,
    pub(crate) deadline_ms: u64,
}

impl Request {
    pub(crate) fn of(handoff: &Handoff, issuer: &str, tokens: u32) -> Self {
        Self {
            room: handoff.room.0,
            tokens,
            prefill: handoff.prefill[0].worker.clone(),
            decode: handoff.decode[0].worker.clone(),
            issuer: issuer.into(),
            deadline_ms: 30_000,
        }
    }
    pub(crate) fn prefill_leg(&self) -> Value {
        json!({
            "leg": "prefill", "room": self.room, "request": self.room, "tokens": self.tokens,
            "decodes": [self.decode.key.identity.to_string()], "issuer": self.issuer,
            "deadline_ms": self.deadline_ms,
        })
    }
    pub(crate) fn decode_leg(&self) -> Value {
        json!({
            "leg": "decode", "room": self.room, "request": self.room, "tokens": self.tokens,
            "prefix_tokens": 0, "prefills": [self.prefill], "deadline_ms": self.deadline_ms,
        })
    }
}

/// A leg that was sent; hung up when dropped.
pub(crate) struct Leg(BufReader<TcpStream>);

impl Leg {
    pub(crate) async fn send(serving: &str, leg: Value) -> std::io::Result<Self> {
        let mut stream = TcpStream::connect(serving).await?;
        stream.write_all(format!("{leg}\n").as_bytes()).await?;
        Ok(Self(BufReader::new(stream)))
    }
    /// Waits for the reply; `None` if the stand-in died before it.
    pub(crate) async fn reply(mut self) -> Option<Reply> {
        let mut line = String::new();
        let read = within("a leg's reply", self.0.read_line(&mut line)).await;
        if read.is_err() || line.is_empty() {
            return None;
        }
        Some(serde_json::from_str(&line).unwrap_or_else(|e| panic!("{line:?}: {e}")))
    }
}

/// Sends a leg and waits for its end; `None` if the stand-in is dead or dies.
pub(crate) async fn leg(serving: &str, leg: Value) -> Option<Reply> {
    Leg::send(serving, leg).await.ok()?.reply().await
}
