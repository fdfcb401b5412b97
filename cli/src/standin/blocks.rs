//! The blocks of a pool, handed out first come first served and in random order.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvlane_actors::Pool;
use kvlane_proto::{BlockList, Error, ErrorKind, Result};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

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

    /// Waits for `count` blocks. Those that come back without a stamp, or with one that is whole,
    /// are fine; a broken one is a write that landed after its fence.
    pub(crate) async fn take(&self, pool: &Pool, count: u32, wait: Duration) -> Result<Taken> {
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
        let ids = {
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
            ids
        };
        let taken = Taken { ids, permit: Some(permit) };
        let late = late_writes(pool, &taken.ids)?;
        if late > 0 {
            return Err(Error::new(ErrorKind::Corrupt, "pages were written after their fence")
                .with("pages", late));
        }
        Ok(taken)
    }

    /// Stamps blocks and makes them free.
    pub(crate) fn give_back(&self, pool: &Pool, mut taken: Taken) -> Result<()> {
        for_each_page(pool, &taken.ids, |at, len| {
            pool.regions[0].memory().write_at(at, &STAMP[..len])
        })?;
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.0.append(&mut taken.ids);
        drop(free);
        drop(taken.permit.take());
        Ok(())
    }
}

/// Pages whose stamp is broken. A page that was never used is zero.
fn late_writes(pool: &Pool, ids: &[u32]) -> Result<u64> {
    let mut late = 0;
    for_each_page(pool, ids, |at, len| {
        let mut found = [0; STAMP.len()];
        pool.regions[0].memory().read_at(at, &mut found[..len])?;
        let fresh = found[..len].iter().all(|&b| b == 0);
        late += u64::from(!fresh && found[..len] != STAMP[..len]);
        Ok(())
    })?;
    Ok(late)
}

fn for_each_page(
    pool: &Pool,
    ids: &[u32],
    mut f: impl FnMut(u64, usize) -> std::io::Result<()>,
) -> Result<()> {
    let len = STAMP.len().min(pool.layout.page_bytes() as usize);
    for slab in 0..pool.map.slab_address.len() {
        for &id in ids {
            f(offset(pool, slab, id), len).map_err(|e| {
                Error::new(ErrorKind::Internal, "a page is outside its pool")
                    .with("slab", slab)
                    .with("block", id)
                    .caused_by(e)
            })?;
        }
    }
    Ok(())
}

/// Where a page is in the pool's one region.
pub(crate) fn offset(pool: &Pool, slab: usize, block: u32) -> u64 {
    pool.map.slab_address[slab] - pool.regions[0].address()
        + u64::from(block) * pool.map.block_stride_bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::models;

    #[tokio::test]
    async fn a_write_to_a_free_block_is_found_when_it_is_used_again() {
        let pool = Pool::own(models::layout("tiny", 16).unwrap(), 8).unwrap();
        let blocks = Blocks::new(8);
        let wait = Duration::from_secs(1);
        let taken = blocks.take(&pool, 8, wait).await.unwrap();
        assert!(blocks.take(&pool, 1, Duration::ZERO).await.is_err(), "all are in use");
        blocks.give_back(&pool, taken).unwrap();
        let taken = blocks.take(&pool, 8, wait).await.unwrap();
        blocks.give_back(&pool, taken).unwrap();
        pool.regions[0].memory().write_at(offset(&pool, 3, 5) + 9, &[0xff]).unwrap();
        let e = blocks.take(&pool, 8, wait).await.err().unwrap();
        assert_eq!(e.kind(), ErrorKind::Corrupt);
        assert!(e.to_string().contains("pages=1"), "{e}");
    }
}
