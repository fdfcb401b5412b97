//! GPUs, NICs and the choice of rails, on synthetic trees.

#![allow(clippy::unwrap_used, missing_docs)]

mod sysfs_tree;

use kvlane_proto::{ErrorKind, limits};
use kvlane_transport::devices::{
    AddressClass, Choice, GidType, LinkLayer, Machine, PathClass, Reach, Sysfs, Target, Verdict,
    Wishes, choose, choose_by, known_errors,
};
use proptest::prelude::*;
use sysfs_tree::{
    Tree, behind_switch, bonds, dgx_h100, gb200, hgx_one_nic, mapped, soft_roce, troubled,
};

fn read(tree: &Tree) -> Machine {
    Machine::read(&Sysfs::new(tree.root()))
}

fn for_gpu(machine: &Machine, ordinal: usize, wishes: &Wishes) -> Choice {
    choose(machine, Target::Gpu(machine.gpus[ordinal].pci.address), wishes).unwrap()
}

fn for_host(machine: &Machine) -> Choice {
    choose(machine, Target::Host, &Wishes::default()).unwrap()
}

fn nics(choice: &Choice) -> Vec<&str> {
    choice.rails.iter().map(|rail| rail.nic.as_str()).collect()
}

fn named(names: &[&str]) -> Wishes {
    Wishes { nics: names.iter().map(ToString::to_string).collect(), ..Wishes::default() }
}

/// What is said of each candidate of a device: GID index, reason, fix (none if it is used).
fn said<'a>(choice: &'a Choice, nic: &str) -> Vec<(Option<u32>, &'a str, Option<&'a str>)> {
    let of_nic = choice.candidates.iter().filter(|c| c.nic == nic);
    of_nic
        .map(|c| {
            let index = c.gid.as_ref().map(|gid| gid.index);
            match &c.verdict {
                Verdict::Chosen { why } => (index, why.as_str(), None),
                Verdict::Refused { why, fix } => (index, why.as_str(), Some(*fix)),
            }
        })
        .collect()
}

#[test]
fn a_dgx_pairs_each_gpu_with_the_nic_behind_its_switch() {
    let machine = read(&dgx_h100());
    assert_eq!((machine.gpus.len(), machine.nics.len()), (8, 10));
    assert_eq!(machine.gpus[0].pci.address.to_string(), "0000:18:00.0");
    assert_eq!(machine.gpus[7].pci.numa, Some(1));
    let nic = &machine.nics[0];
    assert_eq!(nic.hca_type.as_deref(), Some("MT4129"));
    assert_eq!(nic.ports[0].bits_per_s, Some(400_000_000_000));
    assert_eq!(nic.ports[0].link_layer, Some(LinkLayer::InfiniBand));
    for n in 0..8 {
        let choice = for_gpu(&machine, n, &Wishes::default());
        assert_eq!(nics(&choice), [format!("mlx5_{n}")]);
        let rail = &choice.rails[0];
        assert_eq!((rail.path, rail.lid), (Some(PathClass::Pix), Some(10 + n as u16)));
        let other = said(&choice, &format!("mlx5_{}", (n + 1) % 8));
        let class = if n % 4 == 3 { "SYS" } else { "NODE" };
        let why = format!("{class}, and mlx5_{n} has PIX");
        assert_eq!(other, [(Some(0), why.as_str(), Some(""))]);
    }
    // Host memory takes all of them, the RoCE ones by their address.
    let choice = for_host(&machine);
    assert_eq!(choice.rails.len(), 10);
    assert_eq!(choice.rails[8].gid.as_ref().unwrap().address.to_string(), "10.1.0.1");
    assert_eq!((choice.rails[0].path, choice.rails[4].numa), (None, Some(1)));
}

#[test]
fn a_gpu_whose_nic_is_down_goes_through_others_and_that_is_said() {
    let tree = dgx_h100();
    tree.write("class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n");
    let choice = for_gpu(&read(&tree), 0, &Wishes::default());
    assert_eq!(nics(&choice), ["mlx5_1", "mlx5_2", "mlx5_3", "mlx5_8"]);
    let why = said(&choice, "mlx5_1")[0].1;
    assert!(why.starts_with("NODE") && why.ends_with("nearer, but not usable: mlx5_0"), "{why}");
}

#[test]
fn one_nic_serves_eight_gpus_at_its_own_distance() {
    let machine = read(&hgx_one_nic());
    let paths: Vec<_> = (0..8)
        .map(|n| {
            let choice = for_gpu(&machine, n, &Wishes::default());
            assert_eq!(nics(&choice), ["mlx5_0"]);
            choice.rails[0].path.unwrap()
        })
        .collect();
    use PathClass::{Node, Pix, Sys};
    assert_eq!(paths, [Pix, Pix, Node, Node, Sys, Sys, Sys, Sys]);
}

#[test]
fn where_every_device_has_its_own_domain_the_numa_node_decides() {
    let machine = read(&gb200());
    assert_eq!(machine.gpus[0].pci.address.to_string(), "0008:01:00.0");
    for (n, expected) in [(0, ["mlx5_0", "mlx5_1"]), (3, ["mlx5_2", "mlx5_3"])] {
        let choice = for_gpu(&machine, n, &Wishes::default());
        assert_eq!(nics(&choice), expected);
        assert!(choice.rails.iter().all(|rail| rail.path == Some(PathClass::Node)));
    }
}

#[test]
fn a_bond_without_a_device_link_is_chosen_with_its_members() {
    let machine = read(&bonds());
    let nic = machine.nic("mlx5_bond_0").unwrap();
    assert_eq!(nic.pci, None);
    let names: Vec<_> = nic.netdevs.iter().map(|n| n.name.as_str()).collect();
    assert_eq!(names, ["bond0", "p0", "p1"]);
    let bond = nic.netdevs[0].bond.as_ref().unwrap();
    assert_eq!((bond.mode.as_deref(), bond.active.as_deref()), (Some("active-backup"), Some("p0")));
    assert_eq!(nic.netdevs[1].master.as_deref(), Some("bond0"));
    assert_eq!(nic.ports[0].mtu_bytes, Some(4096));

    let choice = for_gpu(&machine, 0, &Wishes::default());
    assert_eq!(nics(&choice), ["mlx5_bond_0"]);
    assert_eq!(choice.rails[0].bond.as_ref(), Some(bond));
    let gid = choice.rails[0].gid.as_ref().unwrap();
    assert_eq!((gid.index, gid.netdev.as_deref()), (3, Some("bond0")));
    assert_eq!((gid.gid_type, gid.class), (Some(GidType::RoceV2), AddressClass::V4Mapped));
    // The bond without an IPv4 address: not 0.0.0.0, not its link-local one, and said so.
    let other = said(&choice, "mlx5_bond_1");
    assert_eq!(other.len(), 2);
    let (index, why, fix) = other[1];
    assert_eq!(index, Some(1));
    assert!(
        why.contains("fe80::/10") && fix.unwrap().contains("for a bond: the bond"),
        "{other:?}"
    );

    let e = choose(&machine, Target::Host, &named(&["mlx5_bond_1"])).unwrap();
    let e = e.require().unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NoPath);
    let text = e.to_string();
    for word in ["asked=mlx5_bond_1", "mlx5_bond_1 port 1 gid 1", "link-local", "IPv4 address"] {
        assert!(text.contains(word), "{word}: {text}");
    }
}

#[test]
fn soft_nics_have_no_path_and_are_said_to_have_none() {
    let tree = soft_roce();
    tree.gpu("pci0000:00/0000:00:01.0/0000:01:00.0", 0);
    let choice = for_gpu(&read(&tree), 0, &Wishes::default());
    assert_eq!(nics(&choice), ["rxe0", "rxe1"]);
    assert_eq!(choice.rails[0].path, Some(PathClass::Unknown));
    assert!(said(&choice, "rxe0").last().unwrap().1.contains("soft and virtual ones have none"));
    // A NIC with a path goes before them.
    tree.nic("mlx5_0", Some("pci0000:80/0000:80:01.0/0000:81:00.0"), 1).roce("eth0", "10.0.0.1");
    let choice = for_gpu(&read(&tree), 0, &Wishes::default());
    assert_eq!(nics(&choice), ["mlx5_0"]);
    let rxe = said(&choice, "rxe0");
    assert!(rxe.iter().any(|(_, why, _)| why.contains("not known, and mlx5_0 has SYS")), "{rxe:?}");
}

#[test]
fn what_cannot_be_used_is_refused_by_name_and_with_a_fix() {
    let machine = read(&troubled());
    let choice = for_gpu(&machine, 0, &Wishes::default());
    assert_eq!(nics(&choice), ["mlx5_1", "mlx5_10"]);
    let down = said(&choice, "mlx5_0");
    assert_eq!((down.len(), down[0].0, down[0].1), (1, None, "the port is DOWN (Disabled)"));
    assert!(down[0].2.unwrap().contains("bring the port up"));
    let addresses = said(&choice, "mlx5_2");
    for (at, word) in [(0, "RoCE v1"), (1, "fe80::/10"), (2, "0.0.0.0 is no"), (3, "169.254")] {
        assert_eq!(addresses[at].0, Some(at as u32));
        assert!(addresses[at].1.contains(word), "{addresses:?}");
    }
    let used = said(&choice, "mlx5_1");
    assert_eq!(used.len(), 4, "{used:?}");
    assert_eq!(used.iter().filter(|(_, _, fix)| fix.is_none()).count(), 1);
    // All that is said in errors is there for people as well, and bounded.
    let text = choice.to_string();
    for word in ["rail mlx5_1 port 1 gid 3 10.0.1.1", "used mlx5_1 port 1 gid 3", "DOWN (Disabled)"]
    {
        assert!(text.contains(word), "{word}: {text}");
    }
    assert!(choice.summary().len() <= limits::CANDIDATES_BYTES_MAX, "{}", choice.summary());
}

#[test]
fn link_local_is_for_one_host_and_only_where_there_is_nothing_else() {
    let tree = Tree::new();
    tree.netdev("eth0", 1500);
    tree.nic("mlx5_0", None, -1).link_local("eth0");
    assert!(for_host(&read(&tree)).require().is_err());
    let near = Wishes { same_host: true, ..Wishes::default() };
    let choice = choose(&read(&tree), Target::Host, &near).unwrap();
    assert_eq!(choice.rails[0].gid.as_ref().unwrap().index, 1);
    assert!(said(&choice, "mlx5_0")[1].1.contains("both ends are on this host"));
    // Another NIC with an address that is routed goes before it.
    tree.nic("mlx5_1", None, -1).roce("eth1", "10.0.0.1");
    let choice = choose(&read(&tree), Target::Host, &near).unwrap();
    assert_eq!(nics(&choice), ["mlx5_1"]);
    assert!(said(&choice, "mlx5_0")[1].1.contains("mlx5_1 port 1 is not"));
    let peer = Wishes { peer: Some("fe80::9".parse().unwrap()), ..near };
    let choice = choose(&read(&tree), Target::Host, &peer).unwrap();
    // Only their link-local addresses are of the peer's kind.
    assert_eq!(nics(&choice), ["mlx5_0", "mlx5_1"]);
    assert!(choice.rails.iter().all(|r| r.gid.as_ref().unwrap().class == AddressClass::LinkLocal));
}

#[test]
fn ipv4_goes_before_global_and_global_before_unique_local() {
    let tree = Tree::new();
    tree.netdev("eth0", 1500);
    let gids = [
        (5, "fd00:0000:0000:0000:0000:0000:0000:0001"),
        (6, "2001:0db8:0000:0000:0000:0000:0000:0001"),
        (7, &mapped("10.0.0.1")),
    ];
    let mut nic = tree.nic("mlx5_0", None, -1);
    for (index, gid) in gids {
        nic = nic.gid(index, gid, "RoCE v2", Some("eth0"));
        assert_eq!(for_host(&read(&tree)).rails[0].gid.as_ref().unwrap().index, index);
    }
    // … unless one is asked for, or the peer is of another kind.
    let by = |wishes: Wishes| {
        let choice = choose(&read(&tree), Target::Host, &wishes).unwrap();
        choice.rails.first().map(|rail| rail.gid.as_ref().unwrap().index)
    };
    let address = |text: &str| Some(text.parse().unwrap());
    assert_eq!(by(Wishes { address: address("fd00::1"), ..Wishes::default() }), Some(5));
    assert_eq!(by(Wishes { address: address("::ffff:10.0.0.1"), ..Wishes::default() }), Some(7));
    assert_eq!(by(Wishes { address: address("10.0.0.2"), ..Wishes::default() }), None);
    assert_eq!(by(Wishes { peer: address("fd00::9"), ..Wishes::default() }), Some(6));
    assert_eq!(by(Wishes { gid_type: Some(GidType::RoceV1), ..Wishes::default() }), None);
    // A caller that knows more of the routes says so.
    let wishes = Wishes { peer: address("10.9.0.1"), ..Wishes::default() };
    let choice = choose_by(&read(&tree), Target::Host, &wishes, &|ours, peer| {
        Some(format!("no route from {ours} to {peer}"))
    });
    let choice = choice.unwrap();
    assert!(choice.rails.is_empty());
    assert!(said(&choice, "mlx5_0")[2].1.contains("no route from 10.0.0.1 to 10.9.0.1"));
}

#[test]
fn names_are_matched_whole() {
    let machine = read(&troubled());
    assert_eq!(nics(&for_gpu(&machine, 0, &named(&["mlx5_1"]))), ["mlx5_1"]);
    assert_eq!(nics(&for_gpu(&machine, 0, &named(&["mlx5_10", "mlx5_1"]))), ["mlx5_10", "mlx5_1"]);
    for (asked, near) in [("mlx5_", true), ("MLX5_1", true), ("mlx5_11", true), ("bnxt_re0", false)]
    {
        let e = choose(&machine, Target::Host, &named(&[asked])).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::NotFound);
        let text = e.to_string();
        assert!(text.contains("known=mlx5_0, mlx5_1, mlx5_2, mlx5_10"), "{text}");
        assert_eq!(text.contains("near="), near, "{text}");
    }
    // One of those that were asked for is down: not the other one alone, silently.
    let choice = for_gpu(&machine, 0, &named(&["mlx5_1", "mlx5_0"]));
    let text = choice.require().unwrap_err().to_string();
    assert!(text.contains("asked=mlx5_0,") && text.contains("DOWN (Disabled)"), "{text}");
}

#[test]
fn unknown_gpus_are_refused_with_those_there_are() {
    let machine = read(&troubled());
    for asked in ["0", "0000:01:00.0", "01:00.0"] {
        assert_eq!(machine.gpu(asked).unwrap().ordinal, 0);
    }
    for asked in ["3", "99999999999999999999", "0000:02:00.0"] {
        let text = machine.gpu(asked).unwrap_err().to_string();
        for word in [asked, "known=gpu0 0000:01:00.0, gpu1 0000:81:00.0", "give 0 to 1"] {
            assert!(text.contains(word), "{word}: {text}");
        }
    }
    assert_eq!(machine.gpu("gpu0").unwrap_err().kind(), ErrorKind::Malformed);
    assert_eq!(machine.gpu("").unwrap_err().kind(), ErrorKind::Malformed);
    let text = Machine::default().gpu("0").unwrap_err().to_string();
    assert!(text.contains("known=none") && text.contains("no NVIDIA GPU"), "{text}");
}

#[test]
fn wishes_are_met_or_refused() {
    let tree = dgx_h100();
    let machine = read(&tree);
    let with = |wishes: Wishes| choose(&machine, Target::Host, &wishes);
    let e = with(Wishes { service_level: Some(16), ..Wishes::default() }).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Malformed);
    let choice = with(Wishes { port: Some(2), ..Wishes::default() }).unwrap();
    assert!(choice.rails.is_empty());
    assert_eq!(said(&choice, "mlx5_0")[0].1, "port 2 was asked for");
    // The membership bit is the port's business.
    let choice = with(Wishes {
        pkey: Some(0x7fff),
        traffic_class: Some(106),
        service_level: Some(3),
        ..Wishes::default()
    });
    let rail = choice.unwrap().rails[0].clone();
    let wished = (rail.pkey, rail.traffic_class, rail.service_level);
    assert_eq!(wished, (Some(0xffff), Some(106), Some(3)));
    let choice = with(Wishes { pkey: Some(0x8001), ..Wishes::default() }).unwrap();
    assert!(said(&choice, "mlx5_0")[0].1.contains("no partition key 0x8001, only 0xffff"));
    let choice = with(Wishes { gid_type: Some(GidType::RoceV2), ..Wishes::default() }).unwrap();
    assert_eq!(nics(&choice), ["mlx5_8", "mlx5_9"]);
}

#[test]
fn infiniband_wants_a_lid() {
    let tree = Tree::new();
    tree.nic("mlx5_0", Some(&behind_switch("0000", 0x15, 1)), 0).infiniband(0);
    let choice = for_host(&read(&tree));
    let (index, why, fix) = said(&choice, "mlx5_0")[0];
    assert_eq!((index, why), (None, "the port has no LID"));
    assert!(fix.unwrap().contains("subnet manager"));
}

#[test]
fn there_are_no_more_rails_than_the_limit() {
    let tree = Tree::new();
    for n in 0..20 {
        tree.nic(&format!("mlx5_{n}"), None, -1).roce(&format!("eth{n}"), &format!("10.0.{n}.1"));
    }
    let choice = for_host(&read(&tree));
    assert_eq!(choice.rails.len(), usize::from(limits::RAILS_MAX));
    assert_eq!(choice.rails[15].nic, "mlx5_15");
    assert_eq!(said(&choice, "mlx5_16").last().unwrap().1, "16 rails are the most");
    assert!(choice.summary().len() <= limits::CANDIDATES_BYTES_MAX);
}

#[test]
fn a_gid_is_found_where_it_is_now() {
    let tree = soft_roce();
    let sysfs = Sysfs::new(tree.root());
    let rail = for_host(&Machine::read(&sysfs)).rails[0].clone();
    let raw = rail.gid.as_ref().unwrap().raw;
    assert_eq!(rail.gid_now(&sysfs).unwrap(), (1, raw));
    // It moves, as after a failover; another type of the same address takes its place.
    let port = "class/infiniband/rxe0/ports/1";
    let zero = "0000:0000:0000:0000:0000:0000:0000:0000";
    tree.write(format!("{port}/gid_attrs/types/1"), "IB/RoCE v1\n");
    tree.write(format!("{port}/gids/4"), mapped("10.77.0.1"));
    tree.write(format!("{port}/gid_attrs/types/4"), "RoCE v2\n");
    tree.write(format!("{port}/gid_attrs/ndevs/4"), "nic0\n");
    assert_eq!(rail.gid_now(&sysfs).unwrap(), (4, raw));
    // Another netdev has it: that is another path.
    tree.write(format!("{port}/gid_attrs/ndevs/4"), "nic9\n");
    let text = rail.gid_now(&sysfs).unwrap_err().to_string();
    for word in ["nic=rxe0", "gid 1 10.77.0.1", "found=gid 0 fe80::", "gid 4 10.77.0.1", "nic9"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    for index in [0, 1, 4] {
        tree.write(format!("{port}/gids/{index}"), zero);
    }
    let e = rail.gid_now(&sysfs).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NoPath);
    assert!(e.to_string().contains("found=none"), "{e}");
}

#[test]
fn a_partition_key_is_found_where_it_is_now() {
    let tree = dgx_h100();
    let sysfs = Sysfs::new(tree.root());
    let table = "class/infiniband/mlx5_0/ports/1/pkeys";
    tree.write(format!("{table}/3"), "0x8002\n");
    let wishes = Wishes { pkey: Some(0x0002), ..Wishes::default() };
    let choice = choose(&Machine::read(&sysfs), Target::Host, &wishes).unwrap();
    assert_eq!(nics(&choice), ["mlx5_0"]);
    let rail = &choice.rails[0];
    assert_eq!((rail.pkey, rail.pkey_index_now(&sysfs).unwrap()), (Some(0x8002), 3));
    tree.write(format!("{table}/3"), "0x0000\n");
    tree.write(format!("{table}/7"), "0x8002\n");
    assert_eq!(rail.pkey_index_now(&sysfs).unwrap(), 7);
    tree.write(format!("{table}/7"), "0x8004\n");
    let text = rail.pkey_index_now(&sysfs).unwrap_err().to_string();
    assert!(text.contains("asked=0x8002") && text.contains("found=0xffff, 0x8004"), "{text}");
    assert_eq!(for_host(&Machine::read(&sysfs)).rails[0].pkey_index_now(&sysfs).unwrap(), 0);
}

#[test]
fn an_empty_machine_says_what_is_used_instead() {
    let tree = Tree::new();
    let machine = read(&tree);
    assert_eq!(machine, Machine::default());
    let text = for_host(&machine).require().unwrap_err().to_string();
    assert!(text.contains("no RDMA device is on this machine: use --engine tcp or shm"), "{text}");
    let gone = Machine::read(&Sysfs::new(tree.root().join("gone")));
    assert_eq!(gone, Machine::default());
}

/// Odd and hostile content is left out, bounded or cleaned, and never waited for.
#[test]
fn odd_trees_do_no_harm() {
    let tree = troubled();
    let port = "class/infiniband/mlx5_1/ports/1";
    // Nothing of the port of mlx5_1 is what it should be.
    tree.write(format!("{port}/state"), vec![b'4'; 1 << 20]);
    tree.write(format!("{port}/phys_state"), [0xff, 0xfe, 0x1b, b'[', b'2', b'J', 0, 0]);
    tree.write(format!("{port}/rate"), "99999999999999999999999 Gb/sec");
    tree.write(format!("{port}/lid"), "-1");
    tree.write(format!("{port}/gids/0"), "not a gid");
    tree.write(format!("{port}/gids/4294967296"), mapped("10.0.0.9"));
    tree.write(format!("{port}/gids/x"), mapped("10.0.0.9"));
    tree.write(format!("{port}/gid_attrs/ndevs/3"), "../../../../etc");
    // A link out of the tree, a loop, a directory and a pipe where files should be.
    tree.remove("class/infiniband/mlx5_1/hca_type");
    let out = tree.root().join("class/infiniband/mlx5_1/hca_type");
    std::os::unix::fs::symlink("/proc/version", out).unwrap();
    tree.remove("class/infiniband/mlx5_1/fw_ver");
    tree.link("class/infiniband/mlx5_1/fw_ver", "class/infiniband/mlx5_1/fw_ver");
    tree.remove("class/infiniband/mlx5_1/node_guid");
    std::fs::create_dir(tree.root().join("class/infiniband/mlx5_1/node_guid")).unwrap();
    tree.remove("class/infiniband/mlx5_1/board_id");
    let pipe = tree.root().join("class/infiniband/mlx5_1/board_id");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    std::fs::create_dir(tree.root().join("class/infiniband/evil\u{1b}[2J")).unwrap();
    let machine = read(&tree);
    let names: Vec<_> = machine.nics.iter().map(|nic| nic.name.as_str()).collect();
    assert_eq!(names, ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_10"]);
    let nic = machine.nic("mlx5_1").unwrap();
    assert_eq!((&nic.firmware, &nic.node_guid), (&None, &None));
    assert_eq!((&nic.board_id, &nic.hca_type), (&None, &None));
    let port = &nic.ports[0];
    assert_eq!((&port.state, port.bits_per_s, port.lid), (&None, None, None));
    assert!(!port.phys_state.as_ref().unwrap().contains('\u{1b}'));
    let gids: Vec<_> = port.gids.iter().map(|gid| (gid.index, gid.netdev.as_deref())).collect();
    assert_eq!(gids, [(1, Some("eth1")), (2, Some("eth1")), (3, None)]);
    assert_eq!(nics(&for_gpu(&machine, 0, &Wishes::default())), ["mlx5_10"]);
    // tar fills files of sysfs with zeros up to the size that they claim.
    let mut padded = b"4: ACTIVE\n".to_vec();
    padded.resize(4096, 0);
    tree.write("class/infiniband/mlx5_0/ports/1/state", padded);
    assert!(read(&tree).nics[0].ports[0].is_active());
}

#[test]
fn too_many_entries_are_cut_and_said() {
    let tree = Tree::new();
    for n in 0..=limits::SYSFS_ENTRIES_MAX {
        std::fs::create_dir(tree.root().join(format!("class/infiniband/x{n}"))).unwrap();
    }
    let machine = read(&tree);
    assert_eq!(machine.nics.len(), limits::SYSFS_ENTRIES_MAX);
    assert!(machine.notes[0].contains("class/infiniband"), "{:?}", machine.notes);
    let choice = for_host(&machine);
    assert!(choice.require().unwrap_err().to_string().len() < 2 * limits::REFUSAL_TEXT_BYTES_MAX);
}

#[test]
fn a_tree_copied_without_its_links_still_names_its_devices() {
    let tree = troubled();
    let copied = Tree::new();
    tree.write(
        "class/infiniband/mlx5_1/device/uevent",
        "DRIVER=mlx5_core\nPCI_SLOT_NAME=0000:03:00.0\n",
    );
    let status = std::process::Command::new("cp")
        .args(["-rL", "class/infiniband", "class/net"])
        .arg(copied.root().join("class"))
        .current_dir(tree.root())
        .stderr(std::process::Stdio::null())
        .status();
    // The link of the NIC to its device makes a loop that cp refuses to follow.
    let _ = status.unwrap();
    let nic = read(&copied).nic("mlx5_1").unwrap().clone();
    assert_eq!(nic.pci.unwrap().address.to_string(), "0000:03:00.0");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    /// Whatever files say, every port has a verdict and every text is bounded.
    #[test]
    fn no_content_does_harm(
        contents in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..64), 12),
        wide in "\\PC{0,64}",
    ) {
        let tree = Tree::new();
        tree.gpu("pci0000:00/0000:00:01.0/0000:01:00.0", 0);
        tree.nic("mlx5_0", Some("pci0000:00/0000:00:02.0/0000:02:00.0"), 0).roce("eth0", "10.0.0.1");
        tree.nic("mlx5_1", None, -1).roce("eth1", "10.0.0.2");
        let port = "class/infiniband/mlx5_0/ports/1";
        let files = [
            "state", "phys_state", "rate", "lid", "link_layer", "pkeys/0", "gids/3",
            "gid_attrs/types/3", "gid_attrs/ndevs/3", "gids/9",
        ];
        for (file, content) in files.iter().zip(&contents) {
            // Half of the files stay as they are, so that what is behind them is reached.
            if content.len() % 2 == 0 {
                tree.write(format!("{port}/{file}"), content);
            }
        }
        tree.write("class/net/eth0/mtu", &contents[10]);
        tree.write("bus/pci/devices/0000:02:00.0/numa_node", &contents[11]);
        tree.write("class/infiniband/mlx5_0/parent", &wide);
        let machine = read(&tree);
        let choice = for_gpu(&machine, 0, &Wishes::default());
        for nic in ["mlx5_0", "mlx5_1"] {
            prop_assert!(choice.candidates.iter().any(|c| c.nic == nic));
        }
        prop_assert!(choice.summary().len() <= limits::CANDIDATES_BYTES_MAX);
        prop_assert!(choice.to_string().lines().all(|line| !line.contains(char::is_control)));
        for gid in choice.rails.iter().filter_map(|rail| rail.gid.as_ref()) {
            prop_assert!(matches!(gid.reach(), Reach::Routed(_)), "{gid}");
        }
        let _ = (machine.gpu(&wide), machine.nic(&wide));
        let _ = (known_errors::find(&wide), known_errors::near(&wide));
    }
}
