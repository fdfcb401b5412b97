//! The coordinator's two tasks: one keeps the snapshot and the issuer slot fresh, one tells aborts.

use std::sync::Arc;
use std::time::Duration;

use kvlane_proto::lease::{Event, Holder, LeaseConfig, Output};
use kvlane_proto::msg::call::Call;
use kvlane_proto::msg::service::WorkerAddress;
use kvlane_proto::{Blame, Error, ErrorKind, Refusal, Result, RoomId, limits};
use kvlane_transport::clock;
use kvlane_transport::random::random;
use kvlane_transport::rpc::Failure;
use kvlane_transport::service_client::ServiceClient;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use crate::handoff::AbortOrder;
use crate::view::Follower;
use crate::{CoordinatorConfig, Shared, Workers, lock};

/// Another order is taken while fewer workers than this are being told.
const ABORTS_AT_A_TIME: usize = 64;

/// How far a coordinator has come.
#[derive(Clone, Debug, Default)]
pub(crate) struct Start {
    slot: bool,
    view: bool,
    last_failure: Option<Refusal>,
}

pub(crate) async fn wait_for_start(
    mut started: watch::Receiver<Start>,
    cfg: &CoordinatorConfig,
) -> Result<()> {
    let limit = Duration::from_millis(cfg.connect_ms);
    let hopeless = |s: &Start| {
        s.last_failure
            .as_ref()
            .is_some_and(|r| matches!(r.kind, ErrorKind::Unauthorized | ErrorKind::VersionMismatch))
    };
    let done = started.wait_for(|s| (s.slot && s.view) || hopeless(s));
    let outcome = tokio::time::timeout(limit, done).await.map(|r| r.is_ok());
    let now = started.borrow().clone();
    match outcome {
        Ok(true) if now.slot && now.view => Ok(()),
        Ok(true) => Err(now.last_failure.map_or_else(
            || Error::new(ErrorKind::Internal, "the coordinator did not start"),
            Error::from,
        )),
        Ok(false) => Err(Error::new(ErrorKind::Internal, "the coordinator's keeper has ended")),
        Err(_) => {
            let found = now.last_failure.map_or("no answer".into(), |r| r.to_string());
            Err(Error::new(ErrorKind::DeadlineExceeded, "the bootstrap service cannot be used")
                .blamed(Blame::Service)
                .with("service", &cfg.service)
                .with("limit_ms", cfg.connect_ms)
                .with("found", found)
                .hint("is the service up, and is this its address?"))
        }
    }
}

/// Keeps the snapshot and the slot fresh until it is aborted.
pub(crate) async fn keep(shared: Arc<Shared>, service: ServiceClient, start: watch::Sender<Start>) {
    let refresh = Duration::from_millis(shared.cfg.refresh_ms.max(10));
    let mut follower = Follower::default();
    let mut slot = Holder::new(LeaseConfig::default(), clock::now());
    let mut next = Instant::now();
    loop {
        slot.handle_timeout(clock::now());
        if shared.issuer.to_renew().is_some_and(|(_, short)| short) {
            slot.handle_event(clock::now(), Event::Hurry);
        }
        while let Some(output) = slot.poll_output() {
            keep_slot(&shared, &service, &start, &mut slot, output).await;
        }
        if let Err(e) = follow(&shared, &service, &mut follower).await {
            metrics::counter!("kvlane_coordinator_refresh_failures_total").increment(1);
            tracing::debug!(error = %e, "snapshot not refreshed");
            start.send_modify(|s| s.last_failure = Some(e.to_refusal()));
        } else {
            start.send_if_modified(|s| !std::mem::replace(&mut s.view, true));
        }
        next = (next + refresh).max(Instant::now());
        let wake =
            slot.poll_timeout().map_or(next, |t| next.min(Instant::now() + clock::now().until(t)));
        tokio::select! {
            () = sleep_until(wake) => {}
            () = shared.hurry.notified() => {}
        }
    }
}

async fn keep_slot(
    shared: &Shared,
    service: &ServiceClient,
    start: &watch::Sender<Start>,
    slot: &mut Holder,
    output: Output,
) {
    let (request, renew, more) = match (output, shared.issuer.to_renew()) {
        (Output::Renew { request }, Some((held, short))) => (request, Some(held), short),
        (Output::Renew { request } | Output::Acquire { request }, _) => (request, None, false),
        (Output::Held, _) => return,
        (Output::Expired, _) => {
            return tracing::warn!(
                "the issuer slot's lease is over; no rooms until there is another"
            );
        }
        // Slots are leased to one start of a router, so no other can take them.
        (Output::Superseded, _) => return tracing::error!("the issuer slot was taken away"),
    };
    let sent = clock::now();
    let event = match service.issuer_slot(renew, more).await {
        Ok(given) => {
            shared.issuer.take(given, sent);
            start.send_if_modified(|s| !std::mem::replace(&mut s.slot, true));
            Event::Granted { request, lease_ms: given.lease_ms }
        }
        Err(e) => {
            tracing::warn!(error = %e, "issuer slot not leased");
            metrics::counter!("kvlane_lease_failures_total", "kind" => e.kind().code())
                .increment(1);
            start.send_modify(|s| s.last_failure = Some(e.to_refusal()));
            Event::Failed { request, kind: e.kind(), jitter: random() }
        }
    };
    slot.handle_event(clock::now(), event);
}

/// Reads the registry's log to its end and publishes what changed.
async fn follow(shared: &Shared, service: &ServiceClient, follower: &mut Follower) -> Result<()> {
    let read = async {
        loop {
            let page = service.list(follower.cursor()).await?;
            let more = page.more;
            {
                // Who has said how it is doing needs no guess any more.
                let mut recent = lock(&shared.recent);
                for w in &page.workers {
                    recent.said(&w.registration.worker.key.identity);
                }
            }
            follower.take(clock::now(), page, limits::WORKER_LEASE_MS);
            if !more {
                return Ok(());
            }
        }
    }
    .await;
    follower.expire(clock::now());
    if let Some(view) = follower.snapshot() {
        shared.workers.keep_only(&view);
        shared.view.send_replace(view);
    }
    read
}

/// Tells workers of aborts, until nobody can order one any more.
pub(crate) async fn tell_aborts(
    workers: Arc<Workers>,
    mut orders: mpsc::Receiver<AbortOrder>,
    call: Duration,
    tries: u32,
) {
    let mut telling = JoinSet::new();
    loop {
        let order = tokio::select! {
            order = orders.recv(), if telling.len() < ABORTS_AT_A_TIME => order,
            Some(_) = telling.join_next(), if !telling.is_empty() => continue,
        };
        let Some(AbortOrder { room, workers: told, reason }) = order else { break };
        for worker in told {
            let (workers, reason) = (Arc::clone(&workers), reason.clone());
            telling.spawn(async move { tell(&workers, (room, worker), reason, call, tries).await });
        }
    }
    while telling.join_next().await.is_some() {}
}

async fn tell(
    workers: &Workers,
    (room, worker): (RoomId, WorkerAddress),
    reason: String,
    call: Duration,
    tries: u32,
) {
    for _ in 0..tries {
        let ask = Call::Abort { room, reason: reason.clone() };
        match workers.client(&worker).ask(ask, call).await {
            Ok(_) => return,
            Err(Failure::Unsent(e)) if e.kind() == ErrorKind::StaleIncarnation => {
                // Another start of the worker knows nothing of the room.
                return tracing::debug!(%room, error = %e, "nothing to abort");
            }
            Err(Failure::Refused(e)) => {
                return tracing::debug!(%room, worker = %worker.key, error = %e, "abort refused");
            }
            Err(e) => tracing::debug!(%room, worker = %worker.key, error = %e, "abort not told"),
        }
    }
    metrics::counter!("kvlane_coordinator_aborts_lost_total").increment(1);
}
