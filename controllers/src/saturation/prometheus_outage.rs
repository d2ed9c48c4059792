//! Bridges short outages of Prometheus: its last answer counts for the window, as a reading of an engine does.
//!
//! Otherwise one lost query would change the condition of every scaled model, and the next answer would change it back.

use rouse::units::{Millis, Tick};

use super::execute::PeaksByEngine;
use crate::prometheus_api::PrometheusError;

/// The last successful answer, and when it came.
#[derive(Debug, Default)]
pub(super) struct LastAnswer(Option<(Tick, PeaksByEngine)>);

impl LastAnswer {
    /// Takes an answer, and returns it. In place of a failed one it returns the last one while that is in the window.
    ///
    /// A new leader has no last answer, so it knows nothing until Prometheus answers.
    pub(super) fn update(
        &mut self,
        answer: Result<PeaksByEngine, PrometheusError>,
        window: Millis,
        now: Tick,
    ) -> Result<PeaksByEngine, PrometheusError> {
        match answer {
            Ok(peaks) => {
                self.0 = Some((now, peaks.clone()));
                Ok(peaks)
            }
            Err(error) => match &self.0 {
                Some((at, peaks)) if *at + window >= now => Ok(peaks.clone()),
                _ => Err(error),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use rouse::{model::EngineId, saturation::PeakLoad, units::Generation};

    use super::*;

    #[test]
    fn the_last_answer_counts_until_the_outage_has_lasted_the_window() {
        let window = Millis::secs(60);
        let error = || PrometheusError::Timeout { url: "http://prometheus".to_owned(), within: window };
        let peak = PeakLoad { kv_use: Some(0.5), waiting: Some(1.0), newest: Tick(0) };
        let peaks = PeaksByEngine::from([((EngineId::new("m".into(), 0), Generation(1)), peak)]);
        let mut last = LastAnswer::default();
        assert_eq!(last.update(Err(error()), window, Tick(0)), Err(error()), "nothing was ever known");
        assert_eq!(last.update(Ok(peaks.clone()), window, Tick(1000)), Ok(peaks.clone()));
        assert_eq!(last.update(Err(error()), window, Tick(61_000)), Ok(peaks.clone()));
        assert_eq!(last.update(Err(error()), window, Tick(61_001)), Err(error()));
        assert_eq!(last.update(Ok(peaks.clone()), window, Tick(62_000)), Ok(peaks));
    }
}
