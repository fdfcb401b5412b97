//! The raw loop: one TCP connection, blocking `writev` and `readv` straight between random pages,
//! one byte of ack. What an engine over TCP is compared with.
//!
//! Owns: one end of the connection ([`RawEnd`]). Invariant: each call waits for at most [`SLICE`],
//! so that deadlines and interruptions are seen.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use kvlane_proto::{Error, ErrorKind, Result};
use kvlane_transport::sys::mem::Pages;

use super::wait::{SLICE, Stop, Wait, moving};

/// How long the other side may take to connect.
const CONNECT: Duration = Duration::from_secs(5);

/// One end of the connection.
pub(crate) struct RawEnd {
    stream: TcpStream,
    stop: Stop,
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> Error {
    move |e| Error::new(ErrorKind::Io, format!("raw loop: {what}")).caused_by(e)
}

/// Listens on loopback; gives the port.
pub(crate) fn listen() -> Result<(TcpListener, u16)> {
    let failed = failed("cannot listen");
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(&failed)?;
    listener.set_nonblocking(true).map_err(&failed)?;
    let port = listener.local_addr().map_err(&failed)?.port();
    Ok((listener, port))
}

/// Takes the connection that comes from `port`, and no other.
pub(crate) fn accept(listener: &TcpListener, port: u16, stop: &Stop) -> Result<RawEnd> {
    let wait = Wait::new("the raw connection", CONNECT, stop);
    loop {
        match listener.accept() {
            Ok((stream, from)) if from.port() == port => return RawEnd::new(stream, stop),
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                wait.check()?;
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(e) => return Err(failed("cannot accept")(e)),
        }
    }
}

/// Connects; gives this end and the port it comes from.
pub(crate) fn connect(port: u16, stop: &Stop) -> Result<(RawEnd, u16)> {
    let to = (Ipv4Addr::LOCALHOST, port).into();
    let stream = TcpStream::connect_timeout(&to, CONNECT).map_err(failed("cannot connect"))?;
    let own = stream.local_addr().map_err(failed("has no address"))?.port();
    Ok((RawEnd::new(stream, stop)?, own))
}

impl RawEnd {
    fn new(stream: TcpStream, stop: &Stop) -> Result<Self> {
        let failed = failed("cannot set up a connection");
        // An accepted connection may have the listener's mode.
        stream.set_nonblocking(false).map_err(&failed)?;
        stream.set_nodelay(true).map_err(&failed)?;
        stream.set_read_timeout(Some(SLICE)).map_err(&failed)?;
        stream.set_write_timeout(Some(SLICE)).map_err(&failed)?;
        Ok(Self { stream, stop: stop.clone() })
    }
    /// Receives all pages, with an ack after each `ack_bytes`.
    pub(crate) fn receive(
        &mut self,
        mut pages: Pages,
        call_bytes: u64,
        ack_bytes: u64,
    ) -> Result<()> {
        let wait = Wait::new("pages of the raw loop", moving(pages.left()), &self.stop);
        while pages.left() > 0 {
            let mut left = ack_bytes.min(pages.left());
            while left > 0 {
                let bytes = call_bytes.min(left);
                let n = step(&wait, pages.read_from(self.stream.as_fd(), bytes, &mut []))?;
                pages.advance(n);
                left -= n;
            }
            while step(&wait, self.stream.write(&[1]).map(|n| n as u64))? == 0 {}
        }
        Ok(())
    }
    /// Sends all pages; gives how long each stretch of `ack_bytes` took to its ack, with a pause
    /// before each.
    pub(crate) fn send(
        &mut self,
        mut pages: Pages,
        call_bytes: u64,
        ack_bytes: u64,
        pause: Duration,
    ) -> Result<Vec<Duration>> {
        let stretches = pages.left().div_ceil(ack_bytes).min(1 << 20) as u32;
        let limit = moving(pages.left()) + pause * stretches;
        let wait = Wait::new("the raw loop's ack", limit, &self.stop);
        let mut took = Vec::with_capacity(stretches as usize);
        while pages.left() > 0 {
            if !pause.is_zero() {
                std::thread::sleep(pause);
            }
            let begun = Instant::now();
            let mut left = ack_bytes.min(pages.left());
            while left > 0 {
                let bytes = call_bytes.min(left);
                let n = step(&wait, pages.write_to(self.stream.as_fd(), &[], bytes))?;
                pages.advance(n);
                left -= n;
            }
            while step(&wait, self.stream.read(&mut [0]).map(|n| n as u64))? == 0 {}
            took.push(begun.elapsed());
        }
        Ok(took)
    }
}

/// The bytes that a call moved; none if it only ran out of time.
fn step(wait: &Wait, moved: io::Result<u64>) -> Result<u64> {
    match moved {
        Ok(0) => Err(Error::new(ErrorKind::PeerLost, "raw loop: the other side has hung up")),
        Ok(n) => Ok(n),
        Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
            wait.check().map(|()| 0)
        }
        Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(0),
        Err(e) => {
            Err(Error::new(ErrorKind::PeerLost, "raw loop: the connection broke").caused_by(e))
        }
    }
}
