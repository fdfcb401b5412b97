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

/// NICs that are processes, two rails, two ranks a side; everything says that they are no real ones.
#[test]
fn with_emulated_nics_rooms_are_done_and_nothing_is_taken_for_a_measurement() {
    let out = Command::new(env!("CARGO_BIN_EXE_kvlane"))
        .args(["demo", "--engine", "gpunetio", "--emulated", "--model", "tiny"])
        .args(["--rooms", "6", "--prefill", "1", "--decode", "1"])
        .args(["--prefill-tp", "2", "--decode-tp", "2", "--json"])
        .env_remove("RUST_LOG")
        .output()
        .unwrap();
    let (said, report) = (String::from_utf8_lossy(&out.stderr), String::from_utf8(out.stdout));
    assert!(out.status.success(), "{said}");
    let links: Vec<&str> = said.lines().filter(|line| line.starts_with("links over")).collect();
    assert_eq!(links, ["links over gpunetio: 2"], "each rank has half of the heads: {said}");
    let report: serde_json::Value = serde_json::from_str(report.unwrap().trim()).unwrap();
    let figure = |name: &str| report[name].clone();
    assert_eq!((figure("rooms_completed"), figure("pages_corrupt")), (6.into(), 0.into()));
    assert_eq!((figure("engine"), figure("emulated")), ("gpunetio".into(), true.into()));
}

#[test]
fn what_an_engine_cannot_do_is_refused_by_name_before_anything_is_started() {
    let cases: [(&[&str], &str); 10] = [
        (&["demo", "--engine", "gpunetio"], "add --emulated; rates then mean nothing"),
        (&["demo", "--rails", "2"], "--rails is not for this engine"),
        (&["demo", "--emulated", "--engine", "shm"], "--emulated is not for this engine"),
        (
            &["demo", "--emulated", "--engine", "gpunetio", "--checksum"],
            "--checksum is not for this engine",
        ),
        (&["worker", "--insecure", "--role", "decode", "--engine", "gpunetio"], "add --emulated"),
        (&["worker", "--insecure", "--role", "decode", "--nic", "@x"], "--nic is not for this"),
        (
            &["worker", "--insecure", "--role", "decode", "--engine", "gpunetio", "--emulated"],
            "kvlane emulated-nic --socket",
        ),
        (
            &[
                "worker",
                "--insecure",
                "--role",
                "decode",
                "--engine",
                "shm",
                "--data-advertise",
                "127.0.0.1",
            ],
            "--data-advertise is not for this engine",
        ),
        (
            &[
                "worker",
                "--insecure",
                "--role",
                "decode",
                "--engine",
                "gpunetio",
                "--emulated",
                "--nic",
                "@x",
                "--data",
                "127.0.0.1",
            ],
            "--data is not for this engine",
        ),
        (
            &[
                "worker",
                "--insecure",
                "--role",
                "decode",
                "--engine",
                "gpunetio",
                "--emulated",
                "--nic",
                "@x",
                "--shm-dir",
                "/tmp",
            ],
            "--shm-dir is not for this engine",
        ),
    ];
    for (args, want) in cases {
        let out = Command::new(env!("CARGO_BIN_EXE_kvlane")).args(args).output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && out.stdout.is_empty(), "{args:?}: {said}");
        assert!(said.contains(want), "{args:?}: {said}");
        assert!(said.contains("engine=") && said.contains("fix: "), "{args:?}: {said}");
    }
}
