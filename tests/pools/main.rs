//! Per-model policies, pools whose accelerators another component selects, and pools with slots.
//!
//! The policies say when a model may be evicted and how its requests wait.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod harness;
mod model_policy;
mod observed_usage;
mod slot_accounting;
mod slot_harness;
mod slot_placement;
mod slot_swaps;
mod unit_accounting;
