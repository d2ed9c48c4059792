//! The configuration of each variant of the models that list variants.
//!
//! Every decision about one engine reads the values of its variant. They are merged once, when the configuration
//! arrives, because a plan reads them for every engine that it looks at.

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    fleet::plan::{ModelRecord, Planner},
    model::{EngineId, ModelName, ModelSpec, VariantName},
};

/// The specs of all variants of one model, cheapest first.
type SpecsByCost = Vec<(VariantName, Arc<ModelSpec>)>;

/// The merged specs of models that list variants; other models have none here.
///
/// Derived from the models, so two states never differ by it.
#[derive(Clone, Debug, Default)]
pub(in crate::fleet) struct VariantSpecs(Arc<BTreeMap<ModelName, SpecsByCost>>);

impl VariantSpecs {
    pub(in crate::fleet) fn from_models(models: &BTreeMap<ModelName, ModelRecord>) -> Self {
        let specs = models.values().filter_map(|model| model.spec.as_deref());
        let with_variants = specs.filter_map(|spec| Some((spec.name.clone(), merged(spec)?)));
        Self(Arc::new(with_variants.collect()))
    }

    /// Returns the variants of the model, cheapest first; empty if it lists none.
    pub(in crate::fleet) fn of_model(&self, model: &ModelName) -> &[(VariantName, Arc<ModelSpec>)] {
        self.0.get(model).map_or(&[], Vec::as_slice)
    }

    fn of_engine(&self, id: &EngineId) -> Option<&Arc<ModelSpec>> {
        self.of_model(&id.model).iter().find(|(name, _)| *name == id.variant).map(|(_, spec)| spec)
    }
}

/// Returns the specs of the model's variants; `None` if it lists none.
fn merged(spec: &ModelSpec) -> Option<SpecsByCost> {
    let of_variant = |name: VariantName| {
        let merged = spec.for_variant(&name)?.into_owned();
        Some((name, Arc::new(merged)))
    };
    (!spec.variants.is_empty()).then(|| spec.variant_names().into_iter().filter_map(of_variant).collect())
}

impl PartialEq for VariantSpecs {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Planner {
    /// Brings the merged specs up to date with the model's configuration.
    pub(in crate::fleet) fn refresh_variant_specs(&mut self, model: &ModelName) {
        let merged = self.spec(model).and_then(merged);
        if merged.is_none() && self.variant_specs.of_model(model).is_empty() {
            return;
        }
        let all = Arc::make_mut(&mut self.variant_specs.0);
        match merged {
            Some(specs) => drop(all.insert(model.clone(), specs)),
            None => drop(all.remove(model)),
        }
    }

    /// The configuration of this engine: that of its variant. `None` if the model or the variant is not configured.
    pub(in crate::fleet) fn engine_spec(&self, id: &EngineId) -> Option<&ModelSpec> {
        self.arc_of_engine_spec(id).map(|spec| &**spec)
    }

    pub(in crate::fleet) fn shared_engine_spec(&self, id: &EngineId) -> Option<Arc<ModelSpec>> {
        self.arc_of_engine_spec(id).cloned()
    }

    fn arc_of_engine_spec(&self, id: &EngineId) -> Option<&Arc<ModelSpec>> {
        let spec = self.models.get(&id.model)?.spec.as_ref()?;
        if spec.variants.is_empty() {
            id.variant.is_default().then_some(spec)
        } else {
            self.variant_specs.of_engine(id)
        }
    }

    /// The configuration of the cheapest variant that some accelerators could hold; of the cheapest if none could.
    ///
    /// A model is explained by this variant while none of its engines runs.
    pub(in crate::fleet) fn main_spec(&self, model: &ModelName) -> Option<&ModelSpec> {
        let variants = self.variant_specs.of_model(model);
        let fitting =
            variants.iter().find(|(_, spec)| self.could_ever_hold(spec)).or_else(|| variants.first());
        fitting.map_or_else(|| self.spec(model), |(_, spec)| Some(&**spec))
    }
}
