//! Demand for models: requests that queue or run at this gateway, and the reports of the other gateways.

use std::collections::{BTreeMap, BTreeSet};

use super::{Fleet, event::GatewayDemand};
use crate::{
    model::ModelName,
    units::{Millis, Tick},
};

impl Fleet {
    /// `queue.maxWaiting`.
    #[must_use]
    pub const fn max_waiting(&self) -> usize {
        self.planner.settings.queue.max_waiting as usize
    }

    /// Number of requests for this model that queue at this gateway.
    #[must_use]
    pub fn waiting(&self, model: &ModelName) -> usize {
        self.dispatch.waiting(model)
    }

    /// Number of requests for this model that queue at all gateways, as far as the others have reported.
    #[must_use]
    pub fn waiting_everywhere(&self, model: &ModelName) -> u32 {
        let own = u32::try_from(self.waiting(model)).unwrap_or(u32::MAX);
        own.saturating_add(self.planner.remote_demand.of(model).waiting)
    }

    /// Models whose requests queue at this gateway.
    pub fn queued_models(&self) -> impl Iterator<Item = &ModelName> {
        self.dispatch.queued_models()
    }

    /// Returns this gateway's own demand for every model that requests of this gateway use or wait for.
    ///
    /// It lacks the times of last requests. The fleet does not know at which gateway an engine's last request was, and
    /// if gateways reported each other's times, each would list every model. The driver adds the times of its own
    /// gates. Other gateways receive the whole as [`RemoteDemand`](super::event::Event::RemoteDemand).
    #[must_use]
    pub fn demand(&self) -> BTreeMap<ModelName, GatewayDemand> {
        let leased = self.planner.engines.leased().map(|engine| &engine.model);
        let models: BTreeSet<&ModelName> = self.dispatch.queued_models().chain(leased).collect();
        let known = models.into_iter().filter(|name| self.planner.models.contains_key(*name));
        let all = known.map(|name| (name.clone(), self.demand_of(name)));
        all.filter(|(_, demand)| *demand != GatewayDemand::default()).collect()
    }

    /// Returns this gateway's own demand for one model, without the time of the last request.
    #[must_use]
    pub fn demand_of(&self, model: &ModelName) -> GatewayDemand {
        GatewayDemand {
            waiting: u32::try_from(self.dispatch.waiting(model)).unwrap_or(u32::MAX),
            in_flight: self.planner.leases_of(model),
            last_request: Tick(0),
        }
    }

    /// Returns since when no gateway uses or requests the model.
    ///
    /// `None` while one does, while no engine of the model has a process, and while the use by other gateways is
    /// unknown. It may be in the future: the others have until then to report that they use it.
    #[must_use]
    pub fn unused_since(&self, model: &ModelName) -> Option<Tick> {
        if self.waiting_everywhere(model) > 0 {
            return None;
        }
        let planner = &self.planner;
        let mut engines = planner.engines_of(model).filter(|e| e.state.has_process()).peekable();
        engines.peek()?;
        engines.try_fold(Tick(0), |latest, e| {
            let is_unused = planner.in_use_count(e) == 0;
            planner.idle_at(e, Millis::ZERO).filter(|_| is_unused).map(|at| latest.max(at))
        })
    }

    /// Whether the tokens that this model serves to this key count towards fairness.
    ///
    /// They count once the key's requests have waited for the model, and while the model stays busy.
    #[must_use]
    pub fn tracks_key(&self, model: &ModelName, key: &str) -> bool {
        self.dispatch.tracks_key(model, key)
    }

    /// Every key that [`Self::tracks_key`], for models with waiters. The driver reports their tokens as
    /// [`Served`](super::event::Event::Served).
    pub fn tracked_keys(&self) -> impl Iterator<Item = (&ModelName, &str)> {
        self.dispatch.tracked_keys()
    }
}
