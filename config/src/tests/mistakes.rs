//! Tests what a file with mistakes is refused with: each mistake once, with its place, and no credential shown.
//!
//! Apart from the values, because a mistake is told in the same way wherever it is.

use std::path::Path;

use super::{MODEL, errors, load, read};

#[test]
fn mistakes_in_different_places_are_reported_together_each_with_its_place() {
    insta::assert_snapshot!(errors(
        r#"listen: {api: 127.0.0.1:http, adnim: 127.0.0.1:8180}
headroom: lots
queue:
  maxWaiting: -1
  policy: maybe
turns: {residency: 30s, maxTurn: 10s}
admin: {token: "${env:NO_SUCH}"}
state: "${PORT}"
limits: [1, 2]
models:
  - name: a
    engine: {kind: vlm, command: []}
    memory: {awake: 1Gi, sleep: 2Gi}
    replicas: 0
  - name: a
    aliases: [b, b]
    engine:
      kind: custom
      command: [serve, "${MODEL}"]
    pinned: yes
    acelerators: 0
"#
    ), @r###"
    rouse.yaml:1:15: listen.api: '127.0.0.1:http' is not an address: write IP:PORT, like 127.0.0.1:8080 or [::1]:8080
    rouse.yaml:1:31: listen: unknown key 'adnim' (did you mean 'admin'?)
    rouse.yaml:2:11: headroom: 'lots' is not a size: write a number and a unit, like 30Gi, 256MiB or 4096
    rouse.yaml:4:15: queue.maxWaiting: '-1' is not a whole number in the allowed range
    rouse.yaml:5:11: queue.policy: 'maybe' is not one of: wait, reject
    rouse.yaml:6:34: turns.maxTurn: 10s is shorter than turns.residency (30s)
    rouse.yaml:7:16: admin.token: the environment variable NO_SUCH is not set
    rouse.yaml:8:8: state: ${PORT} is available only in an engine's command and env
    rouse.yaml:9:9: limits: expected a mapping, found a list
    rouse.yaml:12:20: models[0].engine.kind: 'vlm' is not one of: vllm, sglang, llama-cpp, custom
    rouse.yaml:12:34: models[0].engine.command: the command is empty
    rouse.yaml:13:26: models[0].memory: unknown key 'sleep' (did you mean 'asleep'?)
    rouse.yaml:14:15: models[0].replicas: must be between 1 and 64
    rouse.yaml:15:5: models[1]: 'memory' is missing
    rouse.yaml:15:11: models[1].name: the name 'a' is already taken by the model or alias at 11:11
    rouse.yaml:16:18: models[1].aliases[1]: the name 'b' is already taken by the model or alias at 16:15
    rouse.yaml:19:24: models[1].engine.command[1]: ${MODEL} is unknown: use ${env:MODEL} for the gateway's environment variable, or $${MODEL} to pass it on unchanged
    rouse.yaml:20:13: models[1].pinned: 'yes' is not one of: true, false
    rouse.yaml:21:5: models[1]: unknown key 'acelerators' (did you mean 'accelerators'?)
    "###);
}

#[test]
fn a_syntax_error_is_reported_alone() {
    insta::assert_snapshot!(errors("listen: {api: 127.0.0.1:8080\nheadroom: 1Gi\n"), @r###"rouse.yaml:2:9: a { is not closed, or a comma is missing: write {key: value, key: value}"###);
}

#[test]
fn the_usual_slips_of_yaml_are_told_with_what_to_write() {
    insta::assert_snapshot!(errors("models:\n\t- name: a\n"), @"rouse.yaml:2:1: a tab in the indentation: use spaces");
    insta::assert_snapshot!(errors("queue:\n    maxWait: 1m\n   policy: wait\n"), @"rouse.yaml:3:4: this line's indentation does not match the lines above it: start the keys of one mapping in the same column, and also the dashes of one list");
    insta::assert_snapshot!(errors("models:\n  - name: a\n    engine: {command: [x, --port=${PORT}, y]}\n"), @r#"rouse.yaml:3:27: --port=${PORT} needs quotes here: write "--port=${PORT}""#);
    insta::assert_snapshot!(errors("models:\n  - name: a\n    engine: {env: {PORT: ${PORT}}}\n"), @r#"rouse.yaml:3:26: ${PORT} needs quotes here: write "${PORT}""#);
    insta::assert_snapshot!(errors("queue: maxWait: 1m\n"), @"rouse.yaml:1:15: two keys on one line, or a line indented deeper than the lines above it: quote a value that contains ': '");
    insta::assert_snapshot!(errors("models: [a, b\n"), @"rouse.yaml:1:9: a [ is not closed, or a comma is missing: write [a, b], and quote words that contain , [ ] { }");
}

#[test]
fn a_slip_is_one_error_that_says_what_to_write() {
    let model = |engine: &str, keys: &str| {
        let engine = format!("    engine:\n      kind: custom\n      command: {engine}\n");
        errors(&format!("models:\n  - name: m\n{engine}{keys}\n"))
    };
    let fine = "[x, '${HOST}:${PORT}']";
    insta::assert_snapshot!(model("vllm serve m --port ${PORT}", "    memory: {awake: 1Gi}"), @r#"rouse.yaml:5:16: models[0].engine.command: expected a list of program and arguments, found a single value: write [vllm, serve, m, --port, "${PORT}"]"#);
    insta::assert_snapshot!(model("'serve m | tee \"log\" ${PORT}'", "    memory: {awake: 1Gi}"), @"rouse.yaml:5:16: models[0].engine.command: expected a list of program and arguments, found a single value: write [sh, -c, 'exec …'] if the command needs a shell, otherwise [PROGRAM, ARGUMENT, …]");
    insta::assert_snapshot!(model(fine, "    memory: {awake: 700, asleep: 64}"), @r"
    rouse.yaml:6:21: models[0].memory.awake: 700 bytes is too little memory: add a unit, like 700Mi or 30Gi
    rouse.yaml:6:34: models[0].memory.asleep: 64 bytes is too little memory: add a unit, like 64Mi or 30Gi
    ");
    insta::assert_snapshot!(model(fine, "    memory: 700"), @"rouse.yaml:6:13: models[0].memory: expected a mapping, found a single value: write {awake: 30Gi}, with the memory that an awake engine takes");
    insta::assert_snapshot!(model(fine, "    memory: {awake: 1Gi}\n    idle: {sleepAfter: 5m, stopAfter: 2m}"), @"rouse.yaml:7:39: models[0].idle.stopAfter: 2m is shorter than sleepAfter (5m): write 5m or more, or a shorter sleepAfter");
    insta::assert_snapshot!(errors("accelerators: [{id: a, memory: 24}]"), @"rouse.yaml:1:32: accelerators[0].memory: 24 bytes is too little memory: add a unit, like 24Mi or 30Gi");
    insta::assert_snapshot!(errors("listen: {api: \"0.0.0.0:8180\"}"), @"rouse.yaml:1:15: listen.api (0.0.0.0:8180) and listen.admin (127.0.0.1:8180) use the same port: change one of them, like 127.0.0.1:8080 and 127.0.0.1:8180");
    insta::assert_snapshot!(errors("keys: [rk-plain]"), @"rouse.yaml:1:8: keys[0]: expected {name: NAME, sha256: HASH}, found a single value: run 'rouse-gateway key NAME' to create a key and its line, or add --stdin to create the line of an existing key");
}

#[test]
fn a_key_given_twice_does_not_hide_other_mistakes() {
    insta::assert_snapshot!(errors("headroom: 1Gi\nheadroom: 2Gi\nevicton: never\n"), @r###"
    rouse.yaml:2:1: the key 'headroom' is given twice
    rouse.yaml:3:1: unknown key 'evicton' (did you mean 'eviction'?)
    "###);
}

#[test]
fn what_is_no_mapping_is_refused() {
    insta::assert_snapshot!(errors("just a text\n"), @r###"rouse.yaml:1:1: expected a mapping, found a single value"###);
    insta::assert_snapshot!(errors("--- {}\n--- {}\n"), @r###"rouse.yaml:2:5: the file has a second document (---): keep only one"###);
}

#[test]
fn keys_of_later_versions_are_known_but_not_silently_accepted() {
    let accepted = "platform: local\ntls: {}\nkeys: none\napi: {cors: {origins: []}}\n";
    assert!(read(accepted).unwrap().keys_none);
    insta::assert_snapshot!(errors("platform: kubernetes\n"), @"rouse.yaml:1:11: platform: kubernetes needs a `kubernetes` section with at least stubImage");
}

#[test]
fn a_credential_that_no_header_can_carry_is_refused_without_being_shown() {
    for (text, key) in [
        ("admin: {token: \"s3cret \"}", "admin.token"),
        (
            "models: [{name: m, engine: {kind: custom, command: [x, '${PORT}'], apiKey: \"s3cret\\n\"}, memory: {awake: 1Gi}}]",
            "models[0].engine.apiKey",
        ),
    ] {
        let errors = errors(text);
        let told = format!("{key}: contains a space, a line end or another character");
        assert!(
            errors.contains(&told) && errors.lines().count() == 1 && !errors.contains("s3cret"),
            "{errors}"
        );
    }
}

#[test]
fn what_came_out_of_the_environment_is_in_no_error() {
    let model = |keys: &str| {
        format!(
            "models:\n  - {{name: m, engine: {{kind: custom, command: [x, '${{PORT}}']}}, memory: {{awake: 1Gi}}, {keys}}}\n"
        )
    };
    let with = |text: &str| text.replace("VALUE", "\"${env:TOKEN}\"");
    for text in [
        "headroom: VALUE".to_owned(),
        "accelerators: VALUE".to_owned(),
        "listen: {api: VALUE}".to_owned(),
        "listen: {proxies: {networks: [VALUE], proxyProtocol: VALUE, header: VALUE}}".to_owned(),
        "api: {threads: VALUE, cors: {origins: [VALUE]}}".to_owned(),
        "queue: {policy: VALUE, maxWait: VALUE, maxWaiting: VALUE}".to_owned(),
        "stream: {responsesHeartbeat: VALUE}".to_owned(),
        "limits: {bodyTotal: VALUE, bodyRate: VALUE, header: VALUE}".to_owned(),
        "logs: {access: VALUE}".to_owned(),
        "telemetry: {otlp: VALUE, sample: VALUE}".to_owned(),
        "keys: VALUE".to_owned(),
        model("accelerators: VALUE"),
        model("accelerators: [VALUE, VALUE]"),
        model("idle: {level: VALUE, stopAfter: VALUE}"),
    ] {
        let errors = errors(&with(&text));
        assert!(!errors.contains("s3cret") && errors.contains("${env:TOKEN}"), "{errors}");
    }
    let sized = errors("headroom: \"${env:TOKEN}Gi\"");
    assert!(sized.contains("'${env:TOKEN}Gi' is not a size"), "{sized}");
}

#[test]
fn a_missing_file_is_an_error_with_its_name() {
    let error = load(Path::new("/no/such/rouse.yaml")).unwrap_err();
    insta::assert_snapshot!(error, @r###"/no/such/rouse.yaml: No such file or directory (os error 2)"###);
}

#[test]
fn a_file_cut_off_anywhere_is_read_or_refused_with_a_place() {
    let mut refused = 0;
    for (end, _) in MODEL.char_indices() {
        let (text, _) = MODEL.split_at(end);
        if let Err(errors) = read(text) {
            refused += 1;
            assert!(errors.problems.iter().all(|problem| problem.at.line > 0), "{text}\n{errors}");
        }
    }
    assert!(refused > 100);
    for text in [
        "? [a, b]\n: 1\n",
        "1: 2\n",
        "null",
        "- a\n",
        "&a [*a]",
        "a: &x {b: *x}",
        "headroom: *gone",
        "!!binary x: y",
    ] {
        assert!(read(text).is_err() || text == "null", "{text}");
    }
}
