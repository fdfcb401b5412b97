//! The blocks of a pool, handed out first come first served and in random order.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvlane_proto::{BlockList, Error, ErrorKind, Result};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::Model;

/// Start of a page that nobody is to write.
const STAMP: [u8; 64] = *b"free: whoever wrote over this came too late. kvlane stand-in. --";

pub(crate) struct Blocks {
    free: Mutex<(Vec<u32>, u64)>,
    room: Arc<Semaphore>,
    total: u32,
}

/// Blocks in use. Dropped without [`Blocks::give_back`] they are never used again.
pub(crate) struct Taken {
    pub(crate) ids: Vec<u32>,
    permit: Option<OwnedSemaphorePermit>,
}

impl Taken {
    pub(crate) fn list(&self) -> BlockList {
        BlockList::from_ids(&self.ids)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if let Some(permit) = self.permit.take() {
            permit.forget();
        }
    }
}

impl Blocks {
    pub(crate) fn new(total: u32) -> Self {
        let free = Mutex::new(((0..total).collect(), 0x9e37_79b9_7f4a_7c15));
        Self { free, room: Arc::new(Semaphore::new(total as usize)), total }
    }

    /// Waits for `count` blocks.
    async fn take(&self, count: u32, wait: Duration) -> Result<Taken> {
        let short = |why: &str| {
            Error::new(ErrorKind::Busy, why.to_string())
                .with("blocks", count)
                .with("pool_blocks", self.total)
                .with("free", self.room.available_permits())
        };
        if count > self.total {
            return Err(short("the request has more blocks than the pool"));
        }
        let permit = tokio::time::timeout(wait, self.room.clone().acquire_many_owned(count))
            .await
            .map_err(|_| short("no blocks became free in time"))?
            .map_err(|_| short("the stand-in ends"))?;
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let (list, rng) = &mut *free;
        let mut ids = Vec::with_capacity(count as usize);
        for _ in 0..count {
            *rng ^= *rng << 13;
            *rng ^= *rng >> 7;
            *rng ^= *rng << 17;
            let at = (*rng % list.len().max(1) as u64) as usize;
            ids.push(list.swap_remove(at));
        }
        Ok(Taken { ids, permit: Some(permit) })
    }

    pub(super) fn free(&self) -> (u32, u32) {
        (self.room.available_permits() as u32, self.total)
    }

    fn give_back(&self, mut taken: Taken) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.0.append(&mut taken.ids);
        drop(free);
        drop(taken.permit.take());
    }
}

fn written_late(pages: u64) -> Result<()> {
    if pages > 0 {
        return Err(Error::new(ErrorKind::Corrupt, "pages were written after their fence")
            .with("pages", pages));
    }
    Ok(())
}

impl Model {
    /// Waits for so many blocks of each pool. Those that come back without a stamp, or with one
    /// that is whole, are fine; a broken one is a write that landed after its fence.
    pub(super) async fn take(&self, counts: &[u32], wait: Duration) -> Result<Vec<Taken>> {
        let mut all = Vec::new();
        for (pool, &count) in counts.iter().enumerate() {
            match self.blocks[pool].take(count, wait).await {
                Ok(taken) => all.push(taken),
                Err(e) => {
                    for (pool, taken) in all.into_iter().enumerate() {
                        self.blocks[pool].give_back(taken);
                    }
                    return Err(e.with("pool", pool));
                }
            }
        }
        let mut late = 0;
        for (pool, taken) in all.iter().enumerate() {
            late += self.late_writes(pool, &taken.ids)?;
        }
        written_late(late)?;
        Ok(all)
    }

    /// Stamps blocks and makes them free.
    pub(super) fn give_back(&self, all: Vec<Taken>) -> Result<()> {
        for (pool, taken) in all.into_iter().enumerate() {
            self.stamp(pool, &taken.ids)?;
            self.blocks[pool].give_back(taken);
        }
        Ok(())
    }

    /// Pages of free blocks, and how many of them nobody has written to since they came back, and how
    /// many somebody has.
    pub(super) fn audit(&self) -> Result<(u64, u64)> {
        let (mut whole, mut broken) = (0, 0);
        for (pool, blocks) in self.blocks.iter().enumerate() {
            // Nobody takes them meanwhile.
            let free = blocks.free.lock().unwrap_or_else(PoisonError::into_inner);
            let layout = &self.layouts()[pool];
            let pages = free.0.len() as u64 * u64::from(layout.layers * layout.kind.slabs());
            let late = self.late_writes(pool, &free.0)?;
            (whole, broken) = (whole + pages - late, broken + late);
        }
        Ok((whole, broken))
    }

    fn stamp(&self, pool: usize, ids: &[u32]) -> Result<()> {
        let stamp = self.stamp_of(pool);
        let layers = 0..self.layouts()[pool].layers;
        self.for_each_page(pool, layers, ids, |_, _, _, page| page.write(&stamp))
    }

    /// Looks at every free block, if that is wanted after each room. None is taken meanwhile.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] if a page of one was written to.
    pub(super) fn audit_room(&self) -> Result<()> {
        let mut late = 0;
        for (pool, blocks) in self.blocks.iter().enumerate().filter(|_| self.audits_rooms) {
            let free = blocks.free.lock().unwrap_or_else(PoisonError::into_inner);
            late += self.late_writes(pool, &free.0)?;
        }
        written_late(late)
    }

    /// Pages whose stamp is broken. A page that was never used is zero.
    fn late_writes(&self, pool: usize, ids: &[u32]) -> Result<u64> {
        let mut late = 0;
        let stamp = self.stamp_of(pool);
        let mut found = vec![0; stamp.len()];
        let layers = 0..self.layouts()[pool].layers;
        self.for_each_page(pool, layers, ids, |_, _, _, page| {
            page.read(&mut found)?;
            late += u64::from(found != stamp && found.iter().any(|&b| b != 0));
            Ok(())
        })?;
        Ok(late)
    }

    /// What a free page begins with; all of it, where writes are to be found wherever they land.
    fn stamp_of(&self, pool: usize) -> Vec<u8> {
        let page = self.layouts()[pool].page_bytes() as usize;
        let len = if self.canaries { page } else { STAMP.len().min(page) };
        STAMP.into_iter().cycle().take(len).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::models;
    use kvlane_actors::Pools;

    #[tokio::test]
    async fn a_write_to_a_free_block_is_found_when_it_is_used_again() {
        let layout = models::pools("tiny", 16, (0, 1)).unwrap().remove(0);
        let model = Model::new(Pools::own(layout, 8).unwrap(), false, false);
        let wait = Duration::from_secs(1);
        let taken = model.take(&[8], wait).await.unwrap();
        assert!(model.take(&[1], Duration::ZERO).await.is_err(), "all are in use");
        model.give_back(taken).unwrap();
        let taken = model.take(&[8], wait).await.unwrap();
        model.give_back(taken).unwrap();
        let map = &model.pools.maps[0];
        let page = map.slab_address[3] + 5 * map.block_stride_bytes;
        let at = page - model.pools.regions[0].address();
        model.pools.regions[0].memory().write_at(at + 9, &[0xff]).unwrap();
        let e = model.take(&[8], wait).await.err().unwrap();
        assert_eq!(e.kind(), ErrorKind::Corrupt);
        assert!(e.to_string().contains("pages=1"), "{e}");
    }
}
