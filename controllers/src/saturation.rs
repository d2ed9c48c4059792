//! The controller of saturation: scales models by the load of their engines.
//!
//! ```text
//!   InferenceModels, ConfigMap, nodes, resolved objects ──▶ index ─┐
//!   fleet (engines, waiting requests) ──▶ execute ─────────────────┼──▶ rouse::saturation::ModelScaling
//!   engines or Prometheus ──▶ execute ──▶ load_metrics ────────────┘       │
//!                                                                          ├──▶ Event::Desired to the driver
//!                                                                          ├──▶ targets and conditions of the status
//!                                                                          └──▶ metrics for other autoscalers
//! ```
//!
//! Nothing here scales a Deployment: a target goes to the fleet, which reserves memory first. Only the leader decides,
//! once it knows what runs, and it begins with the targets in the statuses. While the load is unknown every target
//! stays.

mod accelerator_budget;
mod decide;
mod execute;
mod fleet_reading;
mod index;
mod load_metrics;
mod prometheus_outage;
mod status;
#[cfg(test)]
mod test_cluster;
mod thresholds_config;
mod token_readings;
mod warm_nodes;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use futures_util::{Stream, StreamExt as _, stream};
use k8s_openapi::api::core::v1::{ConfigMap, Node};
use rouse::{
    model::{EngineId, ModelName},
    saturation::ModelScaling,
    units::{Millis, Tick},
};
use rouse_config::{LoadSource, SaturationConfig};
use rouse_platform::{DriverClient, LoadPeaks};
use tokio::sync::watch;

use self::{
    execute::{LoadReader, LoadReadings, or_lost},
    index::SaturationIndex,
    prometheus_outage::LastAnswer,
    token_readings::TokenReadings,
};
use crate::{
    cache::{Subscription, TermDelta},
    crd::{AcceleratorNode, InferenceModel},
    index::Resolved,
    kit::{self, Component},
    metrics::SaturationMetrics,
    prometheus_api::{PrometheusClient, PrometheusError},
    status_inputs::StatusInputs,
    watch::Delta,
};

pub(crate) use self::thresholds_config::CONFIG_MAP;

/// Engines are read this many times between two decisions, so that their peaks are seen.
const READINGS_PER_DECISION: u64 = 3;
/// Interval of checks whether a new leader knows what runs.
const ADOPTION_POLL_INTERVAL: Millis = Millis(200);

/// What the controller needs.
pub(crate) struct SaturationParts<D> {
    pub driver: D,
    pub config: SaturationConfig,
    /// The Prometheus that scrapes engines, with [`LoadSource::Prometheus`].
    pub prometheus: Option<PrometheusClient>,
    pub status_inputs: Arc<StatusInputs>,
    pub metrics: SaturationMetrics,
    /// Number of initial lists of InferenceModels.
    pub expected_lists: usize,
}

/// What feeds the controller.
pub(crate) struct SaturationWatches {
    pub models: Subscription<InferenceModel>,
    /// The ConfigMap [`CONFIG_MAP`].
    pub thresholds: Subscription<ConfigMap>,
    pub nodes: Subscription<Node>,
    pub accelerator_nodes: Subscription<AcceleratorNode>,
    pub resolved: watch::Receiver<Option<Arc<Resolved>>>,
}

/// A change of what the controller observes.
pub(crate) enum SaturationInput {
    Models(Delta<InferenceModel>),
    Thresholds(Delta<ConfigMap>),
    Nodes(Delta<Node>),
    AcceleratorNodes(Delta<AcceleratorNode>),
    Resolved(Arc<Resolved>),
}

/// Scales models.
pub(crate) struct SaturationController<D> {
    reader: LoadReader<D>,
    config: SaturationConfig,
    metrics: SaturationMetrics,
    index: SaturationIndex,
    peaks: LoadPeaks,
    tokens: TokenReadings,
    /// The models that this leader has decided about.
    models: BTreeMap<ModelName, ModelScaling>,
    /// Epoch of the term, while this gateway leads.
    term: Option<u64>,
    /// A reading is under way.
    reading: bool,
    next_reading: Tick,
    /// Readings until the next decision.
    readings_left: u64,
    /// The resolved objects have changed since the last decision.
    objects_changed: bool,
    /// The last error of Prometheus, for the log.
    source_error: Option<PrometheusError>,
    /// The last load that Prometheus knew.
    last_answer: LastAnswer,
}

impl SaturationWatches {
    /// Returns everything that the controller observes as one stream.
    pub(crate) fn inputs(self) -> impl Stream<Item = SaturationInput> {
        let Self { models, thresholds, nodes, accelerator_nodes, resolved } = self;
        let resolved = stream::unfold(resolved, async |mut resolved| {
            resolved.changed().await.ok()?;
            let objects = resolved.borrow_and_update().clone().unwrap_or_default();
            Some((SaturationInput::Resolved(objects), resolved))
        });
        stream::select_all([
            models.map(|TermDelta { delta, .. }| SaturationInput::Models(delta)).boxed(),
            thresholds.map(|TermDelta { delta, .. }| SaturationInput::Thresholds(delta)).boxed(),
            nodes.map(|TermDelta { delta, .. }| SaturationInput::Nodes(delta)).boxed(),
            accelerator_nodes.map(|TermDelta { delta, .. }| SaturationInput::AcceleratorNodes(delta)).boxed(),
            resolved.boxed(),
        ])
    }
}

impl<D: DriverClient> SaturationController<D> {
    pub(crate) fn new(parts: SaturationParts<D>) -> Self {
        let SaturationParts { driver, config, prometheus, status_inputs, metrics, expected_lists } = parts;
        let (clock, window, prometheus) = (driver.clock(), config.window, prometheus.map(Arc::new));
        let unanswered = BTreeSet::new();
        Self {
            reader: LoadReader { driver, clock, prometheus, status_inputs, window, unanswered },
            config,
            metrics,
            index: SaturationIndex::new(expected_lists),
            peaks: LoadPeaks::new(window),
            tokens: TokenReadings::default(),
            models: BTreeMap::new(),
            term: None,
            reading: false,
            next_reading: Tick::default(),
            readings_left: 0,
            objects_changed: false,
            source_error: None,
            last_answer: LastAnswer::default(),
        }
    }

    const fn readings_per_decision(&self) -> u64 {
        match self.config.source {
            LoadSource::Engines => READINGS_PER_DECISION,
            // Prometheus keeps the peaks.
            LoadSource::Prometheus => 1,
        }
    }

    /// Forgets models that saturation no longer scales. The fleet drops their targets with their configuration.
    fn forget_others(&mut self) {
        let scaled: BTreeSet<&ModelName> = self.index.models().map(|model| model.name()).collect();
        let ended: Vec<ModelName> =
            self.models.keys().filter(|name| !scaled.contains(name)).cloned().collect();
        for model in ended {
            self.models.remove(&model);
            self.metrics.remove_model(&model);
            self.reader.status_inputs.forget_saturation_of(&model);
        }
    }

    /// Starts a reading of all scaled models, if there are any.
    fn start_reading(&mut self, now: Tick, tasks: &mut kit::Tasks<Option<LoadReadings>>) {
        self.next_reading = now + Millis(self.config.interval.0.div_ceil(self.readings_per_decision()));
        let models: Vec<ModelName> = self.index.models().map(|model| model.name().clone()).collect();
        let Some(resolved) = self.index.resolved().filter(|_| !models.is_empty()).cloned() else { return };
        self.reading = true;
        tasks.spawn(or_lost(self.reader.clone().read(models, resolved)));
    }

    /// Takes the readings, and decides if that is due.
    fn take_report(&mut self, report: LoadReadings) {
        let now = self.reader.clock.now();
        self.count_readings(&report);
        let LoadReadings { fleet, engines, tokens, read_at, prometheus } = report;
        let prometheus = prometheus.map(|answer| self.last_answer.update(answer, self.config.window, now));
        let awake: BTreeSet<&EngineId> =
            fleet.models.values().flat_map(|load| &load.awake).map(|engine| &engine.id).collect();
        self.peaks.retain(|engine| awake.contains(engine));
        self.tokens.retain(|engine| awake.contains(engine));
        self.reader.note_answers(&engines, &awake);
        engines.into_iter().for_each(|reading| self.peaks.add(reading, read_at));
        for (engine, generation, found) in tokens {
            self.tokens.add(engine, generation, found);
        }
        self.readings_left = self.readings_left.saturating_sub(1);
        if self.readings_left > 0 {
            return;
        }
        self.readings_left = self.readings_per_decision();
        let models = self.index.models().filter_map(|model| {
            let load = fleet.models.get(model.name())?;
            let unused_since = fleet.unused_since.get(model.name()).copied();
            Some(self.prepare(model, (load, unused_since), prometheus.as_ref(), now))
        });
        let mut models: Vec<_> = models.collect();
        // The first to be decided gets the accelerators that are free.
        models.sort_by(|one, other| other.priority().total_cmp(&one.priority()));
        let mut budget = self.index.accelerator_budget(&fleet.held_accelerators);
        for model in models {
            self.decide_model(model, &mut budget, now);
        }
    }

    /// Counts the readings, and logs a failure of Prometheus once.
    fn count_readings(&mut self, report: &LoadReadings) {
        let done = report.engines.iter().filter(|reading| reading.load.is_some()).count();
        self.metrics.count_readings(LoadSource::Engines, done, report.engines.len() - done);
        let Some(answer) = &report.prometheus else { return };
        let done = usize::from(answer.is_ok());
        self.metrics.count_readings(LoadSource::Prometheus, done, 1 - done);
        let error = answer.as_ref().err().cloned();
        match &error {
            Some(error) if self.source_error.as_ref() != Some(error) => {
                tracing::warn!(%error, "cannot read the load of engines from Prometheus; its last answer still counts");
            }
            None if self.source_error.is_some() => {
                tracing::info!("the load of engines can be read from Prometheus again");
            }
            _ => {}
        }
        self.source_error = error;
    }
}

impl<D: DriverClient> Component for SaturationController<D> {
    type Input = SaturationInput;
    /// `None`: the reading failed in an unforeseen way, and the next one is due as ever.
    type Outcome = Option<LoadReadings>;

    fn apply(&mut self, input: SaturationInput, _tasks: &mut kit::Tasks<Option<LoadReadings>>) {
        match input {
            SaturationInput::Models(delta) => self.index.apply_models(&delta),
            SaturationInput::Thresholds(delta) => {
                if self.index.apply_thresholds(delta) {
                    self.metrics.set_refused(self.index.refused_thresholds());
                }
            }
            SaturationInput::Nodes(delta) => self.index.apply_nodes(&delta),
            SaturationInput::AcceleratorNodes(delta) => self.index.apply_accelerator_nodes(&delta),
            SaturationInput::Resolved(resolved) => {
                self.index.set_resolved(resolved);
                self.objects_changed = true;
            }
        }
    }

    fn finished(&mut self, report: Option<LoadReadings>, _tasks: &mut kit::Tasks<Option<LoadReadings>>) {
        self.reading = false;
        if let Some(report) = report {
            self.take_report(report);
        }
    }

    fn term_changed(&mut self, epoch: Option<u64>, _tasks: &mut kit::Tasks<Option<LoadReadings>>) {
        self.term = epoch;
        self.models.clear();
        self.peaks = LoadPeaks::new(self.config.window);
        self.tokens = TokenReadings::default();
        (self.reading, self.readings_left, self.next_reading) = (false, 0, Tick::default());
        (self.source_error, self.last_answer) = (None, LastAnswer::default());
        // A gateway that does not lead must neither export targets nor keep old ones for its next term.
        self.metrics.reset();
        self.reader.status_inputs.forget_saturation();
    }

    fn next_deadline(&self) -> Option<Tick> {
        let waits =
            self.term.is_some() && self.index.is_complete() && self.index.has_models() && !self.reading;
        waits.then_some(self.next_reading)
    }

    fn decide(&mut self, tasks: &mut kit::Tasks<Option<LoadReadings>>) {
        let Some(epoch) = self.term.filter(|_| self.index.is_complete()) else { return };
        let now = self.reader.clock.now();
        // A new leader that does not know yet what runs would find all models at zero.
        if !self.reader.status_inputs.decides_in(epoch) {
            self.next_reading = now + ADOPTION_POLL_INTERVAL;
            return;
        }
        if std::mem::take(&mut self.objects_changed) {
            self.forget_others();
        }
        if !self.reading && now >= self.next_reading {
            self.start_reading(now, tasks);
        }
    }
}
