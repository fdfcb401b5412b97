//! `kvlane demo` as a process: what it says of the engines that links used.
#![allow(clippy::unwrap_used, clippy::panic)] // Tests fail by panicking.

use std::process::Command;

/// Everybody is on one host, so nobody needs TCP.
#[test]
fn with_auto_links_use_shared_memory_and_the_demo_says_so() {
    let out = Command::new(env!("CARGO_BIN_EXE_kvlane"))
        .args(["demo", "--engine", "auto", "--model", "tiny", "--rooms", "4", "--json"])
        .env_remove("RUST_LOG")
        .output()
        .unwrap();
    let (said, report) = (String::from_utf8_lossy(&out.stderr), String::from_utf8(out.stdout));
    assert!(out.status.success(), "{said}");
    let links: Vec<&str> = said.lines().filter(|line| line.starts_with("links over")).collect();
    assert_eq!(links, ["links over shm: 4"], "{said}");
    let report: serde_json::Value = serde_json::from_str(report.unwrap().trim()).unwrap();
    assert_eq!(report["pages_corrupt"], 0, "{report}");
}
