//! Measures the control plane by itself: rooms that move no page, idle sessions, processes at rest.
//!
//! Owns: what is asked ([`What`]) and the cluster's life ([`run`]). Parts: [`rooms`] and its worker
//! process ([`worker`]), [`connections`], [`rest`], what the kernel says of a process ([`proc`]), the
//! rows ([`row`]). In: how many. Out: rows. Invariants: every process is a process of its own with a
//! certificate of its own, and everything between them is QUIC as users have it; a process that dies
//! ends the measurement with its name; a room that does not end as done is an error, not a sample.

mod connections;
mod rest;
mod rooms;
mod row;
pub(crate) mod worker;

use kvlane_proto::Result;

use self::row::Row;
use crate::cluster::Cluster;
use crate::commands::{Interrupt, say};
use crate::report::json_rows;

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub(crate) enum What {
    /// So many rooms one after the other, and as many with so many in flight.
    Rooms { rooms: u32, in_flight: u32 },
    /// So many idle sessions at the bootstrap service.
    Connections { count: u32 },
    /// So many seconds of nothing.
    Rest { seconds: u32 },
}

/// Measures and shows; gives whether it was carried through, or interrupted.
///
/// # Errors
/// Whatever keeps a row from being measured, and a process that has died.
pub(crate) async fn run(what: What, json: bool, interrupt: &mut Interrupt) -> Result<bool> {
    let mut cluster = Cluster::new("bench")?;
    let measured = async {
        match measure(what, &mut cluster).await {
            Ok(rows) => Ok(rows),
            Err(e) => Err(cluster.explain(e).await),
        }
    };
    let measured = tokio::select! {
        rows = measured => Some(rows),
        () = interrupt.came() => None,
    };
    // Also after a failure: nobody is left behind.
    let ended = tokio::select! {
        ended = cluster.end() => ended,
        () = interrupt.came() => return Ok(false),
    };
    if measured.as_ref().is_some_and(Result::is_err) || ended.is_err() {
        cluster.show_logs();
    }
    let Some(rows) = measured.transpose()? else { return Ok(false) };
    ended?;
    say(&if json { json_rows(&rows)? } else { row::table(&rows) });
    Ok(true)
}

async fn measure(what: What, cluster: &mut Cluster) -> Result<Vec<Row>> {
    match what {
        What::Rooms { rooms, in_flight } => rooms::measure(cluster, rooms, in_flight).await,
        What::Connections { count } => connections::measure(cluster, count).await,
        What::Rest { seconds } => rest::measure(cluster, seconds).await,
    }
}
