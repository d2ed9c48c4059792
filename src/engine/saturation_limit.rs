//! The limit on this gateway's requests at a saturated engine.
//!
//! A request that waits in an engine cannot go to another one that becomes free, and no fairness between keys applies
//! to it. So the queue of a busy engine waits at the gateway, except for a few requests, without which the engine's
//! batch would shrink. The limit follows the engine's reports:
//!
//! * A report of a long queue, or of a short one beside a nearly full KV cache, limits the leases to the present ones,
//!   less this gateway's share of what the queue has beyond its threshold. So a place is free whenever a lease ends. As
//!   many remain as the engine serves in a second: their wait is short, however many wait. At least one always remains:
//!   its request brings the next report.
//! * A KV cache that is nearly full while no request waits limits nothing: the engine still takes whatever arrives. It
//!   only comes last among the engines of its model.
//! * A report of a shorter queue raises a limit that holds requests back, in steps: the requests that wait here would
//!   otherwise all arrive before the next report. A limit that holds back nothing ends.
//! * A limit ends with the age of its reading. An unknown load limits nothing.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{
    saturation::Thresholds,
    units::{Millis, Tick, pluralize},
};

/// How long a reading limits the requests, unless a newer one replaces it. As long as it counts for the load balancer.
pub const MAX_LIMIT_AGE: Millis = Millis::secs(5);

/// What a saturated engine reported, and the most requests of this gateway that it gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SaturationLimit {
    /// At least 1. `None`: any number, because the engine has no queue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leases: Option<u32>,
    /// When the reading is too old to limit anything.
    pub until: Tick,
    /// The used percentage of the KV cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_percent: Option<u32>,
    /// Requests in the engine's own queue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<u32>,
}

/// An engine's report, and this gateway's requests at the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ReportedUse {
    /// The used share of the KV cache, from 0 to 1; `None` if unknown, like the two below.
    pub kv_use: Option<f64>,
    /// Requests of all gateways in the engine's own queue.
    pub waiting: Option<f64>,
    /// Requests of all gateways that the engine works on.
    pub running: Option<f64>,
    /// This gateway's requests at the engine.
    pub leases: u32,
    /// How many of them end in a second.
    pub ended_per_second: u32,
}

impl SaturationLimit {
    /// Computes what a report at `now` leads to; `None`: the engine is not saturated.
    ///
    /// `before`: the result of the report before. A threshold of 0 saturates nothing: it would leave every engine one
    /// request.
    #[must_use]
    pub fn after_report(
        before: Option<Self>,
        report: &ReportedUse,
        thresholds: &Thresholds,
        now: Tick,
    ) -> Option<Self> {
        let ReportedUse { kv_use, waiting, leases, .. } = *report;
        let reaches = |reported: Option<f64>, threshold: f64| {
            threshold > 0.0 && reported.is_some_and(|reported| reported >= threshold)
        };
        let is_cache_full = reaches(kv_use, thresholds.kv_cache);
        let has_queue = !report.is_queue_empty();
        let limit = if reaches(waiting, thresholds.queue_length) || is_cache_full && has_queue {
            Some(report.leases_with_queue_of(thresholds.queue_length.max(1.0)))
        } else if before.is_some_and(|before| before.is_active(now) && before.holds_back(leases)) {
            Some(leases.saturating_add(report.raise(thresholds, is_cache_full)))
        } else if is_cache_full {
            None
        } else {
            return None;
        };
        Some(Self {
            leases: limit.map(|leases| leases.max(report.ended_per_second).max(1)),
            until: now + MAX_LIMIT_AGE,
            kv_percent: kv_use.map(|used| (used * 100.0).round() as u32),
            waiting: waiting.map(|requests| requests as u32),
        })
    }

    /// Whether the limit counts at this moment.
    #[must_use]
    pub fn is_active(&self, now: Tick) -> bool {
        self.until > now
    }

    /// Whether requests at `now` meet another limit by `after` than by `before`.
    ///
    /// A limit that has ended is none. New figures of the load that lead to the same limit make no difference.
    #[must_use]
    pub fn differ(before: Option<Self>, after: Option<Self>, now: Tick) -> bool {
        let leases =
            |limit: Option<Self>| limit.filter(|limit| limit.is_active(now)).map(|limit| limit.leases);
        leases(before) != leases(after)
    }

    /// Whether this many leases nearly use up the limit. A lease that has just ended may be free for a moment.
    const fn holds_back(&self, leases: u32) -> bool {
        match self.leases {
            Some(limit) => leases >= limit.saturating_sub(limit / 8 + 1),
            None => false,
        }
    }
}

impl ReportedUse {
    fn is_queue_empty(&self) -> bool {
        self.waiting.is_none_or(|requests| requests < 1.0)
    }

    /// The leases with which this many requests stay in the engine's queue, if other gateways act alike.
    ///
    /// A lease may stand for several of the engine's requests, such as the prompts of one completion.
    fn leases_with_queue_of(&self, places: f64) -> u32 {
        let (waiting, leases) = (self.waiting.unwrap_or_default(), f64::from(self.leases));
        let requests = self.running.unwrap_or_default() + waiting;
        let share = if requests > leases { leases / requests } else { 1.0 };
        // Conversions to `u32` cut off what is too small or too large.
        let excess = ((waiting - places) * share) as u32;
        self.leases.saturating_sub(excess)
    }

    /// How many more leases a limit that holds requests back gets at once: with a full cache hardly any are missing.
    fn raise(&self, thresholds: &Thresholds, is_cache_full: bool) -> u32 {
        let places = thresholds.queue_length - self.waiting.unwrap_or_default();
        let places = (places.ceil() as u32).max(1);
        match (self.is_queue_empty(), is_cache_full) {
            (false, _) => places,
            (true, true) => places.max(self.leases / 8),
            (true, false) => places.max(self.leases / 2),
        }
    }
}

/// The reported load: `KV cache 91 % used, 12 requests in its queue`.
impl fmt::Display for SaturationLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kv = self.kv_percent.map(|percent| format!("KV cache {percent} % used"));
        let waiting = self.waiting.map(|requests| format!("{} in its queue", pluralize(requests, "request")));
        let parts: Vec<String> = kv.into_iter().chain(waiting).collect();
        f.write_str(&parts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Tick = Tick(1_000_000);

    fn report(kv_use: impl Into<Option<f64>>, waiting: impl Into<Option<f64>>, leases: u32) -> ReportedUse {
        let (kv_use, waiting) = (kv_use.into(), waiting.into());
        ReportedUse { kv_use, waiting, leases, ..ReportedUse::default() }
    }

    fn after(before: Option<SaturationLimit>, report: ReportedUse) -> Option<SaturationLimit> {
        SaturationLimit::after_report(before, &report, &Thresholds::default(), NOW)
    }

    /// The leases of a limit; panics if the engine is not saturated.
    fn leases(limit: Option<SaturationLimit>) -> Option<u32> {
        limit.unwrap().leases
    }

    #[test]
    fn an_engine_is_saturated_from_its_thresholds_on_and_unknown_saturates_nothing() {
        assert_eq!(after(None, report(0.79, 4.0, 9)), None);
        assert_eq!(after(None, report(None, None, 9)), None);
        assert_eq!(leases(after(None, report(0.80, 1.0, 9))), Some(9));
        assert_eq!(leases(after(None, report(None, 5.0, 9))), Some(9));
        let limit = after(None, report(0.914, 12.0, 9)).unwrap();
        assert_eq!(limit.to_string(), "KV cache 91 % used, 12 requests in its queue");
        assert!(limit.is_active(NOW) && !limit.is_active(NOW + MAX_LIMIT_AGE));
    }

    #[test]
    fn a_full_cache_alone_limits_nothing() {
        for waiting in [Some(0.0), Some(0.5), None] {
            assert_eq!(leases(after(None, report(0.99, waiting, 9))), None);
        }
        let limit = after(None, report(0.99, 1.0, 40));
        assert_eq!(leases(after(limit, report(0.85, 0.0, 40))), Some(45), "nobody waits in it any more");
        assert_eq!(leases(after(limit, report(0.85, 0.0, 80))), Some(90), "an eighth more");
        assert_eq!(leases(after(limit, report(0.85, 0.0, 20))), None, "the limit held back nothing");
    }

    #[test]
    fn each_model_has_its_own_thresholds_and_0_saturates_nothing() {
        let after = |kv_cache, queue_length, kv: f64, waiting: f64| {
            let thresholds = Thresholds { kv_cache, queue_length, ..Thresholds::default() };
            let report = report(kv, waiting, 9);
            SaturationLimit::after_report(None, &report, &thresholds, NOW).map(|limit| limit.leases)
        };
        assert_eq!(after(0.95, 20.0, 0.9, 12.0), None);
        assert_eq!(after(0.95, 20.0, 0.95, 12.0), Some(Some(9)));
        assert_eq!(after(0.95, 2.0, 0.5, 4.0), Some(Some(7)), "its queue shrinks to 2");
        assert_eq!(after(0.95, 0.0, 0.96, 3.0), Some(Some(7)), "its queue never shrinks to 0");
        assert_eq!(after(0.0, 0.0, 1.0, 50.0), None);
    }

    #[test]
    fn the_engine_queue_shrinks_to_its_threshold_and_one_place_always_remains() {
        assert_eq!(leases(after(None, report(0.5, 12.0, 30))), Some(23));
        assert_eq!(leases(after(None, report(0.5, 1000.0, 3))), Some(1));
        assert_eq!(leases(after(None, report(0.95, f64::MAX, 0))), Some(1));
    }

    #[test]
    fn several_gateways_together_take_back_no_more_than_the_excess() {
        let of_one = ReportedUse { running: Some(256.0), ..report(0.7, 104.0, 120) };
        assert_eq!(leases(after(None, of_one)), Some(87), "a third of 261");
        let of_all = ReportedUse { leases: 360, ..of_one };
        assert_eq!(leases(after(None, of_all)), Some(261));
        let with_many_prompts = ReportedUse { leases: 10, ..of_one };
        assert_eq!(leases(after(None, with_many_prompts)), Some(8), "each has 36 prompts");
    }

    #[test]
    fn an_engine_keeps_what_it_serves_in_a_second() {
        let embeds = ReportedUse { running: Some(0.0), ended_per_second: 900, ..report(None, 195.0, 200) };
        assert_eq!(leases(after(None, embeds)), Some(900));
        let generates = ReportedUse { ended_per_second: 2, ..report(0.9, 40.0, 60) };
        assert_eq!(leases(after(None, generates)), Some(25));
    }

    #[test]
    fn below_the_thresholds_a_limit_that_holds_back_rises_in_steps_and_another_one_ends() {
        let limit = after(None, report(0.9, 7.0, 22));
        assert_eq!(leases(limit), Some(20));
        assert_eq!(leases(after(limit, report(0.7, 3.5, 20))), Some(22), "the rest of the queue's threshold");
        assert_eq!(leases(after(limit, report(0.7, 0.0, 18))), Some(27), "half as many again");
        assert_eq!(leases(after(limit, report(0.7, None, 20))), Some(30), "its queue is unknown");
        assert_eq!(after(limit, report(0.7, 0.0, 16)), None);
        let one = after(None, report(0.9, 80.0, 1));
        assert_eq!(leases(one), Some(1));
        assert_eq!(leases(after(one, report(0.1, 0.0, 0))), Some(5));
        assert_eq!(after(after(one, report(0.1, 0.0, 0)), report(0.1, 0.0, 0)), None);
    }

    #[test]
    fn limits_differ_by_their_leases_and_by_their_end_and_not_by_the_reported_load() {
        let limit = after(None, report(0.9, 7.0, 22)).unwrap();
        let later = SaturationLimit { until: limit.until + Millis(1), kv_percent: Some(97), ..limit };
        assert!(!SaturationLimit::differ(Some(limit), Some(later), NOW));
        assert!(SaturationLimit::differ(Some(limit), Some(later), limit.until), "the first one has ended");
        assert!(!SaturationLimit::differ(Some(limit), None, limit.until));
        assert!(SaturationLimit::differ(Some(limit), None, NOW));
        assert!(SaturationLimit::differ(None, Some(limit), NOW));
        let [fewer, any] = [Some(3), None].map(|leases| Some(SaturationLimit { leases, ..limit }));
        assert!(SaturationLimit::differ(Some(limit), fewer, NOW));
        assert!(SaturationLimit::differ(any, None, NOW), "the engine gets requests last");
    }

    #[test]
    fn a_limit_of_an_old_reading_is_not_raised_but_ends() {
        let old = SaturationLimit { until: NOW, ..after(None, report(0.9, 7.0, 22)).unwrap() };
        assert_eq!(after(Some(old), report(0.7, 3.0, 20)), None);
    }
}
