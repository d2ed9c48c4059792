//! Index of the engines that a turn may skip.
//!
//! Every event causes a turn, and nearly every engine is unchanged. So a turn advances only the engines that may need a
//! command now. For every other engine the index has the moment until which it rests if no event affects it. `next_due`
//! computes that moment whenever the engine, its accelerators or its model's operations have changed. The moment may be
//! too early, never too late: the computation ignores waiters and pins, which only keep engines from being evicted, and
//! leaves every transient state to the full check.
//!
//! Entries made before a decision hold during it. A decision about one engine moves another only through what makes
//! that one due in any case (it drains, it has an operation, its accelerator is no longer configured).

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crate::{
    engine::{Admission, Engine, state::LifecycleState},
    fleet::{
        plan::{ModelRecord, Planner, is_outdated},
        state::ledger::{AcceleratorAccount, accounts::DirtyAccounts},
    },
    model::{EngineId, ModelSpec},
    units::{Bytes, Tick},
};

/// Until when each engine rests. Derived from the other state, so two states never differ by it.
#[derive(Clone, Debug, Default)]
pub(in crate::fleet) struct DueIndex {
    /// Engines without an entry rest until an event affects them.
    by_engine: Arc<BTreeMap<EngineId, Tick>>,
    /// The same entries, ordered by time.
    by_time: Arc<BTreeSet<(Tick, EngineId)>>,
    /// Whether every engine that needs an entry has one.
    complete: bool,
}

/// Marks an engine that may need a command at any time.
const DUE_NOW: Tick = Tick(0);

impl DueIndex {
    /// Discards the index, because something changed that affects all engines.
    pub(in crate::fleet) const fn invalidate(&mut self) {
        self.complete = false;
    }

    fn set(&mut self, id: &EngineId, until: Option<Tick>) {
        let before = self.by_engine.get(id).copied();
        if before == until {
            return;
        }
        let (all, due) = (Arc::make_mut(&mut self.by_engine), Arc::make_mut(&mut self.by_time));
        if let Some(before) = before {
            due.remove(&(before, id.clone()));
        }
        match until {
            Some(until) => {
                due.insert((until, id.clone()));
                all.insert(id.clone(), until);
            }
            None => {
                all.remove(id);
            }
        }
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
        let due = self.due_index.by_time.iter().take_while(|(until, _)| *until <= now);
        let mut due_engines: Vec<EngineId> = due.map(|(_, id)| id.clone()).collect();
        due_engines.sort_unstable();
        due_engines
    }

    /// Recomputes the entries of changed engines and of engines on changed accelerators.
    pub(in crate::fleet) fn refresh_due_index(&mut self) {
        let mut touched = self.engines.take_dirty();
        let accounts = match self.ledger.accelerators.take_dirty() {
            DirtyAccounts::Listed(accounts) if self.due_index.complete => accounts,
            _ => {
                self.due_index = DueIndex { complete: true, ..DueIndex::default() };
                touched = self.engines.values().map(|e| e.id.clone()).collect();
                Vec::new()
            }
        };
        touched.extend(self.engines.on_accelerators(&accounts).into_iter().map(|e| e.id.clone()));
        for id in &touched {
            let until = self.engines.get(id).and_then(|e| self.next_due(e));
            self.due_index.set(id, until);
        }
    }

    /// Returns the engines that are due earlier than the index has them.
    pub(in crate::fleet) fn overlooked_engines(&self) -> Vec<EngineId> {
        let engines = self.engines.values().filter(|_| self.due_index.complete);
        let until = |at: Option<Tick>| at.unwrap_or(Tick(u64::MAX));
        let overlooked =
            engines.filter(|e| until(self.next_due(e)) < until(self.due_index.by_engine.get(&e.id).copied()));
        overlooked.map(|e| e.id.clone()).collect()
    }

    /// Visits every model that has engines, with these engines, ordered by name.
    ///
    /// Both maps are ordered by name, so one merged walk avoids lookups.
    pub(in crate::fleet) fn each_model<'a>(
        &'a self,
        mut visit: impl FnMut(Option<&'a ModelRecord>, &[&'a Engine]),
    ) {
        let engines: Vec<&Engine> = self.engines.values().collect();
        let mut models = self.models.iter().peekable();
        for engines in engines.chunk_by(|a, b| a.id.model == b.id.model) {
            let Some(first) = engines.first() else { continue };
            while models.next_if(|(name, _)| **name < first.id.model).is_some() {}
            let model = models.next_if(|(name, _)| **name == first.id.model).map(|(_, model)| model);
            visit(model, engines);
        }
    }

    /// When the engine is next due; `None`: not before an event affects it.
    fn next_due(&self, e: &Engine) -> Option<Tick> {
        if !self.role.decides() {
            return (!self.is_gate_in_sync(e)).then_some(DUE_NOW);
        }
        let Some(spec) = self.spec(&e.id.model) else { return Some(DUE_NOW) };
        let ordered = self.operations.values().any(|op| op.model == e.id.model);
        if e.unclosed_gate.is_some() || is_outdated(e, spec) || ordered {
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
                let idle = idle.into_iter().flatten().filter_map(|after| self.idle_at(e, after));
                let idle = idle.filter(|_| self.in_use_count(e) == 0);
                let accelerators_read =
                    self.are_accelerators_usable(e, |account| !account.is_unread_since(e.turn_start));
                let admission = if e.stub_gate_closed { Admission::AwaitingStub } else { Admission::Public };
                (
                    e.admission == admission && !e.must_await_stub() && accelerators_read,
                    idle.chain(e.hung_at(timeouts)).min(),
                )
            }
            LifecycleState::Asleep { .. } => {
                let undisturbed = e.pending_reservation.is_none()
                    && e.releasing_since.is_none()
                    && !self.may_shrink_residue(e, spec);
                let stopped = spec.idle.stop_after.map(|after| e.idle_since().max(e.since) + after);
                (undisturbed && self.are_accelerators_usable(e, |_| true), stopped)
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
