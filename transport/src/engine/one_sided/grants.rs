//! The grants that are open at a receiver, the queue pairs they may come through, and their fences.
//!
//! In: grants, queue pairs that end. Out: which queue pairs a fence has to see out. Invariants: a
//! grant is bound to the queue pairs of the moment it was opened, and to no others; a revoke is proved
//! only when each of them is out, and never if one went with its NIC; a close, before which the
//! sender has said that nothing of it is under way, when those that are there are drained; a grant that
//! could not be opened is never proved, since its offer has left; one that was fenced is not opened
//! afterwards, as long as it is among the last [`limits::TOMBSTONES_MAX`] that were.

use std::collections::HashMap;
use std::sync::Arc;

use kvlane_proto::ended::Memory;
use kvlane_proto::{
    Error, ErrorKind, GrantId, LaneId, LinkId, PartId, Plan, Refusal, Result, limits,
};

use super::receiver::{Binding, Ended};
use crate::engine::{FenceHow, OpenGrant};
use crate::memory::Region;

/// A queue pair that a grant may come through.
#[derive(Debug)]
pub(super) struct Tie {
    pub(super) link: LinkId,
    pub(super) lane: LaneId,
    pub(super) serial: u64,
    /// Set when it is out.
    out: Option<Result<(), Refusal>>,
}

impl Tie {
    /// Whether something may still come through it.
    pub(super) fn is_live(&self) -> bool {
        self.out.is_none()
    }
}

#[derive(Debug)]
struct Open {
    plans: Vec<Arc<Plan>>,
    ties: Vec<Tie>,
    /// Fences that wait for their answers.
    fences: Vec<FenceHow>,
    /// One of those asked for so far has to do without the sender's word: then that counts for none.
    revoked: bool,
}

/// What became of a fence.
pub(super) enum Fence {
    Waits,
    Done(Vec<FenceHow>, Vec<Tie>),
    Fails(Vec<FenceHow>, Refusal),
}

/// What a fence begins with.
pub(super) enum Begin {
    /// There is nothing to wait for.
    Done,
    Waits,
    /// The grant was refused when it was opened.
    Never(Refusal),
}

/// The grants of one engine.
pub(super) struct Grants {
    open: HashMap<GrantId, Open>,
    refused: Memory<GrantId, Refusal>,
    fenced: Memory<GrantId, ()>,
    fencing: Vec<GrantId>,
}

impl Default for Grants {
    fn default() -> Self {
        Self {
            open: HashMap::new(),
            refused: Memory::new(limits::TOMBSTONES_MAX),
            fenced: Memory::new(limits::TOMBSTONES_MAX),
            fencing: Vec::new(),
        }
    }
}

impl Grants {
    /// Opens a grant; `bind` says what may come through a lane.
    pub(super) fn open(
        &mut self,
        grant: OpenGrant,
        mut bind: impl FnMut(LinkId, LaneId, u32) -> Binding,
    ) -> Result<()> {
        let number = grant.grant;
        if self.fenced.get(&number).is_some() {
            return Err(Error::new(ErrorKind::Internal, "a grant was opened after its fence")
                .with("grant", number));
        }
        if self.open.contains_key(&number) {
            return Err(
                Error::new(ErrorKind::Internal, "grant number used twice").with("grant", number)
            );
        }
        if self.open.len() >= limits::ROOMS_MAX {
            let e = Error::new(ErrorKind::Busy, "too many open grants")
                .with("grant", number)
                .with("limit", limits::ROOMS_MAX)
                .hint("restart the worker if they are withheld ones");
            self.refused.insert(number, e.to_refusal());
            return Err(e);
        }
        let mut open =
            Open { plans: Vec::new(), ties: Vec::new(), fences: Vec::new(), revoked: false };
        for source in grant.sources {
            let (link, parts) = (source.link, source.plan.grid().parts());
            for lane in source.lanes {
                let Binding { serial, lost, .. } = bind(link, lane, parts);
                let live = serial.map(|serial| Tie { link, lane, serial, out: None });
                // Queue pairs are numbered from 1 on.
                let lost = lost.map(|why| Tie { link, lane, serial: 0, out: Some(Err(why)) });
                open.ties.extend(live.into_iter().chain(lost));
            }
            open.plans.push(source.plan);
        }
        self.open.insert(number, open);
        Ok(())
    }
    /// Wants a proof.
    pub(super) fn fence(&mut self, grant: GrantId, how: FenceHow) -> Begin {
        self.fenced.insert(grant, ());
        let Some(open) = self.open.get_mut(&grant) else {
            return self.refused.get(&grant).map_or(Begin::Done, |why| Begin::Never(why.clone()));
        };
        open.fences.push(how);
        open.revoked |= how == FenceHow::Revoke;
        if !self.fencing.contains(&grant) {
            self.fencing.push(grant);
        }
        Begin::Waits
    }
    /// Grants with a fence that waits.
    pub(super) fn fencing(&self) -> &[GrantId] {
        &self.fencing
    }
    /// Whether the fence has to do without the sender.
    pub(super) fn is_revoked(&self, grant: GrantId) -> bool {
        self.open.get(&grant).is_some_and(|open| open.revoked)
    }
    /// The queue pairs of a grant.
    pub(super) fn ties(&self, grant: GrantId) -> &[Tie] {
        self.open.get(&grant).map_or(&[], |open| &open.ties)
    }
    /// A queue pair is out.
    pub(super) fn ended(&mut self, ended: Ended) {
        let Some(open) = self.open.get_mut(&ended.grant) else { return };
        if let Some(tie) = open.ties.iter_mut().find(|tie| tie.serial == ended.serial) {
            tie.out = Some(ended.how);
        }
    }
    /// Ends a fence, if it can: all queue pairs are out, or those that are not are `drained`.
    pub(super) fn settle(&mut self, grant: GrantId, drained: bool) -> Fence {
        let Some(open) = self.open.get_mut(&grant) else { return Fence::Waits };
        let lost = open.ties.iter().find_map(|tie| tie.out.as_ref()?.as_ref().err());
        if let Some(why) = lost.filter(|_| open.revoked) {
            let why = why.clone();
            let hows = std::mem::take(&mut open.fences);
            self.fencing.retain(|g| *g != grant);
            return Fence::Fails(hows, why);
        }
        if !drained && open.ties.iter().any(Tie::is_live) {
            return Fence::Waits;
        }
        self.fencing.retain(|g| *g != grant);
        match self.open.remove(&grant) {
            Some(open) => Fence::Done(open.fences, open.ties),
            None => Fence::Waits,
        }
    }
    /// A grant with pages in `region`. Walks every page of every open grant; for the rare
    /// unregistration only.
    pub(super) fn user_of(&self, region: &Region) -> Option<GrantId> {
        let uses = |plan: &Arc<Plan>| {
            (0..plan.grid().parts()).filter_map(|p| plan.pages(PartId(p)).ok()).any(|pages| {
                let device = pages.device();
                pages.iter().any(|page| region.contains(device, page.address, page.bytes.into()))
            })
        };
        self.open.iter().find(|(_, open)| open.plans.iter().any(uses)).map(|(grant, _)| *grant)
    }
}
