//! Computes the status of an InferenceModel.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use rouse::{
    model::IdlePolicy,
    units::{self, Bytes, Millis, Tick},
};

use super::usage::usage;
use crate::{
    condition::{ACCEPTED, AVAILABLE, READY, accepted, condition, tick, time},
    crd::{
        InferenceModelStatus, Quantity,
        inference_model::{EngineState, EngineStatus, LearnedStatus, VariantStatus},
    },
    index::{RejectedModel, ServedModel},
};

/// Minimum growth of the last request's time that alone is worth a write.
const MIN_LAST_REQUEST_LAG: Millis = Millis::secs(30);
/// Minimum growth of a peak that is worth a write, in percent of the stored one.
const PEAK_STEP_PERCENT: u128 = 1;

/// What the index resolved for the model.
#[derive(Clone, Copy, Debug)]
pub enum ResolvedModel<'a> {
    Served(&'a ServedModel),
    Rejected(&'a RejectedModel),
}

/// Facts about the model beyond its object.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelFacts {
    pub engines: Vec<EngineStatus>,
    /// Number of engines that should exist.
    pub desired: u32,
    /// Why a wanted engine is missing.
    pub wait_reason: Option<ModelWaitReason>,
    /// Failure of the engine that failed last.
    pub last_failure: Option<String>,
    /// Why the model fits nowhere, whatever else is evicted.
    pub unplaceable: Option<String>,
    /// The last outcome, if the model has not served since.
    pub last_outcome: Option<String>,
    /// Whether that outcome is a failed start and no engine runs.
    pub start_failed: bool,
    /// Highest observed memory use of an engine on one accelerator.
    pub peak: Option<Bytes>,
    pub observed: Option<Tick>,
    pub learned: Option<LearnedStatus>,
    pub last_request: Option<Tick>,
}

/// Why a wanted engine is missing, according to the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelWaitReason {
    /// Memory that other engines hold, or that does not exist.
    Memory(String),
    Other(String),
}

/// Computes the wanted status. Unknown values stay as they are stored.
#[must_use]
pub fn model_status(
    model: ResolvedModel<'_>,
    facts: &ModelFacts,
    stored: Option<&InferenceModelStatus>,
    now: Tick,
) -> InferenceModelStatus {
    let nothing = InferenceModelStatus::default();
    let stored = stored.unwrap_or(&nothing);
    let state = readiness(model, facts);
    let generation = match model {
        ResolvedModel::Served(served) => served.generation,
        ResolvedModel::Rejected(rejected) => rejected.generation,
    };
    let declared = match model {
        ResolvedModel::Served(served) => declared(served),
        ResolvedModel::Rejected(_) => None,
    };
    let peak = peak(facts, stored);
    let used = declared.zip(peak).and_then(|(declared, peak)| usage(declared, peak));
    let engines = engines(model, facts);
    let learned = facts.learned.clone().or_else(|| stored.learned.clone());
    let last_request = facts.last_request.max(stored.last_request_time.as_ref().map(tick));
    InferenceModelStatus {
        observed_generation: generation,
        ready: state.ready,
        replicas: u32::try_from(facts.engines.len()).unwrap_or(u32::MAX),
        variants: variants(model, &engines, facts.desired, &stored.variants, now),
        engines,
        declared_memory: declared.map(Quantity::from),
        observed_peak_memory: peak.map(Quantity::from),
        utilization_percent: used.as_ref().map(|used| used.percent),
        recommendation: used.and_then(|used| used.recommendation),
        last_observation: facts.observed.max(stored.last_observation.as_ref().map(tick)).map(time),
        learned: learned.map(|learned| LearnedStatus { peak: peak.map(Quantity::from), ..learned }),
        last_request_time: last_request.map(time),
        conditions: conditions(model, &state, generation, &stored.conditions, now),
    }
}

/// Whether the status is worth a write.
///
/// A later observation time alone is not, and neither is a time of the last request that grew by less than `patience`.
#[must_use]
pub fn model_differs(
    stored: Option<&InferenceModelStatus>,
    desired: &InferenceModelStatus,
    patience: Millis,
) -> bool {
    let Some(stored) = stored else {
        return true;
    };
    let requested = |status: &InferenceModelStatus| status.last_request_time.as_ref().map(tick);
    let soon = match (requested(stored), requested(desired)) {
        (Some(Tick(before)), Some(Tick(after))) => after.saturating_sub(before) < patience.0,
        (before, after) => before == after,
    };
    let expected = InferenceModelStatus {
        last_observation: stored.last_observation.clone(),
        last_request_time: stored.last_request_time.clone(),
        ..desired.clone()
    };
    !soon || expected != *stored
}

/// Returns the highest known peak, or the stored peak if the new one is hardly higher.
fn peak(facts: &ModelFacts, stored: &InferenceModelStatus) -> Option<Bytes> {
    let written = stored.observed_peak_memory.as_ref().and_then(|written| written.bytes().ok());
    let worth = |observed: Bytes, before: Bytes| {
        u128::from(observed.0) * 100 >= u128::from(before.0) * (100 + PEAK_STEP_PERCENT)
    };
    match (facts.peak, written) {
        (Some(observed), Some(before)) if !worth(observed, before) => written,
        (observed, written) => observed.or(written),
    }
}

/// Returns the lag allowed for the stored time of the last request: a tenth of the idle time until sleep, at least 30
/// s.
#[must_use]
pub fn max_last_request_lag(idle: &IdlePolicy) -> Millis {
    idle.sleep_after.map_or(MIN_LAST_REQUEST_LAG, |Millis(span)| MIN_LAST_REQUEST_LAG.max(Millis(span / 10)))
}

/// Returns the declared memory on one accelerator, for the variant that runs.
fn declared(served: &ServedModel) -> Option<Bytes> {
    let run = served.pool.as_ref().and_then(|_| served.variant());
    run.map(|variant| variant.spec.memory.awake).or(served.model.declared)
}

/// Assigns engines without a known variant, which have no Pod yet, to the variant that runs now.
fn engines(model: ResolvedModel<'_>, facts: &ModelFacts) -> Vec<EngineStatus> {
    let mut engines = facts.engines.clone();
    if let ResolvedModel::Served(served) = model
        && let Some(now) = served.variant()
    {
        let known = |name: &String| served.model.variants.iter().any(|variant| variant.name == *name);
        for engine in engines.iter_mut().filter(|engine| !known(&engine.variant)) {
            engine.variant.clone_from(&now.name);
        }
    }
    engines
}

fn variants(
    model: ResolvedModel<'_>,
    engines: &[EngineStatus],
    wanted: u32,
    stored: &[VariantStatus],
    now: Tick,
) -> Vec<VariantStatus> {
    let ResolvedModel::Served(served) = model else {
        return Vec::new();
    };
    let status = |(index, variant): (usize, &crate::convert::ModelVariant)| {
        let engines = engines.iter().filter(|engine| engine.variant == variant.name).count();
        let desired = if index == served.variant { wanted } else { 0 };
        let before = stored.iter().find(|before| before.name == variant.name && before.desired == desired);
        VariantStatus {
            name: variant.name.clone(),
            replicas: u32::try_from(engines).unwrap_or(u32::MAX),
            desired,
            reason: None,
            decided: before.map_or_else(|| Some(time(now)), |before| before.decided.clone()),
        }
    };
    served.model.variants.iter().enumerate().map(status).collect()
}

fn conditions(
    model: ResolvedModel<'_>,
    state: &ModelReadiness,
    generation: Option<i64>,
    before: &[Condition],
    now: Tick,
) -> Vec<Condition> {
    let accepted = match model {
        ResolvedModel::Rejected(rejected) => accepted(Some(&rejected.rejections), generation, before, now),
        ResolvedModel::Served(served) if served.notes.is_empty() => accepted(None, generation, before, now),
        ResolvedModel::Served(served) => {
            let text = format!("the model is served; {}", served.notes.join("; "));
            condition(ACCEPTED, true, "Accepted", &text, generation, before, now)
        }
    };
    let of = |kind, status| condition(kind, status, state.reason, &state.message, generation, before, now);
    vec![accepted, of(READY, state.ready), of(AVAILABLE, state.available)]
}

/// Content of the conditions Ready and Available.
#[derive(Debug)]
struct ModelReadiness {
    ready: bool,
    available: bool,
    reason: &'static str,
    message: String,
}

impl ModelReadiness {
    fn available(reason: &'static str, message: impl Into<String>) -> Self {
        Self { ready: false, available: true, reason, message: message.into() }
    }

    fn unavailable(reason: &'static str, message: impl Into<String>) -> Self {
        Self { ready: false, available: false, reason, message: message.into() }
    }
}

/// Derives readiness from the best engine state, then from the most severe reason to wait.
fn readiness(model: ResolvedModel<'_>, facts: &ModelFacts) -> ModelReadiness {
    let served = match model {
        ResolvedModel::Served(served) => served,
        ResolvedModel::Rejected(rejected) => {
            return ModelReadiness::unavailable(
                rejected.rejections.reason(),
                rejected.rejections.to_string(),
            );
        }
    };
    let count = |states: &[EngineState]| {
        let found = facts.engines.iter().filter(|engine| states.contains(&engine.state)).count();
        (found > 0).then(|| units::pluralize(found, "engine"))
    };
    let external = served.pool.is_none();
    if let Some(engines) = count(&[EngineState::Awake]) {
        let message = if external { "the backend serves".to_owned() } else { format!("awake: {engines}") };
        return ModelReadiness { ready: true, available: true, reason: "Deployed", message };
    }
    if let Some(engines) = count(&[EngineState::Waking]) {
        return ModelReadiness::available("Waking", format!("waking: {engines}"));
    }
    if let Some(engines) = count(&[EngineState::Launching, EngineState::Loading]) {
        if external {
            // Rouse does not start an external backend, so a backend that does not answer is unavailable.
            let reason = facts.last_failure.as_deref().unwrap_or("the backend has not answered yet");
            return ModelReadiness::unavailable("Deploying", reason);
        }
        return ModelReadiness::available("Deploying", format!("starting: {engines}"));
    }
    // A pool problem also makes a model unplaceable; its own reason follows below.
    if let Some(why) =
        facts.unplaceable.as_ref().filter(|_| served.blocked_by.is_none() && facts.engines.is_empty())
    {
        return ModelReadiness::unavailable("Unplaceable", why);
    }
    let why = match &facts.wait_reason {
        Some(ModelWaitReason::Memory(why)) => return ModelReadiness::unavailable("InsufficientMemory", why),
        Some(ModelWaitReason::Other(why)) => Some(why.as_str()),
        None => None,
    };
    if let Some(engines) = count(&[EngineState::Failing, EngineState::Backoff]) {
        let why = why.map_or_else(|| format!("failed: {engines}"), str::to_owned);
        let failure = facts.last_failure.iter().map(|failure| format!("; {failure}"));
        return ModelReadiness::unavailable("Failed", why + &failure.collect::<String>());
    }
    if let Some(why) = &served.blocked_by {
        return ModelReadiness::unavailable("PoolNotReady", why);
    }
    if external {
        return ModelReadiness::unavailable("Deploying", why.unwrap_or("the backend has not answered yet"));
    }
    idle_readiness(why, facts, &count)
}

/// Readiness when no engine serves or starts, and nothing blocks a start.
fn idle_readiness(
    why: Option<&str>,
    facts: &ModelFacts,
    count: &dyn Fn(&[EngineState]) -> Option<String>,
) -> ModelReadiness {
    let past = facts.last_outcome.as_deref();
    let (reason, message) = if let Some(engines) = count(&[EngineState::Draining]) {
        ("Draining", format!("finishing requests, accepting no new ones: {engines}"))
    } else if let Some(engines) = count(&[EngineState::Asleep, EngineState::FallingAsleep]) {
        ("Asleep", format!("asleep until the next request: {engines}"))
    } else if let Some(engines) = count(&[EngineState::Stopping]) {
        ("Stopping", format!("stopping: {engines}"))
    } else if let Some(past) = past.filter(|_| facts.start_failed) {
        return ModelReadiness::unavailable(
            "Failed",
            format!("{past}; the next request starts the engine again"),
        );
    } else {
        let past = past.map(|past| format!(", {past}")).unwrap_or_default();
        ("ScaledToZero", format!("no engine is running{past}: the next request starts one"))
    };
    ModelReadiness::available(reason, why.map_or(message, str::to_owned))
}
