//! Polling of what sends no event, such as another process.

use std::{
    thread,
    time::{Duration, Instant},
};

/// Checks the condition every `interval` until it holds, for at most `patience`. Returns whether it holds.
#[expect(clippy::disallowed_methods, reason = "a deadline on the work of another process")]
pub fn holds_within(patience: Duration, interval: Duration, mut holds: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + patience;
    while !holds() {
        if Instant::now() >= end {
            return false;
        }
        pause(interval);
    }
    true
}

/// Sleeps between polls of another process, which sends no event.
#[expect(clippy::disallowed_methods, reason = "a test polls another process")]
pub fn pause(span: Duration) {
    thread::sleep(span);
}
