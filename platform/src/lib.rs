//! What every platform of engines shares: the trait that the driver drives, and the client, probes and health watch of
//! one engine.
//!
//! A platform executes and observes; it decides nothing. There are two: child processes of the gateway, in
//! `gateway/src/platform/local.rs`, and Pods, in `rouse_controllers::platform`.

#![warn(clippy::indexing_slicing)]

mod driver_client;
mod engine_activity;
pub mod engine_client;
pub mod health;
mod load_peaks;
mod load_reader;
pub mod metric_builder;
mod poll_if_some;
pub mod readiness;
mod saturation_monitor;
mod shared_driver;
pub mod upstream_tls;

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use rouse::{
    fault::Fault,
    fleet::{Fleet, Plan, RoutingChanges, command::Command, event::LearnedMeasurements},
    model::{EngineId, ModelName},
    units::{Generation, Tick},
};
use rouse_config::Config;

pub use driver_client::DriverClient;
pub use engine_activity::EngineActivity;
pub use load_peaks::{EngineReading, LoadPeaks};
pub use poll_if_some::poll_if_some;
pub use saturation_monitor::SaturationMonitor;
pub use shared_driver::SharedDriver;

/// Reports why something is not as it should be; `None` if it is.
pub type ReadinessCheck = dyn Fn() -> Option<String> + Send + Sync;

/// Executes the fleet's commands.
///
/// [`Platform::submit`] starts the work and returns. Every outcome arrives as an event, with the command's engine and
/// generation, on the channel that the platform was constructed with.
pub trait Platform: Send + Sync {
    fn submit(&self, command: Command);

    /// Returns the activity record of this engine generation; stays empty without a health watch.
    fn engine_activity(&self, engine: &EngineId, generation: Generation) -> Arc<EngineActivity> {
        let _ = (engine, generation);
        Arc::default()
    }

    /// Uses `config` for all later launches and probes.
    ///
    /// Running engines are not touched: the fleet decides which of them to stop.
    fn reconfigure(&self, config: Arc<Config>) {
        let _ = config;
    }

    /// Whether each engine has a stub gate, which other gateways' requests pass, too.
    ///
    /// If so, the driver also submits `CloseGate`, `OpenGate` and `RevokeLeases`, and the platform reports when an
    /// engine is drained.
    fn has_stub_gates(&self) -> bool {
        false
    }

    /// Publishes the recorded decisions of one driver turn. Called once a turn.
    fn turn_completed(&self, fleet: &Fleet, plan: &Plan, changes: &RoutingChanges) {
        let _ = (fleet, plan, changes);
    }

    /// Publishes that the fleet refused a parked request with this fault.
    fn request_refused(&self, fleet: &Fleet, fault: &Fault) {
        let _ = (fleet, fault);
    }

    /// Saves an engine's idle clock for the next start of the gateway. Cheap; called every few seconds.
    fn note_idle(&self, engine: &EngineId, generation: Generation, last_end: Tick) {
        let _ = (engine, generation, last_end);
    }

    /// Saves learned measurements for the next start. A `None` keeps the earlier value.
    fn save_learned(&self, learned: BTreeMap<ModelName, LearnedMeasurements>) {
        let _ = learned;
    }

    /// Returns the path of this engine's log file, if logs are local files. The file may not exist yet.
    fn log_path(&self, engine: &EngineId) -> Option<PathBuf> {
        let _ = engine;
        None
    }
}
