//! What both ends of a lane do with a queue pair: notice its faults, and take it down.
//!
//! In: an open queue pair. Out: completions, the first fault, and the moment from which nothing that
//! came through it can land. Invariants: that moment is the flush of a receive that was posted
//! after the queue pair went to error: what the NIC took before is in place then, and no timer
//! stands in for it; a queue pair that saw an error is destroyed, never used again; if the NIC does not
//! answer, the moment never comes.

use kvlane_proto::{Error, ErrorKind, Refusal, Result, Time, WorkerKey, limits};

use super::nic::{Cause, Completion, End, Fault, Nic, Pair, What};

/// Completions taken from one ring in one turn.
pub(super) const COMPLETIONS_PER_TURN: usize = 256;

/// A queue pair on its way out.
pub(super) struct Leaving<P> {
    pair: P,
    /// Index of the receive whose flush is the fence.
    marker: u16,
    flushed: bool,
    /// When that has taken long enough to be said; then not again.
    late_at: Option<Time>,
}

impl<P: Pair> Leaving<P> {
    /// Takes a queue pair to error.
    pub(super) fn begin(
        now: Time,
        hca: &mut impl Nic<Pair = P>,
        mut pair: P,
    ) -> Result<Self, Refusal> {
        let marked = hca.error(&mut pair).and_then(|()| {
            let posted = pair.post_receives(1);
            // A receive that comes after the first is flushed by the second.
            hca.error(&mut pair).map(|()| posted.wrapping_sub(1) as u16)
        });
        match marked {
            Ok(marker) => {
                let late_at = Some(now.plus_ms(limits::FENCE_MS));
                Ok(Self { pair, marker, flushed: false, late_at })
            }
            Err(e) => {
                // Its memory stays where the NIC may still use it.
                hca.destroy(pair);
                Err(failed(hca, &e))
            }
        }
    }
    /// As [`Leaving::begin`], where the engine ends.
    pub(super) fn last(now: Time, hca: &mut impl Nic<Pair = P>, pair: P) -> Option<Self> {
        let number = pair.end().number;
        let log = |why: &Refusal| {
            tracing::error!(queue_pair = number, %why, "not flushed at the engine's end: what its NIC has taken may still land");
        };
        Self::begin(now, hca, pair).inspect_err(log).ok()
    }
    /// Whether nothing can land through it any more; what came before that goes to `each`.
    pub(super) fn is_flushed(&mut self, mut each: impl FnMut(&What)) -> bool {
        for _ in 0..COMPLETIONS_PER_TURN {
            if self.flushed {
                break;
            }
            match self.pair.poll() {
                None => break,
                Some(Completion { what: What::ReceiveFailed(_), index }) => {
                    self.flushed = index == self.marker;
                }
                Some(Completion { what, .. }) => each(&what),
            }
        }
        self.pair.consumed();
        self.flushed
    }
    /// Destroys it: its memory, and what its entries name, is not used any more. Comes back as long as
    /// the NIC says that it is not so far.
    pub(super) fn end(mut self, hca: &mut impl Nic<Pair = P>) -> Result<Option<Self>, Refusal> {
        match hca.try_destroy(self.pair) {
            Ok(None) => Ok(None),
            Ok(Some(pair)) => {
                self.pair = pair;
                Ok(Some(self))
            }
            Err(e) => Err(failed(hca, &e)),
        }
    }
    /// Once, if it takes long: it is waited for all the same.
    pub(super) fn late(&mut self, now: Time, hca: &impl Nic) -> Option<Error> {
        self.late_at.filter(|&at| now >= at)?;
        self.late_at = None;
        let why = "a NIC does not flush a queue pair: what it has taken may still land";
        let e = hca.named(Error::new(ErrorKind::DeadlineExceeded, why));
        let hint = format!("its blocks are withheld until it does; see {}", hca.see());
        Some(
            e.with("queue_pair", format!("{:#x}", self.number()))
                .with("limit_ms", limits::FENCE_MS)
                .hint(hint),
        )
    }
    /// Ready to sleep: asks for an event, and says when to look again in any case.
    pub(super) fn park(&mut self) -> Option<Time> {
        self.pair.arm();
        if self.pair.is_ready() || self.flushed { Some(Time(0)) } else { self.late_at }
    }
    /// Which it is.
    pub(super) fn number(&self) -> u32 {
        self.pair.end().number
    }
    /// Gives it to a NIC that is lost: its memory is kept.
    pub(super) fn lose(self, hca: &mut impl Nic<Pair = P>) {
        hca.destroy(self.pair);
    }
}

fn failed(hca: &impl Nic, e: &Error) -> Refusal {
    hca.named(Error::new(ErrorKind::NoPath, "the NIC did not take a queue pair down"))
        .with("found", e)
        .hint("blocks that it may still read or write are withheld until the worker is restarted")
        .to_refusal()
}

/// What is told of a fault besides what the NIC says.
pub(super) struct Scene<'a, N> {
    pub(super) hca: &'a N,
    pub(super) number: u32,
    pub(super) end: End,
    pub(super) peer: &'a WorkerKey,
}

impl<N: Nic> Scene<'_, N> {
    /// A refusal in which everything is named.
    pub(super) fn error(&self, kind: ErrorKind, what: &str) -> Error {
        self.hca
            .named(Error::new(kind, what))
            .with("queue_pair", format!("{:#x}", self.number))
            .with("peer_queue_pair", format!("{:#x}", self.end.number))
            .with("peer", self.peer)
    }
    /// A completion that does not come: that is an error by itself.
    pub(super) fn overdue(&self, what: &str) -> Error {
        let see = self.hca.see();
        self.error(ErrorKind::DeadlineExceeded, what)
            .with("limit_ms", limits::COMPLETION_MS)
            .hint(format!("the lane is made again; if it recurs, look at the NIC's driver: {see}"))
    }
    /// The first error completion of a queue pair.
    pub(super) fn fault(&self, fault: Fault) -> Error {
        let see = self.hca.see();
        let (kind, hint) = match fault.cause {
            Cause::TransportRetries => (
                ErrorKind::PeerLost,
                format!("the peer's queue pair or NIC does not answer: see {see}"),
            ),
            Cause::RnrRetries => (
                ErrorKind::NoPath,
                "the receiver had no receive posted, which credit should prevent: report it".into(),
            ),
            Cause::RemoteAccess => (
                ErrorKind::NoPath,
                "the receiver's NIC does not let this range be written: its pool may be gone"
                    .into(),
            ),
            Cause::LocalAccess => {
                let hint = "this side's NIC cannot read the range: its pool may be gone";
                (ErrorKind::NoPath, hint.into())
            }
            Cause::Flushed => (
                ErrorKind::NoPath,
                format!("the queue pair was in error before anything of it failed: see {see}"),
            ),
            Cause::Other => {
                (ErrorKind::NoPath, format!("the lane is made again; if it recurs, see {see}"))
            }
        };
        self.error(kind, "the NIC reports an error on the lane")
            .with("syndrome", fault.name)
            .with("code", format!("{:#04x}", fault.code))
            .with("vendor_code", format!("{:#04x}", fault.vendor))
            .hint(hint)
    }
}
