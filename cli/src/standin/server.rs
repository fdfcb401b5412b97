//! Takes legs.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kvlane_proto::{Error, ErrorKind, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

use super::legs::{LegReply, LegRequest, read_line};
use super::{Model, Worker, decode, faults, holds, prefill};
use crate::report::json_line;

/// Legs at a time.
const LEGS_MAX: usize = 4096;
/// How long a leg's line may take.
const LINE: Duration = Duration::from_secs(10);

/// The stand-in's port.
pub(crate) struct Server {
    listener: TcpListener,
    address: SocketAddr,
    /// Legs that were read and have no answer yet.
    legs: watch::Sender<usize>,
}

impl Server {
    pub(crate) async fn bind(address: SocketAddr) -> Result<Self> {
        let failed = |e| {
            Error::new(ErrorKind::Io, "cannot listen for requests")
                .with("address", address)
                .hint("give --serving an address of this host and a port that is free")
                .caused_by(e)
        };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Self { listener, address, legs: watch::Sender::new(0) })
    }
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
    /// Waits until every leg has its answer.
    pub(crate) async fn idle(&self) {
        // The sender is here.
        let _ = self.legs.subscribe().wait_for(|&legs| legs == 0).await;
    }
    /// Serves for ever.
    pub(crate) async fn run(&self, worker: &Worker, model: &Model) {
        let room = Arc::new(Semaphore::new(LEGS_MAX));
        loop {
            let stream = match self.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(e) => {
                    tracing::warn!(error = %e, "cannot accept a leg");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let Ok(permit) = room.clone().try_acquire_owned() else {
                tracing::warn!(limit = LEGS_MAX, "too many legs at a time; one is refused");
                continue;
            };
            let (worker, model, legs) = (worker.clone(), model.clone(), self.legs.clone());
            tokio::spawn(async move {
                if let Err(e) = leg(stream, &worker, &model, &legs).await {
                    tracing::warn!(error = %e, "leg has failed");
                }
                drop(permit);
            });
        }
    }
}

/// Counts a leg while it lives.
struct Counted<'a>(&'a watch::Sender<usize>);

impl<'a> Counted<'a> {
    fn new(legs: &'a watch::Sender<usize>) -> Self {
        legs.send_modify(|n| *n += 1);
        Self(legs)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n -= 1);
    }
}

async fn leg(
    stream: TcpStream,
    worker: &Worker,
    model: &Model,
    legs: &watch::Sender<usize>,
) -> Result<()> {
    let mut stream = BufReader::new(stream);
    let line = tokio::time::timeout(LINE, read_line(&mut stream)).await.map_err(|_| {
        Error::new(ErrorKind::DeadlineExceeded, "no request came").with("limit_s", LINE.as_secs())
    })??;
    let Some(line) = line else { return Ok(()) };
    let _counted = Counted::new(legs);
    let reply = match serde_json::from_slice::<LegRequest>(&line) {
        Ok(request) => {
            // Whoever hangs up has given the request up.
            let mut byte = [0; 1];
            let (gone, hears) = watch::channel(false);
            let others = *legs.borrow() - 1;
            let work = async { handle(request, worker, model, hears, others).await };
            tokio::pin!(work);
            loop {
                let hung_up = *gone.borrow();
                tokio::select! {
                    reply = &mut work => break reply,
                    read = stream.read(&mut byte), if !hung_up => {
                        if !read.is_ok_and(|n| n > 0) {
                            gone.send_replace(true);
                        }
                    }
                }
            }
        }
        Err(e) => LegReply {
            error: Some(Error::new(ErrorKind::Malformed, "not a leg").caused_by(e).to_refusal()),
            ..LegReply::default()
        },
    };
    let line = json_line(&reply)?;
    // Nobody may be there any more.
    let _ = stream.get_mut().write_all(line.as_bytes()).await;
    Ok(())
}

async fn audit(model: &Model, reply: &mut LegReply) -> Result<()> {
    let model = model.clone();
    let audited = tokio::task::spawn_blocking(move || model.audit()).await;
    (reply.pages_verified, reply.pages_corrupt) = audited
        .map_err(|e| Error::new(ErrorKind::Internal, "the audit has failed").caused_by(e))??;
    Ok(())
}

async fn handle(
    request: LegRequest,
    worker: &Worker,
    model: &Model,
    gone: watch::Receiver<bool>,
    others: usize,
) -> LegReply {
    let mut reply = LegReply::default();
    let end = match (&request, worker) {
        (LegRequest::Stats, _) => Ok(()),
        (LegRequest::Audit, _) => audit(model, &mut reply).await,
        (LegRequest::StopAt { phase, hold }, _) => faults::stop_at(phase, *hold),
        (LegRequest::GoOn, _) => faults::go_on(),
        (LegRequest::Throttle { bytes_per_s }, _) => faults::throttle(*bytes_per_s),
        (LegRequest::Holds, _) => {
            holds::of(worker, model, others).map(|holds| reply.holds = Some(holds))
        }
        (LegRequest::Prefill { .. }, Worker::Prefill(handle)) => {
            prefill::run(request, handle, model, gone, &mut reply).await
        }
        (LegRequest::Decode { .. }, Worker::Decode(handle)) => {
            decode::run(request, handle, model, gone, &mut reply).await
        }
        _ => Err(Error::new(ErrorKind::Malformed, "the leg is for a worker of the other role")
            .with("worker", &worker.address().key)),
    };
    if let Err(e) = end {
        reply.error = Some(e.to_refusal());
    }
    reply.load = worker.load();
    reply.state = Some(reply.load.state());
    match worker {
        Worker::Prefill(handle) => {
            reply.retries = handle.retries();
            reply.quarantined_blocks = reply.load.quarantined_blocks.into();
        }
        Worker::Decode(handle) => reply.quarantined_blocks = handle.quarantine().blocks(),
    }
    reply
}
