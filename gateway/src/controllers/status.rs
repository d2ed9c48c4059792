//! What objects are told about themselves.
//!
//! Functions of what is known to the status that should be there. Whether that is worth a write is a question of its
//! own ([`model_differs`], [`pool_differs`]): an API server keeps every version of every object for a while, and wakes
//! everybody who watches.

mod model;
mod node;
mod pool;
#[cfg(test)]
mod tests;
mod usage;

pub use self::{
    model::{ModelFacts, ModelWaitReason, ResolvedModel, max_last_request_lag, model_differs, model_status},
    node::{node_condition, node_differs, node_status},
    pool::{pool_differs, pool_status},
    usage::{DeclaredMemoryUsage, usage},
};
