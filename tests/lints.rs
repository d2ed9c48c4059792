//! Two lints hold rules of the architecture, and these tests check that they are on.
//!
//! External input is never indexed: a release build aborts on panic, so one index out of bounds ends every stream. The
//! lint is `clippy::indexing_slicing`.
//!
//! Decisions are pure: an incident can be replayed from its journal only while a decision depends on events and times
//! alone. The manifest of `rouse` names no crate that does I/O, and `clippy::disallowed_types` rejects the types of the
//! standard library that do (`clippy.toml`). The functions, which that lint does not see, are in a few modules.

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

/// Modules of the standard library whose functions have side effects.
const IMPURE: [&str; 5] = ["env", "fs", "os", "process", "thread"];

#[test]
fn what_decides_uses_no_module_with_side_effects() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let whole = fs::read_to_string(folder.join("lib.rs")).unwrap();
    assert!(whole.contains("\n#![warn(clippy::disallowed_types)]\n"), "the lint is off");
    let files = sources(&folder);
    assert!(files.len() > 100, "the sources were not found: {files:?}");
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        assert_eq!(impure(&text), None, "{}", file.display());
    }
}

#[test]
fn an_impure_use_is_found() {
    for source in [
        "use std::fs;",
        "use ::std::{collections::BTreeMap, fs::{self, File}};",
        "let name = std::env::var(\"HOME\");",
        "std::thread::spawn(run);",
    ] {
        assert!(impure(source).is_some(), "{source}");
    }
    for source in ["// std::fs", "use std::{fmt, sync::Arc};", "use std::net::SocketAddr; fn process() {}"] {
        assert_eq!(impure(source), None, "{source}");
    }
}

/// The first use of an impure module. Imports of `std` end with a semicolon; elsewhere the module follows `std::`.
fn impure(source: &str) -> Option<String> {
    let lines = source.lines().filter(|line| !line.trim_start().starts_with("//"));
    let code = lines.collect::<Vec<_>>().join("\n");
    code.split("std::").skip(1).find_map(|after| {
        let path = if after.starts_with('{') { after.split(';').next()? } else { after.split(':').next()? };
        let mut names = path.split(|c: char| !c.is_alphanumeric() && c != '_');
        names.find(|name| IMPURE.contains(name)).map(str::to_owned)
    })
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
