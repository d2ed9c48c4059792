//! Whether the load of a model's awake engines is known, and what is known of it.
//!
//! What is missing, not a number or old is unknown, never zero.

use std::collections::BTreeSet;

use super::{AwakeEngine, ReplicaMetrics, VariantState};
use crate::units::{Millis, Tick};

/// The highest load of one engine over the window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PeakLoad {
    /// The used share of the KV cache, from 0 to 1; `None` if unknown.
    pub kv_use: Option<f64>,
    /// Requests in the engine's own queue; `None` if unknown.
    pub waiting: Option<f64>,
    /// When the newest sample was taken.
    pub newest: Tick,
}

/// Whether the load of a model's awake engines is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsAvailability {
    Known,
    /// The source has not answered for the window, and the kind of error. Nothing is known of any engine.
    SourceFailed(String),
    /// Engines without a sample, of all awake ones.
    Missing {
        unknown: usize,
        awake: usize,
    },
    /// The same, and the newest sample of some is older than the window.
    Stale {
        unknown: usize,
        awake: usize,
        window: Millis,
    },
}

impl MetricsAvailability {
    /// Whether a decision can be made: the load of at least one engine is known, or none is awake.
    #[must_use]
    pub const fn allows_decision(&self) -> bool {
        match self {
            Self::Known => true,
            Self::SourceFailed(_) => false,
            Self::Missing { unknown, awake } | Self::Stale { unknown, awake, .. } => *unknown < *awake,
        }
    }
}

/// When engines are read, as far as it decides what is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadingTimes {
    /// Time between two decisions.
    pub interval: Millis,
    /// Samples older than this do not count.
    pub window: Millis,
}

impl ReadingTimes {
    /// Whether the engine has been awake for long enough to be read.
    fn reading_is_due(self, engine: &AwakeEngine, now: Tick) -> bool {
        engine.since + self.interval + self.interval < now
    }
}

/// Counts engines that have just become awake, and whose load is not read yet, as pending.
///
/// Otherwise the load of the other engines would add engines that already exist. An engine that had time to be read is
/// not pending: its load is unknown. `replicas`: what [`replica_metrics`] returned for `awake`.
pub fn count_unread_as_pending(
    states: &mut [VariantState],
    awake: &[AwakeEngine],
    replicas: &[ReplicaMetrics],
    times: ReadingTimes,
    now: Tick,
) {
    let read: BTreeSet<&str> = replicas.iter().map(|metrics| metrics.replica.as_str()).collect();
    for AwakeEngine { id, .. } in awake.iter().filter(|engine| !times.reading_is_due(engine, now)) {
        if read.contains(id.to_string().as_str()) {
            continue;
        }
        if let Some(state) = states.iter_mut().find(|state| state.variant == id.variant) {
            state.pending = state.pending.saturating_add(1).min(state.current);
        }
    }
}

/// Returns the load of these awake engines, and whether it is known.
#[must_use]
pub fn replica_metrics(
    awake: &[AwakeEngine],
    times: ReadingTimes,
    now: Tick,
    peak: impl Fn(&AwakeEngine) -> Option<PeakLoad>,
) -> (Vec<ReplicaMetrics>, MetricsAvailability) {
    let window = times.window;
    let (mut replicas, mut unknown, mut is_stale) = (Vec::new(), 0, false);
    for engine in awake {
        let load = peak(engine);
        let (kv_use, waiting) = load.map_or((None, None), |load| (load.kv_use, load.waiting));
        if (kv_use.is_none() || waiting.is_none()) && times.reading_is_due(engine, now) {
            unknown += 1;
            is_stale |= load.is_some_and(|load| load.newest + window < now);
        }
        if kv_use.is_some() || waiting.is_some() {
            let (replica, variant) = (engine.id.to_string(), engine.id.variant.clone());
            replicas.push(ReplicaMetrics { replica, variant, kv_use, waiting, ..ReplicaMetrics::default() });
        }
    }
    let awake = awake.len();
    let availability = match unknown {
        0 => MetricsAvailability::Known,
        _ if is_stale => MetricsAvailability::Stale { unknown, awake, window },
        _ => MetricsAvailability::Missing { unknown, awake },
    };
    (replicas, availability)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        model::EngineId,
        saturation::{Autoscaler, ModelLoad, SaturationPolicy},
        units::Generation,
    };

    const TIMES: ReadingTimes = ReadingTimes { interval: Millis::secs(15), window: Millis::secs(60) };
    const NOW: Tick = Tick(1_000_000);

    fn engine(replica: u32, awake_for: u64) -> AwakeEngine {
        AwakeEngine {
            id: EngineId::new("m".into(), replica),
            generation: Generation(1),
            address: None,
            since: Tick(NOW.0 - awake_for * 1000),
        }
    }

    const fn load(kv_use: Option<f64>, waiting: Option<f64>, age: u64) -> Option<PeakLoad> {
        Some(PeakLoad { kv_use, waiting, newest: Tick(NOW.0 - age * 1000) })
    }

    fn availability(awake_for: u64, peak: Option<PeakLoad>) -> (usize, MetricsAvailability) {
        let engines = [engine(0, awake_for), engine(1, 600)];
        let known = load(Some(0.5), Some(1.0), 1);
        let of = |engine: &AwakeEngine| if engine.id.replica == 0 { peak } else { known };
        let (replicas, availability) = replica_metrics(&engines, TIMES, NOW, of);
        (replicas.len(), availability)
    }

    #[test]
    fn an_engine_whose_load_is_missing_or_old_is_unknown_and_one_that_just_woke_has_time() {
        let missing = MetricsAvailability::Missing { unknown: 1, awake: 2 };
        let stale = MetricsAvailability::Stale { unknown: 1, awake: 2, window: TIMES.window };
        assert_eq!(availability(600, load(Some(0.1), Some(0.0), 1)), (2, MetricsAvailability::Known));
        assert_eq!(availability(600, None), (1, missing.clone()));
        assert_eq!(availability(30, None), (1, MetricsAvailability::Known));
        assert_eq!(availability(31, None), (1, missing.clone()));
        assert_eq!(availability(600, load(None, None, 61)), (1, stale));
        assert_eq!(
            availability(600, load(Some(0.9), None, 1)),
            (2, missing),
            "half of it may still saturate it"
        );
    }

    #[test]
    fn an_engine_that_has_just_become_awake_is_pending_until_it_is_read_or_has_had_the_time() {
        let pending = |awake_for: u64, read: &[u32]| {
            let engines = [engine(0, 600), engine(1, awake_for)];
            let peak = |engine: &AwakeEngine| {
                if read.contains(&engine.id.replica) { load(Some(0.75), Some(0.0), 1) } else { None }
            };
            let (replicas, _) = replica_metrics(&engines, TIMES, NOW, peak);
            let mut states = [VariantState { current: 2, ..VariantState::default() }];
            count_unread_as_pending(&mut states, &engines, &replicas, TIMES, NOW);
            let load = ModelLoad { replicas, states: states.to_vec(), ..ModelLoad::default() };
            let decision = Autoscaler::new(SaturationPolicy::default()).decide(&load, NOW);
            (states[0].pending, decision.targets[0].replicas)
        };
        assert_eq!(pending(10, &[0]), (1, 2), "it may be all that the load of the other one needs");
        assert_eq!(pending(10, &[0, 1]), (0, 3));
        assert_eq!(pending(31, &[0]), (0, 3));
    }

    #[test]
    fn a_decision_needs_one_engine_whose_load_is_known() {
        assert!(MetricsAvailability::Known.allows_decision());
        assert!(!MetricsAvailability::SourceFailed(String::new()).allows_decision());
        assert!(MetricsAvailability::Missing { unknown: 1, awake: 2 }.allows_decision());
        assert!(!MetricsAvailability::Missing { unknown: 2, awake: 2 }.allows_decision());
        assert!(!MetricsAvailability::Stale { unknown: 2, awake: 2, window: TIMES.window }.allows_decision());
    }
}
