//! What the decisions say of each model, for its status and its Events.

mod wait_reasons;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, MutexGuard, PoisonError},
};

use rouse::{
    engine::{Engine, state::LifecycleState},
    fault::Fault,
    fleet::{Fleet, Plan, RoutingChanges, event::PublishedFailure},
    model::{EngineId, ModelName, SleepLevel},
    units::{Bytes, Generation, Tick},
};
use tokio::sync::Notify;
use wait_reasons::WaitReasons;

use super::{
    condition::time,
    crd::inference_model::{DEFAULT_VARIANT, EngineFailure, EngineState, EngineStatus, LearnedStatus},
    event_content::{self, EngineSnapshot, EventContent},
    status::{ModelFacts, ModelWaitReason},
};

/// News that nobody has taken. There are few in a turn, and what does not fit is left out.
const MAX_PENDING_EVENTS: usize = 1024;

/// Facts of models that have changed since somebody took them.
#[derive(Debug, Default)]
pub struct StatusInputs {
    inner: Mutex<StatusInputsState>,
    changed: Notify,
    demand_edge: Notify,
    use_changed: Notify,
}

#[derive(Debug, Default)]
struct StatusInputsState {
    facts: BTreeMap<ModelName, ModelFacts>,
    /// Those of them that nobody has taken.
    changed_models: BTreeSet<ModelName>,
    /// This gateway leads, and knows what runs.
    decides: bool,
    /// Models that somebody waits for here, and models that are being used here.
    queued_models: BTreeSet<ModelName>,
    used_models: BTreeSet<ModelName>,
    wait_reasons: WaitReasons,
    /// What the engines were when they were last looked at, while this gateway decides.
    snapshots: BTreeMap<ModelName, Vec<EngineSnapshot>>,
    events: Vec<(ModelName, EventContent)>,
    /// In which Pod each life runs, and as which variant.
    pods: BTreeMap<EngineId, (Generation, String, String)>,
    /// What the last life that failed had for a trouble with its Pod, until a later one is awake.
    failures: BTreeMap<ModelName, (Generation, String)>,
    /// The most that an engine of each model was seen to use here, on one accelerator, and when it was last looked.
    observed: BTreeMap<ModelName, (Bytes, Tick)>,
}

/// So much of somebody else's words goes into a condition.
const MAX_FAILURE_CHARS: usize = 1024;

impl StatusInputs {
    /// This life has this Pod, and is of this variant.
    pub(crate) fn set_pod(&self, engine: &EngineId, generation: Generation, pod: &str, variant: &str) {
        self.lock().pods.insert(engine.clone(), (generation, pod.to_owned(), variant.to_owned()));
    }

    /// Why this life comes to nothing, in words for people.
    pub(crate) fn record_failure(&self, engine: &EngineId, generation: Generation, why: &str) {
        let why: String = why.chars().take(MAX_FAILURE_CHARS).collect();
        self.lock().failures.insert(engine.model.clone(), (generation, why.clone()));
        self.set_failure(&engine.model, Some(why));
    }

    /// What was in the way of this model's engine is not any more.
    pub(crate) fn clear_failure(&self, model: &ModelName) {
        self.lock().failures.remove(model);
        self.set_failure(model, None);
    }

    /// That is news by itself: its engine may stay what it is.
    fn set_failure(&self, model: &ModelName, trouble: Option<String>) {
        let mut inner = self.lock();
        let Some(facts) = inner.facts.get_mut(model).filter(|facts| facts.last_failure != trouble) else {
            return;
        };
        facts.last_failure = trouble;
        inner.changed_models.insert(model.clone());
        drop(inner);
        self.changed.notify_one();
    }

    pub(crate) fn forget_engine(&self, engine: &EngineId) {
        self.lock().pods.remove(engine);
    }

    /// Takes note of what a turn of the decisions has changed.
    pub(crate) fn record_turn(&self, fleet: &Fleet, plan: &Plan, changes: &RoutingChanges) {
        // What ends with this gateway is no news of engines.
        if fleet.is_shutting_down() {
            return;
        }
        let mut inner = self.lock();
        let (wanted, used) = inner.update_demand(fleet);
        if wanted {
            self.demand_edge.notify_one();
        }
        if used {
            self.use_changed.notify_one();
        }
        let mut models: BTreeSet<ModelName> = changes.models.clone();
        let decides = fleet.is_active_leader();
        if changes.reconfigured {
            // One that comes again by the same name is another.
            inner.observed.retain(|model, _| fleet.spec(model).is_some());
        }
        let turned = decides != inner.decides;
        if changes.reconfigured || turned {
            models.extend(fleet.specs().map(|spec| spec.name.clone()));
        }
        inner.decides = decides;
        let waiting = inner.wait_reasons.updated(fleet, plan, changes);
        let others = waiting.differing(&inner.wait_reasons);
        for model in &others {
            let news = event_content::memory_wait_event(inner.wait_reasons.get(model), waiting.get(model));
            inner.push_events(model, news.filter(|_| decides && !turned));
        }
        models.extend(others);
        inner.wait_reasons = waiting;
        for model in models {
            let later = |engine: &Engine| {
                let trouble = inner.failures.get(&model);
                engine.state == LifecycleState::Awake
                    && trouble.is_some_and(|(of, _)| *of < engine.generation)
            };
            if fleet.engines_of(&model).any(later) {
                inner.failures.remove(&model);
            }
            if decides {
                inner.compare_engines(fleet, &model, !turned);
            }
            let facts = inner.facts_of(fleet, &model);
            if inner.facts.get(&model) != Some(&facts) {
                inner.facts.insert(model.clone(), facts);
                inner.changed_models.insert(model);
            }
        }
        if changes.reconfigured {
            inner.facts.retain(|model, _| fleet.spec(model).is_some());
            inner.snapshots.retain(|model, _| fleet.spec(model).is_some());
        }
        if turned || !inner.changed_models.is_empty() || !inner.events.is_empty() {
            drop(inner);
            self.changed.notify_one();
        }
    }

    /// What has happened to models since this was called last.
    pub fn take_events(&self) -> Vec<(ModelName, EventContent)> {
        std::mem::take(&mut self.lock().events)
    }

    /// What is known of these models is news again, to whoever had forgotten them.
    pub fn mark_changed<'a>(&self, models: impl Iterator<Item = &'a ModelName>) {
        let mut inner = self.lock();
        let known: Vec<ModelName> =
            models.filter(|model| inner.facts.contains_key(*model)).cloned().collect();
        inner.changed_models.extend(known);
    }

    /// Somebody who waited was sent away.
    pub(crate) fn record_refusal(&self, fleet: &Fleet, fault: &Fault) {
        let Fault::InsufficientMemory(shortage) = fault else { return };
        let mut inner = self.lock();
        // It says who has the memory, where anybody has.
        let why = &shortage.wait.waited_for;
        let waiting = ModelWaitReason::Memory(if why.is_empty() { fault.to_string() } else { why.clone() });
        let news = event_content::memory_wait_event(inner.wait_reasons.get(&shortage.model), Some(&waiting));
        let decides = inner.decides;
        inner.push_events(&shortage.model, news.filter(|_| decides));
        inner.facts.entry(shortage.model.clone()).or_default().wait_reason = Some(waiting.clone());
        inner.wait_reasons.record_refusal(fleet, &shortage.model, waiting);
        inner.changed_models.insert(shortage.model.clone());
        drop(inner);
        self.changed.notify_one();
    }

    /// An engine of this model was seen to use so much of one accelerator.
    pub(crate) fn record_usage(&self, model: &ModelName, used: Bytes, now: Tick) {
        let mut inner = self.lock();
        let before = inner.observed.get(model).map_or(Bytes::ZERO, |(peak, _)| *peak);
        inner.observed.insert(model.clone(), (before.max(used), now));
        let Some(mut facts) = inner.facts.get(model).cloned() else { return };
        inner.add_observed(model, &mut facts);
        inner.facts.insert(model.clone(), facts);
        inner.changed_models.insert(model.clone());
        drop(inner);
        self.changed.notify_one();
    }

    /// When a model has got its first waiter here, or has lost its last.
    pub async fn demand_edge(&self) {
        self.demand_edge.notified().await;
    }

    /// When another set of models is being used here.
    pub async fn use_changed(&self) {
        self.use_changed.notified().await;
    }

    /// What is told here is what engines are, and no guess from what others say.
    pub fn decides(&self) -> bool {
        self.lock().decides
    }

    /// When there is something to take.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// What has changed since this was called last.
    pub fn take_facts(&self) -> BTreeMap<ModelName, ModelFacts> {
        let mut inner = self.lock();
        let news = std::mem::take(&mut inner.changed_models);
        news.into_iter().filter_map(|model| Some((model.clone(), inner.facts.get(&model)?.clone()))).collect()
    }

    fn lock(&self) -> MutexGuard<'_, StatusInputsState> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StatusInputsState {
    /// Whether somebody has begun or ceased to wait for some model, and whether to use one.
    fn update_demand(&mut self, fleet: &Fleet) -> (bool, bool) {
        let wanted: BTreeSet<ModelName> = fleet.queued_models().cloned().collect();
        let used = fleet.engines().filter(|engine| engine.leases > 0);
        let used: BTreeSet<ModelName> = used.map(|engine| engine.id.model.clone()).collect();
        let moved = (wanted != self.queued_models, used != self.used_models);
        (self.queued_models, self.used_models) = (wanted, used);
        moved
    }

    fn push_events(&mut self, model: &ModelName, news: impl IntoIterator<Item = EventContent>) {
        let room = MAX_PENDING_EVENTS.saturating_sub(self.events.len());
        self.events.extend(news.into_iter().take(room).map(|news| (model.clone(), news)));
    }

    /// `told`: what became different is news; else it is where news begin.
    fn compare_engines(&mut self, fleet: &Fleet, model: &ModelName, told: bool) {
        let now: Vec<EngineSnapshot> = fleet.engines_of(model).map(EngineSnapshot::of).collect();
        let before = self.snapshots.insert(model.clone(), now).unwrap_or_default();
        if told {
            let now = self.snapshots.get(model).map(Vec::as_slice).unwrap_or_default();
            let news = event_content::engine_events(&before, now);
            self.push_events(model, news);
        }
    }

    fn facts_of(&self, fleet: &Fleet, model: &ModelName) -> ModelFacts {
        let engines: Vec<&Engine> = fleet.engines_of(model).collect();
        let spec = fleet.spec(model);
        let last = engines.iter().map(|engine| engine.last_lease_end).max().filter(|at| *at > Tick(0));
        let listed: Vec<EngineStatus> = engines.iter().filter_map(|engine| self.status(engine)).collect();
        let desired = engines.iter().filter(|engine| is_desired(&engine.state)).count();
        let mut facts = ModelFacts {
            desired: u32::try_from(desired).unwrap_or(u32::MAX),
            engines: listed,
            wait_reason: self.wait_reasons.get(model).cloned(),
            last_failure: self.failures.get(model).map(|(_, why)| why.clone()),
            unplaceable: fleet.unplaceable_reason(model),
            last_outcome: fleet.last_outcome(model).map(|past| past.describe() + &past.diagnostics()),
            start_failed: engines.iter().any(|engine| engine.failed_to_start()),
            peak: fleet.learned_of(model).and_then(|learned| learned.observed),
            observed: None,
            learned: spec.and_then(|_| learned(fleet, model)),
            last_request: last,
        };
        self.add_observed(model, &mut facts);
        facts
    }

    /// The decisions hear of it as well, a moment later.
    fn add_observed(&self, model: &ModelName, facts: &mut ModelFacts) {
        let Some((peak, at)) = self.observed.get(model) else { return };
        let peak = facts.peak.unwrap_or_default().max(*peak);
        (facts.peak, facts.observed) = (Some(peak), Some(*at));
        facts.learned.get_or_insert_default().peak = Some(peak.into());
    }

    /// One that is cold is not listed.
    fn status(&self, engine: &Engine) -> Option<EngineStatus> {
        let known = self.pods.get(&engine.id).filter(|(generation, ..)| *generation == engine.generation);
        // A list of engines is keyed by their Pods, and one that has none yet must have a key as well.
        let none = || (format!("none-yet-{}", engine.id.replica), DEFAULT_VARIANT.to_owned());
        let (pod, variant) = known.map_or_else(none, |(_, pod, variant)| (pod.clone(), variant.clone()));
        Some(EngineStatus {
            pod,
            replica: engine.id.replica,
            variant,
            address: engine.address.map(|address| address.to_string()),
            state: state(&engine.state)?,
            generation: engine.generation.0,
            since: Some(time(engine.since)),
            failure: PublishedFailure::of(engine).map(failure),
        })
    }
}

fn learned(fleet: &Fleet, model: &ModelName) -> Option<LearnedStatus> {
    let learned = fleet.learned_of(model)?;
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

/// It is there to stay, or on its way up.
const fn is_desired(state: &LifecycleState) -> bool {
    matches!(
        state,
        LifecycleState::Launching
            | LifecycleState::Loading
            | LifecycleState::Awake
            | LifecycleState::Asleep { .. }
            | LifecycleState::Waking { .. }
    )
}
