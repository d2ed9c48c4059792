//! Tests compare error texts as a whole, since users read them.
//!
//! This file has what a model and an accelerator are read as. The others have mistakes, the gateway's own settings,
//! and what [`check()`] and [`diff()`] say of a valid file.

mod check_and_diff;
mod document;
mod gateway_settings;
mod keys;
mod mistakes;
mod saturation;

use std::path::Path;

use rouse::{
    model::{
        AcceleratorRequirement, EvictionPolicy, QueueOverrides, QueuePolicy, RehearsalPolicy,
        ScaleUpEviction, SleepLevelPolicy,
    },
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
    let modest = spec("    saturation: {mayEvict: never}\n");
    assert_eq!((silent.may_evict, modest.may_evict), (ScaleUpEviction::Idle, ScaleUpEviction::Never));
    insta::assert_snapshot!(errors(&format!("{MODEL}    eviction: no\n    queue: {{maxWait: 0s, wait: 1}}\n")), @r###"
    rouse.yaml:12:15: models[0].eviction: 'no' is not one of: residency, cooldown, never
    rouse.yaml:13:22: models[0].queue.maxWait: must be longer than 0
    rouse.yaml:13:26: models[0].queue: unknown key 'wait' (known keys: policy, maxWaiting, maxWait)
    "###);
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
fn an_engine_that_may_sleep_at_level_1_rehearses_that_if_it_is_told_to() {
    let rehearse = |idle: &str| {
        let text = MODEL.replace("stopAfter: never, level: 1", idle);
        read(&text).unwrap().core.models[0].idle.rehearse
    };
    assert_eq!(rehearse("level: 1"), RehearsalPolicy::Never);
    assert_eq!(rehearse("level: 1, rehearse: start"), RehearsalPolicy::Start);
    assert_eq!(rehearse("rehearse: idle"), RehearsalPolicy::Idle);
    assert_eq!(rehearse("level: 2, rehearse: never"), RehearsalPolicy::Never);
    let refused = |level: &str| {
        errors(&MODEL.replace("stopAfter: never, level: 1", &format!("level: {level}, rehearse: idle")))
    };
    for level in ["2", "never"] {
        assert!(refused(level).contains("idle.rehearse: only sleeps at level 1 are rehearsed"), "{level}");
    }
    let awake = errors(
        "models:\n  - name: m\n    engine: {kind: custom, command: [x, \"${PORT}\"]}\n    \
         memory: {awake: 1Gi}\n    idle: {rehearse: start}\n",
    );
    assert!(awake.contains("idle.rehearse: this engine cannot sleep"), "{awake}");
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
fn a_fingerprint_is_the_same_everywhere_and_follows_what_an_engine_gets_at_its_start() {
    let of = |text: &str| read(text).unwrap().core.models[0].fingerprint;
    // The value is fixed: engines carry it across restarts and upgrades.
    assert_eq!(of(MODEL), 3_076_118_204_014_000_593);
    assert_eq!(of(MODEL), of(&MODEL.replace("5m", "6m")));
    assert_ne!(of(MODEL), of(&MODEL.replace("awake: 30Gi", "awake: 31Gi")));
    assert_ne!(of(MODEL), of(&MODEL.replace("1.10", "1.11")));
    assert_ne!(of(MODEL), of(&MODEL.replace("serve, Qwen", "serve, --x, Qwen")));
}

#[test]
fn anchors_and_merge_keys_save_repetition_and_errors_point_into_them() {
    let text = MODEL.replace("memory: {awake", "memory: &m {awake")
        + "  - {name: second, engine: {kind: custom, command: [x, '${PORT}']}, memory: {<<: *m, host: 1Gi}}\n";
    let config = read(&text).unwrap();
    assert_eq!(config.core.models[1].memory.awake, Bytes::gib(30));
    assert_eq!(config.core.models[1].memory.host, Bytes::gib(1));
}
