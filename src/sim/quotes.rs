//! Quotes of waits, and the waits that followed.

use std::collections::BTreeMap;

use super::{client::SimulatedClientId, world::SimulatedWorld};
use crate::{
    fleet::{
        Plan,
        event::{Event, WaiterId},
        quote::WaitRange,
    },
    units::{Millis, Tick},
};

/// A quote, and how long the request really waited for an engine that serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuoteSample {
    pub quoted: WaitRange,
    pub waited: Millis,
}

/// The quotes of requests that wait, and those whose wait is over.
#[derive(Clone, Debug, Default)]
pub(super) struct QuoteLog {
    open: BTreeMap<SimulatedClientId, (WaitRange, Tick)>,
    samples: Vec<QuoteSample>,
}

/// The waiters that arrive with these events.
pub(super) fn arrivals(events: &[Event]) -> Vec<WaiterId> {
    let id = |event: &Event| match event {
        Event::Arrived { waiter } => Some(waiter.id),
        _ => None,
    };
    events.iter().filter_map(id).collect()
}

impl SimulatedWorld {
    /// Each quote of a request that was served in the end.
    #[must_use]
    pub fn quotes(&self) -> &[QuoteSample] {
        &self.quotes.samples
    }

    /// Quotes their waits to these waiters. A request that waits again after a failed canary keeps its first quote.
    pub(super) fn quote_arrivals(&mut self, plan: &Plan, arrived: &[WaiterId]) {
        for (waiter, _, forecast) in self.fleet.quote_arrivals(plan, arrived, self.now) {
            if let Some(client) = self.waiters.get(&waiter) {
                self.tally.add("waits quoted");
                self.quotes.open.entry(*client).or_insert((forecast.range, self.now));
            }
        }
    }

    /// Records that a request's engine serves: at its grant, or at its first byte if it is the canary.
    pub(super) fn end_quoted_wait(&mut self, client: SimulatedClientId) {
        if let Some((quoted, since)) = self.quotes.open.remove(&client) {
            self.quotes.samples.push(QuoteSample { quoted, waited: self.now.since(since) });
        }
    }
}
