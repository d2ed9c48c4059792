//! Scales models on one machine by the load of their engines.
//!
//! ```text
//!   models[].saturation, reloads ─────────────┐
//!   fleet: engines, waiting requests ─────────┼──▶ rouse::saturation::ModelScaling ──▶ Event::Desired, metrics
//!   EngineActivity: load of awake engines ────┘
//! ```
//!
//! In a cluster the controller of saturation does this (`controllers/src/saturation.rs`), with objects in place of the
//! configuration and a status in place of this task's memory. After a restart the models begin with what runs.
//!
//! Health probes and the load reader (`platform/src/load_reader.rs`) read the engines anyway, so this task sends no
//! request of its own. It sleeps while no model is scaled.

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use rouse::{
    fleet::{Fleet, Plan, event::Event},
    model::{EngineId, ModelName, VariantName},
    saturation::{
        AwakeEngine, FleetLoad, MetricsAvailability, ModelLoad, ModelScaling, ReadingTimes, ReplicaOrder,
        ScalingInput, ScalingStep, VariantState, count_unread_as_pending, replica_metrics,
    },
    units::{Millis, Tick},
};
use rouse_config::{LoadSource, LocalSaturation, ModelSaturation};
use rouse_controllers::metrics::{ModelReplicas, SaturationMetrics, VariantLoad, VariantReplicas};
use rouse_platform::{DriverClient, EngineReading, LoadPeaks, Platform};
use tokio::{sync::watch, time};

use crate::metrics::LOCAL_LABEL;

/// The latest load is taken this many times between two decisions, so that peaks are seen.
const READINGS_PER_DECISION: u64 = 3;
/// Interval of checks whether the gateway knows the engines that already ran when it started.
const ADOPTION_POLL_INTERVAL: Millis = Millis(200);

/// Scales the models that the configuration says. [`Self::run`] is the task.
pub(crate) struct LocalScaler<D> {
    driver: D,
    /// Has the load of the engines.
    platform: Arc<dyn Platform>,
    metrics: SaturationMetrics,
    /// The configuration, as of the last reload.
    reloads: watch::Receiver<LocalSaturation>,
    config: LocalSaturation,
    peaks: LoadPeaks,
    /// The scaled models that were decided at least once.
    models: BTreeMap<ModelName, ModelScaling>,
    /// Those of which some load is unknown, for the log.
    unknown: BTreeSet<ModelName>,
    /// When the load is taken next.
    next_reading: Tick,
    /// Readings until the next decision.
    readings_left: u64,
}

/// What the fleet knows about one model.
struct ModelReading {
    fleet: FleetLoad,
    states: Vec<VariantState>,
}

/// The driver has ended.
struct DriverEnded;

impl ModelReading {
    /// Reads the model; `None` if the fleet does not have it.
    fn of(fleet: &Fleet, plan: &Plan, model: &ModelName) -> Option<Self> {
        let (spec, load) = (fleet.spec(model)?, FleetLoad::of(fleet, plan, model)?);
        let state = |variant: VariantName| {
            let spec = spec.for_variant(&variant)?;
            Some(load.variant_state(&variant, &spec))
        };
        let states = spec.variant_names().into_iter().filter_map(state).collect();
        Some(Self { fleet: load, states })
    }
}

impl<D: DriverClient> LocalScaler<D> {
    pub(crate) fn new(
        driver: D,
        platform: Arc<dyn Platform>,
        metrics: SaturationMetrics,
        reloads: watch::Receiver<LocalSaturation>,
    ) -> Self {
        let config = LocalSaturation::default();
        let peaks = LoadPeaks::new(config.settings.window);
        Self {
            driver,
            platform,
            metrics,
            reloads,
            config,
            peaks,
            models: BTreeMap::new(),
            unknown: BTreeSet::new(),
            next_reading: Tick::default(),
            readings_left: 0,
        }
    }

    /// Runs until the driver ends.
    pub(crate) async fn run(mut self) {
        loop {
            self.apply_config(self.driver.clock().now());
            if self.take_turns().await.is_err() {
                return;
            }
        }
    }

    /// Takes over the configuration. Its models are decided at once. The fleet drops the targets of those that it no
    /// longer scales.
    fn apply_config(&mut self, now: Tick) {
        self.config = self.reloads.borrow_and_update().clone();
        self.peaks.set_window(self.config.settings.window);
        (self.next_reading, self.readings_left) = (now, 0);
        let scaled = &self.config.models;
        let ended: Vec<ModelName> =
            self.models.keys().filter(|name| !scaled.contains_key(*name)).cloned().collect();
        for model in ended {
            self.models.remove(&model);
            self.unknown.remove(&model);
            self.metrics.remove_model(&model);
        }
    }

    /// Reads and decides until the configuration changes.
    async fn take_turns(&mut self) -> Result<(), DriverEnded> {
        loop {
            let due = self.driver.clock().instant_at(self.next_reading);
            let is_idle = self.config.models.is_empty();
            tokio::select! {
                biased;
                // The sender lives as long as the application.
                changed = self.reloads.changed() => return changed.map_err(|_| DriverEnded),
                () = time::sleep_until(due), if !is_idle => {}
            }
            self.take_turn(self.driver.clock().now()).await?;
        }
    }

    /// Takes the loads, and decides if that is due.
    async fn take_turn(&mut self, now: Tick) -> Result<(), DriverEnded> {
        let names: Vec<ModelName> = self.config.models.keys().cloned().collect();
        let read = self.driver.read_fleet(move |fleet, plan| {
            let reading = |model: ModelName| Some((model.clone(), ModelReading::of(fleet, plan, &model)?));
            // Before that, all models would be at zero.
            fleet.is_ready().then(|| names.into_iter().filter_map(reading).collect::<BTreeMap<_, _>>())
        });
        let models = read.await.ok_or(DriverEnded)?;
        let Some(models) = models else {
            self.next_reading = now + ADOPTION_POLL_INTERVAL;
            return Ok(());
        };
        self.next_reading = now + Millis(self.config.settings.interval.0.div_ceil(READINGS_PER_DECISION));
        self.take_loads(&models);
        self.readings_left = self.readings_left.saturating_sub(1);
        if self.readings_left == 0 {
            self.readings_left = READINGS_PER_DECISION;
            for (name, reading) in models {
                self.decide(&name, reading, now);
            }
        }
        Ok(())
    }

    /// Takes the latest reading of each awake engine.
    fn take_loads(&mut self, models: &BTreeMap<ModelName, ModelReading>) {
        let awake = || models.values().flat_map(|model| &model.fleet.awake);
        let ids: BTreeSet<&EngineId> = awake().map(|engine| &engine.id).collect();
        self.peaks.retain(|engine| ids.contains(engine));
        let (mut known, mut unknown) = (0, 0);
        for AwakeEngine { id, generation, .. } in awake() {
            let Some((load, at)) = self.platform.engine_activity(id, *generation).load().latest() else {
                unknown += 1;
                continue;
            };
            known += 1;
            let (engine, generation) = (id.clone(), *generation);
            self.peaks.add(EngineReading { engine, generation, load: Some(load) }, at);
        }
        self.metrics.count_readings(LoadSource::Engines, known, unknown);
    }

    /// Logs that some of a model's load is unknown, or known again: once each.
    fn log_availability(&mut self, name: &ModelName, availability: &MetricsAvailability) {
        let (unknown, awake) = match availability {
            MetricsAvailability::Missing { unknown, awake }
            | MetricsAvailability::Stale { unknown, awake, .. } => (*unknown, *awake),
            // There is no source that could fail as a whole.
            MetricsAvailability::Known | MetricsAvailability::SourceFailed(_) => {
                if self.unknown.remove(name) {
                    tracing::info!(model = %name, "the load of all engines is known again");
                }
                return;
            }
        };
        if self.unknown.insert(name.clone()) {
            tracing::warn!(model = %name, unknown, awake, "engines report no load; no engine is ended until they do");
        }
    }

    /// Decides one model, and reports the decision to the fleet and the metrics.
    fn decide(&mut self, name: &ModelName, reading: ModelReading, now: Tick) {
        let Some(&ModelSaturation { policy, thresholds }) = self.config.models.get(name) else { return };
        let ModelReading { fleet, mut states } = reading;
        let settings = &self.config.settings;
        let times = ReadingTimes { interval: settings.interval, window: settings.window };
        let peak = |engine: &AwakeEngine| self.peaks.peak(&engine.id, engine.generation, now);
        let (replicas, availability) = replica_metrics(&fleet.awake, times, now, peak);
        count_unread_as_pending(&mut states, &fleet.awake, &replicas, times, now);
        self.log_availability(name, &availability);
        let load = ModelLoad { replicas, states, thresholds, parked: fleet.parked, ..ModelLoad::default() };
        let loads = VariantLoad::of_variants(&load);
        let scaling = self.models.entry(name.clone()).or_default();
        let input = ScalingInput { policy, load, fleet: &fleet, availability: &availability, external: None };
        let ScalingStep { orders, scaled, refused } = scaling.step(input, now);
        for ReplicaOrder { variant, replicas, reason } in orders {
            tracing::info!(model = %name, %variant, replicas, reason, "target of engines set");
            self.driver.send_event(Event::Desired { model: name.clone(), variant, replicas, reason });
        }
        for (variant, direction) in scaled {
            self.metrics.scaled(name, LOCAL_LABEL, variant.as_str(), direction);
        }
        let variants = scaling.targets().iter().map(|target| VariantReplicas {
            variant: target.variant.to_string(),
            public_name: VariantReplicas::public_name(name.as_str(), &target.variant),
            accelerator: None,
            current: fleet.variants.get(&target.variant).map_or(0, |engines| engines.current),
            desired: target.replicas,
        });
        let (namespace, decided) = (LOCAL_LABEL.to_owned(), scaling.decided_at());
        self.metrics.set_model(name, ModelReplicas { namespace, variants: variants.collect(), decided });
        self.metrics.set_load(name, loads, refused);
    }
}
