//! How much memory a pool may take, asked before it is allocated: the kernel would otherwise end
//! the process, without a word, when the pool is filled.

use kvlane_proto::{Error, ErrorKind, Result};

/// Refuses pools that are larger than what this machine, or this container, has left; `smaller`
/// says which flags make them smaller.
///
/// # Errors
/// [`ErrorKind::Config`] with what was asked and what is available.
pub(crate) fn check_mib(asked_mib: u64, smaller: &str) -> Result<()> {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let free = available_mib(&read("/proc/meminfo"));
    let limit = limit_mib(&read("/sys/fs/cgroup/memory.max"));
    check(asked_mib, free, limit, smaller)
}

fn check(
    asked_mib: u64,
    free_mib: Option<u64>,
    limit_mib: Option<u64>,
    smaller: &str,
) -> Result<()> {
    // Where the system does not say, there is nothing to compare with.
    match free_mib.into_iter().chain(limit_mib).min() {
        Some(available_mib) if asked_mib > available_mib => {
            Err(Error::new(ErrorKind::Config, "there is not enough memory for the pools")
                .with("asked_mib", asked_mib)
                .with("available_mib", available_mib)
                .hint(format!(
                    "give a smaller {smaller}, or free memory or raise the container's limit"
                )))
        }
        _ => Ok(()),
    }
}

/// MemAvailable of /proc/meminfo, which is in KiB.
fn available_mib(meminfo: &str) -> Option<u64> {
    let rest = meminfo.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    Some(rest.split_whitespace().next()?.parse::<u64>().ok()? >> 10)
}

/// A cgroup's memory.max: bytes, or `max`.
fn limit_mib(memory_max: &str) -> Option<u64> {
    Some(memory_max.trim().parse::<u64>().ok()? >> 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_files_are_read() {
        let meminfo = "MemTotal:       32 kB\nMemAvailable:    2097152 kB\nBuffers: 1 kB\n";
        assert_eq!(available_mib(meminfo), Some(2048));
        assert_eq!(available_mib(""), None);
        assert_eq!(limit_mib("1073741824\n"), Some(1024));
        assert_eq!(limit_mib("max\n"), None);
    }

    #[test]
    fn the_smaller_of_both_is_the_limit() {
        let flag = "--pool-mib";
        assert!(check(1024, Some(2048), Some(1024), flag).is_ok());
        assert!(check(u64::MAX, None, None, flag).is_ok());
        let e = check(1025, Some(2048), Some(1024), flag).unwrap_err().to_string();
        assert!(e.starts_with("config: "), "{e}");
        assert!(e.contains("asked_mib=1025, available_mib=1024"), "{e}");
        assert!(e.contains("fix: give a smaller --pool-mib, or"), "{e}");
        assert!(check(2049, Some(2048), None, flag).is_err());
    }
}
