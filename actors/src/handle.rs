//! What the handle of every worker can do, whichever its role.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use kvlane_proto::msg::service::{Load, WorkerAddress};
use kvlane_proto::{Blame, Error, ErrorKind, Layout, Refusal, Result, Role};
use tokio::sync::{Semaphore, watch};

use crate::runtime::{About, Running, Stop, WorkerEnd};
use crate::shell::{Drain, Side, Worker};

/// Calls of one worker's handles that may wait for its actor.
const CALLS_MAX: usize = 1024;
/// How long the actor may take to answer a call of its own process.
const CALL_MS: u64 = 5_000;

/// A running worker. Clones are cheap; async methods need a tokio runtime, any.
#[derive(Clone)]
pub struct WorkerHandle {
    drain: Recipient<Drain>,
    stop: Recipient<Stop>,
    about: About,
    room: Arc<Semaphore>,
}

impl WorkerHandle {
    pub(crate) fn new<S: Side>(running: Running<Worker<S>>) -> Self {
        let Running { actor, about } = running;
        let room = Arc::new(Semaphore::new(CALLS_MAX));
        Self { drain: actor.clone().recipient(), stop: actor.recipient(), about, room }
    }
    /// Takes no new rooms from here on; rooms that have begun go on.
    ///
    /// # Errors
    /// If the worker has ended.
    pub async fn drain(&self) -> Result<()> {
        self.asked(self.drain.send(Drain)).await
    }
    /// Ends the worker. Rooms that still run are lost, and blocks lent to them: drain first.
    pub async fn stop(&self) -> WorkerEnd {
        let role = self.about.address.key.identity.role;
        let side = if role == Role::Prefill { Blame::Prefill } else { Blame::Decode };
        let why = Refusal::new(ErrorKind::Draining, format!("the {role} worker stops"));
        let _ = self.asked(self.stop.send(Stop(why.blamed(side)))).await;
        self.ended().await
    }
    /// Waits for the worker's end.
    pub async fn ended(&self) -> WorkerEnd {
        self.about.ended().await
    }
    /// Waits until the worker is registered at the service.
    ///
    /// # Errors
    /// [`ErrorKind::DeadlineExceeded`] after `wait`.
    pub async fn registered(&self, wait: Duration) -> Result<()> {
        self.about.registered(wait).await
    }
    /// Who this start of the worker is and where it listens.
    pub fn address(&self) -> &WorkerAddress {
        &self.about.address
    }
    /// Geometry of its pools.
    pub fn pools(&self) -> &[Layout] {
        &self.about.pools
    }
    /// How busy it is; O(1).
    pub fn load(&self) -> Load {
        *self.about.load.borrow()
    }
    /// Follows how busy it is.
    pub fn loads(&self) -> watch::Receiver<Load> {
        self.about.load.clone()
    }

    /// Connections and their writers that the worker's thread looks after, as tasks. What it starts
    /// for itself (readers, dials) is the gauge `kvlane_tasks`.
    pub fn tasks(&self) -> usize {
        self.about.runtime.metrics().num_alive_tasks()
    }

    /// Waits for the actor's answer: a few at a time, and not for ever.
    pub(crate) async fn asked<T>(
        &self,
        answer: impl Future<Output = Result<T, MailboxError>>,
    ) -> Result<T> {
        let answered = async {
            let _permit = self.room.acquire().await.map_err(|_| gone())?;
            answer.await.map_err(|_| gone())
        };
        tokio::time::timeout(Duration::from_millis(CALL_MS), answered).await.unwrap_or_else(|_| {
            Err(Error::new(ErrorKind::DeadlineExceeded, "the worker did not answer in time")
                .with("worker", &self.about.address.key)
                .with("limit_ms", CALL_MS))
        })
    }
}

impl fmt::Debug for WorkerHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WorkerHandle").field(&self.about.address.key).finish()
    }
}

/// The error of everything that asks a worker which is not there any more.
pub(crate) fn gone() -> Error {
    Error::new(ErrorKind::Internal, "the worker has ended")
        .hint("see why in `ended()`, and start it again")
}
