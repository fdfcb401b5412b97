//! Which engines there are, by name. In: a name and what was asked of it. Out: an engine, or a
//! refusal that lists what exists.

use kvlane_proto::{Error, ErrorKind, Result};
use kvlane_transport::engine::Engine;
use kvlane_transport::engine::shm::{ShmConfig, ShmEngine};
use kvlane_transport::engine::tcp::{TcpConfig, TcpEngine};
use serde::{Deserialize, Serialize};

/// What is asked of an engine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Setup {
    pub(crate) engine: String,
    /// Lanes of the link, all of them used.
    pub(crate) rails: u16,
    pub(crate) checksum: bool,
}

type Make = fn(&Setup) -> Result<Box<dyn Engine>>;

/// A new engine is one line here.
const KNOWN: &[(&str, Make)] = &[("tcp", tcp), ("shm", shm)];

impl Setup {
    /// Makes the engine.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] for a name that does not exist, and what the engine says.
    pub(crate) fn make(&self) -> Result<Box<dyn Engine>> {
        find(&self.engine)?(self)
    }
    /// # Errors
    /// As [`Setup::make`], for the name only.
    pub(crate) fn check(&self) -> Result<()> {
        find(&self.engine).map(|_| ())
    }
}

/// The names, for people.
pub(crate) fn names() -> String {
    KNOWN.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
}

fn find(name: &str) -> Result<Make> {
    KNOWN.iter().find(|(known, _)| *known == name).map(|(_, make)| *make).ok_or_else(|| {
        Error::new(ErrorKind::NotFound, "no such engine")
            .with("asked", name)
            .with("known", names())
            .hint("name one of the known with --engine")
    })
}

fn tcp(setup: &Setup) -> Result<Box<dyn Engine>> {
    let config = TcpConfig { checksum: setup.checksum, ..TcpConfig::default() };
    Ok(Box::new(TcpEngine::new(config)?))
}

fn shm(setup: &Setup) -> Result<Box<dyn Engine>> {
    let config = ShmConfig { checksum: setup.checksum, ..ShmConfig::default() };
    Ok(Box::new(ShmEngine::new(config)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_does_not_exist_is_refused_with_those_that_do() {
        let setup = |name: &str| Setup { engine: name.into(), rails: 1, checksum: false };
        let e = setup("rdma").check().unwrap_err();
        assert_eq!(e.kind(), ErrorKind::NotFound);
        assert!(e.to_string().contains(&format!("asked=rdma, known={}", names())), "{e}");
        for (name, _) in KNOWN {
            setup(name).check().unwrap();
            assert_eq!(setup(name).make().unwrap().caps().name, *name);
        }
    }
}
