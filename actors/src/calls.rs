//! Calls of routers and admins: one task a session, one number for each call that waits.

use std::collections::HashMap;

use actix::prelude::*;
use kvlane_proto::decode::CallId;
use kvlane_proto::msg::call::{Call, CallFrame, Reply, ReplyFrame};
use kvlane_proto::{Error, ErrorKind, Identity, Refusal};
use kvlane_transport::quic::{FrameSender, Session};
use kvlane_transport::seats::{SEATS_PER_IDENTITY, Seats};

use crate::tasks;

/// Calls of one session that may wait at a time.
const CALLS_PER_SESSION_MAX: usize = 4096;

/// A call arrived.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) struct CallIn {
    pub(crate) session: u64,
    pub(crate) from: Identity,
    pub(crate) frame: CallFrame,
    pub(crate) answers: FrameSender<ReplyFrame>,
}

/// A caller's session has ended.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) struct CallsGone {
    pub(crate) session: u64,
}

struct Waiting {
    session: u64,
    id: u64,
    answers: FrameSender<ReplyFrame>,
}

/// The calls that wait for their answer.
pub(crate) struct Calls {
    seats: Seats,
    waiting: HashMap<CallId, Waiting>,
    per_session: HashMap<u64, usize>,
    next: u64,
    sessions: u64,
}

impl Default for Calls {
    fn default() -> Self {
        Self {
            seats: Seats::new("call", SEATS_PER_IDENTITY),
            waiting: HashMap::new(),
            per_session: HashMap::new(),
            next: 0,
            sessions: 0,
        }
    }
}

impl Calls {
    /// Reads a session's calls into the actor. A caller that opens too many loses its oldest.
    pub(crate) fn open<A>(&mut self, session: Session, actor: &Addr<A>)
    where
        A: Actor<Context = Context<A>> + Handler<CallIn> + Handler<CallsGone>,
    {
        self.sessions += 1;
        let number = self.sessions;
        let from = session.peer.identity.clone();
        let mut seat = self.seats.take(&from);
        let actor = actor.clone();
        let (answers, mut calls, watch) = session.into_parts::<ReplyFrame, CallFrame>();
        tasks::spawn(async move {
            // The end of `watch` would be this process's death notice.
            loop {
                let received = tokio::select! {
                    received = calls.recv() => received,
                    () = seat.taken() => {
                        watch.close("too many sessions of this identity, and this was the oldest");
                        break;
                    }
                };
                match received {
                    Ok(Some(frame)) => {
                        let (from, answers) = (from.clone(), answers.clone());
                        let call = CallIn { session: number, from, frame, answers };
                        if actor.send(call).await.is_err() {
                            return;
                        }
                    }
                    Ok(None) => break,
                    Err(e) => {
                        tracing::debug!(caller = %from, error = %e, "caller is gone");
                        break;
                    }
                }
            }
            let _ = actor.send(CallsGone { session: number }).await;
            drop(watch);
        });
    }

    /// Numbers a call; a session with too many waiting is refused at once.
    pub(crate) fn enter(&mut self, call: &CallIn) -> Option<CallId> {
        let count = self.per_session.entry(call.session).or_insert(0);
        if *count >= CALLS_PER_SESSION_MAX {
            let e = Error::new(ErrorKind::Busy, "too many calls of this session wait")
                .with("limit", CALLS_PER_SESSION_MAX);
            answer(&call.answers, call.frame.id, Err(e.to_refusal()));
            return None;
        }
        *count += 1;
        self.next += 1;
        let id = CallId(self.next);
        self.waiting.insert(
            id,
            Waiting { session: call.session, id: call.frame.id, answers: call.answers.clone() },
        );
        Some(id)
    }

    /// Answers a call.
    pub(crate) fn reply(&mut self, call: CallId, reply: Result<Reply, Refusal>) {
        let Some(w) = self.waiting.remove(&call) else { return };
        if let Some(count) = self.per_session.get_mut(&w.session) {
            *count -= 1;
        }
        answer(&w.answers, w.id, reply);
    }

    /// The calls of a session that is gone.
    pub(crate) fn gone(&mut self, session: u64) -> Vec<CallId> {
        self.per_session.remove(&session);
        let gone: Vec<CallId> =
            self.waiting.iter().filter(|(_, w)| w.session == session).map(|(&c, _)| c).collect();
        for call in &gone {
            self.waiting.remove(call);
        }
        gone
    }
}

fn answer(answers: &FrameSender<ReplyFrame>, id: u64, reply: Result<Reply, Refusal>) {
    if let Err(refusal) = &reply {
        metrics::counter!("kvlane_calls_refused_total", "why" => refusal.kind.code()).increment(1);
    }
    if let Err(e) = answers.try_send(&ReplyFrame { id, reply }) {
        // The caller repeats the call with its key, or has gone.
        metrics::counter!("kvlane_answers_lost_total").increment(1);
        tracing::debug!(error = %e, "an answer could not be queued");
    }
}

/// What a prefill worker answers to calls that only a decode takes.
pub(crate) fn not_here(call: &Call) -> Refusal {
    let what = match call {
        Call::Reserve(_) => "reservations",
        _ => "outcomes",
    };
    Error::new(ErrorKind::Unauthorized, format!("{what} are the decode worker's to give"))
        .hint("ask the decode worker of the room")
        .to_refusal()
}
