//! What the kernel says of a process: memory, descriptors, time on a core, waits.

use std::path::PathBuf;
use std::time::Duration;

use kvlane_proto::{Error, ErrorKind, Result};

/// Ticks of `/proc/PID/stat`: the kernel's interface has this many a second on every architecture.
const TICKS_PER_S: u64 = 100;

/// Resident memory.
pub(crate) fn rss_bytes(pid: u32) -> Result<u64> {
    let (path, status) = read(pid, "status")?;
    field(&status, "VmRSS:").map(|kib| kib << 10).ok_or_else(|| odd(&path))
}

/// Resident memory of its own: without pools, files and whatever else others map, too.
pub(crate) fn own_bytes(pid: u32) -> Result<u64> {
    let (path, status) = read(pid, "status")?;
    field(&status, "RssAnon:").map(|kib| kib << 10).ok_or_else(|| odd(&path))
}

/// Open descriptors. Of this process, the one that it is read with counts.
pub(crate) fn fds(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/fd");
    let open = std::fs::read_dir(&path).map_err(|e| gone(&path).caused_by(e))?;
    Ok(open.count() as u64)
}

/// Time that all threads have been on a core.
pub(crate) fn cpu(pid: u32) -> Result<Duration> {
    let (path, stat) = read(pid, "stat")?;
    // The name may hold anything; what follows it are numbers: user and system time are the
    // twelfth and thirteenth.
    let behind_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks: Vec<u64> =
        behind_name.split_whitespace().skip(11).take(2).filter_map(|n| n.parse().ok()).collect();
    let [user, system] = ticks[..] else { return Err(odd(&path)) };
    Ok(Duration::from_millis((user + system) * 1000 / TICKS_PER_S))
}

/// How often its threads have waited for something.
pub(crate) fn waits(pid: u32) -> Result<u64> {
    let tasks = format!("/proc/{pid}/task");
    let failed = |e| gone(&tasks).caused_by(e);
    let mut waits = 0;
    for task in std::fs::read_dir(&tasks).map_err(failed)? {
        let path = task.map_err(failed)?.path().join("status");
        // A thread that ends meanwhile waits no more.
        let status = std::fs::read_to_string(path).unwrap_or_default();
        waits += field(&status, "voluntary_ctxt_switches:").unwrap_or(0);
    }
    Ok(waits)
}

fn read(pid: u32, file: &str) -> Result<(PathBuf, String)> {
    let path = PathBuf::from(format!("/proc/{pid}/{file}"));
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok((path, text)),
        Err(e) => Err(gone(&path.display().to_string()).caused_by(e)),
    }
}
fn gone(path: &str) -> Error {
    Error::new(ErrorKind::Io, "a process cannot be looked at").with("path", path)
}
fn odd(path: &std::path::Path) -> Error {
    Error::new(ErrorKind::Io, "the kernel says something else").with("path", path.display())
}
/// The number of a line.
fn field(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_memory_and_spends_time() {
        let me = std::process::id();
        assert!(rss_bytes(me).unwrap() > 64 << 10);
        assert!(own_bytes(me).unwrap() <= rss_bytes(me).unwrap());
        assert!(fds(me).unwrap() >= 3);
        let (cpu_before, waits_before) = (cpu(me).unwrap(), waits(me).unwrap());
        std::thread::sleep(Duration::from_millis(1));
        assert!(waits(me).unwrap() > waits_before);
        while cpu(me).unwrap() < cpu_before + Duration::from_millis(20) {
            std::hint::spin_loop();
        }
        assert_eq!(rss_bytes(u32::MAX).unwrap_err().kind(), ErrorKind::Io);
    }
}
