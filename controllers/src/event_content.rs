//! Decides which changes of a model become Events, by comparing snapshots of its engines and wait reasons. Defines the
//! reasons of all Events, including those of dual pods, Warmups and slots.

use rouse::{
    engine::{Engine, state::LifecycleState},
    fault::FailureCause,
    model::VariantName,
};

use super::status::ModelWaitReason;

/// The reason of an Event. The docs explain each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EventReason {
    Created,
    Updated,
    ScaledUp,
    ScaledToZero,
    Slept,
    Woken,
    InsufficientMemory,
    FailedCreate,
    Deleted,
    Waiting,
    Served,
    Ended,
    Failed,
    ShortGrace,
    Started,
    NodeFailed,
    Completed,
    Paused,
    Resumed,
    Expired,
    NodeLost,
    Rejected,
}

/// Reason and note of one Event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventContent {
    pub reason: EventReason,
    pub note: String,
}

/// The part of an engine's state that Events depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineSnapshot {
    pub variant: VariantName,
    pub replica: u32,
    pub state: LifecycleState,
    /// Consecutive failures.
    pub failures: u32,
    /// Cause and diagnostics of the last failure.
    pub last_failure: Option<String>,
}

impl EventReason {
    /// Reasons of Events on models.
    pub const MODEL_REASONS: [Self; 9] = [
        Self::Created,
        Self::Updated,
        Self::ScaledUp,
        Self::ScaledToZero,
        Self::Slept,
        Self::Woken,
        Self::InsufficientMemory,
        Self::FailedCreate,
        Self::Deleted,
    ];
    /// Reasons of Events on Pods of dual pods.
    pub const POD_REASONS: [Self; 7] = [
        Self::Waiting,
        Self::Served,
        Self::Deleted,
        Self::Slept,
        Self::Ended,
        Self::Failed,
        Self::ShortGrace,
    ];
    /// Reasons of Events on Warmups.
    pub const WARMUP_REASONS: [Self; 7] = [
        Self::Started,
        Self::NodeFailed,
        Self::Completed,
        Self::Failed,
        Self::Paused,
        Self::Resumed,
        Self::Expired,
    ];
    /// Reasons of Events on DeviceInstances and on Pods that got no slot.
    pub const SLOT_REASONS: [Self; 3] = [Self::NodeLost, Self::Deleted, Self::Rejected];

    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Created => "Created",
            Self::Updated => "Updated",
            Self::ScaledUp => "ScaledUp",
            Self::ScaledToZero => "ScaledToZero",
            Self::Slept => "Slept",
            Self::Woken => "Woken",
            Self::InsufficientMemory => "InsufficientMemory",
            Self::FailedCreate => "FailedCreate",
            Self::Deleted => "Deleted",
            Self::Waiting => "Waiting",
            Self::Served => "Served",
            Self::Ended => "Ended",
            Self::Failed => "Failed",
            Self::ShortGrace => "ShortGrace",
            Self::Started => "Started",
            Self::NodeFailed => "NodeFailed",
            Self::Completed => "Completed",
            Self::Paused => "Paused",
            Self::Resumed => "Resumed",
            Self::Expired => "Expired",
            Self::NodeLost => "NodeLost",
            Self::Rejected => "Rejected",
        }
    }

    /// Whether another note makes another Event. An API server keeps the note of an existing Event.
    #[must_use]
    pub const fn is_keyed_by_note(self) -> bool {
        matches!(self, Self::Waiting | Self::Slept | Self::NodeLost)
    }

    /// Returns the Event's type.
    #[must_use]
    pub const fn event_type(self) -> &'static str {
        if self.is_warning() { "Warning" } else { "Normal" }
    }

    /// Whether something is wrong: the Event's type is Warning.
    #[must_use]
    pub const fn is_warning(self) -> bool {
        matches!(
            self,
            Self::InsufficientMemory
                | Self::FailedCreate
                | Self::Failed
                | Self::ShortGrace
                | Self::NodeFailed
                | Self::NodeLost
                | Self::Rejected
        )
    }

    /// Returns the Event's action: the operation during which it happened.
    #[must_use]
    pub const fn action(self) -> &'static str {
        match self {
            Self::Created | Self::Updated | Self::ShortGrace => "Accept",
            Self::ScaledUp | Self::InsufficientMemory | Self::FailedCreate | Self::Started => "Start",
            Self::ScaledToZero => "Stop",
            Self::Slept => "Sleep",
            Self::Woken => "Wake",
            Self::Deleted | Self::Expired | Self::Rejected => "Delete",
            Self::Waiting => "Wait",
            Self::Served => "Serve",
            Self::Ended | Self::Failed | Self::Completed => "End",
            Self::NodeFailed => "Warm",
            Self::Paused => "Pause",
            Self::Resumed => "Resume",
            Self::NodeLost => "Free",
        }
    }

    #[must_use]
    pub fn with_note(self, note: impl Into<String>) -> EventContent {
        EventContent { reason: self, note: note.into() }
    }
}

impl EngineSnapshot {
    #[must_use]
    pub fn of(engine: &Engine) -> Self {
        let why = engine.failure().map(|failure| failure.cause.describe() + &failure.diagnostics.describe());
        Self {
            variant: engine.id.variant.clone(),
            replica: engine.id.replica,
            state: engine.state.clone(),
            failures: engine.failures,
            last_failure: why,
        }
    }

    /// Returns the engine's number, after the name of its variant unless that is the default.
    fn number(&self) -> String {
        let Self { variant, replica, .. } = self;
        if variant.is_default() { replica.to_string() } else { format!("{variant}.{replica}") }
    }
}

/// Compares the engines of one model after two consecutive turns.
#[must_use]
pub fn engine_events(before: &[EngineSnapshot], now: &[EngineSnapshot]) -> Vec<EventContent> {
    let pairs = now.iter().filter_map(|now| {
        let is_same =
            |before: &&EngineSnapshot| before.replica == now.replica && before.variant == now.variant;
        let before = before.iter().find(is_same)?;
        Some((before, now))
    });
    let mut events: Vec<EventContent> = pairs.filter_map(|(before, now)| engine_event(before, now)).collect();
    let run = |engines: &[EngineSnapshot]| engines.iter().any(|engine| engine.state.has_process());
    let stopped = |engine: &EngineSnapshot| {
        matches!(engine.state, LifecycleState::Stopping { cause: FailureCause::Stopped })
    };
    // A failed engine has an Event of its own, so only ordered stops count here.
    if run(before) && !run(now) && before.iter().filter(|engine| engine.state.has_process()).all(stopped) {
        events.push(EventReason::ScaledToZero.with_note("no engine is running: the next request starts one"));
    }
    events
}

fn engine_event(before: &EngineSnapshot, now: &EngineSnapshot) -> Option<EventContent> {
    let replica = now.number();
    let why = |cause: Option<&FailureCause>| {
        now.last_failure
            .clone()
            .or_else(|| cause.map(FailureCause::describe))
            .unwrap_or_else(|| "unknown cause".to_owned())
    };
    let starting = matches!(before.state, LifecycleState::Launching | LifecycleState::Loading);
    match (&before.state, &now.state) {
        (LifecycleState::Launching | LifecycleState::Loading, LifecycleState::Awake) => {
            Some(EventReason::ScaledUp.with_note(format!("engine {replica} started and is awake")))
        }
        (LifecycleState::Waking { .. }, LifecycleState::Awake) => {
            Some(EventReason::Woken.with_note(format!("engine {replica} woke up")))
        }
        (LifecycleState::FallingAsleep { .. }, LifecycleState::Asleep { level }) => Some(
            EventReason::Slept.with_note(format!("engine {replica} is asleep at level {}", level.number())),
        ),
        // Rouse ordered the stop.
        (_, LifecycleState::Stopping { cause: FailureCause::Stopped }) => None,
        (
            _,
            LifecycleState::Failing { cause, .. }
            | LifecycleState::Stopping { cause }
            | LifecycleState::Backoff { cause, .. },
        ) if starting => {
            let why = why(Some(cause));
            Some(EventReason::FailedCreate.with_note(format!("engine {replica} failed to start: {why}")))
        }
        // After the first failure in a row the engine restarts at once.
        _ if starting && now.failures > before.failures => {
            let why = why(None);
            Some(
                EventReason::FailedCreate
                    .with_note(format!("engine {replica} failed to start: {why}; retrying")),
            )
        }
        _ => None,
    }
}

/// Returns the Event for a model that starts to wait for memory.
#[must_use]
pub fn memory_wait_event(
    before: Option<&ModelWaitReason>,
    now: Option<&ModelWaitReason>,
) -> Option<EventContent> {
    match (before, now) {
        (Some(ModelWaitReason::Memory(_)), _) => None,
        (_, Some(ModelWaitReason::Memory(why))) => Some(EventReason::InsufficientMemory.with_note(why)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use rouse::{model::SleepLevel, units::Tick};

    use super::*;

    fn was(replica: u32, state: LifecycleState) -> EngineSnapshot {
        EngineSnapshot { variant: VariantName::default(), replica, state, failures: 0, last_failure: None }
    }

    /// Returns the reasons of the Events for one engine that changes from `before` to `now`.
    fn words(before: LifecycleState, now: LifecycleState) -> Vec<&'static str> {
        let events = engine_events(&[was(0, before)], &[was(0, now)]);
        events.into_iter().map(|event| event.reason.as_str()).collect()
    }

    const STOPPED: LifecycleState = LifecycleState::Stopping { cause: FailureCause::Stopped };
    const DIED: LifecycleState = LifecycleState::Stopping { cause: FailureCause::Exited(1) };

    #[test]
    fn a_start_ends_awake_or_with_its_cause() {
        assert_eq!(words(LifecycleState::Cold, LifecycleState::Launching), [""; 0]);
        assert_eq!(words(LifecycleState::Launching, LifecycleState::Loading), [""; 0]);
        assert_eq!(words(LifecycleState::Loading, LifecycleState::Awake), ["ScaledUp"]);
        let failing = LifecycleState::Failing { cause: FailureCause::Unschedulable, drained: false };
        let events = engine_events(&[was(3, LifecycleState::Launching)], &[was(3, failing.clone())]);
        assert_eq!(events[0].reason.event_type(), "Warning");
        assert_eq!(
            events[0].note,
            "engine 3 failed to start: no node accepts the engine's Pod (unschedulable)"
        );
        let backoff = LifecycleState::Backoff { until: Tick(1), cause: FailureCause::Exited(1) };
        assert_eq!(words(LifecycleState::Loading, backoff.clone()), ["FailedCreate"]);
        // Each start reports its failure once.
        assert_eq!(words(failing, DIED), [""; 0]);
        assert_eq!(words(DIED, backoff), [""; 0]);
        // The engine was retried within the turn.
        let why = Some("exit status 1 (exited:1); last output: no weights".to_owned());
        let again = EngineSnapshot { failures: 1, last_failure: why, ..was(0, LifecycleState::Cold) };
        let events = engine_events(&[was(0, LifecycleState::Loading)], &[again]);
        assert_eq!(events.iter().map(|news| news.reason).collect::<Vec<_>>(), [EventReason::FailedCreate]);
        assert!(events[0].note.contains("last output: no weights; retrying"), "{}", events[0].note);
        // A stop order ended the start.
        assert_eq!(words(LifecycleState::Loading, STOPPED), [""; 0]);
    }

    #[test]
    fn sleep_and_wake_are_told_when_they_are_done() {
        let level = SleepLevel::One;
        assert_eq!(
            words(LifecycleState::FallingAsleep { level }, LifecycleState::Asleep { level }),
            ["Slept"]
        );
        assert_eq!(words(LifecycleState::Asleep { level }, LifecycleState::Waking { level }), [""; 0]);
        assert_eq!(words(LifecycleState::Waking { level }, LifecycleState::Awake), ["Woken"]);
    }

    #[test]
    fn engines_of_two_variants_with_the_same_number_are_not_taken_for_each_other() {
        let large = |state| EngineSnapshot { variant: "large".into(), ..was(0, state) };
        let before = [was(0, LifecycleState::Awake), large(LifecycleState::Loading)];
        let events = engine_events(&before, &[was(0, LifecycleState::Awake), large(LifecycleState::Awake)]);
        assert_eq!(events, [EventReason::ScaledUp.with_note("engine large.0 started and is awake")]);
    }

    #[test]
    fn the_last_engine_that_is_put_away_is_the_scale_to_zero() {
        assert_eq!(words(STOPPED, LifecycleState::Cold), ["ScaledToZero"]);
        assert_eq!(words(DIED, LifecycleState::Cold), [""; 0], "it failed");
        let two = |one: LifecycleState, other: LifecycleState| [was(0, one), was(1, other)];
        assert_eq!(
            engine_events(
                &two(STOPPED, LifecycleState::Awake),
                &two(LifecycleState::Cold, LifecycleState::Awake)
            ),
            []
        );
        assert_eq!(
            engine_events(
                &two(LifecycleState::Cold, STOPPED),
                &two(LifecycleState::Cold, LifecycleState::Cold)
            )
            .len(),
            1
        );
        // A newly known engine causes no Event.
        assert_eq!(engine_events(&[], &[was(0, LifecycleState::Awake)]), []);
    }

    #[test]
    fn want_of_memory_is_told_when_it_begins() {
        let [memory, more] =
            ["48Gi are free", "40Gi are free"].map(|why| ModelWaitReason::Memory(why.to_owned()));
        let other = ModelWaitReason::Other("it starts".to_owned());
        let told = memory_wait_event(Some(&other), Some(&memory));
        assert_eq!(told, Some(EventReason::InsufficientMemory.with_note("48Gi are free")));
        assert_eq!(memory_wait_event(None, Some(&memory)), told);
        assert_eq!(memory_wait_event(Some(&memory), Some(&more)), None);
        assert_eq!(memory_wait_event(Some(&memory), None), None);
        assert_eq!(memory_wait_event(None, Some(&other)), None);
    }
}
