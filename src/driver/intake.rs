//! Fills the batch of a turn, so that neither of two kinds of events delays the other.
//!
//! Clients decide how many requests arrive, and the engines' outcomes must not wait behind them: a flood of requests
//! for a cold model would hold up the start that all of them wait for. So outcomes go first, and each kind has a limit
//! of its own.

use crate::fleet::event::Event;

/// Maximum number of platform events in a turn, such as outcomes of commands and meter readings.
pub const MAX_PLATFORM_EVENTS_PER_TURN: usize = 256;
/// Maximum number of requests in a turn: arrivals, departures and orders. A flood of them must not delay the plan.
pub const MAX_REQUESTS_PER_TURN: usize = 256;

/// The queues that a driver's events wait in until a turn takes them.
pub trait EventQueues {
    /// Moves the oldest event of the platform to the batch. Returns false if none waits.
    fn take_platform_event(&mut self, batch: &mut Vec<Event>) -> bool;

    /// Handles the oldest request, which may add events to the batch. Returns false if none waits, or if the oldest one
    /// has to wait for the next turn.
    fn take_request(&mut self, batch: &mut Vec<Event>) -> bool;
}

/// Adds what waits to the batch: platform events first, and of each kind at most what a turn may have.
pub fn fill_batch(queues: &mut impl EventQueues, batch: &mut Vec<Event>) {
    let mut events = 0;
    while events < MAX_PLATFORM_EVENTS_PER_TURN && queues.take_platform_event(batch) {
        events += 1;
    }
    let mut requests = 0;
    while requests < MAX_REQUESTS_PER_TURN && queues.take_request(batch) {
        requests += 1;
    }
}
