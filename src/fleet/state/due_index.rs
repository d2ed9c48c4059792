//! Whom a turn need not look at.
//!
//! A turn is made for every event, and nearly every engine is as it was. What its own life demands is asked only of
//! those that may demand something now. Of every other it is known until when it rests, if nothing befalls it: that is
//! found out by a glance whenever it, its accelerators or what is ordered of its model have changed. The glance may find
//! too early a moment, never one too late: it knows nothing of waiters or pins, which only ever keep an engine from
//! being put away, and it leaves to the full look every state that does not last.
//!
//! What is known before anything is decided holds although decisions follow: a decision about one engine moves another
//! only through what makes that one astir in any case (it drains, it is ordered about, its accelerator is not
//! configured any more).

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

/// Until when each engine rests. Made from the rest of the state, so it makes no difference between two of them.
#[derive(Clone, Debug, Default)]
pub(in crate::fleet) struct DueIndex {
    /// Not of those that rest until something befalls them.
    by_engine: Arc<BTreeMap<EngineId, Tick>>,
    /// The same, by the moment.
    by_time: Arc<BTreeSet<(Tick, EngineId)>>,
    /// Every engine is in it that has to be.
    complete: bool,
}

/// It may demand something at any time.
const DUE_NOW: Tick = Tick(0);

impl DueIndex {
    /// What holds for all engines has changed.
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
    /// Every engine whose own life may demand something at this moment, in the order of names.
    pub(in crate::fleet) fn due_engines(&self, now: Tick) -> Vec<EngineId> {
        if self.shutdown.is_some() || !self.due_index.complete {
            return self.engines.values().map(|e| e.id.clone()).collect();
        }
        let due = self.due_index.by_time.iter().take_while(|(until, _)| *until <= now);
        let mut astir: Vec<EngineId> = due.map(|(_, id)| id.clone()).collect();
        astir.sort_unstable();
        astir
    }

    /// Finds out anew until when those rest that something has befallen.
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

    /// Those of whom more rest is known than they have.
    pub(in crate::fleet) fn overlooked_engines(&self) -> Vec<EngineId> {
        let engines = self.engines.values().filter(|_| self.due_index.complete);
        let until = |at: Option<Tick>| at.unwrap_or(Tick(u64::MAX));
        let late =
            engines.filter(|e| until(self.next_due(e)) < until(self.due_index.by_engine.get(&e.id).copied()));
        late.map(|e| e.id.clone()).collect()
    }

    /// Every model that has engines, with them, in the order of names: both are kept by name, so that one walk over both
    /// spares the looking up.
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

    /// `None`: until something befalls it.
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
        let (rests, until) = match &e.state {
            LifecycleState::Cold | LifecycleState::Backoff { .. } => {
                (!e.pending_reservation.as_ref().is_some_and(|p| p.confirmed), None)
            }
            LifecycleState::Launching | LifecycleState::Loading => {
                let rests = !e.must_await_stub() && self.are_accelerators_usable(e, |_| true);
                (rests, e.deadline(Some(spec), Bytes::ZERO, timeouts))
            }
            LifecycleState::Awake => {
                let idle = [spec.idle.sleep_after, spec.idle.stop_after];
                let idle = idle.into_iter().flatten().filter_map(|after| self.idle_at(e, after));
                let idle = idle.filter(|_| self.in_use_count(e) == 0);
                let stands =
                    self.are_accelerators_usable(e, |account| !account.is_unread_since(e.turn_start));
                let door = if e.stub_gate_closed { Admission::AwaitingStub } else { Admission::Public };
                (e.admission == door && !e.must_await_stub() && stands, idle.chain(e.hung_at(timeouts)).min())
            }
            LifecycleState::Asleep { .. } => {
                let held = e.pending_reservation.is_none()
                    && e.releasing_since.is_none()
                    && !self.may_shrink_residue(e, spec);
                let stopped = spec.idle.stop_after.map(|after| e.idle_since().max(e.since) + after);
                (held && self.are_accelerators_usable(e, |_| true), stopped)
            }
            _ => (false, None),
        };
        if rests { until } else { Some(DUE_NOW) }
    }

    /// All its accelerators are configured and well, and this can be said of each.
    fn are_accelerators_usable(&self, e: &Engine, also: impl Fn(&AcceleratorAccount) -> bool) -> bool {
        let accounts = &self.ledger.accelerators;
        let stands =
            |account: &AcceleratorAccount| account.healthy && account.capacity > Bytes::ZERO && also(account);
        e.accelerators.iter().all(|a| accounts.get(a).is_some_and(stands))
    }

    /// A meter that names engines may have seen that less is kept by this sleeper than it has booked.
    fn may_shrink_residue(&self, e: &Engine, spec: &ModelSpec) -> bool {
        let mut accounts = e.accelerators.iter().filter_map(|a| self.ledger.accelerators.get(a));
        let named = |account: &AcceleratorAccount| {
            account.reading.as_ref().is_some_and(|r| r.at > e.since && r.by_engine.is_some())
        };
        accounts.all(named)
            && self.ledger.booked_bytes(&e.id) > spec.accelerators.bytes_per_account(spec.memory.asleep)
    }
}
