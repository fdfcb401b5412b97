//! Every limit and every default, in one table.
//!
//! Limits are what a peer cannot exceed; exceeding one is a counted refusal. Defaults are what a
//! configuration may change. Units stand last.

/// Oldest protocol version this build speaks.
pub const PROTOCOL_MIN: u16 = 1;
/// Newest protocol version this build speaks.
pub const PROTOCOL_MAX: u16 = 1;

/// Largest control frame, header excluded.
pub const FRAME_BYTES_MAX: usize = 4 << 20;
/// Largest frame from somebody who has not been welcomed.
pub const HELLO_FRAME_BYTES_MAX: usize = 16 << 10;
/// Longest cluster, instance, model or engine name.
pub const NAME_BYTES_MAX: usize = 63;
/// Longest text or hint of a refusal.
pub const REFUSAL_TEXT_BYTES_MAX: usize = 1024;
/// Longest list of capabilities, engines or addresses in one message.
pub const LIST_MAX: usize = 64;
/// Longest address or URL.
pub const ADDRESS_BYTES_MAX: usize = 256;
/// Longest connection blob of an engine.
pub const BLOB_BYTES_MAX: usize = 4 << 10;
/// Longest message of one engine to another over their link.
pub const ENGINE_MESSAGE_BYTES_MAX: usize = 16 << 10;
/// Most such messages of one link that wait for the engine.
pub const ENGINE_MESSAGES_WAITING_MAX: usize = 256;
/// Most blocks in one room.
pub const BLOCKS_PER_ROOM_MAX: u32 = 1 << 19;
/// Most layers in one model.
pub const LAYERS_MAX: u32 = 1 << 10;
/// Most pools of one rank.
pub const POOLS_MAX: usize = 16;
/// Most ranks that send to one, or that one sends to.
pub const RANKS_MAX: usize = 64;
/// Most rows (tokens × heads) in one page.
pub const ROWS_PER_PAGE_MAX: u32 = 1 << 18;
/// Largest page.
pub const PAGE_BYTES_MAX: u32 = 64 << 20;
/// Most blocks in one pool.
pub const POOL_BLOCKS_MAX: u32 = 1 << 30;
/// Parts are numbered in 24 bits.
pub const PARTS_PER_ROOM_MAX: u32 = 1 << 24;
/// Most rails (NICs) of one worker.
pub const RAILS_MAX: u16 = 16;
/// Most entries looked at in one directory of sysfs.
pub const SYSFS_ENTRIES_MAX: usize = 4096;
/// Most bytes of one file of sysfs.
pub const SYSFS_FILE_BYTES_MAX: usize = 4096;
/// Most GIDs of one NIC port that are looked at.
pub const GIDS_PER_PORT_MAX: usize = 1024;
/// Longest list of candidates in one error.
pub const CANDIDATES_BYTES_MAX: usize = 640;
/// Most lanes of one link.
pub const LANES_PER_LINK_MAX: u16 = 64;
/// Most rooms that one worker holds at a time, waiting ones included.
pub const ROOMS_MAX: usize = 8192;
/// Most rooms for which one peer may make this side wait (offers nobody claimed yet).
pub const ORPHANS_PER_LINK_MAX: usize = 1024;
/// Words (4 bytes) of block lists of offers that nobody claimed yet, by link.
pub const ORPHAN_WORDS_PER_LINK_MAX: usize = 1 << 20;
/// Most reservations and lent rooms that queue for lanes.
pub const QUEUE_MAX: usize = 4096;
/// One router may fill one of so many parts of that queue.
pub const QUEUE_SHARES: usize = 8;
/// How many ended rooms are remembered.
pub const TOMBSTONES_MAX: usize = 16384;
/// Most workers that one registry holds.
pub const WORKERS_MAX: usize = 16384;
/// Most issuer slots that one router's starts hold at a time.
pub const ISSUER_SLOTS_PER_ROUTER_MAX: usize = 64;
/// Counters of an issuer slot that are given out at a time.
pub const ISSUER_COUNTERS: u64 = 1 << 16;
/// Most idempotency keys that one decode worker remembers.
pub const KEYS_MAX: usize = 16384;
/// Most callers that may wait for one room's outcome.
pub const WATCHERS_PER_ROOM_MAX: usize = 16;

/// Control heartbeat.
pub const HEARTBEAT_MS: u64 = 500;
/// Heartbeats that may be missed before a peer counts as lost.
pub const HEARTBEAT_MISSES: u32 = 2;
/// How long a probe of a suspected peer may take.
pub const PROBE_MS: u64 = 50;
/// A worker's lease at the service; renewed at a third of it.
pub const WORKER_LEASE_MS: u64 = 5_000;
/// How long the registry remembers a worker whose lease ran out.
pub const WORKER_KEEP_MS: u64 = 600_000;
/// A router's lease of an issuer slot: outlives a restart of the service.
pub const ISSUER_LEASE_MS: u64 = 60_000;
/// How long a slot rests after its lease before another router gets it.
pub const ISSUER_QUARANTINE_MS: u64 = 120_000;
/// A grant's lease; renewed by progress.
pub const GRANT_LEASE_MS: u64 = 30_000;
/// A room's deadline.
pub const ROOM_DEADLINE_MS: u64 = 60_000;
/// How long a charged reservation waits for its decode leg.
pub const UNCLAIMED_MS: u64 = 5_000;
/// How long a quiesce may take before the receiver revokes.
pub const QUIESCE_MS: u64 = 50;
/// How long a fence may take before its blocks are quarantined.
pub const FENCE_MS: u64 = 5_000;
/// First wait before a control message is repeated; doubles up to [`RESEND_MAX_MS`].
pub const RESEND_MS: u64 = 200;
/// Longest wait between two repeats.
pub const RESEND_MAX_MS: u64 = 2_000;
/// How long a peer's hello may take.
pub const HANDSHAKE_MS: u64 = 5_000;
/// How long a lane that is not up is waited for: by a new link, and by rooms that could have it.
pub const LANE_WAIT_MS: u64 = 1_000;
/// First wait before a part is tried again; doubles up to [`RETRY_MAX_MS`], with jitter.
pub const RETRY_MS: u64 = 10;
/// Longest wait between two tries of a part.
pub const RETRY_MAX_MS: u64 = 1_000;
/// A lane with parts in flight on which nothing moves for so long is given up.
pub const PART_TIMEOUT_MS: u64 = 5_000;
/// Without a completion for so long, work requests that a NIC has count as lost: longer than it may
/// retry by itself, and before the part that they are of is given up.
pub const COMPLETION_MS: u64 = 4_000;
/// Tries of one part before the room fails.
pub const PART_TRIES_MAX: u32 = 16;
/// Allowance for two clocks that run at different speeds, in thousandths.
pub const DRIFT_PER_MILLE: u64 = 10;
/// Lanes of a link's pool (connections or queue pairs) per rail.
pub const LANES_PER_LINK: u16 = 4;
/// Lanes that a room borrows.
pub const LANES_PER_ROOM: u16 = 1;
/// Parts in flight on one lane.
pub const PARTS_IN_FLIGHT_PER_LANE: u32 = 8;
/// Smallest size of a part that a peer may ask for: the lists that a room keeps grow with its parts.
pub const PART_BYTES_MIN: u64 = 4 << 10;
/// Largest size of a part that a peer may ask for.
pub const PART_BYTES_MAX: u64 = 1 << 30;
/// Aim for the size of a part.
pub const PART_BYTES: u64 = 1 << 20;
