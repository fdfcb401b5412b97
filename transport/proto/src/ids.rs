//! Names of things: who a worker is, which start of it, which room, which grant.
//!
//! Nothing here is a secret and nothing here proves anything: identity is proved by the
//! certificate (`transport::quic`), and a room number only has to be unique.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

use crate::error::{Error, ErrorKind, Result};
use crate::limits;

/// What a process may do. It stands in the certificate and is enforced per message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Role {
    /// Reads prompts, sends pages.
    Prefill,
    /// Receives pages, writes answers.
    Decode,
    /// Places hand-offs.
    Router,
    /// May abort any room of its cluster.
    Admin,
    /// The bootstrap service.
    Service,
}

impl Role {
    /// The word used in certificates, flags and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Router => "router",
            Self::Admin => "admin",
            Self::Service => "service",
        }
    }
    /// The role a worker of this role hands off with.
    pub const fn counterpart(self) -> Option<Role> {
        match self {
            Self::Prefill => Some(Self::Decode),
            Self::Decode => Some(Self::Prefill),
            _ => None,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Role {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        [Self::Prefill, Self::Decode, Self::Router, Self::Admin, Self::Service]
            .into_iter()
            .find(|r| r.as_str() == s)
            .ok_or_else(|| {
                Error::new(ErrorKind::Malformed, "unknown role")
                    .with("found", s)
                    .with("expected", "prefill, decode, router, admin or service")
            })
    }
}

/// Who somebody is: `cluster/role/instance/rank`, the same as in its certificate.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Identity {
    /// The PD cluster; nothing crosses clusters.
    pub cluster: String,
    /// What it may do.
    pub role: Role,
    /// One model server, or one router.
    pub instance: String,
    /// The rank in the instance; 0 for routers and services.
    pub rank: u32,
}

impl Identity {
    /// Checks the names: letters, digits, `.`, `_`, `-`, at most
    /// [`limits::NAME_BYTES_MAX`] bytes, so that an identity is a valid URI path and label.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`] naming the part.
    pub fn new(cluster: &str, role: Role, instance: &str, rank: u32) -> Result<Self> {
        for (part, value) in [("cluster", cluster), ("instance", instance)] {
            let fine = !value.is_empty()
                && value.len() <= limits::NAME_BYTES_MAX
                && value.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
            if !fine {
                return Err(Error::new(ErrorKind::Malformed, format!("bad {part} name"))
                    .with("found", format!("{:?}", value.chars().take(80).collect::<String>()))
                    .hint(format!(
                        "use 1 to {} letters, digits, '.', '_' or '-'",
                        limits::NAME_BYTES_MAX
                    )));
            }
        }
        Ok(Self { cluster: cluster.into(), role, instance: instance.into(), rank })
    }
    /// Checks an identity that came from outside.
    ///
    /// # Errors
    /// As [`Identity::new`].
    pub fn check(&self) -> Result<()> {
        Self::new(&self.cluster, self.role, &self.instance, self.rank).map(drop)
    }
    /// The URI in the certificate's subject alternative name.
    pub fn to_uri(&self) -> String {
        format!("kvlane://{self}")
    }
    /// Reads what [`Identity::to_uri`] wrote.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`].
    pub fn from_uri(uri: &str) -> Result<Self> {
        uri.strip_prefix("kvlane://")
            .ok_or_else(|| {
                Error::new(ErrorKind::Malformed, "identity is not a kvlane:// URI")
                    .with("found", uri.chars().take(200).collect::<String>())
            })?
            .parse()
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}/{}", self.cluster, self.role, self.instance, self.rank)
    }
}

impl FromStr for Identity {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let parts: Vec<&str> = s.split('/').collect();
        let bad = || {
            Error::new(ErrorKind::Malformed, "identity must be cluster/role/instance/rank")
                .with("found", s.chars().take(200).collect::<String>())
        };
        let [cluster, role, instance, rank] = parts[..] else { return Err(bad()) };
        Self::new(cluster, role.parse()?, instance, rank.parse().map_err(|_| bad())?)
    }
}

/// One start of a process: random, compared for equality only.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Incarnation(pub [u8; 16]);

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..6].iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}
impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Incarnation({self})")
    }
}

/// A worker as a peer sees it: who, and which start of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct WorkerKey {
    /// Who.
    pub identity: Identity,
    /// Which start.
    pub incarnation: Incarnation,
}

impl fmt::Display for WorkerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.identity, self.incarnation)
    }
}

/// One request's hand-off. At most 2^63−1, so that SGLang's `bootstrap_room` can carry it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RoomId(pub u64);

impl RoomId {
    /// Bits left free at the low end for `room mod dp_size`.
    pub const LOW_BITS: u32 = 9;
    /// Bits of the issuer's own counter.
    pub const COUNTER_BITS: u32 = 40;
    /// Bits of the issuer slot; `1 + SLOT + COUNTER + LOW = 64`.
    pub const SLOT_BITS: u32 = 14;
    /// The largest room number.
    pub const MAX: RoomId = RoomId(i64::MAX as u64);

    /// A room that is unique by itself, and congruent to `dp_rank` modulo `dp_size`.
    ///
    /// # Errors
    /// [`ErrorKind::LimitExceeded`] if a part does not fit its bits.
    pub fn issue(slot: u16, counter: u64, dp_rank: u32, dp_size: u32) -> Result<Self> {
        let fits = u32::from(slot) >> Self::SLOT_BITS == 0
            && counter >> Self::COUNTER_BITS == 0
            && (1..=1 << (Self::LOW_BITS - 1)).contains(&dp_size)
            && dp_rank < dp_size;
        if !fits {
            return Err(Error::new(ErrorKind::LimitExceeded, "room number does not fit")
                .with("slot", slot)
                .with("counter", counter)
                .with("dp_rank", dp_rank)
                .with("dp_size", dp_size)
                .hint("lease a fresh issuer slot; dp_size may be 1 to 256"));
        }
        let base = (u64::from(slot) << (Self::COUNTER_BITS + Self::LOW_BITS))
            | (counter << Self::LOW_BITS);
        let size = u64::from(dp_size);
        let low = (u64::from(dp_rank) + size - base % size) % size;
        Ok(Self(base + low))
    }
    /// The slot of the issuer, for rooms made by [`RoomId::issue`].
    pub const fn slot(self) -> u16 {
        (self.0 >> (Self::COUNTER_BITS + Self::LOW_BITS)) as u16
    }
}

impl fmt::Display for RoomId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number of one grant: unique within the decode worker's incarnation, never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GrantId(pub u64);

impl GrantId {
    /// Stands for "no grant" in messages about a room that never had one.
    pub const NONE: GrantId = GrantId(0);
}

impl fmt::Display for GrantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A link as its local side numbers it; never on the wire, never reused in one incarnation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkId(pub u64);

/// One connection or queue pair of a link: an index into the link's pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LaneId(pub u16);

/// The number of a part in its room's grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PartId(pub u32);

/// What makes a repeated request the same request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct IdempotencyKey(pub [u8; 16]);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_round_trips_and_refuses_bad_names() {
        let id = Identity::new("c1", Role::Prefill, "p-0", 3).unwrap();
        assert_eq!(Identity::from_uri(&id.to_uri()).unwrap(), id);
        for bad in ["", "a/b", "é", &"x".repeat(limits::NAME_BYTES_MAX + 1)] {
            assert_eq!(
                Identity::new("c1", Role::Decode, bad, 0).unwrap_err().kind(),
                ErrorKind::Malformed
            );
        }
        assert!("c1/prefill/p-0".parse::<Identity>().is_err());
        assert!("c1/prefill/p-0/-1".parse::<Identity>().is_err());
    }

    #[test]
    fn rooms_are_unique_bounded_and_follow_the_dp_rank() {
        let mut seen = std::collections::HashSet::new();
        for slot in [0, 1, (1 << 14) - 1] {
            for counter in [0, 1, (1 << 40) - 1] {
                for (rank, size) in [(0, 1), (2, 3), (255, 256)] {
                    let room = RoomId::issue(slot, counter, rank, size).unwrap();
                    assert!(room <= RoomId::MAX);
                    assert_eq!(room.0 % u64::from(size), u64::from(rank));
                    assert_eq!(room.slot(), slot);
                    assert_eq!(room.0 >> RoomId::LOW_BITS & ((1 << 40) - 1), counter);
                    seen.insert((slot, counter, room.0 >> RoomId::LOW_BITS));
                }
            }
        }
        assert_eq!(seen.len(), 9);
        assert!(RoomId::issue(1 << 14, 0, 0, 1).is_err());
        assert!(RoomId::issue(0, 1 << 40, 0, 1).is_err());
        assert!(RoomId::issue(0, 0, 3, 3).is_err());
    }
}
