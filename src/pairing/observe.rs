//! Applies events to the state.

use super::{
    Pairing,
    command::{EngineStopReason, RequesterDeleteReason},
    event::{
        EngineRecord, LauncherBuildPolicy, LeaderEpoch, ObservedProvider, ObservedRequester, PairingEvent,
        ProviderPhase, TemplateStatus,
    },
    ids::{AcceleratorSet, NodeName, PairingEngineId, ProviderId, RequesterId, Uid, accelerator_set},
    node::{
        PairingAccelerator, PairingEngine, PairingEngineState, PairingNode, PairingProvider,
        PairingRequester, PendingCommandKind, RetryState,
    },
    plan_context::stop_engines_in,
};
use crate::{
    model::AcceleratorId,
    units::{Bytes, Generation, Tick},
};

impl Pairing {
    pub(super) fn observe(&mut self, event: &PairingEvent, now: Tick) {
        match event {
            PairingEvent::LeadershipGained { epoch } => {
                *self = Self { epoch: *epoch, ..Self::new(self.settings) }
            }
            PairingEvent::Listed => {
                self.listed = true;
                let names: Vec<_> = self.nodes.keys().cloned().collect();
                names.iter().for_each(|name| self.mark_dirty(name).mark_orphans_for_deletion());
            }
            PairingEvent::Superseded { epoch } => self.supersede(*epoch),
            PairingEvent::Template { fingerprint, status: standing } => {
                // `Current` is the default and needs no entry, so the map does not grow with past templates.
                let is_same = if *standing == TemplateStatus::Current {
                    self.template_statuses.remove(fingerprint).is_none()
                } else {
                    self.template_statuses.insert(*fingerprint, *standing) == Some(*standing)
                };
                // A new leader sends the status of every template, and most are current.
                if is_same {
                    return;
                }
                let runs_template =
                    |node: &&PairingNode| node.engines.keys().any(|id| id.fingerprint == *fingerprint);
                let names: Vec<_> =
                    self.nodes.values().map(|n| &**n).filter(runs_template).map(|n| n.name.clone()).collect();
                self.dirty.extend(names);
            }
            PairingEvent::LauncherBuild { build, policy: terms } => {
                let is_same = if *terms == LauncherBuildPolicy::default() {
                    self.build_policies.remove(build).is_none()
                } else {
                    self.build_policies.insert(*build, *terms) == Some(*terms)
                };
                if is_same {
                    return;
                }
                let has_build = |node: &&PairingNode| {
                    node.providers.values().any(|provider| provider.build == Some(*build))
                        || node
                            .accelerators
                            .values()
                            .any(|accelerator| accelerator.crashed_build == Some(*build))
                };
                let names: Vec<_> =
                    self.nodes.values().map(|n| &**n).filter(has_build).map(|n| n.name.clone()).collect();
                self.dirty.extend(names);
            }
            PairingEvent::Node { node, facts } => {
                let pairing_node = self.mark_dirty(node);
                pairing_node.exists = true;
                pairing_node.facts = facts.clone();
            }
            PairingEvent::NodeGone { node } => {
                let pairing_node = self.mark_dirty(node);
                pairing_node.exists = false;
                // No requester comes to a node that is gone.
                let PairingNode { wants, requesters, .. } = pairing_node;
                wants.retain(|requester, _| requesters.contains_key(requester));
            }
            PairingEvent::Accelerator { node, accelerator, facts } => {
                let entry = self.mark_dirty(node).accelerators.entry(accelerator.clone());
                entry
                    .and_modify(|accelerator_record| accelerator_record.facts = facts.clone())
                    .or_insert_with(|| PairingAccelerator {
                        facts: facts.clone(),
                        last_sleep: None,
                        last_engine_gone: None,
                        last_reading: None,
                        crashes: 0,
                        crashed_build: None,
                        never_ready: false,
                        not_before: Tick(0),
                        needs_reading: false,
                    });
            }
            PairingEvent::MeterRead { node, accelerator, used, at } => {
                self.record_reading(node, accelerator, *used, *at)
            }
            PairingEvent::RequesterObserved { node, requester, observed } => {
                self.mark_dirty(node).observe_requester(requester, observed)
            }
            PairingEvent::RequesterGone { node, requester } => {
                let pairing_node = self.mark_dirty(node);
                pairing_node.requesters.remove(requester);
                pairing_node.wants.remove(requester);
            }
            PairingEvent::Want { node, requester, wanted } => self.record_want(node, requester, *wanted, now),
            PairingEvent::WantWithdrawn { node, requester } => self.withdraw_want(node, requester),
            PairingEvent::ProviderObserved { node, provider, observed } => {
                self.mark_dirty(node).observe_provider(provider, observed, now)
            }
            PairingEvent::ProviderGone { node, provider, uid } => {
                let pairing_node = self.mark_dirty(node);
                // Ignores an earlier Pod of the same name, and a Pod not observed yet.
                if pairing_node.providers.get(provider).is_some_and(|p| p.uid.as_ref() == Some(uid)) {
                    pairing_node.provider_gone(provider, now);
                }
                pairing_node.name_holder_gone(provider, uid, now);
                pairing_node.vanished_pod_ended(uid, now);
            }
            PairingEvent::ProviderVanished { node, provider, uid } => {
                let pairing_node = self.mark_dirty(node);
                if pairing_node.providers.get(provider).is_some_and(|p| p.uid.as_ref() == Some(uid)) {
                    pairing_node.provider_vanished(provider, now);
                }
                pairing_node.name_holder_gone(provider, uid, now);
            }
            PairingEvent::KubeletReporting { node, reports } => {
                let pairing_node = self.mark_dirty(node);
                if *reports && pairing_node.kubelet_silent {
                    pairing_node.reporting_since = now;
                }
                pairing_node.kubelet_silent = !reports;
            }
            PairingEvent::EngineReady { node, engine, generation } => {
                if let Some(engine) = self.engine_of_generation(node, engine, *generation) {
                    engine.observe_ready(now);
                }
            }
            PairingEvent::EngineDied { node, engine, generation, gone } => {
                if self.engine_of_generation(node, engine, *generation).is_some() {
                    self.mark_dirty(node).engine_died(engine, *gone, now);
                }
            }
            PairingEvent::Outcome { node, target, serial, result } => {
                self.mark_dirty(node).outcome(target, *serial, result, now);
            }
        }
    }

    /// Drops all due work; outcomes of commands in flight are ignored from now on.
    fn supersede(&mut self, epoch: LeaderEpoch) {
        if epoch == self.epoch {
            self.superseded = true;
            self.due.clear();
            self.dirty.clear();
        }
    }

    /// The engine, if its generation matches. Marks the node for the next plan.
    fn engine_of_generation(
        &mut self,
        node: &NodeName,
        engine: &PairingEngineId,
        generation: Generation,
    ) -> Option<&mut PairingEngine> {
        let engine_record = self.mark_dirty(node).engines.get_mut(engine);
        engine_record.filter(|engine| engine.generation == generation)
    }

    fn record_reading(&mut self, node: &NodeName, accelerator: &AcceleratorId, used: Bytes, at: Tick) {
        let settings = self.settings;
        let meter_lag = settings.meter_lag;
        let pairing_node = self.mark_dirty(node);
        pairing_node.cap_vanished_at_reading(accelerator, used, at, &settings);
        let ending = pairing_node
            .engines_on(accelerator)
            .any(|e| matches!(e.state, PairingEngineState::Stopping { .. }));
        let Some(accelerator_record) = pairing_node.accelerators.get_mut(accelerator) else { return };
        // Readings may arrive out of order.
        if accelerator_record.last_reading.is_none_or(|(_, before)| before <= at) {
            accelerator_record.last_reading = Some((used, at));
        }
        let settled_at = accelerator_record
            .last_sleep
            .max(accelerator_record.last_engine_gone)
            .map_or(Tick(0), |moment| moment + meter_lag);
        if at >= settled_at && !ending {
            accelerator_record.needs_reading = false;
        }
    }
}

impl PairingEngine {
    /// Enters `Starting` because the process exists, whatever the outcome of the start command.
    fn enter_starting(&mut self) {
        let since = self.since;
        self.enter(PairingEngineState::Starting, since);
        self.pending = None;
    }

    /// Completes a start. Readiness says nothing about an engine that sleeps or wakes.
    fn observe_ready(&mut self, now: Tick) {
        let launched = self.pending.as_ref().is_some_and(|call| call.kind == PendingCommandKind::Launch);
        if self.state == PairingEngineState::Creating && (launched || self.may_start_until > now) {
            self.enter_starting();
        }
        if self.state == PairingEngineState::Starting {
            self.ready = true;
        }
    }
}

impl PairingNode {
    fn observe_requester(&mut self, id: &RequesterId, observed: &ObservedRequester) {
        let requester = self.requesters.entry(id.clone()).or_insert_with(|| PairingRequester {
            observed: observed.clone(),
            accelerators: AcceleratorSet::default(),
            delete_reason: None,
            delete_issued: None,
            gated_stub: None,
            released: false,
            failures: 0,
            last_failure: None,
            not_before: Tick(0),
            engine_ended: None,
            pending: None,
            retry: RetryState::default(),
        });
        let deleting = requester.observed.deleting_since.or(observed.deleting_since);
        requester.observed = ObservedRequester { deleting_since: deleting, ..observed.clone() };
        if requester.accelerators.is_empty() {
            requester.accelerators = accelerator_set(&observed.accelerators);
        }
        self.update_sleep_policy(id);
    }

    /// Applies the requester's present sleep policy to its engine. The policy may have changed since the binding. A
    /// requester that now requests another engine leaves this engine unchanged.
    fn update_sleep_policy(&mut self, id: &RequesterId) {
        let Some(requester) = self.requesters.get(id) else { return };
        let (engine, requested) = (self.requested_engine_id(requester), &requester.observed.requested);
        let (level, stop_after) = (requested.level, requested.stop_after);
        if let Some(engine_record) =
            self.engines.get_mut(&engine).filter(|engine_record| engine_record.requester() == Some(id))
        {
            (engine_record.level, engine_record.stop_after) = (level, stop_after);
        }
    }

    fn observe_provider(&mut self, id: &ProviderId, observed: &ObservedProvider, now: Tick) {
        if self.is_foreign_pod(id, observed) {
            let Some(provider) = self.providers.get_mut(id) else { return };
            if !provider.name_taken {
                provider.name_holder = Some(observed.clone());
                return;
            }
            self.drop_planned_engines(id);
        }
        let is_other_pod =
            |provider: &PairingProvider| provider.uid.as_ref().is_some_and(|uid| *uid != observed.uid);
        if self.providers.get(id).is_some_and(is_other_pod) {
            self.provider_vanished(id, now);
        }
        let provider =
            self.providers.entry(id.clone()).or_insert_with(|| PairingProvider::pending_creation(now));
        if provider.uid.is_none() {
            provider.restarts = observed.restarts;
        }
        let (anew, deleted) =
            (observed.restarts > provider.restarts, observed.deleting && !provider.deleting);
        if provider.phase != observed.phase {
            provider.since = now;
        }
        provider.uid = Some(Uid::clone(&observed.uid));
        provider.phase = observed.phase;
        provider.restarts = observed.restarts;
        provider.build = observed.build;
        provider.memory_limit = observed.memory_limit;
        provider.deleting |= observed.deleting;
        if anew {
            self.container_restarted(id, now);
        }
        for record in &observed.records {
            self.adopt(id, record, now);
        }
        if deleted {
            self.provider_deleted_externally(id, now);
        }
        self.follow_phase(id, observed.phase, now);
    }

    /// Whether the observed Pod is not the ordered one: an earlier Pod of its name, or one that another leader created.
    /// Whether that Pod still exists is known when the create command completes.
    fn is_foreign_pod(&self, id: &ProviderId, observed: &ObservedProvider) -> bool {
        let unobserved = self.providers.get(id).is_some_and(|provider| provider.uid.is_none());
        let is_recorded = |e: &PairingEngine| {
            observed.records.iter().any(|record| record.engine == e.id && record.generation == e.generation)
        };
        let fresh = unobserved && !id.is_launcher() && !observed.records.is_empty();
        fresh && self.engines_in(id).next().is_some() && !self.engines_in(id).any(is_recorded)
    }

    /// Adopts the Pod that has the name of the ordered Pod. The planned generation never existed. Its requester gets
    /// the engine in that Pod if it fits, else another order after that Pod is gone.
    pub(super) fn adopt_name_holder(&mut self, id: &ProviderId, now: Tick) {
        let Some(provider) = self.providers.get_mut(id).filter(|provider| provider.uid.is_none()) else {
            return;
        };
        provider.name_taken = true;
        if let Some(holder) = provider.name_holder.take() {
            self.observe_provider(id, &holder, now);
        }
    }

    fn drop_planned_engines(&mut self, id: &ProviderId) {
        self.engines.retain(|_, engine| engine.provider != *id);
    }

    /// Handles the end of a Pod that is not the ordered one: its name may be free.
    fn name_holder_gone(&mut self, id: &ProviderId, uid: &Uid, now: Tick) {
        let Some(provider) = self.providers.get_mut(id).filter(|provider| provider.uid.is_none()) else {
            return;
        };
        if provider.name_holder.as_ref().is_some_and(|holder| holder.uid == *uid) {
            provider.name_holder = None;
        }
        if provider.name_taken {
            let waits = self.engines.values_mut().filter(|engine| engine.provider == *id);
            waits.for_each(|engine| engine.retry.at = now);
        }
    }

    /// Adopts an engine from before a restart or from an earlier leader. It may be in any state.
    fn adopt(&mut self, provider: &ProviderId, record: &EngineRecord, now: Tick) {
        if !self.engines.contains_key(&record.engine) {
            let engine =
                PairingEngine::from_record(record, provider.clone(), PairingEngineState::Unknown, now);
            self.engines.insert(record.engine.clone(), engine);
            record.requester.iter().for_each(|requester| self.update_sleep_policy(requester));
        }
    }

    /// Marks requesters with our finalizer but no engine for deletion. An earlier leader added the finalizer for an
    /// engine whose container ran. The gate may still be open to that engine, so the requester cannot get another one.
    fn mark_orphans_for_deletion(&mut self) {
        let orphans: Vec<_> = self
            .requesters
            .iter()
            .filter(|(id, requester)| requester.observed.finalizer && self.engine_of(id).is_none())
            .map(|(id, _)| id.clone())
            .collect();
        for id in orphans {
            if let Some(requester) = self.requesters.get_mut(&id) {
                requester.delete_reason.get_or_insert(RequesterDeleteReason::EngineGone);
            }
        }
    }

    fn provider_deleted_externally(&mut self, id: &ProviderId, now: Tick) {
        let alive = self.engines_in(id).filter(|e| !e.state.is_stopping_or_gone());
        let bound: Vec<_> = alive.filter_map(|e| e.requester().cloned()).collect();
        for requester in bound {
            if let Some(requester) = self.requesters.get_mut(&requester) {
                requester.delete_reason.get_or_insert(RequesterDeleteReason::ProviderDeleted);
            }
        }
        stop_engines_in(self, id, now);
    }

    /// Handles a container restart: all its engines are lost. The new container may already have launched engines, so a
    /// launcher's engines are queried.
    fn container_restarted(&mut self, id: &ProviderId, now: Tick) {
        let alive: Vec<_> =
            self.engines_in(id).filter(|e| !e.state.is_stopping_or_gone()).map(|e| e.id.clone()).collect();
        for id in alive {
            self.engine_lost(&id, now);
            let Some(engine) = self.engines.get_mut(&id) else { continue };
            if engine.provider.is_launcher() {
                engine.reserved = engine.sizes.awake;
                engine.enter(PairingEngineState::Unknown, now);
                engine.pending = None;
            } else {
                // The restarted process takes its memory without an order.
                engine.reserved = engine.sizes.awake;
                engine.failure = Some(EngineStopReason::Lost);
            }
        }
    }

    fn follow_phase(&mut self, id: &ProviderId, stage: ProviderPhase, now: Tick) {
        let engines: Vec<_> = self.engines_in(id).map(|e| e.id.clone()).collect();
        for engine_id in engines {
            if stage == ProviderPhase::Terminated {
                self.engine_lost(&engine_id, now);
                self.process_gone(&engine_id, now);
                continue;
            }
            let Some(engine) = self.engines.get_mut(&engine_id).filter(|_| !id.is_launcher()) else {
                continue;
            };
            match (engine.state, stage) {
                (PairingEngineState::Unknown, ProviderPhase::Pending) => {
                    engine.enter(PairingEngineState::Creating, now)
                }
                (PairingEngineState::Creating, ProviderPhase::Running | ProviderPhase::Ready) => {
                    // The Pod was created with its binding.
                    if let Some(binding) = &mut engine.binding {
                        binding.written = true;
                    }
                    engine.enter_starting();
                    engine.ready = stage == ProviderPhase::Ready;
                }
                (PairingEngineState::Starting, ProviderPhase::Ready) => engine.observe_ready(now),
                _ => {}
            }
        }
    }

    /// Removes a provider that was seen gone, with all its engines.
    pub(super) fn provider_gone(&mut self, id: &ProviderId, now: Tick) {
        let engines: Vec<_> = self.engines_in(id).map(|e| e.id.clone()).collect();
        for engine in engines {
            self.engine_lost(&engine, now);
            self.process_gone(&engine, now);
            self.engines.remove(&engine);
        }
        self.providers.remove(id);
    }

    fn engine_died(&mut self, id: &PairingEngineId, gone: bool, now: Tick) {
        self.engine_lost(id, now);
        let Some(engine) = self.engines.get_mut(id) else { return };
        if gone && !engine.relaunched && now >= engine.may_start_until {
            return self.process_gone(id, now);
        }
        engine.failure = Some(EngineStopReason::Lost);
        if matches!(engine.state, PairingEngineState::Stopping { .. }) {
            // A repeated start command may have been obeyed since, or may be yet. The engine is stopped again after
            // that.
            engine.stop_accepted = false;
            engine.retry.at = engine.may_start_until;
        }
    }

    /// Records that the process is gone and its memory is free.
    pub(super) fn process_gone(&mut self, id: &PairingEngineId, now: Tick) {
        let Some(engine) = self.engines.get_mut(id).filter(|engine| engine.state != PairingEngineState::Gone)
        else {
            return;
        };
        engine.enter(PairingEngineState::Gone, now);
        (engine.reserved, engine.reserved_host) = (Bytes::ZERO, Bytes::ZERO);
        engine.pending = None;
        for accelerator in id.accelerators.iter() {
            if let Some(accelerator_record) = self.accelerators.get_mut(accelerator) {
                accelerator_record.last_engine_gone = Some(now);
            }
        }
    }

    /// Handles the loss of an engine for its requester. If the engine served, or slept for its requester, the requester
    /// is deleted. If the engine was starting or waking, its requester gets another start.
    pub(super) fn engine_lost(&mut self, id: &PairingEngineId, now: Tick) {
        let Some(engine) = self.engines.get(id).filter(|engine| !engine.state.is_stopping_or_gone()) else {
            return;
        };
        let (state, is_relied_on) = (engine.state, self.is_relied_on(engine));
        let requester = engine.requester().cloned().and_then(|r| self.requesters.get_mut(&r));
        let Some(requester) = requester else { return };
        requester.engine_ended = Some(EngineStopReason::Lost);
        match state {
            // A requester served before a restart is still ready and its gate open, so it cannot get another engine.
            PairingEngineState::Unknown
            | PairingEngineState::Awake
            | PairingEngineState::Draining { .. }
            | PairingEngineState::FallingAsleep { .. } => {
                requester.delete_reason.get_or_insert(RequesterDeleteReason::EngineGone);
            }
            PairingEngineState::Asleep { .. } if is_relied_on => {
                requester.delete_reason.get_or_insert(RequesterDeleteReason::EngineGone);
            }
            PairingEngineState::Creating | PairingEngineState::Starting | PairingEngineState::Waking => {
                requester.start_failed(EngineStopReason::Lost, now);
            }
            _ => {}
        }
    }
}
