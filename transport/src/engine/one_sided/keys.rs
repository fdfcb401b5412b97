//! Which key opens which memory, by address.
//!
//! In: ranges with their keys, of this side or as a receiver said them. Out: the key of a range, or
//! none. Invariant: a key is given only for a range that lies inside what it opens.

use super::nic::Key;
use super::wire::Opened;

/// Ranges of one side, with the keys of one protection domain.
#[derive(Clone, Debug, Default)]
pub struct Keys(Vec<Opened>);

impl Keys {
    /// Ranges with their keys.
    pub fn new(opened: Vec<Opened>) -> Self {
        Self(opened)
    }
    /// The ranges.
    pub fn opened(&self) -> &[Opened] {
        &self.0
    }
    /// Looks ranges up one after the other.
    pub fn look(&self) -> Look<'_> {
        let none = Opened { address: 0, bytes: 0, key: Key(0) };
        Look { keys: &self.0, last: self.0.first().copied().unwrap_or(none) }
    }
}

/// Remembers where the last range lay: the next one most often lies there as well.
#[derive(Clone, Debug)]
pub struct Look<'a> {
    keys: &'a [Opened],
    last: Opened,
}

impl Look<'_> {
    /// The key of a range that lies where the last one did.
    #[inline]
    pub(super) fn same(&self, address: u64, bytes: u32) -> Option<Key> {
        let offset = address.wrapping_sub(self.last.address);
        let inside = offset < self.last.bytes && u64::from(bytes) <= self.last.bytes - offset;
        inside.then_some(self.last.key)
    }
    /// The key of the first byte of a range, and how many bytes of the range it opens.
    pub(super) fn find(&mut self, address: u64, bytes: u32) -> Option<(Key, u32)> {
        let has = |o: &&Opened| address.wrapping_sub(o.address) < o.bytes;
        // Ranges may overlap: the one that has most of it.
        let left = |o: &Opened| o.bytes - (address - o.address);
        self.last = *self.keys.iter().filter(has).max_by_key(|o| left(o))?;
        Some((self.last.key, left(&self.last).min(bytes.into()) as u32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_opened_only_as_far_as_the_key_goes() {
        let opened = |address, bytes, key| Opened { address, bytes, key: Key(key) };
        let keys = Keys::new(vec![opened(100, 50, 1), opened(150, 10, 2), opened(90, 20, 3)]);
        let mut look = keys.look();
        assert_eq!(look.same(100, 50), Some(Key(1)));
        assert_eq!(look.same(100, 51), None);
        assert_eq!(look.same(99, 1), None);
        assert_eq!(look.same(150, 0), None);
        assert_eq!(look.find(149, 5), Some((Key(1), 1)));
        assert_eq!(look.find(150, 5), Some((Key(2), 5)));
        assert_eq!(look.same(155, 5), Some(Key(2)));
        assert_eq!(look.find(105, 40), Some((Key(1), 40)));
        assert_eq!(look.find(90, 40), Some((Key(3), 20)));
        assert_eq!(look.find(160, 1), None);
        assert_eq!(look.find(u64::MAX, u32::MAX), None);
        assert_eq!(Keys::default().look().same(0, 0), None);
    }
}
