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
mod launch;
mod life;
mod log;
mod meter;
mod ready;
mod store;
mod supervisor;
mod work;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use arc_swap::ArcSwap;
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

use super::Platform;
use crate::{config::Config, routes::Reported};
use meter::Meters;
use store::{Lock, Store};
use supervisor::Supervisor;

pub use meter::{Error as MeterError, discover};
pub use store::Error;

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
    config: ArcSwap<Config>,
    events: mpsc::Sender<Event>,
    clock: Clock,
    store: Arc<Store>,
    meters: Arc<Meters>,
    lost: Mutex<BTreeSet<AcceleratorId>>,
    /// Given to engines that live, or are about to.
    ports: Mutex<BTreeSet<u16>>,
    /// What engines say about themselves in their present lives.
    reported: Mutex<BTreeMap<EngineId, (Generation, Arc<Reported>)>>,
}

impl Local {
    /// Locks the state directory and begins. On `events` come, in this order: what was learned earlier (`Recalled`),
    /// engines that already run (`Adopted`), `AdoptionDone`; then outcomes. Must be called inside a runtime, on which
    /// the platform's tasks run.
    pub fn start(config: Arc<Config>, events: mpsc::Sender<Event>, clock: Clock) -> Result<Self, Error> {
        let (store, lock) = Store::open(&config.state)?;
        let shared = Arc::new(Shared {
            store: Arc::new(store),
            config: ArcSwap::new(config),
            events,
            clock,
            meters: Arc::default(),
            lost: Mutex::default(),
            ports: Mutex::default(),
            reported: Mutex::default(),
        });
        let (commands, orders) = mpsc::unbounded_channel();
        let supervisor = Supervisor::new(Arc::clone(&shared));
        Ok(Self { commands, shared, supervisor: tokio::spawn(supervisor.run(orders)), lock })
    }

    /// From here on launches and probes go by `config`. Engines that run are not touched: stopping what is no longer
    /// configured is decided elsewhere.
    pub fn reconfigure(&self, config: Arc<Config>) {
        self.shared.config.store(config);
    }

    /// Keeps an engine's idle clock for the next start of the gateway. Cheap; call it every few seconds.
    pub fn note_idle(&self, engine: &EngineId, generation: Generation, last_end: Tick) {
        self.shared.store.note_idle(engine, generation, last_end);
    }

    /// Keeps what was learned for the next start; what is `None` now keeps its earlier value.
    pub fn save_learned(&self, learned: BTreeMap<ModelName, Learned>) {
        self.shared.store.learn(learned);
    }

    /// The log of this engine. There may be no such file yet.
    #[must_use]
    pub fn log(&self, engine: &EngineId) -> PathBuf {
        log::path(self.shared.store.folder(), engine)
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
        self.shared.reported(engine, generation)
    }
}

impl Shared {
    /// Waits when the driver is behind: an outcome may be late, never lost.
    async fn tell(&self, event: Event) {
        if self.events.send(event).await.is_err() {
            tracing::debug!("nobody listens to events any more");
        }
    }

    fn log(&self, engine: &EngineId) -> PathBuf {
        log::path(self.store.folder(), engine)
    }

    /// The same for everybody who asks about one life.
    fn reported(&self, engine: &EngineId, generation: Generation) -> Arc<Reported> {
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        let (life, latest) = reported.entry(engine.clone()).or_default();
        // Whoever still asks about an earlier life is answered with something that nobody writes to.
        if *life > generation {
            return Arc::default();
        }
        if *life < generation {
            (*life, *latest) = (generation, Arc::default());
        }
        Arc::clone(latest)
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
