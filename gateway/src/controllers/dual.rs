//! Dual pods: from a requester's Pod to the Pod that runs its engine, and what is written on both.
//!
//! Objects in, objects or a user's error out. Who sees Pods and who makes them is [`crate::pairing`]; what may run at all is
//! decided by [`rouse::pairing`].

pub mod access;
mod base;
pub mod denied;
pub mod edition;
pub mod engines;
pub mod keys;
pub mod provider;
mod readiness;
pub mod record;
pub mod template;
