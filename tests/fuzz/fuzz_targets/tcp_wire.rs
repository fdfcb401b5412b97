//! What the peer of a `tcp` engine sends before and between pages: refused, or the same bytes again.
#![no_main]

use kvlane_transport::engine::tcp::wire::{ACK_BYTES, Ack, Blob, HEADER_BYTES, HELLO_BYTES, Header, Hello};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(blob) = Blob::decode(bytes) {
        assert_eq!(blob.encode(), bytes);
    }
    if let Some(start) = bytes.first_chunk::<HELLO_BYTES>()
        && let Some(hello) = Hello::decode(start)
    {
        assert_eq!(&hello.encode(), start);
    }
    if let Some(start) = bytes.first_chunk::<HEADER_BYTES>()
        && let Some(header) = Header::decode(start)
    {
        assert_eq!(&header.encode(), start);
    }
    if let Some(start) = bytes.first_chunk::<ACK_BYTES>()
        && let Some(ack) = Ack::decode(start)
    {
        assert_eq!(&ack.encode(), start);
    }
});
