//! Makes imports ready to be copied from, on a thread of its own: entering a pool of many gigabytes
//! into the page table takes seconds, which no other lane should wait for.
//!
//! In: imports. Out: a flag each, and a signal. Invariant: nothing but speed depends on it.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};

use kvlane_proto::{Error, ErrorKind, Result};

use crate::sys::share::Import;
use crate::sys::wait::EventFd;

/// Imports that may wait.
const QUEUE: usize = 1024;

struct Shared {
    signal: EventFd,
    stop: AtomicBool,
}

/// The thread.
pub(super) struct Readier {
    jobs: SyncSender<(Arc<Import>, Done)>,
    shared: Arc<Shared>,
}

/// Set, once an import is ready.
pub(super) type Done = Arc<AtomicBool>;

impl Readier {
    pub(super) fn new() -> Result<Self> {
        let failed =
            |e| Error::new(ErrorKind::Io, "shm engine: cannot start a thread").caused_by(e);
        let (jobs, queue) = sync_channel::<(Arc<Import>, Done)>(QUEUE);
        let signal = EventFd::new().map_err(failed)?;
        let shared = Arc::new(Shared { signal, stop: AtomicBool::new(false) });
        let of_thread = shared.clone();
        std::thread::Builder::new()
            .name("kvlane-shm-map".into())
            .spawn(move || {
                while let Ok((import, done)) = queue.recv() {
                    import.make_ready(|| !of_thread.stop.load(Ordering::Relaxed));
                    drop(import);
                    done.store(true, Ordering::Release);
                    of_thread.signal.signal();
                }
            })
            .map_err(failed)?;
        Ok(Self { jobs, shared })
    }
    /// Makes an import ready; if too many wait, it is left as it is.
    pub(super) fn ask(&self, import: &Arc<Import>) -> Done {
        let done = Done::default();
        if self.jobs.try_send((import.clone(), done.clone())).is_err() {
            done.store(true, Ordering::Release);
        }
        done
    }
    /// Readable when something has become ready.
    pub(super) fn fd(&self) -> RawFd {
        self.shared.signal.fd()
    }
    /// Forgets the signals that have come.
    pub(super) fn drain(&self) {
        self.shared.signal.drain();
    }
}

impl Drop for Readier {
    fn drop(&mut self) {
        // The thread ends by itself with the queue.
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}
