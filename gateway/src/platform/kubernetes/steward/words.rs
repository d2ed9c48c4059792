//! What statuses say of engines, for a gateway that does not lead, and for one that takes over.

use rouse::{
    fleet::event::{Event, Published as Told},
    model::{EngineId, ModelName},
    units::{Generation, Tick},
};

use super::Steward;
use crate::controllers::{
    crd::{
        inference_model::{EngineState, EngineStatus},
        ledger::ObjectName,
    },
    published::{self, Published},
};

impl Steward {
    pub(super) async fn pass_on_all(&self) {
        for said in self.published.values() {
            self.pass_on(said, &[]).await;
        }
    }

    pub(super) fn is_published(&self, engine: &EngineId) -> bool {
        let of_model = self.published.values().filter(|said| said.model == engine.model);
        of_model.flat_map(|said| &said.engines).any(|status| status.replica == engine.replica)
    }

    /// What a status says is how an engine is, for whoever does not lead.
    pub(super) async fn hear(&mut self, said: Published) {
        let before = self.published.insert(said.object.clone(), said.clone());
        if !self.leading && self.shared.is_placed() {
            self.pass_on(&said, before.as_ref().map_or(&[], |before| &before.engines)).await;
        }
    }

    /// What was learned by whoever led before; told before anything is decided.
    pub(in crate::platform::kubernetes) async fn recall_all(&self) {
        for said in self.published.values() {
            self.recall(said).await;
        }
    }

    async fn recall(&self, said: &Published) {
        if let Some(learned) = said.learned {
            self.shared.common.tell(Event::Recalled { model: said.model.clone(), learned }).await;
        }
    }

    pub(super) async fn pass_on(&self, said: &Published, before: &[EngineStatus]) {
        self.recall(said).await;
        let place = self.shared.place(&said.model);
        let fingerprint = place.as_ref().map_or(0, |place| place.variant.spec.fingerprint);
        let pool = place.as_ref().and_then(|place| place.pool.clone());
        for status in &said.engines {
            let accelerators = pool.iter().map(|pool| pool.as_str().into()).collect();
            self.say(&said.model, status, published::engine(status, fingerprint, accelerators)).await;
        }
        let gone = |known: &&EngineStatus| !said.engines.iter().any(|status| status.replica == known.replica);
        for status in before.iter().filter(gone) {
            self.say(&said.model, status, None).await;
        }
    }

    pub(super) async fn say(&self, model: &ModelName, status: &EngineStatus, published: Option<Told>) {
        let engine = EngineId::new(model.clone(), status.replica);
        let generation = Generation(status.generation);
        self.shared.common.tell(Event::Published { engine, generation, published }).await;
    }

    pub(in crate::platform::kubernetes) fn is_published_serving(
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

    pub(in crate::platform::kubernetes) fn last_request(&self, object: &ObjectName) -> Tick {
        self.published.get(object).map(|said| said.last_request).unwrap_or_default()
    }
}
