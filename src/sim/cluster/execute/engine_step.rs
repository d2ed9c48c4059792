//! Executes the steps on engines: what the launcher, the engine and the stub in front of it do with a call.
//!
//! Apart from the transport, because whether a command arrives does not depend on what it does.

use super::{ABSENT, CONFLICT, DONE, ImmediateReply, UNREACHABLE};
use crate::{
    engine::SLEEP_DENIAL_TIMEOUT,
    model::AcceleratorId,
    pairing::{
        command::{EngineStep, EngineStopReason, PairingAction, PairingCommand},
        event::{CommandFailure, CommandReply, EngineRecord, ProviderPhase, QueriedCondition},
        ids::{PairingEngineId, ProviderId, ProviderMode, Uid},
    },
    sim::cluster::{
        ClusterEvent, SimulatedCluster,
        pods::{PodProcess, PodProcessPhase, ProviderKey},
    },
    units::Generation,
};

impl SimulatedCluster {
    pub(super) fn execute_engine_step(
        &mut self,
        command: &PairingCommand,
        engine: &PairingEngineId,
        generation: Generation,
        step: &EngineStep,
    ) -> ImmediateReply {
        match step {
            EngineStep::Create { record } => {
                let key = Self::provider_key(&command.node, &ProviderId::direct(engine));
                if self.providers.contains_key(&key) {
                    return CONFLICT;
                }
                self.create_provider(&key, None, vec![record.clone()], command.epoch);
                return DONE;
            }
            EngineStep::OpenGate { requester } => {
                let provider_key = self.provider_of(command, engine);
                let pod = provider_key
                    .and_then(|key| self.providers.get(&key))
                    .map(|provider| provider.uid.clone());
                let address = pod.map(|pod| (engine.clone(), pod));
                let Some(stub) = self.reachable_stub(command, requester) else { return UNREACHABLE };
                stub.open_to = address;
                return DONE;
            }
            EngineStep::CloseGate { requester, .. } => {
                let Some(stub) = self.reachable_stub(command, requester) else { return UNREACHABLE };
                stub.open_to = None;
                let drains = self.random_duration((0, 3000));
                self.schedule(drains, ClusterEvent::CommandFinishes(command.clone()));
                return None;
            }
            _ => {}
        }
        let Some(key) = self.provider_of(command, engine) else {
            return match step {
                EngineStep::Unbind { .. } => DONE,
                EngineStep::Stop { .. } if engine.mode != ProviderMode::Launcher => ABSENT,
                _ => UNREACHABLE,
            };
        };
        match step {
            EngineStep::Bind { record } => self.bind(&key, record.clone()),
            EngineStep::Unbind { last_used, forget } => {
                if let Some(provider) = self.providers.get_mut(&key) {
                    if let Some(record) = provider.record(engine).filter(|r| r.generation == generation) {
                        (record.requester, record.last_used) = (None, *last_used);
                    }
                    provider
                        .records
                        .retain(|r| !(*forget && r.engine == *engine && r.generation == generation));
                }
                self.emit_provider(&key);
                self.collect_provider(&key);
                DONE
            }
            EngineStep::Stop { reason: why } if !key.1.is_launcher() => {
                self.count("engines ended");
                self.record_line(|| format!("  ({why})"));
                let same = self
                    .providers
                    .get(&key)
                    .is_some_and(|p| p.records.iter().any(|r| r.generation == generation));
                if !same {
                    return ABSENT;
                }
                self.delete_provider(&key);
                DONE
            }
            _ => self.call(command, &key, engine, generation, step),
        }
    }

    /// The provider where this engine runs or will run.
    pub(super) fn provider_of(
        &self,
        command: &PairingCommand,
        engine: &PairingEngineId,
    ) -> Option<ProviderKey> {
        let node = self.pairing.node(&command.node);
        let known_provider = node
            .and_then(|node| node.engines.get(engine))
            .map(|engine_record| engine_record.provider.clone());
        let index = |a: &AcceleratorId| {
            let machine = self.nodes.get(&command.node);
            machine.and_then(|machine| machine.accelerators.get(a)).map_or(u32::MAX, |facts| facts.index)
        };
        let lowest = || engine.accelerators.iter().min_by_key(|a| index(a)).cloned();
        let provider = match known_provider {
            Some(provider) => provider,
            None if engine.mode == ProviderMode::Launcher => ProviderId::launcher(lowest()?),
            None => ProviderId::direct(engine),
        };
        Some(Self::provider_key(&command.node, &provider)).filter(|key| self.providers.contains_key(key))
    }

    fn bind(&mut self, key: &ProviderKey, record: EngineRecord) -> ImmediateReply {
        let Some(provider) = self.providers.get_mut(key) else { return UNREACHABLE };
        if provider.deleting {
            return CONFLICT;
        }
        provider.records.retain(|bound| bound.engine != record.engine);
        provider.records.push(record);
        self.emit_provider(key);
        DONE
    }

    /// Executes a call to the launcher, the engine, or the stub in front of the engine.
    fn call(
        &mut self,
        command: &PairingCommand,
        key: &ProviderKey,
        id: &PairingEngineId,
        generation: Generation,
        step: &EngineStep,
    ) -> ImmediateReply {
        let bound = self.providers.get_mut(key)?.record(id).and_then(|record| record.requester.clone());
        if let EngineStep::Sleep { via: Some(via), .. } | EngineStep::Wake { via, .. } = step
            && self.reachable_stub(command, via).is_none()
        {
            return UNREACHABLE;
        }
        if let EngineStep::Sleep { via: Some(via), .. } = step
            && let Some(stub) = self.reachable_stub(command, via)
        {
            stub.open_to = None;
        }
        if *step == EngineStep::Query
            && let Some(stub) = bound.as_ref().and_then(|bound| self.requesters.get_mut(bound)?.stub.as_mut())
        {
            stub.epoch = stub.epoch.max(command.epoch);
        }
        let sent_to = self.audit.target_containers.get(&(command.epoch, command.serial));
        let other = |(uid, restarts): &(Uid, u32)| {
            self.providers
                .get(key)
                .is_some_and(|provider| provider.uid != *uid || provider.restarts != *restarts)
        };
        if sent_to.is_some_and(other) {
            return UNREACHABLE;
        }
        let (cut_off, launcher) = (self.is_cut_off(&command.node), key.1.is_launcher());
        let Some(provider) = self.providers.get_mut(key) else { return UNREACHABLE };
        let answers = !cut_off
            && !provider.hung
            && !matches!(provider.phase, ProviderPhase::Pending | ProviderPhase::Terminated);
        if !answers || launcher && provider.phase != ProviderPhase::Ready {
            return UNREACHABLE;
        }
        if launcher && provider.epoch > command.epoch {
            return CONFLICT;
        }
        provider.epoch = provider.epoch.max(command.epoch);
        let puts_away = *step == EngineStep::Query && provider.exited.contains_key(id);
        if launcher && (puts_away || matches!(step, EngineStep::Stop { .. })) {
            let last_stopped = provider.last_stopped.entry(id.clone()).or_insert(generation);
            *last_stopped = generation.max(*last_stopped);
        }
        let running = provider.processes.get(id).filter(|process| process.generation == generation).cloned();
        match (step, running) {
            // The command was executed before, and the reply was lost.
            (EngineStep::Launch, Some(_)) => DONE,
            (EngineStep::Launch, _) if provider.exited.get(id) == Some(&generation) => DONE,
            (EngineStep::Launch, _)
                if provider.processes.contains_key(id) || provider.exited.contains_key(id) =>
            {
                CONFLICT
            }
            (EngineStep::Launch, _)
                if provider.last_stopped.get(id).is_some_and(|last_stopped| generation <= *last_stopped) =>
            {
                Some(Err(CommandFailure::Refused))
            }
            (EngineStep::Launch, _) => {
                self.start_process(key, id, generation);
                DONE
            }
            (EngineStep::Stop { reason: why }, Some(_)) => {
                self.count(if *why == EngineStopReason::Displaced {
                    "engines displaced"
                } else {
                    "engines ended"
                });
                let after = self.random_duration((20, 3000));
                self.schedule(after, ClusterEvent::CommandFinishes(command.clone()));
                None
            }
            (EngineStep::Stop { .. } | EngineStep::Query, None) if launcher => {
                self.remove_exited(key, id);
                if *step == EngineStep::Query { ABSENT } else { DONE }
            }
            (EngineStep::Stop { .. }, None) => DONE,
            (EngineStep::Query, Some(process)) => {
                Some(query_condition(&process, self.scenario.reports_sleep_level))
            }
            (_, None) => UNREACHABLE,
            (_, Some(process)) => self.call_engine(command, key, id, step, &process),
        }
    }

    /// Executes a call to the engine itself. A hung engine does not reply.
    fn call_engine(
        &mut self,
        command: &PairingCommand,
        key: &ProviderKey,
        id: &PairingEngineId,
        step: &EngineStep,
        process: &PodProcess,
    ) -> ImmediateReply {
        if process.hung {
            return None;
        }
        let fault_rates = self.scenario.fault_rates;
        let (phase, after, fails) = match (step, process.phase) {
            (EngineStep::Sleep { level, .. }, PodProcessPhase::Awake) => {
                self.check_gate_before_sleep(command, id);
                (
                    PodProcessPhase::FallingAsleep(*level),
                    self.random_duration(self.scenario.sleep_time),
                    fault_rates.sleep_fails,
                )
            }
            (EngineStep::Wake { .. }, PodProcessPhase::Asleep(level)) => (
                PodProcessPhase::Waking(level),
                self.random_duration(self.scenario.wake_time),
                fault_rates.wake_fails,
            ),
            (EngineStep::SendCanary, PodProcessPhase::Awake) => {
                (PodProcessPhase::Awake, self.random_duration((5, 200)), fault_rates.canary_fails)
            }
            _ => return Some(Err(CommandFailure::Refused)),
        };
        if self.chance(fault_rates.hangs) {
            self.count("hangs");
            self.update_process(key, id, |process| (process.hung, process.phase) = (true, phase));
            return None;
        }
        if self.chance(fails) {
            self.count("refusals");
            return Some(Err(CommandFailure::Refused));
        }
        if matches!(step, EngineStep::Sleep { .. }) && self.chance(fault_rates.sleep_denied) {
            self.count("sleeps denied");
            // The engine stays awake, and the caller finds that out.
            if !self.audit.replies_to_drop.remove(&(command.epoch, command.serial)) {
                self.reply_after(SLEEP_DENIAL_TIMEOUT, command, Err(CommandFailure::Refused));
            }
            return None;
        }
        self.update_process(key, id, |process| process.phase = phase);
        self.schedule(after, ClusterEvent::CommandFinishes(command.clone()));
        None
    }

    fn update_process(
        &mut self,
        key: &ProviderKey,
        id: &PairingEngineId,
        change: impl FnOnce(&mut PodProcess),
    ) {
        if let Some(process) = self.providers.get_mut(key).and_then(|provider| provider.processes.get_mut(id))
        {
            change(process);
        }
    }

    pub(in crate::sim::cluster) fn command_finishes(&mut self, command: PairingCommand) {
        let PairingAction::Engine { engine, generation, step } = &command.action else { return };
        let key = self.provider_of(&command, engine);
        let process = key.as_ref().and_then(|key| self.providers.get(key)?.processes.get(engine));
        let process = process.filter(|process| process.generation == *generation).cloned();
        let result = match (step, process, key) {
            (EngineStep::CloseGate { .. }, ..) => Ok(CommandReply::Done),
            (EngineStep::Stop { .. }, process, Some(key)) => {
                if process.is_some() {
                    self.remove_process(&key, engine);
                }
                Ok(CommandReply::Done)
            }
            (EngineStep::Sleep { level, .. }, Some(process), Some(key)) => {
                self.update_process(&key, engine, |process| process.phase = PodProcessPhase::Asleep(*level));
                self.audit.record_sleep(&command.node, engine, self.now);
                self.count("sleeps");
                Ok(CommandReply::Asleep { residue: Some(process.residue) })
            }
            (EngineStep::Wake { .. }, Some(_), Some(key)) => {
                self.update_process(&key, engine, |process| process.phase = PodProcessPhase::Awake);
                self.count("wakes");
                Ok(CommandReply::Done)
            }
            (EngineStep::SendCanary, Some(_), Some(_)) => Ok(CommandReply::Done),
            _ => Err(CommandFailure::Unreachable),
        };
        self.reply(&command, result);
    }
}

fn query_condition(process: &PodProcess, knows_level: bool) -> Result<CommandReply, CommandFailure> {
    if process.hung {
        return Err(CommandFailure::Unreachable);
    }
    Ok(CommandReply::Condition(match process.phase {
        PodProcessPhase::Loading => QueriedCondition::Starting,
        PodProcessPhase::Awake => QueriedCondition::Awake,
        PodProcessPhase::Asleep(_) if !knows_level => {
            QueriedCondition::AsleepAtUnknownLevel { residue: Some(process.residue) }
        }
        PodProcessPhase::Asleep(level) => QueriedCondition::Asleep { level, residue: Some(process.residue) },
        PodProcessPhase::FallingAsleep(_) | PodProcessPhase::Waking(_) => QueriedCondition::Busy,
    }))
}
