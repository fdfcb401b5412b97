//! Who may speak: TLS 1.3 with certificates on both sides, read from files, followed as they change.
//!
//! A certificate carries its owner's identity as the URI `kvlane://cluster/role/instance/rank`, and
//! the constant DNS name `kvlane`, which is what a dialler asks for. So an address proves nothing
//! and a certificate everything. The files are looked at in each handshake: new connections use new
//! files, live ones stay as they are. A set of files that is broken is refused, and counted, and
//! the one before it stays in use. Sessions are never resumed, so that no handshake goes round the
//! certificate.

use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kvlane_proto::{Error, ErrorKind, Identity, Result};
use quinn::ConnectionError;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{ResolvesClientCert, Resumption, WebPkiServerVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{
    ClientHello, NoServerSessionStorage, ResolvesServerCert, WebPkiClientVerifier,
};
use rustls::sign::CertifiedKey;
use rustls::{DigitallySignedStruct, DistinguishedName, RootCertStore, SignatureScheme};

use super::x509::{self, Validity};

/// Application protocol of kvlane on QUIC.
pub const ALPN: &[u8] = b"kvlane/1";
/// The DNS name in every certificate.
pub const DNS_NAME: &str = "kvlane";
/// The CA's certificates.
pub const CA_FILE: &str = "ca.pem";
/// The own certificate, and chain if there is one.
pub const CERT_FILE: &str = "cert.pem";
/// Its key.
pub const KEY_FILE: &str = "key.pem";

/// Largest certificate or key file.
const FILE_BYTES_MAX: u64 = 256 << 10;

/// How peers are recognised.
#[derive(Clone, Debug)]
pub enum Security {
    /// Certificates on both sides.
    Mutual {
        /// Where [`CA_FILE`], [`CERT_FILE`] and [`KEY_FILE`] are.
        dir: PathBuf,
    },
    /// A throw-away certificate, nothing verified: a peer is who it says it is. For one machine and
    /// for tests; logged, and counted in `kvlane_insecure_endpoints`.
    Insecure,
}

/// The identity that the certificate in a directory carries.
///
/// # Errors
/// [`ErrorKind::Config`] naming the file.
pub fn identity_of(dir: &Path) -> Result<Identity> {
    Ok(Loaded::read(dir, &provider())?.identity)
}

/// Client and server configuration for a way to recognise peers.
///
/// # Errors
/// [`ErrorKind::Config`] if files are missing or wrong.
pub fn configs(security: &Security) -> Result<(rustls::ClientConfig, rustls::ServerConfig)> {
    let provider = provider();
    let client = rustls::ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(tls_failed)?;
    let server = rustls::ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(tls_failed)?;
    let (mut client, mut server) = match security {
        Security::Mutual { dir } => {
            let files = Arc::new(Files::open(dir, provider)?);
            (
                client
                    .dangerous()
                    .with_custom_certificate_verifier(Arc::clone(&files) as _)
                    .with_client_cert_resolver(Arc::clone(&files) as _),
                server.with_client_cert_verifier(Arc::clone(&files) as _).with_cert_resolver(files),
            )
        }
        Security::Insecure => {
            let made = rcgen::generate_simple_self_signed([DNS_NAME.to_string()])
                .map_err(|e| Error::new(ErrorKind::Internal, "no certificate").caused_by(e))?;
            let key = PrivateKeyDer::Pkcs8(made.signing_key.serialize_der().into());
            (
                client
                    .dangerous()
                    .with_custom_certificate_verifier(Arc::new(Anybody(provider)))
                    .with_no_client_auth(),
                server
                    .with_no_client_auth()
                    .with_single_cert(vec![made.cert.der().clone()], key)
                    .map_err(tls_failed)?,
            )
        }
    };
    client.alpn_protocols = vec![ALPN.to_vec()];
    client.resumption = Resumption::disabled();
    client.enable_early_data = false;
    server.alpn_protocols = vec![ALPN.to_vec()];
    server.session_storage = Arc::new(NoServerSessionStorage {});
    server.send_tls13_tickets = 0;
    server.max_early_data_size = 0;
    Ok((client, server))
}

/// Named here, so that a process that also links another provider is not asked to choose.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn tls_failed(e: rustls::Error) -> Error {
    Error::new(ErrorKind::Config, "TLS cannot be set up").caused_by(e)
}

/// What to do about a handshake that failed over certificates, by its TLS alert (RFC 8446, 6.2).
pub(super) fn fix_of(reason: &ConnectionError) -> Option<&'static str> {
    const EXPIRED: u64 = 45;
    const UNKNOWN_CA: u64 = 48;
    // What comes instead if the two authorities have one name.
    const DECRYPT_ERROR: u64 = 51;
    const CERTIFICATE_REQUIRED: u64 = 116;
    let (code, by_peer) = match reason {
        ConnectionError::ConnectionClosed(close) => (close.error_code, true),
        ConnectionError::TransportError(e) => (e.code, false),
        _ => return None,
    };
    // QUIC adds 0x100 to alerts (RFC 9001, 4.8).
    match (u64::from(code).checked_sub(0x100)?, by_peer) {
        (CERTIFICATE_REQUIRED, true) => {
            Some("this service wants certificates: give --certs instead of --insecure")
        }
        (CERTIFICATE_REQUIRED, false) => {
            Some("the other side has no certificate: start it with --certs instead of --insecure")
        }
        (UNKNOWN_CA | DECRYPT_ERROR, true) => Some(
            "this side's certificate is of another authority, or this side was started with \
             --insecure: use certificates issued by one CA",
        ),
        (UNKNOWN_CA | DECRYPT_ERROR, false) => Some(
            "the other side's certificate is of another authority, or it was started with \
             --insecure: use certificates issued by one CA",
        ),
        (EXPIRED, true) => Some("this certificate has expired: renew it with `kvlane ca renew`"),
        (EXPIRED, false) => {
            Some("the other side's certificate has expired: renew it with `kvlane ca renew`")
        }
        _ => None,
    }
}

/// Reads a file that ought to be small.
pub(crate) fn read_small(path: &Path) -> Result<Vec<u8>> {
    let bad = |what: &str| {
        Error::new(ErrorKind::Config, format!("file {what}"))
            .with("file", path.display())
            .hint("a certificate directory holds ca.pem, cert.pem and key.pem; see `kvlane ca`")
    };
    let file = fs::File::open(path).map_err(|e| bad("cannot be opened").caused_by(e))?;
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| bad("cannot be read").caused_by(e))?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(bad("is too long").with("limit_bytes", FILE_BYTES_MAX));
    }
    Ok(bytes)
}

/// What tells one state of a file from another. Files that are renamed into place differ in inode
/// even when they are as long and as old.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp([(u64, i64, i64, u64); 3]);

impl Stamp {
    fn of(dir: &Path) -> Self {
        Self([CA_FILE, CERT_FILE, KEY_FILE].map(|file| match fs::metadata(dir.join(file)) {
            Ok(m) => (m.len(), m.mtime(), m.mtime_nsec(), m.ino()),
            Err(_) => (0, 0, 0, 0),
        }))
    }
}

/// One complete set of files.
#[derive(Debug)]
struct Loaded {
    identity: Identity,
    own: Arc<CertifiedKey>,
    servers: Arc<WebPkiServerVerifier>,
    clients: Arc<dyn ClientCertVerifier>,
    validity: Validity,
    warned: AtomicBool,
}

impl Loaded {
    fn read(dir: &Path, provider: &Arc<CryptoProvider>) -> Result<Self> {
        let certs = |file: &str| -> Result<Vec<CertificateDer<'static>>> {
            let path = dir.join(file);
            let certs = CertificateDer::pem_slice_iter(&read_small(&path)?)
                .collect::<Result<Vec<_>, _>>()
                .map_err(|e| broken(&path).caused_by(e))?;
            if certs.is_empty() { Err(broken(&path)) } else { Ok(certs) }
        };
        let mut roots = RootCertStore::empty();
        for ca in certs(CA_FILE)? {
            roots.add(ca).map_err(|e| broken(&dir.join(CA_FILE)).caused_by(e))?;
        }
        let chain = certs(CERT_FILE)?;
        let key_path = dir.join(KEY_FILE);
        let key = PrivateKeyDer::from_pem_slice(&read_small(&key_path)?)
            .map_err(|e| broken(&key_path).caused_by(e))?;
        let identity = x509::identity(&chain[0])?;
        let validity = x509::validity(&chain[0])?;
        let own = CertifiedKey::from_der(chain, key, provider)
            .map_err(|e| broken(&key_path).hint("key and certificate must match").caused_by(e))?;
        let roots = Arc::new(roots);
        let failed = |e| {
            Error::new(ErrorKind::Config, "CA cannot be used")
                .with("file", dir.join(CA_FILE).display())
                .with("found", e)
        };
        let servers =
            WebPkiServerVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(provider))
                .build()
                .map_err(failed)?;
        let clients = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(provider))
            .build()
            .map_err(failed)?;
        let warned = AtomicBool::new(false);
        Ok(Self { identity, own: Arc::new(own), servers, clients, validity, warned })
    }

    fn warn_past_half(&self, dir: &Path) {
        if self.validity.past_half(x509::wall_s()) && !self.warned.swap(true, Ordering::Relaxed) {
            metrics::counter!("kvlane_certificate_half_life_total").increment(1);
            tracing::warn!(
                identity = %self.identity,
                dir = %dir.display(),
                left_s = self.validity.not_after_s.saturating_sub(x509::wall_s()),
                "certificate is past half of its life; renew it"
            );
        }
    }
}

fn broken(path: &Path) -> Error {
    Error::new(ErrorKind::Config, "file holds nothing usable")
        .with("file", path.display())
        .with("expected", "PEM")
}

/// The files of a directory, as they are now.
#[derive(Debug)]
struct Files {
    dir: PathBuf,
    provider: Arc<CryptoProvider>,
    schemes: Vec<SignatureScheme>,
    state: Mutex<(Stamp, Arc<Loaded>)>,
}

impl Files {
    fn open(dir: &Path, provider: Arc<CryptoProvider>) -> Result<Self> {
        // The stamp is taken first: a change while reading is seen as a change later.
        let stamp = Stamp::of(dir);
        let loaded = Arc::new(Loaded::read(dir, &provider)?);
        loaded.warn_past_half(dir);
        let schemes = provider.signature_verification_algorithms.supported_schemes();
        Ok(Self { dir: dir.into(), provider, schemes, state: Mutex::new((stamp, loaded)) })
    }

    /// What is in force, after a look at the files.
    fn current(&self) -> Arc<Loaded> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let stamp = Stamp::of(&self.dir);
        if stamp != state.0 {
            // A broken state is looked at once, not in every handshake.
            state.0 = stamp;
            match self.reload(&state.1.identity) {
                Ok(loaded) => {
                    metrics::counter!("kvlane_certificate_reloads_total", "outcome" => "new")
                        .increment(1);
                    tracing::info!(identity = %loaded.identity, "certificate reloaded");
                    state.1 = Arc::new(loaded);
                }
                Err(e) => {
                    metrics::counter!("kvlane_certificate_reloads_total", "outcome" => "broken")
                        .increment(1);
                    tracing::warn!(dir = %self.dir.display(), "new certificate refused, old one kept: {e}");
                }
            }
        }
        state.1.warn_past_half(&self.dir);
        Arc::clone(&state.1)
    }

    fn reload(&self, identity: &Identity) -> Result<Loaded> {
        let loaded = Loaded::read(&self.dir, &self.provider)?;
        if loaded.identity != *identity {
            return Err(Error::new(
                ErrorKind::IdentityMismatch,
                "identity changed under a running process",
            )
            .with("found", &loaded.identity)
            .with("expected", identity)
            .hint("restart the process to change who it is"));
        }
        Ok(loaded)
    }
}

impl ResolvesServerCert for Files {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.current().own))
    }
}

impl ResolvesClientCert for Files {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.current().own))
    }
    fn has_certs(&self) -> bool {
        true
    }
}

impl ServerCertVerifier for Files {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let files = self.current();
        files.servers.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }
    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify12(&self.provider, message, cert, dss)
    }
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify13(&self.provider, message, cert, dss)
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes.clone()
    }
}

impl ClientCertVerifier for Files {
    // No hints: a dialler has one certificate.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }
    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.current().clients.verify_client_cert(end_entity, intermediates, now)
    }
    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify12(&self.provider, message, cert, dss)
    }
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify13(&self.provider, message, cert, dss)
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes.clone()
    }
}

fn verify12(
    provider: &CryptoProvider,
    message: &[u8],
    cert: &CertificateDer<'_>,
    dss: &DigitallySignedStruct,
) -> Result<HandshakeSignatureValid, rustls::Error> {
    let algorithms = &provider.signature_verification_algorithms;
    rustls::crypto::verify_tls12_signature(message, cert, dss, algorithms)
}

fn verify13(
    provider: &CryptoProvider,
    message: &[u8],
    cert: &CertificateDer<'_>,
    dss: &DigitallySignedStruct,
) -> Result<HandshakeSignatureValid, rustls::Error> {
    let algorithms = &provider.signature_verification_algorithms;
    rustls::crypto::verify_tls13_signature(message, cert, dss, algorithms)
}

/// Accepts every server; for [`Security::Insecure`] only.
#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }
    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify12(&self.0, message, cert, dss)
    }
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify13(&self.0, message, cert, dss)
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn closed(code: quinn::TransportErrorCode) -> ConnectionError {
        ConnectionError::ConnectionClosed(quinn::ConnectionClose {
            error_code: code,
            frame_type: None,
            reason: Vec::new().into(),
        })
    }

    #[test]
    fn failed_handshakes_say_what_to_do() {
        let fix = |alert| fix_of(&closed(quinn::TransportErrorCode::crypto(alert)));
        assert!(fix(116).is_some_and(|f| f.contains("give --certs instead of --insecure")));
        assert!(fix(48).is_some_and(|f| f.contains("issued by one CA")));
        assert_eq!(fix(48), fix(51));
        assert!(fix(45).is_some_and(|f| f.contains("kvlane ca renew")));
        assert_eq!(fix(80), None);
        assert_eq!(fix_of(&closed(quinn::TransportErrorCode::NO_ERROR)), None);
        assert_eq!(fix_of(&ConnectionError::TimedOut), None);
    }
}
