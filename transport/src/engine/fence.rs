//! The proofs without which a block is not given back. Only engines can make them.

use kvlane_proto::{GrantId, LinkId};

/// How a grant is fenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FenceHow {
    /// The sender has said that nothing can land, or the receiver's own code holds the pen.
    Close,
    /// Without the sender: whatever it takes so that nothing can land.
    Revoke,
}

/// Proof that nothing can land under a grant any more, and that what landed is visible.
///
/// It cannot be made, copied or cloned outside the engines:
///
/// ```compile_fail
/// let forged = kvlane_transport::engine::FenceProof { grant: kvlane_proto::GrantId(1) };
/// ```
/// ```compile_fail
/// fn twice(p: kvlane_transport::engine::FenceProof) -> [kvlane_transport::engine::FenceProof; 2] {
///     [p.clone(), p]
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
