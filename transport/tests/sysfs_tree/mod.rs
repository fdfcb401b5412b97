//! Synthetic sysfs trees, made from public documents of the machines that they are called after; none
//! was captured on such a machine.

#![allow(clippy::unwrap_used, dead_code, missing_docs, unreachable_pub)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A tree in a temporary folder.
pub struct Tree(PathBuf);

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Tree {
    pub fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let root =
            std::env::temp_dir().join(format!("kvlane-sysfs-{}-{number}", std::process::id()));
        for dir in ["class/infiniband", "class/net", "bus/pci/devices", "devices"] {
            fs::create_dir_all(root.join(dir)).unwrap();
        }
        Self(root)
    }
    pub fn root(&self) -> &Path {
        &self.0
    }
    pub fn write(&self, path: impl AsRef<Path>, text: impl AsRef<[u8]>) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    pub fn remove(&self, path: impl AsRef<Path>) {
        let path = self.0.join(path);
        fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path)).unwrap();
    }
    /// `link` leads to `to`, both below the root; relative, as in sysfs.
    pub fn link(&self, link: impl AsRef<Path>, to: impl AsRef<Path>) {
        let link = link.as_ref();
        fs::create_dir_all(self.0.join(link).parent().unwrap()).unwrap();
        let up: PathBuf = link.parent().unwrap().iter().map(|_| "..").collect();
        symlink(up.join(to), self.0.join(link)).unwrap();
    }
    /// A PCI device at `path` (host bridge, bridges, itself), with the link to it by address.
    pub fn pci(&self, path: &str, vendor: &str, class: &str, numa: i32) -> PathBuf {
        let at = Path::new("devices").join(path);
        self.write(at.join("vendor"), format!("{vendor}\n"));
        self.write(at.join("class"), format!("{class}\n"));
        self.write(at.join("numa_node"), format!("{numa}\n"));
        let address = at.file_name().unwrap().to_owned();
        self.link(Path::new("bus/pci/devices").join(address), &at);
        at
    }
    pub fn gpu(&self, path: &str, numa: i32) {
        let at = self.pci(path, "0x10de", "0x030200", numa);
        self.write(at.join("device"), "0x2330\n");
    }
    /// A NIC with one port. Without `path` it is a virtual one.
    pub fn nic(&self, name: &str, path: Option<&str>, numa: i32) -> Nic<'_> {
        let at = match path {
            None => Path::new("devices/virtual/infiniband").join(name),
            Some(path) => {
                let device = Path::new("devices").join(path);
                // The second port of a card finds its function made.
                if !self.0.join(&device).exists() {
                    self.pci(path, "0x15b3", "0x020000", numa);
                }
                let at = device.join("infiniband").join(name);
                self.link(at.join("device"), &device);
                at
            }
        };
        self.write(at.join("node_guid"), "a088:c203:0012:3456\n");
        if path.is_some() {
            self.write(at.join("fw_ver"), "28.39.1002\n");
            self.write(at.join("hca_type"), "MT4129\n");
            self.write(at.join("board_id"), "MT_0000000838\n");
        }
        self.link(Path::new("class/infiniband").join(name), &at);
        Nic { tree: self, name: name.into(), at }.port(1)
    }
    pub fn netdev(&self, name: &str, mtu: u32) {
        let at = Path::new("devices/virtual/net").join(name);
        self.write(at.join("operstate"), "up\n");
        self.write(at.join("mtu"), format!("{mtu}\n"));
        self.write(at.join("speed"), "400000\n");
        self.link(Path::new("class/net").join(name), at);
    }
    pub fn bond(&self, name: &str, members: &[&str]) {
        self.netdev(name, 9000);
        let at = Path::new("devices/virtual/net").join(name).join("bonding");
        self.write(at.join("mode"), "active-backup 1\n");
        self.write(at.join("active_slave"), format!("{}\n", members[0]));
        self.write(at.join("slaves"), format!("{}\n", members.join(" ")));
        for member in members {
            self.netdev(member, 9000);
            self.link(
                Path::new("devices/virtual/net").join(member).join("master"),
                Path::new("devices/virtual/net").join(name),
            );
        }
    }
}

/// A NIC that is being made.
pub struct Nic<'a> {
    tree: &'a Tree,
    name: String,
    at: PathBuf,
}

impl Nic<'_> {
    fn file(&self, port: u32, file: &str, text: &str) {
        self.tree.write(self.at.join(format!("ports/{port}/{file}")), format!("{text}\n"));
    }
    /// An active Ethernet port without any GID.
    pub fn port(self, port: u32) -> Self {
        self.file(port, "state", "4: ACTIVE");
        self.file(port, "phys_state", "5: LinkUp");
        self.file(port, "rate", "400 Gb/sec (4X NDR)");
        self.file(port, "link_layer", "Ethernet");
        self.file(port, "lid", "0x0");
        self.file(port, "sm_lid", "0x0");
        self.file(port, "pkeys/0", "0xffff");
        self.file(port, "pkeys/1", "0x0000");
        self
    }
    /// InfiniBand on port 1.
    pub fn infiniband(self, lid: u16) -> Self {
        self.file(1, "link_layer", "InfiniBand");
        self.file(1, "lid", &format!("{lid:#x}"));
        self.file(1, "sm_lid", "0x1");
        self.gid(0, "fe80:0000:0000:0000:a088:c203:0012:3456", "IB/RoCE v1", None)
    }
    pub fn down(self) -> Self {
        self.file(1, "state", "1: DOWN");
        self.file(1, "phys_state", "3: Disabled");
        self
    }
    pub fn rate(self, rate: &str) -> Self {
        self.file(1, "rate", rate);
        self
    }
    pub fn gid(self, index: u32, gid: &str, kind: &str, netdev: Option<&str>) -> Self {
        self.file(1, &format!("gids/{index}"), gid);
        self.file(1, &format!("gid_attrs/types/{index}"), kind);
        if let Some(netdev) = netdev {
            self.file(1, &format!("gid_attrs/ndevs/{index}"), netdev);
        }
        self
    }
    /// The table that a mlx5 port has whose netdev has an IPv4 address: link-local and v4, v1 and v2.
    pub fn roce(self, netdev: &str, v4: &str) -> Self {
        self.tree.netdev(netdev, 9000);
        let mapped = mapped(v4);
        self.link_local(netdev)
            .gid(2, &mapped, "IB/RoCE v1", Some(netdev))
            .gid(3, &mapped, "RoCE v2", Some(netdev))
            .gid(4, "0000:0000:0000:0000:0000:0000:0000:0000", "RoCE v2", None)
    }
    /// … and the one of a port without an address.
    pub fn link_local(self, netdev: &str) -> Self {
        self.gid(0, "fe80:0000:0000:0000:a288:c2ff:fe12:3456", "IB/RoCE v1", Some(netdev)).gid(
            1,
            "fe80:0000:0000:0000:a288:c2ff:fe12:3456",
            "RoCE v2",
            Some(netdev),
        )
    }
}

/// An IPv4 address as sysfs writes its GID.
pub fn mapped(v4: &str) -> String {
    let [a, b, c, d] = v4.parse::<std::net::Ipv4Addr>().unwrap().octets();
    format!("0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}")
}

/// A switch below a host bridge: the path of what is behind its port `port`.
pub fn behind_switch(domain: &str, host: u8, port: u8) -> String {
    let bus = |n: u8| host + n;
    format!(
        "pci{domain}:{host:02x}/{domain}:{host:02x}:01.0/{domain}:{:02x}:00.0/{domain}:{:02x}:{port:02x}.0/{domain}:{:02x}:00.0",
        bus(1),
        bus(2),
        bus(3 + port),
    )
}

/// Eight GPUs, each with a 400G InfiniBand NIC behind its switch (mlx5_0 to mlx5_7 here, in the
/// order of the GPUs), and two RoCE NICs for storage and management elsewhere.
pub fn dgx_h100() -> Tree {
    let tree = Tree::new();
    for (n, host) in (0..).zip([0x15u8, 0x38, 0x48, 0x59, 0x97, 0xb7, 0xc7, 0xd7]) {
        let numa = n / 4;
        tree.gpu(&behind_switch("0000", host, 0), numa);
        let nic = behind_switch("0000", host, 1);
        tree.nic(&format!("mlx5_{n}"), Some(&nic), numa).infiniband(10 + n as u16);
    }
    for (n, host, v4) in [(8, "26", "10.1.0.1"), (9, "a7", "10.1.0.2")] {
        let path = format!("pci0000:{host}/0000:{host}:01.0/0000:{:02x}:00.0", 0x27 + n);
        let numa = n - 8;
        tree.nic(&format!("mlx5_{n}"), Some(&path), numa)
            .rate("200 Gb/sec (4X HDR)")
            .roce(&format!("eth{n}"), v4);
    }
    tree
}

/// Eight GPUs behind four switches, and one NIC for all of them.
pub fn hgx_one_nic() -> Tree {
    let tree = Tree::new();
    for (n, host) in (0..).zip([0x15u8, 0x38, 0x97, 0xb7]) {
        tree.gpu(&behind_switch("0000", host, 0), n / 2);
        tree.gpu(&behind_switch("0000", host, 1), n / 2);
    }
    tree.nic("mlx5_0", Some(&behind_switch("0000", 0x15, 2)), 0).roce("eth0", "10.0.0.1");
    tree
}

/// Two Grace nodes with two GPUs and two NICs each; every device has a PCI domain of its own.
pub fn gb200() -> Tree {
    let tree = Tree::new();
    for (domain, numa) in [("0008", 0), ("0009", 0), ("0018", 1), ("0019", 1)] {
        tree.gpu(&format!("pci{domain}:00/{domain}:00:00.0/{domain}:01:00.0"), numa);
    }
    for (n, domain, numa) in [(0, "0000", 0), (1, "0002", 0), (2, "0010", 1), (3, "0012", 1)] {
        let path = format!("pci{domain}:00/{domain}:00:00.0/{domain}:03:00.0");
        tree.nic(&format!("mlx5_{n}"), Some(&path), numa)
            .roce(&format!("eth{n}"), &format!("10.0.{n}.1"));
    }
    tree
}

/// A bond with an address, and one without; no `device` link, and one GPU.
pub fn bonds() -> Tree {
    let tree = Tree::new();
    tree.gpu("pci0000:00/0000:00:01.0/0000:01:00.0", 0);
    tree.bond("bond0", &["p0", "p1"]);
    tree.bond("bond1", &["p2", "p3"]);
    tree.nic("mlx5_bond_0", None, -1)
        .link_local("bond0")
        .gid(2, &mapped("10.77.0.1"), "IB/RoCE v1", Some("bond0"))
        .gid(3, &mapped("10.77.0.1"), "RoCE v2", Some("bond0"));
    tree.nic("mlx5_bond_1", None, -1).link_local("bond1");
    tree
}

/// Two soft-RoCE devices of one host, as Linux 6.1 shows them.
pub fn soft_roce() -> Tree {
    let tree = Tree::new();
    for (n, v4) in [(0, "10.77.0.1"), (1, "10.77.0.2")] {
        let netdev = format!("nic{n}");
        tree.netdev(&netdev, 9000);
        tree.nic(&format!("rxe{n}"), None, -1)
            .gid(0, "fe80:0000:0000:0000:5054:00ff:fe12:3456", "RoCE v2", Some(&netdev))
            .gid(1, &mapped(v4), "RoCE v2", Some(&netdev));
        tree.write(format!("class/infiniband/rxe{n}/parent"), format!("{netdev}\n"));
    }
    tree
}

/// A NIC whose port is down, one with addresses of no use only, and two whose names begin alike.
pub fn troubled() -> Tree {
    let tree = Tree::new();
    tree.gpu("pci0000:00/0000:00:01.0/0000:01:00.0", 0);
    tree.gpu("pci0000:80/0000:80:01.0/0000:81:00.0", 1);
    let path = |n: u32| format!("pci0000:00/0000:00:{:02x}.0/0000:{:02x}:00.0", 2 + n, 2 + n);
    tree.nic("mlx5_0", Some(&path(0)), 0).roce("eth0", "10.0.0.1").down();
    tree.netdev("eth2", 1500);
    tree.nic("mlx5_2", Some(&path(2)), 0)
        .link_local("eth2")
        .gid(2, &mapped("0.0.0.0"), "RoCE v2", Some("eth2"))
        .gid(3, &mapped("169.254.7.7"), "RoCE v2", Some("eth2"));
    tree.nic("mlx5_1", Some(&path(1)), 0).roce("eth1", "10.0.1.1");
    tree.nic("mlx5_10", Some(&path(10)), 0).roce("eth10", "10.0.10.1");
    tree
}
