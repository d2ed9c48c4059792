//! Tests compare error texts as a whole, since users read them.

mod document;
mod keys;

use std::path::Path;

use rouse::{
    model::{AcceleratorRequirement, EvictionPolicy, QueueOverrides, QueuePolicy, SleepLevelPolicy},
    units::{Bytes, Millis},
};

use super::{file::parse_with, machine::MachineDefaults, *};

fn machine() -> MachineDefaults {
    MachineDefaults {
        platform: None,
        memory: Bytes::gib(64),
        environment: |name| match name {
            "TOKEN" => Some("s3cret".to_owned()),
            "HOME" => Some("/home/me".to_owned()),
            "PAGE" => Some("8".to_owned()),
            "ROUSE_ADMIN_TOKEN" => Some("documented".to_owned()),
            _ => None,
        },
    }
}

fn read(text: &str) -> Result<Config, ConfigErrors> {
    parse_with(&machine(), text, "rouse.yaml")
}

fn errors(text: &str) -> String {
    read(text).map_or_else(|errors| errors.to_string(), |_| "no error".to_owned())
}

const MODEL: &str = r#"
models:
  - name: qwen3-8b
    aliases: [default]
    engine:
      kind: vllm
      command: [vllm, serve, Qwen/Qwen3-8B, --host, "${HOST}", --port, "${PORT}", --enable-sleep-mode, --gpu-memory-utilization, "${MEMORY_FRACTION}"]
      env: {VLLM_SERVER_DEV_MODE: "1", VERSION: 1.10, SIZE: "${env:PAGE}"}
      servedName: Qwen/Qwen3-8B
    memory: {awake: 30Gi, asleep: 2Gi, host: 16Gi}
    idle: {sleepAfter: 5m, stopAfter: never, level: 1}
"#;

#[test]
fn an_empty_file_gives_the_documented_defaults() {
    for text in ["", "# nothing\n", "models: []\n", "turns:\n  # residency: 30s\n"] {
        let config = read(text).unwrap();
        assert_eq!(config.api.to_string(), "127.0.0.1:8080");
        assert_eq!(config.admin.address.to_string(), "127.0.0.1:8180");
        assert!(config.accelerators_auto && config.admin.metrics_open && config.admin.token.is_none());
        assert_eq!(config.headroom, Bytes::gib(1));
        assert_eq!(config.core.settings.host_memory, Bytes::gib(32));
        assert_eq!(config.limits.body_total, Bytes::gib(2));
        assert_eq!(config.core.settings.queue.max_wait, Millis::secs(540));
        assert_eq!(config.state, Path::new("/home/me/.local/state/rouse"));
    }
}

#[test]
fn a_model_is_read_with_its_defaults() {
    let config = read(MODEL).unwrap();
    let spec = &config.core.models[0];
    assert_eq!(spec.accelerators, AcceleratorRequirement::Count(1));
    assert!(spec.can_sleep && !spec.explicit_memory && !spec.pinned);
    assert_eq!(spec.idle.stop_after, None);
    assert_eq!(spec.idle.level, SleepLevelPolicy::One);
    assert_eq!(spec.start_timeout, Millis::secs(480));
    let model = &config.engines["qwen3-8b"];
    assert_eq!(model.served_name, "Qwen/Qwen3-8B");
    assert_eq!(model.sleep, SleepApi::Vllm);
    let host = [127, 0, 0, 1].into();
    let command = model.command_line(4711, host, 0.4267, Bytes::ZERO);
    assert_eq!(command[3..7], ["--host", "127.0.0.1", "--port", "4711"]);
    assert_eq!(command[9], "0.4267");
    // The value stays as written and is no number: 1.10 is a version.
    let env = model.environment(4711, host, 0.5, Bytes::ZERO);
    assert_eq!(env["VERSION"], "1.10");
    assert_eq!(env["SIZE"], "8");
}

#[test]
fn a_model_says_itself_how_it_waits_and_when_it_goes_or_leaves_that_to_the_settings() {
    let spec = |fields: &str| read(&format!("{MODEL}{fields}")).unwrap().core.models[0].clone();
    let silent = spec("");
    assert_eq!((silent.eviction, silent.queue), (None, QueueOverrides::default()));
    let told = spec("    eviction: never\n    queue: {policy: reject, maxWait: 90s, maxWaiting: 3}\n");
    let queue = QueueOverrides {
        policy: Some(QueuePolicy::Reject),
        max_wait: Some(Millis::secs(90)),
        max_waiting: Some(3),
    };
    assert_eq!((told.eviction, told.queue), (Some(EvictionPolicy::Never), queue));
    assert_eq!(told.fingerprint, silent.fingerprint, "its engine is no other");
    insta::assert_snapshot!(errors(&format!("{MODEL}    eviction: no\n    queue: {{maxWait: 0s, wait: 1}}\n")), @r###"
    rouse.yaml:12:15: models[0].eviction: 'no' is not one of: residency, cooldown, never
    rouse.yaml:13:22: models[0].queue.maxWait: must be longer than 0
    rouse.yaml:13:26: models[0].queue: unknown key 'wait' (known keys: policy, maxWaiting, maxWait)
    "###);
}

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
fn a_span_of_idleness_that_is_not_written_gives_way_to_one_that_is() {
    let idle = |idle: &str| {
        let idle =
            read(&MODEL.replace("sleepAfter: 5m, stopAfter: never", idle)).unwrap().core.models[0].idle;
        (idle.sleep_after, idle.stop_after)
    };
    let minutes = |minutes: u64| Some(Millis::secs(60 * minutes));
    assert_eq!(idle("stopAfter: 2m"), (minutes(2), minutes(2)));
    assert_eq!(idle("sleepAfter: 90m"), (minutes(90), minutes(90)));
    assert_eq!(idle("sleepAfter: never"), (None, minutes(60)));
    assert_eq!(idle("stopAfter: never"), (minutes(5), None));
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

/// The gateway needs part of the grace period after its streams end. Kubernetes kills 30 seconds after SIGTERM.
#[test]
fn the_grace_of_a_gateway_in_a_pod_is_below_the_pods() {
    let within =
        |text: &str, pod: Option<u64>| read(text).unwrap().shutdown.effective_grace(pod.map(Millis::secs));
    let pod = "platform: kubernetes\nkubernetes: {stubImage: s}\n";
    let long = format!("{pod}shutdown: {{grace: 5m}}\n");
    // The Pod could not be read.
    assert_eq!((within("keys: none\n", None), within(pod, None)), (Millis::secs(30), Millis::secs(20)));
    assert_eq!(within(&long, None), Millis::secs(300));
    for (killed, most) in [(30, 20_000), (45, 35_000), (12, 6_000), (0, 0)] {
        for text in [pod, &long] {
            assert_eq!(within(text, Some(killed)), Millis(most), "{text}: killed after {killed} s");
        }
    }
    assert_eq!(within(&long, Some(600)), Millis::secs(300), "as the file says");
}

#[test]
fn the_command_line_says_where_engines_run_in_place_of_the_file() {
    let on =
        |platform, text: &str| parse_with(&MachineDefaults { platform, ..machine() }, text, "rouse.yaml");
    let cluster = "kubernetes: {stubImage: s}\n";
    assert!(on(Some(PlatformKind::Kubernetes), cluster).unwrap().kubernetes.is_some());
    assert!(on(Some(PlatformKind::Kubernetes), &format!("platform: local\n{cluster}")).is_ok());
    let alone = on(Some(PlatformKind::Local), "platform: kubernetes\n").unwrap();
    assert!(alone.kubernetes.is_none());
    assert!(on(None, cluster).is_err());
}

#[test]
fn a_prometheus_is_an_address_and_the_rest_has_defaults() {
    let text = |prometheus: &str| {
        format!("platform: kubernetes\nkubernetes: {{stubImage: s, prometheus: {prometheus}}}\n")
    };
    let read = |prometheus: &str| read(&text(prometheus)).unwrap().kubernetes.unwrap().prometheus.unwrap();
    let plain = read("{url: 'http://prometheus.monitoring:9090/base'}");
    assert_eq!(plain.url.to_string(), "http://prometheus.monitoring:9090/base");
    assert_eq!((plain.interval, plain.timeout), (Millis::secs(15), Millis::secs(5)));
    assert_eq!((plain.token_file, plain.ca_file), (None, None));
    let full = read("{url: 'https://p', tokenFile: /t, caFile: /c, interval: 30s, timeout: 2s}");
    assert_eq!((full.interval, full.timeout), (Millis::secs(30), Millis::secs(2)));
    assert_eq!((full.token_file, full.ca_file), (Some("/t".into()), Some("/c".into())));
    insta::assert_snapshot!(errors(&text("{}")), @"rouse.yaml:2:40: kubernetes.prometheus: 'url' is missing");
    insta::assert_snapshot!(errors(&text("{url: 'prometheus:9090'}")), @"rouse.yaml:2:46: kubernetes.prometheus.url: 'prometheus:9090' is not a URL: write http://HOST:9090");
    insta::assert_snapshot!(errors(&text("{url: 'http://me:secret@p'}")), @"rouse.yaml:2:46: kubernetes.prometheus.url: the URL contains credentials: put a bearer token into a file, and set tokenFile");
    insta::assert_snapshot!(errors(&text("{url: 'http://p/api/v1/query?x=y', interval: 0s}")), @r"
    rouse.yaml:2:46: kubernetes.prometheus.url: the URL has a query: write only the part before /api/v1, like http://HOST:9090
    rouse.yaml:2:85: kubernetes.prometheus.interval: must be longer than 0
    ");
}

#[test]
fn heartbeats_of_responses_are_comments_unless_asked_otherwise() {
    assert!(!read("stream: {responsesHeartbeat: comment}\n").unwrap().stream.responses_heartbeat_events);
    assert!(read("stream: {responsesHeartbeat: event}\n").unwrap().stream.responses_heartbeat_events);
}

#[test]
fn a_vllm_with_adapters_does_not_sleep_at_level_2() {
    let with = |level: &str| {
        format!(
            "models:\n  - name: m\n    engine: {{kind: vllm, command: [vllm, \"${{PORT}}\", --enable-sleep-mode, --enable-lora]}}\n    \
             memory: {{awake: 1Gi}}\n    idle: {{level: {level}}}\n"
        )
    };
    for (level, policy) in [
        ("auto", SleepLevelPolicy::OneOrStop),
        ("1", SleepLevelPolicy::OneOrStop),
        ("never", SleepLevelPolicy::Never),
    ] {
        for spelled in ["--enable-lora", "--enable_lora", "'sh -c \"exec vllm --enable-lora\"'"] {
            let read = read(&with(level).replace("--enable-lora", spelled)).unwrap();
            assert_eq!(read.core.models[0].idle.level, policy, "{spelled}");
        }
    }
    insta::assert_snapshot!(errors(&with("2")), @"rouse.yaml:5:19: models[0].idle.level: --enable-lora rules out level 2: a wake from level 2 reloads only the model's own weights and loses the adapters; set 1 or never");
}

#[test]
fn streams_are_taken_over_unless_asked_otherwise() {
    assert!(read("stream: {takeOver: true}\n").unwrap().stream.bypass_hyper);
    assert!(!read("stream: {takeOver: false}\n").unwrap().stream.bypass_hyper);
    assert!(read("{}\n").unwrap().stream.bypass_hyper);
}

#[test]
fn a_custom_engine_opens_the_paths_that_are_named_and_the_others_have_their_own() {
    let with = |kind: &str, passthrough: &str| {
        format!(
            "models:\n  - name: m\n    engine: {{kind: {kind}, command: [x, \"${{PORT}}\"], passthrough: {passthrough}}}\n    \
             memory: {{awake: 1Gi}}\n"
        )
    };
    let config = read(&with("custom", "[/embed, GET /info]")).unwrap();
    let open: Vec<_> = config.engines["m"].passthrough.iter().map(|p| (p.is_get, p.path.as_str())).collect();
    assert_eq!(open, [(false, "/embed"), (true, "/info")]);
    insta::assert_snapshot!(errors(&with("vllm", "[/embed]")), @r###"rouse.yaml:3:64: models[0].engine.passthrough: only custom engines have configurable paths: the paths of the other kinds are built in"###);
    insta::assert_snapshot!(errors(&with("custom", "[/sleep, embed]")), @r###"
    rouse.yaml:3:67: models[0].engine.passthrough[0]: '/sleep': the gateway never forwards a management path of the engine
    rouse.yaml:3:75: models[0].engine.passthrough[1]: 'embed': a path must start with /, must not end with one, and may have only letters, digits and - _ . ~ between
    "###);
}

#[test]
fn certificates_come_in_pairs_and_origins_are_origins() {
    insta::assert_snapshot!(errors(
        "tls: {cert: a.pem}\napi: {cors: {origins: [https://a.example/path, a.example, \"https://*.a.example\", \"null\"]}}\n"
    ), @r###"
    rouse.yaml:1:6: tls: both cert and key are needed
    rouse.yaml:2:24: api.cors.origins[0]: 'https://a.example/path' is not an origin: write scheme://host or scheme://host:port, without a path, or "*"
    rouse.yaml:2:48: api.cors.origins[1]: 'a.example' is not an origin: write scheme://host or scheme://host:port, without a path, or "*"
    rouse.yaml:2:59: api.cors.origins[2]: 'https://*.a.example' is not an origin: write scheme://host or scheme://host:port, without a path, or "*"
    rouse.yaml:2:82: api.cors.origins[3]: 'null' is not an origin: write scheme://host or scheme://host:port, without a path, or "*"
    "###);
    let config = read("api: {cors: {origins: [\"HTTP://App.example:8080\", \"*\"]}}\n").unwrap();
    assert_eq!(
        (config.cors.origins.as_slice(), config.cors.any),
        (&["http://app.example:8080".to_owned()][..], true)
    );
    for threads in [0, 257] {
        let refused = errors(&format!("api: {{threads: {threads}}}\n"));
        assert_eq!(refused, "rouse.yaml:1:16: api.threads: must be between 1 and 256");
    }
    assert_eq!(read("api: {threads: 3, cors: {origins: []}}\n").unwrap().threads, Some(3));
    insta::assert_snapshot!(errors("admin: {tls: true}\n"), @"rouse.yaml:1:14: admin.tls: there is no certificate to use: configure tls.cert and tls.key");
    let files = |text: &str| diff(&read("").unwrap(), &read(text).unwrap()).to_string();
    assert_eq!(files("tls: {cert: a, key: b}\nadmin: {tls: true}"), "restart needed for tls, admin.tls");
}

#[test]
fn an_admin_api_for_others_needs_a_token() {
    insta::assert_snapshot!(errors("listen: {admin: 0.0.0.0:8180}\n"), @r###"rouse.yaml:1:17: listen.admin: 0.0.0.0:8180 is not loopback: set admin.token, or listen on loopback"###);
    let config =
        read("listen: {admin: 0.0.0.0:8180}\nadmin: {token: \"${env:TOKEN}\", metrics: token}\n").unwrap();
    assert_eq!(config.admin.token.as_deref(), Some("s3cret"));
    assert!(!format!("{config:?}").contains("s3cret"));
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
        "api: {threads: VALUE, cors: {origins: [VALUE]}}".to_owned(),
        "queue: {policy: VALUE, maxWait: VALUE, maxWaiting: VALUE}".to_owned(),
        "stream: {takeOver: VALUE}".to_owned(),
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
fn declared_accelerators_are_less_their_headroom_and_named_once() {
    let config = read("accelerators: [{id: a, memory: 24Gi}, {id: b, memory: 8Gi, meter: /tmp/x}]").unwrap();
    assert_eq!(config.core.accelerators[0].capacity, Bytes::gib(23));
    assert!(!config.core.accelerators[0].metered && config.core.accelerators[1].metered);
    insta::assert_snapshot!(errors(
        "accelerators: [{id: a, memory: 24Gi}, {id: a, memory: 1Gi}]\nmodels:\n  - name: x\n    accelerators: [c, a, a]\n    \
         engine: {kind: custom, command: [x, \"${PORT}\"]}\n    memory: {awake: 1Gi}\n"
    ), @r###"
    rouse.yaml:1:39: accelerators[1]: memory 1Gi does not exceed headroom 1Gi: set the accelerator's real memory, or a smaller headroom
    rouse.yaml:1:39: accelerators[1]: the accelerator 'a' is listed twice
    rouse.yaml:4:20: models[0].accelerators[0]: there is no accelerator 'c'
    rouse.yaml:4:26: models[0].accelerators[2]: the accelerator 'a' is listed twice
    "###);
}

#[test]
fn an_engine_sees_declared_accelerators_by_what_the_file_says_and_others_by_the_drivers_names() {
    let config = read(
        "accelerators:\n  - {id: a, memory: 24Gi, visible: {HIP_VISIBLE_DEVICES: 0, ROCR_VISIBLE_DEVICES: GPU-aa}}\n  \
         - {id: b, memory: 24Gi, visible: {HIP_VISIBLE_DEVICES: 3}}\n  - {id: cpu, memory: 24Gi}\n",
    )
    .unwrap();
    let shown = |config: &Config, ids: &[&str]| {
        let ids: Vec<AcceleratorId> = ids.iter().map(|id| AcceleratorId::from(*id)).collect();
        let set = config.visible_env(&ids);
        set.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(shown(&config, &["a", "b"]), "HIP_VISIBLE_DEVICES=0,3 ROCR_VISIBLE_DEVICES=GPU-aa");
    assert_eq!(shown(&config, &["b"]), "HIP_VISIBLE_DEVICES=3");
    assert_eq!(shown(&config, &["cpu"]), "", "nothing is hidden from it");
    assert_eq!(shown(&read("").unwrap(), &["GPU-1", "GPU-2"]), "CUDA_VISIBLE_DEVICES=GPU-1,GPU-2");
    insta::assert_snapshot!(errors("accelerators: [{id: a, memory: 24Gi, visible: {A=B: 1}}, {id: b, memory: 24Gi, visible: 3}]"), @r###"
    rouse.yaml:1:48: accelerators[0].visible: 'A=B' is not a valid variable name
    rouse.yaml:1:89: accelerators[1].visible: expected a mapping, found a single value
    "###);
}

#[test]
fn names_that_could_not_be_used_are_refused() {
    for bad in ["''", "a b", "a/../b", "/a", "a%2fb", "'a#1'", "a//b", "a;b", r#""a\tb""#] {
        let text = MODEL.replace("qwen3-8b", bad);
        assert!(errors(&text).contains("is not a valid model name: "), "{bad}: {}", errors(&text));
    }
    for good in ["Qwen/Qwen3-8B", "gpt-4o:mini", "模型", "123"] {
        read(&MODEL.replace("qwen3-8b", good)).unwrap();
    }
}

#[test]
fn sleep_is_known_from_the_command_or_said() {
    let sleep = |engine: &str| {
        let text = format!("models: [{{name: m, engine: {engine}, memory: {{awake: 8Gi}}}}]");
        let config = read(&text).unwrap();
        assert_eq!(config.core.models[0].can_sleep, config.engines["m"].sleep != SleepApi::None);
        (config.engines["m"].sleep, config.core.models[0].explicit_memory)
    };
    let cases = [
        ("{kind: vllm, command: [v, \"${PORT}\"]}", SleepApi::None, false),
        (
            "{kind: vllm, command: [v, \"${PORT}\", \"${KV_CACHE_BYTES}\"], sleepMode: vllm}",
            SleepApi::Vllm,
            true,
        ),
        (
            "{kind: sglang, command: [sh, -c, \"s --enable-memory-saver --port ${PORT}\"]}",
            SleepApi::Sglang,
            false,
        ),
        ("{kind: custom, command: [x], env: {PORT: \"${PORT}\"}, sleepMode: vllm}", SleepApi::Vllm, true),
        ("{kind: llama-cpp, command: [x, \"${PORT}\"]}", SleepApi::None, true),
    ];
    for (engine, api, explicit) in cases {
        assert_eq!(sleep(engine), (api, explicit), "{engine}");
    }
}

#[test]
fn a_fingerprint_is_the_same_everywhere_and_follows_the_template_only() {
    let of = |text: &str| read(text).unwrap().core.models[0].fingerprint;
    // The value is fixed: engines carry it across restarts and upgrades.
    assert_eq!(of(MODEL), 15_943_622_502_938_062_438);
    assert_eq!(of(MODEL), of(&MODEL.replace("5m", "6m")));
    assert_ne!(of(MODEL), of(&MODEL.replace("1.10", "1.11")));
    assert_ne!(of(MODEL), of(&MODEL.replace("serve, Qwen", "serve, --x, Qwen")));
}

#[test]
fn check_warns_of_what_will_not_work_as_meant() {
    let config = read(
        r#"
listen: {api: 0.0.0.0:8080}
queue: {maxWait: 4m}
host: {sleepMemory: 4Gi}
accelerators: [{id: a, memory: 24Gi}]
models:
  - name: vllm-bare
    engine: {kind: vllm, command: [vllm, --port, "${PORT}", --enable-sleep-mode]}
    memory: {awake: 30Gi}
    idle: {level: 1}
  - name: vllm-no-sleep
    accelerators: 2
    engine: {kind: vllm, command: [vllm, "${HOST}:${PORT}", "${MEMORY_FRACTION}"], startTimeout: 1m}
    memory: {awake: 3Gi}
  - name: llama
    engine: {kind: llama-cpp, command: [python, -m, llama_cpp.server, --port, "${PORT}", --host, "${HOST}"], startTimeout: 1m}
    memory: {awake: 3Gi}
"#,
    )
    .unwrap();
    let findings = check(&config);
    let show = |problems: &[ConfigProblem]| {
        problems.iter().map(|problem| problem.display("f")).collect::<Vec<_>>().join("\n")
    };
    insta::assert_snapshot!(show(&findings.errors), @r###"
    f:7:5: model 'vllm-bare': needs 30Gi on one accelerator, but at most 23Gi can be reserved there (headroom keeps 1Gi free on each): set memory.awake: 23Gi or less
    f:11:5: model 'vllm-no-sleep': needs 2 accelerators, but there is only one: set accelerators: 1
    "###);
    insta::assert_snapshot!(show(&findings.warnings), @r###"
    f: listen.api is 0.0.0.0:8080, every interface, and there are no keys: anyone who can reach this address can use the API; add keys, or set keys: none if that is intended
    f: turns.maxTurn (2m), turns.drain.deadline (2m) and a swap (at most 1m) exceed queue.maxWait (4m): a request behind one busy model can time out in the queue
    f:7:5: model 'vllm-bare': engine.startTimeout (8m) exceeds queue.maxWait (4m): requests that wait for a slow start are rejected before the engine is ready
    f:7:5: model 'vllm-bare': the engine cannot sleep at level 1, because memory.host (30Gi in total) exceeds host.sleepMemory (4Gi): the engine will sleep at level 2 instead
    f:7:5: model 'vllm-bare': env does not set VLLM_SERVER_DEV_MODE: "1", so vLLM serves no /sleep and /wake_up: add it
    f:7:5: model 'vllm-bare': the command uses neither ${MEMORY_FRACTION} nor ${KV_CACHE_BYTES}: vLLM takes its default share of the accelerator, regardless of memory.awake
    f:7:5: model 'vllm-bare': neither command nor env uses ${HOST}: make sure that the engine listens on loopback only, or the gateway rejects the engine after its start
    f:11:5: model 'vllm-no-sleep': the command has no --enable-sleep-mode: the engine is stopped and started instead of put to sleep and woken
    f:15:5: model 'llama': llama-cpp-python aborts a running request when another request arrives: add --interrupt_requests false
    "###);
    // Without a list, the memory is unknown before detection.
    assert_eq!(check(&read(MODEL).unwrap()), CheckFindings::default());
}

#[test]
fn why_a_model_fits_nowhere_is_told_with_what_to_write() {
    let misfit = |top: &str, model: &str| {
        let engine = "engine: {kind: custom, command: [x, '${HOST}:${PORT}']}";
        let errors =
            check(&read(&format!("{top}\nmodels: [{{name: m, {engine}, {model}}}]")).unwrap()).errors;
        errors.iter().map(|error| error.text.as_str()).collect::<Vec<_>>().join("\n")
    };
    let (one, two) = (
        "accelerators: [{id: a, memory: 24Gi}]",
        "accelerators: [{id: a, memory: 24Gi}, {id: b, memory: 16Gi}]",
    );
    assert_eq!(misfit(one, "memory: {awake: 23Gi}"), "");
    // Only the headroom is in the way.
    insta::assert_snapshot!(misfit(one, "memory: {awake: 23.5Gi}"), @"model 'm': needs 23.50Gi on one accelerator, but at most 23Gi can be reserved there (headroom keeps 1Gi free on each): set memory.awake: 23Gi or less, or a smaller headroom");
    insta::assert_snapshot!(misfit(one, "memory: {awake: 25Gi}"), @"model 'm': needs 25Gi on one accelerator, but at most 23Gi can be reserved there (headroom keeps 1Gi free on each): set memory.awake: 23Gi or less");
    insta::assert_snapshot!(misfit(&format!("headroom: 0\n{two}"), "accelerators: 2, memory: {awake: 20Gi}"), @"model 'm': needs 20Gi on each of 2 accelerators, but at most 16Gi can be reserved there: set memory.awake: 16Gi or less");
    insta::assert_snapshot!(misfit(two, "accelerators: 3, memory: {awake: 1Gi}"), @"model 'm': needs 3 accelerators, but there are only 2: set accelerators: 2 or less");
    insta::assert_snapshot!(misfit("accelerators: []", "memory: {awake: 1Gi}"), @"model 'm': needs 1 accelerator, but there are none: list the machine's accelerators under accelerators");
}

#[test]
fn a_reload_is_told_apart_by_model_and_by_key() {
    let old = read(MODEL).unwrap();
    assert_eq!(diff(&old, &old).to_string(), "nothing changed");
    let other = MODEL.replace("qwen3-8b", "llama");
    let both = format!("{MODEL}{}", other.replace("models:", "").replace("[default]", "[]"));
    let new = format!("queue: {{maxWait: 1m}}\nlisten: {{api: 127.0.0.1:1}}\n{both}").replace("5m", "7m");
    let new = read(&new).unwrap();
    let change = diff(&old, &new);
    assert_eq!(
        change.to_string(),
        "added llama; changed qwen3-8b; settings queue; restart needed for listen"
    );
    assert_eq!(diff(&new, &old).removed, ["llama".into()]);
    let outdated = read(&MODEL.replace("1.10", "1.11")).unwrap();
    assert_eq!(diff(&old, &outdated).outdated, ["qwen3-8b".into()]);
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

#[test]
fn anchors_and_merge_keys_save_repetition_and_errors_point_into_them() {
    let text = MODEL.replace("memory: {awake", "memory: &m {awake")
        + "  - {name: second, engine: {kind: custom, command: [x, '${PORT}']}, memory: {<<: *m, host: 1Gi}}\n";
    let config = read(&text).unwrap();
    assert_eq!(config.core.models[1].memory.awake, Bytes::gib(30));
    assert_eq!(config.core.models[1].memory.host, Bytes::gib(1));
}
