//! Requests: many writes in one call, and receives for their immediates.

use std::ffi::{c_int, c_uint};
use std::fmt;
use std::ptr::NonNull;

use kvlane_proto::Error;

use super::abi::{self, Zero, ibv_recv_wr, ibv_send_wr, ibv_sge};
use super::{QueuePair, check};
use crate::mlx5::{Remote, Segment};

/// Longest data that [`SendBatch::push_inline`] takes.
pub const INLINE_BYTES_MAX: usize = 64;
/// Receives that are posted by one call; more take several.
const RECEIVES_AT_ONCE: usize = 32;

/// Why a request was not added to a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PushRefused {
    /// Post it first.
    Full,
    /// More than [`INLINE_BYTES_MAX`].
    TooLong,
}

/// A post that failed.
#[derive(Debug)]
pub struct PostFailed {
    /// So many of the first were taken all the same, and will be completed.
    pub taken: usize,
    /// Why the next was not.
    pub errno: c_int,
    /// In words.
    pub error: Error,
}

/// Writes that are posted together, in order. Made once, and linked once; nothing is allocated
/// afterwards.
pub struct SendBatch {
    /// Each has its segment and the one behind it.
    requests: NonNull<ibv_send_wr>,
    segments: NonNull<ibv_sge>,
    inline: Box<[[u8; INLINE_BYTES_MAX]]>,
    capacity: usize,
    len: usize,
}

// SAFETY: what its pointers point to is its own.
unsafe impl Send for SendBatch {}

impl fmt::Debug for SendBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SendBatch({} of {})", self.len, self.capacity)
    }
}

/// `count` zeros that stay where they are until [`free`].
fn zeros<T: Zero + Clone>(count: usize) -> NonNull<T> {
    NonNull::from(Box::leak(vec![T::zero(); count].into_boxed_slice())).cast()
}

/// # Safety
/// They are of [`zeros`], as many, and not used any more.
unsafe fn free<T>(zeros: NonNull<T>, count: usize) {
    // SAFETY: the caller's promise.
    drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(zeros.as_ptr(), count)) });
}

impl Drop for SendBatch {
    fn drop(&mut self) {
        // SAFETY: made by `new`, as many; nobody else has them.
        unsafe {
            free(self.requests, self.capacity);
            free(self.segments, self.capacity);
        }
    }
}

impl SendBatch {
    /// Room for so many writes; at least one.
    pub fn new(capacity: u16) -> Self {
        let capacity = usize::from(capacity.max(1));
        let (requests, segments) = (zeros::<ibv_send_wr>(capacity), zeros::<ibv_sge>(capacity));
        for i in 0..capacity {
            // SAFETY: both have `capacity` places, of which the last has none behind it.
            unsafe {
                let request = requests.add(i).as_ptr();
                (*request).sg_list = segments.add(i).as_ptr();
                if i + 1 < capacity {
                    (*request).next = requests.add(i + 1).as_ptr();
                }
            }
        }
        let inline = vec![[0; INLINE_BYTES_MAX]; capacity].into();
        Self { requests, segments, inline, capacity, len: 0 }
    }
    /// Writes in it.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// Whether there is no room left.
    pub fn is_full(&self) -> bool {
        self.len == self.capacity
    }
    /// Forgets what is in it.
    pub fn clear(&mut self) {
        self.len = 0;
    }
    /// Adds a write, with an immediate if there is one. A signalled one is completed by name, and all
    /// before it by that.
    ///
    /// # Errors
    /// [`PushRefused::Full`].
    pub fn push_write(
        &mut self,
        wr_id: u64,
        from: Segment,
        to: Remote,
        immediate: Option<u32>,
        signalled: bool,
    ) -> Result<(), PushRefused> {
        self.push(wr_id, from, to, immediate, if signalled { abi::IBV_SEND_SIGNALED } else { 0 })
    }
    /// The same for a few bytes that are not registered: they are copied.
    ///
    /// # Errors
    /// [`PushRefused`].
    pub fn push_inline(
        &mut self,
        wr_id: u64,
        bytes: &[u8],
        to: Remote,
        immediate: Option<u32>,
        signalled: bool,
    ) -> Result<(), PushRefused> {
        if bytes.len() > INLINE_BYTES_MAX {
            return Err(PushRefused::TooLong);
        }
        let Some(copy) = self.inline.get_mut(self.len) else { return Err(PushRefused::Full) };
        copy[..bytes.len()].copy_from_slice(bytes);
        let from = Segment { address: copy.as_ptr() as u64, key: 0, bytes: bytes.len() as u32 };
        let signalled = if signalled { abi::IBV_SEND_SIGNALED } else { 0 };
        self.push(wr_id, from, to, immediate, signalled | abi::IBV_SEND_INLINE)
    }
    fn push(
        &mut self,
        wr_id: u64,
        from: Segment,
        to: Remote,
        immediate: Option<u32>,
        send_flags: c_uint,
    ) -> Result<(), PushRefused> {
        if self.is_full() {
            return Err(PushRefused::Full);
        }
        // SAFETY: there are more places than `len`, and they are this batch's.
        let (request, segment) =
            unsafe { (self.requests.add(self.len).as_mut(), self.segments.add(self.len).as_mut()) };
        *segment = ibv_sge { addr: from.address, length: from.bytes, lkey: from.key };
        request.wr_id = wr_id;
        // A segment of no bytes means 2^31 to some devices.
        request.num_sge = i32::from(from.bytes > 0);
        request.opcode = match immediate {
            Some(_) => abi::IBV_WR_RDMA_WRITE_WITH_IMM,
            None => abi::IBV_WR_RDMA_WRITE,
        };
        request.send_flags = send_flags;
        request.imm_data = immediate.unwrap_or(0).to_be();
        request.rdma.remote_addr = to.address;
        request.rdma.rkey = to.key;
        self.len += 1;
        Ok(())
    }
    /// Posts all, by one call, and empties the batch.
    ///
    /// # Errors
    /// [`PostFailed`]; the batch is empty all the same.
    pub fn post(&mut self, pair: &QueuePair) -> Result<(), PostFailed> {
        let len = std::mem::take(&mut self.len);
        if len == 0 {
            return Ok(());
        }
        let first = self.requests.as_ptr();
        let mut bad = std::ptr::null_mut();
        // SAFETY: the first `len` requests are linked, each with its segment; they live beyond the
        // call, and are used by nobody else meanwhile. The chain ends with the last, for this call.
        // The driver copies what it needs, inline bytes as well, before it returns. Addresses in
        // segments are checked by the NIC against the regions that their keys name. The pair lives.
        let rc = unsafe {
            let last = first.add(len - 1);
            let behind = std::mem::replace(&mut (*last).next, std::ptr::null_mut());
            let rc = (pair.post_send)(pair.raw(), first, &mut bad);
            (*last).next = behind;
            rc
        };
        check(rc).map_err(|errno| PostFailed {
            taken: taken(first as usize, bad as usize, size_of::<ibv_send_wr>(), len),
            errno,
            error: pair.failed("ibv_post_send", errno),
        })
    }
}

/// How many of `len` requests lie before the bad one; none if that is not one of them.
fn taken(first: usize, bad: usize, size: usize, len: usize) -> usize {
    bad.checked_sub(first).map(|bytes| bytes / size).filter(|&index| index < len).unwrap_or(0)
}

impl QueuePair {
    /// Posts receives that take an immediate and no bytes; their `wr_id`s count up from the first.
    ///
    /// # Errors
    /// [`PostFailed`].
    pub fn post_receives(&self, count: usize, first_wr_id: u64) -> Result<(), PostFailed> {
        let mut posted = 0;
        while posted < count {
            let len = (count - posted).min(RECEIVES_AT_ONCE);
            let mut requests = [ibv_recv_wr::zero(); RECEIVES_AT_ONCE];
            let first = requests.as_mut_ptr();
            let mut bad = std::ptr::null_mut();
            // SAFETY: `len` requests lie in the array, which lives beyond the call; the chain ends
            // with the last. The driver copies what it needs. The pair lives.
            let rc = unsafe {
                for i in 0..len {
                    let request = first.add(i);
                    (*request).wr_id = first_wr_id.wrapping_add((posted + i) as u64);
                    (*request).next =
                        if i + 1 < len { first.add(i + 1) } else { std::ptr::null_mut() };
                }
                (self.post_receive)(self.raw(), first, &mut bad)
            };
            check(rc).map_err(|errno| PostFailed {
                taken: posted + taken(first as usize, bad as usize, size_of::<ibv_recv_wr>(), len),
                errno,
                error: self.failed("ibv_post_recv", errno),
            })?;
            posted += len;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TO: Remote = Remote { address: 0x1000, key: 7 };

    impl SendBatch {
        fn request(&self, index: usize) -> (ibv_send_wr, ibv_sge) {
            assert!(index < self.capacity);
            // SAFETY: there are as many.
            unsafe { (*self.requests.add(index).as_ptr(), *self.segments.add(index).as_ptr()) }
        }
    }

    #[test]
    fn a_batch_takes_what_it_has_room_for() {
        let mut batch = SendBatch::new(2);
        let from = Segment { address: 0x2000, key: 5, bytes: 4096 };
        batch.push_write(1, from, TO, None, false).unwrap();
        assert_eq!(batch.push_inline(2, &[0; 65], TO, None, true), Err(PushRefused::TooLong));
        batch.push_inline(2, &[9; 64], TO, Some(0x0102_0304), true).unwrap();
        assert!(batch.is_full());
        assert_eq!(batch.push_write(3, from, TO, None, false), Err(PushRefused::Full));
        assert_eq!(batch.push_inline(3, &[], TO, None, false), Err(PushRefused::Full));
        let ((a, _), (b, copied)) = (batch.request(0), batch.request(1));
        assert_eq!((a.wr_id, a.opcode, a.send_flags), (1, abi::IBV_WR_RDMA_WRITE, 0));
        assert_eq!((a.rdma.remote_addr, a.rdma.rkey), (0x1000, 7));
        let flags = abi::IBV_SEND_SIGNALED | abi::IBV_SEND_INLINE;
        assert_eq!((b.opcode, b.send_flags), (abi::IBV_WR_RDMA_WRITE_WITH_IMM, flags));
        assert_eq!(b.imm_data.to_ne_bytes(), [1, 2, 3, 4]);
        assert_eq!(copied.addr, batch.inline[1].as_ptr() as u64);
        batch.clear();
        batch.push_inline(4, &[], TO, Some(1), false).unwrap();
        assert_eq!(batch.request(0).0.num_sge, 0);
    }

    #[test]
    fn requests_before_the_bad_one_were_taken() {
        assert_eq!(taken(1000, 1000, 128, 4), 0);
        assert_eq!(taken(1000, 1000 + 3 * 128, 128, 4), 3);
        // Not one of ours: nothing is known to be taken.
        assert_eq!(taken(1000, 1000 + 4 * 128, 128, 4), 0);
        assert_eq!(taken(1000, 0, 128, 4), 0);
    }
}
