//! Reads the load of an engine that serves, between two health probes.
//!
//! Probes are too rare for the load balancer: an engine's queue grows and empties within a second. An engine behind a
//! stub needs no reader, because its stub reports the load in the responses themselves (`rouse_net::engine_load`).
//!
//! A reading is one request to the engine and costs both sides a millisecond at most. So it happens at a fixed pace,
//! whatever the number of requests, and only while this gateway has requests at the engine. An engine that answers
//! without these metrics is asked less and less often: it has none and may never have any, or it creates them with its
//! first request.

use std::{future::pending, time::Duration};

use rouse::units::Tick;
use rouse_net::engine_load::{EngineLoad, LoadAnswer};
use tokio::time;

use crate::{EngineActivity, engine_client::EngineClient};

/// Pause between two readings.
const READ_INTERVAL: Duration = Duration::from_secs(2);
/// The longest pause, as a number of [`READ_INTERVAL`]s: a minute.
const MAX_INTERVALS: u32 = 30;

/// Reads the engine's load while it serves this gateway's requests. Runs until dropped.
///
/// Each engine generation has its own reader, so a restarted engine is read at the usual pace.
pub(crate) async fn run(contact: &EngineClient, activity: &EngineActivity) {
    if contact.model.stub {
        return pending().await;
    }
    let mut pace = ReadPace::default();
    loop {
        time::sleep(READ_INTERVAL).await;
        let has_load = activity.load().fresh(|| contact.common.clock.now()).is_some();
        if pace.is_due(activity.has_requests(), has_load) {
            let answer = contact.adapter.load_answer(contact.health_timeout()).await;
            pace.adapt_to(answer);
            store(activity, answer.load(), contact.common.clock.now());
        }
    }
}

/// Stores a reading. `None`: it failed, and the last one counts until it is too old.
pub(crate) fn store(activity: &EngineActivity, load: Option<EngineLoad>, now: Tick) {
    if let Some(load) = load {
        activity.record_load(&load, now);
    }
}

/// Decides at each interval whether to read.
#[derive(Debug)]
struct ReadPace {
    was_serving: bool,
    /// The intervals from one reading to the next.
    intervals: u32,
    /// The intervals that remain until the next one.
    remaining: u32,
}

impl ReadPace {
    /// True while the engine serves, and once afterwards: otherwise its last reading would show a load that is gone.
    ///
    /// `has_load`: the load is known. A backend that restarted by itself may have metrics now, which the next health
    /// probe finds.
    const fn is_due(&mut self, serves: bool, has_load: bool) -> bool {
        let is_used = serves || self.was_serving;
        self.was_serving = serves;
        if has_load {
            self.intervals = 1;
            self.remaining = 0;
        } else {
            self.remaining = self.remaining.saturating_sub(1);
        }
        is_used && self.remaining == 0
    }

    /// Sets the time of the next reading by the answer to this one.
    fn adapt_to(&mut self, answer: LoadAnswer) {
        self.intervals = match answer {
            LoadAnswer::Known(_) => 1,
            LoadAnswer::NoMetrics => (self.intervals * 2).min(MAX_INTERVALS),
            LoadAnswer::Failed => self.intervals,
        };
        self.remaining = self.intervals;
    }
}

impl Default for ReadPace {
    fn default() -> Self {
        Self { was_serving: false, intervals: 1, remaining: 0 }
    }
}

#[cfg(test)]
mod tests {
    use rouse::{engine::saturation_limit::MAX_LIMIT_AGE, units::Millis};

    use super::*;

    const LOAD: EngineLoad = EngineLoad { kv_use: Some(0.9), waiting: Some(9.0), running: None };

    /// The intervals of these minutes in which an engine with these answers is read, if it serves in those intervals.
    fn readings(minutes: u32, serves: impl Fn(u32) -> bool, answer: impl Fn(u32) -> LoadAnswer) -> Vec<u32> {
        let mut pace = ReadPace::default();
        let intervals = minutes * 60 / u32::try_from(READ_INTERVAL.as_secs()).unwrap();
        let is_read = |interval: &u32| {
            let is_due = pace.is_due(serves(*interval), false);
            if is_due {
                pace.adapt_to(answer(*interval));
            }
            is_due
        };
        (0..intervals).filter(is_read).collect()
    }

    #[test]
    fn an_engine_is_read_twice_in_four_seconds_at_most_and_never_while_it_is_idle() {
        for answer in [LoadAnswer::Known(LOAD), LoadAnswer::Failed] {
            let readings = |serves: fn(u32) -> bool| readings(1, serves, |_| answer).len();
            assert_eq!(readings(|_| true), 30);
            assert_eq!(readings(|_| false), 0);
            assert_eq!(readings(|interval| interval == 3), 2, "the second one shows that it is idle");
            assert_eq!(readings(|interval| interval % 2 == 0), 30);
        }
    }

    #[test]
    fn an_engine_without_metrics_is_read_less_and_less_often_until_it_has_some() {
        let never = readings(4, |_| true, |_| LoadAnswer::NoMetrics);
        assert_eq!(never, [0, 2, 6, 14, 30, 60, 90], "in the end once a minute");
        let from_the_sixth =
            |interval: u32| if interval < 6 { LoadAnswer::NoMetrics } else { LoadAnswer::Known(LOAD) };
        assert_eq!(readings(1, |_| true, from_the_sixth)[..5], [0, 2, 6, 7, 8]);
        let fails_once =
            |interval: u32| if interval == 2 { LoadAnswer::Failed } else { LoadAnswer::NoMetrics };
        assert_eq!(readings(1, |_| true, fails_once)[..4], [0, 2, 4, 8], "a failure proves nothing");
    }

    #[test]
    fn an_engine_whose_metrics_a_health_probe_finds_is_read_at_the_usual_pace_again() {
        let mut pace = ReadPace::default();
        for _ in 0..5 {
            pace.adapt_to(LoadAnswer::NoMetrics);
        }
        assert!(!pace.is_due(true, false));
        assert!(pace.is_due(true, true));
        pace.adapt_to(LoadAnswer::Known(LOAD));
        assert!(pace.is_due(true, false));
    }

    #[test]
    fn a_failed_reading_leaves_the_last_one_and_its_limit_until_they_are_too_old() {
        let (activity, now) = (EngineActivity::default(), Tick(1_000_000));
        store(&activity, Some(LOAD), now);
        let later = now + Millis::secs(2);
        store(&activity, None, later);
        assert!(activity.saturation().is_saturated(|| later));
        assert_eq!(activity.load().fresh(|| later), Some(LOAD));
        assert!(!activity.saturation().is_saturated(|| now + MAX_LIMIT_AGE));
    }
}
