//! What a gateway without turns would do with a trace: first come, first served.
//!
//! The measure to compare with. Requests start strictly in the order in which they came; a model that is not awake
//! takes the place of the one used longest ago, once that one's streams have ended. That is what a proxy with a lock
//! and a least-recently-used list does, and under mixed demand nearly every request pays for a swap.

use super::trace::TraceArrival;
use crate::units::Millis;

/// What it came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FcfsOutcome {
    /// Models put to sleep to make room for another.
    pub swaps: u64,
    /// The longest time between a request's arrival and its start.
    pub longest_wait: Millis,
}

/// Serves the trace with room for `places` awake models; a swap takes `swap` (sleep and wake together).
#[must_use]
pub fn serve(trace: &[TraceArrival], places: usize, swap: Millis) -> FcfsOutcome {
    let mut outcome = FcfsOutcome::default();
    // Awake models, the one used longest ago first, with the end of their last stream.
    let mut awake: Vec<(u32, Millis)> = Vec::new();
    let mut now = Millis::ZERO;
    for arrival in trace {
        now = now.max(arrival.at);
        let mut until = Millis::ZERO;
        if let Some(at) = awake.iter().position(|(model, _)| *model == arrival.model) {
            until = awake.remove(at).1;
        } else if awake.len() >= places.max(1) {
            let (_, busy) = awake.remove(0);
            outcome.swaps += 1;
            now = now.max(busy) + swap;
        } else {
            now = now + swap;
        }
        awake.push((arrival.model, until.max(now + arrival.stream)));
        outcome.longest_wait = outcome.longest_wait.max(Millis(now.0 - arrival.at.0));
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_models_by_turns_in_one_place_swap_every_time() {
        let stream = Millis(100);
        let trace: Vec<TraceArrival> = (0..10)
            .map(|n| TraceArrival { at: Millis(n), client: 0, model: (n % 2) as u32, stream })
            .collect();
        assert_eq!(serve(&trace, 1, Millis(50)).swaps, 9);
        assert_eq!(serve(&trace, 2, Millis(50)).swaps, 0);
        // Nine streams and ten swaps go before the last, which came at 9.
        assert_eq!(serve(&trace, 1, Millis(50)).longest_wait, Millis(9 * 100 + 10 * 50 - 9));
    }
}
