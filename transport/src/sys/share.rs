//! Memory shared with another process of this host: words that both use, and imports.
//!
//! Owns: the mappings. In: descriptors of a peer, which may be anything. Out: atomic words, and
//! addresses checked against what is mapped ([`Import::at`]). Invariants: a peer's descriptor is
//! mapped only if it is memory of the kernel's own tmpfs that nobody can shorten, at least as long
//! as asked, so that no access to the mapping can be a SIGBUS (huge pages are refused: a hole in
//! those can be one); imports are read-only, those of an emulated NIC aside; nothing is made a
//! reference to but atomics.
#![allow(unsafe_code)] // mmap(2) of descriptors, fstat(2), fcntl(2), atomics in shared memory.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::copy::prefetch_line;

/// Most separate pieces of data that are looked for in a sparse import.
const EXTENTS_MAX: usize = 4096;
/// Bytes that are made ready between two looks at whether to go on.
const READY_BYTES: u64 = 64 << 20;

fn mapped(fd: BorrowedFd<'_>, bytes: u64, write: bool) -> io::Result<u64> {
    let len = usize::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
    let protection = libc::PROT_READ | if write { libc::PROT_WRITE } else { 0 };
    // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing of ours.
    let at = unsafe {
        libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, fd.as_raw_fd(), 0)
    };
    if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(at as u64) }
}

fn unmap(address: u64, bytes: u64) {
    // SAFETY: called once, on drop, for a mapping of our own that nothing points into any more.
    unsafe { libc::munmap(address as *mut libc::c_void, bytes as usize) };
}

/// What a descriptor is of: the same memory has the same identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
}

/// Whether `bytes` bytes of a peer's descriptor can be mapped without danger.
fn check(fd: BorrowedFd<'_>, bytes: u64) -> io::Result<Identity> {
    let refused = |why: String| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    // SAFETY: all zeros is a valid stat and statfs; the calls write nothing else.
    let (stat, fs) = unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        let mut fs: libc::statfs = std::mem::zeroed();
        if libc::fstat(fd.as_raw_fd(), &mut stat) != 0
            || libc::fstatfs(fd.as_raw_fd(), &mut fs) != 0
        {
            return Err(io::Error::last_os_error());
        }
        (stat, fs)
    };
    if stat.st_mode & libc::S_IFMT != libc::S_IFREG || fs.f_type != libc::TMPFS_MAGIC {
        return refused("the descriptor is no memfd of ordinary pages".into());
    }
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    if bytes == 0 || bytes > size {
        return refused(format!("{bytes} bytes are claimed of a memfd of {size}"));
    }
    // SAFETY: plain call.
    let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
        return refused("the memfd is not sealed with F_SEAL_SHRINK".into());
    }
    Ok(Identity { device: stat.st_dev, inode: stat.st_ino })
}

/// Words of 8 bytes that this process and peers use at the same time.
#[derive(Debug)]
pub struct Words {
    address: u64,
    len: usize,
    fd: OwnedFd,
}

impl Words {
    /// Fresh zeros. Their length is sealed; with `own`, peers that are given the descriptor can only
    /// read.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn new(len: usize, own: bool) -> io::Result<Self> {
        let bytes = len as u64 * 8;
        // SAFETY: the name is a C string; the result is checked before it becomes an OwnedFd.
        let fd = unsafe {
            let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
            let fd = libc::memfd_create(c"kvlane-words".as_ptr(), flags);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(fd)
        };
        // SAFETY: plain call on a descriptor we own.
        if unsafe { libc::ftruncate(fd.as_raw_fd(), bytes as i64) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let words = Self { address: mapped(fd.as_fd(), bytes, true)?, len, fd };
        seal(words.fd(), own)?;
        Ok(words)
    }
    /// A peer's words, for reading and writing.
    ///
    /// # Errors
    /// What is wrong with the descriptor.
    pub fn import(fd: OwnedFd, len: usize) -> io::Result<Self> {
        let bytes = len as u64 * 8;
        check(fd.as_fd(), bytes)?;
        Ok(Self { address: mapped(fd.as_fd(), bytes, true)?, len, fd })
    }
    /// The words.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: `len` words of 8 bytes are mapped, at a page's start, as long as `self` lives, and
        // cannot be shortened. Atomics are the one kind of reference that bears other writers.
        unsafe { std::slice::from_raw_parts(self.address as *const AtomicU64, self.len) }
    }
    /// Half of a word, the one first in memory or the other, if there are so many: for two halves
    /// that have different writers. A word is used either whole or by its halves, never both ways:
    /// the order between accesses of two sizes is not defined.
    pub fn half(&self, index: usize, second: bool) -> Option<&AtomicU32> {
        let word = self.words().get(index)?.as_ptr().cast::<AtomicU32>();
        // SAFETY: both halves lie in the word, which is mapped and aligned as long as `self` lives;
        // atomics bear other writers. Each place is used with one size only, as said above: the
        // layouts built on these words say which are halves.
        Some(unsafe { &*word.add(usize::from(second)) })
    }
    /// Asks for the line of a word that is read soon.
    pub fn prefetch(&self, index: usize) {
        prefetch_line(self.address.wrapping_add(index as u64 * 8));
    }
    /// Their first address.
    pub fn address(&self) -> u64 {
        self.address
    }
    /// The descriptor, for a peer.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        unmap(self.address, self.len as u64 * 8);
    }
}

/// Words that a peer writes and this side only reads.
#[derive(Debug)]
pub struct ReadWords(Words);

impl ReadWords {
    /// A peer's words.
    ///
    /// # Errors
    /// What is wrong with the descriptor.
    pub fn import(fd: OwnedFd, len: usize) -> io::Result<Self> {
        let bytes = len as u64 * 8;
        check(fd.as_fd(), bytes)?;
        Ok(Self(Words { address: mapped(fd.as_fd(), bytes, false)?, len, fd }))
    }
    /// One word, if there are so many.
    pub fn load(&self, index: u32) -> Option<u64> {
        self.0.words().get(index as usize).map(|word| word.load(Ordering::Acquire))
    }
}

/// Whether those who are given a descriptor can write the memory.
pub fn is_open_to_writers(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: plain call.
    let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    seals >= 0 && seals & (libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_WRITE) == 0
}

/// Fixes the length of a memfd that is mapped already, and the seals themselves. With `own`, nobody
/// can write it but through mappings that exist.
///
/// # Errors
/// What the kernel said.
pub(super) fn seal(fd: BorrowedFd<'_>, own: bool) -> io::Result<()> {
    let length = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    let add = |seals: libc::c_int| {
        // SAFETY: plain call.
        match unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    if own && add(libc::F_SEAL_FUTURE_WRITE | length).is_ok() {
        return Ok(());
    }
    // Kernels before 5.1 do not know the other: peers on this host must be trusted not to write.
    add(length)
}

/// A mapping of a peer's memory; read-only, unless it was asked for otherwise.
#[derive(Debug)]
pub struct Import {
    address: u64,
    bytes: u64,
    writable: bool,
    identity: Identity,
    /// `None` where nothing more is asked of it: a process has few descriptors.
    fd: Option<OwnedFd>,
}

impl Import {
    /// Maps the first `bytes` bytes of a peer's descriptor.
    ///
    /// # Errors
    /// What is wrong with the descriptor, or what mmap said.
    pub fn map(fd: OwnedFd, bytes: u64) -> io::Result<Self> {
        let identity = check(fd.as_fd(), bytes)?;
        let address = mapped(fd.as_fd(), bytes, false)?;
        Ok(Self { address, bytes, writable: false, identity, fd: Some(fd) })
    }
    /// The same for a NIC, never for an engine: to write as well, if asked. The descriptor is closed.
    ///
    /// # Errors
    /// As [`Import::map`]; [`io::ErrorKind::PermissionDenied`] if the descriptor is sealed against it.
    pub fn map_for_nic(fd: OwnedFd, bytes: u64, writable: bool) -> io::Result<Self> {
        let identity = check(fd.as_fd(), bytes)?;
        let address = mapped(fd.as_fd(), bytes, writable)?;
        Ok(Self { address, bytes, writable, identity, fd: None })
    }
    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
    /// Whether a descriptor is of the same memory, all of it mapped here.
    pub fn is_of(&self, fd: BorrowedFd<'_>, bytes: u64) -> bool {
        bytes == self.bytes && check(fd, bytes).is_ok_and(|identity| identity == self.identity)
    }
    /// The address of a range, if it lies inside.
    pub(super) fn at(&self, offset: u64, bytes: u64) -> Option<u64> {
        let end = offset.checked_add(bytes)?;
        (end <= self.bytes).then(|| self.address + offset)
    }
    /// The address of a range, if it lies inside and may be written.
    pub(super) fn at_for_writing(&self, offset: u64, bytes: u64) -> Option<u64> {
        self.at(offset, bytes).filter(|_| self.writable)
    }
    /// Makes present pages ready, so that the first copy does not pay for it. Holes stay holes.
    /// Only speed depends on it, so nothing is refused.
    pub fn make_ready(&self, go_on: impl Fn() -> bool) {
        let Some(fd) = &self.fd else { return };
        let seek = |from: u64, whence| {
            // SAFETY: plain call on a descriptor we own.
            let at = unsafe { libc::lseek(fd.as_raw_fd(), from as i64, whence) };
            u64::try_from(at).ok().filter(|&at| at < self.bytes)
        };
        let mut from = 0;
        for _ in 0..EXTENTS_MAX {
            let Some(start) = seek(from, libc::SEEK_DATA) else { return };
            let end = seek(start, libc::SEEK_HOLE).unwrap_or(self.bytes);
            let mut at = start / 4096 * 4096;
            while at < end {
                if !go_on() {
                    return;
                }
                let n = (end - at).min(READY_BYTES);
                let (address, n) = ((self.address + at) as *mut libc::c_void, n as usize);
                // SAFETY: the range lies in this live mapping; reading ahead changes nothing.
                if unsafe { libc::madvise(address, n, libc::MADV_POPULATE_READ) } != 0 {
                    return;
                }
                at += n as u64;
            }
            from = end;
        }
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        unmap(self.address, self.bytes);
    }
}
