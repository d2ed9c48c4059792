//! Tests of who may use the API.

use rouse::model::ModelName;

use super::{ModelAccess, check, errors, read};

const HASH: &str = "00000000000000000000000000000000000000000000000000000000000000aF";

fn models(patterns: &str) -> ModelAccess {
    let text = format!(
        "keys: [{{name: k, sha256: \"{HASH}\", models: {patterns}}}]\nmodels:\n\
         {}{}",
        model("org/a", "[first]"),
        model("org/b", "[second, other]")
    );
    read(&text).unwrap().keys[0].models.clone()
}

fn model(name: &str, aliases: &str) -> String {
    format!(
        "  - name: {name}\n    aliases: {aliases}\n    engine: {{kind: custom, task: none, command: [x, \"${{HOST}}:${{PORT}}\"]}}\n    \
         memory: {{awake: 1Gi}}\n"
    )
}

fn some(names: &[&str]) -> ModelAccess {
    ModelAccess::Only(names.iter().map(|name| ModelName::from(*name)).collect())
}

#[test]
fn a_key_has_defaults_that_limit_nothing() {
    let config = read(&format!("keys: [{{name: team, sha256: \"{HASH}\"}}]")).unwrap();
    let key = &config.keys[0];
    assert_eq!((key.name.as_ref(), key.hash[31], key.priority), ("team", 0xaf, 0));
    assert!(key.heartbeat);
    assert_eq!((key.limits.requests, key.limits.tokens, &key.models), (None, None, &ModelAccess::All));
    assert!(!config.keys_none);
    let full = format!(
        "keys:\n  - {{name: a, sha256: \"{HASH}\", models: [\"*\"], requestsPerMinute: 6, tokensPerMinute: 7, priority: -3, heartbeat: off}}"
    );
    let key = &read(&full).unwrap().keys[0];
    assert_eq!((key.limits.requests, key.limits.tokens, key.priority), (Some(6), Some(7), -3));
    assert!(!key.heartbeat);
}

#[test]
fn models_are_meant_by_name_alias_or_beginning() {
    assert_eq!(models("[\"*\"]"), ModelAccess::All);
    assert_eq!(models("[org/a]"), some(&["org/a"]));
    assert_eq!(models("[second, org/a]"), some(&["org/a", "org/b"]));
    assert_eq!(models("[\"org/*\"]"), some(&["org/a", "org/b"]));
    assert_eq!(models("[\"oth*\"]"), some(&["org/b"]));
    assert_eq!(models("[absent]"), some(&[]));
}

#[test]
fn every_mistake_in_a_key_is_told_with_its_place_and_without_the_key() {
    let text = format!(
        "keys:\n  - {{name: a, sha256: \"{HASH}\"}}\n  - {{name: a, sha256: \"{}\"}}\n  - {{name: \"\", sha256: secret}}\n  \
         - {{sha256: \"{}\", models: [], requestsPerMinute: 0}}\n  - {{name: d, models: [\"a*b\"], tokens: 5}}\n",
        HASH.to_lowercase(),
        "0".repeat(63),
    );
    insta::assert_snapshot!(errors(&text), @r###"
    rouse.yaml:3:12: keys[1].name: the name 'a' is already taken (line 2)
    rouse.yaml:3:23: keys[1].sha256: another key has the same hash (line 2)
    rouse.yaml:4:12: keys[2].name: a key's name must have 1 to 128 bytes and no control characters
    rouse.yaml:4:24: keys[2].sha256: expected a SHA-256 of 64 hexadecimal digits: run 'rouse-gateway key NAME' to create a key and its line
    rouse.yaml:5:5: keys[3]: 'name' is missing
    rouse.yaml:5:14: keys[3].sha256: expected a SHA-256 of 64 hexadecimal digits: run 'rouse-gateway key NAME' to create a key and its line
    rouse.yaml:5:89: keys[3].models: an empty list allows no model: remove 'models' to allow all models
    rouse.yaml:5:112: keys[3].requestsPerMinute: must be at least 1
    rouse.yaml:6:5: keys[4]: 'sha256' is missing
    rouse.yaml:6:24: keys[4].models[0]: expected a model's name, an alias, or a prefix followed by '*'
    rouse.yaml:6:32: keys[4]: unknown key 'tokens' (known keys: name, sha256, models, requestsPerMinute, tokensPerMinute, priority, heartbeat)
    "###);
    insta::assert_snapshot!(errors("keys: []"), @"rouse.yaml:1:7: keys: an empty list would reject every request: remove it, or set 'none', to allow requests without a key");
    insta::assert_snapshot!(errors("keys: rk-plain"), @"rouse.yaml:1:7: keys: expected 'none' or a list of keys, found a single value: run 'rouse-gateway key NAME' to create a key and its line, or add --stdin to create the line of an existing key");
    insta::assert_snapshot!(errors("keys: [{name: a, key: rk-plain}]"), @"rouse.yaml:1:23: keys[0].key: the file must not contain a key, only its sha256: run 'rouse-gateway key NAME' to create a key and its line, or add --stdin to create the line of an existing key");
    insta::assert_snapshot!(errors("keys: [{name: a, sha256: rk-plain}]"), @"rouse.yaml:1:26: keys[0].sha256: expected a SHA-256 of 64 hexadecimal digits: run 'rouse-gateway key NAME' to create a key and its line");
}

#[test]
fn a_model_that_is_not_there_is_doubtful() {
    let text = format!("keys:\n  - {{name: a, sha256: \"{HASH}\", models: [absent, \"x/*\"]}}");
    let warnings = check(&read(&text).unwrap()).warnings;
    let told: Vec<_> = warnings.iter().map(|warning| warning.display("f")).collect();
    insta::assert_snapshot!(told.join("\n"), @r###"
    f: no models are configured: every request gets a 404
    f:2:100: keys: no model matches 'absent'
    f:2:108: keys: no model matches 'x/*'
    "###);
}

#[test]
fn an_api_for_others_with_keys_is_not_warned_of() {
    let text = format!("listen: {{api: 0.0.0.0:80}}\nkeys:\n  - {{name: a, sha256: \"{HASH}\"}}");
    let warnings = check(&read(&text).unwrap()).warnings;
    assert!(warnings.iter().all(|warning| !warning.text.contains("no keys")), "{warnings:?}");
}
