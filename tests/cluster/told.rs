//! Failure is told, not waited for: every cause, over every engine, and what whoever waits is told.

use std::time::Duration;

use kvlane_coordinator::HandoffOutcome;
use kvlane_proto::msg::service::WorkerAddress;
use kvlane_proto::{Blame, ErrorKind, Outcome, Retry, Role, RoomId};
use kvlane_transport::emulated::faults::{Fault, Target, What};

use super::cluster::{Router, Worker};
use super::engines::{Engine, Rig};
use super::legs::{Leg, Reply, Request, leg};
use super::site::{MOST_BYTES, MOST_TOKENS, Site, beside};
use super::udp::{Wire, free_address};

/// Far more than is promised; what tells a notice from silence is the reason.
const TOLD: Duration = Duration::from_secs(10);
/// Ten times a worker's lease.
const LEASE: Duration = Duration::from_secs(50);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    PrefillDies,
    DecodeDies,
    PrefillStops,
    DecodeStops,
    LinkIsCut,
    RouterAborts,
    LegIsRejected,
    PrefillDrains,
    RailIsLost,
}

impl Cause {
    const ALL: [Self; 9] = [
        Self::PrefillDies,
        Self::DecodeDies,
        Self::PrefillStops,
        Self::DecodeStops,
        Self::LinkIsCut,
        Self::RouterAborts,
        Self::LegIsRejected,
        Self::PrefillDrains,
        Self::RailIsLost,
    ];

    /// Whether only silence tells of it; `false` where a notice or a word must have come first.
    fn is_silent(self) -> bool {
        matches!(self, Self::PrefillStops | Self::DecodeStops | Self::LinkIsCut)
    }

    fn expected(self) -> Expected {
        use Blame::{Caller, Decode, Link, Prefill};
        use ErrorKind::{Aborted, Draining, Incomplete, InvalidPlan, NoPath, PeerLost};
        let (prefill, decode, router, moved) = match self {
            Self::PrefillDies => (None, told(&[PeerLost], Prefill), Some(Prefill), true),
            Self::DecodeDies => (told(&[PeerLost], Decode), None, Some(Decode), true),
            Self::PrefillStops => (None, told(&[PeerLost], Prefill), Some(Prefill), true),
            Self::DecodeStops => (told(&[PeerLost], Decode), None, Some(Decode), true),
            Self::LinkIsCut => {
                let (p, d) = (told(&[PeerLost], Decode), told(&[PeerLost], Prefill));
                (p, d, Some(Prefill), false)
            }
            Self::RouterAborts => {
                (told(&[Aborted], Caller), told(&[Aborted], Caller), Some(Caller), true)
            }
            Self::LegIsRejected => {
                let (p, d) = (told(&[InvalidPlan], Caller), told(&[Aborted], Caller));
                (p, d, Some(Caller), false)
            }
            Self::PrefillDrains => {
                let each = told(&[Draining], Prefill);
                (each, each, None, false)
            }
            Self::RailIsLost => {
                // Either side may be first: the sender's word may charge nobody but itself, the
                // decode charges the path.
                let each = told(&[NoPath, Incomplete], Link);
                (each, each, Some(Link), true)
            }
        };
        Expected { prefill, decode, router, moved }
    }
}

#[derive(Clone, Copy, Debug)]
struct Told {
    kinds: &'static [ErrorKind],
    blame: Blame,
}

fn told(kinds: &'static [ErrorKind], blame: Blame) -> Option<Told> {
    Some(Told { kinds, blame })
}

/// What whoever waits is told; `None` for who is dead or stopped, or has nobody to ask.
struct Expected {
    prefill: Option<Told>,
    decode: Option<Told>,
    router: Option<Blame>,
    /// Pages had arrived.
    moved: bool,
}

/// Of a path that is lost, also the side may be charged that has said so.
fn is_to_blame(found: Blame, expected: Blame) -> bool {
    found == expected || expected == Blame::Link && found == Blame::Prefill
}

impl Told {
    fn check(&self, who: &str, reply: &Reply) {
        reply.assert_failed(self.kinds);
        let found = reply.why().blame;
        assert!(is_to_blame(found, self.blame), "{who}: {reply:?}");
    }
}

async fn capped<T>(what: &str, cap: Duration, work: impl Future<Output = T>) -> T {
    let ended = tokio::time::timeout(cap, work).await;
    ended.unwrap_or_else(|_| panic!("{what}: not told within {cap:?}"))
}

/// A room in which something has happened, and how it is undone once everybody was told.
struct Struck {
    request: Request,
    prefill: Option<Leg>,
    decode: Option<Leg>,
    undo: Undo,
}

enum Undo {
    Nothing,
    Restart(Role),
    Continue(Role),
    Mend,
    Clear,
    Finish(Box<Request>, Leg),
}

fn address(router: &Router, worker: &Worker) -> WorkerAddress {
    router.coordinator.snapshot().worker(&worker.identity).unwrap().address().clone()
}

async fn strike(
    cause: Cause,
    router: &Router,
    (prefill, decode): (&mut Worker, &mut Worker),
    (wire, rig): (&Wire, &Rig),
) -> Struck {
    let request = match cause {
        Cause::PrefillDrains => Request {
            room: 77,
            tokens: MOST_TOKENS,
            prefill: address(router, prefill),
            decode: address(router, decode),
            issuer: router.identity.clone(),
            deadline_ms: 30_000,
        },
        _ => {
            // Who is to strike, or to be struck, waits when half of it has arrived.
            match cause {
                Cause::PrefillDies
                | Cause::PrefillStops
                | Cause::RouterAborts
                | Cause::RailIsLost => prefill.stop_at("half", true).await,
                Cause::LegIsRejected | Cause::LinkIsCut => {}
                _ => decode.stop_at("half", true).await,
            }
            router.reserve(prefill, decode, MOST_TOKENS).await
        }
    };
    let send = async |worker: &Worker, body| Some(Leg::send(&worker.serving, body).await.unwrap());
    let mut struck = Struck { request, prefill: None, decode: None, undo: Undo::Nothing };
    let both = async |struck: &mut Struck, prefill: &Worker, decode: &Worker| {
        struck.prefill = send(prefill, struck.request.prefill_leg()).await;
        struck.decode = send(decode, struck.request.decode_leg()).await;
    };
    match cause {
        Cause::LegIsRejected => {
            struck.decode = send(decode, struck.request.decode_leg()).await;
            prefill.holds(1).await;
            let longer = Request { tokens: MOST_TOKENS + 16, ..struck.request.clone() };
            struck.prefill = send(prefill, longer.prefill_leg()).await;
            // The router hears of it with the leg's answer; it gives up the room.
            let refused = struck.prefill.take().unwrap().reply().await.unwrap();
            cause.expected().prefill.unwrap().check("prefill", &refused);
            router.coordinator.abort_room(RoomId(struck.request.room), "a leg was refused");
        }
        Cause::PrefillDrains => {
            // It has a room that it waits for.
            let begun = router.reserve(prefill, decode, MOST_TOKENS / 8).await;
            let waits = Leg::send(&prefill.serving, begun.prefill_leg()).await.unwrap();
            prefill.holds(1).await;
            prefill.process.signal("TERM");
            prefill.load("it drains", |l| l.draining).await;
            both(&mut struck, prefill, decode).await;
            struck.undo = Undo::Finish(Box::new(begun), waits);
        }
        Cause::LinkIsCut => {
            struck.decode = send(decode, struck.request.decode_leg()).await;
            prefill.holds(1).await;
            wire.cut();
            // Its leg comes when the other side has been given up.
            struck.undo = Undo::Mend;
        }
        Cause::RouterAborts => {
            both(&mut struck, prefill, decode).await;
            prefill.process.held_at("half").await;
            router.coordinator.abort_room(RoomId(struck.request.room), "the user has left");
            // The decode needs nobody for it.
            decode.holds(0).await;
            prefill.go_on().await;
        }
        Cause::PrefillDies | Cause::PrefillStops | Cause::RailIsLost => {
            both(&mut struck, prefill, decode).await;
            prefill.process.held_at("half").await;
            if cause == Cause::RailIsLost {
                let down = Fault::new(What::LinkDown, Target::All);
                rig.fault(0, down);
                prefill.go_on().await;
                struck.undo = Undo::Clear;
            } else if cause == Cause::PrefillDies {
                prefill.process.kill().await;
                struck.undo = Undo::Restart(Role::Prefill);
            } else {
                prefill.process.signal("STOP");
                struck.undo = Undo::Continue(Role::Prefill);
            }
        }
        Cause::DecodeDies | Cause::DecodeStops => {
            both(&mut struck, prefill, decode).await;
            decode.process.held_at("half").await;
            if cause == Cause::DecodeDies {
                decode.process.kill().await;
                struck.undo = Undo::Restart(Role::Decode);
            } else {
                decode.process.signal("STOP");
                struck.undo = Undo::Continue(Role::Decode);
            }
        }
    }
    struck
}

async fn cause_is_told(site: &mut Site, wire: &Wire, cause: Cause) {
    let Site { router, prefill, decode, beside: pair, rig, .. } = &mut *site;
    let expected = cause.expected();
    let work = async {
        let struck = strike(cause, router, (prefill, decode), (wire, rig)).await;
        let Struck { request, prefill: p, decode: d, undo } = struck;
        // Whoever is dead or stopped has nothing to say.
        let p = async {
            match p.filter(|_| expected.prefill.is_some()) {
                Some(leg) => leg.reply().await,
                None => None,
            }
        };
        let d = async {
            match d.filter(|_| expected.decode.is_some()) {
                Some(leg) => leg.reply().await,
                None => None,
            }
        };
        let both = async { tokio::join!(p, d) };
        let (mut p, d) = capped(&format!("{cause:?}"), TOLD, both).await;
        for reply in [&p, &d].into_iter().flatten() {
            let text = &reply.why().text;
            let silent = text.contains("is silent") || text.contains("fell silent");
            assert_eq!(silent, cause.is_silent(), "{cause:?}: {reply:?}");
        }
        if cause == Cause::LinkIsCut {
            prefill.holds(0).await;
            p = leg(&prefill.serving, request.prefill_leg()).await;
        }
        if let (Some(expected), Some(reply)) = (expected.prefill, &p) {
            expected.check("prefill", reply);
        }
        if let Some(told) = expected.decode {
            let reply = d.expect("the decode was asked");
            told.check("decode", &reply);
            match (&reply.outcome, expected.moved) {
                (Some(Outcome::Failed { bytes, .. }), true) => {
                    assert!(*bytes > 0 && *bytes <= MOST_BYTES, "{cause:?}: {reply:?}");
                }
                (Some(Outcome::Failed { bytes: 0, .. }) | None, false) => {}
                other => panic!("{cause:?}: {other:?}"),
            }
            let retry = reply.why().kind.retry() != Retry::Never;
            let given_up = matches!(cause, Cause::RouterAborts | Cause::LegIsRejected);
            assert_eq!(retry, !given_up, "{cause:?}: {reply:?}");
        }
        if let Some(blame) = expected.router {
            // Only the end of its lease says for certain that a decode has decided nothing.
            let silent = matches!(cause, Cause::DecodeDies | Cause::DecodeStops);
            let cap = if silent { LEASE } else { TOLD };
            let wait = router.coordinator.await_outcome(RoomId(request.room), cap);
            match wait.await {
                HandoffOutcome::Failed { leg, retryable, refusal, .. } => {
                    assert!(is_to_blame(leg, blame), "{cause:?}: {leg:?}, {refusal}");
                    assert_eq!(retryable, refusal.kind.retry() != Retry::Never, "{refusal}");
                }
                other => panic!("{cause:?}: {other:?}"),
            }
        }
        match undo {
            Undo::Nothing => {}
            Undo::Restart(role) => {
                let dead = if role == Role::Prefill { &mut *prefill } else { &mut *decode };
                dead.restart(&[]).await;
            }
            Undo::Continue(role) => {
                let stopped = if role == Role::Prefill { &*prefill } else { &*decode };
                stopped.process.signal("CONT");
                stopped.go_on().await;
            }
            Undo::Mend => wire.mend(),
            Undo::Clear => rig.clear(0, 0),
            Undo::Finish(begun, waits) => {
                let received = leg(&decode.serving, begun.decode_leg()).await.unwrap();
                assert!(received.is_done(), "{received:?}");
                assert!(waits.reply().await.unwrap().is_done());
                assert_eq!(prefill.process.ended().await.code(), Some(0));
                prefill.restart(&[]).await;
            }
        }
        prefill.go_on().await;
        decode.go_on().await;
        router.sees(prefill).await;
        router.sees(decode).await;
    };
    // Where the rail is everybody's, nobody is beside it.
    if cause == Cause::RailIsLost {
        work.await;
    } else {
        beside(router, pair, work).await;
    }
    site.assert_clean().await;
}

async fn every_cause(engine: Engine) {
    let listens = free_address();
    let wire = Wire::to(listens).await;
    let (listens, dialled) = (listens.to_string(), wire.address().to_string());
    let mut site = Site::start_behind(engine, Some((&listens, &dialled))).await;
    for cause in Cause::ALL {
        // Only this engine has rails that are not its connections.
        if cause == Cause::RailIsLost && engine != Engine::Gpunetio {
            continue;
        }
        let began = std::time::Instant::now();
        cause_is_told(&mut site, &wire, cause).await;
        eprintln!("{engine:?}: {cause:?}: {:?}", began.elapsed());
    }
}

#[tokio::test]
async fn whoever_waits_is_told_why_whatever_the_cause_over_tcp() {
    every_cause(Engine::Tcp).await;
}

#[tokio::test]
async fn whoever_waits_is_told_why_whatever_the_cause_over_shm() {
    every_cause(Engine::Shm).await;
}

#[tokio::test]
async fn whoever_waits_is_told_why_whatever_the_cause_over_gpunetio() {
    every_cause(Engine::Gpunetio).await;
}
