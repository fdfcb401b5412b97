//! Lists of block ids, as the serving engine's allocator hands them out.
//!
//! A list travels as runs (first, count, stride) or, when random, as fixed-width ids; never as
//! addresses. One list serves all layers and both of K and V.

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::limits;

/// `count` ids: `first`, `first + stride`, …
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// The first id.
    pub first: u32,
    /// How many; never 0.
    pub count: u32,
    /// Distance; 0 is refused, except that a run of one has stride 1.
    pub stride: u32,
}

impl Run {
    fn last(self) -> Option<u32> {
        self.count.checked_sub(1)?.checked_mul(self.stride)?.checked_add(self.first)
    }
}

/// An ordered list of block ids.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BlockList {
    /// Runs, for lists that are mostly in a row.
    Runs(Vec<Run>),
    /// Plain ids, for random lists.
    Ids(Vec<u32>),
}

impl BlockList {
    /// No blocks.
    pub const EMPTY: Self = Self::Runs(Vec::new());

    /// The smaller of the two forms.
    pub fn from_ids(ids: &[u32]) -> Self {
        let mut runs: Vec<Run> = Vec::new();
        for &id in ids {
            if let Some(run) = runs.last_mut() {
                let step = id.wrapping_sub(run.first);
                if run.count == 1 && id > run.first {
                    (run.stride, run.count) = (step, 2);
                    continue;
                }
                if run.count > 1 && run.last().and_then(|l| l.checked_add(run.stride)) == Some(id) {
                    run.count += 1;
                    continue;
                }
            }
            // A run is 12 bytes, an id 4.
            if (runs.len() + 1) * 3 > ids.len() {
                return Self::Ids(ids.to_vec());
            }
            runs.push(Run { first: id, count: 1, stride: 1 });
        }
        Self::Runs(runs)
    }

    /// Number of blocks, without overflow on hostile runs.
    pub fn len(&self) -> u64 {
        match self {
            Self::Runs(runs) => runs.iter().map(|r| u64::from(r.count)).sum(),
            Self::Ids(ids) => ids.len() as u64,
        }
    }
    /// Whether there is no block.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Size of the list in words of 4 bytes.
    pub fn words(&self) -> usize {
        match self {
            Self::Runs(runs) => runs.len() * 3,
            Self::Ids(ids) => ids.len(),
        }
    }

    /// Checks and expands a list: at most [`limits::BLOCKS_PER_ROOM_MAX`] ids, each below
    /// `pool_blocks`, none twice. Linear in the list; allocates one bit per pool block touched.
    ///
    /// # Errors
    /// [`ErrorKind::LimitExceeded`], or [`ErrorKind::InvalidPlan`] naming index and id.
    pub fn expand(&self, pool_blocks: u32) -> Result<Vec<u32>> {
        let len = self.len();
        if len > u64::from(limits::BLOCKS_PER_ROOM_MAX) {
            return Err(Error::new(ErrorKind::LimitExceeded, "too many blocks in one room")
                .with("found", len)
                .with("limit", limits::BLOCKS_PER_ROOM_MAX));
        }
        let out_of_range = |index: usize, id: u64| {
            Error::new(ErrorKind::InvalidPlan, "block id is outside the pool")
                .with("index", index)
                .with("id", id)
                .with("pool_blocks", pool_blocks)
        };
        let mut ids = Vec::with_capacity(len as usize);
        match self {
            Self::Ids(list) => {
                if let Some(i) = list.iter().position(|&id| id >= pool_blocks) {
                    return Err(out_of_range(i, u64::from(list[i])));
                }
                ids.extend_from_slice(list);
            }
            Self::Runs(runs) => {
                for run in runs {
                    if run.count == 0 || run.stride == 0 {
                        return Err(Error::new(ErrorKind::InvalidPlan, "empty or standing run")
                            .with("first", run.first)
                            .with("count", run.count)
                            .with("stride", run.stride));
                    }
                    match run.last() {
                        Some(last) if last < pool_blocks => {}
                        _ => {
                            let last = u64::from(run.first)
                                + u64::from(run.count - 1) * u64::from(run.stride);
                            return Err(out_of_range(ids.len() + run.count as usize - 1, last));
                        }
                    }
                    ids.extend((0..run.count).map(|i| run.first + i * run.stride));
                }
            }
        }
        let mut seen = vec![0u64; ids.iter().max().map_or(0, |&m| m as usize / 64 + 1)];
        for (index, &id) in ids.iter().enumerate() {
            let (word, bit) = (id as usize / 64, 1u64 << (id % 64));
            if seen[word] & bit != 0 {
                return Err(Error::new(ErrorKind::InvalidPlan, "block id appears twice")
                    .with("index", index)
                    .with("id", id)
                    .hint("every destination block may be filled once per room"));
            }
            seen[word] |= bit;
        }
        Ok(ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn duplicates_and_foreign_ids_are_refused_by_index() {
        let e = BlockList::from_ids(&[5, 5]).expand(10).unwrap_err();
        assert!(e.to_string().contains("index=1, id=5"), "{e}");
        let e = BlockList::from_ids(&[1, 10]).expand(10).unwrap_err();
        assert!(e.to_string().contains("index=1, id=10"), "{e}");
        for run in [
            Run { first: 0, count: 0, stride: 1 },
            Run { first: 0, count: 2, stride: 0 },
            Run { first: u32::MAX, count: 2, stride: 1 },
            Run { first: 0, count: 2, stride: u32::MAX },
            Run { first: 0, count: u32::MAX, stride: u32::MAX },
        ] {
            assert!(BlockList::Runs(vec![run]).expand(100).is_err(), "{run:?}");
        }
        let many = vec![Run { first: 0, count: u32::MAX, stride: 1 }; 1000];
        assert_eq!(
            BlockList::Runs(many).expand(u32::MAX).unwrap_err().kind(),
            ErrorKind::LimitExceeded
        );
    }

    #[test]
    fn a_row_is_one_run() {
        let ids: Vec<u32> = (7..5000).collect();
        assert_eq!(
            BlockList::from_ids(&ids),
            BlockList::Runs(vec![Run { first: 7, count: 4993, stride: 1 }])
        );
        assert!(BlockList::from_ids(&[]).is_empty());
    }

    proptest! {
        #[test]
        fn expand_gives_back_what_went_in(ids in proptest::collection::vec(0u32..500, 0..200)) {
            let list = BlockList::from_ids(&ids);
            prop_assert_eq!(list.len(), ids.len() as u64);
            let unique = ids.iter().collect::<std::collections::HashSet<_>>().len() == ids.len();
            match list.expand(500) {
                Ok(back) => prop_assert!(unique && back == ids),
                Err(_) => prop_assert!(!unique),
            }
        }
    }
}
