//! The proofs without which a block is not given back. Only engines can make them.

use kvlane_proto::{GrantId, LinkId};

pub use kvlane_proto::grants::FenceHow;

/// Proof that nothing can land under a grant any more, and that what landed is visible.
///
/// It can be looked at and handed on:
///
/// ```
/// use kvlane_transport::engine::FenceProof;
/// fn look(p: FenceProof) -> (kvlane_proto::GrantId, [FenceProof; 1]) {
///     (p.grant(), [p])
/// }
/// ```
///
/// It cannot be made, copied or cloned outside the engines:
///
/// ```compile_fail,E0451
/// use kvlane_transport::engine::{FenceHow, FenceProof};
/// let forged = FenceProof { grant: kvlane_proto::GrantId(1), how: FenceHow::Close };
/// ```
/// ```compile_fail,E0624
/// use kvlane_transport::engine::{FenceHow, FenceProof};
/// let forged = FenceProof::new(kvlane_proto::GrantId(1), FenceHow::Close);
/// ```
/// ```compile_fail,E0599
/// use kvlane_transport::engine::FenceProof;
/// fn twice(p: FenceProof) -> (kvlane_proto::GrantId, [FenceProof; 2]) {
///     (p.grant(), [p.clone(), p])
/// }
/// ```
#[derive(Debug)]
#[must_use = "blocks stay lent until their proof is used"]
pub struct FenceProof {
    grant: GrantId,
    how: FenceHow,
}

impl FenceProof {
    pub(super) fn new(grant: GrantId, how: FenceHow) -> Self {
        Self { grant, how }
    }
    /// The grant that is fenced.
    pub fn grant(&self) -> GrantId {
        self.grant
    }
    /// How it was fenced.
    pub fn how(&self) -> FenceHow {
        self.how
    }
}

/// Proof that nothing this side posted for a grant can land, and that its source may change.
#[derive(Debug)]
#[must_use = "source blocks stay pinned until their proof is used"]
pub struct Quiesced {
    link: LinkId,
    grant: GrantId,
}

impl Quiesced {
    pub(super) fn new(link: LinkId, grant: GrantId) -> Self {
        Self { link, grant }
    }
    /// The link of the grant.
    pub fn link(&self) -> LinkId {
        self.link
    }
    /// The grant that is quiet.
    pub fn grant(&self) -> GrantId {
        self.grant
    }
}

#[cfg(test)]
pub(crate) fn proof_for_tests(grant: GrantId, how: FenceHow) -> FenceProof {
    FenceProof::new(grant, how)
}
