//! `kvlane bootstrap`: the service that workers register at and routers ask.

use std::net::SocketAddr;
use std::process::ExitCode;

use kvlane_bootstrap::{Bootstrap, BootstrapConfig};
use kvlane_proto::{Result, Role};

use super::{EndArgs, SecurityArgs, say_ready};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where workers and routers reach it (UDP)
    #[arg(long, default_value = "127.0.0.1:7400")]
    quic: SocketAddr,
    #[command(flatten)]
    security: SecurityArgs,
    #[command(flatten)]
    end: EndArgs,
}

pub(crate) async fn run(args: Args) -> Result<ExitCode> {
    let (security, identity) = args.security.identity(Role::Service, "bootstrap", 0)?;
    let mut config = BootstrapConfig::new(args.quic, security, &identity.cluster);
    config.instance.clone_from(&identity.instance);
    let service = Bootstrap::start(config)?;
    say_ready(serde_json::json!({ "ready": "bootstrap", "quic": service.local_addr() }));
    args.end.wait().await?;
    service.shutdown();
    Ok(ExitCode::SUCCESS)
}
