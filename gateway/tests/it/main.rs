//! The real gateway, as a process, over engine-sim: what clients and operators see.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod actuation;
mod bad_input;
mod cli;
mod demo;
mod disconnects;
mod disconnects_http2;
mod docs;
mod faults;
mod http2;
mod live;
mod operators;
mod refusals;
mod restart;
mod smuggling;
mod support;
mod swap;
mod tls;
mod trace;
mod waiting;
