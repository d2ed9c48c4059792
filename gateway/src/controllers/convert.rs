//! What an InferenceModel means to the decisions, to the data path and to whoever makes its Pods.
//!
//! An object has passed its schema, as a rule; but schemas are replaced, and a stored object stays as it was. So nothing
//! here trusts it: everything that is wrong with it is found at once, and becomes a [`Rejections`].

mod engine;
mod pod_template;
mod spec_reader;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, sync::Arc};

use rouse::{
    model::{
        AcceleratorRequirement, EngineMemory, EvictionPolicy, IdlePolicy, ModelName, ModelSpec,
        QueueOverrides, QueuePolicy, SleepLevelPolicy,
    },
    pairing,
    units::{Bytes, Millis},
};

use self::spec_reader::SpecReader;
use super::{
    backend_address::{self, BackendAddress},
    conflicts::object_name,
    crd::{
        InferenceModel, InferenceModelSpec, PodTemplateJson,
        inference_model::{self as written, DEFAULT_VARIANT, ServingMode},
        ledger::ObjectName,
    },
    rejection::{Rejection, Rejections},
};
use crate::{config, controllers::dual_pods::keys::SERVER_CONFIG};

/// One model.
#[derive(Clone, Debug, PartialEq)]
pub struct ConvertedModel {
    pub object: ObjectName,
    /// How its engines are spoken to.
    pub engine: Arc<config::EngineConfig>,
    pub hosting: ModelHosting,
    /// The cheapest first, those of one price in their order in the object. At least one; exactly one of a model that is
    /// external, with no accelerators and no memory.
    pub variants: Vec<ModelVariant>,
    /// What the object says of one engine's memory, for its status.
    pub declared: Option<Bytes>,
    /// Directly. Their models' names are known beside the others ([`super::index`]), which fill [`ModelSpec::dependencies`].
    pub dependencies: Vec<ObjectName>,
}

/// Who runs the engines.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelHosting {
    Deployment(EnginePodTemplate),
    DualPods(EnginePodTemplate),
    /// Nobody that Rouse knows.
    External(BackendAddress),
}

/// What an engine's Pod is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct EnginePodTemplate {
    pub template: PodTemplateJson,
    /// The name of the engine's container in it.
    pub container: String,
    /// Where the engine listens in its Pod.
    pub port: u16,
}

impl EnginePodTemplate {
    /// Their requesters ask for the engine of an InferenceServerConfig, which says how it is started.
    #[must_use]
    pub fn has_server_config(&self) -> bool {
        let template = self.template.value();
        let own = template.get("metadata").and_then(|own| own.get("annotations")?.get(SERVER_CONFIG));
        own.is_some_and(serde_json::Value::is_string)
    }
}

/// One way of running the model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelVariant {
    pub name: String,
    pub cost: f64,
    /// `replicas` is the most that may run. Which pool the accelerators are of is not known here: who does know says so by
    /// [`AcceleratorRequirement::in_pool`].
    pub spec: ModelSpec,
    pub node_selector: BTreeMap<String, String>,
    /// Its own template, where what is different is merged into the model's.
    pub template: Option<PodTemplateJson>,
}

/// What the gateway allows objects to say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConversionPolicy {
    /// Backends need not be Services of their model's namespace.
    pub any_backend: bool,
    /// Requesters are served, in this mode.
    pub dual_pods: Option<pairing::ids::ProviderMode>,
}

/// An asleep engine is stopped after so long, when nothing else is said.
const DEFAULT_STOP_AFTER: Millis = Millis::secs(3600);

/// Reads an object by itself. What it may not do beside others is [`super::conflicts`]'s.
///
/// # Errors
/// Everything that is wrong with it.
pub fn convert(object: &InferenceModel, policy: ConversionPolicy) -> Result<ConvertedModel, Rejections> {
    let spec = &object.spec;
    let mut reader = SpecReader::default();
    let name = reader.names(spec);
    let object = object_name(object);
    let run = hosting(&mut reader, spec, &object, policy);
    let engine = engine::engine(&mut reader, spec, name, run.as_ref());
    let dependencies = spec.dependencies.iter().map(|name| ObjectName::new(object.namespace.clone(), name));
    let dependencies: Vec<_> = dependencies.collect();
    if dependencies.contains(&object) {
        reader.reject(Rejection::Cycle(vec![object.name.clone(), object.name.clone()]));
    }
    let common = variant_defaults(&mut reader, spec);
    let variants = match &run {
        Some(ModelHosting::External(_)) => vec![external(spec, &engine, &common)],
        // Its backend is refused. It needs nothing of what engines need.
        None if spec.mode == ServingMode::External => Vec::new(),
        _ => variants(&mut reader, spec, &engine, &common, run.as_ref()),
    };
    let declared = spec.memory.as_ref().and_then(|memory| memory.bytes().ok());
    let run = reader.finish(run)?;
    Ok(ConvertedModel { object, engine: Arc::new(engine), hosting: run, variants, declared, dependencies })
}

fn hosting(
    reader: &mut SpecReader,
    spec: &InferenceModelSpec,
    object: &ObjectName,
    policy: ConversionPolicy,
) -> Option<ModelHosting> {
    if spec.mode == ServingMode::External {
        reader.external(spec);
        let Some(url) = &spec.backend_url else {
            reader.reject_spec("mode external needs a backendUrl");
            return None;
        };
        return match backend_address::parse_backend(url, &object.namespace, policy.any_backend) {
            Ok(backend) => Some(ModelHosting::External(backend)),
            Err(error) => {
                reader.reject(error.into());
                None
            }
        };
    }
    if spec.backend_url.is_some() {
        reader.reject_spec("backendUrl is for mode external: engines that Rouse runs are found without it");
    }
    let pods = pod_template::engine_pod_template(reader, spec)?;
    Some(if spec.mode == ServingMode::DualPods {
        ModelHosting::DualPods(pods)
    } else {
        ModelHosting::Deployment(pods)
    })
}

/// What all variants have in common.
struct VariantDefaults {
    idle: IdlePolicy,
    start_timeout: Millis,
    eviction: Option<EvictionPolicy>,
    queue: QueueOverrides,
}

fn variant_defaults(reader: &mut SpecReader, spec: &InferenceModelSpec) -> VariantDefaults {
    let sleep_after = reader.span_or_never("cooldownPeriod", &spec.cooldown_period);
    let stop_after = match &spec.stop_after {
        Some(span) => reader.span_or_never("stopAfter", span),
        None => Some(DEFAULT_STOP_AFTER.max(sleep_after.unwrap_or_default())),
    };
    if let (Some(sleep), Some(stop)) = (sleep_after, stop_after)
        && stop < sleep
    {
        reader.reject_spec(format!(
            "stopAfter ({stop}) is before cooldownPeriod ({sleep}): an engine sleeps before it is stopped"
        ));
    }
    let idle = IdlePolicy { sleep_after, stop_after, level: engine::level(spec.engine.level) };
    let start_timeout = reader.positive_span("startTimeout", &spec.start_timeout);
    let eviction = spec.eviction.map(|eviction| match eviction {
        written::EvictionSpec::Residency => EvictionPolicy::Residency,
        written::EvictionSpec::Cooldown => EvictionPolicy::Cooldown,
        written::EvictionSpec::Never => EvictionPolicy::Never,
    });
    VariantDefaults { idle, start_timeout, eviction, queue: queue(reader, spec) }
}

fn external(
    spec: &InferenceModelSpec,
    engine: &config::EngineConfig,
    common: &VariantDefaults,
) -> ModelVariant {
    let nothing = EngineMemory { awake: Bytes::ZERO, asleep: Bytes::ZERO, host: Bytes::ZERO };
    let awake = IdlePolicy { sleep_after: None, stop_after: None, ..common.idle };
    ModelVariant {
        name: DEFAULT_VARIANT.to_owned(),
        cost: 0.0,
        spec: ModelSpec {
            accelerators: AcceleratorRequirement::Count(0),
            pinned: true,
            can_sleep: false,
            idle: awake,
            ..model_spec(spec, engine, common, nothing, (1, 1))
        },
        node_selector: BTreeMap::new(),
        template: None,
    }
}

fn variants(
    reader: &mut SpecReader,
    spec: &InferenceModelSpec,
    engine: &config::EngineConfig,
    common: &VariantDefaults,
    run: Option<&ModelHosting>,
) -> Vec<ModelVariant> {
    let alone =
        [written::VariantSpec { name: DEFAULT_VARIANT.to_owned(), ..written::VariantSpec::default() }];
    let listed = if spec.variants.is_empty() { &alone[..] } else { &spec.variants };
    let kv_cache = run.and_then(|run| config::kv_cache_by_command(&pod_template::command(run)));
    let explicit = run.is_some_and(|run| engine::explicit_memory(spec.engine.kind, run));
    let mut names = std::collections::BTreeSet::new();
    let mut variants = Vec::with_capacity(listed.len());
    for written in listed {
        if !names.insert(&written.name) {
            reader.reject_spec(format!("there are two variants '{}': rename one", written.name));
        }
        reader.prefix =
            if spec.variants.is_empty() { String::new() } else { format!("variants '{}': ", written.name) };
        let memory = reader.memory(spec, written, engine.sleep != config::SleepApi::None, kv_cache);
        let replicas = reader.replicas(spec, written);
        let count = reader.accelerators(spec, written);
        let template = pod_template::template(reader, run, written.template.as_ref());
        let host = Bytes(memory.host.0.saturating_mul(u64::from(count)));
        let mut idle = common.idle;
        if engine::has_adapters(spec.engine.kind, run, template.as_ref()) {
            if idle.level == SleepLevelPolicy::Two && engine.sleep != config::SleepApi::None {
                reader.reject_spec(format!("engine.level: {}", config::LORA_AT_LEVEL_2));
            }
            idle.level = idle.level.without_level_two_fallback();
        }
        if pod_template::memory_limit(run, template.as_ref()).is_some_and(|limit| host > limit) {
            idle.level = engine::without_host_memory(idle.level);
        }
        variants.push(ModelVariant {
            name: written.name.clone(),
            cost: written.cost,
            spec: ModelSpec {
                accelerators: AcceleratorRequirement::Count(count),
                explicit_memory: explicit,
                idle,
                fingerprint: pod_template::variant_fingerprint(
                    engine.fingerprint,
                    written.template.as_ref(),
                    written.node_selector.as_ref().filter(|own| **own != spec.node_selector),
                ),
                ..model_spec(spec, engine, common, memory, replicas)
            },
            node_selector: written.node_selector.as_ref().unwrap_or(&spec.node_selector).clone(),
            template,
        });
    }
    reader.prefix.clear();
    variants.sort_by(|a, b| a.cost.total_cmp(&b.cost));
    variants
}

fn model_spec(
    spec: &InferenceModelSpec,
    engine: &config::EngineConfig,
    common: &VariantDefaults,
    memory: EngineMemory,
    (least, most): (u32, u32),
) -> ModelSpec {
    ModelSpec {
        name: ModelName::from(spec.model_name.as_str()),
        aliases: spec.aliases.clone(),
        accelerators: AcceleratorRequirement::Count(spec.accelerators),
        memory,
        idle: common.idle,
        replicas: most,
        pinned: spec.pinned,
        min_replicas: if spec.pinned { least.max(1) } else { least },
        dependencies: Vec::new(),
        priority: spec.priority,
        max_concurrency: spec.max_concurrency,
        start_timeout: common.start_timeout,
        explicit_memory: false,
        can_sleep: engine.sleep != config::SleepApi::None,
        fingerprint: engine.fingerprint,
        eviction: common.eviction,
        queue: common.queue,
    }
}

fn queue(reader: &mut SpecReader, spec: &InferenceModelSpec) -> QueueOverrides {
    let Some(queue) = &spec.queue else {
        return QueueOverrides::default();
    };
    QueueOverrides {
        policy: queue.policy.map(|policy| match policy {
            written::QueuePolicySpec::Wait => QueuePolicy::Wait,
            written::QueuePolicySpec::Reject => QueuePolicy::Reject,
        }),
        max_wait: queue.max_wait.as_ref().map(|span| reader.positive_span("queue.maxWait", span)),
        max_waiting: queue.max_waiting,
    }
}
