//! From the writes of a part to entries of a send ring: the hot path of a sender.
//!
//! In: writes (where bytes are read, where they land), the keys of both sides. Out: entries, one for
//! each write, the last of a part with its immediate and a completion; what found no room waits in a
//! list of its own. Invariants: a range without a key is never posted; entries of a part are in its
//! order, so that its immediate comes after all of its bytes; nothing here waits or allocates, but
//! for the list.

use kvlane_proto::plan::Write;
use kvlane_proto::{GrantId, PartId};

use super::keys::Look;
use super::nic::{Remote, Segment, Sends};

/// What a receiver is told with the last bytes of a part: which part, and a few bits of the grant, so
/// that a part of another grant is noticed.
pub fn immediate(grant: GrantId, part: PartId) -> u32 {
    check(grant) << 24 | part.0 & 0x00ff_ffff
}
/// The few bits; numbers that follow each other differ.
pub fn check(grant: GrantId) -> u32 {
    (grant.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u32
}
/// What an immediate says: the check, and the part.
pub fn decode(immediate: u32) -> (u32, PartId) {
    (immediate >> 24, PartId(immediate & 0x00ff_ffff))
}

/// Writes of a part that have found no room yet.
#[derive(Debug, Default)]
pub struct Rest {
    writes: Vec<Write>,
    next: usize,
}

impl Rest {
    /// Whether every write has been posted.
    pub fn is_empty(&self) -> bool {
        self.next == self.writes.len()
    }
    /// Forgets them.
    pub fn clear(&mut self) {
        self.writes.clear();
        self.next = 0;
    }
}

/// A range that cannot be posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unknown {
    /// Whether it is memory of the receiver.
    pub remote: bool,
    /// Where it begins.
    pub address: u64,
    /// Its length.
    pub bytes: u32,
}

/// What became of a write.
enum Done {
    Posted,
    Full,
    Unknown(Unknown),
}

/// Posts on one queue pair.
pub struct Poster<'a, S> {
    /// Its ring.
    pub sends: &'a mut S,
    /// Keys of this side.
    pub local: Look<'a>,
    /// Keys of the receiver.
    pub remote: Look<'a>,
    /// An entry completes if these bits of its index are all ones, so that room is known of.
    pub signal_mask: u64,
}

impl<S: Sends> Poster<'_, S> {
    /// Posts a part from its beginning. `rest` is empty, and takes what finds no room. Gives how many
    /// writes there are.
    ///
    /// # Errors
    /// The first range that no key opens; some before it may have been posted.
    #[inline]
    pub fn part(
        &mut self,
        writes: impl Iterator<Item = Write>,
        immediate: u32,
        rest: &mut Rest,
    ) -> Result<usize, Unknown> {
        let mut unknown = None;
        let mut count = 0;
        let last = writes.fold(None, |before: Option<Write>, write| {
            if let Some(before) = before {
                self.whole(before, None, rest, &mut unknown);
            }
            count += 1;
            Some(write)
        });
        if let Some(last) = last {
            self.whole(last, Some(immediate), rest, &mut unknown);
        }
        unknown.map_or(Ok(count), Err)
    }
    /// Posts what found no room before, as far as there is some now.
    ///
    /// # Errors
    /// As [`Poster::part`].
    pub fn rest(&mut self, immediate: u32, rest: &mut Rest) -> Result<(), Unknown> {
        let length = rest.writes.len();
        while let Some(write) = rest.writes.get_mut(rest.next) {
            let immediate = (rest.next + 1 == length).then_some(immediate);
            match self.write(write, immediate) {
                Done::Posted => rest.next += 1,
                Done::Full => return Ok(()),
                Done::Unknown(unknown) => return Err(unknown),
            }
        }
        rest.clear();
        Ok(())
    }

    /// Posts a write, or keeps what finds no room.
    #[inline]
    fn whole(
        &mut self,
        mut write: Write,
        immediate: Option<u32>,
        rest: &mut Rest,
        unknown: &mut Option<Unknown>,
    ) {
        if unknown.is_some() {
            return;
        }
        match self.write(&mut write, immediate) {
            Done::Posted => {}
            Done::Full => rest.writes.push(write),
            Done::Unknown(why) => *unknown = Some(why),
        }
    }
    /// Posts a write; of one that needs several entries, what has been posted is cut off.
    #[inline]
    fn write(&mut self, write: &mut Write, immediate: Option<u32>) -> Done {
        let Write { source, destination, bytes } = *write;
        let keys = (self.local.same(source, bytes), self.remote.same(destination, bytes));
        if let (Some(local), Some(remote)) = keys
            && bytes <= self.sends.write_bytes_max()
        {
            let from = Segment { address: source, key: local.0, bytes };
            let to = Remote { address: destination, key: remote.0 };
            return if self.push(to, from, immediate) { Done::Posted } else { Done::Full };
        }
        self.pieces(write, immediate)
    }
    /// A write that lies in other regions than the last one, in several, or is too long for one entry.
    #[cold]
    fn pieces(&mut self, write: &mut Write, immediate: Option<u32>) -> Done {
        loop {
            let Write { source, destination, bytes } = *write;
            let unknown =
                |remote, address| Done::Unknown(Unknown { remote, address, bytes: write.bytes });
            let Some((local, n)) = self.local.find(source, bytes) else {
                return unknown(false, source);
            };
            let Some((remote, n)) = self.remote.find(destination, n) else {
                return unknown(true, destination);
            };
            let n = n.min(self.sends.write_bytes_max());
            let from = Segment { address: source, key: local.0, bytes: n };
            let to = Remote { address: destination, key: remote.0 };
            let last = n == bytes;
            if !self.push(to, from, immediate.filter(|_| last)) {
                return Done::Full;
            }
            if last {
                return Done::Posted;
            }
            write.source += u64::from(n);
            write.destination += u64::from(n);
            write.bytes -= n;
        }
    }
    #[inline]
    fn push(&mut self, to: Remote, from: Segment, immediate: Option<u32>) -> bool {
        match immediate {
            None => {
                let signalled = self.sends.next() & self.signal_mask == self.signal_mask;
                self.sends.write(to, from, signalled)
            }
            Some(immediate) => self.sends.write_immediate(to, from, immediate),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use crate::engine::one_sided::keys::Keys;
    use crate::engine::one_sided::nic::Key;
    use crate::engine::one_sided::wire::Opened;
    use crate::mlx5::{Data, Entry, Operation, Places, SendQueue, WRITE_BYTES_MAX, entry};
    use crate::sys::share::Words;

    const ENTRIES: u32 = 8;
    const GIB: u64 = 1 << 30;

    /// Source, destination, bytes and both keys of an entry, and its immediate.
    type Posted = (u64, u64, u32, [u32; 2], Option<u32>);

    struct Bed {
        memory: Arc<Words>,
        sends: SendQueue,
        keys: [Keys; 2],
        rest: Rest,
        seen: u64,
        posted: Vec<Posted>,
        signalled: u32,
    }

    impl Bed {
        fn new() -> Self {
            let at = 8 * ENTRIES as usize;
            let places = Places {
                sends_at: 0,
                sends: ENTRIES,
                receives: 1,
                completions_at: at,
                completions: 1,
                record_at: at + 8,
                doorbell_at: at + 9,
                consumed_at: at + 10,
            };
            let memory = Arc::new(Words::new(at + 16, false).unwrap());
            let sends = SendQueue::new(memory.clone(), places, 7);
            let opened = |address, bytes, key| Opened { address, bytes, key: Key(key) };
            // Two regions that touch, and one far away.
            let keys = |base: u64| {
                Keys::new(vec![
                    opened(base, 4 * GIB, base as u32 >> 12),
                    opened(base + 4 * GIB, GIB, (base as u32 >> 12) + 1),
                    opened(base + 9 * GIB, 100, (base as u32 >> 12) + 2),
                ])
            };
            let keys = [keys(0x10_0000), keys(0x20_0000)];
            let (rest, posted) = (Rest::default(), Vec::new());
            Self { memory, sends, keys, rest, seen: 0, posted, signalled: 0 }
        }
        fn poster(&mut self) -> (Poster<'_, SendQueue>, &mut Rest) {
            let Self { sends, keys: [local, remote], rest, .. } = self;
            let (local, remote) = (local.look(), remote.look());
            (Poster { sends, local, remote, signal_mask: 1 }, rest)
        }
        /// Takes what is in the ring as completed.
        fn complete(&mut self) {
            for index in self.seen..self.sends.next() {
                let at = 8 * (index as usize % ENTRIES as usize);
                let words = &self.memory.words()[at..at + 8];
                let entry: Entry =
                    std::array::from_fn(|i| words[i].load(std::sync::atomic::Ordering::Relaxed));
                let decoded = entry::decode(&entry, index as u16, 7).unwrap();
                let (to, data, immediate) = match decoded.operation {
                    Operation::Write { to, data } => (to, data, None),
                    Operation::WriteImmediate { to, data, immediate } => {
                        (to, data, Some(immediate))
                    }
                    Operation::Nop => panic!(),
                };
                let Data::One(from) = data else { panic!() };
                let keys = [from.key, to.key];
                self.posted.push((from.address, to.address, from.bytes, keys, immediate));
                self.signalled += u32::from(decoded.signalled);
            }
            self.seen = self.sends.next();
            if self.seen > 0 {
                self.sends.completed((self.seen - 1) as u16);
            }
        }
        fn part(&mut self, writes: &[Write]) -> Result<usize, Unknown> {
            let (mut poster, rest) = self.poster();
            let count = poster.part(writes.iter().copied(), 77, rest)?;
            loop {
                self.complete();
                if self.rest.is_empty() {
                    return Ok(count);
                }
                let (mut poster, rest) = self.poster();
                poster.rest(77, rest)?;
            }
        }
    }

    fn write(source: u64, destination: u64, bytes: u32) -> Write {
        Write { source: 0x10_0000 + source, destination: 0x20_0000 + destination, bytes }
    }

    #[test]
    fn every_byte_is_posted_once_under_the_key_that_opens_it() {
        let mut bed = Bed::new();
        let far = 9 * GIB;
        let writes = [
            write(0, 4096, 100),
            // Over the border of two regions on one side, then on both at different places.
            write(4 * GIB - 10, 0, 30),
            write(4 * GIB - 10, 4 * GIB - 20, 50),
            // Longer than an entry may be.
            write(5, 7, u32::MAX),
            write(far, far + 50, 50),
            write(far + 99, far, 1),
        ];
        let mut many: Vec<Write> = (0..100).map(|n| write(n * 8192, n * 4096, 4096)).collect();
        many.splice(40..40, writes);
        assert_eq!(bed.part(&many), Ok(many.len()));
        let mut entries = bed.posted.iter();
        for (n, want) in many.iter().enumerate() {
            let mut done = 0;
            while done < u64::from(want.bytes) {
                let &(from, to, bytes, keys, immediate) = entries.next().unwrap();
                assert_eq!((from, to), (want.source + done, want.destination + done), "{n}");
                assert!(bytes > 0 && bytes <= WRITE_BYTES_MAX);
                for (side, address) in [from, to].into_iter().enumerate() {
                    let inside = |o: &&Opened| {
                        o.key.0 == keys[side]
                            && address >= o.address
                            && address + u64::from(bytes) <= o.address + o.bytes
                    };
                    assert!(
                        bed.keys[side].opened().iter().any(|o| inside(&o)),
                        "{n}: {address:#x}"
                    );
                }
                done += u64::from(bytes);
                let last = n + 1 == many.len() && done == u64::from(want.bytes);
                assert_eq!(immediate, last.then_some(77), "{n}");
            }
            assert_eq!(done, u64::from(want.bytes), "{n}");
        }
        assert_eq!(entries.next(), None);
        assert!(bed.signalled >= bed.posted.len() as u32 / 2);
    }

    #[test]
    fn what_no_key_opens_is_not_posted() {
        for (bad, remote) in [(write(6 * GIB, 0, 8), false), (write(0, 5 * GIB - 4, 8), true)] {
            let mut bed = Bed::new();
            let writes = [write(0, 0, 8), bad, write(8, 8, 8)];
            let unknown = bed.part(&writes).unwrap_err();
            assert_eq!(unknown.remote, remote);
            bed.complete();
            assert!(bed.posted.iter().all(|&(.., immediate)| immediate.is_none()));
            assert!(bed.posted.iter().map(|&(_, _, bytes, ..)| bytes).sum::<u32>() <= 12);
        }
        assert_eq!(Bed::new().part(&[]), Ok(0));
    }

    #[test]
    fn immediates_say_which_part_of_which_grant() {
        for (grant, part) in [(1, 0), (2, 5), (u64::MAX, (1 << 24) - 1)] {
            let (bits, found) = decode(immediate(GrantId(grant), PartId(part)));
            assert_eq!((bits, found), (check(GrantId(grant)), PartId(part)));
        }
        assert!((1..1000).all(|g| check(GrantId(g)) != check(GrantId(g + 1))));
    }
}
