//! What a turn changed for routes and statuses.

use std::collections::BTreeSet;

use crate::model::ModelName;

/// Changes since the last turn, by model. Most events and decisions change no routing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoutingChanges {
    /// Any configured value of any model may differ: settings, accelerators or the whole state were replaced.
    pub reconfigured: bool,
    /// Models whose own configuration was added, changed or removed, and the models that depend on those.
    pub specs: BTreeSet<ModelName>,
    /// Models with an engine that was added, removed or changed.
    ///
    /// A change is another state, admission, address, generation or fingerprint, or a restored failure.
    pub models: BTreeSet<ModelName>,
    /// Models whose waiters here changed in number, with an engine that got its first lease or lost its last, or that
    /// another gateway has used.
    ///
    /// It routes no requests. It bounds the work of readers that follow the demand.
    pub demand: BTreeSet<ModelName>,
}

impl RoutingChanges {
    /// Whether the configuration of any model may differ. If so, models may have been added or removed, too.
    #[must_use]
    pub fn may_reconfigure_any(&self) -> bool {
        self.reconfigured || !self.specs.is_empty()
    }

    /// Whether the configuration of this model, or of one that it depends on, may differ.
    #[must_use]
    pub fn may_reconfigure(&self, model: &ModelName) -> bool {
        self.reconfigured || self.specs.contains(model)
    }

    /// Whether the routes or the configuration of this model may differ.
    #[must_use]
    pub fn may_reroute(&self, model: &ModelName) -> bool {
        self.may_reconfigure(model) || self.models.contains(model)
    }

    /// Returns the models whose routes or configuration changed. If [`Self::reconfigured`], others may have, too.
    pub fn rerouted(&self) -> impl Iterator<Item = &ModelName> {
        self.models.union(&self.specs)
    }
}
