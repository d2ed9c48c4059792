//! What can end an exchange from outside: its deadline, and the revocation of its lease.
//!
//! Both are looked at only when there is nothing else to do. The timer is set once; a frame moves the deadline, which
//! is a number, and a timer that fires early is set again. The notification is registered once per task, because
//! polling it takes a lock that all exchanges of an engine share.

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
        // Whom the notification will wake.
        registered: Option<Waker>,
        // The timer will wake the same one.
        timer_registered: bool,
        deadline: ExchangeDeadline,
    }
}

/// By when something must have happened.
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
            deadline,
        }
    }

    /// Moves the deadline. The timer learns of a later one when it fires; an earlier one waits for a poll.
    pub(super) fn set(self: Pin<&mut Self>, deadline: ExchangeDeadline) {
        let mut this = self.project();
        *this.deadline = deadline;
        if deadline.at < this.timer.deadline() {
            this.timer.as_mut().reset(deadline.at);
            *this.timer_registered = false;
        }
    }

    /// Makes sure that a revocation wakes this task.
    pub(super) fn register(self: Pin<&mut Self>, lease: &Lease, cx: &mut Context<'_>) {
        let this = self.project();
        let same = this.registered.as_ref().is_some_and(|waker| waker.will_wake(cx.waker()));
        // A notification that has come must not be polled again; the fault itself tells that it has.
        *this.timer_registered &= same;
        if !same && lease.revoked().is_none() && this.revoked.poll(cx).is_pending() {
            *this.registered = Some(cx.waker().clone());
        }
    }

    /// Why the exchange must end now, if it must; else the task is woken when it must.
    pub(super) fn poll(
        mut self: Pin<&mut Self>,
        lease: &Lease,
        model: &ModelName,
        cx: &mut Context<'_>,
    ) -> Poll<Fault> {
        // Before the look: a revocation in between is then not missed.
        self.as_mut().register(lease, cx);
        let mut this = self.project();
        if let Some(fault) = lease.revoked() {
            return Poll::Ready(fault.clone());
        }
        // Once per frame, where to poll a timer that has nothing new to say would be a good part of the frame's cost.
        if *this.timer_registered && !this.timer.is_elapsed() {
            return Poll::Pending;
        }
        while this.timer.as_mut().poll(cx).is_ready() {
            let deadline = *this.deadline;
            if Instant::now() >= deadline.at {
                return Poll::Ready(Fault::EngineTimeout {
                    model: model.clone(),
                    timeout: deadline.which,
                    limit: deadline.limit,
                });
            }
            this.timer.as_mut().reset(deadline.at);
        }
        // Without it the timer was not asked, and wakes nobody.
        *this.timer_registered = coop::has_budget_remaining();
        Poll::Pending
    }
}
