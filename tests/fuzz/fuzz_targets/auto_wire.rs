//! What the peer of an `auto` engine offers: refused, or the same again.
#![no_main]

use kvlane_transport::engine::auto::{decode, encode};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(parts) = decode(bytes) {
        assert_eq!(encode(&parts), bytes);
    }
});
