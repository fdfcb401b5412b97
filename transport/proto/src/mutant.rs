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
}
