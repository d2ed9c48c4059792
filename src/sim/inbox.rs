//! The events that wait for the driver's next turn.

use std::collections::VecDeque;

use crate::{
    driver::{EventQueues, MAX_REQUESTS_PER_TURN},
    fleet::event::{Event, WaiterId},
};

/// Keeps requests apart from other events, as the gateway's two channels do.
#[derive(Clone, Debug, Default)]
pub(super) struct SimulatedInbox {
    platform_events: VecDeque<Event>,
    requests: VecDeque<Event>,
    /// See [`super::PlatformDefect::RequestsFirst`].
    requests_first: bool,
}

impl SimulatedInbox {
    pub(super) fn push(&mut self, event: Event) {
        match event {
            Event::Arrived { .. } | Event::Left { .. } => self.requests.push_back(event),
            _ => self.platform_events.push_back(event),
        }
    }

    /// Whether the driver has yet to learn that this waiter has left.
    pub(super) fn has_departure_of(&self, waiter: WaiterId) -> bool {
        self.requests.iter().any(|event| matches!(event, Event::Left { waiter: left } if *left == waiter))
    }

    /// Number of platform events that wait.
    pub(super) fn platform_events(&self) -> usize {
        self.platform_events.len()
    }

    pub(super) fn next_platform_event(&self) -> Option<&Event> {
        self.platform_events.front()
    }

    pub(super) const fn set_requests_first(&mut self, requests_first: bool) {
        self.requests_first = requests_first;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.platform_events.is_empty() && self.requests.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.platform_events.clear();
        self.requests.clear();
    }
}

impl EventQueues for SimulatedInbox {
    fn take_platform_event(&mut self, batch: &mut Vec<Event>) -> bool {
        if self.requests_first && self.requests.len() >= MAX_REQUESTS_PER_TURN {
            return false;
        }
        let event = self.platform_events.pop_front();
        let is_taken = event.is_some();
        batch.extend(event);
        is_taken
    }

    fn take_request(&mut self, batch: &mut Vec<Event>) -> bool {
        let event = self.requests.pop_front();
        let is_taken = event.is_some();
        batch.extend(event);
        is_taken
    }
}
