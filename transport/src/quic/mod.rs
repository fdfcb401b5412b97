//! Sessions between identities: one QUIC connection, one stream of frames, one death notice.
//!
//! Owns: who may speak ([`tls`], [`ca`]), the first words ([`greeting`]), sockets and accept queues
//! ([`endpoint`]), the two halves of a session ([`session`]), the idle TCP connection whose end says
//! that a process died ([`notice`]). In: addresses and messages. Out: sessions whose peer is who it
//! claims to be and may do what it came for.
//!
//! ```no_run
//! use kvlane_proto::msg::{Purpose, peer::{PeerFrame, PeerMsg}};
//! use kvlane_proto::{Incarnation, WorkerKey};
//! use kvlane_transport::quic::{Endpoint, EndpointConfig, Security, tls};
//!
//! # async fn run() -> kvlane_proto::Result<()> {
//! let dir = std::path::PathBuf::from("/etc/kvlane/tls");
//! let me = WorkerKey { identity: tls::identity_of(&dir)?, incarnation: Incarnation([7; 16]) };
//! let config = EndpointConfig::new(([0, 0, 0, 0], 7400).into(), Security::Mutual { dir }, me);
//! let endpoint = Endpoint::bind(config)?;
//!
//! // The side that dials …
//! let session = endpoint.dial("prefill-0.example:7400", None, Purpose::Peer).await?;
//! println!("{} speaks version {}", session.peer, session.version);
//! let (tx, mut rx, mut watch) = session.into_parts::<PeerFrame, PeerFrame>();
//! tx.try_send(&PeerFrame { seq: 1, echo: 0, msg: PeerMsg::Heartbeat })?;
//! tokio::select! {
//!     frame = rx.recv() => println!("{:?}", frame?), // None: the peer ended on purpose
//!     death = watch.died() => println!("{death:?}"),
//! }
//!
//! // … and the side that is dialled. Who may not come in never shows up here.
//! while let Some(session) = endpoint.accept().await {
//!     println!("{} for {:?}", session.peer, session.purpose);
//! }
//! # Ok(()) }
//! ```
//!
//! Invariants:
//! 1. A [`Session`] exists only after both identities, cluster, roles and version have been agreed.
//! 2. A peer that has not been welcomed holds one slot of a bounded table, at most one small frame,
//!    and only until a deadline.
//! 3. Nothing a peer does can end anything but its own session.
//! 4. A dropped session is a clean end; only a process that could not say so dies.

pub mod ca;
pub mod endpoint;
pub mod greeting;
pub mod notice;
pub mod session;
pub mod tls;
mod x509;

pub use endpoint::{Endpoint, EndpointConfig, load_reset_key};
pub use session::{Death, FrameReceiver, FrameSender, Session, Watch};
pub use tls::Security;

/// Codes with which connections are closed.
pub mod code {
    /// On purpose.
    pub const CLEAN: u32 = 0;
    /// The greeting was refused.
    pub const REFUSED: u32 = 1;
    /// The peer broke the protocol.
    pub const PROTOCOL: u32 = 2;
    /// The peer takes nothing off its stream.
    pub const STALLED: u32 = 3;
}
