//! What shows that an engine serves, before the new leader has asked the engine.

use super::EngineReservation;
use crate::{crd::inference_model::EngineState, engine_pod::EnginePod};

/// Whether everything that is recorded about an engine shows that it serves.
///
/// `published`: the state in the former leader's status of the generation that the Pod names. A leader writes `Awake`
/// after the engine has answered, and the kubelet reports the Pod as ready while its stub does. A leader records an
/// order to sleep on the Pod before it sends the order, and in the ledger once the engine sleeps; an order to stop is in
/// the ledger, too. An engine with such a record is asked first. So is one that drained, since its gate may be closed,
/// and one whose place the ledger does not have yet, since its stub knows it.
pub(super) fn shows_serving(
    pod: &EnginePod,
    published: Option<EngineState>,
    reservations: &[EngineReservation],
) -> bool {
    published == Some(EngineState::Awake)
        && pod.ready
        && pod.asleep.is_none()
        && pod.failure.is_none()
        && !pod.terminating
        && !pod.finished
        && reservations.iter().all(|entry| entry.placed)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rouse::model::{SleepLevel, VariantName};

    use super::*;
    use crate::{
        crd::ledger::{ObjectName, ReservationOwner},
        engine_pod::PodFailure,
        platform::testing,
    };

    const STATES: [EngineState; 10] = [
        EngineState::Launching,
        EngineState::Loading,
        EngineState::Awake,
        EngineState::Draining,
        EngineState::FallingAsleep,
        EngineState::Asleep,
        EngineState::Waking,
        EngineState::Failing,
        EngineState::Stopping,
        EngineState::Backoff,
    ];

    fn serving_pod() -> EnginePod {
        EnginePod { ready: true, ..testing::pod("chat", "p0", "m0", "t0") }
    }

    fn reservation(placed: bool) -> EngineReservation {
        let (model, variant) = (ObjectName::new("chat", "m0"), VariantName::default());
        let engine = ReservationOwner { model, variant, replica: 0 };
        EngineReservation { pool: "h100".to_owned(), engine, asleep: !placed, placed, location: None }
    }

    #[test]
    fn only_a_ready_engine_that_was_published_as_awake_is_not_asked() {
        let booked = [reservation(true)];
        for state in STATES {
            let shows = shows_serving(&serving_pod(), Some(state), &booked);
            assert_eq!(shows, state == EngineState::Awake, "{state:?}");
        }
        assert!(!shows_serving(&serving_pod(), None, &booked), "another generation was published, or none");
        let awake = Some(EngineState::Awake);
        // A model without a pool has no reservation.
        assert!(shows_serving(&serving_pod(), awake, &[]));
        assert!(!shows_serving(&serving_pod(), awake, &[reservation(true), reservation(false)]));
        let crashed = Some(PodFailure::Crashed { code: 1, signal: None, times: 1 });
        for doubtful in [
            EnginePod { ready: false, ..serving_pod() },
            EnginePod { asleep: Some(SleepLevel::One), ..serving_pod() },
            EnginePod { failure: crashed, ..serving_pod() },
            EnginePod { terminating: true, ..serving_pod() },
            EnginePod { finished: true, ..serving_pod() },
        ] {
            assert!(!shows_serving(&doubtful, awake, &booked), "{doubtful:?}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        /// An engine that a leader may have ordered to sleep is asked, whatever else is recorded.
        #[test]
        fn an_engine_that_may_sleep_is_asked(
            state in prop::option::of(prop::sample::select(STATES.to_vec())),
            (ready, marked, placed) in any::<(bool, bool, bool)>(),
        ) {
            let asleep = marked.then_some(SleepLevel::Two);
            let pod = EnginePod { ready, asleep, ..serving_pod() };
            let shows = shows_serving(&pod, state, &[reservation(placed)]);
            if shows {
                prop_assert!(ready && placed && !marked);
                prop_assert_eq!(state, Some(EngineState::Awake));
            }
        }
    }
}
