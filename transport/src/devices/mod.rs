//! The machine's GPUs and RDMA NICs, and which NIC serves which GPU, and why.
//!
//! Owns: [`Sysfs`] (where everything is read from), [`Machine`] (what was read), [`choose`] (rails for
//! a GPU or for host memory, with a reason for every candidate), [`known_errors`] (what messages of
//! other software mean). In: sysfs, or a copy of one. Out: [`Choice`]. Invariants: names are matched
//! whole; nothing is chosen silently, and what reaches no peer is never chosen; GIDs are looked up by
//! what they are, never by an index of before ([`Rail::gid_now`]). No device is opened here.

mod choice;
mod gids;
pub mod known_errors;
mod netdev;
mod nics;
mod pci;
mod rail;
mod sysfs;

pub use choice::{Candidate, Choice, Target, Verdict, Wishes, choose, choose_by};
pub use gids::{AddressClass, Gid, GidType, Reach, gid_address, gid_text, unroutable};
use kvlane_proto::{Error, ErrorKind, Result, limits};
pub use netdev::{Bond, Netdev};
pub use nics::{LinkLayer, Nic, Port};
pub use pci::{Gpu, PathClass, PciAddress, PciPath};
pub use rail::Rail;
use serde::Serialize;
pub use sysfs::Sysfs;

/// What a machine has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// GPUs, by PCI address.
    pub gpus: Vec<Gpu>,
    /// RDMA devices, in natural order of their names.
    pub nics: Vec<Nic>,
    /// What was left out, because there was too much of it.
    pub notes: Vec<String>,
}

impl Machine {
    /// Reads it. What is not there is left out; this cannot fail.
    pub fn read(sysfs: &Sysfs) -> Self {
        let mut notes = Vec::new();
        let (gpus, more) = pci::gpus(sysfs);
        cut_note(&mut notes, more, "/sys/bus/pci/devices");
        let nics = nics::nics(sysfs, &mut notes);
        Self { gpus, nics, notes }
    }
    /// The GPU that a user means: its place by PCI address, or that address.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] with every GPU that is there; [`ErrorKind::Malformed`].
    pub fn gpu(&self, asked: &str) -> Result<&Gpu> {
        let found = if asked.bytes().all(|b| b.is_ascii_digit()) && !asked.is_empty() {
            let ordinal: Option<u32> = asked.parse().ok();
            self.gpus.iter().find(|gpu| Some(gpu.ordinal) == ordinal)
        } else {
            let address: PciAddress = asked.parse().map_err(|why: String| {
                Error::new(ErrorKind::Malformed, why).with("asked", asked)
            })?;
            self.gpus.iter().find(|gpu| gpu.pci.address == address)
        };
        found.ok_or_else(|| self.no_gpu(asked))
    }
    /// The NIC of exactly that name.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] with every NIC that is there.
    pub fn nic(&self, asked: &str) -> Result<&Nic> {
        self.nics.iter().find(|nic| nic.name == asked).ok_or_else(|| self.no_nic(asked))
    }
    fn no_gpu(&self, asked: &str) -> Error {
        let e = Error::new(ErrorKind::NotFound, "there is no such GPU")
            .with("asked", asked)
            .with("known", listed(&self.gpus));
        match self.gpus.len() {
            0 => e.hint(
                "no NVIDIA GPU is among the PCI devices of this machine or container: pass one \
                 through, or use host memory",
            ),
            n => e.hint(format!(
                "give 0 to {} or a PCI address; the order is by PCI address, and CUDA's may differ",
                n - 1
            )),
        }
    }
    fn no_nic(&self, asked: &str) -> Error {
        let known = self.nics.iter().map(|nic| nic.name.as_str());
        let near: Vec<&str> = known.clone().filter(|name| is_near(name, asked)).collect();
        let e = Error::new(ErrorKind::NotFound, "there is no such RDMA device")
            .with("asked", asked)
            .with("known", listed(known.clone()));
        match (self.nics.is_empty(), near.is_empty()) {
            (true, _) => e.hint(
                "no RDMA device is there: load its driver, or pass it into the container \
                 (/dev/infiniband and /sys/class/infiniband)",
            ),
            (false, true) => e.hint("name one of the known, whole"),
            (false, false) => {
                e.with("near", listed(near)).hint("names are matched whole: name one of the known")
            }
        }
    }
}

/// Items in a row, as many as a refusal has room for.
pub(crate) fn listed<T: std::fmt::Display>(items: impl IntoIterator<Item = T>) -> String {
    let mut out = String::new();
    let mut left_out = 0;
    for item in items {
        let item = item.to_string();
        if left_out > 0 || out.len() + item.len() > limits::CANDIDATES_BYTES_MAX / 2 {
            left_out += 1;
            continue;
        }
        if !out.is_empty() {
            out.push_str(", ");
        }
        out.push_str(&item);
    }
    match (out.is_empty(), left_out) {
        (true, 0) => "none".into(),
        (_, 0) => out,
        (_, n) => format!("{out} and {n} more"),
    }
}

fn cut_note(notes: &mut Vec<String>, more: bool, what: &str) {
    if more {
        notes.push(format!("there are too many of {what}: not all were looked at"));
    }
}

/// Whether two names differ by little: one begins with the other, or by at most two letters.
fn is_near(a: &str, b: &str) -> bool {
    let (a, b) = (a.to_ascii_lowercase(), b.to_ascii_lowercase());
    let (longest, shortest) = (a.len().max(b.len()), a.len().min(b.len()));
    shortest > 0
        && longest <= limits::NAME_BYTES_MAX
        && (a.starts_with(&b) || b.starts_with(&a) || distance(a.as_bytes(), b.as_bytes()) <= 2)
}

/// Letters to insert, remove or replace.
fn distance(a: &[u8], b: &[u8]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(row[j + 1] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_names_are_found_and_far_ones_are_not() {
        for (a, b) in
            [("mlx5_1", "mlx5_10"), ("mlx5_0", "mlx5_3"), ("MLX5_0", "mlx5_0"), ("mlx5", "mlx5_0")]
        {
            assert!(is_near(a, b), "{a} {b}");
        }
        for (a, b) in [("mlx5_0", "bnxt_re0"), ("", "mlx5_0"), ("rxe0", "mlx5_0")] {
            assert!(!is_near(a, b), "{a} {b}");
        }
        assert_eq!(distance(b"kitten", b"sitting"), 3);
    }

    #[test]
    fn lists_are_bounded_and_say_so() {
        assert_eq!(listed([""; 0]), "none");
        assert_eq!(listed(["a", "b"]), "a, b");
        let long = listed((0..500).map(|n| format!("mlx5_{n}")));
        assert!(long.len() < limits::CANDIDATES_BYTES_MAX, "{long}");
        assert!(long.ends_with("more"), "{long}");
    }
}
