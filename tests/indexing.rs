//! External input is never indexed: a release build aborts on panic, so one index out of bounds ends every stream. The
//! lint `clippy::indexing_slicing` enforces this in whole crates, and this test checks that the lint is on in them.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// The shipped crates, each with its exempt modules.
const CRATES: [(&str, &[&str]); 7] = [
    ("src", &["pub mod sim;"]),
    ("net/src", &[]),
    ("config/src", &[]),
    ("platform/src", &[]),
    ("controllers/src", &[]),
    ("gateway/src", &[]),
    ("stub/src", &[]),
];
const LINT: &str = "clippy::indexing_slicing";

#[test]
fn no_crate_that_ships_indexes_but_where_a_function_says_why_it_may() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (folder, exempt) in CRATES {
        let whole = fs::read_to_string(root.join(folder).join("lib.rs")).unwrap();
        assert!(whole.lines().any(|line| line == format!("#![warn({LINT})]")), "{folder}: {LINT} is off");
        for file in sources(&root.join(folder)) {
            let text = fs::read_to_string(&file).unwrap();
            for (at, _) in text.match_indices(LINT) {
                let (before, after) = text.split_at(at);
                let (_, kind) = before.rsplit_once('#').unwrap();
                let (rest, item) = after.split_once(")]").unwrap();
                let item = item.trim_start().lines().next().unwrap_or_default();
                let shown = format!("{}: #{}{rest})] {item}", file.display(), kind.trim());
                if kind.starts_with("![warn(") || exempt.contains(&item) {
                    continue;
                }
                assert!(kind.starts_with("[expect(") && rest.contains("reason = "), "{shown}");
                assert!(
                    !item.contains("mod ") && !item.starts_with("impl"),
                    "{shown}: of one function alone"
                );
            }
        }
    }
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder of the sources") {
        let path = entry.expect("what is in it").path();
        if path.is_dir() {
            files.extend(sources(&path));
        } else if path.extension().is_some_and(|end| end == "rs") {
            files.push(path);
        }
    }
    files
}
