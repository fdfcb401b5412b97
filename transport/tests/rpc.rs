//! Numbered calls over real sessions: who is talked to, and what became of a question.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::net::SocketAddr;
use std::time::Duration;

use kvlane_proto::msg::Purpose;
use kvlane_proto::msg::call::{Call, CallFrame, Reply, ReplyFrame};
use kvlane_proto::{ErrorKind, Identity, Incarnation, Refusal, Role, RoomId, WorkerKey};
use kvlane_transport::quic::{
    Endpoint, EndpointConfig, FrameReceiver, FrameSender, Security, Watch,
};
use kvlane_transport::rpc::{CallExchange, Client, Failure, Target};
use tokio::time::timeout;

const CAP: Duration = Duration::from_secs(30);

fn key(role: Role, start: u8) -> WorkerKey {
    let identity = Identity::new("c", role, "x", 0).unwrap();
    WorkerKey { identity, incarnation: Incarnation([start; 16]) }
}
fn endpoint(key: &WorkerKey) -> Endpoint {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    Endpoint::bind(EndpointConfig::new(any, Security::Insecure, key.clone())).unwrap()
}
fn target(worker: &Endpoint) -> Target {
    Target {
        address: worker.local_addr().to_string(),
        expects: Some(worker.me().identity.clone()),
        incarnation: Some(worker.me().incarnation),
        role: worker.me().identity.role,
    }
}
fn client(target: Target) -> Client<CallExchange> {
    Client::new(endpoint(&key(Role::Router, 9)), target)
}
type Parts = (FrameSender<ReplyFrame>, FrameReceiver<CallFrame>, Watch);
async fn accept(worker: &Endpoint) -> Parts {
    let session = timeout(CAP, worker.accept()).await.unwrap().unwrap();
    assert_eq!(session.purpose, Purpose::Call);
    session.into_parts()
}
async fn next(rx: &mut FrameReceiver<CallFrame>) -> CallFrame {
    timeout(CAP, rx.recv()).await.unwrap().unwrap().unwrap()
}

#[tokio::test]
async fn answers_find_their_questions_in_any_order() {
    let worker = endpoint(&key(Role::Decode, 1));
    let client = client(target(&worker));
    let ask = |room| {
        let client = client.clone();
        let call = Call::Abort { room: RoomId(room), reason: String::new() };
        tokio::spawn(async move { client.ask(call, CAP).await })
    };
    let (a, b) = (ask(1), ask(2));
    let (tx, mut rx, _watch) = accept(&worker).await;
    let (first, second) = (next(&mut rx).await, next(&mut rx).await);
    // An answer that nobody asked for is dropped.
    tx.try_send(&ReplyFrame { id: 99, reply: Ok(Reply::Pong) }).unwrap();
    for frame in [second, first] {
        let Call::Abort { room, .. } = frame.call else { panic!() };
        let reply = Err(Refusal::new(ErrorKind::NotFound, room.to_string()));
        tx.try_send(&ReplyFrame { id: frame.id, reply }).unwrap();
    }
    for (asked, room) in [(a, "1"), (b, "2")] {
        match asked.await.unwrap() {
            Err(Failure::Refused(e)) => assert_eq!(e.message(), room),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(client.sessions().borrow().count, 1);
}

#[tokio::test]
async fn what_was_sent_before_the_session_ended_is_lost_and_the_next_question_dials_again() {
    let worker = endpoint(&key(Role::Decode, 1));
    let client = client(target(&worker));
    let asking = client.clone();
    let asked = tokio::spawn(async move { asking.ask(Call::Ping, CAP).await });
    let (_tx, mut rx, watch) = accept(&worker).await;
    next(&mut rx).await;
    watch.close("enough");
    match asked.await.unwrap() {
        Err(Failure::Lost(e)) => assert_eq!(e.kind(), ErrorKind::PeerLost),
        other => panic!("{other:?}"),
    }
    let asking = client.clone();
    let asked = tokio::spawn(async move { asking.ask(Call::Ping, CAP).await });
    let (tx, mut rx, _watch) = accept(&worker).await;
    let id = next(&mut rx).await.id;
    tx.try_send(&ReplyFrame { id, reply: Ok(Reply::Pong) }).unwrap();
    assert!(matches!(asked.await.unwrap(), Ok(Reply::Pong)));
    assert_eq!(client.sessions().borrow().count, 2);
    // The last client takes the session with it.
    drop(client);
    assert!(timeout(CAP, rx.recv()).await.unwrap().unwrap().is_none());
}

#[tokio::test]
async fn no_answer_is_lost_and_nobody_there_is_unsent() {
    let worker = endpoint(&key(Role::Decode, 1));
    let short = Duration::from_millis(200);
    let silent = client(target(&worker));
    let failure = silent.ask(Call::Ping, short).await.unwrap_err();
    assert!(matches!(failure, Failure::Lost(_)), "{failure}");
    assert_eq!(failure.error().kind(), ErrorKind::DeadlineExceeded);
    let nobody = Target { address: "127.0.0.1:9".into(), ..target(&worker) };
    let failure = client(nobody).ask(Call::Ping, short).await.unwrap_err();
    assert!(matches!(failure, Failure::Unsent(_)), "{failure}");
    assert!(failure.to_string().contains("127.0.0.1:9"), "{failure}");
}

#[tokio::test]
async fn somebody_else_at_the_address_is_not_talked_to() {
    let worker = endpoint(&key(Role::Decode, 1));
    let mut other = target(&worker);
    other.expects = Some(Identity::new("c", Role::Decode, "y", 0).unwrap());
    let restarted = Target { incarnation: Some(Incarnation([7; 16])), ..target(&worker) };
    let role = Target { expects: None, role: Role::Prefill, ..target(&worker) };
    for (target, kind, named) in [
        (other, ErrorKind::IdentityMismatch, "c/decode/y/0"),
        (restarted, ErrorKind::StaleIncarnation, "070707070707"),
        (role, ErrorKind::IdentityMismatch, "any prefill"),
    ] {
        match client(target).ask(Call::Ping, CAP).await {
            Err(Failure::Unsent(e)) => {
                assert_eq!(e.kind(), kind, "{e}");
                assert!(e.to_string().contains(named), "{e}");
            }
            found => panic!("{found:?}"),
        }
    }
}
