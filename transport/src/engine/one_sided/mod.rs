//! The engine of a sender's NIC that writes pages into the receiver's memory: nobody there runs code
//! for it. `gpunetio` and `verbs` are this engine over other NICs ([`nic`]).
//!
//! Owns: the NICs (one is one rail); for each link a protection domain a NIC and a queue pair a lane;
//! at a receiver the open grants. In: [`Command`]s, the peer's messages, completions. Out:
//! [`EngineEvent`]s.
//!
//! A lane's queue pair comes up in three messages over the link, the first time and every time after:
//! the sender's `Pair`, the receiver's `Paired` (with the keys of its memory, which nobody else is
//! told), the sender's `Up` ([`wire`]). Each carries the sender's count of the lane's queue pairs, the
//! epoch, so that a late message configures or breaks nothing newer. Either side says `Broken` and
//! takes its end down; a queue pair that saw an error is destroyed and never used again.
//!
//! Invariants:
//! 1. A grant is bound to the queue pairs that its lanes have when it is opened ([`Command::Open`]) or
//!    given ([`Command::Grant`]), and to no later ones: those may be lent to another grant. A post
//!    on any other is refused.
//! 2. A [`Quiesced`] comes when every entry posted for its grant has completed, or its queue pair is
//!    flushed and destroyed (after [`EngineEvent::LaneDown`]); never while a NIC that was lost may still
//!    read the source.
//! 3. A proof by [`FenceHow::Revoke`] comes when every queue pair of the grant is flushed and
//!    destroyed ([`pair`]); by [`FenceHow::Close`], when what the sender's NIC completed has been
//!    taken from the rings. If a NIC is lost before, there is none.
//! 4. What a NIC may still read or write (pages, rings, doorbells, the words of credit) is kept until
//!    the NIC has said that it does not: for ever, if it is lost.
//! 5. Whatever a peer says or writes is checked: a lie costs its lane.
//!
//! A NIC is asked, and its answer waited for, on the engine's thread: one that hangs stops the engine,
//! its other NICs and links included, as long as the NIC's driver waits; then it is lost, and asked no
//! more.

mod ends;
mod grants;
#[doc(hidden)]
pub mod keys;
mod link;
pub mod nic;
mod pair;
#[doc(hidden)]
pub mod post;
mod rail;
mod receiver;
mod sender;
#[doc(hidden)]
pub mod wire;

use std::collections::BTreeMap;
use std::sync::Arc;

use kvlane_proto::{DataPath, Device, Error, ErrorKind, LinkId, Result, Time};

use self::ends::Quiescing;
use self::grants::Grants;
use self::link::{Hands, Link, Side};
use self::nic::Nic;
use self::pair::Leaving;
use self::rail::Rail;
use self::wire::{Message, RAILS_MAX, REGIONS_MAX};
use super::redial::Jitter;
use super::refusals::nacked;
use super::{Caps, Command, Engine, EngineEvent, Interest};
use crate::clock::now;
use crate::memory::{Region, Registry};
use crate::mlx5::SENDS_MAX;
use crate::random::random;

/// Entries of a sender's ring unless the configuration says otherwise: what the parts that a lane may
/// have in flight need with pages of 4 KiB.
pub const ENTRIES: u32 = 2048;
/// Fewest entries of a sender's ring.
pub const ENTRIES_MIN: u32 = 16;
/// Immediates that a sender may have under way.
const CREDIT: u32 = 32;
/// Receives that there is room for: those of the credit, and the one that marks the end.
const RECEIVES: u32 = 2 * CREDIT;
/// How often lanes that nothing is expected of are looked at, and NICs asked whether they live.
const LOOK_ROUND_NS: u64 = 100_000;
/// How long an engine that ends waits for its NICs.
const LAST_FLUSH_MS: u64 = 1_000;

fn tell(events: &mut Vec<EngineEvent>, link: LinkId, message: &Message) {
    events.push(EngineEvent::Tell { link, message: message.encode() });
}

/// The engine; see the module.
pub struct OneSided<N: Nic> {
    hands: Hands<N>,
    registry: Registry,
    regions: Vec<Arc<Region>>,
    links: BTreeMap<LinkId, Link<N::Pair>>,
    grants: Grants,
    quiescing: Vec<Quiescing>,
    look_round_at: Time,
    /// It slept, so anything may have happened.
    slept: bool,
    /// Events of commands, until the next poll.
    outbox: Vec<EngineEvent>,
}

impl<N: Nic> OneSided<N> {
    /// Over NICs that are open, one for each rail; links come with [`Command::Listen`].
    ///
    /// # Errors
    /// [`ErrorKind::Config`] naming the setting or the NIC.
    pub fn over(nics: Vec<N>, entries: u32) -> Result<Self> {
        let refused =
            |why: &str| Error::new(ErrorKind::Config, format!("{} engine: {why}", N::ENGINE));
        if nics.is_empty() || nics.len() > RAILS_MAX {
            return Err(refused("number of NICs is out of range")
                .with("found", nics.len())
                .with("limit", RAILS_MAX)
                .hint("name one NIC for each rail"));
        }
        if !entries.is_power_of_two() || !(ENTRIES_MIN..=SENDS_MAX).contains(&entries) {
            return Err(refused("entries of a ring must be a power of two within limits")
                .with("found", entries)
                .with("limits", format!("{ENTRIES_MIN}..={SENDS_MAX}")));
        }
        let mut rails: Vec<Rail<N>> = Vec::new();
        for nic in nics {
            if let Some(same) = rails.iter().find(|r| r.hca.about().guid == nic.about().guid) {
                return Err(nic
                    .named(refused("a NIC is named twice"))
                    .with("other", &same.hca.about().name)
                    .with("guid", format!("{:#x}", nic.about().guid))
                    .hint("name each NIC once"));
            }
            rails.push(Rail::new(nic));
        }
        Ok(Self {
            hands: Hands {
                entries,
                rails,
                jitter: Jitter::new(random()),
                serial: 0,
                ended: Vec::new(),
            },
            registry: Registry::new(&[Device::Host]),
            regions: Vec::new(),
            links: BTreeMap::new(),
            grants: Grants::default(),
            quiescing: Vec::new(),
            look_round_at: Time(0),
            slept: true,
            outbox: Vec::new(),
        })
    }
}

impl<N: Nic> Engine for OneSided<N> {
    fn caps(&self) -> Caps {
        let rails = self.hands.rails.len() as u16;
        Caps { name: N::ENGINE, path: DataPath::OneSided, emulated: N::IS_EMULATED, rails }
    }

    fn register(&mut self, region: &Arc<Region>) -> Result<()> {
        if self.regions.len() >= REGIONS_MAX {
            return Err(Error::new(ErrorKind::LimitExceeded, "too many regions")
                .with("asked", region)
                .with("limit", REGIONS_MAX)
                .hint("make fewer and larger pools"));
        }
        self.registry.register(region)?;
        let Self { links, hands, .. } = self;
        let mut refused = None;
        for link in links.values_mut() {
            for (access, rail) in link.access.iter_mut().zip(hands.rails.iter_mut()) {
                let Some(access) = access else { continue };
                if let Err(e) = access.add(&mut rail.hca, region)
                    && !rail.hca.is_lost()
                {
                    refused = Some(e);
                }
            }
        }
        if let Some(e) = refused {
            self.forget(region)?;
            self.registry.unregister(region, None)?;
            return Err(e);
        }
        self.regions.push(region.clone());
        self.tell_regions();
        Ok(())
    }

    fn unregister(&mut self, region: &Arc<Region>) -> Result<()> {
        let user = self.user_of(region);
        self.registry.unregister(region, user)?;
        self.regions.retain(|known| !Arc::ptr_eq(known, region));
        let forgotten = self.forget(region);
        self.tell_regions();
        forgotten
    }

    fn command(&mut self, now: Time, command: Command) {
        let trouble = match command {
            Command::Listen { link, peer, lanes, receiver } => {
                let blob = self.listen(link, peer, lanes, receiver);
                self.outbox.push(EngineEvent::Local { link, blob });
                Ok(())
            }
            Command::Connect { link, remote } => {
                if let Err(e) = self.connect(now, link, &remote) {
                    self.outbox.push(EngineEvent::Local { link, blob: Err(e) });
                }
                Ok(())
            }
            Command::Told { link, message } => self.told(now, link, &message),
            Command::Close { link } => {
                self.close(now, link);
                Ok(())
            }
            Command::Open(grant) => self.open(grant),
            Command::Fence { grant, how } => {
                self.fence(grant, how);
                Ok(())
            }
            Command::Grant(grant) => self.grant(grant),
            Command::Post(post) => {
                if let Err(e) = self.post(&post) {
                    self.outbox.push(nacked(&post, &e));
                }
                Ok(())
            }
            Command::ResetLane { link, lane } => self.reset(now, link, lane),
            Command::Quiesce { link, grant } => {
                self.quiesce(now, link, grant);
                Ok(())
            }
        };
        if let Err(e) = trouble {
            self.outbox.push(EngineEvent::Trouble(e));
        }
    }

    fn poll(&mut self, now: Time, events: &mut Vec<EngineEvent>) -> bool {
        let mut moved = !self.outbox.is_empty();
        events.append(&mut self.outbox);
        let all = std::mem::take(&mut self.slept) || now >= self.look_round_at;
        if all {
            self.look_round_at = Time(now.0.saturating_add(LOOK_ROUND_NS));
            self.hands.rails.iter_mut().filter(|r| !r.mourned).for_each(|rail| rail.hca.drain());
        }
        moved |= self.mourn(now, events);
        moved |= self.lanes(now, all, events);
        moved |= self.fences(now, events);
        moved |= self.quiesces(now, events);
        self.bury();
        moved
    }

    fn park(&mut self, interests: &mut Vec<Interest>) -> Option<Time> {
        self.slept = true;
        let mut until = None;
        let mut by = |t: Option<Time>| until = [until, t].into_iter().flatten().min();
        if !self.outbox.is_empty() {
            by(Some(Time(0)));
        }
        for rail in self.hands.rails.iter().filter(|rail| !rail.mourned) {
            let fds = rail.hca.events().into_iter().flatten();
            interests.extend(fds.map(|fd| Interest { fd, read: true, write: false }));
            if rail.hca.is_lost() {
                by(Some(Time(0)));
            }
        }
        let now = now();
        for link in self.links.values_mut() {
            match &mut link.side {
                Side::Sender { lanes, .. } => {
                    lanes.iter_mut().for_each(|lane| by(lane.park(now, link.over)));
                }
                Side::Receiver { lanes } => lanes.iter_mut().for_each(|lane| by(lane.park())),
            }
        }
        by(self.quiescing.iter().map(|q| q.deadline()).filter(|&deadline| deadline > now).min());
        until
    }
}

impl<N: Nic> Drop for OneSided<N> {
    /// Takes every queue pair down, so that nothing lands any more when it is over. Of a NIC that hangs
    /// that cannot be known.
    fn drop(&mut self) {
        let (began, mut leaving) = (now(), Vec::new());
        for (_, link) in std::mem::take(&mut self.links) {
            match link.side {
                Side::Sender { lanes, .. } => {
                    for (n, lane) in lanes.into_iter().enumerate() {
                        let rail = self.hands.rail_of(n);
                        leaving.extend(
                            lane.end(began, &mut self.hands.rails[rail]).map(|left| (rail, left)),
                        );
                    }
                }
                Side::Receiver { lanes } => {
                    leaving.extend(
                        lanes.into_iter().filter_map(|l| l.end(began, &mut self.hands.rails)),
                    );
                }
            }
        }
        let deadline = began.plus_ms(LAST_FLUSH_MS);
        while !leaving.is_empty() && now() < deadline {
            let each =
                leaving.drain(..).filter_map(|(rail, mut left): (usize, Leaving<N::Pair>)| {
                    if !left.is_flushed(|_| {}) {
                        return Some((rail, left));
                    }
                    let hca = &mut self.hands.rails[rail].hca;
                    left.end(hca).ok().flatten().map(|left| (rail, left))
                });
            leaving = each.collect();
            std::thread::yield_now();
        }
        for (rail, left) in &leaving {
            let hca = &self.hands.rails[*rail].hca;
            let (nic, queue_pair, limit_ms) = (&hca.about().name, left.number(), LAST_FLUSH_MS);
            tracing::error!(
                nic,
                queue_pair,
                limit_ms,
                "not flushed at the engine's end: what its NIC has taken may still land"
            );
        }
    }
}
