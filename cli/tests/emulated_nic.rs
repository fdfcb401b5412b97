//! `kvlane emulated-nic` as a process, with clients in two others.
#![allow(clippy::unwrap_used, clippy::panic)] // Tests fail by panicking.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane_proto::ErrorKind;
use kvlane_transport::emulated::client::{End, Hca, Key, QueuePair, Rights};
use kvlane_transport::emulated::faults::{Fault, Target, What};
use kvlane_transport::memory::Region;
use kvlane_transport::mlx5::completion::What as Said;
use kvlane_transport::mlx5::{Remote, Segment, entry};
use kvlane_transport::sys::unix::{Name, Socket};

const PATIENCE: Duration = Duration::from_secs(20);
const KVLANE: &str = env!("CARGO_BIN_EXE_kvlane");
/// In the environment of the other worker: where the NIC is.
const NIC: &str = "KVLANE_TEST_NIC";

/// A process with a conversation; killed when the test is over, however that ends.
struct Process {
    child: Child,
    says: BufReader<ChildStdout>,
    hears: Option<ChildStdin>,
}

impl Process {
    fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .env_remove("RUST_LOG")
            .spawn()
            .unwrap();
        let says = BufReader::new(child.stdout.take().unwrap());
        let hears = child.stdin.take();
        Self { child, says, hears }
    }
    /// Its next line that begins with this word, without it.
    fn line(&mut self, word: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(self.says.read_line(&mut line).unwrap() > 0, "it ended before it said {word}");
            if let Some((_, rest)) = line.split_once(word) {
                return rest.trim().to_owned();
            }
        }
    }
    fn tell(&mut self, text: &str) {
        writeln!(self.hears.as_mut().unwrap(), "{text}").unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A NIC, and where it is.
fn nic(test: &str, more: &[&str]) -> (Process, String) {
    let socket = format!("@kvlane-{test}-{}", std::process::id());
    let mut nic = Process::start(
        Command::new(KVLANE)
            .args(["emulated-nic", "--socket", &socket, "--until-stdin-closes"])
            .args(more),
    );
    let ready: serde_json::Value = serde_json::from_str(&format!("{{{}", nic.line("{"))).unwrap();
    assert_eq!(
        (&ready["ready"], &ready["socket"]),
        (&"emulated-nic".into(), &socket.clone().into())
    );
    (nic, socket)
}

fn open(socket: &str) -> Hca {
    Hca::open(&socket.parse::<Name>().unwrap()).unwrap()
}

fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// A worker's things.
struct Worker {
    hca: Hca,
    pool: Arc<Region>,
    key: Key,
    pair: QueuePair,
}

impl Worker {
    fn open(socket: &str) -> Self {
        let mut hca = open(socket);
        let domain = hca.domain().unwrap();
        let pool = Region::for_nic(1 << 20).unwrap();
        let key = hca.register(domain, &pool, Rights::RemoteWrite).unwrap();
        let pair = hca.queue_pair(domain, 64, 64).unwrap();
        Self { hca, pool, key, pair }
    }
    fn read(&self, bytes: usize) -> Vec<u8> {
        let mut into = vec![0; bytes];
        self.pool.memory().read_at(0, &mut into).unwrap();
        into
    }
    /// What the other side has to know.
    fn card(&self) -> String {
        let (pair, pool) = (&self.pair, &self.pool);
        format!("{} {} {} {}", pair.number, pair.sequence, pool.address(), self.key.0)
    }
    fn connect(&mut self, card: &str) -> Remote {
        let numbers: Vec<u64> = card.split(' ').map(|word| word.parse().unwrap()).collect();
        let peer = End { number: numbers[0] as u32, sequence: numbers[1] as u32, ..End::default() };
        self.hca.connect(&self.pair, peer).unwrap();
        Remote { address: numbers[2], key: numbers[3] as u32 }
    }
    fn write(&mut self, to: Remote, text: &[u8], immediate: u32) {
        self.pool.memory().write_at(0, text).unwrap();
        let bytes = text.len() as u32;
        let from = Segment { address: self.pool.address(), key: self.key.0, bytes };
        let sends = &mut self.pair.sends;
        let index = sends.next() as u16;
        let entry = entry::write_immediate(index, sends.number(), to, from, immediate, true);
        assert!(sends.push(&entry));
        sends.ring();
        self.hca.kick();
    }
    fn next(&mut self) -> Said {
        let completions = &mut self.pair.completions;
        let completion = wait_for("a completion", || completions.poll()).unwrap();
        completions.consumed();
        completion.what
    }
}

/// The other worker: not a test by itself.
#[test]
fn other_worker() {
    let Ok(socket) = std::env::var(NIC) else { return };
    let mut worker = Worker::open(&socket);
    println!("card {}", worker.card());
    let mut lines = std::io::stdin().lines();
    let to = worker.connect(&lines.next().unwrap().unwrap());
    println!("connected");
    for (immediate, line) in (0..).zip(lines) {
        worker.write(to, line.unwrap().as_bytes(), immediate);
        println!("posted");
    }
}

fn other(socket: &str) -> Process {
    let this = std::env::current_exe().unwrap();
    let mut command = Command::new(this);
    command.args(["--exact", "other_worker", "--nocapture"]).env(NIC, socket);
    Process::start(&mut command)
}

#[test]
fn two_processes_write_and_what_one_sent_outlives_it() {
    let (_nic, socket) = nic("two", &["--name", "emulated7"]);
    let mut worker = Worker::open(&socket);
    assert_eq!(worker.hca.about().name, "emulated7");
    let mut other = other(&socket);
    let card = other.line("card ");
    worker.connect(&card);
    other.tell(&worker.card());
    other.line("connected");
    worker.pair.receives.post(4);
    other.tell("hello from afar");
    assert_eq!(worker.next(), Said::Arrived { immediate: 0, bytes: 15 });
    assert_eq!(worker.read(15), b"hello from afar");
    // Held on the wire, by its process; then that is killed.
    let pid = other.child.id() as i32;
    let hold = Fault::new(What::HoldWire, Target::Process(pid));
    let hold = worker.hca.fault(&hold).unwrap();
    other.tell("its last words ");
    wait_for("held", || (worker.hca.stats().unwrap().hits(hold) == 1).then_some(()));
    drop(other);
    wait_for("gone", || (worker.hca.stats().unwrap().pairs.len() == 1).then_some(()));
    assert_eq!(worker.read(15), b"hello from afar");
    worker.hca.clear(hold).unwrap();
    assert_eq!(worker.next(), Said::Arrived { immediate: 1, bytes: 15 });
    assert_eq!(worker.read(15), b"its last words ");
    assert_eq!(worker.hca.stats().unwrap().landed_after_sender, 1);
}

fn say(command: &str, socket: &str, more: &[&str]) -> String {
    let out = Command::new(KVLANE)
        .args(["emulated-nic", command, "--socket", socket])
        .args(more)
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

#[test]
fn operators_see_what_happened_and_a_killed_nic_is_gone_at_once() {
    let (mut nic, socket) = nic("ops", &["--fault", "drop-kick skip=1000"]);
    let mut worker = Worker::open(&socket);
    let own = worker.card();
    let to = worker.connect(&own);
    worker.pair.receives.post(2);
    worker.write(to, b"self", 5);
    assert_eq!(worker.next(), Said::Arrived { immediate: 5, bytes: 4 });
    let stats: serde_json::Value = serde_json::from_str(&say("stats", &socket, &[])).unwrap();
    assert_eq!((&stats["writes"], &stats["faults"][0]["id"]), (&1.into(), &1.into()));
    assert_eq!(stats["pairs"][0]["number"], worker.pair.number);
    let trace = say("trace", &socket, &[]);
    assert!(trace.contains("write of 4 bytes with immediate 0x5"), "{trace}");
    assert!(
        trace.contains(&format!(" {} ", &socket[1..])),
        "it is called like its socket: {trace}"
    );
    // Who only looks leaves nothing in it.
    assert_eq!(say("trace", &socket, &[]), trace);
    let fault: serde_json::Value =
        serde_json::from_str(&say("fault", &socket, &["kill pair=1"])).unwrap();
    assert_eq!(fault, serde_json::json!({ "fault": 2, "is": "kill pair=1 skip=0 times=1" }));
    assert_eq!(say("clear", &socket, &["2"]), "{\"cleared\":1}\n");
    say("fault", &socket, &["kill"]);
    worker.write(to, b"last", 6);
    let end = wait_for("the end", || nic.child.try_wait().unwrap());
    assert_eq!(end.code(), Some(70));
    assert_eq!(worker.hca.domain().unwrap_err().kind(), ErrorKind::NoPath);
    // Its name is free again.
    let (_again, _) = self::nic("ops", &[]);
}

#[test]
fn it_ends_with_its_standard_input_and_takes_no_wrong_fault() {
    let (mut nic, socket) = nic("end", &[]);
    nic.hears = None;
    let end = wait_for("the end", || nic.child.try_wait().unwrap());
    assert!(end.success());
    assert!(Hca::open(&socket.parse::<Name>().unwrap()).is_err());
    let out = Command::new(KVLANE)
        .args(["emulated-nic", "--socket", "@x", "--fault", "explode"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && said.contains("hold-landing"), "{said}");
}

#[test]
fn its_log_says_that_it_began_whom_it_threw_out_and_what_killed_it() {
    let socket = format!("@kvlane-log-{}", std::process::id());
    let mut command = Command::new(KVLANE);
    command.args(["emulated-nic", "--socket", &socket, "--fault", "kill"]).stderr(Stdio::piped());
    let mut nic = Process::start(&mut command);
    nic.line("{");
    let mut worker = Worker::open(&socket);
    let stranger = Socket::dial(&socket.parse().unwrap()).unwrap();
    stranger.send(b"what?", &[]).unwrap();
    wait_for("thrown out", || (worker.hca.stats().unwrap().thrown_out == 1).then_some(()));
    // Who looks and goes is not thrown out.
    say("stats", &socket, &[]);
    let own = worker.card();
    let to = worker.connect(&own);
    worker.write(to, b"last", 6);
    wait_for("the end", || nic.child.try_wait().unwrap());
    let mut said = String::new();
    nic.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    let lines: Vec<_> = said.lines().collect();
    let words = ["has started", "a client was thrown out", "killed by a fault"];
    assert_eq!(lines.len(), 3, "{said}");
    assert!(lines.iter().zip(words).all(|(line, word)| line.contains(word)), "{said}");
    assert!(lines.iter().all(|line| line.contains(&socket[1..])), "{said}");
}

/// Ticks of 10 ms that a process has had.
fn ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let (_, rest) = stat.rsplit_once(')').unwrap();
    rest.split_whitespace().skip(11).take(2).map(|n| n.parse::<u64>().unwrap()).sum()
}

/// Even with connected queue pairs. A loop that does not nap would have most of a core.
#[test]
fn a_nic_at_rest_leaves_the_core_to_others() {
    let (nic, socket) = nic("rest", &[]);
    let mut worker = Worker::open(&socket);
    let own = worker.card();
    worker.connect(&own);
    let before = ticks(nic.child.id());
    std::thread::sleep(Duration::from_secs(1));
    let used = ticks(nic.child.id()) - before;
    assert!(used < 25, "{used} ticks of 100");
}
