//! Lanes that do not come back, and what was said of them.
//!
//! Owns: since when which lanes are down, and why. In: the engine's words about lanes, time. Out: what
//! to say, once an outage. Most lanes that go down are dialled again at once, and are not worth a word.

use std::collections::BTreeMap;

use kvlane_proto::{LaneId, LinkId, Refusal, Time, limits};

/// Lets something be said so often only: whatever comes and goes must not fill the log.
#[derive(Default)]
pub(crate) struct Told {
    last: Option<Time>,
    left_out: u64,
}

impl Told {
    const EVERY_MS: u64 = 200;

    /// Whether to say it; with how often it was not since the last time.
    pub(crate) fn turn(&mut self, now: Time) -> Option<u64> {
        if self.last.is_some_and(|last| now.ms_since(last) < Self::EVERY_MS) {
            self.left_out += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.left_out))
    }
}

#[derive(Default)]
pub(crate) struct Outages(BTreeMap<(LinkId, LaneId), Outage>);

struct Outage {
    /// When it is said; none if it was.
    due: Option<Time>,
    why: Refusal,
}

impl Outages {
    pub(crate) fn down(&mut self, now: Time, link: LinkId, lane: LaneId, why: &Refusal) {
        let due = Some(now.plus_ms(limits::LANE_WAIT_MS));
        self.0.entry((link, lane)).or_insert_with(|| Outage { due, why: why.clone() });
    }
    pub(crate) fn up(&mut self, link: LinkId, lane: LaneId) {
        self.0.remove(&(link, lane));
    }
    /// The link is over.
    pub(crate) fn forget(&mut self, link: LinkId) {
        self.0.retain(|at, _| at.0 != link);
    }
    /// When [`Outages::take`] has something.
    pub(crate) fn due(&self) -> Option<Time> {
        self.0.values().filter_map(|o| o.due).min()
    }
    /// Lanes that had time to come back, link by link, with the reason of one of them.
    pub(crate) fn take(&mut self, now: Time) -> Vec<(LinkId, Vec<u16>, Refusal)> {
        let mut found: Vec<(LinkId, Vec<u16>, Refusal)> = Vec::new();
        for (&(link, lane), outage) in &mut self.0 {
            if outage.due.take_if(|due| *due <= now).is_none() {
                continue;
            }
            match found.last_mut().filter(|(last, ..)| *last == link) {
                Some((_, lanes, _)) => lanes.push(lane.0),
                None => found.push((link, vec![lane.0], outage.why.clone())),
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use kvlane_proto::ErrorKind;

    use super::*;

    #[test]
    fn lanes_that_stay_down_are_told_once_and_those_that_come_back_never() {
        let why = Refusal::new(ErrorKind::NoPath, "the NIC is lost");
        let (a, b) = (LinkId(1), LinkId(2));
        let mut outages = Outages::default();
        let at = |ms| Time(0).plus_ms(ms);
        for (link, lane) in [(a, 0), (a, 1), (a, 2), (b, 0), (LinkId(3), 0)] {
            outages.down(at(0), link, LaneId(lane), &why);
        }
        outages.up(a, LaneId(1));
        outages.forget(LinkId(3));
        let due = at(limits::LANE_WAIT_MS);
        assert_eq!(outages.due(), Some(due));
        assert!(outages.take(at(limits::LANE_WAIT_MS - 1)).is_empty());
        let all = outages.take(due);
        assert_eq!(all, [(a, vec![0, 2], why.clone()), (b, vec![0], why.clone())]);
        // Down again without having been up is the same outage.
        outages.down(due, a, LaneId(0), &why);
        assert_eq!((outages.due(), outages.take(at(99_999)).len()), (None, 0));
        outages.up(a, LaneId(0));
        outages.down(due, a, LaneId(0), &why);
        assert_eq!(outages.take(at(99_999)), [(a, vec![0], why)]);
    }

    #[test]
    fn what_is_left_out_is_counted() {
        let mut told = Told::default();
        let at = |ms| Time(0).plus_ms(ms);
        let turns = [0, 1, 199, 200, 201].map(|ms| told.turn(at(ms)));
        assert_eq!(turns, [Some(0), None, None, Some(2), None]);
    }
}
