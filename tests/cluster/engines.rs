//! Every engine, what its workers need, and workers with small pools over it.

use kvlane_proto::Role;
use kvlane_transport::emulated::client::Hca;
use kvlane_transport::emulated::faults::{Fault, Target, What};
use kvlane_transport::emulated::stats::Stats;

use super::cluster::{Cluster, Worker};
use super::nics::Nics;

/// Every data plane that a worker can be told to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Engine {
    Tcp,
    Shm,
    Gpunetio,
}

impl Engine {
    pub(crate) const ALL: [Self; 3] = [Self::Tcp, Self::Shm, Self::Gpunetio];

    fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Shm => "shm",
            Self::Gpunetio => "gpunetio",
        }
    }
}

/// Blocks, of 16 KiB each, of a small pool.
pub(crate) const SMALL_BLOCKS: u32 = 12;

/// What workers of an engine need: NICs, or nothing.
pub(crate) struct Rig {
    pub(crate) engine: Engine,
    pub(crate) nics: Option<Nics>,
}

impl Rig {
    pub(crate) async fn start(cluster: &Cluster, engine: Engine) -> Self {
        Self::with_rails(cluster, engine, 1).await
    }
    pub(crate) async fn with_rails(cluster: &Cluster, engine: Engine, rails: usize) -> Self {
        let nics = match engine {
            Engine::Gpunetio => Some(Nics::start(cluster, rails).await),
            _ => None,
        };
        Self { engine, nics }
    }

    /// What makes a worker use this engine.
    pub(crate) fn flags(&self) -> Vec<&str> {
        let mut flags = vec!["--engine", self.engine.name()];
        if let Some(nics) = &self.nics {
            flags.push("--emulated");
            flags.extend(nics.sockets.iter().flat_map(|socket| ["--nic", socket]));
        }
        flags
    }

    /// A worker with a small pool, whose pages travel in parts of 8 KiB.
    pub(crate) async fn worker(
        &self,
        cluster: &Cluster,
        role: Role,
        name: &str,
        extra: &[&str],
    ) -> Worker {
        let blocks = SMALL_BLOCKS.to_string();
        let small = ["--model", "tiny", "--pool-blocks", &blocks];
        let mut flags = self.flags();
        if !extra.contains(&"--model") {
            flags.extend(small);
            flags.extend(["--part-bytes", "8192", "--audit-rooms"]);
        }
        flags.extend(extra);
        cluster.worker(role, name, &flags).await
    }

    /// A decode that receives no faster: itself, or its NIC.
    pub(crate) async fn slow_decode(
        &self,
        cluster: &Cluster,
        name: &str,
        bytes_per_s: u64,
        extra: &[&str],
    ) -> Worker {
        let rate = bytes_per_s.to_string();
        let mut flags = extra.to_vec();
        if self.nics.is_some() {
            self.fault(0, Fault::new(What::Throttle { bytes_per_s }, Target::All));
        } else {
            flags.extend(["--throttle-bytes-per-s", &rate]);
        }
        self.worker(cluster, Role::Decode, name, &flags).await
    }

    fn nic(&self, rail: usize) -> Hca {
        let socket = &self.nics.as_ref().expect("this engine has NICs").sockets[rail];
        Hca::open(&socket.parse().unwrap()).unwrap()
    }
    /// Makes something go wrong with a NIC; the fault's number.
    pub(crate) fn fault(&self, rail: usize, fault: Fault) -> u64 {
        self.nic(rail).fault(&fault).unwrap()
    }
    /// Ends a fault, or with 0 all.
    pub(crate) fn clear(&self, rail: usize, id: u64) {
        self.nic(rail).clear(id).unwrap();
    }
    pub(crate) fn stats(&self, rail: usize) -> Stats {
        self.nic(rail).stats().unwrap()
    }
}
