//! What the peer of a `gpunetio` engine says: refused, or the same again.
#![no_main]

use kvlane_transport::engine::one_sided::wire::{Blob, Message};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(blob) = Blob::decode(bytes) {
        assert_eq!(blob.encode(), bytes);
    }
    if let Ok(message) = Message::decode(bytes) {
        assert_eq!(message.encode(), bytes);
    }
});
