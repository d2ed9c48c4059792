//! Where engines run. A platform executes and observes; it decides nothing.

pub mod local;

use std::sync::Arc;

use rouse::{fleet::command::Command, model::EngineId, units::Generation};

use crate::routes::Reported;

/// Executes commands. `submit` starts the work and returns; every outcome comes back as an event on the channel that
/// the platform was made with, carrying the engine and generation of the command.
pub trait Platform: Send + Sync {
    fn submit(&self, command: Command);

    /// What this life of an engine says about itself, kept up to date by whoever watches it; nothing, where nobody does.
    fn reported(&self, engine: &EngineId, generation: Generation) -> Arc<Reported> {
        let _ = (engine, generation);
        Arc::default()
    }
}
