//! The few things that are read out of a certificate: identity, validity, public key.
//!
//! Signatures, chains and usages are webpki's business. Validity times are read here because
//! webpki checks them without telling them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kvlane_proto::{Error, ErrorKind, Identity, Result};
use rustls::pki_types::CertificateDer;

/// When a certificate is valid, in seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Validity {
    pub(crate) not_before_s: u64,
    pub(crate) not_after_s: u64,
}

impl Validity {
    /// Whether more than half of its life is over.
    pub(crate) fn past_half(&self, now_s: u64) -> bool {
        now_s > self.not_before_s + (self.not_after_s.saturating_sub(self.not_before_s)) / 2
    }
}

/// Seconds since 1970.
pub(crate) fn wall_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

fn not_a_certificate(what: &str) -> Error {
    Error::new(ErrorKind::Config, format!("not a certificate: {what}"))
}

/// URI names of a certificate.
pub(crate) fn uris(cert: &CertificateDer<'_>) -> Result<Vec<String>> {
    let parsed = webpki::EndEntityCert::try_from(cert)
        .map_err(|e| not_a_certificate("it cannot be parsed").caused_by(e))?;
    Ok(parsed.valid_uri_names().map(String::from).collect())
}

/// The identity in a certificate: its only `kvlane://` URI.
///
/// # Errors
/// [`ErrorKind::Unauthorized`] naming the URIs found.
pub(crate) fn identity(cert: &CertificateDer<'_>) -> Result<Identity> {
    let uris = uris(cert)?;
    let mut ours = uris.iter().filter(|u| u.starts_with("kvlane://"));
    match (ours.next(), ours.next()) {
        (Some(uri), None) => Identity::from_uri(uri),
        (first, _) => Err(Error::new(
            ErrorKind::Unauthorized,
            match first {
                None => "certificate carries no kvlane identity",
                Some(_) => "certificate carries several kvlane identities",
            },
        )
        .with("found", uris.iter().take(8).cloned().collect::<Vec<_>>().join(" "))
        .with("expected", "one kvlane://cluster/role/instance/rank")
        .hint("issue it with `kvlane ca issue`, or put the URI into the subject alternative name")),
    }
}

/// The public key as it stands in the certificate (SubjectPublicKeyInfo).
pub(crate) fn public_key(cert: &CertificateDer<'_>) -> Result<Vec<u8>> {
    let parsed = webpki::EndEntityCert::try_from(cert)
        .map_err(|e| not_a_certificate("it cannot be parsed").caused_by(e))?;
    Ok(parsed.subject_public_key_info().as_ref().to_vec())
}

/// Reads the validity.
///
/// `Certificate ::= SEQ { TBSCertificate ::= SEQ { [0] version, serial INTEGER, algorithm SEQ,
/// issuer SEQ, validity SEQ { notBefore Time, notAfter Time } … } … }` (RFC 5280, 4.1).
pub(crate) fn validity(cert: &CertificateDer<'_>) -> Result<Validity> {
    read_validity(cert).ok_or_else(|| not_a_certificate("its validity cannot be read"))
}

const SEQUENCE: u8 = 0x30;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;

fn read_validity(der: &[u8]) -> Option<Validity> {
    let (tag, certificate, _) = element(der)?;
    (tag == SEQUENCE).then_some(())?;
    let (tag, mut rest, _) = element(certificate)?;
    (tag == SEQUENCE).then_some(())?;
    // An explicit version, then serial, algorithm, issuer.
    let skip = if rest.first() == Some(&0xA0) { 4 } else { 3 };
    for _ in 0..skip {
        rest = element(rest)?.2;
    }
    let (tag, validity, _) = element(rest)?;
    (tag == SEQUENCE).then_some(())?;
    let (from_tag, from, rest) = element(validity)?;
    let (to_tag, to, _) = element(rest)?;
    Some(Validity { not_before_s: time(from_tag, from)?, not_after_s: time(to_tag, to)? })
}

/// One DER element: tag, content, what follows.
fn element(der: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&tag, rest) = der.split_first()?;
    let (&first, mut rest) = rest.split_first()?;
    let mut length = usize::from(first);
    if first & 0x80 != 0 {
        let bytes = usize::from(first & 0x7F);
        (1..=4).contains(&bytes).then_some(())?;
        let (long, after) = rest.split_at_checked(bytes)?;
        length = long.iter().fold(0, |n, &b| n << 8 | usize::from(b));
        rest = after;
    }
    let (content, after) = rest.split_at_checked(length)?;
    Some((tag, content, after))
}

/// `YYMMDDHHMMSSZ` or `YYYYMMDDHHMMSSZ`.
fn time(tag: u8, text: &[u8]) -> Option<u64> {
    let digits = text.strip_suffix(b"Z")?;
    digits.iter().all(u8::is_ascii_digit).then_some(())?;
    let two = |at: usize| {
        digits.get(at..at + 2).map(|d| u64::from(d[0] - b'0') * 10 + u64::from(d[1] - b'0'))
    };
    let (year, at) = match (tag, digits.len()) {
        (UTC_TIME, 12) => {
            let y = two(0)?;
            (if y < 50 { 2000 + y } else { 1900 + y }, 2)
        }
        (GENERALIZED_TIME, 14) => (two(0)? * 100 + two(2)?, 4),
        _ => return None,
    };
    let (month, day) = (two(at)?, two(at + 2)?);
    let (hour, minute, second) = (two(at + 4)?, two(at + 6)?, two(at + 8)?);
    let sane = (1970..=9999).contains(&year)
        && (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24
        && minute < 60
        && second < 61;
    sane.then_some(())?;
    // Days since 1970-01-01, with years that begin in March so that the leap day comes last.
    let (y, m) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * y + y / 4 - y / 100 + y / 400 + (153 * m + 2) / 5 + day - 1;
    let days = days.checked_sub(719_468)?;
    Some(((days * 24 + hour) * 60 + minute) * 60 + second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_seconds_since_1970() {
        assert_eq!(time(UTC_TIME, b"700101000000Z"), Some(0));
        assert_eq!(time(UTC_TIME, b"000229120001Z"), Some(951_825_601));
        assert_eq!(time(GENERALIZED_TIME, b"20500101000000Z"), Some(2_524_608_000));
        assert_eq!(time(GENERALIZED_TIME, b"99991231235959Z"), Some(253_402_300_799));
        for bad in [&b"7001010000Z"[..], b"701301000000Z", b"70010100000xZ", b"", b"Z"] {
            assert_eq!(time(UTC_TIME, bad), None);
        }
    }

    #[test]
    fn hostile_der_is_refused() {
        for bad in [
            &[][..],
            &[0x30],
            &[0x30, 0x85, 1, 1, 1, 1, 1],
            &[0x30, 0x82, 0xFF],
            &[0x30, 2, 0x30, 0],
        ] {
            assert_eq!(read_validity(bad), None);
        }
    }

    #[test]
    fn validity_of_a_real_certificate_is_read_and_halved() {
        let mut params = rcgen::CertificateParams::default();
        // Before 2050 DER has two digits of the year, from then on four.
        params.not_before = rcgen::date_time_ymd(2020, 2, 29);
        params.not_after = rcgen::date_time_ymd(2060, 2, 28);
        let cert = params.self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap();
        let read = validity(cert.der()).unwrap();
        assert_eq!(read, Validity { not_before_s: 1_582_934_400, not_after_s: 2_845_152_000 });
        let half = 1_582_934_400 + (2_845_152_000 - 1_582_934_400) / 2;
        assert!(!read.past_half(half) && read.past_half(half + 1));
        // Cut anywhere, it is refused and nothing panics.
        for end in 0..cert.der().len() {
            assert_eq!(read_validity(&cert.der()[..end]), None);
        }
    }

    #[test]
    fn exactly_one_identity_must_be_in_a_certificate() {
        let with = |uris: &[&str]| {
            let mut params = rcgen::CertificateParams::default();
            params.subject_alt_names =
                uris.iter().map(|uri| rcgen::SanType::URI((*uri).try_into().unwrap())).collect();
            let cert = params.self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap();
            identity(cert.der())
        };
        let one = "kvlane://c1/decode/d-0/3";
        assert_eq!(with(&["spiffe://x/y", one]).unwrap().to_uri(), one);
        for bad in [&[][..], &["spiffe://x/y"], &[one, "kvlane://c1/admin/d-0/3"]] {
            assert_eq!(with(bad).unwrap_err().kind(), ErrorKind::Unauthorized);
        }
        assert_eq!(with(&["kvlane://c1/king/d-0/3"]).unwrap_err().kind(), ErrorKind::Malformed);
    }
}
