//! A router that is a process of its own, so that it can be killed: this test binary, started again.

use kvlane_coordinator::{Coordinator, CoordinatorConfig};
use kvlane_proto::{Identity, Role};
use kvlane_transport::quic::Security;
use serde::{Deserialize, Serialize};
use tokio::process::Command;

use super::cluster::{Cluster, Router, Worker};
use super::legs::{Leg, Request};
use super::process::Process;

const ORDER: &str = "KVLANE_TEST_ROUTER";

/// What it does before it stops and waits to be killed.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    name: String,
    service: String,
    prefill: Identity,
    decode: Identity,
    prefill_serving: String,
    decode_serving: String,
    tokens: u32,
    /// Legs that it sends.
    legs: Vec<Role>,
}

/// Starts a router that reserves a room, sends these legs of it, and stops; returns the room. For no
/// tokens it reserves none.
pub(crate) async fn start(
    cluster: &Cluster,
    name: &str,
    prefill: &Worker,
    decode: &Worker,
    tokens: u32,
    legs: &[Role],
) -> (Process, Option<Request>) {
    let order = Order {
        name: name.into(),
        service: cluster.service.clone(),
        prefill: prefill.identity.clone(),
        decode: decode.identity.clone(),
        prefill_serving: prefill.serving.clone(),
        decode_serving: decode.serving.clone(),
        tokens,
        legs: legs.to_vec(),
    };
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "router_process::a_router_that_waits_to_be_killed"])
        .args(["--ignored", "--nocapture"])
        .env(ORDER, serde_json::to_string(&order).unwrap());
    let mut process = Process::spawn_command(cluster.dir(), name, command);
    loop {
        // Between lines of the test harness.
        let line = process.line().await.expect("the router stops only when it is killed");
        if let Some(request) = line.strip_prefix("stopped-with ") {
            return (process, serde_json::from_str(request).unwrap());
        }
    }
}

#[tokio::test]
#[ignore = "started by other tests as a process of its own"]
async fn a_router_that_waits_to_be_killed() {
    let order = std::env::var(ORDER).expect("started by another test");
    let order: Order = serde_json::from_str(&order).unwrap();
    let me = Identity::new("default", Role::Router, &order.name, 0).unwrap();
    let config = CoordinatorConfig::new(&order.service, Security::Insecure, me.clone());
    let coordinator = Coordinator::connect(config).await.unwrap();
    // Its end, if nobody kills it: that of whoever started it.
    let killed = || tokio::task::spawn_blocking(|| std::io::stdin().read_line(&mut String::new()));
    if order.tokens == 0 {
        println!("\nstopped-with null");
        let _ = killed().await;
        return;
    }
    let asked = kvlane_coordinator::PairRequest {
        prefill: Some(order.prefill),
        decode: Some(order.decode),
        ..Router::any(order.tokens)
    };
    let handoff = coordinator.reserve(asked).await.unwrap();
    let request = Request::of(&handoff, &me.to_string(), order.tokens);
    let mut sent = Vec::new();
    for role in order.legs {
        sent.push(match role {
            Role::Prefill => Leg::send(&order.prefill_serving, request.prefill_leg()).await,
            _ => Leg::send(&order.decode_serving, request.decode_leg()).await,
        });
    }
    println!("\nstopped-with {}", serde_json::to_string(&request).unwrap());
    let _ = killed().await;
    handoff.detach();
}
