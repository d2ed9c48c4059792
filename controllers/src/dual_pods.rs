//! Dual pods: builds the Pod that runs a requester's engine, and the metadata on both Pods.
//!
//! Functions here take objects and return objects or a user's error. [`crate::pairing`] watches and creates Pods;
//! [`rouse::pairing`] decides what may run.

pub mod access;
pub mod admission_denial;
mod base;
pub mod keys;
pub mod launcher_engines;
pub mod provider;
mod readiness;
pub mod record;
pub mod template;
pub mod template_revision;
