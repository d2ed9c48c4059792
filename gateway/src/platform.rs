//! Where engines run. A platform executes and observes; it decides nothing.

pub mod adapter;
pub mod local;

use rouse::fleet::command::Command;

/// Executes commands. `submit` starts the work and returns; every outcome comes back as an event on the channel that
/// the platform was made with, carrying the engine and generation of the command.
pub trait Platform: Send + Sync {
    fn submit(&self, command: Command);
}
