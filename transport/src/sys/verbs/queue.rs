//! Completions, and what wakes those who wait for them.

use std::ffi::c_int;
use std::fmt;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::Arc;

use kvlane_proto::{Error, ErrorKind, Result};

use super::abi::{self, Zero, ibv_comp_channel, ibv_cq, ibv_wc};
use super::{Context, check, errno, set_nonblocking};

/// A descriptor that becomes readable when an armed completion queue has something.
#[derive(Debug)]
pub struct CompletionChannel {
    context: Arc<Context>,
    raw: NonNull<ibv_comp_channel>,
}

// SAFETY: every call of libibverbs may come from any thread.
unsafe impl Send for CompletionChannel {}
// SAFETY: as above.
unsafe impl Sync for CompletionChannel {}

impl CompletionChannel {
    /// A new one.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>> {
        // SAFETY: the context lives.
        let raw = unsafe { (context.symbols().create_comp_channel)(context.raw()) };
        let raw = context.made("ibv_create_comp_channel", raw)?;
        let channel = Self { context: context.clone(), raw };
        set_nonblocking(channel.fd()).map_err(|e| context.failed("fcntl", e))?;
        Ok(Arc::new(channel))
    }
    /// The descriptor to poll.
    pub fn fd(&self) -> RawFd {
        // SAFETY: the channel lives; the field never changes.
        unsafe { (*self.raw.as_ptr()).fd }
    }
    /// Takes one event, if there is one: some queue of this channel has completions, and must be
    /// armed again to make another. It is acknowledged at once, so that no end of a queue waits.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn take_event(&self) -> Result<bool> {
        let symbols = self.context.symbols();
        let (mut queue, mut own) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the channel lives; both places are borrowed for the call, which does not block:
        // the descriptor was set so.
        if unsafe { (symbols.get_cq_event)(self.raw.as_ptr(), &mut queue, &mut own) } != 0 {
            return match errno() {
                libc::EAGAIN | libc::EINTR => Ok(false),
                e => Err(self.context.failed("ibv_get_cq_event", e)),
            };
        }
        // SAFETY: the queue that the event names is freed only after the acknowledgement.
        unsafe { (symbols.ack_cq_events)(queue, 1) };
        Ok(true)
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        // SAFETY: queues keep it alive, so none is left; freed once.
        let rc = unsafe { (self.context.symbols().destroy_comp_channel)(self.raw.as_ptr()) };
        self.context.ended("ibv_destroy_comp_channel", rc);
    }
}

/// Why a request failed; `IBV_WC_…` in the header.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Status(pub u32);

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $number:ident, $text:literal;)*) => {
        impl Status {
            $($(#[$doc])* pub const $name: Self = Self(abi::$number);)*

            /// Its name in the field, such as `remote access error`; `unknown` for others.
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* _ => "unknown" }
            }
        }
    };
}

statuses! {
    /// The local segments do not make up the message.
    LOCAL_LENGTH = IBV_WC_LOC_LEN_ERR, "local length error";
    /// The request makes no sense to the NIC; soft-RoCE says this of local keys as well.
    LOCAL_QP_OPERATION = IBV_WC_LOC_QP_OP_ERR, "local QP operation error";
    /// This side's key does not cover what the request names.
    LOCAL_PROTECTION = IBV_WC_LOC_PROT_ERR, "local protection error";
    /// A flush: the queue pair was in error already. Never the first reason.
    FLUSHED = IBV_WC_WR_FLUSH_ERR, "flushed";
    /// A memory window could not be bound.
    MEMORY_WINDOW_BIND = IBV_WC_MW_BIND_ERR, "memory window bind error";
    /// The other side answered something else.
    BAD_RESPONSE = IBV_WC_BAD_RESP_ERR, "bad response";
    /// A write with an immediate met memory that this side may not be written to.
    LOCAL_ACCESS = IBV_WC_LOC_ACCESS_ERR, "local access error";
    /// The other side does not take such a request.
    REMOTE_INVALID_REQUEST = IBV_WC_REM_INV_REQ_ERR, "remote invalid request";
    /// The other side's key does not cover what the request names.
    REMOTE_ACCESS = IBV_WC_REM_ACCESS_ERR, "remote access error";
    /// The other side could not carry it out.
    REMOTE_OPERATION = IBV_WC_REM_OP_ERR, "remote operation error";
    /// The other side did not answer.
    TRANSPORT_RETRIES = IBV_WC_RETRY_EXC_ERR, "transport retry counter exceeded";
    /// The other side had no receive posted.
    RNR_RETRIES = IBV_WC_RNR_RETRY_EXC_ERR, "RNR retry counter exceeded";
    /// The other side gave up.
    REMOTE_ABORTED = IBV_WC_REM_ABORT_ERR, "remote aborted";
    /// The device broke.
    FATAL = IBV_WC_FATAL_ERR, "fatal error";
    /// An answer took too long.
    RESPONSE_TIMEOUT = IBV_WC_RESP_TIMEOUT_ERR, "response timeout";
    /// No better reason.
    GENERAL = IBV_WC_GENERAL_ERR, "general error";
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name(), self.0)
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What was completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// As it was posted.
    pub wr_id: u64,
    /// Whose.
    pub queue_pair: u32,
    /// How it went. Of a failure it is not known whether a send or a receive failed: say so in
    /// `wr_id`.
    pub result: std::result::Result<Done, Failed>,
}

/// A request that succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// This one, and every one before it on the queue pair.
    Sent,
    /// Something of the other side's is in place, and everything of his before it.
    Received {
        /// In the order of the host, if there was one.
        immediate: Option<u32>,
        /// Bytes of that write.
        bytes: u32,
    },
}

/// A request that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failed {
    /// Why.
    pub status: Status,
    /// The vendor's own code, next to it.
    pub vendor: u32,
}

impl Completion {
    fn of(wc: &ibv_wc) -> Self {
        let result = match wc.status {
            // Only now is the rest of it set.
            abi::IBV_WC_SUCCESS if wc.opcode & abi::IBV_WC_RECV == 0 => Ok(Done::Sent),
            abi::IBV_WC_SUCCESS => Ok(Done::Received {
                immediate: (wc.wc_flags & abi::IBV_WC_WITH_IMM != 0)
                    .then(|| u32::from_be(wc.imm_data)),
                bytes: wc.byte_len,
            }),
            status => Err(Failed { status: Status(status), vendor: wc.vendor_err }),
        };
        Self { wr_id: wc.wr_id, queue_pair: wc.qp_num, result }
    }
}

/// Room for completions, made once.
pub struct Completions {
    room: Box<[ibv_wc]>,
    len: usize,
}

// SAFETY: numbers only.
unsafe impl Send for Completions {}

impl fmt::Debug for Completions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl Completions {
    /// Room for so many; at least one.
    pub fn new(capacity: u16) -> Self {
        Self { room: vec![ibv_wc::zero(); usize::from(capacity.max(1))].into(), len: 0 }
    }
    /// What the last poll found.
    pub fn iter(&self) -> impl Iterator<Item = Completion> + '_ {
        self.room[..self.len].iter().map(Completion::of)
    }
    /// One of them.
    pub fn get(&self, index: usize) -> Option<Completion> {
        self.room[..self.len].get(index).map(Completion::of)
    }
    /// How many the last poll found.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Whether the last poll found none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

type Poll = unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;
type Arm = unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int;

/// Where requests of queue pairs are completed. What is posted and not polled must fit.
#[derive(Debug)]
pub struct CompletionQueue {
    context: Arc<Context>,
    _channel: Option<Arc<CompletionChannel>>,
    raw: NonNull<ibv_cq>,
    poll: Poll,
    arm: Arm,
}

// SAFETY: every call of libibverbs may come from any thread.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    /// A new one of at least `depth` entries.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn new(
        context: &Arc<Context>,
        depth: u32,
        channel: Option<&Arc<CompletionChannel>>,
    ) -> Result<Arc<Self>> {
        const CALL: &str = "ibv_create_cq";
        let symbols = context.symbols();
        if let Some(channel) = channel
            && !Arc::ptr_eq(&channel.context, context)
        {
            return Err(Error::new(ErrorKind::Internal, "a channel of another device"));
        }
        let (entries, vector) = (c_int::try_from(depth).unwrap_or(c_int::MAX), 0);
        let raw_channel = channel.map_or(std::ptr::null_mut(), |channel| channel.raw.as_ptr());
        let none = std::ptr::null_mut();
        // SAFETY: the context and the channel live, and belong together.
        let raw = unsafe { (symbols.create_cq)(context.raw(), entries, none, raw_channel, vector) };
        let raw = context.made(CALL, raw).map_err(|e| e.with("depth", depth))?;
        // SAFETY: the context lives; its table is complete since it was opened.
        let ops = unsafe { (*context.raw()).ops };
        let (Some(poll), Some(arm)) = (ops.poll_cq, ops.req_notify_cq) else {
            // SAFETY: just made, and used by nobody.
            unsafe { (symbols.destroy_cq)(raw.as_ptr()) };
            return Err(context.failed(CALL, libc::EOPNOTSUPP));
        };
        let (context, channel) = (context.clone(), channel.cloned());
        Ok(Arc::new(Self { context, _channel: channel, raw, poll, arm }))
    }
    /// Takes what is completed, as much as there is room for. Allocates nothing.
    ///
    /// # Errors
    /// The queue is broken.
    pub fn poll(&self, into: &mut Completions) -> Result<usize> {
        into.len = 0;
        let room = c_int::try_from(into.room.len()).unwrap_or(c_int::MAX);
        // SAFETY: the queue lives; there is room for as many as is said.
        let found = unsafe { (self.poll)(self.raw(), room, into.room.as_mut_ptr()) };
        let Ok(found) = usize::try_from(found) else {
            return Err(self.context.failed("ibv_poll_cq", found.saturating_abs()));
        };
        into.len = found.min(into.room.len());
        Ok(into.len)
    }
    /// Asks for one event on the channel at the next completion. Poll once more afterwards: what came
    /// before makes none.
    ///
    /// # Errors
    /// What the driver said.
    pub fn arm(&self) -> Result<()> {
        // SAFETY: the queue lives.
        check(unsafe { (self.arm)(self.raw(), 0) })
            .map_err(|e| self.context.failed("ibv_req_notify_cq", e))
    }
    pub(super) fn raw(&self) -> *mut ibv_cq {
        self.raw.as_ptr()
    }
    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: queue pairs keep it alive, so none is left; freed once.
        let rc = unsafe { (self.context.symbols().destroy_cq)(self.raw()) };
        self.context.ended("ibv_destroy_cq", rc);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_are_read_only_as_far_as_they_are_set() {
        let mut wc =
            ibv_wc { wr_id: 7, qp_num: 9, opcode: abi::IBV_WC_RDMA_WRITE, ..ibv_wc::zero() };
        assert_eq!(Completion::of(&wc).result, Ok(Done::Sent));
        wc.opcode = abi::IBV_WC_RECV_RDMA_WITH_IMM;
        (wc.wc_flags, wc.imm_data, wc.byte_len) =
            (abi::IBV_WC_WITH_IMM, 0x1122_3344_u32.to_be(), 4096);
        let result = Ok(Done::Received { immediate: Some(0x1122_3344), bytes: 4096 });
        assert_eq!(Completion::of(&wc), Completion { wr_id: 7, queue_pair: 9, result });
        wc.wc_flags = 0;
        let result = Ok(Done::Received { immediate: None, bytes: 4096 });
        assert_eq!(Completion::of(&wc).result, result);
        (wc.status, wc.vendor_err) = (abi::IBV_WC_REM_ACCESS_ERR, 0x81);
        let result = Err(Failed { status: Status::REMOTE_ACCESS, vendor: 0x81 });
        assert_eq!(Completion::of(&wc).result, result);
        assert_eq!(Status::REMOTE_ACCESS.to_string(), "remote access error (10)");
        assert_eq!(Status(77).to_string(), "unknown (77)");
    }
}
