//! What models say of themselves (when they may be put away, how their requests wait), and pools of accelerators of which
//! somebody else picks the ones.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod harness;
mod model_policy;
mod observed_usage;
mod unit_accounting;
