//! A lease as its holder sees it: when to ask, when to ask again, and when it is over.
//!
//! Owned by whoever holds something at the bootstrap service: a worker its registration, a router
//! its issuer slot. In: [`Event`]s. Out: [`Output`]s. Invariants: the lease runs from when the
//! request that got it was *sent*, less drift, so that it ends here before it ends there; one
//! request at a time is under way; a lease that another start of the same identity has taken is
//! never asked for again.

use std::collections::VecDeque;

use crate::error::ErrorKind;
use crate::time::{Time, holder_ms};

/// How a lease is kept.
#[derive(Clone, Copy, Debug)]
pub struct LeaseConfig {
    /// How long an answer may take before the request counts as failed.
    pub answer_ms: u64,
    /// First wait after a failure; doubles up to `retry_max_ms`, less up to a half by jitter.
    pub retry_ms: u64,
    /// Longest wait after a failure.
    pub retry_max_ms: u64,
}

impl Default for LeaseConfig {
    fn default() -> Self {
        Self { answer_ms: 1_000, retry_ms: 100, retry_max_ms: 2_000 }
    }
}

/// What happens to a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The service granted what the request asked for.
    Granted {
        /// The request's number.
        request: u64,
        /// Length of the lease.
        lease_ms: u64,
    },
    /// The request failed, or the service refused it.
    Failed {
        /// The request's number.
        request: u64,
        /// Why.
        kind: ErrorKind,
        /// Any random number.
        jitter: u64,
    },
    /// There is a new connection to the service, perhaps to a new service: acquire again.
    Reconnected,
    /// Ask at once, for instance because something that goes with a renewal has changed.
    Hurry,
}

/// What a holder wants done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Ask for the lease anew: register, or take a slot.
    Acquire {
        /// Number of the request.
        request: u64,
    },
    /// Ask to keep it.
    Renew {
        /// Number of the request.
        request: u64,
    },
    /// The lease is held from here on.
    Held,
    /// The lease is over; it is being asked for again.
    Expired,
    /// Another start of this identity has it; nothing more will be asked.
    Superseded,
}

/// The holder's side of one lease.
#[derive(Debug)]
pub struct Holder {
    cfg: LeaseConfig,
    /// Number of the last request, and when it was sent while its answer is awaited.
    request: u64,
    sent: Option<Time>,
    /// The next request is an acquisition.
    acquire: bool,
    /// When to ask next, unless an answer is awaited.
    next: Option<Time>,
    until: Option<Time>,
    failures: u32,
    superseded: bool,
    /// Ask again as soon as the answer under way is here.
    hurry: bool,
    outputs: VecDeque<Output>,
}

impl Holder {
    /// Holds nothing yet; the first request is due at `now`.
    pub fn new(cfg: LeaseConfig, now: Time) -> Self {
        Self {
            cfg,
            request: 0,
            sent: None,
            acquire: true,
            next: Some(now),
            until: None,
            failures: 0,
            superseded: false,
            hurry: false,
            outputs: VecDeque::new(),
        }
    }

    /// Takes an event.
    pub fn handle_event(&mut self, now: Time, event: Event) {
        match event {
            Event::Granted { request, lease_ms } if request == self.request => {
                let Some(sent) = self.sent.take() else { return };
                let until = sent.plus_ms(holder_ms(lease_ms));
                if until > now {
                    if self.until.replace(until).is_none() {
                        self.outputs.push_back(Output::Held);
                    }
                    self.acquire = false;
                    self.failures = 0;
                    self.next = Some(sent.plus_ms(lease_ms / 3).max(now));
                    if std::mem::take(&mut self.hurry) {
                        self.next = Some(now);
                    }
                } else {
                    // The answer took longer than the lease.
                    self.fail(now, lease_ms);
                }
            }
            Event::Failed { request, kind, jitter } if request == self.request => {
                if self.sent.take().is_none() {
                    return;
                }
                match kind {
                    ErrorKind::StaleIncarnation if self.acquire => {
                        self.superseded = true;
                        self.next = None;
                        self.until = None;
                        self.outputs.push_back(Output::Superseded);
                        return;
                    }
                    // The service does not know the lease: there is nothing to wait for.
                    ErrorKind::StaleIncarnation | ErrorKind::NotFound if !self.acquire => {
                        self.acquire = true;
                        self.next = Some(now);
                    }
                    _ => self.fail(now, jitter),
                }
            }
            Event::Granted { .. } | Event::Failed { .. } => {}
            Event::Reconnected | Event::Hurry if self.superseded => {}
            Event::Reconnected => {
                // An answer from the old connection cannot come any more.
                self.sent = None;
                self.acquire = true;
                self.next = Some(now);
            }
            Event::Hurry if self.sent.is_some() => self.hurry = true,
            Event::Hurry => self.next = Some(now),
        }
        self.handle_timeout(now);
    }

    /// Does what is due at `now`.
    pub fn handle_timeout(&mut self, now: Time) {
        if self.superseded {
            return;
        }
        if self.until.is_some_and(|u| u <= now) {
            self.until = None;
            self.acquire = true;
            self.outputs.push_back(Output::Expired);
        }
        if self.sent.is_some_and(|s| s.plus_ms(self.cfg.answer_ms) <= now) {
            self.sent = None;
            // No random number came with the silence; the request's own number spreads enough.
            self.fail(now, self.request.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        }
        if self.sent.is_none() && self.next.is_some_and(|n| n <= now) {
            self.request += 1;
            self.sent = Some(now);
            self.next = None;
            self.hurry = false;
            let request = self.request;
            self.outputs.push_back(if self.acquire {
                Output::Acquire { request }
            } else {
                Output::Renew { request }
            });
        }
    }

    /// The next thing to do, if any.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When to call [`Holder::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Time> {
        let answer = self.sent.map(|s| s.plus_ms(self.cfg.answer_ms));
        [self.until, answer, self.next].into_iter().flatten().min()
    }

    /// Until when the lease is held; nobody else has it before.
    pub fn held_until(&self) -> Option<Time> {
        self.until
    }

    fn fail(&mut self, now: Time, jitter: u64) {
        let wait = self.cfg.retry_ms << self.failures.min(16);
        let wait = wait.clamp(1, self.cfg.retry_max_ms.max(1));
        self.failures = self.failures.saturating_add(1);
        self.next = Some(now.plus_ms(wait - jitter % (wait / 2 + 1)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ms(ms: u64) -> Time {
        Time(0).plus_ms(ms)
    }
    fn outputs(h: &mut Holder) -> Vec<Output> {
        std::iter::from_fn(|| h.poll_output()).collect()
    }
    fn at(h: &mut Holder, t: u64) -> Vec<Output> {
        h.handle_timeout(ms(t));
        outputs(h)
    }
    fn on(h: &mut Holder, t: u64, e: Event) -> Vec<Output> {
        h.handle_event(ms(t), e);
        outputs(h)
    }
    fn granted(request: u64) -> Event {
        Event::Granted { request, lease_ms: 6_000 }
    }
    fn failed(request: u64, kind: ErrorKind, jitter: u64) -> Event {
        Event::Failed { request, kind, jitter }
    }

    #[test]
    fn the_lease_counts_from_when_the_request_was_sent_and_is_renewed_at_a_third() {
        let mut h = Holder::new(LeaseConfig::default(), ms(0));
        assert_eq!(at(&mut h, 0), [Output::Acquire { request: 1 }]);
        assert_eq!(on(&mut h, 900, granted(1)), [Output::Held]);
        assert_eq!(h.held_until(), Some(ms(5_940)));
        assert_eq!(h.poll_timeout(), Some(ms(2_000)));
        assert_eq!(at(&mut h, 1_999), []);
        assert_eq!(at(&mut h, 2_000), [Output::Renew { request: 2 }]);
        assert_eq!(on(&mut h, 2_001, granted(1)), []);
        assert_eq!(on(&mut h, 2_002, granted(2)), []);
        assert_eq!(h.held_until(), Some(ms(7_940)));
    }

    #[test]
    fn failures_back_off_with_jitter_until_the_lease_is_over() {
        let mut h = Holder::new(LeaseConfig::default(), ms(0));
        at(&mut h, 0);
        on(&mut h, 0, granted(1));
        assert_eq!(at(&mut h, 2_000), [Output::Renew { request: 2 }]);
        // No answer within a second.
        assert_eq!(at(&mut h, 3_000), []);
        let retry = h.poll_timeout().unwrap();
        assert!((ms(3_050)..=ms(3_100)).contains(&retry));
        h.handle_timeout(retry);
        assert_eq!(outputs(&mut h), [Output::Renew { request: 3 }]);
        on(&mut h, 3_100, failed(3, ErrorKind::Io, 0));
        assert_eq!(h.poll_timeout(), Some(ms(3_300)));
        assert_eq!(at(&mut h, 3_300), [Output::Renew { request: 4 }]);
        on(&mut h, 3_300, failed(4, ErrorKind::PeerLost, 150));
        assert_eq!(h.poll_timeout(), Some(ms(3_550)));
        assert_eq!(at(&mut h, 5_940), [Output::Expired, Output::Acquire { request: 5 }]);
        assert_eq!(on(&mut h, 5_950, granted(5)), [Output::Held]);
    }

    #[test]
    fn an_answer_that_took_longer_than_the_lease_is_none() {
        let cfg = LeaseConfig { answer_ms: 60_000, ..LeaseConfig::default() };
        let mut h = Holder::new(cfg, ms(0));
        at(&mut h, 0);
        assert_eq!(on(&mut h, 5_940, granted(1)), []);
        assert_eq!(h.held_until(), None);
    }

    #[test]
    fn an_unknown_lease_is_acquired_at_once_and_a_superseded_one_never() {
        let mut h = Holder::new(LeaseConfig::default(), ms(0));
        at(&mut h, 0);
        on(&mut h, 0, granted(1));
        at(&mut h, 2_000);
        let out = on(&mut h, 2_001, failed(2, ErrorKind::NotFound, 0));
        assert_eq!(out, [Output::Acquire { request: 3 }]);
        assert_eq!(on(&mut h, 2_002, Event::Reconnected), [Output::Acquire { request: 4 }]);
        assert_eq!(on(&mut h, 2_003, granted(3)), []);
        on(&mut h, 2_003, granted(4));
        at(&mut h, 4_002);
        let out = on(&mut h, 4_003, failed(5, ErrorKind::StaleIncarnation, 0));
        assert_eq!(out, [Output::Acquire { request: 6 }]);
        let out = on(&mut h, 4_004, failed(6, ErrorKind::StaleIncarnation, 0));
        assert_eq!(out, [Output::Superseded]);
        assert_eq!(on(&mut h, 4_005, Event::Reconnected), []);
        assert_eq!(on(&mut h, 4_005, Event::Hurry), []);
        assert_eq!((at(&mut h, 99_000), h.poll_timeout()), (vec![], None));
    }

    #[test]
    fn hurry_asks_at_once_or_right_after_the_answer_under_way() {
        let mut h = Holder::new(LeaseConfig::default(), ms(0));
        at(&mut h, 0);
        assert_eq!(on(&mut h, 1, Event::Hurry), []);
        assert_eq!(on(&mut h, 2, granted(1)), [Output::Held, Output::Renew { request: 2 }]);
        on(&mut h, 3, granted(2));
        assert_eq!(on(&mut h, 4, Event::Hurry), [Output::Renew { request: 3 }]);
    }

    proptest! {
        #[test]
        fn a_holder_never_believes_longer_than_its_grantor(
            steps in prop::collection::vec((0u64..3_000, 0u8..6, any::<u64>()), 1..100),
        ) {
            use crate::time::grantor_ms;
            let mut h = Holder::new(LeaseConfig::default(), ms(0));
            let (mut now, mut grantor_until, mut request, mut awaiting) = (0, 0, 0, 0);
            for (wait, what, random) in steps {
                // Between two steps every timer rings when it is due.
                let to = now + wait;
                while let Some(t) = h.poll_timeout().filter(|t| *t <= ms(to)) {
                    h.handle_timeout(t);
                    for o in outputs(&mut h) {
                        if let Output::Acquire { request: r } | Output::Renew { request: r } = o {
                            prop_assert_eq!(r, request + 1);
                            request = r;
                            awaiting += 1;
                        }
                    }
                }
                now = to;
                let event = match what {
                    0..=2 => {
                        grantor_until = now + grantor_ms(5_000);
                        Event::Granted { request, lease_ms: 5_000 }
                    }
                    3 => failed(request, ErrorKind::Io, random),
                    4 => failed(request, ErrorKind::NotFound, random),
                    _ => Event::Reconnected,
                };
                for o in on(&mut h, now, event) {
                    if let Output::Acquire { request: r } | Output::Renew { request: r } = o {
                        prop_assert_eq!(r, request + 1);
                        request = r;
                        awaiting += 1;
                    }
                }
                prop_assert!(h.held_until().is_none_or(|u| u <= ms(grantor_until)));
                // It never stops asking.
                prop_assert!(h.poll_timeout().is_some());
            }
            prop_assert!(awaiting > 0 || now == 0);
        }
    }
}
