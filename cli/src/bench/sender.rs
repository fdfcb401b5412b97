//! The sending side: one engine of this process, posting draws of random pages.
//!
//! Owns: the engine's handle and the job that its thread works on. In: parts under an open grant.
//! Out: how long they took. Invariants: at most a window of parts is in flight on each lane, and the
//! next is posted on the engine's own thread, as an acknowledgement comes; whatever is refused or
//! broken ends the measurement, so no figure contains a retry.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use kvlane_proto::{Error, ErrorKind, GrantId, LaneId, PartId, PartPages, Refusal, Result, limits};
use kvlane_transport::engine::driver::EngineHandle;
use kvlane_transport::engine::{Caps, Command, EngineEvent, Post};
use kvlane_transport::memory::Region;

use super::engines::Setup;
use super::link::{self, ANSWER, EVENTS, LINK};
use super::wait::{SLICE, Stop, Wait, moving};

/// Parts in flight on one lane, as a worker has them.
const WINDOW: u32 = limits::PARTS_IN_FLIGHT_PER_LANE;

/// How long one job took.
#[derive(Debug, Default)]
pub(crate) struct Took {
    /// First post to last acknowledgement.
    pub(crate) tx: Duration,
    /// Spent in handing parts to the engine, on whichever thread.
    pub(crate) post: Duration,
    /// From the latest post to each acknowledgement: round trips, with one part in flight.
    pub(crate) trips: Vec<Duration>,
}

struct Job {
    grant: GrantId,
    parts: std::vec::IntoIter<PartPages>,
    next: u32,
    left: u32,
    begun: Instant,
    posted: Instant,
    took: Took,
}

impl Job {
    fn post(&mut self, handle: &EngineHandle, lane: LaneId) -> Result<()> {
        let Some(pages) = self.parts.next() else { return Ok(()) };
        let (grant, part) = (self.grant, PartId(self.next));
        self.next += 1;
        self.posted = Instant::now();
        handle.send(Command::Post(Post { link: LINK, grant, part, lane, pages }))?;
        self.took.post += self.posted.elapsed();
        Ok(())
    }
}

/// What the engine's thread and this one share.
struct Shared {
    job: Mutex<Option<Job>>,
    handle: OnceLock<EngineHandle>,
    done: SyncSender<Result<Took>>,
}

impl Shared {
    fn job(&self) -> MutexGuard<'_, Option<Job>> {
        self.job.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn acked(&self, lane: LaneId) {
        let mut slot = self.job();
        let (Some(job), Some(handle)) = (slot.as_mut(), self.handle.get()) else { return };
        let now = Instant::now();
        job.took.trips.push(now - job.posted);
        job.left -= 1;
        let end = if job.left > 0 {
            job.post(handle, lane).err().map(Err)
        } else {
            job.took.tx = now - job.begun;
            Some(Ok(std::mem::take(&mut job.took)))
        };
        if let Some(end) = end {
            *slot = None;
            // There is room for one of each kind, and only the first counts.
            let _ = self.done.try_send(end);
        }
    }
    fn failed(&self, e: Error) {
        *self.job() = None;
        let _ = self.done.try_send(Err(e));
    }
}

/// The sender's engine, with one link.
pub(crate) struct Sender {
    shared: Arc<Shared>,
    handle: EngineHandle,
    caps: Caps,
    said: Receiver<EngineEvent>,
    done: Receiver<Result<Took>>,
    lanes: u16,
    stop: Stop,
}

impl Sender {
    /// Starts the engine; gives the blob for the receiver's.
    pub(crate) fn start(setup: &Setup, pool: &Arc<Region>, stop: &Stop) -> Result<(Self, Vec<u8>)> {
        let (say, said) = sync_channel(EVENTS);
        let (finished, done) = sync_channel(2);
        let shared =
            Arc::new(Shared { job: Mutex::default(), handle: OnceLock::new(), done: finished });
        let on_events = {
            let shared = shared.clone();
            move |events: Vec<EngineEvent>| {
                let refused = |why: Refusal| shared.failed(why.into());
                for event in events {
                    match event {
                        EngineEvent::Acked { lane, .. } => shared.acked(lane),
                        EngineEvent::Nacked { why, .. } | EngineEvent::LaneDown { why, .. } => {
                            refused(why);
                        }
                        EngineEvent::Trouble(e) => shared.failed(e),
                        // Of these there are as many as lanes.
                        event @ (EngineEvent::Local { .. } | EngineEvent::LaneUp { .. }) => {
                            let _ = say.try_send(event);
                        }
                        _ => {}
                    }
                }
            }
        };
        let (handle, caps) = link::start(setup, pool, Box::new(on_events), false)?;
        let _ = shared.handle.set(handle.clone());
        let (lanes, stop) = (setup.rails, stop.clone());
        let sender = Self { shared, handle, caps, said, done, lanes, stop };
        let blob = link::blob(&sender.said, &sender.stop)?;
        Ok((sender, blob))
    }
    /// Connects to the receiver's engine; returns when every lane carries pages.
    pub(crate) fn connect(&self, remote: Vec<u8>) -> Result<()> {
        self.handle.send(Command::Connect { link: LINK, remote })?;
        let mut missing = self.lanes;
        link::until(&self.said, "the engine's lanes", &self.stop, |event| match event {
            EngineEvent::LaneUp { .. } => {
                missing -= 1;
                (missing == 0).then_some(Ok(()))
            }
            EngineEvent::Local { blob: Err(e), .. } => Some(Err(e)),
            _ => None,
        })
        .map_err(|e| self.done.try_recv().ok().and_then(Result::err).unwrap_or(e))
    }
    pub(crate) fn emulated(&self) -> bool {
        self.caps.emulated
    }
    /// Sends parts; all lanes are used.
    pub(crate) fn send(&self, grant: GrantId, parts: Vec<PartPages>, bytes: u64) -> Result<Took> {
        self.work(grant, 0, parts, (WINDOW, self.lanes), moving(bytes))
    }
    /// Sends one part after the other on one lane, with a pause before each; gives the round trips.
    pub(crate) fn trips(
        &self,
        grant: GrantId,
        parts: Vec<PartPages>,
        bytes: u64,
        pause: Duration,
    ) -> Result<Vec<Duration>> {
        if pause.is_zero() {
            return Ok(self.work(grant, 0, parts, (1, 1), moving(bytes))?.trips);
        }
        let mut trips = Vec::with_capacity(parts.len());
        for (part, pages) in (0..).zip(parts) {
            std::thread::sleep(pause);
            trips.extend(self.work(grant, part, vec![pages], (1, 1), ANSWER)?.trips);
        }
        Ok(trips)
    }
    fn work(
        &self,
        grant: GrantId,
        first: u32,
        parts: Vec<PartPages>,
        (window, lanes): (u32, u16),
        limit: Duration,
    ) -> Result<Took> {
        if let Ok(Err(e)) = self.done.try_recv() {
            return Err(e);
        }
        let wait = Wait::new("the last acknowledgement", limit, &self.stop);
        let left = parts.len() as u32;
        let (parts, now) = (parts.into_iter(), Instant::now());
        let took = Took { trips: Vec::with_capacity(left as usize), ..Took::default() };
        let mut job = Job { grant, parts, next: first, left, begun: now, posted: now, took };
        {
            // Held until all of the window is posted: acknowledgements wait for the job.
            let mut slot = self.shared.job();
            job.begun = Instant::now();
            for _ in 0..window {
                for lane in 0..lanes {
                    job.post(&self.handle, LaneId(lane))?;
                }
            }
            *slot = Some(job);
        }
        loop {
            match self.done.recv_timeout(SLICE) {
                Ok(took) => return took,
                Err(RecvTimeoutError::Timeout) => wait.check()?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::new(ErrorKind::Internal, "the engine's thread has ended"));
                }
            }
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        // The callback keeps a handle, so only this ends the thread.
        self.handle.stop();
    }
}
