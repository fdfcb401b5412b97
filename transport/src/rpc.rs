//! Numbered questions and their answers over one session at a time.
//!
//! A [`Client`] owns the session to one target and dials it when there is something to ask. In:
//! questions, each with its own deadline. Out: each question's answer, the target's refusal, or why
//! there is none. Invariants: a question is sent at most once, so repeating is the caller's
//! decision; at most [`IN_FLIGHT_MAX`] wait at a time; when a session ends every question that
//! waits on it fails at once; the session ends when the last clone of the client is dropped.

use std::collections::HashMap;
use std::time::Duration;

use kvlane_proto::msg::Purpose;
use kvlane_proto::msg::call::{Call, CallFrame, Reply, ReplyFrame};
use kvlane_proto::msg::service::{Answer, Ask, ServiceRequest, ServiceResponse};
use kvlane_proto::{
    Blame, Error, ErrorKind, Identity, Incarnation, Refusal, Result, Role, WorkerKey, limits,
};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, timeout_at};

use crate::quic::{Death, Endpoint, Session};
use crate::wire::Message;

/// Questions of one client that may wait for their answers: one for every room of a worker.
pub const IN_FLIGHT_MAX: usize = limits::ROOMS_MAX;
/// Questions of one client that may wait to be sent; more make their askers wait.
pub const QUEUED_MAX: usize = 256;
/// Longest wait for an answer.
pub const WAIT_MAX: Duration = Duration::from_secs(24 * 3600);

/// A family of questions and answers.
pub trait Exchange: Send + 'static {
    /// What is asked.
    type Ask: Clone + Send + 'static;
    /// What is answered.
    type Answer: Send + 'static;
    /// A question as it travels.
    type Request: Message;
    /// An answer as it travels.
    type Response: Message;
    /// What the session is for.
    const PURPOSE: Purpose;
    /// Puts a number on a question.
    fn request(id: u64, ask: Self::Ask) -> Self::Request;
    /// Takes the number off an answer.
    fn response(response: Self::Response) -> (u64, Result<Self::Answer, Refusal>);
}

/// Anybody to the bootstrap service.
#[derive(Debug)]
pub enum ServiceExchange {}

impl Exchange for ServiceExchange {
    type Ask = Ask;
    type Answer = Answer;
    type Request = ServiceRequest;
    type Response = ServiceResponse;
    const PURPOSE: Purpose = Purpose::Service;
    fn request(id: u64, ask: Ask) -> ServiceRequest {
        ServiceRequest { id, ask }
    }
    fn response(r: ServiceResponse) -> (u64, Result<Answer, Refusal>) {
        (r.id, r.answer)
    }
}

/// Router or admin to worker.
#[derive(Debug)]
pub enum CallExchange {}

impl Exchange for CallExchange {
    type Ask = Call;
    type Answer = Reply;
    type Request = CallFrame;
    type Response = ReplyFrame;
    const PURPOSE: Purpose = Purpose::Call;
    fn request(id: u64, call: Call) -> CallFrame {
        CallFrame { id, call }
    }
    fn response(r: ReplyFrame) -> (u64, Result<Reply, Refusal>) {
        (r.id, r.reply)
    }
}

/// Whom a client talks to.
#[derive(Clone, Debug)]
pub struct Target {
    /// `host:port` of its QUIC endpoint.
    pub address: String,
    /// Who must answer there, where that is known.
    pub expects: Option<Identity>,
    /// Which start of it, where that matters: another one is refused with `stale_incarnation`.
    pub incarnation: Option<Incarnation>,
    /// The role that must answer there.
    pub role: Role,
}

/// Why a question has no answer.
#[derive(Debug)]
pub enum Failure {
    /// The target answered, and refused.
    Refused(Error),
    /// It never left, so it changed nothing: nobody (or somebody else) is at the address, or too
    /// many questions wait.
    Unsent(Error),
    /// It may or may not have arrived: there was no answer in time, or the session ended.
    Lost(Error),
}

impl Failure {
    /// The error, whichever it is.
    pub fn error(&self) -> &Error {
        match self {
            Self::Refused(e) | Self::Unsent(e) | Self::Lost(e) => e,
        }
    }
}

impl From<Failure> for Error {
    fn from(f: Failure) -> Self {
        match f {
            Failure::Refused(e) | Failure::Unsent(e) | Failure::Lost(e) => e,
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.error().fmt(f)
    }
}

/// How much longer than its deadline a question waits to hear whether it was sent.
const GRACE: Duration = Duration::from_millis(20);

type Asker<E> = oneshot::Sender<Result<<E as Exchange>::Answer, Failure>>;

struct Question<E: Exchange> {
    ask: E::Ask,
    deadline: Instant,
    reply: Asker<E>,
}

/// A client of one target. Cheap to clone; clones share the session.
pub struct Client<E: Exchange> {
    questions: mpsc::Sender<Question<E>>,
    sessions: watch::Receiver<Sessions>,
    target: Target,
}

/// The sessions of a client so far.
#[derive(Clone, Debug, Default)]
pub struct Sessions {
    /// How many there have been.
    pub count: u64,
    /// Who answers, while there is one.
    pub peer: Option<WorkerKey>,
}

impl<E: Exchange> Clone for Client<E> {
    fn clone(&self) -> Self {
        Self {
            questions: self.questions.clone(),
            sessions: self.sessions.clone(),
            target: self.target.clone(),
        }
    }
}

impl<E: Exchange> std::fmt::Debug for Client<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("target", &self.target).finish_non_exhaustive()
    }
}

impl<E: Exchange> Client<E> {
    /// A client that dials on its first question. Must be called within a tokio runtime, on which
    /// its task runs until the last clone is dropped.
    pub fn new(endpoint: Endpoint, target: Target) -> Self {
        let (questions, inbox) = mpsc::channel(QUEUED_MAX);
        let (state, sessions) = watch::channel(Sessions::default());
        tokio::spawn(run::<E>(endpoint, target.clone(), inbox, state));
        Self { questions, sessions, target }
    }

    /// Whom this client talks to.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The sessions so far; changes when one begins or ends.
    pub fn sessions(&self) -> watch::Receiver<Sessions> {
        self.sessions.clone()
    }

    /// Asks, and waits for the answer at most `wait` ([`WAIT_MAX`]).
    ///
    /// # Errors
    /// [`Failure`]: the target's refusal, or why there is no answer and whether it was asked.
    pub async fn ask(&self, ask: E::Ask, wait: Duration) -> Result<E::Answer, Failure> {
        let wait = wait.min(WAIT_MAX);
        let deadline = Instant::now() + wait;
        let (reply, answer) = oneshot::channel();
        let question = Question { ask, deadline, reply };
        let late = || self.target.late("no answer in time").with("wait_ms", wait.as_millis());
        match timeout_at(deadline, self.questions.send(question)).await {
            Err(_) => return Err(Failure::Unsent(late())),
            Ok(Err(_)) => return Err(Failure::Unsent(self.target.ended())),
            Ok(Ok(())) => {}
        }
        match timeout_at(deadline + GRACE, answer).await {
            Err(_) => Err(Failure::Lost(late())),
            Ok(Err(_)) => Err(Failure::Lost(self.target.ended())),
            Ok(Ok(answer)) => answer,
        }
    }
}

impl Target {
    fn name(&self) -> String {
        self.expects.as_ref().map_or_else(|| format!("any {}", self.role), ToString::to_string)
    }
    fn blame(&self) -> Blame {
        match self.role {
            Role::Prefill => Blame::Prefill,
            Role::Decode => Blame::Decode,
            Role::Service => Blame::Service,
            Role::Router | Role::Admin => Blame::Caller,
        }
    }
    fn late(&self, what: &str) -> Error {
        Error::new(ErrorKind::DeadlineExceeded, what)
            .blamed(self.blame())
            .with("asked", self.name())
            .with("address", &self.address)
    }
    fn ended(&self) -> Error {
        Error::new(ErrorKind::PeerLost, "the session ended before the answer")
            .blamed(self.blame())
            .with("asked", self.name())
            .with("address", &self.address)
    }
    /// Whether the peer that answered is the one that is meant.
    fn check(&self, peer: &WorkerKey) -> Result<()> {
        let wrong = |kind, what: &str| {
            Error::new(kind, what)
                .blamed(self.blame())
                .with("address", &self.address)
                .with("found", peer)
        };
        if peer.identity.role != self.role
            || self.expects.as_ref().is_some_and(|e| *e != peer.identity)
        {
            return Err(wrong(
                ErrorKind::IdentityMismatch,
                "somebody else answers at this address",
            )
            .with("expected", self.name())
            .hint("the address is stale or the configuration wrong"));
        }
        if let Some(expected) = self.incarnation.filter(|i| *i != peer.incarnation) {
            return Err(wrong(ErrorKind::StaleIncarnation, "the worker has restarted")
                .with("expected", expected)
                .hint("read the registry again for the new start"));
        }
        Ok(())
    }
}

async fn run<E: Exchange>(
    endpoint: Endpoint,
    target: Target,
    mut inbox: mpsc::Receiver<Question<E>>,
    state: watch::Sender<Sessions>,
) {
    let mut unsent = None;
    loop {
        let next = match unsent.take() {
            Some(question) => Some(question),
            None => inbox.recv().await,
        };
        let Some(question) = next else { return };
        if question.reply.is_closed() {
            continue;
        }
        let dial = endpoint.dial(&target.address, target.expects.as_ref(), E::PURPOSE);
        let session = match timeout_at(question.deadline, dial).await {
            Err(_) => Err(target.late("it could not be dialled in time")),
            Ok(dialled) => dialled.and_then(|s| target.check(&s.peer).map(|()| s)),
        };
        match session {
            Err(e) => {
                metrics::counter!("kvlane_rpc_dials_failed_total", "kind" => e.kind().code())
                    .increment(1);
                let _ = question.reply.send(Err(Failure::Unsent(e)));
            }
            Ok(session) => {
                let peer = session.peer.clone();
                state.send_modify(|s| *s = Sessions { count: s.count + 1, peer: Some(peer) });
                let end = serve::<E>(session, question, &target, &mut inbox).await;
                state.send_modify(|s| s.peer = None);
                match end {
                    End::NobodyAsks => return,
                    End::Over(question) => unsent = question,
                }
            }
        }
    }
}

/// How a session ended.
enum End<E: Exchange> {
    /// The last client was dropped.
    NobodyAsks,
    /// It is over; a question that could not be sent on it any more goes to the next.
    Over(Option<Question<E>>),
}

/// Runs one session.
async fn serve<E: Exchange>(
    session: Session,
    first: Question<E>,
    target: &Target,
    inbox: &mut mpsc::Receiver<Question<E>>,
) -> End<E> {
    let (tx, mut rx, mut watch) = session.into_parts::<E::Request, E::Response>();
    let mut pending: HashMap<u64, Asker<E>> = HashMap::new();
    let mut next_id = 1;
    let mut question = Some(first);
    let (why, unsent) = loop {
        if let Some(q) = question.take() {
            if pending.len() >= IN_FLIGHT_MAX {
                // Those whose deadline has passed wait no more.
                pending.retain(|_, reply| !reply.is_closed());
            }
            if pending.len() >= IN_FLIGHT_MAX {
                let e = Error::new(ErrorKind::Busy, "too many questions wait")
                    .blamed(target.blame())
                    .with("asked", target.name())
                    .with("limit", IN_FLIGHT_MAX);
                let _ = q.reply.send(Err(Failure::Unsent(e)));
            } else {
                match tx.try_send(&E::request(next_id, q.ask.clone())) {
                    Ok(()) => drop(pending.insert(next_id, q.reply)),
                    Err(e) if e.kind() == ErrorKind::PeerLost => {
                        break (e.message().to_string(), Some(q));
                    }
                    Err(e) => drop(q.reply.send(Err(Failure::Unsent(e)))),
                }
                next_id += 1;
            }
        }
        // What has come is taken before more is asked of a session that may be over.
        tokio::select! {
            biased;
            received = rx.recv() => match received {
                Ok(Some(response)) => {
                    let (id, answer) = E::response(response);
                    match pending.remove(&id) {
                        Some(reply) => {
                            drop(reply.send(answer.map_err(|r| Failure::Refused(r.into()))));
                        }
                        None => metrics::counter!("kvlane_rpc_unasked_total").increment(1),
                    }
                }
                Ok(None) => break ("it was ended on purpose".to_string(), None),
                Err(e) => break (e.to_string(), None),
            },
            death = watch.died() => match death {
                // The process is probably gone; the next question finds out.
                Death::Notice => break ("its process died".to_string(), None),
                Death::Closed { why, .. } => break (why.text, None),
            },
            next = inbox.recv() => match next {
                Some(q) => question = (!q.reply.is_closed()).then_some(q),
                None => return End::NobodyAsks,
            },
        }
    };
    watch.close("session given up");
    tracing::debug!(asked = %target.name(), address = %target.address, why, "session ended");
    for (_, reply) in pending {
        let _ = reply.send(Err(Failure::Lost(target.ended().with("why", &why))));
    }
    End::Over(unsent)
}
