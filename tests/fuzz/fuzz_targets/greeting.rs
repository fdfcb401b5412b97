//! A body of the family `Greeting`: refused, or sound and encoded to the same bytes again.
#![no_main]

use kvlane_proto::msg::Greeting;
use kvlane_transport::wire::{HEADER_BYTES, message};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(decoded) = message::open::<Greeting>(bytes) {
        let again = message::seal(&decoded).expect("what was decoded can be encoded");
        assert_eq!(&again[HEADER_BYTES..], bytes);
    }
});
