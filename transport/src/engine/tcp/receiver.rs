//! The receiving end of a lane: frames land in their pages or are read to scrap.
//!
//! In: bytes of one authenticated connection. Out: [`EngineEvent::Arrived`] and
//! [`EngineEvent::Scrapped`], one ack a frame, in order. Invariants: bytes land only while the
//! grant's pen is held; the frame of a grant that is not open, or is revoked half-way, is read to
//! its end without landing, so that the lane lives on; so is the rest of a part that has landed
//! already, which is acknowledged again but is not news (a page is final when it is sent, so a repeat
//! has nothing to add, and a peer that repeats one for ever costs a counter).

use std::io::Read;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;

use kvlane_proto::{Error, ErrorKind, GrantId, LaneId, LinkId, PartId, Refusal};

use super::lane::{ACK_BACKLOG_BYTES, CALL_BYTES, CALLS_PER_TURN, Io, sort};
use super::wire::{Ack, HEADER_BYTES, Header, Status};
use crate::engine::EngineEvent;
use crate::engine::pen::{Pens, Target};
use crate::engine::throttle;
use crate::memory::Registry;
use crate::sys::mem::Pages;
use crate::sys::net;

/// What a lane works with while it has its turn.
pub(super) struct Turn<'a> {
    pub(super) pens: &'a Pens,
    pub(super) registry: &'a Registry,
    /// Where refused bytes go.
    pub(super) scrap: &'a mut [u8],
    pub(super) events: &'a mut Vec<EngineEvent>,
}

/// A frame whose header has come.
struct Frame {
    header: Header,
    fate: Fate,
}

/// What the bytes behind a header are for.
enum Fate {
    /// They land in `Inbound::pages`.
    Land { target: Arc<Target>, crc: u32 },
    /// They are thrown away; why, unless the part has landed already.
    Scrap { left: u64, status: Status, why: Option<Refusal> },
}

/// What a receive came to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Got {
    /// No byte.
    Nothing,
    /// All that there was.
    All,
    /// Bytes, and there may be more.
    More,
}

impl Got {
    fn more_if(more: bool, otherwise: Self) -> Self {
        if more { Self::More } else { otherwise }
    }
}

/// One lane, connected and authenticated.
pub(super) struct Inbound {
    link: LinkId,
    lane: LaneId,
    stream: TcpStream,
    header: [u8; HEADER_BYTES],
    /// Bytes of `header` that have come.
    have: usize,
    /// The frame that is being read.
    frame: Option<Frame>,
    pages: Pages,
    /// Acks that the socket has not taken yet.
    acks: Vec<u8>,
    /// Turns since something moved.
    pub(super) quiet: u32,
}

impl Inbound {
    pub(super) fn new(link: LinkId, lane: LaneId, stream: TcpStream) -> Self {
        Self {
            link,
            lane,
            stream,
            header: [0; HEADER_BYTES],
            have: 0,
            frame: None,
            pages: Pages::default(),
            acks: Ack::WELCOME.encode().to_vec(),
            quiet: 0,
        }
    }
    pub(super) fn id(&self) -> LaneId {
        self.lane
    }
    pub(super) fn stream(&self) -> &TcpStream {
        &self.stream
    }
    /// Whether to read, whether to write.
    pub(super) fn wants(&self) -> (bool, bool) {
        (self.acks.len() < ACK_BACKLOG_BYTES, !self.acks.is_empty())
    }
    /// One turn; says whether anything moved, or why the lane is over.
    pub(super) fn poll(&mut self, turn: &mut Turn<'_>) -> Result<bool, Refusal> {
        let (mut moved, mut over) = (false, None);
        for _ in 0..CALLS_PER_TURN {
            if self.acks.len() >= ACK_BACKLOG_BYTES {
                break;
            }
            match self.step(turn) {
                Ok(got) => {
                    moved |= got != Got::Nothing;
                    if got != Got::More {
                        break;
                    }
                }
                Err(why) => {
                    over = Some(why);
                    break;
                }
            }
        }
        // Also when the lane is over: what has landed need not be sent again.
        if !self.acks.is_empty() {
            match sort(net::send(&self.stream, &self.acks)) {
                Ok(Io::Some(n)) => {
                    self.acks.drain(..n);
                    moved = true;
                }
                Ok(Io::Later) => {}
                Err(why) => over = over.or(Some(why)),
            }
        }
        self.quiet = if moved { 0 } else { self.quiet.saturating_add(1) };
        over.map_or(Ok(moved), Err)
    }

    /// One receive.
    fn step(&mut self, turn: &mut Turn<'_>) -> Result<Got, Refusal> {
        let Some(frame) = self.frame.take() else {
            match sort((&self.stream).read(&mut self.header[self.have..]))? {
                Io::Later => return Ok(Got::Nothing),
                Io::Some(n) => self.have += n,
            }
            let more = self.have == HEADER_BYTES;
            self.begin_if_whole(turn)?;
            return Ok(Got::more_if(more, Got::All));
        };
        match frame.fate {
            Fate::Land { target, crc } => self.land(turn, frame.header, target, crc),
            Fate::Scrap { left, status, why } => {
                let most = left.min(turn.scrap.len() as u64) as usize;
                let n = match sort((&self.stream).read(&mut turn.scrap[..most]))? {
                    Io::Later => 0,
                    Io::Some(n) => n as u64,
                };
                self.scrap(turn, frame.header, left - n, status, why);
                Ok(Got::more_if(n > 0, Got::Nothing))
            }
        }
    }

    /// One receive straight into the pages.
    fn land(
        &mut self,
        turn: &mut Turn<'_>,
        header: Header,
        target: Arc<Target>,
        mut crc: u32,
    ) -> Result<Got, Refusal> {
        let left = self.pages.left();
        let Some(held) = target.hold() else {
            let why = Error::new(ErrorKind::NotFound, "the grant was fenced while a part came in");
            self.refuse(turn, header, left, Status::NoGrant, why);
            return Ok(Got::More);
        };
        if target.has(header.part) {
            // Over another lane, while this copy came in.
            drop(held);
            self.repeated(turn, header, left);
            return Ok(Got::More);
        }
        // The next header often stands right behind; then it comes with the same call.
        let most = throttle::piece(CALL_BYTES);
        let got = self.pages.read_from(self.stream.as_fd(), most, &mut self.header);
        let n = match sort(got.map(|n| n as usize))? {
            Io::Later => 0,
            Io::Some(n) => n as u64,
        };
        let landed = n.min(left);
        if header.crc32c.is_some() {
            crc = self.pages.crc32c(crc, landed);
        }
        throttle::pace(landed);
        drop(held);
        self.pages.advance(landed);
        if landed < left {
            self.frame = Some(Frame { header, fate: Fate::Land { target, crc } });
            return Ok(Got::more_if(n > 0, Got::Nothing));
        }
        self.have = (n - landed) as usize;
        self.pages.clear();
        if header.crc32c.is_some_and(|sent| sent != crc) {
            let why = Error::new(ErrorKind::Corrupt, "the part's checksum differs")
                .with("sent", format!("{:#010x}", header.crc32c.unwrap_or(0)))
                .with("found", format!("{crc:#010x}"));
            self.refuse(turn, header, 0, Status::Corrupt, why);
        } else {
            metrics::counter!("kvlane_tcp_received_bytes_total").increment(header.bytes.into());
            self.arrived(turn, &header, &target);
        }
        // There was room for a whole header, so less is all there is; the ack need not wait.
        let more = self.have == HEADER_BYTES;
        self.begin_if_whole(turn)?;
        Ok(Got::more_if(more, Got::All))
    }

    /// Once a header is whole: decides what becomes of its frame.
    fn begin_if_whole(&mut self, turn: &mut Turn<'_>) -> Result<(), Refusal> {
        if self.have < HEADER_BYTES {
            return Ok(());
        }
        self.have = 0;
        let Some(header) = Header::decode(&self.header) else {
            return Err(Error::new(ErrorKind::Malformed, "the lane lost its framing")
                .with("found", format!("{:02x?}", &self.header[..8]))
                .with("expected", "4b 56 4c 46 01")
                .to_refusal());
        };
        let bytes = u64::from(header.bytes);
        match self.admit(turn, &header) {
            Ok(target) if target.has(header.part) => self.repeated(turn, header, bytes),
            Ok(target) if bytes > 0 => {
                self.frame = Some(Frame { header, fate: Fate::Land { target, crc: 0 } });
            }
            Ok(target) => self.arrived(turn, &header, &target),
            Err((status, why)) => {
                self.pages.clear();
                self.refuse(turn, header, bytes, status, why);
            }
        }
        Ok(())
    }

    /// Checks a frame against its grant and fills `pages` with where it goes.
    fn admit(&mut self, turn: &Turn<'_>, header: &Header) -> Result<Arc<Target>, (Status, Error)> {
        let target =
            turn.pens.admit(self.link, self.lane, header.grant, header.part).map_err(|e| {
                let part = e.kind() == ErrorKind::InvalidPlan;
                (if part { Status::WrongPart } else { Status::NoGrant }, e)
            })?;
        let part = target.plan.pages(header.part).map_err(|e| (Status::WrongPart, e))?;
        if part.bytes() != u64::from(header.bytes) {
            let why = Error::new(ErrorKind::InvalidPlan, "the part has another length")
                .with("grant", header.grant)
                .with("part", header.part.0)
                .with("found", header.bytes)
                .with("expected", part.bytes());
            return Err((Status::WrongPart, why));
        }
        turn.registry.resolve_part(&part, &mut self.pages).map_err(|e| (Status::NoMemory, e))?;
        Ok(target)
    }

    /// Every byte of a part is in place, for the first time.
    fn arrived(&mut self, turn: &mut Turn<'_>, header: &Header, target: &Target) {
        let (grant, part) = (header.grant, header.part);
        target.landed(part);
        turn.events.push(EngineEvent::Arrived { link: self.link, grant, part, lane: self.lane });
        self.ack(Status::Landed, grant, part);
    }

    /// The part has landed already, so that the frame is scrap; `left` bytes are still to come.
    fn repeated(&mut self, turn: &mut Turn<'_>, header: Header, left: u64) {
        self.pages.clear();
        self.scrap(turn, header, left, Status::Landed, None);
    }

    /// From here on the frame is scrap; `left` bytes of it are still to come.
    fn refuse(
        &mut self,
        turn: &mut Turn<'_>,
        header: Header,
        left: u64,
        status: Status,
        why: Error,
    ) {
        self.pages.clear();
        self.scrap(turn, header, left, status, Some(why.to_refusal()));
    }

    /// Goes on with a frame that is scrap, or ends it.
    fn scrap(
        &mut self,
        turn: &mut Turn<'_>,
        header: Header,
        left: u64,
        status: Status,
        why: Option<Refusal>,
    ) {
        if left > 0 {
            self.frame = Some(Frame { header, fate: Fate::Scrap { left, status, why } });
            return;
        }
        let bytes = u64::from(header.bytes);
        let label = why.as_ref().map_or("repeat", |why| why.kind.code());
        metrics::counter!("kvlane_scrapped_frames_total", "why" => label).increment(1);
        metrics::counter!("kvlane_scrapped_bytes_total").increment(bytes);
        if let Some(why) = why {
            turn.events.push(EngineEvent::Scrapped { link: self.link, bytes, why });
        }
        self.ack(status, header.grant, header.part);
    }

    fn ack(&mut self, status: Status, grant: GrantId, part: PartId) {
        self.acks.extend(Ack { status, grant, part }.encode());
    }
}
