//! Proposes an engine of vLLM or SGLang for a model in the format of Hugging Face.

use rouse::units::Bytes;

use super::{
    HOST, MEMORY_FRACTION, ModelTask, PORT, ProposedModel, arguments, context_note, escape, plain_name,
    program_note,
};
use crate::cli::{
    detect::{
        programs::{FoundProgram, SGLANG_BACKUP_FLAG, SGLANG_SLEEP_FLAG, ServerProgram, VLLM_SLEEP_FLAG},
        snapshots::SnapshotModel,
    },
    init::{
        accelerator_choice::AcceleratorChoice,
        estimate::{EngineOverhead, MemoryEstimate, ModelSize, estimate, round_up},
    },
};

/// What a sleeping engine keeps until it is measured: context, graphs and what the driver holds for it.
const RESIDUE: Bytes = Bytes::gib(2);

pub(super) fn propose(
    model: &SnapshotModel,
    accelerators: &AcceleratorChoice,
    programs: &[FoundProgram],
) -> Result<ProposedModel, String> {
    let task = task_of(&model.architecture)
        .ok_or_else(|| format!("its architecture, {}, is none that serves text", model.architecture))?;
    let of = |server: ServerProgram| programs.iter().find(|program| program.program == server);
    let sglang = || of(ServerProgram::Sglang).filter(|_| task != ModelTask::Transcribe);
    let program =
        of(ServerProgram::Vllm).or_else(sglang).ok_or("no vLLM and no SGLang was found to run it")?;
    if !accelerators.is_detected() {
        return Err(format!("{} needs a GPU of NVIDIA's here", program.program.label()));
    }
    let size = ModelSize {
        weights: model.weights,
        kv_bytes: model.kv_bytes,
        context: model.context,
        vocabulary: None,
    };
    let (capacity, most) = accelerators.capacity();
    let estimated = estimate(&size, EngineOverhead::Framework, capacity, most)?;
    let mut notes = vec![program_note(program)];
    notes.push(context_note(&estimated, model.context));
    let (arguments, sleep_flag) = if program.program == ServerProgram::Vllm {
        (vllm_arguments(model, &estimated), VLLM_SLEEP_FLAG)
    } else {
        (sglang_arguments(model, &estimated), SGLANG_SLEEP_FLAG)
    };
    let mut command = [program.command.clone(), arguments].concat();
    let can_sleep = program.takes(sleep_flag);
    let mut idle_level = None;
    if can_sleep {
        command.push(sleep_flag.to_owned());
        notes.push(format!("{sleep_flag} lets the engine sleep, so that a wake takes seconds."));
        if program.program == ServerProgram::Sglang && program.takes(SGLANG_BACKUP_FLAG) {
            command.push(SGLANG_BACKUP_FLAG.to_owned());
        } else if program.program == ServerProgram::Sglang {
            notes.push(format!("Without {SGLANG_BACKUP_FLAG}, only level 2 restores the weights."));
            idle_level = Some(2);
        }
    } else {
        notes.push(format!(
            "This {} has no {sleep_flag}: it is stopped instead of put to sleep.",
            program.title()
        ));
    }
    let context = model.context.map_or_else(String::new, |context| format!(", context up to {context}"));
    let host = round_up(Bytes((model.weights / 20 * 21).div_ceil(u64::from(estimated.accelerators))));
    Ok(ProposedModel {
        name: plain_name(model.id.rsplit('/').next().unwrap_or_default()),
        source: format!("{}: {}, {}{context}", model.id, model.architecture, Bytes(model.weights)),
        engine: if program.program == ServerProgram::Vllm { "vllm" } else { "sglang" },
        command: command.iter().map(|word| escape(word)).collect(),
        notes,
        env: environment(model, program, can_sleep),
        served_name: Some(escape(&model.id)),
        task: task.key(),
        start_timeout: None,
        awake: estimated.awake,
        awake_why: estimated.why,
        asleep: can_sleep.then_some((RESIDUE.min(estimated.awake), host)),
        accelerators: estimated.accelerators,
        max_concurrency: None,
        idle_level,
    })
}

fn vllm_arguments(model: &SnapshotModel, estimated: &MemoryEstimate) -> Vec<String> {
    let mut words = arguments(&["serve", &model.id, "--host", HOST, "--port", PORT]);
    words.extend(arguments(&["--gpu-memory-utilization", MEMORY_FRACTION]));
    if model.context.is_some() {
        words.extend(arguments(&["--max-model-len", &estimated.context.to_string()]));
    }
    if estimated.accelerators > 1 {
        words.extend(arguments(&["--tensor-parallel-size", &estimated.accelerators.to_string()]));
    }
    words
}

fn sglang_arguments(model: &SnapshotModel, estimated: &MemoryEstimate) -> Vec<String> {
    let mut words = arguments(&["--model-path", &model.id, "--host", HOST, "--port", PORT]);
    words.extend(arguments(&["--mem-fraction-static", MEMORY_FRACTION]));
    if model.context.is_some() {
        words.extend(arguments(&["--context-length", &estimated.context.to_string()]));
    }
    if estimated.accelerators > 1 {
        words.extend(arguments(&["--tp-size", &estimated.accelerators.to_string()]));
    }
    words
}

fn environment(
    model: &SnapshotModel,
    program: &FoundProgram,
    can_sleep: bool,
) -> Vec<(&'static str, String)> {
    let mut env = Vec::new();
    if program.program == ServerProgram::Vllm && can_sleep {
        env.push(("VLLM_SERVER_DEV_MODE", "1".to_owned()));
    }
    if !model.id.starts_with('/') {
        env.push(("HF_HUB_OFFLINE", "1".to_owned()));
    }
    if let Some(cache) = &model.cache {
        env.push(("HF_HUB_CACHE", escape(&cache.to_string_lossy())));
    }
    env
}

/// Returns what the name of the architecture says about requests.
fn task_of(name: &str) -> Option<ModelTask> {
    if name.starts_with("Whisper") {
        return Some(ModelTask::Transcribe);
    }
    let endings = [
        ("ForCausalLM", ModelTask::Generate),
        ("ForConditionalGeneration", ModelTask::Generate),
        ("ForSequenceClassification", ModelTask::Score),
        ("Model", ModelTask::Embed),
    ];
    endings.iter().find(|(ending, _)| name.ends_with(ending)).map(|(_, task)| *task)
}
