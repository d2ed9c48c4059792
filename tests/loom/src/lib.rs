//! The lease's count under loom: every interleaving of taking, closing and releasing.
//!
//! The count's own file is compiled here with loom's atomics. A crate of its own needs no compiler flag, which would have
//! everything that `rouse` depends on built a second time.

#![cfg(test)]

#[path = "../../../net/src/lease/count.rs"]
pub mod count;
mod interleavings;

/// What [`count`] is made of.
mod atomic {
    pub(super) use loom::sync::atomic::{AtomicU32, Ordering};
}
