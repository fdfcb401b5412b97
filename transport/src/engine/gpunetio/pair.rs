//! What both ends of a lane do with a queue pair: notice its faults, and take it down.
//!
//! In: an open queue pair. Out: completions, the first fault, and the moment from which nothing that
//! came through it can land. Invariants: that moment is the flush of a receive that was posted
//! after the queue pair went to error: what the NIC took before is in place then, and no timer
//! stands in for it; a queue pair that saw an error is destroyed, never used again; if the NIC does not
//! answer, the moment never comes.

use kvlane_proto::{Error, ErrorKind, Refusal, Result, Time, WorkerKey, limits};

use crate::emulated::client::{Hca, Peer, QueuePair};
use crate::mlx5::completion::What;
use crate::mlx5::{Completion, Fault, Syndrome};

/// Completions taken from one ring in one turn.
pub(super) const COMPLETIONS_PER_TURN: usize = 256;

/// A queue pair on its way out.
pub(super) struct Leaving {
    pair: QueuePair,
    /// Index of the receive whose flush is the fence.
    marker: u16,
    flushed: bool,
    /// When that has taken long enough to be said; then not again.
    late_at: Option<Time>,
}

impl Leaving {
    /// Takes a queue pair to error.
    pub(super) fn begin(now: Time, hca: &mut Hca, mut pair: QueuePair) -> Result<Self, Refusal> {
        let marked = hca.error(&pair).and_then(|()| {
            let posted = pair.receives.post(1);
            // A receive that comes after the first is flushed by the second.
            hca.error(&pair).map(|()| posted.wrapping_sub(1) as u16)
        });
        match marked {
            Ok(marker) => {
                let late_at = Some(now.plus_ms(limits::FENCE_MS));
                Ok(Self { pair, marker, flushed: false, late_at })
            }
            Err(e) => {
                // Its memory stays where the NIC may still use it.
                let _ = hca.destroy(pair);
                Err(failed(hca, &e))
            }
        }
    }
    /// As [`Leaving::begin`], where the engine ends.
    pub(super) fn last(now: Time, hca: &mut Hca, pair: QueuePair) -> Option<Self> {
        let number = pair.number;
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
            match self.pair.completions.poll() {
                None => break,
                Some(Ok(Completion { what: What::ReceiveFailed(_), index, .. })) => {
                    self.flushed = index == self.marker;
                }
                Some(Ok(Completion { what, .. })) => each(&what),
                Some(Err(_)) => {}
            }
        }
        self.pair.completions.consumed();
        self.flushed
    }
    /// Destroys it: its memory, and what its entries name, is not used any more. Comes back as long as
    /// the NIC says that it is not so far.
    pub(super) fn end(mut self, hca: &mut Hca) -> Result<Option<Self>, Refusal> {
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
    pub(super) fn late(&mut self, now: Time, hca: &Hca) -> Option<Error> {
        self.late_at.filter(|&at| now >= at)?;
        self.late_at = None;
        let why = "a NIC does not flush a queue pair: what it has taken may still land";
        Some(
            Error::new(ErrorKind::DeadlineExceeded, why)
                .with("nic", &hca.about().name)
                .with("socket", hca.socket())
                .with("queue_pair", format!("{:#x}", self.pair.number))
                .with("limit_ms", limits::FENCE_MS)
                .hint(format!(
                    "its blocks are withheld until it does; see `{}`",
                    hca.trace_command()
                )),
        )
    }
    /// Ready to sleep: asks for an event, and says when to look again in any case.
    pub(super) fn park(&mut self) -> Option<Time> {
        self.pair.completions.arm();
        if self.pair.completions.is_ready() || self.flushed { Some(Time(0)) } else { self.late_at }
    }
    /// Which it is.
    pub(super) fn number(&self) -> u32 {
        self.pair.number
    }
    /// Gives it to a NIC that is lost: its memory is kept.
    pub(super) fn lose(self, hca: &mut Hca) {
        let _ = hca.destroy(self.pair);
    }
}

fn failed(hca: &Hca, e: &Error) -> Refusal {
    Error::new(ErrorKind::NoPath, "the NIC did not take a queue pair down")
        .with("nic", &hca.about().name)
        .with("socket", hca.socket())
        .with("found", e)
        .hint("blocks that it may still read or write are withheld until the worker is restarted")
        .to_refusal()
}

/// What is told of a fault besides what the NIC says.
pub(super) struct Scene<'a> {
    pub(super) hca: &'a Hca,
    pub(super) number: u32,
    pub(super) end: Peer,
    pub(super) peer: &'a WorkerKey,
}

impl Scene<'_> {
    /// A refusal in which everything is named.
    pub(super) fn error(&self, kind: ErrorKind, what: &str) -> Error {
        Error::new(kind, what)
            .with("nic", &self.hca.about().name)
            .with("socket", self.hca.socket())
            .with("queue_pair", format!("{:#x}", self.number))
            .with("peer_queue_pair", format!("{:#x}", self.end.number))
            .with("peer", self.peer)
    }
    /// The first error completion of a queue pair.
    pub(super) fn fault(&self, fault: Fault) -> Error {
        let trace = self.hca.trace_command();
        let (kind, hint) = match fault.syndrome {
            Syndrome::TRANSPORT_RETRIES => (
                ErrorKind::PeerLost,
                format!("the peer's queue pair or NIC does not answer: see `{trace}`"),
            ),
            Syndrome::RNR_RETRIES => (
                ErrorKind::NoPath,
                "the receiver had no receive posted, which credit should prevent: report it".into(),
            ),
            Syndrome::REMOTE_ACCESS => (
                ErrorKind::NoPath,
                "the receiver's NIC does not let this range be written: its pool may be gone"
                    .into(),
            ),
            Syndrome::LOCAL_PROTECTION | Syndrome::LOCAL_ACCESS => {
                let hint = "this side's NIC cannot read the range: its pool may be gone";
                (ErrorKind::NoPath, hint.into())
            }
            Syndrome::FLUSHED => (
                ErrorKind::NoPath,
                format!("the queue pair was in error before anything of it failed: see `{trace}`"),
            ),
            _ => {
                (ErrorKind::NoPath, format!("the lane is made again; if it recurs, see `{trace}`"))
            }
        };
        self.error(kind, "the NIC reports an error on the lane")
            .with("syndrome", fault.syndrome.name())
            .with("code", format!("{:#04x}", fault.syndrome.0))
            .with("vendor_code", format!("{:#04x}", fault.vendor))
            .hint(hint)
    }
}
