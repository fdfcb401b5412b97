//! Two engines as a bed for the rules of one-sided ones.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::engine_conformance::{CANARY, LINK, Pair, Pool, layout};
use crate::one_sided_rules::{Bed, Said};

use kvlane_proto::layout::KvKind;
use kvlane_proto::{GrantId, LaneId, PartId, Plan};
use kvlane_transport::engine::{Command, EngineEvent, FenceHow};

const PAGE_BYTES: usize = 4096;
const BLOCKS: u32 = 32;
/// With nothing moving for so long, nothing will: longer than any wait of the engines.
const QUIET: Duration = Duration::from_millis(150);
/// And for so many turns of both, as this thread may have stood still all that time.
const QUIET_TURNS: u32 = 200;

/// What holds back what is on the wire, and lets it go on.
pub type Hold = Box<dyn FnMut(bool)>;

pub struct EngineBed {
    pair: Pair,
    hold: Hold,
    /// The receiver does not hear the sender.
    muted: bool,
    pools: [Pool; 2],
    /// Source and destination.
    grants: Vec<[Arc<Plan>; 2]>,
    reused: Vec<u64>,
}

impl EngineBed {
    pub fn new(mut pair: Pair, hold: Hold) -> Self {
        let layout = layout(PAGE_BYTES as u32, 1, KvKind::Mla);
        let pools = [Pool::new(&layout, BLOCKS), Pool::new(&layout, BLOCKS)];
        for block in 0..u64::from(BLOCKS) {
            let at = pools[0].region.address() + block * PAGE_BYTES as u64;
            pools[0].write(at, &[block as u8 + 1; PAGE_BYTES]);
        }
        pools[1].fill(CANARY);
        pair.tx.register(&pools[0].region).unwrap();
        pair.rx.register(&pools[1].region).unwrap();
        pair.connect(Self::LANES);
        Self { pair, hold, muted: false, pools, grants: Vec::new(), reused: Vec::new() }
    }
    fn plans(&self, grant: u64) -> &[Arc<Plan>; 2] {
        &self.grants[grant as usize - 1]
    }
    fn page(&self, side: usize, grant: u64, part: u32) -> u64 {
        let pages = self.plans(grant)[side].pages(PartId(part)).unwrap();
        pages.iter().next().unwrap().address
    }
    fn bytes(&self, side: usize, grant: u64, part: u32) -> Vec<u8> {
        self.pools[side].read(self.page(side, grant, part), PAGE_BYTES)
    }
}

impl Bed for EngineBed {
    fn grant(&mut self) -> u64 {
        let first = self.grants.len() as u32 * Self::PARTS;
        let ids: Vec<u32> = (first..first + Self::PARTS).collect();
        // Apart from each other, so that a part is a page of its own wherever it lands.
        let back: Vec<u32> = ids.iter().rev().copied().collect();
        let from = self.pools[0].source(&ids, PAGE_BYTES as u64);
        let to = self.pools[1].plan(&back, PAGE_BYTES as u64);
        assert_eq!(to.grid().parts(), Self::PARTS);
        let lanes: Vec<u16> = (0..Self::LANES).collect();
        self.grants.push([from, to.clone()]);
        let grant = self.grants.len() as u64;
        self.pair.open_on(grant, &lanes, &to);
        grant
    }
    fn post(&mut self, grant: u64, part: u32, lane: u16) {
        let from = self.plans(grant)[0].clone();
        self.pair.post(grant, part, lane, &from);
    }
    fn hold(&mut self) {
        (self.hold)(true);
    }
    fn release(&mut self) {
        (self.hold)(false);
    }
    fn lose(&mut self, lane: u16) {
        self.muted = true;
        self.pair.tell_tx(Command::ResetLane { link: LINK, lane: LaneId(lane) });
    }
    fn quiesce(&mut self, grant: u64) {
        self.pair.tell_tx(Command::Quiesce { link: LINK, grant: GrantId(grant) });
    }
    fn fence(&mut self, grant: u64, how: FenceHow) {
        self.pair.tell_rx(Command::Fence { grant: GrantId(grant), how });
    }
    fn settle(&mut self) {
        let (mut last, mut turns) = (Instant::now(), 0);
        while last.elapsed() < QUIET || turns < QUIET_TURNS {
            let mut moved = self.pair.poll_tx();
            if self.muted {
                self.pair.to_rx.clear();
            }
            moved |= self.pair.poll_rx();
            turns += 1;
            if moved {
                (last, turns) = (Instant::now(), 0);
            }
            std::thread::yield_now();
        }
    }
    fn said(&mut self) -> Vec<Said> {
        let (tx, rx) = (&mut self.pair.from_tx, &mut self.pair.from_rx);
        let of = |events: &mut Vec<EngineEvent>, sender: bool| -> Vec<Said> {
            let said = events.drain(..).filter_map(|event| match event {
                EngineEvent::Arrived { grant, part, .. } => {
                    Some(Said::Arrived { grant: grant.0, part: part.0 })
                }
                EngineEvent::Acked { grant, part, .. } => {
                    Some(Said::Acked { grant: grant.0, part: part.0 })
                }
                EngineEvent::LaneUp { lane, .. } => Some(Said::Up { sender, lane: lane.0 }),
                EngineEvent::LaneDown { lane, .. } => Some(Said::Down { sender, lane: lane.0 }),
                EngineEvent::Quiesced(q) => Some(Said::Quiesced { grant: q.grant().0 }),
                EngineEvent::Fenced(f) => Some(Said::Fenced { grant: f.grant().0 }),
                // Refusals of posts, and what concerns no room.
                _ => None,
            });
            said.collect()
        };
        [of(tx, true), of(rx, false)].concat()
    }
    fn is_filled(&self, grant: u64, part: u32) -> bool {
        self.bytes(0, grant, part) == self.bytes(1, grant, part)
    }
    fn reuse(&mut self, grant: u64) {
        for part in 0..Self::PARTS {
            self.pools[1].write(self.page(1, grant, part), &[CANARY; PAGE_BYTES]);
        }
        self.reused.push(grant);
    }
    fn is_spoilt(&self) -> bool {
        let all = |grant: u64| (0..Self::PARTS).map(move |part| (grant, part));
        let mut pages = self.reused.iter().copied().flat_map(all);
        pages.any(|(grant, part)| self.bytes(1, grant, part) != [CANARY; PAGE_BYTES])
    }
}
