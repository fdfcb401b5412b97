//! Counters and gauges of this process, so that it can say what it has counted.
//!
//! In: what every crate counts with the `metrics` facade. Out: [`all`]. Invariant: a counter is made
//! once for each name with its labels, and there are only as many of those as the code has.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, SharedString, Unit};

/// Numbers by name and labels: `name{label=value}`.
pub(crate) type Numbers = BTreeMap<String, u64>;

#[derive(Clone)]
enum Kind {
    Counter,
    /// Kept as the bits of a float.
    Gauge,
}

#[derive(Default)]
struct Counters(Mutex<BTreeMap<Key, (Kind, Arc<AtomicU64>)>>);

static COUNTERS: OnceLock<Counters> = OnceLock::new();

/// From here on, this process counts.
pub(crate) fn start() {
    let counters = COUNTERS.get_or_init(Counters::default);
    // Only a second start could be refused, which changes nothing.
    let _ = metrics::set_global_recorder(counters);
}

/// All of them; nothing before [`start`].
pub(crate) fn all() -> Numbers {
    let Some(counters) = COUNTERS.get() else { return Numbers::new() };
    let counters = counters.0.lock().unwrap_or_else(PoisonError::into_inner);
    let number = |kind: &Kind, bits: u64| match kind {
        Kind::Counter => bits,
        Kind::Gauge => f64::from_bits(bits).max(0.0) as u64,
    };
    counters
        .iter()
        .map(|(key, (kind, value))| (name(key), number(kind, value.load(Ordering::Relaxed))))
        .collect()
}

fn name(key: &Key) -> String {
    let labels: Vec<_> = key.labels().map(|l| format!("{}={}", l.key(), l.value())).collect();
    match labels.is_empty() {
        true => key.name().to_string(),
        false => format!("{}{{{}}}", key.name(), labels.join(",")),
    }
}

impl Counters {
    fn value(&self, key: &Key, kind: Kind) -> Arc<AtomicU64> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match all.get(key) {
            Some((_, value)) => value.clone(),
            None => all.entry(key.clone()).or_insert((kind, Arc::default())).1.clone(),
        }
    }
}

impl metrics::Recorder for &'static Counters {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.value(key, Kind::Counter))
    }
    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.value(key, Kind::Gauge))
    }
    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_anywhere_is_found_by_name_and_labels() {
        start();
        for how in ["a", "b", "a"] {
            metrics::counter!("test_fences_total", "how" => how).increment(1);
        }
        metrics::gauge!("test_open").increment(3.0);
        metrics::gauge!("test_open").decrement(1.0);
        let all = all();
        assert_eq!((all["test_fences_total{how=a}"], all["test_fences_total{how=b}"]), (2, 1));
        assert_eq!(all["test_open"], 2);
    }
}
