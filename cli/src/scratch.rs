//! A directory for the time of a command.

use std::path::{Path, PathBuf};

use kvlane_proto::{Error, ErrorKind, Result};
use kvlane_transport::random::random;

/// A directory of this user's own that is removed at the end.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// Makes one; `command` is part of its name.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] if there is no place that can be written.
    pub(crate) fn new(command: &str) -> Result<Self> {
        use std::os::unix::fs::DirBuilderExt;
        let path = std::env::temp_dir().join(format!("kvlane-{command}-{:016x}", random()));
        std::fs::DirBuilder::new().mode(0o700).create(&path).map_err(|e| {
            Error::new(ErrorKind::Io, "cannot make a scratch directory")
                .with("path", path.display())
                .hint("set TMPDIR to a directory that can be written")
                .caused_by(e)
        })?;
        Ok(Self(path))
    }
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
