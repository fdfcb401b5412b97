//! A router that embeds the coordinator: places two hand-offs, lets one run and aborts the other.
//! The bootstrap service and the workers run in this process too, so that nothing else is needed.
//!
//! ```text
//! cargo run --example embed_in_router
//! ```

use std::time::Duration;

use kvlane_actors::{
    AttachRequest, ChunkRequest, DecodeHandle, DecodeWorker, EngineChoice, LendRequest, Pools,
    PrefillHandle, PrefillWorker, Ready, Takers, WorkerConfig,
};
use kvlane_bootstrap::{Bootstrap, BootstrapConfig};
use kvlane_coordinator::{Coordinator, CoordinatorConfig, Handoff, PairRequest};
use kvlane_examples::{check_prompt, layout, write_prompt};
use kvlane_proto::{BlockList, Identity, Outcome, Result, Role, Span};
use kvlane_transport::engine::tcp::TcpConfig;
use kvlane_transport::quic::Security;

const DEADLINE: Duration = Duration::from_secs(10);
const TOKENS: u32 = 40;

fn worker(role: Role, service: &str) -> Result<(WorkerConfig, Pools)> {
    let identity = Identity::new("example", role, "w0", 0)?;
    let pool = Pools::own(layout(), 32)?;
    let engine = EngineChoice::Tcp(TcpConfig::default());
    let mut config = WorkerConfig::new(identity, Security::Insecure, pool.clone(), engine);
    config.service = Some(service.into());
    Ok((config, pool))
}

/// What the decode's model server does with its leg.
async fn decode_leg(decode: &DecodeHandle, pool: &Pools, handoff: &Handoff) -> Result<Outcome> {
    let blocks = [4, 5, 6];
    let filling = decode
        .lend(LendRequest {
            room: handoff.room,
            span: Span { tokens: TOKENS, prefix_tokens: 0 },
            blocks: vec![BlockList::from_ids(&blocks)],
            prefills: handoff.decode[0].peers.clone(),
            deadline: DEADLINE,
        })
        .await?;
    let ending = filling.ended().await?;
    let outcome = ending.outcome.clone();
    if outcome.is_done() {
        println!("decode:  {} pages are right", check_prompt(pool, &blocks)?);
    }
    ending.into_blocks().await?;
    Ok(outcome)
}

/// What the prefill's model server does with its leg.
async fn prefill_leg(prefill: &PrefillHandle, pool: &Pools, handoff: &Handoff) -> Result<Outcome> {
    let takers = handoff.prefill[0].peers.iter().map(|d| d.key.identity.clone()).collect();
    let sending = prefill
        .attach(AttachRequest {
            room: handoff.room,
            tokens: TOKENS,
            takers: Takers::Named(takers),
            issuer: None,
            deadline: DEADLINE,
        })
        .await?;
    let blocks = [9, 2, 30];
    write_prompt(pool, &blocks)?;
    sending
        .send(ChunkRequest {
            pool: 0,
            tokens: 0..TOKENS,
            layers: 0..pool.layouts[0].layers,
            blocks: BlockList::from_ids(&blocks),
            ready: Ready::Now,
        })
        .await?;
    sending.finish().await?;
    sending.released().await?;
    sending.ended().await
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let listen = ([127, 0, 0, 1], 0).into();
    let service = Bootstrap::start(BootstrapConfig::new(listen, Security::Insecure, "example"))?;
    let address = service.local_addr().to_string();
    let (config, source) = worker(Role::Prefill, &address)?;
    let prefill = PrefillWorker::start(config)?;
    let (config, target) = worker(Role::Decode, &address)?;
    let decode = DecodeWorker::start(config)?;
    prefill.registered(DEADLINE).await?;
    decode.registered(DEADLINE).await?;

    // The router.
    let me = Identity::new("example", Role::Router, "r0", 0)?;
    let coordinator =
        Coordinator::connect(CoordinatorConfig::new(address, Security::Insecure, me)).await?;
    let mut views = coordinator.watch();
    let _ = views.wait_for(|v| v.workers().filter(|m| m.view.alive).count() == 2).await;

    let mut request = PairRequest::new(TOKENS);
    request.wait = Duration::from_secs(5);
    let handoff = coordinator.reserve(request.clone()).await?;
    println!(
        "router:  room {} from {} to {}",
        handoff.room, handoff.prefill[0].worker.key, handoff.decode[0].worker.key
    );
    // Both legs at once, each to its model server.
    let (p, d) = tokio::join!(
        prefill_leg(&prefill, &source, &handoff),
        decode_leg(&decode, &target, &handoff),
    );
    println!("prefill: {:?}\ndecode:  {:?}", p?, d?);
    let room = handoff.detach();
    println!("router:  {:?}", coordinator.await_outcome(room, DEADLINE).await);

    // A client that goes away: dropping the hand-off aborts the room at both ends.
    let handoff = coordinator.reserve(request).await?;
    let room = handoff.room;
    drop(handoff);
    println!("router:  {:?}", coordinator.await_outcome(room, DEADLINE).await);

    decode.stop().await;
    prefill.stop().await;
    service.shutdown();
    Ok(())
}
