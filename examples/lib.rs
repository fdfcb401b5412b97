//! What the examples share: a small pool, and bytes that can be recognised in it.

use kvlane_actors::Pools;
use kvlane_proto::layout::{Coordinates, Dtype, KvKind, Order};
use kvlane_proto::{Error, ErrorKind, Layout, Result};

/// A model small enough to look at: 4 layers, 2 KV heads of 64 elements, 16 tokens a block.
pub fn layout() -> Layout {
    Layout {
        model: "example".into(),
        layers: 4,
        first_layer: 0,
        kv_heads: 2,
        kv_heads_total: 2,
        head_dim: 64,
        dtype: Dtype::Bf16,
        window_tokens: 0,
        page_tokens: 16,
        order: Order::Nhd,
        kind: KvKind::Split,
        at: Coordinates::SINGLE,
    }
}

/// The byte that stands in every place of the page of (slab, block of the prompt).
fn mark(slab: usize, prompt_block: usize) -> u8 {
    (1 + slab * 16 + prompt_block) as u8
}

fn offset(pool: &Pools, slab: usize, block: u32) -> u64 {
    pool.maps[0].slab_address[slab] - pool.regions[0].address()
        + u64::from(block) * pool.maps[0].block_stride_bytes
}

/// What a prefill's GPU would do: writes the pages of a prompt into `blocks`.
///
/// # Errors
/// If a block is not in the pool.
pub fn write_prompt(pool: &Pools, blocks: &[u32]) -> Result<()> {
    let page = pool.layouts[0].page_bytes() as usize;
    for slab in 0..pool.maps[0].slab_address.len() {
        for (i, &block) in blocks.iter().enumerate() {
            let bytes = vec![mark(slab, i); page];
            pool.regions[0]
                .memory()
                .write_at(offset(pool, slab, block), &bytes)
                .map_err(outside)?;
        }
    }
    Ok(())
}

/// What a decode's GPU would read: checks every byte of `blocks`; returns the pages checked.
///
/// # Errors
/// [`ErrorKind::Corrupt`] naming slab and block.
pub fn check_prompt(pool: &Pools, blocks: &[u32]) -> Result<usize> {
    let mut page = vec![0; pool.layouts[0].page_bytes() as usize];
    for slab in 0..pool.maps[0].slab_address.len() {
        for (i, &block) in blocks.iter().enumerate() {
            let at = offset(pool, slab, block);
            pool.regions[0].memory().read_at(at, &mut page).map_err(outside)?;
            if let Some(wrong) = page.iter().find(|&&b| b != mark(slab, i)) {
                return Err(Error::new(ErrorKind::Corrupt, "a page is not what was sent")
                    .with("slab", slab)
                    .with("block", block)
                    .with("found", wrong)
                    .with("expected", mark(slab, i)));
            }
        }
    }
    Ok(pool.maps[0].slab_address.len() * blocks.len())
}

fn outside(e: std::io::Error) -> Error {
    Error::new(ErrorKind::Memory, "a page is outside its pool").caused_by(e)
}
