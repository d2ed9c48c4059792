//! Watches for the events that end an exchange from outside: its deadline, and the revocation of its lease.
//!
//! Both are checked only when the exchange would wait. The timer is set once: a frame only moves the deadline, a
//! number, and a timer that fires early is set again. The notification is registered once per task, because polling it
//! takes a lock that all exchanges of an engine share.

use std::{
    pin::Pin,
    task::{Context, Poll, Waker},
};

use pin_project_lite::pin_project;
use tokio::{
    sync::futures::OwnedNotified,
    task::coop,
    time::{Instant, Sleep, sleep_until},
};

use crate::lease::Lease;
use rouse::{
    fault::{ExchangeTimeout, Fault},
    model::ModelName,
    units::Millis,
};

pin_project! {
    pub(super) struct AbortWatch {
        #[pin]
        timer: Sleep,
        #[pin]
        revoked: OwnedNotified,
        // The task that the notification will wake.
        registered: Option<Waker>,
        // The timer will wake the same task.
        timer_registered: bool,
        // The parts of the deadline, which take less room here than together.
        which: ExchangeTimeout,
        limit: Millis,
        due: Instant,
    }
}

/// The current deadline of an exchange.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExchangeDeadline {
    pub(super) at: Instant,
    pub(super) which: ExchangeTimeout,
    pub(super) limit: Millis,
}

impl ExchangeDeadline {
    pub(super) fn after(which: ExchangeTimeout, limit: Millis, now: Instant) -> Self {
        Self { at: now + limit.duration(), which, limit }
    }
}

impl AbortWatch {
    pub(super) fn new(lease: &Lease, deadline: ExchangeDeadline) -> Self {
        Self {
            timer: sleep_until(deadline.at),
            revoked: lease.on_revoke(),
            registered: None,
            timer_registered: false,
            which: deadline.which,
            limit: deadline.limit,
            due: deadline.at,
        }
    }

    /// Moves the deadline. A later one takes effect when the timer fires, an earlier one at the next poll.
    pub(super) fn set(self: Pin<&mut Self>, deadline: ExchangeDeadline) {
        let mut this = self.project();
        (*this.due, *this.which, *this.limit) = (deadline.at, deadline.which, deadline.limit);
        if deadline.at < this.timer.deadline() {
            this.timer.as_mut().reset(deadline.at);
            *this.timer_registered = false;
        }
    }

    /// Ensures that a revocation wakes this task.
    pub(super) fn register(self: Pin<&mut Self>, lease: &Lease, cx: &mut Context<'_>) {
        let this = self.project();
        let same = this.registered.as_ref().is_some_and(|waker| waker.will_wake(cx.waker()));
        // A completed notification must not be polled again; the fault shows that it completed.
        *this.timer_registered &= same;
        if !same && lease.revoked().is_none() && this.revoked.poll(cx).is_pending() {
            *this.registered = Some(cx.waker().clone());
        }
    }

    /// Returns why the exchange must end now, or registers the task for that moment.
    pub(super) fn poll(
        mut self: Pin<&mut Self>,
        lease: &Lease,
        model: &ModelName,
        cx: &mut Context<'_>,
    ) -> Poll<Fault> {
        // Register before the check, so that a revocation in between is not missed.
        self.as_mut().register(lease, cx);
        let mut this = self.project();
        if let Some(fault) = lease.revoked() {
            return Poll::Ready(fault.clone());
        }
        // This runs once per frame, and polling a timer without news would be a good part of the frame's cost.
        if *this.timer_registered && !this.timer.is_elapsed() {
            return Poll::Pending;
        }
        while this.timer.as_mut().poll(cx).is_ready() {
            if Instant::now() >= *this.due {
                return Poll::Ready(Fault::EngineTimeout {
                    model: model.clone(),
                    timeout: *this.which,
                    limit: *this.limit,
                });
            }
            this.timer.as_mut().reset(*this.due);
        }
        // Without budget the timer was not polled, and will wake no task.
        *this.timer_registered = coop::has_budget_remaining();
        Poll::Pending
    }
}
