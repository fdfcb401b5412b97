//! `kvlane plan`: what one instance would send to another, without either.
//!
//! In: two descriptions and the length of a prompt. Out: each pair of ranks that a room would have,
//! with the writes and bytes between them, from the same plan that workers compute; or the fields
//! that keep the two apart.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use kvlane_proto::layout::Difference;
use kvlane_proto::msg::peer::{Offer, PeerFrame, PeerMsg};
use kvlane_proto::plan::{Blocks, sources, writes};
use kvlane_proto::{
    BlockList, Device, Error, ErrorKind, GrantId, Grid, Identity, LaneId, Layout, PartId, Plan,
    PoolMap, Result, Role, RoomId, Share, Side, Span, limits,
};
use kvlane_transport::wire;
use serde::Serialize;

use super::say;
use crate::load::instance::{Instance, Lists};
use crate::report::json_line;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Description of the prefill instance
    #[arg(long, value_name = "FILE")]
    from: PathBuf,
    /// Description of the decode instance
    #[arg(long, value_name = "FILE")]
    to: PathBuf,
    /// Tokens of the prompt
    #[arg(long)]
    tokens: u32,
    /// Tokens at its start that the decode has already: whole pages, or all
    #[arg(long, default_value_t = 0, value_name = "TOKENS")]
    prefix: u32,
    /// Only what this rank of the decode instance gets; stage by stage, from 0
    #[arg(long, value_name = "RANK")]
    rank_of_to: Option<usize>,
    /// One JSON object as the last line, and no table
    #[arg(long)]
    json: bool,
}

/// What is said of an instance, or of a pair of ranks. The names are those of the JSON line.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Counts {
    parts: u64,
    writes: u64,
    /// Writes before neighbours became one.
    merged_from: u64,
    bytes: u64,
}

#[derive(Clone, Debug, Serialize)]
struct Rank {
    rank: usize,
    tp: u32,
    pp: u32,
    cp: u32,
}

#[derive(Clone, Debug, Serialize)]
struct Pair {
    from: Rank,
    to: Rank,
    #[serde(flatten)]
    counts: Counts,
    /// Of the message that asks for all of it.
    offer_bytes: usize,
}

#[derive(Clone, Debug, Serialize)]
struct Refused {
    field: String,
    from: String,
    to: String,
}

#[derive(Clone, Debug, Default, Serialize)]
struct Report {
    #[serde(flatten)]
    counts: Counts,
    refused: Option<Vec<Refused>>,
    pairs: Vec<Pair>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let report = report(args)?;
    if args.json {
        say(&json_line(&report)?);
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(refused) = &report.refused {
        let fields: Vec<&str> = refused.iter().map(|r| r.field.as_str()).collect();
        let mut e = Error::new(
            ErrorKind::Incompatible,
            format!("the instances differ in {}", fields.join(", ")),
        );
        for Refused { field, from, to } in refused {
            e = e.with("differs", format!("{field}: from {from} / to {to}"));
        }
        return Err(e.hint(
            "these fields must be equal, page sizes multiples of each other, and every pool there",
        ));
    }
    say(&table(&report));
    Ok(ExitCode::SUCCESS)
}

fn report(args: &Args) -> Result<Report> {
    let (from, to) = (Instance::read(&args.from)?, Instance::read(&args.to)?);
    let named = |path: &PathBuf| {
        let file = path.display().to_string();
        move |e: Error| e.with("file", file)
    };
    let senders = from.ranks().map_err(named(&args.from))?;
    let receivers = to.ranks().map_err(named(&args.to))?;
    // What is compared is the same for all ranks of an instance.
    let differences = Layout::pools_differ(&senders[0], &receivers[0]);
    if !differences.is_empty() {
        let refused = |d: Difference| Refused { field: d.field, from: d.here, to: d.there };
        let refused = Some(differences.into_iter().map(refused).collect());
        return Ok(Report { refused, ..Report::default() });
    }
    let wanted = match args.rank_of_to {
        None => 0..receivers.len(),
        Some(rank) if rank < receivers.len() => rank..rank + 1,
        Some(rank) => {
            return Err(Error::new(ErrorKind::NotFound, "the decode instance has no such rank")
                .with("asked", rank)
                .with("ranks", receivers.len()));
        }
    };
    let span = Span { tokens: args.tokens, prefix_tokens: args.prefix };
    let mut report = Report::default();
    for r in wanted {
        for s in sources(&receivers[r], &senders)? {
            let room =
                Room { span, from: (&senders[s], from.blocks), to: (&receivers[r], to.blocks) };
            let (counts, offer_bytes) = room.count()?;
            report.counts.add(&counts);
            let (from, to) = (rank(s, &senders[s]), rank(r, &receivers[r]));
            report.pairs.push(Pair { from, to, counts, offer_bytes });
        }
    }
    Ok(report)
}

impl Counts {
    fn add(&mut self, more: &Self) {
        self.parts += more.parts;
        self.writes += more.writes;
        self.merged_from += more.merged_from;
        self.bytes += more.bytes;
    }
}

fn rank(rank: usize, pools: &[Layout]) -> Rank {
    let at = pools[0].at;
    Rank { rank, tp: at.tp.0, pp: at.pp.0, cp: at.cp.0 }
}

/// What goes from one rank to another, and how either's lists of blocks look.
struct Room<'a> {
    span: Span,
    from: (&'a [Layout], Lists),
    to: (&'a [Layout], Lists),
}

impl Room<'_> {
    fn count(&self) -> Result<(Counts, usize)> {
        let Self { span, from, to } = self;
        let share = Arc::new(Share::between(from.0, to.0)?);
        // Before lists are made: a room may be too long for any.
        let grid = Grid::new(&share, span, limits::PART_BYTES)?;
        let mut held = Vec::new();
        for (pool, layout) in share.pools().iter().zip(from.0) {
            let blocks = pool.blocks(Side::Source, &pool.cells(span));
            let (map, ids) = some_blocks(layout, from.1, blocks.end - blocks.start);
            held.push(Blocks::new(map, blocks.start, ids.into())?);
        }
        let (mut maps, mut lists) = (Vec::new(), Vec::new());
        for layout in to.0 {
            let blocks = span.blocks(layout)?;
            if blocks.end - blocks.start > limits::BLOCKS_PER_ROOM_MAX {
                return Err(Error::new(ErrorKind::LimitExceeded, "too many blocks in one room")
                    .with("found", blocks.end - blocks.start)
                    .with("limit", limits::BLOCKS_PER_ROOM_MAX));
            }
            let (map, ids) = some_blocks(layout, to.1, blocks.end - blocks.start);
            maps.push(map);
            lists.push(BlockList::from_ids(&ids));
        }
        let lent = Blocks::lent(to.0, &maps, span, &lists)?;
        let plan = |side, blocks: Vec<Blocks>| {
            Plan::new(share.clone(), side, span, limits::PART_BYTES, blocks.into())
        };
        let (source, destination) = (plan(Side::Source, held)?, plan(Side::Destination, lent)?);
        let mut counts = Counts {
            parts: grid.parts().into(),
            merged_from: share.writes_unmerged(span),
            ..Counts::default()
        };
        for part in (0..grid.parts()).map(PartId) {
            let (from, to) = (source.pages(part)?, destination.pages(part)?);
            writes(&from, &to).for_each(|write| {
                counts.writes += 1;
                counts.bytes += u64::from(write.bytes);
            });
        }
        Ok((counts, offer_bytes(*span, lists)?))
    }
}

/// So many blocks of a pool that has room for them, and for as many others if they are random.
fn some_blocks(layout: &Layout, lists: Lists, count: u32) -> (Arc<PoolMap>, Vec<u32>) {
    let (pool_blocks, mut ids) = match lists {
        Lists::Contiguous => (count.max(1), (0..count).collect::<Vec<u32>>()),
        Lists::Random => (count.max(1) * 2, (0..count * 2).collect()),
    };
    if lists == Lists::Random {
        // The same in each run.
        let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
        for i in (1..ids.len()).rev() {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            ids.swap(i, (seed % (i as u64 + 1)) as usize);
        }
        ids.truncate(count as usize);
    }
    (Arc::new(PoolMap::contiguous(Device::Host, 0, layout, pool_blocks)), ids)
}

fn offer_bytes(span: Span, blocks: Vec<BlockList>) -> Result<usize> {
    let offer = Offer {
        room: RoomId(1),
        grant: GrantId(1),
        issuer: Some(Identity::new("default", Role::Router, "r0", 0)?),
        span,
        blocks,
        lanes: (0..limits::LANES_PER_ROOM).map(|n| (LaneId(n), 1)).collect(),
        credit_parts: limits::PARTS_IN_FLIGHT_PER_LANE,
        lease_ms: limits::GRANT_LEASE_MS,
    };
    let frame = PeerFrame { seq: 1, echo: 1, msg: PeerMsg::Offer(Box::new(offer)) };
    Ok(wire::seal(&frame)?.len())
}

/// For people.
fn table(report: &Report) -> String {
    let head = ["from", "to", "parts", "writes", "merged from", "bytes", "offer bytes"];
    let numbers = |c: &Counts| [c.parts, c.writes, c.merged_from, c.bytes].map(|n| n.to_string());
    let place = |r: &Rank| {
        let cp = if r.cp > 0 { format!(" cp {}", r.cp) } else { String::new() };
        format!("{} (tp {} pp {}{cp})", r.rank, r.tp, r.pp)
    };
    let mut rows = vec![head.map(String::from).to_vec()];
    for p in &report.pairs {
        let mut row = vec![place(&p.from), place(&p.to)];
        row.extend(numbers(&p.counts));
        row.push(p.offer_bytes.to_string());
        rows.push(row);
    }
    let mut all = vec!["all".to_string(), format!("{} pairs", report.pairs.len())];
    all.extend(numbers(&report.counts));
    all.push(report.pairs.iter().map(|p| p.offer_bytes).sum::<usize>().to_string());
    rows.push(all);
    let width = |n: usize| rows.iter().map(|r| r[n].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let mut out = String::new();
    for row in &rows {
        let cells = row.iter().zip(&widths).enumerate().map(|(n, (cell, &width))| match n {
            0 | 1 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
        out.push_str(&cells.collect::<Vec<_>>().join("  "));
        out.push('\n');
    }
    out
}
