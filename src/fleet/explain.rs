//! Why nothing happens, or not yet: the texts of `explain`, and the details of every refusal.

use std::{cmp::Reverse, collections::BTreeMap, sync::Arc};

use crate::{
    engine::{
        Engine,
        last_outcome::{LastOutcome, logs_hint},
        state::LifecycleState,
    },
    fault::{BlockingModel, FailureCause, Fault, MemoryShortage, WaitDetails},
    fleet::plan::{PlanBuilder, Planner, place::PlacementCandidate},
    model::{AcceleratorId, EngineId, EvictionPolicy, ModelName, ModelSpec},
    units::{Bytes, Tick, pluralize},
};

/// Less memory in use beyond the reservations may be late, or a desktop.
const MIN_OTHER_PROGRAM: Bytes = Bytes::mib(512);

/// Why a model is not awake, as text and as data.
#[derive(Clone, Debug, Default)]
pub(in crate::fleet) struct ModelReason {
    pub(in crate::fleet) text: String,
    /// Models that the text names, except the one it is about.
    pub(in crate::fleet) named_models: Vec<ModelName>,
    pub(in crate::fleet) holders: Vec<BlockingModel>,
    /// For each model whose engine holds the awaited memory and does not sleep: the text for that model's own line.
    pub(in crate::fleet) notes_for_holders: Vec<(ModelName, String)>,
    /// Details for the admin only, which no client sees: an engine's own output.
    pub(in crate::fleet) admin_details: String,
    pub(in crate::fleet) retry_after: Option<Tick>,
    /// Whether the model's waiters are refused.
    pub(in crate::fleet) refuses_waiters: bool,
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
        let class = ReasonClass::Failed { cause };
        Self {
            text,
            admin_details: for_admin,
            retry_after: Some(until),
            refuses_waiters: refuse,
            class,
            ..Self::default()
        }
    }

    /// Converts the reason for one more engine of a model that has awake engines. No request waits for that engine
    /// alone.
    pub(in crate::fleet) fn for_additional_replica(self, awake: usize, replicas: u32, waiting: bool) -> Self {
        let full = if waiting { ", all at maxConcurrency" } else { "" };
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
    /// `settled`: no decision is pending for any model; `runs`: an engine of the model has a process. The leader may
    /// know more, which could make a refusal wrong.
    pub(in crate::fleet) fn into_follower_forecast(mut self, settled: bool, runs: bool, now: Tick) -> Self {
        let certain = match &self.class {
            ReasonClass::Memory { .. } => settled,
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
        Self { refuses_waiters: self.refuses_waiters && certain, ..self }
    }

    pub(in crate::fleet) fn wait_details(&self, now: Tick) -> WaitDetails {
        WaitDetails {
            waited_for: self.text.clone(),
            named_models: self.named_models.clone(),
            holders: self.holders.clone(),
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

    /// Reason with the engines that hold a candidate's memory, and until when.
    pub(in crate::fleet) fn memory_reason(
        &self,
        id: &EngineId,
        candidate: &PlacementCandidate,
    ) -> ModelReason {
        let planner = &self.planner;
        let on = |e: &&Engine| e.accelerators.iter().any(|a| candidate.accelerators.contains(a));
        let near = planner.engines.on_accelerators(&candidate.accelerators);
        let holders: Vec<&Engine> =
            near.into_iter().filter(|e| e.id != *id && e.state.has_process()).filter(on).collect();
        let words: Vec<String> =
            holders.iter().map(|e| format!("held by {}, {}", e.id.model, self.hold_text(e))).collect();
        let awake = holders.iter().filter(|e| !matches!(e.state, LifecycleState::Asleep { .. }));
        let held = awake.map(|e| (e.id.model.clone(), self.hold_text(e))).collect();
        let waits_for = self.shortage_text(id, candidate);
        let available = candidate.accelerators.iter().filter_map(|a| planner.ledger.accelerators.get(a));
        let available =
            available.map(crate::fleet::state::ledger::AcceleratorAccount::free).min().unwrap_or_default();
        let retry_after = holders.iter().filter_map(|e| self.evictable_at(e)).min();
        let held_by = match (words.is_empty(), self.other_program_text(candidate)) {
            (false, _) => words.join("; "),
            (true, Some(text)) => text,
            (true, None) => "claimed by other models in line".to_owned(),
        };
        ModelReason {
            text: format!("{waits_for}: {held_by}{}", self.last_failure_text(id)),
            named_models: holders.iter().map(|e| e.id.model.clone()).collect(),
            holders: holders.iter().map(|e| planner.blocking_model(e, self.now)).collect(),
            notes_for_holders: held,
            admin_details: String::new(),
            retry_after,
            refuses_waiters: false,
            class: ReasonClass::Memory { need: candidate.need.bytes, available },
        }
    }

    /// Text on memory that no engine has reserved; `None` if the meters show none.
    fn other_program_text(&self, candidate: &PlacementCandidate) -> Option<String> {
        let accounts = candidate.accelerators.iter().filter_map(|a| self.planner.ledger.accelerators.get(a));
        let used = accounts.filter_map(|account| {
            let used = account.reading.as_ref()?.used;
            let beyond = used.saturating_sub(account.reserved());
            (beyond >= MIN_OTHER_PROGRAM).then(|| format!("another program uses {beyond} there"))
        });
        used.max()
    }

    /// Text on the last failure, if the engine has not served since; appended to its reason.
    fn last_failure_text(&self, id: &EngineId) -> String {
        let words = |e: &Engine| Some(e.failure()?.describe(e.last_outcome.as_ref()?.at));
        self.engine(id).and_then(words).map(|words| format!("; {words}")).unwrap_or_default()
    }

    /// Text on what a candidate lacks.
    fn shortage_text(&self, id: &EngineId, candidate: &PlacementCandidate) -> String {
        let short = |a: &&AcceleratorId| !self.shortfalls(id, candidate, a).0.is_zero();
        let short: Vec<&AcceleratorId> = candidate.accelerators.iter().filter(short).collect();
        // A pool may have free memory, but no free accelerator to use it with.
        if let [pool] = short[..]
            && self.shortfalls(id, candidate, pool).0.bytes == Bytes::ZERO
            && let Some(account) = self.planner.ledger.accelerators.get(pool)
            && let Some(units) = account.units
        {
            return match account.free_units() {
                0 if units == 1 => format!("the only accelerator of {pool} is taken"),
                0 => format!("all {units} accelerators of {pool} are taken"),
                free => format!(
                    "{free} of {units} accelerators of {pool} are free, and the engine needs {}",
                    candidate.need.units
                ),
            };
        }
        let names: Vec<&str> = short.into_iter().map(AcceleratorId::as_str).collect();
        format!(
            "waiting for {}",
            if names.is_empty() { "its accelerators".to_owned() } else { names.join(", ") }
        )
    }

    /// The first moment at which this engine may be evicted, if it ever may.
    ///
    /// That is the end of its protection, turn or cooldown, if no request uses it until then.
    pub(in crate::fleet) fn evictable_at(&self, e: &Engine) -> Option<Tick> {
        let turns = &self.planner.settings.turns;
        if self.planner.is_kept_awake(&e.id) || self.planner.keeping_dependent(e).is_some() {
            return None;
        }
        match self.planner.eviction_of(&e.id.model) {
            EvictionPolicy::Never => None,
            EvictionPolicy::Cooldown if e.state == LifecycleState::Awake => {
                let after = self.planner.spec(&e.id.model)?.idle.sleep_after?;
                if self.planner.in_use_count(e) > 0 {
                    Some(self.now + after)
                } else {
                    self.planner.idle_at(e, after)
                }
            }
            _ if self.planner.in_use_count(e) == 0 => Some(self.idle_evictable_at(e)),
            _ => Some(e.turn_start + turns.max_turn),
        }
    }

    /// The same moment for an awake engine that stays idle.
    fn idle_evictable_at(&self, e: &Engine) -> Tick {
        let planner = &self.planner;
        let sleeps = self.sleep_level(&e.id, None).is_some();
        let back =
            if sleeps { planner.wake_time_of(&e.id.model) } else { planner.start_time_of(&e.id.model) };
        self.protected_until(e, back).min(e.turn_start + planner.settings.turns.max_turn)
    }

    /// Text on how an engine holds its memory, and until when.
    fn hold_text(&self, e: &Engine) -> String {
        let turns = &self.planner.settings.turns;
        let leases = pluralize(self.planner.in_use_count(e), "lease");
        let until = match &e.state {
            LifecycleState::Draining { .. } => {
                format!("drain deadline at {}", e.since + turns.drain_deadline)
            }
            LifecycleState::Awake if self.planner.is_kept_awake(&e.id) => self.planner.kept_text(&e.id),
            LifecycleState::Awake if self.planner.keeping_dependent(e).is_some() => {
                self.planner.needed_by_text(e)
            }
            LifecycleState::Awake if self.planner.eviction_of(&e.id.model) != EvictionPolicy::Residency => {
                self.no_turn_text(e)
            }
            LifecycleState::Awake if self.planner.in_use_count(e) == 0 => {
                format!("evictable at {}", self.idle_evictable_at(e))
            }
            LifecycleState::Awake => format!("its turn ends at {}", e.turn_start + turns.max_turn),
            state => state.to_string(),
        };
        format!("{leases}, {until}")
    }

    /// Text on an awake engine that has no turns.
    fn no_turn_text(&self, e: &Engine) -> String {
        match self.evictable_at(e) {
            None => "never evicted".to_owned(),
            Some(at) if self.planner.in_use_count(e) == 0 => {
                format!("idle since {}, evictable at {at}", e.idle_since())
            }
            Some(_) => "in use, evictable only after its cooldown".to_owned(),
        }
    }

    /// Reason of a model whose engine has no candidate: a lost accelerator, or none that could ever hold it.
    pub(in crate::fleet) fn misfit_reason(&self, id: &EngineId, spec: &ModelSpec) -> ModelReason {
        let need = spec.accelerators.bytes_per_account(spec.memory.awake);
        if !self.candidates(id, spec, false).is_empty() {
            let class = ReasonClass::Memory { need, available: Bytes::ZERO };
            let text = "waiting for its accelerator to recover".to_owned();
            return ModelReason { text, class, ..ModelReason::default() };
        }
        ModelReason::unplaceable(self.planner.misfit_text(spec), need, self.planner.largest(spec))
    }

    pub(in crate::fleet) fn startup_reason(&self, id: &EngineId, spec: &ModelSpec) -> ModelReason {
        let Some(e) = self.engine(id) else {
            return ModelReason::default();
        };
        let held = self.planner.ledger.booked_bytes(id);
        let by = e.deadline(Some(spec), held, &self.planner.settings.timeouts).unwrap_or(e.since);
        let what = if e.cold_start { "launched" } else { "woken" };
        let probe = e.diagnostics.for_clients();
        let failed = self.last_failure_text(id);
        let text = format!("the engine is being {what} ({}), timeout at {by}{probe}{failed}", e.state);
        let mut reason = ModelReason::starting(&text);
        reason.admin_details = e.diagnostics.for_admin();
        // The usual duration is a useful retry time; the deadline is not.
        let learned = self.planner.models.get(&id.model).map(|model| model.learned);
        let usual = learned.and_then(|learned| if e.cold_start { learned.start } else { learned.wake });
        reason.retry_after = usual.map(|usual| e.startup_began + usual);
        reason
    }
}

impl Planner {
    pub(in crate::fleet) fn blocking_model(&self, e: &Engine, now: Tick) -> BlockingModel {
        BlockingModel {
            model: e.id.model.clone(),
            memory: self.ledger.booked_bytes(&e.id),
            idle_for: if self.in_use_count(e) > 0 {
                crate::units::Millis::ZERO
            } else {
                now.since(e.idle_since())
            },
            leases: self.in_use_count(e),
            pinned: self.is_kept_awake(&e.id),
        }
    }

    /// Text on why this engine is kept awake.
    fn kept_text(&self, id: &EngineId) -> String {
        match self.models.get(&id.model) {
            Some(model) if !model.pinned() => format!("kept by minReplicas {}", model.min_running()),
            _ => "pinned".to_owned(),
        }
    }

    /// Text on which models need this engine.
    fn needed_by_text(&self, e: &Engine) -> String {
        let by = self.dependencies.dependents(&e.id.model).filter(|model| self.is_active(model));
        format!("needed by {}", by.map(|model| format!("'{model}'")).collect::<Vec<_>>().join(", "))
    }

    /// The latest outcome of an engine of this model that has not served since.
    pub(in crate::fleet) fn last_outcome_of(&self, model: &ModelName) -> Option<&LastOutcome> {
        self.engines_of(model).filter_map(|e| e.last_outcome.as_ref()).max_by_key(|past| past.at)
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
        let (asker, (_, held)) = reasons.iter().find_map(|(asker, reason)| Some((asker, of(reason)?)))?;
        let state = self.model_state(model).as_str();
        Some(ModelReason::starting(&format!("{state}; {held}: '{asker}' waits for its memory")).naming(asker))
    }

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
        let telling = |e: &&Engine| (!e.serves(), !e.state.is_starting(), Reverse(e.idle_since()));
        let Some(e) = self.engines_of(model).min_by_key(telling) else {
            return ModelReason::starting("removed");
        };
        let spec = self.spec(model);
        let idle = spec.map(|s| s.idle);
        let serving = || self.engines_of(model).filter(|e| e.serves());
        let awake = match spec.map_or(1, |s| s.replicas) {
            1 => "awake".to_owned(),
            replicas => format!("{} of {replicas} engines awake", serving().count()),
        };
        let limit = spec.and_then(|s| s.max_concurrency);
        let text = match &e.state {
            LifecycleState::Awake if e.stub_gate_closed => format!("{awake}; its stub has closed the gate"),
            LifecycleState::Awake if self.is_kept_awake(&e.id) => {
                format!("{awake}; {}", self.kept_text(&e.id))
            }
            LifecycleState::Awake if self.keeping_dependent(e).is_some() => {
                format!("{awake}; {}", self.needed_by_text(e))
            }
            LifecycleState::Awake if limit.is_some_and(|n| serving().all(|e| e.leases >= n)) => {
                format!("{awake}; at maxConcurrency")
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
                let lacks = self
                    .first_missing(model)
                    .map_or_else(String::new, |m| format!("; waits for its dependency '{m}'"));
                format!("its memory is reserved{lacks}")
            }
            LifecycleState::Asleep { level } => {
                let since =
                    e.last_outcome.as_ref().map(|past| format!("; {}", past.describe())).unwrap_or_default();
                let stopped =
                    idle.and_then(|i| i.stop_after).map(|after| e.idle_since().max(e.since) + after);
                let stopped = stopped.map(|at| format!("; will be stopped at {at}")).unwrap_or_default();
                let never = self.impossible_reason(model).map(|why| format!("; can never wake: {why}"));
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

    /// Reason of a model without a process: its last outcome, and what a request would do.
    fn explain_cold(&self, e: &Engine, spec: Option<&ModelSpec>) -> ModelReason {
        let Some(spec) = spec else { return ModelReason::starting("removed") };
        if let Some(why) = self.impossible_reason(&spec.name) {
            return ModelReason::starting(&format!("can never start: {why}"));
        }
        let Some(past) = &e.last_outcome else {
            return ModelReason::starting("not running; starts on the next request");
        };
        let logs = if e.failure().is_some() { logs_hint(spec) } else { String::new() };
        let text = format!("not running: {}; starts on the next request{logs}", past.describe());
        ModelReason { admin_details: past.diagnostics(), ..ModelReason::starting(&text) }
    }
}
