//! A NIC, and what one link may reach through it.
//!
//! Owns: the open NIC; for each link a protection domain with keys for every region. In: regions
//! that come and go. Out: keys, and why there are none. Invariants: keys of one link open nothing to
//! another; a region that cannot be registered leaves nothing behind; of a lost NIC nothing is asked.

use std::sync::Arc;

use kvlane_proto::Result;

use super::keys::Keys;
use super::nic::{About, Domain, Nic, Registered, Rights};
use super::wire::Opened;
use crate::memory::Region;

/// A NIC.
pub(super) struct Rail<N> {
    pub(super) hca: N,
    /// Its loss has been acted on.
    pub(super) mourned: bool,
}

impl<N: Nic> Rail<N> {
    pub(super) fn new(hca: N) -> Self {
        Self { hca, mourned: false }
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
    regions: Vec<(Arc<Region>, Vec<Registered>)>,
    local: Keys,
    remote: Vec<Opened>,
}

impl Access {
    /// A domain with keys for each region.
    pub(super) fn new(hca: &mut impl Nic, rights: Rights, regions: &[Arc<Region>]) -> Result<Self> {
        let domain = hca.domain()?;
        let (local, remote) = (Keys::default(), Vec::new());
        let mut access = Self { domain, rights, regions: Vec::new(), local, remote };
        match regions.iter().try_for_each(|region| access.add(hca, region)) {
            Ok(()) => Ok(access),
            Err(e) => {
                access.end(hca);
                Err(e)
            }
        }
    }
    /// The keys of this side's entries.
    pub(super) fn keys(&self) -> &Keys {
        &self.local
    }
    /// What the other side is told.
    pub(super) fn opened(&self) -> &[Opened] {
        &self.remote
    }
    /// Makes a region known.
    pub(super) fn add(&mut self, hca: &mut impl Nic, region: &Arc<Region>) -> Result<()> {
        let registered = hca
            .register(self.domain, region, self.rights)
            .map_err(|e| hca.named(e.with("asked", region)))?;
        self.regions.push((region.clone(), registered));
        self.list();
        Ok(())
    }
    /// Forgets a region, if it is known. A NIC that is lost keeps it.
    pub(super) fn remove(&mut self, hca: &mut impl Nic, region: &Arc<Region>) -> Result<()> {
        let is = |(known, _): &(Arc<Region>, _)| Arc::ptr_eq(known, region);
        let Some(at) = self.regions.iter().position(is) else { return Ok(()) };
        let (_, registered) = self.regions.remove(at);
        self.list();
        let mut result = Ok(());
        for one in registered {
            if !hca.is_lost() {
                result = hca.deregister(one.local).and(result);
            }
        }
        result
    }
    /// Gives the domain up. Its queue pairs are destroyed, or lost with the NIC.
    pub(super) fn end(self, hca: &mut impl Nic) {
        if !hca.is_lost()
            && let Err(e) = hca.drop_domain(self.domain)
        {
            tracing::warn!(nic = hca.about().name, %e, "a protection domain was not given back");
        }
    }
    fn list(&mut self) {
        let each = || self.regions.iter().flat_map(|(_, registered)| registered);
        let opened = |r: &Registered, key| Opened { address: r.address, bytes: r.bytes, key };
        self.local = Keys::new(each().map(|r| opened(r, r.local)).collect());
        self.remote = each().map(|r| opened(r, r.remote)).collect();
    }
}
