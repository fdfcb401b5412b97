//! Two workers whose pages are written by the sender's NICs: the lanes are made by what the engines
//! tell each other over the link, and what a lost connection left behind lands late.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use kvlane_actors::{
    AttachRequest, ChunkRequest, DecodeHandle, DecodeWorker, EngineChoice, LendRequest, Pools,
    PrefillHandle, PrefillWorker, Ready, Takers, WorkerConfig,
};
use kvlane_proto::layout::{Coordinates, Dtype, KvKind, Order};
use kvlane_proto::{BlockList, ErrorKind, Identity, Layout, Outcome, Role, RoomId, Span};
use kvlane_transport::emulated::Config;
use kvlane_transport::emulated::client::Hca;
use kvlane_transport::emulated::faults::{Fault, Target, What};
use kvlane_transport::emulated::serve::{ThreadNic, spawn_thread};
use kvlane_transport::emulated::stats::Stats;
use kvlane_transport::engine::gpunetio::GpunetioConfig;
use kvlane_transport::memory::Region;
use kvlane_transport::quic::Security;

const RAILS: u16 = 2;
const BLOCKS: u32 = 64;
const PER_ROOM: u32 = 4;
const AT_ONCE: u64 = 3;
const DEADLINE: Duration = Duration::from_secs(30);
/// How late what is on a wire arrives, where a test delays it.
const LATE: Duration = Duration::from_millis(3);
const CANARY: u8 = 0xc5;
/// What completions of a queue pair in error say: they were not executed.
const FLUSHED: u8 = 0x05;
/// The other side did not answer in time.
const RETRIES_EXCEEDED: u8 = 0x15;

fn layout() -> Layout {
    Layout {
        model: "test".into(),
        layers: 8,
        first_layer: 0,
        kv_heads: 2,
        kv_heads_total: 2,
        head_dim: 8,
        dtype: Dtype::Bf16,
        page_tokens: 16,
        window_tokens: 0,
        order: Order::Hnd,
        kind: KvKind::Split,
        at: Coordinates::SINGLE,
    }
}

/// The NICs of both workers, one for each rail.
struct Nics {
    nics: Vec<ThreadNic>,
    controls: Vec<Hca>,
}

impl Nics {
    fn new() -> Self {
        let one = |n| spawn_thread(Config::new(&format!("emulated{n}"))).unwrap();
        let nics: Vec<_> = (0..RAILS).map(one).collect();
        let controls = nics.iter().map(|nic| Hca::open(nic.socket()).unwrap()).collect();
        Self { nics, controls }
    }
    fn config(&self, role: Role) -> (WorkerConfig, Pools) {
        let identity = Identity::new("test", role, "w", 0).unwrap();
        let pools = Pools::own_for_nics(vec![(layout(), BLOCKS)]).unwrap();
        let names = self.nics.iter().map(|nic| nic.socket().clone()).collect();
        let engine = EngineChoice::Gpunetio(GpunetioConfig::new(names));
        let mut config = WorkerConfig::new(identity, Security::Insecure, pools.clone(), engine);
        config.part_bytes = 4096;
        config.lanes_per_link = 4 * RAILS;
        config.lanes_per_room = RAILS;
        (config, pools)
    }
    /// On every NIC, to everybody; their numbers.
    fn fault(&mut self, what: What, skip: u64) -> Vec<u64> {
        let fault = Fault::new(what, Target::All).skip(skip);
        self.controls.iter_mut().map(|control| control.fault(&fault).unwrap()).collect()
    }
    fn clear(&mut self, faults: &[u64]) {
        for (control, fault) in self.controls.iter_mut().zip(faults) {
            control.clear(*fault).unwrap();
        }
    }
    fn stats(&mut self) -> Vec<Stats> {
        self.controls.iter_mut().map(|control| control.stats().unwrap()).collect()
    }
}

/// Fills, or reads, some blocks of a pool.
fn pages(pools: &Pools, ids: &[u32], mut each: impl FnMut(&Region, u64, u64)) {
    let (map, page) = (&pools.maps[0], u64::from(layout().page_bytes()));
    for slab in &map.slab_address {
        for id in ids {
            let address = slab + u64::from(*id) * map.block_stride_bytes;
            each(&pools.regions[0], address - pools.regions[0].address(), page);
        }
    }
}

/// One room of random blocks; whether it was done. It may be given up when it has begun.
async fn hand_over(
    n: u64,
    give_up: bool,
    (prefill, decode): (&PrefillHandle, &DecodeHandle),
    (from, to): (&Pools, &Pools),
) -> bool {
    let (source, destination): (Vec<u32>, Vec<u32>) = (0..PER_ROOM)
        .map(|i| {
            let at = (n as u32 % (BLOCKS / PER_ROOM)) * PER_ROOM + i;
            (at, (at * 7 + 3) % BLOCKS)
        })
        .unzip();
    let fill = (n % 100) as u8 + 1;
    pages(from, &source, |r, at, bytes| r.memory().fill(at, bytes, fill).unwrap());
    let tokens = PER_ROOM * 16;
    let (room, span) = (RoomId(n), Span { tokens, prefix_tokens: 0 });
    let blocks = vec![BlockList::from_ids(&destination)];
    let prefills = vec![prefill.address().clone()];
    let request = LendRequest { room, span, blocks, prefills, deadline: DEADLINE };
    let filling = decode.lend(request).await.unwrap();
    let takers = Takers::Named(vec![decode.address().key.identity.clone()]);
    let attach = AttachRequest { room, tokens, takers, issuer: None, deadline: DEADLINE };
    if let Ok(sending) = prefill.attach(attach).await {
        let blocks = BlockList::from_ids(&source);
        let chunk =
            ChunkRequest { pool: 0, tokens: 0..tokens, layers: 0..8, blocks, ready: Ready::Now };
        // It may have ended already.
        let _ = sending.send(chunk).await;
        if give_up {
            tokio::time::sleep(2 * LATE).await;
            decode.abort(room, "nothing comes").await.unwrap();
        }
        sending.released().await.unwrap();
    }
    let ending = filling.ended().await.unwrap();
    let done = match &ending.outcome {
        Outcome::Done { .. } => true,
        outcome => {
            let why = outcome.why().unwrap();
            let want = if give_up { ErrorKind::Aborted } else { ErrorKind::NoPath };
            assert_eq!(why.kind, want, "room {n}: {why}");
            false
        }
    };
    ending.into_blocks().await.unwrap();
    // From here on nothing lands: every byte is the sender's, and then the canary's for ever.
    pages(to, &destination, |r, at, bytes| {
        let mut found = vec![0; bytes as usize];
        r.memory().read_at(at, &mut found).unwrap();
        assert!(!done || found.iter().all(|&b| b == fill), "room {n} at {at}: {found:?}");
        r.memory().fill(at, bytes, CANARY).unwrap();
    });
    done
}

/// What happens to some rooms that run at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Weather {
    Fair,
    /// Each NIC makes a connection fail, at about the so manieth entry.
    Lossy(u64),
    /// Nothing arrives for a while.
    Down,
    /// What is sent stays on the wire until the rooms, which are given up, have ended.
    Held,
}

/// How many of the rooms were done.
async fn run(nics: &mut Nics, rooms: u64, weather: impl Fn(u64) -> Weather) -> u64 {
    let ((p_config, from), (d_config, to)) =
        (nics.config(Role::Prefill), nics.config(Role::Decode));
    to.regions[0].memory().fill(0, to.regions[0].bytes(), CANARY).unwrap();
    let prefill = PrefillWorker::start(p_config).unwrap();
    let decode = DecodeWorker::start(d_config).unwrap();
    let mut done = 0;
    for few in 0..rooms / AT_ONCE {
        let weather = weather(few);
        let faults = match weather {
            Weather::Fair => Vec::new(),
            Weather::Lossy(skip) => {
                nics.fault(What::Nak { syndrome: RETRIES_EXCEEDED, vendor: 0 }, skip)
            }
            Weather::Down => nics.fault(What::LinkDown, 0),
            Weather::Held => nics.fault(What::HoldWire, 0),
        };
        let give_up = weather == Weather::Held;
        let each = (few * AT_ONCE..(few + 1) * AT_ONCE).map(|n| {
            let (prefill, decode) = (prefill.clone(), decode.clone());
            let (from, to) = (from.clone(), to.clone());
            let room =
                async move { hand_over(n, give_up, (&prefill, &decode), (&from, &to)).await };
            tokio::spawn(room)
        });
        let each = each.collect::<Vec<_>>();
        if weather == Weather::Down {
            tokio::time::sleep(2 * LATE).await;
            nics.clear(&faults);
        }
        for room in each {
            done += u64::from(room.await.unwrap());
        }
        if give_up {
            nics.clear(&faults);
        }
    }
    tokio::time::sleep(4 * LATE).await;
    let mut all = vec![0; to.regions[0].bytes() as usize];
    to.regions[0].memory().read_at(0, &mut all).unwrap();
    assert!(all.iter().all(|&b| b == CANARY), "something landed in blocks that were back");
    decode.stop().await;
    prefill.stop().await;
    done
}

#[tokio::test(flavor = "multi_thread")]
async fn rooms_come_over_nics_of_both_rails() {
    let mut nics = Nics::new();
    assert_eq!(run(&mut nics, 30, |_| Weather::Fair).await, 30);
    for stats in nics.stats() {
        assert!(stats.immediates > 0, "it carried nothing: {stats:?}");
        assert!(stats.syndromes.keys().all(|&s| s == FLUSHED), "{stats:?}");
        assert_eq!((stats.refusals, stats.landed_after_error), (0, 0), "{stats:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_connections_cost_no_bytes_and_what_they_left_never_lands_in_reused_blocks() {
    let mut nics = Nics::new();
    nics.fault(What::Delay { us: LATE.as_micros() as u64 }, 0);
    let weather = |few: u64| match few % 5 {
        3 => Weather::Held,
        4 => Weather::Down,
        _ => Weather::Lossy(3 + few % 7),
    };
    let done = run(&mut nics, 150, weather).await;
    let stats = nics.stats();
    let sum = |count: fn(&Stats) -> u64| stats.iter().map(count).sum::<u64>();
    let lost = sum(|s| s.syndrome(RETRIES_EXCEEDED));
    let stopped = sum(|s| s.dropped_no_pair + s.dropped_not_ready);
    assert!(done > 50, "{done} rooms were done");
    assert!(lost > 20, "{lost} connections were lost");
    assert!(sum(|s| s.dropped_link_down) > 0, "a link was down");
    assert!(stopped > 20, "a fence has stopped {stopped} late writes");
}
