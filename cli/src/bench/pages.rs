//! What is moved: sizes, random pages, and the bytes that must be in them.
//!
//! Pure but for reading and writing pools. In: a page size and seeds. Out: block ids, plans, and
//! whether a pool holds what was sent. Invariants: the same seed gives both processes the same ids,
//! so that only seeds cross between them; every byte of the source depends on its place in the
//! pool, so a page that is missing, swapped or torn is found.

use std::sync::Arc;

use kvlane_proto::layout::{Coordinates, Dtype, KvKind, Order};
use kvlane_proto::limits::PAGE_BYTES_MAX;
use kvlane_proto::{
    BlockList, Device, Error, ErrorKind, Layout, PartId, PartPages, Plan, PoolMap, Result,
};
use kvlane_transport::memory::Region;
use kvlane_transport::sys::mem::Pages;
use serde::{Deserialize, Serialize};

use crate::load::{GOLDEN, mix};

/// Size of a pool, unless the pages of one repetition need more: beyond what caches hold.
pub(crate) const POOL_BYTES: u64 = 256 << 20;
/// Most blocks of a pool, unless one repetition moves more; pages of a few bytes need no more.
const POOL_BLOCKS: u64 = 1 << 16;
/// Round trips in one repetition, at most.
const TRIPS: u32 = 200;

/// A page size, and how many pages are moved at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Size {
    pub(crate) page_bytes: u32,
    pub(crate) pages: u32,
    /// Blocks of the pool, of which `pages` are drawn.
    pub(crate) pool_blocks: u32,
}

impl Size {
    /// `pages` of `page_bytes`; a number that suits the page size if not given.
    pub(crate) fn new(page_bytes: u32, pages: Option<u32>) -> Self {
        let fit = (POOL_BYTES / u64::from(page_bytes)).max(1);
        let usual = match page_bytes {
            ..0x4_0000 => 4096,
            0x4_0000..0x10_0000 => 1024,
            _ => 256,
        };
        let pages = pages.unwrap_or_else(|| fit.min(usual) as u32);
        let pool_blocks = fit.min(POOL_BLOCKS).max(u64::from(pages)) as u32;
        Self { page_bytes, pages, pool_blocks }
    }
    /// Bytes of one repetition.
    pub(crate) fn bytes(self) -> u64 {
        u64::from(self.pages) * u64::from(self.page_bytes)
    }
    /// Bytes of the pool.
    pub(crate) fn pool_bytes(self) -> u64 {
        u64::from(self.pool_blocks) * u64::from(self.page_bytes)
    }
    /// Round trips of one repetition.
    pub(crate) fn trips(self) -> u32 {
        self.pool_blocks.min(TRIPS)
    }
    /// One layer of one slab: a block is a page.
    fn layout(self) -> Layout {
        Layout {
            model: "bench".into(),
            layers: 1,
            first_layer: 0,
            kv_heads: 1,
            kv_heads_total: 1,
            head_dim: self.page_bytes,
            dtype: Dtype::Fp8E4m3,
            page_tokens: 1,
            window_tokens: 0,
            order: Order::Nhd,
            kind: KvKind::Mla,
            at: Coordinates::SINGLE,
        }
    }
    /// Where the blocks of a pool are.
    pub(crate) fn map(self, pool: &Region) -> PoolMap {
        PoolMap::contiguous(Device::Host, pool.address(), &self.layout(), self.pool_blocks)
    }
    /// Addresses of a pool's blocks, in parts.
    pub(crate) fn plan(self, map: &Arc<PoolMap>, ids: &[u32], part_bytes: u64) -> Result<Plan> {
        let layout = self.layout();
        let blocks = BlockList::from_ids(ids);
        Plan::alike(&layout, map.clone(), ids.len() as u32, &blocks, part_bytes)
    }
    /// The same, as a list for scatter calls.
    pub(crate) fn pages(self, pool: &Region, ids: &[u32]) -> Result<Pages> {
        let mut pages = Pages::default();
        for &id in ids {
            let address = pool.address() + self.offset(id);
            let bytes = u64::from(self.page_bytes);
            pages.push(pool.memory(), address, bytes).map_err(|e| {
                Error::new(ErrorKind::Internal, "a page is outside the pool")
                    .with("id", id)
                    .caused_by(e)
            })?;
        }
        Ok(pages)
    }
    pub(crate) fn offset(self, id: u32) -> u64 {
        u64::from(id) * u64::from(self.page_bytes)
    }
}

/// Checks a page size that a user gave.
pub(crate) fn page_bytes(text: &str) -> Result<u32, String> {
    match text.trim().parse::<u32>() {
        Ok(n) if (1..=PAGE_BYTES_MAX).contains(&n) => Ok(n),
        _ => Err(format!("a page has 1 to {PAGE_BYTES_MAX} bytes (64 MiB)")),
    }
}

/// One choice of random pages at both ends: page `i` of the source goes to page `i` of the
/// destination.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Draw {
    pub(crate) seed: u64,
    pub(crate) pages: u32,
}

impl Draw {
    /// The source's blocks.
    pub(crate) fn from(self, size: Size) -> Vec<u32> {
        random_ids(self.seed, size.pool_blocks, self.pages)
    }
    /// The destination's.
    pub(crate) fn to(self, size: Size) -> Vec<u32> {
        random_ids(!self.seed, size.pool_blocks, self.pages)
    }
}

/// `n` different numbers below `of`, in random order.
fn random_ids(seed: u64, of: u32, n: u32) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..of).collect();
    let n = n.min(of);
    for i in 0..n {
        let random = mix(seed.wrapping_add(GOLDEN.wrapping_mul(u64::from(i) + 1)));
        // The bias of a remainder is below 2^-32 here.
        let other = u64::from(i) + random % u64::from(of - i);
        ids.swap(i as usize, other as usize);
    }
    ids.truncate(n as usize);
    ids
}

/// All parts of a plan, as they are handed to an engine.
pub(crate) fn parts(plan: &Plan) -> Result<Vec<PartPages>> {
    (0..plan.grid().parts()).map(|part| plan.pages(PartId(part))).collect()
}

/// The bytes of a source pool.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Pattern {
    pub(crate) salt: u64,
}

/// How much is written or compared at a time.
const CHUNK: usize = 64 << 10;

impl Pattern {
    fn word(self, at: u64) -> [u8; 8] {
        mix(self.salt.wrapping_add(GOLDEN.wrapping_mul(at))).to_le_bytes()
    }
    /// The bytes from `offset` of the pool on.
    pub(crate) fn bytes(self, offset: u64, out: &mut [u8]) {
        let skip = (offset % 8) as usize;
        let head = (8 - skip).min(out.len());
        let mut at = offset / 8;
        let (head, rest) = out.split_at_mut(head);
        head.copy_from_slice(&self.word(at)[skip..skip + head.len()]);
        let (words, tail) = rest.as_chunks_mut::<8>();
        for word in words {
            at += 1;
            *word = self.word(at);
        }
        tail.copy_from_slice(&self.word(at + 1)[..tail.len()]);
    }
    /// Writes `bytes` bytes of a pool, piece by piece.
    ///
    /// # Errors
    /// What `write` says.
    pub(crate) fn fill(
        self,
        bytes: u64,
        mut write: impl FnMut(u64, &[u8]) -> std::io::Result<()>,
    ) -> Result<()> {
        let mut chunk = vec![0; CHUNK];
        let mut offset = 0;
        while offset < bytes {
            let n = (bytes - offset).min(CHUNK as u64) as usize;
            self.bytes(offset, &mut chunk[..n]);
            write(offset, &chunk[..n]).map_err(outside)?;
            offset += n as u64;
        }
        Ok(())
    }
    /// Compares every page of a draw, byte by byte; gives the number of bytes compared.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] naming the first byte that is not what was sent.
    pub(crate) fn check(
        self,
        size: Size,
        draw: Draw,
        read: impl Fn(u64, &mut [u8]) -> std::io::Result<()>,
    ) -> Result<u64> {
        let bytes = u64::from(size.page_bytes);
        let (mut found, mut expected) = (vec![0; CHUNK], vec![0; CHUNK]);
        for (page, (from, to)) in draw.from(size).into_iter().zip(draw.to(size)).enumerate() {
            let mut done = 0;
            while done < bytes {
                let n = (bytes - done).min(CHUNK as u64) as usize;
                let (found, expected) = (&mut found[..n], &mut expected[..n]);
                read(size.offset(to) + done, found).map_err(outside)?;
                self.bytes(size.offset(from) + done, expected);
                if found != expected {
                    let at = found.iter().zip(&*expected).position(|(a, b)| a != b).unwrap_or(0);
                    return Err(Error::new(
                        ErrorKind::Corrupt,
                        "a page is not what was sent, so there is no figure",
                    )
                    .with("page", page)
                    .with("page_bytes", size.page_bytes)
                    .with("offset", done + at as u64)
                    .with("found", format!("{:#04x}", found[at]))
                    .with("expected", format!("{:#04x}", expected[at])));
                }
                done += n as u64;
            }
        }
        Ok(u64::from(draw.pages) * bytes)
    }
}

fn outside(e: std::io::Error) -> Error {
    Error::new(ErrorKind::Internal, "a page is outside the pool").caused_by(e)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn a_number_of_pages_suits_the_size_and_the_pool() {
        for (page_bytes, pages, pool_blocks) in [
            (1, 4096, 1 << 16),
            (4096, 4096, 1 << 16),
            (65536, 4096, 4096),
            ((1 << 18) - 1, 1024, 1024),
            (1 << 18, 1024, 1024),
            (1 << 20, 256, 256),
            (64 << 20, 4, 4),
        ] {
            let size = Size::new(page_bytes, None);
            assert_eq!((size.pages, size.pool_blocks), (pages, pool_blocks), "{page_bytes}");
            assert!(size.pool_bytes() <= POOL_BYTES, "{page_bytes}");
        }
        let size = Size::new(4096, Some(1 << 17));
        assert_eq!((size.pages, size.pool_blocks), (1 << 17, 1 << 17));
    }

    #[test]
    fn page_sizes_are_bounded() {
        assert_eq!(page_bytes("63"), Ok(63));
        assert_eq!(page_bytes("67108864"), Ok(64 << 20));
        for bad in ["0", "67108865", "-1", "4k", ""] {
            assert!(page_bytes(bad).unwrap_err().contains("1 to 67108864"), "{bad}");
        }
    }

    #[test]
    fn draws_are_distinct_and_differ_by_seed_and_side() {
        let size = Size::new(4096, Some(1000));
        let draw = |seed| Draw { seed, pages: 1000 };
        for ids in [draw(1).from(size), draw(1).to(size), draw(2).from(size)] {
            let mut sorted = ids.clone();
            sorted.sort_unstable();
            sorted.dedup();
            assert_eq!(sorted.len(), 1000);
            assert!(sorted[999] < size.pool_blocks);
            assert_ne!(sorted, ids);
        }
        assert_ne!(draw(1).from(size), draw(1).to(size));
        assert_ne!(draw(1).from(size), draw(2).from(size));
        let all = Size { page_bytes: 1, pages: 3, pool_blocks: 3 };
        let mut ids = Draw { seed: 5, pages: 3 }.from(all);
        ids.sort_unstable();
        assert_eq!(ids, [0, 1, 2]);
    }

    #[test]
    fn bytes_depend_on_their_place_only() {
        let pattern = Pattern { salt: 7 };
        let mut whole = [0; 64];
        pattern.bytes(1000, &mut whole);
        for from in 0..20 {
            for n in 0..20 {
                let mut some = vec![0; n];
                pattern.bytes(1000 + from as u64, &mut some);
                assert_eq!(some, whole[from..from + n], "{from} {n}");
            }
        }
    }

    #[test]
    fn a_check_finds_any_wrong_byte() {
        let size = Size { page_bytes: 63, pages: 5, pool_blocks: 9 };
        let (pattern, draw) = (Pattern { salt: 3 }, Draw { seed: 1, pages: 5 });
        let source = RefCell::new(vec![0; 63 * 9]);
        let write = |at: u64, bytes: &[u8]| {
            source.borrow_mut()[at as usize..][..bytes.len()].copy_from_slice(bytes);
            Ok(())
        };
        pattern.fill(63 * 9, write).unwrap();
        let mut pool = vec![0; 63 * 9];
        for (from, to) in draw.from(size).into_iter().zip(draw.to(size)) {
            let (from, to) = (from as usize * 63, to as usize * 63);
            pool[to..to + 63].copy_from_slice(&source.borrow()[from..from + 63]);
        }
        let check = |pool: &[u8]| {
            pattern.check(size, draw, |at, into| {
                into.copy_from_slice(&pool[at as usize..][..into.len()]);
                Ok(())
            })
        };
        assert_eq!(check(&pool).unwrap(), 5 * 63);
        let third = draw.to(size)[3] as usize * 63;
        pool[third + 62] ^= 1;
        let e = check(&pool).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Corrupt);
        assert!(e.to_string().contains("page=3, page_bytes=63, offset=62"), "{e}");
    }
}
