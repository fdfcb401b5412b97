//! Who may come in: the rules that both sides of a greeting apply. No I/O.

use kvlane_proto::msg::{Hello, Purpose, Welcome};
use kvlane_proto::{ErrorKind, Identity, Result, Role, WorkerKey, limits};

use crate::wire::refuse;

/// Whether a role may dial another one for a purpose.
pub const fn may(purpose: Purpose, dialler: Role, acceptor: Role) -> bool {
    use Role::{Admin, Decode, Prefill, Router, Service};
    match purpose {
        Purpose::Peer => matches!((dialler, acceptor), (Decode, Prefill)),
        Purpose::Call => matches!((dialler, acceptor), (Router | Admin, Prefill | Decode)),
        Purpose::Service => {
            matches!((dialler, acceptor), (Prefill | Decode | Router | Admin, Service))
        }
    }
}

/// Judges a [`Hello`] at the side that was dialled; gives the version to speak.
///
/// `certificate` is the identity that the dialler's certificate proves, `None` where certificates
/// prove nothing.
///
/// # Errors
/// By name: [`ErrorKind::IdentityMismatch`], [`ErrorKind::Unauthorized`],
/// [`ErrorKind::VersionMismatch`]; counted.
pub fn judge_hello(hello: &Hello, me: &WorkerKey, certificate: Option<&Identity>) -> Result<u16> {
    judge_identity(&hello.identity, certificate)?;
    judge_cluster(&hello.identity, &me.identity)?;
    if let Some(expected) = hello.expects.as_ref().filter(|e| **e != me.identity) {
        return Err(refuse("expects", ErrorKind::IdentityMismatch, "somebody else was dialled")
            .with("dialler_expects", expected)
            .with("found", &me.identity)
            .hint("the address is stale: ask the service again"));
    }
    judge_roles(hello.purpose, &hello.identity, &me.identity)?;
    hello.choose_version().inspect_err(|_| crate::wire::count_refusal("version"))
}

/// Judges a [`Welcome`] at the side that dialled.
///
/// # Errors
/// As [`judge_hello`].
pub fn judge_welcome(
    welcome: &Welcome,
    hello: &Hello,
    certificate: Option<&Identity>,
) -> Result<()> {
    judge_identity(&welcome.identity, certificate)?;
    judge_cluster(&welcome.identity, &hello.identity)?;
    if let Some(expected) = hello.expects.as_ref().filter(|e| **e != welcome.identity) {
        return Err(refuse("expects", ErrorKind::IdentityMismatch, "somebody else answered")
            .with("expected", expected)
            .with("found", &welcome.identity)
            .hint("the address is stale: ask the service again"));
    }
    judge_roles(hello.purpose, &hello.identity, &welcome.identity)?;
    let (oldest, newest) = hello.protocol;
    if !(oldest..=newest).contains(&welcome.version) {
        return Err(refuse(
            "version",
            ErrorKind::VersionMismatch,
            "peer chose a version not offered",
        )
        .with("found", welcome.version)
        .with("expected", format!("{} to {}", limits::PROTOCOL_MIN, limits::PROTOCOL_MAX))
        .with("their_build", &welcome.build));
    }
    Ok(())
}

fn judge_identity(claimed: &Identity, certificate: Option<&Identity>) -> Result<()> {
    match certificate {
        Some(proved) if proved != claimed => {
            Err(refuse("identity", ErrorKind::IdentityMismatch, "peer is not whom it claims to be")
                .with("claims", claimed)
                .with("certificate", proved)
                .hint("start the peer with the identity of its certificate"))
        }
        _ => Ok(()),
    }
}

fn judge_cluster(theirs: &Identity, ours: &Identity) -> Result<()> {
    if theirs.cluster == ours.cluster {
        return Ok(());
    }
    Err(refuse("cluster", ErrorKind::Unauthorized, "peer is of another cluster")
        .with("found", theirs)
        .with("expected", &ours.cluster))
}

fn judge_roles(purpose: Purpose, dialler: &Identity, acceptor: &Identity) -> Result<()> {
    if may(purpose, dialler.role, acceptor.role) {
        return Ok(());
    }
    let expected = match purpose {
        Purpose::Peer => "decode dials prefill",
        Purpose::Call => "router or admin dials prefill or decode",
        Purpose::Service => "prefill, decode, router or admin dials service",
    };
    Err(refuse("role", ErrorKind::Unauthorized, "roles do not allow this")
        .with("purpose", format!("{purpose:?}"))
        .with("dialler", dialler)
        .with("acceptor", acceptor)
        .with("expected", expected))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_listed_pairs_of_roles_may_speak() {
        let roles = [Role::Prefill, Role::Decode, Role::Router, Role::Admin, Role::Service];
        let mut allowed = Vec::new();
        for purpose in [Purpose::Peer, Purpose::Call, Purpose::Service] {
            for dialler in roles {
                for acceptor in roles {
                    if may(purpose, dialler, acceptor) {
                        allowed.push((purpose, dialler, acceptor));
                    }
                }
            }
        }
        assert_eq!(
            allowed,
            [
                (Purpose::Peer, Role::Decode, Role::Prefill),
                (Purpose::Call, Role::Router, Role::Prefill),
                (Purpose::Call, Role::Router, Role::Decode),
                (Purpose::Call, Role::Admin, Role::Prefill),
                (Purpose::Call, Role::Admin, Role::Decode),
                (Purpose::Service, Role::Prefill, Role::Service),
                (Purpose::Service, Role::Decode, Role::Service),
                (Purpose::Service, Role::Router, Role::Service),
                (Purpose::Service, Role::Admin, Role::Service),
            ]
        );
    }
}
