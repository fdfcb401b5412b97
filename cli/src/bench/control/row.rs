//! Rows of the control plane: the table and the JSON line.

use std::time::Duration;

use serde::Serialize;

use crate::bench::figures::quantile;

/// One row. The names are those of the JSON line; what was not measured is null.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Row {
    /// What carries the control plane.
    pub(crate) engine: &'static str,
    /// What the row is of.
    pub(crate) what: String,
    pub(crate) emulated: bool,
    pub(crate) rooms: Option<u32>,
    pub(crate) in_flight: Option<u32>,
    /// Lanes of the link: rooms that can be granted at a time.
    pub(crate) lanes: Option<u32>,
    pub(crate) rooms_per_s: Option<f64>,
    /// The call to reserve.
    pub(crate) reserve_p50_us: Option<f64>,
    pub(crate) reserve_p99_us: Option<f64>,
    /// From the same moment until the router knows that the room is done.
    pub(crate) p50_us: Option<f64>,
    pub(crate) p99_us: Option<f64>,
    pub(crate) connections: Option<u32>,
    pub(crate) rss_before_bytes: Option<u64>,
    pub(crate) rss_after_bytes: Option<u64>,
    pub(crate) bytes_per_connection: Option<u64>,
    pub(crate) seconds: Option<f64>,
    /// Of one core.
    pub(crate) cpu_percent: Option<f64>,
    /// Waits that the scheduler saw: how often something woke the process.
    pub(crate) wakeups_per_s: Option<f64>,
}

impl Row {
    pub(super) fn new(what: impl Into<String>) -> Self {
        Self { engine: "quic", what: what.into(), ..Self::default() }
    }
}

/// Times of some rooms.
#[derive(Debug, Default)]
pub(super) struct Times {
    pub(super) reserve: Vec<Duration>,
    pub(super) done: Vec<Duration>,
    pub(super) all: Duration,
}

impl Times {
    pub(super) fn row(&self, in_flight: u32, lanes: u32) -> Row {
        let what = if in_flight == 1 { "rooms, one by one" } else { "rooms, together" };
        let rooms = self.done.len() as u32;
        Row {
            rooms: Some(rooms),
            in_flight: Some(in_flight),
            lanes: Some(lanes),
            rooms_per_s: Some(f64::from(rooms) / self.all.as_secs_f64().max(1e-9)),
            reserve_p50_us: quantile(&self.reserve, 0.5),
            reserve_p99_us: quantile(&self.reserve, 0.99),
            p50_us: quantile(&self.done, 0.5),
            p99_us: quantile(&self.done, 0.99),
            ..Row::new(what)
        }
    }
}

/// Rows as a table: the columns that any of them has.
pub(super) fn table(rows: &[Row]) -> String {
    type Column = (&'static str, fn(&Row) -> Option<f64>);
    const COLUMNS: [Column; 13] = [
        ("Rooms", |r| r.rooms.map(f64::from)),
        ("In flight", |r| r.in_flight.map(f64::from)),
        ("Lanes", |r| r.lanes.map(f64::from)),
        ("Rooms/s", |r| r.rooms_per_s),
        ("Reserve P50 (us)", |r| r.reserve_p50_us),
        ("Reserve P99 (us)", |r| r.reserve_p99_us),
        ("Done P50 (us)", |r| r.p50_us),
        ("Done P99 (us)", |r| r.p99_us),
        ("Connections", |r| r.connections.map(f64::from)),
        ("RSS before (KiB)", |r| r.rss_before_bytes.map(|b| b as f64 / 1024.0)),
        ("RSS after (KiB)", |r| r.rss_after_bytes.map(|b| b as f64 / 1024.0)),
        ("Bytes/connection", |r| r.bytes_per_connection.map(|b| b as f64)),
        ("CPU (% of a core)", |r| r.cpu_percent),
    ];
    const WAKEUPS: Column = ("Wake-ups/s", |r| r.wakeups_per_s);
    let all = COLUMNS.iter().chain([&WAKEUPS]);
    let columns: Vec<&Column> = all.filter(|c| rows.iter().any(|r| c.1(r).is_some())).collect();
    let width = rows.iter().map(|r| r.what.len()).max().unwrap_or(0);
    let mut text = format!("{:<width$}", "");
    columns.iter().for_each(|c| text += &format!(" | {}", c.0));
    text.push('\n');
    for row in rows {
        text += &format!("{:<width$}", row.what);
        for (title, value) in &columns {
            let cell = match value(row) {
                None => "-".into(),
                Some(n) if n.fract() == 0.0 => format!("{n}"),
                Some(n) if n < 10.0 => format!("{n:.2}"),
                Some(n) => format!("{n:.0}"),
            };
            text += &format!(" | {cell:>width$}", width = title.len());
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_the_columns_that_a_row_has_and_no_others() {
        let ms = |n| Duration::from_millis(n);
        let times = Times { reserve: vec![ms(1); 4], done: vec![ms(2); 4], all: ms(8) };
        let rows = [times.row(1, 4), times.row(2, 4)];
        assert_eq!(rows[0].rooms_per_s, Some(500.0));
        let table = table(&rows);
        let lines: Vec<Vec<&str>> =
            table.lines().map(|line| line.split('|').map(str::trim).collect()).collect();
        assert_eq!(lines[0][4..6], ["Rooms/s", "Reserve P50 (us)"]);
        assert_eq!(lines[2][..5], ["rooms, together", "4", "2", "4", "500"]);
        assert_eq!(lines[1][5..], ["1000", "1000", "2000", "2000"]);
    }
}
