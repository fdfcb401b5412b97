//! One NIC port and the address that it is reached at.
//!
//! Owns: [`Rail`]. In: what [`super::choose`] found. Out: [`Rail::gid_now`], the index of its GID at
//! this moment, and [`Rail::pkey_index_now`].

use std::fmt;

use kvlane_proto::{Error, ErrorKind, Result};
use serde::Serialize;

use super::gids::{self, Gid};
use super::netdev::Bond;
use super::nics::{LinkLayer, pkey_table, port_path};
use super::pci::PathClass;
use super::{Sysfs, listed};

/// A NIC port that carries pages, and what it is asked to carry them with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Rail {
    /// The RDMA device.
    pub nic: String,
    /// Its port.
    pub port: u32,
    /// What the wire is.
    pub link_layer: LinkLayer,
    /// What peers reach it at; on InfiniBand it may have none and is reached by LID. The index in it
    /// is that of the choice: ask [`Rail::gid_now`] before each use.
    pub gid: Option<Gid>,
    /// On InfiniBand, its local identifier.
    pub lid: Option<u16>,
    /// How far it is from the GPU; none for host memory.
    pub path: Option<PathClass>,
    /// Its NUMA node, if told.
    pub numa: Option<u32>,
    /// Line rate, if told.
    pub bits_per_s: Option<u64>,
    /// RDMA MTU that the netdev's allows, if told.
    pub mtu_bytes: Option<u32>,
    /// If the GID's netdev is a bond: of what. One queue pair goes over one member.
    pub bond: Option<Bond>,
    /// As wished: the traffic class byte of the IP header, DSCP in its upper six bits.
    pub traffic_class: Option<u8>,
    /// As wished: 0 to 15.
    pub service_level: Option<u8>,
    /// As wished, and in the port's table as it stands here.
    pub pkey: Option<u16>,
}

impl Rail {
    /// Where its GID stands now, by type, netdev and address.
    ///
    /// # Errors
    /// [`ErrorKind::NoPath`] with what the port's table has instead.
    pub fn gid_now(&self, sysfs: &Sysfs) -> Result<(u32, [u8; 16])> {
        let ib = self.link_layer == LinkLayer::InfiniBand;
        let (table, _) = gids::read(sysfs, &port_path(&self.nic, self.port), ib);
        let Some(asked) = &self.gid else {
            return Err(Error::new(ErrorKind::NoPath, "the rail has no GID: it is reached by LID")
                .with("rail", self));
        };
        let same = |gid: &&Gid| {
            (gid.raw, gid.gid_type, &gid.netdev) == (asked.raw, asked.gid_type, &asked.netdev)
        };
        table.iter().find(same).map(|gid| (gid.index, gid.raw)).ok_or_else(|| {
            Error::new(ErrorKind::NoPath, "the NIC port does not have its address any more")
                .with("nic", &self.nic)
                .with("port", self.port)
                .with("asked", asked)
                .with("found", listed(&table))
                .hint(
                    "give the netdev its address back, or restart the worker to choose again; \
                     `kvlane explain` shows what there is",
                )
        })
    }
    /// Where its partition key stands now in the port's table; 0, the default partition, if none was
    /// wished for.
    ///
    /// # Errors
    /// [`ErrorKind::NoPath`] with the keys that the port has instead.
    pub fn pkey_index_now(&self, sysfs: &Sysfs) -> Result<u16> {
        let Some(asked) = self.pkey else { return Ok(0) };
        let table = pkey_table(sysfs, &port_path(&self.nic, self.port).join("pkeys"));
        table.iter().find(|(_, key)| *key == asked).map(|(index, _)| *index).ok_or_else(|| {
            Error::new(ErrorKind::NoPath, "the NIC port does not have its partition key any more")
                .with("nic", &self.nic)
                .with("port", self.port)
                .with("asked", format!("{asked:#06x}"))
                .with("found", listed(table.iter().map(|(_, key)| format!("{key:#06x}"))))
                .hint(
                    "have the port added to the partition, or restart the worker with another key",
                )
        })
    }
}

impl fmt::Display for Rail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} port {}", self.nic, self.port)?;
        if let Some(lid) = self.lid {
            write!(f, " lid {lid}")?;
        }
        match &self.gid {
            Some(gid) if self.lid.is_none() => write!(f, " {gid}")?,
            _ => {}
        }
        match &self.bond {
            Some(bond) => write!(f, " over {}", listed(&bond.members)),
            None => Ok(()),
        }
    }
}
