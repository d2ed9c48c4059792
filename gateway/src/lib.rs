//! The gateway: [`serve`] accepts connections, [`http`] handles one request, [`keys`] limits clients, [`routing`] chooses
//! the engine, [`driver`] turns events into commands, and [`platform`] executes them on one machine, where
//! `local_scaler` scales models by their load. [`app`] wires all of it.

// As in the crate `rouse`: release builds abort at a panic, which ends all streams.
#![warn(clippy::indexing_slicing)]

pub mod app;
pub mod cli;
pub mod demo;
pub mod driver;
pub mod http;
pub mod keys;
mod local_scaler;
pub mod metrics;
pub mod platform;
pub mod routing;
pub mod serve;
pub mod telemetry;

use tikv_jemallocator::Jemalloc;

/// The allocator of the gateway and of the programs that measure it ([ADR 16](../../docs/adr/0016-jemalloc.md)).
#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;
