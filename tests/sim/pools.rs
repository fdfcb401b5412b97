//! Memory of the workers, word by word, and who holds which block.
//!
//! A row (one head of one token in one layer and slab) is one or two words. What a word means is
//! read off the layout here, apart from the plans of the machines: a word says which room, layer,
//! slab, head and token it belongs to, as the model counts them, so that whatever way it took
//! between ranks and page sizes, it is either in its place or not. A row whose page is still being
//! filled is marked as a draft.
//!
//! A block that comes back is overwritten with canaries at once and goes to the front of the free
//! list: whoever still writes to it, or reads from it, is seen.

use kvlane_proto::layout::{KvKind, Order};
use kvlane_proto::{Device, GrantId, Layout, PartPages, PoolMap, RoomId};
use std::sync::Arc;

pub(crate) const WORD_BYTES: u32 = 8;
/// Bits of a word that count drafts; 0 is final.
const DRAFT_BITS: u32 = 8;

/// What a word of a pool is; layer and head as the model counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) block: u32,
    /// Among those of this rank.
    pub(crate) layer: u32,
    /// Token of the block, or 0 of a row.
    pub(crate) token: u32,
    /// What is the same in every block: pool, layer, slab, head, word of the row.
    id: u64,
}

/// One pool of one rank.
#[derive(Debug)]
pub(crate) struct Geometry {
    pub(crate) layout: Layout,
    pub(crate) map: Arc<PoolMap>,
    base: u64,
    places: Vec<Place>,
}

/// Pools lie apart, so that an address says its pool.
const fn base(pool: usize) -> u64 {
    (pool as u64 + 1) << 32
}

impl Geometry {
    pub(crate) fn new(pool: usize, layout: &Layout, blocks: u32) -> Self {
        let base = base(pool);
        let map = Arc::new(PoolMap::contiguous(Device::Host, base, layout, blocks));
        let count = PoolMap::contiguous_bytes(layout, blocks) / u64::from(WORD_BYTES);
        let nowhere = Place { block: u32::MAX, layer: 0, token: 0, id: 0 };
        let mut it = Self { layout: layout.clone(), map, base, places: Vec::new() };
        let mut places = vec![nowhere; count as usize];
        let row_words = layout.row_bytes() / WORD_BYTES;
        let slabs = layout.kind.slabs();
        for block in 0..blocks {
            for (slab, word, i) in it.words_of_slabs(block) {
                let (row, w) = (i / row_words, i % row_words);
                let (token, head) = match layout.order {
                    Order::Nhd => (row / layout.kv_heads, row % layout.kv_heads),
                    Order::Hnd => (row % layout.page_tokens, row / layout.page_tokens),
                };
                let (layer, slab) = (slab / slabs, slab % slabs);
                let model_layer = u64::from(layout.first_layer + layer);
                let head = u64::from(layout.heads().first + head);
                let id = (pool as u64) << 20
                    | model_layer << 12
                    | u64::from(slab) << 11
                    | head << 4
                    | u64::from(w);
                places[word] = Place { block, layer, token, id };
            }
        }
        it.places = places;
        it
    }
    /// Slab, word of the pool, and word of the page, for every word of a block.
    fn words_of_slabs(&self, block: u32) -> impl Iterator<Item = (u32, usize, u32)> + '_ {
        let words = self.layout.page_bytes() / WORD_BYTES;
        (0..).zip(&self.map.slab_address).flat_map(move |(slab, address)| {
            let start = address - self.base + u64::from(block) * self.map.block_stride_bytes;
            let start = (start / u64::from(WORD_BYTES)) as usize;
            (0..words).map(move |i| (slab, start + i as usize, i))
        })
    }
    /// The words of a block, and what they are.
    pub(crate) fn words_of(&self, block: u32) -> impl Iterator<Item = (usize, &Place)> {
        self.words_of_slabs(block).map(|(_, word, _)| (word, &self.places[word]))
    }
    pub(crate) fn place(&self, word: usize) -> &Place {
        &self.places[word]
    }
    /// What a word of the prompt's block `prompt_block` holds in the end.
    pub(crate) fn content(&self, seq: u32, prompt_block: u32, place: &Place) -> u64 {
        let token = prompt_block * self.layout.page_tokens + place.token;
        1 << 60
            | u64::from(seq & 0xfff) << 48
            | u64::from(token) << (DRAFT_BITS + 24)
            | place.id << DRAFT_BITS
    }
}

pub(crate) fn is_rows(layout: &Layout) -> bool {
    matches!(layout.kind, KvKind::Rows { .. })
}

/// A word that is not final.
pub(crate) const fn draft(content: u64, done: u32) -> u64 {
    content | (done as u64 % 0xff + 1)
}
/// How a word differs from what it should be.
pub(crate) fn is_draft_of(value: u64, want: u64) -> bool {
    value >> DRAFT_BITS == want >> DRAFT_BITS && value != want
}
pub(crate) const fn is_canary(value: u64) -> bool {
    value >> 60 == 0xC
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
    },
    Withheld,
}

pub(crate) struct Pool {
    pub(crate) geometry: Arc<Geometry>,
    pub(crate) words: Vec<u64>,
    pub(crate) blocks: Vec<Block>,
    free: Vec<u32>,
}

impl Pool {
    pub(crate) fn new(geometry: Arc<Geometry>) -> Self {
        let blocks = geometry.map.blocks;
        let mut pool = Self {
            words: vec![0; geometry.places.len()],
            blocks: vec![Block::Free; blocks as usize],
            geometry,
            free: Vec::new(),
        };
        for block in (0..blocks).rev() {
            pool.give_back(block);
        }
        pool
    }
    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }
    pub(crate) fn withheld(&self) -> usize {
        self.blocks.iter().filter(|b| **b == Block::Withheld).count()
    }
    /// Takes blocks, most lately returned first.
    fn take(&mut self, count: usize, room: RoomId) -> Vec<u32> {
        let ids = self.free.split_off(self.free.len() - count);
        for &id in &ids {
            self.blocks[id as usize] = Block::Held(room);
        }
        ids
    }
    pub(crate) fn give_back(&mut self, block: u32) {
        self.blocks[block as usize] = Block::Free;
        self.free.push(block);
        let geometry = self.geometry.clone();
        for (word, _) in geometry.words_of(block) {
            self.words[word] = Self::canary_of(word);
        }
    }
    pub(crate) const fn canary_of(word: usize) -> u64 {
        0xCAFE << 48 | word as u64
    }
    /// The first word of a free block whose canary is gone.
    pub(crate) fn broken_canary(&self) -> Option<usize> {
        self.free.iter().find_map(|&b| {
            let mut words = self.geometry.words_of(b).map(|(word, _)| word);
            words.find(|&word| self.words[word] != Self::canary_of(word))
        })
    }
}

/// The pools of one start of a worker.
pub(crate) struct Memory(pub(crate) Vec<Pool>);

/// Blocks of each pool.
pub(crate) type Ids = Vec<Vec<u32>>;

impl Memory {
    pub(crate) fn new(geometry: &[Arc<Geometry>]) -> Self {
        Self(geometry.iter().map(|g| Pool::new(g.clone())).collect())
    }
    /// The pool and the word at an address.
    pub(crate) fn at(address: u64) -> (usize, usize) {
        let pool = (address >> 32) as usize - 1;
        (pool, ((address & 0xffff_ffff) / u64::from(WORD_BYTES)) as usize)
    }
    pub(crate) fn read(&self, address: u64) -> u64 {
        let (pool, word) = Self::at(address);
        self.0[pool].words[word]
    }
    /// Takes so many blocks of each pool, or none.
    pub(crate) fn take(&mut self, counts: &[usize], room: RoomId) -> Option<Ids> {
        if self.0.iter().zip(counts).any(|(pool, &n)| pool.free() < n) {
            return None;
        }
        Some(self.0.iter_mut().zip(counts).map(|(pool, &n)| pool.take(n, room)).collect())
    }
    pub(crate) fn give_back(&mut self, ids: &Ids) {
        for (pool, ids) in self.0.iter_mut().zip(ids) {
            ids.iter().for_each(|&id| pool.give_back(id));
        }
    }
    pub(crate) fn withhold(&mut self, ids: &Ids) {
        for (pool, ids) in self.0.iter_mut().zip(ids) {
            ids.iter().for_each(|&id| pool.blocks[id as usize] = Block::Withheld);
        }
    }
}

/// The address of every word of a part, in the order in which it travels.
pub(crate) fn addresses(pages: &PartPages) -> Vec<u64> {
    words(pages.iter().map(|p| (p.address, p.bytes)))
}
fn words(ranges: impl Iterator<Item = (u64, u32)>) -> Vec<u64> {
    let each = ranges.flat_map(|(address, bytes)| {
        (0..u64::from(bytes)).step_by(WORD_BYTES as usize).map(move |at| address + at)
    });
    each.collect()
}
/// Source and destination of every word that a sender's engine writes itself.
pub(crate) fn writes(source: &PartPages, destination: &PartPages) -> (Vec<u64>, Vec<u64>) {
    let writes: Vec<_> = kvlane_proto::plan::writes(source, destination).collect();
    let from = words(writes.iter().map(|w| (w.source, w.bytes)));
    (from, words(writes.iter().map(|w| (w.destination, w.bytes))))
}
