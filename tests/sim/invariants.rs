//! The promises that every step is checked against, by name. Numbers are those of the design.

/// Which promise was broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Inv {
    /// 1, 2: a byte lands only while its grant lives, in memory that the grant names.
    LandsInGrant,
    /// 2: a source page is as it was when it was posted, until no taker can read it.
    SourceKept,
    /// 2: blocks come back once, with a proof, or are counted as withheld.
    BlocksBalance,
    /// 3: a room ends once on each side, in time, with a reason.
    EndsOnce,
    /// 3: the reason is true.
    TrueReason,
    /// Without faults every room is done.
    CalmIsDone,
    /// 8: every call is answered once, in time.
    Answered,
    /// 3: what routers and the prefill are told is what the decode decided.
    OneOutcome,
    /// 4: done means that every page holds the right bytes of all sources, and nothing else has
    /// changed.
    DoneIsComplete,
    /// 5: only final pages are sent.
    SentWhenFinal,
    /// 7: a refused request leaves no trace.
    RefusedLeavesNothing,
    /// 8: a lane is lent once.
    LaneLentOnce,
    /// 8: queues are bounded.
    Bounded,
    /// 8: nothing is posted after the lease, or after quiesce.
    LeaseHeld,
    /// Everything is idle in the end.
    Quiescent,
}

#[derive(Clone, Debug)]
pub(crate) struct Violation {
    pub(crate) inv: Inv,
    pub(crate) what: String,
    pub(crate) at_ns: u64,
}
