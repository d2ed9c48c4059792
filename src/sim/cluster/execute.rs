//! Executes commands: late or never, with the reply lost, or from an earlier leader.
//!
//! This file carries commands and replies and executes the steps on Pods; `engine_step` executes the steps on engines.

mod engine_step;

use super::{ClusterEvent, SimulatedCluster, pods::SimulatedStub};
use crate::{
    pairing::{
        command::{EngineStep, PairingAction, PairingCommand, ProviderStep, RequesterStep},
        event::{CommandFailure, CommandReply, LeaderEpoch, PairingEvent, QueriedCondition},
        ids::RequesterId,
    },
    units::Millis,
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
        let (call, fault_rates) = (self.scenario.settings.call_timeout, self.scenario.fault_rates);
        let key = (command.epoch, command.serial);
        if self.chance(fault_rates.calls_lost) {
            return self.reply_after(call, &command, Err(CommandFailure::Unreachable));
        }
        if self.chance(fault_rates.replies_lost) {
            self.audit.replies_to_drop.insert(key);
            if self.random.chance(0.5) {
                self.reply_after(call, &command, Err(CommandFailure::Unreachable));
            }
        }
        let starts = matches!(
            command.action,
            PairingAction::Engine { step: EngineStep::Launch | EngineStep::Create { .. }, .. }
        );
        if starts && self.chance(fault_rates.starts_late) {
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
            && let Some(provider_key) = self.provider_of(&command, engine)
            && let Some(provider) = self.providers.get(&provider_key)
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
pub(super) type CommandKey = (LeaderEpoch, u64);
