//! From samples to figures: medians, quantiles, the table and the JSON line.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

/// What was measured of one path at one page size; one value a repetition, or a round trip.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples {
    pub(crate) tx: Vec<Duration>,
    pub(crate) prep: Vec<Duration>,
    pub(crate) post: Vec<Duration>,
    /// One page and its acknowledgement, one right after the other.
    pub(crate) trips: Vec<Duration>,
    /// The same after a pause.
    pub(crate) idle: Vec<Duration>,
    /// Of a peer: up to an acknowledgement by its receiver's program.
    pub(crate) notified: Vec<Duration>,
    /// Bytes that were compared with what was sent.
    pub(crate) verified_bytes: u64,
}

/// One row. The names are those of the JSON line; what was not measured is null.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Row {
    pub(crate) engine: String,
    pub(crate) page_bytes: u32,
    pub(crate) pages: u32,
    /// Median of the repetitions.
    pub(crate) gbytes_per_s: f64,
    pub(crate) p50_us: Option<f64>,
    pub(crate) p99_us: Option<f64>,
    /// A test device, whose figures mean nothing.
    pub(crate) emulated: bool,
    pub(crate) runs: u32,
    /// Bytes that were compared with what was sent.
    pub(crate) verified_bytes: u64,
    pub(crate) idle_p50_us: Option<f64>,
    pub(crate) idle_p99_us: Option<f64>,
    pub(crate) prep_avg_us: Option<f64>,
    pub(crate) prep_p99_us: Option<f64>,
    pub(crate) post_avg_us: Option<f64>,
    pub(crate) post_p99_us: Option<f64>,
    pub(crate) tx_avg_us: Option<f64>,
    pub(crate) tx_p99_us: Option<f64>,
    pub(crate) rails: Option<u16>,
    pub(crate) checksum: Option<bool>,
    /// Of the raw loop: bytes of one call, of those tried the best.
    pub(crate) call_bytes: Option<u64>,
    pub(crate) raw_gbytes_per_s: Option<f64>,
    /// The engine's GB/s by those of the raw loop.
    pub(crate) ratio_to_raw: Option<f64>,
    /// The engine's GB/s by those of each row that it is compared with.
    pub(crate) ratio_to: BTreeMap<String, f64>,
    /// The engine's p50 by that of each row that it is compared with.
    pub(crate) p50_ratio_to: BTreeMap<String, f64>,
    /// Of a peer: round trips up to an acknowledgement by its receiver's program.
    pub(crate) notified_p50_us: Option<f64>,
    pub(crate) version: Option<String>,
    /// The engine's rate and p50 by this row's, for the table.
    #[serde(skip)]
    pub(crate) ours: (Option<f64>, Option<f64>),
}

impl Samples {
    /// The row of one path; `bytes` were moved in each repetition.
    pub(crate) fn row(&self, engine: &str, page_bytes: u32, pages: u32, bytes: u64) -> Row {
        let pair = |samples: &[Duration]| (average(samples), quantile(samples, 0.99));
        let ((prep_avg_us, prep_p99_us), (post_avg_us, post_p99_us)) =
            (pair(&self.prep), pair(&self.post));
        let (tx_avg_us, tx_p99_us) = pair(&self.tx);
        Row {
            engine: engine.into(),
            page_bytes,
            pages,
            gbytes_per_s: gbytes_per_s(bytes, &self.tx),
            p50_us: quantile(&self.trips, 0.5),
            p99_us: quantile(&self.trips, 0.99),
            runs: self.tx.len() as u32,
            verified_bytes: self.verified_bytes,
            idle_p50_us: quantile(&self.idle, 0.5),
            idle_p99_us: quantile(&self.idle, 0.99),
            prep_avg_us,
            prep_p99_us,
            post_avg_us,
            post_p99_us,
            tx_avg_us,
            tx_p99_us,
            notified_p50_us: quantile(&self.notified, 0.5),
            ..Row::default()
        }
    }
    /// Forgets the times, after a warm-up.
    pub(crate) fn clear(&mut self) {
        *self = Self { verified_bytes: self.verified_bytes, ..Self::default() };
    }
}

/// Bytes by the median time.
pub(crate) fn gbytes_per_s(bytes: u64, tx: &[Duration]) -> f64 {
    quantile(tx, 0.5).map_or(0.0, |us| bytes as f64 / us.max(1e-3) / 1e3)
}

fn us(duration: &Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}
fn average(samples: &[Duration]) -> Option<f64> {
    (!samples.is_empty()).then(|| samples.iter().map(us).sum::<f64>() / samples.len() as f64)
}
/// The sample below which a share of `q` lies; with few samples, p99 is the largest.
pub(crate) fn quantile(samples: &[Duration], q: f64) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable();
    let last = sorted.len().checked_sub(1)?;
    sorted.get((last as f64 * q).round() as usize).map(us)
}

/// Compares the first row, the engine's, with each of the others.
pub(crate) fn compare(rows: &mut [Row]) {
    let Some((ours, others)) = rows.split_first_mut() else { return };
    for other in others {
        // A row of round trips only has no rate of its own to compare.
        let rate = (other.engine != RAW_RTT).then(|| ours.gbytes_per_s / other.gbytes_per_s);
        let p50 = ours.p50_us.zip(other.p50_us).map(|(ours, other)| ours / other);
        let rate = rate.filter(|ratio| ratio.is_finite());
        if other.engine == RAW_TCP {
            ours.raw_gbytes_per_s = Some(other.gbytes_per_s);
            ours.ratio_to_raw = rate;
        }
        ours.ratio_to.extend(rate.map(|ratio| (other.engine.clone(), ratio)));
        ours.p50_ratio_to.extend(p50.map(|ratio| (other.engine.clone(), ratio)));
        other.ours = (rate, p50);
    }
}

/// Names of the ceilings.
pub(crate) const RAW_TCP: &str = "raw-tcp";
pub(crate) const RAW_RTT: &str = "raw-rtt";
pub(crate) const MEMCPY: &str = "memcpy";

/// Columns: title, width. The ten after the first are in nixlbench's words and order.
const COLUMNS: &[&str] = &[
    "Engine        ",
    "Block Size (B)",
    "Batch Size",
    "B/W (GB/Sec)",
    "Avg Lat. (us)",
    "Avg Prep (us)",
    "P99 Prep (us)",
    "Avg Post (us)",
    "P99 Post (us)",
    "Avg Tx (us)",
    "P99 Tx (us)",
    "Ours/Row",
];
/// Further columns with `--latency`.
const LATENCY: &[&str] =
    &["Page P50 (us)", "Page P99 (us)", "Idle P50 (us)", "Idle P99 (us)", "Ours/Row P50"];

/// The table's first line.
pub(crate) fn header(latency: bool) -> String {
    let columns = COLUMNS.iter().chain(if latency { LATENCY } else { &[] });
    let titles: Vec<&str> = columns.copied().collect();
    format!("{}\n", titles.join(" | "))
}

impl Row {
    /// A line of the table.
    pub(crate) fn line(&self, latency: bool) -> String {
        let number = |n: Option<f64>| match n {
            None => "-".into(),
            Some(n) if n < 0.01 => format!("{n:.6}"),
            Some(n) if n < 10.0 => format!("{n:.3}"),
            Some(n) => format!("{n:.1}"),
        };
        let name = if self.emulated { format!("{} *", self.engine) } else { self.engine.clone() };
        let mut cells = vec![
            name,
            self.page_bytes.to_string(),
            self.pages.to_string(),
            number(Some(self.gbytes_per_s)),
            number(self.tx_avg_us.map(|tx| tx / f64::from(self.pages.max(1)))),
            number(self.prep_avg_us),
            number(self.prep_p99_us),
            number(self.post_avg_us),
            number(self.post_p99_us),
            number(self.tx_avg_us),
            number(self.tx_p99_us),
            number(self.ours.0),
        ];
        if latency {
            cells
                .extend([self.p50_us, self.p99_us, self.idle_p50_us, self.idle_p99_us].map(number));
            cells.push(number(self.ours.1));
        }
        let titles = COLUMNS.iter().chain(LATENCY);
        let cells = cells.iter().zip(titles).enumerate().map(|(i, (cell, title))| {
            let width = title.len();
            if i == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        format!("{}\n", cells.collect::<Vec<_>>().join(" | ").trim_end())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::json_rows;

    fn row(engine: &str, gbytes_per_s: f64, p50_us: Option<f64>) -> Row {
        Row { engine: engine.into(), gbytes_per_s, p50_us, ..Row::default() }
    }

    #[test]
    fn rates_are_bytes_by_the_median_time() {
        let ms = |ms: &[u64]| ms.iter().map(|&ms| Duration::from_millis(ms)).collect::<Vec<_>>();
        let samples = Samples {
            tx: ms(&[3, 1, 200]),
            trips: (1..=100).map(Duration::from_micros).collect(),
            ..Samples::default()
        };
        let row = samples.row("tcp", 4096, 10, 3_000_000);
        assert_eq!(row.gbytes_per_s, 1.0);
        assert_eq!((row.p50_us, row.p99_us), (Some(51.0), Some(99.0)));
        assert_eq!((row.runs, row.tx_avg_us), (3, Some(68_000.0)));
        assert_eq!((row.prep_avg_us, row.idle_p99_us), (None, None));
        assert_eq!(Samples::default().row("tcp", 1, 1, 1).gbytes_per_s, 0.0);
    }

    #[test]
    fn the_engine_is_compared_with_every_other_row() {
        let mut rows = [
            row("tcp", 3.0, Some(10.0)),
            row(RAW_TCP, 2.0, None),
            row(RAW_RTT, 0.1, Some(20.0)),
            row(MEMCPY, 0.0, None),
        ];
        compare(&mut rows);
        let ours = &rows[0];
        assert_eq!((ours.raw_gbytes_per_s, ours.ratio_to_raw), (Some(2.0), Some(1.5)));
        assert_eq!(ours.ratio_to, BTreeMap::from([(RAW_TCP.into(), 1.5)]));
        assert_eq!(ours.p50_ratio_to, BTreeMap::from([(RAW_RTT.into(), 0.5)]));
        assert_eq!(rows[2].ours, (None, Some(0.5)));
    }

    #[test]
    fn what_was_not_measured_is_null() {
        let text = json_rows(&[row("tcp", 3.0, None)]).unwrap();
        let line = text.strip_suffix('\n').unwrap();
        assert!(!line.contains('\n'));
        let read: serde_json::Value = serde_json::from_str(line).unwrap();
        let row = &read["rows"][0];
        assert_eq!(row["gbytes_per_s"], 3.0);
        for missing in ["p50_us", "p99_us", "ratio_to_raw"] {
            assert_eq!(row.get(missing), Some(&serde_json::Value::Null), "{missing}");
        }
    }

    #[test]
    fn columns_line_up() {
        for latency in [false, true] {
            let (header, line) = (header(latency), row("tcp", 3.0, None).line(latency));
            let bars = |text: &str| text.match_indices('|').map(|(at, _)| at).collect::<Vec<_>>();
            assert_eq!(bars(&header), bars(&line));
        }
        assert!(header(false).contains(
            "Block Size (B) | Batch Size | B/W (GB/Sec) | Avg Lat. (us) | Avg Prep (us) | \
             P99 Prep (us) | Avg Post (us) | P99 Post (us) | Avg Tx (us) | P99 Tx (us)"
        ));
    }
}
