//! Tests what a valid file is warned of, and what a reload changes.
//!
//! Apart from the reading, because both start from a configuration that was read without an error.

use super::{CheckFindings, ConfigProblem, MODEL, check, diff, read};

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
fn check_warns_of_an_sglang_engine_that_may_sleep_at_level_1_without_a_copy_of_its_weights() {
    let warnings = |arguments: &str, more: &str| {
        let engine = format!("{{kind: sglang, command: [s, '${{HOST}}', '${{PORT}}'{arguments}]}}");
        let text = format!("models: [{{name: m, engine: {engine}, memory: {{awake: 8Gi}}{more}}}]");
        let found = check(&read(&text).unwrap()).warnings;
        found.iter().map(|warning| warning.text.as_str()).collect::<Vec<_>>().join("\n")
    };
    let saver = ", --enable-memory-saver";
    let warned = warnings(saver, "");
    insta::assert_snapshot!(warned, @"model 'm': the command has no --enable-weights-cpu-backup: SGLang does not restore its weights at a wake from level 1, and the answers are noise; add it, or set idle: {level: 2}");
    assert_eq!(warnings(saver, ", idle: {level: 1}"), warned);
    assert_eq!(warnings(&format!("{saver}, --no-enable-weights-cpu-backup"), ""), warned);
    for backup in ["--enable-weights-cpu-backup", "--enable_weights_cpu_backup"] {
        assert_eq!(warnings(&format!("{saver}, {backup}"), ""), "", "{backup}");
    }
    for level in ["2", "never"] {
        assert_eq!(
            warnings(saver, &format!(", idle: {{level: {level}}}")),
            "",
            "level {level} needs no copy"
        );
    }
    assert!(!warnings("", "").contains("weights"), "an engine that never sleeps loses none");
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
fn an_engine_that_got_its_memory_at_its_start_is_outdated_by_another_size() {
    let outdated = |argument: &str, sizes: [&str; 2]| {
        let [old, new] = sizes.map(|memory| {
            let engine = format!("engine: {{kind: vllm, command: [v, '${{PORT}}', '{argument}']}}");
            read(&format!("models: [{{name: m, {engine}, memory: {memory}}}]")).unwrap()
        });
        diff(&old, &new).outdated.len()
    };
    let awake = ["{awake: 30Gi, host: 20Gi}", "{awake: 60Gi, host: 20Gi}"];
    assert_eq!(
        ["x", "${MEMORY_FRACTION}", "${KV_CACHE_BYTES}"].map(|argument| outdated(argument, awake)),
        [0, 1, 1]
    );
    let host = ["{awake: 60Gi, host: 20Gi}", "{awake: 60Gi, host: 30Gi}"];
    assert_eq!(
        ["x", "${MEMORY_FRACTION}", "${KV_CACHE_BYTES}"].map(|argument| outdated(argument, host)),
        [0, 0, 1]
    );
    let asleep = ["{awake: 60Gi, asleep: 1Gi}", "{awake: 60Gi, asleep: 2Gi}"];
    assert_eq!(outdated("${KV_CACHE_BYTES}", asleep), 0);
}

#[test]
fn check_warns_of_proxies_that_are_everyone() {
    let warnings = |networks: &str| {
        let text = format!("listen: {{proxies: {{networks: [{networks}]}}}}\n{MODEL}");
        check(&read(&text).unwrap()).warnings.into_iter().map(|warning| warning.text).collect::<Vec<_>>()
    };
    assert_eq!(warnings("10.0.0.0/8, 127.0.0.1"), [""; 0]);
    let told = "listen.proxies.networks has 0.0.0.0/0: any client can claim any address, so no limit by address holds; list \
                only the networks of your proxies";
    assert_eq!(warnings("0.0.0.0/0"), [told]);
}

#[test]
fn other_proxies_are_believed_without_a_restart() {
    let read = |text: &str| read(&format!("{text}\n{MODEL}")).unwrap();
    let some = read("listen: {proxies: {networks: [10.0.0.0/8]}}");
    assert_eq!(diff(&read(""), &some).to_string(), "settings listen.proxies");
}
