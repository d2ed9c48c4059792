//! The real gateway as a process over engine-sim: what clients and operators see. `timed.rs` holds the tests with time
//! bounds.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod bad_input;
mod choice;
mod cli;
mod cores;
mod crds;
mod dashboards;
mod demo;
mod descriptors;
mod docs;
mod explanations;
mod faults;
mod first_steps;
mod http2;
mod idle;
mod import;
mod keda;
mod keys;
mod launchers;
#[allow(dead_code, reason = "shared by two programs")]
mod live;
mod load_scripts;
mod measure;
mod operators;
mod order_commands;
mod passthrough;
mod proxies;
mod quickstarts;
mod refusals;
mod replicas;
mod restart;
mod scaling;
mod smuggling;
mod starts;
mod stub_row;
#[allow(dead_code, reason = "shared by two programs")]
mod support;
mod surface;
mod swap;
mod telemetry;
mod terminal;
mod tls;
mod trace;
mod waiting;
