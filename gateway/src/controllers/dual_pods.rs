//! Dual pods: from a requester's Pod to the Pod that runs its engine, and what is written on both.
//!
//! Objects in, objects or a user's error out. Who sees Pods and who makes them is [`crate::pairing`]; what may run at all is
//! decided by [`rouse::pairing`].

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
