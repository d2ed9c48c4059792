//! The real gateway, as a process, over engine-sim: what clients and operators see.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod actuation;
mod cli;
mod demo;
mod support;
mod swap;
mod trace;
