//! What the decisions say of each model, for its status.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, MutexGuard, PoisonError},
};

use rouse::{
    engine::{Engine, state::State},
    fault::Fault,
    fleet::{Changes, Fleet, Plan},
    model::{EngineId, Level, ModelName},
    units::{Generation, Tick},
};
use tokio::sync::Notify;

use super::{
    condition::time,
    crd::inference_model::{DEFAULT_VARIANT, EngineState, EngineStatus, Learned},
    status::{Facts, Waiting},
};

/// Facts of models that have changed since somebody took them.
#[derive(Debug, Default)]
pub struct Told {
    inner: Mutex<Inner>,
    changed: Notify,
    edge: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    facts: BTreeMap<ModelName, Facts>,
    /// Those of them that nobody has taken.
    news: BTreeSet<ModelName>,
    /// This gateway leads, and knows what runs.
    decides: bool,
    /// Models that somebody waits for here, and models that are being used here.
    wanted: BTreeSet<ModelName>,
    used: BTreeSet<ModelName>,
    /// What each model waits for, as it was last told.
    waiting: BTreeMap<ModelName, Waiting>,
    /// In which Pod each life runs.
    pods: BTreeMap<EngineId, (Generation, String)>,
}

impl Told {
    /// This life has this Pod.
    pub(crate) fn runs_in(&self, engine: &EngineId, generation: Generation, pod: &str) {
        self.inner().pods.insert(engine.clone(), (generation, pod.to_owned()));
    }

    pub(crate) fn is_over(&self, engine: &EngineId) {
        self.inner().pods.remove(engine);
    }

    /// Takes note of what a turn of the decisions has changed.
    pub(crate) fn follow(&self, fleet: &Fleet, plan: &Plan, changes: &Changes) {
        // What ends with this gateway is no news of engines.
        if fleet.is_shutting_down() {
            return;
        }
        let mut inner = self.inner();
        if inner.turn(fleet) {
            self.edge.notify_one();
        }
        let mut models: BTreeSet<ModelName> = changes.models.clone();
        let decides = fleet.decides();
        if changes.configured || decides != inner.decides {
            models.extend(fleet.specs().map(|spec| spec.name.clone()));
        }
        inner.decides = decides;
        let mut waiting: BTreeMap<ModelName, Waiting> = fleet
            .reasons(plan)
            .map(|(model, text, memory)| {
                let text = text.to_owned();
                (model.clone(), if memory { Waiting::Memory(text) } else { Waiting::Other(text) })
            })
            .collect();
        // Whoever was refused for want of memory waits no longer, and would be refused again until somebody gives some back.
        let given_back =
            |model: &ModelName| fleet.engines_of(model).any(|engine| !engine.state.has_process());
        if !changes.configured && !changes.models.iter().any(given_back) {
            let wants = |(model, why): &(&ModelName, &Waiting)| {
                matches!(why, Waiting::Memory(_)) && !changes.models.contains(*model)
            };
            for (model, why) in inner.waiting.iter().filter(wants) {
                waiting.entry(model.clone()).or_insert_with(|| why.clone());
            }
        }
        let differs = |model: &&ModelName| inner.waiting.get(*model) != waiting.get(*model);
        models.extend(inner.waiting.keys().chain(waiting.keys()).filter(differs).cloned());
        inner.waiting = waiting;
        if models.is_empty() {
            return;
        }
        for model in models {
            let facts = inner.facts_of(fleet, &model);
            inner.facts.insert(model.clone(), facts);
            inner.news.insert(model);
        }
        drop(inner);
        self.changed.notify_one();
    }

    /// Somebody who waited was sent away.
    pub(crate) fn refused(&self, fault: &Fault) {
        let Fault::InsufficientMemory(shortage) = fault else { return };
        let mut inner = self.inner();
        let waiting = Waiting::Memory(fault.to_string());
        inner.facts.entry(shortage.model.clone()).or_default().waiting = Some(waiting.clone());
        inner.waiting.insert(shortage.model.clone(), waiting);
        inner.news.insert(shortage.model.clone());
        drop(inner);
        self.changed.notify_one();
    }

    /// When a model has got its first waiter or its first request here, or has lost its last.
    pub async fn edge(&self) {
        self.edge.notified().await;
    }

    /// What is told here is what engines are, and no guess from what others say.
    pub fn decides(&self) -> bool {
        self.inner().decides
    }

    /// When there is something to take.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// What has changed since this was called last.
    pub fn take(&self) -> BTreeMap<ModelName, Facts> {
        let mut inner = self.inner();
        let news = std::mem::take(&mut inner.news);
        news.into_iter().filter_map(|model| Some((model.clone(), inner.facts.get(&model)?.clone()))).collect()
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Whether the demand of some model has begun or ended.
    fn turn(&mut self, fleet: &Fleet) -> bool {
        let wanted: BTreeSet<ModelName> = fleet.queued().cloned().collect();
        let used = fleet.engines().filter(|engine| engine.leases > 0);
        let used: BTreeSet<ModelName> = used.map(|engine| engine.id.model.clone()).collect();
        let moved = (&wanted, &used) != (&self.wanted, &self.used);
        (self.wanted, self.used) = (wanted, used);
        moved
    }

    fn facts_of(&self, fleet: &Fleet, model: &ModelName) -> Facts {
        let engines: Vec<&Engine> = fleet.engines_of(model).collect();
        let spec = fleet.spec(model);
        let last = engines.iter().map(|engine| engine.last_end).max().filter(|at| *at > Tick(0));
        let listed: Vec<EngineStatus> = engines.iter().filter_map(|engine| self.status(engine)).collect();
        let desired = engines.iter().filter(|engine| is_wanted(&engine.state)).count();
        Facts {
            desired: u32::try_from(desired).unwrap_or(u32::MAX),
            engines: listed,
            waiting: self.waiting.get(model).cloned(),
            learned: spec.and_then(|_| learned(fleet, model)),
            last_request: last,
            ..Facts::default()
        }
    }

    /// One that is cold is not listed.
    fn status(&self, engine: &Engine) -> Option<EngineStatus> {
        let pod = self.pods.get(&engine.id).filter(|(generation, _)| *generation == engine.generation);
        Some(EngineStatus {
            // A list of engines is keyed by their Pods, and one that has none yet must have a key as well.
            pod: pod.map_or_else(|| format!("none-yet-{}", engine.id.replica), |(_, pod)| pod.clone()),
            replica: engine.id.replica,
            variant: DEFAULT_VARIANT.to_owned(),
            address: engine.address.map(|address| address.to_string()),
            state: state(&engine.state)?,
            generation: engine.generation.0,
            since: Some(time(engine.since)),
        })
    }
}

fn learned(fleet: &Fleet, model: &ModelName) -> Option<Learned> {
    let learned = fleet.learned_of(model)?;
    let millis = |span: Option<rouse::units::Millis>| span.map(|span| span.0);
    let known = Learned {
        peak: learned.peak.map(Into::into),
        residue: learned.residue.map(Into::into),
        start_millis: millis(learned.start),
        wake_millis: millis(learned.wake),
        sleep_millis: millis(learned.sleep),
    };
    (known != Learned::default()).then_some(known)
}

const fn state(state: &State) -> Option<EngineState> {
    Some(match state {
        State::Cold => return None,
        State::Launching => EngineState::Launching,
        State::Loading => EngineState::Loading,
        State::Awake => EngineState::Awake,
        State::Draining { .. } => EngineState::Draining,
        State::FallingAsleep { .. } => EngineState::FallingAsleep,
        State::Asleep { level: Level::One | Level::Two } => EngineState::Asleep,
        State::Waking { .. } => EngineState::Waking,
        State::Failing { .. } => EngineState::Failing,
        State::Stopping { .. } => EngineState::Stopping,
        State::Backoff { .. } => EngineState::Backoff,
    })
}

/// It is there to stay, or on its way up.
const fn is_wanted(state: &State) -> bool {
    matches!(
        state,
        State::Launching | State::Loading | State::Awake | State::Asleep { .. } | State::Waking { .. }
    )
}
