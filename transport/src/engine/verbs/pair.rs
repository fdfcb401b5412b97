//! A queue pair of libibverbs, as the engine uses one.
//!
//! Owns: the pair, its completion queue, the batch that is not posted yet. In: writes. Out: one call of
//! the driver for a batch of them, and completions. Invariants: there are never more entries, or
//! receives, than the queues have room for, so that no completion is lost; what the driver refuses to
//! take shows as a completion that is an error, and breaks the pair; nothing is allocated once it is
//! made.

use std::sync::Arc;

use kvlane_proto::Error;

use crate::engine::one_sided::nic::{
    Cause, Completion, End, Fault, Pair, Remote, Segment, Sends, What,
};
use crate::sys::verbs::{CompletionQueue, Completions, Done, Failed, QueuePair, SendBatch, Status};

/// Entries that are posted by one call.
const BATCH: u16 = 64;
/// Completions that are taken by one call.
const COMPLETIONS: u16 = 32;
/// Tells a receive's number from an entry's.
const RECEIVE: u64 = 1 << 63;

/// The pair itself, the batch, and how far it is.
#[derive(Debug)]
pub struct Ring {
    pair: QueuePair,
    batch: SendBatch,
    entries: u32,
    write_bytes_max: u32,
    next: u64,
    done: u64,
    /// What the driver did not take, and whether that was told.
    refused: Option<Fault>,
    told: bool,
}

impl Ring {
    /// Gives the pair up; `errno` is the driver's, or 0.
    fn refuse(&mut self, name: &'static str, errno: i32, why: &Error) {
        if self.refused.is_none() {
            tracing::warn!(%why, name, "a queue pair is given up");
            let code = errno.unsigned_abs();
            self.refused = Some(Fault { cause: Cause::Other, name, code, vendor: 0 });
        }
    }
    #[inline]
    fn push(&mut self, push: impl FnOnce(&mut SendBatch, u64)) -> bool {
        if self.free() == 0 {
            return false;
        }
        if self.batch.is_full() {
            self.ring();
        }
        push(&mut self.batch, self.next);
        self.next += 1;
        true
    }
}

impl Sends for Ring {
    #[inline]
    fn next(&self) -> u64 {
        self.next
    }
    #[inline]
    fn free(&self) -> u32 {
        self.entries - (self.next - self.done) as u32
    }
    fn write_bytes_max(&self) -> u32 {
        self.write_bytes_max
    }
    #[inline]
    fn write(&mut self, to: Remote, from: Segment, signalled: bool) -> bool {
        self.push(|batch, index| {
            // There is room.
            let _ = batch.push_write(index, from, to, None, signalled);
        })
    }
    #[inline]
    fn write_immediate(&mut self, to: Remote, from: Segment, immediate: u32) -> bool {
        self.push(|batch, index| {
            let _ = batch.push_write(index, from, to, Some(immediate), true);
        })
    }
    fn write_word(&mut self, to: Remote, word: u64) -> bool {
        self.push(|batch, index| {
            let _ = batch.push_inline(index, &word.to_ne_bytes(), to, None, true);
        })
    }
    /// A write of no bytes: no address is looked at.
    fn nop(&mut self) -> bool {
        let nowhere = Remote { address: 0, key: 0 };
        self.push(|batch, index| {
            let _ = batch.push_inline(index, &[], nowhere, None, true);
        })
    }
    fn ring(&mut self) {
        if self.refused.is_some() {
            // In its order or not at all.
            return self.batch.clear();
        }
        if let Err(failed) = self.batch.post(&self.pair) {
            self.refuse(refusal(failed.errno), failed.errno, &failed.error);
        }
    }
    fn completed(&mut self, index: u16) -> Option<u64> {
        let ahead = u64::from(index.wrapping_sub(self.done as u16));
        if ahead >= self.next - self.done {
            return None;
        }
        let index = self.done + ahead;
        self.done = index + 1;
        Some(index)
    }
}

/// A queue pair with its completion queue.
#[derive(Debug)]
pub struct Connected {
    ring: Ring,
    queue: Arc<CompletionQueue>,
    end: End,
    receives: u64,
    found: Completions,
    /// Of these, so many were looked at.
    taken: usize,
}

impl Connected {
    pub(super) fn new(
        pair: QueuePair,
        queue: Arc<CompletionQueue>,
        end: End,
        entries: u32,
        write_bytes_max: u32,
    ) -> Self {
        let batch = SendBatch::new(BATCH);
        let (next, done, refused, told) = (0, 0, None, false);
        let ring = Ring { pair, batch, entries, write_bytes_max, next, done, refused, told };
        Self { ring, queue, end, receives: 0, found: Completions::new(COMPLETIONS), taken: 0 }
    }
    pub(super) fn raw(&self) -> &QueuePair {
        &self.ring.pair
    }
    pub(super) fn mtu(&self) -> u32 {
        self.end.mtu.into()
    }
    pub(super) fn sequence(&self) -> u32 {
        self.end.sequence
    }
    /// Whether there is a completion that was not looked at.
    fn look(&mut self) -> bool {
        if self.taken < self.found.len() {
            return true;
        }
        self.taken = 0;
        let found = self.queue.poll(&mut self.found).unwrap_or_else(|e| {
            self.ring.refuse("completion queue is broken", 0, &e);
            0
        });
        // What came before is told first.
        found > 0 || self.ring.refused.is_some() && !self.ring.told
    }
}

impl Pair for Connected {
    type Sends = Ring;

    fn end(&self) -> End {
        self.end
    }
    fn sends(&self) -> &Ring {
        &self.ring
    }
    fn sends_mut(&mut self) -> &mut Ring {
        &mut self.ring
    }
    fn post_receives(&mut self, count: u32) -> u64 {
        let posted = self.ring.pair.post_receives(count as usize, RECEIVE | self.receives);
        if let Err(failed) = posted {
            self.ring.refuse("receives refused by the driver", failed.errno, &failed.error);
        }
        self.receives += u64::from(count);
        self.receives
    }
    fn poll(&mut self) -> Option<Completion> {
        if !self.look() {
            return None;
        }
        let Some(found) = self.found.get(self.taken) else {
            self.ring.told = true;
            let what = What::SendFailed(self.ring.refused?);
            return Some(Completion { index: 0, what });
        };
        self.taken += 1;
        let is_receive = found.wr_id & RECEIVE != 0;
        let what = match found.result {
            Ok(Done::Sent) => What::Sent,
            Ok(Done::Received { immediate: Some(immediate), .. }) => What::Arrived(immediate),
            Ok(Done::Received { immediate: None, .. }) => What::Unknown(0),
            Err(failed) if is_receive => What::ReceiveFailed(fault(failed)),
            Err(failed) => What::SendFailed(fault(failed)),
        };
        Some(Completion { index: found.wr_id as u16, what })
    }
    fn consumed(&mut self) {}
    fn arm(&mut self) {
        if let Err(e) = self.queue.arm() {
            // Then it is looked at when the engine wakes by itself.
            tracing::warn!(why = %e, "a completion queue gives no events");
        }
    }
    fn is_ready(&mut self) -> bool {
        self.look()
    }
}

/// A post that the driver did not take; the number is no status of a completion.
fn refusal(errno: i32) -> &'static str {
    match errno {
        libc::ENOMEM => "post refused by the driver (ENOMEM)",
        libc::EINVAL => "post refused by the driver (EINVAL)",
        libc::EIO => "post refused by the driver (EIO)",
        _ => "post refused by the driver (errno)",
    }
}

fn fault(failed: Failed) -> Fault {
    let Failed { status, vendor } = failed;
    let cause = match status {
        Status::TRANSPORT_RETRIES => Cause::TransportRetries,
        Status::RNR_RETRIES => Cause::RnrRetries,
        Status::REMOTE_ACCESS => Cause::RemoteAccess,
        // soft-RoCE says the second where a region is gone.
        Status::LOCAL_PROTECTION | Status::LOCAL_QP_OPERATION => Cause::LocalAccess,
        Status::FLUSHED => Cause::Flushed,
        _ => Cause::Other,
    };
    Fault { cause, name: status.name(), code: status.0, vendor }
}
