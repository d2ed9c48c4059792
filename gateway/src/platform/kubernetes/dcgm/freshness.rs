//! Whether a sample says how it is now.

use rouse::units::{Bytes, Millis, Tick};

use super::MemorySample;

/// Why a sample is not believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UntrustedSample {
    #[error(
        "the newest sample is {age} old, and the pool's meterLag is {meter_lag}: is the exporter still scraped?"
    )]
    TooOld { age: Millis, meter_lag: Millis },
    #[error(
        "the newest sample is from before something changed there, or less than the pool's meterLag, {meter_lag}, after it"
    )]
    TooEarly { meter_lag: Millis },
}

/// What was in use, where that can be taken for what is: the sample is no older than `meter_lag`, and was taken at least that
/// long after the last event there that changes much, the falling asleep of an engine, since what exporter and Prometheus
/// show lags behind by up to that.
///
/// # Errors
/// It cannot.
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
