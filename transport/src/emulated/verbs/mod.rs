//! A provider of RDMA verbs inside this process, for tests: what soft-RoCE cannot do, or not on demand.
//!
//! Owns: devices that a test makes ([`Device`]), and everything that is made on them ([`world`]). In:
//! calls of the functions behind [`Verbs`] ([`calls`]), and knobs. Out: bytes in memory of this
//! process, completions, events, and the errors that were asked for. Invariants: a write is carried out
//! only between queue pairs that are connected with each other, inside regions of their domains, in
//! the order of its queue pair; what is on the wire outlives the queue pair that sent it; after the
//! flush of a receive that was posted to a queue pair in error nothing lands through it, and before
//! that it may; such a receive is flushed only when the queue pair is taken to error again, as
//! soft-RoCE does it.
//!
//! All of it is behind one lock: it is right, not fast.

mod calls;
mod world;

use std::collections::VecDeque;
use std::ffi::{CString, c_uint, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use self::world::{DeviceState, new_fd, raise, world};
use crate::sys::verbs::Verbs;
use crate::sys::verbs::abi::{self, Zero, ibv_async_event, ibv_device};

/// The vendor's own code of every fault here.
pub const VENDOR: u32 = 0x5a;
/// The one port of a device.
const PORT: u8 = 1;

/// What a test asks of a device, now or later.
#[derive(Clone, Debug)]
pub struct Knobs {
    /// Longest region.
    pub max_region_bytes: u64,
    /// Most regions.
    pub max_regions: u32,
    /// Longest ring.
    pub max_depth: i32,
    /// Most bytes of one write.
    pub max_message_bytes: u32,
    /// After so many more, registrations fail for want of memory.
    pub registrations_left: Option<u32>,
    /// The port.
    pub is_active: bool,
    /// The port's table: where each GID stands, whether RoCE v2, and its interface's number.
    pub gids: Vec<(u32, [u8; 16], bool, u32)>,
    /// Writes wait until this is taken back; then those land whose receivers still listen.
    pub holds: bool,
    /// Writes are on the wire for so long.
    pub transit: Duration,
    /// What was on the wire to a queue pair when that was taken to error has been let through, and
    /// lands at the last moment: just before the flush of a receive that was posted after the error,
    /// or, without one, a little after the queue pair's end.
    pub lands_late: bool,
    /// So many completions of sends are lost.
    pub loses: u32,
    /// Completions take so long.
    pub delay: Duration,
    /// After so many more, posts are refused for want of memory.
    pub posts_left: Option<u32>,
    /// dma-bufs can be registered.
    pub has_dmabuf: bool,
    /// Posts are counted, and nothing else.
    pub counts_only: bool,
}

impl Default for Knobs {
    fn default() -> Self {
        Self {
            max_region_bytes: 1 << 40,
            max_regions: 1 << 16,
            max_depth: 1 << 14,
            max_message_bytes: 1 << 23,
            registrations_left: None,
            is_active: true,
            gids: Vec::new(),
            holds: false,
            transit: Duration::ZERO,
            lands_late: false,
            loses: 0,
            delay: Duration::ZERO,
            posts_left: None,
            has_dmabuf: false,
            counts_only: false,
        }
    }
}

/// Writes that were posted to devices that only count.
static COUNTED: AtomicU64 = AtomicU64::new(0);

/// A device, to whoever made it. It stays until the process ends.
#[derive(Clone, Copy, Debug)]
pub struct Device(usize);

impl Device {
    /// Makes one, of a name that no other has.
    pub fn new(name: &str, knobs: Knobs) -> Self {
        let mut raw = ibv_device::zero();
        (raw.node_type, raw.transport_type) = (abi::IBV_NODE_CA, abi::IBV_TRANSPORT_IB);
        let raw = Box::into_raw(Box::new(raw)) as usize;
        let name = CString::new(name).unwrap_or_default();
        world(|world| {
            let (events, fd) = (VecDeque::new(), new_fd());
            let (regions, queue_pairs, landed_late) = (0, 0, 0);
            world.devices.push(DeviceState {
                name,
                raw,
                knobs,
                events,
                fd,
                regions,
                queue_pairs,
                landed_late,
            });
            Self(world.devices.len() - 1)
        })
    }
    /// The functions.
    #[allow(unsafe_code)] // They are C's.
    pub fn verbs() -> Verbs {
        // SAFETY: each does what its manual page says, as far as is said above.
        unsafe { Verbs::with_symbols(calls::symbols()) }
    }
    /// Turns knobs.
    pub fn set<T>(self, change: impl FnOnce(&mut Knobs) -> T) -> T {
        let (result, has_moved) = world(|world| {
            let knobs = &mut world.devices[self.0].knobs;
            let gids = knobs.gids.clone();
            let result = change(knobs);
            let has_moved = gids != knobs.gids;
            if !knobs.holds {
                world.release(self.0, Instant::now());
            }
            (result, has_moved)
        });
        if has_moved {
            self.says(abi::IBV_EVENT_GID_CHANGE);
        }
        result
    }
    /// It says that it is gone.
    pub fn fatal(self) {
        self.says(abi::IBV_EVENT_DEVICE_FATAL);
    }
    /// Unplugs the port, or plugs it in.
    pub fn plug(self, is_active: bool) {
        self.set(|knobs| knobs.is_active = is_active);
        self.says(if is_active { abi::IBV_EVENT_PORT_ACTIVE } else { abi::IBV_EVENT_PORT_ERR });
    }
    fn says(self, event_type: c_uint) {
        world(|world| {
            let element = usize::from(PORT) as *mut c_void;
            let device = &mut world.devices[self.0];
            device.events.push_back(ibv_async_event { element, event_type });
            raise(device.fd);
        });
    }
    /// Regions and queue pairs that there are on it.
    pub fn holds(self) -> (u32, u32) {
        world(|world| (world.devices[self.0].regions, world.devices[self.0].queue_pairs))
    }
    /// Its writes that are on the wire.
    pub fn on_the_wire(self) -> usize {
        world(|world| world.wire.iter().filter(|write| write.device == self.0).count())
    }
    /// Writes that landed here later than the error of the queue pair that they came through.
    pub fn landed_late(self) -> u64 {
        world(|world| world.devices[self.0].landed_late)
    }
    /// Writes that were posted to devices that only count.
    pub fn counted() -> u64 {
        COUNTED.load(Ordering::Relaxed)
    }
}
