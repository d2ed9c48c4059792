//! Reads how models are scaled by the load of their engines.
//!
//! In a cluster, `kubernetes.saturation` configures the gateway that leads, and InferenceModels and a ConfigMap say
//! which models it scales, and at which thresholds. On one machine, `saturation` configures the gateway, and
//! `models[].saturation` has the names of `InferenceModel.spec.saturation`.

use std::collections::BTreeMap;

use rouse::{
    model::{ModelName, ScaleUpEviction},
    saturation::{Profile, SaturationPolicy, ThresholdEntry, ThresholdTable, Thresholds},
    units::Millis,
};

use super::{
    policy,
    reader::{ConfigReader, ConfigSection},
    yaml::YamlNode,
};

/// How a gateway scales models, whichever they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SaturationConfig {
    pub source: LoadSource,
    /// Time between two decisions about a model.
    pub interval: Millis,
    /// The peaks of this time before a decision count.
    pub window: Millis,
    /// How long fewer engines must have been enough before a model has fewer, unless the model says otherwise.
    pub stabilisation: Millis,
}

/// Where the load of engines is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadSource {
    /// From the engines: in a cluster through the stubs beside them.
    #[default]
    Engines,
    /// From the server in `kubernetes.prometheus`, which scrapes them.
    Prometheus,
}

/// How models are scaled on one machine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LocalSaturation {
    pub settings: SaturationConfig,
    /// The models that are scaled. The further engines of all others are spares.
    pub models: BTreeMap<ModelName, ModelSaturation>,
}

/// How one model is scaled on one machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModelSaturation {
    pub policy: SaturationPolicy,
    pub thresholds: Thresholds,
}

/// What `models[].saturation` says.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ParsedSaturation {
    /// `None`: the model is not scaled.
    pub(super) scaling: Option<ModelSaturation>,
    /// From which load an engine is saturated, also of a model that is not scaled.
    pub(super) thresholds: Thresholds,
    pub(super) may_evict: ScaleUpEviction,
}

impl Default for SaturationConfig {
    fn default() -> Self {
        Self {
            source: LoadSource::default(),
            interval: Millis::secs(15),
            window: Millis::secs(60),
            stabilisation: Millis::secs(300),
        }
    }
}

/// Reads `kubernetes.saturation`; `None` if it is disabled. `has_prometheus`: `kubernetes.prometheus` is configured.
pub(super) fn of_cluster(
    reader: &mut ConfigReader,
    kubernetes: &mut ConfigSection,
    has_prometheus: bool,
) -> Option<SaturationConfig> {
    kubernetes.sub(reader, "saturation", |reader, section| {
        let is_enabled = section.read(reader, "enabled", ConfigReader::flag).unwrap_or(true);
        let source = section.read(reader, "source", |reader, node| source(reader, node, has_prometheus));
        let config = SaturationConfig { source: source.unwrap_or_default(), ..settings(reader, section) };
        is_enabled.then_some(config)
    })
}

/// Reads `saturation`, which is for one machine.
pub(super) fn of_machine(
    reader: &mut ConfigReader,
    root: &mut ConfigSection,
    is_cluster: bool,
) -> SaturationConfig {
    if let Some(at) = root.location_of("saturation").filter(|_| is_cluster) {
        reader.note(
            at,
            "saturation is for one machine: with platform: kubernetes, write its keys under kubernetes.saturation",
        );
    }
    root.sub(reader, "saturation", settings)
}

fn settings(reader: &mut ConfigReader, section: &mut ConfigSection) -> SaturationConfig {
    let default = SaturationConfig::default();
    let interval = section.read(reader, "interval", ConfigReader::positive_duration);
    let interval = interval.unwrap_or(default.interval);
    let window = section.read(reader, "window", |reader, node| {
        let window = reader.positive_duration(node)?;
        if window < interval {
            reader.note(
                node.at,
                format_args!(
                    "{window} is shorter than the interval ({interval}): the load between two decisions would not count"
                ),
            );
        }
        Some(window)
    });
    // A default must not contradict the file.
    let window = window.unwrap_or_else(|| default.window.max(interval));
    let stabilisation = section.read(reader, "stabilisation", ConfigReader::duration);
    SaturationConfig {
        source: default.source,
        interval,
        window,
        stabilisation: stabilisation.unwrap_or(default.stabilisation),
    }
}

fn source(reader: &mut ConfigReader, node: &YamlNode, has_prometheus: bool) -> Option<LoadSource> {
    let choices = [("engines", LoadSource::Engines), ("prometheus", LoadSource::Prometheus)];
    let source = reader.choice(node, &choices)?;
    if source == LoadSource::Prometheus && !has_prometheus {
        reader.note(node.at, "there is no Prometheus to ask: set kubernetes.prometheus.url");
        return None;
    }
    Some(source)
}

fn profile(reader: &mut ConfigReader, node: &YamlNode) -> Option<Profile> {
    reader.choice(node, &[("doc", Profile::Doc), ("latest", Profile::Latest), ("rouse", Profile::Rouse)])
}

/// Reads `models[].saturation`, which scales the model if it is there. `gateway` has the defaults.
pub(super) fn of_model(
    reader: &mut ConfigReader,
    model: &mut ConfigSection,
    gateway: &SaturationConfig,
) -> ParsedSaturation {
    let parsed = model.read(reader, "saturation", |reader, node| {
        let mut section = reader.section(node);
        let is_enabled = section.read(reader, "enabled", ConfigReader::flag).unwrap_or(true);
        let profile = section.read(reader, "profile", profile).unwrap_or_default();
        let stabilisation = section.read(reader, "stabilisation", ConfigReader::duration);
        let entry = ThresholdEntry {
            kv_cache_threshold: section.read(reader, "kvCacheThreshold", threshold),
            queue_length_threshold: section.read(reader, "queueLengthThreshold", threshold),
            kv_spare_trigger: section.read(reader, "kvSpareTrigger", threshold),
            queue_spare_trigger: section.read(reader, "queueSpareTrigger", threshold),
            ..ThresholdEntry::default()
        };
        let may_evict = policy::scale_up_eviction(reader, &mut section);
        let at = section.at;
        section.close(reader);
        let thresholds = ThresholdTable::default().resolve(profile, "", "", Some(&entry));
        let missing = missing_in_doc(profile, &entry);
        for field in &missing {
            reader.note(at, format_args!("'{field}' is missing: the profile doc has no default thresholds"));
        }
        // Defaults stand in for missing thresholds, and would contradict those that are set.
        if missing.is_empty() {
            thresholds.problems().into_iter().for_each(|problem| reader.note(at, problem));
        }
        let policy = SaturationPolicy {
            profile,
            stabilisation: stabilisation.unwrap_or(gateway.stabilisation),
            ..SaturationPolicy::default()
        };
        Some(ParsedSaturation {
            scaling: is_enabled.then_some(ModelSaturation { policy, thresholds }),
            thresholds,
            may_evict,
        })
    });
    parsed.unwrap_or_default()
}

/// Returns the thresholds without which [`Profile::Doc`] does nothing, and that the model does not set.
fn missing_in_doc(profile: Profile, entry: &ThresholdEntry) -> Vec<&'static str> {
    let fields = [
        ("kvCacheThreshold", entry.kv_cache_threshold),
        ("queueLengthThreshold", entry.queue_length_threshold),
        ("kvSpareTrigger", entry.kv_spare_trigger),
        ("queueSpareTrigger", entry.queue_spare_trigger),
    ];
    let missing = fields.into_iter().filter(|(_, value)| value.is_none() && profile == Profile::Doc);
    missing.map(|(field, _)| field).collect()
}

/// Reads a number. Its range is checked together with the others.
fn threshold(reader: &mut ConfigReader, node: &YamlNode) -> Option<f64> {
    let text = reader.text(node)?;
    let number = text.parse().ok();
    if number.is_none() {
        reader.note(node.at, format_args!("'{text}' is not a number: write one like 0.8"));
    }
    number
}
