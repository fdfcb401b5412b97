//! The `kvlane` binary with stop hooks, built once for all tests.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Where the binary is; `KVLANE_BIN` names one that was built already. Cargo's own lock of the target directory keeps two builds apart; the
/// directory is not that of any other build, so that no release binary ever gets the hooks.
pub(crate) fn path() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        // Where nothing can be built.
        if let Some(built) = std::env::var_os("KVLANE_BIN") {
            return built.into();
        }
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let target = root.join("target").join("fault-injection");
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| env!("CARGO").into());
        eprintln!("building kvlane with stop hooks in {}", target.display());
        let built = Command::new(cargo)
            .current_dir(root)
            .args(["build", "--package", "kvlane", "--features", "fault-injection", "--quiet"])
            .arg("--target-dir")
            .arg(&target)
            .status()
            .expect("cargo can be started");
        assert!(built.success(), "kvlane does not build with the feature fault-injection: {built}");
        target.join("debug").join("kvlane")
    })
}
