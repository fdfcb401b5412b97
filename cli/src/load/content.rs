//! The bytes of every page of every request.
//!
//! In: a layout and a place (layer, slab, tokens). Out: the page's bytes, or the first difference
//! between a page and what it should be, with a guess of what it is instead.
//!
//! A *row* is one head of one token in one slab of one layer. Its 64-bit words are
//! `mix(key + place·(1 + 2i) + i·GOLDEN)`, i = 0, 1, …, where `key` stands for (model, request) and
//! `place` packs (layer, slab, head, token). Invariants:
//!
//! - Two places of one request differ in *every* word: `place·(1 + 2i)` is injective for each i.
//! - Two requests differ in every word but for an accident of 2⁻⁶⁴.
//! - `mix` is a bijection, so two neighbouring words of a row give back key and place: a page that
//!   is in the wrong place says where it belongs, without a search.
//!
//! Layers, heads and tokens are numbered in the whole model and the whole prompt, not in the rank
//! or page, so that ranks of different parallelism agree on a row's bytes. Numbers beyond 24 bits
//! (tokens), 12 bits (heads) and 11 bits (layers) wrap; [`Layout::check`] keeps the last two below.

use std::fmt;

use kvlane_proto::layout::{KvKind, Order};
use kvlane_proto::{Layout, RoomId};

use super::{GOLDEN, MUL_1, MUL_2, mix};

const TOKEN_BITS: u32 = 24;
const HEAD_BITS: u32 = 12;
const LAYER_BITS: u32 = 11;
const PLACE_BITS: u32 = TOKEN_BITS + HEAD_BITS + LAYER_BITS + 1;

/// What stands in the rows of a page beyond the end of the prompt.
pub(crate) const PADDING: u8 = 0xa5;

/// The contents of one request's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Contents {
    /// Hash of the model and its dtype.
    pub(crate) model: u64,
    /// The request; room numbers do.
    pub(crate) request: u64,
}

/// Where a row belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    layer: u32,
    slab: u32,
    head: u32,
    token: u32,
}

/// The first byte of a page that is not what it should be. Layer, head and token count in the
/// whole model and prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mismatch {
    /// Layer of the page.
    pub(crate) layer: u32,
    /// 0: K or latent; 1: V.
    pub(crate) slab: u32,
    /// Token of the row.
    pub(crate) token: u32,
    /// Head of the row.
    pub(crate) head: u32,
    /// Byte in the page.
    pub(crate) offset: usize,
    /// The byte found; 0 if the page ends before it.
    pub(crate) found: u8,
    /// The byte expected.
    pub(crate) expected: u8,
    /// What the row seems to be instead.
    pub(crate) looks_like: Option<String>,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { layer, slab, token, head, offset, found, expected, .. } = self;
        write!(
            f,
            "layer {layer} slab {slab} token {token} head {head}: byte {offset} of the page is \
             {found:#04x}, expected {expected:#04x}"
        )?;
        self.looks_like.iter().try_for_each(|what| write!(f, "; looks like {what}"))
    }
}

impl std::error::Error for Mismatch {}

impl Place {
    const fn pack(self) -> u64 {
        let layer = (self.layer as u64) & ((1 << LAYER_BITS) - 1);
        let head = (self.head as u64) & ((1 << HEAD_BITS) - 1);
        let token = (self.token as u64) & ((1 << TOKEN_BITS) - 1);
        ((layer << 1 | (self.slab & 1) as u64) << HEAD_BITS | head) << TOKEN_BITS | token
    }
    const fn unpack(packed: u64) -> Self {
        Self {
            token: (packed & ((1 << TOKEN_BITS) - 1)) as u32,
            head: (packed >> TOKEN_BITS & ((1 << HEAD_BITS) - 1)) as u32,
            slab: (packed >> (TOKEN_BITS + HEAD_BITS) & 1) as u32,
            layer: (packed >> (TOKEN_BITS + HEAD_BITS + 1)) as u32,
        }
    }
}

impl Contents {
    /// The contents of `request` in a cache of this model and dtype.
    pub(crate) fn new(layout: &Layout, request: u64) -> Self {
        // FNV-1a, then mixed: only has to tell models apart.
        let fnv = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        let dtype = layout.dtype.to_string();
        // The pools of a model differ in what their layers look at.
        let window = (layout.window_tokens > 0).then(|| layout.window_tokens.to_le_bytes());
        let window = window.into_iter().flatten();
        let all = layout.model.bytes().chain([0]).chain(dtype.bytes()).chain(window);
        let hash = all.fold(GOLDEN, fnv);
        Self { model: mix(hash), request }
    }

    /// Fills one page: `out` is [`Layout::page_bytes`] long and starts with token `first_token` of
    /// the prompt. The layout is one that [`Layout::check`] accepts. `layer` counts on this rank, `slab`
    /// is 0 (K or latent) or 1 (V). Rows behind the
    /// first `tokens_valid` tokens get [`PADDING`].
    pub(crate) fn page(
        &self,
        layout: &Layout,
        layer: u32,
        slab: u32,
        first_token: u32,
        tokens_valid: u32,
        out: &mut [u8],
    ) {
        let rows = Rows::new(self, layout, layer, slab, first_token);
        for (row, out) in out.chunks_mut(rows.bytes).enumerate() {
            if rows.token_in_page(row) < tokens_valid {
                fill_row(rows.words(row), out);
            } else {
                out.fill(PADDING);
            }
        }
    }

    /// Checks one page against [`Contents::page`]; rows behind the first `tokens_valid` tokens may
    /// hold anything.
    ///
    /// # Errors
    /// The first byte that differs, boxed because it is large and rare.
    pub(crate) fn check_page(
        &self,
        layout: &Layout,
        layer: u32,
        slab: u32,
        first_token: u32,
        tokens_valid: u32,
        page: &[u8],
    ) -> Result<(), Box<Mismatch>> {
        let rows = Rows::new(self, layout, layer, slab, first_token);
        let expected_bytes = layout.page_bytes() as usize;
        if page.len() != expected_bytes {
            let what = format!("a page of {} bytes instead of {expected_bytes}", page.len());
            return Err(rows.mismatch(0, 0, page.first().copied().unwrap_or(0), Some(what)));
        }
        for (row, found) in page.chunks(rows.bytes).enumerate() {
            if rows.token_in_page(row) >= tokens_valid {
                continue;
            }
            if let Some(at) = first_difference(rows.words(row), found) {
                let guess = self.guess(&rows, row, found, at);
                return Err(rows.mismatch(row, at, found[at], guess));
            }
        }
        Ok(())
    }

    fn key(&self) -> u64 {
        mix(self.model ^ mix(self.request ^ GOLDEN))
    }

    /// What a row that differs from byte `at` on seems to be.
    fn guess(&self, rows: &Rows<'_>, row: usize, found: &[u8], at: usize) -> Option<String> {
        let mut right = vec![0; found.len()];
        fill_row(rows.words(row), &mut right);
        let bits: u32 = found.iter().zip(&right).map(|(a, b)| (a ^ b).count_ones()).sum();
        if bits == 1 {
            return Some("one flipped bit".into());
        }
        // Only what is wrong says something: a torn row begins with the right bytes.
        let wrong = &found[at..];
        if wrong.len() >= 4 && wrong.iter().all(|&b| b == wrong[0]) {
            return Some(match wrong[0] {
                0 => "zeros: never written".into(),
                PADDING => "padding: the sender's prompt is shorter".into(),
                byte => format!("a fill of {byte:#04x}: never written"),
            });
        }
        let expected = rows.place(row);
        // The first wrong word may hold the seam of a torn row; the next ones do not.
        let (key, place) = (at / 8..at / 8 + 3).find_map(|word| decode(found, word))?;
        let slab = match (rows.layout.kind, place.slab) {
            (KvKind::Mla, _) => "latent",
            (KvKind::Rows { .. }, _) => "row",
            (KvKind::Split | KvKind::Packed, 0) => "K",
            (KvKind::Split | KvKind::Packed, _) => "V",
        };
        let mut what = Vec::new();
        for (name, theirs, ours) in [
            ("layer", place.layer, expected.layer),
            ("head", place.head, expected.head),
            ("token", place.token, expected.token),
        ] {
            if theirs != ours {
                what.push(format!("{name} {theirs}"));
            }
        }
        if place.slab != expected.slab {
            what.push(slab.into());
        }
        if what.is_empty() {
            what.push("this row".into());
        }
        let mut what = what.join(", ");
        if key == self.key() {
            what.push_str(" of this request");
        } else {
            let request = unmix(unmix(key) ^ self.model) ^ GOLDEN;
            if request <= RoomId::MAX.0 {
                what.push_str(&format!(" of request {request}"));
            } else {
                what.push_str(" of another model");
            }
        }
        if at > 0 {
            what.push_str(&format!(", from byte {at} of the row on"));
        }
        Some(what)
    }
}

/// The rows of one page, in the order of its bytes.
struct Rows<'a> {
    layout: &'a Layout,
    key: u64,
    layer: u32,
    slab: u32,
    first_token: u32,
    first_head: u32,
    bytes: usize,
}

impl<'a> Rows<'a> {
    fn new(
        contents: &Contents,
        layout: &'a Layout,
        layer: u32,
        slab: u32,
        first_token: u32,
    ) -> Self {
        Self {
            layout,
            key: contents.key(),
            layer: layout.first_layer.wrapping_add(layer),
            slab,
            first_token,
            first_head: layout.heads().first,
            bytes: (layout.row_bytes() as usize).max(1),
        }
    }
    fn token_in_page(&self, row: usize) -> u32 {
        match self.layout.order {
            Order::Nhd => row as u32 / self.layout.kv_heads,
            Order::Hnd => row as u32 % self.layout.page_tokens,
        }
    }
    fn place(&self, row: usize) -> Place {
        let head = match self.layout.order {
            Order::Nhd => row as u32 % self.layout.kv_heads,
            Order::Hnd => row as u32 / self.layout.page_tokens,
        };
        Place {
            layer: self.layer,
            slab: self.slab,
            head: self.first_head + head,
            token: self.first_token.wrapping_add(self.token_in_page(row)),
        }
    }
    fn words(&self, row: usize) -> Words {
        Words::new(self.key, self.place(row).pack())
    }
    fn mismatch(&self, row: usize, at: usize, found: u8, guess: Option<String>) -> Box<Mismatch> {
        let place = self.place(row);
        let expected = self.words(row).get(at / 8)[at % 8];
        Box::new(Mismatch {
            layer: place.layer,
            slab: place.slab,
            token: place.token,
            head: place.head,
            offset: row * self.bytes + at,
            found,
            expected,
            looks_like: guess,
        })
    }
}

/// The words of a row, of any length.
#[derive(Clone, Copy)]
struct Words {
    first: u64,
    step: u64,
}

impl Words {
    const fn new(key: u64, packed: u64) -> Self {
        Self { first: key.wrapping_add(packed), step: GOLDEN.wrapping_add(packed * 2) }
    }
    #[inline]
    const fn get(self, i: usize) -> [u8; 8] {
        mix(self.first.wrapping_add(self.step.wrapping_mul(i as u64))).to_le_bytes()
    }
}

fn fill_row(words: Words, out: &mut [u8]) {
    let (whole, tail) = out.as_chunks_mut::<8>();
    let last = words.get(whole.len());
    // A running sum: twice as fast as `get` for each word.
    let mut at = words.first;
    for out in whole {
        *out = mix(at).to_le_bytes();
        at = at.wrapping_add(words.step);
    }
    tail.copy_from_slice(&last[..tail.len()]);
}

/// The first byte of `found` that is not the row's.
fn first_difference(words: Words, found: &[u8]) -> Option<usize> {
    let (whole, tail) = found.as_chunks::<8>();
    // One flag for the row keeps the loop free of branches; which byte is only asked when it is set.
    let (mut at, mut differs) = (words.first, 0);
    for found in whole {
        differs |= u64::from_le_bytes(*found) ^ mix(at);
        at = at.wrapping_add(words.step);
    }
    if differs == 0 && tail == &mix(at).to_le_bytes()[..tail.len()] {
        return None;
    }
    found.iter().enumerate().position(|(at, &byte)| byte != words.get(at / 8)[at % 8])
}

/// Key and place of the row that words `i` and `i + 1` come from, if they come from a row.
///
/// By chance this succeeds for other bytes about once in 2¹⁶ times, which a guess may.
fn decode(row: &[u8], i: usize) -> Option<(u64, Place)> {
    let word = |i: usize| {
        row.get(i * 8..)?.first_chunk::<8>().map(|bytes| unmix(u64::from_le_bytes(*bytes)))
    };
    let (first, second) = (word(i)?, word(i + 1)?);
    let twice = second.wrapping_sub(first).wrapping_sub(GOLDEN);
    if twice % 2 != 0 || twice >> (PLACE_BITS + 1) != 0 {
        return None;
    }
    let packed = twice / 2;
    let step = GOLDEN.wrapping_add(twice);
    let key = first.wrapping_sub(step.wrapping_mul(i as u64)).wrapping_sub(packed);
    Some((key, Place::unpack(packed)))
}

/// The inverse of [`mix`].
const fn unmix(mut x: u64) -> u64 {
    x = (x ^ (x >> 31) ^ (x >> 62)).wrapping_mul(inverse(MUL_2));
    x = (x ^ (x >> 27) ^ (x >> 54)).wrapping_mul(inverse(MUL_1));
    x ^ (x >> 30) ^ (x >> 60)
}

/// The inverse of an odd number modulo 2^64, by Newton's method: each step doubles the right bits.
const fn inverse(odd: u64) -> u64 {
    let mut x = odd;
    let mut right_bits = 3;
    while right_bits < 64 {
        x = x.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(x)));
        right_bits *= 2;
    }
    x
}

#[cfg(test)]
mod tests {
    use super::super::models;
    use super::*;
    use kvlane_proto::layout::{Coordinates, Dtype};

    fn layout() -> Layout {
        models::pools("tiny", 16, (0, 1)).unwrap().remove(0)
    }
    fn page(c: &Contents, l: &Layout, layer: u32, slab: u32, first_token: u32) -> Vec<u8> {
        let mut out = vec![0; l.page_bytes() as usize];
        c.page(l, layer, slab, first_token, l.page_tokens, &mut out);
        out
    }
    fn check(c: &Contents, l: &Layout, page: &[u8]) -> Result<(), Box<Mismatch>> {
        c.check_page(l, 2, 1, 32, l.page_tokens, page)
    }
    fn looks_like(c: &Contents, l: &Layout, page: &[u8]) -> String {
        check(c, l, page).unwrap_err().looks_like.unwrap()
    }

    #[test]
    fn mixing_can_be_undone() {
        for x in [0, 1, GOLDEN, u64::MAX, 1 << 63] {
            assert_eq!(unmix(mix(x)), x);
            assert_eq!(mix(unmix(x)), x);
        }
    }

    #[test]
    fn the_bytes_are_fixed() {
        // A sender and a receiver of different builds must agree on them. The figures were computed
        // from the formula in this module's header by other means.
        let c = Contents::new(&layout(), 7);
        assert_eq!(c.model, 0x6ee334d3bde38fc);
        let p = page(&c, &layout(), 0, 0, 0);
        assert_eq!(p[8..16], [0x0e, 0x9d, 0xb4, 0xa5, 0xd8, 0x15, 0x5b, 0x86]);
    }

    #[test]
    fn what_was_filled_is_accepted() {
        for name in models::names() {
            let l = models::pools(&name, 16, (0, 1)).unwrap().remove(0);
            let c = Contents::new(&l, 1 << 62);
            check(&c, &l, &page(&c, &l, 2, 1, 32)).unwrap();
        }
    }

    #[test]
    fn every_kind_of_swap_is_found_and_named() {
        let l = layout();
        let c = Contents::new(&l, 7);
        let good = page(&c, &l, 2, 1, 32);
        assert_eq!(looks_like(&c, &l, &page(&c, &l, 1, 1, 32)), "layer 1 of this request");
        assert_eq!(looks_like(&c, &l, &page(&c, &l, 2, 0, 32)), "K of this request");
        assert_eq!(looks_like(&c, &l, &page(&c, &l, 2, 1, 48)), "token 48 of this request");
        assert_eq!(looks_like(&c, &l, &page(&c, &l, 2, 1, 33)), "token 33 of this request");
        let other = Contents::new(&l, 8);
        assert_eq!(looks_like(&c, &l, &page(&other, &l, 2, 1, 32)), "this row of request 8");
        let stale = page(&other, &l, 0, 1, 64);
        assert_eq!(looks_like(&c, &l, &stale), "layer 0, token 64 of request 8");
        let model = Contents { model: c.model ^ 1, ..c };
        assert_eq!(looks_like(&c, &l, &page(&model, &l, 2, 1, 32)), "this row of another model");

        let row = (l.head_dim * l.dtype.bytes()) as usize;
        let mut heads = good.clone();
        heads[..2 * row].rotate_left(row);
        assert_eq!(looks_like(&c, &l, &heads), "head 1 of this request");
        let mut tokens = good.clone();
        tokens[..4 * row].rotate_left(2 * row);
        assert_eq!(looks_like(&c, &l, &tokens), "token 33 of this request");

        let mut e = check(&c, &l, &heads).unwrap_err();
        assert_eq!((e.layer, e.slab, e.token, e.head, e.offset), (2, 1, 32, 0, 0));
        assert_eq!((e.found, e.expected), (heads[0], good[0]));
        e.found = 1;
        e.expected = 2;
        assert_eq!(
            e.to_string(),
            "layer 2 slab 1 token 32 head 0: byte 0 of the page is 0x01, expected 0x02; \
             looks like head 1 of this request"
        );
    }

    #[test]
    fn a_page_in_the_other_order_is_found() {
        let l = layout();
        let c = Contents::new(&l, 7);
        let hnd = Layout { order: Order::Hnd, ..l.clone() };
        let wrong = page(&c, &hnd, 2, 1, 32);
        assert_eq!(looks_like(&c, &l, &wrong), "head 0, token 33 of this request");
        check(&c, &hnd, &wrong).unwrap();
    }

    #[test]
    fn every_flipped_bit_is_found() {
        for l in [layout(), Layout { head_dim: 13, dtype: Dtype::Fp8E4m3, ..layout() }] {
            let c = Contents::new(&l, 7);
            let mut p = page(&c, &l, 2, 1, 32);
            for bit in 0..p.len() * 8 {
                p[bit / 8] ^= 1 << (bit % 8);
                let e = check(&c, &l, &p).unwrap_err();
                assert_eq!(e.offset, bit / 8);
                assert_eq!(e.found ^ e.expected, 1 << (bit % 8));
                assert_eq!(e.looks_like.unwrap(), "one flipped bit");
                p[bit / 8] ^= 1 << (bit % 8);
            }
        }
    }

    #[test]
    fn what_was_never_written_is_named() {
        let l = layout();
        let c = Contents::new(&l, 7);
        let mut p = page(&c, &l, 2, 1, 32);
        assert_eq!(looks_like(&c, &l, &vec![0; p.len()]), "zeros: never written");
        let fill = vec![0xcd; p.len()];
        assert_eq!(looks_like(&c, &l, &fill), "a fill of 0xcd: never written");
        // The end of the page is missing, in the middle of a row.
        let from = p.len() - 40;
        p[from..].fill(0);
        let e = check(&c, &l, &p).unwrap_err();
        assert!(e.offset >= from && e.offset < from + 2, "{e}");
        assert_eq!(
            (e.token, e.head, e.looks_like.unwrap().as_str()),
            (47, 1, "zeros: never written")
        );
    }

    #[test]
    fn garbage_is_found_and_not_named() {
        let l = layout();
        let c = Contents::new(&l, 7);
        let mut p = vec![0; l.page_bytes() as usize];
        fill_row(Words { first: 1, step: 2 }, &mut p);
        let e = check(&c, &l, &p).unwrap_err();
        assert_eq!((e.offset, e.looks_like), (0, None));
    }

    #[test]
    fn a_torn_row_names_both_requests() {
        let l = layout();
        let (c, other) = (Contents::new(&l, 7), Contents::new(&l, 8));
        let mut p = page(&c, &l, 2, 1, 32);
        let stale = page(&other, &l, 2, 1, 64);
        for seam in [8, 20] {
            p[seam..].copy_from_slice(&stale[seam..]);
            let e = check(&c, &l, &p).unwrap_err();
            assert_eq!(e.offset, seam);
            assert_eq!(
                e.looks_like.unwrap(),
                format!("token 64 of request 8, from byte {seam} of the row on")
            );
            p = page(&c, &l, 2, 1, 32);
        }
    }

    #[test]
    fn rows_behind_the_prompt_do_not_count() {
        let l = layout();
        let c = Contents::new(&l, 7);
        let mut p = vec![0; l.page_bytes() as usize];
        c.page(&l, 0, 0, 0, 5, &mut p);
        c.check_page(&l, 0, 0, 0, 5, &p).unwrap();
        let e = c.check_page(&l, 0, 0, 0, 6, &p).unwrap_err();
        assert_eq!(e.token, 5);
        assert_eq!(e.looks_like.unwrap(), "padding: the sender's prompt is shorter");
        let valid = p.len() * 5 / 16;
        p[valid..].fill(1);
        c.check_page(&l, 0, 0, 0, 5, &p).unwrap();
        p[valid - 1] ^= 1;
        assert!(c.check_page(&l, 0, 0, 0, 5, &p).is_err());
    }

    #[test]
    fn a_page_of_the_wrong_length_is_refused() {
        let l = layout();
        let c = Contents::new(&l, 7);
        let p = page(&c, &l, 2, 1, 32);
        for bad in [&p[..p.len() - 1], &[]] {
            let e = check(&c, &l, bad).unwrap_err();
            assert!(e.looks_like.unwrap().starts_with("a page of "));
        }
    }

    #[test]
    fn ranks_agree_on_a_row() {
        // Rank 1 of 2 holds head 1 and layers 2 and 3 of the same model.
        let whole = layout();
        let at = Coordinates { tp: (1, 2), pp: (1, 2), ..Coordinates::SINGLE };
        let part = Layout { layers: 2, first_layer: 2, kv_heads: 1, at, ..whole.clone() };
        let c = Contents::new(&whole, 7);
        assert_eq!(c, Contents::new(&part, 7));
        let row = (whole.head_dim * whole.dtype.bytes()) as usize;
        let (all, mine) = (page(&c, &whole, 3, 0, 16), page(&c, &part, 1, 0, 16));
        for token in 0..16 {
            let head_1 = (token * 2 + 1) * row;
            assert_eq!(all[head_1..head_1 + row], mine[token * row..(token + 1) * row]);
        }
        // A replica of a head is the same head.
        let replica = Layout { at: Coordinates { tp: (3, 4), ..part.at }, ..part.clone() };
        assert_eq!(page(&c, &replica, 1, 0, 16), mine);
    }
}
