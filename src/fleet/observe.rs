//! Records what happened. An observation changes the state and decides nothing; the next plan decides.

pub(in crate::fleet) mod adopt;
pub(in crate::fleet) mod follower_view;

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    engine::{
        Admission, Engine, ProbeState, backoff, last_outcome::EngineDiagnostics, state::LifecycleState,
        turn_clients::TurnClients,
    },
    fault::FailureCause,
    fleet::{
        command::{AfterDrain, CloseReason},
        event::{CanaryVerdict, Event, LearnedMeasurements, OperatorAction},
        plan::{ModelRecord, Planner, leadership::LeadershipRole, operations::OperatorOperation},
        state::{
            dependencies::DependencyGraph,
            ledger::{AcceleratorAccount, MeterReading},
        },
    },
    model::{EngineId, FleetConfig, ModelName, SleepLevel},
    units::{Bytes, Generation, Millis, Tick},
};

impl Planner {
    pub(in crate::fleet) fn observe(&mut self, event: &Event, now: Tick) {
        if let Event::StateRestored { state } = event {
            self.clone_from(state);
            self.dependencies = DependencyGraph::from_models(&self.models);
            return self.refresh_due_index();
        }
        self.advance_time(now);
        self.apply_event(event, now);
        self.refresh_due_index();
    }

    fn apply_event(&mut self, event: &Event, now: Tick) {
        match event {
            Event::Configured { configuration } => self.configure(configuration, now),
            Event::MeasurementsRestored { model, learned } => {
                self.update_learned(model, |known| *known = *learned);
            }
            Event::FailureRestored { engine, fingerprint, at, failure } => {
                self.restore_failure(engine, *fingerprint, *at, failure);
            }
            Event::AdoptionDone => self.adoption_done(now),
            Event::LeadershipChanged { leads } => self.set_leadership(*leads, now),
            Event::ApiServerChanged { answers } => self.set_api_answers(*answers, now),
            Event::PeersChanged { exist: others } => {
                self.has_no_peers = !others;
                self.due_index.invalidate();
            }
            Event::GenerationFloor { generation } => self.raise_generation_floor(*generation),
            Event::Published { engine, generation, published } => {
                self.apply_published(engine, *generation, published.as_ref(), now);
            }
            Event::Arrived { waiter } => self.record_demand(&waiter.model, now),
            Event::Left { .. }
            | Event::Served { .. }
            | Event::FairnessRestored { .. }
            | Event::StateRestored { .. } => {}
            Event::RemoteDemand { gateway, demand } => {
                self.apply_remote_demand(gateway, demand.as_ref(), now)
            }
            Event::MeterRead { accelerator, used, by_engine } => {
                let reading = MeterReading { used: *used, by_engine: by_engine.clone(), at: now };
                self.record_reading(accelerator, reading, now);
            }
            Event::AcceleratorLost { accelerator } => self.set_accelerator_health(accelerator, false, now),
            Event::AcceleratorRecovered { accelerator } => {
                self.set_accelerator_health(accelerator, true, now)
            }
            Event::Adopted { engine, generation, found } => self.adopt(engine, *generation, found, now),
            Event::OperatorRequest { operation, model, action: order } => {
                self.add_operation(*operation, model, *order, now)
            }
            Event::Shutdown { stop_engines } => self.shutdown = Some(*stop_engines),
            Event::GateSampled { engine, generation, .. }
            | Event::EjectionChanged { engine, generation, .. }
            | Event::StubGateClosed { engine, generation }
            | Event::StubGateOpened { engine, generation }
            | Event::Drained { engine, generation }
            | Event::Canary { engine, generation, .. }
            | Event::Placed { engine, generation, .. }
            | Event::Conflict { engine, generation }
            | Event::Started { engine, generation, .. }
            | Event::Profiled { engine, generation }
            | Event::Ready { engine, generation }
            | Event::Slept { engine, generation, .. }
            | Event::SleepFailed { engine, generation, .. }
            | Event::WakeFailed { engine, generation, .. }
            | Event::StartFailed { engine, generation, .. }
            | Event::Gone { engine, generation, .. }
            | Event::Diagnostics { engine, generation, .. }
            | Event::UsageObserved { engine, generation, .. }
            | Event::Health { engine, generation, .. } => {
                self.apply_engine_event(engine, *generation, event, now)
            }
        }
    }

    /// Applies an outcome or observation of one engine; ignores one of an older generation.
    fn apply_engine_event(&mut self, id: &EngineId, generation: Generation, event: &Event, now: Tick) {
        match self.engines.get(id) {
            Some(engine) if engine.generation == generation => {}
            _ => return,
        }
        let own = matches!(
            event,
            Event::GateSampled { .. }
                | Event::EjectionChanged { .. }
                | Event::StubGateClosed { .. }
                | Event::StubGateOpened { .. }
        );
        if self.role == LeadershipRole::Follower && !own {
            // A follower learns the lifecycle from the leader; an outcome of an earlier command may contradict that.
            return;
        }
        match event {
            Event::Canary { verdict, .. } => self.record_canary(id, verdict, now),
            Event::Conflict { .. } => self.record_conflict(id, now),
            Event::Slept { level, .. } => self.record_slept(id, *level, now),
            Event::Gone { cause, .. } => self.record_gone(id, cause, now),
            Event::UsageObserved { used, .. } => self.record_usage(id, *used),
            _ => {
                self.engines.change(id, |engine| engine.apply_event(event, now));
            }
        }
    }

    fn configure(&mut self, configuration: &FleetConfig, now: Tick) {
        self.settings = configuration.settings.clone();
        self.ledger.configure(&configuration.accelerators, self.settings.host_memory);
        let models = Arc::make_mut(&mut self.models);
        let before: BTreeMap<ModelName, u64> = models
            .iter_mut()
            .filter_map(|(name, model)| Some((name.clone(), model.spec.take()?.fingerprint)))
            .collect();
        for spec in &configuration.models {
            let model =
                Arc::make_mut(&mut self.models).entry(spec.name.clone()).or_insert_with(|| ModelRecord {
                    spec: None,
                    pin_override: None,
                    learned: LearnedMeasurements::default(),
                    usual_gap: None,
                    wanted_since: now,
                });
            model.spec = Some(Arc::new(spec.clone()));
            // The failures belong to another command.
            let other = before.get(&spec.name).is_some_and(|fingerprint| *fingerprint != spec.fingerprint);
            if other && self.role.decides() {
                self.reset_failures(&spec.name, now);
            }
            for replica in 0..spec.replicas {
                let id = EngineId::new(spec.name.clone(), replica);
                let generation = self.last_generation;
                if !self.engines.contains_key(&id) {
                    self.engines.insert(Engine { generation, ..Engine::new(id, now) });
                }
            }
        }
        self.dependencies = DependencyGraph::from_models(&self.models);
        self.engines.mark_all_removable();
        self.due_index.invalidate();
        self.advance_time(now);
        // A model may have been configured without replicas, so no engine's removal removes it.
        for name in before.keys() {
            self.remove_model_if_unused(name);
        }
        if !self.role.decides() {
            // The leader may have reloaded earlier and published engines of models that were not configured here yet.
            let all: Vec<EngineId> = self.engines.values().map(|e| e.id.clone()).collect();
            all.iter().for_each(|id| self.book_as_observed(id, now));
        }
    }

    fn reset_failures(&mut self, model: &ModelName, now: Tick) {
        let ids: Vec<EngineId> = self.engines.of_model(model).map(|e| e.id.clone()).collect();
        for id in &ids {
            self.engines.change(id, |engine| {
                engine.failures = 0;
                engine.failures_since_serving = 0;
                if engine.failure().is_some() {
                    engine.last_outcome = None;
                }
                if matches!(engine.state, LifecycleState::Backoff { .. }) {
                    engine.transition_to(LifecycleState::Cold, now);
                }
            });
        }
    }

    /// Records a request that had to wait, and learns from the pause before it.
    pub(in crate::fleet) fn record_demand(&mut self, model: &ModelName, now: Tick) {
        // Checked first, because a change copies what other copies still share.
        let resting: Vec<EngineId> =
            self.engines.of_model(model).filter(|e| e.is_idle()).map(|e| e.id.clone()).collect();
        for id in &resting {
            self.engines.change(id, |e| e.record_request(now, None));
        }
        let awake = self.engines.of_model(model).any(|e| e.serves() || e.is_blocked_by_stub());
        let last = self.engines.of_model(model).map(|e| e.last_lease_end).max();
        if let (Some(last), false) = (last, awake)
            && last > Tick(0)
            && let Some(model) = Arc::make_mut(&mut self.models).get_mut(model)
        {
            let seen = now.since(last);
            model.usual_gap = Some(model.usual_gap.map_or(seen, |gap| Millis((gap.0 * 3 + seen.0) / 4)));
        }
    }

    fn record_reading(
        &mut self,
        accelerator: &crate::model::AcceleratorId,
        reading: MeterReading,
        now: Tick,
    ) {
        if self.ledger.accelerators.get(accelerator).is_none() {
            return;
        }
        for (id, bytes) in reading.by_engine.iter().flatten() {
            let settled = self.engines.get(id).is_some_and(|e| e.state == LifecycleState::Awake);
            let each =
                self.spec(&id.model).map_or(*bytes, |spec| spec.accelerators.bytes_per_accelerator(*bytes));
            if settled {
                self.update_learned(&id.model, |learned| {
                    learned.peak = Some(learned.peak.unwrap_or_default().max(each));
                });
            }
        }
        self.ledger.accelerators.change(accelerator, |account| account.record_reading(reading));
        self.learn_peak_from_growth(accelerator, now);
    }

    /// Learns the peak of an engine that started alone, from the first reading after it serves.
    ///
    /// Later readings may include memory that another program has allocated since.
    fn learn_peak_from_growth(&mut self, accelerator: &crate::model::AcceleratorId, now: Tick) {
        let Some(account) = self.ledger.accelerators.get(accelerator) else { return };
        let found = account.booked.iter().find_map(|(id, _)| {
            let e =
                self.engines.get(id).filter(|e| e.state == LifecycleState::Awake && e.turn_start <= now)?;
            let (_, before) = e.memory_baseline.iter().find(|(on, _)| on == accelerator)?;
            Some((id.clone(), *before))
        });
        let Some((id, before)) = found else { return };
        let used = account.used_if_alone(&id, now);
        self.engines.change(&id, |e| e.memory_baseline.retain(|(on, _)| on != accelerator));
        let Some(own) = used.map(|used| used.saturating_sub(before)) else { return };
        let each = self.spec(&id.model).map_or(own, |spec| spec.accelerators.bytes_per_accelerator(own));
        self.update_learned(&id.model, |learned| {
            learned.peak = Some(learned.peak.unwrap_or_default().max(each));
        });
    }

    fn record_usage(&mut self, id: &EngineId, used: Bytes) {
        let asleep = |e: &Engine| {
            matches!(e.state, LifecycleState::FallingAsleep { .. } | LifecycleState::Asleep { .. })
        };
        if self.engines.get(id).is_some_and(|e| e.state.has_process() && !asleep(e)) {
            self.update_learned(&id.model, |known| known.observed = known.observed.max(Some(used)));
        }
    }

    fn set_accelerator_health(
        &mut self,
        accelerator: &crate::model::AcceleratorId,
        healthy: bool,
        now: Tick,
    ) {
        self.ledger.accelerators.change(accelerator, |account| {
            account.healthy = healthy;
            (account.reading_requested, account.last_attempt) = (None, now);
        });
    }

    fn record_canary(&mut self, id: &EngineId, verdict: &CanaryVerdict, now: Tick) {
        let Some(engine) = self.engines.get(id) else { return };
        if !matches!(engine.probe_state, ProbeState::InFlight(_)) || !engine.state.is_starting() {
            return;
        }
        let (took, cold) = (now.since(engine.startup_began), engine.cold_start);
        self.engines.change(id, |engine| match verdict {
            CanaryVerdict::Passed => {
                engine.turn_start = now;
                engine.clients = TurnClients::default();
                engine.last_progress = now;
                engine.failing_since = None;
                engine.failures_since_serving = 0;
                engine.transition_to(LifecycleState::Awake, now);
            }
            CanaryVerdict::Failed(cause) => engine.fail(cause.clone(), now),
            CanaryVerdict::Inconclusive => engine.probe_state = ProbeState::Due,
        });
        if *verdict == CanaryVerdict::Passed {
            self.clear_yields_to(id);
            self.ledger.host.booked.remove(id);
            self.update_learned(&id.model, |learned| {
                let learned = if cold { &mut learned.start } else { &mut learned.wake };
                *learned = Some(learned.map_or(took, |old| Millis((old.0 * 3 + took.0) / 4)));
            });
        }
    }

    /// Returns engines that yielded to this one to their old place in line.
    fn clear_yields_to(&mut self, id: &EngineId) {
        let others = self.engines.values().filter(|e| e.yielded_to.as_ref() == Some(id));
        let others: Vec<EngineId> = others.map(|e| e.id.clone()).collect();
        for other in &others {
            self.engines.change(other, |e| e.yielded_to = None);
        }
    }

    fn record_conflict(&mut self, id: &EngineId, now: Tick) {
        let asleep = self.engines.change(id, |engine| {
            engine.pending_reservation.take()?;
            let asleep = matches!(engine.state, LifecycleState::Asleep { .. });
            if !asleep {
                // Another party's reservation comes and goes; a limit that only the ledger knows (a quota) stays.
                let until = now + Millis(250 << engine.conflicts.min(6));
                engine.conflicts += 1;
                engine.transition_to(LifecycleState::Backoff { until, cause: FailureCause::Refused }, now);
            }
            Some(asleep)
        });
        let Some(asleep) = asleep.flatten() else { return };
        let keeps = if asleep { self.residue_of(id) } else { Bytes::ZERO };
        self.ledger.shrink(id, keeps, asleep, now);
    }

    fn record_slept(&mut self, id: &EngineId, level: SleepLevel, now: Tick) {
        let Some(engine) =
            self.engines.get(id).filter(|e| matches!(e.state, LifecycleState::FallingAsleep { .. }))
        else {
            return;
        };
        let took = now.since(engine.since);
        self.engines.change(id, |engine| {
            engine.transition_to(LifecycleState::Asleep { level }, now);
            engine.releasing_since = Some(now);
        });
        for place in self.ledger.accelerators.account_ids_of(id) {
            self.ledger.accelerators.change(&place, |account| {
                account.changed_at = now;
                account.reset_readings();
            });
        }
        self.update_learned(&id.model, |learned| {
            learned.sleep = Some(learned.sleep.map_or(took, |old| Millis((old.0 * 3 + took.0) / 4)));
        });
    }

    /// Records the end of a process. Its memory counts as free, though the meter may lag.
    fn record_gone(&mut self, id: &EngineId, cause: &FailureCause, now: Tick) {
        let gone = self.engines.change(id, |engine| engine.record_process_exit(cause, now));
        if gone != Some(true) {
            return;
        }
        for place in self.ledger.accelerators.account_ids_of(id) {
            self.ledger.accelerators.change(&place, AcceleratorAccount::reset_readings);
        }
        self.ledger.shrink(id, Bytes::ZERO, false, now);
        self.ledger.host.booked.remove(id);
    }

    fn add_operation(
        &mut self,
        operation: crate::fleet::event::OperationId,
        model: &ModelName,
        order: OperatorAction,
        now: Tick,
    ) {
        if self.role != LeadershipRole::Follower
            && let Some(model) = Arc::make_mut(&mut self.models).get_mut(model)
        {
            match order {
                OperatorAction::Pin => (model.pin_override, model.wanted_since) = (Some(true), now),
                OperatorAction::Unpin => model.pin_override = Some(false),
                _ => {}
            }
        }
        self.engines.mark_model_dirty(model);
        self.operations
            .insert(operation, OperatorOperation { model: model.clone(), action: order, issued_at: now });
    }
}

impl Engine {
    /// Applies an event that affects only the engine itself.
    fn apply_event(&mut self, event: &Event, now: Tick) {
        match event {
            Event::GateSampled {
                leases,
                last_lease_end: last_end,
                last_byte,
                clients,
                idle_gap: pause,
                ..
            } => {
                if *last_end > self.last_lease_end {
                    self.record_request(*last_end, *pause);
                } else if *leases > 0 {
                    self.record_request(now, *pause);
                }
                self.clients = *clients;
                // Leases on an ended process do not count for a later one.
                let counts = self.state.has_process() && !self.has_stranded_leases;
                self.leases = if counts { *leases } else { 0 };
                self.has_stranded_leases &= *leases > 0;
                self.last_lease_end = self.last_lease_end.max(*last_end);
                self.last_progress = self.last_progress.max(*last_byte);
            }
            Event::EjectionChanged { until, .. } => self.ejected_until = *until,
            Event::StubGateClosed { .. } => self.record_stub_gate_closed(),
            // The platform stops watching once the gate opens. If it has closed again, the next plan orders a new
            // watch.
            Event::StubGateOpened { .. } => (self.stub_gate_closed, self.stub_gate_watched) = (false, false),
            Event::Drained { .. } => self.record_drained(),
            Event::Placed { accelerators, .. } => {
                self.conflicts = 0;
                if let Some(placing) = &mut self.pending_reservation {
                    placing.accelerators.clone_from(accelerators);
                    placing.confirmed = true;
                }
            }
            Event::Started { address, .. } if self.state == LifecycleState::Launching => {
                self.address = Some(*address);
                self.transition_to(LifecycleState::Loading, now);
            }
            Event::Profiled { .. } => self.profiled = true,
            Event::Ready { .. } if self.state.is_starting() && self.probe_state == ProbeState::NotReady => {
                self.profiled = true;
                self.probe_state = ProbeState::Due;
                self.diagnostics = EngineDiagnostics::default();
            }
            // The gate is closed and drained already, so the engine is stopped. An engine that reports that it is awake
            // may serve its waiters, unless it was evicted for another model. A new leader does not know for which
            // model that was.
            Event::SleepFailed { cause, .. }
                if matches!(self.state, LifecycleState::FallingAsleep { .. }) =>
            {
                let awake = *cause == FailureCause::SleepDenied && !self.is_evicted();
                let (why, then) =
                    (if awake { CloseReason::SleepDenied } else { CloseReason::Fault }, AfterDrain::Stop);
                self.transition_to(
                    LifecycleState::Draining {
                        reason: why,
                        after_drain: then,
                        revoked: false,
                        drained: true,
                    },
                    now,
                );
            }
            Event::WakeFailed { cause, .. } | Event::StartFailed { cause, .. }
                if self.state.is_starting() || matches!(self.state, LifecycleState::FallingAsleep { .. }) =>
            {
                self.fail(cause.clone(), now);
            }
            Event::Diagnostics { diagnostics: symptoms, .. } => self.record_diagnostics(symptoms),
            Event::Health { ok, progressed, .. } => {
                self.failing_since = if *ok { None } else { self.failing_since.or(Some(now)) };
                if *progressed {
                    self.last_progress = now;
                }
            }
            _ => {}
        }
    }

    /// Records the end of the process; returns false if there was none.
    fn record_process_exit(&mut self, cause: &FailureCause, now: Tick) -> bool {
        if !self.state.has_process() {
            return false;
        }
        if self.admission != Admission::Closed {
            self.unclosed_gate = Some((self.generation, cause.clone()));
            self.admission = Admission::Closed;
        }
        if matches!(&self.state, LifecycleState::Stopping { cause: FailureCause::Stopped }) {
            self.transition_to(LifecycleState::Cold, now);
        } else {
            let until = if self.exits_between_uses() {
                now
            } else {
                self.failures += 1;
                self.failures_since_serving += 1;
                now + backoff::delay(&self.id, self.failures)
            };
            let cause = match &self.state {
                LifecycleState::Stopping { cause } | LifecycleState::Failing { cause, .. } => cause.clone(),
                _ => cause.clone(),
            };
            self.transition_to(LifecycleState::Backoff { until, cause }, now);
        }
        self.forget_process();
        true
    }

    /// Whether the process served before and ended while falling asleep, asleep or waking.
    ///
    /// Its start was good, so the next one need not wait.
    fn exits_between_uses(&self) -> bool {
        let wakes = !self.cold_start && self.turn_start < self.startup_began;
        wakes || matches!(self.state, LifecycleState::FallingAsleep { .. } | LifecycleState::Asleep { .. })
    }

    /// Records that the gate is closed and the last lease has ended.
    fn record_drained(&mut self) {
        match &mut self.state {
            LifecycleState::Draining { drained, .. } | LifecycleState::Failing { drained, .. }
                if self.admission == Admission::Closed =>
            {
                *drained = true;
                self.leases = 0;
            }
            _ => {}
        }
    }
}
