//! Accepts sessions and runs one task for each.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::mpsc as std_mpsc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use actix::{Actor, Addr};
use kvlane_proto::msg::Purpose;
use kvlane_proto::msg::service::{Answer, Ask, ServiceRequest, ServiceResponse};
use kvlane_proto::{
    Blame, Error, ErrorKind, Identity, Incarnation, Refusal, Result, Role, WorkerKey,
};
use kvlane_transport::quic::{Death, Endpoint, EndpointConfig, Security, Session, tls};
use kvlane_transport::random::fill_random;
use kvlane_transport::seats::{Seat, Seats};
use tokio::sync::oneshot;

use crate::BootstrapConfig;
use crate::registry::{Lost, Question, RegistryActor};

/// How long peers may take to hear that the service stops.
const CLOSE_MS: u64 = 1_000;

/// What every session shares.
struct Shared {
    cfg: BootstrapConfig,
    registry: RefCell<Addr<RegistryActor>>,
    sessions: Cell<usize>,
    seats: RefCell<Seats>,
}

impl Shared {
    fn new(cfg: BootstrapConfig, registry: RefCell<Addr<RegistryActor>>) -> Self {
        let seats = RefCell::new(Seats::new("service", cfg.sessions_per_identity));
        Self { cfg, registry, sessions: Cell::new(0), seats }
    }
}

pub(crate) async fn run(
    cfg: BootstrapConfig,
    ready: std_mpsc::Sender<Result<SocketAddr>>,
    stop: oneshot::Receiver<()>,
) {
    let (endpoint, shared) = match open(cfg) {
        Ok(opened) => opened,
        Err(e) => return drop(ready.send(Err(e))),
    };
    let address = endpoint.local_addr();
    if ready.send(Ok(address)).is_err() {
        return;
    }
    tracing::info!(%address, cluster = %shared.cfg.cluster, "bootstrap service listens");
    let accept_all = async {
        while let Some(session) = endpoint.accept().await {
            accept(&shared, session);
        }
    };
    tokio::select! {
        () = accept_all => tracing::error!("the endpoint closed under the service"),
        // Told to stop, or its handle is gone.
        _ = stop => {}
    }
    let close = endpoint.close("the service stops");
    let _ = tokio::time::timeout(Duration::from_millis(CLOSE_MS), close).await;
}

fn open(cfg: BootstrapConfig) -> Result<(Endpoint, Rc<Shared>)> {
    let identity = identity(&cfg)?;
    let mut start = [0; 16];
    fill_random(&mut start)?;
    let me = WorkerKey { identity, incarnation: Incarnation(start) };
    let endpoint = Endpoint::bind(EndpointConfig::new(cfg.listen, cfg.security.clone(), me))?;
    let registry = RefCell::new(start_registry(&cfg)?);
    Ok((endpoint, Rc::new(Shared::new(cfg, registry))))
}

/// The certificate's identity where there is one, else the configured.
fn identity(cfg: &BootstrapConfig) -> Result<Identity> {
    let Security::Mutual { dir } = &cfg.security else {
        return Identity::new(&cfg.cluster, Role::Service, &cfg.instance, 0);
    };
    let found = tls::identity_of(dir)?;
    if found.role != Role::Service || found.cluster != cfg.cluster {
        return Err(Error::new(ErrorKind::Config, "the certificate is not this service's")
            .with("dir", dir.display())
            .with("found", found)
            .with("expected", format!("{}/{}/…", cfg.cluster, Role::Service))
            .hint("issue a certificate of role service for this cluster"));
    }
    Ok(found)
}

fn start_registry(cfg: &BootstrapConfig) -> Result<Addr<RegistryActor>> {
    let mut random = [0; 8];
    fill_random(&mut random)?;
    // Epochs and counters only have to grow over restarts of a service that has no memory.
    // Microseconds leave every start a million registrations a second before it meets the next
    // one's.
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let started_us = since_1970.as_micros().min(u128::from(u64::MAX >> 1)) as u64;
    Ok(RegistryActor::new(cfg.registry(u64::from_le_bytes(random), started_us)).start())
}

/// Counts a session out when its task ends, however it ends.
struct Place(Rc<Shared>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.sessions.set(self.0.sessions.get() - 1);
        metrics::gauge!("kvlane_bootstrap_sessions").decrement(1.0);
    }
}

fn accept(shared: &Rc<Shared>, session: Session) {
    let refused = |reason: &'static str| {
        metrics::counter!("kvlane_bootstrap_sessions_refused_total", "reason" => reason)
            .increment(1);
    };
    if session.purpose != Purpose::Service {
        // Dropping a session closes it.
        return refused("purpose");
    }
    if shared.sessions.get() >= shared.cfg.sessions_max {
        return refused("full");
    }
    let seat = shared.seats.borrow_mut().take(&session.peer.identity);
    shared.sessions.set(shared.sessions.get() + 1);
    metrics::gauge!("kvlane_bootstrap_sessions").increment(1.0);
    let place = Place(Rc::clone(shared));
    actix::spawn(async move {
        let peer = session.peer.clone();
        let why = serve(&place.0, session, seat).await;
        tracing::debug!(%peer, why = %why.map_or_else(|| "done".into(), |e| e.to_string()), "session ended");
    });
}

/// Runs one session to its end; returns why it ended, unless the peer ended it on purpose.
async fn serve(shared: &Rc<Shared>, session: Session, mut seat: Seat) -> Option<Error> {
    let peer = session.peer.clone();
    let (tx, mut rx, mut watch) = session.into_parts::<ServiceResponse, ServiceRequest>();
    loop {
        let received = tokio::select! {
            received = rx.recv() => received,
            () = seat.taken() => {
                let why = "too many sessions of this identity, and this was the oldest";
                watch.close(why);
                return Some(Error::new(ErrorKind::LimitExceeded, why));
            }
            death = watch.died() => match death {
                // The session may live on; the lease decides about the worker.
                Death::Notice => {
                    suspect(shared, &peer);
                    continue;
                }
                Death::Closed { clean: true, .. } => return None,
                Death::Closed { why, .. } => Err(why.into()),
            },
        };
        let ServiceRequest { id, ask } = match received {
            Ok(Some(request)) => request,
            Ok(None) => return None,
            Err(e) => {
                suspect(shared, &peer);
                return Some(e);
            }
        };
        let answer = ask_registry(shared, &peer, ask).await;
        if let Err(e) = tx.try_send(&ServiceResponse { id, answer }) {
            metrics::counter!("kvlane_bootstrap_sessions_refused_total", "reason" => "stalled")
                .increment(1);
            watch.close("answers are not read");
            return Some(e);
        }
    }
}

async fn ask_registry(shared: &Shared, peer: &WorkerKey, ask: Ask) -> Result<Answer, Refusal> {
    let addr = shared.registry.borrow().clone();
    let answer = addr.send(Question { from: peer.clone(), ask }).await;
    answer.unwrap_or_else(|_| Err(revive(shared, &addr)))
}

fn suspect(shared: &Shared, peer: &WorkerKey) {
    if peer.identity.role.counterpart().is_some() {
        metrics::counter!("kvlane_bootstrap_suspicions_total").increment(1);
        shared.registry.borrow().do_send(Lost(peer.clone()));
    }
}

/// The registry has died of a defect: the first to notice starts an empty one.
fn revive(shared: &Shared, dead: &Addr<RegistryActor>) -> Refusal {
    if *shared.registry.borrow() == *dead {
        metrics::counter!("kvlane_bootstrap_registry_restarts_total").increment(1);
        tracing::error!("the registry died; starting an empty one, workers register again");
        match start_registry(&shared.cfg) {
            Ok(fresh) => drop(shared.registry.replace(fresh)),
            Err(e) => tracing::error!(error = %e, "the registry cannot be started"),
        }
    }
    Error::new(ErrorKind::Internal, "the registry has restarted and forgotten everything")
        .blamed(Blame::Service)
        .hint("register again; nothing that the registry knew is left")
        .to_refusal()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvlane_proto::msg::service::Cursor;

    #[test]
    fn a_registry_that_died_is_replaced_under_another_log() {
        actix::System::new().block_on(async {
            let cfg = BootstrapConfig::new(([127, 0, 0, 1], 0).into(), Security::Insecure, "c");
            let registry = RefCell::new(start_registry(&cfg).unwrap());
            let shared = Shared::new(cfg, registry);
            let reader = WorkerKey {
                identity: Identity::new("c", Role::Router, "r", 0).unwrap(),
                incarnation: Incarnation([0; 16]),
            };
            let list = async || {
                ask_registry(&shared, &reader, Ask::List { after: Cursor::default() }).await
            };
            let log = |answer| match answer {
                Ok(Answer::Workers { next, .. }) => next.log,
                other => panic!("{other:?}"),
            };
            let first = log(list().await);
            assert_eq!(log(list().await), first);
            shared.registry.borrow().do_send(crate::registry::Die);
            assert_eq!(list().await.unwrap_err().kind, ErrorKind::Internal);
            assert_ne!(log(list().await), first);
        });
    }
}
