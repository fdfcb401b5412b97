//! What a flag's value must look like, said in the user's words. Pure; clap adds flag and value.

use std::net::{Ipv4Addr, Ipv6Addr};

/// A finite number above 0.
pub(super) fn above_zero(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(n) if n > 0.0 && n.is_finite() => Ok(n),
        Ok(_) => Err("must be above 0, and finite".into()),
        Err(_) => Err("must be above 0: expected a number such as 0.5".into()),
    }
}

/// `host:port`, where the host is a name, an IPv4 address, or an IPv6 address in brackets.
pub(super) fn host_port(text: &str) -> Result<String, String> {
    let wrong = || "expected host:port, such as 10.0.0.1:7400 or [fd00::1]:7400".to_string();
    let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
    let port_good =
        port.bytes().all(|b| b.is_ascii_digit()) && port.parse().is_ok_and(|p: u16| p > 0);
    let host_good = match host.strip_prefix('[').and_then(|h| h.strip_suffix(']')) {
        Some(v6) => v6.parse::<Ipv6Addr>().is_ok(),
        None => is_name(host),
    };
    if port_good && host_good { Ok(text.into()) } else { Err(wrong()) }
}

/// A host's name or IPv4 address. What has digits and dots only must be an address.
fn is_name(host: &str) -> bool {
    if host.bytes().all(|b| b.is_ascii_digit() || b == b'.') {
        return host.parse::<Ipv4Addr>().is_ok();
    }
    let label = |l: &str| {
        (1..=63).contains(&l.len())
            && !l.starts_with('-')
            && l.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    };
    host.len() <= 253 && host.strip_suffix('.').unwrap_or(host).split('.').all(label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_above_zero_and_finite() {
        assert_eq!(above_zero("0.5"), Ok(0.5));
        assert_eq!(above_zero("1e3"), Ok(1000.0));
        for bad in ["0", "-0", "-1", "nan", "inf", "-inf", "1e999", "x", ""] {
            assert!(above_zero(bad).unwrap_err().contains("must be above 0"), "{bad}");
        }
    }

    #[test]
    fn hosts_are_names_or_addresses_and_have_a_port() {
        for good in [
            "localhost:1",
            "10.0.0.1:7400",
            "[::1]:65535",
            "boot-0.kvlane.svc.cluster.local:7400",
            "my_host.:80",
        ] {
            assert_eq!(host_port(good).as_deref(), Ok(good));
        }
        for bad in [
            "",
            "host",
            "host:",
            ":7400",
            "host:0",
            "host:65536",
            "host:+80",
            "::1:7400",
            "[::1]",
            "[host]:1",
            "300.0.0.1:1",
            "10.0.0:1",
            "http://host:80",
            "a b:1",
            "-h:1",
            "a..b:1",
        ] {
            assert!(host_port(bad).unwrap_err().contains("expected host:port"), "{bad}");
        }
    }
}
