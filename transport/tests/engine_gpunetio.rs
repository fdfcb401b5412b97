//! The `gpunetio` engine over emulated NICs that are threads of the test.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)] // Tests fail by panicking.

mod engine_conformance;
