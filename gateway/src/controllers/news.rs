//! What of a model's life is worth an Event: decided from what its engines and its want of memory were and are now. The words
//! of all Events are here, those of dual pods too.

use rouse::{
    engine::{Engine, state::State},
    fault::Cause,
};

use super::status::Waiting;

/// The word of an Event. The pages say what each means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
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
}

/// Something happened to a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct News {
    pub reason: Reason,
    pub note: String,
}

/// One engine, as far as it makes news.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Was {
    pub replica: u32,
    pub state: State,
    /// In a row.
    pub failures: u32,
    /// Why the last of them did, with its own words.
    pub why: Option<String>,
}

impl Reason {
    /// Of models.
    pub const ALL: [Self; 9] = [
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
    /// Of the Pods of dual pods.
    pub const OF_PODS: [Self; 7] = [
        Self::Waiting,
        Self::Served,
        Self::Deleted,
        Self::Slept,
        Self::Ended,
        Self::Failed,
        Self::ShortGrace,
    ];

    #[must_use]
    pub const fn word(self) -> &'static str {
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
        }
    }

    /// Whether another note is another Event: an API server has the note of one that is there stay.
    #[must_use]
    pub const fn goes_by_note(self) -> bool {
        matches!(self, Self::Waiting)
    }

    /// The type of the Event.
    #[must_use]
    pub const fn kind(self) -> &'static str {
        match self {
            Self::InsufficientMemory | Self::FailedCreate | Self::Failed | Self::ShortGrace => "Warning",
            _ => "Normal",
        }
    }

    /// What was being done when it happened.
    #[must_use]
    pub const fn action(self) -> &'static str {
        match self {
            Self::Created | Self::Updated | Self::ShortGrace => "Accept",
            Self::ScaledUp | Self::InsufficientMemory | Self::FailedCreate => "Start",
            Self::ScaledToZero => "Stop",
            Self::Slept => "Sleep",
            Self::Woken => "Wake",
            Self::Deleted => "Delete",
            Self::Waiting => "Wait",
            Self::Served => "Serve",
            Self::Ended | Self::Failed => "End",
        }
    }

    #[must_use]
    pub fn news(self, note: impl Into<String>) -> News {
        News { reason: self, note: note.into() }
    }
}

impl Was {
    #[must_use]
    pub fn of(engine: &Engine) -> Self {
        let why = engine.failure().map(|failure| failure.cause.words() + &failure.symptoms.words());
        Self { replica: engine.id.replica, state: engine.state.clone(), failures: engine.failures, why }
    }
}

/// Of the engines of one model, at the ends of two turns that followed each other.
#[must_use]
pub fn of_engines(before: &[Was], now: &[Was]) -> Vec<News> {
    let pairs = now.iter().filter_map(|now| {
        let before = before.iter().find(|before| before.replica == now.replica)?;
        Some((before, now))
    });
    let mut news: Vec<News> = pairs.filter_map(|(before, now)| of_engine(before, now)).collect();
    let run = |engines: &[Was]| engines.iter().any(|engine| engine.state.has_process());
    let stopped = |engine: &Was| matches!(engine.state, State::Stopping { cause: Cause::Stopped });
    // Of those that failed their own news tells, if there is any.
    if run(before) && !run(now) && before.iter().filter(|engine| engine.state.has_process()).all(stopped) {
        news.push(Reason::ScaledToZero.news("no engine runs any more: the next request starts one"));
    }
    news
}

fn of_engine(before: &Was, now: &Was) -> Option<News> {
    let replica = now.replica;
    let why = |cause: Option<&Cause>| {
        now.why
            .clone()
            .or_else(|| cause.map(Cause::words))
            .unwrap_or_else(|| "for no known reason".to_owned())
    };
    let starting = matches!(before.state, State::Launching | State::Loading);
    match (&before.state, &now.state) {
        (State::Launching | State::Loading, State::Awake) => {
            Some(Reason::ScaledUp.news(format!("engine {replica} was started, and is awake")))
        }
        (State::Waking { .. }, State::Awake) => {
            Some(Reason::Woken.news(format!("engine {replica} was asleep, and is awake")))
        }
        (State::FallingAsleep { .. }, State::Asleep { level }) => {
            Some(Reason::Slept.news(format!("engine {replica} is asleep at level {}", level.number())))
        }
        // It was told to go.
        (_, State::Stopping { cause: Cause::Stopped }) => None,
        (_, State::Failing { cause, .. } | State::Stopping { cause } | State::Backoff { cause, .. })
            if starting =>
        {
            let why = why(Some(cause));
            Some(Reason::FailedCreate.news(format!("engine {replica} could not be started: {why}")))
        }
        // The first failure in a row is followed by another start at once.
        _ if starting && now.failures > before.failures => {
            let why = why(None);
            Some(
                Reason::FailedCreate
                    .news(format!("engine {replica} could not be started: {why}; it is started again")),
            )
        }
        _ => None,
    }
}

/// Of what the model waits for.
#[must_use]
pub fn of_want(before: Option<&Waiting>, now: Option<&Waiting>) -> Option<News> {
    match (before, now) {
        (Some(Waiting::Memory(_)), _) => None,
        (_, Some(Waiting::Memory(why))) => Some(Reason::InsufficientMemory.news(why)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use rouse::{model::Level, units::Tick};

    use super::*;

    fn was(replica: u32, state: State) -> Was {
        Was { replica, state, failures: 0, why: None }
    }

    /// The words for one engine that was one thing and is another.
    fn words(before: State, now: State) -> Vec<&'static str> {
        let news = of_engines(&[was(0, before)], &[was(0, now)]);
        news.into_iter().map(|news| news.reason.word()).collect()
    }

    const STOPPED: State = State::Stopping { cause: Cause::Stopped };
    const DIED: State = State::Stopping { cause: Cause::Exited(1) };

    #[test]
    fn a_start_ends_awake_or_with_its_cause() {
        assert_eq!(words(State::Cold, State::Launching), [""; 0]);
        assert_eq!(words(State::Launching, State::Loading), [""; 0]);
        assert_eq!(words(State::Loading, State::Awake), ["ScaledUp"]);
        let failing = State::Failing { cause: Cause::Unschedulable, drained: false };
        let news = of_engines(&[was(3, State::Launching)], &[was(3, failing.clone())]);
        assert_eq!(news[0].reason.kind(), "Warning");
        assert_eq!(news[0].note, "engine 3 could not be started: no node takes its Pod (unschedulable)");
        let backoff = State::Backoff { until: Tick(1), cause: Cause::Exited(1) };
        assert_eq!(words(State::Loading, backoff.clone()), ["FailedCreate"]);
        // It is told once of each start.
        assert_eq!(words(failing, DIED), [""; 0]);
        assert_eq!(words(DIED, backoff), [""; 0]);
        // It was tried again within the turn.
        let why = Some("exit status 1 (exited:1); it wrote last: no weights".to_owned());
        let again = Was { failures: 1, why, ..was(0, State::Cold) };
        let news = of_engines(&[was(0, State::Loading)], &[again]);
        assert_eq!(news.iter().map(|news| news.reason).collect::<Vec<_>>(), [Reason::FailedCreate]);
        assert!(news[0].note.contains("it wrote last: no weights; it is started again"), "{}", news[0].note);
        // An order came between.
        assert_eq!(words(State::Loading, STOPPED), [""; 0]);
    }

    #[test]
    fn sleep_and_wake_are_told_when_they_are_done() {
        let level = Level::One;
        assert_eq!(words(State::FallingAsleep { level }, State::Asleep { level }), ["Slept"]);
        assert_eq!(words(State::Asleep { level }, State::Waking { level }), [""; 0]);
        assert_eq!(words(State::Waking { level }, State::Awake), ["Woken"]);
    }

    #[test]
    fn the_last_engine_that_is_put_away_is_the_scale_to_zero() {
        assert_eq!(words(STOPPED, State::Cold), ["ScaledToZero"]);
        assert_eq!(words(DIED, State::Cold), [""; 0], "it failed");
        let two = |one: State, other: State| [was(0, one), was(1, other)];
        assert_eq!(of_engines(&two(STOPPED, State::Awake), &two(State::Cold, State::Awake)), []);
        assert_eq!(of_engines(&two(State::Cold, STOPPED), &two(State::Cold, State::Cold)).len(), 1);
        // Of one that was not known nothing is told.
        assert_eq!(of_engines(&[], &[was(0, State::Awake)]), []);
    }

    #[test]
    fn want_of_memory_is_told_when_it_begins() {
        let [memory, more] = ["48Gi are free", "40Gi are free"].map(|why| Waiting::Memory(why.to_owned()));
        let other = Waiting::Other("it starts".to_owned());
        let told = of_want(Some(&other), Some(&memory));
        assert_eq!(told, Some(Reason::InsufficientMemory.news("48Gi are free")));
        assert_eq!(of_want(None, Some(&memory)), told);
        assert_eq!(of_want(Some(&memory), Some(&more)), None);
        assert_eq!(of_want(Some(&memory), None), None);
        assert_eq!(of_want(None, Some(&other)), None);
    }
}
