//! The client of the bootstrap service: typed questions, and a worker's registration kept alive.
//!
//! [`ServiceClient`] asks; [`keep_registered`] drives the machine of [`kvlane_proto::lease`] for a
//! worker. Both survive a restart of the service: the next question dials again.

use std::time::Duration;

use kvlane_proto::layout::Difference;
use kvlane_proto::lease::{Event, Holder, LeaseConfig, Output};
use kvlane_proto::msg::service::{Answer, Ask, Cursor, Load, Registration, WorkerView};
use kvlane_proto::{Blame, Error, ErrorKind, Identity, Result, Role};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::clock;
use crate::quic::Endpoint;
pub use crate::random::{fill_random, random};
use crate::rpc::{Client, ServiceExchange, Sessions, Target};

/// How long one question to the service may take.
pub const ASK_MS: u64 = 2_000;

/// A client of the bootstrap service. Cheap to clone; clones share the session.
#[derive(Clone, Debug)]
pub struct ServiceClient {
    client: Client<ServiceExchange>,
}

/// The service's answer to a registration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registered {
    /// Length of the lease, counted from when the request was sent.
    pub lease_ms: u64,
    /// Orders the incarnations of one identity.
    pub epoch: u64,
    /// Workers of the other role that fit.
    pub fits: Vec<Identity>,
    /// Workers of the other role that do not, with the fields that differ (ours first).
    pub differs: Vec<(Identity, Vec<Difference>)>,
    /// Workers that the two lists leave off.
    pub left_off: u32,
}

/// A page of the registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// What to ask for next.
    pub next: Cursor,
    /// Forget what earlier pages said.
    pub reset: bool,
    /// Workers that changed.
    pub workers: Vec<WorkerView>,
    /// Another page follows at once.
    pub more: bool,
}

/// An issuer slot and the counters to use with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IssuerSlot {
    /// The slot.
    pub slot: u16,
    /// The first counter.
    pub first_counter: u64,
    /// How many from there on.
    pub counters: u64,
    /// Length of the lease, counted from when the request was sent.
    pub lease_ms: u64,
}

impl ServiceClient {
    /// A client of the service at `address` (`host:port`); dials on its first question. Must be
    /// called within a tokio runtime.
    pub fn new(endpoint: Endpoint, address: impl Into<String>) -> Self {
        let target = Target {
            address: address.into(),
            expects: None,
            incarnation: None,
            role: Role::Service,
        };
        Self { client: Client::new(endpoint, target) }
    }

    /// The sessions so far; a new one may be with a service that has forgotten everything.
    pub fn sessions(&self) -> watch::Receiver<Sessions> {
        self.client.sessions()
    }

    /// Asks anything.
    ///
    /// # Errors
    /// The service's refusal, or as [`Client::ask`].
    pub async fn ask(&self, ask: Ask) -> Result<Answer> {
        Ok(self.client.ask(ask, Duration::from_millis(ASK_MS)).await?)
    }

    /// Registers a worker.
    ///
    /// # Errors
    /// As [`ServiceClient::ask`].
    pub async fn register(&self, registration: Registration) -> Result<Registered> {
        match self.ask(Ask::Register(Box::new(registration))).await? {
            Answer::Registered { lease_ms, epoch, fits, differs, left_off } => {
                Ok(Registered { lease_ms, epoch, fits, differs, left_off })
            }
            other => Err(unexpected("register", &other)),
        }
    }

    /// Renews a registration; returns the length of the lease.
    ///
    /// # Errors
    /// As [`ServiceClient::ask`].
    pub async fn renew(&self, load: Load) -> Result<u64> {
        match self.ask(Ask::Renew(load)).await? {
            Answer::Renewed { lease_ms } => Ok(lease_ms),
            other => Err(unexpected("renew", &other)),
        }
    }

    /// Ends a registration.
    ///
    /// # Errors
    /// As [`ServiceClient::ask`].
    pub async fn deregister(&self) -> Result<()> {
        match self.ask(Ask::Deregister).await? {
            Answer::Deregistered => Ok(()),
            other => Err(unexpected("deregister", &other)),
        }
    }

    /// The next page of workers.
    ///
    /// # Errors
    /// As [`ServiceClient::ask`].
    pub async fn list(&self, after: Cursor) -> Result<Page> {
        match self.ask(Ask::List { after }).await? {
            Answer::Workers { next, reset, workers, more } => {
                Ok(Page { next, reset, workers, more })
            }
            other => Err(unexpected("list", &other)),
        }
    }

    /// Leases a slot for room numbers, or renews one.
    ///
    /// # Errors
    /// As [`ServiceClient::ask`].
    pub async fn issuer_slot(&self, renew: Option<u16>, more_counters: bool) -> Result<IssuerSlot> {
        match self.ask(Ask::IssuerSlot { renew, more_counters }).await? {
            Answer::Slot { slot, first_counter, counters, lease_ms } => {
                Ok(IssuerSlot { slot, first_counter, counters, lease_ms })
            }
            other => Err(unexpected("issuer_slot", &other)),
        }
    }
}

fn unexpected(asked: &'static str, answer: &Answer) -> Error {
    let found = match answer {
        Answer::Registered { .. } => "registered",
        Answer::Renewed { .. } => "renewed",
        Answer::Deregistered => "deregistered",
        Answer::Workers { .. } => "workers",
        Answer::Slot { .. } => "slot",
    };
    Error::new(ErrorKind::Malformed, "the service answered another question")
        .blamed(Blame::Service)
        .with("asked", asked)
        .with("found", found)
}

/// What a worker's registration is doing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RegistrationState {
    /// Not registered (yet, or the lease ran out); it is being asked for.
    #[default]
    Pending,
    /// The lease runs; the last answer to a registration.
    Registered(Registered),
    /// Another start of this worker has registered. This one has to stop.
    Superseded,
}

/// Keeps a worker registered until `loads` is closed (which deregisters it) or another start of it
/// takes over. `loads` holds what to say with each renewal, and a change of
/// [`Load::draining`] is said at once.
///
/// # Errors
/// The service's refusal when another start has taken over.
pub async fn keep_registered(
    client: ServiceClient,
    registration: Registration,
    cfg: LeaseConfig,
    mut loads: watch::Receiver<Load>,
    state: watch::Sender<RegistrationState>,
) -> Result<()> {
    let mut holder = Holder::new(cfg, clock::now());
    holder.handle_timeout(clock::now());
    let mut sessions = client.sessions();
    let mut said_draining = false;
    // The session that the lease was last granted on.
    let mut granted_on = 0;
    loop {
        while let Some(output) = holder.poll_output() {
            // No request outlives the lease that it is to keep, so its end is said in time.
            let now = clock::now();
            let answer = Duration::from_millis(cfg.answer_ms);
            let wait = holder.held_until().map_or(answer, |u| now.until(u).min(answer));
            let (request, asked) = match output {
                Output::Acquire { request } => {
                    let asked = timeout(wait, client.register(registration.clone())).await;
                    let asked = asked.map(|r| {
                        r.map(|registered| {
                            let lease_ms = registered.lease_ms;
                            state.send_replace(RegistrationState::Registered(registered));
                            lease_ms
                        })
                    });
                    (request, asked)
                }
                Output::Renew { request } => {
                    let load = *loads.borrow_and_update();
                    said_draining = load.draining;
                    (request, timeout(wait, client.renew(load)).await)
                }
                // A registration says nothing about the load.
                Output::Held => {
                    holder.handle_event(now, Event::Hurry);
                    continue;
                }
                Output::Expired => {
                    state.send_replace(RegistrationState::Pending);
                    continue;
                }
                Output::Superseded => {
                    state.send_replace(RegistrationState::Superseded);
                    return Err(Error::new(
                        ErrorKind::StaleIncarnation,
                        "another start of this worker has registered since",
                    )
                    .with("worker", &registration.worker.key)
                    .hint("stop this process, or give the workers different names"));
                }
            };
            let event = match asked {
                Ok(Ok(lease_ms)) => {
                    granted_on = sessions.borrow().count;
                    Event::Granted { request, lease_ms }
                }
                Ok(Err(e)) => {
                    tracing::warn!(worker = %registration.worker.key, error = %e, "lease request failed");
                    Event::Failed { request, kind: e.kind(), jitter: random() }
                }
                Err(_) => {
                    let kind = ErrorKind::DeadlineExceeded;
                    Event::Failed { request, kind, jitter: random() }
                }
            };
            if let Event::Failed { kind, .. } = event {
                metrics::counter!("kvlane_lease_failures_total", "kind" => kind.code())
                    .increment(1);
            }
            holder.handle_event(clock::now(), event);
        }
        let wake = holder.poll_timeout().map_or(Duration::from_secs(1), |t| clock::now().until(t));
        tokio::select! {
            () = tokio::time::sleep(wake) => holder.handle_timeout(clock::now()),
            changed = sessions.changed() => {
                if changed.is_err() {
                    return Err(Error::new(ErrorKind::Internal, "the service's client has ended"));
                }
                let now = sessions.borrow_and_update().clone();
                if now.peer.is_none() && now.count == granted_on {
                    // Perhaps the service restarted, and has forgotten this worker. Once only: a
                    // service that ends every session at once is met with the usual back-off.
                    granted_on = 0;
                    holder.handle_event(clock::now(), Event::Hurry);
                }
            },
            changed = loads.changed() => match changed {
                Ok(()) if loads.borrow().draining != said_draining => {
                    holder.handle_event(clock::now(), Event::Hurry);
                }
                Ok(()) => {}
                Err(_) => {
                    let _ = client.deregister().await;
                    state.send_replace(RegistrationState::Pending);
                    return Ok(());
                }
            },
        }
    }
}
