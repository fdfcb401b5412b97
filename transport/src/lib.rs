//! Control plane, memory and engines of kvlane.
//!
//! [`wire`] turns messages into bounded frames; [`quic`] carries them between identities;
//! [`devices`] knows the machine's GPUs and NICs; [`memory`] what may be read and written; [`engine`] moves the pages; [`sys`] is the only
//! place with `unsafe`.

pub mod clock;
pub mod devices;
pub mod emulated;
pub mod engine;
pub mod memory;
pub mod mlx5;
pub mod quic;
pub mod random;
pub mod rpc;
pub mod seats;
pub mod service_client;
pub mod sys;
pub mod wire;
