//! What hostile or broken peers do: each is a counted refusal, and a good peer is served before,
//! during and after.

#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/net.rs"]
mod net;

use common::{hello, identity, key};
use kvlane_proto::msg::peer::PeerFrame;
use kvlane_proto::msg::{Greeting, Hello, Purpose};
use kvlane_proto::{ErrorKind, Incarnation, Role, limits};
use kvlane_transport::quic::endpoint::GREETINGS_PER_ADDRESS_MAX;
use kvlane_transport::quic::{Death, Endpoint, EndpointConfig, Security};
use kvlane_transport::wire::{FrameReader, HEADER_BYTES};
use net::*;
use tokio::io::AsyncWriteExt;

fn with_length(mut frame: Vec<u8>, length: u32) -> Vec<u8> {
    frame[2..HEADER_BYTES].copy_from_slice(&length.to_le_bytes());
    frame
}

#[tokio::test]
async fn broken_greetings_are_counted_and_cost_only_their_connection() {
    let _turn = turn().await;
    let cluster = Cluster::new();
    let prefill = cluster.endpoint(Role::Prefill);
    let decode = cluster.endpoint(Role::Decode);
    serves(&decode, &prefill).await;

    let good = hello_frame(good_hello());
    let body = good.len() - HEADER_BYTES;
    let mut trailing = with_length(good.clone(), body as u32 + 1);
    trailing.push(0);
    let mut magic = good.clone();
    magic[0] = 0xB2;
    let mut family = good.clone();
    family[1] = 2;
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("oversized", with_length(good.clone(), limits::HELLO_FRAME_BYTES_MAX as u32 + 1)),
        ("oversized", with_length(good.clone(), 1 << 30)),
        ("oversized", with_length(good.clone(), u32::MAX)),
        ("truncated", good[..good.len() - 1].to_vec()),
        ("truncated", good[..3].to_vec()),
        ("truncated", vec![]),
        ("trailing", trailing),
        ("undecodable", with_length(good[..good.len() - 9].to_vec(), body as u32 - 9)),
        ("magic", magic),
        ("magic", b"GET / HTTP/1.1\r\n\r\n".to_vec()),
        ("family", family),
        ("unsound", hello_frame(Hello { build: "x".repeat(64), ..good_hello() })),
    ];
    let stranger = cluster.stranger(Role::Decode);
    for (reason, bytes) in cases {
        let before = refusals(reason);
        let (connection, _send, _recv) = stranger.says(&prefill, &bytes, true).await;
        let closed = tokio::time::timeout(PATIENCE, connection.closed()).await.unwrap();
        assert!(matches!(closed, quinn::ConnectionError::ApplicationClosed(_)), "{closed}");
        assert_eq!(refusals(reason), before + 1, "{reason}");
    }
    serves(&decode, &prefill).await;
}

#[tokio::test]
async fn greetings_that_may_not_be_are_refused_by_name() {
    let _turn = turn().await;
    let cluster = Cluster::new();
    let prefill = cluster.endpoint(Role::Prefill);
    let decode = cluster.endpoint(Role::Decode);
    let mut other_cluster = good_hello();
    other_cluster.identity.cluster = "c2".into();
    let mut other_rank = good_hello();
    other_rank.identity.rank += 1;
    let cases = [
        ("version", ErrorKind::VersionMismatch, Hello { protocol: (9, 9), ..good_hello() }),
        ("role", ErrorKind::Unauthorized, hello(Role::Decode, Purpose::Call)),
        ("role", ErrorKind::Unauthorized, hello(Role::Decode, Purpose::Service)),
        ("identity", ErrorKind::IdentityMismatch, other_rank),
        ("identity", ErrorKind::IdentityMismatch, other_cluster),
        ("identity", ErrorKind::IdentityMismatch, hello(Role::Admin, Purpose::Call)),
        (
            "expects",
            ErrorKind::IdentityMismatch,
            Hello { expects: Some(identity(Role::Decode)), ..good_hello() },
        ),
    ];
    let stranger = cluster.stranger(Role::Decode);
    for (reason, kind, hello) in cases {
        let before = refusals(reason);
        let (_connection, _send, mut answers) =
            stranger.says(&prefill, &hello_frame(hello), false).await;
        match answers.next::<Greeting>(limits::HELLO_FRAME_BYTES_MAX).await.unwrap() {
            Some(Greeting::Refused(why)) => assert_eq!(why.kind, kind, "{why}"),
            other => panic!("{reason}: {other:?}"),
        }
        assert_eq!(refusals(reason), before + 1, "{reason}");
    }
    serves(&decode, &prefill).await;
}

#[tokio::test]
async fn a_dialler_is_told_why_and_checks_who_answers() {
    let _turn = turn().await;
    let cluster = Cluster::new();
    let prefill = cluster.endpoint(Role::Prefill);
    let decode = cluster.endpoint(Role::Decode);
    let address = prefill.local_addr().to_string();
    let e = decode.dial(&address, Some(&identity(Role::Decode)), Purpose::Peer).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::IdentityMismatch, "{e}");
    assert!(e.to_string().contains("c1/decode/decode-0/3"), "{e}");
    assert!(e.to_string().contains("c1/prefill/prefill-0/3"), "{e}");
    let e = prefill.dial(&decode.local_addr().to_string(), None, Purpose::Peer).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unauthorized, "{e}");
    let e = decode.dial("no-such-host.invalid:1", None, Purpose::Peer).await.unwrap_err();
    assert!(e.to_string().contains("no-such-host.invalid:1"), "{e}");
    decode.dial(&address, Some(&identity(Role::Prefill)), Purpose::Peer).await.unwrap();
}

#[tokio::test]
async fn certificates_of_another_ca_or_cluster_are_refused_on_both_sides() {
    let _turn = turn().await;
    let (ours, theirs) = (Cluster::new(), Cluster::new());
    let prefill = ours.endpoint(Role::Prefill);
    // Another CA that issued the very same identity.
    let e = theirs
        .endpoint(Role::Decode)
        .dial(&prefill.local_addr().to_string(), None, Purpose::Peer)
        .await
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unauthorized, "{e}");
    // A dialler that does not look at the server's certificate is refused by ours.
    let before = refusals("tls");
    let dir = theirs.dir(&identity(Role::Decode));
    std::fs::copy(ours.ca().join("ca.pem"), dir.join("ca.pem")).unwrap();
    let stranger = Stranger::new(&dir);
    if let Ok(connection) = stranger.connect(&prefill).await {
        tokio::time::timeout(PATIENCE, connection.closed()).await.unwrap();
    }
    refused("tls", before).await;
    // One CA, trusted by both, with an identity of another cluster.
    let two = Cluster::named("c2");
    let mut me = key(Role::Decode);
    me.identity.cluster = "c2".into();
    let dir = two.dir(&me.identity);
    for (a, b) in [
        (dir.join("ca.pem"), ours.ca()),
        (ours.dir(&identity(Role::Prefill)).join("ca.pem"), two.ca()),
    ] {
        let both = std::fs::read_to_string(&a).unwrap()
            + &std::fs::read_to_string(b.join("ca.pem")).unwrap();
        std::fs::write(&a, both).unwrap();
    }
    let before = refusals("cluster");
    let config = EndpointConfig::new(([127, 0, 0, 1], 0).into(), Security::Mutual { dir }, me);
    let e = Endpoint::bind(config)
        .unwrap()
        .dial(&prefill.local_addr().to_string(), None, Purpose::Peer)
        .await
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unauthorized, "{e}");
    assert_eq!(refusals("cluster"), before + 1);
    serves(&ours.endpoint(Role::Decode), &prefill).await;
}

#[tokio::test]
async fn slow_and_half_open_greetings_end_at_their_deadline_and_hold_up_nobody() {
    let _turn = turn().await;
    let cluster = Cluster::new();
    let prefill =
        Endpoint::bind(EndpointConfig { handshake_ms: 3_000, ..cluster.config(Role::Prefill) })
            .unwrap();
    // Elsewhere, so that the flood's own share of the table is not this peer's.
    let decode = Endpoint::bind(EndpointConfig {
        listen: ([127, 0, 0, 2], 0).into(),
        ..cluster.config(Role::Decode)
    })
    .unwrap();
    let (timeouts, floods) = (refusals("greeting_timeout"), refusals("greeting_flood"));
    let stranger = cluster.stranger(Role::Decode);
    let slow = stranger.says(&prefill, &[0xB1], false).await;
    let mut held = Vec::new();
    for _ in 0..GREETINGS_PER_ADDRESS_MAX * 2 {
        match stranger.connect(&prefill).await {
            Ok(connection) => held.push(connection),
            Err(_) => break,
        }
    }
    refused("greeting_flood", floods).await;
    serves(&decode, &prefill).await;
    let closed = tokio::time::timeout(PATIENCE, slow.0.closed()).await.unwrap();
    assert!(matches!(closed, quinn::ConnectionError::ApplicationClosed(_)), "{closed}");
    for connection in held {
        tokio::time::timeout(PATIENCE, connection.closed()).await.unwrap();
    }
    assert!(refusals("greeting_timeout") + refusals("slow") > timeouts);
    serves(&cluster.endpoint(Role::Decode), &prefill).await;
}

#[tokio::test]
async fn a_frame_that_began_has_a_deadline() {
    let _turn = turn().await;
    let before = refusals("slow");
    let (mut ours, theirs) = tokio::io::duplex(64);
    let mut reader = FrameReader::new(theirs).with_deadline(std::time::Duration::from_millis(50));
    ours.write_all(&[0xB1, 2, 0, 0, 64, 0]).await.unwrap();
    let e = reader.next::<PeerFrame>(limits::FRAME_BYTES_MAX).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::DeadlineExceeded);
    assert_eq!(refusals("slow"), before + 1);
}

#[tokio::test]
async fn a_welcomed_peer_that_breaks_the_protocol_loses_its_session_only() {
    let _turn = turn().await;
    let cluster = Cluster::new();
    let prefill = cluster.endpoint(Role::Prefill);
    let decode = cluster.endpoint(Role::Decode);
    let (good_a, good_b) = pair(&decode, &prefill, Purpose::Peer).await;
    let stranger = cluster.stranger(Role::Decode);
    let (connection, mut send, mut answers) =
        stranger.says(&prefill, &hello_frame(good_hello()), false).await;
    let bad = prefill.accept().await.unwrap();
    let welcome = answers.next::<Greeting>(limits::HELLO_FRAME_BYTES_MAX).await.unwrap();
    assert!(matches!(welcome, Some(Greeting::Welcome(_))));
    let (_tx, mut rx, _watch) = bad.into_parts::<PeerFrame, PeerFrame>();
    let before = refusals("oversized");
    send.write_all(&[0xB1, 2, 0xFF, 0xFF, 0xFF, 0xFF]).await.unwrap();
    assert_eq!(rx.recv().await.unwrap_err().kind(), ErrorKind::LimitExceeded);
    assert_eq!(refusals("oversized"), before + 1);
    tokio::time::timeout(PATIENCE, connection.closed()).await.unwrap();
    let (tx, _rx, _watch) = good_a.into_parts::<PeerFrame, PeerFrame>();
    let (_tx, mut rx, _watch_b) = good_b.into_parts::<PeerFrame, PeerFrame>();
    tx.try_send(&beat(1)).unwrap();
    assert_eq!(rx.recv().await.unwrap(), Some(beat(1)));
}

#[tokio::test]
async fn a_process_that_dies_is_noticed_and_an_unknown_token_is_refused() {
    let _turn = turn().await;
    let cluster = Cluster::new();
    let prefill = cluster.endpoint(Role::Prefill);
    let stranger = cluster.stranger(Role::Decode);
    let (_connection, _send, mut answers) =
        stranger.says(&prefill, &hello_frame(good_hello()), false).await;
    let session = prefill.accept().await.unwrap();
    assert_eq!(session.peer.incarnation, Incarnation(*b"0123456789abcdef"));
    let welcome = match answers.next::<Greeting>(limits::HELLO_FRAME_BYTES_MAX).await.unwrap() {
        Some(Greeting::Welcome(welcome)) => welcome,
        other => panic!("{other:?}"),
    };
    let port = ("127.0.0.1", welcome.notice_port);
    let before = refusals("notice_token");
    let mut unknown = tokio::net::TcpStream::connect(port).await.unwrap();
    unknown.write_all(&[1; 16]).await.unwrap();
    refused("notice_token", before).await;
    let before = refusals("notice_truncated");
    drop(tokio::net::TcpStream::connect(port).await.unwrap());
    refused("notice_truncated", before).await;

    let mut idle = tokio::net::TcpStream::connect(port).await.unwrap();
    idle.write_all(&welcome.notice_token).await.unwrap();
    let (_tx, _rx, mut watch) = session.into_parts::<PeerFrame, PeerFrame>();
    // The kernel of a killed process does the same: it ends the connection, and no byte before.
    drop(idle);
    let death = tokio::time::timeout(PATIENCE, watch.died()).await.unwrap();
    assert_eq!(death, Death::Notice);
    // A token is good once.
    let before = refusals("notice_token");
    let mut again = tokio::net::TcpStream::connect(port).await.unwrap();
    again.write_all(&welcome.notice_token).await.unwrap();
    refused("notice_token", before).await;
}
