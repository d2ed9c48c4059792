//! The real launcher as a process, as its clients and its node see it. Its engines are small children and engine-sim.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod accelerators;
mod contract;
mod docs;
mod held;
mod logs;
#[path = "../it/support/nvml.rs"]
mod nvml;
mod processes;
mod readiness;
mod support;
mod watch;
