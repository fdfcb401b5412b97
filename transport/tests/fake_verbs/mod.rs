//! Hosts with NICs of a provider that is in this process, and engines over them.
#![allow(dead_code)]

use std::sync::atomic::{AtomicU32, Ordering};

use crate::engine_conformance::Pair;
use crate::sysfs_tree::Tree;

use kvlane_transport::devices::{Sysfs, Wishes};
use kvlane_transport::emulated::verbs::{Device, Knobs};
use kvlane_transport::engine::Engine;
use kvlane_transport::engine::verbs::{VerbsConfig, VerbsEngine};

/// A host with some NICs of one port each.
pub struct Host {
    pub tree: Tree,
    pub names: Vec<String>,
    pub nics: Vec<Device>,
}

impl Host {
    pub fn new(count: usize) -> Self {
        Self::with(count, &Knobs::default())
    }
    /// Their GIDs are as in sysfs, unless they are given.
    pub fn with(count: usize, knobs: &Knobs) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let tree = Tree::new();
        let (mut names, mut nics) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let n = NUMBER.fetch_add(1, Ordering::Relaxed);
            let (name, [high, low]) = (format!("fake_{n}"), [n / 250, n % 250 + 1]);
            tree.nic(&name, None, 0).roce(&format!("eth{n}"), &format!("10.7.{high}.{low}"));
            let gid = mapped([10, 7, high as u8, low as u8]);
            let gids = vec![(2, gid, false, 0), (3, gid, true, 0)];
            nics.push(Device::new(&name, Knobs { gids, ..knobs.clone() }));
            names.push(name);
        }
        Self { tree, names, nics }
    }
    pub fn try_engine(&self, entries: u32) -> kvlane_proto::Result<Box<dyn Engine>> {
        let wishes = Wishes { nics: self.names.clone(), ..Wishes::default() };
        let config = VerbsConfig { wishes, entries, ..VerbsConfig::default() };
        let sysfs = Sysfs::new(self.tree.root());
        Ok(Box::new(VerbsEngine::by(&Device::verbs(), &sysfs, &config)?))
    }
    pub fn engine(&self, entries: u32) -> Box<dyn Engine> {
        self.try_engine(entries).unwrap()
    }
}

pub fn mapped([a, b, c, d]: [u8; 4]) -> [u8; 16] {
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, a, b, c, d]
}

/// Two hosts, and an engine on each.
pub struct Bed {
    pub from: Host,
    pub to: Host,
    pub p: Pair,
}

impl Bed {
    pub fn new(rails: usize) -> Self {
        let (from, to) = (Host::new(rails), Host::new(rails));
        let p = Pair::new((from.engine(64), to.engine(64)));
        Self { from, to, p }
    }
}
