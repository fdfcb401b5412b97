//! Registered memory, by key.
//!
//! Owns: the mappings. In: memory. Out: keys, and the place of an address ([`Registered::at`]).
//! Invariant: a key that was taken back comes again only after 65,534 others in its place, and a key
//! is never below 65,536, so that what is not a key is hardly ever taken for one.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::sys::share::Import;

/// Most keys of a NIC.
pub(super) const KEYS_MAX: usize = 1 << 14;
/// Places are used again from here on.
const PLACES_MIN: usize = 256;

/// Memory with a key.
#[derive(Debug)]
pub(super) struct Registered {
    pub(super) key: u32,
    pub(super) domain: u32,
    address: u64,
    memory: Arc<Import>,
    remote_write: bool,
}

impl Registered {
    /// The place of a range, if it lies inside.
    #[inline]
    pub(super) fn at(&self, address: u64, bytes: u32) -> Option<(&Arc<Import>, u64)> {
        let offset = address.checked_sub(self.address)?;
        let end = offset.checked_add(bytes.into())?;
        (end <= self.memory.bytes()).then_some((&self.memory, offset))
    }
    pub(super) fn may_be_written(&self) -> bool {
        self.remote_write
    }
}

/// All keys.
#[derive(Debug, Default)]
pub(super) struct Keys {
    places: Vec<(u16, Option<Registered>)>,
    free: VecDeque<usize>,
}

impl Keys {
    pub(super) fn insert(
        &mut self,
        domain: u32,
        address: u64,
        memory: Import,
        remote_write: bool,
    ) -> Option<u32> {
        let place = if self.places.len() < PLACES_MIN || self.free.is_empty() {
            if self.places.len() >= KEYS_MAX {
                return None;
            }
            self.places.push((0, None));
            self.places.len() - 1
        } else {
            self.free.pop_front()?
        };
        let (generation, held) = self.places.get_mut(place)?;
        *generation = generation.wrapping_add(1).max(1);
        let key = u32::from(*generation) << 16 | place as u32;
        let memory = Arc::new(memory);
        *held = Some(Registered { key, domain, address, memory, remote_write });
        Some(key)
    }
    #[inline]
    pub(super) fn get(&self, key: u32) -> Option<&Registered> {
        let (_, held) = self.places.get((key & 0xffff) as usize)?;
        held.as_ref().filter(|held| held.key == key)
    }
    pub(super) fn count(&self, which: impl Fn(&Registered) -> bool) -> usize {
        self.places.iter().filter_map(|(_, held)| held.as_ref()).filter(|one| which(one)).count()
    }
    pub(super) fn remove(&mut self, which: impl Fn(&Registered) -> bool) {
        for (place, (_, held)) in self.places.iter_mut().enumerate() {
            if held.take_if(|one| which(one)).is_some() {
                self.free.push_back(place);
            }
        }
    }
}
