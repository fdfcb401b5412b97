//! What messages of other software mean, and ours: causes in the order of how likely, what to do, and
//! which command shows it.
//!
//! Owns: [`Known`], the table, [`find`]. In: a line from somebody's log. Out: every entry that it
//! matches; or those that are near. kvlane's own kinds are read from `docs/errors.md`, so that there
//! is one text for both.

mod table;

use std::borrow::Cow;

use kvlane_proto::ErrorKind;
use serde::Serialize;

/// What is known of a message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Known {
    /// The message, as its software writes it.
    pub message: &'static str,
    /// Whose message it is.
    pub from: &'static str,
    /// What it means.
    pub means: &'static str,
    /// What leads to it, the likeliest first.
    pub causes: Cow<'static, [&'static str]>,
    /// What to do, in this order.
    pub fixes: Cow<'static, [&'static str]>,
    /// A command that shows it; empty if none does.
    pub shown_by: &'static str,
    /// A text matches if it has all words of any of these, and no letter or digit touches them.
    #[serde(skip)]
    needles: &'static [&'static [&'static str]],
}

/// Longest text that is looked at.
const TEXT_BYTES_MAX: usize = 64 << 10;
/// Entries that are named as near.
const NEAR_MAX: usize = 3;

/// Every entry that the text matches, the other software's first.
pub fn find(text: &str) -> Vec<Known> {
    let text = plain(text);
    let has_all = |all: &&[&str]| all.iter().all(|needle| has(&text, needle));
    let found = table::TABLE.iter().filter(|known| known.needles.iter().any(has_all)).cloned();
    found.chain(own_kinds().filter(|known| is_of_kind(&text, known.message))).collect()
}

/// Entries that share words with a text that none matches: those with most of them.
pub fn near(text: &str) -> Vec<Known> {
    let text = plain(text);
    let asked: Vec<&str> = words(&text).collect();
    let shared = |known: &Known| {
        let message = known.message.to_lowercase();
        words(&message).filter(|word| asked.contains(word)).count()
    };
    let mut scored: Vec<(usize, &Known)> =
        table::TABLE.iter().map(|known| (shared(known), known)).filter(|(n, _)| *n >= 2).collect();
    scored.sort_by_key(|(n, _)| std::cmp::Reverse(*n));
    scored.into_iter().take(NEAR_MAX).map(|(_, known)| known.clone()).collect()
}

/// Everything that is known.
pub fn all() -> Vec<Known> {
    table::TABLE.iter().cloned().chain(own_kinds()).collect()
}

/// kvlane's own kinds, from the page that lists them.
fn own_kinds() -> impl Iterator<Item = Known> {
    let page = include_str!("../../../../docs/errors.md");
    page.lines().filter_map(|line| {
        let cells: Vec<&str> = line.strip_prefix("| `")?.split('|').map(str::trim).collect();
        let [code, means, _, _, fix, ..] = cells[..] else { return None };
        let code = code.trim_end_matches('`');
        let kind = ErrorKind::ALL.iter().find(|kind| kind.code() == code)?;
        Some(Known {
            message: kind.code(),
            from: "kvlane",
            means,
            causes: Cow::Borrowed(&[]),
            fixes: Cow::Owned(vec![fix]),
            shown_by: "",
            needles: &[],
        })
    })
}

/// Whether a line says that it is of a kind: as a whole, at its start, or quoted as in JSON.
fn is_of_kind(text: &str, code: &str) -> bool {
    let line = text.split_once("kvlane: ").map_or(text, |(_, line)| line);
    line == code
        || line.strip_prefix(code).is_some_and(|rest| rest.starts_with(':'))
        || text.contains(&format!("\"{code}\""))
}

/// In lower case, on one line, at a bounded length.
fn plain(text: &str) -> String {
    let mut end = text.len().min(TEXT_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_lowercase().split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Whether a needle is in a text as whole words: `status 5` is not in `status 50`.
fn has(text: &str, needle: &str) -> bool {
    let joins = |a: Option<char>, b: Option<char>| {
        a.is_some_and(char::is_alphanumeric) && b.is_some_and(char::is_alphanumeric)
    };
    text.match_indices(needle).any(|(at, _)| {
        let (before, after) = (&text[..at], &text[at + needle.len()..]);
        !joins(before.chars().next_back(), needle.chars().next())
            && !joins(needle.chars().next_back(), after.chars().next())
    })
}

/// Words that tell messages apart.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| word.len() >= 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<&'static str> {
        find(text).iter().map(|known| known.message).collect()
    }

    #[test]
    fn each_entry_is_whole_and_finds_itself() {
        for known in all() {
            assert!(!known.means.is_empty() && !known.fixes.is_empty(), "{}", known.message);
            assert!(found(known.message).contains(&known.message), "{}", known.message);
            if known.from != "kvlane" {
                assert!(!known.causes.is_empty(), "{}", known.message);
                for all in known.needles {
                    assert!(all.iter().all(|needle| plain(needle) == *needle), "{all:?}");
                    assert!(
                        all.iter().any(|needle| needle.len() >= 6),
                        "{all:?} is not distinctive"
                    );
                }
            }
        }
        let own = all().iter().filter(|known| known.from == "kvlane").count();
        assert_eq!(own, ErrorKind::ALL.len());
    }

    #[test]
    fn whole_words_match_in_any_case_and_across_lines() {
        assert!(has("status 5", "status 5") && has("(status 5)", "status 5"));
        assert!(!has("status 50", "status 5") && !has("xstatus 5", "status 5"));
        assert!(has("unknown device 3", "unknown device ") && has("é5é status 5", "status 5"));
        let text = "E gpunetio_backend.cpp:1010] Can't REGISTER memory\n for unknown device 3";
        assert_eq!(found(text).len(), 1);
    }

    #[test]
    fn several_are_all_found_and_none_has_neighbours() {
        let text = "Can't register memory for unknown device 3; failed to extract sockaddr_in";
        assert_eq!(found(text).len(), 2);
        assert_eq!(
            found("kvlane: not_found: there is no such GPU (asked=3, known=none)"),
            ["not_found"]
        );
        assert_eq!(found("\"busy\": {\"count\": 1}"), ["busy"]);
        assert!(found("the memory is fine, io too").is_empty());
        assert!(found("").is_empty() && near("").is_empty());
        assert!(near("the retry counter was exceeded").iter().any(|k| k.message.contains("retry")));
        assert!(near("xyzzy plugh").is_empty());
    }
}
