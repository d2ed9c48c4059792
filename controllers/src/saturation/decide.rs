//! Decides one model: collects its load, and tells the fleet, the status and the metrics what follows.

use rouse::{
    fleet::event::Event,
    model::ModelName,
    saturation::{
        AwakeEngine, FleetLoad, MetricsAvailability, ModelLoad, ModelScaling, ReadingTimes, ReplicaMetrics,
        ReplicaOrder, SaturationPolicy, ScalingInput, ScalingStep, replica_metrics,
    },
    units::Tick,
};
use rouse_platform::DriverClient;

use super::{
    SaturationController, execute::PeaksByEngine, index::ScaledModel, status,
    thresholds_config::ModelThresholds,
};
use crate::{
    crd::{inference_model::SaturationStatus, ledger::ObjectName},
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
}

impl<D: DriverClient> SaturationController<D> {
    /// Collects what the decision about one model depends on.
    pub(super) fn prepare<'a>(
        &self,
        model: ScaledModel<'_>,
        fleet: &'a FleetLoad,
        prometheus: Option<&Result<PeaksByEngine, PrometheusError>>,
        now: Tick,
    ) -> PreparedModel<'a> {
        let (replicas, availability) = self.replicas(model.served, fleet, prometheus, now);
        let thresholds = self.index.thresholds_of(model);
        let load = ModelLoad {
            replicas,
            states: self.index.variant_states(model, fleet),
            thresholds: thresholds.thresholds,
            parked: fleet.parked,
            ..ModelLoad::default()
        };
        let name = model.name().clone();
        // A stored decision counts only for the first one of this leader.
        let stored = self.index.stored(model.object).filter(|_| !self.models.contains_key(&name)).cloned();
        let (policy, external) = (model.policy(self.config.stabilisation), model.external());
        let object = model.object.clone();
        PreparedModel { name, object, stored, policy, load, fleet, availability, thresholds, external }
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
        let times = ReadingTimes { interval: self.config.interval, window: self.config.window };
        replica_metrics(&fleet.awake, times, now, peak)
    }

    /// Decides one model, and tells the fleet, the status and the metrics.
    pub(super) fn decide_model(&mut self, model: PreparedModel<'_>, now: Tick) {
        let PreparedModel { name, object, stored, policy, load, fleet, availability, thresholds, external } =
            model;
        let scaling = self.models.entry(name.clone()).or_insert_with(|| {
            ModelScaling::restored(stored.as_ref().map(status::recorded_targets).unwrap_or_default())
        });
        let loads = VariantLoad::of_variants(&load);
        let input = ScalingInput { policy, load, fleet, availability: &availability, external };
        let ScalingStep { orders, scaled, refused } = scaling.step(input, now);
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
