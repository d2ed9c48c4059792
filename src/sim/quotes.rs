//! Quotes of waits, and the waits that followed.

use std::collections::BTreeMap;

use super::{client::SimulatedClientId, world::SimulatedWorld};
use crate::{
    fleet::{
        event::WaiterId,
        quote::{WaitForecast, WaitRange},
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

impl SimulatedWorld {
    /// Each quote of a request that was served in the end.
    #[must_use]
    pub fn quotes(&self) -> &[QuoteSample] {
        &self.quotes.samples
    }

    /// Records a quote. A request that waits again after a failed canary keeps its first one.
    pub(super) fn record_quote(&mut self, waiter: WaiterId, forecast: WaitForecast) {
        if let Some(client) = self.waiters.get(&waiter) {
            self.tally.add("waits quoted");
            self.quotes.open.entry(*client).or_insert((forecast.range, self.now));
        }
    }

    /// Records that a request's engine serves: at its grant, or at its first byte if it is the canary.
    pub(super) fn end_quoted_wait(&mut self, client: SimulatedClientId) {
        if let Some((quoted, since)) = self.quotes.open.remove(&client) {
            self.quotes.samples.push(QuoteSample { quoted, waited: self.now.since(since) });
        }
    }
}
