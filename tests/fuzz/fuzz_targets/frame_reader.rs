//! A stream of frames: the reader ends with a message, an end or a refusal, and never reads beyond.
#![no_main]

use kvlane_proto::limits::FRAME_BYTES_MAX;
use kvlane_proto::msg::peer::PeerFrame;
use kvlane_transport::wire::FrameReader;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    runtime.expect("a runtime").block_on(async {
        let mut reader = FrameReader::new(bytes);
        while let Ok(Some(_)) = reader.next::<PeerFrame>(FRAME_BYTES_MAX).await {}
    });
});
