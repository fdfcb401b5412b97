//! A decode leg: lends blocks, checks every byte that arrives, takes the blocks back.

use std::ops::Range;
use std::time::Duration;

use kvlane_actors::{DecodeHandle, LendRequest};
use kvlane_proto::{Error, ErrorKind, Result, RoomId, Span};
use tokio::sync::watch;

use super::Model;
use super::blocks::Taken;
use super::legs::{LegReply, LegRequest, abort_when_gone};
use crate::load::content::Contents;

pub(super) async fn run(
    leg: LegRequest,
    worker: &DecodeHandle,
    model: &Model,
    gone: watch::Receiver<bool>,
    reply: &mut LegReply,
) -> Result<()> {
    let LegRequest::Decode { room, request, tokens, prefix_tokens, prefills, deadline_ms } = leg
    else {
        return Err(Error::new(ErrorKind::Internal, "not a decode leg"));
    };
    let room = RoomId(room);
    let deadline = Duration::from_millis(deadline_ms);
    let span = Span { tokens, prefix_tokens };
    let wanted =
        model.layouts().iter().map(|l| span.blocks(l)).collect::<Result<Vec<Range<u32>>>>()?;
    let counts: Vec<u32> = wanted.iter().map(|r| r.end - r.start).collect();
    let taken = match model.take(&counts, deadline).await {
        Ok(taken) => taken,
        Err(e) => {
            worker.abort(room, &e.to_string()).await?;
            return Err(e);
        }
    };
    let blocks = taken.iter().map(Taken::list).collect();
    let lent = worker.lend(LendRequest { room, span, blocks, prefills, deadline }).await;
    let filling = match lent {
        Ok(filling) => filling,
        // Whose they are is not known: they are not used again.
        Err(e) if e.kind() == ErrorKind::Quarantined => return Err(e),
        Err(e) => {
            model.give_back(taken)?;
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
                && let Err(e) = model.give_back(taken)
            {
                tracing::error!(error = %e, "blocks that came back late cannot be used");
            }
        });
        return Err(Error::new(ErrorKind::Quarantined, "the blocks are withheld")
            .with("room", room)
            .with("blocks", counts.iter().sum::<u32>()));
    }
    if ending.outcome.is_done() {
        let model = model.clone();
        let ids: Vec<Vec<u32>> = taken.iter().map(|t| t.ids.clone()).collect();
        let checked = tokio::task::spawn_blocking(move || {
            let mut all = Checked::default();
            for (pool, ids) in ids.iter().enumerate() {
                check(&model, pool, request, wanted[pool].start, ids, tokens, &mut all)?;
            }
            Ok::<_, Error>(all)
        });
        let Checked { right: verified, wrong, first } = checked.await.map_err(|e| {
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
    model.give_back(taken)?;
    model.audit_room()?;
    #[cfg(feature = "fault-injection")]
    if super::faults::reached("given-back").await {
        std::future::pending::<()>().await;
    }
    Ok(())
}

/// Pages that are right, pages that are not, and what is wrong with the first of those.
#[derive(Default)]
struct Checked {
    right: u64,
    wrong: u64,
    first: Option<String>,
}

fn check(
    model: &Model,
    pool: usize,
    request: u64,
    first_block: u32,
    blocks: &[u32],
    tokens: u32,
    all: &mut Checked,
) -> Result<()> {
    let layout = &model.layouts()[pool];
    let contents = Contents::new(layout, request);
    let mut bytes = vec![0; layout.page_bytes() as usize];
    model.for_each_page(pool, 0..layout.layers, blocks, |layer, slab, index, page| {
        let first_token = (first_block + index as u32) * layout.page_tokens;
        let valid = (tokens - first_token).min(layout.page_tokens);
        page.read(&mut bytes)?;
        match contents.check_page(layout, layer, slab, first_token, valid, &bytes) {
            Ok(()) => all.right += 1,
            Err(mismatch) => {
                all.wrong += 1;
                all.first.get_or_insert_with(|| mismatch.to_string());
            }
        }
        Ok(())
    })
}
