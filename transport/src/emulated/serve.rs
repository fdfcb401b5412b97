//! The NIC's loop: sockets in, turns of the device, naps.
//!
//! Owns: the listener, the connections, the page that says whether it naps. In: requests of clients,
//! each bounded. Out: answers, in order. Invariants: a client that breaks the rules loses its own
//! connection, and with it what it made here, and nobody else notices; a NIC at rest naps, and one
//! that is asked for something new hears of it within a millisecond.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvlane_proto::{Error, ErrorKind, Result, limits};

use super::control::{Answer, REQUEST_BYTES_MAX, Request, Status, VERSION};
use super::device::{Config, Device, Turn};
use super::layout::{ASLEEP_AT, NIC_WORDS};
use crate::random::random;
use crate::sys::share::Words;
use crate::sys::unix::{Listener, Name, Socket};
use crate::sys::wait::{EventFd, PollSet};

/// Most clients.
const CLIENTS_MAX: usize = 128;
/// How long it goes on looking after the last work.
const SPIN: Duration = Duration::from_micros(50);
/// The first nap; each is twice the one before.
const NAP_MIN: Duration = Duration::from_micros(50);
/// The longest nap while there are queue pairs.
const NAP_MAX: Duration = Duration::from_millis(1);
/// The longest nap without any: sockets wake it.
const REST: Duration = Duration::from_secs(1);
/// How often sockets are looked at while there is work.
const HEAR: Duration = Duration::from_micros(50);
/// Connections taken in one turn.
const ACCEPTS_PER_TURN: usize = 64;
/// Pause after accept failed for want of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long a connection may say nothing.
const HELLO: Duration = Duration::from_millis(limits::HANDSHAKE_MS);
/// Messages taken from one client in one turn.
const MESSAGES_PER_TURN: usize = 64;

/// Why a NIC ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It was asked to.
    Stopped,
    /// A fault says so: what uses it hears nothing more, as of a process that was killed.
    Killed,
}

/// Ends a NIC from another thread.
#[derive(Clone, Debug)]
pub struct Stop(Arc<(AtomicBool, EventFd)>);

impl Stop {
    /// Of a NIC to come.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] if the system has no descriptors left.
    pub fn new() -> Result<Self> {
        let wake = EventFd::new().map_err(|e| {
            Error::new(ErrorKind::Io, "no eventfd for an emulated NIC").caused_by(e)
        })?;
        Ok(Self(Arc::new((AtomicBool::new(false), wake))))
    }
    /// Ends it soon.
    pub fn stop(&self) {
        self.0.0.store(true, Ordering::Release);
        self.0.1.signal();
    }
    fn is_set(&self) -> bool {
        self.0.0.load(Ordering::Acquire)
    }
}

struct Connection {
    socket: Socket,
    pid: i32,
    /// Its number at the device, once it has said hello.
    client: Option<u32>,
    since: Instant,
}

impl Connection {
    /// It had the time to say hello, and did not.
    fn is_mute(&self, now: Instant) -> bool {
        self.client.is_none() && now.saturating_duration_since(self.since) >= HELLO
    }
}

/// A NIC that listens.
pub struct Nic {
    listener: Listener,
    device: Device,
    page: Arc<Words>,
    guid: u64,
    connections: Vec<Connection>,
    /// No connection is taken before: there were no descriptors left.
    deaf_until: Instant,
    fds: Vec<OwnedFd>,
}

impl Nic {
    /// Listens there.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] with the name, if it cannot.
    pub fn bind(at: Name, config: Config) -> Result<Self> {
        let listener = Listener::bind(at.clone()).map_err(|e| {
            Error::new(ErrorKind::Io, "an emulated NIC cannot listen")
                .with("socket", &at)
                .hint("use another name, or end the NIC that has it")
                .caused_by(e)
        })?;
        let page = Words::new(NIC_WORDS, true).map_err(|e| {
            Error::new(ErrorKind::Memory, "no memory for an emulated NIC's page").caused_by(e)
        })?;
        Ok(Self {
            listener,
            device: Device::new(config),
            page: Arc::new(page),
            guid: random() | 1,
            connections: Vec::new(),
            deaf_until: Instant::now(),
            fds: Vec::new(),
        })
    }
    /// Where it listens.
    pub fn socket(&self) -> &Name {
        self.listener.name()
    }
    /// Unique.
    pub fn guid(&self) -> u64 {
        self.guid
    }

    /// Works until it is stopped or a fault kills it.
    pub fn serve(mut self, stop: &Stop) -> End {
        let mut polls = PollSet::default();
        let mut nap = NAP_MIN;
        let mut last_work = Instant::now();
        let mut heard_at = last_work;
        let (name, socket) = (self.device.name().to_owned(), self.socket().clone());
        tracing::info!(nic = name, %socket, "emulated NIC has started");
        let killed = |device: &Device| {
            tracing::warn!(nic = name, %socket, fault = device.killer(), "killed by a fault");
            End::Killed
        };
        while !stop.is_set() {
            let now = Instant::now();
            match self.device.poll(now) {
                Turn::Killed => return killed(&self.device),
                Turn::Busy => (last_work, nap) = (now, NAP_MIN),
                Turn::Idle => {}
            }
            if now.saturating_duration_since(heard_at) >= HEAR {
                heard_at = now;
                if self.wait(&mut polls, stop, Duration::ZERO, now) {
                    (last_work, nap) = (now, NAP_MIN);
                }
            }
            if now.saturating_duration_since(last_work) < SPIN {
                std::thread::yield_now();
                continue;
            }
            // Whoever rings from here on either sees this or is seen by the poll below.
            self.say_asleep(true);
            let turn = self.device.poll(Instant::now());
            if turn == Turn::Idle {
                let longest = if self.device.has_pairs() { NAP_MAX } else { REST };
                let until = self.device.next_timer().map(|at| at.saturating_duration_since(now));
                let timeout = nap.min(longest).min(until.unwrap_or(longest));
                nap = (nap * 2).min(REST);
                if self.wait(&mut polls, stop, timeout, now) {
                    nap = NAP_MIN;
                    last_work = Instant::now();
                }
                heard_at = Instant::now();
            }
            self.say_asleep(false);
            match turn {
                Turn::Killed => return killed(&self.device),
                Turn::Busy => (last_work, nap) = (Instant::now(), NAP_MIN),
                Turn::Idle => {}
            }
        }
        End::Stopped
    }
    fn say_asleep(&self, asleep: bool) {
        if let Some(word) = self.page.words().get(ASLEEP_AT) {
            word.store(asleep.into(), Ordering::Release);
        }
        fence(Ordering::SeqCst);
    }

    /// Waits for sockets and does what they ask; whether there was something.
    fn wait(&mut self, polls: &mut PollSet, stop: &Stop, timeout: Duration, now: Instant) -> bool {
        polls.clear();
        polls.add(stop.0.1.fd(), true, false);
        polls.add(self.listener.fd(), now >= self.deaf_until, false);
        for connection in &self.connections {
            polls.add(connection.socket.fd(), true, false);
        }
        polls.nap(timeout);
        let mut busy = false;
        let connections = std::mem::take(&mut self.connections);
        for (i, mut connection) in connections.into_iter().enumerate() {
            let is_ready = polls.ready(i + 2);
            busy |= is_ready;
            if !is_ready && connection.is_mute(now) {
                self.device.stats_mut().refusals += 1;
                continue;
            }
            if !is_ready || self.hear(&mut connection, now) {
                self.connections.push(connection);
            } else if let Some(client) = connection.client {
                self.device.client_gone(client);
            }
        }
        busy | (polls.ready(1) && self.accept(now))
    }
    fn accept(&mut self, now: Instant) -> bool {
        for n in 0..ACCEPTS_PER_TURN {
            let socket = match self.listener.accept() {
                Ok(socket) => socket,
                Err(e) => {
                    if e.kind() != io::ErrorKind::WouldBlock {
                        self.deaf_until = now + ACCEPT_PAUSE;
                    }
                    return n > 0;
                }
            };
            if self.connections.len() >= CLIENTS_MAX
                && let Some(mute) = self.connections.iter().position(|c| c.client.is_none())
            {
                // Who says nothing makes way for the next.
                self.connections.remove(mute);
                self.device.stats_mut().refusals += 1;
            }
            if self.connections.len() >= CLIENTS_MAX {
                let what = format!("an emulated NIC has at most {CLIENTS_MAX} clients");
                let answer = Answer::refused(Status::Limit, what, "close some, or start another");
                let _ = socket.send(&answer.encode(0), &[]);
                self.device.stats_mut().refusals += 1;
                continue;
            }
            let pid = socket.peer().map_or(0, |peer| peer.pid);
            self.connections.push(Connection { socket, pid, client: None, since: now });
        }
        true
    }

    /// Takes a client's messages; whether it may stay.
    fn hear(&mut self, connection: &mut Connection, now: Instant) -> bool {
        let mut fds = std::mem::take(&mut self.fds);
        let mut ends = None;
        for _ in 0..MESSAGES_PER_TURN {
            let mut bytes = [0; REQUEST_BYTES_MAX];
            let answered = match connection.socket.receive(&mut bytes, &mut fds) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Ok(0) => Err(None),
                // It ended with answers that it had not read.
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => Err(None),
                Ok(n) => {
                    let message = bytes.get(..n).unwrap_or_default();
                    self.answer(connection, message, std::mem::take(&mut fds), now).map_err(Some)
                }
                Err(e) => {
                    let what = format!("a message, or descriptors, that do not fit: {e}");
                    Err(Some(self.show_out(connection, 0, what)))
                }
            };
            if let Err(why) = answered {
                ends = Some(why);
                break;
            }
        }
        self.fds = fds;
        if let Some(Some(why)) = &ends {
            self.device.stats_mut().thrown_out += 1;
            let nic = self.device.name();
            tracing::warn!(nic, pid = connection.pid, why, "a client was thrown out");
        }
        ends.is_none()
    }
    /// Does what a message asks; or why its client may not stay.
    fn answer(
        &mut self,
        connection: &mut Connection,
        message: &[u8],
        mut fds: Vec<OwnedFd>,
        now: Instant,
    ) -> Result<(), String> {
        let (serial, request) = match Request::decode(message) {
            Ok(request) => request,
            Err((serial, what)) => return Err(self.show_out(connection, serial, what)),
        };
        let said = |sent: io::Result<()>| {
            sent.map_err(|e| format!("it does not read what it asked for: {e}"))
        };
        let answer = match (connection.client, request) {
            (Some(_), Request::Kick) => {
                self.device.stats_mut().kicks += 1;
                return Ok(());
            }
            (Some(client), request) => self.device.request(client, request, fds, now),
            (None, Request::Hello { version: VERSION }) => {
                let events = fds.pop().map(Socket::given);
                let client = self.device.client_came(connection.pid, events);
                connection.client = Some(client);
                let mut answer = Answer::done([self.guid, NIC_WORDS as u64, client.into(), 0]);
                answer.text = self.device.name().into();
                return said(connection.socket.send(&answer.encode(serial), &[self.page.fd()]));
            }
            (None, Request::Hello { version }) => {
                let what = format!("control version {version} is not spoken here, only {VERSION}");
                return Err(self.show_out(connection, serial, what));
            }
            (None, _) => {
                let what = "a request before the hello".to_owned();
                return Err(self.show_out(connection, serial, what));
            }
        };
        // Whoever does not read what he asked for is thrown out.
        said(connection.socket.send(&answer.encode(serial), &[]))
    }
    /// Says what is wrong, once, and gives it back.
    fn show_out(&mut self, connection: &Connection, serial: u32, what: String) -> String {
        self.device.stats_mut().refusals += 1;
        let hint = "use the NIC and the client of one build, or see docs/emulated-nic.h";
        let answer = Answer::refused(Status::Malformed, &what, hint);
        let _ = connection.socket.send(&answer.encode(serial), &[]);
        what
    }
}

/// A NIC in a thread of this process, for tests: it ends with its host, which a NIC does not.
#[doc(hidden)]
#[derive(Debug)]
pub struct ThreadNic {
    stop: Stop,
    name: Name,
    thread: Option<JoinHandle<End>>,
}

impl ThreadNic {
    /// Where it listens.
    pub fn socket(&self) -> &Name {
        &self.name
    }
    /// Ends it, as if its process had been killed, and says how it ended.
    pub fn stop(mut self) -> Option<End> {
        self.stop.stop();
        self.thread.take()?.join().ok()
    }
    /// Waits until it has ended by itself.
    pub fn join(mut self) -> Option<End> {
        self.thread.take()?.join().ok()
    }
}

impl Drop for ThreadNic {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Starts a NIC in a thread, on a socket of its own.
///
/// # Errors
/// As [`Nic::bind`].
#[doc(hidden)]
pub fn spawn_thread(config: Config) -> Result<ThreadNic> {
    let name = Name::Abstract(format!("kvlane-nic-{:016x}", random()).into_bytes());
    let nic = Nic::bind(name.clone(), config)?;
    let stop = Stop::new()?;
    let theirs = stop.clone();
    let thread = std::thread::Builder::new()
        .name("emulated-nic".into())
        .spawn(move || nic.serve(&theirs))
        .map_err(|e| Error::new(ErrorKind::Io, "no thread for an emulated NIC").caused_by(e))?;
    Ok(ThreadNic { stop, name, thread: Some(thread) })
}
