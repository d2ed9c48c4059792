//! The decide half stays pure: no clock, no I/O, no runtime, no randomness.
//!
//! A simulated week takes a second, and an incident can be replayed from its journal, only as long as a decision
//! depends on nothing but events and moments. One stray `Instant::now()` ends that silently; hence this test. It reads
//! source text, comments and literals removed, so that no feature or re-export can hide an import from it.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Files and folders under `src/` that decide; those not there yet are watched from the day they are.
const DECIDE: [&str; 11] = [
    "units",
    "model",
    "fault",
    "engine",
    "fleet",
    "sim",
    "pairing",
    "slots",
    "saturation",
    "warmup",
    "journal",
];

/// What must not be named, and what it would bring in.
const FORBIDDEN: [(&str, &str); 19] = [
    ("tokio", "a runtime"),
    ("hyper", "HTTP"),
    ("hyper_util", "HTTP"),
    ("http", "HTTP"),
    ("http_body", "HTTP"),
    ("http_body_util", "HTTP"),
    ("kube", "a cluster"),
    ("k8s_openapi", "a cluster"),
    ("rand", "randomness"),
    ("getrandom", "randomness"),
    ("RandomState", "randomness"),
    ("Instant", "a clock"),
    ("SystemTime", "a clock"),
    ("std::fs", "I/O"),
    ("std::io", "I/O"),
    ("std::env", "I/O"),
    ("std::process", "I/O"),
    ("std::thread", "threads"),
    // The carrying half, from the inside.
    ("crate::{lease,openai,relay}", "the carrying half"),
];

/// Addresses are data.
const NET: [&str; 7] = [
    "SocketAddr",
    "SocketAddrV4",
    "SocketAddrV6",
    "IpAddr",
    "Ipv4Addr",
    "Ipv6Addr",
    "AddrParseError",
];

#[test]
fn what_decides_imports_nothing_that_acts() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    for name in DECIDE {
        collect(&src.join(name).with_extension("rs"), &mut files);
        collect(&src.join(name), &mut files);
    }
    assert!(files.len() >= 6, "the decide half was not found: {files:?}");
    let mut wrong = Vec::new();
    for file in files {
        for (line, what) in violations(&fs::read_to_string(&file).unwrap()) {
            wrong.push(format!("{}:{line}: {what}", file.display()));
        }
    }
    assert!(
        wrong.is_empty(),
        "the decide half must stay pure:\n{}",
        wrong.join("\n")
    );
}

fn collect(path: &Path, files: &mut Vec<PathBuf>) {
    if path.is_file() {
        files.push(path.to_owned());
    } else if path.is_dir() {
        for entry in fs::read_dir(path).unwrap() {
            collect(&entry.unwrap().path(), files);
        }
    }
}

/// Line and words for every forbidden name in a source text.
fn violations(source: &str) -> Vec<(usize, String)> {
    let words = words(source);
    let mut found = Vec::new();
    for (at, (line, _)) in words.iter().enumerate() {
        let path = path_from(&words, at);
        for (name, brings) in FORBIDDEN {
            if is_named(name, &path, at, &words) {
                found.push((*line, format!("'{name}' brings in {brings}")));
            }
        }
        if starts_with(&path, &["std", "net"]) && path.get(2).is_none_or(|item| !NET.contains(&item.as_str()))
        {
            found.push((*line, "of 'std::net' only addresses are data".to_owned()));
        }
    }
    found
}

/// A single word is forbidden wherever it is a path of its own or its root; longer ones from their first word.
fn is_named(name: &str, path: &[String], at: usize, words: &[(usize, String)]) -> bool {
    if let Some(list) = name.strip_prefix("crate::{") {
        let halves: Vec<&str> = list.trim_end_matches('}').split(',').collect();
        return starts_with(path, &["crate"])
            && path.get(1).is_some_and(|half| halves.contains(&half.as_str()));
    }
    if name.contains("::") {
        let parts: Vec<&str> = name.split("::").collect();
        return starts_with(path, &parts);
    }
    let here = words.get(at).is_some_and(|(_, word)| word == name);
    let is_type = name.starts_with(char::is_uppercase);
    let is_root = words
        .get(at + 1)
        .is_some_and(|(_, next)| next == "::" || next == ";")
        && (at == 0
            || words
                .get(at - 1)
                .is_some_and(|(_, before)| before != "::" && before != "."));
    here && (is_type || is_root)
}

fn starts_with(path: &[String], parts: &[&str]) -> bool {
    path.len() >= parts.len() && path.iter().zip(parts).all(|(word, part)| word == part)
}
