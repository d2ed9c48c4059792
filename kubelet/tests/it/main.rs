//! The crate against a kubelet's device manager and against a container runtime, over real sockets.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod plugin;
mod scripted_plugin;
mod usage;
