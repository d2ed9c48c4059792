//! One machine: engines are child processes, accelerators are the machine's own.
//!
//! ```text
//!   submit ──▶ supervisor ──▶ one task per engine's life ──▶ events
//!                                │ owns the process and the work under way
//!                                └ adapter: HTTP on loopback
//! ```
//!
//! The supervisor hands each command to the life it means and keeps no state of its own beside that table. A life ends
//! only when its whole process group is seen gone. Dropping [`Local`] ends every task and no engine: the next start
//! adopts them.
//!
//! What runs when:
//! * `Reserve` is placed at once: the decisions' ledger is the only one there is on one machine.
//! * An awake engine's health is asked every `timeouts.health.every`; an event is sent when the answer changes, and
//!   with every failing answer, so that a journal of a healthy night is short.

mod adopt;
mod fit;
mod launch;
mod life;
mod log;
mod meter;

mod store;
mod supervisor;
mod work;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rouse::{
    fleet::{
        command::Command,
        event::{Event, Learned},
    },
    lease::Clock,
    model::{AcceleratorId, EngineId, ModelName},
    units::{Generation, Tick},
};
use tokio::{sync::mpsc, task::JoinHandle};

use super::{Platform, contact::Common};
use crate::{config::Config, routes::Reported};
use meter::Meters;
use store::Store;
use supervisor::Supervisor;

pub use meter::{Error as MeterError, discover};
pub use store::{Error, Lock, runs_in};

/// The engines of this machine.
#[derive(Debug)]
pub struct Local {
    commands: mpsc::UnboundedSender<Command>,
    shared: Arc<Shared>,
    supervisor: JoinHandle<()>,
    lock: Lock,
}

/// What every task of the platform uses.
#[derive(Debug)]
struct Shared {
    common: Arc<Common>,
    store: Arc<Store>,
    meters: Arc<Meters>,
    lost: Mutex<BTreeSet<AcceleratorId>>,
    /// Given to engines that live, or are about to.
    ports: Mutex<BTreeSet<u16>>,
}

impl Local {
    /// Begins in the state directory that is locked. On `events` come, in this order: what was learned earlier
    /// (`Recalled`), engines that already run (`Adopted`), `AdoptionDone`; then outcomes. Must be called inside a runtime,
    /// on which the platform's tasks run.
    ///
    /// # Errors
    /// The folder for engines' logs cannot be made.
    pub fn start(
        lock: Lock,
        config: Arc<Config>,
        events: mpsc::Sender<Event>,
        clock: Clock,
    ) -> Result<Self, Error> {
        let store = Store::open(&lock)?;
        let shared = Arc::new(Shared {
            store: Arc::new(store),
            common: Common::new(config, events, clock),
            meters: Arc::default(),
            lost: Mutex::default(),
            ports: Mutex::default(),
        });
        let (commands, orders) = mpsc::unbounded_channel();
        let supervisor = Supervisor::new(Arc::clone(&shared));
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

impl Platform for Local {
    fn submit(&self, command: Command) {
        if self.commands.send(command).is_err() {
            tracing::error!("the platform's supervisor is gone");
        }
    }

    fn reported(&self, engine: &EngineId, generation: Generation) -> Arc<Reported> {
        self.shared.common.reported(engine, generation)
    }

    fn reconfigure(&self, config: Arc<Config>) {
        self.shared.common.config.store(config);
    }

    fn note_idle(&self, engine: &EngineId, generation: Generation, last_end: Tick) {
        self.shared.store.note_idle(engine, generation, last_end);
    }

    fn save_learned(&self, learned: BTreeMap<ModelName, Learned>) {
        self.shared.store.learn(learned);
    }

    fn log(&self, engine: &EngineId) -> Option<PathBuf> {
        Some(self.shared.log(engine))
    }
}

impl Shared {
    fn log(&self, engine: &EngineId) -> PathBuf {
        log::path(self.store.folder(), engine)
    }

    /// This port belongs to an engine from here on.
    fn keep_port(&self, port: u16) -> bool {
        self.ports().insert(port)
    }

    fn release_port(&self, port: u16) {
        self.ports().remove(&port);
    }

    fn ports(&self) -> MutexGuard<'_, BTreeSet<u16>> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
