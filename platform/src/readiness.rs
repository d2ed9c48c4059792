//! Waits until a started engine serves.

use std::time::Duration;

use rouse::{
    engine::last_outcome::EngineDiagnostics,
    units::{Millis, Tick},
};
use rouse_net::adapter::EngineHealth;
use tokio::time;

use crate::engine_client::EngineClient;

const MIN_PROBE_INTERVAL: Duration = Duration::from_millis(10);
const MAX_PROBE_INTERVAL: Duration = Duration::from_millis(500);
const PROBE_INTERVAL_GROWTH: f64 = 1.3;
/// Starts and wakes that take no longer than this report no probe results.
const FIRST_REPORT_DELAY: Millis = Millis::secs(1);

/// Paces the probes of a starting engine.
///
/// Probes are frequent at first (small engines and wakes are up in no time), then ever less frequent, and frequent
/// again around the time that earlier starts took.
struct ProbePacing {
    began: Tick,
    expected: Option<Millis>,
    interval: Duration,
}

impl ProbePacing {
    fn next_interval(&mut self, now: Tick) -> Duration {
        let gap = self.interval;
        self.interval = gap.mul_f64(PROBE_INTERVAL_GROWTH).min(MAX_PROBE_INTERVAL);
        let Some(expected) = self.expected else {
            return gap;
        };
        let away = now.since(self.began).0.abs_diff(expected.0);
        gap.min(Duration::from_millis(away / 4).max(MIN_PROBE_INTERVAL))
    }
}

/// Waits until the engine answers health requests and is not asleep.
///
/// Waits forever if need be: the fleet holds the deadline. Reports each new probe result in the meantime.
pub async fn wait_until_ready(contact: &EngineClient, expected: Option<Millis>) {
    let mut wait = ReadinessWait::begin(contact, expected);
    while let Err(probe) = wait.next_change(contact).await {
        contact
            .report_diagnostics(EngineDiagnostics { probe: Some(probe), ..EngineDiagnostics::default() })
            .await;
    }
}

/// The wait of [`wait_until_ready`], for callers that handle the probe results themselves.
pub struct ReadinessWait {
    pace: ProbePacing,
    last_reported: Option<String>,
    /// Pause before the next probe.
    delay: Option<Duration>,
}

impl ReadinessWait {
    pub fn begin(contact: &EngineClient, expected: Option<Millis>) -> Self {
        Self {
            pace: ProbePacing { began: contact.common.clock.now(), expected, interval: MIN_PROBE_INTERVAL },
            last_reported: None,
            delay: None,
        }
    }

    /// Waits until the engine serves. An error is a probe result that differs from the last one.
    pub async fn next_change(&mut self, contact: &EngineClient) -> Result<(), String> {
        loop {
            if let Some(pause) = self.delay.take() {
                time::sleep(pause).await;
            }
            let Err(probe) = contact.adapter.check_awake(contact.health_timeout()).await else {
                return Ok(());
            };
            let now = contact.common.clock.now();
            self.delay = Some(self.pace.next_interval(now));
            if self.last_reported.as_ref() != Some(&probe) && now.since(self.pace.began) >= FIRST_REPORT_DELAY
            {
                self.last_reported = Some(probe.clone());
                return Err(probe);
            }
        }
    }
}

/// Waits until the engine's stub stops reporting a closed gate.
///
/// Any other answer, or none, counts as open: requests then go out, and their outcomes count as usual.
pub async fn wait_until_ungated(contact: &EngineClient) {
    let mut pace =
        ProbePacing { began: contact.common.clock.now(), expected: None, interval: MIN_PROBE_INTERVAL };
    while contact.adapter.health(contact.health_timeout()).await == EngineHealth::Gated {
        time::sleep(pace.next_interval(contact.common.clock.now())).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_grow_rare_and_are_frequent_again_near_the_learned_time() {
        let began = Tick(1_000_000);
        let pace = |expected| ProbePacing { began, expected, interval: MIN_PROBE_INTERVAL };
        let mut plain = pace(None);
        let gaps: Vec<_> = (0..20).map(|_| plain.next_interval(began)).collect();
        assert_eq!(gaps[0], MIN_PROBE_INTERVAL);
        assert_eq!(gaps[19], MAX_PROBE_INTERVAL);
        let mut learned = pace(Some(Millis::secs(60)));
        for _ in 0..20 {
            learned.next_interval(began);
        }
        assert_eq!(learned.next_interval(began + Millis::secs(30)), MAX_PROBE_INTERVAL);
        assert_eq!(learned.next_interval(began + Millis(59_900)), Duration::from_millis(25));
        assert_eq!(learned.next_interval(began + Millis(60_010)), MIN_PROBE_INTERVAL);
        assert_eq!(learned.next_interval(began + Millis::secs(90)), MAX_PROBE_INTERVAL);
    }
}
