//! C programs against the public headers of rdma-core.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A program compiled from its text; `None` if this machine lacks the header. With
/// `KVLANE_MLX5DV=must` in the environment that is a failure.
pub(crate) fn compiled(header: &str, name: &str, source: &str) -> Option<PathBuf> {
    let header = Path::new("/usr/include").join(header);
    if !header.exists() {
        let must = std::env::var("KVLANE_MLX5DV").is_ok_and(|v| v == "must");
        assert!(!must, "{} is missing: install libibverbs-dev", header.display());
        eprintln!("skipped: {} is missing (libibverbs-dev)", header.display());
        return None;
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let to = folder.join(format!("{name}-{}", std::process::id()));
    let from = to.with_extension("c");
    std::fs::write(&from, source).unwrap();
    let made = Command::new("cc")
        .args(["-std=gnu11", "-O1", "-Wall", "-Werror", "-o"])
        .args([&to, &from])
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    std::fs::remove_file(from).unwrap();
    // Another run at the same time must not find half of it.
    let program = folder.join(name);
    std::fs::rename(to, &program).unwrap();
    Some(program)
}
