//! The deliberately broken machines that the simulator must catch. Without the feature `mutants`
//! the choice cannot be made, and every test for it is constant.

/// Which defect a machine has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mutant {
    /// None.
    #[default]
    None,
    /// Blocks go back without a fence.
    NoFence,
    /// The number of a grant is not looked at.
    NoGrantCheck,
    /// Lanes come back twice.
    CreditTwice,
    /// Parts are counted instead of kept as a set.
    PartsCounted,
    /// A page is sent before it is final.
    NotFinal,
    /// A room is done though one of its sources has not sent all.
    SourceMissing,
    /// What arrives counts by the part's number, whichever source it is from.
    LinksMixed,
    /// Source blocks come back when one of their takers is quiet.
    TakerForgotten,
    /// A grant whose lane was lost is closed like any other.
    LossForgotten,
    /// A fence is of one link of its grant. The simulator's engine has it.
    FenceFirstLink,
    /// The serve word is not read again after a copy. The simulator's engine has it.
    ServeWordNotRead,
}
