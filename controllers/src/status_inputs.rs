//! Collects facts and Events about each model from the decisions for the status writer, and changes of this gateway's
//! demand for its GatewayReplica.

mod demand;
mod saturation;
mod wait_reasons;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, MutexGuard, PoisonError},
};

use rouse::{
    engine::{Engine, state::LifecycleState},
    fault::Fault,
    fleet::{
        Fleet, Plan, RoutingChanges,
        event::{LearnedMeasurements, PublishedFailure},
    },
    model::{AcceleratorRequirement, EngineId, EngineVariant, ModelName, SleepLevel, VariantName},
    units::{Bytes, Generation, Tick},
};
use tokio::sync::Notify;
use wait_reasons::WaitReasons;

pub use self::demand::{DemandChange, DemandUrgency};

use super::{
    condition::time,
    crd::inference_model::{EngineFailure, EngineState, EngineStatus, LearnedStatus},
    event_content::{self, EngineSnapshot, EventContent},
    generation_floor,
    status::{ModelFacts, ModelWaitReason, SaturationFacts},
};

/// Maximum number of Events in the queue. A turn adds few, and excess Events are dropped.
const MAX_PENDING_EVENTS: usize = 1024;

/// Facts of models, with the set of those that changed since the last read.
#[derive(Debug, Default)]
pub struct StatusInputs {
    inner: Mutex<StatusInputsState>,
    changed: Notify,
    demand_changed: Notify,
}

#[derive(Debug, Default)]
struct StatusInputsState {
    facts: BTreeMap<ModelName, ModelFacts>,
    /// Models whose facts changed since the last read.
    changed_models: BTreeSet<ModelName>,
    /// Epoch of the term in which this gateway leads and knows what runs.
    decides: Option<u64>,
    demand: demand::DemandTracker,
    wait_reasons: WaitReasons,
    /// Engine snapshots from the last turn in which this gateway led.
    snapshots: BTreeMap<ModelName, Vec<EngineSnapshot>>,
    events: Vec<(ModelName, EventContent)>,
    /// Pod of each engine's generation.
    pods: BTreeMap<EngineId, (Generation, String)>,
    /// Pod failure of each model's last failed generation, until a later generation is awake.
    failures: BTreeMap<ModelName, (Generation, String)>,
    /// Each variant's highest observed memory use on one accelerator here, and the last observation's time.
    observed: BTreeMap<(ModelName, VariantName), (Bytes, Tick)>,
    /// The variant of each model whose memory and measurements its status has as the model's own.
    published_variants: BTreeMap<ModelName, VariantName>,
    /// What saturation decided last.
    saturation: BTreeMap<ModelName, SaturationFacts>,
}

/// Maximum length of a foreign error message in a condition.
const MAX_FAILURE_CHARS: usize = 1024;

impl StatusInputs {
    /// Records the Pod of this engine generation.
    pub(crate) fn set_pod(&self, engine: &EngineId, generation: Generation, pod: &str) {
        self.lock().pods.insert(engine.clone(), (generation, pod.to_owned()));
    }

    /// Returns the Pod of this engine generation; `None` before it has one.
    pub(crate) fn pod_of(&self, engine: &EngineId, generation: Generation) -> Option<String> {
        let inner = self.lock();
        inner.pods.get(engine).filter(|(known, _)| *known == generation).map(|(_, pod)| pod.clone())
    }

    /// Records why this engine generation fails, as text for people.
    pub(crate) fn record_failure(&self, engine: &EngineId, generation: Generation, reason: &str) {
        let reason: String = reason.chars().take(MAX_FAILURE_CHARS).collect();
        self.lock().failures.insert(engine.model.clone(), (generation, reason.clone()));
        self.set_failure(&engine.model, Some(reason));
    }

    /// Clears the model's recorded failure.
    pub(crate) fn clear_failure(&self, model: &ModelName) {
        self.lock().failures.remove(model);
        self.set_failure(model, None);
    }

    /// Marks the model as changed, since its engine's state may stay the same.
    fn set_failure(&self, model: &ModelName, failure: Option<String>) {
        let mut inner = self.lock();
        let Some(facts) = inner.facts.get_mut(model).filter(|facts| facts.last_failure != failure) else {
            return;
        };
        facts.last_failure = failure;
        inner.changed_models.insert(model.clone());
        drop(inner);
        self.changed.notify_one();
    }

    pub(crate) fn forget_engine(&self, engine: &EngineId) {
        self.lock().pods.remove(engine);
    }

    /// Records what a turn of the decisions changed.
    pub(crate) fn record_turn(&self, fleet: &Fleet, plan: &Plan, changes: &RoutingChanges) {
        // Engines that end with this gateway cause no Events.
        if fleet.is_shutting_down() {
            return;
        }
        let mut inner = self.lock();
        if inner.demand.update(fleet, changes) {
            self.demand_changed.notify_one();
        }
        let mut models: BTreeSet<ModelName> = changes.rerouted().cloned().collect();
        let decides = fleet.is_active_leader().then(|| generation_floor::epoch_of(fleet.generation_floor()));
        if changes.may_reconfigure_any() {
            // A model that returns under the same name is a new one.
            inner.observed.retain(|(model, _), _| fleet.spec(model).is_some());
            inner.published_variants.retain(|model, _| fleet.spec(model).is_some());
            inner.failures.retain(|model, _| fleet.spec(model).is_some());
            inner.saturation.retain(|model, _| fleet.spec(model).is_some());
        }
        let turned = decides != inner.decides;
        if decides.is_some() {
            // Their last request may be a later one.
            models.extend(changes.demand.iter().filter(|model| fleet.spec(model).is_some()).cloned());
        }
        if changes.reconfigured || turned {
            models.extend(fleet.specs().map(|spec| spec.name.clone()));
        }
        inner.decides = decides;
        let configured = models.iter().filter_map(|model| fleet.spec(model));
        let published = configured.map(|spec| (spec.name.clone(), spec.cheapest_variant()));
        inner.published_variants.extend(published);
        let waiting = inner.wait_reasons.updated(fleet, plan, changes);
        let others = waiting.differing(&inner.wait_reasons);
        for model in &others {
            let event = event_content::memory_wait_event(inner.wait_reasons.get(model), waiting.get(model));
            inner.push_events(model, event.filter(|_| decides.is_some() && !turned));
        }
        models.extend(others);
        inner.wait_reasons = waiting;
        for model in models {
            let later = |engine: &Engine| {
                let failure = inner.failures.get(&model);
                engine.state == LifecycleState::Awake
                    && failure.is_some_and(|(of, _)| *of < engine.generation)
            };
            if fleet.engines_of(&model).any(later) {
                inner.failures.remove(&model);
            }
            if decides.is_some() {
                inner.compare_engines(fleet, &model, !turned);
            }
            let facts = inner.facts_of(fleet, &model);
            if inner.facts.get(&model) != Some(&facts) {
                inner.facts.insert(model.clone(), facts);
                inner.changed_models.insert(model);
            }
        }
        if changes.may_reconfigure_any() {
            // Engines of a model that is no longer configured finish their requests first, and their end is reported.
            let StatusInputsState { facts, changed_models, .. } = &mut *inner;
            facts.retain(|model, _| {
                fleet.spec(model).is_some()
                    || fleet.engines_of(model).next().is_some()
                    || changed_models.contains(model)
            });
            inner.snapshots.retain(|model, _| fleet.spec(model).is_some());
        }
        if turned || !inner.changed_models.is_empty() || !inner.events.is_empty() {
            drop(inner);
            self.changed.notify_one();
        }
    }

    /// Takes the Events since the last call.
    pub fn take_events(&self) -> Vec<(ModelName, EventContent)> {
        std::mem::take(&mut self.lock().events)
    }

    /// Marks known facts of these models as changed, for a reader that dropped them.
    pub fn mark_changed<'a>(&self, models: impl Iterator<Item = &'a ModelName>) {
        let mut inner = self.lock();
        let known: Vec<ModelName> =
            models.filter(|model| inner.facts.contains_key(*model)).cloned().collect();
        inner.changed_models.extend(known);
    }

    /// Records that a waiting request was refused for lack of memory.
    pub(crate) fn record_refusal(&self, fleet: &Fleet, fault: &Fault) {
        let Fault::InsufficientMemory(shortage) = fault else { return };
        let mut inner = self.lock();
        // This text names the engines that hold the memory, if there are any.
        let waited_for = &shortage.wait.waited_for;
        let waiting = ModelWaitReason::Memory(if waited_for.is_empty() {
            fault.to_string()
        } else {
            waited_for.clone()
        });
        let event = event_content::memory_wait_event(inner.wait_reasons.get(&shortage.model), Some(&waiting));
        let decides = inner.decides.is_some();
        inner.push_events(&shortage.model, event.filter(|_| decides));
        inner.facts.entry(shortage.model.clone()).or_default().wait_reason = Some(waiting.clone());
        inner.wait_reasons.record_refusal(fleet, &shortage.model, waiting);
        inner.changed_models.insert(shortage.model.clone());
        drop(inner);
        self.changed.notify_one();
    }

    /// Records the memory that this engine uses on one accelerator.
    pub(crate) fn record_usage(&self, engine: &EngineId, used: Bytes, now: Tick) {
        let EngineId { model, variant, .. } = engine;
        let mut inner = self.lock();
        let of_variant = (model.clone(), variant.clone());
        let before = inner.observed.get(&of_variant).map_or(Bytes::ZERO, |(peak, _)| *peak);
        inner.observed.insert(of_variant, (before.max(used), now));
        let Some(mut facts) = inner.facts.get(model).cloned() else { return };
        inner.add_observed(model, &mut facts);
        if inner.facts.get(model) == Some(&facts) {
            return;
        }
        inner.facts.insert(model.clone(), facts);
        inner.changed_models.insert(model.clone());
        drop(inner);
        self.changed.notify_one();
    }

    /// Records when requests for models last ended at this gateway.
    ///
    /// While a model is in use without a break, no turn says so.
    pub(crate) fn record_last_requests<'a>(&self, ended: impl Iterator<Item = (&'a ModelName, Tick)>) {
        let mut inner = self.lock();
        let mut is_later = false;
        for (model, at) in ended {
            let Some(facts) =
                inner.facts.get_mut(model).filter(|facts| facts.last_request.unwrap_or_default() < at)
            else {
                continue;
            };
            facts.last_request = Some(at);
            inner.changed_models.insert(model.clone());
            is_later = true;
        }
        drop(inner);
        if is_later {
            self.changed.notify_one();
        }
    }

    /// Waits until this gateway's demand has changed, and takes all changes since the last call.
    pub async fn demand_change(&self) -> DemandChange {
        loop {
            let change = self.lock().demand.take_change();
            if let Some(change) = change {
                return change;
            }
            self.demand_changed.notified().await;
        }
    }

    /// Whether the facts are those that this gateway decided on in the term of this epoch.
    ///
    /// Otherwise they are derived from published states, or left over from a former term of this gateway.
    pub fn decides_in(&self, epoch: u64) -> bool {
        self.lock().decides == Some(epoch)
    }

    /// Completes when there are new facts or Events.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Takes the facts that changed since the last call.
    pub fn take_facts(&self) -> BTreeMap<ModelName, ModelFacts> {
        let mut inner = self.lock();
        let changed = std::mem::take(&mut inner.changed_models);
        changed
            .into_iter()
            .filter_map(|model| Some((model.clone(), inner.facts.get(&model)?.clone())))
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, StatusInputsState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StatusInputsState {
    fn push_events(&mut self, model: &ModelName, events: impl IntoIterator<Item = EventContent>) {
        let free = MAX_PENDING_EVENTS.saturating_sub(self.events.len());
        self.events.extend(events.into_iter().take(free).map(|event| (model.clone(), event)));
    }

    /// Updates the model's snapshots. Queues the differences as Events if `in_conditions`, else only sets the baseline.
    fn compare_engines(&mut self, fleet: &Fleet, model: &ModelName, in_conditions: bool) {
        let now: Vec<EngineSnapshot> = fleet.engines_of(model).map(EngineSnapshot::of).collect();
        let before = self.snapshots.insert(model.clone(), now).unwrap_or_default();
        if in_conditions {
            let now = self.snapshots.get(model).map(Vec::as_slice).unwrap_or_default();
            let events = event_content::engine_events(&before, now);
            self.push_events(model, events);
        }
    }

    fn facts_of(&self, fleet: &Fleet, model: &ModelName) -> ModelFacts {
        let engines: Vec<&Engine> = fleet.engines_of(model).collect();
        let spec = fleet.spec(model);
        let known = self.facts.get(model).and_then(|facts| facts.last_request);
        let last =
            engines.iter().map(|engine| engine.last_lease_end).max().filter(|at| *at > Tick(0)).max(known);
        let listed: Vec<EngineStatus> =
            engines.iter().filter_map(|engine| self.status(fleet, engine)).collect();
        let measured = fleet.learned_of(model, &self.published_variant(model));
        let listed_variants = spec.into_iter().flat_map(|spec| &spec.variants);
        let of_variant = |variant: &EngineVariant| {
            Some((variant.name.clone(), learned(fleet.learned_of(model, &variant.name)?)?))
        };
        let mut facts = ModelFacts {
            engines: listed,
            wait_reason: self.wait_reasons.get(model).cloned(),
            last_failure: self.failures.get(model).map(|(_, why)| why.clone()),
            unplaceable: fleet.unplaceable_reason(model),
            last_outcome: fleet.last_outcome(model).map(|past| past.describe() + &past.diagnostics()),
            start_failed: engines.iter().any(|engine| engine.failed_to_start()),
            peak: measured.and_then(|learned| learned.observed),
            observed: None,
            learned: spec.and(measured).and_then(learned),
            learned_of_variants: listed_variants.filter_map(of_variant).collect(),
            last_request: last,
            saturation: self.saturation.get(model).cloned(),
        };
        self.add_observed(model, &mut facts);
        facts
    }

    /// The variant whose memory and measurements are the model's own in its status: the cheapest, whose memory it
    /// declares.
    fn published_variant(&self, model: &ModelName) -> VariantName {
        self.published_variants.get(model).cloned().unwrap_or_default()
    }

    /// Merges the observed peaks into the facts. The decisions get the same observations a moment later.
    fn add_observed(&self, model: &ModelName, facts: &mut ModelFacts) {
        for (variant, (peak, _)) in self.observed_of(model).filter(|(variant, _)| !variant.is_default()) {
            let learned = facts.learned_of_variants.entry(variant.clone()).or_default();
            let before = learned.peak.as_ref().and_then(|peak| peak.bytes().ok());
            learned.peak = Some(before.unwrap_or_default().max(*peak).into());
        }
        let published = self.published_variant(model);
        let of_published = self.observed_of(model).find(|(variant, _)| **variant == published);
        let Some((_, (peak, at))) = of_published else { return };
        let peak = facts.peak.unwrap_or_default().max(*peak);
        (facts.peak, facts.observed) = (Some(peak), Some(*at));
        facts.learned.get_or_insert_default().peak = Some(peak.into());
    }

    /// Returns what was observed of each variant's memory.
    fn observed_of<'a>(
        &'a self,
        model: &'a ModelName,
    ) -> impl Iterator<Item = (&'a VariantName, &'a (Bytes, Tick))> {
        let first = (model.clone(), VariantName::from(""));
        let of_model = self.observed.range(first..).take_while(move |((of, _), _)| of == model);
        of_model.map(|((_, variant), observed)| (variant, observed))
    }

    /// Returns the engine's status; `None` for a cold engine.
    fn status(&self, fleet: &Fleet, engine: &Engine) -> Option<EngineStatus> {
        let known = self.pods.get(&engine.id).filter(|(generation, ..)| *generation == engine.generation);
        let EngineId { variant, replica, .. } = &engine.id;
        // The list of engines is keyed by Pod, so an engine without a Pod needs a placeholder.
        let none = || {
            if variant.is_default() {
                format!("none-yet-{replica}")
            } else {
                format!("none-yet-{variant}-{replica}")
            }
        };
        Some(EngineStatus {
            pod: known.map_or_else(none, |(_, pod)| pod.clone()),
            replica: *replica,
            variant: variant.to_string(),
            address: engine.address.map(|address| address.to_string()),
            accelerators: chosen_accelerators(fleet, engine),
            state: state(&engine.state)?,
            generation: engine.generation.0,
            since: Some(time(engine.since)),
            failure: PublishedFailure::of(engine).map(failure),
        })
    }
}

/// Returns the accelerators of an engine in a pool of slots. In another pool the decisions know only the pool.
fn chosen_accelerators(fleet: &Fleet, engine: &Engine) -> Vec<String> {
    match fleet.engine_spec(&engine.id).map(|spec| &spec.accelerators) {
        Some(AcceleratorRequirement::Slots { .. }) => {
            engine.accelerators.iter().map(ToString::to_string).collect()
        }
        _ => Vec::new(),
    }
}

fn learned(learned: LearnedMeasurements) -> Option<LearnedStatus> {
    let millis = |span: Option<rouse::units::Millis>| span.map(|span| span.0);
    let known = LearnedStatus {
        peak: learned.observed.map(Into::into),
        residue: learned.residue.map(Into::into),
        start_millis: millis(learned.start),
        wake_millis: millis(learned.wake),
        sleep_millis: millis(learned.sleep),
    };
    (known != LearnedStatus::default()).then_some(known)
}

fn failure(
    PublishedFailure { cause, failures, failures_since_serving: fruitless, until }: PublishedFailure,
) -> EngineFailure {
    EngineFailure { cause: cause.to_string(), failures, fruitless, retry_after: time(until) }
}

const fn state(state: &LifecycleState) -> Option<EngineState> {
    Some(match state {
        LifecycleState::Cold => return None,
        LifecycleState::Launching => EngineState::Launching,
        LifecycleState::Loading => EngineState::Loading,
        LifecycleState::Awake => EngineState::Awake,
        LifecycleState::Draining { .. } => EngineState::Draining,
        LifecycleState::FallingAsleep { .. } => EngineState::FallingAsleep,
        LifecycleState::Asleep { level: SleepLevel::One | SleepLevel::Two } => EngineState::Asleep,
        LifecycleState::Waking { .. } => EngineState::Waking,
        LifecycleState::Failing { .. } => EngineState::Failing,
        LifecycleState::Stopping { .. } => EngineState::Stopping,
        LifecycleState::Backoff { .. } => EngineState::Backoff,
    })
}

#[cfg(test)]
mod tests;
