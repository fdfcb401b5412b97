//! A NIC, and what one link may reach through it.
//!
//! Owns: the open NIC; for each link a protection domain with a key for every region. In: regions
//! that come and go. Out: keys, and why there are none. Invariants: keys of one link open nothing to
//! another; a region that cannot be registered leaves nothing behind; of a lost NIC nothing is asked.

use std::sync::Arc;

use kvlane_proto::{Error, ErrorKind, Result};

use super::keys::Keys;
use super::wire::Opened;
use crate::emulated::client::{About, Domain, Hca, Key, LOST, Rights};
use crate::memory::Region;

/// A NIC.
pub(super) struct Rail {
    pub(super) hca: Hca,
    /// Its loss has been acted on.
    pub(super) mourned: bool,
}

impl Rail {
    pub(super) fn new(hca: Hca) -> Self {
        Self { hca, mourned: false }
    }
    /// Why nothing goes over it.
    pub(super) fn lost(&self) -> Error {
        let about = self.hca.about();
        Error::new(ErrorKind::NoPath, "the NIC is lost")
            .with("nic", &about.name)
            .with("socket", self.hca.socket())
            .with("guid", format!("{:#x}", about.guid))
            .hint(LOST)
    }
}

/// NICs as they are told to people.
pub(super) fn named<'a>(nics: impl IntoIterator<Item = &'a About>) -> String {
    let each = nics.into_iter().map(|nic| format!("{} {:#x}", nic.name, nic.guid));
    each.collect::<Vec<_>>().join(", ")
}

/// What one link may reach through one NIC.
pub(super) struct Access {
    pub(super) domain: Domain,
    rights: Rights,
    regions: Vec<(Arc<Region>, Key)>,
    keys: Keys,
}

impl Access {
    /// A domain with a key for each region.
    pub(super) fn new(hca: &mut Hca, rights: Rights, regions: &[Arc<Region>]) -> Result<Self> {
        let domain = hca.domain()?;
        let mut access = Self { domain, rights, regions: Vec::new(), keys: Keys::default() };
        match regions.iter().try_for_each(|region| access.add(hca, region)) {
            Ok(()) => Ok(access),
            Err(e) => {
                access.end(hca);
                Err(e)
            }
        }
    }
    /// The keys.
    pub(super) fn keys(&self) -> &Keys {
        &self.keys
    }
    /// Makes a region known.
    pub(super) fn add(&mut self, hca: &mut Hca, region: &Arc<Region>) -> Result<()> {
        let key = hca
            .register(self.domain, region, self.rights)
            .map_err(|e| e.with("asked", region).with("nic", &hca.about().name))?;
        self.regions.push((region.clone(), key));
        self.list();
        Ok(())
    }
    /// Forgets a region, if it is known. A NIC that is lost keeps it.
    pub(super) fn remove(&mut self, hca: &mut Hca, region: &Arc<Region>) -> Result<()> {
        let is = |(known, _): &(Arc<Region>, Key)| Arc::ptr_eq(known, region);
        let Some(at) = self.regions.iter().position(is) else { return Ok(()) };
        let (_, key) = self.regions.remove(at);
        self.list();
        if hca.is_lost() { Ok(()) } else { hca.deregister(key) }
    }
    /// Gives the domain up. Its queue pairs are destroyed, or lost with the NIC.
    pub(super) fn end(self, hca: &mut Hca) {
        if !hca.is_lost()
            && let Err(e) = hca.drop_domain(self.domain)
        {
            tracing::warn!(nic = hca.about().name, %e, "a protection domain was not given back");
        }
    }
    fn list(&mut self) {
        let opened = |(region, key): &(Arc<Region>, Key)| Opened {
            address: region.address(),
            bytes: region.bytes(),
            key: *key,
        };
        self.keys = Keys::new(self.regions.iter().map(opened).collect());
    }
}
