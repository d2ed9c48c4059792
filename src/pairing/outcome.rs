//! Applies the outcomes of commands. Only the last command for an engine, requester or provider counts: issuing a
//! command gives up the previous one.

use super::{
    command::EngineStopReason,
    event::{CommandFailure, CommandReply, CommandTarget, ProviderPhase, QueriedCondition},
    ids::{PairingEngineId, ProviderId, RequesterId, accelerator_set},
    node::{PairingEngineState, PairingNode, PendingCommand, PendingCommandKind, RetryState},
};
use crate::{
    model::SleepLevel,
    units::{Bytes, Generation, Tick},
};

type OutcomeResult<'a> = &'a std::result::Result<CommandReply, CommandFailure>;

impl PairingNode {
    pub(super) fn outcome(
        &mut self,
        target: &CommandTarget,
        serial: u64,
        result: OutcomeResult<'_>,
        now: Tick,
    ) {
        match target {
            CommandTarget::Engine(engine, generation) => {
                self.engine_outcome(engine, *generation, serial, result, now)
            }
            CommandTarget::Requester(requester) => self.requester_outcome(requester, serial, result, now),
            CommandTarget::Provider(provider) => self.provider_outcome(provider, serial, result, now),
        }
    }

    fn requester_outcome(&mut self, id: &RequesterId, serial: u64, result: OutcomeResult<'_>, now: Tick) {
        let Some(requester) = self.requesters.get_mut(id) else { return };
        let Some(call) = take(&mut requester.pending, serial) else { return };
        match (call.kind, result) {
            (PendingCommandKind::QueryAccelerators, Ok(CommandReply::Accelerators(found)))
                if !found.is_empty() =>
            {
                requester.accelerators = accelerator_set(found);
                requester.gated_stub = call.stub_container;
                requester.retry = Default::default();
            }
            (PendingCommandKind::CloseGate, Ok(_)) => {
                requester.gated_stub = call.stub_container;
                requester.retry = Default::default();
            }
            (PendingCommandKind::SetFinalizer(wanted), Ok(_)) => {
                requester.observed.finalizer = wanted;
                requester.retry = Default::default();
            }
            (PendingCommandKind::Release, Ok(_)) => requester.released = true,
            // The deletion has begun, even if no watch has reported it yet.
            (PendingCommandKind::Delete, Ok(_)) => {
                requester.observed.deleting_since.get_or_insert(now);
                requester.retry = Default::default();
            }
            _ => requester.retry.record_failure(now),
        }
    }

    fn provider_outcome(&mut self, id: &ProviderId, serial: u64, result: OutcomeResult<'_>, now: Tick) {
        let Some(provider) = self.providers.get_mut(id) else { return };
        let Some(call) = take(&mut provider.pending, serial) else { return };
        if result.is_err() {
            return provider.retry.record_failure(now);
        }
        provider.retry = RetryState { failures: 0, at: now };
        provider.created |= call.kind == PendingCommandKind::Create;
        if call.kind == PendingCommandKind::Delete
            && *result == Ok(CommandReply::Condition(QueriedCondition::Absent))
        {
            self.ordered_pod_absent(id, now);
        }
    }

    fn engine_outcome(
        &mut self,
        id: &PairingEngineId,
        generation: Generation,
        serial: u64,
        result: OutcomeResult<'_>,
        now: Tick,
    ) {
        let Some(engine) = self.engines.get_mut(id).filter(|e| e.generation == generation) else { return };
        if take(&mut engine.cancelled_close, serial).is_some() {
            return engine.reopen_gate();
        }
        let Some(call) = take(&mut engine.pending, serial) else { return };
        let is_definite = *result != Err(CommandFailure::Unreachable);
        if is_definite && matches!(call.kind, PendingCommandKind::Create | PendingCommandKind::Launch) {
            engine.may_start_until = Tick(0);
        }
        match (call.kind, result) {
            (PendingCommandKind::Create, Ok(_)) => {
                let provider = self.providers.get_mut(&engine.provider);
                provider.into_iter().for_each(|provider| provider.created = true);
            }
            (PendingCommandKind::Create, Err(CommandFailure::Conflict)) => {
                engine.retry.record_failure(now);
                let provider = engine.provider.clone();
                self.adopt_name_holder(&provider, now);
            }
            (PendingCommandKind::Create | PendingCommandKind::Launch, Err(_)) => {
                engine.failure = Some(EngineStopReason::StartFailed)
            }
            (PendingCommandKind::Bind, Ok(_)) => {
                if let Some(binding) = &mut engine.binding {
                    binding.written = true;
                }
                engine.retry = Default::default();
            }
            (PendingCommandKind::Launch, Ok(_)) => engine.enter(PairingEngineState::Starting, now),
            (PendingCommandKind::SendCanary, Ok(_)) => self.canary_passed(id, now),
            (PendingCommandKind::SendCanary, Err(_)) => engine.failure = Some(EngineStopReason::CanaryFailed),
            (PendingCommandKind::OpenGate, Ok(_)) => {
                engine.opened_stub = call.stub_container;
                engine.retry = Default::default();
            }
            (PendingCommandKind::CloseGate, Ok(_)) => {
                if let PairingEngineState::Draining { drained, .. } = &mut engine.state {
                    *drained = true;
                }
                let requester = engine.requester().and_then(|requester| self.requesters.get_mut(requester));
                if let Some(requester) = requester {
                    requester.gated_stub = call.stub_container;
                }
            }
            (PendingCommandKind::Sleep, Ok(answer)) => {
                let measured = if let CommandReply::Asleep { residue } = answer { *residue } else { None };
                self.fell_asleep(id, measured, now);
            }
            (PendingCommandKind::Sleep, Err(_)) => engine.failure = Some(EngineStopReason::SleepFailed),
            (PendingCommandKind::Wake, Ok(_)) => {
                engine.ready = true;
                engine.reserved_host = Bytes::ZERO;
                self.woke_for_want(id, now);
            }
            (PendingCommandKind::Wake, Err(_)) => engine.failure = Some(EngineStopReason::WakeFailed),
            (PendingCommandKind::Unbind, Ok(_)) => {
                engine.binding = None;
                engine.awaits_want = false;
                engine.retry = Default::default();
                if matches!(engine.state, PairingEngineState::Asleep { .. }) {
                    engine.reserved = engine.residue();
                }
            }
            (PendingCommandKind::Forget, Ok(_)) => {
                self.engines.remove(id);
            }
            (PendingCommandKind::Stop, Ok(answer)) => self.stop_succeeded(id, answer, now),
            (PendingCommandKind::Query, Ok(CommandReply::Condition(condition))) => {
                self.record_condition(id, *condition, now)
            }
            _ => engine.retry.record_failure(now),
        }
    }

    /// Ends the wake of an engine that the gateway still wants awake and proves itself.
    fn woke_for_want(&mut self, id: &PairingEngineId, now: Tick) {
        let Some(engine) = self.engines.get(id).filter(|engine| engine.proven_by_gateway) else { return };
        if self.is_actuated(engine) && self.sleep_order(engine).is_none() && engine.failure.is_none() {
            self.canary_passed(id, now);
        }
    }

    fn canary_passed(&mut self, id: &PairingEngineId, now: Tick) {
        let Some(engine) = self.engines.get_mut(id) else { return };
        if !matches!(engine.state, PairingEngineState::Starting | PairingEngineState::Waking) {
            return;
        }
        engine.enter(PairingEngineState::Awake, now);
        engine.last_used = now;
        if let Some(provider) = self.providers.get_mut(&engine.provider) {
            provider.proven_since.get_or_insert(now);
        }
        let requester = engine.requester().cloned().and_then(|r| self.requesters.get_mut(&r));
        if let Some(requester) = requester {
            requester.failures = 0;
        }
    }

    /// Shrinks the reservation to the residue: as declared, or as measured if that is more. The measurement may include
    /// another engine's memory if the sleep could not wait for that engine; it counts all the same, to be safe.
    fn fell_asleep(&mut self, id: &PairingEngineId, measured: Option<Bytes>, now: Tick) {
        let Some(engine) = self.engines.get(id) else { return };
        let PairingEngineState::FallingAsleep { level } = engine.state else { return };
        let awaits_want = self.is_actuated(engine);
        let Some(engine) = self.engines.get_mut(id) else { return };
        engine.enter(PairingEngineState::Asleep { level }, now);
        engine.sizes.asleep = engine.sizes.asleep.max(measured.unwrap_or_default());
        engine.reserved = engine.residue();
        engine.awaits_want = awaits_want;
        self.record_sleep_time(id, now);
    }

    fn record_sleep_time(&mut self, id: &PairingEngineId, now: Tick) {
        for accelerator in id.accelerators.iter() {
            if let Some(accelerator_record) = self.accelerators.get_mut(accelerator) {
                accelerator_record.last_sleep = Some(now);
            }
        }
    }

    fn stop_succeeded(&mut self, id: &PairingEngineId, answer: &CommandReply, now: Tick) {
        let Some(engine) = self.engines.get_mut(id) else { return };
        let absent = *answer == CommandReply::Condition(QueriedCondition::Absent);
        if now < engine.may_start_until && (absent || engine.provider.is_launcher()) {
            // A start command in flight may still create the process.
            engine.retry.at = engine.may_start_until;
            return;
        }
        engine.stop_accepted = true;
        engine.retry = RetryState { failures: 0, at: now };
        if engine.provider.is_launcher() {
            self.process_gone(id, now);
        } else if absent {
            // A watch reports the end of any Pod that it has reported.
            let provider = engine.provider.clone();
            self.ordered_pod_absent(&provider, now);
        }
    }

    /// Handles an ordered Pod that does not exist. An observed Pod stays until it is seen gone: a late observation of
    /// it would count as the next Pod of its name.
    fn ordered_pod_absent(&mut self, id: &ProviderId, now: Tick) {
        match self
            .providers
            .get(id)
            .filter(|provider| provider.uid.is_none())
            .map(|provider| provider.created)
        {
            // The Pod was created and vanished before it was observed.
            Some(true) => self.provider_vanished(id, now),
            Some(false) => self.provider_gone(id, now),
            None => {}
        }
    }

    /// Applies the condition that the query of an unknown engine found.
    fn record_condition(&mut self, id: &PairingEngineId, condition: QueriedCondition, now: Tick) {
        let awaits_want = self.engines.get(id).is_some_and(|engine| self.is_actuated(engine));
        let Some(engine) = self.engines.get_mut(id).filter(|e| e.state == PairingEngineState::Unknown) else {
            return;
        };
        match condition {
            QueriedCondition::Busy => engine.retry.record_failure(now),
            QueriedCondition::Starting => {
                let provider = self.providers.get(&engine.provider);
                engine.enter(PairingEngineState::Starting, now);
                // The Pod may have become ready before the query, while the engine was too busy to answer.
                let ready = provider.is_some_and(|provider| provider.phase == ProviderPhase::Ready);
                engine.ready = ready && !engine.provider.is_launcher();
            }
            QueriedCondition::Awake => {
                engine.enter(PairingEngineState::Awake, now);
                engine.reserved_host = Bytes::ZERO;
            }
            QueriedCondition::Asleep { residue, .. } | QueriedCondition::AsleepAtUnknownLevel { residue } => {
                let known_level =
                    if let QueriedCondition::Asleep { level, .. } = condition { Some(level) } else { None };
                engine
                    .enter(PairingEngineState::Asleep { level: known_level.unwrap_or(SleepLevel::Two) }, now);
                engine.sizes.asleep = engine.sizes.asleep.max(residue.unwrap_or_default());
                if known_level == Some(SleepLevel::Two) {
                    engine.reserved_host = Bytes::ZERO;
                }
                // A bound engine keeps its full reservation: it is about to be woken, or nearly was. The gateway wakes
                // those of its requesters itself, and their stubs refuse the orders of an earlier leader.
                if awaits_want {
                    engine.await_want();
                } else if engine.binding.is_none() {
                    engine.reserved = engine.residue();
                }
                self.record_sleep_time(id, now);
            }
            // A start command in flight may still create the process.
            QueriedCondition::Absent if now < engine.may_start_until => {
                engine.retry.at = engine.may_start_until
            }
            QueriedCondition::Absent => {
                self.engine_lost(id, now);
                let Some(engine) = self.engines.get_mut(id) else { return };
                // In a launcher only the record is left; of a direct provider the Pod is left, too.
                engine.stop_accepted = engine.provider.is_launcher();
                self.process_gone(id, now);
            }
        }
    }
}

/// Takes the pending command if it has this serial number.
fn take(call: &mut Option<PendingCommand>, serial: u64) -> Option<PendingCommand> {
    if call.as_ref()?.serial == serial { call.take() } else { None }
}
