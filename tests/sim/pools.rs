//! Memory, modelled as an array of page contents, and who holds which block.
//!
//! A page has two words, so that a torn page can be told. A word says which room, prompt block,
//! slab and version (tokens filled) it belongs to. A block that comes back is overwritten with
//! canaries at once and goes to the front of the free list: whoever still writes to it, or reads
//! from it, is seen.

use kvlane_proto::{Device, GrantId, Layout, PoolMap, RoomId};
use std::sync::Arc;

pub(crate) const WORDS: usize = 2;
const BASE: u64 = 0x10_0000;

/// The word `w` of a page whose block holds `fill` tokens.
pub(crate) fn content(seq: u32, prompt_block: u32, slab: u32, fill: u32, w: usize) -> u64 {
    u64::from(seq) << 32
        | u64::from(prompt_block) << 20
        | u64::from(slab) << 12
        | u64::from(fill) << 4
        | w as u64
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Block {
    Free,
    /// Held by the serving engine for a room, not lent yet.
    Held(RoomId),
    /// Lent to kvlane: what it will hold, or what it holds.
    Lent {
        room: RoomId,
        grant: GrantId,
        seq: u32,
        prompt_block: u32,
        fill: u32,
    },
    Withheld,
}

pub(crate) struct Pool {
    pub(crate) words: Vec<u64>,
    pub(crate) blocks: Vec<Block>,
    pub(crate) map: Arc<PoolMap>,
    free: Vec<u32>,
    slabs: u32,
    page_bytes: u64,
    canary: u64,
}

impl Pool {
    pub(crate) fn new(layout: &Layout, blocks: u32) -> Self {
        let map = Arc::new(PoolMap::contiguous(Device::Host, BASE, layout, blocks));
        let slabs = layout.pages_per_block();
        let mut pool = Self {
            words: vec![0; (slabs * blocks) as usize * WORDS],
            blocks: vec![Block::Free; blocks as usize],
            map,
            free: Vec::new(),
            slabs,
            page_bytes: u64::from(layout.page_bytes()),
            canary: 0,
        };
        for block in (0..blocks).rev() {
            pool.give_back(block);
        }
        pool
    }
    pub(crate) fn page_of(&self, address: u64) -> usize {
        ((address - BASE) / self.page_bytes) as usize
    }
    pub(crate) fn page(&self, slab: u32, block: u32) -> usize {
        slab as usize * self.blocks.len() + block as usize
    }
    pub(crate) fn block_of(&self, page: usize) -> u32 {
        (page % self.blocks.len()) as u32
    }
    pub(crate) fn slab_of(&self, page: usize) -> u32 {
        (page / self.blocks.len()) as u32
    }
    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }
    pub(crate) fn withheld(&self) -> usize {
        self.blocks.iter().filter(|b| **b == Block::Withheld).count()
    }
    /// Takes blocks, most lately returned first.
    pub(crate) fn take(&mut self, count: usize, room: RoomId) -> Option<Vec<u32>> {
        if self.free.len() < count {
            return None;
        }
        let ids = self.free.split_off(self.free.len() - count);
        for &id in &ids {
            self.blocks[id as usize] = Block::Held(room);
        }
        Some(ids)
    }
    pub(crate) fn give_back(&mut self, block: u32) {
        self.blocks[block as usize] = Block::Free;
        self.free.push(block);
        self.canary += 1;
        for slab in 0..self.slabs {
            let page = self.page(slab, block);
            for w in 0..WORDS {
                self.words[page * WORDS + w] = self.canary_of(block, slab);
            }
        }
    }
    fn canary_of(&self, block: u32, slab: u32) -> u64 {
        0xCAFE << 48 | u64::from(block) << 16 | u64::from(slab)
    }
    /// The first free page whose canary is gone.
    pub(crate) fn broken_canary(&self) -> Option<usize> {
        self.free.iter().find_map(|&b| {
            (0..self.slabs).map(|s| (s, self.page(s, b))).find_map(|(s, p)| {
                let want = self.canary_of(b, s);
                let words = &self.words[p * WORDS..(p + 1) * WORDS];
                (words.iter().any(|w| *w != want)).then_some(p)
            })
        })
    }
}
