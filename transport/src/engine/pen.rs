//! Who may write, where the receiver copies: the open grants, each with a lock that one receive or
//! copy holds.
//!
//! In: grants opened by the engine, revokes from any thread. Out: the target that a frame may land
//! in, and [`FenceProof`]s. Invariants: bytes land only while the target's pen is held and open;
//! a revoke returns only when no receive holds it and none can take it open again; a grant that was
//! fenced is not opened afterwards, as long as it is among the last
//! [`limits::TOMBSTONES_MAX`] that were (grant numbers are never used twice, so only an order that
//! was overtaken by its fence could try); a part that has landed is final.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use kvlane_proto::ended::Memory;
use kvlane_proto::grants::Grants;
use kvlane_proto::{Error, ErrorKind, GrantId, LaneId, LinkId, PartId, Plan, Result, limits};

use crate::engine::{FenceHow, FenceProof, OpenGrant};
use crate::memory::Region;

/// Where the parts of one grant go, while it is open.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) plan: Arc<Plan>,
    open: RwLock<bool>,
    /// A bit for each part that is in place.
    landed: Box<[AtomicU64]>,
}

/// Permission to write one piece.
pub(super) struct Held<'a>(#[allow(dead_code)] RwLockReadGuard<'a, bool>); // Held, never read.

impl Target {
    fn new(plan: Arc<Plan>) -> Self {
        let words = plan.grid().parts().div_ceil(64);
        let landed = (0..words).map(|_| AtomicU64::new(0)).collect();
        Self { plan, open: RwLock::new(true), landed }
    }
    /// The word and the bit of a part. Relaxed, because only the engine's thread uses them.
    fn bit(&self, part: PartId) -> Option<(&AtomicU64, u64)> {
        Some((self.landed.get(part.0 as usize / 64)?, 1 << (part.0 % 64)))
    }
    /// Whether every byte of the part is in place already.
    pub(super) fn has(&self, part: PartId) -> bool {
        self.bit(part).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
    }
    /// Every byte of the part is in place.
    pub(super) fn landed(&self, part: PartId) {
        if let Some((word, bit)) = self.bit(part) {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }
    /// Takes the pen for one receive; `None` after a revoke.
    pub(super) fn hold(&self) -> Option<Held<'_>> {
        let guard = self.open.read().unwrap_or_else(PoisonError::into_inner);
        guard.then_some(Held(guard))
    }
    /// Waits for the receive that holds the pen, and takes the pen away for good.
    fn revoke(&self) {
        *self.open.write().unwrap_or_else(PoisonError::into_inner) = false;
    }
}

#[derive(Debug)]
struct State {
    grants: Grants<Arc<Target>>,
    fenced: Memory<GrantId, ()>,
}

impl Default for State {
    fn default() -> Self {
        Self { grants: Grants::default(), fenced: Memory::new(limits::TOMBSTONES_MAX) }
    }
}

/// The grants of one engine.
#[derive(Debug, Default)]
pub(super) struct Pens(Mutex<State>);

impl Pens {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// Opens a grant.
    pub(super) fn open(&self, grant: OpenGrant) -> Result<()> {
        let mut state = self.state();
        if state.fenced.get(&grant.grant).is_some() {
            return Err(Error::new(ErrorKind::Internal, "a grant was opened after its fence")
                .with("grant", grant.grant));
        }
        if state.grants.len() >= limits::ROOMS_MAX {
            return Err(Error::new(ErrorKind::Busy, "too many open grants")
                .with("grant", grant.grant)
                .with("limit", limits::ROOMS_MAX));
        }
        let links = grant.sources.into_iter().map(|s| {
            let parts = s.plan.grid().parts();
            (s.link, s.lanes, parts, Arc::new(Target::new(s.plan)))
        });
        state.grants.open(grant.grant, links)
    }
    /// Where a frame may land.
    pub(super) fn admit(
        &self,
        link: LinkId,
        lane: LaneId,
        grant: GrantId,
        part: PartId,
    ) -> Result<Arc<Target>> {
        self.state().grants.admit(link, lane, grant, part).map(|(_, target)| target.clone())
    }
    /// Makes sure that nothing lands under a grant any more.
    pub(super) fn fence(&self, grant: GrantId, how: FenceHow) -> FenceProof {
        #[cfg(feature = "fault-injection")]
        if crate::engine::fence::fences_off() {
            return FenceProof::new(grant, how);
        }
        let targets: Vec<Arc<Target>> = {
            let mut state = self.state();
            state.fenced.insert(grant, ());
            state.grants.get(grant).map(|(_, target)| target.clone()).collect()
        };
        for target in &targets {
            target.revoke();
        }
        // Only now: a second fence that came meanwhile had to find the targets and wait as well.
        drop(self.state().grants.close(grant));
        FenceProof::new(grant, how)
    }
    /// A grant with pages in `region`. Walks every page of every open grant; for the rare
    /// unregistration only.
    pub(super) fn user_of(&self, region: &Region) -> Option<GrantId> {
        let state = self.state();
        let uses = |target: &Arc<Target>| {
            let plan = &target.plan;
            (0..plan.grid().parts()).filter_map(|p| plan.pages(PartId(p)).ok()).any(|pages| {
                let device = pages.device();
                pages.iter().any(|page| region.contains(device, page.address, page.bytes.into()))
            })
        };
        state.grants.iter().find(|(_, target)| uses(target)).map(|(grant, _)| grant)
    }
}

/// Revokes grants from any thread, also while the engine's own thread is busy or stopped between
/// two receives: a receive holds the pen for at most one non-blocking call of 1 MiB.
#[derive(Clone, Debug)]
pub struct RevokeHandle(pub(super) Arc<Pens>);

impl RevokeHandle {
    /// Makes sure that nothing lands under `grant` any more. Blocks while a receive is under way:
    /// microseconds, or as long as the kernel keeps the engine's thread off the CPU inside it; with
    /// `shm` and memory that the sender's serving engine allocated, as long as its pager takes.
    pub fn revoke(&self, grant: GrantId) -> FenceProof {
        self.0.fence(grant, FenceHow::Revoke)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::OpenSource;
    use kvlane_proto::layout::{Coordinates, Dtype, KvKind, Order};
    use kvlane_proto::{BlockList, Device, Layout, PoolMap};

    fn grant(n: u64) -> OpenGrant {
        let layout = Layout {
            model: "m".into(),
            layers: 1,
            first_layer: 0,
            kv_heads: 1,
            kv_heads_total: 1,
            head_dim: 64,
            dtype: Dtype::Fp8E4m3,
            page_tokens: 1,
            window_tokens: 0,
            order: Order::Nhd,
            kind: KvKind::Mla,
            at: Coordinates::SINGLE,
        };
        let map = Arc::new(PoolMap::contiguous(Device::Host, 4096, &layout, 4));
        let plan = Plan::alike(&layout, map, 1, &BlockList::from_ids(&[2]), 64).unwrap();
        let plan = Arc::new(plan);
        let source = |link| OpenSource { link, lanes: vec![LaneId(0)], plan: plan.clone() };
        OpenGrant { grant: GrantId(n), sources: vec![source(LinkId(1)), source(LinkId(2))] }
    }

    #[test]
    fn a_revoke_waits_for_the_receive_and_ends_the_pen() {
        let pens = Arc::new(Pens::default());
        pens.open(grant(7)).unwrap();
        let target = pens.admit(LinkId(1), LaneId(0), GrantId(7), PartId(0)).unwrap();
        let held = target.hold().unwrap();
        let (tx, rx) = std::sync::mpsc::channel();
        let handle = RevokeHandle(pens.clone());
        let revoker = std::thread::spawn(move || {
            let proof = handle.revoke(GrantId(7));
            tx.send(()).unwrap();
            proof
        });
        // The proof cannot come while the receive is under way, however long that takes.
        assert!(rx.recv_timeout(std::time::Duration::from_millis(20)).is_err());
        drop(held);
        rx.recv().unwrap();
        assert_eq!(revoker.join().unwrap().grant(), GrantId(7));
        assert!(target.hold().is_none());
        assert!(pens.admit(LinkId(2), LaneId(0), GrantId(7), PartId(0)).is_err());
        assert!(pens.admit(LinkId(1), LaneId(0), GrantId(7), PartId(0)).is_err());
    }

    #[test]
    fn a_grant_fenced_before_it_was_opened_stays_closed() {
        let pens = Pens::default();
        let proof = pens.fence(GrantId(9), FenceHow::Close);
        assert_eq!(proof.how(), FenceHow::Close);
        assert!(pens.open(grant(9)).is_err());
        pens.open(grant(10)).unwrap();
        assert!(pens.open(grant(10)).is_err());
    }
}
