//! Decides whether a memory sample still describes the present.

use rouse::units::{Bytes, Millis, Tick};

use super::MemorySample;

/// Why a sample is not trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UntrustedSample {
    #[error(
        "the newest sample is {age} old, but the pool's meterLag is {meter_lag}; check that the exporter is still scraped"
    )]
    TooOld { age: Millis, meter_lag: Millis },
    #[error(
        "the newest sample is from before the last memory change there, or less than the pool's meterLag ({meter_lag}) after it"
    )]
    TooEarly { meter_lag: Millis },
}

/// Returns the sampled memory use if it also holds now.
///
/// The sample must be no older than `settle`, the pool's meter lag. It must also be taken at least that long after the
/// last event there that changes much: an engine falling asleep. Exporter and Prometheus lag behind by up to that.
///
/// # Errors
/// The sample is too old or too early.
pub fn trusted_usage(
    sample: &MemorySample,
    last_sleep: Option<Tick>,
    settle: Millis,
    now: Tick,
) -> Result<Bytes, UntrustedSample> {
    let age = now.since(sample.at);
    if age > settle {
        return Err(UntrustedSample::TooOld { age, meter_lag: settle });
    }
    if last_sleep.is_some_and(|slept| sample.at < slept + settle) {
        return Err(UntrustedSample::TooEarly { meter_lag: settle });
    }
    Ok(sample.used)
}
