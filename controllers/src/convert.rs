//! Converts an InferenceModel into specs for the decisions, the data path and the Pod builders.
//!
//! An object has usually passed its schema, but schemas change while stored objects stay as they were. So the
//! conversion does not trust the object: it collects all errors at once into [`Rejections`].

pub mod device_configuration;
mod engine;
mod names;
mod pod_template;
mod saturation;
mod spec_reader;
#[cfg(test)]
mod tests;
pub mod warmup;

use std::{collections::BTreeMap, sync::Arc};

use rouse::{
    model::{
        AcceleratorRequirement, EngineMemory, EvictionPolicy, IdlePolicy, ModelName, ModelSpec,
        QueueOverrides, QueuePolicy, RehearsalPolicy, ScaleUpEviction, SleepLevelPolicy, VariantName,
        compare_by_cost,
    },
    pairing,
    saturation::{EngineTokenLimits, Role, Thresholds, ZeroRule},
    units::{Bytes, Millis},
};

use self::spec_reader::SpecReader;
use super::{
    backend_address::{self, BackendAddress},
    conflicts::object_name,
    crd::{
        InferenceModel, InferenceModelSpec, PodTemplateJson,
        inference_model::{self as written, ServingMode, WarmupMode},
        ledger::ObjectName,
    },
    rejection::{DependencyCycle, Rejection, Rejections},
};
use crate::dual_pods::keys::SERVER_CONFIG;

pub use self::saturation::SaturationSettings;
pub(crate) use self::saturation::threshold_entry;

/// One converted InferenceModel.
#[derive(Clone, Debug, PartialEq)]
pub struct ConvertedModel {
    pub object: ObjectName,
    /// Configuration for talking to the model's engines.
    pub engine: Arc<rouse_config::EngineConfig>,
    pub hosting: ModelHosting,
    /// Cheapest first, of equal costs by name. There is at least one. An external model has exactly one, with no
    /// accelerators and no memory.
    pub variants: Vec<ModelVariant>,
    /// Number of engines of all variants together that run without requests, beside the variants' own.
    pub min_replicas: u32,
    /// `None`: saturation does not scale the model.
    pub saturation: Option<SaturationSettings>,
    /// The memory that the object declares for one engine, for the object's status.
    pub declared: Option<Bytes>,
    /// Whether Rouse keeps the model's images on the nodes where its next engines may start.
    pub keeps_warm: bool,
    /// Direct dependencies only. [`super::index`] knows the model names of all objects and fills
    /// [`ModelSpec::dependencies`].
    pub dependencies: Vec<ObjectName>,
}

/// How the engines are hosted.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelHosting {
    Deployment(EnginePodTemplate),
    DualPods(EnginePodTemplate),
    /// A backend that Rouse does not manage.
    External(BackendAddress),
}

/// The Pod template of an engine.
#[derive(Clone, Debug, PartialEq)]
pub struct EnginePodTemplate {
    pub template: PodTemplateJson,
    /// Name of the engine's container in the template.
    pub container: String,
    /// Port that the engine listens on in its Pod.
    pub port: u16,
}

impl EnginePodTemplate {
    /// Whether the template names an InferenceServerConfig, which defines how the engine starts.
    #[must_use]
    pub fn has_server_config(&self) -> bool {
        let template = self.template.value();
        let own = template.get("metadata").and_then(|own| own.get("annotations")?.get(SERVER_CONFIG));
        own.is_some_and(serde_json::Value::is_string)
    }
}

/// One variant of the model: a hardware choice with its cost.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelVariant {
    pub name: VariantName,
    pub cost: f64,
    /// Part of the requests that its engines compute.
    pub role: Role,
    /// Limits of a batch by the command of its engines, if they are known: those of vLLM are.
    pub batch_limits: Option<EngineTokenLimits>,
    /// `replicas` is the maximum, and `min_replicas` is the variant's own. The pool of the accelerators is not known
    /// yet: the index sets [`AcceleratorRequirement::InPool`] or
    /// [`AcceleratorRequirement::Slots`].
    pub spec: ModelSpec,
    /// The fields that keep an engine awake without requests, for messages. Each of them alone does.
    pub kept_awake_by: Vec<&'static str>,
    pub node_selector: BTreeMap<String, String>,
    /// The model's template merged with the variant's patch, if the variant has one.
    pub template: Option<PodTemplateJson>,
}

/// What the gateway's configuration allows objects to request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConversionPolicy {
    /// Whether backends may be outside their model's namespace.
    pub any_backend: bool,
    /// The mode in which the gateway serves requesters; `None` if it serves none.
    pub dual_pods: Option<pairing::ids::ProviderMode>,
}

/// Default time asleep before an engine stops.
const DEFAULT_STOP_AFTER: Millis = Millis::secs(3600);

/// Converts one object by itself. [`super::conflicts`] checks it against other objects.
///
/// # Errors
/// Returns everything that is wrong with the object.
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
        let itself = DependencyCycle::new(Arc::new([object.name.clone()]), 0);
        reader.reject(Rejection::Cycle(itself));
    }
    // If the hosting was refused, whether the engine sleeps is unknown.
    let can_sleep = engine.sleep != rouse_config::SleepApi::None || run.is_none();
    let common = variant_defaults(&mut reader, spec, can_sleep);
    let saturation = saturation::settings(&mut reader, spec, common.zero);
    let variants = match &run {
        Some(ModelHosting::External(_)) => vec![external(spec, &engine, &common)],
        // The backend was refused. An external model needs none of the engine settings.
        None if spec.mode == ServingMode::External => Vec::new(),
        _ => variants(&mut reader, spec, &engine, &common, run.as_ref()),
    };
    let declared = spec.memory.as_ref().and_then(|memory| memory.bytes().ok());
    let min_replicas = min_replicas(&mut reader, spec, &variants);
    let hosting = reader.finish(run)?;
    let engine = Arc::new(engine);
    let keeps_warm = spec.warmup == WarmupMode::Auto;
    Ok(ConvertedModel {
        object,
        engine,
        hosting,
        variants,
        min_replicas,
        saturation,
        declared,
        keeps_warm,
        dependencies,
    })
}

/// Returns how many engines of all variants together run without requests.
fn min_replicas(reader: &mut SpecReader, spec: &InferenceModelSpec, variants: &[ModelVariant]) -> u32 {
    let most = variants.iter().fold(0_u32, |sum, variant| sum.saturating_add(variant.spec.replicas));
    // A model without variants was checked with its one.
    if !spec.variants.is_empty() && spec.min_replicas > most {
        reader.reject_spec(format!(
            "minReplicas ({}) must be at most the maxReplicas of all variants together ({most})",
            spec.min_replicas
        ));
    }
    if spec.pinned { spec.min_replicas.max(1) } else { spec.min_replicas }
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
            reader.reject_spec(
                "mode external needs a backendUrl: set it to the backend, such as http://SERVICE:PORT",
            );
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
        reader.reject_spec(
            "backendUrl is only for mode external: remove it, because Rouse knows the addresses of the engines that \
             it runs",
        );
    }
    let pods = pod_template::engine_pod_template(reader, spec)?;
    Some(if spec.mode == ServingMode::DualPods {
        ModelHosting::DualPods(pods)
    } else {
        ModelHosting::Deployment(pods)
    })
}

/// Settings that all variants share.
struct VariantDefaults {
    idle: IdlePolicy,
    start_timeout: Millis,
    eviction: Option<EvictionPolicy>,
    queue: QueueOverrides,
    may_evict: ScaleUpEviction,
    zero: ZeroRule,
    /// Saturation scales the model.
    scaled: bool,
    saturation_thresholds: Thresholds,
}

fn variant_defaults(reader: &mut SpecReader, spec: &InferenceModelSpec, can_sleep: bool) -> VariantDefaults {
    let cooldown = reader.span_or_never("cooldownPeriod", &spec.cooldown_period);
    let zero = saturation::zero_rule(reader, spec, cooldown);
    let (sleep_after, field) = match zero {
        // The idle rule ends the last engine, so it waits for exactly as long.
        ZeroRule::After(after) => (Some(after), "saturation.scaleToZero.after"),
        ZeroRule::Fleet | ZeroRule::KeepOne => (cooldown, "cooldownPeriod"),
    };
    let stop_after = match &spec.stop_after {
        Some(span) => reader.span_or_never("stopAfter", span),
        None => Some(DEFAULT_STOP_AFTER.max(sleep_after.unwrap_or_default())),
    };
    if let (Some(sleep), Some(stop)) = (sleep_after, stop_after)
        && stop < sleep
    {
        reader.reject_spec(format!(
            "stopAfter ({stop}) is shorter than {field} ({sleep}): an engine sleeps before it is stopped, so set \
             stopAfter to at least {field}"
        ));
    }
    let level = engine::level(spec.engine.level);
    let rehearse = engine::rehearsal(reader, spec, can_sleep);
    let idle = IdlePolicy { sleep_after, stop_after, level, rehearse };
    let start_timeout = reader.positive_span("startTimeout", &spec.start_timeout);
    let eviction = spec.eviction.map(|eviction| match eviction {
        written::EvictionSpec::Residency => EvictionPolicy::Residency,
        written::EvictionSpec::Cooldown => EvictionPolicy::Cooldown,
        written::EvictionSpec::Never => EvictionPolicy::Never,
    });
    VariantDefaults {
        idle,
        start_timeout,
        eviction,
        queue: queue(reader, spec),
        may_evict: saturation::may_evict(spec),
        zero,
        scaled: spec.saturation.as_ref().is_some_and(|own| own.enabled),
        saturation_thresholds: saturation::gateway_thresholds(spec),
    }
}

fn external(
    spec: &InferenceModelSpec,
    engine: &rouse_config::EngineConfig,
    common: &VariantDefaults,
) -> ModelVariant {
    let nothing = EngineMemory { awake: Bytes::ZERO, asleep: Bytes::ZERO, host: Bytes::ZERO };
    let rehearse = RehearsalPolicy::Never;
    let awake = IdlePolicy { sleep_after: None, stop_after: None, rehearse, ..common.idle };
    ModelVariant {
        name: VariantName::default(),
        cost: 0.0,
        role: Role::Both,
        batch_limits: None,
        spec: ModelSpec {
            accelerators: AcceleratorRequirement::Count(0),
            pinned: true,
            can_sleep: false,
            idle: awake,
            ..model_spec(spec, engine, common, nothing, (1, 1))
        },
        kept_awake_by: Vec::new(),
        node_selector: BTreeMap::new(),
        template: None,
    }
}

fn variants(
    reader: &mut SpecReader,
    spec: &InferenceModelSpec,
    engine: &rouse_config::EngineConfig,
    common: &VariantDefaults,
    run: Option<&ModelHosting>,
) -> Vec<ModelVariant> {
    let alone =
        [written::VariantSpec { name: VariantName::DEFAULT.to_owned(), ..written::VariantSpec::default() }];
    let listed = if spec.variants.is_empty() { &alone[..] } else { &spec.variants };
    let kv_cache = run.and_then(|run| rouse_config::kv_cache_by_command(&pod_template::command(run)));
    let explicit = run.is_some_and(|run| engine::explicit_memory(spec.engine.kind, run));
    let mut names = std::collections::BTreeSet::new();
    let mut variants = Vec::with_capacity(listed.len());
    for written in listed {
        if !names.insert(&written.name) {
            reader.reject_spec(format!("two variants are named '{}': rename one", written.name));
        }
        if !spec.variants.is_empty() {
            reader.prefix = format!("variants '{}': ", written.name);
            reader.variant(written);
        }
        let memory = reader.memory(spec, written, engine.sleep != rouse_config::SleepApi::None, kv_cache);
        let replicas = reader.replicas(spec, written);
        let count = reader.accelerators(spec, written);
        let template = pod_template::template(reader, run, written.template.as_ref());
        let host = Bytes(memory.host.0.saturating_mul(u64::from(count)));
        let mut idle = common.idle;
        if engine::has_adapters(spec.engine.kind, run, template.as_ref()) {
            if idle.level == SleepLevelPolicy::Two && engine.sleep != rouse_config::SleepApi::None {
                reader.reject_spec(format!("engine.level: {}", rouse_config::LORA_AT_LEVEL_2));
            }
            idle.level = idle.level.without_level_two_fallback();
        }
        if pod_template::memory_limit(run, template.as_ref()).is_some_and(|limit| host > limit) {
            idle.level = engine::without_host_memory(idle.level);
        }
        variants.push(ModelVariant {
            name: written.name.as_str().into(),
            cost: written.cost,
            role: saturation::role(written.role),
            batch_limits: engine::batch_limits(spec.engine.kind, run, template.as_ref()),
            spec: ModelSpec {
                accelerators: AcceleratorRequirement::Count(count),
                explicit_memory: explicit,
                idle,
                fingerprint: pod_template::variant_fingerprint(
                    engine.fingerprint,
                    written.template.as_ref(),
                    written.node_selector.as_ref().filter(|selector| **selector != spec.node_selector),
                ),
                ..model_spec(spec, engine, common, memory, replicas)
            },
            kept_awake_by: (replicas.0 > 0).then_some("minReplicas").into_iter().collect(),
            node_selector: written.node_selector.as_ref().unwrap_or(&spec.node_selector).clone(),
            template,
        });
    }
    reader.prefix.clear();
    variants.sort_by(|one, other| compare_by_cost((one.cost, &one.name), (other.cost, &other.name)));
    if common.zero == ZeroRule::KeepOne {
        saturation::keep_one_of_each_role(&mut variants);
    }
    variants
}

fn model_spec(
    spec: &InferenceModelSpec,
    engine: &rouse_config::EngineConfig,
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
        min_replicas: least,
        dependencies: Vec::new(),
        priority: spec.priority,
        max_concurrency: spec.max_concurrency,
        start_timeout: common.start_timeout,
        explicit_memory: false,
        can_sleep: engine.sleep != rouse_config::SleepApi::None,
        fingerprint: engine.fingerprint,
        eviction: common.eviction,
        queue: common.queue,
        variants: Vec::new(),
        may_evict: common.may_evict,
        scaled: common.scaled,
        saturation_thresholds: common.saturation_thresholds,
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
