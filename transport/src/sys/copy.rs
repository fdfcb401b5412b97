//! Copies out of memory that a peer may be writing, into registered pages, or, for an emulated NIC,
//! from one peer's memory to another's.
//!
//! In: [`Sources`], each checked against the import that it keeps alive, and [`Pages`]. Out: pages
//! filled, the cursor moved; what a writer changed meanwhile comes out old, new or mixed, and the
//! caller finds out by its serve word. Invariants: no Rust reference to either side is made and no
//! byte is read twice, so a checksum is that of the bytes that were stored; [`settle`] stands
//! between a copy and whatever tells of it.
//!
//! Order: on x86 loads are not reordered with later loads, nor plain stores with later stores, so a
//! serve word that is read after the copy was read after every byte of it. Two things need more:
//! stores past the cache (a later store may overtake them) and `rep movsb` (whose loads the manuals
//! leave open). [`settle`] has both an `sfence` and an `lfence` for them; elsewhere it is a full
//! fence.
#![allow(unsafe_code)] // Copies between raw addresses, in assembly; process_vm_readv(2).

use std::io;
use std::sync::Arc;

use super::mem::Pages;
use super::share::Import;

/// Pieces from here on go past the cache, in lines of 64 bytes.
#[cfg(target_arch = "x86_64")]
const STREAM_BYTES_MIN: usize = 256;
/// What the processor maps, and guesses ahead, at a time.
const MEMORY_PAGE: u64 = 4096;
/// Lines of 64 bytes that are asked for ahead; 4 and 16 measured worse.
const PREFETCH_LINES: u64 = 8;
/// Bytes that are checked before they are stored: half of the first-level cache at most.
const CHECKED_BYTES: usize = 4096;
/// Most entries of one scatter call (`UIO_MAXIOV`).
const IOV_MAX: usize = 1024;

/// A range of a peer's memory; addresses of this process, or of the peer's.
#[derive(Clone, Copy, Debug)]
struct Piece {
    address: u64,
    bytes: u64,
}

/// What to copy, in order, out of mappings that it keeps alive.
#[derive(Debug, Default)]
pub struct Sources {
    pieces: Vec<Piece>,
    imports: Vec<Arc<Import>>,
    bytes: u64,
}

impl Sources {
    /// Adds a range of an import.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if it is not inside.
    pub fn push(&mut self, import: &Arc<Import>, offset: u64, bytes: u64) -> io::Result<()> {
        let address = import.at(offset, bytes).ok_or(io::ErrorKind::InvalidInput)?;
        if !self.imports.last().is_some_and(|last| Arc::ptr_eq(last, import)) {
            self.imports.push(import.clone());
        }
        self.pieces.push(Piece { address, bytes });
        self.bytes += bytes;
        Ok(())
    }
    /// Bytes of all ranges.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
    /// Empties the list and keeps its buffer.
    pub fn clear(&mut self) {
        self.pieces.clear();
        self.imports.clear();
        self.bytes = 0;
    }
}

impl Pages {
    /// Copies all of `from` into the next pages and steps over them; with `crc`, goes on with the
    /// CRC32C of what was stored.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if the pages have less room.
    pub fn copy_from(&mut self, from: &Sources, mut crc: Option<&mut u32>) -> io::Result<()> {
        if from.bytes > self.left() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        for (i, piece) in from.pieces.iter().enumerate() {
            let next = from.pieces.get(i + 1);
            let mut done = 0;
            while done < piece.bytes {
                let at = piece.address + done;
                // No hardware guesses beyond the end of a page of memory.
                let most = (MEMORY_PAGE - at % MEMORY_PAGE).min(piece.bytes - done);
                let Some(room) = self.pieces(most).next() else {
                    return Err(io::ErrorKind::InvalidInput.into());
                };
                match next {
                    Some(next) if done + most == piece.bytes => prefetch(next.address),
                    _ => prefetch(at + most),
                }
                // SAFETY: `room` lies in memory that these pages keep alive; `at..at + room.bytes`
                // in a piece, which `push` checked against an import that `from` keeps alive. The
                // two cannot overlap: an import is a mapping of its own.
                unsafe {
                    match &mut crc {
                        None => copy(room.address, at, room.bytes as usize),
                        Some(crc) => **crc = copy_checked(**crc, room.address, at, room.bytes),
                    }
                }
                self.advance(room.bytes);
                done += room.bytes;
            }
        }
        Ok(())
    }

    /// Copies pages from one list to another by libc's `memcpy`, as long as both have some: what
    /// engines are measured against. Not for memory that a peer may write.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if two pages overlap.
    pub fn memcpy_from(&mut self, from: &mut Pages) -> io::Result<()> {
        loop {
            let (to, at) = (self.pieces(u64::MAX).next(), from.pieces(u64::MAX).next());
            let (Some(to), Some(at)) = (to, at) else { return Ok(()) };
            let n = to.bytes.min(at.bytes);
            if to.address.abs_diff(at.address) < n {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            // SAFETY: both pieces lie in memory that their lists keep alive, and do not overlap. The
            // C library works on raw addresses; there is no reference to either.
            unsafe { libc::memcpy(to.address as *mut _, at.address as *const _, n as usize) };
            self.advance(n);
            from.advance(n);
        }
    }

    /// One `process_vm_readv` of ranges of another process's memory into the next pages; gives the
    /// bytes that it copied and steps over them. With `crc`, goes on with the CRC32C of what was
    /// stored. The kernel checks the other side's addresses.
    ///
    /// # Errors
    /// What the kernel said; [`io::ErrorKind::UnexpectedEof`] for 0 bytes.
    pub fn copy_from_process(
        &mut self,
        pid: i32,
        from: &[(u64, u64)],
        crc: Option<&mut u32>,
    ) -> io::Result<u64> {
        let iovec = |address: u64, bytes: u64| libc::iovec {
            iov_base: address as *mut libc::c_void,
            iov_len: bytes as usize,
        };
        let mut bytes = 0;
        let remote: Vec<_> = from
            .iter()
            .take(IOV_MAX)
            .map(|&(address, n)| {
                bytes += n;
                iovec(address, n)
            })
            .collect();
        if bytes > self.left() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let local: Vec<_> =
            self.pieces(bytes).take(IOV_MAX).map(|e| iovec(e.address, e.bytes)).collect();
        // SAFETY: every local entry lies in memory that these pages keep alive; the kernel writes
        // through raw addresses, and checks the remote ones against the other process.
        let n = unsafe {
            libc::process_vm_readv(
                pid,
                local.as_ptr(),
                local.len() as libc::c_ulong,
                remote.as_ptr(),
                remote.len() as libc::c_ulong,
                0,
            )
        };
        match u64::try_from(n) {
            Err(_) => Err(io::Error::last_os_error()),
            Ok(0) if bytes > 0 => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                if let Some(crc) = crc {
                    *crc = self.crc32c(*crc, n);
                }
                self.advance(n);
                Ok(n)
            }
        }
    }
}

impl Import {
    /// Copies bytes out. What a writer changes meanwhile comes out old, new or mixed.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if the range is not inside.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let at = self.at(offset, into.len() as u64).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: the range lies in this live mapping, of which no reference exists; `into` is
        // borrowed exclusively, so the two are different memory.
        unsafe { copy_near(into.as_mut_ptr() as u64, at, into.len()) };
        Ok(())
    }
    /// Copies bytes in; [`settle`] before they are told of.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if the range is not inside, or the mapping read-only.
    pub fn write_at(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        let bytes = from.len();
        let at = self.at_for_writing(offset, bytes as u64).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: the range lies in this live writable mapping, of which no reference exists, so it
        // does not overlap `from`.
        unsafe { copy(at, from.as_ptr() as u64, bytes) };
        Ok(())
    }
    /// Copies `bytes` bytes from another mapping; [`settle`] before they are told of. Where the two
    /// are of the same memory and overlap, what comes out is mixed.
    ///
    /// # Errors
    /// As [`Import::write_at`], for either side.
    pub fn copy_from(&self, to: u64, from: &Self, at: u64, bytes: u64) -> io::Result<()> {
        let to = self.at_for_writing(to, bytes).ok_or(io::ErrorKind::InvalidInput)?;
        let from = from.at(at, bytes).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: both ranges lie in live mappings, of which no reference exists, `to` in a writable
        // one. They may be the same memory; the copies are assembly, which only stores what it
        // loaded, whatever the order.
        unsafe { copy(to, from, bytes as usize) };
        Ok(())
    }
}

/// Everything that was copied before is visible before anything that is stored afterwards, and was
/// read before anything that is read afterwards.
pub fn settle() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: two fences; they touch no register and, as the compiler must assume, all memory.
    unsafe {
        std::arch::asm!("sfence", "lfence", options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

/// Asks for the first lines of what is copied next.
fn prefetch(address: u64) {
    (0..PREFETCH_LINES).for_each(|line| prefetch_line(address.wrapping_add(line * 64)));
}

/// Asks for one line that is read soon.
pub(super) fn prefetch_line(address: u64) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults, whatever the address.
    unsafe {
        std::arch::asm!(
            "prefetcht0 [{a}]",
            a = in(reg) address,
            options(nostack, preserves_flags, readonly),
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Copies by way of a buffer, so that what is checked is what is stored, though the source may
/// change: one read of the peer's memory, the rest in the first-level cache.
///
/// # Safety
/// As [`copy`].
unsafe fn copy_checked(mut crc: u32, to: u64, from: u64, bytes: u64) -> u32 {
    let mut chunk = [0u8; CHECKED_BYTES];
    let mut done = 0;
    while done < bytes {
        let n = (bytes - done).min(CHECKED_BYTES as u64) as usize;
        // SAFETY: the caller's promise for both sides; the buffer is our own and large enough. It is
        // written by address and read as a slice only between the two copies.
        unsafe {
            copy_near(chunk.as_mut_ptr() as u64, from + done, n);
            crc = crc32c::crc32c_append(crc, &chunk[..n]);
            copy(to + done, chunk.as_ptr() as u64, n);
        }
        done += n as u64;
    }
    crc
}

/// Copies; large pieces past the cache, where the machine can.
///
/// # Safety
/// `bytes` bytes at `to` may be written and at `from` read, and the two do not overlap. Neither is a
/// Rust reference's; another process may write either meanwhile.
unsafe fn copy(to: u64, from: u64, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    if bytes >= STREAM_BYTES_MIN && std::arch::is_x86_feature_detected!("avx") {
        let head = (to.wrapping_neg() % 64) as usize;
        let body = (bytes - head) / 128 * 128;
        let tail = bytes - head - body;
        // SAFETY: the three pieces are the whole; `body` is a multiple of 128 and not 0, as at least
        // 256 - 63 bytes are left behind the head, and `to + head` is a multiple of 64.
        unsafe {
            // Most have neither head nor tail, and even an empty `rep movsb` takes its time.
            if head > 0 {
                copy_near(to, from, head);
            }
            stream(to + head as u64, from + head as u64, body);
            if tail > 0 {
                copy_near(to + (head + body) as u64, from + (head + body) as u64, tail);
            }
        }
        return;
    }
    // SAFETY: the caller's promise.
    unsafe { copy_near(to, from, bytes) }
}

/// Copies past the cache.
///
/// # Safety
/// As [`copy`]; AVX is there, `bytes` is a multiple of 128 and not 0, `to` one of 32.
#[cfg(target_arch = "x86_64")]
unsafe fn stream(to: u64, from: u64, bytes: usize) {
    // SAFETY: the caller's promise; registers are declared, the stack is not used.
    unsafe {
        std::arch::asm!(
            "2:",
            "vmovdqu ymm0, [{s}]",
            "vmovdqu ymm1, [{s} + 32]",
            "vmovdqu ymm2, [{s} + 64]",
            "vmovdqu ymm3, [{s} + 96]",
            "vmovntdq [{d}], ymm0",
            "vmovntdq [{d} + 32], ymm1",
            "vmovntdq [{d} + 64], ymm2",
            "vmovntdq [{d} + 96], ymm3",
            "add {s}, 128",
            "add {d}, 128",
            "sub {n}, 128",
            "jnz 2b",
            "vzeroupper",
            s = inout(reg) from => _,
            d = inout(reg) to => _,
            n = inout(reg) bytes => _,
            out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _,
            options(nostack),
        );
    }
}

/// Copies through the cache.
///
/// # Safety
/// As [`copy`].
#[cfg(target_arch = "x86_64")]
unsafe fn copy_near(to: u64, from: u64, bytes: usize) {
    // SAFETY: the caller's promise; the direction flag is clear by the ABI.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") bytes => _,
            inout("rdi") to => _,
            inout("rsi") from => _,
            options(nostack, preserves_flags),
        );
    }
}

/// Copies through the cache.
///
/// # Safety
/// As [`copy`].
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_near(to: u64, from: u64, bytes: usize) {
    // SAFETY: as in `volatile`.
    unsafe { volatile(to, from, bytes) }
}

/// Copies by volatile access: what works on every machine.
///
/// # Safety
/// As [`copy`].
#[cfg(any(test, not(target_arch = "x86_64")))]
unsafe fn volatile(to: u64, from: u64, bytes: usize) {
    let (mut d, mut s, mut left) = (to as *mut u8, from as *const u8, bytes);
    // SAFETY: the caller's promise; words only where both sides are aligned to 8.
    unsafe {
        while left > 0 {
            if left >= 8 && (d as u64 | s as u64).is_multiple_of(8) {
                d.cast::<u64>().write_volatile(s.cast::<u64>().read_volatile());
                (d, s, left) = (d.add(8), s.add(8), left - 8);
            } else {
                d.write_volatile(s.read_volatile());
                (d, s, left) = (d.add(1), s.add(1), left - 1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::mem::{HostRange, Memory};
    use std::os::fd::AsFd;

    const POOL: u64 = 3 << 20;

    fn pattern(n: usize) -> Vec<u8> {
        (0..n).map(|i| (i * 31 + i / 255) as u8).collect()
    }
    fn import(m: &Memory) -> Arc<Import> {
        let fd = m.fd().unwrap().try_clone_to_owned().unwrap();
        Arc::new(Import::map(fd, m.bytes()).unwrap())
    }

    #[test]
    fn copies_are_exact_at_every_length_and_alignment() {
        let (src, dst) = (Memory::memfd(POOL, false).unwrap(), Memory::memfd(POOL, false).unwrap());
        let dst = Arc::new(dst);
        let bytes = pattern(POOL as usize);
        src.write_at(0, &bytes).unwrap();
        let import = import(&src);
        let lengths = [1, 2, 31, 63, 64, 65, 127, 128, 255, 256, 257, 383, 511, 512, 4095, 4096];
        let longer = [4097, 8191, (1 << 20) - 1, 1 << 20, (1 << 20) + 1];
        for (i, n) in lengths.into_iter().chain(longer).enumerate() {
            for (from, to) in [(0, 0), (1, 0), (0, 1), (7, 33), (63, 64), (64, 65), (33, 7)] {
                let (from, to) = (from + 4096 * (i as u64 % 3), to + 8192);
                let around = to - 64..to + n + 64;
                for checked in [false, true] {
                    dst.fill(around.start, around.end - around.start, 0xee).unwrap();
                    let mut pages = Pages::default();
                    // Two pages, so that a piece ends inside the other side's.
                    pages.push(&dst, dst.address() + to, n / 3).unwrap();
                    pages.push(&dst, dst.address() + to + n / 3, n - n / 3).unwrap();
                    let mut sources = Sources::default();
                    sources.push(&import, from, n / 2).unwrap();
                    sources.push(&import, from + n / 2, n - n / 2).unwrap();
                    let mut crc = 0;
                    pages.copy_from(&sources, checked.then_some(&mut crc)).unwrap();
                    settle();
                    let mut got = vec![0; (around.end - around.start) as usize];
                    dst.read_at(around.start, &mut got).unwrap();
                    let want = &bytes[from as usize..(from + n) as usize];
                    assert!(got[64..64 + n as usize] == *want, "{n} bytes from {from} to {to}");
                    assert!(got[..64].iter().chain(&got[64 + n as usize..]).all(|&b| b == 0xee));
                    assert_eq!((pages.left(), checked), (0, crc == crc32c::crc32c(want)));
                }
            }
        }
        assert!(Sources::default().push(&import, POOL - 1, 2).is_err());
        assert!(Sources::default().push(&import, u64::MAX, 2).is_err());
        let mut sources = Sources::default();
        sources.push(&import, 0, 2).unwrap();
        assert!(Pages::default().copy_from(&sources, None).is_err());
    }

    #[test]
    fn the_portable_copy_is_exact() {
        let from = pattern(300);
        for (head, n) in [(0, 0), (0, 300), (1, 299), (3, 64), (8, 100), (5, 7)] {
            let mut to = vec![0xee; 400];
            // SAFETY: both sides are buffers of this test, large enough, and used by address only.
            unsafe { volatile(to.as_mut_ptr() as u64 + 8, from.as_ptr() as u64 + head, n) };
            assert_eq!(to[8..8 + n], from[head as usize..head as usize + n]);
            assert!(to[..8].iter().chain(&to[8 + n..]).all(|&b| b == 0xee));
        }
    }

    #[test]
    fn another_process_is_read_by_address() {
        let from = pattern(10_000);
        let dst = Arc::new(Memory::memfd(16384, false).unwrap());
        let mut pages = Pages::default();
        pages.push(&dst, dst.address() + 5, 3000).unwrap();
        pages.push(&dst, dst.address() + 9000, 3000).unwrap();
        let at = from.as_ptr() as u64;
        let pid = std::process::id() as i32;
        let (ranges, mut crc) = ([(at + 7, 4000), (at + 5000, 2000)], 0);
        let n = pages.copy_from_process(pid, &ranges, Some(&mut crc)).unwrap();
        assert_eq!((n, pages.left()), (6000, 0));
        assert_eq!(crc, crc32c::crc32c(&[&from[7..4007], &from[5000..7000]].concat()));
        let mut got = vec![0; 3000];
        dst.read_at(9000, &mut got).unwrap();
        assert_eq!((&got[..1000], &got[1000..]), (&from[3007..4007], &from[5000..7000]));
        pages.push(&dst, dst.address(), 8).unwrap();
        let e = pages.copy_from_process(pid, &[(8, 8)], None).unwrap_err();
        assert_eq!(e.raw_os_error(), Some(libc::EFAULT));
        assert!(pages.copy_from_process(pid, &[(at, 9)], None).is_err());
    }

    #[test]
    fn what_could_be_shortened_is_not_mapped() {
        // SAFETY: plain call; the result is checked by `from_raw_fd`'s user.
        let fd = unsafe {
            use std::os::fd::FromRawFd;
            let fd = libc::memfd_create(c"open".as_ptr(), libc::MFD_ALLOW_SEALING);
            assert!(fd >= 0 && libc::ftruncate(fd, 8192) == 0);
            std::os::fd::OwnedFd::from_raw_fd(fd)
        };
        let text = Import::map(fd, 8192).unwrap_err().to_string();
        assert!(text.contains("F_SEAL_SHRINK"), "{text}");
        let m = Memory::memfd(8192, false).unwrap();
        let fd = || m.fd().unwrap().try_clone_to_owned().unwrap();
        let text = Import::map(fd(), 8193).unwrap_err().to_string();
        assert!(text.contains("8193") && text.contains("8192"), "{text}");
        assert!(Import::map(fd(), 0).is_err());
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(Import::map(file.into(), 10).is_err());
        let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(Import::map(a.into(), 10).is_err());
        assert!(Import::map(fd(), 8192).unwrap().at(0, 8192).is_some());
        assert!(m.fd().unwrap().as_fd().try_clone_to_owned().is_ok());
        // SAFETY: never touched.
        let _ = unsafe { HostRange::borrow(4096, 1) };
    }

    #[test]
    fn whoever_is_given_a_pool_cannot_write_it() {
        let m = Memory::memfd(8192, true).unwrap();
        use std::os::fd::AsRawFd;
        let fd = m.fd().unwrap().as_raw_fd();
        // SAFETY: a fresh mapping, which is refused.
        let at = unsafe {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), 8192, protection, libc::MAP_SHARED, fd, 0)
        };
        assert_eq!(at, libc::MAP_FAILED);
        // SAFETY: plain call; it is refused.
        let n = unsafe { libc::pwrite(fd, b"x".as_ptr().cast(), 1, 0) };
        assert_eq!(n, -1);
        m.write_at(0, b"x").unwrap();
    }
}
