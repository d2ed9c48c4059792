//! The gauges that every model has, and one collector for the families of all models.
//!
//! A gauge of the library keeps its name, its help text and two copies of its labels, so those of one model would take
//! twelve kilobytes. Thousands of models may be configured. So a model keeps numbers, and a scrape builds the families.

use std::{collections::BTreeMap, sync::Arc};

use arc_swap::ArcSwap;
use prometheus::{
    core::{Collector, Desc},
    proto::{Metric, MetricFamily},
};
use rouse::{
    engine::last_outcome::{EngineOutcome, LastOutcome},
    fleet::report::{ModelState, ModelView},
    model::ModelName,
    units::Bytes,
};
use rouse_platform::metric_builder::GaugeFamily;

use super::ModelMetrics;

/// The metrics of the configured models.
pub(super) type ModelMap = BTreeMap<ModelName, Arc<ModelMetrics>>;

/// The gauges of one model as of the last view.
#[derive(Debug, Default)]
pub(super) struct GaugeValues {
    declared: f64,
    peak: f64,
    utilization: f64,
    ready: f64,
    replicas: f64,
    /// `None` before the first view.
    state: Option<ModelState>,
    failures: f64,
    /// Cause and time of the last failure, while no engine has served since.
    last_failure: Option<(String, f64)>,
}

impl GaugeValues {
    /// `replicas`: number of the model's engines that exist.
    pub(super) fn of(model: &ModelView, replicas: usize) -> Self {
        let peak = model.learned.peak.max(model.learned.observed).unwrap_or_default();
        let last_failure = match &model.last_outcome {
            Some(LastOutcome { at, outcome: EngineOutcome::Failed(failure), .. }) => {
                Some((failure.cause.class(), (at.0 / 1000) as f64))
            }
            _ => None,
        };
        Self {
            declared: model.declared.0 as f64,
            peak: peak.0 as f64,
            utilization: ratio(peak, model.declared),
            ready: f64::from(model.state == ModelState::Awake),
            replicas: replicas as f64,
            state: Some(model.state),
            failures: model.last_outcome.as_ref().map_or(0.0, |last| f64::from(last.consecutive_failures())),
            last_failure,
        }
    }
}

fn ratio(part: Bytes, whole: Bytes) -> f64 {
    if whole == Bytes::ZERO {
        return 0.0;
    }
    part.0 as f64 / whole.0 as f64
}

/// A gauge of every model.
struct ModelGauge {
    name: &'static str,
    help: &'static str,
    samples: Samples,
}

/// The samples of one model in a family.
enum Samples {
    One(fn(&GaugeValues) -> f64),
    /// One with the model's namespace. The families with the names of the earlier budget controller have it.
    Namespaced(fn(&GaugeValues) -> f64),
    /// One for each state that a model can have.
    States,
    /// One for the cause of the last failure.
    LastFailure,
}

static FAMILIES: [ModelGauge; 8] = [
    ModelGauge {
        name: "inference_model_memory_declared_bytes",
        help: "Declared memory per accelerator",
        samples: Samples::Namespaced(|gauges| gauges.declared),
    },
    ModelGauge {
        name: "inference_model_memory_observed_peak_bytes",
        help: "Highest observed memory per accelerator; 0 while unknown",
        samples: Samples::Namespaced(|gauges| gauges.peak),
    },
    ModelGauge {
        name: "inference_model_memory_utilization_ratio",
        help: "Highest observed memory as a ratio of the declared memory",
        samples: Samples::Namespaced(|gauges| gauges.utilization),
    },
    ModelGauge {
        name: "inference_model_ready",
        help: "1 while the model answers without a wait",
        samples: Samples::Namespaced(|gauges| gauges.ready),
    },
    ModelGauge {
        name: "inference_model_replicas",
        help: "Engines of the model that exist, asleep or not",
        samples: Samples::Namespaced(|gauges| gauges.replicas),
    },
    ModelGauge {
        name: "rouse_model_state",
        help: "1 for the current state of the model",
        samples: Samples::States,
    },
    ModelGauge {
        name: "rouse_model_failures",
        help: "Consecutive failures of the model's engines since an engine last served",
        samples: Samples::One(|gauges| gauges.failures),
    },
    ModelGauge {
        name: "rouse_model_last_failure_timestamp_seconds",
        help: "Time of the last engine failure by cause, while no engine has served since, in seconds of Unix time",
        samples: Samples::LastFailure,
    },
];

const STATES: [ModelState; 6] = [
    ModelState::Awake,
    ModelState::Asleep,
    ModelState::Launching,
    ModelState::Cold,
    ModelState::Failed,
    ModelState::Unplaceable,
];

impl ModelGauge {
    const fn family(&self) -> GaugeFamily {
        let labels: &[&str] = match self.samples {
            Samples::One(_) => &["model"],
            Samples::Namespaced(_) => &["model", "namespace"],
            Samples::States => &["model", "state"],
            Samples::LastFailure => &["cause", "model"],
        };
        GaugeFamily { name: self.name, help: self.help, labels }
    }

    /// Adds the model's samples.
    fn add_samples(&self, model: &ModelMetrics, gauges: &GaugeValues, metrics: &mut Vec<Metric>) {
        let (family, name) = (self.family(), model.name());
        match self.samples {
            Samples::One(value) => metrics.push(family.sample(&[name], value(gauges))),
            Samples::Namespaced(value) => {
                metrics.push(family.sample(&[name, model.namespace()], value(gauges)));
            }
            Samples::States => {
                let states = STATES.iter().filter_map(|state| Some((state, gauges.state? == *state)));
                metrics
                    .extend(states.map(|(state, is)| family.sample(&[name, state.as_str()], f64::from(is))));
            }
            Samples::LastFailure => {
                let last = gauges.last_failure.iter();
                metrics.extend(last.map(|(cause, at)| family.sample(&[cause.as_str(), name], *at)));
            }
        }
    }
}

/// Collects the families of all models.
pub(super) struct ModelCollector {
    configured: Arc<ArcSwap<ModelMap>>,
    /// Metrics of requests that belong to no configured model.
    other: Arc<ModelMetrics>,
    descs: Vec<Desc>,
}

impl ModelCollector {
    pub(super) fn new(configured: Arc<ArcSwap<ModelMap>>, other: Arc<ModelMetrics>) -> Self {
        Self { configured, other, descs: FAMILIES.iter().map(|gauge| gauge.family().desc()).collect() }
    }
}

impl Collector for ModelCollector {
    /// The registry identifies the collector by these, so they must never change.
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let configured = self.configured.load();
        // A model may be called `other`, and then shares these metrics.
        let configured = configured.values().filter(|model| !Arc::ptr_eq(model, &self.other));
        let mut samples = FAMILIES.each_ref().map(|_| Vec::new());
        let mut families = Vec::new();
        for model in configured.chain([&self.other]) {
            let gauges = model.gauges();
            for (family, metrics) in FAMILIES.iter().zip(&mut samples) {
                family.add_samples(model, &gauges, metrics);
            }
            families.extend(model.traffic_families().iter().flat_map(|family| family.collect()));
        }
        let models = FAMILIES.iter().zip(samples);
        families.extend(models.map(|(gauge, metrics)| gauge.family().with_samples(metrics)));
        families
    }
}
