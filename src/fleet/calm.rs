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

use super::{
    accounts::Touched,
    budget::Account,
    plan::{Model, Planner, is_outdated},
};
use crate::{
    engine::{Door, Engine, state::State},
    model::{EngineId, ModelSpec},
    units::{Bytes, Tick},
};

/// Until when each engine rests. Made from the rest of the state, so it makes no difference between two of them.
#[derive(Clone, Debug, Default)]
pub(super) struct Calm {
    /// Not of those that rest until something befalls them.
    until: Arc<BTreeMap<EngineId, Tick>>,
    /// The same, by the moment.
    due: Arc<BTreeSet<(Tick, EngineId)>>,
    /// Every engine is in it that has to be.
    known: bool,
}

/// It may demand something at any time.
const ASTIR: Tick = Tick(0);

impl Calm {
    /// What holds for all engines has changed.
    pub(super) const fn forget(&mut self) {
        self.known = false;
    }

    fn set(&mut self, id: &EngineId, until: Option<Tick>) {
        let before = self.until.get(id).copied();
        if before == until {
            return;
        }
        let (all, due) = (Arc::make_mut(&mut self.until), Arc::make_mut(&mut self.due));
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

impl PartialEq for Calm {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Planner {
    /// Every engine whose own life may demand something at this moment, in the order of names.
    pub(super) fn astir(&self, now: Tick) -> Vec<EngineId> {
        if self.shutdown.is_some() || !self.calm.known {
            return self.engines.values().map(|e| e.id.clone()).collect();
        }
        let due = self.calm.due.iter().take_while(|(until, _)| *until <= now);
        let mut astir: Vec<EngineId> = due.map(|(_, id)| id.clone()).collect();
        astir.sort_unstable();
        astir
    }

    /// Finds out anew until when those rest that something has befallen.
    pub(super) fn glance(&mut self) {
        let mut touched = self.engines.take_touched();
        let accounts = match self.ledger.accelerators.take_touched() {
            Touched::These(accounts) if self.calm.known => accounts,
            _ => {
                self.calm = Calm { known: true, ..Calm::default() };
                touched = self.engines.values().map(|e| e.id.clone()).collect();
                Vec::new()
            }
        };
        touched.extend(self.engines.near(&accounts).into_iter().map(|e| e.id.clone()));
        for id in &touched {
            let until = self.engines.get(id).and_then(|e| self.rests_until(e));
            self.calm.set(id, until);
        }
    }

    /// Those of whom more rest is known than they have.
    pub(super) fn uncalm(&self) -> Vec<EngineId> {
        let engines = self.engines.values().filter(|_| self.calm.known);
        let until = |at: Option<Tick>| at.unwrap_or(Tick(u64::MAX));
        let late =
            engines.filter(|e| until(self.rests_until(e)) < until(self.calm.until.get(&e.id).copied()));
        late.map(|e| e.id.clone()).collect()
    }

    /// Every model that has engines, with them, in the order of names: both are kept by name, so that one walk over both
    /// spares the looking up.
    pub(super) fn each_model<'a>(&'a self, mut visit: impl FnMut(Option<&'a Model>, &[&'a Engine])) {
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
    fn rests_until(&self, e: &Engine) -> Option<Tick> {
        if !self.role.decides() {
            return (!self.is_followed(e)).then_some(ASTIR);
        }
        let Some(spec) = self.spec(&e.id.model) else { return Some(ASTIR) };
        let ordered = self.operations.values().any(|op| op.model == e.id.model);
        if e.orphan.is_some() || is_outdated(e, spec) || ordered {
            return Some(ASTIR);
        }
        let timeouts = &self.settings.timeouts;
        let (rests, until) = match &e.state {
            State::Cold | State::Backoff { .. } => (!e.placing.as_ref().is_some_and(|p| p.confirmed), None),
            State::Launching | State::Loading => {
                let rests = !e.is_to_be_held() && self.stands(e, |_| true);
                (rests, e.deadline(Some(spec), Bytes::ZERO, timeouts))
            }
            State::Awake => {
                let idle = [spec.idle.sleep_after, spec.idle.stop_after];
                let idle = idle.into_iter().flatten().filter_map(|after| self.idle_at(e, after));
                let idle = idle.filter(|_| self.uses(e) == 0);
                let stands = self.stands(e, |account| !account.is_unread_since(e.turn));
                let door = if e.gated { Door::Held } else { Door::Public };
                (e.door == door && !e.is_to_be_held() && stands, idle.chain(e.hung_at(timeouts)).min())
            }
            State::Asleep { .. } => {
                let held = e.placing.is_none() && e.shrinking.is_none() && !self.keeps_too_much(e, spec);
                let stopped = spec.idle.stop_after.map(|after| e.idle_since().max(e.since) + after);
                (held && self.stands(e, |_| true), stopped)
            }
            _ => (false, None),
        };
        if rests { until } else { Some(ASTIR) }
    }

    /// All its accelerators are configured and well, and this can be said of each.
    fn stands(&self, e: &Engine, also: impl Fn(&Account) -> bool) -> bool {
        let accounts = &self.ledger.accelerators;
        let stands = |account: &Account| account.healthy && account.capacity > Bytes::ZERO && also(account);
        e.accelerators.iter().all(|a| accounts.get(a).is_some_and(stands))
    }

    /// A meter that names engines may have seen that less is kept by this sleeper than it has booked.
    fn keeps_too_much(&self, e: &Engine, spec: &ModelSpec) -> bool {
        let mut accounts = e.accelerators.iter().filter_map(|a| self.ledger.accelerators.get(a));
        let named = |account: &Account| {
            account.reading.as_ref().is_some_and(|r| r.at > e.since && r.by_engine.is_some())
        };
        accounts.all(named) && self.ledger.held(&e.id) > spec.accelerators.in_one_place(spec.memory.asleep)
    }
}
