//! Tasks of a worker's thread, counted while they live: gauge `kvlane_tasks`.

use std::future::Future;

use tokio::task::JoinHandle;

struct Counted;

impl Counted {
    fn new() -> Self {
        metrics::gauge!("kvlane_tasks").increment(1.0);
        Self
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        metrics::gauge!("kvlane_tasks").decrement(1.0);
    }
}

/// Starts a task on this thread. It counts until it has ended, however it ends.
pub(crate) fn spawn<F>(work: F) -> JoinHandle<F::Output>
where
    F: Future + 'static,
    F::Output: 'static,
{
    let counted = Counted::new();
    actix::spawn(async move {
        let _counted = counted;
        work.await
    })
}
