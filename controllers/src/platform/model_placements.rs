//! Finds the placement of a model by its name, by a Pod's label, and by its InferenceModel.

use std::{cmp::Ordering, collections::BTreeMap, sync::Arc};

use rouse::model::ModelName;

use super::ModelPlacement;
use crate::{crd::ledger::ObjectName, engine_pod::EnginePod};

/// Placement of each model's engines.
///
/// Each list is sorted for one lookup, whose key is in the placement itself: maps would need thousands of copies.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelPlacements {
    by_model: Vec<Arc<ModelPlacement>>,
    /// By namespace, then by the label of the model's name.
    by_label: Vec<Arc<ModelPlacement>>,
    by_object: Vec<Arc<ModelPlacement>>,
}

impl ModelPlacements {
    #[must_use]
    pub fn get(&self, model: &ModelName) -> Option<&Arc<ModelPlacement>> {
        find(&self.by_model, |placement| placement.engine.name.cmp(model))
    }

    /// Returns the placement of the model with this label in this namespace.
    #[must_use]
    pub fn of_label(&self, namespace: &str, label: &str) -> Option<&Arc<ModelPlacement>> {
        find(&self.by_label, |placement| label_key(placement).cmp(&(namespace, label)))
    }

    /// Returns the placement of the Pod's model, whatever the Pod's template.
    #[must_use]
    pub fn of_pod(&self, pod: &EnginePod) -> Option<&Arc<ModelPlacement>> {
        self.of_label(&pod.name.namespace, &pod.model)
    }

    /// Returns the placement of this InferenceModel.
    #[must_use]
    pub fn of_object(&self, object: &ObjectName) -> Option<&Arc<ModelPlacement>> {
        find(&self.by_object, |placement| placement.owner.object.cmp(object))
    }

    pub fn values(&self) -> impl Iterator<Item = &Arc<ModelPlacement>> {
        self.by_model.iter()
    }
}

fn find(
    sorted: &[Arc<ModelPlacement>],
    compare: impl Fn(&ModelPlacement) -> Ordering,
) -> Option<&Arc<ModelPlacement>> {
    sorted.get(sorted.binary_search_by(|placement| compare(placement)).ok()?)
}

fn label_key(placement: &ModelPlacement) -> (&str, &str) {
    (placement.owner.object.namespace.as_str(), placement.label.as_str())
}

/// Of several placements of one model, the last one counts.
impl FromIterator<Arc<ModelPlacement>> for ModelPlacements {
    fn from_iter<I: IntoIterator<Item = Arc<ModelPlacement>>>(placements: I) -> Self {
        let named = placements.into_iter().map(|placement| (placement.engine.name.clone(), placement));
        let by_model: Vec<_> = named.collect::<BTreeMap<_, _>>().into_values().collect();
        let (mut by_label, mut by_object) = (by_model.clone(), by_model.clone());
        by_label.sort_unstable_by(|a, b| label_key(a).cmp(&label_key(b)));
        by_object.sort_unstable_by(|a, b| a.owner.object.cmp(&b.owner.object));
        Self { by_model, by_label, by_object }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::platform::testing;

    const NAMESPACES: [&str; 2] = ["chat", "code"];

    /// Returns the placements that are as `found` says.
    fn scan(
        placements: &ModelPlacements,
        found: impl Fn(&ModelPlacement) -> bool,
    ) -> Vec<Arc<ModelPlacement>> {
        placements.values().filter(|placement| found(placement)).cloned().collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn each_lookup_finds_what_a_scan_finds(named in prop::collection::vec((0..2_usize, 0..6_u32), 0..12)) {
            let base = testing::placement("m", "chat");
            let built = named.iter().map(|(namespace, model)| {
                Arc::new(testing::renamed(&base, &format!("m{model}"), NAMESPACES[*namespace]))
            });
            let placements: ModelPlacements = built.collect();
            for model in (0..6).map(|number| format!("m{number}")) {
                let name = ModelName::from(model.as_str());
                let found = Vec::from_iter(placements.get(&name).cloned());
                prop_assert_eq!(found, scan(&placements, |it| it.engine.name == name));
                for namespace in NAMESPACES {
                    let (object, label) = (ObjectName::new(namespace, &model), crate::label::value(&model));
                    let of_namespace = |it: &ModelPlacement| it.owner.object.namespace == namespace;
                    let found = Vec::from_iter(placements.of_label(namespace, &label).cloned());
                    let labelled = scan(&placements, |it| of_namespace(it) && it.label == label);
                    prop_assert_eq!(found, labelled);
                    let found = Vec::from_iter(placements.of_object(&object).cloned());
                    prop_assert_eq!(found, scan(&placements, |it| it.owner.object == object));
                }
            }
        }
    }
}
