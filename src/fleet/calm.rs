//! Whom a turn need not look at.
//!
//! A turn is made for every event, and nearly every engine is as it was. What its own life demands is asked only of
//! those that may demand something now; the others are passed by after a glance at what is at hand: the engine itself,
//! its model (both are kept by name, so one walk over both finds it) and the accounts it is on. The glance may call an
//! engine astir that is not, never the other way round: it knows nothing of waiters or pins, which only ever keep an
//! engine from being put away, and it leaves to the full look every state that does not last.
//!
//! The glances are made before anything is decided, and hold although decisions follow: a decision about one engine
//! moves another only through what makes that one astir in any case (it drains, it is ordered about, its accelerator is
//! not configured any more).

use std::collections::BTreeSet;

use super::{
    budget::Account,
    plan::{Model, Planner},
};
use crate::{
    engine::{Door, Engine, state::State},
    model::{EngineId, ModelName, ModelSpec},
    units::{Millis, Tick},
};

impl Planner {
    /// Every engine whose own life may demand something at this moment, in the order of names.
    pub(super) fn astir(&self, now: Tick) -> Vec<EngineId> {
        let mut astir = Vec::new();
        let all = |e: &&Engine| e.id.clone();
        if self.shutdown.is_some() {
            return self.engines.values().map(|e| all(&e)).collect();
        }
        let ordered: BTreeSet<&ModelName> = self.operations.values().map(|op| &op.model).collect();
        self.each_model(|model, engines| {
            let name = engines.first().map(|e| &e.id.model);
            let spec = model.and_then(|m| m.spec.as_deref());
            let spec = spec.filter(|_| ordered.is_empty() || !name.is_some_and(|n| ordered.contains(n)));
            match spec {
                Some(spec) => {
                    astir.extend(engines.iter().filter(|e| !self.is_calm(e, spec, now)).map(all));
                }
                None => astir.extend(engines.iter().map(all)),
            }
        });
        astir
    }

    /// Every model that has engines, with them, in the order of names.
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

    /// Nobody ordered anything of its model. `false` says nothing.
    fn is_calm(&self, e: &Engine, spec: &ModelSpec, now: Tick) -> bool {
        let outdated = e.state.has_process() && e.fingerprint != spec.fingerprint;
        if e.orphan.is_some() || e.id.replica >= spec.replicas || outdated {
            return false;
        }
        let past = |from: Tick, after: Option<Millis>| after.is_some_and(|after| from + after <= now);
        let rests = |at: Option<Tick>| at.is_none_or(|at| at > now);
        let timeouts = &self.settings.timeouts;
        match &e.state {
            State::Cold | State::Backoff { .. } => !e.placing.as_ref().is_some_and(|p| p.confirmed),
            State::Launching | State::Loading => {
                rests(e.deadline(Some(spec), crate::units::Bytes::ZERO, timeouts)) && self.stands(e, |_| true)
            }
            State::Awake => {
                let idles = e.leases == 0
                    && (past(e.idle_since(), spec.idle.sleep_after)
                        || past(e.idle_since(), spec.idle.stop_after));
                e.door == Door::Public
                    && !idles
                    && rests(e.hung_at(timeouts))
                    && self.stands(e, |account| !account.is_unread_since(e.turn))
            }
            State::Asleep { .. } => {
                e.placing.is_none()
                    && e.shrinking.is_none()
                    && !past(e.idle_since().max(e.since), spec.idle.stop_after)
                    && self.stands(e, |_| true)
                    && !self.keeps_too_much(e, spec)
            }
            _ => false,
        }
    }

    /// All its accelerators are configured and well, and this can be said of each.
    fn stands(&self, e: &Engine, also: impl Fn(&Account) -> bool) -> bool {
        let accounts = &self.ledger.accelerators;
        let stands = |account: &Account| account.healthy && account.capacity.0 > 0 && also(account);
        e.accelerators.iter().all(|a| accounts.get(a).is_some_and(stands))
    }

    /// A meter that names engines may have seen that less is kept by this sleeper than it has booked.
    fn keeps_too_much(&self, e: &Engine, spec: &ModelSpec) -> bool {
        let accounts = e.accelerators.iter().filter_map(|a| self.ledger.accelerators.get(a));
        let named = |account: &Account| {
            account.reading.as_ref().is_some_and(|r| r.at > e.since && r.by_engine.is_some())
        };
        accounts.map(named).all(|named| named) && self.ledger.held(&e.id) > spec.memory.asleep
    }
}
