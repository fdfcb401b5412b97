//! The tests that need more than one crate: `sim`, the real machines in a seeded world of faults, and
//! `cluster`, real processes. `fuzz` beside them is a package of its own.
