//! Forwards published statuses to the fleet, on followers and during a takeover.

use rouse::{
    fleet::event::{Event, PublishedEngine as Told},
    model::{EngineId, ModelName},
    units::{Generation, Tick},
};

use super::EngineManager;
use crate::{
    crd::{
        inference_model::{EngineState, EngineStatus},
        ledger::ObjectName,
    },
    published::{self, PublishedModel},
};

impl EngineManager {
    pub(super) async fn forward_all(&self) {
        for published_model in self.published.values() {
            self.forward(published_model, &[]).await;
        }
    }

    pub(super) fn is_published(&self, engine: &EngineId) -> bool {
        let of_model =
            self.published.values().filter(|published_model| published_model.model == engine.model);
        of_model
            .flat_map(|published_model| &published_model.engines)
            .any(|status| status.replica == engine.replica)
    }

    /// Stores a published status. On a follower, it also forwards the status as the engines' state.
    pub(super) async fn apply_status(&mut self, published_model: PublishedModel) {
        let before = self.published.insert(published_model.object.clone(), published_model.clone());
        if !self.leading && self.shared.has_placements() {
            self.forward(&published_model, before.as_ref().map_or(&[], |before| &before.engines)).await;
        }
    }

    /// Sends measurements that a former leader learned; must precede any decision.
    pub(in crate::platform) async fn send_all_learned(&self) {
        for published_model in self.published.values() {
            self.send_learned(published_model).await;
        }
    }

    async fn send_learned(&self, published_model: &PublishedModel) {
        if let Some(learned) = published_model.learned {
            self.shared
                .common
                .send_event(Event::MeasurementsRestored { model: published_model.model.clone(), learned })
                .await;
        }
    }

    pub(super) async fn forward(&self, published_model: &PublishedModel, before: &[EngineStatus]) {
        self.send_learned(published_model).await;
        let placement = self.shared.placement(&published_model.model);
        let fingerprint = placement.as_ref().map_or(0, |placement| placement.variant.spec.fingerprint);
        let pool = placement.as_ref().and_then(|placement| placement.pool.clone());
        for status in &published_model.engines {
            let accelerators = pool.iter().map(|pool| pool.as_str().into()).collect();
            self.send_published(
                &published_model.model,
                status,
                published::published_engine(status, fingerprint, accelerators),
            )
            .await;
        }
        let is_removed = |known: &&EngineStatus| {
            !published_model.engines.iter().any(|status| status.replica == known.replica)
        };
        for status in before.iter().filter(is_removed) {
            self.send_published(&published_model.model, status, None).await;
        }
    }

    pub(super) async fn send_published(
        &self,
        model: &ModelName,
        status: &EngineStatus,
        published: Option<Told>,
    ) {
        let engine = EngineId::new(model.clone(), status.replica);
        let generation = Generation(status.generation);
        self.shared.common.send_event(Event::Published { engine, generation, published }).await;
    }

    pub(in crate::platform) fn is_published_serving(
        &self,
        object: &ObjectName,
        replica: u32,
        generation: Generation,
    ) -> bool {
        let engines = self
            .published
            .get(object)
            .map(|published_model| published_model.engines.as_slice())
            .unwrap_or_default();
        engines.iter().any(|status| {
            let serves = matches!(status.state, EngineState::Awake | EngineState::Draining);
            (status.replica, status.generation) == (replica, generation.0) && serves
        })
    }

    pub(in crate::platform) fn last_request(&self, object: &ObjectName) -> Tick {
        self.published.get(object).map(|published_model| published_model.last_request).unwrap_or_default()
    }
}
