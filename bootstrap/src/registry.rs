//! The actor that holds the registry.
//!
//! In: [`Told`] (an event of a session). Out: the answers. It owns the machine, its clock and its
//! timer, nothing else.

use std::collections::HashMap;

use actix::{Actor, AsyncContext, Context, Handler, Message, SpawnHandle};
use kvlane_proto::msg::service::{Answer, Ask};
use kvlane_proto::registry::{Event, Output, Registry, RegistryConfig};
use kvlane_proto::{Refusal, Time, WorkerKey};
use kvlane_transport::clock;
use tokio::sync::oneshot;

/// What a session tells the registry.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub(crate) enum Told {
    /// A question.
    Ask { from: WorkerKey, ask: Ask, reply: oneshot::Sender<Result<Answer, Refusal>> },
    /// A worker's session ended without a word.
    Lost(WorkerKey),
    /// Panics, as a defect would.
    #[cfg(test)]
    Die,
}

/// The actor.
pub(crate) struct RegistryActor {
    machine: Registry,
    waiting: HashMap<u64, oneshot::Sender<Result<Answer, Refusal>>>,
    next_token: u64,
    timer: Option<(Time, SpawnHandle)>,
}

impl RegistryActor {
    pub(crate) fn new(cfg: RegistryConfig) -> Self {
        Self { machine: Registry::new(cfg), waiting: HashMap::new(), next_token: 0, timer: None }
    }

    /// Does what the machine wants and sets the timer.
    fn pump(&mut self, ctx: &mut Context<Self>) {
        while let Some(Output::Answer { token, answer }) = self.machine.poll_output() {
            if let Err(refusal) = &answer {
                metrics::counter!("kvlane_bootstrap_refusals_total", "kind" => refusal.kind.code())
                    .increment(1);
            }
            if let Some(reply) = self.waiting.remove(&token) {
                // The session may have ended meanwhile.
                let _ = reply.send(answer);
            }
        }
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
            this.pump(ctx);
        });
        self.timer = Some((at, handle));
    }
}

impl Actor for RegistryActor {
    type Context = Context<Self>;
    fn started(&mut self, ctx: &mut Self::Context) {
        self.pump(ctx);
    }
}

impl Handler<Told> for RegistryActor {
    type Result = ();
    fn handle(&mut self, told: Told, ctx: &mut Self::Context) {
        let event = match told {
            Told::Ask { from, ask, reply } => {
                self.next_token += 1;
                self.waiting.insert(self.next_token, reply);
                Event::Ask { token: self.next_token, from, ask }
            }
            Told::Lost(key) => Event::Lost(key),
            #[cfg(test)]
            Told::Die => panic!("told to"),
        };
        self.machine.handle_event(clock::now(), event);
        self.pump(ctx);
    }
}
