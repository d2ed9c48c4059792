//! Converts the engine settings of an InferenceModel.

use std::sync::Arc;

use rouse::{
    model::{ModelName, RehearsalPolicy, SleepLevelPolicy},
    saturation::EngineTokenLimits,
};
use rouse_config::{
    OnDisconnect, PassthroughPath, batch_limits_by_command, has_lora_by_command, kind_name, sets_kv_cache,
    sleep_api_by_command,
};
use rouse_net::adapter::{EngineKind, ProbeTask, SleepApi};

use super::{ModelHosting, Rejection, pod_template, spec_reader::SpecReader};
use crate::crd::{
    InferenceModelSpec, PodTemplateJson,
    inference_model::{self as written, RehearsalSpec, ServingMode, SleepLevelSpec, SleepMode},
};

pub(super) fn engine(
    reader: &mut SpecReader,
    spec: &InferenceModelSpec,
    name: ModelName,
    run: Option<&ModelHosting>,
) -> rouse_config::EngineConfig {
    let kind = kind(spec.engine.kind);
    let sleep = sleep(spec.engine.sleep_mode, kind, run);
    if sleep == SleepApi::None
        && matches!(spec.engine.level, SleepLevelSpec::One | SleepLevelSpec::Two)
        && run.is_some()
    {
        reader.reject_spec(
            "engine.level 1 and 2 need an engine that can sleep: set engine.sleepMode, or in mode dualPods start \
             vllm with --enable-sleep-mode or sglang with --enable-memory-saver",
        );
    }
    let of_stub = match kind {
        EngineKind::Vllm => SleepApi::Vllm,
        EngineKind::Sglang => SleepApi::Sglang,
        EngineKind::LlamaCpp | EngineKind::Custom => SleepApi::None,
    };
    if matches!(run, Some(ModelHosting::Deployment(_))) && sleep != SleepApi::None && sleep != of_stub {
        reader.reject_spec(
            "in mode deployment, engine.sleepMode must match engine.kind: set vllm for vllm, sglang for sglang, and \
             none for other kinds",
        );
    }
    let served_name = spec.engine.served_name.clone().unwrap_or_else(|| name.to_string());
    rouse_config::EngineConfig {
        fingerprint: run.map_or(0, |run| {
            pod_template::fingerprint(run, kind_name(kind), &served_name, &spec.node_selector)
        }),
        served_name,
        name,
        kind,
        command: Vec::new(),
        env: std::collections::BTreeMap::new(),
        task: task(spec.engine.task),
        on_disconnect: match spec.engine.on_disconnect {
            written::OnDisconnectSpec::Abort => OnDisconnect::Abort,
            written::OnDisconnectSpec::Drain => OnDisconnect::Drain,
        },
        api_key: None,
        stub: !matches!(run, Some(ModelHosting::External(_))),
        backend_origin: match run {
            Some(ModelHosting::External(backend)) => Some(Arc::new(backend.origin())),
            _ => None,
        },
        allow_public: true,
        sleep,
        passthrough: passthrough(reader, &spec.engine.passthrough, kind),
    }
}

/// Whether the engine's memory use is fixed rather than measured at start.
///
/// True if the command sets the KV cache's bytes, or if the kind does not measure free memory when it starts.
pub(super) fn explicit_memory(kind: written::EngineKindSpec, run: &ModelHosting) -> bool {
    match kind {
        written::EngineKindSpec::LlamaCpp | written::EngineKindSpec::Custom => true,
        written::EngineKindSpec::Vllm | written::EngineKindSpec::Sglang => {
            sets_kv_cache(&pod_template::command(run))
        }
    }
}

fn sleep(mode: SleepMode, kind: EngineKind, run: Option<&ModelHosting>) -> SleepApi {
    match (mode, run) {
        (_, Some(ModelHosting::External(_)) | None) | (SleepMode::None, _) => SleepApi::None,
        (SleepMode::Vllm, _) => SleepApi::Vllm,
        (SleepMode::Sglang, _) => SleepApi::Sglang,
        (SleepMode::Auto, Some(run @ ModelHosting::DualPods(_))) => {
            sleep_api_by_command(kind, false, &pod_template::command(run))
        }
        // The engine's Pod would hold the accelerator even while asleep, so sleeping would free it for no other Pod.
        (SleepMode::Auto, Some(ModelHosting::Deployment(_))) => SleepApi::None,
    }
}

fn passthrough(reader: &mut SpecReader, paths: &[String], kind: EngineKind) -> Vec<PassthroughPath> {
    if kind != EngineKind::Custom && !paths.is_empty() {
        reader.reject_spec(
            "engine.passthrough is only for custom engines: remove it, because Rouse knows the paths of the other \
             kinds",
        );
    }
    let mut all = Vec::with_capacity(paths.len());
    for path in paths {
        match PassthroughPath::parse(path) {
            Ok(passthrough) => all.push(passthrough),
            Err(error) => {
                reader.reject(Rejection::Spec(format!(
                    "engine.passthrough '{}': {error}",
                    path.escape_debug()
                )));
            }
        }
    }
    all
}

const fn kind(kind: written::EngineKindSpec) -> EngineKind {
    match kind {
        written::EngineKindSpec::Vllm => EngineKind::Vllm,
        written::EngineKindSpec::Sglang => EngineKind::Sglang,
        written::EngineKindSpec::LlamaCpp => EngineKind::LlamaCpp,
        written::EngineKindSpec::Custom => EngineKind::Custom,
    }
}

const fn task(task: written::ProbeTaskSpec) -> ProbeTask {
    match task {
        written::ProbeTaskSpec::Generate => ProbeTask::Generate,
        written::ProbeTaskSpec::Embed => ProbeTask::Embed,
        written::ProbeTaskSpec::Score => ProbeTask::Score,
        written::ProbeTaskSpec::Transcribe => ProbeTask::Transcribe,
        written::ProbeTaskSpec::None => ProbeTask::None,
    }
}

pub(super) const fn level(level: SleepLevelSpec) -> SleepLevelPolicy {
    match level {
        SleepLevelSpec::One => SleepLevelPolicy::One,
        SleepLevelSpec::Two => SleepLevelPolicy::Two,
        SleepLevelSpec::Auto => SleepLevelPolicy::Auto,
        SleepLevelSpec::Never => SleepLevelPolicy::Never,
    }
}

/// Reads when an engine rehearses its sleep, which is only for engines that may sleep at level 1, and not for mode
/// dualPods.
///
/// There the pairing controller reserves only the residue of a sleeping engine, and another requester of its
/// accelerators could take the rest before the engine wakes.
pub(super) fn rehearsal(
    reader: &mut SpecReader,
    spec: &InferenceModelSpec,
    can_sleep: bool,
) -> RehearsalPolicy {
    let rehearsal = match spec.engine.rehearse {
        RehearsalSpec::Start => RehearsalPolicy::Start,
        RehearsalSpec::Idle => RehearsalPolicy::Idle,
        RehearsalSpec::Never => RehearsalPolicy::Never,
    };
    if rehearsal == RehearsalPolicy::Never {
        return rehearsal;
    }
    if spec.mode == ServingMode::DualPods {
        reader.reject_spec(
            "engine.rehearse is not for mode dualPods: remove it, because another requester could take the memory \
             of an engine that sleeps there",
        );
    } else if !can_sleep {
        reader.reject_spec(
            "engine.rehearse needs an engine that can sleep: remove it, or in mode deployment set engine.sleepMode",
        );
    } else if matches!(spec.engine.level, SleepLevelSpec::Two | SleepLevelSpec::Never) {
        reader.reject_spec(
            "engine.rehearse is only for sleeps at level 1: remove it, or set engine.level to 1 or auto",
        );
    }
    rehearsal
}

/// Returns the limits of a batch, which only the command of a vLLM says; `None` if the template has no command.
pub(super) fn batch_limits(
    kind: written::EngineKindSpec,
    run: Option<&ModelHosting>,
    variant_template: Option<&PodTemplateJson>,
) -> Option<EngineTokenLimits> {
    let run = run.filter(|_| kind == written::EngineKindSpec::Vllm && !names_server_config(run))?;
    Some(batch_limits_by_command(&pod_template::command_of(run, variant_template)))
}

/// Whether the engine's template starts it with LoRA adapters, which level 2 loses.
///
/// An engine of an InferenceServerConfig has no command in a template; [`crate::dual_pods`] checks the command of the
/// config.
pub(super) fn has_adapters(
    kind: written::EngineKindSpec,
    run: Option<&ModelHosting>,
    variant_template: Option<&PodTemplateJson>,
) -> bool {
    let command = || run.map(|run| pod_template::command_of(run, variant_template)).unwrap_or_default();
    matches!(kind, written::EngineKindSpec::Vllm)
        && !names_server_config(run)
        && has_lora_by_command(&command())
}

/// Whether the engine's command is that of an InferenceServerConfig, and not that of a template.
fn names_server_config(run: Option<&ModelHosting>) -> bool {
    matches!(run, Some(ModelHosting::DualPods(pods)) if pods.has_server_config())
}

/// Returns the level policy of an engine whose weights do not fit into its Pod's memory limit.
pub(super) const fn without_host_memory(level: SleepLevelPolicy) -> SleepLevelPolicy {
    match level {
        SleepLevelPolicy::One | SleepLevelPolicy::Two | SleepLevelPolicy::Auto => SleepLevelPolicy::Two,
        SleepLevelPolicy::OneOrStop | SleepLevelPolicy::Never => SleepLevelPolicy::Never,
    }
}
