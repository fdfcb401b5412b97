//! The `verbs` engine over a provider in this process that fails on demand: what soft-RoCE cannot do.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)] // Tests fail by panicking.

mod engine_conformance;
mod fake_verbs;
mod sysfs_tree;

use std::time::Duration;

use engine_conformance::nics::{arrived, finish, revoke, whys};
use engine_conformance::one_sided::{downs, many_revokes, pools, quiesced, until_up};
use engine_conformance::{CANARY, LINK, PATIENCE, Pair, Pool, listen, peer, run};
use fake_verbs::{Bed, Host};
use sysfs_tree::Tree;

use kvlane_proto::{ErrorKind, GrantId, LaneId, LinkId, PartId, Role, limits};
use kvlane_transport::devices::Sysfs;
use kvlane_transport::emulated::verbs::{Device, Knobs};
use kvlane_transport::engine::one_sided::wire::Message;
use kvlane_transport::engine::verbs::{VerbsConfig, VerbsEngine};
use kvlane_transport::engine::{Command, EngineEvent, OpenGrant, OpenSource, Post, SendGrant};
use kvlane_transport::memory::Region;
use kvlane_transport::sys::verbs::{Access, DmabufRange, GpuWay, ProtectionDomain, Range};
use kvlane_transport::sys::wait::readable;

const GIB: u64 = 1 << 30;

fn backwards(blocks: u32) -> Vec<u32> {
    (0..blocks).rev().collect()
}

#[test]
fn it_conforms() {
    let (from, to) = (Host::new(1), Host::new(1));
    run(&|| (from.engine(2048), to.engine(2048)));
    assert_eq!((from.nics[0].holds(), to.nics[0].holds()), ((0, 0), (0, 0)), "nothing is left");
}

#[test]
fn it_conforms_over_two_rails_with_rings_smaller_than_parts() {
    let (from, to) = (Host::new(2), Host::new(2));
    run(&|| (from.engine(16), to.engine(16)));
}

/// Revokes at any moment of many parts. Set `KVLANE_REVOKES` for more than the usual ten thousand.
#[test]
fn nothing_lands_after_any_of_many_revokes() {
    let (from, to) = (Host::new(2), Host::new(2));
    // On one rail the sender hears late of what has landed; on the other, writes are on their way for
    // some time. What a receiver has let through lands as late as it may.
    from.nics[0].set(|knobs| knobs.delay = Duration::from_micros(200));
    from.nics[1].set(|knobs| knobs.transit = Duration::from_micros(50));
    to.nics.iter().for_each(|nic| nic.set(|knobs| knobs.lands_late = true));
    let revokes = std::env::var("KVLANE_REVOKES").ok().and_then(|n| n.parse().ok());
    let revokes = revokes.unwrap_or(10_000);
    // Parts are longer than the ring.
    let mut p = Pair::new((from.engine(16), to.engine(16)));
    let seen = many_revokes(&mut p, 32, revokes, 64, 12);
    let early_or_late = seen.iter().all(|&n| n > revokes / 100);
    assert!(early_or_late, "the revokes are all too early or late: {seen:?}");
    let late = to.nics[1].landed_late();
    println!("{late} writes landed after the error of their queue pair");
    assert!(late > revokes / 100, "nothing lands as late as it may: {late}");
}

#[test]
fn writes_on_the_wire_do_not_land_after_the_proof() {
    land_after_the_proof(false);
}

#[test]
fn writes_that_were_let_through_do_not_land_after_the_proof() {
    land_after_the_proof(true);
}

fn land_after_the_proof(lands_late: bool) {
    let Bed { from, to, mut p } = Bed::new(1);
    let (src, dst) = pools(&mut p, 4096, 16);
    p.connect(2);
    let ids: Vec<u32> = (0..16).collect();
    let (source, plan) = (src.source(&ids, 4 * 4096), dst.plan(&backwards(16), 4 * 4096));
    from.nics[0].set(|knobs| knobs.holds = true);
    to.nics[0].set(|knobs| knobs.lands_late = lands_late);
    p.open(1, 2, &plan);
    for part in 0..4 {
        p.post(1, part, (part % 2) as u16, &source);
    }
    p.settle();
    assert!(arrived(&p, 1).is_empty() && dst.touched() == 0);
    assert_eq!(from.nics[0].on_the_wire(), 16);
    revoke(&mut p, 1);
    // On either lane the first part, whose immediate is behind it, had been let through.
    let late = if lands_late { 8 } else { 0 };
    assert_eq!((dst.touched(), to.nics[0].landed_late()), (late as usize * 4096, late));
    dst.fill(CANARY);
    from.nics[0].set(|knobs| knobs.holds = false);
    p.settle();
    assert_eq!(dst.touched(), 0, "a byte landed after the proof");
    // And without a proof it would.
    until_up(&mut p, 0);
    until_up(&mut p, 1);
    from.nics[0].set(|knobs| knobs.holds = true);
    p.open(2, 2, &plan);
    p.post(2, 0, 0, &source);
    p.settle();
    from.nics[0].set(|knobs| knobs.holds = false);
    p.until("part", |p| arrived(p, 2) == [0]);
    assert_eq!(dst.touched(), 4 * 4096);
}

#[test]
fn a_pool_beyond_the_longest_region_is_registered_in_pieces() {
    let knobs = Knobs { max_region_bytes: GIB, ..Knobs::default() };
    let (from, to) = (Host::with(1, &knobs), Host::with(1, &knobs));
    let mut p = Pair::new((from.engine(64), to.engine(64)));
    // 2.5 GiB of pages of 1 MiB; nobody touches most of them.
    let (src, dst) = pools_of(&mut p, 1 << 20, 2560);
    p.connect(1);
    // Those on either side of a piece's end, and some beyond.
    let ids = [0, 1023, 1024, 2047, 2048, 2559];
    let marks = |n: usize| vec![n as u8 + 1; 1 << 20];
    for (n, id) in ids.iter().enumerate() {
        src.write(src.region.address() + (u64::from(*id) << 20), &marks(n));
    }
    let there = [2559, 0, 1025, 1022, 2049, 2046];
    p.open(1, 1, &dst.plan(&there, 2 << 20));
    p.send_all(1, 1, &src.source(&ids, 2 << 20));
    for (n, id) in there.iter().enumerate() {
        let found = dst.read(dst.region.address() + (u64::from(*id) << 20), 1 << 20);
        assert_eq!(found, marks(n), "block {id}");
    }
    finish(&mut p, 1);
    // Three pieces, and at the sender a word of credit.
    assert_eq!((from.nics[0].holds().0, to.nics[0].holds().0), (4, 3));
}

#[test]
fn a_page_beyond_the_longest_message_is_written_in_several() {
    let knobs = Knobs { max_message_bytes: 1 << 12, ..Knobs::default() };
    let (from, to) = (Host::with(1, &knobs), Host::with(1, &knobs));
    let mut p = Pair::new((from.engine(16), to.engine(16)));
    let (src, dst) = pools_of(&mut p, 70_000, 4);
    dst.fill(CANARY);
    p.connect(1);
    p.open(1, 1, &dst.plan(&[2, 0, 3], 1 << 17));
    p.send_all(1, 1, &src.source(&[1, 2, 3], 1 << 17));
    assert_eq!(dst.touched(), 3 * 70_000);
    finish(&mut p, 1);
}

fn pools_of(p: &mut Pair, page_bytes: u32, blocks: u32) -> (Pool, Pool) {
    let l = engine_conformance::layout(page_bytes, 1, kvlane_proto::layout::KvKind::Mla);
    let (src, dst) = (Pool::new(&l, blocks), Pool::new(&l, blocks));
    p.tx.register(&src.region).unwrap();
    p.rx.register(&dst.region).unwrap();
    (src, dst)
}

#[test]
fn a_registration_that_fails_half_way_leaves_nothing() {
    let knobs = Knobs { max_region_bytes: GIB, ..Knobs::default() };
    let (from, to) = (Host::with(1, &knobs), Host::with(1, &knobs));
    let mut p = Pair::new((from.engine(64), to.engine(64)));
    let (_src, _dst) = pools(&mut p, 4096, 16);
    p.connect(1);
    let before = to.nics[0].holds();
    let large = Region::for_nic_sparse(5 * GIB / 2).unwrap();
    // By the memory of the host, or the NIC's table of regions.
    for (left, most, done) in [(Some(1), 1 << 16, 1), (None, before.0 + 2, 2)] {
        to.nics[0].set(|knobs| (knobs.registrations_left, knobs.max_regions) = (left, most));
        let e = p.rx.register(&large).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Memory);
        let (e, pieces) = (e.to_string(), format!("pieces_done={done}"));
        for word in [&pieces, "nic=fake_", "bytes cannot be registered", "RLIMIT_MEMLOCK", "fix:"] {
            assert!(e.contains(word), "{word}: {e}");
        }
        assert_eq!(to.nics[0].holds(), before, "what was registered is taken back");
    }
    to.nics[0].set(|knobs| knobs.max_regions = 1 << 16);
    p.rx.register(&large).unwrap();
    assert_eq!(to.nics[0].holds().0, before.0 + 3);
}

#[test]
fn an_address_that_moves_is_found_and_one_that_is_gone_is_named() {
    let Bed { from, to, mut p } = Bed::new(1);
    let (src, dst) = pools(&mut p, 4096, 16);
    p.connect(1);
    // As a bond that fails over: the same GID, elsewhere in the table.
    for nic in [from.nics[0], to.nics[0]] {
        nic.set(|knobs| knobs.gids.iter_mut().for_each(|gid| gid.0 += 5));
    }
    let ids: Vec<u32> = (0..4).collect();
    p.tell_tx(Command::ResetLane { link: LINK, lane: kvlane_proto::LaneId(0) });
    p.until("loss", |p| !downs(&p.from_tx).is_empty());
    until_up(&mut p, 0);
    p.open(1, 1, &dst.plan(&ids, 4096));
    p.send_all(1, 1, &src.source(&ids, 4096));
    finish(&mut p, 1);
    // Gone: the lane waits, and says which address is missing and what there is.
    from.nics[0].set(|knobs| knobs.gids.clear());
    from.tree.remove(format!("class/infiniband/{}/ports/1/gids/3", from.names[0]));
    p.clear();
    p.tell_tx(Command::ResetLane { link: LINK, lane: kvlane_proto::LaneId(0) });
    let gone = |e: &EngineEvent| match e {
        EngineEvent::Trouble(e) => {
            let text = e.to_string();
            ["does not have its address", "10.7.", "found=", "fix:"]
                .iter()
                .all(|word| text.contains(word))
        }
        _ => false,
    };
    p.until("which is missing", |p| p.from_tx.iter().any(gone));
    p.settle();
    assert!(!p.from_tx.iter().any(|e| matches!(e, EngineEvent::LaneUp { .. })));
}

const UNIQUE_LOCAL: u8 = 0xfd;

/// A host whose NIC has a link-local address and one more.
fn addressed(nth: u8, first: u8) -> Host {
    let (tree, name) = (Tree::new(), format!("fake_six_{first:x}_{nth}"));
    let mut gid = [0; 16];
    (gid[0], gid[15]) = (first, nth);
    let mut link_local = [0; 16];
    (link_local[0], link_local[1], link_local[15]) = (0xfe, 0x80, nth);
    tree.netdev("eth0", 9000);
    let text = |gid: [u8; 16]| std::net::Ipv6Addr::from(gid).to_string();
    let nic = tree.nic(&name, None, 0);
    let nic = nic.gid(1, &text(link_local), "RoCE v2", Some("eth0"));
    nic.gid(5, &text(gid), "RoCE v2", Some("eth0"));
    let gids = vec![(1, link_local, true, 0), (5, gid, true, 0)];
    let nics = vec![Device::new(&name, Knobs { gids, ..Knobs::default() })];
    Host { tree, names: vec![name], nics }
}

#[test]
fn addresses_of_one_kind_reach_each_other_and_of_two_are_refused() {
    let (from, to) = (addressed(1, UNIQUE_LOCAL), addressed(2, UNIQUE_LOCAL));
    let mut p = Pair::new((from.engine(64), to.engine(64)));
    let (src, dst) = pools(&mut p, 4096, 16);
    p.connect(1);
    p.open(1, 1, &dst.plan(&[3, 1, 2], 4096));
    p.send_all(1, 1, &src.source(&[0, 1, 2], 4096));
    finish(&mut p, 1);
    // IPv4 at the sender.
    let from = Host::new(1);
    let mut p = Pair::new((from.engine(64), to.engine(64)));
    listen(&mut p, 1);
    p.until("refusal", |p| !whys(&p.from_tx).is_empty());
    let why = whys(&p.from_tx).remove(0);
    for word in ["cannot be reached", "it is IPv4, the GID is IPv6", "10.7.", "fd00::2", "fix: "] {
        assert!(why.contains(word), "{word}: {why}");
    }
    assert!(!p.from_tx.iter().any(|e| matches!(e, EngineEvent::LaneUp { .. })));
}

#[test]
fn ports_that_nobody_reaches_are_refused_with_every_candidate() {
    let tree = Tree::new();
    tree.nic("fake_local", None, 0).link_local("eth0");
    tree.nic("fake_none", None, 0);
    tree.nic("fake_down", None, 0).roce("eth2", "10.9.0.1").down();
    let config = VerbsConfig::default();
    let sysfs = Sysfs::new(tree.root());
    let e = VerbsEngine::by(&Device::verbs(), &sysfs, &config).err().unwrap().to_string();
    for word in ["fake_local", "link-local", "fake_none", "fake_down", "DOWN", "fix:"] {
        assert!(e.contains(word), "{word}: {e}");
    }
}

#[test]
fn a_rail_that_fails_leaves_its_parts_to_those_that_are_slow() {
    let Bed { from, to, mut p } = Bed::new(4);
    let (src, dst) = pools(&mut p, 4096, 64);
    p.connect(4);
    for nic in &from.nics[1..] {
        nic.set(|knobs| knobs.delay = Duration::from_millis(20));
    }
    from.nics[0].plug(false);
    let ids: Vec<u32> = (0..64).collect();
    let (source, plan) = (src.source(&ids, 4 * 4096), dst.plan(&backwards(64), 4 * 4096));
    p.open(1, 4, &plan);
    for part in 0..4 {
        p.post(1, part, part as u16, &source);
    }
    p.until("the rail's loss", |p| !downs(&p.from_tx).is_empty());
    assert_eq!(downs(&p.from_tx), [0]);
    let why = whys(&p.from_tx).remove(0);
    let nic = format!("nic={}", from.names[0]);
    for word in [
        &nic,
        "port=1",
        "queue_pair=0x",
        "peer=c/decode/i/0",
        "transport retry counter exceeded",
        "code=0x0c",
        "vendor_code=0x5a",
        "grant=",
        "part=0",
        "fix: ",
    ] {
        assert!(why.contains(word), "{word}: {why}");
    }
    // What was on it, and the rest, over the others.
    p.until("parts", |p| p.acked() == 3);
    p.post(1, 0, 1, &source);
    for part in 4..16 {
        p.until("room", |p| p.acked() + 8 > part as usize);
        p.post(1, part, (1 + part % 3) as u16, &source);
    }
    p.until("all parts", |p| p.acked() == 16);
    assert_eq!(dst.touched(), 64 * 4096);
    p.tell_tx(Command::Quiesce { link: LINK, grant: GrantId(1) });
    p.until("quiesced", |p| quiesced(&p.from_tx, 1));
    revoke(&mut p, 1);
    // It is plugged in again, and carries its share.
    from.nics[0].plug(true);
    until_up(&mut p, 0);
    (1..4).for_each(|lane| until_up(&mut p, lane));
    dst.fill(CANARY);
    p.clear();
    p.open(2, 4, &plan);
    p.send_all(2, 4, &source);
    assert_eq!(dst.touched(), 64 * 4096);
    finish(&mut p, 2);
    drop(to);
}

#[test]
fn a_completion_that_never_comes_is_an_error_by_itself() {
    let Bed { from, mut p, .. } = Bed::new(2);
    let (src, dst) = pools(&mut p, 4096, 16);
    p.connect(2);
    from.nics[0].set(|knobs| knobs.loses = 1);
    let ids: Vec<u32> = (0..16).collect();
    let (source, plan) = (src.source(&ids, 4 * 4096), dst.plan(&ids, 4 * 4096));
    p.open(1, 2, &plan);
    p.post(1, 0, 0, &source);
    p.settle();
    assert!(downs(&p.from_tx).is_empty() && p.acked() == 0);
    // The engine's thread would sleep: it has to wake for it.
    let until = p.tx.park(&mut Vec::new()).unwrap();
    assert!(until <= p.now().plus_ms(limits::COMPLETION_MS));
    p.skip_ms = limits::COMPLETION_MS;
    p.until("the lane's loss", |p| downs(&p.from_tx) == [0]);
    let why = whys(&p.from_tx).remove(0);
    for word in ["does not complete", "nic=fake_", "grant=", "part=0", "limit_ms=4000", "fix: "] {
        assert!(why.contains(word), "{word}: {why}");
    }
    // The other lane has it, and the receiver takes it once.
    p.post(1, 0, 1, &source);
    p.until("part", |p| p.acked() == 1);
    revoke(&mut p, 1);
}

#[test]
fn a_count_that_never_completes_costs_the_receiver_its_lane() {
    let Bed { to, mut p, .. } = Bed::new(1);
    let (src, dst) = pools(&mut p, 4096, 32);
    p.connect(1);
    to.nics[0].set(|knobs| knobs.loses = 1);
    // As many parts as there are immediates before the sender is told.
    let ids: Vec<u32> = (0..16).collect();
    let (source, plan) = (src.source(&ids, 4096), dst.plan(&ids, 4096));
    p.open(1, 1, &plan);
    p.send_all(1, 1, &source);
    p.settle();
    assert!(to.nics[0].set(|knobs| knobs.loses) == 0 && downs(&p.from_rx).is_empty());
    // The engine's thread would sleep: it has to wake for it.
    let until = p.rx.park(&mut Vec::new()).unwrap();
    assert!(until <= p.now().plus_ms(limits::COMPLETION_MS));
    p.skip_ms = limits::COMPLETION_MS;
    p.until("the lane's loss", |p| downs(&p.from_rx) == [0]);
    let why = whys(&p.from_rx).remove(0);
    for word in [
        "does not complete",
        "nic=fake_",
        "queue_pair=0x",
        "peer=c/prefill/i/0",
        "limit_ms=4000",
        "fix: ",
    ] {
        assert!(why.contains(word), "{word}: {why}");
    }
    // What had arrived has; the next goes over another queue pair.
    assert_eq!(arrived(&p, 1).len(), 16);
    revoke(&mut p, 1);
    until_up(&mut p, 0);
    p.clear();
    p.open(2, 1, &plan);
    p.send_all(2, 1, &source);
    finish(&mut p, 2);
}

#[test]
fn a_post_that_the_driver_refuses_costs_the_lane_and_nothing_is_written_out_of_order() {
    let Bed { from, mut p, .. } = Bed::new(1);
    let (src, dst) = pools(&mut p, 4096, 16);
    p.connect(1);
    // In the middle of a batch.
    from.nics[0].set(|knobs| knobs.posts_left = Some(5));
    let ids: Vec<u32> = (0..16).collect();
    let plan = dst.plan(&backwards(16), 16 * 4096);
    p.open(1, 1, &plan);
    p.post(1, 0, 0, &src.source(&ids, 16 * 4096));
    p.until("the lane's loss", |p| downs(&p.from_tx) == [0]);
    let why = whys(&p.from_tx).remove(0);
    for word in ["post refused by the driver (ENOMEM)", "nic=fake_", "grant=", "part=0", "fix: "] {
        assert!(why.contains(word), "{word}: {why}");
    }
    assert!(dst.touched() <= 5 * 4096 && arrived(&p, 1).is_empty());
    from.nics[0].set(|knobs| knobs.posts_left = None);
    revoke(&mut p, 1);
    until_up(&mut p, 0);
    p.clear();
    p.open(2, 1, &plan);
    p.send_all(2, 1, &src.source(&ids, 16 * 4096));
    finish(&mut p, 2);
}

#[test]
fn a_device_that_is_gone_costs_its_rail_and_what_it_may_write_stays_withheld() {
    let Bed { to, mut p, .. } = Bed::new(2);
    let (src, dst) = pools(&mut p, 4096, 16);
    p.connect(2);
    let ids: Vec<u32> = (0..16).collect();
    let (source, plan) = (src.source(&ids, 4 * 4096), dst.plan(&ids, 4 * 4096));
    p.open(1, 2, &plan);
    to.nics[0].fatal();
    p.until("the NIC's loss", |p| {
        let lost = |e: &EngineEvent| matches!(e, EngineEvent::Trouble(e) if e.to_string().contains("the NIC is lost"));
        p.from_rx.iter().any(lost)
    });
    assert_eq!(downs(&p.from_rx), [0]);
    // What is bound to it can never be proved over.
    p.tell_rx(Command::Fence {
        grant: GrantId(1),
        how: kvlane_transport::engine::FenceHow::Revoke,
    });
    p.until("no proof", |p| {
        p.from_rx.iter().any(|e| matches!(e, EngineEvent::FenceFailed { grant: GrantId(1), .. }))
    });
    // The other rail carries other rooms.
    until_up(&mut p, 1);
    p.clear();
    p.open_on(2, &[1], &plan);
    p.send_on(2, &[1], &source);
    p.tell_tx(Command::Quiesce { link: LINK, grant: GrantId(2) });
    p.until("quiesced", |p| quiesced(&p.from_tx, 2));
}

#[test]
fn a_device_that_is_gone_at_the_sender_leaves_its_parts_to_others() {
    let Bed { from, mut p, .. } = Bed::new(2);
    let (src, dst) = pools(&mut p, 4096, 16);
    p.connect(2);
    let ids: Vec<u32> = (0..16).collect();
    let (source, plan) = (src.source(&ids, 8 * 4096), dst.plan(&backwards(16), 8 * 4096));
    p.open(1, 2, &plan);
    from.nics[0].set(|knobs| knobs.holds = true);
    p.post(1, 0, 0, &source);
    p.post(1, 1, 1, &source);
    p.until("the other part", |p| arrived(p, 1) == [1]);
    from.nics[0].fatal();
    p.until("the lane's loss", |p| downs(&p.from_tx) == [0]);
    let why = whys(&p.from_tx).remove(0);
    for word in ["the NIC is lost", &from.names[0], "fix: "] {
        assert!(why.contains(word), "{word}: {why}");
    }
    p.post(1, 0, 1, &source);
    p.until("both", |p| p.acked() == 2);
    assert_eq!(dst.touched(), 16 * 4096);
    // The receiver's NICs are whole: it proves what it likes. The lost one may read the source for ever.
    revoke(&mut p, 1);
    dst.fill(CANARY);
    from.nics[0].set(|knobs| knobs.holds = false);
    p.tell_tx(Command::Quiesce { link: LINK, grant: GrantId(1) });
    p.settle();
    assert!(!quiesced(&p.from_tx, 1), "nobody knows what the lost NIC reads");
    assert_eq!(dst.touched(), 0, "a byte landed after the proof");
}

#[test]
fn keys_of_one_link_do_not_work_on_another() {
    let Bed { mut p, .. } = Bed::new(1);
    let (src, dst) = pools(&mut p, 4096, 16);
    let regions = |commands: &std::collections::VecDeque<Command>| {
        commands.iter().find_map(|command| match command {
            Command::Told { message, .. } => match Message::decode(message) {
                Ok(Message::Paired { regions, .. }) => Some(regions),
                _ => None,
            },
            _ => None,
        })
    };
    let mut keys = None;
    listen(&mut p, 1);
    p.until("keys", |p| {
        p.poll_rx();
        keys = keys.take().or_else(|| regions(&p.to_tx));
        keys.is_some()
    });
    until_up(&mut p, 0);
    p.clear();
    // The same engines are linked once more, and somebody tells the keys of the first link.
    let link = LinkId(2);
    for receiver in [true, false] {
        let peer = peer(if receiver { Role::Prefill } else { Role::Decode });
        let listen = Command::Listen { link, peer, lanes: 1, receiver };
        if receiver { p.tell_rx(listen) } else { p.tell_tx(listen) }
    }
    let blob = |events: &[EngineEvent]| {
        events.iter().find_map(|e| match e {
            EngineEvent::Local { blob, .. } => Some(blob.as_ref().unwrap().clone()),
            _ => None,
        })
    };
    p.until("blobs", |p| blob(&p.from_tx).is_some() && blob(&p.from_rx).is_some());
    let [of_tx, of_rx] = [&p.from_tx, &p.from_rx].map(|events| blob(events).unwrap());
    p.tell_tx(Command::Connect { link, remote: of_rx });
    p.tell_rx(Command::Connect { link, remote: of_tx });
    let up = |e: &EngineEvent| matches!(e, EngineEvent::LaneUp { link: l, .. } if *l == link);
    p.until("lane", |p| {
        p.poll_rx();
        for command in &mut p.to_tx {
            if let Command::Told { message, .. } = command
                && let Ok(Message::Paired { lane, epoch, end, receives, regions }) =
                    Message::decode(message)
            {
                let foreign = keys.clone().unwrap();
                assert_ne!(foreign, regions, "a link has keys of its own");
                *message =
                    Message::Paired { lane, epoch, end, receives, regions: foreign }.encode();
            }
        }
        p.from_tx.iter().any(up)
    });
    let (source, plan) = (src.source(&[0, 1], 4096), dst.plan(&[2, 3], 4096));
    let (grant, lanes) = (GrantId(1), vec![LaneId(0)]);
    let open = OpenSource { link, lanes: lanes.clone(), plan: plan.clone() };
    p.tell_rx(Command::Open(OpenGrant { grant, sources: vec![open] }));
    p.tell_tx(Command::Grant(SendGrant { link, grant, lanes, plan: plan.clone() }));
    let (part, pages) = (PartId(0), source.pages(PartId(0)).unwrap());
    p.tell_tx(Command::Post(Post { link, grant, part, lane: LaneId(0), pages }));
    p.until("the lane's loss", |p| !downs(&p.from_tx).is_empty());
    let why = whys(&p.from_tx).remove(0);
    for word in ["remote access error", "code=0x0a", "vendor_code=0x5a", "nic=fake_", "fix: "] {
        assert!(why.contains(word), "{word}: {why}");
    }
    assert_eq!(dst.touched(), 0);
    // The first link is as it was.
    p.clear();
    p.open(2, 1, &plan);
    p.send_all(2, 1, &source);
    assert_eq!(dst.touched(), 2 * 4096);
}

/// The descriptors of a parked engine are readable when there is something for it.
#[test]
fn an_engine_that_sleeps_is_woken_by_arrivals_completions_and_events() {
    let Bed { from, mut p, .. } = Bed::new(1);
    let (src, dst) = pools(&mut p, 4096, 16);
    p.connect(1);
    p.open(1, 1, &dst.plan(&[0, 1], 4096));
    p.settle();
    let mut fds = [vec![], vec![]];
    p.tx.park(&mut fds[0]);
    p.rx.park(&mut fds[1]);
    let wakes = |side: usize| fds[side].iter().any(|interest| readable(interest.fd));
    assert!(!wakes(0) && !wakes(1));
    p.post(1, 0, 0, &src.source(&[0, 1], 4096));
    p.poll_tx();
    assert!(wakes(0) && wakes(1), "a completion, and an arrival");
    p.until("part", |p| arrived(p, 1) == [0] && p.acked() == 1);
    p.settle();
    assert!(!wakes(0) && !wakes(1), "what was told is not told again");
    from.nics[0].plug(false);
    assert!(wakes(0) && !wakes(1));
}

/// An answer to an older queue pair configures no newer one.
#[test]
fn a_late_answer_configures_nothing() {
    let Bed { mut p, .. } = Bed::new(1);
    let (src, dst) = pools(&mut p, 4096, 16);
    listen(&mut p, 1);
    let said = |commands: &std::collections::VecDeque<Command>, is: fn(&Message) -> bool| {
        commands.iter().position(|command| match command {
            Command::Told { message, .. } => Message::decode(message).is_ok_and(|m| is(&m)),
            _ => false,
        })
    };
    // The first answer is kept back until the sender has given its queue pair up and made another.
    let mut late = None;
    p.until("an answer", |p| {
        p.poll_rx();
        let at = said(&p.to_tx, |m| matches!(m, Message::Paired { epoch: 1, .. }));
        late = at.and_then(|at| p.to_tx.remove(at));
        late.is_some()
    });
    p.skip_ms += limits::HANDSHAKE_MS;
    let second = |m: &Message| matches!(m, Message::Pair { epoch: 2, .. });
    let began = std::time::Instant::now();
    while said(&p.to_rx, second).is_none() {
        p.poll_tx();
        assert!(began.elapsed() < PATIENCE, "no other queue pair: {:?}", p.from_tx);
    }
    // It comes while the sender waits for the answer to that one.
    p.to_tx.extend(late);
    p.poll_tx();
    p.poll_tx();
    let up = |p: &Pair| p.from_tx.iter().any(|e| matches!(e, EngineEvent::LaneUp { .. }));
    assert!(!up(&p), "connected with a queue pair that is given up");
    until_up(&mut p, 0);
    let ids: Vec<u32> = (0..16).collect();
    p.open(1, 1, &dst.plan(&ids, 4096));
    p.send_all(1, 1, &src.source(&ids, 4096));
    finish(&mut p, 1);
}

#[test]
fn a_nic_that_is_not_there_or_has_no_room_is_refused_by_name() {
    let mut host = Host::new(1);
    let real = std::mem::replace(&mut host.names, vec!["fake_nowhere".into()]);
    let e = host.try_engine(64).err().unwrap().to_string();
    assert!(e.contains("fake_nowhere") && e.contains(&real[0]) && e.contains("fix:"), "{e}");
    // In sysfs, and unknown to the library.
    host.tree.nic("fake_ghost", None, 0).roce("ghost0", "10.9.0.2");
    host.names = vec!["fake_ghost".into()];
    let e = host.try_engine(64).err().unwrap().to_string();
    assert!(e.contains("fake_ghost") && e.contains("fix:"), "{e}");
    // Rings no longer than the device's.
    let small = Host::with(1, &Knobs { max_depth: 100, ..Knobs::default() });
    assert!(small.try_engine(2048).is_ok());
}

/// Memory of a GPU: by whichever way works, and with both reasons if none does.
#[test]
fn memory_of_a_gpu_is_registered_by_dmabuf_else_by_its_address() {
    let host = Host::new(1);
    let context = std::sync::Arc::new(Device::verbs().open(&host.names[0]).unwrap());
    let domain = ProtectionDomain::new(&context).unwrap();
    let memory = Region::memfd(1 << 16).unwrap();
    let range = || Range::of(memory.memory(), memory.address(), 1 << 16).unwrap();
    let part = || {
        let fd = memory.memory().fd().unwrap();
        DmabufRange { fd, offset: 0, bytes: 1 << 16, iova: memory.address() }
    };
    let access = Access::REMOTE_WRITE.relaxed();
    let way = |dmabuf| domain.register_gpu(range(), dmabuf, access).map(|(_, way)| way);
    // Neither library nor NIC need know dma-bufs.
    assert_eq!(way(Some(part())).unwrap(), GpuWay::Peermem);
    assert_eq!(way(None).unwrap(), GpuWay::Peermem);
    host.nics[0].set(|knobs| knobs.has_dmabuf = true);
    assert_eq!(way(Some(part())).unwrap(), GpuWay::Dmabuf);
    host.nics[0].set(|knobs| knobs.registrations_left = Some(0));
    let e = way(Some(part())).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Memory);
    let e = e.to_string();
    for word in ["by_dmabuf=", "by_peermem=", "nvidia-peermem", "bytes=65536"] {
        assert!(e.contains(word), "{word}: {e}");
    }
    // Neither way, for reasons of their own.
    host.nics[0].set(|knobs| knobs.has_dmabuf = false);
    let e = way(Some(part())).unwrap_err().to_string();
    for word in ["dma-bufs cannot be registered here", "Operation not supported", "RLIMIT_MEMLOCK"]
    {
        assert!(e.contains(word), "{word}: {e}");
    }
    assert_eq!(host.nics[0].holds().0, 0);
}
