//! Pauses between the attempts of a node.
//!
//! Jitter keeps nodes that failed together, because their registry was away, from coming back together. It is drawn
//! from the node's name and the attempt, so a decision stays a function of its input.

use super::cause::WarmupCause;
use crate::{pairing::ids::NodeName, stable_hash::fnv1a, units::Millis};

const LONGEST: Millis = Millis::secs(300);
/// Registries that limit the rate count over minutes to hours, and attempts count too: the first pause is this many times
/// as long.
const RATE_LIMITED_FACTOR: u64 = 6;
const LONGEST_RATE_LIMITED: Millis = Millis::secs(900);

/// Returns the pause after the `attempt`-th attempt (from 1). It doubles from `first`, and has up to a quarter more as
/// jitter.
pub(super) fn delay(first: Millis, node: &NodeName, attempt: u32, cause: Option<&WarmupCause>) -> Millis {
    let (first, longest) = match cause {
        Some(WarmupCause::RateLimited) => {
            (Millis(first.0.saturating_mul(RATE_LIMITED_FACTOR)), LONGEST_RATE_LIMITED)
        }
        _ => (first, LONGEST),
    };
    let doubled = first.0.saturating_mul(1 << attempt.saturating_sub(1).min(16)).min(longest.0);
    let bytes = node.as_str().bytes().chain(attempt.to_le_bytes());
    // The low bits of the hash depend on all of the last bytes only after mixing.
    let hash = fnv1a(bytes);
    Millis(doubled + (hash ^ (hash >> 29)) % (doubled / 4).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Millis = Millis::secs(10);

    #[test]
    fn the_pause_doubles_from_ten_seconds_to_five_minutes_and_longer_for_a_rate_limit() {
        let node = NodeName::from("n1");
        for (attempt, least) in
            [(0, 10), (1, 10), (2, 20), (3, 40), (5, 160), (6, 300), (40, 300), (u32::MAX, 300)]
        {
            let pause = delay(FIRST, &node, attempt, None);
            assert!(pause >= Millis::secs(least) && pause.0 < least * 1250, "{attempt}: {pause}");
        }
        let limited = delay(FIRST, &node, 1, Some(&WarmupCause::RateLimited));
        assert!(limited >= Millis::secs(60) && limited < Millis::secs(75), "{limited}");
        assert!(delay(FIRST, &node, 9, Some(&WarmupCause::RateLimited)) >= Millis::secs(900));
    }

    #[test]
    fn nodes_that_fail_together_come_back_apart() {
        let names = (0..100).map(|n| NodeName::from(format!("node-{n}")));
        let pauses: std::collections::BTreeSet<Millis> =
            names.map(|name| delay(FIRST, &name, 1, None)).collect();
        assert!(pauses.len() > 80, "{} different pauses of 100", pauses.len());
    }
}
