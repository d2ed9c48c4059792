//! The one simulated world: clients, gates, engines, accelerators and their faults, with a heap for a clock.
//!
//! It drives the real [`crate::fleet::Fleet`] exactly as the gateway's driver does, so whatever is wrong with a
//! decision shows here in milliseconds instead of on somebody's GPU at night. It keeps its own account of what is
//! physically true (which process holds how much memory, who still streams) and never asks the fleet about that: a
//! decision is judged by what it did to the world, not by what the fleet believes.
//!
//! ```text
//!   agenda ─▶ clients, processes, meters, faults ─▶ inbox ─▶ Fleet::on … plan ─▶ checks ─▶ execute
//!      ▲                                                                                     │
//!      └─────────────────────────────── later happenings ◀───────────────────────────────────┘
//! ```
//!
//! Pure like the decisions it drives: everything random comes from one seed, which therefore reproduces a failure.

mod check;
mod client;
mod demand;
mod event_queue;
mod execute;
mod gate;
mod inject;
mod key_usage;
mod machine;
mod process;
mod random;
mod tally;
mod world;

pub mod cluster;
pub mod fcfs;
pub mod journal;
pub mod scenario;
pub mod trace;
pub mod transcript;

pub use client::SimulatedRequest;
pub use demand::{ArrivalPattern, ClientBehaviour, RequestSource};
pub use random::SplitMix64;
pub use scenario::{FaultRates, HardwareProfile, Scenario, ScenarioAction};
pub use tally::Tally;
pub use world::{InvariantViolation, SimulatedWorld};
