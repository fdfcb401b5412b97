//! The bytes of every message are what they were. A difference here is a change of the protocol:
//! raise `limits::PROTOCOL_MAX`, then write the file anew with
//!
//! ```text
//! KVLANE_GOLDEN=write cargo test -p kvlane-transport --test golden_bytes
//! ```

#![allow(clippy::unwrap_used)]

mod common;

use std::fmt::Write;
use std::path::PathBuf;

use common::{reencode, samples};
use kvlane_transport::wire::HEADER_BYTES;

const HEADER: &str = "# One frame a line: family, variant, number among its kind, hex. Made by \
                      golden_bytes.rs; compared byte for byte.\n";

fn file() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/frames.txt")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, b| {
        write!(text, "{b:02x}").unwrap();
        text
    })
}

fn lines() -> Vec<String> {
    let mut seen = std::collections::HashMap::new();
    samples()
        .iter()
        .map(|s| {
            let n = seen.entry((s.family, s.variant)).or_insert(0);
            *n += 1;
            format!("{} {} {n} {}", s.family, s.variant, hex(&s.frame))
        })
        .collect()
}

#[test]
fn every_variant_has_the_bytes_it_had() {
    let now = lines();
    if std::env::var("KVLANE_GOLDEN").as_deref() == Ok("write") {
        std::fs::write(file(), format!("{HEADER}{}\n", now.join("\n"))).unwrap();
    }
    let text = std::fs::read_to_string(file()).unwrap();
    let golden: Vec<&str> = text.lines().filter(|l| !l.starts_with('#') && !l.is_empty()).collect();
    for (now, golden) in now.iter().zip(&golden) {
        assert_eq!(now, golden, "a message's bytes have changed; see the head of this file");
    }
    assert_eq!(now.len(), golden.len(), "a variant has no golden line, or a line no variant");
    golden_bytes_decode_to_what_encodes_to_them(&golden);
}

/// Part of the one test, because that may write the file.
fn golden_bytes_decode_to_what_encodes_to_them(golden: &[&str]) {
    for line in golden {
        let words: Vec<&str> = line.split(' ').collect();
        let frame: Vec<u8> = (0..words[3].len())
            .step_by(2)
            .map(|i| u8::from_str_radix(&words[3][i..i + 2], 16).unwrap())
            .collect();
        assert_eq!(reencode(words[0], &frame[HEADER_BYTES..]).unwrap(), frame, "{line}");
    }
}
