//! Each role killed in each phase of a room, over each engine.
//!
//! There are 36 cells: four roles, nine phases. A run takes every cell over one engine, and the engines
//! change places from day to day; `KVLANE_KILLS` is `all` for every cell over every engine, or a number
//! that stands for the day.

use kvlane_coordinator::HandoffOutcome;
use kvlane_proto::msg::service::Load;
use kvlane_proto::{Blame, ErrorKind, Outcome, Role, RoomId, limits};

use super::cluster::{Cluster, Ended, Router, Worker};
use super::engines::Engine;
use super::legs::{Leg, Reply, Request, leg};
use super::process::{CAP, within};
use super::router_process;
use super::site::{MOST_PAGES, MOST_TOKENS, Site, beside, refused};

const TOKENS: u32 = 900;

/// As the binary knows them, which is looked at below: its crate must not be built with hooks here.
const PHASES: [&str; 9] = [
    "registered",
    "reserved",
    "offer-sent",
    "offer-accepted",
    "first-byte",
    "half",
    "last-byte",
    "done",
    "given-back",
];
const ROLES: [Role; 4] = [Role::Prefill, Role::Decode, Role::Router, Role::Service];

/// The cells of this run that are over one engine: role, phase, and whether the victim is started again
/// before the survivors have noticed.
fn cells(engine: Engine) -> Vec<(Role, &'static str, bool)> {
    let asked = std::env::var("KVLANE_KILLS").ok();
    let turn = match asked.as_deref() {
        Some("all") => None,
        Some(turn) => Some(turn.parse::<usize>().expect("KVLANE_KILLS is `all` or a number")),
        None => {
            let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            Some((since.unwrap().as_secs() / 86_400) as usize)
        }
    };
    let mine = |n: usize| turn.is_none_or(|turn| Engine::ALL[(n + turn) % 3] == engine);
    let all = PHASES.iter().flat_map(|phase| ROLES.map(|role| (role, *phase)));
    let cells: Vec<_> = all
        .enumerate()
        .filter(|(n, _)| mine(*n))
        .map(|(n, (role, phase))| (role, phase, (n / 4 + n + turn.unwrap_or(0)) % 2 == 0))
        .collect();
    let again = turn.map_or("all".into(), |turn| turn.to_string());
    eprintln!("{} cells over {engine:?}; again with KVLANE_KILLS={again}", cells.len());
    cells
}

async fn every_cell(engine: Engine) {
    let mut site = Site::start(engine).await;
    for (role, phase, quickly) in cells(engine) {
        let began = std::time::Instant::now();
        let starts = site.workers().map(|w| w.incarnation.clone());
        let Site { cluster, router, prefill, decode, beside: pair, .. } = &mut site;
        let mut cell = Cell { router, prefill, decode, phase, quickly };
        let work = async {
            match role {
                Role::Prefill => cell.prefill().await,
                Role::Decode => cell.decode().await,
                Role::Router => cell.router(cluster).await,
                _ => cell.service(cluster).await,
            }
        };
        beside(router, pair, work).await;
        for (n, (worker, before)) in site.workers().into_iter().zip(starts).enumerate() {
            site.router.sees(worker).await;
            let killed = matches!((n, role), (0, Role::Prefill) | (1, Role::Decode));
            assert_eq!(worker.incarnation != before, killed, "{role} {phase}: {}", worker.identity);
        }
        site.assert_clean().await;
        eprintln!("{engine:?}: {role} killed at {phase}: {:?}", began.elapsed());
    }
}

#[tokio::test]
async fn whoever_is_killed_in_whichever_phase_costs_its_own_rooms_only_over_tcp() {
    every_cell(Engine::Tcp).await;
}

#[tokio::test]
async fn whoever_is_killed_in_whichever_phase_costs_its_own_rooms_only_over_shm() {
    every_cell(Engine::Shm).await;
}

#[tokio::test]
async fn whoever_is_killed_in_whichever_phase_costs_its_own_rooms_only_over_gpunetio() {
    every_cell(Engine::Gpunetio).await;
}

#[tokio::test]
async fn every_phase_at_which_a_worker_can_stop_is_one_of_a_cell() {
    let out = std::process::Command::new(super::binary::path())
        .args(["worker", "--role", "decode", "--insecure", "--stop-at", "nowhere"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && said.contains(&PHASES.join(", ")), "{said}");
}

/// One kill.
struct Cell<'a> {
    router: &'a Router,
    prefill: &'a mut Worker,
    decode: &'a mut Worker,
    phase: &'static str,
    quickly: bool,
}

impl Cell<'_> {
    fn victim(&mut self, role: Role) -> &mut Worker {
        if role == Role::Prefill { self.prefill } else { self.decode }
    }

    /// Kills a worker that has registered and not said so.
    async fn registered(&mut self, role: Role) {
        let victim = self.victim(role);
        victim.process.kill().await;
        victim.respawn(&["--stop-at", "registered"]);
        victim.process.stopped_at("registered").await;
        victim.process.kill().await;
        let name = victim.identity.to_string();
        // The service remembers it for a while: whoever asks is told who is missing.
        let (kind, text) = refused(self.router, self.prefill, self.decode).await;
        let known = [ErrorKind::PeerLost, ErrorKind::DeadlineExceeded];
        assert!(known.contains(&kind) && text.contains(&name), "{text}");
        self.victim(role).restart(&[]).await;
    }

    /// Sends both legs of a room, kills the victim when the room has come to the phase, and starts it
    /// again: before the survivor has noticed, or after.
    async fn kill(&mut self, role: Role) -> Ended {
        let (phase, quickly) = (self.phase, self.quickly);
        // A prefill does not take part in the first phases: the decode is held in them.
        let held = role == Role::Prefill && phase == "offer-sent";
        let reserved = phase == "reserved";
        match role {
            Role::Prefill if held => self.decode.stop_at(phase, true).await,
            Role::Prefill if reserved => {}
            _ => self.victim(role).stop_at(phase, false).await,
        }
        let mut request = self.router.reserve(self.prefill, self.decode, MOST_TOKENS).await;
        // Where the survivor waits for a peer that cannot know of the room any more.
        request.deadline_ms = 5_000;
        let (to_prefill, to_decode) = (request.prefill_leg(), request.decode_leg());
        let (p_serving, d_serving) = (self.prefill.serving.clone(), self.decode.serving.clone());
        // At a phase before its leg, the victim gets none.
        let legs = (!(reserved && role == Role::Prefill), !(reserved && role == Role::Decode));
        let kill = async {
            if held {
                self.decode.process.held_at(phase).await;
            } else if !(reserved && role == Role::Prefill) {
                self.victim(role).process.stopped_at(phase).await;
            }
            let victim = self.victim(role);
            victim.process.kill().await;
            if quickly {
                victim.restart(&[]).await;
            }
            if held {
                self.decode.go_on().await;
            }
        };
        let send = async |go: bool, serving: &str, body| match go {
            true => leg(serving, body).await,
            false => None,
        };
        let (p, d) = if reserved {
            // The other leg comes when it is dead.
            kill.await;
            tokio::join!(send(legs.0, &p_serving, to_prefill), send(legs.1, &d_serving, to_decode))
        } else {
            let ends = tokio::join!(leg(&p_serving, to_prefill), leg(&d_serving, to_decode), kill);
            (ends.0, ends.1)
        };
        let outcome = self.router.coordinator.await_outcome(RoomId(request.room), CAP);
        let outcome = within("the router's wait", outcome).await;
        if !quickly {
            self.victim(role).restart(&[]).await;
        }
        Ended { prefill: p, decode: d, outcome }
    }

    async fn prefill(&mut self) {
        let phase = self.phase;
        if phase == "registered" {
            return self.registered(Role::Prefill).await;
        }
        let ended = self.kill(Role::Prefill).await;
        let received = ended.decode.as_ref().expect("the decode lives");
        // It may still have answered.
        let told = ended.prefill.as_ref().is_some_and(Reply::is_done);
        assert!(ended.prefill.is_none() || told, "{phase}: {ended:?}");
        assert!(!told || received.is_done(), "{phase}: {ended:?}");
        // Once every part has arrived the decode may decide either way.
        match phase {
            "done" | "given-back" => received.assert_done(MOST_PAGES),
            "last-byte" if received.is_done() => received.assert_done(MOST_PAGES),
            _ => {
                // Its leg may come when the room has ended for it; the blame is the same.
                let kinds = [ErrorKind::PeerLost, ErrorKind::RoomEnded];
                received.assert_failed(if phase == "reserved" { &kinds } else { &kinds[..1] });
                assert_eq!(received.why().blame, Blame::Prefill, "{phase}: {received:?}");
            }
        }
        match &ended.outcome {
            HandoffOutcome::Done { .. } => assert!(received.is_done(), "{phase}: {ended:?}"),
            HandoffOutcome::Failed { leg, retryable, .. } => {
                assert!(!received.is_done(), "{phase}: {ended:?}");
                assert_eq!((*leg, *retryable), (Blame::Prefill, true), "{phase}: {ended:?}");
            }
            other => panic!("{phase}: {other:?}"),
        }
    }

    async fn decode(&mut self) {
        let phase = self.phase;
        if phase == "registered" {
            return self.registered(Role::Decode).await;
        }
        let ended = self.kill(Role::Decode).await;
        let sent = ended.prefill.as_ref().expect("the prefill lives");
        assert!(ended.decode.is_none(), "{phase}: {ended:?}");
        let told = sent.is_done() && matches!(phase, "done" | "given-back");
        if !told {
            let mut kinds = vec![ErrorKind::PeerLost];
            // The leg may come when the link is lost already.
            let early = matches!(phase, "reserved" | "offer-sent");
            if early {
                kinds.push(ErrorKind::DeadlineExceeded);
            }
            sent.assert_failed(&kinds);
            assert_eq!(sent.why().blame, Blame::Decode, "{phase}: {sent:?}");
            // Only the decode could say more about a room that was granted.
            let unknown = matches!(sent.outcome, Some(Outcome::Unknown { .. }));
            assert!(unknown || early, "{phase}: {sent:?}");
        }
        match &ended.outcome {
            HandoffOutcome::Failed { leg, retryable, .. } => {
                assert_eq!((*leg, *retryable), (Blame::Decode, true), "{phase}: {ended:?}");
            }
            other => panic!("{phase}: {other:?}"),
        }
    }

    /// Kills the router, whose legs hang up with it.
    async fn router(&mut self, cluster: &Cluster) {
        let phase = self.phase;
        let (legs, tokens): (&[Role], u32) = match phase {
            "registered" => (&[], 0),
            "reserved" => (&[], MOST_TOKENS),
            "offer-sent" => (&[Role::Decode], MOST_TOKENS),
            _ => (&[Role::Prefill, Role::Decode], MOST_TOKENS),
        };
        if !legs.is_empty() {
            self.decode.stop_at(phase, true).await;
        }
        let name = format!("killed-{phase}");
        let started =
            router_process::start(cluster, &name, self.prefill, self.decode, tokens, legs);
        let (mut process, request) = started.await;
        if !legs.is_empty() {
            self.decode.process.held_at(phase).await;
        }
        process.kill().await;
        self.decode.go_on().await;
        // Also of the reservation that nobody claimed.
        self.prefill.holds(0).await;
        self.decode.holds(0).await;
        let Some(request) = request.filter(|_| !legs.is_empty()) else { return };
        // Whoever asks later is told how it ended: the same by both.
        let late = leg(&self.decode.serving, request.decode_leg()).await.unwrap();
        late.assert_failed(&[ErrorKind::RoomEnded]);
        let done = late.why().text.contains("outcome=done");
        assert!(done || late.why().text.contains("hung up"), "{phase}: {late:?}");
        match phase {
            "done" | "given-back" => assert!(done, "{phase}: {late:?}"),
            "last-byte" => {}
            _ => assert!(!done, "{phase}: {late:?}"),
        }
        let late = leg(&self.prefill.serving, request.prefill_leg()).await.unwrap();
        late.assert_failed(&[ErrorKind::RoomEnded, ErrorKind::Aborted]);
        assert!(done || !late.why().text.contains("outcome=done"), "{phase}: {late:?}");
    }

    /// Kills the service, which costs nobody a room.
    async fn service(&mut self, cluster: &mut Cluster) {
        let phase = self.phase;
        let before = ["registered", "reserved"].contains(&phase);
        if !before {
            self.decode.stop_at(phase, true).await;
        }
        if phase == "registered" {
            cluster.bootstrap.kill().await;
        }
        let request = self.router.reserve(self.prefill, self.decode, MOST_TOKENS).await;
        if phase == "reserved" {
            cluster.bootstrap.kill().await;
        }
        let (p_serving, d_serving) = (self.prefill.serving.clone(), self.decode.serving.clone());
        let kill = async {
            if !before {
                self.decode.process.held_at(phase).await;
                cluster.bootstrap.kill().await;
                self.decode.go_on().await;
            }
        };
        let (p, d, ()) = tokio::join!(
            leg(&p_serving, request.prefill_leg()),
            leg(&d_serving, request.decode_leg()),
            kill,
        );
        d.unwrap().assert_done(MOST_PAGES);
        p.unwrap().assert_done(0);
        let outcome = self.router.coordinator.await_outcome(RoomId(request.room), CAP).await;
        assert!(matches!(outcome, HandoffOutcome::Done { .. }), "{phase}: {outcome:?}");
        cluster.restart_bootstrap().await;
        // Somebody who comes now finds both.
        let late = cluster.router(&format!("late-{phase}")).await;
        late.sees(self.prefill).await;
        late.sees(self.decode).await;
    }
}

/// A pair that nothing happens to.
async fn bystanders(cluster: &Cluster, router: &Router) -> (Worker, Worker) {
    let pair = tokio::join!(
        cluster.worker(Role::Prefill, "p-beside", &[]),
        cluster.worker(Role::Decode, "d-beside", &[]),
    );
    router.sees(&pair.0).await;
    router.sees(&pair.1).await;
    pair
}

#[tokio::test]
async fn a_killed_router_leaves_nothing_behind() {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let (prefill, decode) = bystanders(&cluster, &router).await;
    router.assert_clean(&prefill, &decode).await;
    let (p, d) = (Role::Prefill, Role::Decode);
    // Which legs it sends before it dies, and which of the others come all the same, from somebody
    // who lives.
    let cases: [(&[Role], &[Role]); 6] =
        [(&[], &[]), (&[p], &[]), (&[d], &[]), (&[p, d], &[]), (&[], &[p, d]), (&[p], &[d])];
    for (n, (its, others)) in cases.into_iter().enumerate() {
        eprintln!("router killed after {its:?}; then {others:?}");
        let name = format!("killed-{n}");
        let started = router_process::start(&cluster, &name, &prefill, &decode, TOKENS, its);
        let (mut process, request) = started.await;
        let request = request.unwrap();
        process.kill().await;
        let p_late = async {
            match others.contains(&p) {
                true => leg(&prefill.serving, request.prefill_leg()).await,
                false => None,
            }
        };
        let d_late = async {
            match others.contains(&d) {
                true => leg(&decode.serving, request.decode_leg()).await,
                false => None,
            }
        };
        let (p_late, d_late) = tokio::join!(p_late, d_late);
        if let (Some(p), Some(d)) = (&p_late, &d_late) {
            // It was reserved, and both legs live: nobody needs the router any more.
            assert!(p.is_done() && d.is_done(), "{p:?} {d:?}");
        } else if let Some(d) = d_late {
            // Its own leg hung up when it died.
            d.assert_failed(&[ErrorKind::Aborted, ErrorKind::RoomEnded]);
            assert!(d.why().text.contains("hung up"), "{d:?}");
        }
        // Also of the reservation that nobody claimed.
        prefill.holds(0).await;
        decode.holds(0).await;
        router.assert_clean(&prefill, &decode).await;
    }
}

#[tokio::test]
async fn every_room_of_a_killed_worker_ends_also_those_that_queue_for_lanes() {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let (mut prefill, mut decode) = bystanders(&cluster, &router).await;
    let lanes = u32::from(limits::LANES_PER_LINK);
    let rooms = lanes + 3;
    for (n, victim) in [Role::Prefill, Role::Decode].into_iter().enumerate() {
        router.assert_clean(&prefill, &decode).await;
        let address = |w: &Worker| {
            router.coordinator.snapshot().worker(&w.identity).unwrap().address().clone()
        };
        let request = |i: u32| Request {
            room: 1 + u64::from(i) + 100 * n as u64,
            tokens: TOKENS / 2,
            prefill: address(&prefill),
            decode: address(&decode),
            issuer: router.identity.clone(),
            deadline_ms: 30_000,
        };
        let mut legs = Vec::new();
        for i in 0..rooms {
            let sent = match victim {
                Role::Prefill => Leg::send(&decode.serving, request(i).decode_leg()).await,
                _ => Leg::send(&prefill.serving, request(i).prefill_leg()).await,
            };
            legs.push(sent.unwrap());
        }
        match victim {
            Role::Prefill => {
                let busy =
                    |l: &Load| (l.rooms, l.queued, l.free_lanes) == (rooms, rooms - lanes, 0);
                decode.load("all lanes lent", busy).await;
                prefill.process.kill().await;
            }
            _ => {
                prefill.holds(rooms).await;
                decode.process.kill().await;
            }
        }
        for leg in legs {
            let reply = leg.reply().await.unwrap();
            reply.assert_failed(&[ErrorKind::PeerLost]);
            let blamed = if victim == Role::Prefill { Blame::Prefill } else { Blame::Decode };
            assert_eq!(reply.why().blame, blamed, "{reply:?}");
        }
        let (dead, survivor) = match victim {
            Role::Prefill => (&mut prefill, &decode),
            _ => (&mut decode, &prefill),
        };
        survivor.load("nothing", |l| (l.rooms, l.queued, l.quarantined_blocks) == (0, 0, 0)).await;
        dead.restart(&[]).await;
        router.sees(dead).await;
        router.assert_clean(&prefill, &decode).await;
    }
}

#[tokio::test]
async fn requests_placed_after_a_prefill_died_go_to_the_one_beside_it() {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let (alive, decode) = bystanders(&cluster, &router).await;
    let mut dead = cluster.worker(Role::Prefill, "p-dead", &[]).await;
    router.sees(&dead).await;
    router.hand_off(&dead, &decode, TOKENS).await;
    dead.process.kill().await;
    // At once: the view still shows it alive, with nothing to do.
    let rooms = (0..8).map(|_| {
        let (coordinator, issuer) = (router.coordinator.clone(), router.identity.clone());
        let (to_alive, to_decode) = (alive.serving.clone(), decode.serving.clone());
        let dead = dead.identity.clone();
        async move {
            let handoff = coordinator.reserve(Router::any(TOKENS)).await.unwrap();
            let request = Request::of(&handoff, &issuer, TOKENS);
            let doomed = handoff.prefill[0].worker.key.identity == dead;
            handoff.detach();
            let decoded = leg(&to_decode, request.decode_leg());
            if doomed {
                // Reserved before the decode had noticed: it fails, with the reason.
                decoded.await.unwrap().assert_failed(&[ErrorKind::PeerLost]);
            } else {
                let (p, d) = tokio::join!(leg(&to_alive, request.prefill_leg()), decoded);
                assert!(p.unwrap().is_done() && d.unwrap().is_done());
            }
        }
    });
    futures(rooms).await;
    // And from then on none goes wrong.
    for _ in 0..4 {
        let handoff = within("a reservation", router.coordinator.reserve(Router::any(TOKENS)));
        let handoff = handoff.await.unwrap();
        assert_eq!(handoff.prefill[0].worker.key.identity, alive.identity);
    }
}

/// All of them at the same time.
async fn futures<F>(work: impl Iterator<Item = F>) -> Vec<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    let mut ends = Vec::new();
    for task in work.map(tokio::spawn).collect::<Vec<_>>() {
        ends.push(within("a reservation", task).await.unwrap());
    }
    ends
}
