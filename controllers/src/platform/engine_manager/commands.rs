//! Executes the fleet's commands.

use std::sync::Arc;

use rouse::{
    fault::FailureCause,
    fleet::{
        command::Command,
        event::{CanaryVerdict, Event},
    },
    model::{EngineId, SleepLevel},
    units::{Bytes, Generation},
};

use super::EngineManager;
use crate::{
    ledger::SleepingMemory,
    platform::{engine_task::EngineTaskCommand, ledger_writer::LedgerChange, takeover::EngineReservation},
};

impl EngineManager {
    pub(super) async fn execute(&mut self, command: Command) {
        if !self.leading {
            return;
        }
        match command {
            Command::Reserve { engine, generation, .. } => self.reserve(engine, generation).await,
            Command::Shrink { engine, bytes: Bytes::ZERO, .. } => {
                if let Some(placement) = self.reserved.remove(&engine) {
                    let engine = placement.reservation_owner(engine.replica);
                    self.change_ledger(&placement, LedgerChange::Release { engine, done: None });
                }
            }
            Command::Shrink { engine, generation, bytes, host } => {
                if let Some(placement) =
                    self.engine(&engine, generation).and_then(|task| task.placement.clone())
                {
                    let bytes = Bytes(
                        bytes.0.div_ceil(u64::from(placement.variant.spec.accelerators.count().max(1))),
                    );
                    let engine = placement.reservation_owner(engine.replica);
                    let sleeping_memory = SleepingMemory { bytes, host_bytes: host };
                    self.change_ledger(&placement, LedgerChange::MarkAsleep { engine, sleeping_memory });
                }
            }
            Command::Launch { engine, generation, .. } => self.launch(engine, generation).await,
            Command::Probe { engine, generation } => {
                self.send_command(engine, generation, EngineTaskCommand::Probe).await
            }
            Command::AwaitStub { engine, generation } => {
                self.send_command(engine, generation, EngineTaskCommand::Hold).await
            }
            Command::CloseGate { engine, generation, .. } => {
                self.send_command(engine, generation, EngineTaskCommand::CloseGate).await;
            }
            Command::OpenGate { engine, generation, .. } => {
                self.send_command(engine, generation, EngineTaskCommand::OpenGate).await;
            }
            Command::RevokeLeases { engine, generation, .. } => {
                self.send_command(engine, generation, EngineTaskCommand::Revoke).await
            }
            Command::Stop { engine, generation, .. } => {
                self.send_command(engine, generation, EngineTaskCommand::Stop).await
            }
            Command::Sleep { engine, generation, level } => {
                self.send_command(engine, generation, EngineTaskCommand::Sleep(level)).await;
            }
            Command::Wake { engine, generation, level } => {
                self.send_command(engine, generation, EngineTaskCommand::Wake(level)).await;
            }
            // A pool has no meter to read on demand. The driver handles the others.
            Command::ReadMeter { .. }
            | Command::Grant { .. }
            | Command::Refuse { .. }
            | Command::FinishOperation { .. } => {}
        }
    }

    async fn reserve(&mut self, engine: EngineId, generation: Generation) {
        if self.shared.external(&engine.model).is_some() {
            let accelerators = Vec::new();
            return self.shared.common.send_event(Event::Placed { engine, generation, accelerators }).await;
        }
        let task_placement = self.engine(&engine, generation).and_then(|task| task.placement.clone());
        let sleeps = task_placement.is_some();
        let Some(placement) = task_placement.or_else(|| self.shared.placement(&engine)) else {
            return self.shared.common.send_event(Event::Conflict { engine, generation }).await;
        };
        let Some(request) = placement.reservation_request(engine.replica) else {
            // The engine takes no memory of any pool.
            let accelerators = Vec::new();
            return self.shared.common.send_event(Event::Placed { engine, generation, accelerators }).await;
        };
        if sleeps {
            let keeps = Some(placement.sleeping_memory(SleepLevel::One));
            return self.change_ledger(
                &placement,
                LedgerChange::Reserve { engine, generation, request, sleeping_memory: keeps },
            );
        }
        // The engine's former reservation lasts until the engine is seen gone. A new reservation would share it and
        // vanish with it.
        let owner = &request.engine;
        let is_reserved =
            |orphans: &Vec<EngineReservation>| orphans.iter().any(|entry| entry.engine == *owner);
        if self.engines.contains(&engine)
            || self.orphans.get(&placement.owner.object).is_some_and(is_reserved)
        {
            return self.shared.common.send_event(Event::Conflict { engine, generation }).await;
        }
        self.reserved.insert(engine.clone(), Arc::clone(&placement));
        self.change_ledger(
            &placement,
            LedgerChange::Reserve { engine, generation, request, sleeping_memory: None },
        );
    }

    /// Sends a command to an engine task. If that generation has ended, sends the outcome of a vanished engine instead.
    pub(super) async fn send_command(
        &mut self,
        engine: EngineId,
        generation: Generation,
        command: EngineTaskCommand,
    ) {
        if self.engine(&engine, generation).is_some_and(|task| task.commands.push(command)) {
            return;
        }
        let outcome = match command {
            EngineTaskCommand::Probe => Event::Canary {
                engine,
                generation,
                verdict: CanaryVerdict::Failed(FailureCause::Unreachable),
            },
            EngineTaskCommand::CloseGate | EngineTaskCommand::Revoke => Event::Drained { engine, generation },
            EngineTaskCommand::Sleep(_) => {
                Event::SleepFailed { engine, generation, cause: FailureCause::Unreachable }
            }
            EngineTaskCommand::Wake(_) => {
                Event::WakeFailed { engine, generation, cause: FailureCause::Unreachable }
            }
            EngineTaskCommand::Stop => Event::Gone { engine, generation, cause: FailureCause::Stopped },
            EngineTaskCommand::Hold | EngineTaskCommand::OpenGate => return,
        };
        self.shared.common.send_event(outcome).await;
    }
}
