//! The simulator's one-sided engine by itself, without machines: it is held to the rules of every
//! one-sided engine (`one_sided_rules`), so that what the machines prove here is about engines that
//! exist.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvlane_proto::grants::FenceHow;
use kvlane_proto::mutant::Mutant;
use kvlane_proto::plan::{Blocks, Plan, Share, Side, Span};
use kvlane_proto::{BlockList, GrantId, LaneId, LinkId, PartId, RoomId};

use crate::engines::Kind;
use crate::network::Session;
use crate::one_sided_rules::{Bed, Said, run};
use crate::pools::{Block, Ids, Memory, addresses, is_rows};
use crate::world::{DEvent, Ev, PEvent, SECOND, World};

/// One decode, one prefill, one session of queue pairs.
struct SimBed {
    world: World,
    grants: BTreeMap<u64, Granted>,
    said: Vec<Said>,
}

struct Granted {
    plans: [Arc<Plan>; 2],
    ids: Ids,
}

/// Long enough for all that happens by itself.
const SETTLED: u64 = 60 * SECOND;
/// A partition that does not end by itself.
const FOR_EVER: u64 = u64::MAX;

impl SimBed {
    /// A world that one seed draws, if it has the right shape.
    fn new(seed: u64) -> Option<Self> {
        let mut world = World::new(seed, Mutant::None, false);
        let fits = world.d.len() == 1
            && world.p.len() == 1
            && world.prof.calm
            && world.prof.lanes >= Self::LANES
            && world.hosts[0].pools.len() == 1
            && !is_rows(&world.hosts[0].pools[0])
            && world.hosts[0].pools[0].page_tokens == world.hosts[1].pools[0].page_tokens;
        if !fits {
            return None;
        }
        world.clear();
        world.prof.lanes = Self::LANES;
        let (d, p) = (0, 1);
        let session = Session {
            engine_open: [true; 2],
            lanes: vec![usize::MAX; usize::from(Self::LANES)],
            ..Session::new(d, 0, p, [0, 0], Kind::OneSided, [world.d[0].mem, world.p[0].mem], 1)
        };
        world.sessions.push(session);
        (0..Self::LANES).for_each(|lane| world.redial(0, lane));
        let mut bed = Self { world, grants: BTreeMap::new(), said: Vec::new() };
        bed.settle();
        let up = bed.said().iter().filter(|s| matches!(s, Said::Up { .. })).count();
        assert_eq!(up, 2 * usize::from(Self::LANES));
        Some(bed)
    }

    /// What an engine would say; all else goes on as in every run.
    fn hear(&mut self, ev: Ev) {
        let w = &mut self.world;
        match ev {
            Ev::Lane { side, lane, up, .. } => {
                let sender = side == 1;
                if up && sender {
                    let c = w.sessions[0].lanes[usize::from(lane)];
                    w.conns[c].known = true;
                }
                self.said.push(match up {
                    true => Said::Up { sender, lane },
                    false => Said::Down { sender, lane },
                });
            }
            Ev::Ack { conn, grant, part, ok } => {
                if w.conns[conn].alive[1] && ok {
                    self.said.push(Said::Acked { grant: grant.0, part: part.0 });
                }
            }
            Ev::Decode { ev, .. } => match *ev {
                DEvent::Arrived { grant, part, .. } => {
                    self.said.push(Said::Arrived { grant: grant.0, part: part.0 });
                }
                DEvent::Fenced { grant, .. } => self.said.push(Said::Fenced { grant: grant.0 }),
                other => panic!("{other:?}"),
            },
            Ev::Prefill { ev, .. } => match *ev {
                PEvent::Quiesced { grant, .. } => self.said.push(Said::Quiesced { grant: grant.0 }),
                other => panic!("{other:?}"),
            },
            // No machine has set one.
            Ev::Timer { .. } => {}
            other => w.dispatch(other),
        }
    }

    fn words_of(&self, side: usize, grant: u64, part: u32) -> Vec<u64> {
        let granted = &self.grants[&grant];
        let memory = &self.world.mems[self.world.sessions[0].mems[side]];
        let pages = granted.plans[side].pages(PartId(part)).unwrap();
        addresses(&pages).into_iter().map(|at| memory.read(at)).collect()
    }
}

impl Bed for SimBed {
    fn grant(&mut self) -> u64 {
        let n = self.grants.len() as u64 + 1;
        let (grant, room) = (GrantId(n), RoomId(n));
        let w = &mut self.world;
        let layouts = [0, 1].map(|host: usize| w.hosts[host].pools.clone());
        let tokens = Self::PARTS * layouts[0][0].page_tokens;
        let span = Span { tokens, prefix_tokens: 0 };
        // Parts as small as they get: a page each.
        let share = Arc::new(Share::between(&layouts[1], &layouts[0]).unwrap());
        let mut plan = |side: usize, of: Side| {
            let count = layouts[side][0].blocks_for(tokens) as usize;
            let mem = w.sessions[0].mems[side];
            let ids = w.mems[mem].take(&[count], room).unwrap();
            let pool = &mut w.mems[mem].0[0];
            for (prompt_block, &id) in (0..).zip(&ids[0]) {
                pool.blocks[id as usize] = Block::Lent { room, grant, seq: n as u32, prompt_block };
                let geometry = pool.geometry.clone();
                for (word, place) in geometry.words_of(id).filter(|_| side == 1) {
                    pool.words[word] = geometry.content(n as u32, prompt_block, place);
                }
            }
            let list = [BlockList::from_ids(&ids[0])];
            let maps = w.hosts[side].maps.clone();
            let blocks = Blocks::lent(&layouts[side], &maps, &span, &list).unwrap();
            let plan = Plan::new(share.clone(), of, &span, 1, blocks.into()).unwrap();
            (Arc::new(plan), ids)
        };
        let (to, ids) = plan(0, Side::Destination);
        let (from, _) = plan(1, Side::Source);
        assert!(to.grid().parts() >= Self::PARTS, "{:?}", to.grid());
        let lanes: Vec<_> = (0..Self::LANES).map(LaneId).collect();
        w.open_grant(0, room, grant, vec![(LinkId(0), lanes.clone(), to.clone())]);
        w.grant_at_sender(0, 0, grant, &lanes, to.clone());
        self.grants.insert(n, Granted { plans: [to, from], ids });
        n
    }
    fn post(&mut self, grant: u64, part: u32, lane: u16) {
        let pages = self.grants[&grant].plans[1].pages(PartId(part)).unwrap();
        self.world.put_on_wire(0, 0, GrantId(grant), PartId(part), LaneId(lane), &pages);
    }
    fn hold(&mut self) {
        self.world.cuts.push((1, 0, FOR_EVER));
    }
    fn release(&mut self) {
        self.world.cuts.clear();
    }
    fn lose(&mut self, lane: u16) {
        let c = self.world.sessions[0].lanes[usize::from(lane)];
        // It does not dial again, which would tell the receiver.
        self.world.sessions[0].engine_open[1] = false;
        self.world.end_of_conn(c, 1);
    }
    fn quiesce(&mut self, grant: u64) {
        self.world.quiesce(0, 0, GrantId(grant));
    }
    fn fence(&mut self, grant: u64, how: FenceHow) {
        self.world.fence(0, GrantId(grant), how);
    }
    fn settle(&mut self) {
        let until = self.world.now + SETTLED;
        while let Some(ev) = self.world.next_before(until) {
            self.hear(ev);
        }
    }
    fn said(&mut self) -> Vec<Said> {
        std::mem::take(&mut self.said)
    }
    fn is_filled(&self, grant: u64, part: u32) -> bool {
        self.words_of(0, grant, part) == self.words_of(1, grant, part)
    }
    fn reuse(&mut self, grant: u64) {
        let mem = self.world.sessions[0].mems[0];
        let memory: &mut Memory = &mut self.world.mems[mem];
        memory.give_back(&self.grants[&grant].ids);
    }
    fn is_spoilt(&self) -> bool {
        let mem = self.world.sessions[0].mems[0];
        self.world.violation.is_some()
            || self.world.mems[mem].0.iter().any(|pool| pool.broken_canary().is_some())
    }
}

#[test]
fn the_simulated_one_sided_engine_keeps_the_rules() {
    let seeds: Vec<u64> = (0..).filter(|&seed| SimBed::new(seed).is_some()).take(40).collect();
    for seed in seeds {
        run(|| SimBed::new(seed).unwrap());
    }
}
