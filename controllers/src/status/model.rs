//! Computes the status of an InferenceModel.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use rouse::{
    model::{IdlePolicy, VariantName},
    units::{self, Bytes, Millis, Tick},
};

use super::usage::usage;
use crate::{
    condition::{ACCEPTED, AVAILABLE, READY, SATURATION_CONDITIONS, accepted, condition, tick, time},
    crd::{
        InferenceModelStatus, Quantity,
        inference_model::{EngineState, EngineStatus, LearnedStatus, SaturationStatus, VariantStatus},
    },
    index::{RejectedModel, ServedModel},
    label, workload,
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
    /// What is known of each variant, if the model lists variants.
    pub learned_of_variants: BTreeMap<VariantName, LearnedStatus>,
    pub last_request: Option<Tick>,
    /// What saturation decided. `None`: nothing yet, or it does not scale the model.
    pub saturation: Option<SaturationFacts>,
}

/// What the controller of saturation found and decided about a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SaturationFacts {
    pub status: SaturationStatus,
    pub conditions: Vec<SaturationCondition>,
}

/// A condition of a model that saturation scales.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaturationCondition {
    /// One of [`SATURATION_CONDITIONS`].
    pub kind: &'static str,
    pub status: bool,
    pub reason: &'static str,
    pub message: String,
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
    let declared = match model {
        ResolvedModel::Served(served) => declared(served),
        ResolvedModel::Rejected(_) => None,
    };
    let peak = peak(facts.peak, stored.observed_peak_memory.as_ref());
    let used = declared.zip(peak).and_then(|(declared, peak)| usage(declared, peak));
    let saturation = saturation(model, facts, stored);
    let learned = merge_learned(facts.learned.as_ref(), stored.learned.as_ref());
    let last_request = facts.last_request.max(stored.last_request_time.as_ref().map(tick));
    InferenceModelStatus {
        observed_generation: model.generation(),
        ready: state.ready,
        replicas: count(&facts.engines, |engine| engine.state.is_replica()),
        asleep: count(&facts.engines, |engine| engine.state.is_asleep()),
        selector: selector(model),
        variants: variants(model, facts, saturation.as_ref(), &stored.variants, now),
        engines: facts.engines.clone(),
        declared_memory: declared.map(Quantity::from),
        observed_peak_memory: peak.map(Quantity::from),
        utilization_percent: used.as_ref().map(|used| used.percent),
        recommendation: used.and_then(|used| used.recommendation),
        last_observation: facts.observed.max(stored.last_observation.as_ref().map(tick)).map(time),
        learned: learned.map(|learned| LearnedStatus { peak: peak.map(Quantity::from), ..learned }),
        last_request_time: last_request.map(time),
        saturation,
        conditions: conditions(model, facts, &state, &stored.conditions, now),
    }
}

/// What of a status is worth a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusDifference {
    Nothing,
    /// The time of the last request alone.
    LastRequest,
    More,
}

/// Returns what is worth a write.
///
/// A later observation time alone is not, and neither is a time of the last request that grew by less than `patience`.
#[must_use]
pub fn model_difference(
    stored: Option<&InferenceModelStatus>,
    desired: &InferenceModelStatus,
    patience: Millis,
) -> StatusDifference {
    let Some(stored) = stored else {
        return StatusDifference::More;
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
    match (expected == *stored, soon) {
        (false, _) => StatusDifference::More,
        (true, false) => StatusDifference::LastRequest,
        (true, true) => StatusDifference::Nothing,
    }
}

/// Returns the highest known peak, or the stored peak if the new one is hardly higher.
fn peak(observed: Option<Bytes>, stored: Option<&Quantity>) -> Option<Bytes> {
    let written = stored.and_then(|written| written.bytes().ok());
    let worth = |observed: Bytes, before: Bytes| {
        u128::from(observed.0) * 100 >= u128::from(before.0) * (100 + PEAK_STEP_PERCENT)
    };
    match (observed, written) {
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

/// Returns the declared memory on one accelerator, of the cheapest variant that runs.
fn declared(served: &ServedModel) -> Option<Bytes> {
    let cheapest = served.cheapest().filter(|_| !served.is_external());
    let converted = cheapest.and_then(|variant| served.converted(variant));
    converted.map(|variant| variant.spec.memory.awake).or(served.model.declared)
}

fn count(engines: &[EngineStatus], counts: impl Fn(&EngineStatus) -> bool) -> u32 {
    u32::try_from(engines.iter().filter(|engine| counts(engine)).count()).unwrap_or(u32::MAX)
}

/// Returns the label selector of the model's Pods; `None` if Rouse runs none.
fn selector(model: ResolvedModel<'_>) -> Option<String> {
    let ResolvedModel::Served(served) = model else { return None };
    let label = label::value(served.spec.name.as_str());
    (!served.is_external())
        .then(|| format!("{}={},{}={label}", workload::MANAGED, workload::ROUSE, label::MODEL))
}

/// Returns the decisions of saturation: the stored ones until this leader has decided itself.
fn saturation(
    model: ResolvedModel<'_>,
    facts: &ModelFacts,
    stored: &InferenceModelStatus,
) -> Option<SaturationStatus> {
    if !is_scaled(model) {
        return None;
    }
    let decided = facts.saturation.as_ref().map(|facts| facts.status.clone());
    decided.or_else(|| stored.saturation.clone())
}

/// Whether saturation scales the model.
fn is_scaled(model: ResolvedModel<'_>) -> bool {
    matches!(model, ResolvedModel::Served(served) if served.model.saturation.is_some())
}

fn variants(
    model: ResolvedModel<'_>,
    facts: &ModelFacts,
    saturation: Option<&SaturationStatus>,
    stored: &[VariantStatus],
    now: Tick,
) -> Vec<VariantStatus> {
    let ResolvedModel::Served(served) = model else {
        // What was learned outlasts a mistake in the object.
        let learned = stored.iter().filter(|stored| stored.learned.is_some());
        let kept = learned.map(|VariantStatus { name, learned, .. }| VariantStatus {
            name: name.clone(),
            learned: learned.clone(),
            ..VariantStatus::default()
        });
        return kept.collect();
    };
    let status = |variant: &crate::convert::ModelVariant| {
        let name = variant.name.as_str();
        let engines = |is_counted: fn(EngineState) -> bool| {
            count(&facts.engines, |engine| engine.variant == name && is_counted(engine.state))
        };
        let replicas = engines(EngineState::is_replica);
        let mut targets = saturation.into_iter().flat_map(|saturation| &saturation.targets);
        let target = targets.find(|target| target.variant == name);
        // Without saturation, what there is follows from requests alone.
        let desired = target.map_or(replicas, |target| target.replicas);
        let before = stored.iter().find(|before| before.name == name && before.desired == desired);
        let unchanged = before.map_or_else(|| Some(time(now)), |before| before.decided.clone());
        let stored = stored.iter().find(|stored| stored.name == name);
        let stored = stored.and_then(|stored| stored.learned.as_ref());
        VariantStatus {
            name: name.to_owned(),
            replicas,
            asleep: engines(EngineState::is_asleep),
            desired,
            reason: target.map(|target| target.reason.clone()),
            decided: target.map_or(unchanged, |target| target.decided.clone()),
            learned: merge_learned(facts.learned_of_variants.get(&variant.name), stored),
        }
    };
    served.model.variants.iter().map(status).collect()
}

/// Returns what has been learned. Unknown values stay as they are stored.
fn merge_learned(known: Option<&LearnedStatus>, stored: Option<&LearnedStatus>) -> Option<LearnedStatus> {
    let (Some(known), Some(stored)) = (known, stored) else { return known.or(stored).cloned() };
    let observed = known.peak.as_ref().and_then(|peak| peak.bytes().ok());
    Some(LearnedStatus {
        peak: peak(observed, stored.peak.as_ref()).map(Quantity::from),
        residue: known.residue.as_ref().or(stored.residue.as_ref()).cloned(),
        start_millis: known.start_millis.or(stored.start_millis),
        wake_millis: known.wake_millis.or(stored.wake_millis),
        sleep_millis: known.sleep_millis.or(stored.sleep_millis),
    })
}

fn conditions(
    model: ResolvedModel<'_>,
    facts: &ModelFacts,
    state: &ModelReadiness,
    before: &[Condition],
    now: Tick,
) -> Vec<Condition> {
    let generation = model.generation();
    let accepted = match model {
        ResolvedModel::Rejected(rejected) => accepted(Some(&rejected.rejections), generation, before, now),
        ResolvedModel::Served(served) if served.notes.is_empty() => accepted(None, generation, before, now),
        ResolvedModel::Served(served) => {
            let text = format!("the model is served; {}", served.notes.join("; "));
            condition(ACCEPTED, true, "Accepted", &text, generation, before, now)
        }
    };
    let of = |kind, status| condition(kind, status, state.reason, &state.message, generation, before, now);
    let mut all = vec![accepted, of(READY, state.ready), of(AVAILABLE, state.available)];
    if is_scaled(model) {
        match &facts.saturation {
            Some(facts) => all.extend(facts.conditions.iter().map(|own| {
                condition(own.kind, own.status, own.reason, &own.message, generation, before, now)
            })),
            None => {
                let is_own =
                    |condition: &&Condition| SATURATION_CONDITIONS.contains(&condition.type_.as_str());
                all.extend(before.iter().filter(is_own).cloned());
            }
        }
    }
    all
}

impl ResolvedModel<'_> {
    /// Returns the generation of the object.
    const fn generation(self) -> Option<i64> {
        match self {
            Self::Served(served) => served.generation,
            Self::Rejected(rejected) => rejected.generation,
        }
    }
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
    let external = served.is_external();
    let blocked_by = served.blocked_by();
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
    if let Some(why) = facts.unplaceable.as_ref().filter(|_| blocked_by.is_none() && facts.engines.is_empty())
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
    if let Some(why) = blocked_by {
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
