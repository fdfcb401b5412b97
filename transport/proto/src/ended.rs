//! What has ended, remembered within bounds.
//!
//! [`Memory`] keeps the newest so many entries. [`Ended`] keeps outcomes of rooms; of what it has
//! to forget it keeps, per issuer and slot, the highest number, below which every room of that
//! issuer counts as ended.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

use crate::ids::{Identity, RoomId};
use crate::msg::peer::Outcome;

/// A map that forgets its oldest entry when it is full.
#[derive(Debug)]
pub struct Memory<K, V> {
    map: HashMap<K, V>,
    order: VecDeque<K>,
    max: usize,
}

impl<K: Hash + Eq + Clone, V> Memory<K, V> {
    /// Keeps at most `max` entries.
    pub fn new(max: usize) -> Self {
        Self { map: HashMap::new(), order: VecDeque::new(), max }
    }
    /// Adds or replaces; returns what had to be forgotten.
    pub fn insert(&mut self, key: K, value: V) -> Option<(K, V)> {
        if self.map.insert(key.clone(), value).is_some() {
            return None;
        }
        self.order.push_back(key);
        if self.order.len() <= self.max {
            return None;
        }
        let oldest = self.order.pop_front()?;
        let value = self.map.remove(&oldest)?;
        Some((oldest, value))
    }
    /// Looks up.
    pub fn get(&self, key: &K) -> Option<&V> {
        self.map.get(key)
    }
    /// All entries, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.map.iter()
    }
    /// Looks up, to change.
    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        self.map.get_mut(key)
    }
    /// Forgets one entry; cheap for one of the newest.
    pub fn remove(&mut self, key: &K) -> Option<V> {
        let value = self.map.remove(key)?;
        if let Some(at) = self.order.iter().rposition(|k| k == key) {
            self.order.remove(at);
        }
        Some(value)
    }
    /// Number of entries.
    pub fn len(&self) -> usize {
        self.map.len()
    }
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }
}

/// Rooms that have ended, and aborts that came before their rooms.
#[derive(Debug)]
pub struct Ended {
    outcomes: Memory<RoomId, (Option<Identity>, Outcome)>,
    below: Memory<(Identity, u16), RoomId>,
    aborted: Memory<RoomId, (Identity, Outcome)>,
}

impl Ended {
    /// Remembers `max` rooms.
    pub fn new(max: usize) -> Self {
        Self { outcomes: Memory::new(max), below: Memory::new(1024), aborted: Memory::new(1024) }
    }
    /// A room has ended.
    pub fn insert(&mut self, room: RoomId, issuer: Option<Identity>, outcome: Outcome) {
        if let Some((old, (Some(issuer), _))) = self.outcomes.insert(room, (issuer, outcome)) {
            let key = (issuer, old.slot());
            let highest = self.below.get(&key).map_or(old, |&r| r.max(old));
            self.below.insert(key, highest);
        }
    }
    /// An abort came for a room that is not known; it counts against that caller's room only.
    pub fn aborted_before(&mut self, room: RoomId, by: Identity, outcome: Outcome) {
        self.aborted.insert(room, (by, outcome));
    }
    /// How a room ended, if that is still known.
    pub fn outcome(&self, room: RoomId) -> Option<&Outcome> {
        self.outcomes.get(&room).map(|(_, outcome)| outcome)
    }
    /// Whether a room that `from` wants to start is over already.
    pub fn is_over(&self, room: RoomId, from: Option<&Identity>) -> bool {
        self.outcomes.get(&room).is_some()
            || from.is_some_and(|from| {
                self.below.get(&(from.clone(), room.slot())).is_some_and(|&r| room <= r)
                    || self.aborted.get(&room).is_some_and(|(by, _)| by == from)
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Role;

    #[test]
    fn a_removed_entry_takes_no_place_and_comes_back_as_the_newest() {
        let mut memory = Memory::new(2);
        for n in 0..100 {
            assert_eq!(memory.insert(n, 'x'), None);
            assert_eq!(memory.remove(&n), Some('x'));
            assert_eq!(memory.remove(&n), None);
        }
        assert!(memory.is_empty() && memory.order.is_empty());
        memory.insert(1, 'a');
        memory.insert(2, 'b');
        memory.remove(&1);
        memory.insert(1, 'c');
        assert_eq!(memory.insert(3, 'd'), Some((2, 'b')));
        assert_eq!((memory.get(&1), memory.len(), memory.order.len()), (Some(&'c'), 2, 2));
    }

    #[test]
    fn forgotten_rooms_of_an_issuer_stay_ended() {
        let router = Identity::new("c", Role::Router, "r", 0).unwrap();
        let other = Identity::new("c", Role::Router, "s", 0).unwrap();
        let mut ended = Ended::new(4);
        let room = |n| RoomId::issue(3, n, 0, 1).unwrap();
        for n in 0..100 {
            ended.insert(room(n), Some(router.clone()), Outcome::Done { bytes: n });
        }
        assert_eq!(ended.outcomes.len(), 4);
        assert_eq!(ended.outcome(room(99)), Some(&Outcome::Done { bytes: 99 }));
        assert_eq!(ended.outcome(room(0)), None);
        assert!(ended.is_over(room(0), Some(&router)) && ended.is_over(room(95), Some(&router)));
        assert!(!ended.is_over(room(100), Some(&router)));
        assert!(!ended.is_over(room(0), Some(&other)));
        assert!(!ended.is_over(RoomId::issue(2, 0, 0, 1).unwrap(), Some(&router)));
    }

    #[test]
    fn an_early_abort_counts_against_its_own_caller_only() {
        let router = Identity::new("c", Role::Router, "r", 0).unwrap();
        let other = Identity::new("c", Role::Router, "s", 0).unwrap();
        let mut ended = Ended::new(4);
        ended.aborted_before(RoomId(9), router.clone(), Outcome::Done { bytes: 0 });
        assert!(ended.is_over(RoomId(9), Some(&router)));
        assert!(!ended.is_over(RoomId(9), Some(&other)));
        assert!(!ended.is_over(RoomId(9), None));
    }
}
