//! CRC32C of memory that others may write.
//!
//! In: addresses that the caller keeps alive. Out: the checksum of what was read. Invariant: bytes
//! are read by address, each once, never through a reference.
#![allow(unsafe_code)] // Loads by address; on x86-64 by the instruction that adds them up.

use super::mem::load;

/// CRC32C of what lies at an address, going on from `crc` (0 to begin). What lies at `next` is
/// fetched meanwhile: memory that is not in the cache would take three times as long as the sum.
///
/// # Safety
/// `bytes` bytes at `address` lie in a live [`super::mem::Memory`].
pub(super) unsafe fn append(crc: u32, address: u64, bytes: u64, next: u64) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("sse4.2") {
        // SAFETY: the caller's promise, and the processor has the instruction.
        return unsafe { sse::append(crc, address, bytes, next) };
    }
    let _ = next;
    // SAFETY: the caller's promise.
    unsafe { portable(crc, address, bytes) }
}

/// By way of a copy, which costs about as much as the sum itself.
///
/// # Safety
/// As [`append`].
unsafe fn portable(mut crc: u32, address: u64, bytes: u64) -> u32 {
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

#[cfg(target_arch = "x86_64")]
mod sse {
    use std::arch::asm;

    /// The instruction takes three cycles but one can begin in each, so three streams run side by
    /// side, of so many bytes each; three of them are nearly a page of 4 KiB.
    const STREAM: u64 = 1360;

    /// The polynomial, lowest bit first.
    const POLYNOMIAL: u32 = 0x82f6_3b78;

    /// What [`STREAM`] zero bytes make of a state, by the state's bytes. They are linear, so the
    /// states of the bits tell all others.
    static BEHIND: [[u32; 256]; 4] = {
        let mut of_byte = [0u32; 256];
        let mut byte = 0;
        while byte < 256 {
            let (mut state, mut bit) = (byte as u32, 0);
            while bit < 8 {
                state = (state >> 1) ^ (POLYNOMIAL * (state & 1));
                bit += 1;
            }
            of_byte[byte] = state;
            byte += 1;
        }
        let mut table = [[0u32; 256]; 4];
        let mut bit = 0;
        while bit < 32 {
            let (mut state, mut n) = (1u32 << bit, 0);
            while n < STREAM {
                state = (state >> 8) ^ of_byte[(state & 0xff) as usize];
                n += 1;
            }
            let mut byte = 0;
            while byte < 256 {
                if byte >> (bit % 8) & 1 == 1 {
                    table[bit / 8][byte] ^= state;
                }
                byte += 1;
            }
            bit += 1;
        }
        table
    };

    fn behind(state: u64) -> u64 {
        let [a, b, c, d] = (state as u32).to_le_bytes().map(usize::from);
        u64::from(BEHIND[0][a] ^ BEHIND[1][b] ^ BEHIND[2][c] ^ BEHIND[3][d])
    }

    /// # Safety
    /// As [`super::append`]; the processor has SSE 4.2.
    pub(super) unsafe fn append(crc: u32, address: u64, bytes: u64, next: u64) -> u32 {
        let (mut state, mut at, mut left) = (u64::from(!crc), address, bytes);
        while left >= 3 * STREAM {
            let (mut second, mut third) = (0u64, 0u64);
            let ahead = if left >= 6 * STREAM { at + 3 * STREAM } else { next };
            // SAFETY: it reads the 3 * STREAM bytes at `at`, which the caller promised, and nothing
            // else of memory: a prefetch is a hint at any address.
            unsafe {
                asm!(
                    "2:",
                    "crc32 {first}, qword ptr [{at}]",
                    "crc32 {second}, qword ptr [{at} + {stream}]",
                    "crc32 {third}, qword ptr [{at} + 2 * {stream}]",
                    "prefetcht1 [{ahead}]",
                    "prefetcht1 [{ahead} + {stream}]",
                    "prefetcht1 [{ahead} + 2 * {stream}]",
                    "add {ahead}, 8",
                    "add {at}, 8",
                    "cmp {at}, {end}",
                    "jb 2b",
                    first = inout(reg) state,
                    second = inout(reg) second,
                    third = inout(reg) third,
                    at = inout(reg) at,
                    ahead = inout(reg) ahead => _,
                    end = in(reg) at + STREAM,
                    stream = const STREAM,
                    options(nostack, readonly),
                );
            }
            state = behind(behind(state) ^ second) ^ third;
            at += 2 * STREAM;
            left -= 3 * STREAM;
        }
        while left >= 8 {
            // SAFETY: as above, for 8 bytes.
            unsafe {
                asm!(
                    "crc32 {state}, qword ptr [{at}]",
                    state = inout(reg) state,
                    at = in(reg) at,
                    options(nostack, readonly, preserves_flags),
                );
            }
            (at, left) = (at + 8, left - 8);
        }
        while left > 0 {
            // SAFETY: as above, for one byte.
            unsafe {
                asm!(
                    "crc32 {state:e}, byte ptr [{at}]",
                    state = inout(reg) state,
                    at = in(reg) at,
                    options(nostack, readonly, preserves_flags),
                );
            }
            (at, left) = (at + 1, left - 1);
        }
        !(state as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::mem::Memory;

    /// Bit by bit, as the polynomial says.
    fn slow(crc: u32, bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!crc, |state, byte| {
            (0..8).fold(state ^ u32::from(*byte), |s, _| (s >> 1) ^ (0x82f6_3b78 * (s & 1)))
        })
    }

    #[test]
    fn published_vectors() {
        let m = Memory::memfd(4096, false).unwrap();
        let down: Vec<u8> = (0..32).rev().collect();
        for (bytes, crc) in [
            (&b"123456789"[..], 0xe306_9283),
            (&[0; 32], 0x8a91_36aa),
            (&[0xff; 32], 0x62a8_ab43),
            (&down, 0x113f_db5c),
            (&[], 0),
        ] {
            m.write_at(3, bytes).unwrap();
            let (at, n) = (m.address() + 3, bytes.len() as u64);
            // SAFETY: both are inside `m`.
            let found = unsafe { [append(0, at, n, at), portable(0, at, n)] };
            assert_eq!(found, [crc; 2], "{bytes:02x?}");
            assert_eq!(slow(0, bytes), crc);
        }
    }

    #[test]
    fn every_length_and_alignment_gives_what_the_polynomial_says() {
        let m = Memory::memfd(1 << 16, false).unwrap();
        let bytes: Vec<u8> =
            (0..20_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        m.write_at(0, &bytes).unwrap();
        // Around what is summed in three streams, once, twice and four times.
        let around = [0u64, 8, 4080, 4096, 8160, 16_320].map(|n| n.saturating_sub(9)..n + 10);
        for n in around.into_iter().flatten() {
            for offset in [0u64, 1, 5, 7] {
                let expected = slow(7, &bytes[offset as usize..][..n as usize]);
                let at = m.address() + offset;
                // SAFETY: all are inside `m`.
                let found = unsafe { [append(7, at, n, 0), portable(7, at, n)] };
                assert_eq!(found, [expected; 2], "{n} at {offset}");
            }
        }
    }
}
