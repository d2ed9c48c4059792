//! Warmups against a real API server. The scheduler binds their Pods, and the tests play what kubelets report.

mod bad_specs;
mod causes;
mod crashes;
mod fixture;
mod groups;
mod kep;
mod kubelet;
mod limits;
mod models;
mod nodes;
pub(crate) mod objects;
mod pods;
mod report;
mod scale;
