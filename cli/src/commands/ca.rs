//! `kvlane ca`: certificates of a cluster.

use std::path::PathBuf;
use std::process::ExitCode;

use kvlane_proto::{Identity, Result};
use kvlane_transport::quic::ca;

#[derive(clap::Subcommand)]
pub(crate) enum Command {
    /// Make a certificate authority
    Create {
        /// Where its files go; must not exist or be empty
        #[arg(long, value_name = "DIR")]
        dir: PathBuf,
        /// The cluster that it is for
        #[arg(long, default_value = "default")]
        cluster: String,
    },
    /// Issue a certificate for one worker, router, admin or service
    Issue {
        /// The authority's directory
        #[arg(long, value_name = "DIR")]
        ca: PathBuf,
        /// Where the certificate's files go
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// cluster/role/instance/rank, for instance default/prefill/p0/0
        #[arg(long)]
        identity: Identity,
        /// Days until it expires
        #[arg(long, default_value_t = 90)]
        days: u32,
    },
    /// Issue a certificate again for whom it is; running processes take it up by themselves
    Renew {
        /// The authority's directory
        #[arg(long, value_name = "DIR")]
        ca: PathBuf,
        /// The certificate's directory
        #[arg(long, value_name = "DIR")]
        certs: PathBuf,
        /// Days until it expires
        #[arg(long, default_value_t = 90)]
        days: u32,
    },
}

pub(crate) fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Create { dir, cluster } => {
            ca::create_ca(&dir, &cluster)?;
            println!("made a certificate authority for cluster {cluster} in {}", dir.display());
        }
        Command::Issue { ca, out, identity, days } => {
            ca::issue(&ca, &out, &identity, days)?;
            println!("issued {identity} in {}", out.display());
        }
        Command::Renew { ca, certs, days } => {
            let identity = ca::renew(&ca, &certs, days)?;
            println!("renewed {identity} in {}", certs.display());
        }
    }
    Ok(ExitCode::SUCCESS)
}
