//! How an engine is spoken to.

use std::sync::Arc;

use rouse::{
    adapter::{Kind, SleepApi, Task},
    model::{LevelPolicy, ModelName},
};

use super::{Refusal, Run, pods, read::Reader};
use crate::{
    config::{self, OnDisconnect, Passage, adapters_by_command, kind_name, says_kv_cache, sleep_by_command},
    controllers::crd::{
        InferenceModelSpec, Template,
        inference_model::{self as written, Level, SleepMode},
    },
};

pub(super) fn engine(
    reader: &mut Reader,
    spec: &InferenceModelSpec,
    name: ModelName,
    run: Option<&Run>,
) -> config::Model {
    let kind = kind(spec.engine.kind);
    let sleep = sleep(spec.engine.sleep_mode, kind, run);
    if sleep == SleepApi::None && matches!(spec.engine.level, Level::One | Level::Two) && run.is_some() {
        reader.spec(
            "engine.level 1 and 2 are for engines that sleep: say engine.sleepMode, or give vllm --enable-sleep-mode \
             or sglang --enable-memory-saver in mode dualPods",
        );
    }
    let of_stub = match kind {
        Kind::Vllm => SleepApi::Vllm,
        Kind::Sglang => SleepApi::Sglang,
        Kind::LlamaCpp | Kind::Custom => SleepApi::None,
    };
    if matches!(run, Some(Run::Deployment(_))) && sleep != SleepApi::None && sleep != of_stub {
        reader.spec("engine.sleepMode in mode deployment is that of engine.kind: vllm sleeps as vllm, sglang as sglang");
    }
    let served_name = spec.engine.served_name.clone().unwrap_or_else(|| name.to_string());
    config::Model {
        fingerprint: run
            .map_or(0, |run| pods::fingerprint(run, kind_name(kind), &served_name, &spec.node_selector)),
        served_name,
        name,
        kind,
        command: Vec::new(),
        env: std::collections::BTreeMap::new(),
        task: task(spec.engine.task),
        on_disconnect: match spec.engine.on_disconnect {
            written::OnDisconnect::Abort => OnDisconnect::Abort,
            written::OnDisconnect::Drain => OnDisconnect::Drain,
        },
        api_key: None,
        stub: !matches!(run, Some(Run::External(_))),
        origin: match run {
            Some(Run::External(backend)) => Some(Arc::new(backend.origin())),
            _ => None,
        },
        allow_public: true,
        sleep,
        passage: passage(reader, &spec.engine.passage, kind),
    }
}

/// The engine was told its KV cache's bytes, or is of a kind that does not measure free memory when it starts.
pub(super) fn explicit_memory(kind: written::Kind, run: &Run) -> bool {
    match kind {
        written::Kind::LlamaCpp | written::Kind::Custom => true,
        written::Kind::Vllm | written::Kind::Sglang => says_kv_cache(&pods::command(run)),
    }
}

fn sleep(mode: SleepMode, kind: Kind, run: Option<&Run>) -> SleepApi {
    match (mode, run) {
        (_, Some(Run::External(_)) | None) | (SleepMode::None, _) => SleepApi::None,
        (SleepMode::Vllm, _) => SleepApi::Vllm,
        (SleepMode::Sglang, _) => SleepApi::Sglang,
        (SleepMode::Auto, Some(run @ Run::DualPods(_))) => sleep_by_command(kind, false, &pods::command(run)),
        // Its Pod would keep the accelerator from all others, asleep or not.
        (SleepMode::Auto, Some(Run::Deployment(_))) => SleepApi::None,
    }
}

fn passage(reader: &mut Reader, paths: &[String], kind: Kind) -> Vec<Passage> {
    if kind != Kind::Custom && !paths.is_empty() {
        reader.spec("engine.passage is for custom engines: the paths of the other kinds are known");
    }
    let mut all = Vec::with_capacity(paths.len());
    for path in paths {
        match Passage::parse(path) {
            Ok(passage) => all.push(passage),
            Err(error) => {
                reader.note(Refusal::Spec(format!("engine.passage '{}': {error}", path.escape_debug())));
            }
        }
    }
    all
}

const fn kind(kind: written::Kind) -> Kind {
    match kind {
        written::Kind::Vllm => Kind::Vllm,
        written::Kind::Sglang => Kind::Sglang,
        written::Kind::LlamaCpp => Kind::LlamaCpp,
        written::Kind::Custom => Kind::Custom,
    }
}

const fn task(task: written::Task) -> Task {
    match task {
        written::Task::Generate => Task::Generate,
        written::Task::Embed => Task::Embed,
        written::Task::Score => Task::Score,
        written::Task::Transcribe => Task::Transcribe,
        written::Task::None => Task::None,
    }
}

pub(super) const fn level(level: Level) -> LevelPolicy {
    match level {
        Level::One => LevelPolicy::One,
        Level::Two => LevelPolicy::Two,
        Level::Auto => LevelPolicy::Auto,
        Level::Never => LevelPolicy::Never,
    }
}

/// Whether the engine's template starts it with LoRA adapters, which level 2 loses. An engine of an InferenceServerConfig has no
/// command in a template; [`crate::pairing`] checks that one.
pub(super) fn has_adapters(kind: written::Kind, run: Option<&Run>, own: Option<&Template>) -> bool {
    let configured = matches!(run, Some(Run::DualPods(pods)) if pods.is_configured());
    let command = || run.map(|run| pods::command_of(run, own)).unwrap_or_default();
    matches!(kind, written::Kind::Vllm) && !configured && adapters_by_command(&command())
}

/// The level policy of an engine whose weights do not fit into its Pod's memory limit.
pub(super) const fn without_host_memory(level: LevelPolicy) -> LevelPolicy {
    match level {
        LevelPolicy::One | LevelPolicy::Two | LevelPolicy::Auto => LevelPolicy::Two,
        LevelPolicy::OnlyOne | LevelPolicy::Never => LevelPolicy::Never,
    }
}
