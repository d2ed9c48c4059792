//! Decisions of Rouse, without I/O.
//!
//! ```text
//!   observe                    decide                         execute
//!   child exits, probes,  ──▶  Fleet::on(event, now)
//!   meters, arrivals           Fleet::plan(now) ──▶ commands ──▶ Platform::submit
//!        ▲                     Fleet::next_deadline()                 │
//!        └──────────────── outcomes come back as events ◀────────────┘
//! ```
//!
//! Everything here is synchronous: no clock, no randomness, no I/O. Time enters as a [`units::Tick`]; every decision
//! has a reason. `Cargo.toml` names no crate that performs I/O, `clippy.toml` lists the types of the standard library
//! that this crate must not use, and `tests/lints.rs` rejects the modules. [`shell_words`] parses command lines,
//! [`variables`] replaces `$(NAME)`, [`error_chain`] renders errors, [`shared_map`] has the maps that planning can copy
//! cheaply, [`due_times`] the times at which things are due, and [`stable_hash`] the hash that stands for chance.
//!
//! [`fleet`] decides for models: `plan` starts and evicts engines, `dispatch` grants and refuses, `explain` words the
//! reasons. [`pairing`] decides for dual pods. [`saturation`] decides how many replicas each variant of a model runs.
//! [`warmup`] decides which images and actions nodes get ahead of their Pods. [`slots`] has the ledger of devices that
//! several containers share. [`fault`] has every refusal. [`journal`] is the format in which the fleet's events are
//! kept. [`sim`] simulates worlds for all of them.
//!
//! [`driver`] calls these three functions, in the order of its turn. Gateway and simulator run that turn, each over its
//! own clock; in production, the gateway's driver alone reads the clock for them.

// Nearly every module reads bytes from outside, and an index out of bounds ends every stream: releases abort at a
// panic.
#![warn(clippy::indexing_slicing)]
#![warn(clippy::disallowed_types)]

#[macro_use]
mod string_ids;

pub mod driver;
pub mod due_times;
pub mod engine;
pub mod error_chain;
pub mod fault;
pub mod fleet;
pub mod journal;
pub mod model;
pub mod pairing;
pub mod saturation;
pub mod shared_map;
pub mod shell_words;
#[allow(
    clippy::indexing_slicing,
    reason = "a simulated world, which no bytes from outside reach; a panic there is a finding"
)]
pub mod sim;
pub mod slots;
pub mod stable_hash;
pub mod units;
pub mod variables;
pub mod warmup;
