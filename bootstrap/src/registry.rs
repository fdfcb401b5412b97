//! The actor that holds the registry.
//!
//! In: questions, and sessions that were lost. Out: each question's answer. It owns the machine,
//! its clock and its timer, nothing else.

use actix::{Actor, AsyncContext, Context, Handler, Message, SpawnHandle};
use kvlane_proto::msg::service::{Answer, Ask};
use kvlane_proto::registry::{Registry, RegistryConfig};
use kvlane_proto::{Refusal, Time, WorkerKey};
use kvlane_transport::clock;

/// Somebody asks.
#[derive(Debug, Message)]
#[rtype(result = "Result<Answer, Refusal>")]
pub(crate) struct Question {
    /// Who, as its session proved.
    pub(crate) from: WorkerKey,
    /// What.
    pub(crate) ask: Ask,
}

/// A worker's session ended without a word.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub(crate) struct Lost(pub(crate) WorkerKey);

/// Panics, as a defect would.
#[cfg(test)]
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub(crate) struct Die;

/// The actor.
pub(crate) struct RegistryActor {
    machine: Registry,
    timer: Option<(Time, SpawnHandle)>,
}

impl RegistryActor {
    pub(crate) fn new(cfg: RegistryConfig) -> Self {
        Self { machine: Registry::new(cfg), timer: None }
    }

    /// Says how many there are and sets the timer.
    fn settle(&mut self, ctx: &mut Context<Self>) {
        let counts = self.machine.counts();
        metrics::gauge!("kvlane_bootstrap_workers_alive").set(counts.alive as f64);
        metrics::gauge!("kvlane_bootstrap_workers_known").set(counts.known as f64);
        metrics::gauge!("kvlane_bootstrap_issuer_slots").set(counts.slots as f64);

        // A timer that rings early is cheap, so only an earlier moment moves it.
        let Some(at) = self.machine.poll_timeout() else { return };
        if self.timer.is_some_and(|(set, _)| set <= at) {
            return;
        }
        if let Some((_, old)) = self.timer.take() {
            ctx.cancel_future(old);
        }
        let handle = ctx.run_later(clock::now().until(at), |this, ctx| {
            this.timer = None;
            this.machine.handle_timeout(clock::now());
            this.settle(ctx);
        });
        self.timer = Some((at, handle));
    }
}

impl Actor for RegistryActor {
    type Context = Context<Self>;
    fn started(&mut self, ctx: &mut Self::Context) {
        self.settle(ctx);
    }
}

impl Handler<Question> for RegistryActor {
    type Result = Result<Answer, Refusal>;
    fn handle(
        &mut self,
        Question { from, ask }: Question,
        ctx: &mut Self::Context,
    ) -> Self::Result {
        let leaves = matches!(ask, Ask::Deregister);
        let answer = self.machine.ask(clock::now(), &from, ask);
        match &answer {
            Ok(Answer::Registered { fits, differs, epoch, .. }) => {
                tracing::info!(worker = %from, epoch, fits = fits.len(), "worker has registered");
                if let (true, Some((other, fields))) = (fits.is_empty(), differs.first()) {
                    let fields: Vec<String> = fields
                        .iter()
                        .map(|d| format!("{}: {} / {}", d.field, d.here, d.there))
                        .collect();
                    tracing::warn!(
                        worker = %from, %other, differs = fields.join(", "),
                        "worker fits nobody of the other role"
                    );
                }
            }
            Ok(_) if leaves => tracing::info!(worker = %from, "worker has left"),
            Ok(_) => {}
            Err(e) => tracing::info!(%from, error = %e, "refused"),
        }
        self.settle(ctx);
        answer.map_err(|e| {
            metrics::counter!("kvlane_bootstrap_refusals_total", "kind" => e.kind().code())
                .increment(1);
            e.to_refusal()
        })
    }
}

impl Handler<Lost> for RegistryActor {
    type Result = ();
    fn handle(&mut self, Lost(key): Lost, ctx: &mut Self::Context) {
        tracing::warn!(worker = %key, "a worker's session ended without a word; its lease decides");
        self.machine.lost(clock::now(), &key);
        self.settle(ctx);
    }
}

#[cfg(test)]
impl Handler<Die> for RegistryActor {
    type Result = ();
    fn handle(&mut self, Die: Die, _: &mut Self::Context) {
        panic!("told to");
    }
}
