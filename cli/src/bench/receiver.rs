//! The receiving process: does what its standard input says, and answers on standard output.
//!
//! Owns: the destination pool, one engine at a time, one end of the raw loop. In: [`Ask`]s. Out:
//! one [`Answer`] each. Invariant: it ends with its standard input, so with its parent.

use std::net::TcpListener;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use kvlane_proto::{Error, ErrorKind, GrantId, LaneId, PoolMap, Result};
use kvlane_transport::engine::driver::EngineHandle;
use kvlane_transport::engine::{Caps, Command, EngineEvent, FenceHow, OpenGrant, OpenSource};
use kvlane_transport::memory::Region;

use super::engines::Setup;
use super::link::{self, EVENTS, LINK};
use super::pages::{Draw, Pattern, Size};
use super::raw::{self, RawEnd};
use super::talk::{Answer, Ask, read_line};
use super::wait::Stop;
use crate::commands::say;
use crate::report::json_line;

/// Serves until standard input ends.
pub(crate) fn run() -> Result<ExitCode> {
    let mut receiver = Receiving::default();
    let mut stdin = std::io::stdin().lock();
    while let Some(line) = read_line(&mut stdin) {
        let ask = serde_json::from_str(&line);
        let ask = ask.map_err(|e| {
            Error::new(ErrorKind::Malformed, "this command is for `kvlane bench` only").caused_by(e)
        })?;
        let answer = receiver.carry_out(ask);
        answer_with(&answer.unwrap_or_else(|e| Answer::Failed(e.to_refusal())))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn answer_with(answer: &Answer) -> Result<()> {
    say(&json_line(answer)?);
    Ok(())
}

#[derive(Default)]
struct Receiving {
    pool: Option<(Arc<Region>, Pattern)>,
    engine: Option<Open>,
    listener: Option<TcpListener>,
    raw: Option<RawEnd>,
    /// Never set: this process ends with its input.
    stop: Stop,
}

/// The engine of one page size.
struct Open {
    handle: EngineHandle,
    caps: Caps,
    said: Receiver<EngineEvent>,
    /// The first thing that went wrong.
    wrong: Arc<Mutex<Option<Error>>>,
    size: Size,
    map: Arc<PoolMap>,
    lanes: u16,
}

fn early(what: &str) -> Error {
    Error::new(ErrorKind::Internal, "asked too early").with("missing", what)
}

impl Receiving {
    fn pool(&self) -> Result<(&Arc<Region>, Pattern)> {
        self.pool.as_ref().map(|(pool, pattern)| (pool, *pattern)).ok_or_else(|| early("pool"))
    }
    fn carry_out(&mut self, ask: Ask) -> Result<Answer> {
        match ask {
            Ask::Start { pool_bytes, pattern } => {
                self.pool = Some((Region::memfd(pool_bytes)?, pattern));
            }
            Ask::Engine { setup, size } => {
                let (pool, _) = self.pool()?;
                let open = Open::new(&setup, size, pool)?;
                let blob = link::blob(&open.said, &self.stop)?;
                let emulated = open.caps.emulated;
                self.engine = Some(open);
                return Ok(Answer::Engine { blob, emulated });
            }
            Ask::Connect { blob } => {
                self.engine()?.handle.send(Command::Connect { link: LINK, remote: blob })?;
            }
            Ask::Open { grant, draw, part_bytes } => {
                self.engine()?.open(GrantId(grant), draw, part_bytes)?;
            }
            Ask::Close { grant } => self.engine()?.close(GrantId(grant), &self.stop)?,
            Ask::EndEngine => self.engine = None,
            Ask::RawListen => {
                let (listener, port) = raw::listen()?;
                self.listener = Some(listener);
                return Ok(Answer::Listening { port });
            }
            Ask::RawAccept { port } => {
                let listener = self.listener.take().ok_or_else(|| early("listener"))?;
                self.raw = Some(raw::accept(&listener, port, &self.stop)?);
            }
            Ask::Raw { size, draw, call_bytes, ack_bytes } => {
                let pages = size.pages(self.pool()?.0, &draw.to(size))?;
                // After a failure it is gone, which tells the sender.
                let mut raw = self.raw.take().ok_or_else(|| early("connection"))?;
                answer_with(&Answer::Done)?;
                raw.receive(pages, call_bytes, ack_bytes)?;
                self.raw = Some(raw);
            }
            Ask::Clear { size, draw } => {
                let (pool, _) = self.pool()?;
                for id in draw.to(size) {
                    let memory = pool.memory();
                    let cleared = memory.fill(size.offset(id), size.page_bytes.into(), 0);
                    cleared.map_err(|e| {
                        Error::new(ErrorKind::Internal, "a page is outside the pool").caused_by(e)
                    })?;
                }
            }
            Ask::Check { size, draw } => {
                let (pool, pattern) = self.pool()?;
                let read = |at, into: &mut [u8]| pool.memory().read_at(at, into);
                return Ok(Answer::Checked { bytes: pattern.check(size, draw, read)? });
            }
        }
        Ok(Answer::Done)
    }
    fn engine(&self) -> Result<&Open> {
        self.engine.as_ref().ok_or_else(|| early("engine"))
    }
}

impl Open {
    fn new(setup: &Setup, size: Size, pool: &Arc<Region>) -> Result<Self> {
        let (say, said) = sync_channel(EVENTS);
        let wrong: Arc<Mutex<Option<Error>>> = Arc::default();
        let on_events = {
            let wrong = wrong.clone();
            move |events: Vec<EngineEvent>| {
                for event in events {
                    let e = match event {
                        EngineEvent::Local { .. } | EngineEvent::Fenced(_) => {
                            // There is never more than one that nobody took.
                            let _ = say.try_send(event);
                            continue;
                        }
                        EngineEvent::Trouble(e) => e,
                        EngineEvent::FenceFailed { why, .. }
                        | EngineEvent::LaneDown { why, .. } => why.into(),
                        EngineEvent::Scrapped { why, .. } => why.into(),
                        _ => continue,
                    };
                    wrong.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
                }
            }
        };
        let (handle, caps) = link::start(setup, pool, Box::new(on_events), true)?;
        let map = Arc::new(size.map(pool));
        Ok(Self { handle, caps, said, wrong, size, map, lanes: setup.rails })
    }
    fn open(&self, grant: GrantId, draw: Draw, part_bytes: u64) -> Result<()> {
        let plan = Arc::new(self.size.plan(&self.map, &draw.to(self.size), part_bytes)?);
        let lanes = (0..self.lanes).map(LaneId).collect();
        let sources = vec![OpenSource { link: LINK, lanes, plan }];
        self.handle.send(Command::Open(OpenGrant { grant, sources }))?;
        // The queue keeps order, so whatever is answered after this finds the grant open.
        let barrier = Region::map(kvlane_proto::Device::Host, 1, false)?;
        self.handle.register(&barrier)?;
        self.handle.unregister(&barrier)
    }
    fn close(&self, grant: GrantId, stop: &Stop) -> Result<()> {
        self.handle.send(Command::Fence { grant, how: FenceHow::Close })?;
        link::until(&self.said, "the fence", stop, |event| match event {
            EngineEvent::Fenced(proof) if proof.grant() == grant => Some(Ok(())),
            _ => None,
        })?;
        self.wrong.lock().unwrap_or_else(PoisonError::into_inner).take().map_or(Ok(()), Err)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.handle.stop();
    }
}
