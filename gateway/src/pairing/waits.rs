//! How long each requester has waited for its engine, and for what kind of it.

use std::collections::BTreeMap;

use rouse::{
    pairing::{
        command::{OfProvider, Order, Step},
        ids::RequesterId,
    },
    units::{Millis, Tick},
};

use super::directory::Requester;
use crate::metrics::{Duals, Path};

/// Requesters whose stubs have been seen to run.
pub(super) struct Waits {
    told: Duals,
    all: BTreeMap<RequesterId, Wait>,
    /// All that was there when this gateway began to lead has been seen.
    listed: bool,
}

#[derive(Default)]
struct Wait {
    /// `None`: nobody knows since when, or it is over.
    since: Option<Tick>,
    path: Option<Path>,
}

impl Waits {
    pub(super) const fn new(told: Duals) -> Self {
        Self { told, all: BTreeMap::new(), listed: false }
    }

    /// Begins anew: who is seen now may have waited for long.
    pub(super) fn forget(&mut self) {
        (self.all, self.listed) = (BTreeMap::new(), false);
    }

    pub(super) const fn listed(&mut self) {
        self.listed = true;
    }

    /// Its stub runs. When it began is known to the second: that is of use for whoever ran before this gateway led.
    pub(super) fn runs(&mut self, own: &Requester, now: Tick) {
        if !self.all.contains_key(&own.id) {
            let since = if self.listed { Some(now) } else { own.began.map(|began| began.min(now)) };
            self.all.insert(own.id.clone(), Wait { since, path: None });
        }
    }

    pub(super) fn gone(&mut self, id: &RequesterId) {
        self.all.remove(id);
    }

    /// This was ordered for it: what comes first says how it comes to its engine.
    pub(super) fn ordered(&mut self, id: &RequesterId, order: &Order) {
        let path = match order {
            Order::Provider { step: OfProvider::Create { .. }, .. }
            | Order::Engine { step: Step::Create { .. }, .. } => Path::Cold,
            Order::Engine { step: Step::Launch, .. } => Path::Warm,
            Order::Engine { step: Step::Wake { .. }, .. } => Path::Hot,
            _ => return,
        };
        if let Some(wait) = self.all.get_mut(id) {
            wait.path.get_or_insert(path);
        }
    }

    /// Its engine serves it: how it came to that, and after how long. A gate that is opened once more ends no wait.
    pub(super) fn served(&mut self, own: &Requester, now: Tick) -> Option<(Path, Millis)> {
        let wait = self.all.get_mut(&own.id)?;
        let (took, path) = (now.since(wait.since.take()?), wait.path?);
        let config = own.config().map(|config| config.name.as_str());
        self.told.served(&own.name.namespace, path, config, took);
        Some((path, took))
    }
}
