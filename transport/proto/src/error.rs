//! One error shape for every crate: what happened, where, why, and how to fix it.
//!
//! Owns: [`Error`], [`ErrorKind`] and the two questions a caller may ask of a kind: can a retry
//! help, and which side is to blame. An error crosses the wire as [`Refusal`], which is the same
//! thing with bounded strings, so the far side can print exactly what the near side knew.

use serde::{Deserialize, Serialize};
use std::fmt;

use crate::limits;

/// Which side a failure is charged to, so that a router opens only that side's breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Blame {
    /// The prefill leg or its worker.
    Prefill,
    /// The decode leg or its worker.
    Decode,
    /// The path between the two workers.
    Link,
    /// The bootstrap service.
    Service,
    /// Whoever made the request.
    Caller,
    /// Cannot be said.
    Unknown,
}

impl Blame {
    /// In one word, for counts by side.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Link => "link",
            Self::Service => "service",
            Self::Caller => "caller",
            Self::Unknown => "unknown",
        }
    }
}

/// Whether doing the same thing again can succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Retry {
    /// Never: the request itself is wrong.
    Never,
    /// The same pair of workers may succeed later.
    SamePair,
    /// Another pair of workers may succeed now.
    OtherPair,
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $retry:ident, $blame:ident;)*) => {
        /// What kind of failure this is. Codes are stable; `docs/errors.md` lists them.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[non_exhaustive]
        pub enum ErrorKind { $($(#[$doc])* $name,)* }

        impl ErrorKind {
            /// Every kind, in the order of `docs/errors.md`.
            pub const ALL: &'static [ErrorKind] = &[$(ErrorKind::$name,)*];
            /// The stable name used in logs, metrics and JSON.
            pub const fn code(self) -> &'static str { match self { $(Self::$name => $code,)* } }
            /// Whether a retry can help.
            pub const fn retry(self) -> Retry { match self { $(Self::$name => Retry::$retry,)* } }
            /// The side blamed unless the error says otherwise.
            pub const fn blame(self) -> Blame { match self { $(Self::$name => Blame::$blame,)* } }
        }
    };
}

kinds! {
    /// A message or argument breaks a rule of its format.
    Malformed = "malformed", Never, Caller;
    /// Something exceeds a limit of [`crate::limits`].
    LimitExceeded = "limit_exceeded", Never, Caller;
    /// No protocol version is spoken by both sides.
    VersionMismatch = "version_mismatch", Never, Caller;
    /// The peer's certificate or identity does not allow this.
    Unauthorized = "unauthorized", Never, Caller;
    /// The peer is not who the certificate or the address says.
    IdentityMismatch = "identity_mismatch", OtherPair, Link;
    /// A message from an incarnation that has ended.
    StaleIncarnation = "stale_incarnation", OtherPair, Caller;
    /// Two KV layouts cannot be mapped onto each other.
    Incompatible = "incompatible", OtherPair, Caller;
    /// A plan does not cover its destination exactly once, or names a block that is not there.
    InvalidPlan = "invalid_plan", Never, Caller;
    /// The thing asked for does not exist; candidates are in the context.
    NotFound = "not_found", Never, Caller;
    /// A room number that was used already.
    DuplicateRoom = "duplicate_room", Never, Caller;
    /// The room ended already.
    RoomEnded = "room_ended", Never, Caller;
    /// The room can never fit into what this worker has.
    NeverFits = "never_fits", OtherPair, Caller;
    /// Everything scarce is in use and the queue is full.
    Busy = "busy", SamePair, Decode;
    /// The worker takes no new rooms.
    Draining = "draining", OtherPair, Decode;
    /// A wait ended at its deadline; the message names the side that was missing.
    DeadlineExceeded = "deadline_exceeded", OtherPair, Unknown;
    /// A lease ran out.
    LeaseExpired = "lease_expired", SamePair, Unknown;
    /// Somebody with the right to do so aborted the room.
    Aborted = "aborted", Never, Caller;
    /// The other worker died, restarted, or cannot be reached.
    PeerLost = "peer_lost", OtherPair, Link;
    /// No path is left that could carry the pages.
    NoPath = "no_path", SamePair, Link;
    /// The prefill side ended before it sent every page.
    Incomplete = "incomplete", SamePair, Prefill;
    /// Bytes arrived that are not the bytes that were sent.
    Corrupt = "corrupt", SamePair, Link;
    /// A fence cannot complete; the blocks are withheld.
    Quarantined = "quarantined", OtherPair, Decode;
    /// A memory region cannot be used as asked.
    Memory = "memory", Never, Caller;
    /// A system call failed.
    Io = "io", SamePair, Unknown;
    /// A certificate, key or configuration is wrong.
    Config = "config", Never, Caller;
    /// A defect of kvlane itself.
    Internal = "internal", Never, Unknown;
}

/// The error of every kvlane crate.
///
/// `Display` is one line (`code: message (key=value, …); fix: hint`), so that a log line is enough.
#[derive(Debug, thiserror::Error)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    context: Vec<(&'static str, String)>,
    hint: Option<String>,
    blame: Option<Blame>,
    #[source]
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// The result of every fallible call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// A new error; add context with [`Error::with`] and the fix with [`Error::hint`].
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            context: Vec::new(),
            hint: None,
            blame: None,
            source: None,
        }
    }
    /// Adds one fact: what was asked, found or expected.
    #[must_use]
    pub fn with(mut self, key: &'static str, value: impl fmt::Display) -> Self {
        self.context.push((key, value.to_string()));
        self
    }
    /// Says how to fix it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
    /// Overrides the kind's usual blame.
    #[must_use]
    pub fn blamed(mut self, blame: Blame) -> Self {
        self.blame = Some(blame);
        self
    }
    /// Attaches the cause.
    #[must_use]
    pub fn caused_by(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.source = Some(Box::new(source));
        self
    }
    /// The kind.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
    /// The message without context.
    pub fn message(&self) -> &str {
        &self.message
    }
    /// The facts, in the order they were added.
    pub fn context(&self) -> &[(&'static str, String)] {
        &self.context
    }
    /// The side to blame.
    pub fn blame(&self) -> Blame {
        self.blame.unwrap_or(self.kind.blame())
    }
    /// Whether a retry can help.
    pub fn retry(&self) -> Retry {
        self.kind.retry()
    }
    /// What crosses the wire: the same words, cut to [`limits::REFUSAL_TEXT_BYTES_MAX`].
    pub fn to_refusal(&self) -> Refusal {
        let mut text = self.message.clone();
        for (i, (key, value)) in self.context.iter().enumerate() {
            let open = if i == 0 { " (" } else { ", " };
            text.push_str(&format!("{open}{key}={value}"));
        }
        if !self.context.is_empty() {
            text.push(')');
        }
        if let Some(source) = &self.source {
            text.push_str(&format!(": {source}"));
        }
        Refusal {
            kind: self.kind,
            blame: self.blame(),
            text: cut(text),
            hint: cut(self.hint.clone().unwrap_or_default()),
        }
    }
}

/// Cuts a text to what receivers take.
pub(crate) fn cut(mut text: String) -> String {
    if text.len() > limits::REFUSAL_TEXT_BYTES_MAX {
        let mut end = limits::REFUSAL_TEXT_BYTES_MAX - '…'.len_utf8();
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push('…');
    }
    text
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_refusal().fmt(f)
    }
}

/// An [`Error`] as it crosses the wire.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// What kind of failure.
    pub kind: ErrorKind,
    /// The side to blame.
    pub blame: Blame,
    /// Message and context on one line.
    pub text: String,
    /// How to fix it; may be empty.
    pub hint: String,
}

impl Refusal {
    /// A refusal without context; where context exists, build an [`Error`] first.
    pub fn new(kind: ErrorKind, text: impl Into<String>) -> Self {
        Error::new(kind, text).to_refusal()
    }
    /// The same refusal, charged to `blame`.
    #[must_use]
    pub fn blamed(mut self, blame: Blame) -> Self {
        self.blame = blame;
        self
    }
}

impl Refusal {
    /// A reason that a peer gives: it may charge itself or the caller, nobody else.
    #[must_use]
    pub fn said_by(mut self, side: Blame) -> Self {
        if self.blame != side && self.blame != Blame::Caller {
            self.blame = side;
        }
        self
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind.code(), self.text)?;
        if !self.hint.is_empty() {
            write!(f, "; fix: {}", self.hint)?;
        }
        Ok(())
    }
}

impl From<Refusal> for Error {
    fn from(r: Refusal) -> Self {
        Self {
            kind: r.kind,
            message: r.text,
            context: Vec::new(),
            hint: (!r.hint.is_empty()).then_some(r.hint),
            blame: Some(r.blame),
            source: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_names_everything() {
        let e = Error::new(ErrorKind::NotFound, "no GPU with ordinal 3")
            .with("asked", 3)
            .with("known", "0, 1")
            .hint("name one of the known");
        assert_eq!(
            e.to_string(),
            "not_found: no GPU with ordinal 3 (asked=3, known=0, 1); fix: name one of the known"
        );
    }

    #[test]
    fn a_refusal_keeps_kind_and_blame_and_is_bounded() {
        let e = Error::new(ErrorKind::Busy, "é".repeat(limits::REFUSAL_TEXT_BYTES_MAX))
            .blamed(Blame::Prefill);
        let r = e.to_refusal();
        assert!(r.text.len() <= limits::REFUSAL_TEXT_BYTES_MAX);
        let back = Error::from(r);
        assert_eq!((back.kind(), back.blame()), (ErrorKind::Busy, Blame::Prefill));
    }
}
