//! Flags that say which NICs are used, and how: the same for `explain` and for workers, so that what
//! one says is what the other does.

use std::net::IpAddr;

use kvlane_transport::devices::{GidType, Wishes};

#[derive(clap::Args)]
pub(crate) struct RailArgs {
    /// A NIC, several times: with `verbs` an RDMA device by its whole name; with emulated NICs a socket,
    /// @NAME or a file, one for each rail, the same ones at every worker
    #[arg(long, value_name = "NIC")]
    pub(crate) nic: Vec<String>,
    /// Only this port of each NIC
    #[arg(long, value_name = "N")]
    nic_port: Option<u32>,
    /// GIDs of this type: roce-v2, roce-v1 or ib
    #[arg(long, value_name = "TYPE")]
    gid_type: Option<GidType>,
    /// The GID of this address
    #[arg(long, value_name = "ADDRESS")]
    gid_address: Option<IpAddr>,
    /// Traffic class byte of the IP header, DSCP in its upper six bits
    #[arg(long, value_name = "BYTE")]
    traffic_class: Option<u8>,
    /// Service level
    #[arg(long, value_name = "0-15", value_parser = clap::value_parser!(u8).range(0..=15))]
    service_level: Option<u8>,
    /// Partition key, such as 0x8001
    #[arg(long, value_parser = pkey)]
    pkey: Option<u16>,
}

fn pkey(text: &str) -> std::result::Result<u16, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u16::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.ok().filter(|key| key & 0x7fff != 0).ok_or("expected a key such as 0x8001".into())
}

impl RailArgs {
    /// What they ask for.
    pub(crate) fn wishes(&self, peer: Option<IpAddr>) -> Wishes {
        Wishes {
            nics: self.nic.clone(),
            port: self.nic_port,
            gid_type: self.gid_type,
            address: self.gid_address,
            traffic_class: self.traffic_class,
            service_level: self.service_level,
            pkey: self.pkey,
            peer,
            same_host: false,
        }
    }
    /// The first flag that is of use to real NICs only, if it was given.
    pub(crate) fn of_real_nics(&self) -> Option<&'static str> {
        let given = [
            ("--nic-port", self.nic_port.is_some()),
            ("--gid-type", self.gid_type.is_some()),
            ("--gid-address", self.gid_address.is_some()),
            ("--traffic-class", self.traffic_class.is_some()),
            ("--service-level", self.service_level.is_some()),
            ("--pkey", self.pkey.is_some()),
        ];
        given.into_iter().find_map(|(flag, given)| given.then_some(flag))
    }
}
