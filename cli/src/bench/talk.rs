//! How the bench speaks with the processes that it starts: one JSON line there, one back.
//!
//! Owns: a child with its standard input and output ([`Process`]), and what is said to the receiver
//! ([`Ask`], [`Answer`]). Invariants: a line is bounded; every answer has a deadline; a child that
//! ended is told apart from one that is silent; no child outlives its `Process`, nor this process,
//! because its standard input is closed then.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use kvlane_proto::{Error, ErrorKind, Refusal, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::engines::Setup;
use super::pages::{Draw, Pattern, Size};
use super::wait::{SLICE, Stop, Wait};
use crate::cluster;
use crate::report::json_line;

/// Longest line.
pub(crate) const LINE_BYTES_MAX: u64 = 1 << 20;
/// Answers that may wait; there is one for each line said.
const LINES: usize = 16;
/// How long a child may take to end by itself.
const END: Duration = Duration::from_secs(2);

/// What the receiver is asked.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Ask {
    /// Makes the pool.
    Start { pool_bytes: u64, pattern: Pattern },
    /// Starts an engine with one link, for one page size.
    Engine { setup: Setup, size: Size },
    /// What the sender's engine said.
    Connect { blob: Vec<u8> },
    /// Opens a grant for a draw.
    Open { grant: u64, draw: Draw, part_bytes: u64 },
    /// Fences it.
    Close { grant: u64 },
    /// Ends the engine.
    EndEngine,
    /// Listens for the connection of the raw loop.
    RawListen,
    /// Takes it, from this port.
    RawAccept { port: u16 },
    /// Receives a draw over it. Answered twice: before, and when all has come.
    Raw { size: Size, draw: Draw, call_bytes: u64, ack_bytes: u64 },
    /// Zeroes the pages of a draw.
    Clear { size: Size, draw: Draw },
    /// Compares the pages of a draw with what was sent.
    Check { size: Size, draw: Draw },
}

/// What the receiver answers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Done,
    Engine { blob: Vec<u8>, emulated: bool },
    Listening { port: u16 },
    Checked { bytes: u64 },
    Failed(Refusal),
}

/// A child that is spoken with.
pub(crate) struct Process {
    name: &'static str,
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    stop: Stop,
}

impl Process {
    /// Starts a program; its standard error stays as `command` has it.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] if it cannot be started.
    pub(crate) fn start(name: &'static str, mut command: Command, stop: &Stop) -> Result<Self> {
        let failed = |why: &str| Error::new(ErrorKind::Io, why.to_string()).with("process", name);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // A signal of the terminal is for this process, which ends it in order.
            .process_group(0)
            .spawn()
            .map_err(|e| failed("a process cannot be started").caused_by(e))?;
        let (to, lines) = sync_channel(LINES);
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let process = Self { name, child, stdin, lines, stop: stop.clone() };
        let mut out = BufReader::new(stdout.ok_or_else(|| failed("a process has no output"))?);
        std::thread::Builder::new()
            .name("kvlane-lines".into())
            .spawn(move || {
                while let Some(line) = read_line(&mut out) {
                    if to.send(line).is_err() {
                        return;
                    }
                }
            })
            .map_err(|e| failed("no thread to read a process").caused_by(e))?;
        Ok(process)
    }
    /// Says one thing and waits for the answer.
    ///
    /// # Errors
    /// [`ErrorKind::PeerLost`] if the process has ended, and as [`Wait::check`].
    pub(crate) fn ask<A: DeserializeOwned>(
        &mut self,
        ask: &impl Serialize,
        limit: Duration,
    ) -> Result<A> {
        self.say(ask)?;
        self.hear(limit)
    }
    fn say(&mut self, ask: &impl Serialize) -> Result<()> {
        let line = json_line(ask)?;
        // The pipe has room: whatever was said before has been answered.
        let said = match &mut self.stdin {
            Some(stdin) => stdin.write_all(line.as_bytes()).and_then(|()| stdin.flush()),
            None => Err(std::io::ErrorKind::BrokenPipe.into()),
        };
        said.map_err(|_| self.lost())
    }
    /// Waits for one more answer.
    ///
    /// # Errors
    /// As [`Process::ask`].
    pub(crate) fn hear<A: DeserializeOwned>(&mut self, limit: Duration) -> Result<A> {
        let wait = Wait::new(format!("an answer of the {}", self.name), limit, &self.stop);
        let line = loop {
            match self.lines.recv_timeout(SLICE) {
                Ok(line) => break line,
                Err(RecvTimeoutError::Timeout) => wait.check()?,
                Err(RecvTimeoutError::Disconnected) => return Err(self.lost()),
            }
        };
        serde_json::from_str(&line).map_err(|e| {
            Error::new(ErrorKind::Malformed, "a process said something else")
                .with("process", self.name)
                .caused_by(e)
        })
    }
    /// What became of it, once it has closed its output or broken a connection: waits a moment,
    /// because that comes first.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        let begun = Instant::now();
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if begun.elapsed() < END / 4 => std::thread::sleep(SLICE / 10),
                _ => return None,
            }
        }
    }
    /// `e`, unless it comes of the process having ended.
    pub(crate) fn explain(&mut self, e: Error) -> Error {
        if e.kind() == ErrorKind::Aborted || self.ended().is_none() { e } else { self.lost() }
    }
    fn lost(&mut self) -> Error {
        let how = self.ended().map_or("closed its output".into(), cluster::how);
        Error::new(ErrorKind::PeerLost, format!("the {} has ended before its work", self.name))
            .with("found", how)
            .hint("look above for what it said, and in the kernel's log for want of memory")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The end of its input is how it is told to end.
        drop(self.stdin.take());
        let begun = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if begun.elapsed() > END || self.stop.check().is_err() {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(SLICE / 10);
        }
    }
}

/// The next line; `None` at the end, or when a line is too long or no text.
pub(crate) fn read_line(from: &mut impl BufRead) -> Option<String> {
    let mut line = String::new();
    let n = from.by_ref().take(LINE_BYTES_MAX).read_line(&mut line).ok()?;
    (n > 0 && line.ends_with('\n')).then_some(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Process {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stderr(Stdio::null());
        Process::start("helper", command, &Stop::default()).unwrap()
    }

    #[test]
    fn an_answer_comes_back() {
        let mut echo = shell("while read -r line; do printf '%s\\n' \"$line\"; done");
        let limit = Duration::from_secs(30);
        let back: u32 = echo.ask(&7, limit).unwrap();
        assert_eq!(back, 7);
        let e = echo.ask::<u32>(&"text", limit).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Malformed, "{e}");
    }

    #[test]
    fn a_process_that_ended_says_how() {
        let limit = Duration::from_secs(30);
        for (script, how) in [("exit 3", "exit code 3"), ("kill -9 $$", "killed by signal 9")] {
            let mut process = shell(script);
            let e = process.ask::<u32>(&1, limit).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::PeerLost);
            assert!(e.to_string().contains("the helper has ended") && e.to_string().contains(how));
        }
    }

    #[test]
    fn silence_ends_at_the_deadline_or_with_the_users_wish() {
        let mut process = shell("cat >/dev/null");
        let e = process.ask::<u32>(&1, Duration::from_millis(80)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::DeadlineExceeded);
        assert!(e.to_string().contains("for=an answer of the helper"), "{e}");
        process.stop.set();
        let e = process.ask::<u32>(&1, Duration::from_secs(30)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Aborted);
    }

    #[test]
    fn a_line_without_end_is_not_read_for_ever() {
        let endless = std::io::repeat(b'x');
        assert_eq!(read_line(&mut BufReader::new(endless)), None);
        let mut two = BufReader::new(&b"one\ntwo"[..]);
        assert_eq!(read_line(&mut two).as_deref(), Some("one\n"));
        assert_eq!(read_line(&mut two), None);
    }
}
