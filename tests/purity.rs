//! The decision code uses no part of the standard library that has side effects. `Cargo.toml` excludes all other crates
//! that could have any.
//!
//! A simulated week takes a second, and an incident can be replayed from its journal, only while a decision depends on
//! events and times alone. One stray `Instant::now()` would silently break that.

use std::{
    fs,
    path::{Path, PathBuf},
};

use regex::Regex;

/// Comments and literals may name anything.
const IGNORED: &str = r##"(?s)//[^\n]*|/\*.*?\*/|r#".*?"#|"(?:\\.|[^"\\])*""##;
/// Only the addresses of `std::net` are plain data.
const FORBIDDEN: &str = r"\b(?:Instant|SystemTime|RandomState|TcpStream|TcpListener|UdpSocket|UnixStream|UnixListener)\b|\bstd::(?:fs|env|process|thread|os)\b|\bstd::\{[^;]*\b(?:fs|env|process|thread|os)\b[^;]*\};";

fn violations(source: &str) -> Vec<String> {
    // Tests come last in a file, and may measure and spawn.
    let shipped = source.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let code = Regex::new(IGNORED).expect("a pattern").replace_all(shipped, "\"\"").into_owned();
    Regex::new(FORBIDDEN)
        .expect("a pattern")
        .find_iter(&code)
        .map(|found| found.as_str().to_owned())
        .collect()
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).expect("a readable folder") {
        let path = entry.expect("a readable entry").path();
        if path.is_dir() && !path.ends_with("tests") {
            files.extend(sources(&path));
        } else if path.extension().is_some_and(|end| end == "rs") && !path.ends_with("tests.rs") {
            files.push(path);
        }
    }
    files
}

#[test]
fn what_decides_reads_no_clock_file_or_socket() {
    let files = sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    assert!(files.len() > 50, "the sources were not found: {files:?}");
    let found: Vec<String> = files
        .iter()
        .flat_map(|file| {
            violations(&fs::read_to_string(file).unwrap())
                .into_iter()
                .map(|it| format!("{}: {it}", file.display()))
        })
        .collect();
    assert!(found.is_empty(), "the decisions must stay pure:\n{}", found.join("\n"));
}

#[test]
fn a_planted_violation_is_found() {
    for source in [
        "let now = std::time::Instant::now();",
        "use std::{fmt, time::{Duration, Instant as Now}};",
        "use ::std::fs;",
        "use std::{collections::BTreeMap, fs::{self, File}};",
        "use std::net::{SocketAddr, TcpStream};",
        "let c = \"//\"; std::thread::spawn(run); // \"",
    ] {
        assert_ne!(violations(source), [""; 0], "{source}");
    }
    for source in [
        "//! no std::fs here",
        "const X: &str = \"std::thread::spawn \\\" SystemTime\";",
        "use std::net::{IpAddr, SocketAddr};",
        "fn f() {}\n#[cfg(test)]\nmod tests {\n    use std::{env, thread};\n}",
    ] {
        assert_eq!(violations(source), [""; 0], "{source}");
    }
}
