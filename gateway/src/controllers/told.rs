//! What the decisions say of each model, for its status and its Events.

mod wants;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, MutexGuard, PoisonError},
};

use rouse::{
    engine::{Engine, state::State},
    fault::Fault,
    fleet::{Changes, Fleet, Plan, event::Failure},
    model::{EngineId, Level, ModelName},
    units::{Bytes, Generation, Tick},
};
use tokio::sync::Notify;
use wants::Wants;

use super::{
    condition::time,
    crd::inference_model::{DEFAULT_VARIANT, EngineFailure, EngineState, EngineStatus, Learned},
    news::{self, News, Was},
    status::{Facts, Waiting},
};

/// News that nobody has taken. There are few in a turn, and what does not fit is left out.
const MOST_NEWS: usize = 1024;

/// Facts of models that have changed since somebody took them.
#[derive(Debug, Default)]
pub struct Told {
    inner: Mutex<Inner>,
    changed: Notify,
    edge: Notify,
    used: Notify,
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
    waiting: Wants,
    /// What the engines were when they were last looked at, while this gateway decides.
    was: BTreeMap<ModelName, Vec<Was>>,
    happened: Vec<(ModelName, News)>,
    /// In which Pod each life runs, and as which variant.
    pods: BTreeMap<EngineId, (Generation, String, String)>,
    /// What the last life that failed had for a trouble with its Pod, until a later one is awake.
    troubles: BTreeMap<ModelName, (Generation, String)>,
    /// The most that an engine of each model was seen to use here, on one accelerator, and when it was last looked.
    observed: BTreeMap<ModelName, (Bytes, Tick)>,
}

/// So much of somebody else's words goes into a condition.
const WORDS: usize = 1024;

impl Told {
    /// This life has this Pod, and is of this variant.
    pub(crate) fn runs_in(&self, engine: &EngineId, generation: Generation, pod: &str, variant: &str) {
        self.inner().pods.insert(engine.clone(), (generation, pod.to_owned(), variant.to_owned()));
    }

    /// Why this life comes to nothing, in words for people.
    pub(crate) fn fails(&self, engine: &EngineId, generation: Generation, why: &str) {
        let why: String = why.chars().take(WORDS).collect();
        self.inner().troubles.insert(engine.model.clone(), (generation, why.clone()));
        self.troubled(&engine.model, Some(why));
    }

    /// What was in the way of this model's engine is not any more.
    pub(crate) fn recovers(&self, model: &ModelName) {
        self.inner().troubles.remove(model);
        self.troubled(model, None);
    }

    /// That is news by itself: its engine may stay what it is.
    fn troubled(&self, model: &ModelName, trouble: Option<String>) {
        let mut inner = self.inner();
        let Some(facts) = inner.facts.get_mut(model).filter(|facts| facts.trouble != trouble) else { return };
        facts.trouble = trouble;
        inner.news.insert(model.clone());
        drop(inner);
        self.changed.notify_one();
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
        let (wanted, used) = inner.turn(fleet);
        if wanted {
            self.edge.notify_one();
        }
        if used {
            self.used.notify_one();
        }
        let mut models: BTreeSet<ModelName> = changes.models.clone();
        let decides = fleet.decides();
        if changes.configured {
            // One that comes again by the same name is another.
            inner.observed.retain(|model, _| fleet.spec(model).is_some());
        }
        let turned = decides != inner.decides;
        if changes.configured || turned {
            models.extend(fleet.specs().map(|spec| spec.name.clone()));
        }
        inner.decides = decides;
        let waiting = inner.waiting.after(fleet, plan, changes);
        let others = waiting.differing(&inner.waiting);
        for model in &others {
            let news = news::of_want(inner.waiting.get(model), waiting.get(model));
            inner.happened(model, news.filter(|_| decides && !turned));
        }
        models.extend(others);
        inner.waiting = waiting;
        for model in models {
            let later = |engine: &Engine| {
                let trouble = inner.troubles.get(&model);
                engine.state == State::Awake && trouble.is_some_and(|(of, _)| *of < engine.generation)
            };
            if fleet.engines_of(&model).any(later) {
                inner.troubles.remove(&model);
            }
            if decides {
                inner.look_at(fleet, &model, !turned);
            }
            let facts = inner.facts_of(fleet, &model);
            if inner.facts.get(&model) != Some(&facts) {
                inner.facts.insert(model.clone(), facts);
                inner.news.insert(model);
            }
        }
        if changes.configured {
            inner.facts.retain(|model, _| fleet.spec(model).is_some());
            inner.was.retain(|model, _| fleet.spec(model).is_some());
        }
        if turned || !inner.news.is_empty() || !inner.happened.is_empty() {
            drop(inner);
            self.changed.notify_one();
        }
    }

    /// What has happened to models since this was called last.
    pub fn happened(&self) -> Vec<(ModelName, News)> {
        std::mem::take(&mut self.inner().happened)
    }

    /// What is known of these models is news again, to whoever had forgotten them.
    pub fn again<'a>(&self, models: impl Iterator<Item = &'a ModelName>) {
        let mut inner = self.inner();
        let known: Vec<ModelName> =
            models.filter(|model| inner.facts.contains_key(*model)).cloned().collect();
        inner.news.extend(known);
    }

    /// Somebody who waited was sent away.
    pub(crate) fn refused(&self, fleet: &Fleet, fault: &Fault) {
        let Fault::InsufficientMemory(shortage) = fault else { return };
        let mut inner = self.inner();
        // It says who has the memory, where anybody has.
        let why = &shortage.wait.waited_for;
        let waiting = Waiting::Memory(if why.is_empty() { fault.to_string() } else { why.clone() });
        let news = news::of_want(inner.waiting.get(&shortage.model), Some(&waiting));
        let decides = inner.decides;
        inner.happened(&shortage.model, news.filter(|_| decides));
        inner.facts.entry(shortage.model.clone()).or_default().waiting = Some(waiting.clone());
        inner.waiting.refused(fleet, &shortage.model, waiting);
        inner.news.insert(shortage.model.clone());
        drop(inner);
        self.changed.notify_one();
    }

    /// An engine of this model was seen to use so much of one accelerator.
    pub(crate) fn observed(&self, model: &ModelName, used: Bytes, now: Tick) {
        let mut inner = self.inner();
        let before = inner.observed.get(model).map_or(Bytes::ZERO, |(peak, _)| *peak);
        inner.observed.insert(model.clone(), (before.max(used), now));
        let Some(mut facts) = inner.facts.get(model).cloned() else { return };
        inner.add_observed(model, &mut facts);
        inner.facts.insert(model.clone(), facts);
        inner.news.insert(model.clone());
        drop(inner);
        self.changed.notify_one();
    }

    /// When a model has got its first waiter here, or has lost its last.
    pub async fn edge(&self) {
        self.edge.notified().await;
    }

    /// When another set of models is being used here.
    pub async fn used(&self) {
        self.used.notified().await;
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
    /// Whether somebody has begun or ceased to wait for some model, and whether to use one.
    fn turn(&mut self, fleet: &Fleet) -> (bool, bool) {
        let wanted: BTreeSet<ModelName> = fleet.queued().cloned().collect();
        let used = fleet.engines().filter(|engine| engine.leases > 0);
        let used: BTreeSet<ModelName> = used.map(|engine| engine.id.model.clone()).collect();
        let moved = (wanted != self.wanted, used != self.used);
        (self.wanted, self.used) = (wanted, used);
        moved
    }

    fn happened(&mut self, model: &ModelName, news: impl IntoIterator<Item = News>) {
        let room = MOST_NEWS.saturating_sub(self.happened.len());
        self.happened.extend(news.into_iter().take(room).map(|news| (model.clone(), news)));
    }

    /// `told`: what became different is news; else it is where news begin.
    fn look_at(&mut self, fleet: &Fleet, model: &ModelName, told: bool) {
        let now: Vec<Was> = fleet.engines_of(model).map(Was::of).collect();
        let before = self.was.insert(model.clone(), now).unwrap_or_default();
        if told {
            let now = self.was.get(model).map(Vec::as_slice).unwrap_or_default();
            let news = news::of_engines(&before, now);
            self.happened(model, news);
        }
    }

    fn facts_of(&self, fleet: &Fleet, model: &ModelName) -> Facts {
        let engines: Vec<&Engine> = fleet.engines_of(model).collect();
        let spec = fleet.spec(model);
        let last = engines.iter().map(|engine| engine.last_end).max().filter(|at| *at > Tick(0));
        let listed: Vec<EngineStatus> = engines.iter().filter_map(|engine| self.status(engine)).collect();
        let desired = engines.iter().filter(|engine| is_wanted(&engine.state)).count();
        let mut facts = Facts {
            desired: u32::try_from(desired).unwrap_or(u32::MAX),
            engines: listed,
            waiting: self.waiting.get(model).cloned(),
            trouble: self.troubles.get(model).map(|(_, why)| why.clone()),
            misfit: fleet.misfit(model),
            past: fleet.past(model).map(|past| past.words() + &past.symptoms()),
            failed: engines.iter().any(|engine| engine.failed_to_start()),
            peak: fleet.learned_of(model).and_then(|learned| learned.observed),
            observed: None,
            learned: spec.and_then(|_| learned(fleet, model)),
            last_request: last,
        };
        self.add_observed(model, &mut facts);
        facts
    }

    /// The decisions hear of it as well, a moment later.
    fn add_observed(&self, model: &ModelName, facts: &mut Facts) {
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
            failure: Failure::of(engine).map(failure),
        })
    }
}

fn learned(fleet: &Fleet, model: &ModelName) -> Option<Learned> {
    let learned = fleet.learned_of(model)?;
    let millis = |span: Option<rouse::units::Millis>| span.map(|span| span.0);
    let known = Learned {
        peak: learned.observed.map(Into::into),
        residue: learned.residue.map(Into::into),
        start_millis: millis(learned.start),
        wake_millis: millis(learned.wake),
        sleep_millis: millis(learned.sleep),
    };
    (known != Learned::default()).then_some(known)
}

fn failure(Failure { cause, failures, fruitless, until }: Failure) -> EngineFailure {
    EngineFailure { cause: cause.to_string(), failures, fruitless, retry_after: time(until) }
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
