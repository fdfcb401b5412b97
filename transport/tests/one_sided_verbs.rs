//! `verbs` keeps the rules of one-sided engines, over a provider in this process.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)] // Tests fail by panicking.

mod engine_bed;
mod engine_conformance;
mod fake_verbs;
mod one_sided_rules;
mod sysfs_tree;

use engine_bed::EngineBed;
use fake_verbs::{Bed, Host};

/// Whether what has passed a receiver's checks lands at once, or at the last moment.
fn bed(lands_late: bool) -> EngineBed {
    let Bed { from, to, p } = Bed::new(1);
    to.nics[0].set(|knobs| knobs.lands_late = lands_late);
    let nic = from.nics[0];
    let hosts: [Host; 2] = [from, to];
    let hold = move |on| {
        // They live as long as the bed.
        let _ = &hosts;
        nic.set(|knobs| knobs.holds = on);
    };
    EngineBed::new(p, Box::new(hold), false)
}

#[test]
fn verbs_keeps_the_rules_of_one_sided_engines() {
    one_sided_rules::run(|| bed(false));
}

#[test]
fn verbs_keeps_them_where_bytes_land_as_late_as_they_may() {
    one_sided_rules::run(|| bed(true));
}
