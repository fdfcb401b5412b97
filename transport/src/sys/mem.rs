//! Memory that others may write: mapped or borrowed, bounded, never a Rust slice.
//!
//! Owns: mappings ([`Memory::memfd`]) and the promise about borrowed ranges ([`HostRange`]). In:
//! addresses, checked against one [`Memory`] each ([`Pages::push`]). Out: bytes copied by volatile
//! access, or moved by one `readv`/`writev`. Invariants: a [`Pages`] list points only into memory
//! that it keeps alive, so the calls on it are safe; no reference to that memory is ever made,
//! because a peer's bytes may land in it at any moment.
#![allow(unsafe_code)] // mmap, volatile copies and scatter I/O on raw addresses.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

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
            seal(fd, true)?;
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
        Ok(unsafe { crc_of(0, from, bytes) })
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
unsafe fn load(from: u64, into: &mut [u8]) {
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

/// CRC32C of what lies at an address, going on from `crc`.
///
/// # Safety
/// As [`load`], for `bytes` bytes at `address`.
unsafe fn crc_of(mut crc: u32, address: u64, bytes: u64) -> u32 {
    let mut chunk = [0u8; 4096];
    let mut done = 0;
    while done < bytes {
        let n = (bytes - done).min(chunk.len() as u64);
        // SAFETY: the caller's promise; `done + n` is at most `bytes`.
        unsafe { load(address + done, &mut chunk[..n as usize]) };
        crc = crc32c::crc32c_append(crc, &chunk[..n as usize]);
        done += n;
    }
    crc
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    pub(super) address: u64,
    pub(super) bytes: u64,
}

/// Pages in wire order with a cursor: what is still to be moved.
#[derive(Debug, Default)]
pub struct Pages {
    extents: Vec<Extent>,
    memory: Vec<Arc<Memory>>,
    next: usize,
    /// Bytes of `extents[next]` that are done.
    within: u64,
    left: u64,
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
        self.left += bytes;
        match self.extents.last_mut() {
            Some(last) if same && last.address + last.bytes == address => last.bytes += bytes,
            _ if bytes == 0 => {}
            _ => self.extents.push(Extent { address, bytes }),
        }
        Ok(())
    }
    /// Empties the list and keeps its buffer.
    pub fn clear(&mut self) {
        self.extents.clear();
        self.memory.clear();
        (self.next, self.within, self.left) = (0, 0, 0);
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
        while let Some(extent) = self.extents.get(self.next) {
            let rest = extent.bytes - self.within;
            if bytes < rest {
                self.within += bytes;
                return;
            }
            bytes -= rest;
            self.next += 1;
            self.within = 0;
        }
    }
    /// What is left, piece by piece, up to `bytes` bytes.
    pub(super) fn window(&self, bytes: u64) -> impl Iterator<Item = Extent> + '_ {
        let mut skip = self.within;
        let mut room = bytes;
        self.extents[self.next.min(self.extents.len())..].iter().map_while(move |e| {
            let piece = Extent { address: e.address + skip, bytes: (e.bytes - skip).min(room) };
            skip = 0;
            room -= piece.bytes;
            (piece.bytes > 0).then_some(piece)
        })
    }
    /// CRC32C of the next `bytes` bytes, going on from `crc` (0 to begin).
    pub fn crc32c(&self, crc: u32, bytes: u64) -> u32 {
        self.window(bytes).fold(crc, |crc, piece| {
            // SAFETY: every extent lies in memory that `self.memory` keeps alive (checked by
            // `push`), and a window's pieces lie in their extents.
            unsafe { crc_of(crc, piece.address, piece.bytes) }
        })
    }
    /// One `readv` of at most `bytes` bytes straight into the pages and, when all of
    /// the rest fits, on into `then`. The cursor stays: see [`Pages::advance`]. Returns 0 at the
    /// end of the stream. Blocks if the descriptor does.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn read_from(&self, fd: BorrowedFd<'_>, bytes: u64, then: &mut [u8]) -> io::Result<u64> {
        let mut iov = Iov::new();
        let whole = iov.pages(self, bytes, 1);
        if whole {
            iov.push(then.as_mut_ptr() as u64, then.len());
        }
        // SAFETY: every entry lies in memory that `self.memory` keeps alive (checked by `push`) or
        // in `then`, which is borrowed for the call. The kernel writes through raw addresses;
        // there is no reference to the pages.
        let n = unsafe { libc::readv(fd.as_raw_fd(), iov.as_ptr(), iov.len()) };
        count(n)
    }
    /// One `writev` of `head` and at most `bytes` bytes of the pages. The cursor stays. Blocks if the
    /// descriptor does.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn write_to(&self, fd: BorrowedFd<'_>, head: &[u8], bytes: u64) -> io::Result<u64> {
        let mut iov = Iov::new();
        iov.push(head.as_ptr() as u64, head.len());
        iov.pages(self, bytes, 0);
        // SAFETY: as in `read_from`; the kernel only reads. sendmsg instead of writev, because only
        // it can be told not to raise SIGPIPE.
        let n = unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            message.msg_iov = iov.as_ptr().cast_mut();
            message.msg_iovlen = iov.len() as usize;
            libc::sendmsg(fd.as_raw_fd(), &message, libc::MSG_NOSIGNAL)
        };
        count(n)
    }
}

fn count(n: isize) -> io::Result<u64> {
    u64::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Entries of one scatter call, on the stack.
struct Iov {
    entries: [MaybeUninit<libc::iovec>; IOV_MAX],
    len: usize,
}

impl Iov {
    fn new() -> Self {
        Self { entries: [MaybeUninit::uninit(); IOV_MAX], len: 0 }
    }
    fn push(&mut self, address: u64, bytes: usize) {
        if bytes > 0
            && let Some(entry) = self.entries.get_mut(self.len)
        {
            entry.write(libc::iovec { iov_base: address as *mut libc::c_void, iov_len: bytes });
            self.len += 1;
        }
    }
    /// Adds pages and keeps `spare` entries free; says whether all that is left fitted.
    fn pages(&mut self, pages: &Pages, bytes: u64, spare: usize) -> bool {
        let mut taken = 0;
        for piece in pages.window(bytes).take(IOV_MAX - self.len - spare) {
            self.push(piece.address, piece.bytes as usize);
            taken += piece.bytes;
        }
        taken == pages.left
    }
    fn as_ptr(&self) -> *const libc::iovec {
        self.entries.as_ptr().cast()
    }
    fn len(&self) -> libc::c_int {
        self.len as libc::c_int
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
        assert_eq!((pages.left(), pages.extents.len()), (73, 3));
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
