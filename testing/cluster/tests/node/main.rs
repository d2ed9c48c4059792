//! What only a real kubelet can show: its probes, restarts and grace periods, with our images in real containers.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod cleanup;
mod containers;
mod deployments;
mod engine;
mod http;
mod site;
#[path = "../cluster/support.rs"]
#[allow(dead_code, reason = "the tests beside Pods that are processes need the rest of it")]
mod support;
