//! What can be the body of a frame, and what must hold once it is decoded.
//!
//! Lists are bounded by the frame's bytes; the checks here bound what bytes do not: counts that
//! stand for more than they weigh (runs), durations that arithmetic is done on, numbers that index
//! something.

use kvlane_proto::msg::call::{Call, CallFrame, Reply, ReplyFrame};
use kvlane_proto::msg::peer::{Offer, Outcome, PeerFrame, PeerMsg};
use kvlane_proto::msg::service::{Answer, Ask, ServiceRequest, ServiceResponse};
use kvlane_proto::msg::{Greeting, Welcome};
use kvlane_proto::{BlockList, Error, ErrorKind, GrantId, LaneId, Refusal, Result, RoomId, limits};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{HEADER_BYTES, MAGIC, codec, count_refusal};

/// Longest duration that a message may carry: a week. Leases and deadlines are added to clocks and
/// scaled for drift; this keeps all of that far from overflow.
pub const DURATION_MS_MAX: u64 = 7 * 24 * 3600 * 1000;

/// The body of a frame.
pub trait Message: Serialize + DeserializeOwned + Send + 'static {
    /// Second byte of its frames; a stream that carries another family is refused.
    const FAMILY: u8;

    /// Checks a decoded message, before anybody sees it.
    ///
    /// # Errors
    /// Naming the field.
    fn check(&self) -> Result<()>;
}

/// Decodes a body and checks it.
///
/// # Errors
/// As [`codec::decode`] and [`Message::check`]; counted.
pub fn open<M: Message>(body: &[u8]) -> Result<M> {
    let message: M = codec::decode(body)?;
    message.check().inspect_err(|_| count_refusal("unsound"))?;
    Ok(message)
}

/// Encodes a message as a whole frame, header included.
///
/// # Errors
/// [`ErrorKind::LimitExceeded`] if it is too long.
pub fn seal<M: Message>(message: &M) -> Result<Vec<u8>> {
    let body = codec::encode(message)?;
    let mut frame = Vec::with_capacity(HEADER_BYTES + body.len());
    frame.extend([MAGIC, M::FAMILY]);
    // The codec's limit is far below 4 GiB.
    frame.extend((body.len() as u32).to_le_bytes());
    frame.extend(body);
    Ok(frame)
}

impl Message for Greeting {
    const FAMILY: u8 = 1;
    fn check(&self) -> Result<()> {
        match self {
            Self::Hello(hello) => hello.check(),
            Self::Welcome(welcome) => check_welcome(welcome),
            Self::Refused(why) => check_refusal(why),
        }
    }
}

impl Message for PeerFrame {
    const FAMILY: u8 = 2;
    fn check(&self) -> Result<()> {
        match &self.msg {
            PeerMsg::Heartbeat | PeerMsg::Probe | PeerMsg::Ready => Ok(()),
            PeerMsg::Describe(info) => {
                info.check()?;
                // Here and not in `LinkInfo::check`: the simulator's pages are smaller than this.
                if info.part_bytes < limits::PART_BYTES_MIN {
                    return Err(malformed("part_bytes", info.part_bytes)
                        .with("limit", limits::PART_BYTES_MIN)
                        .hint("configure larger parts on the decode side"));
                }
                Ok(())
            }
            PeerMsg::Bye(why) => check_refusal(why),
            PeerMsg::Offer(offer) => check_offer(offer),
            PeerMsg::Renew { room, grant, lease_ms } => {
                check_numbers(*room, Some(*grant))?;
                check_ms("lease_ms", *lease_ms)
            }
            PeerMsg::Engine(message) if message.len() > limits::ENGINE_MESSAGE_BYTES_MAX => {
                Err(Error::new(ErrorKind::LimitExceeded, "engine's message is too long")
                    .with("found", message.len())
                    .with("limit", limits::ENGINE_MESSAGE_BYTES_MAX))
            }
            PeerMsg::Engine(_) => Ok(()),
            PeerMsg::OfferAck { room, grant } => check_numbers(*room, Some(*grant)),
            // A room may end before it had a grant.
            PeerMsg::Quiesced { room, .. } => check_numbers(*room, None),
            PeerMsg::Abort { room, why, .. } => {
                check_numbers(*room, None)?;
                check_refusal(why)
            }
            PeerMsg::Ended { room, outcome, .. } => {
                check_numbers(*room, None)?;
                check_outcome(outcome)
            }
        }
    }
}

impl Message for CallFrame {
    const FAMILY: u8 = 3;
    fn check(&self) -> Result<()> {
        match &self.call {
            Call::Reserve(ask) => {
                check_numbers(ask.room, None)?;
                if ask.prefills.is_empty() || ask.prefills.len() > limits::RANKS_MAX {
                    return Err(malformed("prefills", ask.prefills.len())
                        .with("limit", limits::RANKS_MAX)
                        .hint("name the prefill ranks that send to this decode rank"));
                }
                ask.prefills.iter().try_for_each(|p| p.check())?;
                check_ms("wait_ms", ask.wait_ms)?;
                check_ms("deadline_ms", ask.deadline_ms)
            }
            Call::Abort { room, reason } => {
                check_numbers(*room, None)?;
                check_text("reason", reason)
            }
            Call::Await { room, wait_ms } => {
                check_numbers(*room, None)?;
                check_ms("wait_ms", *wait_ms)
            }
            Call::Ping => Ok(()),
        }
    }
}

impl Message for ReplyFrame {
    const FAMILY: u8 = 4;
    fn check(&self) -> Result<()> {
        match &self.reply {
            Ok(Reply::Reserved { room, unclaimed_ms }) => {
                check_numbers(*room, None)?;
                check_ms("unclaimed_ms", *unclaimed_ms)
            }
            Ok(Reply::Ended(outcome)) => check_outcome(outcome),
            Ok(Reply::Aborting | Reply::Running | Reply::Pong) => Ok(()),
            Err(why) => check_refusal(why),
        }
    }
}

impl Message for ServiceRequest {
    const FAMILY: u8 = 5;
    fn check(&self) -> Result<()> {
        match &self.ask {
            Ask::Register(registration) => registration.check(),
            Ask::List { .. } | Ask::Renew(_) | Ask::Deregister | Ask::IssuerSlot { .. } => Ok(()),
        }
    }
}

impl Message for ServiceResponse {
    const FAMILY: u8 = 6;
    fn check(&self) -> Result<()> {
        match &self.answer {
            Ok(Answer::Registered { lease_ms, fits, differs, .. }) => {
                check_ms("lease_ms", *lease_ms)?;
                for identity in fits.iter().chain(differs.iter().map(|(who, _)| who)) {
                    identity.check()?;
                }
                for d in differs.iter().flat_map(|(_, fields)| fields) {
                    check_text("field", &d.field)?;
                    check_text("here", &d.here)?;
                    check_text("there", &d.there)?;
                }
                Ok(())
            }
            Ok(Answer::Renewed { lease_ms }) => check_ms("lease_ms", *lease_ms),
            Ok(Answer::Deregistered) => Ok(()),
            Ok(Answer::Workers { workers, .. }) => {
                workers.iter().try_for_each(|w| w.registration.check())
            }
            Ok(Answer::Slot { slot, first_counter, counters, lease_ms }) => {
                // Whoever uses the slot makes rooms of it: they must fit.
                if *counters == 0 {
                    return Err(malformed("counters", counters));
                }
                let last = first_counter.saturating_add(counters - 1);
                RoomId::issue(*slot, last, 0, 1)?;
                check_ms("lease_ms", *lease_ms)
            }
            Err(why) => check_refusal(why),
        }
    }
}

fn malformed(field: &'static str, found: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Malformed, format!("{field} is out of range"))
        .with("field", field)
        .with("found", found)
}

fn check_welcome(welcome: &Welcome) -> Result<()> {
    welcome.identity.check()?;
    if welcome.build.len() > limits::NAME_BYTES_MAX {
        return Err(malformed("build", welcome.build.len()));
    }
    Ok(())
}

fn check_numbers(room: RoomId, grant: Option<GrantId>) -> Result<()> {
    if room > RoomId::MAX {
        return Err(malformed("room", room));
    }
    if grant == Some(GrantId::NONE) {
        return Err(malformed("grant", GrantId::NONE));
    }
    Ok(())
}

fn check_ms(field: &'static str, ms: u64) -> Result<()> {
    if ms > DURATION_MS_MAX {
        return Err(malformed(field, ms).with("limit_ms", DURATION_MS_MAX));
    }
    Ok(())
}

fn check_lane(lane: LaneId) -> Result<()> {
    if lane.0 >= limits::LANES_PER_LINK_MAX {
        return Err(malformed("lane", lane.0).with("limit", limits::LANES_PER_LINK_MAX));
    }
    Ok(())
}

fn check_text(field: &'static str, text: &str) -> Result<()> {
    if text.len() > limits::REFUSAL_TEXT_BYTES_MAX {
        return Err(Error::new(ErrorKind::LimitExceeded, format!("{field} is too long"))
            .with("found_bytes", text.len())
            .with("limit_bytes", limits::REFUSAL_TEXT_BYTES_MAX));
    }
    Ok(())
}

fn check_refusal(why: &Refusal) -> Result<()> {
    check_text("text", &why.text)?;
    check_text("hint", &why.hint)
}

fn check_outcome(outcome: &Outcome) -> Result<()> {
    outcome.why().map_or(Ok(()), check_refusal)
}

fn check_blocks(lists: &[BlockList]) -> Result<()> {
    if lists.len() > limits::POOLS_MAX {
        return Err(malformed("blocks", lists.len()).with("limit", limits::POOLS_MAX));
    }
    let mut count = 0u64;
    for blocks in lists {
        if let BlockList::Runs(runs) = blocks
            && runs.iter().any(|run| run.count == 0)
        {
            return Err(malformed("blocks", "an empty run"));
        }
        count = count.saturating_add(blocks.len());
    }
    if count > u64::from(limits::BLOCKS_PER_ROOM_MAX) {
        return Err(Error::new(ErrorKind::LimitExceeded, "too many blocks in one room")
            .with("found", count)
            .with("limit", limits::BLOCKS_PER_ROOM_MAX));
    }
    Ok(())
}

fn check_offer(offer: &Offer) -> Result<()> {
    check_numbers(offer.room, Some(offer.grant))?;
    if let Some(issuer) = &offer.issuer {
        issuer.check()?;
    }
    check_blocks(&offer.blocks)?;
    check_ms("lease_ms", offer.lease_ms)?;
    if offer.lanes.len() > usize::from(limits::LANES_PER_LINK_MAX) {
        return Err(malformed("lanes", offer.lanes.len()));
    }
    offer.lanes.iter().try_for_each(|(lane, _)| check_lane(*lane))
}
