//! A process that is killed and comes back: the death notice fires at once, and the connections of
//! the process before it end as soon as it hears of them.
//!
//! The test starts itself again as the process to be killed.

#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/net.rs"]
mod net;

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use common::{identity, key};
use kvlane_proto::Role;
use kvlane_proto::msg::Purpose;
use kvlane_proto::msg::peer::PeerFrame;
use kvlane_transport::quic::{Death, Endpoint, EndpointConfig, Security};
use net::*;
use tokio::time::timeout;

const DIR: &str = "KVLANE_TEST_KILLED_DIR";
const RESET_KEY: [u8; 32] = [4; 32];

fn config(dir: std::path::PathBuf, port: u16) -> EndpointConfig {
    let listen = ([127, 0, 0, 1], port).into();
    EndpointConfig {
        reset_key: Some(RESET_KEY),
        ..EndpointConfig::new(listen, Security::Mutual { dir }, key(Role::Prefill))
    }
}

/// Not a test by itself: what the killed process runs.
#[tokio::test]
async fn the_process_to_be_killed() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let endpoint = Endpoint::bind(config(dir.into(), 0)).unwrap();
    println!("\nlistens at {}", endpoint.local_addr());
    let session = endpoint.accept().await.unwrap();
    let _parts = session.into_parts::<PeerFrame, PeerFrame>();
    std::future::pending::<()>().await;
}

#[tokio::test]
async fn a_killed_process_is_noticed_and_its_restart_ends_the_old_session() {
    let cluster = Cluster::new();
    let decode = cluster.endpoint(Role::Decode);
    let dir = cluster.dir(&identity(Role::Prefill));
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_process_to_be_killed", "--nocapture"])
        .env(DIR, &dir)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let address: std::net::SocketAddr = lines
        .find_map(|line| line.unwrap().strip_prefix("listens at ").map(|a| a.parse().unwrap()))
        .unwrap();
    let dialled = decode.dial(&address.to_string(), None, Purpose::Peer).await;
    let (tx, mut rx, mut watch) = dialled.unwrap().into_parts::<PeerFrame, PeerFrame>();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(timeout(PATIENCE, watch.died()).await.unwrap(), Death::Notice);

    let restarted = Endpoint::bind(config(dir, address.port())).unwrap();
    tx.try_send(&beat(1)).unwrap();
    match timeout(PATIENCE, watch.died()).await.unwrap() {
        Death::Closed { clean: false, why } => assert!(why.text.contains("restarted"), "{why}"),
        other => panic!("{other:?}"),
    }
    assert!(timeout(PATIENCE, rx.recv()).await.unwrap().is_err());
    serves(&decode, &restarted).await;
}
