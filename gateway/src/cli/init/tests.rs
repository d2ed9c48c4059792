use rouse::{model::ModelName, units::Bytes};

use super::*;
use crate::cli::detect::{
    gguf::tests::GgufBuilder,
    programs::{KnownFlags, ServerProgram, VLLM_SLEEP_FLAG},
};

fn program(program: ServerProgram, uses_accelerators: Option<bool>, flags: &[&str]) -> FoundProgram {
    let command: &[&str] = match program {
        ServerProgram::Vllm => &["/opt/vllm/bin/vllm"],
        ServerProgram::Sglang => &["/opt/sglang/bin/python3", "-m", "sglang.launch_server"],
        ServerProgram::LlamaServer => &["/usr/bin/llama-server"],
        ServerProgram::LlamaCppPython => &["/usr/bin/python3", "-m", "llama_cpp.server"],
    };
    let texts = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    FoundProgram {
        program,
        command: texts(command),
        version: Some("1.2".to_owned()),
        flags: KnownFlags::Some(texts(flags)),
        uses_accelerators,
        devices: Vec::new(),
    }
}

fn gguf(folder: &Path, name: &str, builder: &GgufBuilder) {
    std::fs::write(folder.join(name), builder.file()).unwrap();
}

/// Finds the GGUF files of a folder.
fn machine(folder: &Path, programs: Vec<FoundProgram>) -> FoundMachine {
    let (gguf, snapshots, left_out) = look_at_files(&[folder.to_owned()], None);
    FoundMachine { programs, gguf, snapshots, left_out, searched: vec!["files in DIR".to_owned()] }
}

fn on_cpu(machine: FoundMachine) -> ConfigProposal {
    let accelerators = AcceleratorChoice::of(&[], "there is no driver", Bytes::gib(16), &machine.programs);
    ConfigProposal::new(accelerators, machine)
}

fn on_gpu(machine: FoundMachine, count: usize, usable: Bytes) -> ConfigProposal {
    let found = vec![("NVIDIA L4".to_owned(), usable); count];
    let accelerators = AcceleratorChoice::of(&found, "", Bytes::gib(64), &machine.programs);
    ConfigProposal::new(accelerators, machine)
}

/// Renders the file and parses it again, as `init` does before it writes.
fn parsed(proposal: &ConfigProposal) -> (String, rouse_config::Config) {
    let text = yaml::render(proposal);
    check(&text, Path::new("t")).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let config = rouse_config::parse(&text, "t").unwrap();
    (text, config)
}

fn engine<'a>(config: &'a rouse_config::Config, name: &str) -> &'a rouse_config::EngineConfig {
    &config.engines[&ModelName::from(name)]
}

/// A model of 8 billion parameters with 16 bits.
fn large(id: &str) -> SnapshotModel {
    SnapshotModel {
        id: id.to_owned(),
        architecture: "Qwen3ForCausalLM".to_owned(),
        weights: 16_381_470_720,
        kv_bytes: Some(147_456),
        context: Some(40_960),
        cache: None,
    }
}

#[test]
fn gguf_files_on_a_machine_without_a_gpu_become_a_valid_file_with_reasons() {
    let folder = tempfile::tempdir().unwrap();
    gguf(folder.path(), "Tiny Chat.Q4.gguf", &GgufBuilder::model("llama"));
    gguf(folder.path(), "embed.gguf", &GgufBuilder::model("bert").number("bert.pooling_type", 2));
    let server = program(ServerProgram::LlamaServer, None, &["--alias"]);
    let proposal = on_cpu(machine(folder.path(), vec![server]));
    let (text, config) = parsed(&proposal);
    let names: Vec<_> = config.core.models.iter().map(|model| model.name.to_string()).collect();
    assert_eq!(names, ["tiny-chat.q4", "embed"]);
    let chat = engine(&config, "tiny-chat.q4");
    let path = folder.path().join("Tiny Chat.Q4.gguf").display().to_string();
    assert_eq!(chat.command[..3], ["/usr/bin/llama-server", "-m", &path]);
    let rest = ["-c", "2048", "--alias", "tiny-chat.q4", "--host", "${HOST}", "--port", "${PORT}"];
    assert_eq!(chat.command[3..], rest);
    assert!(engine(&config, "embed").command.contains(&"--embedding".to_owned()));
    assert_eq!(config.core.accelerators[0].capacity, Bytes::gib(11));
    assert_eq!(rouse_config::check(&config), rouse_config::CheckFindings::default(), "{text}");
    for reason in [
        "because there is no driver",
        "Estimated until it is measured, from: weights",
        "rouse-gateway measure",
    ] {
        assert!(text.replace("\n# ", " ").replace("\n    # ", " ").contains(reason), "{reason}\n{text}");
    }
}

#[test]
fn the_python_server_is_taken_where_there_is_no_other_one() {
    let folder = tempfile::tempdir().unwrap();
    gguf(folder.path(), "tiny.gguf", &GgufBuilder::model("llama"));
    gguf(folder.path(), "rank.gguf", &GgufBuilder::model("bert").number("bert.pooling_type", 4));
    let python = program(ServerProgram::LlamaCppPython, Some(false), &["--interrupt_requests"]);
    let proposal = on_cpu(machine(folder.path(), vec![python]));
    let (text, config) = parsed(&proposal);
    assert_eq!(config.core.models[0].max_concurrency, Some(1));
    assert!(engine(&config, "tiny").command.windows(2).any(|pair| pair == ["--interrupt_requests", "false"]));
    assert_eq!(rouse_config::check(&config), rouse_config::CheckFindings::default(), "{text}");
    assert!(proposal.left_out[0].why.contains("install llama-server"), "{:?}", proposal.left_out);
}

#[test]
fn snapshots_on_a_gpu_sleep_if_their_engine_can() {
    let machine = |flags: &[&str]| FoundMachine {
        programs: vec![program(ServerProgram::Vllm, Some(true), flags)],
        snapshots: vec![large("Qwen/Qwen3-8B"), large("other/Qwen3-8B")],
        ..FoundMachine::default()
    };
    let (text, config) = parsed(&on_gpu(machine(&[VLLM_SLEEP_FLAG]), 1, Bytes::gib(80)));
    let names: Vec<_> = config.core.models.iter().map(|model| model.name.to_string()).collect();
    assert_eq!(names, ["qwen3-8b", "qwen3-8b-2"]);
    assert!(config.accelerators_auto && config.core.models.iter().all(|model| model.can_sleep));
    assert_eq!(engine(&config, "qwen3-8b-2").served_name, "other/Qwen3-8B");
    assert_eq!(rouse_config::check(&config), rouse_config::CheckFindings::default(), "{text}");
    let (text, config) = parsed(&on_gpu(machine(&[]), 1, Bytes::gib(80)));
    assert!(!config.core.models[0].can_sleep, "{text}");
    let (_, config) = parsed(&on_gpu(machine(&[VLLM_SLEEP_FLAG]), 2, Bytes::gib(16)));
    let command = &engine(&config, "qwen3-8b").command;
    assert!(command.windows(2).any(|pair| pair == ["--tensor-parallel-size", "2"]), "{command:?}");
}

#[test]
fn an_sglang_without_a_copy_of_the_weights_sleeps_at_level_2() {
    let machine = FoundMachine {
        programs: vec![program(ServerProgram::Sglang, Some(true), &["--enable-memory-saver"])],
        snapshots: vec![large("Qwen/Qwen3-8B")],
        ..FoundMachine::default()
    };
    let (text, config) = parsed(&on_gpu(machine, 1, Bytes::gib(80)));
    assert_eq!(rouse_config::check(&config), rouse_config::CheckFindings::default(), "{text}");
    assert!(text.contains("idle: {level: 2}"));
}

#[test]
fn what_cannot_be_served_is_left_out_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    gguf(folder.path(), "tiny.gguf", &GgufBuilder::model("llama"));
    let why = |proposal: &ConfigProposal| {
        parsed(proposal);
        proposal.left_out.iter().map(|one| one.why.clone()).collect::<Vec<_>>().join("; ")
    };
    let none = on_cpu(machine(folder.path(), Vec::new()));
    assert!(why(&none).contains("no llama-server and no llama_cpp.server was found"));
    let vllm = program(ServerProgram::Vllm, Some(true), &[]);
    let for_cpu = program(ServerProgram::LlamaServer, Some(false), &[]);
    let mixed = on_gpu(machine(folder.path(), vec![vllm.clone(), for_cpu]), 1, Bytes::gib(24));
    assert!(why(&mixed).contains("was built without support for the GPU"));
    let odd = SnapshotModel { architecture: "FluxTransformer2D".to_owned(), ..large("a/b") };
    let machine = FoundMachine {
        programs: vec![vllm],
        snapshots: vec![odd, large("Qwen/Qwen3-8B")],
        ..FoundMachine::default()
    };
    let small = why(&on_gpu(machine, 1, Bytes::gib(8)));
    assert!(
        small.contains("none that serves text") && small.contains("at most 7Gi can be reserved"),
        "{small}"
    );
}

#[test]
fn a_machine_with_nothing_gets_a_valid_file_with_an_example_and_the_places_that_were_searched() {
    let proposal =
        on_cpu(FoundMachine { searched: vec!["GGUF files in /m".to_owned()], ..FoundMachine::default() });
    let (text, config) = parsed(&proposal);
    assert!(config.core.models.is_empty() && text.contains("# * GGUF files in /m"), "{text}");
    // The example is one that works.
    let (before, example) = text.split_once("models: []\n").unwrap();
    let (_, example) = example.split_once('\n').unwrap();
    let example: Vec<_> = example.lines().map(|line| line.strip_prefix("# ").unwrap()).collect();
    let config = rouse_config::parse(&format!("{before}{}\n", example.join("\n")), "t").unwrap();
    assert_eq!(rouse_config::check(&config), rouse_config::CheckFindings::default());
}

#[test]
fn paths_with_anything_in_them_reach_the_engine_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let odd = folder.path().join("a ${HOST} $${x} \"b\" #c: 'd'\\");
    std::fs::create_dir(&odd).unwrap();
    gguf(&odd, "m.gguf", &GgufBuilder::model("llama"));
    let server = program(ServerProgram::LlamaServer, None, &[]);
    let (_, config) = parsed(&on_cpu(machine(folder.path(), vec![server])));
    let command = engine(&config, "m").command_line(1, "127.0.0.1".parse().unwrap(), 0.5, Bytes::ZERO);
    assert_eq!(command[2], odd.join("m.gguf").display().to_string());
}

#[test]
fn a_machine_with_little_ram_keeps_a_part_of_it_free() {
    let choice = AcceleratorChoice::of(&[], "", Bytes::gib(2), &[]);
    let AcceleratorChoice::Cpu { memory, headroom, .. } = &choice else { panic!("{choice:?}") };
    assert_eq!((*memory, *headroom), (Bytes::mib(1536), Bytes::mib(192)));
    assert_eq!(choice.summary(), "none, engines compute on the CPU with 1.50Gi of RAM");
}
