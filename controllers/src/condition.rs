//! Builds Kubernetes conditions: type, status, reason, message, transition time and observed generation.

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
    jiff::Timestamp,
};
use rouse::units::Tick;

use super::rejection::Rejections;

/// The object is valid and its names are not taken by another object.
pub const ACCEPTED: &str = "Accepted";
/// The model serves requests.
pub const READY: &str = "Ready";
/// The model serves requests, or would on demand.
pub const AVAILABLE: &str = "Available";

/// The model needs more engines than it has.
pub const SATURATED: &str = "Saturated";
/// The metrics of the model's engines are known.
pub const METRICS_AVAILABLE: &str = "MetricsAvailable";
/// There is no memory for another engine that the model needs.
pub const INSUFFICIENT_MEMORY: &str = "InsufficientMemory";
/// False while thresholds that are configured for the model are refused. Absent otherwise.
pub const THRESHOLDS_ACCEPTED: &str = "ThresholdsAccepted";
/// The conditions that saturation adds to a model that it scales.
pub const SATURATION_CONDITIONS: [&str; 4] =
    [SATURATED, METRICS_AVAILABLE, INSUFFICIENT_MEMORY, THRESHOLDS_ACCEPTED];

/// Maximum message length that an API server accepts.
const MAX_MESSAGE_CHARS: usize = 32_768;

/// Builds a condition for this generation. The transition time in `before` stays while the status stays the same.
#[must_use]
pub fn condition(
    kind: &str,
    status: bool,
    reason: &str,
    message: &str,
    generation: Option<i64>,
    before: &[Condition],
    now: Tick,
) -> Condition {
    let status = if status { "True" } else { "False" };
    let former = before.iter().find(|condition| condition.type_ == kind && condition.status == status);
    Condition {
        type_: kind.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message: message.chars().take(MAX_MESSAGE_CHARS).collect(),
        observed_generation: generation,
        last_transition_time: former.map_or_else(|| time(now), |former| former.last_transition_time.clone()),
    }
}

/// Builds the condition Accepted of an object.
#[must_use]
pub fn accepted(
    refused: Option<&Rejections>,
    generation: Option<i64>,
    before: &[Condition],
    now: Tick,
) -> Condition {
    match refused {
        None => condition(ACCEPTED, true, "Accepted", "the model is served", generation, before, now),
        Some(refused) => {
            let message = refused.to_string();
            condition(ACCEPTED, false, refused.reason(), &message, generation, before, now)
        }
    }
}

/// Converts a tick to an object's time, in whole seconds.
#[must_use]
pub fn time(Tick(millis): Tick) -> Time {
    let seconds = i64::try_from(millis / 1000).unwrap_or(i64::MAX);
    Time(Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX))
}

/// Converts an object's time to a tick. A time before the epoch becomes the epoch.
#[must_use]
pub fn tick(Time(time): &Time) -> Tick {
    Tick(u64::try_from(time.as_millisecond()).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{crd::ledger::ObjectName, rejection::Rejection};

    #[test]
    fn the_time_is_that_of_the_last_change_of_status() {
        let [early, late] = [1_780_000_000_000, 1_780_000_060_000].map(Tick);
        let holder = ObjectName::new("team-a", "first");
        let refused = Rejections::from(Rejection::DuplicateName { name: "m".into(), holder });
        let no = accepted(Some(&refused), Some(1), &[], early);
        assert_eq!((no.type_.as_str(), no.status.as_str()), ("Accepted", "False"));
        assert_eq!((no.reason.as_str(), no.observed_generation), ("DuplicateName", Some(1)));
        assert!(no.message.contains("team-a/first"), "{}", no.message);
        let still_no = accepted(Some(&refused), Some(2), std::slice::from_ref(&no), late);
        assert_eq!((still_no.last_transition_time, still_no.observed_generation), (time(early), Some(2)));
        let yes = accepted(None, Some(3), &[no], late);
        assert_eq!((yes.status.as_str(), yes.last_transition_time), ("True", time(late)));
    }

    #[test]
    fn moments_are_kept_to_the_second_and_never_panic() {
        assert_eq!(tick(&time(Tick(1_780_000_000_999))), Tick(1_780_000_000_000));
        assert_eq!(time(Tick(u64::MAX)), Time(Timestamp::MAX));
        assert_eq!(tick(&Time(Timestamp::MIN)), Tick(0));
    }
}
