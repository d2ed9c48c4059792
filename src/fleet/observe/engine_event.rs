//! Records the outcomes and observations of one engine, which the caller has checked to be of its current generation.
//!
//! Apart from the other observations, because these change the engine's state and its reservation together.

use crate::{
    engine::{
        Admission, Engine, ProbeState, backoff, last_outcome::EngineDiagnostics, state::LifecycleState,
        turn_clients::TurnClients,
    },
    fault::FailureCause,
    fleet::{
        command::{AfterDrain, CloseReason},
        event::{CanaryVerdict, Event},
        plan::Planner,
        quote::TimeEstimate,
        state::ledger::AcceleratorAccount,
    },
    model::{EngineId, SleepLevel},
    units::{Bytes, Millis, Tick},
};

impl Planner {
    pub(super) fn record_canary(&mut self, id: &EngineId, verdict: &CanaryVerdict, now: Tick) {
        let Some(engine) = self.engines.get(id) else { return };
        if !matches!(engine.probe_state, ProbeState::InFlight(_)) || !engine.state.is_starting() {
            return;
        }
        let took = now.since(engine.startup_began);
        let woken_from = match &engine.state {
            LifecycleState::Waking { level } if !engine.cold_start => Some(*level),
            _ => None,
        };
        self.engines.change(id, |engine| match verdict {
            CanaryVerdict::Passed => {
                engine.turn_start = now;
                engine.clients = TurnClients::default();
                engine.last_progress = now;
                engine.failing_since = None;
                engine.failures_since_serving = 0;
                engine.denied_accelerators.clear();
                engine.transition_to(LifecycleState::Awake, now);
            }
            CanaryVerdict::Failed(cause) => engine.fail(cause.clone(), now),
            CanaryVerdict::Inconclusive => engine.probe_state = ProbeState::Due,
        });
        if *verdict == CanaryVerdict::Passed {
            self.clear_yields_to(id);
            self.ledger.host.booked.remove(id);
            self.update_learned(id, |learned| match woken_from {
                Some(level) => learned.record_wake(level, took),
                None => learned.record_start(took),
            });
        }
    }

    /// Returns engines that yielded to this one to their old place in line.
    fn clear_yields_to(&mut self, id: &EngineId) {
        for other in &self.engines.yielded_to(id) {
            self.engines.change(other, |e| e.yielded_to = None);
        }
    }

    pub(super) fn record_conflict(&mut self, id: &EngineId, now: Tick) {
        let kept = self.engines.change(id, |engine| {
            let placing = engine.pending_reservation.take()?;
            let asleep = matches!(engine.state, LifecycleState::Asleep { .. });
            if !asleep {
                // Another party's reservation comes and goes; a limit that only the ledger knows (a quota) stays.
                let until = now + Millis(250 << engine.conflicts.min(6));
                engine.conflicts += 1;
                engine.deny_accelerators(&placing.accelerators);
                engine.transition_to(LifecycleState::Backoff { until, cause: FailureCause::Refused }, now);
            }
            Some((asleep, if asleep { placing.booked_before } else { Bytes::ZERO }))
        });
        let Some((asleep, keeps)) = kept.flatten() else { return };
        self.ledger.shrink(id, keeps, asleep, now);
    }

    pub(super) fn record_slept(&mut self, id: &EngineId, level: SleepLevel, now: Tick) {
        let Some(engine) =
            self.engines.get(id).filter(|e| matches!(e.state, LifecycleState::FallingAsleep { .. }))
        else {
            return;
        };
        let (duration, is_rehearsed) = (now.since(engine.since), engine.is_rehearsing());
        self.engines.change(id, |engine| {
            engine.transition_to(LifecycleState::Asleep { level }, now);
            engine.releasing_since = Some(now);
        });
        if level == SleepLevel::Two {
            // The order may have been for level 1, for which the engine's node had no RAM after all.
            self.ledger.host.booked.remove(id);
        }
        for account_id in self.ledger.accelerators.account_ids_of(id) {
            self.ledger.accelerators.change(&account_id, |account| {
                account.changed_at = now;
                account.reset_readings();
            });
        }
        self.update_learned(id, |learned| {
            if is_rehearsed {
                learned.record_rehearsed_sleep(duration)
            } else {
                learned.record_sleep(duration)
            }
        });
    }

    /// Records the end of a process. Its memory counts as free, though the meter may lag.
    pub(super) fn record_gone(&mut self, id: &EngineId, cause: &FailureCause, now: Tick) {
        let stopping = |e: &&Engine| matches!(e.state, LifecycleState::Stopping { .. });
        let took = self.engines.get(id).filter(stopping).map(|e| now.since(e.since));
        let exited = self.engines.change(id, |engine| engine.record_process_exit(cause, now));
        if exited != Some(true) {
            return;
        }
        if let Some(took) = took {
            self.update_learned(id, |learned| TimeEstimate::learn(&mut learned.times.stop, took));
        }
        for account_id in self.ledger.accelerators.account_ids_of(id) {
            self.ledger.accelerators.change(&account_id, AcceleratorAccount::reset_readings);
        }
        self.ledger.shrink(id, Bytes::ZERO, false, now);
        self.ledger.host.booked.remove(id);
        self.forget_useless_residue(id);
    }
}

impl Engine {
    /// Applies an event that affects only the engine itself.
    pub(super) fn apply_event(&mut self, event: &Event, now: Tick) {
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
                    if *leases == 0 {
                        self.record_busy_end(*last_end);
                    }
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
            Event::SaturationChanged { limit, .. } => self.saturation = *limit,
            Event::StubGateClosed { .. } => self.record_stub_gate_closed(),
            // The platform stops watching once the gate opens. If it has closed again, the next plan orders a new
            // watch.
            Event::StubGateOpened { .. } => (self.stub_gate_closed, self.stub_gate_watched) = (false, false),
            Event::Drained { .. } => self.record_drained(),
            Event::Placed { accelerators, .. } => {
                if std::mem::take(&mut self.conflicts) > 0 {
                    self.denied_accelerators.clear();
                }
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
                let (reason, after_drain) =
                    (if awake { CloseReason::SleepDenied } else { CloseReason::Fault }, AfterDrain::Stop);
                self.transition_to(
                    LifecycleState::Draining { reason, after_drain, revoked: false, drained: true },
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
            if matches!(cause, FailureCause::Unschedulable | FailureCause::InsufficientRoom) {
                let denied = std::mem::take(&mut self.accelerators);
                self.deny_accelerators(&denied);
            }
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
