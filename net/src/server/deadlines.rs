//! Deadlines of a client's connection: a slow head, idleness, a client that reads nothing, the end of a drain.
//!
//! A server measures all of them with one timer per connection ([`DeadlineTimer`]). It moves the timer only when
//! something is due earlier, because this code runs once per frame of a stream, where reading the clock or polling an
//! unchanged timer would be a good part of the frame's cost. What is due while an exchange runs depends on the server.
//! What is due between exchanges does not, so [`IdleLimits`] decides it for the gateway and the stub.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::{Instant, Sleep};

use super::Http1Phase;

/// The longest time without any check, as a multiple of the granularity.
const MAX_CHECK_INTERVAL: u32 = 60;
/// The shortest time between two checks, as a fraction of the granularity.
const MIN_CHECK_INTERVAL_DIVISOR: u32 = 20;

/// The state of a connection between two exchanges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdleState {
    /// The client has sent nothing, not even a first request.
    NoRequest {
        /// When the connection was accepted.
        since: Instant,
    },
    /// The last exchange is over, and the next one has not begun.
    KeepAlive {
        /// When the last exchange ended.
        since: Instant,
    },
    /// A part of a head arrived.
    ReadingHead {
        /// When the first byte arrived.
        since: Instant,
    },
}

/// Why a connection ends between two exchanges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdleEnd {
    /// The server drains, and the client has not sent a whole head: there is nothing to answer.
    NotStarted,
    /// The first or next head did not arrive in time.
    SlowHead,
    /// No further request arrived in time.
    Idle,
    /// The client does not read the last response, which the server still holds in part.
    Stalled,
}

/// How long a connection may last between two exchanges.
#[derive(Clone, Copy, Debug)]
pub struct IdleLimits {
    /// For a head, from its first byte, and for the first byte of a new connection.
    pub head: Duration,
    /// Without a further request.
    pub keep_alive: Duration,
    /// While the client reads none of the bytes that are ready for it.
    pub write_stall: Duration,
    /// Without a further request while the server drains; twice this for a first request or the rest of a head. The
    /// next response then carries `connection: close`. A silent close at once could hit a request that is on its way,
    /// and the client could not know that the request never began.
    pub drain: Duration,
}

impl IdleLimits {
    /// Returns when a connection without an exchange ends, and why.
    ///
    /// `blocked_since`: since when the client reads nothing. `draining_since`: since when the server drains.
    #[must_use]
    pub fn deadline(
        &self,
        state: IdleState,
        blocked_since: Option<Instant>,
        draining_since: Option<Instant>,
    ) -> (Instant, IdleEnd) {
        // The last response is complete for the server but still unsent, and the client's further requests are not
        // read.
        if let Some(since) = blocked_since {
            return (since + self.write_stall, IdleEnd::Stalled);
        }
        let drained = |since: Instant| draining_since.map(|draining| since.max(draining) + self.drain);
        match state {
            IdleState::KeepAlive { since } => {
                let idle = since + self.keep_alive;
                (drained(since).map_or(idle, |at| at.min(idle)), IdleEnd::Idle)
            }
            // A request sent right after the connection opened may be on its way, so allow twice the time of a kept
            // connection.
            IdleState::NoRequest { since } | IdleState::ReadingHead { since } => {
                let slow = since + self.head;
                match drained(since).map(|at| at + self.drain) {
                    Some(at) if at < slow => (at, IdleEnd::NotStarted),
                    _ => (slow, IdleEnd::SlowHead),
                }
            }
        }
    }
}

/// Follows the phases of an HTTP/1.1 connection, and dates those between its exchanges.
///
/// The connection itself reads no clock. The tracker reads it only when the state changes.
#[derive(Clone, Copy, Debug)]
pub struct Http1IdleTracker {
    /// `None` during an exchange.
    state: Option<IdleState>,
    requests: u64,
}

impl Http1IdleTracker {
    /// Returns the state of a connection that has just been accepted.
    #[must_use]
    pub fn new() -> Self {
        Self { state: Some(IdleState::NoRequest { since: Instant::now() }), requests: 0 }
    }

    /// Returns the state between two exchanges; `None` during an exchange.
    #[must_use]
    pub const fn state(&self) -> Option<IdleState> {
        self.state
    }

    /// Records the connection's phase after a poll. `requests`: how many heads it has read.
    pub fn observe(&mut self, phase: Http1Phase, requests: u64) {
        // A whole exchange may pass within one poll.
        let same = std::mem::replace(&mut self.requests, requests) == requests;
        let state = self.state.filter(|_| same);
        self.state = match (phase, state) {
            (Http1Phase::Serving | Http1Phase::Responding | Http1Phase::Flushing, _) => None,
            // Line ends in front of a head are dropped as they arrive, and must not win time for it.
            (Http1Phase::Idle, Some(state)) => Some(state),
            (Http1Phase::ReadingHead, Some(state @ IdleState::ReadingHead { .. })) => Some(state),
            (Http1Phase::Idle, None) => Some(IdleState::KeepAlive { since: Instant::now() }),
            (Http1Phase::ReadingHead, _) => Some(IdleState::ReadingHead { since: Instant::now() }),
        };
    }
}

impl Default for Http1IdleTracker {
    fn default() -> Self {
        Self::new()
    }
}

/// When a connection needs its next check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NextCheck {
    /// `None`: nothing is due as long as nothing changes.
    pub at: Option<Instant>,
    /// Also check within the timer's granularity, whichever comes first: a stall has begun.
    pub checks_soon: bool,
}

impl NextCheck {
    fn earliest(&self, granularity: Duration) -> Option<Instant> {
        let soon = self.checks_soon.then(|| Instant::now() + granularity);
        self.at.into_iter().chain(soon).min()
    }
}

/// The deadlines that a [`DeadlineTimer`] checks.
pub trait Deadlines {
    /// Why a deadline ends the connection.
    type End;

    /// How late a stall may be noticed, and a deadline during an exchange.
    const GRANULARITY: Duration;

    /// Reports whether the connection is between two exchanges. During an exchange a stall is looked for only within
    /// the timer's granularity.
    fn is_idle(&self) -> bool;

    /// Returns when the next check is due. Called for every frame, so it should not read the clock.
    fn next_check(&self) -> NextCheck;

    /// Returns the end of the connection, if a deadline has passed at `now`.
    fn expired(&self, now: Instant) -> Option<Self::End>;
}

/// Checks a connection's deadlines with one timer that is set as rarely as possible.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeadlineTimer {
    /// The timer fires within the granularity of the first detected stall; until then no check is needed.
    checks_soon: bool,
    /// The timer wakes the current task.
    armed: bool,
}

impl DeadlineTimer {
    /// Returns the state before the first check.
    #[must_use]
    pub const fn new() -> Self {
        Self { checks_soon: false, armed: false }
    }

    /// Records whether the task is the same as in the last poll. `timer` then wakes it already.
    pub const fn note_same_task(&mut self, same: bool) {
        self.armed &= same;
    }

    /// Checks the deadlines. The timer is moved only when something is due earlier; a timer that fires too early is set
    /// again. Ready with the end of the connection.
    pub fn poll<D: Deadlines>(
        &mut self,
        deadlines: &D,
        mut timer: Pin<&mut Sleep>,
        cx: &mut Context<'_>,
    ) -> Poll<D::End> {
        if !self.checks_soon || deadlines.is_idle() {
            let due = deadlines.next_check();
            if let Some(at) = due.earliest(D::GRANULARITY)
                && at < timer.deadline()
            {
                self.checks_soon = due.checks_soon;
                self.armed = false;
                timer.as_mut().reset(at);
            }
        }
        if self.armed && !timer.is_elapsed() {
            return Poll::Pending;
        }
        while timer.as_mut().poll(cx).is_ready() {
            let now = Instant::now();
            if let Some(end) = deadlines.expired(now) {
                return Poll::Ready(end);
            }
            let due = deadlines.next_check();
            self.checks_soon = due.checks_soon;
            let earliest = now + D::GRANULARITY / MIN_CHECK_INTERVAL_DIVISOR;
            let latest = now + D::GRANULARITY * MAX_CHECK_INTERVAL;
            timer.as_mut().reset(due.earliest(D::GRANULARITY).map_or(latest, |due| due.max(earliest)));
        }
        // Without budget the timer's poll registered no waker.
        self.armed = tokio::task::coop::has_budget_remaining();
        Poll::Pending
    }
}

#[cfg(test)]
mod tests;
