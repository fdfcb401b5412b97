//! `kvlane emulated-nic`: a NIC that is a process, for tests; and what it has done, and what is to go
//! wrong with it.

use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;
use kvlane_proto::{Error, ErrorKind, Result};
use kvlane_transport::emulated::Config;
use kvlane_transport::emulated::client::Hca;
use kvlane_transport::emulated::faults::{Fault, KNOWN};
use kvlane_transport::emulated::serve::{End, Nic, Stop};
use kvlane_transport::sys::unix::Name;

use super::{EndArgs, say, say_ready};

/// How the process ends when a fault kills it: nobody is told, nothing is tidied up.
const KILLED: i32 = 70;
/// How often a followed trace is asked for more.
const FOLLOW: Duration = Duration::from_millis(200);

#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// Where it listens: @NAME, or a file
    #[arg(long, value_name = "NAME", required = true)]
    socket: Option<Name>,
    /// What it is called; the last part of its socket's name unless said
    #[arg(long)]
    name: Option<String>,
    /// A fault from the start, such as 'delay us=500' or 'nak syndrome=0x15 skip=9'; several times
    #[arg(long, value_name = "FAULT")]
    fault: Vec<Fault>,
    /// How long an entry waits for the other side before it is sent again
    #[arg(long, value_name = "MS", default_value_t = 67)]
    ack_timeout_ms: u64,
    /// How often it is sent again before it fails
    #[arg(long, default_value_t = 3)]
    retries: u32,
    /// How long a write with an immediate waits for a receive before it is sent again
    #[arg(long, value_name = "MS", default_value_t = 10)]
    rnr_delay_ms: u64,
    /// How often it is sent again before it fails
    #[arg(long, default_value_t = 2)]
    rnr_retries: u32,
    #[command(flatten)]
    end: EndArgs,
}

#[derive(Subcommand)]
enum Command {
    /// What it has counted, as one line of JSON
    Stats {
        #[command(flatten)]
        at: At,
    },
    /// What happened, one line an event
    Trace {
        #[command(flatten)]
        at: At,
        /// From this event on
        #[arg(long, default_value_t = 0)]
        from: u64,
        /// Go on until interrupted
        #[arg(long)]
        follow: bool,
    },
    /// Installs a fault and says its number
    #[command(after_help = format!("Faults: {KNOWN}; then pair=NUMBER or pid=PID, skip=N, times=N"))]
    Fault {
        #[command(flatten)]
        at: At,
        /// Such as 'hold-landing pair=66' or 'kill skip=100'
        fault: Fault,
    },
    /// Removes a fault and lets go what it holds
    Clear {
        #[command(flatten)]
        at: At,
        /// Its number; 0 is all of them
        id: u64,
    },
}

#[derive(clap::Args)]
struct At {
    /// Where the NIC listens
    #[arg(long, value_name = "NAME")]
    socket: Name,
}

impl At {
    fn open(&self) -> Result<Hca> {
        Hca::open(&self.socket)
    }
}

pub(crate) async fn run(args: Args) -> Result<ExitCode> {
    match args.command {
        None => serve(args).await?,
        Some(Command::Stats { at }) => {
            let stats = at.open()?.stats()?;
            say(&format!("{}\n", serde_json::json!(stats)));
        }
        Some(Command::Trace { at, mut from, follow }) => {
            let mut hca = at.open()?;
            loop {
                let (text, next) = hca.trace(from)?;
                say(&text);
                if text.is_empty() {
                    if !follow {
                        break;
                    }
                    tokio::time::sleep(FOLLOW).await;
                }
                from = next;
            }
        }
        Some(Command::Fault { at, fault }) => {
            let id = at.open()?.fault(&fault)?;
            say(&format!("{}\n", serde_json::json!({ "fault": id, "is": fault.to_string() })));
        }
        Some(Command::Clear { at, id }) => {
            let cleared = at.open()?.clear(id)?;
            say(&format!("{}\n", serde_json::json!({ "cleared": cleared })));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// What a NIC that listens there is called, unless somebody says otherwise.
fn name_of(socket: &Name) -> String {
    let text = socket.to_string();
    let last = text.rsplit(['@', '/']).find(|part| !part.is_empty());
    last.map_or_else(|| "emulated0".to_owned(), str::to_owned)
}

async fn serve(args: Args) -> Result<()> {
    let Some(socket) = args.socket else {
        return Err(Error::new(ErrorKind::Config, "no --socket").hint("--socket @NAME"));
    };
    let name = args.name.unwrap_or_else(|| name_of(&socket));
    let mut config = Config::new(&name);
    config.ack_timeout = Duration::from_millis(args.ack_timeout_ms);
    config.retries = args.retries;
    config.rnr_delay = Duration::from_millis(args.rnr_delay_ms);
    config.rnr_retries = args.rnr_retries;
    config.faults = args.fault;
    let nic = Nic::bind(socket, config)?;
    let ready = serde_json::json!({
        "ready": "emulated-nic",
        "socket": nic.socket().to_string(),
        "name": name,
        "guid": format!("{:016x}", nic.guid()),
    });
    let stop = Stop::new()?;
    let theirs = stop.clone();
    let thread = std::thread::Builder::new()
        .name("emulated-nic".into())
        .spawn(move || {
            if nic.serve(&theirs) == End::Killed {
                std::process::exit(KILLED);
            }
        })
        .map_err(|e| Error::new(ErrorKind::Io, "no thread for an emulated NIC").caused_by(e))?;
    say_ready(ready);
    args.end.wait().await?;
    stop.stop();
    thread.join().map_err(|_| Error::new(ErrorKind::Internal, "the emulated NIC panicked"))
}
