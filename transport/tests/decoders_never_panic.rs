//! Bytes of a peer never panic a decoder, whatever they are: golden messages with bytes flipped,
//! numbers replaced by extreme ones, pieces cut out, doubled and spliced, and plain noise. What does
//! decode encodes to the same bytes again. `tests/fuzz` has the same targets for cargo-fuzz.

#![allow(clippy::unwrap_used)]

mod common;

use common::{FAMILIES, reencode, samples};
use kvlane_proto::msg::Greeting;
use kvlane_proto::msg::peer::PeerFrame;
use kvlane_transport::wire::{FrameReader, HEADER_BYTES};

const CASES: usize = 100_000;

/// splitmix64: a seed gives the same cases on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

fn mutate(bytes: &mut Vec<u8>, other: &[u8], random: &mut Random) {
    const EXTREMES: [u64; 8] =
        [0, 1, u32::MAX as u64, 1 << 31, 1 << 40, u64::MAX, i64::MAX as u64, 1 << 30];
    for _ in 0..1 + random.below(4) {
        let at = random.below(bytes.len());
        match random.below(7) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            1 if !bytes.is_empty() => bytes[at] = random.next() as u8,
            2 => {
                let width = [2, 4, 8][random.below(3)];
                let number = EXTREMES[random.below(EXTREMES.len())].to_le_bytes();
                for (b, n) in bytes.iter_mut().skip(at).zip(&number[..width]) {
                    *b = *n;
                }
            }
            3 => bytes.truncate(at),
            4 => drop(bytes.drain(at..(at + random.below(16)).min(bytes.len()))),
            5 => bytes.extend_from_within(at..),
            _ => {
                bytes.truncate(at);
                bytes.extend_from_slice(&other[random.below(other.len())..]);
            }
        }
        bytes.truncate(8 << 10);
    }
}

#[test]
fn mutated_messages_and_noise_are_refused_or_sound() {
    let golden: Vec<(&str, Vec<u8>)> =
        samples().into_iter().map(|s| (s.family, s.frame[HEADER_BYTES..].to_vec())).collect();
    let mut random = Random(0x6b76_6c61_6e65);
    let (mut refused, mut sound) = (0, 0);
    for case in 0..CASES {
        let (family, bytes) = if case % 10 == 0 {
            let noise = (0..random.below(200)).map(|_| random.next() as u8).collect();
            (FAMILIES[random.below(FAMILIES.len())], noise)
        } else {
            let (family, bytes) = &golden[random.below(golden.len())];
            let mut bytes = bytes.clone();
            let other = &golden[random.below(golden.len())].1;
            mutate(&mut bytes, other, &mut random);
            (*family, bytes)
        };
        match reencode(family, &bytes) {
            Ok(again) => {
                assert_eq!(again[HEADER_BYTES..], bytes, "{family} is not canonical");
                sound += 1;
            }
            Err(_) => refused += 1,
        }
    }
    // Both ends of the decoders were exercised.
    assert!(refused > CASES / 4 && sound > CASES / 100, "{refused} refused, {sound} sound");
}

#[tokio::test]
async fn mutated_streams_of_frames_are_refused_or_sound() {
    let golden: Vec<Vec<u8>> =
        samples().into_iter().filter(|s| s.family == "peer").map(|s| s.frame).collect();
    let mut random = Random(7);
    let (mut frames, mut ends, mut refused) = (0, 0, 0);
    for _ in 0..5_000 {
        let mut stream = Vec::new();
        for _ in 0..3 {
            stream.extend_from_slice(&golden[random.below(golden.len())]);
        }
        let other = golden[random.below(golden.len())].clone();
        mutate(&mut stream, &other, &mut random);
        let mut reader = FrameReader::new(stream.as_slice());
        loop {
            match reader.next::<PeerFrame>(1 << 16).await {
                Ok(Some(_)) => frames += 1,
                Ok(None) => break ends += 1,
                Err(_) => break refused += 1,
            }
        }
        // Another family never passes.
        if !stream.is_empty() {
            assert!(FrameReader::new(stream.as_slice()).next::<Greeting>(1 << 16).await.is_err());
        }
    }
    assert!(frames > 1000 && ends > 10 && refused > 1000, "{frames} {ends} {refused}");
}

/// Sizes that are each within their limit, and whose product is not.
#[test]
fn pool_maps_longer_than_the_address_space_are_refused() {
    use kvlane_proto::msg::peer::{EngineOffer, LinkInfo, PeerMsg};
    use kvlane_proto::{Device, ErrorKind, PoolMap, limits};
    use kvlane_transport::wire::message;

    let layout = common::layout();
    for address in [0, 1 << 40] {
        let map = PoolMap {
            device: Device::Host,
            slab_address: (0..4).map(|slab| address + slab * 64).collect(),
            block_stride_bytes: 1 << 40,
            blocks: limits::POOL_BLOCKS_MAX,
        };
        let engine = EngineOffer { name: "shm".into(), blob: vec![], maps: vec![map] };
        let info = LinkInfo {
            pools: vec![layout.clone()],
            engines: vec![engine],
            lanes: 1,
            part_bytes: 1 << 20,
        };
        let frame = PeerFrame { seq: 1, echo: 0, msg: PeerMsg::Describe(Box::new(info)) };
        let bytes = message::seal(&frame).unwrap();
        let e = message::open::<PeerFrame>(&bytes[HEADER_BYTES..]).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Malformed, "{e}");
    }
}

/// Lists that weigh little and stand for much.
#[test]
fn lists_that_expand_beyond_a_room_are_refused() {
    use kvlane_proto::blocks::Run;
    use kvlane_proto::msg::peer::{Offer, PeerMsg};
    use kvlane_proto::{BlockList, GrantId, RoomId, Span, limits};
    use kvlane_transport::wire::message;

    let pass = |msg: PeerMsg| {
        let bytes = message::seal(&PeerFrame { seq: 1, echo: 0, msg }).unwrap();
        message::open::<PeerFrame>(&bytes[HEADER_BYTES..]).map(drop)
    };
    let run = |count| Run { first: 0, count, stride: 1 };
    let most = limits::BLOCKS_PER_ROOM_MAX;
    for (runs, fits) in [
        (vec![run(most)], true),
        (vec![run(most), run(1)], false),
        (vec![run(u32::MAX); 100_000], false),
        (vec![run(1), run(0)], false),
    ] {
        let blocks = BlockList::Runs(runs);
        let offer = Offer {
            room: RoomId(1),
            grant: GrantId(1),
            issuer: None,
            span: Span { tokens: 1, prefix_tokens: 0 },
            blocks: vec![blocks],
            lanes: vec![],
            credit_parts: 1,
            lease_ms: 1,
        };
        assert_eq!(pass(PeerMsg::Offer(Box::new(offer))).is_ok(), fits);
    }
}

#[test]
fn parts_too_small_or_lists_too_long_are_refused_by_name() {
    use kvlane_proto::limits;
    use kvlane_proto::msg::peer::{EngineOffer, LinkInfo, PeerMsg};
    use kvlane_transport::wire::message;

    let info = |change: &dyn Fn(&mut LinkInfo)| {
        let engine = EngineOffer { name: "tcp".into(), blob: vec![], maps: vec![] };
        let mut info = LinkInfo {
            pools: vec![common::layout()],
            engines: vec![engine],
            lanes: 1,
            part_bytes: limits::PART_BYTES_MIN,
        };
        change(&mut info);
        let frame = PeerFrame { seq: 1, echo: 0, msg: PeerMsg::Describe(Box::new(info)) };
        let bytes = message::seal(&frame).unwrap();
        message::open::<PeerFrame>(&bytes[HEADER_BYTES..]).err().map(|e| e.to_string())
    };
    assert_eq!(info(&|_| {}), None);
    type Change = fn(&mut LinkInfo);
    let cases: [(Change, &str); 5] = [
        (|i| i.part_bytes -= 1, "found=4095"),
        (|i| i.part_bytes = u64::MAX, "part_bytes is out of range"),
        (|i| i.engines = vec![i.engines[0].clone(); 65], "list of engines is too long"),
        (|i| i.engines[0].name = "x".repeat(64), "engine's name is too long"),
        (|i| i.engines[0].blob = vec![0; 4097], "found=4097, limit=4096, index=0"),
    ];
    for (change, want) in cases {
        let text = info(&change).unwrap_or_default();
        assert!(text.contains(want) && text.contains("limit="), "{want}: {text}");
    }
}

/// What two `gpunetio` engines say to each other, as [`mutated_messages_and_noise_are_refused_or_sound`].
#[test]
fn mutated_words_of_gpunetio_engines_are_refused_or_sound() {
    use kvlane_transport::emulated::client::{About, End, Key};
    use kvlane_transport::engine::one_sided::wire::{Blob, Message, Opened};

    let end = End { number: 0x12_3456, sequence: 0xff_ffff, ..End::default() };
    let region = |n: u64| Opened { address: n << 40, bytes: 4096 * n, key: Key(n as u32) };
    let (lane, epoch) = (3, 1 << 33);
    let nic = |n: u64| About { name: format!("emulated{n}"), guid: n << 50 };
    let golden = [
        Message::Pair { lane, epoch, guid: 7, end, credit: (1 << 47, Key(9)) }.encode(),
        Message::Paired { lane, epoch, end, receives: 32, regions: vec![] }.encode(),
        Message::Paired { lane, epoch, end, receives: 1, regions: (1..9).map(region).collect() }
            .encode(),
        Message::Up { lane, epoch }.encode(),
        Message::Broken { lane, epoch, why: "no_path: the NIC is lost é".into() }.encode(),
        Message::Regions { guid: 7, regions: (1..4).map(region).collect() }.encode(),
        Blob { lanes: 4, nics: vec![nic(1), nic(2)], lost: 2 }.encode(),
    ];
    let reencode = |bytes: &[u8]| {
        let message = Message::decode(bytes).map(|m| m.encode());
        let blob = Blob::decode(bytes).map(|b| b.encode());
        [message, blob].map(|again| {
            if let Ok(again) = &again {
                assert_eq!(again, bytes, "not canonical");
            }
            again.is_ok()
        })
    };
    for (n, bytes) in golden.iter().enumerate() {
        assert!(reencode(bytes)[usize::from(n == 6)], "{n}");
    }
    let mut random = Random(0x6770_756e);
    let (mut refused, mut sound) = (0, [0, 0]);
    for case in 0..CASES {
        let bytes = if case % 10 == 0 {
            (0..random.below(200)).map(|_| random.next() as u8).collect()
        } else {
            let mut bytes = golden[random.below(golden.len())].clone();
            mutate(&mut bytes, &golden[random.below(golden.len())], &mut random);
            bytes
        };
        let fits = reencode(&bytes);
        refused += u32::from(fits == [false, false]);
        (0..2).for_each(|n| sound[n] += u32::from(fits[n]));
    }
    assert!(refused > 10_000 && sound[0] > 1000 && sound[1] > 100, "{refused} refused, {sound:?}");
}

/// A receiver with as many slabs as any rank may have still says where they are in one frame.
#[test]
fn maps_of_the_most_pools_and_layers_fit_a_frame() {
    use kvlane_proto::msg::peer::{EngineOffer, LinkInfo, PeerMsg};
    use kvlane_proto::{Device, Layout, PoolMap, limits};
    use kvlane_transport::wire::message;

    let layout = Layout { layers: limits::LAYERS_MAX, ..common::layout() };
    let pools = vec![layout; limits::POOLS_MAX];
    let map = |at: u64, l: &Layout| PoolMap::contiguous(Device::Host, at << 44, l, 1 << 20);
    let maps = (1..).zip(&pools).map(|(at, l)| map(at, l)).collect();
    let engine = EngineOffer { name: "gpunetio".into(), blob: vec![0; 4096], maps };
    let info = LinkInfo { pools, engines: vec![engine], lanes: 64, part_bytes: 1 << 20 };
    let frame = PeerFrame { seq: 1, echo: 0, msg: PeerMsg::Describe(Box::new(info)) };
    let bytes = message::seal(&frame).unwrap();
    assert!(bytes.len() < limits::FRAME_BYTES_MAX / 8, "{}", bytes.len());
    assert_eq!(message::open::<PeerFrame>(&bytes[HEADER_BYTES..]).unwrap(), frame);
}

#[test]
fn words_of_engines_are_bounded() {
    use kvlane_proto::msg::peer::PeerMsg;
    use kvlane_proto::{ErrorKind, limits};
    use kvlane_transport::wire::message;

    let pass = |bytes| {
        let msg = PeerMsg::Engine(vec![7; bytes]);
        let bytes = message::seal(&PeerFrame { seq: 1, echo: 0, msg }).unwrap();
        message::open::<PeerFrame>(&bytes[HEADER_BYTES..]).map(drop)
    };
    let most = limits::ENGINE_MESSAGE_BYTES_MAX;
    assert!(pass(0).is_ok() && pass(most).is_ok());
    let e = pass(most + 1).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::LimitExceeded);
    assert!(e.to_string().contains(&format!("found={}, limit={most}", most + 1)), "{e}");
}
