//! The gates of all engines that run, and the routes made of them.
//!
//! Looked at in every turn are the gates' own numbers, which requests move without a word, and the gates of models that
//! somebody waits for. All else is gone through when the fleet has changed in it, and only where.
//!
//! A gate belongs to one life of an engine. Within that life the engine may sleep and wake; a gate whose leases were
//! revoked is replaced before it opens again, since a revocation is for ever.

use std::{
    collections::{BTreeMap, BTreeSet},
    num::NonZeroU32,
    ops::RangeInclusive,
    sync::Arc,
};

use rouse::{
    engine::{Door, Engine, NOT_DUE},
    fault::Fault,
    fleet::{Changes, Fleet, event::Event},
    lease::{Clock, Gate, Lease},
    model::{EngineId, ModelName},
    units::{Generation, Tick},
};
use tokio::sync::Notify;

use super::{Canary, Granted, Waited};
use crate::{
    platform::Platform,
    routes::{Endpoint, Lots, Standing},
};

pub(super) struct Gates {
    held: BTreeMap<EngineId, Held>,
    /// Held for their last leases alone: the engine is gone.
    leaving: BTreeSet<EngineId>,
    /// Models whose gates know that requests queue for them.
    queued: BTreeSet<ModelName>,
    clock: Clock,
    changed: Arc<Notify>,
}

struct Held {
    endpoint: Endpoint,
    /// Closed, and its drain not reported yet.
    closing: bool,
    /// The platform has yet to say that nobody is inside: it closes a gate that others pass as well.
    elsewhere: bool,
    revoked: bool,
    queued: bool,
    /// In the routes.
    public: bool,
    /// What was last told to the fleet.
    told: Option<(u32, Tick, Tick)>,
    /// What the fleet believes of its standing.
    left_out: Option<Tick>,
}

/// A lease on an engine, with where it is.
pub(super) struct Place {
    lease: Lease,
    fingerprint: u64,
    address: std::net::SocketAddr,
}

impl Place {
    pub(super) fn granted(
        self,
        engine: EngineId,
        generation: Generation,
        canary: Option<Canary>,
        waited: Waited,
    ) -> Granted {
        let Self { lease, fingerprint, address } = self;
        Granted { lease, engine, generation, fingerprint, address, canary, waited }
    }
}

impl Gates {
    pub(super) fn new(clock: Clock) -> Self {
        Self {
            held: BTreeMap::new(),
            leaving: BTreeSet::new(),
            queued: BTreeSet::new(),
            clock,
            changed: Arc::default(),
        }
    }

    /// A release matters: a drain is complete, or a place came free that somebody waits for.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// What moved since the last turn. An engine that is found in use will be heard of when it no longer is.
    /// `leads`: the platform tells when a gate is drained that others pass as well.
    pub(super) fn sample(&mut self, batch: &mut Vec<Event>, leads: bool) {
        batch.retain(|event| !self.is_drained_elsewhere(event));
        for (engine, held) in &mut self.held {
            let (gate, generation) = (&held.endpoint.gate, held.endpoint.generation);
            let leases = gate.watch();
            let seen = (leases, gate.last_end(), gate.last_byte());
            if held.told != Some(seen) {
                held.told = Some(seen);
                let (leases, last_end, last_byte) = seen;
                let (engine, clients, pause) = (engine.clone(), gate.clients(), gate.pause());
                batch.push(Event::Used { engine, generation, leases, last_end, last_byte, clients, pause });
            }
            let until = held.endpoint.standing.again();
            if held.left_out != until {
                held.left_out = until;
                batch.push(Event::LeftOut { engine: engine.clone(), generation, until });
            }
            if held.closing && leases == 0 && !(held.elsewhere && leads) {
                held.closing = false;
                batch.push(Event::Drained { engine: engine.clone(), generation });
            }
        }
    }

    /// Whether this is the platform's word on a gate that is to drain. It is not the last: a stub is done with an answer before
    /// the end of it is passed on here.
    fn is_drained_elsewhere(&mut self, event: &Event) -> bool {
        let Event::Drained { engine, generation } = event else { return false };
        let held = self.held.get_mut(engine).filter(|h| h.endpoint.generation == *generation && h.closing);
        held.is_some_and(|held| std::mem::take(&mut held.elsewhere))
    }

    /// Its drain is reported by [`Self::sample`] once the last lease is gone, and the platform has said so, when the gate is
    /// `elsewhere` as well; at once, when there never was a gate.
    pub(super) fn close(
        &mut self,
        engine: &EngineId,
        generation: Generation,
        elsewhere: bool,
    ) -> Option<Event> {
        let Some(held) = self.held.get_mut(engine).filter(|h| h.endpoint.generation == generation) else {
            return Some(Event::Drained { engine: engine.clone(), generation });
        };
        held.endpoint.gate.close();
        (held.closing, held.elsewhere) = (true, elsewhere);
        None
    }

    /// Nobody is let in, and those inside stay: no drain, and its end is no event.
    pub(super) fn hold(&mut self, engine: &EngineId, generation: Generation) {
        if let Some(held) = self.held.get_mut(engine).filter(|h| h.endpoint.generation == generation) {
            held.endpoint.gate.close();
        }
    }

    pub(super) fn revoke(&mut self, engine: &EngineId, generation: Generation, fault: &Fault) {
        if let Some(held) = self.held.get_mut(engine).filter(|h| h.endpoint.generation == generation) {
            held.endpoint.gate.revoke(fault.clone());
            held.revoked = true;
        }
    }

    /// Makes gates for engines that are about to open, forgets those of lives that ended.
    pub(super) fn follow(&mut self, fleet: &Fleet, changes: &Changes, platform: &dyn Platform) {
        if changes.configured {
            fleet.engines().for_each(|engine| self.follow_one(engine, fleet, platform));
            let all: Vec<EngineId> = self.held.keys().cloned().collect();
            self.forget(&all, fleet);
            return;
        }
        for model in &changes.models {
            fleet.engines_of(model).for_each(|engine| self.follow_one(engine, fleet, platform));
            let of_model: Vec<EngineId> = self.held.range(of(model)).map(|(id, _)| id.clone()).collect();
            self.forget(&of_model, fleet);
        }
        if !self.leaving.is_empty() {
            let leaving: Vec<EngineId> = self.leaving.iter().cloned().collect();
            self.forget(&leaving, fleet);
        }
    }

    fn follow_one(&mut self, engine: &Engine, fleet: &Fleet, platform: &dyn Platform) {
        if let Some(address) = engine.address {
            let stale = self.held.get(&engine.id).is_some_and(|h| {
                h.endpoint.generation != engine.generation || (h.revoked && engine.door != Door::Closed)
            });
            if stale {
                self.held.remove(&engine.id);
            }
            let limit =
                fleet.spec(&engine.id.model).and_then(|s| s.max_concurrency).and_then(NonZeroU32::new);
            let held = self.held.entry(engine.id.clone()).or_insert_with(|| Held {
                endpoint: Endpoint {
                    engine: engine.id.clone(),
                    generation: engine.generation,
                    fingerprint: engine.fingerprint,
                    address,
                    gate: Gate::new(limit, self.clock, Arc::clone(&self.changed)),
                    standing: Standing::new(Lots::new().draw(), Arc::clone(&self.changed)),
                    reported: platform.reported(&engine.id, engine.generation),
                },
                closing: false,
                elsewhere: false,
                revoked: false,
                queued: false,
                public: false,
                told: Some((0, Tick(0), Tick(0))),
                left_out: engine.left_out,
            });
            held.endpoint.gate.set_limit(limit);
        }
        if let Some(held) = self.held.get_mut(&engine.id) {
            held.public = engine.door == Door::Public && held.endpoint.generation == engine.generation;
        }
    }

    /// Those of these that nothing is left of.
    fn forget(&mut self, engines: &[EngineId], fleet: &Fleet) {
        for id in engines {
            let lives = fleet.engine(id).is_some_and(|e| e.address.is_some());
            let used = self.held.get(id).is_some_and(|h| h.endpoint.gate.leases() > 0 || h.closing);
            if lives || !used {
                self.leaving.remove(id);
            } else {
                self.leaving.insert(id.clone());
            }
            if !lives && !used {
                self.held.remove(id);
            }
        }
    }

    /// Nothing is missing that [`Self::follow`] would find if it looked everywhere.
    pub(super) fn are_current(&self, fleet: &Fleet) -> bool {
        let held = |engine: &Engine| {
            self.held.get(&engine.id).is_some_and(|held| held.endpoint.generation == engine.generation)
        };
        let right = |(id, held): (&EngineId, &Held)| {
            let engine = fleet.engine(id).filter(|e| e.generation == held.endpoint.generation);
            let public = engine.is_some_and(|e| e.door == Door::Public);
            let lives = fleet.engine(id).is_some_and(|e| e.address.is_some());
            held.public == public && lives != self.leaving.contains(id)
        };
        fleet.engines().filter(|engine| engine.address.is_some()).all(held) && self.held.iter().all(right)
    }

    pub(super) fn open(&mut self, engine: &EngineId) {
        if let Some(held) = self.held.get_mut(engine) {
            (held.closing, held.elsewhere) = (false, false);
            held.endpoint.gate.open();
        }
    }

    /// The fleet counts the lease as given; one that was not to be had, or is dropped before the next sample, must not
    /// look like no change.
    pub(super) fn take_queued(&mut self, engine: &EngineId) -> Option<Place> {
        let held = self.held.get_mut(engine)?;
        held.told = None;
        held.left_out = held.left_out.map(|_| NOT_DUE);
        let lease = held.endpoint.gate.take_queued()?;
        if held.endpoint.standing.is_out() {
            // This is the request that tries, unless another came first; either way the fleet hears when the next may.
            let _tries = held.endpoint.standing.try_again(self.clock.now());
        }
        let Endpoint { fingerprint, address, .. } = held.endpoint;
        Some(Place { lease, fingerprint, address })
    }

    /// Tells each gate whether requests queue for it. A place that came free before the gate knew would be missed,
    /// so a gate that learns of a queue is looked at once more. `returning`: waiters whose grant came too late, and
    /// who are on their way back to the queue.
    pub(super) fn set_queued(&mut self, fleet: &Fleet, returning: &[Event]) {
        let returning = returning.iter().filter_map(|event| match event {
            Event::Arrived { waiter } => Some(&waiter.model),
            _ => None,
        });
        let queued: BTreeSet<ModelName> = fleet.queued().chain(returning).cloned().collect();
        let before = std::mem::replace(&mut self.queued, queued);
        // Also of those that were told: one of their gates may be new.
        for model in before.union(&self.queued) {
            let queued = self.queued.contains(model);
            for (_, held) in self.held.range_mut(of(model)).filter(|(_, held)| held.queued != queued) {
                held.queued = queued;
                held.endpoint.gate.set_queued(queued);
                if queued {
                    self.changed.notify_one();
                }
            }
        }
    }

    /// Of each model with an engine, how many leases are out and when the last one ended: now, and not when the fleet last
    /// heard of it. Those that are had at once cause no turn.
    pub(super) fn used(&self) -> BTreeMap<ModelName, (u32, Tick)> {
        let mut used = BTreeMap::<ModelName, (u32, Tick)>::new();
        for (engine, held) in &self.held {
            let (leases, last_end) = used.entry(engine.model.clone()).or_default();
            *leases += held.endpoint.gate.leases();
            *last_end = held.endpoint.gate.last_end().max(*last_end);
        }
        used
    }

    pub(super) fn endpoints(&self, model: &ModelName) -> Vec<Endpoint> {
        let public = self.held.range(of(model)).filter(|(_, held)| held.public);
        public.map(|(_, held)| held.endpoint.clone()).collect()
    }
}

/// The names of all engines that this model can have.
fn of(model: &ModelName) -> RangeInclusive<EngineId> {
    EngineId::new(model.clone(), 0)..=EngineId::new(model.clone(), u32::MAX)
}
