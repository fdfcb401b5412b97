//! A late write after a fence: kept out, and seen by this test if it is not. The second half needs
//! the feature `fault-injection`, which has the switch that turns fences off.
#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub)] // Tests fail by panicking.

mod engine_conformance;
mod fake_verbs;
mod sysfs_tree;

use engine_conformance::nics::{Nics, all, revoke, whys};
use engine_conformance::one_sided::pools;
use engine_conformance::{CANARY, PATIENCE, Pair, Pool, addresses, layout};
use fake_verbs::Bed;

use kvlane_proto::GrantId;
use kvlane_proto::layout::KvKind;
use kvlane_transport::emulated::faults::What;
use kvlane_transport::engine::shm::{ShmConfig, ShmEngine};
use kvlane_transport::engine::tcp::{TcpConfig, TcpEngine};
use kvlane_transport::engine::{Command, Engine, EngineEvent, FenceHow};

fn tcp() -> Box<dyn Engine> {
    Box::new(TcpEngine::new(TcpConfig::default()).unwrap())
}
fn shm() -> Box<dyn Engine> {
    Box::new(ShmEngine::new(ShmConfig::default()).unwrap())
}

/// Bytes that land after the proof of a fence, with a sender that was half-way through a part.
fn late_bytes(engine: fn() -> Box<dyn Engine>, how: FenceHow) -> usize {
    let l = layout(1 << 20, 1, KvKind::Mla);
    let (src, dst) = (Pool::new(&l, 16), Pool::new(&l, 16));
    src.fill(1);
    dst.fill(CANARY);
    let mut p = Pair::new((engine(), engine()));
    p.tx.register(&src.region).unwrap();
    p.rx.register(&dst.region).unwrap();
    p.connect(1);
    let ids: Vec<u32> = (0..16).collect();
    let (from, to) = (src.plan(&ids, 16 << 20), dst.plan(&ids, 16 << 20));
    p.open(7, 1, &to);
    p.post(7, 0, 0, &from);
    let first = addresses(&to)[0];
    p.until("first bytes", |_| dst.read(first, 1) == [1]);
    p.tell_rx(Command::Fence { grant: GrantId(7), how });
    let started = std::time::Instant::now();
    while !p.from_rx.iter().any(|e| matches!(e, EngineEvent::Fenced(_))) {
        // The proof comes with the events of commands, so at most one turn of the lane goes first.
        p.poll_rx();
        assert!(started.elapsed() < PATIENCE);
    }
    // As if the blocks had been given back and were in use again.
    dst.fill(CANARY);
    p.until("answer", |p| p.acked() + p.nacked().len() > 0);
    p.settle();
    dst.touched()
}

/// Bytes that land after the proof of a revoke, with a NIC that has the sender's writes on the wire.
fn late_writes(nics: &Nics) -> usize {
    let mut control = nics.control(0);
    let mut p = nics.pair(64);
    let (src, dst) = pools(&mut p, 4096, 16);
    p.connect(1);
    let ids: Vec<u32> = (0..16).collect();
    let (from, to) = (src.source(&ids, 16 * 4096), dst.plan(&ids, 16 * 4096));
    let held = control.fault(&all(What::HoldWire)).unwrap();
    p.open(7, 1, &to);
    p.post(7, 0, 0, &from);
    p.until("held", |_| control.stats().unwrap().hits(held) > 0);
    revoke(&mut p, 7);
    // As if the blocks had been given back and were in use again.
    dst.fill(CANARY);
    control.clear(held).unwrap();
    p.until("end", |p| p.acked() + whys(&p.from_tx).len() > 0);
    p.settle();
    dst.touched()
}

/// The same over verbs. The NIC of the receiver lets writes through and lands them as late as it may.
fn late_writes_of_verbs() -> usize {
    let Bed { from, to, mut p } = Bed::new(1);
    let (src, dst) = pools(&mut p, 4096, 16);
    p.connect(1);
    let ids: Vec<u32> = (0..16).collect();
    let (source, plan) = (src.source(&ids, 16 * 4096), dst.plan(&ids, 16 * 4096));
    from.nics[0].set(|knobs| knobs.holds = true);
    to.nics[0].set(|knobs| knobs.lands_late = true);
    p.open(7, 1, &plan);
    p.post(7, 0, 0, &source);
    p.until("held", |_| from.nics[0].on_the_wire() > 0);
    revoke(&mut p, 7);
    // As if the blocks had been given back and were in use again.
    dst.fill(CANARY);
    from.nics[0].set(|knobs| knobs.holds = false);
    p.until("end", |p| p.acked() + whys(&p.from_tx).len() > 0);
    p.settle();
    dst.touched()
}

/// One test, because the switch is the process's.
#[test]
fn a_late_write_lands_only_with_fences_off() {
    assert_eq!(late_writes_of_verbs(), 0, "a byte landed after the proof");
    #[cfg(feature = "fault-injection")]
    {
        use kvlane_transport::engine::fence::set_fences_off;
        set_fences_off(true);
        let late = late_writes_of_verbs();
        set_fences_off(false);
        assert!(late > 0, "the test cannot see late writes");
        assert_eq!(late_writes_of_verbs(), 0, "fences are on again");
    }
    let nics = Nics::patient(1);
    assert_eq!(late_writes(&nics), 0, "a byte landed after the proof");
    #[cfg(feature = "fault-injection")]
    {
        use kvlane_transport::engine::fence::set_fences_off;
        set_fences_off(true);
        let late = late_writes(&nics);
        set_fences_off(false);
        assert!(late > 0, "the test cannot see late writes");
        assert_eq!(late_writes(&nics), 0, "fences are on again");
    }
    for engine in [tcp, shm] {
        for how in [FenceHow::Close, FenceHow::Revoke] {
            assert_eq!(late_bytes(engine, how), 0, "a byte landed after the proof");
            #[cfg(feature = "fault-injection")]
            {
                use kvlane_transport::engine::fence::set_fences_off;
                set_fences_off(true);
                let late = late_bytes(engine, how);
                set_fences_off(false);
                assert!(late > 0, "the test cannot see late writes");
            }
        }
        assert_eq!(late_bytes(engine, FenceHow::Close), 0, "fences are on again");
    }
}
