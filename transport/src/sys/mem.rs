//! Memory that others may write: mapped or borrowed, bounded, never a Rust slice.
//!
//! Owns: mappings ([`Memory::memfd`]) and the promise about borrowed ranges ([`HostRange`]). In:
//! addresses, checked against one [`Memory`] each ([`Pages::push`]). Out: bytes copied by volatile
//! access, or moved by one `readv`/`writev`. Invariants: a [`Pages`] list points only into memory
//! that it keeps alive, so the calls on it are safe; no reference to that memory is ever made,
//! because a peer's bytes may land in it at any moment.
#![allow(unsafe_code)] // mmap, volatile copies and scatter I/O on raw addresses.

use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use super::crc;
use super::share::seal;

/// Most entries of one scatter call (`UIO_MAXIOV`).
const IOV_MAX: usize = 1024;

/// A range of host memory that somebody else owns: a serving engine's pool.
#[derive(Debug)]
pub struct HostRange {
    address: u64,
    bytes: u64,
}

impl HostRange {
    /// Promises that a range may be read and written by address.
    ///
    /// # Safety
    /// `address..address + bytes` is mapped readable and writable, and stays so until every
    /// [`Memory`] made of this range has been dropped. Nobody holds a Rust reference into the range
    /// while an engine that knows it runs: bytes land in it at any time.
    pub const unsafe fn borrow(address: u64, bytes: u64) -> Self {
        Self { address, bytes }
    }
}

/// Host memory by address: a mapping of our own, or a range that was borrowed.
#[derive(Debug)]
pub struct Memory {
    address: u64,
    bytes: u64,
    /// Own mapping; unmapped on drop.
    own: bool,
    fd: Option<OwnedFd>,
}

impl Memory {
    /// A zeroed shared mapping of a new memfd, so that a peer on this host can be given it. Its
    /// length is sealed: whoever has the descriptor cannot shorten it, which would make every access
    /// of ours to what is gone a SIGBUS. Nor can they write it: this is the only writable mapping.
    ///
    /// `populate` touches every page now: the first touch of 256 MiB costs 14 ms, which should not
    /// be charged to the first room. Without it the mapping is sparse.
    ///
    /// # Errors
    /// What memfd_create, ftruncate, fcntl or mmap said; a length of zero is EINVAL.
    pub fn memfd(bytes: u64, populate: bool) -> io::Result<Self> {
        Self::memfd_as(bytes, populate, true)
    }
    /// As [`Memory::memfd`], but whoever is given the descriptor can write as well: an emulated NIC.
    ///
    /// # Errors
    /// As [`Memory::memfd`].
    pub fn memfd_for_nic(bytes: u64, populate: bool) -> io::Result<Self> {
        Self::memfd_as(bytes, populate, false)
    }
    fn memfd_as(bytes: u64, populate: bool, own_only: bool) -> io::Result<Self> {
        let len = usize::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: the name is a C string; the result is checked before it becomes an OwnedFd.
        let fd = unsafe {
            let fd = libc::memfd_create(
                c"kvlane-pool".as_ptr(),
                libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING,
            );
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(fd)
        };
        let size = i64::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: plain call on a descriptor we own.
        if unsafe { libc::ftruncate(fd.as_raw_fd(), size) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let flags = libc::MAP_SHARED | if populate { libc::MAP_POPULATE } else { 0 };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing of ours.
        let at =
            unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, fd.as_raw_fd(), 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let memory = Self { address: at as u64, bytes, own: true, fd: Some(fd) };
        if let Some(fd) = memory.fd() {
            seal(fd, own_only)?;
        }
        Ok(memory)
    }
    /// A range that somebody else owns.
    pub fn borrowed(range: HostRange) -> Self {
        Self { address: range.address, bytes: range.bytes, own: false, fd: None }
    }
    /// Zeroed memory of our own without a descriptor, every page touched now: what most other
    /// allocators give.
    ///
    /// # Errors
    /// What mmap said; a length of zero is EINVAL.
    pub fn private(bytes: u64) -> io::Result<Self> {
        let len = usize::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing of ours.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { address: at as u64, bytes, own: true, fd: None })
    }
    /// First address.
    pub fn address(&self) -> u64 {
        self.address
    }
    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
    /// The memfd behind an own mapping.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }
    /// Whether `address..address + bytes` lies inside.
    pub fn contains(&self, address: u64, bytes: u64) -> bool {
        address
            .checked_sub(self.address)
            .and_then(|offset| offset.checked_add(bytes))
            .is_some_and(|end| end <= self.bytes)
    }
    fn at(&self, offset: u64, bytes: u64) -> io::Result<u64> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(self.address + offset),
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{bytes} bytes at offset {offset} of a region of {} bytes", self.bytes),
            )),
        }
    }
    /// Copies bytes out. What a writer changes meanwhile comes out old, new or mixed.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if the range leaves the memory.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let from = self.at(offset, into.len() as u64)?;
        // SAFETY: `at` proved that `into.len()` bytes at `from` lie in this live memory.
        unsafe { load(from, into) };
        Ok(())
    }
    /// Copies bytes in.
    ///
    /// # Errors
    /// As [`Memory::read_at`].
    pub fn write_at(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        let mut to = self.at(offset, from.len() as u64)? as *mut u8;
        let head = to.align_offset(8).min(from.len());
        let (head, rest) = from.split_at(head);
        let words = rest.chunks_exact(8);
        let tail = words.remainder();
        // SAFETY: `at` proved that all of `from.len()` bytes at `to` lie in this live memory, of
        // which no reference exists; words are written at multiples of 8 only.
        unsafe {
            for &byte in head {
                to.write_volatile(byte);
                to = to.add(1);
            }
            for word in words {
                let mut value = [0; 8];
                value.copy_from_slice(word);
                to.cast::<u64>().write_volatile(u64::from_ne_bytes(value));
                to = to.add(8);
            }
            for &byte in tail {
                to.write_volatile(byte);
                to = to.add(1);
            }
        }
        Ok(())
    }
    /// Sets `bytes` bytes to `value`.
    ///
    /// # Errors
    /// As [`Memory::read_at`].
    pub fn fill(&self, offset: u64, bytes: u64, value: u8) -> io::Result<()> {
        self.at(offset, bytes)?;
        let chunk = [value; 4096];
        let mut done = 0;
        while done < bytes {
            let n = (bytes - done).min(chunk.len() as u64);
            self.write_at(offset + done, &chunk[..n as usize])?;
            done += n;
        }
        Ok(())
    }
    /// CRC32C of a range.
    ///
    /// # Errors
    /// As [`Memory::read_at`].
    pub fn crc32c(&self, offset: u64, bytes: u64) -> io::Result<u32> {
        let from = self.at(offset, bytes)?;
        // SAFETY: `at` proved that `bytes` bytes at `from` lie in this live memory.
        Ok(unsafe { crc::append(0, from, bytes, from) })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.own {
            // SAFETY: this is our own mapping, unmapped once; every list of pages that points into
            // it holds an `Arc` of this value, so none is left.
            unsafe { libc::munmap(self.address as *mut libc::c_void, self.bytes as usize) };
        }
    }
}

/// Copies from an address.
///
/// # Safety
/// `into.len()` bytes at `from` lie in a live [`Memory`], so that no reference to them exists.
pub(super) unsafe fn load(from: u64, into: &mut [u8]) {
    let mut from = from as *const u8;
    let head = from.align_offset(8).min(into.len());
    let (head, rest) = into.split_at_mut(head);
    let mut words = rest.chunks_exact_mut(8);
    // SAFETY: the caller's promise; volatile loads by address need no reference; words are read at
    // multiples of 8 only.
    unsafe {
        for byte in head {
            *byte = from.read_volatile();
            from = from.add(1);
        }
        for word in &mut words {
            word.copy_from_slice(&from.cast::<u64>().read_volatile().to_ne_bytes());
            from = from.add(8);
        }
        for byte in words.into_remainder() {
            *byte = from.read_volatile();
            from = from.add(1);
        }
    }
}

/// An entry of a scatter call, as the kernel reads it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Extent {
    pub(super) address: u64,
    pub(super) bytes: u64,
}

const _: () = assert!(
    size_of::<Extent>() == size_of::<libc::iovec>()
        && align_of::<Extent>() == align_of::<libc::iovec>()
        && offset_of!(Extent, address) == offset_of!(libc::iovec, iov_base)
        && offset_of!(Extent, bytes) == offset_of!(libc::iovec, iov_len)
);

impl Extent {
    const NONE: Self = Self { address: 0, bytes: 0 };
}

/// Pages in wire order with a cursor: what is still to be moved.
#[derive(Debug)]
pub struct Pages {
    /// Entries for the kernel, made once: what a call moved is cut off the front. The one before
    /// `next` is never a page to be moved; a head stands there during a call.
    extents: Vec<Extent>,
    memory: Vec<Arc<Memory>>,
    next: usize,
    left: u64,
}

impl Default for Pages {
    fn default() -> Self {
        Self { extents: vec![Extent::NONE], memory: Vec::new(), next: 1, left: 0 }
    }
}

impl Pages {
    /// Adds a page. Pages that touch become one entry.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if the page is not inside `memory`.
    pub fn push(&mut self, memory: &Arc<Memory>, address: u64, bytes: u64) -> io::Result<()> {
        if !memory.contains(address, bytes) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let same = self.memory.last().is_some_and(|last| Arc::ptr_eq(last, memory));
        if !same {
            self.memory.push(memory.clone());
        }
        let open = self.left > 0;
        self.left += bytes;
        match self.extents.last_mut() {
            Some(last) if same && open && last.address + last.bytes == address => {
                last.bytes += bytes;
            }
            _ if bytes == 0 => {}
            _ => self.extents.push(Extent { address, bytes }),
        }
        Ok(())
    }
    /// Empties the list and keeps its buffer.
    pub fn clear(&mut self) {
        self.extents.truncate(1);
        self.memory.clear();
        (self.next, self.left) = (1, 0);
    }
    /// Whether a page was in `memory`.
    pub fn uses(&self, memory: &Arc<Memory>) -> bool {
        self.memory.iter().any(|m| Arc::ptr_eq(m, memory))
    }
    /// Bytes still to be moved.
    pub fn left(&self) -> u64 {
        self.left
    }
    /// Steps over `bytes` bytes, or to the end.
    pub fn advance(&mut self, bytes: u64) {
        let mut bytes = bytes.min(self.left);
        self.left -= bytes;
        while let Some(extent) = self.extents.get_mut(self.next) {
            if bytes < extent.bytes {
                extent.address += bytes;
                extent.bytes -= bytes;
                return;
            }
            bytes -= extent.bytes;
            self.next += 1;
        }
    }
    /// Where the entries for the next `bytes` bytes end, at most `most` of them, and how much of the
    /// last is too much.
    fn window(&self, bytes: u64, most: usize) -> (usize, u64) {
        if self.left <= bytes && self.extents.len() - self.next <= most {
            return (self.extents.len(), 0);
        }
        let (mut end, mut room, mut over) = (self.next, bytes, 0);
        for extent in self.extents[self.next..].iter().take(most) {
            if room == 0 {
                break;
            }
            over = extent.bytes.saturating_sub(room);
            room -= extent.bytes - over;
            end += 1;
        }
        (end, over)
    }
    /// What is left, piece by piece, up to `bytes` bytes.
    pub(super) fn pieces(&self, bytes: u64) -> impl Iterator<Item = Extent> + '_ {
        let mut room = bytes;
        self.extents[self.next.min(self.extents.len())..].iter().map_while(move |e| {
            let piece = Extent { address: e.address, bytes: e.bytes.min(room) };
            room -= piece.bytes;
            (piece.bytes > 0).then_some(piece)
        })
    }
    /// CRC32C of the next `bytes` bytes, going on from `crc` (0 to begin).
    pub fn crc32c(&self, crc: u32, bytes: u64) -> u32 {
        let (end, over) = self.window(bytes, usize::MAX);
        (self.next..end).fold(crc, |crc, i| {
            let extent = self.extents[i];
            let bytes = extent.bytes - if i + 1 == end { over } else { 0 };
            let next = self.extents.get(i + 1).unwrap_or(&extent).address;
            // SAFETY: every extent lies in memory that `self.memory` keeps alive (checked by
            // `push`; `advance` only takes away).
            unsafe { crc::append(crc, extent.address, bytes, next) }
        })
    }
    /// Lets `call` have the entries for at most `bytes` bytes, behind `head` if there is one and,
    /// when all of the rest fits, before `tail`.
    fn with_entries(
        &mut self,
        head: Extent,
        bytes: u64,
        tail: Extent,
        call: impl FnOnce(*const libc::iovec, usize) -> isize,
    ) -> io::Result<u64> {
        let (end, over) = self.window(bytes, IOV_MAX - 2);
        let (from, mut to) = (self.next - usize::from(head.bytes > 0), end);
        self.extents[self.next - 1] = head;
        self.extents[end - 1].bytes -= over;
        if over == 0 && end == self.extents.len() && tail.bytes > 0 {
            self.extents.push(tail);
            to += 1;
        }
        let n = call(self.extents[from..to].as_ptr().cast(), to - from);
        // Before anything else can set it.
        let result = u64::try_from(n).map_err(|_| io::Error::last_os_error());
        self.extents.truncate(self.extents.len() - (to - end));
        self.extents[end - 1].bytes += over;
        result
    }
    /// One `readv` of at most `bytes` bytes straight into the pages and, when all of
    /// the rest fits, on into `then`. The cursor stays: see [`Pages::advance`]. Returns 0 at the
    /// end of the stream. Blocks if the descriptor does.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn read_from(
        &mut self,
        fd: BorrowedFd<'_>,
        bytes: u64,
        then: &mut [u8],
    ) -> io::Result<u64> {
        let tail = Extent { address: then.as_mut_ptr() as u64, bytes: then.len() as u64 };
        // SAFETY: every entry lies in memory that `self.memory` keeps alive (checked by `push`) or
        // in `then`, which is borrowed for the call. The kernel writes through raw addresses;
        // there is no reference to the pages.
        self.with_entries(Extent::NONE, bytes, tail, |entries, n| unsafe {
            libc::readv(fd.as_raw_fd(), entries, n as libc::c_int)
        })
    }
    /// One `writev` of `head` and at most `bytes` bytes of the pages. The cursor stays. Blocks if the
    /// descriptor does.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn write_to(&mut self, fd: BorrowedFd<'_>, head: &[u8], bytes: u64) -> io::Result<u64> {
        let head = Extent { address: head.as_ptr() as u64, bytes: head.len() as u64 };
        // SAFETY: as in `read_from`; the kernel only reads. sendmsg instead of writev, because only
        // it can be told not to raise SIGPIPE.
        self.with_entries(head, bytes, Extent::NONE, |entries, n| unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            message.msg_iov = entries.cast_mut();
            message.msg_iovlen = n;
            libc::sendmsg(fd.as_raw_fd(), &message, libc::MSG_NOSIGNAL)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    #[test]
    fn copies_are_exact_at_every_alignment_and_bounded() {
        let m = Memory::memfd(8192, false).unwrap();
        let bytes: Vec<u8> = (0..100u8).collect();
        for offset in 0..17 {
            m.fill(0, 8192, 0xee).unwrap();
            m.write_at(offset, &bytes).unwrap();
            let mut all = vec![0; 200];
            m.read_at(0, &mut all).unwrap();
            let at = offset as usize;
            assert!(all[..at].iter().chain(&all[at + 100..]).all(|&b| b == 0xee));
            assert_eq!(all[at..at + 100], bytes);
            assert_eq!(m.crc32c(offset, 100).unwrap(), crc32c::crc32c(&bytes));
        }
        assert!(m.write_at(8100, &bytes).is_err());
        assert!(m.read_at(u64::MAX, &mut [0]).is_err());
        assert!(m.fill(8192, 1, 0).is_err());
        assert!(m.fill(8192, 0, 0).is_ok());
        assert!(Memory::memfd(0, false).is_err());
    }

    #[test]
    fn whoever_has_the_descriptor_cannot_change_the_length() {
        let m = Memory::memfd(8192, true).unwrap();
        let fd = m.fd().unwrap().as_raw_fd();
        for bytes in [0, 4096, 1 << 20] {
            // SAFETY: plain call on a live descriptor; it is refused, so the mapping keeps its pages.
            let (n, e) = unsafe { (libc::ftruncate(fd, bytes), io::Error::last_os_error()) };
            assert_eq!((n, e.kind()), (-1, io::ErrorKind::PermissionDenied), "{bytes}");
        }
        m.write_at(8191, &[7]).unwrap();
        let mut byte = [0];
        m.read_at(8191, &mut byte).unwrap();
        assert_eq!(byte, [7]);
    }

    #[test]
    fn ranges_that_cannot_be_memory_are_refused() {
        for (address, bytes) in [(4096, 0), (u64::MAX - 5, 10), (0, 10)] {
            // SAFETY: a refused range is not touched.
            let range = unsafe { HostRange::borrow(address, bytes) };
            let e = crate::memory::Region::borrowed(range).unwrap_err();
            assert_eq!(e.kind(), kvlane_proto::ErrorKind::Memory, "{address} {bytes}");
        }
    }

    #[test]
    fn scatter_reads_land_only_in_their_pages_whatever_the_pieces() {
        let m = Arc::new(Memory::memfd(1 << 16, false).unwrap());
        m.fill(0, 1 << 16, 0xaa).unwrap();
        let mut pages = Pages::default();
        for (offset, bytes) in [(5000u64, 7u64), (100, 1), (101, 62), (9000, 0), (7, 3)] {
            pages.push(&m, m.address() + offset, bytes).unwrap();
        }
        assert_eq!((pages.left(), pages.extents.len()), (73, 1 + 3));
        assert!(pages.push(&m, m.address() + (1 << 16) - 1, 2).is_err());
        let (mut a, b) = UnixStream::pair().unwrap();
        let sent: Vec<u8> = (1..=80).collect();
        a.write_all(&sent).unwrap();
        let mut then = [0; 4];
        let mut crc = 0;
        while pages.left() > 0 {
            let n = pages.read_from(b.as_fd(), 10, &mut then).unwrap();
            crc = pages.crc32c(crc, n.min(pages.left()));
            pages.advance(n);
        }
        // The last call had room for all of the rest and went on.
        assert_eq!(then, [74, 75, 76, 77]);
        assert_eq!(crc, crc32c::crc32c(&sent[..73]));
        let mut all = vec![0; 1 << 16];
        m.read_at(0, &mut all).unwrap();
        assert_eq!(all[5000..5007], sent[..7]);
        assert_eq!(all[100..163], sent[7..70]);
        assert_eq!(all[7..10], sent[70..73]);
        assert_eq!(all.iter().filter(|&&b| b == 0xaa).count(), (1 << 16) - 73);
    }

    #[test]
    fn scatter_writes_send_head_and_pages_in_order() {
        let m = Arc::new(Memory::memfd(4096, false).unwrap());
        m.write_at(0, &(0..=255u8).collect::<Vec<_>>()).unwrap();
        let mut pages = Pages::default();
        pages.push(&m, m.address() + 200, 5).unwrap();
        pages.push(&m, m.address() + 10, 5).unwrap();
        let (a, mut b) = UnixStream::pair().unwrap();
        assert_eq!(pages.write_to(a.as_fd(), b"hd", 7).unwrap(), 9);
        pages.advance(7);
        assert_eq!(pages.write_to(a.as_fd(), b"", 100).unwrap(), 3);
        let mut got = [0; 12];
        b.read_exact(&mut got).unwrap();
        assert_eq!(got, [b'h', b'd', 200, 201, 202, 203, 204, 10, 11, 12, 13, 14]);
        drop(b);
        assert!(pages.write_to(a.as_fd(), b"x", 1).is_err());
    }
}
