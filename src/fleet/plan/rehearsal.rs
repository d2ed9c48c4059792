//! Rehearsed sleep: a new engine sleeps and wakes once while nothing depends on it.
//!
//! The first level-1 sleep of a process pins host memory, which takes many times as long as a later sleep. Without a
//! rehearsal, a request for another model waits for that in the first swap. A rehearsal also measures the residue and
//! the times, and shows that the engine wakes.
//!
//! The engine's whole memory stays reserved, because the engine wakes at once. No other engine can take it between sleep
//! and wake, and the wake needs no room. So a rehearsal has no `Shrink` and no `Reserve`, and the residue is learned
//! with the `Wake`. The rehearsal ends early if another model waits for the memory and no request waits for this
//! engine. Before the sleep the engine then serves again, and after it the engine stays asleep like an evicted one.
//!
//! Only level 1 is rehearsed, and only within the host RAM budget. A level-2 sleep pins nothing, and its wake reads the
//! weights again.

use std::{collections::BTreeMap, rc::Rc};

use crate::{
    engine::{Engine, rehearsal::SleepRehearsal, state::LifecycleState},
    fault::FailureCause,
    fleet::{
        command::{AfterDrain, CloseReason, Command},
        plan::{
            PlanBuilder, Planner, advance::residue::ResidueReading, place::candidate_sets::AcceleratorSets,
        },
    },
    model::{AcceleratorId, EngineId, ModelName, ModelSpec, RehearsalPolicy, SleepLevel},
    units::Tick,
};

/// The accelerators on which engines that are to start or wake could get the memory that they lack.
///
/// Of each accelerator it names two models at most: whichever engine is asked about, one of two is another model.
#[derive(Debug, Default)]
pub(in crate::fleet) struct WantedMemory(BTreeMap<AcceleratorId, Vec<ModelName>>);

impl WantedMemory {
    const MAX_MODELS: usize = 2;

    fn add(&mut self, accelerator: &AcceleratorId, model: &ModelName) {
        let models = self.0.entry(accelerator.clone()).or_default();
        if models.len() < Self::MAX_MODELS && !models.contains(model) {
            models.push(model.clone());
        }
    }

    /// Whether an engine of another model could get memory where this engine has some.
    fn is_wanted_from(&self, e: &Engine) -> bool {
        let mut wanting = e.accelerators.iter().filter_map(|a| self.0.get(a)).flatten();
        wanting.any(|model| *model != e.id.model)
    }
}

impl PlanBuilder<'_> {
    /// Whether the engine goes through its rehearsal before any request gets it.
    pub(in crate::fleet) fn is_held_for_rehearsal(&self, e: &Engine) -> bool {
        self.planner.rehearses_before_use(e) && self.may_rehearse(e)
    }

    /// Whether a new process of this engine would go through its rehearsal before any request gets it.
    pub(in crate::fleet) fn would_rehearse_before_use(&self, e: &Engine) -> bool {
        e.rehearsal != SleepRehearsal::Failed
            && self
                .planner
                .engine_spec(&e.id)
                .is_some_and(|spec| spec.idle.rehearse == RehearsalPolicy::Start)
            && self.sleep_level(&e.id, None) == Some(SleepLevel::One)
            && !self.planner.is_kept_awake(&e.id)
    }

    /// Begins the rehearsal of this awake engine if it is due; returns whether it did.
    pub(super) fn begin_rehearsal(&mut self, id: &EngineId) -> bool {
        let begins = self.engine(id).is_some_and(|e| self.is_rehearsal_due(e) && self.may_rehearse(e));
        if begins {
            self.close_gate(id, CloseReason::Rehearsal, AfterDrain::Sleep(Some(SleepLevel::One)));
        }
        begins
    }

    fn is_rehearsal_due(&self, e: &Engine) -> bool {
        let idle_at = self.planner.rehearsal_due_at(e, self.planner.engine_spec(&e.id));
        let is_idle = !self.is_asked_for(e) && idle_at.is_some_and(|at| at <= self.now);
        self.planner.rehearses_before_use(e) || is_idle
    }

    /// Whether the engine could sleep and wake now without harm to any request.
    fn may_rehearse(&self, e: &Engine) -> bool {
        let planner = &self.planner;
        e.is_rehearsal_due()
            && e.failing_since.is_none()
            && e.ejected_until.is_none()
            && !e.stub_gate_closed
            // Other gateways would not learn that the engine takes no requests.
            && planner.api_unreachable_since.is_none()
            && planner.shutdown.is_none()
            && planner.engine_spec(&e.id).is_some_and(|spec| spec.idle.rehearse != RehearsalPolicy::Never)
            && self.sleep_level(&e.id, None) == Some(SleepLevel::One)
            && !planner.is_kept_awake(&e.id)
            && !self.is_wanted_by_dependents(&e.id)
            && planner.dependencies_serve(&e.id.model)
            && !self.has_measuring_neighbour(e)
            && !self.wanted_memory().is_wanted_from(e)
    }

    /// Whether another engine measures free memory on the same accelerators, or is about to. That lasts as long as its
    /// start, and the engine could not wake meanwhile.
    fn has_measuring_neighbour(&self, e: &Engine) -> bool {
        self.planner.engines.moving_on(&e.accelerators).into_iter().any(|other| {
            let is_to_start = other.pending_reservation.is_some() && !other.state.has_process();
            let measures = self.planner.engine_spec(&other.id).is_none_or(ModelSpec::profiles_memory);
            other.id != e.id && (other.is_profiling() || (is_to_start && measures))
        })
    }

    /// Whether a request or an order waits for this engine's model.
    fn is_asked_for(&self, e: &Engine) -> bool {
        self.waiting(&e.id.model) > 0 || self.ordered_awake(&e.id.model)
    }

    /// Where memory is wanted. Computed once for all due engines, because a blocked one asks again with every plan.
    fn wanted_memory(&self) -> &WantedMemory {
        self.cache.wanted_memory.get_or_init(|| {
            let mut wanted = WantedMemory::default();
            // Most engines could start on the same accelerators.
            let mut added: Vec<(Rc<AcceleratorSets>, Vec<ModelName>)> = Vec::new();
            for id in self.ordered_wanted_engines().into_iter().filter(|id| self.lacks_memory(id)) {
                let Some(spec) = self.planner.engine_spec(&id) else { continue };
                let sets = self.candidate_sets(&id, spec);
                if sets.len() > 1 {
                    match added.iter_mut().find(|(known, _)| Rc::ptr_eq(known, &sets)) {
                        Some((_, models)) if models.len() == WantedMemory::MAX_MODELS => continue,
                        Some((_, models)) if models.contains(&id.model) => continue,
                        Some((_, models)) => models.push(id.model.clone()),
                        None => added.push((Rc::clone(&sets), vec![id.model.clone()])),
                    }
                }
                sets.iter().flatten().for_each(|accelerator| wanted.add(accelerator, &id.model));
            }
            wanted
        })
    }

    /// Whether this engine, which is to start or wake, still has to get its memory.
    fn lacks_memory(&self, id: &EngineId) -> bool {
        self.engine(id).is_some_and(|e| {
            e.state != LifecycleState::Awake
                && e.pending_reservation.is_none()
                && !e.state.is_starting()
                && !e.is_rehearsing()
        })
    }

    /// Continues a rehearsal whose gate is closed: puts the engine to sleep once it is drained, or calls it off.
    pub(super) fn advance_rehearsal_drain(&mut self, id: &EngineId, drained: bool) {
        let Some(e) = self.engine(id) else { return };
        let hung = e.hung_at(&self.planner.settings.timeouts).is_some_and(|at| at <= self.now);
        if hung || self.planner.lost_accelerator(id).is_some() {
            let cause = if hung { FailureCause::Hung } else { FailureCause::AcceleratorLost };
            return self.fail_engine(id, cause);
        }
        let may_stay = !self.planner.is_unwanted(id) && !self.ordered_stop(id);
        // A new engine keeps its waiters until it has woken; one that has been open serves them first.
        let is_needed = self.is_asked_for(e) && !self.planner.rehearses_before_use(e);
        if may_stay && (is_needed || !self.may_rehearse(e)) {
            let (engine, generation) = (id.clone(), e.generation);
            return self.emit(Command::OpenGate { engine, generation, public: true });
        }
        if !drained {
            return;
        }
        if !may_stay {
            if !self.has_profiling_neighbour(id) {
                self.stop(id);
            }
            return;
        }
        // The readings of an awake engine show its peak, and the engine is about to release its memory.
        self.read_meters_once_awake(id);
        if !self.awaits_reading(id) {
            let (engine, generation) = (id.clone(), self.generation(id));
            self.emit(Command::Sleep { engine, generation, level: SleepLevel::One });
        }
    }

    fn awaits_reading(&self, id: &EngineId) -> bool {
        let accelerators = self.engine(id).into_iter().flat_map(|e| &e.accelerators);
        let mut accounts = accelerators.filter_map(|a| self.planner.ledger.accelerators.get(a));
        accounts.any(|account| account.reading_requested.is_some() && account.meter_answers(self.now))
    }

    /// Whether this engine, asleep for its rehearsal, wakes again.
    ///
    /// It stays asleep if a dependency no longer serves or is no longer configured. It also does if an operator ordered
    /// that, or if another model waits for its memory and may have it, unless something waits for this engine.
    pub(in crate::fleet) fn wakes_from_rehearsal(&self, e: &Engine) -> bool {
        if e.rehearsal != SleepRehearsal::Underway
            || self.planner.shutdown.is_some()
            || !self.planner.dependencies_serve(&e.id.model)
        {
            return false;
        }
        let is_needed =
            self.is_asked_for(e) || self.planner.is_kept_awake(&e.id) || self.is_wanted_by_dependents(&e.id);
        let gives_way = || self.wanted_memory().is_wanted_from(e) && self.may_stay_asleep(e);
        is_needed || (self.ordered_sleep(&e.id).is_none() && !gives_way())
    }

    /// Wakes the engine from its rehearsal, once its residue is measured.
    ///
    /// A request for the model, or for one that depends on it, waits for that no longer than the meter may lag.
    pub(super) fn end_rehearsal(&mut self, id: &EngineId, level: SleepLevel) {
        let Some(e) = self.engine(id) else { return };
        let (engine, generation) = (id.clone(), e.generation);
        let meter_lag = self.planner.settings.timeouts.meter_lag;
        let lag_is_over = e.releasing_since.is_some_and(|since| since + meter_lag <= self.now);
        let is_late = lag_is_over && (self.is_asked_for(e) || self.is_wanted_by_dependents(id));
        if self.has_profiling_neighbour(id) {
            return;
        }
        match self.planner.residue_reading(e, self.now) {
            ResidueReading::Unread(accelerators) if !is_late => {
                for (accelerator, after) in accelerators {
                    self.request_reading(&accelerator, after);
                }
            }
            ResidueReading::Unread(_) | ResidueReading::Complete(_) => {
                self.emit(Command::Wake { engine, generation, level });
            }
        }
    }
}

impl Planner {
    /// Whether the rehearsal of this engine goes before its first request.
    fn rehearses_before_use(&self, e: &Engine) -> bool {
        e.rehearsal == SleepRehearsal::Due
            && self.engine_spec(&e.id).is_some_and(|spec| spec.idle.rehearse == RehearsalPolicy::Start)
    }

    /// When this awake engine has been idle for long enough to rehearse its sleep.
    ///
    /// An idle model is protected for as long at most, because its clients may return. `spec`: that of its variant.
    pub(in crate::fleet) fn rehearsal_due_at(&self, e: &Engine, spec: Option<&ModelSpec>) -> Option<Tick> {
        let rehearses = spec.is_some_and(|s| s.can_sleep && s.idle.rehearse != RehearsalPolicy::Never);
        let is_due = rehearses && e.is_rehearsal_due() && e.state == LifecycleState::Awake;
        if !is_due || self.in_use_count(e) > 0 {
            return None;
        }
        self.idle_at(e, self.settings.turns.residency)
    }
}
