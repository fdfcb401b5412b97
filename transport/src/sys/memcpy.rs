//! What the machine's `memcpy` makes of scattered pages: the ceiling of every copy on one host.
//!
//! Owns: two mappings of its own ([`CopyPair`]). In: page numbers, checked. Out: bytes copied from
//! one mapping to the other. Invariant: the mappings are never given out, so nobody else reads or
//! writes them, and the plain copy that would be undefined on an engine's memory is sound here.
#![allow(unsafe_code)] // memcpy between raw addresses.

use std::io;

use super::mem::Memory;

/// Two shared mappings, as engines have them, that nobody but their owner can reach.
#[derive(Debug)]
pub struct CopyPair {
    from: Memory,
    to: Memory,
}

impl CopyPair {
    /// Two populated mappings of `bytes` bytes each; zeroed.
    ///
    /// # Errors
    /// As [`Memory::memfd`].
    pub fn new(bytes: u64) -> io::Result<Self> {
        Ok(Self { from: Memory::memfd(bytes, true)?, to: Memory::memfd(bytes, true)? })
    }
    /// Writes into the mapping that is copied from.
    ///
    /// # Errors
    /// As [`Memory::write_at`].
    pub fn write_at(&mut self, offset: u64, from: &[u8]) -> io::Result<()> {
        self.from.write_at(offset, from)
    }
    /// Reads from the mapping that is copied to.
    ///
    /// # Errors
    /// As [`Memory::read_at`].
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.to.read_at(offset, into)
    }
    /// Copies page `from[i]` of one mapping to page `to[i]` of the other, for each `i` that both
    /// have.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] at the first page that leaves its mapping.
    pub fn copy(&mut self, from: &[u32], to: &[u32], page_bytes: u32) -> io::Result<()> {
        let bytes = u64::from(page_bytes);
        let at = |memory: &Memory, page: u32| {
            let address = memory.address() + u64::from(page) * bytes;
            let inside = memory.contains(address, bytes);
            inside.then_some(address).ok_or(io::ErrorKind::InvalidInput)
        };
        for (&from, &to) in from.iter().zip(to) {
            let (from, to) = (at(&self.from, from)?, at(&self.to, to)?);
            // SAFETY: `at` proved that `page_bytes` bytes at both addresses lie in live mappings.
            // The mappings are two, so the ranges do not overlap. They are private to this value,
            // which is borrowed exclusively, so nothing else reads or writes them meanwhile.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    from as *const u8,
                    to as *mut u8,
                    page_bytes as usize,
                );
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_land_where_they_belong_and_nowhere_else() {
        let mut pair = CopyPair::new(10 * 7).unwrap();
        let bytes: Vec<u8> = (1..=70).collect();
        pair.write_at(0, &bytes).unwrap();
        pair.copy(&[9, 0], &[2, 5], 7).unwrap();
        let mut all = [0; 70];
        pair.read_at(0, &mut all).unwrap();
        assert_eq!(all[14..21], bytes[63..70]);
        assert_eq!(all[35..42], bytes[..7]);
        assert_eq!(all.iter().filter(|&&b| b != 0).count(), 14);
    }

    #[test]
    fn a_page_outside_is_refused() {
        let mut pair = CopyPair::new(4096).unwrap();
        for (from, to) in [(2, 0), (0, 2), (u32::MAX, 0)] {
            let e = pair.copy(&[from], &[to], 2048).unwrap_err();
            assert_eq!(e.kind(), io::ErrorKind::InvalidInput, "{from} {to}");
        }
        pair.copy(&[1], &[1], 2048).unwrap();
    }
}
