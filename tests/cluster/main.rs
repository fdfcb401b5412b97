//! Whole clusters of real processes on loopback, and what is left when parts of them die.
//!
//! Each test starts the `kvlane` binary, built once with the feature `fault-injection` ([`binary`]),
//! as service and workers; the router is the coordinator library in this process. Legs go to the
//! stand-ins as JSON lines, so every page is checked by the decode that received it, and blocks
//! that came back are stamped, so that a late write is found. Tests wait for states that can be observed,
//! and give up after [`process::CAP`]; where somebody must be told soon, they look at the reason, and
//! at the time only with a cap far above what is promised.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod binary;
mod cluster;
mod engines;
mod legs;
mod process;
mod site;
mod udp;

mod certificates;
mod drains;
mod ends;
mod fences;
mod hostile_rooms;
mod kills;
mod network;
mod nics;
mod progress;
mod rdma;
mod restarts;
mod reuse;
mod rooms;
mod router_process;
mod routers;
mod soak;
mod stops;
mod told;
