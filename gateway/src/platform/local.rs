//! The single-machine platform: engines are child processes, accelerators are the machine's own.
//!
//! ```text
//!   submit ──▶ supervisor ──▶ one task per engine generation ──▶ events
//!                                │ owns the process and the work under way
//!                                └ adapter: HTTP on loopback
//! ```
//!
//! The supervisor hands each command to the generation that it names, and keeps no state besides that table. A
//! generation ends only when its whole process group is seen gone. Dropping [`LocalPlatform`] ends every task and no
//! engine: the next start adopts the engines.
//!
//! What runs when:
//! * `Reserve` succeeds at once: on one machine the fleet's ledger is the only ledger.
//! * The watch polls an awake engine's health every `timeouts.health.every`. It sends an event when the result changes,
//!   and for every failing result, so the journal of a healthy night is short.

mod adopt;
mod engine_log;
mod engine_memory;
mod engine_task;
mod launch;
mod meter;
mod start_checks;

mod engine_steps;
mod state_store;
mod supervisor;

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use rouse::{
    engine::Engine,
    fleet::{
        Fleet, Plan, RoutingChanges,
        command::Command,
        event::{Event, LearnedMeasurements},
    },
    model::{AcceleratorId, EngineId, ModelName},
    units::{Generation, Tick},
};
use rouse_config::Config;
use rouse_net::{lease::TickClock, port::ClaimedPort};
use rouse_platform::{EngineActivity, Platform, engine_client::PlatformContext};
use tokio::{
    sync::{
        Notify,
        futures::OwnedNotified,
        mpsc::{self, error::TrySendError},
    },
    task::JoinHandle,
};

use meter::MeterReader;
use state_store::{StateStore, StoredFailure};
use supervisor::LocalSupervisor;

pub use engine_memory::{EngineMemoryMeter, MemoryMeterError, MemoryReading, RecordedEngine};
pub(crate) use meter::names_owners;
pub use meter::{Error as MeterError, discover};
pub use state_store::{Error, StateDirLock, is_in_use};

/// Environment variable that marks every process of an engine.
pub(crate) const ENGINE_MARK: &str = launch::MARK_VAR;

/// Commands that may wait for the supervisor.
///
/// The fleet has at most a handful outstanding for each engine, and one for each accelerator. So a full queue means
/// that the supervisor or the fleet is broken, on any machine.
const MAX_PENDING_COMMANDS: usize = 1 << 16;

/// Runs engines on this machine.
#[derive(Debug)]
pub struct LocalPlatform {
    commands: mpsc::Sender<Command>,
    /// Notified when a command cannot be submitted.
    command_lost: Arc<Notify>,
    shared: Arc<LocalContext>,
    supervisor: JoinHandle<()>,
    lock: StateDirLock,
    /// The stored failures were compared with those of the whole fleet. From then on, changes suffice.
    failures_compared: AtomicBool,
}

/// State shared by all tasks of the platform.
#[derive(Debug)]
struct LocalContext {
    common: Arc<PlatformContext>,
    store: Arc<StateStore>,
    meters: Arc<MeterReader>,
    lost_accelerators: Mutex<BTreeSet<AcceleratorId>>,
    /// Ports of engines that run or are about to start. `None`: another process had claimed the port of an engine that
    /// was adopted.
    reserved_ports: Mutex<BTreeMap<u16, Option<ClaimedPort>>>,
}

impl LocalPlatform {
    /// Starts the platform in the locked state directory.
    ///
    /// `events` receives, in this order: earlier learned measurements (`MeasurementsRestored`), engines that already
    /// run (`Adopted`), earlier failures (`FailureRestored`), `AdoptionDone`, then outcomes. Must be called inside a
    /// runtime, which runs the platform's tasks.
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
        let (commands, orders) = mpsc::channel(MAX_PENDING_COMMANDS);
        let supervisor = LocalSupervisor::new(Arc::clone(&shared));
        let supervisor = tokio::spawn(supervisor.run(orders));
        Ok(Self {
            commands,
            command_lost: Arc::default(),
            shared,
            supervisor,
            lock,
            failures_compared: AtomicBool::new(false),
        })
    }

    /// Completes when a command was lost. The process must end then, since the fleet waits for the outcome.
    pub fn command_lost(&self) -> OwnedNotified {
        Arc::clone(&self.command_lost).notified_owned()
    }

    /// Ends every task, saves unsaved state and unlocks the state directory. Engines keep running.
    pub async fn close(self) {
        let Self { commands, shared, supervisor, lock, .. } = self;
        drop(commands);
        if let Err(error) = supervisor.await {
            tracing::error!(%error, "engine supervisor failed");
        }
        shared.store.save().await;
        drop(lock);
    }
}

impl Platform for LocalPlatform {
    fn submit(&self, command: Command) {
        // The supervisor may itself wait for the driver to take an event, so the driver must not wait for it.
        let (command, reason) = match self.commands.try_send(command) {
            Ok(()) => return,
            Err(TrySendError::Full(command)) => (command, "too many commands wait for the engine supervisor"),
            Err(TrySendError::Closed(command)) => (command, "the engine supervisor has ended"),
        };
        tracing::error!(%command, reason, "command lost");
        self.command_lost.notify_one();
    }

    fn engine_activity(&self, engine: &EngineId, generation: Generation) -> Arc<EngineActivity> {
        self.shared.common.engine_activity(engine, generation)
    }

    fn reconfigure(&self, config: Arc<Config>) {
        self.shared.common.config.store(config);
    }

    /// Saves the failures that changed.
    fn turn_completed(&self, fleet: &Fleet, _: &Plan, changes: &RoutingChanges) {
        // Before the end of the adoption, the fleet does not know the failures that an earlier gateway stored.
        if !fleet.is_ready() {
            return;
        }
        let all = !self.failures_compared.swap(true, Ordering::Relaxed) || changes.reconfigured;
        if !all && changes.rerouted().next().is_none() {
            return;
        }
        // A turn costs what it changed, not what is configured.
        let engines: Vec<&Engine> = if all {
            fleet.engines().collect()
        } else {
            changes.rerouted().flat_map(|model| fleet.engines_of(model)).collect()
        };
        let failures = engines.into_iter().filter_map(|engine| {
            let fingerprint = fleet.engine_spec(&engine.id)?.fingerprint;
            Some((engine.id.clone(), StoredFailure::of(engine, fingerprint)?))
        });
        let concerns = |model: &ModelName| all || changes.may_reroute(model);
        self.shared.store.set_failures(concerns, failures.collect());
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

    /// Reserves this port for an engine; false if it is already reserved.
    fn reserve_port(&self, port: u16, claim: Option<ClaimedPort>) -> bool {
        match self.ports().entry(port) {
            Entry::Vacant(vacant) => {
                vacant.insert(claim);
                true
            }
            Entry::Occupied(_) => false,
        }
    }

    fn release_port(&self, port: u16) {
        self.ports().remove(&port);
    }

    fn ports(&self) -> MutexGuard<'_, BTreeMap<u16, Option<ClaimedPort>>> {
        self.reserved_ports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
