//! A small certificate authority, for clusters that have no PKI of their own.
//!
//! A CA is a directory with `ca.pem` and `ca-key.pem`; what it issues is a directory with `ca.pem`,
//! `cert.pem` and `key.pem`, which is what [`super::Security::Mutual`] reads. Certificates begin an
//! hour ago, so that a worker whose clock is a little behind accepts them. Keys are readable by
//! their owner only; every file appears whole, under its name, or not at all.

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use kvlane_proto::{Error, ErrorKind, Identity, Result, Role};
use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PublicKeyData, SanType,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use super::tls::{CA_FILE, CERT_FILE, DNS_NAME, KEY_FILE};
use super::x509;

/// The CA's key, beside [`CA_FILE`].
pub const CA_KEY_FILE: &str = "ca-key.pem";
/// Longest life of a certificate.
pub const VALID_DAYS_MAX: u32 = 3650;

const CA_VALID_DAYS: u32 = VALID_DAYS_MAX;
const BACKDATE: Duration = Duration::from_secs(3600);
const CA_URI: &str = "kvlane-ca://";

/// Makes a CA for a cluster in a directory that does not hold one yet.
///
/// # Errors
/// [`ErrorKind::Config`] if there is a CA already; [`ErrorKind::Io`].
pub fn create_ca(dir: &Path, cluster: &str) -> Result<()> {
    // The cluster's name must be good for the identities to be issued.
    Identity::new(cluster, Role::Admin, "ca", 0)?;
    for file in [CA_FILE, CA_KEY_FILE] {
        if dir.join(file).exists() {
            return Err(Error::new(ErrorKind::Config, "there is a CA already")
                .with("found", dir.join(file).display())
                .hint("choose another directory; a new CA does not recognise old certificates"));
        }
    }
    let key = KeyPair::generate().map_err(failed)?;
    let params = ca_params(cluster)?;
    let cert = params.self_signed(&key).map_err(failed)?;
    make_dir(dir)?;
    write_file(&dir.join(CA_KEY_FILE), key.serialize_pem().as_bytes(), 0o600)?;
    write_file(&dir.join(CA_FILE), cert.pem().as_bytes(), 0o644)
}

/// Issues a certificate for an identity of the CA's cluster into a directory without one.
///
/// # Errors
/// [`ErrorKind::Config`] if `ca_dir` holds no CA, the cluster is another, the days are out of range
/// or `out_dir` holds a certificate already; [`ErrorKind::Io`].
pub fn issue(ca_dir: &Path, out_dir: &Path, identity: &Identity, valid_days: u32) -> Result<()> {
    for file in [CERT_FILE, KEY_FILE] {
        if out_dir.join(file).exists() {
            return Err(Error::new(ErrorKind::Config, "there is a certificate already")
                .with("found", out_dir.join(file).display())
                .hint("renew it, or choose another directory"));
        }
    }
    sign(ca_dir, out_dir, identity, valid_days)
}

/// Replaces the certificate and key in a directory by new ones of the same identity. Running
/// endpoints use them from the next connection on.
///
/// # Errors
/// As [`issue`]; [`ErrorKind::Config`] if there is no certificate to renew.
pub fn renew(ca_dir: &Path, cert_dir: &Path, valid_days: u32) -> Result<Identity> {
    let path = cert_dir.join(CERT_FILE);
    let cert = CertificateDer::from_pem_slice(&read_file(&path)?).map_err(|e| {
        Error::new(ErrorKind::Config, "no certificate to renew")
            .with("file", path.display())
            .hint("issue one first")
            .caused_by(e)
    })?;
    let identity = x509::identity(&cert)?;
    // Peers of the old authority would refuse the new certificate, and the other way round.
    let (old, new) = (cert_dir.join(CA_FILE), ca_dir.join(CA_FILE));
    if read_file(&old)? != read_file(&new)? {
        return Err(Error::new(ErrorKind::Config, "the certificate is of another authority")
            .with("certs", old.display())
            .with("ca", new.display())
            .hint("renew with the CA that issued it, or issue into a new directory"));
    }
    sign(ca_dir, cert_dir, &identity, valid_days)?;
    Ok(identity)
}

fn sign(ca_dir: &Path, out_dir: &Path, identity: &Identity, valid_days: u32) -> Result<()> {
    identity.check()?;
    if valid_days == 0 || valid_days > VALID_DAYS_MAX {
        return Err(Error::new(ErrorKind::Config, "certificate life is out of range")
            .with("asked_days", valid_days)
            .with("expected", format!("1 to {VALID_DAYS_MAX}"))
            .hint("give --days in that range; certificates can be renewed at any time"));
    }
    let (ca_pem, cluster, issuer) = load_ca(ca_dir)?;
    if cluster != identity.cluster {
        return Err(Error::new(ErrorKind::Config, "the CA is of another cluster")
            .with("ca", cluster)
            .with("asked", identity)
            .hint("a CA signs for one cluster; create one for this cluster"));
    }
    let mut params = CertificateParams::default();
    params.subject_alt_names =
        vec![SanType::DnsName(ia5(DNS_NAME)?), SanType::URI(ia5(&identity.to_uri())?)];
    params.distinguished_name = name(&identity.to_string());
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    validity(&mut params, valid_days);
    let key = KeyPair::generate().map_err(failed)?;
    let cert = params.signed_by(&key, &issuer).map_err(failed)?;
    make_dir(out_dir)?;
    // A reader that sees the new key with the old certificate finds that they do not match and
    // keeps what it has.
    write_file(&out_dir.join(CA_FILE), &ca_pem, 0o644)?;
    write_file(&out_dir.join(KEY_FILE), key.serialize_pem().as_bytes(), 0o600)?;
    write_file(&out_dir.join(CERT_FILE), cert.pem().as_bytes(), 0o644)
}

fn load_ca(dir: &Path) -> Result<(Vec<u8>, String, Issuer<'static, KeyPair>)> {
    let not_a_ca = |why: &str| {
        Error::new(ErrorKind::Config, format!("not a kvlane CA: {why}"))
            .with("dir", dir.display())
            .with("expected", format!("{CA_FILE} and {CA_KEY_FILE}"))
            .hint("create one with `kvlane ca create`")
    };
    let (cert_path, key_path) = (dir.join(CA_FILE), dir.join(CA_KEY_FILE));
    if !cert_path.exists() || !key_path.exists() {
        return Err(not_a_ca("a file is missing"));
    }
    let pem = read_file(&cert_path)?;
    let cert = CertificateDer::from_pem_slice(&pem)
        .map_err(|e| not_a_ca("its certificate cannot be read").caused_by(e))?;
    let key = String::from_utf8(read_file(&key_path)?)
        .ok()
        .and_then(|text| KeyPair::from_pem(&text).ok())
        .ok_or_else(|| not_a_ca("its key cannot be read"))?;
    if x509::public_key(&cert)? != key.subject_public_key_info() {
        return Err(not_a_ca("its key belongs to another certificate"));
    }
    let cluster = x509::uris(&cert)?
        .into_iter()
        .find_map(|uri| uri.strip_prefix(CA_URI).map(String::from))
        .ok_or_else(|| not_a_ca("its certificate names no cluster"))?;
    Ok((pem, cluster.clone(), Issuer::new(ca_params(&cluster)?, key)))
}

/// The CA's own certificate. An issuer is made from it again for each signature: all that is taken
/// over is the subject's name, which must be the same as in `ca.pem`.
fn ca_params(cluster: &str) -> Result<CertificateParams> {
    let mut params = CertificateParams::default();
    params.distinguished_name = name(&format!("kvlane CA {cluster}"));
    params.subject_alt_names = vec![SanType::URI(ia5(&format!("{CA_URI}{cluster}"))?)];
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    validity(&mut params, CA_VALID_DAYS);
    Ok(params)
}

fn validity(params: &mut CertificateParams, days: u32) {
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    let now = Duration::from_secs(x509::wall_s());
    params.not_before = epoch + now.saturating_sub(BACKDATE);
    params.not_after = epoch + now + Duration::from_secs(u64::from(days) * 24 * 3600);
}

fn name(common: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    // RFC 5280 allows 64 bytes; the identity proper is the URI.
    name.push(DnType::CommonName, common.chars().take(64).collect::<String>());
    name
}

fn ia5(text: &str) -> Result<Ia5String> {
    Ia5String::try_from(text).map_err(failed)
}

fn failed(e: rcgen::Error) -> Error {
    Error::new(ErrorKind::Internal, "certificate cannot be made").caused_by(e)
}

fn make_dir(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).map_err(|e| {
        Error::new(ErrorKind::Io, "directory cannot be made")
            .with("dir", dir.display())
            .caused_by(e)
    })
}

fn read_file(path: &Path) -> Result<Vec<u8>> {
    super::tls::read_small(path)
}

/// Writes a file under a temporary name and renames it into place.
pub(crate) fn write_file(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    let written = (|| {
        // A leftover of a killed process may have other rights.
        let _ = fs::remove_file(&temporary);
        let mut file =
            fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    })();
    written.map_err(|e| {
        let _ = fs::remove_file(&temporary);
        Error::new(ErrorKind::Io, "file cannot be written")
            .with("file", path.display())
            .caused_by(e)
    })
}
