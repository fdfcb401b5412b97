//! Seeded simulator of the hand-off: the real machines, a hostile world, every promise checked
//! after every step.
//!
//! `world.rs` is the loop and the faults, `shapes.rs` what instances and their ranks look like,
//! `network.rs` what workers tell each other, `engines.rs` the three kinds of data path,
//! `serving.rs` the routers and toy serving engines, `pools.rs` the memory, `coverage.rs` what the
//! seeds have shown, `bed.rs` the one-sided engine by itself. A run is a function of its seed. A seed
//! that fails prints the one line that plays it again with a trace.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::too_many_arguments)]

mod bed;
mod coverage;
mod engines;
mod invariants;
mod network;
#[path = "../../transport/tests/one_sided_rules/mod.rs"]
mod one_sided_rules;
mod pools;
mod rng;
mod serving;
mod shapes;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use coverage::Coverage;
use invariants::{Inv, Violation};
use kvlane_proto::mutant::Mutant;
use world::World;

const MUTANTS: [(Mutant, &str); 11] = [
    (Mutant::NoFence, "NoFence"),
    (Mutant::NoGrantCheck, "NoGrantCheck"),
    (Mutant::CreditTwice, "CreditTwice"),
    (Mutant::PartsCounted, "PartsCounted"),
    (Mutant::NotFinal, "NotFinal"),
    (Mutant::SourceMissing, "SourceMissing"),
    (Mutant::LinksMixed, "LinksMixed"),
    (Mutant::TakerForgotten, "TakerForgotten"),
    (Mutant::LossForgotten, "LossForgotten"),
    (Mutant::FenceFirstLink, "FenceFirstLink"),
    (Mutant::ServeWordNotRead, "ServeWordNotRead"),
];

fn env(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|v| !v.is_empty())
}

/// The line that plays a seed again.
fn replay_line(seed: u64, mutant: Mutant) -> String {
    let name = MUTANTS.iter().find(|m| m.0 == mutant).map(|m| m.1);
    let mutant = name.map_or(String::new(), |n| format!("KVLANE_SIM_MUTANT={n} "));
    format!(
        "KVLANE_SIM_SEED={seed} {mutant}cargo test -p kvlane-tests --test sim -- replay --nocapture"
    )
}

fn run_seed(seed: u64, mutant: Mutant) -> (Option<Violation>, Coverage, u64) {
    let mut world = World::new(seed, mutant, false);
    let violation = world.run();
    (violation, world.cov, world.hash)
}

/// What went wrong with a seed, if anything did. A panic counts.
fn judge(seed: u64, mutant: Mutant) -> Result<Coverage, (Option<Inv>, String)> {
    match catch_unwind(AssertUnwindSafe(|| run_seed(seed, mutant))) {
        Ok((None, cov, _)) => Ok(cov),
        Ok((Some(v), ..)) => {
            let what: String = v.what.chars().take(1_000).collect();
            Err((Some(v.inv), format!("{:?}: {what}", v.inv)))
        }
        Err(_) => Err((None, "panic".into())),
    }
}

#[test]
fn sim_20_000_seeds() {
    let seeds: u64 = env("KVLANE_SIM_SEEDS").and_then(|s| s.parse().ok()).unwrap_or(20_000);
    let from: u64 = env("KVLANE_SIM_FROM").and_then(|s| s.parse().ok()).unwrap_or(0);
    let keep_going = env("KVLANE_SIM_KEEP_GOING").is_some();
    let (next, failed) = (AtomicU64::new(from), AtomicBool::new(false));
    let total = Mutex::new(Coverage::new());
    let failures: Mutex<Vec<(u64, String)>> = Mutex::new(Vec::new());
    let start = Instant::now();
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                let mut sum = Coverage::new();
                while !failed.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= from + seeds {
                        break;
                    }
                    match judge(seed, Mutant::None) {
                        Ok(cov) => sum.add(&cov),
                        Err((_, what)) => {
                            failures.lock().unwrap().push((seed, what));
                            failed.store(!keep_going, Ordering::Relaxed);
                        }
                    }
                }
                total.lock().unwrap().add(&sum);
            });
        }
    });
    let (cov, took) = (total.into_inner().unwrap(), start.elapsed().as_secs_f64());
    let mut failures = failures.into_inner().unwrap();
    failures.sort();
    if keep_going {
        failures.iter().for_each(|(seed, what)| println!("seed {seed}: {what}"));
    }
    if let Some((seed, what)) = failures.into_iter().next() {
        println!("{}", replay_line(seed, Mutant::None));
        panic!("seed {seed}: {what}");
    }
    println!(
        "{seeds} seeds, {} rooms, {} events in {took:.1} s: {:.0} events/s, {:.0} a seed",
        cov.rooms,
        cov.events,
        cov.events as f64 / took,
        cov.events as f64 / seeds as f64
    );
    cov.print();
    if seeds >= 20_000 {
        assert!(cov.missing().is_empty(), "never exercised: {:?}", cov.missing());
    }
}

#[test]
fn the_same_seed_is_the_same_run() {
    for seed in 0..200 {
        let (_, cov, hash) = run_seed(seed, Mutant::None);
        let (_, again, hash_again) = run_seed(seed, Mutant::None);
        assert_eq!((hash, cov.events), (hash_again, again.events), "seed {seed}");
    }
}

/// Each deliberately broken machine is caught, by the promise that it breaks, on seeds which the
/// whole machine passes.
#[test]
fn every_mutant_is_caught() {
    const SEEDS: u64 = 2_000;
    for (mutant, name) in MUTANTS {
        let expected: &[Inv] = match mutant {
            Mutant::NoFence => &[Inv::LandsInGrant],
            Mutant::NoGrantCheck => &[Inv::LandsInGrant, Inv::SentWhenFinal],
            Mutant::CreditTwice => &[Inv::LaneLentOnce],
            Mutant::PartsCounted => &[Inv::DoneIsComplete],
            Mutant::NotFinal => &[Inv::SentWhenFinal, Inv::SourceKept],
            Mutant::SourceMissing => &[Inv::DoneIsComplete],
            Mutant::LinksMixed => &[Inv::DoneIsComplete],
            Mutant::TakerForgotten => &[Inv::SourceKept],
            Mutant::LossForgotten => &[Inv::LandsInGrant],
            Mutant::FenceFirstLink => &[Inv::LandsInGrant],
            Mutant::ServeWordNotRead => &[Inv::SourceKept, Inv::DoneIsComplete],
            Mutant::None => &[],
        };
        let caught = (0..SEEDS).find_map(|seed| match judge(seed, mutant) {
            Err((Some(inv), what)) if expected.contains(&inv) => Some((seed, what)),
            _ => None,
        });
        let Some((seed, what)) = caught else { panic!("{name} was not caught") };
        println!("{name}: seed {seed}, {what}\n  {}", replay_line(seed, mutant));
        for seed in 0..=seed {
            assert!(judge(seed, Mutant::None).is_ok(), "{}", replay_line(seed, Mutant::None));
        }
    }
}

/// Plays one seed again: `KVLANE_SIM_SEED=… [KVLANE_SIM_MUTANT=…]`.
#[test]
fn replay() {
    let Some(seed) = env("KVLANE_SIM_SEED").and_then(|s| s.parse().ok()) else { return };
    let name = env("KVLANE_SIM_MUTANT").unwrap_or_default();
    let mutant = MUTANTS.iter().find(|m| m.1 == name).map_or(Mutant::None, |m| m.0);
    let mut world = World::new(seed, mutant, true);
    if let Some(v) = world.run() {
        panic!("{:?} at {:.6} ms: {}", v.inv, v.at_ns as f64 / 1e6, v.what);
    }
    println!("seed {seed} holds: {} events, trace hash {:016x}", world.cov.events, world.hash);
}
