use std::{cell::Cell, future::poll_fn, pin::pin};

use tokio::time::sleep_until;

use super::*;

const LIMITS: IdleLimits = IdleLimits {
    head: Duration::from_secs(10),
    keep_alive: Duration::from_secs(75),
    write_stall: Duration::from_secs(60),
    drain: Duration::from_secs(1),
};

const fn after(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[tokio::test]
async fn a_connection_between_exchanges_ends_by_its_state() {
    let since = Instant::now();
    for (state, limit, end) in [
        (IdleState::NoRequest { since }, 10, IdleEnd::SlowHead),
        (IdleState::ReadingHead { since }, 10, IdleEnd::SlowHead),
        (IdleState::KeepAlive { since }, 75, IdleEnd::Idle),
    ] {
        assert_eq!(LIMITS.deadline(state, None, None), (since + after(limit), end), "{state:?}");
        // The client does not read, so its next head is not read either.
        let blocked = since + after(3);
        let stalled = (blocked + after(60), IdleEnd::Stalled);
        assert_eq!(LIMITS.deadline(state, Some(blocked), Some(since)), stalled, "{state:?}");
    }
}

#[tokio::test]
async fn a_drain_shortens_the_wait_for_a_request_and_never_lengthens_it() {
    let since = Instant::now();
    for (state, draining, limit, end) in [
        (IdleState::KeepAlive { since }, 5, 6, IdleEnd::Idle),
        (IdleState::KeepAlive { since }, 75, 75, IdleEnd::Idle),
        (IdleState::NoRequest { since }, 5, 7, IdleEnd::NotStarted),
        (IdleState::ReadingHead { since }, 5, 7, IdleEnd::NotStarted),
        (IdleState::ReadingHead { since }, 8, 10, IdleEnd::SlowHead),
    ] {
        let due = LIMITS.deadline(state, None, Some(since + after(draining)));
        assert_eq!(due, (since + after(limit), end), "{state:?} {draining}");
    }
    // A connection that begins to wait during the drain has its time from then on.
    let later = since + after(4);
    let due = LIMITS.deadline(IdleState::KeepAlive { since: later }, None, Some(since));
    assert_eq!(due, (later + after(1), IdleEnd::Idle));
}

#[tokio::test]
async fn a_state_between_exchanges_keeps_its_beginning_until_it_changes() {
    use Http1Phase::{Flushing, Idle, ReadingHead, Responding, Serving};
    let mut tracker = Http1IdleTracker::new();
    let mut observed = |phase, requests| {
        tracker.observe(phase, requests);
        tracker.state()
    };
    let accepted = observed(Idle, 0);
    assert!(matches!(accepted, Some(IdleState::NoRequest { .. })));
    assert_eq!(observed(Idle, 0), accepted);
    let head = observed(ReadingHead, 0);
    assert!(matches!(head, Some(IdleState::ReadingHead { .. })));
    // A line end in front of a head may leave the connection without a part of it, and wins no time.
    assert_eq!((observed(Idle, 0), observed(ReadingHead, 0)), (head, head));
    for phase in [Serving, Responding, Flushing] {
        assert_eq!(observed(phase, 1), None, "{phase:?}");
    }
    let kept = observed(Idle, 1);
    assert!(matches!(kept, Some(IdleState::KeepAlive { .. })));
    assert_eq!(observed(Idle, 1), kept);
    // Exchanges that begin and end within one poll restart the wait.
    let (Some(IdleState::KeepAlive { since: first }), Some(IdleState::KeepAlive { since: second })) =
        (kept, observed(Idle, 2))
    else {
        panic!("the connection is not kept");
    };
    assert!(second > first, "the second exchange does not count");
    let next = observed(ReadingHead, 2);
    assert!(matches!(next, Some(IdleState::ReadingHead { since }) if since >= second));
    // The head behind another request has its own time.
    assert_ne!(observed(ReadingHead, 3), next);
}

/// Deadlines that a test sets, and that end the connection at the second check.
struct ScriptedDeadlines {
    idle: bool,
    due: Cell<NextCheck>,
    checks: Cell<u32>,
}

impl ScriptedDeadlines {
    const fn new(idle: bool, due: NextCheck) -> Self {
        Self { idle, due: Cell::new(due), checks: Cell::new(0) }
    }
}

impl Deadlines for ScriptedDeadlines {
    type End = Instant;
    const GRANULARITY: Duration = Duration::from_millis(10);

    fn is_idle(&self) -> bool {
        self.idle
    }

    fn next_check(&self) -> NextCheck {
        self.due.get()
    }

    fn expired(&self, now: Instant) -> Option<Instant> {
        self.checks.set(self.checks.get() + 1);
        (self.checks.get() == 2).then_some(now)
    }
}

#[tokio::test]
async fn a_timer_that_fires_for_a_deadline_that_has_moved_is_set_again() {
    let start = Instant::now();
    let (near, far) = (start + Duration::from_millis(20), start + Duration::from_millis(60));
    let deadlines = ScriptedDeadlines::new(true, NextCheck { at: Some(near), checks_soon: false });
    let mut timer = pin!(sleep_until(start + after(3600)));
    let mut checks = DeadlineTimer::new();
    let ended = poll_fn(|cx| {
        let polled = checks.poll(&deadlines, timer.as_mut(), cx);
        // The timer is set for the earlier moment and fires then, without an end.
        deadlines.due.set(NextCheck { at: Some(far), checks_soon: false });
        polled
    })
    .await;
    assert!(ended >= far, "{:?} before the second deadline", far - ended);
}

#[tokio::test]
async fn a_stall_is_checked_at_the_granularity_and_an_exchange_without_a_stall_never() {
    let start = Instant::now();
    let far = start + after(3600);
    let stall = ScriptedDeadlines::new(false, NextCheck { at: None, checks_soon: true });
    let mut timer = pin!(sleep_until(far));
    let mut checks = DeadlineTimer::new();
    let ended = poll_fn(|cx| checks.poll(&stall, timer.as_mut(), cx)).await;
    assert!(ended >= start + Duration::from_millis(20) && ended < far);
    let quiet = ScriptedDeadlines::new(false, NextCheck::default());
    let mut timer = pin!(sleep_until(far));
    let mut checks = DeadlineTimer::new();
    let polled = poll_fn(|cx| Poll::Ready(checks.poll(&quiet, timer.as_mut(), cx))).await;
    assert!(polled.is_pending());
    assert_eq!((timer.deadline(), quiet.checks.get()), (far, 0));
}
