//! Clusters whose processes prove who they are.

use std::path::Path;
use std::process::{Command, Output};

use kvlane_coordinator::{Coordinator, CoordinatorConfig};
use kvlane_proto::{ErrorKind, Identity, Role};
use kvlane_transport::quic::Security;

use super::cluster::{Cluster, POOL_TOKENS, Scratch, Trust, certificate};
use super::process::{until, within};

fn kvlane(args: &[&str]) -> Output {
    Command::new(super::binary::path()).args(args).output().unwrap()
}

/// Runs `kvlane ca …`, which has to succeed.
fn ca(args: &[&str]) {
    let out = kvlane(&[&["ca"], args].concat());
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[tokio::test]
async fn a_cluster_with_certificates_works_and_takes_up_renewed_ones() {
    let dir = Scratch::new();
    let authority = dir.path().join("ca");
    ca(&["create", "--dir", text(&authority)]);
    let certs = dir.path().join("certs-prefill-p");
    ca(&[
        "issue",
        "--ca",
        text(&authority),
        "--out",
        text(&certs),
        "--identity",
        "default/prefill/p/0",
    ]);
    let cluster = Cluster::start_in(dir, Trust::Ca(authority.clone())).await;
    let router = cluster.router("r").await;
    let (prefill, decode) = tokio::join!(
        cluster.worker(Role::Prefill, "p", &[]),
        cluster.worker(Role::Decode, "d", &[]),
    );
    router.sees(&prefill).await;
    router.sees(&decode).await;
    router.hand_off(&prefill, &decode, POOL_TOKENS).await;

    let before = std::fs::read(certs.join("cert.pem")).unwrap();
    ca(&["renew", "--ca", text(&authority), "--certs", text(&certs)]);
    assert_ne!(before, std::fs::read(certs.join("cert.pem")).unwrap());
    assert!(!prefill.process.log().contains("certificate reloaded"));
    // What stands goes on with the old one; whoever comes now meets the new one.
    router.hand_off(&prefill, &decode, POOL_TOKENS).await;
    let newcomer = cluster.worker(Role::Decode, "d2", &[]).await;
    router.sees(&newcomer).await;
    router.assert_clean(&prefill, &newcomer).await;
    until("the renewed certificate is taken up", || {
        prefill
            .process
            .log()
            .contains("certificate reloaded identity=default/prefill/p/0")
            .then_some(())
    })
    .await;
    router.assert_clean(&prefill, &decode).await;
}

#[tokio::test]
async fn a_certificate_is_good_for_its_own_role_and_cluster_only() {
    let dir = Scratch::new();
    let authority = dir.path().join("ca");
    let foreign = dir.path().join("foreign");
    ca(&["create", "--dir", text(&authority)]);
    ca(&["create", "--dir", text(&foreign)]);
    let cluster = Cluster::start_in(dir, Trust::Ca(authority.clone())).await;
    let worker = |role: &str, certs: &Path| {
        kvlane(&[
            "worker",
            "--role",
            role,
            "--service",
            &cluster.service,
            "--model",
            "tiny",
            "--pool-mib",
            "1",
            "--certs",
            text(certs),
        ])
    };
    // Of another role: it does not even start, and says how to get the right one.
    let decode = Identity::new("default", Role::Decode, "d", 0).unwrap();
    let out = worker("prefill", &certificate(&authority, cluster.dir(), &decode));
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.contains("found=default/decode/d/0, expected=prefill"), "{said}");
    assert!(said.contains("fix: issue one: kvlane ca issue --identity"), "{said}");
    // Of another authority: it gets no lease.
    let mallory = Identity::new("default", Role::Prefill, "m", 0).unwrap();
    let certs = certificate(&foreign, cluster.dir(), &mallory);
    let out = tokio::task::spawn_blocking({
        let (service, certs) = (cluster.service.clone(), certs.clone());
        move || {
            kvlane(&[
                "worker",
                "--role",
                "prefill",
                "--service",
                &service,
                "--model",
                "tiny",
                "--pool-mib",
                "1",
                "--certs",
                text(&certs),
            ])
        }
    });
    let out = within("a worker that nobody knows", out).await.unwrap();
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(out.stdout.is_empty(), "it never said that it is ready");
    assert!(said.contains("certificate"), "{said}");
    // Nor does a router.
    let identity = Identity::new("default", Role::Router, "m", 0).unwrap();
    let security = Security::Mutual { dir: certificate(&foreign, cluster.dir(), &identity) };
    let mut config = CoordinatorConfig::new(&cluster.service, security, identity);
    config.connect_ms = 3_000;
    let e = Coordinator::connect(config).await.expect_err("no router of another authority");
    assert!(matches!(e.kind(), ErrorKind::Unauthorized | ErrorKind::DeadlineExceeded), "{e}");
    assert!(e.to_string().contains("certificate"), "{e}");
    // None of it is seen.
    let router = cluster.router("r").await;
    assert_eq!(router.coordinator.snapshot().workers().count(), 0);
}
