use std::{fs, path::PathBuf};

use super::*;
use crate::{Config, MachineDefaults, parse_with};

fn folder() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests", "llama_swap"].iter().collect()
}

fn environment(name: &str) -> Option<String> {
    match name {
        "MODELS" => Some("/srv/models".to_owned()),
        "SECOND_KEY" => Some("sk-second".to_owned()),
        "HF_TOKEN" => Some("hf_secret".to_owned()),
        _ => None,
    }
}

fn file_size(path: &str) -> Option<Bytes> {
    (path == "/models/coder.gguf").then_some(Bytes::gib(10))
}

fn import(name: &str) -> LlamaSwapImport {
    let text = fs::read_to_string(folder().join(name)).unwrap();
    import_llama_swap(&text, name, &ImportMachine { environment, file_size }).unwrap()
}

fn import_text(text: &str) -> LlamaSwapImport {
    import_llama_swap(text, "test", &ImportMachine { environment, file_size }).unwrap()
}

fn parsed(yaml: &str) -> Config {
    let machine = MachineDefaults { platform: None, memory: Bytes::gib(64), environment };
    parse_with(&machine, yaml, "rouse.yaml").unwrap_or_else(|errors| panic!("{errors}\n{yaml}"))
}

fn notes(imported: &LlamaSwapImport) -> String {
    imported.notes.iter().map(|note| format!("{}: {}\n", note.at.line, note.text)).collect()
}

#[test]
fn every_configuration_becomes_one_that_passes_check() {
    let mut names: Vec<_> = fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.retain(|name| name.ends_with(".yaml"));
    names.sort();
    assert_eq!(names.len(), 11, "{names:?}");
    for name in names {
        let imported = import(&name);
        let config = parsed(&imported.yaml);
        assert_eq!(config.core.models.len(), imported.models, "{name}");
        let findings = crate::check(&config);
        assert!(findings.errors.is_empty(), "{name}: {:?}\n{}", findings.errors, imported.yaml);
        for note in &imported.notes {
            let line = format!("#   {}: {}", note.at.line, note.text);
            assert!(imported.yaml.contains(&line), "{name}: no comment '{line}'");
        }
        insta::with_settings!({ snapshot_path => "../../tests/llama_swap", prepend_module_to_snapshot => false, omit_expression => true }, {
            insta::assert_snapshot!(name.trim_end_matches(".yaml"), imported.yaml);
        });
    }
}

#[test]
fn no_key_of_the_documentation_is_dropped_silently() {
    let imported = import("every-key.yaml");
    let told = notes(&imported);
    for key in [
        "logLevel",
        "logTimeFormat",
        "logToStdout",
        "metricsMaxInMemory",
        "captureBuffer",
        "store",
        "ui",
        "performance",
        "startPort",
        "sendLoadingState",
        "includeAliasesInList",
        "upstream",
        "profiles",
        "selectors",
        "cmdStop",
        "checkEndpoint",
        "unloadTimeout",
        "filters",
        "metadata",
        "unlisted",
        "timeouts",
        "compat",
        "capabilities",
        "apiKeys",
        "CUDA_VISIBLE_DEVICES",
        "the peer 'cloud'",
        "the group 'chat'",
        "the group 'always'",
        "routing.router.settings.matrix",
        "the model 'small' is preloaded",
    ] {
        assert!(told.contains(key), "nothing says what became of {key}:\n{told}");
    }
    assert!(!told.contains("unknown"), "{told}");
    let config = parsed(&imported.yaml);
    let [large, small, embedder] = config.core.models.as_slice() else { panic!("{}", imported.yaml) };
    assert_eq!((large.aliases.len(), large.priority, large.max_concurrency), (2, 5, Some(4)));
    assert_eq!(large.start_timeout, Millis::secs(900));
    assert_eq!(large.idle.stop_after, Some(Millis::secs(120)));
    assert_eq!((small.idle.stop_after, small.priority), (None, -1));
    assert_eq!(embedder.idle.stop_after, Some(Millis::secs(600)), "the global ttl");
    assert!(embedder.pinned, "persistent and preloaded");
    assert_eq!(config.core.settings.timeouts.stop_grace, Millis::secs(20));
    assert_eq!(config.keys.len(), 2, "the third key is unknown");
    let engine = &config.engines[&large.name];
    let expected = "/opt/llama/llama-server --port ${PORT} --ctx-size 16384 --model /srv/models/large.gguf --alias large \
                    --host ${HOST}";
    assert_eq!(engine.command.join(" "), expected);
    assert_eq!((engine.served_name.as_str(), engine.env.len()), ("org/large", 1));
}

#[test]
fn no_key_of_a_client_is_in_the_result() {
    let imported = import("every-key.yaml");
    for secret in ["sk-first", "sk-second"] {
        assert!(!imported.yaml.contains(secret) && !notes(&imported).contains(secret), "{secret}");
    }
}

#[test]
fn what_users_write_is_understood() {
    let told = |name: &str| notes(&import(name));
    let docker = parsed(&import("docker-llama.yaml").yaml);
    assert_eq!(docker.core.models[0].name.as_str(), "Qwen-Coder-32B");
    assert!(docker.engines.values().all(|engine| engine.kind == crate::EngineKind::LlamaCpp));
    assert!(told("docker-llama.yaml").contains("clients must use that name"));

    let groups = parsed(&import("groups-legacy.yaml").yaml);
    let [coder, _, rerank, whisper] = groups.core.models.as_slice() else { panic!() };
    assert_eq!(coder.memory.awake, Bytes::gib(12), "10Gi of weights and a fifth");
    assert!(rerank.pinned && !whisper.pinned);
    assert_eq!(whisper.eviction, Some(rouse::model::EvictionPolicy::Never));
    assert!(told("groups-legacy.yaml").contains("'gone' is named by"));

    let vllm = parsed(&import("vllm-native.yaml").yaml);
    let [llama, qwen] = vllm.core.models.as_slice() else { panic!() };
    assert_eq!(llama.accelerators, rouse::model::AcceleratorRequirement::Count(4));
    assert!(llama.can_sleep && !qwen.can_sleep);
    assert_eq!(vllm.engines[&llama.name].served_name, "meta-llama/Llama-3.3-70B");
    assert_eq!(vllm.engines[&qwen.name].served_name, "Qwen/Qwen2.5-7B");

    let clash = told("alias-clash.yaml");
    for alias in ["'b' of 'a'", "'gpt-4o' of 'b'", "'a' of 'b'", "'has space' of 'a'"] {
        assert!(clash.contains(&format!("the alias {alias} is left out")), "{alias}: {clash}");
    }
    let windows = parsed(&import("windows.yaml").yaml);
    assert!(
        windows
            .engines
            .values()
            .all(|engine| engine.command.contains(&r"D:\My Models\phi-4.gguf".to_owned()))
    );

    let no_port = import("no-port.yaml");
    assert_eq!(no_port.models, 3);
    assert!(notes(&no_port).contains("the model 'lost' is left out: the command does not say where"));
    assert!(notes(&no_port).contains("the model 'empty' has no cmd"));
    let other = import("other-host.yaml");
    assert_eq!(other.models, 1);
    assert!(notes(&other).contains("its proxy 192.168.1.23:5800 is on another machine"));
    assert!(told("macros-and-anchors.yaml").contains("the macro ${missing} is unknown"));
}

#[test]
fn a_text_that_is_no_such_configuration_is_refused_with_its_line() {
    let machine = ImportMachine { environment, file_size };
    for (text, expected) in [
        ("models: [1]\n", "f:1:1: there is no mapping 'models'"),
        ("a: 1\n", "f:1:1: there is no mapping 'models'"),
    ] {
        let errors = import_llama_swap(text, "f", &machine).unwrap_err().to_string();
        assert_eq!(errors, expected);
    }
    assert!(import_llama_swap("models: {", "f", &machine).is_err());
    assert_eq!(import_text("models: {}\n").models, 0);
    assert!(parsed(&import_text("models: {}\n").yaml).core.models.is_empty());
}
