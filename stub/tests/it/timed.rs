//! Proxy tests with time limits. They run one at a time and apart from the other tests, whose work would disturb the
//! measurements.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod cancel;
mod deadlines;
#[allow(dead_code, reason = "shared by two programs")]
mod support;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Each test holds this lock from its beginning to its end.
fn lock_timed_tests() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
