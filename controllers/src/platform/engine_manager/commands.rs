//! Executes the fleet's commands.

use std::sync::Arc;

use rouse::{
    fault::FailureCause,
    fleet::{
        command::Command,
        event::{CanaryVerdict, Event},
    },
    model::{AcceleratorId, EngineId, SleepLevel},
    units::{Bytes, Generation},
};

use super::EngineManager;
use crate::{
    ledger::{ReservationLocation, SleepingMemory},
    platform::{
        ModelPlacement, engine_task::EngineTaskCommand, ledger_writer::LedgerChange,
        takeover::EngineReservation,
    },
};

impl EngineManager {
    pub(super) async fn execute(&mut self, command: Command) {
        if !self.leading {
            return;
        }
        match command {
            Command::Reserve { engine, generation, accelerators, .. } => {
                self.reserve(engine, generation, accelerators).await;
            }
            Command::Shrink { engine, generation, bytes, host } => {
                self.shrink(&engine, generation, bytes, host);
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

    /// Reduces the reservation of an asleep engine, or releases that of one that was not launched.
    ///
    /// An asleep engine may keep no memory at all, and has its reservation all the same.
    fn shrink(&mut self, engine: &EngineId, generation: Generation, bytes: Bytes, host: Bytes) {
        let task_placement = self.engine(engine, generation).and_then(|task| task.placement.clone());
        if let Some(placement) = task_placement {
            let bytes = bytes_per_accelerator(&placement, bytes);
            let sleeping_memory = SleepingMemory { bytes, host_bytes: host };
            let engine = placement.reservation_owner(engine.replica);
            self.change_ledger(&placement, LedgerChange::MarkAsleep { engine, sleeping_memory });
        } else if bytes == Bytes::ZERO
            && let Some(placement) = self.reserved.remove(engine)
        {
            let engine = placement.reservation_owner(engine.replica);
            self.change_ledger(&placement, LedgerChange::Release { engine, done: None });
        }
    }

    /// `accelerators`: in a pool of slots, those that the fleet chose for the engine.
    async fn reserve(&mut self, engine: EngineId, generation: Generation, accelerators: Vec<AcceleratorId>) {
        if self.shared.external(&engine.model).is_some() {
            let accelerators = Vec::new();
            return self.shared.common.send_event(Event::Placed { engine, generation, accelerators }).await;
        }
        let task_placement = self.engine(&engine, generation).and_then(|task| task.placement.clone());
        let sleeps = task_placement.is_some();
        let placement = task_placement
            .or_else(|| self.place(&self.shared.placement(&engine)?, accelerators))
            // The engine's node may just have lost an accelerator, or its model its pool.
            .filter(|placement| placement.is_placed());
        let Some(placement) = placement else {
            return self.shared.common.send_event(Event::Conflict { engine, generation }).await;
        };
        let Some(request) = placement.reservation_request(engine.replica) else {
            // The engine takes no memory of any pool.
            let accelerators = Vec::new();
            return self.shared.common.send_event(Event::Placed { engine, generation, accelerators }).await;
        };
        let capacities = placement.location().map(|location| self.shared.node_capacities(&location.node));
        let capacities = capacities.unwrap_or_default();
        if sleeps {
            let sleeping_memory = Some(placement.sleeping_memory(SleepLevel::One));
            let change = LedgerChange::Reserve { engine, generation, request, capacities, sleeping_memory };
            return self.change_ledger(&placement, change);
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
        let change = LedgerChange::Reserve { engine, generation, request, capacities, sleeping_memory: None };
        self.change_ledger(&placement, change);
    }

    /// Returns the placement on these accelerators; `None` if no node is known to have them.
    fn place(
        &self,
        placement: &Arc<ModelPlacement>,
        accelerators: Vec<AcceleratorId>,
    ) -> Option<Arc<ModelPlacement>> {
        if placement.slots.is_none() || accelerators.is_empty() {
            return Some(Arc::clone(placement));
        }
        let node = self.shared.node_of(&accelerators)?;
        Some(placement.on(ReservationLocation { node, accelerators }, &self.shared.sidecar))
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

/// Returns an engine's bytes on each accelerator from those on one account of the decisions, rounded up.
fn bytes_per_accelerator(placement: &ModelPlacement, bytes: Bytes) -> Bytes {
    if placement.slots.is_some() {
        // Each accelerator is an account.
        return bytes;
    }
    Bytes(bytes.0.div_ceil(u64::from(placement.variant.spec.accelerators.count().max(1))))
}
