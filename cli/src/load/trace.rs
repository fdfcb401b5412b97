//! Requests: when they arrive, how long they are, how much of them is cached.
//!
//! In: a trace file ([`Trace`]) or a seed ([`Generator`]). Out: an iterator of [`Request`]s, times
//! counted from the first. Files are read line by line, so they may be larger than memory; what is
//! remembered between lines is bounded by [`REMEMBERED_MAX`]. The first bad line ends the iterator
//! with an error that names file, line, field and value.
//!
//! Formats, told apart by the first line:
//!
//! - Mooncake JSONL: `{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": […]}`,
//!   one hash id per 512 tokens; also the names that Dynamo's tools write (`created_time`,
//!   `input_tokens`, `output_tokens`, and `delay` or `delay_ms` after the session's last row).
//! - Azure CSV: `TIMESTAMP,ContextTokens,GeneratedTokens` with timestamps
//!   `YYYY-MM-DD hh:mm:ss[.fraction]` in UTC.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::hash::Hash;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use kvlane_proto::{Error, ErrorKind, Result};
use serde_json::Value;

use super::{GOLDEN, mix};

/// Tokens that one hash id stands for.
const HASH_BLOCK_TOKENS: u64 = 512;
/// Longest prompt or answer.
const TOKENS_MAX: u64 = 1 << 24;
/// Longest line: the hash ids of the longest prompt, with room to spare.
const LINE_BYTES_MAX: u64 = 1 << 20;
/// Most hash ids, and most sessions, that a reader remembers. The oldest go first.
const REMEMBERED_MAX: usize = 1 << 20;

/// Longest name of a session.
const SESSION_BYTES_MAX: usize = 256;

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// Arrival, counted from the first request.
    pub(crate) at_ms: u64,
    /// Length of the prompt; at least 1.
    pub(crate) prompt_tokens: u32,
    /// Length of the answer; at least 1.
    pub(crate) output_tokens: u32,
    /// How much of the prompt an earlier request had as well; less than the prompt.
    pub(crate) prefix_tokens: u32,
}

impl Request {
    /// The same request with token counts times `factor`, but at least one token.
    pub(crate) fn scale(self, factor: f64) -> Self {
        let times = |tokens: u32| (f64::from(tokens) * factor).round() as u32;
        let prompt_tokens = times(self.prompt_tokens).max(1);
        Self {
            prompt_tokens,
            output_tokens: times(self.output_tokens).max(1),
            prefix_tokens: times(self.prefix_tokens).min(prompt_tokens - 1),
            ..self
        }
    }
}

/// Requests as they are asked for, one after another.
pub(crate) type Requests = Box<dyn Iterator<Item = Result<Request>> + Send>;

/// The requests of a trace file. The first one is read here, so that a wrong file is refused before
/// anything is started for it.
///
/// # Errors
/// As [`Trace::open`]; the first request's error; [`ErrorKind::Config`] if there is none.
pub(crate) fn from_file(path: &Path) -> Result<Requests> {
    let mut trace = Trace::open(path)?;
    let Some(first) = trace.next() else {
        return Err(Error::new(ErrorKind::Config, "the trace has no requests")
            .with("file", path.display())
            .hint("give --trace a file with requests, or leave it out to generate them"));
    };
    let first = first?;
    Ok(Box::new(std::iter::once(Ok(first)).chain(trace)))
}

/// The requests of a trace file.
pub(crate) struct Trace<R> {
    name: String,
    lines: R,
    line: u64,
    format: Option<Format>,
    /// The first request's time, in the file's own count.
    first_ns: Option<u64>,
    hashes: Recent<u64, ()>,
    sessions: Recent<String, u64>,
    ended: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Format {
    Mooncake,
    Azure,
}

impl Trace<BufReader<File>> {
    /// Opens a trace file.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] naming the file.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| {
            Error::new(ErrorKind::Io, "cannot open the trace")
                .with("file", path.display())
                .hint("give --trace a file that exists and can be read")
                .caused_by(e)
        })?;
        Ok(Self::new(path.display().to_string(), BufReader::with_capacity(1 << 16, file)))
    }
}

impl<R: BufRead> Trace<R> {
    /// Reads a trace; `name` stands for it in errors.
    pub(crate) fn new(name: impl Into<String>, lines: R) -> Self {
        Self {
            name: name.into(),
            lines,
            line: 0,
            format: None,
            first_ns: None,
            hashes: Recent::default(),
            sessions: Recent::default(),
            ended: false,
        }
    }

    /// The next line that is not empty, without its end.
    fn next_line(&mut self) -> Result<Option<String>> {
        loop {
            self.line += 1;
            let mut bytes = Vec::new();
            let read = (&mut self.lines).take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut bytes);
            read.map_err(|e| Error::new(ErrorKind::Io, "cannot read").caused_by(e))?;
            if bytes.is_empty() {
                return Ok(None);
            }
            if bytes.len() as u64 > LINE_BYTES_MAX {
                return Err(Error::new(ErrorKind::LimitExceeded, "line too long")
                    .with("limit_bytes", LINE_BYTES_MAX)
                    .hint("a trace has one request on a line"));
            }
            let line = String::from_utf8(bytes).map_err(|e| {
                Error::new(ErrorKind::Malformed, "line is not UTF-8")
                    .with("byte", e.utf8_error().valid_up_to())
            })?;
            let line = line.trim().trim_start_matches('\u{feff}');
            if !line.is_empty() {
                return Ok(Some(line.to_string()));
            }
        }
    }

    fn next_request(&mut self) -> Result<Option<Request>> {
        let Some(line) = self.next_line()? else { return Ok(None) };
        let line = match self.format {
            Some(_) => line,
            None => match self.recognise(&line)? {
                Format::Mooncake => line,
                Format::Azure => match self.next_line()? {
                    Some(line) => line,
                    None => return Ok(None),
                },
            },
        };
        match self.format {
            Some(Format::Azure) => self.azure(&line),
            _ => self.mooncake(&line),
        }
        .map(Some)
    }

    fn recognise(&mut self, first_line: &str) -> Result<Format> {
        let format = if first_line.starts_with('{') {
            Format::Mooncake
        } else if first_line == AZURE_FIELDS.join(",") {
            Format::Azure
        } else {
            return Err(Error::new(ErrorKind::Malformed, "unknown trace format")
                .with("found", shorten(first_line))
                .with("expected", format!("a JSON object or the header {}", AZURE_FIELDS.join(",")))
                .hint("use a Mooncake JSONL or an Azure CSV trace"));
        };
        self.format = Some(format);
        Ok(format)
    }

    fn azure(&mut self, line: &str) -> Result<Request> {
        let columns: Vec<&str> = line.split(',').map(str::trim).collect();
        let [timestamp, prompt, output] = columns[..] else {
            return Err(Error::new(ErrorKind::Malformed, "wrong number of columns")
                .with("found", columns.len())
                .with("expected", AZURE_FIELDS.len())
                .with("value", shorten(line)));
        };
        let at = timestamp_ns(timestamp).ok_or_else(|| {
            bad(AZURE_FIELDS[0], timestamp, "YYYY-MM-DD hh:mm:ss.fraction in UTC")
        })?;
        let number = |field, text: &str| {
            text.parse::<u64>()
                .ok()
                .filter(|&n| n <= TOKENS_MAX)
                .ok_or_else(|| tokens_error(field, text))
        };
        let (prompt, output) = (number(AZURE_FIELDS[1], prompt)?, number(AZURE_FIELDS[2], output)?);
        if prompt == 0 {
            return Err(tokens_error(AZURE_FIELDS[1], "0"));
        }
        Ok(Request {
            at_ms: self.since_first(AZURE_FIELDS[0], timestamp, at)?,
            prompt_tokens: prompt as u32,
            output_tokens: (output as u32).max(1),
            prefix_tokens: 0,
        })
    }

    fn mooncake(&mut self, line: &str) -> Result<Request> {
        let row: Value = serde_json::from_str(line).map_err(|e| {
            Error::new(ErrorKind::Malformed, "line is not JSON")
                .with("value", shorten(line))
                .hint("a Mooncake trace has one whole JSON object on each line")
                .caused_by(e)
        })?;
        let tokens = |names: &[&'static str]| match one_of(&row, names)? {
            (field, Some(value)) => value
                .as_u64()
                .filter(|&n| n <= TOKENS_MAX)
                .ok_or_else(|| tokens_error(field, &value.to_string())),
            (field, None) => Err(missing(field)),
        };
        let prompt = tokens(&["input_length", "input_tokens"])?;
        if prompt == 0 {
            return Err(tokens_error("input_length", "0"));
        }
        let output = tokens(&["output_length", "output_tokens"])?;

        let session = match one_of(&row, &["session_id"])? {
            (_, None) => String::new(),
            (_, Some(Value::String(name))) if name.len() <= SESSION_BYTES_MAX => name.clone(),
            (field, Some(other)) => {
                let expected = format!("a string of at most {SESSION_BYTES_MAX} bytes");
                return Err(bad(field, &other.to_string(), &expected));
            }
        };
        // Milliseconds; fractions are allowed.
        let time_ns = |names: &[&'static str]| match one_of(&row, names)? {
            (_, None) => Ok(None),
            (field, Some(value)) => value
                .as_f64()
                .filter(|ms| (0.0..1e13).contains(ms))
                .map(|ms| Some((field, value, (ms * 1e6).round() as u64)))
                .ok_or_else(|| bad(field, &value.to_string(), "milliseconds from 0 to 1e13")),
        };
        let before = self.sessions.get(&session).copied();
        let (field, value, at) =
            match (time_ns(&["timestamp", "created_time"])?, time_ns(&["delay", "delay_ms"])?) {
                (Some(at), _) => at,
                (None, Some((field, value, delay))) => match before.or(self.first_ns) {
                    Some(before) => (field, value, before.saturating_add(delay)),
                    None => (field, value, 0),
                },
                (None, None) => return Err(missing("timestamp")),
            };

        // Checked as a whole before any is remembered.
        let hashes: Vec<u64> = match one_of(&row, &["hash_ids"])? {
            (_, None) => Vec::new(),
            (field, Some(value)) => value
                .as_array()
                .and_then(|list| list.iter().map(Value::as_u64).collect())
                .ok_or_else(|| bad(field, &value.to_string(), "a list of unsigned integers"))?,
        };
        let at_ms = self.since_first(field, &value.to_string(), at)?;
        self.sessions.insert(session, at);
        let seen = hashes.iter().take_while(|&id| self.hashes.get(id).is_some()).count() as u64;
        for id in hashes {
            self.hashes.insert(id, ());
        }
        Ok(Request {
            at_ms,
            prompt_tokens: prompt as u32,
            output_tokens: (output as u32).max(1),
            prefix_tokens: (seen * HASH_BLOCK_TOKENS).min(prompt - 1) as u32,
        })
    }

    fn since_first(&mut self, field: &'static str, value: &str, at_ns: u64) -> Result<u64> {
        let first_ns = *self.first_ns.get_or_insert(at_ns);
        match at_ns.checked_sub(first_ns) {
            Some(ns) => Ok(ns / 1_000_000),
            None => Err(bad(field, value, "a time not before the first row's")
                .hint("sort the trace by time")),
        }
    }
}

impl<R: BufRead> Iterator for Trace<R> {
    type Item = Result<Request>;
    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let next = self.next_request();
        self.ended = !matches!(next, Ok(Some(_)));
        next.map_err(|e| e.with("file", &self.name).with("line", self.line)).transpose()
    }
}

const AZURE_FIELDS: [&str; 3] = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"];

/// The field that stands in the row under one of its names, or its usual name and nothing.
fn one_of<'a>(row: &'a Value, names: &[&'static str]) -> Result<(&'static str, Option<&'a Value>)> {
    let mut given = names.iter().filter_map(|&name| {
        row.get(name).filter(|value| !value.is_null()).map(|value| (name, value))
    });
    match (given.next(), given.next()) {
        (None, _) => Ok((names[0], None)),
        (Some((name, value)), None) => Ok((name, Some(value))),
        (Some(_), Some((name, value))) => {
            Err(bad(name, &value.to_string(), "one name per field").with("also_given", names[0]))
        }
    }
}

fn bad(field: &'static str, value: &str, expected: &str) -> Error {
    Error::new(ErrorKind::Malformed, "bad field in trace")
        .with("field", field)
        .with("value", shorten(value))
        .with("expected", expected)
}

fn tokens_error(field: &'static str, value: &str) -> Error {
    bad(field, value, &format!("tokens, up to {TOKENS_MAX}, at least 1 in a prompt"))
}

fn missing(field: &'static str) -> Error {
    Error::new(ErrorKind::Malformed, "field is missing in trace")
        .with("field", field)
        .hint("each line needs timestamp (or delay), input_length and output_length")
}

fn shorten(text: &str) -> String {
    let mut short: String = text.chars().take(80).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    format!("{short:?}")
}

/// Nanoseconds since 1970 of `YYYY-MM-DD hh:mm:ss[.fraction]`, in UTC.
fn timestamp_ns(text: &str) -> Option<u64> {
    let text = text.strip_suffix("+00:00").or_else(|| text.strip_suffix('Z')).unwrap_or(text);
    let (date, time) = text.split_once([' ', 'T'])?;
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let digits = |text: &str, len: usize, min: u64, max: u64| {
        let fine = text.len() == len && text.bytes().all(|b| b.is_ascii_digit());
        text.parse().ok().filter(|n| fine && (min..=max).contains(n))
    };
    let [year, month, day] = date.split('-').collect::<Vec<_>>()[..] else { return None };
    let [hour, minute, second] = time.split(':').collect::<Vec<_>>()[..] else { return None };
    let (year, month) = (digits(year, 4, 1970, 2500)?, digits(month, 2, 1, 12)?);
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let lengths = [31, if leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let day = digits(day, 2, 1, lengths[month as usize - 1])?;
    let leaps_before = |year: u64| (year - 1) / 4 - (year - 1) / 100 + (year - 1) / 400;
    let days = (year - 1970) * 365 + leaps_before(year) - leaps_before(1970)
        + lengths[..month as usize - 1].iter().sum::<u64>()
        + day
        - 1;
    let seconds =
        digits(hour, 2, 0, 23)? * 3600 + digits(minute, 2, 0, 59)? * 60 + digits(second, 2, 0, 59)?;
    if fraction.is_empty() || fraction.len() > 9 {
        return None;
    }
    let fraction =
        digits(fraction, fraction.len(), 0, u64::MAX)? * 10u64.pow(9 - fraction.len() as u32);
    Some((days * 86_400 + seconds) * 1_000_000_000 + fraction)
}

/// A map that holds the last [`REMEMBERED_MAX`] keys put into it.
struct Recent<K, V> {
    map: HashMap<K, V>,
    order: VecDeque<K>,
}

impl<K, V> Default for Recent<K, V> {
    fn default() -> Self {
        Self { map: HashMap::new(), order: VecDeque::new() }
    }
}

impl<K: Hash + Eq + Clone, V> Recent<K, V> {
    fn get(&self, key: &K) -> Option<&V> {
        self.map.get(key)
    }
    fn insert(&mut self, key: K, value: V) {
        if self.map.insert(key.clone(), value).is_some() {
            return;
        }
        self.order.push_back(key);
        if self.order.len() > REMEMBERED_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.map.remove(&oldest);
        }
    }
}

/// Requests with the distribution of Mooncake's conversation trace (FAST '25), endless and the same
/// for the same seed.
///
/// Lengths are drawn from the trace's quantiles, interpolated in the logarithm; arrivals are
/// Poisson.
#[derive(Clone, Debug)]
pub(crate) struct Generator {
    state: u64,
    per_s: f64,
    at_s: f64,
}

/// (share of requests, tokens at most), measured over the trace's 12,031 requests.
const PROMPT_QUANTILES: [(f64, f64); 17] = [
    (0.0, 891.0),
    (0.05, 901.0),
    (0.10, 964.0),
    (0.20, 1_662.0),
    (0.30, 3_263.0),
    (0.40, 4_993.0),
    (0.50, 6_909.0),
    (0.60, 9_570.0),
    (0.70, 13_196.0),
    (0.80, 17_869.0),
    (0.85, 21_467.0),
    (0.90, 27_367.0),
    (0.95, 39_552.0),
    (0.98, 66_484.0),
    (0.99, 85_401.0),
    (0.995, 100_886.0),
    (1.0, 126_195.0),
];
const OUTPUT_QUANTILES: [(f64, f64); 15] = [
    (0.0, 1.0),
    (0.01, 3.0),
    (0.05, 10.0),
    (0.10, 24.0),
    (0.20, 100.0),
    (0.30, 213.0),
    (0.40, 291.0),
    (0.50, 350.0),
    (0.60, 399.0),
    (0.70, 447.0),
    (0.80, 504.0),
    (0.90, 597.0),
    (0.95, 698.0),
    (0.99, 1_120.0),
    (1.0, 2_000.0),
];
/// Every prompt of the trace begins with the same block (a system prompt); a follow-up turn shares
/// more. In the trace 39 % of requests are follow-ups and longer than average; here length and
/// follow-up are independent, so a larger share of them gives the same share of cached blocks.
const FOLLOW_UPS: f64 = 0.48;
/// A follow-up shares between this part of its prompt and all of it.
const FOLLOW_UP_SHARES_MIN: f64 = 0.42;

impl Generator {
    /// The trace's own rate.
    pub(crate) const PER_S: f64 = 3.4;

    /// Requests at `per_s` a second on average.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`] if the rate is not between 1e-6 and 1e6.
    pub(crate) fn new(seed: u64, per_s: f64) -> Result<Self> {
        if !(1e-6..=1e6).contains(&per_s) {
            return Err(Error::new(ErrorKind::Malformed, "bad request rate")
                .with("found", per_s)
                .with("expected", "1e-6 to 1e6 requests a second"));
        }
        Ok(Self { state: mix(seed), per_s, at_s: 0.0 })
    }

    /// Uniform in 0..1.
    fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(GOLDEN);
        (mix(self.state) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn draw(&mut self, quantiles: &[(f64, f64)]) -> u32 {
        let u = self.uniform();
        let above =
            quantiles.partition_point(|&(share, _)| share <= u).clamp(1, quantiles.len() - 1);
        let ((from, low), (to, high)) = (quantiles[above - 1], quantiles[above]);
        (low * (high / low).powf((u - from) / (to - from))).round() as u32
    }
}

impl Iterator for Generator {
    type Item = Request;
    fn next(&mut self) -> Option<Request> {
        let at_ms = (self.at_s * 1e3) as u64;
        self.at_s -= (1.0 - self.uniform()).ln() / self.per_s;
        let prompt_tokens = self.draw(&PROMPT_QUANTILES).max(1);
        let output_tokens = self.draw(&OUTPUT_QUANTILES).max(1);
        let blocks = prompt_tokens.div_ceil(HASH_BLOCK_TOKENS as u32);
        // Drawn always, so that one request uses the same number of random words as any other.
        let (follows, part) = (self.uniform() < FOLLOW_UPS, self.uniform());
        let shared = match follows {
            true => FOLLOW_UP_SHARES_MIN + (1.0 - FOLLOW_UP_SHARES_MIN) * part,
            false => 0.0,
        };
        let shared_blocks = ((f64::from(blocks) * shared).round() as u32).max(1);
        Some(Request {
            at_ms,
            prompt_tokens,
            output_tokens,
            prefix_tokens: (shared_blocks * HASH_BLOCK_TOKENS as u32).min(prompt_tokens - 1),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<Request>> {
        Trace::new("t.trace", text.as_bytes()).collect()
    }
    fn refused(text: &str) -> String {
        read(text).unwrap_err().to_string()
    }
    fn request(at_ms: u64, prompt_tokens: u32, output_tokens: u32, prefix_tokens: u32) -> Request {
        Request { at_ms, prompt_tokens, output_tokens, prefix_tokens }
    }

    #[test]
    fn mooncake_rows_are_read_and_prefixes_counted() {
        let text = r#"
            {"timestamp": 3000, "input_length": 1300, "output_length": 7, "hash_ids": [0, 1, 2]}
            {"timestamp": 3000, "input_length": 1536, "output_length": 0, "hash_ids": [0, 1, 9]}

            {"timestamp": 3052.5, "input_length": 1025, "output_length": 3, "hash_ids": [0, 1, 2], "x": 1}
            {"timestamp": 3060, "input_length": 600, "output_length": 3, "hash_ids": [5, 0]}
        "#;
        let expected = [
            request(0, 1300, 7, 0),
            request(0, 1536, 1, 1024),
            // All three blocks are known, but the last token has to be computed anyway.
            request(52, 1025, 3, 1024),
            // Block 0 is known, but not as a prefix.
            request(60, 600, 3, 0),
        ];
        assert_eq!(read(text).unwrap(), expected);
        assert_eq!(read(&text.replace('\n', "\r\n")).unwrap(), expected);
    }

    #[test]
    fn other_names_and_delays_are_understood() {
        let text = r#"
            {"created_time": 100, "input_tokens": 10, "output_tokens": 2, "session_id": "a"}
            {"timestamp": 150, "input_length": 20, "output_length": 2, "hash_ids": null}
            {"delay_ms": 200, "input_tokens": 30, "output_tokens": 2, "session_id": "a"}
            {"delay": 5, "input_tokens": 40, "output_tokens": 2, "session_id": "a"}
            {"delay": 1, "input_tokens": 50, "output_tokens": 2}
        "#;
        let times: Vec<_> =
            read(text).unwrap().iter().map(|r| (r.at_ms, r.prompt_tokens)).collect();
        assert_eq!(times, [(0, 10), (50, 20), (200, 30), (205, 40), (51, 50)]);
    }

    #[test]
    fn azure_rows_are_read() {
        let text = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n\
            2023-11-16 23:59:59.9799600,4808,10\r\n\
            2023-11-17 00:00:00.0319600,3180,8\r\n\
            2023-11-17 00:00:01,1,1";
        assert_eq!(
            read(text).unwrap(),
            [request(0, 4808, 10, 0), request(52, 3180, 8, 0), request(1020, 1, 1, 0)]
        );
        assert_eq!(read("TIMESTAMP,ContextTokens,GeneratedTokens\n").unwrap(), []);
        assert_eq!(read("").unwrap(), []);
    }

    #[test]
    fn timestamps_are_exact() {
        for (text, seconds) in [
            ("1970-01-01 00:00:00", 0),
            ("2000-02-29 12:00:00.0000000", 951_825_600),
            ("2000-03-01T00:00:00Z", 951_868_800),
            ("2023-11-16 18:17:03+00:00", 1_700_158_623),
            ("2100-03-01 00:00:00", 4_107_542_400),
        ] {
            assert_eq!(timestamp_ns(text), Some(seconds * 1_000_000_000), "{text}");
        }
        assert_eq!(timestamp_ns("1970-01-01 00:00:00.0000001"), Some(100));
        for bad in [
            "",
            "2023-02-29 00:00:00",
            "2023-13-01 00:00:00",
            "2023-1-01 00:00:00",
            "2023-01-01 24:00:00",
            "2023-01-01 00:00:60",
            "2023-01-01 00:00",
            "0000-01-01 00:00:00",
            "2023-01-01 00:00:00.",
            "2023-01-01 00:00:00.1234567890",
            "2023-01-01 +1:00:00",
        ] {
            assert_eq!(timestamp_ns(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_bad_line_is_refused_by_file_line_field_and_value() {
        let good = r#"{"timestamp": 5, "input_length": 10, "output_length": 2}"#;
        for (bad, field, value) in [
            (r#"{"timestamp": 6, "input_length": -1, "output_length": 2}"#, "input_length", "-1"),
            (r#"{"timestamp": 6, "input_length": 0, "output_length": 2}"#, "input_length", "0"),
            (
                r#"{"timestamp": 6, "input_tokens": 1e3, "output_length": 2}"#,
                "input_tokens",
                "1000.0",
            ),
            (
                r#"{"timestamp": 6, "input_length": 4294967297, "output_length": 2}"#,
                "input_length",
                "4294967297",
            ),
            (
                r#"{"timestamp": "6", "input_length": 1, "output_length": 2}"#,
                "timestamp",
                r#"\"6\""#,
            ),
            (r#"{"timestamp": -6, "input_length": 1, "output_length": 2}"#, "timestamp", "-6"),
            (r#"{"timestamp": 4, "input_length": 1, "output_length": 2}"#, "timestamp", "4"),
            (r#"{"delay": 1e300, "input_length": 1, "output_length": 2}"#, "delay", "1e+300"),
            (
                r#"{"timestamp": 6, "input_length": 1, "output_length": 2, "hash_ids": [-1]}"#,
                "hash_ids",
                "[-1]",
            ),
            (
                r#"{"timestamp": 6, "input_length": 1, "output_length": 2, "session_id": 3}"#,
                "session_id",
                "3",
            ),
            (
                r#"{"timestamp": 6, "input_length": 1, "input_tokens": 2, "output_length": 2}"#,
                "input_tokens",
                "2",
            ),
        ] {
            let e = refused(&format!("{good}\n\n{bad}\n"));
            assert!(e.starts_with("malformed: "), "{e}");
            assert!(e.contains(&format!("field={field}, value=\"{value}\"")), "{e}");
            assert!(e.contains("file=t.trace, line=3"), "{e}");
        }
        let e = refused(&format!("{good}\n{{\"timestamp\": 6, \"input_length\": 1}}"));
        assert!(e.contains("field=output_length, file=t.trace, line=2"), "{e}");
        let e = refused("{\"input_length\": 1, \"output_length\": 1}");
        assert!(e.contains("field=timestamp"), "{e}");
        for torn in [r#"{"timestamp": 6, "inp"#, "[1]", "7"] {
            let e = refused(&format!("{good}\n{torn}"));
            assert!(e.contains("line=2"), "{e}");
        }
        let header = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,1,1\n";
        for (row, what) in [
            ("2023-11-16 18:17:04.0,x,1", "field=ContextTokens, value=\"x\""),
            ("2023-11-16 18:17:04.0,0,1", "field=ContextTokens, value=\"0\""),
            ("2023-11-16 18:17:04.0,1,-1", "field=GeneratedTokens, value=\"-1\""),
            ("16.11.2023,1,1", "field=TIMESTAMP, value=\"16.11.2023\""),
            ("2023-11-16 18:17:03.8,1,1", "field=TIMESTAMP, value=\"2023-11-16 18:17:03.8\""),
            ("2023-11-16 18:17:04.0,1", "wrong number of columns (found=2, expected=3"),
        ] {
            let e = refused(&format!("{header}{row}\n"));
            assert!(e.contains(what) && e.contains("line=3"), "{e}");
        }
        assert!(refused("a,b,c\n").contains("unknown trace format"));
        let long = "s".repeat(SESSION_BYTES_MAX + 1);
        let row = good.replace('}', &format!(", \"session_id\": \"{long}\"}}"));
        let e = refused(&row);
        assert!(e.contains("field=session_id") && e.len() < 400, "{e}");
    }

    #[test]
    fn lines_are_bounded_and_an_error_ends_the_trace() {
        let mut endless = Trace::new("x", BufReader::new(std::io::repeat(b'{')));
        let e = endless.next().unwrap().unwrap_err();
        assert_eq!(e.kind(), ErrorKind::LimitExceeded);
        assert!(endless.next().is_none());
        let mut binary = Trace::new("x", &b"{\xff}\n{}"[..]);
        assert_eq!(binary.next().unwrap().unwrap_err().kind(), ErrorKind::Malformed);
        assert!(binary.next().is_none());
        let e = from_file(Path::new("/dev/null")).err().unwrap();
        assert!(e.to_string().contains("no requests (file=/dev/null)"), "{e}");
        let e = Trace::open(Path::new("/nonexistent/trace")).err().unwrap();
        assert!(e.to_string().contains("file=/nonexistent/trace"), "{e}");
    }

    #[test]
    fn memory_is_bounded() {
        let mut recent = Recent::default();
        for key in 0..REMEMBERED_MAX + 10 {
            recent.insert(key, ());
        }
        assert_eq!((recent.map.len(), recent.order.len()), (REMEMBERED_MAX, REMEMBERED_MAX));
        assert!(recent.get(&9).is_none() && recent.get(&10).is_some());
    }

    #[test]
    fn scaling_keeps_a_token_and_a_prefix_below_the_prompt() {
        let r = request(7, 1000, 10, 999);
        assert_eq!(r.scale(0.01), request(7, 10, 1, 9));
        assert_eq!(r.scale(0.0), request(7, 1, 1, 0));
        assert_eq!(r.scale(1.0), r);
        assert_eq!(r.scale(1e30), request(7, u32::MAX, u32::MAX, u32::MAX - 1));
        assert_eq!(r.scale(f64::NAN), request(7, 1, 1, 0));
    }

    #[test]
    fn generated_requests_have_the_distribution_of_the_trace() {
        for seed in 0..4 {
            let requests: Vec<Request> =
                Generator::new(seed, Generator::PER_S).unwrap().take(20_000).collect();
            let n = requests.len() as f64;
            let near = |what: &str, found: f64, expected: f64| {
                let off = (found - expected).abs() / expected;
                assert!(off <= 0.15, "seed {seed}, {what}: {found}, expected {expected}");
            };
            let mut prompts: Vec<u32> = requests.iter().map(|r| r.prompt_tokens).collect();
            prompts.sort_unstable();
            for (share, expected) in [(0.5, 6909.0), (0.9, 27367.0), (0.99, 85401.0)] {
                near("prompt quantile", f64::from(prompts[(share * n) as usize]), expected);
            }
            near("longest prompt", f64::from(prompts[prompts.len() - 1]), 126_195.0);
            let mean = |of: fn(&Request) -> u32| {
                requests.iter().map(|r| f64::from(of(r))).sum::<f64>() / n
            };
            near("prompt mean", mean(|r| r.prompt_tokens), 12_035.0);
            near("output mean", mean(|r| r.output_tokens), 343.0);
            near("prefix share", mean(|r| r.prefix_tokens) / mean(|r| r.prompt_tokens), 0.366);
            let span_s = requests[requests.len() - 1].at_ms as f64 / 1e3;
            near("rate", n / span_s, Generator::PER_S);
            assert!(requests.iter().all(|r| r.prefix_tokens < r.prompt_tokens));
            assert!(requests.is_sorted_by_key(|r| r.at_ms));
        }
    }

    #[test]
    fn a_seed_fixes_the_requests() {
        let take = |seed| Generator::new(seed, 10.0).unwrap().take(100).collect::<Vec<_>>();
        assert_eq!(take(1), take(1));
        assert_ne!(take(1), take(2));
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(Generator::new(1, bad).is_err());
        }
    }
}
