//! Length of the back-off after a failure of an engine.
//!
//! The first failure is retried at once: most are a crash or a lost race for memory, and a client waits. From the
//! second on the pause doubles. Jitter keeps several engines that failed together (an accelerator fault, a full disk)
//! from starting together forever. It is drawn from the engine's own name and count, so a decision stays a function of
//! its input.

use crate::{model::EngineId, stable_hash::fnv1a, units::Millis};

/// The shortest pause that is not zero.
pub const MIN_DELAY: Millis = Millis::secs(1);
const MAX_DELAY_MS: u64 = 60_000;

/// Returns the pause after the `failures`-th failure in a row (from 1).
#[must_use]
pub fn delay(engine: &EngineId, failures: u32) -> Millis {
    if failures <= 1 {
        return Millis::ZERO;
    }
    let base = MIN_DELAY.0.saturating_mul(1 << (failures - 2).min(10)).min(MAX_DELAY_MS);
    Millis(base + jitter_hash(engine, failures) % (base / 4))
}

fn jitter_hash(engine: &EngineId, failures: u32) -> u64 {
    let bytes =
        engine.model.as_str().bytes().chain(engine.replica.to_le_bytes()).chain(failures.to_le_bytes());
    fnv1a(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_grows_to_its_cap_and_never_overflows() {
        let engine = EngineId::new("m".into(), 0);
        assert_eq!(delay(&engine, 1), Millis::ZERO);
        let pauses: Vec<_> = (2..40).map(|n| delay(&engine, n).0).collect();
        assert!(pauses[0] >= MIN_DELAY.0 && pauses[0] < MIN_DELAY.0 * 5 / 4);
        assert!(pauses.iter().all(|&p| p < MAX_DELAY_MS * 5 / 4));
        assert!(pauses[10..].iter().all(|&p| p >= MAX_DELAY_MS));
    }
}
