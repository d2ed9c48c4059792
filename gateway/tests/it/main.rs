//! The real gateway, as a process, over engine-sim: what clients and operators see.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod actuation;
mod bad_input;
mod cli;
mod demo;
mod disconnects;
mod docs;
mod fairness;
mod faults;
mod live;
mod operators;
mod refusals;
mod replicas;
mod restart;
mod support;
mod swap;
mod trace;
mod waiting;
