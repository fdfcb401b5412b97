//! Emulated NICs that are threads of the test, and engines over them.

use kvlane_proto::{GrantId, PartId};
use kvlane_transport::emulated::Config;
use kvlane_transport::emulated::client::Hca;
use kvlane_transport::emulated::faults::{Fault, Target, What};
use kvlane_transport::emulated::serve::{ThreadNic, spawn_thread};
use kvlane_transport::engine::gpunetio::{GpunetioConfig, GpunetioEngine};
use kvlane_transport::engine::{Command, Engine, EngineEvent, FenceHow};

use super::{Pair, one_sided};

pub struct Nics(pub Vec<ThreadNic>);

impl Nics {
    pub fn new(count: usize) -> Self {
        Self::with(count, |_| {})
    }
    /// NICs that wait for each other as long as a test may take.
    pub fn patient(count: usize) -> Self {
        Self::with(count, |config| config.ack_timeout = 2 * super::PATIENCE)
    }
    fn with(count: usize, change: impl Fn(&mut Config)) -> Self {
        let one = |n| {
            let mut config = Config::new(&format!("emulated{n}"));
            change(&mut config);
            spawn_thread(config).unwrap()
        };
        Self((0..count).map(one).collect())
    }
    pub fn engine(&self, entries: u32) -> Box<dyn Engine> {
        self.engine_on(&(0..self.0.len()).collect::<Vec<_>>(), entries)
    }
    /// An engine on some of them.
    pub fn engine_on(&self, nics: &[usize], entries: u32) -> Box<dyn Engine> {
        let names = nics.iter().map(|&n| self.0[n].socket().clone()).collect();
        let config = GpunetioConfig { entries, ..GpunetioConfig::new(names) };
        Box::new(GpunetioEngine::new(config).unwrap())
    }
    pub fn couple(&self, entries: u32) -> (Box<dyn Engine>, Box<dyn Engine>) {
        (self.engine(entries), self.engine(entries))
    }
    pub fn pair(&self, entries: u32) -> Pair {
        Pair::new(self.couple(entries))
    }
    /// Somebody who makes faults and looks at counters.
    pub fn control(&self, nic: usize) -> Hca {
        Hca::open(self.0[nic].socket()).unwrap()
    }
}

/// A fault of everybody's.
pub fn all(what: What) -> Fault {
    Fault::new(what, Target::All)
}

pub fn said(events: &[EngineEvent], want: impl Fn(&EngineEvent) -> bool) -> usize {
    events.iter().filter(|e| want(e)).count()
}
pub fn arrived(p: &Pair, grant: u64) -> Vec<u32> {
    let part = |e: &EngineEvent| match e {
        EngineEvent::Arrived { grant: g, part: PartId(part), .. } if g.0 == grant => Some(*part),
        _ => None,
    };
    p.from_rx.iter().filter_map(part).collect()
}
pub fn fenced(p: &Pair, grant: u64) -> bool {
    said(&p.from_rx, |e| matches!(e, EngineEvent::Fenced(f) if f.grant().0 == grant)) > 0
}
/// The words of the lanes that went down.
pub fn whys(events: &[EngineEvent]) -> Vec<String> {
    let why = |e: &EngineEvent| match e {
        EngineEvent::LaneDown { why, .. } => Some(why.to_string()),
        _ => None,
    };
    events.iter().filter_map(why).collect()
}
/// Without anybody's help.
pub fn revoke(p: &mut Pair, grant: u64) {
    p.tell_rx(Command::Fence { grant: GrantId(grant), how: FenceHow::Revoke });
    one_sided::alone(p, grant);
}
/// The sender's word, then the receiver's own.
pub fn finish(p: &mut Pair, grant: u64) {
    p.tell_tx(Command::Quiesce { link: super::LINK, grant: GrantId(grant) });
    p.until("quiesced", |p| one_sided::quiesced(&p.from_tx, grant));
    p.fence(grant, FenceHow::Close);
}
