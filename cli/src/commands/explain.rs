//! `kvlane explain`: which NIC carries which GPU's pages, and why no other; and what a message means.
//!
//! In: sysfs or a copy of it, and wishes as a worker has them; or a line from a log. Out: GPUs, NICs,
//! ports and GIDs, distances, rails for each GPU and for host memory with a reason for every candidate.
//! Nothing is opened and nothing changed.

use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use kvlane_proto::{Error, ErrorKind, Result};
use kvlane_transport::devices::known_errors::{self, Known};
use kvlane_transport::devices::{
    Choice, Gpu, Machine, Nic, PathClass, Port, Sysfs, Target, Wishes, choose,
};
use serde::Serialize;

use super::rails::RailArgs;
use super::say;
use crate::report::json_line;

/// How it ends when nothing is known of a message.
const UNKNOWN: u8 = 2;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// A copy of another machine's sysfs
    #[arg(long, value_name = "DIR", default_value = "/sys")]
    sysfs: PathBuf,
    /// Only this GPU: its place by PCI address, or that address
    #[arg(long, value_name = "N|PCI")]
    device: Option<String>,
    #[command(flatten)]
    rails: RailArgs,
    /// An address of the peer, which must be reachable
    #[arg(long, value_name = "ADDRESS")]
    peer: Option<IpAddr>,
    /// One JSON object as the last line, and no text
    #[arg(long)]
    json: bool,
    /// What a message in a log means, instead of all that
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["device", "RailArgs", "peer"])]
    error: Option<String>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    if let Some(text) = &args.error {
        return message(text, args.json);
    }
    if !args.sysfs.is_dir() {
        return Err(Error::new(ErrorKind::NotFound, "there is no such directory")
            .with("sysfs", args.sysfs.display())
            .hint("give a copy of a machine's /sys"));
    }
    let machine = Machine::read(&Sysfs::new(&args.sysfs));
    let wishes = args.rails.wishes(args.peer);
    let targets: Vec<Target> = match &args.device {
        Some(asked) => vec![Target::Gpu(machine.gpu(asked)?.pci.address)],
        None => {
            let gpus = machine.gpus.iter().map(|gpu| Target::Gpu(gpu.pci.address));
            gpus.chain([Target::Host]).collect()
        }
    };
    let choices = targets
        .into_iter()
        .map(|target| choose(&machine, target, &wishes))
        .collect::<Result<Vec<Choice>>>()?;
    if args.json {
        #[derive(Serialize)]
        struct Report<'a> {
            machine: &'a Machine,
            wishes: &'a Wishes,
            choices: &'a [Choice],
        }
        say(&json_line(&Report { machine: &machine, wishes: &wishes, choices: &choices })?);
    } else {
        say(&text(&machine, &choices));
    }
    // Somebody who names something wants to know whether it can be had.
    let wished = wishes != Wishes::default() || args.device.is_some();
    if wished {
        choices.iter().try_for_each(|choice| choice.require().map(|_| ()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn or_unknown<T: ToString>(value: &Option<T>) -> String {
    value.as_ref().map_or("unknown".into(), T::to_string)
}

/// For people.
fn text(machine: &Machine, choices: &[Choice]) -> String {
    let mut out = String::from("GPUs, by PCI address (CUDA's order may differ)\n");
    for gpu in &machine.gpus {
        let id = gpu.device_id.map_or(String::new(), |id| format!("  10de:{id:04x}"));
        out.push_str(&format!("  {gpu}  NUMA {}{id}\n", or_unknown(&gpu.pci.numa)));
    }
    if machine.gpus.is_empty() {
        out.push_str("  none\n");
    }
    out.push_str("\nNICs\n");
    for nic in &machine.nics {
        out.push_str(&nic_text(nic));
    }
    if machine.nics.is_empty() {
        out.push_str(
            "  none: nothing RDMA is on this machine, or in this container.\n  Pages go over TCP \
             between hosts (--engine tcp), through shared memory on one host (--engine shm),\n  or \
             over whichever of the two reaches the peer (--engine auto).\n",
        );
    }
    if !machine.gpus.is_empty() && !machine.nics.is_empty() {
        out.push_str(&paths(&machine.gpus, &machine.nics));
    }
    for note in &machine.notes {
        out.push_str(&format!("\nnote: {note}\n"));
    }
    if !machine.nics.is_empty() {
        out.push_str("\nRails\n");
        for choice in choices {
            let is_it = |gpu: &&Gpu| choice.target == Target::Gpu(gpu.pci.address);
            let gpu = machine.gpus.iter().find(is_it);
            let target = gpu.map_or(choice.target.to_string(), Gpu::to_string);
            out.push_str(&format!("  {target}\n"));
            for line in choice.to_string().lines().skip(1) {
                out.push_str(&format!("  {line}\n"));
            }
        }
        if choices.iter().all(|choice| choice.rails.is_empty()) {
            out.push_str("No NIC can be used as it is: until then --engine tcp, shm or auto.\n");
        }
    }
    out
}

fn nic_text(nic: &Nic) -> String {
    let place = nic.pci.as_ref().map_or("no PCI device (soft or virtual)".into(), |pci| {
        format!("{}  NUMA {}", pci.address, or_unknown(&pci.numa))
    });
    let more = [&nic.hca_type, &nic.board_id].into_iter().flatten();
    let firmware = nic.firmware.iter().map(|fw| format!("firmware {fw}"));
    let guid = nic.node_guid.iter().map(|guid| format!("guid {guid}"));
    let more: Vec<String> = more.cloned().chain(firmware).chain(guid).collect();
    let mut out = format!("  {}  {place}  {}\n", nic.name, more.join("  "));
    for netdev in &nic.netdevs {
        let mtu = netdev.mtu_bytes.map_or(String::new(), |mtu| format!(", MTU {mtu}"));
        let master = netdev.master.as_ref().map_or(String::new(), |m| format!(", member of {m}"));
        let bond = netdev.bond.as_ref().map_or(String::new(), |bond| {
            let active = bond.active.as_ref().map_or(String::new(), |a| format!(", active {a}"));
            let mode = or_unknown(&bond.mode);
            format!(", bond ({mode}) of {}{active}", bond.members.join(", "))
        });
        let state = or_unknown(&netdev.operstate);
        out.push_str(&format!("    netdev {}: {state}{mtu}{master}{bond}\n", netdev.name));
    }
    for port in &nic.ports {
        out.push_str(&port_text(port));
    }
    out
}

fn port_text(port: &Port) -> String {
    let rate = port.bits_per_s.map(|bits| format!("{} Gb/s", bits as f64 / 1e9));
    let lid = port.lid.filter(|&lid| lid > 0).map(|lid| format!("lid {lid}"));
    let sm = port.sm_lid.filter(|&lid| lid > 0).map(|lid| format!("subnet manager {lid}"));
    let mtu = port.mtu_bytes.map(|mtu| format!("RDMA MTU {mtu}"));
    let more: Vec<String> = [rate, lid, sm, mtu].into_iter().flatten().collect();
    let mut out = format!(
        "    port {}: {} ({})  {}  {}\n",
        port.number,
        or_unknown(&port.state),
        or_unknown(&port.phys_state),
        or_unknown(&port.link_layer),
        more.join("  ")
    );
    for gid in &port.gids {
        out.push_str(&format!("      {gid}\n"));
    }
    if port.gids.is_empty() {
        out.push_str("      no GID\n");
    }
    out
}

/// GPUs down, NICs across.
fn paths(gpus: &[Gpu], nics: &[Nic]) -> String {
    let class = |gpu: &Gpu, nic: &Nic| {
        nic.pci.as_ref().map_or(PathClass::Unknown, |pci| gpu.pci.class(pci))
    };
    let width = |nic: &Nic| nic.name.len().max(7);
    let mut out = String::from("\nPaths\n       ");
    let mut seen: Vec<PathClass> = Vec::new();
    for nic in nics {
        out.push_str(&format!("  {:<1$}", nic.name, width(nic)));
    }
    for gpu in gpus {
        out.push_str(&format!("\n  gpu{:<2}", gpu.ordinal));
        for nic in nics {
            let class = class(gpu, nic);
            seen.push(class);
            out.push_str(&format!("  {:<1$}", class, width(nic)));
        }
    }
    seen.sort_unstable();
    seen.dedup();
    for class in seen {
        out.push_str(&format!("\n  {class}: {}", class.meaning()));
    }
    let lines = out.lines().map(str::trim_end);
    lines.collect::<Vec<_>>().join("\n") + "\n"
}

/// What is known of a message.
fn message(text: &str, json: bool) -> Result<ExitCode> {
    #[derive(Serialize)]
    struct Report {
        matches: Vec<Known>,
        near: Vec<Known>,
    }
    let matches = known_errors::find(text);
    let near = if matches.is_empty() { known_errors::near(text) } else { Vec::new() };
    let code = if matches.is_empty() { ExitCode::from(UNKNOWN) } else { ExitCode::SUCCESS };
    if json {
        say(&json_line(&Report { matches, near })?);
        return Ok(code);
    }
    for (n, known) in matches.iter().enumerate() {
        if n > 0 {
            say("\n");
        }
        say(&known_text(known));
    }
    if matches.is_empty() {
        say("Nothing is known of this message.\n");
        for known in &near {
            say(&format!("  near: {} ({})\n", known.message, known.from));
        }
        say(
            "Give one whole line of the log, the first error rather than the last. If it is whole, please report it: the line, \
             what wrote it, and the output of `kvlane explain --json`.\n",
        );
    }
    Ok(code)
}

fn known_text(known: &Known) -> String {
    let mut out = format!("{}\n  from   {}\n  means  {}\n", known.message, known.from, known.means);
    for (heading, items) in [("causes", &known.causes), ("do", &known.fixes)] {
        if items.is_empty() {
            continue;
        }
        out.push_str(&format!("  {heading}\n"));
        for (n, item) in (1..).zip(items.iter()) {
            out.push_str(&format!("    {n}. {item}\n"));
        }
    }
    if !known.shown_by.is_empty() {
        out.push_str(&format!("  see    {}\n", known.shown_by));
    }
    out
}
