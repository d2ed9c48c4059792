//! Counts the engines that this thread has visited, so that tests can show that a turn visits few.

use std::cell::Cell;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

pub(super) fn record() {
    COUNT.set(COUNT.get() + 1);
}

pub(in crate::fleet) fn count() -> u64 {
    COUNT.get()
}

/// Forgets later visits: those of a check that production does not have.
pub(in crate::fleet) fn reset_to(count: u64) {
    COUNT.set(count);
}
