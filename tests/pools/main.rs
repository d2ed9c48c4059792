//! Per-model policies, and pools whose accelerators another component selects.
//!
//! The policies say when a model may be evicted and how its requests wait.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod harness;
mod model_policy;
mod observed_usage;
mod unit_accounting;
