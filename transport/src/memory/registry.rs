//! The regions that an engine knows.

use std::sync::Arc;

use kvlane_proto::{Device, Error, ErrorKind, PartPages, Result};

use super::Region;
use crate::sys::mem::Pages;

/// The regions of one engine. Regions may overlap: an address is resolved to the first that has it.
#[derive(Debug)]
pub struct Registry {
    devices: Vec<Device>,
    regions: Vec<Arc<Region>>,
}

impl Registry {
    /// No regions yet, on `devices`.
    pub fn new(devices: &[Device]) -> Self {
        Self { devices: devices.to_vec(), regions: Vec::new() }
    }
    /// Makes a region known.
    ///
    /// # Errors
    /// [`ErrorKind::Memory`]: a device that the engine does not reach (with those it does), or a
    /// region that is known already.
    pub fn register(&mut self, region: &Arc<Region>) -> Result<()> {
        if !self.devices.contains(&region.device()) {
            return Err(Error::new(ErrorKind::Memory, "the engine does not reach this device")
                .with("asked", region)
                .with("known", list(&self.devices))
                .hint("use an engine that lists the device, or a pool on one of those"));
        }
        if self.regions.iter().any(|r| Arc::ptr_eq(r, region)) {
            return Err(Error::new(ErrorKind::Memory, "the region is registered already")
                .with("asked", region));
        }
        self.regions.push(region.clone());
        Ok(())
    }
    /// Forgets a region. `user` names what still uses it, if anything does.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] with the user, [`ErrorKind::Memory`] if it is not known.
    pub fn unregister(&mut self, region: &Arc<Region>, user: Option<String>) -> Result<()> {
        let Some(i) = self.regions.iter().position(|r| Arc::ptr_eq(r, region)) else {
            return Err(self.unknown(region.device(), region.address(), region.bytes()));
        };
        if let Some(user) = user {
            return Err(Error::new(ErrorKind::Busy, "the region is in use")
                .with("asked", region)
                .with("user", user)
                .hint("end its rooms first"));
        }
        self.regions.remove(i);
        Ok(())
    }
    /// The region that a range lies in.
    ///
    /// # Errors
    /// [`ErrorKind::Memory`] with the range and every region known.
    pub fn resolve(&self, device: Device, address: u64, bytes: u64) -> Result<&Arc<Region>> {
        self.regions
            .iter()
            .find(|r| r.contains(device, address, bytes))
            .ok_or_else(|| self.unknown(device, address, bytes))
    }
    /// Fills `into` with the pages of a part, each checked. What was in it is forgotten.
    ///
    /// # Errors
    /// As [`Registry::resolve`]; `into` is empty then.
    pub fn resolve_part(&self, part: &PartPages, into: &mut Pages) -> Result<()> {
        into.clear();
        let device = part.device();
        let mut pages = part.iter();
        let mut next = pages.next();
        while let Some(page) = next {
            let bytes = u64::from(page.bytes);
            let found = self.resolve(device, page.address, bytes).and_then(|region| {
                let unknown = |_| self.unknown(device, page.address, bytes);
                into.push(region.memory(), page.address, bytes).map_err(unknown)?;
                Ok(region.memory())
            });
            let memory = found.inspect_err(|_| into.clear())?;
            // Up to the first page that lies elsewhere.
            next = pages.find(|p| into.push(memory, p.address, p.bytes.into()).is_err());
        }
        Ok(())
    }
    fn unknown(&self, device: Device, address: u64, bytes: u64) -> Error {
        let why = if self.devices.contains(&device) {
            "no registered region has this range"
        } else {
            "the engine does not reach this device"
        };
        let end = u128::from(address) + u128::from(bytes);
        Error::new(ErrorKind::Memory, why)
            .with("asked", format!("{device} {address:#x}..{end:#x}"))
            .with("devices", list(&self.devices))
            .with("regions", list(&self.regions))
            .hint("register the pool before it is used")
    }
}

fn list<T: std::fmt::Display>(items: &[T]) -> String {
    if items.is_empty() {
        return "none".into();
    }
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_name_what_was_asked_and_what_is_known() {
        let (a, b) = (Region::memfd(4096).unwrap(), Region::memfd(8192).unwrap());
        let mut r = Registry::new(&[Device::Host]);
        let text = r.resolve(Device::Host, 5, 1).unwrap_err().to_string();
        assert!(text.contains("host 0x5..0x6") && text.contains("regions=none"), "{text}");
        r.register(&a).unwrap();
        r.register(&b).unwrap();
        assert_eq!(r.register(&a).unwrap_err().kind(), ErrorKind::Memory);
        let end = a.address() + 4096;
        assert!(Arc::ptr_eq(r.resolve(Device::Host, end - 1, 1).unwrap(), &a));
        let text = r.resolve(Device::Host, end - 1, 1 << 40).unwrap_err().to_string();
        assert!(text.contains(&a.to_string()) && text.contains(&b.to_string()), "{text}");
        assert!(r.resolve(Device::Host, u64::MAX, u64::MAX).is_err());
        let text = r.resolve(Device::Gpu(3), end - 1, 1).unwrap_err().to_string();
        assert!(text.contains("gpu3") && text.contains("devices=host"), "{text}");
        let e = r.unregister(&a, Some("grant 7".into())).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Busy);
        assert!(e.to_string().contains("user=grant 7"), "{e}");
        r.unregister(&a, None).unwrap();
        assert_eq!(r.unregister(&a, None).unwrap_err().kind(), ErrorKind::Memory);
        assert!(r.resolve(Device::Host, end - 1, 1).is_err());
        let text = Registry::new(&[]).register(&b).unwrap_err().to_string();
        assert!(text.contains("known=none"), "{text}");
    }
}
