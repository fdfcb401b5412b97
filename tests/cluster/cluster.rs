//! A cluster: service, workers, routers.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kvlane_coordinator::{Coordinator, CoordinatorConfig, HandoffOutcome, PairRequest};
use kvlane_proto::msg::call::{self, Call};
use kvlane_proto::msg::service::Load;
use kvlane_proto::{Error, Identity, Incarnation, Role, WorkerKey};
use kvlane_transport::quic::{Endpoint, EndpointConfig, Security};
use kvlane_transport::random::random;
use kvlane_transport::rpc::{CallExchange, Client, Failure, Target};

use serde_json::json;

use super::legs::{Reply, Request, leg};
use super::process::{CAP, Process, until, within};

/// Pages of one block of the model `tiny`: four layers, K and V.
pub(crate) const PAGES_PER_BLOCK: u64 = 8;
pub(crate) const PAGE_TOKENS: u32 = 16;
/// Blocks, and tokens, of a worker's pool: 8 MiB.
pub(crate) const POOL_BLOCKS: u32 = 512;
pub(crate) const POOL_TOKENS: u32 = POOL_BLOCKS * PAGE_TOKENS;
/// Every page of a pool.
pub(crate) const POOL_PAGES: u64 = POOL_BLOCKS as u64 * PAGES_PER_BLOCK;

/// A directory that is removed at the end.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new() -> Self {
        let path = std::env::temp_dir().join(format!("kvlane-cluster-{:016x}", random()));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// How the processes of a cluster prove who they are.
pub(crate) enum Trust {
    Nobody,
    /// Certificates of the authority in this directory.
    Ca(PathBuf),
}

pub(crate) struct Cluster {
    pub(crate) bootstrap: Process,
    pub(crate) service: String,
    trust: Trust,
    /// Where the service and routers are.
    ip: std::net::IpAddr,
    // Last, so that processes are gone before their files are.
    dir: Scratch,
}

fn args(list: &[&str]) -> Vec<String> {
    list.iter().map(ToString::to_string).collect()
}

impl Cluster {
    /// A service, and nobody registered.
    pub(crate) async fn start() -> Self {
        Self::start_in(Scratch::new(), Trust::Nobody).await
    }

    pub(crate) async fn start_in(dir: Scratch, trust: Trust) -> Self {
        Self::start_at(dir, trust, [127, 0, 0, 1].into()).await
    }

    pub(crate) async fn start_at(dir: Scratch, trust: Trust, ip: std::net::IpAddr) -> Self {
        let mut flags = args(&["bootstrap", "--quic", &format!("{ip}:0")]);
        flags.extend(security(&trust, dir.path(), Role::Service, "bootstrap"));
        let mut bootstrap = Process::spawn(dir.path(), "bootstrap", &flags);
        let service = bootstrap.ready().await["quic"].as_str().unwrap().to_string();
        Self { bootstrap, service, trust, ip, dir }
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Starts the service again where it was.
    pub(crate) async fn restart_bootstrap(&mut self) {
        let mut flags = args(&["bootstrap", "--quic", &self.service]);
        flags.extend(security(&self.trust, self.dir(), Role::Service, "bootstrap"));
        self.bootstrap = Process::spawn(self.dir(), "bootstrap", &flags);
        self.bootstrap.ready().await;
    }

    /// Starts a worker and waits until it is ready.
    pub(crate) async fn worker(&self, role: Role, name: &str, extra: &[&str]) -> Worker {
        let mut worker = self.spawn_worker(role, name, extra);
        worker.ready().await;
        worker
    }

    /// Starts a worker.
    pub(crate) fn spawn_worker(&self, role: Role, name: &str, extra: &[&str]) -> Worker {
        self.spawn_worker_in(None, role, name, extra)
    }

    /// Starts a worker in a network namespace.
    pub(crate) fn spawn_worker_in(
        &self,
        space: Option<&str>,
        role: Role,
        name: &str,
        extra: &[&str],
    ) -> Worker {
        let key = self.dir().join(format!("{name}.key")).display().to_string();
        let mut flags = args(&[
            "worker",
            "--role",
            role.as_str(),
            "--service",
            &self.service,
            "--reset-key",
            &key,
            "--canaries",
        ]);
        if !extra.contains(&"--model") {
            flags.extend(args(&["--model", "tiny", "--pool-mib", "8"]));
        }
        flags.extend(security(&self.trust, self.dir(), role, name));
        if matches!(self.trust, Trust::Nobody) {
            flags.extend(args(&["--name", name]));
        }
        let rank = extra.iter().position(|flag| *flag == "--rank");
        let rank = rank.map_or(0, |at| extra[at + 1].parse().unwrap());
        let identity = Identity::new("default", role, name, rank).unwrap();
        let dir = self.dir().to_path_buf();
        let first = [flags.clone(), args(extra)].concat();
        let process = Process::spawn_in(&dir, name, &first, space);
        let (quic, listens, serving, incarnation, blocks) = Default::default();
        Worker { process, identity, quic, listens, serving, incarnation, blocks, dir, flags }
    }

    /// A router in this process.
    pub(crate) async fn router(&self, name: &str) -> Router {
        let identity = Identity::new("default", Role::Router, name, 0).unwrap();
        let security = match &self.trust {
            Trust::Nobody => Security::Insecure,
            Trust::Ca(ca) => Security::Mutual { dir: certificate(ca, self.dir(), &identity) },
        };
        let mut config = CoordinatorConfig::new(&self.service, security, identity.clone());
        if !self.ip.is_loopback() {
            config.listen = (self.ip, 0).into();
        }
        let coordinator = within("a router's start", Coordinator::connect(config)).await.unwrap();
        Router { coordinator, identity: identity.to_string() }
    }
}

fn security(trust: &Trust, dir: &Path, role: Role, name: &str) -> Vec<String> {
    match trust {
        Trust::Nobody => args(&["--insecure"]),
        Trust::Ca(ca) => {
            let identity = Identity::new("default", role, name, 0).unwrap();
            args(&["--certs", &certificate(ca, dir, &identity).display().to_string()])
        }
    }
}

/// The directory of an identity's certificate, issued if there is none.
pub(crate) fn certificate(ca: &Path, dir: &Path, identity: &Identity) -> PathBuf {
    let out = dir.join(format!("certs-{}-{}", identity.role, identity.instance));
    if !out.exists() {
        kvlane_transport::quic::ca::issue(ca, &out, identity, 1).unwrap();
    }
    out
}

pub(crate) struct Worker {
    pub(crate) process: Process,
    pub(crate) identity: Identity,
    pub(crate) quic: String,
    /// Where it listens, if it is not where it is dialled.
    pub(crate) listens: Option<String>,
    pub(crate) serving: String,
    pub(crate) incarnation: String,
    pub(crate) blocks: u32,
    dir: PathBuf,
    flags: Vec<String>,
}

impl Worker {
    /// Waits until it is ready.
    pub(crate) async fn ready(&mut self) {
        let ready = self.process.ready().await;
        let text = |key: &str| ready[key].as_str().unwrap_or_else(|| panic!("{ready}")).to_string();
        assert_eq!(text("identity"), self.identity.to_string());
        (self.quic, self.serving) = (text("quic"), text("serving"));
        self.incarnation = text("incarnation");
        self.blocks = ready["blocks"].as_u64().unwrap() as u32;
    }

    /// Waits until it says that it is so busy.
    pub(crate) async fn load(&self, what: &str, is: impl Fn(&Load) -> bool) {
        let ask = async {
            loop {
                let stats = leg(&self.serving, json!({ "leg": "stats" })).await;
                let load = stats.unwrap_or_else(|| panic!("{} is gone", self.identity)).load;
                if is(&load) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        within(&format!("{}: {what}", self.identity), ask).await;
    }

    /// Waits until it holds so many rooms.
    pub(crate) async fn holds(&self, rooms: u32) {
        self.load(&format!("{rooms} rooms"), |l| l.rooms == rooms).await;
    }

    /// Tokens that fill its pool.
    pub(crate) fn pool_tokens(&self) -> u32 {
        self.blocks * PAGE_TOKENS
    }

    /// Flags of every later start, too.
    pub(crate) fn keep(&mut self, flags: &[&str]) {
        self.flags.extend(args(flags));
    }

    /// Starts it again at the same ports, without waiting.
    pub(crate) fn respawn(&mut self, extra: &[&str]) {
        let mut flags = self.flags.clone();
        if !self.quic.is_empty() {
            let listens = self.listens.as_ref().unwrap_or(&self.quic);
            flags.extend(args(&["--listen", listens, "--serving", &self.serving]));
        }
        flags.extend(args(extra));
        self.process = Process::spawn(&self.dir, &self.identity.instance, &flags);
    }

    /// Starts it again at the same ports and waits until it is ready.
    pub(crate) async fn restart(&mut self, extra: &[&str]) {
        self.respawn(extra);
        self.ready().await;
    }
}

pub(crate) struct Router {
    pub(crate) coordinator: Coordinator,
    pub(crate) identity: String,
}

/// Somebody who calls workers without the coordinator's manners; a cluster without certificates only.
pub(crate) struct Caller(Endpoint);

impl Caller {
    pub(crate) fn new(role: Role, name: &str) -> Self {
        let identity = Identity::new("default", role, name, 0).unwrap();
        let me = WorkerKey { identity, incarnation: Incarnation([7; 16]) };
        let listen = ([127, 0, 0, 1], 0).into();
        Self(Endpoint::bind(EndpointConfig::new(listen, Security::Insecure, me)).unwrap())
    }
    /// Asks a worker; the error is its refusal.
    pub(crate) async fn ask(&self, worker: &Worker, call: Call) -> Result<call::Reply, Error> {
        let target = Target {
            address: worker.quic.clone(),
            expects: Some(worker.identity.clone()),
            incarnation: None,
            role: worker.identity.role,
        };
        let client = Client::<CallExchange>::new(self.0.clone(), target);
        client.ask(call, CAP).await.map_err(|failure| match failure {
            Failure::Refused(e) => e,
            other => panic!("no answer: {other}"),
        })
    }
}

/// Both legs' replies and the decode's word to the router.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) prefill: Option<Reply>,
    pub(crate) decode: Option<Reply>,
    pub(crate) outcome: HandoffOutcome,
}

impl Router {
    /// Waits until this start of a worker is known here as alive.
    pub(crate) async fn sees(&self, worker: &Worker) {
        until(&format!("{} is seen by the router", worker.identity), || {
            let view = self.coordinator.snapshot();
            let m = view.worker(&worker.identity)?;
            let same = m.key().incarnation.to_string() == worker.incarnation;
            (same && m.view.alive).then_some(())
        })
        .await;
    }

    /// Waits until a worker is known here to drain.
    pub(crate) async fn sees_draining(&self, worker: &Worker) {
        until(&format!("{} is seen to drain", worker.identity), || {
            let view = self.coordinator.snapshot();
            view.worker(&worker.identity)?.view.load.draining.then_some(())
        })
        .await;
    }

    pub(crate) fn request(prefill: &Worker, decode: &Worker, tokens: u32) -> PairRequest {
        PairRequest {
            prefill: Some(prefill.identity.clone()),
            decode: Some(decode.identity.clone()),
            ..Self::any(tokens)
        }
    }

    /// A request that waits in the queue.
    pub(crate) fn any(tokens: u32) -> PairRequest {
        PairRequest { wait: Duration::from_secs(10), ..PairRequest::new(tokens) }
    }

    /// Reserves a room with this pair; it runs on without the router.
    pub(crate) async fn reserve(&self, prefill: &Worker, decode: &Worker, tokens: u32) -> Request {
        let asked = self.coordinator.reserve(Self::request(prefill, decode, tokens));
        let handoff = within("a reservation", asked).await.unwrap();
        let request = Request::of(&handoff, &self.identity, tokens);
        handoff.detach();
        request
    }

    /// Sends both legs and waits for both ends.
    pub(crate) async fn run(&self, prefill: &Worker, decode: &Worker, r: &Request) -> Ended {
        let (p, d) = tokio::join!(
            leg(&prefill.serving, r.prefill_leg()),
            leg(&decode.serving, r.decode_leg())
        );
        let outcome = self.coordinator.await_outcome(kvlane_proto::RoomId(r.room), CAP).await;
        Ended { prefill: p, decode: d, outcome }
    }

    /// A whole hand-off, which has to succeed.
    pub(crate) async fn hand_off(&self, prefill: &Worker, decode: &Worker, tokens: u32) {
        let request = self.reserve(prefill, decode, tokens).await;
        let ended = self.run(prefill, decode, &request).await;
        let layout =
            self.coordinator.snapshot().worker(&decode.identity).unwrap().view.registration.pools
                [0]
            .clone();
        let pages =
            u64::from(layout.blocks_for(tokens)) * u64::from(layout.layers * layout.kind.slabs());
        ended.decode.as_ref().unwrap_or_else(|| panic!("{ended:?}")).assert_done(pages);
        ended.prefill.as_ref().unwrap_or_else(|| panic!("{ended:?}")).assert_done(0);
        assert!(matches!(ended.outcome, HandoffOutcome::Done { .. }), "{ended:?}");
    }

    /// Shows that nothing is left behind at either of a pair: rooms as large as a whole pool
    /// succeed (twice: the second sees the first's stamps), so do as many at a time as there are
    /// lanes, and both report nothing in use.
    pub(crate) async fn assert_clean(&self, prefill: &Worker, decode: &Worker) {
        let all = decode.pool_tokens();
        self.hand_off(prefill, decode, all).await;
        self.hand_off(prefill, decode, all).await;
        let few = all / 8;
        tokio::join!(
            self.hand_off(prefill, decode, few),
            self.hand_off(prefill, decode, few),
            self.hand_off(prefill, decode, few),
            self.hand_off(prefill, decode, few),
        );
        let lanes = u32::from(kvlane_proto::limits::LANES_PER_LINK);
        decode
            .load("four free lanes, nothing else", |l| {
                (l.rooms, l.queued, l.quarantined_blocks) == (0, 0, 0) && l.free_lanes == lanes
            })
            .await;
        prefill.load("nothing in use", |l| (l.rooms, l.quarantined_blocks) == (0, 0)).await;
    }
}
