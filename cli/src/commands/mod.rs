//! One file for each command, and what they share: who speaks, and when a process ends.

pub(crate) mod bench;
pub(crate) mod bootstrap;
pub(crate) mod ca;
pub(crate) mod demo;
pub(crate) mod emulated_nic;
pub(crate) mod explain;
pub(crate) mod plan;
pub(crate) mod rails;
pub(crate) mod replay;
mod values;
pub(crate) mod worker;

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use kvlane_proto::{Error, ErrorKind, Identity, Result, Role};
use kvlane_transport::quic::Security;
use kvlane_transport::quic::tls::identity_of;
use tokio::io::AsyncReadExt;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// How a process proves who it is.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct SecurityArgs {
    /// Directory with ca.pem, cert.pem and key.pem, as made by `kvlane ca`
    #[arg(long, value_name = "DIR", conflicts_with = "insecure")]
    certs: Option<PathBuf>,
    /// No certificates: anybody may say to be anybody
    #[arg(long)]
    insecure: bool,
    /// The cluster, with --insecure
    #[arg(long, default_value = "default", conflicts_with = "certs")]
    cluster: String,
}

impl SecurityArgs {
    /// Who this process is: the certificate says, or the flags.
    pub(crate) fn identity(
        &self,
        role: Role,
        name: &str,
        rank: u32,
    ) -> Result<(Security, Identity)> {
        let Some(dir) = &self.certs else {
            if !self.insecure {
                return Err(Error::new(
                    ErrorKind::Config,
                    "neither certificates nor --insecure are given",
                )
                .hint("give --certs DIR, or --insecure on one machine"));
            }
            return Ok((Security::Insecure, Identity::new(&self.cluster, role, name, rank)?));
        };
        let identity = identity_of(dir)?;
        if identity.role != role {
            return Err(Error::new(ErrorKind::Config, "the certificate is for another role")
                .with("found", &identity)
                .with("expected", role)
                .with("certs", dir.display())
                .hint(format!("issue one: kvlane ca issue --identity CLUSTER/{role}/NAME/0 …")));
        }
        Ok((Security::Mutual { dir: dir.clone() }, identity))
    }
}

/// When a long-running process ends by itself.
#[derive(clap::Args, Clone, Copy, Debug)]
pub(crate) struct EndArgs {
    /// End when standard input is closed, as if by SIGTERM: for a parent process that may die
    #[arg(long)]
    until_stdin_closes: bool,
}

impl EndArgs {
    /// Waits for SIGTERM, SIGINT or the end of standard input; a second signal from there on ends
    /// the process at once.
    pub(crate) async fn wait(self) -> Result<()> {
        let mut interrupt = Interrupt::listen()?;
        let stdin = async {
            if self.until_stdin_closes {
                let mut byte = [0; 64];
                let mut stdin = tokio::io::stdin();
                while stdin.read(&mut byte).await.is_ok_and(|n| n > 0) {}
            } else {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = interrupt.signal() => {}
            () = stdin => {}
        }
        tokio::spawn(async move {
            interrupt.signal().await;
            tracing::warn!("second signal: ending at once");
            std::process::exit(INTERRUPTED.into());
        });
        Ok(())
    }
}

/// SIGINT and SIGTERM.
pub(crate) struct Interrupt {
    term: Signal,
    int: Signal,
    last: Option<Instant>,
}

/// `timeout` and some shells send a signal to a process and then to its group.
const ONE_WISH: Duration = Duration::from_millis(200);

impl Interrupt {
    /// From here on, neither ends the process by itself.
    pub(crate) fn listen() -> Result<Self> {
        let failed = |e| Error::new(ErrorKind::Io, "cannot listen for signals").caused_by(e);
        Ok(Self {
            term: signal(SignalKind::terminate()).map_err(failed)?,
            int: signal(SignalKind::interrupt()).map_err(failed)?,
            last: None,
        })
    }
    /// Waits for the next one.
    async fn signal(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
        }
    }
    /// Waits for the user's next wish to end; several signals within [`ONE_WISH`] are one.
    pub(crate) async fn came(&mut self) {
        loop {
            self.signal().await;
            let last = self.last.replace(Instant::now());
            if last.is_none_or(|last| last.elapsed() > ONE_WISH) {
                return;
            }
        }
    }
}

/// How a command ends that was interrupted.
pub(crate) const INTERRUPTED: u8 = 130;

/// Writes to standard output. Whoever read it may have gone; that is no failure of what was done.
pub(crate) fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// The line on standard output by which a process says that it is ready, for whoever started it.
pub(crate) fn say_ready(fields: serde_json::Value) {
    say(&format!("{fields}\n"));
}
