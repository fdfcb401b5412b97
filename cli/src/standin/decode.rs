//! A decode leg: lends blocks, checks every byte that arrives, takes the blocks back.

use std::time::Duration;

use kvlane_actors::{DecodeHandle, LendRequest};
use kvlane_proto::{Error, ErrorKind, Result, RoomId, Span};
use tokio::sync::watch;

use super::Model;
use super::blocks::offset;
use super::legs::{LegReply, LegRequest, abort_when_gone};
use crate::load::content::Contents;

pub(super) async fn run(
    leg: LegRequest,
    worker: &DecodeHandle,
    model: &Model,
    gone: watch::Receiver<bool>,
    reply: &mut LegReply,
) -> Result<()> {
    let LegRequest::Decode { room, request, tokens, prefix_tokens, prefill, deadline_ms } = leg
    else {
        return Err(Error::new(ErrorKind::Internal, "not a decode leg"));
    };
    let room = RoomId(room);
    let deadline = Duration::from_millis(deadline_ms);
    let layout = &model.pool.layout;
    let span = Span { tokens, prefix_tokens };
    let wanted = span.blocks(layout)?;
    let count = wanted.end - wanted.start;
    let taken = match model.blocks.take(&model.pool, count, deadline).await {
        Ok(taken) => taken,
        Err(e) => {
            worker.abort(room, &e.to_string()).await?;
            return Err(e);
        }
    };
    let lent = worker
        .lend(LendRequest { room, span, blocks: taken.list(), prefill: Some(prefill), deadline })
        .await;
    let filling = match lent {
        Ok(filling) => filling,
        // Whose they are is not known: they are not used again.
        Err(e) if e.kind() == ErrorKind::Quarantined => return Err(e),
        Err(e) => {
            model.blocks.give_back(&model.pool, taken)?;
            return Err(e);
        }
    };
    let abort = worker.abort(room, "the client hung up");
    let ending = abort_when_gone(filling.ended(), gone, abort).await?;
    reply.outcome = Some(ending.outcome.clone());
    if !ending.is_fenced() {
        // Waiting for a proof that may never come would hold the leg up.
        let model = model.clone();
        tokio::spawn(async move {
            if ending.into_blocks().await.is_ok()
                && let Err(e) = model.blocks.give_back(&model.pool, taken)
            {
                tracing::error!(error = %e, "blocks that came back late cannot be used");
            }
        });
        return Err(Error::new(ErrorKind::Quarantined, "the blocks are withheld")
            .with("room", room)
            .with("blocks", count));
    }
    if ending.outcome.is_done() {
        let (model, ids) = (model.clone(), taken.ids.clone());
        let checked = tokio::task::spawn_blocking(move || {
            check(&model, Contents::new(&model.pool.layout, request), wanted.start, &ids, tokens)
        });
        let (verified, wrong, first) = checked.await.map_err(|e| {
            Error::new(ErrorKind::Internal, "the stand-in has failed").caused_by(e)
        })??;
        reply.pages_verified = verified;
        reply.pages_corrupt = wrong;
        if let Some(first) = first {
            reply.error = Some(
                Error::new(ErrorKind::Corrupt, "a page is not what was sent")
                    .with("room", room)
                    .with("pages", wrong)
                    .with("first", first)
                    .to_refusal(),
            );
        }
    }
    ending.into_blocks().await?;
    model.blocks.give_back(&model.pool, taken)?;
    #[cfg(feature = "fault-injection")]
    if kvlane_actors::faults::reached("given-back") {
        std::future::pending::<()>().await;
    }
    Ok(())
}

/// Pages that are right, pages that are not, and what is wrong with the first of those.
fn check(
    model: &Model,
    contents: Contents,
    first_block: u32,
    blocks: &[u32],
    tokens: u32,
) -> Result<(u64, u64, Option<String>)> {
    let pool = &model.pool;
    let layout = &pool.layout;
    let slabs = layout.kind.slabs();
    let mut page = vec![0; layout.page_bytes() as usize];
    let (mut right, mut wrong, mut first) = (0, 0, None);
    for layer in 0..layout.layers {
        for slab in 0..slabs {
            for (i, &id) in blocks.iter().enumerate() {
                let first_token = (first_block + i as u32) * layout.page_tokens;
                let valid = (tokens - first_token).min(layout.page_tokens);
                let at = offset(pool, (layer * slabs + slab) as usize, id);
                pool.regions[0].memory().read_at(at, &mut page).map_err(|e| {
                    Error::new(ErrorKind::Internal, "a page is outside its pool").caused_by(e)
                })?;
                match contents.check_page(layout, layer, slab, first_token, valid, &page) {
                    Ok(()) => right += 1,
                    Err(mismatch) => {
                        wrong += 1;
                        first.get_or_insert_with(|| mismatch.to_string());
                    }
                }
            }
        }
    }
    Ok((right, wrong, first))
}
