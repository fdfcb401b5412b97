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

/// Proof that the source of a grant may change: nothing more of it is read, and nothing is posted
/// any more.
///
/// On one-sided paths it says more: nothing that was posted can land, unless a lane of the grant was
/// lost ([`super::EngineEvent::LaneDown`] comes first): of writes on a lost lane only the receiver can
/// make sure. Where the receiver copies, whole parts may still stand in a socket; the receiver's closed
/// grant stops those.
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

#[cfg(feature = "fault-injection")]
static FENCES_OFF: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

/// Makes every engine of this process answer fences with a proof that proves nothing: the grant
/// stays open. With it a test must see late writes, or it could not have seen them without.
#[cfg(feature = "fault-injection")]
pub fn set_fences_off(off: bool) {
    FENCES_OFF.store(off, std::sync::atomic::Ordering::SeqCst);
}

#[cfg(feature = "fault-injection")]
pub(super) fn fences_off() -> bool {
    FENCES_OFF.load(std::sync::atomic::Ordering::SeqCst)
}

#[cfg(test)]
pub(crate) fn proof_for_tests(grant: GrantId, how: FenceHow) -> FenceProof {
    FenceProof::new(grant, how)
}
