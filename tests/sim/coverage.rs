//! What the seeds have exercised. A counter that stays zero means that the simulator proves less
//! than it says, so the test fails.

use crate::engines::Kind;

/// Kinds of engine, as columns of the table.
pub(crate) const KINDS: [&str; 3] = ["socket", "one-sided", "memory"];

macro_rules! counters {
    ($($name:ident = $text:literal, $kinds:expr;)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum C { $($name,)* }
        /// Name, and the engine kinds for which it must not be zero; none: any.
        pub(crate) const COUNTERS: &[(C, &str, &[usize])] = &[$((C::$name, $text, &$kinds),)*];
    };
}

counters! {
    Done = "room done", [0, 1, 2];
    Failed = "room failed", [0, 1, 2];
    Unknown = "prefill ended unknown", [0, 1, 2];
    Drop = "frame dropped", [];
    Duplicate = "frame duplicated", [];
    Reorder = "frame overtaken", [];
    Partition = "partition", [];
    OneWay = "one-way partition", [];
    Stop = "process stopped", [];
    Restart = "restart", [];
    Stale = "old incarnation asked for", [];
    LateWrite = "late write landed before fence", [1];
    LandedTwice = "write landed twice", [1];
    Scrapped = "stale frame scrapped", [0];
    RetryOverChunk = "retry over a chunk boundary", [0, 1, 2];
    AbortBeforeOffer = "abort before offer", [];
    AbortOvertakes = "abort overtakes reserve", [];
    AbortAfterDone = "abort after done", [];
    LostAck = "lost ack after the last part", [0, 1, 2];
    LeaseExpiry = "lease expiry", [];
    Quarantine = "quarantine", [0, 1, 2];
    LateProof = "late proof ends a quarantine", [];
    SourceWithheld = "source withheld", [];
    ZeroPage = "zero-page room done", [0, 1, 2];
    Prefix = "prefix room done", [0, 1, 2];
    PartialPage = "partial last page done", [0, 1, 2];
    Revoke = "revoke", [0, 1, 2];
    QuiesceClose = "quiesce, then close", [1];
    StaleCopy = "copied too late, and discarded", [2];
    StoppedMidCopy = "copy stopped in a part", [0, 2];
    KeyRepeated = "key repeated", [];
    QueueWait = "queue wait", [0, 1, 2];
    Failover = "lane loss with failover", [0, 1, 2];
    RailLost = "rail lost under a room, done", [1];
    Abandoned = "done behind the fence of an abandoned write", [1];
    EarlyPrefill = "early prefill", [0, 1, 2];
    LatePrefill = "offer before its leg", [0, 1, 2];
    FinishEarly = "finish with missing pages", [];
    WrongBlocks = "wrong block ids refused", [];
    Replay = "consumed room refused", [];
    DuplicateRoom = "duplicate room refused", [];
    Unclaimed = "reservation not claimed", [];
    Full = "worker full", [];
    Drain = "drain", [];
    LinkFailed = "link failed", [];
    LinkLost = "link lost", [0, 1, 2];
    Sources = "room of several sources done", [0, 1, 2];
    Mixed = "room of several engines done", [];
    SourceLost = "one of several sources lost", [0, 1, 2];
    Takers = "leg of several takers done", [0, 1, 2];
    TakerFailed = "leg done for some takers only", [];
    WrongSources = "wrong set of sources refused", [];
    WrongTakers = "leg with other takers than decodes", [];
    Thaw = "told that it stood still", [];
    Undone = "reserved at some ranks, undone", [];
    Heads = "ranks with other heads done", [0, 1, 2];
    Stages = "ranks with other layers done", [0, 1, 2];
    Copies = "one of ranks with the same heads sends", [0, 1, 2];
    PageSizes = "page sizes differ, done", [0, 1, 2];
    Orders = "orders differ, done", [0, 1, 2];
    Packing = "K and V apart and together, done", [0, 1, 2];
    Window = "pool with a window done", [0, 1, 2];
    Rows = "pool of rows done", [0, 1, 2];
    Pools = "three pools done", [0, 1, 2];
}

/// Where a room was when somebody died.
pub(crate) const PHASES: [&str; 8] =
    ["linked", "reserved", "offered", "first part", "half", "all arrived", "fencing", "ended"];
/// Who died.
pub(crate) const ROLES: [&str; 3] = ["decode", "prefill", "router"];

#[derive(Clone)]
pub(crate) struct Coverage {
    counts: Vec<[u64; 3]>,
    /// By role, phase and engine kind of the room.
    crashes: [[[u64; 3]; 8]; 3],
    pub(crate) events: u64,
    pub(crate) rooms: u64,
}

impl Coverage {
    pub(crate) fn new() -> Self {
        Self {
            counts: vec![[0; 3]; COUNTERS.len()],
            crashes: [[[0; 3]; 8]; 3],
            events: 0,
            rooms: 0,
        }
    }
    pub(crate) fn hit(&mut self, c: C, kind: usize) {
        self.counts[c as usize][kind] += 1;
    }
    pub(crate) fn crash(&mut self, role: usize, phase: usize, kind: usize) {
        self.crashes[role][phase][kind] += 1;
    }
    pub(crate) fn add(&mut self, other: &Self) {
        for (a, b) in self.counts.iter_mut().zip(&other.counts) {
            (0..3).for_each(|k| a[k] += b[k]);
        }
        for (a, b) in self.crashes.iter_mut().zip(&other.crashes) {
            (0..24).for_each(|n| a[n / 3][n % 3] += b[n / 3][n % 3]);
        }
        self.events += other.events;
        self.rooms += other.rooms;
    }
    /// What was never exercised.
    pub(crate) fn missing(&self) -> Vec<String> {
        let mut out = Vec::new();
        for (c, name, kinds) in COUNTERS {
            let n = self.counts[*c as usize];
            if n.iter().sum::<u64>() == 0 {
                out.push((*name).to_string());
            }
            for &k in kinds.iter().filter(|&&k| n[k] == 0) {
                out.push(format!("{name} ({})", KINDS[k]));
            }
        }
        for (role, row) in ROLES.iter().zip(&self.crashes) {
            for (phase, (name, n)) in PHASES.iter().zip(row).enumerate() {
                if n.iter().sum::<u64>() == 0 {
                    out.push(format!("{role} crash while {name}"));
                }
                // Before its link a room has no engine; where the receiver moves the bytes, it
                // fences in the moment in which the last part is there.
                for (kind, n) in n.iter().enumerate() {
                    let applies =
                        (2..=6).contains(&phase) && (phase != 5 || kind == Kind::OneSided as usize);
                    if applies && *n == 0 {
                        out.push(format!("{role} crash while {name} ({})", KINDS[kind]));
                    }
                }
            }
        }
        out
    }
    pub(crate) fn print(&self) {
        println!("{:<40}{:>16}{:>12}{:>12}", "", KINDS[0], KINDS[1], KINDS[2]);
        for (c, name, _) in COUNTERS {
            let n = self.counts[*c as usize];
            println!("{name:<44}{:>6}{:>12}{:>12}", n[0], n[1], n[2]);
        }
        print!("{:<10}", "crash of");
        PHASES.iter().for_each(|p| print!("{p:>20}"));
        println!();
        for (role, row) in ROLES.iter().zip(&self.crashes) {
            print!("{role:<10}");
            row.iter().for_each(|[a, b, c]| print!("{:>20}", format!("{a}/{b}/{c}")));
            println!();
        }
    }
}
