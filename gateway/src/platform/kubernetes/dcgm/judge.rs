//! Whether a sample says how it is now.

use rouse::units::{Bytes, Millis, Tick};

use super::Sample;

/// Why a sample is not believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Doubt {
    #[error(
        "the newest sample is {age} old, and the pool's settle is {settle}: is the exporter still scraped?"
    )]
    Old { age: Millis, settle: Millis },
    #[error(
        "the newest sample is from before something changed there, or less than the pool's settle, {settle}, after it"
    )]
    Early { settle: Millis },
}

/// What was in use, where that can be taken for what is: the sample is no older than `settle`, and was taken at least that
/// long after the last event there that changes much, the falling asleep of an engine, since what exporter and Prometheus
/// show lags behind by up to that.
///
/// # Errors
/// It cannot.
pub fn believable(
    sample: &Sample,
    last_sleep: Option<Tick>,
    settle: Millis,
    now: Tick,
) -> Result<Bytes, Doubt> {
    let age = now.since(sample.at);
    if age > settle {
        return Err(Doubt::Old { age, settle });
    }
    if last_sleep.is_some_and(|slept| sample.at < slept + settle) {
        return Err(Doubt::Early { settle });
    }
    Ok(sample.used)
}
