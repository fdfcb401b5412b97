//! Memory that a NIC may reach.

use std::any::Any;
use std::ffi::{c_int, c_uint, c_void};
use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use kvlane_proto::{Error, ErrorKind, Result};

use super::abi::{self, ibv_mr, ibv_pd};
use super::{Context, errno};
use crate::sys::mem::Memory;
use crate::sys::share::Words;

type Owner = Arc<dyn Any + Send + Sync>;

/// Addresses that a NIC may be given, with what keeps them mapped.
#[derive(Clone)]
pub struct Range {
    address: u64,
    bytes: u64,
    owner: Owner,
}

impl fmt::Debug for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}+{}", self.address, self.bytes)
    }
}

impl Range {
    /// A part of our memory, if it lies inside.
    pub fn of(memory: &Arc<Memory>, address: u64, bytes: u64) -> Option<Self> {
        memory.contains(address, bytes).then(|| Self { address, bytes, owner: memory.clone() })
    }
    /// All of some words.
    pub fn of_words(words: &Arc<Words>) -> Self {
        let bytes = words.words().len() as u64 * 8;
        Self { address: words.address(), bytes, owner: words.clone() }
    }
    /// Promises that a NIC may read and write a range.
    ///
    /// # Safety
    /// `address..address + bytes` is mapped, and stays so until `owner` is dropped; nobody holds a
    /// Rust reference into it meanwhile, because bytes land in it at any time.
    pub unsafe fn promise(address: u64, bytes: u64, owner: Owner) -> Self {
        Self { address, bytes, owner }
    }
}

/// A part of a dma-buf: memory of a GPU that the NIC reaches by itself.
#[derive(Clone, Copy, Debug)]
pub struct DmabufRange<'a> {
    /// The dma-buf; the kernel holds it as long as the region.
    pub fd: BorrowedFd<'a>,
    /// Where the region begins in it.
    pub offset: u64,
    /// How long it is.
    pub bytes: u64,
    /// The address by which requests name its first byte.
    pub iova: u64,
}

/// What a NIC may do with a region. Reading by the NIC that registered it is always allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access(c_uint);

impl Access {
    /// Only be sent from.
    pub const READ: Self = Self(0);
    /// Be written by peers that know its key.
    pub const REMOTE_WRITE: Self = Self(abi::IBV_ACCESS_LOCAL_WRITE | abi::IBV_ACCESS_REMOTE_WRITE);

    /// Lets bytes land in any order before their completion. Where this is not known it changes
    /// nothing.
    #[must_use]
    pub const fn relaxed(self) -> Self {
        Self(self.0 | abi::IBV_ACCESS_RELAXED_ORDERING)
    }
    pub(super) fn bits(self) -> c_uint {
        self.0
    }
}

/// What belongs together: queue pairs reach regions of their own domain only.
#[derive(Debug)]
pub struct ProtectionDomain {
    context: Arc<Context>,
    raw: NonNull<ibv_pd>,
}

// SAFETY: every call of libibverbs may come from any thread.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as above.
unsafe impl Sync for ProtectionDomain {}

/// How memory of a GPU came to be registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuWay {
    /// By its dma-buf.
    Dmabuf,
    /// By its address.
    Peermem,
}

/// What became of a dma-buf.
#[derive(Debug)]
pub enum Dmabuf {
    /// It is registered.
    Registered(MemoryRegion),
    /// The library, the kernel or the device does not do this at all; why is said.
    Unsupported(Error),
}

impl ProtectionDomain {
    /// A new one.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>> {
        // SAFETY: the context lives.
        let raw = unsafe { (context.symbols().alloc_pd)(context.raw()) };
        let raw = context.made("ibv_alloc_pd", raw)?;
        Ok(Arc::new(Self { context: context.clone(), raw }))
    }
    /// The device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }
    pub(super) fn raw(&self) -> *mut ibv_pd {
        self.raw.as_ptr()
    }
    /// Registers memory: pins it, and gives the keys by which requests name it.
    ///
    /// # Errors
    /// [`ErrorKind::Memory`], with the limit on locked memory where that is the likely reason.
    pub fn register(self: &Arc<Self>, range: Range, access: Access) -> Result<MemoryRegion> {
        let symbols = self.context.symbols();
        let (at, bytes) = (range.address as *mut c_void, range.bytes as usize);
        let optional = access.0 & abi::IBV_ACCESS_RELAXED_ORDERING;
        // SAFETY: the domain lives; the range is mapped as long as its owner, which the region
        // keeps, and no reference into it exists.
        let raw = unsafe {
            match symbols.reg_mr_iova2 {
                Some(register) if optional != 0 => {
                    register(self.raw(), at, bytes, range.address, access.0)
                }
                _ => (symbols.reg_mr)(self.raw(), at, bytes, (access.0 & !optional) as c_int),
            }
        };
        let Some(raw) = NonNull::new(raw) else {
            let errno = errno();
            let e = self.context.failed("ibv_reg_mr", errno);
            return Err(not_registered(errno, range.bytes, e, memlock_bytes()));
        };
        Ok(MemoryRegion::new(self, raw, Some(range.owner), range.address, range.bytes))
    }
    /// Registers a part of a dma-buf.
    ///
    /// # Errors
    /// As [`ProtectionDomain::register`]; that it cannot be done at all is no error.
    pub fn register_dmabuf(
        self: &Arc<Self>,
        part: DmabufRange<'_>,
        access: Access,
    ) -> Result<Dmabuf> {
        const CALL: &str = "ibv_reg_dmabuf_mr";
        let unsupported = |e: Error| {
            Dmabuf::Unsupported(
                Error::new(ErrorKind::Config, "dma-bufs cannot be registered here")
                    .with("device", &self.context.info().name)
                    .caused_by(e)
                    .hint("Linux 5.12, rdma-core 34 and a driver that does it (mlx5) are needed"),
            )
        };
        let Some(register) = self.context.symbols().reg_dmabuf_mr else {
            return Ok(unsupported(self.context.failed(CALL, libc::ENOSYS)));
        };
        let bytes = part.bytes as usize;
        let (fd, access) = (part.fd.as_raw_fd(), access.0 as c_int);
        // SAFETY: the domain lives; the kernel checks the descriptor and the range, and holds the
        // dma-buf. Its bytes are nobody's Rust memory.
        let raw = unsafe { register(self.raw(), part.offset, bytes, part.iova, fd, access) };
        let Some(raw) = NonNull::new(raw) else {
            let errno = errno();
            let e = self.context.failed(CALL, errno);
            if matches!(errno, libc::EOPNOTSUPP | libc::ENOSYS | libc::EPROTONOSUPPORT) {
                return Ok(unsupported(e));
            }
            return Err(not_registered(errno, part.bytes, e, memlock_bytes()));
        };
        Ok(Dmabuf::Registered(MemoryRegion::new(self, raw, None, part.iova, part.bytes)))
    }
}

impl ProtectionDomain {
    /// Registers memory of a GPU: by its dma-buf, if there is one and NIC and kernel take it, else by
    /// its address, for which the GPU's driver has a module (nvidia-peermem).
    ///
    /// # Errors
    /// [`ErrorKind::Memory`] with what became of either way.
    pub fn register_gpu(
        self: &Arc<Self>,
        range: Range,
        dmabuf: Option<DmabufRange<'_>>,
        access: Access,
    ) -> Result<(MemoryRegion, GpuWay)> {
        let owner = range.owner.clone();
        let by_dmabuf = match dmabuf.map(|part| self.register_dmabuf(part, access)) {
            Some(Ok(Dmabuf::Registered(mut region))) => {
                region.owner = Some(owner);
                return Ok((region, GpuWay::Dmabuf));
            }
            Some(Ok(Dmabuf::Unsupported(e)) | Err(e)) => e.to_string(),
            None => "the GPU's driver exports none".to_owned(),
        };
        let (address, bytes) = (range.address, range.bytes);
        self.register(range, access).map(|region| (region, GpuWay::Peermem)).map_err(|e| {
            Error::new(ErrorKind::Memory, "memory of a GPU cannot be registered")
                .with("nic", &self.context.info().name)
                .with("address", format!("{address:#x}"))
                .with("bytes", bytes)
                .with("by_dmabuf", by_dmabuf)
                .with("by_peermem", e)
                .hint(
                    "modprobe nvidia-peermem, or use the GPU driver's open kernel modules with \
                     Linux 5.12 and rdma-core 34 for dma-buf",
                )
        })
    }
}

/// `None`: unlimited.
fn memlock_bytes() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limit is borrowed for the call; it stays zero if that fails, which it does not.
    unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) };
    (limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

fn not_registered(errno: c_int, bytes: u64, e: Error, memlock_bytes: Option<u64>) -> Error {
    let refused = Error::new(ErrorKind::Memory, format!("{bytes} bytes cannot be registered"));
    match errno {
        libc::ENOMEM | libc::EPERM => {
            let refused = refused.caused_by(e);
            match memlock_bytes {
                Some(limit) => refused.with("RLIMIT_MEMLOCK", format!("{limit} bytes")).hint(
                    "ulimit -l unlimited; LimitMEMLOCK=infinity in a systemd unit, \
                     --ulimit memlock=-1 for a container",
                ),
                None => refused.with("RLIMIT_MEMLOCK", "unlimited").hint(
                    "the NIC's or the host's memory is used up: register less, or larger pages",
                ),
            }
        }
        libc::EFAULT | libc::EINVAL => {
            refused.caused_by(e).hint("the range must be mapped, and writable if peers write it")
        }
        _ => refused.caused_by(e),
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: regions and queue pairs keep it alive, so none is left; freed once.
        let rc = unsafe { (self.context.symbols().dealloc_pd)(self.raw()) };
        self.context.ended("ibv_dealloc_pd", rc);
    }
}

/// Registered memory. Its end is no fence: what peers wrote may still be on its way before it.
pub struct MemoryRegion {
    domain: Arc<ProtectionDomain>,
    raw: NonNull<ibv_mr>,
    owner: Option<Owner>,
    address: u64,
    bytes: u64,
    local_key: u32,
    remote_key: u32,
}

// SAFETY: every call of libibverbs may come from any thread.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

impl fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryRegion({:#x}+{})", self.address, self.bytes)
    }
}

impl MemoryRegion {
    fn new(
        domain: &Arc<ProtectionDomain>,
        raw: NonNull<ibv_mr>,
        owner: Option<Owner>,
        address: u64,
        bytes: u64,
    ) -> Self {
        // SAFETY: the region was just made; its keys never change.
        let (local_key, remote_key) = unsafe { ((*raw.as_ptr()).lkey, (*raw.as_ptr()).rkey) };
        Self { domain: domain.clone(), raw, owner, address, bytes, local_key, remote_key }
    }
    /// The address by which requests name its first byte.
    pub fn address(&self) -> u64 {
        self.address
    }
    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
    /// The key for requests of this side.
    pub fn local_key(&self) -> u32 {
        self.local_key
    }
    /// The key for peers.
    pub fn remote_key(&self) -> u32 {
        self.remote_key
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        let context = &self.domain.context;
        // SAFETY: deregistered once; requests that name its keys afterwards are refused by the NIC.
        let rc = unsafe { (context.symbols().dereg_mr)(self.raw.as_ptr()) };
        if !context.ended("ibv_dereg_mr", rc) {
            // The NIC can still reach it, so it is never freed.
            std::mem::forget(self.owner.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::verbs::failed;

    fn refusal(errno: c_int, memlock: Option<u64>) -> Error {
        not_registered(errno, 1 << 30, failed("ibv_reg_mr", "mlx5_0", errno), memlock)
    }

    #[test]
    fn a_limit_on_locked_memory_is_named_with_its_fix() {
        for errno in [libc::ENOMEM, libc::EPERM] {
            let e = refusal(errno, Some(8 << 20));
            assert_eq!(e.kind(), ErrorKind::Memory);
            let e = e.to_string();
            assert!(e.contains("1073741824 bytes cannot be registered"), "{e}");
            assert!(e.contains("RLIMIT_MEMLOCK=8388608 bytes"), "{e}");
            assert!(e.contains("ulimit -l unlimited; LimitMEMLOCK=infinity"), "{e}");
            assert!(e.contains("ibv_reg_mr failed (device=mlx5_0"), "{e}");
        }
        let e = refusal(libc::ENOMEM, None).to_string();
        assert!(e.contains("RLIMIT_MEMLOCK=unlimited") && !e.contains("ulimit -l"), "{e}");
        let e = refusal(libc::EFAULT, Some(1)).to_string();
        assert!(e.contains("Bad address") && !e.contains("MEMLOCK"), "{e}");
    }

    #[test]
    fn a_range_lies_inside_its_memory() {
        let memory = Arc::new(Memory::private(8192).unwrap());
        let at = memory.address();
        assert!(Range::of(&memory, at, 8192).is_some());
        assert!(Range::of(&memory, at + 1, 8192).is_none());
        assert!(Range::of(&memory, at - 1, 1).is_none());
    }
}
