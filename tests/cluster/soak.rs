//! A cluster that is broken for as long as it serves, over each engine, and whether anything is left
//! behind: `kvlane demo --chaos`, and a look at what it says.
//!
//! A minute in all, besides starting and ending; `KVLANE_SOAK_S=600` for ten. Less than 20 s for an
//! engine would not give every fault its turn, so it has those at least.

use std::time::Duration;

use serde_json::Value;
use tokio::process::Command;

use super::binary;

const SECONDS: u64 = 60;
/// Of one engine.
const SECONDS_MIN: u64 = 20;
/// What a run may take besides: starting, coming to rest, ending.
const BESIDE: Duration = Duration::from_secs(240);
const ENGINES: [&[&str]; 3] =
    [&["--engine", "tcp"], &["--engine", "shm"], &["--engine", "gpunetio", "--emulated"]];
/// What happens to every cluster, and what to NICs only.
const FAULTS: [&str; 6] = [
    "prefill_killed",
    "decode_killed",
    "service_restarted",
    "worker_stopped",
    "leg_hung_up",
    "reservation_never_claimed",
];
const NIC_FAULTS: [&str; 7] = [
    "nic_delay",
    "nic_hold_wire",
    "nic_hold_landing",
    "nic_nak",
    "nic_duplicate",
    "nic_link_flap",
    "nic_throttle",
];

/// Runs chaos; whether it ended well, and its last line.
async fn chaos(seconds: u64, flags: &[&str]) -> (bool, Value) {
    let asked = seconds.to_string();
    let run = Command::new(binary::path())
        .args(["demo", "--chaos", &asked, "--model", "tiny", "--json"])
        .args(flags)
        .env("RUST_LOG", "error")
        .kill_on_drop(true)
        .output();
    let run = tokio::time::timeout(Duration::from_secs(seconds) + BESIDE, run);
    let out = run.await.unwrap_or_else(|_| panic!("{flags:?} never ended")).unwrap();
    let (said, log) =
        (String::from_utf8(out.stdout).unwrap(), String::from_utf8_lossy(&out.stderr));
    let last = said.lines().last().unwrap_or_else(|| panic!("{flags:?} said nothing: {log}"));
    let report = serde_json::from_str(last).unwrap_or_else(|e| panic!("{last:?}: {e}"));
    eprintln!("{flags:?}: {report}");
    (out.status.success(), report)
}

fn number(report: &Value, path: &str) -> u64 {
    let found = report.pointer(path).and_then(Value::as_u64);
    found.unwrap_or_else(|| panic!("no number {path}: {report}"))
}

#[tokio::test]
async fn nothing_is_corrupt_lost_or_left_behind_whatever_is_broken() {
    let seconds = std::env::var("KVLANE_SOAK_S").map_or(SECONDS, |s| s.parse().unwrap());
    for flags in ENGINES {
        let (is_well, report) =
            chaos((seconds / ENGINES.len() as u64).max(SECONDS_MIN), flags).await;
        let number = |path: &str| number(&report, path);
        // Blocks, lanes, links, descriptors, tasks, queue pairs, domains and keys are among it.
        assert_eq!(report["wrong"], serde_json::json!([]), "{report}");
        assert_eq!((number("/pages_corrupt"), number("/rooms_lost")), (0, 0), "{report}");
        assert_eq!(number("/quarantined_blocks"), 0, "{report}");
        assert!(number("/rooms_completed") > 0 && number("/pages_verified") > 0, "{report}");
        assert!(number("/rooms_aborted") > 0, "{report}");
        assert!(number("/fences/quiesce") > 0 && number("/fences/revoke") > 0, "{report}");
        let has_nics = flags.contains(&"--emulated");
        assert_eq!(report["late_writes_scrapped"].is_null(), has_nics, "{report}");
        for fault in FAULTS.iter().chain(NIC_FAULTS.iter().filter(|_| has_nics)) {
            let path = format!("/faults/{fault}");
            assert!(number(&path) > 0, "{fault} never struck: {report}");
        }
        for (process, most) in report["resident_kib"].as_object().unwrap() {
            let [first, second] = [0, 1].map(|half| most[half].as_u64().unwrap());
            assert!(first > 0 && second <= first * 2, "{process} grows: {report}");
        }
        assert!(is_well, "{report}");
    }
}

#[tokio::test]
async fn without_fences_it_is_found_that_pages_are_written_late() {
    let flags = [ENGINES[2], &["--fence-off"]].concat();
    let (is_well, report) = chaos(SECONDS_MIN, &flags).await;
    assert!(!is_well, "{report}");
    let wrong = report["wrong"].as_array().unwrap();
    let late = |what: &Value| {
        let what = what.as_str().unwrap();
        what.contains("free pages were written") || what.ends_with("failed with corrupt")
    };
    assert!(wrong.iter().any(late), "{report}");
}
