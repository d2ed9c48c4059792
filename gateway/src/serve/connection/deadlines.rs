//! Deadlines of a connection: a slow head, idleness, a client that reads nothing, its end.
//!
//! [`rouse_net::server::deadlines`] measures them. This file decides what is due during an exchange, for HTTP/2, and at
//! the gateway's end.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use rouse_net::server::deadlines::{DeadlineTimer, Deadlines, IdleEnd, IdleLimits, IdleState, NextCheck};
use tokio::time::{Instant, Sleep};

use super::{ConnectionEnd, ConnectionLimits, MAX_STALL_WHILE_DRAINING, TIMER_GRANULARITY};
use crate::{
    http::response_body::StreamingBody,
    serve::{ShutdownStage, socket::ClientSocket},
};

/// How long an idle HTTP/2 client may take to answer a GOAWAY. Requests that it sent before are still served.
const GOAWAY_TIMEOUT: Duration = Duration::from_secs(5);

/// How long an HTTP/1.1 client may still use its kept connection once the gateway drains.
const DRAIN_IDLE_TIMEOUT: Duration = Duration::from_secs(1);

/// The deadlines of one connection, and their timer.
pub(super) struct ConnectionDeadlines<'a> {
    rules: DeadlineRules<'a>,
    checks: DeadlineTimer,
}

/// What is due when.
struct DeadlineRules<'a> {
    socket: &'a ClientSocket,
    limits: &'a ConnectionLimits,
    /// Boxed, because nearly all connections end before the gateway asks them to. `None`: nothing of it has begun.
    closing: Option<Box<ClosingTimes>>,
}

/// When the connection's end began, seen from the gateway.
#[derive(Debug, Default)]
struct ClosingTimes {
    draining_since: Option<Instant>,
    terminate_at: Option<Instant>,
    /// When the gateway asked the client to end the connection.
    close_requested_at: Option<Instant>,
}

impl<'a> ConnectionDeadlines<'a> {
    pub(super) const fn new(limits: &'a ConnectionLimits, socket: &'a ClientSocket) -> Self {
        Self { rules: DeadlineRules { socket, limits, closing: None }, checks: DeadlineTimer::new() }
    }

    pub(super) const fn socket(&self) -> &'a ClientSocket {
        self.rules.socket
    }

    /// How long the connection may last before the first check.
    pub(super) const fn first_timeout(&self) -> Duration {
        self.rules.limits.header_read.duration()
    }

    /// Returns true the first time: the caller must then ask the client to end the connection.
    pub(super) fn request_close(&mut self) -> bool {
        let closing = self.rules.closing.get_or_insert_default();
        let first = closing.close_requested_at.is_none();
        closing.close_requested_at.get_or_insert_with(Instant::now);
        first
    }

    /// Records whether the task is the same as in the last poll.
    pub(super) const fn note_same_task(&mut self, same: bool) {
        self.checks.note_same_task(same);
    }

    /// Checks the deadlines. Ready when one of them ends the connection.
    pub(super) fn poll(&mut self, timer: Pin<&mut Sleep>, cx: &mut Context<'_>) -> Poll<ConnectionEnd> {
        let socket = self.rules.socket;
        if socket.stage() > ShutdownStage::Serving {
            let closing = self.rules.closing.get_or_insert_default();
            closing.draining_since.get_or_insert_with(Instant::now);
            if socket.stage() == ShutdownStage::Terminating {
                closing.terminate_at.get_or_insert_with(|| Instant::now() + 2 * TIMER_GRANULARITY);
            }
        }
        let end = ready!(self.checks.poll(&self.rules, timer, cx));
        if matches!(end, ConnectionEnd::Stalled) {
            tracing::debug!("closing the connection: the client does not read its response");
            socket.streaming_bodies().iter().for_each(|streaming_body| streaming_body.note_stalled());
        }
        Poll::Ready(end)
    }

    #[cfg(test)]
    pub(super) fn idle_deadline(&self) -> (Instant, ConnectionEnd) {
        self.rules.idle_deadline()
    }
}

impl Deadlines for DeadlineRules<'_> {
    type End = ConnectionEnd;
    const GRANULARITY: Duration = TIMER_GRANULARITY;

    fn is_idle(&self) -> bool {
        self.socket.exchanges() == 0
    }

    fn next_check(&self) -> NextCheck {
        let socket = self.socket;
        if self.is_idle() {
            let rest = self.idle_deadline().0;
            let at = Some(self.terminate_at().map_or(rest, |ending| ending.min(rest)));
            return NextCheck { at, checks_soon: false };
        }
        let soon = socket.write_blocked_since().is_some()
            || socket.any_stalled()
            || socket.all_stalled_since().is_some();
        NextCheck { at: self.terminate_at(), checks_soon: soon }
    }

    fn expired(&self, now: Instant) -> Option<ConnectionEnd> {
        if self.terminate_at().is_some_and(|at| at <= now) {
            return Some(ConnectionEnd::Terminating);
        }
        if self.is_idle() {
            let (at, end) = self.idle_deadline();
            return (at <= now).then_some(end);
        }
        self.stalled(now)
    }
}

impl DeadlineRules<'_> {
    fn terminate_at(&self) -> Option<Instant> {
        self.closing.as_ref()?.terminate_at
    }

    /// When a connection without an exchange ends, and why.
    fn idle_deadline(&self) -> (Instant, ConnectionEnd) {
        let (state, blocked) = (self.socket.idle_state(), self.socket.write_blocked_since());
        if self.socket.is_multiplexed() && blocked.is_none() {
            let (IdleState::KeepAlive { since }
            | IdleState::NoRequest { since }
            | IdleState::ReadingHead { since }) = state;
            let ends = match self.closing.as_ref().and_then(|closing| closing.close_requested_at) {
                // hyper ends the connection: its last GOAWAY names the accepted streams. This deadline is for a client
                // that does not answer.
                Some(asked) => since.max(asked) + GOAWAY_TIMEOUT,
                None => since + self.limits.connection_idle.duration(),
            };
            return (ends, ConnectionEnd::Idle);
        }
        let limits = IdleLimits {
            head: self.limits.header_read.duration(),
            keep_alive: self.limits.connection_idle.duration(),
            write_stall: self.limits.client_stall.duration(),
            drain: DRAIN_IDLE_TIMEOUT,
        };
        let draining_since = self.closing.as_ref().and_then(|closing| closing.draining_since);
        let (at, end) = limits.deadline(state, blocked, draining_since);
        let end = match end {
            IdleEnd::NotStarted => ConnectionEnd::NotStarted,
            IdleEnd::SlowHead => ConnectionEnd::SlowHead,
            IdleEnd::Idle => ConnectionEnd::Idle,
            IdleEnd::Stalled => ConnectionEnd::Stalled,
        };
        (at, end)
    }

    /// Ends the connection, or a stream of it, if its client has read nothing for too long.
    fn stalled(&self, now: Instant) -> Option<ConnectionEnd> {
        let (socket, limit) = (self.socket, self.limits.client_stall.duration());
        let bodies = socket.streaming_bodies();
        let patience = |streaming_body: &StreamingBody| {
            if streaming_body.is_engine_draining() { limit.min(MAX_STALL_WHILE_DRAINING) } else { limit }
        };
        if let Some(since) = socket.write_blocked_since() {
            let least = bodies.iter().map(|streaming_body| patience(streaming_body)).min();
            if since + least.unwrap_or(limit) <= now {
                return Some(ConnectionEnd::Stalled);
            }
        }
        for streaming_body in bodies {
            if streaming_body.stalled_since().is_some_and(|since| since + patience(&streaming_body) <= now) {
                if !socket.is_multiplexed() {
                    return Some(ConnectionEnd::Stalled);
                }
                streaming_body.abort_stalled();
            }
        }
        // Aborted streams of a client that grants no window disappear only with their connection.
        let all = socket.all_stalled_since().is_some_and(|since| since + limit <= now);
        all.then_some(ConnectionEnd::Stalled)
    }
}
