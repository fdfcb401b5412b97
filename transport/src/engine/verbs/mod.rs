//! Engine `verbs`: the sender's NIC writes pages, asked by way of libibverbs.
//!
//! Owns: how NICs are chosen. In: wishes. Out: a [`OneSided`] engine over the NIC ports that were chosen
//! ([`nic`]), whose queue pairs post by [`pair`]. Nothing of libibverbs is loaded before an engine is
//! made.

mod nic;
mod pair;

use kvlane_proto::{Result, limits};

pub use self::nic::Port;
pub use self::pair::Ring;
use super::one_sided::{ENTRIES, OneSided};
use crate::devices::{Choice, Machine, Sysfs, Target, Wishes, choose};
use crate::sys::verbs::Verbs;

/// Settings of the engine.
#[derive(Clone, Debug)]
pub struct VerbsConfig {
    /// Which NICs, and how they are to be used.
    pub wishes: Wishes,
    /// Most entries of a sender's ring; a power of two. Larger parts are posted piece by piece.
    pub entries: u32,
    /// Lets bytes of a part land in any order before its immediate, where memory and NIC do so.
    pub relaxed_ordering: bool,
}

impl Default for VerbsConfig {
    fn default() -> Self {
        Self { wishes: Wishes::default(), entries: ENTRIES, relaxed_ordering: false }
    }
}

impl VerbsConfig {
    /// The NIC ports that pages go over on this machine, and why no others do.
    ///
    /// # Errors
    /// As [`choose`].
    pub fn choose(&self, sysfs: &Sysfs) -> Result<Choice> {
        let mut choice = choose(&Machine::read(sysfs), Target::Host, &self.wishes)?;
        // More than a link takes are of no use.
        choice.rails.truncate(usize::from(limits::RAILS_MAX));
        Ok(choice)
    }
}

/// The engine.
pub type VerbsEngine = OneSided<Port>;

impl VerbsEngine {
    /// Chooses NICs and opens them.
    ///
    /// # Errors
    /// [`kvlane_proto::ErrorKind::Config`] if there is no library; no NIC that can be used, with every
    /// candidate and why it is refused; what opening one said.
    pub fn new(config: &VerbsConfig) -> Result<Self> {
        Self::by(&Verbs::load()?, &Sysfs::default(), config)
    }
    /// As [`VerbsEngine::new`], with the library and the machine of a test.
    ///
    /// # Errors
    /// As [`VerbsEngine::new`].
    #[doc(hidden)]
    pub fn by(verbs: &Verbs, sysfs: &Sysfs, config: &VerbsConfig) -> Result<Self> {
        let choice = config.choose(sysfs)?;
        let open = |rail: &_| Port::open(verbs, sysfs, rail, config.relaxed_ordering);
        let ports: Vec<Port> = choice.require()?.iter().map(open).collect::<Result<_>>()?;
        let depth = ports.iter().map(Port::depth).min().unwrap_or(config.entries);
        Self::over(ports, config.entries.min(depth))
    }
}
