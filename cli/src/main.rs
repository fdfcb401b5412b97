//! The `kvlane` binary.

#[cfg_attr(not(test), allow(dead_code))]
mod load;

fn main() {}
