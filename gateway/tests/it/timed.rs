//! Tests that assert times. They run one at a time and never beside the other tests, whose load would distort the
//! times.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod actuation;
mod disconnects;
mod disconnects_http2;
mod fairness;
mod flood;
#[allow(dead_code, reason = "shared by two programs")]
mod live;
mod rehearsal;
#[allow(dead_code, reason = "shared by two programs")]
mod support;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Each test holds this lock from its beginning to its end.
fn lock_timed_tests() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
