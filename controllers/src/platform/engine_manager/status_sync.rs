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
        for said in self.published.values() {
            self.forward(said, &[]).await;
        }
    }

    pub(super) fn is_published(&self, engine: &EngineId) -> bool {
        let of_model = self.published.values().filter(|said| said.model == engine.model);
        of_model.flat_map(|said| &said.engines).any(|status| status.replica == engine.replica)
    }

    /// Stores a published status. On a follower, it also forwards the status as the engines' state.
    pub(super) async fn apply_status(&mut self, said: PublishedModel) {
        let before = self.published.insert(said.object.clone(), said.clone());
        if !self.leading && self.shared.has_placements() {
            self.forward(&said, before.as_ref().map_or(&[], |before| &before.engines)).await;
        }
    }

    /// Sends measurements that a former leader learned; must precede any decision.
    pub(in crate::platform) async fn send_all_learned(&self) {
        for said in self.published.values() {
            self.send_learned(said).await;
        }
    }

    async fn send_learned(&self, said: &PublishedModel) {
        if let Some(learned) = said.learned {
            self.shared
                .common
                .send_event(Event::MeasurementsRestored { model: said.model.clone(), learned })
                .await;
        }
    }

    pub(super) async fn forward(&self, said: &PublishedModel, before: &[EngineStatus]) {
        self.send_learned(said).await;
        let place = self.shared.placement(&said.model);
        let fingerprint = place.as_ref().map_or(0, |place| place.variant.spec.fingerprint);
        let pool = place.as_ref().and_then(|place| place.pool.clone());
        for status in &said.engines {
            let accelerators = pool.iter().map(|pool| pool.as_str().into()).collect();
            self.send_published(
                &said.model,
                status,
                published::published_engine(status, fingerprint, accelerators),
            )
            .await;
        }
        let gone = |known: &&EngineStatus| !said.engines.iter().any(|status| status.replica == known.replica);
        for status in before.iter().filter(gone) {
            self.send_published(&said.model, status, None).await;
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
        let engines = self.published.get(object).map(|said| said.engines.as_slice()).unwrap_or_default();
        engines.iter().any(|status| {
            let serves = matches!(status.state, EngineState::Awake | EngineState::Draining);
            (status.replica, status.generation) == (replica, generation.0) && serves
        })
    }

    pub(in crate::platform) fn last_request(&self, object: &ObjectName) -> Tick {
        self.published.get(object).map(|said| said.last_request).unwrap_or_default()
    }
}
