//! A prefill and a decode worker in one process hand a prompt's pages over: the API of an engine
//! author, without service or router.
//!
//! ```text
//! cargo run --example two_workers
//! ```

use std::time::Duration;

use kvlane_actors::{
    AttachRequest, ChunkRequest, DecodeWorker, EngineChoice, LendRequest, Pools, PrefillWorker,
    Ready, Takers, WorkerConfig,
};
use kvlane_examples::{check_prompt, layout, write_prompt};
use kvlane_proto::{BlockList, Identity, Result, Role, RoomId, Span};
use kvlane_transport::engine::tcp::TcpConfig;
use kvlane_transport::quic::Security;

const DEADLINE: Duration = Duration::from_secs(10);

fn worker(role: Role) -> Result<(WorkerConfig, Pools)> {
    let identity = Identity::new("example", role, "w0", 0)?;
    let pool = Pools::own(layout(), 32)?;
    let engine = EngineChoice::Tcp(TcpConfig::default());
    // On one machine, to look at; a cluster has certificates (`kvlane ca`).
    Ok((WorkerConfig::new(identity, Security::Insecure, pool.clone(), engine), pool))
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let (config, source) = worker(Role::Prefill)?;
    let prefill = PrefillWorker::start(config)?;
    let (config, target) = worker(Role::Decode)?;
    let decode = DecodeWorker::start(config)?;

    // 40 tokens: two full blocks and a part of a third, anywhere in both pools.
    let (room, tokens) = (RoomId(1), 40);
    let (from, to) = ([7, 3, 20], [0, 31, 12]);

    // Decode: lend blocks to the room.
    let filling = decode
        .lend(LendRequest {
            room,
            span: Span { tokens, prefix_tokens: 0 },
            blocks: vec![BlockList::from_ids(&to)],
            prefills: vec![prefill.address().clone()],
            deadline: DEADLINE,
        })
        .await?;

    // Prefill: take the leg, compute, send the layers as they become ready.
    let sending = prefill
        .attach(AttachRequest {
            room,
            tokens,
            takers: Takers::Any(1),
            issuer: None,
            deadline: DEADLINE,
        })
        .await?;
    write_prompt(&source, &from)?;
    for layer in 0..source.layouts[0].layers {
        sending
            .send(ChunkRequest {
                pool: 0,
                tokens: 0..tokens,
                layers: layer..layer + 1,
                blocks: BlockList::from_ids(&from),
                ready: Ready::Now,
            })
            .await?;
    }
    sending.finish().await?;

    // Decode: filled, checked, and the blocks come back with the proof that nobody writes to them.
    let ending = filling.ended().await?;
    println!("decode:  {:?}, fenced by {:?}", ending.outcome, ending.fenced);
    println!("decode:  {} pages are right", check_prompt(&target, &to)?);
    println!("decode:  blocks back: {:?}", ending.into_blocks().await?);
    // Prefill: its blocks may be used again.
    sending.released().await?;
    println!("prefill: {:?}", sending.ended().await?);

    decode.stop().await;
    prefill.stop().await;
    Ok(())
}
