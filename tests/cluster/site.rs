//! Two workers over one engine, and two beside them that nothing happens to; what is looked at after
//! each thing that went wrong between them.

use std::cell::Cell;
use std::collections::BTreeMap;

use kvlane_proto::msg::service::LoadState;
use kvlane_proto::{ErrorKind, Role};
use kvlane_transport::emulated::faults::{Fault, Target, What};
use serde_json::json;

use super::cluster::{Cluster, POOL_PAGES, POOL_TOKENS, Router, Worker};
use super::engines::{Engine, Rig};
use super::legs::{Reply, leg};
use super::process::{until, within};

/// Tokens of a room that leaves a quarter of each pool to canaries.
pub(crate) const MOST_TOKENS: u32 = POOL_TOKENS / 4 * 3;
/// Its pages.
pub(crate) const MOST_PAGES: u64 = POOL_PAGES / 4 * 3;
/// Its bytes: the pools have 8 MiB.
pub(crate) const MOST_BYTES: u64 = 6 << 20;
/// Tokens of the rooms beside it.
const FEW_TOKENS: u32 = 700;

pub(crate) struct Site {
    pub(crate) router: Router,
    pub(crate) prefill: Worker,
    pub(crate) decode: Worker,
    pub(crate) beside: (Worker, Worker),
    pub(crate) rig: Rig,
    /// What each of the four workers holds of the NIC when nothing runs.
    at_rest: Vec<(u64, u64, u64)>,
    pub(crate) cluster: Cluster,
}

impl Site {
    pub(crate) async fn start(engine: Engine) -> Self {
        Self::start_behind(engine, None).await
    }

    /// The prefill listens here and is dialled there.
    pub(crate) async fn start_behind(engine: Engine, behind: Option<(&str, &str)>) -> Self {
        let cluster = Cluster::start().await;
        let rig = Rig::start(&cluster, engine).await;
        let mut flags = rig.flags();
        // So that a room has more parts than are ever on their way.
        flags.extend(["--part-bytes", "262144"]);
        let router = cluster.router("r").await;
        let beside = tokio::join!(
            cluster.worker(Role::Prefill, "p-beside", &flags),
            cluster.worker(Role::Decode, "d-beside", &flags),
        );
        let advertise = behind.map_or(vec![], |(_, dialled)| vec!["--advertise", dialled]);
        let listen = behind.map_or(vec![], |(listens, _)| vec!["--listen", listens]);
        let prefills = [&flags[..], &advertise].concat();
        let first = [&prefills[..], &listen].concat();
        let (mut prefill, mut decode) = tokio::join!(
            cluster.worker(Role::Prefill, "p", &first),
            cluster.worker(Role::Decode, "d", &flags),
        );
        prefill.keep(&prefills);
        prefill.listens = behind.map(|(listens, _)| listens.to_string());
        decode.keep(&flags);
        let mut site = Self { router, prefill, decode, beside, rig, at_rest: Vec::new(), cluster };
        for worker in site.workers() {
            site.router.sees(worker).await;
        }
        // Only once there are lanes does a worker hold all that it will.
        site.router.hand_off(&site.beside.0, &site.beside.1, FEW_TOKENS).await;
        site.router.hand_off(&site.prefill, &site.decode, POOL_TOKENS).await;
        site.at_rest = site.held();
        site
    }

    /// Makes rooms of the two land no faster, or with 0 as fast as they can; nobody else's over NICs.
    pub(crate) async fn slow(rig: &Rig, prefill: &Worker, decode: &Worker, bytes_per_s: u64) {
        match (&rig.nics, bytes_per_s) {
            (None, _) => {
                decode.tell(json!({ "leg": "throttle", "bytes_per_s": bytes_per_s })).await;
            }
            (Some(_), 0) => rig.clear(0, 0),
            (Some(_), _) => {
                let sender = Target::Process(prefill.process.pid());
                rig.fault(0, Fault::new(What::Throttle { bytes_per_s }, sender));
            }
        }
    }

    pub(crate) fn workers(&self) -> [&Worker; 4] {
        [&self.prefill, &self.decode, &self.beside.0, &self.beside.1]
    }

    /// What each worker holds of the NIC; nobody else holds anything.
    fn held(&self) -> Vec<(u64, u64, u64)> {
        if self.rig.nics.is_none() {
            return Vec::new();
        }
        // Domains, keys and queue pairs of each process that has any.
        let stats = self.rig.stats(0);
        let all = stats.processes.iter().map(|p| (p.pid, (p.domains, p.keys, p.pairs)));
        let mut all: BTreeMap<i32, (u64, u64, u64)> =
            all.filter(|(_, held)| *held != (0, 0, 0)).collect();
        let mut of = |w: &&Worker| all.remove(&w.process.pid()).unwrap_or_default();
        let held = self.workers().iter().map(&mut of).collect();
        match all.is_empty() {
            true => held,
            // A process that is not there holds something.
            false => vec![(u64::MAX, 0, 0)],
        }
    }

    /// Shows that nothing is left behind: the two hand a whole pool off, every block of all four is
    /// free again and as it was left, every lane is back, and the NIC holds what it held at first.
    pub(crate) async fn assert_clean(&self) {
        self.router.hand_off(&self.prefill, &self.decode, POOL_TOKENS).await;
        for worker in self.workers() {
            worker.assert_all_free().await;
        }
        let lanes = u32::from(kvlane_proto::limits::LANES_PER_LINK);
        let pairs = [(&self.prefill, &self.decode), (&self.beside.0, &self.beside.1)];
        for (prefill, decode) in pairs {
            // Idle links are lost where the whole machine stands still; they come again with a room.
            decode.load("every lane, or none", |l| [0, lanes].contains(&l.free_lanes)).await;
            if decode.tell(json!({ "leg": "stats" })).await.load.free_lanes == 0 {
                self.router.hand_off(prefill, decode, FEW_TOKENS).await;
                decode.load("every lane is back", |l| l.free_lanes == lanes).await;
            }
        }
        if self.rig.nics.is_some() {
            let what = format!("the NIC holds {:?}, at first {:?}", self.held(), self.at_rest);
            until(&what, || (self.held() == self.at_rest).then_some(())).await;
        }
    }
}

impl Worker {
    /// It stops at this phase of its next room, or is held there.
    pub(crate) async fn stop_at(&self, phase: &str, hold: bool) {
        self.tell(json!({ "leg": "stop_at", "phase": phase, "hold": hold })).await;
    }
    /// It is held no longer, nor will be.
    pub(crate) async fn go_on(&self) {
        self.tell(json!({ "leg": "go_on" })).await;
    }
    /// What it says that it does.
    pub(crate) async fn state(&self) -> LoadState {
        self.tell(json!({ "leg": "stats" })).await.state.unwrap()
    }
    /// Waits until it says that it does this.
    pub(crate) async fn comes_to(&self, state: LoadState) {
        self.load(state.as_str(), |l| l.state() == state).await;
        assert_eq!(self.state().await, state);
    }
    async fn tell(&self, what: serde_json::Value) -> Reply {
        let told = leg(&self.serving, what).await;
        let told = told.unwrap_or_else(|| panic!("{} is gone", self.identity));
        assert!(told.error.is_none(), "{told:?}");
        told
    }
    /// Waits until every block is free; every page of each is as it was left.
    pub(crate) async fn assert_all_free(&self) {
        self.load("nothing", |l| (l.rooms, l.queued, l.quarantined_blocks) == (0, 0, 0)).await;
        let audit = async {
            loop {
                let audit = self.tell(json!({ "leg": "audit" })).await;
                assert_eq!(audit.pages_corrupt, 0, "{}: free pages were written", self.identity);
                if audit.pages_verified == POOL_PAGES {
                    return;
                }
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
        };
        within(&format!("{}: a block is never given back", self.identity), audit).await;
    }
}

/// Small rooms between two workers that nothing happens to, one after the other, while `work` runs.
pub(crate) async fn beside<T>(
    router: &Router,
    pair: &(Worker, Worker),
    work: impl Future<Output = T>,
) -> T {
    let over = Cell::new(false);
    let rooms = async {
        let mut rooms = 0;
        while !over.get() || rooms == 0 {
            router.hand_off(&pair.0, &pair.1, FEW_TOKENS).await;
            rooms += 1;
        }
    };
    let work = async {
        let end = work.await;
        over.set(true);
        end
    };
    tokio::join!(work, rooms).0
}

/// A reservation of this pair has to fail, once the router has heard of what happened; why.
pub(crate) async fn refused(
    router: &Router,
    prefill: &Worker,
    decode: &Worker,
) -> (ErrorKind, String) {
    let refusal = async {
        loop {
            let asked = router.coordinator.reserve(Router::request(prefill, decode, 100)).await;
            match asked {
                Err(e) => return e,
                Ok(early) => router.coordinator.abort_room(early.room, "too early"),
            };
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    let e = within("the refusal of a reservation", refusal).await;
    (e.kind(), e.to_string())
}
