//! Slots of shared devices against a real API server. Node agents are processes, and the tests play their kubelets.

mod accelerators;
mod agent;
pub(crate) mod agent_process;
mod appliance;
mod claims;
mod crashes;
mod deletion;
mod device;
mod fixture;
mod leader;
mod models;
mod races;
mod reclaim;
mod rejections;
mod restarts;
