//! One range of memory of one device.

use std::fmt;
use std::io;
use std::sync::Arc;

use kvlane_proto::{Device, Error, ErrorKind, Result};

use crate::sys::mem::{HostRange, Memory};

/// One range of memory of one device: an address and a length, never a slice.
#[derive(Debug)]
pub struct Region {
    memory: Arc<Memory>,
    numa_node: Option<u32>,
}

impl Region {
    /// A zeroed host pool of our own, every page touched now.
    ///
    /// # Errors
    /// [`ErrorKind::Memory`] with the length and what the kernel said.
    pub fn memfd(bytes: u64) -> Result<Arc<Self>> {
        Self::map(Device::Host, bytes, true)
    }
    /// A zeroed pool of our own on `device`; `populate` touches every page now.
    ///
    /// # Errors
    /// [`ErrorKind::Memory`] with device, length and what the kernel said.
    pub fn map(device: Device, bytes: u64, populate: bool) -> Result<Arc<Self>> {
        Self::make(device, bytes, populate, Memory::memfd)
    }
    /// A zeroed host pool of our own that an emulated NIC can be given to write, every page touched
    /// now. Every other pool is sealed: nobody but this process can write it.
    ///
    /// # Errors
    /// As [`Region::memfd`].
    pub fn for_nic(bytes: u64) -> Result<Arc<Self>> {
        Self::make(Device::Host, bytes, true, Memory::memfd_for_nic)
    }
    /// As [`Region::for_nic`], and no page is touched.
    ///
    /// # Errors
    /// As [`Region::memfd`].
    pub fn for_nic_sparse(bytes: u64) -> Result<Arc<Self>> {
        Self::make(Device::Host, bytes, false, Memory::memfd_for_nic)
    }
    fn make(
        device: Device,
        bytes: u64,
        populate: bool,
        memory: impl FnOnce(u64, bool) -> io::Result<Memory>,
    ) -> Result<Arc<Self>> {
        let refused = |why: &str| {
            Error::new(ErrorKind::Memory, why).with("device", device).with("bytes", bytes)
        };
        if device != Device::Host {
            return Err(refused("this build has no memory of GPUs")
                .with("known", Device::Host)
                .hint("use a host pool"));
        }
        if bytes == 0 {
            return Err(refused("a region must not be empty"));
        }
        let memory = memory(bytes, populate).map_err(|e| {
            refused("the kernel gave no shared memory")
                .hint("free memory, or raise the limit of the memory cgroup or RLIMIT_AS")
                .caused_by(e)
        })?;
        Ok(Arc::new(Self { memory: Arc::new(memory), numa_node: numa_node() }))
    }
    /// Host memory that the serving engine owns; the promise was made by [`HostRange::borrow`].
    ///
    /// # Errors
    /// [`ErrorKind::Memory`] if the range is empty, starts at 0 or wraps.
    pub fn borrowed(range: HostRange) -> Result<Arc<Self>> {
        let memory = Memory::borrowed(range);
        let refused = |why: &str| {
            Error::new(ErrorKind::Memory, why)
                .with("address", format!("{:#x}", memory.address()))
                .with("bytes", memory.bytes())
        };
        if memory.bytes() == 0 {
            return Err(refused("a region must not be empty"));
        }
        if memory.address() == 0 || memory.address().checked_add(memory.bytes()).is_none() {
            return Err(refused("a region must lie inside the address space")
                .hint("give the pool's own address and its length in bytes"));
        }
        Ok(Arc::new(Self { memory: Arc::new(memory), numa_node: numa_node() }))
    }
    /// A zeroed host pool of our own that has no descriptor, as if the serving engine had allocated
    /// it; every page touched now.
    ///
    /// # Errors
    /// [`ErrorKind::Memory`] with the length and what the kernel said.
    pub fn private(bytes: u64) -> Result<Arc<Self>> {
        let memory = Memory::private(bytes).map_err(|e| {
            Error::new(ErrorKind::Memory, "the kernel gave no memory")
                .with("bytes", bytes)
                .caused_by(e)
        })?;
        Ok(Arc::new(Self { memory: Arc::new(memory), numa_node: numa_node() }))
    }
    /// The device that the addresses are of.
    pub fn device(&self) -> Device {
        Device::Host
    }
    /// First address.
    pub fn address(&self) -> u64 {
        self.memory.address()
    }
    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.memory.bytes()
    }
    /// NUMA node, where it can be known.
    pub fn numa_node(&self) -> Option<u32> {
        self.numa_node
    }
    /// Whether a range lies inside.
    pub fn contains(&self, device: Device, address: u64, bytes: u64) -> bool {
        device == self.device() && self.memory.contains(address, bytes)
    }
    /// The memory, for bounded copies and scatter lists.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }
}

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A wrapped end is refused at construction.
        let (start, end) = (self.address(), self.address() + self.bytes());
        write!(f, "{} {start:#x}..{end:#x}", self.device())
    }
}

/// The only node there is. With several, the answer depends on which pages were touched by whom.
fn numa_node() -> Option<u32> {
    std::fs::read_to_string("/sys/devices/system/node/online").ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_memory_is_refused_by_name() {
        let text = Region::memfd(0).unwrap_err().to_string();
        assert!(text.contains("must not be empty") && text.contains("bytes=0"), "{text}");
        let text = Region::map(Device::Gpu(3), 4096, false).unwrap_err().to_string();
        assert!(text.contains("device=gpu3") && text.contains("known=host"), "{text}");
        let e = Region::map(Device::Host, 1 << 62, false).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Memory);
    }
}
