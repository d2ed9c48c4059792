//! What Rouse decides.
//!
//! ```text
//!   observe                    decide                         execute
//!   child exits, probes,  ──▶  Fleet::on(event, now)
//!   meters, arrivals           Fleet::plan(now) ──▶ commands ──▶ Platform::submit
//!        ▲                     Fleet::next_deadline()                 │
//!        └──────────────── outcomes come back as events ◀────────────┘
//! ```
//!
//! Everything here is synchronous: no clock, no randomness, no I/O. Time comes in as a [`units::Tick`]; every decision comes out with
//! its reason. `Cargo.toml` names no crate that could act, and `tests/purity.rs` looks for what the standard library offers.
//! [`shell_words`] reads command lines, and [`error_chain`] writes errors.
//!
//! The gateway's driver is the only caller of all three verbs, and the only reader of a clock.

// Bytes from outside are read nearly everywhere, and an index that is out of bounds ends every stream: releases abort at a panic.
#![warn(clippy::indexing_slicing)]

pub mod engine;
pub mod error_chain;
pub mod fault;
pub mod fleet;
pub mod model;
pub mod pairing;
pub mod shell_words;
#[allow(
    clippy::indexing_slicing,
    reason = "a simulated world, which no bytes from outside reach; a panic there is a finding"
)]
pub mod sim;
pub mod units;
