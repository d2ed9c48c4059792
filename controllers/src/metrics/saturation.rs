//! Metrics of models that are scaled by the load of their engines, in a cluster and on one machine.
//!
//! An autoscaler reads the gauges of replicas, so a gateway that does not decide must not export any: its zeros would
//! scale models down. One collector has them all, so that a scrape never sees half of a change.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use prometheus::{
    IntCounterVec, IntGauge, Opts, Registry,
    core::{Collector, Desc},
    proto::{Metric, MetricFamily},
};
use rouse::{
    model::{ModelName, VariantName},
    saturation::{ModelLoad, Profile, ScalingDirection, analyze},
    units::Tick,
};
use rouse_config::LoadSource;
use rouse_platform::metric_builder::{GaugeFamily, expect_valid, integer, register};

const OWN_LABELS: &[&str] = &["model", "namespace", "variant"];
/// The public project's labels.
const PUBLIC_LABELS: &[&str] = &["accelerator_type", "namespace", "variant_name"];

static DESIRED: [GaugeFamily; 2] = [
    GaugeFamily {
        name: "rouse_desired_replicas",
        help: "Engines that the variant should have while its model is in use",
        labels: OWN_LABELS,
    },
    GaugeFamily {
        name: "wva_desired_replicas",
        help: "Engines that the variant should have while its model is in use",
        labels: PUBLIC_LABELS,
    },
];
static CURRENT: [GaugeFamily; 2] = [
    GaugeFamily {
        name: "rouse_current_replicas",
        help: "Engines of the variant that are awake, starting or waking",
        labels: OWN_LABELS,
    },
    GaugeFamily {
        name: "wva_current_replicas",
        help: "Engines of the variant that are awake, starting or waking",
        labels: PUBLIC_LABELS,
    },
];
static RATIO: [GaugeFamily; 2] = [
    GaugeFamily {
        name: "rouse_desired_ratio",
        help: "Desired engines of the variant per current one; the desired number while there is none",
        labels: OWN_LABELS,
    },
    GaugeFamily {
        name: "wva_desired_ratio",
        help: "Desired engines of the variant per current one; the desired number while there is none",
        labels: PUBLIC_LABELS,
    },
];
static DECIDED: GaugeFamily = GaugeFamily {
    name: "rouse_saturation_decision_timestamp_seconds",
    help: "Time of the model's last decision by current metrics, in seconds of Unix time",
    labels: &["model", "namespace"],
};

static SATURATED: GaugeFamily = GaugeFamily {
    name: "rouse_saturated_replicas",
    help: "Awake engines of the variant whose load has reached a threshold",
    labels: OWN_LABELS,
};
static KV_USE: GaugeFamily = GaugeFamily {
    name: "rouse_replica_kv_use_ratio",
    help: "Used share of the KV cache of the variant's fullest engine",
    labels: OWN_LABELS,
};
static WAITING: GaugeFamily = GaugeFamily {
    name: "rouse_replica_waiting_requests",
    help: "Requests in the longest queue of the variant's engines",
    labels: OWN_LABELS,
};
static REFUSED: GaugeFamily = GaugeFamily {
    name: "rouse_replicas_refused_by_memory",
    help: "1 while there is no memory for another engine of the variant that the load needs",
    labels: OWN_LABELS,
};

/// The replicas of one variant in the last decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VariantReplicas {
    pub variant: String,
    /// The variant's name among those of all models in the namespace.
    pub public_name: String,
    /// Type of the accelerators, if it is known.
    pub accelerator: Option<String>,
    pub current: u32,
    pub desired: u32,
}

impl VariantReplicas {
    /// Returns the variant's name among those of all models in the namespace.
    #[must_use]
    pub fn public_name(model: &str, variant: &VariantName) -> String {
        if variant.is_default() { model.to_owned() } else { format!("{model}-{variant}") }
    }
}

/// One model's values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelReplicas {
    pub namespace: String,
    pub variants: Vec<VariantReplicas>,
    /// When the model was last decided by current metrics.
    pub decided: Option<Tick>,
}

/// The highest load of one variant's engines that a decision took into account.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct VariantLoad {
    /// Engines whose load has reached a threshold.
    pub saturated: u32,
    /// Used share of a KV cache.
    pub kv_use: f64,
    /// Requests in the queue of an engine.
    pub waiting: f64,
}

impl VariantLoad {
    /// Returns the load of each variant of a model. A variant whose load is unknown has none.
    #[must_use]
    pub fn of_variants(load: &ModelLoad) -> BTreeMap<VariantName, Self> {
        let analysis = analyze(Profile::Rouse, &load.replicas, &load.thresholds);
        let known = analysis.variants.into_iter().filter(|(_, variant)| variant.replicas > 0);
        let load = known.map(|(name, variant)| {
            let saturated = variant.replicas.saturating_sub(variant.non_saturated);
            (name, Self { saturated, kv_use: variant.max_kv, waiting: variant.max_queue })
        });
        load.collect()
    }
}

/// Metrics of saturation.
#[derive(Clone)]
pub struct SaturationMetrics {
    models: SharedReplicas,
    scalings: IntCounterVec,
    readings: IntCounterVec,
    refused: IntGauge,
}

/// The values of all models that this gateway decides.
#[derive(Clone, Debug, Default)]
struct SharedReplicas(Arc<Mutex<BTreeMap<ModelName, ExportedModel>>>);

#[derive(Clone, Debug, Default)]
struct ExportedModel {
    replicas: ModelReplicas,
    loads: BTreeMap<VariantName, VariantLoad>,
    refused: BTreeSet<VariantName>,
}

impl SharedReplicas {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<ModelName, ExportedModel>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SaturationMetrics {
    #[must_use]
    pub fn new(registry: &Registry) -> Self {
        let models = SharedReplicas::default();
        let descs = families().map(GaugeFamily::desc).collect();
        let collector = ReplicaCollector { models: models.clone(), descs };
        expect_valid(registry.register(Box::new(collector)));
        let counters = |name, help, labels: &[&str]| {
            register(registry, expect_valid(IntCounterVec::new(Opts::new(name, help), labels)))
        };
        let scalings = counters(
            "rouse_replica_scalings_total",
            "Changes of a variant's desired number of engines, by direction",
            &["model", "namespace", "variant", "direction"],
        );
        let readings = counters(
            "rouse_saturation_readings_total",
            "Readings of the load of engines, by source and outcome",
            &["source", "outcome"],
        );
        let refused = IntGauge::new(
            "rouse_saturation_thresholds_refused",
            "Entries of the ConfigMap of thresholds that are refused",
        );
        Self { models, scalings, readings, refused: register(registry, expect_valid(refused)) }
    }

    /// Sets the values of one model.
    pub fn set_model(&self, model: &ModelName, replicas: ModelReplicas) {
        self.models.lock().entry(model.clone()).or_default().replicas = replicas;
    }

    /// Sets the load of a model's variants, and those whose next engine gets no memory. [`Self::set_model`] lists the
    /// variants.
    pub fn set_load(
        &self,
        model: &ModelName,
        loads: BTreeMap<VariantName, VariantLoad>,
        refused: BTreeSet<VariantName>,
    ) {
        if let Some(known) = self.models.lock().get_mut(model) {
            (known.loads, known.refused) = (loads, refused);
        }
    }

    /// Removes a model's series.
    pub fn remove_model(&self, model: &ModelName) {
        if let Some(removed) = self.models.lock().remove(model) {
            for variant in &removed.replicas.variants {
                let namespace = removed.replicas.namespace.as_str();
                for direction in ["up", "down"] {
                    let labels = [model.as_str(), namespace, variant.variant.as_str(), direction];
                    // A series that does not exist needs no removal.
                    drop(self.scalings.remove_label_values(&labels));
                }
            }
        }
    }

    /// Removes the replicas of all models: a gateway that does not lead decides nothing.
    pub fn reset(&self) {
        self.models.lock().clear();
    }

    /// Counts a change of a variant's target.
    pub fn scaled(&self, model: &ModelName, namespace: &str, variant: &str, direction: ScalingDirection) {
        let direction = match direction {
            ScalingDirection::Up => "up",
            ScalingDirection::Down => "down",
        };
        self.scalings.with_label_values(&[model.as_str(), namespace, variant, direction]).inc();
    }

    /// Counts readings of the load of engines.
    pub fn count_readings(&self, source: LoadSource, done: usize, failed: usize) {
        let source = match source {
            LoadSource::Engines => "engines",
            LoadSource::Prometheus => "prometheus",
        };
        for (outcome, count) in [("done", done), ("failed", failed)] {
            self.readings.with_label_values(&[source, outcome]).inc_by(count as u64);
        }
    }

    /// Sets the number of entries that are refused.
    pub fn set_refused(&self, entries: usize) {
        self.refused.set(integer(entries as u64));
    }
}

/// Builds the gauges of replicas for each scrape.
struct ReplicaCollector {
    models: SharedReplicas,
    descs: Vec<Desc>,
}

fn families() -> impl Iterator<Item = &'static GaugeFamily> {
    let models = [&DECIDED, &SATURATED, &KV_USE, &WAITING, &REFUSED];
    DESIRED.iter().chain(&CURRENT).chain(&RATIO).chain(models)
}

impl Collector for ReplicaCollector {
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let models = self.models.lock().clone();
        let mut samples: BTreeMap<&str, Vec<Metric>> = BTreeMap::new();
        for (model, ExportedModel { replicas, loads, refused }) in &models {
            let namespace = replicas.namespace.as_str();
            for variant in &replicas.variants {
                let own = [model.as_str(), namespace, variant.variant.as_str()];
                let accelerator = variant.accelerator.as_deref().unwrap_or(UNKNOWN_ACCELERATOR);
                let public = [accelerator, namespace, variant.public_name.as_str()];
                let values = [
                    (&DESIRED, f64::from(variant.desired)),
                    (&CURRENT, f64::from(variant.current)),
                    (&RATIO, f64::from(variant.desired) / f64::from(variant.current.max(1))),
                ];
                for (pair, value) in values {
                    for (family, labels) in pair.iter().zip([&own, &public]) {
                        samples.entry(family.name).or_default().push(family.sample(labels, value));
                    }
                }
                let load = loads.get(variant.variant.as_str());
                let is_refused = refused.contains(variant.variant.as_str());
                let values = [
                    (&SATURATED, load.map(|load| f64::from(load.saturated))),
                    (&KV_USE, load.map(|load| load.kv_use)),
                    (&WAITING, load.map(|load| load.waiting)),
                    (&REFUSED, Some(f64::from(u8::from(is_refused)))),
                ];
                for (family, value) in values {
                    if let Some(value) = value {
                        samples.entry(family.name).or_default().push(family.sample(&own, value));
                    }
                }
            }
            if let Some(decided) = replicas.decided {
                let sample = DECIDED.sample(&[model.as_str(), namespace], decided.0 as f64 / 1e3);
                samples.entry(DECIDED.name).or_default().push(sample);
            }
        }
        let found = |family: &GaugeFamily| Some(family.with_samples(samples.remove(family.name)?));
        families().filter_map(found).collect()
    }
}

/// The public project's label for accelerators of an unknown type, or of several.
const UNKNOWN_ACCELERATOR: &str = "unresolved";

#[cfg(test)]
mod tests {
    use rouse::saturation::ReplicaMetrics;

    use super::*;
    use crate::metrics::testing::scrape;

    fn variant(name: &str, current: u32, desired: u32) -> VariantReplicas {
        let public_name = format!("qwen-{name}");
        VariantReplicas { variant: name.to_owned(), public_name, accelerator: None, current, desired }
    }

    #[test]
    fn a_scrape_has_each_variant_under_both_names_and_nothing_after_the_reset() {
        let registry = Registry::new();
        let metrics = SaturationMetrics::new(&registry);
        assert!(!scrape(&registry).contains("desired_replicas"));
        let variants = vec![variant("l4", 2, 3), variant("h100", 0, 1)];
        let replicas = ModelReplicas { namespace: "chat".to_owned(), variants, decided: Some(Tick(1_500)) };
        metrics.set_model(&"qwen".into(), replicas);
        let text = scrape(&registry);
        for line in [
            "rouse_desired_replicas{model=\"qwen\",namespace=\"chat\",variant=\"l4\"} 3",
            "rouse_desired_ratio{model=\"qwen\",namespace=\"chat\",variant=\"l4\"} 1.5",
            "rouse_desired_ratio{model=\"qwen\",namespace=\"chat\",variant=\"h100\"} 1",
            "wva_current_replicas{accelerator_type=\"unresolved\",namespace=\"chat\",variant_name=\"qwen-l4\"} 2",
            "wva_desired_replicas{accelerator_type=\"unresolved\",namespace=\"chat\",variant_name=\"qwen-h100\"} 1",
            "rouse_saturation_decision_timestamp_seconds{model=\"qwen\",namespace=\"chat\"} 1.5",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
        metrics.reset();
        assert!(!scrape(&registry).contains("qwen"));
    }

    #[test]
    fn a_load_that_is_unknown_has_no_series_and_a_refusal_has_one() {
        let registry = Registry::new();
        let metrics = SaturationMetrics::new(&registry);
        let variants = vec![variant("l4", 2, 3), variant("h100", 1, 1)];
        let replicas = ModelReplicas { namespace: "chat".to_owned(), variants, decided: None };
        metrics.set_model(&"qwen".into(), replicas);
        let replica = |variant: &str, kv_use: Option<f64>, waiting: f64| ReplicaMetrics {
            variant: variant.into(),
            kv_use,
            waiting: Some(waiting),
            ..ReplicaMetrics::default()
        };
        let replicas =
            vec![replica("l4", Some(0.9), 1.0), replica("l4", Some(0.3), 4.0), replica("h100", None, 0.0)];
        let load = ModelLoad { replicas, ..ModelLoad::default() };
        let loads = VariantLoad::of_variants(&load);
        metrics.set_load(&"qwen".into(), loads, BTreeSet::from(["l4".into()]));
        let text = scrape(&registry);
        for line in [
            "rouse_saturated_replicas{model=\"qwen\",namespace=\"chat\",variant=\"l4\"} 1",
            "rouse_replica_kv_use_ratio{model=\"qwen\",namespace=\"chat\",variant=\"l4\"} 0.9",
            "rouse_replica_waiting_requests{model=\"qwen\",namespace=\"chat\",variant=\"l4\"} 4",
            "rouse_replicas_refused_by_memory{model=\"qwen\",namespace=\"chat\",variant=\"l4\"} 1",
            "rouse_replicas_refused_by_memory{model=\"qwen\",namespace=\"chat\",variant=\"h100\"} 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
        let unknown = "kv_use_ratio{model=\"qwen\",namespace=\"chat\",variant=\"h100\"}";
        assert!(!text.contains(unknown), "{text}");
    }

    #[test]
    fn a_removed_model_takes_its_counters_along() {
        let registry = Registry::new();
        let metrics = SaturationMetrics::new(&registry);
        let replicas = ModelReplicas {
            namespace: "chat".to_owned(),
            variants: vec![variant("l4", 1, 2)],
            decided: None,
        };
        metrics.set_model(&"qwen".into(), replicas);
        metrics.scaled(&"qwen".into(), "chat", "l4", ScalingDirection::Up);
        let labels = "direction=\"up\",model=\"qwen\",namespace=\"chat\",variant=\"l4\"";
        assert!(scrape(&registry).contains(&format!("rouse_replica_scalings_total{{{labels}}} 1")));
        metrics.remove_model(&"qwen".into());
        assert!(!scrape(&registry).contains("qwen"));
    }
}
