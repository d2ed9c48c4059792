//! Metrics of a leader's takeover.

use prometheus::{GaugeVec, Opts, Registry};
use rouse::units::{Millis, Tick};
use rouse_platform::metric_builder::{expect_valid, register, seconds};

/// How long the steps of a takeover took. Lists and ledgers are fetched at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TakeoverTimes {
    /// From the beginning of the term until all Pods were listed.
    pub lists: Millis,
    /// From the beginning of the term until each pool's ledger had the leader's epoch.
    pub ledgers: Millis,
    /// From the later of both until all engines were adopted.
    pub engines: Millis,
    /// From the beginning of the term until decisions began.
    pub total: Millis,
}

/// The times of this gateway's last takeover.
#[derive(Clone)]
pub struct TakeoverMetrics(GaugeVec);

impl TakeoverTimes {
    /// Returns the times of a term that began at `began` and decided from `decides` on.
    #[must_use]
    pub fn new(began: Tick, listed: Tick, ledgers_taken: Tick, decides: Tick) -> Self {
        Self {
            lists: listed.since(began),
            ledgers: ledgers_taken.since(began),
            engines: decides.since(listed.max(ledgers_taken)),
            total: decides.since(began),
        }
    }

    /// Returns each step's label with its time.
    #[must_use]
    pub const fn steps(self) -> [(&'static str, Millis); 4] {
        let Self { lists, ledgers, engines, total } = self;
        [("lists", lists), ("ledgers", ledgers), ("engines", engines), ("total", total)]
    }
}

impl TakeoverMetrics {
    #[must_use]
    pub fn new(registry: &Registry) -> Self {
        let times = Opts::new("rouse_takeover_seconds", "Duration of this gateway's last takeover, by step");
        Self(register(registry, expect_valid(GaugeVec::new(times, &["step"]))))
    }

    /// Sets the times, in place of those of an earlier takeover.
    pub fn set(&self, times: TakeoverTimes) {
        for (step, time) in times.steps() {
            self.0.with_label_values(&[step]).set(seconds(time));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::testing::scrape;

    #[test]
    fn the_engines_count_from_when_both_lists_and_ledgers_were_there() {
        let registry = Registry::new();
        let metrics = TakeoverMetrics::new(&registry);
        assert!(!scrape(&registry).contains("rouse_takeover"), "this gateway has never led");
        metrics.set(TakeoverTimes::new(Tick(1000), Tick(3000), Tick(1500), Tick(3250)));
        let text = scrape(&registry);
        for (step, time) in [("lists", "2"), ("ledgers", "0.5"), ("engines", "0.25"), ("total", "2.25")] {
            let line = format!("rouse_takeover_seconds{{step=\"{step}\"}} {time}");
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
        let late_ledgers = TakeoverTimes::new(Tick(0), Tick(100), Tick(300), Tick(700));
        assert_eq!((late_ledgers.engines, late_ledgers.total), (Millis(400), Millis(700)));
    }
}
