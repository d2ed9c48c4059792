//! Variants of a model: several ways to run it side by side, on other hardware or at other costs.
//!
//! Apart from the model, because decisions read a model's own values wherever it has no variants, and those of one
//! variant wherever they concern one engine.

use std::{borrow::Cow, cmp::Ordering};

use serde::{Deserialize, Serialize};

use super::{
    AcceleratorRequirement, EngineId, EngineMemory, IdlePolicy, ModelSpec, SleepLevelPolicy, VariantName,
};

/// One way of running a model. Its engines have these values in place of the model's own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EngineVariant {
    pub name: VariantName,
    /// Cost of one engine, in any unit: the cheapest variant that fits starts first.
    pub cost: f64,
    pub accelerators: AcceleratorRequirement,
    pub memory: EngineMemory,
    pub explicit_memory: bool,
    pub can_sleep: bool,
    pub sleep_level: SleepLevelPolicy,
    pub fingerprint: u64,
    /// The most engines of this variant.
    pub replicas: u32,
    /// Number of its engines that are never evicted and kept awake without demand: the lowest replica numbers.
    #[serde(default, skip_serializing_if = "super::is_zero")]
    pub min_replicas: u32,
}

/// Which engines of other models a replica that saturation asks for may put away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ScaleUpEviction {
    /// Engines that are idle and no longer protected.
    #[default]
    Idle,
    Never,
}

impl ScaleUpEviction {
    pub(super) const fn is_default(&self) -> bool {
        matches!(self, Self::Idle)
    }
}

/// Orders two variants, each with its cost: the cheaper one first, of equal costs the first by name.
///
/// Every choice of a cheapest or dearest variant follows this order, so that all parts of Rouse choose the same one.
#[must_use]
pub fn compare_by_cost(one: (f64, &VariantName), other: (f64, &VariantName)) -> Ordering {
    one.0.total_cmp(&other.0).then_with(|| one.1.cmp(other.1))
}

impl EngineVariant {
    /// A variant whose engines run as this spec says. The spec's own variants do not count.
    #[must_use]
    pub fn from_spec(name: VariantName, cost: f64, spec: &ModelSpec) -> Self {
        Self {
            name,
            cost,
            accelerators: spec.accelerators.clone(),
            memory: spec.memory,
            explicit_memory: spec.explicit_memory,
            can_sleep: spec.can_sleep,
            sleep_level: spec.idle.level,
            fingerprint: spec.fingerprint,
            replicas: spec.replicas,
            min_replicas: spec.min_replicas,
        }
    }

    fn compare_by_cost(&self, other: &Self) -> Ordering {
        compare_by_cost((self.cost, &self.name), (other.cost, &other.name))
    }
}

impl ModelSpec {
    /// Returns the spec as engines of this variant have it; `None` if the model has no such variant.
    ///
    /// The result lists no variants.
    #[must_use]
    pub fn for_variant(&self, name: &VariantName) -> Option<Cow<'_, Self>> {
        if self.variants.is_empty() {
            return name.is_default().then_some(Cow::Borrowed(self));
        }
        let variant = self.variants.iter().find(|variant| variant.name == *name)?;
        Some(Cow::Owned(self.with_variant(variant)))
    }

    /// Returns the cheapest variant, of equal costs the first by name; the default if the model lists none.
    #[must_use]
    pub fn cheapest_variant(&self) -> VariantName {
        let cheapest = self.variants.iter().min_by(|one, other| one.compare_by_cost(other));
        cheapest.map(|variant| variant.name.clone()).unwrap_or_default()
    }

    /// Returns the spec with the values of one variant, and without variants.
    #[must_use]
    pub fn with_variant(&self, variant: &EngineVariant) -> Self {
        Self {
            accelerators: variant.accelerators.clone(),
            memory: variant.memory,
            idle: IdlePolicy { level: variant.sleep_level, ..self.idle },
            replicas: variant.replicas,
            min_replicas: variant.min_replicas,
            explicit_memory: variant.explicit_memory,
            can_sleep: variant.can_sleep,
            fingerprint: variant.fingerprint,
            variants: Vec::new(),
            ..self.clone()
        }
    }

    /// The most engines of this variant; 0 if the model has no such variant.
    #[must_use]
    pub fn replicas_of(&self, name: &VariantName) -> u32 {
        self.number_of(name, self.replicas, |variant| variant.replicas)
    }

    /// Number of engines of this variant that run without demand; 0 if the model has no such variant.
    #[must_use]
    pub fn min_replicas_of(&self, name: &VariantName) -> u32 {
        self.number_of(name, self.min_replicas, |variant| variant.min_replicas)
    }

    /// The fingerprint of this variant; `None` if the model has no such variant.
    pub(crate) fn fingerprint_of(&self, name: &VariantName) -> Option<u64> {
        if self.variants.is_empty() {
            return name.is_default().then_some(self.fingerprint);
        }
        self.variants.iter().find(|variant| variant.name == *name).map(|variant| variant.fingerprint)
    }

    fn number_of(&self, name: &VariantName, own: u32, of: impl FnOnce(&EngineVariant) -> u32) -> u32 {
        if self.variants.is_empty() {
            return if name.is_default() { own } else { 0 };
        }
        self.variants.iter().find(|variant| variant.name == *name).map_or(0, of)
    }

    /// Returns every engine that the model may have, the cheapest variant's first.
    pub fn engine_ids(&self) -> impl Iterator<Item = EngineId> {
        self.variant_names().into_iter().flat_map(move |variant| {
            let replicas = self.replicas_of(&variant);
            (0..replicas)
                .map(move |replica| EngineId::of_variant(self.name.clone(), variant.clone(), replica))
        })
    }

    /// Returns the variants that the model has engines of, cheapest first, of equal costs by name.
    #[must_use]
    pub fn variant_names(&self) -> Vec<VariantName> {
        if self.variants.is_empty() {
            return vec![VariantName::default()];
        }
        let mut listed: Vec<&EngineVariant> = self.variants.iter().collect();
        listed.sort_by(|one, other| one.compare_by_cost(other));
        listed.into_iter().map(|variant| variant.name.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{sim::simulated_model, units::Bytes};

    fn memory(gib: u64) -> EngineMemory {
        EngineMemory { awake: Bytes::gib(gib), asleep: Bytes::gib(1), host: Bytes::gib(gib) }
    }

    fn variant(name: &str, cost: f64, gib: u64) -> EngineVariant {
        let spec = ModelSpec { replicas: 2, fingerprint: gib, ..simulated_model("m", memory(gib)) };
        EngineVariant::from_spec(name.into(), cost, &spec)
    }

    #[test]
    fn a_model_without_variants_has_the_default_one_with_its_own_values() {
        let spec = simulated_model("m", memory(8));
        assert_eq!(spec.variant_names(), [VariantName::default()]);
        assert_eq!(spec.for_variant(&VariantName::default()).as_deref(), Some(&spec));
        assert!(spec.for_variant(&"h100".into()).is_none());
    }

    #[test]
    fn names_decide_between_variants_of_one_cost() {
        let variants = vec![variant("b", 1.0, 24), variant("c", 0.5, 24), variant("a", 1.0, 24)];
        let spec = ModelSpec { variants, ..simulated_model("m", memory(8)) };
        assert_eq!(spec.variant_names(), ["c", "a", "b"].map(VariantName::from));
        assert_eq!(spec.cheapest_variant(), "c".into());
        let variants = spec.variants.into_iter().filter(|variant| variant.name.as_str() != "c").collect();
        let spec = ModelSpec { variants, ..simulated_model("m", memory(8)) };
        assert_eq!((spec.cheapest_variant(), spec.variant_names().remove(0)), ("a".into(), "a".into()));
    }

    #[test]
    fn engines_of_a_variant_have_its_values_and_the_rest_of_the_models() {
        let variants = vec![variant("h100", 5.0, 80), variant("l4", 1.0, 24)];
        let spec = ModelSpec { priority: 7, variants, ..simulated_model("m", memory(8)) };
        assert_eq!(spec.variant_names(), [VariantName::from("l4"), "h100".into()], "cheapest first");
        assert!(spec.for_variant(&VariantName::default()).is_none(), "only listed variants run");
        let large = spec.for_variant(&"h100".into()).map(Cow::into_owned).unwrap();
        assert_eq!((large.memory, large.replicas, large.fingerprint), (memory(80), 2, 80));
        assert_eq!((large.priority, large.variants.len()), (7, 0));
        let engines: Vec<String> = spec.engine_ids().map(|id| id.to_string()).collect();
        assert_eq!(engines, ["m#l4.0", "m#l4.1", "m#h100.0", "m#h100.1"]);
        assert_eq!((spec.replicas_of(&"l4".into()), spec.replicas_of(&"a100".into())), (2, 0));
        assert_eq!((spec.min_replicas_of(&"l4".into()), spec.fingerprint_of(&"l4".into())), (0, Some(24)));
    }

    #[test]
    fn a_spec_stored_before_variants_existed_is_read_and_written_as_before() {
        let spec = simulated_model("m", memory(8));
        let stored = serde_json::to_value(&spec).unwrap();
        for absent in ["variants", "may_evict", "scaled", "saturation_thresholds"] {
            assert_eq!(stored.get(absent), None, "{absent}");
        }
        assert_eq!(serde_json::from_value::<ModelSpec>(stored).unwrap(), spec);
    }
}
