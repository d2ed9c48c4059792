//! Deadlines of a connection: a slow head, idleness, a client that reads nothing, its end.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use rouse_config::ApiLimits;
use tokio::time::{Instant, Sleep};

use super::{ConnectionEnd, MAX_STALL_WHILE_DRAINING, TIMER_GRANULARITY};
use crate::{
    http::response_body::StreamingBody,
    serve::{
        ShutdownStage,
        socket::{ClientSocket, IdleState},
    },
};

/// How long an idle HTTP/2 client may take to answer a GOAWAY. Requests that it sent before are still served.
const GOAWAY_TIMEOUT: Duration = Duration::from_secs(5);

/// How long an HTTP/1.1 client may still use its kept connection once the gateway drains. The response then carries
/// `connection: close`. A silent close could hit a request that is on its way, and the client could not know that the
/// request never began.
const DRAIN_IDLE_TIMEOUT: Duration = Duration::from_secs(1);

/// The deadlines of one connection.
pub(super) struct ConnectionDeadlines<'a> {
    limits: &'a ApiLimits,
    draining_since: Option<Instant>,
    terminate_at: Option<Instant>,
    /// When the gateway asked the client to end the connection.
    close_requested_at: Option<Instant>,
    /// The timer fires within [`TIMER_GRANULARITY`] of the first detected stall; until then no check is needed.
    checks_soon: bool,
    /// The timer wakes the current task.
    timer_armed: bool,
}

/// When the connection needs its next check.
struct NextCheck {
    at: Option<Instant>,
    /// Also check within [`TIMER_GRANULARITY`], whichever comes first.
    checks_soon: bool,
}

impl NextCheck {
    fn earliest(&self) -> Option<Instant> {
        let soon = self.checks_soon.then(|| Instant::now() + TIMER_GRANULARITY);
        self.at.into_iter().chain(soon).min()
    }
}

impl<'a> ConnectionDeadlines<'a> {
    pub(super) const fn new(limits: &'a ApiLimits) -> Self {
        Self {
            limits,
            draining_since: None,
            terminate_at: None,
            close_requested_at: None,
            checks_soon: false,
            timer_armed: false,
        }
    }

    /// Returns true the first time: the caller must then ask the client to end the connection.
    pub(super) fn request_close(&mut self) -> bool {
        let first = self.close_requested_at.is_none();
        self.close_requested_at.get_or_insert_with(Instant::now);
        first
    }

    /// Records whether the task is the same as in the last poll.
    pub(super) const fn note_same_task(&mut self, same: bool) {
        self.timer_armed &= same;
    }

    /// Checks the deadlines. The timer is moved only when something is due earlier; a timer that fires too early is set
    /// again.
    pub(super) fn poll(
        &mut self,
        socket: &ClientSocket,
        mut timer: Pin<&mut Sleep>,
        cx: &mut Context<'_>,
    ) -> Poll<ConnectionEnd> {
        if socket.stage() > ShutdownStage::Serving && self.draining_since.is_none() {
            self.draining_since = Some(Instant::now());
        }
        if socket.stage() == ShutdownStage::Terminating && self.terminate_at.is_none() {
            self.terminate_at = Some(Instant::now() + 2 * TIMER_GRANULARITY);
        }
        // This runs once per frame, where reading the clock or polling an unchanged timer would be a good part of the
        // cost.
        if !self.checks_soon || socket.exchanges() == 0 {
            let due = self.next_check(socket);
            if let Some(at) = due.earliest()
                && at < timer.deadline()
            {
                self.checks_soon = due.checks_soon;
                self.timer_armed = false;
                timer.as_mut().reset(at);
            }
        }
        if self.timer_armed && !timer.is_elapsed() {
            return Poll::Pending;
        }
        while timer.as_mut().poll(cx).is_ready() {
            let now = Instant::now();
            if let Some(end) = self.expired(socket, now) {
                if matches!(end, ConnectionEnd::Stalled) {
                    tracing::debug!("closing the connection: the client does not read its response");
                    socket.streaming_bodies().iter().for_each(|streaming_body| streaming_body.note_stalled());
                }
                return Poll::Ready(end);
            }
            let due = self.next_check(socket);
            self.checks_soon = due.checks_soon;
            timer.as_mut().reset(
                due.earliest()
                    .map_or(now + 60 * TIMER_GRANULARITY, |due| due.max(now + TIMER_GRANULARITY / 20)),
            );
        }
        // Without budget the timer's poll registered no waker.
        self.timer_armed = tokio::task::coop::has_budget_remaining();
        Poll::Pending
    }

    fn next_check(&self, socket: &ClientSocket) -> NextCheck {
        if socket.exchanges() == 0 {
            let rest = self.idle_deadline(socket).0;
            return NextCheck {
                at: Some(self.terminate_at.map_or(rest, |ending| ending.min(rest))),
                checks_soon: false,
            };
        }
        let soon = socket.write_blocked_since().is_some()
            || socket.any_stalled()
            || (socket.is_multiplexed() && socket.all_stalled_since().is_some());
        NextCheck { at: self.terminate_at, checks_soon: soon }
    }

    pub(super) fn idle_deadline(&self, socket: &ClientSocket) -> (Instant, ConnectionEnd) {
        // The last response is complete for the gateway but still unsent, and the client's further requests are not
        // read.
        if let Some(since) = socket.write_blocked_since() {
            return (since + self.limits.client_stall.duration(), ConnectionEnd::Stalled);
        }
        let head = self.limits.header_read.duration();
        let idle = self.limits.connection_idle.duration();
        match socket.idle_state() {
            IdleState::KeepAlive { since }
            | IdleState::NoRequest { since }
            | IdleState::ReadingHead { since }
                if socket.is_multiplexed() =>
            {
                let ends = match self.close_requested_at {
                    // hyper ends the connection: its last GOAWAY names the accepted streams. This deadline is for a
                    // client that does not answer.
                    Some(asked) => since.max(asked) + GOAWAY_TIMEOUT,
                    None => since + idle,
                };
                (ends, ConnectionEnd::Idle)
            }
            IdleState::KeepAlive { since } => {
                (self.drain_deadline(since).unwrap_or(since + idle).min(since + idle), ConnectionEnd::Idle)
            }
            // A request sent right after the connection opened may be on its way, so allow twice the time of an idle
            // connection.
            IdleState::NoRequest { since } | IdleState::ReadingHead { since } => {
                match self.drain_deadline(since).map(|at| at + DRAIN_IDLE_TIMEOUT) {
                    Some(parts) if parts < since + head => (parts, ConnectionEnd::NotStarted),
                    _ => (since + head, ConnectionEnd::SlowHead),
                }
            }
        }
    }

    /// When the gateway gives up a connection that is idle since `since`, because the gateway drains.
    fn drain_deadline(&self, since: Instant) -> Option<Instant> {
        self.draining_since.map(|draining| since.max(draining) + DRAIN_IDLE_TIMEOUT)
    }

    fn expired(&self, socket: &ClientSocket, now: Instant) -> Option<ConnectionEnd> {
        if self.terminate_at.is_some_and(|at| at <= now) {
            return Some(ConnectionEnd::Terminating);
        }
        if socket.exchanges() == 0 {
            let (at, end) = self.idle_deadline(socket);
            return (at <= now).then_some(end);
        }
        let lives = socket.streaming_bodies();
        let patience = |streaming_body: &StreamingBody| {
            let most = self.limits.client_stall.duration();
            if streaming_body.is_engine_draining() { most.min(MAX_STALL_WHILE_DRAINING) } else { most }
        };
        if let Some(since) = socket.write_blocked_since() {
            let least = lives.iter().map(|streaming_body| patience(streaming_body)).min();
            let most = least.unwrap_or_else(|| self.limits.client_stall.duration());
            if since + most <= now {
                return Some(ConnectionEnd::Stalled);
            }
        }
        for streaming_body in lives {
            if streaming_body.stalled_since().is_some_and(|since| since + patience(&streaming_body) <= now) {
                if !socket.is_multiplexed() {
                    return Some(ConnectionEnd::Stalled);
                }
                streaming_body.abort_stalled();
            }
        }
        // Aborted streams of a client that grants no window disappear only with their connection.
        if socket.is_multiplexed()
            && socket
                .all_stalled_since()
                .is_some_and(|since| since + self.limits.client_stall.duration() <= now)
        {
            return Some(ConnectionEnd::Stalled);
        }
        None
    }
}
