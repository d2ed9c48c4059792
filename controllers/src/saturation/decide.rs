//! Decides one model: collects its load, and tells the fleet, the status and the metrics what follows.

#[cfg(test)]
mod tests;

use rouse::{
    fleet::event::Event,
    model::ModelName,
    saturation::{
        AwakeEngine, FleetLoad, MetricsAvailability, ModelLoad, ModelScaling, ReadingTimes, ReplicaMetrics,
        ReplicaOrder, SaturationPolicy, ScalingInput, ScalingStep, count_unread_as_pending, replica_metrics,
    },
    units::Tick,
};
use rouse_platform::DriverClient;

use super::{
    SaturationController,
    accelerator_budget::AcceleratorBudget,
    execute::PeaksByEngine,
    index::{SaturationIndex, ScaledModel},
    status,
    thresholds_config::ModelThresholds,
    token_readings::TokenReadings,
};
use crate::{
    crd::{inference_model::SaturationStatus, ledger::ObjectName},
    failpoint,
    index::ServedModel,
    metrics::VariantLoad,
    prometheus_api::PrometheusError,
};

/// A model that is about to be decided.
pub(super) struct PreparedModel<'a> {
    name: ModelName,
    object: ObjectName,
    /// The decision in its status, if this leader has not decided about it yet.
    stored: Option<SaturationStatus>,
    policy: SaturationPolicy,
    load: ModelLoad,
    fleet: &'a FleetLoad,
    availability: MetricsAvailability,
    thresholds: ModelThresholds,
    /// Number of engines that another autoscaler asks for, if one sets the number.
    external: Option<u32>,
    /// Free accelerators limit its targets.
    is_limited: bool,
}

impl PreparedModel<'_> {
    /// Weight of the model where models compete for accelerators.
    pub(super) const fn priority(&self) -> f64 {
        self.load.thresholds.priority
    }
}

/// What the load of a model is put together from, beside its metrics.
struct LoadSources<'a> {
    index: &'a SaturationIndex,
    tokens: &'a TokenReadings,
}

impl LoadSources<'_> {
    /// Returns the load of a model whose awake engines report this.
    fn load(
        &self,
        model: ScaledModel<'_>,
        fleet: &FleetLoad,
        mut replicas: Vec<ReplicaMetrics>,
    ) -> ModelLoad {
        let lengths =
            if model.counts_tokens() { self.tokens.apply(&fleet.awake, &mut replicas) } else { None };
        let states = self.index.variant_states(model, fleet);
        ModelLoad { replicas, states, parked: fleet.parked, lengths, ..ModelLoad::default() }
    }
}

impl<D: DriverClient> SaturationController<D> {
    /// Collects what the decision about one model depends on. `unused_since`: if no gateway uses it.
    pub(super) fn prepare<'a>(
        &self,
        model: ScaledModel<'_>,
        (fleet, unused_since): (&'a FleetLoad, Option<Tick>),
        prometheus: Option<&Result<PeaksByEngine, PrometheusError>>,
        now: Tick,
    ) -> PreparedModel<'a> {
        let (replicas, availability) = self.replicas(model.served, fleet, prometheus, now);
        let thresholds = self.index.thresholds_of(model);
        let sources = LoadSources { index: &self.index, tokens: &self.tokens };
        let mut load = ModelLoad {
            idle_for: unused_since.map(|since| now.since(since)),
            thresholds: thresholds.thresholds,
            ..sources.load(model, fleet, replicas)
        };
        count_unread_as_pending(&mut load.states, &fleet.awake, &load.replicas, self.reading_times(), now);
        let name = model.name().clone();
        // A stored decision counts only for the first one of this leader.
        let stored = self.index.stored(model.object).filter(|_| !self.models.contains_key(&name)).cloned();
        let (policy, external) = (model.policy(self.config.stabilisation), model.external());
        let (object, is_limited) = (model.object.clone(), model.is_limited());
        PreparedModel {
            name,
            object,
            stored,
            policy,
            load,
            fleet,
            availability,
            thresholds,
            external,
            is_limited,
        }
    }

    /// Returns the load of the model's awake engines, and whether it is known.
    fn replicas(
        &self,
        served: &ServedModel,
        fleet: &FleetLoad,
        prometheus: Option<&Result<PeaksByEngine, PrometheusError>>,
        now: Tick,
    ) -> (Vec<ReplicaMetrics>, MetricsAvailability) {
        let in_prometheus = self.reader.uses_prometheus(served);
        if let Some(Err(error)) = prometheus.filter(|_| in_prometheus) {
            return (Vec::new(), MetricsAvailability::SourceFailed(error.summary().to_owned()));
        }
        let peak = |engine: &AwakeEngine| {
            if in_prometheus {
                let found = prometheus?.as_ref().ok()?;
                return found.get(&(engine.id.clone(), engine.generation)).copied();
            }
            self.peaks.peak(&engine.id, engine.generation, now)
        };
        replica_metrics(&fleet.awake, self.reading_times(), now, peak)
    }

    const fn reading_times(&self) -> ReadingTimes {
        ReadingTimes { interval: self.config.interval, window: self.config.window }
    }

    /// Decides one model, and tells the fleet, the status and the metrics. `budget`: accelerators for further engines.
    pub(super) fn decide_model(
        &mut self,
        model: PreparedModel<'_>,
        budget: &mut AcceleratorBudget,
        now: Tick,
    ) {
        let PreparedModel {
            name,
            object,
            stored,
            policy,
            mut load,
            fleet,
            availability,
            thresholds,
            external,
            is_limited,
        } = model;
        if failpoint::is_unprotected(name.as_str()) {
            self.models.remove(&name);
            load.states.iter_mut().for_each(|state| state.pending = 0);
        }
        let scaling = self.models.entry(name.clone()).or_insert_with(|| {
            ModelScaling::restored(stored.as_ref().map(status::recorded_targets).unwrap_or_default())
        });
        let loads = VariantLoad::of_variants(&load);
        let input = ScalingInput { policy, load, fleet, availability: &availability, external };
        let ScalingStep { orders, scaled, refused } = step(scaling, input, is_limited, budget, now);
        for ReplicaOrder { variant, replicas, reason } in orders {
            tracing::info!(model = %name, %variant, replicas, reason, "target of engines set");
            self.reader.driver.send_event(Event::Desired { model: name.clone(), variant, replicas, reason });
        }
        for (variant, direction) in scaled {
            self.metrics.scaled(&name, &object.namespace, variant.as_str(), direction);
        }
        let facts = status::facts(scaling, &thresholds, &availability, &refused);
        self.reader.status_inputs.record_saturation(&name, facts);
        let (targets, decided) = (scaling.targets(), scaling.decided_at());
        let replicas = self.index.replicas(&object, fleet, targets, decided);
        self.metrics.set_model(&name, replicas);
        self.metrics.set_load(&name, loads, refused);
    }
}

/// Makes the step of one model, and takes the accelerators of its new engines out of the budget.
///
/// Models without a limit, and those whose replicas another autoscaler sets, use up the budget as well.
fn step(
    scaling: &mut ModelScaling,
    mut input: ScalingInput<'_>,
    is_limited: bool,
    budget: &mut AcceleratorBudget,
    now: Tick,
) -> ScalingStep {
    input.load.accelerators = is_limited.then(|| budget.pool());
    let states = input.load.states.clone();
    let step = scaling.step(input, now);
    budget.take(&states, scaling.sent_targets());
    step
}
