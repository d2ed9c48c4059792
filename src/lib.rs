//! What Rouse decides, and the streaming core that carries it out.
//!
//! ```text
//!   observe                    decide                         execute
//!   child exits, probes,  ──▶  Fleet::on(event, now)
//!   meters, arrivals           Fleet::plan(now) ──▶ commands ──▶ Platform::submit
//!        ▲                     Fleet::next_deadline()                 │
//!        └──────────────── outcomes come back as events ◀────────────┘
//! ```
//!
//! The crate has two halves, and `tests/purity.rs` fails when the first imports what only the second may:
//!
//! * **decide**: [`units`], [`model`], [`engine`], [`fleet`], [`pairing`], [`sim`]. Synchronous; no clock, no randomness, no I/O, no
//!   tokio, no hyper. Time comes in as a [`units::Tick`]; every decision comes out with its reason.
//! * **carry**: [`lease`], [`openai`], [`relay`], [`client`], [`tcp`], [`origin`], [`aside`]: holds requests, counts them, moves their
//!   bytes.
//!   [`caller`], [`adapter`], [`process`], [`nvml`], [`limits`], [`files`], [`port`]: what engines, their processes, accelerators, files and
//!   ports are asked. [`wire`]: what the parts of Rouse say to each other; [`words`]: command lines; [`causes`]: errors in words.
//!
//! The gateway's driver is the only caller of all three verbs, and the only reader of a clock.

// Bytes from outside are read nearly everywhere, and an index that is out of bounds ends every stream: releases abort at a panic.
#![warn(clippy::indexing_slicing)]

pub mod adapter;
pub mod aside;
pub mod caller;
pub mod causes;
pub mod client;
pub mod engine;
pub mod fault;
pub mod files;
pub mod fleet;
pub mod lease;
pub mod limits;
pub mod model;
pub mod nvml;
pub mod openai;
pub mod origin;
pub mod pairing;
pub mod port;
pub mod process;
pub mod relay;
#[allow(
    clippy::indexing_slicing,
    reason = "a simulated world, which no bytes from outside reach; a panic there is a finding"
)]
pub mod sim;
pub mod tcp;
pub mod units;
pub mod wire;
pub mod words;
