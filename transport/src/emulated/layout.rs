//! Where things are in the memory that an emulated NIC shares with those who post to it.
//!
//! In: sizes of a queue pair. Out: its [`Places`] in one memfd ([`queue_pair`]), and, at the NIC,
//! whether the places of somebody else can be used ([`check`]). The same layout, for writers in other
//! languages, is in `docs/emulated-nic.h`. Invariant: what has been checked lies inside the memory.
//!
//! A queue pair has one memfd of its poster: page 0 with the doorbell record and the consumed word,
//! page 1 with the doorbell alone, as a NIC's own page is, then the send ring and the completion
//! ring. The NIC has one page that everybody can read and only it can write: whether it naps.

use crate::mlx5::{ENTRY_WORDS, Places, RECEIVES_MAX, SENDS_MAX};

/// Words of a page.
const PAGE: usize = 512;
/// The doorbell record.
pub const RECORD_AT: usize = 0;
/// Completions consumed, and the wish for an event; a line of its own.
pub const CONSUMED_AT: usize = 8;
/// The doorbell.
pub const DOORBELL_AT: usize = PAGE;
/// The send ring.
pub const SENDS_AT: usize = 2 * PAGE;
/// Most completions of a queue pair.
const COMPLETIONS_MAX: u32 = 1 << 17;
/// Most words of a queue pair's memory.
const WORDS_MAX: u64 = 2 << 20;

/// Words of the NIC's own page.
pub const NIC_WORDS: usize = PAGE;
/// 1 while the NIC naps: a kick on the socket wakes it, else it looks by itself within a
/// millisecond.
pub const ASLEEP_AT: usize = 0;

/// Places for so many entries and receives (powers of two), and the words that they take.
pub fn queue_pair(sends: u32, receives: u32) -> (Places, usize) {
    let completions = (sends + receives).next_power_of_two();
    let completions_at = SENDS_AT + sends as usize * ENTRY_WORDS;
    let places = Places {
        sends_at: SENDS_AT,
        sends,
        receives,
        completions_at,
        completions,
        record_at: RECORD_AT,
        doorbell_at: DOORBELL_AT,
        consumed_at: CONSUMED_AT,
    };
    (places, completions_at + completions as usize * ENTRY_WORDS)
}

/// Whether a queue pair of `words` words can have these places; or what is wrong.
///
/// # Errors
/// The field, what it is and what it may be.
pub fn check(places: &Places, words: u64) -> Result<(), String> {
    let counts = [
        ("sends", places.sends, SENDS_MAX),
        ("receives", places.receives, RECEIVES_MAX),
        ("completions", places.completions, COMPLETIONS_MAX),
    ];
    for (name, found, most) in counts {
        if !found.is_power_of_two() || found > most {
            return Err(format!("{name}={found} is no power of two from 1 to {most}"));
        }
    }
    if places.completions < places.sends + places.receives {
        return Err(format!(
            "completions={} is less than sends={} and receives={}",
            places.completions, places.sends, places.receives
        ));
    }
    if words == 0 || words > WORDS_MAX {
        return Err(format!("words={words} is not 1 to {WORDS_MAX}"));
    }
    let ring = |entries: u32| entries as usize * ENTRY_WORDS;
    let parts = [
        ("sends_at", places.sends_at, ring(places.sends), ENTRY_WORDS),
        ("completions_at", places.completions_at, ring(places.completions), ENTRY_WORDS),
        ("record_at", places.record_at, 1, 1),
        ("doorbell_at", places.doorbell_at, 1, 1),
        ("consumed_at", places.consumed_at, 1, 1),
    ];
    for (i, &(name, at, len, align)) in parts.iter().enumerate() {
        let end = at.checked_add(len).filter(|&end| end as u64 <= words);
        let Some(end) = end.filter(|_| at % align == 0) else {
            return Err(format!(
                "{name}={at} with {len} words is not a multiple of {align} inside {words} words"
            ));
        };
        let hit = parts[..i].iter().find(|&&(_, other, n, _)| at < other + n && other < end);
        if let Some((other, ..)) = hit {
            return Err(format!("{name}={at} lies on {other}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_places_are_fit_at_every_size() {
        for sends in (0..=14).map(|n| 1 << n) {
            for receives in (0..=15).map(|n| 1 << n) {
                let (places, words) = queue_pair(sends, receives);
                assert_eq!(check(&places, words as u64), Ok(()), "{sends} {receives}");
                assert!(check(&places, words as u64 - 1).is_err());
            }
        }
    }

    #[test]
    fn places_that_cannot_be_are_refused_by_name() {
        let (fit, words) = queue_pair(4, 4);
        let bad = |change: fn(&mut Places), words: u64| {
            let mut places = fit;
            change(&mut places);
            check(&places, words).unwrap_err()
        };
        let words = words as u64;
        for (change, word) in [
            ((|p| p.sends = 3) as fn(&mut Places), "sends=3"),
            (|p| p.sends = 0, "sends=0"),
            (|p| p.sends = 1 << 15, "sends=32768"),
            (|p| p.receives = 1 << 16, "receives=65536"),
            (|p| p.completions = 4, "completions=4"),
            (|p| p.sends_at = 1025, "sends_at=1025"),
            (|p| p.sends_at = usize::MAX - 7, "sends_at="),
            (|p| p.completions_at = 1024, "completions_at=1024 lies on sends_at"),
            (|p| p.doorbell_at = 0, "doorbell_at=0 lies on record_at"),
            (|p| p.consumed_at = 1 << 30, "consumed_at="),
        ] {
            let text = bad(change, words);
            assert!(text.contains(word), "{text}");
        }
        assert!(bad(|_| {}, WORDS_MAX + 1).contains("words="));
        assert!(bad(|_| {}, 0).contains("words=0"));
    }
}
