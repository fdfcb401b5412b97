//! One process: its output line by line, its log, its signals and its end.
//!
//! Invariant: nothing outlives its test. A process is killed when it is dropped, and ends by itself
//! when this process dies, because its standard input is closed then.

use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::mpsc;

/// The longest wait for anything; about ten times what is promised of the slowest.
pub(crate) const CAP: Duration = Duration::from_secs(60);

/// Waits until `found` has something, looking again and again.
pub(crate) async fn until<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let look = async {
        loop {
            if let Some(it) = found() {
                return it;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let waited = tokio::time::timeout(CAP, look).await;
    waited.unwrap_or_else(|_| panic!("never came about: {what}"))
}

/// Waits for a future that has to end.
pub(crate) async fn within<T>(what: &str, work: impl Future<Output = T>) -> T {
    let ended = tokio::time::timeout(CAP, work).await;
    ended.unwrap_or_else(|_| panic!("never ended: {what}"))
}

pub(crate) struct Process {
    name: String,
    child: Child,
    /// Open as long as it is to live.
    _stdin: Option<ChildStdin>,
    lines: mpsc::UnboundedReceiver<String>,
    log: PathBuf,
}

impl Process {
    /// Starts `kvlane` with these arguments; its log goes to `dir`.
    pub(crate) fn spawn(dir: &Path, name: &str, args: &[String]) -> Self {
        Self::spawn_in(dir, name, args, None)
    }

    /// The same, in a network namespace.
    pub(crate) fn spawn_in(dir: &Path, name: &str, args: &[String], space: Option<&str>) -> Self {
        let mut command = match space {
            None => Command::new(super::binary::path()),
            Some(space) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", space]).arg(super::binary::path());
                command
            }
        };
        command
            .args(args)
            .arg("--until-stdin-closes")
            .env("RUST_LOG", "info,kvlane_actors::shell=debug");
        Self::spawn_command(dir, name, command)
    }

    /// Starts a program that ends when its standard input does.
    pub(crate) fn spawn_command(dir: &Path, name: &str, mut command: Command) -> Self {
        let log = dir.join(format!("{name}.log"));
        let file = std::fs::File::options().create(true).append(true).open(&log).unwrap();
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(file)
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap()).lines();
        let (to, lines) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Ok(Some(line)) = out.next_line().await {
                if to.send(line).is_err() {
                    return;
                }
            }
        });
        let stdin = child.stdin.take();
        Self { name: name.into(), child, _stdin: stdin, lines, log }
    }

    /// The next line of its output; `None` once there will be no more.
    pub(crate) async fn line(&mut self) -> Option<String> {
        within(&format!("a line of {}", self.name), self.lines.recv()).await
    }

    /// Forgets what it has said so far.
    pub(crate) fn drain(&mut self) {
        while self.lines.try_recv().is_ok() {}
    }

    /// The line by which it says that it is ready.
    pub(crate) async fn ready(&mut self) -> Value {
        match self.line().await {
            Some(line) => serde_json::from_str(&line)
                .unwrap_or_else(|e| panic!("{} said {line:?}: {e}", self.name)),
            None => panic!("{} ended before it was ready:\n{}", self.name, self.log()),
        }
    }

    /// Waits until it has stopped at a phase.
    pub(crate) async fn stopped_at(&mut self, phase: &str) {
        self.says(&format!("stopped-at {phase}")).await;
    }

    /// Waits until it is held at a phase.
    pub(crate) async fn held_at(&mut self, phase: &str) {
        self.says(&format!("held-at {phase}")).await;
    }

    async fn says(&mut self, expected: &str) {
        let line = self.line().await.unwrap_or_else(|| {
            panic!("{} ended before it was {expected}:\n{}", self.name, self.log())
        });
        assert_eq!(line, expected, "{}", self.name);
    }

    pub(crate) fn pid(&self) -> i32 {
        self.child.id().expect("it runs") as i32
    }

    /// Sends a signal, by name.
    pub(crate) fn signal(&self, signal: &str) {
        let pid = self.pid();
        let sent = std::process::Command::new("sh")
            .args(["-c", &format!("kill -{signal} {pid}")])
            .status()
            .unwrap();
        assert!(sent.success(), "signal {signal} to {}", self.name);
    }

    /// Kills it, as if its machine had lost it, and waits until it is gone.
    pub(crate) async fn kill(&mut self) {
        self.child.start_kill().unwrap();
        self.ended().await;
    }

    /// Waits for its end.
    pub(crate) async fn ended(&mut self) -> ExitStatus {
        within(&format!("process {}", self.name), self.child.wait()).await.unwrap()
    }

    /// What it has logged.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            eprintln!("---- end of the log of {}", self.name);
            for line in &lines[lines.len().saturating_sub(25)..] {
                eprintln!("{line}");
            }
        }
        let _ = self.child.start_kill();
    }
}
