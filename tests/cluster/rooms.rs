//! What may be wrong with a room and its legs, and what is said about it.

use kvlane_coordinator::HandoffOutcome;
use kvlane_proto::msg::service::WorkerAddress;
use kvlane_proto::{Blame, ErrorKind, Role, RoomId};
use serde_json::json;

use super::cluster::{Cluster, PAGES_PER_BLOCK, Router, Worker};
use super::legs::{Leg, Request, leg};
use super::process::{CAP, until, within};

const TOKENS: u32 = 800;
const PAGES: u64 = TOKENS as u64 / 16 * PAGES_PER_BLOCK;

struct Pair {
    _cluster: Cluster,
    router: Router,
    prefill: Worker,
    decode: Worker,
}

impl Pair {
    async fn start() -> Self {
        let cluster = Cluster::start().await;
        let router = cluster.router("r").await;
        let (prefill, decode) = tokio::join!(
            cluster.worker(Role::Prefill, "p", &[]),
            cluster.worker(Role::Decode, "d", &[]),
        );
        router.sees(&prefill).await;
        router.sees(&decode).await;
        Self { _cluster: cluster, router, prefill, decode }
    }
    fn address(&self, worker: &Worker) -> WorkerAddress {
        self.router.coordinator.snapshot().worker(&worker.identity).unwrap().address().clone()
    }
    /// A room that nobody reserves, with a number of the caller's choice.
    fn free(&self, room: u64) -> Request {
        Request {
            room,
            tokens: TOKENS,
            prefill: self.address(&self.prefill),
            decode: self.address(&self.decode),
            issuer: self.router.identity.clone(),
            deadline_ms: 30_000,
        }
    }
    async fn send_prefill(&self, r: &Request) -> Leg {
        Leg::send(&self.prefill.serving, r.prefill_leg()).await.unwrap()
    }
    /// A decode leg that has come shows at the prefill, too: as an offer.
    async fn send_decode(&self, r: &Request) -> Leg {
        Leg::send(&self.decode.serving, r.decode_leg()).await.unwrap()
    }
    async fn run_done(&self, r: &Request) {
        let p = self.send_prefill(r).await;
        self.send_decode(r).await.reply().await.unwrap().assert_done(PAGES);
        p.reply().await.unwrap().assert_done(0);
    }
}

#[tokio::test]
async fn room_numbers_have_63_bits_on_every_way() {
    let pair = Pair::start().await;
    // The second and the third are one number to whoever reads JSON numbers as doubles.
    for room in [i64::MAX as u64, (1 << 53) + 1, 1 << 53, 0] {
        pair.run_done(&pair.free(room)).await;
        // Used once: neither leg is taken again, and both say how it ended.
        let again = pair.free(room);
        for reply in [pair.send_prefill(&again).await, pair.send_decode(&again).await] {
            let reply = reply.reply().await.unwrap();
            reply.assert_failed(&[ErrorKind::RoomEnded]);
            assert!(reply.why().text.contains(&format!("room={room}, outcome=done")), "{reply:?}");
        }
    }
    let too_large = pair.free(1 << 63);
    for reply in [pair.send_prefill(&too_large).await, pair.send_decode(&too_large).await] {
        let reply = reply.reply().await.unwrap();
        reply.assert_failed(&[ErrorKind::Malformed]);
        let text = &reply.why().text;
        assert!(text.contains("2^63-1") && text.contains("room=9223372036854775808"), "{text}");
    }
    // Not integers, or not of 64 bits: no leg at all.
    for room in [json!(1.5), json!("7"), json!(-1), json!(1.8446744073709552e19)] {
        for (serving, mut sent) in [
            (&pair.prefill.serving, pair.free(1).prefill_leg()),
            (&pair.decode.serving, pair.free(1).decode_leg()),
        ] {
            sent["room"] = room.clone();
            leg(serving, sent).await.unwrap().assert_failed(&[ErrorKind::Malformed]);
        }
    }
    pair.router.assert_clean(&pair.prefill, &pair.decode).await;
}

#[tokio::test]
async fn either_leg_may_come_first_and_a_missing_one_is_named() {
    let pair = Pair::start().await;
    for n in 0..2 {
        let reserved = pair.router.reserve(&pair.prefill, &pair.decode, TOKENS).await;
        for r in [reserved, pair.free(100 + n)] {
            if n == 0 {
                let p = pair.send_prefill(&r).await;
                pair.prefill.holds(1).await;
                pair.send_decode(&r).await.reply().await.unwrap().assert_done(PAGES);
                p.reply().await.unwrap().assert_done(0);
            } else {
                let d = pair.send_decode(&r).await;
                pair.prefill.holds(1).await;
                pair.send_prefill(&r).await.reply().await.unwrap().assert_done(0);
                d.reply().await.unwrap().assert_done(PAGES);
            }
        }
    }
    // Nobody else comes.
    let alone = Request { deadline_ms: 1_000, ..pair.free(200) };
    let reply = pair.send_prefill(&alone).await.reply().await.unwrap();
    reply.assert_failed(&[ErrorKind::DeadlineExceeded]);
    assert_eq!(reply.why().blame, Blame::Decode, "{reply:?}");
    assert!(reply.why().text.contains("missing=decode's offer"), "{reply:?}");

    let alone = Request { deadline_ms: 1_000, ..pair.free(201) };
    let reply = pair.send_decode(&alone).await.reply().await.unwrap();
    reply.assert_failed(&[ErrorKind::DeadlineExceeded]);
    assert_eq!(reply.why().blame, Blame::Prefill, "{reply:?}");
    assert!(reply.why().text.contains("missing=prefill leg"), "{reply:?}");
    // The late leg hears how it ended.
    let late = pair.send_prefill(&alone).await.reply().await.unwrap();
    late.assert_failed(&[ErrorKind::DeadlineExceeded]);

    // A charged lane does not wait for ever, and the leg that did come is told.
    let r = pair.router.reserve(&pair.prefill, &pair.decode, TOKENS).await;
    let p = pair.send_prefill(&r).await;
    let outcome = pair.router.coordinator.await_outcome(RoomId(r.room), CAP).await;
    let HandoffOutcome::Failed { leg, refusal, .. } = outcome else { panic!("{outcome:?}") };
    assert_eq!((leg, refusal.kind), (Blame::Decode, ErrorKind::DeadlineExceeded), "{refusal}");
    assert!(refusal.text.contains("missing=decode leg"), "{refusal}");
    let reply = p.reply().await.unwrap();
    reply.assert_failed(&[ErrorKind::DeadlineExceeded]);
    assert_eq!(reply.why().blame, Blame::Decode, "{reply:?}");
    let late = pair.send_decode(&r).await.reply().await.unwrap();
    late.assert_failed(&[ErrorKind::RoomEnded]);
    pair.router.assert_clean(&pair.prefill, &pair.decode).await;
}

#[tokio::test]
async fn a_client_that_hangs_up_ends_both_legs_whenever_it_does() {
    let pair = Pair::start().await;
    // One leg waits for the other.
    for reserved in [true, false] {
        let next = async |room| match reserved {
            true => pair.router.reserve(&pair.prefill, &pair.decode, TOKENS).await,
            false => pair.free(room),
        };
        let r = next(1).await;
        let p = pair.send_prefill(&r).await;
        pair.prefill.holds(1).await;
        drop(p);
        pair.prefill.holds(0).await;
        let late = pair.send_decode(&r).await.reply().await.unwrap();
        late.assert_failed(&[ErrorKind::Aborted, ErrorKind::RoomEnded]);
        assert!(late.why().text.contains("hung up"), "{late:?}");

        let r = next(2).await;
        let d = pair.send_decode(&r).await;
        pair.prefill.holds(1).await;
        drop(d);
        let late = pair.send_prefill(&r).await.reply().await.unwrap();
        late.assert_failed(&[ErrorKind::Aborted]);
        assert!(late.why().text.contains("hung up"), "{late:?}");
        assert_eq!(late.why().blame, Blame::Decode, "{late:?}");
    }
    // Both run: at one moment or another.
    let mut aborted = [0, 0];
    for ms in [0, 1, 2, 4, 8, 16, 24, 32, 48, 64] {
        for (side, aborted) in aborted.iter_mut().enumerate() {
            let tokens = super::cluster::POOL_TOKENS;
            let r = pair.router.reserve(&pair.prefill, &pair.decode, tokens).await;
            let (p, d) = (pair.send_prefill(&r).await, pair.send_decode(&r).await);
            let (gone, stays) = if side == 0 { (p, d) } else { (d, p) };
            // Varies where it is hit; nothing waits for it.
            tokio::time::sleep(std::time::Duration::from_millis(ms)).await;
            drop(gone);
            let reply = stays.reply().await.unwrap();
            if !reply.is_done() {
                *aborted += 1;
                // Ended before the leg came, or after.
                reply.assert_failed(&[ErrorKind::Aborted, ErrorKind::RoomEnded]);
                assert!(reply.why().text.contains("hung up"), "{reply:?}");
                let blamed = [Blame::Prefill, Blame::Decode][side];
                let late = reply.why().kind == ErrorKind::RoomEnded;
                assert!(late || reply.why().blame == blamed, "{reply:?}");
            }
            let outcome = pair.router.coordinator.await_outcome(RoomId(r.room), CAP).await;
            let done = matches!(outcome, HandoffOutcome::Done { .. });
            assert_eq!(done, reply.is_done(), "{outcome:?} {reply:?}");
        }
    }
    assert!(aborted.iter().all(|&n| n > 0), "hit each side's rooms at least once: {aborted:?}");
    pair.router.assert_clean(&pair.prefill, &pair.decode).await;
}

#[tokio::test]
async fn a_second_leg_of_a_room_is_refused_and_the_first_goes_on() {
    let pair = Pair::start().await;
    let r = pair.router.reserve(&pair.prefill, &pair.decode, TOKENS).await;
    let d = pair.send_decode(&r).await;
    pair.prefill.holds(1).await;
    let again = pair.send_decode(&r).await.reply().await.unwrap();
    again.assert_failed(&[ErrorKind::DuplicateRoom]);
    pair.send_prefill(&r).await.reply().await.unwrap().assert_done(0);
    d.reply().await.unwrap().assert_done(PAGES);

    let r = pair.free(7);
    let p = pair.send_prefill(&r).await;
    pair.prefill.holds(1).await;
    let again = pair.send_prefill(&r).await.reply().await.unwrap();
    again.assert_failed(&[ErrorKind::DuplicateRoom]);
    pair.send_decode(&r).await.reply().await.unwrap().assert_done(PAGES);
    p.reply().await.unwrap().assert_done(0);
    pair.router.assert_clean(&pair.prefill, &pair.decode).await;
}

#[tokio::test]
async fn prompts_of_different_lengths_are_refused_with_both() {
    let pair = Pair::start().await;
    for prefill_first in [true, false] {
        let r = pair.router.reserve(&pair.prefill, &pair.decode, TOKENS).await;
        let longer = Request { tokens: TOKENS + 16, ..r.clone() };
        let (p, d);
        if prefill_first {
            p = pair.send_prefill(&longer).await;
            pair.prefill.holds(1).await;
            d = pair.send_decode(&r).await;
        } else {
            d = pair.send_decode(&r).await;
            // The prefill has the offer.
            pair.prefill.holds(1).await;
            p = pair.send_prefill(&longer).await;
        }
        // Whoever comes second is refused; then the router, which knows, gives the room up.
        let (second, first) = if prefill_first { (d, p) } else { (p, d) };
        let refused = second.reply().await.unwrap();
        refused.assert_failed(&[ErrorKind::InvalidPlan]);
        let text = &refused.why().text;
        assert!(text.contains("prefill_tokens=816, decode_tokens=800"), "{text}");
        pair.router.coordinator.abort_room(RoomId(r.room), "a leg was refused");
        first.reply().await.unwrap().assert_failed(&[ErrorKind::InvalidPlan, ErrorKind::Aborted]);
        pair.prefill.holds(0).await;
    }
    pair.router.assert_clean(&pair.prefill, &pair.decode).await;
}

#[tokio::test]
async fn a_pair_of_different_layouts_is_refused_with_the_field_and_both_values() {
    let cluster = Cluster::start().await;
    let router = cluster.router("r").await;
    let (prefill, decode) = tokio::join!(
        cluster.worker(Role::Prefill, "p", &["--page-tokens", "24"]),
        cluster.worker(Role::Decode, "d", &[]),
    );
    router.sees(&prefill).await;
    router.sees(&decode).await;
    let asked = router.coordinator.reserve(Router::request(&prefill, &decode, TOKENS));
    let e = within("a reservation", asked).await.unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Incompatible, "{e}");
    assert!(e.to_string().contains("page_tokens: decode 16 / prefill 24"), "{e}");
    // Nor between themselves.
    let pair = Pair { _cluster: cluster, router, prefill, decode };
    let r = Request { deadline_ms: 5_000, ..pair.free(1) };
    let reply = pair.send_decode(&r).await.reply().await.unwrap();
    reply.assert_failed(&[ErrorKind::Incompatible]);
    assert!(reply.why().text.contains("page_tokens: decode 16 / prefill 24"), "{reply:?}");
    until("the prefill says so too", || {
        pair.prefill.process.log().contains("page_tokens: decode 16 / prefill 24").then_some(())
    })
    .await;
}
