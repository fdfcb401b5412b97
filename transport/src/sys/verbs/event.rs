//! What a device says on its own.

use kvlane_proto::Result;

use super::abi::{self, Zero, ibv_async_event, ibv_qp};
use super::{Context, errno};

/// Something that happened to a device, a port or a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncEvent {
    /// The device is gone: nothing of it works any more.
    DeviceFatal,
    /// A port can be used.
    PortActive {
        /// Which.
        port: u8,
    },
    /// A port cannot be used.
    PortError {
        /// Which.
        port: u8,
    },
    /// The GID table changed: look addresses up anew.
    GidChange {
        /// Whose.
        port: u8,
    },
    /// Another LID.
    LidChange {
        /// Whose.
        port: u8,
    },
    /// Something of a queue pair.
    QueuePair {
        /// Its number.
        number: u32,
        /// What.
        event: PairEvent,
    },
    /// A completion queue overran or broke: its queue pairs hear nothing any more.
    CompletionQueueError,
    /// By its number in the header.
    Other(u32),
}

/// What happened to a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairEvent {
    /// It broke.
    Fatal,
    /// The other side asked for nonsense.
    RequestError,
    /// The other side's key or range was wrong.
    AccessError,
    /// The first packet came before it was ready to send.
    Established,
    /// By its number in the header.
    Other(u32),
}

impl Context {
    /// The next event, if there is one. It is acknowledged at once, so that no end of a queue waits
    /// for it.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn async_event(&self) -> Result<Option<AsyncEvent>> {
        let mut event = ibv_async_event::zero();
        // SAFETY: the context lives; the event is borrowed for the call, which does not block: the
        // descriptor was set so.
        if unsafe { (self.symbols().get_async_event)(self.raw(), &mut event) } != 0 {
            return match errno() {
                libc::EAGAIN | libc::EINTR => Ok(None),
                e => Err(self.failed("ibv_get_async_event", e)),
            };
        }
        // SAFETY: the event was just given, and not acknowledged.
        let said = unsafe { read(&event) };
        // SAFETY: as above; acknowledged once, and not read any more.
        unsafe { (self.symbols().ack_async_event)(&mut event) };
        Ok(Some(said))
    }
}

/// # Safety
/// The event was given and is not acknowledged, so that what it is about is not freed.
unsafe fn read(event: &ibv_async_event) -> AsyncEvent {
    // The number of a port lies in the first half of the union.
    let port = std::ptr::from_ref(&event.element).cast::<i32>();
    // SAFETY: the union is at least as large as a number, and was written.
    let port = u8::try_from(unsafe { port.read() }).unwrap_or(0);
    let pair = |event_of: PairEvent| {
        let pair = event.element.cast::<ibv_qp>();
        // SAFETY: events of this sort point to their queue pair, which is freed only after the
        // acknowledgement. Its number never changes.
        let number = unsafe { (*pair).qp_num };
        AsyncEvent::QueuePair { number, event: event_of }
    };
    match event.event_type {
        abi::IBV_EVENT_DEVICE_FATAL => AsyncEvent::DeviceFatal,
        abi::IBV_EVENT_PORT_ACTIVE => AsyncEvent::PortActive { port },
        abi::IBV_EVENT_PORT_ERR => AsyncEvent::PortError { port },
        abi::IBV_EVENT_GID_CHANGE => AsyncEvent::GidChange { port },
        abi::IBV_EVENT_LID_CHANGE => AsyncEvent::LidChange { port },
        abi::IBV_EVENT_QP_FATAL => pair(PairEvent::Fatal),
        abi::IBV_EVENT_QP_REQ_ERR => pair(PairEvent::RequestError),
        abi::IBV_EVENT_QP_ACCESS_ERR => pair(PairEvent::AccessError),
        abi::IBV_EVENT_COMM_EST => pair(PairEvent::Established),
        other @ (abi::IBV_EVENT_SQ_DRAINED
        | abi::IBV_EVENT_PATH_MIG
        | abi::IBV_EVENT_PATH_MIG_ERR
        | abi::IBV_EVENT_QP_LAST_WQE_REACHED) => pair(PairEvent::Other(other)),
        abi::IBV_EVENT_CQ_ERR => AsyncEvent::CompletionQueueError,
        other => AsyncEvent::Other(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_by_what_they_are_about() {
        let mut pair = ibv_qp::zero();
        pair.qp_num = 0x1234;
        let of = |kind, element| {
            let event = ibv_async_event { element, event_type: kind };
            // SAFETY: the element is the queue pair above, or the number of a port.
            unsafe { read(&event) }
        };
        // The other half of the union is whatever it was.
        let port = (0xdead_0000_0000_0002_u64 as usize) as *mut std::ffi::c_void;
        let at_pair = std::ptr::from_mut(&mut pair).cast();
        assert_eq!(of(abi::IBV_EVENT_PORT_ERR, port), AsyncEvent::PortError { port: 2 });
        assert_eq!(of(abi::IBV_EVENT_GID_CHANGE, port), AsyncEvent::GidChange { port: 2 });
        assert_eq!(of(abi::IBV_EVENT_DEVICE_FATAL, port), AsyncEvent::DeviceFatal);
        assert_eq!(of(99, port), AsyncEvent::Other(99));
        let event = PairEvent::AccessError;
        let expected = AsyncEvent::QueuePair { number: 0x1234, event };
        assert_eq!(of(abi::IBV_EVENT_QP_ACCESS_ERR, at_pair), expected);
    }
}
