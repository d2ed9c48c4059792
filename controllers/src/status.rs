//! Computes the statuses of Rouse's objects.
//!
//! These are pure functions from known facts to the wanted status. Separate functions ([`model_difference`],
//! [`pool_differs`]) decide whether a change is worth a write: an API server keeps every version of every object for a
//! while, and each write wakes all watchers.

mod model;
mod node;
mod pool;
#[cfg(test)]
mod tests;
mod usage;

pub use self::{
    model::{
        ModelFacts, ModelWaitReason, ResolvedModel, SaturationCondition, SaturationFacts, StatusDifference,
        max_last_request_lag, model_difference, model_status,
    },
    node::{node_condition, node_differs, node_status},
    pool::{pool_differs, pool_status},
    usage::{DeclaredMemoryUsage, usage},
};
