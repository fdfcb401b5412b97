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
use crate::mlx5::{Entry, Remote, Segment, SendQueue, WRITE_BYTES_MAX, entry};

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
pub struct Poster<'a> {
    /// Its ring.
    pub sends: &'a mut SendQueue,
    /// Keys of this side.
    pub local: Look<'a>,
    /// Keys of the receiver.
    pub remote: Look<'a>,
    /// An entry completes if these bits of its index are all ones, so that room is known of.
    pub signal_mask: u64,
}

impl Poster<'_> {
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
            && bytes <= WRITE_BYTES_MAX
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
            let n = n.min(WRITE_BYTES_MAX);
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
        let (next, number) = (self.sends.next(), self.sends.number());
        let index = next as u16;
        let entry: Entry = match immediate {
            None => {
                let signalled = next & self.signal_mask == self.signal_mask;
                entry::write(index, number, to, from, signalled)
            }
            Some(immediate) => entry::write_immediate(index, number, to, from, immediate, true),
        };
        self.sends.push(&entry)
    }
}
