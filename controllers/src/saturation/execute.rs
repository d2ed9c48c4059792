//! Reads what decisions need: the fleet, and the load of engines from their source.

use std::{
    collections::{BTreeMap, BTreeSet},
    panic::AssertUnwindSafe,
    sync::Arc,
};

use futures_util::FutureExt as _;
use rouse::{
    model::{EngineId, ModelName},
    saturation::{AwakeEngine, FleetLoad, PeakLoad},
    units::{Generation, Millis, Tick},
};
use rouse_net::{engine_load::EngineTokens, lease::TickClock};
use rouse_platform::{DriverClient, EngineReading};

use super::{
    fleet_reading::FleetReading,
    load_metrics::{EngineAddress, engine_loads, load_query, read_engines},
};
use crate::{
    convert::ModelHosting,
    crd::{
        inference_model::{AnalyzerSpec, LimiterSpec},
        ledger::ObjectName,
    },
    index::{Resolved, ServedModel},
    prometheus_api::{PrometheusClient, PrometheusError},
    status_inputs::StatusInputs,
};

/// Reads for one gateway.
#[derive(Clone)]
pub(crate) struct LoadReader<D> {
    pub driver: D,
    pub clock: TickClock,
    /// The Prometheus that scrapes engines, if they are not read themselves.
    pub prometheus: Option<Arc<PrometheusClient>>,
    /// Knows the Pods of engines.
    pub status_inputs: Arc<StatusInputs>,
    pub window: Millis,
    /// Engines that did not answer with metrics when they were last read.
    pub unanswered: BTreeSet<EngineId>,
}

/// What was read at one moment.
pub(crate) struct LoadReadings {
    pub fleet: FleetReading,
    /// Readings of engines that were read themselves.
    pub engines: Vec<EngineReading>,
    /// What those of them report in tokens whose models are scaled by that.
    pub tokens: Vec<(EngineId, Generation, EngineTokens)>,
    /// When these were read.
    pub read_at: Tick,
    /// Peaks from Prometheus, by engine; `None` if no engine is to be found there.
    pub prometheus: Option<Result<PeaksByEngine, PrometheusError>>,
}

/// The load of engine generations.
pub(crate) type PeaksByEngine = BTreeMap<(EngineId, Generation), PeakLoad>;

impl<D> LoadReader<D> {
    /// Whether the load of this model's engines comes from Prometheus, which knows engines by their Pods.
    ///
    /// Engines of dual pods run in other Pods than those that the model knows, so they are read themselves.
    pub(crate) fn uses_prometheus(&self, model: &ServedModel) -> bool {
        self.prometheus.is_some() && matches!(model.model.hosting, ModelHosting::Deployment(_))
    }

    /// Notes which engines answered. `awake`: the engines that are still to be read.
    pub(crate) fn note_answers(&mut self, readings: &[EngineReading], awake: &BTreeSet<&EngineId>) {
        for EngineReading { engine, load, .. } in readings {
            if load.is_some() {
                self.unanswered.remove(engine);
            } else {
                self.unanswered.insert(engine.clone());
            }
        }
        self.unanswered.retain(|engine| awake.contains(engine));
    }

    /// Returns the models whose engines are read from Prometheus, or the others.
    fn select<'a>(
        &self,
        fleet: &'a BTreeMap<ModelName, FleetLoad>,
        resolved: &'a Resolved,
        in_prometheus: bool,
    ) -> Vec<(&'a ServedModel, &'a FleetLoad)> {
        let known = fleet.iter().filter_map(|(name, load)| Some((resolved.find(name)?, load)));
        known.filter(|(model, _)| self.uses_prometheus(model) == in_prometheus).collect()
    }
}

impl<D: DriverClient> LoadReader<D> {
    /// Reads these models.
    pub(crate) async fn read(self, models: Vec<ModelName>, resolved: Arc<Resolved>) -> LoadReadings {
        let is_limited = |model: &ModelName| {
            let settings = resolved.find(model).and_then(|served| served.model.saturation.as_ref());
            settings.is_some_and(|own| own.written.limiter == LimiterSpec::Inventory)
        };
        let counts_accelerators = models.iter().any(is_limited);
        let fleet = self
            .driver
            .read_fleet(move |fleet, plan| FleetReading::of(fleet, plan, models, counts_accelerators));
        let fleet = fleet.await.unwrap_or_default();
        let unscraped = self.select(&fleet.models, &resolved, false);
        let mut unscraped: Vec<EngineAddress> =
            unscraped.iter().flat_map(|(model, load)| addresses(model, load)).collect();
        // The time of a reading is limited, and engines that do not answer must not take that of the others.
        unscraped.sort_by_key(|address| self.unanswered.contains(&address.engine));
        let prometheus = self.read_prometheus(&fleet.models, &resolved).await;
        let (mut engines, mut tokens) = (Vec::new(), Vec::new());
        for answer in read_engines(unscraped).await {
            let EngineReading { engine, generation, .. } = &answer.load;
            tokens.extend(answer.tokens.map(|found| (engine.clone(), *generation, found)));
            engines.push(answer.load);
        }
        LoadReadings { engines, tokens, read_at: self.clock.now(), prometheus, fleet }
    }

    async fn read_prometheus(
        &self,
        fleet: &BTreeMap<ModelName, FleetLoad>,
        resolved: &Resolved,
    ) -> Option<Result<PeaksByEngine, PrometheusError>> {
        let client = self.prometheus.as_ref()?;
        let models = self.select(fleet, resolved, true);
        if models.is_empty() {
            return None;
        }
        Some(self.query(client, &models).await)
    }

    /// Returns the load of the awake engines of these models. A series of any other Pod is ignored: it is one of a
    /// former Pod, or of an engine that sleeps.
    async fn query(
        &self,
        client: &PrometheusClient,
        models: &[(&ServedModel, &FleetLoad)],
    ) -> Result<PeaksByEngine, PrometheusError> {
        let namespaces: BTreeSet<&str> = models.iter().map(|(model, _)| namespace(model)).collect();
        let query = load_query(&namespaces, self.window);
        let asked_at = self.clock.now();
        let loads = engine_loads(client.query(&query).await?, self.window, asked_at);
        let mut found = PeaksByEngine::new();
        for (model, load) in models {
            for engine in &load.awake {
                let Some(pod) = self.status_inputs.pod_of(&engine.id, engine.generation) else { continue };
                if let Some(load) = loads.get(&ObjectName::new(namespace(model), pod)) {
                    found.insert((engine.id.clone(), engine.generation), *load);
                }
            }
        }
        Ok(found)
    }
}

/// Completes with `None` if the reading panics, so that the controller starts the next one.
///
/// A reading owns what it uses, so a panic leaves nothing half changed.
pub(crate) async fn or_lost<T>(reading: impl Future<Output = T>) -> Option<T> {
    let read = AssertUnwindSafe(reading).catch_unwind().await;
    if read.is_err() {
        tracing::error!("a reading of the load of engines panicked; the next one is due as ever");
    }
    read.ok()
}

fn namespace(model: &ServedModel) -> &str {
    &model.model.object.namespace
}

/// Returns the addresses of the model's awake engines.
fn addresses(model: &ServedModel, load: &FleetLoad) -> Vec<EngineAddress> {
    let settings = model.model.saturation.as_ref();
    let reads_tokens = settings.is_some_and(|own| own.written.analyzer == AnalyzerSpec::Tokens);
    let address = |engine: &AwakeEngine| {
        let variant = model.variants.iter().find(|variant| variant.name == engine.id.variant)?;
        let (id, address) = (engine.id.clone(), engine.address?);
        Some(EngineAddress::new(id, engine.generation, address, &variant.engine, reads_tokens))
    };
    load.awake.iter().filter_map(address).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fails() -> u32 {
        panic!("a reading that fails");
    }

    #[tokio::test]
    async fn a_reading_that_panics_has_an_outcome() {
        assert_eq!(or_lost(async { 1 }).await, Some(1));
        assert_eq!(or_lost(async { fails() }).await, None);
    }
}
