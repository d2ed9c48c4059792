//! The lease count under loom: every interleaving of taking, closing and releasing.
//!
//! This crate compiles the count's own file with loom's atomics. A separate crate needs no compiler flag, which would
//! rebuild all dependencies of `rouse`.

#![cfg(test)]

#[path = "../../../net/src/lease/count.rs"]
pub mod count;
mod interleavings;

/// The atomics that [`count`] uses.
mod atomic {
    pub(super) use loom::sync::atomic::{AtomicU32, Ordering};
}
