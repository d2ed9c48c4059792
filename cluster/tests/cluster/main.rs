//! The test cluster tested: that its API server is real, that its faults happen, and that its Pods behave as a kubelet's.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod api;
mod devices;
mod faults;
mod ground;
mod lifecycle;
mod links;
mod pods;
mod probes;
mod program;
mod support;
