//! libibverbs, loaded when the verbs engine is asked for.
//!
//! Owns: every object that the library gives out, each keeping alive what it hangs on, so that they
//! end in an order that the library takes. In: memory as [`Range`]s, numbers from peers. Out: what
//! happened, by name; failures name the call, the device and what the kernel said. Invariants:
//! memory is deregistered before its owner is let go, or never let go; pushing, posting and polling
//! allocate nothing; a process without the library starts, and hears of it only here.
#![allow(unsafe_code)] // A C library.

#[doc(hidden)]
pub mod abi;
mod device;
mod event;
mod memory;
mod pair;
mod post;
mod queue;
mod symbols;

use std::ffi::c_int;
use std::io;
use std::sync::Arc;

use kvlane_proto::{Error, ErrorKind, Result};

pub use device::{
    Context, DeviceAttributes, DeviceInfo, DeviceList, Gid, GidType, LinkLayer, Mtu, Node,
    PortAttributes, PortState, Transport,
};
pub use event::{AsyncEvent, PairEvent};
pub use memory::{Access, Dmabuf, DmabufRange, GpuWay, MemoryRegion, ProtectionDomain, Range};
pub use pair::{GlobalRoute, PairDepths, QueuePair, State, ToInit, ToReceive, ToSend};
pub use post::{INLINE_BYTES_MAX, PostFailed, PushRefused, SendBatch};
pub use queue::{
    Completion, CompletionChannel, CompletionQueue, Completions, Done, Failed, Status,
};
#[doc(hidden)]
pub use symbols::Symbols;

/// What is loaded, by the name that the system's loader looks for.
pub const LIBRARY: &str = "libibverbs.so.1";

/// The library. A copy costs nothing.
#[derive(Clone, Debug)]
pub struct Verbs(Arc<Symbols>);

impl Verbs {
    /// Loads the library; cheap if somebody did so before.
    ///
    /// # Errors
    /// [`ErrorKind::Config`]: it is absent, or too old.
    pub fn load() -> Result<Self> {
        Self::load_from(LIBRARY)
    }
    /// Loads it from elsewhere.
    ///
    /// # Errors
    /// As [`Verbs::load`].
    fn load_from(path: &str) -> Result<Self> {
        Symbols::load(path).map(|symbols| Self(Arc::new(symbols)))
    }
    /// Uses other functions: those of a test's device.
    ///
    /// # Safety
    /// They do what the manual pages say of their namesakes, from any thread.
    #[doc(hidden)]
    pub unsafe fn with_symbols(symbols: Symbols) -> Self {
        Self(Arc::new(symbols))
    }
}

/// A call that failed. Numbers that the library gives are those of errno.
fn failed(call: &'static str, device: &str, errno: c_int) -> Error {
    Error::new(ErrorKind::Io, format!("{call} failed"))
        .with("device", device)
        .with("errno", io::Error::from_raw_os_error(errno))
}

fn errno() -> c_int {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// What a call returned that gives 0 or an errno; some providers give -1 and set errno, or negate.
fn check(rc: c_int) -> std::result::Result<(), c_int> {
    match rc {
        0 => Ok(()),
        -1 => Err(errno()),
        rc => Err(rc.saturating_abs()),
    }
}

/// Lets calls that read a descriptor of the library's return at once.
fn set_nonblocking(fd: c_int) -> std::result::Result<(), c_int> {
    // SAFETY: plain calls.
    let set = unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        flags >= 0 && libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) == 0
    };
    if set { Ok(()) } else { Err(errno()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_library_is_refused_by_name_with_the_fix() {
        let e = Verbs::load_from("libibverbs-absent.so.1").unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Config);
        let e = e.to_string();
        assert!(e.contains("tried=libibverbs-absent.so.1"), "{e}");
        assert!(e.contains("No such file or directory"), "{e}");
        assert!(e.ends_with("fix: apt-get install libibverbs1 ibverbs-providers"), "{e}");
    }

    #[test]
    fn a_library_that_lacks_a_function_is_refused_with_its_name() {
        let e = Verbs::load_from("libc.so.6").unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Config);
        let e = e.to_string();
        assert!(e.contains("libc.so.6 has no ibv_get_device_list"), "{e}");
        assert!(e.contains("rdma-core 32"), "{e}");
    }

    #[test]
    fn what_a_call_returned_is_an_errno() {
        assert_eq!(check(0), Ok(()));
        assert_eq!((check(libc::EINVAL), check(-libc::EINVAL)), (Err(22), Err(22)));
        let e = failed("ibv_query_port", "mlx5_0", libc::EINVAL).to_string();
        assert!(
            e.starts_with("io: ibv_query_port failed (device=mlx5_0, errno=Invalid arg"),
            "{e}"
        );
    }
}
