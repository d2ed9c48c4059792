//! One machine: engines are child processes, accelerators are the machine's own.
//!
//! ```text
//!   submit ──▶ supervisor ──▶ one task per engine's life ──▶ events
//!                                │ owns the process and the work under way
//!                                └ adapter: HTTP on loopback
//! ```
//!
//! The supervisor hands each command to the life it means and keeps no state of its own beside that table. A life ends
//! only when its whole process group is seen gone. Dropping [`LocalPlatform`] ends every task and no engine: the next start
//! adopts them.
//!
//! What runs when:
//! * `Reserve` is placed at once: the decisions' ledger is the only one there is on one machine.
//! * An awake engine's health is asked every `timeouts.health.every`; an event is sent when the answer changes, and
//!   with every failing answer, so that a journal of a healthy night is short.

mod adopt;
mod engine_log;
mod engine_task;
mod launch;
mod meter;
mod start_checks;

mod engine_steps;
mod state_store;
mod supervisor;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rouse::{
    fleet::{
        command::Command,
        event::{Event, LearnedMeasurements},
    },
    model::{AcceleratorId, EngineId, ModelName},
    units::{Generation, Tick},
};
use rouse_net::lease::TickClock;
use tokio::{sync::mpsc, task::JoinHandle};

use super::{Platform, engine_client::PlatformContext};
use crate::{config::Config, routing::EngineActivity};
use meter::MeterReader;
use state_store::StateStore;
use supervisor::LocalSupervisor;

pub use meter::{Error as MeterError, discover};
pub use state_store::{Error, StateDirLock, is_in_use};

/// The engines of this machine.
#[derive(Debug)]
pub struct LocalPlatform {
    commands: mpsc::UnboundedSender<Command>,
    shared: Arc<LocalContext>,
    supervisor: JoinHandle<()>,
    lock: StateDirLock,
}

/// What every task of the platform uses.
#[derive(Debug)]
struct LocalContext {
    common: Arc<PlatformContext>,
    store: Arc<StateStore>,
    meters: Arc<MeterReader>,
    lost_accelerators: Mutex<BTreeSet<AcceleratorId>>,
    /// Given to engines that live, or are about to.
    reserved_ports: Mutex<BTreeSet<u16>>,
}

impl LocalPlatform {
    /// Begins in the state directory that is locked. On `events` come, in this order: what was learned earlier
    /// (`MeasurementsRestored`), engines that already run (`AdoptedProcess`), `AdoptionDone`; then outcomes. Must be called inside a runtime,
    /// on which the platform's tasks run.
    ///
    /// # Errors
    /// The folder for engines' logs cannot be made.
    pub fn start(
        lock: StateDirLock,
        config: Arc<Config>,
        events: mpsc::Sender<Event>,
        clock: TickClock,
    ) -> Result<Self, Error> {
        let store = StateStore::open(&lock)?;
        let shared = Arc::new(LocalContext {
            store: Arc::new(store),
            common: PlatformContext::new(config, events, clock),
            meters: Arc::default(),
            lost_accelerators: Mutex::default(),
            reserved_ports: Mutex::default(),
        });
        let (commands, orders) = mpsc::unbounded_channel();
        let supervisor = LocalSupervisor::new(Arc::clone(&shared));
        Ok(Self { commands, shared, supervisor: tokio::spawn(supervisor.run(orders)), lock })
    }

    /// Ends every task, saves what is unsaved and unlocks the state directory. Engines live on.
    pub async fn close(self) {
        let Self { commands, shared, supervisor, lock } = self;
        drop(commands);
        if let Err(error) = supervisor.await {
            tracing::error!(%error, "the platform's supervisor died");
        }
        shared.store.save().await;
        drop(lock);
    }
}

impl Platform for LocalPlatform {
    fn submit(&self, command: Command) {
        if self.commands.send(command).is_err() {
            tracing::error!("the platform's supervisor is gone");
        }
    }

    fn engine_activity(&self, engine: &EngineId, generation: Generation) -> Arc<EngineActivity> {
        self.shared.common.engine_activity(engine, generation)
    }

    fn reconfigure(&self, config: Arc<Config>) {
        self.shared.common.config.store(config);
    }

    fn note_idle(&self, engine: &EngineId, generation: Generation, last_end: Tick) {
        self.shared.store.note_idle(engine, generation, last_end);
    }

    fn save_learned(&self, learned: BTreeMap<ModelName, LearnedMeasurements>) {
        self.shared.store.merge_learned(learned);
    }

    fn log_path(&self, engine: &EngineId) -> Option<PathBuf> {
        Some(self.shared.log_path(engine))
    }
}

impl LocalContext {
    fn log_path(&self, engine: &EngineId) -> PathBuf {
        engine_log::path(self.store.folder(), engine)
    }

    /// This port belongs to an engine from here on.
    fn reserve_port(&self, port: u16) -> bool {
        self.ports().insert(port)
    }

    fn release_port(&self, port: u16) {
        self.ports().remove(&port);
    }

    fn ports(&self) -> MutexGuard<'_, BTreeSet<u16>> {
        self.reserved_ports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
