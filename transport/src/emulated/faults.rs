//! Faults that an emulated NIC makes on demand.
