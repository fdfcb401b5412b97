//! Resident memory of idle sessions at the bootstrap service.
//!
//! This process opens them, so that the service's own memory is all that is looked at: sessions of
//! routers, each of which has read the list of workers once, [`SEATS_PER_IDENTITY`] with every
//! certificate. Some are opened first and do not count: the program's own pages are touched by then.

use std::time::{Duration, Instant};

use kvlane_proto::msg::service::Cursor;
use kvlane_proto::{Error, ErrorKind, Incarnation, Result, Role, WorkerKey};
use kvlane_transport::quic::{Endpoint, EndpointConfig, Security};
use kvlane_transport::random::fill_random;
use kvlane_transport::seats::SEATS_PER_IDENTITY;
use kvlane_transport::service_client::ServiceClient;

use super::row::Row;
use crate::cluster::{Cluster, Started};
use crate::proc;

/// Sessions that do not count.
const WARM_UP: u32 = 2 * SEATS_PER_IDENTITY as u32;
/// Memory that has not changed for so long will not.
const QUIET: Duration = Duration::from_secs(1);
/// How long it may take until then.
const QUIET_MAX: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(100);

/// The row.
pub(super) async fn measure(cluster: &mut Cluster, count: u32) -> Result<Vec<Row>> {
    let service = cluster.start_service("127.0.0.1:0").await?;
    let before = open(cluster, &service, "warm", WARM_UP).await?;
    let rss_before = quiet(cluster, &service).await?;
    let counted = open(cluster, &service, "router", count).await?;
    let rss_after = quiet(cluster, &service).await?;
    // Whoever was put out meanwhile is not paid for.
    for client in before.iter().chain(&counted) {
        if client.sessions().borrow().peer.is_none() {
            return Err(Error::new(ErrorKind::PeerLost, "a session ended while it was idle"));
        }
    }
    Ok(vec![Row {
        connections: Some(count),
        rss_before_bytes: Some(rss_before),
        rss_after_bytes: Some(rss_after),
        bytes_per_connection: Some(rss_after.saturating_sub(rss_before) / u64::from(count)),
        ..Row::new("idle connections")
    }])
}

async fn open(
    cluster: &Cluster,
    service: &Started,
    name: &str,
    count: u32,
) -> Result<Vec<ServiceClient>> {
    let mut clients = Vec::new();
    let mut endpoint = None;
    for n in 0..count {
        if n % SEATS_PER_IDENTITY as u32 == 0 {
            let identity = cluster.identity(Role::Router, name, n / SEATS_PER_IDENTITY as u32)?;
            let security = Security::Mutual { dir: cluster.certs(&identity)? };
            let mut start = [0; 16];
            fill_random(&mut start)?;
            let me = WorkerKey { identity, incarnation: Incarnation(start) };
            let config = EndpointConfig::new(([127, 0, 0, 1], 0).into(), security, me);
            endpoint = Some(Endpoint::bind(config)?);
        }
        let Some(endpoint) = &endpoint else { break };
        let client = ServiceClient::new(endpoint.clone(), service.quic());
        client.list(Cursor::default()).await?;
        clients.push(client);
    }
    Ok(clients)
}

/// Waits until the service's memory stays as it is.
async fn quiet(cluster: &mut Cluster, service: &Started) -> Result<u64> {
    let settle = async {
        let begun = Instant::now();
        let (mut rss, mut since) = (0, begun);
        while since.elapsed() < QUIET && begun.elapsed() < QUIET_MAX {
            let now = proc::rss_bytes(service.pid)?;
            if now != rss {
                (rss, since) = (now, Instant::now());
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(rss)
    };
    tokio::select! {
        rss = settle => rss,
        e = cluster.died() => Err(e),
    }
}
