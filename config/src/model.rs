//! Reads `models`: each entry's input to the decisions. [`super::engine`] reads how its engine is run.

use std::{collections::BTreeMap, sync::Arc};

use rouse::{
    model::{
        Accelerator, AcceleratorId, AcceleratorRequirement, EngineMemory, IdlePolicy, ModelName, ModelSpec,
        RehearsalPolicy, ScaleUpEviction, SleepLevelPolicy,
    },
    saturation::Thresholds,
    units::{Bytes, Millis},
};

use super::{
    EngineConfig, LORA_AT_LEVEL_2, SleepApi, SourceLocation, engine, policy,
    reader::{ConfigReader, ConfigSection},
    saturation::{self, ModelSaturation, SaturationConfig},
    yaml::{YamlNode, YamlValue},
};

/// Residue of an engine without a configured one.
const DEFAULT_RESIDUE: Bytes = Bytes::gib(4);
const DEFAULT_SLEEP_AFTER: Millis = Millis::secs(300);
const DEFAULT_STOP_AFTER: Millis = Millis::secs(3600);
const CANNOT_SLEEP: &str = "this engine cannot sleep: vllm needs --enable-sleep-mode in its command, sglang \
                            --enable-memory-saver; or set engine.sleepMode";
/// More engines of one model than any machine has accelerators for.
const MAX_REPLICAS: u32 = 64;

#[derive(Default)]
pub(super) struct ParsedModels {
    pub(super) specs: Vec<ModelSpec>,
    pub(super) engines: BTreeMap<ModelName, Arc<EngineConfig>>,
    /// The models that are scaled by their load.
    pub(super) scaled: BTreeMap<ModelName, ModelSaturation>,
    pub(super) locations: BTreeMap<ModelName, SourceLocation>,
}

/// Reads every model. `devices` has the accelerators, if the file declares them.
pub(super) fn models(
    reader: &mut ConfigReader,
    root: &mut ConfigSection,
    devices: Option<&[Accelerator]>,
    scaling: &SaturationConfig,
) -> ParsedModels {
    let mut models = ParsedModels::default();
    let mut taken = TakenNames::default();
    root.read(reader, "models", |reader, node| {
        reader.list(node, |reader, node| {
            let mut section = reader.section(node);
            let at = section.at;
            let read = read_model(reader, &mut section, &mut taken, devices);
            let own = saturation::of_model(reader, &mut section, scaling);
            section.close(reader);
            let (spec, model) = read?;
            let spec = ModelSpec {
                may_evict: own.may_evict,
                scaled: own.scaling.is_some(),
                saturation_thresholds: own.thresholds,
                ..spec
            };
            models.scaled.extend(own.scaling.map(|scaling| (spec.name.clone(), scaling)));
            models.locations.insert(spec.name.clone(), at);
            models.engines.insert(spec.name.clone(), Arc::new(model));
            models.specs.push(spec);
            Some(())
        })
    });
    models
}

/// All names and aliases so far, with their locations.
type TakenNames = BTreeMap<String, SourceLocation>;

fn read_model(
    reader: &mut ConfigReader,
    section: &mut ConfigSection,
    taken: &mut TakenNames,
    devices: Option<&[Accelerator]>,
) -> Option<(ModelSpec, EngineConfig)> {
    let name = section.require(reader, "name", |reader, node| name(reader, node, taken));
    let aliases = section.read(reader, "aliases", |reader, node| {
        reader.list(node, |reader, node| self::name(reader, node, taken))
    });
    // With a bad name, the rest is read under a stand-in to find its errors too.
    let model_name = ModelName::from(name.as_deref().unwrap_or_default());
    let engine = section.require(reader, "engine", |reader, node| {
        let mut section = reader.section(node);
        let engine = engine::engine(reader, &mut section, model_name.clone());
        section.close(reader);
        engine
    });
    let accelerators = section
        .read(reader, "accelerators", |reader, node| accelerators(reader, node, devices))
        .unwrap_or(AcceleratorRequirement::Count(1));
    let sleep = engine.as_ref().map(|engine| engine.model.sleep);
    let can_sleep = sleep != Some(SleepApi::None);
    let adapters = engine.as_ref().is_some_and(|engine| engine.has_adapters());
    let memory = section.require(reader, "memory", |reader, node| {
        if let YamlValue::Scalar(_) = &node.value {
            reader.note(
                node.at,
                "expected a mapping, found a single value: write {awake: 30Gi}, with the memory that an awake engine takes",
            );
            return None;
        }
        let mut section = reader.section(node);
        let memory = memory(reader, &mut section, can_sleep);
        section.close(reader);
        memory
    });
    let idle = section.sub(reader, "idle", |reader, section| idle(reader, section, can_sleep, adapters));
    let replicas = section.read(reader, "replicas", |reader, node| {
        let number = reader.number::<u32>(node)?;
        if !(1..=MAX_REPLICAS).contains(&number) {
            reader.note(node.at, format_args!("must be between 1 and {MAX_REPLICAS}"));
        }
        Some(number)
    });
    let pinned = section.read(reader, "pinned", ConfigReader::flag).unwrap_or(false);
    let priority = section.read(reader, "priority", ConfigReader::number).unwrap_or(0);
    let max_concurrency = section.read(reader, "maxConcurrency", |reader, node| {
        let number = reader.number::<u32>(node)?;
        if number == 0 || number > rouse_net::lease::count::MAX_LEASES {
            reader
                .note(node.at, format_args!("must be between 1 and {}", rouse_net::lease::count::MAX_LEASES));
        }
        Some(number)
    });
    let eviction = policy::eviction(reader, section);
    let queue = section.sub(reader, "queue", policy::read_queue_overrides);
    let (mut engine, memory) = (engine?, memory?);
    name?;
    engine.model.add_memory_to_fingerprint(&memory);
    let spec = ModelSpec {
        name: model_name,
        aliases: aliases.unwrap_or_default(),
        accelerators,
        memory,
        idle,
        replicas: replicas.unwrap_or(1),
        pinned,
        min_replicas: 0,
        dependencies: Vec::new(),
        priority,
        max_concurrency,
        start_timeout: engine.start_timeout,
        explicit_memory: engine.explicit_memory(),
        can_sleep,
        fingerprint: engine.model.fingerprint,
        eviction,
        queue,
        variants: Vec::new(),
        may_evict: ScaleUpEviction::default(),
        scaled: false,
        saturation_thresholds: Thresholds::default(),
    };
    Some((spec, engine.model))
}

/// Reads a model's name or alias: usable in JSON, in a path and on a command line, and not taken yet.
fn name(reader: &mut ConfigReader, node: &YamlNode, taken: &mut TakenNames) -> Option<String> {
    let text = reader.text(node)?;
    if let Some(why) = invalid_name_reason(&text) {
        reader.note(node.at, format_args!("'{}' is not a valid model name: {why}", text.escape_debug()));
        return None;
    }
    if let Some(before) = taken.get(&text) {
        reader.note(
            node.at,
            format_args!("the name '{text}' is already taken by the model or alias at {before}"),
        );
        return None;
    }
    taken.insert(text.clone(), node.at);
    Some(text)
}

/// Explains why a text cannot be a model's name or alias.
pub fn invalid_name_reason(name: &str) -> Option<&'static str> {
    if name.is_empty() {
        return Some("the name is empty");
    }
    if name.len() > 256 {
        return Some("the name is longer than 256 bytes");
    }
    if name.chars().any(|c| c.is_control() || c.is_whitespace()) {
        return Some("the name contains white space or control characters");
    }
    if name.contains(['%', '?', '#', ';', '\\', '"']) {
        return Some("the name contains one of % ? # ; \\ \", which have a meaning in a path");
    }
    let segments_bad = name.split('/').any(|segment| matches!(segment, "" | "." | ".."));
    segments_bad.then_some("a part between slashes is empty, '.' or '..'")
}

fn accelerators(
    reader: &mut ConfigReader,
    node: &YamlNode,
    devices: Option<&[Accelerator]>,
) -> Option<AcceleratorRequirement> {
    if !matches!(node.value, YamlValue::List(_)) {
        let count = reader.number::<u32>(node)?;
        if count == 0 {
            reader.note(
                node.at,
                "must be at least 1: for engines without an accelerator, list a stand-in with the memory that they may use",
            );
            return None;
        }
        return Some(AcceleratorRequirement::Count(count));
    }
    let mut ids: Vec<AcceleratorId> = Vec::new();
    reader.list(node, |reader, node| {
        let id = AcceleratorId::from(reader.text(node)?);
        let known = devices.is_none_or(|devices| devices.iter().any(|device| device.id == id));
        if !known {
            reader.note(node.at, format_args!("there is no accelerator '{id}'"));
        } else if ids.contains(&id) {
            reader.note(node.at, format_args!("the accelerator '{id}' is listed twice"));
        }
        ids.push(id);
        Some(())
    })?;
    if ids.is_empty() {
        reader.note(node.at, "must name at least one accelerator");
        return None;
    }
    Some(AcceleratorRequirement::Ids(ids))
}

fn memory(reader: &mut ConfigReader, section: &mut ConfigSection, can_sleep: bool) -> Option<EngineMemory> {
    let awake = section.require(reader, "awake", |reader, node| {
        let size = reader.memory(node)?;
        if size == Bytes::ZERO {
            reader.note(node.at, "must be more than 0");
            return None;
        }
        Some(size)
    });
    let asleep = section.read(reader, "asleep", |reader, node| {
        let size = reader.memory(node)?;
        if awake.is_some_and(|awake| size > awake) {
            reader.note(node.at, format_args!("{size} is more than memory.awake"));
        }
        Some(size)
    });
    let host = section.read(reader, "host", ConfigReader::memory);
    Some(memory_with_defaults(awake?, asleep, host, can_sleep))
}

/// Returns an engine's memory, with defaults for unset values.
pub fn memory_with_defaults(
    awake: Bytes,
    asleep: Option<Bytes>,
    host: Option<Bytes>,
    can_sleep: bool,
) -> EngineMemory {
    // An engine that is only ever stopped keeps no memory.
    let unknown = |size: Bytes| if can_sleep { size } else { Bytes::ZERO };
    EngineMemory {
        awake,
        asleep: asleep.unwrap_or_else(|| unknown(DEFAULT_RESIDUE.min(awake))),
        host: host.unwrap_or_else(|| unknown(awake)),
    }
}

/// Reads `idle`. `adapters` means that level 2 would lose LoRA adapters.
fn idle(
    reader: &mut ConfigReader,
    section: &mut ConfigSection,
    can_sleep: bool,
    adapters: bool,
) -> IdlePolicy {
    let sleep = section.read(reader, "sleepAfter", duration_or_never);
    let stop = section.read(reader, "stopAfter", |reader, node| {
        let stop = duration_or_never(reader, node)?;
        if let (Some(stop), Some(Some(sleep))) = (stop, sleep)
            && stop < sleep
        {
            let text = format!(
                "{stop} is shorter than sleepAfter ({sleep}): write {sleep} or more, or a shorter sleepAfter"
            );
            reader.note(node.at, text);
        }
        Some(stop)
    });
    // A default must not contradict the file.
    let never = Millis::FOREVER;
    let sleep_after = sleep.unwrap_or_else(|| Some(DEFAULT_SLEEP_AFTER.min(stop.flatten().unwrap_or(never))));
    let stop_after = stop.unwrap_or_else(|| Some(DEFAULT_STOP_AFTER.max(sleep_after.unwrap_or_default())));
    let level = section
        .read(reader, "level", |reader, node| level(reader, node, can_sleep, adapters))
        .unwrap_or(SleepLevelPolicy::Auto);
    let rehearse = section
        .read(reader, "rehearse", |reader, node| rehearsal(reader, node, can_sleep, level))
        .unwrap_or_default();
    let level = if adapters { level.without_level_two_fallback() } else { level };
    IdlePolicy { sleep_after, stop_after, level, rehearse }
}

/// Reads when an engine rehearses its sleep, which is only for engines that may sleep at level 1.
fn rehearsal(
    reader: &mut ConfigReader,
    node: &YamlNode,
    can_sleep: bool,
    level: SleepLevelPolicy,
) -> Option<RehearsalPolicy> {
    let rehearsal = reader.choice(
        node,
        &[
            ("start", RehearsalPolicy::Start),
            ("idle", RehearsalPolicy::Idle),
            ("never", RehearsalPolicy::Never),
        ],
    )?;
    if rehearsal == RehearsalPolicy::Never {
        return Some(rehearsal);
    }
    if !can_sleep {
        reader.note(node.at, CANNOT_SLEEP);
    } else if matches!(level, SleepLevelPolicy::Two | SleepLevelPolicy::Never) {
        reader.note(
            node.at,
            "only sleeps at level 1 are rehearsed: remove idle.rehearse, or write 1 or auto as idle.level",
        );
    }
    Some(rehearsal)
}

fn level(
    reader: &mut ConfigReader,
    node: &YamlNode,
    can_sleep: bool,
    adapters: bool,
) -> Option<SleepLevelPolicy> {
    let level = reader.choice(
        node,
        &[
            ("1", SleepLevelPolicy::One),
            ("2", SleepLevelPolicy::Two),
            ("auto", SleepLevelPolicy::Auto),
            ("never", SleepLevelPolicy::Never),
        ],
    )?;
    if !can_sleep && matches!(level, SleepLevelPolicy::One | SleepLevelPolicy::Two) {
        reader.note(node.at, CANNOT_SLEEP);
    } else if adapters && level == SleepLevelPolicy::Two {
        reader.note(node.at, LORA_AT_LEVEL_2);
    }
    Some(level)
}

/// Returns `Some(None)` for `never`.
fn duration_or_never(reader: &mut ConfigReader, node: &YamlNode) -> Option<Option<Millis>> {
    if matches!(&node.value, YamlValue::Scalar(text) if text == "never") {
        return Some(None);
    }
    reader.duration(node).map(Some)
}
