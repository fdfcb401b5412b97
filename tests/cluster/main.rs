//! Whole clusters of real processes on loopback, and what is left when parts of them die.
//!
//! Each test starts the `kvlane` binary, built once with the feature `fault-injection` ([`binary`]),
//! as service and workers; the router is the coordinator library in this process. Legs go to the
//! stand-ins as JSON lines, so every page is checked by the decode that received it, and blocks
//! that came back are stamped, so that a late write is found. Nothing is timed: tests wait for
//! states that can be observed, and give up after [`process::CAP`].

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod binary;
mod cluster;
mod legs;
mod process;

mod certificates;
mod ends;
mod fences;
mod kills;
mod nics;
mod rooms;
mod router_process;
mod routers;
