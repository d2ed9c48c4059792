//! Runs the driver's turn in the gateway: receives events, keeps the only clock, and replies to callers.
//!
//! [`DriverCore::turn`] has the order of a turn, which the simulator runs too. Here is what differs in a process: the
//! channels that events come through. `driver/platform.rs` has gates, routes and replies. Policy belongs in
//! `rouse::fleet`.

use std::sync::Arc;

use rouse::{
    driver::{DriverCore, EventQueues, MAX_REQUESTS_PER_TURN, fill_batch},
    fleet::event::Event,
    units::Millis,
};
use tokio::sync::{mpsc, oneshot};

use rouse_net::timer::sleep_until_some;

mod gates;
mod handle;
mod journal;
mod parked_replies;
mod platform;
mod reports;
mod route_updates;
mod served_tokens;
mod timeline;
mod transition_log;
mod waits;

pub use handle::{
    CanaryGuard, ColdStart, DriverHandle, GrantedLease, LiveView, OperationStatus, ParkRequest, WaitBreakdown,
};
pub use journal::{Journal, JournalFile, replay};
pub use served_tokens::{ServedTokens, ServedTokensCache};
pub use timeline::{Timeline, TimelineEntry, TimelineKind, TimelineUpdate};
pub use waits::{QuotedWait, WaitForecasts};

use handle::{DriverRequest, DriverState};
use platform::GatewayPlatform;

/// How long events wait that the driver causes for itself, after a chain of turns that did not come to rest.
const CHAIN_PAUSE: Millis = Millis(100);

pub struct Driver {
    core: DriverCore,
    platform: GatewayPlatform,
    shared: Arc<DriverState>,
    requests: mpsc::Receiver<DriverRequest>,
    events: mpsc::Receiver<Event>,
    /// Callers that wait for the next turn's view.
    refresh_waiters: Vec<oneshot::Sender<()>>,
    /// Callers that wait for the next turn.
    turn_waiters: Vec<oneshot::Sender<()>>,
    /// An order that arrived behind events, and how many of them still wait in the platform's channel. The fleet must
    /// process those before it validates the order.
    deferred_order: Option<(DriverRequest, usize)>,
}

impl Driver {
    /// Runs until an ordered shutdown is complete.
    pub async fn run(mut self, journal: Option<JournalFile>) {
        if let Some(file) = journal {
            self.platform.journal.write_to(file);
        }
        let mut batch = Vec::new();
        while !self.core.fleet().is_finished() {
            self.receive(&mut batch).await;
            self.turn(&mut batch);
        }
        // This is the final view.
        self.shared.publish_view(self.core.fleet(), self.core.plan());
        self.platform.parked.close();
        self.platform.journal.close().await;
    }

    /// Takes a turn with these events, and replaces them by the events that the execution causes.
    fn turn(&mut self, batch: &mut Vec<Event>) {
        let now = self.shared.clock.now();
        self.core.turn(&mut self.platform, batch, now);
        if !self.refresh_waiters.is_empty() {
            self.shared.publish_view(self.core.fleet(), self.core.plan());
            self.refresh_waiters.drain(..).for_each(|reply| reply.send(()).unwrap_or_default());
        }
        self.turn_waiters.drain(..).for_each(|reply| reply.send(()).unwrap_or_default());
    }

    /// Waits for an event, then takes all that are pending.
    async fn receive(&mut self, batch: &mut Vec<Event>) {
        let clock = self.shared.clock;
        // Events that the last turn caused. They need a turn at once, unless the driver spins on them.
        let own_events = batch.len();
        let mut happened = own_events > 0 && !self.core.chain().is_exhausted();
        let pause = (own_events > 0).then(|| clock.instant_at(clock.now() + CHAIN_PAUSE));
        let sleep = sleep_until_some(self.core.fleet().next_deadline().map(|at| clock.instant_at(at)));
        let renewal = sleep_until_some(self.platform.wait_renewal.due().map(|at| clock.instant_at(at)));
        let pause = sleep_until_some(pause);
        tokio::pin!(sleep, renewal, pause);
        // The last turn processed the events ahead of this order. The events that its execution caused are newer.
        if let Some((order, _)) = self.deferred_order.take_if(|(_, ahead)| *ahead == 0) {
            happened |= self.handle_request(order, batch);
        }
        happened |= self.take_reports(batch);
        while !happened {
            happened = true;
            tokio::select! {
                biased;
                () = self.shared.reports.changed() => happened = self.take_reports(batch),
                Some(event) = self.events.recv() => self.accept_platform_event(event, batch),
                Some(request) = self.requests.recv(), if self.deferred_order.is_none() => {
                    happened = self.accept_request(request, batch);
                }
                () = self.platform.gates.changed() => {}
                () = &mut sleep => {}
                () = &mut pause => {}
                () = &mut renewal => {
                    // The fleet has received no event since the last plan, so no turn is needed for that.
                    self.platform.renew_waits(&self.core, clock.now());
                    let next = self.platform.wait_renewal.due().map(|at| clock.instant_at(at));
                    renewal.set(sleep_until_some(next));
                    happened = false;
                }
            }
        }
        // A turn that already has events yields to other tasks too.
        tokio::task::consume_budget().await;
        fill_batch(self, batch);
        if own_events == 0 || batch.len() > own_events {
            self.core.chain_mut().begin();
        } else if let Some(spinning) = self.core.chain_mut().extend(batch) {
            tracing::error!(
                "the driver waits for other events: {spinning}; please report this with the journal"
            );
        }
    }

    /// Takes what other threads have reported. Returns whether that needs a turn: the place of a waiter that was
    /// answered as it left is released without one.
    fn take_reports(&mut self, batch: &mut Vec<Event>) -> bool {
        let before = batch.len();
        loop {
            let left = self.shared.reports.take(batch, MAX_REQUESTS_PER_TURN);
            self.shared.release_positions(left.len());
            for &waiter in &left {
                if self.platform.parked.remove(waiter).is_some() {
                    batch.push(Event::Left { waiter });
                }
            }
            // The next turn takes the others. But if all of these have their answers, there may be none.
            if left.len() < MAX_REQUESTS_PER_TURN {
                return batch.len() > before;
            }
        }
    }

    fn accept_platform_event(&mut self, event: Event, batch: &mut Vec<Event>) {
        if let Some((_, ahead)) = &mut self.deferred_order {
            *ahead = ahead.saturating_sub(1);
        }
        batch.push(event);
    }

    /// Handles a request behind the reports that precede it. Returns whether that needs a turn.
    fn accept_request(&mut self, request: DriverRequest, batch: &mut Vec<Event>) -> bool {
        let reported = self.take_reports(batch);
        let ahead = self.events.len();
        if matches!(request, DriverRequest::SubmitOrder { .. }) && (ahead > 0 || !batch.is_empty()) {
            self.deferred_order = Some((request, ahead));
            return true;
        }
        self.handle_request(request, batch) || reported
    }

    /// Returns whether the request needs a turn.
    fn handle_request(&mut self, request: DriverRequest, batch: &mut Vec<Event>) -> bool {
        match request {
            DriverRequest::Park { waiter, reply, quoted } => {
                // The report that the waiter has left may be taken before this request.
                let left = reply.is_closed().then_some(Event::Left { waiter: waiter.id });
                if left.is_none() {
                    self.platform.parked.add(waiter.clone(), reply);
                    self.platform.unquoted.push((waiter.id, quoted));
                }
                batch.push(Event::Arrived { waiter });
                batch.extend(left);
            }
            DriverRequest::SubmitOrder { model, order, reply } => {
                let answer = self.core.validate_action(&model, order).map(|()| {
                    let operation = self.shared.begin(model.clone(), order);
                    batch.push(Event::OperatorRequest { operation, model, action: order });
                    operation
                });
                // The requester may be gone; the order stands.
                drop(reply.send(answer));
            }
            DriverRequest::Refresh(reply) => self.refresh_waiters.push(reply),
            DriverRequest::TakeTurn(reply) => self.turn_waiters.push(reply),
            // The fleet has received no event since the last plan, so the plan's reasons hold.
            DriverRequest::Inspect(read) => {
                read(self.core.fleet(), self.core.plan(), &self.platform.gates);
                return false;
            }
        }
        true
    }
}

impl EventQueues for Driver {
    fn take_platform_event(&mut self, batch: &mut Vec<Event>) -> bool {
        let Ok(event) = self.events.try_recv() else { return false };
        self.accept_platform_event(event, batch);
        true
    }

    fn take_request(&mut self, batch: &mut Vec<Event>) -> bool {
        if self.deferred_order.is_some() {
            return false;
        }
        let Ok(request) = self.requests.try_recv() else { return false };
        self.accept_request(request, batch);
        true
    }
}

#[cfg(test)]
mod tests;
