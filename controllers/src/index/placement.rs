//! Places models in pools.
//!
//! A model whose pool has a problem is still served: its running engines go on, and its clients wait and learn why.
//! Dropping it because of one wrong label would end in seconds what took minutes to load.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use rouse::{
    model::{AcceleratorRequirement, EngineVariant, ModelName, ModelSpec, VariantName},
    pairing::ids::ProviderMode,
};

use super::{
    model_entry::ModelEntry,
    pool::{PoolEntry, PoolTerms},
    pool_membership::PoolMembership,
    resolved::{PoolProblem, RejectedModel, Resolved, ResolvedPool, ServedModel, ServedVariant, list},
    selectors::Selectors,
};
use crate::{
    conflicts::{self, ModelClaim},
    convert::{self, ConversionPolicy, ModelHosting, ModelVariant},
    crd::ledger::ObjectName,
    rejection::{Rejection, Rejections},
};

/// Places each model by itself, then checks the models against each other.
pub(super) fn resolve(
    models: &BTreeMap<ObjectName, ModelEntry>,
    pools: &BTreeMap<String, PoolEntry>,
    membership: &PoolMembership,
    policy: ConversionPolicy,
) -> Resolved {
    let selectors = Selectors::new(pools.iter().map(|(name, entry)| (name.as_str(), &entry.selector)));
    let placer = Placer { selectors, entries: pools, pools: &membership.pools, policy };
    let placed: Vec<_> = models.values().map(|entry| placer.model(entry)).collect();
    let claim = |(entry, placed): (&ModelEntry, &Result<_, _>)| ModelClaim {
        sound: placed.is_ok(),
        ..entry.claim.clone()
    };
    let claims: Vec<_> = models.values().zip(&placed).map(claim).collect();
    let mut among_others = conflicts::find_conflicts(&claims);
    let mut resolved = Resolved {
        pools: Arc::clone(&membership.pools),
        nodes: Arc::clone(&membership.nodes),
        ..Resolved::default()
    };
    for ((object, entry), placed) in models.iter().zip(placed) {
        let refused = match (placed, among_others.remove(object)) {
            (Ok(served), None) => {
                resolved.objects.insert(served.spec.name.clone(), object.clone());
                resolved.served.insert(object.clone(), served);
                continue;
            }
            (Ok(_), Some(refusal)) => refusal.into(),
            (Err(refused), None) => refused,
            (Err(Rejections(mut all)), Some(refusal)) => {
                all.push(refusal);
                Rejections(all)
            }
        };
        let (uid, generation) = (entry.version.uid.clone(), entry.version.generation);
        let model = ModelName::from(entry.claim.name.as_str());
        resolved
            .rejected
            .insert(object.clone(), RejectedModel { uid, generation, model, rejections: refused });
    }
    for (object, rejected) in &resolved.rejected {
        if !resolved.objects.contains_key(&rejected.model) {
            resolved.unserved.entry(rejected.model.clone()).or_insert_with(|| object.clone());
        }
    }
    name_dependencies(&mut resolved);
    resolved
}

/// Fills in the dependencies of served models by model name.
///
/// Objects refer to objects, while decisions use model names. All dependencies of a served model are served.
fn name_dependencies(resolved: &mut Resolved) {
    let named = |resolved: &Resolved, served: &ServedModel| -> Vec<ModelName> {
        let needed = served.model.dependencies.iter();
        needed.filter_map(|object| Some(resolved.served.get(object)?.spec.name.clone())).collect()
    };
    let needing = resolved.served.iter().filter(|(_, served)| !served.model.dependencies.is_empty());
    let all: Vec<_> = needing.map(|(object, served)| (object.clone(), named(resolved, served))).collect();
    for (object, dependencies) in all {
        if let Some(served) = resolved.served.get_mut(&object) {
            served.spec.dependencies = dependencies;
        }
    }
}

struct Placer<'a> {
    selectors: Selectors<'a>,
    entries: &'a BTreeMap<String, PoolEntry>,
    pools: &'a BTreeMap<String, ResolvedPool>,
    policy: ConversionPolicy,
}

/// A variant and the pool that it runs in.
struct VariantPlacement<'a> {
    variant: &'a ModelVariant,
    pool: &'a str,
    terms: Option<&'a PoolTerms>,
    /// The decisions pick accelerators of the pool, whose slots several engines share.
    has_slots: bool,
    blocked_by: Option<String>,
}

impl VariantPlacement<'_> {
    /// Whether the pool allows engines that run without requests.
    fn is_pinnable(&self) -> bool {
        self.terms.is_none_or(|terms| terms.pinnable)
    }
}

impl Placer<'_> {
    fn model(&self, entry: &ModelEntry) -> Result<ServedModel, Rejections> {
        let model = entry.converted.as_ref().map_err(Clone::clone)?;
        match &model.hosting {
            ModelHosting::External(_) => external(entry, model),
            ModelHosting::DualPods(_) => {
                check_dual_pods_mode(self.policy.dual_pods, model)?;
                Ok(self.without_pairing_sleep(self.run(entry, model)?))
            }
            ModelHosting::Deployment(_) => self.run(entry, model),
        }
    }

    /// Places the variants that a pool accepts. If none does, returns the rejection of the cheapest.
    fn run(
        &self,
        entry: &ModelEntry,
        model: &Arc<convert::ConvertedModel>,
    ) -> Result<ServedModel, Rejections> {
        let (mut placed, mut notes, mut rejection) = (Vec::new(), Vec::new(), None);
        for variant in &model.variants {
            match self.variant(model, variant, placed.is_empty()) {
                Ok(placement) => placed.push(placement),
                Err(refusal) => {
                    notes.push(format!("the variant '{}' does not run: {refusal}", variant.name));
                    rejection = rejection.or(Some(refusal));
                }
            }
        }
        if placed.is_empty() {
            return Err(rejection.map_or_else(nothing_to_run, Rejections::from));
        }
        served(entry, model, &placed, notes)
    }

    /// Finds the variant's pool. `is_cheapest`: no cheaper variant of the model runs, so a pin is for this one's
    /// engines.
    fn variant<'b>(
        &'b self,
        model: &convert::ConvertedModel,
        variant: &'b ModelVariant,
        is_cheapest: bool,
    ) -> Result<VariantPlacement<'b>, Rejection> {
        let found = self.selectors.matching_pools(&variant.node_selector);
        let (name, waits) = match found.as_slice() {
            [] => return Err(self.no_pool(variant)),
            [name] => (*name, None),
            several => {
                let named = || list(several.iter().map(|name| format!("'{name}'")));
                let oldest = self.oldest(several).ok_or_else(|| Rejection::SeveralPools(named()))?;
                (
                    oldest,
                    Some(format!("the model's nodeSelector matches the pools {}, which overlap", named())),
                )
            }
        };
        let pool = self.pools.get(name);
        let object = &model.object;
        let terms = pool.and_then(|pool| pool.terms.as_deref());
        if let Some(terms) = terms {
            if !terms.allows(&object.namespace) {
                let (pool, namespace) = (name.to_owned(), object.namespace.clone());
                return Err(Rejection::Namespace { pool, namespace });
            }
            let fields = keep_awake_fields(variant, is_cheapest);
            if !terms.pinnable && !fields.is_empty() {
                return Err(Rejection::Pinned { pool: name.to_owned(), fields: fields.join(" and ") });
            }
        }
        let problem = pool.and_then(|pool| pool.problem.as_ref());
        let blocked_by = problem.map(|problem| match waits {
            Some(waits) => format!("{waits}: {problem}"),
            None => format!("the pool '{name}' is not ready: {problem}"),
        });
        let has_slots = pool.is_some_and(|pool| pool.slots.is_some());
        Ok(VariantPlacement { variant, pool: name, terms, has_slots, blocked_by })
    }

    /// Serves a model in mode dualPods. Without slots, its engines only start and stop as far as the decisions know.
    ///
    /// Pairing puts those engines to sleep while the model has no requester Pod. With slots the requesters stay, and the
    /// decisions say which engines are awake.
    fn without_pairing_sleep(&self, served: ServedModel) -> ServedModel {
        // In this mode, pairing deletes an engine along with its requester, and cannot put it to sleep.
        let is_plain = self.policy.dual_pods == Some(ProviderMode::Plain)
            && !served.pods().is_some_and(convert::EnginePodTemplate::has_server_config);
        let has_slots = |variant: &ServedVariant| {
            let pool = variant.pool.as_ref().and_then(|name| self.pools.get(name));
            !is_plain && pool.is_some_and(|pool| pool.slots.is_some())
        };
        let sleeping: BTreeSet<VariantName> =
            served.variants.iter().filter(|v| has_slots(v)).map(|v| v.name.clone()).collect();
        without_sleep(served, &sleeping)
    }

    /// Picks the oldest of overlapping pools, since running engines have their reservations there.
    fn oldest<'b>(&self, pools: &[&'b str]) -> Option<&'b str> {
        let overlaps = |name: &str| {
            let problem = self.pools.get(name).and_then(|pool| pool.problem.as_ref());
            matches!(problem, Some(PoolProblem::Overlap(with)) if pools.iter().any(|other| with.contains_key(*other)))
        };
        let age = |name: &str| {
            let created = self.entries.get(name).and_then(|entry| entry.created);
            (created.is_none(), created, name.to_owned())
        };
        pools.iter().copied().filter(|name| overlaps(name)).min_by_key(|name| age(name))
    }

    fn no_pool(&self, variant: &ModelVariant) -> Rejection {
        let pools = self.entries.iter();
        let pools = pools.map(|(name, entry)| format!("'{name}' ({})", pairs(&entry.selector)));
        Rejection::NoPool { wanted: pairs(&variant.node_selector), pools: list(pools) }
    }
}

/// Checks that this gateway serves requesters of such a model.
fn check_dual_pods_mode(
    mode: Option<ProviderMode>,
    model: &convert::ConvertedModel,
) -> Result<(), Rejections> {
    let configured = matches!(&model.hosting, ModelHosting::DualPods(pods) if pods.has_server_config());
    let text = match mode {
        Some(_) if configured => return Ok(()),
        None => "this gateway does not serve mode dualPods: set kubernetes.dualPods in its configuration",
        Some(ProviderMode::Sleep | ProviderMode::Launcher)
            if model.engine.sleep != rouse_config::SleepApi::Vllm =>
        {
            "in mode dualPods the engine must be able to sleep: use vllm, with --enable-sleep-mode in its command"
        }
        Some(ProviderMode::Sleep | ProviderMode::Launcher | ProviderMode::Plain) => return Ok(()),
    };
    Err(Rejection::Unsupported(text).into())
}

/// Returns the spec fields that keep engines of this variant awake without requests. Each of them alone does.
fn keep_awake_fields(variant: &ModelVariant, is_cheapest: bool) -> Vec<&'static str> {
    let pinned = (variant.spec.pinned && is_cheapest).then_some("pinned");
    pinned.into_iter().chain(variant.kept_awake_by.iter().copied()).collect()
}

fn pairs(labels: &BTreeMap<String, String>) -> String {
    let pairs: Vec<_> = labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    if pairs.is_empty() { "no labels".to_owned() } else { pairs.join(",") }
}

/// Error for a model without variants, which the conversion never returns.
fn nothing_to_run() -> Rejections {
    Rejection::Spec("the model has no variant to run".to_owned()).into()
}

fn external(entry: &ModelEntry, model: &Arc<convert::ConvertedModel>) -> Result<ServedModel, Rejections> {
    let variant = model.variants.first().ok_or_else(nothing_to_run)?;
    let engine = Arc::clone(&model.engine);
    let name = variant.name.clone();
    Ok(ServedModel {
        uid: entry.version.uid.clone(),
        generation: entry.version.generation,
        model: Arc::clone(model),
        variants: vec![ServedVariant { name, engine, pool: None, quota: None, blocked_by: None }],
        spec: variant.spec.clone(),
        notes: Vec::new(),
    })
}

/// Takes from the decisions the right to put engines to sleep, except those of the variants that are `sleeping`.
fn without_sleep(served: ServedModel, sleeping: &BTreeSet<VariantName>) -> ServedModel {
    let awake = |variant: ServedVariant| {
        let engine =
            rouse_config::EngineConfig { sleep: rouse_config::SleepApi::None, ..(*variant.engine).clone() };
        ServedVariant { engine: Arc::new(engine), ..variant }
    };
    // The values of the model itself are those of the cheapest variant that runs.
    let may_sleep = served.cheapest().is_some_and(|variant| sleeping.contains(&variant.name));
    let mut spec = ModelSpec { can_sleep: served.spec.can_sleep && may_sleep, ..served.spec };
    for variant in spec.variants.iter_mut().filter(|variant| !sleeping.contains(&variant.name)) {
        variant.can_sleep = false;
    }
    let variants = served.variants.into_iter();
    let variants =
        variants.map(|variant| if sleeping.contains(&variant.name) { variant } else { awake(variant) });
    ServedModel { variants: variants.collect(), spec, ..served }
}

fn served(
    entry: &ModelEntry,
    model: &Arc<convert::ConvertedModel>,
    placed: &[VariantPlacement<'_>],
    mut notes: Vec<String>,
) -> Result<ServedModel, Rejections> {
    let is_dual = matches!(model.hosting, ModelHosting::DualPods(_));
    let mut specs: Vec<ModelSpec> = placed.iter().map(|placement| on_pool(placement, is_dual)).collect();
    let missing = distribute_min_replicas(model.min_replicas, placed, &mut specs);
    if missing > 0 {
        notes.push(format!(
            "only {} of the {} engines of minReplicas run without requests: the variants that run allow no more",
            model.min_replicas - missing,
            model.min_replicas
        ));
    }
    let mut spec = specs.first().cloned().ok_or_else(nothing_to_run)?;
    // One priority holds for all engines of a model: the lowest that their pools allow.
    let limits = placed.iter().filter_map(|place| Some((place.terms?.max_priority?, place.pool)));
    if let Some((most, pool)) = limits.min().filter(|(most, _)| *most < spec.priority) {
        spec.priority = most;
        notes.push(format!("the priority is limited to {most}, the highest that the pool '{pool}' allows"));
    }
    let variants = placed.iter().zip(&specs).map(|(placement, own)| ServedVariant {
        name: placement.variant.name.clone(),
        engine: engine_config(model, own.fingerprint),
        pool: Some(placement.pool.to_owned()),
        quota: placement.terms.and_then(|terms| terms.quota(&model.object.namespace)),
        blocked_by: placement.blocked_by.clone(),
    });
    let variants = variants.collect();
    if !is_alone(&model.variants) {
        let of = |(placement, own): (&VariantPlacement<'_>, &ModelSpec)| {
            EngineVariant::from_spec(placement.variant.name.clone(), placement.variant.cost, own)
        };
        spec.variants = placed.iter().zip(&specs).map(of).collect();
    }
    Ok(ServedModel {
        uid: entry.version.uid.clone(),
        generation: entry.version.generation,
        model: Arc::clone(model),
        variants,
        spec,
        notes,
    })
}

/// Whether the model has only the variant of a model that lists none.
fn is_alone(variants: &[ModelVariant]) -> bool {
    matches!(variants, [only] if only.name.is_default())
}

fn engine_config(model: &convert::ConvertedModel, fingerprint: u64) -> Arc<rouse_config::EngineConfig> {
    if model.engine.fingerprint == fingerprint {
        return Arc::clone(&model.engine);
    }
    Arc::new(rouse_config::EngineConfig { fingerprint, ..(*model.engine).clone() })
}

/// Gives the cheapest variants the engines of `min_replicas` that the variants' own leave.
///
/// Returns how many find no place.
fn distribute_min_replicas(
    min_replicas: u32,
    placed: &[VariantPlacement<'_>],
    specs: &mut [ModelSpec],
) -> u32 {
    let own = specs.iter().fold(0_u32, |sum, spec| sum.saturating_add(spec.min_replicas));
    let mut missing = min_replicas.saturating_sub(own);
    for (_, spec) in placed.iter().zip(specs).filter(|(placement, _)| placement.is_pinnable()) {
        let more = missing.min(spec.replicas.saturating_sub(spec.min_replicas));
        spec.min_replicas += more;
        missing -= more;
    }
    missing
}

/// Assigns a variant's spec to its pool.
///
/// The decisions pick accelerators of a pool with slots. Any other pool they treat as one accelerator with the memory of
/// all. `is_dual`: the model's mode is dualPods.
fn on_pool(placement: &VariantPlacement<'_>, is_dual: bool) -> ModelSpec {
    let spec = &placement.variant.spec;
    // With one slot for each accelerator, an engine has its accelerators to itself.
    let alone = placement.terms.is_some_and(|terms| terms.slots == 1);
    let (pool, count) = (placement.pool.into(), spec.accelerators.count());
    let accelerators = if placement.has_slots {
        AcceleratorRequirement::Slots { pool, count }
    } else {
        AcceleratorRequirement::InPool { pool, count }
    };
    // While an engine of dual pods starts, pairing lets no other one on its accelerators take or release memory, whether
    // or not the start measures it. The decisions must not order that either: pairing would execute it minutes later.
    let is_exclusive = placement.has_slots && is_dual;
    let explicit_memory = (spec.explicit_memory || alone) && !is_exclusive;
    ModelSpec { accelerators, explicit_memory, ..spec.clone() }
}
