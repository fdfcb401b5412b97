//! Faults that an emulated NIC makes on demand.
//!
//! Owns: the faults that are installed ([`Faults`]). In: a fault, as a value or as text such as
//! `nak syndrome=0x13 pair=66 skip=10`, and each *occasion* at which one could strike. Out: whether
//! it strikes. Invariants: a fault strikes at the `skip`th occasion of its target after it was
//! installed and at `times` in all, so the same posts meet the same faults; every strike is counted.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use kvlane_proto::{Error, ErrorKind};

/// Most faults that are installed at a time.
pub(crate) const FAULTS_MAX: usize = 64;

/// What a fault does, and what its occasions are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// `delay us=N`: an entry's packet arrives so much later, and what follows it after it.
    Delay {
        /// How much.
        us: u64,
    },
    /// `hold-wire`: an entry's packet stays on the wire until the fault is cleared.
    HoldWire,
    /// `hold-landing`: a packet is taken by the target and lands when the fault is cleared.
    HoldLanding,
    /// `drop-kick`: a doorbell is not heard.
    DropKick,
    /// `stale-record`: at a kick, the NIC sees the record as it was at the one before.
    StaleRecord,
    /// `torn-entry reads=N`: the first N reads of an entry see another index. N is 1 unless said.
    TornEntry {
        /// How many.
        reads: u32,
    },
    /// `nak syndrome=S vendor=V`: an entry fails so, without being executed. The other side hears
    /// nothing. V is 0 unless said.
    Nak {
        /// As in a completion.
        syndrome: u8,
        /// As in a completion.
        vendor: u8,
    },
    /// `corrupt byte=N`: one byte of what an entry carries arrives wrong (modulo its length).
    Corrupt {
        /// Which.
        byte: u64,
    },
    /// `duplicate-immediate`: an immediate arrives twice, each takes a receive.
    DuplicateImmediate,
    /// `kill`: the NIC ends when it comes to an entry.
    Kill,
    /// `link-down`: nothing from or to the target arrives, until the fault is cleared.
    LinkDown,
    /// `link-flap ms=N`: the same, but every other N ms only, beginning at once.
    LinkFlap {
        /// How long it is down, and up.
        ms: u64,
    },
    /// `throttle bytes_per_s=N`: the target sends no faster.
    Throttle {
        /// How fast.
        bytes_per_s: u64,
    },
    /// `lose-completion`: a completion never comes.
    LoseCompletion,
    /// `delay-completions us=N`: a completion comes so much later, and what follows it after it.
    DelayCompletions {
        /// How much.
        us: u64,
    },
}

/// Whose occasions count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Every queue pair's.
    All,
    /// `pair=N`: one queue pair's: of its own entries and kicks, or, of what arrives, of what it
    /// receives.
    Pair(u32),
    /// `pid=N`: those of all queue pairs of one process.
    Process(i32),
}

/// A fault to install.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What it does.
    pub what: What,
    /// To whom.
    pub target: Target,
    /// Occasions that pass before it strikes first.
    pub skip: u64,
    /// How often it strikes; 0 is until cleared. Without `times=`, what hits one thing strikes once
    /// and what describes a state stays.
    pub times: u64,
}

impl Fault {
    /// The fault with its usual number of strikes, from the first occasion on.
    pub fn new(what: What, target: Target) -> Self {
        let times = match what {
            What::DropKick
            | What::StaleRecord
            | What::TornEntry { .. }
            | What::Nak { .. }
            | What::Corrupt { .. }
            | What::DuplicateImmediate
            | What::Kill
            | What::LoseCompletion => 1,
            _ => 0,
        };
        Self { what, target, skip: 0, times }
    }
    /// Lets so many occasions pass.
    #[must_use]
    pub fn skip(mut self, skip: u64) -> Self {
        self.skip = skip;
        self
    }
    /// Strikes so often; 0 is until cleared.
    #[must_use]
    pub fn times(mut self, times: u64) -> Self {
        self.times = times;
        self
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.what {
            What::Delay { us } => write!(f, "delay us={us}")?,
            What::HoldWire => write!(f, "hold-wire")?,
            What::HoldLanding => write!(f, "hold-landing")?,
            What::DropKick => write!(f, "drop-kick")?,
            What::StaleRecord => write!(f, "stale-record")?,
            What::TornEntry { reads } => write!(f, "torn-entry reads={reads}")?,
            What::Nak { syndrome, vendor } => {
                write!(f, "nak syndrome={syndrome:#04x} vendor={vendor:#04x}")?;
            }
            What::Corrupt { byte } => write!(f, "corrupt byte={byte}")?,
            What::DuplicateImmediate => write!(f, "duplicate-immediate")?,
            What::Kill => write!(f, "kill")?,
            What::LinkDown => write!(f, "link-down")?,
            What::LinkFlap { ms } => write!(f, "link-flap ms={ms}")?,
            What::Throttle { bytes_per_s } => write!(f, "throttle bytes_per_s={bytes_per_s}")?,
            What::LoseCompletion => write!(f, "lose-completion")?,
            What::DelayCompletions { us } => write!(f, "delay-completions us={us}")?,
        }
        match self.target {
            Target::All => {}
            Target::Pair(number) => write!(f, " pair={number}")?,
            Target::Process(pid) => write!(f, " pid={pid}")?,
        }
        write!(f, " skip={} times={}", self.skip, self.times)
    }
}

/// Every kind with what it needs.
pub const KNOWN: &str = "delay us=, hold-wire, hold-landing, drop-kick, stale-record, \
    torn-entry [reads=], nak syndrome= [vendor=], corrupt byte=, duplicate-immediate, kill, \
    link-down, link-flap ms=, throttle bytes_per_s=, lose-completion, delay-completions us=";

impl FromStr for Fault {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let known = |e: Error| {
            e.with("fault", text)
                .with("known", KNOWN)
                .hint("one of the known, then pair=NUMBER or pid=PID, skip=N, times=N as needed")
        };
        parse(text).map_err(known)
    }
}

/// What is wrong with a text comes without the text.
fn parse(text: &str) -> Result<Fault, Error> {
    let wrong = |what: &str| Error::new(ErrorKind::Malformed, what);
    let mut words = text.split_whitespace();
    let name = words.next().ok_or_else(|| wrong("a fault has no name"))?;
    let mut fields = Vec::new();
    for word in words {
        let (key, value) =
            word.split_once('=').ok_or_else(|| wrong("a field has no =").with("found", word))?;
        let parsed = match value.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16),
            None => value.parse(),
        };
        let value =
            parsed.map_err(|e| wrong("a value is no number").with("found", word).caused_by(e))?;
        fields.push((key, value));
    }
    let mut take = |key: &str| {
        let at = fields.iter().position(|&(found, _)| found == key)?;
        Some(fields.swap_remove(at).1)
    };
    let missing = |key: &str| wrong("a field is missing").with("missing", key);
    let byte = |value: u64| {
        let e = || wrong("a code is above 0xff").with("found", format!("{value:#x}"));
        u8::try_from(value).map_err(|_| e())
    };
    let what = match name {
        "delay" => What::Delay { us: take("us").ok_or_else(|| missing("us"))? },
        "hold-wire" => What::HoldWire,
        "hold-landing" => What::HoldLanding,
        "drop-kick" => What::DropKick,
        "stale-record" => What::StaleRecord,
        "torn-entry" => {
            What::TornEntry { reads: u32::try_from(take("reads").unwrap_or(1)).unwrap_or(u32::MAX) }
        }
        "nak" => What::Nak {
            syndrome: byte(take("syndrome").ok_or_else(|| missing("syndrome"))?)?,
            vendor: byte(take("vendor").unwrap_or(0))?,
        },
        "corrupt" => What::Corrupt { byte: take("byte").ok_or_else(|| missing("byte"))? },
        "duplicate-immediate" => What::DuplicateImmediate,
        "kill" => What::Kill,
        "link-down" => What::LinkDown,
        "link-flap" => match take("ms") {
            Some(ms) if ms > 0 => What::LinkFlap { ms },
            _ => return Err(missing("ms")),
        },
        "throttle" => match take("bytes_per_s") {
            Some(bytes_per_s) if bytes_per_s > 0 => What::Throttle { bytes_per_s },
            _ => return Err(missing("bytes_per_s")),
        },
        "lose-completion" => What::LoseCompletion,
        "delay-completions" => {
            What::DelayCompletions { us: take("us").ok_or_else(|| missing("us"))? }
        }
        _ => return Err(wrong("a fault that is not known").with("found", name)),
    };
    let target = match (take("pair"), take("pid")) {
        (None, None) => Target::All,
        (Some(number), None) => Target::Pair(
            u32::try_from(number)
                .map_err(|_| wrong("a queue pair's number has 24 bits").with("found", number))?,
        ),
        (None, Some(pid)) => Target::Process(
            i32::try_from(pid)
                .map_err(|_| wrong("a process number is too large").with("found", pid))?,
        ),
        _ => return Err(wrong("a fault has one target, pair= or pid=")),
    };
    let mut fault = Fault::new(what, target);
    fault.skip = take("skip").unwrap_or(fault.skip);
    fault.times = take("times").unwrap_or(fault.times);
    match fields.first() {
        None => Ok(fault),
        Some((key, _)) => Err(wrong("a field is not known here").with("found", key)),
    }
}

/// No delay is for ever.
pub(crate) fn delay(us: u64) -> Duration {
    Duration::from_micros(us.min(3_600_000_000))
}

/// A queue pair, as faults look at it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Whom {
    pub(crate) number: u32,
    pub(crate) pid: i32,
}

/// One that is installed.
#[derive(Debug)]
pub(crate) struct Installed {
    pub(crate) id: u64,
    pub(crate) fault: Fault,
    pub(crate) hits: u64,
    seen: u64,
    since: Instant,
    /// Throttle: when what was let go so far will have been sent.
    free_at: Instant,
}

impl Installed {
    fn is_for(&self, whom: Whom) -> bool {
        match self.fault.target {
            Target::All => true,
            Target::Pair(number) => number == whom.number,
            Target::Process(pid) => pid == whom.pid,
        }
    }
    /// One occasion.
    fn strikes(&mut self) -> bool {
        self.seen += 1;
        let strikes =
            self.seen > self.fault.skip && (self.fault.times == 0 || self.hits < self.fault.times);
        self.hits += u64::from(strikes);
        strikes
    }
    fn is_down(&self, now: Instant) -> bool {
        match self.fault.what {
            What::LinkDown => true,
            What::LinkFlap { ms } => {
                let ms = u128::from(ms);
                (now.saturating_duration_since(self.since).as_millis() / ms).is_multiple_of(2)
            }
            _ => false,
        }
    }
}

/// What strikes one entry.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Fate {
    pub(crate) kill: bool,
    pub(crate) torn_reads: u32,
    pub(crate) nak: Option<(u8, u8)>,
    pub(crate) corrupt: Option<u64>,
    pub(crate) delay: Option<Duration>,
    /// The fault that holds its packet.
    pub(crate) hold: Option<u64>,
}

/// The faults that are installed.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    list: Vec<Installed>,
    last_id: u64,
}

impl Faults {
    pub(crate) fn install(&mut self, fault: Fault, now: Instant) -> Option<u64> {
        if self.list.len() >= FAULTS_MAX {
            return None;
        }
        self.last_id += 1;
        let id = self.last_id;
        self.list.push(Installed { id, fault, hits: 0, seen: 0, since: now, free_at: now });
        Some(id)
    }
    /// Removes one, or all; those that were removed.
    pub(crate) fn clear(&mut self, id: u64) -> Vec<Installed> {
        let (gone, kept) = self.list.drain(..).partition(|one| id == 0 || one.id == id);
        self.list = kept;
        gone
    }
    pub(crate) fn list(&self) -> &[Installed] {
        &self.list
    }
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }
    /// An occasion for the faults that `kind` picks; what strikes, and its number.
    #[inline]
    pub(crate) fn hit<T>(
        &mut self,
        whom: Whom,
        mut kind: impl FnMut(What) -> Option<T>,
    ) -> Option<(u64, T)> {
        let mut found = None;
        for one in &mut self.list {
            if let Some(value) = kind(one.fault.what).filter(|_| one.is_for(whom))
                && one.strikes()
                && found.is_none()
            {
                found = Some((one.id, value));
            }
        }
        found
    }
    /// An occasion for all faults that strike entries.
    pub(crate) fn fate(&mut self, whom: Whom) -> Fate {
        let mut fate = Fate::default();
        for one in self.list.iter_mut().filter(|one| one.is_for(whom)) {
            let what = one.fault.what;
            let is_of_entries = matches!(
                what,
                What::Kill
                    | What::TornEntry { .. }
                    | What::Nak { .. }
                    | What::Corrupt { .. }
                    | What::Delay { .. }
                    | What::HoldWire
            );
            if !is_of_entries || !one.strikes() {
                continue;
            }
            match what {
                What::Kill => fate.kill = true,
                What::TornEntry { reads } => fate.torn_reads = reads,
                What::Nak { syndrome, vendor } => fate.nak = Some((syndrome, vendor)),
                What::Corrupt { byte } => fate.corrupt = Some(byte),
                What::Delay { us } => fate.delay = Some(delay(us)),
                _ => fate.hold = Some(one.id),
            }
        }
        fate
    }
    /// Whether nothing gets from one to the other. Counts as a strike.
    pub(crate) fn is_cut(&mut self, from: Whom, to: Option<Whom>, now: Instant) -> bool {
        let mut cut = false;
        for one in &mut self.list {
            let concerned = one.is_for(from) || to.is_some_and(|to| one.is_for(to));
            if concerned && one.is_down(now) {
                cut |= one.strikes();
            }
        }
        cut
    }
    /// When the target may send what it asks for; `None` if now, which then counts as sent.
    pub(crate) fn wait_for(&mut self, whom: Whom, bytes: u64, now: Instant) -> Option<Instant> {
        let throttles = |one: &Installed| matches!(one.fault.what, What::Throttle { .. });
        let mine = |one: &Installed| throttles(one) && one.is_for(whom);
        let until = self.list.iter().filter(|one| mine(one)).map(|one| one.free_at).max();
        if let Some(until) = until.filter(|&until| until > now) {
            return Some(until);
        }
        for one in self.list.iter_mut().filter(|one| mine(one)) {
            if let What::Throttle { bytes_per_s } = one.fault.what
                && one.strikes()
            {
                let ns = u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_s);
                let ns = u64::try_from(ns).unwrap_or(u64::MAX).min(3_600_000_000_000);
                one.free_at = now + Duration::from_nanos(ns);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Whom = Whom { number: 1, pid: 10 };
    const TWO: Whom = Whom { number: 2, pid: 20 };

    #[test]
    fn faults_are_the_same_as_text() {
        for text in [
            "delay us=500 skip=3 times=2",
            "hold-wire pid=7 skip=0 times=0",
            "hold-landing pair=12 skip=0 times=1",
            "drop-kick skip=0 times=1",
            "stale-record skip=1 times=1",
            "torn-entry reads=4 skip=0 times=1",
            "nak syndrome=0x13 vendor=0x88 skip=0 times=1",
            "corrupt byte=9 skip=0 times=1",
            "duplicate-immediate skip=0 times=1",
            "kill skip=9 times=1",
            "link-down skip=0 times=0",
            "link-flap ms=50 skip=0 times=0",
            "throttle bytes_per_s=1000 skip=0 times=0",
            "lose-completion skip=0 times=1",
            "delay-completions us=5 skip=0 times=0",
        ] {
            assert_eq!(text.parse::<Fault>().unwrap().to_string(), text);
        }
        assert_eq!("drop-kick".parse::<Fault>().unwrap(), Fault::new(What::DropKick, Target::All));
    }

    #[test]
    fn what_is_wrong_with_a_text_is_named() {
        for (text, word) in [
            ("", "no name"),
            ("explode", "found=explode"),
            ("delay", "missing=us"),
            ("delay us", "found=us"),
            ("delay us=x", "found=us=x"),
            ("nak syndrome=0x100", "above 0xff"),
            ("kill pair=1 pid=2", "one target"),
            ("kill byte=2", "found=byte"),
            ("link-flap ms=0", "missing=ms"),
            ("throttle bytes_per_s=0", "missing=bytes_per_s"),
        ] {
            let text = text.parse::<Fault>().unwrap_err().to_string();
            let (first, known) = (text.find(word), text.find("known="));
            assert!(first.is_some() && first < known && text.contains("fix:"), "{text}");
        }
    }

    #[test]
    fn strikes_follow_skip_times_and_target() {
        let mut faults = Faults::default();
        let now = Instant::now();
        let fault = Fault::new(What::DropKick, Target::Pair(1)).skip(2).times(2);
        let id = faults.install(fault, now).unwrap();
        let kick = |what| matches!(what, What::DropKick).then_some(());
        assert!(faults.hit(TWO, kick).is_none());
        let hits: Vec<_> = (0..6).map(|_| faults.hit(ONE, kick).is_some()).collect();
        assert_eq!(hits, [false, false, true, true, false, false]);
        assert_eq!(faults.list()[0].hits, 2);
        assert_eq!(faults.clear(id).len(), 1);
        assert!(faults.is_empty());
        for _ in 0..FAULTS_MAX {
            faults.install(fault, now).unwrap();
        }
        assert!(faults.install(fault, now).is_none());
    }

    #[test]
    fn links_flap_and_throttles_let_through_by_the_clock() {
        let mut faults = Faults::default();
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let flap = Fault::new(What::LinkFlap { ms: 10 }, Target::Process(20));
        let id = faults.install(flap, start).unwrap();
        assert!(!faults.is_cut(ONE, None, start));
        let down: Vec<_> =
            [0, 9, 10, 19, 20].map(|ms| faults.is_cut(ONE, Some(TWO), at(ms))).into();
        assert_eq!(down, [true, true, false, false, true]);
        faults.clear(id);
        let slow = Fault::new(What::Throttle { bytes_per_s: 1000 }, Target::All);
        faults.install(slow, start).unwrap();
        assert_eq!(faults.wait_for(ONE, 10, start), None);
        assert_eq!(faults.wait_for(TWO, 10, at(9)), Some(at(10)));
        assert_eq!(faults.wait_for(TWO, 10, at(10)), None);
    }
}
