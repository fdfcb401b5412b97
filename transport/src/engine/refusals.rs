//! What every engine over connections says no to, in the same words.

use kvlane_proto::{Error, ErrorKind, LaneId, LinkId, Result, limits};

use super::{EngineEvent, Post};

pub(super) fn no_link(link: LinkId) -> Error {
    Error::new(ErrorKind::NotFound, "the engine has no such link").with("link", link.0)
}

pub(super) fn no_lane(lane: LaneId, lanes: usize) -> Error {
    Error::new(ErrorKind::NotFound, "the link has no such lane")
        .with("lane", lane.0)
        .with("lanes", lanes)
}

pub(super) fn was_reset() -> Error {
    Error::new(ErrorKind::NoPath, "the lane was reset: nothing moved on it")
}

/// Whether a lane takes one more part.
pub(super) fn takes(lane: LaneId, is_up: bool, in_flight: usize) -> Result<()> {
    if !is_up {
        return Err(Error::new(ErrorKind::NoPath, "the lane is down")
            .with("lane", lane.0)
            .hint("post on another lane, or when this one is up again"));
    }
    if in_flight >= limits::PARTS_IN_FLIGHT_PER_LANE as usize {
        return Err(Error::new(
            ErrorKind::Busy,
            "the lane has all the parts it may have in flight",
        )
        .with("lane", lane.0)
        .with("limit", limits::PARTS_IN_FLIGHT_PER_LANE)
        .hint("post when a part has been acknowledged"));
    }
    Ok(())
}

/// A post that was refused on this side.
pub(super) fn nacked(post: &Post, why: &Error) -> EngineEvent {
    EngineEvent::Nacked {
        link: post.link,
        grant: post.grant,
        part: post.part,
        lane: post.lane,
        why: why.to_refusal(),
    }
}
