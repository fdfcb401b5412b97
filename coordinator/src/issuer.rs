//! Room numbers of this router: a leased slot, and counters that nobody else uses with it.
//!
//! Invariant: no number is made once the slot's lease is over, and none twice.

use std::sync::{Mutex, PoisonError};

use kvlane_proto::time::holder_ms;
use kvlane_proto::{Blame, Error, ErrorKind, Result, RoomId, Time};
use kvlane_transport::service_client::IssuerSlot;

#[derive(Debug, Default)]
pub(crate) struct Issuer {
    held: Mutex<Option<Held>>,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    slot: IssuerSlot,
    next: u64,
    until: Time,
}

impl Issuer {
    fn held(&self) -> std::sync::MutexGuard<'_, Option<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what the service gave; `sent` is when it was asked.
    pub(crate) fn take(&self, slot: IssuerSlot, sent: Time) {
        let mut held = self.held();
        let until = sent.plus_ms(holder_ms(slot.lease_ms));
        let next = match *held {
            Some(h) if (h.slot.slot, h.slot.first_counter) == (slot.slot, slot.first_counter) => {
                h.next
            }
            _ => slot.first_counter,
        };
        *held = Some(Held { slot, next, until });
    }

    /// The slot to renew, and whether its counters run short.
    pub(crate) fn to_renew(&self) -> Option<(u16, bool)> {
        self.held().map(|h| {
            let left = (h.slot.first_counter + h.slot.counters).saturating_sub(h.next);
            (h.slot.slot, left <= h.slot.counters / 4)
        })
    }

    /// Makes a room number congruent to `dp.0` modulo `dp.1`.
    pub(crate) fn issue(&self, now: Time, dp: (u32, u32)) -> Result<RoomId> {
        let mut held = self.held();
        let none = |why: &str| {
            Error::new(ErrorKind::LeaseExpired, why)
                .blamed(Blame::Service)
                .hint("is the bootstrap service up? Room numbers come with a lease from it")
        };
        let Some(h) = held.as_mut() else { return Err(none("this router has no issuer slot yet")) };
        if h.until <= now {
            return Err(none("the issuer slot's lease is over").with("slot", h.slot.slot));
        }
        if h.next >= h.slot.first_counter + h.slot.counters {
            return Err(none("the issuer slot's counters are used up").with("slot", h.slot.slot));
        }
        let room = RoomId::issue(h.slot.slot, h.next, dp.0, dp.1)?;
        h.next += 1;
        Ok(room)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_fresh_leased_and_asked_for_before_they_run_out() {
        let issuer = Issuer::default();
        let t = |ms| Time(0).plus_ms(ms);
        assert!(issuer.issue(t(0), (0, 1)).is_err());
        let slot = IssuerSlot { slot: 3, first_counter: 8, counters: 8, lease_ms: 1_000 };
        issuer.take(slot, t(0));
        let mut rooms = std::collections::HashSet::new();
        for i in 0..8 {
            assert_eq!(issuer.to_renew(), Some((3, i >= 6)));
            // A renewal of the same range goes on where it was.
            issuer.take(slot, t(0));
            let room = issuer.issue(t(989), (i % 4, 4)).unwrap();
            assert_eq!((room.slot(), room.0 % 4), (3, u64::from(i % 4)));
            assert!(rooms.insert(room));
        }
        assert_eq!(issuer.issue(t(0), (0, 1)).unwrap_err().kind(), ErrorKind::LeaseExpired);
        issuer.take(IssuerSlot { first_counter: 16, ..slot }, t(0));
        assert!(rooms.insert(issuer.issue(t(989), (0, 1)).unwrap()));
        assert_eq!(issuer.issue(t(990), (0, 1)).unwrap_err().kind(), ErrorKind::LeaseExpired);
    }
}
