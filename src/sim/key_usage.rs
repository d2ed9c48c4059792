//! Tokens served to each client key, and how long its requests waited.

use std::collections::BTreeMap;

use super::world::SimulatedWorld;
use crate::{
    fleet::{Fleet, event::Event},
    model::ModelName,
    units::Millis,
};

/// Usage of every key, independent of the fleet's account.
#[derive(Clone, Debug, Default)]
pub(super) struct KeyUsage {
    /// Tokens served and not reported yet.
    unreported: BTreeMap<(ModelName, String), u64>,
    tokens: BTreeMap<String, u64>,
    waits: BTreeMap<String, Vec<Millis>>,
}

impl SimulatedWorld {
    /// Weighted tokens served to each key so far.
    #[must_use]
    pub const fn tokens(&self) -> &BTreeMap<String, u64> {
        &self.key_usage.tokens
    }

    /// Wait of each request of this key that got a lease from the queue.
    #[must_use]
    pub fn waits(&self, key: &str) -> &[Millis] {
        self.key_usage.waits.get(key).map_or(&[], Vec::as_slice)
    }

    pub(super) fn record_served(&mut self, model: &ModelName, key: &str, tokens: u64) {
        *self.key_usage.unreported.entry((model.clone(), key.to_owned())).or_default() += tokens;
        *self.key_usage.tokens.entry(key.to_owned()).or_default() += tokens;
    }

    pub(super) fn record_wait(&mut self, key: &str, wait: Millis) {
        self.key_usage.waits.entry(key.to_owned()).or_default().push(wait);
    }

    /// Adds `Served` events as the driver does. A new waiter whose key the fleet does not track starts without earlier
    /// usage. All usage of tracked keys is reported.
    pub(super) fn add_served_events(&mut self, fleet: &Fleet, events: &mut Vec<Event>) {
        for event in &*events {
            if let Event::Arrived { waiter } = event
                && !fleet.tracks_key(&waiter.model, &waiter.key)
            {
                self.key_usage.unreported.remove(&(waiter.model.clone(), waiter.key.clone()));
            }
        }
        for (model, key) in fleet.tracked_keys() {
            if let Some(tokens) = self.key_usage.unreported.remove(&(model.clone(), key.to_owned())) {
                events.push(Event::Served { model: model.clone(), key: key.to_owned(), tokens });
            }
        }
    }
}
