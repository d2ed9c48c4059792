//! Executes commands: late or never, with the reply lost, or from an earlier leader.

use super::{
    ClusterEvent, SimulatedCluster,
    pods::{PodProcess, PodProcessPhase, ProviderKey, SimulatedStub},
};
use crate::{
    engine::SLEEP_DENIAL_TIMEOUT,
    pairing::{
        command::{EngineStep, EngineStopReason, PairingAction, PairingCommand, ProviderStep, RequesterStep},
        event::{CommandFailure, CommandReply, Epoch, PairingEvent, ProviderPhase, QueriedCondition},
        ids::{PairingEngineId, ProviderId, RequesterId, Uid},
    },
    units::{Generation, Millis},
};

/// The reply to a command; `None` if the reply comes when the command has finished.
type ImmediateReply = Option<Result<CommandReply, CommandFailure>>;

const DONE: ImmediateReply = Some(Ok(CommandReply::Done));
const UNREACHABLE: ImmediateReply = Some(Err(CommandFailure::Unreachable));
const CONFLICT: ImmediateReply = Some(Err(CommandFailure::Conflict));
const ABSENT: ImmediateReply = Some(Ok(CommandReply::Condition(QueriedCondition::Absent)));

impl SimulatedCluster {
    /// Sends a command of the controller.
    pub(super) fn send(&mut self, command: PairingCommand) {
        let (call, troubles) = (self.scenario.settings.call_timeout, self.scenario.fault_rates);
        let key = (command.epoch, command.serial);
        if self.chance(troubles.calls_lost) {
            return self.reply_after(call, &command, Err(CommandFailure::Unreachable));
        }
        if self.chance(troubles.replies_lost) {
            self.audit.replies_to_drop.insert(key);
            if self.random.chance(0.5) {
                self.reply_after(call, &command, Err(CommandFailure::Unreachable));
            }
        }
        let starts = matches!(
            command.action,
            PairingAction::Engine { step: EngineStep::Launch | EngineStep::Create { .. }, .. }
        );
        if starts && self.chance(troubles.starts_late) {
            // The caller gives up, but the command is executed all the same.
            self.audit.replies_to_drop.insert(key);
            self.reply_after(call, &command, Err(CommandFailure::Unreachable));
            let after = self.random_duration((call.0, call.0 * 2 - 100));
            return self.send_after(after, command);
        }
        let after = self.random_duration(self.scenario.network_delay);
        self.send_after(after, command);
    }

    fn send_after(&mut self, after: Millis, command: PairingCommand) {
        let key = (command.epoch, command.serial);
        self.audit.in_flight.insert(key, command.clone());
        if let PairingAction::Engine { engine, .. } = &command.action
            && let Some(place) = self.provider_of(&command, engine)
            && let Some(provider) = self.providers.get(&place)
        {
            self.audit.target_containers.insert(key, (provider.uid.clone(), provider.restarts));
        }
        self.schedule(after, ClusterEvent::CommandArrives(command));
    }

    /// Sends a command of an earlier leader, if the target can refuse it.
    pub(super) fn send_from_old_leader(&mut self, command: PairingCommand) {
        if is_fenced(&command.action) {
            let after = self.random_duration(self.scenario.network_delay);
            self.schedule(after, ClusterEvent::CommandArrives(command));
        }
    }

    /// Executes or drops every pending write of the previous leader. The next leader starts only after that. Calls to
    /// stubs and launchers stay in flight, because those check the epoch.
    pub(super) fn flush_writes(&mut self) {
        for (_, command) in std::mem::take(&mut self.audit.in_flight) {
            if is_fenced(&command.action) {
                continue;
            }
            if self.random.chance(0.5) {
                self.execute(&command);
            }
        }
    }

    pub(super) fn command_arrives(&mut self, command: PairingCommand) {
        self.audit.in_flight.remove(&(command.epoch, command.serial));
        if command.epoch != self.epoch && !is_fenced(&command.action) {
            return;
        }
        if let Some(result) = self.execute(&command) {
            self.reply(&command, result);
        }
    }

    fn reply(&mut self, command: &PairingCommand, result: Result<CommandReply, CommandFailure>) {
        if self.audit.replies_to_drop.remove(&(command.epoch, command.serial)) {
            return;
        }
        let after = self.random_duration(self.scenario.network_delay);
        self.reply_after(after, command, result);
    }

    fn reply_after(
        &mut self,
        after: Millis,
        command: &PairingCommand,
        result: Result<CommandReply, CommandFailure>,
    ) {
        let (node, target) = (command.node.clone(), command.action.target());
        let event = PairingEvent::Outcome { node, target, serial: command.serial, result };
        self.schedule(after, ClusterEvent::DeliverWatchEvent(command.epoch, event));
    }

    fn execute(&mut self, command: &PairingCommand) -> ImmediateReply {
        match &command.action {
            PairingAction::Engine { engine, generation, step } => {
                self.execute_engine_step(command, engine, *generation, step)
            }
            PairingAction::Requester { requester, step } => {
                self.execute_requester_step(command, requester, step)
            }
            PairingAction::Provider { provider, step } => {
                let key = Self::provider_key(&command.node, provider);
                match (step, self.providers.contains_key(&key)) {
                    (ProviderStep::Create { .. }, true) => CONFLICT,
                    (ProviderStep::Create { requester: asker }, false) => {
                        let build = self.build_for(asker.as_ref());
                        self.create_provider(&key, Some(build), Vec::new(), command.epoch);
                        DONE
                    }
                    (ProviderStep::Delete { .. }, false) => ABSENT,
                    (ProviderStep::Delete { .. }, true) => {
                        self.delete_provider(&key);
                        DONE
                    }
                }
            }
        }
    }

    fn execute_requester_step(
        &mut self,
        command: &PairingCommand,
        id: &RequesterId,
        step: &RequesterStep,
    ) -> ImmediateReply {
        match step {
            RequesterStep::QueryAccelerators { close_gate: gate } => {
                let Some(stub) = self.reachable_stub(command, id) else { return UNREACHABLE };
                if *gate {
                    stub.open_to = None;
                }
                let requester = self.requesters.get(id)?;
                Some(Ok(CommandReply::Accelerators(requester.accelerators.clone())))
            }
            RequesterStep::CloseGate => {
                let Some(stub) = self.reachable_stub(command, id) else { return UNREACHABLE };
                stub.open_to = None;
                DONE
            }
            RequesterStep::Release => {
                if self.reachable_stub(command, id).is_none() {
                    return UNREACHABLE;
                }
                self.schedule(Millis(5), ClusterEvent::StubEnds(id.clone()));
                DONE
            }
            RequesterStep::Delete { reason: why } => {
                self.count("requesters deleted");
                self.record_line(|| format!("  ({why})"));
                self.delete_requester(id);
                DONE
            }
            RequesterStep::SetFinalizer { present: wanted } => {
                let Some(requester) = self.requesters.get_mut(id) else { return CONFLICT };
                if *wanted && requester.deleting_since.is_some() {
                    return CONFLICT;
                }
                requester.finalizer = *wanted;
                self.emit_requester(id);
                self.collect_requester(id);
                DONE
            }
        }
    }

    /// The stub of this requester, if it runs, is reachable, and knows no newer leader.
    fn reachable_stub(&mut self, command: &PairingCommand, id: &RequesterId) -> Option<&mut SimulatedStub> {
        if self.is_cut_off(&command.node) {
            return None;
        }
        let stub = self.requesters.get_mut(id)?.stub.as_mut()?;
        if stub.epoch > command.epoch {
            return None;
        }
        stub.epoch = command.epoch;
        Some(stub)
    }

    fn execute_engine_step(
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
                let place = self.provider_of(command, engine);
                let pod = place.and_then(|key| self.providers.get(&key)).map(|provider| provider.uid.clone());
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
                EngineStep::Stop { .. } if engine.mode != crate::pairing::ids::ProviderMode::Launcher => {
                    ABSENT
                }
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
    fn provider_of(&self, command: &PairingCommand, engine: &PairingEngineId) -> Option<ProviderKey> {
        let node = self.pairing.node(&command.node);
        let known = node.and_then(|node| node.engines.get(engine)).map(|known| known.provider.clone());
        let index = |a: &crate::model::AcceleratorId| {
            let machine = self.nodes.get(&command.node);
            machine.and_then(|machine| machine.accelerators.get(a)).map_or(u32::MAX, |facts| facts.index)
        };
        let lowest = || engine.accelerators.iter().min_by_key(|a| index(a)).cloned();
        let provider = match known {
            Some(provider) => provider,
            None if engine.mode == crate::pairing::ids::ProviderMode::Launcher => {
                ProviderId::launcher(lowest()?)
            }
            None => ProviderId::direct(engine),
        };
        Some(Self::provider_key(&command.node, &provider)).filter(|key| self.providers.contains_key(key))
    }

    fn bind(&mut self, key: &ProviderKey, record: crate::pairing::event::EngineRecord) -> ImmediateReply {
        let Some(provider) = self.providers.get_mut(key) else { return UNREACHABLE };
        if provider.deleting {
            return CONFLICT;
        }
        provider.records.retain(|known| known.engine != record.engine);
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
            self.providers.get(key).is_some_and(|own| own.uid != *uid || own.restarts != *restarts)
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
            let ended = provider.last_stopped.entry(id.clone()).or_insert(generation);
            *ended = generation.max(*ended);
        }
        let there = provider.processes.get(id).filter(|process| process.generation == generation).cloned();
        match (step, there) {
            // The command was executed before, and the reply was lost.
            (EngineStep::Launch, Some(_)) => DONE,
            (EngineStep::Launch, _) if provider.exited.get(id) == Some(&generation) => DONE,
            (EngineStep::Launch, _)
                if provider.processes.contains_key(id) || provider.exited.contains_key(id) =>
            {
                CONFLICT
            }
            (EngineStep::Launch, _)
                if provider.last_stopped.get(id).is_some_and(|ended| generation <= *ended) =>
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
        let troubles = self.scenario.fault_rates;
        let (phase, after, fails) = match (step, process.phase) {
            (EngineStep::Sleep { level, .. }, PodProcessPhase::Awake) => {
                self.check_gate_before_sleep(command, id);
                (
                    PodProcessPhase::FallingAsleep(*level),
                    self.random_duration(self.scenario.sleep_time),
                    troubles.sleep_fails,
                )
            }
            (EngineStep::Wake { .. }, PodProcessPhase::Asleep(level)) => (
                PodProcessPhase::Waking(level),
                self.random_duration(self.scenario.wake_time),
                troubles.wake_fails,
            ),
            (EngineStep::SendCanary, PodProcessPhase::Awake) => {
                (PodProcessPhase::Awake, self.random_duration((5, 200)), troubles.canary_fails)
            }
            _ => return Some(Err(CommandFailure::Refused)),
        };
        if self.chance(troubles.hangs) {
            self.count("hangs");
            self.update_process(key, id, |process| (process.hung, process.phase) = (true, phase));
            return None;
        }
        if self.chance(fails) {
            self.count("refusals");
            return Some(Err(CommandFailure::Refused));
        }
        if matches!(step, EngineStep::Sleep { .. }) && self.chance(troubles.sleep_denied) {
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

    pub(super) fn command_finishes(&mut self, command: PairingCommand) {
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

/// Whether a stub or launcher receives the command and checks its epoch.
fn is_fenced(order: &PairingAction) -> bool {
    match order {
        PairingAction::Engine { engine, step, .. } => match step {
            EngineStep::OpenGate { .. }
            | EngineStep::CloseGate { .. }
            | EngineStep::Wake { .. }
            | EngineStep::Sleep { via: Some(_), .. } => true,
            EngineStep::Launch | EngineStep::Stop { .. } => {
                engine.mode == crate::pairing::ids::ProviderMode::Launcher
            }
            _ => false,
        },
        PairingAction::Requester { step, .. } => {
            matches!(
                step,
                RequesterStep::QueryAccelerators { .. } | RequesterStep::CloseGate | RequesterStep::Release
            )
        }
        PairingAction::Provider { .. } => false,
    }
}

/// The epoch and serial number of a command.
pub(super) type CommandKey = (Epoch, u64);
