//! The real `rouse-stub proxy` over real sockets, in front of engine-sim or a scripted engine. Tests with time limits
//! are in `timed.rs`.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod accelerators;
mod contract;
mod early;
mod ends;
mod gate;
mod gpu;
mod limits;
mod load_reports;
mod memory_limits;
mod passthrough;
mod probes;
mod public_cases;
mod readiness;
mod relay;
mod set_log;
#[allow(dead_code, reason = "shared by two programs")]
mod support;
mod watching;
