//! Reading sysfs, or a copy of it.
//!
//! Owns: the root. In: paths below it. Out: short clean texts, names in an order that people expect,
//! paths without symlinks. Invariants: what is not there, cannot be read, is too long or leads out of
//! the root is `None`; nothing here blocks or panics, whatever the tree holds.

use std::cmp::Ordering;
use std::fs::{self, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use kvlane_proto::limits;

/// Where sysfs is mounted, or a tree that was copied from one.
#[derive(Clone, Debug)]
pub struct Sysfs {
    root: PathBuf,
}

impl Default for Sysfs {
    fn default() -> Self {
        Self::new("/sys")
    }
}

impl Sysfs {
    /// A tree; it need not be there.
    pub fn new(root: impl AsRef<Path>) -> Self {
        let root = root.as_ref();
        Self { root: root.canonicalize().unwrap_or_else(|_| root.to_path_buf()) }
    }
    /// Number of a network interface, if it is there.
    pub fn interface_index(&self, netdev: &str) -> Option<u32> {
        let index = self.number(Path::new("class/net").join(netdev).join("ifindex"))?;
        u32::try_from(index).ok()
    }
    /// The tree's root.
    pub fn root(&self) -> &Path {
        &self.root
    }
    /// `path` without symlinks, if it is there and inside the tree.
    pub fn resolve(&self, path: impl AsRef<Path>) -> Option<PathBuf> {
        let resolved = self.root.join(path).canonicalize().ok()?;
        resolved.starts_with(&self.root).then_some(resolved)
    }
    /// What a file says, on one line, without what is not printable ASCII. `None` if that is nothing.
    pub fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        let path = self.resolve(path)?;
        // A pipe in a copied tree must not block the open.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
        if !file.metadata().ok()?.is_file() {
            return None;
        }
        let mut bytes = Vec::new();
        let most = limits::SYSFS_FILE_BYTES_MAX as u64;
        file.take(most + 1).read_to_end(&mut bytes).ok()?;
        // tar fills sysfs files, which are shorter than they say, with zeros.
        let end = bytes.iter().rposition(|&b| b != 0)? + 1;
        if bytes.len() as u64 > most {
            return None;
        }
        let clean = |c: char| if c.is_ascii_graphic() { c } else { ' ' };
        let text: String = String::from_utf8_lossy(&bytes[..end]).chars().map(clean).collect();
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_string())
    }
    /// A number, decimal or `0x…`.
    pub fn number(&self, path: impl AsRef<Path>) -> Option<i64> {
        let text = self.text(path)?;
        match text.strip_prefix("0x") {
            Some(hex) => i64::from_str_radix(hex, 16).ok(),
            None => text.parse().ok(),
        }
    }
    /// Whether something is there.
    pub fn is_there(&self, path: impl AsRef<Path>) -> bool {
        self.resolve(path).is_some()
    }
    /// What a directory has, in natural order (`mlx5_2` before `mlx5_10`), and whether it has more
    /// than [`limits::SYSFS_ENTRIES_MAX`], which are left out. Odd names are left out too.
    pub fn names(&self, path: impl AsRef<Path>) -> (Vec<String>, bool) {
        let Some(entries) = self.resolve(path).and_then(|path| fs::read_dir(path).ok()) else {
            return (Vec::new(), false);
        };
        let mut entries = entries.map_while(std::result::Result::ok);
        let first = entries.by_ref().take(limits::SYSFS_ENTRIES_MAX);
        let name = |entry: fs::DirEntry| entry.file_name().into_string().ok();
        let mut names: Vec<_> = first.filter_map(name).filter(|name| is_name(name)).collect();
        names.sort_by(|a, b| natural(a, b));
        (names, entries.next().is_some())
    }
}

/// Whether a name can be that of a device: it goes into paths and onto terminals.
pub(super) fn is_name(name: &str) -> bool {
    (1..=limits::NAME_BYTES_MAX).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_graphic() && b != b'/')
        && name != "."
        && name != ".."
}

/// Names as people order them: runs of digits by their value.
pub(super) fn natural(a: &str, b: &str) -> Ordering {
    let (mut a, mut b) = (a, b);
    while let (Some(x), Some(y)) = (a.chars().next(), b.chars().next()) {
        let (ordering, x, y) = if x.is_ascii_digit() && y.is_ascii_digit() {
            let (x, y) = (digits(a), digits(b));
            let (m, n) = (x.trim_start_matches('0'), y.trim_start_matches('0'));
            (m.len().cmp(&n.len()).then(m.cmp(n)).then(x.cmp(y)), x.len(), y.len())
        } else {
            (x.cmp(&y), x.len_utf8(), y.len_utf8())
        };
        if ordering.is_ne() {
            return ordering;
        }
        (a, b) = (&a[x..], &b[y..]);
    }
    a.len().cmp(&b.len())
}

fn digits(text: &str) -> &str {
    &text[..text.bytes().take_while(u8::is_ascii_digit).count()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_ordered_as_people_do() {
        let mut names = ["mlx5_10", "mlx5_2", "mlx5_bond_0", "mlx5_1", "a", "mlx5_02", ""];
        names.sort_by(|a, b| natural(a, b));
        assert_eq!(names, ["", "a", "mlx5_1", "mlx5_02", "mlx5_2", "mlx5_10", "mlx5_bond_0"]);
    }
}
