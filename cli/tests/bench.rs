//! `kvlane bench` as users run it. Figures are only looked at for being there: nothing is timed.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const CAP: Duration = Duration::from_secs(60);

fn bench(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvlane"));
    command.arg("bench").args(args).stdin(Stdio::null());
    command
}
fn output(args: &[&str]) -> Output {
    bench(args).output().unwrap()
}
fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}
fn rows(out: &Output) -> Vec<Value> {
    assert!(out.status.success(), "{}\n{}", out.status, text(&out.stderr));
    let stdout = text(&out.stdout);
    let last: Value = serde_json::from_str(stdout.lines().last().unwrap()).unwrap();
    last["rows"].as_array().unwrap().clone()
}

#[test]
fn every_size_has_a_row_of_each_path_and_its_bytes_are_compared() {
    let out = output(&[
        "--engine",
        "tcp",
        "--page-bytes",
        "1,63,4097",
        "--pages",
        "8",
        "--runs",
        "2",
        "--latency",
        "--ceiling",
        "--json",
    ]);
    let rows = rows(&out);
    assert_eq!(text(&out.stdout).lines().count(), 1);
    let found: BTreeSet<(u64, &str)> = rows
        .iter()
        .map(|row| (row["page_bytes"].as_u64().unwrap(), row["engine"].as_str().unwrap()))
        .collect();
    let engines = ["tcp", "raw-tcp", "raw-rtt", "memcpy"];
    let expected =
        [1, 63, 4097].into_iter().flat_map(|bytes| engines.map(|engine| (bytes, engine))).collect();
    assert_eq!(found, expected);
    for row in &rows {
        let positive = |key| assert!(row[key].as_f64().unwrap() > 0.0, "{key} of {row}");
        positive("gbytes_per_s");
        assert_eq!(row["emulated"], false);
        // Before the repetitions that count and after the last of them.
        let page_bytes = row["page_bytes"].as_u64().unwrap();
        let engine = row["engine"].as_str().unwrap();
        assert!(row["verified_bytes"].as_u64().unwrap() >= 2 * 8 * page_bytes, "{row}");
        if ["tcp", "raw-rtt"].contains(&engine) {
            ["p50_us", "p99_us", "idle_p50_us", "idle_p99_us"].into_iter().for_each(positive);
        } else {
            assert!(row["p50_us"].is_null() && row["p99_us"].is_null(), "{row}");
        }
        if engine == "tcp" {
            ["raw_gbytes_per_s", "ratio_to_raw", "prep_avg_us", "post_p99_us"]
                .into_iter()
                .for_each(positive);
            assert_eq!((&row["pages"], &row["runs"]), (&8.into(), &2.into()));
            assert!(row["ratio_to"]["memcpy"].as_f64().unwrap() > 0.0);
            assert!(row["p50_ratio_to"]["raw-rtt"].as_f64().unwrap() > 0.0);
        }
    }
}

#[test]
fn several_lanes_checksums_and_a_table() {
    let args = ["--page-bytes", "4097", "--pages", "2000", "--rails", "3", "--checksum"];
    let out = output(&[&args[..], &["--runs", "1", "--json"]].concat());
    let rows = rows(&out);
    assert_eq!(rows.len(), 1);
    assert_eq!((&rows[0]["rails"], &rows[0]["checksum"]), (&3.into(), &true.into()));
    assert_eq!(rows[0]["verified_bytes"], 2 * 2000 * 4097);
    assert!(rows[0]["p50_us"].is_null());

    let out = output(&["--page-bytes", "63", "--pages", "5", "--runs", "1"]);
    assert!(out.status.success());
    let table = text(&out.stdout);
    let lines: Vec<Vec<&str>> =
        table.lines().map(|line| line.split('|').map(str::trim).collect()).collect();
    assert_eq!(lines.len(), 2, "{table}");
    assert_eq!(lines[0][1..4], ["Block Size (B)", "Batch Size", "B/W (GB/Sec)"]);
    assert_eq!(lines[1][..3], ["tcp", "63", "5"]);
    assert_eq!(text(&out.stderr), "");
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    for (args, says) in [
        (&["--engine", "rdma"][..], &["no such engine", "asked=rdma", "known=tcp"][..]),
        (&["--page-bytes", "4096,0"], &["--page-bytes", "1 to 67108864"]),
        (&["--page-bytes", "67108865"], &["--page-bytes", "1 to 67108864"]),
        (&["--pages", "0"], &["--pages"]),
        (&["--rails", "65"], &["--rails"]),
        (&["--runs", "0"], &["--runs"]),
        (&["--rooms", "0"], &["--rooms"]),
        (&["--rooms", "5", "--in-flight", "0"], &["--in-flight"]),
        (&["--in-flight", "5"], &["--rooms"]),
        (&["--rooms", "5", "--pages", "4"], &["--rooms", "--pages"]),
        (&["--rooms", "5", "--connections", "4"], &["--rooms", "--connections"]),
        (&["--connections", "0"], &["--connections"]),
        (
            &["--page-bytes", "67108864", "--pages", "500000"],
            &["not enough memory", "asked_mib=64000000", "--pages"],
        ),
    ] {
        let out = output(args);
        assert!(!out.status.success(), "{args:?}");
        assert!(out.stdout.is_empty(), "{args:?}");
        let stderr = text(&out.stderr);
        for says in says {
            assert!(stderr.contains(says), "{args:?}: {stderr}");
        }
    }
}

#[test]
fn rooms_without_pages_have_a_row_one_by_one_and_a_row_together() {
    let out = output(&["--rooms", "50", "--in-flight", "7", "--json"]);
    let rows = rows(&out);
    assert_eq!(text(&out.stdout).lines().count(), 1);
    assert_eq!(rows.len(), 2);
    for (row, in_flight) in rows.iter().zip([1, 7]) {
        assert_eq!((&row["engine"], &row["emulated"]), (&"quic".into(), &false.into()));
        assert_eq!((&row["rooms"], &row["in_flight"]), (&50.into(), &in_flight.into()));
        let figure = |key| row[key].as_f64().unwrap_or_else(|| panic!("{key} of {row}"));
        assert!(figure("rooms_per_s") > 0.0 && figure("reserve_p50_us") > 0.0, "{row}");
        // A room is done after it was reserved.
        assert!(figure("p50_us") > figure("reserve_p50_us"), "{row}");
        assert!(figure("p99_us") >= figure("p50_us"), "{row}");
        assert!(figure("reserve_p99_us") >= figure("reserve_p50_us"), "{row}");
    }
    let out = output(&["--rooms", "3"]);
    assert!(out.status.success());
    let table = text(&out.stdout);
    let lines: Vec<Vec<&str>> =
        table.lines().map(|line| line.split('|').map(str::trim).collect()).collect();
    assert_eq!(lines[0][1..4], ["Rooms", "In flight", "Lanes"], "{table}");
    assert_eq!(lines[1][..4], ["rooms, one by one", "3", "1", "32"], "{table}");
    assert_eq!(lines[2][..4], ["rooms, together", "3", "32", "32"], "{table}");
}

#[test]
fn an_idle_session_costs_the_service_less_than_100_kib() {
    let rows = rows(&output(&["--connections", "20", "--json"]));
    assert_eq!(rows.len(), 1);
    let figure = |key: &str| rows[0][key].as_u64().unwrap_or_else(|| panic!("{key} of {rows:?}"));
    assert_eq!(figure("connections"), 20);
    let (before, after) = (figure("rss_before_bytes"), figure("rss_after_bytes"));
    assert!(after > before, "{rows:?}");
    assert_eq!(figure("bytes_per_connection"), (after - before) / 20);
    assert!(figure("bytes_per_connection") < 100 << 10, "{rows:?}");
}

#[test]
fn whoever_has_nothing_to_do_sleeps() {
    let rows = rows(&output(&["--rest", "3", "--json"]));
    let whats: Vec<&str> = rows.iter().map(|row| row["what"].as_str().unwrap()).collect();
    let workers = ["rest, prefill worker", "rest, decode worker"];
    assert_eq!(whats, ["rest, service", workers[0], workers[1], "rest, router"]);
    for row in &rows {
        assert!(row["seconds"].as_f64().unwrap() >= 3.0);
        assert!(row["cpu_percent"].as_f64().unwrap() >= 0.0);
        // Heartbeats, leases and the snapshot need some tens; a thread that polls, thousands.
        let wakeups = row["wakeups_per_s"].as_f64().unwrap();
        assert!(wakeups > 0.0 && wakeups < 300.0, "{row}");
    }
}

/// The worker processes of a bench of rooms that goes on until it is ended.
fn rooms_running() -> (Child, Vec<u32>) {
    let args = ["--rooms", "1000000"];
    let child = bench(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    loop {
        let started = children(child.id());
        let cut = |pid: &u32| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            text(&line).contains("--taker")
        };
        // The prefill worker is the last that is started.
        if started.len() == 3 && started.iter().any(cut) {
            return (child, started);
        }
        assert!(begun.elapsed() < CAP, "never started");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_worker_that_dies_ends_a_bench_of_rooms_with_its_name() {
    for (place, name) in [(1, "decode-0"), (2, "prefill-0")] {
        let (child, mut started) = rooms_running();
        started.sort_unstable();
        // Rooms are on their way by then, or about to be.
        std::thread::sleep(Duration::from_millis(500));
        signal(started[place], "KILL");
        let (code, stderr) = ended(child);
        assert_eq!(code, Some(1), "{stderr}");
        assert!(stderr.contains("peer_lost"), "{stderr}");
        assert!(stderr.contains(&format!("process={name}, found=killed by signal 9")), "{stderr}");
        for pid in started {
            assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "{pid} is left");
        }
    }
}

#[test]
fn an_interruption_ends_a_bench_of_rooms() {
    let (child, started) = rooms_running();
    signal(child.id(), "INT");
    let (code, stderr) = ended(child);
    assert_eq!((code, stderr.as_str()), (Some(130), "interrupted\n"));
    for pid in started {
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "{pid} is left");
    }
}

/// A bench that goes on until it is ended; gives it when it measures.
fn running() -> (Child, u32) {
    let args = ["--page-bytes", "63", "--pages", "64", "--runs", "100000"];
    let mut child = bench(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The header comes when both processes are ready.
    let mut header = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut header).unwrap();
    assert!(header.contains("Block Size"), "{header}");
    let receiver = children(child.id());
    assert_eq!(receiver.len(), 1);
    (child, receiver[0])
}
fn children(parent: u32) -> Vec<u32> {
    let of_parent = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let behind_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        behind_name.split_whitespace().nth(1) == Some(&parent.to_string())
    };
    let processes = std::fs::read_dir("/proc").unwrap();
    let pids = processes.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    pids.filter(of_parent).collect()
}
fn signal(pid: u32, signal: &str) {
    let sent = Command::new("sh").args(["-c", &format!("kill -{signal} {pid}")]).status().unwrap();
    assert!(sent.success());
}
/// Waits for its end; gives the exit code and what it said.
fn ended(mut child: Child) -> (Option<i32>, String) {
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if begun.elapsed() > CAP {
            child.kill().unwrap();
            panic!("never ended");
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    (status.code(), stderr)
}

#[test]
fn a_receiver_that_dies_ends_it_with_the_reason() {
    let (child, receiver) = running();
    signal(receiver, "KILL");
    let (code, stderr) = ended(child);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("peer_lost: the receiver has ended"), "{stderr}");
    assert!(stderr.contains("found=killed by signal 9"), "{stderr}");
}

#[test]
fn an_interruption_ends_both_processes() {
    let (child, receiver) = running();
    signal(child.id(), "INT");
    let (code, stderr) = ended(child);
    assert_eq!((code, stderr.as_str()), (Some(130), "interrupted\n"));
    assert!(!std::path::Path::new(&format!("/proc/{receiver}")).exists());
}

#[test]
fn peers_that_are_not_installed_are_named_and_are_no_failure() {
    let dir = std::env::temp_dir().join(format!("kvlane-bench-test-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    // An interpreter without the packages that this machine may have.
    let bare = dir.join("python");
    std::fs::write(&bare, "#!/bin/sh\nunset PYTHONPATH\nexec python3 -S \"$@\"\n").unwrap();
    std::fs::set_permissions(&bare, std::fs::Permissions::from_mode(0o755)).unwrap();
    let (bare, absent) = (bare.to_str().unwrap(), dir.join("absent"));
    for (python, tried) in [
        (bare, "import nixl_cu12._api: ModuleNotFoundError"),
        (absent.to_str().unwrap(), "cannot be started"),
    ] {
        let args = ["--page-bytes", "63", "--pages", "4", "--runs", "1", "--json", "--peers"];
        let out = output(&[&args[..], &["--python", python]].concat());
        assert_eq!(rows(&out).len(), 1);
        let stderr = text(&out.stderr);
        for peer in ["nixl-ucx-tcp", "nixl-same-host", "mooncake-tcp"] {
            let line = stderr.lines().find(|line| line.starts_with(peer)).unwrap();
            assert!(line.contains(python) && line.contains("pip install"), "{line}");
        }
        assert!(stderr.contains(tried), "{stderr}");
    }
    std::fs::remove_dir_all(&dir).unwrap();
}
