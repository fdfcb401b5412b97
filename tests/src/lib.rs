//! The tests that need more than one crate: `sim`, the real machines in a seeded world of faults, and
//! `cluster`, real processes. `fuzz` beside them is a package of its own.

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    fn sources(dir: &Path, into: &mut String) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() && name != "target" && !name.starts_with('.') {
                sources(&path, into);
            } else if name.ends_with(".rs") {
                into.push_str(&std::fs::read_to_string(&path).unwrap());
            }
        }
    }

    /// The tests that a name such as `module::over_{tcp,shm}` stands for.
    fn each(name: &str) -> Vec<String> {
        let name = name.rsplit("::").next().unwrap_or(name);
        match name.split_once('{').and_then(|(head, rest)| Some((head, rest.strip_suffix('}')?))) {
            Some((head, list)) => list.split(',').map(|end| format!("{head}{end}")).collect(),
            None => vec![name.into()],
        }
    }

    /// A promise whose test was renamed or removed is a promise that nothing shows.
    #[test]
    fn every_test_that_the_guarantees_name_is_there() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let page = std::fs::read_to_string(root.join("docs/guarantees.md")).unwrap();
        let mut code = String::new();
        sources(root, &mut code);
        let named: BTreeSet<&str> = page
            .split('`')
            .skip(1)
            .step_by(2)
            .filter(|w| w.bytes().filter(|&b| b == b'_').count() >= 3)
            .collect();
        assert!(named.len() > 15, "the page names its tests: {named:?}");
        for test in named.into_iter().flat_map(each) {
            let there = ["(", "<"].iter().any(|next| code.contains(&format!("fn {test}{next}")));
            assert!(there, "no test is called {test}");
        }
    }
}
