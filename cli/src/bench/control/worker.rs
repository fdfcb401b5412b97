//! The worker process of `bench --rooms` and `--rest`: takes legs as lines, on standard input.
//!
//! A line is a room's number; everything else is agreed: prompts of [`TOKENS`] tokens that the
//! decode has already. A prefill worker attaches, a decode worker lends no block; both wait for the
//! end. Legs run side by side. When standard input ends and all of them
//! have, it says how they went ([`Legs`]). In: lines. Out: one line when it is ready, one at the end.

use std::process::ExitCode;
use std::time::Duration;

use kvlane_actors::{
    AttachRequest, DecodeHandle, DecodeWorker, EngineChoice, LendRequest, Pools, PrefillHandle,
    PrefillWorker, Takers, WorkerConfig,
};
use kvlane_proto::{BlockList, Error, ErrorKind, Identity, Result, Role, RoomId, Span, limits};
use kvlane_transport::engine::tcp::TcpConfig;
use serde::{Deserialize, Serialize};
use std::os::fd::AsFd;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::unix::pipe;
use tokio::task::JoinSet;

use crate::commands::{SecurityArgs, say, say_ready};
use crate::load::models;
use crate::report::json_line;

/// Tokens of every prompt: one block.
pub(super) const TOKENS: u32 = models::PAGE_TOKENS;
/// Blocks of the pool; none is ever lent.
const BLOCKS: u32 = 64;
/// How long it may take to register.
const REGISTERED: Duration = Duration::from_secs(30);
/// A room ends by then.
const DEADLINE: Duration = Duration::from_millis(limits::ROOM_DEADLINE_MS);

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Which side
    #[arg(long)]
    role: crate::commands::worker::Side,
    /// host:port of the bootstrap service
    #[arg(long)]
    service: String,
    /// The decode worker, for a prefill worker
    #[arg(long)]
    taker: Option<String>,
    /// Lanes of the link
    #[arg(long)]
    lanes: u16,
    #[command(flatten)]
    security: SecurityArgs,
}

/// How the legs of one worker went.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Legs {
    pub(super) done: u32,
    /// Prefill legs that came when their room was over.
    pub(super) late: u32,
    pub(super) failed: u32,
    /// Why the first of those failed.
    pub(super) why: Option<String>,
}

enum End {
    Done,
    Late,
}

#[derive(Clone)]
enum Worker {
    Prefill(PrefillHandle, Takers),
    Decode(DecodeHandle),
}

impl Worker {
    async fn leg(self, room: RoomId) -> Result<End> {
        let outcome = match self {
            Self::Prefill(worker, takers) => {
                let attach = AttachRequest {
                    room,
                    tokens: TOKENS,
                    takers,
                    issuer: None,
                    deadline: DEADLINE,
                };
                let sending = match worker.attach(attach).await {
                    // Nothing is missing at the decode, so that the room may be done by now.
                    Err(e) if e.kind() == ErrorKind::RoomEnded => return Ok(End::Late),
                    attached => attached?,
                };
                // Of what is wanted nothing is missing, so there is nothing to declare.
                sending.released().await?;
                sending.ended().await?
            }
            Self::Decode(worker) => {
                let lend = LendRequest {
                    room,
                    span: Span { tokens: TOKENS, prefix_tokens: TOKENS },
                    blocks: vec![BlockList::from_ids(&[])],
                    prefills: Vec::new(),
                    deadline: DEADLINE,
                };
                let ending = worker.lend(lend).await?.ended().await?;
                let outcome = ending.outcome.clone();
                ending.into_blocks().await?;
                outcome
            }
        };
        match outcome.why() {
            None => Ok(End::Done),
            Some(why) => Err(why.clone().into()),
        }
    }
}

pub(crate) async fn run(args: Args) -> Result<ExitCode> {
    let role = Role::from(args.role);
    let (security, identity) = args.security.identity(role, "w0", 0)?;
    let layouts = models::pools("tiny", models::PAGE_TOKENS, (0, 1))?;
    let pools = Pools::own_all(layouts.into_iter().map(|l| (l, BLOCKS)).collect())?;
    let engine = EngineChoice::Tcp(TcpConfig::default());
    let mut config = WorkerConfig::new(identity, security, pools, engine);
    config.service = Some(args.service);
    config.lanes_per_link = args.lanes;
    let worker = if role == Role::Prefill {
        let taker: Identity = args.taker.as_deref().unwrap_or_default().parse()?;
        Worker::Prefill(PrefillWorker::start(config)?, Takers::Named(vec![taker]))
    } else {
        Worker::Decode(DecodeWorker::start(config)?)
    };
    let handle = match &worker {
        Worker::Prefill(handle, _) => (**handle).clone(),
        Worker::Decode(handle) => (**handle).clone(),
    };
    handle.registered(REGISTERED).await?;
    say_ready(serde_json::json!({ "ready": role.as_str(), "quic": handle.address().address }));
    let legs = tokio::select! {
        legs = take_legs(&worker) => legs?,
        end = handle.ended() => {
            return Err(Error::new(ErrorKind::Internal, "the worker has ended by itself")
                .with("found", format!("{end:?}")));
        }
    };
    say(&json_line(&legs)?);
    handle.stop().await;
    Ok(ExitCode::SUCCESS)
}

/// Takes legs until standard input ends, and waits for all of them.
async fn take_legs(worker: &Worker) -> Result<Legs> {
    let failed = |e| Error::new(ErrorKind::Io, "no pipe on standard input").caused_by(e);
    // Read on this thread: tokio's own standard input goes through a second one.
    let stdin = std::io::stdin().as_fd().try_clone_to_owned().map_err(failed)?;
    let stdin = pipe::Receiver::from_file(stdin.into()).map_err(failed)?;
    let mut lines = BufReader::new(stdin).lines();
    let mut legs = Legs::default();
    let mut running = JoinSet::new();
    let mut open = true;
    while open || !running.is_empty() {
        tokio::select! {
            line = lines.next_line(), if open => match line.map_err(failed)? {
                Some(line) => {
                    let room = line.parse().map_err(|e| {
                        Error::new(ErrorKind::Malformed, "this command is for `kvlane bench` only")
                            .caused_by(e)
                    })?;
                    running.spawn(worker.clone().leg(RoomId(room)));
                }
                None => open = false,
            },
            Some(end) = running.join_next(), if !running.is_empty() => {
                let lost = |e| Error::new(ErrorKind::Internal, "a leg broke off").caused_by(e);
                match end.map_err(lost).flatten() {
                    Ok(End::Done) => legs.done += 1,
                    Ok(End::Late) => legs.late += 1,
                    Err(e) => {
                        legs.failed += 1;
                        legs.why.get_or_insert_with(|| e.to_string());
                    }
                }
            }
        }
    }
    Ok(legs)
}
