//! Reasons of models that no request waits for: the state, and what happens next.
//!
//! Apart from the reasons of waiting models, because these follow from the recorded state and not from a plan.

use std::{cmp::Reverse, collections::BTreeMap};

use super::ModelReason;
use crate::{
    engine::{
        Engine,
        last_outcome::{LastOutcome, logs_hint},
        state::LifecycleState,
    },
    fleet::plan::Planner,
    model::{ModelName, ModelSpec},
};

impl Planner {
    /// Reason of a model without waiters: its state, and what happens next.
    pub(in crate::fleet) fn explain_without_demand(&self, model: &ModelName) -> ModelReason {
        if self.role.decides() && !self.adopted {
            return ModelReason::starting("the gateway is looking for engines that are already running");
        }
        if let Some(since) =
            self.api_unreachable_since.filter(|_| !self.engines_of(model).any(Engine::serves))
        {
            return ModelReason::api_unreachable(since);
        }
        // The engine that says most about the model: of awake engines, the last used one.
        let significance = |e: &&Engine| (!e.serves(), !e.state.is_starting(), Reverse(e.idle_since()));
        let Some(e) = self.engines_of(model).min_by_key(significance) else {
            return ModelReason::starting("removed");
        };
        let spec = self.engine_spec(&e.id);
        let idle = spec.map(|s| s.idle);
        let serving = || self.engines_of(model).filter(|e| e.serves());
        let awake = match self.expected_replicas(model) {
            1 => "awake".to_owned(),
            replicas => format!("{} of {replicas} engines awake", serving().count()),
        };
        let limit = spec.and_then(|s| s.max_concurrency).unwrap_or(u32::MAX);
        let text = match &e.state {
            _ if e.is_rehearsing() => {
                format!("rehearses its sleep, and then serves again: {} since {}", e.state, e.since)
            }
            LifecycleState::Awake if e.stub_gate_closed => format!("{awake}; its stub has closed the gate"),
            LifecycleState::Awake if self.is_kept_awake(&e.id) => {
                format!("{awake}; {}", self.kept_text(&e.id))
            }
            LifecycleState::Awake if self.keeping_dependent(e).is_some() => {
                format!("{awake}; {}", self.needed_by_text(e))
            }
            LifecycleState::Awake if self.is_full(e, limit) && serving().all(|e| self.is_full(e, limit)) => {
                format!("{awake}; {}", self.full_text(model))
            }
            LifecycleState::Awake if serving().any(|e| self.in_use_count(e) > 0) => {
                format!("{awake}; in use")
            }
            LifecycleState::Awake => match idle.and_then(|i| i.sleep_after) {
                Some(after) => match self.idle_at(e, after) {
                    Some(at) => format!("{awake}; idle since {}, idle timeout at {at}", e.idle_since()),
                    None => format!("{awake}; idle at this gateway, use at other gateways is unknown"),
                },
                None => format!("{awake}; no idle timeout"),
            },
            LifecycleState::Cold | LifecycleState::Asleep { .. } if e.pending_reservation.is_some() => {
                let missing = self
                    .first_missing(model)
                    .map_or_else(String::new, |m| format!("; waits for its dependency '{m}'"));
                format!("its memory is reserved{missing}")
            }
            LifecycleState::Asleep { level } => {
                let since =
                    e.last_outcome.as_ref().map(|past| format!("; {}", past.describe())).unwrap_or_default();
                let stopped = idle
                    .and_then(|idle| e.sleeper_stops_at(&idle))
                    .map(|at| format!("; will be stopped at {at}"))
                    .unwrap_or_default();
                let never = self.impossible_reason(model).map(|reason| format!("; can never wake: {reason}"));
                format!("asleep at level {}{since}{}{stopped}", level.number(), never.unwrap_or_default())
            }
            LifecycleState::Cold => return self.explain_cold(e, spec),
            LifecycleState::Backoff { cause, .. } if !self.role.decides() => {
                format!("failed ({cause}); the leader will retry")
            }
            LifecycleState::Backoff { .. } if self.impossible_reason(model).is_some() => {
                return self.explain_cold(e, spec);
            }
            LifecycleState::Backoff { until, cause } => match spec {
                Some(spec) => return ModelReason::failed(e, spec, cause.clone(), *until, false),
                None => "removed".to_owned(),
            },
            state => format!("{state} since {}", e.since),
        };
        ModelReason { admin_details: e.diagnostics.describe(), ..ModelReason::starting(&text) }
    }

    /// Why no serving engine of this model takes a request: `at maxConcurrency`, or the load of saturated engines.
    pub(in crate::fleet) fn full_text(&self, model: &ModelName) -> String {
        let saturated = self.saturated_engines(model);
        saturated.map_or_else(|| "at maxConcurrency".to_owned(), |engines| engines.to_string())
    }

    /// Whether the engine has as many leases as it may have. `max_concurrency`: the configured number.
    pub(super) fn is_full(&self, e: &Engine, max_concurrency: u32) -> bool {
        e.leases >= e.max_leases(max_concurrency, self.last_planned)
    }

    /// Reason of a model without a process: its last outcome, and what a request would do.
    fn explain_cold(&self, e: &Engine, spec: Option<&ModelSpec>) -> ModelReason {
        let Some(spec) = spec else { return ModelReason::starting("removed") };
        if let Some(reason) = self.impossible_reason(&spec.name) {
            return ModelReason::starting(&format!("can never start: {reason}"));
        }
        let Some(past) = &e.last_outcome else {
            return ModelReason::starting("not running; starts on the next request");
        };
        let logs = if e.failure().is_some() { logs_hint(spec) } else { String::new() };
        let text = format!("not running: {}; starts on the next request{logs}", past.describe());
        ModelReason { admin_details: past.diagnostics(), ..ModelReason::starting(&text) }
    }

    /// Reason of a model that holds memory that another model waits for.
    ///
    /// It uses the words of that model's reason.
    pub(in crate::fleet) fn explain_contended(
        &self,
        model: &ModelName,
        reasons: &BTreeMap<ModelName, ModelReason>,
    ) -> Option<ModelReason> {
        let of = |reason: &'_ ModelReason| {
            reason.notes_for_holders.iter().find(|(holder, _)| holder == model).cloned()
        };
        let (waiting_model, (_, note)) =
            reasons.iter().find_map(|(waiting_model, reason)| Some((waiting_model, of(reason)?)))?;
        let state = self.model_state(model).as_str();
        Some(
            ModelReason::starting(&format!("{state}; {note}: '{waiting_model}' waits for its memory"))
                .naming(waiting_model),
        )
    }

    /// The latest outcome of an engine of this model that has not served since.
    pub(in crate::fleet) fn last_outcome_of(&self, model: &ModelName) -> Option<&LastOutcome> {
        self.engines_of(model).filter_map(|e| e.last_outcome.as_ref()).max_by_key(|past| past.at)
    }
}
