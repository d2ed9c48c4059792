//! The decide half stays pure: no clock, no I/O, no runtime, no randomness.
//!
//! A simulated week takes a second, and an incident can be replayed from its journal, only as long as a decision
//! depends on nothing but events and moments. One stray `Instant::now()` ends that silently; hence this test. It reads
//! the source text without comments and literals and looks at every path in it, also inside nested imports. Tests are
//! exempt: they may measure and spawn.

use std::{
    fs,
    iter::Peekable,
    path::{Path, PathBuf},
    str::Chars,
};

/// Files and folders under `src/` that decide. Those not there yet are watched from the day they are.
const DECIDE: [&str; 11] = [
    "units",
    "model",
    "fault",
    "engine",
    "fleet",
    "sim",
    "journal",
    "pairing",
    "slots",
    "saturation",
    "warmup",
];

/// What acts, by the beginning of its path.
const FORBIDDEN: [&[&str]; 34] = [
    &["tokio"],
    &["tokio_util"],
    &["futures_util"],
    &["hyper"],
    &["hyper_util"],
    &["http"],
    &["http_body"],
    &["http_body_util"],
    &["axum"],
    &["kube"],
    &["k8s_openapi"],
    &["nix"],
    &["nvml_wrapper"],
    &["rustix"],
    &["socket2"],
    &["rand"],
    &["getrandom"],
    &["std", "fs"],
    &["std", "env"],
    &["std", "process"],
    &["std", "thread"],
    &["std", "os"],
    // The carrying half, from inside the crate.
    &["crate", "adapter"],
    &["crate", "aside"],
    &["crate", "caller"],
    &["crate", "lease"],
    &["crate", "nvml"],
    &["crate", "openai"],
    &["crate", "origin"],
    &["crate", "port"],
    &["crate", "process"],
    &["crate", "relay"],
    &["crate", "tcp"],
    &["crate", "wire"],
];

/// Clocks and seeds, by whatever path they come.
const ANYWHERE: [&str; 3] = ["Instant", "SystemTime", "RandomState"];

/// Of `std::net` only addresses are data.
const ADDRESSES: [&str; 7] =
    ["AddrParseError", "IpAddr", "Ipv4Addr", "Ipv6Addr", "SocketAddr", "SocketAddrV4", "SocketAddrV6"];

#[test]
fn what_decides_names_nothing_that_acts() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    for name in DECIDE {
        collect(&src.join(name).with_extension("rs"), &mut files);
        collect(&src.join(name), &mut files);
    }
    assert!(files.len() >= 6, "the decide half was not found: {files:?}");
    let mut wrong = Vec::new();
    for file in files {
        for (line, path) in violations(&fs::read_to_string(&file).unwrap()) {
            wrong.push(format!("{}:{line}: {path}", file.display()));
        }
    }
    assert!(wrong.is_empty(), "the decide half must stay pure:\n{}", wrong.join("\n"));
}

#[test]
fn a_planted_violation_is_found_in_every_disguise() {
    for (source, found) in [
        ("use tokio::time::sleep;", "tokio::time::sleep"),
        ("use tokio as t;", "tokio"),
        ("use {serde::Serialize, tokio::sync};", "tokio::sync"),
        ("let now = std::time::Instant::now();", "std::time::Instant::now"),
        ("use std::{fmt, time::{Duration, Instant as Now}};", "std::time::Instant"),
        ("use ::std::fs;", "std::fs"),
        ("use std::{collections::BTreeMap, fs::{self, File}};", "std::fs::self"),
        ("use std::net::{SocketAddr, TcpStream};", "std::net::TcpStream"),
        ("use std::net;", "std::net"),
        ("use std::*;", "std::*"),
        ("fn f() { rand::random::<u8>() }", "rand::random"),
        ("fn f(s: &hyper::Request<()>) {}", "hyper::Request"),
        ("use crate::{model::ModelName, relay::Pool};", "crate::relay::Pool"),
        ("tokio::select! {}", "tokio::select"),
        ("let c = '\"'; use http::Uri; // \"", "http::Uri"),
        ("fn f<'a>(x: &'a str) { kube::Client }", "kube::Client"),
    ] {
        let paths: Vec<String> = violations(source).into_iter().map(|(_, path)| path).collect();
        assert!(paths.contains(&found.to_owned()), "{source}: {paths:?}");
    }
    let third_line = "use std::fmt;\n/* a\n*/ use tokio::spawn;";
    assert_eq!(violations(third_line), [(3, "tokio::spawn".to_owned())]);
}

#[test]
fn words_in_comments_texts_and_tests_are_only_words() {
    for source in [
        "//! no tokio::time here\nfn f() {}",
        "/* /* std::fs */ rand::random */ fn f() {}",
        "const X: &str = \"tokio::spawn \\\" hyper::Body\";",
        "const X: &str = r#\"tokio::spawn \" hyper::Body\"#;",
        "use std::net::{IpAddr, SocketAddr};",
        "use crate::units::Tick; fn http(x: &X) { x.rand; }",
        "fn f() {}\n#[cfg(test)]\nmod tests {\n    use std::{env, thread};\n}",
    ] {
        assert_eq!(violations(source), [], "{source}");
    }
}

fn collect(path: &Path, files: &mut Vec<PathBuf>) {
    let is_test = path.file_stem().is_some_and(|stem| stem == "tests");
    if is_test {
        return;
    }
    if path.is_file() {
        files.push(path.to_owned());
    } else if path.is_dir() {
        for entry in fs::read_dir(path).expect("a readable folder") {
            collect(&entry.expect("a readable entry").path(), files);
        }
    }
}

/// Line and path of everything forbidden that a source text names.
fn violations(source: &str) -> Vec<(usize, String)> {
    // Tests stand last in a file.
    let source = source.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    paths(&tokens(source))
        .into_iter()
        .filter(|(_, path)| is_forbidden(path))
        .map(|(line, path)| (line, path.join("::")))
        .collect()
}

fn is_forbidden(path: &[String]) -> bool {
    let begins = |parts: &[&str]| path.len() >= parts.len() && path.iter().zip(parts).all(|(a, b)| a == b);
    let beyond_addresses =
        begins(&["std", "net"]) && path.get(2).is_none_or(|item| !ADDRESSES.contains(&item.as_str()));
    FORBIDDEN.iter().any(|parts| begins(parts))
        || path.iter().any(|word| ANYWHERE.contains(&word.as_str()))
        || beyond_addresses
        || begins(&["std", "*"])
}

#[derive(Debug, PartialEq)]
struct Token {
    line: usize,
    text: String,
}

/// Every path, imports expanded. A single word is one only where it is imported: elsewhere it is a name of the file's own.
fn paths(tokens: &[Token]) -> Vec<(usize, Vec<String>)> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let imported = at > 0 && tokens[at - 1].text == "use";
        if tokens[at].text == "use" {
            at += 1;
        } else if is_word(&tokens[at].text) || imported {
            let first = found.len();
            at = tree(tokens, at, &[], &mut found).max(at + 1);
            if !imported {
                let several = found.split_off(first).into_iter().filter(|(_, path)| path.len() > 1);
                found.extend(several.collect::<Vec<_>>());
            }
        } else {
            at += 1;
        }
    }
    found
}

/// Reads one path, or one tree of an import, and returns the place behind it.
fn tree(tokens: &[Token], mut at: usize, prefix: &[String], found: &mut Vec<(usize, Vec<String>)>) -> usize {
    let mut path = prefix.to_vec();
    let line = tokens.get(at).map_or(0, |token| token.line);
    let text = |at: usize| tokens.get(at).map_or("", |token| token.text.as_str());
    if text(at) == "::" {
        at += 1;
    }
    loop {
        match text(at) {
            "{" => {
                at += 1;
                while !matches!(text(at), "}" | "") {
                    at = tree(tokens, at, &path, found).max(at + 1);
                    while !matches!(text(at), "," | "}" | "") {
                        at += 1;
                    }
                    at += usize::from(text(at) == ",");
                }
                return at + 1;
            }
            word if is_word(word) || word == "*" => {
                path.push(word.to_owned());
                at += 1;
            }
            _ => break,
        }
        let goes_on = text(at) == "::" && (is_word(text(at + 1)) || matches!(text(at + 1), "{" | "*"));
        if !goes_on {
            break;
        }
        at += 1;
    }
    found.push((line, path));
    at
}

fn is_word(text: &str) -> bool {
    text.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Words, `::` and single signs; comments and literals are left out.
fn tokens(source: &str) -> Vec<Token> {
    let mut chars = source.chars().peekable();
    let (mut tokens, mut line) = (Vec::new(), 1);
    while let Some(c) = chars.next() {
        let began = line;
        let text = match c {
            '\n' => {
                line += 1;
                continue;
            }
            '/' if chars.peek() == Some(&'/') => {
                while chars.next_if(|c| *c != '\n').is_some() {}
                continue;
            }
            '/' if chars.peek() == Some(&'*') => {
                line += skip_comment(&mut chars);
                continue;
            }
            '"' => {
                line += skip_text(&mut chars);
                continue;
            }
            'r' if matches!(chars.peek(), Some('"' | '#')) => {
                line += skip_raw(&mut chars);
                continue;
            }
            '\'' => {
                skip_char_or_lifetime(&mut chars);
                continue;
            }
            ':' if chars.next_if_eq(&':').is_some() => "::".to_owned(),
            c if c.is_alphanumeric() || c == '_' => {
                let mut word = String::from(c);
                while let Some(c) = chars.next_if(|c| c.is_alphanumeric() || *c == '_') {
                    word.push(c);
                }
                word
            }
            c if c.is_whitespace() => continue,
            c => c.to_string(),
        };
        tokens.push(Token { line: began, text });
    }
    tokens
}

/// Behind `/`; comments nest. Returns the lines passed.
fn skip_comment(chars: &mut Peekable<Chars<'_>>) -> usize {
    let (mut depth, mut lines, mut before) = (0, 0, '/');
    for c in chars.by_ref() {
        lines += usize::from(c == '\n');
        match (before, c) {
            ('/', '*') => depth += 1,
            ('*', '/') => depth -= 1,
            _ => {
                before = c;
                continue;
            }
        }
        // Both signs are used up: `/*/` opens and does not close.
        before = ' ';
        if depth == 0 {
            break;
        }
    }
    lines
}

fn skip_text(chars: &mut Peekable<Chars<'_>>) -> usize {
    let mut lines = 0;
    while let Some(c) = chars.next() {
        lines += usize::from(c == '\n');
        match c {
            '"' => break,
            '\\' => lines += usize::from(chars.next() == Some('\n')),
            _ => {}
        }
    }
    lines
}

fn skip_raw(chars: &mut Peekable<Chars<'_>>) -> usize {
    let (mut hashes, mut lines) = (0, 0);
    while chars.next_if_eq(&'#').is_some() {
        hashes += 1;
    }
    if chars.next_if_eq(&'"').is_none() {
        return 0;
    }
    while let Some(c) = chars.next() {
        lines += usize::from(c == '\n');
        if c == '"' && (0..hashes).all(|_| chars.next_if_eq(&'#').is_some()) {
            break;
        }
    }
    lines
}

/// `'x'` and `'\n'` are literals; `'x` followed by anything else is a lifetime.
fn skip_char_or_lifetime(chars: &mut Peekable<Chars<'_>>) {
    if chars.next() == Some('\\') {
        chars.next();
        while chars.next_if(|c| *c != '\'').is_some() {}
        chars.next();
    } else if chars.next_if_eq(&'\'').is_none() {
        while chars.next_if(|c| c.is_alphanumeric() || *c == '_').is_some() {}
    }
}
