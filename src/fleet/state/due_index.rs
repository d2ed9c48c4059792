//! Index of the engines that a turn may skip, and of the next deadline of all engines.
//!
//! Every event causes a turn, and nearly every engine is unchanged. So a turn advances only the engines that may need a
//! command now. For every other engine the index has the moment until which it rests if no event affects it. `next_due`
//! computes that moment whenever the engine, its accelerators or its model's operations have changed. The moment may be
//! too early, never too late: the computation ignores waiters and pins, which only keep engines from being evicted, and
//! leaves every transient state to the full check.
//!
//! The driver sleeps until the first deadline of any engine, which is exact and may be later or earlier than `next_due`.
//! The index has the first deadline of each engine after the last planned moment. It changes with the same inputs, and
//! when that moment passes it.
//!
//! Entries made before a decision hold during it. A decision about one engine moves another only through what makes
//! that one due in any case (it drains, it has an operation, its accelerator is no longer configured). The idleness of a
//! scaled model's engine depends on the model's others: an engine counts there until it has wound down, so a decision
//! only delays the idleness of the rest.

use crate::{
    engine::{Admission, Engine, state::LifecycleState},
    fleet::{
        plan::Planner,
        state::ledger::{AcceleratorAccount, accounts::DirtyAccounts},
    },
    model::{EngineId, ModelName, ModelSpec},
    shared_map::{SharedMap, SharedSet},
    units::{Bytes, Tick},
};

/// Until when each engine rests, and its next deadline.
///
/// Derived from the other state, so two states never differ by it.
#[derive(Clone, Debug, Default)]
pub(in crate::fleet) struct DueIndex {
    /// Engines without an entry rest until an event affects them.
    due: EngineTimes,
    /// Each engine's first deadline after the last planned moment.
    deadlines: EngineTimes,
    /// Whether every engine that needs an entry has one.
    complete: bool,
}

/// A moment for each of some engines.
#[derive(Clone, Debug, Default)]
struct EngineTimes {
    by_engine: SharedMap<EngineId, Tick>,
    /// The same entries, ordered by time.
    by_time: SharedSet<(Tick, EngineId)>,
}

/// Marks an engine that may need a command at any time.
const DUE_NOW: Tick = Tick(0);

impl DueIndex {
    /// Discards the index, because something changed that affects all engines.
    pub(in crate::fleet) const fn invalidate(&mut self) {
        self.complete = false;
    }
}

impl EngineTimes {
    fn set(&mut self, id: &EngineId, at: Option<Tick>) {
        let before = self.by_engine.get(id).copied();
        if before == at {
            return;
        }
        // The new entry goes in before the old one leaves: a map whose only entry leaves frees its memory.
        if let Some(at) = at {
            self.by_time.insert((at, id.clone()));
            if let Some(known) = self.by_engine.get_mut(id) {
                *known = at;
            } else {
                self.by_engine.insert(id.clone(), at);
            }
        } else {
            self.by_engine.remove(id);
        }
        if let Some(before) = before {
            self.by_time.remove(&(before, id.clone()));
        }
    }

    /// The engines whose moment has come.
    fn due_by(&self, now: Tick) -> impl Iterator<Item = &EngineId> {
        self.by_time.iter().take_while(move |(at, _)| *at <= now).map(|(_, id)| id)
    }

    fn first(&self) -> Option<Tick> {
        self.by_time.iter().next().map(|(at, _)| *at)
    }
}

impl PartialEq for DueIndex {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Planner {
    /// Returns every engine that may need a command at this moment, ordered by name.
    pub(in crate::fleet) fn due_engines(&self, now: Tick) -> Vec<EngineId> {
        if self.shutdown.is_some() || !self.due_index.complete {
            return self.engines.values().map(|e| e.id.clone()).collect();
        }
        let mut due_engines: Vec<EngineId> = self.due_index.due.due_by(now).cloned().collect();
        due_engines.sort_unstable();
        due_engines
    }

    /// Recomputes the entries of changed engines, of engines on changed accelerators, and of passed deadlines.
    pub(in crate::fleet) fn refresh_due_index(&mut self) {
        let mut touched = self.engines.take_dirty();
        touched.append(&mut self.ledger.accelerators.take_rebooked());
        let accounts = match self.ledger.accelerators.take_dirty() {
            DirtyAccounts::Listed(accounts) if self.due_index.complete => accounts,
            _ => {
                self.due_index = DueIndex { complete: true, ..DueIndex::default() };
                touched = self.engines.values().map(|e| e.id.clone()).collect();
                Vec::new()
            }
        };
        touched.extend(self.engines.on_accelerators(&accounts).into_iter().map(|e| e.id.clone()));
        touched.extend(self.due_index.deadlines.due_by(self.last_planned).cloned());
        touched.sort_unstable();
        touched.dedup();
        self.refresh_scaling(&touched);
        self.add_replicas_of_scaled(&mut touched);
        for id in &touched {
            let engine = self.engines.get(id);
            let (due, deadline) =
                engine.map_or((None, None), |e| (self.next_due(e), self.first_deadline_of(e)));
            self.due_index.due.set(id, due);
            self.due_index.deadlines.set(id, deadline);
        }
    }

    /// Adds the other engines of scaled models: what one is used for moves the idleness of all.
    fn add_replicas_of_scaled(&self, touched: &mut Vec<EngineId>) {
        let mut models: Vec<&ModelName> =
            touched.iter().map(|id| &id.model).filter(|model| self.is_scaled(model)).collect();
        models.dedup();
        let others: Vec<EngineId> =
            models.into_iter().flat_map(|model| self.engines_of(model)).map(|e| e.id.clone()).collect();
        if !others.is_empty() {
            touched.extend(others);
            touched.sort_unstable();
            touched.dedup();
        }
    }

    /// The first deadline of any engine after the last planned moment.
    pub(in crate::fleet) fn first_engine_deadline(&self) -> Option<Tick> {
        if self.due_index.complete {
            self.due_index.deadlines.first()
        } else {
            self.scan_for_engine_deadline()
        }
    }

    /// Computes [`Self::first_engine_deadline`] without the index.
    pub(in crate::fleet) fn scan_for_engine_deadline(&self) -> Option<Tick> {
        self.engines.values().filter_map(|e| self.first_deadline_of(e)).min()
    }

    /// Returns the engines that are due earlier than the index has them.
    pub(in crate::fleet) fn overlooked_engines(&self) -> Vec<EngineId> {
        let engines = self.engines.values().filter(|_| self.due_index.complete);
        let until = |at: Option<Tick>| at.unwrap_or(Tick(u64::MAX));
        let overlooked = engines
            .filter(|e| until(self.next_due(e)) < until(self.due_index.due.by_engine.get(&e.id).copied()));
        overlooked.map(|e| e.id.clone()).collect()
    }

    /// When the engine is next due; `None`: not before an event affects it.
    fn next_due(&self, e: &Engine) -> Option<Tick> {
        if !self.role.decides() {
            return (!self.is_gate_in_sync(e)).then_some(DUE_NOW);
        }
        let Some(spec) = self.engine_spec(&e.id) else { return Some(DUE_NOW) };
        let ordered = self.operations.values().any(|op| op.model == e.id.model);
        if e.unclosed_gate.is_some() || self.is_outdated(e, spec) || ordered {
            return Some(DUE_NOW);
        }
        let timeouts = &self.settings.timeouts;
        let (undisturbed, until) = match &e.state {
            LifecycleState::Cold | LifecycleState::Backoff { .. } => {
                (!e.pending_reservation.as_ref().is_some_and(|p| p.confirmed), None)
            }
            LifecycleState::Launching | LifecycleState::Loading => {
                let undisturbed = !e.must_await_stub() && self.are_accelerators_usable(e, |_| true);
                (undisturbed, e.deadline(Some(spec), Bytes::ZERO, timeouts))
            }
            LifecycleState::Awake => {
                let idle = [spec.idle.sleep_after, spec.idle.stop_after];
                let idle = idle.into_iter().flatten().filter(|_| self.in_use_count(e) == 0);
                let idle = idle.filter_map(|after| self.idle_replica_at(e, after));
                let accelerators_read =
                    self.are_accelerators_usable(e, |account| !account.is_unread_since(e.turn_start));
                let admission = if e.stub_gate_closed { Admission::AwaitingStub } else { Admission::Public };
                let rehearsal = self.rehearsal_due_at(e, Some(spec));
                (
                    e.admission == admission && !e.must_await_stub() && accelerators_read,
                    idle.chain(e.hung_at(timeouts)).chain(rehearsal).min(),
                )
            }
            LifecycleState::Asleep { .. } => {
                let undisturbed = e.pending_reservation.is_none()
                    && e.releasing_since.is_none()
                    && !self.may_shrink_residue(e, spec);
                let stops_at = e.sleeper_stops_at(&spec.idle);
                (undisturbed && self.are_accelerators_usable(e, |_| true), stops_at)
            }
            _ => (false, None),
        };
        if undisturbed { until } else { Some(DUE_NOW) }
    }

    /// Whether all accelerators of the engine are configured and healthy, and `also` holds for each.
    fn are_accelerators_usable(&self, e: &Engine, also: impl Fn(&AcceleratorAccount) -> bool) -> bool {
        let accounts = &self.ledger.accelerators;
        let is_usable =
            |account: &AcceleratorAccount| account.healthy && account.capacity > Bytes::ZERO && also(account);
        e.accelerators.iter().all(|a| accounts.get(a).is_some_and(is_usable))
    }

    /// Whether a meter that names engines may have seen that this sleeper keeps less than its reservation.
    fn may_shrink_residue(&self, e: &Engine, spec: &ModelSpec) -> bool {
        let mut accounts = e.accelerators.iter().filter_map(|a| self.ledger.accelerators.get(a));
        let named = |account: &AcceleratorAccount| {
            account.reading.as_ref().is_some_and(|r| r.at > e.since && r.by_engine.is_some())
        };
        accounts.all(named)
            && self.ledger.booked_bytes(&e.id) > spec.accelerators.bytes_per_account(spec.memory.asleep)
    }
}
