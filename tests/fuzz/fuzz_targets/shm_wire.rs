//! What the peer of a `shm` engine says and writes into the rings: refused, or the same again.
#![no_main]

use kvlane_transport::engine::shm::wire::{
    ACK_BODY, Ack, Blob, Message, Part, SLOT_BODY, decode_more, encode_more,
};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(blob) = Blob::decode(bytes) {
        assert_eq!(blob.encode(), bytes);
    }
    if let Some(message) = Message::decode(bytes) {
        assert_eq!(message.encode(), bytes);
    }
    let mut words = [0; SLOT_BODY];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
    }
    if let Some(part) = Part::decode(&words) {
        assert_eq!(part.encode(), words);
    }
    if let Some((extents, n)) = decode_more(&words) {
        assert_eq!(encode_more(&extents[..n]), words);
    }
    let mut ack = [0; ACK_BODY];
    ack.copy_from_slice(&words[..ACK_BODY]);
    if let Some(read) = Ack::decode(&ack) {
        assert_eq!(read.encode(), ack);
    }
});
