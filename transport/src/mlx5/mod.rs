//! What an mlx5 NIC reads and writes in memory: send entries, doorbells and completions.
//!
//! Pure bytes, no I/O. In: what is to be written where. Out: entries of 64 bytes for the send ring,
//! the doorbell record, the value for the doorbell, and completions read back. Everything on the
//! wire is big-endian. Layouts are those of the public headers of rdma-core (`mlx5dv.h`) and of the
//! open GPUNetIO device headers, which write the same bytes; the tests hold ours against both.
//!
//! Invariants: an index of the ring is 16 bits wide and wraps there, whatever the ring's length; a
//! decoder refuses what it does not know and ignores only the bytes that real writers leave
//! undefined.

pub mod completion;
pub mod entry;
pub mod queue;

pub use completion::{Completion, Fault, Syndrome};
pub use entry::{Data, Decoded, Entry, Malformed, Operation, Remote, Segment};
pub use queue::{CompletionQueue, Places, ReceiveQueue, SendQueue};

/// Length of a send entry and of a completion.
pub const ENTRY_BYTES: usize = 64;
/// The same in words of 8 bytes.
pub const ENTRY_WORDS: usize = 8;
/// Most entries of a send ring. An index of 16 bits says, up to 2^15 - 1 either way, whether it is ahead
/// or behind: a whole ring may be shown at once, and a record beyond it is noticed as such.
pub const SENDS_MAX: u32 = 1 << 14;
/// Most receives that are posted at a time.
pub const RECEIVES_MAX: u32 = 1 << 15;
/// Most bytes of one write.
pub const WRITE_BYTES_MAX: u32 = 1 << 30;
