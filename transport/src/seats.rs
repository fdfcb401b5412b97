//! A few sessions for every identity.
//!
//! Owned by whoever accepts sessions. In: who a session is with. Out: a [`Seat`], which the
//! session's task holds as long as it lasts. Invariant: one identity has at most so many seats; who
//! takes one more takes it from its own oldest, so that a peer that lost its sessions without a
//! word gets in again and one certificate cannot take every place.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvlane_proto::Identity;
use tokio::sync::oneshot;

type Table = HashMap<Identity, VecDeque<(u64, oneshot::Sender<()>)>>;

/// Sessions of one identity that one process serves at a time, unless told otherwise.
pub const SEATS_PER_IDENTITY: usize = 16;

/// The seats of one kind of session.
#[derive(Debug)]
pub struct Seats {
    kind: &'static str,
    per_identity: usize,
    next: u64,
    table: Arc<Mutex<Table>>,
}

/// One session's seat; dropping it gives it back.
#[derive(Debug)]
pub struct Seat {
    identity: Identity,
    number: u64,
    taken: oneshot::Receiver<()>,
    table: Arc<Mutex<Table>>,
}

impl Seats {
    /// At most `per_identity` (and at least one) for each identity; `kind` is the metric's label.
    pub fn new(kind: &'static str, per_identity: usize) -> Self {
        Self { kind, per_identity: per_identity.max(1), next: 0, table: Arc::default() }
    }

    /// Seats a session, and takes the seat of the oldest one of the same identity if there are too
    /// many.
    pub fn take(&mut self, identity: &Identity) -> Seat {
        self.next += 1;
        let (keep, taken) = oneshot::channel();
        let mut table = lock(&self.table);
        let seated = table.entry(identity.clone()).or_default();
        seated.push_back((self.next, keep));
        if seated.len() > self.per_identity {
            // Dropping its end tells the session.
            seated.pop_front();
            metrics::counter!("kvlane_sessions_unseated_total", "kind" => self.kind).increment(1);
            tracing::debug!(%identity, kind = self.kind, "too many sessions of one identity");
        }
        let table = Arc::clone(&self.table);
        Seat { identity: identity.clone(), number: self.next, taken, table }
    }

    /// Identities that have a session.
    pub fn identities(&self) -> usize {
        lock(&self.table).len()
    }
}

impl Seat {
    /// Waits until the seat is taken away. May be dropped in a `select!` and asked again, until it
    /// has ended once.
    pub async fn taken(&mut self) {
        let _ = (&mut self.taken).await;
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut table = lock(&self.table);
        if let Some(seated) = table.get_mut(&self.identity) {
            seated.retain(|s| s.0 != self.number);
            if seated.is_empty() {
                table.remove(&self.identity);
            }
        }
    }
}

fn lock(table: &Mutex<Table>) -> MutexGuard<'_, Table> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvlane_proto::Role;

    #[test]
    fn the_oldest_of_an_identity_gives_its_seat_to_the_newest() {
        let who = |name: &str| Identity::new("c", Role::Router, name, 0).unwrap();
        let mut seats = Seats::new("test", 2);
        let is_taken =
            |s: &mut Seat| s.taken.try_recv() == Err(oneshot::error::TryRecvError::Closed);
        let mut other = seats.take(&who("b"));
        let mut a: Vec<Seat> = (0..4).map(|_| seats.take(&who("a"))).collect();
        let taken: Vec<bool> = a.iter_mut().map(is_taken).collect();
        assert_eq!(taken, [true, true, false, false]);
        assert!(!is_taken(&mut other));
        // A seat that is given back makes room; one that was taken does not give back another's.
        a.drain(..3);
        let mut fifth = seats.take(&who("a"));
        assert!(!is_taken(&mut a[0]) && !is_taken(&mut fifth));
        drop((a, fifth));
        assert_eq!(seats.identities(), 1);
        drop(other);
        assert_eq!(seats.identities(), 0);
    }
}
