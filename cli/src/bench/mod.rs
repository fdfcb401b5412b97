//! Measures engines by themselves: one process sends random pages, another receives them, and
//! nothing of the control plane is between.
//!
//! Owns: [`Config`], the order of a measurement ([`run`]). Parts: [`engines`] (by name), [`pages`]
//! (what is moved), [`sender`] and [`receiver`] (the two processes; [`talk`] is what they say),
//! [`raw`] (the raw TCP loop), [`peers`] (other transfer engines), [`figures`] (table and JSON). The
//! control plane by itself is [`control`]'s. In: sizes. Out: rows. Invariants: whatever is compared is measured in turns, repetition by
//! repetition, so that what else the machine does hits all alike; the bytes of the first and the
//! last repetition are compared with what was sent; every wait has a deadline.

pub(crate) mod control;
mod engines;
mod figures;
mod link;
mod measure;
mod pages;
mod peers;
mod raw;
pub(crate) mod receiver;
mod sender;
mod talk;
mod wait;

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvlane_proto::Result;

pub(crate) use self::engines::{Setup, names as engine_names};
use self::measure::Bench;
pub(crate) use self::pages::{Size, page_bytes};
pub(crate) use self::wait::Stop;
use crate::commands::say;
use crate::memory;
use crate::report::json_rows;

/// What is measured.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) setup: Setup,
    pub(crate) sizes: Vec<Size>,
    /// Repetitions that count.
    pub(crate) runs: u32,
    pub(crate) latency: bool,
    pub(crate) ceiling: bool,
    /// The interpreter that has the peers' packages.
    pub(crate) peers: Option<String>,
    pub(crate) json: bool,
}

impl Config {
    /// Bytes of the largest pool.
    fn pool_bytes(&self) -> u64 {
        self.sizes.iter().map(|size| size.pool_bytes()).max().unwrap_or(0)
    }
    /// Refuses what this machine cannot hold, before anything is started.
    ///
    /// # Errors
    /// As [`memory::check_mib`], and for an engine that does not exist.
    pub(crate) fn check(&self) -> Result<()> {
        self.setup.check()?;
        // Source and destination; those of plain memory; those of each peer.
        let pairs = 1 + u64::from(self.ceiling) + self.peers.as_ref().map_or(0, |_| peers::COUNT);
        let mib = (self.pool_bytes() * 2 * pairs).div_ceil(1 << 20);
        memory::check_mib(mib, "--pages or --page-bytes")
    }
}

/// Measures, and shows the rows as they come; blocks until it is done.
///
/// # Errors
/// Whatever keeps a row from being measured; [`kvlane_proto::ErrorKind::Aborted`] after
/// [`Stop::set`].
pub(crate) fn run(config: &Config, stop: &Stop) -> Result<()> {
    let bar = ProgressBar::new(config.sizes.len() as u64 * (u64::from(config.runs) + 1));
    if config.json || !std::io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    } else if let Ok(style) =
        ProgressStyle::with_template("{bar:30} {pos}/{len} repetitions  {elapsed}  {msg}")
    {
        bar.set_style(style);
    }
    let mut bench = Bench::start(config, stop)?;
    let show = |text: &str| {
        if !config.json {
            bar.suspend(|| say(text));
        }
    };
    show(&figures::header(config.latency));
    let mut all = Vec::new();
    for &size in &config.sizes {
        bar.set_message(format!("{} B a page", size.page_bytes));
        let mut rows = bench.rows(size, || bar.inc(1))?;
        figures::compare(&mut rows);
        rows.iter().for_each(|row| show(&row.line(config.latency)));
        all.extend(rows);
    }
    bar.finish_and_clear();
    if all.iter().any(|row| row.emulated) {
        show("* a test device: its figures mean nothing\n");
    }
    if config.json {
        say(&json_rows(&all)?);
    }
    Ok(())
}
