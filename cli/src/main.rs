//! The `kvlane` binary: every part of kvlane from the command line.
//!
//! `demo` starts a whole cluster of processes on this machine and replays requests through it;
//! `bootstrap`, `worker` and `replay` are its parts; `ca` makes certificates. [`load`] says what is
//! replayed and what each byte must be, [`standin`] stands in for model servers, [`report`] counts,
//! [`chaos`] breaks things meanwhile.
//! [`mod@bench`] measures engines by themselves. `explain` says what the machine has.

mod bench;
mod chaos;
mod cluster;
mod commands;
mod counters;
mod load;
mod memory;
mod proc;
mod report;
mod scratch;
mod standin;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use kvlane_proto::{Error, ErrorKind};

#[derive(Parser)]
#[command(
    name = "kvlane",
    version,
    about = "Moves KV-cache pages from prefill to decode workers, safely"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// A whole cluster on this machine, every page checked
    Demo(commands::demo::Args),
    /// The bootstrap service
    Bootstrap(commands::bootstrap::Args),
    /// A prefill or decode worker with a stand-in for its model server
    Worker(Box<commands::worker::Args>),
    /// A router that replays requests through a running cluster
    Replay(commands::replay::Args),
    /// What an engine reaches on this machine, and what the machine itself does
    Bench(commands::bench::Args),
    /// The receiving process of `bench`, which starts it
    #[command(hide = true)]
    BenchReceiver,
    /// What one instance would send to another: pairs of ranks, writes, bytes, or why not
    Plan(commands::plan::Args),
    /// Which NIC carries which GPU's pages, and why; or what a message means
    Explain(Box<commands::explain::Args>),
    /// An emulated RDMA NIC, to test with: one process is one NIC of this machine
    EmulatedNic(commands::emulated_nic::Args),
    /// A worker process of `bench --rooms` and `--rest`, which starts it
    #[command(hide = true)]
    BenchWorker(bench::control::worker::Args),
    /// Certificates: make a CA, issue, renew
    #[command(subcommand)]
    Ca(commands::ca::Command),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    log(!matches!(
        cli.command,
        Command::Bootstrap(_) | Command::Worker(_) | Command::EmulatedNic(_)
    ));
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(e) => {
            return fail(&Error::new(ErrorKind::Io, "no runtime").caused_by(e));
        }
    };
    let end = runtime.block_on(async {
        match cli.command {
            Command::Demo(args) => commands::demo::run(args).await,
            Command::Bootstrap(args) => commands::bootstrap::run(args).await,
            Command::Worker(args) => commands::worker::run(*args).await,
            Command::Replay(args) => commands::replay::run(args).await,
            Command::Bench(args) => commands::bench::run(args).await,
            Command::BenchReceiver => bench::receiver::run(),
            Command::Plan(args) => commands::plan::run(&args),
            Command::Explain(args) => commands::explain::run(&args),
            Command::EmulatedNic(args) => commands::emulated_nic::run(args).await,
            Command::BenchWorker(args) => bench::control::worker::run(args).await,
            Command::Ca(command) => commands::ca::run(command),
        }
    });
    // Work that blocks (checking pages of a room nobody waits for) must not hold the exit up.
    runtime.shutdown_background();
    match end {
        Ok(code) => code,
        Err(e) => fail(&e),
    }
}

fn fail(e: &Error) -> ExitCode {
    eprintln!("kvlane: {e}");
    ExitCode::FAILURE
}

/// Logs go to standard error; `RUST_LOG` says how much.
fn log(quiet: bool) {
    let default = if quiet { "error" } else { "info" };
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(default));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .init();
}
