//! A baseline without turns: serves a trace first come, first served.
//!
//! Requests start strictly in the order of their arrival. A model that is not awake takes the place of the least
//! recently used one, once the streams of that model have ended. A proxy with a lock and a least-recently-used list
//! does the same, and under mixed demand nearly every request pays for a swap.

use super::trace::TraceArrival;
use crate::units::Millis;

/// Result of a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FcfsOutcome {
    /// Models put to sleep to make room for another.
    pub swaps: u64,
    /// The longest time between a request's arrival and its start.
    pub longest_wait: Millis,
}

/// Serves the trace with room for `slots` awake models. `swap` is the time of sleep and wake together.
#[must_use]
pub fn serve(trace: &[TraceArrival], slots: usize, swap: Millis) -> FcfsOutcome {
    let mut outcome = FcfsOutcome::default();
    // Awake models, least recently used first, with the end of their last stream.
    let mut awake: Vec<(u32, Millis)> = Vec::new();
    let mut now = Millis::ZERO;
    for arrival in trace {
        now = now.max(arrival.at);
        let mut until = Millis::ZERO;
        if let Some(at) = awake.iter().position(|(model, _)| *model == arrival.model) {
            until = awake.remove(at).1;
        } else if awake.len() >= slots.max(1) {
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
        // Nine streams and ten swaps precede the last request, which arrived at 9.
        assert_eq!(serve(&trace, 1, Millis(50)).longest_wait, Millis(9 * 100 + 10 * 50 - 9));
    }
}
