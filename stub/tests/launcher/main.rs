//! The real launcher, as a process, over small children and engine-sim: what its clients and its node see.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod accelerators;
mod contract;
mod docs;
mod held;
mod lives;
mod logs;
#[path = "../it/support/nvml.rs"]
mod nvml;
mod readiness;
mod support;
mod watch;
