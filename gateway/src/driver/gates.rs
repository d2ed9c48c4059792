//! The gates of all engines that run, and the routes made of them.
//!
//! A gate belongs to one life of an engine. Within that life the engine may sleep and wake; a gate whose leases were
//! revoked is replaced before it opens again, since a revocation is for ever.

use std::{collections::BTreeMap, num::NonZeroU32, sync::Arc};

use rouse::{
    engine::{Door, NOT_DUE},
    fault::Fault,
    fleet::{Fleet, event::Event},
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
    clock: Clock,
    changed: Arc<Notify>,
}

struct Held {
    endpoint: Endpoint,
    /// Closed, and its drain not reported yet.
    closing: bool,
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
        Self { held: BTreeMap::new(), clock, changed: Arc::default() }
    }

    /// A release matters: a drain is complete, or a place came free that somebody waits for.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// What moved since the last turn. An engine that is found in use will be heard of when it no longer is.
    pub(super) fn sample(&mut self, batch: &mut Vec<Event>) {
        for (engine, held) in &mut self.held {
            let (gate, generation) = (&held.endpoint.gate, held.endpoint.generation);
            let leases = gate.watch();
            let seen = (leases, gate.last_end(), gate.last_byte());
            if held.told != Some(seen) {
                held.told = Some(seen);
                let (leases, last_end, last_byte) = seen;
                batch.push(Event::Used { engine: engine.clone(), generation, leases, last_end, last_byte });
            }
            let until = held.endpoint.standing.again();
            if held.left_out != until {
                held.left_out = until;
                batch.push(Event::LeftOut { engine: engine.clone(), generation, until });
            }
            if held.closing && leases == 0 {
                held.closing = false;
                batch.push(Event::Drained { engine: engine.clone(), generation });
            }
        }
    }

    /// Its drain is reported by [`Self::sample`] once the last lease is gone; at once, when there never was a gate.
    pub(super) fn close(&mut self, engine: &EngineId, generation: Generation) -> Option<Event> {
        let Some(held) = self.held.get_mut(engine).filter(|h| h.endpoint.generation == generation) else {
            return Some(Event::Drained { engine: engine.clone(), generation });
        };
        held.endpoint.gate.close();
        held.closing = true;
        None
    }

    pub(super) fn revoke(&mut self, engine: &EngineId, generation: Generation, fault: &Fault) {
        if let Some(held) = self.held.get_mut(engine).filter(|h| h.endpoint.generation == generation) {
            held.endpoint.gate.revoke(fault.clone());
            held.revoked = true;
        }
    }

    /// Makes gates for engines that are about to open, forgets those of lives that ended.
    pub(super) fn follow(&mut self, fleet: &Fleet, platform: &dyn Platform) {
        for engine in fleet.engines() {
            let Some(address) = engine.address else { continue };
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
                revoked: false,
                queued: false,
                public: false,
                told: Some((0, Tick(0), Tick(0))),
                left_out: engine.left_out,
            });
            held.endpoint.gate.set_limit(limit);
        }
        for engine in fleet.engines() {
            if let Some(held) = self.held.get_mut(&engine.id) {
                held.public = engine.door == Door::Public && held.endpoint.generation == engine.generation;
            }
        }
        let known = |id: &EngineId, held: &Held| {
            held.endpoint.gate.leases() > 0
                || held.closing
                || fleet.engine(id).is_some_and(|e| e.address.is_some())
        };
        self.held.retain(|id, held| known(id, held));
    }

    pub(super) fn open(&mut self, engine: &EngineId) {
        if let Some(held) = self.held.get_mut(engine) {
            held.closing = false;
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
        let returns = |model: &ModelName| {
            returning.iter().any(|event| matches!(event, Event::Arrived { waiter } if waiter.model == *model))
        };
        for (engine, held) in &mut self.held {
            let queued = fleet.is_queued(&engine.model) || returns(&engine.model);
            if queued != held.queued {
                held.queued = queued;
                held.endpoint.gate.set_queued(queued);
                if queued {
                    self.changed.notify_one();
                }
            }
        }
    }

    pub(super) fn endpoints(&self, model: &ModelName) -> Vec<Endpoint> {
        let of = self.held.iter().filter(|(id, held)| id.model == *model && held.public);
        of.map(|(_, held)| held.endpoint.clone()).collect()
    }
}
