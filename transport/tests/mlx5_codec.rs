//! Bytes of mlx5: what is written equals what libmlx5 and the open GPU headers write, and what is
//! read is read strictly.

#![allow(clippy::unwrap_used, clippy::panic)] // Tests fail by panicking.

mod mlx5dv;
#[path = "common/rdma_core.rs"]
mod rdma_core;

use std::ops::Range;

use kvlane_transport::mlx5::completion::{self, What};
use kvlane_transport::mlx5::entry::{self, Doorbell};
use kvlane_transport::mlx5::{
    Completion, Data, Decoded, Entry, Fault, Malformed, Operation, Remote, Segment, Syndrome,
    WRITE_BYTES_MAX,
};
use proptest::prelude::*;

const TO: Remote = Remote { address: 0x1122_3344_5566_7788, key: 0x00cc_dd03 };
const FROM: Segment = Segment { address: 0x07f0_0112_2334_4000, key: 0x00aa_bb01, bytes: 1 << 16 };
const PAIR: u32 = 0x1234;

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text.chars().filter_map(|c| c.to_digit(16)).collect();
    digits.chunks(2).map(|two| (two[0] << 4 | two[1]) as u8).collect()
}
fn bytes(words: &[u64; 8]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}
fn words(bytes: &[u8]) -> [u64; 8] {
    assert!(bytes.len() <= 64);
    let mut all = [0; 64];
    all[..bytes.len()].copy_from_slice(bytes);
    std::array::from_fn(|i| u64::from_ne_bytes(all[i * 8..][..8].try_into().unwrap()))
}
fn entry(text: &str) -> Entry {
    words(&hex(text))
}
fn silent(operation: Operation) -> Decoded {
    Decoded { operation, signalled: false, fence: false }
}
fn inline(data: &[u8]) -> Data {
    let mut bytes = [0; 28];
    bytes[..data.len()].copy_from_slice(data);
    Data::Inline { len: data.len() as u8, bytes }
}

/// Written by rdma-core's own `mlx5_post_send`, which runs without a device.
#[test]
fn entries_are_those_of_libmlx5() {
    let write = entry::write(0, PAIR, TO, FROM, true);
    let told = "00000008 00123403 00000008 00000000 1122334455667788 00ccdd03 00000000
        00010000 00aabb01 07f00112 23344000";
    assert_eq!(bytes(&write), bytes(&entry(told)));

    let immediate = entry::write_immediate(1, PAIR, TO, FROM, 0xcafe_babe, true);
    let told = "00000109 00123403 00000008 cafebabe 1122334455667788 00ccdd03 00000000
        00010000 00aabb01 07f00112 23344000";
    assert_eq!(bytes(&immediate), bytes(&entry(told)));

    let then = Segment { address: 0x07f0_0112_2999_9000, key: 0x00aa_bb02, bytes: 2048 };
    let two = Operation::Write { to: TO, data: Data::Two(FROM, then) };
    let two = entry::encode(2, PAIR, &Decoded { signalled: true, ..silent(two) });
    let told = "00000208 00123404 00000008 00000000 1122334455667788 00ccdd03 00000000
        00010000 00aabb01 07f00112 23344000 00000800 00aabb02 07f00112 29999000";
    assert_eq!(bytes(&two), bytes(&entry(told)));

    let eight = Operation::Write { to: TO, data: inline(&[1, 2, 3, 4, 5, 6, 7, 8]) };
    let eight = entry::encode(3, PAIR, &Decoded { signalled: true, ..silent(eight) });
    let told = "00000308 00123403 00000008 00000000 1122334455667788 00ccdd03 00000000
        80000008 01020304 05060708";
    assert_eq!(bytes(&eight), bytes(&entry(told)));

    let data: Vec<u8> = (1..=28).collect();
    let most = Operation::Write { to: TO, data: inline(&data) };
    let most = entry::encode(4, PAIR, &Decoded { operation: most, signalled: true, fence: true });
    let told = "00000408 00123404 00000088 00000000 1122334455667788 00ccdd03 00000000
        8000001c 01020304 05060708 090a0b0c 0d0e0f10 11121314 15161718 191a1b1c";
    assert_eq!(bytes(&most), bytes(&entry(told)));
}

#[test]
fn records_and_doorbells_are_those_of_libmlx5_and_of_gpu_writers() {
    // libmlx5, after its entry 0.
    assert_eq!(entry::record(1).to_ne_bytes(), [0, 0, 0, 1]);
    let write = entry::write(0, PAIR, TO, FROM, true);
    let told = entry::doorbell_of_last(&write);
    assert_eq!(told.to_ne_bytes().to_vec(), hex("00000008 00123403"));
    assert_eq!(entry::doorbell(told), Doorbell { queue_pair: PAIR, next: 1 });

    // A GPU, after its sixth.
    assert_eq!(entry::record(6).to_ne_bytes(), [0, 0, 0, 6]);
    let told = entry::doorbell_of_next(6, PAIR);
    assert_eq!(told.to_ne_bytes().to_vec(), hex("00000600 00123400"));
    assert_eq!(entry::doorbell(told), Doorbell { queue_pair: PAIR, next: 6 });
    // One that lets its index run over into the byte of the modifier.
    let over = u64::from_ne_bytes(hex("05000600 00123400").try_into().unwrap());
    assert_eq!(entry::doorbell(over), Doorbell { queue_pair: PAIR, next: 6 });

    // A NOP has the opcode of the second convention and the size of the first.
    let nop = entry::encode(5, PAIR, &silent(Operation::Nop));
    assert_eq!(bytes(&nop)[..8].to_vec(), hex("00000500 00123401"));
    assert_eq!(entry::doorbell(nop[0]), Doorbell { queue_pair: PAIR, next: 6 });
}

fn segment() -> impl Strategy<Value = Segment> {
    let bytes = prop_oneof![1..=8192_u32, 1..=WRITE_BYTES_MAX / 2];
    (any::<u64>(), any::<u32>(), bytes).prop_map(|(address, key, bytes)| Segment {
        address,
        key,
        bytes,
    })
}
fn data() -> impl Strategy<Value = Data> {
    prop_oneof![
        segment().prop_map(Data::One),
        (segment(), segment()).prop_map(|(a, b)| Data::Two(a, b)),
        prop::collection::vec(any::<u8>(), 0..=28).prop_map(|data| inline(&data)),
    ]
}
fn operation() -> impl Strategy<Value = Operation> {
    let to = (any::<u64>(), any::<u32>()).prop_map(|(address, key)| Remote { address, key });
    let write = (to, data(), any::<u32>());
    prop_oneof![
        1 => Just(Operation::Nop),
        8 => write.prop_map(|(to, data, immediate)| match immediate % 2 {
            0 => Operation::Write { to, data },
            _ => Operation::WriteImmediate { to, data, immediate },
        }),
    ]
}
fn decoded() -> impl Strategy<Value = Decoded> {
    (operation(), any::<bool>(), any::<bool>()).prop_map(|(operation, signalled, fence)| Decoded {
        operation,
        signalled,
        fence,
    })
}

/// Bytes of an entry that mean nothing, because real writers leave them as they were.
fn ignored(operation: &Operation) -> Vec<Range<usize>> {
    let (data, immediate) = match operation {
        Operation::Nop => return vec![0x08..0x0b, 0x0c..0x40],
        Operation::Write { data, .. } => (data, 0x0c..0x10),
        Operation::WriteImmediate { data, .. } => (data, 0..0),
    };
    let unused = match data {
        Data::One(_) => 0x30..0x40,
        Data::Two(..) => 0..0,
        Data::Inline { len: 0, .. } => 0x20..0x40,
        Data::Inline { len, .. } => 0x24 + usize::from(*len)..0x40,
    };
    vec![0x08..0x0b, 0x1c..0x20, immediate, unused]
}

proptest! {
    #[test]
    fn an_entry_comes_back(what in decoded(), index: u16, pair in 0..1_u32 << 24) {
        let entry = entry::encode(index, pair, &what);
        prop_assert_eq!(entry::decode(&entry, index, pair), Ok(what));
    }

    #[test]
    fn the_fast_ways_write_the_same(
        index: u16, pair in 0..1_u32 << 24, from in segment(), immediate: u32, signalled: bool,
        address: u64, key: u32,
    ) {
        let to = Remote { address, key };
        let data = Data::One(from);
        let what = Decoded { signalled, ..silent(Operation::Write { to, data }) };
        let fast = entry::write(index, pair, to, from, signalled);
        prop_assert_eq!(fast, entry::encode(index, pair, &what));
        let operation = Operation::WriteImmediate { to, data, immediate };
        let what = Decoded { signalled, ..silent(operation) };
        let fast = entry::write_immediate(index, pair, to, from, immediate, signalled);
        prop_assert_eq!(fast, entry::encode(index, pair, &what));
    }

    #[test]
    fn what_writers_leave_undefined_means_nothing(
        what in decoded(), index: u16, pair in 0..1_u32 << 24, noise: [u8; 64],
    ) {
        let mut entry = bytes(&entry::encode(index, pair, &what));
        for at in ignored(&what.operation).into_iter().flatten() {
            entry[at] ^= noise[at];
        }
        prop_assert_eq!(entry::decode(&words(&entry), index, pair), Ok(what));
    }

    /// Flags apart, of which this side knows two.
    #[test]
    fn every_other_bit_counts(what in decoded(), index: u16, pair in 0..1_u32 << 24) {
        let entry = bytes(&entry::encode(index, pair, &what));
        let ignored = ignored(&what.operation);
        for at in (0..64).filter(|at| *at != 0x0b && !ignored.iter().any(|r| r.contains(at))) {
            for bit in 0..8 {
                let mut other = entry.clone();
                other[at] ^= 1 << bit;
                let read = entry::decode(&words(&other), index, pair);
                prop_assert_ne!(read, Ok(what), "bit {} of {:#x}", bit, at);
            }
        }
    }

    #[test]
    fn noise_is_read_or_refused(
        mut noise: [u64; 8], index: u16, pair in 0..1_u32 << 24, opcode in 0..10_u64,
        segments in 0..6_u64,
    ) {
        let _ = entry::decode(&noise, index, pair);
        // As far as the segments.
        let (what, whose) = (u64::from(index) << 8 | opcode, u64::from(pair) << 8 | segments);
        noise[0] = (what << 32 | whose).to_be();
        if let Ok(what) = entry::decode(&noise, index, pair) {
            let again = entry::encode(index, pair, &what);
            prop_assert_eq!(entry::decode(&again, index, pair), Ok(what));
        }
    }

    #[test]
    fn any_doorbell_is_read(value: u64, next: u16, pair in 0..1_u32 << 24) {
        let _ = entry::doorbell(value);
        let told = entry::doorbell(entry::doorbell_of_next(next, pair));
        prop_assert_eq!(told, Doorbell { queue_pair: pair, next });
        prop_assert_eq!(entry::record_index(entry::record(next)), next);
    }
}

/// An entry with four of its bytes, as hex, replaced.
fn with(entry: &Entry, at: usize, four: &str) -> Entry {
    let mut bytes = bytes(entry);
    bytes[at..at + 4].copy_from_slice(&hex(four));
    words(&bytes)
}

#[test]
fn what_is_wrong_is_told() {
    let one = entry::write(0x0102, PAIR, TO, FROM, true);
    let read = |entry: &Entry| entry::decode(entry, 0x0102, PAIR).map(|_| ());
    assert_eq!(read(&one), Ok(()));

    let torn = Malformed::Torn { found: 0x0101, expected: 0x0102 };
    assert_eq!(read(&with(&one, 0, "00010108")), Err(torn));
    // Whatever else is wrong: the rest is of another time.
    assert_eq!(read(&with(&[u64::MAX; 8], 0, "ff0101ff")), Err(torn));

    let other = Malformed::QueuePair { found: 0x0001_1234, expected: PAIR };
    assert_eq!(read(&with(&one, 4, "01123403")), Err(other));
    assert_eq!(read(&with(&with(&one, 0, "ff0102ff"), 4, "011234ff")), Err(other));

    // SEND, RDMA_READ, FETCH_ADD, DUMP, and writes with a modifier.
    for (told, found, modifier) in [
        ("0001020a", 0x0a, 0),
        ("00010210", 0x10, 0),
        ("00010212", 0x12, 0),
        ("00010223", 0x23, 0),
        ("01010208", 0x08, 1),
        ("80010209", 0x09, 0x80),
        ("01010200", 0x00, 1),
    ] {
        let opcode = Malformed::Opcode { found, modifier };
        assert_eq!(read(&with(&with(&one, 0, told), 4, "001234ff")), Err(opcode), "{told}");
    }

    for found in [0, 1, 5, 0x3f, 0xff] {
        let told = with(&one, 4, &format!("001234{found:02x}"));
        assert_eq!(read(&told), Err(Malformed::Segments { found }));
    }
    let nop = with(&one, 0, "00010200");
    for found in [0, 2, 3, 4] {
        let told = with(&nop, 4, &format!("001234{found:02x}"));
        assert_eq!(read(&told), Err(Malformed::Segments { found }));
    }
    assert_eq!(read(&with(&nop, 4, "00123401")), Ok(()));
}

#[test]
fn lengths_that_cannot_be_are_refused() {
    let length = |found| Err(Malformed::Length { found });
    let one = entry::write(0, PAIR, TO, FROM, true);
    let read = |entry: &Entry| entry::decode(entry, 0, PAIR).map(|_| ());
    assert_eq!(read(&with(&one, 0x20, "40000000")), Ok(()));
    assert_eq!(read(&with(&one, 0x20, "40000001")), length(0x4000_0001));
    assert_eq!(read(&with(&one, 0x20, "7fffffff")), length(0x7fff_ffff));
    assert_eq!(read(&with(&one, 0x20, "00000000")), length(0));

    let two = with(&with(&one, 4, "00123404"), 0x30, "00010000");
    assert_eq!(read(&two), Ok(()));
    assert_eq!(read(&with(&two, 0x20, "00000000")), length(0));
    assert_eq!(read(&with(&two, 0x30, "00000000")), length(0));
    assert_eq!(read(&with(&two, 0x30, "40000001")), length(0x4000_0001));
    assert_eq!(read(&with(&two, 0x30, "80000004")), length(0x8000_0004));
    assert_eq!(read(&with(&two, 0x30, "3fff0000")), Ok(()));
    assert_eq!(read(&with(&two, 0x30, "3fff0001")), length(0x4000_0001));

    assert_eq!(read(&with(&one, 0x20, "8000000c")), Ok(()));
    assert_eq!(read(&with(&one, 0x20, "8000000d")), length(0x8000_000d));
    assert_eq!(read(&with(&one, 0x20, "ffffffff")), length(0xffff_ffff));
    // Both segments for bytes that one of them holds: the other would be one of memory.
    assert_eq!(read(&with(&two, 0x20, "8000000c")), length(0x8000_000c));
    assert_eq!(read(&with(&two, 0x20, "8000000d")), Ok(()));
    assert_eq!(read(&with(&two, 0x20, "8000001c")), Ok(()));
    assert_eq!(read(&with(&two, 0x20, "8000001d")), length(0x8000_001d));
}

/// Not cut, and not taken for bytes in the entry: refused.
#[test]
fn a_write_that_is_too_long_is_never_another_write() {
    for bytes in [WRITE_BYTES_MAX + 1, 1 << 31, (1 << 31) + 8, u32::MAX] {
        let from = Segment { bytes, ..FROM };
        let read = entry::decode(&entry::write(0, PAIR, TO, from, true), 0, PAIR);
        let found = bytes.min((1 << 31) - 1);
        assert_eq!(read, Err(Malformed::Length { found }));
        let two = silent(Operation::Write { to: TO, data: Data::Two(FROM, from) });
        let read = entry::decode(&entry::encode(0, PAIR, &two), 0, PAIR);
        assert_eq!(read, Err(Malformed::Length { found }));
    }
    // More than an entry holds.
    let long = Data::Inline { len: 29, bytes: [7; 28] };
    let long = entry::encode(0, PAIR, &silent(Operation::Write { to: TO, data: long }));
    let most = Operation::Write { to: TO, data: inline(&[7; 28]) };
    assert_eq!(entry::decode(&long, 0, PAIR), Ok(silent(most)));
}

#[test]
fn nothing_to_carry_takes_no_segment() {
    let to = TO;
    let none = Operation::WriteImmediate { to, data: inline(&[]), immediate: 0xcafe_babe };
    let none = entry::encode(1, PAIR, &Decoded { signalled: true, ..silent(none) });
    let told = "00000109 00123402 00000008 cafebabe 1122334455667788 00ccdd03 00000000";
    assert_eq!(bytes(&none), bytes(&entry(told)));
}

#[test]
fn flags_of_other_writers_are_understood() {
    let one = entry::write(0, PAIR, TO, FROM, false);
    let flags = |told: &str| {
        let read = entry::decode(&with(&one, 0x08, told), 0, PAIR).unwrap();
        (read.signalled, read.fence)
    };
    assert_eq!(flags("00000000"), (false, false));
    // Solicited, and only the first error.
    assert_eq!(flags("00000006"), (false, false));
    // Always, and always with an event.
    assert_eq!(flags("00000008"), (true, false));
    assert_eq!(flags("0000000c"), (true, false));
    // Small, full, strong, both.
    for told in ["00000020", "00000040", "00000060", "00000080"] {
        assert_eq!(flags(told), (false, true));
    }
}

/// By hand, from the offsets of `mlx5_cqe64` and `mlx5_err_cqe`.
#[test]
fn completions_have_the_bytes_of_the_public_structures() {
    let zeros = "00".repeat(32);
    let of = |what, index| Completion { queue_pair: PAIR, index, what };
    let fault = |syndrome, vendor| Fault { syndrome: Syndrome(syndrome), vendor };
    let arrived = What::Arrived { immediate: 0xcafe_babe, bytes: 4096 };
    let failed = What::SendFailed(fault(0x13, 0x88));
    let flushed = What::ReceiveFailed(fault(0x05, 0xf9));
    for (completion, owner, told) in [
        (
            of(What::Sent, 511),
            false,
            "00000000 00000000 00000000 00000000 0000000000000000 08001234 01ff 0000",
        ),
        (
            of(What::Sent, 511),
            true,
            "00000000 00000000 00000000 00000000 0000000000000000 08001234 01ff 0001",
        ),
        (
            of(arrived, 7),
            true,
            "00000000 cafebabe 00000000 00001000 0000000000000000 00001234 0007 0011",
        ),
        (
            of(failed, 0xfffe),
            false,
            "00000000 00000000 00000000 00000000 00000000 00008813 08001234 fffe 00d0",
        ),
        (
            of(flushed, 0),
            true,
            "00000000 00000000 00000000 00000000 00000000 0000f905 00001234 0000 00e1",
        ),
    ] {
        let words = completion::encode(&completion, owner);
        assert_eq!(bytes(&words), hex(&format!("{zeros}{told}")), "{completion:?}");
        assert_eq!(completion::decode(&words), Ok(completion));
        assert!(completion::is_written(words[7], owner));
        assert!(!completion::is_written(words[7], !owner));
    }
}

#[test]
fn a_slot_that_nobody_wrote_is_empty_in_every_pass() {
    let unwritten = completion::unwritten();
    assert_eq!(bytes(&unwritten)[63], 0xf1);
    // Some fill theirs with ones.
    for last in [unwritten[7], u64::MAX] {
        assert!(!completion::is_written(last, false));
        assert!(!completion::is_written(last, true));
    }
    assert_eq!(completion::decode(&unwritten), Err(15));
}

#[test]
fn an_unknown_completion_is_refused_by_its_opcode() {
    for opcode in (0..16_u8).filter(|o| ![0, 1, 13, 14].contains(o)) {
        for low in 0..16 {
            let mut told = [0; 64];
            told[63] = opcode << 4 | low;
            assert_eq!(completion::decode(&words(&told)), Err(opcode));
        }
    }
}

#[test]
fn a_fault_has_its_name_in_the_field() {
    let known = [
        (0x01, "local length error"),
        (0x02, "local QP operation error"),
        (0x04, "local protection error"),
        (0x05, "flushed"),
        (0x06, "memory window bind error"),
        (0x10, "bad response"),
        (0x11, "local access error"),
        (0x12, "remote invalid request"),
        (0x13, "remote access error"),
        (0x14, "remote operation error"),
        (0x15, "transport retry counter exceeded"),
        (0x16, "RNR retry counter exceeded"),
        (0x22, "remote aborted"),
    ];
    for syndrome in 0..=u8::MAX {
        let name = known.iter().find(|(n, _)| *n == syndrome).map_or("unknown", |(_, name)| name);
        for (opcode, failed) in
            [(0xd0, What::SendFailed as fn(Fault) -> What), (0xe0, What::ReceiveFailed)]
        {
            let mut told = [0; 64];
            (told[55], told[63]) = (syndrome, opcode);
            let fault = Fault { syndrome: Syndrome(syndrome), vendor: 0 };
            let read = completion::decode(&words(&told)).unwrap();
            assert_eq!(read, Completion { queue_pair: 0, index: 0, what: failed(fault) });
            assert_eq!(fault.syndrome.name(), name);
        }
    }
}

fn completion() -> impl Strategy<Value = Completion> {
    let fault = (any::<u8>(), any::<u8>())
        .prop_map(|(syndrome, vendor)| Fault { syndrome: Syndrome(syndrome), vendor });
    let what = prop_oneof![
        Just(What::Sent),
        any::<(u32, u32)>().prop_map(|(immediate, bytes)| What::Arrived { immediate, bytes }),
        fault.clone().prop_map(What::SendFailed),
        fault.prop_map(What::ReceiveFailed),
    ];
    (0..1_u32 << 24, any::<u16>(), what).prop_map(|(queue_pair, index, what)| Completion {
        queue_pair,
        index,
        what,
    })
}

proptest! {
    #[test]
    fn a_completion_comes_back(completion in completion(), owner: bool) {
        let words = completion::encode(&completion, owner);
        prop_assert!(completion::is_written(words[7], owner));
        prop_assert!(!completion::is_written(words[7], !owner));
        prop_assert_eq!(completion::decode(&words), Ok(completion));
    }

    /// A NIC fills much more in than is read here.
    #[test]
    fn the_rest_of_a_completion_means_nothing(completion in completion(), noise: [u8; 64]) {
        let mut told = bytes(&completion::encode(&completion, false));
        let (arrived, failed) = match completion.what {
            What::Sent => (false, false),
            What::Arrived { .. } => (true, false),
            What::SendFailed(_) | What::ReceiveFailed(_) => (false, true),
        };
        let used = |at: usize| match at {
            36..40 | 44..48 => arrived,
            54 | 55 => failed,
            57..62 => true,
            _ => false,
        };
        for at in (0..63).filter(|at| !used(*at)) {
            told[at] ^= noise[at];
        }
        // Format and solicited.
        told[63] ^= noise[63] & 0x0e;
        prop_assert_eq!(completion::decode(&words(&told)), Ok(completion));
    }

    #[test]
    fn any_completion_is_read_or_refused(noise: [u64; 8]) {
        let _ = completion::decode(&noise);
    }

    #[test]
    fn the_count_of_consumed_ones_has_24_bits(next: u64) {
        let half = completion::consumed(next);
        prop_assert_eq!(half.to_ne_bytes()[0], 0);
        prop_assert_eq!(u64::from(completion::consumed_count(half)), next & 0xff_ffff);
    }
}
