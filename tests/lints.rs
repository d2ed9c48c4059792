//! Rules of the sources. Two lints hold rules of the architecture, and tests check that they are on. Another test holds
//! the rule that no two types share a name.
//!
//! External input is never indexed: a release build aborts on panic, so one index out of bounds ends every stream. The
//! lint is `clippy::indexing_slicing`.
//!
//! Decisions are pure: an incident can be replayed from its journal only while a decision depends on events and times
//! alone. The manifest of `rouse` names no crate that does I/O, and `clippy::disallowed_types` rejects the types of the
//! standard library that do (`clippy.toml`). The functions, which that lint does not see, are in a few modules.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// The shipped crates, each with its exempt modules.
const CRATES: [(&str, &[&str]); 8] = [
    ("src", &["pub mod sim;"]),
    ("net/src", &[]),
    ("config/src", &[]),
    ("platform/src", &[]),
    ("kubelet/src", &[]),
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

/// A name stands for one type in all of the workspace, so a search for it finds one definition.
///
/// `Error` is excepted: each module that fails has its own. So is generated code, whose names are those of a protocol.
#[test]
fn no_two_types_of_the_workspace_share_a_name() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifest = fs::read_to_string(root.join("Cargo.toml")).unwrap();
    let members = manifest.split_once("\nmembers = [").unwrap().1.split(']').next().unwrap();
    let members = members.split(',').map(|member| member.trim().trim_matches('"'));
    // A member may lie in the folder of another one. Each file counts once.
    let folders = ["benches", "examples", "src", "tests"].into_iter().chain(members);
    let written = |file: &PathBuf| !file.iter().any(|part| part == "generated");
    let files: BTreeSet<PathBuf> =
        folders.flat_map(|folder| sources(&root.join(folder))).filter(written).collect();
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for file in &files {
        let path = file.strip_prefix(root).unwrap().display();
        for (line, name) in types(&fs::read_to_string(file).unwrap()) {
            places.entry(name).or_default().push(format!("{path}:{line}"));
        }
    }
    places.remove("Error");
    assert!(places.len() > 1_000, "the types were not found: {} of {} files", places.len(), files.len());
    places.retain(|_, places| places.len() > 1);
    assert!(places.is_empty(), "each of these names stands for several types: {places:#?}");
}

#[test]
fn types_are_found_and_associated_types_are_not() {
    let source = [
        "pub(crate) struct Plain;",
        "pub(in crate::fleet) enum Choice<T> {",
        "impl Iterator for Plain {",
        "    type Item = u32;",
        "    // struct Comment",
        "    fn next(&mut self) {",
        "        struct Local(u32);",
        "mod tests {",
        "    type Alias = Vec<u32>;",
        "pub trait Named {",
        "    type Output;",
    ];
    let source = source.join("\n");
    let names: Vec<(usize, String)> = types(&source).collect();
    let names: Vec<(usize, &str)> = names.iter().map(|(line, name)| (*line, name.as_str())).collect();
    assert_eq!(names, [(1, "Plain"), (2, "Choice"), (7, "Local"), (9, "Alias"), (10, "Named")]);
}

/// The type definitions of a source: the number of the line, and the name. Associated types are not among them.
fn types(source: &str) -> impl Iterator<Item = (usize, String)> {
    let mut block = "";
    source.lines().enumerate().filter_map(move |(index, line)| {
        if line.starts_with(|first: char| !first.is_whitespace()) {
            block = line;
        }
        let (kind, rest) = item(line.trim_start()).split_once(' ')?;
        let inner_type = kind == "type" && block != line && !item(block).starts_with("mod ");
        if inner_type || !["enum", "struct", "trait", "type", "union"].contains(&kind) {
            return None;
        }
        let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()?;
        Some((index + 1, name.to_owned()))
    })
}

/// The line without its visibility.
fn item(line: &str) -> &str {
    let Some(rest) = line.strip_prefix("pub") else { return line };
    match rest.strip_prefix('(') {
        Some(scope) => scope.split_once(") ").map_or(line, |(_, item)| item),
        None => rest.trim_start(),
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
