//! The same where it is a time that counts: one test at a time, and none of the others meanwhile, whose work would be
//! measured with it.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod cancel;
mod deadlines;
#[allow(dead_code, reason = "shared by two programs")]
mod support;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Held by each test from its beginning to its end.
fn lock_timed_tests() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
