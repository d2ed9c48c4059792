//! Warmups against a real API server. The scheduler binds their Pods, and the tests play what kubelets report.
//!
//! The table in `tests/warmup/main.rs` names the test of each edge case.

mod actions;
mod bad_specs;
mod causes;
mod crashes;
mod engine_pulls;
mod fixture;
mod groups;
mod image_volumes;
mod kep;
mod kubelet;
mod limits;
mod models;
mod new_leaders;
mod node_changes;
mod nodes;
mod numbers;
pub(crate) mod objects;
mod pods;
mod report;
mod retried;
mod scale;
