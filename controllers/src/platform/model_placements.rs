//! Finds the placement of a model's variant by the model's name, by a Pod's labels, and by the InferenceModel.

use std::{cmp::Ordering, collections::BTreeMap, sync::Arc};

use rouse::model::{ModelName, VariantName, compare_by_cost};

use super::ModelPlacement;
use crate::{
    crd::ledger::{ObjectName, ReservationOwner},
    engine_pod::EnginePod,
};

/// Placement of the engines of each variant of each model.
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
    pub fn get(&self, model: &ModelName, variant: &VariantName) -> Option<&Arc<ModelPlacement>> {
        find(&self.by_model, |placement| model_key(placement).cmp(&(model, variant)))
    }

    /// Returns the cheapest variant of the model, of equal costs the first by name; `None` for an unknown model.
    #[must_use]
    pub fn cheapest_variant(&self, model: &ModelName) -> Option<&VariantName> {
        let first = self.by_model.partition_point(|placement| model_key(placement).0 < model);
        let of_model =
            self.by_model.iter().skip(first).take_while(|placement| model_key(placement).0 == model);
        let cost = |placement: &ModelPlacement| placement.variant.cost;
        let cheapest = of_model.min_by(|one, other| {
            compare_by_cost((cost(one), &one.variant.name), (cost(other), &other.variant.name))
        })?;
        Some(&cheapest.variant.name)
    }

    /// Returns the placement of the variant with these labels in this namespace.
    #[must_use]
    pub fn of_labels(
        &self,
        namespace: &str,
        model: &str,
        variant: &VariantName,
    ) -> Option<&Arc<ModelPlacement>> {
        find(&self.by_label, |placement| label_key(placement).cmp(&(namespace, model, variant)))
    }

    /// Returns the placement of the Pod's variant, whatever the Pod's template.
    #[must_use]
    pub fn of_pod(&self, pod: &EnginePod) -> Option<&Arc<ModelPlacement>> {
        self.of_labels(&pod.name.namespace, &pod.model, &pod.variant)
    }

    /// Returns the placement of the engine that has this reservation.
    #[must_use]
    pub fn of_owner(&self, engine: &ReservationOwner) -> Option<&Arc<ModelPlacement>> {
        find(&self.by_object, |placement| object_key(placement).cmp(&(&engine.model, &engine.variant)))
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

fn model_key(placement: &ModelPlacement) -> (&ModelName, &VariantName) {
    (&placement.engine.name, &placement.variant.name)
}

fn label_key(placement: &ModelPlacement) -> (&str, &str, &VariantName) {
    (placement.owner.object.namespace.as_str(), placement.label.as_str(), &placement.variant.name)
}

fn object_key(placement: &ModelPlacement) -> (&ObjectName, &VariantName) {
    (&placement.owner.object, &placement.variant.name)
}

/// Of several placements of one variant, the last one counts.
impl FromIterator<Arc<ModelPlacement>> for ModelPlacements {
    fn from_iter<I: IntoIterator<Item = Arc<ModelPlacement>>>(placements: I) -> Self {
        let named = placements.into_iter().map(|placement| {
            let key = (placement.engine.name.clone(), placement.variant.name.clone());
            (key, placement)
        });
        let by_model: Vec<_> = named.collect::<BTreeMap<_, _>>().into_values().collect();
        let (mut by_label, mut by_object) = (by_model.clone(), by_model.clone());
        by_label.sort_unstable_by(|a, b| label_key(a).cmp(&label_key(b)));
        by_object.sort_unstable_by(|a, b| object_key(a).cmp(&object_key(b)));
        Self { by_model, by_label, by_object }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::platform::testing;

    const NAMESPACES: [&str; 2] = ["chat", "code"];
    const VARIANTS: [&str; 2] = [VariantName::DEFAULT, "large"];

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
        fn each_lookup_finds_what_a_scan_finds(
            named in prop::collection::vec((0..2_usize, 0..6_u32, 0..2_usize), 0..12),
        ) {
            let base = testing::placement("m", "chat");
            let built = named.iter().map(|(namespace, model, variant)| {
                let mut placement = testing::renamed(&base, &format!("m{model}"), NAMESPACES[*namespace]);
                placement.variant.name = VARIANTS[*variant].into();
                Arc::new(placement)
            });
            let placements: ModelPlacements = built.collect();
            let all = (0..6).flat_map(|number| VARIANTS.map(|variant| (format!("m{number}"), variant)));
            for (model, variant) in all {
                let (name, variant) = (ModelName::from(model.as_str()), VariantName::from(variant));
                let is_variant = |it: &ModelPlacement| it.variant.name == variant;
                let found = Vec::from_iter(placements.get(&name, &variant).cloned());
                prop_assert_eq!(found, scan(&placements, |it| it.engine.name == name && is_variant(it)));
                for namespace in NAMESPACES {
                    let (object, label) = (ObjectName::new(namespace, &model), crate::label::value(&model));
                    let of_namespace = |it: &ModelPlacement| it.owner.object.namespace == namespace;
                    let found = Vec::from_iter(placements.of_labels(namespace, &label, &variant).cloned());
                    let labelled =
                        scan(&placements, |it| of_namespace(it) && it.label == label && is_variant(it));
                    prop_assert_eq!(found, labelled);
                    let owner =
                        ReservationOwner { model: object.clone(), variant: variant.clone(), replica: 7 };
                    let found = Vec::from_iter(placements.of_owner(&owner).cloned());
                    let owned = scan(&placements, |it| it.owner.object == object && is_variant(it));
                    prop_assert_eq!(found, owned);
                }
            }
        }
    }
}
