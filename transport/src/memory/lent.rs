//! Blocks that the serving engine's allocator lent.
//!
//! In: blocks, with the grant they are filled under. Out: the same blocks, for a proof that
//! nothing can land in them any more. Invariant: without a proof they stay withheld; dropping or
//! forgetting [`Lent`] never frees.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvlane_proto::{BlockList, Error, ErrorKind, GrantId, Result, RoomId};

use crate::engine::FenceProof;

/// Blocks lent for one grant.
///
/// With a proof they come back:
///
/// ```
/// # use kvlane_transport::{engine::FenceProof, memory::Lent};
/// # use kvlane_proto::{BlockList, Error};
/// fn back(lent: Lent, proof: FenceProof) -> Result<Vec<BlockList>, (Lent, Error)> {
///     lent.give_back(proof)
/// }
/// ```
///
/// Without one, the same code does not compile:
///
/// ```compile_fail,E0061
/// # use kvlane_transport::{engine::FenceProof, memory::Lent};
/// # use kvlane_proto::{BlockList, Error};
/// fn back(lent: Lent) -> Result<Vec<BlockList>, (Lent, Error)> {
///     lent.give_back()
/// }
/// ```
///
/// Nor does taking the blocks out:
///
/// ```compile_fail,E0616
/// # use kvlane_transport::memory::Lent;
/// # use kvlane_proto::BlockList;
/// fn back(lent: &mut Lent) -> Option<Vec<BlockList>> {
///     lent.blocks.take()
/// }
/// ```
///
/// And one proof gives back one grant's blocks, once:
///
/// ```compile_fail,E0382
/// # use kvlane_transport::{engine::FenceProof, memory::Lent};
/// fn twice(a: Lent, b: Lent, proof: FenceProof) {
///     let _ = (a.give_back(proof), b.give_back(proof));
/// }
/// ```
#[derive(Debug)]
#[must_use = "dropping lent blocks puts them into quarantine"]
pub struct Lent {
    room: RoomId,
    grant: GrantId,
    blocks: Option<Vec<BlockList>>,
    ledger: Arc<Quarantine>,
    /// It stands in the ledger.
    withheld: bool,
}

impl Lent {
    /// Takes blocks from the allocator for `grant`, pool by pool.
    pub fn new(
        room: RoomId,
        grant: GrantId,
        blocks: Vec<BlockList>,
        ledger: &Arc<Quarantine>,
    ) -> Self {
        Self { room, grant, blocks: Some(blocks), ledger: ledger.clone(), withheld: false }
    }
    /// The room they are for.
    pub fn room(&self) -> RoomId {
        self.room
    }
    /// The grant they are filled under.
    pub fn grant(&self) -> GrantId {
        self.grant
    }
    /// How many blocks.
    pub fn len(&self) -> u64 {
        self.blocks.as_deref().map_or(0, count)
    }
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// The fence does not complete: the blocks stand in the ledger until they are given back.
    pub fn withhold(&mut self) {
        if let Some(blocks) = self.blocks.as_ref().filter(|_| !self.withheld) {
            self.withheld = true;
            let (room, grant, blocks) = (self.room, self.grant, blocks.clone());
            self.ledger.add(Quarantined { room, grant, blocks });
        }
    }
    /// Gives the blocks back.
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] if the proof is another grant's. The proof is spent; a grant that is
    /// fenced already can be fenced again for a new one.
    #[allow(clippy::result_large_err)] // The caller gets the blocks back; boxing them helps nobody.
    pub fn give_back(mut self, proof: FenceProof) -> Result<Vec<BlockList>, (Self, Error)> {
        if proof.grant() != self.grant {
            let e = Error::new(ErrorKind::Internal, "the proof is for another grant")
                .with("found", proof.grant())
                .with("expected", self.grant)
                .with("room", self.room);
            return Err((self, e));
        }
        if self.withheld {
            self.ledger.remove(self.room, self.grant);
        }
        Ok(self.blocks.take().unwrap_or_default())
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.withhold();
    }
}

fn count(blocks: &[BlockList]) -> u64 {
    blocks.iter().map(BlockList::len).sum()
}

/// Blocks that are withheld because nothing proves that they are quiet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quarantined {
    /// The room they were for.
    pub room: RoomId,
    /// The grant they were filled under.
    pub grant: GrantId,
    /// Which, pool by pool.
    pub blocks: Vec<BlockList>,
}

/// The ledger of one worker's withheld blocks; gauge `kvlane_quarantined_blocks`.
///
/// Bounded by the pool: a block that is withheld cannot be lent again.
#[derive(Debug, Default)]
pub struct Quarantine(Mutex<Vec<Quarantined>>);

impl Quarantine {
    fn entries(&self) -> MutexGuard<'_, Vec<Quarantined>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn add(&self, entry: Quarantined) {
        let blocks = count(&entry.blocks);
        if blocks == 0 {
            return;
        }
        tracing::error!(
            room = entry.room.0,
            grant = entry.grant.0,
            blocks,
            "blocks are withheld: nothing proves that nobody writes to them; restart the worker to get them back"
        );
        // Workers of one process share the gauge.
        metrics::gauge!("kvlane_quarantined_blocks").increment(blocks as f64);
        self.entries().push(entry);
    }
    fn remove(&self, room: RoomId, grant: GrantId) {
        let mut entries = self.entries();
        if let Some(at) = entries.iter().position(|e| (e.room, e.grant) == (room, grant)) {
            let entry = entries.remove(at);
            metrics::gauge!("kvlane_quarantined_blocks").decrement(count(&entry.blocks) as f64);
        }
    }
    /// Number of blocks withheld.
    pub fn blocks(&self) -> u64 {
        self.entries().iter().map(|e| count(&e.blocks)).sum()
    }
    /// What is withheld, oldest first.
    pub fn list(&self) -> Vec<Quarantined> {
        self.entries().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{FenceHow, fence::proof_for_tests};

    fn lent(ledger: &Arc<Quarantine>) -> Lent {
        Lent::new(RoomId(1), GrantId(7), vec![BlockList::from_ids(&[3, 9, 4])], ledger)
    }

    #[test]
    fn only_the_grants_own_proof_gives_back() {
        let ledger = Arc::default();
        let other = proof_for_tests(GrantId(8), FenceHow::Close);
        let (still, e) = lent(&ledger).give_back(other).unwrap_err();
        assert!(e.to_string().contains("found=8, expected=7"), "{e}");
        let own = proof_for_tests(GrantId(7), FenceHow::Revoke);
        assert_eq!(still.give_back(own).unwrap()[0].expand(10).unwrap(), [3, 9, 4]);
        assert_eq!(ledger.blocks(), 0);
    }

    #[test]
    fn withheld_blocks_stand_in_the_ledger_until_their_proof_comes() {
        let ledger = Arc::default();
        let mut one = lent(&ledger);
        one.withhold();
        one.withhold();
        assert_eq!((ledger.blocks(), ledger.list().len()), (3, 1));
        let own = proof_for_tests(GrantId(7), FenceHow::Revoke);
        assert_eq!(count(&one.give_back(own).unwrap()), 3);
        assert_eq!(ledger.blocks(), 0);
    }

    #[test]
    fn dropping_withholds_and_names() {
        let ledger = Arc::default();
        drop(lent(&ledger));
        drop(Lent::new(RoomId(2), GrantId(9), vec![BlockList::EMPTY], &ledger));
        let list = ledger.list();
        assert_eq!((ledger.blocks(), list.len()), (3, 1));
        assert_eq!((list[0].room, list[0].grant), (RoomId(1), GrantId(7)));
    }
}
