//! Tests of the test cluster: its API server is real, its faults happen, and its Pods behave like a kubelet's.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod api;
mod cleanup;
mod devices;
mod faults;
mod lifecycle;
mod links;
mod pods;
mod probes;
mod program;
mod support;
