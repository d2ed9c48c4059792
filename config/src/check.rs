//! Finds settings that are legal and will not work as intended.

mod pins;

use std::net::IpAddr;

use rouse::{
    model::{AcceleratorId, AcceleratorRequirement, FleetConfig, ModelName, ModelSpec, SleepLevelPolicy},
    units::{Bytes, Millis, pluralize},
};

use super::{
    Config, ConfigProblem, EngineConfig, EngineKind, SleepApi, SourceLocation, TlsConfig, command_options,
};

/// SGLang's flag for a copy of the weights in RAM while the engine sleeps at level 1.
const WEIGHTS_BACKUP_FLAG: &str = "--enable-weights-cpu-backup";

/// Findings of `check` for a valid file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckFindings {
    /// Models that can never run.
    ///
    /// `check` fails on them. A running gateway refuses their requests and serves the others, since an accelerator that
    /// is missing today is no reason to stop everything.
    pub errors: Vec<ConfigProblem>,
    pub warnings: Vec<ConfigProblem>,
}

/// Checks everything that can be known without starting an engine.
///
/// Memory is checked only if `accelerators: auto` has been filled in.
#[must_use]
pub fn check(config: &Config) -> CheckFindings {
    let location = |name: &ModelName| config.model_locations.get(name).copied().unwrap_or_default();
    let mut warnings = check_settings(config);
    warnings.extend(config.tls.as_ref().and_then(TlsConfig::validity_warning));
    for spec in &config.core.models {
        let mut warn = |text: String| {
            warnings.push(ConfigProblem::new(location(&spec.name), format!("model '{}': {text}", spec.name)));
        };
        check_wait_limits(config, spec, &mut warn);
        check_sleep_level(config, spec, &mut warn);
        check_saturation(config, spec, &mut warn);
        if let Some(model) = config.engines.get(&spec.name) {
            check_engine(model, &mut warn);
            check_weights_backup(model, spec.idle.level, &mut warn);
        }
    }
    let unknown = config.accelerators_auto && config.core.accelerators.is_empty();
    let errors = if unknown { Vec::new() } else { unplaceable_models(config) };
    CheckFindings {
        errors: errors
            .into_iter()
            .map(|(name, why)| ConfigProblem::new(location(&name), format!("model '{name}': {why}")))
            .collect(),
        warnings,
    }
}

/// Returns the models that can never be awake, and why.
///
/// Either a model fits nowhere even with everything else evicted, or pinned models occupy all its possible places.
#[must_use]
pub fn unplaceable_models(config: &Config) -> Vec<(ModelName, String)> {
    let core = &config.core;
    let misfit = |spec: &ModelSpec| unplaceable_reason(core, config.headroom, spec);
    let mut all: Vec<_> =
        core.models.iter().filter_map(|spec| misfit(spec).map(|why| (spec.name.clone(), why))).collect();
    all.extend(pins::unplaceable_pinned(core, |spec| misfit(spec).is_none()));
    all
}

fn unplaceable_reason(core: &FleetConfig, headroom: Bytes, spec: &ModelSpec) -> Option<String> {
    let need = spec.memory.awake;
    let (count, mut capacities): (usize, Vec<Bytes>) = match &spec.accelerators {
        AcceleratorRequirement::Count(count) => (
            usize::try_from(*count).unwrap_or(usize::MAX),
            core.accelerators.iter().map(|device| device.capacity).collect(),
        ),
        AcceleratorRequirement::Ids(ids) => {
            let found = |id: &AcceleratorId| core.accelerators.iter().find(|device| device.id == *id);
            if let Some(missing) = ids.iter().find(|id| found(id).is_none()) {
                return Some(format!("there is no accelerator '{missing}'"));
            }
            let capacities = ids.iter().filter_map(found).map(|device| device.capacity);
            (ids.len(), capacities.collect())
        }
        // The file has no syntax for this.
        AcceleratorRequirement::InPool { .. } | AcceleratorRequirement::Slots { .. } => return None,
    };
    if capacities.len() < count {
        return Some(match capacities.len() {
            0 => format!(
                "needs {}, but there are none: list the machine's accelerators under accelerators",
                pluralize(count, "accelerator")
            ),
            1 => format!("needs {count} accelerators, but there is only one: set accelerators: 1"),
            number => format!(
                "needs {count} accelerators, but there are only {number}: set accelerators: {number} or less"
            ),
        });
    }
    capacities.sort_unstable_by(|a, b| b.cmp(a));
    let most = *count.checked_sub(1).and_then(|last| capacities.get(last))?;
    if most >= need {
        return None;
    }
    let target =
        if count == 1 { "one accelerator".to_owned() } else { format!("each of {count} accelerators") };
    let headroom_note = if headroom == Bytes::ZERO {
        String::new()
    } else {
        format!(" (headroom keeps {headroom} free on each)")
    };
    // Without the headroom the model would fit.
    let instead = if need <= most + headroom { ", or a smaller headroom" } else { "" };
    Some(format!(
        "needs {need} on {target}, but at most {most} can be reserved there{headroom_note}: set memory.awake: {most} or \
         less{instead}"
    ))
}

fn check_settings(config: &Config) -> Vec<ConfigProblem> {
    let mut warnings = Vec::new();
    let mut warn = |text: &str| warnings.push(ConfigProblem::new(SourceLocation::default(), text));
    if config.core.models.is_empty() && config.kubernetes.is_none() {
        warn("no models are configured: every request gets a 404");
    }
    if !config.api.ip().is_loopback() && !config.keys_none && config.keys.is_empty() {
        let everywhere = config.api.ip() == IpAddr::from([0, 0, 0, 0]);
        warn(&format!(
            "listen.api is {}{} and there are no keys: anyone who can reach this address can use the API; add keys, or set keys: none if that is intended",
            config.api,
            if everywhere { ", every interface," } else { "" },
        ));
    }
    for network in config.proxies.networks.iter().filter(|network| network.is_everything()) {
        warn(&format!(
            "listen.proxies.networks has {network}: any client can claim any address, so no limit by address holds; list \
             only the networks of your proxies"
        ));
    }
    if let Some(text) = turn_length_warning(config) {
        warn(&text);
    }
    warnings.extend_from_slice(&config.key_warnings);
    warnings
}

/// Compares the longest turn with the shortest wait.
///
/// No times are known before the first start, so the timeouts of sleep and wake stand in for them.
fn turn_length_warning(config: &Config) -> Option<String> {
    let settings = &config.core.settings;
    let turns = &settings.turns;
    // The request with the shortest limit times out first.
    let max_wait = config.core.models.iter().map(|spec| settings.max_wait_of(spec)).min()?;
    let swap = if config.core.models.iter().any(|spec| spec.can_sleep) {
        settings.timeouts.sleep + settings.timeouts.wake
    } else {
        settings.timeouts.stop_grace
    };
    let turn: Millis = turns.max_turn + turns.drain_deadline + swap;
    (config.core.models.len() > 1 && turn > max_wait).then(|| {
        format!(
            "turns.maxTurn ({}), turns.drain.deadline ({}) and a swap (at most {swap}) exceed queue.maxWait \
             ({max_wait}): a request behind one busy model can time out in the queue",
            turns.max_turn, turns.drain_deadline
        )
    })
}

/// Warns if requests time out before a slow start can complete.
fn check_wait_limits(config: &Config, spec: &ModelSpec, warn: &mut impl FnMut(String)) {
    let settings = &config.core.settings;
    let max_wait = settings.max_wait_of(spec);
    if spec.start_timeout > max_wait {
        warn(format!(
            "engine.startTimeout ({}) exceeds queue.maxWait ({max_wait}): requests that wait for a slow start are \
             rejected before the engine is ready",
            spec.start_timeout
        ));
    }
}

fn check_sleep_level(config: &Config, spec: &ModelSpec, warn: &mut impl FnMut(String)) {
    let budget = config.core.settings.host_memory;
    let accelerators = match &spec.accelerators {
        AcceleratorRequirement::Count(count)
        | AcceleratorRequirement::InPool { count, .. }
        | AcceleratorRequirement::Slots { count, .. } => u64::from(*count),
        AcceleratorRequirement::Ids(ids) => ids.len() as u64,
    };
    let host = Bytes(spec.memory.host.0.saturating_mul(accelerators));
    let instead = match spec.idle.level {
        SleepLevelPolicy::One => "the engine will sleep at level 2 instead",
        SleepLevelPolicy::OneOrStop => {
            "the engine will be stopped instead, because level 2 loses its adapters"
        }
        _ => return,
    };
    if spec.can_sleep && host > budget {
        let text = "the engine cannot sleep at level 1, because memory.host";
        warn(format!("{text} ({host} in total) exceeds host.sleepMemory ({budget}): {instead}"));
    }
}

fn check_saturation(config: &Config, spec: &ModelSpec, warn: &mut impl FnMut(String)) {
    if !config.saturation.models.contains_key(&spec.name) {
        return;
    }
    if spec.replicas < 2 {
        warn("saturation has nothing to scale: set replicas, the most engines that may run".to_owned());
    }
    let (window, every) = (config.saturation.settings.window, config.timeouts.health_every);
    if window < every {
        warn(format!(
            "saturation.window ({window}) is shorter than timeouts.health.every ({every}), at which idle engines report \
             their load: while the load of one is unknown, no engine is ended"
        ));
    }
}

fn check_engine(model: &EngineConfig, warn: &mut impl FnMut(String)) {
    let words: Vec<_> = model.command.iter().flat_map(|text| text.split_whitespace()).collect();
    let has = |word: &str| words.contains(&word);
    match model.kind {
        // The stub's controller puts the engine to sleep.
        EngineKind::Vllm | EngineKind::Sglang if model.stub => {}
        EngineKind::Vllm => {
            if model.sleep == SleepApi::None {
                warn(
                    "the command has no --enable-sleep-mode: the engine is stopped and started instead of put to \
                     sleep and woken"
                        .to_owned(),
                );
            } else if model.env.get("VLLM_SERVER_DEV_MODE").is_none_or(|value| value != "1") {
                warn(
                    "env does not set VLLM_SERVER_DEV_MODE: \"1\", so vLLM serves no /sleep and /wake_up: add it"
                        .to_owned(),
                );
            }
            if let Some(share) = model.memory_utilization() {
                warn(format!(
                    "the command has --gpu-memory-utilization {share}: vLLM takes that share of each accelerator, and \
                     the gateway reserves the share if memory.awake is lower; use ${{MEMORY_FRACTION}} to keep both equal"
                ));
            } else if !model.uses("MEMORY_FRACTION") && !model.uses("KV_CACHE_BYTES") {
                warn(
                    "the command uses neither ${MEMORY_FRACTION} nor ${KV_CACHE_BYTES}: vLLM takes its default share \
                     of the accelerator, regardless of memory.awake"
                        .to_owned(),
                );
            }
        }
        EngineKind::Sglang if model.sleep == SleepApi::None => {
            warn(
                "the command has no --enable-memory-saver: the engine is stopped instead of put to sleep"
                    .to_owned(),
            );
        }
        EngineKind::LlamaCpp => {
            let python = words.iter().any(|word| word.contains("llama_cpp"));
            let interrupts_off = words.windows(2).any(
                |pair| matches!(pair, ["--interrupt_requests", off] if off.eq_ignore_ascii_case("false")),
            );
            if python && !interrupts_off && !has("--interrupt_requests=false") {
                warn(
                    "llama-cpp-python aborts a running request when another request arrives: add --interrupt_requests false"
                        .to_owned(),
                );
            }
        }
        EngineKind::Sglang | EngineKind::Custom => {}
    }
    if !model.uses("HOST") {
        warn(
            "neither command nor env uses ${HOST}: make sure that the engine listens on loopback only, or the \
             gateway rejects the engine after its start"
                .to_owned(),
        );
    }
}

/// Warns if an SGLang engine may sleep at level 1 and cannot restore its weights from there.
fn check_weights_backup(model: &EngineConfig, level: SleepLevelPolicy, warn: &mut impl FnMut(String)) {
    let may_use_level_1 = !matches!(level, SleepLevelPolicy::Two | SleepLevelPolicy::Never);
    if model.kind == EngineKind::Sglang
        && model.sleep == SleepApi::Sglang
        && may_use_level_1
        && !command_options::is_on(&model.command, WEIGHTS_BACKUP_FLAG)
    {
        warn(format!(
            "the command has no {WEIGHTS_BACKUP_FLAG}: SGLang does not restore its weights at a wake from level 1, and \
             the answers are noise; add it, or set idle: {{level: 2}}"
        ));
    }
}
