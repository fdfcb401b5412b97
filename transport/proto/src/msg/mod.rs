//! Everything that crosses the control plane.
//!
//! Three families, chosen by the first frame of a connection ([`Greeting`]): [`peer`] between two
//! workers, [`call`] from a router or admin to a worker, [`service`] between anybody and the
//! bootstrap service. Every family is an enum of which only new variants may be added at the end;
//! a change of any kind raises [`crate::limits::PROTOCOL_MAX`]. Until the first release there is one
//! version, 1, which changes in place: fields, too, come and go, and only processes of the same build
//! understand each other.

pub mod call;
pub mod peer;
pub mod service;

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Refusal, Result};
use crate::ids::{Identity, Incarnation};
use crate::limits;

/// Which family a connection speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Purpose {
    /// Worker to worker: [`peer::PeerFrame`].
    Peer,
    /// Router or admin to worker: [`call::CallFrame`] and [`call::ReplyFrame`].
    Call,
    /// Anybody to the bootstrap service: [`service::ServiceRequest`] and answers.
    Service,
}

/// First frame of the side that dialled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Oldest and newest protocol version spoken.
    pub protocol: (u16, u16),
    /// Version of the build, for logs and refusals.
    pub build: String,
    /// Who is speaking; must equal the certificate's identity.
    pub identity: Identity,
    /// Which start of it.
    pub incarnation: Incarnation,
    /// Whom the speaker believes it has dialled; refused if it is somebody else.
    pub expects: Option<Identity>,
    /// What the connection is for.
    pub purpose: Purpose,
    /// Optional abilities; unknown ones are ignored.
    pub capabilities: Vec<String>,
}

/// Answer to a [`Hello`] that is accepted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// The version both sides speak from here on.
    pub version: u16,
    /// Version of the answering build.
    pub build: String,
    /// Who answers.
    pub identity: Identity,
    /// Which start of it.
    pub incarnation: Incarnation,
    /// TCP port (same host) for the idle connection whose end is the death notice; 0 for none.
    pub notice_port: u16,
    /// Binds that connection to this session.
    pub notice_token: [u8; 16],
}

/// First frames of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Greeting {
    /// From the side that dialled.
    Hello(Hello),
    /// Accepted.
    Welcome(Welcome),
    /// Not accepted; the connection closes.
    Refused(Refusal),
}

impl Hello {
    /// Checks everything that does not need the certificate.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`] or [`ErrorKind::LimitExceeded`].
    pub fn check(&self) -> Result<()> {
        self.identity.check()?;
        if let Some(expected) = &self.expects {
            expected.check()?;
        }
        let longest = self.capabilities.iter().map(String::len).max().unwrap_or(0);
        for (field, found, limit) in [
            ("build", self.build.len(), limits::NAME_BYTES_MAX),
            ("capabilities", self.capabilities.len(), limits::LIST_MAX),
            ("capability", longest, limits::NAME_BYTES_MAX),
        ] {
            if found > limit {
                return Err(Error::new(ErrorKind::LimitExceeded, format!("{field} is too long"))
                    .with("field", field)
                    .with("found", found)
                    .with("limit", limit)
                    .hint("send a hello within the limits of the protocol"));
            }
        }
        Ok(())
    }

    /// Picks the protocol version.
    ///
    /// # Errors
    /// [`ErrorKind::VersionMismatch`] with both ranges.
    pub fn choose_version(&self) -> Result<u16> {
        let (oldest, newest) = self.protocol;
        let version = newest.min(limits::PROTOCOL_MAX);
        if oldest <= newest && version >= oldest && version >= limits::PROTOCOL_MIN {
            return Ok(version);
        }
        Err(Error::new(ErrorKind::VersionMismatch, "no protocol version in common")
            .with("theirs", format!("{oldest} to {newest}"))
            .with("their_build", &self.build)
            .with("ours", format!("{} to {}", limits::PROTOCOL_MIN, limits::PROTOCOL_MAX))
            .hint("upgrade the older side; neighbouring releases speak to each other"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Role;

    #[test]
    fn version_is_the_newest_in_common_or_a_refusal_with_both_ranges() {
        let mut hello = Hello {
            protocol: (limits::PROTOCOL_MIN, limits::PROTOCOL_MAX + 5),
            build: "9.9".into(),
            identity: Identity::new("c", Role::Decode, "d", 0).unwrap(),
            incarnation: Incarnation([0; 16]),
            expects: None,
            purpose: Purpose::Peer,
            capabilities: vec![],
        };
        assert_eq!(hello.choose_version().unwrap(), limits::PROTOCOL_MAX);
        hello.protocol = (limits::PROTOCOL_MAX + 1, limits::PROTOCOL_MAX + 1);
        let text = hello.choose_version().unwrap_err().to_string();
        assert!(text.contains("theirs=2 to 2") && text.contains("ours=1 to 1"), "{text}");
        hello.protocol = (3, 0);
        assert!(hello.choose_version().is_err());
        hello.capabilities = vec![String::new(); limits::LIST_MAX + 1];
        let text = hello.check().unwrap_err().to_string();
        assert!(text.contains("field=capabilities, found=65, limit=64"), "{text}");
    }
}
