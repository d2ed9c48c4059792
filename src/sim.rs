//! A simulated world: clients, gates, engines, accelerators and faults, with a heap as its clock.
//!
//! The world runs the turn of the gateway's driver ([`crate::driver`]) over the real [`crate::fleet::Fleet`], so a wrong
//! decision shows here in milliseconds instead of on a production GPU at night. The world keeps its own account of the
//! physical truth (which process holds how much memory, which client still streams) and never asks the fleet about it.
//! So a decision is judged by its effect on the world, not by what the fleet believes.
//!
//! ```text
//!   event queue ─▶ clients, processes, meters, faults ─▶ inbox ─▶ the driver's turn, with checks
//!        ▲                                                                     │
//!        └────────────────────────── later events ◀────────────────────────────┘
//! ```
//!
//! The world is pure like the decisions it drives. All randomness comes from one seed, which therefore reproduces a
//! failure.

mod actions;
mod check;
mod client;
mod demand;
mod event_queue;
mod execute;
mod gate;
mod inbox;
mod inject;
mod key_usage;
mod machine;
mod platform;
mod platform_defect;
mod process;
mod quotes;
mod random;
mod restart;
mod routes;
mod simulated_model;
mod tally;
mod world;

pub mod cluster;
pub mod fcfs;
pub mod saturation;
pub mod scenario;
pub mod trace;
pub mod warmup;
pub mod what_if;

pub use client::SimulatedRequest;
pub use demand::{ArrivalPattern, ClientBehaviour, RequestSource};
pub use platform_defect::PlatformDefect;
pub use quotes::QuoteSample;
pub use random::SplitMix64;
pub use scenario::{FaultRates, HardwareProfile, Scenario, ScenarioAction};
pub use simulated_model::simulated_model;
pub use tally::Tally;
pub use world::{InvariantViolation, SimulatedWorld};
