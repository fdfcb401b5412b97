//! Which grants are open at a receiver: the last check before a byte is put in place.
//!
//! Owned by each engine whose receiver copies, and by the simulator's. In: grants opened and
//! closed, frames as they arrive. Out: the grant a frame may land under, or why not. Invariant: a
//! frame is admitted only under the grant whose number it carries, on a link that the grant
//! names, for a part that this link's grid has.

use std::collections::{BTreeMap, HashMap};

use crate::error::{Error, ErrorKind, Result};
use crate::ids::{GrantId, LaneId, LinkId, PartId};

/// How a grant is fenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FenceHow {
    /// The sender has said that nothing can land, or the receiver's own code holds the pen.
    Close,
    /// Without the sender: whatever it takes so that nothing can land.
    Revoke,
}

/// What one link may fill of an open grant.
#[derive(Debug)]
struct Open<T> {
    parts: u32,
    lanes: Vec<LaneId>,
    target: T,
}

/// The open grants of one engine.
#[derive(Debug)]
pub struct Grants<T> {
    open: HashMap<GrantId, BTreeMap<LinkId, Open<T>>>,
    /// Trusts the lane instead of the number; one of the machines that the simulator must catch.
    #[cfg(feature = "mutants")]
    pub trust_the_lane: bool,
}

impl<T> Default for Grants<T> {
    fn default() -> Self {
        Self {
            open: HashMap::new(),
            #[cfg(feature = "mutants")]
            trust_the_lane: false,
        }
    }
}

impl<T> Grants<T> {
    /// Opens a grant for its links: each with its lanes, the number of its parts, and their target.
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] if the number is in use (numbers are never reused), or a link is
    /// named twice.
    pub fn open(
        &mut self,
        grant: GrantId,
        links: impl IntoIterator<Item = (LinkId, Vec<LaneId>, u32, T)>,
    ) -> Result<()> {
        let twice = |what| Err(Error::new(ErrorKind::Internal, what).with("grant", grant));
        if self.open.contains_key(&grant) {
            return twice("grant number used twice");
        }
        let mut open = BTreeMap::new();
        for (link, lanes, parts, target) in links {
            if open.insert(link, Open { parts, lanes, target }).is_some() {
                return twice("grant names a link twice");
            }
        }
        self.open.insert(grant, open);
        Ok(())
    }

    /// Where a frame may land.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] for a grant that is not open on this link,
    /// [`ErrorKind::InvalidPlan`] for a part that it does not have.
    pub fn admit(
        &self,
        link: LinkId,
        lane: LaneId,
        grant: GrantId,
        part: PartId,
    ) -> Result<(GrantId, &T)> {
        #[cfg(feature = "mutants")]
        if self.trust_the_lane {
            let on_lane = self
                .open
                .iter()
                .filter_map(|(id, links)| Some((id, links.get(&link)?)))
                .filter(|(_, o)| o.lanes.contains(&lane))
                .min_by_key(|(id, _)| **id);
            if let Some((&grant, o)) = on_lane.filter(|(_, o)| part.0 < o.parts) {
                return Ok((grant, &o.target));
            }
        }
        let Some(open) = self.open.get(&grant).and_then(|links| links.get(&link)) else {
            return Err(Error::new(ErrorKind::NotFound, "no such grant is open on this link")
                .with("grant", grant)
                .with("part", part.0));
        };
        if !open.lanes.contains(&lane) {
            return Err(Error::new(ErrorKind::NotFound, "the grant does not have this lane")
                .with("grant", grant)
                .with("lane", lane.0));
        }
        if part.0 >= open.parts {
            return Err(Error::new(ErrorKind::InvalidPlan, "the grant has no such part")
                .with("grant", grant)
                .with("part", part.0)
                .with("parts", open.parts));
        }
        Ok((grant, &open.target))
    }

    /// The targets of an open grant, link by link; none if it is not open.
    pub fn get(&self, grant: GrantId) -> impl Iterator<Item = (LinkId, &T)> {
        let links = self.open.get(&grant).into_iter().flatten();
        links.map(|(&link, open)| (link, &open.target))
    }
    /// The targets of all open grants, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (GrantId, &T)> {
        let each = self.open.iter();
        each.flat_map(|(&grant, links)| links.values().map(move |o| (grant, &o.target)))
    }
    /// Closes a grant; nothing is admitted under it from here on. Its targets, link by link.
    pub fn close(&mut self, grant: GrantId) -> impl Iterator<Item = (LinkId, T)> + use<T> {
        let links = self.open.remove(&grant).into_iter().flatten();
        links.map(|(link, open)| (link, open.target))
    }
    /// Number of open grants.
    pub fn len(&self) -> usize {
        self.open.len()
    }
    /// Whether no grant is open.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_right_number_link_lane_and_part_are_admitted() {
        let mut g = Grants::default();
        let links = [(LinkId(1), vec![LaneId(0)], 3, "a"), (LinkId(3), vec![LaneId(1)], 1, "b")];
        g.open(GrantId(7), links).unwrap();
        let admit = |g: &Grants<_>, l, n, id, p| {
            g.admit(LinkId(l), LaneId(n), GrantId(id), PartId(p)).map(|(_, t)| *t).ok()
        };
        assert_eq!(admit(&g, 1, 0, 7, 2), Some("a"));
        assert_eq!(admit(&g, 2, 0, 7, 2), None);
        assert_eq!(admit(&g, 1, 1, 7, 2), None);
        assert_eq!(admit(&g, 1, 0, 8, 2), None);
        assert_eq!(admit(&g, 1, 0, 7, 3), None);
        assert_eq!(admit(&g, 3, 1, 7, 0), Some("b"));
        assert_eq!(admit(&g, 3, 0, 7, 0), None);
        assert_eq!(admit(&g, 3, 1, 7, 1), None);
        assert!(g.open(GrantId(7), []).is_err());
        let twice = [(LinkId(1), vec![], 0, "a"), (LinkId(1), vec![], 0, "b")];
        assert!(g.open(GrantId(8), twice).is_err());
        assert_eq!(g.len(), 1);
        assert_eq!(g.close(GrantId(7)).collect::<Vec<_>>(), [(LinkId(1), "a"), (LinkId(3), "b")]);
        assert_eq!(admit(&g, 1, 0, 7, 2), None);
    }
}
