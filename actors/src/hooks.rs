//! Which phase of a room a worker has reached. Without the feature `fault-injection` nothing ever
//! stops.

use kvlane_proto::decode::{Event as DecodeEvent, Output as DecodeOutput};
use kvlane_proto::msg::call::Reply;
use kvlane_proto::msg::peer::PeerMsg;
use kvlane_proto::prefill::{Event as PrefillEvent, Output as PrefillOutput};

/// What one worker has passed.
#[derive(Debug, Default)]
pub(crate) struct Hooks {
    stopped: bool,
    /// Parts of the latest room that arrived, or were acknowledged.
    moved: u64,
    parts: u64,
}

impl Hooks {
    /// The worker hears and does nothing any more.
    pub(crate) fn stopped(&self) -> bool {
        self.stopped
    }
    fn at(&mut self, phase: &str) {
        #[cfg(feature = "fault-injection")]
        {
            self.stopped = self.stopped || crate::faults::reached(phase);
        }
        #[cfg(not(feature = "fault-injection"))]
        let _ = (phase, &mut self.stopped);
    }
    pub(crate) fn heard(&mut self, msg: &PeerMsg) {
        if let PeerMsg::OfferAck { .. } = msg {
            self.at("offer-accepted");
        }
    }
    pub(crate) fn decode<F>(&mut self, output: &DecodeOutput<F>) {
        match output {
            DecodeOutput::Reply { reply: Ok(Reply::Reserved { .. }), .. } => {
                self.at("reserved");
            }
            DecodeOutput::Open { sources, .. } => {
                self.parts = sources.iter().map(|s| u64::from(s.2.grid().parts())).sum();
                self.moved = 0;
            }
            DecodeOutput::Send { msg: PeerMsg::Offer(_), .. } => self.at("offer-sent"),
            DecodeOutput::Ended { outcome, .. } if outcome.is_done() => self.at("done"),
            _ => {}
        }
    }
    pub(crate) fn arrived<F>(&mut self, event: &DecodeEvent<F>) {
        if let DecodeEvent::Arrived { .. } = event {
            self.moved += 1;
            self.count();
        }
    }
    pub(crate) fn prefill<Q>(&mut self, output: &PrefillOutput<Q>) {
        match output {
            PrefillOutput::Send { msg: PeerMsg::OfferAck { .. }, .. } => self.at("offer-accepted"),
            PrefillOutput::Granted { parts, .. } => {
                self.parts = u64::from(*parts);
                self.moved = 0;
            }
            PrefillOutput::Ended { outcome, .. } if outcome.is_done() => self.at("done"),
            PrefillOutput::Released { .. } => self.at("given-back"),
            _ => {}
        }
    }
    pub(crate) fn acked<Q>(&mut self, event: &PrefillEvent<Q>) {
        if let PrefillEvent::Acked { .. } = event {
            self.moved += 1;
            self.count();
        }
    }
    fn count(&mut self) {
        if self.moved == 1 {
            self.at("first-byte");
        }
        if self.moved == self.parts.div_ceil(2) {
            self.at("half");
        }
        if self.moved == self.parts {
            self.at("last-byte");
        }
    }
}
