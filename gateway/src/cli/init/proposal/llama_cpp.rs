//! Proposes an engine of llama.cpp for a GGUF file.

use rouse::units::{Bytes, Millis, pluralize};

use super::{
    ALIAS, HOST, ModelTask, PORT, ProposedModel, arguments, context_note, escape, plain_name, program_note,
};
use crate::cli::{
    detect::{
        model_files::GgufModel,
        programs::{FoundProgram, PYTHON_INTERRUPT_FLAG, ServerProgram},
    },
    init::{
        accelerator_choice::AcceleratorChoice,
        estimate::{EngineOverhead, MemoryEstimate, ModelSize, estimate},
    },
};

/// A slow disk, in bytes per second. A start must not be ended for reading the weights.
const READ_RATE: u64 = 100_000_000;
/// Seconds that a start may take besides.
const MIN_START: u64 = 60;
/// `queue.maxWait` in seconds: requests that wait for a longer start would be refused before it is over.
const MAX_START: u64 = 540;

pub(super) fn propose(
    model: &GgufModel,
    accelerators: &AcceleratorChoice,
    programs: &[FoundProgram],
) -> Result<ProposedModel, String> {
    let on_gpu = accelerators.is_detected();
    let fits = |program: &&FoundProgram| !(on_gpu && program.uses_accelerators == Some(false));
    let servers = [ServerProgram::LlamaServer, ServerProgram::LlamaCppPython];
    let mut found =
        servers.iter().filter_map(|server| programs.iter().find(|program| program.program == *server));
    let program = found.clone().find(fits).ok_or_else(|| match found.next() {
        Some(program) => format!("{} was built without support for the GPU", program.title()),
        None => "no llama-server and no llama_cpp.server was found to run it".to_owned(),
    })?;
    let task = task_of(model);
    let is_python = program.program == ServerProgram::LlamaCppPython;
    if is_python && task == ModelTask::Score {
        return Err(
            "it ranks texts, which the server of llama-cpp-python cannot: install llama-server".to_owned()
        );
    }
    let header = &model.header;
    let size = ModelSize {
        weights: model.weights,
        kv_bytes: header.kv_bytes,
        context: header.context,
        vocabulary: header.vocabulary,
    };
    let overhead = if is_python { EngineOverhead::LlamaCppPython } else { EngineOverhead::LlamaServer };
    let (capacity, most) = accelerators.capacity();
    let estimated = estimate(&size, overhead, capacity, most)?;
    let mut command = program.command.clone();
    let mut notes = vec![program_note(program)];
    command.extend(if is_python {
        python_arguments(model, program, &estimated, task, on_gpu)
    } else {
        server_arguments(model, program, &estimated, task, on_gpu)
    });
    notes.push(context_note(&estimated, header.context));
    if on_gpu {
        notes.push("99 layers on the GPU are all of them.".to_owned());
    }
    let (path, context) = (
        model.path.display(),
        header.context.map_or_else(String::new, |context| format!(", trained for a context of {context}")),
    );
    let parts =
        if model.parts > 1 { format!(" in {}", pluralize(model.parts, "file")) } else { String::new() };
    Ok(ProposedModel {
        name: plain_name(&model.name),
        source: format!("{path}: {}, {}{parts}{context}", header.architecture, Bytes(model.weights)),
        engine: "llama-cpp",
        command: command.iter().map(|word| escape(word)).collect(),
        notes,
        env: Vec::new(),
        served_name: None,
        task: task.key(),
        start_timeout: Some(start_timeout(model.weights)),
        awake: estimated.awake,
        awake_why: estimated.why,
        asleep: None,
        accelerators: estimated.accelerators,
        max_concurrency: is_python.then_some(1),
        idle_level: None,
    })
}

fn server_arguments(
    model: &GgufModel,
    program: &FoundProgram,
    estimated: &MemoryEstimate,
    task: ModelTask,
    on_gpu: bool,
) -> Vec<String> {
    let context = estimated.context.to_string();
    let mut words = arguments(&["-m", &model.path.to_string_lossy(), "-c", &context]);
    if program.takes("--alias") {
        words.extend(arguments(&["--alias", ALIAS]));
    }
    if let Some(projector) = &model.projector {
        words.extend(arguments(&["--mmproj", &projector.to_string_lossy()]));
    }
    if on_gpu {
        words.extend(arguments(&["-ngl", "99"]));
    }
    match task {
        ModelTask::Embed => words.extend(arguments(&["--embedding"])),
        ModelTask::Score => words.extend(arguments(&["--reranking"])),
        ModelTask::Generate | ModelTask::Transcribe => {}
    }
    words.extend(arguments(&["--host", HOST, "--port", PORT]));
    words
}

fn python_arguments(
    model: &GgufModel,
    program: &FoundProgram,
    estimated: &MemoryEstimate,
    task: ModelTask,
    on_gpu: bool,
) -> Vec<String> {
    let context = estimated.context.to_string();
    let path = model.path.to_string_lossy();
    let mut words = arguments(&["--model", &path, "--model_alias", ALIAS, "--n_ctx", &context]);
    if program.takes(PYTHON_INTERRUPT_FLAG) {
        words.extend(arguments(&[PYTHON_INTERRUPT_FLAG, "false"]));
    }
    if on_gpu {
        words.extend(arguments(&["--n_gpu_layers", "99"]));
    }
    if task == ModelTask::Embed {
        words.extend(arguments(&["--embedding", "true"]));
    }
    words.extend(arguments(&["--host", HOST, "--port", PORT]));
    words
}

/// Returns what the metadata says about requests.
fn task_of(model: &GgufModel) -> ModelTask {
    let architecture = model.header.architecture.as_str();
    match model.header.pooling {
        // The numbers of llama.cpp: 1 to 3 are ways to embed, 4 ranks.
        Some(4) => ModelTask::Score,
        Some(1..=3) => ModelTask::Embed,
        _ if architecture.contains("bert") || architecture == "t5encoder" => ModelTask::Embed,
        _ => ModelTask::Generate,
    }
}

/// Returns how long a start may take, by the size of what it reads.
fn start_timeout(weights: u64) -> String {
    let seconds = (MIN_START + weights / READ_RATE).min(MAX_START);
    Millis::secs(seconds).to_string()
}
