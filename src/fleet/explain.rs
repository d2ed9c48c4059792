//! Why nothing happens, or not yet: the words of `explain`, and the details of every refusal.

use std::{cmp::Reverse, collections::BTreeMap, sync::Arc};

use super::{
    placement::Candidate,
    plan::{Draft, Planner},
};
use crate::{
    engine::{
        Engine,
        past::{Past, see_logs},
        state::State,
    },
    fault::{Blocking, Cause, Fault, Shortage, Wait},
    model::{AcceleratorId, EngineId, Eviction, ModelName, ModelSpec},
    units::{Bytes, Tick, count},
};

/// Why a model is not awake, in words and as data.
#[derive(Clone, Debug, Default)]
pub(super) struct Reason {
    pub(super) text: String,
    /// Models that the text names, but for the one it is about.
    pub(super) named: Vec<ModelName>,
    pub(super) holders: Vec<Blocking>,
    /// Of each model that holds what is waited for and may give it up: the words of the text, for its own line.
    pub(super) held: Vec<(ModelName, String)>,
    /// What goes on behind the text for the admin, and no client is told: an engine's own words.
    pub(super) for_admin: String,
    pub(super) retry_after: Option<Tick>,
    /// Those who wait are sent away.
    pub(super) refuse: bool,
    class: Class,
}

/// What kind of waiting it is: decides the fault of a request that waited in vain.
#[derive(Clone, Debug, Default)]
enum Class {
    /// Being launched or woken.
    #[default]
    Start,
    Memory {
        need: Bytes,
        available: Bytes,
    },
    /// It fits nowhere, whatever is put away.
    Never {
        need: Bytes,
        available: Bytes,
    },
    Failed {
        cause: Cause,
    },
    /// Served, though not everybody at once.
    Full,
}

impl Reason {
    pub(super) fn starting(text: &str) -> Self {
        Self { text: text.to_owned(), ..Self::default() }
    }

    /// The text names this model.
    pub(super) fn naming(self, model: &ModelName) -> Self {
        Self { named: vec![model.clone()], ..self }
    }

    /// What can never be.
    pub(super) fn never(text: String, need: Bytes, available: Bytes) -> Self {
        Self { text, refuse: true, class: Class::Never { need, available }, ..Self::default() }
    }

    /// The same of whoever waits for this model, since it needs it.
    pub(super) fn of_needed(mut self, model: &ModelName) -> Self {
        self.text = format!("waits for '{model}', which it needs: {}", self.text);
        self.named.push(model.clone());
        self
    }

    /// It is awake, and as many as may are being served.
    pub(super) fn full() -> Self {
        Self::starting("every place of its maxConcurrency is taken")
    }

    /// It is awake, and its stub lets nobody in: the stub, or whoever closed its gate, knows until when.
    pub(super) fn gated(id: &EngineId) -> Self {
        Self::starting(&format!("{id} is awake, and its gate is closed by its stub"))
    }

    /// It is left alone for a while: after a failure, or where its booking was not granted.
    pub(super) fn failed(e: &Engine, spec: &ModelSpec, cause: Cause, until: Tick, refuse: bool) -> Self {
        let (text, for_admin) = match (&e.past, e.failure()) {
            (Some(past), Some(failure)) => {
                let (words, logs) = (failure.words(past.at), see_logs(spec));
                let probe = failure.symptoms.for_clients();
                (format!("{words}{probe}; tried again at {until}{logs}"), failure.symptoms.for_admin())
            }
            _ => (format!("its memory was not granted ({cause}); tried again at {until}"), String::new()),
        };
        let class = Class::Failed { cause };
        Self { text, for_admin, retry_after: Some(until), refuse, class, ..Self::default() }
    }

    /// The same of one more engine, where so many of the model's are awake: nobody waits for that one alone.
    pub(super) fn beside(self, awake: usize, replicas: u32, waiting: bool) -> Self {
        let full = if waiting { ", every place of its maxConcurrency is taken" } else { "" };
        let text = format!("{awake} of {replicas} engines awake{full}; the next: {}", self.text);
        let (named, for_admin) = (self.named, self.for_admin);
        Self { text, named, for_admin, class: Class::Full, ..Self::default() }
    }

    /// The same, where another gateway decides. `settled`: nothing is about to be decided for anybody; `runs`: an engine of
    /// the model does. What else may be known to that gateway and not here could make a refusal wrong.
    pub(super) fn foreseen(mut self, settled: bool, runs: bool, now: Tick) -> Self {
        let certain = match &self.class {
            Class::Memory { .. } => settled,
            Class::Never { .. } => !runs,
            // That gateway's own word, for as long as it leaves the engine alone.
            Class::Failed { .. } if self.retry_after.is_some_and(|at| at > now) => true,
            Class::Failed { cause } => {
                self.text = format!("it failed ({cause}), and the gateway that leads tries it again");
                self.retry_after = None;
                false
            }
            Class::Start | Class::Full => false,
        };
        Self { refuse: self.refuse && certain, ..self }
    }

    pub(super) fn wait(&self, now: Tick) -> Wait {
        Wait {
            waited_for: self.text.clone(),
            named: self.named.clone(),
            holders: self.holders.clone(),
            retry_after: self.retry_after.map(|at| at.since(now)),
            ..Wait::default()
        }
    }

    /// Nothing is written down, so nothing is begun.
    fn cut_off(since: Tick) -> Self {
        let text = format!(
            "the cluster's API server has not answered since {since}: what is not awake waits until it does"
        );
        Self { text, ..Self::default() }
    }

    /// It waits for memory that others hold, or that there is not.
    pub(super) const fn is_of_memory(&self) -> bool {
        matches!(self.class, Class::Memory { .. } | Class::Never { .. })
    }

    /// Nothing will come of waiting.
    pub(super) const fn is_final(&self) -> bool {
        self.refuse
    }

    pub(super) fn refusal(&self, model: &ModelName, wait: &Wait) -> Option<Fault> {
        self.refuse.then(|| self.late(model, wait.clone()))
    }

    /// The fault of a request that waited for this until its deadline.
    pub(super) fn late(&self, model: &ModelName, wait: Wait) -> Fault {
        let model = model.clone();
        let shortage = |memory, available, never, wait| {
            Fault::InsufficientMemory(Box::new(Shortage {
                model: model.clone(),
                memory,
                available,
                never,
                wait,
            }))
        };
        match &self.class {
            Class::Start => Fault::ModelNotReady { model, cause: Cause::Deadline, wait },
            Class::Full => Fault::QueueFull { message: format!("'{model}' is at its maxConcurrency"), wait },
            Class::Failed { cause } => Fault::ModelNotReady { model, cause: cause.clone(), wait },
            Class::Memory { need, available } => shortage(*need, *available, false, wait),
            Class::Never { need, available } => {
                shortage(*need, *available, true, Wait { retry_after: None, ..wait })
            }
        }
    }
}

impl Draft<'_> {
    /// While the cluster does not answer, that is what everybody waits for whose model is not awake.
    pub(super) fn explain_cut_off(&mut self) {
        let Some(since) = self.planner.cut_off else { return };
        let planner = &self.planner;
        let waits = |model: &ModelName, reason: &Reason| {
            !reason.refuse && !planner.engines_of(model).any(Engine::serves)
        };
        for (model, reason) in Arc::make_mut(&mut self.reasons) {
            if waits(model, reason) {
                *reason = Reason::cut_off(since);
            }
        }
    }

    /// Who holds the memory of a candidate, and until when.
    pub(super) fn held_reason(&self, id: &EngineId, candidate: &Candidate) -> Reason {
        let planner = &self.planner;
        let on = |e: &&Engine| e.accelerators.iter().any(|a| candidate.accelerators.contains(a));
        let near = planner.engines.near(&candidate.accelerators);
        let holders: Vec<&Engine> =
            near.into_iter().filter(|e| e.id != *id && e.state.has_process()).filter(on).collect();
        let words: Vec<String> =
            holders.iter().map(|e| format!("held by {}, {}", e.id.model, self.hold(e))).collect();
        let awake = holders.iter().filter(|e| !matches!(e.state, State::Asleep { .. }));
        let held = awake.map(|e| (e.id.model.clone(), self.hold(e))).collect();
        let waits_for = self.shortage(id, candidate);
        let available = candidate.accelerators.iter().filter_map(|a| planner.ledger.accelerators.get(a));
        let available = available.map(super::budget::Account::free).min().unwrap_or_default();
        let retry_after = holders.iter().filter_map(|e| self.may_go_at(e)).min();
        let held_by =
            if words.is_empty() { "claimed by others in line".to_owned() } else { words.join("; ") };
        Reason {
            text: format!("{waits_for}: {held_by}{}", self.failed_before(id)),
            named: holders.iter().map(|e| e.id.model.clone()).collect(),
            holders: holders.iter().map(|e| planner.blocking(e, self.now)).collect(),
            held,
            for_admin: String::new(),
            retry_after,
            refuse: false,
            class: Class::Memory { need: candidate.need.bytes, available },
        }
    }

    /// How it last failed, where it has not served since, behind what it waits for now.
    fn failed_before(&self, id: &EngineId) -> String {
        let words = |e: &Engine| Some(e.failure()?.words(e.past.as_ref()?.at));
        self.engine(id).and_then(words).map(|words| format!("; {words}")).unwrap_or_default()
    }

    /// What of a candidate there is not enough of, for texts.
    fn shortage(&self, id: &EngineId, candidate: &Candidate) -> String {
        let short = |a: &&AcceleratorId| !self.shortfalls(id, candidate, a).0.is_nothing();
        let short: Vec<&AcceleratorId> = candidate.accelerators.iter().filter(short).collect();
        // A pool may have the memory, and nothing that it could be used with.
        if let [pool] = short[..]
            && self.shortfalls(id, candidate, pool).0.bytes == Bytes::ZERO
            && let Some(account) = self.planner.ledger.accelerators.get(pool)
            && let Some(units) = account.units
        {
            return match account.free_units() {
                0 if units == 1 => format!("the only accelerator of {pool} is taken"),
                0 => format!("all {units} accelerators of {pool} are taken"),
                free => format!(
                    "{free} of {units} accelerators of {pool} are free, and it needs {}",
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

    /// The first moment at which this engine may be put away for others, if it ever may: the end of its protection or
    /// turn, or of its cooldown, should nobody use it until then.
    pub(super) fn may_go_at(&self, e: &Engine) -> Option<Tick> {
        let turns = &self.planner.settings.turns;
        if self.planner.is_kept(&e.id) || self.planner.keeper(e).is_some() {
            return None;
        }
        match self.planner.eviction_of(&e.id.model) {
            Eviction::Never => None,
            Eviction::Cooldown if e.state == State::Awake => {
                let after = self.planner.spec(&e.id.model)?.idle.sleep_after?;
                if self.planner.uses(e) > 0 { Some(self.now + after) } else { self.planner.idle_at(e, after) }
            }
            _ if self.planner.uses(e) == 0 => Some(self.may_go_idle(e)),
            _ => Some(e.turn + turns.max_turn),
        }
    }

    /// The same of one that is awake and idle, should that last.
    fn may_go_idle(&self, e: &Engine) -> Tick {
        let planner = &self.planner;
        let sleeps = self.sleep_level(&e.id, None).is_some();
        let back = if sleeps { planner.wake_of(&e.id.model) } else { planner.start_of(&e.id.model) };
        self.protected_until(e, back).min(e.turn + planner.settings.turns.max_turn)
    }

    /// How an engine holds its memory and until when, for texts.
    fn hold(&self, e: &Engine) -> String {
        let turns = &self.planner.settings.turns;
        let leases = count(self.planner.uses(e), "lease");
        let until = match &e.state {
            State::Draining { .. } => format!("drains at most until {}", e.since + turns.drain_deadline),
            State::Awake if self.planner.is_kept(&e.id) => self.planner.kept(&e.id),
            State::Awake if self.planner.keeper(e).is_some() => self.planner.needed(e),
            State::Awake if self.planner.eviction_of(&e.id.model) != Eviction::Residency => self.stays(e),
            State::Awake if self.planner.uses(e) == 0 => format!("may go at {}", self.may_go_idle(e)),
            State::Awake => format!("its turn ends at {}", e.turn + turns.max_turn),
            state => state.to_string(),
        };
        format!("{leases}, {until}")
    }

    /// Of one that is awake and has no turns, for texts.
    fn stays(&self, e: &Engine) -> String {
        match self.may_go_at(e) {
            None => "never put away for others".to_owned(),
            Some(at) if self.planner.uses(e) == 0 => {
                format!("unused since {}, may go at {at}", e.idle_since())
            }
            Some(_) => "in use, and may go only after its cooldown".to_owned(),
        }
    }

    /// No accelerator, or set of them, could ever hold it.
    pub(super) fn fits_nowhere(&self, id: &EngineId, spec: &ModelSpec) -> Reason {
        let need = spec.accelerators.in_one_place(spec.memory.awake);
        if !self.candidates(id, spec, false).is_empty() {
            let class = Class::Memory { need, available: Bytes::ZERO };
            let text = "waiting for its accelerator to come back".to_owned();
            return Reason { text, class, ..Reason::default() };
        }
        Reason::never(self.planner.misfit(spec), need, self.planner.largest(spec))
    }

    pub(super) fn under_way(&self, id: &EngineId, spec: &ModelSpec) -> Reason {
        let Some(e) = self.engine(id) else {
            return Reason::default();
        };
        let held = self.planner.ledger.held(id);
        let by = e.deadline(Some(spec), held, &self.planner.settings.timeouts).unwrap_or(e.since);
        let what = if e.cold { "launched" } else { "woken" };
        let probe = e.symptoms.for_clients();
        let failed = self.failed_before(id);
        let text = format!("it is being {what} ({}), given up at {by}{probe}{failed}", e.state);
        let mut reason = Reason::starting(&text);
        reason.for_admin = e.symptoms.for_admin();
        // Asked again after the time that it usually takes, the request is served; the deadline is no such time.
        let learned = self.planner.models.get(&id.model).map(|model| model.learned);
        let usual = learned.and_then(|learned| if e.cold { learned.start } else { learned.wake });
        reason.retry_after = usual.map(|usual| e.began + usual);
        reason
    }
}

impl Planner {
    pub(super) fn blocking(&self, e: &Engine, now: Tick) -> Blocking {
        Blocking {
            model: e.id.model.clone(),
            memory: self.ledger.held(&e.id),
            idle_for: if self.uses(e) > 0 { crate::units::Millis::ZERO } else { now.since(e.idle_since()) },
            leases: self.uses(e),
            pinned: self.is_kept(&e.id),
        }
    }

    /// Why this engine is kept awake, for texts.
    fn kept(&self, id: &EngineId) -> String {
        match self.models.get(&id.model) {
            Some(model) if !model.pinned() => format!("kept by minReplicas {}", model.least()),
            _ => "pinned".to_owned(),
        }
    }

    /// Who needs this engine, for texts.
    fn needed(&self, e: &Engine) -> String {
        let by = self.needs.dependents(&e.id.model).filter(|model| self.is_active(model));
        format!("needed by {}", by.map(|model| format!("'{model}'")).collect::<Vec<_>>().join(", "))
    }

    /// What befell an engine of this model last, where it has not served since.
    pub(super) fn past_of(&self, model: &ModelName) -> Option<&Past> {
        self.engines_of(model).filter_map(|e| e.past.as_ref()).max_by_key(|past| past.at)
    }

    /// Of a model that holds what others wait for: the same words as theirs.
    pub(super) fn explain_sought(
        &self,
        model: &ModelName,
        reasons: &BTreeMap<ModelName, Reason>,
    ) -> Option<Reason> {
        let of = |reason: &'_ Reason| reason.held.iter().find(|(holder, _)| holder == model).cloned();
        let (asker, (_, held)) = reasons.iter().find_map(|(asker, reason)| Some((asker, of(reason)?)))?;
        let state = self.model_state(model).as_str();
        Some(Reason::starting(&format!("{state}; {held}: '{asker}' waits for its memory")).naming(asker))
    }

    /// A model nobody waits for: what it does, and what comes next.
    pub(super) fn explain_rest(&self, model: &ModelName) -> Reason {
        if self.role.decides() && !self.adopted {
            return Reason::starting("the gateway is looking for engines that already run");
        }
        if let Some(since) = self.cut_off.filter(|_| !self.engines_of(model).any(Engine::serves)) {
            return Reason::cut_off(since);
        }
        // The one that says most about the model: of those awake the one used last.
        let telling = |e: &&Engine| (!e.serves(), !e.state.is_starting(), Reverse(e.idle_since()));
        let Some(e) = self.engines_of(model).min_by_key(telling) else {
            return Reason::starting("removed");
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
            State::Awake if e.gated => format!("{awake}; its gate is closed by its stub"),
            State::Awake if self.is_kept(&e.id) => format!("{awake}; {}", self.kept(&e.id)),
            State::Awake if self.keeper(e).is_some() => format!("{awake}; {}", self.needed(e)),
            State::Awake if limit.is_some_and(|n| serving().all(|e| e.leases >= n)) => {
                format!("{awake}; every place of its maxConcurrency is taken")
            }
            State::Awake if serving().any(|e| self.uses(e) > 0) => format!("{awake}; in use"),
            State::Awake => match idle.and_then(|i| i.sleep_after) {
                Some(after) => match self.idle_at(e, after) {
                    Some(at) => format!("{awake}; unused since {}, put away at {at}", e.idle_since()),
                    None => format!("{awake}; unused here, and what others do cannot be heard"),
                },
                None => format!("{awake}; never put away by idleness"),
            },
            State::Cold | State::Asleep { .. } if e.placing.is_some() => {
                let lacks = self
                    .lacks(model)
                    .map_or_else(String::new, |m| format!("; waits for '{m}', which it needs"));
                format!("its memory is reserved{lacks}")
            }
            State::Asleep { level } => {
                let since = e.past.as_ref().map(|past| format!("; {}", past.words())).unwrap_or_default();
                let stopped =
                    idle.and_then(|i| i.stop_after).map(|after| e.idle_since().max(e.since) + after);
                let stopped = stopped.map(|at| format!("; stopped at {at}")).unwrap_or_default();
                let never = self.impossible(model).map(|why| format!("; it can never wake: {why}"));
                format!("asleep at level {}{since}{}{stopped}", level.number(), never.unwrap_or_default())
            }
            State::Cold => return self.explain_cold(e, spec),
            State::Backoff { cause, .. } if !self.role.decides() => {
                format!("failed ({cause}); the gateway that leads tries it again")
            }
            State::Backoff { .. } if self.impossible(model).is_some() => return self.explain_cold(e, spec),
            State::Backoff { until, cause } => match spec {
                Some(spec) => return Reason::failed(e, spec, cause.clone(), *until, false),
                None => "removed".to_owned(),
            },
            state => format!("{state} since {}", e.since),
        };
        Reason { for_admin: e.symptoms.words(), ..Reason::starting(&text) }
    }

    /// Nothing runs of it: what became of it last, and what comes when it is asked for.
    fn explain_cold(&self, e: &Engine, spec: Option<&ModelSpec>) -> Reason {
        let Some(spec) = spec else { return Reason::starting("removed") };
        if let Some(why) = self.impossible(&spec.name) {
            return Reason::starting(&format!("it can never start: {why}"));
        }
        let Some(past) = &e.past else { return Reason::starting("not running; launched when asked for") };
        let logs = if e.failure().is_some() { see_logs(spec) } else { String::new() };
        let text = format!("not running: {}; launched when asked for{logs}", past.words());
        Reason { for_admin: past.symptoms(), ..Reason::starting(&text) }
    }
}
