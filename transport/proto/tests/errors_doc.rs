//! `docs/errors.md` lists exactly the kinds of the code, in their order, with their retry and blame.

use kvlane_proto::ErrorKind;

const DOC: &str = include_str!("../../../docs/errors.md");

/// The table's rows below the heading, as cells.
fn rows(doc: &str) -> Vec<Vec<&str>> {
    doc.lines()
        .filter(|line| line.starts_with('|'))
        .skip(2)
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect()
}

/// What is wrong with the page; empty if nothing is.
fn complaints(doc: &str) -> Vec<String> {
    let mut out = Vec::new();
    let rows = rows(doc);
    let code = |row: &Vec<&str>| row[0].trim_matches('`').to_string();
    for row in &rows {
        let Some(kind) = ErrorKind::ALL.iter().find(|k| k.code() == code(row)) else {
            out.push(format!("{} is not a kind of the code", row[0]));
            continue;
        };
        let [_, meaning, retry, blame, action] = row[..] else {
            out.push(format!("{} has {} cells instead of 5", row[0], row.len()));
            continue;
        };
        if meaning.is_empty() || action.is_empty() {
            out.push(format!("{} lacks its meaning or what to do", row[0]));
        }
        if retry != format!("{:?}", kind.retry()) {
            out.push(format!("{}: retry is {retry}, in the code {:?}", row[0], kind.retry()));
        }
        if blame != format!("{:?}", kind.blame()) {
            out.push(format!("{}: blame is {blame}, in the code {:?}", row[0], kind.blame()));
        }
    }
    let listed: Vec<String> = rows.iter().map(code).collect();
    let wanted: Vec<&str> = ErrorKind::ALL.iter().map(|k| k.code()).collect();
    for code in &wanted {
        if !listed.iter().any(|c| c == code) {
            out.push(format!("`{code}` is missing"));
        }
    }
    if out.is_empty() && listed != wanted {
        out.push(format!("listed as {listed:?}, in the code as {wanted:?}"));
    }
    out
}

#[test]
fn the_page_agrees_with_the_code() {
    let complaints = complaints(DOC);
    assert!(complaints.is_empty(), "docs/errors.md:\n{}", complaints.join("\n"));
}

#[test]
fn a_page_that_disagrees_is_noticed() {
    let busy = DOC.lines().find(|l| l.starts_with("| `busy`")).unwrap();
    for (wrong, complaint) in [
        (DOC.replace(busy, ""), "`busy` is missing"),
        (DOC.replace("`busy`", "`bussy`"), "`bussy` is not a kind of the code"),
        (DOC.replace(busy, &busy.replace("SamePair", "Never")), "`busy`: retry is Never"),
        (DOC.replace(busy, &busy.replace("Decode", "Link")), "`busy`: blame is Link"),
        (DOC.replace(busy, &format!("{busy}\n{busy}")), "listed as"),
        (DOC.replace(busy, "| `busy` |"), "`busy` has 1 cells"),
    ] {
        let found = complaints(&wrong).join("\n");
        assert!(found.contains(complaint), "{complaint}: {found}");
    }
}

#[test]
fn codes_are_distinct() {
    let codes: std::collections::HashSet<_> = ErrorKind::ALL.iter().map(|k| k.code()).collect();
    assert_eq!(codes.len(), ErrorKind::ALL.len());
}
