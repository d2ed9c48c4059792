//! Forwards published statuses to the fleet, on followers and during a takeover.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use rouse::{
    fleet::event::{Event, PublishedEngine as Told},
    model::{EngineId, ModelName},
    units::{Generation, Tick},
};

use super::EngineManager;
use crate::{
    crd::{
        inference_model::{EngineState, EngineStatus},
        ledger::{ObjectName, ReservationOwner},
    },
    published::{self, PublishedModel},
};

/// Published statuses with content, by InferenceModel and by model.
#[derive(Debug, Default)]
pub(in crate::platform) struct PublishedIndex {
    statuses: BTreeMap<ObjectName, Arc<PublishedModel>>,
    /// A model that was deleted and created under another name has two objects.
    objects: BTreeSet<(ModelName, ObjectName)>,
}

impl PublishedIndex {
    fn get(&self, object: &ObjectName) -> Option<&Arc<PublishedModel>> {
        self.statuses.get(object)
    }

    fn values(&self) -> impl Iterator<Item = &Arc<PublishedModel>> {
        self.statuses.values()
    }

    /// Returns the statuses of the objects that name this model.
    pub(in crate::platform) fn of_model(
        &self,
        model: &ModelName,
    ) -> impl Iterator<Item = &Arc<PublishedModel>> {
        let first = (model.clone(), ObjectName::new("", ""));
        let of_model = self.objects.range(first..).take_while(move |(named, _)| named == model);
        of_model.filter_map(move |(_, object)| self.statuses.get(object))
    }

    /// Returns the published state of this engine generation.
    pub(in crate::platform) fn state(
        &self,
        engine: &ReservationOwner,
        generation: Generation,
    ) -> Option<EngineState> {
        let mut engines = self.statuses.get(&engine.model)?.engines.iter();
        let is_own = |status: &&EngineStatus| {
            (status.replica, status.generation) == (engine.replica, generation.0)
                && status.variant == engine.variant.as_str()
        };
        Some(engines.find(is_own)?.state)
    }

    /// Stores the status and returns the earlier one. A deleted object leaves no entry.
    fn insert(&mut self, status: Arc<PublishedModel>) -> Option<Arc<PublishedModel>> {
        let (object, model) = (status.object.clone(), status.model.clone());
        let before = self.statuses.remove(&object);
        if let Some(before) = &before {
            self.objects.remove(&(before.model.clone(), object.clone()));
        }
        if !status.is_empty() {
            self.statuses.insert(object.clone(), status);
            self.objects.insert((model, object));
        }
        before
    }
}

impl EngineManager {
    /// Forwards all statuses. A leader does so before its takeover, since no decision may precede what was learned.
    pub(super) async fn forward_all(&self) {
        for published_model in self.published.values() {
            self.forward(published_model, &[]).await;
        }
    }

    pub(super) fn is_published(&self, engine: &EngineId) -> bool {
        let mut engines =
            self.published.of_model(&engine.model).flat_map(|published_model| &published_model.engines);
        engines.any(|status| status.replica == engine.replica && status.variant == engine.variant.as_str())
    }

    /// Stores a published status. On a follower, it also forwards the status as the engines' state.
    pub(super) async fn apply_status(&mut self, published_model: Arc<PublishedModel>) {
        let before = self.published.insert(Arc::clone(&published_model));
        if !self.leading && self.shared.has_placements() {
            self.forward(&published_model, before.as_ref().map_or(&[], |before| &before.engines)).await;
        }
    }

    /// Sends measurements that a former leader learned.
    async fn send_learned(&self, published_model: &PublishedModel) {
        let model = &published_model.model;
        let cheapest = self.shared.placements().cheapest_variant(model).cloned().unwrap_or_default();
        for (variant, learned) in published_model.measurements(cheapest) {
            let model = model.clone();
            self.shared.common.send_event(Event::MeasurementsRestored { model, variant, learned }).await;
        }
    }

    pub(super) async fn forward(&self, published_model: &PublishedModel, before: &[EngineStatus]) {
        self.send_learned(published_model).await;
        for status in &published_model.engines {
            let placement = self.shared.variant_placement(&published_model.model, &status.variant());
            let fingerprint = placement.as_ref().map_or(0, |placement| placement.variant.spec.fingerprint);
            let accounts = placement.map(|placement| placement.accounts()).unwrap_or_default();
            self.send_published(
                &published_model.model,
                status,
                published::published_engine(status, fingerprint, accounts),
            )
            .await;
        }
        let is_removed = |known: &&EngineStatus| {
            let is_same =
                |status: &EngineStatus| status.replica == known.replica && status.variant == known.variant;
            !published_model.engines.iter().any(is_same)
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
        let engine = EngineId::of_variant(model.clone(), status.variant(), status.replica);
        let generation = Generation(status.generation);
        self.shared.common.send_event(Event::Published { engine, generation, published }).await;
    }

    pub(in crate::platform) fn last_request(&self, object: &ObjectName) -> Tick {
        self.published.get(object).map(|published_model| published_model.last_request).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn the_state_is_that_of_the_engine_and_of_its_generation() {
        let engine = |replica: u32, generation: u64, state: EngineState| -> EngineStatus {
            let status = json!({"pod": "p", "replica": replica, "generation": generation, "state": state});
            serde_json::from_value(status).unwrap()
        };
        let large = EngineStatus { variant: "large".to_owned(), ..engine(0, 7, EngineState::Asleep) };
        let object = ObjectName::new("chat", "o0");
        let mut index = PublishedIndex::default();
        index.insert(Arc::new(PublishedModel {
            object: object.clone(),
            model: ModelName::from("m0"),
            engines: vec![engine(0, 7, EngineState::Awake), engine(1, 8, EngineState::Waking), large],
            last_request: Tick(0),
            learned: None,
            learned_of_variants: BTreeMap::new(),
        }));
        let owner = |model: &ObjectName, variant: &str, replica| {
            let (model, variant) = (model.clone(), variant.into());
            ReservationOwner { model, variant, replica }
        };
        let state =
            |replica, generation| index.state(&owner(&object, "default", replica), Generation(generation));
        assert_eq!((state(0, 7), state(1, 8)), (Some(EngineState::Awake), Some(EngineState::Waking)));
        assert_eq!((state(0, 6), state(0, 8), state(2, 7)), (None, None, None));
        assert_eq!(index.state(&owner(&object, "large", 0), Generation(7)), Some(EngineState::Asleep));
        let other = ObjectName::new("other", "o0");
        assert_eq!(index.state(&owner(&other, "default", 0), Generation(7)), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn the_statuses_of_a_model_are_those_that_a_scan_finds(
            posts in prop::collection::vec((0..4_u32, 0..3_u32, prop::bool::weighted(0.7)), 1..20),
        ) {
            let mut index = PublishedIndex::default();
            for (number, (object, model, exists)) in (1..).zip(posts) {
                let object = ObjectName::new("chat", format!("o{object}"));
                let model = ModelName::from(format!("m{model}"));
                let last_request = Tick(number);
                let before = index.get(&object).cloned();
                let status = PublishedModel {
                    object,
                    model,
                    engines: Vec::new(),
                    last_request,
                    learned: None,
                    learned_of_variants: BTreeMap::new(),
                };
                let status = Arc::new(if exists { status } else { status.after_deletion() });
                let kept = exists.then(|| Arc::clone(&status));
                let object = status.object.clone();
                prop_assert_eq!(index.insert(status), before);
                prop_assert_eq!(index.get(&object).cloned(), kept);
                prop_assert_eq!(index.objects.len(), index.statuses.len());
                for model in (0..3).map(|model| ModelName::from(format!("m{model}"))) {
                    let scanned = index.values().filter(|status| status.model == model);
                    prop_assert!(index.of_model(&model).eq(scanned));
                }
            }
        }
    }
}
