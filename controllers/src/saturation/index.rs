//! The objects that saturation reads: which models it scales, their stored decisions, and the thresholds.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use k8s_openapi::api::core::v1::{ConfigMap, Node};
use rouse::{
    model::ModelName,
    saturation::{FleetLoad, Profile, RecordedTarget, Role, SaturationPolicy, VariantState},
    units::{Millis, Tick},
};

use super::{
    accelerator_budget::{AcceleratorBudget, is_counted},
    thresholds_config::{ModelThresholds, ThresholdsConfig},
    warm_nodes::WarmNodes,
};
use crate::{
    convert::{SaturationSettings, threshold_entry, warmup::model_set},
    crd::{
        AcceleratorNode, InferenceModel,
        inference_model::{
            ActuationSpec, AnalyzerSpec, LimiterSpec, SaturationProfileSpec, SaturationStatus,
        },
        ledger::ObjectName,
    },
    index::{Resolved, ServedModel, ServedVariant},
    label,
    metrics::{ModelReplicas, VariantReplicas},
    watch::{Delta, WatchedObject},
};

/// The objects as last observed.
#[derive(Debug)]
pub(crate) struct SaturationIndex {
    /// Number of initial lists of InferenceModels.
    expected_lists: usize,
    listed: BTreeSet<Option<String>>,
    thresholds_listed: bool,
    resolved: Option<Arc<Resolved>>,
    /// The decisions in the statuses of models.
    stored: BTreeMap<ObjectName, SaturationStatus>,
    thresholds: ThresholdsConfig,
    /// Type of the accelerators of each pool, if all its nodes have the same.
    accelerators: BTreeMap<String, Option<String>>,
    warm_nodes: WarmNodes,
    has_models: bool,
}

/// A model that saturation scales.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScaledModel<'a> {
    pub object: &'a ObjectName,
    pub served: &'a ServedModel,
    settings: &'a SaturationSettings,
}

impl SaturationIndex {
    pub(crate) fn new(expected_lists: usize) -> Self {
        Self {
            expected_lists,
            listed: BTreeSet::new(),
            thresholds_listed: false,
            resolved: None,
            stored: BTreeMap::new(),
            thresholds: ThresholdsConfig::default(),
            accelerators: BTreeMap::new(),
            warm_nodes: WarmNodes::default(),
            has_models: false,
        }
    }

    pub(crate) fn apply_models(&mut self, delta: &Delta<InferenceModel>) {
        match delta {
            Delta::All { namespace, objects } => {
                self.stored
                    .retain(|name, _| namespace.as_ref().is_some_and(|listed| *listed != name.namespace));
                objects.iter().for_each(|found| self.model_applied(found));
                self.listed.insert(namespace.clone());
            }
            Delta::Applied(found) => self.model_applied(found),
            Delta::Deleted(name) => drop(self.stored.remove(name)),
        }
    }

    /// An unreadable object leaves its last decision.
    fn model_applied(&mut self, found: &WatchedObject<InferenceModel>) {
        let WatchedObject::Readable(model) = found else { return };
        match model.status.as_ref().and_then(|status| status.saturation.clone()) {
            Some(stored) => self.stored.insert(found.name(), stored),
            None => self.stored.remove(&found.name()),
        };
    }

    /// Takes the ConfigMap of thresholds. Returns whether anything is different now.
    pub(crate) fn apply_thresholds(&mut self, delta: Delta<ConfigMap>) -> bool {
        self.thresholds_listed = true;
        let map = match delta {
            Delta::All { objects, .. } => objects.into_iter().find_map(WatchedObject::readable),
            Delta::Applied(found) => match found {
                WatchedObject::Readable(map) => Some(map),
                // What was read last stays.
                WatchedObject::Unreadable { .. } => return false,
            },
            Delta::Deleted(_) => None,
        };
        self.thresholds.apply(map.as_deref())
    }

    /// Takes nodes, some of which have the images of models. No decision waits for their list: it is a preference.
    pub(crate) fn apply_nodes(&mut self, delta: &Delta<Node>) {
        self.warm_nodes.apply_nodes(delta);
    }

    pub(crate) fn apply_accelerator_nodes(&mut self, delta: &Delta<AcceleratorNode>) {
        self.warm_nodes.apply_accelerator_nodes(delta);
    }

    pub(crate) fn set_resolved(&mut self, resolved: Arc<Resolved>) {
        let is_same =
            self.resolved.as_ref().is_some_and(|before| Arc::ptr_eq(&before.nodes, &resolved.nodes));
        if !is_same {
            self.accelerators = accelerators(&resolved);
        }
        self.resolved = Some(resolved);
        let has_models = self.models().next().is_some();
        self.has_models = has_models;
    }

    /// Whether saturation scales any model.
    pub(crate) const fn has_models(&self) -> bool {
        self.has_models
    }

    /// Whether everything was seen once: a decision without a stored target or a threshold might lower something.
    pub(crate) fn is_complete(&self) -> bool {
        self.resolved.is_some() && self.thresholds_listed && self.listed.len() >= self.expected_lists
    }

    /// Returns the resolved objects.
    pub(crate) const fn resolved(&self) -> Option<&Arc<Resolved>> {
        self.resolved.as_ref()
    }

    /// Returns every model that saturation scales.
    pub(crate) fn models(&self) -> impl Iterator<Item = ScaledModel<'_>> {
        let served = self.resolved.iter().flat_map(|resolved| &resolved.served);
        served.filter_map(|(object, served)| {
            let settings = served.model.saturation.as_ref().filter(|_| !served.is_external())?;
            Some(ScaledModel { object, served, settings })
        })
    }

    /// Returns the decision in the model's status.
    pub(crate) fn stored(&self, object: &ObjectName) -> Option<&SaturationStatus> {
        self.stored.get(object)
    }

    pub(crate) fn thresholds_of(&self, model: ScaledModel<'_>) -> ModelThresholds {
        let (name, namespace) = (model.served.spec.name.as_str(), model.object.namespace.as_str());
        self.thresholds.of_model(model.profile(), name, namespace, &threshold_entry(&model.settings.written))
    }

    /// Number of entries of thresholds that are refused.
    pub(crate) fn refused_thresholds(&self) -> usize {
        self.thresholds.refused_count()
    }

    /// Returns the model's values for the metrics: what runs, and the targets of these variants.
    pub(crate) fn replicas(
        &self,
        object: &ObjectName,
        fleet: &FleetLoad,
        targets: &[RecordedTarget],
        decided: Option<Tick>,
    ) -> ModelReplicas {
        let served = self.resolved.as_ref().and_then(|resolved| resolved.served.get(object));
        let replicas = |target: &RecordedTarget| {
            let name = &target.variant;
            let variant =
                served.and_then(|served| served.variants.iter().find(|variant| variant.name == *name));
            VariantReplicas {
                variant: name.to_string(),
                public_name: VariantReplicas::public_name(&object.name, name),
                accelerator: variant.and_then(|variant| self.accelerator(variant)).map(str::to_owned),
                current: fleet.variants.get(name).map_or(0, |engines| engines.current),
                desired: target.replicas,
            }
        };
        let variants = targets.iter().map(replicas).collect();
        ModelReplicas { namespace: object.namespace.clone(), variants, decided }
    }

    /// Returns the type of the variant's accelerators, if it is known.
    fn accelerator(&self, variant: &ServedVariant) -> Option<&str> {
        self.accelerators.get(variant.pool.as_ref()?)?.as_deref()
    }

    /// Returns the free accelerators of every pool. `held`: those of each pool that its ledger has reserved.
    pub(super) fn accelerator_budget(&self, held: &BTreeMap<String, u32>) -> AcceleratorBudget {
        let mut budget = AcceleratorBudget::default();
        for (name, pool) in self.resolved.iter().flat_map(|resolved| resolved.pools.iter()) {
            budget.add_pool(self.budget_of(name), pool, held.get(name).copied().unwrap_or_default());
        }
        budget
    }

    /// Returns the budget that engines of this pool count against: that of the type of its accelerators.
    ///
    /// Without a type, or with several, the pool has one of its own. So has a pool whose number of accelerators is
    /// unknown: it would lift the limit of the others of its type.
    fn budget_of<'a>(&'a self, pool: &'a str) -> &'a str {
        let found = self.resolved.as_ref().and_then(|resolved| resolved.pools.get(pool));
        let kind = self.accelerators.get(pool).and_then(Option::as_deref);
        kind.filter(|_| found.is_some_and(is_counted)).unwrap_or(pool)
    }

    /// Returns the state of each variant, with the numbers of engines that the fleet has.
    pub(crate) fn variant_states(&self, model: ScaledModel<'_>, fleet: &FleetLoad) -> Vec<VariantState> {
        let served = model.served;
        let label = label::warm_key(&model_set(model.object));
        let state = |variant: &ServedVariant| {
            let spec = served.spec.for_variant(&variant.name)?;
            let converted = served.converted(variant);
            let warm = converted.zip(self.resolved.as_ref()).is_some_and(|(converted, resolved)| {
                self.warm_nodes.can_take_one(&label, variant, converted, &resolved.nodes)
            });
            // Even if nothing limits the model, the accelerators that it takes are not free for the others.
            let accelerator = variant.pool.as_deref().map(|pool| self.budget_of(pool));
            Some(VariantState {
                cost: converted.map_or(VariantState::DEFAULT_COST, |converted| converted.cost),
                role: converted.map_or(Role::Both, |converted| converted.role),
                warm,
                accelerator: accelerator.unwrap_or_default().to_owned(),
                limits: converted.and_then(|own| own.batch_limits).filter(|_| model.counts_tokens()),
                ..fleet.variant_state(&variant.name, &spec)
            })
        };
        let mut states: Vec<VariantState> = served.variants.iter().filter_map(state).collect();
        if !fleet.awake.is_empty() {
            start_every_role(&mut states);
        }
        states
    }
}

impl<'a> ScaledModel<'a> {
    pub(crate) const fn name(&self) -> &'a ModelName {
        &self.served.spec.name
    }

    /// Returns the number of engines that another autoscaler asks for, if one sets the number.
    pub(crate) fn external(&self) -> Option<u32> {
        self.settings.replicas.filter(|_| self.settings.written.actuation == ActuationSpec::External)
    }

    /// Returns how the model is scaled. `stabilisation`: the gateway's, for an object that sets none.
    pub(crate) fn policy(&self, stabilisation: Millis) -> SaturationPolicy {
        SaturationPolicy {
            profile: self.profile(),
            stabilisation: self.settings.stabilisation.unwrap_or(stabilisation),
            zero: self.settings.zero,
            ..SaturationPolicy::default()
        }
    }

    /// Whether free accelerators limit the model's targets.
    pub(crate) fn is_limited(&self) -> bool {
        self.settings.written.limiter == LimiterSpec::Inventory
    }

    /// Whether the model's steps are sized in tokens.
    pub(crate) fn counts_tokens(&self) -> bool {
        self.settings.written.analyzer == AnalyzerSpec::Tokens
    }

    const fn profile(&self) -> Profile {
        match self.settings.written.profile {
            Some(SaturationProfileSpec::Doc) => Profile::Doc,
            Some(SaturationProfileSpec::Latest) => Profile::Latest,
            Some(SaturationProfileSpec::Rouse) | None => Profile::Rouse,
        }
    }
}

/// Lets each role of a divided model start an engine of its cheapest variant if it has none. For a model that serves.
///
/// The fleet starts one engine for the first request, and prefill is of no use without decode.
fn start_every_role(states: &mut [VariantState]) {
    if states.iter().all(|state| state.role == Role::Both) {
        return;
    }
    let running = states.iter().filter(|state| state.current > 0).map(|state| state.role);
    let mut started: BTreeSet<Role> = running.collect();
    // The cheapest variant comes first.
    for state in states {
        if started.insert(state.role) {
            state.min = state.min.max(1);
        }
    }
}

/// Returns the type of the accelerators of each pool; `None` if its nodes have several, or none.
fn accelerators(resolved: &Resolved) -> BTreeMap<String, Option<String>> {
    let mut kinds: BTreeMap<&String, BTreeSet<&String>> = BTreeMap::new();
    for node in resolved.nodes.values() {
        if let (Some(pool), Some(kind)) = (&node.pool, &node.kind) {
            kinds.entry(pool).or_default().insert(kind);
        }
    }
    let only = |kinds: &BTreeSet<&String>| match kinds.len() {
        1 => kinds.first().map(|kind| (*kind).clone()),
        _ => None,
    };
    kinds.iter().map(|(pool, kinds)| ((*pool).clone(), only(kinds))).collect()
}
