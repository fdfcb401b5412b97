//! `gpunetio` keeps the rules of one-sided engines, which the simulator's engine is held to as well.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)] // Tests fail by panicking.

mod engine_bed;
mod engine_conformance;
mod one_sided_rules;

use engine_bed::EngineBed;
use engine_conformance::nics::{Nics, all};
use kvlane_transport::emulated::faults::What;

fn bed() -> EngineBed {
    let nics = Nics::new(1);
    let (pair, mut control, mut held) = (nics.pair(64), nics.control(0), None);
    let hold = move |on| {
        // They live as long as the bed.
        let _ = &nics;
        if on {
            held = Some(control.fault(&all(What::HoldWire)).unwrap());
        } else {
            control.clear(held.take().unwrap()).unwrap();
        }
    };
    EngineBed::new(pair, Box::new(hold), true)
}

#[test]
fn gpunetio_keeps_the_rules_of_one_sided_engines() {
    one_sided_rules::run(bed);
}
