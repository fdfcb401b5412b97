//! Messages of the control socket of an emulated NIC; as C, they are in `docs/emulated-nic.h`.
//!
//! In and out: one [`Request`] or [`Answer`] a message, little-endian, of exactly its length.
//! Invariants: whatever comes in is bounded and checked; a request has one answer with its serial,
//! [`Request::Kick`] has none.

use crate::mlx5::Places;

/// What both sides speak.
pub const VERSION: u64 = 1;
/// Longest request.
pub const REQUEST_BYTES_MAX: usize = 1 << 10;
/// Longest answer.
pub const ANSWER_BYTES_MAX: usize = 48 << 10;
/// Longest text of an answer.
pub const TEXT_BYTES_MAX: usize = ANSWER_BYTES_MAX - ANSWER_HEAD;
const HEAD: usize = 8;
const ANSWER_HEAD: usize = HEAD + 4 * 8;

/// What a client asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// The first. May bring one end of a socket pair, on which a byte comes for each event.
    Hello {
        /// [`VERSION`].
        version: u64,
    },
    /// A new protection domain.
    Domain,
    /// Gives it up.
    DropDomain {
        /// Which.
        domain: u64,
    },
    /// Registers the memory whose descriptor comes with this, from its first byte on.
    Register {
        /// For queue pairs of this domain.
        domain: u64,
        /// What the client calls the first byte's address.
        address: u64,
        /// Length.
        bytes: u64,
        /// Whether others may write it.
        remote_write: bool,
    },
    /// Takes a key back.
    Deregister {
        /// Which.
        key: u64,
    },
    /// A new queue pair in the memory whose descriptor comes with this.
    QueuePair {
        /// Its keys' domain.
        domain: u64,
        /// Length of its memory in words of 8 bytes.
        words: u64,
        /// Where things are in it.
        places: Places,
        /// Nobody stores what was consumed: a completion ring never counts as full.
        ignore_overruns: bool,
    },
    /// Makes it receive and send.
    Connect {
        /// Which.
        number: u64,
        /// The other end's number.
        peer: u64,
        /// The other end's first packet sequence number.
        sequence: u64,
    },
    /// Takes it to error.
    Error {
        /// Which.
        number: u64,
    },
    /// Destroys it. Answered [`Status::Busy`] as long as something may land.
    Destroy {
        /// Which.
        number: u64,
    },
    /// A doorbell was rung while the NIC napped.
    Kick,
    /// What the NIC counted, as text.
    Stats,
    /// What happened, as lines, as many as fit.
    Trace {
        /// From this event on.
        from: u64,
    },
    /// Installs a fault.
    Fault {
        /// As in [`super::faults`].
        text: String,
    },
    /// Removes a fault and lets go what it holds; 0 means all.
    Clear {
        /// Its number.
        id: u64,
    },
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Status {
    /// Done.
    Done = 0,
    /// The request itself is wrong.
    Malformed = 1,
    /// Not yet: ask again.
    Busy = 2,
    /// There is no such thing, or it is another client's.
    NotFound = 3,
    /// A limit.
    Limit = 4,
    /// The memory cannot be used so.
    Memory = 5,
}

/// What the NIC says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// How it ended.
    pub status: Status,
    /// By request: numbers, keys.
    pub values: [u64; 4],
    /// What is wrong, and behind a newline how to fix it; or what was asked for.
    pub text: String,
}

impl Answer {
    /// Done.
    pub fn done(values: [u64; 4]) -> Self {
        Self { status: Status::Done, values, text: String::new() }
    }
    /// Not done.
    pub fn refused(status: Status, what: impl Into<String>, hint: &str) -> Self {
        let mut text = what.into();
        if !hint.is_empty() {
            text.push('\n');
            text.push_str(hint);
        }
        Self { status, values: [0; 4], text }
    }
    /// As a message; a text that is too long is cut.
    pub fn encode(&self, serial: u32) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(ANSWER_HEAD + self.text.len());
        bytes.extend(serial.to_le_bytes());
        bytes.extend((self.status as u32).to_le_bytes());
        self.values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
        bytes.extend(cut(&self.text, TEXT_BYTES_MAX).as_bytes());
        bytes
    }
    /// Reads a message.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8]) -> Result<(u32, Self), String> {
        let Some((head, text)) = bytes.split_at_checked(ANSWER_HEAD) else {
            return Err(format!("an answer of {} bytes", bytes.len()));
        };
        let (serial, status) = (half(head, 0), half(head, 1));
        let status = match status {
            0 => Status::Done,
            1 => Status::Malformed,
            2 => Status::Busy,
            3 => Status::NotFound,
            4 => Status::Limit,
            5 => Status::Memory,
            other => return Err(format!("status {other}")),
        };
        let mut values = numbers(&head[HEAD..]);
        let values = std::array::from_fn(|_| values.next().unwrap_or(0));
        let text = String::from_utf8_lossy(text).into_owned();
        Ok((serial, Self { status, values, text }))
    }
}

/// The front of a text that has at most so many bytes.
pub(crate) fn cut(text: &str, most: usize) -> &str {
    let mut at = text.len().min(most);
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    &text[..at]
}

/// The `nth` u32; the length has been checked.
fn half(bytes: &[u8], nth: usize) -> u32 {
    bytes.as_chunks().0.get(nth).map_or(0, |half| u32::from_le_bytes(*half))
}
/// Every u64, one after the other.
fn numbers(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.as_chunks().0.iter().map(|number| u64::from_le_bytes(*number))
}

mod kind {
    pub(super) const HELLO: u32 = 1;
    pub(super) const DOMAIN: u32 = 2;
    pub(super) const DROP_DOMAIN: u32 = 3;
    pub(super) const REGISTER: u32 = 4;
    pub(super) const DEREGISTER: u32 = 5;
    pub(super) const QUEUE_PAIR: u32 = 6;
    pub(super) const CONNECT: u32 = 7;
    pub(super) const ERROR: u32 = 8;
    pub(super) const DESTROY: u32 = 9;
    pub(super) const KICK: u32 = 10;
    pub(super) const STATS: u32 = 11;
    pub(super) const TRACE: u32 = 12;
    pub(super) const FAULT: u32 = 13;
    pub(super) const CLEAR: u32 = 14;
}

impl Request {
    /// As a message.
    pub fn encode(&self, serial: u32) -> Vec<u8> {
        let (kind, fields): (u32, Vec<u64>) = match *self {
            Self::Hello { version } => (kind::HELLO, vec![version]),
            Self::Domain => (kind::DOMAIN, vec![]),
            Self::DropDomain { domain } => (kind::DROP_DOMAIN, vec![domain]),
            Self::Register { domain, address, bytes, remote_write } => {
                (kind::REGISTER, vec![domain, address, bytes, remote_write.into()])
            }
            Self::Deregister { key } => (kind::DEREGISTER, vec![key]),
            Self::QueuePair { domain, words, places: p, ignore_overruns } => (
                kind::QUEUE_PAIR,
                vec![
                    domain,
                    words,
                    p.sends_at as u64,
                    p.sends.into(),
                    p.receives.into(),
                    p.completions_at as u64,
                    p.completions.into(),
                    p.record_at as u64,
                    p.doorbell_at as u64,
                    p.consumed_at as u64,
                    ignore_overruns.into(),
                ],
            ),
            Self::Connect { number, peer, sequence } => {
                (kind::CONNECT, vec![number, peer, sequence])
            }
            Self::Error { number } => (kind::ERROR, vec![number]),
            Self::Destroy { number } => (kind::DESTROY, vec![number]),
            Self::Kick => (kind::KICK, vec![]),
            Self::Stats => (kind::STATS, vec![]),
            Self::Trace { from } => (kind::TRACE, vec![from]),
            Self::Fault { .. } => (kind::FAULT, vec![]),
            Self::Clear { id } => (kind::CLEAR, vec![id]),
        };
        let mut bytes = Vec::with_capacity(HEAD + fields.len() * 8);
        bytes.extend(kind.to_le_bytes());
        bytes.extend(serial.to_le_bytes());
        fields.iter().for_each(|field| bytes.extend(field.to_le_bytes()));
        if let Self::Fault { text } = self {
            bytes.extend(text.as_bytes());
        }
        bytes
    }
    /// Reads a message; gives its serial, too.
    ///
    /// # Errors
    /// What is wrong with it, and the serial, if there was one.
    pub fn decode(bytes: &[u8]) -> Result<(u32, Self), (u32, String)> {
        let Some((head, body)) = bytes.split_at_checked(HEAD) else {
            return Err((0, format!("a request of {} bytes", bytes.len())));
        };
        let (kind, serial) = (half(head, 0), half(head, 1));
        let wrong = |what: String| Err((serial, what));
        if kind == kind::FAULT {
            return match std::str::from_utf8(body) {
                Ok(text) => Ok((serial, Self::Fault { text: text.to_owned() })),
                Err(_) => wrong("the text of a fault is not UTF-8".into()),
            };
        }
        let expected = match kind {
            kind::DOMAIN | kind::KICK | kind::STATS => 0,
            kind::REGISTER => 4,
            kind::QUEUE_PAIR => 11,
            kind::CONNECT => 3,
            kind::HELLO..=kind::CLEAR => 1,
            _ => return wrong(format!("request {kind} is not known")),
        };
        if body.len() != expected * 8 {
            return wrong(format!(
                "request {kind} has {} bytes behind its head, expected {}",
                body.len(),
                expected * 8
            ));
        }
        let mut body = numbers(body);
        let mut n = || body.next().unwrap_or(0);
        let request = match kind {
            kind::HELLO => Self::Hello { version: n() },
            kind::DOMAIN => Self::Domain,
            kind::DROP_DOMAIN => Self::DropDomain { domain: n() },
            kind::REGISTER => {
                let (domain, address, bytes, rights) = (n(), n(), n(), n());
                let remote_write = match rights {
                    0 => false,
                    1 => true,
                    _ => return wrong(format!("remote_write={rights} is neither 0 nor 1")),
                };
                Self::Register { domain, address, bytes, remote_write }
            }
            kind::DEREGISTER => Self::Deregister { key: n() },
            kind::QUEUE_PAIR => {
                let (domain, words) = (n(), n());
                // What does not fit 32 bits is beyond every limit, so the largest will do.
                let count = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
                let at = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
                let places = Places {
                    sends_at: at(n()),
                    sends: count(n()),
                    receives: count(n()),
                    completions_at: at(n()),
                    completions: count(n()),
                    record_at: at(n()),
                    doorbell_at: at(n()),
                    consumed_at: at(n()),
                };
                let flags = n();
                if flags > 1 {
                    return wrong(format!("flags={flags:#x}: only bit 0 is known"));
                }
                Self::QueuePair { domain, words, places, ignore_overruns: flags == 1 }
            }
            kind::CONNECT => Self::Connect { number: n(), peer: n(), sequence: n() },
            kind::ERROR => Self::Error { number: n() },
            kind::DESTROY => Self::Destroy { number: n() },
            kind::KICK => Self::Kick,
            kind::STATS => Self::Stats,
            kind::TRACE => Self::Trace { from: n() },
            _ => Self::Clear { id: n() },
        };
        Ok((serial, request))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all() -> Vec<Request> {
        let (places, words) = super::super::layout::queue_pair(8, 4);
        vec![
            Request::Hello { version: VERSION },
            Request::Domain,
            Request::DropDomain { domain: 7 },
            Request::Register { domain: 7, address: 1 << 40, bytes: 4096, remote_write: true },
            Request::Deregister { key: 9 },
            Request::QueuePair { domain: 7, words: words as u64, places, ignore_overruns: true },
            Request::Connect { number: 1, peer: 2, sequence: 3 },
            Request::Error { number: 1 },
            Request::Destroy { number: 1 },
            Request::Kick,
            Request::Stats,
            Request::Trace { from: 5 },
            Request::Fault { text: "kill skip=3".into() },
            Request::Clear { id: 0 },
        ]
    }

    #[test]
    fn requests_come_back_and_have_one_length() {
        for (serial, request) in (0..).zip(all()) {
            let mut bytes = request.encode(serial);
            assert_eq!(Request::decode(&bytes), Ok((serial, request.clone())));
            if matches!(request, Request::Fault { .. }) {
                continue;
            }
            bytes.push(0);
            assert!(Request::decode(&bytes).is_err(), "{request:?}");
            bytes.truncate(bytes.len() - 2);
            assert!(Request::decode(&bytes).is_err(), "{request:?}");
        }
    }

    #[test]
    fn answers_come_back_and_long_texts_are_cut() {
        let answer = Answer::refused(Status::Limit, "too many", "give some back");
        assert_eq!(Answer::decode(&answer.encode(3)), Ok((3, answer)));
        let long = Answer::refused(Status::Memory, "ä".repeat(ANSWER_BYTES_MAX), "");
        let bytes = long.encode(0);
        assert!(bytes.len() <= ANSWER_BYTES_MAX);
        assert!(Answer::decode(&bytes).unwrap().1.text.chars().all(|c| c == 'ä'));
        assert!(Answer::decode(&bytes[..39]).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..128)) {
            let _ = Request::decode(&bytes);
            let _ = Answer::decode(&bytes);
        }
    }
}
