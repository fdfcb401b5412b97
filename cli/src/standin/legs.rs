//! What a router says to a stand-in: one JSON line in, one JSON line out, on a TCP connection of
//! its own.

use std::time::Duration;

use kvlane_proto::msg::service::{Load, LoadState, WorkerAddress};
use kvlane_proto::{Error, ErrorKind, Outcome, Refusal, Result};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::watch;

use super::holds::Holds;
use crate::report::json_line;

/// Longest line.
pub(crate) const LINE_BYTES_MAX: u64 = 64 << 10;

/// One leg of a request.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "leg", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum LegRequest {
    /// Fill the prompt's pages and send them.
    Prefill {
        room: u64,
        /// Seeds the contents; the same in both legs.
        request: u64,
        tokens: u32,
        /// `cluster/role/instance/rank` of each decode worker that fetches from this rank.
        decodes: Vec<String>,
        /// The same of the router.
        issuer: String,
        deadline_ms: u64,
    },
    /// Receive the pages and check them.
    Decode {
        room: u64,
        request: u64,
        tokens: u32,
        /// Tokens that the decode has already.
        prefix_tokens: u32,
        /// The prefill workers that send to this rank.
        prefills: Vec<WorkerAddress>,
        deadline_ms: u64,
    },
    /// How is the worker?
    Stats,
    /// Are the free blocks as they were left? The reply counts their pages.
    Audit,
    /// Stop, or be held, at a phase of the next room, for tests (needs a build with
    /// `fault-injection`).
    StopAt { phase: String, hold: bool },
    /// Go on from where it is held.
    GoOn,
    /// Receive no faster, or with 0 as fast as it can; for tests, as above.
    Throttle { bytes_per_s: u64 },
    /// What does its process hold?
    Holds,
}

/// How a leg ended.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct LegReply {
    /// How the room ended, as this side knows it.
    pub(crate) outcome: Option<Outcome>,
    /// The leg was refused, or something is wrong with its pages.
    pub(crate) error: Option<Refusal>,
    pub(crate) pages_verified: u64,
    pub(crate) pages_corrupt: u64,
    /// Parts that this worker has sent again so far.
    pub(crate) retries: u64,
    /// Blocks that this worker withholds.
    pub(crate) quarantined_blocks: u64,
    /// What the worker does, in one word.
    #[serde(default)]
    pub(crate) state: Option<LoadState>,
    /// How busy the worker is.
    pub(crate) load: Load,
    /// If that was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) holds: Option<Holds>,
}

/// Reads one line, bounded; `None` at the end.
pub(crate) async fn read_line<R: AsyncRead + Unpin>(
    reader: &mut BufReader<R>,
) -> Result<Option<Vec<u8>>> {
    let io = |e| Error::new(ErrorKind::Io, "cannot read a leg").caused_by(e);
    let mut line = Vec::new();
    (&mut *reader).take(LINE_BYTES_MAX).read_until(b'\n', &mut line).await.map_err(io)?;
    match line.last() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(line)),
        Some(_) if line.len() as u64 == LINE_BYTES_MAX => {
            Err(Error::new(ErrorKind::LimitExceeded, "the line is too long")
                .with("limit", LINE_BYTES_MAX))
        }
        Some(_) => Ok(None),
    }
}

/// Sends a leg to a stand-in and waits for its end.
///
/// # Errors
/// If the stand-in cannot be reached, ends early, or takes longer than `wait`.
pub(crate) async fn send(serving: &str, leg: &LegRequest, wait: Duration) -> Result<LegReply> {
    let failed =
        |why: &str| Error::new(ErrorKind::PeerLost, why.to_string()).with("serving", serving);
    let asked = async {
        let stream = TcpStream::connect(serving).await.map_err(|e| {
            failed("the model server cannot be reached")
                .hint("start the worker with --serving on an address that the router reaches")
                .caused_by(e)
        })?;
        let mut stream = BufReader::new(stream);
        let line = json_line(leg)?;
        let io = |e| failed("the model server has gone").caused_by(e);
        stream.get_mut().write_all(line.as_bytes()).await.map_err(io)?;
        let line = read_line(&mut stream).await.map_err(|e| match e.kind() {
            ErrorKind::Io => failed("the model server has gone").caused_by(e),
            _ => e,
        });
        let Some(line) = line? else {
            return Err(failed("the model server ended without an answer").hint(
                "look at the worker's log: it has ended, or has too many requests at a time",
            ));
        };
        serde_json::from_slice(&line)
            .map_err(|e| Error::new(ErrorKind::Malformed, "bad answer of a leg").caused_by(e))
    };
    tokio::time::timeout(wait, asked)
        .await
        .unwrap_or_else(|_| Err(failed("the model server did not answer in time")))
}

/// Does `work` to its end; if the client hangs up meanwhile, aborts beside it.
pub(super) async fn abort_when_gone<T>(
    work: impl Future<Output = T>,
    mut gone: watch::Receiver<bool>,
    abort: impl Future<Output = Result<()>>,
) -> T {
    let hung_up = async {
        // The sender lives as long as this leg.
        if gone.wait_for(|gone| *gone).await.is_ok()
            && let Err(e) = abort.await
        {
            tracing::warn!(error = %e, "a leg whose client hung up cannot be aborted");
        }
    };
    tokio::pin!(work, hung_up);
    let mut told = false;
    loop {
        tokio::select! {
            biased;
            end = &mut work => return end,
            () = &mut hung_up, if !told => told = true,
        }
    }
}
