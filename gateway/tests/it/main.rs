//! The real gateway, as a process, over engine-sim: what clients and operators see.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod actuation;
mod bad_input;
mod choice;
mod cli;
mod cores;
mod demo;
mod disconnects;
mod disconnects_http2;
mod docs;
mod fairness;
mod faults;
mod http2;
mod idle;
mod keys;
mod live;
mod operators;
mod passage;
mod refusals;
mod replicas;
mod restart;
mod smuggling;
mod support;
mod surface;
mod swap;
mod telemetry;
mod tls;
mod trace;
mod waiting;
