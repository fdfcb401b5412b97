//! The `gpunetio` engine over emulated NICs that are threads of the test.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)] // Tests fail by panicking.

mod engine_conformance;

use engine_conformance::run;

use kvlane_transport::emulated::Config;
use kvlane_transport::emulated::serve::{ThreadNic, spawn_thread};
use kvlane_transport::engine::Engine;
use kvlane_transport::engine::gpunetio::{GpunetioConfig, GpunetioEngine};

fn nics(count: usize) -> Vec<ThreadNic> {
    (0..count).map(|n| spawn_thread(Config::new(&format!("emulated{n}"))).unwrap()).collect()
}

fn engine(nics: &[ThreadNic], entries: u32) -> Box<dyn Engine> {
    let names = nics.iter().map(|nic| nic.socket().clone()).collect();
    let config = GpunetioConfig { entries, ..GpunetioConfig::new(names) };
    Box::new(GpunetioEngine::new(config).unwrap())
}

#[test]
fn conforms() {
    let nics = nics(1);
    run(&|| (engine(&nics, 2048), engine(&nics, 2048)));
}

#[test]
fn conforms_with_rings_smaller_than_parts_and_two_rails() {
    let nics = nics(2);
    run(&|| (engine(&nics, 16), engine(&nics, 16)));
}
