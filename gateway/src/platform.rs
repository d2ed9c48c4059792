//! Where engines run. A platform executes and observes; it decides nothing.

mod engine_client;
mod health;
pub mod kubernetes;
pub mod local;
mod readiness;

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use rouse::{
    fault::Fault,
    fleet::{Fleet, Plan, RoutingChanges, command::Command, event::LearnedMeasurements},
    model::{EngineId, ModelName},
    units::{Generation, Tick},
};

use crate::{config::Config, routing::EngineActivity};

/// Executes commands. `submit` starts the work and returns; every outcome comes back as an event on the channel that
/// the platform was made with, carrying the engine and generation of the command.
pub trait Platform: Send + Sync {
    fn submit(&self, command: Command);

    /// What this life of an engine says about itself, kept up to date by whoever watches it; nothing, where nobody does.
    fn engine_activity(&self, engine: &EngineId, generation: Generation) -> Arc<EngineActivity> {
        let _ = (engine, generation);
        Arc::default()
    }

    /// From here on launches and probes go by `config`. Engines that run are not touched: stopping what is no longer
    /// configured is decided elsewhere.
    fn reconfigure(&self, config: Arc<Config>) {
        let _ = config;
    }

    /// There is a gate in front of each engine, which others pass as well: the platform is given `CloseGate`, `OpenGate` and
    /// `Revoke`, too, and says when an engine is drained.
    fn has_stub_gates(&self) -> bool {
        false
    }

    /// What was decided and is recorded: for whoever tells others of it. Called once a turn.
    fn turn_completed(&self, fleet: &Fleet, plan: &Plan, changes: &RoutingChanges) {
        let _ = (fleet, plan, changes);
    }

    /// Somebody who waited was sent away, for this reason.
    fn request_refused(&self, fleet: &Fleet, fault: &Fault) {
        let _ = (fleet, fault);
    }

    /// Keeps an engine's idle clock for the next start of the gateway. Cheap; called every few seconds.
    fn note_idle(&self, engine: &EngineId, generation: Generation, last_end: Tick) {
        let _ = (engine, generation, last_end);
    }

    /// Keeps what was learned for the next start; what is `None` now keeps its earlier value.
    fn save_learned(&self, learned: BTreeMap<ModelName, LearnedMeasurements>) {
        let _ = learned;
    }

    /// The log of this engine, where it is a file of this machine. There may be no such file yet.
    fn log_path(&self, engine: &EngineId) -> Option<PathBuf> {
        let _ = engine;
        None
    }
}
