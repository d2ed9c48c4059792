//! Checks docs/configuration.md against the code.

use std::collections::BTreeSet;

use super::{check, errors, read};

const DOCUMENT: &str = include_str!("../../../docs/configuration.md");

#[test]
fn every_example_of_the_document_is_valid() {
    let blocks: Vec<_> =
        DOCUMENT.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert!(blocks.len() >= 5);
    for block in blocks {
        let config = read(block).unwrap_or_else(|errors| panic!("{errors}\n{block}"));
        assert_eq!(check(&config).errors, []);
    }
}

/// Finds every section's keys by giving it an unknown key.
#[test]
fn the_document_has_every_key_and_no_other() {
    let mut known = BTreeSet::new();
    for (path, text) in [
        ("", "zzzzzzzzzzzz: 1"),
        ("listen.", "listen: {zzzzzzzzzzzz: 1}"),
        ("listen.proxies.", "listen: {proxies: {zzzzzzzzzzzz: 1}}"),
        ("accelerators[].", "accelerators: [{zzzzzzzzzzzz: 1}]"),
        ("host.", "host: {zzzzzzzzzzzz: 1}"),
        ("logs.", "logs: {zzzzzzzzzzzz: 1}"),
        ("telemetry.", "telemetry: {zzzzzzzzzzzz: 1}"),
        ("shutdown.", "shutdown: {zzzzzzzzzzzz: 1}"),
        ("tls.", "tls: {zzzzzzzzzzzz: 1}"),
        ("admin.", "admin: {zzzzzzzzzzzz: 1}"),
        ("queue.", "queue: {zzzzzzzzzzzz: 1}"),
        ("turns.", "turns: {zzzzzzzzzzzz: 1}"),
        ("turns.drain.", "turns: {drain: {zzzzzzzzzzzz: 1}}"),
        ("stream.", "stream: {zzzzzzzzzzzz: 1}"),
        ("routing.", "routing: {zzzzzzzzzzzz: 1}"),
        ("timeouts.", "timeouts: {zzzzzzzzzzzz: 1}"),
        ("timeouts.health.", "timeouts: {health: {zzzzzzzzzzzz: 1}}"),
        ("limits.", "limits: {zzzzzzzzzzzz: 1}"),
        ("api.", "api: {zzzzzzzzzzzz: 1}"),
        ("api.cors.", "api: {cors: {zzzzzzzzzzzz: 1}}"),
        ("keys[].", "keys: [{zzzzzzzzzzzz: 1}]"),
        ("kubernetes.", "platform: kubernetes\nkubernetes: {zzzzzzzzzzzz: 1}"),
        ("kubernetes.prometheus.", "platform: kubernetes\nkubernetes: {prometheus: {zzzzzzzzzzzz: 1}}"),
        ("kubernetes.saturation.", "platform: kubernetes\nkubernetes: {saturation: {zzzzzzzzzzzz: 1}}"),
        ("kubernetes.warmup.", "platform: kubernetes\nkubernetes: {warmup: {zzzzzzzzzzzz: 1}}"),
        ("kubernetes.dualPods.", "platform: kubernetes\nkubernetes: {dualPods: {zzzzzzzzzzzz: 1}}"),
        ("kubernetes.slots.", "platform: kubernetes\nkubernetes: {slots: {zzzzzzzzzzzz: 1}}"),
        ("models[].", "models: [{zzzzzzzzzzzz: 1}]"),
        ("models[].engine.", "models: [{engine: {zzzzzzzzzzzz: 1}}]"),
        ("models[].memory.", "models: [{memory: {zzzzzzzzzzzz: 1}}]"),
        ("models[].queue.", "models: [{queue: {zzzzzzzzzzzz: 1}}]"),
        ("models[].idle.", "models: [{idle: {zzzzzzzzzzzz: 1}}]"),
        ("saturation.", "saturation: {zzzzzzzzzzzz: 1}"),
        ("models[].saturation.", "models: [{saturation: {zzzzzzzzzzzz: 1}}]"),
    ] {
        let errors = errors(text);
        let (_, keys) = errors.split_once("(known keys: ").unwrap();
        let (keys, _) = keys.split_once(')').unwrap();
        known.extend(keys.split(", ").map(|key| format!("{path}{key}")));
    }
    // A section is documented by its keys, unless it can be something other than a mapping.
    let sections = known.clone();
    known.retain(|key| {
        let within = |end: &str| sections.iter().any(|other| other.starts_with(&format!("{key}{end}")));
        !within(".")
    });
    let documented: BTreeSet<_> = DOCUMENT
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split('`').next())
        .filter(|key| !key.starts_with("${"))
        .map(str::to_owned)
        .collect();
    assert_eq!(known, documented);
}
