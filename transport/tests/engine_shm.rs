//! The `shm` engine against its like, against strangers, and against peers that break its rules.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)] // Tests fail by panicking.

mod engine_conformance;

use engine_conformance::run;
use kvlane_transport::engine::Engine;
use kvlane_transport::engine::shm::{ShmConfig, ShmEngine};

fn engine(checksum: bool) -> ShmEngine {
    ShmEngine::new(ShmConfig { checksum, directory: None }).unwrap()
}
fn couple(checksum: bool) -> (Box<dyn Engine>, Box<dyn Engine>) {
    (Box::new(engine(checksum)), Box::new(engine(false)))
}

#[test]
fn conforms() {
    run(&|| couple(false));
}

#[test]
fn conforms_with_checksums() {
    run(&|| couple(true));
}
