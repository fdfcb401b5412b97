//! A prefill leg: "computes" the prompt's pages chunk by chunk and sends them.

use std::time::Duration;

use kvlane_actors::{AttachRequest, ChunkRequest, PrefillHandle, Ready, Sending, Takers};
use kvlane_proto::{BlockList, Error, ErrorKind, Identity, Result, RoomId};
use tokio::sync::watch;

use super::Model;
use super::blocks::Taken;
use super::legs::{LegReply, LegRequest, abort_when_gone};
use crate::load::content::Contents;

pub(super) async fn run(
    leg: LegRequest,
    worker: &PrefillHandle,
    model: &Model,
    gone: watch::Receiver<bool>,
    reply: &mut LegReply,
) -> Result<()> {
    let LegRequest::Prefill { room, request, tokens, decodes, issuer, deadline_ms } = leg else {
        return Err(Error::new(ErrorKind::Internal, "not a prefill leg"));
    };
    let deadline = Duration::from_millis(deadline_ms);
    let names = decodes.iter().map(|d| d.parse()).collect::<Result<Vec<Identity>>>()?;
    let sending = worker
        .attach(AttachRequest {
            room: RoomId(room),
            tokens,
            takers: Takers::Named(names),
            issuer: Some(issuer.parse::<Identity>()?),
            deadline,
        })
        .await?;
    let counts: Vec<u32> = model.layouts().iter().map(|l| l.blocks_for(tokens)).collect();
    let taken = match model.take(&counts, deadline).await {
        Ok(taken) => taken,
        Err(e) => {
            sending.abort(&e.to_string()).await?;
            reply.outcome = Some(sending.ended().await?);
            return Err(e);
        }
    };
    let work = async {
        if let Err(e) = send(&sending, model, &taken, tokens, request).await {
            sending.abort(&e.to_string()).await?;
            reply.error = Some(e.to_refusal());
        }
        // The room's deadline bounds both waits.
        sending.released().await?;
        model.give_back(taken)?;
        sending.ended().await
    };
    let outcome = abort_when_gone(work, gone, sending.abort("the client hung up")).await?;
    reply.outcome = Some(outcome);
    Ok(())
}

async fn send(
    sending: &Sending,
    model: &Model,
    taken: &[Taken],
    tokens: u32,
    request: u64,
) -> Result<()> {
    for (pool, taken) in taken.iter().enumerate() {
        let layout = &model.layouts()[pool];
        let contents = Contents::new(layout, request);
        for (part, layers) in chunks(tokens, layout.layers, request) {
            if sending.poll().is_some() {
                return Ok(());
            }
            let first = part.start / layout.page_tokens;
            let end = part.end.div_ceil(layout.page_tokens);
            let blocks = taken.ids[first as usize..end as usize].to_vec();
            let list = BlockList::from_ids(&blocks);
            let (model, filled, written) = (model.clone(), layers.clone(), part.end);
            tokio::task::spawn_blocking(move || {
                fill(&model, pool, contents, first, &blocks, filled, written)
            })
            .await
            .map_err(|e| {
                Error::new(ErrorKind::Internal, "the stand-in has failed").caused_by(e)
            })??;
            let pool = pool as u32;
            let chunk =
                ChunkRequest { pool, tokens: part, layers, blocks: list, ready: Ready::Now };
            match sending.send(chunk).await {
                Ok(()) => {}
                // It has ended meanwhile; how, is asked later.
                Err(e) if e.kind() == ErrorKind::RoomEnded => return Ok(()),
                Err(e) => return Err(e),
            }
        }
    }
    sending.finish().await
}

/// How a prompt becomes ready: in steps of tokens that end inside blocks, or layer by layer.
fn chunks(
    tokens: u32,
    layers: u32,
    request: u64,
) -> Vec<(std::ops::Range<u32>, std::ops::Range<u32>)> {
    if tokens == 0 {
        return Vec::new();
    }
    if request.is_multiple_of(2) {
        let step = tokens.div_ceil(4).max(1);
        (0..tokens.div_ceil(step))
            .map(|i| (i * step..((i + 1) * step).min(tokens), 0..layers))
            .collect()
    } else {
        let step = layers.div_ceil(8).max(1);
        (0..layers.div_ceil(step))
            .map(|i| (0..tokens, i * step..((i + 1) * step).min(layers)))
            .collect()
    }
}

/// Writes whole pages, as far as the prompt has got; a page that is not full yet is written again.
fn fill(
    model: &Model,
    pool: usize,
    contents: Contents,
    first_block: u32,
    blocks: &[u32],
    layers: std::ops::Range<u32>,
    written: u32,
) -> Result<()> {
    let layout = &model.layouts()[pool];
    let mut bytes = vec![0; layout.page_bytes() as usize];
    model.for_each_page(pool, layers, blocks, |layer, slab, index, page| {
        let first_token = (first_block + index as u32) * layout.page_tokens;
        let valid = (written - first_token.min(written)).min(layout.page_tokens);
        contents.page(layout, layer, slab, first_token, valid, &mut bytes);
        page.write(&bytes)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_declare_every_token_of_every_layer_once_in_order() {
        for request in 0..2 {
            for (tokens, layers) in [(1, 1), (3, 2), (1000, 80), (17, 61), (4, 94)] {
                let mut done = vec![0; layers as usize];
                for (part, ls) in chunks(tokens, layers, request) {
                    for l in ls {
                        assert_eq!(done[l as usize], part.start);
                        done[l as usize] = part.end;
                    }
                }
                assert!(done.iter().all(|&d| d == tokens));
            }
        }
    }
}
