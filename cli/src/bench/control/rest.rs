//! What processes cost that have nothing to do: a link is up, no room runs.

use std::time::{Duration, Instant};

use kvlane_proto::{Result, limits};

use super::rooms::Pair;
use super::row::Row;
use crate::cluster::Cluster;
use crate::proc;

/// Until what a start leaves behind is over.
const SETTLE: Duration = Duration::from_secs(2);

/// A row for each process.
pub(super) async fn measure(cluster: &mut Cluster, seconds: u32) -> Result<Vec<Row>> {
    let pair = Pair::start(cluster, limits::LANES_PER_LINK).await?;
    let rows = async {
        // The first room brings the link up.
        pair.router.rooms(1, 1).await?;
        watch(&pair, seconds).await
    };
    tokio::select! {
        rows = rows => rows,
        e = cluster.died() => Err(e),
    }
}

async fn watch(pair: &Pair, seconds: u32) -> Result<Vec<Row>> {
    tokio::time::sleep(SETTLE).await;
    let processes = [
        ("service", pair.service.pid),
        ("prefill worker", pair.prefill.pid),
        ("decode worker", pair.decode.pid),
        ("router", std::process::id()),
    ];
    let look = || {
        let of = |pid| Ok((proc::cpu(pid)?, proc::waits(pid)?));
        processes.iter().map(|&(_, pid)| of(pid)).collect::<Result<Vec<_>>>()
    };
    let (begun, before) = (Instant::now(), look()?);
    tokio::time::sleep(Duration::from_secs(seconds.into())).await;
    let (took, after) = (begun.elapsed().as_secs_f64(), look()?);
    let rows = processes.iter().zip(before.iter().zip(&after));
    Ok(rows
        .map(|((name, _), (before, after))| Row {
            seconds: Some(took),
            cpu_percent: Some(after.0.saturating_sub(before.0).as_secs_f64() / took * 100.0),
            wakeups_per_s: Some(after.1.saturating_sub(before.1) as f64 / took),
            ..Row::new(format!("rest, {name}"))
        })
        .collect())
}
