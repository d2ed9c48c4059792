//! The real gateway, as a process, over engine-sim: what clients and operators see.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod actuation;
mod bad_input;
mod choice;
mod cli;
mod demo;
mod disconnects;
mod docs;
mod faults;
mod live;
mod operators;
mod passage;
mod refusals;
mod restart;
mod support;
mod surface;
mod swap;
mod telemetry;
mod trace;
mod waiting;
