//! What a worker's process holds, for whoever looks whether anything is left behind.
//!
//! In: the worker's handle, its blocks, the process's counters and `/proc`. Out: [`Holds`]. Nothing
//! here is kept on purpose for it, except that tasks are counted.

use kvlane_proto::Result;
use serde::{Deserialize, Serialize};

use super::{Model, Worker};
use crate::counters::{self, Numbers};
use crate::proc;

/// What a worker's process holds at a moment.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Holds {
    /// One start of the worker: counters begin at 0 with it.
    pub(crate) incarnation: String,
    /// Legs that have no answer yet, this question apart.
    pub(crate) legs: usize,
    /// Blocks of each pool: free, and there in all.
    pub(crate) blocks: Vec<(u32, u32)>,
    pub(crate) fds: u64,
    /// Of both runtimes.
    pub(crate) tasks: u64,
    pub(crate) resident_bytes: u64,
    /// Everything that is counted, under the names of the metrics.
    pub(crate) counters: Numbers,
}

impl Holds {
    /// The sum of a counter over those of its labels that `of` picks.
    pub(crate) fn sum(&self, counter: &str, of: impl Fn(&str) -> bool) -> u64 {
        let labels = |name: &'_ str| {
            let rest = name.strip_prefix(counter)?;
            (rest.is_empty() || rest.starts_with('{')).then(|| of(rest))
        };
        self.counters.iter().filter(|(name, _)| labels(name) == Some(true)).map(|(_, n)| n).sum()
    }
}

pub(super) fn of(worker: &Worker, model: &Model, legs: usize) -> Result<Holds> {
    let me = std::process::id();
    let counters = counters::all();
    let own = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    Ok(Holds {
        incarnation: worker.address().key.incarnation.to_string(),
        legs,
        blocks: model.blocks.iter().map(super::blocks::Blocks::free).collect(),
        fds: proc::fds(me)?,
        tasks: (own + worker.tasks()) as u64 + counters.get("kvlane_tasks").copied().unwrap_or(0),
        resident_bytes: proc::rss_bytes(me)?,
        counters,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_take_a_counter_and_not_one_whose_name_begins_so() {
        let counters = [
            ("fences_total{how=close}", 3),
            ("fences_total{how=revoke}", 2),
            ("fences_total_bytes", 50),
            ("plain", 7),
        ];
        let counters = counters.map(|(name, n)| (name.to_string(), n)).into();
        let holds = Holds { counters, ..Holds::default() };
        assert_eq!(holds.sum("fences_total", |_| true), 5);
        assert_eq!(holds.sum("fences_total", |labels| labels.contains("revoke")), 2);
        assert_eq!((holds.sum("plain", |_| true), holds.sum("none", |_| true)), (7, 0));
    }
}
