//! An emulated NIC: a process that reads mlx5 rings in shared memory and moves bytes as an RDMA NIC
//! would, late writes included. A test device: it is never offered without the word `emulated`, and
//! its rates mean nothing.
//!
//! One process is one NIC (one rail); every worker of the host opens it, and it connects queue pairs
//! within a process and across processes. [`client`] is the worker's side, [`serve`] the NIC's.
//! Layouts of the shared memory and of the control socket: `docs/emulated-nic.h`.

pub mod client;
#[doc(hidden)]
pub mod control;
mod device;
pub mod faults;
#[doc(hidden)]
pub mod layout;
pub mod serve;
pub mod stats;
mod trace;
#[doc(hidden)]
pub mod verbs;

pub use device::Config;
