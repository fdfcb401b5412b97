//! Counts the instructions of a piece of work, so that a test can hold what a clock cannot: the
//! same build gives the same count on a busy machine.
//!
//! A test hands its work to [`each`]. The test's own program is started again under callgrind, twice,
//! to do little of the work and much of it; what both do alike (start, setup) falls out. Only an
//! optimised build means anything, so others skip, as do machines without valgrind; with
//! `KVLANE_COUNT=must` in the environment neither may.

use std::env;
use std::process::Command;

/// Says to the inner program how much to do.
const AMOUNT: &str = "KVLANE_COUNT_AMOUNT";

/// Instructions for each unit of `work`, which is told how many to do; `test` is the full name of the
/// calling test. `None` if this is the inner program, or nothing can be counted here.
pub fn each(test: &str, work: impl FnOnce(u64), (few, many): (u64, u64)) -> Option<f64> {
    if let Ok(amount) = env::var(AMOUNT) {
        work(amount.parse().unwrap());
        return None;
    }
    let must = env::var("KVLANE_COUNT").is_ok_and(|v| v == "must");
    let why_not = if cfg!(debug_assertions) {
        "not an optimised build: cargo test --release"
    } else if Command::new("valgrind").arg("--version").output().is_err() {
        "valgrind is not installed"
    } else {
        let (low, high) = (count(test, few), count(test, many));
        return Some((high - low) as f64 / (many - few) as f64);
    };
    assert!(!must, "{test}: {why_not}");
    eprintln!("skipped {test}: {why_not}");
    None
}

fn count(test: &str, amount: u64) -> u64 {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(env::current_exe().unwrap())
        .args(["--exact", test, "--test-threads=1"])
        .env(AMOUNT, amount.to_string())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stdout));
    // ==1234== Collected : 987654
    let collected = text.lines().find_map(|line| line.split_once("Collected : "));
    let (_, n) = collected.unwrap_or_else(|| panic!("no count in: {text}"));
    n.trim().parse().unwrap()
}
