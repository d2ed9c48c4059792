//! What of a connection must not last: a head in dribs, idleness, a client that takes nothing, its end.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::{Instant, Sleep};

use super::{COARSE, DRAINING_STALL, End};
use crate::{
    config::Limits,
    http::reply::Live,
    serve::{
        Stage,
        socket::{Rest, Socket},
    },
};

/// How long a client of HTTP/2 that was idle may take to hear that its connection ends: requests that it sent before
/// are still served.
const GOODBYE: Duration = Duration::from_secs(5);

/// How long a client of HTTP/1.1 that keeps its connection may still use it once the gateway drains. The answer then says
/// that the connection ends; closed without a word, it may be closed under a request that is on its way, and nobody could tell
/// its client that this was never begun.
const PARTING: Duration = Duration::from_secs(1);

/// What must not last.
pub(super) struct Watch<'a> {
    limits: &'a Limits,
    draining: Option<Instant>,
    ending: Option<Instant>,
    /// When the client was asked to end the connection.
    asked: Option<Instant>,
    /// The timer fires within [`COARSE`] of when a client was first found to stall; until then nothing need be looked at.
    soon: bool,
    /// The timer wakes the present task.
    timed: bool,
}

/// When the connection is to be looked at again.
struct Due {
    at: Option<Instant>,
    /// Or within [`COARSE`], whichever comes first.
    soon: bool,
}

impl Due {
    fn earliest(&self) -> Option<Instant> {
        let soon = self.soon.then(|| Instant::now() + COARSE);
        self.at.into_iter().chain(soon).min()
    }
}

impl<'a> Watch<'a> {
    pub(super) const fn new(limits: &'a Limits) -> Self {
        Self { limits, draining: None, ending: None, asked: None, soon: false, timed: false }
    }

    /// True the first time: the client is to be asked to end the connection.
    pub(super) fn asks(&mut self) -> bool {
        let first = self.asked.is_none();
        self.asked.get_or_insert_with(Instant::now);
        first
    }

    /// Whether the task is the one of the last poll.
    pub(super) const fn is_of(&mut self, same: bool) {
        self.timed &= same;
    }

    /// The timer is set only when something is due before it; one that fires for nothing is set again.
    pub(super) fn poll(
        &mut self,
        socket: &Socket,
        mut timer: Pin<&mut Sleep>,
        cx: &mut Context<'_>,
    ) -> Poll<End> {
        if socket.stage() > Stage::Serving && self.draining.is_none() {
            self.draining = Some(Instant::now());
        }
        if socket.stage() == Stage::Ending && self.ending.is_none() {
            self.ending = Some(Instant::now() + 2 * COARSE);
        }
        // Once per frame, where asking the clock, or a timer that has nothing new to say, would be a good part of its cost.
        if !self.soon || socket.exchanges() == 0 {
            let due = self.due(socket);
            if let Some(at) = due.earliest()
                && at < timer.deadline()
            {
                self.soon = due.soon;
                self.timed = false;
                timer.as_mut().reset(at);
            }
        }
        if self.timed && !timer.is_elapsed() {
            return Poll::Pending;
        }
        while timer.as_mut().poll(cx).is_ready() {
            let now = Instant::now();
            if let Some(end) = self.verdict(socket, now) {
                if matches!(end, End::Stalled) {
                    tracing::debug!("cut a client that took nothing");
                    socket.lives().iter().for_each(|live| live.note_stalled());
                }
                return Poll::Ready(end);
            }
            let due = self.due(socket);
            self.soon = due.soon;
            timer.as_mut().reset(due.earliest().map_or(now + 60 * COARSE, |due| due.max(now + COARSE / 20)));
        }
        // Without it the timer was not asked, and wakes nobody.
        self.timed = tokio::task::coop::has_budget_remaining();
        Poll::Pending
    }

    fn due(&self, socket: &Socket) -> Due {
        if socket.exchanges() == 0 {
            let rest = self.rest_ends(socket).0;
            return Due { at: Some(self.ending.map_or(rest, |ending| ending.min(rest))), soon: false };
        }
        let soon = socket.write_blocked().is_some()
            || socket.any_stalled()
            || (socket.is_multiplexed() && socket.unasked_since().is_some());
        Due { at: self.ending, soon }
    }

    pub(super) fn rest_ends(&self, socket: &Socket) -> (Instant, End) {
        // The last answer is complete for us, and yet not out: what the client sends meanwhile is not looked at.
        if let Some(since) = socket.write_blocked() {
            return (since + self.limits.client_stall.duration(), End::Stalled);
        }
        let head = self.limits.header_read.duration();
        let idle = self.limits.connection_idle.duration();
        match socket.rest() {
            Rest::Idle { since } | Rest::Fresh { since } | Rest::Head { since }
                if socket.is_multiplexed() =>
            {
                let ends = match self.asked {
                    // Over when hyper says so: its last GOAWAY names what was heard. This is for a client that does
                    // not answer.
                    Some(asked) => since.max(asked) + GOODBYE,
                    None => since + idle,
                };
                (ends, End::Idle)
            }
            Rest::Idle { since } => (self.parts(since).unwrap_or(since + idle).min(since + idle), End::Idle),
            // A request may be on its way that was sent as soon as the connection was there: twice the time of one that rests.
            Rest::Fresh { since } | Rest::Head { since } => match self.parts(since).map(|at| at + PARTING) {
                Some(parts) if parts < since + head => (parts, End::Unbegun),
                _ => (since + head, End::SlowHead),
            },
        }
    }

    /// When a connection that rests since then is given up because the gateway drains.
    fn parts(&self, since: Instant) -> Option<Instant> {
        self.draining.map(|draining| since.max(draining) + PARTING)
    }

    fn verdict(&self, socket: &Socket, now: Instant) -> Option<End> {
        if self.ending.is_some_and(|at| at <= now) {
            return Some(End::Ending);
        }
        if socket.exchanges() == 0 {
            let (at, end) = self.rest_ends(socket);
            return (at <= now).then_some(end);
        }
        let lives = socket.lives();
        let patience = |live: &Live| {
            let most = self.limits.client_stall.duration();
            if live.drains() { most.min(DRAINING_STALL) } else { most }
        };
        if let Some(since) = socket.write_blocked() {
            let least = lives.iter().map(|live| patience(live)).min();
            let most = least.unwrap_or_else(|| self.limits.client_stall.duration());
            if since + most <= now {
                return Some(End::Stalled);
            }
        }
        for live in lives {
            if live.stalled_since().is_some_and(|since| since + patience(&live) <= now) {
                if !socket.is_multiplexed() {
                    return Some(End::Stalled);
                }
                live.cut();
            }
        }
        // Streams that were cut are only gone with their connection, when the client gives them no window.
        if socket.is_multiplexed()
            && socket.unasked_since().is_some_and(|since| since + self.limits.client_stall.duration() <= now)
        {
            return Some(End::Stalled);
        }
        None
    }
}
