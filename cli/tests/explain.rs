//! `kvlane explain` as users run it, on synthetic machines and on messages.

#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../../transport/tests/sysfs_tree/mod.rs"]
mod sysfs_tree;

use std::process::{Command, Output};

use serde_json::{Value, json};
use sysfs_tree::{Tree, bonds, dgx_h100, soft_roce, troubled};

fn explain(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvlane")).arg("explain").args(args).output().unwrap()
}

fn on(tree: &Tree, more: &[&str]) -> Output {
    explain(&[&["--sysfs", tree.root().to_str().unwrap()], more].concat())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Standard output of what must succeed.
fn good(out: &Output) -> String {
    assert!(out.status.success(), "{}", text(&out.stderr));
    text(&out.stdout)
}

/// Standard error of what must fail.
fn bad(out: &Output) -> String {
    assert_eq!(out.status.code(), Some(1), "{}", text(&out.stdout));
    text(&out.stderr)
}

fn has_all(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word}:\n{text}");
    }
}

#[test]
fn a_dgx_is_told_with_its_paths_and_rails() {
    let out = good(&on(&dgx_h100(), &[]));
    has_all(
        &out,
        &[
            "gpu0 0000:18:00.0  NUMA 0  10de:2330",
            "mlx5_0  0000:19:00.0  NUMA 0  MT4129  MT_0000000838  firmware 28.39.1002",
            "port 1: ACTIVE (LinkUp)  InfiniBand  400 Gb/s  lid 10  subnet manager 1",
            "gid 3 10.1.0.1 (RoCE v2, v4-mapped, eth8)",
            "PIX: one PCIe switch between them",
            "  gpu0 0000:18:00.0\n    rail mlx5_0 port 1 lid 10\n",
            "NODE, and mlx5_0 has PIX",
        ],
    );
    let row = out.lines().find(|line| line.starts_with("  gpu4   ")).unwrap();
    let classes: Vec<_> = row.split_whitespace().collect();
    assert_eq!(
        classes[1..],
        ["SYS", "SYS", "SYS", "SYS", "PIX", "NODE", "NODE", "NODE", "SYS", "NODE"]
    );
}

#[test]
fn a_bond_is_told_with_its_members_and_one_without_an_address_is_refused() {
    let tree = bonds();
    has_all(
        &good(&on(&tree, &[])),
        &[
            "mlx5_bond_0  no PCI device (soft or virtual)",
            "netdev bond0: up, MTU 9000, bond (active-backup) of p0, p1, active p0",
            "netdev p1: up, MTU 9000, member of bond0",
            "rail mlx5_bond_0 port 1 gid 3 10.77.0.1 (RoCE v2, v4-mapped, bond0) over p0, p1",
        ],
    );
    let e = bad(&on(&tree, &["--nic", "mlx5_bond_1"]));
    has_all(&e, &["no_path", "asked=mlx5_bond_1", "gid 1: link-local", "the bond itself"]);
}

#[test]
fn what_is_not_there_is_refused_with_what_is() {
    let two = troubled();
    let e = bad(&on(&two, &["--device", "3"]));
    has_all(&e, &["no such GPU", "asked=3", "known=gpu0 0000:01:00.0, gpu1", "fix: give 0 to 1"]);
    let e = bad(&on(&soft_roce(), &["--device", "3"]));
    has_all(&e, &["asked=3", "known=none", "no NVIDIA GPU"]);
    let e = bad(&on(&two, &["--nic", "mlx5_11"]));
    has_all(&e, &["asked=mlx5_11", "known=mlx5_0, mlx5_1, mlx5_2, mlx5_10", "near=mlx5_0, mlx5_1"]);
    let e = bad(&on(&two, &["--nic", "mlx5_0"]));
    has_all(&e, &["asked=mlx5_0", "the port is DOWN (Disabled)", "fix: bring the port up"]);
    let e = bad(&on(&two, &["--peer", "fd00::1"]));
    has_all(
        &e,
        &["no RDMA port can be used", "the peer fd00::1 cannot be reached from here: it is IPv6"],
    );
    let e = bad(&explain(&["--sysfs", "/no/such/place"]));
    has_all(&e, &["not_found", "sysfs=/no/such/place"]);
    // One place and one NIC that are there.
    let out = good(&on(&two, &["--device", "81:00.0", "--nic", "mlx5_10"]));
    has_all(&out, &["rail mlx5_10 port 1 gid 3", "asked for by name, path SYS"]);
    assert!(!out.contains("host memory"), "{out}");
}

#[test]
fn a_machine_without_rdma_says_what_is_used() {
    let out = good(&on(&Tree::new(), &[]));
    has_all(&out, &["nothing RDMA is on this machine", "--engine tcp", "--engine shm"]);
    let e = bad(&on(&Tree::new(), &["--nic", "mlx5_0"]));
    has_all(&e, &["known=none", "no RDMA device is there"]);
    let tree = Tree::new();
    tree.nic("mlx5_0", None, -1).down();
    let out = good(&on(&tree, &[]));
    has_all(
        &out,
        &["no rail", "DOWN (Disabled); fix: bring the port up", "until then --engine tcp"],
    );
}

#[test]
fn json_has_every_candidate() {
    let out = good(&on(&troubled(), &["--json", "--device", "0", "--traffic-class", "106"]));
    assert_eq!(out.lines().count(), 1);
    let all: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(all["machine"]["gpus"][1]["address"], "0000:81:00.0");
    assert_eq!(all["wishes"]["traffic_class"], 106);
    let choice = &all["choices"][0];
    assert_eq!(choice["target"], json!({ "gpu": "0000:01:00.0" }));
    assert_eq!(choice["rails"][0]["nic"], "mlx5_1");
    assert_eq!(choice["rails"][0]["path"], "PHB");
    assert_eq!(choice["rails"][0]["gid"]["raw"], sysfs_tree::mapped("10.0.1.1"));
    let candidates = choice["candidates"].as_array().unwrap();
    // One port that is down, and four GIDs of each of the others.
    assert_eq!(candidates.len(), 1 + 3 * 4);
    assert!(
        candidates
            .iter()
            .all(|c| c["verdict"]["chosen"].is_object() != c["verdict"]["refused"].is_object())
    );
}

#[test]
fn messages_are_explained() {
    let line = "E0801 gpunetio_backend.cpp:1010] Can't register memory for unknown device 3";
    let out = good(&explain(&["--error", line]));
    has_all(&out, &["GPU 0 only", "separated by spaces", "see    kvlane explain --device N"]);
    let out = good(&explain(&["--error", "DOCA: Failed to extract SOCKADDR_IN"]));
    has_all(&out, &["0.0.0.0", "oob_interface to the bond's netdev"]);
    let out = good(&explain(&[
        "--error",
        "createXferReq: no specified or potential backend had the required registrations to be able to do the transfer",
    ]));
    has_all(&out, &["1. the local buffer is not registered", "another device number"]);
    // Two in one text are both shown; JSON has them in a list.
    let both = "to RTR: ENODATA; Got completion with status=12 opcode=0";
    let out = good(&explain(&["--json", "--error", both]));
    let all: Value = serde_json::from_str(&out).unwrap();
    let matches = all["matches"].as_array().unwrap();
    assert_eq!(matches.len(), 2);
    assert!(matches.iter().all(|m| !m["causes"].as_array().unwrap().is_empty()));
    // kvlane's own words, as they stand on standard error.
    let own = bad(&on(&troubled(), &["--device", "3"]));
    has_all(&good(&explain(&["--error", &own])), &["not_found", "Use one of the candidates."]);
    let out = explain(&["--error", "the retry counter was exceeded"]);
    assert_eq!(out.status.code(), Some(2));
    has_all(&text(&out.stdout), &["Nothing is known", "near: transport retry counter exceeded"]);
    let out = explain(&["--error", "xyzzy"]);
    assert_eq!(out.status.code(), Some(2));
    has_all(&text(&out.stdout), &["Nothing is known", "please report it"]);
}

#[test]
fn flags_that_make_no_sense_are_refused() {
    for (args, word) in [
        (&["--gid-type", "roce-v3"][..], "expected roce-v2, roce-v1 or ib"),
        (&["--pkey", "0x8000"], "expected a key such as 0x8001"),
        (&["--gid-address", "10.0.0"], "--gid-address"),
        (&["--service-level", "16"], "16 is not in 0..=15"),
        (&["--error", "x", "--nic", "mlx5_0"], "cannot be used with"),
    ] {
        let out = explain(args);
        assert_eq!(out.status.code(), Some(2), "{args:?}");
        has_all(&text(&out.stderr), &[word]);
    }
}
