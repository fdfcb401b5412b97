//! Processes of this program that make a cluster for the time of a command.
//!
//! Owns: a scratch directory with a throw-away authority, certificates and logs, and the children.
//! In: who each process is, and its flags; which is to be killed. Out: what it says when it is
//! ready, its pipes, how it ended. Invariants: every process has a certificate of its own; a child is told to end by the end
//! of its standard input, so none outlives this process; every wait has a deadline.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use kvlane_proto::{Error, ErrorKind, Identity, Result, Role};
use kvlane_transport::quic::ca;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::scratch::Scratch;

/// How long a process may take to say that it is ready.
const READY: Duration = Duration::from_secs(30);
/// How long one may take to end.
const END: Duration = Duration::from_secs(20);
/// How often it is looked whether one has died.
const LOOK: Duration = Duration::from_millis(100);
/// Lines of each log that are shown when something failed.
const LOG_LINES: usize = 5;

/// A process that is ready.
pub(crate) struct Started {
    pub(crate) pid: u32,
    ready: serde_json::Value,
}

impl Started {
    /// Where its QUIC endpoint is.
    pub(crate) fn quic(&self) -> &str {
        self.ready["quic"].as_str().unwrap_or_default()
    }
    /// Where a worker's stand-in takes requests.
    pub(crate) fn serving(&self) -> &str {
        self.ready["serving"].as_str().unwrap_or_default()
    }
}

struct Process {
    name: String,
    /// None for what is no member of the cluster.
    role: Option<Role>,
    child: Child,
    lines: Option<Lines<BufReader<ChildStdout>>>,
}

/// The processes.
pub(crate) struct Cluster {
    name: &'static str,
    dir: Scratch,
    processes: Vec<Process>,
}

impl Cluster {
    /// Makes the authority; starts nothing yet.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] if the scratch directory cannot be had or written.
    pub(crate) fn new(name: &'static str) -> Result<Self> {
        let cluster = Self { name, dir: Scratch::new(name)?, processes: Vec::new() };
        ca::create_ca(&cluster.ca(), name)?;
        Ok(cluster)
    }
    fn ca(&self) -> PathBuf {
        self.dir.path().join("ca")
    }
    /// A name in this cluster.
    ///
    /// # Errors
    /// As [`Identity::new`].
    pub(crate) fn identity(&self, role: Role, instance: &str, rank: u32) -> Result<Identity> {
        Identity::new(self.name, role, instance, rank)
    }
    /// Issues certificates, once; gives their directory.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] if they cannot be written.
    pub(crate) fn certs(&self, identity: &Identity) -> Result<PathBuf> {
        let Identity { role, instance, rank, .. } = identity;
        let dir = self.dir.path().join(format!("certs-{role}-{instance}-{rank}"));
        if !dir.exists() {
            ca::issue(&self.ca(), &dir, identity, 1)?;
        }
        Ok(dir)
    }

    /// Starts the bootstrap service there; port 0 is a free one.
    ///
    /// # Errors
    /// As [`Cluster::start`].
    pub(crate) async fn start_service(&mut self, listen: &str) -> Result<Started> {
        let identity = self.identity(Role::Service, "bootstrap", 0)?;
        let flags = ["bootstrap", "--quic", listen, "--until-stdin-closes"];
        self.start(&identity, &flags).await
    }
    /// Starts an emulated NIC; gives its socket and process.
    ///
    /// # Errors
    /// As [`Cluster::start`].
    pub(crate) async fn start_nic(&mut self, n: u16) -> Result<(String, u32)> {
        let name = format!("nic-{n}");
        let socket = self.file(&name);
        let flags = ["emulated-nic", "--socket", &socket, "--name", &name, "--until-stdin-closes"];
        let nic = self.spawn(&name, None, &flags).await?;
        Ok((socket, nic.pid))
    }
    /// Starts this program with `flags` and certificates, and waits for its line that says it is
    /// ready. It must end with its standard input.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] with the process's name if it does not start or is not ready in time.
    pub(crate) async fn start(&mut self, identity: &Identity, flags: &[&str]) -> Result<Started> {
        let name = format!("{}-{}", identity.instance, identity.rank);
        let certs = self.certs(identity)?.display().to_string();
        let flags = [flags, &["--certs", &certs]].concat();
        self.spawn(&name, Some(identity.role), &flags).await
    }
    async fn spawn(&mut self, name: &str, role: Option<Role>, flags: &[&str]) -> Result<Started> {
        let failed = |why: &str| Error::new(ErrorKind::Io, why.to_string()).with("process", name);
        let program = std::env::current_exe()
            .map_err(|e| failed("this program cannot be found").caused_by(e))?;
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.log(name))
            .map_err(|e| failed("cannot write a log").caused_by(e))?;
        let mut child = Command::new(program)
            .args(flags)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            // A signal of the terminal is for this process, which ends them in order.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| failed("cannot be started").caused_by(e))?;
        let (pid, stdout) = (child.id().unwrap_or_default(), child.stdout.take());
        self.processes.push(Process { name: name.to_string(), role, child, lines: None });
        let Some(stdout) = stdout else { return Err(failed("has no output")) };
        let mut lines = BufReader::new(stdout).lines();
        let line = tokio::time::timeout(READY, lines.next_line())
            .await
            .map_err(|_| failed("was not ready in time").with("limit_s", READY.as_secs()))?
            .map_err(|e| failed("cannot be read").caused_by(e))?
            .ok_or_else(|| failed("ended before it was ready"))?;
        let ready =
            serde_json::from_str(&line).map_err(|e| failed("said something else").caused_by(e))?;
        if let Some(process) = self.processes.last_mut() {
            process.lines = Some(lines);
        }
        Ok(Started { pid, ready })
    }
    /// Kills a process, as the kernel does when memory is short, and waits until it is gone; from
    /// here on it is not missed.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is none, or it has ended by itself.
    pub(crate) async fn kill(&mut self, pid: u32) -> Result<()> {
        let gone = |why| Error::new(ErrorKind::NotFound, why).with("pid", pid);
        let at = self.processes.iter().position(|p| p.child.id() == Some(pid));
        let at = at.ok_or_else(|| gone("no such process to kill"))?;
        let Process { name, child, .. } = &mut self.processes[at];
        if let Ok(Some(status)) = child.try_wait() {
            let e = gone("a process has ended by itself").with("process", name);
            return Err(e.with("found", how(status)));
        }
        child.kill().await.map_err(|e| gone("a process cannot be killed").caused_by(e))?;
        self.processes.remove(at);
        Ok(())
    }
    /// Where a file of this cluster is.
    pub(crate) fn file(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    /// The standard input and output of a process, for whoever speaks with it; they can be had
    /// once. Dropping the input tells it to end.
    pub(crate) fn pipes(
        &mut self,
        started: &Started,
    ) -> Option<(ChildStdin, Lines<BufReader<ChildStdout>>)> {
        let process = self.processes.iter_mut().find(|p| p.child.id() == Some(started.pid))?;
        process.child.stdin.take().zip(process.lines.take())
    }

    fn log(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("{name}.log"))
    }

    /// Waits until one of them has ended, which none of them should; says which, and how.
    pub(crate) async fn died(&mut self) -> Error {
        loop {
            let mut ended = Vec::new();
            for Process { name, child, .. } in &mut self.processes {
                if let Ok(Some(status)) = child.try_wait() {
                    ended.push((&*name, status));
                }
            }
            // Others may have ended in order because of the one that did not.
            if let Some((name, status)) = ended.iter().min_by_key(|(_, status)| status.success()) {
                return Error::new(ErrorKind::PeerLost, "a process has ended before its work")
                    .with("process", name)
                    .with("found", how(*status))
                    .hint("look for its last words below, and in the kernel's log");
            }
            tokio::time::sleep(LOOK).await;
        }
    }
    /// `e`, unless it comes of one of them having died: that shows within a moment.
    pub(crate) async fn explain(&mut self, e: Error) -> Error {
        tokio::time::timeout(5 * LOOK, self.died()).await.unwrap_or(e)
    }
    /// Ends all of them, the newest first; each must end well.
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] with the first that did not, and how it ended.
    pub(crate) async fn end(&mut self) -> Result<()> {
        let mut wrong = None;
        for Process { name, child, .. } in self.processes.iter_mut().rev() {
            drop(child.stdin.take());
            let ended = match tokio::time::timeout(END, child.wait()).await {
                Ok(Ok(status)) if status.success() => continue,
                Ok(Ok(status)) => how(status),
                Ok(Err(e)) => e.to_string(),
                Err(_) => {
                    let _ = child.kill().await;
                    format!("did not end within {} s", END.as_secs())
                }
            };
            wrong.get_or_insert_with(|| {
                Error::new(ErrorKind::Internal, "a process did not end well")
                    .with("process", &*name)
                    .with("found", ended)
            });
        }
        wrong.map_or(Ok(()), Err)
    }
    /// How many links of these processes came up, by engine; as far as they log it.
    pub(crate) fn links(&self, of: Role) -> BTreeMap<String, u32> {
        let mut links = BTreeMap::new();
        for process in self.processes.iter().filter(|p| p.role == Some(of)) {
            let text = std::fs::read_to_string(self.log(&process.name)).unwrap_or_default();
            let up = text.lines().filter(|line| line.contains("link is up"));
            for engine in up.filter_map(|l| l.split_once(" engine=")?.1.split_whitespace().next()) {
                *links.entry(engine.to_string()).or_default() += 1;
            }
        }
        links
    }
    /// The last lines of each log, when something went wrong.
    pub(crate) fn show_logs(&self) {
        for Process { name, .. } in &self.processes {
            let text = std::fs::read_to_string(self.log(name)).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            for line in &lines[lines.len().saturating_sub(LOG_LINES)..] {
                eprintln!("[{name}] {line}");
            }
        }
    }
}

/// How a process ended, in words.
pub(crate) fn how(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("killed by signal {signal}"),
        (None, Some(code)) => format!("exit code {code}"),
        (None, None) => status.to_string(),
    }
}
