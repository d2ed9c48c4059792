//! Why nothing happens, or not yet: the texts of `explain`, and the details of every refusal.
//!
//! `memory` explains what a model waits for, `without_demand` the state of a model that no request waits for,
//! `saturated_engines` why awake engines take no request, and `variants` counts the engines of each variant.

mod memory;
mod saturated_engines;
mod variants;
mod without_demand;

pub(in crate::fleet) use self::saturated_engines::SaturatedEngines;

use std::sync::Arc;

use crate::{
    engine::{Engine, last_outcome::logs_hint},
    fault::{BlockingModel, FailureCause, Fault, MemoryShortage, WaitDetails},
    fleet::plan::PlanBuilder,
    model::{EngineId, ModelName, ModelSpec},
    units::{Bytes, Tick},
};

/// Why a model is not awake, as text and as data.
#[derive(Clone, Debug, Default)]
pub(in crate::fleet) struct ModelReason {
    pub(in crate::fleet) text: String,
    /// Models that the text names, except the one it is about.
    pub(in crate::fleet) named_models: Vec<ModelName>,
    /// The engines that hold the awaited memory: those with the most, as a pool may have thousands.
    pub(in crate::fleet) holders: Vec<BlockingModel>,
    /// Number of further engines that hold it.
    pub(in crate::fleet) unlisted_holders: u16,
    /// For each model in `holders` whose engine does not sleep: the text for that model's own line.
    pub(in crate::fleet) notes_for_holders: Vec<(ModelName, String)>,
    /// Details for the admin only, which no client sees: an engine's own output.
    pub(in crate::fleet) admin_details: String,
    pub(in crate::fleet) retry_after: Option<Tick>,
    /// Whether the model's waiters are refused.
    pub(in crate::fleet) refuses_waiters: bool,
    /// The platform refused the engine's reservation, for a limit that the decisions do not know.
    is_reservation_refused: bool,
    class: ReasonClass,
}

/// Kind of wait; decides the fault of a request whose deadline passes.
#[derive(Clone, Debug, Default)]
enum ReasonClass {
    /// The model is being launched or woken.
    #[default]
    Starting,
    Memory {
        need: Bytes,
        available: Bytes,
    },
    /// The model fits nowhere, whatever is evicted.
    Unplaceable {
        need: Bytes,
        available: Bytes,
    },
    Failed {
        cause: FailureCause,
    },

    /// The model is served, but not all requests at once.
    AtCapacity,
}

impl ModelReason {
    pub(in crate::fleet) fn starting(text: &str) -> Self {
        Self { text: text.to_owned(), ..Self::default() }
    }

    /// Records that the text names this model.
    pub(in crate::fleet) fn naming(self, model: &ModelName) -> Self {
        Self { named_models: vec![model.clone()], ..self }
    }

    /// Reason of a model that can never run; refuses its waiters.
    pub(in crate::fleet) fn unplaceable(text: String, need: Bytes, available: Bytes) -> Self {
        Self {
            text,
            refuses_waiters: true,
            class: ReasonClass::Unplaceable { need, available },
            ..Self::default()
        }
    }

    /// Converts a dependency's reason into that of its dependent.
    pub(in crate::fleet) fn for_dependent(mut self, model: &ModelName) -> Self {
        self.text = format!("waits for its dependency '{model}': {}", self.text);
        self.named_models.push(model.clone());
        self
    }

    /// Reason of an awake model whose places are all taken.
    pub(in crate::fleet) fn at_capacity() -> Self {
        Self::starting("every awake engine is at maxConcurrency")
    }

    /// Reason of an awake model whose engines are all saturated.
    pub(in crate::fleet) fn saturated(engines: &SaturatedEngines) -> Self {
        Self::starting(&format!("every awake engine is {engines}"))
    }

    /// Reason of an awake engine whose stub's gate is closed. Only the stub, or the client that closed the gate, knows
    /// until when.
    pub(in crate::fleet) fn stub_gate_closed(id: &EngineId) -> Self {
        Self::starting(&format!("{id} is awake, but its stub has closed the gate"))
    }

    /// Reason of an engine in back-off: after a failure, or after a refused reservation.
    pub(in crate::fleet) fn failed(
        e: &Engine,
        spec: &ModelSpec,
        cause: FailureCause,
        until: Tick,
        refuse: bool,
    ) -> Self {
        let (text, for_admin) = match (&e.last_outcome, e.failure()) {
            (Some(past), Some(failure)) => {
                let (words, logs) = (failure.describe(past.at), logs_hint(spec));
                let probe = failure.diagnostics.for_clients();
                (format!("{words}{probe}; next attempt at {until}{logs}"), failure.diagnostics.for_admin())
            }
            _ => (
                format!("its memory reservation was refused ({cause}); next attempt at {until}"),
                String::new(),
            ),
        };
        let is_reservation_refused = e.failure().is_none();
        let class = ReasonClass::Failed { cause };
        Self {
            text,
            is_reservation_refused,
            admin_details: for_admin,
            retry_after: Some(until),
            refuses_waiters: refuse,
            class,
            ..Self::default()
        }
    }

    /// Converts the reason for one more engine of a model that has awake engines. No request waits for that engine
    /// alone. `full`: why the awake engines take no request, if requests wait.
    pub(in crate::fleet) fn for_additional_replica(
        self,
        awake: usize,
        replicas: u32,
        full: Option<&str>,
    ) -> Self {
        let full = full.map(|full| format!(", all {full}")).unwrap_or_default();
        let text = format!("{awake} of {replicas} engines awake{full}; next engine: {}", self.text);
        let (named, for_admin) = (self.named_models, self.admin_details);
        Self {
            text,
            named_models: named,
            admin_details: for_admin,
            class: ReasonClass::AtCapacity,
            ..Self::default()
        }
    }

    /// Converts a reason computed here into one for a follower, which refuses only what is certain.
    ///
    /// `decided`: no decision is pending for any model; `runs`: an engine of the model has a process. The leader may
    /// know more, which could make a refusal wrong.
    pub(in crate::fleet) fn into_follower_forecast(mut self, decided: bool, runs: bool, now: Tick) -> Self {
        let is_certain = match &self.class {
            ReasonClass::Memory { .. } => decided,
            ReasonClass::Unplaceable { .. } => !runs,
            // The leader published this failure, and it holds during the back-off.
            ReasonClass::Failed { .. } if self.retry_after.is_some_and(|at| at > now) => true,
            ReasonClass::Failed { cause } => {
                self.text = format!("the engine failed ({cause}), and the leader will retry");
                self.retry_after = None;
                false
            }
            ReasonClass::Starting | ReasonClass::AtCapacity => false,
        };
        Self { refuses_waiters: self.refuses_waiters && is_certain, ..self }
    }

    pub(in crate::fleet) fn wait_details(&self, now: Tick) -> WaitDetails {
        WaitDetails {
            waited_for: self.text.clone(),
            named_models: self.named_models.as_slice().into(),
            holders: self.holders.clone(),
            unlisted_holders: self.unlisted_holders,
            retry_after: self.retry_after.map(|at| at.since(now)),
            ..WaitDetails::default()
        }
    }

    /// Reason while the API server does not answer: nothing can be recorded, so nothing starts.
    fn api_unreachable(since: Tick) -> Self {
        let text = format!(
            "the cluster's API server has not answered since {since}: models that are not awake wait for its answer"
        );
        Self { text, ..Self::default() }
    }

    /// Whether the model waits for memory that others hold or that does not exist.
    pub(in crate::fleet) const fn is_memory_shortage(&self) -> bool {
        matches!(self.class, ReasonClass::Memory { .. } | ReasonClass::Unplaceable { .. })
    }

    /// Whether waiting is pointless.
    pub(in crate::fleet) const fn is_final(&self) -> bool {
        self.refuses_waiters
    }

    pub(in crate::fleet) fn refusal(&self, model: &ModelName, wait: &WaitDetails) -> Option<Fault> {
        self.refuses_waiters.then(|| self.deadline_fault(model, wait.clone()))
    }

    /// The fault of a request that waited for this reason until its deadline.
    pub(in crate::fleet) fn deadline_fault(&self, model: &ModelName, wait: WaitDetails) -> Fault {
        let model = model.clone();
        let shortage = |memory, available, never, wait| {
            Fault::InsufficientMemory(Box::new(MemoryShortage {
                model: model.clone(),
                memory,
                available,
                permanent: never,
                wait,
            }))
        };
        match &self.class {
            ReasonClass::Starting => Fault::ModelNotReady { model, cause: FailureCause::Deadline, wait },
            ReasonClass::AtCapacity => {
                Fault::QueueFull { message: format!("'{model}' is at its maxConcurrency"), wait }
            }
            ReasonClass::Failed { cause } => Fault::ModelNotReady { model, cause: cause.clone(), wait },
            ReasonClass::Memory { need, available } => shortage(*need, *available, false, wait),
            ReasonClass::Unplaceable { need, available } => {
                shortage(*need, *available, true, WaitDetails { retry_after: None, ..wait })
            }
        }
    }
}

impl PlanBuilder<'_> {
    /// Replaces the reasons of models without a serving engine while the cluster's API server does not answer.
    ///
    /// Reasons that refuse waiters stay.
    pub(in crate::fleet) fn explain_api_unreachable(&mut self) {
        let Some(since) = self.planner.api_unreachable_since else { return };
        let planner = &self.planner;
        let waits = |model: &ModelName, reason: &ModelReason| {
            !reason.refuses_waiters && !planner.engines_of(model).any(Engine::serves)
        };
        for (model, reason) in Arc::make_mut(&mut self.reasons) {
            if waits(model, reason) {
                *reason = ModelReason::api_unreachable(since);
            }
        }
    }

    pub(in crate::fleet) fn startup_reason(&self, id: &EngineId, spec: &ModelSpec) -> ModelReason {
        let Some(e) = self.engine(id) else {
            return ModelReason::default();
        };
        let reserved = self.planner.ledger.booked_bytes(id);
        let by = e.deadline(Some(spec), reserved, &self.planner.settings.timeouts).unwrap_or(e.since);
        let action = if e.cold_start { "launched" } else { "woken" };
        let probe = e.diagnostics.for_clients();
        let failed = self.last_failure_text(id);
        let text = format!("the engine is being {action} ({}), timeout at {by}{probe}{failed}", e.state);
        let mut reason = ModelReason::starting(&text);
        reason.admin_details = e.diagnostics.for_admin();
        // The usual duration is a useful retry time; the deadline is not.
        let learned = self.planner.models.get(&id.model).map(|model| model.learned_of(&id.variant));
        let usual = learned.and_then(|learned| if e.cold_start { learned.start } else { learned.wake });
        reason.retry_after = usual.map(|usual| e.startup_began + usual);
        reason
    }

    /// Text on the last failure, if the engine has not served since; appended to its reason.
    fn last_failure_text(&self, id: &EngineId) -> String {
        let describe = |e: &Engine| Some(e.failure()?.describe(e.last_outcome.as_ref()?.at));
        self.engine(id).and_then(describe).map(|failure| format!("; {failure}")).unwrap_or_default()
    }
}
