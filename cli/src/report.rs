//! What a replay counted, and how it is shown.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvlane_proto::{Error, ErrorKind, Refusal, Result};
use serde::Serialize;

use crate::chaos;

/// A value as one line of JSON, its end included.
///
/// # Errors
/// [`ErrorKind::Internal`] for what JSON cannot say.
pub(crate) fn json_line(value: &impl Serialize) -> Result<String> {
    let mut line = serde_json::to_string(value)
        .map_err(|e| Error::new(ErrorKind::Internal, "cannot write JSON").caused_by(e))?;
    line.push('\n');
    Ok(line)
}

/// Rows of a bench as its last line with `--json`.
///
/// # Errors
/// As [`json_line`].
pub(crate) fn json_rows(rows: &[impl Serialize]) -> Result<String> {
    #[derive(Serialize)]
    struct Report<'a, R> {
        rows: &'a [R],
    }
    json_line(&Report { rows })
}

/// Counters of a replay. The names are those of the JSON line.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Totals {
    pub(crate) rooms_completed: u64,
    pub(crate) rooms_aborted: u64,
    pub(crate) rooms_failed: u64,
    /// Rooms that neither ended nor failed by name, and what was said of the first.
    pub(crate) rooms_lost: u64,
    pub(crate) lost_message: Option<String>,
    /// Bytes of the rooms that completed.
    pub(crate) bytes: u64,
    pub(crate) pages_verified: u64,
    pub(crate) pages_corrupt: u64,
    /// Parts that were sent more than once during this replay.
    pub(crate) retries: u64,
    pub(crate) quarantined_blocks: u64,
    pub(crate) seconds: f64,
    /// Bytes of completed rooms by the whole time, filling and checking of pages included.
    pub(crate) gbytes_per_s: f64,
    /// Reservation to last byte checked.
    pub(crate) handoff_p50_ms: f64,
    pub(crate) handoff_p99_ms: f64,
    /// Requests that were cut to what a pool, or the model, allows.
    pub(crate) prompts_cut: u64,
    /// What the trace's token counts were multiplied by.
    pub(crate) scale: f64,
    /// Tokens of completed rooms that the decode had already, and so were not sent.
    pub(crate) prefix_tokens: u64,
    pub(crate) model: String,
    pub(crate) engine: String,
    pub(crate) emulated: bool,
    /// A signal ended it before every request was done.
    pub(crate) interrupted: bool,
    /// What became of it under faults.
    #[serde(flatten)]
    pub(crate) chaos: Option<chaos::Report>,
    /// Rooms, some of whose legs the client hung up on, and rooms without legs.
    #[serde(skip)]
    pub(crate) legs_hung_up: u64,
    #[serde(skip)]
    pub(crate) never_claimed: u64,
    /// What failed, by error code.
    pub(crate) failures: BTreeMap<&'static str, Failures>,
    #[serde(skip)]
    pub(crate) handoffs: Vec<Duration>,
    /// When each room that completed did.
    #[serde(skip)]
    pub(crate) completed_at: Vec<Instant>,
}

/// Failures of one code.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Failures {
    pub(crate) count: u64,
    /// How many, by the side that is to blame.
    pub(crate) blame: BTreeMap<&'static str, u64>,
    /// What the first of them said.
    pub(crate) message: String,
}

fn message(why: &Refusal) -> String {
    let fix = if why.hint.is_empty() { "" } else { "; fix: " };
    format!("{}{fix}{}", why.text, why.hint)
}

impl Totals {
    pub(crate) fn rooms(&self) -> u64 {
        self.rooms_completed + self.rooms_aborted + self.rooms_failed + self.rooms_lost
    }
    pub(crate) fn lost(&mut self, why: &Refusal) {
        self.rooms_lost += 1;
        self.lost_message.get_or_insert_with(|| message(why));
    }
    pub(crate) fn failed(&mut self, why: &Refusal) {
        self.rooms_failed += 1;
        let of_code = self.failures.entry(why.kind.code()).or_insert_with(|| Failures {
            count: 0,
            blame: BTreeMap::new(),
            message: message(why),
        });
        of_code.count += 1;
        *of_code.blame.entry(why.blame.as_str()).or_default() += 1;
    }
    pub(crate) fn finish(&mut self, elapsed: Duration) {
        self.seconds = elapsed.as_secs_f64();
        self.gbytes_per_s = self.bytes as f64 / self.seconds.max(1e-9) / 1e9;
        self.handoffs.sort_unstable();
        let at = |q: f64| {
            let last = self.handoffs.len().checked_sub(1)?;
            Some(self.handoffs[(last as f64 * q).round() as usize].as_secs_f64() * 1e3)
        };
        self.handoff_p50_ms = at(0.5).unwrap_or(0.0);
        self.handoff_p99_ms = at(0.99).unwrap_or(0.0);
    }
    /// Every room ended, and every page of those that completed is right.
    pub(crate) fn is_good(&self, rooms: u64) -> bool {
        if let Some(chaos) = &self.chaos {
            return self.rooms() == rooms && chaos.wrong.is_empty();
        }
        self.rooms() == rooms
            && self.rooms_failed == 0
            && self.rooms_lost == 0
            && self.pages_corrupt == 0
            && self.quarantined_blocks == 0
    }
    /// For people.
    pub(crate) fn table(&self) -> String {
        let mut rows = vec![
            ("model", self.model.clone()),
            (
                "engine",
                format!("{}{}", self.engine, if self.emulated { " (emulated)" } else { "" }),
            ),
            ("scale", format!("{:.4}", self.scale)),
            ("rooms completed", self.rooms_completed.to_string()),
            ("rooms aborted", self.rooms_aborted.to_string()),
            ("rooms failed", self.rooms_failed.to_string()),
            ("rooms lost", self.rooms_lost.to_string()),
            ("bytes moved", format!("{:.3} GB", self.bytes as f64 / 1e9)),
            ("tokens from prefix, not sent", self.prefix_tokens.to_string()),
            ("pages verified", self.pages_verified.to_string()),
            ("pages corrupt", self.pages_corrupt.to_string()),
            ("parts sent again", self.retries.to_string()),
            ("blocks in quarantine", self.quarantined_blocks.to_string()),
            (
                "hand-off p50 / p99",
                format!("{:.1} / {:.1} ms", self.handoff_p50_ms, self.handoff_p99_ms),
            ),
            (
                "in all",
                format!(
                    "{:.2} s, {:.2} GB/s with filling and checking{}",
                    self.seconds,
                    self.gbytes_per_s,
                    if self.emulated { "; emulated, so no measure of anything" } else { "" }
                ),
            ),
        ];
        if self.prompts_cut > 0 {
            rows.insert(3, ("prompts cut to the pool", self.prompts_cut.to_string()));
        }
        if let Some(chaos) = &self.chaos {
            chaos.rows(&mut rows);
        }
        let width = rows.iter().map(|r| r.0.len()).max().unwrap_or(0);
        let mut out = String::new();
        for (name, value) in rows {
            out.push_str(&format!("  {name:<width$}  {value}\n"));
        }
        for (code, Failures { count, message, .. }) in &self.failures {
            out.push_str(&format!("  failed {count} x  {code}: {message}\n"));
        }
        if let Some(message) = &self.lost_message {
            out.push_str(&format!("  lost {} x  {message}\n", self.rooms_lost));
        }
        for wrong in self.chaos.iter().flat_map(|chaos| &chaos.wrong) {
            out.push_str(&format!("  wrong: {wrong}\n"));
        }
        out
    }
}

/// A bar on a terminal, a line a second elsewhere, nothing with `--json`.
pub(crate) struct Progress {
    bar: ProgressBar,
    lines: bool,
    said: Instant,
    /// None where time ends it.
    rooms: Option<u64>,
}

impl Progress {
    pub(crate) fn new(rooms: Option<u64>, quiet: bool) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let bar = rooms.map_or_else(ProgressBar::no_length, ProgressBar::new);
        if quiet || !terminal {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        } else if let Ok(style) =
            ProgressStyle::with_template("{bar:30} {pos}/{len} rooms  {elapsed}  {msg}")
        {
            bar.set_style(style);
        }
        Self { bar, lines: !quiet && !terminal, said: Instant::now(), rooms }
    }
    pub(crate) fn update(&mut self, totals: &Totals) {
        let line = format!(
            "{:.2} GB  {} pages verified, {} corrupt  {} aborted, {} failed",
            totals.bytes as f64 / 1e9,
            totals.pages_verified,
            totals.pages_corrupt,
            totals.rooms_aborted,
            totals.rooms_failed
        );
        self.bar.set_position(totals.rooms());
        if self.lines && self.said.elapsed() >= Duration::from_secs(1) {
            self.said = Instant::now();
            let of = self.rooms.map(|rooms| format!("/{rooms}")).unwrap_or_default();
            eprintln!("{}{of} rooms  {line}", totals.rooms());
        }
        self.bar.set_message(line);
    }
    pub(crate) fn end(self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use kvlane_proto::{Error, ErrorKind};

    use super::*;

    #[test]
    fn failures_are_counted_by_code_and_keep_the_first_message() {
        let mut totals = Totals { scale: 0.5, ..Totals::default() };
        for asked in [7, 8] {
            let e = Error::new(ErrorKind::LimitExceeded, "too many").with("asked", asked);
            totals.failed(&e.hint("ask for less").to_refusal());
        }
        totals.failed(&Error::new(ErrorKind::Busy, "full").to_refusal());
        let json = serde_json::to_value(&totals).unwrap();
        assert_eq!(json["rooms_failed"], 3);
        assert_eq!(json["scale"], 0.5);
        assert_eq!(
            json["failures"],
            serde_json::json!({
                "limit_exceeded": { "count": 2, "blame": { "caller": 2 }, "message": "too many (asked=7); fix: ask for less" },
                "busy": { "count": 1, "blame": { "decode": 1 }, "message": "full" },
            })
        );
        assert!(totals.table().contains("failed 2 x  limit_exceeded: too many (asked=7)"));
    }

    #[test]
    fn cut_prompts_have_a_row_only_if_there_are_any() {
        let mut totals = Totals::default();
        assert!(!totals.table().contains("prompts cut"));
        assert!(totals.table().contains("scale"));
        totals.prompts_cut = 3;
        assert!(totals.table().contains("prompts cut to the pool"));
    }
}
