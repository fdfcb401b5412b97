//! Serve words: the sender's way to take its pages back without asking anybody.
//!
//! Owns: a table of words that every receiver of this engine can read and none can write. In: grants
//! that are posted, stopped, or closed with their link. Out: the word and the value that go with a
//! part. Invariants: a word only ever counts up, so a value that was given out never comes back; once
//! [`Serves::stop`] returns, a receiver that copies from there on finds another value afterwards.
//!
//! Order: the sender raises the word, then (after a full fence, and after the proof was handed on)
//! its owner overwrites pages. The receiver copies, then reads the word, with a fence in between
//! ([`crate::sys::copy::settle`]). If the copy has a byte that was overwritten, the word that is
//! read after it was raised before. Both fences are real ones on every architecture; on x86 loads
//! keep their order anyway.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{Ordering, fence};

use kvlane_proto::{Error, ErrorKind, GrantId, LinkId, Result, limits};

use super::wire::ServeWord;
use crate::sys::share::Words;

/// Words: as many as a worker may have rooms.
pub(super) const SERVES: usize = limits::ROOMS_MAX;

/// The words of one engine.
pub(super) struct Serves {
    words: Words,
    free: Vec<u32>,
    live: HashMap<(LinkId, GrantId), ServeWord>,
    /// Oldest first; some may have ended.
    order: VecDeque<(LinkId, GrantId)>,
}

impl Serves {
    pub(super) fn new() -> Result<Self> {
        let words = Words::new(SERVES, true).map_err(|e| {
            Error::new(ErrorKind::Memory, "shm engine: no memory for serve words").caused_by(e)
        })?;
        // No descriptor of zeros names a live word.
        words.words().iter().for_each(|word| word.store(1, Ordering::Relaxed));
        let free = (0..SERVES as u32).rev().collect();
        Ok(Self { words, free, live: HashMap::new(), order: VecDeque::new() })
    }
    /// The memory, to be shared.
    pub(super) fn shared(&self) -> &Words {
        &self.words
    }
    /// The word of a grant. If all are in use, the oldest grant's is taken from it: its parts in
    /// flight are refused, and posted again with a new one.
    pub(super) fn word(&mut self, link: LinkId, grant: GrantId) -> Result<ServeWord> {
        if let Some(word) = self.live.get(&(link, grant)) {
            return Ok(*word);
        }
        while self.free.is_empty() {
            let Some((link, grant)) = self.order.pop_front() else { break };
            self.stop(link, grant);
        }
        let index = self.free.pop().ok_or_else(|| {
            Error::new(ErrorKind::Internal, "no serve word is free").with("words", SERVES)
        })?;
        let value = self.words.words()[index as usize].load(Ordering::Relaxed);
        let word = ServeWord { index, value };
        self.live.insert((link, grant), word);
        if self.order.len() >= 2 * SERVES {
            self.order.retain(|key| self.live.contains_key(key));
        }
        self.order.push_back((link, grant));
        Ok(word)
    }
    /// Makes every copy that goes on from here void.
    pub(super) fn stop(&mut self, link: LinkId, grant: GrantId) {
        if let Some(word) = self.live.remove(&(link, grant)) {
            self.words.words()[word.index as usize].fetch_add(1, Ordering::SeqCst);
            // Nothing that is stored to the pages afterwards is seen without this.
            fence(Ordering::SeqCst);
            self.free.push(word.index);
        }
    }
    /// Stops all grants of a link.
    pub(super) fn close(&mut self, link: LinkId) {
        let of_link: Vec<_> = self.live.keys().filter(|(l, _)| *l == link).copied().collect();
        of_link.into_iter().for_each(|(link, grant)| self.stop(link, grant));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const LINK: LinkId = LinkId(1);

    #[test]
    fn a_value_never_comes_back() {
        let mut serves = Serves::new().unwrap();
        let says =
            |s: &Serves, w: ServeWord| s.words.words()[w.index as usize].load(Ordering::SeqCst);
        let mut seen = HashSet::new();
        for n in 0..100 {
            let word = serves.word(LINK, GrantId(n % 3)).unwrap();
            assert_eq!(serves.word(LINK, GrantId(n % 3)).unwrap(), word);
            assert_eq!(says(&serves, word), word.value);
            assert_ne!(word.value, 0);
            assert!(seen.insert((word.index, word.value)), "{word:?} twice");
            serves.stop(LINK, GrantId(n % 3));
            assert_ne!(says(&serves, word), word.value);
            serves.stop(LINK, GrantId(n % 3));
        }
    }

    #[test]
    fn more_grants_than_words_take_the_oldest() {
        let mut serves = Serves::new().unwrap();
        let first = serves.word(LINK, GrantId(0)).unwrap();
        for n in 1..SERVES as u64 {
            serves.word(LINK, GrantId(n)).unwrap();
        }
        let other = serves.word(LinkId(2), GrantId(0)).unwrap();
        assert_eq!((other.index, other.value), (first.index, first.value + 1));
        assert_ne!(serves.word(LINK, GrantId(0)).unwrap(), first);
        for n in 0..10 * SERVES as u64 {
            serves.word(LINK, GrantId(n)).unwrap();
            serves.stop(LINK, GrantId(n));
        }
        assert!(serves.order.len() <= 2 * SERVES);
        serves.close(LINK);
        serves.close(LinkId(2));
        assert_eq!((serves.live.len(), serves.free.len()), (0, SERVES));
    }
}
