//! What sessions promise: frames in order, clean ends that are not deaths, certificates that change
//! while the process runs.

#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/net.rs"]
mod net;

use std::os::unix::fs::PermissionsExt;

use common::{identity, key};
use kvlane_proto::msg::Purpose;
use kvlane_proto::msg::peer::{PeerFrame, PeerMsg};
use kvlane_proto::{ErrorKind, Refusal, Role};
use kvlane_transport::quic::session::SEND_QUEUE_FRAMES_MAX;
use kvlane_transport::quic::{Death, Endpoint, EndpointConfig, Security, ca, load_reset_key, tls};
use net::*;
use tokio::time::timeout;

#[tokio::test]
async fn frames_arrive_in_order_and_the_last_one_before_a_clean_end() {
    let _turn = turn().await;
    let cluster = Cluster::new();
    let (prefill, decode) = (cluster.endpoint(Role::Prefill), cluster.endpoint(Role::Decode));
    let (a, b) = pair(&decode, &prefill, Purpose::Peer).await;
    assert_eq!((&a.peer, &b.peer), (prefill.me(), decode.me()));
    assert!(a.dialled && !b.dialled);
    let (tx, rx_a, watch_a) = a.into_parts::<PeerFrame, PeerFrame>();
    let (_tx, mut rx, mut watch) = b.into_parts::<PeerFrame, PeerFrame>();
    for seq in 1..=500 {
        tx.send(&beat(seq)).await.unwrap();
    }
    let why = Refusal::new(ErrorKind::Draining, "going");
    let bye = PeerFrame { seq: 501, echo: 0, msg: PeerMsg::Bye(why) };
    tx.try_send(&bye).unwrap();
    drop((tx, rx_a, watch_a));
    for seq in 1..=500 {
        assert_eq!(timeout(PATIENCE, rx.recv()).await.unwrap().unwrap(), Some(beat(seq)));
    }
    assert_eq!(rx.recv().await.unwrap(), Some(bye));
    assert_eq!(timeout(PATIENCE, rx.recv()).await.unwrap().unwrap(), None);
    drop(rx);
    match timeout(PATIENCE, watch.died()).await.unwrap() {
        Death::Closed { clean: true, .. } => {}
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn ends_on_purpose_are_clean_from_either_side() {
    let _turn = turn().await;
    let cluster = Cluster::new();
    let (prefill, decode) = (cluster.endpoint(Role::Prefill), cluster.endpoint(Role::Decode));
    let deaths = count("kvlane_death_notices_total");
    for acceptor_ends in [false, true] {
        let (a, b) = pair(&decode, &prefill, Purpose::Peer).await;
        let (ends, stays) = if acceptor_ends { (b, a) } else { (a, b) };
        let (tx, mut rx, mut watch) = stays.into_parts::<PeerFrame, PeerFrame>();
        let (_tx, _rx, ender) = ends.into_parts::<PeerFrame, PeerFrame>();
        ender.close("done");
        assert_eq!(timeout(PATIENCE, rx.recv()).await.unwrap().unwrap(), None);
        let death = timeout(PATIENCE, watch.died()).await.unwrap();
        assert!(matches!(death, Death::Closed { clean: true, .. }), "{death:?}");
        let lost = async {
            while tx.try_send(&beat(1)).is_ok() {
                tokio::task::yield_now().await;
            }
            tx.try_send(&beat(1)).unwrap_err().kind()
        };
        assert_eq!(timeout(PATIENCE, lost).await.unwrap(), ErrorKind::PeerLost);
    }
    assert_eq!(count("kvlane_death_notices_total"), deaths);
}

#[tokio::test]
async fn a_full_queue_is_busy_and_not_a_wait() {
    let _turn = turn().await;
    let cluster = Cluster::new();
    let (prefill, decode) = (cluster.endpoint(Role::Prefill), cluster.endpoint(Role::Decode));
    let (a, b) = pair(&decode, &prefill, Purpose::Peer).await;
    let (tx, _rx, _watch) = a.into_parts::<PeerFrame, PeerFrame>();
    // No await: the writer does not run between two of these.
    let mut sent = 0;
    let e = loop {
        match tx.try_send(&beat(sent + 1)) {
            Ok(()) => sent += 1,
            Err(e) => break e,
        }
    };
    assert_eq!((sent, e.kind()), (SEND_QUEUE_FRAMES_MAX as u64, ErrorKind::Busy));
    let (_tx, mut rx, _watch_b) = b.into_parts::<PeerFrame, PeerFrame>();
    for seq in 1..=sent {
        assert_eq!(timeout(PATIENCE, rx.recv()).await.unwrap().unwrap(), Some(beat(seq)));
    }
}

#[tokio::test]
async fn a_renewed_certificate_is_used_by_the_next_connection_and_a_broken_one_is_not() {
    let _turn = turn().await;
    let cluster = Cluster::new();
    let (prefill, decode) = (cluster.endpoint(Role::Prefill), cluster.endpoint(Role::Decode));
    let dir = cluster.dir(&identity(Role::Prefill));
    let stranger = cluster.stranger(Role::Decode);
    let shown = async || {
        let connection = stranger.connect(&prefill).await.unwrap();
        let chain = connection.peer_identity().unwrap();
        chain.downcast::<Vec<rustls::pki_types::CertificateDer<'static>>>().unwrap()[0].to_vec()
    };
    let first = shown().await;
    let renewed = ca::renew(&cluster.ca(), &dir, 5).unwrap();
    assert_eq!(renewed, identity(Role::Prefill));
    let second = shown().await;
    assert_ne!(first, second);
    serves(&decode, &prefill).await;

    let broken = count("kvlane_certificate_reloads_total/broken");
    std::fs::write(dir.join("cert.pem"), "not a certificate").unwrap();
    assert_eq!(shown().await, second);
    assert_eq!(count("kvlane_certificate_reloads_total/broken"), broken + 1);
    serves(&decode, &prefill).await;
}

#[tokio::test]
async fn a_ca_refuses_by_name_and_keeps_its_keys_to_itself() {
    let cluster = Cluster::new();
    let who = identity(Role::Prefill);
    let dir = cluster.dir(&who);
    assert_eq!(tls::identity_of(&dir).unwrap(), who);
    for file in [cluster.ca().join("ca-key.pem"), dir.join("key.pem")] {
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    }
    let config = |r: kvlane_proto::Result<()>, says: &str| {
        let e = r.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Config, "{e}");
        assert!(e.to_string().contains(says), "{e}");
    };
    config(ca::create_ca(&cluster.ca(), "c1"), "there is a CA already");
    config(ca::issue(&cluster.ca(), &dir, &who, 1), "there is a certificate already");
    config(ca::issue(&dir, &cluster.scratch.path("x"), &who, 1), "not a kvlane CA");
    config(ca::issue(&cluster.ca(), &cluster.scratch.path("x"), &who, 0), "life is out of range");
    let mut other = who.clone();
    other.cluster = "c2".into();
    config(ca::issue(&cluster.ca(), &cluster.scratch.path("x"), &other, 1), "another cluster");
    config(ca::renew(&cluster.ca(), &cluster.scratch.path("x"), 1).map(drop), "cannot be opened");
    assert!(!cluster.scratch.path("x").exists(), "a refusal leaves no trace");
}

#[tokio::test]
async fn endpoints_refuse_what_cannot_be_meant() {
    let cluster = Cluster::new();
    let config = EndpointConfig { me: key(Role::Decode), ..cluster.config(Role::Prefill) };
    assert_eq!(Endpoint::bind(config).unwrap_err().kind(), ErrorKind::IdentityMismatch);
    let everywhere =
        EndpointConfig::new(([0, 0, 0, 0], 0).into(), Security::Insecure, key(Role::Decode));
    assert_eq!(Endpoint::bind(everywhere).unwrap_err().kind(), ErrorKind::Config);
}

#[tokio::test]
async fn insecure_endpoints_serve_each_other_and_nobody_else() {
    let _turn = turn().await;
    let cluster = Cluster::new();
    let insecure = |role| {
        let listen = ([127, 0, 0, 1], 0).into();
        Endpoint::bind(EndpointConfig::new(listen, Security::Insecure, key(role))).unwrap()
    };
    let (prefill, decode) = (insecure(Role::Prefill), insecure(Role::Decode));
    serves(&decode, &prefill).await;
    let secure = cluster.endpoint(Role::Decode);
    let e = secure.dial(&prefill.local_addr().to_string(), None, Purpose::Peer).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unauthorized, "{e}");
    let secure = cluster.endpoint(Role::Prefill);
    let e = decode.dial(&secure.local_addr().to_string(), None, Purpose::Peer).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unauthorized, "{e}");
}

#[tokio::test]
async fn a_reset_key_is_made_once_and_a_wrong_one_refused() {
    let scratch = Scratch::new();
    let path = scratch.path("reset.key");
    let key = load_reset_key(&path).unwrap();
    assert_eq!(load_reset_key(&path).unwrap(), key);
    std::fs::write(&path, [0; 31]).unwrap();
    assert_eq!(load_reset_key(&path).unwrap_err().kind(), ErrorKind::Config);
}
