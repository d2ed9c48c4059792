//! Holds the gates of all running engines, from which the routes are made.
//!
//! Requests change the gates' counters without an event. So gates and circuit breakers announce changes
//! ([`SampleQueue`]), and a turn reads the gates that were announced, those in use or saturated, and those of models
//! with waiters. Everything else is synced only where the fleet changed.
//!
//! A gate belongs to one generation of an engine. Within it, the engine may sleep and wake. A gate whose leases were
//! revoked is replaced before it opens again, since a revocation is permanent.

use std::{
    collections::{BTreeMap, BTreeSet},
    num::NonZeroU32,
    sync::Arc,
};

use rouse::{
    engine::{Admission, Engine, TRIAL_IN_FLIGHT, saturation_limit::SaturationLimit},
    fault::Fault,
    fleet::{Fleet, RoutingChanges, event::Event},
    model::{EngineId, ModelName},
    units::{Generation, Tick},
};
use rouse_net::lease::{Gate, Lease, SampleQueue, TickClock};
use rouse_platform::Platform;
use tokio::sync::Notify;

use super::{CanaryGuard, GrantedLease, WaitBreakdown};
use crate::routing::{CircuitBreaker, Endpoint, Rng};

pub(super) struct EngineGates {
    entries: BTreeMap<EngineId, GateEntry>,
    /// Engines that are gone, whose gates stay until their last lease ends.
    awaiting_last_lease: BTreeSet<EngineId>,
    /// Models whose gates know that requests queue for them.
    queued: BTreeSet<ModelName>,
    /// Engines that the next turn samples beside those announced in `samples`: in use, closing, ejected, saturated, or
    /// new. May have some of them twice.
    to_sample: Vec<EngineId>,
    samples: Arc<SampleQueue>,
    clock: TickClock,
    changed: Arc<Notify>,
}

struct GateEntry {
    endpoint: Endpoint,
    /// Closed, with the drain not reported yet.
    closing: bool,
    /// The platform has not reported the drain of the stub's gate, which other gateways use too.
    awaits_stub_drain: bool,
    revoked: bool,
    queued: bool,
    /// In the routes.
    is_routable: bool,
    /// The sample that the fleet received last.
    last_reported: Option<(u32, Tick, Tick)>,
    /// The ejection that the fleet knows of.
    reported_ejection: Option<Tick>,
    /// The saturation limit that the fleet knows of.
    reported_saturation: Option<SaturationLimit>,
}

/// A lease on an engine, with the engine's address.
pub(super) struct QueuedLease {
    lease: Lease,
    fingerprint: u64,
    address: std::net::SocketAddr,
}

impl QueuedLease {
    pub(super) fn into_granted(
        self,
        engine: EngineId,
        generation: Generation,
        canary: Option<CanaryGuard>,
        waited: WaitBreakdown,
    ) -> GrantedLease {
        let Self { lease, fingerprint, address } = self;
        GrantedLease { lease, engine, generation, fingerprint, address, canary, wait: waited }
    }
}

impl EngineGates {
    pub(super) fn new(clock: TickClock) -> Self {
        Self {
            entries: BTreeMap::new(),
            awaiting_last_lease: BTreeSet::new(),
            queued: BTreeSet::new(),
            to_sample: Vec::new(),
            samples: Arc::default(),
            clock,
            changed: Arc::default(),
        }
    }

    /// Waits for a relevant release: a drain is complete, or a place that a waiter needs is free.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Adds the changes since the last turn. A busy engine causes another turn when it becomes idle.
    ///
    /// If this gateway `leads`, a drain of a shared gate also needs the platform's report.
    pub(super) fn sample(&mut self, batch: &mut Vec<Event>, leads: bool, now: Tick) {
        batch.retain(|event| !self.absorb_stub_drained(event));
        self.samples.take_into(&mut self.to_sample);
        self.to_sample.sort_unstable();
        self.to_sample.dedup();
        let entries = &mut self.entries;
        self.to_sample
            .retain(|id| entries.get_mut(id).is_some_and(|entry| entry.sample(id, batch, leads, now)));
    }

    /// Number of gates that the next turn samples, if no request uses another one before.
    #[cfg(test)]
    pub(super) fn sampled_count(&self) -> usize {
        self.to_sample.len()
    }

    /// Absorbs the platform's drain report for a closing gate.
    ///
    /// That report alone is not enough: a stub finishes a response before this gateway has passed on its end.
    fn absorb_stub_drained(&mut self, event: &Event) -> bool {
        let Event::Drained { engine, generation } = event else { return false };
        let entry =
            self.entries.get_mut(engine).filter(|h| h.endpoint.generation == *generation && h.closing);
        entry.is_some_and(|entry| std::mem::take(&mut entry.awaits_stub_drain))
    }

    /// Closes a gate to drain it.
    ///
    /// [`Self::sample`] reports the drain once the last lease has ended. With `elsewhere`, it also waits until the
    /// platform has reported the drain of the stub's gate. Without a gate, the drain is reported at once.
    pub(super) fn close(
        &mut self,
        engine: &EngineId,
        generation: Generation,
        elsewhere: bool,
    ) -> Option<Event> {
        let Some(entry) = self.entries.get_mut(engine).filter(|h| h.endpoint.generation == generation) else {
            return Some(Event::Drained { engine: engine.clone(), generation });
        };
        entry.endpoint.gate.close();
        (entry.closing, entry.awaits_stub_drain) = (true, elsewhere);
        self.to_sample.push(engine.clone());
        None
    }

    /// Admits no more requests and keeps the current leases. Reports no drain.
    pub(super) fn close_without_drain(&mut self, engine: &EngineId, generation: Generation) {
        if let Some(entry) = self.entries.get_mut(engine).filter(|h| h.endpoint.generation == generation) {
            entry.endpoint.gate.close();
        }
    }

    pub(super) fn revoke(&mut self, engine: &EngineId, generation: Generation, fault: &Fault) {
        if let Some(entry) = self.entries.get_mut(engine).filter(|h| h.endpoint.generation == generation) {
            entry.endpoint.gate.revoke(fault.clone());
            entry.revoked = true;
        }
    }

    /// Creates gates for engines with an address, and drops gates of ended generations.
    pub(super) fn sync(&mut self, fleet: &Fleet, changes: &RoutingChanges, platform: &dyn Platform) {
        if changes.reconfigured {
            fleet.engines().for_each(|engine| self.sync_engine(engine, fleet, platform));
            let all: Vec<EngineId> = self.entries.keys().cloned().collect();
            self.forget(&all, fleet);
            return;
        }
        for model in changes.rerouted() {
            fleet.engines_of(model).for_each(|engine| self.sync_engine(engine, fleet, platform));
            let of_model: Vec<EngineId> = self.entries_of(model).map(|(id, _)| id.clone()).collect();
            self.forget(&of_model, fleet);
        }
        if !self.awaiting_last_lease.is_empty() {
            let draining: Vec<EngineId> = self.awaiting_last_lease.iter().cloned().collect();
            self.forget(&draining, fleet);
        }
    }

    fn sync_engine(&mut self, engine: &Engine, fleet: &Fleet, platform: &dyn Platform) {
        if let Some(address) = engine.address {
            let stale = self.entries.get(&engine.id).is_some_and(|h| {
                h.endpoint.generation != engine.generation
                    || (h.revoked && engine.admission != Admission::Closed)
            });
            if stale {
                self.entries.remove(&engine.id);
            }
            let is_new = !self.entries.contains_key(&engine.id);
            let spec = fleet.spec(&engine.id.model);
            let limit = spec.and_then(|spec| spec.max_concurrency).and_then(NonZeroU32::new);
            let entry = self.entries.entry(engine.id.clone()).or_insert_with(|| GateEntry {
                endpoint: Endpoint {
                    engine: engine.id.clone(),
                    generation: engine.generation,
                    fingerprint: engine.fingerprint,
                    address,
                    gate: Gate::sampled(
                        limit,
                        self.clock,
                        Arc::clone(&self.changed),
                        Arc::clone(&self.samples),
                        engine.id.clone(),
                    ),
                    circuit_breaker: CircuitBreaker::sampled(
                        Rng::new().next_u64(),
                        Arc::clone(&self.changed),
                        Arc::clone(&self.samples),
                        engine.id.clone(),
                    ),
                    activity: platform.engine_activity(&engine.id, engine.generation),
                },
                closing: false,
                awaits_stub_drain: false,
                revoked: false,
                queued: false,
                is_routable: false,
                last_reported: Some((0, Tick(0), Tick(0))),
                reported_ejection: engine.ejected_until,
                reported_saturation: engine.saturation,
            });
            entry.endpoint.gate.set_limit(limit);
            if let Some(spec) = spec {
                entry.endpoint.activity.saturation().set_thresholds(spec.saturation_thresholds);
            }
            if is_new {
                entry.endpoint.activity.set_gate(&entry.endpoint.gate);
                self.to_sample.push(engine.id.clone());
            }
        }
        if let Some(entry) = self.entries.get_mut(&engine.id) {
            entry.is_routable =
                engine.admission == Admission::Public && entry.endpoint.generation == engine.generation;
        }
    }

    /// Drops the gates of these engines that have no address, no leases and no pending drain.
    fn forget(&mut self, engines: &[EngineId], fleet: &Fleet) {
        for id in engines {
            let lives = fleet.engine(id).is_some_and(|e| e.address.is_some());
            let used = self.entries.get(id).is_some_and(|h| h.endpoint.gate.leases() > 0 || h.closing);
            if lives || !used {
                self.awaiting_last_lease.remove(id);
            } else {
                self.awaiting_last_lease.insert(id.clone());
            }
            if !lives && !used {
                self.entries.remove(id);
            }
        }
    }

    /// Returns whether [`Self::sync`] on everything would change nothing.
    pub(super) fn are_current(&self, fleet: &Fleet) -> bool {
        let has_entry = |engine: &Engine| {
            self.entries.get(&engine.id).is_some_and(|entry| entry.endpoint.generation == engine.generation)
        };
        let right = |(id, entry): (&EngineId, &GateEntry)| {
            let engine = fleet.engine(id).filter(|e| e.generation == entry.endpoint.generation);
            let public = engine.is_some_and(|e| e.admission == Admission::Public);
            let lives = fleet.engine(id).is_some_and(|e| e.address.is_some());
            entry.is_routable == public && lives != self.awaiting_last_lease.contains(id)
        };
        fleet.engines().filter(|engine| engine.address.is_some()).all(has_entry)
            && self.entries.iter().all(right)
    }

    pub(super) fn open(&mut self, engine: &EngineId) {
        if let Some(entry) = self.entries.get_mut(engine) {
            (entry.closing, entry.awaits_stub_drain) = (false, false);
            entry.endpoint.gate.open();
        }
    }

    /// Takes a lease for a waiter.
    ///
    /// The fleet counts the lease as granted. If it cannot be taken, or is dropped before the next sample, that sample
    /// must still differ from the last.
    pub(super) fn take_queued(&mut self, engine: &EngineId) -> Option<QueuedLease> {
        let entry = self.entries.get_mut(engine)?;
        self.to_sample.push(engine.clone());
        entry.last_reported = None;
        entry.reported_ejection = entry.reported_ejection.map(|_| TRIAL_IN_FLIGHT);
        let lease = entry.endpoint.gate.take_queued()?;
        // The fleet counts the lease from now on, so its end must cause a turn even if no turn samples the gate before.
        entry.endpoint.gate.watch();
        if entry.endpoint.circuit_breaker.is_ejected() {
            // This request is the trial, unless another came first. Either way the fleet learns when the next trial may
            // start.
            let _tries = entry.endpoint.circuit_breaker.start_trial(self.clock.now());
        }
        let Endpoint { fingerprint, address, .. } = entry.endpoint;
        Some(QueuedLease { lease, fingerprint, address })
    }

    /// Sets on each gate whether requests queue for it.
    ///
    /// A place that came free before the gate knew would be missed, so a gate that learns of a queue while it has a
    /// free place gets one more check. `returning` has waiters whose grant came too late, and who go back to the queue.
    pub(super) fn set_queued(&mut self, fleet: &Fleet, returning: &[Event]) {
        let returning = returning.iter().filter_map(|event| match event {
            Event::Arrived { waiter } => Some(&waiter.model),
            _ => None,
        });
        let queued: BTreeSet<ModelName> = fleet.queued_models().chain(returning).cloned().collect();
        let before = std::mem::replace(&mut self.queued, queued);
        // Models that were already queued are included, since one of their gates may be new.
        for model in before.union(&self.queued) {
            let queued = self.queued.contains(model);
            let of_model = self.entries.range_mut(EngineId::first_key_of(model.clone())..);
            let of_model = of_model.take_while(|(id, _)| id.model == *model);
            for (_, entry) in of_model.filter(|(_, entry)| entry.queued != queued) {
                entry.queued = queued;
                if entry.endpoint.gate.set_queued(queued) && queued {
                    self.changed.notify_one();
                }
            }
        }
    }

    /// Returns the number of leases and the last lease end, as of now, of each model that has had any.
    ///
    /// The fleet's own numbers may be older, since a lease that is granted at once causes no turn. A gate is dropped
    /// with its engine's process, and its last use with it. The leader has noted each reported use at all engines of
    /// the model.
    pub(super) fn lease_usage(&self) -> BTreeMap<ModelName, (u32, Tick)> {
        let mut used = BTreeMap::<ModelName, (u32, Tick)>::new();
        for (engine, entry) in &self.entries {
            let (leases, last_end) = (entry.endpoint.gate.leases(), entry.endpoint.gate.last_end());
            if leases > 0 || last_end > Tick(0) {
                let (of_model, last_of_model) = used.entry(engine.model.clone()).or_default();
                *of_model += leases;
                *last_of_model = last_end.max(*last_of_model);
            }
        }
        used
    }

    /// Returns one model's number of leases and last lease end, like [`Self::lease_usage`].
    pub(super) fn lease_usage_of(&self, model: &ModelName) -> (u32, Tick) {
        let gates = self.entries_of(model).map(|(_, entry)| &entry.endpoint.gate);
        gates.fold((0, Tick(0)), |(leases, last_end), gate| {
            (leases + gate.leases(), gate.last_end().max(last_end))
        })
    }

    pub(super) fn endpoints(&self, model: &ModelName) -> Vec<Endpoint> {
        let public = self.entries_of(model).filter(|(_, entry)| entry.is_routable);
        public.map(|(_, entry)| entry.endpoint.clone()).collect()
    }

    /// Returns the gates of the model's engines, of all variants.
    fn entries_of(&self, model: &ModelName) -> impl Iterator<Item = (&EngineId, &GateEntry)> {
        let from_first = self.entries.range(EngineId::first_key_of(model.clone())..);
        from_first.take_while(move |(id, _)| id.model == *model)
    }
}

impl GateEntry {
    /// Adds the changes since the last sample. Returns whether the next turn must sample the gate again, even if
    /// nothing is announced until then.
    fn sample(&mut self, engine: &EngineId, batch: &mut Vec<Event>, leads: bool, now: Tick) -> bool {
        let (gate, generation) = (&self.endpoint.gate, self.endpoint.generation);
        // Before the other values: what an earlier request did is visible afterwards, and a later one is announced.
        let leases = gate.watch();
        let sampled = (leases, gate.last_end(), gate.last_byte());
        if self.last_reported != Some(sampled) {
            self.last_reported = Some(sampled);
            let (leases, last_end, last_byte) = sampled;
            let (engine, clients, pause) = (engine.clone(), gate.clients(), gate.pause());
            batch.push(Event::GateSampled {
                engine,
                generation,
                leases,
                last_lease_end: last_end,
                last_byte,
                clients,
                idle_gap: pause,
            });
        }
        let until = self.endpoint.circuit_breaker.retry_at();
        if self.reported_ejection != until {
            self.reported_ejection = until;
            batch.push(Event::EjectionChanged { engine: engine.clone(), generation, until });
        }
        // The fleet's copy of a limit ends at its own time, so a turn is due then. That turn renews it, if the engine
        // has reported since.
        let limit = self.endpoint.activity.saturation().limit();
        if SaturationLimit::differ(self.reported_saturation, limit, now) {
            self.reported_saturation = limit;
            batch.push(Event::SaturationChanged { engine: engine.clone(), generation, limit });
        }
        if self.closing && leases == 0 && !(self.awaits_stub_drain && leads) {
            self.closing = false;
            batch.push(Event::Drained { engine: engine.clone(), generation });
        }
        leases > 0 || self.closing || until.is_some() || limit.is_some_and(|limit| limit.is_active(now))
    }
}
